"""A population that grows, overshoots and crashes, and is counted with error: a time series of 80 years.

This is Ricker's model, whose likelihood has no closed form because the true sizes are not observed (Wood, Nature 2010).
A convolutional network reads the series; the model file names it as part of its `method`, so the command uses it too.

    cpejax infer examples/time_series.py --out ricker/
    python examples/time_series.py
"""

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import cpejax as cpe

YEARS, WARMUP = 80, 20

observed = ["log_counts"]
method = cpe.CPE(embed={"log_counts": cpe.ConvEmbedding((YEARS,), key=jax.random.key(0))})
truth = {"log_r": 3.4, "sigma": 0.3, "effort": 9.0}
# Counts of 80 years, simulated with these parameters. They go over decades, and networks read their logarithms better.
COUNTS = [
    83, 1, 21, 157, 0, 0, 0, 2, 75, 1, 39, 19, 78, 0, 44, 16, 98, 0, 0, 4,
    121, 0, 0, 20, 124, 0, 0, 2, 20, 56, 1, 15, 164, 0, 0, 0, 8, 134, 0, 0,
    0, 13, 83, 0, 0, 14, 89, 0, 3, 74, 0, 20, 30, 28, 84, 2, 20, 44, 5, 89,
    0, 9, 100, 0, 1, 78, 0, 28, 48, 3, 71, 3, 48, 6, 77, 2, 41, 6, 134, 0,
]  # fmt: skip
data = {"log_counts": np.log1p(COUNTS)}


def ricker(key, log_r, sigma, effort):
    """Counts of animals: the size follows `n ← r n exp(−n + sigma e)`, and `effort · n` are found on average."""
    noise, count = jax.random.split(key)

    def year(log_n, e):
        log_n = jnp.clip(log_r + log_n - jnp.exp(log_n) + sigma * e, -30.0, 10.0)
        return log_n, log_n

    _, log_n = jax.lax.scan(year, jnp.zeros(()), jax.random.normal(noise, (WARMUP + YEARS,)))
    found = jax.random.poisson(count, effort * jnp.exp(log_n[WARMUP:]))
    return jnp.log1p(found.astype(float))


def program():
    """Prior and simulator."""
    log_r = numpyro.sample("log_r", dist.Uniform(2.0, 5.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))
    effort = numpyro.sample("effort", dist.Uniform(2.0, 20.0))
    numpyro.sample("log_counts", cpe.Simulator(ricker, log_r, sigma, effort, event_shape=(YEARS,)))


def main(simulations: int = 10_000, draws: int = 4_000, method=method, training=None) -> None:
    """How fast does it grow, how noisy is it, and how many of the animals were found?"""
    rows = cpe.simulate(program, simulations, key=jax.random.key(0))
    posterior = cpe.fit(program, rows, key=jax.random.key(1), method=method, training=training)
    tree = posterior.sample(draws, given=data, key=jax.random.key(2))
    table = arviz_stats.summary(tree, kind="stats")
    table["truth"] = [truth[name] for name in tree.posterior.data_vars]
    print(table)


if __name__ == "__main__":
    main()
