"""Every task: what it says of itself, its five observations, and its simulator against its own likelihood."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax.flatten_util import ravel_pytree
from scipy.stats import kstest

from cpejax import tasks
from cpejax.tasks import two_moons
from cpejax.tasks._reference import _log_densities, _prior_draw

NAMES = tasks.names()
# (parameters, data, plates with their sizes), from appendix B of the paper and its corrections
DIMENSIONS = {
    "distractors": (1, 10, {}),
    "gaussian_mixture_1": (2, 2, {}),
    "gaussian_mixture_2": (6, 2, {}),
    "hierarchical": (9, 6, {"group": 3}),
    "hyperboloid": (2, 10, {}),
    "linear_gaussian": (10, 10, {"dim": 10}),
    "slcp": (5, 8, {"observation": 4}),
    "tree": (3, 4, {}),
    "two_moons": (2, 2, {}),
}


def pit(log_density, point, low, high, cells=400):
    """The distribution function, at `point`, of a density on [low, high] known up to a constant."""
    edges = jnp.linspace(low, high, cells + 1)
    mass = jax.nn.softmax(jax.vmap(log_density)((edges[1:] + edges[:-1]) / 2))
    return jnp.interp(point, edges, jnp.concatenate([jnp.zeros(1), jnp.cumsum(mass)]))


@cache
def simulated(name):
    """For two draws of the parameters, 20,000 data sets each, `(parameters, data)`."""
    task = tasks.get(name)

    @jax.jit
    def draw(key):
        theta = _prior_draw(task, key)
        program = numpyro.handlers.substitute(task.program, data=theta)

        def data(key):
            trace = numpyro.handlers.trace(numpyro.handlers.seed(program, key)).get_trace()
            return {name: trace[name]["value"] for name in task.observed}

        return theta, jax.vmap(data)(jax.random.split(key, 20_000))

    return [draw(jax.random.key(seed)) for seed in (0, 1)]


def test_the_nine_tasks():
    assert set(NAMES) == set(DIMENSIONS)


@pytest.mark.parametrize("name", NAMES)
def test_description(name):
    task = tasks.get(name)
    theta_dim, x_dim, plates = DIMENSIONS[name]
    assert task.name == name
    assert (task.theta_dim, task.x_dim) == (theta_dim, x_dim)
    assert task.source
    assert "~" in task.program.__doc__
    assert task.plates == plates


@pytest.mark.parametrize("name", NAMES)
def test_observations(name):
    task = tasks.get(name)
    seen = [task.observation(seed) for seed in tasks.SEEDS]
    assert all(
        {site: value.shape for site, value in x.items()} == {s: task.shapes[s] for s in task.observed} for x in seen
    )
    assert len({np.concatenate([value.ravel() for value in x.values()]).tobytes() for x in seen}) == 5
    with jax.enable_x64(True), jax.default_prng_impl("rbg"):
        again = task.observation(3)
    for site, value in again.items():
        np.testing.assert_array_equal(value, seen[3][site])


def test_observations_do_not_change():
    first = {name: next(iter(tasks.get(name).observation(0).values())).ravel()[-1] for name in NAMES}
    expected = {
        "distractors": -2.29916,
        "gaussian_mixture_1": -9.77079,
        "gaussian_mixture_2": -1.20183,
        "hierarchical": -3.37687,
        "hyperboloid": 0.70838,
        "linear_gaussian": 0.69625,
        "slcp": -3.50678,
        "tree": -0.17979,
        "two_moons": -0.09127,
    }
    assert first == pytest.approx(expected, rel=1e-4)


def test_distractors_are_observed_at_five():
    for seed in tasks.SEEDS:
        x = tasks.get("distractors").observation(seed)["x"]
        np.testing.assert_array_equal(x[:2], 5.0)
        assert np.abs(x[2:]).max() < 5


@pytest.mark.parametrize("name", NAMES)
def test_simulator_has_the_likelihood(name):
    """Each datum, given the others, is uniform under the distribution function of the program's own density."""
    task = tasks.get(name)

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None, None, None, None))
    def position(x, theta, i, low, high):
        flat, unravel = ravel_pytree(x)
        return pit(lambda value: _log_densities(task, unravel(flat.at[i].set(value)), theta)[1], flat[i], low, high)

    for theta, data in simulated(name):
        data = jax.tree.map(lambda value: value[:400], data)
        flat = np.concatenate([data[site].reshape(400, -1) for site in sorted(data)], axis=1)
        for i in range(min(task.x_dim, 4)):
            low, high = flat[:, i].min(), flat[:, i].max()
            margin = 0.5 * (high - low)
            u = position(data, theta, i, low - margin, high + margin)
            assert kstest(np.asarray(u), "uniform").pvalue > 1e-4, i


@pytest.mark.parametrize("name", [name for name in NAMES if name != "two_moons"])  # its support moves with theta
def test_likelihood_is_normalised(name):
    """`E[p(x | theta') / p(x | theta)] = 1` over x simulated at theta: no factor of theta is missing."""
    task = tasks.get(name)
    theta, data = simulated(name)[0]
    other = jax.tree.map(lambda value: 0.97 * value + 0.01, theta)
    log_likelihood = jax.jit(jax.vmap(lambda x, draw: _log_densities(task, x, draw)[1], in_axes=(0, None)))
    ratio = np.exp(np.asarray(log_likelihood(data, other) - log_likelihood(data, theta), float))
    assert ratio.std() > 1e-3  # the two differ
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(len(ratio))


def test_crescent_integrates_to_one():
    axis = jnp.linspace(-0.2, 0.2, 2001)
    grid = jnp.stack(jnp.meshgrid(axis, axis), axis=-1)
    density = jnp.exp(two_moons.Crescent(jnp.zeros(2)).log_prob(grid))
    assert float(density.sum() * (axis[1] - axis[0]) ** 2) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_ravel_keeps_the_order_of_the_program(name):
    task = tasks.get(name)
    draws = task.exact(task.observation(0), 7, np.random.default_rng(0))
    flat = task.ravel(draws)
    assert flat.shape == (7, task.theta_dim)
    first = draws[task.parameters[0]].reshape(7, -1)
    np.testing.assert_array_equal(flat[:, : first.shape[1]], first)
    with pytest.raises(ValueError, match="no draws of"):
        task.ravel({})


def test_errors():
    with pytest.raises(ValueError, match=r"no task 'moons': the tasks are distractors, .*docs/tasks.md"):
        tasks.get("moons")
    for seed in (-1, True):
        with pytest.raises(ValueError, match="a seed is an integer from 0 on"):
            tasks.get("tree").observation(seed)
