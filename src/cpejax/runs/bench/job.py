"""The jobs of the workflow, a process each: `python -m cpejax.runs.bench.job RULE [TASK METHOD BUDGET SEED]`.

A job reads and writes files in the folder of the results, where it is started.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from cpejax import metrics
from cpejax.inference.fit import fit
from cpejax.inference.loading import load
from cpejax.inference.posterior import Posterior
from cpejax.inference.settings import Training
from cpejax.program.model import Model
from cpejax.program.simulate import simulate
from cpejax.runs.bench.config import FILE, Config, Run, read_config, short
from cpejax.runs.bench.methods import REFINED, fitted_to
from cpejax.runs.bench.peers import Peer, run_peer
from cpejax.runs.result_files import read_simulations, versions, write_arrays
from cpejax.tasks import Task
from cpejax.tasks.simformer import ConditionalTask
from cpejax.util.files import write_atomically

NULL_SEED = 7
SHOWN = 1000
"""Draws of the first observation that are kept for figures."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def peak_megabytes() -> float:
    """The most memory that this process has had."""
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def run_reference(config: Config, name: str) -> None:
    """Reference draws of a task, a matrix for each observation, and the C2ST between two halves of them."""
    task = config.task(name)
    arrays, nulls = {}, {}
    for number in config.observations_of(task):
        tree = task.reference(number).posterior
        draws = {site: tree[site].values.reshape(-1, *task.shapes[site]) for site in task.parameters}
        matrix = np.random.default_rng(number).permutation(task.ravel(draws))[: config.draws]
        half = len(matrix) // 2
        arrays[str(number)] = matrix.astype(np.float32)
        nulls[str(number)] = metrics.c2st(matrix[:half], matrix[half : 2 * half])
    write_json(Path("references") / f"{name}.json", {"c2st_null": nulls})
    write_arrays(Path("references") / f"{name}.npz", arrays)


def run_simulations(config: Config, run: Run) -> None:
    """Simulations of a task, those of one seed."""
    task, path = config.task(run.task), Path("simulations") / run.task
    began = time.perf_counter()
    found = simulate(whole(task), run.budget, key=jax.random.key(run.seed))
    write_json(path / f"{run.budget}-{run.seed}.json", {"seconds": time.perf_counter() - began})
    write_arrays(path / f"{run.budget}-{run.seed}.npz", {site: np.asarray(x) for site, x in found.items()})


def run_fit(config: Config, run: Run) -> Posterior | None:
    """A method fitted to simulations, saved; killed, it resumes from its checkpoint. A peer's is not kept."""
    task, entry = config.task(run.task), config.entry(run.method)
    if isinstance(entry, Peer):
        run_fit_of_peer(config, run, task, entry)
        return None
    model, method = fitted_to(task, entry.method)
    folder = Path("fits") / run.path
    if isinstance(task, ConditionalTask) and model is task.joint and copy_fit(task, run):
        return load(folder / "posterior", model)
    simulations = read_simulations(Path("simulations") / run.task / f"{run.budget}-{run.seed}.npz", model.graph)
    began = time.perf_counter()
    posterior = fit(
        model,
        simulations,
        key=jax.random.fold_in(jax.random.key(run.seed), 1),
        method=method,
        training=Training(**config.training),
        checkpoint=folder / "checkpoint",
        progress=False,
        **entry.fit,
    )
    seconds = time.perf_counter() - began
    posterior.save(folder / "posterior")
    history, emulation, refinement = posterior.history, posterior.history.emulation, posterior.history.refinement
    about = {
        "weights": posterior.weights,
        "epochs": len(history.train),
        "stopped": history.stopped,
        "emulated": posterior.emulator is not None,
        "emulation_gain": emulation["with"] - emulation["without"] if emulation else None,
        "emulation_error": emulation.get("error"),
        "refinement_gain": refinement["refined"] - refinement["plain"] if refinement else None,
        "refinement_error": refinement.get("error"),
        "seconds_fit": seconds,
        "megabytes": peak_megabytes(),
        "versions": versions(),
    }
    write_json(folder / "fit.json", about)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return posterior


def run_fit_of_peer(config: Config, run: Run, task: Task, peer: Peer) -> None:
    """A peer fitted and drawn from in its own environment; draws lie beside `fit.json` until they are asked for."""
    folder, numbers = Path("fits") / run.path, config.observations_of_fit(task, run.seed)
    path = Path("simulations") / run.task / f"{run.budget}-{run.seed}.npz"
    with np.load(path, allow_pickle=False) as file:
        simulations = {site: file[site] for site in task.shapes}
    options: dict[str, Any] = {"draws": config.draws, "seed": run.seed, "epochs": config.training.get("max_epochs")}
    found = run_peer(peer, task, simulations, [task.observation(number) for number in numbers], folder, **options)
    names = [f"{next(iter(peer.draws))}/{number}" for number in numbers]
    if isinstance(found, str):
        fitted: dict[str, Any] = {
            "weights": None,
            "epochs": None,
            "seconds_fit": None,
            "megabytes": None,
            "versions": {},
        }
        drawn: dict[str, Any] = {name: {"note": found} for name in names}
        arrays: dict[str, np.ndarray] = {}
    else:
        draws, fitted = found
        about = {"acceptance": 1.0, "ess": float(config.draws), "note": ""}
        seconds = fitted.pop("seconds_draw")
        drawn = {name: {"seconds_draw": s, **about} for name, s in zip(names, seconds, strict=True)}
        arrays = {name: x.astype(np.float32) for name, x in zip(names, draws, strict=True)}
    write_json(folder / "draws.json", drawn)
    write_arrays(folder / "draws.npz", arrays)
    write_json(folder / "fit.json", fitted)


def copy_fit(task: ConditionalTask, run: Run) -> bool:
    """Whether the same fit was there, of another set of given sites: the model, simulations and keys are the same."""
    family = short(task.name).rpartition("-")[0]
    for found in sorted(Path("fits").glob(f"{family}-*/{run.method}/{run.budget}-{run.seed}/fit.json")):
        shutil.copytree(found.parent / "posterior", Path("fits") / run.path / "posterior", dirs_exist_ok=True)
        write_json(Path("fits") / run.path / "fit.json", read_json(found))
        return True
    return False


def whole(task: Task) -> Model:
    """The model that is simulated: all its sites, whichever are given."""
    return task.joint if isinstance(task, ConditionalTask) else task


def run_draws(config: Config, run: Run, posterior: Posterior | None = None) -> None:
    """Draws for every observation, in every way that the method has."""
    task, entry = config.task(run.task), config.entry(run.method)
    path = Path("draws") / run.path
    if isinstance(entry, Peer):
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".json", ".npz"):
            shutil.copyfile(Path("fits") / run.path / f"draws{suffix}", path.with_suffix(suffix))
        return
    posterior = posterior or load(Path("fits") / run.path / "posterior", fitted_to(task, entry.method)[0])
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {}
    for solver, options in entry.draws.items():
        for number in config.observations_of_fit(task, run.seed):
            where = f"{solver}/{number}"
            if solver == REFINED and posterior.emulator is None:
                about[where] = {"note": "no likelihood was learned"}
                continue
            if solver == REFINED and isinstance(task, ConditionalTask) and task.first:
                about[where] = {"note": "draws with parameters given are not refined"}
                continue
            key = jax.random.fold_in(jax.random.key(run.seed), 2 + number)
            began = time.perf_counter()
            tree = posterior.sample(config.draws, given=task.observation(number), key=key, **options).posterior
            about[where] = {
                "seconds_draw": time.perf_counter() - began,
                "acceptance": float(tree.attrs.get("acceptance_rate", 1.0)),
                "ess": float(tree.attrs.get("effective_sample_size", config.draws)),
                "note": "",
            }
            arrays[where] = task.ravel({site: tree[site].values[0] for site in task.parameters}).astype(np.float32)
    write_json(path.with_suffix(".json"), about)
    write_arrays(path.with_suffix(".npz"), arrays)


def run_metrics(config: Config, run: Run) -> None:
    """Rows of the table: how far draws are from the reference, and what they cost."""
    fitted = read_json(Path("fits") / run.path / "fit.json")
    simulated = read_json(Path("simulations") / run.task / f"{run.budget}-{run.seed}.json")
    drawn = read_json(Path("draws") / f"{run.path}.json")
    nulls = read_json(Path("references") / f"{run.task}.json")["c2st_null"]
    rows: list[dict[str, Any]] = []
    shown: dict[str, np.ndarray] = {}
    with (
        np.load(Path("draws") / f"{run.path}.npz", allow_pickle=False) as draws,
        np.load(Path("references") / f"{run.task}.npz", allow_pickle=False) as references,
    ):
        for where, about in drawn.items():
            solver, number = where.rsplit("/", 1)
            row = {
                "task": config.label(run.task),
                "method": run.method,
                "budget": run.budget,
                "seed": run.seed,
                "observation": int(number),
                "solver": solver,
            }
            if where in draws:
                found, reference = draws[where], references[number]
                for name in config.c2st:
                    row[f"c2st_{name}"] = metrics.c2st(found, reference, method=name)
                score = metrics.hmin(found, reference)
                row |= {"c2st_null": nulls[number], "hmin": score.value, "hmin_null": score.null}
                shown.setdefault(solver, found[:SHOWN])
            row |= about
            row |= {name: fitted[name] for name in ("weights", "epochs", "seconds_fit", "megabytes")}
            row |= {
                f"{by}_{x}": fitted.get(f"{by}_{x}") for by in ("emulation", "refinement") for x in ("gain", "error")
            }
            row |= {"seconds_simulate": simulated["seconds"]}
            row |= {"made": datetime.now(UTC).isoformat(timespec="seconds")}
            row |= {f"version_{name}": value for name, value in fitted["versions"].items()}
            rows.append(row)
    path = Path("metrics") / run.path
    write_arrays(path.with_suffix(".npz"), shown)
    write_atomically(path.with_suffix(".csv"), pd.DataFrame(rows).to_csv(index=False).encode())


def run_all(config: Config, run: Run) -> None:
    """Fit, draw and score in one process; a fit that is there is not repeated."""
    done = (Path("fits") / run.path / "fit.json").is_file()
    run_draws(config, run, None if done else run_fit(config, run))
    run_metrics(config, run)
    (Path("draws") / f"{run.path}.npz").unlink()


def run_table(_config: Config) -> None:
    """All rows in one table."""
    from cpejax.runs.bench.table import write_table

    write_table(Path())


def run_figures(config: Config) -> None:
    """The figures, as SVG."""
    from cpejax.runs.bench.figures import write_figures

    write_figures(config, Path())


def run_page(config: Config) -> None:
    """The page with tables and figures."""
    from cpejax.runs.bench.page import write_page

    write_page(config, Path())


RULES: Mapping[str, Callable[..., Any]] = {
    "reference": run_reference,
    "simulations": run_simulations,
    "fit": run_fit,
    "draws": run_draws,
    "metrics": run_metrics,
    "all": run_all,
    "table": run_table,
    "figures": run_figures,
    "page": run_page,
}


def take_cores(threads: int) -> list[Any]:
    """Restrict this process to so many cores that no other job of this folder has, where there are more.

    Two jobs with a core each take less time than one after the other with both: much of a job is not parallel.

    **Returns:** open files, whose locks hold the cores until the process ends.
    """
    if not hasattr(os, "sched_setaffinity") or threads >= len(os.sched_getaffinity(0)):
        return []
    taken: dict[int, Any] = {}
    folder = Path("cores") / socket.gethostname()
    folder.mkdir(parents=True, exist_ok=True)
    for core in sorted(os.sched_getaffinity(0)):
        file = (folder / str(core)).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        taken[core] = file
        if len(taken) == threads:
            os.sched_setaffinity(0, taken)
            return list(taken.values())
    return []  # more jobs than cores: the system shares them


def main(arguments: list[str]) -> None:
    """Do one job."""
    rule, *of = arguments
    config = read_config(Path(FILE))
    if len(of) == 4:
        task, method, budget, seed = of
        RULES[rule](config, Run(task, method, int(budget), int(seed)))
    else:
        RULES[rule](config, *of)


if __name__ == "__main__":
    HELD = take_cores(read_config(Path(FILE)).threads)
    if "SLURM_JOB_ID" not in os.environ:  # nodes of a cluster may differ in what they can run
        jax.config.update("jax_compilation_cache_dir", str(Path("compiled").resolve()))
    main(sys.argv[1:])
