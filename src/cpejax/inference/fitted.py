"""What a fit leaves: the networks, and all that is needed to use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from cpejax.coordinates.prior import Values
from cpejax.flows.base import Flow, Method
from cpejax.inference.settings import History, Training
from cpejax.program.graph import Graph
from cpejax.program.model import Model
from cpejax.program.probe import Probe
from cpejax.program.simulator import Program
from cpejax.program.tracing import run


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained flow with the model it belongs to.

    - `flow`: the networks; `model`: the program; `method`, `settings`: how it was made; `history`: the losses.
    - `offset`: what the flow's data are less than the program's, where float32 would not hold their digits otherwise;
        `probe`: what the program gives at a few simulations, by which it is told from others.
    """

    flow: Flow
    model: Model
    method: Method
    settings: Training
    history: History
    n_simulations: int
    offset: Mapping[str, np.ndarray] = field(default_factory=dict)
    probe: Probe | None = None

    @property
    def graph(self) -> Graph:
        """The program's graph."""
        return self.model.graph

    @property
    def program(self) -> Program:
        """The program, without arguments."""
        return self.model.bound

    @cached_property
    def from_sites(self) -> Callable[[Values], Values]:
        """The deterministic sites of the program, `{site: (n, *shape)}`, from all others."""

        def one(values: Values) -> Values:
            out: Values = {}
            run(self.program, values, deterministic=lambda name, msg: out.update({name: jnp.asarray(msg["value"])}))
            return out

        return jax.jit(jax.vmap(one))
