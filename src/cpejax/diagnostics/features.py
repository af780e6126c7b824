"""What a regression and a distance read of data: robust features, and summary statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from cpejax.coordinates.standardise import Columns
from cpejax.program.graph import Graph

LINEAR = 15.0
"""How many robust standard deviations from the median a feature is linear; it grows by the logarithm beyond."""
COLUMNS = 2_000_000
"""Maximum number of values of regression features; columns of wide data are thinned to it."""


class Features:
    """Columns to values of order one that are unbounded and monotone, whatever their scale and tails.

    Each is centred and scaled as `Standardise` does it for networks, but in float64, and instead of clipped at ±15
    logarithmic beyond. The normal scores of heavy-tailed columns grow by the logarithm beyond the reference rows, as
    fast as they do just inside, where those for networks end: what is further away must have other features.
    """

    def __init__(self, rows: Float[np.ndarray, "n p"]):
        self.columns = Columns.of(rows)

    def __call__(self, x: Float[np.ndarray, "m p"]) -> Float[np.ndarray, "m f"]:
        """All features: the columns, then the scores of the heavy ones."""
        t = (x - self.columns.centre) / self.columns.scale
        size = np.maximum(np.abs(t), LINEAR)
        linear = np.where(np.abs(t) <= LINEAR, t, np.sign(t) * LINEAR * (1 + np.log(size / LINEAR)))
        heavy = zip(self.columns.heavy, self.columns.knots, strict=True)
        return np.column_stack([linear, *(self._score(x[:, i], knots) for i, knots in heavy)])

    def _score(self, x: np.ndarray, knots: np.ndarray) -> np.ndarray:
        scores = self.columns.scores
        score = np.interp(x, knots, scores)
        inner = max(float(scores[-1]) - 1, 0.0)  # a standard deviation further in than the last score
        for sign, at, inside in ((1, knots[-1], inner), (-1, knots[0], -inner)):
            before = float(np.interp(inside, scores, knots))
            width = max(abs(at - before), 1e-9 * max(abs(at), 1e-9))
            # Of a log-normal column with a large sd, the score of ten times as much is less than one further.
            log_growth = max(1.0, math.log(at / before)) if at * before > 0 and abs(at) > abs(before) else 1.0
            score = score + sign * np.log1p(np.maximum(sign * (x - at), 0.0) / width) / log_growth
        return score


def summary_statistics(x: Float[np.ndarray, "n ..."], event: int) -> dict[str, Float[np.ndarray, " n"]]:
    """Summary statistics of `n` values of a site whose members have `event` trailing axes."""
    flat = x.reshape(len(x), -1).astype(np.float64)
    if flat.shape[1] == 1:
        return {"value": flat[:, 0]}
    out = {"mean": flat.mean(1), "sd": flat.std(1), "smallest": flat.min(1), "largest": flat.max(1)}
    if event == 1 and x.shape[-1] >= 8:  # it may be a series
        series = x.reshape(len(x), -1, x.shape[-1]).astype(np.float64)
        series = series - series.mean(-1, keepdims=True)
        both, own = (series[..., 1:] * series[..., :-1]).sum((1, 2)), np.square(series).sum((1, 2))
        out["autocorrelation"] = both / np.where(own > 0, own, 1.0)
    return out


def regression_features(graph: Graph, data: Mapping[str, np.ndarray]) -> Float[np.ndarray, "n p"]:
    """What a regression reads of data: columns, their squares, principal components and summary statistics.

    All have mean 0 and variance 1. They are made of data alone, so that ranks given all data stay uniform.
    """
    n = len(data[graph.data[0]])
    columns = np.concatenate([data[name].reshape(n, -1) for name in graph.data], axis=1).astype(np.float64)
    most = max(20, min(500, COLUMNS // (3 * n)))
    if columns.shape[1] > most:
        columns = columns[:, np.unique(np.linspace(0, columns.shape[1] - 1, most).astype(int))]
    statistics = [
        x
        for name in graph.data
        if data[name].size > n
        for x in summary_statistics(data[name], len(graph.sites[name].event_shape)).values()
    ]
    linear = _unit(Features(columns)(columns))
    parts = [linear, np.square(linear)]
    if linear.shape[1] > 2:
        vectors, sizes, _ = np.linalg.svd(linear, full_matrices=False)
        parts.append(vectors[:, :20] * sizes[:20])
    if statistics:
        table = np.stack(statistics, 1)
        parts.append(Features(table)(table))
    found = _unit(np.concatenate(parts, axis=1))
    return found[:, found.std(0) > 0.5]  # a constant column tells nothing


def _unit(x: np.ndarray) -> np.ndarray:
    sd = x.std(0)
    return np.clip((x - x.mean(0)) / np.where(sd > 1e-9, sd, np.inf), -6.0, 6.0)
