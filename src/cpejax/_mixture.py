"""One-dimensional normal mixtures as monotone maps."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp, ndtr, ndtri
from jax.scipy.stats import norm
from jaxtyping import Array, Float


class Mixture(eqx.Module):
    """Normal mixtures with distribution functions `F`, and the map `w = Φ⁻¹(F(z))` that makes them standard normal.

    All fields have the shape `(*rows, components)`.
    """

    log_weights: Float[Array, "*rows components"]
    means: Float[Array, "*rows components"]
    log_scales: Float[Array, "*rows components"]

    @classmethod
    def from_numbers(cls, x: Float[Array, "*rows three_components"]) -> Mixture:
        """From a network's output. Scales are at least e⁻⁸, so that no single simulation can draw one to zero."""
        weights, means, log_scales = jnp.split(x, 3, axis=-1)
        return cls(jax.nn.log_softmax(weights, axis=-1), means, jnp.maximum(log_scales, -8.0))

    @staticmethod
    def initial(components: int) -> Float[Array, " three_components"]:
        """The numbers of a mixture that covers N(0, 1)."""
        means = jnp.linspace(-1.5, 1.5, components) if components > 1 else jnp.zeros(1)
        scales = jnp.full(components, -0.5 if components > 1 else 0.0)
        return jnp.concatenate([jnp.zeros(components), means, scales])

    def _standardised(self, z: Float[Array, "*rows"]) -> Float[Array, "*rows components"]:
        return (z[..., None] - self.means) * jnp.exp(-self.log_scales)

    def log_density(self, z: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """`log F'(z)`."""
        return logsumexp(self.log_weights - self.log_scales + norm.logpdf(self._standardised(z)), axis=-1)

    def straighten(self, z: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """`Φ⁻¹(F(z))`, from whichever tail is smaller."""
        d = self._standardised(z)
        weights = jnp.exp(self.log_weights)
        lower, upper = (weights * ndtr(d)).sum(-1), (weights * ndtr(-d)).sum(-1)
        smallest = 1e-35  # what float32 can hold; beyond it w stays at ±12.3
        return jnp.where(lower < upper, ndtri(jnp.maximum(lower, smallest)), -ndtri(jnp.maximum(upper, smallest)))

    def bend(self, w: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """The inverse of `straighten`: bisection, then two steps of Newton's method."""
        # Mirrored where w > 0, so that the tail that is compared is always the small one.
        sign = jnp.where(w > 0, -1.0, 1.0)
        tail = ndtr(-jnp.abs(w))
        weights, scales = jnp.exp(self.log_weights), jnp.exp(self.log_scales)
        means = sign[..., None] * self.means

        def excess(z: Array) -> Array:
            return (weights * ndtr((z[..., None] - means) / scales)).sum(-1) - tail

        def halve(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bracket
            middle = 0.5 * (low + high)
            below = excess(middle) < 0
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        # The quantile of a mixture lies between the least and the greatest of its components'.
        quantiles = means + scales * (-jnp.abs(w))[..., None]
        low, high = jax.lax.fori_loop(0, 14, halve, (quantiles.min(-1), quantiles.max(-1)))
        z = 0.5 * (low + high)
        for _ in range(2):
            density = (weights / scales * norm.pdf((z[..., None] - means) / scales)).sum(-1)
            z = jnp.clip(z - excess(z) / jnp.maximum(density, 1e-30), low, high)
        return sign * z
