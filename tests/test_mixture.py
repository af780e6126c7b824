"""The mixtures that straighten coordinates: monotone maps, their inverses, their densities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest, norm

from cpejax._mixture import EDGE, Mixture, linear, quantile

bend = jax.jit(lambda mixture, w: mixture.bend(w))
straighten = jax.jit(lambda mixture, z: mixture.straighten(linear(z, mixture.uniform)))
log_density = jax.jit(lambda mixture, z: mixture.log_density(z, linear(z, mixture.uniform)))


def mixtures(uniform, rows=2000, spread=1.0):
    numbers = spread * jax.random.normal(jax.random.key(0), (rows, 24))
    return Mixture.from_numbers(numbers.T, jnp.full((1,), uniform))


@pytest.mark.parametrize("uniform", [False, True])
def test_bend_inverts_straighten(uniform):
    mixture = mixtures(uniform)
    w = jnp.linspace(-3.0, 3.0, 2000)
    z = bend(mixture, w)
    error = np.abs(np.asarray(straighten(mixture, z) - w))
    assert np.quantile(error, 0.99) < 1e-4
    assert error.max() < 0.05  # where float32 cannot tell neighbouring quantiles apart


@pytest.mark.parametrize("uniform", [False, True])
def test_the_density_integrates_to_one_and_is_that_of_the_draws(uniform):
    one = Mixture.from_numbers(jnp.sin(3.0 * jnp.arange(24.0))[:, None], jnp.full((1,), uniform))
    grid = jnp.linspace(-20.0, 20.0, 40_001)
    cumulative = np.cumsum(np.exp(np.asarray(log_density(one, grid), np.float64))) * 1e-3
    assert abs(cumulative[-1] - 1) < 1e-3
    w = jax.random.normal(jax.random.key(1), (20_000,))
    z = np.asarray(bend(one, w))
    assert kstest(z, lambda x: np.interp(x, grid, cumulative)).pvalue > 0.001


def test_a_uniform_parameter_stays_within_the_priors_edges():
    mixture = mixtures(True, spread=3.0)
    z = bend(mixture, jnp.full(2000, 9.0))
    assert np.isfinite(z).all()
    assert (np.abs(quantile(z)) <= EDGE).all()


def test_where_the_prior_is_uniform_a_single_component_is_a_truncated_normal():
    mean, scale = 1.0, 0.5
    one = Mixture.from_numbers(jnp.array([[0.0], [mean], [np.log(scale)]]), jnp.array([True]))
    s = np.array([1.3])
    z = norm.ppf(s / np.sqrt(12) + 0.5)
    inside = norm.cdf(EDGE, mean, scale) - norm.cdf(-EDGE, mean, scale)
    expected = norm.logpdf(s, mean, scale) - np.log(inside) + np.log(np.sqrt(12) * norm.pdf(z))
    np.testing.assert_allclose(log_density(one, jnp.asarray(z, jnp.float32)), expected, rtol=1e-4)
