"""Graphs: what they know of a program, how plates are written out, and which programs have none."""

import inspect
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

import cpejax as cpe

sample, Normal = numpyro.sample, dist.Normal


def hierarchical(groups=8, scale=1.0):
    mu = sample("mu", Normal(0.0, 1.0))
    sigma = sample("sigma", dist.HalfNormal(scale))
    with numpyro.plate("group", groups):
        beta = sample("beta", Normal(mu, 1.0))
        sample("y", cpe.Simulator(lambda key, b, s: b + s, beta, sigma))


def test_a_program_gives_sites_shapes_supports_plates_and_edges():
    graph = cpe.Graph.from_program(hierarchical)
    assert list(graph.sites) == ["mu", "sigma", "beta", "y"]
    assert graph.parameters == ("mu", "sigma", "beta")
    assert graph.data == ("y",)
    assert graph.plates == {"group": 8}
    assert graph.parents == {"mu": (), "sigma": (), "beta": ("mu",), "y": ("sigma", "beta")}
    assert graph.children == {"mu": ("beta",), "sigma": ("y",), "beta": ("y",), "y": ()}
    assert [s.support for s in graph.sites.values()] == ["real", "positive", "real", "real"]
    assert [s.distribution for s in graph.sites.values()] == ["Normal", "HalfNormal", "Normal", "Simulator"]
    assert graph.sites["beta"].shape == (8,)
    assert graph.sites["beta"].plates == ("group",)
    assert set(graph.to_networkx().edges) == {("mu", "beta"), ("beta", "y"), ("sigma", "y")}


def test_arguments_are_passed_through():
    assert cpe.Model(hierarchical, args=(3,), kwargs={"scale": 2.0}).graph.plates == {"group": 3}


def test_a_vector_site_has_an_event():
    def program():
        a = sample("a", dist.Dirichlet(jnp.ones(3)))
        sample("y", Normal(a, 1.0).to_event(1), obs=0.0)

    site = cpe.Graph.from_program(program).sites["a"]
    assert (site.shape, site.event_shape, site.size, site.support) == ((3,), (3,), 3, "simplex")


# ---- which sites are data


def two_data():
    a = sample("a", Normal(0.0, 1.0))
    b = sample("b", Normal(a, 1.0))
    sample("y", cpe.Simulator(lambda key, b: b, b))
    sample("z", Normal(a, 1.0), obs=1.0)


def test_data_are_simulators_and_sites_with_obs_unless_named():
    assert cpe.Graph.from_program(two_data).data == ("y", "z")
    assert cpe.Model(two_data, observed=["z", "y", "b"]).graph.data == ("b", "y", "z")


def test_discrete_sites_may_be_data():
    def program():
        a = sample("a", dist.Beta(1.0, 1.0))
        sample("k", dist.Binomial(10, a))

    assert cpe.Model(program, observed=["k"]).graph.data == ("k",)


@pytest.mark.parametrize(
    ("observed", "error", "message"),
    [
        (["yy"], ValueError, r"observed names 'yy', but the program has only the sites \['a', 'b', 'y', 'z'\]"),
        (["z"], ValueError, r"Site 'y' is a cpe\.Simulator, so it is data, but observed=\['z'\] leaves it out"),
        (["y"], ValueError, r"Site 'z' is given with obs=, so it is data, but observed=\['y'\] leaves it out"),
        ("y", TypeError, r"list of site names, found the string 'y': write \['y'\]"),
    ],
)
def test_observed_is_checked(observed, error, message):
    with pytest.raises(error, match=message):
        _ = cpe.Model(two_data, observed=observed).graph


def discrete():
    k = sample("k", dist.Bernoulli(0.5))
    sample("y", Normal(k, 1.0), obs=0.0)


def degenerate():
    a = sample("a", dist.Delta(sample("b", Normal(0.0, 1.0))))
    sample("y", Normal(a, 1.0), obs=0.0)


def uninformed():
    sample("y", Normal(sample("a", Normal(0.0, 1.0)), 1.0), obs=0.0)
    sample("noise", Normal(0.0, 1.0), obs=0.0)


def no_data():
    sample("b", Normal(sample("a", Normal(0.0, 1.0)), 1.0))


def no_parameters():
    sample("y", Normal(0.0, 1.0), obs=0.0)


def empty():
    a = sample("a", Normal(jnp.zeros(0), 1.0))
    sample("y", Normal(a.sum(), 1.0), obs=0.0)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (discrete, r"Parameter 'k' is discrete \(Bernoulli.*only continuous.*Sum it out.*observed"),
        (degenerate, r"Parameter 'a' is a Delta.*numpyro\.deterministic\('a', \.\.\.\)"),
        (uninformed, r"Data site 'noise' depends on no parameter.*Remove it"),
        (no_data, r"no data: its sites \['a', 'b'\] are all parameters.*observed=.*obs=.*Simulator"),
        (no_parameters, r"no parameters: its sites \['y'\] are all data.*without obs="),
        (empty, r"Parameter 'a' has shape \(0,\), which is empty"),
    ],
)
def test_programs_without_a_posterior_say_why(program, message):
    with pytest.raises(ValueError, match=message):
        cpe.Graph.from_program(program)


def test_data_that_depend_on_parameters_through_other_data_are_allowed():
    graph = cpe.Graph.from_edges({"x": ["a"], "y": ["x"]}, observed=["x", "y"])
    assert graph.data == ("x", "y")


# ---- graphs without a program


def test_edges_give_a_graph_with_parents_first():
    graph = cpe.Graph.from_edges({"x": ["b", "a"], "b": ["a"]}, observed=["x"])
    assert list(graph.sites) == ["a", "b", "x"]
    assert graph.parents == {"a": (), "b": ("a",), "x": ("b", "a")}
    assert graph.sites["a"].shape == ()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"parents": {"x": ["a"], "a": ["x"]}, "observed": ["x"]}, ValueError, "cycle: .*a -> "),
        ({"parents": {"x": ["a"]}, "observed": ["y"]}, ValueError, r"observed names 'y', but .*\['a', 'x'\]"),
        ({"parents": {"x": ["a"]}, "observed": "x"}, TypeError, r"found the string 'x': write \['x'\]"),
        ({"parents": {"x": ["a"]}, "observed": []}, ValueError, r"no data: its sites \['a', 'x'\]"),
        (
            {"parents": {"x": ["a"]}, "observed": ["x"], "plates": {"a": ["p"]}},
            ValueError,
            "Site 'a' is in plate 'p', but sizes has no size",
        ),
    ],
)
def test_edges_are_checked(settings, error, message):
    from_edges = inspect.unwrap(cpe.Graph.from_edges.__func__)  # the tests' type checker would object first
    with pytest.raises(error, match=message):
        from_edges(cpe.Graph, **settings)


# ---- plates written out

CROSSED = cpe.Graph.from_edges(
    {"y": ["row", "column", "cell", "mu"], "cell": ["mu"]},
    observed=["y"],
    plates={"row": ["r"], "column": ["c"], "cell": ["r", "c"], "y": ["r", "c"]},
    sizes={"r": 2, "c": 3},
)


def test_unrolling_one_plate_keeps_the_other():
    graph = CROSSED.unroll("r", "for the test")
    assert graph.plates == {"c": 3}
    assert graph.unrolled == {"r": "for the test"}
    assert set(graph.sites) == {"mu", "row[0]", "row[1]", "column", "cell[0]", "cell[1]", "y[0]", "y[1]"}
    assert graph.parents["y[1]"] == ("row[1]", "column", "cell[1]", "mu")
    assert (graph.sites["y[1]"].shape, graph.sites["y[1]"].plates) == ((3,), ("c",))
    assert "y[:, 2]" in CROSSED.unroll("c").sites


def test_ground_has_every_member_and_aligned_edges():
    graph = CROSSED.ground()
    assert graph.plates == {}
    assert len(graph.sites) == 1 + 2 + 3 + 6 + 6
    for i in range(2):
        for j in range(3):
            assert set(graph.parents[f"y[{i}, {j}]"]) == {f"row[{i}]", f"column[{j}]", f"cell[{i}, {j}]", "mu"}


def test_a_site_outside_a_plate_reads_all_members():
    graph = cpe.Graph.from_edges({"total": ["b"]}, observed=["total"], plates={"b": ["p"]}, sizes={"p": 3}).ground()
    assert graph.parents["total"] == ("b[0]", "b[1]", "b[2]")


def test_mixed_members_read_all_members():
    def program():
        with numpyro.plate("p", 3):
            a = sample("a", Normal(0.0, 1.0))
            b = sample("b", Normal(0.0, 1.0))
            sample("y", Normal(a.mean() + b, 1.0), obs=0.0)

    graph = cpe.Graph.from_program(program)
    assert graph.sites["y"].mixed == (("a", "p"),)
    assert graph.ground().parents["y[1]"] == ("a[0]", "a[1]", "a[2]", "b[1]")
    assert cpe.invert(graph).graph.unrolled == {"p": "'y' reads other members of 'a' than its own"}


def test_unrolling_an_unknown_plate_is_an_error():
    with pytest.raises(ValueError, match=r"No plate 'q'; the plates are \['c', 'r'\]"):
        CROSSED.unroll("q")


# ---- two graphs compared


def test_the_fingerprint_is_that_of_the_program():
    graph = cpe.Graph.from_program(hierarchical)
    assert graph.fingerprint == cpe.Model(hierarchical, kwargs={"scale": 3.0}).graph.fingerprint
    assert graph.fingerprint != cpe.Model(hierarchical, args=(9,)).graph.fingerprint
    assert graph.differences(json.loads(json.dumps(graph.to_dict()))) == []


def test_differences_are_sentences():
    def other():
        mu = sample("mu", Normal(0.0, 1.0))
        tau = sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("group", 5):
            sample("y", Normal(mu, tau), obs=0.0)

    found = cpe.Graph.from_program(other).differences(cpe.Graph.from_program(hierarchical).to_dict())
    assert "site 'sigma' is missing" in found
    assert "site 'tau' is new" in found
    assert "site 'y' has parents ['mu', 'tau'], expected ['sigma', 'beta']" in found
    assert "site 'y' has distribution Normal, expected Simulator" in found
    assert "plate 'group' has size 5, expected 8" in found


def test_str_shows_sites_parents_and_plates():
    assert str(cpe.Graph.from_program(hierarchical)).splitlines() == [
        "prior program",
        "  mu    ~ ·",
        "  sigma ~ ·",
        "  beta  ~ mu    (plate group[8])",
        "  y     ~ sigma, beta    (plate group[8], data)",
    ]


def test_the_page_on_graphs_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 3
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks:  # one after the other, as a reader would
        exec(compile(block, "graphs.md", "exec"), names)
    assert (tmp_path / "graph.svg").exists()
