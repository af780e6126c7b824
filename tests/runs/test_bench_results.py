"""The committed table of the benchmark, and that the pages show what it says."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from cpejax import tasks
from cpejax.runs.bench import table
from cpejax.runs.bench.command import write_results
from cpejax.runs.bench.config import Config
from cpejax.runs.bench.methods import get
from cpejax.runs.model_file import Failure

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench():
    """The script, which is not part of the package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("bench_script", ROOT / "benchmarks" / "bench.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def block(path, name):
    return path.read_text().split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]


def made_up(methods, names, seeds=(0,), budget=10_000):
    """Rows of an imagined run."""
    config = Config(names, methods, budgets=(budget,), seeds=seeds)
    rows = pd.DataFrame([r for run in config.runs() for r in table.rows_of(config, run)], columns=table.KEYS)
    rows["c2st_fast"] = [0.55 + 0.01 * (i % 37) for i in range(len(rows))]
    rows["made"] = "2026-01-01T00:00:00+00:00"
    rows["version_jax"] = "1"
    return rows


def as_read(rows, path):
    path.write_bytes(table.csv_of(rows))
    return table.read_table(path)


def test_the_committed_table_is_well_formed(bench):
    rows = bench.all_rows()
    assert set(table.KEYS) <= set(rows)
    assert not rows.duplicated(table.KEYS).any()
    if not len(rows):
        return
    assert rows[[*table.KEYS, "made"]].notna().all().all()
    assert set(rows["task"]) <= {*tasks.names(), *tasks.sbibm.names(), *tasks.simformer.names()}
    for method, solvers in rows.groupby("method")["solver"]:
        assert set(solvers) <= set(get(method).draws)
    assert (rows["c2st"].between(0.4, 1) | rows["note"].notna()).all()
    assert rows["acceptance"].dropna().between(0, 1).all()
    assert (rows["version_numpy"].notna() | rows["c2st"].isna()).all()
    pd.testing.assert_frame_equal(table.in_order(rows), rows)


def test_pages_show_the_committed_table(bench):
    """`python benchmarks/bench.py` would change nothing."""
    rows = bench.all_rows()
    for path, blocks in ((bench.PAGE, bench.docs_blocks(rows)), (bench.README, bench.readme_blocks(rows))):
        for name, text in blocks.items():
            assert block(path, name) == text, f"{path.name}: {name} is old: run python benchmarks/bench.py"
    shown = bench.in_figure(rows)
    assert bench.FIGURE.is_file() == bool(shown)
    if shown:
        assert numbers(bench.FIGURE) == expected_numbers(bench, rows)


def numbers(figure):
    return sorted(re.findall(r">(0\.\d{3})<", figure.read_text()))


def expected_numbers(bench, rows):
    return sorted(f"{x:.3f}" for part in bench.compared(rows).values() for x in bench.standings(part)["mean"].dropna())


def test_newer_rows_replace_older_ones(bench):
    old = made_up(["CPE", "FMPE"], ["tree"])
    new = made_up(["CPE"], ["tree", "slcp"]).assign(c2st_fast=0.9, made="2026-02-01T00:00:00+00:00")
    for order in ((old, new), (new, old)):
        found = bench.merged(order[0], [order[1]])
        assert len(found) == 25  # five observations, CPE drawn from in two ways
        assert (found.loc[found["method"] == "CPE", "c2st_fast"] == 0.9).all()
        assert (found.loc[found["method"] == "FMPE", "c2st_fast"] < 0.9).all()
        assert list(found["task"]) == ["slcp"] * 10 + ["tree"] * 15
    assert len(bench.merged(None, [old])) == 15


def test_what_is_missing_is_said(bench, tmp_path):
    rows = as_read(bench.merged(made_up(["CPE"], bench.TASKS), [made_up(["FMPE"], ["tree"])]), tmp_path / "r.csv")
    done = bench.coverage(rows).set_index(["budget", "method"])["done"]
    assert (done[10_000, "CPE"], done[10_000, "FMPE"], done[100_000, "CPE"]) == (19, 1, 0)
    words = bench.coverage_words(rows)
    assert "**20 of them are here, 1,006 are not yet**" in words
    assert "| `CPE` | 19 of 95 | not yet |" in words
    assert "| `FMPE` | 1 of 95; not yet distractors," in words
    assert "| `PSE` | not yet | not yet |" in words
    # One row of ten is lost: that fit is not complete.
    less = rows.drop(rows[(rows["task"] == "sbibm/sir") & (rows["observation"] == 4)].index[:1])
    assert bench.coverage(less)["done"].sum() == 19


def test_a_complete_table(bench, tmp_path):
    parts = [made_up(plan.methods, bench.TASKS, plan.seeds, plan.budgets[0]) for plan in bench.PLAN]
    rows = as_read(bench.merged(None, parts), tmp_path / "r.csv")
    assert "1,026 of them are here, 0 are not yet**: it is complete." in bench.coverage_words(rows)
    readme = bench.readme_blocks(rows)["bench"]
    assert "`TriangularCPE-reverse, euler` (the paper's)" in readme
    assert "`TriangularCPE-reverse, euler` (CPE as published) is best" in readme
    assert "`CPE, plain` is best" in readme
    assert "not yet" not in "".join(bench.docs_blocks(rows).values()).replace("0 are not yet", "")
    assert "NPE [A]" in bench.docs_blocks(rows)["bench-published"]
    bench.draw(rows, tmp_path / "figure.svg")
    assert numbers(tmp_path / "figure.svg") == expected_numbers(bench, rows)
    assert len(numbers(tmp_path / "figure.svg")) == 4 * 12  # two groups of tasks, two budgets, twelve variants


def test_wins_and_losses(bench, tmp_path):
    rows = made_up(["CPE", "FMPE"], bench.TASKS)
    rows["c2st_fast"] = 0.6
    rows.loc[(rows["method"] == "FMPE") & (rows["task"] == "tree"), "c2st_fast"] = 0.5
    rows.loc[(rows["method"] == "FMPE") & (rows["task"] == "slcp"), "c2st_fast"] = 0.8
    rows.loc[rows["solver"] == "plain", "c2st_fast"] += 0.005  # is not called a difference
    paper, sbi = (bench.standings(part) for part in bench.compared(as_read(rows, tmp_path / "r.csv")).values())
    assert (paper.attrs["tasks"], sbi.attrs["tasks"]) == (9, 10)
    found = paper.set_index("variant")
    assert "tree" in found.loc["FMPE", "best"]
    assert found.loc["FMPE", "worst"] == ["slcp"]
    assert len(found.loc["CPE, plain", "best"]) == 8


def test_results_so_far(tmp_path):
    """Of a run that is under way there are table, figures and page as well."""
    config = Config(["tree", "slcp"], ["CPE", "FMPE"], seeds=(0,))
    with pytest.raises(Failure, match="has no results yet"):
        write_results(config, tmp_path)
    rows = made_up(["FMPE"], ["tree"]).drop(columns="made")
    rows = rows.assign(c2st_null=0.5, hmin=0.1, hmin_null=0.0, acceptance=1.0, seconds_fit=9.0, note="")
    path = tmp_path / "metrics" / "tree" / "FMPE" / "10000-0.csv"
    path.parent.mkdir(parents=True)
    rows.to_csv(path, index=False)
    page = write_results(config, tmp_path)
    assert page.read_text().count("<svg") == 5
    lacking = table.missing(config, table.read_table(tmp_path / "results.csv"))
    assert {run.path for run in lacking} == {"slcp/FMPE/10000-0", "tree/CPE/10000-0", "slcp/CPE/10000-0"}
    assert re.match(r"20\d\d-\d\d-\d\dT", pd.read_csv(tmp_path / "results.csv")["made"][0])
    shutil.copy(path, path.with_name("twice.csv"))
    with pytest.raises(ValueError, match="two rows for"):
        table.rows_so_far(tmp_path)
