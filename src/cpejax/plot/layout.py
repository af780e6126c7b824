"""Where the circles, boxes and arrows of a graph go (in inches; `cpejax.plot` draws them).

Sites stand in rows, parents above children. One order of all sites from left to right is searched that keeps the
members of a plate together and lets few edges cross; the positions are then the least squares solution of "short edges"
under "nothing overlaps, and a box holds its members and nobody else".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import linprog, nnls

GAP = 0.3  # between circles that stand side by side
ROW = 0.5  # between the rows, if no box begins or ends there
PAD = 0.14  # between a box and what is in it
LABEL = 0.2  # the strip at a box's foot for its label
CLEAR = 0.06  # between an edge and a circle that it passes
BENDS = (0.0, *(side * b for b in (0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0) for side in (1, -1)))
MOST_WORK = 20_000_000  # pairs of edges looked at while searching an order
MOST_EDGES = 400  # of which crossings are counted

Edge = tuple[str, str]
Points = Float[np.ndarray, "n 2"]
Parabola = Float[np.ndarray, "3 2"]  # start, control point, end


class Box(NamedTuple):
    """A plate: its lower left and upper right corners, and at which side its label stands."""

    left: float
    bottom: float
    right: float
    top: float
    label_left: bool


@dataclass(frozen=True)
class Diagram:
    """Centres of the sites, boxes of the plates, and the plates that no box can show (their members are named)."""

    at: dict[str, tuple[float, float]]
    boxes: dict[str, Box]
    unboxed: dict[str, tuple[str, ...]]
    radius: float

    def arrow(self, edge: Edge) -> Parabola:
        """An edge from rim to rim: the start, the control point and the end of a parabola that passes other sites by.

        It is straight if it can be, and otherwise bends as little as it must.
        """
        a, b = (np.array(self.at[name]) for name in edge)
        others = np.array([p for name, p in self.at.items() if name not in edge]).reshape(-1, 2)
        best, room = 0.0, -np.inf
        for bend in BENDS:
            points = bezier(_parabola(a, b, bend))
            clearance = np.linalg.norm(points[:, None] - others[None], axis=-1).min(initial=np.inf) - self.radius
            if clearance > room:
                best, room = bend, clearance
            if room >= CLEAR:
                break
        return _clipped(_parabola(a, b, best), self.radius)


def bezier(control: Parabola, t: np.ndarray | None = None) -> Points:
    """Points on a parabola with these three control points."""
    t = (np.linspace(0, 1, 41) if t is None else t)[:, None]
    return (1 - t) ** 2 * control[0] + 2 * t * (1 - t) * control[1] + t**2 * control[2]


def _parabola(a: np.ndarray, b: np.ndarray, bend: float) -> Parabola:
    """From a to b, with the middle off by half of `bend` times the distance."""
    return np.stack([a, (a + b) / 2 + bend * np.array([(b - a)[1], -(b - a)[0]]), b])


def _clipped(control: Parabola, radius: float) -> Parabola:
    """The part of a parabola that is outside the circles around its ends."""
    t = np.linspace(0, 1, 2001)
    points = bezier(control, t)
    outside = np.all([np.linalg.norm(points - end, axis=-1) >= radius for end in (control[0], control[2])], axis=0)
    low, high = t[outside][[0, -1]]
    blossom = (1 - low) * (1 - high), low * (1 - high) + high * (1 - low), low * high
    middle = sum(w * c for w, c in zip(blossom, control, strict=True))
    return np.stack([*bezier(control, np.array([low])), middle, *bezier(control, np.array([high]))])


def place(
    parents: Mapping[str, Sequence[str]],
    plates: Mapping[str, Sequence[str]],
    radius: float,
    widths: Mapping[str, float] | None = None,
    also: Iterable[Edge] = (),
) -> Diagram:
    """Place the sites and plates of a graph.

    **Arguments:**

    - `parents`: the parents of every site.
    - `plates`: the members of every plate.
    - `radius`: of the circles.
    - `widths`: of the plates' labels.
    - `also`: edges of the posterior program, which count less.
    """
    row = _rows(parents)
    edges = [(p, c) for c, ps in parents.items() for p in ps]
    weights = dict.fromkeys(edges, 1.0)
    weights |= {e: 0.2 for e in also if e not in weights and e[::-1] not in weights}
    members = {plate: frozenset(sites) for plate, sites in plates.items()}
    boxed = dict(members)
    while True:
        rank = _order(row, weights, boxed)
        try:
            x, sides = _columns(row, rank, edges, boxed, radius, widths or {})
            break
        except _Infeasible:
            worst = max(boxed, key=lambda plate: (_intruders(boxed, plate, row, rank), plate))
            del boxed[worst]
    layers = _layers(boxed)
    tagged = {row[m] for plate in members for m in members[plate] if plate not in boxed}
    y = _heights(row, boxed, layers, radius, tagged)
    at = {name: (x[name], y[row[name]]) for name in parents}
    boxes = {}
    for plate, (left, right) in sides.items():
        above, below = _margins(layers[plate])
        heights = [at[m][1] for m in boxed[plate]]
        label_left = _label_left(plate, boxed, x)
        below += LABEL * (max(row[m] for m in boxed[plate]) in tagged)
        boxes[plate] = Box(left, min(heights) - radius - below, right, max(heights) + radius + above, label_left)
    return Diagram(at, boxes, {p: tuple(sorted(members[p])) for p in members if p not in boxed}, radius)


def _rows(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The row of each site, counted from the top: parents above children, edges as short as possible."""
    names = list(parents)
    edges = [(names.index(p), names.index(c)) for c in names for p in parents[c]]
    if not edges:
        return dict.fromkeys(names, 0)
    order = np.zeros((len(edges), len(names)))
    for k, (p, c) in enumerate(edges):
        order[k, p], order[k, c] = 1, -1
    # The optimum is integral: the matrix is that of a graph.
    found = linprog(-order.sum(0) + 1e-4, A_ub=order, b_ub=-np.ones(len(edges)), bounds=(0, len(names)))
    return {name: round(level) for name, level in zip(names, found.x, strict=True)}


# ---- the order from left to right


def _order(row: dict[str, int], edges: dict[Edge, float], members: dict[str, frozenset[str]]) -> dict[str, int]:
    """The place of each site in one order from left to right, found by moving one site at a time."""
    cost = _Cost(row, edges, members)
    names = list(row)
    # Plates first, so that their members begin together.
    start = sorted(range(len(names)), key=lambda i: sorted(p for p in members if names[i] in members[p]))
    rng = np.random.default_rng(0)
    best, least = start, np.inf
    for attempt in range(8):
        order = start if attempt == 0 else rng.permutation(len(names)).tolist()
        order, value = _descend(cost, order)
        if value < least:
            best, least = order, value
        if cost.spent:
            break
    return {names[i]: k for k, i in enumerate(best)}


def _descend(cost: _Cost, order: list[int]) -> tuple[list[int], float]:
    order, value = list(order), cost(order)
    improved = True
    while improved and not cost.spent:
        improved = False
        for site in list(order):
            rest = [i for i in order if i != site]
            for k in range(len(order) if not cost.spent else 0):
                trial = [*rest[:k], site, *rest[k:]]
                new = cost(trial)
                if new < value - 1e-9:
                    order, value, improved = trial, new, True
    return order, value


class _Cost:
    """How bad an order is: strangers in boxes; crossings; the length of edges; neighbours that changed places."""

    def __init__(self, row: dict[str, int], edges: dict[Edge, float], members: dict[str, frozenset[str]]):
        names = list(row)
        self.work = 0
        self.row = np.array([row[n] for n in names], float)
        self.ends = np.array([(names.index(a), names.index(b)) for a, b in edges], int).reshape(-1, 2)
        self.weight = np.array(list(edges.values()))
        first, second = np.triu_indices(min(len(edges), MOST_EDGES), 1)
        apart = (self.ends[first][:, :, None] != self.ends[second][:, None, :]).all((1, 2))
        self.pairs = first[apart], second[apart]
        first, second = np.triu_indices(len(names), 1)
        beside = self.row[first] == self.row[second]
        self.beside = first[beside], second[beside]
        self.boxes = [np.array([n in sites for n in names]) for sites in members.values()]
        self.spans = [(self.row[m].min(), self.row[m].max()) for m in self.boxes]
        self.strangers = [
            ~m & (self.row >= low) & (self.row <= high) for m, (low, high) in zip(self.boxes, self.spans, strict=True)
        ]
        self.disjoint = [
            (a, b)
            for a, b in itertools.combinations(range(len(self.boxes)), 2)
            if not (self.boxes[a] & self.boxes[b]).any()
            and self.spans[a][0] <= self.spans[b][1]
            and self.spans[b][0] <= self.spans[a][1]
        ]

    @property
    def spent(self) -> bool:
        return self.work > MOST_WORK

    def __call__(self, order: Sequence[int]) -> float:
        self.work += 1_000 + len(self.pairs[0])
        x = np.empty(len(order))
        x[list(order)] = np.arange(len(order))
        moved = 0.2 * (x[self.beside[0]] > x[self.beside[1]]).mean() if len(self.beside[0]) else 0.0
        return 1000.0 * self._overlaps(x) + 10.0 * self._crossings(x) + self._length(x) + moved

    def _overlaps(self, x: np.ndarray) -> int:
        ranges = [(x[m].min(), x[m].max()) for m in self.boxes]
        inside = sum(
            int(((x > low) & (x < high) & s).sum()) for (low, high), s in zip(ranges, self.strangers, strict=True)
        )
        return inside + sum(bool(ranges[a][0] < ranges[b][1] and ranges[b][0] < ranges[a][1]) for a, b in self.disjoint)

    def _crossings(self, x: np.ndarray) -> float:
        i, j = self.pairs
        points = np.stack([x, self.row], -1)[self.ends]  # (edges, 2 ends, 2)
        a, b, c, d = points[i, 0], points[i, 1], points[j, 0], points[j, 1]
        crosses = (_turn(a, b, c) * _turn(a, b, d) < 0) & (_turn(c, d, a) * _turn(c, d, b) < 0)
        return float((crosses * self.weight[i] * self.weight[j]).sum())

    def _length(self, x: np.ndarray) -> float:
        return float((self.weight * np.abs(x[self.ends[:, 0]] - x[self.ends[:, 1]])).sum()) / len(x)


def _turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (b[:, 0] - a[:, 0]) * (c[:, 1] - a[:, 1]) - (b[:, 1] - a[:, 1]) * (c[:, 0] - a[:, 0])


def _intruders(boxed: dict[str, frozenset[str]], plate: str, row: dict[str, int], rank: dict[str, int]) -> int:
    """How many sites a box would hold that are not its own."""
    rows, ranks = [row[m] for m in boxed[plate]], [rank[m] for m in boxed[plate]]
    return sum(
        min(rows) <= row[n] <= max(rows) and min(ranks) < rank[n] < max(ranks) for n in row if n not in boxed[plate]
    )


# ---- positions


class _Infeasible(Exception):
    pass


def _columns(
    row: dict[str, int],
    rank: dict[str, int],
    edges: Sequence[Edge],
    boxed: dict[str, frozenset[str]],
    radius: float,
    widths: Mapping[str, float],
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Horizontal positions of the sites, and of the sides of the boxes.

    Edges are short, sites of a row stand in their order, and boxes hold their members and nobody else.
    """
    names = sorted(row, key=rank.__getitem__)
    at = {name: i for i, name in enumerate(names)}
    sides = {plate: (len(names) + 2 * k, len(names) + 2 * k + 1) for k, plate in enumerate(boxed)}
    size = len(names) + 2 * len(boxed)
    apart: list[tuple[int, int, float]] = []  # (left, right, distance at least)
    for level in set(row.values()):
        apart += [(at[a], at[b], 2 * radius + GAP) for a, b in itertools.pairwise(n for n in names if row[n] == level)]
    for plate, (left, right) in sides.items():
        apart.append((left, right, widths.get(plate, 0.0) + 2 * PAD))
        for member in boxed[plate]:
            apart += [(left, at[member], radius + PAD), (at[member], right, radius + PAD)]
        levels = [row[m] for m in boxed[plate]]
        first = min(rank[m] for m in boxed[plate])
        for name in names:
            if name not in boxed[plate] and min(levels) <= row[name] <= max(levels):
                is_left = rank[name] < first
                apart.append((at[name], left, radius + PAD) if is_left else (right, at[name], radius + PAD))
    for p, q in itertools.combinations(boxed, 2):
        apart += _between(p, q, sides, boxed, row, rank)
    # Edges inside a plate are the ones that should be straight.
    strength = np.array([3.0 if any({a, b} <= sites for sites in boxed.values()) else 1.0 for a, b in edges])
    weights = strength
    for _ in range(12 if size < 60 else 3):
        pull = 1e-4 * np.eye(size)
        for left, right in sides.values():
            pull += 0.05 * _difference(size, left, right)
        for (a, b), weight in zip(edges, weights, strict=True):
            pull += weight * _difference(size, at[a], at[b])
        x = _least_squares(pull, apart)
        # Again, with the weights that make squares absolute values: edges that can be vertical become so.
        weights = strength / (np.array([abs(x[at[a]] - x[at[b]]) for a, b in edges]) + 0.02)
    boxes = {plate: (float(x[left]), float(x[right])) for plate, (left, right) in sides.items()}
    return {name: float(x[at[name]]) for name in names}, boxes


def _between(
    p: str,
    q: str,
    sides: dict[str, tuple[int, int]],
    boxed: dict[str, frozenset[str]],
    row: dict[str, int],
    rank: dict[str, int],
) -> list[tuple[int, int, float]]:
    """What keeps the edges of two boxes apart: nested, side by side, or overlapping like steps."""
    if boxed[q] > boxed[p]:
        p, q = q, p
    (p_left, p_right), (q_left, q_right) = sides[p], sides[q]
    if boxed[p] >= boxed[q]:
        return [(p_left, q_left, PAD), (q_right, p_right, PAD)]
    p_rows, q_rows = ({row[m] for m in boxed[s]} for s in (p, q))
    if min(p_rows) > max(q_rows) or min(q_rows) > max(p_rows):
        return []
    p_only, q_only = boxed[p] - boxed[q], boxed[q] - boxed[p]
    if np.mean([rank[m] for m in p_only]) > np.mean([rank[m] for m in q_only]):
        (p_left, p_right), (q_left, q_right) = sides[q], sides[p]
    if boxed[p] & boxed[q]:
        return [(p_left, q_left, PAD), (p_right, q_right, PAD)]
    return [(p_right, q_left, PAD)]


def _difference(size: int, a: int, b: int) -> np.ndarray:
    step = np.zeros(size)
    step[a], step[b] = 1, -1
    return np.outer(step, step)


def _least_squares(pull: np.ndarray, apart: list[tuple[int, int, float]]) -> np.ndarray:
    """The minimum of `x' pull x` with `x[right] - x[left] >= distance`: a least distance problem, solved by its dual.

    Lawson and Hanson, Solving least squares problems (1974), chapter 23.
    """
    if not apart:
        return np.zeros(len(pull))
    rule = np.zeros((len(apart), len(pull)))
    for k, (left, right, _) in enumerate(apart):
        rule[k, left], rule[k, right] = -1, 1
    distance = np.array([d for *_, d in apart])
    factor = np.linalg.cholesky(pull).T
    whitened = np.linalg.solve(factor.T, rule.T).T
    system = np.vstack([whitened.T, distance])
    target = np.zeros(len(system))
    target[-1] = 1
    dual, _ = nnls(system, target, maxiter=100 * len(apart))
    residual = system @ dual - target
    x = np.linalg.solve(factor, -residual[:-1] / min(residual[-1], -1e-300))
    if not np.all(np.isfinite(x)) or np.any(rule @ x < distance - 1e-3):
        raise _Infeasible
    return x


# ---- boxes


def _layers(boxed: dict[str, frozenset[str]]) -> dict[str, int]:
    """Boxes that share members get different layers, larger boxes the higher ones: their margins grow with them."""
    layers: dict[str, int] = {}
    for plate in sorted(boxed, key=lambda p: (len(boxed[p]), -list(boxed).index(p))):
        layers[plate] = 1 + max((layers[q] for q in layers if boxed[q] & boxed[plate]), default=0)
    return layers


def _margins(layer: int) -> tuple[float, float]:
    """Above and below the members of a box."""
    return PAD + 0.1 * (layer - 1), PAD / 2 + LABEL * layer


def _heights(
    row: dict[str, int], boxed: dict[str, frozenset[str]], layers: dict[str, int], radius: float, tagged: set[int]
) -> dict[int, float]:
    """The height of each row, from 0 down; rows that are `tagged` have words below their circles."""
    above = dict.fromkeys(row.values(), 0.0)
    below = dict.fromkeys(row.values(), 0.0)
    for plate, sites in boxed.items():
        top, bottom = min(row[s] for s in sites), max(row[s] for s in sites)
        above[top] = max(above[top], _margins(layers[plate])[0])
        below[bottom] = max(below[bottom], _margins(layers[plate])[1])
    heights, y = {}, 0.0
    for level in range(max(row.values()) + 1):
        if level:
            y -= 2 * radius + ROW + below.get(level - 1, 0.0) + above.get(level, 0.0) + LABEL * (level - 1 in tagged)
        heights[level] = y
    return heights


def _label_left(plate: str, boxed: dict[str, frozenset[str]], x: dict[str, float]) -> bool:
    """Whether another box lies over the right end of this one, where the label would be."""
    own = boxed[plate]
    return any(
        own & sites and own - sites and sites - own and max(x[m] for m in sites) > max(x[m] for m in own)
        for sites in boxed.values()
    )
