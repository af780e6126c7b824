"""Whether refinement makes draws better, on held-out simulations."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.special import logsumexp

from cpejax.coordinates.prior import Coordinates, Values
from cpejax.flows.base import Flow
from cpejax.inference.density import check_exact, evaluate_on_cores
from cpejax.inference.likelihood import Likelihood
from cpejax.inference.sampling import MOST_NUMBERS, draw_on_cores
from cpejax.util.cores import cores, on_cores


def score_held_out(
    flow: Flow,
    likelihood: Likelihood,
    values: Mapping[str, Any],
    parameters: Collection[str],
    *,
    key: PRNGKeyArray,
    draws: int = 100,
) -> dict[str, float | int]:
    """The mean log-density of the true parameters of held-out simulations, as the flow has it and refined.

    Refined it is `log π + log L − log Ẑ`, with `Ẑ` the mean weight of `draws` draws of the flow and of the truth
    itself, so that it is no more than `log(draws + 1)` above the flow's: it never flatters.

    **Arguments:** `values`: simulations `{site: (m, *shape)}`; `parameters`: the sites that are not data.

    **Returns:** `n`, the simulations; `plain` and `refined`, the means in nats; `error`, the standard error of their
    difference; `draws`. A likelihood that makes a truth impossible scores −∞.
    """
    truth = {name: jnp.asarray(values[name], float) for name in parameters}
    data = {name: jnp.asarray(x, float) for name, x in values.items() if name not in truth}
    m = len(next(iter(truth.values())))
    chunk = max(1, MOST_NUMBERS // max(1, flow.numbers_per_draw()))
    drawn, counted = draw_on_cores(flow, data, jax.random.split(key, m), draws, flow.draw_options(), chunk)
    both = {name: jnp.concatenate([truth[name][:, None], jnp.asarray(drawn[name])], axis=1) for name in truth}
    found, error = evaluate_on_cores(flow, both, data, flow.density_options(), max(1, chunk // 2))
    check_exact(error)
    log_q = found.astype(float)
    if "accepted" in counted:
        rate = np.maximum(counted["accepted"].sum(1), 1) / counted["proposed"].sum(1)
        log_q = log_q - np.log(rate)[:, None]
    several = max(1, MOST_NUMBERS // max(1, likelihood.numbers_per_value() * (draws + 1)))
    shares = min(cores(), m)
    which = np.arange(shares * -(-m // shares)).reshape(shares, -1) % m  # the last is filled
    parts = [jax.tree.map(lambda x, w=w: x[w], (both, data)) for w in which]
    done = on_cores(_log_joint, [(flow.coordinates, likelihood, *part, several) for part in parts])
    log_p = np.concatenate([np.asarray(x) for x in done])[:m].astype(float)
    log_p = np.where(np.isnan(log_p) | np.isposinf(log_p), -np.inf, log_p)
    with np.errstate(invalid="ignore"):
        log_w = np.where(np.isfinite(log_p), log_p - log_q, -np.inf)
        refined = np.where(
            np.isfinite(log_p[:, 0]), log_p[:, 0] - logsumexp(log_w, axis=1) + math.log(draws + 1), -np.inf
        )
        gain = refined - log_q[:, 0]
    spread = float(gain.std() / math.sqrt(m)) if np.isfinite(gain).all() else math.inf
    mean = {"plain": float(log_q[:, 0].mean()), "refined": float(refined.mean())}
    return {"n": m, **mean, "error": spread, "draws": int(draws)}


@eqx.filter_jit
def _log_joint(
    coordinates: Coordinates, likelihood: Likelihood, values: Values, data: Values, batch: int
) -> Float[Array, "m k"]:
    """`log π + log L` of parameters `{site: (m, k, *shape)}` for each of `m` observations."""

    def one(x: tuple[Values, Values]) -> Float[Array, " k"]:
        theta, data = x
        prior = jax.vmap(lambda v: coordinates.log_prior({**v, **data}))(theta)
        return prior + likelihood(theta, data)

    m = len(next(iter(values.values())))
    return jax.lax.map(one, (values, data), batch_size=max(1, min(m, batch)))


def helps(score: Mapping[str, float | int]) -> bool:
    """Whether refinement raises the log-density of held-out parameters, beyond two standard errors."""
    return score["refined"] - score["plain"] > 2 * score["error"]
