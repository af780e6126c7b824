"""C2ST: how well a classifier tells draws from the reference."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cpejax.metrics.samples import Matrix, pair, scale_of

FOLDS = 5


def c2st(draws: Any, reference: Any, *, method: str = "fast", seed: int = 1) -> float:
    """Classifier two-sample test: how often a classifier tells draws from reference; .5 is perfect, 1 the worst.

    Both sets are z-scored by the reference and labelled; a network with two hidden layers of `10 d` ReLU units is
    trained on four folds and tested on the fifth, five times over; the value is the mean accuracy. With n draws on
    each side the null is .5 with standard deviation `.5 / sqrt(2 n)` (.0035 at n = 10,000).

    **Arguments:**

    - `draws`, `reference`: two sets of draws (see `cpejax.metrics`).
    - `method`: `"mlp"` is the published definition: scikit-learn's `MLPClassifier`, Adam, up to 10,000 epochs,
        stopped by its training loss. `"fast"` trains the five networks together in one compiled program with
        larger steps and fewer of them; see docs/metrics.md for how closely the two agree. Its folds hold equally
        many points of both sets: with the published ones, whichever set has more points in training has fewer in
        the test, so that a classifier that sees no difference scores a little below .5.
    - `seed`: of the folds and the networks.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> bool(c2st(rng.normal(size=500), rng.normal(size=500) + 3) > 0.85)
    True

    References: Lopez-Paz and Oquab 2017, Revisiting classifier two-sample tests; Lueckmann et al. 2021.
    """
    x, y = pair(draws, reference, least=10)
    if method not in ("fast", "mlp"):
        raise ValueError(f"c2st(method={method!r}): expected 'fast' or 'mlp'")
    centre, scale = y.mean(0), scale_of(y)
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
    # The wider the network, the slower an epoch and the sooner it overfits its points.
    epochs = epochs or int(np.clip(8000 / d**2, 40, 400))

    def loss(weights, index):
        z, t = _logits(weights, points[index]), label[index]
        return jnp.mean(jax.nn.softplus(z) - t * z) + 0.5 * decay / batch * sum(jnp.sum(w**2) for w, _ in weights)

    def step(state, index):
        weights, first, second, count, rate = state
        count = count + 1
        value, gradient = jax.value_and_grad(loss)(weights, index)
        first = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g**2, second, gradient)
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

    def unfinished(carry):
        return (carry[0] < epochs) & jnp.any(carry[-1] < len(rates))

    weights = jax.lax.while_loop(unfinished, epoch, carry)[2][0]
    return jax.lax.map(lambda w: (_logits(w, points) > 0) == (label > 0.5), weights)
