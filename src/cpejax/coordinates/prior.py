"""Prior coordinates: every parameter as its prior draws it, from standard normal noise.

In these coordinates the prior is N(0, I), the supports hold by construction, and the posterior program is the prior
program run on re-drawn noise (paper, section 3.1, "the prior as base distribution", made exact).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.interpreters import partial_eval as pe
from jaxtyping import Array, Float

from cpejax.coordinates.bijections import bijection, from_free, to_free
from cpejax.coordinates.standardise import Fixed
from cpejax.program.distributions import unwrap
from cpejax.program.graph import Graph
from cpejax.program.quantiles import from_normal, is_curved, is_exact, limit, to_normal
from cpejax.program.simulator import Program
from cpejax.program.tracing import run

Values = dict[str, Array]
Shapes = Mapping[str, Any]


@dataclass(frozen=True)
class Constrain:
    """A parameter's value from its own `z` and the values of the sites named in `needs`."""

    function: Callable[[Values, Array], Array]
    needs: tuple[str, ...]

    def __call__(self, values: Values, z: Array) -> Array:
        return self.function(values, z)


class Coordinates(Fixed):
    """The map between the parameters of a program and standard coordinates `z`.

    A site's `z` has its plates first, in the graph's order, and one last axis for the scalars of a member.
    Everything here acts on one example; callers `vmap`.

    Families without quantile function (Dirichlet, LKJCholesky) use the bijection of their support, shifted and scaled
    by `shift`; N(0, 1) is then not their prior but only the base, and the density has the bijection's Jacobian. With
    `free`, all families do.
    Where the prior has a long tail, `reach` has the least and the greatest coordinate that were simulated: values are
    not extrapolated beyond them.
    `program` takes no arguments: bind them first. `example` is the first simulation, by which a program can be told
    from another that has the same graph.
    """

    program: Program = eqx.field(static=True)
    graph: Graph = eqx.field(static=True)
    shift: dict[str, tuple[Array, Array]]
    reach: dict[str, Float[Array, "2"]]
    example: Values
    limits: tuple[tuple[str, float], ...] = eqx.field(static=True)
    uniform: frozenset[str] = eqx.field(static=True)  # the parameters whose prior is uniform

    def __init__(self, program: Program, graph: Graph, values: Values, *, free: bool = False):
        """Prepare the map; `values`, simulations with a leading axis, standardise the bijections' coordinates."""
        self.program, self.graph = program, graph
        inexact: list[str] = []
        uniform: list[str] = []
        limits: dict[str, float] = {}
        curved: list[str] = []

        def look(name: str, fn: dist.Distribution, value: Array) -> None:
            if free or not is_exact(fn):
                _check_bijection(name, fn, value)
                inexact.append(name)
            elif limit(fn) < math.inf:
                limits[name] = limit(fn)
            if isinstance(unwrap(fn), dist.Uniform):
                uniform.append(name)
            if not free and is_exact(fn) and is_curved(fn):
                curved.append(name)

        def shapes(example: Values) -> None:
            self.visit(example, look)

        jax.eval_shape(shapes, {name: value[0] for name, value in values.items()})
        self.example = {name: value[0] for name, value in values.items()}
        self.limits, self.uniform = tuple(limits.items()), frozenset(uniform)
        self.shift = {}
        if inexact:

            def unconstrained(example: Values) -> Values:
                out: Values = {}

                def visit(name: str, fn: dist.Distribution, value: Array) -> None:
                    if name in inexact:
                        out[name] = to_free(fn, value)

                self.visit(example, visit)
                return out

            found = jax.jit(jax.vmap(unconstrained))({k: v[:10_000] for k, v in values.items()})
            self.shift = {name: (u.mean(0), u.std(0) + 1e-6) for name, u in found.items()}
        self.reach = {}
        if curved:

            def ends(example: Values) -> Values:
                z = self.to_z(example)
                return {name: jnp.stack([z[name].min(), z[name].max()]) for name in curved}

            found = jax.jit(lambda v: jax.lax.map(ends, v, batch_size=1000))(values)
            self.reach = {name: jnp.stack([x[:, 0].min(), x[:, 1].max()]) for name, x in found.items()}

    def limit(self, name: str) -> Float[Array, "2"]:
        """The least and the greatest coordinate of a site; those beyond are clipped.

        Its quantile function cannot take them, or they are beyond what was simulated of a long tail.
        """
        furthest = dict(self.limits).get(name, math.inf)
        family = jnp.asarray([-furthest, furthest])
        return jnp.clip(self.reach[name], *family) if name in self.reach else family

    def beyond_simulations(self) -> Coordinates:
        """The same map, also where nothing was simulated of long tails: networks are not right there, densities are."""
        return eqx.tree_at(lambda c: c.reach, self, {}) if self.reach else self

    def visit(self, values: Values, visit: Callable[[str, dist.Distribution, Array], None]) -> None:
        """Call `visit(name, distribution, value)` at each parameter, with every site's value given."""
        parameters = set(self.graph.parameters)

        def at(name: str, msg: dict) -> None:
            if name in parameters:
                visit(name, msg["fn"], msg["value"])

        run(self.program, values, at)

    def _free(self, name: str, fn: dist.Distribution, value: Array) -> Array:
        if name in self.shift:
            mean, sd = jax.lax.stop_gradient(self.shift[name])
            return (to_free(fn, value) - mean) / sd
        return to_normal(fn, value)

    def _value(self, name: str, fn: dist.Distribution, z: Array) -> Array:
        if name in self.shift:
            mean, sd = jax.lax.stop_gradient(self.shift[name])
            return from_free(fn, mean + sd * z)
        if name in self.reach:
            z = jnp.clip(z, *jax.lax.stop_gradient(self.reach[name]))
        return from_normal(fn, z)

    def to_z(self, values: Values) -> Values:
        """The coordinates of all parameters: `{site: (*plates, size)}`."""
        out: Values = {}

        def visit(name: str, fn: dist.Distribution, value: Array) -> None:
            out[name] = self.canonical(name, self._free(name, fn, value))

        self.visit(values, visit)
        return out

    def log_volume(self, values: Values, sites: Collection[str] | None = None) -> Float[Array, ""]:
        """`log |dz/dθ|`: what turns a density in `z` into one in the user's parameters; `sites`: of these only."""
        total = jnp.zeros(())

        def visit(name: str, fn: dist.Distribution, value: Array) -> None:
            nonlocal total
            if sites is not None and name not in sites:
                return
            if name in self.shift:
                free = to_free(fn, value)
                scale = jnp.broadcast_to(self.shift[name][1], free.shape)
                total -= bijection(fn).log_abs_det_jacobian(free, value).sum() + jnp.log(scale).sum()
            else:
                # Of the distribution itself: a mask changes its log-probability, but not what is drawn.
                noise = dist.Normal(0.0, 1.0).log_prob(self._free(name, fn, value))
                total += unwrap(fn).log_prob(value).sum() - noise.sum()

        self.visit(values, visit)
        return total

    def log_prior(self, values: Values) -> Float[Array, ""]:
        """The log-density of all parameters under their prior."""
        total = jnp.zeros(())

        def visit(_: str, fn: dist.Distribution, value: Array) -> None:
            nonlocal total
            total += unwrap(fn).log_prob(value).sum()

        self.visit(values, visit)
        return total

    def in_support(self, values: Values) -> Array:
        """Whether every parameter is in the support of its prior."""
        inside = jnp.ones((), bool)

        def visit(_: str, fn: dist.Distribution, value: Array) -> None:
            nonlocal inside
            inside &= jnp.all(fn.support(value))

        self.visit(values, visit)
        return inside

    def outside(self, values: Values) -> list[str]:
        """The parameters that are not in the support of their prior."""
        out: list[str] = []

        def visit(name: str, fn: dist.Distribution, value: Array) -> None:
            out.extend([name] if not jnp.all(fn.support(value)) else [])

        self.visit(values, visit)
        return out

    def canonical(self, name: str, z: Array) -> Array:
        """A site's array with its plates first, in the graph's order, and the rest flattened: `(*plates, size)`."""
        dims = self.graph.sites[name].dims[: z.ndim] + (None,) * (z.ndim - len(self.graph.sites[name].dims))
        return plates_first(z, dims, tuple(self.graph.plates))

    def constrainers(self, values: Shapes, z: Shapes) -> dict[str, Constrain]:
        """For each parameter the function from other sites' values and its own `z`, `(*plates, size)`, to its value.

        The program is traced once, and each function holds only its site's equations, so that a chain of many sites
        does not run the whole program at every link. `values` and `z` give shapes only.
        """

        def outputs(values: Values, z: Values) -> Values:
            out: Values = {}

            def visit(name: str, fn: dist.Distribution, value: Array) -> None:
                x = self._value(name, fn, self.program_shape(name, z[name], fn))
                out[name] = jnp.broadcast_to(x, value.shape)

            self.visit(values, visit)
            return out

        closed = jax.make_jaxpr(outputs)(values, z)
        names = sorted(z)  # dicts are flattened in this order
        inputs = [("value", n) for n in sorted(values)] + [("z", n) for n in names]

        def build(name: str) -> Constrain:
            jaxpr, used = pe.dce_jaxpr(closed.jaxpr, [n == name for n in names])
            needed = [which for which, keep in zip(inputs, used, strict=True) if keep]

            def constrain(values: Values, z_site: Array) -> Array:
                (out,) = jax.core.eval_jaxpr(
                    jaxpr, closed.consts, *(z_site if kind == "z" else values[n] for kind, n in needed)
                )
                return out

            return Constrain(constrain, tuple(n for kind, n in needed if kind == "value"))

        return {name: build(name) for name in names}

    def program_shape(self, name: str, z: Array, fn: dist.Distribution) -> Array:
        """The inverse of `canonical` for `z`: `(*plates, size)` to the axes of the program."""
        site = self.graph.sites[name]
        batch = len(site.shape) - len(fn.event_shape)
        shape = jax.eval_shape(lambda v: self._free(name, fn, v), jax.ShapeDtypeStruct(site.shape, z.dtype)).shape
        dims = site.dims[:batch] + (None,) * (len(shape) - batch)
        return plates_last(z, shape, dims, tuple(self.graph.plates))


def _check_bijection(name: str, fn: dist.Distribution, value: Array) -> None:
    try:
        jax.eval_shape(lambda x: to_free(fn, x), value)
    except NotImplementedError as error:
        words = (
            "whose support has no bijection from the real numbers. Use coordinates='prior'."
            if is_exact(fn)
            else "which has neither a cdf nor a bijection of its support from the real numbers. Write it as a function "
            "of other sites (numpyro.deterministic)."
        )
        raise ValueError(f"Parameter '{name}' is {type(unwrap(fn)).__name__}, {words}") from error


def plates_first(x: Array, dims: tuple[str | None, ...], plates: tuple[str, ...]) -> Array:
    """Axes named in `plates` to the front, in that order; the rest flattened into one last axis."""
    front = [dims.index(p) for p in plates if p in dims]
    rest = [i for i in range(x.ndim) if i not in front]
    moved = jnp.transpose(x, front + rest)
    return moved.reshape(*moved.shape[: len(front)], math.prod(moved.shape[len(front) :]))


def plates_last(x: Array, shape: tuple[int, ...], dims: tuple[str | None, ...], plates: tuple[str, ...]) -> Array:
    """The inverse of `plates_first`: back to an array of `shape` whose axes are `dims`."""
    front = [dims.index(p) for p in plates if p in dims]
    rest = [i for i in range(len(shape)) if i not in front]
    order = front + rest
    moved = x.reshape([shape[i] for i in order])
    return jnp.transpose(moved, [order.index(i) for i in range(len(shape))])
