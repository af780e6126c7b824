"""The folder of a run: what was made from what, its record, and its lock."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cpejax.program.graph import Graph
from cpejax.runs.changes import MODEL_FILE, PROGRAM, differences
from cpejax.runs.model_file import Failure, ModelFile, choose_method, describe_method
from cpejax.runs.result_files import hash_file, versions
from cpejax.util.files import AT_WORK, is_part, remove_old, write_atomically

FORMAT = 2
STAGES = ("simulate", "fit", "sample", "check")
CHECK_SIMULATE = "simulate for checks"
"""A stage of its own before `check`, so that the same simulations serve several observations."""
WORK = {"simulate": ".simulate", CHECK_SIMULATE: ".simulate-for-checks", "fit": ".checkpoint"}
"""The folder of a stage's unfinished work, for stages that can resume from it."""
PARTS = "parts"
"""The folder of parts of the simulations, which processes without the run's lock write."""
DEFAULTS = {"simulations": 10_000, "draws": 4_000, "refine": "auto", "check_simulations": 1_000}
"""Options of the stages where they are neither given nor recorded; the others are None."""
FILES = {"given": "the data", "truth": "the true parameters", "fit": "the fitted model"}
"""What is in the files that options name."""


class RunFolder:
    """The folder of a run.

    `run.json` says what each stage was begun with and each finished stage was made from, and the hashes of its files. A
    stage is not repeated if it would be made from the same, and neither a finished stage nor the work of one that was
    begun is replaced by something else unless `restart` is set.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelFile,
        *,
        command: Sequence[str] = (),
        restart: bool = False,
        timeout: float = 0.0,
        workers: str | None = None,
    ):
        self.folder, self.model, self.restart, self.timeout = folder, model, restart, timeout
        self.workers = workers
        self.command = shlex.join(command)
        self.console = Console(stderr=True, highlight=False)
        self.graph: Graph = model.graph()
        self.model_hashes = {
            MODEL_FILE: hash_file(model.path),
            PROGRAM: self.graph.fingerprint,
            **{name: hash_file(path) for name, path in model.files().items()},
        }
        self.record: dict[str, Any] = {}  # what is in the folder, read once nobody else can change it

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process works in a folder; errors of the disk are told in a paragraph."""
        try:
            self._check_folder()
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                self.record = self._read_record()
                self._tidy()
                self._write_record()
                yield
        except OSError as error:
            raise self._of_disk(error) from error

    def _lock(self) -> AbstractContextManager[Any]:
        # A soft lock, where the disk has no other, would outlive a process that is killed.
        lock = FileLock(self.folder / ".lock", blocking=False, fallback_to_soft=False)
        try:
            return lock.acquire()
        except Timeout:
            raise Failure(f"Another cpejax is at work in {self.folder}. Wait for it, or give another --out.") from None

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
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Failure(
                f"{path} is damaged or of another version of cpejax ({error}), so what is in {self.folder} cannot be "
                "used. Give another --out."
            ) from error
        return record

    def _tidy(self) -> None:
        """Remove what a process that was killed has left: parts of files, and the work of stages that are finished."""
        for path in [p for p in self.folder.rglob("*.part") if is_part(p)]:
            others = path.is_relative_to(self.folder / PARTS)  # may be at work
            remove_old(path, older_than=AT_WORK if others else 0.0)
        for stage in WORK:
            if stage not in self.record["begun"]:
                shutil.rmtree(self.work(stage), ignore_errors=True)

    def work(self, stage: str) -> Path:
        """The folder of what a stage has done so far, from which it resumes."""
        return self.folder / WORK[stage]

    # ---- what was done, and from what

    def choose(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the options of a command, `{stage: {option: value}}`, and record them before any stage begins.

        What is None was left out: it is what the stage was begun with, otherwise the default; the seed of a stage that
        was not begun is that of the first one that was. Options that differ from those of a stage that is finished, or
        has done some of its work, are an error, and nothing is recorded.
        """
        options = {stage: dict(chosen) for stage, chosen in self.record["options"].items()}
        self._refuse_other_parts(given.get("simulate", {}))
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

    def _refuse_other_parts(self, given: Mapping[str, Any]) -> None:
        """An error if there are parts of simulations that were begun otherwise."""
        begun = self.record["options"].get("simulate", {})
        differ = [name for name, value in given.items() if value is not None and begun.get(name) != value]
        if not differ or not begun.get("parts"):
            if given.get("parts") and "simulate" in {**self.record["stages"], **self.record["begun"]}:
                raise Failure(f"{self.folder} has simulations that are not in parts. Give another --out.")
            return
        if any((self.folder / PARTS).glob("*.safetensors")) and not self.restart:
            name = differ[0]
            raise Failure(
                f"{self.folder} has parts of simulations that were begun otherwise: {name} was {begun.get(name)}, is "
                f"{given[name]}. Give the same, another --out, or --restart to drop them."
            )
        shutil.rmtree(self.folder / PARTS, ignore_errors=True)

    @contextmanager
    def joined(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Many processes simulate a part each: the first ones record the options, and nobody holds the lock."""
        try:
            self._check_folder()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.record = self._read_record()
            begun = self.record["options"].get("simulate", {})
            same = all(value is None or begun.get(name) == value for name, value in given.items())
            if not (begun.get("parts") and same):
                with FileLock(self.folder / ".lock", timeout=60, fallback_to_soft=False):
                    self.record = self._read_record()
                    self.choose({"simulate": given})
            yield
        except Timeout:
            raise Failure(f"Another cpejax is at work in {self.folder}. Wait for it, or give another --out.") from None
        except OSError as error:
            raise self._of_disk(error) from error

    def _of_disk(self, error: OSError) -> Exception:
        if error.errno is None and error.strerror is None:
            return error
        where = error.filename or self.folder
        return Failure(
            f"{where} cannot be written or read: {error.strerror or error}. What was finished in {self.folder} is "
            "kept: fix this, and the same command resumes."
        )

    def _refuse_changes(self, stage: str, options: Mapping[str, Any]) -> None:
        """An error if a stage, as far as its options tell, would not be made as it was."""
        inputs = {
            name: options[name]
            for name in ("simulations", "epochs", "steps", "draws", "refine", "seed")
            if name in options
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
        differ = differences(done["inputs"], inputs) if done else []
        if differ:
            raise Failure(
                f"{self.folder} was made otherwise: {'; '.join(differ)}. Give another --out, or --restart to replace "
                f"the stage '{stage}' and what comes after it."
            )
        differ = differences(begun, inputs) if begun and self._has_work(stage) else []
        if differ:
            raise Failure(
                f"{self.folder} has an unfinished stage '{stage}' that was begun otherwise: {'; '.join(differ)}. "
                "Resume it as it was begun, give another --out, or --restart to drop what it has done so far."
            )

    def _has_work(self, stage: str) -> bool:
        return stage in WORK and any(self.work(stage).rglob("*.safetensors"))

    def options(self, stage: str) -> dict[str, Any]:
        """The options of a stage."""
        return self.record["options"].get(stage, {})

    def finished(self, stage: str, inputs: Mapping[str, Any]) -> bool:
        """Whether a stage's files are there, made from the same inputs. Made from others, they are an error."""
        self._refuse(stage, inputs)
        done = self.record["stages"].get(stage)
        if done is None or differences(done["inputs"], inputs):
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
            if hash_file(path) != was:
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
        differ = differences({"model": done["inputs"]["model"]}, {"model": self.model_hashes})
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
            words = "; ".join(differences(begun or {}, inputs))
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
        written = {name: hash_file(self.folder / name) for name in files}
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
        """Print a line to stderr."""
        self.console.print(text, markup=False, soft_wrap=True)

    def done(self, what: str, began: float, path: Path | str) -> None:
        """Say what was made, in what time, and where it is."""
        self.say(f"{what} in {_duration(time.monotonic() - began)}: {path}")

    def kept(self, what: str, path: Path | str) -> None:
        """Say what was there already, and where it is."""
        self.say(f"{what}, from before: {path}")

    @contextmanager
    def working(self, words: str) -> Iterator[None]:
        """A line that shows that something is happening."""
        columns = (SpinnerColumn(), TextColumn(words, markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True) as bar:
            bar.add_task("")
            yield


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
