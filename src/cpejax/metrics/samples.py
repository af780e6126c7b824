"""Two sets of draws as matrices with the same columns, and the score of a metric with its null."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

Matrix = Float[np.ndarray, "_ _"]


class Score(NamedTuple):
    """A metric's value and its null: the value between two disjoint parts of the reference."""

    value: float
    null: float


def with_null(metric: Callable[[Matrix, Matrix, np.random.Generator], float], x: Matrix, y: Matrix, seed: int) -> Score:
    """The metric between x and one half of y, and between the two halves of y, all of one size."""
    n = min(len(x), len(y) // 2)
    rng = np.random.default_rng(seed)
    x, y = subset(x, n, rng), y[rng.permutation(len(y))[: 2 * n]]
    return Score(metric(x, y[:n], np.random.default_rng(seed)), metric(y[n:], y[:n], np.random.default_rng(seed)))


def standardised(draws: Any, reference: Any) -> tuple[Matrix, Matrix]:
    """Both sets in units of the reference's standard deviations, from its mean."""
    x, y = stack(draws, reference, least=4)
    centre, scale = y.mean(0), scale_of(y)
    return (x - centre) / scale, (y - centre) / scale


def pair(draws: Any, reference: Any, *, least: int = 2) -> tuple[Matrix, Matrix]:
    """Both sets as finite matrices with the same columns and the same number of rows."""
    x, y = stack(draws, reference, least=least)
    n = min(len(x), len(y))
    rng = np.random.default_rng(0)
    return subset(x, n, rng), subset(y, n, rng)


def stack(draws: Any, reference: Any, *, least: int) -> tuple[Matrix, Matrix]:
    """Both sets as finite matrices with the same columns; fewer than `least` rows are an error."""
    x, y = _matrix(draws, "draws"), _matrix(reference, "reference")
    if set(x) != set(y):
        raise ValueError(f"draws have the sites {sorted(x)}, but the reference has {sorted(y)}")
    for name in y:
        if x[name].shape[1] != y[name].shape[1]:
            where = f" at site {name!r}" if name else ""
            raise ValueError(
                f"draws have {x[name].shape[1]} dimensions{where}, but the reference has {y[name].shape[1]}"
            )
    for what, sites in (("draws", x), ("reference", y)):
        if len({len(value) for value in sites.values()}) > 1:
            raise ValueError(f"{what} have different numbers of draws: { {k: len(v) for k, v in sites.items()} }")
        for name, value in sites.items():
            bad = int(np.sum(~np.isfinite(value).all(1)))
            if bad:
                where = f" of site {name!r}" if name else ""
                raise ValueError(f"{bad} of {len(value)} {what}{where} are NaN or infinite: drop or repair them first")
    a, b = (np.concatenate([sites[name] for name in y], axis=1) for sites in (x, y))
    if min(len(a), len(b)) < least:
        raise ValueError(f"{len(a)} draws and {len(b)} of the reference: at least {least} of each are needed")
    return a, b


def _matrix(draws: Any, what: str) -> dict[str, Matrix]:
    """Draws as `{site: (n, size)}`; a bare array has the one site ''."""
    if hasattr(draws, "children") or hasattr(draws, "data_vars"):  # a DataTree or Dataset, dimensions chain, draw, ...
        data = draws["posterior"] if "posterior" in getattr(draws, "children", {}) else draws
        sites = {str(name): np.asarray(data[name]) for name in data.data_vars}
        sites = {
            name: value.reshape(value.shape[0] * value.shape[1], *value.shape[2:]) for name, value in sites.items()
        }
    elif isinstance(draws, Mapping):
        sites = {str(name): np.asarray(value) for name, value in draws.items()}
    else:
        sites = {"": np.asarray(draws)}
    out = {}
    for name, value in sites.items():
        label = f"{what}[{name!r}]" if name else what
        if value.ndim == 0 or not np.issubdtype(value.dtype, np.number) or np.iscomplexobj(value):
            raise ValueError(
                f"{label} has shape {value.shape} and dtype {value.dtype}: expected real numbers, (n, ...)"
            )
        if not value.size:
            raise ValueError(f"{label} is empty, with shape {value.shape}: expected draws of at least one parameter")
        out[name] = value.reshape(len(value), -1).astype(np.float64)
    if not out:
        raise ValueError(f"{what} is empty: expected draws of at least one parameter")
    return out


def subset(x: Matrix, n: int, rng: np.random.Generator) -> Matrix:
    """`n` rows by a random choice, or all if there are no more."""
    return x if len(x) == n else x[rng.permutation(len(x))[:n]]


def scale_of(x: Matrix) -> Float[np.ndarray, " d"]:
    """Standard deviations; 1 for a constant column, which stays comparable in its own units."""
    scale = x.std(0)
    return np.where(scale > 1e-12 * np.maximum(1.0, np.abs(x).max(0)), scale, 1.0)
