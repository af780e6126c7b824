"""The losses of a fit."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cpejax.inference.posterior import Posterior
from cpejax.inference.settings import History
from cpejax.plot.style import DRAWS, FAINT, TRUTH, styled

# ---- training


@styled
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
