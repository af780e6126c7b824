"""`cpe.open_simulations`: a folder of simulations, read when they are asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open

from cpejax.program.probe import Probe
from cpejax.util.files import Unusable
from cpejax.util.messages import say

SITE = "site."


class OpenSimulations(Mapping[str, np.ndarray]):
    """Simulations in a folder, `{site: (n, *shape)}`: a site is read when it is asked for, and not kept.

    Unlike those that `cpe.simulate` returns, simulations that are not finite are among them; `cpe.fit` leaves them out.
    `rows` reads a few.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        found = sorted(folder.glob("simulations-*.safetensors")) or sorted(folder.glob("part-*.safetensors"))
        if not found:
            raise FileNotFoundError(
                f"{folder} has no simulations. cpe.simulate(checkpoint=...) of a simulator on the host writes some "
                "to its folder, and cpejax simulate --part into the folder parts of a run."
            )
        self.sizes: dict[Path, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        runs = set()
        for path in found:
            shapes, run = _header(path)
            self.shapes = self.shapes or {name: shape[1:] for name, shape in shapes.items()}
            if {name: shape[1:] for name, shape in shapes.items()} != self.shapes:
                raise Unusable(f"{path} has other sites, or shapes, than {found[0]}: it is of another program.")
            self.sizes[path] = next(iter(shapes.values()))[0]
            runs.add(json.dumps({name: value for name, value in run.items() if name != "part"}))
            whole, self.program = int(run["n"]), str(run["program"])
        if len(runs) > 1:
            raise Unusable(f"{folder} has parts of several runs (program, number or key).")
        if self.n < whole:
            say(f"{self.n} of {whole} simulations are in {folder}; the others are not there yet.")

    @property
    def n(self) -> int:
        """How many simulations there are."""
        return sum(self.sizes.values())

    @property
    def bytes(self) -> int:
        """How large they are in float32, in which networks are trained."""
        return 4 * self.n * sum(math.prod(shape) for shape in self.shapes.values())

    def probe(self) -> Probe:
        """What the program gave that simulated them."""
        with safe_open(next(iter(self.sizes)), "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys() if name.startswith("probe.")}  # noqa: SIM118
            return Probe.restored(arrays, json.loads(file.metadata()["probe"]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # a mapping's own would read the site

    def __getitem__(self, name: str) -> np.ndarray:
        return self.rows(name, 0, self.n)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Simulations `start` to `stop` of a site, `(stop - start, *shape)`: only these are read."""
        if name not in self.shapes:
            raise KeyError(name)
        return self.take(np.arange(*slice(start, stop).indices(self.n)), [name])[name]

    def take(self, numbers: Int[np.ndarray, " k"], names: Collection[str]) -> dict[str, np.ndarray]:
        """Simulations by their numbers, `{site: (k, *shape)}`: runs are read at once, each file is opened once."""
        out: dict[str, np.ndarray] = {}
        firsts = np.cumsum([0, *self.sizes.values()])
        files = np.searchsorted(firsts, numbers, side="right") - 1
        cuts = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(files) != 0)) + 1
        runs: dict[int, list[tuple[int, int, int]]] = {}
        for a, b in zip([0, *cuts], [*cuts, len(numbers)], strict=True) if len(numbers) else ():
            runs.setdefault(int(files[a]), []).append((a, b, int(numbers[a] - firsts[files[a]])))
        paths = list(self.sizes)
        for i, here in runs.items():
            with safe_open(paths[i], "numpy") as file:
                for name in names:
                    column = file.get_slice(SITE + name)
                    for a, b, start in here:
                        part = column[start : start + b - a]
                        if name not in out:
                            out[name] = np.empty((len(numbers), *part.shape[1:]), part.dtype)
                        out[name][a:b] = part
        return out or {name: np.empty((0, *self.shapes[name])) for name in names}


def _header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """The shapes of the sites in a file, and of which run they are, without reading them."""
    try:
        with safe_open(path, "numpy") as file:
            names = [name for name in file.keys() if name.startswith(SITE)]  # noqa: SIM118
            shapes = {name.removeprefix(SITE): tuple(file.get_slice(name).get_shape()) for name in names}
            return shapes, dict(json.loads((file.metadata() or {})["run"]))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise Unusable(f"{path} is truncated, altered, or not a file of simulations ({error}).") from error


def open_simulations(folder: str | Path) -> OpenSimulations:
    """Open a folder of simulations without reading them.

    **Arguments:**

    - `folder`: the `checkpoint` of `cpe.simulate`, or the folder `parts` of a run.

    **Returns:** a mapping `{site: (n, *shape)}`, which `cpe.fit` takes as it takes that of `cpe.simulate`. More than
    1 GiB, in float32, is not read into memory, but block by block.

    >>> import tempfile
    >>> def double(rng, mu):
    ...     return 2 * mu + rng.normal()
    >>> def program():
    ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", cpe.Simulator(double, mu, host=True))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     drawn = cpe.simulate(program, 60, key=jax.random.key(0), checkpoint=folder)
    ...     opened = cpe.open_simulations(folder)
    ...     opened.n, opened["y"].shape, bool((opened.rows("y", 10, 20) == drawn["y"][10:20]).all())
    (60, (60,), True)
    """
    return OpenSimulations(Path(folder))
