"""The documentation: every block of code runs, every public name is in the reference, every page is in the menu.

Blocks run with few simulations and draws, and `cpe.fit` does not train: here it only matters that each line does what
its page says. Blocks of a page share their names, as for a reader who types them one after the other. Code of other
libraries, which is marked as `py` and not as `python`, is not run.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

import cpejax as cpe

ROOT = Path(__file__).parents[1]
DOCS, TUTORIALS = ROOT / "docs", ROOT / "tutorials"
MOST = 60
RUN_ELSEWHERE = {"methods.md", "graphs.md", "checks.md"}  # by tests of what they are about, which compare results too
QUICK = {"howto/from-sbi.md"}  # in every run of the tests
NOT_FOR_TYPING = {"tasks.md": 1, "workers.md": 2}  # how many blocks, at the end, are files, or need a cluster
PAGES = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))
SCRIPTS = sorted(p.stem for p in TUTORIALS.glob("*.py"))
MADE_BY_THE_BUILD = {"getting-started.md", "contributing.md", "changelog.md", "reference/command.md"}

sys.path.insert(0, str(DOCS / "hooks"))  # as MkDocs does


def blocks(page: str) -> list[str]:
    """The blocks of Python on a page, also those in tabs, which are indented."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return ["".join(line[len(indent) :] or "\n" for line in text.splitlines(True)) for indent, text in found]


def code_of(script: str) -> list[str]:
    """The code cells of a tutorial."""
    hook = importlib.import_module("tutorials")
    return [cell.source for cell in hook.cells((TUTORIALS / f"{script}.py").read_text("utf-8")) if cell.kind == "code"]


@pytest.fixture(autouse=True)
def _own_style():
    """Tutorials set a style for the pages: it ends with the test."""
    with plt.rc_context():
        yield


@pytest.fixture
def small(monkeypatch, no_training, tmp_path):
    """The package with small numbers, in a folder of its own, compiled fast: also among the slow tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPEJAX_CACHE", str(tmp_path))
    simulate, fit, check, compare = cpe.simulate, cpe.fit, cpe.check, cpe.compare
    sample, short = cpe.Posterior.sample, cpe.Training(max_epochs=1)

    def tiny(method):
        wide = {"width": 8, "depth": 1, "hidden": 8, "components": 1}
        return dataclasses.replace(method, **wide) if isinstance(method, cpe.CPE) else method

    def small_fit(model, simulations=None, *, method=None, training=None, fresh=None, **options):
        del training, fresh
        if simulations is None:
            simulations = simulate(model, MOST, key=options["key"])
        return fit(model, simulations, method=tiny(method or cpe.CPE()), training=short, **options)

    def small_check(*args, n=1000, draws=1000, **options):
        del n, draws
        return check(*args, n=30, draws=20, **options)

    for name, value in (("FEWEST_DRAWS", MOST), ("MOST_STEPS", 3), ("MOST_BLOCKS", 1)):
        monkeypatch.setattr(f"cpejax.inference.refine.{name}", value)
    monkeypatch.setattr(cpe, "simulate", lambda model, n, **options: simulate(model, min(n, MOST), **options))
    monkeypatch.setattr(cpe, "fit", small_fit)
    monkeypatch.setattr(cpe, "check", small_check)
    monkeypatch.setattr(cpe, "compare", lambda *args, n=0, **options: compare(*args, n=MOST, **options))
    monkeypatch.setattr(cpe.Posterior, "sample", lambda self, n, *args, **kw: sample(self, min(n, MOST), *args, **kw))
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    plt.close("all")


def before(page: str, names: dict) -> dict:
    """What a page that explains takes for granted: a model, simulations of it, a posterior, and data."""
    text = "\n".join(blocks(page))
    if "import cpejax" in text or not re.search(r"\b(cpe|post|posterior)\b", text):
        return {}
    key, model, sims = jax.random.key(0), names["model"], names["simulations"]
    post = cpe.fit(model, sims, key=key)
    y = np.array([0.3, 1.2, -0.4])
    draws = post.sample(30, given={"y": y}, key=key)
    posteriors = {"post": post, "posterior": post, "post_a": post, "post_b": post}
    return {**names, "jnp": jnp, "key": key, "sims": sims, "y": y, "y_obs": y, "draws": draws, **posteriors}


WITH_CODE = [page for page in PAGES if page not in RUN_ELSEWHERE and blocks(page)]


@pytest.mark.parametrize("page", [pytest.param(p, marks=() if p in QUICK else pytest.mark.slow) for p in WITH_CODE])
def test_code_on_pages_runs(page, small, docstring_names, monkeypatch):
    if page == "emulation.md":
        monkeypatch.setattr("cpejax.inference.fit.LONG", 0)  # however short training is, the simulator is learned
    if page == "tasks.md":  # tables that are downloaded
        shapes = {"observation.csv": (1, 2), "reference_posterior_samples.csv.bz2": (MOST, 2)}
        monkeypatch.setattr("cpejax.tasks.sbibm._data.read", lambda task, number, file: np.zeros(shapes[file]))
    names = {"__name__": "__main__", **before(page, docstring_names)}
    code = blocks(page)
    for block in code[: len(code) - NOT_FOR_TYPING.get(page, 0)]:
        exec(compile(block, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_tutorials_run(script, small):
    names: dict = {"__name__": "__main__"}
    for source in code_of(script):
        exec(compile(source, f"{script}.py", "exec"), names)


@pytest.mark.parametrize("name", [*(p for p in PAGES if blocks(p)), *SCRIPTS])
def test_code_uses_what_there_is(name):
    """Without running it: names of `cpe` exist, and calls of them have arguments that these take."""
    source = "\n".join(blocks(name) if name.endswith(".md") else code_of(name))
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else None
        attribute = (
            ast.unparse(called if called is not None else node) if isinstance(called or node, ast.Attribute) else ""
        )
        if not re.fullmatch(r"cpe(\.\w+)+", attribute):
            continue
        target = cpe
        for part in attribute.split(".")[1:]:
            target = getattr(target, part)  # an AttributeError names it
        parameters = inspect.signature(target).parameters if callable(target) else {}
        if called is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            unknown = {keyword.arg for keyword in node.keywords} - set(parameters) - {None}
            assert not unknown, f"{attribute} has no argument {unknown}"


def test_every_public_name_is_in_the_reference():
    names = [n for n in cpe.__all__ if not inspect.ismodule(getattr(cpe, n))]
    names += [f"{m}.{n}" for m in ("plot", "metrics", "tasks", "diagnostics") for n in getattr(cpe, m).__all__]
    text = "\n".join(p.read_text("utf-8") for p in (DOCS / "reference").glob("*.md"))
    assert sorted(re.findall(r"^::: cpejax\.(\S+)$", text, re.MULTILINE)) == sorted(names)


def test_every_page_is_in_the_menu():
    menu = re.findall(r"\s([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    made = MADE_BY_THE_BUILD | {f"tutorials/{name}.md" for name in SCRIPTS if name != "getting_started"}
    assert sorted(menu) == sorted({*PAGES, *made})


def test_nothing_is_loaded_from_elsewhere():
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "font: false" in settings
    assert "http" not in settings
    assert "http" not in "".join(p.read_text("utf-8") for p in (DOCS / "assets").glob("*.[cj]s*"))


def test_cells_of_a_tutorial(tmp_path):
    hook = importlib.import_module("tutorials")
    script = tmp_path / "x.py"
    script.write_text("# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nprint(1 + 1)\n\n# %%\na = 3\n", "utf-8")
    hook.run(script, tmp_path)
    before = hook.folder_of(script)
    assert [cell.line for cell in hook.cells(script.read_text("utf-8"))] == [0, 6, 9]
    page = hook.page(script, hook.json.loads((tmp_path / "found.json").read_text("utf-8")))
    assert "# Title\n\nText.\n\n```python\nprint(1 + 1)\n```\n\n```{.text .output}\n2\n```\n\n```python\na = 3" in page
    script.write_text(
        script.read_text("utf-8").replace("Text.", "Other text.").replace("a = 3", "a = 3  # why"), "utf-8"
    )
    assert hook.folder_of(script) == before
    script.write_text(script.read_text("utf-8").replace("a = 3", "a = 4"), "utf-8")
    assert hook.folder_of(script) != before


def test_examples_in_docstrings_become_blocks():
    hook = pytest.importorskip("griffe") and importlib.import_module("docstrings")
    assert hook.fenced("Text.\n\n>>> f(1)\n2\n\nMore.") == "Text.\n\n```pycon\n>>> f(1)\n2\n```\n\nMore."
    assert hook.fenced(">>> f(1)") == "```pycon\n>>> f(1)\n```"


def test_minutes_of_a_page():
    hook = importlib.import_module("minutes")
    text, code = "<p>" + "word " * 300 + "</p>", "<pre><code>" + "x\n" * 30 + "</code></pre>"
    assert hook.minutes(text) == hook.minutes(code) == hook.minutes(4 * "<img>") == 2
    assert hook.minutes(text + code) == 4
    assert hook.minutes("") == 1
