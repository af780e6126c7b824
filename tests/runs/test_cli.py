"""The command: what it prints and writes, and how it fails."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from typer.testing import CliRunner

from cpejax import tasks
from cpejax.runs.cli import app

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
HIERARCHICAL = Path(__file__).parents[2] / "examples" / "hierarchical.py"

HEAD = "import numpyro, numpyro.distributions as dist\n"
PROGRAM = """
def program({arguments}):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    {body}
    numpyro.sample("y", dist.Normal(a, 1.0), {obs})
"""


def write(path: Path, body="pass", obs="obs=0.0", arguments="", more="") -> Path:
    path.write_text(HEAD + PROGRAM.format(body=body, obs=obs, arguments=arguments) + more)
    return path


def cpejax(*words, code=0) -> str:
    result = CliRunner().invoke(app, [str(w) for w in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())  # lines are as long as the terminal is wide


@pytest.fixture
def here(tmp_path, monkeypatch):
    plt.close("all")  # what other tests left open
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES, ids=[e.stem for e in EXAMPLES])
def test_graph_of_every_example(example, here):
    out = cpejax("graph", example, "--out", "figure.png")
    assert "Prior program" in out
    assert "Posterior program" in out
    assert "Wrote figure.png" in out
    assert (here / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_graph_prints_both_programs_and_writes_svg_by_default(here):
    out = cpejax("graph", HIERARCHICAL)
    assert re.search(r"beta mu, tau Normal · group\[8\]", out)
    assert re.search(r"y sigma, beta Simulator, data \(10,\) group\[8\]", out)
    assert re.search(r"beta tau, sigma, mu, y · group\[8\]", out)
    assert "Wrote graph.svg" in out
    first = (here / "graph.svg").read_bytes()
    assert b"<svg" in first
    cpejax("graph", HIERARCHICAL)
    assert (here / "graph.svg").read_bytes() == first  # the same program, the same file


def test_graph_takes_the_way_and_the_order_of_inversion(here):
    assert re.search(
        r"Posterior program site reads .* beta y · group\[8\]", cpejax("graph", HIERARCHICAL, "--how", "reverse")
    )
    leaf = cpejax("graph", HIERARCHICAL, "--order", "leaf")
    assert "Plate 'group' is unrolled: members of 'beta' depend on one another" in leaf


def test_a_model_file_may_define_arguments_and_observed(here):
    (here / "helper.py").write_text("SIZE = 4\n")
    model = write(
        here / "model.py",
        body="numpyro.sample('b', dist.Normal(0.0, scale).expand([n]).to_event(1))",
        obs="",
        arguments="n, *, scale",
        more="import helper\nargs = (helper.SIZE,)\nkwargs = {'scale': 2.0}\nobserved = ['y']\n",
    )
    out = cpejax("graph", model)
    assert re.search(r"b · Normal \(4,\)", out)
    assert re.search(r"y a Normal, data", out)


def test_a_terminal_without_the_letter_of_a_site(here):
    write(here / "model.py", body="numpyro.sample('θ', dist.Normal(0.0, 1.0))")
    result = CliRunner(charset="ascii").invoke(app, ["graph", "model.py"])
    assert result.exit_code == 0, result.exception
    assert "\\u03b8" in result.output


def test_help_says_what_a_model_is():
    out = cpejax("--help")
    assert "defines program" in out
    assert "observed" in out
    graph = cpejax("graph", "--help")
    for word in ("--out", "--how", "faithful|reverse", "--order", "prior|leaf", "--debug", "graph.svg"):
        assert word in graph


def test_tasks_lists_the_nine_with_their_dimensions():
    out = cpejax("tasks")
    for name in tasks.names():
        task = tasks.get(name)
        assert task.theta_dim + task.x_dim > 1
        assert re.search(rf"\b{name} {task.theta_dim} {task.x_dim} ", out), out
    assert "hierarchical 9 6 group[3]" in out
    assert "Greenberg" in out


def test_version():
    assert re.fullmatch(r"cpejax \d+\.\d+\.\d+.*", cpejax("--version"))


# ---- failures: one paragraph, no traceback


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "model.py does not exist. MODEL.py must be a Python file that defines `program`."),
        (
            "def model(): pass",
            "model.py defines no `program`, expected a NumPyro model.* Its functions are model: rename",
        ),
        ("program = 3", "model.py has a `program` that is a int, expected a NumPyro model"),
        ("def program(:", r"model.py cannot be loaded: SyntaxError: invalid syntax \(model.py, line 1\)"),
        ("import numppy", r"cannot be loaded: ModuleNotFoundError: No module named 'numppy' \(line 1: import numppy\)"),
        ("args = 3\ndef program(): pass", "model.py: `args` is a int, expected a tuple"),
        ("kwargs = 3\ndef program(): pass", "model.py: `kwargs` is a int, expected a dict"),
        ("def program(n): pass", r"takes other arguments .*'n'\). Define `args` \(a tuple\) or `kwargs`"),
        ("def program(): {}['key']", r"model.py: KeyError: 'key' \(line 1: def program"),
        ("def program(): pass", r"model.py: The program has no data"),
    ],
)
def test_models_that_fail(text, message, here):
    if text is not None:
        (here / "model.py").write_text(text)
    out = cpejax("graph", "model.py", code=1)
    assert re.search(message, out), out
    assert out.startswith("Error: ")
    assert "Traceback" not in out
    assert not (here / "graph.svg").exists()


def test_a_program_that_cannot_be_read_names_the_line(here):
    out = cpejax("graph", write(here / "model.py", body="print(1 if a > 0 else 2)"), code=1)
    assert re.search(r"after site 'a' \(model.py, line 5: print\(1 if a > 0 else 2\)\), takes a Python branch", out)


def test_observed_is_checked(here):
    out = cpejax("graph", write(here / "model.py", more="observed = ['z']\n"), code=1)
    assert re.search(r"observed names 'z', but the program has only the sites \['a', 'y'\]", out)


def test_an_unwritable_figure(here):
    out = cpejax("graph", HIERARCHICAL, "--out", "missing/graph.svg", code=1)
    assert re.search(r"Error: missing/graph.svg cannot be written: No such file or directory.*--out", out)
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "graph.pdf"], r"graph.pdf ends in '\.pdf'; a figure is \.svg or \.png"),
        (["--out", "graph"], r"graph has no suffix; a figure is \.svg or \.png"),
        (["--how", "naive"], "'naive' is not one of 'faithful', .*'reverse'"),
        (["--order", "none"], "'none' is not one of 'prior', .*'leaf'"),
    ],
)
def test_usage_errors_have_exit_code_2(words, message, here):
    out = cpejax("graph", HIERARCHICAL, *words, code=2).replace("│", "")
    assert re.search(message, " ".join(out.split())), out


def test_debug_shows_the_traceback(here):
    (here / "model.py").write_text("def program(): {}['key']")
    result = CliRunner().invoke(app, ["graph", "model.py", "--debug"])
    assert result.exit_code == 1
    assert isinstance(result.exception.__cause__, KeyError)
