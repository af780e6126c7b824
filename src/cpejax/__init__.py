"""Causal Posterior Estimation: simulation-based inference with samplers compiled from the model's own graph."""

import importlib
from typing import TYPE_CHECKING, Any

from cpejax.flows.options import AIO, FMPE, PSE
from cpejax.inference.fit import fit
from cpejax.inference.loading import load
from cpejax.inference.posterior import Posterior
from cpejax.inference.registry import CPE
from cpejax.inference.settings import History, Training
from cpejax.nn.embeddings import ConvEmbedding, MLPEmbedding, RecurrentEmbedding, SetEmbedding
from cpejax.program.graph import Graph
from cpejax.program.inverse import PosteriorProgram, invert
from cpejax.program.model import Model
from cpejax.program.simulate import simulate
from cpejax.program.simulations import Simulations
from cpejax.program.simulator import Simulator
from cpejax.program.sites import Site

if TYPE_CHECKING:
    from cpejax import metrics, plot, tasks
    from cpejax.diagnostics.check import Check, check
    from cpejax.runs.report import report
    from cpejax.tasks._reference import reference

__all__ = [
    "AIO",
    "CPE",
    "FMPE",
    "PSE",
    "Check",
    "ConvEmbedding",
    "Graph",
    "History",
    "MLPEmbedding",
    "Model",
    "Posterior",
    "PosteriorProgram",
    "RecurrentEmbedding",
    "SetEmbedding",
    "Simulations",
    "Simulator",
    "Site",
    "Training",
    "check",
    "fit",
    "invert",
    "load",
    "metrics",
    "plot",
    "reference",
    "report",
    "simulate",
    "tasks",
]

_LATER = {
    "Check": "cpejax.diagnostics.check",
    "check": "cpejax.diagnostics.check",
    "metrics": "cpejax",
    "plot": "cpejax",
    "reference": "cpejax.tasks._reference",
    "report": "cpejax.runs.report",
    "tasks": "cpejax",
}


def __getattr__(name: str) -> Any:
    """What inference does not need is imported when it is first used: it would double the time of the import."""
    if name not in _LATER:
        raise AttributeError(f"module 'cpejax' has no attribute {name!r}")
    where = _LATER[name]
    value = (
        importlib.import_module(f"cpejax.{name}")
        if where == "cpejax"
        else getattr(importlib.import_module(where), name)
    )
    globals()[name] = value
    return value
