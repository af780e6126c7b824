"""What every flow of the library must do, whatever its method: one conformance test for all of them.

Networks have random weights, made larger than at the start of training, so that the map is far from the identity: what
holds for these holds for any.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import cpejax as cpe
from cpejax.flows.base import trainable
from cpejax.flows.ode import rk45

KEY = jax.random.key(0)
DRAWS = 10_000


def pair():
    """One parameter on the line and one in an interval."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Uniform(-1.0, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 0.5))


def branches():
    """A chain of three of which the end is seen, and one parameter beside it with data of its own."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(a, 1.0))
    c = numpyro.sample("c", dist.Normal(b, 1.0))
    d = numpyro.sample("d", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(c, 0.5))
    numpyro.sample("z", dist.Normal(d, 0.5))


GIVEN = {pair: {"y": 0.7}, branches: {"y": 0.7, "z": -0.4}}


@functools.cache
def simulations_of(program):
    return cpe.simulate(cpe.Model(program, observed=list(GIVEN[program])), 400, key=KEY)


def data_of(program):
    return {name: jnp.asarray(x, jnp.float32) for name, x in GIVEN[program].items()}


# ---- the flows, and how each is taken apart


def ancestral_field(flow, data, vector):
    """Each node's field at a time of its own coordinate, which the mixture has straightened."""
    full = unflatten(flow, vector) | data
    z, tables = flow._known({name: x[None] for name, x in full.items()})
    tables |= flow._observed(data)
    found = {}
    for number, (group, net) in enumerate(zip(flow.plan.groups, flow.groups, strict=True)):
        context = flow._context(number, net, tables)
        w = context.mixture.straighten(flow._linear(net, flow._coordinates_of(group, z)))
        v = net.field(net.field.time(jnp.array([0.4]))[:, :1], w, context.hidden)
        found |= {name: w[i, 0] + v[i, 0] for i, (name, _) in enumerate(group.nodes)}
    return jnp.stack([found[name] for name in flow.coordinates.graph.parameters])


def ancestral_back(flow, data, values, key):
    """The noise of draws, in the density's direction; there is nothing to compare it with but its distribution."""
    full = values | {name: jnp.broadcast_to(x, (DRAWS, *x.shape)) for name, x in data.items()}
    z, tables = flow._known(full)
    tables |= flow._observed(data)
    grid = jnp.linspace(0.0, 1.0, 41)
    out = []
    for number, (group, net) in enumerate(zip(flow.plan.groups, flow.groups, strict=True)):
        context = flow._context(number, net, tables)
        times = net.field.time(grid)

        def rate(i, y, net=net, times=times, context=context):
            return jnp.pi / 2 * net.field(times[:, i][:, None], y, context.hidden)

        w = context.mixture.straighten(flow._linear(net, flow._coordinates_of(group, z)))
        for i in range(40, 0, -1):  # Heun's method
            v = rate(i, w)
            w = w - (v + rate(i - 1, w - v / 40)) / 80
        out.append(w)
    return jnp.concatenate(out).T, None


def unflatten(flow, vector):
    return dict(zip(flow.coordinates.graph.parameters, vector, strict=True))


def triangular_field(flow, data, vector):
    condition = flow.part.condition
    of_data, of_time = condition.of_data(flow.of_observation(data)), condition.of_time(jnp.array([0.4]))
    return flow.net(vector[None], flow._conditions(of_data, of_time))[0]


def triangular_back(flow, data, values, key):
    u = flow.base.to_vectors(values | with_data(data))
    return flow.to_base(u, data, steps=None)[0], flow.base.draw(DRAWS, data, key=key)


def discrete_map(flow, data, vector):
    return flow.to_base(vector[None], flow.of_observation(data))[0][0]


def discrete_back(flow, data, values, key):
    u = flow.base.to_vectors(values | with_data(data))
    return flow.to_base(u, flow.of_observation(data))[0], flow.base.draw(DRAWS, data, key=key)


def joint_field(flow, data, vector):
    return flow.field(flow._of_observation(data))(jnp.asarray(0.4), vector[None])[0]


def joint_back(flow, data, values, key):
    u = flow.base.to_vectors(values | with_data(data))
    back = rk45(flow.field(flow._of_observation(data)), u, 1.0, 0.0)
    return back, jax.random.normal(key, u.shape)


def aio_field(flow, data, vector):
    return flow.diffusion.flow(flow._predict(data))(jnp.asarray(0.4), vector[None])[0]


def aio_back(flow, data, values, key):
    u = flow.vectors.to_vectors(values | with_data(data))
    back = rk45(flow.diffusion.flow(flow._predict(data)), u, 1.0, 0.0)
    return back, jax.random.normal(jax.random.split(key)[0], u.shape)


def with_data(data):
    return {name: jnp.broadcast_to(x, (DRAWS, *x.shape)) for name, x in data.items()}


@dataclass(frozen=True)
class Case:
    """A method, and how its flow is taken apart.

    - `field(flow, data, vector)`: what moves the parameters, or the map, at one vector of them.
    - `back(flow, data, values, key)`: the base values of draws, in the density's direction, and those that `sample`
        began with, where it is known how the key makes them.
    - `steps`: through how many edges of the posterior program the field reads; `None`: it has no mask.
    - `scale`: of the random change of weights; `gamma`: the share of the identity in a map or field, before the
        sigmoid. At the start it is one half, and untrained draws go beyond what such coordinates can hold.
    """

    method: Any
    field: Callable
    back: Callable
    steps: int | None
    how: str = "faithful"
    scale: float = 0.1
    gamma: float | None = None


SMALL = {"hidden": 16, "width": 16}
TRIANGULAR, DISCRETE = (triangular_field, triangular_back), (discrete_map, discrete_back)
JOINT = (joint_field, joint_back)


def triangular(steps=4, how="faithful", gamma=None, **options):
    return Case(cpe.TriangularCPE(inverse=how, **SMALL, **options), *TRIANGULAR, steps, how, gamma=gamma)


def discrete(steps=4, how="faithful", **options):
    return Case(cpe.DiscreteCPE(inverse=how, **SMALL, **options), *DISCRETE, steps, how, scale=0.3, gamma=2.0)


CASES = {
    # With larger random weights its draws crowd at the ends of the interval, where the cells are too wide.
    "ancestral": Case(cpe.CPE(**SMALL, depth=2, components=3), ancestral_field, ancestral_back, 1, scale=0.05),
    "triangular": triangular(),
    "discrete": discrete(),
    "FMPE": Case(cpe.FMPE(width=16, hidden=32), *JOINT, None),
    "PSE": Case(cpe.PSE(width=16, hidden=32), *JOINT, None, scale=0.02),
    "AIO": Case(cpe.AIO(value=8, name=8), aio_field, aio_back, 1, scale=0.02),
}
VARIANTS = {
    "triangular-reverse": triangular(how="reverse"),
    "triangular-parents": triangular(1, reads="parents"),
    "triangular-edges": triangular(storage="edges"),
    "triangular-every": triangular(condition="every", coordinates="prior", gamma=-3.0),
    "triangular-rank": triangular(rank=2, coordinates="unconstrained", gamma=-3.0),
    "discrete-reverse": discrete(how="reverse", coordinates="unconstrained"),
    "discrete-parents": discrete(2, reads="parents", blocks=2),
    "discrete-edges": discrete(storage="edges", condition="every"),
    "discrete-rank": discrete(rank=1, coordinates="unconstrained"),
}


def exactly(name):
    """The options by which a flow draws from its own density."""
    return {} if name.startswith("discrete") else {"solver": "rk45"}


def cases(*quick):
    """All flows; those that are not `quick` have tests of the same kind elsewhere, or differ in an option only."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in CASES | VARIANTS]


@functools.cache
def posterior_of(name, program):
    """With random weights."""
    case = (CASES | VARIANTS)[name]
    simulations = simulations_of(program)
    flow = case.method.build(program, simulations.graph, simulations, key=KEY)
    weights, rest = trainable(flow)
    leaves, structure = jax.tree.flatten(weights)
    rng = np.random.default_rng(1)
    leaves = [w + jnp.asarray(case.scale * rng.normal(size=w.shape), w.dtype) for w in leaves]
    flow = eqx.combine(jax.tree.unflatten(structure, leaves), rest)
    if case.gamma is not None:
        parts = lambda f: f.parts if hasattr(f, "parts") else [f.part]  # noqa: E731
        shares = [jnp.asarray(case.gamma)] * len(parts(flow))
        flow = eqx.tree_at(lambda f: [part.net.gamma for part in parts(f)], flow, shares)
    return cpe.Posterior(flow, simulations.model, case.method, cpe.Training(), cpe.History(), 400)


# ---- what all of them do


@pytest.mark.parametrize("name", cases("triangular", "discrete"))
def test_the_jacobian_is_zero_where_the_posterior_program_says(name):
    case, posterior = (CASES | VARIANTS)[name], posterior_of(name, branches)
    names = posterior.graph.parameters
    data = data_of(branches)
    vectors = jax.random.normal(KEY, (5, len(names)))
    jacobian = jax.jit(jax.vmap(jax.jacobian(lambda v: case.field(posterior.flow, data, v))))(vectors)
    parents = cpe.invert(posterior.graph, how=case.how).ground()
    graph = nx.DiGraph([(m, p) for m in names for p in parents[m] if p in names])
    graph.add_nodes_from(names)
    if case.method == CASES["discrete"].method or getattr(case.method, "coordinates", None) == "prior":
        # In prior coordinates a parameter is known only together with its prior parents.
        graph.add_edges_from(("c", "a") for _ in names)
    near = {m: nx.single_source_shortest_path_length(graph, m, case.steps or len(names)) for m in names}
    allowed = np.array([[case.steps is None or other in near[m] for other in names] for m in names])
    assert case.steps is None or not allowed.all()
    assert np.array_equal(np.abs(jacobian).max(0) != 0, allowed)


CELLS = 8


def cells(draws, low, high):
    """Cells of about equal mass: inner edges, and points for the midpoint rule: where, how wide, in which cell."""
    inner = np.quantile(draws, np.arange(1, CELLS) / CELLS)
    reach = 3 * (inner[-1] - inner[0])
    edges = [max(low, inner[0] - reach), *inner, min(high, inner[-1] + reach)]
    points = [30, *[4] * (CELLS - 2), 30]  # the outer ones are wide
    ends = [np.linspace(edges[i], edges[i + 1], n + 1) for i, n in enumerate(points)]
    middles = np.concatenate([(x[1:] + x[:-1]) / 2 for x in ends])
    return inner, middles, np.concatenate([np.diff(x) for x in ends]), np.repeat(np.arange(CELLS), points)


def check_counts(counts, chances):
    """Pearson's test; cells with few draws are put together."""
    often = chances * DRAWS > 5
    found, expected = (np.append(x[often], x[~often].sum()) for x in (counts, chances * DRAWS))
    found, expected = found[expected > 1], expected[expected > 1]
    assert np.sum((found - expected) ** 2 / expected) < stats.chi2(len(found) - 1).ppf(1 - 1e-4)


@functools.cache
def drawn(name):
    """Draws, their acceptance rate, and the density over a grid whose cells the draws are counted in."""
    posterior, given = posterior_of(name, pair), GIVEN[pair]
    tree = posterior.sample(DRAWS, given=given, key=KEY, **exactly(name))
    draws = {site: tree.posterior[site].values[0] for site in "ab"}
    axes = [cells(draws["a"], -np.inf, np.inf), cells(draws["b"], -1.0, 1.0)]
    a, b = (axis[1] for axis in axes)
    grid = {"a": np.repeat(a, len(b)), "b": np.tile(b, len(a))}
    return draws, tree.posterior.attrs, axes, grid, posterior.log_prob(grid, given=given)


@pytest.mark.parametrize("name", cases("ancestral", "triangular", "discrete"))
def test_the_density_is_that_of_the_draws(name):
    """Histograms of one and of two parameters against the integral of `log_prob` over each cell."""
    draws, attributes, ((inner_a, _, wide_a, cell_a), (inner_b, _, wide_b, cell_b)), _, log_density = drawn(name)
    rate = attributes["acceptance_rate"]
    mass = np.exp(log_density).reshape(len(wide_a), len(wide_b)) * wide_a[:, None] * wide_b
    assert abs(mass.sum() - rate) < 4 * np.sqrt(rate * (1 - rate) / DRAWS) + 0.01
    chances, counts = np.zeros((2, CELLS, CELLS))
    np.add.at(chances, (cell_a[:, None], cell_b), mass / mass.sum())
    np.add.at(counts, (np.digitize(draws["a"], inner_a), np.digitize(draws["b"], inner_b)), 1)
    check_counts(counts.ravel(), chances.ravel())
    check_counts(counts.sum(1), chances.sum(1))
    check_counts(counts.sum(0), chances.sum(0))


@pytest.mark.parametrize("name", cases("triangular", "discrete"))
def test_sampling_inverts_the_density(name):
    """Draws, taken back in the density's direction, are the base draws that they were made of."""
    case, posterior = (CASES | VARIANTS)[name], posterior_of(name, pair)
    data, key = data_of(pair), jax.random.split(KEY, 1)[0]

    @eqx.filter_jit
    def there_and_back(flow):
        values, counts = flow.sample(data, DRAWS, key, **exactly(name))
        return values, counts, *case.back(flow, data, values, key)

    values, counts, found, base = there_and_back(posterior.flow)  # not the engine's draws, which are made in shares
    assert posterior.flow.may_leave_support or counts.get("clipped", 0) == 0
    if base is not None:
        assert np.quantile(np.abs(found - base), 0.999) < 0.02
        assert np.abs(np.stack([values["a"], values["b"]], 1) - base).mean() > 0.1  # the map is not the identity
    else:
        for column in np.asarray(found).T:
            assert stats.kstest(column, "norm").pvalue > 1e-4
        assert abs(np.corrcoef(found.T)[0, 1]) < 4 / np.sqrt(DRAWS)
    if "residual" in drawn(name)[1]:
        assert drawn(name)[1]["residual"] <= 1e-5
        assert drawn(name)[1]["unsolved"] == 0


@pytest.mark.parametrize("name", cases("triangular", "discrete"))
def test_keys_and_files_decide_the_draws(name, tmp_path):
    posterior, given = posterior_of(name, pair), GIVEN[pair]
    posterior.save(tmp_path)
    loaded = cpe.load(tmp_path, pair)
    assert loaded.method == posterior.method

    def draws(p, seed):
        tree = p.sample(DRAWS, given=given, key=jax.random.key(seed), **exactly(name))
        return {site: tree.posterior[site].values[0] for site in "ab"}

    first, _, _, grid, log_density = drawn(name)
    again, other, later = draws(posterior, 0), draws(posterior, 2), draws(loaded, 0)
    for site, x in first.items():
        assert np.array_equal(x, again[site])
        assert np.array_equal(x, later[site])
        assert np.mean(x == other[site]) < 0.01
    assert np.array_equal(loaded.log_prob(grid, given=given), log_density)
