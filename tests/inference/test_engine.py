"""The ancestral flow: right where the posterior is known, with plates, chains and supports; it reads nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal

import cpejax as cpe
from cpejax.flows.base import count_weights
from cpejax.inference.posterior import Posterior
from cpejax.inference.settings import History

SMALL = {"width": 32, "depth": 2, "hidden": 32, "components": 4}
KEY = jax.random.key(0)


def toy():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 0.3))


def groups(size=4):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("group", size):
        theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(theta, 0.5))


def crossed():
    with numpyro.plate("row", 2, dim=-2):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("column", 2, dim=-1):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", 2, dim=-2), numpyro.plate("column", 2, dim=-1):
        numpyro.sample("y", dist.Normal(a + b, 0.5))


def supports():
    u = numpyro.sample("u", dist.Uniform(-1.0, 2.0))
    h = numpyro.sample("h", dist.HalfNormal(1.0))
    t = numpyro.sample("t", dist.TruncatedNormal(0.0, 1.0, low=-0.5, high=1.0))
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([0.5, 1.0, 2.0])))
    numpyro.sample("y", dist.Normal(u + h + t + p[0], 0.2))


def fitted(program, n=4000, **options):
    simulations = cpe.simulate(cpe.Model(program, observed=["y"]), n, key=KEY)
    method, key = options.pop("method", cpe.CPE(**SMALL)), options.pop("key", jax.random.key(1))
    training = cpe.Training(**{"steps": 1500, "max_epochs": 40, **options})
    return cpe.fit(program, simulations, method=method, key=key, training=training, emulate=False)


def flat(tree, names):
    x = [tree.posterior[n].values[0] for n in names]
    return np.concatenate([v.reshape(len(v), -1) for v in x], axis=1)


def gaussian(design, noise):
    """The posterior covariance, and the map from data to its mean: `x = design @ theta + noise`, a unit prior."""
    covariance = np.linalg.inv(np.eye(design.shape[1]) + design.T @ design / noise**2)
    return covariance, covariance @ design.T / noise**2


@pytest.fixture(scope="module")
def posterior():
    return fitted(toy, n=8000)


@pytest.fixture(scope="module")
def grouped():
    return fitted(groups)


def test_joint_law_of_the_toy(posterior):
    covariance, to_mean = gaussian(np.ones((1, 2)), 0.3)
    for y in (-1.0, 0.5):
        draws = flat(posterior.sample(10_000, given={"y": y}, key=KEY), ("a", "b"))
        found = np.cov(draws.T)
        # 10,000 draws know a correlation of -.92 to .0016 and a standard deviation to .7 %; the rest is the network's.
        assert abs(found[0, 1] / np.sqrt(found[0, 0] * found[1, 1]) + 0.917) < 0.02
        assert np.allclose(np.sqrt(np.diag(found) / np.diag(covariance)), 1, atol=0.06)
        assert np.allclose(draws.mean(0), to_mean @ [y], atol=0.08)


def test_log_prob_is_the_density_of_the_toy(posterior):
    covariance, to_mean = gaussian(np.ones((1, 2)), 0.3)
    side = np.linspace(-5, 5, 201)
    grid = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
    log_prob = posterior.log_prob({"a": grid[:, 0], "b": grid[:, 1]}, given={"y": 0.5})
    share = np.exp(log_prob) * (side[1] - side[0]) ** 2
    assert abs(share.sum() - 1) < 0.02
    exact = multivariate_normal(to_mean @ [0.5], covariance).logpdf(grid)
    assert (share * np.abs(log_prob - exact)).sum() < 0.1


def test_euler_agrees_with_rk45(posterior):
    euler, rk45 = (
        flat(posterior.sample(10_000, given={"y": 0.5}, key=KEY, solver=s), ("a", "b")) for s in ("euler", "rk45")
    )
    assert np.abs(euler - rk45).max() < 0.1  # the same noise: draw by draw


def test_groups_against_the_exact_posterior(grouped):
    # x = theta = mu + e, in coordinates (mu, e1..e4)
    design = np.concatenate([np.ones((4, 1)), np.eye(4)], axis=1)
    covariance, to_mean = gaussian(design, 0.5)
    to_theta = np.concatenate([np.eye(5)[:1], design])
    y = np.array([1.0, 0.2, -0.5, 2.0])
    draws = flat(grouped.sample(10_000, given={"y": y}, key=KEY), ("mu", "theta"))
    exact = to_theta @ covariance @ to_theta.T
    assert np.allclose(draws.mean(0), to_theta @ to_mean @ y, atol=0.1)
    assert np.allclose(np.cov(draws.T), exact, atol=0.06)


def noise(graph, n=20):
    """Values with the shapes of the program's: enough to build a flow."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(n, *site.shape)).astype(np.float32) for name, site in graph.sites.items()}


def test_weights_do_not_grow_with_a_plate():
    weights = []
    for size in (4, 200):
        graph = cpe.Model(groups, observed=["y"], args=(size,)).graph
        weights.append(count_weights(cpe.CPE().build(partial(groups, size), graph, noise(graph), key=KEY)))
    assert weights[0] == weights[1]


def test_a_group_does_not_read_another_groups_data(grouped):
    flow = grouped.flow
    (number,) = [g for g, group in enumerate(flow.plan.groups) if group.nodes[0][0] == "theta"]
    values = {name: jnp.asarray(x) for name, x in noise(grouped.graph, 1).items()}

    @jax.jit
    def hidden(y):
        tables = flow.prepare({**values, "y": y})["tables"]
        return flow._context(number, flow.groups[number], tables).mixture.means[:, 0, 0].sum(0)

    jacobian = jax.jacobian(hidden)(values["y"])[:, 0]
    assert np.all(np.diag(jacobian) != 0)
    assert np.all(jacobian[~np.eye(4, dtype=bool)] == 0)


@pytest.mark.slow
def test_an_unrolled_plate_has_the_exact_posterior():
    posterior = fitted(crossed)
    assert posterior.flow.plan.graph.unrolled
    rows = [np.concatenate([np.eye(2)[i], np.eye(2)[j]]) for i in range(2) for j in range(2)]
    covariance, to_mean = gaussian(np.array(rows), 0.5)
    y = np.array([[0.5, -0.3], [1.0, -1.5]])
    draws = flat(posterior.sample(10_000, given={"y": y}, key=KEY), ("a", "b"))
    assert np.allclose(draws.mean(0), to_mean @ y.ravel(), atol=0.12)
    assert np.allclose(np.cov(draws.T), covariance, atol=0.06)


def test_no_draw_is_outside_the_support():
    """By construction: an untrained flow does not leave it either."""
    simulations = cpe.simulate(cpe.Model(supports, observed=["y"]), 1000, key=KEY)
    method = cpe.CPE(**SMALL)
    flow = method.build(supports, simulations.graph, simulations, key=KEY)
    posterior = Posterior(flow, simulations.model, method, cpe.Training(), History(), simulations.n)
    y = np.array([-3.0, 0.0, 8.0])  # the first and the last are far from anything simulated
    tree = posterior.sample(5000, given={"y": y}, key=KEY)
    draws = {n: tree.posterior[n].values[0] for n in ("u", "h", "t", "p")}
    assert tree.posterior.attrs["acceptance_rate"] == 1.0
    assert ((draws["u"] >= -1) & (draws["u"] <= 2)).all()
    assert (draws["h"] > 0).all()
    assert ((draws["t"] >= -0.5) & (draws["t"] <= 1)).all()
    assert (draws["p"] >= 0).all()
    assert np.allclose(draws["p"].sum(-1), 1, atol=1e-5)
    assert all(np.isfinite(x).all() for x in draws.values())


@pytest.mark.slow
def test_a_chain_of_named_sites_is_one_compiled_body_and_exact():
    length = 6

    def chain():
        x = 0.0
        for t in range(length):
            x = numpyro.sample(f"x{t}", dist.Normal(x, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0))

    posterior = fitted(chain)
    assert len(posterior.flow.plan.runs) == 1
    draws = flat(posterior.sample(10_000, given={"y": 2.0}, key=KEY), [f"x{t}" for t in range(length)])
    # In the innovations the datum is their sum, and x their partial sums.
    covariance, to_mean = gaussian(np.ones((1, length)), 1.0)
    sums = np.tril(np.ones((length, length)))
    exact = sums @ covariance @ sums.T
    sd = np.sqrt(np.diag(exact))
    assert np.allclose(draws.mean(0) / sd, (sums @ to_mean @ [2.0]) / sd, atol=0.12)
    assert np.allclose(np.cov(draws.T) / np.outer(sd, sd), exact / np.outer(sd, sd), atol=0.12)
