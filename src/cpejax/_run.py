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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import xarray as xr
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cpejax._check import check, member_names
from cpejax._data import check_shapes, read_data
from cpejax._flow import Method
from cpejax._graph import Graph
from cpejax._methods import METHODS
from cpejax._model import Failure, Model, blaming, summary
from cpejax._posterior import Posterior, _options, fit, load
from cpejax._program import Simulator, read, unwrap
from cpejax._report import Report, render
from cpejax._simulate import Simulations, simulate
from cpejax._store import atomically, digest, write_atomically

FORMAT = 1
STAGES = ("simulate", "fit", "sample", "check")
SIMULATIONS, CHECK_SIMULATIONS, DRAWS = 10_000, 1_000, 4_000
TIMEOUT = 600.0
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}

Given = dict[str, np.ndarray]


class Interrupted(Exception):
    """Ctrl-C, where what is finished is kept."""


class Run:
    """The folder of a run.

    `run.json` says what each finished stage was made from, and the hashes of its files. A stage is not repeated if it
    would be made from the same, and never replaced by one made from something else unless `restart` is set.
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
        self.model_hash = digest(model.path.read_bytes(), self.graph.fingerprint.encode())
        self.record = self._open()

    def _open(self) -> dict[str, Any]:
        path = self.folder / "run.json"
        if self.folder.exists() and not self.folder.is_dir():
            raise Failure(f"{self.folder} is a file, expected a folder for the run. Name another one with --out.")
        if path.exists():
            try:
                record = json.loads(path.read_text())
                if record["format"] != FORMAT:
                    raise ValueError(f"it has format {record['format']}, this version reads format {FORMAT}")
                if not all(isinstance(record[part], dict) for part in ("stages", "options")):
                    raise ValueError("it lists no stages")
            except (ValueError, KeyError, TypeError) as error:
                raise Failure(
                    f"{path} is damaged ({error}), so what is in {self.folder} cannot be used. Give another --out."
                ) from error
            return record
        if self.folder.exists() and any(p.name != ".lock" for p in self.folder.iterdir()):
            raise Failure(
                f"{self.folder} is not empty, and not a run of cpejax (it has no run.json). Name another with --out."
            )
        return {"format": FORMAT, "options": {}, "stages": {}}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process works in a folder; errors of the disk are told in a paragraph."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as file:
                _lock(file, self.folder)
                self._write_record()
                yield
        except OSError as error:
            if error.errno is None and error.strerror is None:
                raise
            where = error.filename or self.folder
            raise Failure(
                f"{where} cannot be written or read: {error.strerror or error}. What was finished in {self.folder} is "
                "kept: mend this, and the same command goes on."
            ) from error

    @cached_property
    def host(self) -> bool:
        """Whether a simulator runs on the host."""
        found = (unwrap(site.fn) for site in read(self.model.bound).values())
        return any(isinstance(fn, Simulator) and fn.host for fn in found)

    # ---- what was done, and from what

    def option(self, name: str, given: Any, default: Any) -> Any:
        """What was asked for; otherwise what the run was made with; otherwise the default."""
        value = self.record["options"].get(name, default) if given is None else given
        self.record["options"][name] = value
        return value

    def finished(self, stage: str, inputs: Mapping[str, Any]) -> bool:
        """Whether a stage's files are there, made from the same inputs. Made from others, they are an error."""
        done = self.record["stages"].get(stage)
        if done is None:
            return False
        differ = [_difference(k, done["inputs"].get(k), v) for k, v in inputs.items() if done["inputs"].get(k) != v]
        if differ and not self.restart:
            raise Failure(
                f"{self.folder} was made otherwise: {'; '.join(differ)}. Give another --out, or --restart to replace "
                f"the stage '{stage}' and what comes after it."
            )
        changed = [name for name, was in done["files"].items() if _hash(self.folder / name) != was]
        if changed and not differ:
            self.say(f"{self.folder / changed[0]} is missing or was altered: {stage} is done again.")
        return not differ and not changed

    def finish(self, stage: str, inputs: Mapping[str, Any], files: Sequence[str], began: float) -> None:
        """Record a stage; what came after it, if anything, was made from something else."""
        later = STAGES[STAGES.index(stage) + 1 :] if stage in STAGES else ()
        for name in later:
            self.record["stages"].pop(name, None)
        self.record["stages"][stage] = {
            "inputs": dict(inputs),
            "files": {name: _hash(self.folder / name) for name in files},
            "seconds": round(time.monotonic() - began, 2),
            "at": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": self.command,
            "versions": versions(),
        }
        self._write_record()

    def _write_record(self) -> None:
        self.record["model"] = str(self.model.path)
        write_atomically(self.folder / "run.json", json.dumps(self.record, indent=1).encode())

    def file_hash(self, stage: str, name: str) -> str:
        """The hash of a file that a finished stage wrote."""
        return str(self.record["stages"][stage]["files"][name])

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


def run_simulate(run: Run, simulations: int | None, seed: int | None) -> Simulations:
    """Draw the training simulations: `simulations.npz`."""
    n, seed = run.option("simulations", simulations, SIMULATIONS), run.option("seed", seed, 0)
    inputs = {"model": run.model_hash, "simulations": n, "seed": seed}
    path = run.folder / "simulations.npz"
    if run.finished("simulate", inputs):
        run.kept(f"{n:,} simulations", path)
        return read_simulations(path, run.graph)
    rows = _simulate(run, "simulate", n, seed, 0, path)
    run.finish("simulate", inputs, [path.name], rows.began)
    run.done(f"{rows.n:,} simulations{_dropped(rows)}", rows.began, path)
    return rows


class _Timed(Simulations):
    began: float


def _simulate(run: Run, stage: str, n: int, seed: int, number: int, path: Path) -> _Timed:
    began = time.monotonic()
    # Parts are found again by what they are made from: those of another version of the model must not be mixed in.
    parts = run.folder / f".{stage}-{digest(run.model_hash.encode(), f'{n} {seed}'.encode())[:12]}"
    for other in run.folder.glob(f".{stage}-*"):
        if other != parts:
            run.say("The simulations that were begun are of another command or model file: they are dropped.")
            shutil.rmtree(other, ignore_errors=True)
    shown = nullcontext() if run.host else run.working(f"simulating {n:,} times")  # on the host there is a progress bar
    with blaming(run.model.path), run_watched(run), shown:
        rows = simulate(run.model.bound, n, observed=run.graph.data, key=_key(seed, number), checkpoint=parts)
    write_arrays(path, rows)
    shutil.rmtree(parts, ignore_errors=True)
    out = _Timed(rows, run.graph, rows.dropped)
    out.began = began
    return out


def _dropped(rows: Simulations) -> str:
    return f" ({rows.dropped:,} more were not finite and left out)" if rows.dropped else ""


def run_fit(run: Run, method: str | None, epochs: int | None, steps: int | None, seed: int | None) -> Posterior:
    """Train a posterior on the run's simulations: `model/`."""
    seed = run.option("seed", seed, 0)
    options = {"max_epochs": run.option("epochs", epochs, None), "steps": run.option("steps", steps, None)}
    chosen = choose_method(run.model, run.option("method", method, None))
    if "simulate" not in run.record["stages"]:
        raise Failure(
            f"{run.folder} has no simulations to train on. First: cpejax simulate {run.model.path} --out {run.folder}"
        )
    inputs = {
        "model": run.model_hash,
        "the simulations": run.file_hash("simulate", "simulations.npz"),
        "method": describe_method(chosen),
        "epochs": options["max_epochs"],
        "steps": options["steps"],
        "seed": seed,
    }
    folder, checkpoint = run.folder / "model", run.folder / ".checkpoint"
    if run.finished("fit", inputs):
        posterior = _load(folder, run.model, chosen)
        run.kept(f"Model of {posterior.weights:,} weights", folder)
        return posterior
    began = time.monotonic()
    rows = read_simulations(run.folder / "simulations.npz", run.graph)
    if _inputs_of(checkpoint) != inputs:  # of a training with other settings, which cannot go on
        shutil.rmtree(checkpoint, ignore_errors=True)
        write_atomically(checkpoint / "inputs.json", json.dumps(inputs).encode())
    given = {name: value for name, value in options.items() if value is not None}
    with blaming(run.model.path):
        posterior = fit(
            run.model.bound,
            rows,
            key=_key(seed, 1),
            method=chosen,
            checkpoint=checkpoint,
            **given,
        )
    if posterior.history.stopped.startswith("interrupted"):
        raise Interrupted(f"Training was {posterior.history.stopped}.")
    posterior.save(folder)
    shutil.rmtree(checkpoint, ignore_errors=True)
    run.finish("fit", inputs, ["model/posterior.json", "model/weights.safetensors"], began)
    run.done(f"Model of {posterior.weights:,} weights, {len(posterior.history.train)} epochs", began, folder)
    return posterior


def _inputs_of(checkpoint: Path) -> Any:
    try:
        return json.loads((checkpoint / "inputs.json").read_text())
    except (OSError, ValueError):
        return None


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
    options = ", ".join(f"{name}={value!r}" for name, value in _options(method).items())
    return f"{type(method).__name__}({options})"


def _load(folder: Path, model: Model, method: Method | None) -> Posterior:
    try:
        return load(folder, model.bound, method=method)
    except (ValueError, FileNotFoundError) as error:
        raise Failure(summary(error, model.path)) from error


def fitted(run: Run, other: Path | None) -> tuple[Posterior, str]:
    """The run's own model, or that of another run, and its hash."""
    if other is None and run.record["options"].get("fit") is not None:
        other = Path(run.record["options"]["fit"])
    if other is None:
        if "fit" not in run.record["stages"]:
            raise Failure(
                f"{run.folder} has no fitted model. First: cpejax fit {run.model.path} --out {run.folder}, or name a "
                "run that has one with --fit."
            )
        chosen = choose_method(run.model, run.record["options"].get("method"))
        return _load(run.folder / "model", run.model, chosen), run.file_hash("fit", "model/posterior.json")
    folder = other / "model" if (other / "model").is_dir() else other
    if not (folder / "posterior.json").exists():
        raise Failure(f"--fit {other}: there is no fitted model in this folder (no model/posterior.json).")
    posterior = _load(folder, run.model, run.model.method)
    was = _stage_of(other, "fit")
    if was is not None and was["inputs"]["model"] != run.model_hash:
        run.say(
            f"Note: {run.model.path} has changed since {other} was fitted. Sites, shapes and priors are the same; "
            "whether the simulator is cannot be told."
        )
    run.record["options"]["fit"] = str(other)
    return posterior, _hash(folder / "posterior.json")


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


def run_sample(
    run: Run, posterior: Posterior, model_hash: str, given: Given, draws: int | None, seed: int | None
) -> xr.DataTree:
    """Draw from the posterior of the data: `posterior.nc` and `summary.csv`."""
    n, seed = run.option("draws", draws, DRAWS), run.option("seed", seed, 0)
    inputs = {"the fitted model": model_hash, "the data": hash_values(given), "draws": n, "seed": seed}
    path = run.folder / "posterior.nc"
    if run.finished("sample", inputs):
        run.kept(f"{n:,} draws", path)
        return read_draws(path)
    began = time.monotonic()
    with blaming(run.model.path), run_watched(run), run.working(f"drawing {n:,} times"):
        tree = posterior.sample(n, given, key=_key(seed, 2))
    with atomically(path) as part:
        tree.to_netcdf(part, engine="h5netcdf")
    text = summarise(tree, run.graph).to_csv(float_format="%.6g", lineterminator="\n")
    write_atomically(run.folder / "summary.csv", text.encode())
    run.finish("sample", inputs, [path.name, "summary.csv"], began)
    run.done(f"{n:,} draws", began, path)
    return tree


def run_check(
    run: Run,
    posterior: Posterior,
    model_hash: str,
    given: Given,
    truth: Given | None,
    n: int | None,
    seed: int | None,
    tree: xr.DataTree,
) -> None:
    """Check the posterior, and write the report: `check.json` and `report.html`."""
    n, seed = run.option("check_simulations", n, CHECK_SIMULATIONS), run.option("seed", seed, 0)
    inputs = {
        "the draws": run.file_hash("sample", "posterior.nc"),
        "the fitted model": model_hash,
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
                seed,
                run.record,
            )
        )
        write_atomically(report, page.encode())
    run.finish("check", inputs, ["check.json", "report.html"], began)
    run.done("Report", began_report, report)


def _check_simulations(run: Run, n: int, seed: int) -> Simulations:
    inputs = {"model": run.model_hash, "check_simulations": n, "seed": seed}
    path = run.folder / "check_simulations.npz"
    if run.finished("simulate for checks", inputs):
        return read_simulations(path, run.graph)
    other = run.record["options"].get("fit")
    if other is not None and _was_made(Path(other), "simulate for checks", inputs):
        run.kept(f"{n:,} simulations to check with", Path(other) / path.name)
        return read_simulations(Path(other) / path.name, run.graph)
    rows = _simulate(run, "check", n, seed, 3, path)
    run.finish("simulate for checks", inputs, [path.name], rows.began)
    run.done(f"{rows.n:,} simulations to check with{_dropped(rows)}", rows.began, path)
    return rows


def _prior(run: Run, rows: Simulations) -> dict[str, np.ndarray]:
    """Parameters drawn from the prior: those of the training simulations, or of the others."""
    path = run.folder / "simulations.npz"
    source = read_simulations(path, run.graph) if "simulate" in run.record["stages"] and path.exists() else rows
    return {name: source[name][:10_000] for name in run.graph.parameters}


def _repeat(run: Run) -> str:
    """The command that makes this run from nothing, whatever the commands were that made it."""
    words = ["cpejax", "infer", str(run.model.path)]
    for name in ("given", "truth", "fit", "simulations", "method", "epochs", "steps", "draws", "check_simulations"):
        value = run.record["options"].get(name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--seed", str(run.record["options"].get("seed", 0)), "--out", str(run.folder)])


# ---- data


def read_observation(run: Run, given: Path | None, truth: Path | None) -> tuple[Given, Given | None]:
    """The observed data and, if there is one observation whose parameters are known, these."""
    values, many = read_given(run, given)
    return values, None if many else read_truth(run, truth)


def read_given(run: Run, path: Path | None) -> tuple[Given, bool]:
    """The observed data from a file, or from the model file; and whether there are many observations."""
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
    run.record["options"]["given"] = None if path is None else str(path)
    try:
        many = check_shapes(values, run.graph, source)
    except ValueError as error:
        raise Failure(str(error)) from error
    return values, many


def read_truth(run: Run, path: Path | None) -> Given | None:
    """The true parameters, if they are known."""
    if path is None and run.model.truth is None:
        return None
    source = str(path) if path is not None else f"`truth` in {run.model.path}"
    run.record["options"]["truth"] = None if path is None else str(path)
    if path is not None:
        values = _reading(path, run.graph, run.graph.parameters, "true parameters")
    else:
        values = _from_model(run.model.truth or {}, run.graph.parameters, source)
    try:
        if check_shapes(values, run.graph, source):
            raise Failure(f"{source} has many values of each parameter, expected one: the truth.")
    except ValueError as error:
        raise Failure(str(error)) from error
    return values


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
    np.savez(buffer, allow_pickle=False, **{name: np.asarray(x) for name, x in arrays.items()})
    write_atomically(path, buffer.getvalue())


def read_simulations(path: Path, graph: Graph) -> Simulations:
    """Simulations from an npz file."""
    with np.load(path, allow_pickle=False) as file:
        return Simulations({name: file[name] for name in graph.sites}, graph)


def read_draws(path: Path) -> xr.DataTree:
    """Draws from a NetCDF file, in memory."""
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        return tree.load()


def hash_values(values: Mapping[str, np.ndarray]) -> str:
    """A hash of numbers, whatever file they came from."""
    arrays = {name: np.ascontiguousarray(values[name], np.float32) for name in sorted(values)}
    return digest(*(part for name, x in arrays.items() for part in (f"{name} {x.shape}".encode(), x.tobytes())))


def _hash(path: Path) -> str:
    if not path.exists():
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
    """Mean, standard deviation and quantiles of each parameter, for each observation if there are many."""
    posterior = tree["posterior"].dataset
    rows = []
    for name in graph.parameters:
        x = posterior[name].values
        x = x.reshape(-1, *x.shape[2:])
        shape = graph.sites[name].shape
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


def _difference(name: str, was: Any, now: Any) -> str:
    if name in ("simulations", "seed", "draws", "check_simulations", "epochs", "steps"):
        return f"--{name.replace('_', '-')} was {was}, is {now}"
    if name == "model":
        return "the model file has changed since"
    if name == "method":
        return f"the method was {was}, is {now}"
    return f"{name} {'is' if name == 'the fitted model' else 'are'} not the same as then"


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
                f"Error: {run.model.path}: {call[1]()} has not returned after {run.timeout:g} s. Mend it there, or "
                f"give it more time with --timeout (0 for no limit). {go_on(run.folder)}",
                1,
            )


def _leave(run: Run, message: str, code: int) -> None:
    run.console.show_cursor(True)  # which a progress bar has hidden
    run.console.file.write(f"\n{message}\n")
    run.console.file.flush()
    os._exit(code)


def go_on(folder: Path) -> str:
    """How to go on."""
    return f"What was finished is kept in {folder}: the same command goes on from there."
