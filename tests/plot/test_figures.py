"""Figures of draws, training and checks: what they show, what they leave out and say so, and what they refuse."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from arviz_base import from_dict

import cpejax as cpe
from cpejax import plot
from cpejax.diagnostics import check as _check

RNG = np.random.default_rng(0)
MU = RNG.normal(size=(1, 500))
DRAWS = from_dict(
    {"posterior": {"mu": MU, "tau": np.abs(MU), "beta": MU[..., None] + RNG.normal(size=(1, 500, 8))}},
    dims={"beta": ["group"]},
)
PRIOR = {"mu": RNG.normal(size=2000) * 50, "tau": np.abs(RNG.standard_cauchy(2000)), "beta": RNG.normal(size=(2000, 8))}
TRUTH = {"mu": 0.3, "tau": 9.0, "beta": np.zeros(8)}


def checked(scale=1.0):
    """A check of 200 ranks, uniform or not."""
    ranks = {
        name: np.round(100 * np.clip(0.5 + (RNG.uniform(size=200) - 0.5) * scale, 0, 1)).astype(int)
        for name in ("mu", "tau", *(f"beta[{i}]" for i in range(8)))
    }
    joint, tarp, width, projection = (RNG.integers(0, 101, 200) for _ in range(4))
    given, likelihood = RNG.integers(0, 101, (200, 10)), RNG.integers(0, 51, 200)
    ranked = _check._Ranked(
        np.stack(list(ranks.values()), 1), joint, tarp, given, width, projection, likelihood, np.zeros(200), {}, ""
    )
    table, findings = _check._calibration(list(ranks), ranked, None, 100, 0.01, "")
    rows = [("y", "mean", 0.1, 0.0, -1.0, 1.0, 0.9), ("y", "sd", 9.0, 1.0, 0.5, 1.5, 0.01), ("z", "value", *[0.0] * 5)]
    predictive = _check.Predictive(
        {"y": RNG.normal(size=(300, 4, 5)), "z": RNG.normal(size=300)},
        {"y": RNG.normal(size=(4, 5)), "z": np.array(0.0)},
        pd.DataFrame(rows, columns=["site", "statistic", "observed", "median", "5%", "95%", "p"]),
        [RNG.normal(size=300) for _ in range(3)],
        findings[0],
    )
    graph = cpe.Graph.from_edges({"y": ["mu"]}, ["y"])
    return _check.Check(
        graph,
        ranks,
        joint,
        tarp,
        dict(zip(ranks, given.T, strict=True)),
        width,
        projection,
        likelihood,
        50,
        None,
        100,
        0.01,
        table,
        tuple(findings),
        None,
        predictive,
        0.0,
    )


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
    assert legend(plot.ranks(checked(scale=1.8))) == ["outside the band"]
    assert titles(plot.ranks(checked(), parameters=["mu"])) == ["mu"]
    assert plot.ranks(checked(), most=3).get_supxlabel() == "7 more are not shown"


def test_coverage_of_a_narrow_posterior_is_below_the_diagonal():
    ax = plot.coverage(checked(scale=1.8)).axes[0]
    x, y = ax.get_lines()[1].get_data()
    assert (y[20:80] < x[20:80]).all()


def test_predictive_shows_values_and_statistics():
    figure = plot.predictive(checked())
    assert titles(figure) == ["y", "mean of y", "sd of y", "z"]
    check = checked()
    without = _check.Check(**{**vars(check), "predictive": None})
    with pytest.raises(ValueError, match=r"This check has no predictive part: call cpe.check"):
        plot.predictive(without)


def test_draws_that_cannot_be_drawn():
    many = from_dict({"posterior": {"mu": RNG.normal(size=(1, 90, 3))}}, dims={"mu": ["observation"]})
    with pytest.raises(ValueError, match=r"draws are for 3 observations. Choose one: .*isel\(observation=0\)"):
        plot.marginals(many)
    plot.marginals(many.posterior.to_dataset().isel(observation=0))
    with pytest.raises(ValueError, match=r"draws\['a'\] is one number; expected an array whose first axis"):
        plot.forest({"a": 1.0})


def test_names_are_shown_as_they_are():
    figure = plot.marginals({"$x_1^2": MU[0], "a_b": MU[0]})
    figure.canvas.draw()  # would fail if dollars were mathematics
    assert titles(figure) == ["$x_1^2", "a_b"]
