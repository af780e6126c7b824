"""Conditional programs: which sites are drawn, in which order, and what each reads of all others.

The posterior program draws parameters given data (`inverse`); the forward program draws data given parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cpejax.program.graph import Graph
from cpejax.program.sites import ground_members


@dataclass(frozen=True)
class ConditionalProgram:
    """Sites to draw, their order, and the sites that each reads.

    - `graph`: a graph in which the sites to draw are the parameters and those that are given are the data.
    - `order`: the sites to draw, in sampling order.
    - `parents`: for each of them those drawn before it, in order, and the given ones that it reads. Sites in a common
        plate are aligned; a site outside a plate reads all members.
    """

    graph: Graph
    order: tuple[str, ...]
    parents: Mapping[str, tuple[str, ...]]

    @cached_property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The sites in groups: those of one level read only earlier levels, and can be drawn at once."""
        depth: dict[str, int] = {}
        for name in self.order:
            depth[name] = 1 + max((depth[p] for p in self.parents[name] if p in depth), default=-1)
        return tuple(
            tuple(n for n in self.order if depth[n] == level) for level in range(max(depth.values(), default=-1) + 1)
        )

    def ground(self) -> dict[str, tuple[str, ...]]:
        """The parents of every single member, with the names of `graph.ground()`."""
        sites, plates = self.graph.sites, self.graph.plates
        members = {name: [(m, self._within(at)) for m, at in ground_members(sites[name], plates)] for name in sites}
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

    def _within(self, at: dict[str, int]) -> dict[str, int]:
        """A member's position, with the groups that index arrays put it in."""
        return at | {g: int(index[at[o]]) for (o, g), index in self.graph.nests.items() if o in at}


def forward(graph: Graph) -> ConditionalProgram:
    """The forward program: a program's data, drawn given its parameters, each from its own parents.

    Its graph is the program's with data and parameters exchanged.

    >>> graph = cpe.Graph.from_edges({"x": ["a", "b"], "y": ["x"]}, observed=["x", "y"])
    >>> program = forward(graph)
    >>> program.order, program.parents["x"], program.graph.data
    (('x', 'y'), ('a', 'b'), ('a', 'b'))
    """
    given = [n for n in graph.parameters if set(graph.parents[n]) & set(graph.data)]
    if given:
        raise ValueError(f"The prior of '{given[0]}' depends on data, so that data cannot be drawn given parameters.")
    masked = [n for n in graph.data if graph.sites[n].mask is not None]
    if masked:
        raise ValueError(f"Some values of '{masked[0]}' are masked, so that they are not drawn.")
    drawn = exchanged(with_templates(graph))
    return ConditionalProgram(drawn, drawn.parameters, {name: drawn.parents[name] for name in drawn.parameters})


def exchanged(graph: Graph) -> Graph:
    """The graph with data as parameters, and parameters as data."""
    return replace(graph, sites={n: replace(s, observed=not s.observed) for n, s in graph.sites.items()})


def with_templates(graph: Graph) -> Graph:
    """The graph without plates that cannot be templates, because their members differ by more than can be read."""
    for name, site in graph.sites.items():
        for parent, plate in site.mixed:
            if plate in graph.plates:
                graph = unroll(graph, plate, f"'{name}' reads other members of '{parent}' than its own")
    for plate, why in graph.unlike.items():
        if plate in graph.plates:
            graph = unroll(graph, plate, why)
    for plate, why in _told_apart_by_masks(graph):
        graph = unroll(graph, plate, why)
    return graph


def _told_apart_by_masks(graph: Graph) -> list[tuple[str, str]]:
    """The plates whose members are not exchangeable because a mask hides the data of some, and why.

    Where the masked data are all that is in the plate, pooling over it is right as it is: what the hidden members add
    is the same in every simulation.
    """
    out = {}
    for name, site in graph.sites.items():
        kept = site.kept
        for axis, plate in enumerate(site.dims):
            if kept is None or plate is None or bool((kept == np.take(kept, [0], axis)).all()):
                continue
            alone = len(site.plates) == 1 and all(n == name or plate not in s.dims for n, s in graph.sites.items())
            if not alone:
                out[plate] = f"members of '{name}' are masked differently"
    return list(out.items())


MOST_UNROLLED = 1_000
"""Members of the largest plate that is unrolled. Coupled members read one another: n of them have n² / 2 edges."""


def unroll(graph: Graph, plate: str, why: str) -> Graph:
    size = graph.plates[plate]
    if size > MOST_UNROLLED:
        raise ValueError(
            f"Plate '{plate}' has {size} members that depend on one another in the posterior ({why}), so each would "
            f"have to be written out; that is done for up to {MOST_UNROLLED}. If every member has its own data, put "
            "them into the plate too. With order='leaf', use order='prior'."
        )
    return graph.unroll(plate, why)
