"""Drawing parameters and data from a program."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, PRNGKeyArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cpejax.program.crew import check_workers, crew_of
from cpejax.program.dispatch import Limits
from cpejax.program.distribute import BLOCK, Distributed, InBlocks, Plan
from cpejax.program.distributions import is_masked, mask_of, unwrap
from cpejax.program.graph import Graph
from cpejax.program.model import Model, as_model, check_simulators
from cpejax.program.probe import Prober, code_of
from cpejax.program.simulation_files import CheckpointFiles
from cpejax.program.simulations import Simulations, check_count, finite, say_without_digits
from cpejax.program.simulator import FEED, Program, Simulator
from cpejax.program.tracing import run
from cpejax.util.keys import check_key
from cpejax.util.messages import say
from cpejax.util.room import make_room

_Drawn = tuple[dict[str, Array], dict[str, Array], dict[str, tuple[Array, ...]]]

MOST_NUMBERS = 50_000_000
"""How many simulated values there are at once; more go in chunks, which changes nothing but the memory."""


def simulate(
    model: Model | Program,
    n: int,
    *,
    key: PRNGKeyArray,
    values: Mapping[str, Any] | xr.DataTree | None = None,
    checkpoint: str | Path | None = None,
    on_error: Literal["raise", "nan"] = "raise",
    max_invalid: float = 0.1,
    progress: bool | None = None,
    workers: Any = None,
    batch: int | None = None,
    timeout: float | int | None = None,
    retries: int = 2,
) -> Simulations:
    """Draw `n` sets of parameters and data from a model.

    **Arguments:**

    - `model`: a `cpe.Model`, or a NumPyro program without arguments.
    - `n`: how many simulations.
    - `key`: a JAX key.
    - `values`: sites that are not drawn but given, `{site: (n, *shape)}`, or the DataTree of `Posterior.sample`, whose
        chains and draws are the `n`. Posterior draws of all parameters make the result a sample from the posterior
        predictive distribution.
    - `checkpoint`: a folder; simulations that go in several parts, as those on the host do, are written there as they
        come, and a run that was killed resumes from there, to the same result. Parts of another program are an error.
    - `on_error`: what becomes of an exception that a simulator on the host raises: `"raise"` ends the run, `"nan"`
        makes the data of that simulation NaN.
    - `max_invalid`: the largest share of simulations with values that are not finite; more are an error.
    - `progress`: a progress bar for host simulators; by default where there is a terminal.
    - `workers`: who calls simulators on the host: a number of processes on this machine, or an executor with
        `submit`, such as a `dask.distributed.Client` or those of `concurrent.futures`, `mpi4py` and `submitit`. The
        result is the same whoever does, and however many. With a `checkpoint`, what comes back is on disk at once.
    - `batch`: how many rows go to a worker at a time; by default as many as take about half a second.
    - `timeout`: how many seconds one call of a simulator by a worker may take; by default any time.
    - `retries`: how often a row is tried again whose worker has died, or which has taken too long. After that its data
        are NaN, which is counted and said.

    **Returns:** `Simulations`, a dict of arrays `(n, *shape)`. Simulations with a value that is not finite are left
    out, counted and reported. This does not bias the posterior for an observation that is finite where "not finite" is
    an outcome of the model itself (a population dies out). Where it is an accident (a solver does not converge), what
    would have been observed there is missing: parameters at which this happens with probability f count as if their
    prior were lower by the factor 1 - f.

    Ctrl-C stops simulators on the host: with a `checkpoint` as `KeyboardInterrupt`, and otherwise what is finished is
    returned, which `Simulations.interrupted` tells.

    >>> model = cpe.Model(program, observed=["y"])
    >>> simulations = cpe.simulate(model, 200, key=jax.random.key(0))
    >>> simulations["y"].shape
    (200, 3)
    """
    make_room()
    check_count(n, "n, the number of simulations,")
    key = check_key(key)
    if on_error not in ("raise", "nan"):
        raise ValueError(f"on_error must be 'raise' or 'nan', found {on_error!r}.")
    if not 0 <= max_invalid < 1:
        raise ValueError(f"max_invalid must be a share of at least 0 and below 1, found {max_invalid!r}.")
    limits = _check_limits(batch, timeout, retries)
    check_workers(workers)
    model = as_model(model)
    given = _check_values({} if values is None else values, model.graph, n)
    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    drawn = draw_rows(
        model,
        n,
        range(n),
        key,
        given,
        checkpoint=checkpoint,
        on_error=on_error,
        workers=workers,
        limits=limits,
        console=console,
        shown=shown,
    )
    out = finite(drawn.values, model.graph, console, max_invalid)
    say_without_digits(out, model.graph, console)
    out.model, out.interrupted = model, drawn.interrupted
    out.probe = None if given or not out.n else drawn.prober(out)
    return out


class Draws(NamedTuple):
    """What was drawn, `{site: (k, *shape)}`, also what is not finite; fewer than asked for if it was interrupted."""

    values: dict[str, np.ndarray]
    prober: Prober
    interrupted: bool


def draw_rows(
    model: Model,
    total: int,
    rows: range,
    key: PRNGKeyArray,
    given: Mapping[str, Array],
    *,
    checkpoint: str | Path | None,
    on_error: str,
    workers: Any,
    limits: Limits,
    console: Console,
    shown: bool,
) -> Draws:
    """Draw some rows of `total` simulations, whichever others there are; see `simulate`."""
    bound, graph, n = model.bound, model.graph, len(rows)
    simulators: list[Simulator] = []

    @jax.jit
    def draw(keys: Array, given: dict[str, Array], fed: dict[str, tuple[Array, Array]] | None = None) -> _Drawn:
        def one(key: Array, given: dict[str, Array], fed: dict[str, tuple[Array, Array]] | None) -> _Drawn:
            out: dict[str, Array] = {}
            low: dict[str, Array] = {}  # what float32 does not hold of the data of a simulator on the host
            asked: dict[str, tuple[Array, ...]] = {}  # what simulators are called with that are fed

            def feed(simulator: Simulator, seeds: Array, rows: Sequence[Array]) -> tuple[Array, Array]:
                name = str(simulator.site)
                asked[name] = (seeds, *rows)
                nothing = jnp.zeros((len(seeds), *simulator.event_shape))
                return (fed or {}).get(name, (nothing, nothing))

            def visit(name: str, msg: dict[str, Any]) -> None:
                out[name] = jnp.asarray(msg["value"])
                base = unwrap(msg["fn"])
                if isinstance(base, Simulator):
                    base.on_error = on_error
                    simulators.append(base)
                    if base.host and name not in given:
                        rest = base.low.reshape(out[name].shape)
                        low[name] = jnp.where(mask_of(msg["fn"]), rest, 0.0) if is_masked(msg["fn"]) else rest

            def deterministic(name: str, msg: dict[str, Any]) -> None:
                out[name] = jnp.asarray(msg["value"])

            before = FEED.set(None if fed is None else feed)
            try:
                run(bound, given, visit, key, deterministic=deterministic)
            finally:
                FEED.reset(before)
            return out, low, asked

        return jax.vmap(one)(keys, given, fed)

    every = jax.random.split(key, total)
    keys = every[rows.start : rows.stop]
    jax.eval_shape(draw, keys, given)
    check_simulators([simulator for simulator in simulators if simulator.site not in given])
    host = any(simulator.host for simulator in simulators)
    scalars = sum(math.prod(shape) for shape in graph.shapes.values())
    most = max(1, MOST_NUMBERS // max(scalars, 1))
    most = min(most, -(-n // 50)) if host else most  # 50 steps of the progress bar
    chunk = -(-n // -(-n // most))
    parts: list[dict[str, np.ndarray]] = []
    prober = Prober(bound, graph)
    prober.code |= {str(s.site): code_of(s.fn) for s in simulators if s.host}  # before calls change what it holds
    store = None
    if checkpoint is not None and (chunk < n or (host and workers is not None)):
        store = CheckpointFiles(Path(checkpoint), prober, n, chunk, key, given)
        store.run |= {} if n == total else {"rows": [rows.start, rows.stop, total]}
    shown = shown and host
    if workers is not None and not host:
        say("workers are for simulators on the host (host=True): this program has none, and none is started.", console)

    def of_block(numbers: np.ndarray, fed: dict[str, Any] | None) -> Any:
        return draw(every[numbers], {name: x[numbers] for name, x in given.items()}, fed)

    blocks = InBlocks(of_block, rows.start, total)
    if workers is not None and host:
        outer = max(1, MOST_NUMBERS // max(scalars, 1) // chunk) * chunk
        plan = Plan(n, chunk, min(outer, -(-n // chunk) * chunk))
        asked = jax.eval_shape(lambda: of_block(np.arange(BLOCK) % total, {}))[2]
        members = {name: asked[name][0].shape[1] for name in graph.sites if name in asked}  # in the program's order
        named = {str(simulator.site): simulator for simulator in simulators if simulator.host}
        crew = crew_of(workers)
        try:
            distributed = Distributed(
                blocks, graph, named, members, plan, crew, limits, store, on_error, console, shown
            )
            whole = distributed.run()
        finally:
            crew.close()
        if distributed.interrupted:
            done = len(next(iter(whole.values())))
            _stop(console, done, n, checkpoint if store else None, given)
        return Draws(whole, prober, distributed.interrupted)
    if n < total and not host:
        values, _, _ = blocks(np.arange(n), None)
        return Draws({name: values[name] for name in graph.shapes}, prober, False)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    interrupted = False
    with Progress(*columns, console=console, disable=not shown) as bar, _quiet_callbacks():
        task = bar.add_task("", total=n)
        for start in range(0, n, chunk):
            keep = min(chunk, n - start)
            found = store.read(start) if store else None
            if found is None:
                which = np.arange(start, start + chunk) % n  # one shape, one compilation
                try:
                    drawn, low, _ = draw(keys[which], {name: x[which] for name, x in given.items()})
                    found = {name: np.asarray(x)[:keep] for name, x in drawn.items()}
                    found |= {name: found[name] + np.asarray(x, np.float64)[:keep] for name, x in low.items()}
                except (Exception, KeyboardInterrupt) as error:
                    interrupted = _was_interrupted(error, simulators)
                    if not interrupted:
                        _explain(simulators)
                        raise
                if found is None:
                    break
                if store:
                    store.write(start, found)
            parts.append(found)
            bar.update(task, advance=keep)
    if interrupted:
        _stop(console, sum(len(next(iter(part.values()))) for part in parts), n, checkpoint if store else None, given)
    for count, first in (simulator.failed for simulator in simulators):
        if count:
            say(f"{count} calls of a simulator failed and count as NaN (on_error='nan'). The first: {first}.", console)
    whole = {name: np.concatenate([p[name] for p in parts]) for name in graph.shapes}
    return Draws(whole, prober, interrupted)


def _check_limits(batch: Any, timeout: Any, retries: Any) -> Limits:
    if batch is not None:
        check_count(batch, "batch, the number of rows that go to a worker at a time,")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, or None for no limit; found {timeout!r}.")
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(f"retries must be a whole number of at least 0; found {retries!r}.")
    return Limits(batch, None if timeout is None else float(timeout), retries)


@contextmanager
def _quiet_callbacks() -> Iterator[None]:
    """JAX logs the traceback of what a simulator on the host raises, which is raised again in its own words."""
    log = logging.getLogger("jax._src.callback")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _was_interrupted(error: BaseException, simulators: Sequence[Simulator]) -> bool:
    """Ctrl-C, which XLA turns into an error of its own if it comes while a simulator on the host is called."""
    failures = [s.failure[0] for s in simulators if s.failure is not None]
    return any(isinstance(e, KeyboardInterrupt) for e in (error, *failures)) or "KeyboardInterrupt" in str(error)


def _stop(console: Console, done: int, n: int, checkpoint: str | Path | None, given: Mapping[str, Any]) -> None:
    """Say what is there after Ctrl-C, or raise it where nothing can be returned, or needs to be."""
    if checkpoint is not None:
        raise KeyboardInterrupt(
            f"Interrupted: {done} of {n} simulations are in {checkpoint}; the same call resumes from there."
        )
    if not done or given:  # given values belong to a simulation each
        raise KeyboardInterrupt(f"Interrupted after {done} of {n} simulations.")
    say(f"Interrupted: {done} of {n} simulations are finished, and returned.", console)


def _check_values(values: Mapping[str, Any] | xr.DataTree, graph: Graph, n: int) -> dict[str, Array]:
    if isinstance(values, xr.DataTree):
        values = _from_tree(values, graph, n)
    out = {}
    for name, x in values.items():
        if name not in graph.sites:
            raise ValueError(f"values name '{name}', but the program has only the sites {list(graph.sites)}.")
        expected = (n, *graph.sites[name].shape)
        if np.shape(x) != expected:
            raise ValueError(f"values['{name}'] has shape {np.shape(x)}, but {n} values of it have shape {expected}.")
        out[name] = jnp.asarray(x)
    return out


def _from_tree(tree: xr.DataTree, graph: Graph, n: int) -> dict[str, np.ndarray]:
    """The sites among posterior draws, chains and draws in one axis."""
    draws = tree["posterior"].dataset if "posterior" in tree.children else tree.dataset
    out = {}
    for name in graph.sites:
        if name in draws:
            x = draws[name].transpose("chain", "draw", ...).values
            out[name] = x.reshape(-1, *x.shape[2:])
            if x.ndim - 2 > len(graph.sites[name].shape):
                raise ValueError(
                    f"The draws of '{name}' are for many observations: their axes are {draws[name].dims}. Choose one, "
                    f"for example values=draws.isel({draws[name].dims[2]}=0)."
                )
            if len(out[name]) != n:
                raise ValueError(f"values has {len(out[name])} draws, but n is {n}: give simulate the number of draws.")
    if not out:
        raise ValueError(f"values is a DataTree without draws of any of the sites {list(graph.sites)}.")
    return out


def _explain(simulators: Sequence[Simulator]) -> None:
    """Raise the error of a simulator on the host in its own words."""
    for simulator in simulators:
        if simulator.failure is not None:
            cause, words = simulator.failure
            raise RuntimeError(
                f"{words}. Fix it there, or let it return NaN, which cpe.simulate(..., on_error='nan') does for it: "
                "such simulations are counted and left out."
            ) from cause
