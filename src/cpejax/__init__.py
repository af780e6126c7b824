"""Causal Posterior Estimation: simulation-based inference with samplers compiled from the model's own graph."""

from cpejax._graph import Graph, Site
from cpejax._invert import PosteriorProgram, invert
from cpejax._program import Simulator

__all__ = ["Graph", "PosteriorProgram", "Simulator", "Site", "invert"]
