"""The variance-preserving diffusion of Song et al. (2021), `du = −½β(t) u dt + √β(t) dW`, β linear in t.

From `u₁`, a posterior draw, noise makes `u_t = cos(a) u₁ + sin(a) ε` with `cos a = exp(−½ ∫₀ᵗ β)`. All is written in
the angle `a`: the probability-flow equation has no singularity at its end there, and the field of a standard normal
distribution is zero. Networks predict `ε`, or what it follows from; the score is `−ε / sin a`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.vector import Kind
from cpejax.flows.base import Method, check_options
from cpejax.flows.ode import Field, Solver, grid, solver_options, step_options, transport
from cpejax.flows.strata import TimeStrata

Equation = Literal["ode", "sde"]
Predict = Callable[[Array, Float[Array, "n d"]], Float[Array, "n d"]]
"""The noise in `n` noisy vectors, from the time as networks read it."""

SHORTEST = 1e-5
"""The time at which sampling ends, and below which none is trained on."""
SDE_STEPS = 200
"""The steps of the reverse diffusion unless the user says otherwise."""


@dataclass(frozen=True)
class Diffusion:
    """The schedule `β(t) = low + t (high − low)` for t in [0, 1], and by which equation draws turn it back."""

    low: float
    high: float
    equation: Equation = "ode"

    def angle(self, t: Array | float) -> Array:
        """`a(t)`."""
        minus_log_cos = 0.5 * self.low * t + 0.25 * (self.high - self.low) * jnp.square(t)
        return jnp.arctan2(jnp.sqrt(-jnp.expm1(-2 * minus_log_cos)), jnp.exp(-minus_log_cos))

    def clock(self, angle: Array) -> Array:
        """Time as networks read it: the angle, from 0 to 1. In t itself the last, decisive part would be a moment."""
        return 2 / math.pi * angle

    def _angles(self, s: Array) -> tuple[Array, Array]:
        """The angle at `s` from 0, the base, to 1, and its derivative."""
        first, last = self.angle(1.0), self.angle(SHORTEST)
        return first + s * (last - first), last - first

    def noisy(
        self, u: Float[Array, "n d"], strata: TimeStrata, *, key: PRNGKeyArray
    ) -> tuple[Float[Array, " strata"], Float[Array, "n d"], Float[Array, "n d"]]:
        """For a batch: times as networks read them, uniform in t, of each run; noisy vectors; and their noise.

        Denoising score matching with the usual weight `sin² a` is the squared error of the noise.
        """
        key_t, key_noise = jax.random.split(key)
        angle = self.angle(SHORTEST + (1 - SHORTEST) * strata.times(jax.random.uniform(key_t, (strata.number,))))
        noise = jax.random.normal(key_noise, u.shape)
        cos, sin = (strata.each(f(angle))[:, None] for f in (jnp.cos, jnp.sin))
        return self.clock(angle), cos * u + sin * noise, noise

    def noise_of(self, clock: Float[Array, "#n 1"], u: Float[Array, "n d"], velocity: Float[Array, "n d"]) -> Array:
        """The noise in noisy vectors from their velocity `du/da = cos(a) ε − sin(a) u₁` (Salimans and Ho 2022).

        A network of the noise itself would have to be almost the identity at the base, where `flow` divides its error
        by `cos a`.
        """
        angle = math.pi / 2 * clock
        return jnp.sin(angle) * u + jnp.cos(angle) * velocity

    def flow(self, predict: Predict) -> Field:
        """The probability-flow equation: `du/da = cos(a) ε − sin(a) u₁`, with `u₁` the estimate that goes with `ε`."""

        def field(s: Array, u: Array) -> Array:
            angle, derivative = self._angles(s)
            return derivative * (predict(self.clock(angle), u) - jnp.sin(angle) * u) / jnp.cos(angle)

        return field

    def draw_options(self, solver: Solver | None, steps: int | None) -> dict[str, Any]:
        """The options of a draw: of a solver, or the steps of the stochastic equation."""
        if self.equation == "ode":
            return solver_options("rk45" if solver is None else solver, steps)
        if solver is not None:
            raise ValueError(
                f"The reverse SDE goes in equal steps and has no solver; found solver={solver!r}. Leave it out, or fit "
                "with sampler='ode'."
            )
        return step_options(SDE_STEPS if steps is None else steps)

    def draw(self, predict: Predict, u: Float[Array, "n d"], *, key: PRNGKeyArray, **options: Any) -> Array:
        """From the base to draws, by the options of `draw_options`."""
        if self.equation == "ode":
            return transport(self.flow(predict), u, **options)
        return self.reverse(predict, u, key=key, **options)

    def reverse(self, predict: Predict, u: Float[Array, "n d"], *, steps: int, key: PRNGKeyArray) -> Array:
        """The reverse diffusion, from the base, by steps that are exact where the estimate of `u₁` is.

        A step draws from the distribution of the noisy vector at the next angle given this one and the estimate (the
        ancestral steps of Ho et al. 2020); more steps tend to the reverse equation, as those of Euler and Maruyama do.
        """
        angles, _ = self._angles(grid(steps))
        keys = jax.random.split(key, steps)

        def step(u: Array, i: Array) -> tuple[Array, None]:
            now, then = angles[i], angles[i + 1]
            noise = predict(self.clock(now), u)
            clean = (u - jnp.sin(now) * noise) / jnp.cos(now)
            # The variance of what diffusion adds on the way from `then` to `now`, as far as it is not known from `u`.
            added = 1 - (jnp.cos(now) / jnp.cos(then)) ** 2
            spread = jnp.sin(then) / jnp.sin(now) * jnp.sqrt(added)
            kept = jnp.sqrt(jnp.maximum(jnp.sin(then) ** 2 - spread**2, 0.0))
            fresh = jax.random.normal(keys[i], u.shape)
            return jnp.cos(then) * clean + kept * noise + spread * fresh, None

        return jax.lax.scan(step, u, jnp.arange(steps))[0]


@dataclass(frozen=True)
class DiffusionMethod(Method):
    """The options that methods by a diffusion have in common: see `cpe.PSE`."""

    coordinates: Kind = "plain"
    sampler: Equation = "ode"
    beta_min: float = 0.1
    beta_max: float = 10.0

    def __post_init__(self) -> None:
        check_options(self)
        low, high = self.beta_min, self.beta_max
        if not all(isinstance(x, int | float) for x in (low, high)) or not 0 <= low < high < math.inf:
            raise ValueError(
                f"beta_min and beta_max must be numbers, 0 <= beta_min < beta_max; found {low!r} and {high!r}."
            )
