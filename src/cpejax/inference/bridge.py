"""Evidence by bridge sampling (Meng and Wong 1996): from draws of the posterior, however these were found.

Importance weights need proposals that cover the posterior, and a path of many steps needs moves that mix at each; where
they do not, the error that they report is far too small. Bridge sampling needs draws of the posterior and of any
density near it, and is insensitive to the tails of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import expit, logsumexp
from scipy.stats import multivariate_normal

COMPONENTS = 10
"""Maximum number of components of the normal mixture that is fitted to draws."""
DRAWS_PER_WEIGHT = 10
"""The draws that there must be for each scalar of a component's covariance."""
REPEATS = 1000
"""Maximum number of iterations; a few tens are enough."""


def evidence(
    z: Float[np.ndarray, "n d"],
    log_p: Float[np.ndarray, " n"],
    density: Callable[[Float[np.ndarray, "m d"]], Float[np.ndarray, " m"]],
    seed: int,
) -> tuple[float, float]:
    """The log evidence and its standard error, from independent draws of the posterior.

    A normal mixture is fitted to half of the draws, and bridged to by the other half (Overstall and Forster 2010).
    Where draws are too few for the covariance even of one component, it is shrunk (Ledoit and Wolf 2004).

    **Arguments:** `z`: the draws; `log_p`: their log-densities, up to the constant that is sought; `density`: the same
    for other vectors, as many as half of the draws.
    """
    from sklearn.covariance import LedoitWolf  # take long to import
    from sklearn.mixture import GaussianMixture

    half, d = len(z) // 2, z.shape[1]
    centre, scale = z.mean(0, dtype=float), z.std(0, dtype=float) + 1e-30
    u = (z - centre) / scale
    number = min(half // (DRAWS_PER_WEIGHT * d * (d + 3) // 2), COMPONENTS)
    if number:
        mixture: Any = GaussianMixture(number, reg_covar=1e-8, random_state=seed, tol=1e-2, max_iter=50).fit(u[:half])
        near, log_q = mixture.sample(len(z) - half)[0], mixture.score_samples
    else:
        shrunk = LedoitWolf().fit(u[:half])
        normal = multivariate_normal(shrunk.location_, shrunk.covariance_, seed=seed)
        near, log_q = normal.rvs(len(z) - half).reshape(-1, d), normal.logpdf
    volume = np.log(scale).sum()
    return bridge(log_p[half:] - (log_q(u[half:]) - volume), density(centre + scale * near) - (log_q(near) - volume))


def bridge(at_posterior: Float[np.ndarray, " n"], at_other: Float[np.ndarray, " m"]) -> tuple[float, float]:
    """The logarithm of the ratio of two constants, and its standard error, by the optimal bridge.

    **Arguments:** the logarithms of the ratio of the two densities, the posterior's without its constant over the
    other, at draws of the posterior and of the other.

    The error is that of Frühwirth-Schnatter (2004).

    >>> import numpy as np
    >>> bridge(np.full(100, 3.0), np.full(100, 3.0))  # of densities that differ by a factor of e³
    (3.0, 0.0)
    """
    n, m = len(at_posterior), len(at_other)
    share = math.log(n / m)
    log_z = float(np.median(at_posterior))
    for _ in range(REPEATS):
        # With a = log(n p / (m q)): p / (n p + m q) = expit(a) / n and q / (n p + m q) = expit(-a) / m.
        up = logsumexp(_log_expit(at_other - log_z + share)) - math.log(m)
        down = logsumexp(_log_expit(-(at_posterior - log_z + share))) - math.log(n)
        change = float(up - down - share)
        log_z += change
        if not abs(change) > 1e-8:
            break
    each = expit(at_other - log_z + share), expit(-(at_posterior - log_z + share))
    variance = sum(float(x.var() / (len(x) * x.mean() ** 2)) if x.mean() > 0 else math.inf for x in each)
    return log_z, math.sqrt(variance)


def _log_expit(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    return -np.logaddexp(0.0, -x)
