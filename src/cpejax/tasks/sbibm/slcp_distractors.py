"""SLCP with distractors: the four observations of SLCP among 92 numbers that say nothing about the parameters.

All 100 are one vector, in one fixed random order, as in the original: which of them matter is for a method to find out.
"""

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float

from cpejax.program.simulator import Simulator
from cpejax.tasks import slcp
from cpejax.tasks._task import Arrays
from cpejax.tasks.sbibm._task import SbibmTask

OBSERVATIONS, SIGNAL = 4, 8
NOISE, COMPONENTS, FREEDOM = 92, 20, 2.0
SEED = 42


@cache
def noise_parameters() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Locations (20, 92) and scales (20, 92, 92) of the noise, and the order (100,) of the original's data.

    They are random numbers of one seed, drawn as the original draws them.
    """
    rng = np.random.RandomState(SEED)  # the generator of the original's constants
    loc = np.array([15 * rng.normal(size=NOISE) for _ in range(COMPONENTS)])
    factors = [
        np.tril(rng.normal(size=(NOISE, NOISE))) + np.diag(np.exp(rng.normal(size=NOISE))) for _ in range(COMPONENTS)
    ]
    return loc, 3 * np.array(factors), rng.permutation(NOISE + SIGNAL)


def scattered(key: Array, theta: Float[Array, " 5"]) -> Float[Array, " 100"]:
    """Four points of SLCP's Gaussian and the noise, in the original's order.

    The noise is an even mixture of 20 multivariate t with 2 degrees of freedom. Its scales are too ill-conditioned for
    a density in single precision, so that this is a simulator without one.
    """
    point_key, which_key, normal_key, chi_key = jax.random.split(key, 4)
    points = theta[:2] + jax.random.normal(point_key, (OBSERVATIONS, 2)) @ slcp.scale_tril(theta).T
    loc, scale, order = noise_parameters()
    which = jax.random.randint(which_key, (), 0, COMPONENTS)
    normal = jax.random.normal(normal_key, (NOISE,))
    # Every component's product, then the one: the products of many simulations are then one of matrices.
    spread = (jnp.asarray(scale, jnp.float32) @ normal)[which]
    wide = jax.random.gamma(chi_key, FREEDOM / 2) / (FREEDOM / 2)
    noise = jnp.asarray(loc, jnp.float32)[which] + spread / jnp.sqrt(wide)
    return jnp.concatenate([points.ravel(), noise])[order]


def program() -> None:
    """`theta ~ U(-3, 3)^5` as in SLCP; `x ~` its four observations and the noise, in a fixed random order."""
    theta = numpyro.sample("theta", dist.Uniform(-3.0, 3.0).expand([5]).to_event(1))
    numpyro.sample("x", Simulator(scattered, theta, event_shape=(NOISE + SIGNAL,)))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """As that of SLCP, by the eight numbers that matter."""
    x = np.asarray(given["x"])[np.argsort(noise_parameters()[2])]
    return slcp.exact({"x": x[:SIGNAL].reshape(OBSERVATIONS, 2)}, n, rng)


TASK = SbibmTask(
    name="sbibm/slcp_distractors",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, T.4",
    exact=exact,
    how="rejection from a normal-inverse-Wishart",
    folder="slcp",
    file="observation_distractors.csv",
)
