"""Linear layers and multilayer perceptrons on rows."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def on_rows(net: eqx.nn.Linear | eqx.nn.MLP, x: Float[Array, "*rows d"]) -> Float[Array, "*rows out"]:
    """A network on each row."""
    flat = jax.vmap(net)(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
    return flat.reshape(*x.shape[:-1], flat.shape[-1])


def split_columns(weight: Float[Array, "o i"], *sizes: int) -> tuple[Float[Array, "o _"], ...]:
    """A layer's weights for each part of its input; kept apart: gradients of slices are slow to put together."""
    return tuple(jnp.split(weight, np.cumsum(sizes)[:-1].tolist(), axis=1))


def dense(x: Float[Array, "k *rows i"], w: Float[Array, "k o i"]) -> Float[Array, "k *rows o"]:
    """The products of rows with weights of each node."""
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    return jnp.einsum("kri,koi->kro", flat, w).reshape(*x.shape[:-1], w.shape[1])
