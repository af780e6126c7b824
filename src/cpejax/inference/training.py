"""The one compiled training loop, whatever the flow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.flows.base import Flow, trainable
from cpejax.inference.checkpoints import digest_tree, load_checkpoint, run_of_checkpoint, save_checkpoint
from cpejax.inference.interrupt import Interrupt
from cpejax.inference.settings import DIVERGED, History, Training
from cpejax.util.cores import channels_last, compile_each, cores
from cpejax.util.devices import Devices
from cpejax.util.keys import key_words
from cpejax.util.room import make_room

LONGEST = 10.0
"""Length to which a longer gradient is scaled."""
LONG = 1000
"""Number of steps from which on a run is divided among the cores; for fewer, several programs compile for too long."""


class State(NamedTuple):
    """What a training step changes: weights, their averages, and the state of the optimiser."""

    weights: Flow
    average: Flow
    optimiser: Any
    step: Array


class TrainedPart(NamedTuple):
    """What a part of a flow is trained with, besides its rows: its structure, and its own randomness."""

    rest: Flow
    validation_rows: Any
    key: PRNGKeyArray
    key_validation: PRNGKeyArray

    def flow(self, weights: Flow) -> Flow:
        """The part with these weights."""
        return eqx.combine(weights, self.rest)


Progress = Callable[[int, int, History], None]
Fresh = Callable[[int], Any]
"""The rows that an epoch is trained on, by its number: of a number that is the same in all epochs."""


def train(
    flow: Flow,
    rows: Any,
    settings: Training,
    *,
    key: PRNGKeyArray,
    fresh: Fresh | None = None,
    checkpoint: Path | None = None,
    fingerprint: str = "",
    progress: Progress | None = None,
    every: float = 10.0,
    interrupt: Interrupt | None = None,
) -> tuple[Flow, History]:
    """Train `flow` on `rows` (from `flow.prepare`), and return it with its best weights.

    With `fresh` each epoch has rows of its own; of `rows`, those that are held out for validation are used then. The
    rows of the next epoch are made while one runs.

    One compiled call is one epoch of a part: flows whose weights do not all depend on one another (`Flow.divide`) are
    trained in parts, in parallel, one on each core, which need nothing of each other until the epoch's end. All
    randomness of an epoch comes from `key`, the part's number and the epoch's, so a run that resumes from a checkpoint
    (written every `every` seconds, atomically) equals one that was never interrupted: it is divided as it was
    when it began.
    Ctrl-C ends training after the epoch that runs, with the best weights so far; a second Ctrl-C ends it at once, and
    so does the first while there is no epoch yet. `interrupt`: that of a caller who watches for it already.
    """
    make_room()
    n = len(jax.tree.leaves(rows)[0])
    key_split, key_epochs, key_parts = jax.random.split(key, 3)
    order, held_out = _order(n, settings, key_split)
    order = order if fresh is None else order[:held_out]
    shuffled = jax.tree.map(lambda x: np.asarray(x)[order], rows)
    made = {} if fresh is None else {0: fresh(0)}  # until it is used: rows of one epoch may be much of the memory
    n_training = n - held_out if fresh is None else len(jax.tree.leaves(made[0])[0])
    batch = min(settings.batch_size, n_training)
    batches = n_training // batch
    epochs = settings.epochs(batches)
    optimiser = optax.chain(
        optax.clip_by_global_norm(LONGEST), optax.scale_by_adam(), optax.add_decayed_weights(settings.weight_decay)
    )
    devices = Devices(settings.devices)
    devices.check_batch(batch)
    most = cores() if batches * epochs >= LONG and devices.count == 1 else 1
    begun: dict[str, Any] = {}
    if checkpoint is not None:
        checkpoint = Path(checkpoint) / "checkpoint.safetensors"
        begun = run_of_checkpoint(checkpoint)
    # As the run began, on however many cores: other parts give other roundings.
    parts, states, training_rows = _divide(flow, shuffled, held_out, begun.get("parts", most), optimiser, key_parts)
    best = [_copy(state.average) for state in states]
    history = History()
    epoch_number = 0
    run: dict[str, Any] = {}
    if checkpoint is not None:
        run = {
            **{name: x for name, x in asdict(settings).items() if name != "devices"},
            "n": n,
            "key": key_words(key),
            "program": fingerprint,
            "simulations": digest_tree(rows),
            "networks": digest_tree(flow),
            "parts": len(parts),
        }
        found = load_checkpoint(checkpoint, (states, best), run)
        if found is not None:
            (states, best), history, epoch_number = found

    parts, states = devices.everywhere((parts, states))
    run_epoch = _epoch(optimiser, settings.average, batch, batches, devices)
    seed = key_words(key_epochs)

    def order_of(epoch: int) -> np.ndarray:
        """The rows of each batch; NumPy shuffles in a tenth of the time that the compiled program would take to."""
        shuffle = np.random.default_rng([*seed, epoch]).permutation(n_training)
        return shuffle[: batches * batch].reshape(batches, batch).astype(np.int32)

    def rows_of(epoch: int) -> list[Any]:
        """The rows of each part."""
        if fresh is None:
            return training_rows
        found = made.pop(epoch) if epoch in made else fresh(epoch)
        made.clear()
        return [devices.everywhere(jax.device_put(flow.rows_of_part(part.rest, found))) for part in parts]

    training_rows = devices.everywhere(training_rows)
    following, rows_following = order_of(epoch_number), rows_of(epoch_number)
    began = time.monotonic() - history.seconds
    saved = time.monotonic()
    compiled: list[Callable] | None = None
    with interrupt or Interrupt() as interrupt, ThreadPoolExecutor(1 if devices.mesh else len(parts)) as threads:
        interrupt.check()
        while epoch_number < epochs and not history.stopped:
            rate = jnp.asarray(settings.rate(epoch_number, epochs, history.cooling), float)
            now = devices.everywhere((jnp.asarray(epoch_number), jnp.asarray(following), rate))
            given = [(part, own, *now) for part, own in zip(parts, rows_following, strict=True)]
            if compiled is None:  # traced here, not on the threads, which do not see `with jax.default_device(...)`
                lowered = [run_epoch.lower(*each) for each in zip(given, states, strict=True)]
                interrupt.check()
                compiled = compile_each(lowered, threads)
                interrupt.wait_for_epochs()
            done = threads.map(lambda run, *each: jax.block_until_ready(run(*each)), compiled, given, states)
            if epoch_number + 1 < epochs:  # while they run
                following, rows_following = order_of(epoch_number + 1), rows_of(epoch_number + 1)
            states, losses, values = map(list, zip(*done, strict=True))
            losses, values = devices.here((losses, values))
            value = sum(map(float, values))
            history.train.append(sum(map(float, losses)))
            history.validation.append(value)
            if value < history.best:
                history.best_epoch = epoch_number
                best = _copy(devices.here([state.average for state in states]))
            if history.best_epoch < 0:
                raise FloatingPointError(
                    f"The validation loss of epoch {epoch_number + 1} is {value}. "
                    "Look for extreme values in the simulations, or lower learning_rate."
                )
            if value < flow.least_loss:
                raise FloatingPointError(
                    f"The validation loss of epoch {epoch_number + 1} is {value:.4g}, which cannot be right: no "
                    f"density of this flow has one below {flow.least_loss:.4g}. Look for values that simulations "
                    "repeat, or for parameters that the data determine exactly."
                )
            epoch_number += 1
            history.seconds = time.monotonic() - began
            if history.cooling is None and epoch_number - 1 - history.best_epoch >= settings.patience:
                history.cooling = epoch_number
                kept = [devices.everywhere((_copy(b), _copy(b))) for b in best]
                states = [s._replace(weights=w, average=a) for s, (w, a) in zip(states, kept, strict=True)]
            if history.cooling is not None and epoch_number - history.cooling >= settings.patience:
                history.stopped = f"no better for {settings.patience} epochs"
            elif not math.isfinite(value):  # and so are the weights: no later epoch can be better
                history.stopped = f"{DIVERGED} in epoch {epoch_number}: its validation loss is {value}"
            elif epoch_number == epochs:
                history.stopped = "end of the schedule"
            if progress is not None:
                try:
                    progress(epoch_number, epochs, history)
                except KeyboardInterrupt:
                    interrupt.came = True
            due = history.stopped or interrupt.came or time.monotonic() - saved > every
            if checkpoint is not None and due and devices.writes:
                save_checkpoint(checkpoint, (devices.here(states), best), history, epoch_number, run)
                saved = time.monotonic()
            if interrupt.came and not history.stopped:  # not in the checkpoint: there, the run can resume
                history.stopped = f"interrupted after {epoch_number} epochs"
    whole = [devices.here(part).flow(weights) for part, weights in zip(parts, best, strict=True)]
    return flow.joined(whole), history


def split(n: int, settings: Training, key: PRNGKeyArray) -> tuple[np.ndarray, np.ndarray]:
    """Which of `n` simulations `train` holds out with this key, and which it trains on."""
    order, held_out = _order(n, settings, jax.random.split(key, 3)[0])
    return order[:held_out], order[held_out:]


def _order(n: int, settings: Training, key: PRNGKeyArray) -> tuple[np.ndarray, int]:
    """The simulations in random order, and how many of the first are held out."""
    held_out = max(1, round(n * settings.validation))
    if held_out >= n:
        raise ValueError(f"validation={settings.validation} of {n} simulations leaves none to train on.")
    return np.random.default_rng(key_words(key)).permutation(n), held_out


def _divide(
    flow: Flow, rows: Any, held_out: int, most: int, optimiser: optax.GradientTransformation, key: PRNGKeyArray
) -> tuple[list[TrainedPart], list[State], list[Any]]:
    """The parts that are trained in parallel, no more than `most`, where each starts, and its rows.

    Of the rows, as NumPy arrays, the first `held_out` are for validation.
    """
    copies: dict[int, tuple[Array, Array]] = {}

    def halves(x: np.ndarray) -> tuple[Array, Array]:
        """Rows for training and for validation; those that several parts read are there once."""
        if id(x) not in copies:
            copies[id(x)] = jnp.asarray(x[held_out:]), jnp.asarray(x[:held_out])
        return copies[id(x)]

    parts, states, rows_of_parts = [], [], []
    for number, (part, own) in enumerate(flow.divide(rows, most)):
        weights, rest = trainable(part)
        training_rows, validation_rows = (jax.tree.map(lambda x, i=i: halves(x)[i], own) for i in range(2))
        keys = jax.random.split(jax.random.fold_in(key, number))
        parts.append(TrainedPart(rest, validation_rows, keys[0], keys[1]))
        rows_of_parts.append(training_rows)
        # Copies: the compiled epoch gives its arguments' memory to its results.
        states.append(State(_copy(weights), _copy(weights), optimiser.init(weights), jnp.zeros((), jnp.int32)))
    return parts, states, rows_of_parts


def _epoch(
    optimiser: optax.GradientTransformation, keep_average: bool, batch: int, batches: int, devices: Devices
) -> Any:
    """The program of an epoch: from a part, its rows, the epoch's number, the order of the rows `(batches, batch)` and
    the learning rate; and from the part's state, to the next state, the mean loss and the validation loss.
    """

    @eqx.filter_jit(donate="all-except-first")
    def run_epoch(given: tuple[TrainedPart, Any, Array, Array, Array], state: State) -> tuple[State, Array, Array]:
        part, training_rows, epoch, order, rate = given

        def loss(weights: Flow, rows: Any, key: PRNGKeyArray) -> Float[Array, ""]:
            return part.flow(weights).loss(rows, key)

        def step(carry: State, x: tuple[Array, PRNGKeyArray]) -> tuple[State, Array]:
            weights, average, optimiser_state, count = carry
            which, key = x
            rows = devices.shared(jax.tree.map(lambda r: r[which], training_rows))
            value, gradient = channels_last(jax.value_and_grad(loss))(weights, rows, key)
            change, optimiser_state = optimiser.update(gradient, optimiser_state, weights)
            weights = jax.tree.map(lambda w, c: w - rate * c, weights, change)
            average = optax.incremental_update(weights, average, 10.0 / (count + 10.0) if keep_average else 1.0)
            return State(weights, average, optimiser_state, count + 1), value

        keys = jax.random.split(jax.random.fold_in(part.key, epoch), batches)
        losses: Array
        state, losses = jax.lax.scan(step, state, (order, keys))
        value = _validation_loss(part.flow(state.average), part.validation_rows, part.key_validation, batch)
        return state, losses.mean(), value

    return run_epoch


@jax.jit  # one call, not one for each array
def _copy(tree: Any) -> Any:
    """A copy without weak types: the state of the first epoch must look like that of all others, to compile once."""
    return jax.tree.map(lambda x: jnp.array(x, x.dtype, copy=True), tree)


def _validation_loss(flow: Flow, rows: Any, key: PRNGKeyArray, batch: int) -> Float[Array, ""]:
    """The loss of the held-out rows, in chunks, with noise that is the same in every epoch."""
    n = len(jax.tree.leaves(rows)[0])
    size = min(n, 5 * batch)
    chunks = n // size
    rows = jax.tree.map(lambda x: x[: chunks * size].reshape(chunks, size, *x.shape[1:]), rows)
    return jax.lax.map(lambda x: flow.validation_loss(*x), (rows, jax.random.split(key, chunks))).mean()
