"""The paper's own flows: their bias, how they grow with the parameters, how right they are on two moons, how fast.

    python benchmarks/triangular.py bias        # correlated posteriors: triangular, discrete, ancestral (minutes)
    python benchmarks/triangular.py scaling     # a training step of chains of 10 to 1,000 parameters
    python benchmarks/triangular.py storage     # dense against edges: what the storage "auto" goes by
    python benchmarks/triangular.py two_moons   # C2ST over five observations, 10,000 simulations (minutes)
    python benchmarks/triangular.py inverse     # the discrete flow's draws by bisection and by a regressor
    python benchmarks/triangular.py speed       # epochs and draws, against the ancestral flow's (idle machine)
    python benchmarks/triangular.py draws       # draws of the triangular and the ancestral flow on all tasks (idle)
    python benchmarks/triangular.py docs        # tables and figures of docs/triangular.md, from the results

Results are written to benchmarks/results/triangular.json as they come; what is there already is not computed again,
unless `--again`. `--only NAME` computes one part of a subcommand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from page import fill, table
from speed import count_flops

import cpejax as cpe
from cpejax.flows.base import trainable
from cpejax.flows.blocks.network import ConditionedNet
from cpejax.flows.blocks.storage import Wiring
from cpejax.inference.progress import Bar

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "triangular.json"
BATCH = 100

Job = tuple[str, Callable[[], Any]]


# Bias


def pair() -> None:
    """Base N(0, I), and in the posterior program b reads a."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 1.0))


def limit(posterior: np.ndarray, mask: np.ndarray, steps: int = 4000) -> np.ndarray:
    """The covariance of the draws of a masked field that is trained without error, for a posterior N(0, covariance).

    The minimiser of the rectified loss for coordinate i is the regression of `θ1_i − θ0_i` on the noisy coordinates
    that it sees. The field is linear; it is integrated by the midpoint rule from N(0, I).
    """
    d = len(posterior)
    flow, base, dt = np.eye(d), np.eye(d), 1 / steps

    def field(t: float) -> np.ndarray:
        noisy, cross = t * t * posterior + (1 - t) ** 2 * base, t * posterior - (1 - t) * base
        v = np.zeros((d, d))
        for i in range(d):
            see = np.flatnonzero(mask[i])
            v[i, see] = np.linalg.solve(noisy[np.ix_(see, see)], cross[i, see])
        return v

    for k in range(steps):
        half = flow + dt / 2 * field(k * dt) @ flow
        flow = flow + dt * field((k + 0.5) * dt) @ half
    return flow @ flow.T


def correlation(covariance: np.ndarray) -> float:
    return float(covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1]))


def correlated(rho: float, n: int = 20_000) -> dict[str, np.ndarray]:
    """'Simulations' whose parameters are N(0, [[1, ρ], [ρ, 1]]) whatever the data: that is the posterior."""
    rng = np.random.default_rng(round(100 * rho))
    a, b = rng.multivariate_normal(np.zeros(2), [[1, rho], [rho, 1]], n).T
    return {"a": a, "b": b, "y": rng.normal(size=n)}


FLOWS: dict[str, Any] = {
    # In prior coordinates the triangular flow's base is N(0, I), as in the closed form.
    "triangular": cpe.TriangularCPE(coordinates="prior"),
    "discrete": cpe.DiscreteCPE(),
    "ancestral": cpe.CPE(),
}


def bias() -> Iterator[Job]:
    """Posteriors N(0, [[1, ρ], [ρ, 1]]): the draws' correlation, and what theory says of the triangular flow."""
    for rho in (0.3, 0.6, 0.9, 0.95):
        for name, method in FLOWS.items():
            yield f"{rho} {name}", lambda rho=rho, method=method: one_bias(rho, method)


def one_bias(rho: float, method: Any) -> dict[str, Any]:
    truth = np.array([[1, rho], [rho, 1]])
    began = time.perf_counter()
    options = {"steps": 6_000} if isinstance(method, cpe.CPE) else {"steps": 6_000, "learning_rate": 1e-3}
    posterior = cpe.fit(
        cpe.Model(pair, observed=["y"]),
        correlated(rho),
        method=method,
        key=jax.random.key(1),
        training=cpe.Training(**options),
    )
    how = {} if isinstance(method, cpe.DiscreteCPE) else {"solver": "rk45"}
    tree = posterior.sample(20_000, given={"y": 0.0}, key=jax.random.key(2), **how)
    found = np.cov(np.stack([tree.posterior[n].values[0] for n in "ab"]))
    predicted = limit(truth, np.tril(np.ones((2, 2))))
    return {
        "correlation": correlation(found),
        "sd": np.sqrt(np.diag(found)).tolist(),
        "predicted_of_triangular": correlation(predicted),
        "predicted_sd": np.sqrt(np.diag(predicted)).tolist(),
        "epochs": len(posterior.history.train),
        "seconds": round(time.perf_counter() - began, 1),
    }


# Scaling and storage


def chain(d: int) -> list[list[int]]:
    return [[i - 1] if i else [] for i in range(d)]


def full(d: int) -> list[list[int]]:
    return [list(range(i)) for i in range(d)]


def star(d: int) -> list[list[int]]:
    return [[] if i else list(range(1, d)) for i in range(d)]


def step_of(edges: list[list[int]], storage: str, hidden: int = 64, steps: int = 3) -> dict[str, Any]:
    """A training step (loss, gradient, Adam) of the triangular flow with these edges and as many data."""
    d = len(edges)
    values = correlated(0.5, 200)
    graph = cpe.Model(pair, observed=["y"]).graph
    flow = cpe.TriangularCPE(coordinates="prior").build(pair, graph, values, key=jax.random.key(0))
    wiring = Wiring.of(edges, [True] * d)
    part = eqx.filter_eval_shape(
        lambda: ConditionedNet(
            wiring,
            d,
            positive=False,
            time=True,
            hidden=hidden,
            width=128,
            condition="first",
            reads="ancestors",
            storage=storage,
            rank=None,
            key=jax.random.key(1),
        )
    )
    rng = np.random.default_rng(0)
    shapes, rest = eqx.partition(part, lambda w: hasattr(w, "shape"))
    part = eqx.combine(jax.tree.map(lambda w: jnp.asarray(rng.normal(0, 0.05, w.shape), jnp.float32), shapes), rest)
    flow = eqx.tree_at(lambda f: f.part, flow, part)
    weights, rest = trainable(flow)
    optimiser = optax.scale_by_adam()
    rows = {"u": jnp.asarray(rng.normal(size=(BATCH, d)), jnp.float32)}
    rows["x"] = jnp.asarray(rng.normal(size=(BATCH, d)), jnp.float32)

    def run(weights: Any, state: Any, key: Any) -> Any:
        def step(carry: Any, key: Any) -> Any:
            weights, state = carry
            gradient = jax.grad(lambda w: eqx.combine(w, rest).loss(rows, key))(weights)
            change, state = optimiser.update(gradient, state)
            return (jax.tree.map(lambda w, c: w - 1e-3 * c, weights, change), state), None

        return jax.lax.scan(step, (weights, state), jax.random.split(key, steps))[0]

    key = jax.random.wrap_key_data(jnp.arange(4, dtype=jnp.uint32), impl="rbg")
    state = optimiser.init(weights)
    began = time.perf_counter()
    compiled = jax.jit(run, donate_argnums=(0, 1)).lower(weights, state, key).compile()
    compile_seconds = time.perf_counter() - began
    size = int(sum(w.size for w in jax.tree.leaves(weights)))
    memory = compiled.memory_analysis()
    seconds = []
    while len(seconds) < 4 or (len(seconds) < 20 and sum(seconds) < 2):
        began = time.perf_counter()
        weights, state = jax.block_until_ready(compiled(weights, state, key))
        seconds.append(time.perf_counter() - began)
    return {
        "parameters": d,
        "edges": len(wiring.sources),
        "weights": size,
        "block_weights": int(sum(w.size for w in jax.tree.leaves(part.net.maps))),
        "step_seconds": min(seconds[1:]) / steps,
        "compile_seconds": round(compile_seconds, 1),
        "bytes": int(memory.argument_size_in_bytes + memory.temp_size_in_bytes),
    }


DENSE_WEIGHTS = 100_000_000
"""The most that are stored densely: with gradients and moments they take sixteen bytes each."""


def scaling() -> Iterator[Job]:
    """Chains of 10 to 1,000 parameters, blocks of 64 as in the paper; of 32 where dense ones of 64 are too many."""
    for hidden, sizes in ((64, (10, 20, 50, 100, 200, 500, 1000)), (32, (50, 100, 200))):
        for d in sizes:
            for storage in ("edges", "dense"):
                if storage == "edges" or 2 * (d * hidden) ** 2 <= DENSE_WEIGHTS:
                    yield (
                        f"{hidden} {storage} {d}",
                        lambda d=d, storage=storage, hidden=hidden: step_of(chain(d), storage, hidden),
                    )


def storage() -> Iterator[Job]:
    """Small posterior programs, full, chains and stars, both ways."""
    for shape, sizes in ((full, (2, 4, 8, 12, 16)), (chain, (4, 8, 12, 16)), (star, (4, 8, 12))):
        for d in sizes:
            for kind in ("dense", "edges"):
                yield (
                    f"{shape.__name__} {d} {kind}",
                    lambda d=d, shape=shape, kind=kind: step_of(shape(d), kind, steps=20),
                )


# Two moons


def discrete(**options: Any) -> Any:
    return cpe.DiscreteCPE(**options)


TWO_MOONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "triangular": (cpe.TriangularCPE(), {"learning_rate": 2e-3}),
    "discrete, 1 map": (discrete(condition="every"), {"learning_rate": 2e-3}),
    "discrete, 2 maps": (discrete(blocks=2, condition="every"), {"learning_rate": 2e-3}),
    "discrete, 3 maps": (discrete(blocks=3, condition="every", coordinates="unconstrained"), {"learning_rate": 4e-3}),
    "ancestral": (cpe.CPE(), {}),
}


def two_moons() -> Iterator[Job]:
    """Mean fast C2ST over five observations against exact draws; .5 is perfect."""
    for name, (method, options) in TWO_MOONS.items():
        yield name, lambda method=method, options=options: one_two_moons(method, options)


def one_two_moons(method: Any, options: dict[str, Any]) -> dict[str, Any]:
    task = cpe.tasks.get("two_moons")
    simulations = cpe.simulate(task, 10_000, key=jax.random.key(0))
    began = time.perf_counter()
    posterior = cpe.fit(
        task.program, simulations, key=jax.random.key(1), method=method, training=cpe.Training(**options)
    )
    fitted = time.perf_counter()
    out: dict[str, Any] = {
        "weights": posterior.weights,
        "training": {name: getattr(posterior.settings, name) for name in ("learning_rate", "steps", "weight_decay")},
        "epochs": len(posterior.history.train),
        "validation": posterior.history.best,
        "fit_seconds": round(fitted - began, 1),
    }
    for solver in (None,) if isinstance(method, cpe.DiscreteCPE) else ("euler", "rk45"):
        scores, about = [], {}
        for seed in range(5):
            given = task.observation(seed)
            tree = posterior.sample(10_000, given=given, key=jax.random.key(seed), solver=solver)
            reference = cpe.reference("two_moons", seed).posterior["theta"].values.reshape(-1, 2)
            which = np.random.default_rng(seed).permutation(len(reference))[:10_000]
            scores.append(cpe.metrics.c2st(tree.posterior["theta"].values[0], reference[which]))
            for name in ("acceptance_rate", "residual", "unsolved"):
                if name in tree.posterior.attrs:
                    about.setdefault(name, []).append(tree.posterior.attrs[name])
        out[solver or "draws"] = {"c2st": float(np.mean(scores)), "each": [round(s, 3) for s in scores], **about}
    return out


# The discrete flow's inverse


def inverse() -> Iterator[Job]:
    """10,000 draws by bisection, and by a regressor with one Newton step: seconds and residuals `|Λ(θ) − u|`."""
    for name in ("bisection", "regressor"):
        yield name, lambda name=name: one_inverse(name)


def one_inverse(by: str) -> dict[str, Any]:
    task = cpe.tasks.get("two_moons")
    simulations = cpe.simulate(task, 10_000, key=jax.random.key(0))
    posterior = cpe.fit(
        task.program,
        simulations,
        key=jax.random.key(1),
        method=cpe.DiscreteCPE(inverse_by=by),
        training=cpe.Training(steps=5_000),
    )
    return {"weights": posterior.weights, **timed_draws(posterior, task)}


def timed_draws(posterior: Any, task: Any, observations: int = 6) -> dict[str, Any]:
    """10,000 draws of observations that were not seen before, by the public function, after one that compiles."""
    seconds, about = [], {}
    for seed in range(observations):
        began = time.perf_counter()
        tree = posterior.sample(10_000, given=task.observation(seed), key=jax.random.key(seed))
        seconds.append(time.perf_counter() - began)
        for name in ("acceptance_rate", "residual", "residual_mean", "unsolved"):
            if name in tree.posterior.attrs:
                about.setdefault(name, []).append(tree.posterior.attrs[name])
    return {"seconds": statistics.median(seconds[1:]), "first_seconds": seconds[0], **about}


# Speed


SPEED: dict[str, Any] = {
    "ancestral": cpe.CPE(),
    "triangular, prior coordinates": cpe.TriangularCPE(coordinates="prior"),
    "triangular": cpe.TriangularCPE(),
    "discrete": cpe.DiscreteCPE(),
}


def speed() -> Iterator[Job]:
    """Two moons, 10,000 simulations, batches of 100: an epoch with its validation, and 10,000 draws."""
    yield "two moons", all_speeds


def all_speeds(turns: int = 10) -> dict[str, Any]:
    """Flows are trained one after the other, and draw in turns, so that all see the same machine."""
    task = cpe.tasks.get("two_moons")
    simulations = cpe.simulate(task, 10_000, key=jax.random.key(0))
    posteriors, found = {}, {}
    for name, method in SPEED.items():
        posteriors[name], epoch = timed_fit(task, simulations, method)
        found[name] = {"epoch_seconds": epoch, "draws_flops": draws_flops(posteriors[name].flow, task.observation(0))}
    draws = [{name: timed_draws(posterior, task, 8) for name, posterior in posteriors.items()} for _ in range(turns)]
    for name, one in found.items():
        one["draws_seconds"] = statistics.median(turn[name]["seconds"] for turn in draws)
        one["over_ancestral"] = statistics.median(
            turn[name]["seconds"] / turn["ancestral"]["seconds"] for turn in draws
        )
        one["acceptance_rate"] = draws[0][name]["acceptance_rate"]
    return found


def draws() -> Iterator[Job]:
    """10,000 draws of the triangular flow and of the ancestral one, with nothing rejected, for each task."""
    for name in cpe.tasks.names():
        yield name, lambda name=name: one_draws(name)


def one_draws(name: str, turns: int = 5) -> dict[str, Any]:
    """Networks that are hardly trained: the time of a draw does not depend on it. Both draw in turns."""
    task = cpe.tasks.get(name)
    simulations = cpe.simulate(task, 1_000, key=jax.random.key(0))
    posteriors = {
        flow: cpe.fit(
            task.program, simulations, method=SPEED[method], key=jax.random.key(2), training=cpe.Training(max_epochs=2)
        )
        for flow, method in {"ancestral": "ancestral", "triangular": "triangular, prior coordinates"}.items()
    }
    wiring = posteriors["triangular"].flow.net.wiring
    seconds = [{flow: timed_draws(p, task)["seconds"] for flow, p in posteriors.items()} for _ in range(turns)]
    return {
        "parameters": wiring.size,
        "edges": len(wiring.sources),
        "seconds": {flow: statistics.median(turn[flow] for turn in seconds) for flow in posteriors},
        "over_ancestral": statistics.median(turn["triangular"] / turn["ancestral"] for turn in seconds),
        "flops": {flow: draws_flops(p.flow, task.observation(0)) for flow, p in posteriors.items()},
    }


def draws_flops(flow: Any, given: dict[str, Any]) -> int | None:
    """The floating-point operations of 10,000 draws' matrix products, where their number is known beforehand."""
    data = {name: jnp.asarray(x) for name, x in given.items()}
    try:
        return count_flops(lambda d: flow.sample(d, 10_000, jax.random.key(0), **flow.draw_options()), data)
    except ValueError:  # a loop that ends when it has found a solution
        return None


def timed_fit(task: Any, simulations: Any, method: Any, epochs: int = 30) -> tuple[Any, float]:
    """A posterior, and the median seconds of an epoch of its training."""
    marks = [time.perf_counter()]

    def mark(*_: Any) -> None:
        marks.append(time.perf_counter())

    # `fit` says at the end of each epoch how far it is; here a clock listens instead of a progress bar.
    with mock.patch.object(Bar, "update", mark):
        posterior = cpe.fit(
            task.program,
            simulations,
            method=method,
            key=jax.random.key(2),
            progress=False,
            training=cpe.Training(batch_size=BATCH, max_epochs=epochs, patience=epochs),
        )
    return posterior, float(np.median(np.diff(marks)[4:]))


# The docs


def bias_table(found: dict[str, Any]) -> str:
    rows = []
    for rho in sorted({key.split()[0] for key in found}, key=float):
        each = {name: found.get(f"{rho} {name}") for name in FLOWS}
        if all(each.values()):
            one = each["triangular"]
            cells = [f"{one['predicted_of_triangular']:.3f}", *(f"{each[name]['correlation']:.3f}" for name in FLOWS)]
            # The posterior program draws b first; a, the first here, is the second coordinate.
            rows.append([rho, *cells, f"{one['predicted_sd'][1]:.2f}", f"{one['sd'][0]:.2f}"])
    head = ["true ρ", "triangular, theory", *FLOWS, "sd of the 2nd, theory", "triangular"]
    return table(head, rows)


def scaling_table(found: dict[str, Any]) -> str:
    def cells(hidden: int, d: int) -> list[str]:
        edges, dense = (found.get(f"{hidden} {storage} {d}") for storage in ("edges", "dense"))
        out = [f"{edges['weights']:,}", f"{1e3 * edges['step_seconds']:.1f}", f"{edges['bytes'] / 1e6:,.0f}"]
        if dense is None:
            return [*out, "", "", "", ""]
        ratio = dense["step_seconds"] / edges["step_seconds"]
        step = f"{1e3 * dense['step_seconds']:,.1f}"
        return [*out, f"{dense['weights']:,}", step, f"{dense['bytes'] / 1e6:,.0f}", f"{ratio:.1f}"]

    kinds = sorted({(int(key.split()[0]), int(key.split()[2])) for key in found}, key=lambda k: (-k[0], k[1]))
    rows = [[hidden, f"{d:,}", *cells(hidden, d)] for hidden, d in kinds]
    what = ["weights", "step, ms", "memory, MB"]
    head = ["block", "parameters", *(f"edges: {w}" for w in what), *(f"dense: {w}" for w in what), "ratio of steps"]
    return table(head, rows)


def storage_table(found: dict[str, Any]) -> str:
    sizes = sorted({int(key.split()[1]) for key in found})
    rows = []
    for shape in ("full", "chain", "star"):
        cells = []
        for d in sizes:
            dense, edges = (found.get(f"{shape} {d} {kind}") for kind in ("dense", "edges"))
            cells.append(f"{edges['step_seconds'] / dense['step_seconds']:.2f}" if dense and edges else "")
        rows.append([shape, *cells])
    return table(["", *map(str, sizes)], rows)


def two_moons_table(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        for solver in ("draws", "euler", "rk45"):
            if solver in one:
                each = " ".join(f"{s:.3f}" for s in one[solver]["each"])
                rate = one[solver].get("acceptance_rate", [1.0])
                how = {"draws": "bisection", "euler": "Euler, 20 steps", "rk45": "RK5(4)"}[solver]
                words = [name, how, f"{one[solver]['c2st']:.3f}", each, f"{min(rate):.2f}"]
                bisected = solver == "draws"
                residuals = (
                    [f"{max(one[solver]['residual']):.1e}", sum(one[solver]["unsolved"])] if bisected else ["", ""]
                )
                rows.append([*words, *residuals, f"{one['weights']:,}"])
    head = ["flow", "draws by", "mean C2ST", "each", "least acceptance rate", "largest residual", "above 1e-5"]
    return table([*head, "weights"], rows)


def inverse_table(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        most, mean, above = (max(one[what]) for what in ("residual", "residual_mean", "unsolved"))
        rows.append([name, f"{one['seconds']:.2f}", f"{most:.1e}", f"{mean:.1e}", f"{above:,}"])
    return table(["inverse by", "10,000 draws, s", "largest residual", "mean residual", "above 1e-5"], rows)


def speed_table(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found["two moons"].items():
        flops = "" if one["draws_flops"] is None else f"{1e-9 * one['draws_flops']:.1f}"
        times = [f"{1e3 * one[what]:.0f}" for what in ("epoch_seconds", "draws_seconds")]
        rows.append([name, *times, f"{one['over_ancestral']:.2f}", flops, f"{min(one['acceptance_rate']):.2f}"])
    head = ["flow", "epoch, ms", "10,000 draws, ms", "over the ancestral flow's", "GFLOP of products"]
    return table([*head, "least acceptance rate"], rows)


def draws_table(found: dict[str, Any]) -> str:
    rows = []
    for name, one in sorted(found.items(), key=lambda item: item[1]["parameters"] + item[1]["edges"]):
        (slow, fast), flops = (one["seconds"][flow] for flow in ("triangular", "ancestral")), one["flops"]
        over = flops["triangular"] / flops["ancestral"]
        numbers = [f"{1e3 * slow:.0f}", f"{1e3 * fast:.0f}", f"{one['over_ancestral']:.2f}", f"{over:.2f}"]
        rows.append([name, str(one["parameters"]), str(one["edges"]), *numbers])
    head = ["task", "parameters", "edges", "triangular, ms", "ancestral, ms", "ratio", "ratio of products"]
    return table(head, rows)


def figures(results: dict[str, Any], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "cpejax", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    def save(figure: Any, name: str) -> None:
        figure.savefig(folder / name, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)

    if not {"bias", "scaling"} <= set(results):
        raise SystemExit("The figures need the results of bias and scaling: run these first.")
    figure, axis = plt.subplots(figsize=(3.6, 3.2))
    line = np.linspace(0, 0.98, 25)
    limits = [correlation(limit(np.array([[1, r], [r, 1]]), np.tril(np.ones((2, 2))), 400)) for r in line]
    axis.plot(line, limits, "C1", lw=1, label="triangular, theory")
    axis.plot([0, 1], [0, 1], "k:", lw=0.8, label="exact")
    for (name, marker), colour in zip(
        {"triangular": "o", "discrete": "s", "ancestral": "x"}.items(), "120", strict=True
    ):
        points = [(float(k.split()[0]), v["correlation"]) for k, v in results["bias"].items() if k.endswith(name)]
        axis.plot(*zip(*points, strict=True), marker, color=f"C{colour}", ms=5, label=name)
    axis.set(xlabel="correlation of the posterior", ylabel="correlation of the draws")
    axis.legend(frameon=False)
    save(figure, "triangular_bias.svg")

    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.8))
    for storage, colour in (("edges", "C0"), ("dense", "C1")):
        for hidden, style in ((64, "o-"), (32, "o--")):
            of = [v for k, v in results["scaling"].items() if k.startswith(f"{hidden} {storage} ")]
            of.sort(key=lambda one: one["parameters"])
            x = [one["parameters"] for one in of]
            label = f"{storage}, blocks of {hidden}"
            axes[0].plot(x, [1e3 * one["step_seconds"] for one in of], style, color=colour, ms=3, lw=1, label=label)
            axes[1].plot(x, [one["weights"] for one in of], style, color=colour, ms=3, lw=1)
    for axis, name in zip(axes, ("training step, ms", "weights"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="parameters of a chain", ylabel=name)
    figure.legend(frameon=False, fontsize=7, ncols=4, loc="upper center")
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    save(figure, "triangular_scaling.svg")


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "bias": bias_table,
    "scaling": scaling_table,
    "storage": storage_table,
    "two_moons": two_moons_table,
    "inverse": inverse_table,
    "speed": speed_table,
    "draws": draws_table,
}


def write_docs() -> None:
    """Put the tables between their marks in docs/triangular.md, and the figures beside it."""
    results, page = load(), ROOT / "docs" / "triangular.md"
    fill(page, {name: make(results[name]) for name, make in TABLES.items() if name in results})
    figures(results, page.parent)


PARTS: dict[str, Callable[[], Iterator[Job]]] = {
    "bias": bias,
    "scaling": scaling,
    "storage": storage,
    "two_moons": two_moons,
    "inverse": inverse,
    "speed": speed,
    "draws": draws,
}


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*PARTS, "docs"])
    parser.add_argument("--only", action="append", help="one part; may be given several times")
    parser.add_argument("--again", action="store_true", help="compute what is there already")
    args = parser.parse_args()
    if args.what == "docs":
        write_docs()
        return
    for name, compute in PARTS[args.what]():
        results = load()
        if (name in results.get(args.what, {}) and not args.again) or (args.only and name not in args.only):
            continue
        found = compute()
        results = load()
        results.setdefault(args.what, {})[name] = found
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{args.what} {name}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
