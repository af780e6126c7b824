"""Giving rows to workers: in batches that adapt to what a row takes, again where a worker is lost, and not for ever."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cpejax.program.calls import Call, Returned, call_units, pack
from cpejax.program.crew import Crew, Died, Refused

BATCH_SECONDS = 0.5
"""What a batch should take: several hundred times the overhead of one, and little to lose with a worker."""
MOST_BYTES = 32_000_000
"""Of a batch, there and back."""
GRACE = 60.0
"""Seconds beyond its limit after which a batch that no worker has given up counts as lost."""
GONE = 600.0
"""Seconds without any worker, when there have been some, after which no other is waited for."""


class WorkersLost(RuntimeError):
    """Workers that return nothing: they die, are gone, or take no work."""


class Limits(NamedTuple):
    """What a user has said of batches: units in a batch, seconds for a row, and how often it is tried again."""

    batch: int | None = None
    timeout: float | None = None
    retries: int = 2


class Rows(NamedTuple):
    """The rows of one simulator: `seeds` `(rows, words)`, arguments `(rows, *row)`, and the rows of each unit."""

    call: Call
    name: str
    seeds: np.ndarray
    arguments: Sequence[np.ndarray]
    units: Sequence[np.ndarray]

    def words(self, unit: int) -> str:
        """Which call it is."""
        if self.call.vectorized:
            return f"{self.name}, called with {len(self.units[unit])} rows"
        row = self.units[unit][0]
        return f"{self.name}, called with ({', '.join(np.array2string(a[row], threshold=8) for a in self.arguments)})"


@dataclass
class Tally:
    """How far it is: units done, rows that failed (an exception that became NaN, or lost), units tried again."""

    done: int = 0
    failed: int = 0
    retried: int = 0
    first_failure: str = ""
    lost: dict[int, str] = field(default_factory=dict)  # by unit, why it never came back


@dataclass
class _Batch:
    units: list[int]
    since: float


class Dispatch:
    """All units of a simulator, until each has come back or is given up.

    **Arguments:**

    - `rows`: the rows.
    - `todo`: the units that are not there yet.
    - `crew`: the workers.
    - `arrived(rows, data)`: takes what has come back, `(k,)` and `(k, *shape)`.
    - `tell(tally, workers)`: shows how far it is.
    """

    def __init__(
        self,
        rows: Rows,
        todo: Sequence[int],
        crew: Crew,
        limits: Limits,
        arrived: Callable[[np.ndarray, np.ndarray], None],
        tell: Callable[[Tally, int], None],
    ):
        self.rows, self.crew, self.limits, self.arrived, self.tell = rows, crew, limits, arrived, tell
        self.todo = deque(todo)
        self.again: deque[list[int]] = deque()
        self.ready: tuple[list[int], bytes] | None = None  # the next batch, packed
        self.running: dict[Any, _Batch] = {}
        self.back: deque[tuple[np.ndarray, np.ndarray]] = deque()  # what has come back, and was not handed on yet
        self.tries: dict[int, int] = {}
        self.tally = Tally()
        self.seconds: float | None = None  # what a unit takes
        self.largest = 1  # units in a batch that has come back
        self.came_back = False
        self.deaths = 0  # since something came back
        self.seen = self.last = time.monotonic()  # when there was a worker, and when something came back
        self.had_workers = False
        row = [rows.seeds[:1], *(a[:1] for a in rows.arguments)]
        self.row_bytes = sum(x.nbytes for x in row) + 8 * int(np.prod(rows.call.shape, dtype=np.int64))

    def run(self) -> Tally:
        """Wait for all of them."""
        while True:
            try:
                self._collect()
                self._submit()  # before anything is written: no worker waits for the disk
            finally:
                came = self._keep()
            self.tell(self.tally, self.crew.size())
            if not (self.todo or self.again or self.ready or self.running):
                return self.tally
            self._overdue()
            if not came:
                self.crew.wait(0.2)

    def _keep(self) -> bool:
        """Hand on what has come back, also when something else has gone wrong."""
        came = bool(self.back)
        while self.back:
            self.arrived(*self.back.popleft())
        return came

    # ---- out

    def _submit(self) -> None:
        while self.todo or self.again or self.ready:
            if self.ready is None:
                units = self.again.popleft() if self.again else self._next()
                self.ready = units, self._packed(units)
            try:
                future = self.crew.submit(self.ready[1])
            except Died as death:  # a worker that had nothing to do
                self._count_death(str(death))
                continue
            except Refused as refusal:
                raise WorkersLost(f"The executor that was given as workers takes no more work: {refusal}.") from refusal
            if future is None:
                return
            self.running[future] = _Batch(self.ready[0], time.monotonic())
            self.ready = None

    def _next(self) -> list[int]:
        left = len(self.todo)
        if self.limits.batch is not None:
            size = self.limits.batch
        elif self.seconds is None:
            size = 1
        else:
            size = int(BATCH_SECONDS / max(self.seconds, 1e-7))
            # All workers finish at about the same time; what a few rows have taken may not be what others take.
            size = min(size, -(-left // (2 * max(self.crew.size(), 1))), 8 * self.largest)
        per_unit = self.row_bytes * len(self.rows.units[self.todo[0]])
        size = max(1, min(size, MOST_BYTES // max(per_unit, 1), left))
        return [self.todo.popleft() for _ in range(size)]

    def _packed(self, units: Sequence[int]) -> bytes:
        which = [self.rows.units[u] for u in units]
        rows = np.concatenate(which)
        sizes = [len(r) for r in which]
        call = self.rows.call
        if self.crew.kills:
            call = call._replace(limit=None)
        return pack(call_units, tuple(call), sizes, self.rows.seeds[rows], [a[rows] for a in self.rows.arguments])

    # ---- back

    def _collect(self) -> None:
        """Take what has come back; an error of a simulator is raised."""
        for future in [f for f in self.running if f.done()]:
            batch = self.running[future]
            try:
                found = self.crew.result(future)
            except Died as death:
                del self.running[future]
                self._lost(batch.units, f"its worker was lost ({death})", str(death))
                continue
            if found is None:
                continue
            del self.running[future]
            returned = Returned(*found)
            if returned.broken:
                raise self._unloadable(returned.broken)
            self.came_back, self.deaths, self.last = True, 0, time.monotonic()
            good, error = self._sort(batch.units, returned)
            if good:
                taken = returned.seconds / len(batch.units)
                self.seconds = taken if self.seconds is None else 0.7 * self.seconds + 0.3 * taken
                self.largest = max(self.largest, len(batch.units))
                which = [self.rows.units[batch.units[i]] for i in good]
                ends = np.cumsum([0] + [len(self.rows.units[u]) for u in batch.units])
                data = np.concatenate([returned.data[ends[i] : ends[i + 1]] for i in good])
                self.back.append((np.concatenate(which), data))
                self.tally.done += len(good)
            if error is not None:
                raise error

    def _sort(self, units: Sequence[int], returned: Returned) -> tuple[list[int], Exception | None]:
        """The positions of units that have come back; the others are tried again, or are an error."""
        left, error = [], None
        for i, (what, *about) in sorted(returned.odd.items()):
            unit = units[i]
            if what == "failed":
                self.tally.failed += about[0]
                self.tally.first_failure = self.tally.first_failure or f"{self.rows.words(unit)} raised {about[1]}"
            elif what == "raised":
                error = error or self._raised(unit, *about)
            elif what == "hung":
                self._charge(unit, f"it took longer than {self.limits.timeout:g} s")
            else:
                left.append(unit)
        if left:
            self.again.append(left)
        return [i for i in range(len(units)) if i not in returned.odd or returned.odd[i][0] == "failed"], error

    def _raised(self, unit: int, words: str, trace: str) -> Exception:
        error = RuntimeError(
            f"{self.rows.words(unit)} {words}. Fix it there, or let it return NaN, which "
            "cpe.simulate(..., on_error='nan') does for it: such simulations are counted and left out."
        )
        if trace:
            error.add_note(f"In the worker:\n{trace}")
        return error

    def _unloadable(self, words: str) -> Exception:
        return RuntimeError(
            f"{self.rows.name} cannot be loaded by a worker ({words}). Install there what it imports; a module of your "
            "own that only this machine has goes along after cloudpickle.register_pickle_by_value(module)."
        )

    # ---- lost

    def _lost(self, units: list[int], why: str, words: str) -> None:
        """Of several units any may be the reason, so that halves are tried; one alone is charged."""
        if len(units) == 1:
            self._charge(units[0], why)
        else:
            self.tally.retried += len(units)
            self.again.extend([units[: len(units) // 2], units[len(units) // 2 :]])
        self._count_death(words)

    def _charge(self, unit: int, why: str) -> None:
        self.tries[unit] = self.tries.get(unit, 0) + 1
        if self.tries[unit] > self.limits.retries:
            self.tally.lost[unit] = why
            self.tally.failed += len(self.rows.units[unit])
            self.tally.done += 1
        else:
            self.tally.retried += 1
            self.again.append([unit])

    def _count_death(self, words: str) -> None:
        self.deaths += 1
        most = (self.limits.retries + 1) * (20 if self.came_back else 1 + max(self.crew.size(), 1))
        if self.deaths > most:
            raise WorkersLost(
                f"{self.deaths} times in a row a worker was lost before it returned anything, the last time "
                f"with: {words}. Is there memory enough where they run, and the same Python with NumPy and cloudpickle?"
            )

    def _overdue(self) -> None:
        now, size, timeout = time.monotonic(), self.crew.size(), self.limits.timeout
        if size:
            self.seen, self.had_workers = now, True
        elif self.had_workers and now - self.seen > GONE:
            raise WorkersLost(f"All workers are gone, and no other has come for {GONE / 60:g} minutes.")
        else:
            self.last = now  # nothing can come back
        if timeout is None:
            return
        if self.crew.kills:
            for future, batch in list(self.running.items()):
                several = 1 + 10 * (self.seconds or 0.0) * len(batch.units) if len(batch.units) > 1 else 0.0
                if now - batch.since > timeout + several and not future.done():
                    self._give_up(future)
        elif self.running:
            oldest = min(self.running, key=lambda future: self.running[future].since)
            batch = self.running[oldest]
            patience = timeout * len(batch.units) + GRACE
            if now - max(self.last, batch.since) > patience and not oldest.done():
                self._give_up(oldest)

    def _give_up(self, future: Any) -> None:
        batch = self.running.pop(future)
        self.crew.give_up(future)
        self.last = time.monotonic()
        why = f"it took longer than {self.limits.timeout:g} s"
        self._lost(batch.units, why, why)
