"""A site's distribution as a function of the values and constants that it reads, from the trace of its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.interpreters import partial_eval as pe

from cpejax.program.distributions import distribution_features, unmasked, unwrap
from cpejax.program.simulator import Program, Simulator
from cpejax.program.tracing import RawSite, run

Values = dict[str, Any]


class Cell:
    """A value in a trace, and whether it comes from a site; a constant that meets such a value gets a number."""

    __slots__ = ("number", "random", "value")

    def __init__(self, value: Any, random: bool = False):
        self.value, self.random = value, random
        self.number: int | None = None


_INLINED = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint"}


class Walk:
    """Evaluates a trace, and collects the largest parts of it that do not come from a site.

    With `given`, these get other values.
    """

    def __init__(self, given: Sequence[Any] | None = None):
        self.given = given
        self.found: list[Any] = []

    def use(self, cell: Cell) -> Any:
        if cell.random or np.ndim(cell.value) == 0:
            return cell.value
        if cell.number is None:
            cell.number = len(self.found)
            self.found.append(cell.value)
        return cell.value if self.given is None else self.given[cell.number]

    def __call__(self, jaxpr: Jaxpr, consts: Sequence[Cell], inputs: Sequence[Cell]) -> list[Cell]:
        env: dict[Var, Cell] = {}
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Cell:
            return Cell(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            cells = [read(v) for v in eqn.invars]
            inner = _inner(eqn)
            if inner is not None:
                outs = self(inner.jaxpr, [Cell(c) for c in inner.consts], cells)
            else:
                random = any(c.random for c in cells)
                values = [self.use(c) if random else c.value for c in cells]
                known = {v: x for v, x in zip(eqn.invars, values, strict=True) if not isinstance(v, Literal)}
                alone = jaxpr.replace(constvars=[], invars=list(known), outvars=eqn.outvars, eqns=[eqn])
                outs = [Cell(x, random) for x in jax.core.eval_jaxpr(alone, (), *known.values())]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]


def _inner(eqn: Any) -> ClosedJaxpr | None:
    """The trace of a call, which is evaluated as if it stood there."""
    if eqn.primitive.name not in _INLINED:
        return None
    inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
    if inner is None:
        return None
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


KEY = "a key"  # among the names of what a site reads: randomness that the program draws outside any site


class _Tape:
    """The distribution of one site, from the values of the sites it reads and from constants."""

    def __init__(self, closed: ClosedJaxpr, used: Sequence[bool], names: Sequence[str], tree: Any):
        jaxpr, needed = pe.dce_jaxpr(closed.jaxpr, list(used))
        self.jaxpr, self.consts, self.tree = jaxpr, closed.consts, tree
        self.names = [n for n, keep in zip(names, needed, strict=True) if keep]
        self.constants: list[np.ndarray] = []

    def distribution(self, values: Values, constants: Sequence[Any] | None) -> dist.Distribution:
        walk = Walk(constants)
        inputs = [Cell(jax.random.key(0) if n == KEY else values[n], True) for n in self.names]
        outs = walk(self.jaxpr, [Cell(c) for c in self.consts], inputs)
        leaves = [walk.use(cell) for cell in outs]
        if constants is None:
            self.constants = [np.asarray(c) for c in walk.found]
        return jax.tree.unflatten(self.tree, leaves)


class Evaluation:
    """The distributions of a program's sites at a few values from the prior, with any of its constants replaced."""

    def __init__(
        self,
        program: Program,
        sites: Mapping[str, RawSite],
        sizes: Mapping[str, int],
    ):
        self.program, self.sites, self.sizes = program, sites, sizes
        self.rng = np.random.default_rng(0)
        self.plates = {n: tuple(d for d in s.dims if d is not None) for n, s in sites.items()}
        self.draws = [self._draw(seed) for seed in range(3)]
        self.tapes = self._trace()
        self.opaque = {name for name, tape in self.tapes.items() if not self._readable(name, tape)}
        self.constants = {name: [jnp.asarray(c) for c in tape.constants] for name, tape in self.tapes.items()}
        self.features = jax.jit(self._features)
        self.before = [self.evaluate(values) for values in self.draws]

    def _draw(self, seed: int) -> Values:
        """Values of all sites; for data of simulators, which are not called, values in (0, 1) stand in."""
        simulated = [name for name, site in self.sites.items() if isinstance(unwrap(site.fn), Simulator)]
        values: Values = {n: jnp.asarray(self.rng.uniform(size=self.sites[n].shape), float) for n in simulated}
        with numpyro.validation_enabled(False):
            run(
                self.program,
                dict(values),
                lambda name, msg: values.update({name: jnp.asarray(msg["value"])}),
                jax.random.key(seed),
            )
        return values

    def _trace(self) -> dict[str, _Tape]:
        wanted = [n for n in self.sites if self.plates[n] or any(self.plates[p] for p in self.sites[n].parents)]
        trees: dict[str, Any] = {}

        def leaves(values: Values, key: Any) -> Values:
            out: Values = {}

            def visit(name: str, msg: dict[str, Any]) -> None:
                if name in wanted:
                    found, trees[name] = jax.tree.flatten(unmasked(msg["fn"]))
                    out[name] = [jnp.asarray(leaf) for leaf in found]

            run(self.program, values, visit, key)
            return out

        closed, shapes = jax.make_jaxpr(leaves, return_shape=True)(self.draws[0], jax.random.key(0))
        names = [*sorted(self.draws[0]), KEY]  # dicts are flattened in this order
        owner = [name for name in sorted(shapes) for _ in shapes[name]]
        return {n: _Tape(closed, [o == n for o in owner], names, trees[n]) for n in self.sites if n in trees}

    def _readable(self, name: str, tape: _Tape) -> bool:
        """Whether a site's distribution can be made from its arrays; one of the user's own may hide some from JAX."""
        try:
            with numpyro.validation_enabled(False):
                _features_of(tape.distribution(self.draws[0], None), self.draws[0][name])
        except Exception:
            tape.constants = []
            return False
        return True

    def _features(self, values: Values, constants: Mapping[str, Any]) -> Values:
        out = {
            name: _features_of(tape.distribution(values, constants[name]), values[name])
            for name, tape in self.tapes.items()
            if name not in self.opaque
        }

        def visit(name: str, msg: dict[str, Any]) -> None:
            if name in self.opaque:
                out[name] = _features_of(msg["fn"], msg["value"])

        if self.opaque:
            run(self.program, values, visit)
        return out

    def evaluate(self, values: Values, constants: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
        found = self.features(values, {**self.constants, **(constants or {})})
        return {name: np.asarray(x) for name, x in found.items()}

    def batch(self, name: str) -> tuple[int, ...]:
        return self.before[0][name].shape[:-1]

    def members_only(self, name: str, members: np.ndarray) -> np.ndarray:
        """Without the batch axes that are of no plate, as `(*plates)` in the order of the axes."""
        dims = self.sites[name].dims[: members.ndim]
        return np.asarray(members.any(tuple(i for i, d in enumerate(dims) if d is None)))


def _features_of(fn: dist.Distribution, value: Any) -> Any:
    """What a distribution is for each member, `(*batch, n)`: of one that can only be sampled, its arrays."""
    try:
        if not isinstance(unwrap(fn), Simulator):
            unmasked(fn).log_prob(value)
    except NotImplementedError:
        batch = fn.batch_shape
        leaves = [jnp.asarray(x, float) for x in jax.tree.leaves(fn)]
        fitting = [x.reshape(*batch, -1) for x in leaves if x.shape[: len(batch)] == batch]
        return jnp.concatenate([jnp.zeros((*batch, 1)), *fitting], axis=-1)
    return distribution_features(fn, value)


def differs(a: np.ndarray, b: np.ndarray, *, exact: bool = False, loose: bool = False) -> np.ndarray:
    """Which members differ, `(*batch, n)` to `(*batch)`."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = 0.0 if exact else (1e-3 if loose else 1e-5)
        scale = np.maximum(np.abs(a), np.abs(b))
        near = np.abs(a - b) <= size * np.where(np.isfinite(scale), scale, 0.0) + size
    return np.asarray(~(near | (a == b) | (np.isnan(a) & np.isnan(b))).all(-1))


def same_along(c: np.ndarray, axis: int) -> bool:
    return bool((c == c.take([0], axis)).all())
