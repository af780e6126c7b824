"""The tasks of sbi's benchmark: simulators against independent code, exact draws against the published ones."""

import hashlib
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from scipy.integrate import solve_ivp
from scipy.special import expit
from scipy.stats import ks_2samp

from cpejax import metrics, reference, tasks
from cpejax.tasks.sbibm import _data, bernoulli_glm, bernoulli_glm_raw, lotka_volterra, sir, slcp_distractors

NAMES = tasks.sbibm.names()
# (parameters, data, plates with their sizes), from the original's definitions
DIMENSIONS = {
    "sbibm/bernoulli_glm": (10, 10, {}),
    "sbibm/bernoulli_glm_raw": (10, 100, {"step": 100}),
    "sbibm/gaussian_linear": (10, 10, {"dim": 10}),
    "sbibm/gaussian_linear_uniform": (10, 10, {"dim": 10}),
    "sbibm/gaussian_mixture": (2, 2, {}),
    "sbibm/lotka_volterra": (4, 20, {}),
    "sbibm/sir": (2, 10, {}),
    "sbibm/slcp": (5, 8, {"observation": 4}),
    "sbibm/slcp_distractors": (5, 100, {}),
    "sbibm/two_moons": (2, 2, {}),
}
HAVE_DATA = _data.directory().is_dir()
needs_data = pytest.mark.skipif(not HAVE_DATA, reason=f"sbibm's data are not there: {_data.COMMAND}")


def simulated(name, theta, n):
    """`n` data sets at fixed parameters, `{site: (n, ...)}`."""
    task = tasks.get(name)
    program = numpyro.handlers.substitute(task.program, data=theta)

    def one(key):
        trace = numpyro.handlers.trace(numpyro.handlers.seed(program, key)).get_trace()
        return {site: trace[site]["value"] for site in task.observed}

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), n)))


def assert_moments(draws, mean, sd):
    """Means and standard deviations of columns within five standard errors."""
    n = len(draws)
    np.testing.assert_array_less(np.abs(draws.mean(0) - mean), 5 * sd / np.sqrt(n) + 1e-6)
    np.testing.assert_array_less(np.abs(draws.std(0) - sd), 5 * sd / np.sqrt(n) + 1e-6)


def test_the_ten_tasks():
    assert set(NAMES) == set(DIMENSIONS)
    for name, (parameters, data, plates) in DIMENSIONS.items():
        task = tasks.get(name)
        assert (task.name, task.theta_dim, task.x_dim, task.plates) == (name, parameters, data, plates)
        assert task.observations == tuple(range(1, 11))


def test_gaussians():
    theta = np.linspace(-0.9, 0.9, 10, dtype=np.float32)
    for name in ("sbibm/gaussian_linear", "sbibm/gaussian_linear_uniform"):
        assert_moments(simulated(name, {"theta": theta}, 4000)["x"], theta, np.full(10, np.sqrt(0.1)))
    prior = np.asarray(
        jax.vmap(lambda key: tasks.get(name)._trace(key)["theta"])(jax.random.split(jax.random.key(1), 500))
    )
    assert prior.min() < -0.99
    assert prior.max() > 0.99


def test_spikes_are_driven_by_the_delayed_stimulus():
    theta = np.random.default_rng(1).normal(size=10).astype(np.float32)
    stimulus = np.random.RandomState(42).randn(100)
    drive = np.array([theta[0] + sum(theta[1 + j] * stimulus[t - j] for j in range(9) if t >= j) for t in range(100)])
    p = expit(drive)
    raw = simulated("sbibm/bernoulli_glm_raw", {"theta": theta}, 4000)["y"]
    np.testing.assert_array_less(np.abs(raw.mean(0) - p), 5 * np.sqrt(p * (1 - p) / 4000) + 1e-3)
    x = simulated("sbibm/bernoulli_glm", {"theta": theta}, 4000)["x"]
    columns = np.stack([np.ones(100), *(np.r_[np.zeros(j), stimulus[: 100 - j]] for j in range(9))], axis=1)
    assert_moments(x, columns.T @ p, np.sqrt((columns.T**2) @ (p * (1 - p))))


def test_prior_of_the_filter():
    d = np.eye(9) - np.diag(np.ones(8), -1)
    f = d @ d + np.diag(np.arange(9) / 9) ** 0.5
    covariance = np.zeros((10, 10))
    covariance[0, 0], covariance[1:, 1:] = 2.0, np.linalg.inv(f.T @ f)
    np.testing.assert_allclose(bernoulli_glm_raw.prior().covariance_matrix, covariance, rtol=1e-3, atol=1e-3)
    assert bernoulli_glm.DESIGN is bernoulli_glm_raw.DESIGN


def test_distractors_are_scattered_among_the_data():
    theta = jnp.array([0.7, -2.0, 1.2, -0.8, 0.4])
    x = simulated("sbibm/slcp_distractors", {"theta": theta}, 4000)["x"]
    loc, scale, order = slcp_distractors.noise_parameters()
    where = np.argsort(order)
    points = x[:, where[:8]].reshape(-1, 4, 2)
    assert_moments(points.reshape(-1, 8), np.tile(theta[:2], 4), np.tile([1.44, 0.64], 4))
    correlation = np.mean([np.corrcoef(points[:, j].T)[0, 1] for j in range(4)])
    assert correlation == pytest.approx(np.tanh(0.4), abs=0.03)
    rng, noise = np.random.default_rng(0), x[:, where[8:]]
    normal, wide = rng.normal(size=(20, 200, 92)), np.sqrt(rng.chisquare(2, size=(20, 200, 1)) / 2)
    expected = (loc[:, None] + normal / wide @ scale.swapaxes(1, 2)).reshape(4000, 92)
    for column in (0, 40, 91):
        assert ks_2samp(noise[:, column], expected[:, column]).pvalue > 1e-4, column
    largest, expected = (np.abs(values).max(1) for values in (noise, expected))  # all 92 are large together
    assert ks_2samp(largest, expected).pvalue > 1e-4


def test_epidemic_solves_its_equations():
    rng = np.random.default_rng(0)
    for beta, gamma in np.exp(sir.MEAN + sir.SD * np.clip(rng.normal(size=(6, 2)) * 1.5, -3, 3)):

        def field(_, u, b=beta, g=gamma):
            s, i, _r = u
            return [-b * s * i / 1e6, b * s * i / 1e6 - g * i, g * i]

        solved = solve_ivp(field, (0, 160), [1e6 - 1, 1, 0], t_eval=17.0 * np.arange(10), rtol=1e-10, atol=1e-8)
        found = sir.infected(jnp.float32(beta), jnp.float32(gamma))
        np.testing.assert_allclose(found, solved.y[1] / 1e6, rtol=5e-3, atol=1e-7)
    theta = {"beta": jnp.float32(0.6), "gamma": jnp.float32(0.2)}
    p = np.asarray(sir.infected(**theta))
    x = simulated("sbibm/sir", theta, 2000)["x"]
    assert_moments(x[:, p > 1e-3], 1000 * p[p > 1e-3], np.sqrt(1000 * p * (1 - p))[p > 1e-3])


def test_predators_and_prey_solve_their_equations():
    rng = np.random.default_rng(0)
    for z in rng.normal(size=(6, 4)) * 1.5:
        a, b, c, d = rates = np.exp(lotka_volterra.MEAN + 0.5 * z)

        def field(_, u, a=a, b=b, c=c, d=d):
            return [a * u[0] - b * u[0] * u[1], -c * u[1] + d * u[0] * u[1]]

        times = 0.1 * 21 * np.arange(10)
        solved = solve_ivp(field, (0, 20), [30, 1], t_eval=times, method="LSODA", rtol=1e-10, atol=1e-12)
        found = np.concatenate(lotka_volterra.log_counts(tuple(jnp.asarray(rates, jnp.float32))))
        expected = np.log(np.clip(solved.y, 1e-10, 1e4)).ravel()
        np.testing.assert_allclose(found, expected, atol=5e-3)
    theta = dict(zip(lotka_volterra.RATES, jnp.asarray(rates, jnp.float32), strict=True))
    x = simulated("sbibm/lotka_volterra", theta, 2000)
    assert_moments(np.log(np.concatenate([x["prey"], x["predators"]], axis=1)), found, np.full(20, 0.1))


# ---------------------------------------------------------------------------------------------------------------- data


def test_what_to_do_without_data(monkeypatch, tmp_path):
    monkeypatch.setenv("CPEJAX_CACHE", str(tmp_path))
    task = tasks.get("sbibm/two_moons")
    for ask in (task.observation, task.reference, task.true_parameters):
        with pytest.raises(FileNotFoundError, match=r"observation_1.*cpejax data sbibm"):
            ask(1)
    with pytest.raises(ValueError, match="there are ten, 1 to 10"):
        task.observation(0)


def test_only_tables_of_the_right_wheel_are_unpacked(monkeypatch, tmp_path):
    monkeypatch.setenv("CPEJAX_CACHE", str(tmp_path / "cache"))
    wheel, inside = tmp_path / "sbibm.whl", "sbibm/tasks/two_moons"
    numbers = "parameter_1,parameter_2\n" + "0.25,-0.5\n" * 3
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{inside}/task.py", "raise SystemExit")
        archive.writestr(f"{inside}/files/num_observation_2/observation.csv", "data_1,data_2\n0.5,1.5\n")
        archive.writestr(f"{inside}/files/num_observation_2/reference_posterior_samples.csv.bz2", bz2(numbers))
        archive.writestr(f"{inside}/files/num_observation_2/../../../../../../out.csv", "data_1\n1\n")
        archive.writestr("sbibm/tasks/slcp/files/gmm.torch", b"not to be read")
    with pytest.raises(ValueError, match=r"not the wheel of sbibm 1.1.0: its SHA-256 is"):
        _data.download(wheel)
    with pytest.raises(ValueError, match="does not exist"):
        _data.download(tmp_path / "none.whl")
    monkeypatch.setattr(_data, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    folder = _data.download(wheel)
    assert {path.name for path in folder.rglob("*.*")} == {"observation.csv", "reference_posterior_samples.csv.bz2"}
    assert [path.name for path in tmp_path.iterdir() if path.name == "out.csv"] == []
    task = tasks.get("sbibm/two_moons")
    np.testing.assert_array_equal(task.observation(2)["x"], [0.5, 1.5])
    tree = task.reference(2)
    assert tree.attrs["sampler"] == "published"
    np.testing.assert_array_equal(tree.posterior["theta"].values[0], [[0.25, -0.5]] * 3)


def bz2(text):
    import bz2

    return bz2.compress(text.encode())


@needs_data
def test_statistics_of_the_raw_data_are_the_data():
    """The stimulus, and the order of the distractors, are those that the observations were made with."""
    for i in (1, 7):
        raw, x = (tasks.get(f"sbibm/bernoulli_glm{which}").observation(i) for which in ("_raw", ""))
        np.testing.assert_allclose(bernoulli_glm_raw.DESIGN.T @ raw["y"], x["x"], atol=1e-4)
        where = np.argsort(slcp_distractors.noise_parameters()[2])[:8]
        found = tasks.get("sbibm/slcp_distractors").observation(i)["x"][where]
        np.testing.assert_array_equal(found.reshape(4, 2), tasks.get("sbibm/slcp").observation(i)["x"])


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_exact_draws_are_the_published_ones(name, number):
    task = tasks.get(name)
    published = task.ravel(task.published(number))
    draws = task.ravel(task.exact(task.observation(number), len(published), np.random.default_rng(number)))
    assert metrics.c2st(draws, published) <= 0.53
    assert reference(task, number).posterior.sizes["draw"] == len(published)
