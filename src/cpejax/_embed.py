"""From values to what networks read: robust standardisation, and embeddings for data sites."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, PRNGKeyArray


@jax.custom_jvp
def silu(x: Array) -> Array:
    """`x σ(x)`, by `tanh`, which takes a CPU two thirds of the time of `jax.nn.silu`'s exponential and division."""
    half = 0.5 * x
    return half + half * jnp.tanh(half)


@silu.defjvp
def _silu_tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """As one factor, which is compiled with what comes before; a last factor of ½ would be a slow part of sums."""
    (x,), (dx,) = primals, tangents
    half = 0.5 * x
    tanh = jnp.tanh(half)
    return half + half * tanh, dx * (0.5 * (1 + tanh) + 0.5 * half * (1 - tanh**2))


def softsign_linear(x: Array) -> Array:
    """`x (1 + softsign(x)) / 2`, as `silu` is with the tanh of half of x.

    Alike near zero, but slower to close, and a CPU takes half of its time.
    """
    half = 0.5 * x
    return half + half * x / (1.0 + jnp.abs(x))


class Fixed(eqx.Module):
    """A module whose arrays are set by the simulations, not trained."""


class Standardise(Fixed):
    """Columns to numbers of order one, whatever their scale and tails.

    Each column is centred by its median and scaled by its interquartile range, and clipped at ±15. Where the
    simulations themselves go beyond ±10 (heavy tails, scales over decades), a second feature is added: the normal score
    of the empirical quantile, which keeps the ranks that the clipping loses, up to the largest simulated value.
    """

    centre: Float[Array, " d"]
    scale: Float[Array, " d"]
    knots: Float[Array, "heavy q"]  # quantiles, in units of `scale`; not centred, so that small numbers stay apart
    scores: Float[Array, " q"]
    heavy: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, rows: np.ndarray, heavy: Sequence[int] | None = None):
        """`rows`: simulated values, `(n, d)`. `heavy`: which columns are heavy-tailed, if that is known already."""
        rows = np.asarray(rows, np.float64)
        low, centre, high = np.quantile(rows, [0.25, 0.5, 0.75], axis=0)
        scale = (high - low) / 1.349
        scale = np.where(scale > 0, scale, rows.std(0))
        scale = np.where(scale > 0, scale, 1.0)
        furthest = np.abs((rows - centre) / scale).max(0)
        self.heavy = tuple(int(i) for i in (np.flatnonzero(furthest > 10) if heavy is None else heavy))
        last = NormalDist().inv_cdf(1 - 0.5 / len(rows))
        scores = np.linspace(-last, last, 129)
        p = [NormalDist().cdf(score) for score in scores]
        which = list(self.heavy)
        self.knots = jnp.asarray((np.quantile(rows[:, which], p, axis=0) / scale[which]).T, jnp.float32)
        self.scores = jnp.asarray(scores, jnp.float32)
        self.centre, self.scale = jnp.asarray(centre, jnp.float32), jnp.asarray(scale, jnp.float32)

    @property
    def size(self) -> int:
        """How many features the columns become."""
        return len(self.centre) + len(self.heavy)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch f"]:
        """All features: the clipped columns, then the scores of the heavy ones."""
        return jnp.concatenate([self._linear(x), self._scores(x)], axis=-1) if self.heavy else self._linear(x)

    def one_each(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """One number a column, for embeddings that know the value's shape: the score where the column is heavy."""
        linear = self._linear(x)
        return linear.at[..., list(self.heavy)].set(self._scores(x)) if self.heavy else linear

    def _linear(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return jnp.clip((x - self.centre) / self.scale, -15.0, 15.0)

    def _scores(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch heavy"]:
        which = list(self.heavy)
        scaled = x[..., which] / self.scale[jnp.asarray(which)]
        return jax.vmap(jnp.interp, in_axes=(-1, 0, None), out_axes=-1)(scaled, self.knots, self.scores)


FEW = 4
"""From or to so few numbers, a layer is a sum, which a compiler joins with what comes before and after it."""


@jax.custom_jvp
def weigh(x: Float[Array, "*rows d"], weight: Float[Array, "out d"]) -> Float[Array, "*rows out"]:
    """`x @ weight.T`, from a copy of the weights that is turned round.

    A CPU reads that faster than weights whose columns are far apart; the slope by `x` reads the weights themselves.
    """
    return x @ jax.lax.optimization_barrier(weight.T)


@functools.partial(weigh.defjvp, symbolic_zeros=True)
def _weigh_tangent(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Any]:
    x, weight = primals
    dx, dweight = (None if isinstance(t, SymbolicZero) else t for t in tangents)
    parts = [*([] if dx is None else [dx @ weight.T]), *([] if dweight is None else [x @ dweight.T])]
    return weigh(x, weight), sum(parts)


def on_rows(net: eqx.nn.Linear | eqx.nn.MLP, x: Float[Array, "*rows d"]) -> Float[Array, "*rows out"]:
    """A layer, or layers with `silu`, on each row; `jax.vmap` would compute, and turn round, transposed products."""
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
    """A layer's weights for each part of its input; kept apart, because slopes of slices are slow to put together."""
    return tuple(jnp.split(weight, np.cumsum(sizes)[:-1].tolist(), axis=1))


class Fourier(Fixed):
    """Random frequencies, which are not trained."""

    values: Float[Array, "*nodes f"]


class TimeFeatures(eqx.Module):
    """Random Fourier features of time, and a two-layer network on them (paper, appendix C)."""

    frequencies: Fourier
    mlp: eqx.nn.MLP

    def __init__(self, width: int, features: int = 64, *, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.frequencies = Fourier(jax.random.normal(first, (features // 2,)))
        self.mlp = eqx.nn.MLP(features, width, width, 1, silu, key=second)

    def __call__(self, t: Float[Array, " n"]) -> Float[Array, "n width"]:
        angles = 2 * jnp.pi * t[:, None] * self.frequencies.values[None, :]
        return on_rows(self.mlp, jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))


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
