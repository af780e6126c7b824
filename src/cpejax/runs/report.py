"""The report of a run: one HTML file that needs nothing else, neither network nor scripts."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure

from cpejax import plot
from cpejax.diagnostics.check import Check
from cpejax.diagnostics.words import percent
from cpejax.inference.posterior import Posterior
from cpejax.plot.style import INK, PAPER, PLATE, SHADE, scalars
from cpejax.program.graph import Graph
from cpejax.program.inverse import invert

ROWS = 40  # of a table, before the rest is folded away
MOST_SITES = 60  # in the drawing of a graph
# Colours of the figures that follow the page's; the others are seen on light and on dark.
COLOURS = {INK: "var(--ink)", PAPER: "var(--paper)", SHADE: "var(--shade)", PLATE: "var(--muted)"}


@dataclass(frozen=True, eq=False)
class Report:
    """What a report tells."""

    model: Path
    graph: Graph
    posterior: Posterior
    draws: xr.DataTree
    check: Check
    prior: Mapping[str, np.ndarray]
    truth: Mapping[str, np.ndarray] | None
    summary: pd.DataFrame
    command: str
    versions: Mapping[str, str]
    seeds: Mapping[str, int]
    record: Mapping[str, Any]


def render(report: Report) -> str:
    """The page."""
    title = f"{', '.join(report.graph.parameters)} given {', '.join(report.graph.data)}"
    title = (
        title if len(title) <= 80 else f"{len(report.graph.parameters)} parameters given {len(report.graph.data)} data"
    )
    pictures = _Pictures()
    sections = [
        _section("Posterior", _numbers(report) + _posterior(report, pictures), "posterior"),
        _section("Does the model describe the data?", _data(report, pictures), "data"),
        _section("Is the posterior calibrated?", _calibration(report, pictures), "calibration"),
        _section("Model", _model(report, pictures), "model"),
        _section("Training", _training(report, pictures), "training"),
        _section("How to repeat this", _repeat(report), "repeat"),
    ]
    day = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    made = f"{escape(report.model.name)} · cpejax {escape(report.versions['cpejax'])} · {day}"
    return PAGE.format(
        title=escape(title), style=STYLE, made=made, verdict=_verdict(report.check), sections="\n".join(sections)
    )


def _section(title: str, body: str, name: str) -> str:
    return f'<details open class="section" id="{name}"><summary><h2>{escape(title)}</h2></summary>\n{body}\n</details>'


def _verdict(check: Check) -> str:
    items = "".join(
        f'<li class="{"ok" if f.ok else "bad"}"><span class="mark" aria-hidden="true">{"✓" if f.ok else "✗"}</span>'
        f"<span><strong>{escape(f.check)}{'' if f.ok else ' (failed)'}.</strong> "
        f"{escape(_capital(f.sentence))}</span></li>"
        for f in check.findings
    )
    failed = sum(not f.ok for f in check.findings)
    head = "All checks passed" if not failed else f"{failed} of {len(check.findings)} checks failed"
    level = f"Level {percent(check.level, 0)} for all tests together: of right posteriors, at most that share fails."
    kind = "ok" if not failed else "bad"
    return (
        f'<section class="verdict {kind}" aria-label="Checks"><h2>{head}</h2><ul>{items}</ul>'
        f'<p class="small">{escape(level)}</p></section>'
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


# ---- sections


def _numbers(report: Report) -> str:
    frame = report.summary.reset_index().rename(columns={"q05": "5 %", "q25": "25 %", "q75": "75 %", "q95": "95 %"})
    draws = report.draws["posterior"].sizes["draw"] * report.draws["posterior"].sizes["chain"]
    return f"<p>{draws:,} draws from the posterior.</p>" + _table(frame)


def _posterior(report: Report, pictures: _Pictures) -> str:
    tree = report.draws["posterior"].dataset
    if "observation" in tree.dims:
        return _many(report, pictures)
    everything = scalars(tree)
    names = list(everything)
    words = "; ".join(f"{name}: {x.mean():.3g} ± {x.std():.2g}" for name, x in list(everything.items())[:12])
    out = pictures.add(
        lambda: plot.marginals(tree, prior=report.prior, truth=report.truth),
        f"Densities of the parameters, posterior and prior. Mean and standard deviation: {words}.",
        "Marginal densities of the posterior, with the prior"
        + (" and the true values." if report.truth is not None else "."),
    )
    if any(site.plates for site in report.graph.sites.values()) or len(names) > 8:
        out += pictures.add(
            lambda: plot.forest(tree, truth=report.truth),
            f"Medians and 50 and 90 % intervals of {len(names)} parameters, one line each.",
            "Medians, and central intervals of 50 and 90 %.",
        )
    if len(names) > 1:
        out += pictures.add(
            lambda: plot.pair(tree, truth=report.truth),
            "Joint densities of pairs of parameters. " + _correlations(everything),
            "Pairs of parameters: regions that hold 50, 80 and 95 % of the draws.",
        )
    return out


def _correlations(draws: Mapping[str, np.ndarray], most: int = 6) -> str:
    names = sorted(draws, key=lambda name: "[" in name)[:most]
    if len(names) < 2:
        return ""
    matrix = np.corrcoef(np.stack([draws[name] for name in names]))
    pairs = [(abs(matrix[i, j]), i, j) for i in range(len(names)) for j in range(i)]
    _, i, j = max(pairs)
    return f"The strongest correlation is {matrix[i, j]:.2f}, of {names[j]} and {names[i]}."


def _many(report: Report, pictures: _Pictures, most: int = 8) -> str:
    tree = report.draws["posterior"].dataset
    n = tree.sizes["observation"]
    out = f"<p>There are {n:,} observations; each has its own posterior.</p>"
    names = [name for name in report.graph.parameters if not report.graph.sites[name].shape]
    names = names or list(report.graph.parameters)
    for name in names[:most]:
        x = tree[name].values.reshape(-1, *tree[name].shape[2:])
        flat = x.reshape(len(x), n, -1)[:, :, 0]
        rows = {f"observation {i}": flat[:, i] for i in range(n)}
        out += pictures.add(
            functools.partial(plot.forest, rows, parameters=list(rows)),
            f"Medians and intervals of {name} for {n} observations.",
            f"{name}: median, 50 and 90 % intervals for each observation.",
        )
    return out


def _data(report: Report, pictures: _Pictures) -> str:
    check, out = report.check, ""
    if check.typicality is not None:
        out += f"<p>{escape(_capital(check.typicality.finding.sentence))}</p>"
    if check.predictive is not None:
        out += f"<p>{escape(_capital(check.predictive.finding.sentence))}</p>"
        out += pictures.add(
            lambda: plot.predictive(check),
            "Data drawn from the posterior and the observed data: "
            + "; ".join(
                f"{row.statistic} of {row.site} {row.observed:.3g}, drawn median {row.median:.3g}"
                for row in check.predictive.statistics.itertuples()
            ),
            "Posterior predictive check: 50 and 90 % of data drawn from the posterior, and what was observed.",
        )
        out += _folded("Statistics", _table(check.predictive.statistics))
    return out


def _calibration(report: Report, pictures: _Pictures) -> str:
    check = report.check
    bad = [name for name, verdict in check.calibration["verdict"].items() if verdict != "calibrated"]
    words = f"Outside the band: {', '.join(bad)}." if bad else "All parameters stay inside the band."
    out = (
        f"<p>{check.n:,} observations were simulated, with known parameters, and {check.draws:,} draws made for each. "
        "If the posterior is right, the rank of the true value among the draws is uniform.</p>"
    )
    out += pictures.add(
        lambda: plot.ranks(check),
        f"Rank histograms and differences of the ranks' distribution functions from the uniform one. {words}",
        "Ranks of the true values, and their distribution function minus the uniform one. A curve outside the shaded "
        "band is not calibrated: an S that rises first means too narrow, one that falls first too wide, and an arch a "
        "shift.",
    )
    ninety = check.calibration["90%"]
    out += pictures.add(
        lambda: plot.coverage(check),
        f"Coverage of credible regions against their level. 90 % intervals hold {percent(ninety.min())} to "
        f"{percent(ninety.max())} of the true values.",
        "How often credible regions hold the true value.",
    )
    shown = {"Ranks (SBC)", "Coverage", "Posterior predictive"}
    for name in check.figures:
        if name not in shown:
            out += pictures.add(functools.partial(plot.finding, check, name), check[name].sentence, name)
    return out + _folded("Numbers", _table(check.calibration.reset_index()))


def _model(report: Report, pictures: _Pictures) -> str:
    graph, posterior = report.graph, invert(report.graph)
    out = ""
    if len(posterior.graph.sites) <= MOST_SITES:
        out += pictures.add(
            lambda: plot.graph(graph, posterior),
            f"The prior program ({_edges(graph.parents)}) and the posterior program ({_edges(posterior.parents)}).",
            "Left: what each site depends on (data are shaded). Right: what each parameter reads when it is drawn from "
            "the posterior.",
        )
    out += f"<pre>{escape(str(graph))}</pre><pre>{escape(str(posterior))}</pre>"
    try:
        source = report.model.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return out
    return out + _folded(report.model.name, f"<pre>{escape(source)}</pre>")


def _edges(parents: Mapping[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{name} from {', '.join(ps)}" for name, ps in list(parents.items())[:20] if ps)


def _training(report: Report, pictures: _Pictures) -> str:
    posterior, history = report.posterior, report.posterior.history
    kind = type(posterior.method).__name__
    out = (
        f"<p>{escape(kind)} with {posterior.weights:,} weights, trained on {posterior.n_simulations:,} simulations for "
        f"{len(history.train):,} epochs ({escape(history.stopped)}); the weights of epoch {history.best_epoch + 1} "
        f"were kept.</p><p>{'' if history.informed else '<strong>No better than the prior.</strong> '}"
        f"{escape(history.score)}</p>"
    )
    out += pictures.add(
        lambda: plot.training(history),
        f"Losses of training and validation over {len(history.train)} epochs; the best is {history.best:.4g}.",
        "Losses of training and validation.",
    )
    settings = {**vars(posterior.settings), "method": repr(posterior.method)[:400]}
    return out + _folded("Settings", _pairs(settings))


def _repeat(report: Report) -> str:
    stages = report.record.get("stages", {})
    out = f"<pre>{escape(report.command)}</pre>" if report.command else ""
    seeds = set(report.seeds.values())
    words = (
        ", ".join(f"{seed} of {stage}" for stage, seed in report.seeds.items()) if len(seeds) > 1 else f"{min(seeds)}"
    )
    out += f"<p>Seed {words}. The same command, versions and kind of machine give the same values.</p>"
    out += _pairs(report.versions)
    rows = [{"stage": name, "seconds": done["seconds"], "finished": done["at"]} for name, done in stages.items()]
    return out + (_table(pd.DataFrame(rows)) if rows else "")


# ---- pieces


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in values.items())
    return f"<dl>{rows}</dl>"


def _table(frame: pd.DataFrame) -> str:
    numeric = {name: pd.api.types.is_numeric_dtype(frame[name]) for name in frame}
    head = "".join(
        f'<th scope="col"{"" if numeric[name] else " class=text"}>{escape(str(name))}</th>' for name in frame
    )

    def rows(part: pd.DataFrame) -> str:
        out = []
        for row in part.itertuples(index=False):
            decimals = places(row.sd) if "sd" in part else None
            cells = [
                f"<td>{_number(value, decimals)}</td>"
                if numeric[name]
                else f'<td class="text">{escape(str(value))}</td>'
                for name, value in zip(frame, row, strict=True)
            ]
            out.append(f"<tr>{''.join(cells)}</tr>")
        return "".join(out)

    def table(part: pd.DataFrame) -> str:
        # A region that scrolls must be reachable by keyboard.
        return (
            f'<div class="wide" tabindex="0" role="region" aria-label="Table"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows(part)}</tbody></table></div>"
        )

    most = 1000
    out = table(frame.iloc[:ROWS])
    if len(frame) > ROWS:
        out += _folded(f"{min(len(frame), most) - ROWS:,} more rows", table(frame.iloc[ROWS:most]))
    return out


def places(sd: float) -> int | None:
    """Decimals that show three digits of a standard deviation, and of all numbers beside it; none if it is extreme."""
    return max(0, 2 - math.floor(math.log10(sd))) if np.isfinite(sd) and 1e-6 < sd < 1e6 else None


def _number(value: Any, decimals: int | None = None) -> str:
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if not np.isfinite(value):
        return "·"
    text = f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"
    return text.replace("-", "−")


class _Pictures:
    """Figures as SVG inside the page."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, draw: Callable[[], Figure], words: str, caption: str) -> str:
        """A figure with its description for those who do not see it, and a caption."""
        self.count += 1
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cpejax"}):
            figure = draw()
            try:
                buffer = io.StringIO()
                figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
                width = figure.get_figwidth()
            finally:
                plt.close(figure)
        svg = self._inline(buffer.getvalue(), words, width)
        return (
            f'<figure><div class="wide" tabindex="0" role="region" aria-label="Figure {self.count}">{svg}</div>'
            f"<figcaption>{escape(caption)}</figcaption></figure>\n"
        )

    def _inline(self, svg: str, words: str, width: float) -> str:
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        # Names inside a page are unique.
        mark = f"f{self.count}-"
        svg = re.sub(r'\bid="', f'id="{mark}', svg)
        svg = re.sub(r"url\(#", f"url(#{mark}", svg)
        svg = re.sub(r'xlink:href="#', f'xlink:href="#{mark}', svg)
        for colour, variable in COLOURS.items():
            svg = svg.replace(colour, variable)
        head = re.match(r"<svg[^>]*>", svg)
        box = re.search(r'viewBox="([^"]*)"', head.group()) if head else None
        if head is None or box is None:
            raise RuntimeError("matplotlib wrote an SVG without a viewBox.")
        start = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{box.group(1)}" role="img" aria-label="{escape(words)}" style="max-width: {width * 1.25:.1f}in; '
            f'min-width: min({width * 0.8:.1f}in, 34rem)">'
        )
        return start + svg[head.end() :]


STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --shade: #d3d7dc; --muted: #5d6470; --line: #dfe3e8;
  --raised: #f6f7f9; --ok: #1b7f4d; --bad: #c92a2a; --bad-raised: #fff1f0; --link: #2563b0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #14171c; --shade: #4a515c; --muted: #a0a8b4; --line: #2c323a; --raised: #1c2128;
    --ok: #4cc38a; --bad: #ff8787; --bad-raised: #2b1a1c; --link: #7fb2f0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0; display: inline; }
p { max-width: 44rem; } .small, .made { color: var(--muted); font-size: .875rem; } .made { margin: .3rem 0 1.2rem; }
nav { margin: 1rem 0; display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; } a { color: var(--link); }
.verdict { border: 1px solid var(--line); border-left: .35rem solid var(--ok); border-radius: .4rem;
  padding: .8rem 1rem; background: var(--raised); }
.verdict.bad { border-left-color: var(--bad); background: var(--bad-raised); }
.verdict ul { list-style: none; padding: 0; margin: .6rem 0 0; } .verdict p { margin: .5rem 0 0; }
.verdict li { display: flex; gap: .6rem; margin: .35rem 0; } .ok .mark { color: var(--ok); }
li.bad .mark, li.bad strong { color: var(--bad); } .mark { font-weight: 700; }
details.section { border-top: 1px solid var(--line); margin-top: 1.6rem; padding-top: 1rem; }
summary { cursor: pointer; } details details { margin: .8rem 0; } details details > summary { color: var(--link); }
figure { margin: 1.4rem 0; }
figcaption { color: var(--muted); font-size: .875rem; max-width: 44rem; margin-top: .3rem; }
.wide { overflow-x: auto; } svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; margin: .6rem 0; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--muted); font-weight: 600; } .text { text-align: left; }
pre { background: var(--raised); border: 1px solid var(--line); border-radius: .4rem; padding: .7rem .9rem;
  overflow-x: auto;
  font: .8125rem/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media print {
  :root { --ink: #000; --paper: #fff; --raised: #fff; --muted: #444; --line: #bbb; --shade: #d3d7dc; --ok: #1b7f4d;
    --bad: #c92a2a; --bad-raised: #fff; --link: #2563b0; }
  body { max-width: none; padding: 0; font-size: 10.5pt; } nav { display: none; } figure, tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; } .wide { overflow: visible; }
  pre { white-space: pre-wrap; } svg { min-width: 0 !important; } }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="made">{made}</p></header>
<main>
{verdict}
<nav aria-label="Sections">
<a href="#posterior">Posterior</a><a href="#data">Data</a><a href="#calibration">Calibration</a>
<a href="#model">Model</a><a href="#training">Training</a><a href="#repeat">Repeat</a></nav>
{sections}
</main>
</body>
</html>
"""
