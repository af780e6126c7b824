"""The report: one HTML file that needs nothing else, neither network nor scripts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd
import xarray as xr

from cpejax import plot
from cpejax.diagnostics.check import Check
from cpejax.diagnostics.words import percent
from cpejax.inference.posterior import Posterior
from cpejax.plot.style import scalars
from cpejax.program.graph import Graph
from cpejax.program.inverse import invert
from cpejax.runs.page_figures import PageFigure, PageFigures
from cpejax.runs.result_files import versions
from cpejax.runs.summary import places, summarise
from cpejax.util.files import write_atomically

ROWS, MOST_ROWS = 40, 1000
"""Rows of a table before the rest is folded away, and before the rest is left out."""
MOST_SITES = 60
"""Sites in the drawing of a graph."""
MOST_PRIOR = 10_000
"""Draws that the prior's densities are made of."""
SHOWN = {"Ranks (SBC)", "Coverage", "Posterior predictive"}
"""Checks whose figures have a place of their own on the page; those of others come after them."""
LABELS = {"q05": "5 %", "q25": "25 %", "q75": "75 %", "q95": "95 %"}


def report(
    posterior: Posterior,
    draws: xr.DataTree,
    check: Check,
    path: str | Path,
    *,
    simulations: Mapping[str, Any] | None = None,
    truth: Mapping[str, Any] | None = None,
    model_file: str | Path | None = None,
    command: str | None = None,
    seeds: Mapping[str, int] | None = None,
    stages: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a report of a posterior: one HTML file, which needs neither network nor scripts.

    It shows the checks, a summary and figures of the draws, whether the model describes the data and the posterior is
    calibrated, the model's graph, the training, and how to repeat all this. `cpejax infer` writes the same.

    **Arguments:**

    - `posterior`: from `cpe.fit` or `cpe.load`.
    - `draws`: from `posterior.sample`, for one observation or for many.
    - `check`: from `cpe.check`; made without `given`, it has nothing to tell of the data.
    - `path`: the file to write; an older one is replaced.
    - `simulations`: from `cpe.simulate`, or parameters drawn from the prior, `{parameter: (n, *shape)}`: their
        densities are shown beside the posterior's.
    - `truth`: the true values, `{parameter: array}`, if they are known and there is one observation.
    - `model_file`: a Python file whose text is shown.
    - `command`: the commands that make these draws again.
    - `seeds`: that decided the random numbers, `{stage: seed}`.
    - `stages`: of which the work consisted, `{stage: {"seconds": seconds, "at": when it was finished}}`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> given = {"y": [0.3, 1.2, -0.4]}
    >>> draws = posterior.sample(50, given, key=jax.random.key(2))
    >>> check = cpe.check(posterior, given, n=20, draws=20, key=jax.random.key(3))
    >>> path = Path(tempfile.mkdtemp()) / "report.html"
    >>> cpe.report(posterior, draws, check, path, simulations=simulations)
    >>> "mu given y" in path.read_text()
    True
    """
    graph = posterior.graph
    tree = _drawn(draws, graph)
    many = "observation" in tree.dims
    _check_truth(truth, graph, many)
    prior = None if simulations is None else {n: np.asarray(simulations[n])[:MOST_PRIOR] for n in graph.parameters}
    file = None if model_file is None else Path(model_file)
    figures, made_by, history = PageFigures(), versions(), posterior.history
    title = f"{', '.join(graph.parameters)} given {', '.join(graph.data)}"
    page = _environment().get_template("report.html")
    text = page.render(
        title=title if len(title) <= 80 else f"{len(graph.parameters)} parameters given {len(graph.data)} data",
        made=[
            *([] if file is None else [file.name]),
            f"cpejax {made_by['cpejax']}",
            datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        ],
        check=check,
        failed=sum(not finding.ok for finding in check.findings),
        draws=tree.sizes["draw"] * tree.sizes["chain"],
        refined=_refined(tree.attrs),
        observations=tree.sizes["observation"] if many else None,
        summary=_table(summarise(draws, graph, truth).reset_index().rename(columns=LABELS)),
        posterior_figures=_each(figures, tree, graph) if many else _one(figures, tree, graph, prior, truth),
        data_figures=_data(figures, check),
        statistics=None if check.predictive is None else _table(check.predictive.statistics),
        calibration_figures=_calibration(figures, check),
        calibration=_table(check.calibration.reset_index()),
        model_figures=_model(figures, graph),
        programs=[str(graph), str(invert(graph))],
        model_file=file,
        source=None if file is None else _text(file),
        posterior=posterior,
        history=history,
        method=type(posterior.method).__name__,
        training_figures=[
            figures.add(
                lambda: plot.training(history),
                f"Losses of training and validation over {len(history.train)} epochs; the best is {history.best:.4g}.",
                "Losses of training and validation.",
            )
        ],
        settings={**vars(posterior.settings), "method": repr(posterior.method)[:400]},
        command=command,
        seeds=_seeds(seeds or {}),
        key=[int(word) for word in tree.attrs.get("key", ())],  # an array, if the draws come from a file
        versions=made_by,
        stages=_stages(stages or {}),
    )
    write_atomically(Path(path), text.encode())


def _refined(attributes: Mapping[str, Any]) -> str:
    """How draws of one observation were refined, in a sentence."""
    names = ("refined", "pareto_k", "effective_sample_size", "log_evidence", "log_evidence_error")
    how, k, size, evidence, error = (attributes.get(name) for name in names)
    if not how or not isinstance(k, float):
        return ""
    return (
        f"They were refined {how}: an effective sample size of {size:.0f} before moves, a Pareto k of {k:.2f} "
        f"(good below 0.7), and a log evidence of {evidence:.3f} ± {error:.3f}. The checks are of draws that are not "
        "refined."
    )


def _drawn(draws: xr.DataTree, graph: Graph) -> xr.Dataset:
    found = draws["posterior"].dataset if "posterior" in draws.children else xr.Dataset()
    if not any(name in found for name in graph.parameters):
        raise ValueError(
            f"draws has the groups {sorted(map(str, draws.children))} and none of the parameters "
            f"{', '.join(graph.parameters)} in `posterior`; expected is what posterior.sample returns."
        )
    return found


def _check_truth(truth: Mapping[str, Any] | None, graph: Graph, many: bool) -> None:
    if truth is not None and many:
        raise ValueError("truth was given, but draws are of many observations: leave it out, or report on one.")
    for name, x in (truth or {}).items():
        if np.shape(x) != graph.shapes.get(name):
            expected = ", ".join(f"'{n}' of shape {graph.shapes[n]}" for n in graph.parameters)
            raise ValueError(f"truth['{name}'] has shape {np.shape(x)}; expected are {expected}.")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cpejax.runs"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"capital": lambda sentence: sentence[:1].upper() + sentence[1:], "percent": percent}
    environment.globals["zip"] = zip
    return environment


# ---- figures


def _one(
    figures: PageFigures,
    tree: xr.Dataset,
    graph: Graph,
    prior: Mapping[str, np.ndarray] | None,
    truth: Mapping[str, Any] | None,
) -> list[PageFigure]:
    """The posterior of one observation."""
    everything = scalars(tree)
    names = list(everything)
    words = "; ".join(f"{name}: {x.mean():.3g} ± {x.std():.2g}" for name, x in list(everything.items())[:12])
    beside = [*(["the prior"] if prior is not None else []), *(["the true values"] if truth is not None else [])]
    out = [
        figures.add(
            lambda: plot.marginals(tree, prior=prior, truth=truth),
            f"Densities of the parameters{'' if prior is None else ', posterior and prior'}. "
            f"Mean and standard deviation: {words}.",
            f"Marginal densities of the posterior{', with ' if beside else ''}{' and '.join(beside)}.",
        )
    ]
    if any(site.plates for site in graph.sites.values()) or len(names) > 8:
        out.append(
            figures.add(
                lambda: plot.forest(tree, truth=truth),
                f"Medians and 50 and 90 % intervals of {len(names)} parameters, one line each.",
                "Medians, and central intervals of 50 and 90 %.",
            )
        )
    if len(names) > 1:
        out.append(
            figures.add(
                lambda: plot.pair(tree, truth=truth),
                "Joint densities of pairs of parameters. " + _correlations(everything),
                "Pairs of parameters: regions that hold 50, 80 and 95 % of the draws.",
            )
        )
    return out


def _correlations(draws: Mapping[str, np.ndarray], most: int = 6) -> str:
    names = sorted(draws, key=lambda name: "[" in name)[:most]
    if len(names) < 2:
        return ""
    matrix = np.corrcoef(np.stack([draws[name] for name in names]))
    _, i, j = max((abs(matrix[i, j]), i, j) for i in range(len(names)) for j in range(i))
    return f"The strongest correlation is {matrix[i, j]:.2f}, of {names[j]} and {names[i]}."


def _each(figures: PageFigures, tree: xr.Dataset, graph: Graph, most: int = 8) -> list[PageFigure]:
    """The posteriors of many observations: those of the scalar parameters, or of each site's first member."""
    n = tree.sizes["observation"]
    drawn = [name for name in graph.parameters if name in tree]
    names = [name for name in drawn if not graph.sites[name].shape] or drawn
    out = []
    for name in names[:most]:
        flat = tree[name].values.reshape(tree.sizes["chain"] * tree.sizes["draw"], n, -1)[:, :, 0]
        rows = {f"observation {i}": flat[:, i] for i in range(n)}
        out.append(
            figures.add(
                functools.partial(plot.forest, rows, parameters=list(rows)),
                f"Medians and intervals of {name} for {n} observations.",
                f"{name}: median, 50 and 90 % intervals for each observation.",
            )
        )
    return out


def _data(figures: PageFigures, check: Check) -> list[PageFigure]:
    if check.predictive is None:
        return []
    statistics = "; ".join(
        f"{row.statistic} of {row.site} {row.observed:.3g}, drawn median {row.median:.3g}"
        for row in check.predictive.statistics.itertuples()
    )
    return [
        figures.add(
            lambda: plot.predictive(check),
            f"Data drawn from the posterior and the observed data: {statistics}",
            "Posterior predictive check: 50 and 90 % of data drawn from the posterior, and what was observed.",
        )
    ]


def _calibration(figures: PageFigures, check: Check) -> list[PageFigure]:
    bad = [name for name, verdict in check.calibration["verdict"].items() if verdict != "calibrated"]
    words = f"Outside the band: {', '.join(bad)}." if bad else "All parameters stay inside the band."
    ninety = check.calibration["90%"]
    return [
        figures.add(
            lambda: plot.ranks(check),
            f"Rank histograms and differences of the ranks' distribution functions from the uniform one. {words}",
            "Ranks of the true values, and their distribution function minus the uniform one. A curve outside the "
            "shaded band is not calibrated: an S that rises first means too narrow, one that falls first too wide, and "
            "an arch a shift.",
        ),
        figures.add(
            lambda: plot.coverage(check),
            f"Coverage of credible regions against their level. 90 % intervals hold {percent(ninety.min())} to "
            f"{percent(ninety.max())} of the true values.",
            "How often credible regions hold the true value.",
        ),
        *(
            figures.add(functools.partial(plot.finding, check, name), check[name].sentence, name)
            for name in check.figures
            if name not in SHOWN
        ),
    ]


def _model(figures: PageFigures, graph: Graph) -> list[PageFigure]:
    posterior = invert(graph)
    if len(posterior.graph.sites) > MOST_SITES:
        return []
    return [
        figures.add(
            lambda: plot.graph(graph, posterior),
            f"The prior program ({_edges(graph.parents)}) and the posterior program ({_edges(posterior.parents)}).",
            "Left: what each site depends on (data are shaded). Right: what each parameter reads when it is drawn from "
            "the posterior.",
        )
    ]


def _edges(parents: Mapping[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{name} from {', '.join(ps)}" for name, ps in list(parents.items())[:20] if ps)


# ---- texts and tables


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _seeds(seeds: Mapping[str, int]) -> str:
    if len(set(seeds.values())) <= 1:
        return "".join(str(seed) for seed in set(seeds.values()))
    return ", ".join(f"{seed} of {stage}" for stage, seed in seeds.items())


def _stages(stages: Mapping[str, Mapping[str, Any]]) -> Table | None:
    rows = [{"stage": name, "seconds": done["seconds"], "finished": done["at"]} for name, done in stages.items()]
    return _table(pd.DataFrame(rows)) if rows else None


class Column(NamedTuple):
    """A column of a table, of texts or of numbers."""

    name: str
    text: bool


class Table(NamedTuple):
    """A table of cells as they are printed; `more` are rows that are folded away."""

    columns: list[Column]
    rows: list[list[str]]
    more: list[list[str]]


def _table(frame: pd.DataFrame) -> Table:
    columns = [Column(str(name), not pd.api.types.is_numeric_dtype(frame[name])) for name in frame]
    rows = []
    for row in frame.iloc[:MOST_ROWS].itertuples(index=False):
        decimals = places(row.sd) if "sd" in frame else None
        cells = zip(columns, row, strict=True)
        rows.append([str(value) if column.text else _number(value, decimals) for column, value in cells])
    return Table(columns, rows[:ROWS], rows[ROWS:])


def _number(value: Any, decimals: int | None) -> str:
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if not np.isfinite(value):
        return "·"
    text = f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"
    return text.replace("-", "−")
