"""Arrays that a user gives: numbers, shapes, offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from cpejax.program.graph import Graph
from cpejax.program.simulator import Program
from cpejax.program.tracing import Centred


def centred(program: Program, offset: Mapping[str, np.ndarray]) -> Program:
    """The program that the flow runs: its data are given less their offset, if they have one."""
    return Centred(program, offset) if offset else program


def centre(x: Any, offset: np.ndarray | None) -> np.ndarray:
    """Values less an offset, in the precision that JAX computes in."""
    with np.errstate(over="ignore"):
        return np.asarray(x if offset is None else np.asarray(x, np.float64) - offset, jnp.result_type(float))


def numbers(x: Any, what: str) -> np.ndarray:
    """An array of numbers, or an error that says what was found."""
    if np.ma.isMaskedArray(x) and np.ma.getmaskarray(x).any():
        raise ValueError(f"{what} has masked values. Missing data need a program that simulates them as missing.")
    try:
        out = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is not an array of numbers: {error}.") from error
    if out.dtype.kind not in "fiub":
        raise ValueError(f"{what} is not an array of numbers: it has type {out.dtype}, found {x!r:.60}.")
    return out


def plates(site: Any, graph: Graph) -> str:
    plates = [f"plate '{p}' of size {graph.plates[p]}" for p in site.plates]
    return f" ({', '.join(plates)})" if plates else ""
