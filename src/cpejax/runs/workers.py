"""The workers of the command `cpejax`: processes of this machine, or jobs of Slurm."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from cpejax.runs.model_file import PACKAGE, Failure, ModelFile, belongs

JOBS = 8
"""The number of jobs of Slurm, where it is not said."""
REVIVAL = 30.0
"""Seconds after which jobs that have ended, at the end of their time or with their node, are submitted again."""


def check_option(text: str | None) -> None:
    """An error before anything else is done."""
    if text is not None:
        _parsed(text)


def _parsed(text: str) -> tuple[str, int]:
    kind, _, count = text.partition(":")
    kind, count = ("local", kind) if kind.isdigit() and not count else (kind, count or str(JOBS))
    if kind not in ("local", "slurm") or not count.isdigit() or int(count) < 1:
        raise Failure(
            f"--workers {text}: expected a number of processes on this machine, as in --workers 8, or slurm, or "
            "slurm:20 for 20 jobs of Slurm."
        )
    return kind, int(count)


@contextmanager
def hired(text: str | None, model: ModelFile) -> Iterator[Any]:
    """What `cpe.simulate` takes as workers."""
    if text is None:
        yield None
        return
    _send_along(model)
    kind, count = _parsed(text)
    if kind == "local":
        yield count
        return
    try:
        names = ("dask", "dask_jobqueue", "distributed")
        dask, jobqueue, distributed = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise Failure(f"--workers {text} needs dask-jobqueue ({error}): pip install 'cpejax[cluster]'.") from error
    # Before there is a cluster: one that is built by half warns when it is forgotten.
    missing = [name for name in ("cores", "memory") if dask.config.get(f"jobqueue.slurm.{name}", None) is None]
    if missing:
        raise Failure(
            f"--workers {text}: dask's configuration of a job has no {' and no '.join(missing)}. "
            "Write it into ~/.config/dask/jobqueue.yaml, for instance: jobqueue: {slurm: {cores: 1, memory: 2GB, "
            'walltime: "02:00:00", queue: debug}}.'
        )
    cluster = jobqueue.SLURMCluster()
    over = threading.Event()
    with cluster, distributed.Client(cluster) as client:
        keeper = threading.Thread(target=_revive, args=(cluster, count, over), daemon=True)
        keeper.start()
        try:
            yield client
        finally:
            over.set()
            keeper.join()


def _revive(cluster: Any, count: int, over: threading.Event) -> None:
    while True:
        cluster.scale(jobs=count)
        if over.wait(REVIVAL):
            return


def _send_along(model: ModelFile) -> None:
    """Modules beside the model file go to workers by value: only this machine may have them."""
    folder = model.path.resolve().parent
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or module.__name__ == "__main__":
            continue
        path = Path(file).resolve()
        if path.is_relative_to(folder) and not path.is_relative_to(PACKAGE) and belongs(path, folder):
            cloudpickle.register_pickle_by_value(module)
