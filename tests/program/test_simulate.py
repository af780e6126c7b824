"""Simulations: the program's distribution and shapes, on the device and on the host, and what is said of bad ones."""

import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base import from_dict
from scipy import stats

import cpejax as cpe
from cpejax.program import graph as _graph
from cpejax.program import simulate as _simulate
from cpejax.program.simulations import offsets

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
    return cpe.simulate(cpe.Model(groups, observed=["y", "count"]), 2000, key=KEY)


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
    wide = cpe.simulate(cpe.Model(groups, observed=["y", "count"], args=(5,), kwargs={"spread": 100.0}), 500, key=KEY)
    assert wide["theta"].shape == (500, 5)
    assert stats.kstest(wide["mu"] / 100, "norm").pvalue > 1e-3


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_the_key_decides_and_chunks_do_not(simulations, monkeypatch):
    other = cpe.simulate(cpe.Model(groups, observed=["y", "count"]), 2000, key=jax.random.key(1))
    assert not same(simulations, other)
    monkeypatch.setattr(_simulate, "MOST_NUMBERS", 15 * 300)  # 7 chunks, the last padded
    assert same(simulations, cpe.simulate(cpe.Model(groups, observed=["y", "count"]), 2000, key=KEY))


def test_old_keys_are_as_good(unchecked):
    program = fails_below(0.0)  # compiled in no time
    raw = jax.random.PRNGKey(0)
    one, other, third = (
        cpe.simulate(cpe.Model(program, observed=["fine", "y"]), 20, key=key) for key in (KEY, raw, np.asarray(raw))
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
    assert sizes[-50:] == [8] * 50  # 4 simulations of a plate of 2
    assert set(sizes[:-50]) <= {2}  # before, whether it tells members of the plate apart


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


@pytest.mark.parametrize("vectorized", [False, True])
def test_an_array_that_a_simulator_uses_again_is_copied(vectorized):
    out = np.zeros((4, 1) if vectorized else 1)  # 4: the rows of a chunk

    def simulator(rng, a, b):
        out[:] = (a + b)[..., None]
        return out

    drawn = cpe.simulate(host(simulator, event_shape=(1,), vectorized=vectorized), 100, key=KEY)
    np.testing.assert_allclose(drawn["y"][..., 0], drawn["a"][:, None] + drawn["b"], rtol=1e-5, atol=1e-6)


def test_masked_entries_are_not_finite_and_complex_ones_an_error(capsys):
    def masked(rng, a, b):
        return np.ma.masked_array(7.0, mask=a > 1.7)

    drawn = cpe.simulate(host(masked), 200, key=KEY)
    assert drawn.dropped > 0
    assert drawn["a"].max() <= 1.7
    assert (drawn["y"] == 7.0).all()
    assert "are not finite" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=r"Site 'y'.*returned complex values, expected real ones"):
        cpe.simulate(host(lambda rng, a, b: a + 1j), 100, key=KEY)

    def in_jax():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(lambda key, a: a + 1j, a))

    with pytest.raises(ValueError, match=r"Site 'y'.*returned complex values, expected real ones"):
        cpe.simulate(in_jax, 100, key=KEY)


def test_data_of_the_host_keep_their_digits():
    drawn = cpe.simulate(host(lambda rng, a, b: 1e9 + a + b), 100, key=KEY)
    assert drawn["y"].dtype == np.float64
    np.testing.assert_allclose(drawn["y"] - 1e9, drawn["a"][:, None] + drawn["b"].astype(float), atol=1e-5)


def far_away(shift):
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(jnp.stack([a, shift + a]), 1.0).to_event(1))
        numpyro.sample("flag", dist.Delta(jnp.where(a > -2, 1.0, 0.0)))  # few values, but not for want of digits

    return program


@pytest.mark.parametrize("shift", [1e7, 1e9])
def test_values_without_digits_are_said(capsys, shift):
    cpe.simulate(cpe.Model(far_away(shift), observed=["y", "flag"]), 500, key=KEY)
    said = capsys.readouterr().err
    assert "Warning: 1 of 2 values of site 'y' have no digits left: float32 has steps of" in said
    assert "'flag'" not in said
    assert "'a'" not in said
    cpe.simulate(cpe.Model(far_away(1e3), observed=["y", "flag"]), 500, key=KEY)
    assert capsys.readouterr().err == ""


def test_offsets_are_the_same_for_all_members_if_that_will_do():
    graph = cpe.Graph.from_edges({"y": ["a"], "z": ["a"]}, ["y", "z"], {"y": ["i"], "z": ["i"]}, {"i": 3})
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(500, 3))
    values = {"a": noise[:, 0], "y": 1e9 + noise, "z": 1e9 * np.arange(1.0, 4.0) + noise}
    found = offsets(values, graph)
    assert len(np.unique(found["y"])) == 1
    np.testing.assert_allclose(found["z"], 1e9 * np.arange(1.0, 4.0), atol=1)
    assert offsets({**values, "y": 10 + noise, "z": noise}, graph) == {}
    counts = {"a": noise[:, 0], "y": np.int64(10**9) + rng.poisson(9, (500, 3)), "z": rng.poisson(9, (500, 3))}
    assert list(offsets(counts, graph)) == ["y"]


# ---- Ctrl-C, and errors


def interrupted_at(call):
    calls = []

    def simulator(rng, a, b):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return a

    return host(simulator)


def test_ctrl_c_returns_what_is_finished(capfd):
    drawn = cpe.simulate(interrupted_at(81), 500, key=KEY)  # 10 simulations of a plate of 2 in a part
    assert drawn.n == 40
    assert drawn.interrupted
    said = capfd.readouterr().err
    assert said.strip() == "Interrupted: 40 of 500 simulations are finished, and returned."
    with pytest.raises(KeyboardInterrupt, match="after 0 of 500"):
        cpe.simulate(interrupted_at(5), 500, key=KEY)
    with pytest.raises(KeyboardInterrupt, match="after 40 of 500"):  # each value belongs to a simulation
        cpe.simulate(interrupted_at(81), 500, key=KEY, values={"a": np.zeros(500)})


def test_ctrl_c_keeps_the_checkpoint(tmp_path):
    with pytest.raises(KeyboardInterrupt, match=r"40 of 500 simulations are in .*; the same call resumes"):
        cpe.simulate(interrupted_at(81), 500, key=KEY, checkpoint=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_real_ctrl_c_is_one():
    """Sent while a simulator computes."""
    code = """
import os, signal, threading, time, jax, numpyro, numpyro.distributions as dist, cpejax as cpe
calls = []
def simulator(rng, a):
    calls.append(1)
    if len(calls) == 500:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    time.sleep(0.001)
    return a
def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", cpe.Simulator(simulator, a, host=True))
found = cpe.simulate(program, 5000, key=jax.random.key(0))
print(found.n, found.interrupted)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    n, interrupted = out.stdout.split()
    assert interrupted == "True"
    assert 0 < int(n) < 5000
    assert out.stderr.strip() == f"Interrupted: {n} of 5000 simulations are finished, and returned."


def test_the_error_of_a_host_simulator_shows_no_frames_of_jax(capfd):
    def fragile(rng, a, b):
        raise ValueError("the step size became zero")

    with pytest.raises(RuntimeError) as caught:
        cpe.simulate(host(fragile), 100, key=KEY)
    shown = "".join(traceback.format_exception(caught.value))
    assert "in fragile" in shown
    assert "jax/_src" not in shown
    assert capfd.readouterr().err == ""  # JAX logs it, too


@pytest.mark.parametrize("vectorized", [False, True])
def test_failures_can_be_nan(capsys, vectorized):
    def fragile(rng, a, b):
        if np.any(a > 1.5):
            raise ZeroDivisionError("too large")
        return a + b

    program = host(fragile, vectorized=vectorized)
    with pytest.raises(
        RuntimeError, match=r"ZeroDivisionError: too large\. Fix it there, or let it return NaN, which .*on_error='nan'"
    ):
        cpe.simulate(program, 200, key=KEY)
    drawn = cpe.simulate(program, 200, key=KEY, on_error="nan")
    prior = cpe.simulate(host(lambda rng, a, b: a), 200, key=KEY)["a"]
    assert drawn.dropped == (prior > 1.5).sum() > 0
    assert np.array_equal(drawn["a"], prior[prior <= 1.5])
    said = capsys.readouterr().err
    assert "calls of a simulator failed and count as NaN (on_error='nan'). The first: Site 'y': simulator 'frag" in said
    assert "raised ZeroDivisionError: too large" in said


def test_a_wrong_shape_is_not_a_failure_of_one_simulation():
    with pytest.raises(RuntimeError, match=r"returned shape \(3,\), expected \(\)"):
        cpe.simulate(host(lambda rng, a, b: np.zeros(3)), 100, key=KEY, on_error="nan")


# ---- checkpoints


def measured(loc=0.0, factor=1.0, X=2.0, simulator=None, fail=False):
    calls = []

    def on_host(rng, a):
        calls.append(1)
        if fail and len(calls) > 250:
            raise KeyboardInterrupt
        return a + rng.normal()

    def program():
        a = numpyro.sample("a", dist.Normal(loc, 1.0))
        numpyro.sample("x", dist.Normal(X * a, 1.0))
        numpyro.sample("u", cpe.Simulator(lambda key, a: factor * a + jax.random.normal(key), a))
        numpyro.sample("y", cpe.Simulator(simulator or on_host, a, host=True))

    return program


def other_simulator(rng, a):
    return a + 2 * rng.normal()


@pytest.mark.parametrize(
    ("options", "differ"),
    [
        ({"loc": 3.0}, "site 'a' has another prior now"),
        ({"X": 2.5}, "site 'x' has another distribution, or reads other constants, now"),
        ({"factor": 2.0}, "site 'u' has another simulator now"),
        ({"simulator": other_simulator}, "site 'y' has a simulator whose code, or a constant in it, has changed"),
    ],
)
def test_a_checkpoint_does_not_mix_programs(tmp_path, options, differ):
    arguments = {"key": KEY, "checkpoint": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        cpe.simulate(cpe.Model(measured(fail=True), ["x", "u", "y"]), 500, **arguments)
    with pytest.raises(ValueError, match=f"were begun with another program: {differ}"):
        cpe.simulate(cpe.Model(measured(**options), ["x", "u", "y"]), 500, **arguments)


def test_a_checkpoint_resumes(tmp_path):
    most = [250]

    def counting():
        calls = 0

        def simulator(rng, a):
            nonlocal calls  # what it holds when it is first called is what tells it from another
            calls += 1
            if calls > most[0]:
                raise KeyboardInterrupt
            return 1e9 + a + rng.normal()

        return cpe.Model(measured(simulator=simulator), ["x", "u", "y"]), lambda: calls

    arguments = {"key": KEY}
    program, _ = counting()
    with pytest.raises(KeyboardInterrupt):
        cpe.simulate(program, 500, **arguments, checkpoint=tmp_path)
    most[0] = 10_000
    program, calls = counting()
    resumed = cpe.simulate(program, 500, **arguments, checkpoint=tmp_path)
    assert calls() == 250
    program, _ = counting()
    assert same(resumed, cpe.simulate(program, 500, **arguments))
    assert resumed["y"].dtype == np.float64


# ---- values from a posterior


def test_draws_in_a_tree_are_values():
    rng = np.random.default_rng(0)
    draws = {"a": rng.normal(size=(2, 50)), "b": rng.normal(size=(2, 50, 2)), "twice": np.zeros((2, 50))}
    tree = from_dict({"posterior": draws}, dims={"b": ["i"]})
    program = host(lambda rng, a, b: a + b)
    drawn = cpe.simulate(program, 100, values=tree, key=KEY)
    np.testing.assert_allclose(drawn["a"], draws["a"].ravel(), rtol=1e-6)
    np.testing.assert_allclose(drawn["y"], drawn["a"][:, None] + drawn["b"], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="values has 100 draws, but n is 99"):
        cpe.simulate(program, 99, values=tree, key=KEY)
    many = from_dict({"posterior": {"a": np.zeros((1, 4, 3))}}, dims={"a": ["observation"]})
    with pytest.raises(ValueError, match=r"many observations.*values=draws.isel\(observation=0\)"):
        cpe.simulate(program, 4, values=many, key=KEY)
    with pytest.raises(ValueError, match="without draws of any of the sites"):
        cpe.simulate(program, 4, values=from_dict({"posterior": {"c": np.zeros((1, 4))}}), key=KEY)


def test_deterministic_sites_are_simulated_and_not_tested_for_being_finite():
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("i", 2):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
            numpyro.deterministic("root", jnp.sqrt(a + b))
            numpyro.sample("y", dist.Normal(a + b, 1.0), obs=jnp.zeros(2))
        numpyro.deterministic("b0", b[0])

    drawn = cpe.simulate(program, 100, key=KEY)
    assert list(drawn) == ["a", "b", "y", "root", "b0"]
    assert drawn.n == 100
    np.testing.assert_allclose(drawn["b0"], drawn["b"][:, 0])
    assert np.isnan(drawn["root"]).any()


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
    drawn = cpe.simulate(cpe.Model(fails_below(0.05, wrong), observed=["fine", "y"]), 1000, key=KEY)
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
        ValueError, match=r"first bad site is 'y', for instance at a = 0\.\d+, scale = .*More than 10 %.*biases"
    ):
        cpe.simulate(cpe.Model(fails_below(0.2), observed=["fine", "y"]), 1000, key=KEY)
    found = cpe.simulate(cpe.Model(fails_below(0.2), observed=["fine", "y"]), 1000, key=KEY, max_invalid=0.3)
    assert 150 < found.dropped < 250
    with pytest.raises(ValueError, match="More than 1 %"):
        cpe.simulate(cpe.Model(fails_below(0.05), observed=["fine", "y"]), 1000, key=KEY, max_invalid=0.01)
    for wrong in (1.0, -0.1):
        with pytest.raises(ValueError, match="max_invalid must be a share"):
            cpe.simulate(fails_below(0.2), 1000, key=KEY, max_invalid=wrong)


def test_nothing_bad_nothing_said(capsys):
    assert cpe.simulate(cpe.Model(fails_below(0.0), observed=["fine", "y"]), 1000, key=KEY).dropped == 0
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
        cpe.simulate(cpe.Model(groups, observed=["y", "count"]), n, key=KEY)


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
        cpe.simulate(cpe.Model(groups, observed=["y", "count"]), 10, key=key)


def test_wrong_names_of_data():
    with pytest.raises(ValueError, match="observed names 'z', but the program has only the sites"):
        cpe.simulate(cpe.Model(groups, observed=["z"]), 10, key=KEY)


def test_misspelt_options(unchecked):
    with pytest.raises(TypeError, match="unexpected keyword argument 'chekpoint'"):
        cpe.simulate(groups, 10, key=KEY, chekpoint="x")
    with pytest.raises(TypeError, match=r"takes \(size=3, spread=2.0\), but .*unexpected keyword argument 'spreed'"):
        cpe.Model(groups, kwargs={"spreed": 1.0})
    wrapped = numpyro.handlers.block(numpyro.handlers.infer_config(groups, config_fn=lambda site: {}), hide=[])
    with pytest.raises(TypeError, match="unexpected keyword argument 'sizes'"):
        cpe.Model(wrapped, kwargs={"sizes": 2})
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'"):
        cpe.fit(groups, {}, key=KEY, epochs=10)
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'nan'"):
        cpe.simulate(cpe.Model(groups, observed=["y", "count"]), 10, key=KEY, on_error="ignore")
    with pytest.raises(TypeError, match="args must be a tuple of what the program is called with, found 3"):
        cpe.Model(groups, args=3)


def test_a_program_may_have_arguments_of_any_name():
    def program(key, steps, method):
        a = numpyro.sample("a", dist.Normal(key, method))
        numpyro.sample("y", dist.Normal(a, 1.0).expand([steps]).to_event(1))

    model = cpe.Model(program, observed=["y"], args=(1.0,), kwargs={"steps": 3, "method": 2.0})
    simulations = cpe.simulate(model, 50, key=KEY)
    assert simulations["y"].shape == (50, 3)
    assert simulations.model is model


def test_a_model_is_traced_once(monkeypatch, no_training):
    calls = []
    inner = _graph.read
    monkeypatch.setattr(_graph, "read", lambda program: calls.append(program) or inner(program))
    model = cpe.Model(groups, observed=["y", "count"])
    simulations = cpe.simulate(model, 40, key=KEY)
    tiny = cpe.CPE(width=4, depth=1, hidden=4, components=1)
    for given in (model, groups):  # also the bare function, which simulations know
        cpe.fit(given, simulations, key=KEY, method=tiny)
    assert len(calls) == 1


def test_a_program_is_a_function(unchecked):
    with pytest.raises(TypeError, match="program must be a function"):
        cpe.simulate("groups", 10, key=KEY)
