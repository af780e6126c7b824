"""Bernoulli GLM, raw: 100 spikes or none, driven by a stimulus through a filter of nine lags."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.tasks._exact import around_mode
from cpejax.tasks._task import Arrays
from cpejax.tasks.sbibm._task import SbibmTask

STEPS, LAGS, SEED = 100, 9, 42


def _design() -> np.ndarray:
    """A column of ones, and the stimulus delayed by 0 to 8 steps: (100, 10)."""
    stimulus = np.random.RandomState(SEED).randn(STEPS).astype(np.float32)  # as the original draws it
    delayed = [np.concatenate([np.zeros(lag, np.float32), stimulus[: STEPS - lag]]) for lag in range(LAGS)]
    return np.stack([np.ones(STEPS, np.float32), *delayed], axis=1)


def _precision() -> np.ndarray:
    """Of the prior: .5 for the offset; `F'F` for the filter, which penalises second differences, (10, 10)."""
    difference = np.eye(LAGS) - np.eye(LAGS, k=-1)
    smooth = difference @ difference + np.diag(np.sqrt(np.arange(LAGS) / LAGS))
    out = np.zeros((LAGS + 1, LAGS + 1))
    out[0, 0], out[1:, 1:] = 0.5, smooth.T @ smooth
    return out


DESIGN, PRECISION = _design(), _precision()


def prior() -> dist.MultivariateNormal:
    """`N(0, PRECISION^-1)`."""
    return dist.MultivariateNormal(jnp.zeros(LAGS + 1), precision_matrix=jnp.asarray(PRECISION, jnp.float32))


def program() -> None:
    """`theta ~ N(0, PRECISION^-1)`, `y_t | theta ~ Bernoulli(logit = DESIGN_t theta)`, t = 1..100."""
    theta = numpyro.sample("theta", prior())
    with numpyro.plate("step", STEPS):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.asarray(DESIGN) @ theta))


def draws_given_statistics(x: np.ndarray, n: int, rng: np.random.Generator) -> Arrays:
    """Rejection from a t around the mode of `theta x - sum log(1 + exp(DESIGN theta)) - theta PRECISION theta / 2`."""
    design = DESIGN.astype(float)

    def log_density(theta):
        likelihood = theta @ x - np.logaddexp(0, theta @ design.T).sum(1)
        return likelihood - 0.5 * np.einsum("ni,ij,nj->n", theta, PRECISION, theta)

    return {"theta": around_mode(log_density, np.zeros(LAGS + 1), n, rng)}


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """By the sufficient statistics `DESIGN' y`; see `draws_given_statistics`."""
    return draws_given_statistics(DESIGN.T.astype(float) @ np.asarray(given["y"], float), n, rng)


TASK = SbibmTask(
    name="sbibm/bernoulli_glm_raw",
    program=program,
    observed=("y",),
    source="Lueckmann et al. 2021, T.6",
    exact=exact,
    how="rejection from a t around the mode",
    folder="bernoulli_glm",
    file="observation_raw.csv",
)
