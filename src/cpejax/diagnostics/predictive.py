"""Data replicated from the posterior of an observation, and whether they look like it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from cpejax.diagnostics.check import Check
from cpejax.diagnostics.distances import compare
from cpejax.diagnostics.features import summary_statistics
from cpejax.diagnostics.observation import Observation
from cpejax.diagnostics.registry import Diagnostic, Finding, Share, register
from cpejax.diagnostics.study import Study
from cpejax.diagnostics.words import p_words
from cpejax.program.model import Model, NoSimulator
from cpejax.program.simulate import simulate


@dataclass(frozen=True, eq=False)
class Predictive:
    """Data replicated from the posterior, compared with the observed ones.

    `replicates` and `observed`: `{site: (n, *shape)}` and `{site: shape}`; `statistics`: a table of summary statistics,
    and `values` those of the replicates, `{(site, statistic): (n,)}`.
    """

    replicates: dict[str, np.ndarray]
    observed: dict[str, np.ndarray]
    statistics: pd.DataFrame
    values: dict[tuple[str, str], Float[np.ndarray, " n"]]
    finding: Finding


def draw(check: Check | Predictive, style: Any, *, most: int = 12) -> Any:
    """Replicated and observed data: value by value, and summary statistics."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    found = check if isinstance(check, Predictive) else check.predictive
    if found is None:
        raise ValueError("This check has no predictive part: call cpe.check(posterior, given={...}) with the data.")
    curves = [name for name, x in found.observed.items() if 2 <= x.size <= 400]
    table = found.statistics.iloc[:most]
    columns = min(5, max(1, len(table)))
    rows = -(-len(table) // columns)
    figure = plt.figure(figsize=(7.4, 2.0 * len(curves) + 1.5 * rows + 0.3))
    grid = figure.add_gridspec(len(curves) + rows, columns, height_ratios=[1.5] * len(curves) + [1.0] * rows)
    for i, name in enumerate(curves):
        _bands(figure.add_subplot(grid[i, :]), style, name, found.replicates[name], found.observed[name])
    for i, row in enumerate(table.itertuples()):
        ax = figure.add_subplot(grid[len(curves) + i // columns, i % columns])
        x = found.values[row.site, row.statistic]
        ax.hist(x, bins=30, range=style.window([x], row.observed), color=style.DRAWS, alpha=0.6)
        ax.axvline(row.observed, color=style.TRUTH, linewidth=1.5)
        title = f"{row.statistic} of {row.site}" if row.statistic != "value" else str(row.site)
        ax.set_title(title if len(title) < 20 else title.replace(" of ", "\nof ", 1))  # not into the next one's
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(3))
    entries = [("drawn from the posterior", style.DRAWS, "-"), ("observed", style.TRUTH, "-")]
    style.legend(figure, entries, len(found.statistics) - most)
    return figure


def _bands(ax: Any, style: Any, name: str, replicates: np.ndarray, observed: np.ndarray) -> None:
    """50 and 90 % of the replicates at each position, and what was observed."""
    from matplotlib.ticker import MaxNLocator

    flat, seen = replicates.reshape(len(replicates), -1), observed.ravel()
    low, quarter, middle, three, high = np.quantile(flat, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
    at = np.arange(len(seen))
    if observed.ndim == 1 and len(seen) >= 16:  # a series
        ax.fill_between(at, low, high, color=style.DRAWS, alpha=0.2, linewidth=0)
        ax.fill_between(at, quarter, three, color=style.DRAWS, alpha=0.35, linewidth=0)
        ax.plot(at, middle, color=style.DRAWS, linewidth=1)
    else:
        ax.vlines(at, low, high, color=style.DRAWS, linewidth=1, alpha=0.7)
        ax.vlines(at, quarter, three, color=style.DRAWS, linewidth=3, alpha=0.7)
    ax.plot(at, seen, "o", color=style.TRUTH, markersize=2.6 if len(seen) > 30 else 4)
    ax.set_title(name)
    ax.margins(x=0.02)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if observed.ndim > 1:  # what follows one another belongs together
        for edge in range(observed.shape[-1], len(seen), observed.shape[-1]):
            ax.axvline(edge - 0.5, color=style.FAINT, linewidth=0.5, alpha=0.5)


@register
class PosteriorPredictive(Diagnostic):
    """Whether summary statistics of the observation are like those of data drawn from its posterior."""

    name, order = "Posterior predictive", 80.0
    share = Share("posterior predictive", 1.0)
    figure = staticmethod(draw)

    def __init__(self, study: Study):
        super().__init__(study)
        self.failure = ""
        self.left_out = ""
        self.replicates: dict[str, np.ndarray] = {}
        self.statistics = pd.DataFrame()
        self.of_replicates: dict[tuple[str, str], np.ndarray] = {}

    def tests(self) -> dict[str, float]:
        study, graph = self.study, self.study.graph
        if study.one is None:
            return {}
        self.failure = study.failure
        if not self.failure:
            try:
                replicated = simulate(
                    Model(study.posterior.program, graph.data),
                    study.draws,
                    values=study.of_one,
                    key=study.key_replicates,
                    progress=study.progress,
                )
            except NoSimulator as error:
                self.left_out = str(error)
                return {}
            except Exception as error:  # whatever the program does there, the rest is known already
                self.failure = f"its draws cannot be simulated from ({error})"
        if self.failure:
            return {}
        self.replicates = {name: replicated[name] for name in graph.data}
        table = []
        for name, x in self.replicates.items():
            event = len(graph.sites[name].event_shape)
            observed = summary_statistics(study.one[name][None], event)
            for statistic, values in summary_statistics(x, event).items():
                value = float(observed[statistic][0])
                low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
                tail = 2 * (1 + min((values <= value).sum(), (values >= value).sum())) / (len(values) + 1)
                row = {"site": name, "statistic": statistic, "observed": value, "median": middle}
                table.append(row | {"5%": low, "95%": high, "p": min(1.0, tail)})
                self.of_replicates[name, statistic] = values
        self.statistics = pd.DataFrame(table)
        rows = np.stack(list(self.of_replicates.values()), axis=1)
        found = compare(rows, self.statistics["observed"].to_numpy()[None])
        return {"replicates": float(found.p[0])}

    @property
    def ok(self) -> bool:
        return super().ok and not self.failure

    def sentence(self, others: Mapping[str, Diagnostic]) -> str | None:
        if self.study.one is None:
            return None
        which = self.study.which
        if self.left_out:
            return f"{which}not tested, because no data can be drawn from the posterior. {self.left_out}"
        if self.failure:
            return (
                f"{which}{'' if others[Observation.name].ok else 'NOT TYPICAL, and '}no data can be drawn from its "
                f"posterior: {self.failure}. The posterior cannot be trusted there."
            )
        p = p_words(self.p["replicates"])
        if self.ok:
            return f"{which}data drawn from the posterior look like the observed ones (p {p})."
        worst = self.statistics.loc[self.statistics["p"].idxmin()]
        return (
            f"{which}data drawn from the posterior are unlike the observed ones (p {p}), most of all the "
            f"{worst['statistic']} of {worst['site']}: {worst['observed']:.4g} observed, {worst['5%']:.4g} to "
            f"{worst['95%']:.4g} drawn. The model does not describe these data, or the posterior is wrong for them."
        )

    def values(self, finding: Finding | None) -> dict[str, Any]:
        if finding is None or self.failure or self.left_out or self.study.one is None:
            return {"predictive": None}
        found = Predictive(self.replicates, dict(self.study.one), self.statistics, self.of_replicates, finding)
        return {"predictive": found}
