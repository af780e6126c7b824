"""Ranks of each parameter: simulation-based calibration (Talts et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cpejax.diagnostics.check import Check
from cpejax.diagnostics.null import bands, p_value
from cpejax.diagnostics.ranks import Ranks, central, verdict
from cpejax.diagnostics.registry import Diagnostic, Finding, Panel, register
from cpejax.diagnostics.words import p_words, percent

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Levels of the central intervals whose coverage is told."""
MOST_NAMED = 6
"""Maximum number of parameters that a sentence complains of."""


def draw(check: Check, style: Any, *, parameters: Sequence[str] | None = None, most: int = 24) -> Any:
    """Rank histograms, and the distribution function less the uniform one: of parameters, and of all other checks."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    verdicts = check.calibration["verdict"]
    own = {
        name: Panel(Calibration.name, ranks, check.draws, verdicts[name] != "calibrated")
        for name, ranks in check.ranks.items()
    }
    chosen, left_out = style.choose(own if parameters is None else {**own, **check.panels}, parameters, most)
    chosen |= check.panels if parameters is None else {}
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)
    figure, grid = plt.subplots(
        2 * rows, columns, figsize=(1.85 * columns, 2.1 * rows + 0.3), squeeze=False, height_ratios=[0.55, 1] * rows
    )
    for ax in grid.flat:
        ax.set_axis_off()
    for i, (name, panel) in enumerate(chosen.items()):
        top, bottom = grid[2 * (i // columns), i % columns], grid[2 * (i // columns) + 1, i % columns]
        top.set_axis_on()
        bottom.set_axis_on()
        colour = style.TRUTH if panel.bad else style.DRAWS
        values, draws = panel.ranks, panel.draws
        z, low, high = bands(len(values), draws, check.levels[panel.check])
        bins = min(20, draws + 1)
        top.hist((values + 0.5) / (draws + 1), bins=bins, range=(0, 1), color=colour, alpha=0.6)
        top.axhline(len(values) / bins, color=style.FAINT, linewidth=0.8)
        top.set(title=name, xlim=(0, 1), xticks=[], yticks=[])
        top.spines[["left", "bottom"]].set_visible(False)
        at = np.round(z * (draws + 1)).astype(int) - 1
        difference = np.searchsorted(np.sort(values), at, side="right") / len(values) - z
        bottom.fill_between(z, low - z, high - z, color=style.FAINT, alpha=0.25, linewidth=0)
        bottom.plot(z, difference, color=colour, linewidth=1.2)
        bottom.axhline(0, color=style.FAINT, linewidth=0.6)
        reach = max(1.15 * float((high - z).max()), 1.1 * float(np.abs(difference).max()))
        bottom.set(xlim=(0, 1), ylim=(-reach, reach), xticks=[0, 0.5, 1], xticklabels=["0", "½", "1"])
        bottom.yaxis.set_major_locator(MaxNLocator(3, symmetric=True))
        if i % columns == 0:
            bottom.set_ylabel("ECDF − uniform")
        if i >= len(chosen) - columns:
            bottom.set_xlabel("rank of the truth")
    marked = any(panel.bad for panel in chosen.values())
    style.legend(figure, [("outside the band", style.TRUTH, "-")] if marked else [], left_out)
    return figure


@register
class Calibration(Diagnostic):
    """Whether the rank of each parameter's true value among the draws is uniform."""

    name, order = "Ranks (SBC)", 10.0
    figure = staticmethod(draw)

    @property
    def of_parameters(self) -> dict[str, Ranks]:
        """Ranks of each parameter."""
        return dict(zip(self.study.names, self.study.ranks.T, strict=True))

    def tests(self) -> dict[str, float]:
        return {name: p_value(ranks, self.study.draws) for name, ranks in self.of_parameters.items()}

    def sentence(self, others: Mapping[str, Diagnostic]) -> str:
        del others
        if not self.ok:
            return "; ".join(self._complaints()) + "."
        least = min(self.p, key=lambda name: self.p[name])
        many = f"all {len(self.p)} parameters" if len(self.p) > 1 else "the parameter"
        smallest = f"smallest p {p_words(self.p[least])}, {least}"
        return f"calibrated: the ranks of {many} are uniform over {self.study.n:,} simulated observations ({smallest})."

    def _complaints(self) -> Iterator[str]:
        ranks, draws = self.of_parameters, self.study.draws
        bad = [name for name, is_bad in self.bad.items() if is_bad]
        bad.sort(key=lambda name: -abs(_ninety(ranks[name], draws) - 0.9))
        for name in bad[:MOST_NAMED]:
            yield f"{verdict(ranks[name], draws)} for {name}: {_evidence(ranks[name], draws)}"
        if len(bad) > MOST_NAMED:
            yield f"and {len(bad) - MOST_NAMED} more parameters"

    def values(self, finding: Finding | None) -> dict[str, Any]:
        del finding
        return {"ranks": self.of_parameters}

    def columns(self) -> dict[str, Sequence[Any]]:
        ranks, draws = self.of_parameters, self.study.draws
        verdicts = [verdict(ranks[name], draws) if is_bad else "calibrated" for name, is_bad in self.bad.items()]
        cover = np.stack([central(r, draws, LEVELS) for r in ranks.values()], axis=1)
        covered = {f"{level:.0%}": shares.tolist() for level, shares in zip(LEVELS, cover, strict=True)}
        return {"p": list(self.p.values()), "verdict": verdicts, **covered}


def _ninety(ranks: Ranks, draws: int) -> float:
    return float(central(ranks, draws, (0.9,))[0])


def _evidence(ranks: Ranks, draws: int) -> str:
    if verdict(ranks, draws) in ("too low", "too high"):
        return f"{percent((ranks > draws / 2).mean(), 0)} of the true values are above the median"
    return f"its 90 % intervals hold {percent(_ninety(ranks, draws))} of the true values"
