"""A program and its posterior program, drawn side by side."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from functools import lru_cache

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path
from matplotlib.textpath import text_to_path

from cpejax.plot.layout import Diagram, Edge, Parabola, bezier, place
from cpejax.plot.style import INK, PLATE, SHADE
from cpejax.program.graph import Graph
from cpejax.program.inverse import PosteriorProgram, invert
from cpejax.program.model import Model, as_model
from cpejax.program.simulator import Program

FONT = 10.0  # points, of a site's name
SMALLEST_FONT = 7.0
RADII = (0.24, 0.46)  # inches: the least, and the one up to which circles grow before the names shrink
LABEL_FONT = 8.0
TITLE_FONT = 11.0


def graph(model: Model | Graph | Program, posterior: PosteriorProgram | None = None) -> Figure:
    """Draw a program and its posterior program side by side, as in the paper's Figure 1.

    Circles are sites, data are shaded, boxes are plates with name and size. Both sides have the same layout, so that
    they can be compared; where a plate is unrolled in the posterior program, its members are drawn there one by one.
    Below stand the constants that members of a plate differ by, and the index arrays between plates.

    **Arguments:**

    - `model`: a `cpe.Model`, a graph, or a NumPyro program without arguments.
    - `posterior`: what is drawn on the right; `cpe.invert(graph)` if not given.

    **Returns:** the figure, as large as it needs to be. Save it with `figure.savefig("graph.svg")`.

    >>> prior = cpe.Graph.from_edges({"theta2": ["theta1"], "x": ["theta2", "theta3"]}, observed=["x"])
    >>> figure = cpe.plot.graph(prior, cpe.invert(prior, how="reverse"))  # the paper's Figure 1
    >>> type(figure).__name__
    'Figure'
    """
    prior = model if isinstance(model, Graph) else as_model(model).graph
    posterior = invert(prior) if posterior is None else posterior
    reads = [(p, name) for name in posterior.order for p in posterior.parents[name]]
    causes = [(p, name) for name, parents in prior.parents.items() for p in parents]
    if posterior.graph.sites.keys() == prior.sites.keys():
        left = right = _diagram(prior, reads)
    else:
        left, right = _diagram(prior), _diagram(posterior.graph, reads)
    notes = [f"plate '{plate}' is unrolled: {why}" for plate, why in posterior.graph.unrolled.items()]
    panes = [
        _Pane(prior, left, causes, "Prior program", [" ".join(note.split()) for note in prior.notes()]),
        _Pane(posterior.graph, right, reads, "Posterior program", notes, dashed=True),
    ]
    foot = max(pane.foot for pane in panes)
    width, height = sum(pane.width for pane in panes), max(pane.height for pane in panes) + foot
    figure = plt.figure(figsize=(width, height))
    start = 0.0
    for pane in panes:
        axes = figure.add_axes((start / width, 0.0, pane.width / width, 1.0))
        pane.draw(axes, height, foot)
        start += pane.width
    return figure


class _Pane:
    """One graph with its title, in axes where one unit is one inch."""

    def __init__(
        self,
        graph: Graph,
        diagram: Diagram,
        edges: list[Edge],
        title: str,
        notes: Sequence[str] = (),
        dashed: bool = False,
    ):
        self.graph, self.diagram, self.title, self.dashed = graph, diagram, title, dashed
        self.arrows = [diagram.arrow(edge) for edge in edges]
        r = diagram.radius
        points = [(x + dx, y + dy) for x, y in diagram.at.values() for dx, dy in ((r, r), (-r, -r))]
        for box in diagram.boxes.values():
            points += [(box.left, box.bottom), (box.right, box.top)]
        for arrow in self.arrows:
            points += [(float(x), float(y)) for x, y in bezier(arrow)]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self.left, self.right, self.bottom, self.top = min(xs), max(xs), min(ys), max(ys)
        self.width = max(self.right - self.left, 1.8) + 0.7
        wide = max(24, int(self.width * 72 / LABEL_FONT / 0.55))
        self.notes = [line for note in notes for line in textwrap.wrap(note, wide)]
        self.foot = 0.55 + 0.15 * len(self.notes)
        self.height = self.top - self.bottom + 0.25

    def draw(self, axes: Axes, height: float, foot: float) -> None:
        centre = (self.left + self.right) / 2
        axes.set_xlim(centre - self.width / 2, centre + self.width / 2)
        axes.set_ylim(self.top + 0.25 - height, self.top + 0.25)
        axes.set_axis_off()
        for plate in sorted(self.diagram.boxes, key=lambda p: -self._area(p)):
            self._draw_plate(axes, plate)
        for name in self.diagram.at:
            self._draw_site(axes, name)
        for arrow in self.arrows:
            self._draw_arrow(axes, arrow)
        y = self.top + 0.25 - height + foot - 0.3
        axes.text(centre, y, self.title, ha="center", va="center", fontsize=TITLE_FONT, color=INK)
        for i, line in enumerate(self.notes):
            axes.text(centre, y - 0.2 - 0.15 * i, line, ha="center", va="center", fontsize=LABEL_FONT, color=PLATE)

    def _area(self, plate: str) -> float:
        box = self.diagram.boxes[plate]
        return (box.right - box.left) * (box.top - box.bottom)

    def _draw_plate(self, axes: Axes, plate: str) -> None:
        box = self.diagram.boxes[plate]
        style = "round,pad=0,rounding_size=0.08"
        size = (box.right - box.left, box.top - box.bottom)
        line = "dotted" if plate in self.graph.unrolled else "solid"
        axes.add_patch(
            FancyBboxPatch(
                (box.left, box.bottom), *size, boxstyle=style, fill=False, edgecolor=PLATE, linestyle=line, zorder=1
            )
        )
        x, side = (box.left + 0.08, "left") if box.label_left else (box.right - 0.08, "right")
        text = plate_label(self.graph, plate)
        axes.text(
            x,
            box.bottom + 0.06,
            text,
            ha=side,
            va="bottom",
            fontsize=LABEL_FONT,
            color=PLATE,
            parse_math=False,
            zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )

    def _draw_site(self, axes: Axes, name: str) -> None:
        site, (x, y) = self.graph.sites[name], self.diagram.at[name]
        face = SHADE if site.observed else "white"
        circle = Circle((x, y), self.diagram.radius, facecolor=face, edgecolor=INK, linewidth=1.1, zorder=3)
        axes.add_patch(circle)
        lines, font = fitted(name, self.diagram.radius)
        axes.text(
            x,
            y,
            "\n".join(lines),
            ha="center",
            va="center",
            fontsize=font,
            color=INK,
            parse_math=False,
            linespacing=1.15,
            zorder=5,
        )
        tags = [plate_label(self.graph, p) for p, sites in self.diagram.unboxed.items() if name in sites]
        if tags:
            below = y - self.diagram.radius - 0.03
            axes.text(x, below, ", ".join(tags), ha="center", va="top", fontsize=SMALLEST_FONT, color=PLATE, zorder=5)

    def _draw_arrow(self, axes: Axes, arrow: Parabola) -> None:
        axes.add_artist(
            FancyArrowPatch(
                path=Path(arrow, [Path.MOVETO, Path.CURVE3, Path.CURVE3]),
                arrowstyle="-|>,head_length=0.45,head_width=0.22",
                mutation_scale=12,
                linestyle=(0, (4, 2.5)) if self.dashed else "solid",
                linewidth=1.0,
                color=INK,
                joinstyle="miter",
                zorder=2,
            )
        )


def plate_label(graph: Graph, plate: str) -> str:
    """What stands in a plate's box."""
    if plate in graph.plates:
        return f"{plate}: {graph.plates[plate]}"
    return f"{plate}: {len(_indices(graph, plate))}, unrolled"


def _indices(graph: Graph, plate: str) -> set[int]:
    return {i for site in graph.sites.values() for p, i in site.index if p == plate}


def _diagram(graph: Graph, also: Sequence[Edge] = ()) -> Diagram:
    plates = {
        plate: [n for n, s in graph.sites.items() if plate in s.plates or plate in dict(s.index)]
        for plate in (*graph.plates, *graph.unrolled)
    }
    plates = {plate: members for plate, members in plates.items() if members}
    radius = max(RADII[0], *(min(_best(name)[1], RADII[1]) for name in graph.sites))
    radius = max(radius, *(_best(name)[1] * SMALLEST_FONT / FONT for name in graph.sites))
    widths = {plate: _width(plate_label(graph, plate), LABEL_FONT) + 0.1 for plate in plates}
    return place(graph.parents, plates, radius, widths, also)


# ---- names in circles


def fitted(name: str, radius: float) -> tuple[tuple[str, ...], float]:
    """The lines of a name, and the size of the font in which they fit into a circle."""
    lines, needed = _best(name)
    return lines, min(FONT, FONT * radius / needed)


@lru_cache(maxsize=4096)
def _best(name: str) -> tuple[tuple[str, ...], float]:
    """The lines of a name that need the smallest circle, and its radius."""
    parts = [p for p in re.split(r"(?<=[_.\-:/])|(?=\[)|(?<=, )", name) if p]
    parts = [piece for part in parts for piece in textwrap.wrap(part, 16, drop_whitespace=False)] or [name]
    candidates = {tuple(_wrap(parts, most)) for most in {*range(max(map(len, parts)), len(name) + 1)}}
    return min(((lines, _needed(lines)) for lines in candidates), key=lambda found: (round(found[1], 3), len(found[0])))


def _wrap(parts: list[str], most: int) -> list[str]:
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1] + part) <= most:
            lines[-1] += part
        else:
            lines.append(part)
    return [line.strip() for line in lines]


def _needed(lines: Sequence[str]) -> float:
    """The radius of a circle that holds these lines."""
    height = FONT * 1.3 / 72
    centres = [(i - (len(lines) - 1) / 2) * height for i in range(len(lines))]
    corners = ((_width(line, FONT) / 2, abs(y) + 0.38 * height) for line, y in zip(lines, centres, strict=True))
    return max((x**2 + y**2) ** 0.5 for x, y in corners) + 0.035


def _width(text: str, font: float) -> float:
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=font), ismath=False)
    return width / 72
