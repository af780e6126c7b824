"""The graph of a program: sites, plates and edges (paper, section 3: the prior program)."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import networkx as nx
import numpyro.distributions as dist

from cpejax._program import Program, RawSite, Simulator, base_constraint, read, unwrap


@dataclass(frozen=True)
class Site:
    """One random variable of a program, or one member of it where a plate is unrolled.

    - `name`: as in the program; a member of an unrolled plate is named as NumPy indexes it, `beta[0]` or `y[:, 2]`.
    - `shape`: the shape of its value, plates included.
    - `dims`: for each axis of the value the plate it belongs to, or `None` for an axis of the event.
    - `observed`: data (`True`) or parameter.
    - `parents`: the sites its distribution depends on.
    - `support`, `distribution`: as words.
    - `mixed`: pairs (parent, plate) where the site reads other members of a parent in its own plate.
    - `origin`, `axes`, `index`: the program's site, its plates, and this member's position in each unrolled plate.
    """

    name: str
    shape: tuple[int, ...] = ()
    dims: tuple[str | None, ...] = ()
    observed: bool = False
    parents: tuple[str, ...] = ()
    support: str = "real"
    distribution: str = ""
    mixed: tuple[tuple[str, str], ...] = ()
    origin: str = ""
    axes: tuple[str, ...] = ()
    index: tuple[tuple[str, int], ...] = ()

    @property
    def plates(self) -> tuple[str, ...]:
        """The plates it is in, outermost first."""
        return tuple(d for d in self.dims if d is not None)

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one member's value."""
        return tuple(n for n, d in zip(self.shape, self.dims, strict=True) if d is None)

    @property
    def size(self) -> int:
        """How many numbers one member has."""
        return math.prod(self.event_shape)


@dataclass(frozen=True)
class Graph:
    """The directed graph of a program, with plates as templates.

    An edge between two sites means, for sites in a common plate, an edge between members of the same index; a site
    outside a plate is linked to every member of a site inside it.

    ??? example

        ```python
        graph = cpe.Graph.from_edges({"x": ["a", "b"]}, observed=["x"])
        graph.parents["x"]  # ('a', 'b')
        ```
    """

    sites: Mapping[str, Site]
    plates: Mapping[str, int] = field(default_factory=dict)
    unrolled: Mapping[str, str] = field(default_factory=dict)  # plate -> why

    @classmethod
    def from_program(cls, program: Program, *args: Any, observed: Sequence[str] | None = None, **kwargs: Any) -> Graph:
        """Read the graph off a NumPyro program, by provenance. Nothing is simulated.

        **Arguments:**

        - `program`: a NumPyro model.
        - `*args`, `**kwargs`: passed to the program.
        - `observed`: the names of the data sites. Without it, the sites with `obs=` and the `cpe.Simulator` sites.
        """
        raw = read(program, args, kwargs)
        data = _data_sites(raw, observed)
        for name in raw:
            if name not in data:
                _check_parameter(name, raw[name])
        plates = {d: n for site in raw.values() for d, n in zip(site.dims, site.shape, strict=True) if d is not None}
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
                origin=name,
                axes=tuple(d for d in site.dims if d is not None),
            )
            for name, site in raw.items()
        }
        return cls._checked(sites, plates)

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
        _check_list(observed)
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
                    "Remove it, or, if it must stay, draw it as part of another data site (one vector)."
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

    def unroll(self, plate: str, why: str = "asked for") -> Graph:
        """The same graph with one plate written out, a site for each member."""
        if plate not in self.plates:
            raise ValueError(f"No plate '{plate}'; the plates are {sorted(self.plates)}.")
        size = self.plates[plate]
        members = {
            name: [_member(site, plate, i).name for i in range(size)] if plate in site.dims else [name]
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
                read = set(parents)
                mixed = tuple((m, q) for p, q in site.mixed if q != plate for m in members[p] if m in read)
                new = _member(site, plate, i) if plate in site.dims else site
                sites[member] = replace(new, parents=tuple(parents), mixed=mixed)
        plates = {p: n for p, n in self.plates.items() if p != plate}
        return Graph(sites, plates, {**self.unrolled, plate: why})

    def ground(self) -> Graph:
        """The same graph with every plate written out."""
        graph = self
        for plate in self.plates:
            graph = graph.unroll(plate)
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
                }
                for name, s in self.sites.items()
            },
        }

    @cached_property
    def fingerprint(self) -> str:
        """A hash of `to_dict()`: two programs with the same fingerprint have the same graph, shapes and families."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """What this graph has otherwise than `other`, a `to_dict()`, in sentences."""
        mine, out = self.to_dict(), []
        for name in other["sites"]:
            if name not in mine["sites"]:
                out.append(f"site '{name}' is missing")
        for name, site in mine["sites"].items():
            if name not in other["sites"]:
                out.append(f"site '{name}' is new")
                continue
            for what, found in site.items():
                expected = other["sites"][name].get(what)
                if found != expected:
                    out.append(f"site '{name}' has {what} {found}, expected {expected}")
        for plate in {**mine["plates"], **other["plates"]}:
            found, expected = mine["plates"].get(plate), other["plates"].get(plate)
            if found != expected:
                out.append(f"plate '{plate}' has size {found}, expected {expected}")
        return out

    def __str__(self) -> str:
        return "\n".join(["prior program", *lines(self, self.parents, "~")])

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


def _member(site: Site, plate: str, i: int) -> Site:
    """Member `i` of a site along `plate`."""
    axis = site.dims.index(plate)
    index = (*site.index, (plate, i))
    # The position in the program's own array: unrolled axes by number, axes that remain by ":".
    at = dict(index)
    words = [str(at[p]) if p in at else ":" for p in site.axes]
    while words and words[-1] == ":":
        words.pop()
    return replace(
        site,
        name=f"{site.origin}[{', '.join(words)}]",
        shape=site.shape[:axis] + site.shape[axis + 1 :],
        dims=site.dims[:axis] + site.dims[axis + 1 :],
        index=index,
    )


def _data_sites(raw: Mapping[str, RawSite], observed: Sequence[str] | None) -> set[str]:
    simulators = {name for name, site in raw.items() if isinstance(unwrap(site.fn), Simulator)}
    with_obs = {name for name, site in raw.items() if site.has_obs}
    if observed is None:
        return simulators | with_obs
    _check_list(observed)
    for name in observed:
        if name not in raw:
            raise ValueError(f"observed names '{name}', but the program has only the sites {list(raw)}.")
    for name in (simulators | with_obs) - set(observed):
        kind = "a cpe.Simulator" if name in simulators else "given with obs="
        raise ValueError(
            f"Site '{name}' is {kind}, so it is data, but observed={list(observed)} leaves it out. Add it."
        )
    return set(observed)


def _check_list(observed: Sequence[str]) -> None:
    if isinstance(observed, str):
        raise TypeError(f"observed must be a list of site names, found the string {observed!r}: write [{observed!r}].")


def _check_parameter(name: str, site: RawSite) -> None:
    if site.fn.support is not None and site.fn.support.is_discrete:
        raise ValueError(
            f"Parameter '{name}' is discrete ({type(unwrap(site.fn)).__name__}); only continuous parameters can be "
            "inferred. Sum it out (a Mixture distribution does so), relax it, or, if it is data, name it in observed."
        )
    if isinstance(unwrap(site.fn), dist.Delta):
        raise ValueError(
            f"Parameter '{name}' is a Delta, which has nothing random to infer. "
            f"Write numpyro.deterministic('{name}', ...), or, if it is data, name it in observed=[...]."
        )
    if math.prod(site.shape) == 0:
        raise ValueError(f"Parameter '{name}' has shape {site.shape}, which is empty.")


def ground_members(site: Site, plates: Mapping[str, int]) -> Iterable[tuple[str, dict[str, int]]]:
    """All members of a site, by name and position."""
    for at in itertools.product(*(range(plates[p]) for p in site.plates)):
        member = site
        for plate, i in zip(site.plates, at, strict=True):
            member = _member(member, plate, i)
        yield member.name, dict(zip(site.plates, at, strict=True))
