"""Kernels between the points of two sets, a block of rows at a time."""

import numpy as np
from jaxtyping import Array, Float

from cpejax.metrics.samples import Matrix

ROWS = 64
"""Rows of a distance matrix at a time: they fit the processor's cache, and memory does not grow with n²."""


def blocks_of(x: Matrix) -> Float[np.ndarray, "b r d"]:
    """Points in blocks of `ROWS`; the last block is filled up with the first points."""
    return np.resize(x, (-(-len(x) // ROWS), ROWS, x.shape[1])).astype(np.float32)


def squares(rows: Float[Array, "r d"], made: Float[Array, "m d"]) -> Float[Array, "r m"]:
    """Squared distances by differences: the expansion `a^2 - 2ab + b^2` has no digits left at small bandwidths."""
    columns = made.T  # contiguous
    return sum((rows[:, j, None] - columns[j]) ** 2 for j in range(rows.shape[1]))  # type: ignore[return-value]
