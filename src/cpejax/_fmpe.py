"""Flow matching posterior estimation (Wildberger et al. 2023), with the network of the paper's appendix C.

The field is regressed on the straight paths of Lipman et al. (2023) from N(0, I) to the posterior. Departures: data are
standardised robustly, by median and interquartile range, and parameters by mean and standard deviation; the times of a
batch are stratified, one from each of `n` parts of [0, 1], which changes only the variance of the loss.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax._joint import JointFlow
from cpejax._ode import Field


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
        u, n = rows["u"], len(rows["u"])
        key_t, key_noise = jax.random.split(key)
        t = ((jnp.arange(n) + jax.random.uniform(key_t, (n,))) / n) ** (1 / (1 + self.time_exponent))
        noise = jax.random.normal(key_noise, u.shape)
        rest = 1 - self.sigma
        v = self.net(t[:, None] * u + (1 - rest * t)[:, None] * noise, self._condition(rows, t))
        return jnp.sum((v - (u - rest * noise)) ** 2, axis=-1).mean()

    def field(self, data: Float[Array, "1 h"]) -> Field:
        def field(s: Array, u: Array) -> Array:
            return self.net(u, data + self.net.of_time(s[None]))

        return field
