"""Figures of draws: marginals, pairs, intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from arviz_stats.base.array import array_stats
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import gaussian_filter

from cpejax.plot.style import (
    DRAWS,
    FAINT,
    PAPER,
    PRIOR,
    REFERENCE,
    TRUTH,
    Draws,
    choose,
    chosen_scalars,
    chosen_truth,
    grid,
    legend,
    scalars,
    styled,
    window,
)

# ---- draws


@styled
def marginals(
    draws: Draws,
    *,
    prior: Draws | None = None,
    truth: Mapping[str, Any] | None = None,
    reference: Draws | None = None,
    parameters: Sequence[str] | None = None,
    most: int = 24,
) -> Figure:
    """The density of each parameter.

    **Arguments:**

    - `draws`: a DataTree from `Posterior.sample`, or `{parameter: (n, *shape)}`.
    - `prior`: draws from the prior, such as `cpe.simulate` returns.
    - `truth`: the true values, `{parameter: array}`, if they are known.
    - `reference`: draws from another sampler to compare with.
    - `parameters`: names of sites, or of single scalars as `"beta[3]"`; all if left out.
    - `most`: the maximum number that is drawn; the title says how many were left out.

    **Returns:** a matplotlib figure.
    """
    chosen, left_out = choose(scalars(draws), parameters, most)
    before, other = chosen_scalars(prior, chosen), chosen_scalars(reference, chosen)
    true = chosen_truth(truth, chosen)
    columns = min(4, len(chosen))
    figure, axes = grid(len(chosen), columns, (1.8, 1.45))
    for ax, (name, x) in zip(axes, chosen.items(), strict=True):
        low, high = window([x, *([other[name]] if name in other else [])], true.get(name))
        if name in before:
            _density(ax, before[name], PRIOR, fill=False, window=(low, high), line=(0, (4, 2)))
        _density(ax, x, DRAWS, fill=True)
        if name in other:
            _density(ax, other[name], REFERENCE, fill=False)
        if name in true:
            ax.axvline(true[name], color=TRUTH, linewidth=1.4)
        ax.set(title=name, xlim=(low, high), yticks=[])
        ax.set_ylim(bottom=0)
        ax.spines["left"].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(4))
    entries = [("posterior", DRAWS, "-")]
    entries += [("prior", PRIOR, "--")] if before else []
    entries += [("reference", REFERENCE, "-")] if other else []
    entries += [("truth", TRUTH, "-")] if true else []
    legend(figure, entries, left_out)
    return figure


@styled
def pair(
    draws: Draws,
    *,
    truth: Mapping[str, Any] | None = None,
    reference: Draws | None = None,
    parameters: Sequence[str] | None = None,
    most: int = 6,
) -> Figure:
    """The density of each pair of parameters: regions that hold 50, 80 and 95 % of the draws.

    **Arguments:** as for `cpe.plot.marginals`. By default parameters outside plates come first.

    **Returns:** a matplotlib figure.
    """
    chosen, left_out = choose(scalars(draws), parameters, most)
    other, true = chosen_scalars(reference, chosen), chosen_truth(truth, chosen)
    names = list(chosen)
    k = len(names)
    size = min(1.9, 7.4 / k) if k > 3 else 2.1
    figure, grid = plt.subplots(k, k, figsize=(size * k + 0.4, size * k + 0.5), squeeze=False)
    windows = {
        name: window([chosen[name], *([other[name]] if name in other else [])], true.get(name)) for name in names
    }
    for row, below in enumerate(names):
        for column, left in enumerate(names):
            ax = grid[row, column]
            if column > row:
                ax.set_axis_off()
                continue
            ax.set_xlim(windows[left])
            if row == column:
                _density(ax, chosen[left], DRAWS, fill=True)
                if left in other:
                    _density(ax, other[left], REFERENCE, fill=False)
                ax.set_ylim(bottom=0)
                ax.set_yticks([])
                ax.spines["left"].set_visible(False)
            else:
                _regions(ax, chosen[left], chosen[below], DRAWS, windows[left], windows[below], fill=True)
                if other:
                    _regions(ax, other[left], other[below], REFERENCE, windows[left], windows[below], fill=False)
                ax.set_ylim(windows[below])
                if below in true:
                    ax.axhline(true[below], color=TRUTH, linewidth=1)
            if left in true:
                ax.axvline(true[left], color=TRUTH, linewidth=1)
            ax.xaxis.set_major_locator(MaxNLocator(3))
            ax.yaxis.set_major_locator(MaxNLocator(3)) if row != column else None
            ax.tick_params(labelbottom=row == k - 1, labelleft=column == 0 and row > 0)
            ax.set_xlabel(left if row == k - 1 else "")
            ax.set_ylabel(below if column == 0 and row > 0 else "")
    figure.align_labels()
    entries = [("reference", REFERENCE, "-")] if other else []
    entries += [("truth", TRUTH, "-")] if true else []
    legend(figure, [("posterior", DRAWS, "-"), *entries] if entries else [], left_out)
    return figure


@styled
def forest(
    draws: Draws,
    *,
    truth: Mapping[str, Any] | None = None,
    reference: Draws | None = None,
    parameters: Sequence[str] | None = None,
    most: int = 60,
) -> Figure:
    """Medians and central 50 and 90 % intervals, one line for each parameter; what many groups are read by.

    **Arguments:** as for `cpe.plot.marginals`.

    **Returns:** a matplotlib figure.
    """
    chosen, left_out = choose(scalars(draws), parameters, most)
    other, true = chosen_scalars(reference, chosen), chosen_truth(truth, chosen)
    figure, ax = plt.subplots(figsize=(6.4, 0.23 * len(chosen) + 0.9))
    for y, (name, x) in enumerate(chosen.items()):
        _interval(ax, x, y - (0.16 if name in other else 0.0), DRAWS)
        if name in other:
            _interval(ax, other[name], y + 0.16, REFERENCE)
        if name in true:
            ax.plot([true[name]], [y], marker="x", color=TRUTH, markersize=5, markeredgewidth=1.5, zorder=4)
    ax.set_yticks(range(len(chosen)), list(chosen))
    ax.set_ylim(len(chosen) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color=FAINT, alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    entries = [("posterior: median, 50 %, 90 %", DRAWS, "-")]
    entries += [("reference", REFERENCE, "-")] if other else []
    entries += [("truth", TRUTH, "x")] if true else []
    legend(figure, entries, left_out)
    return figure


def _interval(ax: Axes, x: np.ndarray, y: float, colour: str) -> None:
    q = np.quantile(x, [0.05, 0.25, 0.5, 0.75, 0.95])
    ax.plot(q[[0, 4]], [y, y], color=colour, linewidth=1.1, solid_capstyle="butt")
    ax.plot(q[[1, 3]], [y, y], color=colour, linewidth=3.2, solid_capstyle="butt")
    ax.plot(q[2], y, "o", color=PAPER, markeredgecolor=colour, markersize=4, zorder=3)


def _density(
    ax: Axes,
    x: np.ndarray,
    colour: str,
    *,
    fill: bool,
    window: tuple[float, float] | None = None,
    line: Any = "solid",
) -> None:
    share = 1.0
    if window is not None:  # a prior may be far wider than what is shown: a grid over all of it would be too coarse
        width = window[1] - window[0]
        near = x[(x >= window[0] - width) & (x <= window[1] + width)]
        share, x = len(near) / len(x), near
    if len(x) < 20 or np.ptp(x) == 0:
        return
    # Not `kde`, which does the same for arrays of more axes: it adds to docstrings, and `python -OO` has none.
    grid, density, _ = array_stats._kde(np.asarray(x, float), grid_len=200 if window is None else 500)
    density = density * share
    grid, density = np.r_[grid[0], grid, grid[-1]], np.r_[0.0, density, 0.0]
    if fill:
        ax.fill_between(grid, density, color=colour, alpha=0.25, linewidth=0)
    ax.plot(grid, density, color=colour, linewidth=1.4, linestyle=line)


def _regions(
    ax: Axes,
    x: np.ndarray,
    y: np.ndarray,
    colour: str,
    x_window: tuple[float, float],
    y_window: tuple[float, float],
    *,
    fill: bool,
) -> None:
    """The smallest regions that hold 95, 80 and 50 % of the draws, by a smoothed histogram."""
    counts, xs, ys = np.histogram2d(x, y, bins=60, range=(x_window, y_window))
    # Silverman's rule for two dimensions, in bins; a narrow ridge is not smoothed away
    rule = len(x) ** (-1 / 6)
    widths = [
        max(0.8, 1.1 * rule * min(np.std(v), np.subtract(*np.quantile(v, [0.75, 0.25])) / 1.35) * 60 / (b - a))
        for v, (a, b) in ((x, x_window), (y, y_window))
    ]
    smooth = gaussian_filter(counts, widths, mode="nearest").T
    order = np.sort(smooth.ravel())[::-1]
    mass = np.cumsum(order) / max(order.sum(), 1e-12)
    heights = [float(order[np.searchsorted(mass, level)]) for level in (0.95, 0.8, 0.5)]
    heights = [h * (1 + 1e-9 * i) for i, h in enumerate(heights)]
    at = ((xs[1:] + xs[:-1]) / 2, (ys[1:] + ys[:-1]) / 2)
    if not (0 < heights[0] < heights[1] < heights[2] < order[0]):
        return
    if fill:
        for height, alpha in zip(heights, (0.15, 0.25, 0.4), strict=True):
            ax.contourf(*at, smooth, levels=[height, order[0] * 1.01], colors=[colour], alpha=alpha)
    else:
        ax.contour(*at, smooth, levels=heights, colors=[colour], linewidths=1.0)
