"""Settings shared by all tests, and the names that examples in docstrings use.

Do not import `cpejax` at the top of this file: the import hook that checks jaxtyping annotations (`addopts` in
`pyproject.toml`) is installed after it is read, and must come before the package is imported.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import jaxtyping
import matplotlib
import pytest

matplotlib.use("Agg")

# JAX's `jax_numpy_rank_promotion="raise"` stays off: NumPyro itself promotes ranks, for instance in
# `Normal(loc, 1.0).sample(key, (5,))` with a vector `loc` and wherever two plates are nested.

# A deadline would time JAX's compilation; random examples would let a change fail for reasons that are not its own.
hypothesis.settings.register_profile("cpejax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("cpejax")

FAST_TO_COMPILE = (
    "--xla_cpu_use_fusion_emitters=false",  # loops in LLVM at once, not by way of MLIR: a third less time
    "--xla_cpu_parallel_codegen_split_count=1",  # each worker of the tests has one core
)


def pytest_configure(config: pytest.Config) -> None:
    """Most of the tests' time is compilation: programs that are the same are compiled once in a session, and all are
    compiled fast, to run slowly. Not so for the slow tests, asked for by their mark, whose networks train for longer.
    """
    # A shell starts what it runs in the background with Ctrl-C ignored, and tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # otherwise a worker, which has what it was started with
        folder = tempfile.mkdtemp(prefix="cpejax-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        settings = {
            "jax_compilation_cache_dir": folder,
            "jax_compilation_cache_max_size": 2**32,  # with a maximum, JAX locks what it reads and writes
            "jax_persistent_cache_min_compile_time_secs": 0.2,
        }
        for name, value in settings.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)
    if config.option.markexpr not in ("slow", "slurm"):
        jax.config.update("jax_disable_most_optimizations", True)
        # XLA reads them when it compiles for the first time, and ends the process where it does not know one.
        set_before = os.environ.get("XLA_FLAGS", "").split()  # also by the process that started this worker
        os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*set_before, *FAST_TO_COMPILE]))


def pytest_collection_finish() -> None:
    """What was imported stays, and compiling makes many objects that stay: collecting garbage seldom saves time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No checks of annotations, as for a user: a value of the wrong type meets the package's own error."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpe.fit` but for its training, which takes longest to compile: for tests that hold for any weights."""
    import cpejax as cpe

    monkeypatch.setattr("cpejax.inference.fit.train", lambda flow, *_, **__: (flow, cpe.History()))


@pytest.fixture(scope="session")
def docstring_names() -> dict[str, Any]:
    """What docstrings take as given: `program`, its `model`, and `simulations` of it."""
    import numpyro
    import numpyro.distributions as dist

    import cpejax as cpe

    def program() -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", 3):
            numpyro.sample("y", dist.Normal(mu, 1.0))

    model = cpe.Model(program, observed=["y"])
    simulations = cpe.simulate(model, 200, key=jax.random.key(0))
    modules = {"cpe": cpe, "jax": jax, "numpyro": numpyro, "dist": dist}
    return {**modules, "program": program, "model": model, "simulations": simulations}


@pytest.fixture(scope="session")
def docstring_posterior(docstring_names: dict[str, Any]) -> Any:
    """The `posterior` of docstrings, fitted once, as the example of `cpe.fit` does it."""
    cpe, model, simulations = (docstring_names[name] for name in ("cpe", "model", "simulations"))
    tiny = cpe.CPE(width=8, depth=1, hidden=8, components=2)
    short = cpe.Training(max_epochs=1)
    return cpe.fit(model, simulations, method=tiny, training=short, key=jax.random.key(1))


@pytest.fixture(autouse=True)
def _use_docstring_names(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        found = request.getfixturevalue("doctest_namespace")
        found.update(request.getfixturevalue("docstring_names"))
        if any("posterior" in example.source for example in request.node.dtest.examples):
            found["posterior"] = request.getfixturevalue("docstring_posterior")
