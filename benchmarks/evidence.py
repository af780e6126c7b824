"""Log evidences of refined draws beside exact ones, on the tasks where these are known.

    cpejax bench --tasks paper --methods CPE --seeds 0 --out bench   # fits with default settings, saved
    python benchmarks/evidence.py bench
    python benchmarks/evidence.py --docs                             # the table of docs/refinement.md

Draws are refined by the program's own density and by the learned likelihood, for the five observations of each task.
Exact are closed forms (linear Gaussian, mixture 1) and sums over grids (hierarchical, tree, two moons). Results are
written to benchmarks/results/evidence.json as they come.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import page
from sbc import fit_of
from scipy.special import logsumexp
from scipy.stats import norm

import cpejax as cpe

RESULTS = Path(__file__).parent / "results" / "evidence.json"
OBSERVATIONS, DRAWS = 5, 10_000


def linear_gaussian(given):
    """`x ~ N(0, .2 I)`."""
    return norm.logpdf(given["x"], scale=np.sqrt(0.2)).sum()


def gaussian_mixture_1(given):
    """A uniform prior of 20 by 20, and of each component what is inside it."""
    x = np.asarray(given["x"], float)
    inside = [np.log(norm.cdf((10 - x) / s) - norm.cdf((-10 - x) / s)).sum() for s in (1.0, 0.1)]
    return logsumexp(inside) + np.log(0.5) - 2 * np.log(20)


def hierarchical(given):
    """Given sigma a coordinate of x over the three groups is N(0, v I + 11'), `v = 1 + sigma^2`."""
    x = np.asarray(given["x"], float)
    sigma, width = np.linspace(0, 30, 300_001, retstep=True)
    v = 1 + sigma**2
    quadratic = ((x**2).sum() - (x.sum(0) ** 2).sum() / (v + 3)) / v
    log_likelihood = -0.5 * (quadratic + 2 * (2 * np.log(v) + np.log(v + 3)) + 6 * np.log(2 * np.pi))
    return logsumexp(norm.logpdf(sigma) + np.log(2) + log_likelihood) + np.log(width)


def tree(given):
    """Given the root the branches are independent."""
    x = [float(given[f"x{i}"]) for i in range(1, 5)]
    b, width = np.linspace(-15, 15, 6001, retstep=True)
    root, step = np.linspace(-9, 9, 601, retstep=True)
    prior = norm.logpdf(b, root[:, None], 1.0)
    left = norm.logpdf(x[0], np.sin(b) ** 2, 0.2) + norm.logpdf(x[1], 0.1 * b**2, 0.2)
    right = norm.logpdf(x[2], 0.1 * b**2, 0.6) + norm.logpdf(x[3], np.cos(b) ** 2, 0.1)
    branches = sum(logsumexp(prior + each, axis=1) + np.log(width) for each in (left, right))
    return logsumexp(norm.logpdf(root) + branches) + np.log(step)


def two_moons(given):
    """A uniform prior of 2 by 2; the crescent's density at each cell of a grid."""
    x = np.asarray(given["x"], float)
    side = (np.arange(4000) + 0.5) / 2000 - 1
    a, b = np.meshgrid(side, side)
    u = x[0] - 0.25 + np.abs(a + b) / np.sqrt(2), x[1] - (b - a) / np.sqrt(2)
    distance = np.hypot(*u)
    r = np.where(u[0] < 0, -distance, distance)
    return np.log((norm.pdf(r, 0.1, 0.01) / (np.pi * distance)).mean())


EXACT = {each.__name__: each for each in (linear_gaussian, gaussian_mixture_1, hierarchical, tree, two_moons)}


def measure(name, folder):
    """The exact log evidence of each observation, and what refined draws say of it."""
    task = cpe.tasks.get(name)
    posterior = cpe.load(fit_of(name, folder), task)
    rows = []
    for seed in range(OBSERVATIONS):
        given = task.observation(seed)
        row = {"exact": float(EXACT[name](given))}
        for by in ("program", "learned") if posterior.emulator else ("program",):
            about = posterior.sample(DRAWS, given=given, key=jax.random.key(seed), refine=by).posterior.attrs
            row[by] = {k: about[k] for k in ("log_evidence", "log_evidence_error", "evidence_by", "pareto_k")}
        rows.append(row)
    return rows


def document(found):
    """A row for each task."""
    lines = []
    for name, rows in found.items():
        cells = [name.replace("_", " "), " ".join(f"{row['exact']:.2f}" for row in rows)]
        for by in ("program", "learned"):
            each = [
                (row[by]["log_evidence"] - row["exact"], row[by]["log_evidence_error"]) for row in rows if by in row
            ]
            cells.append(" ".join(f"{difference:+.3f}±{error:.3f}" for difference, error in each) or "–")
        lines.append(cells)
    head = ["task", "exact log evidence", "difference, by the program", "difference, by the learned likelihood"]
    page.fill(Path(__file__).parents[1] / "docs" / "refinement.md", {"evidence": page.table(head, lines)})


def main(arguments):
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments == ["--docs"]:
        document(found)
        return
    for name in EXACT:
        if fit_of(name, arguments[0]).exists():
            found[name] = measure(name, arguments[0])
            print(name, json.dumps(found[name]), flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
