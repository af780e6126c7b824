"""What flows of the whole parameter vector have in common: the prior as base, and data and time as conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import silu
from jaxtyping import Array, Float, PRNGKeyArray

from cpejax.coordinates.base import Prior, with_data
from cpejax.coordinates.prior import Coordinates, Values, plates_first
from cpejax.coordinates.standardise import Standardise
from cpejax.coordinates.vector import Kind
from cpejax.flows.base import Flow, check_embed
from cpejax.nn.embeddings import Embedding
from cpejax.nn.linear import on_rows, split_columns
from cpejax.nn.time import TimeFeatures
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program


class DataVector(eqx.Module):
    """All data of an observation as one vector: standardised values, or what the user's embeddings make of them.

    A site in plates is standardised, and embedded, member by member, and the members follow one another.

    **Arguments:** `values`, simulations with a leading axis; `heavy`: which columns of a site are heavy-tailed, as
    `description` says, for a flow that is built again without its simulations.
    """

    standard: dict[str, Standardise]
    embed: dict[str, Embedding]
    graph: Graph = eqx.field(static=True)

    def __init__(
        self,
        graph: Graph,
        values: Mapping[str, Any],
        embed: Mapping[str, Embedding],
        heavy: Mapping[str, Sequence[int]] | None = None,
    ):
        check_embed(embed, graph)
        self.graph, self.embed = graph, dict(embed)
        self.standard = {}
        for name in graph.data:
            rows = np.asarray(self._rows(name, jnp.asarray(values[name], float)))
            self.standard[name] = Standardise(rows, None if heavy is None else heavy[name])

    def description(self) -> dict[str, list[int]]:
        """What `like` takes: `heavy`, by which the vector is built again."""
        return {name: list(s.heavy) for name, s in self.standard.items()}

    @property
    def size(self) -> int:
        """The length of the vector."""
        shapes = {
            n: jax.ShapeDtypeStruct((1, *self.graph.sites[n].shape), jnp.result_type(float)) for n in self.graph.data
        }
        return int(eqx.filter_eval_shape(self, shapes).shape[-1])

    def _rows(self, name: str, x: Float[Array, "n ..."]) -> Float[Array, "n *plates size"]:
        site = self.graph.sites[name]
        return jax.vmap(lambda x: plates_first(x, site.dims, tuple(self.graph.plates)))(x)

    def __call__(self, data: Values) -> Float[Array, "n f"]:
        return self.join(self.scale(data))

    def scale(self, data: Values) -> Values:
        """The standardised values of each site, `(n, *plates, size)`."""
        return {name: self.standard[name].one_each(self._rows(name, data[name])) for name in self.graph.data}

    def join(self, scaled: Values) -> Float[Array, "n f"]:
        """The vector of standardised values."""
        out = []
        for name in self.graph.data:
            rows = scaled[name]
            if name in self.embed:
                members = rows.reshape(-1, *self.graph.sites[name].event_shape)
                rows = jax.vmap(self.embed[name])(members).reshape(*rows.shape[:-1], -1)
            out.append(rows.reshape(len(rows), math.prod(rows.shape[1:])))
        return jnp.concatenate(out, axis=-1)


class VectorFlow(Flow):
    """A flow of all parameters as one vector `u` of real numbers, given all data as another, `x`.

    A subclass writes `loss`, whose rows have `u` and, by `of_rows`, `x`; `draw_vectors`; and `log_density` of vectors.

    **Arguments:**

    - `program`, `graph`, `simulations`, `like`: as `cpe.Method` gives them to a flow.
    - `embed`: an Equinox module for a data site; see `cpe.CPE`.
    - `coordinates`: see `cpe.FMPE`.

    **Attributes:** `base` maps parameters to vectors and back, and has the prior as a distribution of vectors; its
    `size` is the length of `u`. `data` makes `x` of data; its `size` is the length of `x`.
    """

    base: Prior
    data: DataVector

    def __init__(
        self,
        program: Program,
        graph: Graph,
        simulations: Mapping[str, np.ndarray],
        *,
        embed: Mapping[str, Embedding] | None = None,
        coordinates: Kind = "unconstrained",
        like: Mapping[str, Any] | None = None,
    ):
        values = {name: jnp.asarray(x, float) for name, x in simulations.items()}
        self.base = Prior(program, graph, values, coordinates)
        self.data = DataVector(graph, values, embed or {}, like["heavy"] if like else None)

    @property  # type: ignore[misc]
    def coordinates(self) -> Coordinates:  # type: ignore[override]
        return self.base.vector.coordinates

    @property
    def may_leave_support(self) -> bool:
        return self.base.vector.may_leave_support

    def description(self) -> dict[str, Any]:
        return {"heavy": self.data.description()}

    def prepare(self, values: Values) -> dict[str, Any]:
        """`u`, the vectors; `x`, the data's vectors, or, where embeddings of them are trained, what these read."""
        scaled = self.data.scale(values)
        return {"u": self.base.to_vectors(values), "x": scaled if self.data.embed else self.data.join(scaled)}

    def of_rows(self, rows: dict[str, Any]) -> Float[Array, "n f"]:
        """The data's vectors of `prepare`d rows."""
        return self.data.join(rows["x"]) if self.data.embed else rows["x"]

    def of_observation(self, data: Values) -> Float[Array, "1 f"]:
        """The data's vector of one observation."""
        return self.data({name: x[None] for name, x in data.items()})

    def draw_vectors(self, data: Values, n: int, key: PRNGKeyArray) -> tuple[Float[Array, "n d"], dict[str, Array]]:
        """`n` vectors for one observation, and counts as `sample` has them."""
        raise NotImplementedError

    def log_density(self, u: Float[Array, "n d"], data: Values) -> Float[Array, " n"]:
        """The log-density of vectors for one observation."""
        raise NotImplementedError

    def sample(self, data: Values, n: int, key: PRNGKeyArray, **options: Any) -> tuple[Values, dict[str, Array]]:
        u, counts = self.draw_vectors(data, n, key, **options)
        return self.base.to_values(u, data), {**counts, **self.base.count_clipped(u)}

    def log_prob(self, values: Values, data: Values, **options: Any) -> Float[Array, " n"]:
        full = with_data(values, data)
        return self.log_density(self.base.to_vectors(full), data, **options) + self.base.log_volume(full)


class Condition(eqx.Module):
    """What data, and time, add to the hidden layers of a network (paper, figure 3 and appendix C).

    Data go through a network 128-128, Fourier features of time through one 64-64; both are concatenated, activated, and
    mapped by a `Linear` to the `hidden` values of one node, which are the same for all nodes. That one `Linear` serves
    all nodes is not said in the paper; its numbers of weights imply it.

    Each half of the `Linear` is computed separately, so that sampling computes the data's once, and time's once a step.

    **Arguments:** `features`: how many values of an observation; `layers`: how many get a condition, each by its own
    `Linear`; `time`: whether there is time; `width`: of the data's network.
    """

    mlp: eqx.nn.MLP
    time: TimeFeatures | None
    from_data: list[Float[Array, "h w"]]
    from_time: list[Float[Array, "h f"]]
    biases: list[Float[Array, " h"]]

    def __init__(self, features: int, hidden: int, layers: int, *, time: bool, width: int, key: PRNGKeyArray):
        first, second, *rest = jax.random.split(key, 2 + layers)
        self.mlp = eqx.nn.MLP(features, width, width, 1, silu, key=first)
        self.time = TimeFeatures(64, key=second) if time else None
        linears = [eqx.nn.Linear(width + 64 * time, hidden, key=k) for k in rest]
        parts = [split_columns(linear.weight, width, 64 * time) for linear in linears]
        self.from_data, self.from_time = [part[0] for part in parts], [part[1] for part in parts if time]
        self.biases = [linear.bias for linear in linears if linear.bias is not None]

    def of_data(self, x: Float[Array, "n f"]) -> list[Float[Array, "n h"]]:
        """What data add to each layer, the offset with it."""
        h = silu(on_rows(self.mlp, x))
        return [h @ w.T + b for w, b in zip(self.from_data, self.biases, strict=True)]

    def of_time(self, t: Float[Array, " n"]) -> list[Float[Array, "n h"]]:
        """What time adds to each layer."""
        assert self.time is not None
        h = silu(self.time(t))
        return [h @ w.T for w in self.from_time]
