"""What the checks found: ranks, coverage, posterior predictive intervals."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cpejax.diagnostics.check import Check, Predictive, bands, central, inner
from cpejax.plot.style import DRAWS, FAINT, INK, TRUTH, choose, legend, styled, window

# ---- checks


@styled
def ranks(check: Check, *, parameters: Sequence[str] | None = None, most: int = 24) -> Figure:
    """Rank histograms, and below each the ranks' distribution function minus the uniform one.

    The shaded band holds the whole curve with a probability that accounts for all tests of `cpe.check`: a curve that
    leaves it is not calibrated. Draws that are too narrow give a U, too wide a hill, and a gradient shows a bias. Of
    "given the data", where more ranks are high than low, the data tell more than the draws do.
    """
    more = {"joint": check.joint, "points (TARP)": check.tarp, "given the data": check.projection}
    findings = {"joint": "Coverage", "points (TARP)": "Joint coverage (TARP)", "given the data": "Use of the data"}
    if check.likelihood is not None:
        more["log-likelihood"], findings["log-likelihood"] = check.likelihood, "Likelihood"
    chosen, left_out = choose(check.ranks if parameters is None else {**check.ranks, **more}, parameters, most)
    chosen |= more if parameters is None else {}
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)
    figure, grid = plt.subplots(
        2 * rows, columns, figsize=(1.85 * columns, 2.1 * rows + 0.3), squeeze=False, height_ratios=[0.55, 1] * rows
    )
    outside = set(check.calibration.index[check.calibration["verdict"] != "calibrated"])
    failed = {finding.check for finding in check.findings if not finding.ok}
    outside |= {name for name, finding in findings.items() if finding in failed}
    for i in range(rows * columns):
        top, bottom = grid[2 * (i // columns), i % columns], grid[2 * (i // columns) + 1, i % columns]
        if i >= len(chosen):
            top.set_axis_off()
            bottom.set_axis_off()
            continue
        name = list(chosen)[i]
        colour = TRUTH if name in outside else DRAWS
        values, draws = chosen[name], check.likelihood_draws if name == "log-likelihood" else check.draws
        z, low, high = bands(len(values), draws, check.level / 2 / check.tests)
        bins = min(20, draws + 1)
        top.hist((values + 0.5) / (draws + 1), bins=bins, range=(0, 1), color=colour, alpha=0.6)
        top.axhline(len(values) / bins, color=FAINT, linewidth=0.8)
        top.set(title=name, xlim=(0, 1), xticks=[], yticks=[])
        top.spines[["left", "bottom"]].set_visible(False)
        at = np.round(z * (draws + 1)).astype(int) - 1
        difference = np.searchsorted(np.sort(values), at, side="right") / len(values) - z
        bottom.fill_between(z, low - z, high - z, color=FAINT, alpha=0.25, linewidth=0)
        bottom.plot(z, difference, color=colour, linewidth=1.2)
        bottom.axhline(0, color=FAINT, linewidth=0.6)
        reach = max(1.15 * float((high - z).max()), 1.1 * float(np.abs(difference).max()))
        bottom.set(xlim=(0, 1), ylim=(-reach, reach), xticks=[0, 0.5, 1], xticklabels=["0", "½", "1"])
        bottom.yaxis.set_major_locator(MaxNLocator(3, symmetric=True))
        if i % columns == 0:
            bottom.set_ylabel("ECDF − uniform")
        if i >= len(chosen) - columns:
            bottom.set_xlabel("rank of the truth")
    legend(figure, [("outside the band", TRUTH, "-")] if outside & set(chosen) else [], left_out)
    return figure


@styled
def coverage(check: Check, *, parameters: Sequence[str] | None = None) -> Figure:
    """How often credible regions hold the true value, against their nominal level.

    Thin lines are the central intervals of single parameters, the thick one ellipsoids of the joint posterior. Below
    the diagonal the posterior is too narrow.
    """
    figure, ax = plt.subplots(figsize=(3.9, 3.6))
    levels = np.linspace(0, 1, 101)
    chosen, _ = choose(check.ranks, parameters, 10**6)
    wide = 1.96 * np.sqrt(levels * (1 - levels) / check.n)
    ax.fill_between(levels, levels - wide, levels + wide, color=FAINT, alpha=0.3, linewidth=0)
    ax.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8)
    for i, ranks in enumerate(chosen.values()):
        curve = central(ranks, check.draws, levels)
        ax.plot(levels, curve, color=DRAWS, linewidth=0.8, alpha=0.7, label="single parameters" if i == 0 else None)
    ax.plot(levels, inner(check.joint, check.draws, levels), color=INK, linewidth=1.8, label="joint")
    ax.text(0.96, 0.05, "too narrow", ha="right", color=FAINT)
    ax.text(0.04, 0.93, "too wide", color=FAINT)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="nominal level", ylabel="share of true values inside")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.1))
    return figure


@styled
def predictive(check: Check | Predictive, *, most: int = 12) -> Figure:
    """Data drawn from the posterior beside the observed ones: value by value, and summary statistics."""
    found = check.predictive if isinstance(check, Check) else check
    if found is None:
        raise ValueError("This check has no predictive part: call cpe.check(posterior, given={...}) with the data.")
    curves = [name for name, x in found.observed.items() if 2 <= x.size <= 400]
    table = found.statistics.iloc[:most]
    columns = min(5, max(1, len(table)))
    rows = -(-len(table) // columns)
    figure = plt.figure(figsize=(7.4, 2.0 * len(curves) + 1.5 * rows + 0.3))
    grid = figure.add_gridspec(len(curves) + rows, columns, height_ratios=[1.5] * len(curves) + [1.0] * rows)
    for i, name in enumerate(curves):
        _bands(figure.add_subplot(grid[i, :]), name, found.replicates[name], found.observed[name])
    for i, row in enumerate(table.itertuples()):
        ax = figure.add_subplot(grid[len(curves) + i // columns, i % columns])
        x = found.values[i]
        ax.hist(x, bins=30, range=window([x], row.observed), color=DRAWS, alpha=0.6)
        ax.axvline(row.observed, color=TRUTH, linewidth=1.5)
        ax.set_title(f"{row.statistic} of {row.site}" if row.statistic != "value" else str(row.site))
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(3))
    legend(figure, [("drawn from the posterior", DRAWS, "-"), ("observed", TRUTH, "-")], len(found.statistics) - most)
    return figure


def _bands(ax: Axes, name: str, replicates: np.ndarray, observed: np.ndarray) -> None:
    """50 and 90 % of the replicates at each position, and what was observed."""
    flat, seen = replicates.reshape(len(replicates), -1), observed.ravel()
    q = np.quantile(flat, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
    at = np.arange(len(seen))
    if observed.ndim == 1 and len(seen) >= 16:  # a series
        ax.fill_between(at, q[0], q[4], color=DRAWS, alpha=0.2, linewidth=0)
        ax.fill_between(at, q[1], q[3], color=DRAWS, alpha=0.35, linewidth=0)
        ax.plot(at, q[2], color=DRAWS, linewidth=1)
    else:
        ax.vlines(at, q[0], q[4], color=DRAWS, linewidth=1, alpha=0.7)
        ax.vlines(at, q[1], q[3], color=DRAWS, linewidth=3, alpha=0.7)
    ax.plot(at, seen, "o", color=TRUTH, markersize=2.6 if len(seen) > 30 else 4)
    ax.set_title(name)
    ax.margins(x=0.02)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if observed.ndim > 1:  # what follows one another belongs together
        for edge in range(observed.shape[-1], len(seen), observed.shape[-1]):
            ax.axvline(edge - 0.5, color=FAINT, linewidth=0.5, alpha=0.5)
