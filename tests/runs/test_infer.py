"""From a model file and data to a report: stages, files, resuming after an interruption, and every failure."""

import errno
import html.parser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import arviz_stats.base.stats_utils
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import xarray as xr
from typer.testing import CliRunner

import cpejax as cpe
from cpejax.inference import progress
from cpejax.inference.registry import METHODS
from cpejax.runs import stages
from cpejax.runs.cli import app
from cpejax.runs.folder import RunFolder
from cpejax.runs.model_file import load_model
from cpejax.util import files

MODEL = """
import jax, numpyro, numpyro.distributions as dist
import cpejax as cpe

method = cpe.CPE(width=8, depth=1, hidden=8, components=2)
observed = ["y"]

def program():
    mu = numpyro.sample("mu", dist.Normal(0.0, {spread}))
    with numpyro.plate("<group> & co", 3):
        numpyro.sample("y", dist.Normal(mu, 1.0))
"""
HOST = """
import os, time
import numpy as np, numpyro, numpyro.distributions as dist
import cpejax as cpe

observed = ["y"]

def simulator(rng, mu):
    {body}
    return mu + rng.normal(size=2)

def program():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.sample("y", cpe.Simulator(simulator, mu, event_shape=(2,), host=True))
"""
DATA = {"y": [0.3, 1.2, -0.4]}
INFER = ("infer", "model.py", "--given", "data.json", "--truth", "truth.json", "--out", "run")
TINY = ("--simulations", 200, "--epochs", 3, "--draws", 1000, "--check-simulations", 60, "--seed", 5)


def cpejax(*words, code=0) -> str:
    result = CliRunner().invoke(app, [str(w) for w in words])
    assert result.exit_code == code, f"{result.exit_code}: {result.output} {result.exception!r}"
    return " ".join(result.output.split())  # lines are as long as the terminal is wide


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run, which no test changes, and what was printed.

    It was simulated by a command of its own, training was interrupted after the first epoch, and `infer` did the rest.
    """
    folder = tmp_path_factory.mktemp("done")
    (folder / "model.py").write_text(MODEL.format(spread=1.0))
    (folder / "data.json").write_text(json.dumps(DATA))
    (folder / "truth.json").write_text(json.dumps({"mu": 0.4}))
    plt.close("all")
    before = Path.cwd()
    os.chdir(folder)
    try:
        out = [cpejax("simulate", "model.py", "--out", "run", "--simulations", 200, "--seed", 5)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(progress.Bar, "update", interrupt)
            out.append(cpejax("fit", "model.py", "--out", "run", "--epochs", 3, code=130))
        assert Path("run", ".checkpoint", "checkpoint.safetensors").exists()
        out.append(cpejax(*INFER, *TINY))
    finally:
        os.chdir(before)
    return folder, out


@pytest.fixture
def here(done, tmp_path, monkeypatch):
    """A copy of the finished run, to work in."""
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- what comes out


def test_the_files_of_a_run(done):
    folder, _ = done
    files = sorted(str(p.relative_to(folder / "run")) for p in (folder / "run").rglob("*") if p.is_file())
    assert files == [
        ".lock",
        "check.json",
        "check_simulations.npz",
        "model/posterior.json",
        "model/weights.safetensors",
        "posterior.nc",
        "report.html",
        "run.json",
        "simulations.npz",
        "summary.csv",
    ]
    assert plt.get_fignums() == []


def test_files_hold_what_their_names_say(done):
    run = done[0] / "run"
    with np.load(run / "simulations.npz", allow_pickle=False) as file:
        assert {name: file[name].shape for name in file} == {"mu": (200,), "y": (200, 3)}
    with xr.open_datatree(run / "posterior.nc", engine="h5netcdf") as tree:
        assert tree.posterior["mu"].shape == (1, 1000)
        mean = float(tree.posterior["mu"].mean())
    table = pd.read_csv(run / "summary.csv", index_col="parameter")
    assert list(table.columns) == ["mean", "sd", "q05", "q25", "median", "q75", "q95"]
    assert table.loc["mu", "mean"] == pytest.approx(mean, rel=1e-4)
    check = json.loads((run / "check.json").read_text())
    assert check["simulated_observations"] == 60
    assert [f["check"] for f in check["findings"]][:2] == ["Ranks (SBC)", "Coverage"]
    assert [f["check"] for f in check["findings"]][3:6] == ["Use of the data", "Likelihood", "Held-out density"]
    assert check["density"].keys() == {"gain", "error", "regression", "p"}
    assert {"p given data", "given data"} <= check["calibration"][0].keys()


def test_the_terminal_shows_numbers_checks_and_what_to_open(done):
    out = done[1][-1]
    assert re.search(r"parameter mean sd 5 % 25 % median 75 % 95 % truth", out)
    assert re.search(r"mu( -?\d\.\d{2,3}){7} 0\.400? ", out)
    assert re.search(r"(ok|BAD) Ranks \(SBC\):", out)
    assert re.search(r"Open file://.*/run/report\.html", out)


def test_the_model_can_be_loaded_in_python(here):
    model = load_model(here / "model.py")
    posterior = cpe.load("run/model", model.model, method=model.method)
    assert posterior.n_simulations == 200
    assert len(posterior.history.train) == 3


# ---- resuming


def test_the_same_command_again_does_nothing(here):
    before = {p: p.stat().st_mtime_ns for p in (here / "run").rglob("*.n*")}
    out = cpejax(*INFER, *TINY)
    assert out.count("from before:") == 4
    assert {p: p.stat().st_mtime_ns for p in (here / "run").rglob("*.n*")} == before
    assert cpejax("infer", "model.py", "--out", "run").count("from before:") == 4  # also the files named then


def test_stages_one_by_one(here, done):
    simulated, interrupted, inferred = done[1]
    assert "200 simulations in" in simulated
    assert "Next: cpejax fit model.py --out run" in simulated
    assert (
        "Training was interrupted after 1 epochs. What was finished is kept in run: the same command resumes"
        in interrupted
    )
    assert "200 simulations, from before: run/simulations.npz" in inferred
    assert "weights, 3 epochs in" in inferred  # the first of them before the interruption
    assert "model, from before" not in inferred
    assert "from before: run/model Next: cpejax sample" in cpejax("fit", "model.py", "--out", "run")
    assert "1,000 draws, from before" in cpejax("sample", "model.py", "--given", "data.json", "--out", "run")
    assert "Checks and report, from before" in cpejax("check", *INFER[1:])


def test_simulating_that_was_interrupted(here, monkeypatch):
    monkeypatch.setattr(stages, "simulate", lambda *_, **__: interrupt())
    out = cpejax("simulate", "model.py", "--out", "new", code=130)
    assert "Interrupted. What was finished is kept in new: the same command resumes from there." in out
    assert json.loads((here / "new" / "run.json").read_text())["stages"] == {}


def test_simulations_on_the_host_resume_where_they_were(tmp_path):
    calls, stop = [], [35]

    def simulator(rng, mu):
        calls.append(mu)
        if len(calls) == stop[0]:
            raise RuntimeError("no licence")
        return mu + rng.normal()

    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(simulator, mu, host=True))

    options = {"key": jax.random.key(0), "checkpoint": tmp_path}
    with pytest.raises(
        RuntimeError, match=r"simulator 'simulator', called with \(.*\) raised RuntimeError: no licence"
    ):
        cpe.simulate(program, 100, **options)
    stop[0] = -1
    calls.clear()
    found = cpe.simulate(program, 100, **options)
    assert len(calls) == 100 - 34
    whole = cpe.simulate(program, 100, key=jax.random.key(0))
    np.testing.assert_array_equal(found["y"], whole["y"])
    with pytest.raises(ValueError, match="are of another run"):
        cpe.simulate(program, 100, key=jax.random.key(1), checkpoint=tmp_path)


COUNTED = """simulator.calls = getattr(simulator, 'calls', 0) + 1
    with open('calls', 'a') as file: file.write('.')
    if os.path.exists('stop') and simulator.calls > 30: raise OSError('no licence')"""


def test_simulating_resumes_with_the_options_it_was_begun_with(here, monkeypatch):
    (here / "host.py").write_text(HOST.format(body=COUNTED))
    (here / "pair.json").write_text('{"y": [0.0, 1.0]}')
    begun = ("infer", "host.py", "--given", "pair.json", "--out", "new", "--simulations", 60, "--seed", 3)
    (here / "stop").touch()
    assert "no licence" in failing(*begun, "--draws", 77)
    parts = sorted((here / "new" / ".simulate").iterdir())
    assert len(parts) == 15
    out = failing("simulate", "host.py", "--out", "new", "--simulations", 50)
    assert (
        "new has an unfinished stage 'simulate' that was begun otherwise: --simulations was 60, is 50. Resume it" in out
    )
    assert "--seed was 3, is 4" in failing("infer", *begun[1:4], "--out", "new", "--seed", 4)
    assert sorted((here / "new" / ".simulate").iterdir()) == parts
    # A damaged part is named, and is not said to be the model's fault.
    whole = parts[3].read_bytes()
    parts[3].write_bytes(whole[:-9] + b"x" * 9)
    out = failing("simulate", "host.py", "--out", "new")
    assert f"Error: {parts[3].relative_to(here)} was altered" in out
    assert "the stage 'simulate' cannot resume: --restart drops what it has done so far" in out
    parts[3].write_bytes(whole)
    # Killed when all is simulated but not recorded, nothing is lost.
    (here / "stop").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", interrupt)
        cpejax("simulate", "host.py", "--out", "new", code=130)
    calls = (here / "calls").stat().st_size
    assert calls == 31 + 30  # one failed
    out = cpejax("simulate", "host.py", "--out", "new")
    assert "60 simulations in" in out
    assert (here / "calls").stat().st_size == calls
    assert not (here / "new" / ".simulate").exists()
    options = json.loads((here / "new" / "run.json").read_text())["options"]
    assert [options[stage]["seed"] for stage in ("simulate", "fit", "sample", "check")] == [3, 3, 3, 3]
    assert options["sample"]["draws"] == 77
    assert options["sample"]["given"]["file"] == "pair.json"


def test_restart_drops_simulations_that_were_begun_and_says_so(here):
    (here / "host.py").write_text(HOST.format(body=COUNTED))
    (here / "stop").touch()
    for _ in range(2):
        failing("simulate", "host.py", "--out", "new", "--simulations", 60)
        (part,) = (here / "new" / ".simulate").glob("*000.safetensors")
        part.write_bytes(b"nothing")
    (here / "stop").unlink()
    assert "000000000.safetensors is truncated" in failing("simulate", "host.py", "--out", "new")
    out = cpejax("simulate", "host.py", "--out", "new", "--restart")
    assert "is truncated, altered, or not a safetensors file" in out
    assert "What the stage 'simulate' had done so far is dropped." in out
    assert "60 simulations in" in out


def test_training_resumes_with_the_options_it_was_begun_with(here, monkeypatch):
    checkpoint = here / "run" / ".checkpoint" / "checkpoint.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(progress.Bar, "update", interrupt)
        cpejax("fit", "model.py", "--out", "run", "--epochs", 4, "--restart", code=130)
    before = checkpoint.read_bytes()
    out = failing(*INFER, "--epochs", 5)
    assert "run has an unfinished stage 'fit' that was begun otherwise: --epochs was 4, is 5" in out
    (here / "model.py").write_text(MODEL.format(spread=1.0) + "# a comment\n")
    assert "the model file has changed since" in failing(*INFER)
    (here / "model.py").write_text(MODEL.format(spread=1.0))
    assert checkpoint.read_bytes() == before
    checkpoint.write_bytes(before[:-1])
    assert "Error: run/.checkpoint/checkpoint.safetensors " in failing("fit", "model.py", "--out", "run")
    checkpoint.write_bytes(before)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", interrupt)
        cpejax("fit", "model.py", "--out", "run", code=130)
    assert checkpoint.exists()  # nothing is deleted before the model is recorded
    assert "weights, 4 epochs in" in cpejax("fit", "model.py", "--out", "run")
    assert not checkpoint.exists()


def test_restart_leaves_a_damaged_checkpoint(here):
    checkpoint = here / "run" / ".checkpoint" / "checkpoint.safetensors"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"nothing")
    record = json.loads((here / "run" / "run.json").read_text())
    record["begun"]["fit"] = record["stages"].pop("fit")["inputs"]
    (here / "run" / "run.json").write_text(json.dumps(record))
    out = cpejax("fit", "model.py", "--out", "run", "--restart")
    assert "checkpoint.safetensors is truncated, altered, or not a safetensors file" in out
    assert "What the stage 'fit' had done so far is dropped." in out
    assert "weights, 3 epochs in" in out


def test_restart_drops_training_on_what_it_replaces(here):
    checkpoint = here / "run" / ".checkpoint" / "checkpoint.safetensors"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"some epochs")
    record = json.loads((here / "run" / "run.json").read_text())
    record["begun"]["fit"] = record["stages"].pop("fit")["inputs"]
    (here / "run" / "run.json").write_text(json.dumps(record))
    out = cpejax("simulate", "model.py", "--out", "run", "--seed", 6, "--restart")
    assert "What the stage 'fit' had done so far is dropped, since 'simulate' is made anew." in out
    assert not checkpoint.exists()
    assert json.loads((here / "run" / "run.json").read_text())["begun"] == {}


def test_without_a_number_of_simulations_new_ones_are_drawn_all_the_time(here):
    new = ("infer", "model.py", "--given", "data.json", "--out", "new")
    out = cpejax(*new, "--epochs", 2, "--draws", 100, "--refine", "no", "--check-simulations", 60)
    assert "2 epochs and 30,000 simulations in" in out
    assert "100 draws in" in out
    page = (here / "new" / "report.html").read_text()
    assert "cpejax infer model.py --given data.json --epochs 2 --draws 100 --refine no --check-simulations 60" in page
    assert cpejax(*new).count("from before:") == 4
    assert "'sometimes' is none of auto" in failing(*new, "--refine", "sometimes", code=2)


def test_a_seed_belongs_to_its_stage(here):
    sample = ("sample", "model.py", "--given", "data.json", "--out", "run")
    refined = "1,000 draws, refined by the program's own density in"
    assert refined in cpejax(*sample, "--seed", 9, "--restart")
    assert "--seed was 9, is 8" in failing(*sample, "--seed", 8)
    out = cpejax(*INFER)
    assert out.count("from before:") == 3  # simulations, model and draws; the report is of other draws
    page = (here / "run" / "report.html").read_text()
    assert "Seed 5 of simulate, 5 of fit, 9 of sample, 5 of check." in page
    assert "cpejax sample model.py --given data.json --draws 1000 --seed 9 --out run\ncpejax check" in page


def test_an_option_that_is_refused_is_not_remembered(here):
    failing("infer", "model.py", "--out", "run", "--draws", 5)
    (here / "other.json").write_text(json.dumps({"y": [0.0, 0.0, 0.0]}))
    failing("infer", "model.py", "--out", "run", "--given", "other.json")
    shutil.copytree("run", "again")
    cpejax("fit", "model.py", "--out", "again", "--epochs", 1, "--restart")
    for command in ("infer", "sample", "check"):
        out = failing(command, "model.py", "--out", "run", "--fit", "again")
        assert "run was made otherwise: the fitted model is not the same as then" in out
    assert cpejax("infer", "model.py", "--out", "run").count("from before:") == 4


def test_data_that_were_named_before_are_the_same(here):
    (here / "data.json").write_text(json.dumps({"y": [0.0, 0.0, 0.0]}))
    out = failing("infer", "model.py", "--out", "run")
    assert (
        "data.json is not the file that the run in run was begun with, or has changed since. Name the file with" in out
    )


def test_a_fitted_model_is_used_for_other_data(here):
    (here / "other.csv").write_text("y\n0.1\n0.0\n5.0\n")
    out = cpejax("sample", "model.py", "--given", "other.csv", "--fit", "run", "--out", "other", "--draws", 1000)
    assert "Model of" not in out
    assert not (here / "other" / "model").exists()
    assert "1,000 draws, from before" in cpejax("sample", "model.py", "--out", "other")  # --fit is remembered
    out = failing("infer", "model.py", "--given", "other.csv", "--fit", "run", "--out", "fourth", "--epochs", 3)
    assert "--epochs has no effect with the model of another run (--fit run): nothing is trained" in out
    assert "Note:" not in out
    (here / "model.py").write_text(MODEL.format(spread=1.0) + "# a comment\n")
    out = cpejax("sample", "model.py", "--given", "other.csv", "--fit", "run", "--out", "third", "--draws", 1000)
    assert "Note: the model file has changed since run was fitted. Sites, shapes and priors are the same" in out


def test_many_observations(here):
    (here / "many.json").write_text(json.dumps({"y": [[0.0, 0.1, 0.2], [3.0, 2.0, 2.5]]}))
    out = cpejax(
        *("infer", "model.py", "--given", "many.json", "--fit", "run", "--out", "many"),
        *("--draws", 1000, "--check-simulations", 60, "--seed", 5),
    )
    assert re.search(r"observation parameter mean", out)
    assert "60 simulations to check with, from before: run/check_simulations.npz" in out
    table = pd.read_csv(here / "many" / "summary.csv")
    assert table["observation"].tolist() == [0, 1]
    assert "There are 2 observations" in (here / "many" / "report.html").read_text()


def test_altered_simulations_are_made_again(here):
    (here / "run" / "simulations.npz").write_bytes(b"nothing")
    out = cpejax("simulate", "model.py", "--out", "run")
    assert "run/simulations.npz is missing or was altered: simulate is done again." in out
    assert "200 simulations in" in out
    assert "from before" in cpejax("fit", "model.py", "--out", "run")  # the same simulations as those it was trained on


def test_what_a_killed_process_leaves(here):
    (here / "new").mkdir()
    (here / "new" / ".lock").touch()
    (here / "new" / ".run.json.0123abcd.part").write_text('{"form')
    cpejax("simulate", "model.py", "--out", "new", "--simulations", 20)
    (here / "new" / ".simulate").mkdir()  # finished, but not removed
    (here / "new" / ".simulations.npz.0123abcd.part").touch()
    cpejax("simulate", "model.py", "--out", "new")
    assert sorted(p.name for p in (here / "new").iterdir()) == [".lock", "run.json", "simulations.npz"]


def test_what_another_process_has_finished_is_kept(here):
    run = RunFolder(here / "run", load_model(here / "model.py"))
    path = here / "run" / "run.json"
    record = json.loads(path.read_text())
    record["stages"]["simulate"]["seconds"] = 1234.5
    path.write_text(json.dumps(record))
    with run.locked():
        run.choose({"simulate": {"simulations": None, "seed": None}})
    assert json.loads(path.read_text())["stages"]["simulate"]["seconds"] == 1234.5


# ---- never silently mixed


def test_stages_verify_what_they_read(here):
    with np.load("run/simulations.npz") as file:
        arrays = dict(file)
    np.savez("run/simulations.npz", **{name: x[::-1] for name, x in arrays.items()})
    out = failing("fit", "model.py", "--out", "run", "--epochs", 4, "--restart")
    assert "run/simulations.npz is missing, or was altered after it was written. Make it again: cpejax simulate" in out
    about = here / "run" / "model" / "posterior.json"
    about.write_text(about.read_text() + "\n")
    sample = ("sample", "model.py", "--given", "data.json", "--draws", 10)
    assert "run/model/posterior.json is missing, or was altered" in failing(*sample, "--out", "run", "--restart")
    assert "--fit run: run/model/posterior.json is missing, or was" in failing(*sample, "--fit", "run", "--out", "new")


def test_stages_are_of_one_model(here):
    cpejax("simulate", "model.py", "--out", "new", "--simulations", 20)
    (here / "model.py").write_text(MODEL.format(spread=2.0))
    out = failing("fit", "model.py", "--out", "new", "--epochs", 1)
    assert "new was made otherwise: the model file has changed since" in out
    assert "cpejax simulate model.py --out new --restart" in out
    out = failing("sample", "model.py", "--given", "data.json", "--out", "run", "--draws", 10, "--restart")
    assert "run was made otherwise: the model file has changed since" in out


@pytest.mark.parametrize("name", ["spread.txt", "spread.npy", "spreads_of_a_test.py", "sub/spread.csv"])
def test_a_file_that_the_model_reads(here, name, monkeypatch):
    (here / "sub").mkdir()

    def write(spread):
        if name.endswith(".npy"):
            np.save(name, spread)
        else:
            Path(name).write_text(f"spread = {spread}\n" if name.endswith(".py") else f"{spread}\n")
        sys.modules.pop("spreads_of_a_test", None)

    source = {".py": "spreads_of_a_test.spread", ".npy": f"np.load('{name}')"}.get(
        Path(name).suffix, f"np.loadtxt('{name}')"
    )
    importing = "import spreads_of_a_test\n" if name.endswith(".py") else "import numpy as np\n"
    (here / "reader.py").write_text(importing + MODEL.format(spread=f"float({source})"))
    write(1.0)
    simulate = ("simulate", "reader.py", "--out", "new", "--simulations", 20)
    cpejax(*simulate)
    assert "from before" in cpejax(*simulate)
    record = json.loads((here / "new" / "run.json").read_text())
    hashes = record["stages"]["simulate"]["inputs"]["model"]
    assert sorted(hashes) == sorted(["the model file", "the program", name])
    write(1.5)
    assert f"new was made otherwise: {name}, which the model file reads, has changed since" in failing(*simulate)
    sys.modules.pop("spreads_of_a_test", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seed", 6), "run was made otherwise: --seed was 5, is 6. Give another --out, or --restart to replace the"),
        (("--simulations", 300), "run was made otherwise: --simulations was 200, is 300"),
        (("--epochs", 4), "run was made otherwise: --epochs was 3, is 4"),
        (("--draws", 5), "run was made otherwise: --draws was 1000, is 5"),
        (("--check-simulations", 50), "run was made otherwise: --check-simulations was 60, is 50"),
        (("--given", "other.json"), "run was made otherwise: the data are not the same as then"),
    ],
)
def test_a_run_with_other_inputs_is_an_error(here, words, message):
    (here / "other.json").write_text(json.dumps({"y": [0.0, 0.0, 0.0]}))
    before = (here / "run" / "run.json").read_text()
    assert message in cpejax(*INFER, *words, code=1)
    assert json.loads((here / "run" / "run.json").read_text())["stages"] == json.loads(before)["stages"]


def test_a_model_file_that_changed_is_an_error(here):
    (here / "model.py").write_text(MODEL.format(spread=2.0))
    assert "run was made otherwise: the model file has changed since" in cpejax(*INFER, code=1)


def test_restart_replaces_what_changed(here):
    out = cpejax("simulate", "model.py", "--out", "run", "--seed", 6, "--restart")
    assert "200 simulations in" in out
    assert set(json.loads((here / "run" / "run.json").read_text())["stages"]) == {"simulate", "simulate for checks"}


# ---- failures: one paragraph each, the right exit code, no traceback


def failing(*words, code=1) -> str:
    out = cpejax(*words, code=code)
    assert "Traceback" not in out
    assert code != 1 or len(re.findall(r"\bError: ", out)) == 1
    return out


BAD_DATA = {
    "missing.json": (None, "missing.json does not exist"),
    "broken.json": ('{"y": [1, 2', "broken.json is not JSON"),
    "site.json": (
        '{"z": [1, 2, 3]}',
        "site.json has 'z', which is not a site of the program; expected are 'y' of shape",
    ),
    "parameter.json": ('{"y": [1, 2, 3], "mu": 0}', "has 'mu', which is a parameter, not data"),
    "nothing.json": ("{}", r"nothing.json has no 'y'; expected are 'y' of shape (3,) (3 <group> & co)"),
    "shape.json": ('{"y": [1, 2]}', "shape.json: 'y' has shape (2,), but the program simulates 'y' of shape (3,)"),
    "nan.json": ('{"y": [1, NaN, 3]}', "nan.json: 1 of 3 values of 'y' are missing or infinite, the first at [1]"),
    "text.json": ('{"y": ["a", "b", "c"]}', "text.json: 'y' is not made of numbers: it holds the text 'a'"),
    "data.xlsx": ("", "data.xlsx ends in '.xlsx'; data are read from JSON (.json), CSV (.csv), npz (.npz), NetCDF"),
    "text.csv": ("y\n1\n2\nthree\n", "text.csv: row 4, column 'y' holds the text 'three', expected a number"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_used_are_told_before_anything_is_simulated(here, name):
    content, message = BAD_DATA[name]
    if content is not None:
        (here / name).write_text(content)
    assert message in failing("infer", "model.py", "--given", name, "--out", "new")
    assert not (here / "new" / "simulations.npz").exists()


def test_no_data_at_all(here):
    assert "There are no data: name a file with --given, or define `data` in model.py" in failing(
        "infer", "model.py", "--out", "new"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("data = 3", "model.py: `data` is a int, expected a dict of the observed data"),
        ("data = {}", "`data` in model.py has no 'y'; expected are y"),
        ("data = {'y': ['a']}", "`data` in model.py: 'y' is not made of numbers"),
        ("data = {'y': [1.0]}", "`data` in model.py: 'y' has shape (1,), but the program simulates 'y' of shape (3,)"),
        ("method = 'cpe'", "model.py: `method` is a str, expected a method such as cpe.CPE()"),
        ("truth = {'nu': 1}\ndata = {'y': [1, 2, 3]}", "`truth` in model.py has no 'mu'; expected are mu"),
        ("import sys\nsys.exit(0)", "model.py ends Python when it is loaded (SystemExit)"),
        ("def program(): 1 / 0", "model.py: ZeroDivisionError: division by zero (line"),
    ],
)
def test_model_files_that_cannot_be_used(here, more, message):
    (here / "model.py").write_text(MODEL.format(spread=1.0) + more)
    assert message in failing("infer", "model.py", "--out", "new")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise OSError('no licence')",
            r"simulator 'simulator', called with \(.*\) raised OSError: no licence. Fix it",
        ),
        ("return np.zeros(3)", r"Site 'y': simulator 'simulator'.* returned shape \(3,\), expected \(2,\)"),
        ("return np.full(2, np.nan)", r"20 of 20 simulations \(100.0 %\) are not finite; the first bad site is 'y'"),
    ],
)
def test_simulators_that_fail(here, body, message, caplog):
    (here / "host.py").write_text(HOST.format(body=body))
    out = failing("simulate", "host.py", "--out", "new", "--simulations", 20)
    assert re.search(message, out), out
    assert caplog.text == ""  # JAX would log a traceback


def test_folders_that_cannot_be_used(here, monkeypatch):
    assert "data.json is a file, expected a folder for the run" in failing("simulate", "model.py", "--out", "data.json")
    (here / "full").mkdir()
    (here / "full" / "thesis.tex").touch()
    assert "full is not empty, and not a run of cpejax" in failing("simulate", "model.py", "--out", "full")
    for text in ("{", "[" * 100_000):
        (here / "run" / "run.json").write_text(text)
        assert "run/run.json is damaged" in failing(*INFER)
    (here / "run" / "run.json").unlink()
    (here / "run" / "run.json").mkdir()
    assert "run/run.json is a folder, expected a file" in failing(*INFER)

    mkdir = Path.mkdir

    def refuse(self, *args, **options):
        if "locked" in self.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        mkdir(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    out = failing("simulate", "model.py", "--out", "locked")
    assert "locked cannot be written or read: Permission denied" in out


def test_a_full_disk(here, monkeypatch):
    whole = os.fsync

    def full(descriptor):
        if os.fstat(descriptor).st_size > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    out = failing("simulate", "model.py", "--out", "new", "--simulations", 2000)
    assert "cannot be written or read: No space left on device. What was finished in new is kept: fix this" in out
    assert sorted(p.name for p in (here / "new").iterdir()) == [".lock", "run.json"]  # no part of a file


def test_a_disk_that_is_full_when_draws_are_written(tmp_path):
    resource = pytest.importorskip("resource", reason="limits of POSIX")
    code = f"""
import resource, numpy as np, xarray as xr
from pathlib import Path
from cpejax.runs.result_files import write_draws
tree = xr.DataTree.from_dict({{"posterior": xr.Dataset({{"mu": ("draw", np.zeros(100_000))}})}})
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, {resource.RLIM_INFINITY}))
try:
    write_draws(Path("posterior.nc"), tree)
except OSError:
    raise SystemExit(7)
"""
    # Of another process: HDF5 ended it by a segmentation fault.
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["simulations.npz", "posterior.nc", "model/posterior.json"])
def test_a_folder_in_place_of_a_file(here, name):
    (here / "run" / name).unlink()
    (here / "run" / name).mkdir()
    assert f"run/{name} is a folder, expected the file that the stage" in failing(*INFER)


@pytest.mark.parametrize("option", ["--given", "--truth", "MODEL.py"])
def test_a_folder_in_place_of_an_input(here, option):
    (here / "folder.json").mkdir()
    words = ("infer", "folder.json") if option == "MODEL.py" else (*INFER, option, "folder.json")
    assert "folder.json is a folder" in failing(*words)


def test_two_processes_do_not_work_in_one_folder(here):
    fcntl = pytest.importorskip("fcntl")
    with (here / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "Another cpejax is at work in run" in failing(*INFER)


def test_stages_in_the_wrong_order(here):
    assert "new has no simulations to train on. First: cpejax simulate model.py" in failing(
        "fit", "model.py", "--out", "new"
    )
    out = failing("sample", "model.py", "--given", "data.json", "--out", "new")
    assert "new has no fitted model. First: cpejax fit model.py --out new, or name a run that has one with --fit" in out
    out = failing("check", "model.py", "--given", "data.json", "--fit", "run", "--out", "new")
    assert "new has no draws to report. First: cpejax sample" in out
    out = failing("sample", "model.py", "--given", "data.json", "--fit", "nowhere", "--out", "new")
    assert "--fit nowhere: there is no fitted model in this folder" in out


def test_a_model_of_another_program(here):
    (here / "model.py").write_text(MODEL.format(spread=1.0).replace('"mu"', '"nu"'))
    out = failing("sample", "model.py", "--given", "data.json", "--fit", "run", "--out", "new")
    assert "was fitted to another program" in out


def test_a_truth_that_cannot_be_used(here):
    (here / "truth.json").write_text('{"mu": [1.0, 2.0]}')
    assert "truth.json has many values of each parameter, expected one" in failing(*INFER)
    (here / "truth.json").write_text('{"nu": 1.0}')
    assert "truth.json has 'nu', which is not a site" in failing(*INFER)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "magic"), "There is no method 'magic'; there are"),
        (("--simulations", 3), "Invalid value for '--simulations'"),
        (("--simulations", "many"), "Invalid value for '--simulations'"),
        (("--seed", -1), "Invalid value for '--seed'"),
        (("--epochs", 0), "Invalid value for '--epochs'"),
        (("--timeout", -1), "Invalid value for '--timeout'"),
        (("--drwas", 5), "No such option"),
    ],
)
def test_options_that_cannot_be_used(here, words, message):
    code = 1 if words[0] == "--method" else 2
    result = CliRunner().invoke(app, [*map(str, INFER), *map(str, words)], env={"TERM": "dumb", "COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.replace("│", " ").split())


def test_an_unexpected_error_is_a_paragraph_too_unless_debug(here, monkeypatch):
    def fail(*_, **__):
        return {}["surprise"]

    monkeypatch.setattr(stages, "run_simulate", fail)
    out = failing("infer", "model.py", "--given", "data.json", "--out", "new")
    assert "Error: KeyError: 'surprise' (Run it again with --debug to see where this happened.)" in out
    result = CliRunner().invoke(app, ["infer", "model.py", "--given", "data.json", "--out", "new", "--debug"])
    assert isinstance(result.exception, KeyError)


def test_help_is_a_page():
    words = {
        "infer": ("report.html", "--given", "--fit", "--simulations", "10000", "resumes", "Example"),
        "simulate": ("simulations.npz", "--seed", "Example"),
        "fit": ("model/", "--method", "--epochs", "Example"),
        "sample": ("posterior.nc", "summary.csv", "--draws", "Example"),
        "check": ("check.json", "report.html", "--truth", "Example"),
    }
    ours = {name for name, method in METHODS.items() if method.__module__.startswith("cpejax.")}
    assert len(ours) == 6
    words["fit"] += tuple(ours)
    front = cpejax("--help")
    for command, expected in words.items():
        assert command in front
        page = cpejax(command, "--help")
        assert [word for word in expected if word not in page] == []


# ---- a process of its own: what hangs, Ctrl-C, and Python without docstrings


def start(*words, cwd):
    # Tests may run in the background, where a shell lets programs ignore Ctrl-C.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import cpejax.runs.cli as c; c.app()"
    )
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or sys.platform == "win32", reason="signals of POSIX")
def test_a_simulator_that_hangs_is_ended_by_the_time_limit_or_by_ctrl_c(tmp_path):
    (tmp_path / "host.py").write_text(HOST.format(body="open('begun', 'w').close(); time.sleep(1000)"))
    words = ("simulate", "host.py", "--simulations", 20)
    limited = start(*words, "--out", "limited", "--timeout", 1, cwd=tmp_path)
    _, err = limited.communicate(timeout=120)
    assert limited.returncode == 1
    assert re.search(
        r"Error: host.py: Site 'y': simulator 'simulator', called with \(.*\) has not returned after 1 s. Fix it "
        r"there, or give it more time with --timeout",
        " ".join(err.split()),
    ), err
    (tmp_path / "begun").unlink()
    stopped = start(*words, "--out", "stopped", cwd=tmp_path)
    until = time.monotonic() + 120
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.1)
    stopped.send_signal(signal.SIGINT)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, err
    assert "Interrupted. What was finished is kept in stopped: the same command resumes from there." in err
    assert "Traceback" not in err


def test_figures_need_no_docstrings(monkeypatch):
    def fail(*_):
        raise TypeError("unsupported operand type(s) for +=: 'NoneType' and 'str'")  # as it does in python -OO

    monkeypatch.setattr(arviz_stats.base.stats_utils, "update_docstring", fail)
    plt.close(cpe.plot.marginals({"a": np.random.default_rng(0).normal(size=50)}))


@pytest.mark.slow  # all modules are compiled once more
def test_figures_without_docstrings():
    code = "import numpy as np, cpejax as cpe; cpe.plot.marginals({'a': np.random.default_rng(0).normal(size=50)})"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- the report


class Page(html.parser.HTMLParser):
    """The parts of a page that are to be looked at, and whether its elements are closed."""

    VOID = {"meta", "link", "br", "img", "hr", "input"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(done):
    return Page((done[0] / "run" / "report.html").read_text())


def test_the_report_needs_nothing_from_elsewhere(page):
    assert "script" not in page.tags
    addresses = [value for _, name, value in page.attributes if name in ("href", "src", "xlink:href")]
    assert [a for a in addresses if not a.startswith(("#", "data:,"))] == []
    assert not [v for _, name, v in page.attributes if "url(" in v and "url(#" not in v]


def test_links_inside_the_report_lead_somewhere(page):
    names = [value for _, name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names))
    targets = {value[1:] for _, name, value in page.attributes if name in ("href", "xlink:href") and value[0] == "#"}
    targets |= {t for _, _, value in page.attributes for t in re.findall(r"url\(#([^)]*)\)", value)}
    assert targets <= set(names)


def test_every_figure_has_words(page):
    words = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(words) == page.tags.count("svg") >= 7
    assert all(len(w) > 40 for w in words)
    assert any(re.search(r"mu: -?\d.* ± \d", w) for w in words)


def test_the_report_tells_what_was_done(page, done):
    version = json.loads((done[0] / "run" / "run.json").read_text())["stages"]["fit"]["versions"]["jax"]
    command = (
        "cpejax infer model.py --given data.json --truth truth.json --simulations 200 --epochs 3 --draws 1000 "
        "--check-simulations 60 --seed 5 --out run"
    )
    for words in (
        command,
        "Seed 5",
        version,
        "prior program",
        "posterior program",
        "mu ← y",
        "200 simulations",
        "held-out",
    ):
        assert words in page.text, words


def test_what_comes_from_the_user_is_escaped(page, done):
    text = (done[0] / "run" / "report.html").read_text()
    assert "<group>" not in text
    assert "&lt;group&gt; &amp; co" in text
    assert "<group> & co" in page.text


def browser():
    """Chromium, if it and a driver are here."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium on this machine")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    return api.sync_playwright(), {"executable_path": path, "args": options}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_report_in_a_browser(done):
    driver, options = browser()
    address = (done[0] / "run" / "report.html").as_uri()
    with driver as api:
        chromium = api.chromium.launch(**options)
        colours = {}
        for scheme, width in (("light", 1200), ("dark", 1200), ("light", 360)):
            context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
            tab = context.new_page()
            said, asked = [], []
            tab.on("console", lambda message, said=said: said.append(message.text))
            tab.on("pageerror", lambda error, said=said: said.append(str(error)))
            tab.on("request", lambda request, asked=asked: asked.append(request.url))
            tab.goto(address)
            assert said == []
            assert [a for a in asked if a not in (address, "data:,")] == []
            # nothing is wider than the screen: what is wide scrolls in its own frame
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            ink = tab.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
            colours[scheme] = (background, ink)
            for figure in tab.query_selector_all("svg"):
                box = figure.bounding_box()
                assert box is not None
                assert box["height"] > 50
            context.close()
        assert colours == {
            "light": ("rgb(255, 255, 255)", "rgb(26, 26, 26)"),
            "dark": ("rgb(20, 23, 28)", "rgb(230, 232, 235)"),
        }
        paper = chromium.new_page(color_scheme="dark")
        paper.goto(address)
        paper.emulate_media(media="print")
        look = (
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('nav')).display]"
        )
        assert paper.evaluate(look) == ["rgb(255, 255, 255)", "none"]
        assert paper.locator("details details table").first.is_visible()  # what is folded on the screen is printed
        tab = chromium.new_page()
        tab.goto(address)
        tab.click("nav a[href='#training']")
        assert tab.evaluate("document.querySelector('#training').getBoundingClientRect().top") < 800
        section = tab.locator("details#calibration")
        section.locator("summary").first.click()
        assert section.get_attribute("open") is None
        assert not section.locator("svg").first.is_visible()
        section.locator("summary").first.click()
        assert section.locator("svg").first.is_visible()
        source = tab.get_by_text("model.py", exact=True)
        source.click()
        assert tab.get_by_text("def program():").is_visible()
        chromium.close()
