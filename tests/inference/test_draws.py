"""Draws in the program's own terms: names of axes, deterministic sites, masked data, data beyond float32's digits."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import cpejax as cpe
from cpejax.inference import trees
from cpejax.inference.given import check_draws
from cpejax.inference.rows import check_simulations
from cpejax.inference.trees import deterministics
from cpejax.program.tracing import Centred, run
from cpejax.runs.result_files import read_simulations, write_arrays
from cpejax.runs.summary import summarise

KEY = jax.random.key(0)
QUICK = {"solver": "euler", "steps": 2, "key": KEY}


def untrained(program, n=50):
    simulations = cpe.simulate(program, n, key=KEY)
    method = cpe.FMPE()
    flow = method.build(program, simulations.graph, simulations, key=KEY)
    return cpe.Posterior(flow, simulations.model, method, cpe.Training(), cpe.History(), n)


# ---- names


def named():
    g = numpyro.sample("g", dist.Normal(0.0, 1.0))  # as a plate that it is not in
    file = numpyro.sample("file", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("file_dim_0", dist.Normal(g, 1.0))
    with numpyro.plate("observation", 3):
        b = numpyro.sample("b", dist.Normal(g, 1.0))
        numpyro.deterministic("twice", 2 * b)
    with numpyro.plate("g", 4):
        numpyro.sample("allow_pickle", dist.Normal(g + file.sum() + b.sum(), 1.0), obs=jnp.zeros(4))


def test_names_of_axes_give_way_to_those_of_sites(tmp_path):
    posterior = untrained(named)
    one = posterior.sample(5, {"allow_pickle": np.zeros(4)}, **QUICK)
    dims = {name: x.dims[2:] for name, x in one["posterior"].dataset.data_vars.items()}
    assert dims == {
        "g": (),
        "file": ("file_dim_0_",),
        "file_dim_0": (),
        "b": ("observation_plate",),
        "twice": ("observation_plate",),
    }
    assert one["observed_data"]["allow_pickle"].dims == ("g_plate",)
    assert len(np.unique(one["posterior"]["g"])) == 5
    many = posterior.sample(5, {"allow_pickle": np.zeros((2, 4))}, **QUICK)
    assert many["posterior"]["b"].dims == ("chain", "draw", "observation", "observation_plate")
    assert many["posterior"]["g"].dims == ("chain", "draw", "observation")
    many.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    values, _ = check_draws(posterior, one, {"allow_pickle"})
    assert list(values) == ["g", "file", "file_dim_0", "b"]  # what log_prob reads
    table = summarise(one, posterior.graph)
    np.testing.assert_allclose(table.loc["twice[1]", "mean"], 2 * table.loc["b[1]", "mean"], rtol=1e-5)


def test_simulations_of_any_name_go_through_a_file(tmp_path):
    simulations = cpe.simulate(named, 20, key=KEY)
    for name in ("one.npz", "two.npz"):
        write_arrays(tmp_path / name, simulations)
    again = read_simulations(tmp_path / "one.npz", simulations.graph)
    assert list(again) == list(simulations)
    assert all(np.array_equal(again[name], x) for name, x in simulations.items())
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


# ---- deterministic sites


def schools():
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfNormal(5.0))
    with numpyro.plate("school", 3):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        theta = numpyro.deterministic("theta", mu + tau * z)
        y = numpyro.sample("y", dist.Normal(theta, 1.0), obs=jnp.zeros(3))
        numpyro.deterministic("error", y - theta)
        numpyro.deterministic("pair", jnp.stack([theta, y], -1))


def test_deterministic_sites_are_drawn(monkeypatch):
    posterior = untrained(schools)
    y = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for given in (y[0], y):
        tree = posterior.sample(7, {"y": given}, **QUICK)
        found = tree["posterior"].dataset
        assert list(found.data_vars) == ["mu", "tau", "z", "theta", "error", "pair"]
        theta = found["mu"] + found["tau"] * found["z"]
        assert found["theta"].dims == theta.dims
        np.testing.assert_allclose(found["theta"], theta, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            found["error"], (tree["observed_data"]["y"] - theta).transpose(*theta.dims), rtol=1e-4, atol=1e-4
        )
        assert found["pair"].shape == (*theta.shape, 2)
    monkeypatch.setattr(trees, "MOST_NUMBERS", 4 * 20)  # in chunks, the last one padded
    again = deterministics(
        posterior, {name: np.moveaxis(found[name].values[0], 0, 1) for name in ("mu", "tau", "z")}, {"y": y}
    )
    np.testing.assert_allclose(np.moveaxis(again["error"], 1, 0), found["error"].values[0], rtol=1e-5, atol=1e-5)


def test_fit_takes_deterministic_sites_and_reads_none(unchecked):
    simulations = cpe.simulate(schools, 50, key=KEY)
    rows = check_simulations(simulations, simulations.graph)
    assert list(rows) == ["mu", "tau", "z", "y"]
    with pytest.raises(ValueError, match="have the sites \\['other'\\]"):
        check_simulations({**simulations, "other": np.zeros(50)}, simulations.graph)


# ---- masked data


def masked():
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
    with numpyro.plate("i", 4), handlers.mask(mask=jnp.array([True, True, False, False])):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=jnp.zeros(4))


def test_masked_data_may_be_anything_and_change_nothing():
    posterior = untrained(masked)
    one, other = (
        posterior.sample(5, {"y": np.array([1.0, 2.0, *rest])}, **QUICK) for rest in ((0.0, 0.0), (np.nan, 1e30))
    )
    assert np.array_equal(one["posterior"]["mu"], other["posterior"]["mu"])
    assert np.array_equal(other["observed_data"]["y"], [1.0, 2.0, np.nan, np.nan], equal_nan=True)
    draws = {"mu": np.zeros(3)}
    densities = [posterior.log_prob(draws, {"y": np.array([1.0, 2.0, 3.0, x])}, steps=2) for x in (0.0, np.inf)]
    assert np.array_equal(*densities)
    with pytest.raises(ValueError, match="1 values that are not finite"):
        posterior.sample(5, {"y": np.array([np.nan, 2.0, np.nan, 3.0])}, **QUICK)
    rows = {"mu": np.zeros(20), "y": np.full((20, 4), 7.0)}
    assert np.array_equal(check_simulations(rows, posterior.graph)["y"][0], [7, 7, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("in_plate", [False, True])
def test_masked_data_have_the_exact_posterior(in_plate):
    """Two of four observations: of the mean, or of four means with N(0, 1) priors around it."""
    kept = jnp.array([True, True, False, False])

    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
        with numpyro.plate("i", 4):
            theta = numpyro.sample("theta", dist.Normal(mu, 1.0)) if in_plate else mu
            with handlers.mask(mask=kept):
                numpyro.sample("y", dist.Normal(theta, 1.0), obs=jnp.zeros(4))

    simulations = cpe.simulate(program, 10_000, key=KEY)
    posterior = cpe.fit(program, simulations, key=KEY)
    y = np.array([2.0, 4.0, np.nan, -9.0])
    found = posterior.sample(10_000, {"y": y}, key=KEY)["posterior"].dataset
    variance = 2.0 if in_plate else 1.0
    precision = 2 / variance + 1 / 9
    mean, sd = 6 / variance / precision, precision**-0.5
    assert abs(found["mu"].mean() - mean) < 0.1 * sd
    assert abs(found["mu"].std() / sd - 1) < 0.1
    if in_plate:  # what is not observed has its prior, given mu
        rest = (found["theta"] - found["mu"])[..., 2:]
        assert abs(rest.mean()) < 0.1
        assert abs(rest.std() - 1) < 0.1


# ---- data whose digits float32 does not hold


def far(shift):
    def simulator(rng, mu):
        return np.array([shift, 0.0]) + mu + 0.1 * rng.normal(size=2)

    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(simulator, mu, host=True, event_shape=(2,)))

    return program


def test_data_far_from_zero_are_as_good_as_others(tmp_path):
    draws = []
    for shift in (0.0, 1e9):
        simulations = cpe.simulate(far(shift), 200, key=KEY)
        posterior = cpe.fit(
            far(shift), simulations, key=KEY, method=cpe.FMPE(), training=cpe.Training(max_epochs=3, validation=0.2)
        )
        assert list(posterior.offset) == (["y"] if shift else [])
        y = np.array([[shift, 0.0]]) + np.array([[1.0, 1.1], [-0.5, -0.4]])
        tree = posterior.sample(20, {"y": y}, **QUICK)
        np.testing.assert_allclose(tree["observed_data"]["y"], y, atol=1e-6, rtol=0)
        draws.append(tree["posterior"]["mu"].values)
    np.testing.assert_allclose(*draws, atol=2e-3)
    assert abs(np.diff(draws[1].mean((0, 1)))) > 0.05  # they depend on the data
    posterior.save(tmp_path)
    again = cpe.load(tmp_path, far(1e9)).sample(20, {"y": y}, **QUICK)
    assert np.array_equal(again["posterior"]["mu"], draws[1])
    with pytest.raises(ValueError, match=r"given\['y'\] is in float32, which has steps of 64 there: too wide.*float64"):
        posterior.sample(20, {"y": y.astype(np.float32)}, **QUICK)


def test_the_program_reads_the_whole_values():
    def program():
        y = numpyro.sample("y", dist.Normal(0.0, 1.0))
        return y, numpyro.sample("z", dist.Normal(y, 1e-9))

    seen = {}
    y, z = run(Centred(program, {"y": np.array(5.0)}), {"y": 1.0}, lambda name, msg: seen.update({name: msg["value"]}))
    assert y == 6.0
    assert abs(z - 6.0) < 1e-6
    assert seen["y"] == 1.0
