"""What all figures share: colours, axes, legends, and the scalars of draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cpejax.diagnostics.words import member_names

INK, FAINT, PAPER = "#1a1a1a", "#8a8f98", "#ffffff"
SHADE, PLATE = "#d3d7dc", "#6b7280"
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
T = TypeVar("T")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with plt.rc_context(cast(Any, STYLE)):  # its keys are typed one by one
            return draw(*args, **kwargs)

    return styled


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
            raise ValueError(f"draws['{name}'] is one value; expected an array whose first axis is the draws.")
        flat = array.reshape(len(array), math.prod(array.shape[1:]))
        out |= dict(zip(member_names(name, array.shape[1:]), flat.T, strict=True))
    return out


def choose(found: Mapping[str, T], wanted: Sequence[str] | None, most: int) -> tuple[dict[str, T], int]:
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


def chosen_scalars(draws: Draws | None, chosen: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {} if draws is None else {name: x for name, x in scalars(draws).items() if name in chosen}


def chosen_truth(truth: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> dict[str, float]:
    values = {} if truth is None else scalars({name: np.asarray(x)[None] for name, x in truth.items()})
    return {name: float(x[0]) for name, x in values.items() if name in chosen}


def grid(n: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    rows = -(-n // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(size[0] * max(columns, 2), size[1] * rows + 0.35), squeeze=False
    )
    for ax in axes.flat[n:]:
        ax.set_axis_off()
    return figure, list(axes.flat[:n])


def window(samples: Sequence[np.ndarray], truth: float | None = None) -> tuple[float, float]:
    """Where nearly all draws are, and the truth."""
    ends = np.array([np.quantile(x, [0.001, 0.999]) for x in samples])
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    if truth is not None:
        low, high = min(low, truth), max(high, truth)
    pad = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return low - pad, high + pad


def legend(figure: Figure, entries: Sequence[tuple[str, str, str]], left_out: int) -> None:
    handles = [
        Line2D([], [], color=colour, ls="none" if line == "x" else line, marker="x" if line == "x" else None)
        for _, colour, line in entries
    ]
    if handles:
        figure.legend(handles, [label for label, _, _ in entries], loc="outside upper center", ncols=len(entries))
    if left_out > 0:
        figure.supxlabel(f"{left_out} more are not shown", fontsize=8, color=FAINT)
