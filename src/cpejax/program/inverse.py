"""The posterior program: the inverse of a program's graph (paper, section 3.2)."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from cpejax.program.conditional import ConditionalProgram, unroll, with_templates
from cpejax.program.graph import Graph, lines


@dataclass(frozen=True)
class PosteriorProgram(ConditionalProgram):
    """In which order parameters are drawn from the posterior, and what each must read.

    - `graph`: the graph it inverts; plates whose members are coupled are unrolled in it, and `graph.unrolled` says why.
    - `order`: the parameters in sampling order.
    - `parents`: for each parameter the parameters (drawn before it, in order) and the data that it reads. Sites in a
        common plate are aligned; a site outside a plate reads all members.
    """

    how: str = "faithful"

    def __str__(self) -> str:
        notes = [f"  plate '{p}' is unrolled: {why}" for p, why in self.graph.unrolled.items()]
        return "\n".join(["posterior program", *lines(self.graph, self.parents, "←"), *self.graph.notes(), *notes])


def invert(
    graph: Graph,
    how: Literal["faithful", "reverse"] = "faithful",
    order: Literal["prior", "leaf"] = "prior",
    first: Collection[str] = (),
) -> PosteriorProgram:
    """Invert a program's graph.

    **Arguments:**

    - `graph`: the graph of the prior program.
    - `how`: `"faithful"` is the natural minimal I-map of Webb et al. (2018): it claims no independence that the model
        does not have, and no edge can be left out. `"reverse"` flips every edge, as the paper does; this drops true
        dependencies wherever parameters have a common child.
    - `order`: `"prior"` draws parents before children, so that every prior parent of a site is drawn before it;
        `"leaf"` draws children first. `"reverse"` always draws children first.
    - `first`: parameters that are drawn before all others (of a faithful inverse in the prior's order), with the
        parameters that their prior depends on. The others can then be drawn given these.

    **Returns:** the posterior program.

    The faithful inverse eliminates one parameter after the other from the moral graph, always one that adds the
    fewest edges (ties by name): its remaining neighbours become its parents and are joined. Sampling order is the
    reverse. Parameters that no data depend on, directly or through others, are left to the end, in either order, and
    drawn from their prior. A plate stays a template as long as its members are independent given the rest. When two
    members become neighbours, the plate is unrolled, and inversion starts again.

    >>> graph = cpe.Graph.from_edges({"x": ["a", "b"]}, observed=["x"])
    >>> cpe.invert(graph).parents
    {'b': ('x',), 'a': ('b', 'x')}
    >>> cpe.invert(graph, how="reverse").parents
    {'a': ('x',), 'b': ('x',)}

    Reference: Webb et al. 2018, Faithful inversion of generative models for effective amortized inference.
    """
    if how not in ("faithful", "reverse"):
        raise ValueError(f"how must be 'faithful' or 'reverse', found {how!r}.")
    if order not in ("prior", "leaf"):
        raise ValueError(f"order must be 'prior' or 'leaf', found {order!r}.")
    if first:
        _check_first(graph, how, order, first)
    graph = with_templates(graph)
    if how == "reverse":
        return _reverse(graph)
    while True:
        try:
            return _eliminate(graph, order, frozenset(first))
        except _Coupled as coupled:
            graph = unroll(graph, coupled.plate, coupled.why)


def _check_first(graph: Graph, how: str, order: str, first: Collection[str]) -> None:
    if how != "faithful" or order != "prior":
        raise ValueError(f"first needs how='faithful' and order='prior'; found how={how!r}, order={order!r}.")
    for name in first:
        if name not in graph.parameters:
            raise ValueError(f"first names '{name}', but the parameters are {list(graph.parameters)}.")
        missing = [p for p in graph.parents[name] if p in graph.parameters and p not in first]
        if missing:
            raise ValueError(
                f"first has '{name}', but not {missing}, on which the prior of '{name}' depends; they come first too."
            )


class _Coupled(Exception):
    def __init__(self, plate: str, why: str):
        super().__init__(plate, why)
        self.plate, self.why = plate, why


def _reverse(graph: Graph) -> PosteriorProgram:
    parameters = set(graph.parameters)
    flipped = nx.DiGraph()
    flipped.add_nodes_from(graph.parameters)
    flipped.add_edges_from((c, p) for c in parameters for p in graph.parents[c] if p in parameters)
    order = tuple(nx.lexicographical_topological_sort(flipped, _natural))
    rank = {name: i for i, name in enumerate((*order, *graph.data))}
    parents = {name: tuple(sorted(graph.children[name], key=rank.__getitem__)) for name in order}
    return PosteriorProgram(graph, order, parents, "reverse")


def _eliminate(graph: Graph, order: str, first_drawn: frozenset[str]) -> PosteriorProgram:
    barren = _barren(graph)
    moral = _Moral(graph, [name for name in graph.sites if name not in barren])
    first, later = (graph.children, graph.parents) if order == "prior" else (graph.parents, graph.children)
    remaining = {n for n in graph.parameters if n not in barren}
    waits_for = {n: remaining.intersection(first[n]) for n in remaining}
    held = {n for n in remaining if graph.sites[n].origin in first_drawn}  # until all others are eliminated
    moral.offer(n for n in remaining if not waits_for[n] and n not in held)
    reads: dict[str, Iterable[str]] = {}
    while remaining:
        if remaining == held:
            moral.offer(n for n in held if not waits_for[n])
            held = set()
        name = moral.cheapest()
        reads[name] = moral.eliminate(name)
        remaining.remove(name)
        for n in remaining.intersection(later[name]):
            waits_for[n].remove(name)
            moral.offer([n] if not waits_for[n] and n not in held else [])

    sampling = (*reversed(reads), *(n for n in graph.parameters if n in barren))
    rank = {name: k for k, name in enumerate((*sampling, *graph.data))}
    reads |= {name: graph.parents[name] for name in barren}
    parents = {name: tuple(sorted(reads[name], key=rank.__getitem__)) for name in sampling}
    return PosteriorProgram(graph, sampling, parents, "faithful")


def _barren(graph: Graph) -> set[str]:
    """Parameters without data below them: given their parents the data say nothing about them."""
    barren: set[str] = set()
    for name in reversed(list(graph.sites)):
        if not graph.sites[name].observed and all(c in barren for c in graph.children[name]):
            barren.add(name)
    return barren


_Cost = tuple[bool, int, int]  # of a site: whether it couples members of a plate, how many edges it adds, its number


class _Moral:
    """The moral graph of `sites`, from which parameters are eliminated one by one.

    Sets of sites are the bits of a Python integer: unions, differences and counts are then single operations. In
    a plate an edge joins members of the same index, so a site outside a plate is joined to all members inside.
    Edges between data do not matter, because data are never eliminated.
    """

    def __init__(self, graph: Graph, sites: list[str]):
        self.names = sorted(graph.sites, key=_natural)
        self.at = {name: i for i, name in enumerate(self.names)}
        self.graph = graph
        self.plates = [graph.around(n) for n in self.names]
        self.sizes = graph.plates
        self.parameters = sum(1 << self.at[n] for n in graph.parameters)
        self.adjacent = [0] * len(self.names)
        self.gone = 0
        self.costs: dict[int, _Cost] = {}
        self.queue: list[_Cost] = []  # the costs, and outdated ones
        self.unknown: set[int] = set()  # offered, but the cost is not known, or not any more
        for name in sites:
            self._join_family(name, graph.parents[name])

    def offer(self, sites: Iterable[str]) -> None:
        """Let `cheapest` choose these sites too."""
        self.unknown.update(self.at[name] for name in sites)

    def cheapest(self) -> str:
        """The site that couples no plate, if there is one, and adds the fewest edges; the first by name of several."""
        while self.queue and self.costs.get(self.queue[0][2]) != self.queue[0]:
            heapq.heappop(self.queue)
        for i in sorted(self.unknown):
            best = self.queue[0] if self.queue else None
            if best is not None and best < (False, 0, i):
                break  # nothing is cheaper than a site that adds no edge, and the rest come after it by name
            cost = self._cost(i, best)
            if cost is not None:
                self.costs[i] = cost
                heapq.heappush(self.queue, cost)
                self.unknown.remove(i)
        return self.names[self.queue[0][2]]

    def eliminate(self, name: str) -> list[str]:
        """Join the neighbours of a site and remove it; return the neighbours."""
        i = self.at[name]
        neighbours = self.adjacent[i] & ~self.gone
        for j in _bits(neighbours & self.parameters):
            if self.plates[j] - self.plates[i]:
                why = f"members of '{self.names[j]}' depend on one another once '{name}' is summed out"
                raise _Coupled(self._innermost(self.plates[j] - self.plates[i]), why)
        self.gone |= 1 << i
        self.costs.pop(i)
        for j in _bits((neighbours | self._join(neighbours)) & ~self.gone):
            if self.costs.pop(j, None):
                self.unknown.add(j)
        return [self.names[j] for j in _bits(neighbours)]

    def _innermost(self, plates: frozenset[str]) -> str:
        """One of some plates in which none of the others is by an index array."""
        return min(p for p in plates if not any((q, p) in self.graph.nests for q in plates))

    def _join_family(self, name: str, parents: Iterable[str]) -> None:
        inside = self.plates[self.at[name]]
        for parent in parents:
            j = self.at[parent]
            if self.parameters >> j & 1 and self.plates[j] - inside:
                why = f"'{name}', outside it, depends on all members of '{parent}'"
                raise _Coupled(self._innermost(self.plates[j] - inside), why)
        self._join(sum(1 << self.at[n] for n in (name, *parents)))

    def _join(self, sites: int) -> int:
        """Make all pairs adjacent; return the sites that were adjacent to both ends of a new edge."""
        between = 0
        for i in _bits(sites & self.parameters):
            for j in _bits(sites & ~self.adjacent[i] & ~(1 << i)):
                between |= self.adjacent[i] & self.adjacent[j]
                self.adjacent[i] |= 1 << j
                self.adjacent[j] |= 1 << i
        return between

    def _cost(self, i: int, best: _Cost | None) -> _Cost | None:
        """What it costs to eliminate site `i`, for one member; `None` as soon as it is seen to be more than `best`."""
        neighbours = self.adjacent[i] & ~self.gone
        twice, couples = 0, False
        for j in _bits(neighbours & self.parameters):
            missing = neighbours & ~self.adjacent[j] & ~(1 << j)
            many = self._members(1 << j, i)
            couples |= bool(self.plates[j] - self.plates[i])
            among, to_data = self._members(missing & self.parameters, i), self._members(missing & ~self.parameters, i)
            twice += many * (many - 1 + among + 2 * to_data)
            if best is not None and (couples, twice // 2) > best[:2]:
                return None
        return couples, twice // 2, i

    def _members(self, sites: int, i: int) -> int:
        """How many members of `sites` one member of site `i` is adjacent to."""
        if not self.sizes:
            return sites.bit_count()
        return sum(math.prod(self.sizes[p] for p in self.plates[j] - self.plates[i]) for j in _bits(sites))


def _bits(sites: int) -> Iterator[int]:
    while sites:
        low = sites & -sites
        yield low.bit_length() - 1
        sites ^= low


def _natural(name: str) -> list[str | int]:
    """A key that sorts `b[2]` before `b[10]`."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]
