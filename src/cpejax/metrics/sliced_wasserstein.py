"""Sliced Wasserstein distance."""

from typing import Any

import numpy as np

from cpejax.metrics.samples import Score, standardised, with_null


def sliced_wasserstein(draws: Any, reference: Any, *, directions: int = 500, seed: int = 1) -> Score:
    """Sliced 2-Wasserstein distance: root mean square over random directions of the distance of the projections.

    In units of the reference's standard deviations; for two samples of equal size a projection's distance is
    `sqrt(mean (sort(x) - sort(y))^2)`. The null falls like `1 / sqrt(n)`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> score = sliced_wasserstein(1 + rng.normal(size=500), rng.normal(size=1000))
    >>> bool(0.8 < score.value < 1.2)
    True

    Reference: Bonneel et al. 2015, Sliced and Radon Wasserstein barycenters of measures.
    """
    x, y = standardised(draws, reference)

    def distance(x, y, rng):
        axes = rng.normal(size=(x.shape[1], directions))
        axes /= np.linalg.norm(axes, axis=0)
        return float(np.sqrt(np.mean((np.sort(x @ axes, axis=0) - np.sort(y @ axes, axis=0)) ** 2)))

    return with_null(distance, x, y, seed)
