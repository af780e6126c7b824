"""Training: what it minimises and keeps, how it stops, how it resumes after a crash, and what it refuses."""

import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import norm
from scipy.stats import t as student

import cpejax as cpe
from cpejax.flows.base import Flow
from cpejax.inference import fit as _fit
from cpejax.inference import progress as _progress
from cpejax.inference import training as _train
from cpejax.inference.settings import History, Training
from cpejax.inference.training import _validation_loss, train

KEY = jax.random.key(0)


class Line(Flow):
    """The smallest flow that can be trained: `y = a x + b` with noise. A test of the loop then compiles in no time."""

    weights: jax.Array
    coordinates: None

    def __init__(self, weights):
        self.weights, self.coordinates = weights, None

    def loss(self, rows, key):
        noise = 0.1 * jax.random.normal(key, rows["y"].shape)
        return jnp.mean((self.weights[0] * rows["x"] + self.weights[1] - rows["y"] + noise) ** 2)


def line_rows(n=500, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(2 * x - 1 + 0.1 * rng.normal(size=n), jnp.float32)}


SHORT = Training(max_epochs=30, steps=10, batch_size=50, learning_rate=0.05, patience=20, weight_decay=0.0)


def trained(settings=SHORT, rows=None, key=KEY, start=0.0, **options):
    return train(Line(jnp.full(2, start)), line_rows() if rows is None else rows, settings, key=key, **options)


def held_out(key=KEY):
    """The rows that are not trained on, of 500, and the key of their noise."""
    key_split, _, key_parts = jax.random.split(key, 3)
    order = np.random.default_rng(_train.key_words(key_split)).permutation(500)
    return order[:50], jax.random.split(jax.random.fold_in(key_parts, 0))[1]


# ---- the loop


def test_training_finds_the_minimum():
    flow, history = trained()
    np.testing.assert_allclose(flow.weights, [2, -1], atol=0.05)
    assert history.train[0] > 1
    assert history.validation[-1] == pytest.approx(0.02, abs=0.01)  # the noise of the data and of the loss
    assert len(history.train) == len(history.validation) == 30
    assert history.stopped == "end of the schedule"
    assert history.seconds > 0


def test_the_best_weights_are_kept():
    # A learning rate that is too high: the last epoch is not the best.
    flow, history = trained(replace(SHORT, learning_rate=2.0, schedule="constant", average=False))
    assert history.best_epoch == int(np.argmin(history.validation)) < len(history.validation) - 1
    order, key_validation = held_out()
    rows = {name: x[order] for name, x in line_rows().items()}
    loss = _validation_loss(flow, rows, key_validation, 50)
    assert float(loss) == pytest.approx(history.best, rel=1e-5)
    assert history.best == min(history.validation)


def test_held_out_simulations_are_not_trained_on():
    rows, settings = line_rows(), replace(SHORT, patience=30)  # no second phase, which would begin at the best weights
    order, _ = held_out()
    _, expected = trained(settings)
    _, history = trained(settings, rows={**rows, "y": rows["y"].at[order].set(100.0)})
    assert history.train == expected.train
    assert min(history.validation) > 5000


def test_early_stopping():
    _, history = trained(replace(SHORT, max_epochs=2000, schedule="constant", patience=5))
    assert len(history.train) < 300
    assert history.stopped == "no better for 5 epochs"
    # Patience ends the first phase, and the same number of epochs the second.
    assert history.cooling is not None
    assert len(history.train) == history.cooling + 5


def test_the_schedule():
    settings = Training(learning_rate=1.0, patience=10)
    rates = [settings.rate(epoch, 100, None) for epoch in range(100)]
    assert rates[0] < rates[2] < 1
    assert all(a > b for a, b in pairwise(rates[2:]))
    assert rates[-1] < 1e-3
    cooled = [settings.rate(epoch, 100, 50) for epoch in range(50, 60)]
    assert cooled[0] == pytest.approx(rates[50] / 4)
    assert all(a > b for a, b in pairwise(cooled))
    constant = replace(settings, schedule="constant")
    assert {constant.rate(epoch, 100, None) for epoch in range(2, 100)} == {1.0}


def test_the_number_of_epochs():
    assert Training(steps=1000, max_epochs=2000).epochs(batches=10) == 100
    assert Training(steps=1000, max_epochs=2000).epochs(batches=900) == 50
    assert Training(steps=1000, max_epochs=20).epochs(batches=10) == 20
    assert Training(schedule="constant", max_epochs=2000).epochs(batches=10) == 2000


def test_averaged_weights_follow_the_number_of_steps():
    """A window that grows with the run: with a learning rate that does not fall they are nearer to the minimum."""
    errors = {}
    for average in (False, True):
        settings = replace(SHORT, learning_rate=0.3, schedule="constant", average=average, patience=30)
        runs = [trained(settings, rows=line_rows(seed=i))[0].weights for i in range(4)]
        errors[average] = np.abs(np.array(runs) - [2, -1]).mean()
    assert errors[True] < errors[False]


def test_the_same_key_gives_the_same_weights():
    one, other, another = (trained(key=key)[0].weights for key in (KEY, KEY, jax.random.key(2)))
    assert np.array_equal(one, other)
    assert not np.array_equal(one, another)


def test_an_epoch_is_compiled_once(caplog):
    class Weak(Line):  # a weak type, which JAX gives to an array that is filled with a Python number
        def __init__(self):
            super().__init__(jnp.full(2, 0.0))

    assert Weak().weights.weak_type
    with jax.log_compiles():
        train(Weak(), line_rows(), replace(SHORT, max_epochs=3), key=KEY)
    assert sum("Compiling jit(run_epoch)" in r.getMessage() for r in caplog.records) == 1


class Lines(Flow):
    """Two lines that have nothing to do with one another."""

    lines: list
    coordinates: None

    def __init__(self, lines):
        self.lines, self.coordinates = lines, None

    def divide(self, rows, most):
        return [(Lines([line]), [r]) for line, r in zip(self.lines, rows, strict=True)][:most]

    def joined(self, parts):
        return Lines([line for part in parts for line in part.lines])

    def loss(self, rows, key):
        return sum(line.loss(r, key) for line, r in zip(self.lines, rows, strict=True))


def test_parts_are_trained_in_parallel(monkeypatch, caplog):
    monkeypatch.setattr(_train, "LONG", 1)
    monkeypatch.setattr(_train, "cores", lambda: 2)
    rows = [line_rows(seed=1), {"x": line_rows()["x"], "y": 1 - line_rows()["y"]}]
    flow = Lines([Line(jnp.zeros(2)), Line(jnp.zeros(2))])
    with jax.log_compiles():
        trained_flow, history = train(flow, rows, SHORT, key=KEY)
    np.testing.assert_allclose([line.weights for line in trained_flow.lines], [[2, -1], [-2, 2]], atol=0.05)
    assert history.validation[-1] == pytest.approx(0.04, abs=0.02)  # that of both
    # They look alike, so one program serves both.
    assert sum("Compiling jit(run_epoch)" in r.getMessage() for r in caplog.records) == 1


def test_a_checkpoint_goes_on_where_there_are_other_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(_train, "LONG", 1)
    rows, flow = [line_rows(seed=1), line_rows()], Lines([Line(jnp.zeros(2)), Line(jnp.zeros(2))])
    monkeypatch.setattr(_train, "cores", lambda: 2)
    whole, _ = train(flow, rows, SHORT, key=KEY)

    def stop(epoch, *_):
        if epoch == 7:
            raise KeyboardInterrupt

    train(flow, rows, SHORT, key=KEY, checkpoint=tmp_path, progress=stop)
    monkeypatch.setattr(_train, "cores", lambda: 1)
    resumed, history = train(flow, rows, SHORT, key=KEY, checkpoint=tmp_path)
    assert len(history.train) == 30
    assert all(np.array_equal(a.weights, b.weights) for a, b in zip(whole.lines, resumed.lines, strict=True))


def test_the_ancestral_flow_in_parts():
    """Divided and joined again it is the same, whatever the number of parts; with an embedding it is one part."""

    def program():
        mu, tau = (numpyro.sample(name, dist.Normal()) for name in ("mu", "tau"))
        with numpyro.plate("j", 4):
            theta = numpyro.sample("theta", dist.Normal(mu, jnp.exp(tau)))
            numpyro.sample("y", dist.Normal(theta, 0.5))

    simulations = cpe.simulate(cpe.Model(program, observed=["y"]), 50, key=KEY)
    graph = cpe.Model(program, observed=["y"]).graph
    flow = cpe.CPE().build(program, graph, simulations, key=KEY)
    rows = flow.prepare({name: jnp.asarray(x) for name, x in simulations.items()})
    for most, expected in ((1, [3]), (2, [1, 2]), (3, [1, 1, 1]), (8, [1, 1, 1])):
        parts = flow.divide(rows, most)
        assert sorted(sum(len(g.which.numbers) for g in part.groups) for part, _ in parts) == expected
        assert all(z.shape[1] == len(g.which.numbers) for p, r in parts for z, g in zip(r["z"], p.groups, strict=True))
        joined = flow.joined([part for part, _ in parts])
        assert eqx.tree_equal(joined, flow)
    embedded = cpe.CPE(embed={"y": cpe.MLPEmbedding((), key=KEY)}).build(program, graph, simulations, key=KEY)
    assert len(embedded.divide(rows, 2)) == 1


def test_a_loss_that_is_not_a_number_is_an_error():
    rows = line_rows()
    with pytest.raises(FloatingPointError, match="The validation loss of epoch 1 is nan"):
        trained(rows={**rows, "y": rows["y"] * jnp.nan})


# ---- Ctrl-C


def interrupted_at(epoch, how):
    def progress(at, epochs, history):
        if at == epoch:
            how()

    return progress


def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # the handler runs between two instructions


def raising():
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", [press, raising])
def test_ctrl_c_returns_the_best_so_far(how):
    before = signal.getsignal(signal.SIGINT)
    _, whole = trained()
    flow, history = trained(progress=interrupted_at(4, how))
    assert history.validation == whole.validation[:4]
    assert history.stopped == "interrupted after 4 epochs"
    assert history.best == min(history.validation)
    assert np.isfinite(flow.weights).all()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with _train.Interrupt() as interrupt:
        interrupt.wait_for_epochs()
        press()
        assert interrupt.came
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_compiling_ends_at_once(monkeypatch):
    compile_each = _train.compile_each

    def interrupted(*args):
        press()
        return compile_each(*args)

    monkeypatch.setattr(_train, "compile_each", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trained()
    assert signal.getsignal(signal.SIGINT) is before


class Pressed:
    def __del__(self):
        press()


@pytest.mark.parametrize("where", ["prepare", "train"])
def test_ctrl_c_that_python_loses_before_the_loop_is_raised_again(monkeypatch, where):
    """An exception of a handler is lost where Python calls it in a destructor, or while it collects garbage."""
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    inner = getattr(_fit, where)

    def interrupted(*args, **kwargs):
        Pressed()
        return inner(*args, **kwargs)

    monkeypatch.setattr(_fit, where, interrupted)
    rng = np.random.default_rng(0)
    simulations = {"a": np.abs(rng.normal(size=50)), "y": rng.normal(size=50)}
    with pytest.raises(KeyboardInterrupt):
        cpe.fit(
            cpe.Model(single, observed=["y"]), simulations, key=KEY, method=TINY, training=cpe.Training(max_epochs=1)
        )
    assert [type(each.exc_value) for each in lost] == [KeyboardInterrupt]


def test_a_process_that_ignores_ctrl_c_goes_on_doing_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _, history = trained(progress=interrupted_at(4, press))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert history.stopped == "end of the schedule"


def test_after_ctrl_c_a_checkpoint_goes_on(tmp_path):
    whole, _ = trained()
    trained(checkpoint=tmp_path, progress=interrupted_at(4, press))
    flow, history = trained(checkpoint=tmp_path)
    assert np.array_equal(flow.weights, whole.weights)
    assert history.stopped == "end of the schedule"
    assert len(history.train) == 30


# ---- checkpoints


class Crash(Exception):
    pass


def crash():
    raise Crash


def test_a_crash_at_any_epoch_changes_nothing(tmp_path):
    settings = replace(SHORT, schedule="constant", patience=4, max_epochs=100)  # with a second phase
    whole, expected = trained(settings)
    epochs = len(expected.train)
    assert expected.cooling is not None
    around = {1, expected.cooling, expected.cooling + 1, epochs, *random.Random(0).sample(range(1, epochs), 3)}
    for epoch in sorted(around):
        with pytest.raises(Crash):
            trained(settings, checkpoint=tmp_path, every=0.0, progress=interrupted_at(epoch, crash))
    flow, history = trained(settings, checkpoint=tmp_path)
    assert np.array_equal(flow.weights, whole.weights)
    assert replace(history, seconds=0.0) == replace(expected, seconds=0.0)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_fit
flow, history = test_fit.trained(
    test_fit.replace(test_fit.SHORT, max_epochs=400, patience=400, steps=10**6),
    checkpoint=Path({folder!r}), every=0.0, progress=lambda *_: print(".", end="", flush=True),
)
print(flow.weights.tobytes().hex(), [x.hex() for x in history.validation])
"""


def test_killed_at_any_moment_and_resumed_equals_uninterrupted(tmp_path):
    tests = str(Path(__file__).parent)

    def start(folder):
        command = [sys.executable, "-c", SCRIPT.format(tests=tests, folder=str(folder))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def finish(folder):
        with start(folder) as process:
            out = process.communicate()[0].lstrip(".")
        assert process.returncode == 0
        return out

    folder = tmp_path / "killed"
    with start(folder) as process:
        while process.stdout.read(1) != ".":  # it has begun; then at some moment, perhaps while it writes
            assert process.poll() is None
        time.sleep(0.15)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    resumed = finish(folder)
    assert not list(folder.glob(".*.part"))  # what was half written is gone
    assert resumed == finish(tmp_path / "whole")


def test_a_half_written_checkpoint_is_never_read(tmp_path, monkeypatch):
    whole, _ = trained()
    trained(checkpoint=tmp_path, every=0.0, progress=interrupted_at(4, press))
    # The process dies while it writes the next one.
    (tmp_path / ".checkpoint.safetensors.abc.part").write_bytes(b"half")

    def replace_fails(*_):
        raise Crash

    monkeypatch.setattr(Path, "replace", replace_fails)
    with pytest.raises(Crash):
        trained(checkpoint=tmp_path, every=0.0)
    monkeypatch.undo()
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint.safetensors"]
    flow, _ = trained(checkpoint=tmp_path)
    assert np.array_equal(flow.weights, whole.weights)


def test_a_damaged_checkpoint_is_an_error(tmp_path):
    trained(checkpoint=tmp_path, every=0.0, progress=interrupted_at(4, press))
    file = tmp_path / "checkpoint.safetensors"
    content = file.read_bytes()
    rng = random.Random(0)
    for _ in range(30):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"checkpoint\.safetensors (is truncated, altered|was altered)"):
            trained(checkpoint=tmp_path)
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="is truncated, altered"):
        trained(checkpoint=tmp_path)


def test_a_finished_run_is_not_trained_again(tmp_path):
    flow, history = trained(checkpoint=tmp_path)
    again, same = trained(checkpoint=tmp_path, progress=interrupted_at(1, crash))
    assert np.array_equal(flow.weights, again.weights)
    assert same == history


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": replace(SHORT, learning_rate=0.1)}, r"learning_rate was 0\.05, now 0\.1"),
        (
            {"settings": replace(SHORT, batch_size=25, average=False)},
            "batch_size was 50, now 25; average was True, now F",
        ),
        ({"key": jax.random.key(7)}, r"key was \[0, 0\], now \[0, 7\]"),
        ({"rows": line_rows(400)}, "it had 500 simulations, now 400"),
        ({"rows": line_rows(seed=1)}, "the simulations are others"),
        ({"start": 1.0}, "the networks are others"),
        ({"fingerprint": "other"}, "the program has another graph"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    trained(replace(SHORT, max_epochs=30), checkpoint=tmp_path, progress=interrupted_at(1, press))
    with pytest.raises(ValueError, match=rf"checkpoint in .* belongs to another run: .*{message}.*Give another folder"):
        trained(checkpoint=tmp_path, **change)


# ---- options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            (name, value)
            for name in ("batch_size", "max_epochs", "steps", "patience")
            for value in (0, -1, 2.5, "9", True)
        ),
        *(("learning_rate", value) for value in (0, -1e-3, math.nan, math.inf, "fast")),
        *(("validation", value) for value in (0, 1, -0.1, 10, math.nan, "some")),
        *(("weight_decay", value) for value in (-1, math.nan, math.inf, "much")),
        *(("schedule", value) for value in ("linear", None, 3)),
    ],
)
def test_wrong_options(unchecked, option, value):
    with pytest.raises(ValueError, match=rf"^{option} .*found {value!r}"):
        Training(**{option: value})


def test_numpy_numbers_are_numbers(unchecked):
    settings = Training(batch_size=np.int64(10), learning_rate=np.float32(0.5))
    assert type(settings.batch_size) is int
    assert type(settings.learning_rate) is float


def test_nothing_left_to_train_on():
    with pytest.raises(ValueError, match=r"validation=0\.99 of 30 simulations leaves none to train on"):
        trained(replace(SHORT, validation=0.99), rows=line_rows(30))


# ---- fit: a whole flow


SMALL = cpe.CPE(width=16, depth=1, hidden=16, components=2)


def single():
    a = numpyro.sample("a", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(a, 0.5))


TINY = cpe.CPE(width=4, depth=1, hidden=4, components=1)


@pytest.mark.slow
def test_two_fits_in_threads_are_as_each_alone():
    """NumPyro has one stack of handlers for all threads; here both are in the middle of a program at the same time."""

    def slow(scale):
        a = numpyro.sample("a", dist.Normal(0.0, scale))
        time.sleep(0.01)
        b = numpyro.sample("b", dist.Normal(a, 1.0))
        time.sleep(0.01)
        numpyro.sample("x", dist.Normal(b, 1.0))

    rng = np.random.default_rng(0)
    simulations = {name: rng.normal(size=50) for name in ("a", "b", "x")}

    def weights(scale):
        model = cpe.Model(slow, observed=["x"], args=(scale,))
        training = cpe.Training(max_epochs=2)
        posterior = cpe.fit(model, simulations, key=KEY, method=TINY, training=training, progress=False)
        return [np.asarray(x) for x in jax.tree.leaves(posterior.flow) if eqx.is_array(x)]

    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(weights, (1.0, 2.0)))
    for scale, found in zip((1.0, 2.0), together, strict=True):
        alone = weights(scale)
        assert len(alone) == len(found)
        assert all(np.array_equal(a, b) for a, b in zip(alone, found, strict=True))


def test_fit_goes_on_after_ctrl_c_to_the_same_posterior(tmp_path, capsys, monkeypatch):
    """And so the same key gives the same posterior, and what was interrupted is the best so far, and said."""

    def press_in_the_third(self, epoch, epochs, history):
        shown(self, epoch, epochs, history)
        if epoch == 3:
            press()

    simulations = cpe.simulate(cpe.Model(single, observed=["y"]), 400, key=KEY)
    options = {"method": SMALL, "key": KEY, "training": cpe.Training(learning_rate=1e-2, max_epochs=6)}
    whole = cpe.fit(single, simulations, **options)
    assert "epoch" not in capsys.readouterr().err  # there is no terminal, so no progress bar
    assert repr(whole).startswith("Posterior(a | y; CPE, ")
    assert isinstance(whole.history, History)
    assert whole.history.train[-1] < whole.history.train[0] - 0.05
    assert (whole.n_simulations, len(whole.history.train)) == (400, 6)

    with monkeypatch.context() as patch:
        shown = _progress.Bar.update
        patch.setattr(_progress.Bar, "update", press_in_the_third)
        part = cpe.fit(single, simulations, **options, checkpoint=tmp_path, progress=True)
    assert part.history.validation == whole.history.validation[:3]
    assert part.history.stopped == "interrupted after 3 epochs"
    said = capsys.readouterr().err
    assert "epoch 3/6" in said
    assert "validation" in said
    assert "Training was interrupted after 3 epochs; the best so far is returned." in said

    resumed = cpe.fit(single, simulations, **options, checkpoint=tmp_path)
    assert replace(resumed.history, seconds=0.0) == replace(whole.history, seconds=0.0)
    for one, other in zip(*(jax.tree.leaves(eqx.filter(p.flow, eqx.is_array)) for p in (resumed, whole)), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e2, 1e-2])
def test_heavy_tails_do_not_ruin_training(scale):
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("i", 5):
            numpyro.sample("y", dist.StudentT(3.0, scale * a, 0.3 * scale))

    simulations = cpe.simulate(cpe.Model(program, observed=["y"]), 6000, key=KEY)
    method = cpe.CPE(width=32, depth=2, hidden=32, components=4)
    posterior = cpe.fit(program, simulations, key=KEY, method=method, training=cpe.Training(max_epochs=30))
    y = cpe.simulate(cpe.Model(program, observed=["y"]), 20, key=jax.random.key(9))["y"]
    draws = posterior.sample(2000, given={"y": y}, key=KEY).posterior["a"].values[0]
    grid = np.linspace(-4, 4, 4001)[:, None]
    log_p = norm.logpdf(grid) + student.logpdf(y.T[:, None] / scale, 3, grid, 0.3).sum(0)
    p = np.exp(log_p - log_p.max(0))
    p /= p.sum(0)
    mean = (grid * p).sum(0)
    sd = np.sqrt(((grid - mean) ** 2 * p).sum(0))
    assert np.median(np.abs(draws.mean(0) - mean) / sd) < 0.3
    assert 0.8 < np.median(draws.std(0) / sd) < 1.25


# ---- fit: what it refuses


def groups(size=3):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("group", size):
        theta = numpyro.sample("theta", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(mu + theta, 0.5))


@pytest.fixture(scope="module")
def simulations():
    return cpe.simulate(cpe.Model(groups, observed=["y"]), 400, key=KEY)


def other_family(size=3):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("group", size):
        theta = numpyro.sample("theta", dist.Exponential(1.0))
        numpyro.sample("y", dist.Normal(mu + theta, 0.5))


BAD = [
    (lambda s: {}, "have no site ['mu', 'theta', 'y']"),
    (lambda s: {"mu": s["mu"], "y": s["y"]}, "have no site ['theta'], but the program has ['mu', 'theta', 'y']"),
    (lambda s: {**s, "z": s["mu"]}, "have the sites ['z'], but the program has not. They may be of another program"),
    (lambda s: {k: v[:0] for k, v in s.items()}, "There are 0 simulations; at least 20 are needed"),
    (lambda s: {k: v[:19] for k, v in s.items()}, "There are 19 simulations"),
    (
        lambda s: {**s, "y": s["y"][:, :2]},
        "'y'] has shape (400, 2), but 400 simulations of site 'y' have shape (400, 3) (plate 'group' of size 3)",
    ),
    (lambda s: {**s, "y": s["y"][:50]}, "simulations['y'] has shape (50, 3), but 400 simulations"),
    (lambda s: {**s, "mu": 1.0}, "simulations['mu'] has shape (), but 0 simulations of site 'mu' have shape (0,)"),
    (lambda s: {**s, "mu": ["a"] * 400}, "simulations['mu'] is not an array of numbers: it has type <U1"),
    (
        lambda s: {**s, "y": s["y"] * np.nan},
        "400 of 400 simulations (100.0 %) are not finite; the first bad site is 'y'",
    ),
    (lambda s: {**s, "theta": -s["theta"]}, "400 of 400 simulations have parameters outside the prior's support, the "),
]


@pytest.fixture
def untrained(monkeypatch):
    """Training must not start."""

    def fail(*args, **kwargs):
        raise AssertionError("training started")

    monkeypatch.setattr(_fit, "train", fail)


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_simulations(simulations, untrained, change, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        cpe.fit(cpe.Model(groups, observed=["y"]), change(simulations), method=SMALL, key=KEY)
    assert message in str(caught.value)


def test_simulations_of_another_program_with_the_same_shapes(simulations, untrained):
    with pytest.raises(
        ValueError, match=r"simulations are of another program: site 'theta' has distribution Exponential"
    ):
        cpe.fit(other_family, simulations, method=SMALL, key=KEY)
    with pytest.raises(ValueError, match=r"\(400, 4\) \(plate 'group' of size 4\)"):
        cpe.fit(cpe.Model(groups, args=(4,)), simulations, method=SMALL, key=KEY)


def test_wrong_names(simulations, untrained):
    with pytest.raises(ValueError, match="observed names 'x', but the program has only the sites"):
        cpe.fit(cpe.Model(groups, observed=["x"]), simulations, method=SMALL, key=KEY)
    embed = {"z": cpe.MLPEmbedding((3,), key=KEY)}
    with pytest.raises(ValueError, match=r"embed names 'z', but the data sites are \['y'\]"):
        cpe.fit(groups, simulations, method=cpe.CPE(embed=embed), key=KEY)


def test_wrong_options_of_a_method():
    for option in ("width", "depth", "hidden", "components", "members"):
        with pytest.raises(ValueError, match=f"{option} must be a whole number of at least 1, found 0"):
            cpe.CPE(**{option: 0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": 0}, "key must be one JAX key, as jax.random.key(0) makes it; found 0."),
        (
            {"method": cpe.CPE},
            "method must be a method with its options, as cpe.CPE(); found <class 'cpejax.flows.ancestral",
        ),
        ({"method": "CPE"}, "method must be a method with its options, as cpe.CPE(); found 'CPE'."),
        ({"training": {"steps": 5}}, "training must be cpe.Training(...), found {'steps': 5}."),
        ({"simulations": [1, 2]}, "simulations must be a dict of arrays, as cpe.simulate returns; found list."),
        ({"simulations": []}, "simulations must be a dict of arrays, as cpe.simulate returns; found list."),
    ],
    ids=lambda x: str(x)[:30],
)
def test_arguments_of_the_wrong_type(unchecked, simulations, untrained, options, message):
    arguments = {"simulations": simulations, "key": KEY, **options}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        cpe.fit(cpe.Model(groups, observed=["y"]), **arguments)
