"""What a user gives a posterior, data and draws, checked against its program; errors name the site."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array

from cpejax.coordinates.prior import Values
from cpejax.inference.fitted import Fitted
from cpejax.inference.values import centre, numbers, plates
from cpejax.program.simulations import words


def check_given(fitted: Fitted, given: Mapping[str, Any]) -> tuple[dict[str, Array], bool]:
    """The data as arrays with a leading axis for observations, and whether there was one."""
    if not isinstance(given, Mapping):
        raise TypeError(f"given must be a dict of the observed data, found {type(given).__name__}.")
    parameters = [name for name in fitted.graph.parameters if name in given]
    lacks = {} if fitted.flow.any_subset or not parameters else fitted.flow.lacks(parameters)
    known = fitted.graph.data if lacks is None else tuple(fitted.graph.sites)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            if name in fitted.graph.parameters:
                hint = " Only cpe.CPE() and cpe.AIO() can condition on parameters."
            sites = known if fitted.flow.any_subset else fitted.graph.data
            raise ValueError(
                f"given['{name}'] is not a {'' if fitted.flow.any_subset else 'data '}site; the "
                f"{'' if fitted.flow.any_subset else 'data '}sites are {list(sites)}.{hint}"
            )
    if lacks:
        refuse_parameters(fitted, parameters, lacks)
    if len(given) == len(fitted.graph.sites):
        raise ValueError("given has all sites of the program, so there is nothing left to draw.")
    out: dict[str, Array] = {}
    lengths: dict[str, int | None] = {}
    for name in known:
        site = fitted.graph.sites[name]
        if name not in given:
            if fitted.flow.any_subset or name in fitted.graph.parameters:
                continue
            raise ValueError(f"given has no '{name}'; it needs the data sites {list(fitted.graph.data)}.")
        x = numbers(given[name], f"given['{name}']")
        if name in fitted.offset and x.dtype.kind == "f" and x.dtype.itemsize < 8:
            raise ValueError(
                f"given['{name}'] is in {x.dtype}, which has steps of {np.spacing(np.abs(x).max()):.2g} there: too "
                "wide for data that the program simulates in float64. Give a NumPy array of float64."
            )
        x = fitted.graph.without_masked({name: x})[name]
        if x.shape[x.ndim - len(site.shape) :] == site.shape:
            x = centre(x, fitted.offset.get(name))
        if x.shape == site.shape:
            lengths[name] = None
        elif x.shape[1:] == site.shape and x.ndim == len(site.shape) + 1 and len(x) > 0:
            lengths[name] = len(x)
        else:
            raise ValueError(
                f"given['{name}'] has shape {x.shape}, but site '{name}' has shape {site.shape}"
                f"{plates(site, fitted.graph)}; for many observations put an axis in front of it."
            )
        if not np.isfinite(x).all():
            bad = np.argwhere(~np.isfinite(x))[0].tolist()
            raise ValueError(
                f"given['{name}'] has {int((~np.isfinite(x)).sum())} values that are not finite in {x.dtype}, the "
                f"first at {bad}. Missing data need a program that simulates them as missing."
            )
        out[name] = jnp.asarray(x)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"The data in given have different numbers of observations: {lengths} (None: a single one).")
    many = any(length is not None for length in lengths.values())
    out = out if many else {name: x[None] for name, x in out.items()}
    if parameters and not fitted.flow.any_subset:
        check_supports(fitted, parameters, out, many)
    return out, many


def refuse_parameters(fitted: Fitted, given: list[str], lacks: Mapping[str, list[str]]) -> None:
    """Parameters that are given without others that come before them."""
    name, missing = next(iter(lacks.items()))
    prior = [p for p in fitted.graph.parents[name] if p in missing]
    if prior:
        way = f"The prior of '{name}' depends on {prior}: give {'it' if len(prior) == 1 else 'them'} too."
    else:
        way = f"Give {missing} too, or fit with method=cpe.CPE(first={given}), which draws {given} first."
    raise ValueError(
        f"given has '{name}', but this posterior draws {missing} before it, so what is left cannot be drawn given "
        f"'{name}'. {way}"
    )


def check_supports(fitted: Fitted, parameters: list[str], values: Values, many: bool) -> None:
    """Given parameters are in the support of their prior."""

    def inside(values: Values) -> dict[str, Array]:
        out: dict[str, Array] = {}

        def visit(name: str, fn: Any, value: Array) -> None:
            out[name] = jnp.all(fn.support(value))

        fitted.flow.coordinates.visit(fitted.flow.coordinates.example | values, visit)
        return {name: out[name] for name in parameters}

    for name, good in jax.vmap(inside)(values).items():
        if not good.all():
            which = int(jnp.argmin(good))
            raise ValueError(
                f"given['{name}'] is {words(np.asarray(values[name][which]))}"
                f"{f' for observation {which}' if many else ''}, which is outside the support of its prior."
            )


def check_draws(
    fitted: Fitted, draws: Mapping[str, Any] | xr.DataTree, given: set[str], count: int | None = None
) -> tuple[dict[str, Array], tuple[int, ...]]:
    """The sites that are not given as arrays, and the shape of their leading axes in `draws`.

    For one observation the arrays have one leading axis, for draws; for `count` of them two, for observations and
    draws.
    """
    source: Any = draws
    if isinstance(draws, xr.DataTree):
        source = draws["posterior"].dataset if "posterior" in draws.children else draws.dataset
    named = isinstance(source, xr.Dataset)
    expected: list[tuple[str, ...]] = [("chain", "draw") if named else ("draw",)]
    if count is not None:
        expected = [("observation", *expected[0])] if named else [("observation", "draw"), ("observation",)]
    values: dict[str, Array] = {}
    shape: tuple[int, ...] | None = None
    names = [name for name in fitted.graph.sites if name not in given]
    for name in names:
        if name not in source:
            raise ValueError(f"draws have no '{name}'; they need the parameters {names}.")
        site = fitted.graph.sites[name]
        x = source[name]
        if named and set(expected[0]) <= set(x.dims):
            x = x.transpose(*expected[0], ...)
        x = centre(numbers(x, f"draws['{name}']"), fitted.offset.get(name))
        lead = next((e for e in expected if x.ndim == len(e) + len(site.shape)), None)
        if lead is None or x.shape[len(lead) :] != site.shape:
            one_of = " or ".join(f"({', '.join(map(str, (*e, *site.shape)))})" for e in expected)
            raise ValueError(
                f"draws['{name}'] has shape {x.shape}, but draws of site '{name}' "
                f"{'' if count is None else f'for {count} observations '}have shape {one_of}"
                f"{plates(site, fitted.graph)}."
            )
        if count is not None and len(x) != count:
            raise ValueError(f"draws['{name}'] are for {len(x)} observations, but given has {count}.")
        if shape is not None and x.shape[: len(lead)] != shape:
            raise ValueError(f"draws['{name}'] has {x.shape[: len(lead)]} draws, the others {shape}.")
        shape = x.shape[: len(lead)]
        values[name] = jnp.asarray(x.reshape(*(() if count is None else (count,)), -1, *site.shape))
    return values, shape or ()


def check_acceptance(fitted: Fitted, counted: Mapping[str, np.ndarray]) -> None:
    """Draws that are missing: the flow proposes nearly nothing inside the prior's support."""
    missing, accepted, proposed = (counted[name].sum(1) for name in ("missing", "accepted", "proposed"))
    if missing.any():
        worst = int(np.argmax(missing))
        which = f"observation {worst} " if len(missing) > 1 else "these data "
        raise RuntimeError(
            f"Of {proposed[worst]} proposals for {which}only {accepted[worst]} are inside the prior's support. The "
            f"data may be unlike any simulation, or {type(fitted.method).__name__} is trained too little: use "
            "coordinates='unconstrained', or cpe.CPE(), which cannot leave the support; or more simulations."
        )


def check_finite(values: Mapping[str, np.ndarray]) -> None:
    """Draws `{site: (observations, n, *shape)}` that are not finite are an error."""
    bad = {name: ~np.isfinite(x).reshape(*x.shape[:2], -1).all(2) for name, x in values.items()}
    if not any(x.any() for x in bad.values()):
        return
    each = [f"{x.sum()} of '{name}'" for name, x in bad.items() if x.any()]
    total = next(iter(bad.values()))
    observations = np.flatnonzero(np.any([x.any(1) for x in bad.values()], axis=0))
    where = "" if len(total) == 1 else f", for {len(observations)} of {len(total)} observations"
    where += f", the first of which is number {observations[0]}" if len(total) > 1 else ""
    raise FloatingPointError(
        f"Of {total.size} draws some are not finite: {', '.join(each)}{where}. Such draws are never returned. The "
        "data may be unlike any simulation, or training went wrong: look at cpe.check(...) and at "
        "fitted.history, and fit again with more simulations or a lower learning_rate. A parameter whose prior "
        "goes beyond what float32 holds (3e38) needs another unit, or its logarithm."
    )
