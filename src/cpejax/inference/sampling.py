"""Draws of any flow: in chunks that bound memory, on all cores, inside the prior's support."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from cpejax.coordinates.prior import Coordinates, Values
from cpejax.flows.base import Flow
from cpejax.util.cores import cores, on_cores

MOST_NUMBERS = 30_000_000
"""How many values sampling holds at once on a core; more draws than that allows go in chunks."""
SHARE = 5000
"""More draws than that for one observation are shared among the cores."""


def check_options(declared: Callable[..., dict[str, Any]], asked: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The options of draws or densities, from what a user asks for; `None` is the default.

    `declared`: `draw_options` or `density_options` of a flow.
    """
    known = list(inspect.signature(declared).parameters)
    for name, value in asked.items():
        if name not in known:
            has = f"its options are {known}" if known else "it has none"
            raise TypeError(f"{name}={value!r} is no option of {what} of this posterior: {has}.")
    return declared(**{name: value for name, value in asked.items() if value is not None})


def draw_on_cores(
    flow: Flow, data: Values, keys: Array, n: int, options: Mapping[str, Any], chunk: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`_draw` on all cores at once: shares of many observations, or of the draws for one.

    The latter are of at most `SHARE` draws, whatever the number of cores, so that a key means the same draws anywhere.
    """
    if len(keys) == 1:
        shares, axis = -(-n // SHARE), 1
        size = -(-n // shares)
        each = [(data, key[None]) for key in (jax.random.split(keys[0], shares) if shares > 1 else keys)]
    else:
        shares, axis, size = min(cores(), len(keys)), 0, n
        which = np.arange(shares * -(-len(keys) // shares)).reshape(shares, -1) % len(keys)  # the last is filled
        each = [({name: x[w] for name, x in data.items()}, keys[w]) for w in which]
    done = on_cores(_compiled_draw, [(flow, data, keys, size, options, chunk) for data, keys in each])
    last = len(keys), n
    values = {name: np.concatenate([v[name] for v, _ in done], axis)[: last[0], : last[1]] for name in done[0][0]}
    counted = {
        name: np.concatenate([np.asarray(c[name]).reshape(len(c[name]), -1) for _, c in done], axis)[: last[0]]
        for name in done[0][1]
    }
    return values, counted


def _draw(
    flow: Flow, data: Values, keys: Array, n: int, options: Mapping[str, Any], chunk: int
) -> tuple[Values, dict[str, Array]]:
    """Draws for each observation, `(observations, n, ...)`, in chunks that bound memory."""
    pieces = -(-n // chunk)
    size = -(-n // pieces)

    def draw(data: Values, n: int, key: Array) -> tuple[Values, dict[str, Array]]:
        def propose(n: int, key: Array) -> tuple[Values, dict[str, Array]]:
            return flow.sample(data, n, key, **options)

        return _reject(propose, flow.coordinates, data, n, key, chunk) if flow.may_leave_support else propose(n, key)

    def one(x: tuple[Values, Array]) -> tuple[Values, dict[str, Array]]:
        data, key = x
        if pieces == 1:
            return draw(data, n, key)
        part = jax.lax.map(lambda k: draw(data, size, k), jax.random.split(key, pieces))
        return jax.tree.map(lambda v: v.reshape(pieces * size, *v.shape[2:])[:n], part[0]), part[1]

    if len(keys) == 1:
        out = one(({name: x[0] for name, x in data.items()}, keys[0]))
        return jax.tree.map(lambda v: v[None], out)
    # A remainder would be a second copy of the whole program, to be compiled: the last batch is filled instead.
    batches = -(-len(keys) // max(1, min(len(keys), chunk // (4 * n))))
    batch = -(-len(keys) // batches)
    filled = jax.tree.map(lambda v: v[jnp.arange(batches * batch) % len(keys)], (data, keys))
    return jax.tree.map(lambda v: v[: len(keys)], jax.lax.map(one, filled, batch_size=batch))


_compiled_draw = eqx.filter_jit(_draw)


def _reject(
    propose: Callable[[int, Array], tuple[Values, dict[str, Array]]],
    coordinates: Coordinates,
    data: Values,
    n: int,
    key: Array,
    most: int,
) -> tuple[Values, dict[str, Array]]:
    """The first `n` proposals inside the prior's support.

    There are as many proposals at a time as an eighth of `n` (128 if that is more, but never more than `most`), until
    there are enough: one shape, compiled once. `missing` counts the draws that are not there, once less than 1 % of
    many proposals is accepted.
    """
    size = min(most, max(-(-n // 8), 128))

    def inside(drawn: Values) -> Array:
        finite = [jnp.isfinite(x).reshape(len(x), -1).all(1) for x in drawn.values()]
        return jnp.all(jnp.stack([*finite, jax.vmap(lambda v: coordinates.in_support({**v, **data}))(drawn)]), axis=0)

    def unfinished(state: tuple) -> Array:
        _, _, counts, _ = state
        hopeless = (counts["proposed"] >= 10_000) & (counts["accepted"] < 0.01 * counts["proposed"])
        return (counts["accepted"] < n) & ~hopeless

    def step(state: tuple) -> tuple:
        i, drawn, counts, others = state
        new, counted = propose(size, jax.random.fold_in(key, i))
        good = inside(new)
        # Behind those that are there already; what is not accepted, or too much, goes nowhere.
        to = jnp.where(good, counts["accepted"] + jnp.cumsum(good) - 1, n)
        drawn = {name: x.at[to].set(new[name], mode="drop") for name, x in drawn.items()}
        counts = {"accepted": counts["accepted"] + good.sum(dtype=jnp.int32), "proposed": counts["proposed"] + size}
        return i + 1, drawn, counts, jax.tree.map(_combine, others, counted)

    shapes, counted = jax.eval_shape(lambda: propose(size, key))
    drawn = {name: jnp.zeros((n, *x.shape[1:]), x.dtype) for name, x in shapes.items()}
    counts = {"accepted": jnp.zeros((), jnp.int32), "proposed": jnp.zeros((), jnp.int32)}
    others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counted)
    _, drawn, counts, others = jax.lax.while_loop(unfinished, step, (0, drawn, counts, others))
    return drawn, others | counts | {"missing": jnp.maximum(n - counts["accepted"], 0)}


def _combine(a: Array, b: Array) -> Array:
    """Whole numbers are counts; others are the worst of something."""
    return a + b if jnp.issubdtype(a.dtype, jnp.integer) else jnp.maximum(a, b)
