"""Where everything stands in the ancestral flow: which columns each node reads, at which plates, in which order.

A *node* is one coordinate of one member of a site; members of a plate share its weights. Nodes that read at the same
plates form a *group* and are computed together, by batched products. Values are held in *tables*, one for each kind
(data, parameters) and set of plates, with an axis for each plate and one for columns; a node reads columns by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cpejax._graph import Graph
from cpejax._invert import PosteriorProgram

Plates = tuple[str, ...]


class Table(NamedTuple):
    """The name of a table: `"data"` or `"parameters"`, and its plates."""

    kind: str
    plates: Plates


@dataclass(frozen=True, eq=False)
class Reading:
    """The columns that the nodes of a group read from one table: `columns[node]`, padded with the zero column."""

    table: Table
    columns: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, eq=False)
class Stage:
    """One network of a group, at `plates`: it reads tables and messages, and its output is pooled over `pool`.

    The last stage of a group is at the group's own plates, has `pool=None`, and gives the context.
    """

    plates: Plates
    pool: str | None
    readings: tuple[Reading, ...]
    messages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes with the same plates and the same stages."""

    plates: Plates
    nodes: tuple[tuple[str, int], ...]  # (site, coordinate)
    stages: tuple[Stage, ...]


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive levels that are computed by the same code: `sites[level][position]`, all of one group.

    - `nodes[level, k, position]`: the number in the group of the k-th coordinate of a site.
    - `chain[level, k, :, position]`: the two columns where it is written for those after it in its chain.
    - `columns[position][level]`: the columns of a site's features.

    Sites with fewer coordinates than the longest are padded: what is computed there goes to the waste column.
    """

    group: int
    sites: tuple[tuple[str, ...], ...]
    table: Table
    nodes: np.ndarray
    chain: np.ndarray
    columns: tuple[np.ndarray, ...]

    @property
    def coordinates(self) -> int:
        """The coordinates of the longest site."""
        return int(self.nodes.shape[1])


@dataclass(frozen=True, eq=False)
class Layout:
    """The whole plan. Equality is identity: it is static in compiled functions."""

    posterior: PosteriorProgram
    sizes: dict[str, int]  # coordinates of one member of each parameter site
    widths: dict[Table, int]  # columns of each table, with the zero column (last but one) and the waste column (last)
    features: dict[str, tuple[Table, slice]]  # where a site's features are
    chain: dict[str, slice]  # where a site with several coordinates has them, for those after in its chain: z, Φ(z)
    groups: tuple[Group, ...]
    runs: tuple[Run, ...]

    @property
    def graph(self) -> Graph:
        """The graph, coupled plates unrolled."""
        return self.posterior.graph

    def shape(self, plates: Plates) -> tuple[int, ...]:
        """The sizes of some plates."""
        return tuple(self.graph.plates[p] for p in plates)


def layout(posterior: PosteriorProgram, sizes: dict[str, int], features: dict[str, int]) -> Layout:
    """Plan the flow for a posterior program.

    **Arguments:** `sizes`, the coordinates of one member of each parameter; `features`, the feature columns of one
    member of each site.
    """
    graph = posterior.graph
    order = tuple(graph.plates)
    plates = {n: tuple(p for p in order if p in s.plates) for n, s in graph.sites.items()}
    widths: dict[Table, int] = {}
    where: dict[str, tuple[Table, slice]] = {}
    chain: dict[str, slice] = {}
    for name, site in graph.sites.items():
        table = Table("data" if site.observed else "parameters", plates[name])
        start = widths.get(table, 0)
        where[name] = (table, slice(start, start + features[name]))
        widths[table] = start + features[name]
        if not site.observed and sizes[name] > 1:
            chain[name] = slice(widths[table], widths[table] + 2 * sizes[name])
            widths[table] += 2 * sizes[name]
    widths = {table: width + 2 for table, width in widths.items()}

    signature: dict[str, tuple] = {name: _stages(posterior, name, plates) for name in posterior.order}
    groups: list[Group] = []
    group_of: dict[str, int] = {}
    for sign in dict.fromkeys(signature.values()):
        members = [n for n in posterior.order if signature[n] == sign]
        nodes = tuple((n, k) for n in members for k in range(sizes[n]))
        group_of.update(dict.fromkeys(members, len(groups)))
        stages = []
        for at, pool, messages in sign:
            readings = _readings(posterior, nodes, set(at), where, chain, widths, plates)
            stages.append(Stage(at, pool, readings, messages))
        groups.append(Group(plates[members[0]], nodes, tuple(stages)))
    runs = tuple(
        _run(group, levels, groups[group], sizes, widths, where, chain)
        for group, levels in _levels(posterior, group_of, sizes, features)
    )
    return Layout(posterior, sizes, widths, where, chain, tuple(groups), runs)


def _stages(posterior: PosteriorProgram, name: str, plates: dict[str, Plates]) -> tuple:
    """The stages of a site's context: (plates, plate to pool, stages whose messages arrive), innermost first.

    What a site reads in plates it is not in is pooled one plate at a time, the innermost first, so that a summary of
    each group exists before the groups are pooled.
    """
    graph = posterior.graph
    own = set(plates[name])
    order = tuple(graph.plates)
    # A plate nested in another has fewer sites than it.
    depth = {p: (sum(p in s.plates for s in graph.sites.values()), p) for p in order}

    def inner(at: frozenset[str]) -> str:
        return min(at - own, key=depth.__getitem__)

    levels: set[frozenset[str]] = {frozenset(own)}
    for parent in posterior.parents[name]:
        at = frozenset(own | set(plates[parent]))
        while at not in levels:
            levels.add(at)
            at = at - {inner(at)}
    ordered = sorted(levels, key=lambda at: (-len(at), sorted(at)))
    out = []
    for i, at in enumerate(ordered):
        arriving = tuple(j for j in range(i) if ordered[j] != own and ordered[j] - {inner(ordered[j])} == at)
        out.append((tuple(p for p in order if p in at), inner(at) if at != own else None, arriving))
    return tuple(out)


def _readings(
    posterior: PosteriorProgram,
    nodes: tuple[tuple[str, int], ...],
    at: set[str],
    where: dict[str, tuple[Table, slice]],
    chain: dict[str, slice],
    widths: dict[Table, int],
    plates: dict[str, Plates],
) -> tuple[Reading, ...]:
    """What each node reads at some plates: all its parents there or further out, and what precedes it in its chain."""
    found: dict[Table, list[list[int]]] = {}
    for i, (name, k) in enumerate(nodes):
        for parent in posterior.parents[name]:
            if set(plates[parent]) <= at:
                table, columns = where[parent]
                found.setdefault(table, [[] for _ in nodes])[i] += range(columns.start, columns.stop)
        if k > 0:
            table, _ = where[name]
            middle = (chain[name].start + chain[name].stop) // 2
            before = [*range(chain[name].start, chain[name].start + k), *range(middle, middle + k)]
            found.setdefault(table, [[] for _ in nodes])[i] += before
    out = []
    for table, rows in found.items():
        width = max(len(row) for row in rows)
        zero = widths[table] - 2
        padded = np.array([row + [zero] * (width - len(row)) for row in rows], np.int32)
        out.append(Reading(table, padded, np.array([len(row) for row in rows])))
    return tuple(out)


def _levels(
    posterior: PosteriorProgram, group_of: dict[str, int], sizes: dict[str, int], features: dict[str, int]
) -> list[tuple[int, list[tuple[str, ...]]]]:
    """The sites in sampling order, by level and group; consecutive levels that look the same are put together."""
    found: list[tuple[int, list[tuple[str, ...]]]] = []
    last: tuple | None = None
    for level in posterior.levels:
        by_group: dict[int, list[str]] = {}
        for name in level:
            by_group.setdefault(group_of[name], []).append(name)
        for group, names in by_group.items():
            look = (group, [(posterior.graph.sites[n].shape, sizes[n], features[n]) for n in names])
            if len(by_group) == 1 and look == last:
                found[-1][1].append(tuple(names))
            else:
                found.append((group, [tuple(names)]))
            last = look if len(by_group) == 1 else None
    return found


def _run(
    number: int,
    levels: list[tuple[str, ...]],
    group: Group,
    sizes: dict[str, int],
    widths: dict[Table, int],
    where: dict[str, tuple[Table, slice]],
    chain: dict[str, slice],
) -> Run:
    at = {node: i for i, node in enumerate(group.nodes)}
    table = Table("parameters", group.plates)
    waste = widths[table] - 1
    most = range(max(sizes[name] for name in levels[0]))

    def written(level: tuple[str, ...], k: int) -> list[list[int]]:
        real = [name in chain and k < sizes[name] for name in level]
        z = [chain[name].start + k if there else waste for name, there in zip(level, real, strict=True)]
        return [z, [c + sizes[name] if there else waste for name, c, there in zip(level, z, real, strict=True)]]

    return Run(
        group=number,
        sites=tuple(levels),
        table=table,
        nodes=np.array([[[at.get((name, k), 0) for name in level] for k in most] for level in levels]),
        chain=np.array([[written(level, k) for k in most] for level in levels]),
        columns=tuple(
            np.array([np.arange(where[level[i]][1].start, where[level[i]][1].stop) for level in levels])
            for i in range(len(levels[0]))
        ),
    )
