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
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jax.nn import silu
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Values
from cpejax.coordinates.vector import Kind
from cpejax.flows.base import Flow
from cpejax.flows.blocks.network import BlockMethod, ConditionedNet, Conditions, Inverse, Scalar, Solve
from cpejax.flows.blocks.storage import wire
from cpejax.flows.conditioning import VectorFlow
from cpejax.nn.embeddings import Embedding
from cpejax.nn.linear import on_rows
from cpejax.program.inverse import invert

InverseBy = Literal["bisection", "regressor"]

TOLERANCE = 1e-5
"""The residual of a draw is to be no more; `unsolved` counts those with more.

It is `|Λ(θ) − u|`, in units of the base, or where the map is steep that over its derivative, which is how far the draw
is from the solution: in float32 neighbouring numbers are mapped further apart than the tolerance there.
"""


class DiscreteFlow(VectorFlow):
    """Increasing triangular maps, one after the other; see the module's docstring.

    **Arguments:** as `VectorFlow`; `inverse`, `blocks`, `inverse_by`: see `cpe.DiscreteCPE`; the options of
    `network.ConditionedNet`.
    """

    parts: list[ConditionedNet]
    regressor: eqx.nn.MLP | None

    def __init__(
        self,
        *args: Any,
        embed: Mapping[str, Embedding],
        coordinates: Kind,
        inverse: Inverse,
        width: int,
        blocks: int,
        inverse_by: InverseBy,
        like: Mapping[str, Any] | None = None,
        key: PRNGKeyArray,
        **options: Any,
    ):
        super().__init__(*args, embed=embed, coordinates=coordinates, like=like)
        wiring = wire(invert(self.coordinates.graph, inverse), self.base.vector)
        first, *keys = jax.random.split(key, 1 + blocks)
        self.parts = [
            ConditionedNet(wiring, self.data.size, positive=True, time=False, width=width, key=k, **options)
            for k in keys
        ]
        d = self.base.size
        self.regressor = None
        if inverse_by == "regressor":
            self.regressor = eqx.nn.MLP(d + self.data.size, d, 2 * width, 3, silu, key=first)

    def numbers_per_draw(self) -> int:
        return 8 * self.base.size * self.parts[0].net.biases[0].shape[1]

    # Training

    def prepare(self, values: Values) -> dict[str, Any]:
        """Vectors, and the data themselves: in coordinates other than the prior's, the base's density may need them."""
        return {**super().prepare(values), "data": {name: values[name] for name in self.data.graph.data}}

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:  # noqa: ARG002
        """Minus the log-likelihood; and what a regressor misses of the simulations that it is to give back."""
        x = self.of_rows(rows)
        u, log_derivative = self.to_base(rows["u"], x)
        if self.base.vector.kind == "prior":
            log_base = self.base.log_density(u, {})
        else:
            log_base = jax.vmap(lambda u, data: self.base.log_density(u[None], data)[0])(u, rows["data"])
        total = -(log_base + log_derivative.sum(-1)).mean()
        if self.regressor is not None:
            pairs = jax.lax.stop_gradient((u, x))
            total += jnp.sum((self._guess(*pairs) - rows["u"]) ** 2, axis=-1).mean()
        return total

    def _guess(self, u: Float[Array, "n d"], x: Float[Array, "n f"]) -> Float[Array, "n d"]:
        assert self.regressor is not None
        return u + on_rows(self.regressor, jnp.concatenate([u, x], axis=-1))

    # Density

    def to_base(self, u: Float[Array, "n d"], x: Float[Array, "#n f"]) -> tuple[Array, Float[Array, "n d"]]:
        """From posterior to base, and the logarithm of the Jacobian's diagonal, whose sum is `log |det|`.

        `x`: data vectors, one, or one for each.
        """
        total = jnp.zeros_like(u)
        for part in self.parts:
            u, log_derivative = part.net.with_log_derivative(u, _conditions(part, x))
            total += log_derivative
        return u, total

    def log_density(self, u: Float[Array, "n d"], data: Values) -> Float[Array, " n"]:
        """The log-density of vectors for one observation, exact, by one pass."""
        u, log_derivative = self.to_base(u, self.of_observation(data))
        return self.base.log_density(u, data) + log_derivative.sum(-1)

    # Sampling

    def draw_vectors(self, data: Values, n: int, key: PRNGKeyArray) -> tuple[Float[Array, "n d"], dict[str, Array]]:
        """Draws by inversion; `residual` is the largest residual, `unsolved` counts those above `TOLERANCE`.

        `residual_mean`: their mean, by which a regressor is judged (of many observations, or chunks, the worst).
        """
        target = self.base.draw(n, data, key=key)
        u, residual = self.from_base(target, self.of_observation(data))
        counts = {"residual": residual.max(), "residual_mean": residual.mean()}
        return u, {**counts, "unsolved": jnp.sum(residual > TOLERANCE)}

    def from_base(self, target: Float[Array, "n d"], x: Float[Array, "1 f"]) -> tuple[Array, Float[Array, " n"]]:
        """From base to posterior, and each draw's residual: by bisection, or by one Newton step from a guess."""
        guesses: list[Any] = [None] * len(self.parts)
        if self.regressor is not None:
            guesses = [self._guess(target, jnp.broadcast_to(x, (len(target), x.shape[1])))]
            for part in self.parts[:-1]:
                guesses.append(part.net(guesses[-1], _conditions(part, x)))
        solve: Solve = bisect if self.regressor is None else newton
        u = target
        for part, guess in reversed(list(zip(self.parts, guesses, strict=True))):
            u = part.net.invert(u, _conditions(part, x), solve, guess)
        found, log_derivative = self.to_base(u, x)
        return u, (jnp.abs(found - target) * jnp.exp(-jnp.maximum(log_derivative, 0.0))).max(-1)


def _conditions(part: ConditionedNet, x: Float[Array, "n f"]) -> Conditions:
    return part.pad([(c, None) for c in part.condition.of_data(x)])


def bisect(f: Scalar, u: Array, guess: Array, low: Array, high: Array) -> Array:  # noqa: ARG001
    """The solution between `low` and `high`, as near as float32 can say: maps that follow may be steep."""
    # The last point whose value is known comes back as `aux`: the solver's own answer is the middle of what is left,
    # which on a steep function is a worse one.
    bisection: Any = optx.Bisection  # as the type checker does not know its arguments
    error: Any = lambda z, _: (f(z) - u, z)  # noqa: E731
    solution: Any = optx.root_find(
        error,
        bisection(rtol=0.0, atol=TOLERANCE / 100, flip=False),
        0.5 * (low + high),
        options={"lower": low, "upper": high},
        has_aux=True,
        max_steps=32,
        throw=False,  # what is not solved in float32 is counted
    )
    return solution.aux


def newton(f: Scalar, u: Array, guess: Array, low: Array, high: Array) -> Array:
    """One step of Newton's method from `guess`; on a steep and bent function it may lead away, and is not taken."""
    value, derivative = jax.jvp(f, (guess,), (jnp.ones_like(guess),))
    better = jnp.clip(guess + (u - value) / derivative, low, high)
    return jnp.where(jnp.abs(f(better) - u) < jnp.abs(value - u), better, guess)


@dataclass(frozen=True)
class DiscreteCPE(BlockMethod):
    """The paper's discrete causal posterior estimation: increasing maps, masked by the posterior program.

    **Arguments:**

    - `coordinates`: `"prior"`, in which the prior is standard normal; or `"unconstrained"`, through the bijection of
        each site's support. With `inverse="reverse"` a parameter comes before its prior parents, which its prior
        coordinates depend on: that needs `"unconstrained"`.
    - `blocks`: the maps, one after the other.
    - `inverse_by`: draws are by `"bisection"`, or by a `"regressor"`, trained together with the maps, and one step of
        Newton's method.
    - `inverse`, `embed`, `width`, `hidden`, `condition`, `reads`, `storage`, `rank`: see `cpe.TriangularCPE`.

    >>> method = cpe.DiscreteCPE(blocks=2)  # cpe.fit(model, simulations, method=method, key=...)
    >>> method.coordinates, method.inverse_by
    ('prior', 'bisection')
    """

    flow: ClassVar[type[Flow]] = DiscreteFlow
    training: ClassVar[Mapping[str, Any]] = {"learning_rate": 4e-3, "weight_decay": 0.0}  # docs/triangular.md

    coordinates: Kind = "prior"
    blocks: int = 1
    inverse_by: InverseBy = "bisection"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coordinates == "plain":
            raise ValueError(
                "The discrete flow has no plain coordinates: its map could leave the prior's support, where the "
                "likelihood is zero. Use coordinates='prior' or 'unconstrained'."
            )

    def least_weights(self) -> int:
        return self.blocks * super().least_weights()
