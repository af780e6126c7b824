"""Drawing parameters and data from a program."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cpejax._graph import Graph
from cpejax._program import Program, Simulator, read, run, unwrap


class Simulations(dict[str, np.ndarray]):
    """Simulated values of every site, `{site: (n, *shape)}`, with the names of the data sites in `observed`.

    `dropped` counts the simulations that were left out because a value was not finite.
    """

    def __init__(self, values: Mapping[str, Any], observed: Sequence[str], dropped: int = 0):
        super().__init__({name: np.asarray(x) for name, x in values.items()})
        self.observed = tuple(observed)
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


def check_key(key: Any) -> PRNGKeyArray:
    """A JAX key, typed or not, as a typed one."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(key))
    found = f"{type(key).__name__} of shape {key.shape}" if hasattr(key, "shape") else f"{key!r}"
    raise TypeError(f"key must be one JAX key, as jax.random.key(0) makes it; found {found}.")


def simulate(
    program: Program, n: int, *args: Any, key: PRNGKeyArray, observed: Sequence[str] | None = None,
    progress: bool | None = None, **kwargs: Any,
) -> Simulations:
    """Draw `n` sets of parameters and data from a program.

    **Arguments:**

    - `program`: a NumPyro model; `*args`, `**kwargs` are passed to it. Data given with `obs=` are simulated anew.
    - `n`: how many simulations.
    - `key`: a JAX key.
    - `observed`: the names of the data sites; see `cpe.Graph.from_program`.
    - `progress`: a progress bar for host simulators; by default where there is a terminal.

    **Returns:** `Simulations`, a dict of arrays `(n, *shape)`. Simulations with a value that is not finite are left out,
    counted and reported; more than 10 % of them is an error.

    ??? example

        ```python
        simulations = cpe.simulate(program, 10_000, observed=["y"], key=jax.random.key(0))
        simulations["y"].shape  # (10000, 8)
        ```
    """
    if not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"n, the number of simulations, must be a whole number of at least 1; found {n!r}.")
    key = check_key(key)
    bound = bind(program, args, kwargs)
    graph = Graph.from_program(bound, observed=observed)
    host = any(isinstance(unwrap(s.fn), Simulator) and unwrap(s.fn).host for s in read(bound).values())
    numbers = sum(int(np.prod(s.shape)) for s in graph.sites.values())
    chunk = max(1, min(n, 50_000_000 // max(numbers, 1)))
    chunk = min(chunk, max(1, -(-n // 50))) if host else chunk

    @jax.jit
    def draw(keys: Array) -> dict[str, Array]:
        def one(key: Array) -> dict[str, Array]:
            out: dict[str, Array] = {}
            run(bound, {}, lambda name, msg: out.update({name: jnp.asarray(msg["value"])}), key)
            return out

        return jax.vmap(one)(keys)

    keys = jax.random.split(key, n)
    parts: list[dict[str, np.ndarray]] = []
    console = Console(stderr=True)
    shown = host and (console.is_terminal if progress is None else progress)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task("", total=n)
        for start in range(0, n, chunk):
            part = keys[start : start + chunk]
            if len(part) < chunk:  # one shape, one compilation
                part = jnp.concatenate([part, keys[: chunk - len(part)]])
            values = draw(part)
            keep = min(chunk, n - start)
            parts.append({name: np.asarray(x)[:keep] for name, x in values.items()})
            bar.update(task, advance=keep)
    whole = {name: np.concatenate([p[name] for p in parts]) for name in graph.sites}
    return finite(whole, graph, console)


def finite(values: Mapping[str, np.ndarray], graph: Graph, console: Console | None = None) -> Simulations:
    """The simulations whose values are all finite; more than 10 % of others is an error."""
    n = len(next(iter(values.values())))
    good = np.ones(n, bool)
    first: str | None = None
    for name in graph.sites:
        here = np.isfinite(np.asarray(values[name], float)).reshape(n, -1).all(1)
        first = name if first is None and not here.all() else first
        good &= here
    bad = int(n - good.sum())
    if bad and first is not None:
        row = int(np.flatnonzero(~np.isfinite(np.asarray(values[first], float)).reshape(n, -1).all(1))[0])
        at = {p: np.round(np.asarray(values[p][row], float), 4).tolist() for p in graph.parameters if p != first}
        what = f"{bad} of {n} simulations ({100 * bad / n:.1f} %) are not finite; the first bad site is '{first}', at {at}"
        if bad > 0.1 * n:
            raise ValueError(
                f"{what}. More than 10 % would bias the posterior: mend the simulator there, or choose a prior that "
                "does not reach such values."
            )
        (console or Console(stderr=True)).print(f"{what}. They are left out.", highlight=False, soft_wrap=True)
    return Simulations({name: np.asarray(x)[good] for name, x in values.items()}, graph.data, bad)
