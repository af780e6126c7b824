"""Settings shared by all tests.

Do not import `cpejax` at the top of this file: the import hook that checks jaxtyping annotations (`addopts` in
`pyproject.toml`) is installed after it is read, and must come before the package is imported.
"""

import shutil
import tempfile
from collections.abc import Iterator

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


def pytest_configure(config: pytest.Config) -> None:
    """Most of the tests' time is compilation: programs that are the same are compiled once in a session, and all are
    compiled fast, to run slowly. Not so for the slow tests, asked for by their mark, whose networks train for longer.
    """
    folder = tempfile.mkdtemp(prefix="cpejax-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_disable_most_optimizations", config.option.markexpr != "slow")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No checks of annotations, as for a user: a value of the wrong type meets the package's own error."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
