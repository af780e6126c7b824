"""Hyperboloid: ten equal means that measure a difference of distances; the posterior is two pairs of hyperbolas."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.tasks._exact import grid_draws
from cpejax.tasks._task import Arrays, Task

DIM, DF, SCALE = 10, 3.0, 0.1
FOCI = np.array([[[-0.5, 0.0], [0.5, 0.0]], [[0.0, -0.5], [0.0, 0.5]]])  # (component, focus, coordinate)


def program() -> None:
    """`theta ~ U(-2, 2)^2`, `x | theta ~ 1/2 t_3(F(theta; a) 1, .01 I) + 1/2 t_3(F(theta; b) 1, .01 I)` in R^10.

    `F(theta; f) = abs(|theta - f_1| - |theta - f_2|)` with foci a = (-.5, 0), (.5, 0) and b = (0, -.5), (0, .5).
    """
    theta = numpyro.sample("theta", dist.Uniform(-2.0, 2.0).expand([2]).to_event(1))
    distance = jnp.sqrt(jnp.sum((theta - jnp.asarray(FOCI)) ** 2, axis=-1))
    mean = jnp.abs(distance[:, 0] - distance[:, 1])[:, None] * jnp.ones(DIM)
    components = dist.MultivariateStudentT(DF, mean, SCALE * jnp.eye(DIM))
    numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.5, 0.5])), components))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """A grid of 2000 by 2000 cells and rejection; a component's kernel is `(1 + |x - F 1|^2 / .03)^(-13/2)`."""
    x = np.asarray(given["x"], float)

    def log_density(theta):
        distance = np.linalg.norm(theta[:, None, None] - FOCI, axis=-1)
        mean = np.abs(distance[..., 0] - distance[..., 1])
        square = (x**2).sum() - 2 * mean * x.sum() + DIM * mean**2
        return np.logaddexp(*(-(DF + DIM) / 2 * np.log1p(square.T / (DF * SCALE**2))))

    return {"theta": grid_draws(log_density, [(-2.0, 2.0)] * 2, 2000, n, rng)}


TASK = Task(
    name="hyperboloid",
    program=program,
    observed=("x",),
    source="Forbes et al. 2022, Summary statistics and discrepancy measures for ABC, 4.2",
    exact=exact,
    how="2-d grid and rejection",
)
