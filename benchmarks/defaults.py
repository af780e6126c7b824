"""What the default settings of CPE are chosen by: the log-density of simulations that training has not seen.

    python benchmarks/defaults.py                            # every variant on every task: an hour
    python benchmarks/defaults.py two_moons default depth=3  # some, by name
    python benchmarks/defaults.py slcp activation=silu,key=2 # several options changed, `key` that of `fit` (default 1)
    python benchmarks/defaults.py tree ensemble=3,emulate=false
    python benchmarks/defaults.py --docs                     # the tables of docs/inference.md and docs/emulation.md

Its mean differs from that of the exact posterior by the mean divergence between the two, so differences between
variants are differences in divergence. Each task has 10,000 simulations for training and 4,000 for this. What a run
adds goes into `results/defaults.json` at once, and what is there is not run again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import accuracy
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import page

import cpejax as cpe
from cpejax.flows.ancestral import networks
from cpejax.nn import activations

RESULTS = Path(__file__).parent / "results" / "defaults.json"
METHOD = {"depth", "width", "hidden", "components"}
FIT = {"ensemble", "emulate"}
ACTIVATIONS = {"silu": jax.nn.silu, "softsign_linear": activations.softsign_linear}
VARIANTS = [
    "default",
    "depth=3",
    "depth=4",
    "depth=7",
    "width=48",
    "components=1",
    "components=4",
    "activation=silu",
    "weight_decay=0.1",
    "weight_decay=0.02",
    "learning_rate=0.002",
    "learning_rate=0.008",
    "steps=10000",
    "steps=40000",
    "batch_size=200",
]
"""The defaults with one option changed."""
SHOWN = {
    ("inference.md", "defaults"): {
        "defaults": "emulate=false",
        "`depth=3`": "depth=3,emulate=false",
        "`depth=7`": "depth=7,emulate=false",
        "`components=1`": "components=1,emulate=false",
        "`weight_decay=.02`": "weight_decay=0.02,emulate=false",
        "`learning_rate=.002`": "learning_rate=0.002,emulate=false",
    },
    ("emulation.md", "ensembles"): {
        "`emulate=False`": "emulate=false",
        "`emulate=False, ensemble=3`": "ensemble=3,emulate=false",
        "`emulate=False, ensemble=5`": "ensemble=5,emulate=false",
        "defaults": "default",
        "`ensemble=3`": "ensemble=3",
    },
}
"""The tables of the documentation: their columns, and the variant in each. A task is there if it has the second."""


def program_of(task: str) -> tuple[Any, Any]:
    if task == "groups_8":
        return accuracy.groups_program(8), ["y"]
    known = cpe.tasks.get(task)
    return known.program, known.observed


@eqx.filter_jit
def log_densities(flow: Any, values: Any, data: Any) -> jax.Array:
    def one(x: Any) -> jax.Array:
        value, given = x
        return flow.log_prob({name: v[None] for name, v in value.items()}, given, steps=20)[0]

    return jax.lax.map(one, (values, data), batch_size=500)


def measure(task: str, variant: str) -> dict[str, float]:
    program, observed = program_of(task)
    options = {} if variant == "default" else dict(option.split("=") for option in variant.split(","))
    activation = ACTIVATIONS[options.pop("activation", "softsign_linear")]
    key = int(options.pop("key", 1))
    numbers = {name: json.loads(value) for name, value in options.items()}
    simulations = cpe.simulate(cpe.Model(program, observed=observed), 10_000, key=jax.random.key(0))
    fresh = cpe.simulate(cpe.Model(program, observed=observed), 4_000, key=jax.random.key(99))
    jax.clear_caches()  # compiled programs do not know which activation they were traced with
    began = time.monotonic()
    with mock.patch.object(networks, "softsign_linear", activation):
        posterior = cpe.fit(
            program,
            simulations,
            method=cpe.CPE(**{name: v for name, v in numbers.items() if name in METHOD}),
            key=jax.random.key(key),
            progress=False,
            training=cpe.Training(**{name: v for name, v in numbers.items() if name not in METHOD | FIT}),
            **{name: v for name, v in numbers.items() if name in FIT},
        )
        seconds = time.monotonic() - began
        return {**held_out(posterior, fresh), "seconds": round(seconds, 1)}


def held_out(posterior: cpe.Posterior, fresh: cpe.Simulations) -> dict[str, float]:
    values, data = (
        {name: jnp.asarray(fresh[name]) for name in names}
        for names in (posterior.graph.parameters, posterior.graph.data)
    )
    found = np.asarray(log_densities(posterior.flow, values, data))
    return {
        "log_density": round(float(found.mean()), 4),
        "epochs": len(posterior.history.train),
        "weights": posterior.weights,
    }


def document(known: dict[str, Any]) -> None:
    """The tables of the documentation, from what is stored."""

    def cell(found: dict[str, Any], name: str) -> str:
        return f"{found[name]['log_density']:.3f} ({found[name]['seconds']:.0f} s)" if name in found else "–"

    for (name, mark), columns in SHOWN.items():
        rows = [
            [task.replace("_", " "), *(cell(found, variant) for variant in columns.values())]
            for task, found in known.items()
            if list(columns.values())[1] in found
        ]
        page.fill(Path(__file__).parents[1] / "docs" / name, {mark: page.table(["", *columns], rows)})


def main(arguments: list[str]) -> None:
    if arguments == ["--docs"]:
        document(json.loads(RESULTS.read_text()))
        return
    tasks = [arguments[0]] if arguments else ["two_moons", "slcp", "groups_8", "hierarchical"]
    for task in tasks:
        for variant in arguments[1:] or VARIANTS:
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            if variant in known.get(task, {}):
                continue
            known.setdefault(task, {})[variant] = measure(task, variant)
            print(task, variant, known[task][variant], flush=True)
            RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
