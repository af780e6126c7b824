"""Where everything stands in the ancestral flow: which columns each node reads, at which plates, in which order.

A *node* is one coordinate of one member of a site; members of a plate share its weights. Nodes that read at the same
plates form a *group* and are computed together, by batched products. Values are held in *tables*, one for each kind
(data, parameters) and set of plates, with an axis for each plate and one for columns; a node reads columns by number.

What the program gives each member besides its sites (`Graph.constants`) is in tables of a third kind, and every stage
reads those of its plates. An index array (`Graph.links`) puts members of one plate into groups of another: a stage at
the members reads the group's columns by it, and its output is pooled within each group. Where the groups are unrolled,
each member reads the columns of the one it points to, and which that is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from cpejax.flows.ancestral.covariates import (
    FEW_MEMBERS,
    Plates,
    Regression,
    Table,
    multiplied,
    regression,
    table_constants,
)
from cpejax.flows.ancestral.stages import Places, Stage, pooled_raw, readings_at, stages_of, with_axis
from cpejax.program.conditional import ConditionalProgram
from cpejax.program.graph import Graph


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes with the same plates and the same stages."""

    plates: Plates
    nodes: tuple[tuple[str, int], ...]  # (site, coordinate)
    stages: tuple[Stage, ...]


@dataclass(frozen=True, eq=False)
class LevelRun:
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

    posterior: ConditionalProgram
    sizes: dict[str, int]  # coordinates of one member of each parameter site
    widths: dict[Table, int]  # columns of each table, with the zero column (last but one) and the waste column (last)
    features: dict[str, tuple[Table, slice]]  # where a site's features are
    chain: dict[str, slice]  # where a site with several coordinates has them, for those after in its chain: z, Φ(z)
    groups: tuple[Group, ...]
    runs: tuple[LevelRun, ...]
    constants: dict[Table, np.ndarray] = field(default_factory=dict)  # (1, *plates, width)
    products: dict[str, slice] = field(default_factory=dict)  # of a data site's features and constants: where they are
    regressions: dict[str, Regression] = field(default_factory=dict)  # of data sites on what tells members apart
    summaries: dict[str, tuple[Table, slice]] = field(default_factory=dict)  # where their results are, and moments
    relative: dict[str, slice] = field(default_factory=dict)  # of members relative to their plate: where they are
    measured: dict[str, tuple[str, slice]] = field(default_factory=dict)  # the datum of a parameter, and its columns
    all_measured: bool = True  # see `_measured`

    @property
    def graph(self) -> Graph:
        """The graph, coupled plates unrolled."""
        return self.posterior.graph

    def shape(self, plates: Plates) -> tuple[int, ...]:
        """The sizes of some plates."""
        return tuple(self.graph.plates[p] for p in plates)


MOST_PRODUCTS = 256
"""Columns of products of a site's features and constants; with more, networks have to learn them."""


def layout(
    posterior: ConditionalProgram,
    sizes: dict[str, int],
    features: dict[str, int],
    summaries: Mapping[str, int] | None = None,
    embedded: frozenset[str] = frozenset(),
    alike: Collection[str] = (),
    all_measured: bool = True,
) -> Layout:
    """Plan the flow for a posterior program.

    **Arguments:** `sizes`, the coordinates of one member of each parameter; `features`, the feature columns of one
    member of each site; `summaries`, the columns of the standardised results of each of the `regressions`; `embedded`,
    the program's sites whose features are trained; `alike`, the data sites that are read relative to their plate, of
    whose moments the other `summaries` are; `all_measured`, see `_measured`.
    """
    graph = posterior.graph
    order = tuple(graph.plates)
    plates = {n: tuple(p for p in order if p in s.plates) for n, s in graph.sites.items()}
    constants = table_constants(graph)
    widths: dict[Table, int] = {table: x.shape[-1] - 2 for table, x in constants.items()}
    where: dict[str, tuple[Table, slice]] = {}
    chain: dict[str, slice] = {}
    products: dict[str, slice] = {}
    relative: dict[str, slice] = {}
    data = _measured(graph, all_measured)
    measured: dict[str, tuple[str, slice]] = {}
    for name, site in graph.sites.items():
        table = Table("data" if site.observed else "parameters", plates[name])
        start = widths.get(table, 0)
        where[name] = (table, slice(start, start + features[name]))
        widths[table] = start + features[name]
        if not site.observed and sizes[name] > 1:
            chain[name] = slice(widths[table], widths[table] + 2 * sizes[name])
            widths[table] += 2 * sizes[name]
        if name in data:
            measured[name] = (data[name], slice(widths[table], widths[table] + 2))
            widths[table] += 2
        if name in alike:
            relative[name] = slice(widths[table], widths[table] + features[name])
            widths[table] += features[name]
        many = features[name] * sum(widths[t] for t in multiplied(graph, constants, name))
        if site.observed and site.origin not in embedded and 0 < many <= MOST_PRODUCTS:
            products[name] = slice(widths[table], widths[table] + many)
            widths[table] += many
    results: dict[str, tuple[Table, slice]] = {}
    for name, many in (summaries or {}).items():
        table = Table("data", ())
        start = widths.get(table, 0)
        results[name] = (table, slice(start, start + many))
        widths[table] = start + many
    widths = {table: width + 2 for table, width in widths.items()}

    signature: dict[str, tuple] = {name: stages_of(posterior, name) for name in posterior.order}
    groups: list[Group] = []
    group_of: dict[str, int] = {}
    places = Places(where, chain, products, widths, results, relative, measured)
    for sign in dict.fromkeys(signature.values()):
        members = [n for n in posterior.order if signature[n] == sign]
        nodes = tuple((n, k) for n in members for k in range(sizes[n]))
        group_of.update(dict.fromkeys(members, len(groups)))
        stages: list[Stage] = []
        for at, pool, within, messages in sign:
            readings = readings_at(posterior, nodes, at, pool is not None, places)
            raw = pooled_raw(graph, readings, pool) if constants or graph.links else ()
            columns = sum(readings[i].columns.shape[-1] for i in raw) + sum(stages[j].columns for j in messages)
            real = tuple(p for p in order if p in with_axis(graph, at))
            columns = columns if pool is not None else 0
            light = columns > 0 and int(np.prod([graph.plates[p] for p in real])) > FEW_MEMBERS
            stages.append(Stage(real, pool, readings, messages, within, raw, columns, light))
        groups.append(Group(plates[members[0]], nodes, tuple(stages)))
    runs = tuple(
        _run(group, levels, groups[group], sizes, widths, where, chain)
        for group, levels in _levels(posterior, group_of, sizes, features, measured)
    )
    fits = {name: regression(graph, constants, name) for name in results if name not in alike}
    return Layout(
        posterior,
        sizes,
        widths,
        where,
        chain,
        tuple(groups),
        runs,
        constants,
        products,
        fits,
        results,
        relative,
        measured,
        all_measured,
    )


def _measured(graph: Graph, everywhere: bool) -> dict[str, str]:
    """Parameters of members, each with a datum of its own kind: both real, one value for each member.

    If the datum is the parameter with an error, then in the parameter's own coordinate, whose scale other parameters
    set, it is what a small error, or a datum far from the others, makes certain, and networks would have to learn to
    divide. Not `everywhere`: only where members differ; so do flows that were saved without a mark of it.
    """
    differ = {p for c in graph.constants.values() for p in c.plates}
    among = set(graph.plates) if everywhere else differ
    out: dict[str, str] = {}
    for name in graph.parameters:
        site = graph.sites[name]
        for child in graph.children[name]:
            datum = graph.sites[child]
            alike = (site.dims, site.shape, site.support) == (datum.dims, datum.shape, datum.support)
            scalar = site.support == "real" and not site.event_shape and not site.index
            if datum.observed and alike and scalar and among & set(site.plates):
                out.setdefault(name, child)
    return out


def _levels(
    posterior: ConditionalProgram,
    group_of: dict[str, int],
    sizes: dict[str, int],
    features: dict[str, int],
    measured: Mapping[str, object],
) -> list[tuple[int, list[tuple[str, ...]]]]:
    """The sites in sampling order, by level and group; consecutive levels that look the same are put together."""
    found: list[tuple[int, list[tuple[str, ...]]]] = []
    last: tuple | None = None
    for level in posterior.levels:
        by_group: dict[int, list[str]] = {}
        for name in level:
            by_group.setdefault(group_of[name], []).append(name)
        for group, names in by_group.items():
            look = (group, [(posterior.graph.sites[n].shape, sizes[n], features[n], n in measured) for n in names])
            if len(by_group) == 1 and look == last:
                found[-1][1].append(tuple(names))
            else:
                found.append((group, [tuple(names)]))
            last = look if len(by_group) == 1 and not measured.keys() & set(names) else None
    return found


def _run(
    number: int,
    levels: list[tuple[str, ...]],
    group: Group,
    sizes: dict[str, int],
    widths: dict[Table, int],
    where: dict[str, tuple[Table, slice]],
    chain: dict[str, slice],
) -> LevelRun:
    at = {node: i for i, node in enumerate(group.nodes)}
    table = Table("parameters", group.plates)
    waste = widths[table] - 1
    most = range(max(sizes[name] for name in levels[0]))

    def written(level: tuple[str, ...], k: int) -> list[list[int]]:
        real = [name in chain and k < sizes[name] for name in level]
        z = [chain[name].start + k if there else waste for name, there in zip(level, real, strict=True)]
        return [z, [c + sizes[name] if there else waste for name, c, there in zip(level, z, real, strict=True)]]

    return LevelRun(
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
