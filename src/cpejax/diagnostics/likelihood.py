"""Ranks of the log-likelihood, where the data have a density (Modrák et al. 2023)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from cpejax.diagnostics.null import p_value
from cpejax.diagnostics.registry import Diagnostic, Finding, Panel, register
from cpejax.diagnostics.study import Group, Study
from cpejax.diagnostics.words import p_words, percent
from cpejax.program.graph import Graph

DRAWS = 50
"""Maximum number of draws among which a log-likelihood is ranked: more cost time, and see hardly more."""
SECONDS, SHARE = 2.0, 0.2
"""How long log-likelihoods are evaluated: that many seconds, or that share of the time the draws take if it is more."""
FEWEST = 20
"""Minimum number of observations whose ranks are tested."""


@register
class Likelihood(Diagnostic):
    """Whether the true parameters' log-likelihood is like that of the draws."""

    name, order = "Likelihood", 50.0

    def __init__(self, study: Study):
        super().__init__(study)
        self.draws = min(study.draws, DRAWS)
        self.began, self.seconds = time.perf_counter(), 0.0

    def quantities(self, group: Group) -> dict[str, np.ndarray]:
        density, since = self.study.program_density, time.perf_counter()
        if density.missing or self.seconds > max(SECONDS, SHARE * (since - self.began)):
            return {}
        found = density.likelihood(_by_site(group.every[:, : DRAWS + 1], self.study.graph), group.data)
        self.seconds += time.perf_counter() - since if group.index[0] else 0.0  # the first is compiled
        return {"likelihood": np.where(np.isnan(found), -np.inf, found)}

    @property
    def untested(self) -> str:
        """Why there is no test, where there is none."""
        if self.study.program_density.missing:
            return self.study.program_density.missing
        return "" if len(self.ranks("likelihood")) >= FEWEST else "it takes too long to evaluate"

    def tests(self) -> dict[str, float]:
        return {} if self.untested else {"likelihood": p_value(self.ranks("likelihood"), self.draws)}

    def sentence(self, others: Mapping[str, Diagnostic]) -> str | None:
        del others
        if self.untested:
            return None
        ranks, draws, n, p = self.ranks("likelihood"), self.draws, self.study.n, p_words(self.p["likelihood"])
        of = "" if len(ranks) == n else f", for {len(ranks)} of {n:,} observations,"
        if self.ok:
            return f"ranks of the true parameters' log-likelihood{of} are uniform (p {p})."
        if abs(ranks.mean() - draws / 2) < 0.03 * draws:
            return f"ranks of the true parameters' log-likelihood{of} are not uniform (p {p})."
        share = percent(((ranks + 0.5) / (draws + 1)).mean(), 0)
        more = (
            "The draws fit the data too little: the posterior ignores or misreads a part of them, loses correlations, "
            "or is too wide."
            if ranks.mean() > draws / 2
            else "The draws fit the data too well: the posterior is too narrow."
        )
        return (
            f"the true parameters' log-likelihood{of} is above that of {share} of the draws, where 50 % is right "
            f"(p {p}). {more}"
        )

    def values(self, finding: Finding | None) -> dict[str, Any]:
        del finding
        return {"likelihood": None if self.untested else self.ranks("likelihood"), "likelihood_draws": self.draws}

    def panels(self) -> dict[str, Panel]:
        return {} if self.untested else {"log-likelihood": self.panel(self.ranks("likelihood"), self.draws)}


def _by_site(flat: Float[np.ndarray, "m k d"], graph: Graph) -> dict[str, np.ndarray]:
    shapes = [graph.sites[name].shape for name in graph.parameters]
    parts = np.split(flat.astype(np.float32), np.cumsum([math.prod(s) for s in shapes])[:-1], axis=2)
    return {
        name: part.reshape(*part.shape[:2], *shape)
        for name, part, shape in zip(graph.parameters, parts, shapes, strict=True)
    }
