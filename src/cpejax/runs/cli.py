"""The command `cpejax`."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from cpejax.program.graph import Graph, listing
from cpejax.program.inverse import PosteriorProgram, invert
from cpejax.runs.model_file import Failure, blaming, load_model, summary

if TYPE_CHECKING:
    from cpejax.runs.folder import Run

__all__ = ["app"]

SUFFIXES = (".svg", ".png")


class _Command(TyperGroup):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; where the terminal has no such letter, a site named θ is printed as its code."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **kwargs)


app = typer.Typer(
    name="cpejax",
    cls=_Command,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"cpejax {version('cpejax')}")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Infer the parameters of a NumPyro program from simulations.

    `cpejax infer MODEL.py --given data.json --out run/` does it all: it simulates, trains, draws from the posterior,
    checks it and writes a report. `simulate`, `fit`, `sample` and `check` are its stages, one by one.

    A MODEL is a Python file that defines `program`, a NumPyro model, and, where it needs them,
    `args` and `kwargs` (what the program is called with), `observed` (the names of its data sites),
    `method` (such as `cpe.CPE(embed=...)`), `data` (the observed data, if not in a file) and `truth` (the parameters,
    if they are known).
    """


ModelFile = Annotated[Path, typer.Argument(metavar="MODEL.py", help="A Python file that defines `program`.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


# ---- runs

Out = Annotated[Path, typer.Option("--out", metavar="RUN", help="The folder of the run.")]
Given = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The observed data: JSON, CSV, npz or NetCDF, with a value for each data site. "
        "Left out: that of the run, if it was begun with one, or `data` in the model file.",
    ),
]
Simulations = Annotated[
    int | None, typer.Option(min=20, metavar="N", help="Simulations to train on.", show_default="10000")
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Decides all random numbers.", show_default="0")
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="cpe, triangularcpe, discretecpe, fmpe, pse, aio, or one that the model file defines.",
        show_default="that of the model file, or cpe",
    ),
]
Epochs = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="The most epochs to train for.", show_default="2000")
]
Steps = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Gradient steps to train for.", show_default="20000")
]
Draws = Annotated[int | None, typer.Option(min=1, metavar="N", help="Draws from the posterior.", show_default="4000")]
CheckSimulations = Annotated[
    int | None, typer.Option(min=20, metavar="N", help="New simulations to check with.", show_default="1000")
]
Truth = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The true parameters, if they are known, to be shown beside the posterior."),
]
Fitted = Annotated[
    Path | None,
    typer.Option("--fit", metavar="RUN", help="Use the model that this run has fitted; nothing is trained."),
]
Timeout = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="What one call of a simulator on the host may take; 0: no limit."),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        help="Instead of an error, replace what the run has made, or begun, from other inputs, and what is damaged.",
    ),
]


@app.command()
def infer(
    model: ModelFile,
    given: Given = None,
    out: Out = Path("run"),
    simulations: Simulations = None,
    method: MethodName = None,
    epochs: Epochs = None,
    steps: Steps = None,
    draws: Draws = None,
    check_simulations: CheckSimulations = None,
    truth: Truth = None,
    fit: Fitted = None,
    seed: Seed = None,
    timeout: Timeout = 600.0,
    restart: Restart = False,
    debug: Debug = False,
) -> None:
    """From a model and data to a posterior, checked, with a report.

    Simulates from the program, trains on the simulations, draws from the posterior of the data, checks whether it can
    be trusted, and writes into the folder RUN:

    - `report.html`, the report: open it in a browser
    - `posterior.nc`, the draws, for ArviZ; `summary.csv`, their mean, sd and quantiles
    - `check.json`, the checks; `model/`, the fitted model, for `cpe.load`
    - `simulations.npz` and `check_simulations.npz`, the simulations; `run.json`, what was made from what

    Each is written as its stage completes. After an interruption the same command resumes: options that are left out
    are those the run was begun with.

    For other data, without training again:
    `cpejax infer MODEL.py --given other.json --fit run/ --out other/`

    Example: `cpejax infer examples/hierarchical.py --given examples/hierarchical.json --out run/`
    """
    with _running(model, out, restart, timeout, debug) as (run, stages):
        values, true, files = stages.read_observation(run, given, truth)  # before hours of simulation
        other = stages.other_fit(run, fit)
        options: dict[str, dict[str, Any]] = {
            "simulate": {"simulations": simulations, "seed": seed},
            "fit": {"method": method, "epochs": epochs, "steps": steps, "seed": seed},
            "sample": {"given": files["given"], "fit": None, "draws": draws, "seed": seed},
            "check": {"truth": files["truth"], "check_simulations": check_simulations, "seed": seed},
        }
        if other is not None:
            _refuse_training(other, {**options.pop("simulate"), **options.pop("fit")})
            posterior, source = stages.fitted(run, other)
            options["sample"]["fit"] = source
            run.choose(options)
        else:
            run.choose(options)
            stages.run_simulate(run)
            stages.run_fit(run)
            posterior, source = stages.fitted(run, None)
        tree = stages.run_sample(run, posterior, source, values)
        stages.run_check(run, posterior, source, values, true, tree)
        _show(run, stages.summarise(tree, run.graph, true))
        _show_check(run)


@app.command()
def simulate(
    model: ModelFile,
    out: Out = Path("run"),
    simulations: Simulations = None,
    seed: Seed = None,
    timeout: Timeout = 600.0,
    restart: Restart = False,
    debug: Debug = False,
) -> None:
    """The first stage of a run: simulate.

    Draws parameters and data from the program and writes `RUN/simulations.npz`, an array for each site. A simulation
    that was interrupted resumes.

    Example: `cpejax simulate examples/sir.py --out run/ --simulations 5000`
    """
    with _running(model, out, restart, timeout, debug) as (run, stages):
        run.choose({"simulate": {"simulations": simulations, "seed": seed}})
        stages.run_simulate(run)
        _next(run, "fit")


@app.command()
def fit(
    model: ModelFile,
    out: Out = Path("run"),
    method: MethodName = None,
    epochs: Epochs = None,
    steps: Steps = None,
    seed: Seed = None,
    restart: Restart = False,
    debug: Debug = False,
) -> None:
    """The second stage of a run: train a posterior on the simulations.

    Reads `RUN/simulations.npz` and writes `RUN/model/`, which `cpe.load("RUN/model", program)` reads in Python.
    Training that was interrupted resumes.

    Example: `cpejax fit examples/sir.py --out run/`
    """
    with _running(model, out, restart, 0.0, debug) as (run, stages):
        run.choose({"fit": {"method": method, "epochs": epochs, "steps": steps, "seed": seed}})
        stages.run_fit(run)
        _next(run, "sample")


@app.command()
def sample(
    model: ModelFile,
    given: Given = None,
    out: Out = Path("run"),
    draws: Draws = None,
    fit: Fitted = None,
    seed: Seed = None,
    restart: Restart = False,
    debug: Debug = False,
) -> None:
    """The third stage of a run: draw from the posterior of the data.

    Reads `RUN/model/`, or the model of another run (`--fit`), and writes `RUN/posterior.nc` and `RUN/summary.csv`.

    Example: `cpejax sample examples/sir.py --given data.json --out run/`
    """
    with _running(model, out, restart, 0.0, debug) as (run, stages):
        values, _, data = stages.read_given(run, given)
        posterior, source = stages.fitted(run, fit)
        run.choose({"sample": {"given": data, "fit": source, "draws": draws, "seed": seed}})
        tree = stages.run_sample(run, posterior, source, values)
        _show(run, stages.summarise(tree, run.graph))
        _next(run, "check")


@app.command()
def check(
    model: ModelFile,
    given: Given = None,
    out: Out = Path("run"),
    check_simulations: CheckSimulations = None,
    truth: Truth = None,
    fit: Fitted = None,
    seed: Seed = None,
    timeout: Timeout = 600.0,
    restart: Restart = False,
    debug: Debug = False,
) -> None:
    """The last stage of a run: check the posterior, and write the report.

    Draws from the posteriors of new simulations, whose parameters are known, and tests whether they are calibrated;
    tests whether the data are typical of the program, and whether the posterior reproduces them. Writes
    `RUN/check.json` and `RUN/report.html`.

    Example: `cpejax check examples/sir.py --given data.json --out run/`
    """
    with _running(model, out, restart, timeout, debug) as (run, stages):
        values, true, files = stages.read_observation(run, given, truth)
        posterior, source = stages.fitted(run, fit)
        if "sample" not in run.record["stages"]:
            raise Failure(f"{run.folder} has no draws to report. First: cpejax sample {model} --out {run.folder}")
        options = {"truth": files["truth"], "check_simulations": check_simulations, "seed": seed}
        run.choose({"sample": {"given": files["given"], "fit": source}, "check": options})
        tree = stages.run_sample(run, posterior, source, values)
        stages.run_check(run, posterior, source, values, true, tree)
        _show_check(run)


@contextmanager
def _running(model: Path, out: Path, restart: bool, timeout: float, debug: bool) -> Iterator[tuple[Run, Any]]:
    """A run, alone in its folder, and the stages; errors in a paragraph, and an interruption said to be one."""
    with _errors_in_a_paragraph(debug):
        loaded = load_model(model)
        from cpejax.runs import folder as stages

        command = ["cpejax", *sys.argv[1:]]
        run = stages.Run(out, loaded, command=command, restart=restart, timeout=timeout)
        try:
            with run.locked():
                yield run, stages
        except (stages.Interrupted, KeyboardInterrupt) as interruption:
            if debug:
                raise
            words = str(interruption) or "Interrupted."
            run.say(f"{words} {stages.go_on(run.folder)}")
            raise typer.Exit(130) from None


def _refuse_training(other: Path, options: Mapping[str, Any]) -> None:
    """An error if there are options of training where nothing is trained."""
    given = [name for name, value in options.items() if value is not None and name != "seed"]
    if given:
        raise Failure(f"--{given[0]} has no effect with the model of another run (--fit {other}): nothing is trained.")


def _show(run: Run, frame: Any, most: int = 40) -> None:
    """The numbers, in the terminal."""
    rows, console = frame.reset_index(), Console()
    table = _numbers(rows.head(most))
    if Measurement.get(console, console.options.update(max_width=10_000), table).maximum > console.width:
        table = _numbers(rows.head(most).drop(columns=["q25", "q75"]))  # they are in summary.csv
    console.print(table)
    if len(rows) > most:
        console.print(Text(f"{len(rows) - most} more rows are in {run.folder / 'summary.csv'}."))


def _numbers(rows: Any) -> Table:
    names = {"q05": "5 %", "q25": "25 %", "q75": "75 %", "q95": "95 %"}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in rows.columns:
        text = name in ("parameter", "observation")
        table.add_column(names.get(name, name), justify="left" if text else "right", no_wrap=True)
    from cpejax.runs.report import places

    for row in rows.itertuples(index=False):
        decimals = places(row.sd)
        table.add_row(*(Text(_cell(x, decimals)) for x in row))
    return table


def _cell(x: Any, decimals: int | None) -> str:
    if isinstance(x, str | int):
        return str(x)
    return f"{x:.4g}" if decimals is None else f"{x:.{decimals}f}"


def _show_check(run: Run) -> None:
    """The checks, in the terminal, and what to open."""
    import json

    console = Console()
    about = json.loads((run.folder / "check.json").read_text())
    for finding in about["findings"]:
        mark = ("ok   ", "bold green") if finding["ok"] else ("BAD  ", "bold red")
        console.print(Text.assemble(mark, (f"{finding['check']}: ", "bold"), finding["sentence"]))
    console.print()
    report = (run.folder / "report.html").resolve()
    outcome = "All checks passed." if about["ok"] else "Some checks failed: read them before you use the posterior."
    console.print(Text.assemble((outcome, "bold"), f" Open {report.as_uri()}"), soft_wrap=True)


def _next(run: Run, stage: str) -> None:
    run.say(f"Next: cpejax {stage} {run.model.path} --out {run.folder}")


@app.command()
def graph(
    model: ModelFile,
    out: Annotated[
        Path, typer.Option(help="The figure to write, .svg or .png; an older one is replaced.", metavar="FILE")
    ] = Path("graph.svg"),
    how: Annotated[
        Literal["faithful", "reverse"],
        typer.Option(
            help="How to invert: `faithful` claims no independence that the model lacks; `reverse` flips every edge."
        ),
    ] = "faithful",
    order: Annotated[
        Literal["prior", "leaf"],
        typer.Option(help="What a faithful inverse draws first: `prior` the causes, `leaf` the effects."),
    ] = "prior",
    debug: Debug = False,
) -> None:
    """Show a program's graph and its inverse, and draw both.

    Prints the prior program (what each site depends on) and the posterior program (in which order parameters are drawn
    from the posterior, and what each must read), and writes one figure with both side by side.

    Example: `cpejax graph examples/hierarchical.py --out hierarchical.png`
    """
    if out.suffix.lower() not in SUFFIXES:
        ending = f"ends in '{out.suffix}'" if out.suffix else "has no suffix"
        raise typer.BadParameter(f"{out} {ending}; a figure is .svg or .png.", param_hint="--out")
    with _errors_in_a_paragraph(debug):
        prior = load_model(model).graph()
        with blaming(model):
            posterior = invert(prior, how=how, order=order)
        console = Console()
        console.print(_table("Prior program", prior, prior.parents, depends="depends on", distributions=True))
        console.print(_table("Posterior program", posterior.graph, posterior.parents, depends="reads"))
        for note in prior.notes():
            console.print(Text(" ".join(note.split())))
        for plate, why in posterior.graph.unrolled.items():
            console.print(Text(f"Plate '{plate}' is unrolled: {why}."))
        _draw(prior, posterior, out)
        console.print(Text(f"Wrote {out}"), soft_wrap=True)


def _draw(prior: Graph, posterior: PosteriorProgram, out: Path) -> None:
    from matplotlib import pyplot as plt  # slow to import, and other commands need no figure

    from cpejax import plot

    figure = plot.graph(prior, posterior)
    try:
        # The same program gives the same file: no date, and no random names inside.
        with plt.rc_context({"svg.hashsalt": "cpejax"}):
            figure.savefig(out, dpi=200, metadata={"Date": None} if out.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise Failure(f"{out} cannot be written: {error.strerror or error}. Name another file with --out.") from error
    finally:
        plt.close(figure)


def _table(
    title: str, graph: Graph, parents: Mapping[str, tuple[str, ...]], depends: str, distributions: bool = False
) -> Table:
    """The sites, in the order of `parents`."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("site", depends, *(["distribution"] if distributions else []), "shape", "plates"):
        table.add_column(column, overflow="fold")
    for name, reads in parents.items():
        site = graph.sites[name]
        distribution = [site.distribution + (", data" if site.observed else "")] if distributions else []
        shape = str(site.event_shape) if site.size > 1 else "·"
        table.add_row(*map(Text, (name, listing(reads), *distribution, shape, graph.where(site) or "·")))
    return table


@app.command()
def tasks() -> None:
    """List the benchmark tasks: models whose posteriors are known.

    Each is a NumPyro program with five observations and draws from its posterior: in Python `cpe.tasks.get(NAME)` and
    `cpe.reference(NAME, seed)`.
    """
    from cpejax import tasks as package  # other commands need none of them

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("task", "parameters", "data", "plates"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("parameters", "data") else "left")
    table.add_column("source")
    for task in map(package.get, package.names()):
        plates = Graph.from_program(task.program, observed=task.observed).plates
        where = listing(tuple(f"{name}[{size}]" for name, size in plates.items()))
        table.add_row(*map(Text, (task.name, str(task.theta_dim), str(task.x_dim), where, task.source)))
    Console().print(table)


# ---- errors


@contextmanager
def _errors_in_a_paragraph(debug: bool) -> Iterator[None]:
    callbacks = logging.getLogger("jax._src.callback")  # JAX logs the traceback of what a simulator on the host raises
    level = callbacks.level
    if not debug:
        callbacks.setLevel(logging.CRITICAL)
    try:
        yield
    except Failure as failure:
        if debug:
            raise
        _fail(str(failure))
    except Exception as error:
        if debug or isinstance(error, typer.Exit | typer.BadParameter | typer.Abort):
            raise
        _fail(f"{summary(error)} (Run it again with --debug to see where this happened.)")
    finally:
        callbacks.setLevel(level)


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=True)
    raise typer.Exit(1)
