"""A simulator that is a program of its own, run from the command line: it reads parameters and prints data.

Nothing is known of the black box but that it takes lines `seed arrivals service` and prints a line of five numbers for
each. It is started once for many rows (`vectorized=True`), because starting it takes longer than running it.

    cpejax infer examples/command_line.py --out queue/
"""

import subprocess
import sys

import numpy as np
import numpyro
import numpyro.distributions as dist

import cpejax as cpe

# Customers arrive and are served one after the other; printed are the mean waiting times of five batches of 20. Any
# program would do: ["./simulate", "--batches", "5"].
BLACK_BOX = """
import random, sys
for line in sys.stdin:
    seed, arrivals, service = line.split()
    draw = random.Random(int(seed)).expovariate
    wait, waits = 0.0, []
    for _ in range(100):
        waits.append(wait)
        wait = max(0.0, wait + draw(float(service)) - draw(float(arrivals)))
    print(*(sum(waits[i : i + 20]) / 20 for i in range(0, 100, 20)))
"""
COMMAND = [sys.executable, "-S", "-c", BLACK_BOX]

observed = ["waits"]
truth = {"arrivals": 0.8, "service": 1.1}
# Mean waits of five batches of customers, printed by the black box for these parameters.
data = {"waits": [0.28, 2.53, 1.6, 1.12, 1.65]}


def queue(rng, arrivals, service):
    """Mean waiting times of five batches, `(rows, 5)`, for arrays of parameters `(rows,)`."""
    seeds = rng.integers(2**31, size=len(arrivals))
    lines = [f"{s} {a:.8g} {b:.8g}" for s, a, b in zip(seeds, arrivals, service, strict=True)]
    done = subprocess.run(COMMAND, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the black box failed: {done.stderr.strip().splitlines()[-1]}")
    return np.array([[float(x) for x in line.split()] for line in done.stdout.splitlines()])


def program():
    """Prior and simulator."""
    arrivals = numpyro.sample("arrivals", dist.LogNormal(0.0, 0.4))
    service = numpyro.sample("service", dist.LogNormal(0.3, 0.4))
    numpyro.sample("waits", cpe.Simulator(queue, arrivals, service, event_shape=(5,), host=True, vectorized=True))
