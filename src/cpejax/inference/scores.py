"""How good a posterior is, by the log-density of the true parameters of simulations that it was not trained on."""

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
from cpejax.program.simulations import Simulations
from cpejax.util.cores import cores, on_cores

SCORED = 200
"""Held-out simulations by which a fit is scored."""
COMPARED = 1000
"""Maximum number of held-out simulations by which two fits are compared."""


def score_held_out(flow: Flow, rows: Simulations, held_out: np.ndarray, trained: np.ndarray) -> dict[str, float | int]:
    """What `History.held_out` has; an error where the density cannot be one.

    Of a density `q` the mean of `q(θ' | x) / π(θ')` is 1 for `θ'` from the prior and `x` from elsewhere. The held-out
    simulations' parameters, each with the data of the next, are such pairs. By Markov's inequality a mean above 10⁶ has
    a probability of no more than 10⁻⁶, where `q` is a density.
    """
    held_out, trained = held_out[:SCORED], trained[: min(SCORED, len(held_out))]
    shifted = np.roll(held_out, 1)
    gains, log_priors = [], []
    for parameters, data in ((held_out, held_out), (trained, trained), (shifted, held_out)):
        values = {n: jnp.asarray(x[parameters if n in rows.graph.parameters else data], float) for n, x in rows.items()}
        log_q, log_prior = map(np.asarray, log_densities(flow, values, frozenset(rows.graph.parameters)))
        gains.append(np.asarray(log_q - log_prior, float))
        log_priors.append(float(log_prior.mean()))
    total = float(np.logaddexp.reduce(gains[2][np.isfinite(gains[2])]) - math.log(len(held_out)))
    if total > math.log(1e6):
        raise FloatingPointError(
            f"The density that was learned cannot be right: it integrates to about e^{total:.0f}. Look for extreme "
            "values in the simulations, or lower learning_rate."
        )
    return {
        "n": len(held_out),
        "log_prob": float(gains[0].mean()) + log_priors[0],
        "prior": log_priors[0],
        "error": float(gains[0].std() / math.sqrt(len(held_out))),
        "training": float(gains[1].mean()),
    }


@eqx.filter_jit
def log_densities(
    flow: Flow, values: Values, parameters: frozenset[str]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The log-density of each simulation's parameters given its data, and under their prior."""
    n = len(next(iter(values.values())))
    batch = max(1, min(n, MOST_NUMBERS // (2 * flow.numbers_per_draw())))

    def one(values: Values) -> tuple[Array, Array]:
        drawn = {name: x[None] for name, x in values.items() if name in parameters}
        data = {name: x for name, x in values.items() if name not in parameters}
        log_q = flow.log_probs(drawn, data, **flow.density_options()).mean()
        return log_q, flow.coordinates.log_prior(values)

    return jax.lax.map(one, values, batch_size=batch)


def gain(flow: Flow, other: Flow, rows: Simulations, held_out: np.ndarray) -> dict[str, float | int]:
    """The mean log-density of held-out parameters under two flows, and the standard error of the difference."""
    values = {n: jnp.asarray(x[held_out[:COMPARED]], float) for n, x in rows.items()}
    parameters = frozenset(rows.graph.parameters)
    one, two = (np.asarray(log_densities(each, values, parameters)[0], float) for each in (flow, other))
    return {
        "n": len(one),
        "without": float(one.mean()),
        "with": float(two.mean()),
        "error": float((two - one).std() / math.sqrt(len(one))),
    }


def score_refined(
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
