"""The observed data of a run and, if they are known, the true parameters: from files, or from the model file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cpejax.program.graph import Graph
from cpejax.runs.data_files import check_shapes, read_data
from cpejax.runs.folder import RunFolder
from cpejax.runs.model_file import Failure
from cpejax.runs.result_files import hash_values

Given = dict[str, np.ndarray]
Source = dict[str, Any]
"""Where values are from, `{"file": path or None, "hash": of the values}`."""
NOWHERE: Source = {"file": None, "hash": None}


def read_observation(
    run: RunFolder, given: Path | None, truth: Path | None
) -> tuple[Given, Given | None, dict[str, Source]]:
    """The observed data and, if there is one observation whose parameters are known, these; and where both are from."""
    values, many, source = read_given(run, given)
    true, true_source = (None, NOWHERE) if many else read_truth(run, truth)
    return values, true, {"given": source, "truth": true_source}


def read_given(run: RunFolder, path: Path | None) -> tuple[Given, bool, Source]:
    """The observed data, from a file or from the model file; whether there are many observations; and the source."""
    path, recorded = _file(path, run.options("sample").get("given"))
    if path is None:
        if run.model.data is None:
            raise Failure(
                f"There are no data: name a file with --given, or define `data` in {run.model.path}. The program's "
                f"data are {', '.join(run.graph.data)}."
            )
        source = f"`data` in {run.model.path}"
        values = _from_model(run.model.data, run.graph.data, source)
    else:
        source = str(path)
        values = _reading(path, run.graph, run.graph.data, "data")
    try:
        many = check_shapes(values, run.graph, source)
    except ValueError as error:
        raise Failure(str(error)) from error
    return values, many, _source(run, path, values, recorded, "--given")


def read_truth(run: RunFolder, path: Path | None) -> tuple[Given | None, Source]:
    """The true parameters, if they are known, and the source."""
    path, recorded = _file(path, run.options("check").get("truth"))
    if path is None and run.model.truth is None:
        return None, NOWHERE
    source = str(path) if path is not None else f"`truth` in {run.model.path}"
    if path is not None:
        values = _reading(path, run.graph, run.graph.parameters, "true parameters")
    else:
        values = _from_model(run.model.truth or {}, run.graph.parameters, source)
    try:
        if check_shapes(values, run.graph, source):
            raise Failure(f"{source} has many values of each parameter, expected one: the truth.")
    except ValueError as error:
        raise Failure(str(error)) from error
    return values, _source(run, path, values, recorded, "--truth")


def _file(path: Path | None, recorded: Source | None) -> tuple[Path | None, Source | None]:
    """The file that was named; otherwise the one the run was begun with, and what is recorded of it."""
    if path is not None or recorded is None or recorded["file"] is None:
        return path, None
    return Path(recorded["file"]), recorded


def _source(run: RunFolder, path: Path | None, values: Given, recorded: Source | None, option: str) -> Source:
    now = {"file": None if path is None else str(path), "hash": hash_values(values)}
    if recorded is not None and recorded != now and not run.restart:
        raise Failure(
            f"{path} is not the file that the run in {run.folder} was begun with, or has changed since. Name the file "
            f"with {option}."
        )
    return now


def _reading(path: Path, graph: Graph, sites: Sequence[str], what: str) -> Given:
    try:
        return read_data(path, graph, sites, what)
    except ValueError as error:
        raise Failure(str(error)) from error


def _from_model(values: Mapping[str, Any], sites: Sequence[str], source: str) -> Given:
    missing = [name for name in sites if name not in values]
    if missing:
        raise Failure(f"{source} has no '{missing[0]}'; expected are {', '.join(sites)}.")
    out = {}
    for name in sites:
        x = np.asarray(values[name])
        if x.dtype.kind not in "fiub":
            raise Failure(f"{source}: '{name}' is not made of numbers, it has type {x.dtype}.")
        out[name] = x
    return out
