"""Flow matching posterior estimation (Wildberger et al. 2023), with the network of the paper's appendix C.

The field is regressed on the straight paths of Lipman et al. (2023) from N(0, I) to the posterior. Departures: data are
standardised robustly, by median and interquartile range, and parameters by mean and standard deviation; a batch has few
times, each from its own part of [0, 1], which changes only the variance of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.vector import Kind
from cpejax.flows.base import Flow, Method, check_options
from cpejax.flows.joint import JointFlow
from cpejax.flows.ode import Field
from cpejax.flows.strata import TimeStrata
from cpejax.nn.embeddings import Embedding


class FMPEFlow(JointFlow):
    """`du/dt = v(u, t, x)`, with `v` the network.

    **Arguments:** as `JointFlow`, and `sigma`, `time_exponent`: see `cpe.FMPE`.
    """

    sigma: float = eqx.field(static=True)
    time_exponent: float = eqx.field(static=True)

    def __init__(self, *args: Any, sigma: float, time_exponent: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sigma, self.time_exponent = float(sigma), float(time_exponent)

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """`E |v(u_t, t, x) − (u₁ − (1−σ) u₀)|²` on the path `u_t = t u₁ + (1 − (1−σ) t) u₀`.

        The path is the optimal transport path of Lipman et al.; along it `(u₁ − (1−σ) u_t) / (1 − (1−σ) t)`, as it is
        usually written, is that difference (the paper prints θ for t in the denominator).
        """
        u, strata = rows["u"], TimeStrata(len(rows["u"]))
        key_t, key_noise = jax.random.split(key)
        times = strata.times(jax.random.uniform(key_t, (strata.number,))) ** (1 / (1 + self.time_exponent))
        noise = jax.random.normal(key_noise, u.shape)
        t, rest = strata.each(times)[:, None], 1 - self.sigma
        v = self.net(t * u + (1 - rest * t) * noise, self._condition(rows, strata, times))
        return jnp.sum((v - (u - rest * noise)) ** 2, axis=-1).mean()

    def field(self, data: Float[Array, "1 h"]) -> Field:
        def field(s: Array, u: Array) -> Array:
            return self.net(u, data + self.net.of_time(s[None]))

        return field


@dataclass(frozen=True)
class FMPE(Method):
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

    >>> method = cpe.FMPE(time_exponent=1.0)  # cpe.fit(model, simulations, method=method, key=...)
    >>> method.hidden, method.time_exponent
    (256, 1.0)

    Reference: Wildberger et al. 2023, Flow matching for scalable simulation-based inference.
    """

    flow: ClassVar[type[Flow]] = FMPEFlow
    training: ClassVar[Mapping[str, Any]] = {"learning_rate": 1e-3, "weight_decay": 0.0}

    coordinates: Kind = "plain"
    embed: Mapping[str, Embedding] = field(default_factory=dict)
    width: int = 128
    hidden: int = 256
    sigma: float = 0.001
    time_exponent: float = 0.0

    def __post_init__(self) -> None:
        check_options(self)
        for name, low, high in (("sigma", 0.0, 1.0), ("time_exponent", -1.0, math.inf)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (low < value < high or value == 0):
                raise ValueError(f"{name} must be a number above {low:g} and below {high:g}, found {value!r}.")

    def least_weights(self) -> int:
        return self.width**2 + self.hidden**2
