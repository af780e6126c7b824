"""SIR: an epidemic in a million people, seen in ten samples of a thousand, 17 days apart."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from scipy.integrate import solve_ivp
from scipy.special import xlog1py, xlogy

from cpejax.tasks._exact import around_mode
from cpejax.tasks._task import Arrays
from cpejax.tasks.sbibm._ode import runge_kutta
from cpejax.tasks.sbibm._task import SbibmTask

POPULATION, SAMPLED = 1e6, 1000
TIMES = 17.0 * np.arange(10)
MEAN, SD = np.log([0.4, 0.125]), np.array([0.5, 0.2])
STEPS = 68
"""Steps of the solver between two samples: a quarter of a day each."""


def infected(beta: Float[Array, ""], gamma: Float[Array, ""]) -> Float[Array, " 10"]:
    """The infected fraction at the ten times: `s' = -beta s i`, `i' = beta s i - gamma i`, one infected at first.

    Solved for `(s, log i)`, in which an outbreak's growth is linear.
    """

    def field(state):
        s, log_i = state
        return -beta * s * jnp.exp(log_i), beta * s - gamma

    start = (jnp.asarray(1 - 1 / POPULATION), jnp.asarray(-np.log(POPULATION), jnp.float32))
    return jnp.clip(jnp.exp(runge_kutta(field, start, TIMES, STEPS)[1]), 0.0, 1.0)


def program() -> None:
    """`beta ~ LogNormal(log .4, .5)`, `gamma ~ LogNormal(log 1/8, .2)`, `x_t ~ Binomial(1000, infected fraction)`."""
    beta, gamma = (
        numpyro.sample(name, dist.LogNormal(mean, sd))
        for name, mean, sd in zip(("beta", "gamma"), MEAN, SD, strict=True)
    )
    numpyro.sample("x", dist.Binomial(SAMPLED, infected(beta, gamma)).to_event(1))


def _solve(rates: np.ndarray) -> np.ndarray:
    """The infected fraction at the ten times, (n, 10), for rates (n, 2), by SciPy."""
    beta, gamma = rates.T

    def field(_, state):
        s, i = state.reshape(2, -1)
        return np.concatenate([-beta * s * i, beta * s * i - gamma * i])

    start = np.repeat([1 - 1 / POPULATION, 1 / POPULATION], len(rates))
    span = (TIMES[0], TIMES[-1])
    solved = solve_ivp(field, span, start, method="DOP853", t_eval=TIMES, rtol=1e-9, atol=1e-13)
    return solved.y.reshape(2, len(rates), -1)[1]


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """Rejection from a t around the mode, in logarithms of the rates."""
    x = np.asarray(given["x"], float)

    def log_density(z):
        parts = [z[i : i + 2000] for i in range(0, len(z), 2000)]
        p = np.clip(np.concatenate([_solve(np.exp(MEAN + SD * part)) for part in parts]), 0, 1)
        return xlogy(x, p).sum(1) + xlog1py(SAMPLED - x, -p).sum(1) - 0.5 * (z**2).sum(1)

    tries = rng.normal(size=(5_000, 2))
    z = around_mode(log_density, tries[np.argmax(log_density(tries))], n, rng)
    beta, gamma = np.exp(MEAN + SD * z).T
    return {"beta": beta, "gamma": gamma}


TASK = SbibmTask(
    name="sbibm/sir",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, T.9",
    exact=exact,
    how="rejection from a t around the mode",
)
