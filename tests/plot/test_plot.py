"""The figure of a graph: circles that do not overlap, boxes that hold their members, arrows that end at the rim."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import same_color
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text

import cpejax as cpe
from cpejax import plot
from cpejax.plot import layout as _diagram
from cpejax.plot.graph import SMALLEST_FONT
from cpejax.plot.style import SHADE

edges = cpe.Graph.from_edges

GRAPHS = {
    "figure 1": edges({"theta2": ["theta1"], "x": ["theta2", "theta3"]}, ["x"]),
    "hierarchical": edges(
        {"beta": ["mu"], "y": ["beta", "sigma"]}, ["y"], {"beta": ["group"], "y": ["group"]}, {"group": 8}
    ),
    "nested": edges(
        {"district": ["mu", "tau"], "school": ["district", "kappa"], "score": ["school", "sigma"]},
        ["score"],
        {"district": ["d"], "school": ["d", "s"], "score": ["d", "s", "p"]},
        {"d": 5, "s": 10, "p": 20},
    ),
    "crossed": edges(
        {"row": ["tau"], "column": ["kappa"], "y": ["row", "column", "sigma"]},
        ["y"],
        {"row": ["rows"], "column": ["columns"], "y": ["rows", "columns"]},
        {"rows": 3, "columns": 5},
    ),
    "coupled": edges({"beta": ["mu"], "total": ["beta"]}, ["total"], {"beta": ["group"]}, {"group": 4}),
    "chain": edges({**{f"z{i + 1}": [f"z{i}"] for i in range(9)}, "x": ["z9"]}, ["x"]),
    "slcp": edges({"x": [f"theta{i}" for i in range(1, 6)]}, ["x"], {"x": ["observation"]}, {"observation": 4}),
    "two plates": edges(
        {"a": ["mu"], "x": ["a", "s"], "b": ["mu"], "y": ["b", "s"]},
        ["x", "y"],
        {"a": ["left"], "x": ["left"], "b": ["right"], "y": ["right"]},
        {"left": 10, "right": 20},
    ),
}


def diagram(graph: cpe.Graph) -> _diagram.Diagram:
    plates = {p: [n for n, s in graph.sites.items() if p in s.plates] for p in graph.plates}
    return _diagram.place(graph.parents, plates, 0.3)


def check(graph: cpe.Graph, placed: _diagram.Diagram) -> None:
    r = placed.radius
    for (_, a), (_, b) in itertools.combinations(placed.at.items(), 2):
        assert np.hypot(a[0] - b[0], a[1] - b[1]) >= 2 * r + 0.1
    for child, parents in graph.parents.items():
        assert all(placed.at[p][1] > placed.at[child][1] for p in parents)
    for plate, box in placed.boxes.items():
        for name, (x, y) in placed.at.items():
            if plate in graph.sites[name].plates:
                assert box.left < x - r
                assert x + r < box.right
                assert box.bottom < y - r
                assert y + r < box.top
            else:
                outside = x + r < box.left or x - r > box.right or y + r < box.bottom or y - r > box.top
                assert outside, f"{name} is in the box of {plate}"
    for a, b in itertools.combinations(placed.boxes.values(), 2):
        corners = [abs(p - q) for p, q in zip(a[:4], b[:4], strict=True)]
        overlap = a.left < b.right and b.left < a.right and a.bottom < b.top and b.bottom < a.top
        assert not overlap or min(corners) > 0.02  # no two borders on one line


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
def test_places_are_apart_and_boxes_hold_their_members(graph):
    placed = diagram(graph)
    check(graph, placed)
    assert placed.unboxed == {}


@st.composite
def plate_graphs(draw) -> dict:
    names = [f"n{i}" for i in range(draw(st.integers(2, 7)))]
    plates = {name: draw(st.sampled_from([(), ("a",), ("b",), ("a", "b")])) for name in names}
    parents = {c: [p for p in names[:i] if draw(st.booleans())] for i, c in enumerate(names)}
    parents[names[-1]] = parents[names[-1]] or [names[0]]
    return {"parents": parents, "observed": [names[-1]], "plates": plates, "sizes": {"a": 3, "b": 3}}


@settings(max_examples=25)
@given(plate_graphs())
def test_random_graphs_are_placed_soundly(drawn):
    graph = edges(**drawn)
    check(graph, diagram(graph))


def test_plates_that_no_box_can_show_are_written_at_their_members():
    graph = edges(
        {"ab": ["a", "b"], "bc": ["b", "c"], "ac": ["a", "c"], "y": ["ab", "bc", "ac"]},
        ["y"],
        {"a": "A", "b": "B", "c": "C", "ab": "AB", "bc": "BC", "ac": "AC", "y": "ABC"},
        {"A": 2, "B": 2, "C": 2},
    )
    placed = diagram(graph)
    check(graph, placed)
    assert len(placed.boxes) == 2
    (plate,) = placed.unboxed
    texts = {t.get_text() for t in shown(plot.graph(graph, cpe.invert(graph, how="reverse")), Text)}
    assert f"{plate}: 2" in texts


def test_order_is_searched_for_few_crossings():
    # As written, all three edges cross.
    graph = edges({"x": ["a"], "y": ["b"], "z": ["c"]}, ["z", "y", "x"])
    tangled = dict(sorted(graph.parents.items(), key=lambda item: "abczyx".index(item[0])))
    at = _diagram.place(tangled, {}, 0.3).at
    assert [at[n][0] for n in "abc"] == pytest.approx([at[n][0] for n in "xyz"], abs=0.02)


def test_short_edges_keep_causes_next_to_their_effects():
    at = diagram(GRAPHS["figure 1"]).at
    assert at["theta2"][1] == at["theta3"][1]  # and not next to theta1, where it could be as well
    assert at["theta1"][0] == pytest.approx(at["theta2"][0], abs=0.02)
    assert at["theta2"][0] < at["x"][0] < at["theta3"][0]


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
def test_arrows_go_from_rim_to_rim_and_pass_other_sites_by(graph):
    placed = diagram(graph)
    for c, parents in graph.parents.items():
        for p in parents:
            arrow = placed.arrow((p, c))
            assert np.linalg.norm(arrow[0] - placed.at[p]) == pytest.approx(placed.radius, abs=0.005)
            assert np.linalg.norm(arrow[2] - placed.at[c]) == pytest.approx(placed.radius, abs=0.005)
            for name, centre in placed.at.items():
                if name not in (p, c):
                    assert np.linalg.norm(_diagram.bezier(arrow) - centre, axis=1).min() > placed.radius


def test_arrows_bend_only_where_something_is_in_the_way():
    placed = _diagram.place({"a": (), "b": ("a",), "c": ("a", "b")}, {}, 0.3)
    middle = placed.arrow(("a", "b"))
    assert middle[1] == pytest.approx((middle[0] + middle[2]) / 2, abs=0.02)
    around = placed.arrow(("a", "c"))
    assert abs(around[1][0] - placed.at["b"][0]) > placed.radius


# ---- what is drawn


def shown(figure, kind):
    return [artist for axes in figure.axes for artist in axes.get_children() if isinstance(artist, kind)]


def pane(figure, side, kind):
    return [artist for artist in figure.axes[side].get_children() if type(artist) is kind]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
def test_both_programs_are_drawn(graph):
    post = cpe.invert(graph)
    figure = plot.graph(graph)
    for side, sites, reads in ((0, graph.sites, graph.parents), (1, post.graph.sites, post.parents)):
        circles = pane(figure, side, Circle)
        assert len(circles) == len(sites)
        assert sum(same_color(c.get_facecolor(), SHADE) for c in circles) == sum(s.observed for s in sites.values())
        arrows = pane(figure, side, FancyArrowPatch)
        assert len(arrows) == sum(len(p) for p in reads.values())
        assert {a.get_linestyle() == "solid" for a in arrows} == {side == 0}
    assert len(pane(figure, 0, FancyBboxPatch)) == len(graph.plates)
    figure.canvas.draw()
    texts = {t.get_text().replace("\n", "") for t in shown(figure, Text)}
    assert {"Prior program", "Posterior program", *graph.sites} <= texts
    assert {f"{plate}: {size}" for plate, size in graph.plates.items()} <= texts


def test_figure_1_looks_the_same_on_both_sides():
    graph = GRAPHS["figure 1"]
    figure = plot.graph(graph, cpe.invert(graph, how="reverse"))
    left, right = ([c.center for c in pane(figure, side, Circle)] for side in (0, 1))
    assert left == right
    heads = [[tuple(a.get_path().vertices.round(3)[0]) for a in pane(figure, side, FancyArrowPatch)] for side in (0, 1)]
    assert len(heads[0]) == len(heads[1]) == 3


def test_unrolled_plates_say_so():
    texts = {t.get_text() for t in shown(plot.graph(GRAPHS["coupled"]), Text)}
    assert "group: 4, unrolled" in texts
    assert any("plate 'group' is unrolled: 'total'" in text for text in texts)
    assert "beta\n[3]" in texts


def test_a_program_can_be_drawn():
    import numpyro
    import numpyro.distributions as dist

    def program():
        numpyro.sample("y", dist.Normal(numpyro.sample("a", dist.Normal(0.0, 1.0)), 1.0))

    assert len(pane(plot.graph(cpe.Model(program, observed=["y"])), 0, Circle)) == 2


@pytest.mark.parametrize(
    "name", ["x", "theta1", "log_concentration_in_blood", "a" * 40, "beta[12, 3]", "averyveryverylong_name[0]", "$a_b$"]
)
def test_names_fit_into_their_circles(name):
    graph = edges({"y": [name]}, ["y"])
    figure = plot.graph(graph)
    figure.canvas.draw()
    circle = next(c for c in pane(figure, 0, Circle))
    text = next(t for t in pane(figure, 0, Text) if t.get_text().replace("\n", "") == name)
    assert text.get_fontsize() >= SMALLEST_FONT - 1e-6
    box = text.get_window_extent().transformed(figure.axes[0].transData.inverted())
    if "\n" not in text.get_text():
        assert box.width < 2 * circle.radius
    assert box.width <= 2 * circle.radius
    assert box.height <= 2 * circle.radius


def test_figures_grow_with_their_graph():
    small, large = (
        plot.graph(edges({f"x{i}": [f"t{i}"] for i in range(n)}, [f"x{i}" for i in range(n)])) for n in (2, 12)
    )
    assert large.get_size_inches()[0] > 3 * small.get_size_inches()[0]
    tall = plot.graph(GRAPHS["chain"])
    assert tall.get_size_inches()[1] > 2 * small.get_size_inches()[1]
