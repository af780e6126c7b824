"""Posteriors that were saved by this version and earlier ones load, and draw what they drew.

`python tests/inference/test_saved.py` writes one of the present format to `tests/data/`, where there is none yet.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.inference.saving import FORMAT

DATA = Path(__file__).parents[1] / "data"
ERRORS = np.array([0.5, 1.0, 1.0, 2.0])
GIVEN = {"y": np.array([0.3, -1.0, 0.5, 2.0])}
SAVED = sorted(DATA.glob("posterior_*"))


def program():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("group", 4):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, ERRORS))


MODEL = cpe.Model(program, observed=["y"])


def drawn(posterior):
    """Draws and their log-densities."""
    tree = posterior.sample(5, given=GIVEN, key=jax.random.key(2))
    draws = {name: tree.posterior[name].values[0].tolist() for name in MODEL.graph.parameters}
    return draws | {"log_prob": posterior.log_prob(tree, given=GIVEN)[0].tolist()}


def save(folder):
    """A small posterior and what it draws."""
    simulations = cpe.simulate(MODEL, 500, key=jax.random.key(0))
    method = cpe.CPE(width=4, depth=1, hidden=4, components=2)
    training = cpe.Training(max_epochs=4)
    posterior = cpe.fit(MODEL, simulations, key=jax.random.key(1), method=method, training=training)
    posterior.save(folder)
    (folder / "draws.json").write_text(json.dumps(drawn(posterior), indent=1) + "\n")


@pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)
def test_a_saved_posterior_draws_what_it_drew(folder):
    found, stored = drawn(cpe.load(folder, MODEL)), json.loads((folder / "draws.json").read_text())
    for name, values in stored.items():
        # By the same key; what processors round differently is far below what training or another flow would change.
        np.testing.assert_allclose(found[name], values, rtol=2e-3, atol=2e-3, err_msg=name)


def test_the_present_format_is_there():
    assert DATA / f"posterior_{FORMAT}" in SAVED, "run this file as a script, and commit what it writes"


if __name__ == "__main__":
    folder = DATA / f"posterior_{FORMAT}"
    sys.exit(f"{folder} is there already: what is saved never changes." if folder.exists() else save(folder))
