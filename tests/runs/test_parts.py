"""Simulations in parts by commands of their own, and workers of the command."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from cpejax.runs import stages
from cpejax.runs.cli import app
from cpejax.runs.job_parts import listed
from cpejax.util.files import load_arrays

MODEL = """
import numpy as np, numpyro, numpyro.distributions as dist
import cpejax as cpe
import instrument

observed = ["y"]

def program():
    mu = numpyro.sample("mu", dist.Beta(2.0, 1.0))
    numpyro.sample("y", cpe.Simulator(instrument.measure, mu, event_shape=(2,), host=True))
"""
INSTRUMENT = """
def measure(rng, mu):
    return mu + rng.normal(size=2)
"""


def cpejax(*words, code=0) -> str:
    result = CliRunner().invoke(app, [str(w) for w in words])
    assert result.exit_code == code, f"{result.exit_code}: {result.output} {result.exception!r}"
    return " ".join(result.output.split())


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "instrument.py").write_text(INSTRUMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def part(number, *more, of=3, code=0):
    words = ("simulate", "model.py", "--out", "run", "--simulations", 20, "--part", f"{number}/{of}")
    return cpejax(*words, *more, code=code)


def simulations(folder):
    with np.load(folder / "simulations.npz") as file:
        return {name: file[name] for name in file}


def test_the_next_stage_takes_the_parts_that_are_there(here, monkeypatch):
    cpejax("simulate", "model.py", "--out", "whole", "--simulations", 20, "--workers", 1)
    whole = simulations(here / "whole")
    assert "run has none" not in part(1)
    assert "Part 3 of 3, 7 simulations, in" in part(3, "--workers", 1)
    assert "Part 3 of 3, from before" in part(3)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "fit", interrupt)
    out = cpejax("fit", "model.py", "--out", "run", code=130)
    assert "1 part is missing of 3: 2. The others are taken; these may come later." in out
    rows = [*range(6), *range(13, 20)]
    for name, x in simulations(here / "run").items():
        np.testing.assert_array_equal(x, whole[name][rows])
    # More come later, while another process is at work in the folder or not, and twice is as good as once.
    part(2)
    path = here / "run" / "parts" / "part-2-of-3.safetensors"
    arrays, about = load_arrays(path)
    path.unlink()
    part(2)
    again, about_again = load_arrays(path)
    assert about_again == about
    assert all(np.array_equal(again[name], x) for name, x in arrays.items())
    assert "20 simulations, parts 1-3 of 3," in cpejax("fit", "model.py", "--out", "run", code=130)
    for name, x in simulations(here / "run").items():
        np.testing.assert_array_equal(x, whole[name])
    assert sorted(p.name for p in (here / "run" / "parts").iterdir()) == [
        f"part-{i}-of-3.safetensors" for i in (1, 2, 3)
    ]
    # What was trained stays as it is until it is said otherwise.
    path.unlink()
    record = json.loads((here / "run" / "run.json").read_text())
    record["stages"]["fit"] = {"inputs": record["begun"].pop("fit"), "files": {}}
    (here / "run" / "run.json").write_text(json.dumps(record))
    out = cpejax("fit", "model.py", "--out", "run", code=1)
    assert "Parts 1-3 of 3 were there when the model was trained, 1, 3 are now: --restart trains on all of them" in out
    assert "parts 1-3 of 3, from before" in cpejax("simulate", "model.py", "--out", "run", "--restart")


def test_parts_do_not_mix(here):
    part(1)
    out = cpejax("simulate", "model.py", "--out", "run", "--simulations", 30, "--part", "2/3", code=1)
    assert "run has parts of simulations that were begun otherwise: simulations was 20, is 30. Give the same" in out
    assert "parts was 3, is 4" in part(1, of=4, code=1)
    (here / "model.py").write_text(MODEL.replace("1.0)", "3.0)"))
    assert "begun with another program: site 'mu' has another prior now" in part(2, code=1)
    (here / "model.py").write_text(MODEL)
    (here / "run" / "parts" / "part-1-of-3.safetensors").rename(here / "run" / "parts" / "part-2-of-3.safetensors")
    assert "part-2-of-3.safetensors is a part of another run" in part(2, code=1)
    for wrong in ("4/3", "0/3", "1", "a/b"):
        out = cpejax("simulate", "model.py", "--out", "run", "--part", wrong, code=1)
        assert f"--part {wrong}: expected the number of a part, from 1, and how many there are, as in 3/100." in out
    assert "20 simulations cannot have 50 parts" in cpejax(
        "simulate", "model.py", "--out", "new", "--simulations", 20, "--part", "1/50", code=1
    )


@pytest.mark.slow
def test_workers_of_the_command(here):
    cpejax("simulate", "model.py", "--out", "run", "--simulations", 20, "--workers", 2)
    cpejax("simulate", "model.py", "--out", "new", "--simulations", 20, "--workers", 1)
    one, other = simulations(here / "run"), simulations(here / "new")
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_workers_that_the_command_does_not_know(here):
    for wrong in ("0", "eight", "slurm:x", "pbs:3"):
        out = cpejax("simulate", "model.py", "--out", "bad", "--workers", wrong, code=1)
        assert f"--workers {wrong}: expected a number of processes on this machine" in out


def test_slurm_without_a_configuration(here):
    out = cpejax("simulate", "model.py", "--out", "new", "--simulations", 20, "--workers", "slurm", code=1)
    assert "--workers slurm: dask's configuration of a job has no cores and no memory" in out
    assert "~/.config/dask/jobqueue.yaml" in out


def test_numbers_in_words():
    assert listed([1, 2, 3, 5, 7, 8]) == "1-3, 5, 7-8"
