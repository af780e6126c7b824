"""The network of the paper's two flows: block maps with tanh between them (paper, section 3.2 and figure 3).

`v(θ, c) = γ θ + (1 − γ) λ(θ, c)` with four maps 1→h→h→h→1 in `λ`, and conditions `c` that are added before a tanh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.vector import Kind
from cpejax.flows.base import Method, check_options
from cpejax.flows.blocks.storage import Blocks, Levels, LowRank, Storage, Wiring, blocks
from cpejax.flows.conditioning import Condition
from cpejax.nn.embeddings import Embedding

Inverse = Literal["faithful", "reverse"]
Reads = Literal["ancestors", "parents"]
Conditioned = Literal["first", "every"]
Conditions = Sequence[tuple[Array, Array | None] | None]
"""For each hidden layer what is added, `(n, h)` or `(1, h)`: to the nodes that read data, and to the others."""

Scalar = Callable[[Array], Array]
Solve = Callable[[Scalar, Array, Array, Array, Array], Array]
"""Solves `f(z) = u` for one increasing `f`: from `f`, `u`, a guess, and bounds below and above the solution."""


UNROLLED = 4
"""The most nodes that are computed one by one where no derivative is needed."""
MANY, UNROLLED_BLOCKS = 1000, 48
"""Number of rows, as there are in draws, from which on arithmetic counts more than the number of operations; and the
maximum number of blocks of maps that are then computed node by node as well, however they are stored. More would take
too long to compile."""


class BlockNet(eqx.Module):
    """The convex combination of the identity with block maps.

    **Arguments:**

    - `hidden`: the size `h` of a node's block.
    - `reads`: `"ancestors"`, all maps have the posterior program's edges, as published: through four maps a node reads
        its ancestors up to four steps away. `"parents"`: only the first map has edges, so a node reads its parents and
        nothing else.
    - `positive`: increasing in every node's own value, for the discrete flow.
    - `storage`, `rank`: see `cpejax.flows.blocks.storage`.
    """

    maps: tuple[Blocks, ...]
    biases: tuple[Float[Array, "d out"], ...]
    gamma: Float[Array, ""]  # before the sigmoid

    def __init__(
        self,
        wiring: Wiring,
        hidden: int,
        *,
        reads: Reads,
        positive: bool,
        storage: Storage,
        rank: int | None,
        key: PRNGKeyArray,
    ):
        sizes = (1, hidden, hidden, hidden, 1)
        later = wiring if reads == "ancestors" else wiring.alone()
        one_by_one = storage == "auto" and not positive and wiring.size <= UNROLLED
        if reads == "parents" or one_by_one:  # most maps have no edges to store densely; or all is computed by edges
            storage = "edges"
        self.maps = tuple(
            blocks(
                later if k else wiring,
                sizes[k],
                sizes[k + 1],
                storage=storage,
                rank=rank,
                positive=positive,
                key=jax.random.fold_in(key, k),
            )
            for k in range(len(sizes) - 1)
        )
        self.biases = tuple(jnp.zeros((wiring.size, size)) for size in sizes[1:])
        self.gamma = jnp.zeros(())

    @property
    def wiring(self) -> Wiring:
        """What reads what in the first map."""
        return self.maps[0].wiring

    @property
    def layers(self) -> int:
        """Hidden layers."""
        return len(self.maps) - 1

    def _share(self) -> Float[Array, ""]:
        return jax.nn.sigmoid(self.gamma)

    def _hidden(self, x: Float[Array, "n d"], conditions: Conditions) -> tuple[list[Array], Float[Array, "n d"]]:
        """The values before each tanh, and `λ`."""
        rows = self.maps[0].rows
        h = (x[:, self.wiring.order] if rows == 0 else x.T[self.wiring.order])[..., None]
        before: list[Array] = []
        for k, (matrix, bias) in enumerate(zip(self.maps, self.biases, strict=True)):
            a = matrix(h) + jnp.expand_dims(bias, rows)
            if k < self.layers:
                a = a + _condition(conditions[k], jnp.expand_dims(self.wiring.data[:, None], rows), 1 - rows)
                before.append(a)
                h = jnp.tanh(a)
        out = a[..., 0]
        return before, (out[:, self.wiring.place] if rows == 0 else out[self.wiring.place].T)

    def __call__(self, x: Float[Array, "n d"], conditions: Conditions) -> Float[Array, "n d"]:
        gamma = self._share()
        node_by_node = self._unrolls(len(x))
        value = self._unrolled(x, conditions) if node_by_node else self._hidden(x, conditions)[1]
        return gamma * x + (1 - gamma) * value

    def _unrolls(self, rows: int) -> bool:
        """Whether this number of rows is computed node by node."""
        if self.wiring.size <= UNROLLED:
            return True
        blocks = self.wiring.size + len(self.wiring.sources)
        return rows >= MANY and blocks <= UNROLLED_BLOCKS and not isinstance(self.maps[0], LowRank)

    def _unrolled(self, x: Float[Array, "n d"], conditions: Conditions) -> Float[Array, "n d"]:
        """`λ` node by node: nothing is put together, or multiplied by zero, in between."""
        h = [x[:, i : i + 1] for i in self.wiring.order.tolist()]
        for k, (matrix, bias) in enumerate(zip(self.maps, self.biases, strict=True)):
            own, edge = matrix.diagonal(), 0
            out = []
            for node, parents in enumerate(matrix.wiring.parents):
                a = bias[node] + _product(h[node], own[node])
                for source in parents:
                    a = a + _product(h[source], matrix.at(edge))
                    edge += 1
                condition = conditions[k] if k < self.layers else None
                added = None if condition is None else condition[0 if self.wiring.data[node] else 1]
                a = a if added is None else a + added
                out.append(jnp.tanh(a) if k < self.layers else a)
            h = out
        return jnp.concatenate([h[i] for i in self.wiring.place.tolist()], axis=1)

    def with_derivative(self, x: Float[Array, "n d"], conditions: Conditions) -> tuple[Array, Float[Array, "n d"]]:
        """The value, and each node's derivative by its own input: the diagonal of the Jacobian, exactly.

        From a node back to itself there is no way through others, so the diagonal needs the diagonal blocks only.
        """
        before, value = self._hidden(x, conditions)
        derivative: Array | None = None
        for k, matrix in enumerate(self.maps):
            derivative = self._through(derivative, matrix.diagonal())
            derivative = derivative * (1 - jnp.tanh(before[k]) ** 2) if k < self.layers else derivative
        assert derivative is not None
        gamma = self._share()
        return gamma * x + (1 - gamma) * value, gamma + (1 - gamma) * self._to_vector(derivative)

    def with_log_derivative(self, x: Float[Array, "n d"], conditions: Conditions) -> tuple[Array, Float[Array, "n d"]]:
        """The value, and the logarithm of the derivative, by log-matrix products (paper, appendix A.2).

        `log Σ_k exp(a_ik + b_kj)` is a matrix product after the largest `a_ik` of each row is taken out.
        """
        before, value = self._hidden(x, conditions)
        log_derivative: Array | None = None
        for k, matrix in enumerate(self.maps):
            if log_derivative is None:
                log_derivative = self._through(None, matrix.log_diagonal())
            else:
                most = jax.lax.stop_gradient(log_derivative.max(-1, keepdims=True))
                log_derivative = jnp.log(self._through(jnp.exp(log_derivative - most), matrix.diagonal())) + most
            log_derivative = log_derivative + log_derivative_of_tanh(before[k]) if k < self.layers else log_derivative
        assert log_derivative is not None
        gamma = self._share()
        kept, rest = jax.nn.log_sigmoid(self.gamma), jax.nn.log_sigmoid(-self.gamma)
        return gamma * x + (1 - gamma) * value, jnp.logaddexp(kept, rest + self._to_vector(log_derivative))

    def _through(self, derivative: Array | None, diagonal: Float[Array, "d in out"]) -> Array:
        """A derivative through diagonal blocks; without one, that of the input itself."""
        rows = self.maps[0].rows
        if derivative is None:
            return jnp.expand_dims(diagonal[:, 0, :], rows)
        return jnp.einsum("ndi,dio->ndo" if rows == 0 else "dni,dio->dno", derivative, diagonal)

    def _to_vector(self, x: Float[Array, "a b 1"]) -> Float[Array, "n d"]:
        return x[..., 0][:, self.wiring.place] if self.maps[0].rows == 0 else x[..., 0][self.wiring.place].T

    # The other way

    def invert(
        self, u: Float[Array, "n d"], conditions: Conditions, solve: Solve, guess: Float[Array, "n d"] | None = None
    ) -> Float[Array, "n d"]:
        """The `x` with `self(x, conditions) = u`, for a network that is `positive`.

        Level by level: what a level's nodes read is known, and adds a constant to each layer; what remains is one
        increasing function of one scalar for every node and row. The levels of a run are one compiled loop.
        """
        order, n = self.wiring.order, len(u)
        hidden = tuple(jnp.zeros((self.wiring.size, n, b.shape[1])) for b in self.biases[:-1])
        start = jnp.zeros_like(u) if guess is None else guess
        carry: Any = (jnp.zeros((self.wiring.size, n)), hidden)
        step = self._level(u.T[order], start.T[order], conditions, solve)
        for run in self.wiring.runs:
            if len(run.nodes) == 1:
                carry = step(carry, Levels(run.nodes[0], run.edges[0]))[0]
            else:
                carry = jax.lax.scan(step, carry, Levels(jnp.asarray(run.nodes), jnp.asarray(run.edges)))[0]
        return carry[0][self.wiring.place].T

    def _level(self, u: Float[Array, "d n"], guess: Float[Array, "d n"], conditions: Conditions, solve: Solve) -> Any:
        diagonals = [matrix.diagonal() for matrix in self.maps]
        gamma = self._share()
        data = jnp.asarray(self.wiring.data)

        def step(carry: Any, run: Levels) -> Any:
            x, hidden = carry
            nodes, edges = run
            constants = []
            for k, (matrix, bias) in enumerate(zip(self.maps, self.biases, strict=True)):
                total = bias[nodes][:, None, :]
                if k < self.layers:
                    total = total + _condition(conditions[k], data[nodes][:, None, None], 0)
                if edges.shape[-1] and len(matrix.wiring.sources):
                    below = x[..., None] if k == 0 else hidden[k - 1]
                    weight = matrix.at(edges) * (edges >= 0)[..., None, None]
                    total = total + jnp.einsum(
                        "gsni,gsio->gno", below[jnp.asarray(matrix.wiring.sources)[edges]], weight
                    )
                constants.append(jnp.broadcast_to(total, (len(nodes), u.shape[1], bias.shape[1])))
            own = [d[nodes] for d in diagonals]

            def one(u: Array, guess: Array, constants: list[Array], own: list[Array]) -> tuple[Array, list[Array]]:
                low, high = (_chain(jnp.asarray(end), constants, own)[0] for end in (-jnp.inf, jnp.inf))
                bounds = ((u - (1 - gamma) * high) / gamma, (u - (1 - gamma) * low) / gamma)
                z = solve(lambda z: gamma * z + (1 - gamma) * _chain(z, constants, own)[0], u, guess, *bounds)
                return z, _chain(z, constants, own)[1]

            rows = jax.vmap(one, in_axes=(0, 0, 0, None))
            z, new = jax.vmap(rows)(u[nodes], guess[nodes], constants, own)
            hidden = tuple(h.at[nodes].set(a) for h, a in zip(hidden, new, strict=True))
            return (x.at[nodes].set(z), hidden), None

        return step


class ConditionedNet(eqx.Module):
    """A network with its own conditions.

    **Arguments:** `wiring`, `positive`, `hidden`, `reads`, `storage`, `rank`: of `BlockNet`; `features`: how many
    values of an observation; `time`, `width`: of `Condition`; `condition`: whether the `"first"` hidden layer gets
    one, or `"every"`.
    """

    net: BlockNet
    condition: Condition

    def __init__(
        self,
        wiring: Wiring,
        features: int,
        *,
        positive: bool,
        time: bool,
        hidden: int,
        width: int,
        condition: Conditioned,
        reads: Reads,
        storage: Storage,
        rank: int | None,
        key: PRNGKeyArray,
    ):
        first, second = jax.random.split(key)
        self.net = BlockNet(wiring, hidden, reads=reads, positive=positive, storage=storage, rank=rank, key=first)
        layers = self.net.layers if condition == "every" else 1
        self.condition = Condition(features, hidden, layers, time=time, width=width, key=second)

    def pad(self, found: list[tuple[Array, Array | None]]) -> Conditions:
        """The condition of each hidden layer: the first ones have what was found, the others none."""
        return [*found, *(None for _ in range(self.net.layers - len(found)))]


@dataclass(frozen=True)
class BlockMethod(Method):
    """The options that the paper's flows have in common: see `cpe.TriangularCPE`."""

    inverse: Inverse = "faithful"
    coordinates: Kind = "plain"
    embed: Mapping[str, Embedding] = field(default_factory=dict)
    width: int = 128
    hidden: int = 64
    condition: Conditioned = "first"
    reads: Reads = "ancestors"
    storage: Storage = "auto"
    rank: int | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.rank is not None and self.storage != "auto":
            raise ValueError(f"Blocks of rank {self.rank} have their own storage; found storage={self.storage!r}.")

    def least_weights(self) -> int:
        """A bound: the weights of the data's network, of a block on the diagonal, and of those between nodes."""
        return self.width**2 + self.hidden**2 + (self.rank or 0)


def _chain(z: Array, constants: Sequence[Array], own: Sequence[Array]) -> tuple[Float[Array, ""], list[Array]]:
    """`λ` of one node and one row as a function of its own value, which may be infinite, and its hidden layers."""
    h = jnp.tanh(z * own[0][0] + constants[0])
    hidden = [h]
    for constant, weight in zip(constants[1:-1], own[1:-1], strict=True):
        h = jnp.tanh(h @ weight + constant)
        hidden.append(h)
    return (h @ own[-1] + constants[-1])[0], hidden


def _product(h: Float[Array, "n in"], weight: Float[Array, "in out"]) -> Float[Array, "n out"]:
    return h * weight if len(weight) == 1 else h @ weight


def _condition(condition: tuple[Array, Array | None] | None, data: Any, axis: int) -> Array | float:
    """What a layer's nodes get, with an axis for nodes."""
    if condition is None:
        return 0.0
    readers, others = condition
    rest = 0.0 if others is None else jnp.expand_dims(others, axis)
    return jnp.where(data, jnp.expand_dims(readers, axis), rest)


def log_derivative_of_tanh(x: Array) -> Array:
    """`log tanh'(x)`, which is about −2 |x| where `1 − tanh²` is 0 in float32."""
    size = jnp.abs(x)
    return np.float32(2 * np.log(2)) - 2 * size - 2 * jnp.log1p(jnp.exp(-2 * size))
