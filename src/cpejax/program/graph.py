"""The graph of a program: sites, plates and edges (paper, section 3: the prior program)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np

from cpejax.program.descriptions import differences
from cpejax.program.distributions import base_constraint, unwrap
from cpejax.program.members import Constant, Link
from cpejax.program.plates import study
from cpejax.program.site_checks import check_list, check_masks, check_names, check_parameter, check_unlike, data_sites
from cpejax.program.sites import Site, member_of, points
from cpejax.program.tracing import Deterministic, read, read_deterministics


@dataclass(frozen=True)
class Graph:
    """The directed graph of a program, with plates as templates.

    An edge between two sites means, for sites in a common plate, an edge between members of the same index; a site
    outside a plate is linked to every member of a site inside it.

    - `constants`: what the program gives each member of some plates, besides its sites: covariates, errors, times.
    - `links`: index arrays from one plate into another, `theta[group]`.
    - `unlike`: plates whose members differ by more than that, and how; they cannot share weights.
    - `unrolled`: plates that have been written out, and why.

    >>> graph = cpe.Graph.from_edges({"x": ["a", "b"]}, observed=["x"])
    >>> graph.parents["x"]
    ('a', 'b')
    """

    sites: Mapping[str, Site]
    plates: Mapping[str, int] = field(default_factory=dict)
    unrolled: Mapping[str, str] = field(default_factory=dict)  # plate -> why
    constants: Mapping[str, Constant] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    unlike: Mapping[str, str] = field(default_factory=dict)  # plate -> why
    deterministics: Mapping[str, Deterministic] = field(default_factory=dict, compare=False)  # functions of the sites

    @classmethod
    def from_program(cls, program: Any, *, observed: Sequence[str] | None = None) -> Graph:
        """Read the graph off a NumPyro program without arguments, by provenance. Nothing is simulated.

        What tells the members of a plate apart is found as well, and it is verified that they are exchangeable given
        that.

        **Arguments:**

        - `program`: a NumPyro model without arguments, or a `cpe.Model`, whose `graph` this is.
        - `observed`: the names of the data sites. Without it, the sites with `obs=` and the `cpe.Simulator` sites.
        """
        known = getattr(program, "graph", None)
        if isinstance(known, Graph):  # of a model
            return known
        raw = read(program)
        data = data_sites(raw, observed)
        deterministics = read_deterministics(program, raw)
        check_names([*raw, *deterministics])
        for name in raw:
            if name not in data:
                check_parameter(name, raw[name])
        check_masks(raw)
        plates = {d: n for site in raw.values() for d, n in zip(site.dims, site.shape, strict=True) if d is not None}
        members = study(program, raw)
        for plate, why in members.unlike.items():
            check_unlike(plate, plates[plate], why)
        sites = {
            name: Site(
                name=name,
                shape=site.shape,
                dims=site.dims,
                observed=name in data,
                parents=tuple(p for p in raw if p in site.parents),
                support=type(base_constraint(site.fn)).__name__.strip("_").lower(),
                distribution=type(unwrap(site.fn)).__name__,
                mixed=site.mixed,
                links=members.reads.get(name, ()),
                origin=name,
                axes=tuple(d for d in site.dims if d is not None),
                mask=None if site.mask is None else site.mask.tobytes(),
            )
            for name, site in raw.items()
        }
        graph = cls._checked(sites, plates)
        return replace(
            graph,
            constants=members.constants,
            links=members.links,
            unlike=members.unlike,
            deterministics=deterministics,
        )

    @classmethod
    def from_edges(
        cls,
        parents: Mapping[str, Iterable[str]],
        observed: Sequence[str],
        plates: Mapping[str, Sequence[str]] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Graph:
        """A graph of scalar sites without a program.

        **Arguments:**

        - `parents`: the parents of each site that has any.
        - `observed`: the data sites.
        - `plates`: the plates of each site that is in any, outermost first; `sizes`: the size of each plate.
        """
        check_list(observed)
        inside = {name: tuple(p) for name, p in (plates or {}).items()}
        sizes = dict(sizes or {})
        edges = {name: tuple(dict.fromkeys(p)) for name, p in parents.items()}
        names = list(dict.fromkeys([p for ps in edges.values() for p in ps] + list(edges) + list(inside)))
        for name in observed:
            if name not in names:
                raise ValueError(f"observed names '{name}', but the edges have only the sites {sorted(names)}.")
        for name, around in inside.items():
            for plate in around:
                if plate not in sizes:
                    raise ValueError(f"Site '{name}' is in plate '{plate}', but sizes has no size for it.")
        graph = nx.DiGraph([(p, c) for c, ps in edges.items() for p in ps])
        graph.add_nodes_from(names)
        if not nx.is_directed_acyclic_graph(graph):
            cycle = [a for a, _ in nx.find_cycle(graph)]
            raise ValueError(f"The edges have a cycle: {' -> '.join([*cycle, cycle[0]])}. A program's graph has none.")
        rank = {name: i for i, name in enumerate(names)}
        sites = {
            name: Site(
                name=name,
                shape=tuple(sizes[p] for p in inside.get(name, ())),
                dims=inside.get(name, ()),
                observed=name in set(observed),
                parents=edges.get(name, ()),
                origin=name,
                axes=inside.get(name, ()),
            )
            for name in nx.lexicographical_topological_sort(graph, rank.__getitem__)
        }
        used = {p: sizes[p] for ps in inside.values() for p in ps}
        return cls._checked(sites, used)

    @classmethod
    def _checked(cls, sites: dict[str, Site], plates: dict[str, int]) -> Graph:
        graph = cls(sites, plates)
        if not graph.data:
            raise ValueError(
                f"The program has no data: its sites {list(sites)} are all parameters. Name the data with "
                "observed=[...], give them obs=..., or make them cpe.Simulator sites."
            )
        if not graph.parameters:
            raise ValueError(
                f"The program has no parameters: its sites {list(sites)} are all data. Draw what is to be inferred "
                "by numpyro.sample, without obs=, and leave it out of observed=[...]."
            )
        informed = set(graph.parameters)
        for name, site in sites.items():
            if site.observed and not informed & set(site.parents):
                raise ValueError(
                    f"Data site '{name}' depends on no parameter, so it says nothing about them. "
                    "Remove it, or, if it must stay, draw it as part of another data site (one vector). To fix a "
                    "parameter, write its value in its place instead of obs= or numpyro.handlers.condition."
                )
            informed.add(name)
        return graph

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The parameter sites, parents before children."""
        return tuple(name for name, site in self.sites.items() if not site.observed)

    @cached_property
    def data(self) -> tuple[str, ...]:
        """The data sites."""
        return tuple(name for name, site in self.sites.items() if site.observed)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all sites, the deterministic ones last."""
        own = {name: site.shape for name, site in self.sites.items()}
        return own | {name: site.shape for name, site in self.deterministics.items()}

    @cached_property
    def parents(self) -> dict[str, tuple[str, ...]]:
        """The parents of each site."""
        return {name: site.parents for name, site in self.sites.items()}

    @cached_property
    def children(self) -> dict[str, tuple[str, ...]]:
        """The children of each site."""
        out: dict[str, list[str]] = {name: [] for name in self.sites}
        for name, site in self.sites.items():
            for parent in site.parents:
                out[parent].append(name)
        return {name: tuple(children) for name, children in out.items()}

    @cached_property
    def nests(self) -> dict[tuple[str, str], np.ndarray]:
        """For plates `(inner, outer)` the member of the outer that each member of the inner is in, by index arrays.

        Also by two arrays: if all pupils of a school have the same district, the school is in that district.
        """
        out = {
            (link.source[0], link.target): link.index.values[..., 0]
            for link in self.links
            if len(link.source) == 1 and {link.source[0], link.target} <= self.plates.keys() - self.unlike.keys()
        }
        while True:
            new: dict[tuple[str, str], np.ndarray] = {}
            for (o, g), index in out.items():
                for (a, d), further in out.items():
                    if a == g and (o, d) not in out:
                        new[o, d] = further[index]
                    if a == o and d != g and not {(g, d), (d, g)} & (out.keys() | new.keys()):
                        one = np.zeros(self.plates[g], index.dtype)
                        one[index] = further
                        if np.array_equal(one[index], further):
                            new[g, d] = one
            if not new:
                return out
            out |= new

    def closure(self, plates: Iterable[str]) -> frozenset[str]:
        """Some plates, and those that they are in by index arrays."""
        found = set(plates)
        return frozenset(found | {g for o, g in self.nests if o in found})

    def around(self, name: str) -> frozenset[str]:
        """All plates that a site is in, also those that an index array puts it in."""
        return self.closure(self.sites[name].plates)

    def unroll(self, plate: str, why: str = "asked for") -> Graph:
        """The same graph with one plate written out, a site for each member; plates it is in by index arrays too."""
        if plate not in self.plates:
            raise ValueError(f"No plate '{plate}'; the plates are {sorted(self.plates)}.")
        size = self.plates[plate]
        members = {
            name: [member_of(site, plate, i).name for i in range(size)] if plate in site.dims else [name]
            for name, site in self.sites.items()
        }
        sites: dict[str, Site] = {}
        for name, site in self.sites.items():
            coupled = {p for p, q in site.mixed if q == plate}
            for i, member in enumerate(members[name]):
                parents: list[str] = []
                for parent in site.parents:
                    aligned = plate in site.dims and plate in self.sites[parent].dims and parent not in coupled
                    parents += members[parent][i : i + 1] if aligned else members[parent]
                mixed = tuple((m, q) for p, q in site.mixed if q != plate for m in members[p] if m in set(parents))
                new = member_of(site, plate, i) if plate in site.dims else site
                if site.links:
                    parents = [p for p in parents if p not in sites or points(new, sites[p])]
                sites[member] = replace(new, parents=tuple(parents), mixed=mixed)
        constants = {name: _without(c, plate) for name, c in self.constants.items()}
        graph = replace(
            self,
            sites=sites,
            plates={p: n for p, n in self.plates.items() if p != plate},
            unrolled={**self.unrolled, plate: why},
            constants={name: c for name, c in constants.items() if c.plates},
            links=tuple(link for link in self.links if plate not in link.source),
        )
        for target in (link.target for link in self.links if plate in link.source):
            if target in graph.plates:
                graph = graph.unroll(target, f"members of '{plate}', which is unrolled, point into it")
        return graph

    def ground(self) -> Graph:
        """The same graph with every plate written out."""
        graph = self
        for plate in self.plates:
            graph = graph.unroll(plate) if plate in graph.plates else graph
        return graph

    def to_networkx(self) -> nx.DiGraph:
        """The edges as a `networkx.DiGraph`."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self.sites)
        graph.add_edges_from((p, c) for c, ps in self.parents.items() for p in ps)
        return graph

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description, the same for the same program."""
        return {
            **self._constants_dict(),
            "plates": dict(self.plates),
            "sites": {
                name: {
                    "shape": list(s.shape),
                    "dims": list(s.dims),
                    "observed": s.observed,
                    "parents": list(s.parents),
                    "support": s.support,
                    "distribution": s.distribution,
                    "mixed": [list(m) for m in s.mixed],
                    **({} if s.kept is None else {"mask": np.flatnonzero(~s.kept).tolist()}),
                }
                for name, s in self.sites.items()
            },
        }

    def _constants_dict(self) -> dict[str, Any]:
        constants = {c.name: {"plates": list(c.plates), "digest": c.digest} for c in self.constants.values()}
        links = [{"from": list(o.source), "into": o.target, "digest": o.index.digest} for o in self.links]
        return ({"constants": constants} if constants else {}) | ({"links": links} if links else {})

    @cached_property
    def fingerprint(self) -> str:
        """A hash of `to_dict()`: two programs with the same fingerprint have the same graph, shapes and families."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """What this graph has otherwise than `other`, a `to_dict()`, in sentences."""
        return differences(self.to_dict(), other)

    def without_masked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of sites, each `(*shape)` or with further axes in front, with those that are masked set to 0."""
        out = dict(values)
        for name, x in values.items():
            kept = self.sites[name].kept if name in self.sites else None
            if kept is not None and np.shape(x)[np.ndim(x) - kept.ndim :] == kept.shape:
                out[name] = np.where(kept, np.asarray(x), np.zeros((), np.asarray(x).dtype))
        return out

    def __str__(self) -> str:
        return "\n".join(["prior program", *lines(self, self.parents, "~"), *self.notes()])

    def notes(self) -> list[str]:
        """A line for each constant and each index array."""
        out = []
        for c in self.constants.values():
            shape = f", shape ({c.values.shape[-1]},)" if c.values.shape[-1] > 1 else ""
            out.append(
                f"  constant {c.name}    (plate {' × '.join(f'{p}[{self.plates[p]}]' for p in c.plates)}{shape})"
            )
        for link in self.links:
            sizes = " × ".join(f"{p}[{self.plates[p]}]" for p in link.source)
            size = f"[{self.plates[link.target]}]" if link.target in self.plates else ", unrolled"
            out.append(f"  index    {sizes or '·'} → {link.target}{size}")
        return out

    def where(self, site: Site) -> str:
        """The plates of a site with their sizes, in words."""
        return " × ".join(f"{p}[{self.plates[p]}]" for p in site.plates)


def lines(graph: Graph, parents: Mapping[str, tuple[str, ...]], mark: str) -> list[str]:
    """One line a site, in the order of `parents`: its name, what it reads, and shape and plates."""
    width = max(len(name) for name in parents)
    out = []
    for name, reads in parents.items():
        site, where = graph.sites[name], graph.where(graph.sites[name])
        shape = f"shape {site.event_shape}" if site.size > 1 else ""
        notes = [n for n in (shape, f"plate {where}" if where else "", "data" if site.observed else "") if n]
        out.append(f"  {name:<{width}} {mark} {listing(reads)}" + (f"    ({', '.join(notes)})" if notes else ""))
    return out


def listing(names: Sequence[str], most: int = 12) -> str:
    """Names with commas, or the first few of many."""
    more = f", … ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "·"


def _without(constant: Constant, plate: str) -> Constant:
    """A constant whose members of an unrolled plate are columns."""
    if plate not in constant.plates:
        return constant
    axis = constant.plates.index(plate)
    plates = tuple(p for p in constant.plates if p != plate)
    values = np.moveaxis(constant.values, axis, -2)
    return replace(constant, plates=plates, values=values.reshape(*values.shape[:-2], -1))
