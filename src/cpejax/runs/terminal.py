"""What the command prints and draws: tables of sites, summaries and checks, and the figure of a graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cpejax.program.graph import Graph, listing
from cpejax.program.inverse import PosteriorProgram
from cpejax.runs.folder import RunFolder
from cpejax.runs.model_file import Failure


def draw_graph(prior: Graph, posterior: PosteriorProgram, out: Path) -> None:
    """Write the figure of both programs."""
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


def site_table(
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


def show_summary(
    run: RunFolder, draws: xr.DataTree, truth: Mapping[str, np.ndarray] | None = None, most: int = 40
) -> None:
    """Print the summary of draws, as wide as the terminal allows."""
    from cpejax.runs.summary import summarise  # slow to import, as SciPy is

    rows, console = summarise(draws, run.graph, truth).reset_index(), Console()
    table = _numbers(rows.head(most))
    if Measurement.get(console, console.options.update(max_width=10_000), table).maximum > console.width:
        table = _numbers(rows.head(most).drop(columns=["q25", "q75"]))  # they are in summary.csv
    console.print(table)
    if len(rows) > most:
        console.print(Text(f"{len(rows) - most} more rows are in {run.folder / 'summary.csv'}."))


def _numbers(rows: pd.DataFrame) -> Table:
    from cpejax.runs.summary import places

    names = {"q05": "5 %", "q25": "25 %", "q75": "75 %", "q95": "95 %"}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in rows.columns:
        text = name in ("parameter", "observation")
        table.add_column(names.get(name, name), justify="left" if text else "right", no_wrap=True)
    for row in rows.itertuples(index=False):
        decimals = places(row.sd)
        table.add_row(*(Text(_cell(x, decimals)) for x in row))
    return table


def _cell(x: Any, decimals: int | None) -> str:
    if isinstance(x, str | int):
        return str(x)
    return f"{x:.4g}" if decimals is None else f"{x:.{decimals}f}"


def show_checks(run: RunFolder) -> None:
    """Print the checks, and what to open."""
    console = Console()
    about = json.loads((run.folder / "check.json").read_text())
    for finding in about["findings"]:
        mark = ("ok   ", "bold green") if finding["ok"] else ("BAD  ", "bold red")
        console.print(Text.assemble(mark, (f"{finding['check']}: ", "bold"), finding["sentence"]))
    console.print()
    report = (run.folder / "report.html").resolve()
    outcome = "All checks passed." if about["ok"] else "Some checks failed: read them before you use the posterior."
    console.print(Text.assemble((outcome, "bold"), f" Open {report.as_uri()}"), soft_wrap=True)
