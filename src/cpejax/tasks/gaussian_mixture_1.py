"""Gaussian mixture 1: one location, a wide and a narrow component around it."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import log_ndtr
from scipy.stats import truncnorm

from cpejax.tasks._task import Arrays, Task

BOX = 10.0
SCALES = np.array([1.0, 0.1])


def program() -> None:
    """`theta ~ U(-10, 10)^2`, `x | theta ~ 1/2 N(theta, I) + 1/2 N(theta, .01 I)`."""
    theta = numpyro.sample("theta", dist.Uniform(-BOX, BOX).expand([2]).to_event(1))
    components = dist.Normal(theta, jnp.asarray(SCALES)[:, None]).to_event(1)
    numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.5, 0.5])), components))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """A mixture of two Gaussians around x cut off at the prior's box: weights are their masses inside it."""
    x = np.asarray(given["x"], float)
    low, high = (-BOX - x) / SCALES[:, None], (BOX - x) / SCALES[:, None]
    # log(Phi(high) - Phi(low)), from the lighter tail so that it holds far outside the box too
    flip = low + high > 0
    a, b = np.where(flip, -high, low), np.where(flip, -low, high)
    mass = (log_ndtr(b) + np.log1p(-np.exp(log_ndtr(a) - log_ndtr(b)))).sum(1)
    narrow = rng.uniform(size=n) < 1 / (1 + np.exp(mass[0] - mass[1]))
    k = narrow.astype(int)
    return {"theta": truncnorm.rvs(low[k], high[k], loc=x, scale=SCALES[k, None], size=(n, 2), random_state=rng)}


TASK = Task(
    name="gaussian_mixture_1",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, Benchmarking simulation-based inference, T.7",
    exact=exact,
    how="mixture of truncated Gaussians",
)
