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

from cpejax.nn.normal import add, between, between_by_tails, tail

SMALLEST = 1e-35
"""A probability that float32 can hold; beyond it `w` stays at ±12.3."""
EDGE = math.sqrt(3.0)
"""Where the standardised uniform distribution ends."""
FAR = 1e9
"""Where all others end."""
NARROWEST, WIDEST = -8.0, 3.0
"""Bounds of the logarithm of a scale. A single simulation cannot draw a component to a point; and no component is so
wide that float32 loses what part of it is inside the prior's edges."""
FURTHEST = 30.0
"""Bound of a mean where the prior has no edges."""
OUTSIDE = 8.0
"""Maximum number of its scales by which a component's mean is outside the prior's edges: some of its mass is inside."""
MOST_SCALES = 1e5
"""Bound of a mean in units of the common scale."""
OF_ALL = 2
"""Outputs of a network that all components have in common: a location and the logarithm of a scale."""
RANGE = 30.0
"""Bound of the logarithms of weights, before they are normalised."""
HALVINGS = 20
"""Of the bracket of a quantile, before Newton's method."""


def quantile(z: Array) -> Array:
    """The quantile of a standard normal coordinate, standardised: linear in a parameter whose prior is uniform."""
    return math.sqrt(12.0) * (ndtr(z) - 0.5)


def linear(z: Float[Array, "*rows"], uniform: Bool[Array, "..."]) -> Float[Array, "*rows"]:
    """What a mixture is a distribution of: a coordinate, or its quantile where the prior is uniform."""
    return jnp.where(uniform, quantile(z), z)


class Mixture(eqx.Module):
    """Distributions of a coordinate `z` by their functions `F`, and `w = Φ⁻¹(F(z))`, which makes them standard normal.

    One is a normal mixture of `z` or, where the prior is `uniform`, one of its quantile `s`, truncated at the prior's
    edges: there `s` is the user's own parameter up to scale, and what is linear in it is linear for the networks.
    The mixture's parameters have the shape `(components, *rows)`, and `uniform` one that fits to `(*rows)`. Components
    come first: sums over a short last axis are slow.
    """

    log_weights: Float[Array, "components *rows"]
    means: Float[Array, "components *rows"]
    log_scales: Float[Array, "components *rows"]
    uniform: Bool[Array, "..."]

    @classmethod
    def from_numbers(cls, x: Float[Array, "outputs *rows"], uniform: Bool[Array, "..."]) -> Mixture:
        """From a network's output, for zeros a mixture that covers N(0, 1).

        The output has a location and the logarithm of a scale, in which the components' own means and scales are given:
        a narrow distribution needs one precise output then, not one for each component. (Without these two, means
        and scales are those of the coordinate: so have flows of before.)

        Whatever the output is, if it is finite, the mixture is a distribution: its values are kept within bounds in
        which float32 resolves its density, its distribution function and the mass inside the prior's edges.
        """
        relative = len(x) % 3 == OF_ALL
        weights, means, log_scales = jnp.split(x[OF_ALL:] if relative else x, 3)
        if (components := len(means)) > 1:
            start = np.linspace(-1.5, 1.5, components, dtype=np.float32)
            means, log_scales = means + start.reshape(-1, *(1,) * (x.ndim - 1)), log_scales - 0.5
        if relative:
            location, log_scale = jnp.clip(x[:1], -FURTHEST, FURTHEST), jnp.clip(x[1:2], NARROWEST, WIDEST)
            means = location + jnp.exp(log_scale) * jnp.clip(means, -MOST_SCALES, MOST_SCALES)
            log_scales = log_scale + jnp.clip(log_scales, -RANGE, RANGE)
        weights, log_scales = jnp.clip(weights, -RANGE, RANGE), jnp.clip(log_scales, NARROWEST, WIDEST)
        # Mass beyond the edges is cut off; means stay near, so that not all of it is.
        furthest = jnp.where(uniform, jnp.minimum(2 * EDGE, EDGE + OUTSIDE * jnp.exp(log_scales)), FURTHEST)
        return cls(weights - logsumexp(weights, axis=0), jnp.clip(means, -furthest, furthest), log_scales, uniform)

    def _standardised(self, s: Array) -> Float[Array, "components *rows"]:
        return (s - self.means) * jnp.exp(-self.log_scales)

    def _edges(self) -> tuple[Array, Array]:
        """The prior's edges, standardised; far away where it has none."""
        edges = self._standardised(jnp.asarray(-EDGE)), self._standardised(jnp.asarray(EDGE))
        first, last = (jnp.where(self.uniform, x, sign * FAR) for x, sign in zip(edges, (-1, 1), strict=True))
        return first, last

    def log_density(self, z: Float[Array, "*rows"], s: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """`log F'(z)`; `s = linear(z, uniform)`."""
        log_f = logsumexp(self.log_weights - self.log_scales + norm.logpdf(self._standardised(s)), axis=0)
        inside = jnp.maximum((jnp.exp(self.log_weights) * between(*self._edges())).sum(0), SMALLEST)
        log_derivative = jnp.where(self.uniform, 0.5 * math.log(12.0) + norm.logpdf(z), 0.0)
        return log_f - jnp.log(inside) + log_derivative

    def log_mass(self, low: Float[Array, "*rows"], high: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """The logarithm of the mass between two coordinates, of a mixture that is not of a uniform prior."""
        a, b = (self._standardised(jnp.clip(x, -FAR, FAR)) for x in (low, high))
        mass = (jnp.exp(self.log_weights) * between(a, b)).sum(0)
        return jnp.log(jnp.maximum(mass, SMALLEST))

    def straighten(self, s: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """`Φ⁻¹(F(z))` from `s = linear(z, uniform)`, by whichever tail is smaller."""
        d, weights = self._standardised(s), jnp.exp(self.log_weights)
        first, last = self._edges()
        lower, upper = (weights * between(first, d)).sum(0), (weights * between(d, last)).sum(0)
        smaller = jnp.minimum(lower, upper) / jnp.maximum(lower + upper, SMALLEST)
        return jnp.where(lower < upper, 1.0, -1.0) * ndtri(jnp.maximum(smaller, SMALLEST))

    def bend(self, w: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """The inverse of `straighten`: bisection, then Newton's method inside what is left of the bracket."""
        # Mirrored where w > 0, so that the tail that is compared is always the small one.
        sign = jnp.where(w > 0, -1.0, 1.0)
        edge = jnp.where(self.uniform, EDGE, jnp.inf)
        weights, means, rates = jnp.exp(self.log_weights), sign * self.means, jnp.exp(-self.log_scales)
        first = jnp.where(self.uniform, (-EDGE - means) * rates, -FAR)
        tail_first = tail(first)

        def below(s: Array) -> Array:
            """The mass between the lower edge and `s`."""
            x = (s - means) * rates
            return add(weights * between_by_tails(first, tail_first, x, tail(x)))

        def density(s: Array) -> Array:
            return add(weights * rates * norm.pdf((s - means) * rates))

        inside = jnp.where(self.uniform, jnp.maximum(below(jnp.full_like(w, EDGE)), SMALLEST), 1.0)
        mass = tail(w) * inside

        def halve(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bracket
            middle = 0.5 * (low + high)
            left = below(middle) < mass
            return jnp.where(left, middle, low), jnp.where(left, high, middle)

        # The quantile of a mixture lies between the least and the greatest of its components'. That of a component
        # without its part below the edge is above the whole one's, and no lower than the edge.
        normal = -jnp.abs(w)
        quantiles = means + normal / rates
        low, high = quantiles.min(0), quantiles.max(0)
        low, high = jnp.where(self.uniform, -EDGE, low), jnp.where(self.uniform, EDGE, high)
        low, high = jax.lax.fori_loop(0, HALVINGS, halve, (low, high))

        def improve(_: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            low, high, s = state
            excess = below(s) - mass
            low, high = jnp.where(excess < 0, s, low), jnp.where(excess < 0, high, s)
            newton = s - excess / jnp.maximum(density(s), 1e-30)
            return low, high, jnp.where((newton > low) & (newton < high), newton, 0.5 * (low + high))

        *_, s = jax.lax.fori_loop(0, 5, improve, (low, high, 0.5 * (low + high)))
        rank = jnp.clip(s / math.sqrt(12.0) + 0.5, 1e-7, 1 - 1e-7)
        return sign * jnp.where(self.uniform, ndtri(rank), jnp.clip(s, -edge, edge))
