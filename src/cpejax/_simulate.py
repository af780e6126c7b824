"""Drawing parameters and data from a program."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cpejax._graph import Graph
from cpejax._keys import check_key, key_words
from cpejax._program import Program, Simulator, run, unwrap
from cpejax._store import Unusable, digest, load_arrays, pack_arrays, remove_parts, write_atomically

MOST_NUMBERS = 50_000_000
"""How many simulated numbers there are at once; more go in chunks, which changes nothing but the memory."""


class Simulations(dict[str, np.ndarray]):
    """Simulated values of every site, `{site: (n, *shape)}`, with the names of the data sites in `observed`.

    `dropped` counts the simulations that were left out because a value was not finite; `graph` is the program's graph.
    """

    def __init__(self, values: Mapping[str, Any], graph: Graph, dropped: int = 0):
        super().__init__({name: np.asarray(x) for name, x in values.items()})
        self.graph = graph
        self.observed = graph.data
        self.dropped = dropped

    @property
    def n(self) -> int:
        """How many simulations there are."""
        return len(next(iter(self.values()))) if self else 0


def bind(program: Program, args: tuple, kwargs: Mapping[str, Any]) -> Program:
    """The program as a function without arguments."""
    if not callable(program):
        raise TypeError(f"program must be a function (a NumPyro model), found {type(program).__name__}.")
    return functools.partial(program, *args, **kwargs) if args or kwargs else program


def check_count(n: Any, what: str) -> None:
    """A whole number of at least 1."""
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
        raise ValueError(f"{what} must be a whole number of at least 1; found {n!r}.")


def simulate(
    program: Program,
    n: int,
    *args: Any,
    key: PRNGKeyArray,
    observed: Sequence[str] | None = None,
    values: Mapping[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Simulations:
    """Draw `n` sets of parameters and data from a program.

    **Arguments:**

    - `program`: a NumPyro model; `*args`, `**kwargs` are passed to it. Data given with `obs=` are simulated anew.
    - `n`: how many simulations.
    - `key`: a JAX key.
    - `observed`: the names of the data sites; see `cpe.Graph.from_program`.
    - `values`: sites that are not drawn but given, `{site: (n, *shape)}`. Posterior draws of all parameters make the
        result a sample from the posterior predictive distribution.
    - `checkpoint`: a folder; simulations that go in several parts, as those on the host do, are written there as they
        come, and a run that was killed goes on from there, to the same result.
    - `progress`: a progress bar for host simulators; by default where there is a terminal.

    **Returns:** `Simulations`, a dict of arrays `(n, *shape)`. Simulations with a value that is not finite are left
    out, counted and reported; more than 10 % of them is an error.

    ??? example

        ```python
        simulations = cpe.simulate(program, 10_000, observed=["y"], key=jax.random.key(0))
        simulations["y"].shape  # (10000, 8)
        ```
    """
    check_count(n, "n, the number of simulations,")
    key = check_key(key)
    bound = bind(program, args, kwargs)
    graph = Graph.from_program(bound, observed=observed)
    given = _check_values(values or {}, graph, n)
    simulators: list[Simulator] = []

    @jax.jit
    def draw(keys: Array, given: dict[str, Array]) -> dict[str, Array]:
        def one(key: Array, given: dict[str, Array]) -> dict[str, Array]:
            out: dict[str, Array] = {}

            def visit(name: str, msg: dict[str, Any]) -> None:
                out[name] = jnp.asarray(msg["value"])
                simulators.extend([base] if isinstance(base := unwrap(msg["fn"]), Simulator) else [])

            run(bound, given, visit, key)
            return out

        return jax.vmap(one)(keys, given)

    keys = jax.random.split(key, n)
    jax.eval_shape(draw, keys, given)
    host = any(simulator.host for simulator in simulators)
    numbers = sum(math.prod(s.shape) for s in graph.sites.values())
    most = max(1, MOST_NUMBERS // max(numbers, 1))
    most = min(most, -(-n // 50)) if host else most  # 50 steps of the progress bar
    chunk = -(-n // -(-n // most))
    parts: list[dict[str, np.ndarray]] = []
    store = None if checkpoint is None or chunk == n else _Parts(Path(checkpoint), graph, n, chunk, key, given)
    console = Console(stderr=True)
    shown = host and (console.is_terminal if progress is None else progress)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task("", total=n)
        for start in range(0, n, chunk):
            keep = min(chunk, n - start)
            found = store.read(start) if store else None
            if found is None:
                which = np.arange(start, start + chunk) % n  # one shape, one compilation
                try:
                    drawn = draw(keys[which], {name: x[which] for name, x in given.items()})
                    found = {name: np.asarray(x)[:keep] for name, x in drawn.items()}
                except Exception:
                    _explain(simulators)
                    raise
                if store:
                    store.write(start, found)
            parts.append(found)
            bar.update(task, advance=keep)
    whole = {name: np.concatenate([p[name] for p in parts]) for name in graph.sites}
    return finite(whole, graph, console)


def _check_values(values: Mapping[str, Any], graph: Graph, n: int) -> dict[str, Array]:
    out = {}
    for name, x in values.items():
        if name not in graph.sites:
            raise ValueError(f"values name '{name}', but the program has only the sites {list(graph.sites)}.")
        expected = (n, *graph.sites[name].shape)
        if np.shape(x) != expected:
            raise ValueError(f"values['{name}'] has shape {np.shape(x)}, but {n} values of it have shape {expected}.")
        out[name] = jnp.asarray(x)
    return out


class _Parts:
    """Simulations on disk, as far as they have come."""

    def __init__(self, folder: Path, graph: Graph, n: int, chunk: int, key: PRNGKeyArray, given: Mapping[str, Array]):
        fixed = digest(*(part for name, x in given.items() for part in (name.encode(), np.asarray(x).tobytes())))
        self.run = json.dumps(
            {"program": graph.fingerprint, "n": n, "chunk": chunk, "key": key_words(key), "values": fixed}
        )
        self.folder = folder

    def _path(self, start: int) -> Path:
        return self.folder / f"simulations-{start:09d}.safetensors"

    def read(self, start: int) -> dict[str, np.ndarray] | None:
        path = self._path(start)
        remove_parts(path)
        if not path.exists():
            return None
        arrays, about = load_arrays(path)
        if about.get("run") != self.run:
            raise Unusable(
                f"The simulations in {self.folder} are of another run (program, number or key): "
                "give another folder, or delete it to start again."
            )
        return arrays

    def write(self, start: int, part: Mapping[str, np.ndarray]) -> None:
        arrays = {name: np.ascontiguousarray(x) for name, x in part.items()}
        write_atomically(self._path(start), pack_arrays(arrays, {"run": self.run}))


def _explain(simulators: Sequence[Simulator]) -> None:
    """Raise the error of a simulator on the host in its own words."""
    for simulator in simulators:
        if simulator.failure is not None:
            cause, words = simulator.failure
            raise RuntimeError(
                f"{words}. Mend it there, or let it return NaN: such simulations are counted and left out."
            ) from cause


def finite(values: Mapping[str, np.ndarray], graph: Graph, console: Console | None = None) -> Simulations:
    """The simulations whose values are all finite, in float32; more than 10 % of others is an error."""
    n = len(next(iter(values.values())))
    with np.errstate(over="ignore"):
        good = {name: np.isfinite(np.asarray(values[name], np.float32)).reshape(n, -1).all(1) for name in graph.sites}
    every = np.all(list(good.values()), axis=0)
    bad = int(n - every.sum())
    if bad:
        first = next(name for name in graph.sites if not good[name].all())
        row = int(np.flatnonzero(~good[first])[0])
        at = ", ".join(f"{p} = {words(values[p][row])}" for p in graph.parameters if p != first)
        what = f"{bad} of {n} simulations ({100 * bad / n:.1f} %) are not finite; the first bad site is '{first}'"
        what += f", for instance at {at}" if at else ""
        if bad > 0.1 * n:
            raise ValueError(
                f"{what}. More than 10 % would bias the posterior: mend the simulator there, or choose a prior that "
                "does not reach such values."
            )
        message = f"{what}. They are left out."
        (console or Console(stderr=True)).print(message, highlight=False, markup=False, soft_wrap=True)
    return Simulations({name: np.asarray(x)[every] for name, x in values.items()}, graph, bad)


def words(value: Any) -> str:
    """Numbers for a message."""
    return np.array2string(np.asarray(value, float), threshold=12, formatter={"float_kind": lambda x: f"{x:.4g}"})
