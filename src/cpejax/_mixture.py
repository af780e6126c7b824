"""One-dimensional normal mixtures as monotone maps."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp, ndtr, ndtri
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float

SMALLEST = 1e-35
"""A probability that float32 can hold; beyond it `w` stays at ±12.3."""
EDGE = math.sqrt(3.0)
"""Where the standardised uniform distribution ends."""
FAR = 1e9
"""Where all others end."""


def quantile(z: Array) -> Array:
    """The quantile of a standard normal coordinate, standardised: linear in a parameter whose prior is uniform."""
    return math.sqrt(12.0) * (ndtr(z) - 0.5)


def linear(z: Float[Array, "*rows"], uniform: Bool[Array, "..."]) -> Float[Array, "*rows"]:
    """What a mixture is a law of: a coordinate, or its quantile where the prior is uniform."""
    return jnp.where(uniform, quantile(z), z)


class Mixture(eqx.Module):
    """Laws of a coordinate `z` with distribution functions `F`, and `w = Φ⁻¹(F(z))`, which makes them standard normal.

    A law is a normal mixture of `z` or, where the prior is `uniform`, one of its quantile `s`, truncated at the prior's
    edges: there `s` is the user's own parameter up to scale, and what is linear in it is linear for the networks.
    The mixture's numbers have the shape `(*rows, components)`, and `uniform` one that fits to `(*rows)`.
    """

    log_weights: Float[Array, "*rows components"]
    means: Float[Array, "*rows components"]
    log_scales: Float[Array, "*rows components"]
    uniform: Bool[Array, "..."]

    @classmethod
    def from_numbers(cls, x: Float[Array, "*rows three_components"], uniform: Bool[Array, "..."]) -> Mixture:
        """From a network's output, for zeros a mixture that covers N(0, 1).

        Scales are at least e⁻⁸, so that no single simulation can draw one to zero.
        """
        x = x.reshape(*x.shape[:-1], 3, -1)
        # Sums, not slices: their slopes are joined by a product with ones and zeros, much faster than end to end.
        weights, means, log_scales = ((x * one).sum(-2) for one in np.eye(3, dtype=np.float32)[..., None])
        if (components := x.shape[-1]) > 1:
            means, log_scales = means + np.linspace(-1.5, 1.5, components, dtype=np.float32), log_scales - 0.5
        # Mass beyond the edges is cut off; means stay near, so that not all of it is.
        means = jnp.where(uniform[..., None], jnp.clip(means, -2 * EDGE, 2 * EDGE), means)
        return cls(jax.nn.log_softmax(weights, axis=-1), means, jnp.maximum(log_scales, -8.0), uniform)

    def _standardised(self, s: Array) -> Float[Array, "*rows components"]:
        return (s - self.means) * jnp.exp(-self.log_scales)

    def _edges(self) -> tuple[Array, Array]:
        """The prior's edges, standardised; far away where it has none."""
        edges = self._standardised(jnp.asarray(-EDGE)), self._standardised(jnp.asarray(EDGE))
        first, last = (
            jnp.where(self.uniform[..., None], x, sign * FAR) for x, sign in zip(edges, (-1, 1), strict=True)
        )
        return first, last

    def log_density(self, z: Float[Array, "*rows"], s: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """`log F'(z)`; `s = linear(z, uniform)`."""
        log_f = logsumexp(self.log_weights - self.log_scales + norm.logpdf(self._standardised(s[..., None])), axis=-1)
        inside = jnp.maximum((jnp.exp(self.log_weights) * _between(*self._edges())).sum(-1), SMALLEST)
        return log_f - jnp.log(inside) + jnp.where(self.uniform, 0.5 * math.log(12.0) + norm.logpdf(z), 0.0)

    def straighten(self, s: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """`Φ⁻¹(F(z))` from `s = linear(z, uniform)`, by whichever tail is smaller."""
        d, weights = self._standardised(s[..., None]), jnp.exp(self.log_weights)
        first, last = self._edges()
        lower, upper = (weights * _between(first, d)).sum(-1), (weights * _between(d, last)).sum(-1)
        smaller = jnp.minimum(lower, upper) / jnp.maximum(lower + upper, SMALLEST)
        return jnp.where(lower < upper, 1.0, -1.0) * ndtri(jnp.maximum(smaller, SMALLEST))

    def bend(self, w: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """The inverse of `straighten`: bisection, then two steps of Newton's method."""
        # Mirrored where w > 0, so that the tail that is compared is always the small one.
        sign = jnp.where(w > 0, -1.0, 1.0)
        weights, scales = jnp.exp(self.log_weights), jnp.exp(self.log_scales)
        means = sign[..., None] * self.means
        cut = jnp.where(self.uniform, (weights * ndtr((-EDGE - means) / scales)).sum(-1), 0.0)
        inside = jnp.maximum((weights * _between(*self._edges())).sum(-1), SMALLEST)
        mass = cut + ndtr(-jnp.abs(w)) * inside

        def excess(s: Array) -> Array:
            return (weights * ndtr((s[..., None] - means) / scales)).sum(-1) - mass

        def halve(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bracket
            middle = 0.5 * (low + high)
            below = excess(middle) < 0
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        # The quantile of a mixture lies between the least and the greatest of its components'.
        normal = jnp.where(self.uniform, ndtri(jnp.clip(mass, SMALLEST, 1 - 1e-7)), -jnp.abs(w))
        quantiles = means + scales * normal[..., None]
        edge = jnp.where(self.uniform, EDGE, jnp.inf)
        low, high = (jnp.clip(q, -edge, edge) for q in (quantiles.min(-1), quantiles.max(-1)))
        low, high = jax.lax.fori_loop(0, 14, halve, (low, high))
        s = 0.5 * (low + high)
        for _ in range(2):
            density = (weights / scales * norm.pdf((s[..., None] - means) / scales)).sum(-1)
            s = jnp.clip(s - excess(s) / jnp.maximum(density, 1e-30), low, high)
        rank = jnp.clip(s / math.sqrt(12.0) + 0.5, 1e-7, 1 - 1e-7)
        return sign * jnp.where(self.uniform, ndtri(rank), s)


@jax.custom_jvp
def _between(a: Array, b: Array) -> Array:
    """`Φ(b) − Φ(a)` for `a ≤ b`, from the tails they are in."""
    tail_a, tail_b = ndtr(-jnp.abs(a)), ndtr(-jnp.abs(b))
    return jnp.where(a > 0, tail_a - tail_b, jnp.where(b < 0, tail_b - tail_a, 1.0 - tail_a - tail_b))


@_between.defjvp
def _between_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two densities; the slopes of all the branches above take five times as long."""
    (a, b), (da, db) = primals, tangents
    return _between(a, b), norm.pdf(b) * db - norm.pdf(a) * da
