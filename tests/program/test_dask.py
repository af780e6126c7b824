"""The workers of dask: the same data, also when one of them is killed."""

import os
import time

import jax
import numpyro
import numpyro.distributions as dist
import pytest
from distributed import Client, LocalCluster

import cpejax as cpe

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def client():
    """Two processes; as a user's, they neither check annotations nor turn warnings into errors."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        yield client


def epidemic(folder=None):
    """A program whose simulator, where there is a folder, kills its worker the first time it has a large value."""

    def simulator(rng, a):
        if folder is not None and a > 1.5:
            try:
                os.close(os.open(f"{folder}/{a:.9f}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os._exit(1)
        time.sleep(0.001)
        return a + rng.normal()

    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(simulator, a, host=True))

    return program


@pytest.fixture(scope="module")
def alone():
    return cpe.simulate(epidemic(), 60, key=KEY)


def test_dask_returns_what_one_returns_alone(client, alone):
    found = cpe.simulate(epidemic(), 60, key=KEY, workers=client, timeout=60)
    assert all((found[name] == alone[name]).all() for name in alone)


@pytest.mark.slow
def test_also_when_workers_die(client, alone, tmp_path):
    found = cpe.simulate(epidemic(tmp_path), 60, key=KEY, workers=client, timeout=60)
    assert all((found[name] == alone[name]).all() for name in alone)
    assert len(list(tmp_path.iterdir())) == (alone["a"] > 1.5).sum() > 0


def test_a_client_that_is_closed():
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        closed = Client(cluster)
        closed.close()
        with pytest.raises(RuntimeError, match="given as workers takes no more work: its client is closed"):
            cpe.simulate(epidemic(), 60, key=KEY, workers=closed)
