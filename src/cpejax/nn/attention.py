"""The network of AIO: a transformer over tokens, one for each scalar of a program (Gloeckler et al. 2024)."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import silu
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from cpejax.nn.linear import on_rows
from cpejax.nn.time import TimeFeatures

Tokens = Float[Array, "n t w"]


def _map(layer: eqx.nn.Linear | eqx.nn.LayerNorm, x: Tokens) -> Array:
    return on_rows(layer, x) if isinstance(layer, eqx.nn.Linear) else jax.vmap(jax.vmap(layer))(x)


class Block(eqx.Module):
    """Time, then attention, then a network of one hidden layer, each added to the tokens after they are normalised.

    Time is added before the tokens read one another, so that whom they attend to depends on it too.
    """

    time: eqx.nn.Linear
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    wide: eqx.nn.Linear
    narrow: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, widening: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 7)
        self.heads = heads
        self.time = eqx.nn.Linear(64, width, key=keys[0])
        self.norms = (eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width))
        self.query, self.key, self.value, self.out = (eqx.nn.Linear(width, width, key=k) for k in keys[1:5])
        self.wide = eqx.nn.Linear(width, widening * width, key=keys[5])
        self.narrow = eqx.nn.Linear(widening * width, width, key=keys[6])

    def _heads(self, layer: eqx.nn.Linear, x: Tokens) -> Float[Array, "n t heads size"]:
        return _map(layer, x).reshape(*x.shape[:2], self.heads, -1)

    def _read(self, x: Tokens, others: list[Array], mask: Bool[Array, "#n t s"]) -> Array:
        """What tokens read of others; `mask[t, s]` says whether t reads s. Others may be one row for all `n`."""
        query = self._heads(self.query, x) / math.sqrt(x.shape[-1] / self.heads)
        same = ["nthd,shd->nhts", "nhts,shd->nthd"]
        own = ["nthd,nshd->nhts", "nhts,nshd->nthd"]
        scores, values = [], []
        for other in others:
            shared = len(other) == 1 and len(x) > 1
            key, value = (self._heads(layer, other) for layer in (self.key, self.value))
            key, value = (key[0], value[0]) if shared else (key, value)
            scores.append(jnp.einsum((same if shared else own)[0], query, key))
            values.append(((same if shared else own)[1], value))
        joined = jnp.concatenate(scores, axis=-1)
        weights = jax.nn.softmax(jnp.where(mask[:, None], joined, -1e9), axis=-1)
        total, start = jnp.zeros_like(query), 0
        for form, value in values:
            size = value.shape[-3]
            total = total + jnp.einsum(form, weights[..., start : start + size], value)
            start += size
        return _map(self.out, total.reshape(x.shape))

    def __call__(
        self,
        known: Float[Array, "m k w"],
        unknown: Float[Array, "n u w"],
        time: Float[Array, "b 64"],
        mask_known: Bool[Array, "1 k k"],
        mask: Bool[Array, "#n u k+u"],
    ) -> tuple[Array, Array]:
        added = jax.vmap(self.time)(time)[:, None]
        known, unknown = known + added[: len(known)], unknown + added
        first, second = _map(self.norms[0], known), _map(self.norms[0], unknown)
        unknown = unknown + self._read(second, [first, second] if first.shape[1] else [second], mask)
        if first.shape[1]:
            known = known + self._read(first, [first], mask_known)
        return self._widen(known), self._widen(unknown)

    def _widen(self, x: Array) -> Array:
        """The network on each token alone."""
        return x + _map(self.narrow, silu(_map(self.wide, _map(self.norms[1], x)))) if x.shape[1] else x


class Transformer(eqx.Module):
    """From tokens, made of a value, who it is, and whether it is given, to one scalar each.

    Tokens are in two groups: `known` ones, which read one another only and are the same for all `n` rows, so they are
    computed once; and the others, which read all that their mask allows. There may be no known ones.

    **Arguments:** `tokens`, how many there are; `value`, `name`, `condition`: the widths of the three embeddings;
    `layers`, `heads`, `widening`: of the blocks.
    """

    embed_value: eqx.nn.Linear
    names: Float[Array, "t name"]
    given: Float[Array, " condition"]
    time: TimeFeatures
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(
        self,
        tokens: int,
        *,
        value: int,
        name: int,
        condition: int,
        layers: int,
        heads: int,
        widening: int,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 5 + layers)
        width = value + name + condition
        self.embed_value = eqx.nn.Linear(1, value, key=keys[0])
        self.names = jax.random.normal(keys[1], (tokens, name))
        self.given = jax.random.normal(keys[2], (condition,))
        self.time = TimeFeatures(64, key=keys[3])
        self.blocks = [Block(width, heads, widening, key=k) for k in keys[5:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.out = eqx.nn.Linear(width, 1, key=keys[4])

    def tokens(self, scalars: Float[Array, "n t"], which: Array | np.ndarray, given: Bool[Array, "#n t"]) -> Tokens:
        """Tokens of scalars; `which` scalars they are, and whether each is given."""
        n, t = scalars.shape
        names = jnp.broadcast_to(self.names[which], (n, t, self.names.shape[1]))
        flags = jnp.broadcast_to(given[..., None] * self.given, (n, t, len(self.given)))
        return jnp.concatenate([_map(self.embed_value, scalars[..., None]), names, flags], axis=-1)

    def __call__(
        self,
        known: Float[Array, "m k w"],
        unknown: Float[Array, "n u w"],
        t: Float[Array, " b"],
        mask_known: Bool[Array, "1 k k"],
        mask: Bool[Array, "#n u k+u"],
    ) -> Float[Array, "n u"]:
        """`t`: one time for all rows, or one each, and then there must be no known tokens."""
        time = silu(self.time(t))
        for block in self.blocks:
            known, unknown = block(known, unknown, time, mask_known, mask)
        return _map(self.out, _map(self.norm, unknown))[..., 0]
