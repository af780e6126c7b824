"""From simulations to a posterior: right where the posterior is known, and clear where the input is bad."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal, norm
from scipy.stats import t as student

import cpejax as cpe
from cpejax._flow import count_weights
from cpejax._simulate import check_key

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
    with numpyro.plate("row", 3, dim=-2):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("column", 2, dim=-1):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", 3, dim=-2), numpyro.plate("column", 2, dim=-1):
        numpyro.sample("y", dist.Normal(a + b, 0.5))


def supports():
    u = numpyro.sample("u", dist.Uniform(-1.0, 2.0))
    h = numpyro.sample("h", dist.HalfNormal(1.0))
    t = numpyro.sample("t", dist.TruncatedNormal(0.0, 1.0, low=-0.5, high=1.0))
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([0.5, 1.0, 2.0])))
    numpyro.sample("y", dist.Normal(u + h + t + p[0], 0.2))


def fitted(program, n=4000, **options):
    simulations = cpe.simulate(program, n, observed=["y"], key=KEY)
    settings = {"steps": 1500, "max_epochs": 40, "method": cpe.CPE(**SMALL), "key": jax.random.key(1), **options}
    return cpe.fit(program, simulations, **settings)


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
    tree = posterior.sample(2000, given={"y": 0.5}, key=KEY)
    exact = multivariate_normal(to_mean @ [0.5], covariance).logpdf(flat(tree, ("a", "b")))
    log_prob = posterior.log_prob(tree, given={"y": 0.5})
    assert log_prob.shape == (1, 2000)
    assert np.abs(log_prob[0] - exact).mean() < 0.1
    side = np.linspace(-5, 5, 201)
    grid = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
    density = np.exp(posterior.log_prob({"a": grid[:, 0], "b": grid[:, 1]}, given={"y": 0.5}))
    assert abs(density.sum() * (side[1] - side[0]) ** 2 - 1) < 0.02


def test_euler_agrees_with_rk45(posterior):
    euler, rk45 = (
        flat(posterior.sample(5000, given={"y": 0.5}, key=KEY, solver=s), ("a", "b")) for s in ("euler", "rk45")
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


def test_weights_do_not_grow_with_a_plate():
    weights = []
    for size in (4, 200):
        graph = cpe.Graph.from_program(groups, size, observed=["y"])
        simulations = cpe.simulate(groups, 20, size, observed=["y"], key=KEY)
        flow = cpe.CPE().build(partial(groups, size), graph, simulations, key=KEY)
        weights.append(count_weights(flow))
    assert weights[0] == weights[1]


def test_a_group_does_not_read_another_groups_data(grouped):
    flow = grouped.flow
    (number,) = [g for g, group in enumerate(flow.plan.groups) if group.nodes[0][0] == "theta"]
    values = {k: jnp.asarray(v[:1]) for k, v in cpe.simulate(groups, 20, observed=["y"], key=KEY).items()}

    def hidden(y):
        tables = flow.prepare({**values, "y": y})["tables"]
        return flow._context(number, flow.groups[number], tables).mixture.means[0, 0].sum(-1)

    slope = jax.jacobian(hidden)(values["y"])[:, 0]
    assert np.all(np.diag(slope) != 0)
    assert np.all(slope[~np.eye(4, dtype=bool)] == 0)


def test_an_unrolled_plate_has_the_exact_posterior():
    posterior = fitted(crossed)
    assert posterior.flow.plan.graph.unrolled
    rows = [np.concatenate([np.eye(3)[i], np.eye(2)[j]]) for i in range(3) for j in range(2)]
    covariance, to_mean = gaussian(np.array(rows), 0.5)
    y = np.array([[0.5, -0.3], [1.0, 0.4], [-0.8, -1.5]])
    draws = flat(posterior.sample(10_000, given={"y": y}, key=KEY), ("a", "b"))
    assert np.allclose(draws.mean(0), to_mean @ y.ravel(), atol=0.12)
    assert np.allclose(np.cov(draws.T), covariance, atol=0.06)


def test_no_draw_is_outside_the_support():
    posterior = fitted(supports, n=1000, max_epochs=3)
    for y in (-3.0, 0.0, 8.0):  # the first and the last are far from anything simulated
        tree = posterior.sample(5000, given={"y": y}, key=KEY)
        draws = {n: tree.posterior[n].values[0] for n in ("u", "h", "t", "p")}
        assert tree.posterior.attrs["acceptance_rate"] == 1.0
        assert ((draws["u"] >= -1) & (draws["u"] <= 2)).all()
        assert (draws["h"] > 0).all()
        assert ((draws["t"] >= -0.5) & (draws["t"] <= 1)).all()
        assert (draws["p"] >= 0).all()
        assert np.allclose(draws["p"].sum(-1), 1, atol=1e-5)
        assert all(np.isfinite(x).all() for x in draws.values())


def test_a_chain_of_named_sites_is_one_compiled_body():
    def chain(n):
        x = 0.0
        for t in range(n):
            x = numpyro.sample(f"x{t}", dist.Normal(x, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0))

    posterior = fitted(lambda: chain(20), n=60, max_epochs=1)
    assert len(posterior.flow.plan.runs) == 1
    tree = posterior.sample(50, given={"y": 0.0}, key=KEY)
    assert tree.posterior["x19"].shape == (1, 50)


def test_many_observations_in_one_call(posterior):
    y = np.array([-1.0, 0.0, 2.0])
    tree = posterior.sample(4000, given={"y": y}, key=KEY)
    assert tree.posterior["a"].dims == ("chain", "draw", "observation")
    total = (tree.posterior["a"] + tree.posterior["b"]).values[0].mean(0)
    assert np.allclose(total, y * 2 / 2.09, atol=0.1)


def test_another_observation_does_not_recompile(posterior, caplog):
    posterior.sample(77, given={"y": 0.1}, key=KEY)
    with jax.log_compiles():
        posterior.sample(77, given={"y": 0.9}, key=jax.random.key(5))
        assert "_draw" not in caplog.text
        posterior.sample(78, given={"y": 0.9}, key=jax.random.key(5))
        assert "_draw" in caplog.text  # another number of draws is another program


def test_tree_is_named_and_goes_to_netcdf(grouped, tmp_path):
    tree = grouped.sample(10_000, given={"y": np.zeros(4)}, key=KEY)
    assert tree.posterior["theta"].dims == ("chain", "draw", "group")
    assert tree.observed_data["y"].dims == ("group",)
    for name in ("acceptance_rate", "sampling_time", "key", "inference_library_version", "jax_version"):
        assert name in tree.posterior.attrs
    tree.to_netcdf(tmp_path / "posterior.nc", engine="h5netcdf")


def test_saving_and_loading_change_nothing(posterior, tmp_path):
    posterior.save(tmp_path)
    loaded = cpe.load(tmp_path, toy)
    one, other = (p.sample(100, given={"y": 0.3}, key=KEY) for p in (posterior, loaded))
    assert np.array_equal(one.posterior["a"], other.posterior["a"])
    assert loaded.history.best == posterior.history.best


@pytest.mark.parametrize("file", ["weights.safetensors", "posterior.json"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_file_is_an_error(posterior, tmp_path, file, damage):
    posterior.save(tmp_path)
    content = bytearray((tmp_path / file).read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        cpe.load(tmp_path, toy)


def test_loading_says_how_the_program_differs(posterior, tmp_path):
    def other():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a.sum() + b, 0.3))

    posterior.save(tmp_path)
    with pytest.raises(ValueError, match=r"site 'a' has shape \[2\], expected \[\]"):
        cpe.load(tmp_path, other)


def test_the_same_key_gives_the_same_posterior():
    one, other = (fitted(toy, n=300, max_epochs=3) for _ in range(2))
    assert one.history.validation == other.history.validation


RUN = """
import jax, numpy as np, sys
sys.path.insert(0, {folder!r})
import cpejax as cpe, test_engine as t
sims = cpe.simulate(t.toy, 3000, observed=["y"], key=t.KEY)
import cpejax._train as train
train.train.__kwdefaults__["every"] = 0.0
p = cpe.fit(t.toy, sims, key=t.KEY, method=cpe.CPE(**t.SMALL), max_epochs=25, checkpoint={checkpoint!r})
draw = p.sample(5, given=dict(y=.3), key=t.KEY).posterior.a
print("done", *(x.hex() for x in p.history.validation), float(draw.sum()).hex())
"""


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    def command(checkpoint):
        code = RUN.format(folder=os.path.dirname(__file__), checkpoint=str(checkpoint))  # noqa: PTH120
        return [sys.executable, "-c", code]

    whole = subprocess.run(command(tmp_path / "whole"), capture_output=True, text=True, check=True).stdout
    file = tmp_path / "killed" / "checkpoint.safetensors"
    process = subprocess.Popen(command(tmp_path / "killed"), stdout=subprocess.PIPE, text=True)
    while not file.exists() and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert file.exists()
    resumed = subprocess.run(command(tmp_path / "killed"), capture_output=True, text=True, check=True).stdout
    assert resumed == whole


def test_ctrl_c_returns_the_best_so_far(monkeypatch):
    import cpejax._posterior as module

    def interrupt(self, epoch, epochs, history):
        if epoch == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module._Bar, "update", interrupt)
    posterior = fitted(toy, n=300)
    assert len(posterior.history.train) == 3
    assert posterior.history.stopped == "interrupted after 3 epochs"


BAD_GIVEN = [
    ({"z": 1.0}, r"given\['z'\] is not a data site; the data sites are \['y'\]"),
    ({}, "given has no 'y'"),
    ({"y": np.zeros((2, 3))}, r"given\['y'\] has shape \(2, 3\), but site 'y' has shape \(\)"),
    ({"y": np.nan}, r"given\['y'\] has 1 values that are not finite"),
    ({"y": "seven"}, r"given\['y'\] is not an array of numbers"),
]


@pytest.mark.parametrize(("given", "message"), BAD_GIVEN)
def test_bad_observations(posterior, given, message):
    with pytest.raises(ValueError, match=message):
        posterior.sample(10, given=given, key=KEY)


def test_bad_simulations():
    good = cpe.simulate(groups, 100, observed=["y"], key=KEY)
    cases = [
        ({k: v for k, v in good.items() if k != "mu"}, r"no site \['mu'\]"),
        ({**good, "y": good["y"][:, :3]}, r"'y' have shape \(100, 4\) \(plate 'group' of size 4\)"),
        ({k: v[:0] for k, v in good.items()}, "There are 0 simulations"),
        ({**good, "y": np.full((100, 4), np.nan)}, "first bad site is 'y'"),
    ]
    for simulations, message in cases:
        with pytest.raises(ValueError, match=message):
            cpe.fit(groups, simulations, observed=["y"], key=KEY)


@pytest.mark.parametrize("key", [3, None, np.zeros(2), "seed"])
def test_a_key_of_the_wrong_type(key):
    with pytest.raises(TypeError, match="key must be one JAX key"):
        check_key(key)


def test_bad_simulations_are_counted_and_left_out(capsys):
    def program():
        a = numpyro.sample("a", dist.Uniform(0.0, 1.0))
        numpyro.sample("y", dist.Delta(jnp.where(a < 0.05, jnp.nan, a)))

    simulations = cpe.simulate(program, 1000, observed=["y"], key=KEY)
    assert simulations.dropped == 1000 - simulations.n > 0
    assert f"{simulations.dropped} of 1000 simulations" in capsys.readouterr().err

    def worse():
        a = numpyro.sample("a", dist.Uniform(0.0, 1.0))
        numpyro.sample("y", dist.Delta(jnp.where(a < 0.5, jnp.nan, a)))

    with pytest.raises(ValueError, match=r"first bad site is 'y', for instance at a = 0\.\d+\. More than 10 %"):
        cpe.simulate(worse, 1000, observed=["y"], key=KEY)


@pytest.mark.parametrize("scale", [1e2, pytest.param(1e-2, marks=pytest.mark.slow)])
def test_heavy_tails_do_not_ruin_training(scale):
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("i", 5):
            numpyro.sample("y", dist.StudentT(3.0, scale * a, 0.3 * scale))

    posterior = fitted(program, n=6000)
    y = cpe.simulate(program, 20, observed=["y"], key=jax.random.key(9))["y"]
    draws = posterior.sample(2000, given={"y": y}, key=KEY).posterior["a"].values[0]
    grid = np.linspace(-4, 4, 4001)[:, None]
    log_p = norm.logpdf(grid) + student.logpdf(y.T[:, None] / scale, 3, grid, 0.3).sum(0)
    p = np.exp(log_p - log_p.max(0))
    p /= p.sum(0)
    mean = (grid * p).sum(0)
    sd = np.sqrt(((grid - mean) ** 2 * p).sum(0))
    assert np.median(np.abs(draws.mean(0) - mean) / sd) < 0.3
    assert 0.8 < np.median(draws.std(0) / sd) < 1.25


@pytest.mark.parametrize(
    "module",
    [
        cpe.SetEmbedding,
        pytest.param(cpe.MLPEmbedding, marks=pytest.mark.slow),
        pytest.param(cpe.ConvEmbedding, marks=pytest.mark.slow),
        pytest.param(cpe.RecurrentEmbedding, marks=pytest.mark.slow),
    ],
)
def test_embeddings(module):
    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a, 1.0).expand([12, 1]).to_event(2))

    embedding = module((12, 1), out=8, key=KEY)
    posterior = fitted(program, n=2000, max_epochs=20, method=cpe.CPE(embed={"y": embedding}, **SMALL))
    tree = posterior.sample(4000, given={"y": np.full((12, 1), 0.8)}, key=KEY)
    assert abs(float(tree.posterior["a"].mean()) - 0.8 * 12 / 13) < 0.15
    assert abs(float(tree.posterior["a"].std()) - 13**-0.5) < 0.08
