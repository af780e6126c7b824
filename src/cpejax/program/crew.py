"""Workers: processes of this machine, or those of any executor, behind the few things that `dispatch` asks of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import loky

from cpejax.program.calls import begin, pack

FEW = 16
"""The number of calls that an executor of unknown size is given at a time."""
START = 300.0
"""Seconds within which a worker of this machine must have started, and loaded the simulator."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 for workers of this machine, unless they are set: each worker has a core."""


class Died(Exception):
    """A call that did not come back: its worker died, or was lost."""


class Refused(Exception):
    """An executor that takes no more work."""


class Crew(ABC):
    """Workers. A call is submitted as bytes (`calls.pack`); what stands for it is the executor's own future."""

    kills: bool
    """Whether it can end a worker whose call takes too long; otherwise the worker gives it up itself."""

    @abstractmethod
    def prepare(self, simulators: Sequence[bytes]) -> None:
        """Start, and load simulators, as they are pickled, before time counts."""

    @abstractmethod
    def submit(self, call: bytes) -> Any:
        """Start a call, or None if no worker is free."""

    @abstractmethod
    def result(self, future: Any) -> Any:
        """What a call that is done has returned; `Died` if it has not; None if it is not there yet after all."""

    @abstractmethod
    def give_up(self, future: Any) -> None:
        """End a call, and its worker if that is the only way."""

    @abstractmethod
    def size(self) -> int:
        """How many calls run at a time, as far as is known; 0: no worker is there now."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until a call is done, for some seconds at most."""

    @abstractmethod
    def close(self) -> None:
        """End what is this crew's own."""


class Processes(Crew):
    """Workers that are processes of this machine, started anew, never forked: JAX has threads, and a fork could hang.

    Each has an executor of its own, so that a worker that dies, or is killed, takes nobody else's call with it.
    """

    kills = True

    def __init__(self, count: int):
        self.arrived = threading.Event()
        self.count = count
        self.simulators: Sequence[bytes] = ()
        self.executors: list[tuple[Any, Any, float]] = []
        self.busy: dict[Any, int] = {}

    def prepare(self, simulators: Sequence[bytes]) -> None:
        self.simulators = simulators
        self.executors = [self._started() for _ in range(self.count)]

    def _started(self) -> tuple[Any, Any, float]:
        env = {name: "1" for name in ONE_THREAD if name not in os.environ}
        executor = loky.ProcessPoolExecutor(max_workers=1, env=env)
        ready = executor.submit(pickle.loads, pack(begin, os.getpid(), list(self.simulators)))
        ready.add_done_callback(lambda _: self.arrived.set())
        return executor, ready, time.monotonic()

    def submit(self, call: bytes) -> Any:
        for i, (executor, ready, since) in enumerate(self.executors):
            if not ready.done() and time.monotonic() - since > START:
                self._replace(i)
                raise Died(f"it did not start within {START:g} s")
            if i in self.busy.values() or not ready.done():
                continue
            try:
                ready.result()
                future = executor.submit(pickle.loads, call)
            except Exception as error:  # it died while it had nothing to do
                self._replace(i)
                raise Died(_words(error)) from error
            future.add_done_callback(lambda _: self.arrived.set())
            self.busy[future] = i
            return future
        return None

    def _replace(self, i: int) -> None:
        self.executors[i][0].shutdown(wait=False, kill_workers=True)
        self.executors[i] = self._started()

    def result(self, future: Any) -> Any:
        i = self.busy.pop(future)
        try:
            return future.result()
        except (Exception, concurrent.futures.CancelledError) as error:
            self._replace(i)
            raise Died(_words(error)) from error

    def give_up(self, future: Any) -> None:
        self._replace(self.busy.pop(future))

    def size(self) -> int:
        return self.count

    def wait(self, seconds: float) -> None:
        self.arrived.wait(seconds)
        self.arrived.clear()

    def close(self) -> None:
        for executor, *_ in self.executors:
            executor.shutdown(wait=True, kill_workers=True)


class Executor(Crew):
    """The workers of anything with `submit(function, argument)`, whose futures have `done()` and `result()`.

    Its workers are not this crew's: none is ended, and `close` only cancels what was not begun. A call that takes too
    long is given up by the worker itself, in a thread that is left alone.
    """

    kills = False

    def __init__(self, executor: Any):
        self.executor = executor
        self.futures: set[Any] = set()
        self.arrived = threading.Event()
        self.calls_back = True

    def prepare(self, simulators: Sequence[bytes]) -> None:  # noqa: ARG002
        return  # its workers are there already, or come and go, and load them when they are called

    def submit(self, call: bytes) -> Any:
        if len(self.futures) >= max(2 * self.size(), FEW):  # two each, so that none waits for its next
            return None
        try:
            future = self.executor.submit(pickle.loads, call)
        except Exception as error:
            raise Refused(_words(error)) from error
        if not callable(getattr(future, "done", None)) or not callable(getattr(future, "result", None)):
            raise TypeError(
                f"{type(self.executor).__name__}.submit returned a {type(future).__name__}, expected a future with "
                "done() and result()."
            )
        self.futures.add(future)
        try:
            future.add_done_callback(lambda _: self.arrived.set())
        except Exception:
            self.calls_back = False
        return future

    def result(self, future: Any) -> Any:
        self.futures.discard(future)
        try:
            return future.result()
        except (Exception, asyncio.CancelledError) as error:
            raise Died(_words(error)) from error

    def give_up(self, future: Any) -> None:
        self.futures.discard(future)
        _cancel(future)

    def size(self) -> int:
        return int(getattr(self.executor, "_max_workers", None) or FEW // 2)

    def wait(self, seconds: float) -> None:
        self.arrived.wait(seconds if self.calls_back else min(seconds, 0.05))
        self.arrived.clear()

    def close(self) -> None:
        for future in self.futures:
            _cancel(future)
        self.futures.clear()


class Dask(Executor):
    """The workers of a `dask.distributed.Client`, which come and go."""

    def __init__(self, executor: Any):
        super().__init__(executor)
        self.counted = (-1e9, 0)

    def submit(self, call: bytes) -> Any:
        if self.executor.status not in ("running", "connecting"):
            raise Refused(f"its client is {self.executor.status}")
        return super().submit(call)

    def result(self, future: Any) -> Any:
        try:
            out = future.result(timeout=30)
        except TimeoutError:  # the worker that held it is gone, and it is computed again
            return None
        except (Exception, asyncio.CancelledError) as error:
            self.futures.discard(future)
            raise Died(_words(error)) from error
        self.futures.discard(future)
        return out

    def size(self) -> int:
        at, count = self.counted
        if time.monotonic() - at > 2:
            try:
                count = sum(self.executor.nthreads().values())
            except Exception:  # the scheduler does not answer: no worker can be reached
                count = 0
            self.counted = (time.monotonic(), count)
        return count


def check_workers(workers: Any) -> None:
    """A number of processes, or an executor."""
    if isinstance(workers, int) and not isinstance(workers, bool):
        if workers < 1:
            raise ValueError(f"workers must be at least 1, found {workers}.")
    elif workers is not None and not callable(getattr(workers, "submit", None)):
        raise TypeError(
            "workers must be a number, or an executor with submit(function, argument), as those of concurrent.futures "
            f"and dask.distributed.Client; found {type(workers).__name__}."
        )


def crew_of(workers: Any) -> Crew:
    """The workers that a user has asked for."""
    if isinstance(workers, int):
        return Processes(workers)
    return Dask(workers) if type(workers).__module__.startswith("distributed.") else Executor(workers)


def _cancel(future: Any) -> None:
    try:
        future.cancel()
    except Exception:  # it is gone, or its executor is, or it cannot be cancelled: nobody waits for it
        return


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
