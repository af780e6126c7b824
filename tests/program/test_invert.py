"""Posterior programs: faithful and minimal by d-separation, on random graphs and on templates that are written out."""

import inspect
import itertools
import time

import networkx as nx
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cpejax as cpe
from cpejax.program.conditional import MOST_UNROLLED

ORDERS = ("prior", "leaf")
EDGES_1 = {"parents": {"theta2": ["theta1"], "x": ["theta2", "theta3"]}, "observed": ["x"]}
FIGURE_1 = cpe.Graph.from_edges(**EDGES_1)


def unfounded(graph: cpe.Graph, parents: dict[str, tuple[str, ...]]) -> list[str]:
    """The parameters said to be independent, given their parents, of something drawn or seen before, that are not.

    `parents` is in sampling order; data come before everything.
    """
    dag = graph.to_networkx()
    wrong, before = [], set(graph.data)
    for name, reads in parents.items():
        assert set(reads) <= before
        rest = before - set(reads)
        if rest and not nx.is_d_separator(dag, {name}, rest, set(reads)):
            wrong.append(name)
        before.add(name)
    return wrong


def needless(graph: cpe.Graph, parents: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """The edges without which the program would still be faithful."""
    dag = graph.to_networkx()
    found, before = [], set(graph.data)
    for name, reads in parents.items():
        for parent in reads:
            kept = set(reads) - {parent}
            if nx.is_d_separator(dag, {name}, before - kept, kept):
                found.append((parent, name))
        before.add(name)
    return found


def check(graph: cpe.Graph, order: str) -> cpe.PosteriorProgram:
    """Invert, and compare with the graph written out member by member."""
    post = cpe.invert(graph, order=order)
    ground, parents = graph.ground(), post.ground()
    assert set(parents) == set(ground.parameters)
    assert unfounded(ground, parents) == []
    assert needless(ground, parents) == []
    return post


# Strategies draw the arguments of `from_edges`, not graphs: what checks types at run time draws random numbers too,
# which hypothesis does not allow.


@st.composite
def graphs(draw) -> dict:
    """DAGs of 3 to 10 nodes; one of the nodes without children, and any other of them, are data."""
    n = draw(st.integers(3, 10))
    names = draw(st.permutations([f"n{i}" for i in range(n)]))
    chance = draw(st.sampled_from([0.2, 0.4, 0.7]))
    parents = {c: [p for p in names[:i] if draw(st.floats(0, 1)) < chance] for i, c in enumerate(names)}
    used = {p for ps in parents.values() for p in ps}
    sinks = [c for c in names if parents[c] and c not in used]
    if not sinks:
        parents[names[-1]] = [names[0]]
        sinks = [names[-1]]
    observed = [sinks[0], *(s for s in sinks[1:] if draw(st.booleans()))]
    return {"parents": parents, "observed": observed}


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=500)
@given(edges=graphs())
@example(edges=EDGES_1)
def test_faithful_inverse_is_faithful_and_minimal(order, edges):
    graph = cpe.Graph.from_edges(**edges)
    post = check(graph, order)
    if order == "prior":
        seen: set[str] = set(graph.data)
        for name in post.order:
            assert set(graph.parents[name]) <= seen
            seen.add(name)


@settings(max_examples=100)
@given(edges=graphs())
def test_leaf_order_draws_children_first(edges):
    graph = cpe.Graph.from_edges(**edges)
    post = cpe.invert(graph, order="leaf")
    informed = nx.ancestors(graph.to_networkx(), graph.data[0]).union(
        *(nx.ancestors(graph.to_networkx(), x) for x in graph.data)
    )
    place = {name: i for i, name in enumerate(post.order)}
    for name in informed:
        assert all(place[p] > place[name] for p in graph.parents[name])


@settings(max_examples=100)
@given(edges=graphs())
def test_levels_are_as_early_as_can_be(edges):
    graph = cpe.Graph.from_edges(**edges)
    post = cpe.invert(graph)
    assert sorted(n for level in post.levels for n in level) == sorted(graph.parameters)
    dag = nx.DiGraph()
    dag.add_nodes_from(graph.parameters)
    dag.add_edges_from((p, c) for c in graph.parameters for p in post.parents[c] if p in graph.parameters)
    assert [set(level) for level in post.levels] == [set(g) for g in nx.topological_generations(dag)]


def test_reversal_claims_an_independence_that_figure_1_does_not_have():
    reverse = cpe.invert(FIGURE_1, how="reverse")
    assert reverse.parents == {"theta2": ("x",), "theta1": ("theta2",), "theta3": ("x",)}  # the paper's Figure 1b
    assert unfounded(FIGURE_1.ground(), reverse.ground()) == ["theta3"]
    faithful = cpe.invert(FIGURE_1)
    assert faithful.parents == {"theta1": ("x",), "theta2": ("theta1", "x"), "theta3": ("theta2", "x")}
    assert cpe.invert(FIGURE_1, order="leaf").parents == {
        "theta3": ("x",),
        "theta2": ("theta3", "x"),
        "theta1": ("theta2",),
    }


@settings(max_examples=100)
@given(edges=graphs())
def test_reverse_flips_every_edge(edges):
    graph = cpe.Graph.from_edges(**edges)
    post = cpe.invert(graph, how="reverse")
    assert {(p, c) for c in graph.sites for p in graph.parents[c] if p in graph.parameters} == {
        (c, p) for c in graph.parameters for p in post.parents[c]
    }


# ---- plates


def plated(edges, observed, plates, size=3):
    names = {p for ps in plates.values() for p in ps}
    return cpe.Graph.from_edges(edges, observed=observed, plates=plates, sizes=dict.fromkeys(names, size))


FLAT = plated({"beta": ["mu"], "y": ["beta", "sigma"]}, ["y"], {"beta": ["group"], "y": ["group"]})
NESTED = plated(
    {"district": ["mu"], "school": ["district", "tau"], "y": ["school", "sigma"]},
    ["y"],
    {"district": ["d"], "school": ["d", "s"], "y": ["d", "s", "pupil"]},
    size=2,
)
CROSSED = plated(
    {"row": ["tau"], "column": ["kappa"], "y": ["row", "column", "sigma"]},
    ["y"],
    {"row": ["r"], "column": ["c"], "y": ["r", "c"]},
)
COUPLED = plated({"beta": ["mu"], "total": ["beta"]}, ["total"], {"beta": ["group"]})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("graph", [FLAT, NESTED, CROSSED, COUPLED], ids=["flat", "nested", "crossed", "coupled"])
def test_templates_are_faithful_and_minimal(graph, order):
    check(graph, order)


def test_flat_and_nested_plates_stay_templates():
    assert cpe.invert(FLAT).parents == {
        "sigma": ("y",),
        "mu": ("sigma", "y"),
        "beta": ("sigma", "mu", "y"),
    }
    for graph in (FLAT, NESTED):
        post = cpe.invert(graph)
        assert post.graph.plates == graph.plates
        assert post.graph.unrolled == {}


def test_coupled_plate_is_unrolled_and_says_why():
    post = cpe.invert(COUPLED)
    assert post.graph.plates == {}
    assert post.graph.unrolled == {"group": "'total', outside it, depends on all members of 'beta'"}
    assert "plate 'group' is unrolled: 'total', outside it, depends on all members of 'beta'" in str(post)
    assert set(post.order) == {"mu", "beta[0]", "beta[1]", "beta[2]"}


def test_leaf_order_couples_the_members_of_a_plate():
    post = cpe.invert(FLAT, order="leaf")
    assert post.graph.unrolled == {"group": "members of 'beta' depend on one another once 'mu' is summed out"}


def test_crossed_plates_unroll_one_side_only():
    # Given the data every row is tied to every other by the columns: drawn after the columns, rows stay a template.
    post = cpe.invert(CROSSED)
    assert len(post.graph.plates) == 1
    assert len(post.graph.unrolled) == 1


def test_mixed_members_unroll_every_plate_they_mix_in():
    sites = {
        "a": cpe.Site("a", (2, 2), ("r", "c"), origin="a", axes=("r", "c")),
        "y": cpe.Site(
            "y",
            (2, 2),
            ("r", "c"),
            observed=True,
            parents=("a",),
            mixed=(("a", "c"), ("a", "r")),
            origin="y",
            axes=("r", "c"),
        ),
    }
    graph = cpe.Graph(sites, {"r": 2, "c": 2})
    for how in ("faithful", "reverse"):
        post = cpe.invert(graph, how=how)
        assert post.graph.plates == {}
        assert all(set(post.parents[f"a[{i}, {j}]"]) >= set(graph.ground().data) for i in (0, 1) for j in (0, 1))
    check(graph, "prior")


@st.composite
def plate_graphs(draw) -> dict:
    """Up to five sites in any of two plates of three members."""
    n = draw(st.integers(2, 5))
    names = [f"n{i}" for i in range(n)]
    choices = [(), ("a",), ("b",), ("a", "b")]
    plates = {name: draw(st.sampled_from(choices)) for name in names}
    crossed = [name for name in names if len(plates[name]) == 2]
    for name in crossed[2:]:  # keeps the ground graph small
        plates[name] = ("a",)
    parents = {c: [p for p in names[:i] if draw(st.booleans())] for i, c in enumerate(names)}
    if not parents[names[-1]]:
        parents[names[-1]] = [names[-2]]
    used = {p for ps in parents.values() for p in ps}
    observed = [c for c in names if parents[c] and c not in used and (c == names[-1] or draw(st.booleans()))]
    return {"parents": parents, "observed": observed, "plates": plates, "sizes": {"a": 3, "b": 3}}


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=60)
@given(edges=plate_graphs())
def test_random_templates_are_faithful_and_minimal(order, edges):
    graph = cpe.Graph.from_edges(**edges)
    post = check(graph, order)
    if order == "prior":
        for name in post.order:
            causes = set(post.graph.parents[name])
            assert causes <= set(post.order[: post.order.index(name)]) | set(post.graph.data)


# ---- data among the causes, parameters without data


def test_data_may_have_children():
    graph = cpe.Graph.from_edges({"x": ["a"], "b": ["x"], "y": ["b", "a"]}, observed=["x", "y"])
    for order in ORDERS:
        check(graph, order)


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_without_data_are_drawn_last_from_their_prior(order):
    graph = cpe.Graph.from_edges({"x": ["a"], "b": ["a"], "c": ["b", "d"]}, observed=["x"])
    post = check(graph, order)
    assert post.order[0] == "a"
    assert {n: post.parents[n] for n in ("b", "c", "d")} == {"b": ("a",), "c": ("b", "d"), "d": ()}


# ---- choices, costs, errors


def plain_elimination(graph: cpe.Graph, order: str) -> dict[str, set[str]]:
    """Webb et al.'s algorithm, word by word: the parents of each parameter, in sampling order."""
    moral = nx.Graph(graph.to_networkx())
    for parents in graph.parents.values():
        moral.add_edges_from(itertools.combinations(parents, 2))
    before = graph.children if order == "prior" else graph.parents
    left, found = set(graph.parameters), {}

    def fill(name):
        pairs = itertools.combinations(moral[name], 2)
        return sum(not moral.has_edge(a, b) for a, b in pairs if not {a, b} <= set(graph.data)), name

    while left:
        name = min((n for n in left if not left & set(before[n])), key=fill)
        found[name] = set(moral[name])
        moral.add_edges_from(itertools.combinations(found[name], 2))
        moral.remove_node(name)
        left.remove(name)
    return dict(reversed(found.items()))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=100)
@given(edges=graphs())
def test_the_inverse_is_that_of_the_plain_algorithm(order, edges):
    graph = cpe.Graph.from_edges(**edges)
    uninformed = set(graph.parameters) - set().union(*(nx.ancestors(graph.to_networkx(), x) for x in graph.data))
    if not uninformed:  # the plain algorithm knows nothing of these
        post = cpe.invert(graph, order=order)
        expected = plain_elimination(graph, order)
        assert post.order == tuple(expected)
        assert {name: set(reads) for name, reads in post.parents.items()} == expected


def test_fewest_fill_in_edges_first_and_ties_by_name():
    # Eliminating 'hub' first would join its three children.
    graph = cpe.Graph.from_edges(
        {"x1": ["hub", "a"], "x2": ["hub", "b"], "x3": ["hub", "c"]}, observed=["x1", "x2", "x3"]
    )
    post = cpe.invert(graph)
    assert post.order == ("hub", "c", "b", "a")
    many = cpe.Graph.from_edges({f"x{i}": [f"b{i}"] for i in range(12)}, observed=[f"x{i}" for i in range(12)])
    assert cpe.invert(many).order == tuple(f"b{i}" for i in reversed(range(12)))


def seconds(function) -> float:
    """The processor's time, which does not depend on what else the machine is doing."""
    start = time.process_time()
    function()
    return time.process_time() - start


@pytest.mark.parametrize("order", ORDERS)
def test_a_chain_of_a_thousand_inverts_within_a_second(order):
    chain = {f"z{i + 1}": [f"z{i}"] for i in range(999)}
    graph = cpe.Graph.from_edges({**chain, "x": ["z999"]}, observed=["x"])
    assert seconds(lambda: cpe.invert(graph, order=order)) < 1


def test_a_plate_of_a_hundred_thousand_inverts_within_a_second():
    graph = plated({"beta": ["mu"], "y": ["beta", "sigma"]}, ["y"], {"beta": ["g"], "y": ["g"]}, size=100_000)
    assert seconds(lambda: cpe.invert(graph)) < 1


def test_a_thousand_groups_without_a_plate_invert_quickly():
    groups = {f"b{i}": ["mu"] for i in range(1000)} | {f"y{i}": [f"b{i}", "sigma"] for i in range(1000)}
    graph = cpe.Graph.from_edges(groups, observed=[f"y{i}" for i in range(1000)])
    assert seconds(lambda: cpe.invert(graph)) < 5


def test_too_large_a_plate_is_not_unrolled():
    graph = plated({"beta": ["mu"], "total": ["beta"]}, ["total"], {"beta": ["group"]}, size=MOST_UNROLLED + 1)
    with pytest.raises(ValueError, match=r"Plate 'group' has 1001 members .* \('total', outside it, .* put them into"):
        cpe.invert(graph)


@pytest.mark.parametrize(("setting", "value"), [("how", "naive"), ("order", "random")])
def test_settings_are_checked(setting, value):
    with pytest.raises(ValueError, match=f"{setting} must be .* found '{value}'"):
        inspect.unwrap(cpe.invert)(FIGURE_1, **{setting: value})  # the tests' type checker would object first


def test_str_shows_order_and_what_is_read():
    assert str(cpe.invert(FLAT)).splitlines() == [
        "posterior program",
        "  sigma ← y",
        "  mu    ← sigma, y",
        "  beta  ← sigma, mu, y    (plate group[3])",
    ]


def test_parameters_that_come_first():
    edges = {"b": ["a"], "x": ["b", "c"], "y": ["c", "d"]}
    graph = cpe.Graph.from_edges(edges, observed=["x", "y"])
    for first in (["a"], ["c"], ["d"], ["a", "b"], ["a", "b", "d"], ["c", "d", "a"]):
        program = cpe.invert(graph, first=first)
        assert set(program.order[: len(first)]) == set(first)
        for name in first:  # so what is first reads nothing else
            assert set(program.parents[name]) <= {*first, "x", "y"}
    with pytest.raises(ValueError, match=r"first has 'b', but not \['a'\], on which the prior of 'b' depends"):
        cpe.invert(graph, first=["b"])
    with pytest.raises(ValueError, match="first names 'x', but the parameters are"):
        cpe.invert(graph, first=["x"])
    with pytest.raises(ValueError, match="first needs how='faithful' and order='prior'"):
        cpe.invert(graph, how="reverse", first=["a"])


def test_members_of_a_plate_that_come_first():
    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("j", 3):
            theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(theta, scale))

    inverse = cpe.invert(cpe.Model(program, observed=["y"]).graph, first=["mu", "theta"])
    assert inverse.order[-1] == "scale"
    assert len(inverse.order) == 5  # the members depend on one another once their scale is summed out
