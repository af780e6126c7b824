"""Do the fast metrics agree with the published ones, what do they cost, and do two samplers give the same reference?

    python benchmarks/metrics.py agreement    # C2ST, fast against published, 53 pairs (an hour)
    python benchmarks/metrics.py references   # two samplers against each other, every task and observation (an hour)
    python benchmarks/metrics.py widths       # H-min of two moons with a wrong radial width (minutes)
    python benchmarks/metrics.py timing       # seconds and memory at 10,000 x 10-d (idle machine, minutes)
    python benchmarks/metrics.py tables       # what was found, as Markdown

Results are written to benchmarks/results/metrics.json as they come; what is there already is not computed again, unless
`--again` (for `agreement`: the fast values).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cpejax import metrics, tasks
from cpejax.tasks import Task, _reference, gaussian_mixture_2, two_moons
from cpejax.util.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "metrics.json"
N = 10_000
Matrix = np.ndarray


def stored(section: str) -> dict[str, Any]:
    return json.loads(RESULTS.read_text()).get(section, {}) if RESULTS.exists() else {}


def store(section: str, label: str, row: dict[str, Any]) -> None:
    """Add one result. The file is read anew each time: another section may be under way."""
    everything = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    everything.setdefault(section, {})[label] = row
    write_atomically(RESULTS, (json.dumps(everything, indent=1) + "\n").encode())


# ---- the fast C2ST against the published one


def exact(x: Matrix, rng: np.random.Generator) -> Matrix:
    return x


def shifted(x: Matrix, rng: np.random.Generator) -> Matrix:
    """Every mean wrong by .3 standard deviations."""
    return x + 0.3 * x.std(0)


def scaled(x: Matrix, rng: np.random.Generator) -> Matrix:
    """Every standard deviation a quarter too large."""
    return x.mean(0) + 1.25 * (x - x.mean(0))


def blurred(x: Matrix, rng: np.random.Generator) -> Matrix:
    """Noise of .15 standard deviations on every coordinate."""
    return x + 0.15 * x.std(0) * rng.normal(size=x.shape)


def permuted(x: Matrix, rng: np.random.Generator) -> Matrix:
    """The right marginals, independent of one another."""
    return rng.permuted(x, axis=0)


def unimodal(x: Matrix, rng: np.random.Generator) -> Matrix:
    """A Gaussian with the right mean and covariance."""
    return rng.multivariate_normal(x.mean(0), np.cov(x.T).reshape(x.shape[1], -1), len(x))


FAULTS: tuple[Callable[[Matrix, np.random.Generator], Matrix], ...] = (
    exact,
    shifted,
    scaled,
    blurred,
    permuted,
    unimodal,
)


def pair(task: Task, fault: Callable, seed: int) -> tuple[Matrix, Matrix]:
    """Draws with a fault, and a reference."""
    rng = np.random.default_rng([seed, *fault.__name__.encode()])
    assert task.exact is not None
    given = task.observation(seed)
    draws, reference = (task.ravel(task.exact(given, N, rng)) for _ in range(2))
    return fault(draws, rng), reference


def agreement(again: bool) -> None:
    for name in sorted(tasks.names(), key=lambda name: tasks.get(name).theta_dim):
        task = tasks.get(name)
        for i, fault in enumerate(FAULTS):
            if fault is permuted and task.theta_dim == 1:  # nothing to permute
                continue
            seed = tasks.SEEDS[i % len(tasks.SEEDS)]
            label = f"{name}, {fault.__name__}"
            row = stored("agreement").get(label, {"observation": seed, "dimensions": task.theta_dim})
            draws, reference = pair(task, fault, seed)
            if "fast" not in row or again:
                row["fast"] = metrics.c2st(draws, reference)
                store("agreement", label, row)
            if "published" not in row:
                row["published"] = metrics.c2st(draws, reference, method="mlp")
                store("agreement", label, row)
            gap = row["fast"] - row["published"]
            if abs(gap) > 0.01 and "seeds" not in row:  # how much of it is chance: other folds and initial weights
                row["seeds"] = {
                    method: [metrics.c2st(draws, reference, method=method, seed=seed) for seed in (2, 3)]
                    for method in ("fast", "mlp")
                }
                store("agreement", label, row)
            print(f"{label:32s} fast {row['fast']:.4f}  published {row['published']:.4f}  {gap:+.4f}", flush=True)
    print(agreement_table())


def agreement_table() -> str:
    rows = [row for row in stored("agreement").values() if "published" in row]
    gaps = np.array([row["fast"] - row["published"] for row in rows])
    lines = ["| task | " + " | ".join(f.__name__ for f in FAULTS) + " |", "|---" * (len(FAULTS) + 1) + "|"]
    for name in tasks.names():
        cells = []
        for fault in FAULTS:
            row = stored("agreement").get(f"{name}, {fault.__name__}", {})
            cells.append(f"{row['fast']:.3f} / {row['published']:.3f}" if "published" in row else "")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    if len(gaps):
        spread = f"largest {abs(gaps).max():.4f}, mean {gaps.mean():+.4f}, standard deviation {gaps.std():.4f}"
        lines += ["", f"{len(gaps)} pairs, {(abs(gaps) <= 0.01).sum()} within .01; gaps: {spread}."]
        lines += ["", "| further apart | fast, three seeds | published, three seeds |", "|---|---|---|"]
    for label, row in stored("agreement").items():
        if "seeds" in row:
            cells = [[row[name], *row["seeds"][method]] for name, method in (("fast", "fast"), ("published", "mlp"))]
            lines.append(f"| {label} | " + " | ".join(" ".join(f"{x:.3f}" for x in cell) for cell in cells) + " |")
    return "\n".join(lines)


# ---- two samplers of every reference

SECOND = {"hierarchical": "slice", "linear_gaussian": "slice", "slcp": "slice"}  # the others: rejection


def modes(name: str, theta: Matrix, given: dict[str, np.ndarray]) -> np.ndarray:
    """Which mode each draw belongs to."""
    if name == "two_moons":
        return (theta.sum(1) > 0).astype(int)
    if name == "distractors":
        return (theta[:, 0] > 0).astype(int)
    if name in ("hyperboloid", "tree"):
        return 2 * (theta[:, -2] > 0) + (theta[:, -1] > 0)
    if name == "gaussian_mixture_2":
        gap = given["x"] - theta.reshape(-1, 3, 2)
        precision = np.linalg.inv(gaussian_mixture_2.COVARIANCE)
        return np.argmin(np.einsum("nki,kij,nkj->nk", gap, precision, gap), axis=1)
    return np.zeros(len(theta), int)


def two_samplers(name: str, seed: int) -> dict[str, Any]:
    """A reference and an independent one: C2ST, the largest R-hat, and how far the weights of the modes are apart.

    `weights` is the largest difference in standard errors. SLCP's chains do not jump between its four sign-symmetric
    modes, so there the two are compared up to the signs.
    """
    from arviz_stats.base.array import array_stats

    task = tasks.get(name)
    sampler = SECOND.get(name, "rejection")
    sets = []
    for how in ("exact", sampler):
        tree = _reference.reference(task, seed, sampler=how)
        draws = task.ravel({k: v.values.reshape(25_000, -1) for k, v in tree.posterior.data_vars.items()})
        if name == "slcp":
            draws = np.concatenate([draws[:, :2], np.abs(draws[:, 2:4]), draws[:, 4:]], axis=1)
        sets.append(draws)
    chains = [x.reshape(10, 2500, -1) for x in sets]
    rng = np.random.default_rng(0)
    one, two = (x[rng.permutation(25_000)[:N]] for x in sets)
    share = [np.bincount(modes(name, x, task.observation(seed)), minlength=4) / 25_000 for x in sets]
    spread = np.sqrt(2 * share[0] * (1 - share[0]) / 25_000)
    return {
        "second": sampler,
        "rhat": max(float(np.max(array_stats.rhat(x, chain_axis=0, draw_axis=1, method="rank"))) for x in chains),
        "ess": float(np.min(array_stats.ess(chains[1], chain_axis=0, draw_axis=1, method="bulk"))),
        "c2st": metrics.c2st(two, one),
        "weights": float(np.max(np.abs(share[0] - share[1]) / np.maximum(spread, 1e-4))),
    }


def references(again: bool) -> None:
    for name in tasks.names():
        for seed in tasks.SEEDS:
            label = f"{name}, {seed}"
            row = stored("references").get(label)
            if row is None or again:
                row = two_samplers(name, seed)
                store("references", label, row)
            print(f"{label:24s} {row}", flush=True)
    print(references_table())


def references_table() -> str:
    lines = [
        "| task | the reference | second sampler | R-hat | C2ST, five observations | weights of modes |",
        "|---|---|---|---|---|---|",
    ]
    for name in tasks.names():
        rows = [row for label, row in stored("references").items() if label.startswith(f"{name}, ")]
        if rows:
            scores = ", ".join(f"{row['c2st']:.3f}" for row in rows)
            weights = max(row["weights"] for row in rows)
            lines.append(
                f"| `{name}` | {tasks.get(name).how} | {rows[0]['second']} | {max(row['rhat'] for row in rows):.4f} | "
                f"{scores} | {f'{weights:.1f}' if weights else '·'} |"
            )
    return "\n".join(lines)


# ---- H-min of two moons


def wide_moons(seed: int, factor: int, n: int = N) -> dict[str, Any]:
    """Two moons whose radius has too large a standard deviation: what H-min, ours and the published, say of it."""
    task, right = tasks.get("two_moons"), two_moons.WIDTH
    assert task.exact is not None
    given = task.observation(seed)
    rng = np.random.default_rng([seed, factor])
    reference = task.exact(given, 2 * n, rng)
    try:
        two_moons.WIDTH = factor * right
        draws = task.exact(given, n, rng)
    finally:
        two_moons.WIDTH = right
    return {
        "ours": metrics.hmin(draws, reference)._asdict(),
        "published": metrics.hmin(draws, reference, method="published")._asdict(),
        "c2st": metrics.c2st(draws, reference),
    }


def widths(again: bool) -> None:
    for seed in tasks.SEEDS:
        for factor in (1, 2, 5):
            label = f"observation {seed}, width x {factor}"
            row = stored("widths").get(label)
            if row is None or again:
                row = wide_moons(seed, factor)
                store("widths", label, row)
            print(f"{label}: {row}", flush=True)
    print(widths_table())


def widths_table() -> str:
    lines = ["| radial width | ours (null) | published (null) | C2ST |", "|---|---|---|---|"]
    for factor in (1, 2, 5):
        rows = [row for label, row in stored("widths").items() if label.endswith(f" x {factor}")]
        if rows:
            cells = []
            for method in ("ours", "published"):
                value, null = (np.mean([row[method][which] for row in rows]) for which in ("value", "null"))
                cells.append(f"{value:.3f} ({null:.3f})")
            lines.append(f"| × {factor} | {' | '.join(cells)} | {np.mean([row['c2st'] for row in rows]):.3f} |")
    return "\n".join(lines)


# ---- what they cost

CALLS = {
    "C2ST, fast": lambda x, y: metrics.c2st(x, y),
    "C2ST, published": lambda x, y: metrics.c2st(x, y, method="mlp"),
    "H-min": lambda x, y: metrics.hmin(x, y),
    "H-min, published": lambda x, y: metrics.hmin(x, y, method="published"),
    "MMD": lambda x, y: metrics.mmd(x, y),
    "sliced Wasserstein": lambda x, y: metrics.sliced_wasserstein(x, y),
    "moments": lambda x, y: metrics.moments(x, y),
}


def one_timing(name: str) -> None:
    """In a process of its own, so that the memory is its own: with compilation, and a second call without."""
    rng = np.random.default_rng(0)
    # H-min and the distances put 10,000 against 10,000 and hold as many again for the null.
    draws, reference = rng.normal(size=(N, 10)), rng.normal(size=(2 * N, 10))
    seconds = []
    for _ in range(1 if "published" in name else 2):
        began = time.perf_counter()
        CALLS[name](draws, reference)
        seconds.append(round(time.perf_counter() - began, 2))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"first": seconds[0], "again": seconds[-1], "GiB": round(memory, 2)}))


def timing(again: bool) -> None:
    for name in CALLS:
        row = stored("timing").get(name)
        if row is None or again:
            command = [sys.executable, __file__, "timing", "--only", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = {**json.loads(done.stdout), "cores": len(os.sched_getaffinity(0))}
            store("timing", name, row)
        print(f"{name:20s} {row}", flush=True)
    print(timing_table())


def timing_table() -> str:
    rows = stored("timing")
    lines = ["| metric | seconds | of which compilation | memory, GiB |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['first']:.1f} | {row['first'] - row['again']:.1f} | {row['GiB']:.2f} |"
        for name, row in rows.items()
    ]
    if "C2ST, fast" in rows and "C2ST, published" in rows:
        ratio = rows["C2ST, published"]["first"] / rows["C2ST, fast"]["first"]
        lines += ["", f"The fast C2ST is {ratio:.0f} times faster than the published one."]
    return "\n".join(lines)


def tables(again: bool) -> None:
    for table in (agreement_table, references_table, widths_table, timing_table):
        print(table(), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["agreement", "references", "widths", "timing", "tables"])
    parser.add_argument("--again", action="store_true", help="compute again what is there already")
    parser.add_argument("--only", choices=CALLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        one_timing(options.only)
    else:
        globals()[options.what](options.again)


if __name__ == "__main__":
    main()
