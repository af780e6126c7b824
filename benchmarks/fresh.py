"""The nine tasks with as many simulations as training asks for: what error is left then.

    python benchmarks/fresh.py                    # all tasks that are not there yet: two minutes each
    python benchmarks/fresh.py hyperboloid tree   # some, again
    python benchmarks/fresh.py --docs             # the table of docs/emulation.md

`cpe.fit` without simulations draws new ones for every epoch. C2ST of the draws for the five observations of each task,
as they are, against exact ones. Results are written to benchmarks/results/fresh.json as they come.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
import page
from accuracy import rows_of_tasks

import cpejax as cpe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fresh.json"
OBSERVATIONS, DRAWS = 5, 10_000


def measure(name):
    """C2ST for each observation, and what the fit took."""
    task = cpe.tasks.get(name)
    began = time.perf_counter()
    posterior = cpe.fit(task, key=jax.random.key(1), progress=False)
    seconds = time.perf_counter() - began
    each = []
    for seed in range(OBSERVATIONS):
        tree = posterior.sample(DRAWS, given=task.observation(seed), key=jax.random.key(seed))
        draws, exact = (matrix(task, x) for x in (tree, task.reference(seed)))
        exact = np.random.default_rng(seed).permutation(exact)[:DRAWS]
        each.append(round(cpe.metrics.c2st(draws, exact), 4))
    return {
        "c2st": round(float(np.mean(each)), 4),
        "each": each,
        "epochs": len(posterior.history.train),
        "seconds": round(seconds, 1),
    }


def matrix(task, tree):
    """The draws of all chains, one column a number."""
    return task.ravel({site: tree.posterior[site].values.reshape(-1, *task.shapes[site]) for site in task.parameters})


def document(found):
    """The table, beside the benchmark's fits to 10,000 simulations."""

    def number(x):
        return f"{x:.3f}".removeprefix("0")

    rows = []
    for name, _, fixed, *_ in rows_of_tasks():
        if name in found:
            each = " ".join(map(number, found[name]["each"]))
            rows.append([name.replace("_", " "), number(fixed), number(found[name]["c2st"]), each])
    head = ["task", "10,000 simulations", "fresh ones", "each observation"]
    page.fill(ROOT / "docs" / "emulation.md", {"fresh": page.table(head, rows)})


def main(arguments):
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments == ["--docs"]:
        document(found)
        return
    for name in arguments or [name for name in cpe.tasks.names() if name not in found]:
        found[name] = measure(name)
        print(name, json.dumps(found[name]), flush=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
