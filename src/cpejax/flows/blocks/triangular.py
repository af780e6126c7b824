"""The triangular flow: the paper's continuous CPE (section 3, appendices A.1 and C).

One field moves all parameters together from prior draws to posterior draws. Its component for a parameter reads the
parameters that the posterior program names, at the same noisy time, through block matrices; the Jacobian is triangular
in the posterior program's order, so the divergence is a sum of diagonal entries, and exact.

It is biased wherever parameters are correlated, whatever the mask: see `docs/triangular.md`. `CPE(flow="ancestral")` is
not. Departures from the paper: parameters and data are standardised, by linear maps; a batch has few times, each from
its own part of [0, 1] (`Runs`); base draws in training are other simulations' parameters, which are draws from the
prior (in prior coordinates they are drawn anew).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.base import with_data
from cpejax.coordinates.prior import Values
from cpejax.coordinates.vector import Kind
from cpejax.flows.base import Solver
from cpejax.flows.blocks.network import BlockNet, Conditions, Part, Reads
from cpejax.flows.blocks.storage import wire
from cpejax.flows.conditioning import VectorFlow
from cpejax.flows.ode import rk45
from cpejax.flows.strata import Runs
from cpejax.nn.embeddings import Embedding
from cpejax.program.graph import Graph
from cpejax.program.inverse import PosteriorProgram
from cpejax.program.simulator import Program


class TriangularFlow(VectorFlow):
    """The masked joint field `v_t(θ, x) = γ θ + (1 − γ) λ_t(θ, x)` (paper, equation 8).

    **Arguments:** as `VectorFlow`; `posterior`: the inverse of the graph; the options of `network.Part`.
    """

    part: Part
    reads: Reads = eqx.field(static=True)

    def __init__(
        self,
        program: Program,
        posterior: PosteriorProgram,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        embed: Mapping[str, Embedding],
        *,
        coordinates: Kind,
        reads: Reads,
        like: Mapping[str, Any] | None = None,
        key: PRNGKeyArray,
        **options: Any,
    ):
        super().__init__(program, graph, simulations, embed, coordinates=coordinates, like=like)
        wiring = wire(posterior, self.base.vector)
        self.part = Part(wiring, self.data.size, positive=False, time=True, reads=reads, key=key, **options)
        self.reads = reads

    @property
    def net(self) -> BlockNet:
        """The network."""
        return self.part.net

    def numbers_per_draw(self) -> int:
        return 4 * self.base.size * self.net.biases[0].shape[1]

    def _conditions(self, data: list[Array], time: list[Array]) -> Conditions:
        """What each layer's nodes get. Of nodes that read nothing but their parents, all need to know the time."""
        others = time if self.reads == "parents" else [None] * len(time)
        return self.part.pad([(x + t, other) for x, t, other in zip(data, time, others, strict=True)])

    # Training

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """The rectified loss (paper, equation 13), one base draw for each simulation.

        Base draws are the parameters of the simulation before, in a batch whose order is random; in prior coordinates
        they are new.
        """
        u, n = rows["u"], len(rows["u"])
        runs = Runs(n)
        key_times, key_base = jax.random.split(key)
        if self.base.vector.kind == "prior":
            base = jax.random.normal(key_base, u.shape)
        elif n > 1:
            base = jnp.roll(u, 1, axis=0)
        else:
            raise ValueError(
                "A batch of one simulation has no other to take a base draw from: give batch_size of at least 2, and "
                "more simulations, or a larger share of them, for validation."
            )
        times = runs.times(jax.random.uniform(key_times, (runs.number,)))
        t = runs.each(times)[:, None]
        condition = self.part.condition
        conditions = self._conditions(
            condition.of_data(self.of_rows(rows)), [runs.each(c) for c in condition.of_time(times)]
        )
        v = self.net(t * u + (1 - t) * base, conditions)
        return jnp.sum((u - base - v) ** 2, axis=-1).mean()

    # Sampling

    def sample(
        self, data: Values, n: int, key: PRNGKeyArray, *, steps: int, solver: Solver
    ) -> tuple[Values, dict[str, Array]]:
        u = self.from_base(self.base.draw(n, data, key=key), data, steps=steps, solver=solver)
        return self.base.to_values(u, data), self.base.count_clipped(u)

    def from_base(self, u: Float[Array, "n d"], data: Values, *, steps: int, solver: Solver) -> Float[Array, "n d"]:
        """From base to posterior, by `steps` equal steps of Euler's method or by adaptive Runge-Kutta steps."""
        condition = self.part.condition
        x = condition.of_data(self.of_observation(data))
        if solver == "rk45":
            return rk45(lambda t, u: self.net(u, self._conditions(x, condition.of_time(t[None]))), u, 0.0, 1.0)
        times = condition.of_time(jnp.arange(steps) / steps)

        def step(u: Array, time: list[Array]) -> tuple[Array, None]:
            return u + self.net(u, self._conditions(x, [row[None] for row in time])) / steps, None

        return jax.lax.scan(step, u, times)[0]

    # Density

    @property
    def density_steps(self) -> int | None:
        return None

    def log_probs(self, values: Values, data: Values, *, steps: int | None) -> Float[Array, "n 1"]:
        return self.log_prob(values, data, steps=steps)[:, None]

    def log_prob(self, values: Values, data: Values, *, steps: int | None) -> Float[Array, " n"]:
        full = with_data(values, data)
        u, divergence = self.to_base(self.base.to_vectors(full), data, steps=steps)
        return self.base.log_density(u, data) - divergence + self.base.log_volume(full)

    def to_base(
        self, u: Float[Array, "n d"], data: Values, *, steps: int | None
    ) -> tuple[Float[Array, "n d"], Float[Array, " n"]]:
        """From posterior back to base, and the field's divergence along the way, whose trace is exact.

        By adaptive Runge-Kutta steps, or by `steps` equal steps of Heun's method.
        """
        condition = self.part.condition
        x = condition.of_data(self.of_observation(data))

        def rate(t: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            v, slope = self.net.with_derivative(state[0], self._conditions(x, condition.of_time(t[None])))
            return v, slope.sum(-1)

        state = (u, jnp.zeros(len(u)))
        if steps is None:
            u, minus = rk45(rate, state, 1.0, 0.0)
            return u, -minus

        def back(state: Any, i: Array) -> tuple[Any, None]:
            first = rate((i + 1) / steps, state)
            second = rate(i / steps, jax.tree.map(lambda x, r: x - r / steps, state, first))
            return jax.tree.map(lambda x, a, b: x - (a + b) / (2 * steps), state, first, second), None

        (u, minus), _ = jax.lax.scan(back, state, jnp.arange(steps)[::-1])
        return u, -minus
