"""Networks are built alike in every process: the order of Python's sets differs from one to the next."""

import os
import subprocess
import sys

BUILD = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
import cpejax as cpe
from cpejax.flows.base import trainable

def program():
    mu, tau, sigma = (numpyro.sample(name, dist.HalfNormal(1.0)) for name in ("mu", "tau", "sigma"))
    with numpyro.plate("districts", 2):
        district = numpyro.sample("district", dist.Normal(mu, tau))
    with numpyro.plate("schools", 4):
        school = numpyro.sample("school", dist.Normal(district[np.array([0, 0, 0, 1])], tau))
    with numpyro.plate("pupils", 7):
        numpyro.sample("y", dist.Normal(school[np.array([0, 0, 1, 1, 2, 3, 3])], sigma))

model = cpe.Model(program, observed=["y"])
sims = cpe.simulate(model, 50, key=jax.random.key(0))
flow = cpe.CPE(width=4, depth=1, hidden=4, components=2).build(model.bound, model.graph, sims, key=jax.random.key(1))
weights, rest = trainable(flow)
rng = np.random.default_rng(0)
weights = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), weights)  # zeros read nothing
flow = eqx.combine(weights, rest)
values = {name: jnp.asarray(sims[name][:4]) for name in model.graph.parameters}
found = eqx.filter_jit(lambda f: f.log_prob(values, {"y": jnp.asarray(sims["y"][0])}))(flow)
print(*np.asarray(found).round(2).tolist())
"""


def test_a_flow_does_not_depend_on_the_order_of_sets():
    """Of plates that index arrays put a datum in, for one: weights would belong to other columns after loading."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    said = {run.communicate()[0] for run in runs}
    assert all(run.returncode == 0 for run in runs)
    assert len(said) == 1
