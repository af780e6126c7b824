"""The normal distribution function, and sums over few components, as a CPU computes them fast."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float

COEFFICIENTS = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)
"""Of the logarithm of the normal tail, in powers of `1 / (1 + |x| / √8)`."""


def add(x: Float[Array, "components *rows"]) -> Float[Array, "*rows"]:
    """The sum over the first axis, one component after the other.

    XLA computes terms and sum in one loop then; for a sum over an axis it writes all terms to memory first, and draws
    of `CPE()` on two moons take a third more of the processor's time (`python benchmarks/ablations.py --only add`).
    """
    return functools.reduce(jnp.add, list(x))


def tail(x: Array) -> Array:
    """`Φ(−|x|)` by Chebyshev's method, right to seven digits.

    With `jax.scipy.special.ndtr` an epoch of `CPE()` on two moons takes 5 % longer, and its draws 4 to 7 %
    (`python benchmarks/ablations.py --only tail`).

    Reference: Press et al. 1992, Numerical Recipes, section 6.2.
    """
    half = math.sqrt(0.5) * jnp.abs(x)
    t = 1.0 / (1.0 + 0.5 * half)
    polynomial = jnp.full_like(t, COEFFICIENTS[-1])
    for c in COEFFICIENTS[-2::-1]:
        polynomial = c + t * polynomial
    return 0.5 * t * jnp.exp(polynomial - half * half)


def between_by_tails(a: Array, tail_a: Array, b: Array, tail_b: Array) -> Array:
    """`Φ(b) − Φ(a)` for `a ≤ b`, from the tails they are in."""
    return jnp.where(a > 0, tail_a - tail_b, jnp.where(b < 0, tail_b - tail_a, 1.0 - tail_a - tail_b))


@jax.custom_jvp
def between(a: Array, b: Array) -> Array:
    """`Φ(b) − Φ(a)` for `a ≤ b`."""
    return between_by_tails(a, tail(a), b, tail(b))


@between.defjvp
def _between_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two densities; at zero too, where automatic differentiation would give none, because of `|x|`."""
    (a, b), (da, db) = primals, tangents
    return between(a, b), norm.pdf(b) * db - norm.pdf(a) * da
