"""Several networks as one: their mixture, its density, training in parts, files."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.flows.base import trainable
from cpejax.flows.ensemble import Ensemble

GIVEN = {"y": np.array([0.3, 1.2, -0.4])}
TINY = cpe.CPE(width=4, depth=1, hidden=4, components=2)


def program():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("row", 3):
        numpyro.sample("y", dist.Normal(mu, sigma))


@pytest.fixture(scope="module")
def model():
    return cpe.Model(program, observed=["y"])


@pytest.fixture(scope="module")
def simulations(model):
    return cpe.simulate(model, 200, key=jax.random.key(0))


@pytest.fixture(scope="module")
def posterior(model, simulations):
    """Three networks that are not trained, which propose mu around -2, 0 and 2."""
    flows = []
    for i, shift in enumerate((-2.0, 0.0, 2.0)):
        flow = TINY.build(program, model.graph, simulations, key=jax.random.key(i))
        bias = flow.groups[0].mixture_bias.at[:, 0].add(shift)
        flows.append(eqx.tree_at(lambda f: f.groups[0].mixture_bias, flow, bias))
    return cpe.Posterior(Ensemble(flows), model, TINY, cpe.Training(), cpe.History(), 200)


def test_all_weights_are_counted(posterior):
    assert posterior.weights == 3 * sum(w.size for w in jax.tree.leaves(trainable(posterior.flow.one)[0]))


def test_the_density_is_the_mean_of_the_networks_densities(posterior):
    draws = {"mu": np.linspace(-4, 4, 9), "sigma": np.full(9, 0.7)}
    data, values = ({k: jnp.asarray(x, float) for k, x in some.items()} for some in (GIVEN, draws))
    density = eqx.filter_jit(lambda flow: flow.log_prob(values, data))
    each = np.stack([density(flow) for flow in posterior.flow.flows])
    np.testing.assert_allclose(
        posterior.log_prob(draws, given=GIVEN), np.log(np.exp(each).mean(0)), rtol=1e-4, atol=1e-5
    )


def test_draws_are_of_all_networks(posterior):
    n = 3000
    mixed = posterior.sample(n, given=GIVEN, key=jax.random.key(2)).posterior["mu"].values[0]
    data = {"y": jnp.asarray(GIVEN["y"], float)}
    each = [np.asarray(flow.sample(data, n, jax.random.key(3))[0]["mu"]) for flow in posterior.flow.flows]
    exact = np.sort(np.concatenate(each))
    # Kolmogorov's distance of n draws to 3n is below 1.95 √(1/n + 1/3n) in all but one of a thousand cases.
    ranks = np.searchsorted(exact, np.sort(mixed)) / len(exact)
    assert np.abs(ranks - (np.arange(n) + 0.5) / n).max() < 1.95 * np.sqrt(4 / (3 * n))
    halves = [np.mean(part < -1) for part in np.split(mixed, 2)]  # in random order
    assert abs(halves[0] - halves[1]) < 4 * np.sqrt(0.25 * 4 / n)


@pytest.mark.slow
def test_parts_join_to_the_whole(posterior, simulations):
    flow = posterior.flow
    rows = flow.prepare({name: jnp.asarray(x, float) for name, x in simulations.items()})
    parts = flow.divide(rows, 2)
    assert len(parts) == 2
    whole = flow.joined([part for part, _ in parts])
    for a, b in zip(jax.tree.leaves(trainable(flow)[0]), jax.tree.leaves(trainable(whole)[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    loss = eqx.filter_jit(lambda flow, rows: flow.validation_loss(rows, jax.random.key(4)))
    assert float(sum(loss(*part) for part in parts)) == pytest.approx(float(loss(flow, rows)), rel=1e-4)


def test_a_saved_ensemble_draws_what_it_drew(posterior, model, tmp_path):
    posterior.save(tmp_path)
    loaded = cpe.load(tmp_path, model)
    draws = [p.sample(20, given=GIVEN, key=jax.random.key(5)).posterior["sigma"].values for p in (posterior, loaded)]
    np.testing.assert_array_equal(*draws)


def test_networks_are_trained_at_once(model, simulations):
    short = cpe.Training(max_epochs=2)
    posterior = cpe.fit(model, simulations, method=TINY, ensemble=2, training=short, key=jax.random.key(1))
    first, second = (jax.tree.leaves(trainable(flow)[0]) for flow in posterior.flow.flows)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(first, second, strict=True))
    assert len(posterior.history.train) == 2
    assert posterior.history.validation[1] < posterior.history.validation[0]


def test_the_number_of_networks_is_checked(model, simulations):
    with pytest.raises(ValueError, match="ensemble, the number of networks, must be a whole number of at least 1"):
        cpe.fit(model, simulations, ensemble=0, key=jax.random.key(1))
