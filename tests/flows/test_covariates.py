"""What nodes read of plates whose members differ: regressions on covariates and groups."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.flows.ancestral.covariates import KNOTS, regression, table_constants
from cpejax.flows.ancestral.reading import regress

RNG = np.random.default_rng(0)


def regression_of(x):
    """The regression of data on one covariate."""

    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("i", len(x)):
            numpyro.sample("y", dist.Normal(a * x, 1.0))

    graph = cpe.Model(program, observed=["y"]).graph
    return regression(graph, table_constants(graph), "y")


def test_a_fit_of_everything_leaves_no_residual_to_read():
    """Its logarithm would be that of rounding errors, which differ from one processor to the next."""
    fit = regression_of(np.arange(8.0))
    assert fit.fitted == ()
    assert fit.size == len(fit.solve)


@pytest.mark.parametrize(
    ("x", "rank"), [(np.repeat(np.arange(1.0, 11.0), 3), 10), (np.sort(RNG.normal(size=40)), KNOTS)]
)
def test_curves_along_a_covariate_are_fitted(x, rank):
    """By a mean for each kind of members, or by hat functions; what is left of a straight line is read as well."""
    fit = regression_of(x)
    line, curve = fit.fitted
    assert line.shape[1] < curve.shape[1]
    assert rank <= curve.shape[1] <= rank + 2
    y = np.sin(x)[None, :, None]
    results = np.asarray(regress(fit, jnp.asarray(y, jnp.float32)))[0]
    assert results.shape == (fit.size,)
    assert results[-1] < results[-2] - 2  # what is left of the curve is less


def test_variances_between_groups_are_those_of_their_means():
    group = np.repeat(np.arange(30), 2)

    def program():
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("g", 30):
            theta = numpyro.sample("theta", dist.Normal(0.0, tau))
        with numpyro.plate("i", 60):
            numpyro.sample("y", dist.Normal(theta[group], 0.5))

    graph = cpe.Model(program, observed=["y"]).graph
    fit = regression(graph, table_constants(graph), "y")
    y = RNG.normal(size=(5, 60)) + RNG.normal(size=(5, 30))[:, group]
    *_, left, between = np.asarray(regress(fit, jnp.asarray(y[..., None], jnp.float32))).T
    means = y.reshape(5, 30, 2).mean(-1)
    np.testing.assert_allclose(between, np.log(means.var(-1)), atol=1e-3)
    np.testing.assert_allclose(left, np.log(((y.reshape(5, 30, 2) - means[..., None]) ** 2).mean((1, 2))), atol=1e-3)
