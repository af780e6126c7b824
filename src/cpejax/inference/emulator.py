"""The forward program, learned from simulations: an emulator of the simulator, and a likelihood."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.data import DataCoordinates
from cpejax.coordinates.prior import Values
from cpejax.coordinates.vector import prior_draw
from cpejax.flows.ancestral.flow import AncestralFlow
from cpejax.flows.ancestral.method import CPE
from cpejax.flows.base import count_weights
from cpejax.inference.fitted import Fitted
from cpejax.inference.given import check_draws, check_given
from cpejax.inference.interrupt import Interrupt
from cpejax.inference.likelihood import Likelihood
from cpejax.inference.progress import Bar
from cpejax.inference.rows import check_probe, check_simulations, model_of, prepare
from cpejax.inference.sampling import MOST_NUMBERS
from cpejax.inference.settings import Training
from cpejax.inference.training import train
from cpejax.inference.values import centre, centred
from cpejax.program.conditional import forward
from cpejax.program.graph import Graph
from cpejax.program.model import Model
from cpejax.program.probe import Probe, Prober
from cpejax.program.simulations import Simulations, check_count, finite, offsets
from cpejax.program.simulator import Program
from cpejax.util.cores import cores, on_cores
from cpejax.util.keys import check_key

MOST_NODES = 32
"""The maximum number of scalars that one member of all data sites has together, for which `fit` trains an emulator by
itself: each scalar is drawn by a network of its own that reads those before it, so that 32 of them take ten times as
long to train as three parameters."""
MEMBERS = 4
"""Members of a plate that a step of an emulator's training reads, of a plate more than twice as large. Each member of
each simulation is an example, so that a batch has hundreds of them with a few members already."""
MOST_EXAMPLES, FEWEST_ROWS = 800, 16
"""Examples in a step of an emulator's training; where each simulation has more of them than that allows, as in plates
that index arrays tie together and of which all members are read, a step has fewer simulations, but so many."""
SIMULATION_STEPS = 10
"""Steps of Euler's method in an emulated simulation."""
LIKELIHOOD_STEPS = 2
"""Steps of Heun's method in a learned likelihood. Its density integrates to one with any number, and moves evaluate it
a hundred times for each draw."""


class LearnedLikelihood(Likelihood):
    """The density of the data under a learned forward program; of counts, their probability."""

    words: ClassVar[str] = "the learned likelihood"
    exact: ClassVar[bool] = False

    flow: AncestralFlow

    def __call__(self, values: Values, data: Values) -> Float[Array, " n"]:
        n = len(next(iter(values.values())))
        full = values | {name: jnp.broadcast_to(x, (n, *x.shape)) for name, x in data.items()}
        return self.flow.log_prob_each(full, steps=LIKELIHOOD_STEPS)

    def numbers_per_value(self) -> int:
        return 2 * self.flow.numbers_per_draw()


class Emulator(Fitted):
    """A learned forward program: it simulates at no cost of the simulator, and has a likelihood.

    Its fields are those of `Fitted`; its `flow` draws data given parameters.
    """

    flow: AncestralFlow

    def __repr__(self) -> str:
        graph = self.graph
        return (
            f"Emulator({', '.join(graph.data)} | {', '.join(graph.parameters)}; {self.weights} weights, "
            f"{self.n_simulations} simulations)"
        )

    @cached_property
    def weights(self) -> int:
        """How many weights are trained."""
        return count_weights(self.flow)

    @cached_property
    def likelihood(self) -> LearnedLikelihood:
        """The likelihood of data as the flow has them, less their offset."""
        return LearnedLikelihood(self.flow)

    def simulate(self, n: int, *, key: PRNGKeyArray, values: Mapping[str, Any] | None = None) -> Simulations:
        """Draw parameters from the prior and data from the emulator.

        **Arguments:**

        - `n`: how many simulations; `key`: a JAX key.
        - `values`: parameters that are not drawn but given, `{site: (n, *shape)}`: all of them.

        **Returns:** `Simulations`, as `cpe.simulate` does, without deterministic sites. Those with a value that is not
        finite are left out, counted and reported.
        """
        check_count(n, "n, the number of simulations,")
        key, graph = check_key(key), self.graph
        given: Values = {}
        if values is not None:
            given, shape = check_draws(self, values, set(graph.data))
            if shape != (n,):
                raise ValueError(f"values are of {shape} parameters, but n is {n}.")
        # Whole chunks on all cores: one shape, one compilation.
        chunk = min(-(-n // cores()), max(1, MOST_NUMBERS // self.flow.numbers_per_draw()))
        pieces = -(-n // chunk)
        keys = jax.random.split(key, pieces)
        which = np.arange(pieces * chunk).reshape(pieces, chunk) % n
        each = [(self.flow, k, {s: x[w] for s, x in given.items()}, chunk) for k, w in zip(keys, which, strict=True)]
        done = on_cores(_emulate, each)
        whole = {name: np.concatenate([np.asarray(part[name]) for part in done])[:n] for name in graph.sites}
        whole = {s: x.astype(np.float64) + self.offset[s] if s in self.offset else x for s, x in whole.items()}
        out = finite(whole, graph)
        out.model = self.model
        return out

    def log_likelihood(self, draws: Mapping[str, Any] | xr.DataTree, given: Mapping[str, Any]) -> Float[Array, "..."]:
        """The log-likelihood of one observation at many parameters.

        **Arguments:**

        - `draws`: `{site: (n, *shape)}`, or a DataTree of `Posterior.sample`; JAX arrays may be traced, so that this
            can be differentiated.
        - `given`: one observation, `{site: array}`.

        **Returns:** an array `(n,)`, for a DataTree `(chain, draw)`. Of counts it is a log-probability, of other data
        a log-density.
        """
        data, many = check_given(self, given)
        if many or set(data) != set(self.graph.data):
            raise ValueError(f"given must have one observation of the data sites {list(self.graph.data)}.")
        one = {name: x[0] for name, x in data.items()}
        if not isinstance(draws, xr.DataTree) and any(isinstance(x, jax.core.Tracer) for x in draws.values()):
            traced = {name: jnp.asarray(draws[name]) for name in self.graph.parameters}
            return _likelihoods(self.likelihood, traced, one)
        values, shape = check_draws(self, draws, set(data))
        return _likelihoods(self.likelihood, values, one).reshape(shape)


def emulate(
    model: Model | Program,
    simulations: Mapping[str, Any],
    *,
    key: PRNGKeyArray,
    method: CPE | None = None,
    training: Training | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Emulator:
    """Learn the forward program from simulations: data given parameters, each data site given its own parents.

    **Arguments:** those of `cpe.fit`; `method` has the sizes of the networks.

    The members of a plate share weights, so that every member of every simulation is an example. Whole numbers get
    probabilities, other data densities.

    >>> tiny, short = cpe.CPE(width=8, depth=1, hidden=8, components=2), cpe.Training(max_epochs=1)
    >>> emulator = cpe.emulate(model, simulations, method=tiny, training=short, key=jax.random.key(1))
    >>> emulator.simulate(5, key=jax.random.key(2))["y"].shape
    (5, 3)
    >>> emulator.log_likelihood({"mu": jax.numpy.zeros(4)}, given={"y": [0.3, 1.2, -0.4]}).shape
    (4,)
    """
    method = CPE() if method is None else method
    if not isinstance(method, CPE) or method.embed:
        raise TypeError(f"method must be cpe.CPE(...) without embed, found {method!r:.80}.")
    if training is not None and not isinstance(training, Training):
        raise TypeError(f"training must be cpe.Training(...), found {training!r:.60}.")
    key = check_key(key)
    model = model_of(model, simulations)
    rows = check_simulations(simulations, model.graph)
    probe = check_probe(rows, Prober(model.bound, model.graph))
    offset = offsets(rows, model.graph)
    rows = Simulations({n: centre(x, offset.get(n)) for n, x in rows.items()}, model.graph, rows.dropped)
    key_flow, key_train = jax.random.split(key)
    settings, bar = (training or Training()).completed(method.training), Bar(progress)
    return learn_forward(model, rows, offset, probe, method, settings, key_flow, key_train, checkpoint, bar)


def learn_forward(
    model: Model,
    rows: Simulations,
    offset: Mapping[str, np.ndarray],
    probe: Probe,
    method: CPE,
    settings: Training,
    key_flow: PRNGKeyArray,
    key_train: PRNGKeyArray,
    checkpoint: str | Path | None,
    bar: Bar,
    interrupt: Interrupt | None = None,
) -> Emulator:
    """The emulator of simulations that are checked and centred. `key_train` chooses those that are held out."""
    with interrupt or Interrupt() as interrupt:
        flow = build_forward(method, centred(model.bound, offset), model.graph, rows, key=key_flow)
        interrupt.check()
        prepared = prepare(flow, rows)
        interrupt.check()
        batch = min(settings.batch_size, max(FEWEST_ROWS, MOST_EXAMPLES // flow.examples))
        with bar:
            trained, history = train(
                flow,
                prepared,
                replace(settings, batch_size=batch),
                key=key_train,
                checkpoint=None if checkpoint is None else Path(checkpoint),
                fingerprint=model.graph.fingerprint,
                progress=bar.update,
                interrupt=interrupt,
            )
    assert isinstance(trained, AncestralFlow)
    return Emulator(trained, model, method, settings, history, rows.n, offset, probe)


def build_forward(
    method: CPE,
    program: Program,
    graph: Graph,
    simulations: Mapping[str, np.ndarray],
    *,
    key: PRNGKeyArray,
    like: Mapping[str, Any] | None = None,
) -> AncestralFlow:
    """The flow of the forward program; `like`: the `description` of one that it is to be built alike."""
    values = {name: jnp.asarray(simulations[name], float) for name in graph.sites}
    coordinates = DataCoordinates(program, graph, values, like["counts"] if like else None)
    method = replace(method, members=min(method.members, MEMBERS))
    return method.compile(coordinates, forward(graph), simulations, key=key, like=like)


def why_not(model: Model, method: Any, dropped: int = 0) -> str:
    """Why `fit` learns no forward program; an empty text where it does. `dropped`: simulations that were left out."""
    if type(method) is not CPE:
        return f"{type(method).__name__} is not trained on emulated simulations"
    if method.embed:
        return "with an embedding of one's own, data are taken for too large to be emulated"
    try:
        conditional = forward(model.graph)
    except ValueError as error:
        words = str(error).rstrip(".")
        return words[:1].lower() + words[1:]
    nodes = sum(math.prod(conditional.graph.sites[name].event_shape) for name in conditional.order)
    if nodes > MOST_NODES:
        return f"the data have {nodes} scalars that would each need a network; {MOST_NODES} are the limit"
    if dropped:
        return f"{dropped} simulations were not finite, and an emulator would invent data where they are left out"
    return ""


@eqx.filter_jit
def _emulate(flow: AncestralFlow, key: PRNGKeyArray, given: Values, n: int) -> Values:
    return emulated(flow, key, n, given)


def emulated(flow: AncestralFlow, key: PRNGKeyArray, n: int, given: Values | None = None) -> Values:
    """`n` simulations, parameters from the prior where they are not given: `{site: (n, *shape)}`."""
    first, second = jax.random.split(key)
    coordinates = flow.coordinates
    if not given:
        data = {name: coordinates.example[name] for name in coordinates.graph.parameters}
        program, parameters = coordinates.program, coordinates.graph.data
        given = jax.vmap(lambda k: prior_draw(program, parameters, data, key=k))(jax.random.split(first, n))
    return given | flow.sample_each(given, second, steps=SIMULATION_STEPS)


@eqx.filter_jit
def _likelihoods(likelihood: LearnedLikelihood, values: Values, data: Values) -> Float[Array, " n"]:
    n = len(next(iter(values.values())))
    chunk = max(1, MOST_NUMBERS // likelihood.numbers_per_value())
    if n <= chunk:
        return likelihood(values, data)
    return jax.lax.map(lambda v: likelihood({s: x[None] for s, x in v.items()}, data)[0], values, batch_size=chunk)
