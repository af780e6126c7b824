"""`cpe.Model.from_prior`: a prior and a black box without a program, and simulations that were made elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe

KEY = jax.random.key(0)
PRIOR = {"theta": dist.Uniform(jnp.array([-1.0, 0.0]), jnp.array([1.0, 2.0])), "scale": dist.HalfNormal(1.0)}


def in_jax(key, theta, scale):
    return theta.sum() + scale * jax.random.normal(key, (4,))


def in_numpy(rng, theta, scale):
    return theta.sum() + scale * rng.normal(size=4)


def all_rows(rng, theta, scale):
    return theta.sum(1)[:, None] + scale[:, None] * rng.normal(size=(len(scale), 4))


def test_it_is_the_program_that_one_would_write():
    def program():
        theta = numpyro.sample("theta", PRIOR["theta"].to_event(1))
        scale = numpyro.sample("scale", PRIOR["scale"])
        numpyro.sample("y", cpe.Simulator(in_jax, theta, scale, event_shape=(4,)))

    model = cpe.Model.from_prior(PRIOR, in_jax, observed="y")
    assert model.graph.fingerprint == cpe.Model(program).graph.fingerprint
    mine, theirs = (cpe.simulate(m, 20, key=KEY) for m in (model, cpe.Model(program)))
    assert all(np.array_equal(mine[name], theirs[name]) for name in ("theta", "scale", "y"))


@pytest.mark.parametrize(("simulator", "vectorized"), [(in_numpy, False), (all_rows, True)])
def test_a_simulator_on_the_host_tells_its_shape(simulator, vectorized):
    model = cpe.Model.from_prior(PRIOR, simulator, host=True, vectorized=vectorized)
    sims = cpe.simulate(model, 500, key=KEY)
    assert sims["theta"].shape == (500, 2)
    assert sims["x"].shape == (500, 4)
    residual = sims["x"] - sims["theta"].sum(1)[:, None]
    assert np.all(np.abs((residual / sims["scale"][:, None]).std() - 1) < 0.1)


def test_simulations_made_elsewhere(no_training):
    prior = {"mean": dist.Normal(0.0, 1.0)}
    made = dict(
        cpe.simulate(cpe.Model.from_prior(prior, lambda key, mean: mean + jax.random.normal(key)), 120, key=KEY)
    )
    model = cpe.Model.from_prior(prior, shape=())
    tiny = cpe.CPE(width=8, depth=1, hidden=8, components=1)
    posterior = cpe.fit(model, {name: x[:80] for name, x in made.items()}, method=tiny, key=KEY)
    with pytest.raises(
        ValueError, match=r"Site 'x' has no simulator: cpe\.Model\.from_prior was called without one\. Give"
    ):
        cpe.simulate(model, 20, key=KEY)
    with pytest.raises(ValueError, match=r"Site 'x' has no simulator.*cpe\.check"):
        cpe.check(posterior, key=KEY)
    rest = {name: x[80:] for name, x in made.items()}
    found = cpe.check(posterior, given={"x": made["x"][0]}, simulations=rest, draws=20, key=KEY)
    finding = found["Posterior predictive"]
    assert finding.ok
    assert "not tested, because no data can be drawn from the posterior. Site 'x' has no simulator" in finding.sentence
    assert found.predictive is None


def test_errors_name_what_is_wrong(unchecked):
    with pytest.raises(ValueError, match="'theta' is a parameter, and the name of the data"):
        cpe.Model.from_prior(PRIOR, in_jax, observed="theta")
    with pytest.raises(TypeError, match=r"prior\['theta'\] must be a NumPyro distribution, found tuple"):
        cpe.Model.from_prior({"theta": (0, 1)}, in_jax)
    with pytest.raises(TypeError, match="prior must be a dict of NumPyro distributions"):
        cpe.Model.from_prior(dist.Normal(0, 1), in_jax)
    with pytest.raises(ValueError, match=r"needs the shape of one observation, as shape=\(10,\)"):
        cpe.Model.from_prior(PRIOR)
    with pytest.raises(ValueError, match=r"returned shape \(4,\) for one row at once \(vectorized=True\)"):
        cpe.Model.from_prior(PRIOR, lambda _rng, _theta, _scale: np.zeros(4), host=True, vectorized=True)
