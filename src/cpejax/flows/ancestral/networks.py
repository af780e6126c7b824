"""The networks of the ancestral flow's nodes: of a context, of its mixture, of the field; and what the field does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int

from cpejax.coordinates.standardise import Fixed
from cpejax.flows.ancestral.mixture import OF_ALL, Mixture
from cpejax.flows.ancestral.plan import Group
from cpejax.flows.ancestral.stages import Stage
from cpejax.flows.ode import Solver, euler, log_density_of_steps, rk45
from cpejax.flows.strata import TimeStrata
from cpejax.nn.activations import softsign_linear
from cpejax.nn.linear import dense
from cpejax.nn.time import Fourier

FEATURES = 64
"""Number of Fourier features of time."""


def _weights(rng: np.random.Generator, nodes: int, fan_in: Any, *shape: int) -> Array:
    """Normal weights with the variance of LeCun's rule, for each node: `(nodes, *shape)`.

    By NumPy: JAX would compile a program for each shape, which takes longer than all else before training.
    """
    scale = 1 / np.sqrt(np.maximum(np.broadcast_to(fan_in, (nodes,)), 1))
    return jnp.asarray(rng.normal(size=(nodes, *shape)) * scale.reshape(nodes, *(1,) * len(shape)), float)


def lift(b: Float[Array, "k *last"] | Bool[Array, " k"], ndim: int) -> Array:
    """Axes of length one behind the first, so that an array for nodes fits one of `ndim` axes for nodes and rows."""
    return b.reshape(b.shape[0], *(1,) * (ndim - b.ndim), *b.shape[1:])


class Nodes(Fixed):
    """Which nodes of a group these are, by number, and whether the prior of each is uniform."""

    numbers: Int[Array, " k"]
    uniform: Bool[Array, " k"]


class StageNet(eqx.Module):
    """A residual network on what a stage reads; its first layer is a sum over tables, each computed at its own plates.

    Deep and narrow, where the paper has 128-128: on two moons it is nearer to the exact posterior with fewer products.
    """

    tables: list[Float[Array, "k width p"]]
    messages: list[Float[Array, "k width width"]]
    raw: list[Float[Array, "k width r"]]
    bias: Float[Array, "k width"]
    blocks: list[Float[Array, "k width width"]]
    biases: list[Float[Array, "k width"]]

    def __init__(self, group: Group, stage: Stage, nodes: int, width: int, depth: int, rng: np.random.Generator):
        raw = [group.stages[sender].columns for sender in stage.messages if group.stages[sender].columns]
        fan_in = sum((r.counts for r in stage.readings), np.zeros(nodes)) + width * len(stage.messages) + sum(raw)
        self.tables = [_weights(rng, nodes, fan_in, width, r.columns.shape[-1]) for r in stage.readings]
        self.messages = [_weights(rng, nodes, fan_in, width, width) for _ in stage.messages]
        self.raw = [_weights(rng, nodes, fan_in, width, columns) for columns in raw]
        self.bias = jnp.zeros((nodes, width))
        self.blocks = [_weights(rng, nodes, width, width, width) for _ in range(depth)]
        self.biases = [jnp.zeros((nodes, width)) for _ in range(depth)]

    def __call__(self, h: Float[Array, "k *rows width"]) -> Float[Array, "k *rows width"]:
        """The output, from the sum of what the first layer reads."""
        h = softsign_linear(h + lift(self.bias, h.ndim))
        for w, b in zip(self.blocks, self.biases, strict=True):
            h = h + softsign_linear(dense(h, w) + lift(b, h.ndim))
        return h


class FieldNet(eqx.Module):
    """The field of each node, `γ y + (1 − γ) λ(t, y; context)` (paper, equation 8): four maps 1→h→h→h→1.

    Unlike the paper's, γ starts near 0: in rotated coordinates the field of a normal distribution is zero, not `y`.
    Each node has its own network of time, 64-64 on random Fourier features, so that no two nodes share a weight.
    """

    from_context: Float[Array, "k h width"]
    frequencies: Fourier
    time_hidden: Float[Array, "k h features"]
    time_bias: Float[Array, "k h"]
    from_time: Float[Array, "k h h"]
    w1: Float[Array, "k h"]
    b1: Float[Array, "k h"]
    w2: Float[Array, "k h h"]
    b2: Float[Array, "k h"]
    w3: Float[Array, "k h h"]
    b3: Float[Array, "k h"]
    w4: Float[Array, "k h"]
    b4: Float[Array, " k"]
    gamma: Float[Array, " k"]

    def __init__(self, nodes: int, width: int, hidden: int, rng: np.random.Generator):
        self.from_context = _weights(rng, nodes, width, hidden, width)
        self.frequencies = Fourier(_weights(rng, nodes, 1, FEATURES // 2))
        self.time_hidden = _weights(rng, nodes, FEATURES, hidden, FEATURES)
        self.time_bias = jnp.zeros((nodes, hidden))
        self.from_time = _weights(rng, nodes, hidden, hidden, hidden)
        self.w1, self.b1 = _weights(rng, nodes, 1, hidden), jnp.zeros((nodes, hidden))
        self.w2, self.b2 = _weights(rng, nodes, hidden, hidden, hidden), jnp.zeros((nodes, hidden))
        self.w3, self.b3 = _weights(rng, nodes, hidden, hidden, hidden), jnp.zeros((nodes, hidden))
        # Zero, what weight decay draws to as well: a field that is nearly zero, and draws of the predicted mixture.
        self.w4, self.b4 = jnp.zeros((nodes, hidden)), jnp.zeros(nodes)
        self.gamma = jnp.zeros(nodes)

    def time(self, t: Float[Array, " t"]) -> Float[Array, "k t h"]:
        """What time adds to the first layer."""
        features = self.frequencies(t)
        return dense(softsign_linear(dense(features, self.time_hidden) + lift(self.time_bias, 3)), self.from_time)

    def __call__(self, time: Array, y: Float[Array, "k *rows"], context: Array) -> Float[Array, "k *rows"]:
        """`time` and `context`: what they add to the first layer, `(k, *rows, h)` or broadcast to it."""
        ndim = y.ndim + 1
        h = softsign_linear(y[..., None] * lift(self.w1, ndim) + context + time)
        h = softsign_linear(dense(h, self.w2) + lift(self.b2, ndim))
        h = softsign_linear(dense(h, self.w3) + lift(self.b3, ndim))
        out = dense(h, self.w4[:, None])[..., 0] + lift(self.b4, y.ndim)
        gamma = lift(jax.nn.sigmoid(self.gamma - 6.0), y.ndim)
        return gamma * y + (1 - gamma) * out


class GroupNet(eqx.Module):
    """All networks of a group of nodes: the stages of the context, its mixture, and the field.

    The mixture is read from the context and, linearly, from what the last stage reads and what was pooled as it was.
    """

    stages: list[StageNet]
    mixture: Float[Array, "k m width"]
    mixture_bias: Float[Array, "k m"]
    mixture_linear: list[Float[Array, "k m p"]]
    mixture_raw: list[Float[Array, "k m r"]]
    which: Nodes
    field: FieldNet

    def __init__(
        self,
        group: Group,
        uniform: Sequence[bool],
        width: int,
        depth: int,
        hidden: int,
        components: int,
        rng: np.random.Generator,
        relative: bool = True,
    ):
        nodes = len(group.nodes)
        self.which = Nodes(jnp.arange(nodes), jnp.asarray(uniform))
        # What is pooled is computed for every member, so its networks have half the blocks, or none where the
        # regression of many members on what tells them apart is read as well.
        depths = [depth if s.pool is None else 0 if s.light else -(-depth // 2) for s in group.stages]
        self.stages = [StageNet(group, s, nodes, width, d, rng) for s, d in zip(group.stages, depths, strict=True)]
        m = 3 * components + (OF_ALL if relative else 0)
        self.mixture = jnp.zeros((nodes, m, width))
        self.mixture_bias = jnp.zeros((nodes, m))
        self.mixture_linear = [jnp.zeros((nodes, m, r.columns.shape[-1])) for r in group.stages[-1].readings]
        self.mixture_raw = [jnp.zeros((nodes, m, w.shape[-1])) for w in self.stages[-1].raw]
        self.field = FieldNet(nodes, width, hidden, rng)

    def nodes(self, which: Array | np.ndarray) -> GroupNet:
        """The networks of some nodes."""
        return jax.tree.map(lambda w: w[which], self)


class Context(eqx.Module):
    """What of a node does not depend on time: what the field reads, and the mixture that straightens its coordinate."""

    hidden: Float[Array, "k n *plates h"]
    mixture: Mixture


class Counts(eqx.Module):
    """Which nodes are counts, and between which coordinates each lies."""

    which: Bool[Array, " k"]
    low: Float[Array, "k n *plates"]
    high: Float[Array, "k n *plates"]

    def instead_of(self, log_q: Float[Array, "k n *plates"], mixture: Mixture) -> Float[Array, "k n *plates"]:
        """Log-densities, and of counts the logarithm of the mixture's mass."""
        return jnp.where(lift(self.which, log_q.ndim), mixture.log_mass(self.low, self.high), log_q)


def log_densities(
    net: GroupNet,
    context: Context,
    z: Float[Array, "k n *plates"],
    s: Float[Array, "k n *plates"],
    steps: int,
    counts: Counts | None = None,
) -> Float[Array, "k n *plates"]:
    """The log-density of each coordinate, given its context; of counts their log-probability."""
    w = context.mixture.straighten(s)
    log_q = _log_density(net.field, context.hidden, w, steps)
    log_q = log_q + context.mixture.log_density(z, s) - norm.logpdf(w)
    return log_q if counts is None else counts.instead_of(log_q, context.mixture)


def _quarter_turn(steps: int) -> tuple[Float[Array, " steps"], Float[Array, " points"]]:
    """The widths of equal steps in the angle, and the times of all points."""
    times = jnp.linspace(0.0, 1.0, steps + 1)
    return jnp.pi / 2 * (times[1:] - times[:-1]), times


def _rate(field: FieldNet, hidden: Array) -> Callable[[Array, Array], Array]:
    """The derivative by the angle; what time adds to the first layer is `(k, h)`."""
    return lambda time, y: field(lift(time, y.ndim + 1), y, hidden)


def transport(
    field: FieldNet, hidden: Array, noise: Float[Array, "k n *plates"], solver: Solver, steps: int | None
) -> Array:
    """Straightened coordinates from noise."""
    rate = _rate(field, hidden)
    if solver == "rk45":
        return rk45(lambda t, y: jnp.pi / 2 * rate(field.time(t[None])[:, 0], y), noise, 0.0, 1.0)
    assert steps is not None
    widths, times = _quarter_turn(steps)
    return euler(rate, noise, widths, jnp.moveaxis(field.time(times[:-1]), 1, 0))


def _log_density(field: FieldNet, hidden: Array, w: Float[Array, "k n *plates"], steps: int) -> Array:
    """The log-density of straightened coordinates, by Heun's method from the end back to the start."""
    widths, times = _quarter_turn(steps)
    return log_density_of_steps(_rate(field, hidden), w, widths, jnp.moveaxis(field.time(times), 1, 0))


def matching(
    field: FieldNet,
    hidden: Float[Array, "k #n *#plates h"],
    w: Float[Array, "k n *plates"],
    noise: Float[Array, "k n *plates"],
    t: Float[Array, " strata"],
    strata: TimeStrata,
) -> Float[Array, " k"]:
    """The weighted rectified loss of straightened coordinates `w` of each node, less that of the zero field."""
    k, n, *plates = w.shape
    rest = (1,) * len(plates)
    angle = jnp.pi / 2 * t
    columns = jnp.stack([jnp.sin(angle), jnp.cos(angle), jnp.sqrt(jnp.minimum(jnp.tan(angle), 8.0))])
    sin, cos, weight = strata.each(columns, axis=1).reshape(3, 1, n, *rest)
    time = strata.each(field.time(t), axis=1).reshape(k, n, *rest, -1)
    v = field(time, sin * w + cos * noise, hidden)
    u = cos * w - sin * noise
    error = jnp.pi / 2 * weight * ((u - v) ** 2 - u**2)
    return error.mean(tuple(range(1, error.ndim)))
