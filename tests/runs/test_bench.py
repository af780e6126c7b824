"""The benchmark: its config, its jobs one by one on a small task, its table, figures and page, and the command."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from cpejax import tasks
from cpejax.runs.bench import command, config, job, methods, page, peers, table
from cpejax.runs.bench.config import Config
from cpejax.runs.cli import app
from cpejax.runs.model_file import Failure

TASK = """
import numpy as np, numpyro, numpyro.distributions as dist
from cpejax.tasks import Task

def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("x", dist.Normal(a, 1.0))
    numpyro.sample("y", dist.Normal(b, 1.0))

def exact(given, n, rng):
    return {p: rng.normal(given[q] / 2, np.sqrt(0.5), n) for p, q in (("a", "x"), ("b", "y"))}

TASK = Task(name="pair", program=program, observed=("x", "y"), source="a textbook", exact=exact, how="conjugate")
"""
METHOD = """
import cpejax as cpe
from cpejax.runs.bench.methods import Entry

METHOD = Entry(
    cpe.CPE(width=8, depth=1, hidden=8, components=2),
    {"refined": {"refine": "learned"}, "euler": {}},
    {"emulate": False},
)
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A benchmark of a user's own task and method, in a folder that is the current one."""
    (tmp_path / "pair.py").write_text(TASK)
    (tmp_path / "tiny.py").write_text(METHOD)
    monkeypatch.setenv("CPEJAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.chdir(folder)
    options = {"tasks": ["../pair.py"], "methods": ["../tiny.py"], "budgets": [100], "seeds": [3], "draws": 100}
    options["observations"] = 1
    (folder / "config.json").write_text(json.dumps({**options, "training": {"max_epochs": 1}}))
    return folder


def test_names():
    assert Config(tasks=["sbibm/sir", "a/coin.py"], methods=["CPE"]).task_names == {
        "sbibm.sir": "sbibm/sir",
        "coin": "a/coin.py",
    }
    runs = list(Config(tasks=["tree"], methods=["CPE", "FMPE"], budgets=[10, 20], seeds=[1, 2]).runs())
    assert [run.path for run in runs[:4]] == ["tree/CPE/10-1", "tree/CPE/10-2", "tree/FMPE/10-1", "tree/FMPE/10-2"]
    assert {run.budget for run in runs[4:]} == {20}


def test_observations():
    """Five of the paper's tasks, and ten of sbi's, unless fewer are asked for; all for seed 0, and one for another."""
    options = Config(tasks=["tree"], methods=["CPE"])
    assert options.observations_of(tasks.get("tree")) == tuple(range(5))
    assert options.observations_of(tasks.get("sbibm/sir")) == tuple(range(1, 11))
    assert Config(tasks=["tree"], methods=["CPE"], observations=2).observations_of(tasks.get("sbibm/sir")) == (1, 2)
    assert options.observations_of_fit(tasks.get("tree"), 0) == tuple(range(5))
    assert [options.observations_of_fit(tasks.get("tree"), seed) for seed in (1, 4, 6)] == [(1,), (4,), (1,)]
    assert options.observations_of_fit(tasks.get("sbibm/sir"), 4) == (5,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": []}, "tasks of the benchmark is .*expected a list"),
        ({"tasks": ["moons"]}, "no task 'moons'.*defines TASK"),
        ({"methods": ["ABC"]}, "no method 'ABC': the methods are CPE,.*METHOD"),
        ({"methods": ["none.py"]}, "none.py does not exist.*METHOD"),
        ({"budgets": [5]}, "budgets of the benchmark: found 5"),
        ({"c2st": ["slow"]}, "found 'slow', expected some of fast, mlp"),
        ({"tasks": ["slcp", "mine/slcp.py"]}, "called the same"),
    ],
)
def test_errors_before_anything_runs(options, words, unchecked):
    with pytest.raises(Failure, match=words):
        Config(**{"tasks": ["tree"], "methods": ["CPE"], **options}).check()


def test_config_files(tmp_path):
    path = tmp_path / "bench.json"
    for content, words in (
        ("{", "is not JSON"),
        ('{"tasks": ["tree"], "method": []}', r"\['method'\], which a benchmark has not"),
        ('{"tasks": ["tree"]}', "has no methods"),
    ):
        path.write_text(content)
        with pytest.raises(Failure, match=words):
            config.read_config(path)


def test_options_of_the_command(tmp_path):
    found = command.chosen_config({"tasks": "sbibm,tree", "methods": "all", "budgets": "10,20"}, None, tmp_path)
    assert found.tasks == (*tasks.sbibm.names(), "tree")
    assert found.methods == tuple(methods.METHODS)
    assert found.budgets == (10, 20)
    found.write(tmp_path)
    again = command.chosen_config({"seeds": "7"}, None, tmp_path)  # the rest is that of the folder
    assert again.tasks == found.tasks
    assert again.seeds == (7,)
    with pytest.raises(Failure, match="--budgets has 'x'"):
        command.chosen_config({"budgets": "x"}, None, tmp_path)
    with pytest.raises(Failure, match="There are no tasks"):
        command.chosen_config({}, None, tmp_path / "other")


def test_results_of_other_options_are_not_mixed(tmp_path):
    first = Config(tasks=["tree"], methods=["CPE"])
    first.write(tmp_path)
    Config(tasks=["tree"], methods=["CPE"], draws=50).write(tmp_path)  # there are no results yet
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "a.csv").write_text("")
    Config(tasks=["tree", "slcp"], methods=["CPE"], draws=50).write(tmp_path)
    with pytest.raises(Failure, match="are with draws 50, and 10000 is asked for"):
        first.write(tmp_path)


def test_fits_of_another_table_are_not_run(tmp_path):
    """A table that is kept stands for the folder it was made in: whole fits of it are left out, others are not."""
    config = Config(["tree", "slcp"], ["CPE", "FMPE"], seeds=[0], observations=2)
    rows = [row for run in config.runs() for row in table.rows_of(config, run)]
    known = tmp_path / "known.csv"
    with pytest.raises(Failure, match="does not exist: expected a table"):
        command.runs_left(config, tmp_path, known)
    lacks_one = [row for row in rows if row != ("tree", "CPE", 10_000, 0, 1, "refined") and row[:2] != ("slcp", "FMPE")]
    pd.DataFrame(lacks_one, columns=table.KEYS).to_csv(known, index=False)
    left = command.runs_left(config, tmp_path, known)
    assert [run.path for run in left] == ["tree/CPE/10000-0", "slcp/FMPE/10000-0"]
    here = tmp_path / "metrics" / "slcp" / "CPE" / "10000-0.csv"
    here.parent.mkdir(parents=True)
    here.touch()  # was run before it was in the table: its rows stay in those of the folder
    assert len(command.runs_left(config, tmp_path, known)) == 3
    here.unlink()
    config.write(tmp_path, left)
    assert json.loads((tmp_path / "workflow.json").read_text())["runs"] == [run.path for run in left]
    pd.DataFrame(rows, columns=table.KEYS).to_csv(known, index=False)
    with pytest.raises(Failure, match="nothing to run"):
        command.runs_left(config, tmp_path, known)


def test_means_weigh_observations_alike():
    """However many seeds were judged by each."""
    rows = [
        ("tree", "CPE", 10_000, seed, number, score) for seed, number, score in [(0, 0, 0.5), (0, 1, 0.6), (1, 1, 0.8)]
    ]
    frame = pd.DataFrame(rows, columns=["task", "method", "budget", "seed", "observation", "c2st"])
    found = table.means(frame.assign(variant="CPE"))
    assert found["c2st"].tolist() == [pytest.approx(0.6)]
    assert found["rows"].tolist() == [3]


def quick_c2st(x, y, method="fast"):
    """Something of draws that takes no time: metrics have tests of their own."""
    return 0.5 + 0.4 * float(np.tanh(abs(x.mean() - y.mean())))


def test_from_simulations_to_the_page(small, no_training, monkeypatch):
    monkeypatch.setattr(job.metrics, "c2st", quick_c2st)
    options = config.read_config(small / "config.json")
    options.check()
    job.main(["reference", "pair"])
    job.main(["simulations", "pair", "-", "100", "3"])
    job.main(["all", "pair", "tiny", "100", "3"])
    assert not list(small.glob("draws/**/*.npz"))
    for rule in ("table", "figures", "page"):
        job.main([rule])
    rows = pd.read_csv(small / "results.csv")
    assert len(rows) == 2
    assert not table.missing(options, rows)
    assert len(table.missing(options, rows[1:])) == 1
    drawn = rows[rows["solver"] == "euler"]
    assert drawn[["c2st_fast", "c2st_null"]].stack().between(0.3, 1).all()
    assert drawn[["hmin", "hmin_null", "weights", "seconds_simulate", "seconds_fit", "version_jax"]].notna().all().all()
    assert (drawn["acceptance"] == 1).all()
    assert list(drawn["observation"]) == [0]
    refined = rows[rows["solver"] == "refined"]  # nothing was learned
    assert refined["c2st_fast"].isna().all()
    assert set(refined["note"]) == {"no likelihood was learned"}
    names = {path.stem for path in (small / "figures").iterdir()}
    assert names == {"summary", "c2st-100", "hmin-100", "acceptance", "cost", "draws-pair"}
    text = (small / "index.html").read_text()
    assert text.count("<svg") == 6
    assert "no likelihood was learned" in text
    assert not re.search(r"(src|href)=\"https?:", text)
    job.main(["all", "pair", "tiny", "100", "3"])  # now from the saved posterior: the same draws
    again = pd.read_csv(small / "metrics" / "pair" / "tiny" / "100-3.csv")
    pd.testing.assert_frame_equal(again[["c2st_fast", "hmin"]], rows[["c2st_fast", "hmin"]], rtol=1e-4)


PEER = """
import json, sys
import numpy as np

options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
with np.load(sys.argv[1]) as file:
    assert file["theta"].shape == (100, 2) and file["x"].shape == (100, 2), "shapes"
    assert list(file["families"]) == ["normal", "normal"] and list(file["second"]) == [1.0, 1.0], "prior"
    draws = np.repeat(file["observations"][:, None] / 2, int(options["--draws"]), axis=1)
np.savez(sys.argv[2], draws=draws + np.random.default_rng(0).normal(size=draws.shape))
print("something else")
about = {"weights": 5, "epochs": int(options["--epochs"]), "seconds_fit": 2.0, "seconds_draw": [0.1] * len(draws)}
print(json.dumps({**about, "megabytes": 9.0, "versions": {"sbi": "0"}}))
"""


def test_a_peer_in_an_environment_of_its_own(small, monkeypatch):
    """A script of another interpreter is handed simulations and observations, and hands draws back."""
    monkeypatch.setattr(job.metrics, "c2st", quick_c2st)
    (small / "peer.py").write_text(PEER)
    monkeypatch.setattr(peers, "SCRIPT", small / "peer.py")
    options = {**json.loads((small / "config.json").read_text()), "methods": ["sbi-NPE"]}
    (small / "config.json").write_text(json.dumps(options))
    monkeypatch.setenv("CPEJAX_PEERS", str(small / "nothing"))
    with pytest.raises(Failure, match=r"nothing is not there.*make peers.*CPEJAX_PEERS"):
        config.read_config(small / "config.json").check()
    monkeypatch.setenv("CPEJAX_PEERS", sys.executable)
    config.read_config(small / "config.json").check()
    job.main(["reference", "pair"])
    job.main(["simulations", "pair", "-", "100", "3"])
    job.main(["all", "pair", "sbi-NPE", "100", "3"])
    job.main(["table"])
    row = pd.read_csv(small / "results.csv").iloc[0]
    assert (row["method"], row["solver"], row["epochs"], row["version_sbi"]) == ("sbi-NPE", "default", 1, 0)
    assert row["c2st_fast"] < 0.9
    assert not list(small.rglob("peer-*.npz"))


def test_priors_that_a_peer_is_given():
    moons, waves = tasks.get("two_moons"), tasks.get("sbibm/sir")
    assert list(peers.prior_of(moons)["families"]) == ["uniform"] * 2
    assert list(peers.prior_of(moons)["first"]) == [-1.0, -1.0]
    assert list(peers.prior_of(waves)["families"]) == ["lognormal"] * 2
    assert peers.prior_of(tasks.get("tree")) is None  # branches depend on the root
    assert peers.prior_of(tasks.get("hierarchical")) is None


@pytest.mark.slow
def test_any_sites_given(tmp_path, no_training, monkeypatch):
    """AIO is fitted once for all sets of a model, CPE to each, with given roots as parameters that come first."""
    monkeypatch.setattr(job.metrics, "c2st", quick_c2st)
    monkeypatch.setenv("CPEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpe.py").write_text(METHOD)
    (tmp_path / "aio.py").write_text("import cpejax as cpe\nMETHOD = cpe.AIO(layers=1)")
    names = ["simformer/tree-2", "simformer/tree-3"]
    options = Config(tasks=names, methods=["cpe.py", "aio.py"], budgets=[100], seeds=[0], draws=100)
    options.check()
    options.write(tmp_path)
    for name in options.task_names:
        job.main(["reference", name])
        job.main(["simulations", name, "-", "100", "0"])
    for run in options.runs():
        job.main(["all", *map(str, run)])
    job.main(["table"])
    rows = pd.read_csv(tmp_path / "results.csv")
    assert not table.missing(options, rows)
    assert rows.loc[rows["solver"] != "refined", "c2st_fast"].notna().all()
    fits = [(tmp_path / "fits" / f"simformer.tree-{i}" / "aio" / "100-0" / "fit.json").read_text() for i in (2, 3)]
    assert fits[0] == fits[1]
    with pytest.raises(Failure, match="FMPE cannot run on simformer/tree-2"):
        Config(tasks=names, methods=["FMPE"]).check()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_page_in_a_browser(tmp_path):
    """Tables sort by numbers and by words, nothing is wider than the screen, figures are seen."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium on this machine")
    results = pd.DataFrame(
        [
            {"task": task, "method": method, "budget": budget, "seed": 0, "observation": 1, "solver": "s"}
            | {"c2st_fast": 0.5 + 0.01 * k, "c2st_null": 0.5, "hmin": 0.1, "hmin_null": 0.0, "acceptance": 1.0}
            | {"seconds_fit": 9.0 + 40 * k, "note": "", "version_jax": "1"}
            for k, (task, method, budget) in enumerate(
                [("tree", "FMPE", 9_000), ("slcp", "FMPE", 9_000), ("sbibm/sir", "FMPE", 10_000)]
            )
        ]
    )
    results.to_csv(tmp_path / "results.csv", index=False)
    page.write_page(Config(tasks=["tree"], methods=["FMPE"]), tmp_path, draws=False)
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 400, "height": 800})
        said = []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto((tmp_path / "index.html").as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400
        assert len(tab.screenshot()) > 10_000
        assert all(figure.bounding_box()["height"] > 50 for figure in tab.query_selector_all("svg"))

        def column(number):
            return tab.locator(f"#means tbody td:nth-child({number})").all_inner_texts()

        assert column(1) == ["tree", "slcp", "sbibm/sir"]
        for number, name, up in (
            (1, "task", ["sbibm/sir", "slcp", "tree"]),
            (2, "budget", ["9,000", "9,000", "10,000"]),
        ):
            button = tab.locator("#means th button").get_by_text(name, exact=True)
            button.click()
            assert column(number) == up
            button.click()
            assert column(number) == up[::-1]
        assert said == []
        browser.close()


def test_published_figures(tmp_path):
    found = table.published()
    for row in found["rows"]:
        assert row["source"] in found["sources"]
        assert row["task"] in tasks.sbibm.names()
        assert 0.49 < row["c2st"] < 1
    ours = pd.DataFrame(
        {
            "task": "sbibm/sir",
            "method": ["CPE", "B"],
            "solver": "s",
            "observation": 1,
            "budget": 10_000,
            "c2st_fast": [0.7, 0.6],
            "c2st_mlp": [None, 0.65],
        }
    )
    ours.to_csv(tmp_path / "results.csv", index=False)
    row = table.beside_published(table.read_table(tmp_path / "results.csv")).iloc[0]
    assert (row["variant"], row["best"]) == ("B", 0.65)
    assert row["CPE"] == 0.7
    assert "0.680 NPE [A]" in row["published"]


def test_jobs_have_cores_of_their_own(tmp_path, monkeypatch):
    """Until these are all taken; a core is free again when its job ends."""
    bound = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(set(cores)), raising=False)
    assert job.take_cores(3) == []  # all there are
    first, second = job.take_cores(1), job.take_cores(2)
    assert bound == [{0}, {1, 2}]
    assert job.take_cores(1) == []
    for file in first:
        file.close()
    third = job.take_cores(1)
    assert bound[2:] == [{0}]
    for file in (*second, *third):
        file.close()


def test_one_benchmark_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if "slurm" in name else name)
    options = Config(tasks=["tree"], methods=["CPE"])
    with pytest.raises(
        Failure, match=r"snakemake_executor_plugin_slurm is not installed: pip install 'cpejax\[bench\]'"
    ):
        command.run_workflow(options, tmp_path, jobs=1, slurm=True, more=[])
    monkeypatch.setattr(command, "GRACE", -1.0)
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Failure, match="Another benchmark runs in"):
            command.run_workflow(options, tmp_path, jobs=1, slurm=False, more=[])


def test_jobs_done_and_time_left(tmp_path, monkeypatch, capsys):
    said = "print('1 of 3 steps (33%) done'); print('Error in rule fit:'); print('2 of 3 steps (67%) done'); exit(1)"
    ran = []

    def fake(command_line, *args, **kwargs):
        ran.append(command_line)
        return Popen([*command_line[:3], sys.executable, "-c", said], *args, **kwargs)

    Popen = subprocess.Popen
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command.subprocess, "Popen", fake)
    with pytest.raises(Failure, match=r"Some jobs failed.*the same command resumes"):
        command.run_workflow(
            Config(tasks=["tree"], methods=["CPE"]), tmp_path, jobs=3, slurm=True, more=["--slurm-no-account"]
        )
    out = capsys.readouterr().out
    assert "2 of 3 jobs done, about 0 s left" in out
    assert "Error in rule fit" in out
    assert ran[0][-1] == "--slurm-no-account"
    assert {"slurm", "--jobs", "--rerun-incomplete"} <= set(ran[0])
    assert json.loads((tmp_path / "workflow.json").read_text())["runs"] == [f"tree/CPE/10000-{i}" for i in range(5)]


STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, __file__, "job"])  # which would outlive it
pathlib.Path(f"{os.getpid()}.pid").touch()
time.sleep(60)
"""


def alive(pid):
    """Whether a process is there and not waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids):
    """Killed processes need some milliseconds to go; these would stay for a minute."""
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def started(folder):
    """The processes of the stubborn workflow and of its job, once they are there."""
    deadline = time.monotonic() + 30
    while len(found := [int(path.stem) for path in folder.glob("*.pid")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(tmp_path, monkeypatch, number, capsys):
    """Asked, and then killed: a workflow that does not listen, and its job, are gone when the command is."""
    (tmp_path / "snakemake.py").write_text(STUBBORN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "GRACE", 0.2)
    found = []

    def interrupt():
        found.extend(started(tmp_path))
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.default_int_handler)  # a test in the background may ignore Ctrl-C
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(typer.Exit) as left:
            command.run_workflow(
                Config(tasks=["tree"], methods=["CPE"]), tmp_path / "out", jobs=1, slurm=False, more=[]
            )
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert left.value.exit_code == 128 + number
    assert "the same command resumes" in capsys.readouterr().err
    assert len(found) == 2
    assert_gone(found)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_nothing_outlives_a_benchmark_that_is_killed(tmp_path):
    """Its end of the pipe is closed by the system."""
    (tmp_path / "workflow.py").write_text(STUBBORN)
    line = [sys.executable, str(command.GUARD), "0.2", sys.executable, "workflow.py", "with", "job"]
    guard = subprocess.Popen(line, cwd=tmp_path, stdin=subprocess.PIPE, start_new_session=True)
    found = started(tmp_path)
    guard.stdin.close()
    assert guard.wait(30) == -signal.SIGKILL
    assert_gone(found)


def test_commands():
    run = CliRunner().invoke(app, ["bench", "--tasks", "moons", "--methods", "CPE"])
    assert run.exit_code == 1
    assert "no task 'moons'" in run.output
    listed = CliRunner().invoke(app, ["tasks"]).output
    assert "sbibm/lotka_volterra" in listed


NOTES_ORDER = """
import pathlib, sys

rule, *of = sys.argv[3:]
with open("order.txt", "a") as file:
    print(rule, *of, file=file)
run = "/".join(of[:2] + ["-".join(of[2:])])
made = {"reference": [f"references/{of[0]}.npz"] if of else [], "simulations": ["simulations/" + run.replace("-/", "")]}
made["simulations"][0] += ".npz"
made |= {"all": [f"metrics/{run}.csv", f"metrics/{run}.npz"], "table": ["results.csv"], "page": ["index.html"]}
for path in map(pathlib.Path, made.get(rule, ["figures/a.svg"])):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
"""


def test_the_most_important_rows_come_first(tmp_path):
    """Fits run in the order of the config, each right after what it is made of."""
    pytest.importorskip("snakemake")
    stub = tmp_path / "python"
    stub.write_text(f"#!{sys.executable}\n{NOTES_ORDER}")
    stub.chmod(0o755)
    options = Config(tasks=["tree", "slcp"], methods=["FMPE", "CPE"], budgets=[10, 20], seeds=[1, 0])
    options.write(tmp_path)
    workflow = json.loads((tmp_path / config.WORKFLOW).read_text())
    (tmp_path / config.WORKFLOW).write_text(json.dumps({**workflow, "python": str(stub)}))
    subprocess.run(command.snakemake(tmp_path, ["--cores", "1"]), check=True)
    rows = [line.split() for line in (tmp_path / "order.txt").read_text().splitlines()]
    assert [row[1:] for row in rows if row[0] == "all"] == [list(map(str, run)) for run in options.runs()]
    assert [row[0] == "all" for row in rows[:6]] == [False, False, True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workflow(small, number):
    """The whole, ended in between."""
    pytest.importorskip("snakemake")
    line = [sys.executable, "-c", "from cpejax.runs.cli import app; app()", "bench", "--out", str(small)]
    first = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    for said in first.stdout:
        if said.startswith("2 of"):
            break
    first.send_signal(number)
    first.wait()
    first.stdout.close()
    done = {path: path.stat().st_mtime_ns for path in small.glob("simulations/**/*.npz")}
    assert done
    subprocess.run(line, check=True)
    assert len(pd.read_csv(small / "results.csv")) == 2
    assert {path: path.stat().st_mtime_ns for path in done} == done
    row, *others = sorted(small.glob("metrics/**/*.csv"))
    kept = {path: path.stat().st_mtime_ns for path in others}
    row.unlink()  # to be computed again
    subprocess.run(line, check=True)
    assert row.exists()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
