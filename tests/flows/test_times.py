"""Runs of rows that share a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from cpejax.flows.strata import TimeStrata


@pytest.mark.parametrize(("n", "most"), [(100, 10), (23, 10), (7, 10), (1, 10), (101, 20)])
def test_a_stratum_is_as_wide_as_its_run_is_long(n, most):
    strata = TimeStrata(n, most)
    first, last = (np.asarray(strata.each(strata.times(jnp.full(strata.number, u)))) for u in (0.0, 1.0))
    assert len(np.unique(first)) == strata.number <= most
    # The rows of a run, each a share 1/n of the loss, have the run's own part of [0, 1] as the range of their time.
    starts, rows = np.unique(first, return_counts=True)
    np.testing.assert_allclose(rows / n, np.unique(last) - starts, atol=1e-6)
    np.testing.assert_allclose([starts[0], last[-1]], [0, 1], atol=1e-6)


def test_each_row_gets_what_is_of_its_run():
    strata = TimeStrata(5, most=2)
    np.testing.assert_array_equal(strata.each(jnp.array([[1, 2], [3, 4]])), [[1, 2]] * 3 + [[3, 4]] * 2)
    np.testing.assert_array_equal(strata.each(jnp.array([[1, 2]]), axis=1), [[1, 1, 1, 2, 2]])
