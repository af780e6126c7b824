"""Hierarchical model: a mean in R^2, three groups around it, and one unknown noise scale. Nine parameters."""

from collections.abc import Mapping

import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.tasks._exact import grid_draws
from cpejax.tasks._task import Arrays, Task

GROUPS = 3


def program() -> None:
    """`gamma ~ N(0, I_2)`, `beta_j ~ N(gamma, I_2)`, `sigma ~ N+(1)`, `x_j ~ N(beta_j, sigma^2 I_2)`, j = 1..3."""
    gamma = numpyro.sample("gamma", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("group", GROUPS):
        beta = numpyro.sample("beta", dist.Normal(gamma, 1.0).to_event(1))
        numpyro.sample("x", dist.Normal(beta, sigma).to_event(1))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """Everything is Gaussian given sigma, so only sigma needs a grid.

    With `v = 1 + sigma^2` a coordinate of x over the groups is N(0, v I + 11'), which gives `p(sigma | x)`; then
    `gamma | sigma, x ~ N(s / (3 + v), v / (3 + v))` with s the sum over groups, and
    `beta_j | gamma, sigma, x ~ N((sigma^2 gamma + x_j) / v, sigma^2 / v)`.
    """
    x = np.asarray(given["x"], float)
    total, square = x.sum(0), (x**2).sum(0)

    def log_density(sigma):
        v = 1 + sigma[:, 0] ** 2
        log_det = (GROUPS - 1) * np.log(v) + np.log(v + GROUPS)
        quadratic = (square.sum() - (total**2).sum() / (v + GROUPS)) / v
        return -0.5 * (quadratic + 2 * log_det) - sigma[:, 0] ** 2 / 2

    most = 9.0 + 2 * square.sum() ** 0.25  # prior and likelihood have both died out there
    sigma = grid_draws(log_density, [(0.0, most)], 20_000, n, rng)
    v = 1 + sigma**2
    gamma = total / (GROUPS + v) + np.sqrt(v / (GROUPS + v)) * rng.normal(size=(n, 2))
    v, sigma = v[:, None], sigma[:, None]
    beta = (sigma**2 * gamma[:, None] + x) / v + sigma / np.sqrt(v) * rng.normal(size=(n, GROUPS, 2))
    return {"gamma": gamma, "sigma": sigma[:, 0, 0], "beta": beta}


TASK = Task(
    name="hierarchical",
    program=program,
    observed=("x",),
    source="paper, appendix B; theta has nine dimensions, not the seven printed",
    exact=exact,
    how="Gaussian given sigma, sigma from a grid",
)
