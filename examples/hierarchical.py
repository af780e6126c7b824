"""Eight groups, each with its own mean, and an instrument whose noise has no density in closed form.

`mu` is the mean of the group means `beta`, which scatter around it by `tau`; each group is measured ten times, with
noise of scale `sigma` and tails that are heavier than a normal's (Tukey's h-distribution).

    cpejax graph examples/hierarchical.py
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import cpejax as cpe

GROUPS, MEASUREMENTS = 8, 10


def measure(key, beta, sigma):
    """Ten measurements of one group."""
    z = jax.random.normal(key, (MEASUREMENTS,))
    return beta + sigma * z * jnp.exp(0.1 * z**2)


def program():
    """Prior and simulator."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("group", GROUPS):
        beta = numpyro.sample("beta", dist.Normal(mu, tau))
        numpyro.sample("y", cpe.Simulator(measure, beta, sigma, event_shape=(MEASUREMENTS,)))


if __name__ == "__main__":
    graph = cpe.Graph.from_program(program)
    print(graph)
    print(cpe.invert(graph))
