"""The options of the ancestral flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from cpejax.coordinates.data import DataCoordinates
from cpejax.coordinates.prior import Coordinates
from cpejax.flows.ancestral.flow import AncestralFlow
from cpejax.flows.base import Flow, Method, check_embed, check_options
from cpejax.nn.embeddings import Embedding
from cpejax.program.conditional import ConditionalProgram
from cpejax.program.graph import Graph
from cpejax.program.inverse import invert
from cpejax.program.simulator import Program


@dataclass(frozen=True)
class CPE(Method):
    """Causal posterior estimation: an exact flow, compiled from the inverse of the program's graph.

    **Arguments:**

    - `embed`: an Equinox module for a data site, `{"x": module}`; it maps one member's value (standardised, with the
        site's event shape) to a vector of features. Without one, a site's scalars are the features.
    - `width`, `depth`: of each context network; its depth in residual blocks (networks that are pooled have half of
        them).
    - `hidden`: of the three layers of each field.
    - `components`: of the normal mixture that straightens each coordinate before the flow.
    - `members`: how many members of a plate are trained on in a step, where it has more than twice as many.
    - `first`: parameters that are drawn before all others, so that `given` of `sample` and `log_prob` may hold them;
        with each the parameters that its prior depends on.

    >>> method = cpe.CPE(width=128)  # cpe.fit(model, simulations, method=method, key=...)
    >>> method.width, method.training["learning_rate"]
    (128, 0.004)
    """

    flow: ClassVar[type[Flow]] = AncestralFlow
    training: ClassVar[Mapping[str, Any]] = {"learning_rate": 4e-3, "weight_decay": 0.05}

    embed: Mapping[str, Embedding] = field(default_factory=dict)
    width: int = 64
    depth: int = 5
    hidden: int = 64
    components: int = 8
    members: int = 32
    first: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.first, str) or not all(isinstance(name, str) for name in self.first):
            raise ValueError(f"first must be a list of the names of parameters, found {self.first!r}.")
        object.__setattr__(self, "first", tuple(self.first))
        check_options(self)

    def build(
        self,
        program: Program,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        *,
        key: PRNGKeyArray,
        like: Mapping[str, Any] | None = None,
    ) -> Flow:
        check_embed(self.embed, graph)
        coordinates = Coordinates(program, graph, {name: jnp.asarray(x, float) for name, x in simulations.items()})
        return self.compile(coordinates, invert(graph, first=self.first), simulations, key=key, like=like)

    def compile(
        self,
        coordinates: Coordinates | DataCoordinates,
        conditional: ConditionalProgram,
        simulations: Mapping[str, np.ndarray],
        *,
        key: PRNGKeyArray,
        like: Mapping[str, Any] | None = None,
    ) -> AncestralFlow:
        """The flow of a conditional program: the posterior program, or the forward program."""
        options = {name: x for name, x in self.options().items() if name != "first"}
        return AncestralFlow(coordinates, conditional, simulations, **options, like=like, key=key)

    def least_weights(self) -> int:
        return self.width**2 * self.depth + self.hidden**2 + self.components
