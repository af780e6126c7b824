"""Calibration of refined draws: ranks of the true parameters of new simulations, on the nine tasks.

    cpejax bench --tasks paper --methods CPE --seeds 0 --out bench   # fits with default settings, saved
    python benchmarks/sbc.py bench                                   # all tasks that are there
    python benchmarks/sbc.py bench two_moons tree                    # some

Draws are refined by the learned likelihood, for 200 simulations that no fit has seen. Ranks are those of
simulation-based calibration (Talts et al. 2018), of every parameter and of the likelihood of the data, which sees
whether the data are used (Modrák et al. 2023). `p` is the least p-value of a task's chi-square tests, times how many
they are (Bonferroni). Results are written to benchmarks/results/sbc.json as they come.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np
from scipy.stats import chisquare

import cpejax as cpe

RESULTS = Path(__file__).parent / "results" / "sbc.json"
OBSERVATIONS, DRAWS, BINS = 200, 99, 10


def fit_of(name, folder):
    """Where the benchmark has saved the fit."""
    return Path(folder) / "fits" / name / "CPE" / "10000-0" / "posterior"


def measure(name, folder, count):
    """The ranks of a task's parameters, and how uniform they are."""
    task = cpe.tasks.get(name)
    posterior = cpe.load(fit_of(name, folder), task)
    rows = cpe.simulate(task, count, key=jax.random.key(777))  # the fit's are of key 0
    likelihood = posterior.likelihood("learned")
    log_l = jax.jit(lambda values, data: likelihood(values, data))
    began, ranks = time.perf_counter(), []
    for i in range(count):
        given = {site: np.asarray(rows[site][i]) for site in task.observed}
        # One compiled size; of a thousand draws every tenth is nearly independent of the others.
        tree = posterior.sample(1000, given=given, key=jax.random.key(i), refine="learned")
        some = {site: tree.posterior[site].values[0][:: 1000 // (DRAWS + 1)][:DRAWS] for site in task.parameters}
        truth = {site: np.asarray(rows[site][i])[None] for site in task.parameters}
        whole = {site: np.concatenate([truth[site], some[site]]) for site in some}
        quantities = np.concatenate([task.ravel(whole), np.asarray(log_l(whole, given))[:, None]], axis=1)
        ranks.append((quantities[1:] < quantities[0]).sum(0))
    ranks = np.stack(ranks)
    bins = ranks * BINS // (DRAWS + 1)
    p = [float(chisquare(np.bincount(column, minlength=BINS)).pvalue) for column in bins.T]
    return {
        "observations": count,
        "p": round(min(1.0, len(p) * min(p)), 4),
        "mean_rank": np.round((ranks + 0.5).mean(0) / (DRAWS + 1), 3).tolist(),
        "seconds": round(time.perf_counter() - began, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--observations", type=int, default=OBSERVATIONS)
    asked = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in asked.tasks or [n for n in cpe.tasks.names() if fit_of(n, asked.folder).exists()]:
        stored[name] = measure(name, asked.folder, asked.observations)
        print(name, stored[name], flush=True)
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
