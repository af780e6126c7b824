"""The mixtures that straighten coordinates: monotone maps, their inverses, their densities."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest, norm

from cpejax.flows.ancestral.mixture import EDGE, Mixture, linear, quantile

bend = jax.jit(lambda mixture, w: mixture.bend(w))
straighten = jax.jit(lambda mixture, z: mixture.straighten(linear(z, mixture.uniform)))
log_density = jax.jit(lambda mixture, z: mixture.log_density(z, linear(z, mixture.uniform)))


def mixtures(uniform, rows=2000, spread=1.0):
    outputs = spread * jax.random.normal(jax.random.key(0), (rows, 26))
    return Mixture.from_numbers(outputs.T, jnp.full((1,), uniform))


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
    one = Mixture.from_numbers(jnp.sin(3.0 * jnp.arange(26.0))[:, None], jnp.full((1,), uniform))
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


OUTPUTS = pytest.mark.parametrize("outputs", [24, 26], ids=["each for itself", "with a common scale"])


def any_outputs(outputs, rows, seed=0):
    """Outputs of networks of every magnitude that float32 has, half of them below 30."""
    rng = np.random.default_rng(seed)
    small, large = 10.0 ** rng.uniform(-2, 1.5, rows), 10.0 ** rng.uniform(1.5, 38, rows)
    scale = np.where(rng.uniform(size=rows) < 0.5, small, large)
    return jnp.asarray(np.clip(scale * rng.normal(size=(outputs, rows)), -3e38, 3e38), jnp.float32)


@OUTPUTS
@pytest.mark.parametrize("uniform", [False, True])
def test_every_output_of_a_network_is_a_distribution(uniform, outputs):
    """The density integrates to one, on a grid that is as fine as each component."""
    mixture = Mixture.from_numbers(any_outputs(outputs, 300), jnp.full((1,), uniform))
    means, scales = np.asarray(mixture.means, float), np.exp(np.asarray(mixture.log_scales, float))
    grid = (means[:, None] + scales[:, None] * np.linspace(-8, 8, 1601)[:, None]).reshape(-1, 300)
    if uniform:
        near = EDGE - np.concatenate([[0.0], np.geomspace(1e-6, EDGE, 2000)])
        near = np.repeat(np.concatenate([-near, near])[:, None], 300, axis=1)
        grid = np.concatenate([np.clip(grid, -EDGE, EDGE), near])
    grid = np.sort(grid.astype(np.float32), axis=0)
    log_f = jax.jit(jax.vmap(lambda s: mixture.log_density(jnp.zeros_like(s), s)))(grid)
    factor = np.sqrt(12) * norm.pdf(0) if uniform else 1.0  # from the density of z, at 0, to that of s
    f = np.exp(np.asarray(log_f, float)) / factor
    integral = (0.5 * (f[1:] + f[:-1]) * np.diff(grid.astype(float), axis=0)).sum(0)
    assert np.abs(integral - 1).max() < 1e-3


@OUTPUTS
@pytest.mark.parametrize("uniform", [False, True])
def test_bend_inverts_straighten_for_every_output_of_a_network(uniform, outputs):
    mixture = Mixture.from_numbers(any_outputs(outputs, 300), jnp.full((1,), uniform))
    w = jnp.asarray(np.random.default_rng(1).normal(size=(50, 300)), jnp.float32)
    z = jax.vmap(mixture.bend)(w)
    assert np.isfinite(z).all()
    error = np.abs(np.asarray(jax.vmap(lambda z: mixture.straighten(linear(z, mixture.uniform)))(z) - w))
    resolved = np.abs(np.asarray(z)) < 4.5 if uniform else np.ones_like(error, bool)  # z = 5 is 3e-7 from an edge
    assert np.quantile(error, 0.99) < 0.01
    assert error[resolved].max() < 0.05


@OUTPUTS
@pytest.mark.parametrize("uniform", [False, True])
def test_gradients_are_finite_for_every_output_of_a_network(uniform, outputs):
    numbers = any_outputs(outputs, 300)

    def total(numbers, s):
        mixture = Mixture.from_numbers(numbers, jnp.full((1,), uniform))
        return mixture.log_density(jnp.zeros_like(s), s).sum()

    for s in (0.0, 1.7, -EDGE):
        assert np.isfinite(jax.jit(jax.grad(total))(numbers, jnp.full(300, s))).all()


def test_the_mass_between_coordinates_is_that_of_the_distribution():
    mixture = mixtures(False, rows=200)
    edges = jnp.linspace(-4.0, 4.0, 9)
    ends = [-jnp.inf, *edges, jnp.inf]
    masses = [np.exp(mixture.log_mass(*(jnp.full(200, x) for x in pair))) for pair in itertools.pairwise(ends)]
    np.testing.assert_allclose(np.sum(masses, axis=0), 1.0, atol=1e-5)
    below = norm.cdf(np.asarray(straighten(mixture, jnp.full(200, edges[3]))))
    np.testing.assert_allclose(np.sum(masses[:4], axis=0), below, atol=1e-5)


def test_a_common_location_and_scale_move_all_components():
    numbers = jnp.zeros((26, 1)).at[0].set(0.7).at[1].set(-4.0)
    narrow, wide = (Mixture.from_numbers(x, jnp.array([False])) for x in (numbers, jnp.zeros((26, 1))))
    np.testing.assert_allclose(narrow.means, 0.7 + np.exp(-4.0) * np.asarray(wide.means), rtol=1e-5)
    np.testing.assert_allclose(narrow.log_scales, np.asarray(wide.log_scales) - 4.0, rtol=1e-5)
