"""What data tell of parameters, without asking the posterior: features, a regression, likelihoods and densities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int

from cpejax.inference.posterior import Posterior
from cpejax.program.distributions import base_constraint, unwrap
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program, Simulator
from cpejax.program.tracing import run

LINEAR = 15.0
"""How many robust standard deviations from the median a feature is linear; it grows by the logarithm beyond."""
COLUMNS = 2_000_000
"""Maximum number of values of regression features; columns of wide data are thinned to it."""
CHOSEN = 16
"""Maximum number of features that predict one quantity."""
SHARES = (0.1, 0.2, 0.4, 0.7)
"""After which shares of the simulations the regression is fitted again, to all that came before."""
FLOOR = 0.05
"""The least weight of the prior, and of the regression, in their mixture."""
MOST_EVALUATED = 5_000_000
"""Maximum number of values, of parameters and data, whose log-density is evaluated at once."""


# ---- features


class Features:
    """Columns to values of order one that are unbounded and monotone, whatever their scale and tails.

    Each is centred by its median, scaled by its interquartile range, and linear up to ±15, logarithmic beyond. Where
    the reference rows themselves go beyond ±10, a second feature is added: the normal score of the empirical quantile,
    which grows by the logarithm beyond the reference rows, as fast as the scores do just inside.
    """

    def __init__(self, rows: Float[np.ndarray, "n p"]):
        low, self.centre, high = np.quantile(rows, [0.25, 0.5, 0.75], axis=0)
        scale = (high - low) / 1.349
        scale = np.where(scale > 0, scale, rows.std(0))
        self.scale = np.where(scale > 0, scale, 1.0)
        self.heavy = np.flatnonzero(np.abs((rows - self.centre) / self.scale).max(0) > 10)
        last = NormalDist().inv_cdf(1 - 0.5 / len(rows))
        self.scores = np.linspace(-last, last, 129)
        self.knots = np.quantile(rows[:, self.heavy], [NormalDist().cdf(score) for score in self.scores], axis=0).T
        self.inner = [float(np.clip(last - 1, 0, None)), float(np.clip(1 - last, None, 0))]

    def __call__(self, x: Float[np.ndarray, "m p"]) -> Float[np.ndarray, "m f"]:
        """All features: the columns, then the scores of the heavy ones."""
        t = (x - self.centre) / self.scale
        size = np.maximum(np.abs(t), LINEAR)
        linear = np.where(np.abs(t) <= LINEAR, t, np.sign(t) * LINEAR * (1 + np.log(size / LINEAR)))
        return np.column_stack([linear, *(self._score(x[:, i], knots) for i, knots in self._heavy())])

    def _heavy(self) -> list[tuple[int, np.ndarray]]:
        return list(zip(self.heavy.tolist(), self.knots, strict=True))

    def _score(self, x: np.ndarray, knots: np.ndarray) -> np.ndarray:
        score = np.interp(x, knots, self.scores)
        for sign, at, inner in ((1, knots[-1], self.inner[0]), (-1, knots[0], self.inner[1])):
            before = float(np.interp(inner, self.scores, knots))  # a standard deviation further in
            width = max(abs(at - before), 1e-9 * max(abs(at), 1e-9))
            # Of a log-normal column with a large sd, the score of ten times as much is less than one further.
            slope = max(1.0, math.log(at / before)) if at * before > 0 and abs(at) > abs(before) else 1.0
            score = score + sign * np.log1p(np.maximum(sign * (x - at), 0.0) / width) / slope
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


# ---- a regression


@dataclass(frozen=True, eq=False)
class Regression:
    """Ridge regressions of many targets, each on the features that are correlated with it most."""

    chosen: Int[np.ndarray, "k q"]
    weights: Float[np.ndarray, "k q"]
    features: Float[np.ndarray, " p"]
    """The mean of each feature."""
    targets: Float[np.ndarray, " k"]
    """The mean of each target."""

    def __call__(self, features: Float[np.ndarray, "m p"]) -> Float[np.ndarray, "m k"]:
        """The targets' predicted values."""
        centred = features - self.features
        return self.targets + np.stack(
            [centred[:, c] @ w for c, w in zip(self.chosen, self.weights, strict=True)], axis=1
        )


def regress(features: Float[np.ndarray, "m p"], targets: Float[np.ndarray, "m k"]) -> Regression:
    """Fit it. With thousands of columns, of which few matter to a target (the data of its own group), this finds them.

    The penalty is that of a single observation: all features have variance 1.
    """
    means, middle = features.mean(0), targets.mean(0)
    x, y = features - means, targets - middle
    size = int(min(CHOSEN, x.shape[1], max(1, len(x) // 6)))
    products = x.T @ y
    chosen = np.argsort(-np.abs(products), axis=0)[:size].T
    weights = np.empty(chosen.shape)
    for k, which in enumerate(chosen):
        own = x[:, which]
        weights[k] = np.linalg.solve(own.T @ own + np.eye(size), products[which, k])
    return Regression(chosen, weights, means, middle)


@dataclass(frozen=True, eq=False)
class Guess:
    """What can be said of parameters by a regression on the data, fitted to simulations that came before.

    Parameters are normal given the data, on a scale of their own: `t = (y − centre) / scale`, `y = θ` or `log θ`.
    """

    logarithm: Bool[np.ndarray, " d"]
    centre: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"]
    mean: Regression
    covariance: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]
    """Of what the regression leaves, or its diagonal; from simulations that this regression was not fitted to."""
    places: Regression
    """Of the true values' places among the draws, which no data predict if the posterior is right."""
    spread: Float[np.ndarray, " d"]
    """The interquartile range of each parameter."""

    def _t(self, theta: np.ndarray) -> np.ndarray:
        positive = np.where(self.logarithm, np.maximum(theta, 1e-300), 1.0)
        return (np.where(self.logarithm, np.log(positive), theta) - self.centre) / self.scale

    def points(self, features: Float[np.ndarray, "m p"], rng: np.random.Generator) -> Float[np.ndarray, "m d"]:
        """Points near which the data say the parameters are: draws from what the regression says."""
        variance = self.covariance if self.covariance.ndim == 1 else np.diag(self.covariance)
        mean = self.mean(features)
        t = np.clip(mean + np.sqrt(variance) * rng.standard_normal(mean.shape), -5.0, 5.0)
        y = self.centre + self.scale * t
        return np.where(self.logarithm, np.exp(np.where(self.logarithm, y, 0.0)), y)

    def direction(self, features: Float[np.ndarray, "m p"]) -> Float[np.ndarray, "m k"]:
        """How much higher than on average the data say that the true values are among the draws."""
        return self.places(features) - self.places.targets

    def log_density(
        self, theta: Float[np.ndarray, "m d"], features: Float[np.ndarray, "m p"]
    ) -> Float[np.ndarray, " m"]:
        """The log-density of parameters; its integral is 1, or less where a support is bounded."""
        rest = self._t(theta) - self.mean(features)
        if self.covariance.ndim == 1:
            squares, volume = (np.square(rest) / self.covariance).sum(1), np.log(self.covariance).sum()
        else:
            squares = (np.linalg.solve(self.covariance, rest.T).T * rest).sum(1)
            volume = np.linalg.slogdet(self.covariance)[1]
        jacobian = np.log(self.scale).sum() + np.log(np.maximum(theta[:, self.logarithm], 1e-300)).sum(1)
        found = -0.5 * (squares + volume + theta.shape[1] * math.log(2 * math.pi)) - jacobian
        return np.where((theta[:, self.logarithm] > 0).all(1), found, -np.inf)


def guess(
    theta: Float[np.ndarray, "m d"], features: Float[np.ndarray, "m p"], places: Float[np.ndarray, "m k"]
) -> Guess:
    """Fit it to simulated parameters, the features of their data, and the places of the parameters among the draws."""
    quarter, three = np.quantile(theta, [0.25, 0.75], axis=0)
    positive = (theta > 0).all(0)
    logs = np.log(np.where(positive, theta, 1.0))
    # Whichever makes the parameter more nearly normal: the likelihood of either.
    with np.errstate(divide="ignore"):
        better = -np.log(logs.std(0)) - logs.mean(0) > -np.log(theta.std(0))
    logarithm = positive & better
    y = np.where(logarithm, logs, theta)
    low, centre, high = np.quantile(y, [0.25, 0.5, 0.75], axis=0)
    scale = np.where(high > low, (high - low) / 1.349, np.where(y.std(0) > 0, y.std(0), 1.0))
    t = np.clip((y - centre) / scale, -5.0, 5.0)
    first = max(2, 2 * len(t) // 3)
    rest = t[first:] - regress(features[:first], t[:first])(features[first:])
    covariance: np.ndarray = np.square(rest).mean(0) + 1e-8
    if len(rest) >= 5 * t.shape[1]:
        covariance = rest.T @ rest / len(rest) + 1e-8 * np.eye(t.shape[1])
    spread = np.where(three > quarter, three - quarter, 1.0)
    return Guess(logarithm, centre, scale, regress(features, t), covariance, regress(features, places), spread)


def fitted_at(n: int) -> list[int]:
    """Before which of `n` simulations a regression is fitted to all that come before; the first are not predicted."""
    return sorted({max(5, math.ceil(share * n)) for share in SHARES})


# ---- densities


class Likelihood:
    """The log-density of a program's data at many parameters, and that of the prior.

    `missing` says why there is no log-density of the data, where there is none. `flat` says whether the parameters'
    densities are by volume, as those of a simplex or of a correlation matrix are not.
    """

    def __init__(self, program: Program, graph: Graph):
        self.graph, self.missing, self.flat = graph, "", True

        def density(values: dict[str, Array], of: Sequence[str]) -> Array:
            found = [jnp.zeros(())]

            def visit(name: str, msg: dict[str, Any]) -> None:
                if name in of:
                    found.append(jnp.sum(msg["fn"].log_prob(msg["value"])))

            run(program, values, visit)
            return sum(found[1:], found[0])

        def kind(name: str, msg: dict[str, Any]) -> None:
            base = unwrap(msg["fn"])
            if name in graph.data and isinstance(base, Simulator | dist.Delta):  # beside a Delta, rounding is all
                self.missing = f"site '{name}' is a {type(base).__name__}"
            if name in graph.parameters and base_constraint(msg["fn"]).event_dim > 0:
                self.flat = False

        example = {name: jnp.zeros(site.shape) for name, site in graph.sites.items()}
        jax.eval_shape(lambda v: run(program, v, kind) and None, example)
        if not self.missing:
            try:
                if "callback" in str(jax.make_jaxpr(lambda v: density(v, graph.data))(example)):
                    self.missing = "the program calls a function on the host"
            except NotImplementedError:  # a distribution of the user's own that can only be sampled
                self.missing = "a data site has no log_prob"
        self._of_prior: Callable = jax.jit(jax.vmap(lambda v: density(v, graph.parameters)))
        # One observation, and many parameters for it.
        each = jax.vmap(lambda theta, data: density({**theta, **data}, graph.data), in_axes=(0, None))
        self._of_data: Callable = jax.jit(jax.vmap(each))

    def prior(self, values: Mapping[str, np.ndarray]) -> Float[np.ndarray, " n"] | None:
        """The prior's log-densities of simulations, values of all sites `{site: (n, *shape)}`, where it has one."""
        try:
            return np.asarray(self._of_prior(dict(values)), np.float64)
        except NotImplementedError:
            return None

    def __call__(self, theta: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> Float[np.ndarray, "n k"]:
        """Log-likelihoods: parameters `{site: (n, k, *shape)}`, data `{site: (n, *shape)}`."""
        first = theta[self.graph.parameters[0]]
        n, k = first.shape[:2]
        values = k * sum(math.prod(site.shape) for site in self.graph.sites.values())
        size = max(1, min(50, MOST_EVALUATED // values))
        out = []
        for start in range(0, n, size):
            which = np.arange(start, start + size) % n  # one shape, one compilation
            found = self._of_data({k: x[which] for k, x in theta.items()}, {k: x[which] for k, x in data.items()})
            out.append(np.asarray(found)[: n - start])
        return np.concatenate(out).astype(np.float64)


def log_density(
    posterior: Any, theta: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]
) -> Float[np.ndarray, " n"] | None:
    """The posterior's log-density of one set of parameters for each of `n` observations.

    `None` where there is none that can be compared: none at all; an estimate; or that of proposals, not of draws.
    """
    if not isinstance(posterior, Posterior):
        found = getattr(posterior, "log_prob", None)
        return None if found is None else np.asarray(found(theta, data), np.float64)
    flow = posterior.flow
    if flow.may_leave_support:
        return None
    n = len(theta[posterior.graph.parameters[0]])
    found, columns = _log_densities(flow, dict(theta), dict(data), min(n, 200))
    return None if columns > 1 else np.asarray(found, np.float64)


@eqx.filter_jit
def _log_densities(flow: Any, theta: dict[str, Any], data: dict[str, Any], batch: int) -> tuple[Array, int]:
    def one(x: tuple[dict[str, Array], dict[str, Array]]) -> Array:
        values, given = x
        found = flow.log_probs({name: v[None] for name, v in values.items()}, given, **flow.density_options())[0]
        return jnp.where(flow.coordinates.in_support({**values, **given}), found, -jnp.inf)

    n = len(next(iter(theta.values())))
    pieces = -(-n // batch)
    filled = jax.tree.map(lambda v: jnp.asarray(v)[jnp.arange(pieces * -(-n // pieces)) % n], (theta, data))
    found = jax.lax.map(one, filled, batch_size=-(-n // pieces))[:n]
    return found.mean(1), found.shape[1]


def better_guess(
    prior: Float[np.ndarray, " n"], regression: Float[np.ndarray, " n"], blocks: Sequence[int]
) -> Float[np.ndarray, " n"]:
    """The log-density of a mixture of prior and regression, whose weights follow what was better in the blocks before.

    A density in the parameters, given the data and all that came before. `blocks`: where each block begins.
    """
    out = np.empty_like(prior)
    weight = 0.5
    for start, stop in zip(blocks, [*blocks[1:], len(prior)], strict=True):
        now = slice(start, stop)
        out[now] = np.logaddexp(prior[now] + math.log1p(-weight), regression[now] + math.log(weight))
        ahead = np.maximum(regression[:stop], prior[:stop] - 10.0) - prior[:stop]
        weight = 1 - FLOOR if ahead.sum() > 0 else FLOOR
    return out
