"""Prior coordinates: every family from noise and back, its supports, and whole programs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints, transforms
from scipy import stats

import cpejax as cpe
from cpejax._bijections import from_free, to_free
from cpejax._coordinates import Coordinates
from cpejax._quantiles import drawable, from_normal, is_exact, limit, to_normal

EPS = float(np.finfo(np.float32).eps)
truncated = dist.TruncatedDistribution
mixture = dist.MixtureSameFamily(
    dist.Categorical(probs=jnp.array([0.3, 0.7])), dist.Normal(jnp.array([-3.0, 2.0]), jnp.array([0.5, 1.0]))
)

# Each with the same family in SciPy, where it is there: an implementation that shares nothing with ours.
FAMILIES = {
    "normal": (dist.Normal(3.0, 0.5), stats.norm(3, 0.5)),
    "log-normal": (dist.LogNormal(0.5, 2.0), stats.lognorm(2, scale=np.exp(0.5))),
    "uniform": (dist.Uniform(-2.0, 5.0), stats.uniform(-2, 7)),
    "uniform-far-from-zero": (dist.Uniform(1e4, 1e4 + 10), stats.uniform(1e4, 10)),
    "half-normal": (dist.HalfNormal(2.0), stats.halfnorm(scale=2)),
    "exponential": (dist.Exponential(0.3), stats.expon(scale=1 / 0.3)),
    "laplace": (dist.Laplace(1.0, 2.0), stats.laplace(1, 2)),
    "logistic": (dist.Logistic(1.0, 2.0), stats.logistic(1, 2)),
    "cauchy": (dist.Cauchy(1.0, 2.0), stats.cauchy(1, 2)),
    "half-cauchy": (dist.HalfCauchy(2.0), stats.halfcauchy(scale=2)),
    "gumbel": (dist.Gumbel(1.0, 2.0), stats.gumbel_r(1, 2)),
    "gamma": (dist.Gamma(2.0, 3.0), stats.gamma(2, scale=1 / 3)),
    "gamma-many-scales": (dist.Gamma(0.1, 1.0), stats.gamma(0.1)),
    "chi2": (dist.Chi2(3.0), stats.chi2(3)),
    "inverse-gamma": (dist.InverseGamma(2.0, 3.0), stats.invgamma(2, scale=3)),
    "beta": (dist.Beta(2.0, 5.0), stats.beta(2, 5)),
    "beta-at-both-ends": (dist.Beta(0.5, 0.5), stats.beta(0.5, 0.5)),
    "student-t": (dist.StudentT(3.0, 1.0, 2.0), stats.t(3, 1, 2)),
    "student-t-50": (dist.StudentT(50.0, 0.0, 1.0), stats.t(50)),
    "weibull": (dist.Weibull(2.0, 1.5), stats.weibull_min(1.5, scale=2)),
    "pareto": (dist.Pareto(2.0, 3.0), stats.pareto(3, scale=2)),
    "truncated-normal-below": (dist.TruncatedNormal(0.0, 1.0, low=-0.5), stats.truncnorm(-0.5, np.inf)),
    "truncated-normal-above": (dist.TruncatedNormal(0.0, 1.0, high=-1.0), stats.truncnorm(-np.inf, -1)),
    "truncated-normal-both": (dist.TruncatedNormal(0.0, 1.0, low=-1.0, high=2.0), stats.truncnorm(-1, 2)),
    "truncated-normal-far-out": (dist.TruncatedNormal(0.0, 1.0, low=8.0), stats.truncnorm(8, np.inf)),
    "truncated-student-t": (truncated(dist.StudentT(3.0, 0.0, 1.0), low=0.5), None),
    "truncated-student-t-both": (truncated(dist.StudentT(3.0, 0.0, 1.0), low=0.5, high=3.0), None),
    "truncated-cauchy": (dist.TruncatedCauchy(0.0, 1.0, low=0.5), None),
    "truncated-laplace": (truncated(dist.Laplace(0.0, 1.0), high=0.5), None),
    "soft-laplace": (dist.SoftLaplace(1.0, 2.0), stats.hypsecant(1, 2)),
    "log-uniform": (dist.LogUniform(0.1, 1000.0), stats.loguniform(0.1, 1000)),
    "kumaraswamy": (dist.Kumaraswamy(2.0, 0.5), None),
    "cdf-only": (dist.Gompertz(1.0, 1.0), stats.gompertz(1)),
    "mixture": (mixture, None),
    "transformed": (
        dist.TransformedDistribution(dist.Gamma(2.0, 1.0), [transforms.AffineTransform(1.0, -2.0)]),
        None,
    ),
}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request):
    fn, oracle = FAMILIES[request.param]

    @jax.jit
    def everything(x, z):
        noise = to_normal(fn, x)
        slope = jax.vmap(jax.grad(lambda x: to_normal(fn, x)))(x)
        return noise, from_normal(fn, noise), slope, fn.log_prob(x), from_normal(fn, z)

    x = drawable(fn).sample(jax.random.key(1), (4000,))
    z = jnp.linspace(-8, 8, 4000)
    noise, back, slope, log_prob, values = (np.asarray(a, np.float64) for a in everything(x, z))
    return {
        "fn": fn,
        "oracle": oracle,
        "x": np.asarray(x, np.float64),
        "noise": noise,
        "back": back,
        "slope": slope,
        "log_prob": log_prob,
        "z": np.asarray(z, np.float64),
        "values": values,
    }


def test_prior_draws_are_standard_normal(family):
    assert is_exact(family["fn"])
    assert stats.kstest(family["noise"], "norm").pvalue > 1e-3


def units(fn):
    """To how many units in the last place of float32 the family's F(x) is known."""
    if isinstance(fn, dist.TransformedDistribution):
        return units(fn.base_dist)
    if hasattr(fn, "low") and isinstance(fn.base_dist, dist.StudentT):
        return 70  # a difference of two, over the probability of what is left, .3
    # The incomplete functions of JAX are good to 20, all closed forms to 4.
    return 20 if isinstance(fn, dist.Gamma | dist.Beta | dist.StudentT) else 4


def test_noise_gives_the_value_back(family):
    tolerance = 2 * EPS * np.abs(family["x"]) + units(family["fn"]) * EPS / np.exp(family["log_prob"])
    assert (np.abs(family["back"] - family["x"]) <= tolerance).all()


def test_volume_is_that_of_automatic_differentiation(family):
    core = np.abs(family["noise"]) < 3
    exact = family["log_prob"] - stats.norm.logpdf(family["noise"])
    np.testing.assert_allclose(np.log(np.abs(family["slope"][core])), exact[core], atol=2e-3)


def test_values_are_the_quantiles(family):
    if family["oracle"] is None:
        pytest.skip("not in SciPy")
    oracle, fn = family["oracle"], family["fn"]
    z = np.clip(family["z"], -limit(fn), limit(fn))
    z = -z if isinstance(fn, dist.InverseGamma) else z  # the inverse of what noise makes: it falls

    def value(z, shift):
        """SciPy's, of noise shifted by 1e-4, and for a family of two ends also by a unit or two of its probability."""
        p, q = stats.norm.cdf(z + 1e-4 * shift), stats.norm.sf(z + 1e-4 * shift)
        coarse = 4 * EPS * shift if limit(fn) < 8 else 0.0
        return np.where(z < 0, oracle.ppf(np.maximum(p + coarse, 0)), oracle.isf(np.maximum(q - coarse, 0)))

    spacing = 8 * np.spacing(np.abs(family["values"]).astype(np.float32)).astype(np.float64)
    there = np.abs(value(z, 0)) > 1e-37  # below, float32 has nothing
    inside = (value(z, -1) - spacing <= family["values"]) & (family["values"] <= value(z, 1) + spacing)
    assert there.any()
    assert inside[there].all()


def test_values_are_inside_the_support_whatever_the_noise(family):
    assert np.isfinite(family["values"]).all()
    assert bool(jnp.all(family["fn"].support(jnp.asarray(family["values"], jnp.float32))))


def test_the_ends_of_the_support_have_finite_noise():
    for fn, ends in [
        (dist.Uniform(0.0, 1.0), [0.0, 1.0]),
        (dist.Beta(0.5, 0.5), [0.0, 1.0]),
        (dist.HalfNormal(1.0), [0.0]),
        (dist.LogUniform(0.1, 10.0), [0.1, 10.0]),
        (dist.TruncatedNormal(0.0, 1.0, low=-1.0, high=2.0), [-1.0, 2.0]),
    ]:
        assert np.isfinite(to_normal(fn, jnp.array(ends))).all(), type(fn)


@pytest.mark.parametrize(
    ("fn", "noise_shape"),
    [
        (dist.MultivariateNormal(jnp.array([1.0, -2.0]), jnp.array([[2.0, 0.6], [0.6, 0.5]])), (2,)),
        (dist.LowRankMultivariateNormal(jnp.ones(3), jnp.ones((3, 1)), jnp.array([0.1, 0.2, 0.3])), (3,)),
        (dist.GaussianRandomWalk(jnp.array(0.5), 4), (4,)),
        (dist.Normal(jnp.zeros(3), jnp.array([1.0, 2.0, 3.0])).to_event(1), (3,)),
        (dist.Normal(0.0, 1.0).expand([2, 3]), (2, 3)),
        (dist.Normal(jnp.zeros((2, 1)), 1.0).expand([2, 3]).to_event(1), (2, 3)),
        (dist.HalfNormal(1.0).expand([3]).mask(jnp.array([True, False, True])), (3,)),
        (
            dist.TransformedDistribution(
                dist.Normal(jnp.zeros(2), 1.0).to_event(1), transforms.StickBreakingTransform()
            ),
            (2,),
        ),
        (dist.ZeroSumNormal(1.0, (4,)), (3,)),
    ],
    ids=lambda a: type(a).__name__ if isinstance(a, dist.Distribution) else None,
)
def test_vectors_are_drawn_from_normal_noise(fn, noise_shape):
    x = fn.sample(jax.random.key(0), (4000,))
    noise = jax.jit(jax.vmap(lambda x: to_normal(fn, x)))(x)
    assert is_exact(fn)
    assert noise.shape == (4000, *noise_shape)
    flat = np.asarray(noise, np.float64).reshape(4000, -1)
    for column in flat.T:
        assert stats.kstest(column, "norm").pvalue > 1e-3
    # Independent: the largest of several sample correlations, 5 standard errors.
    correlation = np.corrcoef(flat.T) - np.eye(flat.shape[1])
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)
    np.testing.assert_allclose(jax.jit(jax.vmap(lambda z: from_normal(fn, z)))(noise), x, rtol=1e-4, atol=1e-5)


INEXACT = {
    "dirichlet": (dist.Dirichlet(jnp.ones(4)), 3),
    "dirichlet-sparse": (dist.Dirichlet(jnp.full(5, 0.1)), 4),
    "dirichlet-30": (dist.Dirichlet(jnp.ones(30)), 29),
    "lkj-cholesky": (dist.LKJCholesky(3, 1.0), 3),
    "lkj-cholesky-nearly-singular": (dist.LKJCholesky(4, 0.2), 6),
    "lkj": (dist.LKJ(3, 1.0), 3),  # the matrix: float32 does not hold nearly singular ones
    "von-mises": (dist.VonMises(0.5, 2.0), 1),
    "folded": (dist.FoldedDistribution(dist.Normal(1.0, 1.0)), 1),
    "multivariate-t": (dist.MultivariateStudentT(3.0, jnp.zeros(2), jnp.eye(2)), 2),
    "wishart": (dist.Wishart(5.0, jnp.eye(2)), 3),
}


@pytest.mark.parametrize("name", INEXACT)
def test_bijections_of_the_support(name):
    fn, size = INEXACT[name]
    assert not is_exact(fn)
    x = fn.sample(jax.random.key(0), (4000,))
    free = jax.jit(lambda x: to_free(fn, x))(x)
    assert np.isfinite(free).all()
    assert free.reshape(4000, -1).shape == (4000, size)
    back = jax.jit(lambda u: from_free(fn, u))(free)
    np.testing.assert_allclose(back, x, rtol=1e-4, atol=2e-6)
    # As far as 8 standard deviations from the prior's mean, in every direction.
    furthest = 4 if name == "lkj" else 8
    z = jax.random.uniform(jax.random.key(1), free.shape, minval=-furthest, maxval=furthest)
    far = jax.jit(lambda u: from_free(fn, u))(free.mean(0) + free.std(0) * z)
    assert np.isfinite(far).all()
    assert bool(jnp.all(fn.support(far)))


def test_a_family_of_the_users_own_is_taken_at_its_word():
    class Squashed(dist.Normal):  # not normal, although it is a subclass
        support = constraints.unit_interval

        def sample(self, key, sample_shape=()):
            return jax.nn.sigmoid(super().sample(key, sample_shape))

        def log_prob(self, value):
            raise NotImplementedError

    x = Squashed(0.0, 1.0).sample(jax.random.key(0), (100,))
    assert not is_exact(Squashed(0.0, 1.0))
    np.testing.assert_allclose(from_free(Squashed(0.0, 1.0), to_free(Squashed(0.0, 1.0), x)), x, rtol=1e-5)


def test_no_other_package_is_needed(monkeypatch):
    """NumPyro wants tensorflow_probability for the quantiles of Student's t, by which it draws its truncations."""
    monkeypatch.setitem(sys.modules, "tensorflow_probability", None)

    def program():
        with numpyro.plate("group", 3):
            scale = numpyro.sample("scale", truncated(dist.StudentT(3.0, 0.0, 1.0), low=0.0))
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        numpyro.sample("y", dist.Normal(rate, scale).to_event(1), obs=jnp.zeros(3))

    simulations = cpe.simulate(program, 2000, key=jax.random.key(0))
    half_t = stats.t(3)
    assert stats.kstest(simulations["scale"].ravel(), lambda x: 2 * half_t.cdf(x) - 1).pvalue > 1e-3
    values = {name: jnp.asarray(x) for name, x in simulations.items()}
    z = jax.jit(jax.vmap(Coordinates(program, cpe.Graph.from_program(program), values).to_z))(values)
    assert stats.kstest(np.asarray(z["scale"]).ravel(), "norm").pvalue > 1e-3
    assert stats.kstest(np.asarray(z["rate"]).ravel(), "norm").pvalue > 1e-3


# ---- whole programs


def everything():
    """Plates, one in the other; axes outside plates; parameters that depend on others; all kinds of families."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    numpyro.sample("bound", dist.Uniform(mu - tau, mu + 2 * tau))
    vector = numpyro.sample("vector", dist.Normal(jnp.arange(2.0), tau + 0.1))
    numpyro.sample("walk", dist.GaussianRandomWalk(tau, 3))
    numpyro.sample("factor", dist.LKJCholesky(3, 2.0))
    numpyro.sample("masked", dist.Exponential(tau + 0.1).mask(False))
    with numpyro.plate("outer", 3, dim=-2):
        shift = numpyro.sample("shift", dist.Laplace(mu, 1.0))
        with numpyro.plate("inner", 4, dim=-1):
            rate = numpyro.sample("rate", dist.Weibull(jnp.exp(-shift), 2.0))
            numpyro.sample("pair", dist.MultivariateNormal(jnp.stack([rate, rate], -1), jnp.eye(2)))
    with numpyro.plate("inner", 4, dim=-1):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    mean = mu + vector.sum() + rate.sum() + shares[..., 0].sum()
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=0.0)


@pytest.fixture(scope="module")
def whole():
    simulations = cpe.simulate(everything, 1000, key=jax.random.key(0))
    values = {name: jnp.asarray(x) for name, x in simulations.items()}
    return Coordinates(everything, cpe.Graph.from_program(everything), values), values


def constrained(coordinates, values, z):
    """The values of all parameters, drawn one after the other from noise."""
    functions = coordinates.constrainers({n: x[0] for n, x in values.items()}, {n: x[0] for n, x in z.items()})
    out = dict(values)
    for name in coordinates.graph.parameters:
        out[name] = jax.vmap(functions[name])({n: out[n] for n in functions[name].needs}, z[name])
    return out


def test_shapes_have_plates_first_and_one_axis_of_numbers(whole):
    coordinates, values = whole
    z = jax.eval_shape(jax.vmap(coordinates.to_z), values)
    assert {name: x.shape[1:] for name, x in z.items()} == {
        "mu": (1,),
        "tau": (1,),
        "bound": (1,),
        "vector": (2,),
        "walk": (3,),
        "factor": (3,),
        "masked": (1,),
        "shift": (3, 1),
        "rate": (3, 4, 1),
        "pair": (3, 4, 2),
        "shares": (4, 2),
    }


def test_a_site_needs_only_its_own_equations(whole):
    coordinates, values = whole
    z = jax.eval_shape(coordinates.to_z, {n: x[0] for n, x in values.items()})
    functions = coordinates.constrainers({n: x[0] for n, x in values.items()}, z)
    assert {name: set(f.needs) for name, f in functions.items() if f.needs} == {
        "bound": {"mu", "tau"},
        "vector": {"tau"},
        "walk": {"tau"},
        "masked": {"tau"},
        "shift": {"mu"},
        "rate": {"shift"},
        "pair": {"rate"},
    }


def test_programs_there_and_back(whole):
    coordinates, values = whole
    z = jax.jit(jax.vmap(coordinates.to_z))(values)
    back = jax.jit(lambda v, z: constrained(coordinates, v, z))(values, z)
    for name in coordinates.graph.parameters:
        np.testing.assert_allclose(back[name], values[name], rtol=2e-3, atol=1e-4, err_msg=name)
    for name in set(z) - {"factor", "shares"}:
        flat = np.asarray(z[name], np.float64).reshape(1000, -1)
        assert min(stats.kstest(column, "norm").pvalue for column in flat.T) > 1e-4, name
    for name in ("factor", "shares"):  # not normal, but standardised
        np.testing.assert_allclose(np.asarray(z[name]).mean(0), 0, atol=1e-3)
        np.testing.assert_allclose(np.asarray(z[name]).std(0), 1, atol=1e-3)


def test_programs_stay_in_their_supports(whole):
    coordinates, values = whole
    shapes = jax.eval_shape(jax.vmap(coordinates.to_z), values)
    keys = jax.random.split(jax.random.key(1), len(shapes))
    z = {n: jax.random.uniform(k, x.shape, minval=-8, maxval=8) for k, (n, x) in zip(keys, shapes.items(), strict=True)}
    drawn = jax.jit(lambda v, z: constrained(coordinates, v, z))(values, z)
    assert all(np.isfinite(x).all() for x in drawn.values())
    assert np.asarray(jax.jit(jax.vmap(coordinates.in_support))(drawn)).all()
    outside = {**drawn, "tau": -drawn["tau"]}
    assert not np.asarray(jax.jit(jax.vmap(coordinates.in_support))(outside)).any()


def test_volume_of_a_program_is_that_of_automatic_differentiation(whole):
    """With the coordinates that the densities refer to: all of a simplex but the last, what is below the diagonal."""
    coordinates, values = whole
    rows, columns = np.tril_indices(3, -1)

    def free(example):
        out = {name: example[name] for name in coordinates.graph.parameters}
        return out | {"shares": example["shares"][..., :-1], "factor": example["factor"][rows, columns]}

    def build(parameters, example):
        out = {**example, **parameters}
        shares = parameters["shares"]
        out["shares"] = jnp.concatenate([shares, 1 - shares.sum(-1, keepdims=True)], -1)
        lower = jnp.zeros((3, 3)).at[rows, columns].set(parameters["factor"])
        return out | {"factor": lower + jnp.diag(jnp.sqrt(1 - (lower**2).sum(-1)))}

    def one(example):
        parameters, unflatten = jax.flatten_util.ravel_pytree(free(example))

        def to_z(flat):
            z = coordinates.to_z(build(unflatten(flat), example))
            return jax.flatten_util.ravel_pytree(z)[0]

        return jnp.linalg.slogdet(jax.jacfwd(to_z)(parameters))[1], coordinates.log_volume(example)

    some = {name: x[:100] for name, x in values.items()}
    z = jax.jit(jax.vmap(coordinates.to_z))(some)
    usual = np.all([np.abs(np.asarray(x)).reshape(100, -1).max(1) < 3.5 for x in z.values()], axis=0)
    automatic, ours = jax.jit(jax.vmap(one))(some)
    assert usual.sum() > 30
    # 46 coordinates, each to 1e-4 or so.
    np.testing.assert_allclose(ours[usual], automatic[usual], atol=2e-2)


def test_limits_are_those_of_the_families(whole):
    coordinates, _ = whole
    assert dict(coordinates.limits) == {"tau": 8.0, "bound": 5.2, "masked": 8.0, "shift": 8.0, "rate": 8.0}
    assert coordinates.limit("mu") == np.inf


def test_a_support_without_a_bijection_is_an_error():
    def program():
        direction = numpyro.sample("direction", dist.ProjectedNormal(jnp.zeros(3)))
        numpyro.sample("y", dist.Normal(direction.sum(), 1.0), obs=0.0)

    values = {"direction": jnp.ones((20, 3)) / np.sqrt(3.0), "y": jnp.zeros(20)}
    with pytest.raises(ValueError, match=r"Parameter 'direction' is ProjectedNormal, which has neither a cdf nor"):
        Coordinates(program, cpe.Graph.from_program(program), values)
