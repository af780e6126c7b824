"""The documentation: every block of code runs, every public name is in the reference, every page is in the menu.

Blocks run with few simulations and draws, and `cpe.fit` does not train: here it only matters that each line does what its
page says. Blocks of a page share their names, as for a reader who types them one after the other.
"""

import ast
import dataclasses
import importlib
import re
import sys
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import pytest

import cpejax as cpe

ROOT = Path(__file__).parents[1]
DOCS, TUTORIALS = ROOT / "docs", ROOT / "tutorials"
MOST = 60
RUN_ELSEWHERE = {"methods.md", "graphs.md"}  # by tests of what they are about, which also compare their results
PAGES = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if str(p.relative_to(DOCS)) not in RUN_ELSEWHERE)
SCRIPTS = sorted(p.stem for p in TUTORIALS.glob("*.py"))
QUICK = {"index.md", "howto/simulations-elsewhere.md", "howto/from-sbi.md"}  # in every run of the tests


def blocks(page: str) -> list[str]:
    """The blocks of Python on a page, also those in tabs, which are indented."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return ["".join(line[len(indent) :] or "\n" for line in text.splitlines(True)) for indent, text in found]


sys.path.insert(0, str(DOCS / "hooks"))  # as MkDocs does
WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.fixture
def small(monkeypatch, no_training, tmp_path):
    """The package with small numbers, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    simulate, fit, check, compare = cpe.simulate, cpe.fit, cpe.check, cpe.compare
    sample = cpe.Posterior.sample

    def small_fit(model, simulations=None, *, method=None, **options):
        method = method or cpe.CPE()
        if isinstance(method, cpe.CPE):
            method = dataclasses.replace(method, width=8, depth=1, hidden=8, components=1)
        if simulations is None:
            simulations = simulate(model, MOST, key=options["key"])
        options.pop("fresh", None)
        options["emulate"] = False if not options.get("emulate") else True
        return fit(model, simulations, method=method, **options)

    monkeypatch.setattr(cpe, "simulate", lambda model, n, **options: simulate(model, min(n, MOST), **options))
    monkeypatch.setattr(cpe, "fit", small_fit)
    small_check = lambda *args, n=1000, draws=1000, **options: check(*args, n=30, draws=20, **options)  # noqa: E731
    monkeypatch.setattr(cpe, "check", small_check)
    monkeypatch.setattr(cpe, "compare", lambda *args, n=0, **options: compare(*args, n=MOST, **options))
    monkeypatch.setattr(cpe.Posterior, "sample", lambda self, n, *args, **kw: sample(self, min(n, MOST), *args, **kw))
    yield
    plt.close("all")


@pytest.mark.parametrize("page", [pytest.param(p, marks=() if p in QUICK else pytest.mark.slow) for p in WITH_CODE])
def test_code_on_pages_runs(page, small):
    names: dict = {"__name__": "__main__"}
    for hidden in re.findall(r"<!-- before\n(.*?)-->", (DOCS / page).read_text("utf-8"), re.DOTALL):
        exec(compile(hidden, f"{page}, before", "exec"), names)
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_tutorials_run(name, small):
    hooks = importlib.import_module("tutorials")
    names: dict = {"__name__": "__main__"}
    for cell in hooks.cells((TUTORIALS / f"{name}.py").read_text("utf-8")):
        if cell.kind == hooks.CODE:
            exec(compile(cell.source, f"{name}.py, line {cell.line}", "exec"), names)
