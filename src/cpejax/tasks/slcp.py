"""Simple likelihood, complex posterior: four 2-d Gaussian observations, five parameters, four symmetric modes."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float

from cpejax.tasks._exact import rejection
from cpejax.tasks._task import Arrays, Task

OBSERVATIONS = 4


def program() -> None:
    """`theta ~ U(-3, 3)^5`, `x_j | theta ~ N((theta1, theta2), Sigma)`, j = 1..4.

    `Sigma` has standard deviations `theta3^2`, `theta4^2` and correlation `tanh(theta5)`.
    """
    theta = numpyro.sample("theta", dist.Uniform(-3.0, 3.0).expand([5]).to_event(1))
    with numpyro.plate("observation", OBSERVATIONS):
        numpyro.sample("x", dist.MultivariateNormal(theta[:2], scale_tril=scale_tril(theta)))


def scale_tril(theta: Float[Array, " 5"]) -> Float[Array, "2 2"]:
    """The Cholesky factor of `Sigma`."""
    s1, s2 = theta[2] ** 2, theta[3] ** 2
    return jnp.array([[s1, 0.0], [jnp.tanh(theta[4]) * s2, s2 / jnp.cosh(theta[4])]])


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """Rejection from a normal-inverse-Wishart.

    The uniform prior is, in `Sigma`, proportional to `|Sigma|^(-5/4) (1 - rho^2)^(1/4)` on its box. The first factor
    and the likelihood make `Sigma ~ IW(5/2, S)`, `mu | Sigma ~ N(mean(x), Sigma / 4)` with S the scatter of x; the
    second is at most 1 and is the probability of acceptance, as is the box. The signs of theta3 and theta4 are even.
    """
    x = np.asarray(given["x"], float)
    mean = x.mean(0)
    factor = np.linalg.cholesky((x - mean).T @ (x - mean))

    def propose(m):
        # Bartlett: a Wishart(5/2, I) is A A', and Sigma = K K' with K = chol(S) A'^-1.
        bartlett = np.zeros((m, 2, 2))
        bartlett[:, 0, 0], bartlett[:, 1, 1] = np.sqrt(rng.chisquare(2.5, m)), np.sqrt(rng.chisquare(1.5, m))
        bartlett[:, 1, 0] = rng.normal(size=m)
        root = factor @ np.linalg.inv(bartlett).swapaxes(1, 2)
        sigma = root @ root.swapaxes(1, 2)
        mu = mean + (root @ rng.normal(size=(m, 2, 1)))[..., 0] / np.sqrt(OBSERVATIONS)
        s1, s2 = np.sqrt(sigma[:, 0, 0]), np.sqrt(sigma[:, 1, 1])
        rho = sigma[:, 0, 1] / (s1 * s2)
        signs = rng.choice([-1.0, 1.0], size=(2, m))
        theta = np.stack([*mu.T, signs[0] * np.sqrt(s1), signs[1] * np.sqrt(s2), np.arctanh(rho)], axis=1)
        return theta, np.all(np.abs(theta) < 3, axis=1) * (1 - rho**2) ** 0.25

    return {"theta": rejection(propose, n, rng)}


TASK = Task(
    name="slcp",
    program=program,
    observed=("x",),
    source="Papamakarios et al. 2019, Sequential neural likelihood, A.1; Lueckmann et al. 2021, T.3",
    exact=exact,
    how="rejection from a normal-inverse-Wishart",
)
