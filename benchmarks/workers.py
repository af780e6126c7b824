"""The overhead of workers: what a row takes beyond its simulator, and how much faster two workers are than one.

    python benchmarks/workers.py                # processes and dask
    python benchmarks/workers.py slurm          # jobs of Slurm, where there is one
    python benchmarks/workers.py --tables       # the tables in docs/workers.md, from the results

Simulators sleep, so that the figures are of the overhead, not of the processor. Each batch that comes back is written
to disk, as with a checkpoint. The overhead of a row is the time that all rows take, with workers that are there and
have the simulator, times the number of workers, divided by the number of rows, less what the simulator takes: waiting
for the slowest worker at the end counts. What it takes until the first row is back is measured separately. Results are
written to benchmarks/results/workers.json.
"""

import argparse
import json
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import numpy as np
from page import fill, table

from cpejax.program.calls import Call
from cpejax.program.crew import crew_of
from cpejax.program.dispatch import Dispatch, Limits, Rows
from cpejax.util.files import pack_arrays, write_atomically

RESULTS = Path(__file__).parent / "results" / "workers.json"
PAGE = Path(__file__).parents[1] / "docs" / "workers.md"
ROWS = {1: 4000, 10: 1000, 100: 100, 1000: 20}
"""Rows of each worker, by the milliseconds of the simulator."""
WORKERS = 2
WORDS = {"processes": "2 processes", "dask": "2 processes of dask", "slurm": "2 jobs of Slurm, by dask-jobqueue"}


def seconds(crew, milliseconds, rows):
    """What all rows take, by workers that are there and have the simulator."""

    def simulator(rng, x):
        time.sleep(milliseconds / 1000)
        return x

    function = cloudpickle.dumps(simulator)
    crew.prepare([function])
    _run(crew, function, 2 * WORKERS)
    return _run(crew, function, rows)


def _run(crew, function, rows):
    seeds = np.zeros((rows, 2), np.uint32)
    units = list(np.arange(rows)[:, None])
    given = Rows(Call(function, (), False, False, None), "simulator", seeds, [np.zeros(rows)], units)
    with tempfile.TemporaryDirectory() as folder:

        def arrived(which, data):
            write_atomically(Path(folder) / f"rows-{which[0]}", pack_arrays({"rows": which, "data": data}, {}))

        began = time.monotonic()
        Dispatch(given, range(rows), crew, Limits(), arrived, lambda *_: None).run()
        return time.monotonic() - began


@contextmanager
def workers(kind, count):
    """What `cpe.simulate` takes as workers."""
    if kind == "processes":
        yield count
        return
    from distributed import Client, LocalCluster

    if kind == "dask":
        cluster = LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=":0")
    else:
        from dask_jobqueue import SLURMCluster

        cluster = SLURMCluster(cores=1, memory="500MB", walltime="00:30:00")
        cluster.scale(jobs=count)
    with cluster, Client(cluster) as client:
        client.wait_for_workers(count, timeout=300)
        yield client


def overheads(kind):
    """Milliseconds of overhead of a row, by the milliseconds of its simulator, and the seconds until a first row."""
    began = time.monotonic()
    out = {}
    with workers(kind, WORKERS) as given:
        for milliseconds, rows in ROWS.items():
            crew = crew_of(given)
            try:
                if not out:
                    function = cloudpickle.dumps(lambda *x: x[1])
                    crew.prepare([function])
                    _run(crew, function, 1)
                    out["start"] = round(time.monotonic() - began, 1)
                    crew.close()
                    crew = crew_of(given)
                taken = seconds(crew, milliseconds, rows * WORKERS) / rows
            finally:
                crew.close()
            out[str(milliseconds)] = round(1000 * taken - milliseconds, 2)
            print(kind, milliseconds, out[str(milliseconds)], flush=True)
    return out


def speedup():
    """How much faster two processes are than one, of 2,000 rows of 10 ms."""
    times = []
    for count in (1, 2):
        crew = crew_of(count)
        try:
            times.append(seconds(crew, 10, 2000))
        finally:
            crew.close()
    return round(times[0] / times[1], 2)


def tables(results):
    """Put the results into the page."""
    head = ["simulator", *(f"{ms:,} ms" for ms in ROWS), "first row after"]
    rows = [
        [WORDS[kind], *(results[kind][str(ms)] for ms in ROWS), f"{results[kind]['start']} s"]
        for kind in WORDS
        if kind in results
    ]
    faster = f"With 2,000 rows of 10 ms two processes are {results['speedup']} times as fast as one."
    fill(PAGE, {"overhead": table(head, rows) + "\n\n" + faster})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=["processes", "dask"])
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.tables:
        for kind in arguments.kinds:
            found[kind] = overheads(kind)
            if kind == "processes":
                found["speedup"] = speedup()
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    tables(found)
