"""The command `cpejax`."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from cpejax.program.inverse import invert
from cpejax.runs.bench.cli import bench, data, tasks
from cpejax.runs.errors import errors_in_a_paragraph
from cpejax.runs.folder import RunFolder
from cpejax.runs.job_parts import parse_part
from cpejax.runs.model_file import Failure, blaming, load_model
from cpejax.runs.observation import read_given, read_observation
from cpejax.runs.options import (
    CheckSimulations,
    Debug,
    Draws,
    Epochs,
    Fitted,
    Given,
    MethodName,
    ModelPath,
    Out,
    Part,
    Refine,
    Restart,
    Seed,
    Simulations,
    Steps,
    Timeout,
    Truth,
    Workers,
)
from cpejax.runs.terminal import draw_graph, show_checks, show_summary, site_table
from cpejax.runs.watchdog import Interrupted, how_to_resume
from cpejax.runs.workers import check_option

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


@app.command()
def infer(
    model: ModelPath,
    given: Given = None,
    out: Out = Path("run"),
    simulations: Simulations = None,
    method: MethodName = None,
    epochs: Epochs = None,
    steps: Steps = None,
    draws: Draws = None,
    refine: Refine = None,
    check_simulations: CheckSimulations = None,
    truth: Truth = None,
    fit: Fitted = None,
    seed: Seed = None,
    timeout: Timeout = 600.0,
    workers: Workers = None,
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
    with _running(model, out, restart, timeout, debug, workers) as (run, stages):
        values, true, files = read_observation(run, given, truth)  # before hours of simulation
        other = stages.other_fit(run, fit)
        begun = run.record["options"]  # simulations that were asked for, now or before, are what is trained on
        fresh = None if "fit" in begun and simulations is None else simulations is None and "simulate" not in begun
        options: dict[str, dict[str, Any]] = {
            "simulate": {"simulations": simulations, "seed": seed},
            "fit": {"method": method, "epochs": epochs, "steps": steps, "seed": seed, "fresh": fresh},
            "sample": {"given": files["given"], "fit": None, "draws": draws, "refine": refine, "seed": seed},
            "check": {"truth": files["truth"], "check_simulations": check_simulations, "seed": seed},
        }
        if other is not None:
            _refuse_training(other, {**options.pop("simulate"), **options.pop("fit"), "fresh": None})
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
        show_summary(run, tree, true)
        show_checks(run)


@app.command()
def simulate(
    model: ModelPath,
    out: Out = Path("run"),
    simulations: Simulations = None,
    part: Part = None,
    seed: Seed = None,
    timeout: Timeout = 600.0,
    workers: Workers = None,
    restart: Restart = False,
    debug: Debug = False,
) -> None:
    """The first stage of a run: simulate.

    Draws parameters and data from the program and writes `RUN/simulations.npz`, an array for each site. A simulation
    that was interrupted resumes.

    With `--part 3/100` it simulates the third of 100 parts, into `RUN/parts/`, and any number of such commands may run
    at a time, on as many machines: a Slurm array. `cpejax fit` takes the parts that are there, and `cpejax simulate`
    without `--part` simulates those that are missing.

    Example: `cpejax simulate examples/sir.py --out run/ --simulations 5000`
    """
    options = {"simulations": simulations, "seed": seed}
    if part is not None:
        with errors_in_a_paragraph(debug):
            number, of = parse_part(part)
        options["parts"] = of
        with _running(model, out, restart, timeout, debug, workers, options) as (run, stages):
            stages.run_part(run, number)
        return
    with _running(model, out, restart, timeout, debug, workers) as (run, stages):
        run.choose({"simulate": options})
        stages.run_simulate(run, all_parts=True)
        _next(run, "fit")


@app.command()
def fit(
    model: ModelPath,
    out: Out = Path("run"),
    method: MethodName = None,
    epochs: Epochs = None,
    steps: Steps = None,
    seed: Seed = None,
    restart: Restart = False,
    debug: Debug = False,
) -> None:
    """The second stage of a run: train a posterior on the simulations.

    Reads `RUN/simulations.npz` and writes `RUN/model/`, which `cpe.load("RUN/model", model)` reads in Python.
    Training that was interrupted resumes.

    Example: `cpejax fit examples/sir.py --out run/`
    """
    with _running(model, out, restart, 0.0, debug) as (run, stages):
        run.choose({"fit": {"method": method, "epochs": epochs, "steps": steps, "seed": seed}})
        stages.run_fit(run)
        _next(run, "sample")


@app.command()
def sample(
    model: ModelPath,
    given: Given = None,
    out: Out = Path("run"),
    draws: Draws = None,
    refine: Refine = None,
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
        values, _, data = read_given(run, given)
        posterior, source = stages.fitted(run, fit)
        run.choose({"sample": {"given": data, "fit": source, "draws": draws, "refine": refine, "seed": seed}})
        tree = stages.run_sample(run, posterior, source, values)
        show_summary(run, tree)
        _next(run, "check")


@app.command()
def check(
    model: ModelPath,
    given: Given = None,
    out: Out = Path("run"),
    check_simulations: CheckSimulations = None,
    truth: Truth = None,
    fit: Fitted = None,
    seed: Seed = None,
    timeout: Timeout = 600.0,
    workers: Workers = None,
    restart: Restart = False,
    debug: Debug = False,
) -> None:
    """The last stage of a run: check the posterior, and write the report.

    Draws from the posteriors of new simulations, whose parameters are known, and tests whether they are calibrated;
    tests whether the data are typical of the program, and whether the posterior reproduces them. Writes
    `RUN/check.json` and `RUN/report.html`.

    Example: `cpejax check examples/sir.py --given data.json --out run/`
    """
    with _running(model, out, restart, timeout, debug, workers) as (run, stages):
        values, true, files = read_observation(run, given, truth)
        posterior, source = stages.fitted(run, fit)
        if "sample" not in run.record["stages"]:
            raise Failure(f"{run.folder} has no draws to report. First: cpejax sample {model} --out {run.folder}")
        options = {"truth": files["truth"], "check_simulations": check_simulations, "seed": seed}
        run.choose({"sample": {"given": files["given"], "fit": source}, "check": options})
        tree = stages.run_sample(run, posterior, source, values)
        stages.run_check(run, posterior, source, values, true, tree)
        show_checks(run)


@contextmanager
def _running(
    model: Path,
    out: Path,
    restart: bool,
    timeout: float,
    debug: bool,
    workers: str | None = None,
    part: Mapping[str, Any] | None = None,
) -> Iterator[tuple[RunFolder, Any]]:
    """A run, alone in its folder, and the stages; errors in a paragraph, and an interruption said to be one.

    `part`: the options of simulating a part, which need not be alone.
    """
    with errors_in_a_paragraph(debug):
        check_option(workers)
        loaded = load_model(model)
        from cpejax.runs import stages  # slow to import, and a wrong model file is told at once

        command = ["cpejax", *sys.argv[1:]]
        run = RunFolder(out, loaded, command=command, restart=restart, timeout=timeout, workers=workers)
        try:
            with run.locked() if part is None else run.joined(part):
                yield run, stages
        except (Interrupted, KeyboardInterrupt) as interruption:
            if debug:
                raise
            words = str(interruption) or "Interrupted."
            run.say(f"{words} {how_to_resume(run.folder)}")
            raise typer.Exit(130) from None


def _refuse_training(other: Path, options: Mapping[str, Any]) -> None:
    """An error if there are options of training where nothing is trained."""
    given = [name for name, value in options.items() if value is not None and name != "seed"]
    if given:
        raise Failure(f"--{given[0]} has no effect with the model of another run (--fit {other}): nothing is trained.")


def _next(run: RunFolder, stage: str) -> None:
    run.say(f"Next: cpejax {stage} {run.model.path} --out {run.folder}")


@app.command()
def graph(
    model: ModelPath,
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
    with errors_in_a_paragraph(debug):
        prior = load_model(model).graph()
        with blaming(model):
            posterior = invert(prior, how=how, order=order)
        console = Console()
        console.print(site_table("Prior program", prior, prior.parents, depends="depends on", distributions=True))
        console.print(site_table("Posterior program", posterior.graph, posterior.parents, depends="reads"))
        for note in prior.notes():
            console.print(Text(" ".join(note.split())))
        for plate, why in posterior.graph.unrolled.items():
            console.print(Text(f"Plate '{plate}' is unrolled: {why}."))
        draw_graph(prior, posterior, out)
        console.print(Text(f"Wrote {out}"), soft_wrap=True)


app.command()(tasks)
app.command()(data)
app.command()(bench)
