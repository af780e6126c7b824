"""Maximum mean discrepancy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cpejax.metrics.kernels import blocks_of, squares
from cpejax.metrics.samples import Matrix, Score, standardised, with_null


def mmd(draws: Any, reference: Any, *, seed: int = 1) -> Score:
    """Maximum mean discrepancy, `sqrt(mean k(x, x') + mean k(y, y') - 2 mean k(x, y))`; 0 for equal distributions.

    Coordinates are standardised by the reference; k is the mean of five Gaussian kernels with bandwidths 1/4, 1/2, 1,
    2, 4 times the median distance within the reference. Pairs of a point with itself count, so the value is positive
    and the null is about `1 / sqrt(n)`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> score = mmd(rng.normal(size=(500, 2)), 1 + rng.normal(size=(1000, 2)))
    >>> score.value > 3 * score.null
    True

    Reference: Gretton et al. 2012, A kernel two-sample test.
    """
    x, y = standardised(draws, reference)
    sample = y[np.random.default_rng(seed).permutation(len(y))[:1000]]
    distance = np.sqrt(((sample[:, None] - sample[None]) ** 2).sum(-1))
    median = float(np.median(distance[np.triu_indices(len(sample), 1)])) or 1.0
    return with_null(lambda x, y, _: _mmd(x, y, median), x, y, seed)


def _mmd(x: Matrix, y: Matrix, median: float) -> float:
    square = _mean_kernel(x, x, median) + _mean_kernel(y, y, median) - 2 * _mean_kernel(x, y, median)
    return float(np.sqrt(max(square, 0.0)))


def _mean_kernel(x: Matrix, y: Matrix, median: float) -> float:
    rows = np.asarray(_kernel_rows(jnp.asarray(blocks_of(x)), jnp.asarray(y, jnp.float32), median), np.float64)
    return float(rows.ravel()[: len(x)].mean())


@jax.jit
def _kernel_rows(
    blocks: Float[Array, "b r d"], y: Float[Array, "m d"], median: Float[Array, ""] | float
) -> Float[Array, "b r"]:
    def block(rows):
        kernel = jnp.exp(-squares(rows, y) / (2 * (4 * median) ** 2))
        total = kernel.mean(1)
        for _ in range(4):  # half the bandwidth is the fourth power
            kernel = kernel**4
            total += kernel.mean(1)
        return total / 5

    return jax.lax.map(block, blocks)
