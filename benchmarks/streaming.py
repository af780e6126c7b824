"""Training on simulations that stay on disk: its speed beside training in memory, and the memory that it takes.

    python benchmarks/streaming.py speed     # 200,000 simulations of 1,000 scalars, streamed and in memory, in turns
    python benchmarks/streaming.py limit     # 1,500,000 of them, 6 GB, by a process that may have 2 GiB
    python benchmarks/streaming.py --tables  # the table in docs/workers.md, from the results

Each fit is a process of its own. The limit is RLIMIT_DATA, which the kernel enforces: of all memory that a process may
write to, whether it does or not. Files that are mapped to be read do not count. Results are written to
benchmarks/results/streaming.json; the simulations go to a temporary folder (--folder), and are removed.
"""

import argparse
import json
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from page import fill, table

import cpejax as cpe
from cpejax.inference import progress, streamed
from cpejax.program.opened import open_simulations
from cpejax.program.probe import Prober
from cpejax.program.simulation_files import packed
from cpejax.util.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "streaming.json"
PAGE = Path(__file__).parents[1] / "docs" / "workers.md"
SCALARS = 1000
PART = 20_000
"""Simulations in a file."""
LIMIT = 2 * 2**30
"""Bytes that a process may have."""
TURNS = 3


def program():
    """A damped oscillation, seen a thousand times."""
    frequency = numpyro.sample("frequency", dist.LogNormal(1.0, 0.5))
    decay = numpyro.sample("decay", dist.LogNormal(0.0, 0.5))
    phase = numpyro.sample("phase", dist.Normal(0.0, 1.0))
    time = jnp.linspace(0.0, 3.0, SCALARS)
    mean = jnp.exp(-decay * time) * jnp.sin(frequency * time + phase)
    numpyro.sample("y", dist.Normal(mean, 0.5).to_event(1))


def draw(rng):
    """A part, drawn by NumPy in a tenth of the time."""
    x = rng.standard_normal((PART, 3), np.float32)
    frequency, decay, phase = np.exp(1.0 + 0.5 * x[:, 0]), np.exp(0.5 * x[:, 1]), x[:, 2]
    time = np.linspace(0.0, 3.0, SCALARS, dtype=np.float32)
    y = np.exp(-decay[:, None] * time) * np.sin(frequency[:, None] * time + phase[:, None])
    y += np.float32(0.5) * rng.standard_normal(y.shape, np.float32)
    return {"frequency": frequency, "decay": decay, "phase": phase, "y": y}


MODEL = cpe.Model(program, observed=["y"])


def make(folder, n):
    """A folder of `n` simulations, as an array of jobs makes it: part by part."""
    prober, of = Prober(MODEL.bound, MODEL.graph), n // PART
    for number in range(1, of + 1):
        found = draw(np.random.default_rng([0, number]))
        about = {"program": MODEL.graph.fingerprint, "n": n, "key": [0, 0], "part": [number, of]}
        write_atomically(folder / f"part-{number:04d}-of-{of}.safetensors", packed(found, about, prober(found)))


def fit(folder, how, epochs, limit):
    """In a process of its own: rows a second, once it is compiled, and the largest memory in GiB; as JSON."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    streamed.READ_WHOLE = 0
    simulations = open_simulations(folder)
    if how == "memory":
        simulations = {name: simulations[name] for name in MODEL.graph.sites}
    moments, peak, over, shown = [], [0], threading.Event(), progress.Bar.update

    def update(self, epoch, of, history):
        shown(self, epoch, of, history)
        moments.append(time.monotonic())

    def watch():
        while not over.wait(0.02):
            text = Path("/proc/self/status").read_text()
            peak[0] = max(peak[0], int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) * 1024)

    progress.Bar.update = update
    threading.Thread(target=watch, daemon=True).start()
    training = cpe.Training(max_epochs=epochs, schedule="constant", learning_rate=2e-4)
    # Without the emulator, which is off where simulations are streamed.
    posterior = cpe.fit(MODEL, simulations, key=jax.random.key(1), training=training, emulate=False)
    over.set()
    rows = 0.9 * posterior.n_simulations  # in memory an epoch has nine of ten
    if how == "streamed":
        blocks = streamed.Blocks(simulations, MODEL.graph, key=jax.random.fold_in(jax.random.key(1), 6))
        held_out = round(streamed.held_out_of(training, blocks).validation * len(blocks.sampled))
        blocks.hold_out(blocks.sampled[:held_out], training.batch_size)
        rows = blocks.rows
    speed = rows * (len(moments) - 1) / (moments[-1] - moments[0])
    history = posterior.history
    gain = history.held_out["log_prob"] - history.held_out["prior"]
    found = {"rows_per_second": round(speed), "anonymous_gib": peak[0] / 2**30, "epochs": len(moments)}
    print(json.dumps({**found, "validation": [history.validation[0], history.best], "gain": gain}))


def run(folder, how, epochs, limit=False):
    words = [sys.executable, __file__, "fit", str(folder), how, str(epochs), *(["--limit"] if limit else [])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(how, found, flush=True)
    return found


def speed(folder):
    """Rows a second, in turns."""
    make(folder, 200_000)
    turns = [(run(folder, "memory", 3), run(folder, "streamed", 3)) for _ in range(TURNS)]
    ratios = [two["rows_per_second"] / one["rows_per_second"] for one, two in turns]
    memory, from_disk = (list(each) for each in zip(*turns, strict=True))
    return {"memory": memory, "streamed": from_disk, "ratio": statistics.median(ratios)}


def limit(folder):
    """A pass over 6 GB."""
    make(folder, 1_500_000)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    found = run(folder, "streamed", 1, limit=True)
    del found["rows_per_second"]  # its speed is measured beside that in memory
    return {**found, "gb": size, "limit_gib": LIMIT / 2**30}


def tables(found):
    """Put the results into the page."""
    parts = []
    if "speed" in found:
        rows = []
        for how, words in (("memory", "in memory"), ("streamed", "streamed")):
            each = [turn["rows_per_second"] for turn in found["speed"][how]]
            memory = max(turn["anonymous_gib"] for turn in found["speed"][how])
            rows.append([words, f"{statistics.median(each):,.0f}", f"{memory:.1f}"])
        parts.append(table(["200,000 simulations of 1,000 scalars", "rows a second", "GiB"], rows))
        share = 100 * found["speed"]["ratio"]
        both = ([turn["rows_per_second"] for turn in found["speed"][how]] for how in ("memory", "streamed"))
        turns = ", ".join(f"{100 * two / one:.0f}" for one, two in zip(*both, strict=True))
        parts.append(
            f"Streamed, training has {share:.0f} % of its speed in memory (the median of {TURNS} turns: {turns})."
        )
    if "limit" in found:
        one = found["limit"]
        parts.append(
            f"A pass over {one['gb']:.1f} GB by a process that the kernel allows {one['limit_gib']:.0f} GiB "
            f"(`RLIMIT_DATA`) took {one['anonymous_gib']:.1f} GiB at most."
        )
    fill(PAGE, {"streaming": "\n\n".join(parts)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["speed", "limit"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--limit", action="store_true")
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    if arguments.what[0] == "fit":
        fit(Path(arguments.what[1]), arguments.what[2], int(arguments.what[3]), arguments.limit)
        sys.exit()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.tables:
        for what in arguments.what:
            folder = Path(tempfile.mkdtemp(dir=arguments.folder))
            try:
                results[what] = {"speed": speed, "limit": limit}[what](folder)
            finally:
                shutil.rmtree(folder)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    tables(results)
