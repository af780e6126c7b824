"""Figures as SVG inside an HTML page, in the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cpejax.plot.style import INK, PAPER, PLATE, SHADE

COLOURS = {INK: "var(--ink)", PAPER: "var(--paper)", SHADE: "var(--shade)", PLATE: "var(--muted)"}
"""Colours of the figures that follow the page's; the others are seen on light and on dark."""


class PageFigure(NamedTuple):
    """What is inside an `<svg>` element, its view box and width in inches, and the words that go with it."""

    number: int
    content: str
    box: str
    width: float
    words: str
    caption: str


class PageFigures:
    """Makes the figures of one page, numbered from 1."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, draw: Callable[[], Figure], words: str, caption: str) -> PageFigure:
        """A figure with its description for those who do not see it, and a caption."""
        self.count += 1
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cpejax"}):
            figure = draw()
            try:
                buffer = io.StringIO()
                figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
                width = figure.get_figwidth()
            finally:
                plt.close(figure)
        svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
        # Names inside a page are unique.
        mark = f"f{self.count}-"
        svg = re.sub(r'\bid="', f'id="{mark}', svg)
        svg = re.sub(r"url\(#", f"url(#{mark}", svg)
        svg = re.sub(r'xlink:href="#', f'xlink:href="#{mark}', svg)
        for colour, variable in COLOURS.items():
            svg = svg.replace(colour, variable)
        found = re.search(r'<svg[^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', svg, flags=re.DOTALL)
        if found is None:
            raise RuntimeError("matplotlib wrote an SVG without a viewBox.")
        return PageFigure(self.count, found.group(2), found.group(1), width, words, caption)
