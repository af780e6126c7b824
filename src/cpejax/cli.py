"""The command `cpejax`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cpejax._graph import Graph, listing
from cpejax._invert import PosteriorProgram, invert
from cpejax._program import Program

__all__ = ["app"]

SUFFIXES = (".svg", ".png")

app = typer.Typer(
    name="cpejax",
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

    A MODEL is a Python file that defines `program`, a NumPyro model, and, where it needs them,
    `args` and `kwargs` (what the program is called with) and `observed` (the names of its data sites).
    """


Model = Annotated[Path, typer.Argument(metavar="MODEL.py", help="A Python file that defines `program`.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


@app.command()
def graph(
    model: Model,
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
        loaded = load_model(model)
        with _blaming(model):
            prior = Graph.from_program(loaded.program, *loaded.args, observed=loaded.observed, **loaded.kwargs)
            posterior = invert(prior, how=how, order=order)
        console = Console()
        console.print(_table("Prior program", prior, prior.parents, depends="depends on", distributions=True))
        console.print(_table("Posterior program", posterior.graph, posterior.parents, depends="reads"))
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
        raise _Failure(f"{out} cannot be written: {error.strerror or error}. Name another file with --out.") from error
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


# ---- models


class LoadedModel(NamedTuple):
    """What a model file defines."""

    program: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    observed: list[str] | None


def load_model(path: Path) -> LoadedModel:
    """Run a model file and take `program` from it, and `args`, `kwargs` and `observed` if they are there."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise _Failure(f"{path} {what}. MODEL.py must be a Python file that defines `program`.")
    module = _run_file(path)
    program = getattr(module, "program", None)
    if not callable(program):
        found = "defines no `program`" if program is None else f"has a `program` that is a {type(program).__name__}"
        functions = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        hint = f" Its functions are {', '.join(functions)}: rename one, or add `program = ...`." if functions else ""
        raise _Failure(f"{path} {found}, expected a NumPyro model: def program(): ...{hint}")
    args, kwargs = getattr(module, "args", ()), getattr(module, "kwargs", {})
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise _Failure(
            f"{path}: `args` is a {type(args).__name__}, expected a tuple of what the program is called with."
        )
    if not isinstance(kwargs, Mapping):
        raise _Failure(
            f"{path}: `kwargs` is a {type(kwargs).__name__}, expected a dict of what the program is called with."
        )
    try:
        inspect.signature(program).bind(*args, **kwargs)
    except TypeError as error:
        raise _Failure(
            f"{path}: the program takes other arguments than it is given ({error}). "
            "Define `args` (a tuple) or `kwargs` (a dict) next to it."
        ) from error
    return LoadedModel(program, tuple(args), dict(kwargs), getattr(module, "observed", None))


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _Failure(f"{path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as if it were run as a script: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _Failure(f"{path} cannot be loaded: {_summary(error, path)}") from error
    finally:
        sys.path.pop(0)
    return module


# ---- errors


class _Failure(Exception):
    """An error that is explained in one paragraph."""


@contextmanager
def _errors_in_a_paragraph(debug: bool) -> Iterator[None]:
    try:
        yield
    except _Failure as failure:
        if debug:
            raise
        _fail(str(failure))


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Say that an error is the model's."""
    try:
        yield
    except Exception as error:
        raise _Failure(f"{path}: {_summary(error, path)}") from error


def _summary(error: Exception, path: Path) -> str:
    """An error in a sentence: our own messages as they are, others with their type and the line in the model."""
    ours = isinstance(error, ValueError | TypeError) and _raised_here(error)
    if ours:
        return str(error)
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
    return words + (f" (line {lines[-1].lineno}: {lines[-1].line})" if lines else "")


def _raised_here(error: Exception) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(last).resolve().is_relative_to(Path(__file__).resolve().parent)


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), message))
    raise typer.Exit(1)
