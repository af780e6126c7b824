"""Every example runs, and the two whose likelihood is known agree with MCMC."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import cpejax as cpe
from cpejax.runs.data_files import check_shapes

ROOT = Path(__file__).parents[1]
TINY = {"width": 8, "depth": 1, "hidden": 8, "components": 1}
QUICK = ("hierarchical", "sir", "command_line")
EXAMPLES = ("hierarchical", "sir", "sir_dask", "time_series", "command_line", "amortised")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in EXAMPLES])
def test_examples_run_with_tiny_settings(name, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # as where they are run as scripts
    module = load(ROOT / "examples" / f"{name}.py")
    file = ROOT / "examples" / f"{name}.json"
    data = json.loads(file.read_text()) if file.exists() else module.data
    graph = cpe.Model(module.program, observed=getattr(module, "observed", None)).graph
    many = check_shapes({site: np.asarray(x) for site, x in data.items()}, graph, name)
    assert many == (name == "amortised")
    truth = getattr(module, "truth", {})
    for parameter, value in truth.items():
        assert np.shape(value) == graph.sites[parameter].shape
    embed = getattr(getattr(module, "method", None), "embed", {})
    options = {"method": cpe.CPE(**TINY, embed=embed), "training": cpe.Training(max_epochs=1)}
    if hasattr(module, "main"):  # a script too
        module.main(simulations=60, draws=50, **options)
        out = capsys.readouterr().out
        assert all(parameter in out for parameter in graph.parameters)
    else:
        rows = cpe.simulate(module.program, 60, key=jax.random.key(0))
        posterior = cpe.fit(module.program, rows, key=jax.random.key(1), **options)
        tree = posterior.sample(50, given=data, key=jax.random.key(2))
        assert {name: x.shape for name, x in tree.posterior.data_vars.items()} == dict.fromkeys(truth, (1, 50))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hierarchical", "sir"])
def test_examples_agree_with_mcmc(name):
    found = load(ROOT / "benchmarks" / "examples.py").compare(name)
    assert found["null"] < 0.53, found
    assert found["c2st"] <= 0.57, found
