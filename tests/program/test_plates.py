"""Plates whose members differ: what tells them apart is found, read and verified, and never pooled away."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe
from cpejax.program import site_checks
from cpejax.program.tracing import run

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
SMALL = {"width": 32, "depth": 2, "hidden": 32, "components": 4}
sample, plate, Normal, HalfNormal = numpyro.sample, numpyro.plate, dist.Normal, dist.HalfNormal

X = RNG.normal(size=12)
ROWS = RNG.normal(size=(12, 4))
SQUARE = RNG.normal(size=(4, 4))
GRID = RNG.normal(size=(3, 5))
ERRORS = np.array([0.1, 0.5, 2.0, 10.0])
GROUP = np.repeat(np.arange(4), [2, 5, 3, 2])
OUTER = np.array([0, 0, 1, 1])
LEFT, RIGHT = np.tile(np.arange(4), 3), np.repeat(np.arange(3), 4)
WEIGHTS = RNG.uniform(0.5, 2.0, size=4)


def globals_(*names):
    return [sample(n, Normal(0.0, 1.0)) for n in names]


# ---- 20 programs whose plates stay templates: with which constants and index arrays


def exchangeable():
    (mu,) = globals_("mu")
    with plate("i", 12):
        theta = sample("theta", Normal(mu, 1.0))
        sample("y", Normal(theta, 0.5))


def shared_constant():
    (mu,) = globals_("mu")
    with plate("i", 12):
        sample("y", Normal(jnp.full(12, 2.0) * mu, jnp.ones(12)))


def regression():
    a, b = globals_("a", "b")
    with plate("i", 12):
        sample("y", Normal(a + b * X, 0.3))


def regression_by_product():
    b = sample("b", Normal(0.0, 1.0).expand([4]).to_event(1))
    with plate("i", 12):
        sample("y", dist.Bernoulli(logits=ROWS @ b))


def regression_transposed():
    b = sample("b", Normal(0.0, 1.0).expand([4]).to_event(1))
    with plate("i", 12):
        sample("y", dist.Poisson(jnp.exp(jnp.asarray(ROWS.T).T @ b)))


def as_many_rows_as_columns():
    b = sample("b", Normal(0.0, 1.0).expand([4]).to_event(1))
    with plate("i", 4):
        sample("y", Normal(jnp.asarray(SQUARE) @ b, 1.0))


def in_a_jitted_function():
    a, b = globals_("a", "b")

    @jax.jit
    def line(a, b):
        return a + b * jnp.linspace(0.0, 1.0, 12)

    with plate("i", 12):
        sample("y", Normal(line(a, b), 0.3))


def counted_by_arange():
    (a,) = globals_("a")
    with plate("t", 12):
        sample("y", Normal(a * jnp.exp(-0.1 * jnp.arange(12)), 0.3))


def errors():
    (mu,) = globals_("mu")
    with plate("j", 4):
        theta = sample("theta", Normal(mu, 1.0))
        sample("y", Normal(theta, ERRORS))


def prior_of_a_member():
    (b,) = globals_("b")
    with plate("i", 12):
        theta = sample("theta", Normal(b * X, 1.0))
        sample("y", Normal(theta, 0.5))


def simulator_with_an_argument():
    (a,) = globals_("a")
    with plate("i", 12):
        sample("y", cpe.Simulator(lambda key, a, x: a * x + jax.random.normal(key), a, X))


def vector_rows():
    b = sample("b", Normal(0.0, 1.0).expand([4]).to_event(1))
    with plate("i", 12):
        sample("y", Normal(b * ROWS, 1.0).to_event(1))


def multivariate():
    (a,) = globals_("a")
    with plate("i", 12):
        sample("y", dist.MultivariateNormal(a * ROWS[:, :2], jnp.eye(2)))


def two_plates():
    (a,) = globals_("a")
    with plate("s", 3, dim=-2), plate("t", 5, dim=-1):
        sample("y", Normal(a * GRID + jnp.linspace(0.0, 1.0, 5), 1.0))


def categories_of_a_vector():
    w = sample("w", Normal(0.0, 1.0).expand([4]).to_event(1))
    with plate("i", 12):
        sample("y", Normal(w[LEFT], 1.0))


def groups():
    (mu,) = globals_("mu")
    with plate("g", 4):
        theta = sample("theta", Normal(mu, 1.0))
    with plate("i", 12):
        sample("y", Normal(theta[GROUP], 0.5))


def groups_with_constants():
    (mu,) = globals_("mu")
    with plate("g", 4):
        theta = sample("theta", Normal(mu, WEIGHTS))
    with plate("i", 12):
        sample("y", Normal((theta * ERRORS)[GROUP] + X, 0.5))


def three_levels():
    (mu,) = globals_("mu")
    with plate("d", 2):
        outer = sample("outer", Normal(mu, 1.0))
    with plate("g", 4):
        theta = sample("theta", Normal(outer[OUTER], 1.0))
    with plate("i", 12):
        sample("y", Normal(theta[GROUP], 0.5))


def three_levels_by_sums():
    (mu,) = globals_("mu")
    with plate("d", 2):
        outer = sample("outer", Normal(mu, 1.0))
    with plate("g", 4):
        theta = sample("theta", Normal(0.0, 1.0))
    with plate("i", 12):
        sample("y", Normal(theta[GROUP] + outer[OUTER[GROUP]], 0.5))


def subjects_in_groups_over_time():
    (mu,) = globals_("mu")
    with plate("g", 2):
        theta = sample("theta", Normal(mu, 1.0))
    with plate("s", 4, dim=-2), plate("t", 5, dim=-1):
        sample("y", Normal(theta[OUTER][:, None] * jnp.linspace(0.0, 1.0, 5), 0.5))


PASS = [
    (exchangeable, {}, []),
    (shared_constant, {}, []),
    (regression, {"X": ("i",)}, []),
    (regression_by_product, {"ROWS": ("i",)}, []),
    (regression_transposed, {"ROWS": ("i",)}, []),
    (as_many_rows_as_columns, {"SQUARE": ("i",)}, []),
    (in_a_jitted_function, {"y.1": ("i",)}, []),
    (counted_by_arange, {"y.1": ("t",)}, []),
    (errors, {"ERRORS": ("j",)}, []),
    (prior_of_a_member, {"X": ("i",)}, []),
    (simulator_with_an_argument, {"X": ("i",)}, []),
    (vector_rows, {"ROWS": ("i",)}, []),
    (multivariate, {"y.1": ("i",)}, []),
    (two_plates, {"GRID": ("s", "t"), "y.1": ("t",)}, []),
    (categories_of_a_vector, {"LEFT": ("i",)}, []),
    (groups, {}, [("i", "g")]),
    (groups_with_constants, {"WEIGHTS": ("g",), "ERRORS": ("g",), "X": ("i",)}, [("i", "g")]),
    (three_levels, {}, [("g", "d"), ("i", "g")]),
    (three_levels_by_sums, {}, [("i", "d"), ("i", "g")]),
    (subjects_in_groups_over_time, {"y.1": ("t",)}, [("s", "g")]),
]


def graph_of(program):
    return cpe.Model(program, observed=["y"]).graph


@pytest.mark.parametrize(("program", "constants", "links"), PASS, ids=[p.__name__ for p, _, _ in PASS])
def test_what_tells_members_apart_is_found_and_plates_stay_templates(program, constants, links):
    graph = graph_of(program)
    assert {n: c.plates for n, c in graph.constants.items()} == constants
    assert [(*link.source, link.target) for link in graph.links] == links
    assert graph.unlike == {}
    assert cpe.invert(graph).graph.unrolled == {}


# ---- 20 programs whose plates cannot be templates


def first_is_another():
    a, b = globals_("a", "b")
    with plate("i", 12):
        sample("y", Normal(jnp.concatenate([a[None], jnp.repeat(b, 11)]), 1.0))


def one_is_set():
    a, b = globals_("a", "b")
    with plate("i", 12):
        sample("y", Normal(jnp.zeros(12).at[3].set(a) + b, 1.0))


def vector_without_plate():
    w = sample("w", Normal(0.0, 1.0).expand([12]).to_event(1))
    with plate("i", 12):
        sample("y", Normal(w, 1.0))


def vector_reversed():
    w = sample("w", Normal(0.0, 1.0).expand([12]).to_event(1))
    with plate("i", 12):
        sample("y", Normal(w[::-1], 1.0))


def cumulative():
    w = sample("w", Normal(0.0, 1.0).expand([12]).to_event(1))
    with plate("i", 12):
        sample("y", Normal(jnp.cumsum(w), 1.0))


def stacked():
    a, b, c = globals_("a", "b", "c")
    with plate("i", 3):
        sample("y", Normal(jnp.stack([a, b, c]), 1.0))


def matrix_without_plate():
    w = sample("w", Normal(0.0, 1.0).expand([12, 2]).to_event(2))
    with plate("i", 12):
        sample("y", Normal(w.sum(1), 1.0))


def same_size_other_plate():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("h", 4):
        sample("y", Normal(a, 1.0))


def same_size_reversed():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("h", 4):
        sample("y", Normal(a[::-1], 1.0))


def repeated():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("i", 12):
        sample("y", Normal(jnp.repeat(a, 3), 1.0))


def design_of_zeros_and_ones():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("i", 12):
        sample("y", Normal(jnp.eye(4)[GROUP] @ a, 1.0))


def crossed_by_index():
    with plate("l", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("r", 3):
        b = sample("b", Normal(0.0, 1.0))
    with plate("i", 12):
        sample("y", Normal(a[LEFT] + b[RIGHT], 1.0))


def pairs():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("i", 12):
        sample("y", dist.Bernoulli(logits=a[LEFT] - a[(LEFT + 1 + RIGHT) % 4]))


def neighbours():
    with plate("i", 12):
        a = sample("a", Normal(0.0, 1.0))
        sample("y", Normal(a + jnp.roll(a, 1), 1.0))


def group_and_mean_of_groups():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
        b = sample("b", Normal(0.0, 1.0))
    with plate("i", 12):
        sample("y", Normal(a[GROUP] + b.mean(), 1.0))


def sums_of_groups():
    with plate("i", 12):
        a = sample("a", Normal(0.0, 1.0))
    with plate("g", 4):
        sample("y", Normal(jax.ops.segment_sum(a, GROUP, 4), 1.0))


def two_ways_into_one_plate():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("i", 12):
        b = sample("b", Normal(a[GROUP], 1.0))
        sample("y", Normal(b + a[LEFT], 1.0))


def index_of_two_plates():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("s", 3, dim=-2), plate("t", 4, dim=-1):
        sample("y", Normal(a[LEFT.reshape(3, 4)[:, ::-1] - RIGHT.reshape(3, 4)], 1.0))


def weighted_total():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    sample("y", Normal(WEIGHTS @ a, 1.0))


def member_zero():
    with plate("g", 4):
        a = sample("a", Normal(0.0, 1.0))
    with plate("i", 12):
        sample("y", Normal(a[0] * X, 1.0))


CAUGHT = [
    (first_is_another, {"i"}),
    (one_is_set, {"i"}),
    (vector_without_plate, {"i"}),
    (vector_reversed, {"i"}),
    (cumulative, {"i"}),
    (stacked, {"i"}),
    (matrix_without_plate, {"i"}),
    (same_size_other_plate, {"g", "h"}),
    (same_size_reversed, {"g", "h"}),
    (repeated, {"g", "i"}),
    (design_of_zeros_and_ones, {"g"}),
    (crossed_by_index, {"r"}),
    (pairs, {"g"}),
    (neighbours, {"i"}),
    (group_and_mean_of_groups, {"g"}),
    (sums_of_groups, {"g", "i"}),
    (two_ways_into_one_plate, {"g"}),
    (index_of_two_plates, {"g"}),
    (weighted_total, {"g"}),
    (member_zero, {"g"}),
]


@pytest.mark.parametrize(("program", "unrolled"), CAUGHT, ids=[p.__name__ for p, _ in CAUGHT])
def test_what_cannot_be_a_template_is_unrolled(program, unrolled):
    graph = graph_of(program)
    post = cpe.invert(graph)
    assert set(post.graph.unrolled) == unrolled
    assert all(post.graph.unrolled.values())  # says why


def closes_over_rows(key, a):
    return a * X + jax.random.normal(key, (len(a),))


def knows_the_position(rng, a):
    return a + np.arange(len(a)) + rng.normal(size=len(a))


def one_row_like_another(key, a):
    return a * jnp.exp(0.1 * jax.random.normal(key, (len(a),)))


def likewise_on_the_host(rng, a):
    return a * np.exp(0.1 * rng.standard_t(2.5, size=len(a)))


@pytest.mark.parametrize(
    ("fn", "host", "caught"),
    [
        (closes_over_rows, False, True),
        (knows_the_position, True, True),
        (one_row_like_another, False, False),
        (likewise_on_the_host, True, False),
    ],
)
def test_simulators_that_tell_rows_apart_by_more_than_their_arguments_are_caught(fn, host, caught):
    def program():
        (mu,) = globals_("mu")
        with plate("i", 12):
            a = sample("a", Normal(mu, 1.0))
            sample("y", cpe.Simulator(fn, a, vectorized=True, host=host))

    unrolled = cpe.invert(graph_of(program)).graph.unrolled
    assert set(unrolled) == ({"i"} if caught else set())
    assert all("pass it what it knows of each row as an argument" in why for why in unrolled.values())


def test_large_plates_that_differ_otherwise_are_an_error_before_anything_is_simulated(monkeypatch):
    monkeypatch.setattr(site_checks, "MOST_UNLIKE", 5)
    with pytest.raises(ValueError, match=r"Plate 'i' has 12 members that are not exchangeable.*site 'y'.*array"):
        cpe.simulate(cpe.Model(first_is_another, observed=["y"]), 10, key=KEY)


# ---- posterior programs: nothing is said to be independent that is not


@pytest.mark.parametrize(
    "program",
    [
        groups,
        three_levels,
        three_levels_by_sums,
        subjects_in_groups_over_time,
        crossed_by_index,
        pairs,
        same_size_reversed,
        sums_of_groups,
        two_ways_into_one_plate,
        group_and_mean_of_groups,
    ],
)
def test_inverses_with_index_arrays_are_faithful(program):
    graph = graph_of(program)
    ground, parents = graph.ground(), cpe.invert(graph).ground()
    dag, before = ground.to_networkx(), set(ground.data)
    assert set(parents) == set(ground.parameters)
    for name, reads in parents.items():
        rest = before - set(reads)
        assert set(reads) <= before
        assert not rest or nx.is_d_separator(dag, {name}, rest, set(reads))
        before.add(name)


def test_members_read_the_groups_that_their_index_names():
    ground = graph_of(three_levels).ground()
    assert ground.parents["y[2]"] == ("theta[1]",)
    assert ground.parents["theta[2]"] == ("outer[1]",)
    assert cpe.invert(graph_of(three_levels)).ground()["theta[3]"] == ("outer[1]", "y[10]", "y[11]")
    assert graph_of(pairs).ground().parents["y[1]"] == ("a[1]", "a[2]")


# ---- what is said of them


def test_constants_and_index_arrays_are_shown():
    text = str(graph_of(groups_with_constants))
    assert "constant X    (plate i[12])" in text
    assert "index    i[12] → g[4]" in text


def test_a_deterministic_site_or_an_argument_names_a_constant():
    def program(x):
        a, b = globals_("a", "b")
        numpyro.deterministic("age", jnp.asarray(ROWS[:, 0]))
        with plate("i", 12):
            sample("y", Normal(a * ROWS[:, 0] + b * x, 0.3))

    assert set(cpe.Model(program, observed=["y"], args=(ROWS[:, 1],)).graph.constants) == {"age", "x"}


def test_other_constants_are_another_program():
    def program(x, group):
        with plate("g", 4):
            a = sample("a", Normal(0.0, 1.0))
        with plate("i", 12):
            sample("y", Normal(a[group] * x, 0.3))

    one, same, other, moved = (
        cpe.Model(
            program,
            observed=["y"],
            args=(
                x,
                group,
            ),
        ).graph
        for x, group in ((X, GROUP), (X + 1e-9, GROUP), (X + 0.1, GROUP), (X, GROUP[::-1]))
    )
    assert one.fingerprint == same.fingerprint
    assert one.differences(other.to_dict()) == ["constant 'x' (plate i) has other values"]
    assert "index arrays" in one.differences(moved.to_dict())[0]


# ---- what the flow reads


def built(program, n=20):
    graph = graph_of(program)
    simulations = cpe.simulate(cpe.Model(program, observed=["y"]), n, key=KEY)
    return cpe.CPE(**SMALL).build(program, graph, simulations, key=KEY), simulations


def context(flow, name, values):
    """What the mixture's means of a site are made of, from values `{site: (n, ...)}`: `(n, *plates)`."""
    number = next(g for g, group in enumerate(flow.plan.groups) if any(site == name for site, _ in group.nodes))
    node = next(i for i, (site, _) in enumerate(flow.plan.groups[number].nodes) if site == name)
    net = flow.groups[number]
    tables = flow.prepare(values)["tables"]
    hidden = flow._context(number, net, tables).hidden
    return hidden.sum(-1)[node]


@pytest.mark.parametrize(("program", "name"), [(regression, "a"), (errors, "theta"), (prior_of_a_member, "theta")])
def test_members_that_change_places_without_their_constants_change_the_context(program, name):
    flow, simulations = built(program)
    values = {n: jnp.asarray(simulations[n]) for n in simulations}
    reversed_members = {**values, "y": values["y"][:, ::-1]}
    if "theta" in reversed_members:
        reversed_members["theta"] = reversed_members["theta"][:, ::-1]
    before, after = context(flow, name, values), context(flow, name, reversed_members)
    if name == "theta":
        after = after[:, ::-1]
    assert not np.allclose(before, after, rtol=1e-3)


def test_a_group_reads_the_members_that_point_to_it_and_no_others():
    flow, simulations = built(groups)
    values = {n: jnp.asarray(simulations[n][:1]) for n in simulations}
    jacobian = jax.jacobian(lambda y: context(flow, "theta", {**values, "y": y})[0])(values["y"])[:, 0]
    assert ((jacobian != 0) == (np.arange(4)[:, None] == GROUP)).all()


def test_unrolled_effects_may_have_different_features():
    """Of two effects one may have heavy tails in the simulations, and the other not."""
    graph = graph_of(crossed_by_index)
    values = {n: RNG.normal(size=(500, *s.shape)).astype(np.float32) for n, s in graph.sites.items()}
    values["b"][7, 1] = 1e3
    flow = cpe.CPE(**SMALL).build(crossed_by_index, graph, values, key=KEY)
    assert len({flow.standard[f"b[{i}]"].size for i in range(3)}) == 2


def test_the_order_of_members_in_a_group_does_not_matter():
    flow, simulations = built(groups)
    values = {n: jnp.asarray(simulations[n]) for n in simulations}
    order = np.array([1, 0, 6, 5, 4, 3, 2, 9, 8, 7, 11, 10])  # within groups
    other = {**values, "y": values["y"][:, order]}
    for name in ("mu", "theta"):
        assert np.allclose(context(flow, name, values), context(flow, name, other), atol=1e-4)


def test_unrolled_effects_read_which_member_points_to_them():
    flow, simulations = built(crossed_by_index)
    values = {n: jnp.asarray(simulations[n]) for n in simulations}
    other = {**values, "y": values["y"][:, np.argsort(LEFT, kind="stable")]}
    for name in ("b[0]", "b[2]", "a"):
        assert not np.allclose(context(flow, name, values), context(flow, name, other), rtol=1e-3)


@pytest.mark.parametrize(
    "program",
    [groups_with_constants, three_levels, two_plates, subjects_in_groups_over_time, pairs, index_of_two_plates],
)
def test_flows_of_such_programs_draw_and_have_a_density(program):
    """By shapes alone: what is drawn is right elsewhere."""
    graph = graph_of(program)
    values = {n: np.full((20, *s.shape), 0.5, np.float32) for n, s in graph.sites.items()}
    flow = cpe.CPE(**SMALL).build(program, graph, values, key=KEY)

    def all_of_it(values):
        data = {"y": values["y"][0]}
        draws, _ = flow.sample(data, 3, KEY, steps=2, solver="euler")
        return draws, flow.log_prob(draws, data, steps=2), flow.loss(flow.prepare(values), KEY)

    draws, log_prob, loss = jax.eval_shape(all_of_it, {n: jnp.asarray(x) for n, x in values.items()})
    assert {n: x.shape for n, x in draws.items()} == {n: (3, *graph.sites[n].shape) for n in graph.parameters}
    assert log_prob.shape == (3,)
    assert loss.shape == ()


def test_randomness_outside_sites_is_no_constant():
    def program():
        (a,) = globals_("a")
        with plate("i", 12):
            sample("y", Normal(a + X + jax.random.normal(numpyro.prng_key(), (12,)), 1.0))

    graph = graph_of(program)
    assert set(graph.constants) == {"X"}
    assert graph.unlike == {}


class Hidden(dist.Distribution):
    """A distribution that hides its location from JAX, and has no density."""

    support = dist.constraints.real

    def __init__(self, hidden):
        self.hidden = hidden
        super().__init__(batch_shape=jnp.shape(hidden), event_shape=())

    def sample(self, key, sample_shape=()):
        return self.hidden + jax.random.normal(key, sample_shape + self.batch_shape)


def test_distributions_that_hide_their_arrays_can_be_read():
    def program():
        (a,) = globals_("a")
        with plate("i", 12):
            sample("y", Hidden(a + jnp.zeros(12)))

    assert graph_of(program).constants == {}


def test_a_posterior_is_loaded_with_its_own_constants_only(tmp_path, no_training):
    def program(x, group):
        with plate("g", 4):
            a = sample("a", Normal(0.0, 1.0))
        with plate("i", 12):
            sample("y", Normal(a[group] * x, 0.3))

    arguments, other = (X, GROUP), (X + 0.1, GROUP)
    simulations = cpe.simulate(cpe.Model(program, observed=["y"], args=(*arguments,)), 200, key=KEY)
    posterior = cpe.fit(
        cpe.Model(program, args=(*arguments,)), simulations, method=cpe.CPE(**SMALL), key=KEY, progress=False
    )
    posterior.save(tmp_path / "run")
    loaded = cpe.load(tmp_path / "run", cpe.Model(program, args=(*arguments,)))
    draws = [p.sample(5, given={"y": simulations["y"][0]}, key=KEY).posterior["a"].values for p in (posterior, loaded)]
    assert np.array_equal(*draws)
    with pytest.raises(ValueError, match=r"constant 'x' \(plate i\) has other values"):
        cpe.load(tmp_path / "run", cpe.Model(program, args=(*other,)))


# ---- posteriors known in closed form: all are linear in normal variables


def linear_normal(program, noise):
    """The map from data to the mean of all parameters, and their covariance, from the program itself.

    In coordinates `z` in which the prior is N(0, I), parameters and the data's location are linear: `T z` and `D z`.
    """
    graph = graph_of(program)
    shapes = {n: graph.sites[n].shape for n in graph.parameters}
    ends = np.cumsum([int(np.prod(s)) for s in shapes.values()])

    def forward(z):
        parts = dict(zip(shapes, jnp.split(z, ends[:-1]), strict=True))
        values = {n: jnp.zeros(s) for n, s in shapes.items()}

        def visit(name, msg):
            fn = msg["fn"]
            found[name] = fn.mean
            if name in parts:
                found[name] = fn.mean + jnp.sqrt(fn.variance) * parts[name].reshape(shapes[name])

        for _ in (*shapes, "y"):  # with each pass one more site has its parents' values
            found = {}
            run(program, values, visit)
            values = {n: jnp.broadcast_to(found[n], s) for n, s in shapes.items()}
        return jnp.concatenate([values[n].ravel() for n in shapes]), found["y"].ravel()

    to_theta, to_data = (np.asarray(j) for j in jax.jacobian(forward)(jnp.zeros(ends[-1])))
    precision = 1 / np.broadcast_to(noise, len(to_data)) ** 2
    covariance = np.linalg.inv(np.eye(ends[-1]) + (to_data.T * precision) @ to_data)
    return to_theta @ covariance @ (to_data.T * precision), to_theta @ covariance @ to_theta.T


KNOWN = [
    (regression, 0.3),
    (errors, ERRORS),
    (groups, 0.5),
    (three_levels, 0.5),
    (crossed_by_index, 1.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "noise"), KNOWN)
def test_posteriors_are_those_in_closed_form(program, noise):
    simulations = cpe.simulate(cpe.Model(program, observed=["y"]), 8000, key=KEY)
    posterior = cpe.fit(
        program,
        simulations,
        method=cpe.CPE(**SMALL),
        key=jax.random.key(1),
        progress=False,
        training=cpe.Training(steps=6000),
    )
    to_mean, covariance = linear_normal(program, noise)
    sd = np.sqrt(np.diag(covariance))
    for y in cpe.simulate(cpe.Model(program, observed=["y"]), 3, key=jax.random.key(7))["y"]:
        tree = posterior.sample(5000, given={"y": y}, key=KEY)
        names = posterior.graph.parameters
        draws = np.concatenate([tree.posterior[n].values[0].reshape(5000, -1) for n in names], axis=1)
        assert np.abs((draws.mean(0) - to_mean @ y.ravel()) / sd).max() < 0.25
        assert np.allclose(draws.std(0) / sd, 1, atol=0.2)
