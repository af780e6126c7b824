"""The forward program, learned: likelihoods and simulations against the program's own."""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.inference.emulator import why_not
from cpejax.inference.likelihood import ProgramLikelihood
from cpejax.program.conditional import forward
from cpejax.program.simulations import Simulations

SMALL = cpe.CPE(width=16, depth=1, hidden=8, components=3)
SHORT = cpe.Training(max_epochs=15, batch_size=50)


def program():
    """A normal location, a chain of data, counts and coins."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    rate = numpyro.sample("rate", dist.LogNormal(0.5, 0.5))
    with numpyro.plate("row", 4):
        y = numpyro.sample("y", dist.Normal(mu, 0.5))
        numpyro.sample("after", dist.Normal(0.5 * y, 0.3))
        numpyro.sample("count", dist.Poisson(rate))
    numpyro.sample("coin", dist.Bernoulli(logits=2 * mu))


MODEL = cpe.Model(program, observed=["y", "after", "count", "coin"])


@pytest.fixture(scope="module")
def simulations():
    return cpe.simulate(MODEL, 3000, key=jax.random.key(0))


@pytest.fixture(scope="module")
def emulator(simulations):
    return cpe.emulate(MODEL, simulations, method=SMALL, training=SHORT, key=jax.random.key(1))


def test_the_forward_program_is_the_graphs_own():
    found = forward(MODEL.graph)
    assert found.order == ("y", "after", "count", "coin")
    assert found.parents == {"y": ("mu",), "after": ("y",), "count": ("rate",), "coin": ("mu",)}
    assert found.graph.data == ("mu", "rate")


def test_a_step_reads_hundreds_of_examples_however_large_plates_are(monkeypatch):
    group = np.repeat(np.arange(4), 15)

    def nested():
        with numpyro.plate("group", 4):
            mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("member", 60):
            numpyro.sample("y", dist.Normal(mean[group], 0.5))

    def apart():
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("member", 60):
            numpyro.sample("y", dist.Normal(mean, 0.5))

    found = []

    def train(flow, rows, settings, **options):
        found.append((flow.examples, settings.batch_size))
        return flow, cpe.History()

    monkeypatch.setattr("cpejax.inference.emulator.train", train)
    for program in (nested, apart):
        model = cpe.Model(program, observed=["y"])
        cpe.emulate(model, cpe.simulate(model, 200, key=jax.random.key(0)), method=SMALL, key=jax.random.key(1))
    assert found == [(60, 16), (4, 100)]


def test_the_learned_likelihood_is_near_the_programs_own(emulator):
    fresh = cpe.simulate(MODEL, 500, key=jax.random.key(5))
    values = {name: jnp.asarray(fresh[name], float) for name in MODEL.graph.sites}
    learned = np.asarray(jax.jit(lambda v: emulator.flow.log_prob_each(v, steps=8))(values))
    own = ProgramLikelihood(MODEL.bound, MODEL.graph)

    def exact(v):
        one = {n: v[n][None] for n in MODEL.graph.parameters}
        return own(one, {n: v[n] for n in MODEL.graph.data})[0]

    difference = np.asarray(jax.vmap(exact)(values)) - learned
    # Thirteen values; the mean is the divergence of the learned from the true distribution, which is never below zero.
    assert -0.1 < difference.mean() < 0.5


def test_counts_have_probabilities(emulator):
    most = int(emulator.flow.coordinates.maps["count"].greatest[0])
    draws = {"mu": jnp.zeros(1), "rate": jnp.full(1, 2.0)}
    given = {"y": np.zeros(4), "after": np.zeros(4), "coin": 1}
    counts = [np.array([count, 1, 1, 1]) for count in range(most + 1)]
    found = np.array([float(emulator.log_likelihood(draws, {**given, "count": count})[0]) for count in counts])
    probability = np.exp(found - np.logaddexp.reduce(found))  # all but the first member is the same in each
    exact = np.exp([dist.Poisson(2.0).log_prob(k) for k in range(most + 1)])
    assert np.abs(probability - exact / exact.sum()).max() < 0.06


def test_emulated_simulations_are_like_those_of_the_program(emulator, simulations):
    made = emulator.simulate(3000, key=jax.random.key(7))
    assert made["y"].shape == (3000, 4)
    assert set(np.unique(made["coin"])) <= {0.0, 1.0}
    assert (made["count"] == np.round(made["count"])).all()
    np.testing.assert_allclose(made["y"].std(), simulations["y"].std(), rtol=0.06)
    # Joint structure: of a site with its parent, with its own member of another site, and with what it depends on.
    pairs = {"coin": ("mu", lambda x: x), "after": ("y", np.ravel), "count": ("rate", lambda x: x.mean(-1))}
    for name, (other, of) in pairs.items():
        parent = np.ravel if name == "after" else np.asarray
        found, real = (np.corrcoef(parent(x[other]), of(np.asarray(x[name], float)))[0, 1] for x in (made, simulations))
        assert abs(found - real) < 0.08, name


def single():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mu, 1.0))


SINGLE = cpe.Model(single, observed=["y"])


def test_where_there_is_no_emulator_it_is_said_why():
    def masked():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", 3), numpyro.handlers.mask(mask=jnp.array([True, True, False])):
            numpyro.sample("y", dist.Normal(mu, 1.0))

    def long():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, 1.0).expand([40]).to_event(1))

    masks = "some values of 'y' are masked, so that they are not drawn"
    assert why_not(cpe.Model(masked, observed=["y"]), cpe.CPE()) == masks
    assert "40 scalars" in why_not(cpe.Model(long, observed=["y"]), cpe.CPE())
    assert "FMPE" in why_not(MODEL, cpe.FMPE())
    assert not why_not(MODEL, cpe.CPE())
    assert "7 simulations were not finite" in why_not(MODEL, cpe.CPE(), 7)


def test_an_emulator_that_cannot_be_is_refused_before_training(monkeypatch):
    def nothing(*_, **__):
        raise AssertionError("trained before it was refused")

    monkeypatch.setattr("cpejax.inference.fit.train", nothing)
    options = {"method": SMALL, "emulate": True, "key": jax.random.key(1)}
    y = np.zeros(100)
    y[3] = np.nan
    rows = {"mu": np.zeros(100), "y": y}
    with pytest.raises(ValueError, match="emulate=True, but FMPE is not trained on emulated simulations"):
        cpe.fit(SINGLE, {"mu": np.zeros(100), "y": np.zeros(100)}, **options | {"method": cpe.FMPE()})
    with pytest.raises(ValueError, match="emulate=True, but 1 simulations were not finite"):
        cpe.fit(SINGLE, rows, **options)
    simulated = Simulations({"mu": np.zeros(100), "y": np.zeros(100)}, SINGLE.graph, dropped=3)  # left out before
    with pytest.raises(ValueError, match="emulate=True, but 3 simulations were not finite"):
        cpe.fit(SINGLE, simulated, **options)
    with pytest.raises(ValueError, match="emulate=True, but fresh simulations need none"):
        cpe.fit(SINGLE, {"mu": np.zeros(100), "y": np.zeros(100)}, fresh=True, **options)


def test_options_of_training_are_checked(unchecked):
    with pytest.raises(TypeError, match=r"training must be cpe\.Training\(\.\.\.\), found \{'steps': 3\}"):
        cpe.emulate(SINGLE, {}, training={"steps": 3}, key=jax.random.key(0))


def press_after(calls, history):
    """A training that takes no time, and Ctrl-C once it was called so many times."""
    count = 0

    def train(flow, *_, interrupt, **__):
        nonlocal count
        count += 1
        interrupt.wait_for_epochs()
        if count == calls:
            signal.raise_signal(signal.SIGINT)
        return flow, dataclasses.replace(history)

    return train


@pytest.mark.parametrize("calls", [1, 2])
def test_ctrl_c_after_the_last_epoch_or_while_an_emulator_learns_is_not_lost(monkeypatch, capsys, calls):
    """A command that fits must not go on as if nothing had been pressed, with a posterior that is another one."""
    train = press_after(calls, cpe.History(stopped="end of the schedule", train=[1.0], validation=[1.0]))
    monkeypatch.setattr("cpejax.inference.fit.train", train)
    monkeypatch.setattr("cpejax.inference.emulator.train", train)
    monkeypatch.setattr("cpejax.inference.fit.score_held_out", lambda *_: {"log_prob": 1.0, "prior": 0.0, "error": 0.1})
    monkeypatch.setattr("cpejax.inference.fit.score_refined", lambda *_, **__: {})
    monkeypatch.setattr("cpejax.inference.fit.gain", lambda *_: {"with": 0.0, "without": 1.0})
    rows = cpe.simulate(SINGLE, 50, key=jax.random.key(0))
    posterior = cpe.fit(SINGLE, rows, method=SMALL, emulate=True, key=jax.random.key(1))
    assert posterior.history.stopped == "interrupted after all of its 1 epochs"
    assert "the best so far is returned" in capsys.readouterr().err
    assert (posterior.emulator is None) == (calls == 1)


def test_a_simulator_that_cannot_be_learned_does_not_lose_what_is_trained(monkeypatch, capsys, no_training):
    def diverges(*_, **__):
        raise FloatingPointError("The validation loss of epoch 1 is nan.")

    monkeypatch.setattr("cpejax.inference.emulator.train", diverges)
    monkeypatch.setattr("cpejax.inference.fit.score_held_out", lambda *_: {"log_prob": 1.0, "prior": 0.0, "error": 0.1})
    rows = cpe.simulate(SINGLE, 50, key=jax.random.key(0))
    posterior = cpe.fit(SINGLE, rows, method=SMALL, emulate=True, key=jax.random.key(1))
    assert posterior.emulator is None
    assert "cannot be learned, and is not used. The validation loss of epoch 1 is nan" in capsys.readouterr().err


def normal():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", 3):
        numpyro.sample("y", dist.Normal(mu, 0.7))


NORMAL = cpe.Model(normal, observed=["y"])


@pytest.fixture(scope="module")
def fitted():
    rows = cpe.simulate(NORMAL, 2000, key=jax.random.key(0))
    short = cpe.Training(steps=1000, max_epochs=20)
    return cpe.fit(NORMAL, rows, method=SMALL, training=short, emulate=True, key=jax.random.key(1))


def test_fit_says_what_emulated_simulations_did_and_keeps_the_better(fitted):
    found = fitted.history.emulation
    assert found["simulations"] == 1800
    assert found["emulated"] == 1800 * -(-len(fitted.history.train) // 2) or not found["used"]
    assert found["used"] == (found["with"] > found["without"])
    assert "emulated ones" in fitted.history.augmented
    assert fitted.history.refinement["n"] == 200


def test_draws_refined_by_the_learned_likelihood_are_nearly_exact(fitted):
    y = np.array([1.0, 0.4, 1.6])
    draws = fitted.sample(2000, given={"y": y}, refine="learned", key=jax.random.key(3))
    precision = 1 + 3 / 0.49
    mean, sd = y.sum() / 0.49 / precision, precision**-0.5
    mu = draws.posterior["mu"].values.ravel()
    assert abs(mu.mean() - mean) < 0.15 * sd  # what is learned from 1,800 simulations
    assert abs(mu.std() / sd - 1) < 0.15
    assert draws.posterior.attrs["refined"] == "by the learned likelihood"


def test_given_parameters_are_kept_and_keys_reproduce(fitted):
    values = {"mu": np.full(20, 2.0, np.float32)}
    one, two = (fitted.emulator.simulate(20, key=jax.random.key(3), values=values) for _ in range(2))
    np.testing.assert_array_equal(one["mu"], values["mu"])
    np.testing.assert_array_equal(one["y"], two["y"])
    with pytest.raises(ValueError, match=r"of \(20,\) parameters, but n is 30"):
        fitted.emulator.simulate(30, key=jax.random.key(3), values=values)
    with pytest.raises(ValueError, match="draws have no 'mu'"):
        fitted.emulator.simulate(20, key=jax.random.key(3), values={})


def test_emulated_simulations_that_are_not_finite_are_left_out_and_counted(fitted, capsys):
    values = {"mu": np.r_[np.zeros(19), np.inf].astype(np.float32)}
    found = fitted.emulator.simulate(20, key=jax.random.key(3), values=values)
    assert (found.n, found.dropped) == (19, 1)
    assert "1 of 20 simulations (5.0 %) are not finite" in capsys.readouterr().err


def test_the_likelihood_is_differentiable(fitted):
    given = {"y": np.array([0.3, 0.2, -0.4])}
    gradient = jax.grad(lambda mu: fitted.emulator.log_likelihood({"mu": mu}, given).sum())(jnp.asarray([-4.0, 0, 4]))
    assert np.isfinite(gradient).all()
    assert gradient[0] > 0 > gradient[2]  # towards the data


def test_a_saved_posterior_has_its_emulator_with_it(fitted, tmp_path):
    fitted.save(tmp_path)
    again = cpe.load(tmp_path, NORMAL)
    given = {"y": np.zeros(3)}
    draws = {"mu": np.linspace(-1, 1, 5, dtype=np.float32)}
    np.testing.assert_array_equal(
        again.emulator.log_likelihood(draws, given), fitted.emulator.log_likelihood(draws, given)
    )
    assert again.history.emulation == fitted.history.emulation
    (tmp_path / "emulator" / "posterior.json").unlink()
    with pytest.raises(FileNotFoundError, match="emulator"):
        cpe.load(tmp_path, NORMAL)


def test_fresh_simulations_train_without_any(monkeypatch):
    monkeypatch.setattr("cpejax.inference.fit.FIRST", 1000)
    short = cpe.Training(max_epochs=20, schedule="constant")
    posterior = cpe.fit(NORMAL, method=SMALL, training=short, key=jax.random.key(1))
    assert posterior.n_simulations == 1000 * (1 + len(posterior.history.train))
    y = np.array([1.0, 0.4, 1.6])
    mu = posterior.sample(2000, given={"y": y}, key=jax.random.key(3)).posterior["mu"].values
    precision = 1 + 3 / 0.49
    assert abs(mu.mean() - y.sum() / 0.49 / precision) < 0.3 * precision**-0.5


def test_fresh_simulations_resume_from_a_checkpoint_to_the_same_weights(tmp_path):
    rows = cpe.simulate(NORMAL, 300, key=jax.random.key(0))

    def train(epochs, folder):
        training = cpe.Training(max_epochs=epochs, schedule="constant")
        keys = {"key": jax.random.key(1), "checkpoint": folder, "method": SMALL}
        return cpe.fit(NORMAL, rows, training=training, fresh=True, **keys)

    whole = train(4, None)
    assert whole.n_simulations == 300 + 4 * 300
    again = train(4, tmp_path / "run")
    resumed = train(4, tmp_path / "run")  # from the end of it
    for a, b in zip(*(jax.tree.leaves(p.flow.groups) for p in (again, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*(jax.tree.leaves(p.flow.groups) for p in (whole, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    training = cpe.Training(max_epochs=4, schedule="constant")
    keys = {"key": jax.random.key(1), "checkpoint": tmp_path / "run", "method": SMALL}
    plain = cpe.fit(NORMAL, rows, training=training, **keys)  # in the same folder, and not from the fresh ones
    assert plain.history.train[0] != again.history.train[0]


def test_a_simulator_on_the_host_cannot_be_simulated_in_an_epoch():
    def on_host():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(lambda rng, mu: mu + rng.normal(), mu, host=True))

    with pytest.raises(ValueError, match=r"'y' is simulated on the host.*cpe\.simulate"):
        cpe.fit(cpe.Model(on_host, observed=["y"]), key=jax.random.key(0))
    with pytest.raises(ValueError, match="fresh=False"):
        cpe.fit(NORMAL, fresh=False, key=jax.random.key(0))


def test_fresh_simulations_that_are_not_finite_are_left_out_and_counted(capsys):
    def sometimes():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(lambda key, mu: jnp.where(mu > 2, jnp.nan, mu + jax.random.normal(key)), mu))

    model = cpe.Model(sometimes, observed=["y"])
    rows = cpe.simulate(model, 300, key=jax.random.key(0))
    training = cpe.Training(max_epochs=2)
    posterior = cpe.fit(model, rows, method=SMALL, training=training, fresh=True, key=jax.random.key(1))
    assert np.isfinite(posterior.history.train).all()
    assert "fresh simulations were not finite" in capsys.readouterr().err
