"""Tables of figures in the pages of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Put tables between their marks, `<!-- name -->` and `<!-- end of name -->`."""
    text = page.read_text()
    for name, made in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + made + "\n" + end + rest.split(end)[1]
    page.write_text(text)
