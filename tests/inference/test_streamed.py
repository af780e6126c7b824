"""Simulations that stay in their folder: each read once a pass, a bounded number at a time, to the same result."""

import json
import math

import equinox as eqx
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import chisquare, norm

import cpejax as cpe
from cpejax.inference import progress, streamed
from cpejax.program import opened as _opened
from cpejax.util.files import load_arrays, pack_arrays

KEY = jax.random.key(0)
TINY = cpe.CPE(width=8, depth=1, hidden=8, components=2)
N = 610


def program():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.sample("y", cpe.Simulator(lambda rng, mu: 1e6 + mu + rng.normal(size=4), mu, event_shape=(4,), host=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("sims")
    cpe.simulate(program, N, key=KEY, checkpoint=found)
    return found


@pytest.fixture
def small(monkeypatch):
    """Blocks of a hundred, in slices of six."""
    monkeypatch.setattr(streamed, "READ_WHOLE", 0)
    monkeypatch.setattr(streamed, "BLOCK_ROWS", 100)
    monkeypatch.setattr(streamed, "SLICES", 16)


def blocks_of(folder):
    found = streamed.Blocks(cpe.open_simulations(folder), cpe.Model(program).graph, key=KEY)
    return found, found.sample()


def test_each_simulation_is_read_once_a_pass(folder, small):
    blocks, sample = blocks_of(folder)
    whole = cpe.open_simulations(folder)
    everything = {name: whole[name] for name in whole}
    assert len(blocks.sampled) == 100
    assert all(np.array_equal(x, everything[name][blocks.sampled]) for name, x in sample.items())
    held_out = blocks.sampled[::7]
    blocks.hold_out(held_out, batch=10)
    assert (blocks.count, blocks.rows) == (5, 110)
    passes = [[blocks.numbers(epoch) for epoch in range(5 * p, 5 * p + 5)] for p in range(3)]
    for found in passes:
        assert {len(block) for block in found} == {110}
        numbers = np.concatenate(found)
        assert len(np.unique(numbers)) == len(numbers)
        assert not np.isin(numbers, held_out).any()
        assert len(numbers) > N - len(held_out) - 5 * 10  # but for what fills no batch
        for block in found:
            read = blocks.read(block)
            assert all(np.array_equal(x, everything[name][block]) for name, x in read.items())
    assert not np.array_equal(*passes[:2])
    assert len(np.unique(np.concatenate(np.concatenate(passes)))) == N - len(held_out)  # none is left out for ever
    again, _ = blocks_of(folder)
    again.hold_out(held_out, batch=10)
    assert np.array_equal(again.numbers(7), passes[1][2])  # whatever was read before


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (7, 100), (100, 7), (300, 250), (609, 40), (10_000, 700)])
def test_any_size_of_a_block(folder, small, monkeypatch, rows, batch):
    monkeypatch.setattr(streamed, "BLOCK_ROWS", rows)
    blocks, _ = blocks_of(folder)
    blocks.hold_out(blocks.sampled[: len(blocks.sampled) // 4], batch)
    found = [blocks.numbers(epoch) for epoch in range(blocks.count)]
    assert {len(block) for block in found} == {blocks.rows}
    assert blocks.rows % batch == 0 or blocks.count == 1
    numbers = np.concatenate(found)
    assert len(np.unique(numbers)) == len(numbers)


class Reads:
    """Counts the values that are read, in all and at a time."""

    def __init__(self, monkeypatch):
        self.total, self.most, inner = 0, 0, _opened.OpenSimulations.rows

        def rows(opened, name, start, stop):
            found = inner(opened, name, start, stop)
            self.total, self.most = self.total + found.size, max(self.most, found.size)
            return found

        monkeypatch.setattr(_opened.OpenSimulations, "rows", rows)


def same(one, other):
    pairs = zip(*(jax.tree.leaves(eqx.filter(p.flow, eqx.is_array)) for p in (one, other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_fit_reads_blocks_and_resumes(folder, small, monkeypatch, tmp_path, capsys, unchecked):
    options = {"method": TINY, "training": cpe.Training(max_epochs=2, batch_size=25, learning_rate=1e-2), "key": KEY}
    reads = Reads(monkeypatch)
    whole = cpe.fit(program, cpe.open_simulations(folder), **options)
    said = " ".join(capsys.readouterr().err.split())
    assert "an epoch is a block of 100, and 5 epochs are a pass." in said
    epochs = len(whole.history.train)
    assert epochs == 2 * 5
    assert whole.history.train[-1] < whole.history.train[0]
    assert whole.n_simulations == N
    assert reads.most <= 6 * 4
    assert reads.total < (epochs + 1) * 5 * 110 + 5 * 100
    assert whole.settings == options["training"].completed(TINY.training)

    shown = progress.Bar.update

    def crash_in_the_fourth(self, epoch, epochs, history):
        shown(self, epoch, epochs, history)
        if epoch == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress.Bar, "update", crash_in_the_fourth)
        part = cpe.fit(program, cpe.open_simulations(folder), **options, checkpoint=tmp_path)
    assert part.history.stopped == "interrupted after 4 epochs"
    resumed = cpe.fit(program, cpe.open_simulations(folder), **options, checkpoint=tmp_path)
    assert resumed.history.validation == whole.history.validation
    assert same(whole, resumed)


def test_a_folder_that_fits_is_read_and_gives_the_same(folder):
    options = {"method": TINY, "training": cpe.Training(max_epochs=1), "key": KEY}
    simulations = cpe.simulate(program, N, key=KEY)
    one, other = (cpe.fit(program, sims, **options) for sims in (simulations, cpe.open_simulations(folder)))
    assert same(one, other)
    assert one.history.validation == other.history.validation


def altered(folder, to, change):
    """A copy of a folder whose sites are changed, part by part."""
    for path in folder.iterdir():
        arrays, about = load_arrays(path)
        change(arrays)
        (to / path.name).write_bytes(pack_arrays(arrays, about))
    return cpe.open_simulations(to)


def test_what_is_not_finite_is_left_out(folder, small, tmp_path, capsys):
    spoiled = []

    def spoil(arrays):
        if len(list(tmp_path.iterdir())) % 3 == 0:
            arrays["site.y"][0, 1] = np.nan
            spoiled.append(1)

    opened, bad = altered(folder, tmp_path, spoil), len(spoiled)
    found = cpe.fit(program, opened, key=KEY, method=TINY, training=cpe.Training(max_epochs=3, batch_size=25))
    said = " ".join(capsys.readouterr().err.split())
    assert np.isfinite(found.history.train).all()
    assert f"{bad} of the simulations that were read are not finite, and left out." in said
    assert found.n_simulations == N - bad


def test_folders_that_are_refused(folder, small, tmp_path, unchecked):
    def other():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(lambda rng, mu: mu, mu + 1.0, event_shape=(4,), host=True))

    opened = cpe.open_simulations(folder)
    with pytest.raises(ValueError, match="emulate=True, but the simulations are read block by block"):
        cpe.fit(program, opened, key=KEY, emulate=True)
    with pytest.raises(ValueError, match="The simulations are of another program: site 'y'"):
        cpe.fit(other, opened, key=KEY)

    def third():
        mu = numpyro.sample("mu", dist.Laplace(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(lambda rng, mu: mu, mu, event_shape=(4,), host=True))

    with pytest.raises(ValueError, match="are of another program: its sites, their shapes, families or"):
        cpe.fit(third, opened, key=KEY)

    def spoil(arrays):
        arrays["site.y"][:3, 1] = np.nan

    blocks = streamed.Blocks(altered(folder, tmp_path, spoil), cpe.Model(program).graph, key=KEY)
    blocks.hold_out(blocks.sampled[:9], 10)
    with pytest.raises(ValueError, match=r"simulations of .* are not finite, the first is number \d+; more than 10 %"):
        streamed.StreamedRows(blocks, None, {})(0)


def test_a_part_of_another_run_in_the_folder(folder, tmp_path):
    for number, path in enumerate(sorted(folder.iterdir())):
        arrays, about = load_arrays(path)
        run = json.loads(about["run"]) | ({"key": [0, 1]} if number == 5 else {})
        (tmp_path / path.name).write_bytes(pack_arrays(arrays, about | {"run": json.dumps(run)}))
    with pytest.raises(ValueError, match="has parts of several runs"):
        cpe.open_simulations(tmp_path)


@pytest.mark.slow
def test_the_posterior_of_a_normal_mean(tmp_path, monkeypatch):
    """Ranks of the truth are uniform, and its density is nearly that of the exact posterior, N(Σy/5, 1/5)."""
    cpe.simulate(program, 20_000, key=KEY, checkpoint=tmp_path)
    monkeypatch.setattr(streamed, "READ_WHOLE", 0)
    monkeypatch.setattr(streamed, "BLOCK_ROWS", 4000)
    training = cpe.Training(steps=6000)
    posterior = cpe.fit(program, cpe.open_simulations(tmp_path), key=KEY, training=training)
    assert posterior.emulator is None
    new = cpe.simulate(program, 1000, key=jax.random.key(1))
    draws = posterior.sample(99, given={"y": new["y"]}, key=KEY).posterior["mu"].values.reshape(99, 1000)
    ranks = (draws < new["mu"]).sum(0)
    assert chisquare(np.bincount(ranks // 5, minlength=20)).pvalue > 1e-4
    exact = norm((new["y"] - 1e6).sum(1) / 5, math.sqrt(0.2)).logpdf(new["mu"])
    pairs = zip(new["mu"], new["y"], strict=True)
    log_q = np.array([posterior.log_prob({"mu": [mu]}, given={"y": y})[0] for mu, y in pairs])
    gain = exact - norm.logpdf(new["mu"])
    assert (exact - log_q).mean() < 0.05 * gain.mean()
