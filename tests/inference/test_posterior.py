"""A fitted posterior: what it returns, what it refuses, and that a file gives back the same or an error."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr

import cpejax as cpe
from cpejax.inference import posterior as _posterior
from cpejax.inference.trees import to_tree
from cpejax.util.files import digest

KEY = jax.random.key(0)
SMALL = {"width": 16, "depth": 1, "hidden": 16, "components": 2}
Y = np.array([0.5, 1.0, -0.2], np.float32)


def groups(size=3, spread=1.0):
    mu = numpyro.sample("mu", dist.Normal(0.0, spread))
    with numpyro.plate("group", size):
        theta = numpyro.sample("theta", dist.HalfNormal(1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(mu + theta.sum(-1), 0.5))
    numpyro.sample("total", dist.Normal(mu, 1.0))


def fitted(program, observed, n=600, **options):
    simulations = cpe.simulate(cpe.Model(program, observed=observed), n, key=KEY)
    method = options.pop("method", cpe.CPE(**SMALL))
    training = cpe.Training(**{"max_epochs": 8, "learning_rate": 1e-2, **options})
    return cpe.fit(program, simulations, method=method, key=KEY, training=training)


@pytest.fixture(scope="module")
def posterior():
    return fitted(groups, ["y", "total"])


@pytest.fixture(scope="module")
def given():
    return {"y": Y, "total": 0.3}


@pytest.fixture(scope="module")
def tree(posterior, given):
    return posterior.sample(2000, given=given, key=KEY)


# ---- what comes out


def test_parameters_come_in_the_programs_order(no_training):
    def program():
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        a = numpyro.sample("a", dist.Normal(b, 1.0))
        numpyro.sample("y", dist.Normal(a, 1.0))

    posterior = fitted(program, ["y"])
    assert list(posterior.sample(3, given={"y": 0.5}, key=KEY)["posterior"].data_vars) == ["b", "a"]


def test_names_shapes_and_coordinates_are_the_programs(tree):
    assert set(tree.children) == {"posterior", "observed_data"}
    draws = tree["posterior"].dataset
    assert {name: x.dims for name, x in draws.items()} == {
        "mu": ("chain", "draw"),
        "theta": ("chain", "draw", "group", "theta_dim_1"),
    }
    assert dict(draws.sizes) == {"chain": 1, "draw": 2000, "group": 3, "theta_dim_1": 2}
    assert draws["group"].values.tolist() == [0, 1, 2]
    observed = tree["observed_data"].dataset
    assert observed["y"].dims == ("group",)
    np.testing.assert_array_equal(observed["y"], Y)
    assert float(observed["total"]) == np.float32(0.3)


def test_attributes_say_how_draws_were_made(tree):
    attributes = tree["posterior"].attrs
    assert attributes["acceptance_rate"] == 1.0
    assert attributes["sampling_time"] > 0
    assert attributes["key"] == [0, 0]
    assert (attributes["solver"], attributes["steps"]) == ("euler", 20)
    assert (attributes["inference_library"], attributes["method"]) == ("cpejax", "CPE")
    assert attributes["n_simulations"] == 600
    assert attributes["clipped"] == 0
    assert {"inference_library_version", "jax_version", "numpyro_version", "python_version"} <= set(attributes)


def test_the_tree_goes_to_netcdf_and_back(tree, tmp_path):
    tree.to_netcdf(tmp_path / "posterior.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "posterior.nc", engine="h5netcdf") as back:
        xr.testing.assert_equal(back["posterior"].dataset.load(), tree["posterior"].dataset)
        assert back["posterior"].attrs["acceptance_rate"] == 1.0
        assert list(back["posterior"].attrs["key"]) == [0, 0]


def test_the_key_decides(posterior, given, tree):
    again = posterior.sample(2000, given=given, key=KEY)
    other = posterior.sample(2000, given=given, key=jax.random.key(1))
    assert np.array_equal(again["posterior"]["mu"], tree["posterior"]["mu"])
    assert not np.array_equal(other["posterior"]["mu"], tree["posterior"]["mu"])


def moments(x):
    """Means and standard deviations over draws, with their standard errors."""
    n = len(x)
    sd = x.std(0)
    return np.stack([x.mean(0), sd]), np.stack(
        [sd, np.sqrt(np.maximum(((x - x.mean(0)) ** 2).var(0), 0)) / (2 * sd)]
    ) / n**0.5


def agree(a, b, errors=5):
    (m, e), (n, f) = moments(a), moments(b)
    return (np.abs(m - n) < errors * np.hypot(e, f)).all()


def test_many_observations_are_as_good_as_one_each(posterior, given, tree):
    many = {"y": np.stack([Y, Y + 2, Y - 1]), "total": np.array([0.3, 2.0, -1.0])}
    drawn = posterior.sample(2000, given=many, key=jax.random.key(3))
    assert drawn["posterior"]["theta"].dims == ("chain", "draw", "observation", "group", "theta_dim_1")
    assert drawn["observed_data"]["y"].dims == ("observation", "group")
    for i in range(3):
        one = posterior.sample(2000, given={name: x[i] for name, x in many.items()}, key=jax.random.key(4))
        for name in ("mu", "theta"):
            a, b = drawn["posterior"][name].isel(observation=i, chain=0).values, one["posterior"][name][0].values
            assert agree(a, b)
    first, second = (drawn["posterior"]["mu"].isel(observation=i, chain=0).values for i in (0, 1))
    assert not agree(first, second)  # the comparison can fail
    assert not np.isclose(np.corrcoef(first, second)[0, 1], 0, atol=1e-9)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / 2000**0.5  # each has noise of its own


def compilations(caplog, name):
    return sum(f"Finished XLA compilation of jit({name})" in r.getMessage() for r in caplog.records)


def test_another_observation_does_not_compile_again_and_chunks_change_nothing(
    posterior, given, tree, caplog, monkeypatch
):
    log_prob = posterior.log_prob(tree, given=given)
    with jax.log_compiles():
        posterior.sample(2000, given={"y": Y + 1, "total": 9.0}, key=jax.random.key(9))
        posterior.log_prob(tree, given={"y": Y + 1, "total": 9.0})
        assert compilations(caplog, "_draw") + compilations(caplog, "evaluate") == 0

        monkeypatch.setattr(_posterior, "MOST_NUMBERS", 600 * posterior.flow.numbers_per_draw())
        chunked = posterior.sample(2000, given=given, key=KEY)  # in 4 chunks of 500
        again = posterior.log_prob(tree, given=given)
        assert compilations(caplog, "_draw") == compilations(caplog, "evaluate") == 1  # what is counted exists
    assert chunked["posterior"]["theta"].shape == (1, 2000, 3, 2)
    assert len(np.unique(chunked["posterior"]["mu"])) == 2000  # no chunk twice
    for name in ("mu", "theta"):
        assert agree(chunked["posterior"][name][0].values, tree["posterior"][name][0].values)
    np.testing.assert_allclose(again, log_prob, rtol=1e-4, atol=1e-4)


def test_a_plate_may_be_called_what_we_call_an_axis(posterior):
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("observation", 2), numpyro.plate("draw", 3):
            numpyro.sample("x", dist.Normal(a, 1.0))

    other = replace(posterior, model=cpe.Model(program, observed=["x"]))
    drawn = to_tree(other, {"a": np.zeros((4, 5))}, {"x": jnp.zeros((4, 3, 2))}, True, {})
    assert drawn["posterior"]["a"].dims == ("chain", "draw", "observation")
    assert drawn["observed_data"]["x"].dims == ("observation", "draw_plate", "observation_plate")


# ---- densities


def test_densities_of_a_tree_a_dataset_and_a_dict_are_the_same(posterior, given, tree):
    log_prob = posterior.log_prob(tree, given=given)
    assert log_prob.shape == (1, 2000)
    assert np.isfinite(log_prob).all()
    data = tree["posterior"].dataset
    plain = {name: data[name].values[0] for name in ("mu", "theta")}
    for draws in (data, tree["posterior"], data.transpose("group", "draw", ...)):
        np.testing.assert_array_equal(posterior.log_prob(draws, given=given), log_prob)
    np.testing.assert_array_equal(posterior.log_prob(plain, given=given), log_prob[0])


@pytest.mark.slow
def test_the_density_is_that_of_the_draws():
    """In one dimension: its integral up to a point is the share of draws below it."""

    def program():
        a = numpyro.sample("a", dist.Gamma(2.0, 1.0))
        numpyro.sample("x", dist.Normal(a, 1.0))

    posterior = fitted(program, ["x"])
    edges = np.linspace(0, 12, 3001)
    middle = (edges[1:] + edges[:-1]) / 2
    density = np.exp(posterior.log_prob({"a": middle}, given={"x": 1.5}, steps=50))
    assert density.sum() * (edges[1] - edges[0]) == pytest.approx(1, abs=5e-3)
    drawn = np.sort(posterior.sample(20_000, given={"x": 1.5}, key=KEY, steps=50)["posterior"]["a"].values[0])
    below = np.interp(drawn, edges, np.r_[0, np.cumsum(density)] * (edges[1] - edges[0]))
    # Kolmogorov's statistic of 20,000 draws is below .0138 in 999 of 1000 cases; Euler's error is the rest.
    assert np.abs(below - (np.arange(20_000) + 0.5) / 20_000).max() < 0.02


def test_outside_the_support_the_density_is_zero(posterior, given, tree):
    data = tree["posterior"].dataset
    draws = {name: data[name].values[0].copy() for name in ("mu", "theta")}
    draws["theta"][0, 1, 0] = -0.1
    draws["theta"][1, 0, 1] = 0.0
    draws["mu"][2] = np.nan
    log_prob = posterior.log_prob(draws, given=given)
    assert np.isneginf(log_prob[:3]).all()
    assert np.isfinite(log_prob[3:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"mu": d["mu"]}, "draws have no 'theta'; they need the parameters ['mu', 'theta']"),
        (
            lambda d: {**d, "theta": d["theta"][:, :2]},
            "draws['theta'] has shape (2000, 2, 2), but draws of site 'theta' have shape (draw, 3, 2) (plate",
        ),
        (lambda d: {**d, "mu": d["mu"][:7]}, "draws['theta'] has (2000,) draws, the others (7,)"),
        (lambda d: {**d, "mu": ["a"] * 2000}, "draws['mu'] is not an array of numbers"),
    ],
)
def test_bad_draws(posterior, given, tree, change, message):
    data = tree["posterior"].dataset
    with pytest.raises(ValueError, match=re.escape(message)):
        posterior.log_prob(change({name: data[name].values[0] for name in ("mu", "theta")}), given=given)


MANY = {"y": np.stack([Y, Y + 2, Y - 1]), "total": np.array([0.3, 2.0, -1.0])}


@pytest.fixture(scope="module")
def of_many(posterior):
    return posterior.sample(20, given=MANY, key=KEY)


def test_densities_for_many_observations_are_those_of_each(posterior, of_many, monkeypatch, caplog):
    data = of_many["posterior"].dataset
    each = [
        posterior.log_prob(data.isel(observation=i), given={name: x[i] for name, x in MANY.items()}) for i in range(3)
    ]
    expected = np.stack(each, axis=-1)
    plain = {name: np.moveaxis(data[name].values[0], 1, 0) for name in ("mu", "theta")}
    for draws in (of_many, data, data.transpose("group", "observation", ...)):
        found = posterior.log_prob(draws, given=MANY)
        assert found.shape == (1, 20, 3)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(posterior.log_prob(plain, given=MANY), expected[0].T, rtol=1e-4, atol=1e-4)
    one_each = posterior.log_prob({name: x[:, 4] for name, x in plain.items()}, given=MANY)
    np.testing.assert_allclose(one_each, expected[0, 4], rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(_posterior, "MOST_NUMBERS", 2 * 7 * posterior.flow.numbers_per_draw())  # chunks of 7 draws
    np.testing.assert_allclose(posterior.log_prob(plain, given=MANY), expected[0].T, rtol=1e-4, atol=1e-4)
    with jax.log_compiles():
        posterior.log_prob(plain, given={"y": MANY["y"] + 1, "total": MANY["total"]})
    assert compilations(caplog, "_evaluate_each") <= 1  # one program for all cores, and all observations


def test_draws_and_observations_must_match(posterior, of_many, tree, given):
    data = of_many["posterior"].dataset
    plain = {name: np.moveaxis(data[name].values[0], 1, 0) for name in ("mu", "theta")}
    for draws, observed, message in (
        (tree, MANY, "for 3 observations have shape (observation, chain, draw)"),
        (of_many, given, "draws['mu'] has shape (1, 20, 3), but draws of site 'mu' have shape (chain, draw)"),
        ({**plain, "mu": np.zeros((3, 1, 2))}, MANY, "have shape (observation, draw) or (observation)"),
        ({name: x[:2] for name, x in plain.items()}, MANY, "draws['mu'] are for 2 observations, but given has 3"),
        ({**plain, "mu": plain["mu"][:, 0]}, MANY, "draws['theta'] has (3, 20) draws, the others (3,)"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            posterior.log_prob(draws, given=observed)


# ---- given parameters


def test_given_parameters_leave_the_rest_of_the_joint(posterior, given):
    """For parameters of the joint posterior, the others given these have the joint distribution again."""
    joint = posterior.sample(2000, given=given, key=KEY)["posterior"]
    mu = joint["mu"].values[0]
    many = {"y": np.broadcast_to(Y, (2000, 3)), "total": np.full(2000, 0.3), "mu": mu}
    rest = posterior.sample(1, given=many, key=jax.random.key(5))["posterior"]
    assert list(rest.data_vars) == ["theta"]
    theta, drawn = joint["theta"].values[0].reshape(2000, 6), rest["theta"].values[0, 0].reshape(2000, 6)
    assert agree(np.c_[theta, theta * mu[:, None]], np.c_[drawn, drawn * mu[:, None]])
    assert abs(np.corrcoef(theta[:, 0], mu)[0, 1]) > 0.2  # without mu it would be seen
    # The density of the rest is the joint's but for a factor that depends on what is given alone.
    some = {name: joint[name].values[0, :50] for name in ("mu", "theta")}
    at = np.full(50, 0.4, np.float32)
    of_rest = posterior.log_prob({"theta": some["theta"]}, given={**given, "mu": 0.4})
    difference = posterior.log_prob({**some, "mu": at}, given=given) - of_rest
    np.testing.assert_allclose(difference, difference[0], atol=2e-4)
    assert of_rest.std() > 0.1


def test_parameters_that_come_later_cannot_be_given_alone(posterior, given):
    with pytest.raises(
        ValueError, match=r"given has 'theta', but .* The prior of 'theta' depends on|or fit with method="
    ):
        posterior.sample(5, given={**given, "theta": np.ones((3, 2))}, key=KEY)
    with pytest.raises(ValueError, match="has all sites of the program"):
        posterior.sample(5, given={**given, "mu": 0.0, "theta": np.ones((3, 2))}, key=KEY)


def two_causes(scale=1.0):
    a = numpyro.sample("a", dist.HalfNormal(1.0))
    b = numpyro.sample("b", dist.Normal(0.0, scale))
    numpyro.sample("x", dist.Normal(a + b, 0.5))


def test_what_is_to_be_given_can_be_drawn_first(tmp_path, no_training):
    graph = cpe.Model(two_causes, observed=["x"]).graph
    assert cpe.invert(graph).order == ("b", "a")  # so it is not by chance that the other way round works
    posterior = fitted(two_causes, ["x"], method=cpe.CPE(**SMALL, first=["a"]))
    assert posterior.flow.plan.posterior.order == ("a", "b")
    drawn = posterior.sample(5, given={"x": 0.5, "a": 0.3}, key=KEY)
    assert list(drawn["posterior"].data_vars) == ["b"]
    message, way = "given has 'b', but this posterior draws ['a'] before it", "or fit with method=cpe.CPE(first=['b'])"
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*{re.escape(way)}"):
        posterior.sample(5, given={"x": 0.5, "b": 0.3}, key=KEY)
    with pytest.raises(ValueError, match=r"given\['a'\] is -1, which is outside the support of its prior"):
        posterior.sample(5, given={"x": 0.5, "a": -1.0}, key=KEY)
    posterior.save(tmp_path)
    assert cpe.load(tmp_path, two_causes).method.first == ("a",)
    for first in ("c", "x"):
        with pytest.raises(ValueError, match=rf"first names '{first}', but the parameters are \['a', 'b'\]"):
            fitted(two_causes, ["x"], method=cpe.CPE(first=[first]))
    with pytest.raises(ValueError, match="first must be a list of the names of parameters, found 'a'"):
        cpe.CPE(first="a")


@pytest.mark.slow
def test_given_parameters_of_a_normal_model():
    """`a, b ~ N(0, 1)`, `x ~ N(a + b, .5)`: given x and b, `a` is N((x - b) / 1.25, .2)."""

    def program():
        a, b = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
        numpyro.sample("x", dist.Normal(a + b, 0.5))

    options = {"method": cpe.CPE(first=["b"]), "max_epochs": 50, "learning_rate": 4e-3}
    posterior = fitted(program, ["x"], n=10_000, **options)
    for x, b in ((1.0, -0.5), (0.0, 0.8), (-1.5, -1.0)):
        a = posterior.sample(20_000, given={"x": x, "b": b}, key=KEY)["posterior"]["a"].values
        assert a.mean() == pytest.approx((x - b) / 1.25, abs=0.05)
        assert a.std() == pytest.approx(0.2**0.5, rel=0.05)
        grid = np.linspace(-2, 2, 9) * 0.2**0.5 + (x - b) / 1.25
        exact = np.asarray(dist.Normal((x - b) / 1.25, 0.2**0.5).log_prob(grid))
        np.testing.assert_allclose(posterior.log_prob({"a": grid}, given={"x": x, "b": b}), exact, atol=0.25)


# ---- the mode


@pytest.mark.slow
def test_the_mode_is_where_the_density_is_highest():
    def program():
        a = numpyro.sample("a", dist.HalfNormal(2.0))
        numpyro.sample("x", dist.Normal(a, 0.5))

    posterior = fitted(program, ["x"], max_epochs=4)
    grid = np.linspace(0.005, 5, 1000, dtype=np.float32)
    density = posterior.log_prob({"a": grid}, given={"x": 1.5})
    mode, height = posterior.map({"x": 1.5}, key=KEY, draws=50, starts=1, steps=60)
    assert set(mode) == {"a"}
    assert mode["a"].shape == ()
    assert height == pytest.approx(density.max(), abs=2e-3)
    assert mode["a"] == pytest.approx(grid[density.argmax()], abs=0.05)
    drawn = posterior.sample(50, given={"x": 1.5}, key=KEY)["posterior"]["a"].values[0]
    assert height >= posterior.log_prob({"a": drawn}, given={"x": 1.5}).max()


@pytest.mark.slow
def test_the_mode_given_parameters(posterior, given):
    mode, height = posterior.map({**given, "mu": 0.4}, key=KEY, draws=20, starts=1, steps=40)
    assert set(mode) == {"theta"}
    assert mode["theta"].shape == (3, 2)
    np.testing.assert_allclose(
        posterior.log_prob({"theta": mode["theta"][None]}, given={**given, "mu": 0.4}), height, rtol=1e-4
    )
    drawn = posterior.sample(20, given={**given, "mu": 0.4}, key=KEY)
    assert height > posterior.log_prob(drawn, given={**given, "mu": 0.4}).max() + 0.1  # it was climbed
    with pytest.raises(ValueError, match="map takes one observation"):
        posterior.map(MANY, key=KEY)


@pytest.mark.slow
def test_the_mode_of_a_normal_model():
    """`mu ~ N(0, 1)`, ten `y ~ N(mu, 1)`: the mode is the sum of the data by 11, its density that of N(., 1 / 11)."""

    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, 1.0).expand([10]).to_event(1))

    posterior = fitted(program, ["y"], n=5000, method=cpe.CPE(), max_epochs=60)
    y = np.random.default_rng(0).normal(0.7, 1.0, 10)
    mode, height = posterior.map({"y": y}, key=KEY)
    assert mode["mu"] == pytest.approx(y.sum() / 11, abs=0.25 * 11**-0.5)
    assert height == pytest.approx(0.5 * np.log(11 / (2 * np.pi)), abs=0.15)


def broken(posterior, weight=np.nan):
    """A posterior one of whose networks gives what is not a number: that of the last parameter drawn."""
    group = posterior.flow.groups[-1]
    bias = group.mixture_bias.at[-1].set(weight)
    return replace(posterior, flow=eqx.tree_at(lambda f: f.groups[-1].mixture_bias, posterior.flow, bias))


def test_draws_that_are_not_finite_are_an_error(posterior, given, monkeypatch):
    with pytest.raises(FloatingPointError, match=r"Of 100 draws some are not finite: 100 of 'theta'\. Such draws are"):
        broken(posterior).sample(100, given=given, key=KEY)
    # A single one of a single observation is enough.
    draw = _posterior.draw_on_cores

    def spoilt(*args):
        values, counted = draw(*args)
        mu = values["mu"].copy()
        mu[2, 5] = np.inf
        return {**values, "mu": mu}, counted

    monkeypatch.setattr(_posterior, "draw_on_cores", spoilt)
    many = {"y": np.stack([Y, Y, Y]), "total": np.zeros(3)}
    with pytest.raises(FloatingPointError, match=r"1 of 'mu', for 1 of 3 observations, the first of which is number 2"):
        posterior.sample(10, given=many, key=KEY)


def test_a_density_that_is_not_a_number_is_an_error(posterior, given, tree):
    with pytest.raises(FloatingPointError, match=r"log-density of 2000 of 2000 draws is not .* the first of them at"):
        broken(posterior).log_prob(tree, given=given)


# ---- bad observations


BAD = [
    ({"Y": Y, "total": 0.0}, "given['Y'] is not a data site; the data sites are ['y', 'total']."),
    (
        {"y": Y, "totl": 0.0},
        "given['totl'] is not a data site; the data sites are ['y', 'total']. Did you mean 'total'?",
    ),
    ({"y": Y}, "given has no 'total'; it needs the data sites ['y', 'total']"),
    ({}, "given has no 'y'"),
    (
        {"y": np.zeros(4), "total": 0.0},
        "given['y'] has shape (4,), but site 'y' has shape (3,) (plate 'group' of size 3)",
    ),
    ({"y": 1.0, "total": 0.0}, "given['y'] has shape (), but site 'y' has shape (3,)"),
    ({"y": np.zeros((2, 2, 3)), "total": 0.0}, "given['y'] has shape (2, 2, 3)"),
    ({"y": np.zeros((0, 3)), "total": np.zeros(0)}, "given['y'] has shape (0, 3)"),
    (
        {"y": np.zeros((2, 3)), "total": np.zeros(3)},
        "The data in given have different numbers of observations: {'y': 2, 'total': 3}",
    ),
    (
        {"y": np.zeros((2, 3)), "total": 0.0},
        "different numbers of observations: {'y': 2, 'total': None} (None: a single",
    ),
    (
        {"y": [0, np.nan, np.inf], "total": 0.0},
        "given['y'] has 2 values that are not finite in float32, the first at [1]",
    ),
    ({"y": [0.0, 1e39, 0.0], "total": 0.0}, "given['y'] has 1 values that are not finite in float32"),
    ({"y": ["1", "2", "3"], "total": 0.0}, "given['y'] is not an array of numbers: it has type <U1, found ['1', '2'"),
    ({"y": [[1, 2], 3, 4], "total": 0.0}, "given['y'] is not an array of numbers: setting an array element"),
    ({"y": [None, 1, 2], "total": 0.0}, "given['y'] is not an array of numbers: it has type object"),
    ({"y": np.ma.array(Y, mask=[0, 1, 0]), "total": 0.0}, "given['y'] has masked values"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[m[:50] for _, m in BAD])
def test_bad_observations(posterior, bad, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        posterior.sample(10, given=bad, key=KEY)


def test_good_observations_of_other_types(posterior, given):
    lists = {"y": Y.tolist(), "total": xr.DataArray(0.3)}
    arrays = {"y": jnp.asarray(Y), "total": np.float64(0.3)}
    one, other, third = (posterior.sample(2000, given=g, key=KEY)["posterior"]["mu"] for g in (given, lists, arrays))
    assert np.array_equal(one, other)
    assert np.array_equal(one, third)


@pytest.mark.parametrize("n", [0, -1, True, 2.5, "9", None])
def test_bad_numbers(unchecked, posterior, given, n):
    with pytest.raises(ValueError, match="n, the number of draws, must be a whole number of at least 1; found"):
        posterior.sample(n, given=given, key=KEY)
    if n is None:  # the default of steps
        return
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1; found"):
        posterior.sample(5, given=given, key=KEY, steps=n)
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1; found"):
        posterior.log_prob({}, given=given, steps=n)


def test_arguments_of_the_wrong_type(unchecked, posterior, given):
    with pytest.raises(TypeError, match="given must be a dict of the observed data, found ndarray"):
        posterior.sample(5, given=Y, key=KEY)
    with pytest.raises(TypeError, match=r"key must be one JAX key, as jax.random.key\(0\) makes it; found 0"):
        posterior.sample(5, given=given, key=0)
    with pytest.raises(ValueError, match="solver must be 'euler' or 'rk45', found 'heun'"):
        posterior.sample(5, given=given, key=KEY, solver="heun")


def test_options_that_a_flow_does_not_use_are_errors(unchecked, posterior, given):
    with pytest.raises(
        TypeError, match=r"step=9 is no option of draws of this .*: its options are \['solver', 'steps'\]"
    ):
        posterior.sample(5, given=given, key=KEY, step=9)
    with pytest.raises(TypeError, match=r"solver='rk45' is no option of densities .*: its options are \['steps'\]"):
        posterior.log_prob({}, given=given, solver="rk45")
    with pytest.raises(ValueError, match="steps=9 are of solver='euler'; 'rk45', the solver here, chooses its own"):
        posterior.sample(5, given=given, key=KEY, solver="rk45", steps=9)


# ---- files


@pytest.fixture
def saved(posterior, tmp_path):
    posterior.save(tmp_path / "run")
    return tmp_path / "run"


def test_loading_gives_the_same_draws(posterior, given, tree, saved):
    assert sorted(f.name for f in saved.iterdir()) == ["posterior.json", "weights.safetensors"]
    loaded = cpe.load(saved, groups)
    again = loaded.sample(2000, given=given, key=KEY)
    for name in ("mu", "theta"):
        assert np.array_equal(again["posterior"][name], tree["posterior"][name])
    np.testing.assert_array_equal(loaded.log_prob(tree, given=given), posterior.log_prob(tree, given=given))
    assert loaded.history == posterior.history
    assert loaded.settings == posterior.settings
    assert repr(loaded) == repr(posterior)


def test_files_can_be_read_by_others(saved):
    assert all(f.stat().st_mode & 0o600 == 0o600 for f in saved.iterdir())
    probe = saved / "probe"
    probe.touch()
    assert {f.stat().st_mode for f in saved.iterdir()} == {probe.stat().st_mode}  # as any file here


@pytest.mark.parametrize(("name", "flips"), [("posterior.json", 40), ("weights.safetensors", 6)])
def test_an_altered_file_is_an_error_and_never_other_numbers(saved, name, flips):
    rng = random.Random(0)
    file = saved / name
    content = file.read_bytes()
    for _ in range(flips):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        if name == "posterior.json" and damaged.split() == content.split():
            continue  # white space
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(name)):
            cpe.load(saved, groups)
    for length in (0, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"{re.escape(name)} .*(truncated|altered)"):
            cpe.load(saved, groups)


def reseal(saved, **changes):
    """Change posterior.json as someone would who knows how its seal is made."""
    path = saved / "posterior.json"
    about = {**json.loads(path.read_text()), **changes}
    about.pop("sha256")
    path.write_text(json.dumps({**about, "sha256": digest(json.dumps(about, sort_keys=True).encode())}))
    return about


@pytest.mark.parametrize(
    "options",
    [{"width": 40_000}, {"hidden": 40_000}, {"depth": 10**6}, {"components": 10**8}, {"width": 200, "depth": 200}],
)
def test_networks_larger_than_their_file_are_never_built(saved, monkeypatch, options):
    about = json.loads((saved / "posterior.json").read_text())
    reseal(saved, options={**about["options"], **options})
    monkeypatch.setattr(cpe.CPE, "build", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ValueError, match=r"stored weights, but CPE.* has at least \d+: its options were altered"):
        cpe.load(saved, groups)


def test_shapes_are_compared_before_anything_is_built(saved, monkeypatch):
    about = json.loads((saved / "posterior.json").read_text())
    monkeypatch.setattr(cpe.CPE, "build", lambda *_, **__: pytest.fail("built"))
    (shape, kind), *rest = about["structure"]
    reseal(saved, structure=[[[*shape, 10**9], kind], *rest])
    with pytest.raises(ValueError, match=r"arrays of other shapes or types than posterior\.json says"):
        cpe.load(saved, groups)


def test_a_description_that_does_not_fit_is_an_error(saved):
    about = json.loads((saved / "posterior.json").read_text())
    for heavy in ({}, {**about["description"]["heavy"], "y": [7]}, {**about["description"]["heavy"], "y": [0]}):
        reseal(saved, description={"heavy": heavy})
        with pytest.raises(ValueError, match=r"describes no networks of this program|has other networks than"):
            cpe.load(saved, groups)


def test_files_of_two_posteriors_do_not_mix(saved, posterior, tmp_path):
    flow = jax.tree.map(lambda x: x * 1.01 if eqx.is_inexact_array(x) else x, posterior.flow)
    replace(posterior, flow=flow).save(tmp_path / "other")
    (saved / "weights.safetensors").write_bytes((tmp_path / "other" / "weights.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"weights\.safetensors is missing, truncated or altered: it is not the file"):
        cpe.load(saved, groups)


def test_nothing_to_load(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.posterior\.json does not exist: .*nowhere holds no saved"):
        cpe.load(tmp_path / "nowhere", groups)
    (saved / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"weights\.safetensors is missing"):
        cpe.load(saved, groups)


@pytest.mark.parametrize("text", ["", "[]", "null", '"text"', "{}", '{"sha256": 3}', "\x00", "[" * 100_000])
def test_another_json(tmp_path, text):
    (tmp_path / "posterior.json").write_text(text)
    with pytest.raises(ValueError, match=r"posterior\.json (is truncated, altered, or not a saved|has format None)"):
        cpe.load(tmp_path, groups)


def test_a_folder_in_place_of_a_file(saved):
    (saved / "weights.safetensors").unlink()
    (saved / "weights.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"weights\.safetensors is missing"):
        cpe.load(saved, groups)
    (saved / "posterior.json").unlink()
    (saved / "posterior.json").mkdir()
    with pytest.raises(ValueError, match=r"posterior\.json is a folder, expected a file"):
        cpe.load(saved, groups)


def test_another_format(saved):
    about = json.loads((saved / "posterior.json").read_text())
    (saved / "posterior.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version of cpejax reads format 3"):
        cpe.load(saved, groups)


def other_graph():
    mu = numpyro.sample("mu", dist.Laplace(0.0, 1.0))
    with numpyro.plate("group", 3):
        theta = numpyro.sample("theta", dist.HalfNormal(1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(mu + theta.sum(-1), 0.5))
        numpyro.sample("extra", dist.Normal(theta.sum(-1), 0.5))
    numpyro.sample("total", dist.Normal(mu, 1.0))


def test_loading_with_another_program_says_what_differs(saved):
    with pytest.raises(
        ValueError, match=r"another program: .*site 'mu' has distribution Laplace, expected Normal"
    ) as caught:
        cpe.load(saved, other_graph)
    assert "site 'extra' is new" in str(caught.value)
    with pytest.raises(ValueError, match=r"plate 'group' has size 4, expected 3"):
        cpe.load(saved, cpe.Model(groups, args=(4,)))
    with pytest.raises(ValueError, match=r"another program: observed names 'y', but the program has only the sites"):
        cpe.load(saved, lambda: numpyro.sample("a", dist.Normal(0.0, 1.0)))


def test_loading_with_another_prior_is_an_error(saved):
    """The graph is the same, but what `mu` means is not."""
    with pytest.raises(ValueError, match="another program: site 'mu' has another prior now"):
        cpe.load(saved, cpe.Model(groups, kwargs={"spread": 1.1}))


# ---- embeddings


def series():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a, 1.0).expand([12, 1]).to_event(2))


def embedding(module=cpe.SetEmbedding, out=8, seed=0):
    return {"embed": {"y": module((12, 1), out=out, key=jax.random.key(seed))}, **SMALL, "width": 32}


def embedded(module):
    return fitted(series, ["y"], n=2000, max_epochs=20, learning_rate=4e-3, method=cpe.CPE(**embedding(module)))


@pytest.fixture(scope="module")
def of_a_set():
    return embedded(cpe.SetEmbedding)


def check_series(posterior):
    """Of 12 data with mean .8 the posterior is N(.8 12/13, 1/13)."""
    draws = posterior.sample(4000, given={"y": np.full((12, 1), 0.8)}, key=KEY)["posterior"]["a"]
    assert abs(float(draws.mean()) - 0.8 * 12 / 13) < 0.15
    assert abs(float(draws.std()) - 13**-0.5) < 0.08


@pytest.mark.slow
def test_an_embedding_learns_what_matters(of_a_set):
    check_series(of_a_set)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [cpe.MLPEmbedding, partial(cpe.ConvEmbedding, dims=1), cpe.RecurrentEmbedding],
    ids=["MLP", "Conv", "Recurrent"],
)
def test_every_embedding_learns_what_matters(module):
    check_series(embedded(module))


@pytest.mark.slow
def test_embeddings_are_given_again(of_a_set, tmp_path):
    of_a_set.save(tmp_path)
    with pytest.raises(ValueError, match=r"has embeddings for \['y'\], which a file cannot hold: give method=CPE"):
        cpe.load(tmp_path, series)
    with pytest.raises(ValueError, match="was made by CPE with"):
        cpe.load(tmp_path, series, method=cpe.CPE(**embedding(), members=9))
    with pytest.raises(ValueError, match="has other networks than"):
        cpe.load(tmp_path, series, method=cpe.CPE(**embedding(out=4)))
    loaded = cpe.load(tmp_path, series, method=cpe.CPE(**embedding(seed=5)))  # the weights come from the file
    given = {"y": np.full((12, 1), 0.8)}
    one, other = (p.sample(4000, given=given, key=KEY)["posterior"]["a"] for p in (of_a_set, loaded))
    assert np.array_equal(one, other)


# ---- double precision


IN_DOUBLE = """
import jax, numpy as np, numpyro, numpyro.distributions as dist
import cpejax as cpe

def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(a, 1.0))
    numpyro.sample("x", dist.Normal(b, 1.0).expand([8]).to_event(1))

model = cpe.Model(program, observed=["x"])
simulations = cpe.simulate(model, 60, key=jax.random.key(0))
given = {"x": simulations["x"][0]}
method = METHOD
post = cpe.fit(model, simulations, method=method, training=cpe.Training(max_epochs=1), key=jax.random.key(1))
draws = post.sample(4, given=given, key=jax.random.key(2))
found = post.log_prob(draws, given=given)
assert found.dtype == draws["posterior"]["a"].dtype == np.float64, found.dtype
assert np.isfinite(found).all()
post.save(FOLDER)
assert np.array_equal(cpe.load(FOLDER, model, method=method).log_prob(draws, given=given), found)
"""


@pytest.mark.parametrize(
    "method",
    [
        "cpe.CPE(depth=1, hidden=8, components=1)",  # with arrays of more than LARGE weights
        pytest.param(
            "cpe.CPE(embed={'x': cpe.ConvEmbedding((8,), 2, 4, 1, key=jax.random.key(0))})", marks=pytest.mark.slow
        ),
        pytest.param("cpe.TriangularCPE(hidden=8, width=8)", marks=pytest.mark.slow),
        pytest.param("cpe.DiscreteCPE(hidden=8, width=8)", marks=pytest.mark.slow),
        pytest.param("cpe.AIO()", marks=pytest.mark.slow),
    ],
)
def test_everything_is_in_double_precision_where_jax_is(tmp_path, method):
    text = IN_DOUBLE.replace("FOLDER", repr(str(tmp_path / "saved"))).replace("METHOD", method)
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
