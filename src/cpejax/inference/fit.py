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
from cpejax.inference.posterior import Posterior
from cpejax.inference.progress import Bar
from cpejax.inference.sampling import MOST_NUMBERS
from cpejax.inference.settings import DIVERGED, Training
from cpejax.inference.training import split, train
from cpejax.inference.values import centre, centred
from cpejax.program.model import Model
from cpejax.program.probe import Prober
from cpejax.program.simulations import Simulations, offsets
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
    model = model_of(model, simulations)
    bound, graph = model.bound, model.graph
    rows = check_simulations(simulations, graph)
    probe = check_probe(rows, Prober(bound, graph))
    offset = offsets(rows, graph)
    rows = Simulations({name: centre(x, offset.get(name)) for name, x in rows.items()}, graph, rows.dropped)
    key_flow, key_train = jax.random.split(key)
    bar = Bar(progress)
    with Interrupt() as interrupt:
        flow = method.build(centred(bound, offset), graph, rows, key=key_flow)
        interrupt.check()
        prepared = prepare(flow, rows)
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
