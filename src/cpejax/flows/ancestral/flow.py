"""The ancestral flow: exact, and the default. Each node solves its own conditional problem.

It is compiled from a conditional program: the posterior program, which draws parameters given data, or the forward
program, which draws data given parameters. What follows is said of the first; of the second the same holds.

With the faithful inverse of the graph in the prior's order, `p(θ|x) = Π_i p(θ_i | θ_pa(i), x_pa(i))`. Each factor is a
one-dimensional flow in prior coordinates whose context is made of *clean* parents. The paper's masked joint field
(section 3.2) sees noisy ones and is biased by that; here every node's Jacobian is a scalar and the bias cannot occur.

Departures from the paper, each measured or explained in `docs/ancestral.md`:

* A coordinate `z` is first straightened by a normal mixture that its context predicts, `w = Φ⁻¹(F(z))`; the flow is
  from N(0, 1) to the distribution of `w`, and corrects what the mixture leaves. A narrow posterior is then as easy as
  a wide one.
* The rectified path `(1 − t) w0 + t w1` is followed in the rotated coordinates `y = cos(a) w0 + sin(a) w1`,
  `tan a = t / (1 − t)`. The rectified loss has the same value, `∫ |u − v|² da` with `u = cos(a) w1 − sin(a) w0`, but
  the field of a normal distribution is zero, so that Euler steps are exact for it.
* The loss has the weight `√tan a`, between the rectified loss (weight 1) and the likelihood's (weight `tan a`), and its
  value for the zero field is subtracted. With the mixture's likelihood it is then on the scale of a log-density, but no
  proper score. Epochs are compared by the log-density itself.
* The mixture's weights, means and scales are bounded, so that every output of a network is a distribution.
* Counts, which only the forward program draws, have probabilities: the mass of the mixture between the coordinates
  halfway to the next counts. There is no flow.
* The density is that of the solver's steps, not of the differential equation: it integrates to one with any number.
* Each node has its own network of time, and all networks an activation that is not SiLU (`softsign_linear`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.data import DataCoordinates
from cpejax.coordinates.prior import Coordinates, Values
from cpejax.coordinates.standardise import Standardise
from cpejax.flows.ancestral.covariates import exchangeable, regressed, regression, table_constants
from cpejax.flows.ancestral.mixture import OF_ALL
from cpejax.flows.ancestral.networks import Context, Counts, GroupNet, log_densities, matching
from cpejax.flows.ancestral.parallel import divide, joined, rows_of_nodes
from cpejax.flows.ancestral.plan import Group, layout
from cpejax.flows.ancestral.reading import Tables, moments, regress
from cpejax.flows.ancestral.sampling import SamplingFlow
from cpejax.flows.ancestral.unrolled import pick, site_rows
from cpejax.flows.base import Flow
from cpejax.flows.ode import STEPS, step_options
from cpejax.flows.strata import TimeStrata
from cpejax.nn.embeddings import Embedding
from cpejax.program.conditional import ConditionalProgram
from cpejax.util.keys import key_words

VALIDATION_STEPS = 4
"""Steps of the density by which an epoch is judged."""


class AncestralFlow(SamplingFlow):
    """The flows of all nodes of a conditional program; see the module's docstring.

    **Arguments:**

    - `coordinates`: of the sites that are drawn; `conditional`: in which order, and what each reads.
    - `simulations`: by which values are standardised.
    - `embed`, `width`, `depth`, `hidden`, `components`, `members`: see `cpe.CPE`.
    - `like`: the `description` of a flow to be built alike.
    """

    members: int = eqx.field(static=True)

    def __init__(
        self,
        coordinates: Coordinates | DataCoordinates,
        conditional: ConditionalProgram,
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
        self.coordinates, graph = coordinates, coordinates.graph
        self.embed, self.members = dict(embed), members
        sites = conditional.graph.sites
        self.standard, features = {}, {}
        for name, site in sites.items():
            rows = np.asarray(site_rows(site, pick(site, values[site.origin], graph), graph))
            self.standard[name] = Standardise(rows, like["heavy"][name] if like else None)
            features[name] = self.standard[name].size
            if site.origin in self.embed:
                one = jax.ShapeDtypeStruct(site.event_shape, jnp.result_type(float))
                features[name] = math.prod(eqx.filter_eval_shape(self.embed[site.origin], one).shape)
        z = jax.eval_shape(coordinates.to_z, {name: x[0] for name, x in values.items()})
        embedded = frozenset(self.embed)
        known = None if like is None else like.get("summaries", {})
        apart = regressed(conditional.graph, embedded)
        alike = [name for name in exchangeable(conditional, embedded) if known is None or name in known]
        self.summaries = {}
        for name in (*apart, *alike):
            first = site_rows(sites[name], pick(sites[name], values[sites[name].origin], graph)[:10_000], graph)
            scaled = self.standard[name](first)
            if name in apart:
                results = regress(regression(conditional.graph, table_constants(conditional.graph), name), scaled)
            else:
                results = moments(scaled)
            self.summaries[name] = Standardise(np.asarray(results), None if known is None else known[name])
        sizes = {n: z[sites[n].origin].shape[-1] for n in conditional.order}
        columns = {name: s.size for name, s in self.summaries.items()}
        self.plan = layout(conditional, sizes, features, columns, embedded, alike, like is None or "measured" in like)
        rng = np.random.default_rng(key_words(key))
        uniform = coordinates.uniform
        sizes_of_nets = (width, depth, hidden, components, rng, like is None or "relative" in like)
        self.groups = [
            GroupNet(g, [sites[n].origin in uniform for n, _ in g.nodes], *sizes_of_nets) for g in self.plan.groups
        ]

    def description(self) -> dict[str, Any]:
        about = {"heavy": {name: list(s.heavy) for name, s in self.standard.items()}}
        if self.groups[0].mixture.shape[1] % 3 == OF_ALL:
            about["relative"] = {}
        if self.plan.all_measured:
            about["measured"] = {}
        if self.summaries:
            about["summaries"] = {name: list(s.heavy) for name, s in self.summaries.items()}
        if isinstance(self.coordinates, DataCoordinates):
            about["counts"] = {name: [] for name in sorted(self.coordinates.counts)}
        return about

    def numbers_per_draw(self) -> int:
        width = self.groups[0].mixture.shape[2]
        rows = [math.prod(self.plan.shape(stage.plates)) for group in self.plan.groups for stage in group.stages]
        return 3 * width * max(rows) + sum(
            math.prod(self.plan.shape(t.plates)) * w for t, w in self.plan.widths.items()
        )

    # Training

    def prepare(self, values: Values) -> dict[str, Any]:
        z, tables = self._known(values)
        data = self._scale_all(self.plan.graph.data, values)
        each = [self._coordinates_of(g, z) for g in self.plan.groups]
        rows = {"z": each, "s": [self._linear(net, z) for net, z in zip(self.groups, each, strict=True)]}
        if self._counts:
            edges = map(self._of_members, jax.vmap(self.coordinates.edges)(values))
            rows |= {
                side: [self._coordinates_of(g, z | x) for g in self.plan.groups]
                for side, x in zip(("low", "high"), edges, strict=True)
            }
        rows = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rows)
        if self.embed:
            return {**rows, "tables": tables, "data": data}
        return {**rows, "tables": {**tables, **self._data_tables(data)}, "data": {}}

    @property
    def least_loss(self) -> float:
        """A bound below which no loss can be.

        The narrowest component of a mixture has a density of e⁷, or e¹⁰ at an edge; the flow adds a few nats.
        """
        return -20.0 * sum(len(group.nodes) for group in self.plan.groups)

    def loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """The loss of all nodes in one pass: see the module's docstring.

        Of a large plate a random subset of `members` is trained on: the mean over them is unbiased.
        """
        found = list(self._in_training(rows, key))
        strata = TimeStrata(len(jax.tree.leaves(rows)[0]))
        # All that is random in one draw: keys of their own would take longer than the draws.
        ends = np.cumsum([strata.number, *(z.size for _, z, *_ in found)])
        normal = jax.random.normal(key, (int(ends[-1]),))
        t = strata.times(ndtr(normal[: ends[0]]))
        total = jnp.zeros(())
        for i, (net, z, s, context, counts) in enumerate(found):
            log_q = context.mixture.log_density(z, s)
            w = jax.lax.stop_gradient(context.mixture.straighten(s))
            noise = normal[ends[i] : ends[i + 1]].reshape(w.shape)
            flow = matching(net.field, context.hidden, w, noise, t, strata)
            if counts is not None:
                log_q, flow = counts.instead_of(log_q, context.mixture), jnp.where(counts.which, 0.0, flow)
            total += flow.sum() - log_q.mean(tuple(range(1, z.ndim))).sum()
        return total

    def validation_loss(self, rows: dict[str, Any], key: PRNGKeyArray) -> Float[Array, ""]:
        """The mean negative log-density in prior coordinates, with a few steps.

        A proper score, unlike the loss: the better a mixture, the less is left for the flow to gain, so that the
        flow's part of the loss of a bad one may be far below what any posterior deserves.
        """
        total = jnp.zeros(())
        for net, z, s, context, counts in self._in_training(rows, key):
            log_q = log_densities(net, context, z, s, VALIDATION_STEPS, counts)
            total -= log_q.mean(tuple(range(1, z.ndim))).sum()
        return total

    def _in_training(
        self, rows: dict[str, Any], key: PRNGKeyArray
    ) -> Iterator[tuple[GroupNet, Float[Array, "k n *plates"], Float[Array, "k n *plates"], Context, Counts | None]]:
        """Of each group that has nodes: its networks, its coordinates and what is linear in them, its context, and
        its counts.
        """
        tables = {**self._constants, **rows["tables"], **(self._data_tables(rows["data"]) if self.embed else {})}
        subset = self._subset(jax.random.fold_in(key, 1)) if self._large else {}
        for g, (group, net) in enumerate(zip(self.plan.groups, self.groups, strict=True)):
            if not len(net.which.numbers):
                continue
            inside = {p: which for p, which in subset.items() if p in group.plates}
            here = {table: take_members(x, table.plates, inside, 1) for table, x in tables.items()}

            def own(name: str, g: int = g, group: Group = group, inside: dict[str, Array] = inside) -> Array:
                return take_members(jnp.moveaxis(rows[name][g], 1, 0), group.plates, inside, 2)

            counts = self._counts_of(g, net, own("low"), own("high")) if "low" in rows else None
            yield net, own("z"), own("s"), self._context(g, net, here), counts

    @property
    def examples(self) -> int:
        """How many members of one simulation a step trains on, in the group of nodes that has the most."""
        read = {p: self.members if p in self._large else size for p, size in self.plan.graph.plates.items()}
        return max(math.prod(read[p] for p in group.plates) for group in self.plan.groups)

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

    def divide(self, rows: dict[str, Any], most: int) -> list[tuple[Flow, Any]]:
        return [*divide(self, rows, most)]

    def rows_of_part(self, part: Flow, rows: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(part, AncestralFlow)
        return rows_of_nodes(rows, [np.asarray(net.which.numbers) for net in part.groups])

    def joined(self, parts: Sequence[Flow]) -> Flow:
        return joined(parts)

    def lacks(self, given: Collection[str]) -> dict[str, list[str]] | None:
        """Of given parameters, those that read others that are not given, and which.

        All that they read must be given too: the product of the other factors is then exact.
        """
        sites, parameters = self.plan.graph.sites, self.coordinates.graph.parameters
        out: dict[str, list[str]] = {}
        for name in self.plan.posterior.order:
            origin = sites[name].origin
            if origin in given:
                read = {sites[p].origin for p in self.plan.posterior.parents[name]} - set(given)
                missing = set(out.get(origin, ())) | read
                out |= {origin: [p for p in parameters if p in missing]} if missing.intersection(parameters) else {}
        return out

    # Density

    def density_options(self, *, steps: int = STEPS) -> dict[str, Any]:
        return step_options(steps)

    def log_prob(self, values: Values, data: Values, *, steps: int = STEPS) -> Float[Array, " n"]:
        """The log-density of draws, without the factors of given parameters; all parents are known, so by one pass."""
        n = len(next(iter(values.values())))
        full = values | {name: jnp.broadcast_to(x, (n, *x.shape)) for name, x in data.items()}
        return self._log_density(full, self._observed(data), set(values), steps)

    def log_prob_each(self, values: Values, *, steps: int = STEPS) -> Float[Array, " n"]:
        """The log-density of what is drawn, where what is given differs too: `{site: (n, *shape)}` of all sites."""
        data = self._scale_all(self.plan.graph.data, values)
        return self._log_density(values, self._data_tables(data), set(self.coordinates.graph.parameters), steps)

    def _log_density(self, full: Values, data: Tables, drawn: set[str], steps: int) -> Float[Array, " n"]:
        z, tables = self._known(full)
        tables |= data
        total = jax.vmap(lambda v: self.coordinates.log_volume(v, drawn))(full)
        low, high = map(self._of_members, jax.vmap(self.coordinates.edges)(full) if self._counts else ({}, {}))
        sites = self.plan.graph.sites
        for g, (group, net) in enumerate(zip(self.plan.groups, self.groups, strict=True)):
            context = self._context(g, net, tables)
            coordinates = self._coordinates_of(group, z)
            s = self._linear(net, coordinates)
            edges = (self._coordinates_of(group, z | x) for x in (low, high))
            counts = self._counts_of(g, net, *edges) if self._counts else None
            log_q = log_densities(net, context, coordinates, s, steps, counts)
            those = np.array([sites[name].origin in drawn for name, _ in group.nodes])
            total += (log_q if those.all() else log_q[those]).sum((0, *range(2, log_q.ndim)))
        return total


def take_members(x: Array, plates: tuple[str, ...], subset: dict[str, Array], lead: int) -> Array:
    """The chosen members of some plates, whose axes start at `lead`."""
    for plate, which in subset.items():
        if plate in plates:
            x = jnp.take(x, which, axis=lead + plates.index(plate))
    return x
