"""The parameters of a program as one vector of scalars, for flows that move all of them together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Coordinates, Values, plates_last
from cpejax.coordinates.standardise import Fixed
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program
from cpejax.program.sites import Site, ground_members
from cpejax.program.tracing import run

Kind = Literal["plain", "unconstrained", "prior"]


class Label(NamedTuple):
    """What a scalar of the vector is.

    - `site`: the program's site.
    - `place`: its position in each of the site's plates, in the graph's order of plates.
    - `k`: which of the member's scalars.
    - `member`: the member's name in `graph.ground()` and in `PosteriorProgram.ground()`.
    """

    site: str
    place: tuple[int, ...]
    k: int
    member: str


class Vector(Fixed):
    """The map between the parameters of a program and a vector. It acts on one example; callers `vmap`.

    The scalars of the vector are, by `kind`,

    - `"plain"`: the user's own. A flow may then leave the prior's support, and its draws there are rejected.
    - `"unconstrained"`: those of the bijection from the real numbers to each site's support, standardised by the
        simulations. A support may depend on other sites: they are visited in the program's order.
    - `"prior"`: the `z` of `Coordinates`, in which the prior is N(0, I).

    **Arguments:**

    - `program`, `graph`: the program, without arguments, and its graph.
    - `values`: simulations, arrays with a leading axis.
    - `sites`: the parameters in the order of the vector, as the sites of a posterior program's graph, in which plates
        may be unrolled; by default in the graph's own order. The members of a plate follow one another.

    **Attributes:** `size`, the length `d`; `labels`, what each scalar is; `coordinates`, the prior coordinates.
    """

    coordinates: Coordinates
    free: Coordinates | None  # what "unconstrained" maps by
    kind: Kind = eqx.field(static=True)
    labels: tuple[Label, ...] = eqx.field(static=True)
    places: tuple[int, ...] = eqx.field(static=True)  # of each scalar where sites follow the graph's order
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)  # (*plates, size) of each parameter's scalars

    def __init__(
        self,
        program: Program,
        graph: Graph,
        values: Values,
        kind: Kind = "plain",
        sites: Sequence[Site] | None = None,
    ):
        if kind not in get_args(Kind):
            raise ValueError(f"coordinates must be one of {list(get_args(Kind))}, found {kind!r}.")
        self.kind = kind
        self.coordinates = Coordinates(program, graph, values)
        self.free = None
        example = self.coordinates.example
        shapes = jax.eval_shape(self.coordinates.to_z, example)
        if kind == "plain":
            for name in graph.parameters:
                _check_density(graph.sites[name], math.prod(shapes[name].shape))
        if kind == "unconstrained":
            self.free = Coordinates(program, graph, values, free=True)
            shapes = jax.eval_shape(self.free.to_z, example)

        self.shapes = tuple(tuple(shapes[name].shape) for name in graph.parameters)
        every = tuple(label for name in graph.parameters for label in labels_of(graph.sites[name], graph, shapes[name]))
        place = {label: i for i, label in enumerate(every)}
        sites = [graph.sites[name] for name in graph.parameters] if sites is None else sites
        self.labels = tuple(
            label for site in sites for label in labels_of(graph.sites[site.origin], graph, shapes[site.origin], site)
        )
        if sorted(self.labels) != sorted(every):
            raise ValueError(f"sites must be the parameters {list(graph.parameters)}, each once.")
        self.places = tuple(place[label] for label in self.labels)

    @property
    def graph(self) -> Graph:
        """The program's graph."""
        return self.coordinates.graph

    @property
    def size(self) -> int:
        """How many scalars there are."""
        return len(self.labels)

    @property
    def may_leave_support(self) -> bool:
        """Whether there are vectors outside the prior's support."""
        return self.kind == "plain" and any(self.graph.sites[n].support != "real" for n in self.graph.parameters)

    def _map(self) -> Coordinates:
        return self.coordinates if self.free is None else self.free

    def flatten(self, values: Values) -> Float[Array, " d"]:
        """The vector of a program's values, the data among them (a parameter's prior may depend on data)."""
        graph = self.graph
        if self.kind == "plain":
            scalars = {name: self.coordinates.canonical(name, values[name]) for name in graph.parameters}
        else:
            scalars = self._map().to_z(values)
        joined = jnp.concatenate([scalars[name].reshape(-1) for name in graph.parameters])
        return joined[np.array(self.places)]

    def unflatten(self, vector: Float[Array, " d"], data: Values) -> Values:
        """The parameters of a vector, the inverse of `flatten`; `data` are the values of the data sites."""
        graph = self.graph
        scalars = self._split(vector)
        if self.kind == "plain":
            plates = tuple(graph.plates)
            sites = {name: graph.sites[name] for name in graph.parameters}
            return {name: plates_last(scalars[name], s.shape, s.dims, plates) for name, s in sites.items()}
        known = self.coordinates.example | data
        constrain = self._map().constrainers(known, scalars)
        for name in graph.parameters:  # parents before children
            known = known | {name: constrain[name](known, scalars[name])}
        return {name: known[name] for name in graph.parameters}

    def needs(self) -> dict[str, tuple[str, ...]]:
        """For each parameter the sites whose values its scalars depend on."""
        if self.kind == "plain":
            return dict.fromkeys(self.graph.parameters, ())
        example = self.coordinates.example
        constrain = self._map().constrainers(example, jax.eval_shape(self._map().to_z, example))
        return {name: tuple(n for n in constrain[name].needs if n != name) for name in self.graph.parameters}

    def _split(self, vector: Float[Array, " d"]) -> Values:
        """The scalars of each site, `(*plates, size)`."""
        joined = jnp.zeros(self.size, vector.dtype).at[np.array(self.places)].set(vector)
        parts = jnp.split(joined, np.cumsum([math.prod(shape) for shape in self.shapes])[:-1])
        each = zip(self.graph.parameters, self.shapes, parts, strict=True)
        return {name: part.reshape(shape) for name, shape, part in each}

    def log_volume(self, values: Values, sites: Collection[str] | None = None) -> Float[Array, ""]:
        """`log |d vector / dθ|`: what turns a density of the vector into one of the user's parameters.

        `sites`: of these parameters only, the others being known.
        """
        return jnp.zeros(()) if self.kind == "plain" else self._map().log_volume(values, sites)

    def in_support(self, values: Values) -> Array:
        """Whether every parameter is in the support of its prior."""
        return self.coordinates.in_support(values)


def prior_draw(program: Program, parameters: Collection[str], data: Values, *, key: PRNGKeyArray) -> Values:
    """One joint draw of a program's parameters from the prior, `{site: shape}`. Callers `vmap` over keys.

    The program is run with its data in place, so no simulator is called; a parameter whose prior depends on data gets
    its prior for these data.
    """
    out: Values = {}

    def visit(name: str, msg: dict) -> None:
        if name in parameters:
            out[name] = jnp.asarray(msg["value"], float)

    run(program, data, visit, key)
    return out


def labels_of(site: Site, graph: Graph, shape: jax.ShapeDtypeStruct, only: Site | None = None) -> list[Label]:
    """The scalars of a site, or of one member of it, in the order of its scalars `(*plates, size)`."""
    at = dict(only.index) if only is not None else {}
    plates = [p for p in graph.plates if p in site.dims]
    names = {tuple(where[p] for p in plates): member for member, where in ground_members(site, graph.plates)}
    return [
        Label(site.name, index, k, names[index])
        for index in np.ndindex(*shape.shape[:-1])
        if all(at.get(p, i) == i for p, i in zip(plates, index, strict=True))
        for k in range(shape.shape[-1])
    ]


def _check_density(site: Site, dimension: int) -> None:
    scalars = math.prod(site.shape)
    if dimension < scalars:
        raise ValueError(
            f"Parameter '{site.name}' ({site.distribution}) has {scalars} scalars that lie in a set of dimension "
            f"{dimension}, so it has no density in plain coordinates. Use coordinates='unconstrained'."
        )
