"""Names and figures as sentences and tables write them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpejax.program.graph import Graph


def parameter_names(graph: Graph) -> list[str]:
    """Every scalar parameter by name and index, `beta[3]`, in the program's order."""
    return [name for site in graph.parameters for name in member_names(site, graph.sites[site].shape)]


def member_names(name: str, shape: Sequence[int]) -> list[str]:
    """The scalars of a site by name, as NumPy indexes them."""
    return [f"{name}[{', '.join(map(str, i))}]" if shape else name for i in np.ndindex(*shape)]


def percent(share: float, digits: int = 1) -> str:
    """A share in words."""
    return f"{100 * share:.{digits}f} %"


def p_words(p: float) -> str:
    """A p-value in words: `= 0.12`, or `< 0.0001`."""
    return f"= {p:.2g}" if p >= 1e-4 else "< 0.0001"
