"""Tree: a root, two branches, and two non-linear measurements of each, which leave the signs of the branches open."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.tasks._exact import grid_draws
from cpejax.tasks._task import Arrays, Task


def program() -> None:
    """`theta1 ~ N(0, 1)`, `theta2, theta3 ~ N(theta1, 1)`.

    `x1 ~ N(sin^2 theta2, .2^2)`, `x2 ~ N(.1 theta2^2, .2^2)`, `x3 ~ N(.1 theta3^2, .6^2)`,
    `x4 ~ N(cos^2 theta3, .1^2)`.
    """
    theta1 = numpyro.sample("theta1", dist.Normal(0.0, 1.0))
    theta2 = numpyro.sample("theta2", dist.Normal(theta1, 1.0))
    theta3 = numpyro.sample("theta3", dist.Normal(theta1, 1.0))
    numpyro.sample("x1", dist.Normal(jnp.sin(theta2) ** 2, 0.2))
    numpyro.sample("x2", dist.Normal(0.1 * theta2**2, 0.2))
    numpyro.sample("x3", dist.Normal(0.1 * theta3**2, 0.6))
    numpyro.sample("x4", dist.Normal(jnp.cos(theta3) ** 2, 0.1))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """A grid of 2000 by 2000 cells for the branches, then the root, which is conjugate.

    With theta1 integrated out, (theta2, theta3) has covariance [[2, 1], [1, 2]];
    `theta1 | theta2, theta3 ~ N((theta2 + theta3) / 3, 1/3)`.
    """
    x1, x2, x3, x4 = (float(np.asarray(given[f"x{i}"])) for i in range(1, 5))

    def log_density(theta):
        b, c = theta.T
        log_prior = -(b**2 - b * c + c**2) / 3
        left = ((x1 - np.sin(b) ** 2) / 0.2) ** 2 + ((x2 - 0.1 * b**2) / 0.2) ** 2
        right = ((x3 - 0.1 * c**2) / 0.6) ** 2 + ((x4 - np.cos(c) ** 2) / 0.1) ** 2
        return log_prior - 0.5 * (left + right)

    branches = grid_draws(log_density, [(-10.0, 10.0)] * 2, 2000, n, rng)
    root = branches.sum(1) / 3 + np.sqrt(1 / 3) * rng.normal(size=n)
    return {"theta1": root, "theta2": branches[:, 0], "theta3": branches[:, 1]}


TASK = Task(
    name="tree",
    program=program,
    observed=("x1", "x2", "x3", "x4"),
    source="Gloeckler et al. 2024, All-in-one simulation-based inference, A2.2; data nodes as there",
    exact=exact,
    how="2-d grid and rejection, conjugate root",
)
