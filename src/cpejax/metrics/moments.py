"""Errors of means, standard deviations and correlations."""

from typing import Any, NamedTuple

import numpy as np

from cpejax.metrics.samples import Score, scale_of, standardised, with_null


class Moments(NamedTuple):
    """Largest errors of the first two moments over all scalar parameters, each with its null."""

    mean: Score
    sd: Score
    correlation: Score


def moments(draws: Any, reference: Any, *, seed: int = 1) -> Moments:
    """Largest errors of means and standard deviations, in the reference's standard deviations, and of correlations.

    A constant column has correlation 0 with any other, and one parameter alone has no correlation to get wrong: 0.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> error = moments(2 * rng.normal(size=(1000, 2)), rng.normal(size=(2000, 2)))
    >>> bool(0.8 < error.sd.value < 1.2)
    True
    """
    x, y = standardised(draws, reference)

    def correlation(z):
        z = (z - z.mean(0)) / scale_of(z)
        return np.triu(z.T @ z / len(z), 1)

    return Moments(
        mean=with_null(lambda x, y, _: float(np.abs(x.mean(0) - y.mean(0)).max()), x, y, seed),
        sd=with_null(lambda x, y, _: float(np.abs(x.std(0) - y.std(0)).max()), x, y, seed),
        correlation=with_null(lambda x, y, _: float(np.abs(correlation(x) - correlation(y)).max()), x, y, seed),
    )
