"""The list of all pages, with the minutes that each takes to read, counted from what was rendered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

HERE = "<!-- all pages -->"
WORDS, LINES, FIGURES = 150, 15, 2
"""What is read in a minute, with thought: words of text, lines of code or output, or figures."""
BLOCK = re.compile(r"<pre>.*?</pre>", re.DOTALL)
MENU: list[Any] = []
"""The pages in the order of the menu."""


def on_nav(nav: Any, **_: object) -> None:
    """Remember the pages."""
    MENU[:] = nav.pages


def on_env(env: object, **_: object) -> None:
    """Fill in the list, once all pages are rendered."""
    del env
    for page in MENU:
        page.content = page.content.replace(HERE, "\n".join(table(MENU, page)))


def table(pages: Sequence[Any], here: Any) -> Iterator[str]:
    """The lines of a table of pages, with links from the page `here`."""
    needed = [minutes(page.content) for page in pages]
    yield "<table><thead><tr><th></th><th>page</th><th>minutes</th></tr></thead><tbody>"
    section = None
    for page, number in zip(pages, needed, strict=True):
        first = "" if page.parent is section or page.parent is None else page.parent.title
        section = page.parent
        link = f'<a href="{page.file.url_relative_to(here.file)}">{page.title}</a>'
        yield f"<tr><td>{first}</td><td>{link}</td><td>{number}</td></tr>"
    yield f"<tr><td></td><td>{len(pages)} pages</td><td>{sum(needed)}</td></tr></tbody></table>"


def minutes(content: str) -> int:
    """Minutes to read a page of HTML, at least one."""
    words = re.sub(r"<[^>]*>", " ", BLOCK.sub(" ", content)).split()
    lines = sum(bool(line.strip()) for block in BLOCK.findall(content) for line in block.splitlines())
    return max(1, round(len(words) / WORDS + lines / LINES + content.count("<img") / FIGURES))
