"""Refined draws: those of a flow, weighted, resampled and moved until they are of prior × likelihood.

Draws of the flow are proposals. Their importance weights, Pareto smoothed (Vehtari et al. 2024), choose among them, and
moves (`moves`) make the chosen ones distinct and forget the error of the weights. Where the weights for the posterior
itself are poor, the draws first go to prior × likelihood^power, with the greatest power for which they are good, and
from there in steps of the power, with weights and moves at each (sequential Monte Carlo; Del Moral et al. 2006). That
path needs no density of the flow but at its own draws; the flow's density takes far longer than the likelihood.

The mean weight is the evidence: the density of the data under the model. Where there are steps, or the weights have a
long tail, it is computed from the refined draws instead (`bridge`): the product of the steps' means is right only if
the moves mix at each, and its error does not tell when they do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.smc.ess import ess_solver
from blackjax.smc.resampling import systematic
from blackjax.smc.solver import dichotomy
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from scipy.special import logsumexp

from cpejax.coordinates.prior import Values
from cpejax.flows.base import Flow
from cpejax.inference.bridge import evidence
from cpejax.inference.density import check_exact, evaluate_on_cores
from cpejax.inference.likelihood import Likelihood
from cpejax.inference.moves import SWEEPS, in_chunks, moves
from cpejax.inference.sampling import MOST_NUMBERS, SHARE, draw_on_cores
from cpejax.inference.target import Target
from cpejax.inference.weights import effective_size, smooth
from cpejax.util.cores import on_cores
from cpejax.util.messages import say

FEWEST_DRAWS = 1000
"""Minimum number of draws that are weighted and moved, however few are asked for: fewer tell too little of weights."""
ENOUGH = 0.5
"""Weights are good if their effective sample size is that share of the draws."""
ROUGH = 0.05
"""Weights whose effective sample size is a smaller share are flattened until it is not: moves need different draws."""
POWERS = np.logspace(0, -6, 121)
"""The powers of the likelihood among which the first is chosen, greatest first."""
MOST_STEPS = 50
"""Maximum number of steps of the power."""
BLOCKS_BETWEEN = 5
"""Blocks of moves after each weighting but the last."""
MOST_BLOCKS = 120
"""Maximum number of blocks of moves at the posterior itself."""
DISTINCT = 0.99
"""The share of distinct draws that moves go on for."""
LEFT = 0.1
"""The share of a draw's variance that may be left of the weights' error when moves end."""
LOWEST, HIGHEST = 0.15, 0.9
"""The correlation with their start that draws need not be below, however bad the weights were, and that they are below
however good these were: copies of a draw are then not near one another."""
ROUNDING = 3e-7
"""What rounding makes of values that are the same, relative to their size and one."""
BEYOND = 1e-3
"""The share of the posterior, where no flow's draw can be, up to which the mean weight is the evidence."""
MOST_ERROR = 0.5
"""A greater standard error of a log evidence says little of itself: it is computed by the same few draws."""
HIGHEST_K = 0.7
"""A greater k̂ says that weights cannot be relied upon (Vehtari et al. 2024)."""


class Refined(NamedTuple):
    """Refined draws `{site: (n, *shape)}`, what is known of them (for their attributes), and what is doubtful."""

    values: dict[str, np.ndarray]
    attributes: dict[str, Any]
    doubts: dict[str, str]


def refine(
    flow: Flow,
    likelihood: Likelihood,
    given: Values,
    n: int,
    *,
    key: PRNGKeyArray,
    options: Mapping[str, Any] | None = None,
) -> Refined:
    """Draws of prior × likelihood for one observation, from proposals of a flow.

    **Arguments:**

    - `flow`: proposes; its density must not be random.
    - `likelihood`: of all data sites.
    - `given`: the data, `{site: shape}`, and perhaps parameters that the flow's draws can be given.
    - `n`: how many draws.
    - `options`: of the flow's draws; its `draw_options` by default.

    **Returns:** `Refined`. Attributes are `refined`, by which likelihood; `effective_sample_size` and `pareto_k`, of
    the weights, the worst of all steps; `log_evidence`, `log_evidence_error` and `evidence_by`; `distinct_share`,
    `moves` of each draw, `moves_accepted`, and `start_correlation` of draws with where the moves began, the highest
    over prior coordinates and the log-likelihood; `tempering_steps`; and `acceptance_rate` of the proposals.
    """
    proposals = Target(flow.coordinates, likelihood, dict(given))
    target = replace(proposals, coordinates=flow.coordinates.beyond_simulations()) if likelihood.exact else proposals
    shares = -(-max(n, FEWEST_DRAWS) // SHARE)
    size = 2 * -(-max(n, FEWEST_DRAWS) // (2 * shares))  # two halves
    keys = iter(jax.random.split(key, 8 + (2 + BLOCKS_BETWEEN) * MOST_STEPS + MOST_BLOCKS))
    chunk = max(1, MOST_NUMBERS // max(1, flow.numbers_per_draw()))
    several = max(2, MOST_NUMBERS // max(1, likelihood.numbers_per_value()))
    used = flow.draw_options() if options is None else options
    data = {name: jnp.asarray(x)[None] for name, x in given.items()}
    drawn, counted = draw_on_cores(flow, data, next(keys)[None], shares * size, used, chunk)
    acceptance, error = _acceptance(counted)
    by_share = {name: x[0].reshape(shares, size, *x.shape[2:]) for name, x in drawn.items()}
    log_q = _log_proposal(flow, by_share, data, chunk // 2) - math.log(acceptance)
    found = on_cores(_evaluate, [(target, {k: x[s] for k, x in by_share.items()}, several) for s in range(shares)])
    z, prior, log_l, volume = (np.concatenate([np.asarray(part[i]) for part in found]) for i in range(4))
    # In float64: differences of large numbers.
    ratio = prior.astype(float) - (log_q - volume.astype(float))
    bad = np.isnan(log_l) | np.isposinf(log_l) | np.isnan(log_q)
    out = bad | ~np.isfinite(prior + log_l + log_q) | ~np.isfinite(z).all(1) | ~_within(proposals, z)
    ratio, state = np.where(out, -np.inf, ratio), Draws(z, prior, np.where(out, 0.0, log_l), np.arange(len(z)))
    _check_any(ratio, likelihood, int(bad.sum()))

    # Weights, resampling, and moves on the way.
    move = partial(_move, target, shares=shares, chunk=several)
    power = _first_power(ratio, state.log_l)
    weights = smooth(ratio + power * state.log_l)
    least, k = weights.size, weights.pareto_k
    log_evidence, log_evidence_error = weights.log_mean, math.hypot(weights.error, error)
    highest = _highest_correlation(float(effective_size(ratio + state.log_l)), len(ratio))
    state = _resample(state, _flattened(weights.log), next(keys))
    accepted: list[float] = []
    steps = 1
    while power < 1 and steps < MOST_STEPS:
        for _ in range(BLOCKS_BETWEEN):
            state, rate = move(state, power, key=next(keys))
            accepted.append(rate)
        step = _next_step(state.log_l, 1 - power)
        weights = smooth(step * state.log_l)
        least, k = min(least, weights.size), max(k, weights.pareto_k)
        state = _resample(state, weights.log, next(keys))
        power, steps = min(1.0, power + step), steps + 1
    # Moves at the posterior, until the weights' error is forgotten.
    start, blocks, distinct, correlation = state, 0, 0.0, 1.0
    while blocks < MOST_BLOCKS and (distinct < DISTINCT or correlation > highest):
        state, rate = move(state, 1.0, key=next(keys))
        accepted.append(rate)
        blocks += 1
        distinct = len(np.unique(state.origin)) / len(state.origin)
        correlation = _correlation(start, state)
    mixed = power >= 1 and distinct >= DISTINCT and correlation <= highest
    beyond = 1 - float(_within(proposals, state.z).mean())
    by_weights = steps == 1 and k <= HIGHEST_K and beyond <= BEYOND
    if not by_weights:
        density = partial(_log_target, target, chunk=several)
        seed = int(jax.random.randint(next(keys), (), 0, 2**31 - 1))
        log_evidence, log_evidence_error = evidence(state.z, density(state.z), density, seed)
    values = on_cores(_to_values, [(target, part) for part in np.split(state.z, shares)])
    attributes = {
        "refined": f"by {likelihood.words}",
        "effective_sample_size": float(least * n / len(ratio)),
        "pareto_k": float(k),
        "log_evidence": float(log_evidence),
        "log_evidence_error": float(log_evidence_error),
        "evidence_by": "importance weights" if by_weights else "bridge sampling",
        "distinct_share": float(distinct),
        "moves": SWEEPS * len(accepted),
        "moves_accepted": float(np.mean(accepted)),
        "start_correlation": float(correlation),
        "tempering_steps": steps,
        "acceptance_rate": float(acceptance),
    }
    return Refined(
        {name: np.concatenate([np.asarray(v[name]) for v in values])[:n] for name in values[0]},
        attributes,
        _doubts(attributes, mixed, highest, int(bad.sum()), len(ratio), likelihood),
    )


def refine_each(
    flow: Flow, likelihood: Likelihood, data: Values, n: int, *, keys: Array, options: Mapping[str, Any]
) -> list[Refined]:
    """`refine` for each of some observations, `{site: (observations, *shape)}`; what is doubtful is said."""
    done = [
        refine(flow, likelihood, {name: x[i] for name, x in data.items()}, n, key=key, options=options)
        for i, key in enumerate(keys)
    ]
    for kind in dict.fromkeys(kind for r in done for kind in r.doubts):
        where = [i for i, r in enumerate(done) if kind in r.doubts]
        of = "" if len(done) == 1 else f"for {len(where)} of {len(done)} observations; for the first, {where[0]}: "
        say(f"Warning: refined draws: {of}{done[where[0]].doubts[kind]}")
    return done


def combined(done: Sequence[Refined]) -> dict[str, Any]:
    """The attributes of refined draws: of one observation as they are, of many as lists."""
    each = [r.attributes for r in done]
    together = {name: [a[name] for a in each] for name in each[0]}
    return each[0] if len(each) == 1 else {**together, "refined": each[0]["refined"]}


def _acceptance(counted: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """The share of proposals inside the prior's support, and the standard error of its logarithm.

    The draws of a flow that may leave the support have a density that is higher by the factor 1 / that share.
    """
    if "accepted" not in counted:
        return 1.0, 0.0
    accepted, proposed, missing = (int(counted[name].sum()) for name in ("accepted", "proposed", "missing"))
    if missing:
        raise RuntimeError(
            f"Of {proposed} proposals only {accepted} are inside the prior's support. The data may be unlike any "
            "simulation, or the posterior is trained too little."
        )
    return accepted / proposed, math.sqrt((1 - accepted / proposed) / accepted)


def _log_proposal(flow: Flow, values: Mapping[str, np.ndarray], data: Values, chunk: int) -> Float[np.ndarray, " n"]:
    """The flow's log-density of its draws, `{site: (shares, size, *shape)}`, for one observation, on all cores."""
    shares = len(next(iter(values.values())))
    repeated = {name: jnp.broadcast_to(x, (shares, *x.shape[1:])) for name, x in data.items()}
    arrays = {name: jnp.asarray(x) for name, x in values.items()}
    found, error = evaluate_on_cores(flow, arrays, repeated, flow.density_options(), max(1, chunk))
    check_exact(error)
    return found.reshape(-1).astype(float)


@eqx.filter_jit
def _evaluate(
    target: Target, values: Values, chunk: int
) -> tuple[Float[Array, "n d"], Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """Vectors of draws, their log-densities under the prior, log-likelihoods, and `log |dz/dθ|`."""
    z = target.to_z(values)
    return z, *in_chunks(target, z, chunk), target.log_volume(values)


def _log_target(target: Target, z: Float[np.ndarray, "n d"], chunk: int) -> Float[np.ndarray, " n"]:
    """The log-density of prior × likelihood at vectors, in float64."""
    prior, log_l = (np.asarray(x, float) for x in _densities(target, jnp.asarray(z, float), chunk))
    found = prior + log_l
    return np.where(np.isnan(found) | np.isposinf(found), -np.inf, found)


@eqx.filter_jit
def _densities(target: Target, z: Float[Array, "n d"], chunk: int) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    return in_chunks(target, z, chunk)


def _within(target: Target, z: Float[np.ndarray, "n d"]) -> Bool[np.ndarray, " n"]:
    """Which vectors a flow can draw; those that it clips are at an end."""
    return np.asarray(_are_within(target, jnp.asarray(z, float)))


@eqx.filter_jit
def _are_within(target: Target, z: Float[Array, "n d"]) -> Bool[Array, " n"]:
    return jax.vmap(target.within)(z)


@eqx.filter_jit
def _to_values(target: Target, z: Float[Array, "n d"]) -> Values:
    return target.to_values(z)


class Draws(NamedTuple):
    """Draws on their way: vectors, their log-densities under the prior, their log-likelihoods, and where they are from.

    Of two draws with the same `origin` one is a copy of the other. Values do not tell: rounding makes some equal.
    """

    z: Float[np.ndarray, "n d"]
    prior: Float[np.ndarray, " n"]
    log_l: Float[np.ndarray, " n"]
    origin: Int[np.ndarray, " n"]


def _move(
    target: Target, state: Draws, power: float, *, key: PRNGKeyArray, shares: int, chunk: int
) -> tuple[Draws, float]:
    """A block of moves, shares of the draws in parallel; and the share of moves that was accepted."""
    keys, strength = jax.random.split(key, shares), jnp.asarray(power, float)
    parts = zip(*(np.split(x, shares) for x in state[:3]), strict=True)
    each = [(target, jax.tree.map(jnp.asarray, part), strength, k, chunk) for part, k in zip(parts, keys, strict=True)]
    done = on_cores(moves, each)
    z, prior, log_l = (np.concatenate([np.asarray(found[i]) for found, *_ in done]) for i in range(3))
    moved = np.concatenate([np.asarray(which) for _, which, _ in done])
    origin = np.where(moved, state.origin.max() + 1 + np.arange(len(moved)), state.origin)
    return Draws(z, prior, log_l, origin), float(np.mean([float(rate) for *_, rate in done]))


def _first_power(ratio: Float[np.ndarray, " n"], log_l: Float[np.ndarray, " n"]) -> float:
    """The greatest power of the likelihood whose weights are good; if none is, that with the best."""
    sizes = effective_size(ratio + POWERS[:, None] * log_l)
    good = np.flatnonzero(sizes >= ENOUGH * len(ratio))
    return float(POWERS[good[0] if len(good) else int(np.argmax(sizes))])


def _next_step(log_l: Float[np.ndarray, " n"], rest: float) -> float:
    """By how much the power of the likelihood can grow, `rest` at most, with good weights."""
    step = float(ess_solver(lambda x: x, jnp.asarray(log_l - log_l.max()), ENOUGH, rest, dichotomy))
    return rest if step > 0.999 * rest else max(step, 1e-6)


def _flattened(log_weights: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Weights to a power at which their effective sample size is at least `ROUGH` of the draws: 1 for all but hopeless
    ones.
    """
    for power in np.linspace(1, 0, 101)[:-1]:
        flat = np.where(np.isfinite(log_weights), power * np.where(np.isfinite(log_weights), log_weights, 0), -np.inf)
        if effective_size(flat) >= ROUGH * len(flat):
            break
    return flat - logsumexp(flat)


def _resample(state: Draws, log_weights: Float[np.ndarray, " n"], key: PRNGKeyArray) -> Draws:
    """Systematic resampling; in random order, so that copies of a draw are in both halves."""
    first, second = jax.random.split(key)
    which = np.asarray(systematic(first, jnp.asarray(np.exp(log_weights)), len(log_weights)))
    which = which[np.asarray(jax.random.permutation(second, len(which)))]
    return Draws(*(x[which] for x in state))


def _highest_correlation(size: float, n: int) -> float:
    """The correlation with where moves began at which `LEFT` of a draw's variance is left of the weights' error.

    The mean of `n` resampled draws has the variance `1 / size` in units of a draw's, and moves take a part `ρ²` of its
    excess over `1 / n` along.
    """
    excess = n / max(size, 1.0) - 1
    return float(np.clip(math.sqrt(LEFT / max(excess, 1e-9)), LOWEST, HIGHEST))


def _correlation(start: Draws, end: Draws) -> float:
    """The highest correlation of draws with where they began, over coordinates and the log-likelihood.

    What is the same for all draws, as the likelihood of data that say nothing, has none.
    """
    columns = [np.column_stack([state.z, state.log_l]).astype(float) for state in (start, end)]
    varies = columns[0].std(0) > ROUNDING * (1 + np.abs(columns[0]).max(0))
    a, b = (x[:, varies] - x[:, varies].mean(0) for x in columns)
    spread = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    found = np.where(spread > 0, (a * b).sum(0) / np.where(spread > 0, spread, 1.0), 1.0)
    return float(found.max(initial=0.0))


def _check_any(ratio: Float[np.ndarray, " n"], likelihood: Likelihood, bad: int) -> None:
    if not np.isfinite(ratio).any():
        why = f"; for {bad} of them it is not a number" if bad else ""
        raise FloatingPointError(
            f"None of {len(ratio)} draws of the posterior has a density by {likelihood.words} that is above zero"
            f"{why}. The data may be impossible under the model, or unlike any simulation: see cpe.check."
        )


def _doubts(
    found: Mapping[str, Any], mixed: bool, highest: float, bad: int, n: int, likelihood: Likelihood
) -> dict[str, str]:
    """What is doubtful, by its kind, as sentences."""
    out = {}
    way = "Fit with more simulations, or with simulations near the observation; or draw more."
    if not found["pareto_k"] <= HIGHEST_K:
        out["weights"] = (
            f"the posterior's draws are far from prior × likelihood (Pareto k {found['pareto_k']:.2f}, above "
            f"{HIGHEST_K}; effective sample size {found['effective_sample_size']:.0f}): the share of each of several "
            f"modes, if there are any, and by it the evidence, cannot be relied upon. {way}"
        )
    if not mixed:
        out["moves"] = (
            f"{found['moves']} moves of each draw were not enough: {100 * found['distinct_share']:.1f} % of the draws "
            f"are distinct, and their correlation with where they began is {found['start_correlation']:.2f}, where "
            f"{highest:.2f} would do. {way}"
        )
    if not found["log_evidence_error"] <= MOST_ERROR:
        out["evidence"] = (
            f"the log evidence has a standard error of {found['log_evidence_error']:.2f}, and is not to be relied "
            "upon: the posterior has too many dimensions, or too odd a shape, for so few draws. Draw more."
        )
    if bad:
        out["numbers"] = f"{likelihood.words} is not a number for {bad} of {n} draws, which count as impossible."
    return out
