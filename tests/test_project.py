"""The files around the package: metadata that agree with one another, a README that runs, a core that stays light."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_licence_is_the_one_declared():
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_citation_names_this_version_and_the_paper():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    paper = citation["preferred-citation"]
    assert paper["title"] == "Causal posterior estimation"
    assert [author["family-names"] for author in paper["authors"]] == ["Dirmeier", "Mira"]


def test_readme_runs(tmp_path, monkeypatch):
    blocks = python_blocks("README.md")
    assert blocks
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in blocks:  # one after the other, as a reader would
        # The reader's settings are honest; here it only matters that every line runs.
        quick = block.replace("10_000", "500").replace("1_000", "60")
        tiny = "method=cpe.CPE(width=8, depth=1, hidden=8, components=2), training=cpe.Training(max_epochs=2)"
        quick = quick.replace("fit(model, sims,", f"fit(model, sims, {tiny},")
        exec(compile(quick, "README.md", "exec"), names)


def test_core_does_not_import_extras():
    extras = ["torch", "snakemake", "dask", "mkdocs", "pytest", "hypothesis"]
    code = f"import sys, cpejax, cpejax.runs.cli; print(*[name for name in {extras} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_what_is_imported_is_declared_and_nothing_else():
    paths = [path for path in (ROOT / "src").rglob("*.py") if path.name != "peer_sbi.py"]  # has its own environment
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    imported = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"cpejax"}
    imported.add("h5netcdf")  # by xarray, which is asked for it by name
    declared = {re.split(r"[\[<>=]", line)[0].replace("-", "_") for line in PROJECT["dependencies"]}
    assert imported == declared - {"scikit_learn"} | {"sklearn"}


PACKAGE = ROOT / "src" / "cpejax"


def imports(module: Path) -> set[str]:
    """The packages of `cpejax` that a module imports from, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "cpejax":
            names |= {f"cpejax.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names.add(str(node.module))
    return {name.split(".")[1] for name in names if name.startswith("cpejax.")}


def test_packages_import_in_one_direction():
    """An order exists in which each package imports only from those before it; the packages themselves say which."""
    graph = nx.DiGraph()
    for module in PACKAGE.rglob("*.py"):
        own = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own != "__init__":
            graph.add_edges_from((other, own) for other in imports(module) - {own})
    cycles = list(nx.simple_cycles(graph))
    assert not cycles, f"packages import one another: {cycles}"
    assert set(nx.descendants(graph, "flows")) >= {"inference", "diagnostics", "runs"}  # the graph was really read


def test_the_house_is_seen_at_one_look():
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 12, sorted(path.name for path in entries)
    for folder in (path.parent for path in PACKAGE.rglob("*/__init__.py")):
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert len((text or "").split("\n\n")) >= 2, f"{folder.name}: say what belongs there, and what does not"


def test_modules_are_short():
    long = {
        str(p.relative_to(PACKAGE)): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 420
    }
    assert not long, long
