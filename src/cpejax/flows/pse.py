"""Posterior score estimation (Sharrock et al. 2024; paper, appendix C), with the network of FMPE.

The score of the noisy posterior is learned by denoising score matching. Departures: the network predicts the velocity,
from which the score follows, and reads time as the diffusion's angle; parameters and data are standardised, and
times shared in a batch, as in FMPE. As in the original the base is N(0, I), where the diffusion ends but for .08 of the
(standardised) draw itself.
"""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Values
from cpejax.flows.base import Solver
from cpejax.flows.diffusion import Diffusion, Predict
from cpejax.flows.joint import JointFlow
from cpejax.flows.ode import Field
from cpejax.flows.strata import Runs

Sampler = Literal["ode", "sde"]


class PSEFlow(JointFlow):
    """The diffusion turned back, as an ordinary or as a stochastic differential equation.

    **Arguments:** as `JointFlow`, and `diffusion`, `sampler`: see `cpe.PSE`.
    """

    diffusion: Diffusion = eqx.field(static=True)
    sampler: Sampler = eqx.field(static=True)

    def __init__(self, *args: Any, diffusion: Diffusion, sampler: Sampler, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.diffusion, self.sampler = diffusion, sampler

    @property
    def solver(self) -> Solver:
        return "rk45" if self.sampler == "ode" else "euler"

    @property
    def steps(self) -> int:
        return 20 if self.sampler == "ode" else 200

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """The squared error of the predicted noise."""
        runs = Runs(len(rows["u"]))
        times, u, noise = self.diffusion.noisy(rows["u"], runs, key=key)
        velocity = self.net(u, self._condition(rows, runs, times))
        found = self.diffusion.noise_of(runs.each(times)[:, None], u, velocity)
        return jnp.sum((found - noise) ** 2, axis=-1).mean()

    def _predict(self, data: Float[Array, "1 h"]) -> Predict:
        def predict(t: Array, u: Array) -> Array:
            return self.diffusion.noise_of(t[None, None], u, self.net(u, data + self.net.of_time(t[None])))

        return predict

    def field(self, data: Float[Array, "1 h"]) -> Field:
        return self.diffusion.flow(self._predict(data))

    def sample(
        self, data: Values, n: int, key: PRNGKeyArray, *, steps: int, solver: Solver
    ) -> tuple[Values, dict[str, Array]]:
        if self.sampler == "ode":
            return super().sample(data, n, key, steps=steps, solver=solver)
        if solver != "euler":
            raise ValueError("The reverse SDE goes in equal steps: solver must be 'euler', or cpe.PSE(sampler='ode').")
        key_base, key_steps = jax.random.split(key)
        u = jax.random.normal(key_base, (n, self.base.size))
        u = self.diffusion.reverse(self._predict(self._of_observation(data)), u, steps, key=key_steps)
        return self.base.to_values(u, data), self.base.count_clipped(u)
