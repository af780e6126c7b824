"""Moving draws along a field, and the density of where they arrive.

A field gives `du/ds` for `n` draws at a time `s` that all of them share; `s` goes from 0, the base, to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from cpejax.flows.base import Solver

Field = Callable[[Array, Float[Array, "n d"]], Float[Array, "n d"]]

EXACT = 32
"""The most dimensions whose divergence is computed exactly, by one derivative for each."""
PROBES = 16
"""Random directions of Hutchinson's estimate in more dimensions."""


def grid(steps: int) -> Float[Array, " points"]:
    """`s = 1 − (1 − i/steps)²`: fine at the end, where a narrow posterior takes shape."""
    return 1 - (1 - jnp.arange(steps + 1) / steps) ** 2


def transport(field: Field, u: Float[Array, "n d"], *, steps: int, solver: Solver) -> Float[Array, "n d"]:
    """From the base at `s = 0` to `s = 1`, by Euler's method on `grid` or by adaptive Runge-Kutta steps."""
    if solver == "rk45":
        return rk45(field, u, 0.0, 1.0)
    s = grid(steps)

    def step(u: Array, i: Array) -> tuple[Array, None]:
        return u + (s[i + 1] - s[i]) * field(s[i], u), None

    return jax.lax.scan(step, u, jnp.arange(steps))[0]


def rk45(field: Callable[[Array, Any], Any], state: Any, start: float, end: float) -> Any:
    """Dormand and Prince's 5(4) with SciPy's default tolerances; all draws take the same steps."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda s, state, _: field(jnp.asarray(s), state)),
        diffrax.Dopri5(),
        t0=start,
        t1=end,
        dt0=None,
        y0=state,
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        max_steps=4096,
    )
    return jax.tree.map(lambda x: x[0], solution.ys)


def log_density(field: Field, u: Float[Array, "n d"], *, steps: int | None) -> Float[Array, "n k"]:
    """The log-density at `u` of what a field makes of N(0, I): `log φ(u₀) − ∫ ∇·field ds`, back along the path.

    Up to `EXACT` dimensions the divergence is exact, and `k` is 1. In more, each of `k` columns has Hutchinson's
    estimate from one random direction, the same all along the path: their mean is unbiased for the divergence, and
    their spread gives its error. Without `steps` the integration is adaptive; with them it is by Heun's method.
    """
    n, d = u.shape
    # Directions of one fixed key: the density of a draw is the same number whenever it is asked for.
    probes = jnp.eye(d)[:, None] if d <= EXACT else jax.random.rademacher(jax.random.key(0), (PROBES, 1, d), float)

    def rate(s: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        v, push = jax.linearize(lambda u: field(s, u), state[0])
        along = jax.lax.map(lambda e: (push(jnp.broadcast_to(e, u.shape)) * e).sum(-1), probes, batch_size=4)
        return v, along.sum(0)[:, None] if d <= EXACT else along.T

    state = (u, jnp.zeros((n, 1 if d <= EXACT else PROBES)))
    if steps is None:
        base, divergence = rk45(rate, state, 1.0, 0.0)
    else:
        s = grid(steps)

        def back(state: Any, i: Array) -> tuple[Any, None]:
            h = s[i + 1] - s[i]
            first = rate(s[i + 1], state)
            second = rate(s[i], jax.tree.map(lambda x, r: x - h * r, state, first))
            return jax.tree.map(lambda x, a, b: x - h / 2 * (a + b), state, first, second), None

        (base, divergence), _ = jax.lax.scan(back, state, jnp.arange(steps)[::-1])
    return norm.logpdf(base).sum(-1)[:, None] + divergence
