"""Two moons: two thin crescents, one the mirror image of the other."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from cpejax.tasks._exact import rejection
from cpejax.tasks._task import Arrays, Task

RADIUS, WIDTH, OFFSET = 0.1, 0.01, 0.25


class Crescent(dist.Distribution):
    """`(r cos a, r sin a) + loc` with `a ~ U(-pi/2, pi/2)` and `r ~ N(.1, .01^2)`; loc has two dimensions.

    A negative r (ten standard deviations out) puts the point on the left, so with `u = x - loc` and
    `r = sign(u1) |u|` the density is exactly `N(r; .1, .01^2) / (pi |r|)`.
    """

    arg_constraints = {"loc": constraints.real_vector}
    support = constraints.real_vector
    pytree_data_fields = ("loc",)

    def __init__(self, loc: Float[Array, "*batch 2"], *, validate_args: bool | None = None):
        self.loc = loc
        super().__init__(jnp.shape(loc)[:-1], (2,), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*sample 2"]:
        angle_key, radius_key = jax.random.split(key)
        shape = sample_shape + self.batch_shape
        angle = jax.random.uniform(angle_key, shape, minval=-jnp.pi / 2, maxval=jnp.pi / 2)
        radius = RADIUS + WIDTH * jax.random.normal(radius_key, shape)
        return self.loc + jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)

    def log_prob(self, value: Float[Array, "*sample 2"]) -> Float[Array, "*sample"]:
        u = value - self.loc
        distance = jnp.sqrt(jnp.maximum(jnp.sum(u**2, axis=-1), jnp.finfo(u.dtype).tiny))
        radius = jnp.where(u[..., 0] < 0, -distance, distance)
        return dist.Normal(RADIUS, WIDTH).log_prob(radius) - jnp.log(jnp.pi * distance)


def program() -> None:
    """`theta ~ U(-1, 1)^2`; `x = (r cos a + .25 - |theta1 + theta2| / sqrt 2,

    R sin a + (theta2 - theta1) / sqrt 2)`.
    """
    theta = numpyro.sample("theta", dist.Uniform(-1.0, 1.0).expand([2]).to_event(1))
    along, across = (theta[0] + theta[1]) / jnp.sqrt(2.0), (theta[1] - theta[0]) / jnp.sqrt(2.0)
    numpyro.sample("x", Crescent(jnp.stack([OFFSET - jnp.abs(along), across])))


def exact(given: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> Arrays:
    """Draw the crescent, solve for theta, keep what the prior allows.

    With the rotation `p = (theta1 + theta2, theta2 - theta1) / sqrt 2` and a point u of the crescent around the
    origin, `|p1| = u1 + .25 - x1` and `p2 = x2 - u2`; both signs of p1 are equally likely.
    """
    x = np.asarray(given["x"], float)

    def propose(m):
        angle, radius = rng.uniform(-np.pi / 2, np.pi / 2, m), rng.normal(RADIUS, WIDTH, m)
        size = radius * np.cos(angle) + OFFSET - x[0]
        along, across = rng.choice([-1.0, 1.0], m) * size, x[1] - radius * np.sin(angle)
        theta = np.stack([along - across, along + across], axis=1) / np.sqrt(2)
        return theta, (size >= 0) & np.all(np.abs(theta) < 1, axis=1)

    return {"theta": rejection(propose, n, rng)}


TASK = Task(
    name="two_moons",
    program=program,
    observed=("x",),
    source="Greenberg et al. 2019, Automatic posterior transformation, A.5.1; Lueckmann et al. 2021, T.8",
    exact=exact,
    how="the simulator solved for theta, rejection to the prior's box",
)
