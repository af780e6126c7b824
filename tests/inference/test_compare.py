"""Models compared by their evidence, against closed forms."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import norm

import cpejax as cpe
from cpejax.inference.compare import Comparison

TINY = cpe.CPE(width=8, depth=1, hidden=8, components=2)


def untrained(program):
    model = cpe.Model(program, observed=["y"])
    sims = cpe.simulate(model, 200, key=jax.random.key(0))
    rows = {name: np.asarray(sims[name]) for name in model.graph.sites}
    flow = TINY.build(model.bound, model.graph, rows, key=jax.random.key(1))
    return cpe.Posterior(flow, model, TINY, cpe.Training(), cpe.History(), 200)


def narrow():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mu, 0.5))


def far():
    nu = numpyro.sample("nu", dist.Normal(2.0, 1.0))
    numpyro.sample("y", dist.Normal(nu, 0.5))


def counts():
    rate = numpyro.sample("rate", dist.Exponential(1.0))
    numpyro.sample("y", dist.Poisson(rate))


def pairs():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("two", 2):
        numpyro.sample("y", dist.Normal(mu, 0.5))


@pytest.fixture(scope="module")
def models():
    return {"far": untrained(far), "narrow": untrained(narrow)}


@pytest.fixture(scope="module")
def result(models):
    return cpe.compare(models, given={"y": 0.4}, key=jax.random.key(3), n=2000, prior={"far": 3.0, "narrow": 1.0})


def test_evidences_and_probabilities_are_those_in_closed_form(result):
    table = result.table
    sd = np.sqrt(1.25)
    exact = {"narrow": norm.logpdf(0.4, 0, sd), "far": norm.logpdf(0.4, 2, sd)}
    for name, log_z in exact.items():
        assert abs(table.loc[name, "log_evidence"] - log_z) < 4 * table.loc[name, "log_evidence_error"] < 0.4
    assert result.best == "narrow"
    assert table.loc["narrow", "log_bayes_factor"] == 0
    odds = 3 * np.exp(table.loc["far", "log_bayes_factor"])
    assert np.isclose(table.loc["far", "probability"], odds / (1 + odds))
    right = 3 * np.exp(exact["far"] - exact["narrow"])
    low, high = table.loc["far", ["probability_low", "probability_high"]]
    assert low < table.loc["far", "probability"] < high
    assert low - 0.02 < right / (1 + right) < high + 0.02
    assert set(table["likelihood"]) == {"the program's own density"}


def test_a_comparison_reads_as_a_table(result):
    lines = str(result).splitlines()
    assert lines[0].startswith("model")
    assert [line.split()[0] for line in lines[1:3]] == ["narrow", "far"]
    assert "±" in lines[1]
    table = result.table.assign(pareto_k=[0.2, 1.1])
    doubtful = Comparison(table)
    assert doubtful.doubtful == ["far"]
    assert "far cannot be relied upon" in str(doubtful)
    figure = cpe.plot.evidence(doubtful)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["narrow", "far"]
    assert any("Pareto k 1.1" in t.get_text() for t in figure.axes[0].texts)


def test_models_of_other_data_are_an_error(models, unchecked):
    key, given = jax.random.key(0), {"y": 0.4}
    with pytest.raises(ValueError, match=r"shape \(\) in model 'narrow', but \(2,\) in model 'pairs'"):
        cpe.compare({"narrow": models["narrow"], "pairs": untrained(pairs)}, given=given, key=key)
    with pytest.raises(ValueError, match="probabilities in model 'counts'"):
        cpe.compare({"narrow": models["narrow"], "counts": untrained(counts)}, given=given, key=key)
    with pytest.raises(ValueError, match="compare takes one observation"):
        cpe.compare(models, given={"y": [0.4, 0.5]}, key=key)
    with pytest.raises(ValueError, match="a weight of at least 0 for each of"):
        cpe.compare(models, given=given, key=key, prior={"far": 1.0})
    with pytest.raises(ValueError, match="refine must be True, 'program' or 'learned' to compare"):
        cpe.compare(models, given=given, key=key, refine="auto")
    with pytest.raises(ValueError, match="given has parameters"):
        cpe.compare(models, given={"y": 0.4, "mu": 0.0}, key=key)
    with pytest.raises(TypeError, match=r"models\['a'\] must be a posterior"):
        cpe.compare({"a": narrow}, given=given, key=key)
