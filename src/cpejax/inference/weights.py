"""Importance weights: smoothed, with what they tell of themselves and the evidence that they estimate."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

FEWEST = 25
"""The fewest weights to whose tail a Pareto distribution is fitted."""
SAME = 1e-5
"""Log-weights that differ by no more are the same: that is what float32 makes of equal densities."""


class Weights(NamedTuple):
    """Normalised importance weights of draws.

    - `log`: the logarithms of weights that add up to 1.
    - `log_mean`, `error`: the logarithm of the mean of the weights before they were normalised, and its standard error.
    - `size`: the effective sample size, `1 / Σ w²`.
    - `pareto_k`: the shape k̂ of the tail of the weights. Above .7 their mean cannot be relied upon.
    """

    log: Float[np.ndarray, " n"]
    log_mean: float
    error: float
    size: float
    pareto_k: float


def smooth(log_weights: Float[np.ndarray, " n"]) -> Weights:
    """Pareto-smoothed weights (Vehtari et al. 2024) of log-weights, which may be −∞.

    >>> import numpy as np
    >>> found = smooth(np.zeros(100))
    >>> round(found.size), found.log_mean
    (100, 0.0)
    """
    raw = np.asarray(log_weights, np.float64)
    log, k = raw.copy(), math.inf
    inside = np.flatnonzero(np.isfinite(raw))
    if not len(inside):
        return Weights(np.full(len(raw), -math.log(len(raw))), -math.inf, math.inf, 0.0, math.inf)
    found = raw[inside]
    if np.ptp(found) < SAME:
        k = -math.inf if len(inside) >= min(FEWEST, len(raw)) else math.nan  # they have no tail
    elif len(inside) >= FEWEST:
        from arviz_stats.base.array import array_stats  # takes longer to import than JAX

        normalised, tail = array_stats.psislw(-found)
        # The least weight is not in the tail, so it tells by what all were divided.
        least = int(np.argmin(found))
        log[inside], k = normalised + (found[least] - normalised[least]), float(tail)
    total = float(logsumexp(log))
    size = math.exp(2 * total - float(logsumexp(2 * log)))
    error = math.sqrt(max(0.0, 1 / size - 1 / len(log)))
    return Weights(log - total, total - math.log(len(log)), error, size, k)


def effective_size(log_weights: Float[np.ndarray, "*k n"]) -> Float[np.ndarray, "*k"]:
    """The effective sample size of log-weights as they are; 0 where all are −∞."""
    with np.errstate(invalid="ignore"):
        top = log_weights.max(-1, keepdims=True)
        w = np.exp(log_weights - np.where(np.isfinite(top), top, 0.0))
        return np.where(np.isfinite(top[..., 0]), w.sum(-1) ** 2 / np.maximum((w**2).sum(-1), 1e-300), 0.0)
