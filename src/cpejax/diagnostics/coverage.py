"""Coverage of credible regions: intervals of each parameter, and ellipsoids of all of them, which are tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpejax.diagnostics.check import Check
from cpejax.diagnostics.null import p_value
from cpejax.diagnostics.ranks import central, inner
from cpejax.diagnostics.registry import Diagnostic, Finding, Panel, register
from cpejax.diagnostics.words import p_words, percent


def draw(check: Check, style: Any, *, parameters: Sequence[str] | None = None) -> Any:
    """The share of true values inside credible regions against their level: of parameters, and of all together."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(3.9, 3.6))
    levels = np.linspace(0, 1, 101)
    chosen, _ = style.choose(check.ranks, parameters, 10**6)
    wide = 1.96 * np.sqrt(levels * (1 - levels) / check.n)
    ax.fill_between(levels, levels - wide, levels + wide, color=style.FAINT, alpha=0.3, linewidth=0)
    ax.plot([0, 1], [0, 1], color=style.FAINT, linewidth=0.8)
    for i, ranks in enumerate(chosen.values()):
        curve, label = central(ranks, check.draws, levels), "single parameters" if i == 0 else None
        ax.plot(levels, curve, color=style.DRAWS, linewidth=0.8, alpha=0.7, label=label)
    ax.plot(levels, inner(check.joint, check.draws, levels), color=style.INK, linewidth=1.8, label="joint")
    ax.text(0.96, 0.05, "too narrow", ha="right", color=style.FAINT)
    ax.text(0.04, 0.93, "too wide", color=style.FAINT)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="nominal level", ylabel="share of true values inside")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.1))
    return figure


@register
class Coverage(Diagnostic):
    """Whether ranks of the distance from the draws' own mean are uniform: the coverage of credible ellipsoids."""

    name, order = "Coverage", 20.0
    figure = staticmethod(draw)

    def tests(self) -> dict[str, float]:
        return {"joint": p_value(self.study.joint, self.study.draws)}

    def sentence(self, others: Mapping[str, Diagnostic]) -> str:
        del others
        study, draws = self.study, self.study.draws
        cover = {n: float(central(r, draws, (0.9,))[0]) for n, r in zip(study.names, study.ranks.T, strict=True)}
        narrow, wide = min(cover, key=lambda n: cover[n]), max(cover, key=lambda n: cover[n])
        held = f"{percent(cover[narrow])} ({narrow})"
        if len(cover) > 1:
            held += f" to {percent(cover[wide])} ({wide})"
        far = ((study.joint + 0.5) / (draws + 1)).mean() > 0.5
        verdict = "" if self.ok else "too narrow: " if far else "too wide: "
        return (
            f"{verdict}90 % intervals of single parameters hold {held} of the true values, and 90 % ellipsoids of the "
            f"joint posterior {percent(inner(study.joint, draws, (0.9,))[0])} (p {p_words(self.p['joint'])})."
        )

    def values(self, finding: Finding | None) -> dict[str, Any]:
        del finding
        return {"joint": self.study.joint}

    def panels(self) -> dict[str, Panel]:
        return {"joint": self.panel(self.study.joint, self.study.draws)}
