"""The data files of the wheel `sbibm` 1.1.0: downloaded, unpacked into the user's cache, and read as tables."""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from cpejax.tasks._cache import cache_directory
from cpejax.util.files import write_atomically

VERSION = "1.1.0"
SHA256 = "12ecc6b4d327b92f9225f08faa6405e4274fb8e75943d86a53157d1b1bcfaf74"
"""Of the wheel: another file is not unpacked."""
OBSERVATIONS = tuple(range(1, 11))
COMMAND = "cpejax data sbibm"
DATA_FILE = re.compile(r"sbibm/tasks/(\w+)/files/(num_observation_\d+)/(\w+\.csv(?:\.bz2)?)")
"""Names inside the wheel that are unpacked: tables of numbers."""


def directory() -> Path:
    """Where the files are: a folder for each task."""
    return cache_directory() / f"sbibm-{VERSION}"


def download(wheel: Path | None = None) -> Path:
    """Download the wheel and unpack its data files; the folder they are in.

    **Arguments:**

    - `wheel`: a wheel that is there already, instead of the package index's.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = _from_index(Path(folder)) if wheel is None else wheel
        if not found.is_file():
            raise ValueError(f"{found} does not exist: expected the wheel sbibm-{VERSION}-py2.py3-none-any.whl.")
        digest = hashlib.sha256(found.read_bytes()).hexdigest()
        if digest != SHA256:
            raise ValueError(
                f"{found} is not the wheel of sbibm {VERSION}: its SHA-256 is {digest}, expected {SHA256}."
            )
        with zipfile.ZipFile(found) as archive:
            for name in archive.namelist():
                if match := DATA_FILE.fullmatch(name):
                    write_atomically(directory().joinpath(*match.groups()), archive.read(name))
    return directory()


def _from_index(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"sbibm=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = " ".join(done.stderr.split())[-300:]
        raise ValueError(
            f"pip cannot download sbibm {VERSION} ({said}). Download the wheel by hand, and run: {COMMAND} --wheel FILE"
        )
    return wheels[0]


def read(task: str, observation: int, file: str) -> Float[np.ndarray, "rows columns"]:
    """A table: `file` of a task's observation.

    >>> read("two_moons", 11, "observation.csv")
    Traceback (most recent call last):
    ValueError: observation 11 of sbibm's task two_moons: there are ten, 1 to 10
    """
    if isinstance(observation, bool) or observation not in OBSERVATIONS:
        raise ValueError(f"observation {observation!r} of sbibm's task {task}: there are ten, 1 to 10")
    path = directory() / task / f"num_observation_{observation}" / file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there, nor can it be made: download the data of sbibm with: {COMMAND}")
    return np.atleast_2d(pd.read_csv(path).to_numpy(np.float64))
