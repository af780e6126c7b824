"""What a task of sbi's benchmark has besides a program: ten observations, and reference draws for each."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpejax.tasks._task import Arrays, Task
from cpejax.tasks.sbibm import _data


@dataclass(frozen=True, eq=False, kw_only=True)
class SbibmTask(Task):
    """A task whose observations and reference draws are those of sbi's benchmark.

    **Arguments:** those of `Task`, and

    - `folder`: of the files; by default the task's name.
    - `file`: with the observation.
    """

    folder: str = ""
    file: str = "observation.csv"

    @property
    def observations(self) -> tuple[int, ...]:
        """Numbers of the observations that methods are judged by: 1 to 10."""
        return _data.OBSERVATIONS

    def observation(self, seed: int) -> Arrays:
        """The observation of that number, 1 to 10, `{site: array}`."""
        table = self._read(seed, self.file)
        return {name: value[0] for name, value in self._split(table, self.observed).items()}

    def true_parameters(self, number: int) -> Arrays:
        """The parameters that an observation was simulated with, `{site: array}`."""
        table = self._read(number, "true_parameters.csv")
        return {name: value[0] for name, value in self._split(table, self.parameters).items()}

    def published(self, seed: int) -> Arrays:
        """The benchmark's own 10,000 draws from the posterior of an observation, `{site: (n, *shape)}`."""
        return self._split(self._read(seed, "reference_posterior_samples.csv.bz2"), self.parameters)

    def _read(self, number: int, file: str) -> np.ndarray:
        return _data.read(self.folder or self.name.removeprefix("sbibm/"), number, file)

    def _split(self, rows: np.ndarray, sites: Any) -> Arrays:
        """Columns as sites, in the program's order, in single precision as a simulation is."""
        sizes = [int(np.prod(self.shapes[name])) for name in sites]
        if sum(sizes) != rows.shape[1]:
            raise ValueError(f"task {self.name!r}: a file has {rows.shape[1]} columns, expected {sum(sizes)}")
        parts = np.split(rows.astype(np.float32), np.cumsum(sizes)[:-1], axis=1)
        return {name: part.reshape(-1, *self.shapes[name]) for name, part in zip(sites, parts, strict=True)}
