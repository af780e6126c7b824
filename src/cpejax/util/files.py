"""Files: written whole or not at all, never read when altered, and never anything but data."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save


class Unusable(ValueError):
    """A file that work cannot resume from: damaged, or of another run."""


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A path to write to instead of `path`, which a reader, or a restart after a crash, sees whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a restart after a crash, sees the old content or the new, never a part."""
    with atomically(path) as part:
        part.write_bytes(content)


AT_WORK = 3600.0
"""Seconds after which a process that has not finished a file is taken to be gone, where several may write it."""


def remove_parts(path: Path, older_than: float = 0.0) -> None:
    """Remove what a process that was killed while it wrote `path`, some seconds ago, has left behind."""
    for part in path.parent.glob(f".{path.name}.*.part"):
        remove_old(part, older_than)


def remove_old(part: Path, older_than: float) -> None:
    """Remove a file that nobody has written to for some seconds."""
    with suppress(FileNotFoundError):
        if time.time() - part.stat().st_mtime >= older_than:
            part.unlink()


def is_part(path: Path) -> bool:
    """Whether a file is one that `atomically` writes to, of a process that is at work or was killed."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}\.part", path.name) is not None


def pack_arrays(arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> bytes:
    """A safetensors file of arrays and metadata, with a digest of both."""
    return save(dict(arrays), {**about, "sha256": _digest(arrays, about)})


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of a file by `pack_arrays`."""
    try:
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise Unusable(f"{path} is truncated, altered, or not a safetensors file ({error}).") from error
    if about.pop("sha256", None) != _digest(arrays, about):
        raise Unusable(f"{path} was altered after it was written.")
    return arrays, about


def _digest(arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> str:
    parts = [json.dumps(dict(about), sort_keys=True).encode()]
    for name in sorted(arrays):
        parts += [f"{name} {arrays[name].dtype} {arrays[name].shape}".encode(), arrays[name].tobytes()]
    return digest(*parts)


def digest(*content: bytes) -> str:
    """A hash that shows whether something was altered."""
    out = hashlib.sha256()
    for part in content:
        out.update(len(part).to_bytes(8, "little"))
        out.update(part)
    return out.hexdigest()
