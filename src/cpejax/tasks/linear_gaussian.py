"""Linear Gaussian: ten independent conjugate pairs."""

from collections.abc import Mapping

import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.tasks._task import Arrays, Task

DIM = 10
SCALE = np.sqrt(0.1)


def program() -> None:
    """`theta ~ N(0, .1 I)`, `x | theta ~ N(theta, .1 I)`, both in ten dimensions."""
    with numpyro.plate("dim", DIM):
        theta = numpyro.sample("theta", dist.Normal(0.0, SCALE))
        numpyro.sample("x", dist.Normal(theta, SCALE))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """`theta | x ~ N(x / 2, .05 I)`."""
    x = np.asarray(given["x"], float)
    return {"theta": x / 2 + rng.normal(scale=SCALE / np.sqrt(2), size=(n, DIM))}


TASK = Task(
    name="linear_gaussian",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, Benchmarking simulation-based inference, T.1",
    exact=exact,
    how="conjugate",
)
