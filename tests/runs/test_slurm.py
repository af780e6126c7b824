"""A real Slurm: an array of jobs, workers that are jobs, and whatever can be lost of them (`make test-slurm`)."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe

pytestmark = pytest.mark.slurm
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # jobs cannot import the tests

ROOT = Path(__file__).parents[2]
KEY = jax.random.key(0)
CPEJAX = Path(sys.executable).with_name("cpejax")
JOB = {"cores": 1, "memory": "500MB", "walltime": "00:10:00"}


def simulator(rng, a):
    time.sleep(0.01)
    return a + rng.normal()


def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", cpe.Simulator(simulator, a, host=True))


def jobs():
    found = subprocess.run(["squeue", "-h", "-t", "R", "-o", "%i %j"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in found.stdout.splitlines() if line.endswith("dask-worker")]


def test_jobs_as_workers_of_which_some_are_cancelled(tmp_path):
    from dask_jobqueue import SLURMCluster
    from distributed import Client

    alone = cpe.simulate(program, 1500, key=KEY, workers=1)
    cancelled, over = [], threading.Event()

    def cancel():
        while not over.wait(1.0) and len(cancelled) < 2:
            running = [job for job in jobs() if job not in cancelled]
            if list(tmp_path.glob("sims/rows-*")) and running:
                subprocess.run(["scancel", running[0]], check=True)
                cancelled.append(running[0])

    with SLURMCluster(**JOB, log_directory=str(tmp_path), scheduler_options={"dashboard_address": None}) as cluster:
        cluster.adapt(minimum_jobs=2, maximum_jobs=2)  # a job that has ended is submitted again
        thread = threading.Thread(target=cancel)
        thread.start()
        try:
            with Client(cluster) as client:
                found = cpe.simulate(program, 1500, key=KEY, workers=client, timeout=60, checkpoint=tmp_path / "sims")
        finally:
            over.set()
            thread.join()
    assert cancelled
    assert all(np.array_equal(alone[name], found[name]) for name in alone)


SCRIPT = """
import os, sys, time
import jax, numpyro, numpyro.distributions as dist
import cpejax as cpe
from dask_jobqueue import SLURMCluster
from distributed import Client

def simulator(rng, a):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    return a + rng.normal()

def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", cpe.Simulator(simulator, a, host=True))

def main(workers, n):
    return cpe.simulate(program, n, key=jax.random.key(0), workers=workers, batch=3, timeout=60, checkpoint="sims")

if __name__ == "__main__":
    job = {"cores": 1, "memory": "500MB", "walltime": "00:20:00", "log_directory": "logs", "death_timeout": 10}
    with SLURMCluster(**job, scheduler_options={"dashboard_address": None}) as cluster:
        cluster.adapt(minimum_jobs=2, maximum_jobs=2)
        with Client(cluster) as client:
            main(client, int(sys.argv[1]))
"""


class Run:
    """A caller whose workers are jobs, and ways to disturb it."""

    def __init__(self, folder, n):
        self.folder, self.n, self.process = folder, n, None
        (folder / "script.py").write_text(SCRIPT)

    def there(self):
        return {path.name for path in self.folder.glob("sims/rows-*")}

    def wait_for_rows(self):
        """Until rows have come back since it was called."""
        before = self.there()
        for _ in range(3000):
            if self.process is None or self.process.poll() is not None:
                assert self.process is None or self.process.returncode == -9, "it ended by itself"
                environment = {**os.environ, "PAUSE": "0.05"}
                command = [sys.executable, "script.py", str(self.n)]
                self.process = subprocess.Popen(command, cwd=self.folder, env=environment)
            if self.there() - before:
                return
            time.sleep(0.1)
        pytest.fail("no rows have come back for five minutes")

    def kill_worker(self, rng):
        found = jobs()
        if found:
            subprocess.run(["scancel", str(rng.choice(found))], check=True)

    def kill_node(self, rng):
        node = f"nodename={socket.gethostname().split('.')[0]}"
        subprocess.run(["scontrol", "update", node, "state=down", "reason=test"], check=True)
        time.sleep(1.0)
        subprocess.run(["scontrol", "update", node, "state=resume"], check=False)  # an error if it is back by itself

    def kill_caller(self, rng):
        self.process.kill()
        self.process.wait()


def test_thirty_kills_of_jobs_node_and_caller_change_nothing(tmp_path):
    n, rng, run = 60_000, np.random.default_rng(0), Run(tmp_path, 60_000)
    ways = rng.permutation([run.kill_worker] * 20 + [run.kill_node] * 5 + [run.kill_caller] * 5)
    try:
        for kill in ways:
            run.wait_for_rows()
            time.sleep(rng.uniform(0.0, 1.0))
            kill(rng)
        run.wait_for_rows()
    finally:
        run.kill_caller(rng)
        subprocess.run(["scancel", "--name", "dask-worker"], check=True)
    names = {"__name__": "script"}
    exec(SCRIPT, names)
    quiet = cpe.simulate(names["program"], n, key=KEY)
    assert 0 < len(run.there()) < n
    with contextlib.chdir(tmp_path):
        found = names["main"](2, n)
    assert (found.n, found.dropped) == (n, 0)
    assert all(np.array_equal(quiet[name], found[name]) for name in quiet)


def test_an_array_of_jobs_and_the_command_with_jobs_as_workers(tmp_path):
    environment = {**os.environ, "CPEJAX": str(CPEJAX), "RUN": str(tmp_path / "run"), "SIMULATIONS": "40"}
    environment["MODEL"] = str(ROOT / "examples" / "sir.py")
    script = ROOT / "examples" / "sir_array.sh"
    command = ["sbatch", "--wait", "--array=1-2", "--mem=1500", str(script)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=500)
    assert len(list((tmp_path / "run" / "parts").glob("*.safetensors"))) == 2
    (tmp_path / "jobqueue.yaml").write_text(json.dumps({"jobqueue": {"slurm": JOB | {"log-directory": str(tmp_path)}}}))
    environment["DASK_CONFIG"] = str(tmp_path)
    words = ("--workers", "slurm:1", "--simulations", "40", "--out", str(tmp_path / "other"))
    done = subprocess.run(
        [CPEJAX, "simulate", environment["MODEL"], *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    subprocess.run([CPEJAX, "simulate", environment["MODEL"], "--out", environment["RUN"]], check=True)
    with np.load(tmp_path / "run" / "simulations.npz") as one, np.load(tmp_path / "other" / "simulations.npz") as other:
        assert all(np.array_equal(one[name], other[name]) for name in one)
