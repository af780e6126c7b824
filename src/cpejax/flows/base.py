"""What every flow gives the engine. Methods differ only in their flow."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Coordinates, Values
from cpejax.coordinates.standardise import Fixed
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program

Solver = Literal["euler", "rk45"]


class Flow(eqx.Module):
    """A posterior estimator: an Equinox module with these functions.

    `coordinates`: the prior coordinates of the program. By them the engine knows the graph, the prior's support, and
    the program that a saved flow belongs to.
    """

    coordinates: eqx.AbstractVar[Coordinates]

    @property
    def may_leave_support(self) -> bool:
        """Whether `sample` may propose draws outside the prior's support, or not finite; the engine redraws these."""
        return False

    @property
    def any_subset(self) -> bool:
        """Whether `sample` and `log_probs` take any subset of the sites as data, and give the rest."""
        return False

    def lacks(self, given: Collection[str]) -> dict[str, list[str]] | None:
        """Of given parameters, those that cannot be given without others, and which; `None`: none can be given at all.

        What is given with all that it lacks comes before the rest in the order of the posterior program, so that the
        rest can be drawn given it.
        """
        del given
        return None

    @property
    def solver(self) -> Solver:
        """What draws are made by unless the user says otherwise."""
        return "euler"

    @property
    def steps(self) -> int:
        """How many steps of Euler's method a draw takes unless the user says otherwise."""
        return 20

    @property
    def density_steps(self) -> int | None:
        """How many steps a density takes unless the user says otherwise. `None`: as many as its error asks for."""
        return 20

    def prepare(self, values: Values) -> Any:
        """What the loss reads of simulations, computed once: a pytree whose leaves lead with the simulations' axis."""
        raise NotImplementedError

    def divide(self, rows: Any, most: int) -> list[tuple[Flow, Any]]:
        """Flows that can be trained each for itself, on a core of its own, and the rows of each; at most so many.

        Their losses add up to the whole's. One part, the flow itself, where all weights depend on one another.
        """
        del most
        return [(self, rows)]

    @property
    def least_loss(self) -> float:
        """A bound below which no validation loss can be."""
        return -math.inf

    def joined(self, parts: Sequence[Flow]) -> Flow:
        """The whole again, from trained parts."""
        return parts[0]

    def loss(self, rows: Any, key: PRNGKeyArray) -> Float[Array, ""]:
        """The training loss of a batch of `prepare`d rows."""
        raise NotImplementedError

    def validation_loss(self, rows: Any, key: PRNGKeyArray) -> Float[Array, ""]:
        """The same less noisily, for comparing epochs: it has the same rows and key in all of them.

        With one noise a row instead of two, FMPE on two moons kept the weights of epoch 53 of 100, and was worse by it.
        """
        return jax.lax.map(lambda k: self.loss(rows, k), jax.random.split(key, 2)).mean()

    def sample(
        self, data: Values, n: int, key: PRNGKeyArray, *, steps: int, solver: Solver
    ) -> tuple[Values, dict[str, Array]]:
        """`n` draws for one observation, and counts that say how they came about (`clipped`).

        `data` may hold parameters too where `lacks` allows it, or `any_subset`; they are not drawn.
        """
        raise NotImplementedError

    def log_prob(self, values: Values, data: Values, *, steps: int) -> Float[Array, " n"]:
        """The log-density of `n` draws for one observation, in the user's parameters.

        Of a flow that may leave the support this is the density of what it proposes: the engine's draws, which are
        those inside, have a density that is higher by the factor 1 / acceptance rate.
        """
        raise NotImplementedError

    def log_probs(self, values: Values, data: Values, *, steps: int | None) -> Float[Array, "n k"]:
        """The same where it is random: `k` independent estimates. Exact densities have one column.

        `steps` may be `None` where `density_steps` is.
        """
        assert steps is not None
        return self.log_prob(values, data, steps=steps)[:, None]

    def description(self) -> dict[str, Any]:
        """What of the flow's structure comes from the simulations, as JSON,

        So that it can be built again without them.
        """
        return {}

    def numbers_per_draw(self) -> int:
        """How many numbers a draw holds in memory at once, so that sampling can go in chunks."""
        raise NotImplementedError


@runtime_checkable
class Method(Protocol):
    """A recipe for a flow: a frozen dataclass of options. `cpe.fit(program, simulations, method=...)` builds it.

    Where training has other defaults than `cpe.Training`, the class attribute `training` has them, by name.
    """

    def build(
        self,
        program: Program,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        *,
        key: PRNGKeyArray,
        like: Mapping[str, Any] | None = None,
    ) -> Flow:
        """The flow for a program without arguments. `like`: the `description` of a saved flow, to be built alike."""
        ...


def trainable(flow: Flow) -> tuple[Flow, Flow]:
    """Split a flow into its weights and the rest (structure, and arrays set by the simulations)."""

    def fixed(x: Any) -> bool:
        return isinstance(x, Fixed)

    def mask(x: Any) -> Any:
        return jax.tree.map(lambda _: False, x) if fixed(x) else eqx.is_inexact_array(x)

    return eqx.partition(flow, jax.tree.map(mask, flow, is_leaf=fixed))


def count_weights(flow: Flow) -> int:
    """How many numbers are trained."""
    return sum(w.size for w in jax.tree.leaves(trainable(flow)[0]))
