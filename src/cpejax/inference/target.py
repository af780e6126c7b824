"""Prior × likelihood for one observation, in prior coordinates: what refined draws are drawn from."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float

from cpejax.coordinates.base import with_data
from cpejax.coordinates.prior import Coordinates, Values
from cpejax.inference.likelihood import Likelihood
from cpejax.program.distributions import unwrap

EDGE = 1e-3
"""How near to a limit of the coordinates, relative to it, a coordinate is at that limit, where draws are clipped."""


class Target(eqx.Module):
    """The posterior's density, up to a constant, of the parameters that are not given, as vectors `z`.

    - `coordinates`: in `z` the prior of families with a quantile function is N(0, I); there is no density beyond the
        limits of what can be drawn.
    - `likelihood`: of the data sites.
    - `given`: one observation, `{site: shape}`; parameters may be among them.
    """

    coordinates: Coordinates
    likelihood: Likelihood
    given: Values

    @property
    def free(self) -> tuple[str, ...]:
        """The parameters that are drawn."""
        return tuple(name for name in self.coordinates.graph.parameters if name not in self.given)

    def to_z(self, values: Values) -> Float[Array, "n d"]:
        """The vectors of draws `{site: (n, *shape)}`."""

        def one(values: Values) -> Array:
            z = self.coordinates.to_z(values)
            return jnp.concatenate([z[name].reshape(-1) for name in self.free])

        return jax.vmap(one)(with_data(values, self.given))

    def to_values(self, z: Float[Array, "n d"]) -> Values:
        """The draws of vectors, the inverse of `to_z`."""

        def one(z: Array) -> Values:
            parts, known = self._split(z), {**self.coordinates.example, **self.given}
            # The trace needs a shape for every parameter; those that are given are not mapped.
            shapes = jax.eval_shape(self.coordinates.to_z, known)
            constrain = self.coordinates.constrainers(known, {**shapes, **parts})
            for name in self.free:  # parents before children
                known = {**known, name: constrain[name](known, parts[name])}
            return {name: known[name] for name in self.free}

        return jax.vmap(one)(z)

    def _split(self, z: Float[Array, " d"]) -> Values:
        shapes = jax.eval_shape(self.coordinates.to_z, {**self.coordinates.example, **self.given})
        sizes = [math.prod(shapes[name].shape) for name in self.free]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        return {n: part.reshape(shapes[n].shape) for n, part in zip(self.free, jnp.split(z, ends), strict=True)}

    def within(self, z: Float[Array, " d"]) -> Bool[Array, ""]:
        """Whether a vector is inside the limits of what can be drawn."""
        inside = jnp.ones((), bool)
        for name, part in self._split(z).items():
            low, high = (1 - EDGE) * self.coordinates.limit(name)
            inside &= jnp.all((part > low) & (part < high))
        return inside

    def __call__(self, z: Float[Array, "n d"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The log-density of the prior in `z`, with that of given parameters, and the log-likelihood."""
        graph = self.coordinates.graph
        full = with_data(self.to_values(z), self.given)
        data = {name: self.given[name] for name in graph.data}
        log_likelihood = self.likelihood({name: full[name] for name in graph.parameters}, data)
        return jax.vmap(self._log_prior)(z, full), log_likelihood

    def _log_prior(self, z: Float[Array, " d"], values: Values) -> Float[Array, ""]:
        by_bijection = [name for name in self.free if name in self.coordinates.shift]
        parts = self._split(z)
        total = sum((norm.logpdf(parts[n]).sum() for n in self.free if n not in by_bijection), jnp.zeros(()))
        total -= self.coordinates.log_volume(values, by_bijection)

        def visit(name: str, fn: dist.Distribution, value: Array) -> None:
            nonlocal total
            if name in by_bijection or name in self.given:
                total += unwrap(fn).log_prob(value).sum()

        self.coordinates.visit(values, visit)
        return jnp.where(self.within(z), total, -jnp.inf)

    def log_volume(self, values: Values) -> Float[Array, " n"]:
        """`log |dz/dθ|` of draws `{site: (n, *shape)}`."""
        sites = set(self.free)
        return jax.vmap(lambda v: self.coordinates.log_volume(v, sites))(with_data(values, self.given))
