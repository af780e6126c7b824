"""Log-densities that a program has of its own: of its data, and of its parameters by their prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float

from cpejax.program.distributions import base_constraint, mask_of, unwrap
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program, Simulator
from cpejax.program.tracing import run

MOST_EVALUATED = 5_000_000
"""Maximum number of values, of parameters and data, whose log-density is evaluated at once."""


def log_density(program: Program, values: Mapping[str, Array], sites: Collection[str]) -> Float[Array, ""]:
    """The log-density of some sites at values of all of them, without what `numpyro.handlers.mask` hides.

    It is −∞ where a value is outside the support, which NumPyro says only while its validation is on.

    >>> values = {"mu": jax.numpy.zeros(()), "y": jax.numpy.zeros(3)}
    >>> round(float(log_density(program, values, ["y"])), 4)  # - 3 log(2 pi) / 2
    -2.7568
    """
    found = [jnp.zeros(())]

    def visit(name: str, msg: dict[str, Any]) -> None:
        if name in sites:
            found.append(_log_prob(msg["fn"], msg["value"]))

    run(program, values, visit)
    return sum(found[1:], found[0])


def _log_prob(fn: dist.Distribution, value: Array) -> Float[Array, ""]:
    support, kept = unwrap(fn).support, mask_of(fn)
    inside = jnp.ones(kept.shape, bool) if support is None else jnp.asarray(support(value))
    kept = kept.reshape(*inside.shape, -1).any(-1) if kept.ndim > inside.ndim else kept  # a mask is of whole events
    return jnp.where(jnp.all(inside | ~kept), jnp.sum(fn.log_prob(value)), -jnp.inf)


def missing_density(program: Program, graph: Graph) -> str:
    """Why the data of a program have no log-density, in a few words; empty where they have one.

    >>> missing_density(program, model.graph)
    ''
    """
    why = ""

    def kind(name: str, msg: dict[str, Any]) -> None:
        nonlocal why
        base = unwrap(msg["fn"])
        if name in graph.data and isinstance(base, Simulator | dist.Delta):  # beside a Delta, rounding is all
            why = f"site '{name}' is a {type(base).__name__}"

    example = _example(graph)
    jax.eval_shape(lambda v: run(program, v, kind) and None, example)
    if not why:
        try:
            if "callback" in str(jax.make_jaxpr(lambda v: log_density(program, v, graph.data))(example)):
                why = "the program calls a function on the host"
        except NotImplementedError:  # a distribution of the user's own that can only be sampled
            why = "a data site has no log_prob"
    return why


def _example(graph: Graph) -> dict[str, Array]:
    return {name: jnp.zeros(site.shape) for name, site in graph.sites.items()}


class ProgramDensity:
    """The log-density of a program's data at many parameters, and that of the prior.

    `missing` says why there is no log-density of the data, where there is none. `flat` says whether the parameters'
    densities are by volume, as those of a simplex or of a correlation matrix are not.
    """

    def __init__(self, program: Program, graph: Graph):
        self.graph, self.missing, self.flat = graph, missing_density(program, graph), True

        def kind(name: str, msg: dict[str, Any]) -> None:
            if name in graph.parameters and base_constraint(msg["fn"]).event_dim > 0:
                self.flat = False

        jax.eval_shape(lambda v: run(program, v, kind) and None, _example(graph))
        self._of_prior: Callable = jax.jit(jax.vmap(lambda v: log_density(program, v, graph.parameters)))
        # One observation, and many parameters for it.
        each = jax.vmap(lambda theta, data: log_density(program, {**theta, **data}, graph.data), in_axes=(0, None))
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
