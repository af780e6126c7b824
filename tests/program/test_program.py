"""Programs: what is read off them, the simulators in them, and what they must not do."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

import cpejax as cpe
from cpejax.program.distributions import unwrap
from cpejax.program.tracing import read, run

sample, Normal = numpyro.sample, dist.Normal


def parents(program, *args):
    return {name: site.parents for name, site in read(cpe.Model(program, args=args).bound).items()}


def mixed(program):
    return {name: site.mixed for name, site in read(program).items() if site.mixed}


# ---- what a site depends on


def test_parents_are_what_the_distribution_reads():
    def program():
        a = sample("a", Normal(0.0, 1.0))
        b = sample("b", Normal(a, 1.0))
        sample("c", Normal(0.0, jnp.exp(b)))
        sample("d", Normal(jnp.zeros_like(a), 1.0))  # only the shape of a

    assert parents(program) == {"a": set(), "b": {"a"}, "c": {"b"}, "d": set()}


def test_parents_through_deterministic_sites_jit_and_control_flow():
    def program():
        a = sample("a", Normal(0.0, 1.0))
        b = sample("b", Normal(0.0, 1.0))
        c = sample("c", Normal(0.0, 1.0))
        total = numpyro.deterministic("total", a + 1.0)
        first, second = jax.jit(lambda x, y: (2 * x, 2 * y))(total, b)
        sample("jit", Normal(first, 1.0))  # what jit leaves apart stays apart
        sample("other", Normal(second, 1.0))
        steps, _ = jax.lax.scan(lambda carry, _: (carry + c, None), 0.0, None, length=3)
        sample("scan", Normal(steps, 1.0))
        sample("cond", Normal(jax.lax.cond(a > 0, lambda: b, lambda: 0.0), 1.0))
        sample("while", Normal(jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, c), 1.0))

    found = parents(program)
    assert found["jit"] == {"a"}
    assert found["other"] == {"b"}
    assert found["scan"] == {"c"}
    assert found["cond"] == {"a", "b"}
    assert found["while"] == {"c"}


def test_parents_through_a_callback_that_is_not_called():
    def never(x):
        raise AssertionError("called")

    def program():
        a = sample("a", Normal(0.0, 1.0))
        sample("b", Normal(0.0, 1.0))
        y = jax.pure_callback(never, jax.ShapeDtypeStruct((), jnp.float32), a)
        sample("y", Normal(y, 1.0))

    assert parents(program)["y"] == {"a"}


class Hidden(dist.Distribution):
    """A user's own distribution that does not tell JAX of its parameter."""

    support = dist.constraints.real

    def __init__(self, loc):
        self.loc = loc
        super().__init__(jnp.shape(loc))

    def sample(self, key, sample_shape=()):
        return self.loc + jax.random.normal(key, sample_shape + self.batch_shape)


def test_parents_of_distributions_that_hide_their_parameters():
    def program():
        sample("y", Hidden(sample("a", Normal(0.0, 1.0))))

    assert parents(program)["y"] == {"a"}


@pytest.mark.parametrize("host", [False, True])
def test_parents_of_a_simulator_are_the_arguments_it_uses(host):
    def fn(source, used, ignored):
        return used + (source.normal() if host else jax.random.normal(source))

    def program():
        a, b = sample("a", Normal(0.0, 1.0)), sample("b", Normal(0.0, 1.0))
        sample("y", cpe.Simulator(fn, a, b, host=host))

    # Nobody can look into a function on the host.
    assert parents(program)["y"] == ({"a", "b"} if host else {"a"})


def test_a_delta_site_keeps_its_parents():
    def program():
        sample("x", dist.Delta(2 * sample("a", Normal(0.0, 1.0))), obs=1.0)

    assert parents(program)["x"] == {"a"}


def test_observed_values_are_not_read():
    def program(y):
        a = sample("a", Normal(0.0, 1.0))
        y = sample("y", Normal(a, 1.0), obs=y)
        sample("z", Normal(y, 1.0))

    assert parents(program, 3.0) == {"a": set(), "y": {"a"}, "z": {"y"}}
    assert parents(program, None) == {"a": set(), "y": {"a"}, "z": {"y"}}
    assert read(cpe.Model(program, args=(3.0,)).bound)["y"].has_obs
    assert not read(cpe.Model(program, args=(None,)).bound)["y"].has_obs


def test_arguments_reach_the_program():
    def program(n, *, scale):
        a = sample("a", Normal(jnp.zeros(n), scale).to_event(1))
        sample("y", Normal(a.sum(), 1.0))

    assert cpe.Model(program, ["y"], args=(5,), kwargs={"scale": 2.0}).graph.sites["a"].shape == (5,)


# ---- shapes and plates


def test_axes_belong_to_plates_or_to_the_event():
    def program():
        with numpyro.plate("outer", 2, dim=-2):
            sample("gap", Normal(0.0, 1.0))  # (2, 1): the second axis belongs to nobody
            with numpyro.plate("inner", 3, dim=-1):
                sample("both", Normal(jnp.zeros(4), 1.0).to_event(1))
        with numpyro.plate("inner", 3):
            sample("left", Normal(jnp.zeros((5, 3)), 1.0))  # an axis of its own before the plate's
        sample("batch", Normal(jnp.zeros(6), 1.0))
        sample("drawn", Normal(0.0, 1.0), sample_shape=(7,))

    sites = {name: (site.shape, site.dims) for name, site in read(program).items()}
    assert sites == {
        "gap": ((2, 1), ("outer", None)),
        "both": ((2, 3, 4), ("outer", "inner", None)),
        "left": ((5, 3), (None, "inner")),
        "batch": ((6,), (None,)),
        "drawn": ((7,), (None,)),
    }


def test_sample_shape_is_part_of_the_distribution():
    fns = {}
    run(lambda: sample("a", Normal(0.0, 1.0), sample_shape=(7,)), {}, lambda name, msg: fns.update({name: msg["fn"]}))
    assert fns["a"].batch_shape == (7,)


# ---- which members read which


def in_plate(combine, size=6, first=None):
    """y[j] reads combine(b)[j] in one plate."""

    def program():
        with numpyro.plate("p", size):
            b = sample("b", first or Normal(0.0, 1.0))
        with numpyro.plate("p", size):
            sample("y", Normal(combine(b), 1.0))

    return program


@pytest.mark.parametrize(
    ("combine", "is_mixed"),
    [
        (lambda b: b, False),
        (lambda b: jnp.exp(b) / (1 + b**2), False),
        (lambda b: jax.vmap(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * x, 1.0))(b), False),
        (lambda b: b - b.mean(), True),
        (lambda b: jax.nn.softmax(b), True),
        (lambda b: b[::-1], True),
        (lambda b: jnp.concatenate([b[1:], jnp.zeros(1)]), True),  # reads the next
        (lambda b: jnp.concatenate([jnp.zeros(1), b[:-1]]), True),  # reads the one before
        (lambda b: b.at[4].set(b[3]), True),  # one member reads one other
        (lambda b: jnp.full_like(b, b.max()), True),
        (lambda b: jnp.full_like(b, b.min()), True),
        (lambda b: jnp.full_like(b, jnp.median(b)), True),
        (lambda b: jnp.argsort(jnp.argsort(b)).astype(float), True),  # ranks
    ],
)
def test_members_that_read_other_members_are_found(combine, is_mixed):
    assert mixed(in_plate(combine)) == ({"y": (("b", "p"),)} if is_mixed else {})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_plates_are_probed_too(size):
    assert bool(mixed(in_plate(lambda b: b - b.mean(), size))) == (size > 1)


def test_mixing_names_the_parent_and_the_plate():
    def program():
        with numpyro.plate("rows", 3, dim=-2), numpyro.plate("columns", 4, dim=-1):
            a = sample("a", Normal(0.0, 1.0))
            b = sample("b", dist.Dirichlet(jnp.ones(2)))
            loc = a - a.mean(0) + b[..., 0]
            sample("y", Normal(loc, 1.0))
            sample("z", Normal(a + b.mean(1, keepdims=True)[..., 0], 1.0))

    assert mixed(program) == {"y": (("a", "rows"),), "z": (("b", "columns"),)}


def test_mixing_in_event_axes_and_discrete_data():
    def program():
        with numpyro.plate("p", 5):
            rate = sample("rate", dist.HalfNormal(1.0))
            counts = sample("counts", dist.Poisson(rate / rate.mean()))
            sample("own", dist.Poisson(rate))
            sample("vector", Normal(jnp.stack([rate, counts.sum() * rate], -1), 1.0).to_event(1))

    assert mixed(program) == {"counts": (("rate", "p"),), "vector": (("counts", "p"),)}


def test_mixing_is_found_in_the_rows_of_a_simulator_that_is_not_called():
    def never(rng, *args):
        raise AssertionError("called")

    def program(mix):
        with numpyro.plate("p", 4):
            b = sample("b", Normal(0.0, 1.0))
            sample("y", cpe.Simulator(never, b - b.mean() if mix else b, host=True))
            sample("z", cpe.Simulator(never, b, host=True, event_shape=(2,)).mask(True))

    assert mixed(lambda: program(True)) == {"y": (("b", "p"),)}
    assert mixed(lambda: program(False)) == {}


def test_mixing_is_found_without_a_density_and_behind_a_mask():
    def program():
        with numpyro.plate("p", 4):
            b = sample("b", Normal(0.0, 1.0))
            sample("y", Hidden(b - b.mean()))
            sample("z", Normal(b.sum(), 1.0).mask(False))
            sample("own", Hidden(b))

    assert mixed(program) == {"y": (("b", "p"),), "z": (("b", "p"),)}


def test_probing_survives_arguments_outside_their_support():
    def program():
        with numpyro.plate("p", 4):
            low = sample("low", Normal(0.0, 1.0))
            sample("y", dist.Uniform(low, low.mean() + 0.1))

    # low > high for some draws, which is for the simulation to complain about
    assert mixed(program) == {"y": (("low", "p"),)}


# ---- simulators


def noisy(source, loc, scale, shape):
    noise = source.normal(size=shape) if isinstance(source, np.random.Generator) else jax.random.normal(source, shape)
    return loc + scale * noise


def simulator(loc, scale, *, host, vectorized):
    """Two numbers around `loc`, from the same formula in each of the four ways to write it."""
    if vectorized:
        return cpe.Simulator(
            lambda s, a, b: noisy(s, a[:, None], b[:, None], (len(a), 2)),
            *(loc, scale),
            event_shape=(2,),
            host=host,
            vectorized=True,
        )
    return cpe.Simulator(lambda s, a, b: noisy(s, a, b, (2,)), loc, scale, event_shape=(2,), host=host)


MODES = pytest.mark.parametrize(("host", "vectorized"), [(False, False), (False, True), (True, False), (True, True)])
KEYS = pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])


@MODES
@KEYS
def test_simulators_draw_rows_around_their_arguments(host, vectorized, key):
    loc = jnp.arange(6.0).reshape(2, 3) * 100
    sim = simulator(loc, 1.0, host=host, vectorized=vectorized).expand((2, 3))
    x = sim.sample(key, (50,))
    assert x.shape == (50, 2, 3, 2)
    assert np.abs(x.mean((0, 3)) - loc).max() < 0.7  # five standard errors
    assert len(np.unique(x - loc[..., None])) > 590  # no two draws share their noise
    np.testing.assert_array_equal(x, sim.sample(key, (50,)))
    assert not np.array_equal(x, sim.sample(jax.random.split(key)[0], (50,)))


@MODES
def test_simulators_work_in_plates_under_vmap_and_jit(host, vectorized):
    def program(loc):
        with numpyro.plate("outer", 2, dim=-2), numpyro.plate("inner", 3, dim=-1):
            return sample("y", simulator(loc, 0.001, host=host, vectorized=vectorized))

    def draw(key, loc):
        return handlers.seed(program, key)(loc)

    keys, locs = jax.random.split(jax.random.key(0), 4), jnp.arange(4.0)
    x = jax.jit(jax.vmap(draw))(keys, locs)
    assert x.shape == (4, 2, 3, 2)
    np.testing.assert_allclose(x, np.broadcast_to(locs[:, None, None, None], x.shape), atol=0.01)
    np.testing.assert_allclose(jax.vmap(draw)(keys, locs), x, rtol=1e-6)
    assert len(np.unique(np.asarray(x) - np.asarray(locs)[:, None, None, None])) == x.size
    if not (host and vectorized):  # there all rows of a call share one generator
        np.testing.assert_allclose(draw(keys[1], locs[1]), x[1], rtol=1e-6)


@pytest.mark.parametrize("host", [False, True])
def test_arguments_are_split_into_the_rows_of_the_plates(host):
    shapes = []

    def fn(source, *args):
        shapes.append([np.shape(a) for a in args])
        return sum(a.sum() for a in args)

    own, pair, vector, matrix = jnp.arange(3.0), jnp.ones((3, 2)), jnp.arange(5.0), jnp.ones((2, 2))
    x = cpe.Simulator(fn, own, pair, vector, matrix, 1.0, host=host).expand((3,)).sample(jax.random.key(0))
    assert shapes[0] == [(), (2,), (5,), (2, 2), ()]
    np.testing.assert_allclose(x, np.arange(3) + 2 + 10 + 4 + 1)


@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ((), ()),
        ((3,), ()),
        ((2, 1), ()),
        ((2, 3), ()),
        ((2,), (2,)),
        ((3, 2), (2,)),
        ((5, 2), (5, 2)),
        ((2, 3, 5), (5,)),
    ],
)
def test_rows_align_with_the_plates_from_the_right(shape, row):
    sim = cpe.Simulator(lambda key, a: a.sum(), jnp.ones(shape)).expand((2, 3))
    assert sim.rows()[0].shape == (2, 3, *row)


def test_rows_follow_event_dims_where_shapes_are_ambiguous():
    whole = cpe.Simulator(lambda key, v: v.sum(), jnp.arange(3.0), event_dims=(1,)).expand((3,))
    assert whole.rows()[0].shape == (3, 3)
    np.testing.assert_allclose(whole.sample(jax.random.key(0)), [3.0, 3.0, 3.0])
    split = cpe.Simulator(lambda key, v: v, jnp.arange(3.0)).expand((3,))
    np.testing.assert_allclose(split.sample(jax.random.key(0)), [0.0, 1.0, 2.0])


def test_sample_shape_does_not_split_a_vector_into_rows():
    sim = cpe.Simulator(lambda key, v: v.sum(), jnp.arange(4.0))
    np.testing.assert_allclose(sim.sample(jax.random.key(0), (4,)), [6.0] * 4)


def test_simulators_are_pytrees_and_unwrap():
    sim = cpe.Simulator(lambda key, a: a, jnp.ones(3)).expand((3,)).to_event(1)
    assert isinstance(unwrap(sim), cpe.Simulator)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, sim)
    np.testing.assert_allclose(doubled.sample(jax.random.key(0)), [2.0, 2.0, 2.0])
    assert (doubled.batch_shape, doubled.event_shape) == ((), (3,))


@pytest.mark.parametrize("host", [False, True])
def test_simulated_integers_are_made_floats(host):
    sim = cpe.Simulator(lambda source, a: np.int32(3) if host else jnp.int32(3), 1.0, host=host)
    x = sim.sample(jax.random.key(0))
    assert x.dtype == jnp.float32
    assert x == 3


@MODES
def test_a_simulator_that_returns_another_shape_says_so(host, vectorized):
    def wrong(source, a):
        return np.zeros((4, 3)) if host else jnp.zeros((4, 3))

    def program():
        a = sample("a", Normal(0.0, 1.0))
        with numpyro.plate("p", 4):
            sample("y", cpe.Simulator(wrong, a, event_shape=(2,), host=host, vectorized=vectorized))

    expected = r"\(4, 2\)" if vectorized else r"\(2,\)"
    message = rf"Site 'y': simulator 'wrong' returned shape \(4, 3\).*expected {expected}"
    with pytest.raises(Exception, match=message):
        run(program, {})


def test_a_simulator_has_no_density():
    with pytest.raises(NotImplementedError, match=r"no density: it can only be sampled.*cpe\.fit"):
        cpe.Simulator(lambda key: 0.0).log_prob(1.0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cpe.Simulator(3.0, 1.0), TypeError, r"needs a function fn\(key, \*args\) first, but found float"),
        (lambda: cpe.Simulator(len, {"a": 1}), TypeError, "argument 0 is a dict, expected a number or an array"),
        (lambda: cpe.Simulator(len, 1.0, event_dims=(0, 1)), ValueError, "has 1 arguments, but event_dims has 2"),
        (
            lambda: cpe.Simulator(len, jnp.ones(3), event_dims=(0,)).expand((4,)).rows(),
            ValueError,
            r"argument 0 has shape \(3,\) and event_dims 0.*plates, which have shape \(4,\)",
        ),
    ],
)
def test_simulator_arguments_are_checked(make, error, message, monkeypatch):
    # The tests' type checker would object first.
    monkeypatch.setattr(cpe.Simulator, "__init__", inspect.unwrap(cpe.Simulator.__init__))
    with pytest.raises(error, match=message):
        make()


# ---- what a program must not do


def factor():
    numpyro.factor("penalty", -(sample("a", Normal(0.0, 1.0)) ** 2))


def parameter():
    numpyro.param("w", 0.0)


def improper():
    sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))


def improper_in_plate():
    with numpyro.plate("p", 3):
        sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))


def subsampled():
    with numpyro.plate("rows", 10, subsample_size=3):
        sample("a", Normal(0.0, 1.0))


def weighted():
    with handlers.scale(scale=0.5):
        sample("a", Normal(0.0, 1.0))


def twice():
    for _ in range(2):
        sample("a", Normal(0.0, 1.0))


def two_sizes():
    for i in (3, 4):
        with numpyro.plate("p", i):
            sample(f"a{i}", Normal(0.0, 1.0))


def step(carry, _):
    carry = sample("z", Normal(carry, 1.0))
    return carry, carry


def numpyro_scan():
    scan(step, sample("a", Normal(0.0, 1.0)), jnp.arange(3))


def numpyro_scan_in_plate():
    with numpyro.plate("p", 3):
        scan(step, sample("a", Normal(0.0, 1.0)), jnp.arange(3))


def numpyro_cond():
    a = sample("a", Normal(0.0, 1.0))
    cond(a > 0, lambda _: sample("z", Normal(0.0, 1.0)), lambda _: sample("z", Normal(1.0, 1.0)), None)


def lax_scan():
    jax.lax.scan(step, sample("a", Normal(0.0, 1.0)), jnp.arange(3))


def lax_cond():
    a = sample("a", Normal(0.0, 1.0))
    jax.lax.cond(a > 0, lambda: sample("z", Normal(0.0, 1.0)), lambda: 0.0)


def lax_while():
    jax.lax.while_loop(lambda x: x < 3, lambda x: sample("z", Normal(x, 1.0)), 0.0)


def vmapped():
    jax.vmap(lambda x: sample("z", Normal(x, 1.0)))(jnp.arange(3.0))


def jitted():
    jax.jit(lambda: sample("z", Normal(0.0, 1.0)))()


def branch():
    a = sample("a", Normal(0.0, 1.0))
    if a > 0:
        sample("b", Normal(0.0, 1.0))


def number():
    a = sample("a", Normal(0.0, 1.0))
    sample("y", Normal(float(a), 1.0))


def numpy_number():
    a = sample("a", Normal(0.0, 1.0))
    sample("y", Normal(np.sin(a), 1.0))


def integer():
    n = sample("n", dist.Poisson(3.0))
    for i in range(n):
        sample(f"a{i}", Normal(0.0, 1.0))


def masked_shape():
    a = sample("a", Normal(jnp.zeros(3), 1.0))
    sample("y", Normal(a[a > 0], 1.0))


def sampled_shape():
    n = sample("n", dist.Poisson(3.0))
    sample("y", Normal(jnp.zeros(n), 1.0))


def sampled_plate():
    n = sample("n", dist.Poisson(3.0))
    with numpyro.plate("p", n):
        sample("y", Normal(0.0, 1.0))


HIDES = r"hides what is drawn there.*one name a step.*Simulator"
JAX_HIDES = rf"draws site 'z' inside .*JAX.*{HIDES}"
SIZE = r"size depends on a sampled value.*mask.*host=True"
NUMBER = r"needs the number behind a sampled value.*jax\.numpy.*host=True"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (factor, r"Site 'penalty' is a numpyro\.factor.*cannot be simulated.*prior or as a data site"),
        (parameter, r"Site 'w' is a numpyro\.param, which has no prior.*numpyro\.sample"),
        (improper, r"Site 'a' has an improper prior.*cannot be simulated.*Normal or a Uniform"),
        (improper_in_plate, r"Site 'a' has an improper prior"),
        (subsampled, r"Plate 'rows' subsamples 3 of 10 members.*remove subsample_size"),
        (weighted, r"Site 'a' is weighted by numpyro\.handlers\.scale.*Remove"),
        (twice, r"Two sites are called 'a'.*number them"),
        (two_sizes, r"Plate 'p' has size 4 at site 'a4', but had size 3 before.*different names"),
        (numpyro_scan, rf"numpyro\.contrib\.control_flow.*{HIDES}"),
        (numpyro_scan_in_plate, rf"numpyro\.contrib\.control_flow.*{HIDES}"),
        (numpyro_cond, rf"numpyro\.contrib\.control_flow.*{HIDES}"),
        (lax_scan, JAX_HIDES),
        (lax_cond, JAX_HIDES),
        (lax_while, JAX_HIDES),
        (vmapped, JAX_HIDES),
        (jitted, JAX_HIDES),
        (branch, r"after site 'a' \(test_program\.py, line \d+: if a > 0:\).*Python branch.*jnp\.where"),
        (number, rf"after site 'a' \(.*float\(a\).*{NUMBER}"),
        (numpy_number, rf"after site 'a' \(.*np\.sin\(a\).*{NUMBER}"),
        (integer, rf"after site 'n' \(.*range\(n\).*{NUMBER}"),
        (masked_shape, rf"after site 'a' \(.*a\[a > 0\].*{SIZE}"),
        (sampled_shape, rf"after site 'n' \(.*jnp\.zeros\(n\).*{SIZE}"),
        (sampled_plate, rf"after site 'n' \(.*numpyro\.plate.*{SIZE}"),
    ],
)
def test_programs_that_cannot_be_read_say_why(program, message):
    with pytest.raises(ValueError, match=message):
        read(program)


def test_other_errors_pass_and_say_where():
    def program():
        sample("a", Normal(0.0, 1.0))
        {}["missing"]

    with pytest.raises(KeyError, match="missing") as caught:
        read(program)
    assert any("after site 'a' (test_program.py, line" in note for note in caught.value.__notes__)


# ---- running with given values


def test_run_takes_values_as_given_and_draws_the_rest():
    def program():
        a = sample("a", Normal(0.0, 1.0))
        b = sample("b", Normal(a, 1.0))
        return sample("y", Normal(a + b, 0.0001), obs=100.0)

    y = run(program, {"a": 3.0, "b": 4.0})
    assert abs(y - 7) < 0.01  # obs= is data that was seen, not what the program would draw
    assert run(program, {"y": 5.0}) == 5
    assert run(program, {}) == run(program, {})
    assert run(program, {}) != run(program, {}, key=jax.random.key(1))


# ---- handlers around a program, or in it


def eight(mask=None):
    """Means of three groups; `mask` is around the data."""
    mu = sample("mu", Normal(0.0, 3.0))
    with numpyro.plate("i", 3):
        theta = sample("theta", Normal(mu, 1.0))
        with handlers.mask(mask=True if mask is None else mask):
            sample("y", Normal(theta, 1.0), obs=jnp.zeros(3))


def graph_of(program, observed=None, **kwargs):
    return cpe.Model(program, observed=observed, kwargs=kwargs).graph


def test_condition_makes_data_as_obs_does():
    graph = graph_of(handlers.condition(eight, data={"theta": jnp.ones(3)}))
    assert graph.data == ("theta", "y")
    drawn = cpe.simulate(handlers.condition(eight, data={"theta": jnp.ones(3)}), 20, key=jax.random.key(0))
    assert len(np.unique(drawn["theta"])) == 60  # simulated anew
    with pytest.raises(ValueError, match=r"'mu' depends on no parameter.*write its value in its place instead of obs="):
        graph_of(handlers.condition(eight, data={"mu": 1.0}))


def test_do_cuts_a_site_off():
    program = handlers.do(eight, data={"mu": 40.0})
    assert graph_of(program).parents == {"mu": (), "theta": (), "y": ("theta",)}
    drawn = cpe.simulate(program, 100, key=jax.random.key(0))
    assert abs(drawn["theta"].mean() - 40) < 1
    assert abs(drawn["mu"].mean()) < 2  # drawn from its prior, and read by nothing


@pytest.mark.parametrize(
    ("config", "site"), [(LocScaleReparam(0), "theta_decentered"), (TransformReparam(), "theta_base")]
)
def test_reparam_makes_the_old_site_deterministic(config, site):
    def program():
        mu = sample("mu", Normal(0.0, 3.0))
        with numpyro.plate("i", 3):
            shift = dist.transforms.AffineTransform(mu, 1.0)
            loc_scale = isinstance(config, LocScaleReparam)
            fn = Normal(mu, 1.0) if loc_scale else dist.TransformedDistribution(Normal(0.0, 1.0), shift)
            theta = sample("theta", fn)
            sample("y", Normal(theta, 1.0), obs=jnp.zeros(3))

    decentred = handlers.reparam(program, config={"theta": config})
    graph = graph_of(decentred)
    assert graph.parameters == ("mu", site)
    assert graph.deterministics["theta"].shape == (3,)
    drawn = cpe.simulate(decentred, 50, key=jax.random.key(0))
    np.testing.assert_allclose(drawn["theta"], drawn["mu"][:, None] + drawn[site], rtol=1e-5, atol=1e-6)


def test_lift_gives_a_param_a_prior():
    def program():
        mu = numpyro.param("mu", 1.0)
        sample("y", Normal(mu, 1.0), obs=0.0)

    graph = graph_of(handlers.lift(program, prior={"mu": Normal(0.0, 1.0)}))
    assert graph.parameters == ("mu",)
    with pytest.raises(ValueError, match=r"'mu' is a numpyro\.param, which has no prior"):
        graph_of(program)


def with_key_of_its_own():
    sample("y", Normal(sample("mu", Normal(0.0, 1.0), rng_key=jax.random.key(0)), 1.0), obs=0.0)


def test_block_may_hide_what_is_not_drawn():
    hidden = handlers.block(eight, hide_fn=lambda msg: msg["type"] == "deterministic")
    assert graph_of(hidden).parameters == ("mu", "theta")

    def program():  # documented: randomness beside the sites belongs to the one that uses it
        noise = jax.random.normal(numpyro.prng_key())
        sample("y", Normal(sample("mu", Normal(0.0, 1.0)) + noise, 1.0), obs=0.0)

    assert graph_of(program).parents == {"mu": (), "y": ("mu",)}


def with_a_factor():
    mu = sample("mu", Normal(0.0, 1.0))
    numpyro.factor("weight", -(mu**2))
    sample("y", Normal(mu, 1.0), obs=0.0)


def with_a_subsample():
    mu = sample("mu", Normal(0.0, 1.0))
    with numpyro.plate("i", 10, subsample_size=5):
        sample("y", Normal(mu, 1.0), obs=jnp.zeros(5))


def half_observed():
    mu = sample("mu", Normal(0.0, 1.0))
    with numpyro.plate("i", 2):
        sample("y", Normal(mu, 1.0), obs=jnp.zeros(2), obs_mask=jnp.array([True, False]))


def masked_at_random():
    mu = sample("mu", Normal(0.0, 1.0))
    with numpyro.plate("i", 2), handlers.mask(mask=jnp.arange(2) < mu):
        sample("y", Normal(mu, 1.0), obs=jnp.zeros(2))


def masked_and_read():
    mu = sample("mu", Normal(0.0, 1.0))
    with numpyro.plate("i", 2):
        with handlers.mask(mask=jnp.array([True, False])):
            y = sample("y", Normal(mu, 1.0), obs=jnp.zeros(2))
        sample("z", Normal(y + mu, 1.0), obs=jnp.zeros(2))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            handlers.substitute(eight, data={"mu": 1.0}),
            "'mu' is given a value by numpyro.handlers.substitute or replay",
        ),
        (handlers.seed(eight, 0), "'mu' has a random key of its own .*every simulation would draw the same value"),
        (with_key_of_its_own, "'mu' has a random key of its own"),
        (handlers.block(eight, hide=["mu"]), r"numpyro\.handlers\.block hides a sample site"),
        (handlers.scale(eight, scale=2.0), r"'mu' is weighted by numpyro\.handlers\.scale"),
        (with_a_factor, r"'weight' is a numpyro\.factor"),
        (with_a_subsample, "Plate 'i' subsamples 5 of 10 members"),
        (half_observed, "'y_unobserved' is masked .*obs_mask"),
        (handlers.mask(eight, mask=False), "Parameter 'mu' is masked .*Mask the data alone"),
        (masked_at_random, "'y' has a mask that depends on mu.*must be a constant"),
        (masked_and_read, "'z' reads data site 'y', some of whose values are masked"),
    ],
)
def test_handlers_that_cannot_be_simulated_are_refused(program, message):
    with pytest.raises(ValueError, match=message):
        graph_of(program)


# ---- masks


def test_a_constant_mask_is_known_and_its_values_are_zero():
    kept = np.array([True, False, True])
    graph = graph_of(lambda: eight(kept))
    assert np.array_equal(graph.sites["y"].kept, kept)
    assert graph.sites["theta"].kept is None
    assert graph_of(eight).sites["y"].kept is None
    drawn = cpe.simulate(lambda: eight(jnp.arange(3) != 1), 50, key=jax.random.key(0))  # computed in the program
    assert (drawn["y"][:, 1] == 0).all()
    assert (drawn["y"][:, [0, 2]] != 0).all()
    assert np.array_equal(graph.without_masked({"y": [1.0, np.nan, 3.0]})["y"], [1.0, 0.0, 3.0])
    assert graph.fingerprint != graph_of(eight).fingerprint
    assert graph_of(eight).differences(graph.to_dict()) == ["site 'y' has mask None, expected [1]"]


def test_masks_of_events_and_of_distributions():
    def program():
        a = sample("a", Normal(0.0, 1.0))
        inner = Normal(a, 1.0).expand([2, 3]).mask(jnp.array([True, False, True])).to_event(1)
        sample("y", inner.mask(jnp.array([True, False])), obs=jnp.zeros((2, 3)))
        with numpyro.plate("i", 2), handlers.mask(mask=jnp.array([False, True])):
            sample("z", Normal(a * jnp.ones(3), 1.0).to_event(1), obs=jnp.zeros((2, 3)))

    graph = graph_of(program)
    assert graph.sites["y"].kept.tolist() == [[True, False, True], [False] * 3]
    assert graph.sites["z"].kept.tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("host", [False, True])
def test_a_masked_simulator_still_gets_its_rows(host):
    def simulator(_, theta):
        assert np.shape(theta) == ()
        return 1e3 + theta

    def program():
        with numpyro.plate("i", 3):
            theta = sample("theta", Normal(0.0, 1.0))
            with handlers.mask(mask=jnp.array([True, False, True])):
                sample("y", cpe.Simulator(simulator, theta, host=host))

    drawn = cpe.simulate(program, 20, key=jax.random.key(0))
    np.testing.assert_allclose(drawn["y"], [1, 0, 1] * (1e3 + drawn["theta"]), rtol=1e-6)
    assert graph_of(program).sites["y"].kept.tolist() == [True, False, True]


def test_members_that_differ_by_a_mask_do_not_share_weights():
    kept = np.array([True, False, True])
    assert "i" in cpe.invert(graph_of(lambda: eight(kept))).graph.unrolled
    assert not cpe.invert(graph_of(lambda: eight(np.zeros(3, bool)))).graph.unrolled  # all alike

    def pooled():
        mu = sample("mu", Normal(0.0, 3.0))
        with numpyro.plate("i", 3), handlers.mask(mask=kept):
            sample("y", Normal(mu, 1.0), obs=jnp.zeros(3))

    assert not cpe.invert(graph_of(pooled)).graph.unrolled  # what is hidden adds a constant
    members = graph_of(pooled).unroll("i").sites
    assert [members[f"y[{i}]"].kept is None for i in range(3)] == [True, False, True]


# ---- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain", "A site is called 'chain', which is the name of an axis of draws"),
        ("draw", "A site is called 'draw'"),
        ("observation", "A site is called 'observation'"),
        ("a/b", r"Site 'a/b' has a '/' in its name.*divider='\.'"),
        ("", "A site has an empty name"),
    ],
)
def test_names_that_draws_cannot_have_are_refused_first(name, message):
    def program():
        sample("y", Normal(sample(name, Normal(0.0, 1.0)), 1.0), obs=0.0)

    with pytest.raises(ValueError, match=message):
        graph_of(program)


def test_two_deterministic_sites_of_one_name():
    def program():
        a = sample("a", Normal(0.0, 1.0))
        numpyro.deterministic("a", a + 1)
        sample("y", Normal(a, 1.0), obs=0.0)

    with pytest.raises(ValueError, match="Two sites are called 'a', one of them deterministic"):
        graph_of(program)
