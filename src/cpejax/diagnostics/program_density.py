"""Log-densities that a program has of its own: of its data, and of its parameters by their prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float

from cpejax.program.distributions import base_constraint, unwrap
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program, Simulator
from cpejax.program.tracing import run

MOST_EVALUATED = 5_000_000
"""Maximum number of values, of parameters and data, whose log-density is evaluated at once."""


class ProgramDensity:
    """The log-density of a program's data at many parameters, and that of the prior.

    `missing` says why there is no log-density of the data, where there is none. `flat` says whether the parameters'
    densities are by volume, as those of a simplex or of a correlation matrix are not.
    """

    def __init__(self, program: Program, graph: Graph):
        self.graph, self.missing, self.flat = graph, "", True

        def density(values: dict[str, Array], of: Sequence[str]) -> Array:
            found = [jnp.zeros(())]

            def visit(name: str, msg: dict[str, Any]) -> None:
                if name in of:
                    found.append(jnp.sum(msg["fn"].log_prob(msg["value"])))

            run(program, values, visit)
            return sum(found[1:], found[0])

        def kind(name: str, msg: dict[str, Any]) -> None:
            base = unwrap(msg["fn"])
            if name in graph.data and isinstance(base, Simulator | dist.Delta):  # beside a Delta, rounding is all
                self.missing = f"site '{name}' is a {type(base).__name__}"
            if name in graph.parameters and base_constraint(msg["fn"]).event_dim > 0:
                self.flat = False

        example = {name: jnp.zeros(site.shape) for name, site in graph.sites.items()}
        jax.eval_shape(lambda v: run(program, v, kind) and None, example)
        if not self.missing:
            try:
                if "callback" in str(jax.make_jaxpr(lambda v: density(v, graph.data))(example)):
                    self.missing = "the program calls a function on the host"
            except NotImplementedError:  # a distribution of the user's own that can only be sampled
                self.missing = "a data site has no log_prob"
        self._of_prior: Callable = jax.jit(jax.vmap(lambda v: density(v, graph.parameters)))
        # One observation, and many parameters for it.
        each = jax.vmap(lambda theta, data: density({**theta, **data}, graph.data), in_axes=(0, None))
        self._of_data: Callable = jax.jit(jax.vmap(each))

    def prior(self, values: Mapping[str, np.ndarray]) -> Float[np.ndarray, " n"] | None:
        """The prior's log-densities of simulations, values of all sites `{site: (n, *shape)}`, where it has one."""
        try:
            return np.asarray(self._of_prior(dict(values)), np.float64)
        except NotImplementedError:
            return None

    def likelihood(self, theta: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> Float[np.ndarray, "n k"]:
        """Log-likelihoods: parameters `{site: (n, k, *shape)}`, data `{site: (n, *shape)}`."""
        first = theta[self.graph.parameters[0]]
        n, k = first.shape[:2]
        values = k * sum(math.prod(site.shape) for site in self.graph.sites.values())
        size = max(1, min(50, MOST_EVALUATED // values))
        out = []
        for start in range(0, n, size):
            which = np.arange(start, start + size) % n  # one shape, one compilation
            found = self._of_data({k: x[which] for k, x in theta.items()}, {k: x[which] for k, x in data.items()})
            out.append(np.asarray(found)[: n - start])
        return np.concatenate(out).astype(np.float64)
