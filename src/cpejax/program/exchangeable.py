"""Whether members of a plate can change places: verified with numbers, whatever the trace shows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from cpejax.program.distributions import unwrap
from cpejax.program.members import Link
from cpejax.program.simulator import Simulator
from cpejax.program.tapes import KEY, Cell, Evaluation, Walk, differs, same_along


def exchange_differs(
    evaluation: Evaluation,
    plate: str,
    axes: Mapping[tuple[str, int], tuple[str | None, ...]],
    targets: Mapping[tuple[str, int], str],
    index: Mapping[str, Sequence[tuple[str, Link]]],
) -> str | None:
    """Why members of a plate cannot change places with all that is read of them; `None` if they can.

    **Arguments:** `axes`, the plate of each axis of each constant, by (site, number); `targets`, the plates whose
    members constants number; `index`, the links of each site.
    """
    for trial in range(2):
        order = (
            evaluation.rng.permutation(evaluation.sizes[plate])
            if trial
            else np.roll(np.arange(evaluation.sizes[plate]), 1)
        )
        back = np.argsort(order)
        values = {
            n: x.take(order, evaluation.sites[n].dims.index(plate)) if plate in evaluation.plates[n] else x
            for n, x in evaluation.draws[trial].items()
        }
        constants = {name: list(found) for name, found in evaluation.constants.items()}
        for (name, number), along in axes.items():
            c = np.asarray(evaluation.constants[name][number])
            for axis, p in enumerate(along):
                c = c.take(order, axis) if p == plate else c
            if targets.get((name, number)) == plate:
                c = back.astype(c.dtype)[c]
            constants[name][number] = jnp.asarray(c)
        after = evaluation.evaluate(values, constants)
        for name, tape in evaluation.tapes.items():
            if KEY in tape.names:
                continue  # what is drawn outside any site is another value for each member
            before = evaluation.before[trial][name]
            linked = {parent for parent, o in index[name] if o.target == plate}
            if plate in evaluation.plates[name]:
                before = before.take(order, evaluation.sites[name].dims.index(plate))
            elif any(
                plate in evaluation.plates[p] and p not in linked and not evaluation.sites[p].has_obs
                for p in evaluation.sites[name].parents
            ):
                continue  # coupled through this site, so that the plate is unrolled anyway
            if differs(before, after[name], loose=True).any():
                return f"its members differ at site '{name}' by something other than constants, one for each member"
    return None


def rows_differ(evaluation: Evaluation, name: str) -> str | None:
    """Why a simulator that gets all rows at once knows more of a row than its arguments; `None` if it does not."""
    with numpyro.validation_enabled(False):
        simulator = unwrap(evaluation.tapes[name].distribution(evaluation.draws[0], None))
    assert isinstance(simulator, Simulator)
    shape = evaluation.batch(name)
    members = int(np.prod(shape))
    rows = [r.reshape(members, *r.shape[len(shape) :]) for r in simulator.rows(shape)]
    if members > 1 and (_by_moments if simulator.host else _by_trace)(simulator, rows):
        why = f"the simulator of '{name}' (vectorized=True) tells rows apart by more than its arguments"
        return f"{why}: pass it what it knows of each row as an argument"
    return None


def _by_trace(simulator: Simulator, rows: list[Any]) -> bool:
    """Whether a simulator in JAX has an array of its own with a row for each member."""
    closed = jax.make_jaxpr(simulator.fn)(jax.random.key(0), *rows)
    walk = Walk()
    inputs = [Cell(x, True) for x in (jax.random.key(0), *rows)]
    walk(closed.jaxpr, [Cell(c) for c in closed.consts], inputs)
    arrays = [np.asarray(c) for c in walk.found if not jnp.issubdtype(c.dtype, jax.dtypes.prng_key)]
    return any(c.ndim and len(c) == len(rows[0]) and not same_along(c, 0) for c in arrays) if rows else False


CALLS = 32
"""Calls of a vectorized simulator on the host, whose rows all have the same arguments, to compare the rows' means."""


def _by_moments(simulator: Simulator, rows: list[Any]) -> bool:
    """Whether rows with the same arguments have different means: none differs by chance by 8 of its standard errors.

    A simulator that takes more than a second a call, or fails, is let pass here.
    """
    same = [np.broadcast_to(np.asarray(r[:1]), r.shape) for r in rows]
    out = []
    for seed in range(CALLS):
        began = time.monotonic()
        try:
            out.append(np.asarray(simulator.fn(np.random.default_rng(seed), *same), float))
        except Exception:  # simulating says so, in the user's words
            return False
        if time.monotonic() - began > 1:
            return False
    found = np.stack(out)
    if not np.isfinite(found).all():
        return False
    error = np.sqrt(found.var(0, ddof=1) / CALLS) + 1e-6 * (1 + np.abs(found).max())
    mean = found.mean(0)
    return bool((np.abs(mean - mean.mean(0)) > 8 * np.sqrt(error**2 + (error**2).mean(0))).any())
