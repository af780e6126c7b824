"""Draws as an ArviZ DataTree, named and shaped as in the program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import xarray as xr
from arviz_base import from_dict
from jaxtyping import Array

from cpejax.inference.fitted import Fitted
from cpejax.inference.sampling import MOST_NUMBERS
from cpejax.program.site_checks import AXES


def to_tree(
    fitted: Fitted, values: Mapping[str, np.ndarray], data: Mapping[str, Array], many: bool, attributes: dict[str, Any]
) -> xr.DataTree:
    dims: dict[str, list[str]] = {}
    # ArviZ would take a site for the coordinates of an axis of the same name.
    taken = {*AXES, *fitted.graph.shapes}
    plates = {p: f"{p}_plate" if p in taken else p for p in fitted.graph.plates}
    while clash := taken & set(plates.values()):
        plates = {p: f"{d}_" if d in clash else d for p, d in plates.items()}
    taken |= set(plates.values())
    coords: dict[str, Any] = {plates[p]: np.arange(size) for p, size in fitted.graph.plates.items()}
    known = {name: site.dims for name, site in fitted.graph.sites.items()}
    known |= {name: site.dims for name, site in fitted.graph.deterministics.items()}
    for name, axes_of in known.items():
        axes = [plates.get(d or "", f"{name}_dim_{i}") for i, d in enumerate(axes_of)]
        axes = [f"{axis}_" if axis in taken and axis not in plates.values() else axis for axis in axes]
        dims[name] = ["observation", *axes] if many else axes
    given = {name: restored(fitted, name, np.asarray(x)) for name, x in data.items()}
    observed = {name: seen(fitted, name, x if many else np.asarray(x[0])) for name, x in given.items()}
    # (observation, draw, ...) to (chain, draw, observation, ...)
    drawn = {name: restored(fitted, name, values[name]) for name in fitted.graph.sites if name in values}  # in order
    drawn |= deterministics(fitted, drawn, given)
    posterior = {name: (np.moveaxis(x, 0, 1) if many else x[0])[None] for name, x in drawn.items()}
    tree = from_dict({"posterior": posterior, "observed_data": observed}, dims=dims, coords=coords)
    tree["posterior"].attrs.update(attributes)
    return tree


def seen(fitted: Fitted, name: str, x: np.ndarray) -> np.ndarray:
    """Observed values; NaN where they are masked."""
    kept = fitted.graph.sites[name].kept
    return x if kept is None else np.where(kept, x, np.nan)


def restored(fitted: Fitted, name: str, x: np.ndarray) -> np.ndarray:
    """A site's values as the program has them."""
    return x.astype(np.float64) + fitted.offset[name] if name in fitted.offset else x


def deterministics(
    fitted: Fitted, drawn: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The deterministic sites for draws `(observations, n, *shape)` and data `(observations, *shape)`."""
    if not fitted.graph.deterministics:
        return {}
    count, n = next(iter(drawn.values())).shape[:2]
    scalars = sum(math.prod(shape) for shape in fitted.graph.shapes.values())
    chunk = max(1, min(count * n, MOST_NUMBERS // max(1, scalars)))
    pieces = -(-count * n // chunk)
    chunk = -(-count * n // pieces)
    flat = {name: x.reshape(count * n, *x.shape[2:]) for name, x in drawn.items()}
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, count * n, chunk):
        which = np.arange(start, start + chunk) % (count * n)  # one shape, one compilation
        values = {name: x[which] for name, x in flat.items()} | {name: x[which // n] for name, x in data.items()}
        found = fitted.from_sites({name: jnp.asarray(x) for name, x in values.items()})
        parts.append({name: np.asarray(x) for name, x in found.items()})
    whole = {name: np.concatenate([p[name] for p in parts])[: count * n] for name in fitted.graph.deterministics}
    return {name: x.reshape(count, n, *x.shape[1:]) for name, x in whole.items()}
