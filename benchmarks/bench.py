"""The committed table of the benchmark, and what the documentation shows of it.

    python benchmarks/bench.py            # fill docs/benchmarks.md and the README, draw the figure
    python benchmarks/bench.py bench ...  # first put in the rows of folders of `cpejax bench`

A folder may be of a run that is under way, or of which jobs have failed: the rows that are there count. A row that is
in the table already is replaced by a newer one. Nothing that the pages say of results is written by hand, neither
which method is best where, nor which rows of the plan are not there yet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from page import fill, table

from cpejax import tasks
from cpejax.runs.bench.config import Config
from cpejax.runs.bench.figures import summary
from cpejax.runs.bench.methods import METHODS
from cpejax.runs.bench.page import made_with
from cpejax.runs.bench.table import (
    KEYS,
    MADE,
    MEAN,
    beside_published,
    by_task,
    csv_of,
    in_order,
    missing,
    published,
    read_csv,
    read_table,
    rows_so_far,
)
from cpejax.util.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "bench.csv"
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
FIGURE = ROOT / "docs" / "assets" / "benchmark.svg"
GROUPS = {"the paper's tasks": tasks.names(), "sbi's tasks": tasks.sbibm.names()}
TASKS = tuple(task for group in GROUPS.values() for task in group)
PLAN = (Config(TASKS, tuple(METHODS)), Config(TASKS, tuple(METHODS), budgets=(100_000,), seeds=(0,)))
"""What a complete table has."""
PAPER = "TriangularCPE-reverse"
"""The paper's CPE."""
CLOSE = 0.01
"""A difference of C2ST that is not called one."""
NONE = "There are no results yet."


def merged(old: pd.DataFrame | None, new: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """All rows; of those with the same key the newest."""
    parts = [part for part in (old, *new) if part is not None]
    rows = pd.concat(parts, ignore_index=True).sort_values(MADE, kind="stable")
    return in_order(rows.drop_duplicates(KEYS, keep="last"))


# ------------------------------------------------------------------------------------------------- what there is so far


def coverage(rows: pd.DataFrame) -> pd.DataFrame:
    """Fits that are there with all their rows, and fits of the plan, for each method and number of simulations."""
    found = []
    for plan in PLAN:
        lacking = {(plan.label(run.task), run.method, run.seed) for run in missing(plan, rows)}
        for method in plan.methods:
            wanted = [(task, method, seed) for task in plan.tasks for seed in plan.seeds]
            done = [fit for fit in wanted if fit not in lacking]
            begun = {task for task, *_ in done}
            found.append((plan.budgets[0], method, len(done), len(wanted), [t for t in plan.tasks if t not in begun]))
    return pd.DataFrame(found, columns=["budget", "method", "done", "planned", "open"])


def coverage_words(rows: pd.DataFrame) -> str:
    """How much of the plan is there, in words, and a table of it."""
    found = coverage(rows)
    done, planned = found["done"].sum(), found["planned"].sum()
    text = f"The plan has {planned:,} fits: {len(TASKS)} tasks, {len(METHODS)} methods, 10,000 simulations with five "
    text += f"seeds and 100,000 with one. **{done:,} of them are here, {planned - done:,} are not yet**"
    text += "." if done < planned else ": it is complete."
    lines = []
    for method in METHODS:
        cells = [f"`{method}`"]
        for plan in PLAN:
            row = found[(found["method"] == method) & (found["budget"] == plan.budgets[0])].iloc[0]
            without = "" if not row["done"] or not row["open"] else f"; not yet {', '.join(row['open'])}"
            cells.append(f"{row['done']} of {row['planned']}{without}" if row["done"] else "not yet")
        lines.append(cells)
    head = ["method", *(f"fits with {plan.budgets[0]:,} simulations" for plan in PLAN)]
    extra = sorted(set(rows["task"]) - set(TASKS)) if len(rows) else []
    if extra:
        text += f" Beside the plan there are rows of {', '.join(extra)}."
    return f"{text}\n\n{table(head, lines)}"


def made_words(rows: pd.DataFrame) -> str:
    """What the rows were made with, when, and by which definition of C2ST they were scored."""
    if not len(rows):
        return NONE
    days = sorted({str(made)[:10] for made in rows[MADE]})
    theirs = rows["task"].str.startswith("sbibm/")
    by_mlp = int(rows.loc[theirs, "c2st_mlp"].notna().sum()) if "c2st_mlp" in rows else 0
    text = f"{len(rows):,} rows, made {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "")
    text += f", with {'; '.join(made_with(rows))}. C2ST is by the published definition in {by_mlp:,} of the "
    return (
        text + f"{int(theirs.sum()):,} rows on sbi's tasks, and by the fast one, which agrees with it, in all others."
    )


# ----------------------------------------------------------------------------------------------------- what they say


def comparable(rows: pd.DataFrame, group: str, budget: int) -> pd.DataFrame:
    """Rows of methods that have all tasks of a group, with any number of seeds: their means can be compared."""
    rows = rows[(rows["budget"] == budget) & rows["task"].isin(GROUPS[group])]
    whole = [method for method in METHODS if set(rows.loc[rows["method"] == method, "task"]) == set(GROUPS[group])]
    return rows[rows["method"].isin(whole)]


def compared(rows: pd.DataFrame) -> dict[tuple[str, int], pd.DataFrame]:
    """What can be compared, by group of tasks and budget; only where there are two methods at least."""
    found = {(group, plan.budgets[0]): comparable(rows, group, plan.budgets[0]) for plan in PLAN for group in GROUPS}
    return {which: part for which, part in found.items() if part["method"].nunique() > 1}


def standings(rows: pd.DataFrame) -> pd.DataFrame:
    """Of rows that can be compared each variant's mean C2ST, and the tasks where it is best, or close, and worst."""
    wide = by_task(rows, int(rows["budget"].iloc[0]))
    mean, wide = wide.loc[MEAN], wide.drop(index=MEAN)
    best, worst = wide.min(axis=1), wide.max(axis=1)
    found = [
        (
            variant,
            mean[variant],
            list(wide.index[wide[variant] <= best + CLOSE]),
            list(wide.index[wide[variant] == worst]),
        )
        for variant in wide.columns
    ]
    frame = pd.DataFrame(found, columns=["variant", "mean", "best", "worst"])
    frame.attrs["tasks"], frame.attrs["of_all"] = len(wide), len(wide.dropna())
    return frame


def standings_words(rows: pd.DataFrame, *, names: bool) -> str:
    """Where each variant wins and loses: with the names of tasks, or their number."""
    found = standings(rows)

    def cell(where: list[str]) -> str:
        return ", ".join(where) if names and where else str(len(where)) if where else "none"

    lines = [
        (
            f"`{row.variant}`" + (" (the paper's)" if row.variant.startswith(PAPER) else ""),
            f"{row.mean:.3f}",
            cell(row.best),
            cell(row.worst),
        )
        for row in found.itertuples()
    ]
    head = ["method", f"mean C2ST of the {found.attrs['of_all']} tasks that all have draws of"]
    return table([*head, f"best, or within {CLOSE}, on", "worst on"], lines)


def in_a_sentence(rows: pd.DataFrame) -> str:
    """Where the default, in each way to draw, and the paper's CPE win and lose, in words."""
    found = standings(rows)
    words = []
    for row in found.itertuples():
        ours, papers = row.variant == "CPE" or row.variant.startswith("CPE, "), row.variant.startswith(PAPER)
        if not ours and not papers:
            continue
        line = f"`{row.variant}`{' (CPE as published)' if papers else ''} is best, or within {CLOSE} of the best, on "
        line += f"{len(row.best)} of {found.attrs['tasks']} tasks"
        line += f", and worst on {', '.join(row.worst)}." if row.worst else ", and worst on none."
        words.append(line)
    return " ".join(words)


def task_table(rows: pd.DataFrame, budget: int) -> str:
    """Mean C2ST of all variants on all tasks, the best in bold."""
    rows = rows[rows["budget"] == budget]
    if not len(rows):
        return f"There are no results with {budget:,} simulations yet."
    wide = by_task(rows, budget).drop(index=MEAN)
    lines = []
    for task, values in wide.iterrows():
        cells = ["·" if pd.isna(x) else f"**{x:.3f}**" if x <= values.min() + CLOSE else f"{x:.3f}" for x in values]
        lines.append([f"`{task}`", *cells])
    return table(["task", *wide.columns], lines)


def published_table(rows: pd.DataFrame) -> str:
    """Ours beside what others have published on the same tasks with as many simulations."""
    found = beside_published(rows) if len(rows) else []
    if not len(found):
        return NONE
    lines = [
        (
            f"`{row.task}`",
            f"{row.budget:,}",
            "·" if pd.isna(row.CPE) else f"{row.CPE:.3f}",
            f"{row.best:.3f}",
            f"`{row.variant}`",
            row.published,
        )
        for row in found.itertuples()
    ]
    sources = "\n".join(f"- [{key}] {value}" for key, value in published()["sources"].items())
    head = ["task", "simulations", "`CPE`", "our best", "by", "published by others"]
    return f"{table(head, lines)}\n\n{sources}"


def in_figure(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What the figure shows: all that can be compared."""
    found = compared(rows.dropna(subset=["c2st"]))
    return {f"{group}, {budget:,} simulations": part for (group, budget), part in found.items()}


def figure_link(rows: pd.DataFrame, path: str) -> str:
    """The figure, once there is one."""
    if not in_figure(rows):
        return ""
    return f"![Mean C2ST of all methods over the benchmark's tasks; .5 is perfect]({path})\n\n"


# ------------------------------------------------------------------------------------------------------------ the pages


def docs_blocks(rows: pd.DataFrame) -> dict[str, str]:
    """What docs/benchmarks.md shows between its marks."""
    blocks = {"bench-coverage": coverage_words(rows), "bench-made": made_words(rows)}
    blocks["bench-summary"] = figure_link(rows, "assets/benchmark.svg")
    for (group, budget), part in compared(rows).items():
        blocks["bench-summary"] += f"On {group}, {budget:,} simulations:\n\n{standings_words(part, names=True)}\n\n"
    blocks["bench-summary"] = blocks["bench-summary"] or "No two methods have all tasks of a group yet."
    for plan in PLAN:
        blocks[f"bench-{plan.budgets[0]}"] = task_table(rows, plan.budgets[0])
    blocks["bench-summary"] = blocks["bench-summary"].strip()
    blocks["bench-published"] = published_table(rows)
    return blocks


def readme_blocks(rows: pd.DataFrame) -> dict[str, str]:
    """What the README shows between its marks."""
    found = coverage(rows)
    done, planned = found["done"].sum(), found["planned"].sum()
    text = figure_link(rows, "docs/assets/benchmark.svg")
    for (group, budget), part in compared(rows).items():
        text += f"On {group}, with {budget:,} simulations: {in_a_sentence(part)}\n\n"
        text += f"{standings_words(part, names=False)}\n\n"
    text += (
        f"{done:,} of the {planned:,} fits of the plan are in the table so far; [the page](docs/benchmarks.md) says "
    )
    return {"bench": f"{text}which."}


def all_rows() -> pd.DataFrame:
    """The committed table, with `c2st` and `variant`; without rows where nothing is committed yet."""
    return read_table(RESULTS) if RESULTS.is_file() else pd.DataFrame(columns=[*KEYS, MADE, "c2st", "variant"])


def draw(rows: pd.DataFrame, path: Path) -> None:
    """The figure, or none."""
    shown = in_figure(rows)
    if not shown:
        path.unlink(missing_ok=True)
        return
    with plt.rc_context({"svg.hashsalt": "cpejax", "svg.fonttype": "none"}):
        figure = summary(shown)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def main(folders: list[str]) -> None:
    if folders:
        old = read_csv(RESULTS) if RESULTS.is_file() else None
        new = merged(old, (rows_so_far(Path(folder)) for folder in folders))
        before = 0 if old is None else len(old)
        write_atomically(RESULTS, csv_of(new))
        print(f"{RESULTS.relative_to(ROOT)}: {len(new):,} rows, {len(new) - before:,} more than before")
    rows = all_rows()
    draw(rows, FIGURE)
    fill(PAGE, docs_blocks(rows))
    fill(README, readme_blocks(rows))
    print(coverage(rows)[["budget", "method", "done", "planned"]].to_string(index=False))


if __name__ == "__main__":
    main(sys.argv[1:])
