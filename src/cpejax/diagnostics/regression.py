"""What data tell of parameters by a regression that is fitted to simulations, without asking the posterior."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

CHOSEN = 16
"""Maximum number of features that predict one quantity."""
SHARES = (0.1, 0.2, 0.4, 0.7)
"""After which shares of the simulations the regression is fitted again, to all that came before."""


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
    """Fit ridge regressions, each to the few of possibly thousands of columns that matter to its target.

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
    """Fit a `Guess` to simulated parameters, the features of their data, and the parameters' places among the draws."""
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
