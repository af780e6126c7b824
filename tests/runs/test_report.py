"""`cpe.report`: the page of what a Python user holds. What is on it, and how it looks, is in `test_infer`."""

import re
import xml.etree.ElementTree as ET
from html import unescape

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr

import cpejax as cpe
from cpejax.runs.report import ROWS


def program():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("<b>", 2):
        beta = numpyro.sample("beta", dist.Normal(mu, 1.0))
    numpyro.sample("y", dist.Normal(beta.sum(), 1.0))


@pytest.fixture(scope="module")
def sims():
    return cpe.simulate(cpe.Model(program, observed=["y"]), 200, key=jax.random.key(0))


@pytest.fixture(scope="module")
def posterior(sims):
    method = cpe.CPE(width=8, depth=1, hidden=8, components=2)
    return cpe.fit(program, sims, method=method, key=jax.random.key(1), training=cpe.Training(max_epochs=1))


@pytest.fixture(scope="module")
def draws(posterior):
    return posterior.sample(50, given={"y": 0.3}, key=jax.random.key(2))


@pytest.fixture(scope="module")
def check(posterior, sims):
    return cpe.check(posterior, simulations=sims, n=20, draws=20, key=jax.random.key(3))


def words(path) -> str:
    """The text of a page, which is well-formed but for the elements that HTML does not close."""
    text = path.read_text(encoding="utf-8")
    ET.fromstring(
        re.sub(r"<(meta|link)([^>]*)>", r"<\1\2/>", text[text.index("<html") :]).replace(" open ", ' open="" ')
    )
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text[text.index("<body") :])).split())


def test_what_a_user_holds_is_enough(posterior, draws, check, tmp_path):
    plt.close("all")
    path = tmp_path / "new" / "report.html"
    cpe.report(posterior, draws, check, str(path))
    page = words(path)
    assert "mu, beta given y" in page
    assert "50 draws from the posterior." in page
    assert "Marginal densities of the posterior." in page
    assert "No observation was checked: cpe.check(posterior, given=…) checks one." in page
    assert "trained on 200 simulations for 1 epochs" in page
    assert f"The draws were made with the key {draws.posterior.attrs['key']}." in page
    assert jax.__version__ in page
    assert "Seed" not in page
    assert "finished" not in page
    assert "<b>" not in path.read_text()  # the plate
    assert plt.get_fignums() == []


def test_what_else_is_told(posterior, draws, check, sims, tmp_path):
    path, model = tmp_path / "report.html", tmp_path / "my model.py"
    model.write_text("# 1 < 2 & 'so on'")
    path.write_text("an older one")
    cpe.report(
        *(posterior, draws, check, path),
        simulations=sims,
        truth={"mu": 0.5, "beta": np.zeros(2)},
        model_file=model,
        command="python 'my model.py'",
        seeds={"fit": 1, "sample": 2},
        stages={"fit": {"seconds": 1234.5, "at": "at noon"}},
    )
    page = words(path)
    assert "Marginal densities of the posterior, with the prior and the true values." in page
    assert re.search(r"parameter mean sd 5 % 25 % median 75 % 95 % truth mu( −?[\d.]+){7} 0\.50*\b", page), page[:900]
    assert "my model.py · cpejax" in page
    assert "# 1 < 2 & 'so on'" in page
    assert "python 'my model.py' Seed 1 of fit, 2 of sample." in page
    assert "stage seconds finished fit 1234 at noon" in page


def test_many_observations(posterior, check, tmp_path):
    path = tmp_path / "report.html"
    given = {"y": np.linspace(-1.0, 1.0, 20)}
    many = posterior.sample(50, given=given, key=jax.random.key(2))
    many.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "draws.nc", engine="h5netcdf") as read:
        cpe.report(posterior, read, check, path)
    page = words(path)
    assert "The draws were made with the key [0, 2]." in page
    assert "There are 20 observations; each has its own posterior." in page
    assert "mu: median, 50 and 90 % intervals for each observation." in page
    assert f"{20 * 3 - ROWS} more rows" in page
    with pytest.raises(ValueError, match="truth was given, but draws are of many observations: leave it out"):
        cpe.report(posterior, many, check, path, truth={"mu": 0.0})


def test_what_is_no_draws_or_no_truth(posterior, draws, check, tmp_path):
    path = tmp_path / "report.html"
    other = xr.DataTree.from_dict({"prior": draws.posterior.to_dataset()})
    with pytest.raises(ValueError, match=r"draws has the groups \['prior'\] and none of the parameters mu, beta in"):
        cpe.report(posterior, other, check, path)
    with pytest.raises(
        ValueError, match=r"truth\['beta'\] has shape \(3,\); expected are 'mu' of shape \(\), 'beta' of"
    ):
        cpe.report(posterior, draws, check, path, truth={"beta": np.zeros(3)})
    with pytest.raises(ValueError, match=r"truth\['nu'\] has shape \(\); expected are"):
        cpe.report(posterior, draws, check, path, truth={"nu": 0.0})
    assert not path.exists()
