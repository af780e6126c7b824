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
from cpejax.coordinates.bijections import bijection, from_free, to_free
from cpejax.coordinates.prior import Coordinates
from cpejax.program.quantiles import drawable, from_normal, is_exact, limit, to_normal

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
    "half-normal": (dist.HalfNormal(2.0), stats.chi(1, scale=2)),
    "exponential": (dist.Exponential(0.3), stats.expon(scale=1 / 0.3)),
    "laplace": (dist.Laplace(1.0, 2.0), stats.laplace(1, 2)),
    "logistic": (dist.Logistic(1.0, 2.0), stats.logistic(1, 2)),
    "cauchy": (dist.Cauchy(1.0, 2.0), stats.cauchy(1, 2)),
    "half-cauchy": (dist.HalfCauchy(2.0), stats.halfcauchy(scale=2)),
    "gumbel": (dist.Gumbel(1.0, 2.0), stats.gumbel_r(1, 2)),
    "gamma": (dist.Gamma(2.0, 3.0), stats.gamma(2, scale=1 / 3)),
    "gamma-many-scales": (dist.Gamma(0.1, 1.0), stats.gamma(0.1)),
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
    "truncated-cauchy": (dist.TruncatedCauchy(0.0, 1.0, low=0.5), None),
    "truncated-laplace": (truncated(dist.Laplace(0.0, 1.0), high=0.5), None),
    "soft-laplace": (dist.SoftLaplace(1.0, 2.0), stats.hypsecant(1, 2)),
    "log-uniform": (dist.LogUniform(0.1, 1000.0), stats.loguniform(0.1, 1000)),
    "kumaraswamy": (dist.Kumaraswamy(2.0, 0.5), None),
    "cdf-only": (dist.Gompertz(1.0, 1.0), stats.gompertz(1)),
    "mixture": (mixture, None),
    "transformed": (
        dist.TransformedDistribution(dist.Exponential(2.0), [transforms.AffineTransform(1.0, -2.0)]),
        None,
    ),
}


N = 4000


@jax.jit
def transformed(fn, x, z):
    """All at once, and compiled once for a family: its parameters are arguments."""
    noise, derivative = jax.jvp(lambda x: to_normal(fn, x), (x,), (jnp.ones_like(x),))
    values = from_normal(fn, jnp.concatenate([noise, z]))
    return {
        "noise": noise,
        "derivative": derivative,
        "log_prob": fn.log_prob(x),
        "back": values[:N],
        "values": values[N:],
    }


@pytest.fixture(params=FAMILIES, scope="module")
def family(request):
    fn, oracle = FAMILIES[request.param]
    if oracle is None:
        x = drawable(fn).sample(jax.random.key(1), (N,))
    else:
        x = jnp.asarray(oracle.rvs(N, random_state=1), jnp.float32)
    z = jnp.linspace(-8, 8, N)
    out = {**transformed(fn, x, z), "x": x, "z": z}
    return {name: np.asarray(value, np.float64) for name, value in out.items()} | {"fn": fn, "oracle": oracle}


def test_prior_draws_are_standard_normal(family):
    assert is_exact(family["fn"])
    assert stats.kstest(family["noise"], "norm").pvalue > 1e-3


def units(fn):
    """To how many units in the last place of float32 the family's F(x) is known."""
    if isinstance(fn, dist.TransformedDistribution):
        return units(fn.base_dist)
    if isinstance(getattr(fn, "base_dist", None), dist.StudentT):
        return 70  # a difference of two, over the probability of what is left, .3
    # The incomplete functions of JAX are good to 20, all closed forms to 4.
    return 20 if isinstance(fn, dist.Gamma | dist.Beta | dist.StudentT) else 4


def test_noise_gives_the_value_back(family):
    tolerance = 2 * EPS * np.abs(family["x"]) + units(family["fn"]) * EPS / np.exp(family["log_prob"])
    tolerance = tolerance + np.finfo(np.float32).tiny  # what is smaller is flushed to zero
    assert (np.abs(family["back"] - family["x"]) <= tolerance).all()


def test_volume_is_that_of_automatic_differentiation(family):
    core = np.abs(family["noise"]) < 3
    exact = family["log_prob"] - stats.norm.logpdf(family["noise"])
    np.testing.assert_allclose(np.log(np.abs(family["derivative"][core])), exact[core], atol=2e-3)


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


@pytest.mark.parametrize(
    ("fn", "ends"),
    [
        (dist.Uniform(0.0, 1.0), [0.0, 1.0]),
        (dist.Beta(0.5, 0.5), [0.0, 1.0]),
        (dist.HalfNormal(1.0), [0.0]),
        (dist.LogUniform(0.1, 10.0), [0.1, 10.0]),
        (dist.TruncatedNormal(0.0, 1.0, low=-1.0, high=2.0), [-1.0, 2.0]),
    ],
    ids=lambda a: type(a).__name__ if isinstance(a, dist.Distribution) else None,
)
def test_the_ends_of_the_support_have_finite_noise(fn, ends):
    x = jnp.tile(jnp.array(ends), N // len(ends))
    out = transformed(fn, x, jnp.zeros(N))
    assert np.isfinite(out["noise"]).all()
    # Noise ends where Φ is 1e-7, so the ends are met to that share of the width, and to rounding.
    np.testing.assert_allclose(out["back"], x, rtol=1e-6, atol=1e-6)


def test_a_support_of_one_number_is_not_left():
    one = dist.Uniform(jnp.full(N, 3.7952633), 3.7952633)
    drawn = from_normal(one, jnp.linspace(-8, 8, N))
    assert bool(jnp.all(one.support(drawn)))


def test_subclasses_are_of_their_family():
    assert is_exact(dist.Chi2(3.0))
    assert limit(dist.Chi2(3.0)) == limit(dist.Gamma(1.5, 0.5)) == 8
    assert limit(dist.BetaProportion(0.3, 2.0)) == 8


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


def factors(free):
    """Cholesky factors of correlation matrices, in float64, a row at a time."""
    n, size = free.shape
    d = round((1 + np.sqrt(1 + 8 * size)) / 2)
    out = np.zeros((n, d, d))
    scalars = iter(free.T)
    for i in range(d):
        rest = np.ones(n)
        for j in range(i):
            x = next(scalars)
            out[:, i, j] = np.tanh(x) * rest
            rest = rest / np.cosh(x)
        out[:, i, i] = rest
    return out


rng = np.random.default_rng(0)
close, wide = factors(rng.normal(size=(N, 3))), factors(3 * rng.normal(size=(N, 6)))
# Values that are draws of the family, or spread as widely, and the number of free coordinates.
INEXACT = {
    "dirichlet": (dist.Dirichlet(jnp.ones(4)), rng.dirichlet(np.ones(4), N), 3),
    "dirichlet-sparse": (dist.Dirichlet(jnp.full(5, 0.1)), rng.dirichlet(np.full(5, 0.1), N), 4),
    "dirichlet-30": (dist.Dirichlet(jnp.ones(30)), rng.dirichlet(np.ones(30), N), 29),
    "lkj-cholesky": (dist.LKJCholesky(3, 1.0), close, 3),
    "lkj-cholesky-nearly-singular": (dist.LKJCholesky(4, 1.0), wide, 6),
    "lkj": (dist.LKJ(3, 1.0), close @ close.transpose(0, 2, 1), 3),
    "von-mises": (dist.VonMises(0.5, 2.0), rng.vonmises(0.5, 2.0, N), 1),
    "folded": (dist.FoldedDistribution(dist.Normal(1.0, 1.0)), np.abs(rng.normal(1, 1, N)), 1),
    "multivariate-t": (dist.MultivariateStudentT(3.0, jnp.zeros(2), jnp.eye(2)), rng.standard_t(3, (N, 2)), 2),
}


@pytest.mark.parametrize("name", INEXACT)
def test_bijections_of_the_support(name):
    fn, draws, size = INEXACT[name]
    assert not is_exact(fn)
    x = jnp.asarray(draws, jnp.float32)
    free = jax.jit(lambda x: to_free(fn, x))(x)
    assert np.isfinite(free).all()
    assert free.reshape(N, -1).shape == (N, size)
    # As far as 8 standard deviations from the mean, in every direction; float32 does not hold such matrices.
    furthest = 4 if name == "lkj" else 8
    z = jax.random.uniform(jax.random.key(1), free.shape, minval=-furthest, maxval=furthest)
    both = jax.jit(lambda u: from_free(fn, u))(jnp.concatenate([free, free.mean(0) + free.std(0) * z]))
    np.testing.assert_allclose(both[:N], x, rtol=1e-4, atol=2e-6)
    assert np.isfinite(both).all()
    assert bool(jnp.all(fn.support(both[N:])))


@pytest.mark.parametrize("name", ["dirichlet", "lkj-cholesky-nearly-singular"])
def test_volume_of_a_bijection(name):
    fn, draws, _size = INEXACT[name]
    rows, columns = np.tril_indices(4, -1)

    def ours(x):
        free = to_free(fn, x)
        return free, bijection(fn).log_abs_det_jacobian(free, x)

    def automatic(free):
        """By the coordinates the density refers to: all of a simplex but the last, what is below the diagonal."""
        return jnp.linalg.slogdet(jax.jacfwd(lambda u: pick(bijection(fn)(u)))(free))[1]

    def pick(x):
        return x[:-1] if x.ndim == 1 else x[rows, columns]

    free, volume = jax.jit(jax.vmap(ours))(jnp.asarray(draws[:500], jnp.float32))
    usual = np.abs(np.asarray(free)).max(1) < 4
    assert usual.sum() > 100
    np.testing.assert_allclose(volume[usual], jax.jit(jax.vmap(automatic))(free)[usual], rtol=1e-4, atol=1e-3)


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
        numpyro.sample("y", dist.Normal(0.0, scale).to_event(1), obs=jnp.zeros(3))

    simulations = cpe.simulate(program, 2000, key=jax.random.key(0))
    assert stats.kstest(simulations["scale"].ravel(), lambda x: 2 * stats.t(3).cdf(x) - 1).pvalue > 1e-3


# ---- whole programs


def everything():
    """Plates, one in the other; axes outside plates; parameters that depend on others; all kinds of families."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    numpyro.sample("bound", dist.Uniform(mu - tau, mu + 2 * tau))
    vector = numpyro.sample("vector", dist.Normal(jnp.arange(2.0), tau + 0.1))
    numpyro.sample("walk", dist.GaussianRandomWalk(tau, 3))
    numpyro.sample("masked", dist.Exponential(tau + 0.1).mask(True))
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


def test_shapes_have_plates_first_and_one_axis_of_scalars(whole):
    coordinates, values = whole
    z = jax.eval_shape(jax.vmap(coordinates.to_z), values)
    assert {name: x.shape[1:] for name, x in z.items()} == {
        "mu": (1,),
        "tau": (1,),
        "bound": (1,),
        "vector": (2,),
        "walk": (3,),
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
    for name in set(z) - {"shares"}:
        flat = np.asarray(z[name], np.float64).reshape(1000, -1)
        assert min(stats.kstest(column, "norm").pvalue for column in flat.T) > 1e-4, name
    # Not normal, but standardised.
    np.testing.assert_allclose(np.asarray(z["shares"]).mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(np.asarray(z["shares"]).std(0), 1, atol=1e-3)


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
    coordinates, values = whole

    def build(parameters, example):
        shares = parameters["shares"]  # without the last, which the others determine
        return {**example, **parameters, "shares": jnp.concatenate([shares, 1 - shares.sum(-1, keepdims=True)], -1)}

    def one(example):
        free = {name: example[name] for name in coordinates.graph.parameters}
        flat, unflatten = jax.flatten_util.ravel_pytree({**free, "shares": free["shares"][..., :-1]})

        def to_z(flat):
            return jax.flatten_util.ravel_pytree(coordinates.to_z(build(unflatten(flat), example)))[0]

        return jnp.linalg.slogdet(jax.jacfwd(to_z)(flat))[1], coordinates.log_volume(example), to_z(flat)

    automatic, ours, z = jax.jit(jax.vmap(one))({name: x[:100] for name, x in values.items()})
    usual = np.abs(np.asarray(z)).max(1) < 3.5
    assert usual.sum() > 50
    assert z.shape[1] == 56
    np.testing.assert_allclose(ours[usual], automatic[usual], atol=2e-2)


def test_limits_are_those_of_the_families(whole):
    coordinates, _ = whole
    assert dict(coordinates.limits) == {"tau": 8.0, "bound": 5.2, "masked": 8.0, "shift": 8.0, "rate": 8.0}
    np.testing.assert_array_equal(coordinates.limit("mu"), [-np.inf, np.inf])
    np.testing.assert_array_equal(coordinates.limit("bound"), np.float32([-5.2, 5.2]))


def test_values_of_a_long_tail_end_where_the_simulations_do():
    def program():
        scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
        numpyro.sample("y", dist.Normal(0.0, scale))

    values = {"scale": jnp.array([0.5, 1.0, 7.0]), "y": jnp.zeros(3)}
    coordinates = Coordinates(program, cpe.Model(program, observed=["y"]).graph, values)
    constrain = coordinates.constrainers({"scale": jnp.zeros(()), "y": jnp.zeros(())}, {"scale": jnp.zeros(1)})["scale"]
    for z, expected in ((-6.0, 0.5), (0.0, 1.0), (6.0, 7.0)):
        np.testing.assert_allclose(constrain({}, jnp.array([z])), expected, rtol=1e-4)


def test_a_support_without_a_bijection_is_an_error():
    def program():
        direction = numpyro.sample("direction", dist.ProjectedNormal(jnp.zeros(3)))
        numpyro.sample("y", dist.Normal(direction.sum(), 1.0), obs=0.0)

    values = {"direction": jnp.ones((20, 3)) / np.sqrt(3.0), "y": jnp.zeros(20)}
    with pytest.raises(ValueError, match=r"Parameter 'direction' is ProjectedNormal, which has neither a cdf nor"):
        Coordinates(program, cpe.Graph.from_program(program), values)
