"""Figures of draws, of training and of checks. Densities are ArviZ's; the axes are drawn here, to share one look."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from arviz_stats.base.array import array_stats
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import gaussian_filter

from cpejax._check import Check, Predictive, bands, central, inner, member_names
from cpejax.inference.posterior import Posterior
from cpejax.inference.training import History

INK, FAINT, PAPER = "#1a1a1a", "#8a8f98", "#ffffff"
DRAWS, PRIOR, TRUTH, REFERENCE = "#3b7dd8", "#8a8f98", "#d9480f", "#2f9e6e"
STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 9.0,
    "axes.linewidth": 0.8,
    "axes.facecolor": "none",
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.useoffset": False,
    "text.color": INK,
    "text.parse_math": False,  # a site may have any name
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}

Draws = xr.DataTree | xr.Dataset | Mapping[str, Any]
P = ParamSpec("P")


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


# ---- draws


@_styled
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
    - `parameters`: names of sites, or of single numbers as `"beta[3]"`; all if left out.
    - `most`: how many are drawn at most; the title says how many were left out.

    **Returns:** a matplotlib figure.
    """
    chosen, left_out = _choose(scalars(draws), parameters, most)
    before, other = _optional(prior, chosen), _optional(reference, chosen)
    true = _truth(truth, chosen)
    columns = min(4, len(chosen))
    figure, axes = _grid(len(chosen), columns, (1.8, 1.45))
    for ax, (name, x) in zip(axes, chosen.items(), strict=True):
        low, high = _window([x, *([other[name]] if name in other else [])], true.get(name))
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
    _legend(figure, entries, left_out)
    return figure


@_styled
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
    chosen, left_out = _choose(scalars(draws), parameters, most)
    other, true = _optional(reference, chosen), _truth(truth, chosen)
    names = list(chosen)
    k = len(names)
    size = min(1.9, 7.4 / k) if k > 3 else 2.1
    figure, grid = plt.subplots(k, k, figsize=(size * k + 0.4, size * k + 0.5), squeeze=False)
    windows = {
        name: _window([chosen[name], *([other[name]] if name in other else [])], true.get(name)) for name in names
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
    _legend(figure, [("posterior", DRAWS, "-"), *entries] if entries else [], left_out)
    return figure


@_styled
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
    chosen, left_out = _choose(scalars(draws), parameters, most)
    other, true = _optional(reference, chosen), _truth(truth, chosen)
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
    _legend(figure, entries, left_out)
    return figure


def _interval(ax: Axes, x: np.ndarray, y: float, colour: str) -> None:
    q = np.quantile(x, [0.05, 0.25, 0.5, 0.75, 0.95])
    ax.plot(q[[0, 4]], [y, y], color=colour, linewidth=1.1, solid_capstyle="butt")
    ax.plot(q[[1, 3]], [y, y], color=colour, linewidth=3.2, solid_capstyle="butt")
    ax.plot(q[2], y, "o", color=PAPER, markeredgecolor=colour, markersize=4, zorder=3)


# ---- training


@_styled
def training(fitted: Posterior | History) -> Figure:
    """The losses of training and validation over epochs, and where the weights that were kept come from."""
    history = fitted.history if isinstance(fitted, Posterior) else fitted
    figure, ax = plt.subplots(figsize=(6.4, 2.6))
    epochs = np.arange(1, len(history.train) + 1)
    ax.plot(epochs, history.train, color=FAINT, linewidth=1.2, label="training")
    ax.plot(epochs, history.validation, color=DRAWS, linewidth=1.6, label="validation")
    if history.best_epoch >= 0:
        ax.plot(history.best_epoch + 1, history.best, "o", color=TRUTH, markersize=5, label="kept", zorder=4)
    if history.cooling is not None:
        ax.axvline(history.cooling + 0.5, color=FAINT, linewidth=0.8, linestyle=":", label="rate lowered")
    both = np.array([history.train, history.validation])
    finite = both[np.isfinite(both)]
    if len(finite) > 4:  # the first epochs would hide the rest
        top, bottom = np.quantile(finite, 0.97), finite.min()
        ax.set_ylim(bottom - 0.06 * (top - bottom + 1e-6), top + 0.15 * (top - bottom + 1e-6))
    ax.set(xlabel="epoch", ylabel="loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
    return figure


# ---- checks


@_styled
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
    chosen, left_out = _choose(check.ranks if parameters is None else {**check.ranks, **more}, parameters, most)
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
    _legend(figure, [("outside the band", TRUTH, "-")] if outside & set(chosen) else [], left_out)
    return figure


@_styled
def coverage(check: Check, *, parameters: Sequence[str] | None = None) -> Figure:
    """How often credible regions hold the true value, against their nominal level.

    Thin lines are the central intervals of single parameters, the thick one ellipsoids of the joint posterior. Below
    the diagonal the posterior is too narrow.
    """
    figure, ax = plt.subplots(figsize=(3.9, 3.6))
    levels = np.linspace(0, 1, 101)
    chosen, _ = _choose(check.ranks, parameters, 10**6)
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


@_styled
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
        ax.hist(x, bins=30, range=_window([x], row.observed), color=DRAWS, alpha=0.6)
        ax.axvline(row.observed, color=TRUTH, linewidth=1.5)
        ax.set_title(f"{row.statistic} of {row.site}" if row.statistic != "value" else str(row.site))
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(3))
    _legend(figure, [("drawn from the posterior", DRAWS, "-"), ("observed", TRUTH, "-")], len(found.statistics) - most)
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


# ---- pieces


def scalars(draws: Draws) -> dict[str, Float[np.ndarray, " n"]]:
    """Every scalar parameter by name, `{"beta[3]": (n,)}`; chains are put one after the other."""
    source: Any = draws
    if isinstance(draws, xr.DataTree):
        source = draws["posterior"].dataset if "posterior" in draws.children else draws.dataset
    values: dict[str, np.ndarray] = {}
    if isinstance(source, xr.Dataset):
        if "observation" in source.dims:
            raise ValueError(
                f"The draws are for {source.sizes['observation']} observations. Choose one: "
                "draws.posterior.to_dataset().isel(observation=0)."
            )
        for name, x in source.data_vars.items():
            array = x.transpose("chain", "draw", ...).values
            values[str(name)] = array.reshape(-1, *array.shape[2:])
    elif isinstance(source, Mapping):
        values = {name: np.asarray(x) for name, x in source.items()}
    else:
        raise TypeError(f"draws must be a DataTree, or a dict of arrays (n, *shape); found {type(draws).__name__}.")
    out: dict[str, np.ndarray] = {}
    for name, array in values.items():
        if array.ndim == 0:
            raise ValueError(f"draws['{name}'] is one number; expected an array whose first axis is the draws.")
        flat = array.reshape(len(array), math.prod(array.shape[1:]))
        out |= dict(zip(member_names(name, array.shape[1:]), flat.T, strict=True))
    return out


def _choose(
    found: Mapping[str, np.ndarray], wanted: Sequence[str] | None, most: int
) -> tuple[dict[str, np.ndarray], int]:
    """Those asked for, or all, with single ones before members of plates; and how many are left out."""
    if wanted is None:
        names = sorted(found, key=lambda name: "[" in name)
    else:
        names = []
        for name in [wanted] if isinstance(wanted, str) else wanted:
            members = [n for n in found if n == name or n.startswith(f"{name}[")]
            if not members:
                raise ValueError(f"There is no parameter '{name}'; there are {', '.join(list(found)[:20])}.")
            names += members
    return {name: found[name] for name in names[:most]}, max(0, len(names) - most)


def _optional(draws: Draws | None, chosen: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {} if draws is None else {name: x for name, x in scalars(draws).items() if name in chosen}


def _truth(truth: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> dict[str, float]:
    values = {} if truth is None else scalars({name: np.asarray(x)[None] for name, x in truth.items()})
    return {name: float(x[0]) for name, x in values.items() if name in chosen}


def _grid(n: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    rows = -(-n // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(size[0] * max(columns, 2), size[1] * rows + 0.35), squeeze=False
    )
    for ax in axes.flat[n:]:
        ax.set_axis_off()
    return figure, list(axes.flat[:n])


def _window(samples: Sequence[np.ndarray], truth: float | None = None) -> tuple[float, float]:
    """Where nearly all draws are, and the truth."""
    ends = np.array([np.quantile(x, [0.001, 0.999]) for x in samples])
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    if truth is not None:
        low, high = min(low, truth), max(high, truth)
    pad = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return low - pad, high + pad


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


def _legend(figure: Figure, entries: Sequence[tuple[str, str, str]], left_out: int) -> None:
    handles = [
        Line2D([], [], color=colour, linestyle="none" if line == "x" else line, marker="x" if line == "x" else None)
        for _, colour, line in entries
    ]
    if handles:
        figure.legend(handles, [label for label, _, _ in entries], loc="outside upper center", ncols=len(entries))
    if left_out > 0:
        figure.supxlabel(f"{left_out} more are not shown", fontsize=8, color=FAINT)
