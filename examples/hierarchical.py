"""Eight groups, each with its own mean, and an instrument whose noise has no density in closed form.

`mu` is the mean of the group means `beta`, which scatter around it by `tau`; each group is measured ten times, with
noise of scale `sigma` and tails that are heavier than a normal's (Tukey's h-distribution).

    cpejax graph examples/hierarchical.py
    cpejax infer examples/hierarchical.py --given examples/hierarchical.json --out run/
    python examples/hierarchical.py
"""

import arviz_stats
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import cpejax as cpe

GROUPS, MEASUREMENTS = 8, 10

# What the measurements in hierarchical.json were simulated with.
truth = {
    "mu": -2.515,
    "tau": 1.388,
    "sigma": 2.302,
    "beta": [-3.923, -0.312, -2.536, -3.662, -1.794, -4.954, -3.49, -2.158],
}


def measure(key, beta, sigma):
    """Ten measurements of one group, sorted: their order says nothing, and networks learn faster from what is left."""
    z = jax.random.normal(key, (MEASUREMENTS,))
    return jnp.sort(beta + sigma * z * jnp.exp(0.1 * z**2))


def program():
    """Prior and simulator."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("group", GROUPS):
        beta = numpyro.sample("beta", dist.Normal(mu, tau))
        numpyro.sample("y", cpe.Simulator(measure, beta, sigma, event_shape=(MEASUREMENTS,)))


def main(simulations: int = 10_000, draws: int = 4_000, method=None, training=None) -> None:
    """From nothing to a posterior of groups that we know, because we made them."""
    model = cpe.Model(program)
    print(model.graph, cpe.invert(model.graph), sep="\n")

    truth = cpe.simulate(model, 20, key=jax.random.key(0))
    observation = {"y": truth["y"][0]}

    data = cpe.simulate(model, simulations, key=jax.random.key(1))
    training = training or cpe.Training(steps=6_000)
    posterior = cpe.fit(model, data, key=jax.random.key(2), method=method, training=training)
    print(f"{posterior}\ntrained for {len(posterior.history.train)} epochs in {posterior.history.seconds:.0f} s")
    tree = posterior.sample(draws, given=observation, key=jax.random.key(3))

    table = arviz_stats.summary(tree, kind="stats")
    table["truth"] = [float(x) for name in tree.posterior.data_vars for x in truth[name][0].ravel()]
    print(table)


if __name__ == "__main__":
    main()
