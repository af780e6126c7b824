"""Lotka–Volterra: predators and prey, counted ten times over 20 days, each count with a tenth of noise."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from scipy.integrate import solve_ivp

from cpejax.tasks._exact import around_mode
from cpejax.tasks._task import Arrays
from cpejax.tasks.sbibm._ode import runge_kutta
from cpejax.tasks.sbibm._task import SbibmTask

RATES = ("alpha", "beta", "gamma", "delta")
MEAN, SD = np.array([-0.125, -3.0, -0.125, -3.0]), 0.5
START = np.log([30.0, 1.0])
NOISE = 0.1
TIMES = 2.1 * np.arange(10)
LEAST, MOST = np.log(1e-10), np.log(1e4)
"""Limits of the logarithm of a count."""
STEPS = 300
"""Steps of the solver between two counts: 7 thousandths of a day each."""


def log_counts(rates: tuple[Array, ...]) -> tuple[Float[Array, " 10"], Float[Array, " 10"]]:
    """Logarithms of prey u and predators v: `u' = alpha u - beta u v`, `v' = delta u v - gamma v` from 30 and 1."""
    alpha, beta, gamma, delta = rates

    def field(state):
        log_u, log_v = state
        return alpha - beta * jnp.exp(log_v), delta * jnp.exp(log_u) - gamma

    log_u, log_v = runge_kutta(field, tuple(jnp.asarray(START, jnp.float32)), TIMES, STEPS)
    return jnp.clip(log_u, LEAST, MOST), jnp.clip(log_v, LEAST, MOST)


def program() -> None:
    """`alpha, gamma ~ LogNormal(-.125, .5)`, `beta, delta ~ LogNormal(-3, .5)`.

    Each count `~ LogNormal(log solution, .1)`.
    """
    rates = tuple(numpyro.sample(name, dist.LogNormal(mean, SD)) for name, mean in zip(RATES, MEAN, strict=True))
    prey, predators = log_counts(rates)
    numpyro.sample("prey", dist.LogNormal(prey, NOISE).to_event(1))
    numpyro.sample("predators", dist.LogNormal(predators, NOISE).to_event(1))


def _solve(rates: np.ndarray) -> np.ndarray:
    """Logarithms of the counts, (n, 20), for rates (n, 4), by SciPy."""
    alpha, beta, gamma, delta = rates.T

    def field(_, state):
        log_u, log_v = state.reshape(2, -1)
        return np.concatenate([alpha - beta * np.exp(log_v), delta * np.exp(log_u) - gamma])

    span, start = (TIMES[0], TIMES[-1]), np.repeat(START, len(rates))
    solved = solve_ivp(field, span, start, method="DOP853", t_eval=TIMES, rtol=1e-8, atol=1e-8)
    return np.concatenate(list(np.clip(solved.y, LEAST, MOST).reshape(2, len(rates), -1)), axis=1)


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """Rejection from a t around the mode, in logarithms of the rates."""
    log_x = np.log(np.concatenate([np.asarray(given[name], float) for name in ("prey", "predators")]))

    def log_density(z):
        parts = [z[i : i + 1000] for i in range(0, len(z), 1000)]
        found = np.concatenate([_solve(np.exp(MEAN + SD * part)) for part in parts])
        return -0.5 * (((log_x - found) / NOISE) ** 2).sum(1) - 0.5 * (z**2).sum(1)

    tries = rng.normal(size=(20_000, len(RATES)))
    z = around_mode(log_density, tries[np.argmax(log_density(tries))], n, rng)
    return dict(zip(RATES, np.exp(MEAN + SD * z).T, strict=True))


TASK = SbibmTask(
    name="sbibm/lotka_volterra",
    program=program,
    observed=("prey", "predators"),
    source="Lueckmann et al. 2021, T.10",
    exact=exact,
    how="rejection from a t around the mode",
)
