"""Gaussian linear uniform: ten independent means with a uniform prior."""

from collections.abc import Mapping

import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.stats import truncnorm

from cpejax.tasks._task import Arrays
from cpejax.tasks.sbibm._task import SbibmTask

DIM, BOX = 10, 1.0
SCALE = np.sqrt(0.1)


def program() -> None:
    """`theta ~ U(-1, 1)^10`, `x | theta ~ N(theta, .1 I)`."""
    with numpyro.plate("dim", DIM):
        theta = numpyro.sample("theta", dist.Uniform(-BOX, BOX))
        numpyro.sample("x", dist.Normal(theta, SCALE))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """`theta | x ~ N(x, .1 I)`, each cut off at the prior's box."""
    x = np.asarray(given["x"], float)
    low, high = (-BOX - x) / SCALE, (BOX - x) / SCALE
    return {"theta": truncnorm.rvs(low, high, loc=x, scale=SCALE, size=(n, DIM), random_state=rng)}


TASK = SbibmTask(
    name="sbibm/gaussian_linear_uniform",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, T.2",
    exact=exact,
    how="truncated Gaussians",
)
