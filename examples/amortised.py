"""One training, many observations: 200 springs, each with its own measurements, in a single call.

A damped spring is measured 20 times with noise. The posterior is trained once; every further spring costs milliseconds.
All of them are simulated, so that it can be seen how often the intervals hold the true values.

    cpejax infer examples/amortised.py --out springs/
    python examples/amortised.py
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import cpejax as cpe

SPRINGS, TIMES = 200, jnp.linspace(0.2, 10.0, 20)

observed = ["position"]


def program():
    """Prior and likelihood: stiffness, damping and noise of one spring."""
    stiffness = numpyro.sample("stiffness", dist.LogNormal(0.5, 0.3))
    damping = numpyro.sample("damping", dist.HalfNormal(0.3))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 0.4))
    position = jnp.exp(-damping * TIMES) * jnp.cos(jnp.sqrt(stiffness) * TIMES)
    numpyro.sample("position", dist.Normal(position, noise).to_event(1))


model = cpe.Model(program, observed)
springs = cpe.simulate(model, SPRINGS, key=jax.random.key(7))
data = {"position": springs["position"]}  # (200, 20): one row for each spring


def main(simulations: int = 10_000, draws: int = 1_000, method=None, training=None) -> None:
    """The posteriors of all springs, and whether they hold what is true."""
    rows = cpe.simulate(model, simulations, key=jax.random.key(0))
    posterior = cpe.fit(model, rows, key=jax.random.key(1), method=method, training=training)
    for name in ("the first time, with compilation", "once more"):
        began = time.perf_counter()
        tree = posterior.sample(draws, given=data, key=jax.random.key(2))
        print(f"{SPRINGS} springs, {draws} draws each, {name}: {time.perf_counter() - began:.2f} s")
    for name in tree.posterior.data_vars:
        low, high = np.quantile(tree.posterior[name].values[0], [0.05, 0.95], axis=0)
        inside = np.mean((low <= springs[name]) & (springs[name] <= high))
        print(f"90 % intervals of {name} hold the truth for {inside:.0%} of the springs")


if __name__ == "__main__":
    main()
