"""Prior coordinates: every parameter as its prior draws it, from standard normal noise.

In these coordinates the prior is N(0, I), the supports hold by construction, and the posterior program is the prior
program run on re-drawn noise (paper, section 3.1, "the prior as base distribution", made exact).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.interpreters import partial_eval as pe
from jax.scipy.special import log_ndtr, ndtr, ndtri
from jaxtyping import Array, Float
from numpyro.distributions import biject_to

from cpejax._embed import Fixed
from cpejax._graph import Graph
from cpejax._program import Program, run, unwrap

Values = dict[str, Array]


@dataclass(frozen=True)
class Constrain:
    """A parameter's value from its own `z` and the values of the sites named in `needs`."""

    function: Callable[[Values, Array], Array]
    needs: tuple[str, ...]

    def __call__(self, values: Values, z: Array) -> Array:
        return self.function(values, z)


# Beyond this Φ(z) is 0 or 1 in float32, and a quantile function gives an infinity or, for some, a wrong number.
LIMIT = 5.2


def _half_normal(d: Any, z: Array) -> Array:
    return -d.scale * ndtri(0.5 * ndtr(-z))


# Families in closed form, accurate in both tails: value from z, z from value.
_CLOSED: dict[type, tuple[Callable[[Any, Array], Array], Callable[[Any, Array], Array]]] = {
    dist.Normal: (lambda d, z: d.loc + d.scale * z, lambda d, x: (x - d.loc) / d.scale),
    dist.Uniform: (
        lambda d, z: d.low + (d.high - d.low) * ndtr(z),
        lambda d, x: ndtri(jnp.clip((x - d.low) / (d.high - d.low), 1e-7, 1 - 1e-7)),
    ),
    dist.HalfNormal: (_half_normal, lambda d, x: -ndtri(2 * ndtr(-x / d.scale))),
    dist.Exponential: (lambda d, z: -log_ndtr(-z) / d.rate, lambda d, x: -ndtri(jnp.exp(-x * d.rate))),
    dist.Laplace: (
        lambda d, z: d.loc - d.scale * jnp.sign(z) * (jnp.log(2.0) + log_ndtr(-jnp.abs(z))),
        lambda d, x: -jnp.sign(x - d.loc) * ndtri(0.5 * jnp.exp(-jnp.abs(x - d.loc) / d.scale)),
    ),
    dist.Logistic: (
        lambda d, z: d.loc + d.scale * (log_ndtr(z) - log_ndtr(-z)),
        lambda d, x: jnp.sign(d.loc - x) * ndtri(jax.nn.sigmoid(-jnp.abs(x - d.loc) / d.scale)),
    ),
    dist.Cauchy: (
        lambda d, z: d.loc + d.scale * jnp.sign(z) / jnp.tan(jnp.pi * ndtr(-jnp.maximum(jnp.abs(z), 1e-6))),
        lambda d, x: -jnp.sign(x - d.loc) * ndtri(jnp.arctan2(d.scale, jnp.abs(x - d.loc)) / jnp.pi),
    ),
    dist.HalfCauchy: (
        lambda d, z: d.scale / jnp.tan(0.5 * jnp.pi * ndtr(-z)),
        lambda d, x: -ndtri(2 / jnp.pi * jnp.arctan2(d.scale, x)),
    ),
}
# These are exact however large z is; all others are clipped at LIMIT, and the clipping is counted.
_UNLIMITED = (dist.Normal, dist.MultivariateNormal)


def is_exact(fn: dist.Distribution) -> bool:
    """Whether the family can be drawn from normal noise by its quantile function (else: bijection of its support)."""
    base = unwrap(fn)
    if isinstance(base, dist.TransformedDistribution):
        return is_exact(base.base_dist)
    if isinstance(base, dist.MultivariateNormal):
        return True
    return not base.event_shape and (type(base) in _CLOSED or _has_cdf(base))


def _has_cdf(base: dist.Distribution) -> bool:
    try:
        jax.eval_shape(base.cdf, jax.ShapeDtypeStruct(base.batch_shape, jnp.float32))
    except Exception:  # numpyro raises several kinds for "not there"
        return False
    return True


def from_normal(fn: dist.Distribution, z: Array) -> Array:
    """The value that noise `z` gives: `F⁻¹(Φ(z))`, of the shape of a draw."""
    base = unwrap(fn)
    if isinstance(base, dist.TransformedDistribution):
        x = from_normal(base.base_dist, z)
        for transform in base.transforms:
            x = transform(x)
        return x
    if isinstance(base, dist.MultivariateNormal):
        return base.loc + jnp.einsum("...ij,...j->...i", base.scale_tril, z)
    if not isinstance(base, _UNLIMITED):
        z = jnp.clip(z, -LIMIT, LIMIT)
    if type(base) in _CLOSED:
        return _CLOSED[type(base)][0](base, z)
    return _bisect(base, ndtr(z))


def to_normal(fn: dist.Distribution, x: Array) -> Array:
    """The noise that gives `x`: the inverse of `from_normal`."""
    base = unwrap(fn)
    if isinstance(base, dist.TransformedDistribution):
        for transform in reversed(base.transforms):
            x = transform.inv(x)
        return to_normal(base.base_dist, x)
    if isinstance(base, dist.MultivariateNormal):
        centred = x - base.loc
        tril = jnp.broadcast_to(base.scale_tril, centred.shape + centred.shape[-1:])
        return jax.lax.linalg.triangular_solve(tril, centred[..., None], left_side=True, lower=True)[..., 0]
    if type(base) in _CLOSED:
        return _CLOSED[type(base)][1](base, x)
    return ndtri(jnp.clip(base.cdf(x), 1e-7, 1 - 1e-7))


def _bisect(base: dist.Distribution, p: Array) -> Array:
    """The quantile of a scalar family from its cdf; numpyro's own `icdf` needs a package we do not depend on."""
    if isinstance(base, dist.StudentT):
        standard = dist.StudentT(base.df)
        return base.loc + base.scale * _bisect_on(standard.cdf, jnp.sinh, p)
    transform = biject_to(base.support)
    real = base.support is dist.constraints.real
    return _bisect_on(base.cdf, jnp.sinh if real else transform, p)


def _bisect_on(cdf: Callable[[Array], Array], transform: Callable[[Array], Array], p: Array) -> Array:
    shape = jnp.broadcast_shapes(p.shape, jax.eval_shape(lambda p: cdf(transform(p)), p).shape)

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        below = cdf(transform(middle)) < p
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = jax.lax.fori_loop(0, 40, halve, (jnp.full(shape, -40.0), jnp.full(shape, 40.0)))
    return transform(0.5 * (low + high))


class Coordinates(Fixed):
    """The map between the parameters of a program and standard coordinates `z`.

    A site's `z` has its plates first, in the graph's order, and one last axis for the numbers of a member.
    Everything here acts on one example; callers `vmap`.

    Families without quantile function (Dirichlet, LKJCholesky) use the bijection of their support, shifted and scaled by
    `shift`; N(0, 1) is then not their prior but only the base, and the density has the bijection's Jacobian.
    `program` takes no arguments: bind them first.
    """

    program: Program = eqx.field(static=True)
    graph: Graph = eqx.field(static=True)
    shift: dict[str, tuple[Array, Array]]
    limited: tuple[str, ...] = eqx.field(static=True)

    def __init__(self, program: Program, graph: Graph, values: Values):
        """`values`: simulations, arrays with a leading axis, by which the bijections' coordinates are standardised."""
        self.program, self.graph = program, graph
        inexact: dict[str, Any] = {}
        limited: list[str] = []

        def look(name: str, fn: dist.Distribution, value: Array) -> None:
            if not is_exact(fn):
                inexact[name] = None
            elif not _unlimited(fn):
                limited.append(name)

        first = {name: value[0] for name, value in values.items()}
        self._visit(first, look)
        self.limited = tuple(limited)
        self.shift = {}
        if inexact:

            def unconstrained(example: Values) -> Values:
                out: Values = {}

                def visit(name: str, fn: dist.Distribution, value: Array) -> None:
                    if name in inexact:
                        out[name] = biject_to(fn.support).inv(value)

                self._visit(example, visit)
                return out

            free = jax.jit(jax.vmap(unconstrained))({k: v[:10_000] for k, v in values.items()})
            self.shift = {name: (u.mean(0), u.std(0) + 1e-6) for name, u in free.items()}

    def _visit(self, values: Values, visit: Callable[[str, dist.Distribution, Array], None]) -> None:
        """Call `visit(name, distribution, value)` at each parameter, with every site's value given."""
        parameters = set(self.graph.parameters)

        def at(name: str, msg: dict) -> None:
            if name in parameters:
                visit(name, msg["fn"], msg["value"])

        run(self.program, values, at)

    def _free(self, name: str, fn: dist.Distribution, value: Array) -> Array:
        if name in self.shift:
            mean, sd = jax.lax.stop_gradient(self.shift[name])
            return (biject_to(fn.support).inv(value) - mean) / sd
        return to_normal(fn, value)

    def _value(self, name: str, fn: dist.Distribution, z: Array) -> Array:
        if name in self.shift:
            mean, sd = jax.lax.stop_gradient(self.shift[name])
            return biject_to(fn.support)(mean + sd * z)
        return from_normal(fn, z)

    def to_z(self, values: Values) -> Values:
        """The coordinates of all parameters: `{site: (*plates, size)}`."""
        out: Values = {}

        def visit(name: str, fn: dist.Distribution, value: Array) -> None:
            out[name] = self.canonical(name, self._free(name, fn, value))

        self._visit(values, visit)
        return out

    def log_volume(self, values: Values) -> Float[Array, ""]:
        """`log |dz/dθ|`: what turns a density in `z` into one in the user's parameters."""
        total = jnp.zeros(())

        def visit(name: str, fn: dist.Distribution, value: Array) -> None:
            nonlocal total
            if name in self.shift:
                transform = biject_to(fn.support)
                free = transform.inv(value)
                scale = jnp.broadcast_to(self.shift[name][1], free.shape)
                total -= transform.log_abs_det_jacobian(free, value).sum() + jnp.log(scale).sum()
            else:
                # The log-probability has the full batch shape, plates included, as the value has.
                noise = dist.Normal(0.0, 1.0).log_prob(self._free(name, fn, value))
                total += fn.log_prob(value).sum() - noise.sum()

        self._visit(values, visit)
        return total

    def in_support(self, values: Values) -> Array:
        """Whether every parameter is in the support of its prior."""
        inside = jnp.ones((), bool)

        def visit(name: str, fn: dist.Distribution, value: Array) -> None:
            nonlocal inside
            inside &= jnp.all(fn.support(value))

        self._visit(values, visit)
        return inside

    def canonical(self, name: str, z: Array) -> Array:
        """A site's array with its plates first, in the graph's order, and the rest flattened: `(*plates, size)`."""
        dims = self.graph.sites[name].dims[: z.ndim] + (None,) * (z.ndim - len(self.graph.sites[name].dims))
        return plates_first(z, dims, tuple(self.graph.plates))

    def constrainers(self, values: Values, z: Values) -> dict[str, Constrain]:
        """For each parameter a function from the values of other sites and its own `z`, `(*plates, size)`, to its value.

        The program is traced once, and each function holds only its site's equations, so that a chain of many sites
        does not run the whole program at every link. `values` and `z` give shapes only.
        """

        def outputs(values: Values, z: Values) -> Values:
            out: Values = {}

            def visit(name: str, fn: dist.Distribution, value: Array) -> None:
                x = self._value(name, fn, self.program_shape(name, z[name], fn))
                out[name] = jnp.broadcast_to(x, value.shape)

            self._visit(values, visit)
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


def _unlimited(fn: dist.Distribution) -> bool:
    base = unwrap(fn)
    return _unlimited(base.base_dist) if isinstance(base, dist.TransformedDistribution) else isinstance(base, _UNLIMITED)


def plates_first(x: Array, dims: tuple[str | None, ...], plates: tuple[str, ...]) -> Array:
    """Axes named in `plates` to the front, in that order; the rest flattened into one last axis."""
    front = [dims.index(p) for p in plates if p in dims]
    rest = [i for i in range(x.ndim) if i not in front]
    moved = jnp.transpose(x, front + rest)
    return moved.reshape(moved.shape[: len(front)] + (math.prod(moved.shape[len(front) :]),))


def plates_last(x: Array, shape: tuple[int, ...], dims: tuple[str | None, ...], plates: tuple[str, ...]) -> Array:
    """The inverse of `plates_first`: back to an array of `shape` whose axes are `dims`."""
    front = [dims.index(p) for p in plates if p in dims]
    rest = [i for i in range(len(shape)) if i not in front]
    order = front + rest
    moved = x.reshape([shape[i] for i in order])
    return jnp.transpose(moved, [order.index(i) for i in range(len(shape))])
