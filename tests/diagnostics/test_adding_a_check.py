"""A check is one object: what it needs is in its own file, and everything else follows."""

import re
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base import from_dict

import cpejax as cpe
from cpejax import plot
from cpejax.diagnostics import Diagnostic, Share, p_value, registry


def program():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 1.0))


class Exact:
    """The posterior of `program`, or one that takes its parameters for independent."""

    program = staticmethod(program)
    graph = cpe.Model(program, observed=["y"]).graph

    def __init__(self, independent=False):
        covariance = np.array([[2.0, -1.0], [-1.0, 2.0]]) / 3
        self.factor = np.linalg.cholesky(np.diag(np.diag(covariance)) if independent else covariance)

    def sample(self, n, given, *, key):
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        z = given["y"][:, None] / 3 + rng.standard_normal((n, len(given["y"]), 2)) @ self.factor.T
        return from_dict({"posterior": {"a": z[None, ..., 0], "b": z[None, ..., 1]}})


class Total(Diagnostic):
    """Ranks of the parameters' sum."""

    name = "Sum of parameters"

    def quantities(self, group):
        return {"total": group.every.sum(2)}

    def tests(self):
        return {"total": p_value(self.ranks("total"), self.study.draws)}

    def sentence(self, others):
        return f"the sum of {len(self.study.names)} parameters is {'right' if self.ok else 'wrong'}."

    def columns(self):
        return {"below the sum": self.study.truth.mean(0) < self.study.truth.sum(1).mean()}

    def panels(self):
        return {"sum": self.panel(self.ranks("total"), self.study.draws)}

    @staticmethod
    def figure(check, style, bins=10):
        import matplotlib.pyplot as plt

        figure, ax = plt.subplots()
        ax.hist(check.total, bins=bins, color=style.DRAWS)
        ax.set_title("ranks of the sum")
        return figure


@pytest.fixture
def register(monkeypatch):
    """Register checks for one test only."""
    registry.registered()
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    return registry.register


def run(posterior=None, **options):
    return cpe.check(posterior or Exact(), key=jax.random.key(0), n=200, draws=60, **options)


def test_a_check_that_is_registered_is_run_and_shares_the_level(register):
    before = run()
    register(Total)
    found = run()
    assert [f.check for f in found.findings] == [*(f.check for f in before.findings), "Sum of parameters"]
    assert found["Sum of parameters"].ok
    assert "ok   Sum of parameters: the sum of 2 parameters is right." in str(found)
    assert found.total.shape == (200,)
    assert found.p_values["Sum of parameters"] == {"total": p_value(found.total, 60)}
    assert found.calibration["below the sum"].shape == (2,)
    # One test more: all that share half of the level have less of it, and nothing else changes.
    tests = sum(len(p) for p in before.p_values.values())
    assert before.levels["Coverage"] == pytest.approx(0.005 / tests)
    assert found.levels["Coverage"] == found.levels["Sum of parameters"] == pytest.approx(0.005 / (tests + 1))
    assert found.levels["Observation"] == before.levels["Observation"] == 0.0025
    assert {name: p for name, p in found.p_values.items() if name != "Sum of parameters"} == before.p_values


def test_the_one_of_the_docs_runs(register):
    page = (Path(__file__).parents[2] / "docs" / "checks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "docs/checks.md", "exec"), {"__name__": "docs"})
    found = run()
    p = p_value(found.total, 60)
    assert found["Sum of parameters"].sentence == f"the sum of 2 parameters is right (p = {p:.2g})."
    assert "sum" in found.panels


def test_a_registered_check_fails_where_it_should(register):
    register(Total)
    found = run(Exact(independent=True))
    assert not found.ok
    assert "BAD  Sum of parameters: the sum of 2 parameters is wrong." in str(found)
    assert found["Ranks (SBC)"].ok


def test_a_check_may_have_a_share_of_its_own(register):
    class Alone(Total):
        share = Share("sum", 4.0)

    register(Alone)
    levels = run().levels
    assert levels["Sum of parameters"] == pytest.approx(0.01 * 4 / 8)
    assert levels["Observation"] == levels["Posterior predictive"] == pytest.approx(0.01 / 8)


def test_its_figures_are_drawn(register):
    register(Total)
    found = run()
    titles = [ax.get_title() for ax in plot.ranks(found, parameters=["a", "sum"]).axes]
    assert {"a", "sum"} <= set(titles)
    assert "Sum of parameters" in found.figures
    assert plot.finding(found, "Sum of parameters", bins=5).axes[0].get_title() == "ranks of the sum"


def test_names_are_not_taken_twice(register):
    with pytest.raises(ValueError, match=r"There is a check 'Coverage' already, cpejax.diagnostics.coverage.Cove"):
        register(type("Other", (Total,), {"name": "Coverage"}))
    register(Total)
    again = {"__module__": __name__, "values": lambda self, finding: {"joint": 1}}
    register(type("Total", (Total,), again))  # the same class, defined again
    with pytest.raises(ValueError, match=r"The check 'Sum of parameters' has values 'joint', as 'Coverage' has"):
        run()


def test_what_is_not_there_is_named():
    found = run()
    with pytest.raises(KeyError, match=r"There is no finding 'Toy'; there are Ranks \(SBC\), Coverage"):
        found["Toy"]
    with pytest.raises(AttributeError, match=r"A check has no attribute 'toy'; the checks found ranks, joint"):
        found.toy  # noqa: B018
