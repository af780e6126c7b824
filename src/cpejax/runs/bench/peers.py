"""Methods of others, in an environment of their own: jobs hand them simulations, and take draws back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from cpejax.runs.model_file import Failure
from cpejax.tasks import Task

SCRIPT = Path(__file__).with_name("peer_sbi.py")
VARIABLE = "CPEJAX_PEERS"


@dataclass(frozen=True)
class Peer:
    """A method of the package `sbi`, with its defaults."""

    name: str
    draws: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})


PEERS: Mapping[str, Peer] = {f"sbi-{name}": Peer(name) for name in ("NPE", "NLE", "FMPE", "NPSE")}


def peers_python() -> Path:
    """The interpreter of the peers: `$CPEJAX_PEERS`, or that of the environment beside this one, `.venv-peers`."""
    beside = Path(sys.prefix).with_name(".venv-peers") / "bin" / "python"
    path = Path(os.environ.get(VARIABLE) or beside)
    if not path.is_file():
        raise Failure(
            f"{path} is not there: methods of sbi run in an environment of their own. Create it with `make peers`, or "
            f"with `python -m venv` and `pip install torch sbi`, and name its Python in ${VARIABLE}."
        )
    return path


def prior_of(task: Task) -> dict[str, np.ndarray] | None:
    """The prior, where its scalars are independent, each uniform, normal or lognormal; else `None`."""
    found: dict[str, list[Any]] = {"families": [], "first": [], "second": []}
    traces = [
        numpyro.handlers.trace(numpyro.handlers.seed(task.program, jax.random.key(seed))).get_trace() for seed in (0, 1)
    ]
    for name in task.parameters:
        family, *parameters = _family(traces[0][name]["fn"])
        again = _family(traces[1][name]["fn"])[1:]
        if family is None or any(not np.array_equal(a, b) for a, b in zip(parameters, again, strict=True)):
            return None
        size = int(np.prod(task.shapes[name]))
        found["families"] += [family] * size
        for key, value in zip(("first", "second"), parameters, strict=True):
            found[key] += list(np.broadcast_to(value, task.shapes[name] or (1,)).reshape(-1))
    return {name: np.array(values) for name, values in found.items()}


def _family(fn: Any) -> tuple[Any, ...]:
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    if isinstance(fn, dist.Uniform):
        return "uniform", np.asarray(fn.low), np.asarray(fn.high)
    if isinstance(fn, dist.LogNormal):
        return "lognormal", np.asarray(fn.loc), np.asarray(fn.scale)
    if isinstance(fn, dist.Normal):
        return "normal", np.asarray(fn.loc), np.asarray(fn.scale)
    return (None,)


def run_peer(
    peer: Peer,
    task: Task,
    simulations: Mapping[str, Any],
    observations: list[Mapping[str, np.ndarray]],
    folder: Path,
    *,
    draws: int,
    seed: int,
    epochs: int | None,
) -> tuple[np.ndarray, dict[str, Any]] | str:
    """Draws `(observations, draws, parameters)` and what they cost, or why there are none."""
    prior = prior_of(task)
    if prior is None:
        return "sbi is given priors of independent uniform, normal or lognormal scalars only"

    def flat(values: Mapping[str, Any], n: int) -> np.ndarray:
        return np.concatenate([np.asarray(values[name]).reshape(n, -1) for name in task.observed], axis=1)

    arrays = {"theta": task.ravel(simulations), "x": flat(simulations, len(simulations[task.observed[0]]))}
    arrays |= {"observations": np.concatenate([flat(each, 1) for each in observations]), **prior}
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "peer-in.npz", folder / "peer-out.npz"]
    np.savez(files[0], **arrays)  # type: ignore[arg-type]
    command = [str(peers_python()), str(SCRIPT), *(str(file.resolve()) for file in files), "--method", peer.name]
    command += ["--draws", str(draws), "--seed", str(seed), *(["--epochs", str(epochs)] if epochs else [])]
    # sbi writes its logs to the working directory
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Failure(f"sbi's {peer.name} failed on {task.name}: its message is above.")
    with np.load(files[1], allow_pickle=False) as file:
        found = file["draws"]
    expected = (len(observations), draws, task.theta_dim)
    if found.shape != expected:
        raise Failure(f"{SCRIPT.name} returned draws of shape {found.shape}, expected {expected}.")
    for path in files:
        path.unlink()
    return found, json.loads(done.stdout.splitlines()[-1])
