"""What a fit learns is a density, and is judged by it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from scipy.stats import multivariate_normal

import cpejax as cpe
from cpejax.flows.base import trainable
from cpejax.inference.rows import prepare
from cpejax.inference.scores import score_held_out

C2ST = {  # the highest that the default may have
    "distractors": 0.544,
    "gaussian_mixture_1": 0.565,
    "gaussian_mixture_2": 0.569,
    "hierarchical": 0.547,
    "hyperboloid": 0.60,
    "linear_gaussian": 0.53,
    "slcp": 0.817,
    "tree": 0.60,
    "two_moons": 0.568,
}
SMALL = cpe.CPE(width=16, depth=2, hidden=16, components=3)
COVARIANCE = np.linalg.inv(np.eye(2) + np.ones((2, 2)) / 0.09)


def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 0.3))


@pytest.fixture(scope="module")
def simulations():
    return cpe.simulate(cpe.Model(program, observed=["y"]), 2000, key=jax.random.key(0))


@pytest.fixture(scope="module")
def posterior(simulations):
    return cpe.fit(
        program,
        simulations,
        key=jax.random.key(1),
        method=SMALL,
        training=cpe.Training(max_epochs=20, learning_rate=1e-2),
    )


def exact_log_density(rows):
    theta = np.stack([rows["a"], rows["b"]], axis=1)
    means = rows["y"][:, None] * (COVARIANCE @ np.ones(2) / 0.09)
    return multivariate_normal(np.zeros(2), COVARIANCE).logpdf(theta - means)


def test_a_worse_posterior_has_no_better_validation_loss(posterior):
    """Weights changed at random, from a little to beyond recognition: the loss is above that of the exact posterior.

    The exact posterior is the best there is on fresh simulations, but for noise: the difference of the log-densities of
    1,000 of them has a mean that is not below 0 by more than a few standard errors.
    """
    fresh = cpe.simulate(cpe.Model(program, observed=["y"]), 1000, key=jax.random.key(7))
    rows = prepare(posterior.flow, fresh)
    weights, rest = trainable(posterior.flow)
    rng = np.random.default_rng(0)
    values = {name: jnp.asarray(x) for name, x in fresh.items()}

    @eqx.filter_jit
    def scores(weights):
        flow = eqx.combine(weights, rest)
        log_q = jax.vmap(lambda v: flow.log_prob({n: v[n][None] for n in "ab"}, {"y": v["y"]}, steps=20)[0])(values)
        return flow.validation_loss(rows, jax.random.key(0)), log_q

    exact = exact_log_density(fresh)
    for size in (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        changed = jax.tree.map(
            lambda w, size=size: w + jnp.asarray(size * rng.normal(size=w.shape) / np.sqrt(w.shape[-1]), w.dtype),
            weights,
        )
        loss, log_q = map(np.asarray, scores(changed))
        # In prior coordinates, which are the parameters themselves here.
        worse = exact + loss
        assert worse.mean() > -4 * (exact - log_q).std() / np.sqrt(1000)
        if size <= 0.3:  # where the few steps of validation resolve the field
            assert abs(loss + log_q.mean()) < 0.02 * max(1.0, abs(loss))


def test_a_fit_scores_held_out_simulations(posterior, simulations):
    found = posterior.history.held_out
    assert found["n"] == 200
    fresh = cpe.simulate(cpe.Model(program, observed=["y"]), 2000, key=jax.random.key(8))
    best = exact_log_density(fresh).mean()
    assert best - 0.3 < found["log_prob"] < best + 4 * found["error"]
    log_prior = dist.Normal(0, 1).log_prob(fresh["a"]) + dist.Normal(0, 1).log_prob(fresh["b"])
    assert abs(found["prior"] - log_prior.mean()) < 0.3
    assert abs(found["training"] - (found["log_prob"] - found["prior"])) < 0.5


def test_a_posterior_no_better_than_the_prior_is_warned_of(capsys):
    def ignored():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(1e-3 * a, 1.0))

    data = cpe.simulate(cpe.Model(ignored, observed=["y"]), 500, key=jax.random.key(0))
    cpe.fit(ignored, data, key=jax.random.key(1), method=SMALL, training=cpe.Training(max_epochs=2))
    assert "no better than the prior" in capsys.readouterr().err


def test_a_density_that_is_not_one_is_an_error(posterior, simulations, monkeypatch):
    flow = type(posterior.flow)
    log_prob = flow.log_prob
    monkeypatch.setattr(flow, "log_prob", lambda *args, **options: log_prob(*args, **options) + 75.0)
    with pytest.raises(FloatingPointError, match=r"cannot be right: it integrates to about e\^"):
        score_held_out(posterior.flow, simulations, np.arange(150), np.arange(200, 400))  # another shape: compiled anew


def test_a_loss_that_cannot_be_right_ends_training(simulations, monkeypatch):
    monkeypatch.setattr("cpejax.flows.ancestral.flow.AncestralFlow.least_loss", 100.0)
    with pytest.raises(FloatingPointError, match="cannot be right: no density of this flow"):
        cpe.fit(program, simulations, key=jax.random.key(1), method=SMALL, training=cpe.Training(max_epochs=2))


def test_training_that_diverges_keeps_the_best_weights(simulations, capsys):
    """A learning rate at which weights overflow, after a first epoch in which they do not."""
    schedule = dataclasses.replace(cpe.Training(), learning_rate=1e-3)
    rates = iter([1e-3, 1e-3, 1e30, 1e30, 1e30, 1e30])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(schedule), "rate", lambda *_: next(rates))
        posterior = cpe.fit(
            program, simulations, key=jax.random.key(1), method=SMALL, training=cpe.Training(max_epochs=6)
        )
    assert posterior.history.stopped.startswith("training diverged in epoch 3")
    assert posterior.history.best_epoch == 1
    assert "The weights of epoch 2 are kept" in capsys.readouterr().err
    draws = posterior.sample(100, given={"y": 0.5}, key=jax.random.key(2))
    assert np.isfinite(draws.posterior["a"]).all()


def draws_beside_exact(name, seed, simulations, **options):
    """Draws for one observation of a task, and exact ones, `(n, parameters)` each."""
    task = cpe.tasks.get(name)
    data = cpe.simulate(task, simulations, key=jax.random.key(0))
    posterior = cpe.fit(task, data, key=jax.random.key(1), **options)
    given = task.observation(seed)
    tree = posterior.sample(2_000, given=given, key=jax.random.key(2))
    draws = {site: tree.posterior[site].values[0] for site in task.parameters}
    return task.ravel(draws), task.ravel(task.exact(given, 2_000, np.random.default_rng(0)))


@pytest.mark.parametrize("name", ["hyperboloid", "linear_gaussian"])
def test_the_default_is_near_the_exact_posterior_with_tiny_settings(name):
    """Far from converged, but where the mass is: medians within a standard deviation, spreads within a factor of 2."""
    draws, exact = draws_beside_exact(name, 0, 600, training=cpe.Training(max_epochs=20))
    low, middle, high = np.quantile(exact, [0.25, 0.5, 0.75], axis=0)
    found = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
    assert (np.abs(found[1] - middle) < exact.std(0)).all()
    ratio = (found[2] - found[0]) / (high - low)
    assert ((ratio > 0.5) & (ratio < 2)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(C2ST))
def test_the_default_on_every_task(name):
    """The mean over five observations: what was measured before the density was bounded, and .03; hyperboloid: .60."""
    task = cpe.tasks.get(name)
    data = cpe.simulate(task, 10_000, key=jax.random.key(0))
    posterior = cpe.fit(task.program, data, key=jax.random.key(1))
    scores = []
    for seed in range(5):
        given = task.observation(seed)
        tree = posterior.sample(10_000, given=given, key=jax.random.key(seed))
        draws = task.ravel({site: tree.posterior[site].values[0] for site in task.parameters})
        exact = task.ravel(task.exact(given, 10_000, np.random.default_rng(seed)))
        scores.append(cpe.metrics.c2st(draws, exact))
    assert np.mean(scores) < C2ST[name]
    assert posterior.history.informed


def heavy_program():
    """Data of four decades, with one to three degrees of freedom; and priors with long tails."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    spread = numpyro.sample("spread", dist.LogNormal(0.0, 2.3))
    df = numpyro.sample("df", dist.Uniform(1.0, 3.0))
    with numpyro.plate("member", 5):
        numpyro.sample("y", dist.StudentT(df, mu, scale * spread))


def test_heavy_tails_and_data_beyond_all_simulations_blow_up_nothing(capsys):
    data = cpe.simulate(cpe.Model(heavy_program, observed=["y"]), 500, key=jax.random.key(0))
    posterior = cpe.fit(
        heavy_program,
        data,
        key=jax.random.key(1),
        method=SMALL,
        training=cpe.Training(max_epochs=8, learning_rate=1e-2),
    )
    assert posterior.history.informed
    for factor in (0.0, 1.0, 1e6, 1e30):
        given = {"y": np.float32(factor) * data["y"][0]}
        draws = posterior.sample(500, given=given, key=jax.random.key(2)).posterior
        assert np.abs(draws["mu"]).max() < 10
        for name in ("scale", "spread"):  # nothing is extrapolated, but for rounding
            assert draws[name].max() <= data[name].max() * 1.01
        assert np.isfinite(posterior.log_prob({n: draws[n].values[0] for n in posterior.graph.parameters}, given)).all()
    capsys.readouterr()


FAR = pytest.mark.xfail(
    reason="a datum 258 errors from zero: its coefficient's standard deviation is ten times too wide"
)


@pytest.mark.slow
@pytest.mark.parametrize("refine", [pytest.param(False, marks=FAR), True])
def test_a_horseshoe_is_not_extrapolated(refine):
    """Coefficients whose scales have half-Cauchy priors, against NUTS for one observation: means and spreads."""

    def program(y=None):
        tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
        with numpyro.plate("i", 20):
            lam = numpyro.sample("lam", dist.HalfCauchy(1.0))
            beta = numpyro.sample("beta", dist.Normal(0.0, tau * lam))
            numpyro.sample("y", dist.Normal(beta, 1.0), obs=y)

    data = cpe.simulate(cpe.Model(program, observed=["y"]), 5000, key=jax.random.key(0))
    posterior = cpe.fit(
        cpe.Model(program, observed=["y"]),
        data,
        key=jax.random.key(1),
        training=cpe.Training(steps=3000),
        emulate=False,
    )
    y = cpe.simulate(cpe.Model(program, observed=["y"]), 3, key=jax.random.key(11))["y"][0]
    drawn = posterior.sample(4000, given={"y": y}, key=jax.random.key(3), refine=refine).posterior
    found = drawn["beta"].values[0]
    mcmc = MCMC(NUTS(program, target_accept_prob=0.95), num_warmup=1000, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(5), y)
    exact = np.asarray(mcmc.get_samples()["beta"])
    error = (found.mean(0) - exact.mean(0)) / exact.std(0)
    assert np.abs(error).max() < 0.3
    assert (np.abs(np.log(found.std(0) / exact.std(0))) < np.log(1.5)).all()
