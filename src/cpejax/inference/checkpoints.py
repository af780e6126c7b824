"""Checkpoints of training: written atomically, and resumed by the run that wrote them only."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from cpejax.inference.settings import History
from cpejax.util.files import Unusable, digest, load_arrays, pack_arrays, remove_parts, write_atomically


def digest_tree(tree: Any) -> str:
    """A hash of all arrays in a tree."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    return digest(*(part for x in leaves for part in (f"{x.dtype} {x.shape}".encode(), x.tobytes())))


def save_checkpoint(path: Path, state: Any, history: History, epoch: int, run: dict[str, Any]) -> None:
    arrays = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    about = {"run": json.dumps(run), "epoch": str(epoch), "history": json.dumps(asdict(history))}
    write_atomically(path, pack_arrays(arrays, about))


def run_of_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint says of its run; nothing where there is none."""
    return dict(json.loads(load_arrays(path)[1].get("run", "{}"))) if path.exists() else {}


def load_checkpoint(path: Path, like: Any, run: dict[str, Any]) -> tuple[Any, History, int] | None:
    remove_parts(path)
    if not path.exists():
        return None
    arrays, about = load_arrays(path)
    was = json.loads(about.get("run", "{}"))
    if was != run:
        differ = [
            _difference(name, was.get(name), run.get(name)) for name in {**run, **was} if was.get(name) != run.get(name)
        ]
        raise Unusable(
            f"The checkpoint in {os.fspath(path.parent)} belongs to another run: {'; '.join(differ)}. "
            "Give another folder, or delete it to start again."
        )
    leaves, structure = jax.tree.flatten(like)
    state = jax.tree.unflatten(structure, [jnp.asarray(arrays[str(i)]) for i in range(len(leaves))])
    return state, History(**json.loads(about["history"])), int(about["epoch"])


def _difference(name: str, was: Any, now: Any) -> str:
    words = {
        "program": "the program has another graph",
        "simulations": "the simulations are others",
        "networks": "the networks are others (the method, its options, or the key)",
        "n": f"it had {was} simulations, now {now}",
    }
    return words.get(name, f"{name} was {was!r}, now {now!r}")
