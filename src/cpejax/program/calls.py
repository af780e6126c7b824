"""What a worker does: it calls a simulator on some rows.

These functions go to a worker by value, and import nothing but NumPy: a worker needs Python, NumPy and cloudpickle, and
what the simulator itself imports, but not this package. It starts in a fraction of a second, and holds no JAX.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, no_type_check

import cloudpickle
import numpy as np


class Call(NamedTuple):
    """How a simulator is called: pickled, with the shape of a row of data.

    - `simulator`: the function, pickled.
    - `shape`: the shape of one row of data.
    - `vectorized`: whether it takes all rows of a unit at once.
    - `nan`: whether its exceptions become NaN.
    - `limit`: the seconds after which a worker gives a row up, if it is the worker who does that.
    """

    simulator: bytes
    shape: tuple[int, ...]
    vectorized: bool
    nan: bool
    limit: float | None


class Returned(NamedTuple):
    """What comes back for some units: a unit is what is called, and tried again, together; one row, or a block of rows
    where the simulator is vectorized.

    - `data`: `(rows, *shape)`, NaN where there are none.
    - `odd`: what else happened, by the position of the unit: `("failed", rows, words)` for exceptions that became NaN,
        `("raised", words, traceback)`, `("hung",)` and `("not begun",)`.
    - `seconds`: what they took.
    - `broken`: why the simulator could not be loaded, in words.
    """

    data: np.ndarray
    odd: dict[int, tuple[Any, ...]]
    seconds: float
    broken: str


def pack(function: Callable[..., Any], *arguments: Any) -> bytes:
    """A call as bytes: `pickle.loads` of them makes it, and returns what it returns.

    Every executor can send `pickle.loads` to its workers, whatever it knows of functions that were defined in a script.
    No two are the same, so that an executor that remembers results, as dask does, computes each.
    """
    buffer = io.BytesIO()
    cloudpickle.dump(_Made(_call, (function, arguments, secrets.token_hex(8))), buffer)
    return buffer.getvalue()


class _Made:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]):
        self.made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.made


@no_type_check  # a checked function cannot be pickled
def _call(function: Any, arguments: Any, _unique: str) -> Any:
    return function(*arguments)


@no_type_check
def call_units(call: Any, sizes: Any, seeds: Any, arguments: Any) -> Any:
    """Call a simulator on units of so many rows each, one after the other: a `Returned`, as a plain tuple.

    `seeds` is `(rows, words)`, and each argument `(rows, *row)`.
    """
    simulator, shape, vectorized, nan, limit = call
    data = np.full((len(seeds), *shape), np.nan)
    try:
        fn = _loaded(simulator)
    except BaseException as error:
        return (data[:0], {}, 0.0, f"{type(error).__name__}: {error}")
    began, odd, stop = time.monotonic(), {}, 0
    for i, size in enumerate(sizes):
        start, stop = stop, stop + size
        unit = (seeds[start:stop], [a[start:stop] for a in arguments])
        outcome = _limited(limit, _call_unit, fn, *unit, shape, vectorized, nan)
        if outcome[0] == "data":
            data[start:stop] = outcome[1]
        if outcome[0] == "data" and outcome[2]:
            odd[i] = ("failed", *outcome[2:])
        elif outcome[0] != "data":
            odd[i] = outcome
        if outcome[0] == "hung":  # what comes after it would wait for the same processor
            odd.update(dict.fromkeys(range(i + 1, len(sizes)), ("not begun",)))
            break
    return (data, odd, time.monotonic() - began, "")


@no_type_check
def _loaded(simulator: Any) -> Any:
    """The simulator, loaded once by each worker: it may keep what takes long to make."""
    loaded = sys.__dict__.setdefault("_cpejax_simulators", {})
    name = hashlib.sha256(simulator).digest()
    if name not in loaded:
        loaded[name] = pickle.loads(simulator)  # noqa: S301 - the caller's own function
    return loaded[name]


@no_type_check
def _limited(limit: Any, function: Any, *arguments: Any) -> Any:
    """What a function returns, or `("hung",)` if it does not within the limit; then its thread is left alone."""
    if limit is None:
        return function(*arguments)
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(function(*arguments)), daemon=True)
    thread.start()
    thread.join(limit)
    return out[0] if out else ("hung",)


@no_type_check
def _call_unit(fn: Any, seeds: Any, arguments: Any, shape: Any, vectorized: Any, nan: Any) -> Any:
    given = arguments if vectorized else [a[0] for a in arguments]
    expected = (len(seeds), *shape) if vectorized else tuple(shape)
    try:
        out = fn(np.random.default_rng(seeds[0]), *given)
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
        if not nan or not isinstance(error, Exception):
            return ("raised", f"raised {words}", traceback.format_exc())
        if not vectorized or len(seeds) == 1:
            return ("data", np.full((len(seeds), *shape), np.nan), len(seeds), words)
        # Each row alone, to find those that fail.
        rows = [(seeds[i : i + 1], [a[i : i + 1] for a in arguments]) for i in range(len(seeds))]
        each = [_call_unit(fn, *row, shape, True, True) for row in rows]
        wrong = [outcome for outcome in each if outcome[0] != "data"]
        if wrong:
            return wrong[0]
        _, data, failures, words = zip(*each, strict=True)
        return ("data", np.concatenate(data), sum(failures), next(filter(None, words), ""))
    if np.shape(out) != expected:
        at_once = f" for {len(seeds)} rows at once (vectorized=True)" if vectorized else ""
        return ("raised", f"returned shape {np.shape(out)}{at_once}, expected {expected}", "")
    if np.iscomplexobj(out):
        return ("raised", "returned complex values, expected real ones", "")
    # A copy, for the simulator may use its array again.
    data = np.ma.filled(np.ma.asarray(out, float), np.nan) if np.ma.isMaskedArray(out) else np.array(out, float)
    return ("data", data if vectorized else data[None], 0, "")


@no_type_check
def begin(parent: Any, simulators: Any) -> Any:
    """What a worker of this machine does first: load simulators, and see to it that it ends soon after its parent has
    ended, however that did, and not by Ctrl-C. Returns its id.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to all processes of a terminal: the caller's is the one
    threading.Thread(target=watch, daemon=True).start()
    np.random.default_rng(0)  # import it now
    for simulator in simulators:
        with suppress(Exception):  # which is told when it is called
            _loaded(simulator)
    return os.getpid()


cloudpickle.register_pickle_by_value(sys.modules[__name__])
