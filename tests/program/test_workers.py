"""Workers: whoever calls a simulator on the host, the data are the same, and none that came back is lost."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.program import dispatch, simulation_files
from cpejax.program.simulator import split

KEY = jax.random.key(0)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import the tests, and with them JAX


def pairs(simulator, **options):
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("i", 2):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
            numpyro.sample("y", cpe.Simulator(simulator, a, b, host=True, **options))

    return program


def noisy(rng, a, b):
    return 1e9 + a + b + rng.normal()


def same(one, other):
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def pool():
    """Two threads: what is tested with them holds for all executors."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def alone():
    return cpe.simulate(pairs(noisy), 103, key=KEY)


def test_processes_return_what_one_returns_alone(alone, tmp_path):
    assert same(alone, cpe.simulate(pairs(noisy), 103, key=KEY, workers=2, checkpoint=tmp_path))
    assert len(list(tmp_path.iterdir())) == 35  # whole parts, of which either kind of run reads the other's
    assert same(alone, cpe.simulate(pairs(noisy), 103, key=KEY, checkpoint=tmp_path))
    assert same(alone, cpe.simulate(pairs(noisy), 103, key=KEY, workers=1, checkpoint=tmp_path))


@pytest.mark.parametrize("batch", [None, 1, 7, 1000])
def test_batches_change_nothing(alone, pool, batch):
    assert same(alone, cpe.simulate(pairs(noisy), 103, key=KEY, workers=pool, batch=batch))


def test_chunks_of_memory_change_nothing(alone, pool, monkeypatch):
    monkeypatch.setattr("cpejax.program.simulate.MOST_NUMBERS", 5 * 20)
    assert same(alone, cpe.simulate(pairs(noisy), 103, key=KEY, workers=pool))


def test_vectorized_simulators_get_the_same_rows(pool):
    program = pairs(lambda rng, a, b: a + b + rng.normal(size=len(a)), vectorized=True)
    assert same(cpe.simulate(program, 103, key=KEY), cpe.simulate(program, 103, key=KEY, workers=pool))


def test_simulators_that_read_one_another(pool):
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        x = numpyro.sample("x", cpe.Simulator(lambda rng, a: a + rng.normal(), a, host=True))
        u = numpyro.sample("u", dist.Normal(x, 1.0))
        numpyro.sample("y", cpe.Simulator(lambda rng, x, u: x * u + rng.normal(), x, u, host=True))

    model = cpe.Model(program, ["x", "u", "y"])
    assert same(cpe.simulate(model, 60, key=KEY), cpe.simulate(model, 60, key=KEY, workers=pool))


def test_a_program_in_jax_needs_no_workers(capsys, model):
    cpe.simulate(model, 20, key=KEY, workers=2)
    assert "workers are for simulators on the host" in capsys.readouterr().err


@pytest.fixture
def model():
    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=0.0)

    return program


@pytest.mark.slow
def test_a_script_may_define_the_simulator_and_need_not_be_importable(tmp_path):
    """Started anew, a worker neither runs the script again nor imports JAX."""
    (tmp_path / "neighbour.py").write_text("def shift(x):\n    return x + 1\n")
    (tmp_path / "script.py").write_text(
        """
import sys
import jax, numpyro, numpyro.distributions as dist
import neighbour
import cpejax as cpe

STEP = 2.0
print("run")

def simulator(rng, a):
    assert "jax" not in sys.modules
    return neighbour.shift(STEP * a)

def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", cpe.Simulator(simulator, a, host=True))

found = cpe.simulate(program, 20, key=jax.random.key(0), workers=1)
assert abs(found["y"] - 2 * found["a"] - 1).max() < 1e-6
"""
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "run\n", "")


def test_progress_tells_of_workers(capsys, pool):
    def fragile(rng, a, b):
        if a > 1.5:
            raise ZeroDivisionError
        return a

    cpe.simulate(pairs(fragile), 100, key=KEY, workers=pool, on_error="nan", progress=True, max_invalid=0.5)
    said = capsys.readouterr().err
    assert "200/200" in said
    assert " failed, 2 workers" in said


# ---- errors of the simulator


def test_the_error_of_a_simulator_is_in_its_own_words(pool):
    def fragile(rng, a, b):
        if a > 0:
            raise ValueError("the step size became zero")
        return a

    with pytest.raises(RuntimeError) as caught:
        cpe.simulate(pairs(fragile), 100, key=KEY, workers=pool)
    assert caught.match(r"^Site 'y': simulator 'fragile', called with \(\d.*\) raised ValueError: the step size became")
    assert "in fragile" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"Site 'y'.* returned shape \(3,\), expected \(\)"):
        cpe.simulate(pairs(lambda rng, a, b: np.zeros(3)), 100, key=KEY, workers=pool, on_error="nan")
    with pytest.raises(RuntimeError, match=r"Site 'y'.* returned complex values, expected real ones"):
        cpe.simulate(pairs(lambda rng, a, b: a + 1j), 100, key=KEY, workers=pool)


@pytest.mark.parametrize("vectorized", [False, True])
def test_failures_can_be_nan(capsys, pool, vectorized):
    def fragile(rng, a, b):
        if np.any(a > 1.5):
            raise ZeroDivisionError("too large")
        return a + b

    program = pairs(fragile, vectorized=vectorized)
    found = cpe.simulate(program, 200, key=KEY, workers=pool, on_error="nan")
    said = capsys.readouterr().err
    expected = cpe.simulate(program, 200, key=KEY, on_error="nan")
    assert same(expected, found)
    assert found.dropped == expected.dropped > 0
    assert f"{2 * found.dropped} calls of a simulator failed and count as NaN (on_error='nan'). The first: Site" in said
    assert "raised ZeroDivisionError: too large" in said


# ---- workers that are lost


@pytest.mark.slow
def test_workers_that_die_or_hang(tmp_path, capsys):
    """Some do so once, and their rows are tried again; one simulation always does, and is named."""
    once = str(tmp_path)

    def first_time(name):
        try:
            os.close(os.open(f"{once}/{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def dying(rng, a, b):
        if a > 2.5:  # one of the 100
            os._exit(1)
        if 0.5 < b < 0.55 and first_time(f"{b:.9f}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if 0.6 < b < 0.62 and first_time(f"{b:.9f}"):
            time.sleep(600)
        return a + rng.normal()

    checkpoint = tmp_path / "sims"
    found = cpe.simulate(pairs(dying), 100, key=KEY, workers=2, timeout=3.0, retries=1, checkpoint=checkpoint)
    said = capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) > 3
    quiet = cpe.simulate(pairs(lambda rng, a, b: a + rng.normal()), 100, key=KEY)
    kept = quiet["a"] <= 2.5
    assert found.dropped == 1 == (~kept).sum()
    assert all(np.array_equal(found[name], quiet[name][kept]) for name in found)
    assert (
        "2 calls of a simulator did not return, tried 2 time(s), and count as NaN. Site 'y': simulator 'dying'" in said
    )
    assert "called with (2.7" in said


def test_a_hanging_thread_is_given_up(pool, capsys):
    def hanging(rng, a, b):
        time.sleep(2.5 if a > 2.5 else 0.0)
        return a

    found = cpe.simulate(pairs(hanging), 100, key=KEY, workers=pool, timeout=1.0, retries=0)
    assert found.dropped == 1
    assert "it took longer than 1 s" in capsys.readouterr().err


SCRIPT = """
import sys, time
import jax, numpyro, numpyro.distributions as dist
import cpejax as cpe

def simulator(rng, a):
    time.sleep(0.02)
    return a + rng.normal()

def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", cpe.Simulator(simulator, a, host=True))

def main(folder, n):
    return cpe.simulate(program, n, key=jax.random.key(0), workers=2, batch=3, checkpoint=folder)

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
"""


def children(pid):
    """The processes of a process, and theirs."""
    found = subprocess.run(
        ["ps", "-e", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    return [int(p) for p, parent, *args in rows if int(parent) == pid and "LokyProcess" in str(args)]


def killed(tmp_path, n, kills, seed=0):
    """Kill workers, and sometimes the caller, at random; return how often each was killed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    rng, counts = np.random.default_rng(seed), [0, 0]
    process = None
    while sum(counts) < kills:
        if process is None or process.poll() is not None:
            assert process is None or process.returncode == -9
            command = [sys.executable, "script.py", "sims", str(n)]
            process = subprocess.Popen(command, cwd=tmp_path)
            began = len(list((tmp_path / "sims").glob("rows-*")))
            while len(list((tmp_path / "sims").glob("rows-*"))) <= began and process.poll() is None:
                time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 0.5))
        workers = children(process.pid)
        if rng.uniform() < 0.25:
            process.kill()
            process.wait()
            counts[1] += 1
        elif workers:
            os.kill(int(rng.choice(workers)), signal.SIGKILL)
            counts[0] += 1
    if process.poll() is None:
        process.kill()
    process.wait()
    return counts, workers


def check_killed(tmp_path, n, kills, seed):
    """Rows that are on disk are right, no worker outlives its caller, and what is left is done by the same call."""
    counts, workers = killed(tmp_path, n, kills, seed)
    assert min(counts) > 0
    found = [simulation_files.load_arrays(path)[0] for path in (tmp_path / "sims").glob("rows-*")]
    rows, data = (np.concatenate([part[name] for part in found]) for name in ("rows", "data"))
    assert 0 < len(np.unique(rows)) < n
    names = {"__name__": "script"}
    exec(SCRIPT.replace("time.sleep(0.02)", ""), names)
    quiet = cpe.simulate(names["program"], n, key=KEY)
    high, low = split(data)  # as simulations hold float64
    np.testing.assert_array_equal(high + low.astype(np.float64), quiet["y"][rows])
    for pid in workers:
        for _ in range(200):
            if not Path(f"/proc/{pid}").exists():
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"worker {pid} outlives its caller")
    return quiet


@pytest.mark.slow
def test_thirty_kills_change_nothing(tmp_path):
    quiet = check_killed(tmp_path, 6000, 30, seed=0)
    subprocess.run([sys.executable, "script.py", "sims", "6000"], cwd=tmp_path, check=True)
    names = {"__name__": "script"}
    exec(SCRIPT, names)
    assert same(quiet, names["main"](tmp_path / "sims", 6000))


# ---- bad input


def test_workers_of_another_kind(unchecked):
    with pytest.raises(TypeError, match=r"workers must be a number, or an executor with submit.*found str"):
        cpe.simulate(pairs(noisy), 100, key=KEY, workers="8")
    with pytest.raises(ValueError, match="workers must be at least 1, found 0"):
        cpe.simulate(pairs(noisy), 100, key=KEY, workers=0)
    with pytest.raises(ValueError, match="batch, the number of rows that go to a worker at a time, must be a whole"):
        cpe.simulate(pairs(noisy), 100, key=KEY, workers=2, batch=0)
    with pytest.raises(ValueError, match="timeout must be a number of seconds above 0"):
        cpe.simulate(pairs(noisy), 100, key=KEY, workers=2, timeout=0)
    with pytest.raises(ValueError, match="retries must be a whole number of at least 0"):
        cpe.simulate(pairs(noisy), 100, key=KEY, workers=2, retries=-1)


def test_an_executor_that_is_shut_down():
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(
        RuntimeError, match=r"given as workers takes no more work: RuntimeError: cannot schedule new.*ch"
    ):
        cpe.simulate(pairs(noisy), 100, key=KEY, workers=executor)


def test_a_function_that_cannot_be_pickled(pool):
    lock = threading.Lock()

    def locked(rng, a, b):
        with lock:
            return a

    with pytest.raises(TypeError, match=r"Site 'y': simulator 'locked' cannot be sent to workers: .*'lock' \(lock\)"):
        cpe.simulate(pairs(locked), 100, key=KEY, workers=pool)


class NoPackage:
    """An executor whose workers have no cloudpickle, or not the simulator's module."""

    def __init__(self, hide):
        self.hide = hide

    def submit(self, fn, call):
        future = Future()
        before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == self.hide}
        sys.modules[self.hide] = None
        try:
            future.set_result(fn(call))
        except Exception as error:
            future.set_exception(error)
        finally:
            del sys.modules[self.hide]
            sys.modules.update(before)
        return future


def test_a_worker_without_a_package(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"times in a row a worker was lost.*cloudpickle.*Is there memory enough"):
        cpe.simulate(pairs(noisy), 100, key=KEY, workers=NoPackage("cloudpickle"))
    (tmp_path / "only_here.py").write_text("def simulator(rng, a, b):\n    return a\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with pytest.raises(RuntimeError, match=r"cannot be loaded by a worker \(ModuleNotFoundError.*Install there what"):
        cpe.simulate(pairs(only_here.simulator), 100, key=KEY, workers=NoPackage("only_here"))


@pytest.mark.slow
def test_workers_that_all_die():
    def dying(rng, a, b):
        os._exit(3)

    with pytest.raises(RuntimeError, match="times in a row a worker was lost before it returned anything"):
        cpe.simulate(pairs(dying), 100, key=KEY, workers=1, retries=0)


def test_a_full_disk_loses_nothing(tmp_path, pool, monkeypatch, alone):
    inner, left = simulation_files.write_atomically, [12]

    def until_full(path, content):
        if path.name.startswith("rows-"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device", str(path))
        inner(path, content)

    monkeypatch.setattr(simulation_files, "write_atomically", until_full)
    options = {"key": KEY, "workers": pool, "batch": 5, "checkpoint": tmp_path}
    with pytest.raises(OSError, match=r"No space left on device, so that .* What has come back before is kept in"):
        cpe.simulate(pairs(noisy), 103, **options)
    assert len(list(tmp_path.glob("rows-*"))) == 12
    left[0], calls = 1000, []
    inner_collect = dispatch.Dispatch._packed

    def counted(self, units):
        calls.append(len(units))
        return inner_collect(self, units)

    monkeypatch.setattr(dispatch.Dispatch, "_packed", counted)
    assert same(alone, cpe.simulate(pairs(noisy), 103, **options))
    assert sum(calls) == 206 - 12 * 5


def test_rows_of_another_run(tmp_path, pool, monkeypatch):
    def fragile(rng, a, b):
        if a > 1.5:
            raise ValueError
        return a

    with pytest.raises(RuntimeError, match="raised ValueError"):
        cpe.simulate(pairs(fragile), 103, key=KEY, workers=pool, batch=5, checkpoint=tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    with pytest.raises(ValueError, match="are of another run"):
        cpe.simulate(pairs(fragile), 103, key=jax.random.key(1), workers=pool, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="begun with another program: site 'y' has a simulator whose code"):
        cpe.simulate(pairs(noisy), 103, key=KEY, workers=pool, checkpoint=tmp_path)
    files[0].write_bytes(files[0].read_bytes()[:-4])
    with pytest.raises(ValueError, match="is truncated, altered"):
        cpe.simulate(pairs(fragile), 103, key=KEY, workers=pool, checkpoint=tmp_path)


def test_many_files_become_one(tmp_path, pool, monkeypatch, alone):
    monkeypatch.setattr(simulation_files, "MANY_FILES", 10)
    most = []
    inner = simulation_files.RowFiles.write

    def write(self, *arguments):
        inner(self, *arguments)
        most.append(len(list(tmp_path.glob("rows-*"))))

    monkeypatch.setattr(simulation_files.RowFiles, "write", write)
    found = cpe.simulate(pairs(noisy), 103, key=KEY, workers=pool, batch=2, checkpoint=tmp_path)
    assert same(alone, found)
    assert max(most) <= 10 + 103 // 10


def test_ctrl_c(tmp_path, monkeypatch):
    """What is complete is returned, or kept."""

    def interrupting(self):
        if self.tally.done >= 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(dispatch.Dispatch, "_overdue", interrupting)

    def slow(rng, a, b):
        time.sleep(0.02)
        return a + rng.normal()

    found = cpe.simulate(pairs(slow), 500, key=KEY, workers=2, batch=2)
    assert found.interrupted
    whole = cpe.simulate(pairs(lambda rng, a, b: a + rng.normal()), 500, key=KEY)
    which = [int(np.flatnonzero(whole["a"] == a)[0]) for a in found["a"]]
    assert 0 < len(which) < 500
    np.testing.assert_array_equal(found["y"], whole["y"][which])


def test_an_executor_of_processes(alone):
    """Any of `concurrent.futures`, though its workers are not replaced if they die."""
    import multiprocessing

    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as executor:
        assert same(alone, cpe.simulate(pairs(noisy), 103, key=KEY, workers=executor))
        with pytest.raises(RuntimeError, match="takes no more work: BrokenProcessPool"):
            cpe.simulate(pairs(lambda rng, a, b: os._exit(1)), 103, key=KEY, workers=executor)
