"""What the networks of the ancestral flow read: tables of values and coordinates, and the contexts made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cpejax.coordinates.data import DataCoordinates
from cpejax.coordinates.prior import Values
from cpejax.coordinates.standardise import Standardise
from cpejax.flows.ancestral.covariates import Regression, Table, multiplied
from cpejax.flows.ancestral.mixture import Mixture, linear, quantile
from cpejax.flows.ancestral.networks import Context, Counts, GroupNet, lift
from cpejax.flows.ancestral.plan import Group, Layout
from cpejax.flows.ancestral.stages import Reading, Stage
from cpejax.flows.ancestral.unrolled import pick, place, site_rows
from cpejax.flows.base import Flow
from cpejax.nn.embeddings import Embedding
from cpejax.nn.linear import dense

Tables = dict[Table, Array]
TINY = 1e-12
"""A variance below which float32 has no digits of standardised values."""


class ReadingFlow(Flow):
    """A flow whose nodes read columns of tables, as its plan says.

    `standard`, `summaries`: how values, and regressions on what tells members apart, are standardised; `embed`: the
    user's embeddings.
    """

    plan: Layout = eqx.field(static=True)
    coordinates: Any  # Coordinates of parameters, or DataCoordinates
    standard: dict[str, Standardise]
    summaries: dict[str, Standardise]
    embed: dict[str, Embedding]

    def _scale(self, name: str, x: Float[Array, "n ..."]) -> Float[Array, "n *plates s"]:
        """The standardised values of a site (of a member, where it is unrolled)."""
        site = self.plan.graph.sites[name]
        rows = site_rows(site, x, self.coordinates.graph)
        return self.standard[name].one_each(rows) if site.origin in self.embed else self.standard[name](rows)

    def _scale_all(self, names: tuple[str, ...], values: Values) -> Values:
        sites = self.plan.graph.sites
        return {n: self._scale(n, pick(sites[n], values[sites[n].origin], self.coordinates.graph)) for n in names}

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
            if name in self.plan.relative:
                tables[table] = tables[table].at[..., self.plan.relative[name]].set(relative(columns))
            if name in self.plan.summaries:
                fit = self.plan.regressions.get(name)
                results = self.summaries[name](moments(columns) if fit is None else regress(fit, columns))
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
        z = self._of_members(jax.vmap(self.coordinates.to_z)(values))
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

                z, derivative = jax.jvp(to_z, (x,), (jnp.ones_like(x),))
                return jnp.concatenate([jnp.clip(z, -15.0, 15.0), jnp.log(jnp.abs(derivative) + 1e-6)], axis=-1)

            given = {origin: get(origin) for origin in self.coordinates.graph.sites}
            axes = {origin: None if origin in shared else 0 for origin in given}
            found = jax.vmap(look, in_axes=(axes, axes[datum]))(given, given[datum])
            table, _ = self.plan.features[name]
            tables = tables | {table: tables[table].at[..., columns].set(found)}
        return tables

    def _coordinates_of(self, group: Group, z: Values) -> Float[Array, "k n *plates"]:
        return jnp.stack([z[name][..., k] for name, k in group.nodes])

    def _of_members(self, z: Values) -> Values:
        """Arrays of the program's sites, `(n, *plates, size)`, for the plan's, in which plates are unrolled."""
        graph, sites = self.coordinates.graph, [self.plan.graph.sites[n] for n in self.plan.posterior.order]
        return {site.name: z[site.origin][place(site, graph)] for site in sites if site.origin in z}

    @property
    def _counts(self) -> frozenset[str]:
        """The program's sites whose values are counts."""
        return self.coordinates.counts if isinstance(self.coordinates, DataCoordinates) else frozenset()

    def _counts_of(self, group: int, net: GroupNet, low: Array, high: Array) -> Counts | None:
        """The counts among a group's nodes, or some of them, whose networks are `net`."""
        sites = self.plan.graph.sites
        which = np.array([sites[name].origin in self._counts for name, _ in self.plan.groups[group].nodes])
        return Counts(jnp.asarray(which)[net.which.numbers], low, high) if which.any() else None

    def _linear(self, net: GroupNet, z: Float[Array, "k n *plates"]) -> Float[Array, "k n *plates"]:
        return linear(z, lift(net.which.uniform, z.ndim))

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
                h = h + dense(x, w)
            for sender, w in zip(stage.messages, weights.messages, strict=True):
                h = h + dense(outputs[sender], w)
            arrived = [raws[sender] for sender in stage.messages if sender in raws]
            for x, w in zip(arrived, weights.raw, strict=True):
                h = h + dense(x, w)
            h = weights(h)
            outputs.append(h if stage.pool is None else self._pool(h, stage))
            if stage.columns:
                raws[number] = self._pool_raw(stage, [inputs[i] for i in stage.raw] + arrived)
        mixture = dense(h, net.mixture) + lift(net.mixture_bias, ndim)
        for x, w in zip(inputs + arrived, net.mixture_linear + net.mixture_raw, strict=True):
            mixture = mixture + dense(x, w)
        hidden = dense(h, net.field.from_context) + lift(net.field.b1, ndim)
        return Context(hidden, Mixture.from_numbers(jnp.moveaxis(mixture, -1, 0), lift(net.which.uniform, ndim - 1)))

    def _pool_raw(self, stage: Stage, values: list[Array]) -> Array:
        """What a stage reads, and what arrives there, pooled as it is."""
        shape = jnp.broadcast_shapes(*(x.shape[:-1] for x in values))
        both = jnp.concatenate([jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in values], axis=-1)
        return self._pool(both, stage)

    @property
    def _constants(self) -> Tables:
        return {table: jnp.asarray(x, jnp.result_type(float)) for table, x in self.plan.constants.items()}


def regress(fit: Regression, features: Float[Array, "n *plates f"]) -> Float[Array, "n r"]:
    """The coefficients of each feature, and logarithms: of the mean square of what is left of each fitted basis,
    and of the variance between the groups of each index array.
    """
    y = features.reshape(len(features), -1, features.shape[-1])
    coefficients = jnp.einsum("cm,nmf->nfc", fit.solve, y)
    rests = [y - jnp.einsum("mr,nrf->nmf", b, jnp.einsum("mr,nmf->nrf", b, y)) for b in fit.fitted]
    left = [(rest**2).mean(1) for rest in rests]
    between = [jnp.einsum("gm,nmf->nfg", effects, y).var(-1) for effects in fit.effects]
    logs = [jnp.log(x + TINY) for x in (*left, *between)]
    return jnp.concatenate([coefficients.reshape(len(y), -1), *logs], axis=-1)


MOST_PAIRS = 15
"""Correlations between the features of a member that are read; with more, none."""


def moments(features: Float[Array, "n *plates f"]) -> Float[Array, "n r"]:
    """Of members that are alike: the mean and the logarithm of the variance of each feature, and Fisher's z of each
    correlation.

    Clusters far narrower than the data's range, which networks cannot resolve, are told by these.
    """
    y = features.reshape(len(features), -1, features.shape[-1])
    mean, rest = y.mean(1), y - y.mean(1, keepdims=True)
    variance = (rest**2).mean(1)
    first, second = np.triu_indices(y.shape[-1], 1)
    out = [mean, jnp.log(variance + TINY)]
    if 0 < len(first) <= MOST_PAIRS:
        scale = jnp.sqrt((variance[:, first] + TINY) * (variance[:, second] + TINY))
        correlation = (rest[..., first] * rest[..., second]).mean(1) / scale
        out.append(jnp.arctanh(jnp.clip(correlation, -0.9999, 0.9999)))
    return jnp.concatenate(out, axis=-1)


def relative(features: Float[Array, "n *plates f"]) -> Float[Array, "n *plates f"]:
    """Members relative to the mean and the standard deviation of their plate."""
    axes = tuple(range(1, features.ndim - 1))
    rest = features - features.mean(axes, keepdims=True)
    return rest / jnp.sqrt((rest**2).mean(axes, keepdims=True) + TINY)
