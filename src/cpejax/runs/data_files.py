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

from cpejax.program.graph import Graph

FORMATS = {".json": "JSON", ".csv": "CSV", ".npz": "npz", ".nc": "NetCDF"}
MOST_AXES = 32
"""The maximum depth of lists in lists; NumPy's arrays end at 64 axes."""


def read_data(path: Path, graph: Graph, sites: Sequence[str], what: str = "data") -> dict[str, np.ndarray]:
    """The values of `sites` in a file.

    - JSON: an object with a number or nested lists for each site, `{"y": [1.2, 0.4]}`.
    - CSV: a column for each site; or `y[0]`, `y[1]`, ... for a site's last axis, `y[0, 0]`, `y[0, 1]`, ... for its last
        two, in any order; or, where there is one site, its table alone, without a header.
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
            near = list(sites) if len(sites) == 1 else difflib.get_close_matches(name, sites, n=1)
            hint = f" Did you mean '{near[0]}'?" if near and name not in graph.parameters else ""
            kind = "a parameter, not data" if name in graph.parameters else "not a site of the program"
            raise ValueError(f"{path} has '{name}', which is {kind}; expected are {_shapes(graph, sites)}.{hint}")
    missing = [name for name in sites if name not in found]
    if missing:
        raise ValueError(f"{path} has no '{missing[0]}'; expected are {_shapes(graph, sites)}.")
    out = {}
    for name in sites:
        if isinstance(found[name], list):
            _check_numbers(found[name], f"{path}: '{name}'")
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
            bad = np.argwhere(~np.isfinite(graph.without_masked({name: x})[name].astype(np.float32)))
        if len(bad):
            raise ValueError(
                f"{source}: {len(bad)} of {x.size} values of '{name}' are missing or infinite, the first at "
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
            return _found(value)
    return f"the type {x.dtype}"


def _found(value: Any) -> str:
    if value is None:
        return "null"
    return f"the text {str(value)!r:.40}" if isinstance(value, str) else f"{value!r:.40}"


def _check_numbers(values: list[Any], what: str, at: tuple[int, ...] = ()) -> None:
    """Lists in lists, of numbers: before NumPy makes all of them texts because one is."""
    if len(at) >= MOST_AXES:
        raise ValueError(f"{what} is lists in lists, {len(at)} deep and more; expected is a number or a table.")
    for i, value in enumerate(values):
        if isinstance(value, list):
            _check_numbers(value, what, (*at, i))
        elif not isinstance(value, int | float):
            raise ValueError(f"{what} is not made of numbers: it holds {_found(value)} at {[*at, i]}.")
        elif isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{what} holds a whole number of more than 63 bits at {[*at, i]}; write it as 1.0e20.")


# ---- formats


def _read_json(path: Path, graph: Graph, sites: Sequence[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: it is not text.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}.") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read; expected are {_shapes(graph, sites)}.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if isinstance(content, list) and len(sites) == 1:  # the values alone
        return {sites[0]: content}
    if not isinstance(content, dict):
        raise ValueError(
            f'{path} holds a {type(content).__name__}, expected an object such as {{"{sites[0]}": [...]}} with '
            f"{_shapes(graph, sites)}."
        )
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that comes twice has two values, of which none is taken."""
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"'{name}' is there twice. Remove one of the two.")
        out[name] = value
    return out


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
    # Not by pandas: it fills up short rows, renames columns that are there twice, and cannot join what the comma of an
    # unquoted `y[0, 1]` separates; the errors need the cells as they are written.
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not CSV: {error}.") from error
    if not lines:
        raise ValueError(f"{path} is empty; expected are {_shapes(graph, sites)}.")
    header = _header(lines[0])
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
    if not named:
        if len(sites) > 1:
            raise ValueError(
                f"{path} has no header, so its columns are not named; expected are {_shapes(graph, sites)}."
            )
        return {sites[0]: _fitted(table, graph, sites[0], path)}
    columns: dict[str, dict[int, tuple[int, ...]]] = {}
    for i, column in enumerate(header):
        name, position = _position(column, graph)
        columns.setdefault(name, {})[i] = position
    return {name: _values(table, where, graph, name, path) for name, where in columns.items()}


def _header(cells: Sequence[str]) -> list[str]:
    """The names of the columns; the comma of `y[0, 1]` without quotes separates no columns."""
    out: list[str] = []
    for cell in cells:
        if out and re.search(r"\[[\d\s,]*$", out[-1]) and re.match(r"\s*\d+\s*(\]\s*)?$", cell):
            out[-1] += f",{cell.strip()}"
        else:
            out.append(cell.strip())
    return out


def _position(column: str, graph: Graph) -> tuple[str, tuple[int, ...]]:
    """A column's site, and the position in its last axes: `y[0, 1]` is `("y", (0, 1))`."""
    match = re.fullmatch(r"(.*?)\s*\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]", column)
    if match is None or column in graph.sites:
        return column, ()
    return match.group(1), tuple(int(i) for i in match.group(2).split(","))


def _values(table: np.ndarray, where: Mapping[int, tuple[int, ...]], graph: Graph, name: str, path: Path) -> np.ndarray:
    """The values of a site in the columns `{column: position}` of a table `(rows, columns)`, ordered by position."""
    if name not in graph.sites:
        return table[:, list(where)]  # which is an error, told with the names that are expected
    shape = graph.sites[name].shape
    positions = list(where.values())
    if positions == [()]:
        return _fitted(table[:, list(where)], graph, name, path)
    twice = next((p for i, p in enumerate(positions) if p in positions[:i]), None)
    if twice is not None:
        raise ValueError(
            f"{path}: the column '{_column(name, twice)}' is there twice. Remove or rename one of the two."
        )
    axes = len(positions[0])
    if any(len(p) != axes for p in positions):
        other = next(p for p in positions if len(p) != axes)
        raise ValueError(
            f"{path}: the columns '{_column(name, positions[0])}' and '{_column(name, other)}' name different numbers "
            f"of positions; expected is {_shapes(graph, [name])}."
        )
    if axes > len(shape):
        raise ValueError(
            f"{path}: the column '{_column(name, positions[0])}' has {axes} positions; expected is "
            f"{_shapes(graph, [name])}."
        )
    inner = shape[len(shape) - axes :]
    beyond = next((p for p in positions if any(i >= n for i, n in zip(p, inner, strict=True))), None)
    missing = next((p for p in np.ndindex(*inner) if p not in set(positions)), None)
    if beyond is not None or missing is not None:
        words = [f"there is a column '{_column(name, beyond)}'"] if beyond is not None else []
        words += [f"there is no column '{_column(name, missing)}'"] if missing is not None else []
        raise ValueError(f"{path}: {' and '.join(words)}; expected is {_shapes(graph, [name])}.")
    order = sorted(where, key=lambda i: where[i])
    return _fitted(table[:, order].reshape(len(table), *inner), graph, name, path)


def _column(name: str, position: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, position))}]" if position else name


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _fitted(values: np.ndarray, graph: Graph, name: str, path: Path) -> np.ndarray:
    """A table as a value of a site, or as many, a row each.

    Axes of length 1 may be more or fewer: a vector is a row or a column. Nothing else is reshaped: which axis the rows
    of a table stand for would be guessed.
    """
    shape = graph.sites[name].shape
    for wanted in (shape, (len(values), *shape)):
        if [n for n in values.shape if n != 1] == [n for n in wanted if n != 1]:
            return values.reshape(wanted)
    if values.size == math.prod(shape) and len(shape) > 1:
        raise ValueError(
            f"{path}: '{name}' is a table of shape {values.shape}, but the program simulates "
            f"{_shapes(graph, [name])}: which value belongs where cannot be told. Name the positions in the header, "
            f'as in "{_column(name, (0,) * len(shape))}", or write JSON, npz or NetCDF.'
        )
    return values


_READERS = {".json": _read_json, ".csv": _read_csv, ".npz": _read_npz, ".nc": _read_netcdf}
