"""How far rows are from other rows, and how unusual that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from cpejax.diagnostics.features import Features

NEIGHBOURS = 5
"""Number of nearest neighbours, over which a distance is the mean."""


@dataclass(frozen=True, eq=False)
class Distances:
    """How far given rows are from simulated ones, how far simulated ones are from one another, and p-values."""

    distance: Float[np.ndarray, " given"]
    simulated: Float[np.ndarray, " m"]
    p: Float[np.ndarray, " given"]

    @property
    def worst(self) -> int:
        """The index of the row with the smallest p-value, and among those of the furthest."""
        return int(np.argmin(self.p - 1e-6 * self.distance))


def compare(simulated: Float[np.ndarray, "n p"], given: Float[np.ndarray, "_ p"]) -> Distances:
    """Distances from a third of the simulated rows: of the given ones, and, as their null, of the other simulated."""
    third = max(10, len(simulated) // 3)
    null, distance = _distances(simulated[:third], simulated[third:], given)
    return Distances(distance, null, _p_values(distance, null))


def _distances(reference: Float[np.ndarray, "r p"], *others: Float[np.ndarray, "_ p"]) -> list[Float[np.ndarray, " _"]]:
    """How far rows are from the reference rows: the mean distance to the nearest of them.

    Columns are standardised robustly, without bounds, so that the distance grows with any value beyond the reference;
    rotated to no more than 50 principal components of unit variance; and what these leave out becomes one more: its
    length.
    """
    standardise = Features(np.asarray(reference, np.float64))
    features = [standardise(np.asarray(x, np.float64)) for x in (reference, *others)]
    centre = features[0].mean(0)
    _, scale, axes = np.linalg.svd(features[0] - centre, full_matrices=False)
    keep = max(1, min(50, len(reference) // 4, int((scale > 1e-6 * max(scale[0], 1e-30)).sum())))
    axes, scale = axes[:keep], np.maximum(scale[:keep], 1e-12) / math.sqrt(len(reference))

    def coordinates(x: np.ndarray) -> np.ndarray:
        along = (x - centre) @ axes.T
        rest = np.linalg.norm(x - centre - along @ axes, axis=1)
        return np.concatenate([along / scale, rest[:, None] / max(unit, 1e-6)], axis=1)

    unit = 1.0
    unit = float(np.median(coordinates(features[0])[:, -1]))
    inside = coordinates(features[0])
    out = []
    for x in features[1:]:
        y = coordinates(x)
        squares = np.square(y).sum(1)[:, None] + np.square(inside).sum(1) - 2 * y @ inside.T
        nearest = np.sort(np.maximum(squares, 0.0), axis=1)[:, : min(NEIGHBOURS, len(inside))]
        out.append(np.sqrt(nearest).mean(1))
    return out


def _p_values(distance: np.ndarray, simulated: np.ndarray) -> np.ndarray:
    """The share of simulated distances that are as large; exact, as an observation that was simulated is one of them.

    Beyond the largest simulated distance, a Pareto tail (Hill's estimator on the largest tenth) tells far from farther.
    """
    p = (1 + (simulated >= distance[:, None]).sum(1)) / (len(simulated) + 1)
    tail = np.sort(simulated)[-max(5, len(simulated) // 10) :]
    threshold = max(float(tail[0]), 1e-12)
    tail_index = max(float(np.log(np.maximum(tail, 1e-12) / threshold).mean()), 1e-3)
    beyond = len(tail) / len(simulated) * np.maximum(distance / threshold, 1.0) ** (-1 / tail_index)
    return np.where(distance > simulated.max(), np.minimum(p, beyond), p)
