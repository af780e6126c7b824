"""The page of the benchmark: one HTML file with its tables, which can be sorted, and its figures."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from cpejax.runs.bench.config import Config
from cpejax.runs.bench.figures import all_figures
from cpejax.runs.bench.table import RESULTS, beside_published, by_task, means, published, read_table
from cpejax.runs.page_figures import PageFigures
from cpejax.util.files import write_atomically

DIGITS = {"acceptance": 3, "ess": 0, "weights": 0, "epochs": 0, "budget": 0, "rows": 0, "megabytes": 0}
DIGITS |= {f"seconds_{what}": 1 for what in ("simulate", "fit", "draw")}
TEXT = ("task", "variant", "published", "method", "solver", "note")


def write_page(config: Config, folder: Path, *, draws: bool = True) -> None:
    """Write `index.html` from the table, and with `draws` from draws and references too."""
    table = read_table(folder / RESULTS)
    figures = PageFigures()
    drawn = [
        figures.add(figure.draw, figure.caption, figure.caption) for figure in all_figures(config, folder, draws=draws)
    ]
    by_method = means(table)
    grids = []
    for budget in sorted(set(by_method["budget"])):
        grids.append((f"{budget:,} simulations", cells(by_task(table, budget).reset_index())))
    missing = table[table["c2st"].isna()]
    shown = beside_published(table)
    page = _template().render(
        title="Benchmark",
        made=[f"{len(table):,} rows", *made_with(table)],
        grids=grids,
        beside=cells(shown) if len(shown) else None,
        sources=published()["sources"],
        means=cells(by_method),
        missing=cells(missing[["task", "method", "solver", "budget", "note"]].drop_duplicates())
        if len(missing)
        else None,
        figures=drawn,
    )
    write_atomically(folder / "index.html", page.encode())


def made_with(table: pd.DataFrame) -> list[str]:
    """The versions that the rows were made with."""
    names = [name for name in table if str(name).startswith("version_")]
    return [f"{str(n).removeprefix('version_')} {', '.join(map(str, sorted(set(table[n].dropna()))))}" for n in names]


def cells(frame: pd.DataFrame) -> dict[str, Any]:
    """A table for the template: names of columns, whether they are text, and rows of texts and numbers to sort by."""
    columns = [{"name": str(name).replace("_", " "), "text": name in TEXT} for name in frame.columns]
    rows = [
        [(_written(str(name), value), value) for name, value in zip(frame.columns, row, strict=True)]
        for row in frame.itertuples(index=False, name=None)
    ]
    return {"columns": columns, "rows": rows}


def _written(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return ""
    return f"{value:,.{DIGITS.get(name, 3)}f}"


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("cpejax.runs", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("bench.html")
