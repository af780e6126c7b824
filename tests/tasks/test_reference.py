"""References: each exact sampler against the program's own density, two samplers against each other, the cache."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from arviz_stats.base.array import array_stats
from scipy.stats import ks_2samp, kstest

from cpejax import metrics, tasks
from cpejax.tasks import Task, _cache, _reference, gaussian_mixture_2
from cpejax.tasks._exact import grid_draws, rejection
from cpejax.tasks._reference import _log_densities, reference

NAMES = tasks.names()


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CPEJAX_CACHE", str(tmp_path / "cache"))


def conjugate():
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.sample("x", dist.Normal(theta, 1.0))


def conjugate_draws(given, n, rng):
    return {"theta": rng.normal(given["x"] / 2, np.sqrt(0.5), n)}


TOY = Task(name="toy", program=conjugate, observed=("x",), source="a textbook", exact=conjugate_draws, how="conjugate")


# ------------------------------------------------------------------------------------------------------- exact samplers


@pytest.mark.parametrize("name", NAMES)
def test_exact_draws_have_the_posterior_density(name):
    """Each parameter, given the others, is uniform under the distribution function of the program's joint density."""
    task = tasks.get(name)
    n = 300

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None, None, None, None))
    def position(flat, data, i, low, high):
        edges = jnp.linspace(low, high, 801)
        middle = (edges[1:] + edges[:-1]) / 2
        log_density = jax.vmap(lambda value: sum(_log_densities(task, data, split(flat.at[i].set(value)))))(middle)
        mass = jnp.concatenate([jnp.zeros(1), jnp.cumsum(jax.nn.softmax(log_density))])
        return jnp.interp(flat[i], edges, mass)

    def split(flat):
        out, start = {}, 0
        for site in task.parameters:
            size = int(np.prod(task.shapes[site]))
            out[site] = flat[start : start + size].reshape(task.shapes[site])
            start += size
        return out

    for seed in (1, 2):
        data = task.observation(seed)
        flat = task.ravel(task.exact(data, n, np.random.default_rng(seed)))
        for i in range(min(task.theta_dim, 5)):
            low, high = flat[:, i].min(), flat[:, i].max()
            margin = 0.3 * (high - low)
            u = np.asarray(position(jnp.asarray(flat, jnp.float32), data, i, low - margin, high + margin))
            assert kstest(u, "uniform").pvalue > 1e-4, (seed, i)


def test_slcp_is_symmetric_in_the_signs():
    task = tasks.get("slcp")
    data = task.observation(0)
    theta = jnp.array([0.3, -1.0, 1.2, 0.7, 0.4])
    values = [
        sum(_log_densities(task, data, {"theta": theta * jnp.array([1.0, 1.0, a, b, 1.0])}))
        for a in (-1, 1)
        for b in (-1, 1)
    ]
    np.testing.assert_allclose(values, values[0], rtol=1e-6)
    draws = task.exact(data, 20_000, np.random.default_rng(0))["theta"]
    quadrant = 2 * (draws[:, 2] > 0) + (draws[:, 3] > 0)
    np.testing.assert_allclose(np.bincount(quadrant) / 20_000, 0.25, atol=4 * np.sqrt(3 / 16 / 20_000))


def test_grid_draws_are_the_density():
    def log_density(theta):  # cells as wide as the narrower mode: the grid alone would be visibly wrong
        z = theta[:, 0]
        return np.logaddexp(-0.5 * (z - 1.03) ** 2 / 0.1**2 - np.log(0.1), -0.5 * (z + 1) ** 2)

    draws = grid_draws(log_density, [(-6.0, 6.0)], 120, 20_000, np.random.default_rng(0))[:, 0]
    rng = np.random.default_rng(1)
    narrow = rng.uniform(size=20_000) < 0.5
    assert ks_2samp(draws, np.where(narrow, rng.normal(1.03, 0.1, 20_000), rng.normal(-1, 1, 20_000))).pvalue > 1e-3


def test_an_impossible_observation_is_an_error():
    with pytest.raises(ValueError, match="the observation is all but impossible under the model"):
        tasks.get("two_moons").exact({"x": np.array([9.0, 9.0])}, 10, np.random.default_rng(0))
    with pytest.raises(ValueError, match="only 0 of 5 posterior draws"):
        rejection(lambda m: (np.zeros((m, 1)), np.zeros(m)), 5, np.random.default_rng(0), most=1000)


# ------------------------------------------------------------------------------------------------------------ reference


def test_reference_is_a_datatree_with_diagnostics():
    draws = reference("hierarchical", 0)
    assert isinstance(draws, xr.DataTree)
    assert {name: value.shape for name, value in draws.posterior.data_vars.items()} == {
        "gamma": (10, 2500, 2),
        "sigma": (10, 2500),
        "beta": (10, 2500, 3, 2),
    }
    np.testing.assert_array_equal(draws.observed_data["x"], tasks.get("hierarchical").observation(0)["x"])
    for attributes in (draws.attrs, draws.posterior.attrs):
        assert attributes["sampler"] == "exact"
        assert attributes["rhat"] < 1.01
        assert min(attributes["ess_bulk"], attributes["ess_tail"]) > 15_000


@pytest.mark.parametrize("sampler", [pytest.param("slice", marks=pytest.mark.slow), "rejection"])
def test_samplers_agree_where_the_posterior_is_known(sampler):
    draws = reference(TOY, given={"x": 1.0}, sampler=sampler)
    assert draws.attrs["rhat"] <= 1.01
    theta = draws.posterior["theta"].values.ravel()
    thinned = theta[::10] if sampler == "slice" else theta
    assert kstest(thinned, "norm", args=(0.5, np.sqrt(0.5))).pvalue > 1e-3


def test_slice_sampling_stays_inside_the_support(monkeypatch):
    """A uniform that is exactly 0 puts the slice's level at minus infinity: still no point without density."""

    def program():
        theta = numpyro.sample("theta", dist.Uniform(-1.0, 1.0))
        numpyro.sample("x", dist.Normal(theta, 1.0))

    task = Task(name="bounded", program=program, observed=("x",), source="here")
    uniform = jax.random.uniform

    def zero_at_times(key, *args, **kwargs):
        u = uniform(key, *args, **kwargs)
        return jnp.where(u < 0.05, 0.0, u)

    monkeypatch.setattr(jax.random, "uniform", zero_at_times)
    monkeypatch.setattr(_reference, "DRAWS", 200)
    monkeypatch.setattr(_reference, "WARMUP", 0)
    theta = _reference._slice_draws(task, {"x": np.array(0.0)})["theta"]
    assert np.abs(theta).max() <= 1


def test_given_is_the_same_as_its_seed():
    task = tasks.get("tree")
    by_seed, by_data = reference(task, 1), reference(task, given=task.observation(1))
    xr.testing.assert_identical(by_seed.posterior.to_dataset(), by_data.posterior.to_dataset())


def test_a_task_without_exact_draws_uses_the_slice_sampler(monkeypatch):
    monkeypatch.setitem(_reference.SAMPLERS, "slice", _reference._rejection_draws)
    assert reference(replace(TOY, exact=None), given={"x": 0.0}).attrs["sampler"] == "slice"


def test_errors():
    with pytest.raises(ValueError, match=r"either the seed of an observation or given="):
        reference("tree")
    with pytest.raises(ValueError, match=r"got seed=0 and given=\['x1'\]"):
        reference("tree", 0, given={"x1": 0.0})
    with pytest.raises(ValueError, match=r"given has the sites \['y'\], but task 'slcp' has data \['x'\]"):
        reference("slcp", given={"y": np.zeros((4, 2))})
    with pytest.raises(ValueError, match=r"given\['x'\] has shape \(8,\), but site 'x' has shape \(4, 2\)"):
        reference("slcp", given={"x": np.zeros(8)})
    with pytest.raises(ValueError, match=r"given\['x'\] has dtype <U1: expected real numbers"):
        reference("two_moons", given={"x": np.array(["a", "b"])})
    with pytest.raises(ValueError, match="NaN"):
        reference("two_moons", given={"x": np.array([np.nan, 0.0])})
    with pytest.raises(ValueError, match=r"sampler='nuts'\): expected one of exact, slice, rejection"):
        reference("two_moons", 0, sampler="nuts")
    with pytest.raises(ValueError, match="no exact sampler: use sampler='slice'"):
        reference(replace(TOY, exact=None), given={"x": 0.0}, sampler="exact")


def test_rejection_gives_up(monkeypatch):
    monkeypatch.setattr(_reference, "MOST", 1)
    with pytest.raises(ValueError, match="too narrow for sampler='rejection'"):
        reference("two_moons", 1, sampler="rejection")


# ---------------------------------------------------------------------------------------------------------------- cache


def files(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.*"))


def test_cache_is_read(tmp_path, monkeypatch):
    first = reference(TOY, given={"x": 1.0})
    assert len(files(tmp_path)) == 1
    monkeypatch.setitem(_reference.SAMPLERS, "exact", None)  # would fail
    second = reference(TOY, given={"x": 1.0})
    xr.testing.assert_identical(first.posterior.to_dataset(), second.posterior.to_dataset())
    assert second.attrs == first.attrs
    with pytest.raises(TypeError):
        reference(TOY, given={"x": 1.5})
    with pytest.raises(TypeError):
        reference(TOY, given={"x": 1.0}, cache=False)


def test_cache_knows_the_model_by_content():
    def wider():
        theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
        numpyro.sample("x", dist.Normal(theta, 1.0))

    def same():
        mean = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(mean, 1.0))

    path = partial(_reference._path, data={"x": np.array(1.0)}, sampler="exact")
    assert path(TOY) == path(replace(TOY, program=same))
    assert path(TOY) != path(replace(TOY, program=wider))
    assert path(TOY) != _reference._path(TOY, {"x": np.array(1.0)}, "slice")


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def half(self, path, **kwargs):
        Path(path).write_bytes(b"\x89HDF half a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(xr.DataTree, "to_netcdf", half)
        with pytest.raises(KeyboardInterrupt):
            reference(TOY, given={"x": 1.0})
    assert files(tmp_path) == []
    reference(TOY, given={"x": 1.0})
    assert [path.suffix for path in files(tmp_path)] == [".nc"]


@pytest.mark.parametrize("content", [b"", b"not HDF5", "cut"])
def test_a_damaged_file_is_replaced(tmp_path, content):
    first = reference(TOY, given={"x": 1.0})
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == "cut" else content)
    with pytest.warns(UserWarning, match="cannot be read .* drawing this reference again"):
        second = reference(TOY, given={"x": 1.0})
    xr.testing.assert_equal(first.posterior.to_dataset(), second.posterior.to_dataset())
    assert reference(TOY, given={"x": 1.0}).attrs == second.attrs


def test_a_sampler_without_source_is_not_cached(tmp_path):
    scope = {"__name__": "nowhere", "np": np}
    exec("def draws(given, n, rng):\n    return {'theta': rng.normal(given['x'] / 2, np.sqrt(.5), n)}", scope)
    reference(replace(TOY, exact=scope["draws"]), given={"x": 1.0})
    assert files(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the cache has other places")
def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("CPEJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _cache.cache_directory() == tmp_path / "cpejax"
    monkeypatch.setenv("CPEJAX_CACHE", str(tmp_path / "mine"))
    assert _cache.cache_directory() == tmp_path / "mine"


# ----------------------------------------------------------------------------------------------------------- agreement

SECOND = {
    "distractors": "rejection",
    "gaussian_mixture_1": "rejection",
    "gaussian_mixture_2": "rejection",
    "hierarchical": "slice",
    "hyperboloid": "rejection",
    "linear_gaussian": "slice",
    "slcp": "slice",
    "tree": "rejection",
    "two_moons": "rejection",
}


def modes(name, theta):
    """Which mode each draw belongs to."""
    if name == "two_moons":
        return theta.sum(1) > 0
    if name == "distractors":
        return theta[:, 0] > 0
    if name in ("hyperboloid", "tree"):
        return 2 * (theta[:, -2] > 0) + (theta[:, -1] > 0)
    if name == "gaussian_mixture_2":
        x = tasks.get(name).observation(0)["x"]
        gap = x - theta.reshape(-1, 3, 2)
        precision = np.linalg.inv(gaussian_mixture_2.COVARIANCE)
        return np.argmin(np.einsum("nki,kij,nkj->nk", gap, precision, gap), axis=1)
    return np.zeros(len(theta), int)


@pytest.mark.slow
@pytest.mark.parametrize("seed", tasks.SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_two_samplers_agree(name, seed):
    task = tasks.get(name)
    trees = [reference(task, seed, sampler=sampler) for sampler in ("exact", SECOND[name])]
    draws = [
        task.ravel({k: v.values.reshape(25_000, -1) for k, v in tree.posterior.data_vars.items()}) for tree in trees
    ]
    if name == "slcp":  # the four sign-symmetric modes as one: chains do not jump between them
        draws = [np.concatenate([x[:, :2], np.abs(x[:, 2:4]), x[:, 4:]], axis=1) for x in draws]
    for x in draws:
        rhat = array_stats.rhat(x.reshape(10, 2500, -1), chain_axis=0, draw_axis=1, method="rank")
        assert np.max(rhat) <= 1.01
    rng = np.random.default_rng(0)
    one, two = (x[rng.permutation(25_000)[:10_000]] for x in draws)
    assert metrics.c2st(one, two) <= 0.52
    if trees[1].attrs["sampler"] == "rejection":
        weights = [np.bincount(modes(name, x), minlength=4) / 25_000 for x in draws]
        spread = np.sqrt(2 * weights[0] * (1 - weights[0]) / 25_000)
        assert np.all(np.abs(weights[0] - weights[1]) <= 4 * spread + 1e-9), weights
