"""A Markov chain of ten hidden states, whose squares are measured, of which any sites are given."""

from collections.abc import Mapping

import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.tasks._task import Arrays

STEPS = 10
SD = 0.5
PARENTS: dict[str, tuple[str, ...]] = {}
for _i in range(STEPS):
    PARENTS |= {f"theta{_i}": (f"theta{_i - 1}",) if _i else (), f"x{_i}": (f"theta{_i}",)}
DATA = tuple(f"x{i}" for i in range(STEPS))
HOW = "filtered forward and drawn backward on a grid, simulated data"
EDGE, CELLS, CHUNK = 8.0, 1600, 2000
"""The grid of a state: from -8 to 8, five prior sds of the last, in cells of .01."""


def program() -> None:
    """`theta0 ~ N(0, .5^2)`, `theta_i ~ N(theta_{i-1}, .5^2)`, `x_i ~ N(theta_i^2, .5^2)`, i = 0, ..., 9."""
    theta = 0.0
    for i in range(STEPS):
        theta = numpyro.sample(f"theta{i}", dist.Normal(theta, SD))
        numpyro.sample(f"x{i}", dist.Normal(theta**2, SD))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """States that are not given from their grids, the last first, each given the next; then data.

    `p(theta_i | given up to i)` is filtered forward; `p(theta_i | theta_{i+1}, given)` is that times the density of
    the step to theta_{i+1}. A point is uniform in its cell, which is a fiftieth of the sd of a step.
    """
    known = {name: float(np.asarray(value)) for name, value in given.items()}
    width = 2 * EDGE / CELLS
    grid = -EDGE + width * (np.arange(CELLS) + 0.5)
    step = np.exp(-0.5 * ((grid[:, None] - grid[None]) / SD) ** 2)
    filtered: list[np.ndarray] = []
    for i in range(STEPS):
        before = known.get(f"theta{i - 1}", 0.0 if i == 0 else None)
        mass = step @ filtered[-1] if before is None else np.exp(-0.5 * ((grid - before) / SD) ** 2)
        if f"x{i}" in known:
            log_likelihood = -0.5 * ((known[f"x{i}"] - grid**2) / SD) ** 2
            mass = mass * np.exp(log_likelihood - log_likelihood.max())
        filtered.append(mass / mass.sum())
    draws: dict[str, np.ndarray] = {}
    for i in reversed(range(STEPS)):
        if f"theta{i}" in known:
            draws[f"theta{i}"] = np.full(n, known[f"theta{i}"])
            continue
        cells = np.empty(n, int)
        for begin in range(0, n, CHUNK):
            part = slice(begin, min(begin + CHUNK, n))
            mass = np.broadcast_to(filtered[i], (part.stop - begin, CELLS))
            if i + 1 < STEPS:
                mass = mass * np.exp(-0.5 * ((draws[f"theta{i + 1}"][part, None] - grid) / SD) ** 2)
            cumulative = np.cumsum(mass, axis=1)
            level = rng.uniform(size=(part.stop - begin, 1)) * cumulative[:, -1:]
            cells[part] = (cumulative < level).sum(1)
        draws[f"theta{i}"] = grid[np.minimum(cells, CELLS - 1)] + width * rng.uniform(-0.5, 0.5, n)
    for i in range(STEPS):
        draws[f"x{i}"] = draws[f"theta{i}"] ** 2 + SD * rng.normal(size=n)
    return {name: draws[name] for name in PARENTS if name not in known}
