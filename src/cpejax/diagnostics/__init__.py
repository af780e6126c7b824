"""Whether a posterior can be trusted: one file a check, and `check.py`, which runs them all.

What several checks share (draws and ranks, null distributions, a regression on the data) has a file of its own.
Distances from a known posterior are in `metrics`.
"""

from cpejax.diagnostics.null import p_value
from cpejax.diagnostics.registry import Diagnostic, Share, register

__all__ = ["Diagnostic", "Share", "p_value", "register"]
