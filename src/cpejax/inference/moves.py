"""Moves of all draws at once that leave a target unchanged: differential evolution (ter Braak 2006).

A draw is moved by a multiple of the difference of two others, plus a little noise, and the move is accepted as by
Metropolis. Differences have the scale and the correlation of the target, without gradients or tuning, and those between
modes lead from one mode to another. The draws are in two halves; a half moves by differences of the other, which
stands still, so that each move is an exact Metropolis step given the other half.
"""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from cpejax.inference.target import Target

SWEEPS = 5
"""Moves of each draw in a block, after which it is seen whether more are needed."""
LEAST_FACTOR = 0.02
"""The least multiple of a difference."""
JUMPS = 0.1
"""The share of moves by a whole difference, which leads from mode to mode."""
NOISE = 1e-3
"""The noise of a move, in standard deviations of the draws: without it draws would stay in the span of the others."""


State = tuple[Float[Array, "n d"], Float[Array, " n"], Float[Array, " n"]]
"""Draws, their log-densities under the prior, and their log-likelihoods."""


@eqx.filter_jit
def moves(
    target: Target, state: State, power: Float[Array, ""], key: PRNGKeyArray, chunk: int
) -> tuple[State, Bool[Array, " n"], Float[Array, ""]]:
    """`SWEEPS` moves of each of an even number of draws, which leave prior × likelihood^power unchanged.

    **Returns:** the draws after them, which of them have moved at all, and the share of moves that was accepted.
    `chunk`: of how many draws densities are evaluated at once.
    """
    n, d = state[0].shape
    half = n // 2

    def log_target(prior: Array, likelihood: Array) -> Array:
        found = prior + power * likelihood
        return jnp.where(jnp.isnan(found), -jnp.inf, found)

    def move(halves: tuple[Any, Any], key: PRNGKeyArray) -> tuple[tuple[Any, Any], Array]:
        """Move the first half by differences of the second; then it is the second's turn."""
        moving, other = halves
        keys = jax.random.split(key, 5)
        first = jax.random.randint(keys[0], (half,), 0, half)
        second = (first + jax.random.randint(keys[1], (half,), 1, half)) % half
        steps = factors(keys[2], half, d)[:, None] * (other[0][first] - other[0][second])
        new = moving[0] + steps + NOISE * other[0].std(0) * jax.random.normal(keys[3], (half, d))
        proposed = (new, *in_chunks(target, new, chunk), jnp.ones(half, bool))
        gain = log_target(*proposed[1:3]) - log_target(*moving[1:3])
        accept = jnp.log(jax.random.uniform(keys[4], (half,))) < gain
        moved = jax.tree.map(lambda a, b: jnp.where(accept.reshape(-1, *[1] * (a.ndim - 1)), a, b), proposed, moving)
        return (other, moved), accept.mean()

    whole = (*state, jnp.zeros(n, bool))
    start = jax.tree.map(lambda x: x[:half], whole), jax.tree.map(lambda x: x[half:], whole)
    (a, b), rates = jax.lax.scan(move, start, jax.random.split(key, 2 * SWEEPS))
    *done, moved = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), a, b)
    return tuple(done), moved, rates.mean()


def factors(key: PRNGKeyArray, n: int, d: int) -> Float[Array, " n"]:
    """The multiples of differences of `n` moves in `d` dimensions.

    Three in five are `2.38 / sqrt(2 d)`, the best for a normal distribution, three in ten log-uniform below it, for
    what is narrow or curved, and `JUMPS` of all are 1.
    """
    best = 2.38 / math.sqrt(2 * d)
    kind, size = jax.random.uniform(key, (2, n))
    small = jnp.exp(math.log(LEAST_FACTOR) + size * math.log(best / LEAST_FACTOR))
    return jnp.where(kind < JUMPS, 1.0, jnp.where(kind < JUMPS + 0.6, best, small))


def in_chunks(target: Target, z: Float[Array, "n d"], chunk: int) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Log-densities under the prior and log-likelihoods, `chunk` at a time."""
    n = len(z)
    pieces = -(-n // chunk)
    if pieces == 1:
        return target(z)
    size = -(-n // pieces)
    filled = z[jnp.arange(pieces * size) % n].reshape(pieces, size, -1)
    return jax.tree.map(lambda x: x.reshape(-1)[:n], jax.lax.map(target, filled))
