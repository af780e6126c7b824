"""Tests of ranks against the uniform distribution, exact and everywhere at once; and of several hypotheses together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats
from scipy.special import gammaln

from cpejax.diagnostics.ranks import Ranks

SMALLEST = 1e-12
"""The smallest tail probability that is told apart from 0."""


@dataclass(frozen=True, eq=False)
class Null:
    """Counts of ranks at most `at`, of `n` ranks that are uniform on 0..draws."""

    at: np.ndarray
    z: np.ndarray
    tails: Float[np.ndarray, "points counts"]
    """Two-sided tail probability of each count 0..n, at each point."""

    def bounds(self, tail: float) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest count whose tail probability is above `tail`."""
        inside = self.tails > tail
        return inside.argmax(1), inside.shape[1] - 1 - inside[:, ::-1].argmax(1)

    def outside(self, tail: float) -> float:
        """The probability that the counts leave these bounds somewhere.

        The counts are a Markov chain,
        `c_k − c_{k−1} | c_{k−1} ~ Binomial(n − c_{k−1}, (z_k − z_{k−1}) / (1 − z_{k−1}))`,
        and the probability that it stays inside is a product of matrices (Säilynoja et al. 2022, algorithm 1).
        """
        n = self.tails.shape[1] - 1
        low, high = self.bounds(tail)
        factorial = gammaln(np.arange(n + 1) + 1.0)
        state, counts, before = np.ones(1), np.zeros(1, int), 0.0
        for z, a, b in zip(self.z, low, high, strict=True):
            new = np.arange(a, b + 1)
            share = (z - before) / (1 - before)
            more = new[None] - counts[:, None]
            k = np.maximum(more, 0)
            rest = n - counts[:, None]
            log = factorial[rest] - factorial[k] - factorial[np.maximum(rest - k, 0)]
            log = log + k * math.log(share) + (rest - k) * math.log1p(-share)
            state = state @ np.where(more >= 0, np.exp(log), 0.0)
            counts, before = new, z
        return max(0.0, 1.0 - float(state.sum()))


@lru_cache(maxsize=8)
def _null(n: int, draws: int) -> Null:
    points = min(draws, 100)
    at = np.unique(np.linspace(0, draws, points + 2).astype(int)[1:-1]) if draws > 1 else np.zeros(1, int)
    z = (at + 1) / (draws + 1)
    counts = np.arange(n + 1)[None]
    below, above = stats.binom.cdf(counts, n, z[:, None]), stats.binom.sf(counts - 1, n, z[:, None])
    return Null(at, z, np.minimum(1.0, 2 * np.minimum(below, above)))


@lru_cache(maxsize=4096)
def _outside(n: int, draws: int, hundredths: int) -> float:
    """By hundredths of a decade, rounded up: the same for many parameters, and never too small."""
    return _null(n, draws).outside(min(1.0, 10 ** (hundredths / 100)) * (1 - 1e-9))


def p_value(ranks: Ranks, draws: int) -> float:
    """The p-value of ranks 0..draws against the uniform distribution, exact.

    The statistic is the smallest two-sided binomial tail probability of the empirical distribution function, over 100
    points.
    """
    null = _null(len(ranks), draws)
    counts = np.searchsorted(np.sort(ranks), null.at, side="right")
    tail = float(null.tails[np.arange(len(counts)), counts].min())
    return _outside(len(ranks), draws, math.ceil(100 * math.log10(max(tail, SMALLEST))))


def p_above(ranks: Ranks, draws: int) -> float:
    """The p-value of ranks 0..draws against more of them above the middle, exact: that of a sign test.

    Other faults than a shift, such as draws that are too narrow, leave it alone.
    """
    above = int((2 * ranks > draws).sum())
    return float(stats.binom.sf(above - 1, len(ranks), ((draws + 1) // 2) / (draws + 1)))


@lru_cache(maxsize=64)
def bands(
    n: int, draws: int, level: float
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"], Float[np.ndarray, " points"]]:
    """Points `z`, and bounds that the distribution function of `n` uniform ranks leaves with probability `level`."""
    null = _null(n, draws)
    low, high = math.log10(SMALLEST), 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if null.outside(10**middle) <= level else (low, middle)
    least, most = null.bounds(10**low)
    return null.z, least / n, most / n


def holm(p: Float[np.ndarray, " m"], level: float) -> Bool[np.ndarray, " m"]:
    """Which of several hypotheses are rejected, with a family-wise error of at most `level` (Holm 1979)."""
    order = np.argsort(p)
    passed = p[order] > level / np.arange(len(p), 0, -1)
    first = int(np.argmax(passed)) if passed.any() else len(p)
    out = np.zeros(len(p), bool)
    out[order[:first]] = True
    return out
