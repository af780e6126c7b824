"""`cpe.fit`: from simulations to a trained and scored posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Values
from cpejax.flows.ancestral.method import CPE
from cpejax.flows.base import Flow, Method
from cpejax.inference.interrupt import Interrupt
from cpejax.inference.loading import say_doubtful
from cpejax.inference.posterior import Posterior
from cpejax.inference.progress import Bar
from cpejax.inference.sampling import MOST_NUMBERS
from cpejax.inference.settings import DIVERGED, Training
from cpejax.inference.training import split, train
from cpejax.inference.values import centre, centred, numbers, plates
from cpejax.program.graph import Graph
from cpejax.program.model import Model, as_model
from cpejax.program.probe import Probe, Prober
from cpejax.program.simulations import Simulations, finite, offsets, say_without_digits, words
from cpejax.program.simulator import Program
from cpejax.util.keys import check_key

SCORED = 200
"""Held-out simulations by which a fit is scored."""


def fit(
    model: Model | Program,
    simulations: Mapping[str, Any],
    *,
    key: PRNGKeyArray,
    method: Method | None = None,
    training: Training | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Posterior:
    """Train a posterior on simulations of a model.

    **Arguments:**

    - `model`: a `cpe.Model`, or a NumPyro program without arguments.
    - `simulations`: from `cpe.simulate`, or any `{site: (n, *shape)}` with every site of the program.
    - `key`: a JAX key: the same key, versions and machine give the same posterior.
    - `method`: `cpe.CPE()` by default.
    - `training`: `cpe.Training()` by default.
    - `checkpoint`: a folder; a run that was killed resumes from there, to the same result.
    - `progress`: a progress bar; by default where there is a terminal.

    **Returns:** a `Posterior`. Ctrl-C stops training after the epoch that runs and returns the best so far; before the
    first epoch, or pressed again, it is a `KeyboardInterrupt`.

    >>> tiny = cpe.CPE(width=8, depth=1, hidden=8, components=2)
    >>> short = cpe.Training(max_epochs=1)
    >>> posterior = cpe.fit(model, simulations, method=tiny, training=short, key=jax.random.key(1))
    >>> posterior.n_simulations, len(posterior.history.train)
    (200, 1)
    """
    method = CPE() if method is None else method
    if not isinstance(method, Method) or isinstance(method, type):
        raise TypeError(f"method must be a method with its options, as cpe.CPE(); found {method!r}.")
    if training is not None and not isinstance(training, Training):
        raise TypeError(f"training must be cpe.Training(...), found {training!r:.60}.")
    settings = (training or Training()).completed({**Method.training, **method.training})
    key = check_key(key)
    model = _model_of(model, simulations)
    bound, graph = model.bound, model.graph
    rows = _check_simulations(simulations, graph)
    probe = _check_probe(rows, Prober(bound, graph))
    offset = offsets(rows, graph)
    rows = Simulations({name: centre(x, offset.get(name)) for name, x in rows.items()}, graph, rows.dropped)
    key_flow, key_train = jax.random.split(key)
    bar = Bar(progress)
    with Interrupt() as interrupt:
        flow = method.build(centred(bound, offset), graph, rows, key=key_flow)
        interrupt.check()
        prepared = _prepare(flow, rows)
        interrupt.check()
        with bar:
            flow, history = train(
                flow,
                prepared,
                settings,
                key=key_train,
                checkpoint=None if checkpoint is None else Path(checkpoint),
                fingerprint=graph.fingerprint,
                progress=bar.update,
                interrupt=interrupt,
            )
    if history.stopped.startswith("interrupted"):
        bar.say(f"Training was {history.stopped}; the best so far is returned.")
    if history.stopped.startswith(DIVERGED):
        bar.say(f"Warning: {history.stopped}. The weights of epoch {history.best_epoch + 1} are kept.")
    history.held_out = _held_out(flow, rows, *split(rows.n, settings, key_train))
    if not history.informed:
        bar.say(
            f"Warning: the posterior is no better than the prior. {history.score} Either the data say nothing about "
            "the parameters, or more simulations or another method (embed=) are needed."
        )
    return Posterior(flow, model, method, settings, history, rows.n, offset, probe)


def _model_of(model: Model | Program, simulations: Mapping[str, Any]) -> Model:
    """The model of simulations where its program is the same, so that it is not traced again."""
    if not isinstance(simulations, Simulations):
        return as_model(model)
    made = simulations.model
    same = made is not None and (made is model or made.bound is model)
    return made if made is not None and same else as_model(model, simulations.observed)


def _held_out(flow: Flow, rows: Simulations, held_out: np.ndarray, trained: np.ndarray) -> dict[str, float | int]:
    """What `History.held_out` has; an error where the density cannot be one.

    Of a density `q` the mean of `q(θ' | x) / π(θ')` is 1 for `θ'` from the prior and `x` from elsewhere. The held-out
    simulations' parameters, each with the data of the next, are such pairs. By Markov's inequality a mean above 10⁶ has
    a probability of no more than 10⁻⁶, where `q` is a density.
    """
    held_out, trained = held_out[:SCORED], trained[: min(SCORED, len(held_out))]
    shifted = np.roll(held_out, 1)
    gains, log_priors = [], []
    for parameters, data in ((held_out, held_out), (trained, trained), (shifted, held_out)):
        values = {n: jnp.asarray(x[parameters if n in rows.graph.parameters else data], float) for n, x in rows.items()}
        log_q, log_prior = map(np.asarray, _score(flow, values, frozenset(rows.graph.parameters)))
        gains.append(np.asarray(log_q - log_prior, float))
        log_priors.append(float(log_prior.mean()))
    total = float(np.logaddexp.reduce(gains[2][np.isfinite(gains[2])]) - math.log(len(held_out)))
    if total > math.log(1e6):
        raise FloatingPointError(
            f"The density that was learned cannot be right: it integrates to about e^{total:.0f}. Look for extreme "
            "values in the simulations, or lower learning_rate."
        )
    return {
        "n": len(held_out),
        "log_prob": float(gains[0].mean()) + log_priors[0],
        "prior": log_priors[0],
        "error": float(gains[0].std() / math.sqrt(len(held_out))),
        "training": float(gains[1].mean()),
    }


@eqx.filter_jit
def _score(flow: Flow, values: Values, parameters: frozenset[str]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The log-density of each simulation's parameters given its data, and under their prior."""
    n = len(next(iter(values.values())))
    batch = max(1, min(n, MOST_NUMBERS // (2 * flow.numbers_per_draw())))

    def one(values: Values) -> tuple[Array, Array]:
        drawn = {name: x[None] for name, x in values.items() if name in parameters}
        data = {name: x for name, x in values.items() if name not in parameters}
        log_q = flow.log_probs(drawn, data, **flow.density_options()).mean()
        return log_q, flow.coordinates.log_prior(values)

    return jax.lax.map(one, values, batch_size=batch)


@eqx.filter_jit
def _prepare_chunk(flow: Any, values: Values) -> tuple[Any, Array]:
    return flow.prepare(values), jax.vmap(flow.coordinates.in_support)(values)


def _prepare(flow: Any, rows: Simulations, chunk: int = 10_000) -> Any:
    """What training reads of the simulations, in chunks that bound memory."""
    pieces = -(-rows.n // chunk)
    size = -(-rows.n // pieces)
    parts, inside = [], []
    for start in range(0, rows.n, size):
        which = np.arange(start, start + size) % rows.n  # one shape, one compilation
        part, good = _prepare_chunk(flow, {name: jnp.asarray(x[which], float) for name, x in rows.items()})
        keep = min(size, rows.n - start)
        parts.append(jax.tree.map(lambda x, keep=keep: x[:keep], part))
        inside.append(np.asarray(good)[:keep])
    outside = np.flatnonzero(~np.concatenate(inside))
    if len(outside) > 0.01 * rows.n:  # a few stand on the edge of a support, and by rounding outside
        row = int(outside[0])
        sites = flow.coordinates.outside({name: jnp.asarray(x[row], float) for name, x in rows.items()})
        raise ValueError(
            f"{len(outside)} of {rows.n} simulations have parameters outside the prior's support, the first "
            f"in row {row}: {', '.join(f'{n} = {words(rows[n][row])}' for n in sites)}. They may be of another program."
        )
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _check_probe(rows: Simulations, prober: Prober) -> Probe:
    """What the program gives at the simulations; those of another program are an error."""
    if rows.probe is None:
        return prober(rows)
    certain, doubtful = prober.differences(rows.probe)
    if certain:
        raise ValueError(
            f"The simulations are of another program: {'; '.join(certain)}. Give fit the program, and its arguments, "
            "that simulated them, or simulate again."
        )
    say_doubtful("the simulations were made", doubtful)
    return rows.probe


def _check_simulations(simulations: Mapping[str, Any], graph: Graph) -> Simulations:
    if not isinstance(simulations, Mapping):
        raise TypeError(
            f"simulations must be a dict of arrays, as cpe.simulate returns; found {type(simulations).__name__}."
        )
    missing = [name for name in graph.sites if name not in simulations]
    extra = [name for name in simulations if name not in graph.sites and name not in graph.deterministics]
    if missing or extra:
        raise ValueError(
            f"The simulations {f'have no site {missing}' if missing else f'have the sites {extra}'}, but the program "
            f"{f'has {list(graph.sites)}' if missing else 'has not'}. They may be of another program."
        )
    values = {name: numbers(simulations[name], f"simulations['{name}']") for name in graph.sites}
    n = len(next(iter(values.values()))) if next(iter(values.values())).ndim else 0
    for name, x in values.items():
        site = graph.sites[name]
        if x.shape[1:] != site.shape or x.ndim != len(site.shape) + 1 or len(x) != n:
            raise ValueError(
                f"simulations['{name}'] has shape {x.shape}, but {n} simulations of site '{name}' have shape "
                f"{(n, *site.shape)}{plates(site, graph)}."
            )
    if isinstance(simulations, Simulations) and simulations.graph.fingerprint != graph.fingerprint:
        differ = "; ".join(graph.differences(simulations.graph.to_dict()))
        raise ValueError(f"The simulations are of another program: {differ}.")
    if n < 20:
        raise ValueError(
            f"There are {n} simulations; at least 20 are needed to train and validate, thousands to be accurate."
        )
    out = finite(graph.without_masked(values), graph)
    if isinstance(simulations, Simulations):
        out.probe = simulations.probe
    else:
        say_without_digits(out, graph)
    return out
