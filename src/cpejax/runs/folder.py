"""A run: a folder where each stage's result is written whole as it completes, and from which the next one goes on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import select
import shlex
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import pandas as pd
import xarray as xr
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cpejax.diagnostics.check import check
from cpejax.diagnostics.words import member_names
from cpejax.flows.base import Method
from cpejax.inference.fit import fit
from cpejax.inference.loading import load
from cpejax.inference.posterior import Posterior
from cpejax.inference.registry import METHODS
from cpejax.inference.saving import method_options
from cpejax.program.distributions import unwrap
from cpejax.program.graph import Graph
from cpejax.program.simulate import simulate
from cpejax.program.simulations import Simulations
from cpejax.program.simulator import Simulator
from cpejax.program.tracing import read
from cpejax.runs.data_files import check_shapes, read_data
from cpejax.runs.model_file import Failure, Model, blaming, summary
from cpejax.runs.report import Report, render
from cpejax.util.files import Unusable, digest, is_part, write_atomically

FORMAT = 2
STAGES = ("simulate", "fit", "sample", "check")
CHECK_SIMULATE = "simulate for checks"
WORK = {"simulate": ".simulate", CHECK_SIMULATE: ".simulate-for-checks", "fit": ".checkpoint"}
"""The folder of a stage's unfinished work, for stages that can resume from it."""
DEFAULTS = {"simulations": 10_000, "draws": 4_000, "check_simulations": 1_000}
"""Options of the stages where they are neither given nor recorded; the others are None."""
FILES = {"given": "the data", "truth": "the true parameters", "fit": "the fitted model"}
"""What is in the files that options name."""
MODEL_FILE, PROGRAM = "the model file", "the program"
TIMEOUT = 600.0
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}

Given = dict[str, np.ndarray]
Source = dict[str, Any]
"""Where values are from, `{"file": path or None, "hash": of the values}`."""
NOWHERE: Source = {"file": None, "hash": None}
Result = TypeVar("Result")


class Interrupted(Exception):
    """Ctrl-C, where what is finished is kept."""


class Run:
    """The folder of a run.

    `run.json` says what each stage was begun with and each finished stage was made from, and the hashes of its files. A
    stage is not repeated if it would be made from the same, and neither a finished stage nor the work of one that was
    begun is replaced by something else unless `restart` is set.
    """

    def __init__(
        self,
        folder: Path,
        model: Model,
        *,
        command: Sequence[str] = (),
        restart: bool = False,
        timeout: float = TIMEOUT,
    ):
        self.folder, self.model, self.restart, self.timeout = folder, model, restart, timeout
        self.command = shlex.join(command)
        self.console = Console(stderr=True, highlight=False)
        self.graph: Graph = model.graph()
        self.model_hashes = {
            MODEL_FILE: _hash(model.path),
            PROGRAM: self.graph.fingerprint,
            **{name: _hash(path) for name, path in model.files().items()},
        }
        self.record: dict[str, Any] = {}  # what is in the folder, read once nobody else can change it

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process works in a folder; errors of the disk are told in a paragraph."""
        try:
            self._check_folder()
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as file:
                _lock(file, self.folder)
                self.record = self._read_record()
                self._tidy()
                self._write_record()
                yield
        except OSError as error:
            if error.errno is None and error.strerror is None:
                raise
            where = error.filename or self.folder
            raise Failure(
                f"{where} cannot be written or read: {error.strerror or error}. What was finished in {self.folder} is "
                "kept: fix this, and the same command resumes."
            ) from error

    def _check_folder(self) -> None:
        """Whether the folder may be a run's, before anything is written into it."""
        if self.folder.exists() and not self.folder.is_dir():
            raise Failure(f"{self.folder} is a file, expected a folder for the run. Name another one with --out.")
        path = self.folder / "run.json"
        if path.is_dir():
            raise Failure(f"{path} is a folder, expected a file. Name another folder for the run with --out.")
        # A process that was killed while it wrote the first run.json leaves a part of it.
        others = (
            [p for p in self.folder.iterdir() if p.name != ".lock" and not is_part(p)] if self.folder.exists() else []
        )
        if others and not path.exists():
            raise Failure(
                f"{self.folder} is not empty, and not a run of cpejax (it has no run.json). Name another with --out."
            )

    def _read_record(self) -> dict[str, Any]:
        path = self.folder / "run.json"
        if not path.exists():
            return {"format": FORMAT, "options": {}, "begun": {}, "stages": {}}
        try:
            record = json.loads(path.read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"it has format {record['format']}, this version reads format {FORMAT}")
            if not all(isinstance(record[part], dict) for part in ("options", "begun", "stages")):
                raise ValueError("it lists no stages")
        except (ValueError, KeyError, TypeError) as error:
            raise Failure(
                f"{path} is damaged or of another version of cpejax ({error}), so what is in {self.folder} cannot be "
                "used. Give another --out."
            ) from error
        return record

    def _tidy(self) -> None:
        """Remove what a process that was killed has left: parts of files, and the work of stages that are finished."""
        for path in [p for p in self.folder.rglob("*.part") if is_part(p)]:
            path.unlink(missing_ok=True)
        for stage in WORK:
            if stage not in self.record["begun"]:
                shutil.rmtree(self.work(stage), ignore_errors=True)

    def work(self, stage: str) -> Path:
        """The folder of what a stage has done so far, from which it resumes."""
        return self.folder / WORK[stage]

    @cached_property
    def host(self) -> bool:
        """Whether a simulator runs on the host."""
        found = (unwrap(site.fn) for site in read(self.model.bound).values())
        return any(isinstance(fn, Simulator) and fn.host for fn in found)

    # ---- what was done, and from what

    def choose(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the options of a command, `{stage: {option: value}}`, and record them before any stage begins.

        What is None was left out: it is what the stage was begun with, otherwise the default; the seed of a stage that
        was not begun is that of the first one that was. Options that differ from those of a stage that is finished, or
        has done some of its work, are an error, and nothing is recorded.
        """
        options = {stage: dict(chosen) for stage, chosen in self.record["options"].items()}
        for stage, values in given.items():
            now = options.setdefault(stage, {})
            for name, value in values.items():
                if value is not None:
                    now[name] = value
                elif name == "seed":
                    now.setdefault(name, next((options[s][name] for s in STAGES if name in options.get(s, {})), 0))
                else:
                    now.setdefault(name, DEFAULTS.get(name))
            self._refuse_changes(stage, now)
        self.record["options"] = options
        self._write_record()

    def _refuse_changes(self, stage: str, options: Mapping[str, Any]) -> None:
        """An error if a stage, as far as its options tell, would not be made as it was."""
        inputs = {
            name: options[name] for name in ("simulations", "epochs", "steps", "draws", "seed") if name in options
        }
        sources = {name: options[name] for name in FILES if options.get(name)}
        if "fit" in sources and sources["fit"]["file"] is None:
            del sources["fit"]  # the run's own model, which may be still to be trained
        inputs |= {FILES[name]: source["hash"] for name, source in sources.items()}
        if "method" in options:
            inputs["method"] = describe_method(choose_method(self.model, options["method"]))
        if stage in ("simulate", "fit"):
            inputs["model"] = self.model_hashes
        if "check_simulations" in options:
            inputs["check_simulations"] = options["check_simulations"]
            new = {"model": self.model_hashes, **{name: options[name] for name in ("check_simulations", "seed")}}
            self._refuse(CHECK_SIMULATE, new)
        self._refuse(stage, inputs)

    def _refuse(self, stage: str, inputs: Mapping[str, Any]) -> None:
        """An error if a stage was made from other inputs, or was begun with others and has done some of its work."""
        done, begun = self.record["stages"].get(stage), self.record["begun"].get(stage)
        if self.restart:
            return
        differ = _differences(done["inputs"], inputs) if done else []
        if differ:
            raise Failure(
                f"{self.folder} was made otherwise: {'; '.join(differ)}. Give another --out, or --restart to replace "
                f"the stage '{stage}' and what comes after it."
            )
        differ = _differences(begun, inputs) if begun and self._has_work(stage) else []
        if differ:
            raise Failure(
                f"{self.folder} has an unfinished stage '{stage}' that was begun otherwise: {'; '.join(differ)}. "
                "Resume it as it was begun, give another --out, or --restart to drop what it has done so far."
            )

    def _has_work(self, stage: str) -> bool:
        return stage in WORK and any(self.work(stage).glob("*.safetensors"))

    def options(self, stage: str) -> dict[str, Any]:
        """The options of a stage."""
        return self.record["options"].get(stage, {})

    def finished(self, stage: str, inputs: Mapping[str, Any]) -> bool:
        """Whether a stage's files are there, made from the same inputs. Made from others, they are an error."""
        self._refuse(stage, inputs)
        done = self.record["stages"].get(stage)
        if done is None or _differences(done["inputs"], inputs):
            return False
        changed = self.changed(stage)
        if changed is not None:
            self.say(f"{changed} is missing or was altered: {stage} is done again.")
        return changed is None

    def changed(self, stage: str) -> Path | None:
        """The first file of a finished stage that is not as it was written."""
        for name, was in self.record["stages"][stage]["files"].items():
            path = self.folder / name
            if path.is_dir():
                raise Failure(f"{path} is a folder, expected the file that the stage '{stage}' wrote. Remove it.")
            if _hash(path) != was:
                return path
        return None

    def verified(self, stage: str) -> dict[str, Any] | None:
        """What is recorded of a finished stage that another one reads; other files than it wrote are an error."""
        done: dict[str, Any] | None = self.record["stages"].get(stage)
        if done is None:
            return None
        command = f"cpejax {stage} {self.model.path} --out {self.folder}"
        changed = self.changed(stage)
        if changed is not None:
            raise Failure(f"{changed} is missing, or was altered after it was written. Make it again: {command}")
        differ = _differences({"model": done["inputs"]["model"]}, {"model": self.model_hashes})
        if differ:
            raise Failure(
                f"{self.folder} was made otherwise: {differ[0]}. Give another --out, or replace its stage "
                f"'{stage}' and what comes after it: {command} --restart"
            )
        return done

    def begin(self, stage: str, inputs: Mapping[str, Any]) -> None:
        """Record what a stage is begun with, before any of its work is there."""
        done, begun = self.record["stages"].get(stage), self.record["begun"].get(stage)
        if self._has_work(stage) and begun != inputs:
            words = "; ".join(_differences(begun or {}, inputs))
            self.say(f"What the stage '{stage}' had done so far is dropped, since it was begun otherwise: {words}.")
            shutil.rmtree(self.work(stage), ignore_errors=True)
        if done is not None and done["inputs"] != inputs:
            self._forget(stage)
        self.record["begun"][stage] = dict(inputs)
        self._write_record()

    def _forget(self, stage: str) -> None:
        """What is made from a stage that is replaced is replaced as well."""
        self.record["stages"].pop(stage, None)
        for name in STAGES[STAGES.index(stage) + 1 :] if stage in STAGES else ():
            self.record["stages"].pop(name, None)
            if self._has_work(name):
                self.say(f"What the stage '{name}' had done so far is dropped, since '{stage}' is made anew.")
                shutil.rmtree(self.work(name), ignore_errors=True)
            self.record["begun"].pop(name, None)

    def finish(self, stage: str, inputs: Mapping[str, Any], files: Sequence[str], began: float) -> None:
        """Record a stage, and only then remove the work it has resumed from."""
        written = {name: _hash(self.folder / name) for name in files}
        before = self.record["stages"].get(stage)
        if before is None or before["files"] != written:
            self._forget(stage)
        self.record["stages"][stage] = {
            "inputs": dict(inputs),
            "files": written,
            "seconds": round(time.monotonic() - began, 2),
            "at": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": self.command,
            "versions": versions(),
        }
        self.record["begun"].pop(stage, None)
        self._write_record()
        if stage in WORK:
            shutil.rmtree(self.work(stage), ignore_errors=True)

    def _write_record(self) -> None:
        self.record["model"] = str(self.model.path)
        write_atomically(self.folder / "run.json", json.dumps(self.record, indent=1).encode())

    # ---- talking

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def done(self, what: str, began: float, path: Path | str) -> None:
        self.say(f"{what} in {_duration(time.monotonic() - began)}: {path}")

    def kept(self, what: str, path: Path | str) -> None:
        self.say(f"{what}, from before: {path}")

    @contextmanager
    def working(self, words: str) -> Iterator[None]:
        """A line that shows that something is going on."""
        columns = (SpinnerColumn(), TextColumn(words, markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True) as bar:
            bar.add_task("")
            yield


# ---- stages


def run_simulate(run: Run) -> Simulations:
    """Draw the training simulations: `simulations.npz`."""
    n, seed = run.options("simulate")["simulations"], run.options("simulate")["seed"]
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


def _simulate(run: Run, stage: str, inputs: Mapping[str, Any], n: int, key: Any, path: Path) -> Simulations:
    run.begin(stage, inputs)

    def draw() -> Simulations:
        shown = nullcontext() if run.host else run.working(f"simulating {n:,} times")  # the host has a progress bar
        with blaming(run.model.path), run_watched(run), shown:
            return simulate(run.model.bound, n, observed=run.graph.data, key=key, checkpoint=run.work(stage))

    rows = _resume(run, stage, draw)
    write_arrays(path, rows)
    return rows


def _resume(run: Run, stage: str, act: Callable[[], Result]) -> Result:
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


def run_fit(run: Run) -> Posterior:
    """Train a posterior on the run's simulations: `model/`."""
    options = run.options("fit")
    chosen = choose_method(run.model, options["method"])
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
    }
    folder = run.folder / "model"
    if run.finished("fit", inputs):
        posterior = _load(folder, run.model, chosen)
        run.kept(f"Model of {posterior.weights:,} weights", folder)
        return posterior
    began = time.monotonic()
    rows = read_simulations(run.folder / "simulations.npz", run.graph)
    training = {"max_epochs": options["epochs"], "steps": options["steps"]}
    given = {name: value for name, value in training.items() if value is not None}
    run.begin("fit", inputs)

    def train() -> Posterior:
        key, work = _key(options["seed"], 1), run.work("fit")
        with blaming(run.model.path):
            return fit(run.model.bound, rows, key=key, method=chosen, checkpoint=work, **given)

    posterior = _resume(run, "fit", train)
    if posterior.history.stopped.startswith("interrupted"):
        raise Interrupted(f"Training was {posterior.history.stopped}.")
    posterior.save(folder)
    run.finish("fit", inputs, ["model/posterior.json", "model/weights.safetensors"], began)
    run.done(f"Model of {posterior.weights:,} weights, {len(posterior.history.train)} epochs", began, folder)
    return posterior


def choose_method(model: Model, name: str | None) -> Method:
    """The method asked for by name, with the model file's own options if it is the same one."""
    own = model.method
    if name is None:
        return own if own is not None else METHODS["CPE"]()
    known = {known.lower(): known for known in METHODS}
    if name.lower() not in known:
        raise Failure(f"There is no method '{name}'; there are {', '.join(known)}.")
    kind = METHODS[known[name.lower()]]
    return own if own is not None and type(own) is kind else kind()


def describe_method(method: Method) -> str:
    """A method and its options, in words that are the same whenever they are."""
    options = ", ".join(f"{name}={value!r}" for name, value in method_options(method).items())
    return f"{type(method).__name__}({options})"


def _load(folder: Path, model: Model, method: Method | None) -> Posterior:
    try:
        return load(folder, model.bound, method=method)
    except (ValueError, FileNotFoundError) as error:
        raise Failure(summary(error, model.path)) from error


def other_fit(run: Run, other: Path | None) -> Path | None:
    """The run whose model is used instead of one of its own, now or since the run was begun."""
    recorded = run.options("sample").get("fit")
    return Path(recorded["file"]) if other is None and recorded and recorded["file"] else other


def fitted(run: Run, other: Path | None) -> tuple[Posterior, Source]:
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
        changed = [other / name for name, hash_ in was["files"].items() if _hash(other / name) != hash_]
        if changed:
            raise Failure(f"--fit {other}: {changed[0]} is missing, or was altered after it was written.")
    posterior = _load(folder, run.model, run.model.method)
    if was is not None and was["inputs"]["model"] != run.model_hashes:
        run.say(
            f"Note: {_changed_in_model(was['inputs']['model'], run.model_hashes)} has changed since {other} was "
            "fitted. Sites, shapes and priors are the same; whether the simulator is cannot be told."
        )
    return posterior, {"file": str(other), "hash": _hash(folder / "posterior.json")}


def _stage_of(folder: Path, stage: str) -> dict[str, Any] | None:
    """What another run's folder says of a stage."""
    try:
        return dict(json.loads((folder / "run.json").read_text())["stages"][stage])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _was_made(folder: Path, stage: str, inputs: Mapping[str, Any]) -> bool:
    """Whether another run has made a stage from the same inputs."""
    done = _stage_of(folder, stage)
    return (
        done is not None
        and done["inputs"] == inputs
        and all(_hash(folder / name) == was for name, was in done["files"].items())
    )


def run_sample(run: Run, posterior: Posterior, source: Source, given: Given) -> xr.DataTree:
    """Draw from the posterior of the data: `posterior.nc` and `summary.csv`."""
    n, seed = run.options("sample")["draws"], run.options("sample")["seed"]
    inputs = {"the fitted model": source["hash"], "the data": hash_values(given), "draws": n, "seed": seed}
    path = run.folder / "posterior.nc"
    if run.finished("sample", inputs):
        run.kept(f"{n:,} draws", path)
        return read_draws(path)
    began = time.monotonic()
    run.begin("sample", inputs)
    with blaming(run.model.path), run_watched(run), run.working(f"drawing {n:,} times"):
        tree = posterior.sample(n, given, key=_key(seed, 2))
    write_draws(path, tree)
    text = summarise(tree, run.graph).to_csv(float_format="%.6g", lineterminator="\n")
    write_atomically(run.folder / "summary.csv", text.encode())
    run.finish("sample", inputs, [path.name, "summary.csv"], began)
    run.done(f"{n:,} draws", began, path)
    return tree


def run_check(
    run: Run,
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
    report = run.folder / "report.html"
    if run.finished("check", inputs):
        run.kept("Checks and report", report)
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
        page = render(
            Report(
                run.model.path,
                run.graph,
                posterior,
                tree,
                found,
                _prior(run, rows),
                truth,
                summarise(tree, run.graph, truth),
                _repeat(run),
                versions(),
                _seeds(run),
                run.record,
            )
        )
        write_atomically(report, page.encode())
    run.finish("check", inputs, ["check.json", "report.html"], began)
    run.done("Report", began_report, report)


def _check_simulations(run: Run, n: int, seed: int) -> Simulations:
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


def _prior(run: Run, rows: Simulations) -> dict[str, np.ndarray]:
    """Parameters drawn from the prior: those of the training simulations, or of the others."""
    there = "simulate" in run.record["stages"] and other_fit(run, None) is None
    changed = run.changed("simulate") if there else None
    if changed is not None:
        run.say(f"{changed} is missing or was altered: the report shows the prior of the simulations to check with.")
    source = rows if changed is not None or not there else read_simulations(run.folder / "simulations.npz", run.graph)
    return {name: source[name][:10_000] for name in run.graph.parameters}


def _repeat(run: Run) -> str:
    """The command that makes this run from nothing, whatever the commands were that made it."""
    seeds = _seeds(run)
    together = len(set(seeds.values())) == 1
    lines = []
    for command in ("infer",) if together else seeds:
        stages = seeds if together else (command,)
        options = {name: value for stage in stages for name, value in run.options(stage).items()}
        words = ["cpejax", command, str(run.model.path)]
        for name in ("given", "truth", "fit", "simulations", "method", "epochs", "steps", "draws", "check_simulations"):
            value = options.get(name)
            value = value["file"] if isinstance(value, dict) else value
            words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        lines.append(shlex.join([*words, "--seed", str(options["seed"]), "--out", str(run.folder)]))
    return "\n".join(lines)


def _seeds(run: Run) -> dict[str, int]:
    """The seeds of the stages that have made the posterior."""
    stages = STAGES[2:] if other_fit(run, None) is not None else STAGES
    return {stage: run.options(stage)["seed"] for stage in stages if run.options(stage)}


# ---- data


def read_observation(run: Run, given: Path | None, truth: Path | None) -> tuple[Given, Given | None, dict[str, Source]]:
    """The observed data and, if there is one observation whose parameters are known, these; and where both are from."""
    values, many, source = read_given(run, given)
    true, true_source = (None, NOWHERE) if many else read_truth(run, truth)
    return values, true, {"given": source, "truth": true_source}


def read_given(run: Run, path: Path | None) -> tuple[Given, bool, Source]:
    """The observed data, from a file or from the model file; whether there are many observations; and the source."""
    path, recorded = _file(path, run.options("sample").get("given"))
    if path is None:
        if run.model.data is None:
            raise Failure(
                f"There are no data: name a file with --given, or define `data` in {run.model.path}. The program's "
                f"data are {', '.join(run.graph.data)}."
            )
        source = f"`data` in {run.model.path}"
        values = _from_model(run.model.data, run.graph.data, source)
    else:
        source = str(path)
        values = _reading(path, run.graph, run.graph.data, "data")
    try:
        many = check_shapes(values, run.graph, source)
    except ValueError as error:
        raise Failure(str(error)) from error
    return values, many, _source(run, path, values, recorded, "--given")


def read_truth(run: Run, path: Path | None) -> tuple[Given | None, Source]:
    """The true parameters, if they are known, and the source."""
    path, recorded = _file(path, run.options("check").get("truth"))
    if path is None and run.model.truth is None:
        return None, NOWHERE
    source = str(path) if path is not None else f"`truth` in {run.model.path}"
    if path is not None:
        values = _reading(path, run.graph, run.graph.parameters, "true parameters")
    else:
        values = _from_model(run.model.truth or {}, run.graph.parameters, source)
    try:
        if check_shapes(values, run.graph, source):
            raise Failure(f"{source} has many values of each parameter, expected one: the truth.")
    except ValueError as error:
        raise Failure(str(error)) from error
    return values, _source(run, path, values, recorded, "--truth")


def _file(path: Path | None, recorded: Source | None) -> tuple[Path | None, Source | None]:
    """The file that was named; otherwise the one the run was begun with, and what is recorded of it."""
    if path is not None or recorded is None or recorded["file"] is None:
        return path, None
    return Path(recorded["file"]), recorded


def _source(run: Run, path: Path | None, values: Given, recorded: Source | None, option: str) -> Source:
    now = {"file": None if path is None else str(path), "hash": hash_values(values)}
    if recorded is not None and recorded != now and not run.restart:
        raise Failure(
            f"{path} is not the file that the run in {run.folder} was begun with, or has changed since. Name the file "
            f"with {option}."
        )
    return now


def _reading(path: Path, graph: Graph, sites: Sequence[str], what: str) -> Given:
    try:
        return read_data(path, graph, sites, what)
    except ValueError as error:
        raise Failure(str(error)) from error


def _from_model(values: Mapping[str, Any], sites: Sequence[str], source: str) -> Given:
    missing = [name for name in sites if name not in values]
    if missing:
        raise Failure(f"{source} has no '{missing[0]}'; expected are {', '.join(sites)}.")
    out = {}
    for name in sites:
        x = np.asarray(values[name])
        if x.dtype.kind not in "fiub":
            raise Failure(f"{source}: '{name}' is not made of numbers, it has type {x.dtype}.")
        out[name] = x
    return out


# ---- files


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """An npz file, whole or not at all."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # numpy.savez could not write a site called `file`
        for name, x in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as part:
                np.lib.format.write_array(part, np.asarray(x), allow_pickle=False)
    write_atomically(path, buffer.getvalue())


def read_simulations(path: Path, graph: Graph) -> Simulations:
    """Simulations from an npz file."""
    with np.load(path, allow_pickle=False) as file:
        return Simulations({name: file[name] for name in graph.shapes if name in file}, graph)


def write_draws(path: Path, tree: xr.DataTree) -> None:
    """A NetCDF file, whole or not at all.

    It is made in memory: where a disk is full, HDF5 fails once more when it closes its file, and ends the process.
    """
    buffer = io.BytesIO()
    tree.to_netcdf(buffer, engine="h5netcdf")
    write_atomically(path, buffer.getvalue())


def read_draws(path: Path) -> xr.DataTree:
    """Draws from a NetCDF file, in memory."""
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        return tree.load()


def hash_values(values: Mapping[str, np.ndarray]) -> str:
    """A hash of numbers, whatever file they came from."""
    arrays = {name: np.ascontiguousarray(values[name], np.float64) for name in sorted(values)}
    return digest(*(part for name, x in arrays.items() for part in (f"{name} {x.shape}".encode(), x.tobytes())))


def _hash(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock(file: Any, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Failure(f"Another cpejax is at work in {folder}. Wait for it, or give another --out.") from None


def versions() -> dict[str, str]:
    """What a result depends on besides its inputs."""
    names = ("cpejax", "jax", "numpyro", "equinox", "optax", "numpy")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}


def summarise(tree: xr.DataTree, graph: Graph, truth: Given | None = None) -> pd.DataFrame:
    """Mean, standard deviation and quantiles of parameters and deterministic sites, for each observation of many."""
    posterior = tree["posterior"].dataset
    rows = []
    for name in (*graph.parameters, *graph.deterministics):
        x = posterior[name].values
        x = x.reshape(-1, *x.shape[2:])
        shape = graph.shapes[name]
        names = member_names(name, shape)
        many = x.ndim > 1 + len(shape)
        x = x.reshape(len(x), -1, len(names)) if many else x.reshape(len(x), 1, len(names))
        mean, sd = (
            x.mean(0, dtype=np.float64),
            x.std(0, ddof=1, dtype=np.float64) if len(x) > 1 else np.zeros(x.shape[1:]),
        )
        quantiles = np.quantile(x, list(QUANTILES.values()), axis=0)
        true = np.ravel(truth[name]) if truth is not None and name in truth else None
        for i in range(x.shape[1]):
            for j, member in enumerate(names):
                row: dict[str, Any] = {"observation": i} if many else {}
                row |= {"parameter": member, "mean": mean[i, j], "sd": sd[i, j]}
                row |= dict(zip(QUANTILES, quantiles[:, i, j], strict=True))
                rows.append(row | ({"truth": float(true[j])} if true is not None else {}))
    frame = pd.DataFrame(rows)
    if "observation" in frame:
        frame = frame.sort_values("observation", kind="stable").set_index(["observation", "parameter"])
    else:
        frame = frame.set_index("parameter")
    return frame


def _key(seed: int, stage: int) -> Any:
    return jax.random.fold_in(jax.random.key(seed), stage)


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, in words."""
    return [_difference(name, was.get(name), value) for name, value in now.items() if was.get(name) != value]


def _difference(name: str, was: Any, now: Any) -> str:
    if name in ("simulations", "seed", "draws", "check_simulations", "epochs", "steps"):
        was, now = ("left out" if value is None else value for value in (was, now))
        return f"--{name.replace('_', '-')} was {was}, is {now}"
    if name == "model":
        return f"{_changed_in_model(was or {}, now)} has changed since"
    if name == "method":
        return f"the method was {was}, is {now}"
    return f"{name} {'is' if name == 'the fitted model' else 'are'} not the same as then"


def _changed_in_model(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    if was.get(MODEL_FILE) != now[MODEL_FILE]:
        return "the model file"
    changed = [name for name in {**was, **now} if name != PROGRAM and was.get(name) != now.get(name)]
    return f"{changed[0]}, which the model file reads," if changed else "the program's graph"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


# ---- what cannot be interrupted


@contextmanager
def run_watched(run: Run) -> Iterator[None]:
    """Ctrl-C, and the time limit of a simulator on the host, also while a compiled call runs.

    Python handles a signal between two of its own instructions, and the main thread is inside the compiled call that
    calls the simulator, or in the simulator itself, whose exceptions XLA turns into its own. So another thread sees to
    it, and ends the process: all files are whole at any moment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread gets signals
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):  # a process in the background ignores Ctrl-C, and goes on doing so
        signal.signal(signal.SIGINT, lambda *_: None)
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(run, read, over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before)
        os.write(write, b"\0")
        watch.join()
        os.close(read)
        os.close(write)


def _watch(run: Run, read: int, over: threading.Event) -> None:
    while not over.is_set():
        ready, _, _ = select.select([read], [], [], 0.2)
        if ready and signal.SIGINT in os.read(read, 64):
            _leave(run, f"Interrupted. {go_on(run.folder)}", 130)
        call = Simulator.under_way
        if run.timeout and call is not None and time.monotonic() - call[0] > run.timeout:
            _leave(
                run,
                f"Error: {run.model.path}: {call[1]()} has not returned after {run.timeout:g} s. Fix it there, or "
                f"give it more time with --timeout (0 for no limit). {go_on(run.folder)}",
                1,
            )


def _leave(run: Run, message: str, code: int) -> None:
    run.console.show_cursor(True)  # which a progress bar has hidden
    run.console.file.write(f"\n{message}\n")
    run.console.file.flush()
    os._exit(code)


def go_on(folder: Path) -> str:
    """How to resume."""
    return f"What was finished is kept in {folder}: the same command resumes from there."
