"""Coordinates of data, from their simulations: what the forward program is drawn in.

Data have no prior to give them coordinates, so each column has a monotone map of its own, chosen by what was simulated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cpejax.coordinates.prior import Constrain, Shapes, Values, plates_first, plates_last
from cpejax.coordinates.standardise import Columns, Fixed
from cpejax.program.conditional import exchanged
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program

FEW_COUNTS = 1000
"""Numbers of different values up to which data that are all whole numbers are taken for counts."""
MOST_COUNT = 1e5
"""The magnitude from which on whole numbers have densities, which are as good as probabilities there: float32 does not
resolve the mass between a number and the next."""
FAR = 25.0
"""Where a column's map is no longer linear, in robust standard deviations: beyond it mixtures do not reach. What shifts
with a parameter shifts linearly up to there, which networks resolve best."""
LINEAR, LOG, ASINH = range(3)
"""How a column is mapped before it is standardised. The logarithm is for positive data that span a factor of a hundred,
`asinh` for other data with heavy tails: it is linear within their quartiles, and a logarithm further out."""


class ColumnMaps(Fixed):
    """Monotone maps of columns: `z = (T((x − centre) / scale) − middle) / spread`, with T by `kinds`.

    Of counts, `least` and `greatest` are the ends of what was simulated; NaN for other columns.
    """

    kinds: Int[Array, " d"]
    centre: Float[Array, " d"]
    scale: Float[Array, " d"]
    middle: Float[Array, " d"]
    spread: Float[Array, " d"]
    least: Float[Array, " d"]
    greatest: Float[Array, " d"]

    @classmethod
    def of(cls, rows: np.ndarray, counts: bool) -> ColumnMaps:
        """The maps of simulated values `(n, d)`."""
        rows = np.asarray(rows, np.float64)
        columns = Columns.of(rows)
        kinds = np.array(_kinds(rows, columns, counts), np.int32)
        centre, scale = np.where(kinds == LOG, 0.0, columns.centre), columns.scale
        again = Columns.of(_map(rows, centre, scale, kinds, np))
        none = np.full(rows.shape[1], np.nan)
        ends = (rows.min(0), rows.max(0)) if counts else (none, none)
        each = (centre, scale, again.centre, again.scale, *ends)
        return cls(jnp.asarray(kinds), *(jnp.asarray(x, float) for x in each))

    @property
    def counts(self) -> Bool[Array, " d"]:
        """Which columns are counts."""
        return ~jnp.isnan(self.least)

    def to_z(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The coordinates of values."""
        return (_map(x, self.centre, self.scale, self.kinds, jnp) - self.middle) / self.spread

    def to_values(self, z: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The inverse of `to_z`; counts are rounded, and stay within what was simulated."""
        t = self.middle + self.spread * z
        some = jnp.where(self.kinds == LINEAR, 0.0, jnp.clip(t, -80.0, 80.0))  # no exponential overflows
        x = jnp.where(self.kinds == LINEAR, t, jnp.where(self.kinds == LOG, jnp.exp(some), jnp.sinh(some)))
        x = self.centre + self.scale * x
        return jnp.where(self.counts, jnp.clip(jnp.round(x), self.least, self.greatest), x)

    def edges(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        """The coordinates between which a count lies: halfway to the next ones, and open at the ends."""
        low, high = self.to_z(x - 0.5), self.to_z(x + 0.5)
        return jnp.where(x <= self.least, -jnp.inf, low), jnp.where(x >= self.greatest, jnp.inf, high)

    def log_volume(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """`log |dz / dx|` of each column; zero for counts, which have probabilities."""
        u = (x - self.centre) / self.scale
        log = -jnp.log(jnp.where((self.kinds == LOG) & (u > 0), u, 1.0))
        asinh = -0.5 * jnp.log1p(jnp.where(self.kinds == ASINH, u, 0.0) ** 2)
        return jnp.where(self.counts, 0.0, log + asinh - jnp.log(self.scale * self.spread))


def _map(x: Any, centre: Any, scale: Any, kinds: Any, np_: Any) -> Any:
    """`T((x − centre) / scale)` by NumPy or JAX."""
    u = (x - centre) / scale
    log = np_.log(np_.maximum(np_.where(kinds == LOG, u, 1.0), 1e-30))
    return np_.where(kinds == LINEAR, u, np_.where(kinds == LOG, log, np_.arcsinh(np_.where(kinds == ASINH, u, 0.0))))


def is_whole(support: str) -> bool:
    """Whether a support has whole numbers only."""
    return support.startswith("integer") or support in ("boolean", "multinomial")


def _are_counts(rows: np.ndarray, support: str) -> bool:
    if np.abs(rows).max() > MOST_COUNT:
        return False
    if is_whole(support):
        return True
    return support == "real" and bool((rows == np.round(rows)).all()) and len(np.unique(rows)) <= FEW_COUNTS


def _kinds(rows: np.ndarray, columns: Columns, counts: bool) -> tuple[int, ...]:
    out = []
    for column, centre, scale in zip(rows.T, columns.centre, columns.scale, strict=True):
        positive = not counts and column.min() > 0 and column.max() > 100 * column.min()
        out.append(LINEAR if np.abs((column - centre) / scale).max() < FAR else LOG if positive else ASINH)
    return tuple(out)


class DataCoordinates(Fixed):
    """The map between the data of a program and coordinates `z` of order one; it acts on one example.

    It has what the ancestral flow needs of `Coordinates`, with data and parameters exchanged: in `graph` the data are
    the parameters. `counts` are the sites whose values are whole numbers, none of them very large.
    """

    program: Program = eqx.field(static=True)
    graph: Graph = eqx.field(static=True)
    maps: dict[str, ColumnMaps]
    example: Values
    counts: frozenset[str] = eqx.field(static=True)
    uniform: frozenset[str] = eqx.field(static=True)  # none: there is no prior

    def __init__(self, program: Program, graph: Graph, values: Values, counts: Collection[str] | None = None):
        """`graph`: of the program; `values`: simulations, with a leading axis; `counts`: if they are known already."""
        self.program, self.graph, self.uniform = program, exchanged(graph), frozenset()
        self.example = {name: x[0] for name, x in values.items()}
        rows = {n: _rows(np.asarray(values[n]), self.graph.sites[n].dims) for n in self.graph.parameters}
        found = [n for n in rows if _are_counts(rows[n], graph.sites[n].support)] if counts is None else counts
        self.counts = frozenset(found)
        self.maps = {name: ColumnMaps.of(rows[name], name in self.counts) for name in rows}

    def to_z(self, values: Values) -> Values:
        """The coordinates of all data: `{site: (*plates, size)}`."""
        return {name: maps.to_z(self._members(name, values[name])) for name, maps in self.maps.items()}

    def edges(self, values: Values) -> tuple[Values, Values]:
        """Of counts, the coordinates between which each lies."""
        each = {name: self.maps[name].edges(self._members(name, values[name])) for name in sorted(self.counts)}
        return {name: low for name, (low, _) in each.items()}, {name: high for name, (_, high) in each.items()}

    def columns(self, nodes: Sequence[tuple[str, int]]) -> ColumnMaps:
        """The maps of some columns, each of a site."""
        each = [jax.tree.map(lambda x, k=k: x[k], self.maps[name]) for name, k in nodes]
        return jax.tree.map(lambda *x: jnp.stack(x), *each)

    def log_volume(self, values: Values, sites: Collection[str] | None = None) -> Float[Array, ""]:
        """`log |dz/dx|`; `sites`: of these only."""
        found = [n for n in self.maps if sites is None or n in sites]
        each = [self.maps[n].log_volume(self._members(n, values[n])).sum() for n in found]
        return sum(each, jnp.zeros(()))

    def constrainers(self, values: Shapes, z: Shapes) -> dict[str, Constrain]:
        """For each data site the function from its `z` to its value."""
        del values
        plates = tuple(self.graph.plates)

        def build(name: str) -> Constrain:
            site, maps = self.graph.sites[name], self.maps[name]
            return Constrain(lambda _, z: plates_last(maps.to_values(z), site.shape, site.dims, plates), ())

        return {name: build(name) for name in z}

    def limit(self, name: str) -> Float[Array, "2"]:
        """No coordinate is clipped."""
        del name
        return jnp.asarray([-jnp.inf, jnp.inf])

    def in_support(self, values: Values) -> Bool[Array, ""]:
        """All data are possible."""
        del values
        return jnp.ones((), bool)

    def _members(self, name: str, x: Array) -> Float[Array, "*plates size"]:
        return plates_first(x, self.graph.sites[name].dims, tuple(self.graph.plates))


def _rows(x: np.ndarray, dims: Sequence[str | None]) -> np.ndarray:
    """Simulations `(n, *shape)` as rows of one member's scalars: `(n members, size)`."""
    plates = [i + 1 for i, d in enumerate(dims) if d is not None]
    event = [i + 1 for i, d in enumerate(dims) if d is None]
    moved = np.transpose(x, [0, *plates, *event])
    size = int(np.prod([x.shape[i] for i in event], dtype=int))
    return moved.reshape(-1, size)
