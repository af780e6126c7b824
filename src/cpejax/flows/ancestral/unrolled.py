"""Where the members of unrolled plates stand in the values and coordinates of their sites."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from cpejax.coordinates.prior import plates_first
from cpejax.program.graph import Graph
from cpejax.program.sites import Site


def position(site: Site, graph: Graph) -> tuple:
    """Where a member stands in the values of its program's site, `(n, *shape)`."""
    at = dict(site.index)
    return (slice(None), *(slice(None) if d is None else at.get(d, slice(None)) for d in graph.sites[site.origin].dims))


def place(site: Site, graph: Graph) -> tuple:
    """Where a member stands in its site's coordinates, `(n, *plates, size)`."""
    at = dict(site.index)
    return (slice(None), *(at.get(p, slice(None)) for p in graph.plates if p in site.axes))


def pick(site: Site, x: Float[Array, "n ..."], graph: Graph) -> Array:
    return x[position(site, graph)] if site.index else x


def site_rows(site: Site, x: Float[Array, "n ..."], graph: Graph) -> Float[Array, "n *plates size"]:
    return jax.vmap(lambda x: plates_first(x, site.dims, tuple(graph.plates)))(x)
