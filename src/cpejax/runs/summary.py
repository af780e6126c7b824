"""The summary of draws as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from cpejax.diagnostics.words import member_names
from cpejax.program.graph import Graph

QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}


def summarise(tree: xr.DataTree, graph: Graph, truth: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Mean, standard deviation and quantiles of the parameters and deterministic sites in draws, a row a scalar.

    If there are many observations, there is a row for each of them, and an index `(observation, parameter)`.
    Not by `arviz_stats.summary`: its standard deviation divides by n, not n − 1, and it gives one interval at a time.
    """
    posterior = tree["posterior"].dataset
    rows = []
    for name in (name for name in (*graph.parameters, *graph.deterministics) if name in posterior):
        x = posterior[name].values
        x = x.reshape(-1, *x.shape[2:])
        shape = graph.shapes[name]
        names = member_names(name, shape)
        many = x.ndim > 1 + len(shape)
        x = x.reshape(len(x), x.shape[1] if many else 1, len(names))
        mean = x.mean(0, dtype=np.float64)
        sd = x.std(0, ddof=1, dtype=np.float64) if len(x) > 1 else np.zeros(x.shape[1:])
        quantiles = np.quantile(x, list(QUANTILES.values()), axis=0)
        true = np.ravel(truth[name]) if truth is not None and name in truth else None
        for i in range(x.shape[1]):
            for j, member in enumerate(names):
                row: dict[str, Any] = {"observation": i} if many else {}
                row |= {"parameter": member, "mean": mean[i, j], "sd": sd[i, j]}
                row |= dict(zip(QUANTILES, quantiles[:, i, j], strict=True))
                rows.append(row | ({"truth": float(true[j])} if true is not None else {}))
    frame = pd.DataFrame(rows)
    if "observation" in frame:
        frame = frame.sort_values("observation", kind="stable").set_index(["observation", "parameter"])
    else:
        frame = frame.set_index("parameter")
    return frame


def places(sd: float) -> int | None:
    """Decimals that show three digits of a standard deviation, and of all values beside it; none if it is extreme."""
    return max(0, 2 - math.floor(math.log10(sd))) if np.isfinite(sd) and 1e-6 < sd < 1e6 else None
