"""All-in-one posterior estimation (Gloeckler et al. 2024; paper, appendix C): a transformer that denoises any subset of
a program's scalars given the others.

Departures from the original: random conditions are of whole sites, not of single scalars, from a list of no more
than `PATTERNS`, and half of the training is for the posterior; the network predicts the noise; time is added to the
tokens before they read one another; scalars of one member of a site always read one another; given tokens read one
another only, with a directed mask. A directed mask is the posterior program of the sites that are not given. As every
mask on noisy scalars it biases correlated posteriors; `docs/baselines.md` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from cpejax.coordinates.base import Prior, with_data
from cpejax.coordinates.prior import Coordinates, Values, plates_last
from cpejax.coordinates.standardise import Fixed
from cpejax.coordinates.vector import Kind, labels_of
from cpejax.flows.base import Flow
from cpejax.flows.conditioning import DataVector
from cpejax.flows.diffusion import Diffusion, DiffusionMethod, Equation, Predict
from cpejax.flows.ode import Solver, log_density, step_options
from cpejax.flows.strata import TimeStrata
from cpejax.nn.attention import Transformer
from cpejax.program.graph import Graph
from cpejax.program.inverse import invert
from cpejax.program.simulator import Program

Mask = Literal["directed", "undirected", "none"]

PATTERNS = 15
"""How many sets of given sites are trained on: all there are for up to four sites."""


class Patterns(Fixed):
    """Which tokens are given in each pattern of training, the posterior's first, and who may then read whom."""

    given: Bool[Array, "p t"]
    masks: Bool[Array, "p t t"]


class AIOFlow(Flow):
    """The diffusion of the scalars that are not given, reversed in time.

    **Arguments:**

    - `program`, `graph`, `simulations`, `like`: as `cpe.Method` gives them to a flow.
    - `coordinates`, `mask`, `sampler`, `beta_min`, `beta_max`: see `cpe.AIO`; `sizes`: those of `Transformer`.
    """

    vectors: Prior
    data: DataVector
    net: Transformer
    patterns: Patterns
    members: tuple[str, ...] = eqx.field(static=True)  # of each token, in the graph written out
    sites: tuple[str, ...] = eqx.field(static=True)  # of each token
    mask: Mask = eqx.field(static=True)
    diffusion: Diffusion = eqx.field(static=True)

    def __init__(
        self,
        program: Program,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        *,
        coordinates: Kind,
        mask: Mask,
        sampler: Equation,
        beta_min: float,
        beta_max: float,
        like: Mapping[str, Any] | None = None,
        key: PRNGKeyArray,
        **sizes: int,
    ):
        values = {name: jnp.asarray(x, float) for name, x in simulations.items()}
        self.vectors = Prior(program, graph, values, coordinates)
        self.data = DataVector(graph, values, {}, like["heavy"] if like else None)
        labels = list(self.vectors.vector.labels)
        for name in graph.data:
            labels += labels_of(
                graph.sites[name], graph, jax.ShapeDtypeStruct(self._shape(name), jnp.result_type(float))
            )
        self.members = tuple(label.member for label in labels)
        self.sites = tuple(label.site for label in labels)
        self.mask, self.diffusion = mask, Diffusion(float(beta_min), float(beta_max), sampler)
        self.net = Transformer(len(labels), **sizes, key=key)
        patterns = _patterns(graph)
        given = np.array([[site in pattern for site in self.sites] for pattern in patterns])
        self.patterns = Patterns(jnp.asarray(given), jnp.asarray(np.stack([self._mask(set(p)) for p in patterns])))

    @property  # type: ignore[misc]
    def coordinates(self) -> Coordinates:  # type: ignore[override]
        return self.vectors.vector.coordinates

    @property
    def may_leave_support(self) -> bool:
        return self.vectors.vector.may_leave_support

    @property
    def any_subset(self) -> bool:
        return True

    def draw_options(self, *, solver: Solver | None = None, steps: int | None = None) -> dict[str, Any]:
        return self.diffusion.draw_options(solver, steps)

    def density_options(self, *, steps: int | None = None) -> dict[str, Any]:
        return step_options(steps)

    def description(self) -> dict[str, Any]:
        return {"heavy": self.data.description()}

    def numbers_per_draw(self) -> int:
        scale = self.net.norm.weight
        assert scale is not None
        tokens, width = len(self.sites), scale.size
        return tokens * (8 * width + self.net.blocks[0].heads * tokens)

    # Scalars

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a data site's scalars, `(*plates, size)`."""
        graph = self.coordinates.graph
        site = graph.sites[name]
        return (*(size for plate, size in graph.plates.items() if plate in site.dims), site.size)

    def _scalars(self, values: Values) -> Float[Array, "n t"]:
        """All scalars of all sites, standardised."""
        return jnp.concatenate([self.vectors.to_vectors(values), self.data(values)], axis=-1)

    def _values(self, scalars: Float[Array, "n t"], given: Values) -> Values:
        """The values of the sites that are not given."""
        graph = self.coordinates.graph
        vector, rest = jnp.split(scalars, [self.vectors.size], axis=-1)
        data: Values = {}
        parts = jnp.split(rest, np.cumsum([math.prod(self._shape(name)) for name in graph.data])[:-1], axis=-1)
        for name, part in zip(graph.data, parts, strict=True):
            site = graph.sites[name]
            if name in given:
                data[name] = jnp.broadcast_to(given[name], (len(scalars), *site.shape))
            else:
                rows = self.data.standard[name].undo_one_each(part.reshape(len(scalars), *self._shape(name)))
                data[name] = jax.vmap(lambda x, s=site: plates_last(x, s.shape, s.dims, tuple(graph.plates)))(rows)
        scaled = self.vectors.centre + self.vectors.scale * vector
        values = jax.vmap(self.vectors.vector.unflatten)(scaled, data) | data
        return {name: x for name, x in values.items() if name not in given}

    # Who reads whom

    def _mask(self, given: set[str]) -> Bool[np.ndarray, "t t"]:
        """`mask[i, j]`: token i reads token j."""
        graph = self.coordinates.graph
        if self.mask == "none":
            return np.ones((len(self.sites), len(self.sites)), bool)
        if self.mask == "undirected":
            moral = nx.moral_graph(graph.ground().to_networkx())
            reads = {member: set(moral[member]) for member in moral}
        else:
            sites = {name: replace(site, observed=name in given) for name, site in graph.sites.items()}
            reads = {member: set(p) for member, p in invert(replace(graph, sites=sites)).ground().items()}
        return np.array([[b == a or b in reads.get(a, ()) for b in self.members] for a in self.members])

    # Training

    def prepare(self, values: Values) -> Float[Array, "n t"]:
        return self._scalars(values)

    def loss(self, rows: Float[Array, "n t"], key: PRNGKeyArray) -> Float[Array, ""]:
        """The squared error of the predicted noise, of the scalars that are not given."""
        n, t = rows.shape
        key_pattern, key_noise = jax.random.split(key)
        others = jnp.ones(len(self.patterns.given) - 1) / (len(self.patterns.given) - 1)
        chance = jnp.concatenate([jnp.ones(1), others]) / 2
        pattern = jax.random.choice(key_pattern, len(chance), (n,), p=chance)
        given = self.patterns.given[pattern]
        time, noisy, noise = self.diffusion.noisy(rows, TimeStrata(n, n), key=key_noise)
        tokens = self.net.tokens(jnp.where(given, rows, noisy), jnp.arange(t), given)
        none = tokens[:, :0]
        found = self.net(none, tokens, time, jnp.ones((1, 0, 0), bool), self.patterns.masks[pattern])
        return jnp.sum(jnp.where(given, 0.0, (found - noise) ** 2), axis=-1).mean()

    # Draws and densities

    def _known(self, data: Values) -> tuple[Float[Array, " t"], Bool[np.ndarray, " t"]]:
        """All scalars, of which those of the given sites count, and which these are."""
        for name, needs in self.vectors.vector.needs().items():
            late = [other for other in needs if other not in data]
            if name in data and late:
                raise ValueError(
                    f"given has '{name}', but its {self.vectors.vector.kind} coordinates depend on '{late[0]}', which "
                    "is not given. Give that too, or use coordinates='plain'."
                )
        filled = {name: x[None] for name, x in (self.coordinates.example | data).items()}
        return self._scalars(filled)[0], np.array([site in data for site in self.sites])

    def _predict(self, data: Values) -> Predict:
        """The noise of the scalars that are not given, for one observation."""
        scalars, given = self._known(data)
        inside, outside = np.flatnonzero(given), np.flatnonzero(~given)
        mask = self._mask(set(data))
        if self.mask == "directed":
            known = self.net.tokens(scalars[None, inside], inside, jnp.ones((1, len(inside)), bool))
            mask_known = jnp.asarray(mask[np.ix_(inside, inside)])[None]
            mask_rest = jnp.asarray(mask[np.ix_(outside, np.concatenate([inside, outside]))])[None]

            def predict(t: Array, u: Array) -> Array:
                tokens = self.net.tokens(u, outside, jnp.zeros((1, len(outside)), bool))
                return self.net(known, tokens, t[None], mask_known, mask_rest)

            return predict

        def predict_all(t: Array, u: Array) -> Array:
            everything = jnp.broadcast_to(scalars, (len(u), len(scalars))).at[:, outside].set(u)
            tokens = self.net.tokens(everything, np.arange(len(given)), jnp.asarray(given)[None])
            return self.net(tokens[:, :0], tokens, t[None], jnp.ones((1, 0, 0), bool), jnp.asarray(mask)[None])[
                :, outside
            ]

        return predict_all

    def sample(self, data: Values, n: int, key: PRNGKeyArray, **options: Any) -> tuple[Values, dict[str, Array]]:
        scalars, given = self._known(data)
        key_base, key_steps = jax.random.split(key)
        u = jax.random.normal(key_base, (n, int((~given).sum())))
        u = self.diffusion.draw(self._predict(data), u, key=key_steps, **options)
        everything = jnp.broadcast_to(scalars, (n, len(scalars))).at[:, np.flatnonzero(~given)].set(u)
        return self._values(everything, data), {}

    def log_prob(self, values: Values, data: Values, **options: Any) -> Float[Array, " n"]:
        return self.log_probs(values, data, **options).mean(1)

    def log_probs(self, values: Values, data: Values, **options: Any) -> Float[Array, "n k"]:
        full = with_data(values, data)
        _, given = self._known(data)
        u = self._scalars(full)[:, ~given]
        found = log_density(self.diffusion.flow(self._predict(data)), u, **options)
        return found + self._log_volume(full, given)[:, None]

    def _log_volume(self, full: Values, given: Bool[np.ndarray, " t"]) -> Float[Array, " n"]:
        """`log |d scalars / d values|` of what is not given."""
        free = {site for site, known in zip(self.sites, given, strict=True) if not known}
        total = jax.vmap(lambda v: self.vectors.vector.log_volume(v, free))(full)
        total -= jnp.log(self.vectors.scale[~given[: self.vectors.size]]).sum()
        # Each number of the data is a function of one value.
        data = {name: full[name] for name in self.coordinates.graph.data}
        _, derivatives = jax.jvp(self.data, (data,), (jax.tree.map(jnp.ones_like, data),))
        return total + jnp.log(derivatives[:, ~given[self.vectors.size :]]).sum(-1)


def _patterns(graph: Graph) -> list[tuple[str, ...]]:
    """The sets of given sites that are trained on: first the data, then the parameters, nothing, and others."""
    sites = tuple(graph.sites)
    first = [graph.data, graph.parameters, ()]
    if 2 ** len(sites) - 1 <= PATTERNS:
        every = [c for size in range(len(sites)) for c in combinations(sites, size)]
        return first + [p for p in every if set(p) not in [set(f) for f in first]]
    rng = np.random.default_rng(0)
    found = list(first)
    while len(found) < PATTERNS:
        chosen = rng.random(len(sites)) < rng.choice([0.3, 0.7])
        pattern = tuple(site for site, is_in in zip(sites, chosen, strict=True) if is_in)
        if len(pattern) < len(sites) and set(pattern) not in [set(f) for f in found]:
            found.append(pattern)
    return found


@dataclass(frozen=True)
class AIO(DiffusionMethod):
    """All-in-one posterior estimation (Gloeckler et al. 2024), with the paper's transformer.

    It conditions on any subset of sites: `given` may hold parameters, and lack data. What is not given is drawn,
    missing data as continuous values.

    **Arguments:**

    - `coordinates`, `sampler`, `beta_min`, `beta_max`: see `cpe.FMPE` and `cpe.PSE`.
    - `mask`: who may read whom. `"directed"`, as in the paper: each scalar its parents in the posterior program of what
        is not given. `"undirected"`: its neighbours in the moral graph. `"none"`: everyone everyone.
    - `layers`, `heads`: of the transformer; the original has 6 and 4.
    - `value`, `name`, `condition`: the widths of the embeddings of a scalar's value, of which scalar it is, and of
        whether it is given. `widening`: how many times wider the hidden layer of each block is.

    >>> flow = cpe.AIO(layers=2).build(program, model.graph, simulations, key=jax.random.key(1))
    >>> flow.any_subset  # `given` may be {"mu": 0.3}
    True

    Reference: Gloeckler et al. 2024, All-in-one simulation-based inference.
    """

    flow: ClassVar[type[Flow]] = AIOFlow
    training: ClassVar[Mapping[str, Any]] = {"learning_rate": 1e-3, "weight_decay": 0.0}

    mask: Mask = "directed"
    layers: int = 1
    heads: int = 1
    value: int = 32
    name: int = 32
    condition: int = 8
    widening: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.value + self.name + self.condition
        if width % self.heads:
            raise ValueError(f"value + name + condition is {width}, which {self.heads} heads cannot share equally.")

    def least_weights(self) -> int:
        width = self.value + self.name + self.condition
        return width**2 * max(self.layers, self.widening)
