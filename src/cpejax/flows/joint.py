"""What FMPE and PSE share: the network of the paper's appendix C, and draws and densities by its field."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
from jax.nn import silu
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.base import with_data
from cpejax.coordinates.prior import Values
from cpejax.flows.conditioning import VectorFlow
from cpejax.flows.ode import Field, Solver, log_density, solver_options, step_options, transport
from cpejax.flows.strata import TimeStrata
from cpejax.nn.linear import on_rows, split_columns
from cpejax.nn.time import TimeFeatures


class JointNet(eqx.Module):
    """A vector from parameters, data and time: each embedded by two layers, then two layers on all three.

    SiLU after every layer but the last. The first joint layer is a sum over the three, each computed separately: when
    drawing, that of the data is computed once for an observation and that of time once for a step.
    """

    theta: eqx.nn.MLP
    data: eqx.nn.MLP
    time: TimeFeatures
    first: tuple[Float[Array, "h _"], ...]  # for parameters, data, time
    bias: Float[Array, " h"]
    layers: tuple[eqx.nn.Linear, eqx.nn.Linear]

    def __init__(self, parameters: int, features: int, width: int, hidden: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 6)
        self.theta = eqx.nn.MLP(parameters, width, width, 1, silu, silu, key=keys[0])
        self.data = eqx.nn.MLP(features, width, width, 1, silu, silu, key=keys[1])
        self.time = TimeFeatures(64, key=keys[2])
        first = eqx.nn.Linear(2 * width + 64, hidden, key=keys[3])
        assert first.bias is not None
        self.first, self.bias = split_columns(first.weight, width, width, 64), first.bias
        self.layers = eqx.nn.Linear(hidden, hidden, key=keys[4]), eqx.nn.Linear(hidden, parameters, key=keys[5])

    def of_data(self, x: Float[Array, "n f"]) -> Float[Array, "n h"]:
        """What data add to the first joint layer."""
        return on_rows(self.data, x) @ self.first[1].T + self.bias

    def of_time(self, t: Float[Array, " n"]) -> Float[Array, "n h"]:
        """What time adds to the first joint layer."""
        return silu(self.time(t)) @ self.first[2].T

    def __call__(self, u: Float[Array, "n d"], condition: Float[Array, "#n h"]) -> Float[Array, "n d"]:
        """`condition`: the sum of `of_data` and `of_time`."""
        h = silu(on_rows(self.theta, u) @ self.first[0].T + condition)
        return on_rows(self.layers[1], silu(on_rows(self.layers[0], h)))


class JointFlow(VectorFlow):
    """A field on the vector of all parameters, unmasked, that is a function of `JointNet`.

    **Arguments:** as `VectorFlow`, and `width`, `hidden`: see `cpe.FMPE`.
    """

    net: JointNet

    def __init__(self, *args: Any, width: int, hidden: int, key: PRNGKeyArray, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.net = JointNet(self.base.size, self.data.size, width, hidden, key=key)

    @abstractmethod
    def field(self, data: Float[Array, "1 h"]) -> Field:
        """The field for one observation, whose part of the first joint layer is `data`."""

    def numbers_per_draw(self) -> int:
        width, hidden = self.net.theta.out_size, self.net.layers[0].out_features
        assert isinstance(width, int)
        assert isinstance(hidden, int)
        return 2 * (width + hidden) + 16 * self.base.size

    # Training

    def _condition(
        self, rows: dict[str, Any], strata: TimeStrata, times: Float[Array, " strata"]
    ) -> Float[Array, "n h"]:
        """What data and time add to the first joint layer, for a batch of simulations."""
        return self.net.of_data(self.of_rows(rows)) + strata.each(self.net.of_time(times))

    # Draws and densities

    def draw_options(self, *, solver: Solver = "rk45", steps: int | None = None) -> dict[str, Any]:
        return solver_options(solver, steps)

    def density_options(self, *, steps: int | None = None) -> dict[str, Any]:
        return step_options(steps)

    def _of_observation(self, data: Values) -> Float[Array, "1 h"]:
        return self.net.of_data(self.of_observation(data))

    def draw_vectors(
        self, data: Values, n: int, key: PRNGKeyArray, **options: Any
    ) -> tuple[Float[Array, "n d"], dict[str, Array]]:
        u = jax.random.normal(key, (n, self.base.size))
        return transport(self.field(self._of_observation(data)), u, **options), {}

    def log_density(self, u: Float[Array, "n d"], data: Values, **options: Any) -> Float[Array, " n"]:
        return self._log_densities(u, data, **options).mean(1)

    def _log_densities(self, u: Float[Array, "n d"], data: Values, **options: Any) -> Float[Array, "n k"]:
        return log_density(self.field(self._of_observation(data)), u, **options)

    def log_probs(self, values: Values, data: Values, **options: Any) -> Float[Array, "n k"]:
        full = with_data(values, data)
        found = self._log_densities(self.base.to_vectors(full), data, **options)
        return found + self.base.log_volume(full)[:, None]
