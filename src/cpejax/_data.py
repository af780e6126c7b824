"""Reading observed data from files: JSON, CSV, npz and NetCDF. Files are data: reading them runs no code."""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from cpejax._graph import Graph

FORMATS = {".json": "JSON", ".csv": "CSV", ".npz": "npz", ".nc": "NetCDF"}


def read_data(path: Path, graph: Graph, sites: Sequence[str], what: str = "data") -> dict[str, np.ndarray]:
    """The values of `sites` in a file.

    - JSON: an object with a number or nested lists for each site, `{"y": [1.2, 0.4]}`.
    - CSV: a column for each site; or `y[0]`, `y[1]`, ... for a site's last axis; or, where there is one site, its table
        alone, with or without a header.
    - npz: an array for each site, as `numpy.savez("data.npz", y=y)` writes it.
    - NetCDF: a variable for each site, at the top or in the group `observed_data`.

    Names and shapes are checked against the program's; what is in the file besides is an error, so that a misspelt name
    is not overlooked.
    """
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in _neighbours(path)], n=1)
        hint = f" Did you mean {path.with_name(near[0])}?" if near else ""
        raise ValueError(f"{path} does not exist.{hint}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected a file ({_formats()}).")
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path} ends in '{path.suffix}'; {what} are read from {_formats()}.")
    try:
        found = _READERS[path.suffix.lower()](path, graph, sites)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    for name in found:
        if name not in sites:
            near = difflib.get_close_matches(name, sites, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            kind = "a parameter, not data" if name in graph.parameters else "not a site of the program"
            raise ValueError(f"{path} has '{name}', which is {kind}; expected are {_shapes(graph, sites)}.{hint}")
    missing = [name for name in sites if name not in found]
    if missing:
        raise ValueError(f"{path} has no '{missing[0]}'; expected are {_shapes(graph, sites)}.")
    out = {}
    for name in sites:
        try:
            x = np.asarray(found[name])
        except ValueError:
            raise ValueError(
                f"{path}: the lists of '{name}' are not a table: their lengths differ. Expected is "
                f"{_shapes(graph, [name])}; missing values need a program that simulates them as missing."
            ) from None
        if x.dtype.kind not in "fiub":
            raise ValueError(f"{path}: '{name}' is not made of numbers: it holds {_not_a_number(x)}.")
        out[name] = x
    return out


def check_shapes(values: Mapping[str, np.ndarray], graph: Graph, source: str) -> bool:
    """Whether there are many observations; values of other shapes, or not finite, are an error."""
    counts: dict[str, int | None] = {}
    for name, x in values.items():
        site = graph.sites[name]
        if x.shape == site.shape:
            counts[name] = None
        elif x.ndim == len(site.shape) + 1 and x.shape[1:] == site.shape and len(x) > 0:
            counts[name] = len(x)
        else:
            raise ValueError(
                f"{source}: '{name}' has shape {x.shape}, but the program simulates {_shapes(graph, [name])}. "
                "Many observations go in one file with one more axis in front."
            )
        with np.errstate(over="ignore"):
            bad = np.argwhere(~np.isfinite(x.astype(np.float32)))
        if len(bad):
            raise ValueError(
                f"{source}: {len(bad)} of {x.size} numbers of '{name}' are missing or infinite, the first at "
                f"{[int(i) for i in bad[0]]}. Fill them, or let the program simulate data with the same gaps."
            )
    if len(set(counts.values())) > 1:
        words = ", ".join(f"{count or 'a single one'} of '{name}'" for name, count in counts.items())
        raise ValueError(f"{source}: the sites have different numbers of observations: {words}.")
    return next(iter(counts.values())) is not None


def _neighbours(path: Path) -> list[Path]:
    try:
        return [p for p in path.parent.iterdir() if p.suffix.lower() in FORMATS]
    except OSError:
        return []


def _formats() -> str:
    return ", ".join(f"{name} ({suffix})" for suffix, name in FORMATS.items())


def _shapes(graph: Graph, sites: Sequence[str]) -> str:
    """Sites with their shapes, in words."""
    words = []
    for name in sites:
        site = graph.sites[name]
        plates = [f"{graph.plates[p]} {p}" for p in site.plates]
        inside = f" ({' × '.join([*plates, *map(str, site.event_shape)])})" if plates else ""
        words.append(f"'{name}' of shape {site.shape}{inside}" if site.shape else f"'{name}', a single number")
    return ", ".join(words)


def _not_a_number(x: np.ndarray) -> str:
    for value in x.ravel():
        if not isinstance(value, int | float | np.number):
            return (
                "null" if value is None else f"the text {str(value)!r:.40}" if isinstance(value, str) else repr(value)
            )
    return f"the type {x.dtype}"


# ---- formats


def _read_json(path: Path, graph: Graph, sites: Sequence[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: it is not text.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}.") from error
    if isinstance(content, list) and len(sites) == 1:  # the values alone
        return {sites[0]: content}
    if not isinstance(content, dict):
        raise ValueError(
            f'{path} holds a {type(content).__name__}, expected an object such as {{"{sites[0]}": [...]}} with '
            f"{_shapes(graph, sites)}."
        )
    return content


def _read_npz(path: Path, _graph: Graph, _sites: Sequence[str]) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        words = "it holds Python objects, which are never loaded" if "pickle" in str(error) else str(error)
        raise ValueError(f"{path} cannot be read: {words}. Write it with numpy.savez(path, name=array).") from error


def _read_netcdf(path: Path, _graph: Graph, _sites: Sequence[str]) -> dict[str, Any]:
    try:
        with xr.open_datatree(path, engine="h5netcdf") as tree:
            node = tree["observed_data"] if "observed_data" in tree.children else tree
            return {str(name): x.values for name, x in node.dataset.data_vars.items()}
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{path} is not a NetCDF file: {' '.join(str(error).split())[:200]}.") from error


def _read_csv(path: Path, graph: Graph, sites: Sequence[str]) -> dict[str, Any]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not CSV: {error}.") from error
    if not lines:
        raise ValueError(f"{path} is empty; expected are {_shapes(graph, sites)}.")
    header = [cell.strip() for cell in lines[0]]
    named = any(_number(cell) is None for cell in header)
    rows = lines[1:] if named else lines
    first = 2 if named else 1
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(f"{path}: row {i + first} has {len(row)} columns, the first has {len(header)}.")
        for cell, column in zip(row, header, strict=True):
            if _number(cell) is None:
                where = f"column '{column}'" if named else "it"
                words = "is empty" if not cell.strip() else f"holds the text {cell.strip()!r:.40}"
                raise ValueError(f"{path}: row {i + first}, {where} {words}, expected a number.")
    if not rows:
        raise ValueError(f"{path} has a header but no rows; expected are {_shapes(graph, sites)}.")
    table = np.array([[float(cell) for cell in row] for row in rows])
    if named and not (len(sites) == 1 and not _columns(header, sites)):
        out = {}
        for name in dict.fromkeys(_base(column) for column in header):
            which = [i for i, column in enumerate(header) if _base(column) == name]
            values = table[:, which]
            alone = len(which) == 1 and header[which[0]] == name
            out[name] = _fitted(values[:, 0] if alone else values, graph, name)
        return out
    return {sites[0]: _fitted(table, graph, sites[0])}


def _columns(header: Sequence[str], sites: Sequence[str]) -> bool:
    return any(_base(column) in sites for column in header)


def _base(column: str) -> str:
    return re.sub(r"\[\d+\]$", "", column)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _fitted(values: np.ndarray, graph: Graph, name: str) -> np.ndarray:
    """A table as one value of a site, where a row or a column stands for a vector or a number."""
    if name not in graph.sites:
        return values
    shape = graph.sites[name].shape
    one_row = values.ndim == 2 and 1 in values.shape
    if values.shape != shape and values.size == math.prod(shape) and (one_row or values.size == 1 or len(shape) > 2):
        return values.reshape(shape)
    return values


_READERS = {".json": _read_json, ".csv": _read_csv, ".npz": _read_npz, ".nc": _read_netcdf}
