"""Tutorials: scripts in the percent format that become pages, with what their code printed and drew.

    python docs/hooks/tutorials.py tutorials/epidemic.py folder/   # run it; folder/ gets found.json and the figures

A script is run in a process of its own. What comes of it is kept in a folder named after a hash of its code, so that it
runs again only when its code has changed; its text and comments may change freely.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "tutorials"
CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?$", re.MULTILINE)
TEXT, CODE = "text", "code"
STYLE = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
}


class Cell(NamedTuple):
    """A piece of a tutorial: its kind, `TEXT` or `CODE`, its source, and the line of the script before it."""

    kind: str
    source: str
    line: int


def cells(script: str) -> Iterator[Cell]:
    """The cells of a script: `# %% [markdown]` begins one of text, in comments, and `# %%` one of code."""
    marks = list(CELL.finditer(script))
    for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(script)], strict=True):
        body, line = script[mark.end() : end], script.count("\n", 0, mark.end())
        if mark["kind"]:
            yield Cell(TEXT, re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip(), line)
        else:
            yield Cell(CODE, body.strip(), line + len(body) - len(body.lstrip("\n")))


def page(script: Path, found: list[dict[str, Any]] | None = None) -> str:
    """The page of a script, with what each of its code cells printed and drew, if it was run."""
    out, results = [], iter(found or ())
    for cell in cells(script.read_text(encoding="utf-8")):
        if cell.kind == TEXT:
            out.append(cell.source)
            continue
        out.append(f"```python\n{cell.source.replace('  # fmt: skip', '')}\n```")
        result = next(results, {"printed": "", "figures": []})
        if result["printed"].strip():
            out.append(f"```{{.text .output}}\n{result['printed'].rstrip()}\n```")
        out += [f"![{words}]({name})" for name, words in result["figures"]]
    if found is None:
        out.append("!!! note\n    This page was built without running its code: it has no output and no figures.")
    return "\n\n".join(out) + "\n"


def run(script: Path, folder: Path) -> None:
    """Run a script; write what its cells printed to `found.json`, and the figures that they left open."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({**STYLE, "svg.hashsalt": script.stem})
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    found: list[dict[str, Any]] = []
    for cell in cells(script.read_text(encoding="utf-8")):
        if cell.kind == TEXT:
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * cell.line + cell.source, str(script), "exec"), names)
        figures = []
        for number in plt.get_fignums():
            figure = plt.figure(number)
            name = f"{script.stem}_{len(found)}_{number}.svg"
            figure.savefig(folder / name, metadata={"Date": None}, bbox_inches="tight")
            figures.append((name, figure.get_label() or "Figure made by the code above"))
        plt.close("all")
        found.append({"printed": printed.getvalue(), "figures": figures})
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def folder_of(script: Path) -> Path:
    """Where what comes of a script is kept."""
    code = "\n".join(cell.source for cell in cells(script.read_text(encoding="utf-8")) if cell.kind == CODE)
    return CACHE / f"{script.stem}-{hashlib.sha256(ast.dump(ast.parse(code)).encode()).hexdigest()[:16]}"


def built(script: Path, may_run: bool = True) -> tuple[str, list[Path]]:
    """The page of a script and its figures; the script is run if its code has not been, and may be."""
    folder = folder_of(script)
    if not (folder / "found.json").exists():
        if not may_run:
            return page(script), []
        folder.mkdir(parents=True, exist_ok=True)
        print(f"Running {script.relative_to(ROOT)} (minutes; only after a change)", file=sys.stderr)
        command = [sys.executable, __file__, str(script), str(folder)]
        # Figures are not shown, and tables do not ask for the width of a terminal.
        environment = {**os.environ, "MPLBACKEND": "Agg", "COLUMNS": "100", "NO_COLOR": "1"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(f"{script.relative_to(ROOT)} failed:\n{done.stderr}")
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return page(script, found), [folder / name for result in found for name, _ in result["figures"]]


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
