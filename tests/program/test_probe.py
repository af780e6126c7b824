"""Programs with the same graph are told apart: by `load`, by `fit`, and by what a probe keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.inference.rows import check_probe
from cpejax.program.probe import Prober, code_of

KEY = jax.random.key(0)
X = np.linspace(-1, 1, 40).reshape(20, 2)


def regression(design, scale=1.0, likelihood=dist.Normal, spread=1.0, far=1.0):
    beta = numpyro.sample("beta", dist.Normal(0.0, spread).expand([2]).to_event(1))
    with numpyro.plate("row", 20):
        numpyro.sample("y", likelihood(design @ beta, scale), obs=jnp.zeros(20))
    numpyro.sample("z", cpe.Simulator(lambda key, b: far * b + jax.random.normal(key), beta.sum()))


def prober(**options):
    design = options.pop("design", X)
    program = functools.partial(regression, design, **options)
    return Prober(program, cpe.Graph.from_program(program))


@pytest.fixture(scope="module")
def simulations():
    return cpe.simulate(cpe.Model(regression, args=(X,)), 200, key=KEY)


def one_more(design):
    out = design.copy()
    out[7, 1] += 0.5
    return out


@pytest.mark.parametrize(
    ("options", "differ"),
    [
        ({}, []),
        ({"design": X + 1e-7}, []),  # what another machine's rounding may do
        ({"design": one_more(X)}, ["site 'y' has another distribution, or reads other constants, now"]),
        ({"scale": 1.1}, ["site 'y' has another distribution, or reads other constants, now"]),
        ({"spread": 1.1}, ["site 'beta' has another prior now"]),
        ({"likelihood": dist.Laplace}, ["site 'y' has another distribution, or reads other constants, now"]),
        ({"far": 2.0}, ["site 'z' has another simulator now"]),
    ],
)
def test_constants_and_distributions_are_probed(simulations, options, differ):
    assert prober(**options).differences(simulations.probe) == (differ, [])


def test_a_probe_goes_through_files(simulations):
    probe = simulations.probe
    again = type(probe).restored(probe.arrays() | {"0": np.zeros(3)}, probe.about())
    assert prober().differences(again) == ([], [])
    assert prober(scale=2.0).differences(again)[0]
    elsewhere = type(probe).restored(probe.arrays(), probe.about() | {"made_with": "another version of JAX"})
    assert prober(far=2.0).differences(elsewhere) == ([], [])  # other keys draw otherwise: nothing is certain


def test_one_value_of_many_is_seen():
    def program(design):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", 10_000):
            numpyro.sample("y", dist.Normal(a * design, 1.0), obs=jnp.zeros(10_000))

    design = np.ones(10_000)
    other = np.where(np.arange(10_000) == 4321, 3.0, 1.0)
    probe = cpe.simulate(cpe.Model(program, args=(design,)), 20, key=KEY).probe
    for values, differ in ((design, 0), (other, 1)):
        bound = functools.partial(program, values)
        certain, _ = Prober(bound, cpe.Graph.from_program(bound)).differences(probe)
        assert len(certain) == differ


def test_fit_refuses_simulations_of_another_program(simulations):
    with pytest.raises(ValueError, match=r"simulations are of another program: constant 'design' \(plate row\)"):
        cpe.fit(cpe.Model(regression, args=(one_more(X),)), simulations, key=KEY)
    with pytest.raises(ValueError, match="simulations are of another program: site 'y' has another distribution, or"):
        cpe.fit(cpe.Model(regression, args=(X,), kwargs={"scale": 1.1}), simulations, key=KEY)


def test_load_refuses_another_program(simulations, tmp_path):
    method = cpe.FMPE()
    program = functools.partial(regression, X)
    flow = method.build(program, simulations.graph, simulations, key=KEY)
    model = cpe.Model(program, simulations.observed)
    posterior = cpe.Posterior(flow, model, method, cpe.Training(), cpe.History(), 200)
    posterior.save(tmp_path)
    assert cpe.load(tmp_path, cpe.Model(regression, args=(X,))).graph == simulations.graph
    for options, differ in (({"scale": 2.0}, "'y' has another dist"), ({"far": 2.0}, "'z' has another simulator")):
        with pytest.raises(ValueError, match=f"fitted to another program: site {differ}"):
            cpe.load(tmp_path, cpe.Model(regression, args=(X,), kwargs=options))
    with pytest.raises(ValueError, match="fitted to another program: constant 'design'"):
        cpe.load(tmp_path, cpe.Model(regression, args=(one_more(X),)))
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'metod'"):
        cpe.load(tmp_path, cpe.Model(regression, args=(X,), kwargs={"metod": method}))


# ---- simulators on the host: their code is compared, and they are not called


def on_host(constant, doc=None, called=True):
    def simulator(rng, a):
        assert called
        return a + constant

    simulator.__doc__ = doc

    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(simulator, a, host=True))

    return program


def test_a_change_of_code_on_the_host_is_in_doubt():
    probe = cpe.simulate(on_host(np.ones(1)[0]), 20, key=KEY).probe

    def differences(program):
        return Prober(program, cpe.Graph.from_program(program)).differences(probe)

    assert differences(on_host(np.ones(1)[0])) == ([], [])
    changed = ["site 'y' has a simulator whose code, or a constant in it, has changed"]
    assert differences(on_host(np.float64(2.0))) == ([], changed)


def test_fit_says_that_code_on_the_host_has_changed(capsys):
    simulations = cpe.simulate(on_host(1.0), 20, key=KEY)
    found = check_probe(simulations, Prober(on_host(2.0), simulations.graph))
    assert found is simulations.probe
    assert "Warning: since the simulations were made, site 'y' has a simulator whose code" in capsys.readouterr().err


def test_code_is_what_matters():
    def first(rng, a):
        """Does this."""
        return a + 1

    def make(n):
        def first(rng, a):
            """Does that, which is the same."""
            return a + 1

        def second(rng, a):
            return a + n

        return first, second

    same, _ = make(1)
    same.__qualname__ = first.__qualname__
    assert code_of(first) == code_of(same)
    assert code_of(make(1)[1]) == code_of(make(1)[1])
    assert code_of(make(1)[1]) != code_of(make(2)[1])
    assert code_of(make([1])[1]) == code_of(make([2])[1])  # a list may be a state, such as a count of calls
    assert code_of(functools.partial(first, 1)) != code_of(functools.partial(first, 2))
    assert code_of(np.random.default_rng) == code_of(np.random.default_rng)  # no Python code at all
