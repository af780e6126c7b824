"""Moving draws along a field, and the density of where they arrive: every solver of the library.

A rate gives the derivative of a state by time. States are arrays, or trees of them; `times` say what a rate reads of
each point of a grid: the time itself, or what a network makes of it, computed for all points at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import diffrax
import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from cpejax.program.simulations import check_count

Solver = Literal["euler", "rk45"]
Rate = Callable[[Any, Any], Any]
Field = Callable[[Array, Float[Array, "n d"]], Float[Array, "n d"]]
"""`du/ds` for `n` draws at a time `s` that all of them share; `s` goes from 0, the base, to 1."""

STEPS = 20
"""The steps of Euler's method unless the user says otherwise."""
EXACT = 32
"""The most dimensions whose divergence is computed exactly, by one derivative for each."""
PROBES = 16
"""Random directions of Hutchinson's estimate in more dimensions."""
FOLDED = 1e-30
"""The least derivative of a step."""
GONE = 1e4
"""Where no normal variable is."""


# What a user may ask for


def solver_options(solver: Any, steps: Any) -> dict[str, Any]:
    """The options of a draw by a solver: `steps` are those of Euler's method."""
    if solver not in get_args(Solver):
        raise ValueError(f"solver must be 'euler' or 'rk45', found {solver!r}.")
    if solver == "euler":
        return {"solver": solver, **step_options(STEPS if steps is None else steps)}
    if steps is not None:
        raise ValueError(f"steps={steps!r} are of solver='euler'; 'rk45', the solver here, chooses its own.")
    return {"solver": solver}


def step_options(steps: Any) -> dict[str, Any]:
    """The number of steps as an option; `None`, where a flow allows it: as many as the error asks for."""
    if steps is not None:
        check_count(steps, "steps")
    return {"steps": None if steps is None else int(steps)}


# Solvers


def grid(steps: int) -> Float[Array, " points"]:
    """`s = 1 − (1 − i/steps)²`: fine at the end, where a narrow posterior takes shape."""
    return 1 - (1 - jnp.arange(steps + 1) / steps) ** 2


def euler(rate: Rate, state: Any, widths: Float[Array, " steps"], times: Any) -> Any:
    """Euler's method, of order 1, forwards; `times`: of the start of each step."""

    def step(state: Any, x: tuple[Array, Any]) -> tuple[Any, None]:
        h, time = x
        return jax.tree.map(lambda y, r: y + h * r, state, rate(time, state)), None

    return jax.lax.scan(step, state, (widths, times))[0]


def heun_back(
    rate: Rate, state: Any, widths: Float[Array, " steps"], times: Any, each: Callable[..., Any] | None = None
) -> Any:
    """Heun's method, of order 2, from the last of `times`, of all points, back to the first.

    `each(step, state)`, by default `step(state)`: makes a step where more is asked of it than the state after it.
    """

    def back(state: Any, x: tuple[Array, Any, Any]) -> tuple[Any, None]:
        h, start, end = x

        def step(state: Any) -> Any:
            first = rate(end, state)
            second = rate(start, jax.tree.map(lambda y, r: y - h * r, state, first))
            return jax.tree.map(lambda y, a, b: y - h / 2 * (a + b), state, first, second)

        return (step(state) if each is None else each(step, state)), None

    ends = (jax.tree.map(lambda t, cut=cut: t[cut], times) for cut in (slice(-1), slice(1, None)))
    return jax.lax.scan(back, state, (widths, *ends), reverse=True)[0]


def rk45(rate: Rate, state: Any, start: float, end: float) -> Any:
    """Dormand and Prince's 5(4) with SciPy's default tolerances; all draws take the same steps."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda s, state, _: rate(jnp.asarray(s), state)),
        diffrax.Dopri5(),
        t0=start,
        t1=end,
        dt0=None,
        y0=state,
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        max_steps=4096,
    )
    return jax.tree.map(lambda x: x[0], solution.ys)


# Draws and densities


def transport(field: Field, u: Float[Array, "n d"], *, solver: Solver, steps: int | None = None) -> Float[Array, "n d"]:
    """From the base at `s = 0` to `s = 1`, by Euler's method on `grid` or by adaptive Runge-Kutta steps."""
    if solver == "rk45":
        return rk45(field, u, 0.0, 1.0)
    assert steps is not None
    s = grid(steps)
    return euler(field, u, s[1:] - s[:-1], s[:-1])


def log_density(field: Field, u: Float[Array, "n d"], *, steps: int | None) -> Float[Array, "n k"]:
    """The log-density at `u` of what a field makes of N(0, I): `log φ(u₀) − ∫ ∇·field ds`, back along the path.

    Up to `EXACT` dimensions the divergence is exact, and `k` is 1. In more, each of `k` columns has Hutchinson's
    estimate from one random direction, the same all along the path: their mean is unbiased for the divergence, and
    their spread gives its error. Without `steps` the integration is adaptive; with them it is by Heun's method.
    """
    n, d = u.shape
    # Directions of one fixed key: the density of a draw is the same whenever it is asked for.
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
        base, divergence = heun_back(rate, state, s[1:] - s[:-1], s)
    return norm.logpdf(base).sum(-1)[:, None] + divergence


def log_density_of_steps(rate: Rate, y: Array, widths: Float[Array, " steps"], times: Any) -> Array:
    """The log-density of each scalar separately, which steps of Heun's method take back to a standard normal one.

    The derivative is that of the steps themselves, not of the equation that they approximate: what is returned is then
    a density that integrates to one, with however few steps. A rate acts on each scalar alone, so it takes one JVP.
    """

    def each(step: Callable[[Array], Array], state: tuple[Array, Array]) -> tuple[Array, Array]:
        y, log_derivative = state
        y, derivative = jax.jvp(step, (y,), (jnp.ones_like(y),))
        # A step that folds is no map; there is no density where it does, nor far away.
        return jnp.clip(y, -GONE, GONE), log_derivative + jnp.log(jnp.clip(derivative, FOLDED, 1 / FOLDED))

    y, log_derivative = heun_back(rate, (y, jnp.zeros_like(y)), widths, times, each)
    return norm.logpdf(y) + log_derivative
