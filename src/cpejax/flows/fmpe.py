"""Flow matching posterior estimation (Wildberger et al. 2023), with the network of the paper's appendix C.

The field is regressed on the straight paths of Lipman et al. (2023) from N(0, I) to the posterior. Departures: data are
standardised robustly, by median and interquartile range, and parameters by mean and standard deviation; a batch has few
times, each from its own part of [0, 1], which changes only the variance of the loss.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.flows.joint import JointFlow
from cpejax.flows.ode import Field
from cpejax.flows.strata import Runs


class FMPEFlow(JointFlow):
    """`du/dt = v(u, t, x)`, with `v` the network.

    **Arguments:** as `JointFlow`, and `sigma`, `time_exponent`: see `cpe.FMPE`.
    """

    sigma: float = eqx.field(static=True)
    time_exponent: float = eqx.field(static=True)

    def __init__(self, *args: Any, sigma: float, time_exponent: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sigma, self.time_exponent = sigma, time_exponent

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """`E |v(u_t, t, x) − (u₁ − (1−σ) u₀)|²` on the path `u_t = t u₁ + (1 − (1−σ) t) u₀`.

        The path is the optimal transport path of Lipman et al.; along it `(u₁ − (1−σ) u_t) / (1 − (1−σ) t)`, as it is
        usually written, is that difference (the paper prints θ for t in the denominator).
        """
        u, runs = rows["u"], Runs(len(rows["u"]))
        key_t, key_noise = jax.random.split(key)
        times = runs.times(jax.random.uniform(key_t, (runs.number,))) ** (1 / (1 + self.time_exponent))
        noise = jax.random.normal(key_noise, u.shape)
        t, rest = runs.each(times)[:, None], 1 - self.sigma
        v = self.net(t * u + (1 - rest * t) * noise, self._condition(rows, runs, times))
        return jnp.sum((v - (u - rest * noise)) ** 2, axis=-1).mean()

    def field(self, data: Float[Array, "1 h"]) -> Field:
        def field(s: Array, u: Array) -> Array:
            return self.net(u, data + self.net.of_time(s[None]))

        return field
