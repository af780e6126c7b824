"""Posteriors as files: `weights.safetensors` and `posterior.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from cpejax.flows.base import Flow, Method
from cpejax.flows.ensemble import Ensemble
from cpejax.inference.fitted import Fitted
from cpejax.program.probe import Probe, Prober
from cpejax.util.files import digest, pack_arrays, write_atomically

FORMAT = 3
"""The number of the format. What an earlier one has must load in later versions: see CONTRIBUTING."""


def method_options(method: Method) -> dict[str, Any]:
    """A method's options, as JSON; embeddings by name only (they are given again on loading)."""
    out = {}
    for f in fields(method):  # type: ignore[arg-type]
        value = getattr(method, f.name)
        out[f.name] = sorted(value) if f.name == "embed" else list(value) if isinstance(value, tuple) else value
    return out


def array_shapes(flow: Flow) -> list[list[Any]]:
    """The shapes and types of all arrays of a flow, in order."""
    return [[list(x.shape), str(x.dtype)] for x in jax.tree.leaves(flow) if eqx.is_array(x)]


def save(fitted: Fitted, folder: str | Path, emulator: Fitted | None = None) -> str:
    """Write a posterior to a folder, `weights.safetensors` and `posterior.json`, and its emulator to `emulator/` in it.

    Returns the digest of the weights, by which a posterior knows its emulator.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    leaves = [x for x in jax.tree.leaves(fitted.flow) if eqx.is_array(x)]
    arrays = {str(i): np.asarray(x) for i, x in enumerate(leaves)}
    arrays |= {f"offset.{name}": x for name, x in fitted.offset.items()}
    probe = probe_of(fitted)
    content = pack_arrays(arrays | probe.arrays(), {})
    about = {
        "format": FORMAT,
        "library": version("cpejax"),
        "method": type(fitted.method).__name__,
        "options": method_options(fitted.method),
        "settings": asdict(fitted.settings),
        "history": asdict(fitted.history),
        "n_simulations": fitted.n_simulations,
        "fingerprint": fitted.graph.fingerprint,
        "graph": fitted.graph.to_dict(),
        "probe": probe.about(),
        "description": fitted.flow.description(),
        "structure": array_shapes(fitted.flow),
        "weights_sha256": digest(content),
        **({"ensemble": fitted.flow.size} if isinstance(fitted.flow, Ensemble) else {}),
        **({} if emulator is None else {"emulator": save(emulator, folder / "emulator")}),
    }
    about["sha256"] = digest(json.dumps(about, sort_keys=True).encode())
    text = json.dumps(about, indent=1)
    write_atomically(folder / "weights.safetensors", content)
    write_atomically(folder / "posterior.json", text.encode())
    return digest(content)


def probe_of(fitted: Fitted) -> Probe:
    """What the program gives at a few simulations, or at the example that the flow keeps."""
    if fitted.probe is not None:
        return fitted.probe
    example = {name: np.asarray(x)[None] for name, x in fitted.flow.coordinates.example.items()}
    whole = {name: x + fitted.offset[name] if name in fitted.offset else x for name, x in example.items()}
    return Prober(fitted.program, fitted.graph)(whole)
