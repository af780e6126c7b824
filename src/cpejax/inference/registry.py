"""The methods: recipes for flows, as frozen dataclasses of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from jaxtyping import PRNGKeyArray

from cpejax.coordinates.vector import Kind
from cpejax.flows.ancestral.flow import AncestralFlow
from cpejax.flows.base import Flow
from cpejax.flows.blocks.discrete import DiscreteFlow, InverseBy
from cpejax.flows.blocks.network import Reads
from cpejax.flows.blocks.storage import Storage
from cpejax.flows.blocks.triangular import TriangularFlow
from cpejax.flows.options import AIO, FMPE, PSE, check_embed, check_options
from cpejax.nn.embeddings import Embedding
from cpejax.program.graph import Graph
from cpejax.program.inverse import invert
from cpejax.program.simulator import Program

FlowName = Literal["ancestral", "triangular", "discrete"]
Inverse = Literal["faithful", "reverse"]

_PAPER = {"inverse", "coordinates", "condition", "reads", "storage", "rank"}
_OPTIONS: Mapping[str, set[str]] = {
    "ancestral": {"depth", "components", "members", "first"},
    "triangular": _PAPER,
    "discrete": _PAPER | {"blocks", "inverse_by"},
}
"""The options of each flow, besides those that all have: `embed`, `width` and `hidden`."""


@dataclass(frozen=True)
class CPE:
    """Causal posterior estimation: a flow compiled from the inverse of the program's graph.

    **Arguments:**

    - `flow`: `"ancestral"`, the exact flow; or the paper's own: `"triangular"`, its continuous flow, which is biased
        where parameters are correlated, or `"discrete"`, its discrete one.
    - `embed`: an Equinox module for a data site, `{"x": module}`; it maps one member's value (standardised, with the
        site's event shape) to a vector of features. Without one, a site's numbers are the features.
    - `hidden`: of the three layers of each field, or the size of the paper's blocks.
    - `width`: of each context network (64 by default), or of the paper's data network (128).

    Of the ancestral flow:

    - `depth`: of each context network, residual blocks (networks that are pooled have half of them).
    - `components`: of the normal mixture that straightens each coordinate before the flow.
    - `members`: of a plate with more than twice as many members, so many are trained on in a step.
    - `first`: parameters that are drawn before all others, so that `given` of `sample` and `log_prob` may hold them;
        with each the parameters that its prior depends on.

    Of the paper's flows:

    - `inverse`: the posterior program, `"faithful"`, or `"reverse"` as in the paper, which drops true dependencies.
    - `coordinates`: `"plain"`, the parameters themselves, where draws outside the prior's support are drawn again: the
        paper's, and the triangular flow's default. `"unconstrained"`, through the bijection of each site's support.
        `"prior"`, in which the prior is standard normal: the default of the discrete flow with a faithful inverse.
    - `condition`: data and time are added after the `"first"` map, as in the paper's experiments, or after `"every"`.
    - `reads`: `"ancestors"`, all maps are masked by the posterior program, as in the paper, so through four of them
        a parameter reads its ancestors up to four steps away; or `"parents"`, it reads its parents only.
    - `storage`: of block matrices: `"dense"`, `"edges"`, or what was measured to be faster (`"auto"`).
    - `rank`: of the blocks between different parameters; `None`: whole blocks.
    - `blocks`: the discrete flow's maps, one after the other.
    - `inverse_by`: the discrete flow draws by `"bisection"`, or by a `"regressor"`, trained beside it, and one step of
        Newton's method.
    """

    flow: FlowName = "ancestral"
    embed: Mapping[str, Embedding] = field(default_factory=dict)
    width: int | None = None
    depth: int = 5
    hidden: int = 64
    components: int = 8
    members: int = 32
    first: Sequence[str] = ()
    inverse: Inverse = "faithful"
    coordinates: Kind | None = None
    condition: Literal["first", "every"] = "first"
    reads: Reads = "ancestors"
    storage: Storage = "auto"
    rank: int | None = None
    blocks: int = 1
    inverse_by: InverseBy = "bisection"

    def __post_init__(self) -> None:
        if isinstance(self.first, str) or not all(isinstance(name, str) for name in self.first):
            raise ValueError(f"first must be a list of the names of parameters, found {self.first!r}.")
        object.__setattr__(self, "first", tuple(self.first))
        check_options(
            self,
            counts=("hidden", "depth", "components", "members", "blocks"),
            one_of={
                "flow": FlowName,
                "inverse": Inverse,
                "condition": Literal["first", "every"],
                "reads": Reads,
                "storage": Storage,
                "inverse_by": InverseBy,
            },
        )
        given = [name for name in ("width", "rank") if getattr(self, name) is not None]
        check_options(self, counts=tuple(given), one_of={"coordinates": Kind} if self.coordinates is not None else {})
        for f in fields(self):
            flows = [flow for flow, options in _OPTIONS.items() if f.name in options]
            if flows and self.flow not in flows and getattr(self, f.name) != f.default:
                raise ValueError(
                    f"{f.name}={getattr(self, f.name)!r} is an option of flow={' or '.join(map(repr, flows))}; flow "
                    f"is {self.flow!r}, which has {sorted(_OPTIONS[self.flow])}."
                )
        if self.flow == "discrete" and self.coordinates == "plain":
            raise ValueError(
                "The discrete flow has no plain coordinates: its map could leave the prior's support, where the "
                "likelihood is zero. Use coordinates='prior' or 'unconstrained'."
            )
        if self.rank is not None and self.storage != "auto":
            raise ValueError(f"Blocks of rank {self.rank} have their own storage; found storage={self.storage!r}.")

    @property
    def training(self) -> Mapping[str, Any]:
        """What training has other defaults for."""
        return {} if self.flow == "ancestral" else _TRAINING[self.flow]

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
        check_embed(self.embed, graph)
        options = {name: getattr(self, name) for name in _OPTIONS[self.flow] - {"inverse", "first"}}
        options["width"] = self.width or (64 if self.flow == "ancestral" else 128)
        if self.flow != "ancestral" and self.coordinates is None:
            # In reversed order a parameter comes before its prior parents, which its prior coordinates depend on.
            natural = "prior" if self.inverse == "faithful" else "unconstrained"
            options["coordinates"] = "plain" if self.flow == "triangular" else natural
        return _FLOWS[self.flow](
            program,
            invert(graph, self.inverse, first=self.first),
            graph,
            simulations,
            self.embed,
            hidden=self.hidden,
            **options,
            like=like,
            key=key,
        )


_FLOWS: Mapping[str, Any] = {"ancestral": AncestralFlow, "triangular": TriangularFlow, "discrete": DiscreteFlow}
_TRAINING: Mapping[str, Mapping[str, Any]] = {  # the rates of the runs on two moons in docs/triangular.md
    "triangular": {"learning_rate": 2e-3, "weight_decay": 0.0},
    "discrete": {"learning_rate": 4e-3, "weight_decay": 0.0},
}

METHODS: dict[str, type[Any]] = {"AIO": AIO, "CPE": CPE, "FMPE": FMPE, "PSE": PSE}
"""The methods by name, as saved posteriors name them."""
