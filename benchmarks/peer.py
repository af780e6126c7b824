"""FMPE of `sbi` in its own environment (`make peers`), whose epochs take turns with ours.

A shared machine changes its speed from minute to minute; epochs that alternate see the same machine.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"


class Peer:
    """A training of the peer that does one epoch when it is asked to, and nothing in between.

    **Arguments:** `arrays`: see `peers/sbi_fmpe.py`; `options`: its options; `python`: the peer's interpreter.
    """

    def __init__(self, arrays: dict[str, np.ndarray], python: Path | str = PYTHON, **options: Any):
        self.folder = tempfile.TemporaryDirectory()
        np.savez(Path(self.folder.name) / "simulations.npz", allow_pickle=False, **arrays)
        words = []
        for name, value in options.items():
            word = name.replace("_", "-")
            words += [f"--{'' if value else 'no-'}{word}"] if isinstance(value, bool) else [f"--{word}", str(value)]
        command = [str(python), str(ROOT / "benchmarks" / "peers" / "sbi_fmpe.py"), "simulations.npz", "--turns"]
        self.process = subprocess.Popen(
            [*command, *words], cwd=self.folder.name, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()  # it is ready

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("The peer has ended: its message is above.")
        return line

    def turn(self) -> float:
        """One epoch, validation with it: its seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._line())

    def finish(self) -> tuple[dict[str, Any], np.ndarray | None]:
        """The epochs that are left, draws and densities: the figures, and the draws, if they were to be saved."""
        out, _ = self.process.communicate()
        if self.process.returncode:
            raise RuntimeError("The peer has failed: its message is above.")
        saved = Path(self.folder.name) / "draws.npy"
        return json.loads(out.splitlines()[-1]), np.load(saved) if saved.exists() else None
