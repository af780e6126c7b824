"""What each form that is there for XLA's CPU backend gains: each is replaced by the plain one in turn.

    python benchmarks/ablations.py                        # all models; about a quarter of an hour
    python benchmarks/ablations.py "two moons" --rounds 5 # one of them, fewer rounds
    python benchmarks/ablations.py "two moons" --only add tail   # and some of the forms
    python benchmarks/ablations.py --docs                 # the table of docs/inference.md, from the results

Variants take turns in one process, an epoch and 10,000 draws at a time, with one more before that does not count, and
are compared with the default of the same round. What is compared is the processor's time, of all cores, which
others who use the machine as well hardly change; `elapsed` is kept beside it. The figure is the median ratio, with its
quartiles; `nothing` changes nothing: what it differs from 1 by is noise. Two moons and the hierarchical example are
trained by `CPE()` as by default, in parts; forms that it has no use for are measured with a method or a model that
has.

Results are written to benchmarks/results/ablations.json as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import page
from jax.scipy.special import ndtr

import cpejax as cpe
from cpejax.flows.blocks import network
from cpejax.inference import sampling
from cpejax.inference.progress import Bar
from cpejax.nn import activations, normal
from cpejax.tasks import two_moons
from cpejax.util import cores

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ablations.json"
DRAWS = 10_000


# What is measured


def images() -> None:
    """A blob in an image, somewhere."""
    at = numpyro.sample("at", dist.Uniform(-1.0, 1.0).expand([2]).to_event(1))
    side = jnp.linspace(-1.0, 1.0, 16)
    blob = jnp.exp(-8 * ((side[:, None] - at[0]) ** 2 + (side - at[1]) ** 2))
    numpyro.sample("x", dist.Normal(blob, 0.1).to_event(2))


def model(name: str) -> tuple[cpe.Model, cpe.Method, int]:
    """A model, its method, and its number of simulations."""
    if name == "hierarchical":
        return cpe.Model(runpy.run_path(str(ROOT / "examples" / "hierarchical.py"))["program"]), cpe.CPE(), 10_000
    if name == "images":
        embed = cpe.ConvEmbedding((16, 16), dims=2, key=jax.random.key(0))
        return cpe.Model(images, observed=["x"]), cpe.CPE(embed={"x": embed}), 1_000
    methods = {"two moons": cpe.CPE(), "FMPE()": cpe.FMPE(), "TriangularCPE()": cpe.TriangularCPE()}
    return cpe.Model(two_moons.program, observed=["x"]), methods[name], 10_000


MODELS = ("two moons", "hierarchical", "FMPE()", "TriangularCPE()", "images")
CPE = MODELS[:2]


# The plain forms


def tail_by_ndtr(x: jax.Array) -> jax.Array:
    """`Φ(−|x|)`."""
    return ndtr(-jnp.abs(x))


@dataclass(frozen=True)
class Form:
    """A form that is there for speed, what replaces it, and the models that have a use for it.

    `changes`: what is replaced, `(module or class, name, plain form)`; wherever the library has imported it.
    """

    what: str
    changes: tuple[tuple[Any, str, Any], ...]
    models: tuple[str, ...] = CPE


FORMS = {
    "nothing": Form("the default once more", (), MODELS),
    "activation": Form("`softsign_linear`, not SiLU", ((activations, "softsign_linear", jax.nn.silu),)),
    "tail": Form("own normal tail, not `ndtr`", ((normal, "tail", tail_by_ndtr),)),
    "add": Form("components of a mixture summed one by one", ((normal, "add", lambda x: x.sum(0)),)),
    "node by node": Form(
        "blocks of few nodes one by one",
        ((network, "UNROLLED", 0), (network, "UNROLLED_BLOCKS", 0)),
        ("TriangularCPE()",),
    ),
    "channels last": Form(
        "channels last in convolutions", ((cores, "channels_last", lambda function: function),), ("images",)
    ),
}


@contextmanager
def replaced(form: Form) -> Iterator[None]:
    """With the plain form, in every module of the library that has the other by this name."""
    with ExitStack() as stack:
        for where, name, plain in form.changes:
            original = getattr(where, name)
            modules = [m for key, m in sys.modules.items() if key.startswith("cpejax")]
            for holder in (where, *(m for m in modules if m is not where and getattr(m, name, None) is original)):
                stack.enter_context(mock.patch.object(holder, name, plain))
        yield


def clocks() -> np.ndarray:
    """The processor's seconds, of all cores, and those that elapse."""
    return np.array([time.process_time(), time.perf_counter()])


class Variant(threading.Thread):
    """A posterior that is fitted an epoch at a time, and then drawn from, with a form replaced."""

    def __init__(self, form: Form, name: str, simulations: cpe.Simulations, epochs: int):
        super().__init__(daemon=True)
        self.form, self.model, self.method, self.simulations = form, *model(name)[:2], simulations
        self.left = epochs
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.posterior: cpe.Posterior | None = None
        # Of its own: what was compiled for another variant has other forms.
        self.compiled = eqx.filter_jit(lambda *args: sampling._draw(*args))
        self.start()

    def run(self) -> None:
        """Fit, when it is this variant's turn."""
        self.go.acquire()
        try:
            self.posterior = cpe.fit(
                self.model, self.simulations, key=jax.random.key(1), method=self.method, progress=False
            )
        finally:
            self.done.release()

    def pause(self) -> None:
        """Wait for the next turn; `fit` ends after the last as after Ctrl-C."""
        self.done.release()
        self.go.acquire()
        if self.left < 0:
            raise KeyboardInterrupt

    def epoch(self) -> np.ndarray:
        """The `clocks` of an epoch; the first one, after compiling. After the last, the fit is over."""
        self.left -= 1
        with replaced(self.form):
            began = clocks()
            self.go.release()
            self.done.acquire()
            return clocks() - began

    def draw(self, given: dict[str, Any], seed: int) -> np.ndarray:
        """The `clocks` of the draws for an observation."""
        assert self.posterior is not None, "the fit has failed"
        with replaced(self.form), mock.patch.object(sampling, "_compiled_draw", self.compiled):
            began = clocks()
            self.posterior.sample(DRAWS, given=given, key=jax.random.key(seed))
            return clocks() - began


def pause(*_: Any) -> None:
    """What `fit` calls at the end of each epoch, instead of its progress bar."""
    variant = threading.current_thread()
    assert isinstance(variant, Variant)
    variant.pause()


def summary(seconds: list[np.ndarray], default: list[np.ndarray]) -> dict[str, float]:
    """The median ratio of the processor's seconds and its quartiles; and the median ratio of those that elapse."""
    processor, elapsed = (np.array(seconds) / np.array(default)).T
    low, middle, high = np.quantile(processor, [0.25, 0.5, 0.75]).round(3).tolist()
    return {"ratio": middle, "low": low, "high": high, "elapsed": round(float(np.median(elapsed)), 3)}


def measure(name: str, forms: list[str], rounds: int) -> dict[str, Any]:
    """What each form gains for a model, in epochs and in draws."""
    made, _, n = model(name)
    simulations = cpe.simulate(made, n, key=jax.random.key(0))
    observations = cpe.simulate(made, rounds + 1, key=jax.random.key(2))
    default = Form("the default", ())
    variants = {
        key: Variant(form, name, simulations, 2 * rounds + 1)
        for key, form in {"default": default, **{key: FORMS[key] for key in forms}}.items()
    }

    def turns(what: str, turn: Callable[[Variant, int], np.ndarray]) -> None:
        for key, variant in variants.items():
            print(f"{name}: compiling {what}, {key} ({turn(variant, 0)[1]:.1f} s)", flush=True)
        seconds: dict[str, list[np.ndarray]] = {key: [] for key in variants}
        for i in range(1, rounds + 1):
            keys = [*variants][i % len(variants) :] + [*variants][: i % len(variants)]
            for key in keys:
                turn(variants[key], i)
                seconds[key].append(turn(variants[key], i))
        out["seconds"][what] = np.median(seconds["default"], axis=0).round(4).tolist()
        for key in forms:
            out["forms"].setdefault(key, {})[what] = summary(seconds[key], seconds["default"])
            print(f"{name}: {what} without {key}: {out['forms'][key][what]}", flush=True)

    out: dict[str, Any] = {"rounds": rounds, "load": os.getloadavg()[0], "seconds": {}, "forms": {}}
    with mock.patch.object(Bar, "update", pause):
        turns("epoch", lambda variant, _: variant.epoch())
        for variant in variants.values():
            variant.epoch()  # the fit ends
            variant.join()
    given = {site: observations[site] for site in made.graph.data}
    turns("draws", lambda variant, i: variant.draw({site: x[i] for site, x in given.items()}, i))
    return out


def document(found: dict[str, Any]) -> None:
    """The table of docs/inference.md."""
    rows = []
    for key, form in FORMS.items():
        cells: list[str] = []
        for name in MODELS:
            result = found.get(name, {}).get("forms", {}).get(key)
            cells.append(" ".join(f"{result[what]['ratio']:.2f}" for what in ("epoch", "draws")) if result else "")
        rows.append([form.what, *cells])
    page.fill(ROOT / "docs" / "inference.md", {"ablations": page.table(["", *MODELS], rows)})


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="which (default: all)")
    parser.add_argument("--only", nargs="+", choices=list(FORMS), default=list(FORMS), help="some of the forms")
    parser.add_argument("--rounds", type=int, default=15, help="how often all take turns (default: %(default)s)")
    parser.add_argument("--docs", action="store_true", help="only the table of the documentation")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.docs:
        document(found)
        return
    for name in options.models or MODELS:
        forms = [key for key in options.only if name in FORMS[key].models]
        result = measure(name, forms, options.rounds)
        result["forms"] = found.get(name, {}).get("forms", {}) | result["forms"]
        found[name] = result
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
