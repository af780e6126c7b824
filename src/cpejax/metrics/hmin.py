"""H-min divergence, of entropies of kernel density estimates."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cpejax.metrics.kernels import blocks_of, squares
from cpejax.metrics.samples import Matrix, Score, scale_of, stack, with_null

FOLDS = 5
LEVELS = 20
WIDEST = 2.0
"""Bandwidths are `WIDEST * 2^(-k / 2)`: 2 to .0028 standard deviations of the reference."""
PUBLISHED = np.linspace(0.1, 5, 30)


def hmin(draws: Any, reference: Any, *, method: str = "heldout", seed: int = 1) -> Score:
    """H-min divergence `H((p + q) / 2) - min(H(p), H(q))` with entropies of Gaussian kernel density estimates.

    `H(p)` is minus the mean log density of points of p under a kernel density estimate made from points of p. Smaller
    is better; a perfect sampler has the null.

    **Arguments:**

    - `draws`, `reference`: two sets of draws (see `cpejax.metrics`).
    - `method`: `"heldout"`, ours: coordinates standardised by the reference; each half of the points is scored by the
        estimate made from the other half, and the bandwidth (`2^(1 - k/2)` for k = 0, ..., 19) is chosen on half
        of the scored points for the other; kernels have wider tails than a Gaussian's. `"published"`, as in
        Dirmeier et al. 2023, for comparison with the paper: raw coordinates, bandwidth from `linspace(.1, 5, 30)`
        by 5-fold cross-validation, score on the very points the estimate was made from, mean over five random
        mixtures. It cannot see structure finer than .1.
    - `seed`: of the random halves.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> score = hmin(rng.normal(size=(400, 2)), 3 + rng.normal(size=(800, 2)))
    >>> score.value > 0.3 > score.null
    True

    References: Zhao et al. 2022, Comparing distributions by measuring differences that affect decision making;
    Dirmeier et al. 2023, Simulation-based inference using surjective sequential neural likelihood estimation.
    """
    if method not in ("heldout", "published"):
        raise ValueError(f"hmin(method={method!r}): expected 'heldout' or 'published'")
    x, y = stack(draws, reference, least=16)
    fixed = y.min(0) == y.max(0)
    if np.any(x[:, fixed] != y[0, fixed]):
        where = int(np.flatnonzero(fixed & (x != y[0]).any(0))[0])
        raise ValueError(
            f"column {where} of the reference is the constant {y[0, where]}, and the draws are not: H-min compares"
            " densities, which a constant has not; leave that column out, or use c2st"
        )
    x, y = x[:, ~fixed], y[:, ~fixed]
    if not x.shape[1]:
        return Score(0.0, 0.0)
    if method == "published":
        return with_null(_hmin_published, x, y, seed)
    centre, scale = y.mean(0), scale_of(y)
    return with_null(_hmin_heldout, (x - centre) / scale, (y - centre) / scale, seed)


def _hmin_heldout(x: Matrix, y: Matrix, rng: np.random.Generator) -> float:
    half, quarter = len(x) // 2, len(x) // 4
    x, y = rng.permutation(x), rng.permutation(y)
    entropies = np.zeros(3)
    for made, scored in ((slice(0, half), slice(half, 2 * half)), (slice(half, 2 * half), slice(0, half))):
        mixture = np.concatenate([x[made][:quarter], y[made][:quarter]])
        both = np.stack([_log_kde(mixture, x[scored]), _log_kde(mixture, y[scored])], axis=1).reshape(-1, LEVELS)
        tables = (both, _log_kde(x[made], x[scored]), _log_kde(y[made], y[scored]))
        entropies += [_crossed_entropy(table) / 2 for table in tables]
    return float(entropies[0] - min(entropies[1:]))


def _crossed_entropy(log_density: Float[np.ndarray, "n levels"]) -> float:
    """The bandwidth from one half of the points, the score from the other, and the other way."""
    one, other = log_density[: len(log_density) // 2], log_density[len(log_density) // 2 :]
    return -float(other[:, one.mean(0).argmax()].mean() + one[:, other.mean(0).argmax()].mean()) / 2


def _log_kde(made: Matrix, scored: Matrix) -> Float[np.ndarray, "n levels"]:
    """Log density of `scored` under the estimates made from `made`, for every bandwidth of the geometric grid.

    A kernel is `.9 N(0, h^2) + .09 N(0, (4 h)^2) + .01 N(0, (16 h)^2)` (no wider than the widest bandwidth). With thin
    Gaussian tails a few draws apart from the others decide the entropy: two moons' null is .010, without them .045.
    """
    table = np.asarray(_geometric(jnp.asarray(made, jnp.float32), jnp.asarray(blocks_of(scored))), np.float64)
    table = table.reshape(-1, LEVELS)[: len(scored)]
    level = np.arange(LEVELS)
    wider = [np.log(weight) + table[:, np.maximum(level - k, 0)] for weight, k in ((0.9, 0), (0.09, 4), (0.01, 8))]
    return np.logaddexp.reduce(wider)


@jax.jit
def _geometric(made: Float[Array, "m d"], blocks: Float[Array, "b r d"]) -> Float[Array, "b r levels"]:
    """The kernel of bandwidth `h / sqrt 2` is the square of that of h, so one `exp` serves ten bandwidths."""
    m, d = made.shape
    bandwidths = WIDEST * 2.0 ** (-jnp.arange(LEVELS) / 2)

    def block(rows):
        square = squares(rows, made)
        nearest = square.min(1)
        gap = square - nearest[:, None]
        sums = []
        for start in range(0, LEVELS, 10):
            kernel = jnp.exp(-gap / (2 * bandwidths[start] ** 2))
            for _ in range(10):
                sums.append(kernel.sum(1))
                kernel = kernel * kernel
        log_sum = jnp.log(jnp.stack(sums, axis=1)) - nearest[:, None] / (2 * bandwidths**2)
        return log_sum - jnp.log(m) - d / 2 * jnp.log(2 * jnp.pi * bandwidths**2)

    return jax.lax.map(block, blocks)


def _hmin_published(x: Matrix, y: Matrix, rng: np.random.Generator) -> float:
    h_x, h_y = (-_in_sample(z, [z])[0] for z in (x, y))
    mixed = []
    for _ in range(5):
        pick_x, pick_y = (rng.permutation(len(z))[: len(z) // 2] for z in (x, y))
        score_x, score_y = _in_sample(np.concatenate([x[pick_x], y[pick_y]]), [x, y])
        mixed.append(-(score_x + score_y) / 2)
    return float(np.mean(mixed) - min(h_x, h_y))


def _in_sample(made: Matrix, scored: list[Matrix]) -> list[float]:
    """Mean log density of each set under the estimate made from `made`, its bandwidth chosen by cross-validation."""
    n = len(made)
    sizes = np.full(FOLDS, n // FOLDS) + (np.arange(FOLDS) < n % FOLDS)  # consecutive folds, as scikit-learn cuts them
    edges = np.concatenate([[0], np.cumsum(sizes)])
    total = np.zeros(len(PUBLISHED))
    for low, high in pairwise(edges):
        rest = np.concatenate([made[:low], made[high:]])
        total += _log_kde_at(rest, made[low:high], PUBLISHED).sum(0) / FOLDS
    best = PUBLISHED[[total.argmax()]]
    return [float(_log_kde_at(made, points, best).mean()) for points in scored]


def _log_kde_at(made: Matrix, scored: Matrix, bandwidths: Float[np.ndarray, " k"]) -> Float[np.ndarray, "n k"]:
    table = _at(jnp.asarray(made, jnp.float32), jnp.asarray(blocks_of(scored)), jnp.asarray(bandwidths, jnp.float32))
    return np.asarray(table, np.float64).reshape(-1, len(bandwidths))[: len(scored)]


@jax.jit
def _at(
    made: Float[Array, "m d"], blocks: Float[Array, "b r d"], bandwidths: Float[Array, " k"]
) -> Float[Array, "b r k"]:
    m, d = made.shape

    def block(rows):
        square = squares(rows, made)
        nearest = square.min(1)
        gap = square - nearest[:, None]
        rate = 1 / (2 * bandwidths**2)
        sums = jnp.stack([jnp.exp(-gap * rate[k]).sum(1) for k in range(len(bandwidths))], axis=1)
        return jnp.log(sums) - nearest[:, None] * rate - jnp.log(m) - d / 2 * jnp.log(2 * jnp.pi * bandwidths**2)

    return jax.lax.map(block, blocks)
