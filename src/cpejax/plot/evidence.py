"""The evidence of models."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from cpejax.inference.compare import Comparison
from cpejax.plot.style import DRAWS, FAINT, INK, TRUTH, styled


@styled
def evidence(comparison: Comparison) -> Figure:
    """The log evidence of each model with its error, and the probabilities of the models, of `cpe.compare`.

    Lines of the evidence are two standard errors to each side; those of the probabilities are their interval. Models
    whose evidence cannot be relied upon are in another colour, with their Pareto k.
    """
    table = comparison.table
    places = np.arange(len(table))[::-1]
    colours = [TRUTH if name in comparison.doubtful else DRAWS for name in table.index]
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 0.8 + 0.4 * len(table)), sharey=True)
    for place, colour, (_, row) in zip(places, colours, table.iterrows(), strict=True):
        value, error = row["log_evidence"], 2 * row["log_evidence_error"]
        axes[0].plot([value - error, value + error], [place, place], color=colour, linewidth=1.4)
        axes[0].plot(value, place, "o", color=colour, markersize=5)
        if colour == TRUTH:
            axes[0].annotate(
                f"Pareto k {row['pareto_k']:.1f}", (value, place), (0, 6), textcoords="offset points", ha="center"
            )
        axes[1].barh(place, row["probability"], height=0.5, color=colour, alpha=0.35)
        ends = [row["probability_low"], row["probability_high"]]
        axes[1].plot(ends, [place, place], color=colour, linewidth=1.4)
        inside = row["probability"] > 0.8
        axes[1].annotate(
            f"{row['probability']:.3f}",
            (0.02 if inside else max(ends[1], row["probability"]), place),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes[0].set(xlabel="log evidence", yticks=places, yticklabels=list(table.index))
    axes[0].set_ylim(-0.6, len(table) - 0.4)
    axes[0].margins(x=0.15)
    axes[0].grid(axis="x", color=FAINT, alpha=0.25, linewidth=0.6)
    axes[1].set(xlabel="probability", xlim=(0, 1.02))
    return figure
