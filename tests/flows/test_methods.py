"""Methods of a user's own: the page that shows one runs, and is right; the smallest flow; files; names."""

import re
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm
from scipy import stats

import cpejax as cpe

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names of the page after all of its code has run."""
    names = {"__name__": "user"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            exec(compile(block, str(PAGE), "exec"), names)
    return names


def exact(page):
    """The posterior of the page's regression."""
    x, y, sigma = np.asarray(page["X"], float), np.array(page["given"]["y"]), page["sigma"]
    covariance = np.linalg.inv(np.eye(2) + x.T @ x / sigma**2)
    return covariance @ x.T @ y / sigma**2, covariance


def test_the_page_meets_the_exact_posterior(page):
    mean, covariance = exact(page)
    draws = page["draws"].posterior["w"].values[0]
    sd = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(draws.mean(0) - mean) < 0.15 * sd)
    np.testing.assert_allclose(np.cov(draws.T) / np.outer(sd, sd), covariance / np.outer(sd, sd), atol=0.15)
    log_q = page["post"].log_prob({"w": draws[:500]}, given=page["given"])
    log_p = stats.multivariate_normal(mean, covariance).logpdf(draws[:500])
    assert np.abs(log_q - log_p).mean() < 0.15


def test_the_loaded_method_is_the_pages(page):
    again = page["post"].sample(4000, given=page["given"], key=jax.random.key(2))
    assert type(page["post"].method) is page["Gaussian"]
    assert np.array_equal(again.posterior["w"], page["draws"].posterior["w"])
    assert not {"solver", "steps"} & set(again.posterior.attrs)
    with pytest.raises(TypeError, match="steps=9 is no option of draws of this posterior: it has none"):
        page["post"].sample(5, given=page["given"], key=KEY, steps=9)


def test_a_file_of_an_unknown_method_needs_its_class(page, tmp_path, monkeypatch):
    post, program = page["post"], page["program"]
    post.save(tmp_path)
    monkeypatch.delitem(cpe.Method.by_name, "Gaussian")
    with pytest.raises(ValueError, match=r"of method 'Gaussian'; known are .*\. Import the file that defines it first"):
        cpe.load(tmp_path, program)
    loaded = cpe.load(tmp_path, program, method=page["Gaussian"]())
    one, other = (p.sample(50, given=page["given"], key=KEY).posterior["w"] for p in (post, loaded))
    assert np.array_equal(one, other)
    with pytest.raises(ValueError, match="was made by Gaussian with"):
        cpe.load(tmp_path, program, method=page["Gaussian"](width=8))


def test_declared_options_reach_draws_and_their_attributes(page):
    post = page["post"]
    paired = page["PairedFlow"](post.program, post.graph, page["sims"], width=8, depth=1, key=KEY)
    post = cpe.Posterior(paired, post.model, post.method, post.settings, post.history, 4000)
    tree = post.sample(200, given=page["given"], key=KEY, pairs=True)
    w = tree.posterior["w"].values[0]
    sums = w[:100] + w[100:]
    np.testing.assert_allclose(sums, np.broadcast_to(sums[0], sums.shape), atol=1e-4)
    assert tree.posterior.attrs["pairs"]
    assert not post.sample(10, given=page["given"], key=KEY).posterior.attrs["pairs"]


# ---- the smallest


def toy():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a, 1.0))


class Smallest(cpe.Flow):
    """`a ~ N(coefficient y, scale²)`."""

    coordinates: cpe.Coordinates
    coefficient: jax.Array
    log_scale: jax.Array

    def __init__(self, program, graph, simulations, *, like, key):
        values = {name: jnp.asarray(x) for name, x in simulations.items()}
        self.coordinates = cpe.Coordinates(program, graph, values)
        self.coefficient, self.log_scale = jnp.zeros(()), jnp.zeros(())

    def loss(self, rows, key):
        return -norm.logpdf(rows["a"], self.coefficient * rows["y"], jnp.exp(self.log_scale)).mean()

    def sample(self, data, n, key):
        return {"a": self.coefficient * data["y"] + jnp.exp(self.log_scale) * jax.random.normal(key, (n,))}, {}

    def log_prob(self, values, data):
        return norm.logpdf(values["a"], self.coefficient * data["y"], jnp.exp(self.log_scale))


@dataclass(frozen=True)
class Least(cpe.Method):
    """It has no options."""

    flow = Smallest


def test_five_functions_are_a_method(tmp_path):
    """One that can be fitted, drawn from, scored, saved and loaded; its posterior is N(y / 2, 1 / 2)."""
    simulations = cpe.simulate(cpe.Model(toy, observed=["y"]), 2000, key=KEY)
    post = cpe.fit(
        toy,
        simulations,
        method=Least(),
        key=KEY,
        progress=False,
        training=cpe.Training(max_epochs=30, learning_rate=0.02),
    )
    post.save(tmp_path)
    for p in (post, cpe.load(tmp_path, toy)):
        draws = p.sample(4000, given={"y": 1.0}, key=KEY)
        assert float(draws.posterior["a"].mean()) == pytest.approx(0.5, abs=0.08)
        assert float(draws.posterior["a"].std()) == pytest.approx(0.5**0.5, abs=0.06)
        found = p.log_prob({"a": np.array([0.5])}, given={"y": 1.0})
        assert found[0] == pytest.approx(stats.norm.logpdf(0.0, 0.0, 0.5**0.5), abs=0.1)
    mode, _ = post.map({"y": 1.0}, key=KEY, draws=20, starts=1, steps=50)
    assert mode["a"] == pytest.approx(0.5, abs=0.08)


def test_two_methods_cannot_have_one_name():
    with pytest.raises(ValueError, match=r"There is a method 'CPE' in cpejax\.flows\.ancestral\.method already"):
        type("CPE", (cpe.Method,), {"flow": Smallest, "__module__": "user"})
    assert cpe.Method.by_name["CPE"] is cpe.CPE
    again = type("Least", (cpe.Method,), {"flow": Smallest, "__module__": __name__})  # as a notebook does
    assert cpe.Method.by_name["Least"] is again


def test_a_method_is_a_dataclass():
    plain = type("Plain", (cpe.Method,), {"flow": Smallest, "__module__": __name__})
    simulations = cpe.simulate(cpe.Model(toy, observed=["y"]), 50, key=KEY)
    with pytest.raises(TypeError, match=r"Plain is no dataclass: write @dataclass\(frozen=True\) above its class"):
        cpe.fit(toy, simulations, method=plain(), key=KEY, progress=False)


def test_what_is_fixed_is_not_trained(page):
    flow = page["post"].flow
    trained = eqx.filter(flow, eqx.is_inexact_array)
    assert isinstance(flow.base, cpe.Fixed)
    assert page["post"].weights < sum(w.size for w in jax.tree.leaves(trained))
