"""Causal Posterior Estimation: simulation-based inference with samplers compiled from the model's own graph."""

from cpejax import metrics, plot, tasks
from cpejax._embed import ConvEmbedding, MLPEmbedding, RecurrentEmbedding, SetEmbedding
from cpejax._graph import Graph, Site
from cpejax._invert import PosteriorProgram, invert
from cpejax._methods import CPE
from cpejax._posterior import Posterior, fit, load
from cpejax._program import Simulator
from cpejax._reference import reference
from cpejax._simulate import Simulations, simulate
from cpejax._train import History, Training

__all__ = [
    "CPE",
    "ConvEmbedding",
    "Graph",
    "History",
    "MLPEmbedding",
    "Posterior",
    "PosteriorProgram",
    "RecurrentEmbedding",
    "SetEmbedding",
    "Simulations",
    "Simulator",
    "Site",
    "Training",
    "fit",
    "invert",
    "load",
    "metrics",
    "plot",
    "reference",
    "simulate",
    "tasks",
]
