"""Block matrices over scalar parameters, masked by the posterior program (paper, section 3.2, equation 11).

A *node* is one scalar parameter. A block matrix has a block `B_ij` of size `in × out` for every node `i` and every `j`
that it reads, itself included; the others are zero. There are three ways to store one, with one interface:

* `Dense`: all `d²` blocks in one masked matrix, as in the paper. One product, the fastest for a few nodes.
* `Edges`: the blocks that exist, multiplied in batches of nodes that read equally many. Weights, memory and arithmetic
  are linear in the edges.
* `LowRank`: `B_ij = ζ_ij ξ_ij` of rank `r` for `i ≠ j`, for posterior programs with many edges. Diagonal blocks stay
  whole: there are only `d` of them, and through one of rank `r` a node would pass on only `r` values of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.vector import Vector
from cpejax.program.graph import Graph
from cpejax.program.inverse import PosteriorProgram

Storage = Literal["auto", "dense", "edges"]


class Levels(NamedTuple):
    """Consecutive levels, of equally many nodes each, that can be computed by the same code.

    - `nodes[level]`: its nodes; `edges[level, node]`: the numbers of the edges into a node, padded with −1.
    """

    nodes: Any
    edges: Any


@dataclass(frozen=True, eq=False)
class Wiring:
    """Which nodes read which, and which read data.

    Nodes are numbered by how many others they read, so that nodes with equally many follow one another.

    - `order[node]`: its place in the parameters' vector; `place`: the inverse.
    - `parents[node]`: the nodes it reads, besides itself.
    - `data[node]`: whether it reads data.
    """

    order: np.ndarray
    parents: tuple[tuple[int, ...], ...]
    data: np.ndarray

    @classmethod
    def of(cls, reads: Sequence[Sequence[int]], data: Sequence[bool]) -> Wiring:
        """From what each scalar of the vector reads, by place in the vector."""
        order = np.array(sorted(range(len(reads)), key=lambda i: (len(reads[i]), i)))
        place = np.argsort(order)
        parents = tuple(tuple(sorted(int(place[j]) for j in reads[i])) for i in order)
        return cls(order, parents, np.array(data, bool)[order])

    @property
    def size(self) -> int:
        """How many nodes there are."""
        return len(self.parents)

    @cached_property
    def place(self) -> np.ndarray:
        """Where in the nodes each scalar of the vector is."""
        return np.argsort(self.order)

    @cached_property
    def sources(self) -> np.ndarray:
        """The node that each edge comes from."""
        return np.array([j for parents in self.parents for j in parents], int)

    @cached_property
    def targets(self) -> np.ndarray:
        """The node that each edge goes to; edges into one node follow one another."""
        return np.repeat(np.arange(self.size), [len(p) for p in self.parents])

    def ends(self, edges: Any) -> tuple[Any, Any]:
        """The sources and targets of edges: of one by its number, or of an array of them."""
        if isinstance(edges, int):
            return int(self.sources[edges]), int(self.targets[edges])
        return jnp.asarray(self.sources)[edges], jnp.asarray(self.targets)[edges]

    def groups(self) -> Iterator[tuple[slice, slice, int]]:
        """Nodes that read equally many others, and the edges into them: nodes, edges, how many for each node."""
        degrees = np.array([len(p) for p in self.parents])
        edge = 0
        for degree in np.unique(degrees):
            nodes = np.flatnonzero(degrees == degree)
            count = int(degree) * len(nodes)
            yield slice(int(nodes[0]), int(nodes[-1]) + 1), slice(edge, edge + count), int(degree)
            edge += count

    @cached_property
    def runs(self) -> tuple[Levels, ...]:
        """The nodes level by level: a level reads only levels before it.

        Levels are joined in a run where that pads no more than twice as many edges as there are.
        """
        graph = nx.DiGraph(list(zip(self.sources.tolist(), self.targets.tolist(), strict=True)))
        graph.add_nodes_from(range(self.size))
        levels = [sorted(level) for level in nx.topological_generations(graph)]
        runs: list[list[list[int]]] = []
        for level in levels:
            joined = [*runs[-1], level] if runs else [level]
            degrees = [len(self.parents[i]) for nodes in joined for i in nodes]
            if runs and len(level) == len(runs[-1][0]) and max(degrees) * len(degrees) <= 3 * sum(degrees) + 1:
                runs[-1].append(level)
            else:
                runs.append([level])
        return tuple(self._run(levels) for levels in runs)

    def _run(self, levels: list[list[int]]) -> Levels:
        first = np.cumsum([0, *(len(p) for p in self.parents)])
        most = max(len(self.parents[i]) for level in levels for i in level)
        slots = np.arange(most)
        edges = [[np.where(slots < len(self.parents[i]), first[i] + slots, -1) for i in level] for level in levels]
        return Levels(np.array(levels), np.array(edges, int).reshape(len(levels), len(levels[0]), most))

    def alone(self) -> Wiring:
        """A wiring of the same nodes without edges."""
        return Wiring(self.order, ((),) * self.size, self.data)

    def reach(self, steps: int) -> np.ndarray:
        """`reach[i, j]`: whether scalar `i` of the vector is `j`, or reads it through this number of matrices."""
        once = np.eye(self.size, dtype=bool)
        once[self.targets, self.sources] = True
        power = np.eye(self.size, dtype=bool)
        for _ in range(steps):
            power = (power.astype(np.float32) @ once.astype(np.float32)) > 0
        return power[np.ix_(self.place, self.place)]


def wire(posterior: PosteriorProgram, vector: Vector) -> Wiring:
    """The nodes of a posterior program, with all plates written out.

    The scalars of one member are a chain, each reads those before it. In coordinates that depend on other parameters
    (the prior's, or where a support does) a node that reads a parameter also reads what its coordinates depend on.
    """
    graph = vector.graph
    needed = _needed(vector, graph)
    members: dict[str, list[int]] = {}
    for i, label in enumerate(vector.labels):
        members.setdefault(label.member, []).append(i)
    ground = posterior.ground()
    rank = {member: k for k, member in enumerate(ground)}
    reads, data = [], []
    for i, label in enumerate(vector.labels):
        parents = set(ground[label.member])
        for name in [label.member, *parents]:
            parents |= needed.get(name, set())
        parents.discard(label.member)
        late = [p for p in parents if p in rank and rank[p] > rank[label.member]]
        if late:
            raise ValueError(
                f"The {vector.kind} coordinates of '{label.member}', or of a parameter that it reads, depend on "
                f"'{late[0]}', which the posterior program draws later. Use inverse='faithful' or "
                "coordinates='unconstrained'."
            )
        own = [j for j in members[label.member] if j < i]
        reads.append([j for p in parents if p in members for j in members[p]] + own)
        data.append(any(p not in members for p in parents))
    return Wiring.of(reads, data)


def _needed(vector: Vector, graph: Graph) -> dict[str, set[str]]:
    """For each member all members, and data, that its coordinates depend on, directly or through others."""
    needs: Mapping[str, tuple[str, ...]] = vector.needs()
    if not any(needs.values()):
        return {}
    ground = graph.ground()
    found: dict[str, set[str]] = {}
    for name, site in ground.sites.items():  # parents before children
        direct = {p for p in site.parents if ground.sites[p].origin in needs.get(site.origin, ())}
        found[name] = direct.union(*(found[p] for p in direct))
    return found


# Storage


class Blocks(eqx.Module):
    """A block matrix `in → out`; see the module's docstring.

    `positive`: the diagonal blocks are `exp(raw) / in`, for the discrete flow (the paper's `g`).

    `rows` says which axis of hidden values is for rows: `(n, d, size)` if 0, `(d, n, size)` if 1, as is faster.
    """

    rows: ClassVar[int]
    wiring: Wiring = eqx.field(static=True)
    positive: bool = eqx.field(static=True)

    def __call__(self, h: Float[Array, "a b in"]) -> Float[Array, "a b out"]:
        """The product with hidden values."""
        raise NotImplementedError

    def raw(self) -> Float[Array, "d in out"]:
        """The diagonal blocks before `g`."""
        raise NotImplementedError

    def log_diagonal(self) -> Float[Array, "d in out"]:
        """The logarithm of the diagonal blocks, where they are positive."""
        raw = self.raw()
        return raw - np.float32(np.log(raw.shape[1]))

    def diagonal(self) -> Float[Array, "d in out"]:
        """The diagonal blocks."""
        return jnp.exp(self.log_diagonal()) if self.positive else self.raw()

    def at(self, edges: Any) -> Float[Array, "*edges in out"]:
        """The blocks of some edges, or of one by its number."""
        raise NotImplementedError


class Dense(Blocks):
    """All blocks in one matrix; those without an edge are trained by nothing, and multiplied by zero."""

    rows = 0
    weight: Float[Array, "d in d out"]

    def raw(self) -> Float[Array, "d in out"]:
        each = np.arange(self.wiring.size)
        return self.weight[each, :, each, :]

    def at(self, edges: Any) -> Float[Array, "*edges in out"]:
        sources, targets = self.wiring.ends(edges)
        return self.weight[sources, :, targets, :]

    def __call__(self, h: Float[Array, "n d in"]) -> Float[Array, "n d out"]:
        d, i, _, o = self.weight.shape
        mask = np.zeros((d, 1, d, 1), bool)
        mask[self.wiring.sources, 0, self.wiring.targets, 0] = True
        own = np.eye(d, dtype=bool)[:, None, :, None]
        if self.positive:
            weight = jnp.where(mask, self.weight, 0.0) + jnp.where(own, self.diagonal()[:, :, None, :], 0.0)
        else:
            weight = jnp.where(mask | own, self.weight, 0.0)
        return (h.reshape(len(h), d * i) @ weight.reshape(d * i, d * o)).reshape(len(h), d, o)


class Edges(Blocks):
    """The blocks that exist: of each node its own, and one for every edge."""

    rows = 1
    own: Float[Array, "d in out"]
    others: Float[Array, "e in out"]

    def raw(self) -> Float[Array, "d in out"]:
        return self.own

    def at(self, edges: Any) -> Float[Array, "*edges in out"]:
        return self.others[edges]

    def __call__(self, h: Float[Array, "d n in"]) -> Float[Array, "d n out"]:
        out = jnp.einsum("dni,dio->dno", h, self.diagonal())
        parts = []
        for nodes, edges, degree in self.wiring.groups():
            part = out[nodes]
            if degree:
                count = nodes.stop - nodes.start
                weight = self.others[edges].reshape(count, degree, *self.others.shape[1:])
                read = h[self.wiring.sources[edges].reshape(count, degree)]
                part = part + jnp.einsum("gsni,gsio->gno", read, weight)
            parts.append(part)
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


class LowRank(Blocks):
    """Blocks of low rank between all pairs of nodes, masked; whole blocks on the diagonal."""

    rows = 1
    own: Float[Array, "d in out"]
    zeta: Float[Array, "d in d r"]
    xi: Float[Array, "d d r out"]

    def raw(self) -> Float[Array, "d in out"]:
        return self.own

    def at(self, edges: Any) -> Float[Array, "*edges in out"]:
        sources, targets = self.wiring.ends(edges)
        return self.zeta[sources, :, targets, :] @ self.xi[sources, targets]

    def __call__(self, h: Float[Array, "d n in"]) -> Float[Array, "d n out"]:
        d = self.wiring.size
        mask = np.zeros((d, d, 1, 1), np.float32)
        mask[self.wiring.sources, self.wiring.targets] = 1.0
        out = jnp.einsum("dni,dio->dno", h, self.diagonal())
        passed = jnp.einsum("sni,sitr->sntr", h, self.zeta)
        return out + jnp.einsum("sntr,stro->tno", passed, self.xi * mask)


DENSEST = 16
"""The most nodes that are stored densely without being asked to: as far as was measured (`docs/triangular.md`)."""


def blocks(
    wiring: Wiring,
    inside: int,
    outside: int,
    *,
    storage: Storage = "auto",
    rank: int | None = None,
    positive: bool = False,
    zero: bool = False,
    key: PRNGKeyArray,
) -> Blocks:
    """A block matrix with random weights: normal, with the variance of LeCun's rule for the blocks that are there.

    **Arguments:** `inside`, `outside`: the sizes of a block; `rank`: of off-diagonal blocks, or `None` for whole ones;
    `positive`: see `Blocks`; `zero`: all weights zero (where a network starts as no network).

    Without being asked for one, the storage is dense up to `DENSEST` nodes, if at least half of all pairs have an edge.
    """
    d, e = wiring.size, len(wiring.sources)
    counts = np.array([1 + len(p) for p in wiring.parents])
    scale = np.float32(0.0 if zero else 1.0) / np.sqrt(inside * counts).astype(np.float32)
    first, second, third = jax.random.split(key, 3)
    own = jax.random.normal(first, (d, inside, outside)) * (0.1 if positive else scale[:, None, None])
    if rank is not None and e:
        zeta = jax.random.normal(second, (d, inside, d, rank)) / np.sqrt(rank)
        xi = jax.random.normal(third, (d, d, rank, outside)) * scale[:, None, None]
        return LowRank(wiring, positive, own, zeta, xi)
    if storage == "dense" or (storage == "auto" and 1 < d <= DENSEST and 4 * e >= d * (d - 1)):
        weight = jax.random.normal(second, (d, inside, d, outside)) * scale[:, None]
        each = np.arange(d)
        return Dense(wiring, positive, weight.at[each, :, each, :].set(own))
    others = jax.random.normal(second, (e, inside, outside)) * scale[wiring.targets, None, None]
    return Edges(wiring, positive, own, others)
