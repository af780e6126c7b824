"""Whether a regression on the data predicts where the true values are among the draws: then these miss what data tell.

A posterior that ignores the data, or a part of them, can be calibrated. Ranks in the direction that data predict are
uniform only if nothing can be predicted (Modrák et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cpejax.diagnostics.likelihood import Likelihood
from cpejax.diagnostics.null import p_above
from cpejax.diagnostics.ranks import Ranks
from cpejax.diagnostics.registry import Diagnostic, Finding, Panel, register
from cpejax.diagnostics.study import Group
from cpejax.diagnostics.words import p_words, percent

MOST_NAMED = 6
"""Maximum number of parameters that the sentence names."""


@register
class UseOfData(Diagnostic):
    """Ranks of each parameter, of the distance from the mean, and of all parameters together, as data predict them."""

    name, order = "Use of the data", 40.0

    def quantities(self, group: Group) -> dict[str, np.ndarray]:
        if group.prediction is None:
            return {}
        return {"projection": np.einsum("mkd,md->mk", group.centred, group.prediction.direction)}

    @property
    def given_data(self) -> dict[str, Ranks]:
        """Ranks of each parameter among draws in reversed order where the data predict a low one."""
        begin, names = self.study.begin, self.study.names
        up, ranks = self.study.direction[begin:] >= 0, self.study.ranks[begin:]
        return dict(zip(names, np.where(up, ranks, self.study.draws - ranks).T, strict=True))

    @property
    def width(self) -> Ranks:
        """Ranks of the distance from the draws' mean, reversed where the data predict a short one."""
        begin, joint = self.study.begin, self.study.joint[self.study.begin :]
        return np.where(self.study.further[begin:] >= 0, joint, self.study.draws - joint)

    def tests(self) -> dict[str, float]:
        draws = self.study.draws
        found = {f"given {name}": p_above(ranks, draws) for name, ranks in self.given_data.items()}
        return found | {"width": p_above(self.width, draws), "projection": p_above(self.ranks("projection"), draws)}

    def sentence(self, others: Mapping[str, Diagnostic]) -> str:
        names = self.study.names
        wrong = sorted((n for n in names if self.bad[f"given {n}"]), key=lambda n: self.p[f"given {n}"])
        if wrong or self.bad["projection"]:
            share = {name: (r > self.study.draws / 2).mean() for name, r in self.given_data.items()}
            worst = max(wrong or names, key=lambda name: abs(share[name] - 0.5))
            more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
            of = ", ".join(wrong[:MOST_NAMED]) + more if wrong else "a combination of the parameters"
            sentence = (
                f"the posterior ignores or misreads what the data tell of {of}: {percent(share[worst], 0)} of the true "
                f"values of {worst} are on the side of the draws' median that a regression on the data predicts."
            )
        elif self.bad["width"]:
            sentence = (
                "the posterior is too wide for some data and too narrow for others: a regression on the data predicts "
                f"how far from the draws' mean the true values are (p {p_words(self.p['width'])})."
            )
        else:
            words = {"width": "the width", "projection": "all parameters together"}
            least = min(self.p, key=lambda test: self.p[test])
            of = words.get(least, least.removeprefix("given "))
            sentence = (
                "nothing that is seen to be missed: a regression on the data cannot predict where the true values are "
                f"among the draws (smallest p {p_words(self.p[least])}, {of})."
            )
        likelihood = others.get(Likelihood.name)
        if isinstance(likelihood, Likelihood) and likelihood.untested:
            sentence += f" The likelihood was not tested: {likelihood.untested}."
        return sentence

    def values(self, finding: Finding | None) -> dict[str, Any]:
        del finding
        return {"given_data": self.given_data, "width": self.width, "projection": self.ranks("projection")}

    def columns(self) -> dict[str, list[Any]]:
        tests = [f"given {name}" for name in self.study.names]
        verdicts = ["biased" if self.bad[test] else "unbiased" for test in tests]
        return {"p given data": [self.p[test] for test in tests], "given data": verdicts}

    def panels(self) -> dict[str, Panel]:
        return {"given the data": self.panel(self.ranks("projection"), self.study.draws)}
