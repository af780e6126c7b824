"""Do the fast metrics agree with the published ones, and what do they cost?

    python benchmarks/metrics.py agreement --out agreement.json   # C2ST, fast against published, 36 pairs (hours)
    python benchmarks/metrics.py timing                           # seconds and memory at 10,000 x 10-d
    python benchmarks/metrics.py widths                           # H-min of two moons with a wrong radial width
    python benchmarks/metrics.py references                       # two samplers against each other, every task and seed

`agreement` resumes from its file: pairs already there are not computed again; `--fast-only` recomputes the fast values.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from arviz_stats.base.array import array_stats

from cpejax import _reference, metrics, tasks
from cpejax.tasks import Task, two_moons


def exact(x, rng):
    return x


def shifted(x, rng):
    """Every mean wrong by a tenth of a standard deviation."""
    return x + 0.1 * x.std(0)


def blurred(x, rng):
    """Noise of .15 standard deviations on every coordinate."""
    return x + 0.15 * x.std(0) * rng.normal(size=x.shape)


def contaminated(x, rng):
    """Every tenth draw twice as far from the mean."""
    far = rng.uniform(size=len(x)) < 0.1
    return np.where(far[:, None], x.mean(0) + 2 * (x - x.mean(0)), x)


FAULTS: tuple[Callable, ...] = (exact, shifted, blurred, contaminated)


def pair(task: Task, fault: Callable, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws with a fault, and a reference, n of each."""
    rng = np.random.default_rng([n, *fault.__name__.encode()])
    assert task.exact is not None
    given = task.observation(tasks.SEEDS[0])
    draws, reference = (task.ravel(task.exact(given, n, rng)) for _ in range(2))
    return fault(draws, rng), reference


def agreement(out: Path, n: int, fast_only: bool) -> None:
    rows = json.loads(out.read_text()) if out.exists() else {}
    for name in sorted(tasks.names(), key=lambda name: tasks.get(name).theta_dim):
        for fault in FAULTS:
            label = f"{name} {fault.__name__} {n}"
            row = rows.setdefault(label, {})
            draws, reference = pair(tasks.get(name), fault, n)
            for method in ("fast", "mlp"):
                if (method in row and not (fast_only and method == "fast")) or (fast_only and method == "mlp"):
                    continue
                start = time.perf_counter()
                row[method] = metrics.c2st(draws, reference, method=method)
                row[f"{method}_seconds"] = time.perf_counter() - start
                out.write_text(json.dumps(rows, indent=1))
            if "mlp" in row:
                gap = row["fast"] - row["mlp"]
                print(f"{label:40s} fast {row['fast']:.4f}  published {row['mlp']:.4f}  {gap:+.4f}", flush=True)
    gaps = np.array([row["fast"] - row["mlp"] for row in rows.values() if "mlp" in row])
    if len(gaps):
        print(f"{len(gaps)} pairs: largest gap {abs(gaps).max():.4f}, mean {gaps.mean():+.4f}, sd {gaps.std():.4f}")


def timing(n: int) -> None:
    rng = np.random.default_rng(0)
    draws, reference = rng.normal(size=(n, 10)), rng.normal(size=(2 * n, 10))
    calls = {
        "c2st, fast": lambda: metrics.c2st(draws, reference),
        "H-min": lambda: metrics.hmin(draws, reference),
        "H-min, published": lambda: metrics.hmin(draws, reference, method="published"),
        "MMD": lambda: metrics.mmd(draws, reference),
        "sliced Wasserstein": lambda: metrics.sliced_wasserstein(draws, reference),
        "moments": lambda: metrics.moments(draws, reference),
        "c2st, published": lambda: metrics.c2st(draws, reference, method="mlp"),
    }
    for name, call in calls.items():
        start = time.perf_counter()
        value = call()
        seconds = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{name:20s} {seconds:7.1f} s   peak so far {memory:.2f} GiB   {value}", flush=True)


def widths(n: int) -> None:
    """Two moons whose radius has too large a standard deviation: what H-min, ours and the published, say of it."""
    task, right = tasks.get("two_moons"), two_moons.WIDTH
    assert task.exact is not None
    print("observation  factor   ours (null)        published (null)")
    for seed in tasks.SEEDS:
        given = task.observation(seed)
        for factor in (1, 2, 5):
            rng = np.random.default_rng([seed, factor])
            reference = task.exact(given, 2 * n, rng)
            two_moons.WIDTH = factor * right
            draws = task.exact(given, n, rng)
            two_moons.WIDTH = right
            ours, theirs = metrics.hmin(draws, reference), metrics.hmin(draws, reference, method="published")
            ours_, theirs_ = (f"{score.value:.3f} ({score.null:.3f})" for score in (ours, theirs))
            print(f"{seed:11d} {factor:7d}   {ours_:18s} {theirs_}", flush=True)


SECOND = {"hierarchical": "slice", "linear_gaussian": "slice", "slcp": "slice"}  # the others: rejection


def references() -> None:
    """Every reference against an independent one: C2ST of 10,000 draws, R-hat and effective sample size of the second.

    SLCP's chains do not jump between its four sign-symmetric modes, so there both are compared up to the signs.
    """
    print("task, observation           second        R-hat      ESS    C2ST")
    for name in tasks.names():
        task = tasks.get(name)
        for seed in tasks.SEEDS:
            sampler = SECOND.get(name, "rejection")
            sets = []
            for tree in (_reference.reference(task, seed), _reference.reference(task, seed, sampler=sampler)):
                sites = {site: value.values.reshape(25_000, -1) for site, value in tree.posterior.data_vars.items()}
                sets.append(task.ravel(sites))
            if name == "slcp":
                sets = [np.concatenate([x[:, :2], np.abs(x[:, 2:4]), x[:, 4:]], axis=1) for x in sets]
            chains = sets[1].reshape(10, 2500, -1)
            rhat = np.max(array_stats.rhat(chains, chain_axis=0, draw_axis=1, method="rank"))
            ess = np.min(array_stats.ess(chains, chain_axis=0, draw_axis=1, method="bulk"))
            rng = np.random.default_rng(0)
            one, two = (x[rng.permutation(25_000)[:10_000]] for x in sets)
            score = metrics.c2st(two, one)
            print(f"{name:20s} {seed}     {sampler:10s} {rhat:8.4f} {ess:8.0f}  {score:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["agreement", "timing", "widths", "references"])
    parser.add_argument("--out", type=Path, default=Path("agreement.json"))
    parser.add_argument("-n", type=int, default=10_000, help="draws on each side")
    parser.add_argument("--fast-only", action="store_true")
    options = parser.parse_args()
    if options.what == "agreement":
        agreement(options.out, options.n, options.fast_only)
    elif options.what == "references":
        references()
    else:
        {"timing": timing, "widths": widths}[options.what](options.n)


if __name__ == "__main__":
    main()
