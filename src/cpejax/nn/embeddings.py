"""Embeddings of data sites: from one member's value to a vector of features."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import silu
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.nn.linear import on_rows


class MLPEmbedding(eqx.Module):
    """A multilayer perceptron on the flattened value of a data site.

    **Arguments:** `shape`, one member's value; `out`, the number of features; `width`, `depth`, the hidden layers.
    """

    mlp: eqx.nn.MLP

    def __init__(self, shape: tuple[int, ...], out: int = 32, width: int = 128, depth: int = 2, *, key: PRNGKeyArray):
        self.mlp = eqx.nn.MLP(int(np.prod(shape)), out, width, depth, silu, key=key)

    def __call__(self, x: Array) -> Float[Array, " out"]:
        return on_rows(self.mlp, x.reshape(-1))


class SetEmbedding(eqx.Module):
    """The rows of a value as a set: a network on each row, the mean, and a network on it. Order does not matter."""

    each: eqx.nn.MLP
    whole: eqx.nn.MLP

    def __init__(self, shape: tuple[int, ...], out: int = 32, width: int = 64, depth: int = 2, *, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        row = int(np.prod(shape[1:]))
        self.each = eqx.nn.MLP(row, width, width, depth, silu, key=first)
        self.whole = eqx.nn.MLP(width, out, width, 1, silu, key=second)

    def __call__(self, x: Array) -> Float[Array, " out"]:
        rows = x.reshape(x.shape[0], -1)
        return on_rows(self.whole, on_rows(self.each, rows).mean(0))


class ConvEmbedding(eqx.Module):
    """Convolutions over a series or an image, with the channels last, then the mean and the maximum over positions.

    **Arguments:**

    - `shape`: of one member's value: `(length,)`, `(length, channels)`, `(height, width)` or
        `(height, width, channels)`.
    - `out`: the number of features; `width`: the channels of each of the `depth` layers.
    - `dims`: how many of the first axes are convolved over, 1 for a series and 2 for an image; all others are channels.
        It may be left out for `(length,)` only: `(16, 16)` may be an image, or a series of 16 steps with 16 channels.

    Windows are of 5 steps, or of 3 × 3 pixels; a layer has stride 2 while that leaves at least 4 positions an axis.
    """

    layers: list[eqx.nn.Conv]
    out: eqx.nn.Linear
    dims: int = eqx.field(static=True)

    def __init__(
        self,
        shape: tuple[int, ...],
        out: int = 32,
        width: int = 32,
        depth: int = 3,
        *,
        dims: int | None = None,
        key: PRNGKeyArray,
    ):
        if dims is None and len(shape) > 1:
            channels = f"{int(np.prod(shape[1:]))} channels"
            image = f"an image of {shape[0]} × {shape[1]}"
            raise ValueError(
                f"ConvEmbedding({shape}): say whether that is a series of {shape[0]} steps with {channels} (dims=1) or "
                f"{image}{f' with {int(np.prod(shape[2:]))} channels' if shape[2:] else ''} (dims=2)."
            )
        dims = 1 if dims is None else dims
        if dims not in (1, 2) or len(shape) < dims:
            raise ValueError(
                f"dims must be 1 (a series) or 2 (an image), and no more than there are axes; found dims={dims!r} for "
                f"a value of shape {shape}."
            )
        self.dims = dims
        keys = jax.random.split(key, depth + 1)
        channels_of = [int(np.prod(shape[dims:]))] + [width] * depth
        window = 5 if dims == 1 else 3
        self.layers = [
            eqx.nn.Conv(
                dims, a, b, window, stride=2 if min(shape[:dims]) >= 8 * 2**i else 1, padding=window // 2, key=k
            )
            for i, (a, b, k) in enumerate(zip(channels_of[:-1], channels_of[1:], keys[:-1], strict=True))
        ]
        self.out = eqx.nn.Linear(2 * width, out, key=keys[-1])

    def __call__(self, x: Array) -> Float[Array, " out"]:
        h = jnp.moveaxis(x.reshape(*x.shape[: self.dims], -1), -1, 0)
        for layer in self.layers:
            h = silu(layer(h))
        h = h.reshape(len(h), -1)
        return self.out(jnp.concatenate([h.mean(1), h.max(1)]))


class RecurrentEmbedding(eqx.Module):
    """A gated recurrent unit over the first axis (time); the last state."""

    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, shape: tuple[int, ...], out: int = 32, width: int = 64, *, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(int(np.prod(shape[1:])), width, key=first)
        self.out = eqx.nn.Linear(width, out, key=second)

    def __call__(self, x: Array) -> Float[Array, " out"]:
        rows = x.reshape(x.shape[0], -1)
        state, _ = jax.lax.scan(lambda h, row: (self.cell(row, h), None), jnp.zeros(self.cell.hidden_size), rows)
        return self.out(state)


Embedding = Callable[[Array], Array]
