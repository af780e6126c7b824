"""Ranks of the true value among draws, and what they say of a posterior: uniform if it is right."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

Ranks = Int[np.ndarray, " n"]


def rank(x: Float[np.ndarray, "m draws_1 *d"], rng: np.random.Generator) -> Int[np.ndarray, "m *d"]:
    """How many draws are smaller than the first of them; among equal ones the place is drawn."""
    truth, draws = x[:, :1], x[:, 1:]
    return (draws < truth).sum(1) + rng.integers(0, (draws == truth).sum(1) + 1)


def from_mean(centred: Float[np.ndarray, "m draws_1 d"]) -> Float[np.ndarray, "m draws_1"]:
    """Squared Mahalanobis distances from the mean of all draws, which are standardised, by their own covariance.

    The true value is one of them, so that it is exchangeable with the draws and its rank exactly uniform. With many
    parameters the covariance would be mostly noise, and variances alone are used.
    """
    if 10 * centred.shape[2] > centred.shape[1]:
        return np.square(centred).sum(2)
    covariance = centred.transpose(0, 2, 1) @ centred / centred.shape[1] + 1e-6 * np.eye(centred.shape[2])
    return (centred @ np.linalg.inv(covariance) * centred).sum(2)


def central(ranks: Ranks, draws: int, levels: Sequence[float] | np.ndarray) -> Float[np.ndarray, " levels"]:
    """The share of true values inside the central credible intervals of given levels."""
    off = np.abs((ranks + 0.5) / (draws + 1) - 0.5)
    return (off[:, None] <= np.asarray(levels) / 2).mean(0)


def inner(ranks: Ranks, draws: int, levels: Sequence[float] | np.ndarray) -> Float[np.ndarray, " levels"]:
    """The share of true values inside the regions of given levels, by ranks of a distance."""
    return ((ranks + 0.5)[:, None] / (draws + 1) <= np.asarray(levels)).mean(0)


def verdict(ranks: Ranks, draws: int) -> str:
    """What is wrong with a posterior whose ranks of a parameter are not uniform."""
    n, u = len(ranks), (ranks + 0.5) / (draws + 1)
    shift = (u.mean() - 0.5) * math.sqrt(12 * n)
    spread = (np.square(u - 0.5).mean() - 1 / 12) * math.sqrt(180 * n)
    if max(abs(shift), abs(spread)) < 2.5:
        return "wrong in shape"
    if abs(shift) > abs(spread):
        return "too low" if shift > 0 else "too high"
    return "too narrow" if spread > 0 else "too wide"
