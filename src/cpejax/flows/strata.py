"""The times of a training batch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

TIMES = 10
"""The maximum number of times in a batch."""


class TimeStrata:
    """`n` rows in no more than `most` runs of neighbours that have the same time, each from its own stratum of [0, 1].

    A network of time, with its sines and cosines, then has few rows to work on; and strata lower the variance of the
    loss. A stratum is as wide as its run is long (the last may be shorter), so every time counts the same.

    >>> strata = TimeStrata(100, most=4)
    >>> t = strata.times(jax.random.uniform(jax.random.key(0), (strata.number,)))
    >>> t.shape, strata.each(t).shape
    ((4,), (100,))
    """

    def __init__(self, n: int, most: int = TIMES):
        self.n = n
        self.length = -(-n // most)
        self.number = -(-n // self.length)
        self.edges = np.minimum(np.arange(self.number + 1) * self.length, n) / n

    def times(self, uniform: Float[Array, "*batch strata"]) -> Float[Array, "*batch strata"]:
        """The times of the strata, from numbers in [0, 1]."""
        return jnp.asarray(self.edges[:-1]) + jnp.asarray(np.diff(self.edges)) * uniform

    def each(self, x: Array, axis: int = 0) -> Array:
        """Along an axis, of each row from what is of each run."""
        return jnp.repeat(x, self.length, axis=axis)[(slice(None),) * axis + (slice(self.n),)]
