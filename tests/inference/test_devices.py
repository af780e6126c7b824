"""Training on several devices, of one process and of two, equals training on one but for rounding."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import cpejax as cpe
from cpejax.util.cores import cores
from cpejax.util.devices import Devices

SCRIPT = """
import json, sys
import jax
if len(sys.argv) > 3:  # one of two processes
    jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[3]))
import numpyro, numpyro.distributions as dist
import cpejax as cpe

def program():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", 3):
        numpyro.sample("y", dist.Normal(mu, 1.0))

model, tiny = cpe.Model(program, observed=["y"]), cpe.CPE(width=4, depth=1, hidden=4, components=2)
rows = cpe.simulate(model, 500, key=jax.random.key(0))

def losses(epochs, devices, checkpoint=None):
    training = cpe.Training(max_epochs=epochs, schedule="constant", devices=devices)
    found = cpe.fit(model, rows, method=tiny, training=training, key=jax.random.key(1), checkpoint=checkpoint)
    return found.history.train + found.history.validation

if len(sys.argv) > 3:
    out = [len(jax.devices()), losses(2, None)]
else:
    out = [len(jax.devices()), losses(2, 1), losses(2, 4, sys.argv[1]), losses(2, 1, sys.argv[1])]
print(json.dumps(out))
"""


def started(*arguments, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_four_devices_train_as_one_and_checkpoints_move_between_them(tmp_path):
    number, one, four, moved = result(started(tmp_path, devices=4))
    assert number == 4
    np.testing.assert_allclose(four, one, rtol=1e-4)
    assert moved == four  # on one device, of the checkpoint that four have ended


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = [started(tmp_path, port, number) for number in range(2)]
    (count, first), (_, second) = map(result, both)
    _, one, *_ = result(started(tmp_path / "one", devices=4))
    assert count == 2
    assert first == second
    np.testing.assert_allclose(first, one, rtol=1e-4)


def test_devices_that_are_not_there_are_an_error():
    with pytest.raises(ValueError, match=r"devices=64, but JAX has \d+ \(cpu\).*force_host_platform_device_count=64"):
        Devices(64)
    with pytest.raises(ValueError, match="devices must be a whole number of at least 1, found 0"):
        cpe.Training(devices=0)


def test_a_batch_is_divided_evenly():
    devices = Devices(1)
    devices.count = 3
    with pytest.raises(ValueError, match="batch_size=100 cannot be divided among 3 devices"):
        devices.check_batch(100)


def test_what_is_for_cpus_is_off_on_accelerators(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert cores() == 1
