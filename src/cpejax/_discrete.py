"""The discrete flow: the paper's CPE with a discrete normalising flow (section 3.4, appendix A.2).

An increasing map `Λ(·; x)`, triangular in the posterior program's order, takes posterior draws to base draws: the same
block maps without time, with `exp` on the diagonal blocks, and a convex combination with the identity that keeps it
invertible and gives it tails that tanh alone has not. It is trained by maximum likelihood, in the density's direction
(the paper writes the other), so a density is one pass, and exact; drawing inverts the map.

The prior is the base: in prior coordinates, where it is N(0, I), or in unconstrained ones, where it has a density
everywhere. In plain coordinates a map could leave its support, and the likelihood would be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax._base import Prior, with_data
from cpejax._blocknet import BlockNet, Conditions, Reads, Scalar, Solve
from cpejax._blocks import Storage, wire
from cpejax._condition import Condition, DataVector
from cpejax._coordinates import Coordinates, Values
from cpejax._embed import Embedding, silu
from cpejax._flow import Flow, Solver
from cpejax._graph import Graph
from cpejax._invert import PosteriorProgram
from cpejax._program import Program
from cpejax._vector import Kind

InverseBy = Literal["bisection", "regressor"]

TOLERANCE = 1e-5
"""The residual `|Λ(θ) − u|` of a draw, in units of the base, is to be no more; `unsolved` counts those with more."""


class Part(eqx.Module):
    """One map of a stack, with its own conditions."""

    net: BlockNet
    condition: Condition

    def conditions(self, x: Float[Array, "n f"]) -> Conditions:
        """What each layer's nodes get."""
        found = [(c, None) for c in self.condition.of_data(x)]
        return [*found, *(None for _ in range(self.net.layers - len(found)))]


class DiscreteFlow(Flow):
    """Increasing triangular maps, one after the other; see the module's docstring.

    **Arguments:**

    - `program`, `graph`: the program, without arguments, and its graph; `posterior`: the inverse of it.
    - `simulations`: by which values are standardised.
    - `embed`, `coordinates`, `hidden`, `width`, `condition`, `reads`, `storage`, `rank`, `blocks`, `inverse_by`: see
        `cpe.CPE`.
    - `like`: the `description` of a flow to be built alike.
    """

    base: Prior
    data: DataVector
    parts: list[Part]
    regressor: eqx.nn.MLP | None

    def __init__(
        self,
        program: Program,
        posterior: PosteriorProgram,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        embed: Mapping[str, Embedding],
        *,
        coordinates: Kind,
        hidden: int,
        width: int,
        condition: str,
        reads: Reads,
        storage: Storage,
        rank: int | None,
        blocks: int,
        inverse_by: InverseBy,
        like: Mapping[str, Any] | None = None,
        key: PRNGKeyArray,
    ):
        values = {name: jnp.asarray(x, jnp.float32) for name, x in simulations.items()}
        self.base = Prior(program, graph, values, coordinates)
        self.data = DataVector(graph, values, embed, like["heavy"] if like else None)
        wiring = wire(posterior, self.base.vector)

        def part(key: PRNGKeyArray) -> Part:
            first, second = jax.random.split(key)
            net = BlockNet(wiring, hidden, reads=reads, positive=True, storage=storage, rank=rank, key=first)
            layers = net.layers if condition == "every" else 1
            return Part(net, Condition(self.data.size, hidden, layers, time=False, width=width, key=second))

        first, *keys = jax.random.split(key, 1 + blocks)
        self.parts = [part(k) for k in keys]
        d = self.base.size
        self.regressor = None
        if inverse_by == "regressor":
            self.regressor = eqx.nn.MLP(d + self.data.size, d, 2 * width, 3, silu, key=first)

    @property  # type: ignore[misc]
    def coordinates(self) -> Coordinates:  # type: ignore[override]
        return self.base.vector.coordinates

    def description(self) -> dict[str, Any]:
        return {"heavy": self.data.description()}

    def numbers_per_draw(self) -> int:
        return 8 * self.base.size * self.parts[0].net.biases[0].shape[1]

    # Training

    def prepare(self, values: Values) -> dict[str, Any]:
        data = {name: values[name] for name in self.data.graph.data}
        return {"u": self.base.to_vectors(values), "x": data if self.data.embed else self.data(data), "data": data}

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:  # noqa: ARG002
        """Minus the log-likelihood; and what a regressor misses of the simulations that it is to give back."""
        x = self.data(rows["x"]) if self.data.embed else rows["x"]
        u, log_slope = self.to_base(rows["u"], x)
        if self.base.vector.kind == "prior":
            log_base = self.base.log_density(u, {})
        else:
            log_base = jax.vmap(lambda u, data: self.base.log_density(u[None], data)[0])(u, rows["data"])
        total = -(log_base + log_slope).mean()
        if self.regressor is not None:
            pairs = jax.lax.stop_gradient((u, x))
            total += jnp.sum((self._guess(*pairs) - rows["u"]) ** 2, axis=-1).mean()
        return total

    def _guess(self, u: Float[Array, "n d"], x: Float[Array, "n f"]) -> Float[Array, "n d"]:
        assert self.regressor is not None
        return u + jax.vmap(self.regressor)(jnp.concatenate([u, x], axis=-1))

    # Density

    def to_base(self, u: Float[Array, "n d"], x: Float[Array, "#n f"]) -> tuple[Array, Float[Array, " n"]]:
        """From posterior to base, for data vectors `x` (one, or one for each), and `log |det|` of it."""
        total = jnp.zeros(len(u))
        for part in self.parts:
            u, log_slope = part.net.with_log_derivative(u, part.conditions(x))
            total += log_slope.sum(-1)
        return u, total

    def log_prob(self, values: Values, data: Values, *, steps: int | None) -> Float[Array, " n"]:  # noqa: ARG002
        """One pass; there are no steps to take."""
        full = with_data(values, data)
        u, log_slope = self.to_base(self.base.to_vectors(full), self._of_observation(data))
        return self.base.log_density(u, data) + log_slope + self.base.log_volume(full)

    def _of_observation(self, data: Values) -> Float[Array, "1 f"]:
        return self.data({name: x[None] for name, x in data.items()})

    # Sampling

    def sample(
        self,
        data: Values,
        n: int,
        key: PRNGKeyArray,
        *,
        steps: int,  # noqa: ARG002
        solver: Solver,  # noqa: ARG002
    ) -> tuple[Values, dict[str, Array]]:
        """Draws by inversion; `residual` is the largest residual, `unsolved` counts those above `TOLERANCE`.

        `residual_mean`: their mean, by which a regressor is judged (of many observations, or chunks, the worst).
        """
        target = self.base.draw(n, data, key=key)
        u, residual = self.from_base(target, self._of_observation(data))
        counts = {"residual": residual.max(), "residual_mean": residual.mean()}
        counts |= {"unsolved": jnp.sum(residual > TOLERANCE), **self.base.count_clipped(u)}
        return self.base.to_values(u, data), counts

    def from_base(self, target: Float[Array, "n d"], x: Float[Array, "1 f"]) -> tuple[Array, Float[Array, " n"]]:
        """From base to posterior, and each draw's residual: by bisection, or by one Newton step from a guess."""
        guesses: list[Any] = [None] * len(self.parts)
        if self.regressor is not None:
            guesses = [self._guess(target, jnp.broadcast_to(x, (len(target), x.shape[1])))]
            for part in self.parts[:-1]:
                guesses.append(part.net(guesses[-1], part.conditions(x)))
        solve: Solve = bisect if self.regressor is None else newton
        u = target
        for part, guess in reversed(list(zip(self.parts, guesses, strict=True))):
            u = part.net.invert(u, part.conditions(x), solve, guess)
        return u, jnp.abs(self.to_base(u, x)[0] - target).max(-1)


def bisect(f: Scalar, u: Array, guess: Array, low: Array, high: Array) -> Array:  # noqa: ARG001
    """The solution between `low` and `high`."""
    # The last point whose value is known comes back as `aux`: the solver's own answer is the middle of what is left,
    # which on a steep function is a worse one.
    bisection: Any = optx.Bisection  # as the type checker does not know its arguments
    error: Any = lambda z, _: (f(z) - u, z)  # noqa: E731
    solution: Any = optx.root_find(
        error,
        bisection(rtol=0.0, atol=TOLERANCE / 2, flip=False),
        0.5 * (low + high),
        options={"lower": low, "upper": high},
        has_aux=True,
        max_steps=48,
        throw=False,  # what is not solved in float32 is counted
    )
    return solution.aux


def newton(f: Scalar, u: Array, guess: Array, low: Array, high: Array) -> Array:
    """One step of Newton's method from `guess`."""
    value, slope = jax.jvp(f, (guess,), (jnp.ones_like(guess),))
    return jnp.clip(guess + (u - value) / slope, low, high)
