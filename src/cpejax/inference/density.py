"""Densities of draws of any flow, in chunks that bound memory, on all cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cpejax.coordinates.prior import Values
from cpejax.flows.base import Flow
from cpejax.util.cores import cores, on_cores


def check_density(found: Float[np.ndarray, "*draws"]) -> None:
    """Raise an error where a log-density is neither finite nor −∞, which says that a draw is outside the support."""
    bad = np.isnan(found) | np.isposinf(found)
    if bad.any():
        first = np.argwhere(bad)[0].tolist()
        raise FloatingPointError(
            f"The log-density of {bad.sum()} of {bad.size} draws is not a number that float32 holds, the first of them "
            f"at {first}, though they are in the prior's support. They may be far from all simulations (compare them "
            "with draws of `sample`), or training went wrong: look at posterior.history, and fit again with more "
            "simulations or a lower learning_rate."
        )


def check_exact(error: Float[np.ndarray, "..."]) -> None:
    """Weights need densities without error."""
    if error.any():
        raise ValueError(
            "The density of this posterior is estimated with an error (in more than 32 dimensions), so its draws have "
            "no weights and cannot be refined. Fit with cpe.CPE(), whose density is exact."
        )


def _densities(
    flow: Flow, values: Values, data: Values, options: Mapping[str, Any], chunk: int
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The log-density of draws and its standard error, in chunks that bound memory."""
    n = len(next(iter(values.values())))
    pieces = -(-n // chunk)
    size = -(-n // pieces)

    def part(values: Values) -> tuple[Array, Array]:
        inside = jax.vmap(lambda v: flow.coordinates.in_support({**v, **data}))(values)
        each = flow.log_probs(values, data, **options)
        k = each.shape[1]
        error = jnp.zeros(len(each)) if k == 1 else each.std(1, ddof=1) / k**0.5
        return jnp.where(inside, each.mean(1), -jnp.inf), jnp.where(inside, error, 0.0)

    if pieces == 1:
        return part(values)
    padded = {
        k: jnp.concatenate([v, v[: pieces * size - n]]).reshape(pieces, size, *v.shape[1:]) for k, v in values.items()
    }
    return jax.tree.map(lambda x: x.reshape(-1)[:n], jax.lax.map(part, padded))


@eqx.filter_jit
def evaluate(
    flow: Flow, values: Values, data: Values, options: Mapping[str, Any], chunk: int
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The densities of draws for one observation."""
    return _densities(flow, values, data, options, chunk)


@eqx.filter_jit
def _evaluate_each(
    flow: Flow, values: Values, data: Values, options: Mapping[str, Any], chunk: int
) -> tuple[Float[Array, "observations n"], Float[Array, "observations n"]]:
    """The densities of draws `(observations, n, ...)` for each observation, as many at once as `chunk` allows."""
    count, n = next(iter(values.values())).shape[:2]
    batches = -(-count // max(1, min(count, chunk // n)))
    batch = -(-count // batches)
    filled = jax.tree.map(lambda v: v[jnp.arange(batches * batch) % count], (values, data))
    out = jax.lax.map(lambda x: _densities(flow, x[0], x[1], options, chunk), filled, batch_size=batch)
    return jax.tree.map(lambda v: v[:count], out)


def evaluate_on_cores(
    flow: Flow, values: Values, data: Values, options: Mapping[str, Any], chunk: int
) -> tuple[np.ndarray, np.ndarray]:
    """`_evaluate_each` of a share of the observations on each core."""
    count = len(next(iter(values.values())))
    shares = min(cores(), count)
    which = np.arange(shares * -(-count // shares)).reshape(shares, -1) % count  # the last is filled
    each = [
        (flow, {n: x[w] for n, x in values.items()}, {n: x[w] for n, x in data.items()}, options, chunk) for w in which
    ]
    done = on_cores(_evaluate_each, each)
    density, error = (np.concatenate([np.asarray(part[i]) for part in done])[:count] for i in range(2))
    return density, error
