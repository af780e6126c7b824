"""The files of simulations and draws, hashes of files and values, and the versions that made them."""

from __future__ import annotations

import hashlib
import io
import platform
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np
import xarray as xr

from cpejax.program.graph import Graph
from cpejax.program.simulations import Simulations
from cpejax.util.files import digest, write_atomically


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """An npz file, whole or not at all."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # numpy.savez could not write a site called `file`
        for name, x in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as part:
                np.lib.format.write_array(part, np.asarray(x), allow_pickle=False)
    write_atomically(path, buffer.getvalue())


def read_simulations(path: Path, graph: Graph) -> Simulations:
    """Simulations from an npz file."""
    with np.load(path, allow_pickle=False) as file:
        return Simulations({name: file[name] for name in graph.shapes if name in file}, graph)


def write_draws(path: Path, tree: xr.DataTree) -> None:
    """A NetCDF file, whole or not at all.

    It is made in memory: where a disk is full, HDF5 fails once more when it closes its file, and ends the process.
    """
    buffer = io.BytesIO()
    tree.to_netcdf(buffer, engine="h5netcdf")
    write_atomically(path, buffer.getvalue())


def read_draws(path: Path) -> xr.DataTree:
    """Draws from a NetCDF file, in memory."""
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        return tree.load()


def hash_values(values: Mapping[str, np.ndarray]) -> str:
    """A hash of values, whatever file they came from."""
    arrays = {name: np.ascontiguousarray(values[name], np.float64) for name in sorted(values)}
    return digest(*(part for name, x in arrays.items() for part in (f"{name} {x.shape}".encode(), x.tobytes())))


def hash_file(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """What a result depends on besides its inputs."""
    names = ("cpejax", "jax", "numpyro", "equinox", "optax", "numpy")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}
