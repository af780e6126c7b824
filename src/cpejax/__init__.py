"""Causal Posterior Estimation: simulation-based inference with samplers compiled from the model's own graph."""

import importlib
from typing import TYPE_CHECKING, Any

from cpejax.coordinates.prior import Coordinates
from cpejax.coordinates.standardise import Fixed
from cpejax.flows.aio import AIO
from cpejax.flows.ancestral.method import CPE
from cpejax.flows.base import Flow, Method
from cpejax.flows.blocks.discrete import DiscreteCPE
from cpejax.flows.blocks.triangular import TriangularCPE
from cpejax.flows.conditioning import VectorFlow
from cpejax.flows.fmpe import FMPE
from cpejax.flows.pse import PSE
from cpejax.inference.emulator import Emulator, emulate
from cpejax.inference.fit import fit
from cpejax.inference.loading import load
from cpejax.inference.posterior import Posterior
from cpejax.inference.settings import History, Training
from cpejax.nn.embeddings import ConvEmbedding, MLPEmbedding, RecurrentEmbedding, SetEmbedding
from cpejax.program.graph import Graph
from cpejax.program.inverse import PosteriorProgram, invert
from cpejax.program.model import Model
from cpejax.program.opened import open_simulations
from cpejax.program.simulate import simulate
from cpejax.program.simulations import Simulations
from cpejax.program.simulator import Simulator
from cpejax.program.sites import Site

if TYPE_CHECKING:
    from cpejax import diagnostics, metrics, plot, tasks
    from cpejax.diagnostics.check import Check, check
    from cpejax.inference.compare import Comparison, compare
    from cpejax.runs.report import report
    from cpejax.tasks._reference import reference

__all__ = [
    "AIO",
    "CPE",
    "FMPE",
    "PSE",
    "Check",
    "Comparison",
    "ConvEmbedding",
    "Coordinates",
    "DiscreteCPE",
    "Emulator",
    "Fixed",
    "Flow",
    "Graph",
    "History",
    "MLPEmbedding",
    "Method",
    "Model",
    "Posterior",
    "PosteriorProgram",
    "RecurrentEmbedding",
    "SetEmbedding",
    "Simulations",
    "Simulator",
    "Site",
    "Training",
    "TriangularCPE",
    "VectorFlow",
    "check",
    "compare",
    "diagnostics",
    "emulate",
    "fit",
    "invert",
    "load",
    "metrics",
    "open_simulations",
    "plot",
    "reference",
    "report",
    "simulate",
    "tasks",
]

_LATER = {
    "Check": "cpejax.diagnostics.check",
    "Comparison": "cpejax.inference.compare",
    "check": "cpejax.diagnostics.check",
    "compare": "cpejax.inference.compare",
    "diagnostics": "cpejax",
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
