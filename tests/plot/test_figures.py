"""Figures of draws, training and checks: what they show, what they leave out and say so, and what they refuse."""

import functools

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base import from_dict

import cpejax as cpe
from cpejax import plot

RNG = np.random.default_rng(0)
MU = RNG.normal(size=(1, 500))
DRAWS = from_dict(
    {"posterior": {"mu": MU, "tau": np.abs(MU), "beta": MU[..., None] + RNG.normal(size=(1, 500, 8))}},
    dims={"beta": ["group"]},
)
PRIOR = {"mu": RNG.normal(size=2000) * 50, "tau": np.abs(RNG.standard_cauchy(2000)), "beta": RNG.normal(size=(2000, 8))}
TRUTH = {"mu": 0.3, "tau": 9.0, "beta": np.zeros(8)}


def program():
    """Parameters of which the data tell nearly nothing, so that the prior is the posterior."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.Normal(0.0, 1.0))
    with numpyro.plate("group", 8):
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(1e-3 * (mu + tau + beta.sum()), 1.0).expand([4, 5]).to_event(2))
    numpyro.sample("z", dist.Normal(1e-3 * mu, 1.0))


class FromPrior:
    """Prior draws, too narrow by a factor."""

    program = staticmethod(program)
    graph = cpe.Model(program, observed=["y", "z"]).graph

    def __init__(self, narrow):
        self.narrow = narrow

    def sample(self, n, given, *, key):
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        shapes = {"mu": (), "tau": (), "beta": (8,)}
        lead = (1, n, len(given["y"]))
        draws = {name: rng.standard_normal((*lead, *shape)) / self.narrow for name, shape in shapes.items()}
        return from_dict({"posterior": draws})


@functools.cache
def checked(narrow=1.0):
    """A check with 200 simulated observations."""
    given = {"y": np.linspace(-1, 1, 20).reshape(4, 5), "z": np.array(0.0)}
    return cpe.check(FromPrior(narrow), given, key=jax.random.key(0), n=200, draws=100)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def titles(figure):
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


def legend(figure):
    return [text.get_text() for box in figure.legends for text in box.get_texts()]


def test_marginals_show_draws_prior_reference_and_truth():
    figure = plot.marginals(DRAWS, prior=PRIOR, truth=TRUTH, reference={"mu": MU[0]})
    assert titles(figure) == ["mu", "tau", *(f"beta[{i}]" for i in range(8))]
    assert legend(figure) == ["posterior", "prior", "reference", "truth"]
    tau = figure.axes[1]
    assert tau.get_xlim()[1] > 9  # the truth is seen, wherever it is
    assert tau.get_xlim()[1] < 20  # and a wide prior does not squeeze the posterior


def test_a_density_is_one_and_stops_where_the_support_does():
    figure = plot.marginals({"tau": np.abs(RNG.normal(size=5000))})
    x, y = figure.axes[0].get_lines()[0].get_data()
    assert abs(np.trapezoid(y, x) - 1) < 0.02
    assert x.min() > -0.05
    assert y[np.argmin(np.abs(x - 0.1))] > 0.7  # 2 φ(0) = .8: no dip at the edge


def test_what_is_left_out_is_said():
    figure = plot.marginals(DRAWS, most=4)
    assert titles(figure) == ["mu", "tau", "beta[0]", "beta[1]"]
    assert figure.get_supxlabel() == "6 more are not shown"


def test_parameters_are_chosen_by_site_or_member():
    assert titles(plot.marginals(DRAWS, parameters=["beta[3]", "mu"])) == ["beta[3]", "mu"]
    assert len(titles(plot.marginals(DRAWS, parameters=["beta"]))) == 8
    with pytest.raises(ValueError, match=r"There is no parameter 'gamma'; there are mu, tau, beta"):
        plot.marginals(DRAWS, parameters=["gamma"])


def test_pair_has_a_panel_for_each_pair():
    figure = plot.pair(DRAWS, parameters=["mu", "tau"], truth=TRUTH, reference={"mu": MU[0], "tau": MU[0] ** 2})
    drawn = [ax for ax in figure.axes if ax.axison]
    assert len(drawn) == 3
    assert legend(figure) == ["posterior", "reference", "truth"]
    assert len(plot.pair({"a": MU[0]}).axes) == 1
    assert len([ax for ax in plot.pair(DRAWS).axes if ax.axison]) == 21  # six of ten parameters
    plot.pair({"a": MU[0], "constant": np.ones(500)})  # a region cannot be drawn, which is no error


def test_forest_has_a_line_for_each_parameter():
    figure = plot.forest(DRAWS, truth=TRUTH, reference={"mu": MU[0]})
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["mu", "tau", *(f"beta[{i}]" for i in range(8))]
    low, high = np.quantile(MU, [0.05, 0.95])
    np.testing.assert_allclose(ax.get_lines()[0].get_xdata(), [low, high])


def test_training_shows_both_losses_and_what_was_kept():
    history = cpe.History([3.0, 2.0, 1.5, 1.4], [3.1, 2.2, 1.9, 2.0], best_epoch=2, cooling=3)
    ax = plot.training(history).axes[0]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["training", "validation", "kept", "rate lowered"]
    assert ax.get_lines()[2].get_data() == ([3], [1.9])
    plot.training(cpe.History([1.0], [1.0], 0))


def test_ranks_inside_and_outside_the_band():
    good = plot.ranks(checked())
    more = ["joint", "points (TARP)", "given the data", "log-likelihood"]
    assert titles(good) == ["mu", "tau", *(f"beta[{i}]" for i in range(8)), *more]
    assert legend(good) == []
    assert legend(plot.ranks(checked(narrow=1.8))) == ["outside the band"]
    assert titles(plot.ranks(checked(), parameters=["mu"])) == ["mu"]
    assert plot.ranks(checked(), most=3).get_supxlabel() == "7 more are not shown"


def test_coverage_of_a_narrow_posterior_is_below_the_diagonal():
    ax = plot.coverage(checked(narrow=1.8)).axes[0]
    x, y = ax.get_lines()[1].get_data()
    assert (y[20:80] < x[20:80]).all()


def test_predictive_shows_values_and_statistics():
    figure = plot.predictive(checked())
    assert titles(figure) == ["y", "mean of y", "sd of y", "smallest of y", "largest of y", "z"]
    assert titles(plot.predictive(checked().predictive, most=1)) == ["y", "mean of y"]
    without = cpe.check(FromPrior(1.0), key=jax.random.key(0), n=20, draws=20)
    with pytest.raises(ValueError, match=r"This check has no predictive part: call cpe.check"):
        plot.predictive(without)


def test_the_figure_of_a_check_is_found_by_its_name():
    assert checked().figures == ["Ranks (SBC)", "Coverage", "Posterior predictive"]
    assert titles(plot.finding(checked(), "Ranks (SBC)", parameters=["mu"])) == ["mu"]
    with pytest.raises(
        ValueError, match=r"The check 'Likelihood' has no figure; those that have one are Ranks \(SBC\)"
    ):
        plot.finding(checked(), "Likelihood")


def test_draws_that_cannot_be_drawn():
    many = from_dict({"posterior": {"mu": RNG.normal(size=(1, 90, 3))}}, dims={"mu": ["observation"]})
    with pytest.raises(ValueError, match=r"draws are for 3 observations. Choose one: .*isel\(observation=0\)"):
        plot.marginals(many)
    plot.marginals(many.posterior.to_dataset().isel(observation=0))
    with pytest.raises(ValueError, match=r"draws\['a'\] is one value; expected an array whose first axis"):
        plot.forest({"a": 1.0})


def test_names_are_shown_as_they_are():
    figure = plot.marginals({"$x_1^2": MU[0], "a_b": MU[0]})
    figure.canvas.draw()  # would fail if dollars were mathematics
    assert titles(figure) == ["$x_1^2", "a_b"]
