"""Posterior score estimation (Sharrock et al. 2024; paper, appendix C), with the network of FMPE.

The score of the noisy posterior is learned by denoising score matching. Departures: the network predicts the velocity,
from which the score follows, and reads time as the diffusion's angle; parameters and data are standardised, and
times shared in a batch, as in FMPE. As in the original the base is N(0, I), where the diffusion ends but for .08 of the
(standardised) draw itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Values
from cpejax.flows.base import Flow
from cpejax.flows.diffusion import Diffusion, DiffusionMethod, Equation, Predict
from cpejax.flows.joint import JointFlow
from cpejax.flows.ode import Field, Solver
from cpejax.flows.strata import TimeStrata
from cpejax.nn.embeddings import Embedding


class PSEFlow(JointFlow):
    """The diffusion reversed in time, as an ordinary or as a stochastic differential equation.

    **Arguments:** as `JointFlow`, and `sampler`, `beta_min`, `beta_max`: see `cpe.PSE`.
    """

    diffusion: Diffusion = eqx.field(static=True)

    def __init__(self, *args: Any, sampler: Equation, beta_min: float, beta_max: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.diffusion = Diffusion(float(beta_min), float(beta_max), sampler)

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """The squared error of the predicted noise."""
        strata = TimeStrata(len(rows["u"]))
        times, u, noise = self.diffusion.noisy(rows["u"], strata, key=key)
        velocity = self.net(u, self._condition(rows, strata, times))
        found = self.diffusion.noise_of(strata.each(times)[:, None], u, velocity)
        return jnp.sum((found - noise) ** 2, axis=-1).mean()

    def _predict(self, data: Float[Array, "1 h"]) -> Predict:
        def predict(t: Array, u: Array) -> Array:
            return self.diffusion.noise_of(t[None, None], u, self.net(u, data + self.net.of_time(t[None])))

        return predict

    def field(self, data: Float[Array, "1 h"]) -> Field:
        return self.diffusion.flow(self._predict(data))

    def draw_options(self, *, solver: Solver | None = None, steps: int | None = None) -> dict[str, Any]:
        return self.diffusion.draw_options(solver, steps)

    def draw_vectors(
        self, data: Values, n: int, key: PRNGKeyArray, **options: Any
    ) -> tuple[Float[Array, "n d"], dict[str, Array]]:
        key_base, key_steps = (key, key) if self.diffusion.equation == "ode" else jax.random.split(key)
        u = jax.random.normal(key_base, (n, self.base.size))
        return self.diffusion.draw(self._predict(self._of_observation(data)), u, key=key_steps, **options), {}


@dataclass(frozen=True)
class PSE(DiffusionMethod):
    """Posterior score estimation (Sharrock et al. 2024), with the paper's network.

    **Arguments:**

    - `coordinates`, `embed`, `width`, `hidden`: see `cpe.FMPE`.
    - `sampler`: `"ode"`, the probability-flow equation, by the `solver` of `sample`; or `"sde"`, the reverse
        diffusion in `steps` steps, 200 unless said otherwise. The density is that of the equation in both cases.
    - `beta_min`, `beta_max`: the diffusion's rate at its start and end.

    >>> method = cpe.PSE(sampler="sde")  # cpe.fit(model, simulations, method=method, key=...)
    >>> method.sampler, method.training["learning_rate"]
    ('sde', 0.0003)

    Reference: Sharrock et al. 2024, Sequential neural score estimation: likelihood-free inference with conditional
    score based diffusion models.
    """

    flow: ClassVar[type[Flow]] = PSEFlow
    training: ClassVar[Mapping[str, Any]] = {"learning_rate": 3e-4, "weight_decay": 0.0}

    embed: Mapping[str, Embedding] = field(default_factory=dict)
    width: int = 128
    hidden: int = 256

    def least_weights(self) -> int:
        return self.width**2 + self.hidden**2
