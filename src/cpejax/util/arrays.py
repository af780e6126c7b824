"""Weights, rows and random keys in the form in which a loop of training is compiled to few fast operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

LARGE = 8192
"""Number of weights from which on an array is updated separately."""
GATHERED = 10
"""Maximum number of batches whose rows are put together at once; in a step, all that reads them would gather again."""
LONGEST = 10.0
"""Length to which a longer gradient is scaled."""


Weights = list[Float[Array, "..."]]
Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Packing:
    """How a flow's weights are held for training: large arrays separately, and all small ones as one vector.

    A step is then few operations, and none copies many values.
    """

    structure: Any
    large: tuple[bool, ...]
    unravel: Callable[[Array], list[Array]]

    @classmethod
    def of(cls, tree: Any) -> tuple[Weights, Packing]:
        """The weights of a tree, and how they are held."""
        leaves, structure = jax.tree.flatten(tree)
        large = tuple(x.size >= LARGE for x in leaves)
        vector, unravel = ravel_pytree([x for x, alone in zip(leaves, large, strict=True) if not alone])
        return [*(x for x, alone in zip(leaves, large, strict=True) if alone), vector], cls(structure, large, unravel)

    def tree(self, weights: Weights) -> Any:
        """The tree with these weights."""
        alone, together = iter(weights[:-1]), iter(self.unravel(weights[-1]))
        return jax.tree.unflatten(self.structure, [next(alone if large else together) for large in self.large])


def scan_batches(
    step: Callable[[Carry, tuple[Any, Array]], tuple[Carry, Array]],
    carry: Carry,
    rows: Any,
    order: Int[Array, "batches batch"],
    keys: Key[Array, " batches"],
) -> tuple[Carry, Array]:
    """`jax.lax.scan` of a step over batches of `rows`, in this `order`, and the `keys` of each."""
    at_once = max(k for k in range(1, GATHERED + 1) if len(order) % k == 0)

    def several(carry: Carry, x: tuple[Array, Array]) -> tuple[Carry, Array]:
        which, keys = x
        return jax.lax.scan(step, carry, (jax.tree.map(lambda r: r[which], rows), keys))

    return jax.lax.scan(several, carry, jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), (order, keys)))


def clip(gradient: Weights, _: Any = None) -> Weights:
    """The gradient, no longer than `LONGEST`.

    By a factor, which unlike `optax.clip_by_global_norm` is no pass of its own.
    """
    length = jnp.sqrt(jnp.stack([jnp.sum(x**2) for x in gradient]).sum())
    return [x * jnp.minimum(1.0, LONGEST / jnp.maximum(length, 1e-9)) for x in gradient]


def fast_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """A key of a counter-based generator, which on a CPU is fast inside of loops, seeded by a key of the usual one."""
    words = jax.random.bits(key, (4,), jnp.uint32)
    return jax.random.wrap_key_data(words, impl="rbg")


@jax.jit  # one call, not one for each array
def copy(tree: Any) -> Any:
    """A copy without weak types: the state of the first epoch must look like that of all others, to compile once."""
    return jax.tree.map(lambda x: jnp.array(x, x.dtype, copy=True), tree)
