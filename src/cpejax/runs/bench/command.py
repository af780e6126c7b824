"""`cpejax bench`: write the config, run the workflow, show how far it is."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from cpejax import tasks
from cpejax.runs.bench.config import FILE, WORKFLOW, Config, Run, read_config
from cpejax.runs.bench.methods import METHODS
from cpejax.runs.bench.table import missing, read_csv
from cpejax.runs.model_file import Failure
from cpejax.runs.watchdog import how_to_resume

SNAKEFILE = Path(__file__).with_name("Snakefile")
LOG = "bench.log"
GUARD = Path(__file__).with_name("guard.py")
GRACE = 15.0
"""Seconds that Snakemake and its jobs have to end once they are asked to."""
STEPS = re.compile(r"(\d+) of (\d+) steps \(\d+%\) done")
SLURM = ("--executor", "slurm", "--retries", "1", "--default-resources", "mem_mb=3000", "runtime=60")


def run_workflow(
    config: Config, folder: Path, jobs: int, slurm: bool, more: list[str], known: Path | None = None
) -> Path:
    """Run what is not done yet; the page.

    **Arguments:**

    - `jobs`: cores of this machine, or jobs on a cluster at a time.
    - `slurm`: run on a cluster.
    - `more`: further options of Snakemake.
    - `known`: a table whose fits are not run.
    """
    runs = None if known is None else runs_left(config, folder, known)
    needed = ["snakemake", *(["snakemake_executor_plugin_slurm"] if slurm else [])]
    if lacking := [name for name in needed if find_spec(name) is None]:
        raise Failure(f"{lacking[0]} is not installed: pip install 'cpejax[bench]'.")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder) as lock:
        config.write(folder, runs)
        where = ["--jobs" if slurm else "--cores", str(jobs), *(SLURM if slurm else ()), *more]
        code, signals = _follow(snakemake(folder, where), folder / LOG, lock)
    if signals:
        Console(stderr=True).print(Text(f"Interrupted. {how_to_resume(folder)}"), soft_wrap=True)
        raise typer.Exit(128 + signals[0])
    page = folder / "index.html"
    if code:
        raise Failure(
            f"Some jobs failed: {folder / LOG} says which and why. What is done is kept: the same command resumes."
        )
    return page


def runs_left(config: Config, folder: Path, known: Path) -> list[Run]:
    """The fits that a table of other results does not have whole, and those that the folder has already."""
    if not known.is_file():
        raise Failure(f"{known} does not exist: expected a table of results, such as benchmarks/results/bench.csv.")
    wanted = set(missing(config, read_csv(known)))
    found = [r for r in config.runs() if r in wanted or (folder / "metrics" / f"{r.path}.csv").is_file()]
    if not found:
        raise Failure(f"All fits are in {known}: there is nothing to run.")
    return found


def write_results(config: Config, folder: Path) -> Path:
    """Table, figures and page of what is done, also while jobs run or after some have failed; the page."""
    from cpejax.runs.bench.figures import write_figures
    from cpejax.runs.bench.page import write_page
    from cpejax.runs.bench.table import write_table

    write_table(folder)
    write_figures(config, folder)
    write_page(config, folder)
    return folder / "index.html"


def snakemake(folder: Path, more: list[str]) -> list[str]:
    """The command of Snakemake that does what is not done yet in a folder that has a config."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), "--directory", str(folder)]
    command += ["--configfile", str(folder.resolve() / WORKFLOW), "--nocolor"]
    # What is done stays done, unless what it was made of is newer: a changed library does not undo results.
    command += ["--rerun-incomplete", "--rerun-triggers", "mtime", "--keep-going", "--nolock"]
    command += ["--scheduler", "greedy"]  # the next by priority, without a solver of integer programs
    return [*command, *more]


@contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """A lock on the folder, which the workflow inherits: it is held while either is alive, and no longer.

    A workflow whose benchmark was killed needs some seconds to end.
    """
    with (folder / ".lock").open("w") as file:
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() - began > GRACE + 1:
                    raise Failure(
                        f"Another benchmark runs in {folder}: wait for it, or name another folder with --out."
                    ) from error
                time.sleep(0.2)
        yield file.fileno()


def _follow(command: list[str], log: Path, lock: int) -> tuple[int, list[int]]:
    """Run Snakemake; its words go to a file, and the jobs it has done, with the time left, to the terminal.

    What it returned, and the signals that ended it: `guard.py` sees that none of its processes stays behind.
    """
    console, began = Console(), time.monotonic()
    first: int | None = None
    line = [sys.executable, str(GUARD), str(GRACE), *command]
    with log.open("a", encoding="utf-8") as file, _signals() as signals:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(
            line, **pipes, text=True, errors="replace", pass_fds=(lock,), start_new_session=True
        ) as process:
            assert process.stdout is not None
            signals.begin(process)
            for said in process.stdout:
                file.write(said)
                file.flush()
                if said.startswith(("Error", "WorkflowError", "MissingInput")):
                    console.print(Text(said.rstrip(), style="bold red"), soft_wrap=True)
                if match := STEPS.search(said):
                    done, total = map(int, match.groups())
                    first = done - 1 if first is None else first
                    left = (time.monotonic() - began) / (done - first) * (total - done)
                    console.print(Text(f"{done} of {total} jobs done, about {duration(left)} left"))
        return process.returncode, signals.seen


class _Signals:
    """Signals that end the command: the first asks the workflow to end, the second kills it."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.process: subprocess.Popen[str] | None = None

    def begin(self, process: subprocess.Popen[str]) -> None:
        """This is the workflow, from now on; a signal may have come before."""
        self.process = process
        if self.seen:
            self._ask()

    def __call__(self, number: int, _frame: Any) -> None:
        self.seen.append(number)
        if self.process is None or self.process.poll() is not None:
            return
        if len(self.seen) == 1:
            self._ask()
        else:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _ask(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextmanager
def _signals() -> Iterator[_Signals]:
    """SIGINT, SIGTERM and SIGHUP, unless they are ignored, as Ctrl-C is in the background."""
    found = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield found  # no other thread gets signals
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, found)
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(42.0), duration(600.0), duration(9000.0)
    ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def chosen_config(given: Mapping[str, Any], file: Path | None, folder: Path) -> Config:
    """The options of a benchmark: those given, then those of a config file, of the folder, and the defaults."""
    source = file if file is not None else folder / FILE if (folder / FILE).is_file() else None
    options: dict[str, Any] = {} if source is None else asdict(read_config(source))
    options |= {name: _listed(name, value) for name, value in given.items() if value is not None}
    for name in ("tasks", "methods"):
        if name not in options:
            raise Failure(f"There are no {name}: name some with --{name}, or a --config that has them.")
    return Config(**options)


def _listed(name: str, value: Any) -> Any:
    """What an option stands for: `a,b` is a list, of whole numbers where they are meant; groups have short names."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if name in ("budgets", "seeds"):
        if wrong := [part for part in parts if not part.isdecimal()]:
            raise Failure(f"--{name} has {wrong[0]!r}: expected whole numbers, separated by commas.")
        return tuple(map(int, parts))
    groups = {"paper": tasks.names(), "sbibm": tasks.sbibm.names(), "simformer": tasks.simformer.names()}
    groups = groups if name == "tasks" else {"all": list(METHODS)} if name == "methods" else {}
    expanded = [each for part in parts for each in groups.get(part, [part])]
    return tuple(str(Path(each).resolve()) if each.endswith(".py") else each for each in expanded)
