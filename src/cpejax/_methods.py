"""The methods: recipes for flows, as frozen dataclasses of options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import PRNGKeyArray

from cpejax._ancestral import AncestralFlow
from cpejax._baselines import AIO, FMPE, PSE
from cpejax._embed import Embedding
from cpejax._flow import Flow
from cpejax._graph import Graph
from cpejax._invert import invert
from cpejax._program import Program


@dataclass(frozen=True)
class CPE:
    """Causal posterior estimation: a flow compiled from the inverse of the program's graph.

    **Arguments:**

    - `flow`: `"ancestral"`, the exact flow.
    - `embed`: an Equinox module for a data site, `{"x": module}`; it maps one member's value (standardised, with the
        site's event shape) to a vector of features. Without one, a site's numbers are the features.
    - `width`, `depth`: of each context network, residual blocks (networks that are pooled have half of them).
    - `hidden`: of the three layers of each field (the paper's blocks: 64).
    - `components`: of the normal mixture that straightens each coordinate before the flow.
    - `draws`: times, and noises for each simulation, in a step.
    - `members`: of a plate with more than twice as many members, so many are trained on in a step.
    """

    flow: Literal["ancestral"] = "ancestral"
    embed: Mapping[str, Embedding] = field(default_factory=dict)
    width: int = 64
    depth: int = 5
    hidden: int = 64
    components: int = 8
    draws: int = 2
    members: int = 32

    def __post_init__(self) -> None:
        if self.flow != "ancestral":
            raise ValueError(f"flow must be 'ancestral', found {self.flow!r}.")
        for name in ("width", "depth", "hidden", "components", "draws", "members"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, found {getattr(self, name)!r}.")

    def build(
        self,
        program: Program,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        *,
        key: PRNGKeyArray,
        like: Mapping[str, Any] | None = None,
    ) -> Flow:
        """The flow for a program, standardised by simulations."""
        for name in self.embed:
            if name not in graph.data:
                raise ValueError(f"embed names '{name}', but the data sites are {list(graph.data)}.")
        return AncestralFlow(
            program,
            invert(graph),
            graph,
            simulations,
            self.embed,
            width=self.width,
            depth=self.depth,
            hidden=self.hidden,
            components=self.components,
            draws=self.draws,
            members=self.members,
            like=like,
            key=key,
        )


METHODS: dict[str, type[Any]] = {"AIO": AIO, "CPE": CPE, "FMPE": FMPE, "PSE": PSE}
"""The methods by name, as saved posteriors name them."""
