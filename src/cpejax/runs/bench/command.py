"""`cpejax bench`: write the config, run the workflow, show how far it is."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from cpejax import tasks
from cpejax.runs.bench.config import FILE, WORKFLOW, Config, read_config
from cpejax.runs.bench.methods import METHODS
from cpejax.runs.model_file import Failure

SNAKEFILE = Path(__file__).with_name("Snakefile")
LOG = "bench.log"
STEPS = re.compile(r"(\d+) of (\d+) steps \(\d+%\) done")
SLURM = ("--executor", "slurm", "--retries", "1", "--default-resources", "mem_mb=3000", "runtime=60")


def run_workflow(config: Config, folder: Path, *, jobs: int, slurm: bool, more: list[str]) -> Path:
    """Run what is not done yet; the page.

    **Arguments:**

    - `jobs`: cores of this machine, or jobs on a cluster at a time.
    - `slurm`: run on a cluster.
    - `more`: further options of Snakemake.
    """
    needed = ["snakemake", *(["snakemake_executor_plugin_slurm"] if slurm else [])]
    if lacking := [name for name in needed if find_spec(name) is None]:
        raise Failure(f"{lacking[0]} is not installed: pip install 'cpejax[bench]'.")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder) as lock:
        config.write(folder)
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), "--directory", str(folder)]
        command += ["--configfile", str(folder.resolve() / WORKFLOW), "--nocolor"]
        # What is done stays done, unless what it was made of is newer: a changed library does not undo results.
        command += ["--rerun-incomplete", "--rerun-triggers", "mtime", "--keep-going", "--nolock"]
        command += ["--jobs" if slurm else "--cores", str(jobs), *(SLURM if slurm else ()), *more]
        code = _follow(command, folder / LOG, lock)
    page = folder / "index.html"
    if code:
        raise Failure(
            f"Some jobs failed: {folder / LOG} says which and why. What is done is kept: the same command resumes."
        )
    return page


@contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """A lock on the folder, which the workflow inherits: it is held while either is alive, and no longer."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Failure(
                f"Another benchmark runs in {folder}: wait for it, or name another folder with --out."
            ) from error
        yield file.fileno()


def _follow(command: list[str], log: Path, lock: int) -> int:
    """Run Snakemake; its words go to a file, and the jobs it has done, with the time left, to the terminal."""
    console, began = Console(), time.monotonic()
    first: int | None = None
    with log.open("a", encoding="utf-8") as file:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", pass_fds=(lock,)
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                if line.startswith(("Error", "WorkflowError", "MissingInput")):
                    console.print(Text(line.rstrip(), style="bold red"), soft_wrap=True)
                if match := STEPS.search(line):
                    done, total = map(int, match.groups())
                    first = done - 1 if first is None else first
                    left = (time.monotonic() - began) / (done - first) * (total - done)
                    console.print(Text(f"{done} of {total} jobs done, about {duration(left)} left"))
        return process.returncode


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
    groups = {"tasks": {"paper": tasks.names(), "sbibm": tasks.sbibm.names()}, "methods": {"all": list(METHODS)}}
    expanded = [each for part in parts for each in groups.get(name, {}).get(part, [part])]
    return tuple(str(Path(each).resolve()) if each.endswith(".py") else each for each in expanded)
