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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cpejax.program.graph import Graph
from cpejax.program.inverse import PosteriorProgram
from cpejax.program.members import Constant, Link

Plates = tuple[str, ...]


class Table(NamedTuple):
    """The name of a table: `"data"`, `"parameters"` or `"constants"`, and its plates."""

    kind: str
    plates: Plates


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
class Regression:
    """The least squares fit of a data site's features on the constants and the groups of its members, all at once.

    - `solve`: `(coefficients, members)`, from a feature to its coefficients.
    - `fitted`: `(members, rank)`, an orthonormal basis of what constants and groups can fit.
    """

    solve: np.ndarray
    fitted: np.ndarray

    @property
    def size(self) -> int:
        """Results for each feature: the coefficients, and the logarithm of what is left."""
        return len(self.solve) + 1


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
    constants: dict[Table, np.ndarray] = field(default_factory=dict)  # (1, *plates, width)
    products: dict[str, slice] = field(default_factory=dict)  # of a data site's features and constants: where they are
    regressions: dict[str, Regression] = field(default_factory=dict)  # of data sites on what tells members apart
    summaries: dict[str, tuple[Table, slice]] = field(default_factory=dict)  # where their results are
    measured: dict[str, tuple[str, slice]] = field(default_factory=dict)  # the datum of a parameter, and its columns

    @property
    def graph(self) -> Graph:
        """The graph, coupled plates unrolled."""
        return self.posterior.graph

    def shape(self, plates: Plates) -> tuple[int, ...]:
        """The sizes of some plates."""
        return tuple(self.graph.plates[p] for p in plates)


MOST_PRODUCTS = 256
"""Columns of products of a site's features and constants; with more, networks have to learn them."""


FEW_MEMBERS = 24
"""Members that differ: up to so many, each goes through a network with hidden blocks before they are pooled."""


MOST_COEFFICIENTS = 64
"""Coefficients of the regression of data on constants and groups; with more, those of groups are left out."""


def layout(
    posterior: PosteriorProgram,
    sizes: dict[str, int],
    features: dict[str, int],
    summaries: Mapping[str, int] | None = None,
    embedded: frozenset[str] = frozenset(),
) -> Layout:
    """Plan the flow for a posterior program.

    **Arguments:** `sizes`, the coordinates of one member of each parameter; `features`, the feature columns of one
    member of each site; `summaries`, the columns of the standardised results of each of the `regressions`; `embedded`,
    the program's sites whose features are trained.
    """
    graph = posterior.graph
    order = tuple(graph.plates)
    plates = {n: tuple(p for p in order if p in s.plates) for n, s in graph.sites.items()}
    constants = table_constants(graph)
    widths: dict[Table, int] = {table: x.shape[-1] - 2 for table, x in constants.items()}
    where: dict[str, tuple[Table, slice]] = {}
    chain: dict[str, slice] = {}
    products: dict[str, slice] = {}
    data = _measured(graph)
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

    signature: dict[str, tuple] = {name: _stages(posterior, name) for name in posterior.order}
    groups: list[Group] = []
    group_of: dict[str, int] = {}
    places = _Places(where, chain, products, widths, results, measured)
    for sign in dict.fromkeys(signature.values()):
        members = [n for n in posterior.order if signature[n] == sign]
        nodes = tuple((n, k) for n in members for k in range(sizes[n]))
        group_of.update(dict.fromkeys(members, len(groups)))
        stages: list[Stage] = []
        for at, pool, within, messages in sign:
            readings = _readings(posterior, nodes, at, pool is not None, places)
            raw = _raw(graph, readings, pool) if constants or graph.links else ()
            columns = sum(readings[i].columns.shape[-1] for i in raw) + sum(stages[j].columns for j in messages)
            real = tuple(p for p in order if p in _real(graph, at))
            columns = columns if pool is not None else 0
            light = columns > 0 and int(np.prod([graph.plates[p] for p in real])) > FEW_MEMBERS
            stages.append(Stage(real, pool, readings, messages, within, raw, columns, light))
        groups.append(Group(plates[members[0]], nodes, tuple(stages)))
    runs = tuple(
        _run(group, levels, groups[group], sizes, widths, where, chain)
        for group, levels in _levels(posterior, group_of, sizes, features, measured)
    )
    fits = {name: regression(graph, constants, name) for name in results}
    return Layout(
        posterior, sizes, widths, where, chain, tuple(groups), runs, constants, products, fits, results, measured
    )


@dataclass(frozen=True, eq=False)
class _Places:
    """Where columns are; see `Layout`."""

    features: dict[str, tuple[Table, slice]]
    chain: dict[str, slice]
    products: dict[str, slice]
    widths: dict[Table, int]
    summaries: dict[str, tuple[Table, slice]]
    measured: dict[str, tuple[str, slice]]


def _measured(graph: Graph) -> dict[str, str]:
    """Parameters of members that differ, each with a datum of its own kind: both real, one value for each member.

    If the datum is the parameter with an error, then in the parameter's own coordinate, whose scale other parameters
    set, it is what a small error makes certain, and networks would have to learn to divide.
    """
    differ = {p for c in graph.constants.values() for p in c.plates}
    out: dict[str, str] = {}
    for name in graph.parameters:
        site = graph.sites[name]
        for child in graph.children[name]:
            datum = graph.sites[child]
            alike = (site.dims, site.shape, site.support) == (datum.dims, datum.shape, datum.support)
            scalar = site.support == "real" and not site.event_shape and not site.index
            if datum.observed and alike and scalar and differ & set(site.plates):
                out.setdefault(name, child)
    return out


# Constants


def multiplied(graph: Graph, constants: Mapping[Table, np.ndarray], name: str) -> list[Table]:
    """The tables of constants that a data site's features are multiplied with: those of its plates."""
    return [t for t in constants if set(t.plates) <= graph.around(name)]


def table_constants(graph: Graph) -> dict[Table, np.ndarray]:
    """The tables of constants, standardised: `(1, *plates, width)`, the last two columns zero as in other tables."""
    order = tuple(graph.plates)
    found: dict[Plates, list[np.ndarray]] = {}
    for constant in graph.constants.values():
        plates = tuple(p for p in order if p in constant.plates)
        values = np.moveaxis(constant.values, [constant.plates.index(p) for p in plates], range(len(plates)))
        found.setdefault(plates, []).append(_scaled(constant, values))
    for plates, columns in found.items():  # of a few members that differ, also which it is
        shape = columns[0].shape[:-1]
        if len(plates) == 1 and shape[0] <= FEW_MEMBERS:
            columns.append(np.eye(shape[0]))
    for link in picks(graph):
        size = 1 + max(s.index[[p for p, _ in s.index].index(link.target)][1] for s in _family(graph, link))
        found.setdefault(link.source, []).append(np.eye(size)[link.index.values[..., 0]])
    for (inner, outer), index in graph.nests.items():
        count = np.bincount(index, minlength=graph.plates[outer]).astype(float)
        if len(set(count)) > 1:
            size = Constant(f"{inner} in {outer}", (outer,), count[:, None])
            found.setdefault((outer,), []).append(_scaled(size, np.log1p(count)[:, None]))
    out = {}
    for plates, columns in found.items():
        table = np.concatenate([*columns, np.zeros((*columns[0].shape[:-1], 2))], axis=-1)
        out[Table("constants", plates)] = table.astype(np.float32)[None]
    return out


def regressed(graph: Graph, embedded: frozenset[str]) -> list[str]:
    """The data sites whose members differ, so that a regression tells what a mean over them does not."""
    linked = {p for pair in graph.nests for p in pair}
    found = [p for c in graph.constants.values() for p in c.plates] + [p for link in picks(graph) for p in link.source]
    return [
        name
        for name in graph.data
        if graph.around(name) & {*found, *linked} and graph.sites[name].origin not in embedded
    ]


def regression(graph: Graph, constants: Mapping[Table, np.ndarray], name: str) -> Regression:
    """The regression of a data site; coefficients are those of the shortest solution where there are several."""
    plates = tuple(p for p in graph.plates if p in graph.sites[name].plates)
    shape = tuple(graph.plates[p] for p in plates)

    def spread(x: np.ndarray, at: Plates) -> np.ndarray:
        """An array at some plates, for every member of the site."""
        axes = list(at)
        for i, plate in enumerate(at):
            if plate not in plates:
                inner, index = next((o, x) for (o, g), x in graph.nests.items() if g == plate and o in plates)
                x, axes[i] = x.take(index, axis=i), inner
        x = x.transpose(*(axes.index(p) for p in plates if p in axes), x.ndim - 1)
        sizes = iter(x.shape[:-1])
        x = x.reshape(*(next(sizes) if p in axes else 1 for p in plates), x.shape[-1])
        return np.broadcast_to(x, (*shape, x.shape[-1])).reshape(-1, x.shape[-1])

    members = int(np.prod(shape))
    columns = [np.ones((members, 1))]
    columns += [spread(constants[t][0, ..., :-2], t.plates) for t in multiplied(graph, constants, name)]
    outer = [g for g in graph.around(name) - set(plates) if graph.plates[g] * members <= 10**7]
    groups = [spread(np.eye(graph.plates[g]), (g,)) for g in outer]
    design = np.concatenate([*columns, *groups], axis=1)
    u, scale, _ = np.linalg.svd(design, full_matrices=False)
    fitted = u[:, scale > 1e-5 * scale.max()]
    if design.shape[1] > MOST_COEFFICIENTS:  # those of the groups are too many
        design = np.concatenate(columns, axis=1)
    return Regression(np.linalg.pinv(design, rcond=1e-5).astype(np.float32), fitted.astype(np.float32))


def _scaled(constant: Constant, values: np.ndarray) -> np.ndarray:
    """Columns of order one; what spans a factor of ten or more also by its logarithm, numbers of things one by one."""
    lead, columns = values.shape[:-1], np.asarray(values, float).reshape(-1, values.shape[-1])
    out: list[np.ndarray] = []
    for column in columns.T:
        kinds, number = np.unique(column, return_inverse=True)
        if len(kinds) == 1:
            continue
        if constant.index and len(kinds) <= 64:
            out.append(np.eye(len(kinds))[number])
            continue
        forms = [column]
        if column.min() > 0 and column.max() > 10 * column.min():
            forms.append(np.log(column))
        out += [((x - x.mean()) / x.std())[:, None] for x in forms]
    return np.concatenate([np.zeros((len(columns), 0)), *out], axis=1).reshape(*lead, -1)


def picks(graph: Graph) -> tuple[Link, ...]:
    """The index arrays into plates that are unrolled, each once."""
    found = [link for link in graph.links if link.source and link.target not in graph.plates]
    return tuple(link for i, link in enumerate(found) if link.index not in [o.index for o in found[:i]])


def _family(graph: Graph, link: Link) -> list:
    """The members of unrolled sites that a link points to."""
    return [s for s in graph.sites.values() if link.target in dict(s.index)]


# Stages


def _real(graph: Graph, at: frozenset[str]) -> frozenset[str]:
    """The plates that have an axis: the others follow from these by index arrays."""
    return frozenset(p for p in at if not any((q, p) in graph.nests for q in at))


def _removed(graph: Graph, at: frozenset[str], plate: str, own: frozenset[str]) -> frozenset[str]:
    """The plates that are left once a plate is pooled; its members may be pooled within groups of another."""
    keep = graph.closure(_real(graph, at) - {plate}) | own
    outer = frozenset(g for o, g in graph.nests if o == plate)
    between = frozenset(g for g in outer - keep if graph.closure([g]) >= own & outer)
    nearest = _real(graph, between)
    if len(nearest) == 1:
        keep |= graph.closure(nearest)
    return frozenset(keep & at)


def _stages(posterior: PosteriorProgram, name: str) -> tuple:
    """The stages of a site's context: (plates, plate to pool, within which, stages whose messages arrive).

    What a site reads in plates it is not in is pooled one plate at a time, the innermost first, so that a summary of
    each group exists before the groups are pooled.
    """
    graph = posterior.graph
    own = graph.around(name)
    # A plate nested in another has fewer sites than it.
    depth = {p: (sum(p in graph.around(s) for s in graph.sites), p) for p in graph.plates}

    def inner(at: frozenset[str]) -> str:
        return min(_real(graph, at) - own, key=depth.__getitem__)

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
        new = _real(graph, left) - _real(graph, at) if left is not None else frozenset()
        out.append((at, inner(at) if at != own else None, min(new, default=None), arriving))
    return tuple(out)


def _raw(graph: Graph, readings: tuple[Reading, ...], pool: str | None) -> tuple[int, ...]:
    """The readings that differ between the members that are pooled, but for constants."""
    if pool is None:
        return ()
    return tuple(
        i
        for i, r in enumerate(readings)
        if r.table.kind != "constants" and pool in graph.closure((*r.table.plates, *r.across))
    )


def _readings(
    posterior: PosteriorProgram, nodes: tuple[tuple[str, int], ...], at: frozenset[str], pooled: bool, places: _Places
) -> tuple[Reading, ...]:
    """What each node reads at some plates: all its parents there or further out, and what precedes it in its chain.

    Then the constants there, and of unrolled sites that an index array points to, the member that it names.
    """
    graph = posterior.graph
    pointing = [link for link in picks(graph) if set(link.source) <= at]
    # What each member reads of an unrolled site by an index need not be read as a whole before it is pooled.
    pointed = {s.name for link in pointing for s in _family(graph, link)} if pooled else set()
    found: dict[Table, list[list[int]]] = {}
    for i, (name, k) in enumerate(nodes):
        for parent in posterior.parents[name]:
            if graph.around(parent) <= at and parent not in pointed:
                table, columns = places.features[parent]
                read = [*range(columns.start, columns.stop)]
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
    posterior: PosteriorProgram, nodes: tuple[tuple[str, int], ...], link: Link, places: _Places
) -> list[Reading]:
    """What members read of the unrolled sites that a link points to, as far as each node knows them."""
    kin: dict[tuple, dict[int, str]] = {}
    for site in _family(posterior.graph, link):
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


def _levels(
    posterior: PosteriorProgram,
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
