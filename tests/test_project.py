"""The files around the package: metadata that agree with one another, a README that runs, a core that stays light."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

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
        tiny = "method=cpe.CPE(width=8, depth=1, hidden=8, components=2), max_epochs=2"
        quick = quick.replace("fit(program, sims,", f"fit(program, sims, {tiny},")
        exec(compile(quick, "README.md", "exec"), names)


def test_core_does_not_import_extras():
    extras = ["torch", "snakemake", "dask", "mkdocs", "pytest", "hypothesis"]
    code = f"import sys, cpejax, cpejax.runs.cli; print(*[name for name in {extras} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_what_is_imported_is_declared_and_nothing_else():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    imported = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"cpejax"}
    imported.add("h5netcdf")  # by xarray, which is asked for it by name
    declared = {re.split(r"[\[<>=]", line)[0].replace("-", "_") for line in PROJECT["dependencies"]}
    assert imported == declared - {"scikit_learn"} | {"sklearn"}


def stages() -> list[set[str]]:
    """The modules of each stage, in the order of the table in CONTRIBUTING.md."""
    rows = re.findall(r"^\| [^|]+ \| (`.*?`) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [set(re.findall(r"`(\w+)\.py`", row)) for row in rows]


def imported(module: Path) -> set[str]:
    """Names of the modules of this package that a module imports, wherever in it."""
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


def test_stages_import_only_from_the_left():
    package = ROOT / "src" / "cpejax"
    beside = {"__init__", "_reference", "metrics"}  # which no stage imports
    assert {name for stage in stages() for name in stage} | beside == {path.stem for path in package.glob("*.py")}
    before: set[str] = set()
    for stage in stages():
        before |= stage
        for name in sorted(stage - {"cli"}):  # the command may use everything
            outside = imported(package / f"{name}.py") - before
            assert not outside, f"{name} imports {outside} from a stage after it, or from outside the stages"
