"""What all checks share: simulated observations with known parameters, draws for each, and what their data predict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import xarray as xr
from jaxtyping import Float, Int, PRNGKeyArray

from cpejax.diagnostics.distances import compare
from cpejax.diagnostics.features import regression_features
from cpejax.diagnostics.ranks import from_mean, rank
from cpejax.diagnostics.regression import fitted_at, guess
from cpejax.diagnostics.words import parameter_names
from cpejax.program.density import ProgramDensity
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program
from cpejax.util.keys import key_words

MOST_NUMBERS = 50_000_000
"""Maximum number of drawn values at once; more observations go in chunks."""


@runtime_checkable
class AnyPosterior(Protocol):
    """What a check needs of a posterior; a `cpe.Posterior` is one."""

    @property
    def graph(self) -> Graph:
        """The program's graph."""
        ...

    @property
    def program(self) -> Program:
        """The program, without arguments."""
        ...

    def sample(self, n: int, given: Mapping[str, Any], *, key: PRNGKeyArray) -> xr.DataTree:
        """`n` draws for each of many observations, as `Posterior.sample` returns them."""
        ...

    # Optional: `log_prob(draws, given)`, the log-densities `(n,)` of draws `{parameter: (n, *shape)}`, one for each of
    # `n` observations `{site: (n, *shape)}`. With it, the density of the true parameters is checked too.


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a regression, fitted to earlier simulations, says by the data of `m` observations.

    - `points`: near which the parameters are, drawn from what it says; `spread`: of each parameter, over simulations.
    - `direction`: how much higher than on average the true values are among the draws.
    """

    points: Float[np.ndarray, "m d"]
    spread: Float[np.ndarray, " d"]
    direction: Float[np.ndarray, "m d"]


@dataclass(frozen=True, eq=False)
class Group:
    """Draws for `m` of the simulated observations: the true parameters, which come first, and all draws.

    - `index`: which observations; `data`: theirs, `{site: (m, *shape)}`.
    - `every`: the parameters' values; `centred`: the same less their mean, in units of their sd, for each observation.
    - `prediction`: `None` for the first tenth of the observations, which is only learned from.
    """

    index: Int[np.ndarray, " m"]
    data: dict[str, np.ndarray]
    every: Float[np.ndarray, "m draws_1 d"]
    centred: Float[np.ndarray, "m draws_1 d"]
    prediction: Prediction | None


class Study:
    """Simulated observations `rows`, and a given one or many, with draws of a posterior for each.

    - `truth`: the parameters of simulated observations, `(n, d)`, in the order of `names`; `ranks`, `joint`: of these,
        and of their distance from the draws' mean, among the draws.
    - `begin`: the first observation that is predicted; `direction`, `further`: how much higher than on average the data
        say that these ranks are, for each `(n, d)` and for the distance `(n,)`; `regression`: its log-density of the
        true parameters `(n,)`.
    - `observed`: the given data, `{site: (observations, *shape)}`, or `None`; `distances`: how far they are from
        simulated ones; `one`: the least typical of them, `which` in words where there are many; `of_one`: draws for it,
        `{parameter: (draws, *shape)}`, and `failure`: why there are none.

    What predicts simulation `i` is fitted to simulations before it, so that, given these and all data, its rank is
    uniform if the posterior is right, and all ranks of a quantity are independent.
    """

    def __init__(
        self,
        posterior: AnyPosterior,
        rows: dict[str, np.ndarray],
        observed: dict[str, np.ndarray] | None,
        draws: int,
        *,
        key: PRNGKeyArray,
        key_replicates: PRNGKeyArray,
        progress: bool | None = None,
    ):
        self.posterior, self.graph, self.draws = posterior, posterior.graph, draws
        self.rows, self.observed = rows, observed
        self.key, self.key_replicates, self.progress = key, key_replicates, progress
        self.names = parameter_names(self.graph)
        d, n = len(self.names), len(rows[self.graph.parameters[0]])
        self.n = n
        flat = [rows[name].reshape(n, -1) for name in self.graph.parameters]
        self.truth = np.concatenate(flat, axis=1).astype(np.float64)
        self.ranks, self.joint = np.zeros((n, d), int), np.zeros(n, int)
        self.refits = fitted_at(n)
        self.begin = self.refits[0]
        self.direction, self.further, self.regression = np.zeros((n, d)), np.zeros(n), np.zeros(n)
        self.distances, self.one, self.which = None, None, ""
        if observed is not None:
            self.distances = compare(self.flat_data(rows), self.flat_data(observed))
            worst = self.distances.worst
            self.one = {name: x[worst, ...] for name, x in observed.items()}
            if len(self.distances.p) > 1:
                self.which = f"Observation {worst}, the least typical: "
        self.of_one: dict[str, np.ndarray] = {}
        self.failure = ""

    @cached_property
    def program_density(self) -> ProgramDensity:
        """The densities that the program has of its own."""
        return ProgramDensity(self.posterior.program, self.graph)

    def generator(self, name: str) -> np.random.Generator:
        """A generator for one check: what others draw, and how many they are, does not change what it draws."""
        return np.random.default_rng([*key_words(self.key), *name.encode()])

    def flat_data(self, values: Mapping[str, np.ndarray]) -> Float[np.ndarray, "n p"]:
        """Data `{site: (n, *shape)}` with all sites in one axis."""
        return np.concatenate([values[name].reshape(len(values[name]), -1) for name in self.graph.data], axis=1)

    def groups(self) -> Iterator[Group]:
        """All simulated observations in one pass, a few at a time; draws are never held all at once."""
        rng = np.random.default_rng(key_words(self.key))
        features = regression_features(self.graph, self.rows)
        points, spread = np.zeros_like(self.truth), np.ones(self.truth.shape[1])
        for start, drawn in self._chunks():
            for i in self._indices(start, min(start + drawn.shape[1], self.n)):
                if i[0] in self.refits:
                    before, now = slice(0, i[0]), slice(i[0], min([*(r for r in self.refits if r > i[0]), self.n]))
                    places = np.column_stack([self.ranks, self.joint])[before] / self.draws - 0.5
                    fitted = guess(self.truth[before], features[before], places)
                    points[now] = fitted.points(features[now], rng)
                    spread = fitted.spread
                    towards = fitted.direction(features[now])
                    self.direction[now], self.further[now] = towards[:, :-1], towards[:, -1]
                    self.regression[now] = fitted.log_density(self.truth[now], features[now])
                every = np.concatenate([self.truth[i][None], drawn[:, i - start]]).astype(np.float64).transpose(1, 0, 2)
                self.ranks[i] = rank(every, rng)
                mean, sd = every.mean(1, keepdims=True), every.std(1, keepdims=True)
                centred = (every - mean) / np.where(sd > 0, sd, 1.0)
                self.joint[i] = rank(from_mean(centred), rng)
                prediction = None if i[0] < self.begin else Prediction(points[i], spread, self.direction[i])
                yield Group(i, {name: self.rows[name][i] for name in self.graph.data}, every, centred, prediction)

    def _indices(self, start: int, stop: int) -> Iterator[Int[np.ndarray, " m"]]:
        """A few observations at a time are faster than one, and than all; none is across a refit."""
        while start < stop:
            end = min([start + 50, stop, *(r for r in self.refits if r > start)])
            yield np.arange(start, end)
            start = end

    def _chunks(self) -> Iterator[tuple[int, Float[np.ndarray, "draws chunk d"]]]:
        """Draws for as many observations as memory allows, and which is the first.

        The observation at hand goes with the simulated ones, because a call for it alone would have to be compiled.
        """
        one, n, draws = self.one, self.n, self.draws
        data = {
            name: self.rows[name] if one is None else np.concatenate([self.rows[name], one[name][None]])
            for name in self.graph.data
        }
        count = n if one is None else n + 1
        chunk = max(1, min(count, MOST_NUMBERS // (draws * self.truth.shape[1])))

        def sample(which: np.ndarray, key: PRNGKeyArray) -> xr.Dataset:
            given = {name: x[which] for name, x in data.items()}
            return self.posterior.sample(draws, given, key=key)["posterior"].dataset

        for start in range(0, count, chunk):
            which = np.arange(start, start + chunk) % count  # one shape, one compilation
            key = jax.random.fold_in(self.key, start)
            holds_one = one is not None and start <= n < start + chunk
            try:
                found = sample(which, key)
            except (RuntimeError, FloatingPointError) as error:
                if not holds_one:
                    raise
                self.failure = f"there are no draws for it ({error})"  # of the others there may be
                found = sample(np.where(which == n, 0, which), key)
            if holds_one and not self.failure:
                self.of_one = {name: found[name].values[0, :, n - start] for name in self.graph.parameters}
            yield start, flat_draws(found, self.graph)


def flat_draws(posterior: xr.Dataset, graph: Graph) -> Float[np.ndarray, "*lead d"]:
    """Draws `(draw, ..., d)` with all parameters in one axis, in the order of `parameter_names`."""
    out = []
    for name in graph.parameters:
        x = posterior[name].values
        x = x.reshape(-1, *x.shape[2:])  # chains are no different
        shape = graph.sites[name].shape
        out.append(x.reshape(*x.shape[: x.ndim - len(shape)], math.prod(shape)))
    return np.concatenate(out, axis=-1)
