"""Several flows of one method as one: trained at once, drawn from as a mixture."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Coordinates, Values
from cpejax.flows.base import Flow, trainable


class Ensemble(Flow):
    """Flows that differ in their weights only, each with the same probability.

    - `weights`: of all flows, each array with a leading axis for them; `rest`: what they have in common.

    A draw is of one flow, and the density is the mean of the flows' densities. With given parameters both are those
    of the mixture of the flows' conditionals.
    """

    weights: Flow
    rest: Flow
    size: int = eqx.field(static=True)

    def __init__(self, flows: Sequence[Flow]):
        weights, self.rest = trainable(flows[0])
        # By their leaves: flows that were built one after the other are alike, but not equal.
        each = zip(*(jax.tree.leaves(trainable(flow)[0]) for flow in flows), strict=True)
        self.weights = jax.tree.unflatten(jax.tree.structure(weights), [jnp.stack(w) for w in each])
        self.size = len(flows)

    def flow(self, weights: Flow) -> Flow:
        """One of the flows, by its weights."""
        return eqx.combine(weights, self.rest)

    @property
    def flows(self) -> list[Flow]:
        """The flows one by one."""
        return [self.flow(jax.tree.map(lambda w, i=i: w[i], self.weights)) for i in range(self.size)]

    @property
    def one(self) -> Flow:
        """The first of the flows, for what is the same in all."""
        return self.flow(jax.tree.map(lambda w: w[0], self.weights))

    @property  # type: ignore[misc]
    def coordinates(self) -> Coordinates:  # type: ignore[override]
        """The prior coordinates of the program."""
        return self.rest.coordinates

    # Training

    def prepare(self, values: Values) -> Any:
        return self.one.prepare(values)

    def loss(self, rows: Any, key: PRNGKeyArray) -> Float[Array, ""]:
        """The mean of the flows' losses; each has its own noise."""
        keys = jax.random.split(key, self.size)
        return jax.vmap(lambda w, k: self.flow(w).loss(rows, k))(self.weights, keys).mean()

    def validation_loss(self, rows: Any, key: PRNGKeyArray) -> Float[Array, ""]:
        return jax.vmap(lambda w: self.flow(w).validation_loss(rows, key))(self.weights).mean()

    @property
    def least_loss(self) -> float:
        return self.one.least_loss

    def divide(self, rows: Any, most: int) -> list[tuple[Flow, Any]]:
        divided = [flow.divide(rows, most) for flow in self.flows]
        return [(Ensemble([part for part, _ in same]), same[0][1]) for same in zip(*divided, strict=True)]

    def rows_of_part(self, part: Flow, rows: Any) -> Any:
        assert isinstance(part, Ensemble)
        return self.one.rows_of_part(part.one, rows)

    def joined(self, parts: Sequence[Flow]) -> Flow:
        each = zip(*(part.flows for part in parts if isinstance(part, Ensemble)), strict=True)
        return Ensemble([flow.joined(own) for flow, own in zip(self.flows, each, strict=True)])

    # Draws and densities

    @property
    def draw_options(self) -> Callable[..., dict[str, Any]]:
        """Those of the flows, with their names and defaults."""
        return self.one.draw_options

    @property
    def density_options(self) -> Callable[..., dict[str, Any]]:
        """Those of the flows, with their names and defaults."""
        return self.one.density_options

    def sample(self, data: Values, n: int, key: PRNGKeyArray, **options: Any) -> tuple[Values, dict[str, Array]]:
        """As many draws of each flow, in random order."""
        key_order, key_draws = jax.random.split(key)
        each = -(-n // self.size)
        drawn, counted = jax.vmap(lambda w, k: self.flow(w).sample(data, each, k, **options))(
            self.weights, jax.random.split(key_draws, self.size)
        )
        order = jax.random.permutation(key_order, self.size * each)[:n]
        values = {name: x.reshape(-1, *x.shape[2:])[order] for name, x in drawn.items()}
        worst = {name: jnp.sum if jnp.issubdtype(x.dtype, jnp.integer) else jnp.max for name, x in counted.items()}
        return values, {name: worst[name](x, axis=0) for name, x in counted.items()}

    def log_prob(self, values: Values, data: Values, **options: Any) -> Float[Array, " n"]:
        each = jax.vmap(lambda w: self.flow(w).log_prob(values, data, **options))(self.weights)
        return logsumexp(each, axis=0) - math.log(self.size)

    def log_probs(self, values: Values, data: Values, **options: Any) -> Float[Array, "n k"]:
        each = jax.vmap(lambda w: self.flow(w).log_probs(values, data, **options))(self.weights)
        return logsumexp(each, axis=0) - math.log(self.size)

    # What is the same in all

    def description(self) -> dict[str, Any]:
        return self.one.description()

    def numbers_per_draw(self) -> int:
        return self.size * self.one.numbers_per_draw()

    @property
    def may_leave_support(self) -> bool:
        return self.one.may_leave_support

    @property
    def any_subset(self) -> bool:
        return self.one.any_subset

    def lacks(self, given: Collection[str]) -> dict[str, list[str]] | None:
        return self.one.lacks(given)
