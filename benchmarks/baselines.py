"""The accuracy of FMPE, PSE and AIO for known posteriors, and of FMPE against that of `sbi`; 10,000 simulations.

    python benchmarks/baselines.py                       # all that needs no peer
    python benchmarks/baselines.py linear_gaussian/FMPE  # some
    python benchmarks/baselines.py peer/two_moons peer/slcp
    python benchmarks/baselines.py --quick correlated/AIO peer/slcp   # does it run? Small numbers, nothing is written
    python benchmarks/baselines.py docs                  # the tables of docs/baselines.md, from the results

Results are written to benchmarks/results/baselines.json as they come; what is there already is not computed again,
unless `--again`. The peer's environment is `.venv-peers` (`make peers`), or the interpreter named by `--peer`. Times
are those of an otherwise idle machine, or no good.

* `linear_gaussian/<method>`: C2ST against exact draws of the task, over several observations.
* `correlated/<method>`: the errors of the posterior correlations of three parameters, two of which are seen as a sum
  each time, and of the standard deviations.
* `peer/<task>`: FMPE and sbi's FMPE with the same network, simulations, batches and epochs: C2ST of both over the same
  observations, an epoch's and the draws' seconds. Epochs take turns, ten of ours and ten of theirs, of which the first
  do not count. Both draw by Dormand-Prince 5(4), each with its own tolerances.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from page import fill, table
from peer import PYTHON, ROOT, Peer

import cpejax as cpe
from cpejax.inference.progress import Bar

RESULTS = ROOT / "benchmarks" / "results" / "baselines.json"
TURN = 10
"""Number of epochs of ours after which the peer has as many."""
METHODS = {
    "FMPE": cpe.FMPE(),
    "FMPE_unconstrained": cpe.FMPE(coordinates="unconstrained"),
    "PSE": cpe.PSE(),
    "PSE_sde": cpe.PSE(sampler="sde"),
    "AIO": cpe.AIO(),
    "AIO_undirected": cpe.AIO(mask="undirected"),
    "AIO_none": cpe.AIO(mask="none"),
    "AIO_none_2_layers": cpe.AIO(mask="none", layers=2),
    "AIO_none_4_layers": cpe.AIO(mask="none", layers=4),
}


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    simulations: int = 10_000
    draws: int = 10_000
    observations: int = 5
    epochs: int = 100  # of both, ours and the peer
    most_epochs: int | None = None


QUICK = Size(simulations=500, draws=200, observations=2, epochs=20, most_epochs=3)


def fitted(program, observed, method, size):
    """A posterior with its method's default settings, and what it took."""
    began = time.perf_counter()
    simulations = cpe.simulate(cpe.Model(program, observed=observed), size.simulations, key=jax.random.key(0))
    training = cpe.Training() if size.most_epochs is None else cpe.Training(max_epochs=size.most_epochs)
    posterior = cpe.fit(program, simulations, key=jax.random.key(1), method=method, training=training, progress=False)
    about = {
        "weights": posterior.weights,
        "epochs": len(posterior.history.train),
        "best_epoch": posterior.history.best_epoch,
        "training": {name: getattr(posterior.settings, name) for name in ("learning_rate", "weight_decay", "steps")},
        "seconds": round(time.perf_counter() - began, 1),
    }
    return posterior, about


def matrix(draws, names):
    """One column a number."""
    return np.concatenate([np.asarray(draws[name]).reshape(len(draws[name]), -1) for name in names], axis=1)


def drawn(posterior, given, seed, size):
    """Draws, and their acceptance rate."""
    tree = posterior.sample(size.draws, given=given, key=jax.random.key(seed))
    values = {name: tree.posterior[name].values[0] for name in posterior.graph.parameters}
    return matrix(values, posterior.graph.parameters), tree.posterior.attrs


def scores(all_draws, task, names, size):
    """The C2ST of draws for each observation, against the task's exact posterior."""
    out = []
    for seed, draws in enumerate(all_draws):
        exact = task.exact(task.observation(seed), size.draws, np.random.default_rng(seed))
        out.append(round(cpe.metrics.c2st(draws, matrix(exact, names)), 4))
    return {"c2st": round(float(np.mean(out)), 4), "each": out}


def linear_gaussian(method):
    def run(size, _):
        task = cpe.tasks.get("linear_gaussian")
        posterior, about = fitted(task.program, task.observed, method, size)
        found = [drawn(posterior, task.observation(seed), seed, size)[0] for seed in range(size.observations)]
        return {**about, **scores(found, task, posterior.graph.parameters, size)}

    return run


DESIGN = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
NOISE = 0.5


def correlated_program():
    """Three parameters; the data are the sums of the first two and of the last two, with noise."""
    a, b, c = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "abc")
    numpyro.sample("x", dist.Normal(a + b, NOISE))
    numpyro.sample("y", dist.Normal(b + c, NOISE))


def correlated(method):
    def run(size, _):
        posterior, about = fitted(correlated_program, ["x", "y"], method, size)
        covariance = np.linalg.inv(np.eye(3) + DESIGN.T @ DESIGN / NOISE**2)
        sd = np.sqrt(np.diag(covariance))
        exact = covariance / np.outer(sd, sd)
        data = cpe.simulate(
            cpe.Model(correlated_program, observed=["x", "y"]), size.observations, key=jax.random.key(100)
        )
        errors, ratios, means = [], [], []
        for seed in range(size.observations):
            given = {name: data[name][seed] for name in ("x", "y")}
            draws, _ = drawn(posterior, given, seed, size)
            errors.append((np.corrcoef(draws.T) - exact)[np.triu_indices(3, 1)].tolist())
            ratios.append((draws.std(0) / sd).tolist())
            mean = covariance @ DESIGN.T @ np.array([given["x"], given["y"]]) / NOISE**2
            means.append(((draws.mean(0) - mean) / sd).tolist())
        return {
            **about,
            "exact_correlations": exact[np.triu_indices(3, 1)].tolist(),
            "correlation_errors": errors,
            "largest_correlation_error": float(np.abs(errors).max()),
            "sd_ratios": ratios,
            "mean_errors_in_sd": means,
        }

    return run


def peer(name):
    def run(size, python):
        task = cpe.tasks.get(name)
        simulations = cpe.simulate(task, size.simulations, key=jax.random.key(0))
        seeds = range(size.observations)
        observations = [task.observation(seed) for seed in seeds]
        bound = {"two_moons": 1.0, "slcp": 3.0}[name]  # theta is uniform from -bound to bound
        with start_peer(simulations, observations, bound, size, python) as other:
            ours, our_draws, their_epoch = measure_ours(task, simulations, observations, size, other)
            theirs, their_draws = other.finish()
            theirs["epoch_seconds"] = their_epoch
        out = {
            "load_average": os.getloadavg()[0],
            "cpejax": ours | scores(our_draws, task, ["theta"], size),
            "sbi": theirs | scores(their_draws, task, ["theta"], size),
        }
        out["ratios"] = {
            what: out["sbi"][f"{what}_seconds"] / out["cpejax"][f"{what}_seconds"] for what in ("epoch", "sample")
        }
        out["c2st_difference"] = round(out["cpejax"]["c2st"] - out["sbi"]["c2st"], 4)
        return out

    return run


def measure_ours(task, simulations, observations, size, other):
    began, number, epochs, theirs = time.perf_counter(), 0, [], []

    # `fit` says at the end of each epoch how far it is; here a clock listens instead of a progress bar.
    def mark(*_):
        nonlocal began, number
        if number % TURN:
            epochs.append(time.perf_counter() - began)
        number += 1
        if number % TURN == 0:
            theirs.extend([other.turn() for _ in range(TURN)][1:])
        began = time.perf_counter()

    with mock.patch.object(Bar, "update", mark):
        posterior = cpe.fit(
            task.program,
            simulations,
            key=jax.random.key(1),
            method=cpe.FMPE(),
            progress=False,
            training=cpe.Training(max_epochs=size.epochs, steps=size.epochs * size.simulations, patience=size.epochs),
        )
    drawn(posterior, observations[0], 1000, size)  # compiles
    draws, seconds, rates = [], [], []
    for seed, given in enumerate(observations):
        began = time.perf_counter()
        found, attributes = drawn(posterior, given, seed, size)
        seconds.append(time.perf_counter() - began)
        draws.append(found)
        rates.append(attributes["acceptance_rate"])
    about = {
        "weights": posterior.weights,
        "epochs": len(posterior.history.train),
        "epoch_seconds": statistics.median(epochs),
        "sample_seconds": statistics.median(seconds),
        "acceptance_rates": rates,
    }
    return about, draws, statistics.median(theirs)


def start_peer(simulations, observations, bound, size, python):
    """sbi, which reads flat data."""
    theta, x = (np.asarray(simulations[name]).reshape(len(simulations[name]), -1) for name in ("theta", "x"))
    flat = np.stack([np.asarray(given["x"]).ravel() for given in observations])
    arrays = {
        "theta": theta,
        "x": x,
        "observations": np.concatenate([flat[:1], flat]),  # the first is for warming up
        "low": np.full(theta.shape[1], -bound, np.float32),
        "high": np.full(theta.shape[1], bound, np.float32),
    }
    return Peer(
        arrays, python, batch=100, epochs=size.epochs, warm_up=1, draws=size.draws, density=False, save="draws.npy"
    )


ALL = {
    **{f"linear_gaussian/{name}": linear_gaussian(method) for name, method in METHODS.items()},
    **{f"correlated/{name}": correlated(method) for name, method in METHODS.items()},
    **{f"peer/{name}": peer(name) for name in ("two_moons", "slcp")},
}


ROWS = {
    "FMPE": "FMPE",
    "PSE": "PSE",
    "AIO": "AIO, directed mask",
    "AIO_undirected": "AIO, undirected mask",
    "AIO_none": "AIO, no mask",
    "AIO_none_2_layers": "AIO, no mask, two layers",
}


def write_docs(results):
    """Put the tables between their marks in docs/baselines.md."""
    known = []
    for name, words in ROWS.items():
        exact, joint = results.get(f"linear_gaussian/{name}"), results[f"correlated/{name}"]
        ratios = np.array(joint["sd_ratios"])
        known.append(
            [
                words,
                f"{exact['c2st']:.3f}" if exact else "",
                " ".join(f"{score:.3f}" for score in exact["each"]) if exact else "",
                f"{joint['largest_correlation_error']:.3f}",
                f"{ratios.min():.2f} to {ratios.max():.2f}",
            ]
        )
    peers = []
    for name, words in (("two_moons", "two moons"), ("slcp", "SLCP")):
        one = results[f"peer/{name}"]
        ours, theirs, ratios = one["cpejax"], one["sbi"], one["ratios"]
        times = [
            f"{ours[what]:.3f} s against {theirs[what]:.3f} s: {ratios[short]:.1f} times as fast"
            for short, what in (("epoch", "epoch_seconds"), ("sample", "sample_seconds"))
        ]
        peers.append([words, f"{ours['c2st']:.3f}", f"{theirs['c2st']:.3f}", *times])
    head = ["method", "C2ST, linear Gaussian", "each", "correlated: largest error of a correlation", "sd ratios"]
    tables = {
        "known": table(head, known),
        "peer": table(["task", "C2ST, `cpejax`", "C2ST, `sbi`", "epoch", "10,000 draws"], peers),
    }
    fill(ROOT / "docs" / "baselines.md", tables)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(ALL)}; by default all without a peer")
    parser.add_argument("--again", action="store_true", help="compute also what is there already")
    parser.add_argument("--quick", action="store_true", help="small numbers of everything; nothing is written")
    parser.add_argument("--peer", default=str(PYTHON), help="the peer's interpreter")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    args = parser.parse_args()
    if args.runs == ["docs"]:
        write_docs(json.loads(args.out.read_text()))
        return
    runs = args.runs or [name for name in ALL if not name.startswith("peer/")]
    for name in runs:
        if name not in ALL:
            parser.error(f"no run {name!r}; the runs are {', '.join(ALL)}")
    for name in runs:
        found = json.loads(args.out.read_text()) if args.out.exists() else {}
        if name in found and not args.again and not args.quick:
            continue
        result = ALL[name](QUICK if args.quick else Size(), args.peer)
        result["versions"] = {package: version(package) for package in ("cpejax", "jax")}
        print(name, json.dumps(result, indent=1), flush=True)
        if not args.quick:
            found = json.loads(args.out.read_text()) if args.out.exists() else {}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(dict(sorted({**found, name: result}.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
