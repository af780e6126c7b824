"""The task `tree`, of which any sites are given."""

from collections.abc import Mapping

import numpy as np

from cpejax.tasks._exact import grid_draws
from cpejax.tasks._task import Arrays
from cpejax.tasks.tree import program

__all__ = ["DATA", "HOW", "PARENTS", "exact", "program"]

DATA = ("x1", "x2", "x3", "x4")
PARENTS: dict[str, tuple[str, ...]] = {"theta1": (), "theta2": ("theta1",), "theta3": ("theta1",)}
PARENTS |= {"x1": ("theta2",), "x2": ("theta2",), "x3": ("theta3",), "x4": ("theta3",)}
HOW = "grid and rejection for the branches, conjugate root, simulated data"

MEASURE = {
    "x1": ("theta2", lambda b: np.sin(b) ** 2, 0.2),
    "x2": ("theta2", lambda b: 0.1 * b**2, 0.2),
    "x3": ("theta3", lambda b: 0.1 * b**2, 0.6),
    "x4": ("theta3", lambda b: np.cos(b) ** 2, 0.1),
}


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """Branches that are not given on a grid of 2000 cells a side, the root, which is conjugate, and data.

    With theta1 integrated out, (theta2, theta3) has covariance [[2, 1], [1, 2]];
    `theta1 | theta2, theta3 ~ N((theta2 + theta3) / 3, 1/3)`.
    """
    known = {name: float(np.asarray(value)) for name, value in given.items()}
    unknown = [name for name in ("theta2", "theta3") if name not in known]

    def log_density(points):
        at = {**known, **dict(zip(unknown, points.T, strict=True))}
        b, c = at["theta2"], at["theta3"]
        if "theta1" in known:
            log_prior = -((b - known["theta1"]) ** 2 + (c - known["theta1"]) ** 2) / 2
        else:
            log_prior = -(b**2 - b * c + c**2) / 3
        misfit = sum(((known[x] - mean(at[of])) / sd) ** 2 for x, (of, mean, sd) in MEASURE.items() if x in known)
        return log_prior - 0.5 * misfit + np.zeros(len(points))

    draws = {name: np.full(n, value) for name, value in known.items()}
    if unknown:
        found = grid_draws(log_density, [(-10.0, 10.0)] * len(unknown), 2000, n, rng)
        draws |= dict(zip(unknown, found.T, strict=True))
    if "theta1" not in known:
        draws["theta1"] = (draws["theta2"] + draws["theta3"]) / 3 + np.sqrt(1 / 3) * rng.normal(size=n)
    for x, (of, mean, sd) in MEASURE.items():
        if x not in known:
            draws[x] = mean(draws[of]) + sd * rng.normal(size=n)
    return {name: draws[name] for name in PARENTS if name not in known}
