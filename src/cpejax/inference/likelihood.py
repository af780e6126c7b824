"""Log-likelihoods of one observation at many parameters, by which draws are refined and evidence is computed."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float

from cpejax.coordinates.prior import Values
from cpejax.program.density import log_density
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program


class Likelihood(eqx.Module):
    """The log-likelihood of a program's parameters, traceable by JAX.

    `words` name it, as attributes of draws and messages do; `exact` says whether it is the program's own.
    """

    words: ClassVar[str]
    exact: ClassVar[bool]

    @abstractmethod
    def __call__(self, values: Values, data: Values) -> Float[Array, " n"]:
        """The log-likelihood of one observation, `{site: shape}`, at `n` parameters, `{site: (n, *shape)}`."""

    def numbers_per_value(self) -> int:
        """How many values the evaluation at one parameter holds in memory at once, so that it can go in chunks.

        Unless a likelihood knows better, as many as the longest axes of its arrays have together.
        """
        return sum(max(w.shape, default=1) for w in jax.tree.leaves(eqx.filter(self, eqx.is_array)))


class ProgramLikelihood(Likelihood):
    """The log-density of a program's data sites, where all of them have one (`program.density.missing_density`).

    **Arguments:** `program`, without arguments, and its `graph`.

    >>> likelihood = ProgramLikelihood(program, model.graph)
    >>> found = likelihood({"mu": jax.numpy.zeros(2)}, {"y": jax.numpy.zeros(3)})
    >>> found.shape, likelihood.words
    ((2,), "the program's own density")
    """

    words: ClassVar[str] = "the program's own density"
    exact: ClassVar[bool] = True

    program: Program = eqx.field(static=True)
    graph: Graph = eqx.field(static=True)

    def __call__(self, values: Values, data: Values) -> Float[Array, " n"]:
        return jax.vmap(lambda theta: log_density(self.program, {**theta, **data}, self.graph.data))(values)

    def numbers_per_value(self) -> int:
        return 4 * sum(math.prod(shape) for shape in self.graph.shapes.values())  # with what is computed on the way
