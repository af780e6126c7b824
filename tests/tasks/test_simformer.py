"""Conditionals of the tree and of the hidden Markov chain, whichever sites are given."""

import jax
import numpy as np
import numpyro
import pytest
from scipy import stats

from cpejax import metrics, tasks
from cpejax.tasks import simformer

NAMES = simformer.names()


def test_names_and_sets():
    assert len(NAMES) == 12
    assert tasks.get("simformer/hmm-0").observed == tuple(f"x{i}" for i in range(10))
    for name in NAMES:
        task = tasks.get(name)
        assert 0 < len(set(task.observed)) < len(task.parents)
        assert len(task.first) < len(task.observed)
    assert len({tasks.get(name).observed for name in NAMES}) == 12
    task = tasks.get("simformer/tree-2")
    assert task.first == ("theta1", "theta2", "x1")
    assert set(task.parents) == set(task.shapes)
    assert set(task.observation(1)) == set(task.observed) == {"theta1", "theta2", "x1", "x4"}
    assert task.for_set.graph.data == ("x4",)
    assert set(task.first) <= set(task.for_set.graph.parameters)


@pytest.mark.parametrize("which", ["tree", "hmm"])
def test_parents_are_those_of_the_program(which):
    graph = tasks.get(f"simformer/{which}-0").joint.graph
    assert {name: set(site) for name, site in graph.parents.items()} == {
        name: set(parents) for name, parents in simformer.MODELS[which].PARENTS.items()
    }


def joint_draws(task, n, seed):
    """Draws of all sites by the program."""

    def one(key):
        trace = numpyro.handlers.trace(numpyro.handlers.seed(task.program, key)).get_trace()
        return {name: trace[name]["value"] for name in task.shapes}

    return {k: np.asarray(v, float) for k, v in jax.vmap(one)(jax.random.split(jax.random.key(seed), n)).items()}


def ranks(task, simulations, draws):
    """Ranks of what was simulated among exact draws given the set, in [0, 1], `{site: (n,)}`."""
    n = len(simulations["theta1"])
    found = {name: np.empty(n) for name in task.parameters}
    for i in range(n):
        rng = np.random.default_rng(i)
        drawn = task.exact({name: np.asarray(simulations[name][i]) for name in task.observed}, draws, rng)
        for name in task.parameters:
            below = (drawn[name] < simulations[name][i]).sum()
            found[name][i] = (below + rng.uniform()) / (draws + 1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_exact_draws_are_calibrated(name, monkeypatch):
    """The sampler knows nothing of the program, and what the program simulates is uniform among its draws."""
    if "tree" in name:  # grids with fewer cells; rejection makes draws exact all the same
        full = simformer.tree.grid_draws
        monkeypatch.setattr(simformer.tree, "grid_draws", lambda f, box, cells, n, rng: full(f, box, 300, n, rng))
    else:
        monkeypatch.setattr(simformer.hmm, "CELLS", 400)
    task = tasks.get(name)
    found = ranks(task, joint_draws(task, 100, 3), 99)
    p = [stats.kstest(x, "uniform").pvalue for x in found.values()]
    assert min(p) * len(p) > 0.01, dict(zip(found, p, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simformer/tree-2", "simformer/hmm-5"])
def test_exact_draws_are_those_of_chains(name):
    """Slice sampling of the program's own density."""
    task = tasks.get(name)
    exact, chains = task.reference(0, cache=False).posterior, task.reference(0, sampler="slice", cache=False).posterior
    draws = [
        task.ravel({site: tree[site].values.reshape(-1, *task.shapes[site]) for site in task.parameters})
        for tree in (exact, chains)
    ]
    assert chains.attrs["rhat"] < 1.02
    assert metrics.c2st(draws[0][:10_000], draws[1][:10_000]) <= 0.53
