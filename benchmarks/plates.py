"""Plates whose members differ, with default settings and 10,000 simulations, against NUTS.

    python benchmarks/plates.py                    # all
    python benchmarks/plates.py linear schools     # some
    python benchmarks/plates.py --tables           # the table in docs/ancestral.md, from the results

Results are written to benchmarks/results/plates.json as they come; what is there already is not computed again, unless
`--again`. A posterior is as it should be if the C2ST is at most .57, or every mean is within .1 standard deviations and
every standard deviation within 10 %.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import condition, reparam
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam
from page import fill, table

import cpejax as cpe

RESULTS = Path(__file__).parent / "results" / "plates.json"
PAGE = Path(__file__).parents[1] / "docs" / "ancestral.md"
DRAWS = 10_000
RNG = np.random.default_rng(0)

X = RNG.normal(size=(100, 4))
SCHOOLS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
WIDE_ERRORS = np.geomspace(0.1, 10.0, 8)
DOSE = np.repeat(np.geomspace(0.1, 100.0, 10), 3)
RATER, ITEM = RNG.integers(0, 5, 60), RNG.integers(0, 4, 60)
GROUP = np.repeat(np.arange(8), [1, 2, 3, 5, 6, 8, 10, 12])
SCHOOL = np.repeat(np.arange(9), [2, 9, 4, 7, 3, 8, 5, 10, 6])
DISTRICT = np.array([0, 0, 1, 1, 1, 1, 2, 2, 2])

sample, Normal, HalfNormal = numpyro.sample, dist.Normal, dist.HalfNormal


def linear():
    """Linear regression, 100 rows and 4 covariates, with unknown noise."""
    a = sample("a", Normal(0.0, 1.0))
    b = sample("b", Normal(0.0, 1.0).expand([4]).to_event(1))
    sigma = sample("sigma", HalfNormal(1.0))
    with numpyro.plate("row", 100):
        sample("y", Normal(a + X @ b, sigma))


def logistic():
    """Logistic regression, 100 rows and 4 covariates."""
    a = sample("a", Normal(0.0, 1.0))
    b = sample("b", Normal(0.0, 1.0).expand([4]).to_event(1))
    with numpyro.plate("row", 100):
        sample("y", dist.Bernoulli(logits=a + X @ b))


def poisson():
    """Poisson regression, 100 rows and 4 covariates."""
    a = sample("a", Normal(1.0, 0.5))
    b = sample("b", Normal(0.0, 0.3).expand([4]).to_event(1))
    with numpyro.plate("row", 100):
        sample("y", dist.Poisson(jnp.exp(a + X @ b)))


def schools(errors=ERRORS):
    """Eight schools, with the published errors."""
    mu = sample("mu", Normal(0.0, 5.0))
    tau = sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("school", 8):
        theta = sample("theta", Normal(mu, tau))
        sample("y", Normal(theta, errors))


def schools_wide():
    """Eight groups with errors from .1 to 10."""
    mu = sample("mu", Normal(0.0, 5.0))
    tau = sample("tau", HalfNormal(5.0))
    with numpyro.plate("school", 8):
        theta = sample("theta", Normal(mu, tau))
        sample("y", Normal(theta, WIDE_ERRORS))


def crossed():
    """A mixed model: 60 ratings by 5 raters of 4 items, not all of them, with crossed effects."""
    mu = sample("mu", Normal(0.0, 1.0))
    tau_a = sample("tau_a", HalfNormal(1.0))
    tau_b = sample("tau_b", HalfNormal(1.0))
    sigma = sample("sigma", HalfNormal(1.0))
    with numpyro.plate("rater", 5):
        a = sample("a", Normal(0.0, tau_a))
    with numpyro.plate("item", 4):
        b = sample("b", Normal(0.0, tau_b))
    with numpyro.plate("rating", 60):
        sample("y", Normal(mu + a[RATER] + b[ITEM], sigma))


def dose():
    """A dose-response curve: 10 doses, 3 measurements each."""
    top = sample("top", dist.LogNormal(1.0, 0.3))
    half = sample("half", Normal(1.0, 1.0))
    steep = sample("steep", dist.LogNormal(0.0, 0.4))
    sigma = sample("sigma", HalfNormal(0.5))
    with numpyro.plate("measurement", 30):
        sample("y", Normal(top * jax.nn.sigmoid(steep * (jnp.log(DOSE) - half)), sigma))


def nested2():
    """8 groups of 1 to 12 members."""
    mu = sample("mu", Normal(0.0, 1.0))
    tau = sample("tau", HalfNormal(1.0))
    sigma = sample("sigma", HalfNormal(1.0))
    with numpyro.plate("group", 8):
        theta = sample("theta", Normal(mu, tau))
    with numpyro.plate("member", len(GROUP)):
        sample("y", Normal(theta[GROUP], sigma))


def nested3():
    """54 pupils in 9 schools in 3 districts, ragged on both levels."""
    mu = sample("mu", Normal(0.0, 1.0))
    between = sample("tau_district", HalfNormal(1.0))
    within = sample("tau_school", HalfNormal(1.0))
    sigma = sample("sigma", HalfNormal(1.0))
    with numpyro.plate("districts", 3):
        district = sample("district", Normal(mu, between))
    with numpyro.plate("schools", 9):
        school = sample("school", Normal(district[DISTRICT], within))
    with numpyro.plate("pupil", len(SCHOOL)):
        sample("y", Normal(school[SCHOOL], sigma))


MODELS = {m.__name__: m for m in (linear, logistic, poisson, schools, schools_wide, crossed, dose, nested2, nested3)}
CENTRED = ("theta", "a", "b", "district", "school")


def nuts(program, y, seed):
    """Draws of the parameters by NUTS, with groups' effects away from their scale."""
    names = [n for n, s in cpe.Model(program, observed=["y"]).graph.sites.items() if s.plates and n != "y"]
    model = reparam(condition(program, {"y": y}), config={n: LocScaleReparam(0) for n in names if n in CENTRED})
    kernel = NUTS(model, target_accept_prob=0.95)
    mcmc = MCMC(
        kernel, num_warmup=1000, num_samples=DRAWS // 4, num_chains=4, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(jax.random.key(seed))
    return mcmc.get_samples()


def observations(name, program):
    """The published data, or two data sets drawn from the model."""
    if name == "schools":
        return [SCHOOLS]
    rows = cpe.simulate(cpe.Model(program, observed=["y"]), 2, key=jax.random.key(99))
    return list(rows["y"])


def matrix(draws, names):
    """One column a scalar."""
    return np.concatenate([np.asarray(draws[n]).reshape(len(draws[n]), -1) for n in names], axis=1)


def run(name, simulations, steps=None, fits=None, emulate=None):
    """How far the draws for each observation are from those of NUTS."""
    program = MODELS[name]
    model = cpe.Model(program, observed=["y"])
    folder = Path(fits) / name if fits else None
    if folder is not None and folder.exists():
        posterior = cpe.load(folder, model)
    else:
        rows = cpe.simulate(model, simulations, key=jax.random.key(0))
        training = cpe.Training() if steps is None else cpe.Training(steps=steps)
        posterior = cpe.fit(model, rows, key=jax.random.key(1), training=training, emulate=emulate, progress=False)
        if folder is not None:
            posterior.save(folder)
    plain, refined = ({"c2st": [], "mean": [], "sd": []} for _ in range(2))
    for seed, y in enumerate(observations(name, program)):
        reference = matrix(nuts(program, jnp.asarray(y), seed), posterior.graph.parameters)
        for out, refine in ((plain, False), (refined, True)):
            tree = posterior.sample(DRAWS, given={"y": y}, key=jax.random.key(seed), refine=refine)
            draws = {n: tree.posterior[n].values[0] for n in posterior.graph.parameters}
            compare(out, matrix(draws, draws), reference)
    used = posterior.history.emulation.get("used", "not tried")
    about = {"simulations": simulations, "steps": steps or "default", "emulated": used}
    return {**plain, "refined": refined, **about}


def compare(out, ours, theirs):
    """Add how far draws are from those of NUTS."""
    spread = theirs.std(0)
    out["c2st"].append(round(cpe.metrics.c2st(ours, theirs), 3))
    out["mean"].append(round(float(np.abs((ours.mean(0) - theirs.mean(0)) / spread).max()), 3))
    out["sd"].append(round(float(np.abs(ours.std(0) / spread - 1).max()), 3))


def tables(results):
    """The table of the page."""
    rows = []
    for name in (n for n in MODELS if n in results):
        r = results[name]
        about = MODELS[name].__doc__.rstrip(".").replace("\n", " ")
        about += "" if r["steps"] == "default" else f" ({r['steps']:,} steps of training)"
        about += " (`emulate=False`)" if r.get("emulated") == "not tried" else ""
        cells = [f"{np.mean(r['c2st']):.3f}", f"{max(r['mean']):.2f}", f"{max(r['sd']):.2f}"]
        rows.append([about, *cells, f"{np.mean(r['refined']['c2st']):.3f}" if "refined" in r else "–"])
    head = ["model", "C2ST", "largest error of a mean, in sd", "largest relative error of an sd", "C2ST, refined"]
    fill(PAGE, {"plates": table(head, rows)})


def main():
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--no-emulation", action="store_true", help="fit with emulate=False, which is faster")
    parser.add_argument("--fits", help="a folder of fits, which are saved there, or read if they are there")
    parser.add_argument(
        "--steps", type=int, help="of training, for a quicker look; the default is that of cpe.Training"
    )
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.tables:
        tables(results)
        return
    for name in options.models or MODELS:
        if name not in results or options.again:
            emulate = False if options.no_emulation else None
            results[name] = run(name, options.simulations, options.steps, options.fits, emulate)
            print(name, results[name], flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
