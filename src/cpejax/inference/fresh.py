"""Rows that are made anew for every epoch: by the program itself where JAX can run it, or by an emulator."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from cpejax.coordinates.prior import Values
from cpejax.flows.ancestral.flow import AncestralFlow
from cpejax.flows.base import Flow
from cpejax.inference.emulator import emulated
from cpejax.program.distributions import unwrap
from cpejax.program.model import Model
from cpejax.program.simulator import Simulator
from cpejax.program.tracing import read, run

MOST_INVALID = 0.1
"""The largest share of simulations of an epoch, or of a block of a folder, that may be not finite."""


EPOCHS = 2
"""Epochs that have the same emulated simulations: making them takes about as long as training on them."""


class EmulatedRows:
    """For each epoch as many emulated simulations as there are real ones to train on, and these.

    The emulated ones are new in every second epoch; `made` counts them.
    """

    def __init__(self, flow: Flow, emulator: AncestralFlow, rows: Any, n: int, *, key: PRNGKeyArray):
        self.flow, self.emulator, self.rows, self.n, self.key = flow, emulator, rows, n, key
        self.number, self.both, self.made = -1, None, 0

    def __call__(self, epoch: int) -> Any:
        number = epoch // EPOCHS
        if number != self.number:
            new = _emulate_rows(self.flow, self.emulator, jax.random.fold_in(self.key, number), self.n)
            both = jax.tree.map(lambda a, b: np.concatenate([np.asarray(a), np.asarray(b)]), self.rows, new)
            self.number, self.both, self.made = number, both, (number + 1) * self.n
        return self.both


class SimulatedRows:
    """For each epoch new simulations of the program itself, which JAX runs. `made` counts them.

    Those that are not finite are replaced by others of the same epoch, and counted.
    """

    def __init__(self, flow: Flow, n: int, *, key: PRNGKeyArray):
        self.flow, self.n, self.key, self.made, self.dropped = flow, n, key, 0, 0

    @staticmethod
    def check(model: Model) -> None:
        """An error where a simulator is on the host."""
        for name, site in read(model.bound).items():
            fn = unwrap(site.fn)
            if isinstance(fn, Simulator) and fn.host:
                raise ValueError(
                    f"Site '{name}' is simulated on the host, so that an epoch cannot draw simulations of its own. "
                    "Simulate first: cpe.fit(model, cpe.simulate(model, 10_000, key=...), key=...)."
                )

    def __call__(self, epoch: int) -> Any:
        rows, bad = _simulate_rows(self.flow, jax.random.fold_in(self.key, epoch), self.n)
        self.made, self.dropped = (epoch + 1) * self.n, self.dropped + int(bad)
        if int(bad) > MOST_INVALID * self.n:
            raise ValueError(
                f"{int(bad)} of {self.n} new simulations ({100 * int(bad) / self.n:.1f} %) are not finite; more than "
                f"{100 * MOST_INVALID:g} % are an error. Simulate first, by cpe.simulate, which says where."
            )
        return rows

    @property
    def note(self) -> str:
        """What was left out."""
        what = f"{self.dropped} of {self.made} fresh simulations were not finite, and left out."
        return what if self.dropped else ""


@eqx.filter_jit
def _simulate_rows(flow: Flow, key: PRNGKeyArray, n: int) -> tuple[Any, Array]:
    coordinates = flow.coordinates
    sites = list(coordinates.graph.sites)

    def one(key: PRNGKeyArray) -> Values:
        out: Values = {}

        def visit(name: str, msg: dict[str, Any]) -> None:
            out[name] = jnp.asarray(msg["value"], float)

        run(coordinates.program, {}, visit, key)
        return {name: out[name] for name in sites}

    values = jax.vmap(one)(jax.random.split(key, n))
    good = jnp.all(jnp.stack([jnp.isfinite(x).reshape(n, -1).all(1) for x in values.values()]), axis=0)
    # The finite ones first, and as often as needed.
    which = jnp.argsort(~good)[jnp.arange(n) % jnp.maximum(good.sum(), 1)]
    return flow.prepare({name: x[which] for name, x in values.items()}), n - good.sum()


@eqx.filter_jit
def _emulate_rows(flow: Flow, emulator: AncestralFlow, key: PRNGKeyArray, n: int) -> Any:
    return flow.prepare(emulated(emulator, key, n))
