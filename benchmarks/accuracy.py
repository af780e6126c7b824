"""The accuracy of posteriors that are known in closed form, with default settings and 10,000 simulations.

    python benchmarks/accuracy.py                       # all that are not there yet
    python benchmarks/accuracy.py toy vector_gaussian   # some
    python benchmarks/accuracy.py --c2st mlp            # the published C2ST instead of the fast one that agrees with it
    python benchmarks/accuracy.py --docs                # docs/inference.md and the README, from what is stored

The nine tasks are measured by the benchmark, `cpejax bench --tasks paper --methods CPE --seeds 0`; its stored rows
(`python benchmarks/bench.py bench`) are in the same table. Results are written to benchmarks/results/accuracy.json as
they come; what is there already is not computed again, unless `--again`.
"""

import argparse
import json
import resource
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import page
from scipy.stats import multivariate_normal, norm

import cpejax as cpe
from cpejax.runs.bench.table import read_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
OBSERVATIONS, DRAWS = 5, 10_000


def fitted(program, observed, simulations=10_000, **options):
    """A posterior with default settings, and what is known of it."""
    model = cpe.Model(program, observed=observed)
    data = cpe.simulate(model, simulations, key=jax.random.key(0))
    posterior = cpe.fit(model, data, key=jax.random.key(1), training=cpe.Training(**options))
    history = posterior.history
    about = {"weights": posterior.weights, "epochs": len(history.train), "best_epoch": history.best_epoch}
    for name in ("held_out", "emulation", "refinement"):
        about[name] = {k: round(x, 3) if isinstance(x, float) else x for k, x in getattr(history, name).items()}
    return posterior, about


def drawn(posterior, given, seed):
    """Draws as `{site: (n, ...)}`."""
    tree = posterior.sample(DRAWS, given=given, key=jax.random.key(seed))
    return {name: tree.posterior[name].values[0] for name in posterior.graph.parameters}


def matrix(draws):
    """One column a number."""
    return np.concatenate([np.asarray(x).reshape(len(x), -1) for x in draws.values()], axis=1)


def compare(posterior, observations, exact, c2st):
    """The mean C2ST over observations, and each."""
    scores = []
    for seed, given in enumerate(observations):
        reference = exact(given, DRAWS, np.random.default_rng(seed))
        draws = drawn(posterior, given, seed)
        scores.append(cpe.metrics.c2st(matrix(draws), matrix({n: reference[n] for n in draws}), method=c2st))
    return {"c2st": round(float(np.mean(scores)), 4), "each": [round(s, 3) for s in scores]}


def toy_program():
    """Two parameters of which only the sum is seen."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 0.3))


def toy(c2st):
    """Correlation -.917 within .02, standard deviations within 3 %, log-density within .05 nats."""
    posterior, about = fitted(toy_program, ["y"])
    covariance = np.linalg.inv(np.eye(2) + np.ones((2, 2)) / 0.09)
    out = []
    for seed, y in enumerate((-2.0, -0.7, 0.0, 0.9, 1.8)):
        draws = drawn(posterior, {"y": y}, seed)
        log_prob = posterior.log_prob(draws, given={"y": y})
        exact = multivariate_normal(covariance @ np.ones(2) / 0.09 * y, covariance)
        found = np.cov(matrix(draws).T)
        out.append(
            {
                "y": y,
                "correlation": found[0, 1] / np.sqrt(found[0, 0] * found[1, 1]),
                "sd_ratio": (np.sqrt(np.diag(found)) / np.sqrt(np.diag(covariance))).tolist(),
                "log_prob_error": float(np.abs(log_prob - exact.logpdf(matrix(draws))).mean()),
            }
        )
    return {**about, "exact_correlation": covariance[0, 1] / covariance[0, 0], "observations": out}


def groups_program(size):
    """The hierarchical model of normal groups."""

    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("group", size):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, 0.5))

    return program


def exact_groups(given, n, rng, points=2000):
    """mu and tau on a grid (around the posterior's bulk), theta conjugate."""
    y = np.asarray(given["y"], float)

    def log_density(mu, tau):
        variance = tau**2 + 0.25
        log_likelihood = (
            -0.5 * len(y) * np.log(variance) - 0.5 * ((y**2).sum() - 2 * mu * y.sum() + len(y) * mu**2) / variance
        )
        return norm.logpdf(mu) + norm.logpdf(tau) + log_likelihood

    low, high = np.array([-4.0, 1e-4]), np.array([4.0, 5.0])
    for _ in range(3):  # zoom to where the mass is
        mu, tau = (np.linspace(a, b, points // 2) for a, b in zip(low, high, strict=True))
        log_p = log_density(mu[:, None], tau[None, :])
        where = np.argwhere(log_p > log_p.max() - 18)
        (i0, j0), (i1, j1) = where.min(0), where.max(0)
        low, high = (
            np.array([mu[max(i0 - 1, 0)], tau[max(j0 - 1, 0)]]),
            np.array([mu[min(i1 + 1, len(mu) - 1)], tau[min(j1 + 1, len(tau) - 1)]]),
        )
    mu, tau = (np.linspace(a, b, points) for a, b in zip(low, high, strict=True))
    p = np.exp(log_density(mu[:, None], tau[None, :]) - log_p.max()).ravel()
    chosen = rng.choice(len(p), n, p=p / p.sum())
    width = np.array([mu[1] - mu[0], tau[1] - tau[0]])
    mu, tau = mu[chosen // points], tau[chosen % points]
    mu, tau = mu + width[0] * rng.uniform(-0.5, 0.5, n), np.maximum(tau + width[1] * rng.uniform(-0.5, 0.5, n), 1e-6)
    precision = 1 / tau**2 + 4
    theta = (mu / tau**2 / precision)[:, None] + 4 * y / precision[:, None]
    theta = theta + rng.normal(size=theta.shape) / np.sqrt(precision)[:, None]
    return {"mu": mu, "tau": tau, "theta": theta}


def groups(size, **options):
    """The hierarchical model against exact draws."""

    def run(c2st):
        program = groups_program(size)
        posterior, about = fitted(program, ["y"], **options)
        data = cpe.simulate(cpe.Model(program, observed=["y"]), OBSERVATIONS, key=jax.random.key(100))
        observations = [{"y": y} for y in data["y"]]
        out = {**about, "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)}
        names = {"mu": ("mu",), "tau": ("tau",), "mu_tau": ("mu", "tau")}
        if size <= 100:
            names["all"] = ("mu", "tau", "theta")
        scores: dict[str, list[float]] = {name: [] for name in names}
        for seed, given in enumerate(observations):
            reference = exact_groups(given, DRAWS, np.random.default_rng(seed))
            draws = drawn(posterior, given, seed)
            for name, sites in names.items():
                pair = [matrix({s: x[s] for s in sites}) for x in (draws, reference)]
                scores[name].append(cpe.metrics.c2st(*pair, method=c2st))
        return out | {
            n: {"c2st": round(float(np.mean(s)), 4), "each": np.round(s, 3).tolist()} for n, s in scores.items()
        }

    return run


def vector_gaussian(c2st):
    """The linear Gaussian as one vector of ten, without saying that its dimensions are independent."""

    def program():
        theta = numpyro.sample("theta", dist.Normal(0.0, 0.1**0.5).expand([10]).to_event(1))
        numpyro.sample("x", dist.Normal(theta, 0.1**0.5).to_event(1))

    def exact(given, n, rng):
        return {"theta": np.asarray(given["x"]) / 2 + np.sqrt(0.05) * rng.normal(size=(n, 10))}

    posterior, about = fitted(program, ["x"])
    data = cpe.simulate(cpe.Model(program, observed=["x"]), OBSERVATIONS, key=jax.random.key(100))
    return {**about, **compare(posterior, [{"x": x} for x in data["x"]], exact, c2st)}


ALL = {
    "toy": toy,
    "groups_8": groups(8),
    "vector_gaussian": vector_gaussian,
    "groups_1000": groups(1000, max_epochs=18),
}


def rows_of_tasks():
    """Mean C2ST of the nine tasks' draws, as they are and refined, each of the former, and gains in log-density."""
    rows = read_table(RESULTS.with_name("bench.csv"))
    rows = rows[(rows["method"] == "CPE") & (rows["budget"] == 10_000) & (rows["seed"] == 0)]
    for name in cpe.tasks.names():
        of_task = rows[rows["task"] == name]
        plain, refined = (of_task.loc[of_task["solver"] == solver, "c2st"] for solver in ("plain", "refined"))
        if len(plain):
            gains = [of_task[[f"{by}_gain", f"{by}_error"]].iloc[0] for by in ("emulation", "refinement")]
            yield name, cpe.tasks.get(name).theta_dim, plain.mean(), refined.mean(), plain, gains


def rows_of_models(found):
    """The same of the models that are measured here, whose draws are not refined."""
    names = {"vector_gaussian": "linear Gaussian, as one vector", "groups_8": "eight normal groups"}
    for key, name in names.items():
        if key in found:
            score, gains = found[key].get("all", found[key]), []
            for by, before, after in (("emulation", "without", "with"), ("refinement", "plain", "refined")):
                one = found[key].get(by)
                gains.append((one[after] - one[before], one["error"]) if one else (np.nan, np.nan))
            yield name, found[key].get("parameters", 10), score["c2st"], np.nan, score["each"], gains


def document(found):
    """The table of docs/inference.md, and some of it in words in the README."""

    def number(x):
        return "–" if np.isnan(x) else f"{x:.3f}".removeprefix("0")

    rows = []
    for name, size, c2st, refined, each, gains in [*rows_of_tasks(), *rows_of_models(found)]:
        gained = ["–" if np.isnan(gain) else f"{gain:+.3f} ± {error:.3f}" for gain, error in gains]
        rows.append([name.replace("_", " "), size, number(c2st), number(refined), " ".join(map(number, each)), *gained])
    head = [
        "model",
        "parameters",
        "C2ST",
        "refined",
        "each observation, not refined",
        "emulation, nats",
        "refinement, nats",
    ]
    page.fill(ROOT / "docs" / "inference.md", {"accuracy": page.table(head, rows)})
    of = {row[0]: row for row in rows}
    moons, slcp, worst = of["two moons"], of["slcp"], of["hyperboloid"]
    words = (
        "With default settings and 10,000 simulations a classifier tells draws from exact ones with an accuracy\n"
        f"(C2ST; .5 is perfect) of {of['linear gaussian'][2]} on a linear Gaussian in ten dimensions,\n"
        f"{of['hierarchical'][2]} on a hierarchical model, {moons[2]} on two moons,\n"
        f"{worst[2]} on the hyperboloid, {slcp[2]} on SLCP;\n"
        f"refined by the likelihood that is learned as well, {moons[3]} on two moons and {slcp[3]} on SLCP, but\n"
        f"{worst[3]} on the hyperboloid ([the nine tasks](docs/inference.md#accuracy), by\n"
        "`cpejax bench --tasks paper --methods CPE --seeds 0`)."
    )
    page.fill(ROOT / "README.md", {"accuracy": words})


def main() -> None:
    """Compute what is asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *ALL], help="which (default: all)")
    parser.add_argument("--c2st", default="fast", choices=["fast", "mlp"])
    parser.add_argument("--again", action="store_true", help="compute again what is there")
    parser.add_argument("--docs", action="store_true", help="write the table of the documentation")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.docs:
        document(found)
        return
    for name in options.names or ALL:
        if name in found and not options.again:
            continue
        found[name] = {**ALL[name](options.c2st), "c2st_method": options.c2st}
        print(name, json.dumps(found[name]), flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
