"""How far draws are from a reference posterior: C2ST, H-min, MMD, sliced Wasserstein, errors of moments.

Every metric takes `(draws, reference)`: matrices `(n, d)`, vectors `(n,)`, dicts `{site: (n, *shape)}`, or ArviZ
DataTrees (their `posterior`). The longer set is cut to the length of the shorter by a fixed random choice. A metric
whose value for a perfect sampler is not known in advance returns a `Score`: the value, and beside it the *null*, the
same metric between two disjoint parts of the reference of the same size.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["Moments", "Score", "c2st", "hmin", "mmd", "moments", "sliced_wasserstein"]

Matrix = Float[np.ndarray, "n d"]
FOLDS = 5


class Score(NamedTuple):
    """A metric's value and its null: the value between two disjoint parts of the reference."""

    value: float
    null: float


# ---------------------------------------------------------------------------------------------------------------- C2ST


def c2st(draws: Any, reference: Any, *, method: Literal["fast", "mlp"] = "fast", seed: int = 1) -> float:
    """Classifier two-sample test: how often a classifier tells draws from reference; .5 is perfect, 1 the worst.

    Both sets are z-scored by the reference and labelled; a network with two hidden layers of `10 d` ReLU units is
    trained on four folds and tested on the fifth, five times over; the value is the mean accuracy. With n draws on
    each side the null is .5 with standard deviation `.5 / sqrt(2 n)` (.0035 at n = 10,000).

    Arguments:
        draws, reference: two sets of draws (see the module).
        method: `"mlp"` is the published definition: scikit-learn's `MLPClassifier`, Adam, up to 10,000 epochs,
            stopped by its training loss. `"fast"` trains the five networks together in one compiled program with
            larger batches and steps; see docs/metrics.md for how closely the two agree.
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
    from sklearn.model_selection import KFold

    split = list(KFold(n_splits=FOLDS, shuffle=True, random_state=seed).split(points))
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
    for key, a, b in zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True):  # noqa: B020
        bound = np.sqrt((2.0 if b == 1 else 6.0) / (a + b))
        w = jax.random.uniform(key, (a + 1, b), minval=-bound, maxval=bound)
        weights.append((w[:-1], w[-1]))
    return weights


@partial(jax.jit, static_argnames=("batch", "epochs", "rate", "decay", "tolerance", "patience"))
def _cross_validate(
    key: Array,
    points: Float[Array, "n d"],
    label: Float[Array, " n"],
    train: Int[Array, "folds m"],
    batch: int = 500,
    epochs: int = 80,
    rate: float = 5e-3,
    decay: float = 1e-4,
    tolerance: float = 1e-4,
    patience: int = 10,
) -> Array:
    """Train one network a fold; whether each of the points is then classified rightly, `(folds, n)`.

    Adam without dropout or decay schedule, and scikit-learn's rule for stopping: ten epochs in which the training
    loss falls by less than 1e-4.
    """
    folds, m = train.shape
    batch = min(batch, m)
    steps = m // batch
    d = points.shape[1]

    def loss(weights, index):
        z, t = _logits(weights, points[index]), label[index]
        return jnp.mean(jax.nn.softplus(z) - t * z) + 0.5 * decay / batch * sum(jnp.sum(w**2) for w, _ in weights)

    def step(state, index):
        weights, first, second, count = state
        count = count + 1
        value, slope = jax.value_and_grad(loss)(weights, index)
        first = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, first, slope)
        second = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g**2, second, slope)
        size = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        weights = jax.tree.map(lambda w, a, b: w - size * a / (jnp.sqrt(b) + 1e-8), weights, first, second)
        return (weights, first, second, count), value

    def epoch(carry):
        number, key, state, best, stale = carry
        key, *keys = jax.random.split(key, folds + 1)
        order = jax.vmap(jax.random.permutation)(jnp.stack(keys), train)[:, : steps * batch]
        order = order.reshape(folds, steps, batch).swapaxes(0, 1)
        new, values = jax.lax.scan(jax.vmap(step), state, order)
        value = values.mean(0)
        running = stale <= patience
        state = jax.tree.map(lambda a, b: jnp.where(running.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, state)
        stale = jnp.where(running, jnp.where(value > best - tolerance, stale + 1, 0), stale)
        return number + 1, key, state, jnp.minimum(best, value), stale

    start_key, key = jax.random.split(key)
    weights = jax.vmap(partial(_initial, sizes=(d, 10 * d, 10 * d, 1)))(jax.random.split(start_key, folds))
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = (weights, zeros, zeros, jnp.zeros(folds))
    carry = (0, key, state, jnp.full(folds, jnp.inf), jnp.zeros(folds, int))
    go_on = lambda carry: (carry[0] < epochs) & jnp.any(carry[4] <= patience)  # noqa: E731
    _, _, (weights, *_), _, _ = jax.lax.while_loop(go_on, epoch, carry)
    return jax.lax.map(lambda w: (_logits(w, points) > 0) == (label > 0.5), weights)


# --------------------------------------------------------------------------------------------------------------- input


def _matrix(draws: Any, what: str) -> dict[str, Matrix]:
    """Draws as `{site: (n, size)}`; a bare array has the one site ''."""
    if hasattr(draws, "children") or hasattr(draws, "data_vars"):  # a DataTree or Dataset, dimensions chain, draw, ...
        data = draws["posterior"] if "posterior" in getattr(draws, "children", {}) else draws
        sites = {str(name): np.asarray(data[name]) for name in data.data_vars}
        sites = {name: value.reshape(value.shape[0] * value.shape[1], *value.shape[2:]) for name, value in sites.items()}
    elif isinstance(draws, Mapping):
        sites = {str(name): np.asarray(value) for name, value in draws.items()}
    else:
        sites = {"": np.asarray(draws)}
    out = {}
    for name, value in sites.items():
        label = f"{what}[{name!r}]" if name else what
        if value.ndim == 0 or not np.issubdtype(value.dtype, np.number) or np.iscomplexobj(value):
            raise ValueError(f"{label} has shape {value.shape} and dtype {value.dtype}: expected real numbers, (n, ...)")
        out[name] = value.reshape(len(value), -1).astype(np.float64)
    if not out or not all(value.size for value in out.values()):
        raise ValueError(f"{what} is empty: expected at least one draw of at least one parameter")
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
