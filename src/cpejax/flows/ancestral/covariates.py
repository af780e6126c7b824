"""What tells the members of a plate apart, as networks read it: tables of constants, and regressions on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cpejax.program.conditional import ConditionalProgram
from cpejax.program.graph import Graph
from cpejax.program.members import Constant, Link

Plates = tuple[str, ...]


class Table(NamedTuple):
    """The name of a table: `"data"`, `"parameters"` or `"constants"`, and its plates."""

    kind: str
    plates: Plates


@dataclass(frozen=True, eq=False)
class Regression:
    """The least squares fit of a data site's features on the constants and the groups of its members, all at once.

    - `solve`: `(coefficients, members)`, from a feature to its coefficients.
    - `fitted`: bases `(members, rank)`, orthonormal, of what can be fitted: by constants and groups and, where members
        are many, also by curves along a covariate. What is left of either tells of noise and of misfit.
    - `effects`: for each index array `(groups, members)`, from a feature to the effects of its groups. A scale between
        groups is known by their variance, which networks would have to learn.
    """

    solve: np.ndarray
    fitted: tuple[np.ndarray, ...]
    effects: tuple[np.ndarray, ...] = ()

    @property
    def size(self) -> int:
        """Results for each feature: coefficients, the logarithms of what is left and of variances between groups."""
        return len(self.solve) + len(self.fitted) + len(self.effects)


FEW_MEMBERS = 24
"""The maximum number of members, or kinds of them, that a regression tells apart one by one; and the maximum number of
members that differ and each go through a network with hidden blocks before they are pooled."""


KNOTS = 8
"""Quantiles of a covariate between which a regression on it can bend."""


MOST_COEFFICIENTS = 64
"""Coefficients of the regression of data on constants and groups; with more, those of groups are left out."""


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
        size = 1 + max(s.index[[p for p, _ in s.index].index(link.target)][1] for s in family(graph, link))
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


def exchangeable(conditional: ConditionalProgram, embedded: frozenset[str]) -> list[str]:
    """The given sites whose members are alike, and which something reads that is in none of their plates."""
    graph = conditional.graph
    told_apart = {*regressed(graph, embedded)}
    return [
        name
        for name in graph.data
        if graph.sites[name].plates and name not in told_apart and graph.sites[name].origin not in embedded
        if math.prod(graph.plates[p] for p in graph.sites[name].plates) > 1
        if any(name in p and not graph.around(n) & graph.around(name) for n, p in conditional.parents.items())
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
    # In the order of the graph: that of a set differs from process to process, and weights are of columns in order.
    around = [g for g in graph.plates if g in graph.around(name) and g not in plates]
    outer = [g for g in around if graph.plates[g] * members <= 10**7]
    groups = [spread(np.eye(graph.plates[g]), (g,)) for g in outer]
    curves = [spread(curve, (p,)) for p, curve in _curves(graph).items() if p in plates]
    picked = [(link.source, link.index.values[..., 0]) for link in picks(graph) if set(link.source) <= set(plates)]
    factors = groups + [spread(np.eye(index.max() + 1)[index], source) for source, index in picked]
    columns = [np.concatenate(columns, axis=1)]
    designs = [[*columns, *groups], *([[*columns, *curves, *groups]] if curves else [])]
    ends = np.cumsum([columns[0].shape[1], *(f.shape[1] for f in factors)])
    whole = _inverse([*columns, *factors])
    effects = tuple(whole[a:b] for a, b in itertools.pairwise(ends) if b - a > 1)
    solve = [*columns, *curves, *groups]
    if sum(c.shape[1] for c in solve) > MOST_COEFFICIENTS:  # those of the groups are too many
        solve = [*columns, *curves]
    bases = map(_basis, designs)  # what fits everything leaves nothing but rounding errors
    return Regression(_inverse(solve), tuple(b for b in bases if b.shape[1] < members), effects)


def _inverse(design: list[np.ndarray]) -> np.ndarray:
    return np.linalg.pinv(np.concatenate(design, axis=1), rcond=1e-5).astype(np.float32)


def _basis(design: list[np.ndarray]) -> np.ndarray:
    """An orthonormal basis of the columns."""
    u, scale, _ = np.linalg.svd(np.concatenate(design, axis=1), full_matrices=False)
    return u[:, scale > 1e-5 * scale.max()].astype(np.float32)


def _curves(graph: Graph) -> dict[str, np.ndarray]:
    """The columns of `_curve` along each plate whose members are too many to be told apart one by one."""
    found: dict[str, list[np.ndarray]] = {}
    for c in graph.constants.values():
        if len(c.plates) == 1 and graph.plates[c.plates[0]] > FEW_MEMBERS and not c.index:
            found.setdefault(c.plates[0], []).append(np.asarray(c.values, float))
    curves = {plate: _curve(np.concatenate(each, axis=-1)) for plate, each in found.items()}
    return {plate: curve for plate, curve in curves.items() if curve.size}


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


def _curve(x: np.ndarray) -> np.ndarray:
    """Columns by which a regression on covariates `(members, columns)` can follow a curve.

    Of a few kinds of members, which it is; along a single covariate, hat functions between its quantiles.
    """
    kinds, number = np.unique(x, axis=0, return_inverse=True)
    if len(kinds) <= FEW_MEMBERS:
        return np.eye(len(kinds))[number.reshape(-1)]
    if x.shape[1] > 1:
        return np.zeros((len(x), 0))
    knots = np.quantile(kinds[:, 0], np.linspace(0, 1, KNOTS))
    return np.stack([np.interp(x[:, 0], knots, hat) for hat in np.eye(KNOTS)], axis=1)


def picks(graph: Graph) -> tuple[Link, ...]:
    """The index arrays into plates that are unrolled, each once."""
    found = [link for link in graph.links if link.source and link.target not in graph.plates]
    return tuple(link for i, link in enumerate(found) if link.index not in [o.index for o in found[:i]])


def family(graph: Graph, link: Link) -> list:
    """The members of unrolled sites that a link points to."""
    return [s for s in graph.sites.values() if link.target in dict(s.index)]
