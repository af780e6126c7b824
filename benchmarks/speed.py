"""The speed of training, draws and densities, against FMPE of `sbi`: two moons, 10,000 simulations, batches of 100.

    make speed                                      # builds both environments, then runs this; takes about ten minutes
    python benchmarks/speed.py --skip-peer          # cpejax alone
    python benchmarks/speed.py --quick              # does it run? Small numbers of everything, nothing is written
    python benchmarks/speed.py --docs               # the tables of docs/inference.md, from the results

Everything is measured in one run, one thing after the other, so the machine should be otherwise idle. The peer runs in
`.venv-peers` (`make peers`), on the same simulations and observations, with the network that the paper gives FMPE.

* An epoch is what a user waits for: 9,000 rows in batches of 100 and the validation loss of 1,000. The median of many,
  without the first ones and without compilation. After every eight the peer has two: it is compared with the median of
  those that took turns with it. After a turn both have an epoch that does not count, because cores that were idle are
  slow at first.
* Draws and densities are of observations that were not seen before, by the public functions with their defaults, after
  one call that compiles. The median over the observations.
* The arithmetic rate counts matrix products only, 2mnk floating-point operations each: those that automatic
  differentiation leaves in the traced program, times the length of the loops around them. Its unit is the rate of a
  product of 1024 x 1024 matrices, measured between the epochs of `CPE()` and between the draws, so that both have the
  same share of a machine that others may use as well. Medians on both sides, and beside them the best of both sides.
* End to end is a fresh process: import, simulate, fit to convergence, 10,000 draws.
* A chain of 100 named parameters against one of 10 shows that equal levels share compiled code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import page
from peer import PYTHON, ROOT, Peer

RESULTS = ROOT / "benchmarks" / "results" / "speed.json"
BATCH = 100
WARM_UP = 3
TURN = 8
"""Number of epochs of ours after which it is the peer's turn."""


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    simulations: int = 10_000
    draws: int = 10_000
    epochs: int = 80
    observations: int = 21
    peer_epochs: int = 64
    peer_observations: int = 3
    max_epochs: int | None = None


QUICK = Size(2_000, 1_000, epochs=9, observations=2, peer_epochs=10, peer_observations=1, max_epochs=5)


# Counting


def product_flops(jaxpr: Any) -> int:
    """The floating-point operations of the matrix products in a traced program, loops counted as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
            continue
        inner = [product_flops(j) for j in _inner_jaxprs(equation.params)]
        if not any(inner):
            continue
        if equation.primitive.name == "while":
            raise ValueError("A matrix product is in a loop whose length is known only when it runs.")
        if equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


def _inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [getattr(v, "jaxpr", v) for v in values if hasattr(getattr(v, "jaxpr", v), "eqns")]


def count_flops(function: Callable, *args: Any) -> int:
    import jax

    return product_flops(jax.make_jaxpr(function)(*args).jaxpr)


# Measuring


class Gemm:
    """A matrix product in float32 that is timed again and again between other things."""

    def __init__(self, size: int = 1024):
        import jax

        self.matrices = jax.random.normal(jax.random.key(0), (2, size, size))
        self.product = jax.jit(lambda a, b: a @ b).lower(*self.matrices).compile()
        self.flops = 2 * size**3
        self.seconds: list[float] = []

    def measure(self, repeats: int = 5) -> None:
        """The first product of each call wakes the threads up and is not counted."""
        for number in range(1 + repeats):
            began = time.perf_counter()
            self.product(*self.matrices).block_until_ready()
            if number:
                self.seconds.append(time.perf_counter() - began)

    def share(self, flops: float, seconds: list[float]) -> dict[str, float]:
        """The arithmetic rate of something that took these times, as a share of the product's."""
        return {
            name: flops / of(seconds) * of(self.seconds) / self.flops
            for name, of in {"median": statistics.median, "best": min}.items()
        }

    def rate(self) -> dict[str, float]:
        """Floating-point operations a second."""
        return {"median": self.flops / statistics.median(self.seconds), "best": self.flops / min(self.seconds)}


def simulate(size: Size) -> tuple[Any, Any]:
    """The simulations, and observations that are not among them."""
    import jax

    import cpejax as cpe
    from cpejax.tasks import two_moons

    simulations = cpe.simulate(cpe.Model(two_moons.program, observed=["x"]), size.simulations, key=jax.random.key(0))
    new = cpe.simulate(cpe.Model(two_moons.program, observed=["x"]), 1 + size.observations, key=jax.random.key(1))
    return simulations, new["x"]


def time_epochs(
    simulations: Any, size: Size, gemm: Gemm | None, peer: Peer | None, **options: Any
) -> tuple[Any, list[float], list[float]]:
    """A posterior; the seconds of the first epoch of its training and of those that count; and of the peer's."""
    import jax

    import cpejax as cpe
    from cpejax.inference.progress import Bar
    from cpejax.tasks import two_moons

    began, number = time.perf_counter(), 0
    epochs: list[float] = []
    between: list[float] = []

    def mark(*_: Any) -> None:
        nonlocal began, number
        if number == 0 or (number > WARM_UP and number % TURN):
            epochs.append(time.perf_counter() - began)
        if gemm is not None:
            gemm.measure()
        number += 1
        if peer is not None and number % TURN == 0:
            peer.turn()
            between.append(peer.turn())
        began = time.perf_counter()

    # `fit` says at the end of each epoch how far it is; here a clock listens instead of a progress bar.
    with mock.patch.object(Bar, "update", mark):
        posterior = cpe.fit(
            two_moons.program,
            simulations,
            key=jax.random.key(2),
            progress=False,
            emulate=False,  # epochs of one training
            training=cpe.Training(batch_size=BATCH, max_epochs=size.epochs, patience=size.epochs),
            **options,
        )
    return posterior, epochs, between


def compare_epochs(ours: list[float], peer: list[float]) -> dict[str, Any]:
    """The medians of both, and their ratio."""
    median = statistics.median(ours[1:])
    found = {"timed": len(ours) - 1, "seconds": median, "first_seconds": ours[0]}
    if peer:
        found |= {"peer_seconds": statistics.median(peer), "ratio": statistics.median(peer) / median}
    return found


def other_methods() -> dict[str, Any]:
    """Those whose epochs are compared too, with the network of the peer or of the paper."""
    import cpejax as cpe

    return {"TriangularCPE()": cpe.TriangularCPE(), "FMPE()": cpe.FMPE()}


def measure_cpejax(simulations: Any, observations: Any, size: Size, peer: Peer | None) -> dict[str, Any]:
    import jax

    beside_training, beside_draws, beside_densities = Gemm(), Gemm(), Gemm()
    posterior, seconds, between = time_epochs(simulations, size, beside_training, peer)
    epochs = {"CPE()": compare_epochs(seconds, between)}
    for name, method in other_methods().items():
        epochs[name] = compare_epochs(*time_epochs(simulations, size, None, peer, method=method)[1:])

    draws, sample_seconds, compiled_seconds, log_prob_seconds = [], [], [], []
    for number, x in enumerate(observations):
        beside_draws.measure()
        began = time.perf_counter()
        draws.append(posterior.sample(size.draws, given={"x": x}, key=jax.random.key(number)))
        sample_seconds.append(time.perf_counter() - began)
        compiled_seconds.append(draws[-1]["posterior"].attrs["sampling_time"])
    for x, draw in zip(observations, draws, strict=True):
        beside_densities.measure()
        began = time.perf_counter()
        posterior.log_prob(draw, given={"x": x})
        log_prob_seconds.append(time.perf_counter() - began)

    sample, log_prob = statistics.median(sample_seconds[1:]), statistics.median(log_prob_seconds[1:])
    counted = flops(posterior, simulations, observations, size)
    return {
        "weights": posterior.weights,
        "epochs": epochs,
        "sample_seconds": sample,
        "sample_seconds_compiled_call": statistics.median(compiled_seconds[1:]),
        "log_prob_seconds": log_prob,
        # What the first call takes longer than the others. For `fit`: all that it does but the epochs.
        "first_fit_seconds": epochs["CPE()"]["first_seconds"] - epochs["CPE()"]["seconds"],
        "first_sample_seconds": sample_seconds[0] - sample,
        "first_log_prob_seconds": log_prob_seconds[0] - log_prob,
        "flops": counted,
        "gemm_flops_per_second": {
            "training": beside_training.rate(),
            "sampling": beside_draws.rate(),
            "density": beside_densities.rate(),
        },
        "share_of_gemm": {
            "training": beside_training.share(counted["epoch"], seconds[1:]),
            "sampling": beside_draws.share(counted["sample"], compiled_seconds[1:]),
            "density": beside_densities.share(counted["log_prob"], log_prob_seconds[1:]),
        },
    }


def flops(posterior: Any, simulations: Any, observations: Any, size: Size) -> dict[str, int]:
    """The matrix products of an epoch, of the draws and of their density."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from cpejax.flows.base import trainable
    from cpejax.inference.training import _validation_loss

    flow, key = posterior.flow, jax.random.key(0)
    weights, rest = trainable(flow)
    held_out = round(posterior.settings.validation * size.simulations)
    rows = flow.prepare({name: jnp.asarray(x[:held_out]) for name, x in simulations.items()})
    one_batch = jax.tree.map(lambda x: x[:BATCH], rows)

    def loss(weights: Any, rows: Any, key: Any) -> Any:
        return eqx.combine(weights, rest).loss(rows, key)

    step = count_flops(jax.value_and_grad(loss), weights, one_batch, key)
    validation = count_flops(lambda w, r: _validation_loss(eqx.combine(w, rest), r, key, BATCH), weights, rows)
    data = {"x": jnp.asarray(observations[0])}
    values = {"theta": jnp.asarray(simulations["theta"][: size.draws])}
    return {
        "step": step,
        "epoch": step * ((size.simulations - held_out) // BATCH) + validation,
        "sample": count_flops(lambda d: flow.sample(d, size.draws, key, steps=20, solver="euler"), data),
        "log_prob": count_flops(lambda v, d: flow.log_prob(v, d, steps=20), values, data),
    }


def end_to_end(size: Size) -> dict[str, Any]:
    """The stages of a user's whole job, in this process, compilation with them."""
    began = time.perf_counter()
    import jax

    import cpejax as cpe
    from cpejax.tasks import two_moons

    imported = time.perf_counter()
    simulations, observations = simulate(size)
    simulated = time.perf_counter()
    options = {} if size.max_epochs is None else {"max_epochs": size.max_epochs}
    training = cpe.Training(batch_size=BATCH, **options)
    posterior = cpe.fit(two_moons.TASK, simulations, key=jax.random.key(2), training=training, progress=False)
    fitted = time.perf_counter()
    posterior.sample(size.draws, given={"x": observations[0]}, key=jax.random.key(3))
    drawn = time.perf_counter()
    return {
        "import": imported - began,
        "simulate": simulated - imported,
        "fit": fitted - simulated,
        "draws": drawn - fitted,
        "epochs": len(posterior.history.train),
        "stopped": posterior.history.stopped,
    }


def chain(length: int) -> dict[str, float]:
    """What a chain of named sites takes to fit for two epochs and to draw from, the first time and again."""
    import jax
    import numpyro
    import numpyro.distributions as dist

    import cpejax as cpe

    def program() -> None:
        x = 0.0
        for t in range(length):
            x = numpyro.sample(f"x{t}", dist.Normal(x, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0))

    simulations = cpe.simulate(cpe.Model(program, observed=["y"]), 1000, key=jax.random.key(0))
    began = time.perf_counter()
    posterior = cpe.fit(
        program, simulations, key=jax.random.key(1), progress=False, training=cpe.Training(max_epochs=2)
    )
    seconds = {"fit": time.perf_counter() - began}
    for name in ("first draws", "second draws"):
        began = time.perf_counter()
        posterior.sample(100, given={"y": 1.0}, key=jax.random.key(2))
        seconds[name] = time.perf_counter() - began
    return seconds


def run_end_to_end(quick: bool) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--end-to-end", *(["--quick"] if quick else [])]
    # A cache from an earlier run would hide the compilation.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {"seconds": time.perf_counter() - began, **json.loads(done.stdout)}


def start_peer(simulations: Any, observations: Any, size: Size) -> Peer:
    import numpy as np

    arrays = {
        "theta": simulations["theta"],
        "x": simulations["x"],
        "observations": observations[: 1 + size.peer_observations],
        "low": np.full(2, -1, np.float32),
        "high": np.full(2, 1, np.float32),
    }
    peer = Peer(arrays, batch=BATCH, epochs=size.peer_epochs, warm_up=WARM_UP, draws=size.draws)
    for _ in range(WARM_UP):
        peer.turn()
    return peer


# Reporting


def report(result: dict[str, Any], console: Any) -> None:
    from rich.table import Table

    ours, peer = result["cpejax"], result.get("sbi")
    table = Table(title="Two moons, batches of 100: cpejax and FMPE of sbi")
    for name in ("", "cpejax", "sbi", "ratio", "goal"):
        table.add_column(name, justify="left" if not name else "right")

    def compare(label: str, ours: float, theirs: float | None, goal: float) -> None:
        cells = [f"{theirs:.3f} s", f"{theirs / ours:.1f}", f"{goal:g}"] if theirs else ["", "", ""]
        table.add_row(label, f"{ours:.4f} s", *cells)

    draws = f"{result['draws']:,}"
    for (name, found), goal in zip(ours["epochs"].items(), (6, 8, 4), strict=True):
        compare(f"one epoch of cpe.{name}", found["seconds"], found.get("peer_seconds"), goal)
    compare(f"{draws} draws, new observation", ours["sample_seconds"], peer and peer["sample_seconds"], 40)
    compare(f"{draws} log_prob", ours["log_prob_seconds"], peer and peer["log_prob_seconds"], 30)
    table.add_section()
    table.add_row("weights", f"{ours['weights']:,}", f"{peer['weights']:,}" if peer else "", "", "")
    for what in ("fit", "sample", "log_prob"):
        table.add_row(f"compiling, {what}", f"{ours[f'first_{what}_seconds']:.1f} s", "", "", "")
    table.add_section()
    for what, goal in (("training", "30 %"), ("sampling", "60 %"), ("density", "")):
        rate, share = ours["gemm_flops_per_second"][what], ours["share_of_gemm"][what]
        table.add_row(f"{what}, share of GEMM (1024³)", f"{100 * share['median']:.1f} %", "", "", goal)
        table.add_row("  GEMM between", f"{rate['median'] / 1e9:.0f} GFLOP/s", "", "", "")
        table.add_row("  the best of both", f"{100 * share['best']:.1f} %", "", "", "")
    table.add_section()
    whole = result["end_to_end"]
    table.add_row("end to end, fresh process", f"{whole['seconds']:.1f} s", "", "", "90 s")
    for stage in ("import", "simulate", "fit", "draws"):
        table.add_row(f"  {stage}", f"{whole[stage]:.1f} s", "", "", "")
    table.add_section()
    for length, seconds in result["chains"].items():
        cell = f"{seconds['fit']:.1f} s, {seconds['first draws'] - seconds['second draws']:.1f} s"
        table.add_row(f"compiling a chain of {length}: fit of two epochs, draws", cell, "", "", "")
    console.print(table)


def write_docs(result: dict[str, Any]) -> None:
    """Put the tables between their marks in docs/inference.md, and some of it in words into the README."""
    ours, peer = result["cpejax"], result["sbi"]
    pairs = {
        f"an epoch with its validation, `{name}`": (found["seconds"], found["peer_seconds"])
        for name, found in ours["epochs"].items()
    }
    for what, name in (("draws for a new observation", "sample"), ("log-densities", "log_prob")):
        pairs[f"{result['draws']:,} {what}, `CPE()`"] = ours[f"{name}_seconds"], peer[f"{name}_seconds"]
    speed = [[name, f"{a:.3f} s", f"{b:.3g} s", f"{b / a:.3g}"] for name, (a, b) in pairs.items()]
    share = [
        [what, f"{rate['median'] / 1e9:.0f} GFLOP/s", *(f"{100 * part[of]:.0f} %" for of in ("median", "best"))]
        for what, rate in ours["gemm_flops_per_second"].items()
        for part in (ours["share_of_gemm"][what],)
    ]
    chains = [[n, f"{s['fit']:.1f} s", f"{s['first draws']:.1f} s"] for n, s in result["chains"].items()]
    stages = ("import", "simulate", "fit", "draws", "seconds")
    tables = {
        "speed": page.table(["", "`cpejax`", f"`sbi` {peer['versions']['sbi']} FMPE", "ratio"], speed),
        "share": page.table(["", "one product of 1024³", "our share of its rate", "best over best"], share),
        "whole": page.table([*stages[:-1], "all"], [[f"{result['end_to_end'][s]:.1f} s" for s in stages]]),
        "chains": page.table(["parameters of a chain", "fit of two epochs", "first draws"], chains),
    }
    page.fill(ROOT / "docs" / "inference.md", tables)
    epoch = ours["epochs"]["CPE()"]
    times, draws = epoch["peer_seconds"] / epoch["seconds"], f"{result['draws']:,} draws"
    words = (
        f"On two moons and two cores an epoch takes 1/{times:.1f} of the time of `sbi`'s FMPE, {draws}\n"
        f"for a new observation 1/{result['ratios']['sample']:.0f}, and all from the first simulation to "
        f"{draws}\n{result['end_to_end']['seconds']:.0f} seconds (`make speed`)."
    )
    page.fill(ROOT / "README.md", {"speed": words})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-peer", action="store_true", help="measure cpejax alone")
    parser.add_argument("--quick", action="store_true", help="small numbers of everything; nothing is written")
    parser.add_argument("--end-to-end", action="store_true", help="only the whole job once, as one line of JSON")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    parser.add_argument("--docs", action="store_true", help="only the tables of docs/inference.md, from the figures")
    args = parser.parse_args()
    if args.docs:
        write_docs(json.loads(args.out.read_text()))
        return
    size = QUICK if args.quick else Size()
    if args.end_to_end:
        json.dump(end_to_end(size), sys.stdout)
        return
    if not args.skip_peer and not PYTHON.exists():
        parser.error("There is no .venv-peers: `make peers` builds it, or leave the peer out with --skip-peer.")

    from rich.console import Console

    console = Console()
    load, cores = (
        os.getloadavg()[0],
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
    if load > 0.5:
        console.print(
            f"[bold red]The load average is {load:.1f}: the machine is not idle, and the figures are not good."
        )
    console.print("simulating, then timing cpejax ...")
    simulations, observations = simulate(size)
    with contextlib.ExitStack() as stack:
        peer = None if args.skip_peer else stack.enter_context(start_peer(simulations, observations, size))
        ours = measure_cpejax(simulations, observations, size, peer)
        if peer is not None:
            console.print("timing draws and densities of sbi ...")
        theirs = peer and peer.finish()[0]
    console.print("timing the whole job in a fresh process ...")
    whole = run_end_to_end(args.quick)
    result = {
        "command": " ".join(
            ["python benchmarks/speed.py", *["--skip-peer"] * args.skip_peer, *["--quick"] * args.quick]
        ),
        "versions": {
            name: version(name) for name in ("cpejax", "jax", "jaxlib", "equinox", "optax", "numpyro", "numpy")
        }
        | {"python": platform.python_version()},
        "cores": cores,
        "load_average_before": load,
        "simulations": size.simulations,
        "batch": BATCH,
        "draws": size.draws,
        "cpejax": ours,
        "end_to_end": whole,
        "chains": {length: chain(length) for length in ((2, 4) if args.quick else (10, 100))},
    }
    if theirs:
        ratios = {name: theirs[f"{name}_seconds"] / ours[f"{name}_seconds"] for name in ("sample", "log_prob")}
        result |= {"sbi": theirs, "ratios": ratios}
    report(result, console)
    if not args.quick or args.out != RESULTS:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()
