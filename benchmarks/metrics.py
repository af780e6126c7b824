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

from cpejax import metrics, tasks
from cpejax.tasks import Task


def exact(x, rng):  # noqa: ARG001
    return x


def shifted(x, rng):  # noqa: ARG001
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["agreement", "timing"])
    parser.add_argument("--out", type=Path, default=Path("agreement.json"))
    parser.add_argument("-n", type=int, default=10_000, help="draws on each side")
    parser.add_argument("--fast-only", action="store_true")
    options = parser.parse_args()
    if options.what == "agreement":
        agreement(options.out, options.n, options.fast_only)
    else:
        timing(options.n)


if __name__ == "__main__":
    main()
