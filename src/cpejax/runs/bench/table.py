"""The table of results: a row for each task, method, budget, seed, observation and solver; its means."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from cpejax import tasks
from cpejax.runs.bench.config import Config, Run
from cpejax.runs.bench.methods import METHODS
from cpejax.runs.bench.peers import PEERS
from cpejax.runs.model_file import Failure
from cpejax.util.files import write_atomically

KEYS = ["task", "method", "budget", "seed", "observation", "solver"]
MADE = "made"
"""When a row was computed, in UTC."""
RESULTS = "results.csv"
MEAN = "mean of tasks that all have"


def write_table(folder: Path) -> None:
    """Put the rows of all fits that are done into one file."""
    table = rows_so_far(folder)
    write_atomically(folder / RESULTS, csv_of(table))


def rows_so_far(folder: Path) -> pd.DataFrame:
    """The rows of all fits of a folder that are done, whatever its config asks for now."""
    files = sorted((folder / "metrics").rglob("*.csv"))
    if not files:
        raise Failure(f"{folder} has no results yet: expected files in {folder / 'metrics'}, which its jobs write.")
    parts = []
    for file in files:
        part = read_csv(file)
        if MADE not in part:
            part[MADE] = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
        parts.append(part)
    table = pd.concat(parts, ignore_index=True)
    repeated = table[table.duplicated(KEYS)]
    if len(repeated):
        raise ValueError(f"{folder / 'metrics'}: two rows for {repeated.iloc[0][KEYS].to_dict()}")
    return in_order(table)


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Rows by budget, method, task, seed, observation and solver, methods and tasks in the order of their lists."""
    known = {"method": [*METHODS, *PEERS], "task": [*tasks.names(), *tasks.sbibm.names(), *tasks.simformer.names()]}
    several_first = sorted(METHODS.values(), key=lambda entry: -len(entry.draws))
    known["solver"] = list(dict.fromkeys(solver for entry in several_first for solver in entry.draws))

    def place(column: pd.Series) -> pd.Series:
        names = known.get(str(column.name))
        if names is None:
            return column
        names = [*names, *sorted(set(column) - set(names))]
        return column.map({name: number for number, name in enumerate(names)})

    return table.sort_values(
        ["budget", "method", "task", "seed", "observation", "solver"], key=place, ignore_index=True
    )


def read_csv(path: Path) -> pd.DataFrame:
    """Rows as they were written: only an empty cell is missing."""
    return pd.read_csv(path, keep_default_na=False, na_values=[""])


def csv_of(table: pd.DataFrame) -> bytes:
    """The file of a table."""
    return table.to_csv(index=False, float_format="%.6g").encode()


def read_table(path: Path) -> pd.DataFrame:
    """The table, with `c2st`, by the published definition where it was computed, and `variant`, method and solver."""
    table = read_csv(path)
    fast = table.get("c2st_fast")
    published = table.get("c2st_mlp")
    if published is None:
        table["c2st"] = fast
    else:
        table["c2st"] = published if fast is None else published.fillna(fast)
    several = table.groupby("method")["solver"].transform("nunique") > 1
    table["variant"] = table["method"].where(~several, table["method"] + ", " + table["solver"])
    return table


def rows_of(config: Config, run: Run) -> list[tuple[Any, ...]]:
    """The keys of the rows that a fit gives."""
    name, solvers = config.label(run.task), config.entry(run.method).draws
    observations = config.observations_of_fit(config.task(run.task), run.seed)
    return [(name, run.method, run.budget, run.seed, number, solver) for solver in solvers for number in observations]


def missing(config: Config, table: pd.DataFrame) -> list[Run]:
    """The fits of which not all rows are in a table."""
    have = set(table[KEYS].itertuples(index=False, name=None))
    return [run for run in config.runs() if not have.issuperset(rows_of(config, run))]


def means(table: pd.DataFrame) -> pd.DataFrame:
    """Means over observations, of each over seeds, for each task, variant and budget, with the number of rows."""
    numbers = ["c2st", "c2st_null", "hmin", "hmin_null", "acceptance", "ess", "weights", "epochs"]
    numbers += ["seconds_simulate", "seconds_fit", "seconds_draw", "megabytes"]
    table, keys = table.dropna(subset=["c2st"]), ["task", "budget", "variant"]
    each = table.groupby([*keys, "observation"], sort=False)[[name for name in numbers if name in table]].mean()
    found = each.groupby(keys, sort=False).mean()
    found.insert(0, "rows", table.groupby(keys, sort=False).size())
    return found.reset_index()


def by_task(table: pd.DataFrame, budget: int) -> pd.DataFrame:
    """Mean C2ST, a row for each task and a column for each variant; last their mean over tasks that all have.

    Where a variant has no draws of a task, its mean over the others would not be comparable.
    """
    rows = means(table)
    wide = rows[rows["budget"] == budget].pivot_table(index="task", columns="variant", values="c2st", sort=False)
    wide.loc[MEAN] = wide.dropna().mean()
    return wide


@cache
def published() -> dict[str, Any]:
    """Figures of others: `rows` of task, budget, kind, method, c2st and source, and `sources`."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return found


def beside_published(table: pd.DataFrame) -> pd.DataFrame:
    """Amortised methods of others on sbi's tasks, `CPE` as it is by default, and the best variant of the table."""
    rows = []
    for (task, budget), ours in means(table).groupby(["task", "budget"], sort=False):
        theirs = [r for r in published()["rows"] if (r["task"], r["budget"], r["kind"]) == (task, budget, "amortised")]
        if not theirs:
            continue
        default = ours.loc[ours["variant"].str.fullmatch("CPE(, refined|, plain)?"), "c2st"]  # refined comes first
        best = ours.loc[ours["c2st"].idxmin()]
        words = ", ".join(f"{r['c2st']:.3f} {r['method']} [{r['source']}]" for r in theirs)
        rows.append((task, budget, words, default.iloc[0] if len(default) else None, best["c2st"], best["variant"]))
    return pd.DataFrame(rows, columns=["task", "budget", "published", "CPE", "best", "variant"])
