"""Figures of draws, training, checks, evidence and graphs.

What figures show is computed elsewhere; a figure that needs a new number gets it from there.
"""

from cpejax.plot.checks import coverage, finding, predictive, ranks
from cpejax.plot.draws import forest, marginals, pair
from cpejax.plot.evidence import evidence
from cpejax.plot.graph import graph
from cpejax.plot.training import training

__all__ = ["coverage", "evidence", "finding", "forest", "graph", "marginals", "pair", "predictive", "ranks", "training"]
