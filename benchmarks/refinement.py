"""Refined draws against exact ones, of posteriors that were trained for a short time.

    python benchmarks/refinement.py                  # two moons, SLCP, hierarchical
    python benchmarks/refinement.py tree             # another task
    python benchmarks/refinement.py --docs           # the table of docs/refinement.md, from what is stored

Observations have seeds from 100 on, which no accuracy is reported on. Results are written to
benchmarks/results/refinement.json.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np
import page

import cpejax as cpe

RESULTS = Path(__file__).parent / "results" / "refinement.json"
PAGE = Path(__file__).parents[1] / "docs" / "refinement.md"
SEEDS, DRAWS, STEPS = (100, 101, 102), 10_000, 3000
KEPT = ("effective_sample_size", "pareto_k", "moves", "tempering_steps", "log_evidence", "log_evidence_error")


def measure(name):
    """The C2ST of the flow's draws and of refined ones, and the seconds that these took once compiled."""
    task = cpe.tasks.get(name)
    sims = cpe.simulate(task, 10_000, key=jax.random.key(0))
    posterior = cpe.fit(task, sims, key=jax.random.key(1), training=cpe.Training(steps=STEPS), progress=False)
    rows = []
    for seed in SEEDS:
        given, row = task.observation(seed), {"seed": seed}
        exact = task.ravel(task.exact(given, DRAWS, np.random.default_rng(seed)))
        for how in (False, "program"):
            for key in (0, 1):  # the first compiles
                began = time.perf_counter()
                tree = posterior.sample(DRAWS, given=given, key=jax.random.key(key), refine=how)
                seconds = time.perf_counter() - began
            draws = task.ravel({site: tree.posterior[site].values[0] for site in task.parameters})
            word = "refined" if how else "plain"
            row |= {word: round(cpe.metrics.c2st(draws, exact), 3), f"{word}_seconds": round(seconds, 2)}
        row |= {about: round(tree.posterior.attrs[about], 3) for about in KEPT}
        print(name, row, flush=True)
        rows.append(row)
    return rows


def table(stored):
    """The table of docs/refinement.md."""
    head = [
        "task, observation",
        "flow",
        "refined",
        "effective sample size",
        "Pareto k",
        "weightings",
        "moves",
        "seconds",
    ]
    rows = [
        [
            f"{name.replace('_', ' ')}, {r['seed']}",
            *(f"{r[how]:.3f}"[1:] for how in ("plain", "refined")),
            f"{r['effective_sample_size']:,.0f}",
            f"{r['pareto_k']:.2f}",
            r["tempering_steps"],
            r["moves"],
            f"{r['refined_seconds']:.1f}",
        ]
        for name, each in stored.items()
        for r in each
    ]
    return page.table(head, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=["two_moons", "slcp", "hierarchical"])
    parser.add_argument("--docs", action="store_true")
    asked = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [] if asked.docs else asked.tasks:
        stored[name] = measure(name)
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    page.fill(PAGE, {"refinement": table(stored)})
