"""Block matrices: every storage is the same product, and the network built of them has the derivatives it claims."""

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpejax as cpe
from cpejax.coordinates.base import Prior
from cpejax.flows.blocks.discrete import TOLERANCE, bisect, newton
from cpejax.flows.blocks.network import MANY, UNROLLED, BlockNet, log_derivative_of_tanh
from cpejax.flows.blocks.storage import Dense, Edges, LowRank, Wiring, wire

KEY = jax.random.key(0)
DIAMOND = [[], [0], [0], [1, 2], [], [3]]  # scalar 3 reads 1 and 2, which read 0; 4 is alone
CONDITIONS = [None, None, None]


def wiring(reads=DIAMOND):
    return Wiring.of(reads, [True] * len(reads))


def network(edges=DIAMOND, **options):
    """With random weights from NumPy: nothing to compile."""
    net, rng = shape_of(edges, **options), np.random.default_rng(0)
    return jax.tree.map(lambda w: jnp.asarray(0.4 * rng.normal(size=w.shape), w.dtype), net)


def shape_of(edges, **options):
    settings = {"hidden": 8, "reads": "ancestors", "positive": True, "storage": "edges", "rank": None, **options}
    return eqx.filter_eval_shape(lambda: BlockNet(wiring(edges), key=KEY, **settings))


@st.composite
def dags(draw):
    """What each scalar reads, in an order that is not the topological one."""
    size = draw(st.integers(1, 9))
    order = draw(st.permutations(range(size)))
    reads = [[] for _ in range(size)]
    for i in range(size):
        for j in range(i):
            if draw(st.booleans()):
                reads[order[i]].append(order[j])
    return reads


@given(dags())
@settings(max_examples=60)
def test_wiring_numbers_nodes_by_what_they_read(reads):
    w = wiring(reads)
    found = {(int(w.order[i]), int(w.order[j])) for i, parents in enumerate(w.parents) for j in parents}
    assert found == {(i, j) for i, parents in enumerate(reads) for j in parents}
    for nodes, edges, degree in w.groups():
        assert (np.diff(w.targets[edges].reshape(-1, degree)) == 0).all() if degree else edges.start == edges.stop
        assert all(len(w.parents[i]) == degree for i in range(nodes.start, nodes.stop))
    before: set[int] = set()
    for run in w.runs:
        for nodes, edges in zip(run.nodes, run.edges, strict=True):
            for node, into in zip(nodes, edges, strict=True):
                parents = w.sources[into[into >= 0]]
                assert tuple(parents) == w.parents[node]
                assert set(parents) <= before
            before |= set(nodes)
    assert before == set(range(len(reads)))


@given(dags(), st.integers(1, 5))
@settings(max_examples=40)
def test_reach_is_paths_of_the_graph(reads, steps):
    graph = nx.DiGraph([(i, j) for i, parents in enumerate(reads) for j in parents])
    graph.add_nodes_from(range(len(reads)))
    reach = wiring(reads).reach(steps)
    for i in graph:
        near = nx.single_source_shortest_path_length(graph, i, steps)
        assert set(np.flatnonzero(reach[i])) == set(near)


def test_edges_and_low_rank_are_the_dense_product():
    w, first = wiring(), np.arange(len(wiring().sources))
    dense, low = (network(storage="dense").maps[1], network(rank=8).maps[1])  # of full rank
    assert isinstance(dense, Dense)
    assert isinstance(low, LowRank)

    @eqx.filter_jit
    def products(dense, low, h):
        edges = Edges(w, True, dense.raw(), dense.at(first))
        whole = Edges(w, True, low.own, low.at(first))
        rows_first = jnp.moveaxis(h, 0, 1)
        return jnp.moveaxis(dense(rows_first), 0, 1), edges(h), low(h), whole(h)

    found = products(dense, low, jax.random.normal(KEY, (w.size, 7, 8)))
    assert np.allclose(found[0], found[1], atol=1e-4)
    assert np.allclose(found[2], found[3], atol=1e-4)


def test_only_existing_blocks_are_stored():
    def weights(edges, **options):
        return sum(w.size for w in jax.tree.leaves(shape_of(edges, hidden=64, **options)))

    def chain(d):
        return [[i - 1] if i else [] for i in range(d)]

    assert weights(chain(201)) - weights(chain(101)) == weights(chain(301)) - weights(chain(201))  # linear in the edges
    assert weights(chain(40), storage="dense") > 10 * weights(chain(40))
    full = [list(range(i)) for i in range(40)]
    assert weights(full, rank=1) < weights(full) / 6


@pytest.mark.parametrize("storage", ["dense", "edges"])
def test_derivatives_of_the_network(storage):
    @eqx.filter_jit
    def derivatives(net, x):
        jacobian = jax.vmap(jax.jacobian(lambda x: net(x[None], CONDITIONS)[0]))(x)
        derivative = net.with_derivative(x, CONDITIONS)[1]
        return jacobian, net(x, CONDITIONS), *net.with_log_derivative(x, CONDITIONS), derivative

    found = derivatives(network(storage=storage), jax.random.normal(KEY, (5, 6)))
    jacobian, plain, value, log_derivative, derivative = map(np.asarray, found)
    assert np.allclose(value, plain, atol=1e-6)
    assert np.allclose(log_derivative, np.log(np.diagonal(jacobian, axis1=1, axis2=2)), atol=1e-5)
    assert np.allclose(log_derivative.sum(1), np.linalg.slogdet(jacobian)[1], atol=1e-5)
    assert np.allclose(derivative, np.exp(log_derivative), rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"storage": "dense"}, {"rank": 2}], ids=str)
def test_few_nodes_are_computed_one_by_one(options):
    edges = [[2], [], [1], [1, 2]]
    net = network(edges, **options)
    net = eqx.tree_at(lambda n: n.gamma, net, jnp.asarray(-1.0))
    assert net.wiring.size <= UNROLLED
    added = jax.random.normal(KEY, (5, 8))

    @eqx.filter_jit
    def both(net, x, added):
        conditions = [(added, None), (added, -added), None]
        return net(x, conditions), net.with_derivative(x, conditions)[0]

    found, expected = both(net, jax.random.normal(KEY, (5, 4)), added)
    assert np.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("options", [{"storage": "dense"}, {"storage": "edges"}, {"reads": "parents"}], ids=str)
def test_many_rows_are_computed_node_by_node(options):
    net = network(**options)
    x, added = jax.random.normal(KEY, (MANY, 6)), jax.random.normal(KEY, (MANY, 8))

    def value(x, added):
        return net(x, [(added, -added), None, None])

    assert net._unrolls(MANY)
    assert not net._unrolls(MANY - 1)
    assert np.allclose(jax.jit(value)(x, added)[1:], jax.jit(value)(x[1:], added[1:]), atol=1e-5)


def test_log_derivative_far_out():
    """There tanh's derivative is zero in float32; what is left is the identity's share, and the logarithm is finite."""
    net = eqx.tree_at(lambda net: net.gamma, network([[]]), jnp.zeros(()))

    @eqx.filter_jit
    def far(x):
        value, log_derivative = net.with_log_derivative(x, CONDITIONS)
        return value, log_derivative, jax.grad(lambda x: net.with_log_derivative(x, CONDITIONS)[1].sum())(x)

    value, log_derivative, gradient = far(jnp.array([[1e4]]))
    assert np.allclose(log_derivative, np.log(0.5))
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()
    assert np.allclose(log_derivative_of_tanh(jnp.array([0.0, 30.0])), [0.0, -60 + np.log(4)], atol=1e-5)


STORED = [{}, *(pytest.param(o, marks=pytest.mark.slow) for o in ({"storage": "dense"}, {"rank": 2}))]


@pytest.mark.parametrize("options", [*STORED, {"reads": "parents"}], ids=str)
def test_inversion(options):
    """By levels, of one node and of several, in loops and alone."""
    edges = [*DIAMOND, *([5 + i] for i in range(6))]
    net = network(edges, **options)
    x = 2 * jax.random.normal(KEY, (50, len(edges)))

    @eqx.filter_jit
    def there_and_back(net, x):
        u = net(x, CONDITIONS)
        found = net.invert(u, CONDITIONS, bisect, None)
        near = net.invert(u, CONDITIONS, newton, x + 1e-2) if not options else x
        return found, net(found, CONDITIONS) - u, near

    found, error, near = there_and_back(net, x)
    assert np.abs(error).max() <= TOLERANCE
    assert np.abs(found - x).max() < 1e-4
    assert np.abs(near - x).max() < 1e-3  # a Newton step squares the error of a guess


def test_parameters_that_coordinates_depend_on_are_read():
    """In prior coordinates c's parent b is known only together with a; in plain ones b is a scalar of its own."""

    def program():
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        b = numpyro.sample("b", dist.Normal(a, 1.0))
        c = numpyro.sample("c", dist.Normal(b, 1.0))
        numpyro.sample("y", dist.Normal(c, 1.0))

    simulations = cpe.simulate(cpe.Model(program, observed=["y"]), 20, key=KEY)
    values = {name: jnp.asarray(x) for name, x in simulations.items()}
    graph = simulations.graph
    faithful, reverse = cpe.invert(graph), cpe.invert(graph, how="reverse")

    def reach(posterior, kind):
        return wire(posterior, Prior(program, graph, values, kind).vector).reach(1).astype(int).tolist()

    assert reach(faithful, "plain") == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert reach(faithful, "prior") == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert reach(reverse, "plain") == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    with pytest.raises(ValueError, match=r"prior coordinates of 'b'.*depend on 'a', which.*draws later"):
        reach(reverse, "prior")
