"""Linear layers and multilayer perceptrons on rows."""

from __future__ import annotations

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from cpejax.nn.activations import silu

FEW = 4
"""Maximum number of inputs or outputs of a layer that is written as a sum, which a compiler joins with what comes
before and after it."""


@jax.custom_jvp
def weigh(x: Float[Array, "*rows d"], weight: Float[Array, "out d"]) -> Float[Array, "*rows out"]:
    """`x @ weight.T`, from a copy of the weights that is transposed.

    A CPU reads that faster than weights whose columns are far apart; the gradient by `x` reads the weights themselves.
    """
    return x @ jax.lax.optimization_barrier(weight.T)


@functools.partial(weigh.defjvp, symbolic_zeros=True)
def _weigh_tangent(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Any]:
    x, weight = primals
    dx, dweight = (None if isinstance(t, SymbolicZero) else t for t in tangents)
    parts = [*([] if dx is None else [dx @ weight.T]), *([] if dweight is None else [x @ dweight.T])]
    return weigh(x, weight), sum(parts)


def on_rows(net: eqx.nn.Linear | eqx.nn.MLP, x: Float[Array, "*rows d"]) -> Float[Array, "*rows out"]:
    """A layer, or layers with `silu`, on each row; `jax.vmap` would compute products and transpose them."""
    if isinstance(net, eqx.nn.Linear):
        out, size = net.weight.shape
        if size <= FEW:
            x = sum((x[..., i : i + 1] * net.weight[:, i] for i in range(1, size)), x[..., :1] * net.weight[:, 0])
        elif out <= FEW:
            x = jnp.stack([jnp.sum(x * row, axis=-1) for row in net.weight], axis=-1)
        else:
            x = weigh(x, net.weight)
        return x if net.bias is None else x + net.bias
    *hidden, last = net.layers
    for layer in hidden:
        x = silu(on_rows(layer, x))
    return net.final_activation(on_rows(last, x))


def split_columns(weight: Float[Array, "o i"], *sizes: int) -> tuple[Float[Array, "o _"], ...]:
    """A layer's weights for each part of its input; kept apart: gradients of slices are slow to put together."""
    return tuple(jnp.split(weight, np.cumsum(sizes)[:-1].tolist(), axis=1))


def dense(x: Float[Array, "k *rows i"], w: Float[Array, "k o i"]) -> Float[Array, "k *rows o"]:
    """The products of rows with weights of each node."""
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    return jnp.einsum("kri,koi->kro", flat, w).reshape(*x.shape[:-1], w.shape[1])


def outer(x: Float[Array, "k *rows"], w: Float[Array, "k o"]) -> Float[Array, "k *rows o"]:
    """`dense` of single values; as a product, whose derivative is then one too, and not a slow sum."""
    return jnp.einsum("kr,ko->kro", x.reshape(len(x), -1), w).reshape(*x.shape, -1)
