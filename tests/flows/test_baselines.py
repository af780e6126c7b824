"""FMPE, PSE and AIO: draws and densities that agree, equations that are right where the answer is known, and masks."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.linalg import expm
from scipy import stats

import cpejax as cpe
from cpejax.flows.base import count_weights, trainable
from cpejax.flows.diffusion import Diffusion
from cpejax.flows.ode import log_density, transport
from cpejax.flows.strata import TimeStrata
from cpejax.tasks import two_moons

KEY = jax.random.key(0)
SMALL = {"FMPE": {"width": 16, "hidden": 32}, "PSE": {"width": 16, "hidden": 32}, "AIO": {"value": 8, "name": 8}}


def toy():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Uniform(-1.0, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 0.5))


def groups():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("group", 3):
        theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(theta, 0.5))


@functools.cache
def simulations_of(program):
    return cpe.simulate(cpe.Model(program, observed=["y"]), 1000, key=KEY)


def built(program, method):
    """A flow with random weights: what holds for it holds for any."""
    simulations = simulations_of(program)
    return method.build(program, simulations.graph, simulations, key=KEY)


def posterior_of(program, method):
    flow = built(program, method)
    return cpe.Posterior(flow, simulations_of(program).model, method, cpe.Training(), cpe.History(), 1000)


METHODS = {name: getattr(cpe, name)(**options) for name, options in SMALL.items()}


@functools.cache
def fitted(name):
    """A little trained: its draws are where the prior is."""
    settings = {"max_epochs": 40, "steps": 10, "learning_rate": 5e-3}
    return cpe.fit(
        toy, simulations_of(toy), method=METHODS[name], key=KEY, progress=False, training=cpe.Training(**settings)
    )


@pytest.fixture(params=METHODS)
def posterior(request):
    return fitted(request.param)


# ---- what every method must do


def cells(points=81):
    """Midpoints of cells over a and b, and the area of a cell."""
    a, b = (np.linspace(-low, low, points + 1) for low in (7.0, 1.0))
    mid = [(x[1:] + x[:-1]) / 2 for x in (a, b)]
    grid = np.stack(np.meshgrid(*mid, indexing="ij"), -1).reshape(-1, 2)
    return grid, (a[1] - a[0]) * (b[1] - b[0])


def check_density(posterior, given, **how):
    """The density's integral and moments are those of the draws."""
    n = 4000
    tree = posterior.sample(n, given=given, key=KEY)
    rate = tree.posterior.attrs["acceptance_rate"]
    grid, area = cells()
    density = np.exp(posterior.log_prob({"a": grid[:, 0], "b": grid[:, 1]}, given=given, **how)) * area
    assert abs(density.sum() - rate) < 4 * np.sqrt(rate * (1 - rate) / n) + 0.01
    draws = np.stack([tree.posterior[name].values[0] for name in "ab"], axis=1)
    for moment in (lambda x: x, lambda x: x**2, lambda x: x[:, :1] * x[:, 1:]):
        found, weight = moment(draws), density[:, None] / density.sum()
        expected = (moment(grid) * weight).sum(0)
        error = found.std(0) / np.sqrt(n)
        assert np.all(np.abs(found.mean(0) - expected) < 4.5 * error + 0.01)
    return rate


QUICK = ["FMPE", "PSE", pytest.param("AIO", marks=pytest.mark.slow)]


@pytest.mark.parametrize("posterior", QUICK, indirect=True)
def test_the_density_is_that_of_the_draws(posterior):
    assert check_density(posterior, {"y": 0.7}) < 1


def test_training_has_the_methods_own_defaults(posterior):
    assert posterior.settings.weight_decay == type(posterior.method).training["weight_decay"]
    assert posterior.settings.learning_rate == 5e-3
    assert posterior.history.train[-1] < posterior.history.train[0]


@pytest.mark.parametrize("posterior", QUICK, indirect=True)
def test_many_small_steps_agree_with_few_adaptive_ones(posterior):
    hows = ({}, {"solver": "euler", "steps": 200})
    one, other = (posterior.sample(4000, given={"y": 0.7}, key=KEY, **how) for how in hows)
    assert one.posterior.attrs["solver"] == "rk45"
    assert "steps" not in one.posterior.attrs  # it chooses its own
    # The same noise; near the edge of the support one may accept what the other rejects, which shifts the rest.
    a, b = (np.sort(t.posterior["a"].values[0]) for t in (one, other))
    assert np.abs(a - b).mean() < 0.02


def test_many_observations_and_files(posterior, tmp_path):
    posterior.save(tmp_path)
    loaded = cpe.load(tmp_path, toy)
    assert loaded.method == posterior.method
    y = np.array([-1.0, 0.0, 2.0])
    draws = [p.sample(50, given={"y": y}, key=KEY, solver="euler").posterior for p in (posterior, loaded)]
    assert draws[0]["a"].dims == ("chain", "draw", "observation")
    assert np.array_equal(draws[0]["a"], draws[1]["a"])
    assert np.all(np.abs(draws[0]["b"]) <= 1)


@pytest.mark.parametrize("kind", ["unconstrained", pytest.param("prior", marks=pytest.mark.slow)])
def test_other_coordinates_cannot_leave_the_support(kind):
    posterior = posterior_of(toy, cpe.FMPE(coordinates=kind, **SMALL["FMPE"]))
    assert check_density(posterior, {"y": 0.7}, steps=40) == 1


def test_numbers_of_weights():
    simulations = cpe.simulate(cpe.Model(two_moons.program, observed=["x"]), 50, key=KEY)
    sizes = [
        count_weights(m.build(two_moons.program, simulations.graph, simulations, key=KEY))
        for m in (cpe.FMPE(), cpe.PSE(), cpe.AIO())
    ]
    assert sizes == [190_594, 190_594, 76_561]


def test_embeddings_are_trained():
    embedding = cpe.MLPEmbedding((), out=4, width=8, key=KEY)
    flow = built(toy, cpe.FMPE(embed={"y": embedding}, **SMALL["FMPE"]))
    rows = flow.prepare({name: jnp.asarray(x[:10]) for name, x in simulations_of(toy).items()})
    weights, rest = trainable(flow)
    gradient = jax.jit(jax.grad(lambda w: eqx.combine(w, rest).loss(rows, KEY)))(weights)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradient.data.embed))
    with pytest.raises(ValueError, match=r"embed names 'z', but the data sites are \['y'\]"):
        built(toy, cpe.PSE(embed={"z": embedding}))


@pytest.fixture
def untyped():
    """As users have it: without the checks of annotations that tests have, so that our own messages come through."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


BAD = [
    (cpe.FMPE, {"width": 0}, "width must be a whole number of at least 1, found 0"),
    (cpe.FMPE, {"coordinates": "free"}, "coordinates must be one of .*'unconstrained'"),
    (cpe.FMPE, {"time_exponent": -2}, "time_exponent must be a number above -1"),
    (cpe.PSE, {"sampler": "pde"}, r"sampler must be one of \['ode', 'sde'\], found 'pde'"),
    (cpe.PSE, {"beta_min": 20.0}, "0 <= beta_min < beta_max; found 20.0 and 10.0"),
    (cpe.AIO, {"mask": "all"}, "mask must be one of .*'undirected'"),
    (cpe.AIO, {"heads": 5}, "value . name . condition is 72, which 5 heads cannot share"),
]


@pytest.mark.parametrize(("method", "options", "message"), BAD, ids=lambda x: str(x)[:30])
def test_bad_options(method, options, message, untyped):
    with pytest.raises(ValueError, match=message):
        method(**options)


# ---- equations whose solution is known


MEAN, SD = np.array([0.7, -1.2]), np.array([0.3, 1.4])
DIFFUSION = Diffusion(0.1, 10.0)


def exact_noise(clock, u):
    """The expected noise in u where what is clean is N(MEAN, SD²)."""
    angle = clock * np.pi / 2
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return sin * (u - cos * MEAN) / (cos**2 * SD**2 + sin**2)


def test_the_probability_flow_of_a_normal_law():
    field = DIFFUSION.flow(exact_noise)
    noise = jax.random.normal(KEY, (2000, 2))
    # From N(0, I) instead of the diffusion's own end: cos(a) of what is clean is left there.
    left = float(jnp.cos(DIFFUSION.angle(1.0)))
    spread = np.sqrt(left**2 * SD**2 + 1 - left**2)
    exact = MEAN + SD * (noise - left * MEAN) / spread
    for how, tolerance in (({"solver": "rk45"}, 0.01), ({"steps": 200, "solver": "euler"}, 0.03)):
        found = jax.jit(lambda u, how=how: transport(field, u, **how))(noise)
        np.testing.assert_allclose(found, exact, atol=tolerance)
    log_q = jax.jit(lambda u: log_density(field, u, steps=None))(exact)[:, 0]
    expected = stats.norm.logpdf(exact, MEAN - SD * left * MEAN / spread, SD / spread).sum(1)
    np.testing.assert_allclose(log_q, expected, atol=0.02)


def test_the_reverse_diffusion_of_a_normal_law():
    noise = jax.random.normal(KEY, (4000, 2))
    found = np.asarray(jax.jit(lambda u: DIFFUSION.reverse(exact_noise, u, steps=200, key=jax.random.key(1)))(noise))
    for i in range(2):
        assert stats.kstest(found[:, i], stats.norm(MEAN[i], SD[i]).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(found.T)[0, 1]) < 4 / np.sqrt(4000)


def test_noise_of_the_diffusion():
    u = jnp.full((20_000, 1), 2.0)
    clock, noisy, noise = DIFFUSION.noisy(u, TimeStrata(len(u), len(u)), key=KEY)
    angle = np.pi / 2 * clock[:, None]
    np.testing.assert_allclose(noisy, jnp.cos(angle) * u + jnp.sin(angle) * noise, atol=1e-5)
    velocity = jnp.cos(angle) * noise - jnp.sin(angle) * u
    np.testing.assert_allclose(DIFFUSION.noise_of(clock[:, None], noisy, velocity), noise, atol=1e-5)
    # Times are uniform: log cos a = -(.1 t / 2 + 9.9 t² / 4).
    drop = -np.log(np.cos(np.asarray(angle[:, 0], np.float64)))
    t = (-0.1 + np.sqrt(0.01 + 4 * 9.9 * drop)) / 9.9
    assert stats.kstest(t, "uniform").pvalue > 1e-3


def test_the_straight_path_ends_where_it_should():
    """The field that FMPE regresses on, for one known target: the path to it."""
    flow = built(toy, cpe.FMPE(sigma=0.1, **SMALL["FMPE"]))
    seen = {}

    class Net(eqx.Module):
        def of_time(self, t):
            seen["t"] = t
            return jnp.zeros((len(t), 1))

        def of_data(self, x):
            return jnp.zeros((len(x), 1))

        def __call__(self, u, condition):
            seen["u"] = u
            return jnp.zeros_like(u)

    flow = eqx.tree_at(lambda f: f.net, flow, Net())
    rows = {"u": jnp.full((4000, 2), 3.0), "x": jnp.zeros((4000, 1))}
    loss = flow.loss(rows, KEY)
    t, u = TimeStrata(4000).each(seen["t"])[:, None], seen["u"]
    noise = (u - 3.0 * t) / (1 - 0.9 * t)
    assert stats.kstest(np.asarray(noise).ravel(), "norm").pvalue > 1e-3
    np.testing.assert_allclose(loss, jnp.sum((3.0 - 0.9 * noise) ** 2, -1).mean(), rtol=1e-3)
    for exponent in (0.0, 1.0):  # of the times' density, (1 + exponent) t**exponent
        flow = built(toy, cpe.FMPE(time_exponent=exponent, **SMALL["FMPE"]))
        flow, times = eqx.tree_at(lambda f: f.net, flow, Net()), []
        for key in jax.random.split(KEY, 30):
            flow.loss(rows, key)
            times.append(seen["t"])
        assert stats.kstest(np.concatenate(times), stats.beta(1 + exponent, 1).cdf).pvalue > 1e-3


def test_the_density_in_many_dimensions_has_an_error():
    d = 40
    matrix = 0.1 * jax.random.normal(KEY, (d, d))
    u = jax.random.normal(jax.random.key(1), (300, d))
    columns = np.asarray(jax.jit(lambda u: log_density(lambda s, u: u @ matrix.T, u, steps=20))(u), np.float64)
    exact = stats.norm.logpdf(u @ expm(-matrix).T).sum(1) - np.trace(matrix)
    mean, error = columns.mean(1), columns.std(1, ddof=1) / np.sqrt(columns.shape[1])
    # All draws share the directions of the estimate, so there is one error; Student's t with 15 degrees of freedom.
    assert np.all(error > 0)
    assert np.abs(mean - exact).max() < 5 * error.max()
    few = jax.jit(lambda u: log_density(lambda s, u: u @ matrix[:20, :20].T, u, steps=20))(u[:, :20])
    exact = stats.norm.logpdf(u[:, :20] @ expm(-matrix[:20, :20]).T).sum(1) - np.trace(matrix[:20, :20])
    np.testing.assert_allclose(few[:, 0], exact, atol=0.02)


def test_an_estimated_density_says_its_error(capsys):
    def wide():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([33]).to_event(1))
        numpyro.sample("y", dist.Normal(a.sum(), 1.0))

    posterior = posterior_of(wide, cpe.FMPE(**SMALL["FMPE"]))
    values = {"a": np.zeros((5, 33))}
    found, error = posterior.log_prob_with_error(values, given={"y": 0.0}, steps=10)
    assert found.shape == error.shape == (5,)
    assert np.all(error > 0)
    np.testing.assert_allclose(posterior.log_prob(values, given={"y": 0.0}, steps=10), found)
    assert "log_prob is estimated; its standard error is" in capsys.readouterr().err


def test_the_reverse_diffusion_has_its_own_steps():
    posterior = posterior_of(toy, cpe.PSE(sampler="sde", **SMALL["PSE"]))
    tree = posterior.sample(20, given={"y": 0.0}, key=KEY)
    assert tree.posterior.attrs["steps"] == 200
    assert "solver" not in tree.posterior.attrs
    with pytest.raises(
        ValueError, match=r"has no solver; found solver='rk45'. Leave it out, or fit with sampler='ode'"
    ):
        posterior.sample(20, given={"y": 0.0}, key=KEY, solver="rk45")


# ---- AIO


def noise_of(flow, values, clock=0.5):
    """The predicted noise of scalars that are not given, as a function of all scalars, for the posterior."""
    given = np.array([site in flow.coordinates.graph.data for site in flow.sites])

    def predict(scalars, clock=clock):
        data = {
            name: x[0] for name, x in flow._values(scalars[None], {}).items() if name in flow.coordinates.graph.data
        }
        return flow._predict(data)(jnp.asarray(clock), scalars[None, ~given])[0]

    scalars = flow._scalars({name: jnp.asarray(x[:1]) for name, x in values.items()})[0]
    return predict, scalars, [m for m, known in zip(flow.members, given, strict=True) if not known]


@pytest.mark.parametrize("mask", ["directed", "undirected", "none"])
def test_a_scalar_reads_whom_its_mask_allows(mask):
    flow = built(groups, cpe.AIO(mask=mask, **SMALL["AIO"]))
    predict, scalars, members = noise_of(flow, simulations_of(groups))
    jacobian = np.asarray(jax.jit(jax.jacobian(predict))(scalars))
    if mask == "directed":
        parents = cpe.invert(flow.coordinates.graph).ground()
        allowed = [[m == other or other in parents[m] for other in flow.members] for m in members]
        assert not np.all(allowed)
    elif mask == "undirected":  # mu - theta - y, by one layer
        near = {"mu": {"theta[0]", "theta[1]", "theta[2]"}}
        near |= {f"theta[{i}]": {"mu", f"y[{i}]"} for i in range(3)}
        allowed = [[m == other or other in near[m] for other in flow.members] for m in members]
    else:
        allowed = np.ones_like(jacobian, bool)
    assert np.array_equal(jacobian != 0, allowed)


def test_the_network_depends_on_time_and_on_who_is_given():
    flow = built(groups, cpe.AIO(**SMALL["AIO"]))
    predict, scalars, _ = noise_of(flow, simulations_of(groups))

    @jax.jit
    def at(t):
        return predict(scalars, t), jax.jacobian(lambda x: predict(x, t))(scalars)

    early, late = at(0.1), at(0.9)
    assert np.all(np.abs(early[0] - late[0]) > 1e-3)
    assert float(jnp.abs(early[1] - late[1]).max()) > 1e-3  # what is read of others too
    tokens = [
        flow.net.tokens(scalars[None], jnp.arange(len(scalars)), jnp.full((1, len(scalars)), g)) for g in (True, False)
    ]
    assert float(jnp.abs(tokens[0] - tokens[1]).max()) > 0.1


def test_training_and_sampling_evaluate_the_same_network():
    flow = built(groups, cpe.AIO(**SMALL["AIO"]))
    predict, scalars, _ = noise_of(flow, simulations_of(groups))

    @jax.jit
    def both(scalars):
        tokens = flow.net.tokens(scalars[None], jnp.arange(len(scalars)), flow.patterns.given[:1])
        every = flow.net(tokens[:, :0], tokens, jnp.full(1, 0.5), jnp.ones((1, 0, 0), bool), flow.patterns.masks[:1])
        return predict(scalars), every[0]

    sampling, training = both(scalars)
    np.testing.assert_allclose(sampling, training[~np.asarray(flow.patterns.given[0])], atol=1e-5)


def test_any_subset_of_sites_can_be_given():
    posterior = fitted("AIO")
    tree = posterior.sample(100, given={"a": 0.3}, key=KEY, solver="euler")
    assert set(tree.posterior.data_vars) == {"b", "y"}
    assert float(tree.observed_data["a"]) == np.float32(0.3)
    draws = {name: tree.posterior[name].values[0] for name in ("b", "y")}
    assert np.isfinite(posterior.log_prob(draws, given={"a": 0.3}, steps=5)).all()
    assert set(posterior.sample(10, given={}, key=KEY, solver="euler").posterior.data_vars) == {"a", "b", "y"}
    with pytest.raises(ValueError, match="nothing left to draw"):
        posterior.sample(10, given={"a": 0.0, "b": 0.0, "y": 0.0}, key=KEY)
    with pytest.raises(ValueError, match=r"given\['c'\] is not a site; the sites are \['a', 'b', 'y'\]"):
        posterior.sample(10, given={"c": 0.0}, key=KEY)
    with pytest.raises(ValueError, match=r"given\['a'\] is not a data site.* Only cpe.CPE\(\) and cpe.AIO"):
        fitted("FMPE").sample(10, given={"y": 0.0, "a": 0.0}, key=KEY)


def test_what_is_given_must_be_enough_for_its_coordinates():
    posterior = posterior_of(groups, cpe.AIO(coordinates="prior", **SMALL["AIO"]))
    with pytest.raises(ValueError, match="given has 'theta', but its prior coordinates depend on 'mu'"):
        posterior.sample(10, given={"theta": np.zeros(3)}, key=KEY)


# ---- against exact posteriors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "most"),
    [
        (cpe.FMPE(), 0.6),
        (cpe.PSE(), 0.6),
        (cpe.PSE(sampler="sde"), 0.6),
        (cpe.AIO(), 0.53),
        (cpe.AIO(mask="none"), 0.6),
    ],
    ids=["FMPE", "PSE", "PSE-sde", "AIO", "AIO-none"],
)
def test_linear_gaussian(method, most):
    task = cpe.tasks.get("linear_gaussian")
    simulations = cpe.simulate(task, 10_000, key=KEY)
    posterior = cpe.fit(task.program, simulations, method=method, key=jax.random.key(1), progress=False)
    scores = []
    for seed in range(3):
        given = task.observation(seed)
        draws = posterior.sample(5000, given=given, key=KEY).posterior["theta"].values[0]
        scores.append(cpe.metrics.c2st(draws, task.exact(given, 5000, np.random.default_rng(seed))["theta"]))
    assert np.mean(scores) <= most  # the null is .5 with a standard deviation of .003


def correlated():
    a, b, c = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "abc")
    numpyro.sample("x", dist.Normal(a + b, 0.5))
    numpyro.sample("y", dist.Normal(b + c, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [cpe.FMPE(), cpe.PSE(), cpe.AIO(mask="none", layers=4)], ids=["FMPE", "PSE", "AIO-none"]
)  # a directed mask is biased here, and one layer is too little: docs/baselines.md
def test_correlations(method):
    simulations = cpe.simulate(cpe.Model(correlated, observed=["x", "y"]), 10_000, key=KEY)
    posterior = cpe.fit(correlated, simulations, method=method, key=jax.random.key(1), progress=False)
    design = np.array([[1, 1, 0], [0, 1, 1]])
    covariance = np.linalg.inv(np.eye(3) + design.T @ design / 0.25)
    exact = covariance / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    for x, y in ((0.0, 0.0), (1.0, -1.5)):
        tree = posterior.sample(10_000, given={"x": x, "y": y}, key=KEY)
        draws = np.stack([tree.posterior[name].values[0] for name in "abc"])
        assert np.abs(np.corrcoef(draws) - exact).max() < 0.05
