"""Simulations as they are kept: arrays by site, finite, with the digits that they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from cpejax.program.graph import Graph
from cpejax.program.model import Model
from cpejax.program.probe import Probe
from cpejax.util.messages import say


class Simulations(dict[str, np.ndarray]):
    """Simulated values of every site, `{site: (n, *shape)}`, with the names of the data sites in `observed`.

    Deterministic sites are among them; `cpe.fit` does not read these. Data of simulators on the host are in float64.
    `dropped` counts the simulations that were left out because a value was not finite; `interrupted` says that there
    are fewer than asked for; `model` is what was simulated, `graph` its graph, and `probe` what its program gives at
    the first of them.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        graph: Graph,
        dropped: int = 0,
        *,
        model: Model | None = None,
        probe: Probe | None = None,
        interrupted: bool = False,
    ):
        super().__init__({name: np.asarray(x) for name, x in values.items()})
        self.graph = graph
        self.observed = graph.data
        self.dropped = dropped
        self.model = model
        self.probe = probe
        self.interrupted = interrupted

    @property
    def n(self) -> int:
        """How many simulations there are."""
        return len(next(iter(self.values()))) if self else 0


def check_count(n: Any, what: str) -> None:
    """A whole number of at least 1."""
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
        raise ValueError(f"{what} must be a whole number of at least 1; found {n!r}.")


def finite(
    values: Mapping[str, np.ndarray], graph: Graph, console: Console | None = None, max_invalid: float = 0.1
) -> Simulations:
    """The simulations whose values are all finite, in float32; a larger share of others is an error."""
    n = len(next(iter(values.values())))
    good = finite_rows(values, graph)
    every = np.all(list(good.values()), axis=0)
    bad = int(n - every.sum())
    if bad:
        first = next(name for name in graph.sites if not good[name].all())
        row = int(np.flatnonzero(~good[first])[0])
        at = ", ".join(f"{p} = {words(values[p][row])}" for p in graph.parameters if p != first)
        what = f"{bad} of {n} simulations ({100 * bad / n:.1f} %) are not finite; the first bad site is '{first}'"
        what += f", for instance at {at}" if at else ""
        if bad > max_invalid * n:
            raise ValueError(
                f"{what}. More than {100 * max_invalid:g} % are an error: if they are accidents, leaving them out "
                "biases the posterior, away from where they happen. Fix the simulator there, or choose a prior that "
                "does not reach such values. If they are outcomes of the model that are not observed, they do no harm: "
                "give cpe.simulate a larger max_invalid."
            )
        say(f"{what}. They are left out.", console)
    return Simulations({name: np.asarray(x)[every] for name, x in values.items()}, graph, bad)


def finite_rows(values: Mapping[str, np.ndarray], graph: Graph) -> dict[str, np.ndarray]:
    """Which simulations have finite values in float32, `{site: (n,)}`."""
    with np.errstate(over="ignore"):
        found = {name: np.isfinite(np.asarray(values[name], np.float32)) for name in graph.sites}
    return {name: np.asarray(x.reshape(len(x), -1).all(1)) for name, x in found.items()}


FEW_STEPS = 10_000
"""Data that spread over fewer steps of float32 are centred in float64 first; in others a step is below 1e-4 of it."""
NO_DIGITS = 100
"""Values that spread over fewer steps of float32 have lost what they say: a step is above 1e-2 of the spread."""


def offsets(values: Mapping[str, np.ndarray], graph: Graph) -> dict[str, np.ndarray]:
    """What to take from data so that float32 holds their digits, `{site: shape}`; sites that need none are left out.

    One value for all members of a plate, which stay exchangeable, or, if that is not enough, one for each.
    """
    out = {}
    for name in graph.data:
        site, x = graph.sites[name], np.asarray(values[name])
        if x.dtype == np.float32 or x.dtype.kind not in "fiu" or not len(x):
            continue
        x = x.astype(np.float64)
        if not _steps(x, FEW_STEPS).any():
            continue
        plates = tuple(i for i, d in enumerate(site.dims) if d is not None)
        common = np.median(x, axis=(0, *(i + 1 for i in plates)), keepdims=True)[0]
        offset = np.broadcast_to(common, site.shape)
        if _steps(x - offset, FEW_STEPS).any():
            offset = np.median(x, axis=0)
        out[name] = np.array(offset)
    return out


def _steps(x: np.ndarray, fewest: int) -> np.ndarray:
    """Which columns of `x`, `(n, ...)`, vary, but over fewer steps of float32 than `fewest`."""
    x = x[:1000]  # a thousand tell
    low, middle, high = np.quantile(x, [0.25, 0.5, 0.75], axis=0)
    with np.errstate(over="ignore"):
        step = np.spacing(np.abs(middle).astype(np.float32)).astype(np.float64)
    spread, sd = high - low, x.std(axis=0, dtype=np.float64)
    return np.asarray((np.maximum(spread, sd) < fewest * step) & (x != x[:1]).any(axis=0))


def say_without_digits(values: Mapping[str, np.ndarray], graph: Graph, console: Console | None = None) -> int:
    """Say which values have no digits left in float32, in which JAX computes; return how many do."""
    total = 0
    for name, site in graph.sites.items():
        x = np.asarray(values[name])
        if x.dtype != np.float32 or len(x) < 2:
            continue
        # What never changes may be a constant of the model, unless it is large data.
        swallowed = (x == x[:1]).all(axis=0) & (np.abs(x[0]) >= 1e5) & site.observed
        lost = _steps(x, NO_DIGITS) | swallowed
        count = int(lost.sum())
        if count:
            at = float(np.abs(x[0])[lost].max())
            say(
                f"Warning: {count} of {lost.size} values of site '{name}' have no digits left: float32 has steps of "
                f"{np.spacing(np.float32(at)):.2g} at {at:.4g}, and they spread over fewer than {NO_DIGITS} of these. "
                "Let the program draw them less a constant, or return them from a cpe.Simulator(..., host=True), whose "
                "data are kept in float64.",
                console,
            )
        total += count
    return total


def words(value: Any) -> str:
    """Numbers for a message."""
    return np.array2string(np.asarray(value, float), threshold=12, formatter={"float_kind": lambda x: f"{x:.4g}"})
