"""Differential equations with a fixed number of steps, in JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float


def runge_kutta(field: Callable[[Any], Any], start: Any, times: Float[np.ndarray, " k"], steps: int) -> Any:
    """A solution at equidistant times, by the classical method of order four, `steps` between two of them.

    **Arguments:**

    - `field`: the derivative of a state, a tuple of arrays; it does not depend on time.
    - `start`: the state at `times[0]`.

    **Returns:** states with a leading axis of length k.
    """
    h = jnp.asarray((times[1] - times[0]) / steps)

    def moved(state, rate, size):
        return jax.tree.map(lambda a, b: a + size * b, state, rate)

    def step(state, _):
        a = field(state)
        b = field(moved(state, a, h / 2))
        c = field(moved(state, b, h / 2))
        d = field(moved(state, c, h))
        mean = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, a, b, c, d)
        return moved(state, mean, h), None

    def stretch(state, _):
        after = jax.lax.scan(step, state, length=steps)[0]
        return after, after

    start = jax.tree.map(jnp.asarray, start)
    after = jax.lax.scan(stretch, start, length=len(times) - 1)[1]
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), start, after)
