"""The stages of a node's context: what is read at which plates, and what is pooled on the way out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpejax.flows.ancestral.covariates import Plates, Table, family, picks
from cpejax.program.conditional import ConditionalProgram
from cpejax.program.graph import Graph
from cpejax.program.members import Link


@dataclass(frozen=True, eq=False)
class Reading:
    """The columns that the nodes of a group read from one table: `columns[node]`, padded with the zero column.

    With `across`, members of these plates read columns of their own: `columns[node, *across]`.
    """

    table: Table
    columns: np.ndarray
    counts: np.ndarray
    across: Plates = ()


@dataclass(frozen=True, eq=False)
class Stage:
    """One network of a group, at `plates`: it reads tables and messages, and its output is pooled over `pool`.

    The last stage of a group is at the group's own plates, has `pool=None`, and gives the context.

    - `within`: the plate in whose groups it is pooled, where an index array says which; `None`: over all members.
    - `raw`: which of its readings are also pooled as they are, and `columns` that it sends on by that, with those that
        arrive. A mean of products of data and covariates is what a regression needs, and networks are slow to learn.
    """

    plates: Plates
    pool: str | None
    readings: tuple[Reading, ...]
    messages: tuple[int, ...]
    within: str | None = None
    raw: tuple[int, ...] = ()
    columns: int = 0
    light: bool = False  # many members, of which a regression is read as well: a network without hidden blocks will do


@dataclass(frozen=True, eq=False)
class Places:
    """Where columns are; see `Layout`."""

    features: dict[str, tuple[Table, slice]]
    chain: dict[str, slice]
    products: dict[str, slice]
    widths: dict[Table, int]
    summaries: dict[str, tuple[Table, slice]]
    relative: dict[str, slice]
    measured: dict[str, tuple[str, slice]]


def with_axis(graph: Graph, at: frozenset[str]) -> frozenset[str]:
    """The plates that have an axis: the others follow from these by index arrays."""
    return frozenset(p for p in at if not any((q, p) in graph.nests for q in at))


def _removed(graph: Graph, at: frozenset[str], plate: str, own: frozenset[str]) -> frozenset[str]:
    """The plates that are left once a plate is pooled; its members may be pooled within groups of another."""
    keep = graph.closure(with_axis(graph, at) - {plate}) | own
    outer = frozenset(g for o, g in graph.nests if o == plate)
    between = frozenset(g for g in outer - keep if graph.closure([g]) >= own & outer)
    nearest = with_axis(graph, between)
    if len(nearest) == 1:
        keep |= graph.closure(nearest)
    return frozenset(keep & at)


def stages_of(posterior: ConditionalProgram, name: str) -> tuple:
    """The stages of a site's context: (plates, plate to pool, within which, stages whose messages arrive).

    What a site reads in plates it is not in is pooled one plate at a time, the innermost first, so that a summary of
    each group exists before the groups are pooled.
    """
    graph = posterior.graph
    own = graph.around(name)
    # A plate nested in another has fewer sites than it.
    depth = {p: (sum(p in graph.around(s) for s in graph.sites), p) for p in graph.plates}

    def inner(at: frozenset[str]) -> str:
        return min(with_axis(graph, at) - own, key=depth.__getitem__)

    levels: dict[frozenset[str], frozenset[str] | None] = {own: None}  # and what is left of each once it is pooled
    for parent in posterior.parents[name]:
        at = frozenset(own | graph.around(parent))
        while at not in levels:
            levels[at] = _removed(graph, at, inner(at), own)
            at = levels[at] or own
    ordered = sorted(levels, key=lambda at: (-len(at), sorted(at)))
    out = []
    for i, at in enumerate(ordered):
        arriving = tuple(j for j in range(i) if ordered[j] != own and levels[ordered[j]] == at)
        left = levels[at]
        new = with_axis(graph, left) - with_axis(graph, at) if left is not None else frozenset()
        out.append((at, inner(at) if at != own else None, min(new, default=None), arriving))
    return tuple(out)


def pooled_raw(graph: Graph, readings: tuple[Reading, ...], pool: str | None) -> tuple[int, ...]:
    """The readings that differ between the members that are pooled, but for constants."""
    if pool is None:
        return ()
    return tuple(
        i
        for i, r in enumerate(readings)
        if r.table.kind != "constants" and pool in graph.closure((*r.table.plates, *r.across))
    )


def readings_at(
    posterior: ConditionalProgram, nodes: tuple[tuple[str, int], ...], at: frozenset[str], pooled: bool, places: Places
) -> tuple[Reading, ...]:
    """What each node reads at some plates: all its parents there or further out, and what precedes it in its chain.

    Then the constants there, and of unrolled sites that an index array points to, the member that it names.
    """
    graph = posterior.graph
    pointing = [link for link in picks(graph) if set(link.source) <= at]
    # What each member reads of an unrolled site by an index need not be read as a whole before it is pooled.
    pointed = {s.name for link in pointing for s in family(graph, link)} if pooled else set()
    found: dict[Table, list[list[int]]] = {}
    for i, (name, k) in enumerate(nodes):
        for parent in posterior.parents[name]:
            if graph.around(parent) <= at and parent not in pointed:
                table, columns = places.features[parent]
                read = [*range(columns.start, columns.stop)]
                if parent in places.relative and pooled and not graph.around(name) & graph.around(parent):
                    read += range(places.relative[parent].start, places.relative[parent].stop)
                if parent in places.products:
                    read += range(places.products[parent].start, places.products[parent].stop)
                found.setdefault(table, [[] for _ in nodes])[i] += read
            if parent in places.summaries and not pooled and not at & graph.around(parent):
                table, columns = places.summaries[parent]
                found.setdefault(table, [[] for _ in nodes])[i] += range(columns.start, columns.stop)
        if name in places.measured and not pooled:
            columns = places.measured[name][1]
            found.setdefault(places.features[name][0], [[] for _ in nodes])[i] += range(columns.start, columns.stop)
        if k > 0:
            table, _ = places.features[name]
            chain = places.chain[name]
            middle = (chain.start + chain.stop) // 2
            before = [*range(chain.start, chain.start + k), *range(middle, middle + k)]
            found.setdefault(table, [[] for _ in nodes])[i] += before
    for table, width in places.widths.items():
        if table.kind == "constants" and graph.closure(table.plates) <= at:
            found[table] = [[*range(width - 2)] for _ in nodes]
    out = []
    for table, rows in found.items():
        width = max(len(row) for row in rows)
        zero = places.widths[table] - 2
        padded = np.array([row + [zero] * (width - len(row)) for row in rows], np.int32)
        out.append(Reading(table, padded, np.array([len(row) for row in rows])))
    for link in pointing:
        out += _pointed(posterior, nodes, link, places)
    return tuple(out)


def _pointed(
    posterior: ConditionalProgram, nodes: tuple[tuple[str, int], ...], link: Link, places: Places
) -> list[Reading]:
    """What members read of the unrolled sites that a link points to, as far as each node knows them."""
    kin: dict[tuple, dict[int, str]] = {}
    for site in family(posterior.graph, link):
        rest = tuple(pair for pair in site.index if pair[0] != link.target)
        kin.setdefault((site.origin, rest), {})[dict(site.index)[link.target]] = site.name
    index = link.index.values[..., 0]
    out = []
    for members in kin.values():
        table, _ = places.features[members[0]]
        width = max(places.features[m][1].stop - places.features[m][1].start for m in members.values())
        zero = places.widths[table] - 2
        columns = np.full((len(nodes), *index.shape, width), zero, np.int32)
        known = np.zeros(len(nodes), int)
        for i, (name, _) in enumerate(nodes):
            for number, member in members.items():
                if member in posterior.parents[name]:
                    place = places.features[member][1]
                    columns[i][index == number, : place.stop - place.start] = np.arange(place.start, place.stop)
                    known[i] = width
        if known.any():
            out.append(Reading(table, columns, known, link.source))
    return out
