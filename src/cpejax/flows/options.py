"""The methods that the paper compares with, as frozen dataclasses of options: FMPE, PSE and AIO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import numpy as np
from jaxtyping import PRNGKeyArray

from cpejax.coordinates.vector import Kind
from cpejax.flows.aio import AIOFlow, Mask
from cpejax.flows.base import Flow
from cpejax.flows.diffusion import Diffusion
from cpejax.flows.fmpe import FMPEFlow
from cpejax.flows.pse import PSEFlow, Sampler
from cpejax.nn.embeddings import Embedding
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program

_TRAINING: Mapping[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.0}


@dataclass(frozen=True)
class FMPE:
    """Flow matching posterior estimation (Wildberger et al. 2023), with the paper's network.

    Draws outside the prior's support are drawn again, and `acceptance_rate` in the attributes of `sample` tells how
    many there were; with `coordinates="unconstrained"` there are none.

    **Arguments:**

    - `coordinates`: `"plain"`, the parameters themselves, as in the paper; `"unconstrained"`, through the bijection of
        each site's support; or `"prior"`, those in which the prior is standard normal.
    - `embed`: an Equinox module for a data site; see `cpe.CPE`.
    - `width`: of the networks of parameters and of data; `hidden`: of the network on both and time.
    - `sigma`: what is left of the base's spread at the end of a path.
    - `time_exponent`: α of the density `(1 + α) t^α` that training's times have; 0 is uniform, 1 or more puts weight on
        the end of the path.

    ??? example

        ```python
        posterior = cpe.fit(program, simulations, method=cpe.FMPE(), key=jax.random.key(1))
        ```

    ??? cite "Reference"

        Wildberger et al., Flow matching for scalable simulation-based inference, NeurIPS 2023.
    """

    training: ClassVar[Mapping[str, Any]] = _TRAINING

    coordinates: Kind = "plain"
    embed: Mapping[str, Embedding] = field(default_factory=dict)
    width: int = 128
    hidden: int = 256
    sigma: float = 0.001
    time_exponent: float = 0.0

    def __post_init__(self) -> None:
        check_options(self, counts=("width", "hidden"), one_of={"coordinates": Kind})
        for name, low, high in (("sigma", 0.0, 1.0), ("time_exponent", -1.0, math.inf)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (low < value < high or value == 0):
                raise ValueError(f"{name} must be a number above {low:g} and below {high:g}, found {value!r}.")

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
        return FMPEFlow(
            program,
            graph,
            simulations,
            self.embed,
            coordinates=self.coordinates,
            width=self.width,
            hidden=self.hidden,
            sigma=float(self.sigma),
            time_exponent=float(self.time_exponent),
            like=like,
            key=key,
        )


@dataclass(frozen=True)
class PSE:
    """Posterior score estimation (Sharrock et al. 2024), with the paper's network.

    **Arguments:**

    - `coordinates`, `embed`, `width`, `hidden`: see `cpe.FMPE`.
    - `sampler`: `"ode"`, the probability-flow equation, by `solver` and `steps` of `sample`; or `"sde"`, the reverse
        diffusion in `steps` steps, 200 unless said otherwise. The density is that of the equation in both cases.
    - `beta_min`, `beta_max`: the diffusion's rate at its start and end.

    ??? cite "Reference"

        Sharrock et al., Sequential neural score estimation: likelihood-free inference with conditional score based
        diffusion models, ICML 2024.
    """

    training: ClassVar[Mapping[str, Any]] = {**_TRAINING, "learning_rate": 3e-4}

    coordinates: Kind = "plain"
    embed: Mapping[str, Embedding] = field(default_factory=dict)
    width: int = 128
    hidden: int = 256
    sampler: Sampler = "ode"
    beta_min: float = 0.1
    beta_max: float = 10.0

    def __post_init__(self) -> None:
        check_options(self, counts=("width", "hidden"), one_of={"coordinates": Kind, "sampler": Sampler})
        _check_rates(self.beta_min, self.beta_max)

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
        return PSEFlow(
            program,
            graph,
            simulations,
            self.embed,
            coordinates=self.coordinates,
            width=self.width,
            hidden=self.hidden,
            diffusion=Diffusion(float(self.beta_min), float(self.beta_max)),
            sampler=self.sampler,
            like=like,
            key=key,
        )


@dataclass(frozen=True)
class AIO:
    """All-in-one posterior estimation (Gloeckler et al. 2024), with the paper's transformer.

    It conditions on any subset of sites: `given` may hold parameters, and lack data. What is not given is drawn,
    missing data as continuous numbers.

    **Arguments:**

    - `coordinates`, `sampler`, `beta_min`, `beta_max`: see `cpe.FMPE` and `cpe.PSE`.
    - `mask`: who may read whom. `"directed"`, as in the paper: each number its parents in the posterior program of what
        is not given. `"undirected"`: its neighbours in the moral graph. `"none"`: everyone everyone.
    - `layers`, `heads`: of the transformer; the original has 6 and 4.
    - `value`, `name`, `condition`: the widths of the embeddings of a number's value, of which number it is, and of
        whether it is given. `widening`: how many times wider the hidden layer of each block is.

    ??? example

        ```python
        posterior = cpe.fit(program, simulations, method=cpe.AIO(), key=jax.random.key(1))
        posterior.sample(1000, given={"mu": 0.3}, key=jax.random.key(2)).posterior["y"]
        ```

    ??? cite "Reference"

        Gloeckler et al., All-in-one simulation-based inference, ICML 2024.
    """

    training: ClassVar[Mapping[str, Any]] = _TRAINING

    coordinates: Kind = "plain"
    mask: Mask = "directed"
    layers: int = 1
    heads: int = 1
    value: int = 32
    name: int = 32
    condition: int = 8
    widening: int = 4
    sampler: Sampler = "ode"
    beta_min: float = 0.1
    beta_max: float = 10.0

    def __post_init__(self) -> None:
        counts = ("layers", "heads", "value", "name", "condition", "widening")
        check_options(self, counts=counts, one_of={"coordinates": Kind, "mask": Mask, "sampler": Sampler})
        _check_rates(self.beta_min, self.beta_max)
        width = self.value + self.name + self.condition
        if width % self.heads:
            raise ValueError(f"value + name + condition is {width}, which {self.heads} heads cannot share equally.")

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
        sizes = ("value", "name", "condition", "layers", "heads", "widening")
        return AIOFlow(
            program,
            graph,
            simulations,
            coordinates=self.coordinates,
            mask=self.mask,
            diffusion=Diffusion(float(self.beta_min), float(self.beta_max)),
            sampler=self.sampler,
            sizes={size: getattr(self, size) for size in sizes},
            like=like,
            key=key,
        )


def check_options(method: Any, counts: tuple[str, ...], one_of: Mapping[str, Any]) -> None:
    for name in counts:
        value = getattr(method, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, found {value!r}.")
    for name, allowed in one_of.items():
        value = getattr(method, name)
        if value not in get_args(allowed):
            raise ValueError(f"{name} must be one of {list(get_args(allowed))}, found {value!r}.")


def _check_rates(low: Any, high: Any) -> None:
    if not all(isinstance(x, int | float) for x in (low, high)) or not 0 <= low < high < math.inf:
        raise ValueError(
            f"beta_min and beta_max must be numbers, 0 <= beta_min < beta_max; found {low!r} and {high!r}."
        )


def check_embed(embed: Mapping[str, Embedding], graph: Graph) -> None:
    for name in embed:
        if name not in graph.data:
            raise ValueError(f"embed names '{name}', but the data sites are {list(graph.data)}.")
