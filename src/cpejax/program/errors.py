"""Errors of JAX's in a user's program, said in the user's words."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType

import jax
import numpyro

_NEEDS_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
INSIDE = "inside a loop, a branch or another transformation of JAX (jax.lax.scan, jax.vmap, jax.jit, ...)"
HIDDEN = (
    "The program {}, which hides what is drawn there. "
    'Write the loop in Python with one name a step, numpyro.sample(f"x_{{t}}", ...), '
    "or make the steps one vector site or a plate, or simulate them inside a cpe.Simulator."
)


def explain(error: Exception, frames: traceback.StackSummary, where: str) -> Exception | None:
    """JAX's tracing errors in the user's words; `None` for any other error."""
    # A plate tests its size before anything else, so a sampled size looks like a branch.
    is_plate = any(f.name == "__init__" and Path(f.filename).parts[-2:] == ("numpyro", "primitives.py") for f in frames)
    shape = isinstance(error, jax.errors.NonConcreteBooleanIndexError) or "Shapes must be 1D sequences" in str(error)
    if shape or (is_plate and isinstance(error, jax.errors.ConcretizationTypeError)):
        return ValueError(
            f"The program, {where}, makes an array or plate whose size depends on a sampled value. "
            "Every site needs one fixed shape: use the largest size and a mask (jnp.where), "
            "or do this step inside cpe.Simulator(..., host=True)."
        )
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return ValueError(
            f"The program, {where}, takes a Python branch (if, while, and, or) on a sampled value, "
            "which would hide sites. Use jnp.where or jax.lax.cond for values, and draw the same sites on every path; "
            "or do this step inside cpe.Simulator(..., host=True)."
        )
    if isinstance(error, NotImplementedError) and "control flow primitive under a `plate`" in str(error):
        return ValueError(HIDDEN.format("uses numpyro.contrib.control_flow (scan or cond) in a plate"))
    if isinstance(error, _NEEDS_NUMBER):
        return ValueError(
            f"The program, {where}, needs the number behind a sampled value (float(), int(), NumPy, range(), a shape). "
            "Write it with jax.numpy and fixed shapes, or put the NumPy code into cpe.Simulator(..., host=True)."
        )
    return None


def place(frames: traceback.StackSummary, sites: list[str]) -> str:
    """The place of an error, in words: after which site, and on which line of the user's own code."""
    after = f"after site '{sites[-1]}'" if sites else "before its first site"
    libraries = [_folder(jax), _folder(numpyro), Path(__file__).parent]
    for frame in reversed(frames):
        path = Path(frame.filename)
        if not any(path.is_relative_to(folder) for folder in libraries):
            return f"{after} ({path.name}, line {frame.lineno}: {frame.line})"
    return after


def _folder(module: ModuleType) -> Path:
    return Path(str(module.__file__)).parent
