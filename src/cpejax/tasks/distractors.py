"""Mixture with distractors: two of ten data are informative; at x1 = x2 = 5 the posterior has two uneven modes."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.tasks._exact import grid_draws
from cpejax.tasks._task import Arrays, Task

DIM, INFORMATIVE = 10, 2
WEIGHT, SCALE = 0.3, 0.3


def program() -> None:
    """`theta ~ U(-10, 10)`; `x1, x2 ~ .3 N(theta, 1) + .7 N(-theta, .3^2)`; `x3, ..., x10 ~ N(0, 1)`.

    One data site of ten dimensions: a distractor is a mixture of two equal components.
    """
    theta = numpyro.sample("theta", dist.Uniform(-10.0, 10.0))
    informative = jnp.arange(DIM) < INFORMATIVE
    loc = jnp.where(informative[:, None], theta * jnp.array([1.0, -1.0]), 0.0)
    scale = jnp.where(informative[:, None], jnp.array([1.0, SCALE]), 1.0)
    mixing = dist.Categorical(probs=jnp.broadcast_to(jnp.array([WEIGHT, 1 - WEIGHT]), (DIM, 2)))
    numpyro.sample("x", dist.MixtureSameFamily(mixing, dist.Normal(loc, scale)).to_event(1))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """A grid of 20,000 cells and rejection; the distractors cancel."""
    x = np.asarray(given["x"], float)[:INFORMATIVE]

    def log_density(theta):
        wide = np.log(WEIGHT) - 0.5 * (x - theta) ** 2
        narrow = np.log((1 - WEIGHT) / SCALE) - 0.5 * ((x + theta) / SCALE) ** 2
        return np.logaddexp(wide, narrow).sum(1)

    return {"theta": grid_draws(log_density, [(-10.0, 10.0)], 20_000, n, rng)[:, 0]}


def at_five(data: Arrays) -> Arrays:
    """Both informative data at 5, as in the paper; the distractors as simulated."""
    x = data["x"].copy()
    x[:INFORMATIVE] = 5.0
    return {"x": x}


TASK = Task(
    name="distractors",
    program=program,
    observed=("x",),
    source="paper, appendix B, after SLCP with distractors in Lueckmann et al. 2021, T.4",
    exact=exact,
    how="1-d grid and rejection",
    fix=at_five,
)
