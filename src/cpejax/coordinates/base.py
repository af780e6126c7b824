"""The prior as base distribution of a flow (paper, section 3.1), in the coordinates of a parameter vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Coordinates, Values
from cpejax.coordinates.standardise import Fixed
from cpejax.coordinates.vector import Kind, Vector, prior_draw
from cpejax.program.distributions import unwrap
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program


class Prior(Fixed):
    """The prior as a distribution of vectors `u`, standardised by the simulations: `u = (vector − centre) / scale`.

    In prior coordinates it is N(0, I), and there is nothing to standardise. That `u` is standardised is not in the
    paper; it is linear in each scalar, so straight paths stay straight and no scalar reads others by it.
    """

    vector: Vector
    centre: Float[Array, " d"]
    scale: Float[Array, " d"]

    def __init__(self, program: Program, graph: Graph, values: Values, kind: Kind):
        self.vector = Vector(program, graph, values, kind)
        rows = jax.jit(jax.vmap(self.vector.flatten))({name: x[:10_000] for name, x in values.items()})
        spread = rows.std(0)
        plain = kind == "prior"
        self.centre = jnp.zeros_like(spread) if plain else rows.mean(0)
        self.scale = jnp.ones_like(spread) if plain else jnp.where(spread > 0, spread, 1.0)

    @property
    def size(self) -> int:
        """The length of a vector."""
        return self.vector.size

    def to_vectors(self, values: Values) -> Float[Array, "n d"]:
        """The vectors of values, `{site: (n, *shape)}` with the data among them."""
        return (jax.vmap(self.vector.flatten)(values) - self.centre) / self.scale

    def to_values(self, u: Float[Array, "n d"], data: Values) -> Values:
        """The parameters of vectors, for one observation."""
        return jax.vmap(lambda x: self.vector.unflatten(x, data))(self.centre + self.scale * u)

    def count_clipped(self, u: Float[Array, "n d"]) -> dict[str, Array]:
        """How many values `to_values` clips: prior coordinates beyond what can be drawn."""
        if self.vector.kind != "prior":
            return {}
        low, high = jnp.stack([self.vector.coordinates.limit(label.site) for label in self.vector.labels], axis=1)
        return {"clipped": jnp.sum((u < low) | (u > high))}

    def log_volume(self, values: Values) -> Float[Array, " n"]:
        """`log |du / dθ|`."""
        return jax.vmap(self.vector.log_volume)(values) - jnp.log(self.scale).sum()

    def draw(self, n: int, data: Values, *, key: PRNGKeyArray) -> Float[Array, "n d"]:
        """Vectors of prior draws; of one observation, because a prior may depend on data."""
        if self.vector.kind == "prior":
            return jax.random.normal(key, (n, self.size))
        program, parameters = self.vector.coordinates.program, self.vector.graph.parameters
        values = jax.vmap(lambda k: prior_draw(program, parameters, data, key=k))(jax.random.split(key, n))
        return self.to_vectors(with_data(values, data))

    def log_density(self, u: Float[Array, "n d"], data: Values) -> Float[Array, " n"]:
        """The prior's log-density at vectors; −∞ outside its support."""
        if self.vector.kind == "prior":
            return norm.logpdf(u).sum(-1)
        values = with_data(self.to_values(u, data), data)
        return jax.vmap(lambda v: log_prior(self.vector.coordinates, v))(values) - self.log_volume(values)


def log_prior(coordinates: Coordinates, values: Values) -> Float[Array, ""]:
    """The prior's log-density at parameters, −∞ outside its support."""
    total = jnp.zeros(())

    def visit(_: str, fn: dist.Distribution, value: Array) -> None:
        nonlocal total
        inside = jnp.all(fn.support(value))
        # Many families have a finite, or no, log-probability outside their support.
        total += jnp.where(inside, unwrap(fn).log_prob(value).sum(), -jnp.inf)

    coordinates.visit(values, visit)
    return total


def with_data(values: Values, data: Values) -> Values:
    """Parameters `(n, *shape)` with one observation's data for each."""
    n = len(next(iter(values.values())))
    return values | {name: jnp.broadcast_to(x, (n, *x.shape)) for name, x in data.items()}
