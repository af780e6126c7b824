"""Ranks of the distance from a point that the data choose (TARP, Lemos et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cpejax.diagnostics.null import p_value
from cpejax.diagnostics.registry import Diagnostic, Panel, register
from cpejax.diagnostics.study import Group
from cpejax.diagnostics.words import p_words


@register
class Tarp(Diagnostic):
    """Whether ranks of the distance from points are uniform; the points are draws from a regression on the data."""

    name, order = "Joint coverage (TARP)", 30.0

    def quantities(self, group: Group) -> dict[str, np.ndarray]:
        if group.prediction is None:
            return {}
        points, spread = group.prediction.points, group.prediction.spread
        return {"tarp": np.square((group.every - points[:, None]) / spread).sum(2)}

    def tests(self) -> dict[str, float]:
        return {"tarp": p_value(self.ranks("tarp"), self.study.draws)}

    def sentence(self, others: Mapping[str, Diagnostic]) -> str:
        del others
        outcome = "calibrated" if self.ok else "not calibrated"
        return f"{outcome}: ranks of the distance from points that the data choose have p {p_words(self.p['tarp'])}."

    def panels(self) -> dict[str, Panel]:
        return {"points (TARP)": self.panel(self.ranks("tarp"), self.study.draws)}
