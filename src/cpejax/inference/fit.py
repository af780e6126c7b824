"""`cpe.fit`: from simulations to a trained and scored posterior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from cpejax.flows.ancestral.method import CPE
from cpejax.flows.base import Flow, Method
from cpejax.flows.ensemble import Ensemble
from cpejax.inference.emulator import Emulator, learn_forward, why_not
from cpejax.inference.fresh import EmulatedRows, SimulatedRows
from cpejax.inference.interrupt import Interrupt
from cpejax.inference.posterior import Posterior
from cpejax.inference.progress import Bar
from cpejax.inference.rows import check_folder, check_probe, check_simulations, model_of, prepare
from cpejax.inference.scores import gain, score_held_out, score_refined
from cpejax.inference.settings import DIVERGED, History, Training
from cpejax.inference.streamed import Blocks, StreamedRows, held_out_of, in_blocks, is_streamed
from cpejax.inference.training import LONG, Fresh, split, train
from cpejax.inference.values import centre, centred
from cpejax.program.model import Model, as_model
from cpejax.program.opened import OpenSimulations
from cpejax.program.probe import Probe, Prober
from cpejax.program.simulate import simulate
from cpejax.program.simulations import Simulations, check_count, offsets
from cpejax.program.simulator import Program
from cpejax.util.keys import check_key

REFINED = 500
"""Maximum number of held-out simulations by which it is told whether the learned likelihood makes draws better."""
FIRST = 10_000
"""Simulations by which values are standardised and epochs are compared, where all others are fresh."""


def fit(
    model: Model | Program,
    simulations: Mapping[str, Any] | None = None,
    *,
    key: PRNGKeyArray,
    method: Method | None = None,
    training: Training | None = None,
    emulate: bool | None = None,
    fresh: bool | None = None,
    ensemble: int = 1,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Posterior:
    """Train a posterior on simulations of a model.

    **Arguments:**

    - `model`: a `cpe.Model`, or a NumPyro program without arguments.
    - `simulations`: from `cpe.simulate`, or any `{site: (n, *shape)}` with every site of the program. Without any,
        they are simulated, and `fresh` is meant. Those of `cpe.open_simulations` stay on disk where they are larger
        than 1 GiB in float32: they are read block by block while it trains, and `emulate` is off.
    - `key`: a JAX key: the same key, versions and machine give the same posterior.
    - `method`: `cpe.CPE()` by default.
    - `training`: `cpe.Training()` by default.
    - `emulate`: learn the simulator too (`cpe.emulate`), and train on simulations of that emulator as well where this
        makes the held-out simulations' parameters more probable. By default where it can be done: for `cpe.CPE` without
        embeddings, data of up to 32 scalars a member, and training of at least 1,000 steps. `posterior.emulator` is
        the emulator, and `posterior.history.emulation` says what it did.
    - `fresh`: train on new simulations in every epoch, for programs that JAX can run; `simulations` only standardise
        and validate. By default where there are none.
    - `ensemble`: networks that are trained at once and drawn from as a mixture: `log_prob` is the logarithm of their
        mean density. Training takes as many times as long.
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
    check_count(ensemble, "ensemble, the number of networks,")
    key = check_key(key)
    if simulations is None:
        if fresh is False:
            raise ValueError("There are no simulations and fresh=False: give cpe.simulate(model, n, key=...) as well.")
        SimulatedRows.check(as_model(model))
        fresh, key_first = True, jax.random.fold_in(key, 2)
        simulations = simulate(model, FIRST, key=key_first)
    model = model_of(model, simulations)
    if fresh:
        SimulatedRows.check(model)
    blocks = Blocks(simulations, model.graph, key=jax.random.fold_in(key, 6)) if is_streamed(simulations) else None
    rows = check_simulations(blocks.sample() if blocks else simulations, model.graph)
    if isinstance(simulations, OpenSimulations):
        rows.probe = check_folder(simulations, model.graph)
    without = "fresh simulations need none" if fresh else why_not(model, method, rows.dropped)
    if blocks and not fresh:
        without = "the simulations are read block by block, and an emulator is learned from those in memory"
    if emulate and without:
        raise ValueError(f"emulate=True, but {without}.")
    probe = check_probe(rows, Prober(model.bound, model.graph))
    offset = offsets(rows, model.graph)
    if fresh and offset:
        raise ValueError(
            f"The data of '{next(iter(offset))}' need float64 to keep their digits, which fresh simulations do not "
            "have: give simulations, and fresh=False."
        )
    rows = Simulations({name: centre(x, offset.get(name)) for name, x in rows.items()}, model.graph, rows.dropped)
    bar = Bar(progress)
    folder = None if checkpoint is None else Path(checkpoint)
    with Interrupt() as interrupt:
        options = held_out_of(settings, blocks) if blocks else settings
        this = _Fit(model, rows, offset, probe, method, options, int(ensemble), key, folder, bar, interrupt)
        source: SimulatedRows | StreamedRows | None = None
        if fresh:
            source = SimulatedRows(this.flow, this.rows.n, key=jax.random.fold_in(key, 3))
            flow, history = this.train(source, "fresh")
            emulator = None
        elif blocks:
            blocks.hold_out(blocks.sampled[this.split[0]], settings.batch_size)
            bar.say(blocks.words)
            this.settings = in_blocks(this.settings, blocks)
            source = StreamedRows(blocks, this.flow, offset)
            flow, history = this.train(source)
            emulator = None
        else:
            flow, history = this.train()
            flow, history, emulator = this.emulate(flow, history, emulate, without)
    if source is not None and source.note:
        bar.say(source.note)
    if interrupt.came and not history.stopped.startswith("interrupted"):  # between epochs, or while an emulator learned
        history.stopped = f"interrupted after all of its {len(history.train)} epochs"
    if history.stopped.startswith("interrupted"):
        bar.say(f"Training was {history.stopped}; the best so far is returned.")
    if history.stopped.startswith(DIVERGED):
        bar.say(f"Warning: {history.stopped}. The weights of epoch {history.best_epoch + 1} are kept.")
    history.held_out = score_held_out(flow, rows, *this.split)
    if emulator is not None:
        some = {name: x[this.split[0][:REFINED]] for name, x in rows.items()}
        history.refinement = score_refined(
            flow, emulator.likelihood, some, model.graph.parameters, key=jax.random.fold_in(key, 5)
        )
    if not history.informed:
        bar.say(
            f"Warning: the posterior is no better than the prior. {history.score} Either the data say nothing about "
            "the parameters, or more simulations or another method (embed=) are needed."
        )
    n = rows.n + (source.made if source else 0)
    return Posterior(flow, model, method, settings, history, n, offset, probe, emulator)


@dataclass
class _Fit:
    """What the networks of one fit are trained with."""

    model: Model
    rows: Simulations
    offset: Mapping[str, np.ndarray]
    probe: Probe
    method: Method
    settings: Training
    ensemble: int
    key: PRNGKeyArray
    checkpoint: Path | None
    bar: Bar
    interrupt: Interrupt

    def __post_init__(self) -> None:
        key_flow, self.key_train = jax.random.split(self.key)
        program = centred(self.model.bound, self.offset)
        keys = [key_flow, *(jax.random.fold_in(key_flow, i) for i in range(1, self.ensemble))]
        flows = [self.method.build(program, self.model.graph, self.rows, key=k) for k in keys]
        self.flow = flows[0] if self.ensemble == 1 else Ensemble(flows)
        self.interrupt.check()
        self.prepared = prepare(self.flow, self.rows)
        self.interrupt.check()
        self.split = split(self.rows.n, self.settings, self.key_train)

    def train(self, fresh: Fresh | None = None, name: str = "") -> tuple[Flow, History]:
        """The trained flow; `name`: of the folder of its checkpoint."""
        with self.bar:
            return train(
                self.flow,
                self.prepared,
                self.settings,
                key=self.key_train,
                fresh=fresh,
                checkpoint=None if self.checkpoint is None else self.checkpoint / name,
                fingerprint=self.model.graph.fingerprint,
                progress=self.bar.update,
                interrupt=self.interrupt,
            )

    def emulate(
        self, flow: Flow, history: History, wanted: bool | None, without: str
    ) -> tuple[Flow, History, Emulator | None]:
        """The better of a flow and one that is trained on emulated simulations as well, and the emulator.

        `without`: why there can be none.
        """
        short = len(history.train) * (len(self.split[1]) // self.settings.batch_size) < LONG
        ended = self.interrupt.came or history.stopped.startswith(("interrupted", DIVERGED))
        if wanted is False or (short and not wanted) or ended:
            return flow, history, None
        if without:
            if self.rows.dropped:
                self.bar.say(f"The simulator was not learned as well: {without}.")
            return flow, history, None
        try:
            return self._augment(flow, history)
        except FloatingPointError as error:  # what is trained already is as good as it was
            self.bar.say(f"Warning: the simulator cannot be learned, and is not used. {error}")
            return flow, history, None

    def _augment(self, flow: Flow, history: History) -> tuple[Flow, History, Emulator | None]:
        assert isinstance(self.method, CPE)
        self.bar.begin("learning the simulator")
        emulator = learn_forward(
            self.model,
            self.rows,
            self.offset,
            self.probe,
            self.method,
            self.settings,
            jax.random.fold_in(self.key, 1),
            self.key_train,
            None if self.checkpoint is None else self.checkpoint / "emulator",
            self.bar,
            self.interrupt,
        )
        if emulator.history.stopped.startswith(("interrupted", DIVERGED)):
            self.bar.say(f"The emulator's training was {emulator.history.stopped}; it is not used.")
            return flow, history, None
        self.bar.begin("training on emulated simulations")
        real = jax.tree.map(lambda x: np.asarray(x)[self.split[1]], self.prepared)
        source = EmulatedRows(self.flow, emulator.flow, real, len(self.split[1]), key=jax.random.fold_in(self.key, 4))
        other, other_history = self.train(source, "augmented")
        found = gain(flow, other, self.rows, self.split[0])
        better = found["with"] > found["without"]
        if better:
            flow, other_history.seconds = other, other_history.seconds + history.seconds
            history = other_history
        history.emulation = {**found, "simulations": len(self.split[1]), "emulated": source.made, "used": better}
        return flow, history, emulator
