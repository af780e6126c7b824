"""The commands about tasks: `cpejax tasks`, `cpejax data` and `cpejax bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cpejax.program.graph import listing
from cpejax.runs.errors import errors_in_a_paragraph
from cpejax.runs.options import Debug, Epochs

Tasks = Annotated[
    str | None,
    typer.Option(
        help="Tasks, separated by commas: names (`cpejax tasks` lists them), `paper`, `sbibm` or `simformer` for all "
        "of these, or Python files that define TASK.",
        metavar="NAMES",
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Methods, separated by commas: names, `all` (of this library), or Python files that define METHOD.",
        metavar="NAMES",
    ),
]
Budgets = Annotated[
    str | None, typer.Option(help="Numbers of simulations, separated by commas.  [default: 10000]", metavar="NUMBERS")
]
Seeds = Annotated[str | None, typer.Option(help="Separated by commas.  [default: 0,1,2,3,4]", metavar="NUMBERS")]
Out = Annotated[Path, typer.Option(help="The folder of the results.", metavar="OUT")]
Config = Annotated[
    Path | None, typer.Option(help="A JSON file with these options; others given here go before it.", metavar="FILE")
]
Draws = Annotated[int | None, typer.Option(help="Draws for each observation.  [default: 10000]", min=20)]
Observations = Annotated[
    int | None, typer.Option(help="The maximum number of observations of each task.  [default: 10]", min=1)
]
C2ST = Annotated[
    str | None,
    typer.Option(help="`fast`, `mlp` (the published definition: slow), or both.  [default: fast]", metavar="NAMES"),
]
Jobs = Annotated[int, typer.Option(help="Cores of this machine, or jobs on the cluster at a time.", min=1)]
More = Annotated[
    list[str] | None, typer.Argument(help="Further options of Snakemake, after `--`.", metavar="[-- OPTIONS]")
]
SoFar = Annotated[
    bool, typer.Option("--so-far", help="Run nothing: table, figures and page of what is done in OUT, now.")
]
Known = Annotated[
    Path | None,
    typer.Option(help="A table of results, as `results.csv`: fits that it has are not run.", metavar="FILE"),
]
Slurm = Annotated[bool, typer.Option("--slurm", help="Run on a cluster, by Slurm.")]


def tasks() -> None:
    """List the benchmark tasks: models whose posteriors are known.

    Each is a NumPyro program with five observations and draws from its posterior: in Python `cpe.tasks.get(NAME)` and
    `cpe.reference(NAME, seed)`. Those of sbi's benchmark have ten observations, which `cpejax data sbibm` downloads.
    """
    from cpejax import tasks as package  # other commands need none of them

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("task", "parameters", "data", "plates"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("parameters", "data") else "left")
    table.add_column("source")
    for task in map(package.get, [*package.names(), *package.sbibm.names(), *package.simformer.names()]):
        where = listing(tuple(f"{name}[{size}]" for name, size in task.plates.items()))
        table.add_row(*map(Text, (task.name, str(task.theta_dim), str(task.x_dim), where, task.source)))
    Console().print(table)


def data(
    name: Annotated[Literal["sbibm"], typer.Argument(help="Of which benchmark.", metavar="NAME")],
    wheel: Annotated[
        Path | None, typer.Option(help="The wheel of `sbibm` 1.1.0, if it is there already.", metavar="FILE")
    ] = None,
    debug: Debug = False,
) -> None:
    """Download the observations and reference draws of a benchmark.

    `cpejax data sbibm` downloads the wheel `sbibm` 1.1.0 (19 MB) with pip and unpacks its tables of numbers into the
    user's cache, or `$CPEJAX_CACHE`. Nothing is installed and none of its code is run.
    """
    with errors_in_a_paragraph(debug):
        from cpejax import tasks as package

        folder = {"sbibm": package.sbibm.download}[name](wheel)
        Console().print(Text(f"Wrote {folder}"), soft_wrap=True)


def bench(
    more: More = None,
    tasks: Tasks = None,
    methods: Methods = None,
    budgets: Budgets = None,
    seeds: Seeds = None,
    out: Out = Path("bench"),
    config: Config = None,
    draws: Draws = None,
    observations: Observations = None,
    c2st: C2ST = None,
    epochs: Epochs = None,
    jobs: Jobs = 2,
    slurm: Slurm = False,
    so_far: SoFar = False,
    known: Known = None,
    debug: Debug = False,
) -> None:
    """Run methods on benchmark tasks, and put the results into one table and one page.

    A workflow of Snakemake (`pip install 'cpejax[bench]'`): references, simulations, fits, draws, metrics. Writes into
    the folder OUT `results.csv`, a row for each task, method, budget, seed, observation and solver; `figures/`;
    `index.html`, the page; `config.json`, the options. Interrupted or killed, the same command resumes, as does
    `cpejax bench --out OUT`; `cpejax bench --out OUT --so-far` writes the same files of what is done by now.

    Example: `cpejax bench --tasks two_moons,slcp --methods CPE,FMPE --budgets 1000 --seeds 0,1`
    """
    with errors_in_a_paragraph(debug):
        from cpejax.runs.bench.command import chosen_config, run_workflow, write_results

        training = None if epochs is None else {"max_epochs": epochs}
        given: dict[str, Any] = {"tasks": tasks, "methods": methods, "budgets": budgets, "seeds": seeds, "c2st": c2st}
        given |= {"draws": draws, "observations": observations, "training": training}
        options = chosen_config(given, config, out)
        options.check()
        page = write_results(options, out) if so_far else run_workflow(options, out, jobs, slurm, more or [], known)
        Console().print(Text(f"Wrote {out / 'results.csv'}. Open {page.resolve().as_uri()}"), soft_wrap=True)
