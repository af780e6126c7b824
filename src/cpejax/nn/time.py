"""Features of time."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.nn import silu
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.standardise import Fixed
from cpejax.nn.linear import on_rows


class Fourier(Fixed):
    """Sines and cosines of random frequencies, which are not trained."""

    values: Float[Array, "*nodes f"]

    def __call__(self, t: Float[Array, " t"]) -> Float[Array, "*nodes t features"]:
        angles = 2 * jnp.pi * t[:, None] * self.values[..., None, :]
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class TimeFeatures(eqx.Module):
    """Random Fourier features of time, and a two-layer network on them (paper, appendix C)."""

    frequencies: Fourier
    mlp: eqx.nn.MLP

    def __init__(self, width: int, features: int = 64, *, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.frequencies = Fourier(jax.random.normal(first, (features // 2,)))
        self.mlp = eqx.nn.MLP(features, width, width, 1, silu, key=second)

    def __call__(self, t: Float[Array, " n"]) -> Float[Array, "n width"]:
        return on_rows(self.mlp, self.frequencies(t))
