"""The ancestral flow: exact, and the default. Each node solves its own conditional problem.

With the faithful inverse of the graph in the prior's order, `p(θ|x) = Π_i p(θ_i | θ_pa(i), x_pa(i))`. Each factor is a
one-dimensional flow in prior coordinates whose context is made of *clean* parents. The paper's masked joint field
(section 3.2) conditions on noisy ones and is biased by that; here the Jacobian is diagonal and the bias cannot occur.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax._coordinates import LIMIT, Coordinates, Values
from cpejax._embed import Embedding, Fixed, Standardise
from cpejax._graph import Site
from cpejax._layout import Group, Layout, Reading, Stage, Table, layout
from cpejax._program import Program
from cpejax._invert import PosteriorProgram

Tables = dict[Table, Array]


def _weights(key: PRNGKeyArray, nodes: int, fan_in: int | np.ndarray, *shape: int) -> Array:
    """Normal weights with the variance of LeCun's rule, for each node: `(nodes, *shape)`."""
    scale = 1 / np.sqrt(np.maximum(np.broadcast_to(fan_in, (nodes,)), 1))
    return jax.random.normal(key, (nodes, *shape)) * jnp.asarray(scale, jnp.float32).reshape(nodes, *(1,) * len(shape))


def _dense(x: Float[Array, "k *rows i"], w: Float[Array, "k i o"]) -> Float[Array, "k *rows o"]:
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    return jnp.einsum("kri,kio->kro", flat, w).reshape(*x.shape[:-1], w.shape[-1])


class TimeFeatures(eqx.Module):
    """Random Fourier features of time, and a two-layer network on them (paper, appendix C)."""

    frequencies: Fourier
    mlp: eqx.nn.MLP

    def __init__(self, features: int = 64, width: int = 64, *, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.frequencies = Fourier(jax.random.normal(first, (features // 2,)))
        self.mlp = eqx.nn.MLP(features, width, width, 1, jax.nn.silu, key=second)

    def __call__(self, t: Float[Array, " n"]) -> Float[Array, "n width"]:
        angles = 2 * jnp.pi * t[:, None] * self.frequencies.values[None, :]
        return jax.vmap(self.mlp)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))


class Fourier(Fixed):
    """The random frequencies, which are not trained."""

    values: Float[Array, " f"]


class StageNet(eqx.Module):
    """Two layers on what a stage reads; the first is a sum over tables, each computed at its own plates."""

    tables: list[Float[Array, "k p width"]]
    messages: list[Float[Array, "k width width"]]
    b1: Float[Array, "k width"]
    w2: Float[Array, "k width width"]
    b2: Float[Array, "k width"]

    def __init__(self, stage: Stage, nodes: int, width: int, *, key: PRNGKeyArray):
        keys = iter(jax.random.split(key, len(stage.readings) + len(stage.messages) + 1))
        fan_in = sum((r.counts for r in stage.readings), np.zeros(nodes)) + width * len(stage.messages)
        self.tables = [_weights(next(keys), nodes, fan_in, r.columns.shape[1], width) for r in stage.readings]
        self.messages = [_weights(next(keys), nodes, fan_in, width, width) for _ in stage.messages]
        self.b1 = jnp.zeros((nodes, width))
        self.w2 = _weights(next(keys), nodes, width, width, width)
        self.b2 = jnp.zeros((nodes, width))


class GroupNet(eqx.Module):
    """All networks of a group of nodes: the stages of the context, and the field."""

    stages: list[StageNet]
    location: list[Float[Array, "k p 2"]]
    location_context: Float[Array, "k width 2"]
    location_bias: Float[Array, "k 2"]
    from_context: Float[Array, "k width h"]
    from_time: Float[Array, "k time h"]
    from_z: Float[Array, "k h"]
    b1: Float[Array, "k h"]
    w2: Float[Array, "k h h"]
    b2: Float[Array, "k h"]
    w3: Float[Array, "k h h"]
    b3: Float[Array, "k h"]
    w4: Float[Array, "k h"]
    b4: Float[Array, " k"]
    gamma: Float[Array, " k"]

    def __init__(self, group: Group, width: int, hidden: int, time: int, *, key: PRNGKeyArray):
        k = len(group.nodes)
        keys = iter(jax.random.split(key, len(group.stages) + 6))
        self.stages = [StageNet(stage, k, width, key=next(keys)) for stage in group.stages]
        self.location = [jnp.zeros((k, r.columns.shape[1], 2)) for r in group.stages[-1].readings]
        self.location_context = jnp.zeros((k, width, 2))
        self.location_bias = jnp.zeros((k, 2))
        self.from_context = _weights(next(keys), k, width, width, hidden)
        self.from_time = _weights(next(keys), k, time, time, hidden)
        self.from_z = _weights(next(keys), k, 1, hidden)
        self.b1 = jnp.zeros((k, hidden))
        self.w2 = _weights(next(keys), k, hidden, hidden, hidden)
        self.b2 = jnp.zeros((k, hidden))
        self.w3 = _weights(next(keys), k, hidden, hidden, hidden)
        self.b3 = jnp.zeros((k, hidden))
        self.w4 = jnp.zeros((k, hidden))
        self.b4 = jnp.zeros(k)
        self.gamma = jnp.full(k, -3.0)

    def nodes(self, which: Array) -> GroupNet:
        """The networks of some nodes."""
        return jax.tree.map(lambda w: w[which], self)

    def field(self, time: Array, z: Float[Array, "k *rows"], context: Float[Array, "k *rows h"]) -> Array:
        """`γ z + (1 − γ) λ(t, z; context)`, for features of time already multiplied by `from_time`: `(k, *rows, h)`."""
        lift = (slice(None),) + (None,) * (z.ndim - 1)
        h = jnp.tanh(z[..., None] * self.from_z[lift] + context + time)
        h = jnp.tanh(_dense(h, self.w2) + self.b2[lift])
        h = jnp.tanh(_dense(h, self.w3) + self.b3[lift])
        out = _dense(h, self.w4[..., None])[..., 0] + self.b4[lift]
        gamma = jax.nn.sigmoid(self.gamma)[lift]
        return gamma * z + (1 - gamma) * out


class Context(eqx.Module):
    """What does not depend on time: the field's context, and the location and scale of the coordinate."""

    hidden: Float[Array, "k n *plates h"]
    mean: Float[Array, "k n *plates"]
    log_scale: Float[Array, "k n *plates"]


class AncestralFlow(eqx.Module):
    """The flow of all nodes of a posterior program. See the module's docstring and `docs/ancestral.md`."""

    plan: Layout = eqx.field(static=True)
    coordinates: Coordinates
    standard: dict[str, Standardise]
    embed: dict[str, Embedding]
    time: TimeFeatures
    groups: list[GroupNet]
    draws: int = eqx.field(static=True)
    members: int = eqx.field(static=True)

    def __init__(
        self,
        program: Program,
        posterior: PosteriorProgram,
        prior_graph: Any,
        simulations: Mapping[str, np.ndarray],
        embed: Mapping[str, Embedding],
        *,
        width: int = 128,
        hidden: int = 64,
        draws: int = 4,
        members: int = 32,
        key: PRNGKeyArray,
    ):
        values = {name: jnp.asarray(x, jnp.float32) for name, x in simulations.items()}
        self.coordinates = Coordinates(program, prior_graph, values)
        self.embed = dict(embed)
        self.standard = {}
        graph = posterior.graph
        features: dict[str, int] = {}
        for name, site in graph.sites.items():
            origin = prior_graph.sites[site.origin]
            rows = self._member(site, jax.vmap(lambda x, o=origin: self.coordinates.canonical(o.name, x))(values[o_name(site)]))
            flat = np.asarray(rows).reshape(-1, rows.shape[-1])
            self.standard[name] = Standardise(flat[np.linspace(0, len(flat) - 1, min(len(flat), 100_000)).astype(int)])
            features[name] = self.standard[name].size
            if site.origin in self.embed:
                one = jax.ShapeDtypeStruct(site.event_shape, jnp.float32)
                features[name] = math.prod(eqx.filter_eval_shape(self.embed[site.origin], one).shape)
        z = jax.eval_shape(self.coordinates.to_z, {name: v[0] for name, v in values.items()})
        sizes = {n: z[graph.sites[n].origin].shape[-1] for n in posterior.order}
        self.plan = layout(posterior, sizes, features)
        first, second = jax.random.split(key)
        self.time = TimeFeatures(64, hidden, key=first)
        keys = jax.random.split(second, len(self.plan.groups))
        self.groups = [
            GroupNet(group, width, hidden, hidden, key=k) for group, k in zip(self.plan.groups, keys, strict=True)
        ]
        self.draws, self.members = draws, members

    # Tables

    def _member(self, site: Site, x: Array) -> Array:
        """The entries of one member of an unrolled site, from `(n, *plates of the program's site, size)`."""
        plates = [p for p in self.coordinates.graph.plates if p in site.axes]
        at = dict(site.index)
        return x[(slice(None), *(at.get(p, slice(None)) for p in plates))]

    def _canonical(self, site: Site, x: Array) -> Array:
        return self._member(site, jax.vmap(lambda x: self.coordinates.canonical(site.origin, x))(x))

    def _features(self, name: str, x: Array) -> Array:
        """A site's features, `(n, *plates, f)`, from its values as the program shapes them, `(n, ...)`."""
        site = self.plan.graph.sites[name]
        rows = self._canonical(site, x)
        if site.origin not in self.embed:
            return self.standard[name](rows)
        scaled = self.standard[name].one_each(rows).reshape(-1, *site.event_shape)
        return jax.vmap(self.embed[site.origin])(scaled).reshape(*rows.shape[:-1], -1)

    def data_tables(self, data: Values) -> Tables:
        """The tables of the data sites, `(n, *plates, columns)`, from `(n, ...)` values."""
        n = len(next(iter(data.values())))
        return self._tables("data", {s: self._features(s, data[self.plan.graph.sites[s].origin]) for s in self.plan.graph.data}, n)

    def _tables(self, kind: str, features: Values, n: int, chain: Values | None = None) -> Tables:
        tables: Tables = {}
        for table, width in self.plan.widths.items():
            if table.kind == kind:
                tables[table] = jnp.zeros((n, *self.plan.shape(table.plates), width))
        for name, columns in features.items():
            table, where = self.plan.features[name]
            tables[table] = tables[table].at[..., where].set(columns)
            if chain is not None and name in self.plan.chain:
                tables[table] = tables[table].at[..., self.plan.chain[name]].set(chain[name])
        return tables

    def prepare(self, values: Values) -> dict[str, Any]:
        """What training reads of each simulation, computed once: coordinates, features, and data for embeddings."""
        z = jax.vmap(self.coordinates.to_z)(values)
        graph = self.plan.graph
        n = len(next(iter(values.values())))
        z = {name: self._member(graph.sites[name], z[graph.sites[name].origin]) for name in self.plan.posterior.order}
        parameters = {name: self._features(name, values[graph.sites[name].origin]) for name in z}
        data = {name: values[name] for name in self.coordinates.graph.data}
        ready = {} if self.embed else self.data_tables(data)
        return {
            "z": z,
            "tables": {**self._tables("parameters", parameters, n, z), **ready},
            "data": data if self.embed else {},
        }

    # Networks

    def context(self, group: int, net: GroupNet, tables: Tables, nodes: Array | None = None) -> Context:
        """The context of a group's nodes (or some of them) from the tables.

        A data table may have a leading axis of 1: it is then computed once and shared by all draws.
        """
        plan = self.plan.groups[group]
        outputs: list[Array] = []
        for stage, weights in zip(plan.stages, net.stages, strict=True):
            h = weights.b1.reshape(len(weights.b1), 1, *(1,) * len(stage.plates), -1)
            for reading, w in zip(stage.readings, weights.tables, strict=True):
                h = h + self._lift(_dense(self._read(reading, tables, nodes), w), reading.table.plates, stage.plates)
            for sender, w in zip(stage.messages, weights.messages, strict=True):
                h = h + _dense(outputs[sender], w)
            h = jax.nn.silu(h)
            lift = (slice(None),) + (None,) * (h.ndim - 2)
            h = jax.nn.silu(_dense(h, weights.w2) + weights.b2[lift])
            if stage.pool is not None:
                h = h.mean(2 + stage.plates.index(stage.pool))
            outputs.append(h)
        lift = (slice(None),) + (None,) * (h.ndim - 2)
        location = _dense(h, net.location_context) + net.location_bias[lift]
        for reading, w in zip(plan.stages[-1].readings, net.location, strict=True):
            location = location + self._lift(
                _dense(self._read(reading, tables, nodes), w), reading.table.plates, plan.plates
            )
        hidden = _dense(h, net.from_context) + net.b1[lift]
        return Context(hidden, location[..., 0], location[..., 1])

    def _read(self, reading: Reading, tables: Tables, nodes: Array | None) -> Array:
        columns = jnp.asarray(reading.columns)
        columns = columns if nodes is None else columns[nodes]
        return jnp.moveaxis(tables[reading.table][..., columns], -2, 0)

    def _lift(self, x: Array, plates: tuple[str, ...], to: tuple[str, ...]) -> Array:
        """Axes of length one for the plates that `x`, `(k, n, *plates, width)`, does not have."""
        sizes = iter(x.shape[2:-1])
        return x.reshape(*x.shape[:2], *(next(sizes) if p in plates else 1 for p in to), x.shape[-1])

    # Training

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """The rectified loss of all nodes in one pass (paper, equation 12), and the likelihood of their locations.

        Each simulation is used with several times and noises (`draws`), because its context is the expensive part. Of a
        large plate a random subset of `members` is trained on: the mean over them is unbiased.
        """
        tables = {**rows["tables"], **(self.data_tables(rows["data"]) if self.embed else {})}
        n = len(next(iter(rows["z"].values())))
        key_t, key_noise, key_members = jax.random.split(key, 3)
        # Stratified over the batch: the same law for each, less noise in the mean.
        strata = (jnp.arange(n * self.draws) + jax.random.uniform(key_t, (n * self.draws,))) / (n * self.draws)
        t = strata.reshape(n, self.draws).T.reshape(self.draws, n)
        time = self.time(t.reshape(-1)).reshape(self.draws, n, -1)
        subset = self._subset(key_members)
        total = jnp.zeros(())
        for g, (plan, net) in enumerate(zip(self.plan.groups, self.groups, strict=True)):
            inside = {p: subset[p] for p in plan.plates if p in subset}
            here = {table: self._take(x, table.plates, inside) for table, x in tables.items()}
            z = jnp.stack([rows["z"][name][..., k] for name, k in plan.nodes])
            z = self._take(z[..., None], plan.plates, inside, lead=2)[..., 0]
            context = self.context(g, net, here)
            residual = (z - context.mean) * jnp.exp(-context.log_scale)
            total += jnp.mean(0.5 * residual**2 + context.log_scale, axis=tuple(range(1, z.ndim))).sum()
            total += self._matching_loss(net, context, jax.lax.stop_gradient(residual), t, time, jax.random.fold_in(key_noise, g))
        return total

    def _matching_loss(self, net: GroupNet, context: Context, w: Array, t: Array, time: Array, key: PRNGKeyArray) -> Array:
        """The rectified loss for standardised coordinates `w`, `(k, n, *plates)`."""
        k, n, *plates = w.shape
        ones = (1,) * len(plates)
        noise = jax.random.normal(key, (k, self.draws, n, *plates))
        t = t.reshape(1, self.draws, n, *ones)
        noisy = t * w[:, None] + (1 - t) * noise
        features = jnp.einsum("dnf,kfh->kdnh", time, net.from_time).reshape(k, self.draws, n, *ones, -1)
        v = net.field(features, noisy, context.hidden[:, None])
        error = (w[:, None] - noise - v) ** 2
        return error.mean(tuple(range(1, error.ndim))).sum()

    def _subset(self, key: PRNGKeyArray) -> dict[str, Array]:
        big = [p for p, size in self.plan.graph.plates.items() if size > 2 * self.members]
        keys = jax.random.split(key, max(len(big), 1))
        return {
            p: jax.random.choice(k, self.plan.graph.plates[p], (self.members,), replace=False)
            for p, k in zip(big, keys, strict=False)
        }

    def _take(self, x: Array, plates: tuple[str, ...], subset: dict[str, Array], lead: int = 1) -> Array:
        for plate, which in subset.items():
            if plate in plates:
                x = jnp.take(x, which, axis=lead + plates.index(plate))
        return x

    # Sampling

    def sample(
        self, data: Values, n: int, key: PRNGKeyArray, solve: Callable[[Callable, Array, Array], Array], grid: Array
    ) -> tuple[Values, Array]:
        """`n` draws for one observation, level by level, and how many coordinates were clipped to stay finite.

        `data` has the program's shapes without a leading axis.
        """
        plan = self.plan
        graph, prior = plan.graph, self.coordinates.graph
        tables = {**self._tables("parameters", {}, n), **self.data_tables({k: v[None] for k, v in data.items()})}
        values: Values = {name: jnp.zeros((n, *prior.sites[name].shape)) for name in prior.parameters}
        values.update(data)
        z_shapes = jax.eval_shape(self.coordinates.to_z, {k: v if k in data else v[0] for k, v in values.items()})
        constrainers = self.coordinates.constrainers(
            {k: v if k in data else v[0] for k, v in values.items()}, z_shapes
        )
        time_grid = self.time(grid[:-1])
        clipped = jnp.zeros((), jnp.int32)

        for number, run in enumerate(plan.runs):
            group = plan.groups[run.group]
            at = {node: i for i, node in enumerate(group.nodes)}
            most = max(plan.sizes[s] for s in run.sites[0])
            nodes = np.array([[[at.get((s, k), 0) for s in level] for k in range(most)] for level in run.sites])
            table = Table("parameters", group.plates)
            waste = plan.widths[table] - 1
            chain = np.array(
                [[[plan.chain[s].start + k if plan.sizes[s] > max(k, 1) else waste for s in level] for k in range(most)] for level in run.sites]
            )
            columns = [np.array([np.arange(w.start, w.stop) for w in (plan.features[level[i]][1] for level in run.sites)]) for i in range(len(run.sites[0]))]
            shape = (len(run.sites[0]), n, *plan.shape(group.plates))

            def draw_node(tables: Tables, x: tuple, group_index: int = run.group, table: Table = table) -> tuple[Tables, Array]:
                nodes, chain, noise = x
                net = self.groups[group_index].nodes(nodes)
                context = self.context(group_index, net, tables, nodes)
                features = jnp.einsum("tf,kfh->tkh", time_grid, net.from_time)
                w = solve(lambda t, z: net.field(self._time_at(t, features, net, z.ndim), z, context.hidden), noise, grid)
                z = context.mean + jnp.exp(context.log_scale) * w
                written = tables[table].at[..., chain].set(jnp.moveaxis(z, 0, -1))
                return {**tables, table: written}, z

            def finish(level: tuple[str, ...], get: Callable[[str], Array], z: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
                out, features = [], []
                for i, name in enumerate(level):
                    x = self._constrain(name, constrainers, get, jnp.moveaxis(z[: plan.sizes[name], i], 0, -1), z_shapes, set(data))
                    out.append(x)
                    features.append(self._features_of_member(name, x))
                return tuple(out), tuple(features)

            keys = jax.random.split(jax.random.fold_in(key, number), len(run.sites))

            def draw_level(tables: Tables, nodes: Array, chain: Array, key: PRNGKeyArray) -> tuple[Tables, Array]:
                noise = jax.random.normal(key, (most, *shape))
                if most == 1:
                    tables, z = draw_node(tables, (nodes[0], chain[0], noise[0]))
                    return tables, z[None]
                return jax.lax.scan(draw_node, tables, (nodes, chain, noise))

            if len(run.sites) == 1:
                tables, z = draw_level(tables, jnp.asarray(nodes[0]), jnp.asarray(chain[0]), keys[0])
                out, features = finish(run.sites[0], values.__getitem__, z)
                for i, name in enumerate(run.sites[0]):
                    values[graph.sites[name].origin] = self._write(name, values[graph.sites[name].origin], out[i])
                    tables = {**tables, table: tables[table].at[..., columns[i][0]].set(features[i])}
            else:
                tables, z, values = self._draw_run(run, tables, table, values, nodes, chain, columns, keys, draw_level, finish)
            for i, name in enumerate(run.sites[0]):
                pass
            limited = np.array([[graph.sites[s].origin in self.coordinates.limited for s in level] for level in run.sites])
            if limited.any():
                clipped += self._count_clipped(z, run, limited)
        return {name: values[name] for name in prior.parameters}, clipped

    def _draw_run(self, run, tables, table, values, nodes, chain, columns, keys, draw_level, finish):  # type: ignore[no-untyped-def]
        """Levels that look the same, by one compiled body: a scan over levels with a switch for the sites' priors."""
        graph = self.plan.graph
        n = len(next(iter(v for k, v in values.items() if k in self.coordinates.graph.parameters)))
        where = {name: (r, i) for r, level in enumerate(run.sites) for i, name in enumerate(level)}
        drawn = tuple(jnp.zeros((len(run.sites), n, *graph.sites[s].shape)) for s in run.sites[0])
        origins = {graph.sites[name].origin for name in where}

        def getter(drawn: tuple[Array, ...]) -> Callable[[str], Array]:
            def get(origin: str) -> Array:
                if origin not in origins:
                    return values[origin]
                x = values[origin]
                for name, (r, i) in where.items():
                    if graph.sites[name].origin == origin:
                        x = self._write(name, x, drawn[i][r])
                return x

            return get

        def body(carry: tuple, x: tuple) -> tuple:
            tables, drawn = carry
            r, nodes, chain, columns, key = x
            tables, z = draw_level(tables, nodes, chain, key)
            branches = [lambda d, z, level=level: finish(level, getter(d), z) for level in run.sites]
            out, features = jax.lax.switch(r, branches, drawn, z)
            drawn = tuple(d.at[r].set(o) for d, o in zip(drawn, out, strict=True))
            for where_to, f in zip(columns, features, strict=True):
                tables = {**tables, table: tables[table].at[..., where_to].set(f)}
            return (tables, drawn), z

        index = jnp.arange(len(run.sites))
        xs = (index, jnp.asarray(nodes), jnp.asarray(chain), [jnp.asarray(c) for c in columns], keys)
        (tables, drawn), z = jax.lax.scan(body, (tables, drawn), xs)
        get = getter(drawn)
        values = {**values, **{origin: get(origin) for origin in origins}}
        return tables, z, values

    def _count_clipped(self, z: Array, run: Any, limited: np.ndarray) -> Array:
        z = z if len(run.sites) > 1 else z[None]  # (levels, coordinates, sites, n, *plates)
        real = np.array([[[k < self.plan.sizes[s] for s in level] for k in range(z.shape[1])] for level in run.sites])
        mask = (real & limited[:, None, :]).reshape(real.shape + (1,) * (z.ndim - 3))
        return jnp.sum((jnp.abs(z) > LIMIT) & mask)

    def _time_at(self, t: Any, features: Array, net: GroupNet, ndim: int) -> Array:
        """The time term of the field: a row of the grid's features for an integer step, else computed at time `t`."""
        if jnp.issubdtype(jnp.result_type(t), jnp.integer):
            row = features[t]
        else:
            row = jnp.einsum("f,kfh->kh", self.time(jnp.reshape(t, (1,)))[0], net.from_time)
        return row.reshape(row.shape[0], *(1,) * (ndim - 1), row.shape[-1])

    def _constrain(self, name: str, constrainers: dict, get: Callable, z: Array, z_shapes: Values, data: set[str]) -> Array:
        """The value of a site (or of a member of an unrolled one) from its coordinates `(n, *plates, size)`."""
        site = self.plan.graph.sites[name]
        n = len(z)
        if site.index:
            full = jnp.zeros((n, *z_shapes[site.origin].shape))
            z = full.at[self._place(site)].set(z)
        asked: list[str] = []

        def note(origin: str) -> Array:
            asked.append(origin)
            return jnp.zeros(self.coordinates.graph.sites[origin].shape)

        jax.eval_shape(lambda z: constrainers[site.origin](note, z), z[0])
        given = {origin: get(origin) for origin in asked}
        axes = {origin: None if origin in data else 0 for origin in asked}
        x = jax.vmap(lambda g, z: constrainers[site.origin](g.__getitem__, z), in_axes=(axes, 0))(given, z)
        return x[self._position(site)] if site.index else x

    def _place(self, site: Site) -> tuple:
        plates = [p for p in self.coordinates.graph.plates if p in site.axes]
        at = dict(site.index)
        return (slice(None), *(at.get(p, slice(None)) for p in plates))

    def _position(self, site: Site) -> tuple:
        """Where a member stands in its program's site, `(n, *shape)`."""
        at = dict(site.index)
        return (slice(None), *(at.get(d, slice(None)) if d else slice(None) for d in self.coordinates.graph.sites[site.origin].dims))

    def _write(self, name: str, values: Array, x: Array) -> Array:
        site = self.plan.graph.sites[name]
        return values.at[self._position(site)].set(x) if site.index else x

    def _features_of_member(self, name: str, x: Array) -> Array:
        site = self.plan.graph.sites[name]
        if site.index:
            full = jnp.zeros((len(x), *self.coordinates.graph.sites[site.origin].shape))
            x = full.at[self._position(site)].set(x)
        return self._features(name, x)

    # Density

    def log_prob(
        self, values: Values, data: Values, steps: int, grid: Array
    ) -> Float[Array, " n"]:
        """The log-density of `n` draws, `{site: (n, ...)}`, for one observation, in one pass for all nodes."""
        n = len(next(iter(values.values())))
        full = {**values, **{k: jnp.broadcast_to(v, (n, *v.shape)) for k, v in data.items()}}
        z = jax.vmap(self.coordinates.to_z)(full)
        graph = self.plan.graph
        z = {name: self._member(graph.sites[name], z[graph.sites[name].origin]) for name in self.plan.posterior.order}
        features = {name: self._features(name, values[graph.sites[name].origin]) for name in z}
        tables = {
            **self._tables("parameters", features, n, z),
            **self.data_tables({k: v[None] for k, v in data.items()}),
        }
        total = jax.vmap(self.coordinates.log_volume)(full)
        for g, (plan, net) in enumerate(zip(self.plan.groups, self.groups, strict=True)):
            coordinate = jnp.stack([z[name][..., k] for name, k in plan.nodes])
            context = self.context(g, net, tables)
            w = (coordinate - context.mean) * jnp.exp(-context.log_scale)
            log_q = self._log_density(net, context, w, grid) - context.log_scale
            total += log_q.sum(axis=(0, *range(2, log_q.ndim)))
        return total

    def _log_density(self, net: GroupNet, context: Context, w: Array, grid: Array) -> Array:
        """Heun's method from `t = 1` back to 0, with the divergence from one JVP: the Jacobian is diagonal."""
        features = jnp.einsum("tf,kfh->tkh", self.time(grid), net.from_time)

        def rate(step: Array, w: Array) -> tuple[Array, Array]:
            time = self._time_at(step, features, net, w.ndim)
            return jax.jvp(lambda w: net.field(time, w, context.hidden), (w,), (jnp.ones_like(w),))

        def back(carry: tuple[Array, Array], step: Array) -> tuple[tuple[Array, Array], None]:
            w, divergence = carry
            h = grid[step] - grid[step + 1]
            v1, d1 = rate(step + 1, w)
            v2, d2 = rate(step, w + h * v1)
            return (w + h / 2 * (v1 + v2), divergence + h / 2 * (d1 + d2)), None

        steps = jnp.arange(len(grid) - 1)[::-1]
        (w, divergence), _ = jax.lax.scan(back, (w, jnp.zeros_like(w)), steps)
        return jax.scipy.stats.norm.logpdf(w) + divergence


def o_name(site: Site) -> str:
    """The program's site."""
    return site.origin


def time_grid(steps: int) -> Float[Array, " steps+1"]:
    """The default grid `t = 1 − (1 − s)²`: finer where the posterior is narrow, at the end."""
    s = jnp.linspace(0.0, 1.0, steps + 1)
    return 1 - (1 - s) ** 2


def euler(field: Callable[[Array, Array], Array], z: Array, grid: Array) -> Array:
    """Euler's method on a grid; the field gets the number of the step."""

    def step(z: Array, i: Array) -> tuple[Array, None]:
        return z + (grid[i + 1] - grid[i]) * field(i, z), None

    z, _ = jax.lax.scan(step, z, jnp.arange(len(grid) - 1))
    return z


def rk45(field: Callable[[Array, Array], Array], z: Array, grid: Array) -> Array:
    """Dormand and Prince's 5(4) with SciPy's default tolerances (the paper's CPE-RK)."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, z, _: field(t, z)),
        diffrax.Dopri5(),
        t0=0.0,
        t1=1.0,
        dt0=None,
        y0=z,
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        max_steps=4096,
    )
    return solution.ys[0]
