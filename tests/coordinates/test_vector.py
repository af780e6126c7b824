"""Parameters as one vector, in each kind of coordinates, and the rejection of draws outside the support."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import cpejax as cpe
from cpejax.coordinates.prior import Coordinates
from cpejax.coordinates.vector import Label, Vector, prior_draw
from cpejax.flows.base import Flow

KEY = jax.random.key(0)


def program():
    """A support that depends on a parameter, a plate that is outside but comes last, and sites of several scalars."""
    low = numpyro.sample("low", dist.Normal(0.0, 2.0))
    with numpyro.plate("inner", 2, dim=-1):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("outer", 3, dim=-2):
            u = numpyro.sample("u", dist.Uniform(low, low + 2.0))
            v = numpyro.sample("v", dist.HalfNormal(jnp.array([2.0, 3.0])).to_event(1))
            numpyro.sample("y", dist.Normal(a + u + v.sum(-1), 1.0))


@pytest.fixture(scope="module")
def simulations():
    return cpe.simulate(cpe.Model(program, observed=["y"]), 200, key=KEY)


def vector_of(simulations, kind, sites=None):
    values = {name: jnp.asarray(x, jnp.float32) for name, x in simulations.items()}
    return Vector(program, simulations.graph, values, kind, sites), values


@pytest.mark.parametrize("kind", ["plain", "unconstrained", "prior"])
def test_there_and_back_and_the_volume(simulations, kind):
    vector, values = vector_of(simulations, kind)
    assert vector.size == 1 + 2 + 6 + 12
    some = {name: x[:50] for name, x in values.items()}
    names = vector.graph.parameters

    @jax.jit
    @jax.vmap
    def both(values):
        data = {"y": values["y"]}

        def plain(flat):
            parts = jnp.split(flat, np.cumsum([values[n].size for n in names])[:-1])
            return vector.flatten(data | {n: p.reshape(values[n].shape) for n, p in zip(names, parts, strict=True)})

        x = vector.flatten(values)
        flat = jnp.concatenate([values[n].reshape(-1) for n in names])
        return x, vector.unflatten(x, data), jax.jacfwd(plain)(flat), vector.log_volume(values)

    x, back, jacobian, volume = both(some)
    assert x.shape == (50, vector.size)
    for name in names:
        np.testing.assert_allclose(back[name], some[name], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(volume, np.linalg.slogdet(jacobian)[1], rtol=2e-3, atol=2e-3)
    assert vector.may_leave_support == (kind == "plain")
    assert ("low" in vector.needs()["u"]) == (kind != "plain")


def test_labels_say_where_each_scalar_is(simulations):
    unrolled = simulations.graph.unroll("inner")
    order = sorted(unrolled.parameters, reverse=True)  # v[:, 1], v[:, 0], u[:, 1], ...
    vector, values = vector_of(simulations, "plain", [unrolled.sites[n] for n in order])
    assert [label.member for label in vector.labels][:8:2] == ["v[0, 1]", "v[1, 1]", "v[2, 1]", "v[0, 0]"]
    assert {label.member for label in vector.labels} == set(simulations.graph.ground().parameters)
    x = vector.flatten({name: value[0] for name, value in values.items()})
    plates = tuple(vector.graph.plates)
    for scalar, label in zip(x, vector.labels, strict=True):
        site = vector.graph.sites[label.site]
        at = dict(zip([p for p in plates if p in site.dims], label.place, strict=True))
        value = values[label.site][0][tuple(at[d] if d else slice(None) for d in site.dims)]
        assert scalar == value.reshape(-1)[label.k]
    assert Label("low", (), 0, "low") in vector.labels
    with pytest.raises(ValueError, match="each once"):
        vector_of(simulations, "plain", [simulations.graph.sites["low"]])


def test_a_simplex_has_no_density_in_plain_coordinates():
    def simplex():
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("y", dist.Normal(p[0], 1.0))

    simulations = cpe.simulate(cpe.Model(simplex, observed=["y"]), 30, key=KEY)
    values = {name: jnp.asarray(x) for name, x in simulations.items()}
    with pytest.raises(ValueError, match=r"'p' \(Dirichlet\) has 3 scalars .* dimension 2.*'unconstrained'"):
        Vector(simplex, simulations.graph, values, "plain")
    vector = Vector(simplex, simulations.graph, values, "unconstrained")

    @jax.jit
    @jax.vmap
    def there_and_back(values):
        x = vector.flatten(values)
        return x, vector.unflatten(x, {"y": values["y"]})

    x, back = there_and_back(values)
    assert x.shape == (30, 2)
    np.testing.assert_allclose(back["p"], values["p"], atol=1e-5)


def test_prior_draws_are_joint_and_call_no_simulator():
    def simulated():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("b", dist.Normal(a, 0.1))
        numpyro.sample("y", cpe.Simulator(lambda rng, a: 1 / 0, a, host=True))

    graph = cpe.Graph.from_program(simulated)
    zeros = {name: jnp.zeros(1) for name in ("a", "b", "y")}
    coordinates = Coordinates(simulated, graph, zeros)
    keys = jax.random.split(KEY, 2000)
    draws = jax.vmap(
        lambda k: prior_draw(coordinates.program, coordinates.graph.parameters, {"y": jnp.zeros(())}, key=k)
    )(keys)
    assert set(draws) == {"a", "b"}
    assert stats.kstest(draws["a"], "norm").pvalue > 1e-3
    assert stats.kstest((draws["b"] - draws["a"]) / 0.1, "norm").pvalue > 1e-3


# ---- draws outside the support


def box():
    a = numpyro.sample("a", dist.Uniform(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a, 1.0))


class Proposal(Flow):
    """Proposes a ~ N(y, 1), whatever the program."""

    coordinates: Coordinates

    @property
    def may_leave_support(self):
        return True

    def sample(self, data, n, key):
        return {"a": data["y"] + jax.random.normal(key, (n,))}, {"counted": jnp.asarray(n)}

    def numbers_per_draw(self):
        return 1


@pytest.fixture
def posterior():
    simulations = cpe.simulate(cpe.Model(box, observed=["y"]), 100, key=KEY)
    values = {name: jnp.asarray(x) for name, x in simulations.items()}
    flow = Proposal(Coordinates(box, simulations.graph, values))
    return cpe.Posterior(flow, simulations.model, cpe.CPE(), cpe.Training(), cpe.History(), 100)


def test_only_draws_inside_are_returned_and_the_rate_is_that_of_the_proposals(posterior):
    for y, n in ((0.5, 4000), (2.0, 1500)):
        inside = stats.norm.cdf(1 - y) - stats.norm.cdf(-y)
        tree = posterior.sample(n, given={"y": y}, key=KEY)
        draws, attributes = tree.posterior["a"].values[0], tree.posterior.attrs
        expected = stats.truncnorm(-y, 1 - y, loc=y)
        assert draws.shape == (n,)
        assert stats.kstest(draws, expected.cdf).pvalue > 1e-3
        proposed = attributes["counted"]
        assert abs(attributes["acceptance_rate"] - inside) < 4 * np.sqrt(inside * (1 - inside) / proposed)
        # No more than the rejected are drawn again: no more than an eighth of n too many.
        assert proposed * attributes["acceptance_rate"] < n + n / 8 + 1


def test_rejection_for_many_observations_and_in_chunks(posterior, monkeypatch):
    y = np.array([-0.5, 0.5, 1.5])
    tree = posterior.sample(1500, given={"y": y}, key=KEY)
    for i in range(3):
        expected = stats.truncnorm(-y[i], 1 - y[i], loc=y[i])
        assert stats.kstest(tree.posterior["a"].values[0, :, i], expected.cdf).pvalue > 1e-3
    monkeypatch.setattr("cpejax.inference.posterior.MOST_NUMBERS", 400)
    expected = stats.truncnorm(-0.5, 0.5, loc=0.5)
    draws = posterior.sample(1500, given={"y": 0.5}, key=KEY).posterior["a"].values[0]
    assert stats.kstest(draws, expected.cdf).pvalue > 1e-3


def test_hopeless_proposals_are_an_error(posterior):
    with pytest.raises(RuntimeError, match=r"Of \d+ proposals for these data only 0 are inside .*'unconstrained'"):
        posterior.sample(5, given={"y": 30.0}, key=KEY)
    with pytest.raises(RuntimeError, match="for observation 1 only"):
        posterior.sample(5, given={"y": np.array([0.5, 30.0])}, key=KEY)
