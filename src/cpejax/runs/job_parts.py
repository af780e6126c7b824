"""Simulations in parts, each by a command of its own: an array of jobs, without a caller that must stay alive."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from cpejax.program.dispatch import Limits
from cpejax.program.probe import Prober
from cpejax.program.simulate import draw_rows
from cpejax.program.simulation_files import check_run, packed, sites_of
from cpejax.program.simulations import Simulations, finite, say_without_digits
from cpejax.runs.folder import PARTS, RunFolder
from cpejax.runs.model_file import Failure, blaming
from cpejax.runs.result_files import read_simulations, write_arrays
from cpejax.util.files import Unusable, load_arrays, write_atomically
from cpejax.util.keys import key_words


def parse_part(text: str) -> tuple[int, int]:
    """Which part of how many: `3/100`."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise Failure(f"--part {text}: expected the number of a part, from 1, and how many there are, as in 3/100.")
    return int(number), int(of)


class JobParts:
    """The parts of a run's simulations: `parts/part-003-of-100.safetensors`.

    A part has the rows that a run in one piece would have there. Two processes that simulate the same part write the
    same file.
    """

    def __init__(self, run: RunFolder, key: PRNGKeyArray):
        options = run.options("simulate")
        self.run, self.key, self.n, self.of = run, key, options["simulations"], options["parts"]
        self.folder = run.folder / PARTS
        if self.of > self.n:
            raise Failure(f"--part: {self.n} simulations cannot have {self.of} parts. Give fewer parts.")

    def path(self, number: int) -> Path:
        """The file of a part."""
        width = len(str(self.of))
        return self.folder / f"part-{number:0{width}d}-of-{self.of}.safetensors"

    def there(self) -> list[int]:
        """The numbers of the parts that are there."""
        return [i for i in range(1, self.of + 1) if self.path(i).is_file()]

    def _about(self, number: int) -> dict[str, Any]:
        program = self.run.graph.fingerprint
        return {"program": program, "n": self.n, "key": key_words(self.key), "part": [number, self.of]}

    def simulate(self, number: int, workers: Any) -> None:
        """Simulate a part, unless it is there; one that was interrupted resumes."""
        path, model = self.path(number), self.run.model
        rows = range((number - 1) * self.n // self.of, number * self.n // self.of)
        for other in (number, *self.there()[:1]):  # before anything is simulated
            if self.path(other).is_file():
                self.read(other)
        if path.is_file():
            self.run.kept(f"Part {number} of {self.of}", path)
            return
        began, work = time.monotonic(), path.with_suffix("")
        console = self.run.console
        limits = Limits(timeout=self.run.timeout or None)
        workers = 1 if workers is None and model.on_host() else workers  # it draws as any number of workers does
        with blaming(model.path):
            drawn = draw_rows(
                model.model,
                self.n,
                rows,
                self.key,
                {},
                checkpoint=work,
                on_error="raise",
                workers=workers,
                limits=limits,
                console=console,
                shown=console.is_terminal,
            )
        if drawn.interrupted:
            raise KeyboardInterrupt
        write_atomically(path, packed(drawn.values, self._about(number), drawn.prober(drawn.values)))
        shutil.rmtree(work, ignore_errors=True)
        self.run.done(f"Part {number} of {self.of}, {len(rows):,} simulations,", began, path)

    def read(self, number: int, prober: Prober | None = None) -> dict[str, np.ndarray]:
        """The simulations of a part, `{site: (k, *shape)}`; a part of another run is an error."""
        path = self.path(number)
        arrays, about = load_arrays(path)
        if about.get("run") != json.dumps(self._about(number)):
            raise Unusable(
                f"{path} is a part of another run (program, --simulations or --seed). Remove it, or give another --out."
            )
        check_run(path, self._about(number), prober or self._prober(), arrays, about)
        return sites_of(arrays)

    def _prober(self) -> Prober:
        return Prober(self.run.model.model.bound, self.run.graph)


def take_parts(run: RunFolder, key: PRNGKeyArray, all_of_them: bool, workers: Any) -> Simulations:
    """The simulations of all parts that are there, as `simulations.npz`; with `all_of_them` the others come first."""
    files = JobParts(run, key)
    if all_of_them:
        for number in set(range(1, files.of + 1)) - set(files.there()):
            files.simulate(number, workers)
    there = files.there()
    if not there:
        command = f"cpejax simulate {run.model.path} --out {run.folder} --part 1/{files.of}"
        raise Failure(f"{run.folder} has none of its {files.of} parts of simulations yet. First: {command}")
    inputs = {
        "model": run.model_hashes,
        "simulations": files.n,
        "seed": run.options("simulate")["seed"],
        "parts": f"{listed(there)} of {files.of}",
    }
    done, path = run.record["stages"].get("simulate"), run.folder / "simulations.npz"
    if done is not None and done["inputs"].get("parts") != inputs["parts"] and not run.restart:
        if "fit" in run.record["stages"]:
            run.say(
                f"Parts {done['inputs']['parts']} were there when the model was trained, {listed(there)} are now: "
                "--restart trains on all of them."
            )
            inputs["parts"] = done["inputs"]["parts"]
        else:
            del run.record["stages"]["simulate"]
    if run.finished("simulate", inputs):
        run.kept(f"Simulations, parts {inputs['parts']}", path)
        return read_simulations(path, run.graph)
    missing = sorted(set(range(1, files.of + 1)) - set(there))
    if missing:
        few = "1 part is" if len(missing) == 1 else f"{len(missing)} parts are"
        run.say(f"{few} missing of {files.of}: {listed(missing)}. The others are taken; these may come later.")
    began = time.monotonic()
    run.begin("simulate", inputs)
    prober = files._prober()
    found = [files.read(number, prober) for number in there]
    whole = {name: np.concatenate([part[name] for part in found]) for name in run.graph.shapes}
    with blaming(run.model.path):
        rows = finite(whole, run.graph, run.console)
    say_without_digits(rows, run.graph, run.console)
    write_arrays(path, rows)
    run.finish("simulate", inputs, [path.name], began)
    left_out = f" ({rows.dropped:,} more were not finite and left out)" if rows.dropped else ""
    run.done(f"{rows.n:,} simulations{left_out}, parts {inputs['parts']},", began, path)
    return rows


def listed(numbers: Sequence[int]) -> str:
    """Numbers in order, those that follow one another as a range: `1-3, 5`."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
