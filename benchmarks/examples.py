"""The posteriors of two examples against NUTS, which needs the likelihood that the examples pretend not to have.

    python benchmarks/examples.py picture demo/         # one finished run of examples/hierarchical.py
    python benchmarks/examples.py measure               # train both with default settings; minutes, idle machine

`measure` writes `benchmarks/results/examples.json`: C2ST between the draws of `cpe.fit` with its defaults (10,000
simulations) and NUTS (.5: they cannot be told apart), and the same between two independent runs of NUTS.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from numpyro.distributions import constraints
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

import cpejax as cpe

ROOT = Path(__file__).parents[1]
SEEDS = range(3)
SIMULATIONS = {"hierarchical": 10_000, "sir": 30_000}


def example(name):
    """An example's module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TukeyH(dist.Distribution):
    """`loc + scale · z exp(0.1 z²)` with normal z: what `hierarchical.measure` draws, with its density.

    `u = z exp(0.1 z²)` is solved for z by Newton's method from above, where it converges without fail.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}
    support = constraints.real

    def __init__(self, loc, scale):
        self.loc, self.scale = jnp.broadcast_arrays(loc, scale)
        super().__init__(batch_shape=self.loc.shape)

    def log_prob(self, value):
        u = (value - self.loc) / self.scale
        size = jnp.abs(jax.lax.stop_gradient(u))
        z = jnp.minimum(size, jnp.sqrt(10 * jnp.log1p(size)))
        for _ in range(15):
            z = z - (z - size * jnp.exp(-0.1 * z**2)) / (1 + 0.2 * z**2)
        z = jnp.sign(u) * z
        derivative = jnp.exp(0.1 * z**2) * (1 + 0.2 * z**2)
        z = z + (u - jax.lax.stop_gradient(u)) / derivative  # the derivative of the solution
        return -0.5 * z**2 - 0.5 * jnp.log(2 * jnp.pi) - 0.1 * z**2 - jnp.log1p(0.2 * z**2) - jnp.log(self.scale)


def hierarchical(y):
    """`examples/hierarchical.py` with its density."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("group", 8, dim=-2):
        with reparam(config={"beta": LocScaleReparam(0)}):
            beta = numpyro.sample("beta", dist.Normal(mu, tau))
        with numpyro.plate("measurement", 10, dim=-1):
            numpyro.sample("y", TukeyH(beta, sigma), obs=y)


def sir(cases):
    """`examples/sir.py` in JAX, with its density."""
    r0 = numpyro.sample("r0", dist.LogNormal(jnp.log(2.5), 0.4))
    duration = numpyro.sample("duration", dist.LogNormal(jnp.log(7.0), 0.3))
    reported = numpyro.sample("reported", dist.Beta(2.0, 4.0))

    def day(state, _):
        healthy, ill = state
        new = healthy * -jnp.expm1(-r0 / duration * ill / 10_000)
        return (healthy - new, ill + new + ill * jnp.expm1(-1 / duration)), new

    _, new = jax.lax.scan(day, (10_000.0 - 10, 10.0), None, 60)
    mean = reported * new.reshape(-1, 3).sum(1)
    numpyro.sample("cases", dist.GammaPoisson(10.0, 10.0 / mean).to_event(1), obs=cases)


TWINS = {"hierarchical": hierarchical, "sir": sir}


def observation(name, module):
    """The example's data."""
    file = ROOT / "examples" / f"{name}.json"
    found = json.loads(file.read_text()) if file.exists() else module.data
    return {site: np.asarray(x, np.float32) for site, x in found.items()}


def nuts(name, given, draws=10_000, seed=0, progress=False):
    """Draws by NUTS, `{parameter: (draws, *shape)}`; four chains, thinned by four."""
    sampler = MCMC(
        NUTS(TWINS[name], target_accept_prob=0.95),
        num_warmup=1000,
        num_samples=draws,
        thinning=4,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=progress,
    )
    sampler.run(jax.random.key(1000 + seed), **given)
    found = {k: np.asarray(v) for k, v in sampler.get_samples().items() if not k.endswith("_decentered")}
    return {k: v[..., 0] if k == "beta" else v for k, v in found.items()}


def matrix(draws, names):
    """All parameters in one array, `(n, d)`."""
    return np.concatenate([np.asarray(draws[n]).reshape(len(draws[n]), -1) for n in names], axis=1)


def compare(name, simulations=None, seed=0, draws=10_000):
    """C2ST of the example's posterior against NUTS, and of NUTS against itself."""
    module, simulations = example(name), simulations or SIMULATIONS[name]
    given = observation(name, module)
    rows = cpe.simulate(module.program, simulations, key=jax.random.key(10 * seed))
    method = getattr(module, "method", cpe.CPE())
    posterior = cpe.fit(module.program, rows, key=jax.random.key(10 * seed + 1), method=method)
    tree = posterior.sample(draws, given=given, key=jax.random.key(10 * seed + 2))
    names = posterior.graph.parameters
    ours = matrix({n: tree.posterior[n].values[0] for n in names}, names)
    one, two = (matrix(nuts(name, given, draws, s), names) for s in (seed, seed + 100))
    n = min(len(ours), len(one))
    return {
        "example": name,
        "seed": seed,
        "simulations": simulations,
        "c2st": cpe.metrics.c2st(ours[:n], one[:n]),
        "null": cpe.metrics.c2st(two[:n], one[:n]),
        "seconds": round(posterior.history.seconds, 1),
    }


def measure():
    """Both examples, three seeds each, written as they come."""
    path = ROOT / "benchmarks" / "results" / "examples.json"
    found = json.loads(path.read_text()) if path.exists() else []
    for name in TWINS:
        for seed in SEEDS:
            if not any((f["example"], f["seed"]) == (name, seed) for f in found):
                found.append(compare(name, seed=seed))
                print(found[-1], flush=True)
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(found, indent=1) + "\n")


def picture(folder):
    """A finished run of the hierarchical example and NUTS, in one figure."""
    given = observation("hierarchical", None)
    began = time.perf_counter()
    reference = nuts("hierarchical", given, 4000)
    seconds = time.perf_counter() - began
    with xr.open_datatree(Path(folder) / "posterior.nc", engine="h5netcdf") as tree:
        figure = cpe.plot.marginals(tree.load(), reference=reference, truth=example("hierarchical").truth)
    for text in figure.legends[0].get_texts():
        if text.get_text() == "reference":
            text.set_text("NUTS, with the likelihood")
    path = Path(folder) / "nuts.png"
    figure.savefig(path, dpi=150)
    print(f"The same posterior by NUTS, which needs the likelihood ({seconds:.0f} s), beside it: {path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["picture"] and len(sys.argv) == 3:
        picture(sys.argv[2])
    elif sys.argv[1:] == ["measure"]:
        measure()
    else:
        sys.exit(__doc__)
