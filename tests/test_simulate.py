"""Simulations: the program's own law and shapes, on the device and on the host, and what is said of bad ones."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import cpejax as cpe
from cpejax import _simulate

KEY = jax.random.key(0)


def groups(size=3, spread=2.0):
    mu = numpyro.sample("mu", dist.Normal(0.0, spread))
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("group", size):
        theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
        numpyro.sample("count", dist.Geometric(jax.nn.sigmoid(0.1 * theta)), obs=jnp.full(size, 7))
        numpyro.sample("y", dist.Normal(jnp.stack([theta, theta], -1) * weights, 0.1).to_event(1))


@pytest.fixture(scope="module")
def simulations():
    return cpe.simulate(groups, 2000, observed=["y", "count"], key=KEY)


def test_shapes_are_the_programs_own(simulations):
    assert {name: x.shape for name, x in simulations.items()} == {
        "mu": (2000,),
        "weights": (2000, 2),
        "theta": (2000, 3),
        "count": (2000, 3),
        "y": (2000, 3, 2),
    }
    assert simulations.n == 2000
    assert simulations.dropped == 0
    assert simulations.observed == ("count", "y")


def test_draws_have_the_programs_law(simulations):
    assert stats.kstest(simulations["mu"] / 2, "norm").pvalue > 1e-3
    assert stats.kstest((simulations["theta"] - simulations["mu"][:, None]).ravel(), "norm").pvalue > 1e-3
    mean = simulations["theta"][..., None] * simulations["weights"][:, None]
    assert stats.kstest(((simulations["y"] - mean) / 0.1).ravel(), "norm").pvalue > 1e-3


def test_data_with_obs_are_simulated_anew(simulations):
    assert len(np.unique(simulations["count"])) > 3
    assert (simulations["count"] != 7).mean() > 0.9


def test_arguments_go_to_the_program():
    wide = cpe.simulate(groups, 500, 5, observed=["y", "count"], key=KEY, spread=100.0)
    assert wide["theta"].shape == (500, 5)
    assert stats.kstest(wide["mu"] / 100, "norm").pvalue > 1e-3


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_the_key_decides_and_chunks_do_not(simulations, monkeypatch):
    other = cpe.simulate(groups, 2000, observed=["y", "count"], key=jax.random.key(1))
    assert not same(simulations, other)
    monkeypatch.setattr(_simulate, "MOST_NUMBERS", 15 * 300)  # 7 chunks, the last padded
    assert same(simulations, cpe.simulate(groups, 2000, observed=["y", "count"], key=KEY))


def test_old_keys_are_as_good(unchecked):
    program = fails_below(0.0)  # compiled in no time
    raw = jax.random.PRNGKey(0)
    one, other, third = (
        cpe.simulate(program, 20, observed=["fine", "y"], key=key) for key in (KEY, raw, np.asarray(raw))
    )
    assert same(one, other)
    assert same(one, third)


# ---- simulators on the host


def host(simulator, **options):
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("i", 2):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
            numpyro.sample("y", cpe.Simulator(simulator, a, b, host=True, **options))

    return program


def test_a_host_simulator_is_called_once_for_each_row():
    calls = []

    def simulator(rng, a, b):
        calls.append((float(a), float(b)))
        return a + b + 0.01 * rng.normal()

    drawn = cpe.simulate(host(simulator), 103, key=KEY)
    noise = (drawn["y"] - drawn["a"][:, None] - drawn["b"]) / 0.01
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3  # each row has its own generator
    # 103 simulations in 35 chunks of 3, of which the last is padded by 2, for a plate of 2.
    assert len(calls) == 2 * 105
    assert len(set(calls)) == 2 * 103
    assert same(drawn, cpe.simulate(host(simulator), 103, key=KEY))
    assert not same(drawn, cpe.simulate(host(simulator), 103, key=jax.random.key(1)))


def test_a_vectorized_host_simulator_gets_all_rows_of_a_chunk():
    sizes = []

    def simulator(rng, a, b):
        sizes.append(len(a))
        return np.stack([a + b, rng.normal(size=len(a))], axis=1)

    drawn = cpe.simulate(host(simulator, vectorized=True, event_shape=(2,)), 200, key=KEY)
    np.testing.assert_allclose(drawn["y"][..., 0], drawn["a"][:, None] + drawn["b"], rtol=1e-6)
    assert stats.kstest(drawn["y"][..., 1].ravel(), "norm").pvalue > 1e-3
    assert sizes == [8] * 50  # 4 simulations of a plate of 2


def test_progress_is_shown_when_asked_for(capsys):
    program = host(lambda rng, a, b: a)
    cpe.simulate(program, 100, key=KEY)
    assert capsys.readouterr().err == ""  # there is no terminal
    cpe.simulate(program, 100, key=KEY, progress=True)
    err = capsys.readouterr().err
    assert "simulating" in err
    assert "100/100" in err


@pytest.mark.parametrize("vectorized", [False, True])
def test_the_error_of_a_host_simulator_is_readable(vectorized):
    def fragile(rng, a, b):
        if np.any(a > 0):
            raise ValueError("the step size became zero")
        return a

    with pytest.raises(RuntimeError) as caught:
        cpe.simulate(host(fragile, vectorized=vectorized), 100, key=KEY)
    where = "" if vectorized else r", called with \(\d\.\d+, -?\d\.\d+\)"
    assert caught.match(rf"^Site 'y': simulator 'fragile'{where} raised ValueError: the step size became zero\. Fix it")
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__traceback__ is not None


def test_a_host_simulator_of_another_shape():
    with pytest.raises(RuntimeError, match=r"Site 'y'.*returned shape \(3,\), expected \(\)"):
        cpe.simulate(host(lambda rng, a, b: np.zeros(3)), 100, key=KEY)


# ---- bad simulations


def fails_below(threshold, wrong=jnp.nan):
    def program():
        a = numpyro.sample("a", dist.Uniform(0.0, 1.0))
        scale = numpyro.sample("scale", dist.Uniform(0.0, 1e-6).expand([2]).to_event(1))
        numpyro.sample("fine", dist.Normal(a + scale.sum(), 1.0))
        numpyro.sample("y", dist.Delta(jnp.where(a < threshold, wrong, a)))

    return program


@pytest.mark.parametrize("wrong", [jnp.nan, jnp.inf, -jnp.inf])
def test_bad_simulations_are_counted_said_and_left_out(capsys, wrong):
    drawn = cpe.simulate(fails_below(0.05, wrong), 1000, observed=["fine", "y"], key=KEY)
    assert all(len(x) == drawn.n and np.isfinite(x).all() for x in drawn.values())
    assert drawn["a"].min() >= 0.05
    assert drawn.dropped == 1000 - drawn.n > 20
    said = capsys.readouterr().err
    assert said.startswith(f"{drawn.dropped} of 1000 simulations ({drawn.dropped / 10:.1f} %) are not finite")
    assert "the first bad site is 'y', for instance at a = 0.0" in said
    assert "e-07]" in said  # small numbers are not rounded away
    assert said.rstrip().endswith("They are left out.")


def test_too_many_bad_simulations_are_an_error():
    with pytest.raises(
        ValueError, match=r"first bad site is 'y', for instance at a = 0\.\d+, scale = .*More than 10 %"
    ):
        cpe.simulate(fails_below(0.2), 1000, observed=["fine", "y"], key=KEY)


def test_nothing_bad_nothing_said(capsys):
    assert cpe.simulate(fails_below(0.0), 1000, observed=["fine", "y"], key=KEY).dropped == 0
    assert capsys.readouterr().err == ""


def test_numbers_too_large_for_float32_are_bad(capsys):
    graph = cpe.Graph.from_edges({"y": ["a"]}, observed=["y"])
    values = {"a": np.zeros(100), "y": np.r_[1e39, np.ones(99)]}
    assert _simulate.finite(values, graph).dropped == 1
    assert "1 of 100" in capsys.readouterr().err


# ---- bad arguments


@pytest.mark.parametrize("n", [0, -3, 2.5, "10", None, True])
def test_wrong_numbers(unchecked, n):
    with pytest.raises(ValueError, match="n, the number of simulations, must be a whole number of at least 1; found"):
        cpe.simulate(groups, n, observed=["y", "count"], key=KEY)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (0, "0"),
        (None, "None"),
        ("seed", "'seed'"),
        (np.zeros(2), r"ndarray of shape \(2,\)"),
        (np.zeros(2, np.int64), r"ndarray of shape \(2,\)"),
        (np.zeros((1, 2), np.uint32), r"ndarray of shape \(1, 2\)"),
        (jax.random.split(KEY), r"of shape \(2,\)"),  # several keys are not one
    ],
)
def test_wrong_keys(unchecked, key, found):
    with pytest.raises(TypeError, match=rf"key must be one JAX key, as jax.random.key\(0\) makes it; found .*{found}"):
        cpe.simulate(groups, 10, observed=["y", "count"], key=key)


def test_wrong_names_of_data():
    with pytest.raises(ValueError, match="observed names 'z', but the program has only the sites"):
        cpe.simulate(groups, 10, observed=["z"], key=KEY)


def test_a_program_is_a_function(unchecked):
    with pytest.raises(TypeError, match="program must be a function"):
        cpe.simulate("groups", 10, key=KEY)
