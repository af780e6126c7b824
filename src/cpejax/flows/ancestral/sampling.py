"""Draws of the ancestral flow: level by level through the posterior program, all nodes of a level at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.prior import Constrain, Shapes, Values
from cpejax.flows.ancestral.mixture import quantile
from cpejax.flows.ancestral.networks import GroupNet, lift, transport
from cpejax.flows.ancestral.plan import LevelRun
from cpejax.flows.ancestral.reading import ReadingFlow, Tables
from cpejax.flows.ancestral.unrolled import pick, place, position
from cpejax.flows.ode import STEPS, Solver, solver_options
from cpejax.program.graph import Graph
from cpejax.program.sites import Site


class SamplingFlow(ReadingFlow):
    """A flow whose nodes are drawn by networks, a group of nodes for each of the plan's."""

    groups: list[GroupNet]

    def draw_options(self, *, solver: Solver = "euler", steps: int | None = None) -> dict[str, Any]:
        return solver_options(solver, steps)

    def sample(
        self, data: Values, n: int, key: PRNGKeyArray, *, solver: Solver = "euler", steps: int | None = STEPS
    ) -> tuple[Values, dict[str, Array]]:
        graph = self.coordinates.graph
        fixed = {name: jnp.broadcast_to(x, (n, *x.shape)) for name, x in data.items() if name in graph.parameters}
        data = {name: x for name, x in data.items() if name not in fixed}
        return self._draw(data, fixed, self._observed(data), n, key, solver, steps, shared=set(data))

    def sample_each(self, data: Values, key: PRNGKeyArray, *, steps: int = STEPS) -> Values:
        """One draw for each of `n` given values `{site: (n, *shape)}`."""
        n = len(next(iter(data.values())))
        tables = self._data_tables(self._scale_all(self.plan.graph.data, data))
        return self._draw(data, {}, tables, n, key, "euler", steps, shared=set())[0]

    def _draw(
        self,
        data: Values,
        fixed: Values,
        observed: Tables,
        n: int,
        key: PRNGKeyArray,
        solver: Solver,
        steps: int | None,
        *,
        shared: set[str],
    ) -> tuple[Values, dict[str, Array]]:
        """`n` draws given `data`, of which those in `shared` have no axis of draws; sites in `fixed` are not drawn."""
        graph = self.coordinates.graph
        one = {name: x if name in shared else x[0] for name, x in data.items()}
        known = {name: jnp.zeros(graph.sites[name].shape) for name in graph.parameters} | one
        z = jax.eval_shape(self.coordinates.to_z, known)
        constrain = self.coordinates.constrainers(known, z)
        values = {name: jnp.zeros((n, *graph.sites[name].shape)) for name in graph.parameters} | data
        tables = self._tables("parameters", {}, {}, n) | observed
        clipped = jnp.zeros((), jnp.int32)
        for number, run in enumerate(self.plan.runs):
            draw = self._level_drawer(run, n, solver, steps)
            keys = jax.random.split(jax.random.fold_in(key, number), len(run.sites))
            tables, values, z_run = self._draw_run(run, draw, tables, values, constrain, z, fixed, shared, keys)
            clipped += self._count_clipped(run, z_run, set(fixed))
        return {name: values[name] for name in graph.parameters if name not in fixed}, {"clipped": clipped}

    def _level_drawer(
        self, run: LevelRun, n: int, solver: Solver, steps: int | None
    ) -> Callable[..., tuple[Tables, Array]]:
        """A function that draws the coordinates of one level, one after the other along the sites' chains."""
        shape = (len(run.sites[0]), n, *self.plan.shape(run.table.plates))
        nodes_of = self.plan.groups[run.group].nodes
        limits = self._limits([name for name, _ in nodes_of])
        origins = [(self.plan.graph.sites[name].origin, k) for name, k in nodes_of]
        counts = self._counts & {name for name, _ in origins}
        maps = self.coordinates.columns(origins) if counts else None

        def draw_node(tables: Tables, x: tuple[Array, Array, Array]) -> tuple[Tables, Array]:
            nodes, chain, noise = x
            net = self.groups[run.group].nodes(nodes)
            context = self._context(run.group, net, tables)
            w = transport(net.field, context.hidden, noise, solver, steps)
            z = jnp.clip(context.mixture.bend(w), *(lift(x[nodes], w.ndim) for x in limits))
            last = jnp.moveaxis(z, 0, -1)
            if maps is not None:  # what others read is the coordinate of a count
                own = jax.tree.map(lambda x: x[nodes], maps)
                last = jnp.where(own.counts, own.to_z(own.to_values(last)), last)
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
        run: LevelRun,
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
                        x.at[position(sites[name], graph)].set(drawn[i][level])
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
                    out.append(pick(sites[name], fixed[sites[name].origin], graph))
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

    def _count_clipped(self, run: LevelRun, z: Array, fixed: set[str]) -> Array:
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
        z = jnp.zeros((len(z), *z_shapes[site.origin].shape)).at[place(site, graph)].set(z)
    function = constrain[site.origin]
    given = {origin: get(origin) for origin in function.needs}
    axes = {origin: None if origin in data else 0 for origin in function.needs}
    x = jax.vmap(lambda g, z: function(g, z), in_axes=(axes, 0))(given, z)
    return pick(site, x, graph)
