"""How far draws are from a reference posterior: C2ST, H-min, MMD, sliced Wasserstein, errors of moments.

Every metric takes `(draws, reference)`: matrices `(n, d)`, vectors `(n,)`, dicts `{site: (n, *shape)}`, or ArviZ
DataTrees (their `posterior`). The longer set is cut to the length of the shorter by a fixed random choice. A metric
whose value for a perfect sampler is not known in advance returns a `Score`: the value, and beside it the *null*, the
same metric between two disjoint parts of the reference of the same size.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

__all__ = ["Moments", "Score", "c2st", "hmin", "mmd", "moments", "sliced_wasserstein"]

Matrix = Float[np.ndarray, "_ _"]
FOLDS = 5


class Score(NamedTuple):
    """A metric's value and its null: the value between two disjoint parts of the reference."""

    value: float
    null: float


# ---------------------------------------------------------------------------------------------------------------- C2ST


def c2st(draws: Any, reference: Any, *, method: str = "fast", seed: int = 1) -> float:
    """Classifier two-sample test: how often a classifier tells draws from reference; .5 is perfect, 1 the worst.

    Both sets are z-scored by the reference and labelled; a network with two hidden layers of `10 d` ReLU units is
    trained on four folds and tested on the fifth, five times over; the value is the mean accuracy. With n draws on
    each side the null is .5 with standard deviation `.5 / sqrt(2 n)` (.0035 at n = 10,000).

    Arguments:
        draws, reference: two sets of draws (see the module).
        method: `"mlp"` is the published definition: scikit-learn's `MLPClassifier`, Adam, up to 10,000 epochs,
            stopped by its training loss. `"fast"` trains the five networks together in one compiled program with
            larger steps and fewer of them; see docs/metrics.md for how closely the two agree. Its folds hold equally
            many points of both sets: with the published ones, whichever set has more points in training has fewer in
            the test, so that a classifier that sees no difference scores a little below .5.
        seed: of the folds and the networks.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> bool(c2st(rng.normal(size=500), rng.normal(size=500) + 3) > 0.85)
    True

    References: Lopez-Paz and Oquab 2017, Revisiting classifier two-sample tests; Lueckmann et al. 2021.
    """
    x, y = _pair(draws, reference, least=10)
    if method not in ("fast", "mlp"):
        raise ValueError(f"c2st(method={method!r}): expected 'fast' or 'mlp'")
    centre, scale = y.mean(0), _scale(y)
    points = np.concatenate([(y - centre) / scale, (x - centre) / scale])
    label = np.concatenate([np.zeros(len(y)), np.ones(len(x))])
    return _c2st_sklearn(points, label, seed) if method == "mlp" else _c2st_jax(points, label, seed)


def _c2st_sklearn(points: Matrix, label: Float[np.ndarray, " n"], seed: int) -> float:
    from sklearn.model_selection import KFold, cross_val_score
    from sklearn.neural_network import MLPClassifier

    width = 10 * points.shape[1]
    network = MLPClassifier(hidden_layer_sizes=(width, width), max_iter=10_000, random_state=seed)
    folds = KFold(n_splits=FOLDS, shuffle=True, random_state=seed)
    return float(np.mean(cross_val_score(network, points, label, cv=folds, scoring="accuracy")))


def _c2st_jax(points: Matrix, label: Float[np.ndarray, " n"], seed: int) -> float:
    from sklearn.model_selection import StratifiedKFold

    split = list(StratifiedKFold(n_splits=FOLDS, shuffle=True, random_state=seed).split(points, label))
    longest = max(len(train) for train, _ in split)
    # Folds differ by at most one point: the shorter ones see one of theirs twice.
    train = np.stack([np.resize(train, longest) for train, _ in split])
    test = np.zeros((FOLDS, len(points)), bool)
    for fold, (_, held_out) in enumerate(split):
        test[fold, held_out] = True
    right = _cross_validate(
        jax.random.key(seed), jnp.asarray(points, jnp.float32), jnp.asarray(label, jnp.float32), jnp.asarray(train)
    )
    right = np.asarray(right)
    return float(np.mean([right[fold][test[fold]].mean() for fold in range(FOLDS)]))


def _logits(weights: list[tuple[Array, Array]], x: Float[Array, "n d"]) -> Float[Array, " n"]:
    *hidden, (last, bias) = weights
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    return (x @ last + bias)[:, 0]


def _initial(key: Array, sizes: tuple[int, ...]) -> list[tuple[Array, Array]]:
    """Glorot's uniform weights and biases, as scikit-learn draws them (the output layer's are smaller)."""
    weights = []
    for layer_key, (a, b) in zip(jax.random.split(key, len(sizes) - 1), pairwise(sizes), strict=True):
        bound = np.sqrt((2.0 if b == 1 else 6.0) / (a + b))
        w = jax.random.uniform(layer_key, (a + 1, b), minval=-bound, maxval=bound)
        weights.append((w[:-1], w[-1]))
    return weights


@partial(jax.jit, static_argnames=("batch", "epochs", "rates", "decay", "tolerance", "patience"))
def _cross_validate(
    key: Array,
    points: Float[Array, "n d"],
    label: Float[Array, " n"],
    train: Int[Array, "folds m"],
    batch: int = 250,
    epochs: int | None = None,
    rates: tuple[float, ...] = (5e-3, 1e-3),
    decay: float = 1e-4,
    tolerance: float = 1e-4,
    patience: int = 10,
) -> Bool[Array, "folds n"]:
    """Train one network a fold; whether each of the points is then classified rightly.

    Adam with scikit-learn's penalty and rule: a rate has done its work when for ten epochs the training loss has not
    fallen by 1e-4. The first rate is five times scikit-learn's, to be quick, and the second is its own, to be as fine.
    """
    folds, m = train.shape
    d = points.shape[1]
    batch = min(batch, m)
    steps = m // batch
    # The wider the network, the dearer an epoch and the sooner it has learned its points by heart.
    epochs = epochs or int(np.clip(8000 / d**2, 40, 400))

    def loss(weights, index):
        z, t = _logits(weights, points[index]), label[index]
        return jnp.mean(jax.nn.softplus(z) - t * z) + 0.5 * decay / batch * sum(jnp.sum(w**2) for w, _ in weights)

    def step(state, index):
        weights, first, second, count, rate = state
        count = count + 1
        value, slope = jax.value_and_grad(loss)(weights, index)
        first = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, first, slope)
        second = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g**2, second, slope)
        size = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        weights = jax.tree.map(lambda w, a, b: w - size * a / (jnp.sqrt(b) + 1e-8), weights, first, second)
        return (weights, first, second, count, rate), value

    def epoch(carry):
        number, key, state, best, stale, phase = carry
        key, *keys = jax.random.split(key, folds + 1)
        order = jax.vmap(jax.random.permutation)(jnp.stack(keys), train)[:, : steps * batch]
        order = order.reshape(folds, steps, batch).swapaxes(0, 1)
        rate = jnp.append(jnp.asarray(rates), 0.0)[phase]  # 0: this fold is done, its weights stay
        state, values = jax.lax.scan(jax.vmap(step), (*state[:-1], rate), order)
        value = values.mean(0)
        stale = jnp.where(value > best - tolerance, stale + 1, 0)
        phase = jnp.minimum(phase + (stale > patience), len(rates))
        return number + 1, key, state, jnp.minimum(best, value), jnp.where(stale > patience, 0, stale), phase

    start_key, key = jax.random.split(key)
    weights = jax.vmap(partial(_initial, sizes=(d, 10 * d, 10 * d, 1)))(jax.random.split(start_key, folds))
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = (weights, zeros, zeros, jnp.zeros(folds), jnp.zeros(folds))
    carry = (0, key, state, jnp.full(folds, jnp.inf), jnp.zeros(folds, int), jnp.zeros(folds, int))
    go_on = lambda carry: (carry[0] < epochs) & jnp.any(carry[-1] < len(rates))  # noqa: E731
    weights = jax.lax.while_loop(go_on, epoch, carry)[2][0]
    return jax.lax.map(lambda w: (_logits(w, points) > 0) == (label > 0.5), weights)


# --------------------------------------------------------------------------------------------------------------- H-min

LEVELS = 20
WIDEST = 2.0  # bandwidths WIDEST * 2^(-k / 2): 2 to .0028 standard deviations of the reference
PUBLISHED = np.linspace(0.1, 5, 30)
ROWS = 64  # of a distance matrix at a time: they fit the processor's cache, and memory does not grow with n^2


def hmin(draws: Any, reference: Any, *, method: str = "heldout", seed: int = 1) -> Score:
    """H-min divergence `H((p + q) / 2) - min(H(p), H(q))` with entropies of Gaussian kernel density estimates.

    `H(p)` is minus the mean log density of points of p under a kernel density estimate made from points of p. Smaller
    is better; a perfect sampler has the null.

    Arguments:
        draws, reference: two sets of draws (see the module).
        method: `"heldout"`, ours: coordinates standardised by the reference; each half of the points is scored by the
            estimate made from the other half, and the bandwidth (`2^(1 - k/2)` for k = 0, ..., 19) is chosen on half
            of the scored points for the other; kernels have wider tails than a Gaussian's. `"published"`, as in
            Dirmeier et al. 2023, for comparison with the paper: raw coordinates, bandwidth from `linspace(.1, 5, 30)`
            by 5-fold cross-validation, score on the very points the estimate was made from, mean over five random
            mixtures. It cannot see structure finer than .1.
        seed: of the random halves.

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
    x, y = _stack(draws, reference, least=16)
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
        return _with_null(_hmin_published, x, y, seed)
    centre, scale = y.mean(0), _scale(y)
    return _with_null(_hmin_heldout, (x - centre) / scale, (y - centre) / scale, seed)


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
    """The bandwidth from one half of the points, the score from the other, both ways round."""
    one, other = log_density[: len(log_density) // 2], log_density[len(log_density) // 2 :]
    return -float(other[:, one.mean(0).argmax()].mean() + one[:, other.mean(0).argmax()].mean()) / 2


def _log_kde(made: Matrix, scored: Matrix) -> Float[np.ndarray, "n levels"]:
    """Log density of `scored` under the estimates made from `made`, for every bandwidth of the geometric grid.

    A kernel is `.9 N(0, h^2) + .09 N(0, (4 h)^2) + .01 N(0, (16 h)^2)` (no wider than the widest bandwidth). With thin
    Gaussian tails a few draws apart from the others decide the entropy: two moons' null was .045 and is .010.
    """
    shape = (-(-len(scored) // ROWS), ROWS, scored.shape[1])
    rows = np.resize(scored, shape).astype(np.float32)
    table = np.asarray(_geometric(jnp.asarray(made, jnp.float32), jnp.asarray(rows)), np.float64)
    table = table.reshape(-1, LEVELS)[: len(scored)]
    level = np.arange(LEVELS)
    wider = [np.log(weight) + table[:, np.maximum(level - k, 0)] for weight, k in ((0.9, 0), (0.09, 4), (0.01, 8))]
    return np.logaddexp.reduce(wider)


def _squares(rows: Float[Array, "r d"], made: Float[Array, "m d"]) -> Float[Array, "r m"]:
    """Squared distances by differences: the expansion `a^2 - 2ab + b^2` has no digits left at small bandwidths."""
    columns = made.T  # contiguous
    return sum((rows[:, j, None] - columns[j]) ** 2 for j in range(rows.shape[1]))  # type: ignore[return-value]


@jax.jit
def _geometric(made: Float[Array, "m d"], blocks: Float[Array, "b r d"]) -> Float[Array, "b r levels"]:
    """The kernel of bandwidth `h / sqrt 2` is the square of that of h, so one `exp` serves ten bandwidths."""
    m, d = made.shape
    bandwidths = WIDEST * 2.0 ** (-jnp.arange(LEVELS) / 2)

    def block(rows):
        square = _squares(rows, made)
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
    shape = (-(-len(scored) // ROWS), ROWS, scored.shape[1])
    rows = np.resize(scored, shape).astype(np.float32)
    table = _at(jnp.asarray(made, jnp.float32), jnp.asarray(rows), jnp.asarray(bandwidths, jnp.float32))
    return np.asarray(table, np.float64).reshape(-1, len(bandwidths))[: len(scored)]


@jax.jit
def _at(
    made: Float[Array, "m d"], blocks: Float[Array, "b r d"], bandwidths: Float[Array, " k"]
) -> Float[Array, "b r k"]:
    m, d = made.shape

    def block(rows):
        square = _squares(rows, made)
        nearest = square.min(1)
        gap = square - nearest[:, None]
        rate = 1 / (2 * bandwidths**2)
        sums = jnp.stack([jnp.exp(-gap * rate[k]).sum(1) for k in range(len(bandwidths))], axis=1)
        return jnp.log(sums) - nearest[:, None] * rate - jnp.log(m) - d / 2 * jnp.log(2 * jnp.pi * bandwidths**2)

    return jax.lax.map(block, blocks)


# ----------------------------------------------------------------------------------------------------------- distances


def mmd(draws: Any, reference: Any, *, seed: int = 1) -> Score:
    """Maximum mean discrepancy, `sqrt(mean k(x, x') + mean k(y, y') - 2 mean k(x, y))`; 0 for equal distributions.

    Coordinates are standardised by the reference; k is the mean of five Gaussian kernels with bandwidths 1/4, 1/2, 1,
    2, 4 times the median distance within the reference. Pairs of a point with itself count, so the value is positive
    and the null is about `1 / sqrt(n)`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> score = mmd(rng.normal(size=(500, 2)), 1 + rng.normal(size=(1000, 2)))
    >>> score.value > 3 * score.null
    True

    Reference: Gretton et al. 2012, A kernel two-sample test.
    """
    x, y = _standardised(draws, reference)
    sample = y[np.random.default_rng(seed).permutation(len(y))[:1000]]
    distance = np.sqrt(((sample[:, None] - sample[None]) ** 2).sum(-1))
    median = float(np.median(distance[np.triu_indices(len(sample), 1)])) or 1.0
    return _with_null(lambda x, y, _: _mmd(x, y, median), x, y, seed)


def _mmd(x: Matrix, y: Matrix, median: float) -> float:
    square = _mean_kernel(x, x, median) + _mean_kernel(y, y, median) - 2 * _mean_kernel(x, y, median)
    return float(np.sqrt(max(square, 0.0)))


def _mean_kernel(x: Matrix, y: Matrix, median: float) -> float:
    count = -(-len(x) // ROWS)
    blocks = np.resize(x, (count, ROWS, x.shape[1])).astype(np.float32)
    rows = np.asarray(_kernel_rows(jnp.asarray(blocks), jnp.asarray(y, jnp.float32), median), np.float64)
    return float(rows.ravel()[: len(x)].mean())


@jax.jit
def _kernel_rows(
    blocks: Float[Array, "b r d"], y: Float[Array, "m d"], median: Float[Array, ""] | float
) -> Float[Array, "b r"]:
    def block(rows):
        kernel = jnp.exp(-_squares(rows, y) / (2 * (4 * median) ** 2))
        total = kernel.mean(1)
        for _ in range(4):  # half the bandwidth is the fourth power
            kernel = kernel**4
            total += kernel.mean(1)
        return total / 5

    return jax.lax.map(block, blocks)


def sliced_wasserstein(draws: Any, reference: Any, *, directions: int = 500, seed: int = 1) -> Score:
    """Sliced 2-Wasserstein distance: root mean square over random directions of the distance of the projections.

    In units of the reference's standard deviations; for two samples of equal size a projection's distance is
    `sqrt(mean (sort(x) - sort(y))^2)`. The null falls like `1 / sqrt(n)`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> score = sliced_wasserstein(1 + rng.normal(size=500), rng.normal(size=1000))
    >>> bool(0.8 < score.value < 1.2)
    True

    Reference: Bonneel et al. 2015, Sliced and Radon Wasserstein barycenters of measures.
    """
    x, y = _standardised(draws, reference)

    def distance(x, y, rng):
        axes = rng.normal(size=(x.shape[1], directions))
        axes /= np.linalg.norm(axes, axis=0)
        return float(np.sqrt(np.mean((np.sort(x @ axes, axis=0) - np.sort(y @ axes, axis=0)) ** 2)))

    return _with_null(distance, x, y, seed)


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
    x, y = _standardised(draws, reference)

    def correlation(z):
        z = (z - z.mean(0)) / _scale(z)
        return np.triu(z.T @ z / len(z), 1)

    return Moments(
        mean=_with_null(lambda x, y, _: float(np.abs(x.mean(0) - y.mean(0)).max()), x, y, seed),
        sd=_with_null(lambda x, y, _: float(np.abs(x.std(0) - y.std(0)).max()), x, y, seed),
        correlation=_with_null(lambda x, y, _: float(np.abs(correlation(x) - correlation(y)).max()), x, y, seed),
    )


def _standardised(draws: Any, reference: Any) -> tuple[Matrix, Matrix]:
    x, y = _stack(draws, reference, least=4)
    centre, scale = y.mean(0), _scale(y)
    return (x - centre) / scale, (y - centre) / scale


def _with_null(
    metric: Callable[[Matrix, Matrix, np.random.Generator], float], x: Matrix, y: Matrix, seed: int
) -> Score:
    """The metric between x and one half of y, and between the two halves of y, all of one size."""
    n = min(len(x), len(y) // 2)
    rng = np.random.default_rng(seed)
    x, y = _subset(x, n, rng), y[rng.permutation(len(y))[: 2 * n]]
    return Score(metric(x, y[:n], np.random.default_rng(seed)), metric(y[n:], y[:n], np.random.default_rng(seed)))


# --------------------------------------------------------------------------------------------------------------- input


def _matrix(draws: Any, what: str) -> dict[str, Matrix]:
    """Draws as `{site: (n, size)}`; a bare array has the one site ''."""
    if hasattr(draws, "children") or hasattr(draws, "data_vars"):  # a DataTree or Dataset, dimensions chain, draw, ...
        data = draws["posterior"] if "posterior" in getattr(draws, "children", {}) else draws
        sites = {str(name): np.asarray(data[name]) for name in data.data_vars}
        sites = {
            name: value.reshape(value.shape[0] * value.shape[1], *value.shape[2:]) for name, value in sites.items()
        }
    elif isinstance(draws, Mapping):
        sites = {str(name): np.asarray(value) for name, value in draws.items()}
    else:
        sites = {"": np.asarray(draws)}
    out = {}
    for name, value in sites.items():
        label = f"{what}[{name!r}]" if name else what
        if value.ndim == 0 or not np.issubdtype(value.dtype, np.number) or np.iscomplexobj(value):
            raise ValueError(
                f"{label} has shape {value.shape} and dtype {value.dtype}: expected real numbers, (n, ...)"
            )
        if not value.size:
            raise ValueError(f"{label} is empty, with shape {value.shape}: expected draws of at least one parameter")
        out[name] = value.reshape(len(value), -1).astype(np.float64)
    if not out:
        raise ValueError(f"{what} is empty: expected draws of at least one parameter")
    return out


def _pair(draws: Any, reference: Any, *, least: int = 2) -> tuple[Matrix, Matrix]:
    """Both sets as finite matrices with the same columns and the same number of rows."""
    x, y = _stack(draws, reference, least=least)
    n = min(len(x), len(y))
    rng = np.random.default_rng(0)
    return _subset(x, n, rng), _subset(y, n, rng)


def _stack(draws: Any, reference: Any, *, least: int) -> tuple[Matrix, Matrix]:
    x, y = _matrix(draws, "draws"), _matrix(reference, "reference")
    if set(x) != set(y):
        raise ValueError(f"draws have the sites {sorted(x)}, but the reference has {sorted(y)}")
    for name in y:
        if x[name].shape[1] != y[name].shape[1]:
            where = f" at site {name!r}" if name else ""
            raise ValueError(
                f"draws have {x[name].shape[1]} dimensions{where}, but the reference has {y[name].shape[1]}"
            )
    for what, sites in (("draws", x), ("reference", y)):
        if len({len(value) for value in sites.values()}) > 1:
            raise ValueError(f"{what} have different numbers of draws: { {k: len(v) for k, v in sites.items()} }")
        for name, value in sites.items():
            bad = int(np.sum(~np.isfinite(value).all(1)))
            if bad:
                where = f" of site {name!r}" if name else ""
                raise ValueError(f"{bad} of {len(value)} {what}{where} are NaN or infinite: drop or repair them first")
    a, b = (np.concatenate([sites[name] for name in y], axis=1) for sites in (x, y))
    if min(len(a), len(b)) < least:
        raise ValueError(f"{len(a)} draws and {len(b)} of the reference: at least {least} of each are needed")
    return a, b


def _subset(x: Matrix, n: int, rng: np.random.Generator) -> Matrix:
    return x if len(x) == n else x[rng.permutation(len(x))[:n]]


def _scale(x: Matrix) -> Float[np.ndarray, " d"]:
    """Standard deviations; 1 for a constant column, which stays comparable in its own units."""
    scale = x.std(0)
    return np.where(scale > 1e-12 * np.maximum(1.0, np.abs(x).max(0)), scale, 1.0)
