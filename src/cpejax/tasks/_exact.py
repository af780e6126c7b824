"""Draws from densities on a grid or around a mode, and rejection sampling, in NumPy and double precision."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize

LogDensity = Callable[[Float[np.ndarray, "m d"]], Float[np.ndarray, " m"]]
Proposal = Callable[[int], tuple[Float[np.ndarray, "m d"], Float[np.ndarray, " m"]]]


def rejection(propose: Proposal, n: int, rng: np.random.Generator, *, most: int = 10_000_000) -> np.ndarray:
    """`n` exact draws: keep each proposed point with its probability.

    **Arguments:**

    - `propose`: `m -> (points (m, d), acceptance probabilities (m,))`.
    - `most`: the maximum number of proposals before giving up.
    """
    kept: list[np.ndarray] = []
    have, tried, rate = 0, 0, 0.5
    while have < n:
        if tried >= most:
            raise ValueError(
                f"only {have} of {n} posterior draws after {tried} proposals: the observation is all but impossible"
                " under the model; check it, or sample with sampler='slice'"
            )
        m = min(int(1.2 * (n - have) / rate) + 100, 1_000_000)
        points, accept = propose(m)
        points = points[rng.uniform(size=m) < accept]
        kept.append(points)
        have, tried = have + len(points), tried + m
        rate = max(have / tried, 1e-5)
    return np.concatenate(kept)[:n]


def grid_draws(
    log_density: LogDensity, box: Sequence[tuple[float, float]], cells: int, n: int, rng: np.random.Generator
) -> Float[np.ndarray, "n d"]:
    """`n` draws from a density on a box: a cell by its mass, a point in the cell, then rejection to the density itself.

    The proposal q is constant on each cell (`cells` a side) and mixed with 1 % of its neighbours' average, so a cell
    whose midpoint misses its mass is still reached. Rejection with `p / (c q)` removes what the grid leaves; c is the
    largest ratio seen in a pilot of 100,000 draws, so the draws are exact up to the mass (below 1e-5) beyond it.
    """
    low, high = np.array(box, float).T
    d = len(box)
    step = (high - low) / cells
    axes = [lo + h * (np.arange(cells) + 0.5) for lo, h in zip(low, step, strict=True)]
    middle = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    log_mass = np.concatenate([log_density(part) for part in np.array_split(middle, max(1, len(middle) // 200_000))])
    peak = log_mass.max()
    mass = np.exp(log_mass - peak)
    table = mass.reshape((cells,) * d)
    spread = sum(np.roll(table, shift, axis) for axis in range(d) for shift in (-1, 1)) / (2 * d)
    mass = (0.99 * table + 0.01 * spread).ravel()
    cumulative = np.cumsum(mass)

    def propose(m: int) -> tuple[np.ndarray, np.ndarray]:
        cell = np.searchsorted(cumulative, rng.uniform(size=m) * cumulative[-1], side="right")
        cell = np.minimum(cell, len(mass) - 1)
        points = middle[cell] + step * rng.uniform(-0.5, 0.5, size=(m, d))
        return points, np.exp(log_density(points) - peak) / (bound * mass[cell])

    bound = 1.0  # until the pilot has found the largest ratio
    bound = propose(100_000)[1].max()
    return rejection(propose, n, rng)


def around_mode(
    log_density: LogDensity, start: Float[np.ndarray, " d"], n: int, rng: np.random.Generator, *, pilot: int = 10_000
) -> Float[np.ndarray, "n d"]:
    """`n` draws from a density with one mode that is nearly Gaussian: rejection from a multivariate t (5 degrees).

    The mode is climbed to from `start`; location and scale of the t are first those of the curvature there and then,
    twice, those of a weighted pilot sample. Rejection with `p / (c q)` removes what is left; c is the largest ratio in
    a last pilot, so the draws are exact up to the mass (below 1e-4) beyond it.
    """
    d = len(start)
    shifts = np.concatenate([np.eye(d), -np.eye(d)])

    def gradient(points, size=1e-4):
        around = log_density((points[:, None] + size * shifts).reshape(-1, d)).reshape(-1, 2, d)
        return (around[:, 0] - around[:, 1]) / (2 * size)

    found = minimize(lambda z: -log_density(z[None])[0], start, jac=lambda z: -gradient(z[None])[0], method="BFGS")
    centre = found.x
    gradients = gradient(centre + 1e-3 * shifts)
    curvature = -(gradients[:d] - gradients[d:]) / 2e-3
    values, vectors = np.linalg.eigh((curvature + curvature.T) / 2)
    factor = vectors / np.sqrt(np.maximum(values, 1e-6))

    def propose(m):
        noise = rng.standard_normal((m, d)) / np.sqrt(rng.chisquare(5, (m, 1)) / 5)
        points = centre + noise @ factor.T
        log_proposal = -(5 + d) / 2 * np.log1p((noise**2).sum(1) / 5)
        return points, log_density(points) - log_proposal

    for _ in range(2):
        points, log_weight = propose(pilot)
        weight = np.exp(log_weight - log_weight.max())
        weight /= weight.sum()
        centre = weight @ points
        factor = np.linalg.cholesky((weight[:, None] * (points - centre)).T @ (points - centre))
    bound = propose(pilot)[1].max()

    def accepted(m):
        points, log_weight = propose(m)
        return points, np.exp(log_weight - bound)

    return rejection(accepted, n, rng)
