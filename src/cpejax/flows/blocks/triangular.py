"""The triangular flow: the paper's continuous CPE (section 3, appendices A.1 and C).

One field moves all parameters together from prior draws to posterior draws. Its component for a parameter reads the
parameters that the posterior program names, at the same noisy time, through block matrices; the Jacobian is triangular
in the posterior program's order, so the divergence is a sum of diagonal entries, and exact.

It is biased wherever parameters are correlated, whatever the mask: see `docs/triangular.md`. `cpe.CPE` is not.
Departures from the paper: parameters and data are standardised, by linear maps; a batch has few times, each from its
own part of [0, 1] (`TimeStrata`); base draws in training are other simulations' parameters, which are draws from the
prior (in prior coordinates they are drawn anew).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Values
from cpejax.coordinates.vector import Kind
from cpejax.flows.base import Flow
from cpejax.flows.blocks.network import BlockMethod, BlockNet, ConditionedNet, Conditions, Inverse, Reads
from cpejax.flows.blocks.storage import wire
from cpejax.flows.conditioning import VectorFlow
from cpejax.flows.ode import Solver, euler, heun_back, rk45, solver_options, step_options
from cpejax.flows.strata import TimeStrata
from cpejax.nn.embeddings import Embedding
from cpejax.program.inverse import invert


class TriangularFlow(VectorFlow):
    """The masked joint field `v_t(θ, x) = γ θ + (1 − γ) λ_t(θ, x)` (paper, equation 8).

    **Arguments:** as `VectorFlow`; `inverse`: see `cpe.TriangularCPE`; the options of `network.ConditionedNet`.
    """

    part: ConditionedNet
    reads: Reads = eqx.field(static=True)

    def __init__(
        self,
        *args: Any,
        embed: Mapping[str, Embedding],
        coordinates: Kind,
        inverse: Inverse,
        reads: Reads,
        like: Mapping[str, Any] | None = None,
        key: PRNGKeyArray,
        **options: Any,
    ):
        super().__init__(*args, embed=embed, coordinates=coordinates, like=like)
        wiring = wire(invert(self.coordinates.graph, inverse), self.base.vector)
        self.part = ConditionedNet(wiring, self.data.size, positive=False, time=True, reads=reads, key=key, **options)
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
        strata = TimeStrata(n)
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
        times = strata.times(jax.random.uniform(key_times, (strata.number,)))
        t = strata.each(times)[:, None]
        condition = self.part.condition
        conditions = self._conditions(
            condition.of_data(self.of_rows(rows)), [strata.each(c) for c in condition.of_time(times)]
        )
        v = self.net(t * u + (1 - t) * base, conditions)
        return jnp.sum((u - base - v) ** 2, axis=-1).mean()

    # Sampling

    def draw_options(self, *, solver: Solver = "euler", steps: int | None = None) -> dict[str, Any]:
        return solver_options(solver, steps)

    def draw_vectors(
        self, data: Values, n: int, key: PRNGKeyArray, **options: Any
    ) -> tuple[Float[Array, "n d"], dict[str, Array]]:
        return self.from_base(self.base.draw(n, data, key=key), data, **options), {}

    def from_base(
        self, u: Float[Array, "n d"], data: Values, *, solver: Solver, steps: int | None = None
    ) -> Float[Array, "n d"]:
        """From base to posterior, by `steps` equal steps of Euler's method or by adaptive Runge-Kutta steps."""
        condition = self.part.condition
        x = condition.of_data(self.of_observation(data))
        if solver == "rk45":
            return rk45(lambda t, u: self.net(u, self._conditions(x, condition.of_time(t[None]))), u, 0.0, 1.0)
        assert steps is not None

        def rate(time: list[Array], u: Array) -> Array:
            return self.net(u, self._conditions(x, [row[None] for row in time]))

        return euler(rate, u, jnp.full(steps, 1 / steps), condition.of_time(jnp.arange(steps) / steps))

    # Density

    def density_options(self, *, steps: int | None = None) -> dict[str, Any]:
        return step_options(steps)

    def log_density(self, u: Float[Array, "n d"], data: Values, **options: Any) -> Float[Array, " n"]:
        u, divergence = self.to_base(u, data, **options)
        return self.base.log_density(u, data) - divergence

    def to_base(
        self, u: Float[Array, "n d"], data: Values, *, steps: int | None
    ) -> tuple[Float[Array, "n d"], Float[Array, " n"]]:
        """From posterior back to base, and the field's divergence along the way, whose trace is exact.

        By adaptive Runge-Kutta steps, or by `steps` equal steps of Heun's method.
        """
        condition = self.part.condition
        x = condition.of_data(self.of_observation(data))

        def rate(t: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            v, derivative = self.net.with_derivative(state[0], self._conditions(x, condition.of_time(t[None])))
            return v, derivative.sum(-1)

        state = (u, jnp.zeros(len(u)))
        if steps is None:
            u, minus = rk45(rate, state, 1.0, 0.0)
        else:
            u, minus = heun_back(rate, state, jnp.full(steps, 1 / steps), jnp.arange(steps + 1) / steps)
        return u, -minus


@dataclass(frozen=True)
class TriangularCPE(BlockMethod):
    """The paper's continuous causal posterior estimation: one field, masked by the posterior program.

    It is biased where parameters are correlated; `cpe.CPE` is not.

    **Arguments:**

    - `inverse`: the posterior program, `"faithful"`, or `"reverse"` as in the paper, which drops true dependencies.
    - `coordinates`: `"plain"`, the parameters themselves, where draws outside the prior's support are drawn again, as
        in the paper; `"unconstrained"`, through the bijection of each site's support; or `"prior"`, in which the prior
        is standard normal.
    - `embed`: an Equinox module for a data site; see `cpe.CPE`.
    - `width`: of the data's network; `hidden`: the size of a block.
    - `condition`: data and time are added after the `"first"` map, as in the paper's experiments, or after `"every"`.
    - `reads`: `"ancestors"`, all maps are masked by the posterior program, as in the paper, so through four of them
        a parameter reads its ancestors up to four steps away; or `"parents"`, it reads its parents only.
    - `storage`: of block matrices: `"dense"`, `"edges"`, or what was measured to be faster (`"auto"`).
    - `rank`: of the blocks between different parameters; `None`: whole blocks.

    >>> method = cpe.TriangularCPE(rank=2)  # cpe.fit(model, simulations, method=method, key=...)
    >>> method.inverse, method.rank
    ('faithful', 2)
    """

    flow: ClassVar[type[Flow]] = TriangularFlow
    training: ClassVar[Mapping[str, Any]] = {"learning_rate": 2e-3, "weight_decay": 0.0}  # docs/triangular.md
