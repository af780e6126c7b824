"""The figures of the benchmark: accuracy by task, acceptance rates, cost against accuracy, draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpejax.plot.style import FAINT, REFERENCE, grid, styled
from cpejax.runs.bench.config import Config
from cpejax.runs.bench.table import MEAN, RESULTS, means, read_table
from cpejax.runs.bench.table import by_task as by_task_table
from cpejax.util.files import write_atomically

PALETTE = ("#d9480f", "#3b7dd8", "#2f9e6e", "#8c5fbf", "#c2255c", "#b08900", "#0b7285", "#6b7280", "#7a4b2a", "#2b2f77")
METRICS = {"c2st": "C2ST", "hmin": "H-min"}
MOST_PAIRS = 8
"""Variants in a figure of draws."""


class BenchFigure(NamedTuple):
    """A figure, not drawn yet: the name of its file, and words."""

    name: str
    draw: Callable[[], Figure]
    caption: str


def all_figures(config: Config, folder: Path, *, draws: bool = True) -> Iterator[BenchFigure]:
    """The figures of the results in a folder; with `draws` those of draws too."""
    table = read_table(folder / RESULTS)
    scored = table.dropna(subset=["c2st"])
    by_budget = {f"{budget:,} simulations": rows for budget, rows in scored.groupby("budget")}
    yield BenchFigure(
        "summary",
        partial(summary, by_budget),
        "Mean C2ST over the tasks that all methods have draws of, their observations and seeds; .5 is perfect.",
    )
    for budget in sorted(set(scored["budget"])):
        rows = scored[scored["budget"] == budget]
        for metric, words in METRICS.items():
            caption = (
                f"{words} by task with {budget:,} simulations: dots are observations and seeds, bars their means; "
            )
            caption += "the line is what two halves of the reference have."
            yield BenchFigure(f"{metric}-{budget}", partial(by_task, rows, metric), caption)
    yield BenchFigure(
        "acceptance",
        partial(acceptance, scored),
        "Acceptance rates, over all tasks: the share of draws inside the prior's support.",
    )
    yield BenchFigure(
        "cost",
        partial(cost, scored),
        "Cost against accuracy: seconds of training and mean C2ST, a dot for each task and number of simulations.",
    )
    for name in config.task_names if draws else ():
        found = shown_draws(config, folder, name)
        if found:
            caption = f"{config.label(name)}: the first parameters, reference draws (first) and draws of the methods."
            yield BenchFigure(f"draws-{name}", partial(draws_of, found), caption)


def write_figures(config: Config, folder: Path) -> None:
    """Draw all into the folder `figures`."""
    for figure in all_figures(config, folder):
        with plt.rc_context({"svg.hashsalt": "cpejax"}):
            drawn = figure.draw()
            path = folder / "figures" / f"{figure.name}.svg"
            part = folder / "figures" / f".{figure.name}.svg"
            part.parent.mkdir(parents=True, exist_ok=True)
            drawn.savefig(part, metadata={"Date": None, "Creator": None})
            plt.close(drawn)
            write_atomically(path, part.read_bytes())
            part.unlink()


def colours(table: pd.DataFrame) -> dict[str, str]:
    """A colour for each variant, in the table's order."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(dict.fromkeys(table["variant"]))}


@styled
def summary(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """A colour for each table, by its name, and in it a bar for each variant; a table's rows have one budget."""
    found = pd.DataFrame(
        {name: by_task_table(rows, int(rows["budget"].iloc[0])).loc[MEAN] for name, rows in tables.items()}
    )
    found = found.loc[list(colours(pd.concat(tables.values())))]
    figure, ax = plt.subplots(figsize=(6.4, 0.9 + 0.32 * len(found) * max(1, 0.6 * found.shape[1])))
    height = 0.8 / found.shape[1]
    for i, name in enumerate(found.columns):
        y = np.arange(len(found)) + (i - (found.shape[1] - 1) / 2) * height
        ax.barh(y, found[name] - 0.5, height, left=0.5, color=PALETTE[1 + i], label=name)
        for where, value in zip(y, found[name], strict=True):
            if np.isfinite(value):
                ax.text(value + 0.004, where, f"{value:.3f}", va="center", fontsize=7)
    ax.set(yticks=range(len(found)), yticklabels=found.index, xlabel="mean C2ST", xlim=(0.5, 1.02))
    ax.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=min(2, found.shape[1]))
    return figure


@styled
def by_task(table: pd.DataFrame, metric: str) -> Figure:
    """A panel for each task, a line for each variant."""
    names, colour = list(dict.fromkeys(table["task"])), colours(table)
    variants = list(colour)
    columns = min(4, len(names))
    figure, axes = grid(len(names), columns, (2.3, 0.55 + 0.17 * len(variants)))
    for panel, (ax, name) in enumerate(zip(axes, names, strict=True)):
        rows = table[table["task"] == name]
        ax.axvline(rows[f"{metric}_null"].mean(), color=REFERENCE, linewidth=1)
        for i, variant in enumerate(variants):
            values = rows.loc[rows["variant"] == variant, metric].to_numpy(float)
            ax.plot(values, np.full(len(values), i), "o", color=colour[variant], markersize=2.5, alpha=0.5, mew=0)
            if len(values):
                ax.plot([values.mean()] * 2, [i - 0.35, i + 0.35], color=colour[variant], linewidth=2)
        ax.set(title=name, yticks=range(len(variants)), ylim=(len(variants) - 0.4, -0.6))
        ax.set_yticklabels(variants if panel % columns == 0 else [])
        if metric == "c2st":
            ax.set_xlim(0.47, 1.01)
    return figure


@styled
def acceptance(table: pd.DataFrame) -> Figure:
    """A line of dots for each variant."""
    colour = colours(table)
    figure, ax = plt.subplots(figsize=(6.4, 0.8 + 0.24 * len(colour)))
    rng = np.random.default_rng(0)
    for i, (variant, shade) in enumerate(colour.items()):
        values = table.loc[table["variant"] == variant, "acceptance"].to_numpy(float)
        ax.plot(values, i + rng.uniform(-0.2, 0.2, len(values)), "o", color=shade, markersize=3, alpha=0.5, mew=0)
        ax.plot([np.median(values)] * 2, [i - 0.35, i + 0.35], color=shade, linewidth=2)
    ax.set(yticks=range(len(colour)), yticklabels=list(colour), xlabel="acceptance rate", xlim=(-0.02, 1.02))
    ax.invert_yaxis()
    return figure


@styled
def cost(table: pd.DataFrame) -> Figure:
    """Seconds of training, on a logarithmic scale, and C2ST."""
    found, colour = means(table), colours(table)
    figure, ax = plt.subplots(figsize=(6.4, 3.6))
    for variant, shade in colour.items():
        rows = found[found["variant"] == variant]
        ax.plot(rows["seconds_fit"], rows["c2st"], "o", color=shade, markersize=3, alpha=0.45, mew=0)
        ax.plot(np.exp(np.log(rows["seconds_fit"]).mean()), rows["c2st"].mean(), "D", color=shade, label=variant)
    ax.set(xscale="log", xlabel="seconds of training", ylabel="mean C2ST", ylim=(0.48, 1.02))
    figure.legend(loc="outside right upper")
    return figure


def shown_draws(config: Config, folder: Path, name: str) -> dict[str, np.ndarray]:
    """The first two parameters of a task, of the reference and of methods, for one observation, the largest budget."""
    seed, budget = config.seeds[0], config.budgets[-1]
    number = config.observations_of_fit(config.task(name), seed)[0]
    runs = [run for run in config.runs() if (run.task, run.budget, run.seed) == (name, budget, seed)]
    done = {run: path for run in runs if (path := folder / "metrics" / f"{run.path}.npz").is_file()}
    if not done:
        return {}
    with np.load(folder / "references" / f"{name}.npz", allow_pickle=False) as file:
        found = {"reference": file[str(number)][:1000, :2]}
    for run, path in done.items():
        with np.load(path, allow_pickle=False) as file:
            several = len(file.files) > 1
            found |= {f"{run.method}, {k}" if several else run.method: file[k][:, :2] for k in file.files}
    return dict(list(found.items())[: MOST_PAIRS + 1])


@styled
def draws_of(found: dict[str, np.ndarray]) -> Figure:
    """A panel for each set of draws, with the same axes."""
    columns = min(5, len(found))
    figure, axes = grid(len(found), columns, (1.6, 1.6))
    reference = found["reference"]
    low, high = np.quantile(reference, [0.002, 0.998], axis=0)
    pad = 0.25 * (high - low) + 1e-9
    for ax, (name, points) in zip(axes, found.items(), strict=True):
        shade = REFERENCE if name == "reference" else PALETTE[1]
        if points.shape[1] == 1:
            ax.hist(points[:, 0], list(np.linspace(low[0] - pad[0], high[0] + pad[0], 41)), color=shade)
            ax.set_yticks([])
        else:
            _scatter(ax, points, shade, low - pad, high + pad)
        ax.set_title(name, fontsize=7)
    return figure


def _scatter(ax: Axes, points: np.ndarray, shade: str, low: np.ndarray, high: np.ndarray) -> None:
    ax.plot(points[:, 0], points[:, 1], ".", color=shade, markersize=1.5, alpha=0.6, mew=0, rasterized=True)
    ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    ax.tick_params(color=FAINT, labelsize=6)
