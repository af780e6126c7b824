"""Simulations on disk, as far as they have come: whole parts, and rows that workers have returned."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, PRNGKeyArray

from cpejax.program.probe import Probe, Prober
from cpejax.util.files import AT_WORK, Unusable, digest, load_arrays, pack_arrays, remove_parts, write_atomically
from cpejax.util.keys import key_words

AGAIN = "Give another folder, or delete it to start again."
MANY_FILES = 256
"""The number of files of rows that become one: workers may return a hundred thousand, one by one."""


class CheckpointFiles:
    """Parts of a run: simulations `start` to `start + chunk`, all sites in one file."""

    def __init__(self, folder: Path, prober: Prober, n: int, chunk: int, key: PRNGKeyArray, given: Mapping[str, Array]):
        fixed = digest(*(part for name, x in given.items() for part in (name.encode(), np.asarray(x).tobytes())))
        self.run = {"program": prober.graph.fingerprint, "n": n, "chunk": chunk, "key": key_words(key), "values": fixed}
        self.prober = prober
        self.folder = folder

    def _path(self, start: int) -> Path:
        return self.folder / f"simulations-{start:09d}.safetensors"

    def read(self, start: int) -> dict[str, np.ndarray] | None:
        """The part that begins there, `{site: (k, *shape)}`, if it is there; a part of another run is an error."""
        path = self._path(start)
        remove_parts(path, older_than=AT_WORK)
        if not path.exists():
            return None
        arrays, about = load_arrays(path)
        check_run(self.folder, self.run, self.prober, arrays, about)
        return sites_of(arrays)

    def write(self, start: int, part: Mapping[str, np.ndarray]) -> None:
        """Write a part."""
        write_atomically(self._path(start), packed(part, self.run, self.prober(part)))


def check_run(
    where: Path, run: Mapping[str, Any], prober: Prober, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]
) -> None:
    """An error if a file in a folder is of another run."""
    if about.get("run") != json.dumps(run):
        raise Unusable(f"The simulations in {where} are of another run (program, number or key). {AGAIN}")
    certain, doubtful = prober.differences(Probe.restored(arrays, json.loads(about["probe"])))
    if certain or doubtful:
        differ = "; ".join(certain + doubtful)
        raise Unusable(f"The simulations in {where} were begun with another program: {differ}. {AGAIN}")


def packed(sites: Mapping[str, np.ndarray], run: Mapping[str, Any], probe: Probe) -> bytes:
    """A file of simulations, `{site: (k, *shape)}`, that tells of which run they are."""
    arrays = {f"site.{name}": np.ascontiguousarray(x) for name, x in sites.items()} | probe.arrays()
    return pack_arrays(arrays, {"run": json.dumps(run), "probe": json.dumps(probe.about())})


def sites_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The simulations in such a file."""
    return {name.removeprefix("site."): x for name, x in arrays.items() if name.startswith("site.")}


class RowFiles:
    """Rows that have come back from workers and are not part of a whole part yet: a file for each batch.

    Two processes may write the same rows: they are the same. `rows.safetensors` says which program they are of.
    """

    def __init__(self, parts: CheckpointFiles, drawn: Mapping[str, np.ndarray]):
        self.folder, self.run = parts.folder, json.dumps(parts.run)
        self.files: dict[str, list[Path]] = {}  # of each site, those that were not merged yet
        path = self.folder / "rows.safetensors"
        if path.exists():
            arrays, about = load_arrays(path)
            check_run(self.folder, parts.run, parts.prober, arrays, about)
        else:
            write_atomically(path, packed({}, parts.run, parts.prober(drawn)))

    def read(self, site: str) -> tuple[np.ndarray, np.ndarray] | None:
        """All rows of a site that are there: their numbers `(k,)`, and their data `(k, *shape)`."""
        found = [part for path in sorted(self.folder.glob("rows-*.safetensors")) if (part := self._read(path, site))]
        if not found:
            return None
        return np.concatenate([rows for rows, _ in found]), np.concatenate([data for _, data in found])

    def _read(self, path: Path, site: str) -> tuple[np.ndarray, np.ndarray] | None:
        try:
            arrays, about = load_arrays(path)
        except Unusable:
            if not path.exists():  # merged by another process: then this one does it again
                return None
            raise
        if about.get("run") != self.run:
            raise Unusable(f"{path} is of another run (program, number or key). {AGAIN}")
        return (arrays["rows"], arrays["data"]) if about["site"] == site else None

    def write(self, site: str, rows: np.ndarray, data: np.ndarray) -> None:
        """Write rows of a site."""
        about = {"run": self.run, "site": site}
        path = self.folder / f"rows-{rows[0]:012d}-{secrets.token_hex(4)}.safetensors"
        write_atomically(path, pack_arrays({"rows": rows, "data": data}, about))
        small = self.files.setdefault(site, [])
        small.append(path)
        if len(small) >= MANY_FILES:
            self._merge(site)

    def _merge(self, site: str) -> None:
        small = self.files.pop(site)
        found = [part for path in small if (part := self._read(path, site))]
        self.write(site, np.concatenate([rows for rows, _ in found]), np.concatenate([data for _, data in found]))
        self.files[site] = []
        for path in small:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove them, once they are in whole parts."""
        for path in (*self.folder.glob("rows-*.safetensors"), self.folder / "rows.safetensors"):
            path.unlink(missing_ok=True)
