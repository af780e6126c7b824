"""Programs on all cores."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from cpejax import _cores


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(_cores, "cores", lambda: 2)


def test_a_program_alone_is_compiled_for_all_cores(two_cores):
    assert _cores.options_for_all_cores() == _cores.WIDE | _cores.PRODUCTS_BY_EIGEN
    product = jax.jit(lambda a: a @ a)
    one, two = (jnp.ones((size, size)) for size in (64, 65))
    with ThreadPoolExecutor(2) as threads:
        (alone,) = _cores.compile_each([product.lower(one)], threads)
        beside = _cores.compile_each([product.lower(one), product.lower(two)], threads)
    assert "ynn" not in alone.as_text()
    assert all("ynn" in program.as_text() for program in beside)
    assert (alone(one) == 64).all()


def test_programs_that_look_alike_are_compiled_once():
    double = jax.jit(lambda a: 2 * a)
    with ThreadPoolExecutor(2) as threads:
        first, second, third = _cores.compile_each([double.lower(jnp.ones(n)) for n in (2, 2, 3)], threads)
    assert first is second
    assert first is not third


def test_a_version_of_xla_without_an_option_does_without_it():
    assert _cores.known(_cores.WIDE) == _cores.WIDE
    assert _cores.known({"xla_cpu_no_such_option": "1"}) == {}
