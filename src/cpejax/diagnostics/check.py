"""Whether a posterior can be trusted: its calibration over simulated observations, and the data at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float, Int, PRNGKeyArray
from scipy import stats
from scipy.special import gammaln

from cpejax.diagnostics.information import (
    Features,
    Likelihood,
    better_guess,
    fitted_at,
    guess,
    log_density,
    regression_features,
    summary_statistics,
)
from cpejax.program.graph import Graph
from cpejax.program.simulate import simulate
from cpejax.program.simulations import check_count
from cpejax.program.simulator import Program
from cpejax.util.keys import check_key, key_words

MOST_NUMBERS = 50_000_000
"""How many drawn numbers there are at once; more observations go in chunks."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
NEIGHBOURS = 5
SMALLEST = 1e-12  # of tail probabilities
UNUSUAL = 0.05
"""An observation with a p-value below this is called unusual, and not typical."""
LIKELIHOOD_DRAWS = 50
"""Maximum number of draws among which a log-likelihood is ranked: more cost time, and see hardly more."""
SECONDS, SHARE = 2.0, 0.2
"""How long log-likelihoods are evaluated: that many seconds, or that share of the time the draws take if it is more."""

Ranks = Int[np.ndarray, " n"]
Predicted = Int[np.ndarray, " m"]
"""Ranks of the observations that come after the first tenth, which only serves to learn from."""


@runtime_checkable
class Sampler(Protocol):
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


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: whether it was passed, and a sentence that says so."""

    check: str
    ok: bool
    sentence: str


@dataclass(frozen=True, eq=False)
class Typicality:
    """How far observations are from simulated data: distances, those of simulated data, and p-values."""

    distance: Float[np.ndarray, " observations"]
    simulated: Float[np.ndarray, " m"]
    p: Float[np.ndarray, " observations"]
    finding: Finding


@dataclass(frozen=True, eq=False)
class Density:
    """The log-density of the true parameters, minus the prior's: in nats, for each simulated observation.

    - `gain`: by the posterior; `regression`: by a regression on the data, fitted to earlier simulations, for those that
        it predicts.
    - `p`: the p-value of the posterior against the better of prior and regression.
    """

    gain: Float[np.ndarray, " n"]
    regression: Float[np.ndarray, " m"]
    p: float

    @property
    def mean(self) -> float:
        """The mean gain, over those that are finite."""
        return float(self.gain[np.isfinite(self.gain)].mean()) if np.isfinite(self.gain).any() else -math.inf

    @property
    def error(self) -> float:
        """Its standard error."""
        finite = self.gain[np.isfinite(self.gain)]
        return float(finite.std() / math.sqrt(len(finite))) if len(finite) else math.inf

    def to_dict(self) -> dict[str, float | None]:
        """Its figures, as JSON."""
        found = {"gain": self.mean, "error": self.error, "regression": float(self.regression.mean()), "p": self.p}
        return {name: x if math.isfinite(x) else None for name, x in found.items()}


@dataclass(frozen=True, eq=False)
class Predictive:
    """Data replicated from the posterior beside the observed ones.

    `replicates` and `observed`: `{site: (n, *shape)}` and `{site: shape}`; `statistics`: a table of summary statistics,
    and `values` those of the replicates, one array for each of its rows.
    """

    replicates: dict[str, np.ndarray]
    observed: dict[str, np.ndarray]
    statistics: pd.DataFrame
    values: list[Float[np.ndarray, " n"]]
    finding: Finding


@dataclass(frozen=True, eq=False)
class Check:
    """What `cpe.check` found. `print(check)` shows it; `check.ok` says whether every check was passed.

    - `ranks`: of the true value among the draws, `{parameter: (n,)}`, 0 to `draws`; uniform if the posterior is right.
    - `joint`, `tarp`: the same for the joint posterior: ranks of the distance from the draws' mean, and from a point
        that the data choose.
    - `given_data`: ranks of each parameter, in the direction that a regression on the data predicts; `width`: those of
        the distance from the mean; `projection`: those of the parameters' sum, weighted by what is predicted.
    - `likelihood`: ranks of the log-likelihood, among `likelihood_draws` draws, where the data have a density.
    - `density`: the log-density of the true parameters, where the posterior has one.
    - `calibration`: a table with a row for each parameter: p-value, verdict, and the coverage of central intervals; and
        the p-value given the data.
    - `typicality`, `predictive`: of the observation, if one was given.

    What the data predict is learned from the first tenth of the observations, so that fewer ranks are there of it.
    """

    graph: Graph
    ranks: dict[str, Ranks]
    joint: Ranks
    tarp: Predicted
    given_data: dict[str, Predicted]
    width: Predicted
    projection: Predicted
    likelihood: Int[np.ndarray, " k"] | None
    likelihood_draws: int
    density: Density | None
    draws: int
    level: float
    calibration: pd.DataFrame
    findings: tuple[Finding, ...]
    typicality: Typicality | None
    predictive: Predictive | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every check was passed."""
        return all(finding.ok for finding in self.findings)

    @property
    def n(self) -> int:
        """How many simulated observations were used."""
        return len(self.joint)

    @property
    def tests(self) -> int:
        """How many tests share the half of the level that goes to calibration and use of the data."""
        return 2 * len(self.ranks) + 4 + (self.likelihood is not None) + (self.density is not None)

    def __str__(self) -> str:
        return "\n".join(f"{'ok ' if f.ok else 'BAD'}  {f.check}: {f.sentence}" for f in self.findings)


def check(
    posterior: Sampler,
    given: Mapping[str, Any] | None = None,
    simulations: Mapping[str, Any] | None = None,
    *,
    key: PRNGKeyArray,
    n: int = 1000,
    draws: int = 1000,
    level: float = 0.01,
    progress: bool | None = None,
) -> Check:
    """Check a posterior: its calibration, and whether it can be used for an observation.

    *Calibration* needs no observation. For `n` simulated observations, whose parameters are known, the posterior is
    sampled in one compiled call. If it is right, then the rank of the true value among the draws is uniform, for each
    parameter (simulation-based calibration, Talts et al. 2018) and for any quantity of parameters and data (Modrák et
    al. 2023). Tested are the ranks of each parameter; of the Mahalanobis distance from the draws' own mean, which is
    the coverage of credible ellipsoids; and of the distance from a point that the data choose (TARP, Lemos et al.
    2023). Each test compares the ranks' distribution function with the uniform one, everywhere at once and exactly
    (Säilynoja et al. 2022). Coverage of central intervals is told for each parameter.

    *Use of the data*: a posterior that ignores them, or a part of them, can be calibrated. So a regression on the data,
    fitted to earlier simulations, predicts on which side of the draws the true value is; ranks in that direction are
    uniform only if nothing can be predicted. So is the rank of the log-likelihood, where the data have a density; and
    the posterior's log-density of the true values, where it has one, is compared with those of the prior and of the
    regression: the product of ratios is above `1 / p` with probability `p` at most if the posterior is right.

    *Typicality* asks whether an observation is like simulated data. Its distance from simulated data (the mean over the
    nearest neighbours, in standardised principal components) is ranked among the distances of other simulated data.
    *Predictive checks* do the same with summary statistics of data replicated from its posterior.

    All tests together have level `level`: a right posterior with a typical observation fails in at most 1 % of all runs
    (half of it goes to calibration and use of the data, by Holm's procedure over all tests; a quarter each to the other
    two).

    **Arguments:**

    - `posterior`: from `cpe.fit` or `cpe.load`.
    - `given`: an observation, `{site: array}`, or many with a leading axis. Of many, the least typical one is
        replicated.
    - `simulations`: from `cpe.simulate`, and not those the posterior was trained on; `n` new ones if left out.
    - `key`: a JAX key.
    - `n`, `draws`: simulated observations, and draws for each.
    - `progress`: a progress bar for simulators on the host; by default where there is a terminal.

    **Returns:** a `Check`, with tables, ranks and plain sentences. `cpe.plot.ranks`, `cpe.plot.coverage` and
    `cpe.plot.predictive` draw it.

    ??? example

        ```python
        check = cpe.check(posterior, given={"y": y}, key=jax.random.key(3))
        print(check)
        check.calibration
        ```
    """
    began = time.perf_counter()
    check_count(n, "n, the number of simulated observations,")
    check_count(draws, "draws")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; found {level!r}.")
    graph = posterior.graph
    keys = jax.random.split(check_key(key), 3)
    if simulations is None:
        simulations = simulate(posterior.model, n, key=keys[0], progress=progress)
        if simulations.interrupted:
            raise KeyboardInterrupt
    rows = graph.without_masked({name: _floats(simulations[name])[:n] for name in graph.sites})
    n = len(rows[graph.parameters[0]])
    if n < 20:
        raise ValueError(f"There are {n} simulated observations to check with; at least 20 are needed, 1,000 are good.")
    typicality = predictive = one = None
    which = ""
    if given is not None:
        observed = graph.without_masked({name: _floats(given[name]) for name in graph.data})
        many = all(x.ndim > len(graph.sites[name].shape) for name, x in observed.items())
        observed = observed if many else {name: x[None] for name, x in observed.items()}
        typicality = _typicality(graph, rows, observed, level / 4)
        worst = int(np.argmin(typicality.p - 1e-6 * typicality.distance))
        one = {name: x[worst] for name, x in observed.items()}
        which = f"Observation {worst}, the least typical: " if many else ""
    likelihood = Likelihood(posterior.program, graph)
    rng = np.random.default_rng(key_words(keys[1]))
    found = _ranks(posterior, rows, one, draws, keys[1], rng, likelihood)
    density = _density(posterior, rows, found, likelihood)
    names = parameter_names(graph)
    calibration, findings = _calibration(names, found, density, draws, level, likelihood.missing)
    if typicality is not None and one is not None:
        typical = typicality.finding.ok
        predictive, last = _predictive(posterior, one, found, level / 4, keys[2], which, typical, progress)
        findings += [typicality.finding, last]
    return Check(
        graph,
        dict(zip(names, found.ranks.T, strict=True)),
        found.joint,
        found.tarp,
        dict(zip(names, found.given.T, strict=True)),
        found.width,
        found.projection,
        found.likelihood,
        min(draws, LIKELIHOOD_DRAWS),
        density,
        draws,
        level,
        calibration,
        tuple(findings),
        typicality,
        predictive,
        time.perf_counter() - began,
    )


def _floats(x: Any) -> np.ndarray:
    """Values with all digits they have; whole numbers as floats."""
    x = np.asarray(x)
    return x if x.dtype.kind == "f" else x.astype(np.float64)


def parameter_names(graph: Graph) -> list[str]:
    """Every scalar parameter by name and index, `beta[3]`, in the program's order."""
    return [name for site in graph.parameters for name in member_names(site, graph.sites[site].shape)]


def member_names(name: str, shape: Sequence[int]) -> list[str]:
    """The numbers of a site by name, as NumPy indexes them."""
    return [f"{name}[{', '.join(map(str, i))}]" if shape else name for i in np.ndindex(*shape)]


def flat_draws(posterior: xr.Dataset, graph: Graph) -> Float[np.ndarray, "*lead d"]:
    """Draws `(draw, ..., d)` with all parameters in one axis, in the order of `parameter_names`."""
    out = []
    for name in graph.parameters:
        x = posterior[name].values
        x = x.reshape(-1, *x.shape[2:])  # chains are no different
        shape = graph.sites[name].shape
        out.append(x.reshape(*x.shape[: x.ndim - len(shape)], math.prod(shape)))
    return np.concatenate(out, axis=-1)


# ---- calibration


@dataclass(frozen=True, eq=False)
class _Ranked:
    """Ranks of `n` simulated observations, and of those `m` that a regression on earlier ones predicts."""

    ranks: Int[np.ndarray, "n d"]
    joint: Ranks
    tarp: Predicted
    given: Int[np.ndarray, "m d"]
    width: Predicted
    projection: Predicted
    likelihood: Int[np.ndarray, " k"] | None
    regression: Float[np.ndarray, " m"]
    """The regression's log-density of the true parameters."""
    of_one: dict[str, np.ndarray]
    """Draws for the observation at hand, `{parameter: (draws, *shape)}`; empty without one, or where it failed."""
    failure: str


def _ranks(
    posterior: Sampler,
    rows: Mapping[str, np.ndarray],
    one: Mapping[str, np.ndarray] | None,
    draws: int,
    key: PRNGKeyArray,
    rng: np.random.Generator,
    likelihood: Likelihood,
) -> _Ranked:
    """All ranks, in one pass through the draws, which are never held all at once.

    The observation `one` at hand goes with the simulated ones, because a call for it alone would have to be compiled.

    What predicts simulation `i` is fitted to simulations before it, so that, given these and all data, its rank is
    uniform if the posterior is right, and all ranks of a quantity are independent.
    """
    graph = posterior.graph
    n = len(rows[graph.parameters[0]])
    truth = np.concatenate([rows[name].reshape(n, -1) for name in graph.parameters], axis=1).astype(np.float64)
    d = truth.shape[1]
    features = regression_features(graph, rows)
    refits = fitted_at(n)
    begin = refits[0]
    ranks, joint, tarp = np.zeros((n, d), int), np.zeros(n, int), np.zeros(n, int)
    projection, likely, seconds = np.zeros(n, int), np.full(n, -1), 0.0
    points, towards, regression = np.zeros((n, d)), np.zeros((n, d + 1)), np.zeros(n)
    spread = np.ones(d)
    data = {name: rows[name] if one is None else np.concatenate([rows[name], one[name][None]]) for name in graph.data}
    count = n if one is None else n + 1
    chunk = max(1, min(count, MOST_NUMBERS // (draws * d)))
    of_one: dict[str, np.ndarray] = {}
    failure = ""
    began = time.perf_counter()
    for start in range(0, count, chunk):
        which = np.arange(start, start + chunk) % count  # one shape, one compilation
        holds_one = one is not None and start <= n < start + chunk
        try:
            found = _sample(posterior, draws, data, which, jax.random.fold_in(key, start))
        except (RuntimeError, FloatingPointError) as error:
            if not holds_one:
                raise
            failure = f"there are no draws for it ({error})"  # of the others there may be
            found = _sample(posterior, draws, data, np.where(which == n, 0, which), jax.random.fold_in(key, start))
        drawn = flat_draws(found, graph)  # (draws, chunk, d)
        if holds_one and not failure:
            of_one = {name: found[name].values[0, :, n - start] for name in graph.parameters}
        for i in _groups(start, min(start + chunk, n), refits):
            if i[0] in refits:
                before, now = slice(0, i[0]), slice(i[0], min([*(r for r in refits if r > i[0]), n]))
                fitted = guess(truth[before], features[before], np.column_stack([ranks, joint])[before] / draws - 0.5)
                points[now] = fitted.points(features[now], rng)
                towards[now] = fitted.direction(features[now])
                regression[now] = fitted.log_density(truth[now], features[now])
                spread = fitted.spread
            every = np.concatenate([truth[i][None], drawn[:, i - start]]).astype(np.float64).transpose(1, 0, 2)
            ranks[i] = _rank(every, rng)
            mean, sd = every.mean(1, keepdims=True), every.std(1, keepdims=True)
            centred = (every - mean) / np.where(sd > 0, sd, 1.0)
            joint[i] = _rank(_from_mean(centred), rng)
            if i[0] >= begin:
                tarp[i] = _rank(np.square((every - points[i][:, None]) / spread).sum(2), rng)
                projection[i] = _rank(np.einsum("mkd,md->mk", centred, towards[i, :d]), rng)
            if not likelihood.missing and seconds <= max(SECONDS, SHARE * (time.perf_counter() - began)):
                since = time.perf_counter()
                few = _by_site(every[:, : LIKELIHOOD_DRAWS + 1], graph)
                log = likelihood(few, {name: rows[name][i] for name in graph.data})
                likely[i] = _rank(np.where(np.isnan(log), -np.inf, log), rng)
                seconds += time.perf_counter() - since if i[0] else 0.0  # the first is compiled
    # A rank among draws in reversed order: the side of the median that the data predict is up.
    up = towards[begin:] >= 0
    given = np.where(up[:, :d], ranks[begin:], draws - ranks[begin:])
    width = np.where(up[:, d], joint[begin:], draws - joint[begin:])
    of_likelihood = likely[likely >= 0] if (likely >= 0).sum() >= 20 else None
    return _Ranked(
        ranks,
        joint,
        tarp[begin:],
        given,
        width,
        projection[begin:],
        of_likelihood,
        regression[begin:],
        of_one,
        failure,
    )


def _sample(
    posterior: Sampler, draws: int, data: Mapping[str, np.ndarray], which: np.ndarray, key: PRNGKeyArray
) -> xr.Dataset:
    return posterior.sample(draws, {name: x[which] for name, x in data.items()}, key=key)["posterior"].dataset


def _groups(start: int, stop: int, refits: Sequence[int]) -> Iterator[Int[np.ndarray, " m"]]:
    """A few observations at a time are faster than one, and than all; none is across a refit."""
    while start < stop:
        end = min([start + 50, stop, *(r for r in refits if r > start)])
        yield np.arange(start, end)
        start = end


def _by_site(flat: Float[np.ndarray, "m k d"], graph: Graph) -> dict[str, np.ndarray]:
    shapes = [graph.sites[name].shape for name in graph.parameters]
    parts = np.split(flat.astype(np.float32), np.cumsum([math.prod(s) for s in shapes])[:-1], axis=2)
    return {
        name: part.reshape(*part.shape[:2], *shape)
        for name, part, shape in zip(graph.parameters, parts, shapes, strict=True)
    }


def _rank(x: Float[np.ndarray, "m draws_1 *d"], rng: np.random.Generator) -> Int[np.ndarray, "m *d"]:
    """How many draws are smaller than the first of them; among equal ones the place is drawn."""
    truth, draws = x[:, :1], x[:, 1:]
    return (draws < truth).sum(1) + rng.integers(0, (draws == truth).sum(1) + 1)


def _from_mean(centred: Float[np.ndarray, "m draws_1 d"]) -> Float[np.ndarray, "m draws_1"]:
    """Squared Mahalanobis distances from the mean of all draws, which are standardised, by their own covariance.

    The true value is one of them, so that it is exchangeable with the draws and its rank exactly uniform. With many
    parameters the covariance would be mostly noise, and variances alone are used.
    """
    if 10 * centred.shape[2] > centred.shape[1]:
        return np.square(centred).sum(2)
    covariance = centred.transpose(0, 2, 1) @ centred / centred.shape[1] + 1e-6 * np.eye(centred.shape[2])
    return (centred @ np.linalg.inv(covariance) * centred).sum(2)


def _density(
    posterior: Sampler, rows: Mapping[str, np.ndarray], found: _Ranked, likelihood: Likelihood
) -> Density | None:
    """The posterior's log-density of the true parameters beside the prior's and the regression's.

    Given the data, the mean of `r(θ) / q(θ | x)` over a right posterior `q` is the integral of `r`, which is 1 for a
    density. So products over independent simulations have mean 1, and are above `1 / p` with probability at most `p`;
    the mean of two such products too.
    """
    graph = posterior.graph
    log_q = log_density(
        posterior, {name: rows[name] for name in graph.parameters}, {name: rows[name] for name in graph.data}
    )
    log_prior = None if log_q is None else likelihood.prior(rows)
    if log_q is None or log_prior is None:
        return None
    n, begin = len(log_q), len(log_q) - len(found.regression)
    with np.errstate(invalid="ignore"):
        gain = log_q - log_prior
    regression = found.regression if likelihood.flat else np.full(n - begin, -np.inf)
    starts = [0, *(refit - begin for refit in fitted_at(n)[1:])]
    better = better_guess(log_prior[begin:], regression, starts) - log_prior[begin:]
    known = np.isfinite(gain[begin:]) & np.isfinite(better)  # a true value may be rounded out of its support
    logs = np.array([-gain[begin:][known].sum(), (better - gain[begin:])[known].sum()])
    p = math.exp(min(0.0, -float(np.logaddexp(*logs) - math.log(2))))
    return Density(gain, better, p)


def _calibration(
    names: Sequence[str], found: _Ranked, density: Density | None, draws: int, level: float, no_likelihood: str
) -> tuple[pd.DataFrame, list[Finding]]:
    n, d = len(found.joint), len(names)
    few = min(draws, LIKELIHOOD_DRAWS)
    ranks = dict(zip(names, found.ranks.T, strict=True))
    tests = {f"ranks {name}": p_value(r, draws) for name, r in ranks.items()}
    tests |= {f"given {name}": p_above(r, draws) for name, r in zip(names, found.given.T, strict=True)}
    tests |= {"joint": p_value(found.joint, draws), "tarp": p_value(found.tarp, draws)}
    tests |= {"width": p_above(found.width, draws), "projection": p_above(found.projection, draws)}
    tests |= {} if found.likelihood is None else {"likelihood": p_value(found.likelihood, few)}
    tests |= {} if density is None else {"density": density.p}
    p = np.array(list(tests.values()))
    # Holm may stop at any of them; the rest is described by its own numbers.
    bad = dict(zip(tests, _holm(p, level / 2).tolist(), strict=True))
    single, given = p[:d], p[d : 2 * d]
    flagged = np.array([bad[f"ranks {name}"] for name in names])
    cover = {name: central(r, draws, LEVELS) for name, r in ranks.items()}
    verdicts = [
        _verdict(r, draws) if is_bad else "calibrated" for r, is_bad in zip(ranks.values(), flagged, strict=True)
    ]
    table = pd.DataFrame({"p": single, "verdict": verdicts}, index=pd.Index(names, name="parameter"))
    for i, c in enumerate(LEVELS):
        table[f"{c:.0%}"] = [cover[name][i] for name in ranks]
    table["p given data"] = given
    table["given data"] = ["biased" if bad[f"given {name}"] else "unbiased" for name in names]
    if flagged.any():
        sentence = "; ".join(_complaints(ranks, flagged, draws)) + "."
    else:
        least = min(names, key=lambda name: table["p"][name])
        many = f"all {len(ranks)} parameters" if len(ranks) > 1 else "the parameter"
        smallest = f"smallest p {_p_words(table['p'][least])}, {least}"
        sentence = f"calibrated: the ranks of {many} are uniform over {n:,} simulated observations ({smallest})."
    findings = [Finding("Ranks (SBC)", not flagged.any(), sentence)]
    narrow, wide = table["90%"].idxmin(), table["90%"].idxmax()
    held = f"{percent(table['90%'][narrow])} ({narrow})"
    if len(ranks) > 1:
        held += f" to {percent(table['90%'][wide])} ({wide})"
    verdict = f"{_verdict(found.joint, draws, joint=True)}: " if bad["joint"] else ""
    sentence = (
        f"{verdict}90 % intervals of single parameters hold {held} of the true values, and 90 % ellipsoids of the "
        f"joint posterior {percent(inner(found.joint, draws, (0.9,))[0])} (p {_p_words(tests['joint'])})."
    )
    findings.append(Finding("Coverage", not bad["joint"], sentence))
    outcome = "not calibrated" if bad["tarp"] else "calibrated"
    sentence = f"{outcome}: ranks of the distance from points that the data choose have p {_p_words(tests['tarp'])}."
    findings.append(Finding("Joint coverage (TARP)", not bad["tarp"], sentence))
    findings.append(_use_of_data(names, found, tests, bad, draws, no_likelihood))
    if found.likelihood is not None:
        findings.append(_of_likelihood(found.likelihood, few, n, tests["likelihood"], bad["likelihood"]))
    if density is not None:
        findings.append(_of_density(density, bad["density"]))
    return table, findings


def _use_of_data(
    names: Sequence[str],
    found: _Ranked,
    tests: Mapping[str, float],
    bad: Mapping[str, bool],
    draws: int,
    no_likelihood: str,
    most: int = 6,
) -> Finding:
    """Whether a regression on the data predicts where the true values are among the draws."""
    wrong = [name for name in names if bad[f"given {name}"]]
    wrong.sort(key=lambda name: tests[f"given {name}"])
    if wrong or bad["projection"]:
        share = {name: (r > draws / 2).mean() for name, r in zip(names, found.given.T, strict=True)}
        worst = max(wrong or names, key=lambda name: abs(share[name] - 0.5))
        more = f" and {len(wrong) - most} more" if len(wrong) > most else ""
        of = ", ".join(wrong[:most]) + more if wrong else "a combination of the parameters"
        sentence = (
            f"the posterior ignores or misreads what the data tell of {of}: {percent(share[worst], 0)} of the true "
            f"values of {worst} are on the side of the draws' median that a regression on the data predicts."
        )
    elif bad["width"]:
        sentence = (
            "the posterior is too wide for some data and too narrow for others: a regression on the data predicts how "
            f"far from the draws' mean the true values are (p {_p_words(tests['width'])})."
        )
    else:
        own = {name: p for name, p in tests.items() if name.startswith("given ")}
        own |= {"the width": tests["width"], "all parameters together": tests["projection"]}
        least = min(own, key=lambda name: own[name])
        sentence = (
            "nothing that is seen to be missed: a regression on the data cannot predict where the true values are "
            f"among the draws (smallest p {_p_words(own[least])}, {least.removeprefix('given ')})."
        )
    if found.likelihood is None:
        why = no_likelihood or "it takes too long to evaluate"
        sentence += f" The likelihood was not tested: {why}."
    ok = not (wrong or bad["projection"] or bad["width"])
    return Finding("Use of the data", ok, sentence)


def _of_likelihood(ranks: Ranks, draws: int, n: int, p: float, bad: bool) -> Finding:
    of = "" if len(ranks) == n else f", for {len(ranks)} of {n:,} observations,"
    share = percent(((ranks + 0.5) / (draws + 1)).mean(), 0)
    if not bad:
        return Finding(
            "Likelihood", True, f"ranks of the true parameters' log-likelihood{of} are uniform (p {_p_words(p)})."
        )
    more = (
        "The draws fit the data too little: the posterior ignores or misreads a part of them, loses correlations, or "
        "is too wide."
        if ranks.mean() > draws / 2
        else "The draws fit the data too well: the posterior is too narrow."
    )
    sentence = f"the true parameters' log-likelihood{of} is above that of {share} of the draws, where 50 % is right "
    if abs(ranks.mean() - draws / 2) < 0.03 * draws:
        sentence, more = f"ranks of the true parameters' log-likelihood{of} are not uniform ", ""
    return Finding("Likelihood", False, f"{sentence}(p {_p_words(p)}). {more}".strip())


def _of_density(density: Density, bad: bool) -> Finding:
    infinite = int((~np.isfinite(density.gain)).sum())
    no_better = density.mean <= 3 * density.error
    sentence = (
        f"the log-density of the true parameters is {density.mean:.2f} ± {density.error:.2f} above the prior's"
        f"{', no better than it' if no_better else ''}; by a regression on the data {density.regression.mean():.2f}."
    )
    if bad:
        than = "the prior" if density.mean < min(0.0, density.regression.mean()) else "a regression"
        sentence = f"worse than {than} (p {_p_words(density.p)}): {sentence}"
    if infinite:
        sentence += f" It is not finite for {infinite} of {len(density.gain):,}."
    return Finding("Held-out density", not bad and infinite <= 0.01 * len(density.gain), sentence)


def _complaints(ranks: Mapping[str, Ranks], flagged: np.ndarray, draws: int, most: int = 6) -> Iterator[str]:
    bad = [name for name, is_bad in zip(ranks, flagged, strict=True) if is_bad]
    bad.sort(key=lambda name: -abs(central(ranks[name], draws, (0.9,))[0] - 0.9))
    for name in bad[:most]:
        yield f"{_verdict(ranks[name], draws)} for {name}: {_evidence(ranks[name], draws)}"
    if len(bad) > most:
        yield f"and {len(bad) - most} more parameters"


def _verdict(ranks: Ranks, draws: int, joint: bool = False) -> str:
    """What is wrong with a posterior whose ranks are not uniform."""
    n, u = len(ranks), (ranks + 0.5) / (draws + 1)
    shift = (u.mean() - 0.5) * math.sqrt(12 * n)
    if joint:  # ranks of a distance from the middle
        return "too narrow" if shift > 0 else "too wide"
    spread = (np.square(u - 0.5).mean() - 1 / 12) * math.sqrt(180 * n)
    if max(abs(shift), abs(spread)) < 2.5:
        return "wrong in shape"
    if abs(shift) > abs(spread):
        return "too low" if shift > 0 else "too high"
    return "too narrow" if spread > 0 else "too wide"


def _evidence(ranks: Ranks, draws: int) -> str:
    if _verdict(ranks, draws) in ("too low", "too high"):
        return f"{percent((ranks > draws / 2).mean(), 0)} of the true values are above the median"
    return f"its 90 % intervals hold {percent(central(ranks, draws, (0.9,))[0])} of the true values"


def central(ranks: Ranks, draws: int, levels: Sequence[float] | np.ndarray) -> Float[np.ndarray, " levels"]:
    """The share of true values inside the central credible intervals of given levels."""
    off = np.abs((ranks + 0.5) / (draws + 1) - 0.5)
    return (off[:, None] <= np.asarray(levels) / 2).mean(0)


def inner(ranks: Ranks, draws: int, levels: Sequence[float] | np.ndarray) -> Float[np.ndarray, " levels"]:
    """The share of true values inside the regions of given levels, by ranks of a distance."""
    return ((ranks + 0.5)[:, None] / (draws + 1) <= np.asarray(levels)).mean(0)


def _holm(p: Float[np.ndarray, " m"], level: float) -> np.ndarray:
    """Which of several hypotheses are rejected, with a family-wise error of at most `level` (Holm 1979)."""
    order = np.argsort(p)
    passed = p[order] > level / np.arange(len(p), 0, -1)
    first = int(np.argmax(passed)) if passed.any() else len(p)
    out = np.zeros(len(p), bool)
    out[order[:first]] = True
    return out


def percent(share: float, digits: int = 1) -> str:
    """A share in words."""
    return f"{100 * share:.{digits}f} %"


def _p_words(p: float) -> str:
    return f"= {p:.2g}" if p >= 1e-4 else "< 0.0001"


# ---- the distribution function of ranks, tested everywhere at once


@dataclass(frozen=True, eq=False)
class _Null:
    """Counts of ranks at most `at`, of `n` ranks that are uniform on 0..draws."""

    at: np.ndarray
    z: np.ndarray
    tails: Float[np.ndarray, "points counts"]
    """Two-sided tail probability of each count 0..n, at each point."""

    def bounds(self, tail: float) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest count whose tail probability is above `tail`."""
        inside = self.tails > tail
        return inside.argmax(1), inside.shape[1] - 1 - inside[:, ::-1].argmax(1)

    def outside(self, tail: float) -> float:
        """The probability that the counts leave these bounds somewhere.

        The counts are a Markov chain,
        `c_k − c_{k−1} | c_{k−1} ~ Binomial(n − c_{k−1}, (z_k − z_{k−1}) / (1 − z_{k−1}))`,
        and the probability that it stays inside is a product of matrices (Säilynoja et al. 2022, algorithm 1).
        """
        n = self.tails.shape[1] - 1
        low, high = self.bounds(tail)
        factorial = gammaln(np.arange(n + 1) + 1.0)
        state, counts, before = np.ones(1), np.zeros(1, int), 0.0
        for z, a, b in zip(self.z, low, high, strict=True):
            new = np.arange(a, b + 1)
            share = (z - before) / (1 - before)
            more = new[None] - counts[:, None]
            k = np.maximum(more, 0)
            rest = n - counts[:, None]
            log = factorial[rest] - factorial[k] - factorial[np.maximum(rest - k, 0)]
            log = log + k * math.log(share) + (rest - k) * math.log1p(-share)
            state = state @ np.where(more >= 0, np.exp(log), 0.0)
            counts, before = new, z
        return max(0.0, 1.0 - float(state.sum()))


@lru_cache(maxsize=8)
def _null(n: int, draws: int) -> _Null:
    points = min(draws, 100)
    at = np.unique(np.linspace(0, draws, points + 2).astype(int)[1:-1]) if draws > 1 else np.zeros(1, int)
    z = (at + 1) / (draws + 1)
    counts = np.arange(n + 1)[None]
    below, above = stats.binom.cdf(counts, n, z[:, None]), stats.binom.sf(counts - 1, n, z[:, None])
    return _Null(at, z, np.minimum(1.0, 2 * np.minimum(below, above)))


def p_value(ranks: Ranks, draws: int) -> float:
    """The p-value of ranks 0..draws against the uniform distribution, exact.

    The statistic is the smallest two-sided binomial tail probability of the empirical distribution function, over 100
    points.
    """
    null = _null(len(ranks), draws)
    counts = np.searchsorted(np.sort(ranks), null.at, side="right")
    tail = float(null.tails[np.arange(len(counts)), counts].min())
    return _outside(len(ranks), draws, math.ceil(100 * math.log10(max(tail, SMALLEST))))


def p_above(ranks: Ranks, draws: int) -> float:
    """The p-value of ranks 0..draws against more of them above the middle, exact: that of a sign test.

    Other faults than a shift, such as draws that are too narrow, leave it alone.
    """
    above = int((2 * ranks > draws).sum())
    return float(stats.binom.sf(above - 1, len(ranks), ((draws + 1) // 2) / (draws + 1)))


@lru_cache(maxsize=4096)
def _outside(n: int, draws: int, hundredths: int) -> float:
    """By hundredths of a decade, rounded up: the same for many parameters, and never too small."""
    return _null(n, draws).outside(min(1.0, 10 ** (hundredths / 100)) * (1 - 1e-9))


@lru_cache(maxsize=64)
def bands(
    n: int, draws: int, level: float
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"], Float[np.ndarray, " points"]]:
    """Points `z`, and bounds that the distribution function of `n` uniform ranks leaves with probability `level`."""
    null = _null(n, draws)
    low, high = math.log10(SMALLEST), 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if null.outside(10**middle) <= level else (low, middle)
    least, most = null.bounds(10**low)
    return null.z, least / n, most / n


# ---- data


def _distances(reference: Float[np.ndarray, "r p"], *others: Float[np.ndarray, "_ p"]) -> list[Float[np.ndarray, " _"]]:
    """How far rows are from the reference rows: the mean distance to the nearest of them.

    Columns are standardised robustly, without bounds, so that the distance grows with any value beyond the reference;
    turned to at most 50 principal components of unit variance; and what these leave out becomes one more: its length.
    """
    standardise = Features(np.asarray(reference, np.float64))
    features = [standardise(np.asarray(x, np.float64)) for x in (reference, *others)]
    centre = features[0].mean(0)
    _, scale, axes = np.linalg.svd(features[0] - centre, full_matrices=False)
    keep = max(1, min(50, len(reference) // 4, int((scale > 1e-6 * max(scale[0], 1e-30)).sum())))
    axes, scale = axes[:keep], np.maximum(scale[:keep], 1e-12) / math.sqrt(len(reference))

    def coordinates(x: np.ndarray) -> np.ndarray:
        along = (x - centre) @ axes.T
        rest = np.linalg.norm(x - centre - along @ axes, axis=1)
        return np.concatenate([along / scale, rest[:, None] / max(unit, 1e-6)], axis=1)

    unit = 1.0
    unit = float(np.median(coordinates(features[0])[:, -1]))
    inside = coordinates(features[0])
    out = []
    for x in features[1:]:
        y = coordinates(x)
        squares = np.square(y).sum(1)[:, None] + np.square(inside).sum(1) - 2 * y @ inside.T
        nearest = np.sort(np.maximum(squares, 0.0), axis=1)[:, : min(NEIGHBOURS, len(inside))]
        out.append(np.sqrt(nearest).mean(1))
    return out


def _rank_p(distance: np.ndarray, simulated: np.ndarray) -> np.ndarray:
    """The share of simulated distances that are as large; exact, as an observation that was simulated is one of them.

    Beyond the largest simulated distance, a Pareto tail (Hill's estimator on the largest tenth) tells far from farther.
    """
    p = (1 + (simulated >= distance[:, None]).sum(1)) / (len(simulated) + 1)
    tail = np.sort(simulated)[-max(5, len(simulated) // 10) :]
    threshold = max(float(tail[0]), 1e-12)
    slope = max(float(np.log(np.maximum(tail, 1e-12) / threshold).mean()), 1e-3)
    beyond = len(tail) / len(simulated) * np.maximum(distance / threshold, 1.0) ** (-1 / slope)
    return np.where(distance > simulated.max(), np.minimum(p, beyond), p)


def _typicality(
    graph: Graph, rows: Mapping[str, np.ndarray], observed: Mapping[str, np.ndarray], level: float
) -> Typicality:
    def flat(values: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([values[name].reshape(len(values[name]), -1) for name in graph.data], axis=1)

    simulated, given = flat(rows), flat(observed)
    third = max(10, len(simulated) // 3)
    null, distance = _distances(simulated[:third], simulated[third:], given)
    p = _rank_p(distance, null)
    bad = _holm(p, level)
    subject = "the observation" if len(p) == 1 else f"all {len(p)} observations"
    least = f"{'p' if len(p) == 1 else 'smallest p'} {_p_words(p.min())}"
    if bad.any():
        worst = int(np.argmin(p - 1e-6 * distance))
        which = (
            "The observation" if len(p) == 1 else f"{int(bad.sum())} of {len(p)} observations, first of all {worst},"
        )
        verb = "is" if len(p) == 1 else "are"
        sentence = (
            f"NOT TYPICAL. {which} {verb} unlike what the program simulates (distance {distance[worst]:.2g}, simulated "
            f"data {np.median(null):.2g} and at most {null.max():.2g}; {least}). "
            f"{_furthest(graph, simulated, given[worst])}"
            "The posterior extrapolates there and cannot be trusted: check the data (units, order, missing values), or "
            "let the program produce such data."
        )
    elif p.min() * len(p) <= UNUSUAL or (len(p) == 1 and distance[0] > null.max()):
        further = "all" if distance.max() > null.max() else "nearly all"
        which = subject if len(p) == 1 else f"one of {len(p)} observations"
        sentence = (
            f"unusual: {which} is further from other data than {further} that were simulated ({least}); more "
            f"simulations to check with than {len(simulated)} could tell more."
        )
    else:
        sentence = f"typical: {subject} could have been simulated ({least})."
    return Typicality(distance, null, p, Finding("Observation", not bad.any(), sentence))


def _furthest(graph: Graph, simulated: np.ndarray, given: np.ndarray) -> str:
    names = [name for site in graph.data for name in member_names(site, graph.sites[site].shape)]
    low, high = simulated.min(0), simulated.max(0)
    outside = np.maximum(low - given, given - high) / np.where(high > low, high - low, 1.0)
    if not (outside > 0).any():
        return "Each number is within its simulated range; their combination is not. "
    i = int(outside.argmax())
    count = int((outside > 0).sum())
    more = f"; {count - 1} more of {len(given)} are outside theirs" if count > 1 else ""
    return f"{names[i]} = {given[i]:.4g} is outside the simulated range, {low[i]:.4g} to {high[i]:.4g}{more}. "


# ---- predictive checks


def _predictive(
    posterior: Sampler,
    observed: Mapping[str, np.ndarray],
    found: _Ranked,
    level: float,
    key: PRNGKeyArray,
    which: str,
    typical: bool,
    progress: bool | None,
) -> tuple[Predictive | None, Finding]:
    graph, drawn, failure = posterior.graph, found.of_one, found.failure
    if not failure:
        n = len(drawn[graph.parameters[0]])
        try:
            replicated = simulate(posterior.program, n, observed=graph.data, values=drawn, key=key, progress=progress)
        except Exception as error:  # whatever the program does there, the rest is known already
            failure = f"its draws cannot be simulated from ({error})"
    if failure:
        sentence = (
            f"{which}{'' if typical else 'NOT TYPICAL, and '}no data can be drawn from its posterior: {failure}. The "
            "posterior cannot be trusted there."
        )
        return None, Finding("Posterior predictive", False, sentence)
    table, columns, at = [], [], []
    for name in graph.data:
        event = len(graph.sites[name].event_shape)
        new, old = (summary_statistics(x, event) for x in (replicated[name], observed[name][None]))
        for statistic, x in new.items():
            value = float(old[statistic][0])
            low, middle, high = np.quantile(x, [0.05, 0.5, 0.95])
            tail = min(1.0, 2 * (1 + min((x <= value).sum(), (x >= value).sum())) / (len(x) + 1))
            table.append((name, statistic, value, middle, low, high, tail))
            columns.append(x)
            at.append(value)
    frame = pd.DataFrame(table, columns=["site", "statistic", "observed", "median", "5%", "95%", "p"])
    rows = np.stack(columns, 1)
    third = max(10, len(rows) // 3)
    null, distance = _distances(rows[:third], rows[third:], np.array(at)[None])
    p = float(_rank_p(distance, null)[0])
    bad = p <= level
    if bad:
        worst = frame.loc[frame["p"].idxmin()]
        sentence = (
            f"{which}data drawn from the posterior are unlike the observed ones (p {_p_words(p)}), most of all the "
            f"{worst['statistic']} of {worst['site']}: {worst['observed']:.4g} observed, {worst['5%']:.4g} to "
            f"{worst['95%']:.4g} drawn. The model does not describe these data, or the posterior is wrong for them."
        )
    else:
        sentence = f"{which}data drawn from the posterior look like the observed ones (p {_p_words(p)})."
    replicates = {name: replicated[name] for name in graph.data}
    finding = Finding("Posterior predictive", not bad, sentence)
    return Predictive(replicates, dict(observed), frame, columns, finding), finding
