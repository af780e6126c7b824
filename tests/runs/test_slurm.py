"""A real Slurm: an array of jobs, workers that are jobs, and jobs that are cancelled (`make test-slurm`)."""

import json
import os
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
