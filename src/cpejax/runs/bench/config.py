"""What a benchmark runs: tasks × methods × budgets × seeds, kept as JSON in the folder of its results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cpejax import tasks
from cpejax.inference.settings import Training
from cpejax.runs.bench.methods import Entry, defined, fitted_to, get
from cpejax.runs.bench.peers import Peer, peers_python
from cpejax.runs.model_file import Failure
from cpejax.tasks import Task
from cpejax.util.files import write_atomically

FILE, WORKFLOW = "config.json", "workflow.json"
"""The options, and what of them the Snakefile reads."""
C2ST = ("fast", "mlp")


class Run(NamedTuple):
    """One fit, by the names of its files."""

    task: str
    method: str
    budget: int
    seed: int

    @property
    def path(self) -> str:
        return f"{self.task}/{self.method}/{self.budget}-{self.seed}"


@dataclass(frozen=True)
class Config:
    """The options of a benchmark.

    - `tasks`, `methods`: names, or Python files of the user's own that define `TASK` and `METHOD`.
    - `budgets`: numbers of simulations; `seeds`: of simulations, fits and draws.
    - `draws`: for each observation.
    - `observations`: the maximum number of each task; sbi's have ten and others five. The fit with seed 0 is judged by
        all, as in sbi's benchmark, and a fit with another seed by one of its own, as in the paper.
    - `c2st`: which definitions of C2ST are computed, `"fast"` or `"mlp"`, the published one.
    - `training`: options of `cpe.Training` for all methods, for short trials.
    - `threads`: the number of cores of a job.
    - `separate`: fit, draw and score in a job each, as a cluster may want it, and not all three in one.
    """

    tasks: Sequence[str]
    methods: Sequence[str]
    budgets: Sequence[int] = (10_000,)
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    draws: int = 10_000
    observations: int = 10
    c2st: Sequence[str] = ("fast",)
    training: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    separate: bool = False

    def __post_init__(self) -> None:
        for name in ("tasks", "methods", "budgets", "seeds", "c2st"):
            values = getattr(self, name)
            if isinstance(values, str) or not values:
                raise Failure(f"{name} of the benchmark is {values!r}: expected a list of at least one.")
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        whole = {"budgets": (self.budgets, 10), "seeds": (self.seeds, 0), "draws": ((self.draws,), 20)}
        whole |= {"observations": ((self.observations,), 1), "threads": ((self.threads,), 1)}
        for name, (values, least) in whole.items():
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise Failure(f"{name} of the benchmark: found {value!r}, expected whole numbers from {least} on.")
        for name in self.c2st:
            if name not in C2ST:
                raise Failure(f"c2st of the benchmark: found {name!r}, expected some of {', '.join(C2ST)}.")
        Training(**self.training)

    @property
    def task_names(self) -> dict[str, str]:
        """What a task is called in the names of files, and its name or file."""
        return {short(name): name for name in self.tasks}

    @property
    def method_names(self) -> dict[str, str]:
        """What a method is called in the names of files, and its name or file."""
        return {short(name): name for name in self.methods}

    def task(self, name: str) -> Task:
        """The task that is called so in the names of files."""
        return get_task(self.task_names[name])

    def label(self, name: str) -> str:
        """What the table calls a task that is called `name` in the names of files."""
        return name if self.task_names[name].endswith(".py") else self.task_names[name]

    def entry(self, name: str) -> Entry | Peer:
        """The method that is called so in the names of files."""
        return get(self.method_names[name])

    def runs(self) -> Iterator[Run]:
        """All fits, in the order in which they run: a budget before the next, in it a method, and in that a seed."""
        for budget in self.budgets:
            for method in self.method_names:
                for seed in self.seeds:
                    for task in self.task_names:
                        yield Run(task, method, budget, seed)

    def observations_of(self, task: Task) -> tuple[int, ...]:
        """The observations of a task that some fit is judged by."""
        return task.observations[: self.observations]

    def observations_of_fit(self, task: Task, seed: int) -> tuple[int, ...]:
        """The observations that the fit with a seed is judged by."""
        numbers = self.observations_of(task)
        return numbers if seed == 0 else (numbers[seed % len(numbers)],)

    def check(self) -> None:
        """Errors of names, files and data that are not there, before anything is computed."""
        for name, known in (("tasks", self.task_names), ("methods", self.method_names)):
            given = getattr(self, name)
            if len(known) < len(given):
                raise Failure(f"Two {name} of the benchmark are called the same in the names of files: {given}.")
        entries = [self.entry(name) for name in self.method_names]
        for name in self.task_names:
            task = self.task(name)
            for entry in entries:
                if isinstance(entry, Peer):
                    peers_python()
                else:
                    fitted_to(task, entry.method)
            for number in self.observations_of(task):
                task.observation(number)

    def write(self, folder: Path, runs: Sequence[Run] | None = None) -> None:
        """Keep it in the folder of the results, with the fits that are to run (default: all); an unchanged file stays
        as old as it is.

        Results of other options are never mixed with those that are there; more tasks, methods, budgets and seeds are.
        """
        if (folder / FILE).is_file() and any((folder / "metrics").rglob("*.csv")):
            before = asdict(read_config(folder / FILE))
            for name in ("draws", "observations", "c2st", "training"):
                if before[name] != asdict(self)[name]:
                    raise Failure(
                        f"The results in {folder} are with {name} {before[name]!r}, and {getattr(self, name)!r} is "
                        "asked for: leave it out, or name another folder with --out."
                    )
        workflow = {
            "python": sys.executable,
            "threads": self.threads,
            "separate": self.separate,
            "runs": [run.path for run in (self.runs() if runs is None else runs)],
        }
        for name, value in ((FILE, asdict(self)), (WORKFLOW, workflow)):
            content, path = (json.dumps(value, indent=1) + "\n").encode(), folder / name
            if not path.is_file() or path.read_bytes() != content:
                write_atomically(path, content)


def short(name: str) -> str:
    """A task or a method in the names of files.

    >>> short("sbibm/two_moons"), short("mine/coin.py")
    ('sbibm.two_moons', 'coin')
    """
    return Path(name).stem if name.endswith(".py") else name.replace("/", ".")


@cache
def get_task(name: str) -> Task:
    """The task of that name, or what a Python file defines as `TASK`."""
    if not name.endswith(".py"):
        try:
            return tasks.get(name)
        except ValueError as error:
            raise Failure(f"{error}; or name a file that ends in .py and defines TASK.") from error
    found = defined(Path(name), "TASK")
    if not isinstance(found, Task):
        raise Failure(f"{name}: TASK is a {type(found).__name__}, expected cpe.tasks.Task(...).")
    return found


def read_config(path: Path) -> Config:
    """The options in a JSON file. Files that it names are relative to it."""
    if not path.is_file():
        raise Failure(f"{path} does not exist: expected the options of a benchmark, which cpejax bench writes.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Failure(f"{path} is not JSON: {error}.") from error
    known = [each.name for each in fields(Config)]
    if not isinstance(found, dict) or set(found) - set(known):
        unknown = sorted(set(found) - set(known)) if isinstance(found, dict) else type(found).__name__
        raise Failure(f"{path} has {unknown}, which a benchmark has not; its options are {', '.join(known)}.")
    for name in ("tasks", "methods"):
        if isinstance(found.get(name), list):
            found[name] = [_located(each, path.parent) for each in found[name]]
        elif name not in found:
            raise Failure(f"{path} has no {name}.")
    options: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}
    return Config(**options)


def _located(name: Any, folder: Path) -> Any:
    return str((folder / name).resolve()) if isinstance(name, str) and name.endswith(".py") else name
