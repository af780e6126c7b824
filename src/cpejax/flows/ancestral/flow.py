"""The ancestral flow: exact, and the default. Each node solves its own conditional problem.

With the faithful inverse of the graph in the prior's order, `p(θ|x) = Π_i p(θ_i | θ_pa(i), x_pa(i))`. Each factor is a
one-dimensional flow in prior coordinates whose context is made of *clean* parents. The paper's masked joint field
(section 3.2) sees noisy ones and is biased by that; here every node's Jacobian is a number and the bias cannot occur.

Departures from the paper, each measured or explained in `docs/ancestral.md`:

* A coordinate `z` is first straightened by a normal mixture that its context predicts, `w = Φ⁻¹(F(z))`; the flow is
  from N(0, 1) to the law of `w`, and mends what the mixture leaves. A narrow posterior is then as easy as a wide one.
* The rectified path `(1 − t) w0 + t w1` is followed in the turned coordinates `y = cos(a) w0 + sin(a) w1`,
  `tan a = t / (1 − t)`. The rectified loss is the same number, `∫ |u − v|² da` with `u = cos(a) w1 − sin(a) w0`, but
  the field of a normal law is zero, so that Euler steps are exact for it.
* The loss has the weight `√tan a`, between the rectified loss (weight 1) and the likelihood's (weight `tan a`), and its
  value for the zero field is subtracted. With the mixture's likelihood it is then on the scale of a log-density, but no
  proper score. Epochs are compared by the log-density itself.
* The mixture's weights, means and scales are bounded, so that every output of a network is a distribution.
* The density is that of the solver's steps, not of the differential equation: it integrates to one with any number.
* Each node has its own network of time, and all networks an activation that is not SiLU (`softsign_linear`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cpejax.coordinates.prior import Constrain, Coordinates, Shapes, Values, plates_first
from cpejax.coordinates.standardise import Fixed, Standardise
from cpejax.flows.ancestral.covariates import Regression, Table, multiplied, regressed, regression, table_constants
from cpejax.flows.ancestral.mixture import Mixture, linear, quantile
from cpejax.flows.ancestral.plan import Group, Layout, Run, layout
from cpejax.flows.ancestral.stages import Reading, Stage
from cpejax.flows.base import Flow
from cpejax.flows.ode import STEPS, Solver, euler, log_density_of_steps, rk45, solver_options, step_options
from cpejax.flows.strata import Runs
from cpejax.nn.activations import softsign_linear
from cpejax.nn.embeddings import Embedding
from cpejax.nn.time import Fourier
from cpejax.program.graph import Graph
from cpejax.program.inverse import PosteriorProgram
from cpejax.program.simulator import Program
from cpejax.program.sites import Site
from cpejax.util.keys import key_words

Tables = dict[Table, Array]

FEATURES = 64
"""So many Fourier features of time."""
VALIDATION_STEPS = 4
"""Steps of the density by which an epoch is judged."""


def _weights(rng: np.random.Generator, nodes: int, fan_in: Any, *shape: int) -> Array:
    """Normal weights with the variance of LeCun's rule, for each node: `(nodes, *shape)`.

    By NumPy: JAX would compile a program for each shape, which takes longer than all else before training.
    """
    scale = 1 / np.sqrt(np.maximum(np.broadcast_to(fan_in, (nodes,)), 1))
    return jnp.asarray(rng.normal(size=(nodes, *shape)) * scale.reshape(nodes, *(1,) * len(shape)), float)


def _dense(x: Float[Array, "k *rows i"], w: Float[Array, "k o i"]) -> Float[Array, "k *rows o"]:
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    return jnp.einsum("kri,koi->kro", flat, w).reshape(*x.shape[:-1], w.shape[1])


def _dense_first(x: Float[Array, "k *rows i"], w: Float[Array, "k o i"]) -> Float[Array, "o k *rows"]:
    """The same with its numbers first."""
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    return jnp.einsum("koi,kri->okr", w, flat).reshape(w.shape[1], *x.shape[:-1])


def _lift(b: Float[Array, "k *last"] | Bool[Array, " k"], ndim: int) -> Array:
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
        """From the sum of what is read."""
        h = softsign_linear(h + _lift(self.bias, h.ndim))
        for w, b in zip(self.blocks, self.biases, strict=True):
            h = h + softsign_linear(_dense(h, w) + _lift(b, h.ndim))
        return h


class FieldNet(eqx.Module):
    """The field of each node, `γ y + (1 − γ) λ(t, y; context)` (paper, equation 8): four maps 1→h→h→h→1.

    Unlike the paper's, γ starts near 0: in turned coordinates the field of a normal law is zero, not `y`. Each node has
    its own network of time, 64-64 on random Fourier features, so that no two nodes share a weight.
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
        return _dense(softsign_linear(_dense(features, self.time_hidden) + _lift(self.time_bias, 3)), self.from_time)

    def __call__(self, time: Array, y: Float[Array, "k *rows"], context: Array) -> Float[Array, "k *rows"]:
        """`time` and `context`: what they add to the first layer, `(k, *rows, h)` or broadcast to it."""
        ndim = y.ndim + 1
        # As a product, though of single numbers: its slope is then one too, and not a slow sum.
        first = jnp.einsum("kr,kh->krh", y.reshape(len(y), -1), self.w1).reshape(*y.shape, -1)
        h = softsign_linear(first + context + time)
        h = softsign_linear(_dense(h, self.w2) + _lift(self.b2, ndim))
        h = softsign_linear(_dense(h, self.w3) + _lift(self.b3, ndim))
        out = _dense(h, self.w4[:, None])[..., 0] + _lift(self.b4, y.ndim)
        gamma = _lift(jax.nn.sigmoid(self.gamma - 6.0), y.ndim)
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
    ):
        nodes = len(group.nodes)
        self.which = Nodes(jnp.arange(nodes), jnp.asarray(uniform))
        # What is pooled is computed for every member, so its networks have half the blocks, or none where the
        # regression of many members on what tells them apart is read as well.
        depths = [depth if s.pool is None else 0 if s.light else -(-depth // 2) for s in group.stages]
        self.stages = [StageNet(group, s, nodes, width, d, rng) for s, d in zip(group.stages, depths, strict=True)]
        m = 3 * components
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


class AncestralFlow(Flow):
    """The flows of all nodes of a posterior program; see the module's docstring.

    **Arguments:**

    - `program`, `graph`: the program, without arguments, and its graph; `posterior`: the inverse of it.
    - `simulations`: by which values are standardised.
    - `embed`, `width`, `depth`, `hidden`, `components`, `members`: see `cpe.CPE`.
    - `like`: the `description` of a flow to be built alike.
    """

    plan: Layout = eqx.field(static=True)
    coordinates: Coordinates
    standard: dict[str, Standardise]
    summaries: dict[str, Standardise]
    embed: dict[str, Embedding]
    groups: list[GroupNet]
    members: int = eqx.field(static=True)

    def __init__(
        self,
        program: Program,
        posterior: PosteriorProgram,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        embed: Mapping[str, Embedding],
        *,
        width: int,
        depth: int,
        hidden: int,
        components: int,
        members: int,
        like: Mapping[str, Any] | None = None,
        key: PRNGKeyArray,
    ):
        values = {name: jnp.asarray(x, float) for name, x in simulations.items()}
        self.coordinates = Coordinates(program, graph, values)
        self.embed, self.members = dict(embed), members
        sites = posterior.graph.sites
        self.standard, features = {}, {}
        for name, site in sites.items():
            rows = np.asarray(_rows(site, _pick(site, values[site.origin], graph), graph))
            rows = rows.reshape(-1, rows.shape[-1])
            some = np.linspace(0, len(rows) - 1, min(len(rows), 100_000)).astype(int)
            self.standard[name] = Standardise(rows[some], like["heavy"][name] if like else None)
            features[name] = self.standard[name].size
            if site.origin in self.embed:
                one = jax.ShapeDtypeStruct(site.event_shape, jnp.result_type(float))
                features[name] = math.prod(eqx.filter_eval_shape(self.embed[site.origin], one).shape)
        z = jax.eval_shape(self.coordinates.to_z, {name: x[0] for name, x in values.items()})
        embedded = frozenset(self.embed)
        self.summaries = {}
        for name in regressed(posterior.graph, embedded):
            fit = regression(posterior.graph, table_constants(posterior.graph), name)
            first = _rows(sites[name], _pick(sites[name], values[sites[name].origin], graph)[:10_000], graph)
            results = np.asarray(_regress(fit, self.standard[name](first)))
            self.summaries[name] = Standardise(results, like["summaries"][name] if like else None)
        coordinates = {n: z[sites[n].origin].shape[-1] for n in posterior.order}
        columns = {name: s.size for name, s in self.summaries.items()}
        self.plan = layout(posterior, coordinates, features, columns, embedded)
        rng = np.random.default_rng(key_words(key))
        uniform = self.coordinates.uniform
        self.groups = [
            GroupNet(g, [sites[n].origin in uniform for n, _ in g.nodes], width, depth, hidden, components, rng)
            for g in self.plan.groups
        ]

    def description(self) -> dict[str, Any]:
        about = {"heavy": {name: list(s.heavy) for name, s in self.standard.items()}}
        if self.summaries:
            about["summaries"] = {name: list(s.heavy) for name, s in self.summaries.items()}
        return about

    def numbers_per_draw(self) -> int:
        width = self.groups[0].mixture.shape[2]
        rows = [math.prod(self.plan.shape(stage.plates)) for group in self.plan.groups for stage in group.stages]
        return 3 * width * max(rows) + sum(
            math.prod(self.plan.shape(t.plates)) * w for t, w in self.plan.widths.items()
        )

    # What networks read

    def _scale(self, name: str, x: Float[Array, "n ..."]) -> Float[Array, "n *plates s"]:
        """The standardised values of a site (of a member, where it is unrolled)."""
        site = self.plan.graph.sites[name]
        rows = _rows(site, x, self.coordinates.graph)
        return self.standard[name].one_each(rows) if site.origin in self.embed else self.standard[name](rows)

    def _scale_all(self, names: tuple[str, ...], values: Values) -> Values:
        sites = self.plan.graph.sites
        return {n: self._scale(n, _pick(sites[n], values[sites[n].origin], self.coordinates.graph)) for n in names}

    def _features(self, name: str, scaled: Float[Array, "n *plates s"]) -> Float[Array, "n *plates f"]:
        """What networks read of a site: its standardised values, or what the user's embedding makes of them."""
        site = self.plan.graph.sites[name]
        if site.origin not in self.embed:
            return scaled
        members = scaled.reshape(-1, *site.event_shape)
        return jax.vmap(self.embed[site.origin])(members).reshape(*scaled.shape[:-1], -1)

    def _data_tables(self, scaled: Values) -> Tables:
        features = {name: self._features(name, x) for name, x in scaled.items()}
        return self._tables("data", features, {}, len(next(iter(scaled.values()))))

    def _observed(self, data: Values) -> Tables:
        """The tables of one observation's data."""
        return self._data_tables(self._scale_all(self.plan.graph.data, {name: x[None] for name, x in data.items()}))

    def _tables(self, kind: str, features: Values, z: Values, n: int) -> Tables:
        tables = {
            table: jnp.zeros((n, *self.plan.shape(table.plates), width))
            for table, width in self.plan.widths.items()
            if table.kind == kind
        }
        for name, columns in features.items():
            table, where = self.plan.features[name]
            tables[table] = tables[table].at[..., where].set(columns)
            if name in self.plan.products:
                tables[table] = tables[table].at[..., self.plan.products[name]].set(self._products(name, columns))
            if name in self.plan.summaries:
                results = self.summaries[name](_regress(self.plan.regressions[name], columns))
                to, at = self.plan.summaries[name]
                tables[to] = tables[to].at[..., at].set(results)
            if name in self.plan.chain:
                pair = jnp.concatenate([z[name], quantile(z[name])], axis=-1)
                tables[table] = tables[table].at[..., self.plan.chain[name]].set(pair)
        return tables

    def _products(self, name: str, features: Float[Array, "n *plates f"]) -> Float[Array, "n *plates p"]:
        """A data site's features times the constants of each member."""
        plates = self.plan.features[name][0].plates
        out = []
        for table in multiplied(self.plan.graph, self.plan.constants, name):
            c = self._at(jnp.asarray(self.plan.constants[table]), table.plates, plates)[..., :-2]
            out.append((features[..., :, None] * c[..., None, :]).reshape(*features.shape[:-1], -1))
        return jnp.concatenate(out, axis=-1)

    def _at(self, x: Float[Array, "n ..."], plates: tuple[str, ...], at: tuple[str, ...]) -> Float[Array, "n ..."]:
        """A table at other plates: of a group that an index array names its columns, for each member that points to it.

        Plates that it has no part in are axes of one.
        """
        axes = list(plates)
        for i, plate in enumerate(plates):
            if plate not in at:
                inner, index = next(
                    (o, index) for (o, g), index in self.plan.graph.nests.items() if g == plate and o in at
                )
                x, axes[i] = jnp.take(x, jnp.asarray(index), axis=1 + i), inner
        x = x.transpose(0, *(1 + axes.index(p) for p in at if p in axes), x.ndim - 1)
        sizes = iter(x.shape[1:-1])
        return x.reshape(x.shape[0], *(next(sizes) if p in axes else 1 for p in at), x.shape[-1])

    def _pool(self, x: Float[Array, "k n *plates w"], stage: Stage) -> Float[Array, "k n *left w"]:
        """The mean over members of a plate, of all or of each group."""
        assert stage.pool is not None
        axis = 2 + stage.plates.index(stage.pool)
        if stage.within is None:
            return x.mean(axis)
        index, groups = self.plan.graph.nests[stage.pool, stage.within], self.plan.graph.plates[stage.within]
        left = [p for p in self.plan.graph.plates if p in stage.plates or p == stage.within]
        left.remove(stage.pool)
        count = np.bincount(index, minlength=groups)
        if x.shape[axis] == 1:  # the same for all members
            x = jnp.broadcast_to(x, (*x.shape[:axis], len(index), *x.shape[axis + 1 :]))
        if (
            groups * len(index) <= 10**5
        ):  # a product, which is the faster way for a few; groups without members are zero
            share = np.zeros((groups, len(index)), np.float32)
            share[index, np.arange(len(index))] = 1 / count[index]
            pooled = jnp.tensordot(x, share, axes=(axis, 1))
        else:
            total = jax.ops.segment_sum(jnp.moveaxis(x, axis, 0), jnp.asarray(index), groups)
            pooled = jnp.moveaxis(total, 0, -1) / np.maximum(count, 1)
        return jnp.moveaxis(pooled, -1, 2 + left.index(stage.within))

    def _known(self, values: Values) -> tuple[Values, Tables]:
        """The coordinates and tables of parameters that are all known, `{site: (n, ...)}` with the data among them."""
        sites = self.plan.graph.sites
        found = jax.vmap(self.coordinates.to_z)(values)
        z = {n: found[sites[n].origin][_place(sites[n], self.coordinates.graph)] for n in self.plan.posterior.order}
        n = len(next(iter(values.values())))
        tables = self._tables("parameters", self._scale_all(self.plan.posterior.order, values), z, n)
        return z, self._with_measured(tables, self.plan.posterior.order, lambda name: values[name], set())

    def _with_measured(
        self, tables: Tables, names: Sequence[str], get: Callable[[str], Array], shared: set[str]
    ) -> Tables:
        """For parameters that have a datum of their kind: its coordinate if it were the parameter, and how fast that
        changes. `get`: the values of sites, `(n, ...)`, or of those in `shared` without that axis.
        """
        for name in (n for n in names if n in self.plan.measured):
            datum, columns = self.plan.measured[name]

            def look(values: Values, x: Array, name: str = name) -> Array:
                def to_z(x: Array) -> Array:
                    return self.coordinates.to_z({**values, name: x})[name]

                z, slope = jax.jvp(to_z, (x,), (jnp.ones_like(x),))
                return jnp.concatenate([jnp.clip(z, -15.0, 15.0), jnp.log(jnp.abs(slope) + 1e-6)], axis=-1)

            given = {origin: get(origin) for origin in self.coordinates.graph.sites}
            axes = {origin: None if origin in shared else 0 for origin in given}
            found = jax.vmap(look, in_axes=(axes, axes[datum]))(given, given[datum])
            table, _ = self.plan.features[name]
            tables = tables | {table: tables[table].at[..., columns].set(found)}
        return tables

    def _coordinates_of(self, group: Group, z: Values) -> Float[Array, "k n *plates"]:
        return jnp.stack([z[name][..., k] for name, k in group.nodes])

    def _linear(self, net: GroupNet, z: Float[Array, "k n *plates"]) -> Float[Array, "k n *plates"]:
        return linear(z, _lift(net.which.uniform, z.ndim))

    def _context(self, group: int, net: GroupNet, tables: Tables) -> Context:
        """The context of a group's nodes, or of some of them, whose networks are `net`.

        A table of the data may have a leading axis of 1: what is computed from it alone is then shared by all draws.
        """
        plan = self.plan.groups[group]
        tables = self._constants | tables

        def read(reading: Reading, at: tuple[str, ...]) -> Float[Array, "k n *plates p"]:
            columns = jnp.asarray(reading.columns)[net.which.numbers]
            if reading.across:
                lead = [columns.shape[1 + reading.across.index(p)] if p in reading.across else 1 for p in at]
                columns = columns.reshape(len(columns), *lead, -1)
                if not reading.table.plates:
                    return jnp.moveaxis(jnp.take(tables[reading.table], columns, axis=1), 1, 0)
                x = self._at(tables[reading.table], reading.table.plates, at)
                return jnp.take_along_axis(x[None], columns[:, None], axis=-1)
            if not set(reading.table.plates) <= set(at):
                x = self._at(tables[reading.table], reading.table.plates, at)
                return jnp.moveaxis(x[..., columns], -2, 0)
            x = jnp.moveaxis(tables[reading.table][..., columns], -2, 0)
            sizes = iter(x.shape[2:-1])
            return x.reshape(*x.shape[:2], *(next(sizes) if p in reading.table.plates else 1 for p in at), x.shape[-1])

        outputs: list[Array] = []
        raws: dict[int, Array] = {}  # by stage
        for number, (stage, weights) in enumerate(zip(plan.stages, net.stages, strict=True)):
            ndim = 3 + len(stage.plates)
            h = jnp.zeros((1,) * ndim)
            inputs = [read(reading, stage.plates) for reading in stage.readings]
            for x, w in zip(inputs, weights.tables, strict=True):
                h = h + _dense(x, w)
            for sender, w in zip(stage.messages, weights.messages, strict=True):
                h = h + _dense(outputs[sender], w)
            arrived = [raws[sender] for sender in stage.messages if sender in raws]
            for x, w in zip(arrived, weights.raw, strict=True):
                h = h + _dense(x, w)
            h = weights(h)
            outputs.append(h if stage.pool is None else self._pool(h, stage))
            if stage.columns:
                raws[number] = self._pool_raw(stage, [inputs[i] for i in stage.raw] + arrived)
        mixture = _dense_first(h, net.mixture) + net.mixture_bias.T.reshape(-1, len(h), *(1,) * (ndim - 2))
        for x, w in zip(inputs + arrived, net.mixture_linear + net.mixture_raw, strict=True):
            mixture = mixture + _dense_first(x, w)
        hidden = _dense(h, net.field.from_context) + _lift(net.field.b1, ndim)
        return Context(hidden, Mixture.from_numbers(mixture, _lift(net.which.uniform, ndim - 1)))

    def _pool_raw(self, stage: Stage, values: list[Array]) -> Array:
        """What a stage reads, and what arrives there, pooled as it is."""
        shape = jnp.broadcast_shapes(*(x.shape[:-1] for x in values))
        both = jnp.concatenate([jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in values], axis=-1)
        return self._pool(both, stage)

    @property
    def _constants(self) -> Tables:
        return {table: jnp.asarray(x, jnp.result_type(float)) for table, x in self.plan.constants.items()}

    # Training

    def prepare(self, values: Values) -> dict[str, Any]:
        z, tables = self._known(values)
        data = self._scale_all(self.plan.graph.data, values)
        each = [self._coordinates_of(g, z) for g in self.plan.groups]
        rows = {"z": each, "s": [self._linear(net, z) for net, z in zip(self.groups, each, strict=True)]}
        rows = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rows)
        if self.embed:
            return {**rows, "tables": tables, "data": data}
        return {**rows, "tables": {**tables, **self._data_tables(data)}, "data": {}}

    def divide(self, rows: dict[str, Any], most: int) -> list[tuple[Flow, Any]]:
        """No two nodes share a weight unless data are embedded, so each part has some of the nodes."""
        groups = self.plan.groups
        shares: list[list[list[int]]] = [[[] for _ in groups] for _ in range(1 if self.embed else most)]
        work = np.zeros(len(shares))
        for g, group in enumerate(groups):
            for node in range(len(group.nodes)):
                least = int(work.argmin())
                shares[least][g].append(node)
                work[least] += sum(math.prod(self.plan.shape(stage.plates)) for stage in group.stages)
        parts: list[tuple[Flow, Any]] = []
        for share in shares:
            if any(share):
                which = [np.array(nodes, int) for nodes in share]
                nets = [_host(net).nodes(nodes) for net, nodes in zip(self.groups, which, strict=True)]
                own = {k: [_host(x)[:, w] for x, w in zip(rows[k], which, strict=True)] for k in ("z", "s")}
                parts.append((eqx.tree_at(lambda f: f.groups, self, nets), {**rows, **own}))
        return parts

    @property
    def least_loss(self) -> float:
        """The narrowest component of a mixture has a density of e⁷, or e¹⁰ at an edge; the flow adds a few nats."""
        return -20.0 * sum(len(group.nodes) for group in self.plan.groups)

    def joined(self, parts: Sequence[Flow]) -> AncestralFlow:
        def join(*nets: GroupNet) -> GroupNet:
            both = jax.tree.map(lambda *w: np.concatenate(w), *map(_host, nets))
            return jax.tree.map(jnp.asarray, both.nodes(np.argsort(both.which.numbers)))

        nets = [part.groups for part in parts if isinstance(part, AncestralFlow)]
        return eqx.tree_at(lambda f: f.groups, parts[0], [join(*each) for each in zip(*nets, strict=True)])

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """The loss of all nodes in one pass: see the module's docstring.

        Of a large plate a random subset of `members` is trained on: the mean over them is unbiased.
        """
        found = list(self._in_training(rows, key))
        runs = Runs(len(jax.tree.leaves(rows)[0]))
        # All that is random in one draw: keys of their own would take longer than the draws.
        ends = np.cumsum([runs.number, *(z.size for _, z, _, _ in found)])
        normal = jax.random.normal(key, (int(ends[-1]),))
        t = runs.times(ndtr(normal[: ends[0]]))
        total = jnp.zeros(())
        for i, (net, z, s, context) in enumerate(found):
            total -= context.mixture.log_density(z, s).mean(tuple(range(1, z.ndim))).sum()
            w = jax.lax.stop_gradient(context.mixture.straighten(s))
            noise = normal[ends[i] : ends[i + 1]].reshape(w.shape)
            total += _matching(net.field, context.hidden, w, noise, t, runs)
        return total

    def validation_loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """The mean negative log-density in prior coordinates, with a few steps.

        A proper score, unlike the loss: the better a mixture, the less is left for the flow to gain, so that the
        flow's part of the loss of a bad one may be far below what any posterior deserves.
        """
        total = jnp.zeros(())
        for net, z, s, context in self._in_training(rows, key):
            log_q = _log_densities(net, context, z, s, VALIDATION_STEPS)
            total -= log_q.mean(tuple(range(1, z.ndim))).sum()
        return total

    def _in_training(
        self, rows: dict[str, Any], key: PRNGKeyArray
    ) -> Iterator[tuple[GroupNet, Float[Array, "k n *plates"], Float[Array, "k n *plates"], Context]]:
        """Of each group that has nodes: its networks, its coordinates and what is linear in them, and its context."""
        tables = {**self._constants, **rows["tables"], **(self._data_tables(rows["data"]) if self.embed else {})}
        subset = self._subset(jax.random.fold_in(key, 1)) if self._large else {}
        for g, (group, net) in enumerate(zip(self.plan.groups, self.groups, strict=True)):
            if not len(net.which.numbers):
                continue
            inside = {p: which for p, which in subset.items() if p in group.plates}
            here = {table: _take(x, table.plates, inside, 1) for table, x in tables.items()}
            z, s = (_take(jnp.moveaxis(rows[name][g], 1, 0), group.plates, inside, 2) for name in ("z", "s"))
            yield net, z, s, self._context(g, net, here)

    @property
    def _large(self) -> dict[str, int]:
        """The plates of whose members a step trains on some; not those of index arrays, whose groups are whole."""
        graph = self.plan.graph
        linked = {p for link in graph.links for p in (*link.source, link.target)}
        return {p: size for p, size in graph.plates.items() if size > 2 * self.members and p not in linked}

    def _subset(self, key: PRNGKeyArray) -> dict[str, Array]:
        keys = jax.random.split(key, len(self._large))
        return {
            p: jax.random.choice(k, size, (self.members,), replace=False)
            for (p, size), k in zip(self._large.items(), keys, strict=True)
        }

    # Sampling

    def draw_options(self, *, solver: Solver = "euler", steps: int | None = None) -> dict[str, Any]:
        return solver_options(solver, steps)

    def sample(
        self, data: Values, n: int, key: PRNGKeyArray, *, solver: Solver = "euler", steps: int | None = STEPS
    ) -> tuple[Values, dict[str, Array]]:
        graph = self.coordinates.graph
        fixed = {name: jnp.broadcast_to(x, (n, *x.shape)) for name, x in data.items() if name in graph.parameters}
        data = {name: x for name, x in data.items() if name not in fixed}
        known = {name: jnp.zeros(graph.sites[name].shape) for name in graph.parameters} | data
        z = jax.eval_shape(self.coordinates.to_z, known)
        constrain = self.coordinates.constrainers(known, z)
        values = {name: jnp.zeros((n, *graph.sites[name].shape)) for name in graph.parameters} | data
        tables = self._tables("parameters", {}, {}, n) | self._observed(data)
        clipped = jnp.zeros((), jnp.int32)
        for number, run in enumerate(self.plan.runs):
            draw = self._level_drawer(run, n, solver, steps)
            keys = jax.random.split(jax.random.fold_in(key, number), len(run.sites))
            tables, values, z_run = self._draw_run(run, draw, tables, values, constrain, z, fixed, set(data), keys)
            clipped += self._count_clipped(run, z_run, set(fixed))
        return {name: values[name] for name in graph.parameters if name not in fixed}, {"clipped": clipped}

    def lacks(self, given: Collection[str]) -> dict[str, list[str]] | None:
        """All that is read by what is given must be given too: the product of the other factors is then exact."""
        sites, parameters = self.plan.graph.sites, self.coordinates.graph.parameters
        out: dict[str, list[str]] = {}
        for name in self.plan.posterior.order:
            origin = sites[name].origin
            if origin in given:
                read = {sites[p].origin for p in self.plan.posterior.parents[name]} - set(given)
                missing = set(out.get(origin, ())) | read
                out |= {origin: [p for p in parameters if p in missing]} if missing.intersection(parameters) else {}
        return out

    def _level_drawer(self, run: Run, n: int, solver: Solver, steps: int | None) -> Callable[..., tuple[Tables, Array]]:
        """A function that draws the coordinates of one level, one after the other along the sites' chains."""
        shape = (len(run.sites[0]), n, *self.plan.shape(run.table.plates))
        limits = self._limits([name for name, _ in self.plan.groups[run.group].nodes])

        def draw_node(tables: Tables, x: tuple[Array, Array, Array]) -> tuple[Tables, Array]:
            nodes, chain, noise = x
            net = self.groups[run.group].nodes(nodes)
            context = self._context(run.group, net, tables)
            w = _transport(net.field, context.hidden, noise, solver, steps)
            z = jnp.clip(context.mixture.bend(w), *(_lift(x[nodes], w.ndim) for x in limits))
            last = jnp.moveaxis(z, 0, -1)
            table = tables[run.table].at[..., chain[0]].set(last).at[..., chain[1]].set(quantile(last))
            return tables | {run.table: table}, z

        def draw_level(tables: Tables, nodes: Array, chain: Array, key: PRNGKeyArray) -> tuple[Tables, Array]:
            noise = jax.random.normal(key, (run.coordinates, *shape))
            if run.coordinates > 1:
                return jax.lax.scan(draw_node, tables, (nodes, chain, noise))
            tables, z = draw_node(tables, (nodes[0], chain[0], noise[0]))
            return tables, z[None]

        return draw_level

    def _draw_run(
        self,
        run: Run,
        draw: Callable[..., tuple[Tables, Array]],
        tables: Tables,
        values: Values,
        constrain: dict[str, Constrain],
        z_shapes: Shapes,
        fixed: Values,
        data: set[str],
        keys: Array,
    ) -> tuple[Tables, Values, Float[Array, "levels coordinates sites n *plates"]]:
        """The levels of a run. Several are a scan over one compiled body, with a switch for the sites' own priors.

        Sites in `fixed` get their values from there, whatever is drawn for them.
        """
        sites, graph = self.plan.graph.sites, self.coordinates.graph
        n = tables[run.table].shape[0]
        where = {name: (level, i) for level, names in enumerate(run.sites) for i, name in enumerate(names)}

        def getter(drawn: tuple[Array, ...]) -> Callable[[str], Array]:
            """The values of the program's sites, with those that this run has drawn."""

            def get(origin: str) -> Array:
                x = values[origin]
                for name in (s for s in where if sites[s].origin == origin):
                    level, i = where[name]
                    x = (
                        x.at[_position(sites[name], graph)].set(drawn[i][level])
                        if sites[name].index
                        else drawn[i][level]
                    )
                return x

            return get

        def finish(level: int, drawn: tuple[Array, ...], z: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            """The values and features of a level's sites from their coordinates."""
            out = []
            for i, name in enumerate(run.sites[level]):
                if sites[name].origin in fixed:
                    out.append(_pick(sites[name], fixed[sites[name].origin], graph))
                    continue
                z_site = jnp.moveaxis(z[: self.plan.sizes[name], i], 0, -1)
                out.append(_constrain(sites[name], graph, constrain, getter(drawn), z_site, z_shapes, data))
            return tuple(out), tuple(self._scale(s, x) for s, x in zip(run.sites[level], out, strict=True))

        def body(carry: tuple, x: tuple) -> tuple:
            tables, drawn = carry
            level, nodes, chain, columns, key = x
            if len(run.sites) == 1:
                tables = self._with_measured(tables, run.sites[0], getter(drawn), data)
            tables, z = draw(tables, nodes, chain, key)
            branches = [lambda d, z, level=level: finish(level, d, z) for level in range(len(run.sites))]
            out, features = jax.lax.switch(level, branches, drawn, z)
            drawn = tuple(d.at[level].set(o) for d, o in zip(drawn, out, strict=True))
            table = tables[run.table]
            for to, f in zip(columns, features, strict=True):
                table = table.at[..., to].set(f)
            return (tables | {run.table: table}, drawn), z

        drawn = tuple(jnp.zeros((len(run.sites), n, *sites[s].shape)) for s in run.sites[0])
        nodes, chain, columns = jax.tree.map(jnp.asarray, (run.nodes, run.chain, run.columns))
        z: Array
        if len(run.sites) > 1:
            xs = (jnp.arange(len(run.sites)), nodes, chain, columns, keys)
            carry, z = jax.lax.scan(body, (tables, drawn), xs)
        else:
            carry, z = body((tables, drawn), (0, nodes[0], chain[0], tuple(c[0] for c in columns), keys[0]))
            z = z[None]
        tables, drawn = carry
        return tables, values | {origin: getter(drawn)(origin) for origin in {sites[s].origin for s in where}}, z

    def _count_clipped(self, run: Run, z: Array, fixed: set[str]) -> Array:
        """How many coordinates stand at the limit of what can be drawn."""
        sites = self.plan.graph.sites

        def counts(name: str, k: int) -> bool:
            return k < self.plan.sizes[name] and sites[name].origin not in fixed

        limits = self._limits([s for level in run.sites for s in level])
        real = np.array([[[counts(s, k) for s in level] for k in range(z.shape[1])] for level in run.sites])
        rest = (1,) * (z.ndim - 3)
        low, high = limits.reshape(2, len(run.sites), 1, -1, *rest)
        return jnp.sum(((z <= low) | (z >= high)) & real.reshape(*real.shape, *rest))

    def _limits(self, names: Sequence[str]) -> Float[Array, "2 sites"]:
        """The least and the greatest coordinates of some sites."""
        origins = [self.plan.graph.sites[name].origin for name in names]
        once = list(dict.fromkeys(origins))
        each = jnp.stack([self.coordinates.limit(origin) for origin in once], axis=1)
        return each[:, np.array([once.index(origin) for origin in origins])]

    # Density

    def density_options(self, *, steps: int = STEPS) -> dict[str, Any]:
        return step_options(steps)

    def log_prob(self, values: Values, data: Values, *, steps: int = STEPS) -> Float[Array, " n"]:
        """All parents are known, so all nodes are integrated in one pass. Those of given parameters do not count."""
        n = len(next(iter(values.values())))
        full = values | {name: jnp.broadcast_to(x, (n, *x.shape)) for name, x in data.items()}
        z, tables = self._known(full)
        tables |= self._observed(data)
        total = jax.vmap(lambda v: self.coordinates.log_volume(v, set(values)))(full)
        sites = self.plan.graph.sites
        for g, (group, net) in enumerate(zip(self.plan.groups, self.groups, strict=True)):
            context = self._context(g, net, tables)
            coordinates = self._coordinates_of(group, z)
            s = self._linear(net, coordinates)
            log_q = _log_densities(net, context, coordinates, s, steps)
            drawn = np.array([sites[name].origin in values for name, _ in group.nodes])
            total += (log_q if drawn.all() else log_q[drawn]).sum((0, *range(2, log_q.ndim)))
        return total


def _log_densities(
    net: GroupNet, context: Context, z: Float[Array, "k n *plates"], s: Float[Array, "k n *plates"], steps: int
) -> Float[Array, "k n *plates"]:
    """The log-density of each coordinate, given its context."""
    w = context.mixture.straighten(s)
    log_q = _log_density(net.field, context.hidden, w, steps)
    return log_q + context.mixture.log_density(z, s) - norm.logpdf(w)


def _quarter_turn(steps: int) -> tuple[Float[Array, " steps"], Float[Array, " points"]]:
    """The widths of equal steps in the angle, and the times of all points."""
    times = jnp.linspace(0.0, 1.0, steps + 1)
    return jnp.pi / 2 * (times[1:] - times[:-1]), times


def _rate(field: FieldNet, hidden: Array) -> Callable[[Array, Array], Array]:
    """The derivative by the angle; what time adds to the first layer is `(k, h)`."""
    return lambda time, y: field(_lift(time, y.ndim + 1), y, hidden)


def _transport(
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


def _matching(
    field: FieldNet,
    hidden: Float[Array, "k #n *#plates h"],
    w: Float[Array, "k n *plates"],
    noise: Float[Array, "k n *plates"],
    t: Float[Array, " runs"],
    runs: Runs,
) -> Float[Array, ""]:
    """The weighted rectified loss of straightened coordinates `w`, less that of the zero field."""
    k, n, *plates = w.shape
    rest = (1,) * len(plates)
    angle = jnp.pi / 2 * t
    numbers = jnp.stack([jnp.sin(angle), jnp.cos(angle), jnp.sqrt(jnp.minimum(jnp.tan(angle), 8.0))])
    # By a product, which is computed once: what is repeated otherwise is computed anew wherever it is read.
    sin, cos, weight = (numbers @ np.eye(len(t), dtype=np.float32)[:, np.arange(n) // runs.length]).reshape(
        3, 1, n, *rest
    )
    time = runs.each(field.time(t), axis=1).reshape(k, n, *rest, -1)
    v = field(time, sin * w + cos * noise, hidden)
    u = cos * w - sin * noise
    error = jnp.pi / 2 * weight * ((u - v) ** 2 - u**2)
    return error.mean(tuple(range(1, error.ndim))).sum()


def _regress(fit: Regression, features: Float[Array, "n *plates f"]) -> Float[Array, "n r"]:
    """The coefficients of each feature, and logarithms: of the mean square of what they and groups do not fit, and of
    the variance between the groups of each index array.
    """
    y = features.reshape(len(features), -1, features.shape[-1])
    coefficients = jnp.einsum("cm,nmf->nfc", fit.solve, y)
    rest = y - jnp.einsum("mr,nrf->nmf", fit.fitted, jnp.einsum("mr,nmf->nrf", fit.fitted, y))
    left = (rest**2).mean(1)
    between = [jnp.einsum("gm,nmf->nfg", effects, y).var(-1) for effects in fit.effects]
    logs = [jnp.log(x + 1e-12) for x in (left, *between)]
    return jnp.concatenate([coefficients.reshape(len(y), -1), *logs], axis=-1)


def _host(tree: Any) -> Any:
    """As NumPy arrays: JAX would compile a program for each shape that is cut or put together."""
    return jax.tree.map(np.asarray, tree)


def _take(x: Array, plates: tuple[str, ...], subset: dict[str, Array], lead: int) -> Array:
    """The chosen members of some plates, whose axes start at `lead`."""
    for plate, which in subset.items():
        if plate in plates:
            x = jnp.take(x, which, axis=lead + plates.index(plate))
    return x


# Members of unrolled plates


def _position(site: Site, graph: Graph) -> tuple:
    """Where a member stands in the values of its program's site, `(n, *shape)`."""
    at = dict(site.index)
    return (slice(None), *(slice(None) if d is None else at.get(d, slice(None)) for d in graph.sites[site.origin].dims))


def _place(site: Site, graph: Graph) -> tuple:
    """Where a member stands in its site's coordinates, `(n, *plates, size)`."""
    at = dict(site.index)
    return (slice(None), *(at.get(p, slice(None)) for p in graph.plates if p in site.axes))


def _pick(site: Site, x: Float[Array, "n ..."], graph: Graph) -> Array:
    return x[_position(site, graph)] if site.index else x


def _rows(site: Site, x: Float[Array, "n ..."], graph: Graph) -> Float[Array, "n *plates size"]:
    return jax.vmap(lambda x: plates_first(x, site.dims, tuple(graph.plates)))(x)


def _constrain(
    site: Site,
    graph: Graph,
    constrain: dict[str, Constrain],
    get: Callable[[str], Array],
    z: Float[Array, "n *plates size"],
    z_shapes: Shapes,
    data: set[str],
) -> Array:
    """The value of a site, or of a member of an unrolled one, from its coordinates."""
    if site.index:
        z = jnp.zeros((len(z), *z_shapes[site.origin].shape)).at[_place(site, graph)].set(z)
    function = constrain[site.origin]
    given = {origin: get(origin) for origin in function.needs}
    axes = {origin: None if origin in data else 0 for origin in function.needs}
    x = jax.vmap(lambda g, z: function(g, z), in_axes=(axes, 0))(given, z)
    return _pick(site, x, graph)
