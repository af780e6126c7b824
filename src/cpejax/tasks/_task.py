"""What a benchmark task is: a program, the names of its data sites, and draws from its exact posterior."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import numpyro
import xarray as xr
from jaxtyping import Array, Float, Num

from cpejax.program.model import Model

Arrays = dict[str, Num[np.ndarray, "..."]]
ExactSampler = Callable[[Mapping[str, np.ndarray], int, np.random.Generator], Arrays]

SEEDS = (0, 1, 2, 3, 4)
"""Seeds of the five observations every method is judged on."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Task(Model):
    """A model with a tractable likelihood, five observations, and (almost always) exact posterior draws.

    **Arguments:**

    - `name`: what `tasks.get` finds it by.
    - `program`, `observed`: see `cpe.Model`; programs of tasks have no arguments.
    - `source`: where the model comes from.
    - `exact`: `(given, n, rng) -> {site: array with leading n}`, independent draws from `p(theta | given)`, written
        without the program's own densities so that the two can be checked against each other. `None`: the
        reference is drawn by slice sampling.
    - `how`: one line on how `exact` draws.
    - `fix`: what an observation has set by hand after it was simulated.

    >>> task = Task(name="three", program=program, observed=("y",), source="a textbook")
    >>> task.parameters, task.theta_dim, task.x_dim
    (('mu',), 1, 3)
    """

    name: str
    observed: Sequence[str]
    source: str
    exact: ExactSampler | None = None
    how: str = "hit-and-run slice sampling"
    fix: Callable[[Arrays], Arrays] | None = None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of one draw of every sample site, in the program's order."""
        found: dict[str, tuple[int, ...]] = {}  # what a traced function returns comes back sorted

        def look(key):
            found.update({name: value.shape for name, value in self._trace(key).items()})

        jax.eval_shape(look, jax.random.key(0))
        return found

    @cached_property
    def plates(self) -> dict[str, int]:
        """Sizes of the program's plates."""
        found: dict[str, int] = {}

        def look(key):
            sites = numpyro.handlers.trace(numpyro.handlers.seed(self.program, key)).get_trace().values()
            found.update({site["name"]: site["args"][0] for site in sites if site["type"] == "plate"})

        jax.eval_shape(look, jax.random.key(0))
        return found

    @property
    def parameters(self) -> tuple[str, ...]:
        """The sample sites that are not data, in the program's order."""
        return tuple(name for name in self.shapes if name not in self.observed)

    @property
    def theta_dim(self) -> int:
        """Number of scalar parameters."""
        return sum(int(np.prod(self.shapes[name])) for name in self.parameters)

    @property
    def x_dim(self) -> int:
        """Number of scalar data."""
        return sum(int(np.prod(self.shapes[name])) for name in self.observed)

    def observation(self, seed: int) -> Arrays:
        """One data set from the model: parameters from the prior, data from the parameters, `{site: array}`.

        The same seed gives the same values under any JAX configuration; the benchmark's are `tasks.SEEDS`.

        >>> from cpejax import tasks
        >>> tasks.get("tree").observation(0).keys()
        dict_keys(['x1', 'x2', 'x3', 'x4'])
        """
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"observation({seed!r}): a seed is an integer from 0 on (the benchmark uses 0 to 4)")
        draw = self._draw(int(seed))
        data = {name: draw[name] for name in self.observed}
        return self.fix(data) if self.fix else data

    @property
    def observations(self) -> tuple[int, ...]:
        """What the benchmark's observations are known by: `tasks.SEEDS`."""
        return SEEDS

    def published(self, seed: int) -> Arrays | None:  # noqa: ARG002 (of tasks that have some)
        """Reference draws that were published with the task, `{site: (n, *shape)}`, or `None`."""
        return None

    def reference(self, seed: int, **options: Any) -> xr.DataTree:
        """`cpe.reference` of this task: draws from the posterior of `observation(seed)`."""
        from cpejax.tasks._reference import reference  # its samplers are slow to import

        return reference(self, seed, **options)

    def ravel(self, draws: Mapping[str, Any]) -> Float[np.ndarray, "n theta_dim"]:
        """Draws `{site: (n, *shape)}` as one matrix, sites in the program's order."""
        missing = [name for name in self.parameters if name not in draws]
        if missing:
            raise ValueError(f"task {self.name!r}: no draws of {missing}, found {sorted(draws)}")
        n = len(np.asarray(draws[self.parameters[0]]))
        return np.concatenate([np.asarray(draws[name]).reshape(n, -1) for name in self.parameters], axis=1)

    def _draw(self, seed: int) -> Arrays:
        # The generator and the precision are pinned: an observation must not depend on the caller's JAX settings.
        with jax.enable_x64(False):
            draw = self._compiled(jax.random.key(seed, impl="threefry2x32"))
        return {name: np.asarray(draw[name]) for name in self.shapes}

    @cached_property
    def _compiled(self) -> Callable[[Array], dict[str, Array]]:
        return jax.jit(self._trace)

    def _trace(self, key: Array) -> dict[str, Array]:
        """One draw of every sample site."""
        trace = numpyro.handlers.trace(numpyro.handlers.seed(self.program, key)).get_trace()
        return {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}
