"""How good a posterior is, by the log-density of the true parameters of simulations that it was not trained on."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cpejax.coordinates.prior import Values
from cpejax.flows.base import Flow
from cpejax.inference.sampling import MOST_NUMBERS
from cpejax.program.simulations import Simulations

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
