"""A process that compiles ever more programs."""

import gc

import jax
import jax.numpy as jnp
import pytest

import cpejax as cpe
from cpejax.util import room

pytestmark = pytest.mark.skipif(not room.MAPS.exists(), reason="only Linux tells the mappings of a process")


def mappings():
    return len(room.MAPS.read_bytes().splitlines())


@pytest.fixture
def little(tmp_path, monkeypatch):
    """A system that allows a few more mappings than there are, by half of which a process has none left."""
    jax.clear_caches()
    gc.collect()
    limit = tmp_path / "max_map_count"
    limit.write_text(str(2 * (mappings() + 100)))
    monkeypatch.setattr(room, "MOST_MAPS", limit)
    monkeypatch.setattr(room, "EVERY", 5)


def test_programs_are_forgotten_before_the_system_allows_no_more(little):
    """As many as would take hundreds of mappings; what was compiled last still runs."""
    first, most, forgotten = mappings(), 0, 0
    for i in range(50):
        double = jax.jit(lambda x, i=i: jnp.sin(x + i) * 2)
        double(jnp.ones(3 + i))
        forgotten += room.make_room()
        most = max(most, mappings())
    assert forgotten
    assert most < first + 300
    assert double(jnp.zeros(52)).shape == (52,)


def test_few_programs_are_kept(little):
    """However many other tests have compiled."""
    room.MOST_MAPS.write_text(str(10**9))
    for i in range(10):
        jax.jit(lambda x, i=i: x + i)(jnp.ones(3))
    assert not room.make_room()


@pytest.mark.slow
def test_simulating_makes_room(little, docstring_names):
    """Programs of fifteen sizes: together they would take more mappings than half of what there is."""
    most = 0
    for size in range(15):
        assert cpe.simulate(docstring_names["model"], 100 + size, key=jax.random.key(0)).n == 100 + size
        most = max(most, mappings())
    assert most < int(room.MOST_MAPS.read_text()) / 2 + 100
