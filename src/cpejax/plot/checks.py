"""What the checks found. Each check draws its own figure, in its own file; here they get names and a style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from cpejax.diagnostics import calibration as _calibration
from cpejax.diagnostics import coverage as _coverage
from cpejax.diagnostics import predictive as _predictive
from cpejax.diagnostics.check import Check
from cpejax.diagnostics.predictive import Predictive
from cpejax.diagnostics.registry import registered
from cpejax.plot import style
from cpejax.plot.style import styled


@styled
def finding(check: Check, name: str, **options: Any) -> Figure:
    """The figure of one check, by the name of its finding; `check.figures` has those that have one."""
    kind = registered().get(name)
    if kind is None or kind.figure is None:
        raise ValueError(f"The check '{name}' has no figure; those that have one are {', '.join(check.figures)}.")
    return kind.figure(check, style, **options)


@styled
def ranks(check: Check, *, parameters: Sequence[str] | None = None, most: int = 24) -> Figure:
    """Rank histograms, and below each the ranks' distribution function minus the uniform one.

    The shaded band holds the whole curve with a probability that accounts for all tests of `cpe.check`: a curve that
    leaves it is not calibrated. Draws that are too narrow give a U, too wide a hill, and a gradient shows a bias. Of
    "given the data", where more ranks are high than low, the data tell more than the draws do.
    """
    return _calibration.draw(check, style, parameters=parameters, most=most)


@styled
def coverage(check: Check, *, parameters: Sequence[str] | None = None) -> Figure:
    """How often credible regions hold the true value, against their nominal level.

    Thin lines are the central intervals of single parameters, the thick one ellipsoids of the joint posterior. Below
    the diagonal the posterior is too narrow.
    """
    return _coverage.draw(check, style, parameters=parameters)


@styled
def predictive(check: Check | Predictive, *, most: int = 12) -> Figure:
    """Data drawn from the posterior with the observed ones: value by value, and summary statistics."""
    return _predictive.draw(check, style, most=most)
