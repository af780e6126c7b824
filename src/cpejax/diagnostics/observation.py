"""Whether an observation is typical: like what the program simulates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from cpejax.diagnostics.distances import Distances
from cpejax.diagnostics.registry import Diagnostic, Finding, Share, register
from cpejax.diagnostics.words import member_names, p_words
from cpejax.program.graph import Graph

UNUSUAL = 0.05
"""An observation with a p-value below this is called unusual, and not typical."""


@dataclass(frozen=True, eq=False)
class Typicality(Distances):
    """How far observations are from simulated data: distances, those of simulated data, and p-values."""

    finding: Finding


@register
class Observation(Diagnostic):
    """Whether the distance of given data from simulated data is like that of other simulated data."""

    name, order = "Observation", 70.0
    share = Share("observation", 1.0)

    def tests(self) -> dict[str, float]:
        found = self.study.distances
        return {} if found is None else {f"observation {i}": p for i, p in enumerate(found.p.tolist())}

    def sentence(self, others: Mapping[str, Diagnostic]) -> str | None:
        del others
        study = self.study
        if study.distances is None or study.observed is None:
            return None
        simulated, given = study.flat_data(study.rows), study.flat_data(study.observed)
        return describe(study.graph, simulated, given, study.distances, np.array(list(self.bad.values())))

    def values(self, finding: Finding | None) -> dict[str, Any]:
        found = self.study.distances
        if found is None or finding is None:
            return {"typicality": None}
        return {"typicality": Typicality(found.distance, found.simulated, found.p, finding)}


def describe(
    graph: Graph,
    simulated: Float[np.ndarray, "n p"],
    given: Float[np.ndarray, "k p"],
    found: Distances,
    bad: Bool[np.ndarray, " k"],
) -> str:
    """What is said of given data; `bad`: which of them are not typical."""
    p, distance, null, worst = found.p, found.distance, found.simulated, found.worst
    subject = "the observation" if len(p) == 1 else f"all {len(p)} observations"
    least = f"{'p' if len(p) == 1 else 'smallest p'} {p_words(p.min())}"
    if bad.any():
        which = (
            "The observation" if len(p) == 1 else f"{int(bad.sum())} of {len(p)} observations, first of all {worst},"
        )
        verb = "is" if len(p) == 1 else "are"
        return (
            f"NOT TYPICAL. {which} {verb} unlike what the program simulates (distance {distance[worst]:.2g}, simulated "
            f"data {np.median(null):.2g} and at most {null.max():.2g}; {least}). "
            f"{_furthest(graph, simulated, given[worst])}"
            "The posterior extrapolates there and cannot be trusted: check the data (units, order, missing values), or "
            "let the program produce such data."
        )
    if p.min() * len(p) <= UNUSUAL or (len(p) == 1 and distance.max() > null.max()):
        further = "all" if distance.max() > null.max() else "nearly all"
        which = subject if len(p) == 1 else f"one of {len(p)} observations"
        return (
            f"unusual: {which} is further from other data than {further} that were simulated ({least}); more "
            f"simulations to check with than {len(simulated)} could tell more."
        )
    return f"typical: {subject} could have been simulated ({least})."


def _furthest(graph: Graph, simulated: np.ndarray, given: np.ndarray) -> str:
    names = [name for site in graph.data for name in member_names(site, graph.sites[site].shape)]
    low, high = simulated.min(0), simulated.max(0)
    outside = np.maximum(low - given, given - high) / np.where(high > low, high - low, 1.0)
    if not (outside > 0).any():
        return "Each value is within its simulated range; their combination is not. "
    i = int(outside.argmax())
    count = int((outside > 0).sum())
    more = f"; {count - 1} more of {len(given)} are outside theirs" if count > 1 else ""
    return f"{names[i]} = {given[i]:.4g} is outside the simulated range, {low[i]:.4g} to {high[i]:.4g}{more}. "
