"""Simulating with workers: parameters are drawn here, rows go out, data come back, and what depends on them is drawn.

What a row's simulator sees, parameters and random state, depends on the key and on the row's number only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle
import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cpejax.program.calls import Call
from cpejax.program.crew import Crew
from cpejax.program.dispatch import Dispatch, Limits, Rows, Tally, WorkersLost
from cpejax.program.graph import Graph
from cpejax.program.simulation_files import CheckpointFiles, RowFiles
from cpejax.program.simulator import Simulator, split
from cpejax.util.messages import say

MOST_NAMED = 5
"""The number of lost rows that a message names."""

BLOCK = 256
"""The number of simulations whose parameters are drawn in one compiled call. It is always the same, and a row is always
at the same place in it: a compiled program may round otherwise where it has other shapes."""

Drawn = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


class InBlocks:
    """Draws rows, wherever they begin, by blocks that begin at multiples of `BLOCK` of all `total` rows.

    `draw(numbers, fed)` draws the rows of a block: values, what float32 does not hold of them, and what simulators on
    the host are called with, where `fed` gives their data.
    """

    def __init__(self, draw: Callable[[np.ndarray, dict[str, Any] | None], Drawn], first: int, total: int):
        self.draw, self.first, self.total = draw, first, total

    def __call__(self, which: np.ndarray, fed: Mapping[str, Any] | None) -> Drawn:
        """The same for the rows `first + which`, `fed` having a row for each of these; arrays of NumPy."""
        numbers = self.first + which
        order = np.argsort(numbers, kind="stable")
        blocks, begins = np.unique(numbers[order] // BLOCK, return_index=True)
        found = []
        for block, inside in zip(blocks, np.split(order, begins[1:]), strict=True):
            at = numbers[inside] - block * BLOCK
            rows = np.arange(block * BLOCK, (block + 1) * BLOCK) % self.total
            given = None if fed is None else jax.tree.map(functools.partial(_lifted, at, inside), dict(fed))
            found.append(jax.tree.map(functools.partial(_taken, at), self.draw(rows, given)))
        back = np.argsort(order, kind="stable")
        return jax.tree.map(lambda *x: np.concatenate(x)[back], *found)


def _lifted(at: np.ndarray, inside: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rows at their places in a block; of a row that is there twice, to fill up, the first counts."""
    out = np.zeros((BLOCK, *x.shape[1:]), x.dtype)
    out[at[::-1]] = x[inside[::-1]]
    return out


def _taken(at: np.ndarray, x: Any) -> np.ndarray:
    return np.asarray(x)[at]


class Plan(NamedTuple):
    """`n` simulations in parts of `chunk`, `outer` of them, a multiple, in memory at a time."""

    n: int
    chunk: int
    outer: int


class Distributed:
    """A run of a program's simulators on the host by a crew."""

    def __init__(
        self,
        draw: InBlocks,
        graph: Graph,
        simulators: Mapping[str, Simulator],
        members: Mapping[str, int],
        plan: Plan,
        crew: Crew,
        limits: Limits,
        store: CheckpointFiles | None,
        on_error: str,
        console: Console,
        shown: bool,
    ):
        self.draw, self.graph, self.simulators, self.plan = draw, graph, simulators, plan
        self.crew, self.limits, self.store, self.console, self.shown = crew, limits, store, console, shown
        self.on_error, self.members = on_error, members
        self.interrupted = False
        self.functions = {name: _pickled(simulator) for name, simulator in simulators.items()}
        crew.prepare(list(self.functions.values()))

    def run(self) -> dict[str, np.ndarray]:
        """All simulations, `{site: (n, *shape)}`; after Ctrl-C those that are complete."""
        found = []
        for start in range(0, self.plan.n, self.plan.outer):
            found.append(self._run(start))
            if self.interrupted:
                break
        return {name: np.concatenate([part[name] for part in found]) for name in self.graph.shapes}

    def _run(self, start: int) -> dict[str, np.ndarray]:
        n, chunk, outer = self.plan
        keep = min(outer, n - start)
        begins = range(start, start + keep, chunk)
        parts = {begin: part for begin in begins if self.store and (part := self.store.read(begin)) is not None}
        if len(parts) == len(begins):
            return _joined(list(parts.values()))
        which = np.arange(start, start + outer) % n  # as without workers: one shape, one compilation
        there = np.zeros(keep, bool)
        for begin, part in parts.items():
            there[begin - start : begin - start + len(next(iter(part.values())))] = True
        fed = {
            name: split(np.zeros((outer, members, *self.simulators[name].event_shape)))
            for name, members in self.members.items()
        }
        values, low, asked = self.draw(which, fed)
        files = RowFiles(self.store, values) if self.store else None
        complete = np.ones(keep, bool)
        names = list(self.members)
        for name in names:
            data, done = self._site(name, asked[name], which, there, start, files)
            fed[name] = split(data)
            # The same compiled program, so that what was drawn before is drawn again, bit by bit.
            values, low, asked = self.draw(which, fed)
            complete &= done
            if self.interrupted:
                complete &= there | (name == names[-1])  # other simulators have not begun
                break
        out = {name: x[:keep] for name, x in values.items()}
        out |= {name: out[name] + x[:keep].astype(np.float64) for name, x in low.items()}
        for begin, part in parts.items():
            for name, x in part.items():
                out[name] = out[name].astype(x.dtype, copy=False)
                out[name][begin - start : begin - start + len(x)] = x
        if self.interrupted:
            return {name: x[complete] for name, x in out.items()}
        if self.store and files:
            for begin in begins:
                if begin not in parts:
                    self.store.write(begin, {name: x[begin - start :][:chunk] for name, x in out.items()})
            files.clear()
        return out

    def _site(
        self, name: str, asked: Sequence[Any], which: np.ndarray, there: np.ndarray, start: int, files: RowFiles | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The data of a simulator, `(outer, members, *shape)`, and which of the simulations have them all."""
        simulator, keep = self.simulators[name], len(there)
        seeds, *arguments = (a.reshape(-1, *a.shape[2:]) for a in asked)
        members = self.members[name]
        arguments = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arguments]
        data = np.full((len(seeds), *simulator.event_shape), np.nan)
        done = np.repeat(np.r_[there, np.ones(len(which) - keep, bool)], members)
        first = start * members
        before = files.read(name) if files else None
        if before is not None:
            rows, values = before
            mine = (rows >= first) & (rows < first + keep * members)
            data[rows[mine] - first] = values[mine]
            done[rows[mine] - first] = True
        block = self.plan.chunk * members if simulator.vectorized else 1
        units = np.split(np.arange(len(seeds)), range(block, len(seeds), block)) if block > 1 else None
        units = units or list(np.arange(len(seeds))[:, None])
        units = [unit for unit in units if unit[0] < keep * members]
        call = Call(
            self.functions[name],
            simulator.event_shape,
            simulator.vectorized,
            self.on_error == "nan",
            self.limits.timeout,
        )
        rows_of = Rows(call, simulator.label, seeds, arguments, units)
        todo = [i for i, unit in enumerate(units) if not done[unit[unit < keep * members]].all()]

        def arrived(rows: np.ndarray, values: np.ndarray) -> None:
            own = rows < keep * members  # a block may be filled up by the first rows
            data[rows[own]], done[rows[own]] = values[own], True
            if files:
                self._kept(files, name, rows[own] + first, values[own])

        with _Bar(self.console, self.shown, len(units)) as bar:
            dispatch = Dispatch(rows_of, todo, self.crew, self.limits, arrived, bar.tell(len(units) - len(todo)))
            try:
                dispatch.run()
            except KeyboardInterrupt:
                self.interrupted = True
            except WorkersLost as error:
                raise WorkersLost(f"{error} {self._resume()}") from error
        self._say(dispatch.tally, rows_of)
        if not self.interrupted:
            done[:] = True  # the others are lost, and NaN
        whole = np.asarray(done.reshape(-1, members).all(1))[:keep]
        return data.reshape(len(which), members, *simulator.event_shape), whole

    def _kept(self, files: RowFiles, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        try:
            files.write(name, rows, values)
        except OSError as error:
            words = f"{error.strerror}, so that rows that have come back cannot be written. {self._resume()}"
            raise OSError(error.errno, words, str(files.folder)) from error

    def _resume(self) -> str:
        if self.store is None:
            return (
                "Nothing is kept without a checkpoint: cpe.simulate(..., checkpoint='folder/') keeps what comes back."
            )
        return f"What has come back before is kept in {self.store.folder}: the same call resumes from there."

    def _say(self, tally: Tally, rows: Rows) -> None:
        failed = tally.failed - sum(len(rows.units[u]) for u in tally.lost)
        if failed:
            words = f"{failed} calls of a simulator failed and count as NaN (on_error='nan')."
            say(f"{words} The first: {tally.first_failure}.", self.console)
        if tally.lost:
            named = [f"{rows.words(u)}: {why}" for u, why in list(tally.lost.items())[:MOST_NAMED]]
            more = f"; and {len(tally.lost) - MOST_NAMED} more" if len(tally.lost) > MOST_NAMED else ""
            say(
                f"{len(tally.lost)} calls of a simulator did not return, tried {self.limits.retries + 1} time(s), and "
                f"count as NaN. {'; '.join(named)}{more}.",
                self.console,
            )


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _pickled(simulator: Simulator) -> bytes:
    try:
        return cloudpickle.dumps(simulator.fn)
    except Exception as error:
        held = ""
        with suppress(Exception):
            held = f" It holds {', '.join(sorted(_held(simulator.fn)))}." if _held(simulator.fn) else ""
        raise TypeError(
            f"{simulator.label} cannot be sent to workers: {type(error).__name__}: {error}.{held} Open files, locks "
            "and connections inside the function, when it is first called, or simulate without workers."
        ) from error


def _held(fn: Any) -> list[str]:
    """The names of what a function closes over, or takes from its module, that cannot be pickled."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells}
    found |= {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
    out = []
    for name, value in found.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            out.append(f"'{name}' ({type(value).__name__})")
    return out


class _Bar:
    """A progress bar: rows done, failed, tried again, workers, and the time left."""

    def __init__(self, console: Console, shown: bool, total: int):
        columns = (
            TextColumn("simulating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, disable=not shown)
        self.task = self.progress.add_task("", total=total, words="")

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def tell(self, before: int) -> Callable[[Tally, int], None]:
        def show(tally: Tally, workers: int) -> None:
            counts = {"failed": tally.failed, "tried again": tally.retried}
            words = [f"{count} {what}" for what, count in counts.items() if count]
            words.append(f"{workers} worker{'' if workers == 1 else 's'}" if workers else "waiting for workers")
            self.progress.update(self.task, completed=before + tally.done, words=", ".join(words))

        return show
