"""Gaussian mixture 2: three locations, of which one data point has seen one. Six parameters, three modes."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.tasks._task import Arrays, Task

MEAN = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
COVARIANCE = np.array([[[0.7, 0.0], [0.0, 0.05]], [[0.7, 0.0], [0.0, 0.05]], [[1.0, 0.95], [0.95, 1.0]]])


def program() -> None:
    """`theta ~ N((-1, -1, 0, 0, 1, 1), I_6)`, `x | theta ~ 1/3 sum_k N((theta_2k-1, theta_2k), S_k)`.

    `S_1 = S_2 = diag(.7, .05)`, `S_3 = [[1, .95], [.95, 1]]` (printed as [[.1, .95], [.95, 1]] in the paper, which
    is no covariance).
    """
    theta = numpyro.sample("theta", dist.Normal(jnp.asarray(MEAN.ravel()), 1.0).to_event(1))
    components = dist.MultivariateNormal(theta.reshape(3, 2), covariance_matrix=jnp.asarray(COVARIANCE))
    numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(probs=jnp.full(3, 1 / 3)), components))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """A mixture of conjugate Gaussians: component k with weight `N(x; m_k, I + S_k)` pulls its own location to x."""
    x = np.asarray(given["x"], float)
    total = np.eye(2) + COVARIANCE
    gap = x - MEAN
    gain = np.linalg.inv(total)  # the prior's covariance is I
    log_weight = -0.5 * (np.einsum("ki,kij,kj->k", gap, gain, gap) + np.linalg.slogdet(total)[1])
    weight = np.exp(log_weight - log_weight.max())
    component = rng.choice(3, size=n, p=weight / weight.sum())
    theta = MEAN + rng.normal(size=(n, 3, 2))
    posterior_mean = MEAN + np.einsum("kij,kj->ki", gain, gap)
    root = np.linalg.cholesky(np.eye(2) - gain)
    own = posterior_mean[component] + np.einsum("nij,nj->ni", root[component], rng.normal(size=(n, 2)))
    theta[np.arange(n), component] = own
    return {"theta": theta.reshape(n, 6)}


TASK = Task(
    name="gaussian_mixture_2",
    program=program,
    observed=("x",),
    source="Vargas et al. 2024, Transport meets variational inference, adapted in the paper, appendix B",
    exact=exact,
    how="mixture of conjugate Gaussians",
)
