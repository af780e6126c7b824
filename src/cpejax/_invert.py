"""The posterior program: the inverse of a program's graph (paper, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import networkx as nx

from cpejax._graph import Graph, ground_members, lines


@dataclass(frozen=True)
class PosteriorProgram:
    """In which order parameters are drawn from the posterior, and what each must read.

    - `graph`: the graph it inverts; plates whose members are coupled are unrolled in it, and `graph.unrolled` says why.
    - `order`: the parameters in sampling order.
    - `parents`: for each parameter the parameters (drawn before it, in order) and the data that it reads. Sites in a
        common plate are aligned; a site outside a plate reads all members.
    """

    graph: Graph
    order: tuple[str, ...]
    parents: Mapping[str, tuple[str, ...]]
    how: str = "faithful"

    @cached_property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The parameters in groups: those of one level read only earlier levels, and can be drawn at once."""
        depth: dict[str, int] = {}
        for name in self.order:
            depth[name] = 1 + max((depth[p] for p in self.parents[name] if p in depth), default=-1)
        return tuple(
            tuple(n for n in self.order if depth[n] == level) for level in range(max(depth.values(), default=-1) + 1)
        )

    def ground(self) -> dict[str, tuple[str, ...]]:
        """The parents of every single member, with the names of `graph.ground()`."""
        sites, plates = self.graph.sites, self.graph.plates
        members = {name: list(ground_members(sites[name], plates)) for name in sites}
        out = {}
        for name in self.order:
            for member, at in members[name]:
                out[member] = tuple(
                    other
                    for parent in self.parents[name]
                    for other, where in members[parent]
                    if all(where[p] == at[p] for p in where.keys() & at.keys())
                )
        return out

    def __str__(self) -> str:
        notes = [f"  plate '{p}' is unrolled: {why}" for p, why in self.graph.unrolled.items()]
        return "\n".join(["posterior program", *lines(self.graph, self.order, self.parents, "←"), *notes])


def invert(
    graph: Graph, how: Literal["faithful", "reverse"] = "faithful", order: Literal["prior", "leaf"] = "prior"
) -> PosteriorProgram:
    """Invert a program's graph.

    **Arguments:**

    - `graph`: the graph of the prior program.
    - `how`: `"faithful"` is the natural minimal I-map of Webb et al. (2018): it claims no independence that the model
        does not have, and no edge can be left out. `"reverse"` flips every edge, as the paper does; this drops true
        dependencies wherever parameters have a common child.
    - `order`: `"prior"` draws parents before children, so that every prior parent of a site is drawn before it;
        `"leaf"` draws children first. `"reverse"` always draws children first.

    **Returns:** the posterior program.

    The faithful inverse eliminates one parameter after the other from the moral graph, always one that adds the
    fewest edges (ties by name): its remaining neighbours become its parents and are joined. Sampling order is the
    reverse. Parameters that no data depend on, directly or through others, are left to the end and drawn from their prior.
    A plate stays a template as long as its members are independent given the rest. When two members become
    neighbours, the plate is unrolled, and inversion starts again.

    ??? example

        ```python
        graph = cpe.Graph.from_edges({"x": ["a", "b"]}, observed=["x"])
        cpe.invert(graph).parents  # {'b': ('x',), 'a': ('b', 'x')}
        cpe.invert(graph, how="reverse").parents  # {'a': ('x',), 'b': ('x',)}
        ```

    ??? cite "Reference"

        Webb et al., Faithful inversion of generative models for effective amortized inference, NeurIPS 2018.
    """
    if how not in ("faithful", "reverse"):
        raise ValueError(f"how must be 'faithful' or 'reverse', found {how!r}.")
    if order not in ("prior", "leaf"):
        raise ValueError(f"order must be 'prior' or 'leaf', found {order!r}.")
    for name in list(graph.sites):
        for parent, plate in graph.sites[name].mixed if name in graph.sites else ():
            if plate in graph.plates:
                graph = graph.unroll(plate, f"'{name}' reads other members of '{parent}' than its own")
    if how == "reverse":
        return _reverse(graph)
    while True:
        try:
            return _eliminate(graph, order)
        except _Coupled as coupled:
            graph = graph.unroll(coupled.plate, coupled.why)


class _Coupled(Exception):
    def __init__(self, plate: str, why: str):
        super().__init__(plate, why)
        self.plate, self.why = plate, why


def _reverse(graph: Graph) -> PosteriorProgram:
    parameters = set(graph.parameters)
    flipped = nx.DiGraph()
    flipped.add_nodes_from(graph.parameters)
    flipped.add_edges_from((c, p) for c in parameters for p in graph.parents[c] if p in parameters)
    order = tuple(nx.lexicographical_topological_sort(flipped))
    rank = {name: i for i, name in enumerate((*order, *graph.data))}
    parents = {name: tuple(sorted(graph.children[name], key=rank.__getitem__)) for name in order}
    return PosteriorProgram(graph, order, parents, "reverse")


def _eliminate(graph: Graph, order: str) -> PosteriorProgram:
    # Sets of sites are the bits of a Python integer: unions, differences and counts are then single operations.
    names = sorted(graph.sites)
    at = {name: i for i, name in enumerate(names)}
    plates = [frozenset(graph.sites[n].plates) for n in names]
    is_parameter = [not graph.sites[n].observed for n in names]
    parameters = sum(1 << i for i, p in enumerate(is_parameter) if p)
    barren = _barren(graph)

    # Moralise. Edges between data never matter: data are not eliminated.
    adjacent = [0] * len(names)

    def join(members: int) -> None:
        for i in _bits(members & parameters):
            adjacent[i] |= members & ~(1 << i)
        for i in _bits(members & ~parameters):
            adjacent[i] |= members & parameters

    for name in names:
        if name not in barren:
            family = sum(1 << at[p] for p in graph.parents[name])
            outside = _outside(plates[at[name]], family & parameters, plates)
            if outside is not None:
                raise _Coupled(outside[1], f"'{name}', outside it, depends on all members of '{names[outside[0]]}'")
            join(family | 1 << at[name])

    before = graph.children if order == "prior" else graph.parents
    waiting = {
        n: {b for b in before[n] if is_parameter[at[b]] and b not in barren} for n in graph.parameters if n not in barren
    }
    ready = {n for n, wait in waiting.items() if not wait}
    after = graph.parents if order == "prior" else graph.children
    cost: dict[str, tuple[bool, int, str]] = {}
    eliminated: list[str] = []
    parents: dict[str, int] = {}
    gone = 0
    while ready:
        for name in ready - cost.keys():
            cost[name] = _cost(name, at, adjacent, gone, parameters, plates, graph)
        name = min(ready, key=cost.__getitem__)
        i = at[name]
        neighbours = adjacent[i] & ~gone
        outside = _outside(plates[i], neighbours & parameters, plates)
        if outside is not None:
            why = f"members of '{names[outside[0]]}' depend on one another once '{name}' is summed out"
            raise _Coupled(outside[1], why)
        parents[name] = neighbours
        join(neighbours)
        gone |= 1 << i
        eliminated.append(name)
        ready.remove(name)
        for n in after[name]:
            if n in waiting and n not in parents:
                waiting[n].discard(name)
                if not waiting[n]:
                    ready.add(n)
        for n in list(cost):
            if adjacent[at[n]] & neighbours or neighbours >> at[n] & 1:
                del cost[n]

    sampling = (*reversed(eliminated), *(n for n in graph.parameters if n in barren))
    rank = {name: k for k, name in enumerate((*sampling, *graph.data))}
    found: dict[str, tuple[str, ...]] = {}
    for name in sampling:
        reads = graph.parents[name] if name in barren else [names[b] for b in _bits(parents[name])]
        found[name] = tuple(sorted(reads, key=rank.__getitem__))
    return PosteriorProgram(graph, sampling, found, "faithful")


def _barren(graph: Graph) -> set[str]:
    """Parameters without data below them: given their parents the data say nothing about them."""
    barren: set[str] = set()
    for name in reversed(list(graph.sites)):
        if not graph.sites[name].observed and all(c in barren for c in graph.children[name]):
            barren.add(name)
    return barren


def _outside(inside: frozenset[str], sites: int, plates: list[frozenset[str]]) -> tuple[int, str] | None:
    """A site in `sites` that is in a plate which `inside` lacks, and that plate: its members would become neighbours."""
    for i in _bits(sites):
        if plates[i] - inside:
            return i, min(plates[i] - inside)
    return None


def _cost(
    name: str,
    at: dict[str, int],
    adjacent: list[int],
    gone: int,
    parameters: int,
    plates: list[frozenset[str]],
    graph: Graph,
) -> tuple[bool, int, str]:
    """Whether eliminating `name` couples members of a plate, how many edges it adds (a member), and its name."""
    i = at[name]
    neighbours = adjacent[i] & ~gone

    def members(sites: int) -> int:
        if not graph.plates:
            return sites.bit_count()
        total = 0
        for j in _bits(sites):
            size = 1
            for plate in plates[j] - plates[i]:
                size *= graph.plates[plate]
            total += size
        return total

    among, to_data, couples = 0, 0, False
    for j in _bits(neighbours & parameters):
        missing = neighbours & ~adjacent[j] & ~(1 << j)
        many = members(1 << j)
        couples |= many > 1 or bool(plates[j] - plates[i])
        among += many * members(missing & parameters) + many * (many - 1)
        to_data += many * members(missing & ~parameters)
    return couples, among // 2 + to_data, name


def _bits(sites: int) -> list[int]:
    out = []
    while sites:
        low = sites & -sites
        out.append(low.bit_length() - 1)
        sites ^= low
    return out
