"""The paper's own flows: numbers of weights, their bias and where there is none, rejection, regressor, options."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.flows.base import count_weights
from cpejax.tasks import distractors, two_moons

KEY = jax.random.key(0)
SMALL = {"hidden": 16, "width": 16}


def pair():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 1.0))


def correlated(rho, n):
    """'Simulations' whose parameters are N(0, [[1, ρ], [ρ, 1]]) whatever the data: that is the posterior."""
    rng = np.random.default_rng(0)
    a, b = rng.multivariate_normal(np.zeros(2), [[1, rho], [rho, 1]], n).T
    return {"a": a, "b": b, "y": rng.normal(size=n)}


def fitted(method, rho=0.9, n=4000, **options):
    training = cpe.Training(**{"learning_rate": 4e-3, **options})
    model = cpe.Model(pair, observed=["y"])
    return cpe.fit(model, correlated(rho, n), method=method, key=jax.random.key(1), training=training, progress=False)


def covariance_of(posterior, **how):
    tree = posterior.sample(20_000, given={"y": 0.0}, key=KEY, **how)
    return np.cov(np.stack([tree.posterior[name].values[0] for name in "ab"])), tree.posterior.attrs


def correlation(covariance):
    return covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])


# ---- weights


@pytest.mark.parametrize(
    ("task", "storage", "weights"),
    [(distractors, "auto", 47_106), (two_moons, "dense", 71_235), (two_moons, "auto", 62_915)],
    ids=["distractors", "moons", "moons by edges"],
)
def test_numbers_of_weights(task, storage, weights):
    """Those that the paper rounds to 47,000 and 71,000; by edges there are no blocks that are unused."""
    graph = cpe.Model(task.program, observed=task.TASK.observed).graph
    blank = {name: np.zeros((1, *site.shape), np.float32) for name, site in graph.sites.items()}
    method = cpe.TriangularCPE(inverse="reverse", storage=storage)
    assert count_weights(method.build(task.program, graph, blank, key=KEY)) == weights


# ---- bias


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "biased", "sd"), [(0.3, 0.154, 0.99), (0.6, 0.339, 0.95), (0.9, 0.654, 0.87)])
def test_the_triangular_flow_has_the_bias_that_theory_says(rho, biased, sd):
    posterior = fitted(cpe.TriangularCPE(coordinates="prior"), rho, 20_000, steps=6_000)
    covariance, _ = covariance_of(posterior, solver="rk45")
    assert correlation(covariance) == pytest.approx(biased, abs=0.03)
    assert np.sqrt(covariance[0, 0]) == pytest.approx(sd, abs=0.03)  # the posterior program draws b first


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.3, 0.6, 0.9])
def test_the_discrete_flow_has_none(rho):
    covariance, attributes = covariance_of(fitted(cpe.DiscreteCPE(), rho, 20_000, steps=6_000))
    assert correlation(covariance) == pytest.approx(rho, abs=0.03)
    assert attributes["residual"] <= 1e-5


@pytest.mark.slow
def test_both_learn_what_they_can():
    """With little training: the one is on its way to .654, the other to .9."""
    options = {"steps": 1000, "max_epochs": 28}
    triangular = fitted(cpe.TriangularCPE(coordinates="prior", hidden=32, width=16), **options)
    discrete = fitted(cpe.DiscreteCPE(hidden=32, width=16), **options)
    assert correlation(covariance_of(triangular)[0]) == pytest.approx(0.654, abs=0.06)
    covariance, attributes = covariance_of(discrete)
    assert correlation(covariance) == pytest.approx(0.9, abs=0.04)
    assert attributes["residual"] <= 1e-5
    assert attributes["unsolved"] == attributes["clipped"] == 0


# ---- the regressor


@pytest.mark.slow
def test_a_regressor_draws_and_says_how_well():
    posterior = fitted(cpe.DiscreteCPE(inverse_by="regressor", hidden=16, width=32), steps=1000, max_epochs=28)
    covariance, attributes = covariance_of(posterior)
    # Its mean error is small and known; what is not within the tolerance of bisection is counted.
    assert 0 < attributes["residual_mean"] < 0.02
    assert attributes["residual_mean"] < attributes["residual"]
    assert 0 < attributes["unsolved"] <= 20_000
    assert correlation(covariance) == pytest.approx(0.9, abs=0.05)


# ---- rejection


def interval():
    a = numpyro.sample("a", dist.Uniform(-1.0, 1.0))
    numpyro.sample("y", dist.Normal(a, 0.5))


def shifted(by):
    """A field that moves everything by some prior standard deviations."""
    method = cpe.TriangularCPE(**SMALL)
    simulations = cpe.simulate(cpe.Model(interval, observed=["y"]), 200, key=KEY)
    flow = method.build(interval, simulations.graph, simulations, key=KEY)
    last = flow.net.biases[-1]
    flow = eqx.tree_at(
        lambda f: (f.part.net.biases[-1], f.part.net.maps[-1], f.part.net.gamma),
        flow,
        (jnp.full_like(last, by), jax.tree.map(jnp.zeros_like, flow.net.maps[-1]), jnp.full((), -20.0)),
    )
    return cpe.Posterior(flow, simulations.model, method, cpe.Training(), cpe.History(), 200)


def test_draws_outside_the_support_are_drawn_again():
    tree = shifted(np.sqrt(3) / 2).sample(4000, given={"y": 0.0}, key=KEY)
    a = tree.posterior["a"].values
    assert a.shape == (1, 4000)
    assert np.all(np.abs(a) <= 1)
    # A quarter of the interval's length further on: three quarters of the draws stay, and reach from -.5 to 1.
    rate = tree.posterior.attrs["acceptance_rate"]
    assert rate == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 4000))
    assert a.min() == pytest.approx(-0.5, abs=0.05)


def test_hopeless_rejection_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"only 0 are inside the prior's support.*coordinates='unconstrained'"):
        shifted(5.0).sample(100, given={"y": 0.0}, key=KEY)


# ---- options


BAD = [
    (cpe.TriangularCPE, {"inverse": "circular"}, r"inverse must be one of \['faithful', 'reverse'\], found 'circular'"),
    (cpe.TriangularCPE, {"width": 0}, "width must be a whole number of at least 1, found 0"),
    (cpe.DiscreteCPE, {"coordinates": "plain"}, "has no plain coordinates.*Use coordinates='prior'"),
    (cpe.DiscreteCPE, {"rank": 0}, "rank must be a whole number of at least 1, found 0"),
    (cpe.DiscreteCPE, {"rank": 1, "storage": "dense"}, "have their own storage; found storage='dense'"),
    (cpe.DiscreteCPE, {"inverse_by": "guess"}, r"inverse_by must be one of \['bisection', 'regressor'\]"),
]


@pytest.mark.parametrize(("method", "options", "message"), BAD, ids=lambda x: str(x)[:40])
def test_bad_options(method, options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        method(**options)


@pytest.mark.parametrize(("method", "option"), [(cpe.CPE, "rank"), (cpe.TriangularCPE, "blocks")])
def test_a_method_has_its_own_options_only(method, option, unchecked):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        method(**{option: 2})


def test_a_batch_of_one_has_no_base_draw():
    simulations = cpe.simulate(cpe.Model(interval, observed=["y"]), 40, key=KEY)
    with pytest.raises(ValueError, match="give batch_size of at least 2"):
        cpe.fit(interval, simulations, method=cpe.TriangularCPE(**SMALL), key=KEY, training=cpe.Training(batch_size=1))
