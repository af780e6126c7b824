"""Coordinates of data: monotone maps that invert, with their Jacobian, whatever the scale and the tails."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.coordinates.data import ASINH, LINEAR, LOG, ColumnMaps, DataCoordinates

RNG = np.random.default_rng(0)
COLUMNS = {
    "normal": (RNG.normal(3.0, 0.01, 2000), LINEAR),
    "uniform": (RNG.uniform(-1e4, 1e4, 2000), LINEAR),
    "student_1": (RNG.standard_t(1, 2000), ASINH),
    "student_3": (1e-3 * RNG.standard_t(1.5, 2000) + 5, ASINH),
    "four_decades": (np.exp(RNG.uniform(0, np.log(1e4), 2000)), LINEAR),
    "lognormal": (np.exp(3 * RNG.normal(size=2000)), LOG),
    "constant": (np.full(2000, 2.5), LINEAR),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_maps_invert_and_know_their_derivative(name):
    column, kind = COLUMNS[name]
    maps = ColumnMaps.of(column[:, None], counts=False)
    assert name == "four_decades" or int(maps.kinds[0]) == kind
    x = jnp.asarray(np.quantile(column, np.linspace(0, 1, 101)), jnp.float32)[:, None]
    z = maps.to_z(x)
    assert np.isfinite(z).all()
    assert np.abs(z).max() < 30  # what mixtures reach
    assert (np.diff(np.asarray(z)[:, 0]) >= 0).all()
    np.testing.assert_allclose(maps.to_values(z), x, rtol=2e-4, atol=1e-6)
    derivative = jax.vmap(jax.grad(lambda x: maps.to_z(x[None])[0]))(x[:, 0])
    np.testing.assert_allclose(maps.log_volume(x)[:, 0], np.log(derivative), atol=1e-3)


def test_an_observation_beyond_all_simulations_has_coordinates():
    for column, _ in COLUMNS.values():
        maps = ColumnMaps.of(column[:, None], counts=False)
        assert np.isfinite(maps.to_z(jnp.asarray([[-1e6], [0.0], [1e6]]))).all()
        assert np.isfinite(maps.to_values(jnp.asarray([[-50.0], [50.0]]))).all()


def test_counts_lie_between_edges_that_meet_and_are_open_at_the_ends():
    maps = ColumnMaps.of(RNG.poisson(3.0, (2000, 1)).astype(float), counts=True)
    counts = jnp.arange(0.0, float(maps.greatest[0]) + 1)[:, None]
    low, high = maps.edges(counts)
    np.testing.assert_allclose(high[:-1], low[1:])
    assert low[0, 0] == -jnp.inf
    assert high[-1, 0] == jnp.inf
    np.testing.assert_array_equal(maps.to_values(maps.to_z(counts)), counts)
    np.testing.assert_array_equal(maps.to_values(maps.to_z(counts) + 0.3 * (high - low)[1] * 0.9), counts)
    assert (maps.log_volume(counts) == 0).all()


def test_whole_numbers_are_found_by_their_support_or_by_their_values():
    def program():
        p = numpyro.sample("p", dist.Uniform(0.1, 0.9))
        numpyro.sample("coin", dist.Bernoulli(p))
        numpyro.sample("many", dist.Binomial(50, p))
        numpyro.sample("measured", dist.Normal(p, 1.0))
        numpyro.sample("simulated", cpe.Simulator(lambda key, p: jax.random.poisson(key, 5 * p).astype(float), p))

    model = cpe.Model(program, observed=["coin", "many", "measured", "simulated"])
    rows = cpe.simulate(model, 300, key=jax.random.key(0))
    values = {name: jnp.asarray(x, float) for name, x in rows.items()}
    found = DataCoordinates(model.bound, model.graph, values)
    assert found.counts == {"coin", "many", "simulated"}
    assert set(found.to_z({name: x[0] for name, x in values.items()})) == {"coin", "many", "measured", "simulated"}
