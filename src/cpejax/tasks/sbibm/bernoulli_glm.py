"""Bernoulli GLM: the number of spikes and the spike-triggered stimulus, sufficient statistics of the raw task."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, Float

from cpejax.program.simulator import Simulator
from cpejax.tasks._task import Arrays
from cpejax.tasks.sbibm._task import SbibmTask
from cpejax.tasks.sbibm.bernoulli_glm_raw import DESIGN, LAGS, draws_given_statistics, prior


def statistics(key: Array, theta: Float[Array, " 10"]) -> Float[Array, " 10"]:
    """`DESIGN' y` of 100 spikes or none: their number, and the stimulus 0 to 8 steps before them, summed."""
    design = jnp.asarray(DESIGN)
    spikes = jax.random.bernoulli(key, jax.nn.sigmoid(design @ theta))
    return spikes.astype(design.dtype) @ design


def program() -> None:
    """`theta` and 100 spikes as in `sbibm/bernoulli_glm_raw`; `x ~` their ten sufficient statistics."""
    theta = numpyro.sample("theta", prior())
    numpyro.sample("x", Simulator(statistics, theta, event_shape=(LAGS + 1,)))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """The posterior is that of the spikes themselves."""
    return draws_given_statistics(np.asarray(given["x"], float), n, rng)


TASK = SbibmTask(
    name="sbibm/bernoulli_glm",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, T.5",
    exact=exact,
    how="rejection from a t around the mode",
)
