"""The stages of a run: simulate, fit, sample, check. Each is done once, and resumes where it can."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import jax
import xarray as xr

from cpejax.diagnostics.check import check
from cpejax.flows.base import Method
from cpejax.inference.fit import fit
from cpejax.inference.loading import load
from cpejax.inference.posterior import Posterior
from cpejax.inference.settings import Training
from cpejax.program.simulate import simulate
from cpejax.program.simulations import Simulations
from cpejax.runs.changes import changed_in_model
from cpejax.runs.folder import CHECK_SIMULATE, STAGES, RunFolder
from cpejax.runs.job_parts import JobParts, take_parts
from cpejax.runs.model_file import Failure, ModelFile, blaming, choose_method, describe_method, summary
from cpejax.runs.observation import Given, Source
from cpejax.runs.report import report
from cpejax.runs.result_files import (
    hash_file,
    hash_values,
    read_draws,
    read_simulations,
    write_arrays,
    write_draws,
)
from cpejax.runs.summary import summarise
from cpejax.runs.watchdog import Interrupted, run_watched
from cpejax.runs.workers import hired
from cpejax.util.files import Unusable, write_atomically

Result = TypeVar("Result")
REPEATED = (
    *("given", "truth", "fit", "simulations", "method", "epochs", "steps", "draws", "refine"),
    "check_simulations",
)
"""The options of the command that repeats a run, in their order."""


def run_part(run: RunFolder, number: int) -> None:
    """Simulate one part of the training simulations."""
    with hired(run.workers, run.model) as workers:
        JobParts(run, _key(run.options("simulate")["seed"], 0)).simulate(number, workers)


def run_simulate(run: RunFolder, all_parts: bool = False) -> Simulations:
    """Draw the training simulations: `simulations.npz`. Of those that are in parts, take the parts that are there."""
    n, seed = run.options("simulate")["simulations"], run.options("simulate")["seed"]
    if run.options("simulate").get("parts"):
        with hired(run.workers if all_parts else None, run.model) as workers:
            return take_parts(run, _key(seed, 0), all_parts, workers)
    inputs = {"model": run.model_hashes, "simulations": n, "seed": seed}
    path = run.folder / "simulations.npz"
    if run.finished("simulate", inputs):
        run.kept(f"{n:,} simulations", path)
        return read_simulations(path, run.graph)
    began = time.monotonic()
    rows = _simulate(run, "simulate", inputs, n, _key(seed, 0), path)
    run.finish("simulate", inputs, [path.name], began)
    run.done(f"{rows.n:,} simulations{_dropped(rows)}", began, path)
    return rows


def _simulate(run: RunFolder, stage: str, inputs: Mapping[str, Any], n: int, key: Any, path: Path) -> Simulations:
    run.begin(stage, inputs)

    def draw() -> Simulations:
        shown = (
            nullcontext() if run.model.on_host() else run.working(f"simulating {n:,} times")
        )  # the host has a progress bar
        if run.workers is None:
            with blaming(run.model.path), run_watched(run), shown:
                return simulate(run.model.model, n, key=key, checkpoint=run.work(stage))
        with hired(run.workers, run.model) as workers, blaming(run.model.path):
            limits = {"workers": workers, "timeout": run.timeout or None}
            return simulate(run.model.model, n, key=key, checkpoint=run.work(stage), **limits)

    rows = _resume(run, stage, draw)
    write_arrays(path, rows)
    return rows


def _resume(run: RunFolder, stage: str, act: Callable[[], Result]) -> Result:
    """Do a stage's work from where it is; if it cannot resume from there, `restart` does it from the beginning."""
    try:
        return act()
    except Unusable as error:
        if not run.restart:
            raise Failure(
                f"{error} So the stage '{stage}' cannot resume: --restart drops what it has done so far, and begins it "
                "anew."
            ) from error
        run.say(f"{error} What the stage '{stage}' had done so far is dropped.")
        shutil.rmtree(run.work(stage), ignore_errors=True)
    return act()


def _dropped(rows: Simulations) -> str:
    return f" ({rows.dropped:,} more were not finite and left out)" if rows.dropped else ""


def run_fit(run: RunFolder) -> Posterior:
    """Train a posterior on the run's simulations: `model/`."""
    options = run.options("fit")
    chosen = choose_method(run.model, options["method"])
    fresh = bool(options.get("fresh")) and not run.model.on_host()
    if run.options("simulate").get("parts"):
        run_simulate(run)
    simulated = run.verified("simulate")
    if simulated is None:
        raise Failure(
            f"{run.folder} has no simulations to train on. First: cpejax simulate {run.model.path} --out {run.folder}"
        )
    inputs = {
        "model": run.model_hashes,
        "the simulations": simulated["files"]["simulations.npz"],
        "method": describe_method(chosen),
        "epochs": options["epochs"],
        "steps": options["steps"],
        "seed": options["seed"],
        **({"fresh simulations": True} if fresh else {}),
    }
    folder = run.folder / "model"
    if run.finished("fit", inputs):
        posterior = _load(folder, run.model, chosen)
        run.kept(f"Model of {posterior.weights:,} weights", folder)
        return posterior
    began = time.monotonic()
    rows = read_simulations(run.folder / "simulations.npz", run.graph)
    rows.dropped = simulated["inputs"]["simulations"] - rows.n
    given = {"max_epochs": options["epochs"], "steps": options["steps"]}
    training = Training(**{name: value for name, value in given.items() if value is not None})
    run.begin("fit", inputs)

    def train() -> Posterior:
        key, work = _key(options["seed"], 1), run.work("fit")
        with blaming(run.model.path):
            model = run.model.model
            return fit(model, rows, key=key, method=chosen, training=training, fresh=fresh, checkpoint=work)

    posterior = _resume(run, "fit", train)
    if posterior.history.stopped.startswith("interrupted"):
        raise Interrupted(f"Training was {posterior.history.stopped}.")
    posterior.save(folder)
    files = ["model/posterior.json", "model/weights.safetensors"]
    inner = [f"model/emulator/{Path(name).name}" for name in files] if posterior.emulator is not None else []
    run.finish("fit", inputs, [*files, *inner], began)
    epochs = f"{len(posterior.history.train)} epochs"
    many = f" and {posterior.n_simulations:,} simulations" if fresh else ""
    run.done(f"Model of {posterior.weights:,} weights, {epochs}{many}", began, folder)
    if posterior.history.augmented:
        run.say(posterior.history.augmented)
    return posterior


def _load(folder: Path, model: ModelFile, method: Method | None) -> Posterior:
    try:
        return load(folder, model.model, method=method)
    except (ValueError, FileNotFoundError) as error:
        raise Failure(summary(error, model.path)) from error


def other_fit(run: RunFolder, other: Path | None) -> Path | None:
    """The run whose model is used instead of one of its own, now or since the run was begun."""
    recorded = run.options("sample").get("fit")
    return Path(recorded["file"]) if other is None and recorded and recorded["file"] else other


def fitted(run: RunFolder, other: Path | None) -> tuple[Posterior, Source]:
    """The run's own model, or that of another run, and where it is from."""
    other = other_fit(run, other)
    if other is None:
        done = run.verified("fit")
        if done is None:
            raise Failure(
                f"{run.folder} has no fitted model. First: cpejax fit {run.model.path} --out {run.folder}, or name a "
                "run that has one with --fit."
            )
        chosen = choose_method(run.model, run.options("fit")["method"])
        source = {"file": None, "hash": done["files"]["model/posterior.json"]}
        return _load(run.folder / "model", run.model, chosen), source
    folder = other / "model" if (other / "model").is_dir() else other
    if not (folder / "posterior.json").is_file():
        raise Failure(f"--fit {other}: there is no fitted model in this folder (no model/posterior.json).")
    was = _stage_of(other, "fit") if folder != other else None
    if was is not None:
        changed = [other / name for name, hash_ in was["files"].items() if hash_file(other / name) != hash_]
        if changed:
            raise Failure(f"--fit {other}: {changed[0]} is missing, or was altered after it was written.")
    posterior = _load(folder, run.model, run.model.method)
    if was is not None and was["inputs"]["model"] != run.model_hashes:
        run.say(
            f"Note: {changed_in_model(was['inputs']['model'], run.model_hashes)} has changed since {other} was "
            "fitted. Sites, shapes and priors are the same; whether the simulator is cannot be told."
        )
    return posterior, {"file": str(other), "hash": hash_file(folder / "posterior.json")}


def _stage_of(folder: Path, stage: str) -> dict[str, Any] | None:
    """What another run's folder says of a stage."""
    try:
        return dict(json.loads((folder / "run.json").read_text())["stages"][stage])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _was_made(folder: Path, stage: str, inputs: Mapping[str, Any]) -> bool:
    """Whether another run has made a stage from the same inputs."""
    done = _stage_of(folder, stage)
    return (
        done is not None
        and done["inputs"] == inputs
        and all(hash_file(folder / name) == was for name, was in done["files"].items())
    )


def run_sample(run: RunFolder, posterior: Posterior, source: Source, given: Given) -> xr.DataTree:
    """Draw from the posterior of the data: `posterior.nc` and `summary.csv`."""
    options = run.options("sample")
    n, seed, refine = options["draws"], options["seed"], options["refine"] or "auto"
    inputs = {"the fitted model": source["hash"], "the data": hash_values(given), "draws": n, "seed": seed}
    inputs |= {"refine": refine}
    path = run.folder / "posterior.nc"
    if run.finished("sample", inputs):
        run.kept(f"{n:,} draws", path)
        return read_draws(path)
    began = time.monotonic()
    run.begin("sample", inputs)
    with blaming(run.model.path), run_watched(run), run.working(f"drawing {n:,} times"):
        tree = posterior.sample(n, given, key=_key(seed, 2), refine=False if refine == "no" else refine)
    write_draws(path, tree)
    text = summarise(tree, run.graph).to_csv(float_format="%.6g", lineterminator="\n")
    write_atomically(run.folder / "summary.csv", text.encode())
    run.finish("sample", inputs, [path.name, "summary.csv"], began)
    refined = tree["posterior"].attrs.get("refined")
    run.done(f"{n:,} draws{f', refined {refined}' if refined else ''}", began, path)
    return tree


def run_check(
    run: RunFolder,
    posterior: Posterior,
    source: Source,
    given: Given,
    truth: Given | None,
    tree: xr.DataTree,
) -> None:
    """Check the posterior, and write the report: `check.json` and `report.html`."""
    n, seed = run.options("check")["check_simulations"], run.options("check")["seed"]
    inputs = {
        "the draws": run.record["stages"]["sample"]["files"]["posterior.nc"],
        "the fitted model": source["hash"],
        "the data": hash_values(given),
        "the true parameters": None if truth is None else hash_values(truth),
        "check_simulations": n,
        "seed": seed,
    }
    path = run.folder / "report.html"
    if run.finished("check", inputs):
        run.kept("Checks and report", path)
        return
    rows = _check_simulations(run, n, seed)
    began = time.monotonic()
    run.begin("check", inputs)
    with blaming(run.model.path), run_watched(run), run.working(f"checking with {n:,} simulated observations"):
        found = check(posterior, given, rows, key=_key(seed, 4), n=n, progress=False)
    about = {
        "ok": found.ok,
        "level": found.level,
        "simulated_observations": found.n,
        "draws_each": found.draws,
        "findings": [asdict(finding) for finding in found.findings],
        "density": None if found.density is None else found.density.to_dict(),
        "calibration": json.loads(found.calibration.reset_index().to_json(orient="records")),
    }
    write_atomically(run.folder / "check.json", json.dumps(about, indent=1).encode())
    run.done("Checks", began, run.folder / "check.json")
    began_report = time.monotonic()
    with run.working("writing the report"):
        report(
            posterior,
            tree,
            found,
            path,
            simulations=_prior(run, rows),
            truth=truth,
            model_file=run.model.path,
            command=_repeat(run),
            seeds=_seeds(run),
            stages=run.record["stages"],
        )
    run.finish("check", inputs, ["check.json", "report.html"], began)
    run.done("Report", began_report, path)


def _check_simulations(run: RunFolder, n: int, seed: int) -> Simulations:
    inputs = {"model": run.model_hashes, "check_simulations": n, "seed": seed}
    path = run.folder / "check_simulations.npz"
    if run.finished(CHECK_SIMULATE, inputs):
        return read_simulations(path, run.graph)
    other = other_fit(run, None)
    if other is not None and _was_made(other, CHECK_SIMULATE, inputs):
        run.kept(f"{n:,} simulations to check with", other / path.name)
        return read_simulations(other / path.name, run.graph)
    began = time.monotonic()
    rows = _simulate(run, CHECK_SIMULATE, inputs, n, _key(seed, 3), path)
    run.finish(CHECK_SIMULATE, inputs, [path.name], began)
    run.done(f"{rows.n:,} simulations to check with{_dropped(rows)}", began, path)
    return rows


def _prior(run: RunFolder, rows: Simulations) -> Simulations:
    """Simulations whose parameters show the prior: those of training or, if they are not there, the others."""
    there = "simulate" in run.record["stages"] and other_fit(run, None) is None
    changed = run.changed("simulate") if there else None
    if changed is not None:
        run.say(f"{changed} is missing or was altered: the report shows the prior of the simulations to check with.")
    return rows if changed is not None or not there else read_simulations(run.folder / "simulations.npz", run.graph)


def _repeat(run: RunFolder) -> str:
    """The command that makes this run from nothing, whatever the commands were that made it."""
    seeds = _seeds(run)
    together = len(set(seeds.values())) == 1
    lines = []
    for command in ("infer",) if together else seeds:
        stages = seeds if together else (command,)
        options = {name: value for stage in stages for name, value in run.options(stage).items()}
        words = ["cpejax", command, str(run.model.path)]
        left_out = {"simulations": options.get("fresh"), "refine": options.get("refine") == "auto"}
        for name in REPEATED:
            value = None if left_out.get(name) else options.get(name)
            value = value["file"] if isinstance(value, dict) else value
            words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        lines.append(shlex.join([*words, "--seed", str(options["seed"]), "--out", str(run.folder)]))
    return "\n".join(lines)


def _seeds(run: RunFolder) -> dict[str, int]:
    """The seeds of the stages that have made the posterior."""
    stages = STAGES[2:] if other_fit(run, None) is not None else STAGES
    return {stage: run.options(stage)["seed"] for stage in stages if run.options(stage)}


def _key(seed: int, stage: int) -> Any:
    return jax.random.fold_in(jax.random.key(seed), stage)
