"""The mode of a posterior, by climbing its density."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from cpejax.coordinates.prior import Values
from cpejax.coordinates.vector import Vector
from cpejax.flows.base import Flow


@eqx.filter_jit
def climb(flow: Flow, vector: Vector, values: Values, data: Values, free: tuple[str, ...], steps: int) -> Values:
    """Values `{site: (starts, *shape)}` from which the density was climbed in unconstrained coordinates."""
    moves = jnp.asarray([label.site in free for label in vector.labels])
    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, steps))

    def at(u: Float[Array, " d"]) -> Values:
        found = vector.unflatten(u, data)
        return {name: found[name] for name in free}

    def loss(u: Float[Array, " d"]) -> Float[Array, ""]:
        return -flow.log_probs({name: x[None] for name, x in at(u).items()}, data, **flow.density_options()).mean()

    def climb(u: Float[Array, " d"]) -> Values:
        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            u, state, best, least = carry
            value, gradient = jax.value_and_grad(loss)(u)
            better = value < least
            best, least = jnp.where(better, u, best), jnp.where(better, value, least)
            gradient = jnp.where(moves & jnp.isfinite(gradient), gradient, 0.0)
            change, state = optimiser.update(gradient, state)
            return (u + change, state, best, least), None

        start = (u, optimiser.init(u), u, jnp.full((), jnp.inf))
        return at(jax.lax.scan(step, start, None, length=steps)[0][2])

    return jax.lax.map(climb, jax.vmap(vector.flatten)(values))
