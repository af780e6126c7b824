"""What tells the members of a plate apart: constants, and index arrays into other plates.

Members of a plate share weights and are pooled, which is right only if they are exchangeable given all that is read of
them. A program may give each member something of its own that no site draws: a row of a design matrix, a measurement
error, a point in time (*constants*), or the number of the group it belongs to (a *link* to another plate). Both are
found in the program's trace, and that nothing else tells members apart is verified with numbers.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.interpreters import partial_eval as pe
from numpyro import handlers

from cpejax.program.distributions import distribution_features, unmasked, unwrap
from cpejax.program.simulator import Program, Simulator
from cpejax.program.tracing import RawSite, run

Values = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Constant:
    """What a program gives each member of some plates.

    - `name`: of the `numpyro.deterministic` site, the program's argument or the variable that has the values, or a
        number after the name of the site that reads it.
    - `plates`: along which it differs.
    - `values`: `(*plates, columns)`.
    - `index`: whether the values are numbers of something, not quantities.
    """

    name: str
    plates: tuple[str, ...]
    values: np.ndarray
    index: bool = False

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the values, to five digits, so that the rounding of another machine does not change it."""
        x = np.nan_to_num(np.asarray(self.values, np.float64))
        power = np.floor(np.log10(np.abs(np.where(x == 0, 1.0, x))))
        digits = np.round(x / 10.0 ** (power - 4))
        whole = np.abs(digits) == 1e5  # 9.99999 and 10 are the same
        digits, power = np.where(whole, digits / 10, digits), np.where(whole, power + 1, power)
        code = np.stack([digits, np.where(x == 0, 0, power)]).astype("<i8").tobytes()
        return hashlib.sha256(str(x.shape).encode() + code).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, tuple[str, ...], str]:
        return self.name, self.plates, self.digest


@dataclass(frozen=True)
class Link:
    """Members of plates `source` read member `index[source]` of a site in plate `target`.

    `index` has shape `(*source, 1)`. `explicit`: the program has it as an array of integers.
    """

    source: tuple[str, ...]
    target: str
    index: Constant
    explicit: bool = True


@dataclass(frozen=True)
class Members:
    """What was found: constants by name, links, and the plates whose members differ in what nothing can read."""

    constants: Mapping[str, Constant] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    reads: Mapping[str, tuple[tuple[str, Link], ...]] = field(default_factory=dict)  # site -> (parent, link)
    unlike: Mapping[str, str] = field(default_factory=dict)  # plate -> why


def study(
    program: Program,
    sites: Mapping[str, RawSite],
) -> Members:
    """Find what tells the members of a program's plates apart, and verify that nothing else does.

    Nothing is simulated on the host: a site's distribution is evaluated as a function of its parents' values and of the
    constants that the trace of the program shows, at a few values drawn from the prior.
    """
    sizes = {d: n for s in sites.values() for d, n in zip(s.dims, s.shape, strict=True) if d is not None}
    if not sizes:
        return Members()
    return _Study(program, sites, sizes).members()


# ---- A site's distribution as a function of values and constants


class _Cell:
    """A value in a trace, and whether it comes from a site; a constant that meets such a value gets a number."""

    __slots__ = ("number", "random", "value")

    def __init__(self, value: Any, random: bool = False):
        self.value, self.random = value, random
        self.number: int | None = None


_INLINED = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint"}


class _Walk:
    """Evaluates a trace, and collects the largest parts of it that do not come from a site.

    With `given`, these get other values.
    """

    def __init__(self, given: Sequence[Any] | None = None):
        self.given = given
        self.found: list[Any] = []

    def use(self, cell: _Cell) -> Any:
        if cell.random or np.ndim(cell.value) == 0:
            return cell.value
        if cell.number is None:
            cell.number = len(self.found)
            self.found.append(cell.value)
        return cell.value if self.given is None else self.given[cell.number]

    def __call__(self, jaxpr: Jaxpr, consts: Sequence[_Cell], inputs: Sequence[_Cell]) -> list[_Cell]:
        env: dict[Var, _Cell] = {}
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Cell:
            return _Cell(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            cells = [read(v) for v in eqn.invars]
            inner = _inner(eqn)
            if inner is not None:
                outs = self(inner.jaxpr, [_Cell(c) for c in inner.consts], cells)
            else:
                random = any(c.random for c in cells)
                values = [self.use(c) if random else c.value for c in cells]
                known = {v: x for v, x in zip(eqn.invars, values, strict=True) if not isinstance(v, Literal)}
                alone = jaxpr.replace(constvars=[], invars=list(known), outvars=eqn.outvars, eqns=[eqn])
                outs = [_Cell(x, random) for x in jax.core.eval_jaxpr(alone, (), *known.values())]
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


_KEY = "a key"  # among the names of what a site reads: randomness that the program draws outside any site


class _Tape:
    """The distribution of one site, from the values of the sites it reads and from constants."""

    def __init__(self, closed: ClosedJaxpr, used: Sequence[bool], names: Sequence[str], tree: Any):
        jaxpr, needed = pe.dce_jaxpr(closed.jaxpr, list(used))
        self.jaxpr, self.consts, self.tree = jaxpr, closed.consts, tree
        self.names = [n for n, keep in zip(names, needed, strict=True) if keep]
        self.constants: list[np.ndarray] = []

    def distribution(self, values: Values, constants: Sequence[Any] | None) -> dist.Distribution:
        walk = _Walk(constants)
        inputs = [_Cell(jax.random.key(0) if n == _KEY else values[n], True) for n in self.names]
        outs = walk(self.jaxpr, [_Cell(c) for c in self.consts], inputs)
        leaves = [walk.use(cell) for cell in outs]
        if constants is None:
            self.constants = [np.asarray(c) for c in walk.found]
        return jax.tree.unflatten(self.tree, leaves)


# ---- The study


class _Study:
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
        self.index: dict[str, list[tuple[str, Link]]] = {name: [] for name in self.tapes}
        self.axes: dict[tuple[str, int], tuple[str | None, ...]] = {}  # (site, constant) -> the plate of each axis
        self.targets: dict[tuple[str, int], str] = {}  # (site, constant) -> the plate whose members it numbers
        self.unlike: dict[str, str] = {}
        self.opaque = {name for name, tape in self.tapes.items() if not self._readable(name, tape)}
        self.constants = {name: [jnp.asarray(c) for c in tape.constants] for name, tape in self.tapes.items()}
        self.features = jax.jit(self._features)
        self.before = [self._evaluate(values) for values in self.draws]

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
        names = [*sorted(self.draws[0]), _KEY]  # dicts are flattened in this order
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

    def _evaluate(self, values: Values, constants: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
        found = self.features(values, {**self.constants, **(constants or {})})
        return {name: np.asarray(x) for name, x in found.items()}

    def members(self) -> Members:
        for name in self.tapes:
            self._find_links(name)
        for name in self.tapes:
            for number in range(len(self.constants[name])):
                self._align(name, number)
        self._name_slots()
        links = self._nested([link for found in self.index.values() for _, link in found])
        for plate in self.sizes:
            if plate not in self.unlike:
                self._check(plate)
        for name, site in self.sites.items():
            base = unwrap(site.fn)
            if self.plates[name] and isinstance(base, Simulator) and base.vectorized:
                self._check_rows(name)
        reads = {name: tuple(found) for name, found in self.index.items() if found}
        return Members(self._named(), links, reads, dict(self.unlike))

    # Links

    def _find_links(self, name: str) -> None:
        """Which member of a parent's plate each member of a site reads, where it is not in that plate itself."""
        if not self.plates[name]:
            return
        for parent in sorted(self.sites[name].parents):
            for plate in self.plates[parent]:
                if plate not in self.plates[name] and self.sizes[plate] > 1:
                    self._find_link(name, parent, plate)

    def _find_link(self, name: str, parent: str, plate: str) -> None:
        size = self.sizes[plate]
        number = np.arange(size)
        bits = [(number >> b & 1).astype(bool) for b in range((size - 1).bit_length())]
        on, off = (
            np.array([self._moves(name, parent, plate, m) for m in masks]) for masks in (bits, [~b for b in bits])
        )
        if not (on & off).any():  # each reads one, or where a factor is zero none
            one = (on ^ off).all(0)
            index = (on * (1 << np.arange(len(bits))).reshape(-1, *(1,) * (on.ndim - 1))).sum(0)
            named = (c for c in self._integers(name, index.shape, size) if (c == index)[one].all())
            if one.any():
                self._add_link(name, parent, plate, next(named, _filled(index, one)), False)
            return
        some = self.rng.permutation(size)[:4]
        if all(self._moves(name, parent, plate, number == i).all() for i in some):
            return  # each reads all
        reads = np.array([self._moves(name, parent, plate, number == i) for i in range(min(size, 1_000))])
        any_read = reads.any(0)
        slots = [
            index
            for index in self._integers(name, any_read.shape, len(reads))
            if np.take_along_axis(reads, index[None], 0)[0][any_read].all()
        ]
        covered = np.zeros_like(reads)
        for index in slots:
            np.put_along_axis(covered, index[None], True, 0)
        if slots and len(reads) == size and not (reads & ~covered).any():
            for index in slots:
                self._add_link(name, parent, plate, index, True)
            self._must_unroll(plate, f"a member of '{name}' reads several members of '{parent}'")
            return
        why = f"members of '{name}' read different members of '{parent}'"
        for axis, p in enumerate(self.plates[name]):
            if not (reads == reads.take([0], axis + 1)).all():
                self._must_unroll(p, why)
        self._must_unroll(plate, why)

    def _moves(self, name: str, parent: str, plate: str, changed: np.ndarray) -> np.ndarray:
        """Which members of a site have another distribution once the `changed` members of a parent have moved."""
        axis = self.sites[parent].dims.index(plate)
        shape = [-1 if i == axis else 1 for i in range(len(self.sites[parent].shape))]
        moved = np.zeros(self._batch(name), bool)
        for k, values in enumerate(self.draws[:2]):
            new = jnp.where(changed.reshape(shape), self.draws[k + 1][parent], values[parent])
            after = self._evaluate({**values, parent: new})[name]
            moved |= _differs(self.before[k][name], after, exact=True)
        return self._members_only(name, moved)

    def _batch(self, name: str) -> tuple[int, ...]:
        return self.before[0][name].shape[:-1]

    def _members_only(self, name: str, members: np.ndarray) -> np.ndarray:
        """Without the batch axes that are of no plate, as `(*plates)` in the order of the axes."""
        dims = self.sites[name].dims[: members.ndim]
        return np.asarray(members.any(tuple(i for i, d in enumerate(dims) if d is None)))

    def _integers(self, name: str, shape: tuple[int, ...], size: int) -> Iterator[np.ndarray]:
        """Constants of integers below `size`, or columns of them, as arrays of `shape`."""
        for constant in self.constants[name]:
            c = np.asarray(constant)
            if not np.issubdtype(c.dtype, np.integer) or c.min() < 0 or c.max() >= size:
                continue
            forms = [c] if c.ndim <= len(shape) else []
            forms += list(np.moveaxis(c, -1, 0)) if c.ndim > 1 else []
            for form in forms:
                if _fits(form.shape, shape):
                    yield np.broadcast_to(form, shape)

    def _add_link(self, name: str, parent: str, plate: str, index: np.ndarray, explicit: bool) -> None:
        around = [p for p in self.sites[name].dims if p is not None]
        source: list[str] = []
        for axis in reversed(range(len(around))):
            if (index == index.take([0], axis)).all():
                index = index.take(0, axis)
            else:
                source.insert(0, around[axis])
        constant = Constant(f"{'/'.join(source)}→{plate}", tuple(source), index[..., None], True)
        link = Link(tuple(source), plate, constant, explicit)
        if (parent, link) not in self.index[name]:
            self.index[name].append((parent, link))

    def _must_unroll(self, plate: str, why: str) -> None:
        self.unlike.setdefault(plate, why)

    # Constants

    def _align(self, name: str, number: int) -> None:
        """Find the plate of each axis of a constant: members that keep their part of it keep their distribution."""
        c = np.asarray(self.constants[name][number])
        axes: list[str | None] = [None] * c.ndim
        reached: dict[str, Link | None] = dict.fromkeys(self.plates[name]) | {
            link.target: link for _, link in self.index[name] if len(link.source) == 1
        }
        outside = [p for parent in self.sites[name].parents for p in self.plates[parent] if p not in reached]
        for plate in [*reached, *dict.fromkeys(outside)]:
            for axis in range(c.ndim):
                if axes[axis] is not None or c.shape[axis] != self.sizes[plate] or _same_along(c, axis):
                    continue
                if plate in outside or self._aligned(name, number, axis, plate, reached[plate]):
                    axes[axis] = plate
                    break
        self.axes[name, number] = tuple(axes)

    def _aligned(self, name: str, number: int, axis: int, plate: str, link: Link | None) -> bool:
        c = np.asarray(self.constants[name][number])
        size = self.sizes[plate]
        for trial in range(4):
            mask = self.rng.permutation(size) < max(size // 2, 1)
            other = np.roll(c, 1, axis) if trial == 0 else c.take(self.rng.permutation(size), axis)
            new = np.where(mask.reshape([-1 if i == axis else 1 for i in range(c.ndim)]), other, c)
            after = self._replaced(name, number, new, self.draws[trial % 2])[name]
            moved = self._members_only(name, _differs(self.before[trial % 2][name], after))
            plates = self.plates[name]
            if link is None:
                stays = ~mask.reshape([-1 if p == plate else 1 for p in plates])
            else:
                index = link.index.values[..., 0]
                stays = ~mask[index].reshape([len(index) if p == link.source[0] else 1 for p in plates])
            if (moved & stays).any():
                return False
        return True

    def _replaced(self, name: str, number: int, new: np.ndarray, values: Values) -> dict[str, np.ndarray]:
        constants = list(self.constants[name])
        constants[number] = jnp.asarray(new)
        return self._evaluate(values, {name: constants})

    def _matters(self, name: str, number: int, axis: int) -> bool:
        """Whether what a constant has along an axis changes the distribution at all."""
        c = np.asarray(self.constants[name][number])
        new = np.roll(c, 1, axis)
        return any(
            _differs(self.before[k][name], self._replaced(name, number, new, v)[name]).any()
            for k, v in enumerate(self.draws)
        )

    def _name_slots(self) -> None:
        """Which constants are index arrays: all their values are numbers of members that a link reads."""
        for name, tape in self.tapes.items():
            for number in range(len(tape.constants)):
                c = np.asarray(self.constants[name][number])
                if not np.issubdtype(c.dtype, np.integer):
                    continue
                plates = tuple(p for p in self.plates[name] if p in self.axes[name, number])
                columns = self._columns(name, number, plates)
                for i, (parent, link) in enumerate(self.index[name]):
                    if link.source == plates and all(
                        np.array_equal(columns[..., k], link.index.values[..., 0]) for k in range(columns.shape[-1])
                    ):
                        self.targets[name, number] = link.target
                        self.index[name][i] = (parent, Link(link.source, link.target, link.index, True))

    def _columns(self, name: str, number: int, plates: tuple[str, ...]) -> np.ndarray:
        """A constant as `(*plates, columns)`, without the axes along which it does not differ."""
        c, axes = np.asarray(self.constants[name][number]), list(self.axes[name, number])
        for axis in reversed(range(c.ndim)):
            if axes[axis] is None and _same_along(c, axis):
                c = c.take(0, axis)
                axes.pop(axis)
        front = [axes.index(p) for p in plates]
        rest = [i for i in range(c.ndim) if i not in front]
        return c.transpose(front + rest).reshape(*(c.shape[i] for i in front), -1)

    def _named(self) -> dict[str, Constant]:
        """The constants that members differ by, each once."""
        known: list[tuple[str, np.ndarray]] | None = None
        found: list[Constant] = []
        for name, tape in self.tapes.items():
            for number in range(len(tape.constants)):
                axes = self.axes[name, number]
                if (name, number) in self.targets:
                    continue
                plates = tuple(p for p in self.sizes if p in axes)
                if not plates or not any(self._matters(name, number, i) for i, p in enumerate(axes) if p is not None):
                    continue
                values = self._columns(name, number, plates)
                index = bool(np.issubdtype(values.dtype, np.integer))
                if any(c.plates == plates and _equal(c.values, values) for c in found):
                    continue
                known = list(self._names()) if known is None else known
                flat = np.squeeze(np.asarray(self.constants[name][number]))
                called = next((n for n, x in known if _equal(np.squeeze(x), flat) or _equal(np.squeeze(x), flat.T)), "")
                taken = {c.name for c in found}
                numbers = (f"{called or name}.{i}" for i in itertools.count(1))
                label = called if called and called not in taken else next(n for n in numbers if n not in taken)
                found.append(Constant(label, plates, values, index))
        return {c.name: c for c in found}

    def _names(self) -> Iterator[tuple[str, np.ndarray]]:
        """Arrays that the user has given a name, by a deterministic site, as an argument or as a variable."""
        with handlers.trace() as trace, numpyro.validation_enabled(False):
            run(self.program, self.draws[0])
        for name, site in trace.items():
            if site["type"] == "deterministic":
                yield from _arrays(name, site["value"])
        try:
            function: Any = self.program
            args, kwargs = (), {}
            while isinstance(function, functools.partial):
                function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            variables = inspect.getclosurevars(inspect.unwrap(function))
            for name, value in {**variables.globals, **variables.nonlocals, **bound.arguments}.items():
                yield from _arrays(name, value)
        except (TypeError, ValueError):  # not a Python function
            return

    # Links that nest one plate in another

    def _nested(self, links: list[Link]) -> tuple[Link, ...]:
        """Each link once; a plate that is not simply around the plates that point to it must be unrolled."""
        out: list[Link] = []
        for link in links:
            same = [
                i
                for i, other in enumerate(out)
                if (other.source, other.target, other.index) == (link.source, link.target, link.index)
            ]
            if not same:
                out.append(link)
            elif not link.explicit:
                out[same[0]] = link
        for link in out:
            target, words = link.target, f"members of '{'/'.join(link.source)}' point into it"
            if len(link.source) != 1:
                self._must_unroll(target, f"{words} by {len(link.source)} plates at once")
            elif any(o.target == target and o.source == link.source and o != link for o in out):
                self._must_unroll(target, f"{words} by several index arrays")
            elif not link.explicit:
                self._must_unroll(target, f"{words}, but not by an array of integers")
            elif any({link.source[0], target} <= set(p) for p in self.plates.values()):
                self._must_unroll(target, f"{words}, but also cross it")
            elif self._readers_differ(link):
                self._must_unroll(target, f"{words}, but also read all its members")
        single = {(o.source[0], o.target): o.index.values[..., 0] for o in out if o.target not in self.unlike}
        for target in self._inconsistent(single):
            self._must_unroll(target, "members of other plates point into it in ways that do not nest")
        return tuple(out)

    def _readers_differ(self, link: Link) -> bool:
        """Whether a site in the source reads a parent in the target otherwise than by the link."""
        for name, site in self.sites.items():
            if link.source[0] in self.plates[name]:
                linked = {parent for parent, o in self.index[name] if o.target == link.target}
                if any(link.target in self.plates[p] and p not in linked for p in site.parents):
                    return True
        return False

    def _inconsistent(self, single: dict[tuple[str, str], np.ndarray]) -> set[str]:
        out: set[str] = set()
        for (o, g), index in single.items():
            if (g, o) in single:
                out |= {o, g}
            for (a, d), further in single.items():
                if a == g and (o, d) in single and not np.array_equal(further[index], single[o, d]):
                    out.add(d)
        for plates in self.plates.values():
            for target in {g for _, g in single}:
                if sum((p, target) in single for p in plates) > 1:
                    out.add(target)
        return out

    # The check

    def _check(self, plate: str) -> None:
        """Whether members can change places, with all that is read of them, and nothing else changes."""
        for trial in range(2):
            order = self.rng.permutation(self.sizes[plate]) if trial else np.roll(np.arange(self.sizes[plate]), 1)
            back = np.argsort(order)
            values = {
                n: x.take(order, self.sites[n].dims.index(plate)) if plate in self.plates[n] else x
                for n, x in self.draws[trial].items()
            }
            constants = {name: list(found) for name, found in self.constants.items()}
            for (name, number), axes in self.axes.items():
                c = np.asarray(self.constants[name][number])
                for axis, p in enumerate(axes):
                    c = c.take(order, axis) if p == plate else c
                if self.targets.get((name, number)) == plate:
                    c = back.astype(c.dtype)[c]
                constants[name][number] = jnp.asarray(c)
            after = self._evaluate(values, constants)
            for name, tape in self.tapes.items():
                if _KEY in tape.names:
                    continue  # what is drawn outside any site is another value for each member
                before = self.before[trial][name]
                linked = {parent for parent, o in self.index[name] if o.target == plate}
                if plate in self.plates[name]:
                    before = before.take(order, self.sites[name].dims.index(plate))
                elif any(
                    plate in self.plates[p] and p not in linked and not self.sites[p].has_obs
                    for p in self.sites[name].parents
                ):
                    continue  # coupled through this site, so that the plate is unrolled anyway
                if _differs(before, after[name], loose=True).any():
                    why = f"its members differ at site '{name}' by something other than constants, one for each member"
                    self._must_unroll(plate, why)
                    return

    def _check_rows(self, name: str) -> None:
        """Whether a simulator that gets all rows at once knows more of a row than its arguments."""
        with numpyro.validation_enabled(False):
            simulator = unwrap(self.tapes[name].distribution(self.draws[0], None))
        assert isinstance(simulator, Simulator)
        shape = self._batch(name)
        members = int(np.prod(shape))
        rows = [r.reshape(members, *r.shape[len(shape) :]) for r in simulator.rows(shape)]
        if members > 1 and (_by_moments if simulator.host else _by_trace)(simulator, rows):
            for plate in self.plates[name]:
                why = f"the simulator of '{name}' (vectorized=True) tells rows apart by more than its arguments"
                self._must_unroll(plate, f"{why}: pass it what it knows of each row as an argument")


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


def _by_trace(simulator: Simulator, rows: list[Any]) -> bool:
    """Whether a simulator in JAX has an array of its own with a row for each member."""
    closed = jax.make_jaxpr(simulator.fn)(jax.random.key(0), *rows)
    walk = _Walk()
    inputs = [_Cell(x, True) for x in (jax.random.key(0), *rows)]
    walk(closed.jaxpr, [_Cell(c) for c in closed.consts], inputs)
    arrays = [np.asarray(c) for c in walk.found if not jnp.issubdtype(c.dtype, jax.dtypes.prng_key)]
    return any(c.ndim and len(c) == len(rows[0]) and not _same_along(c, 0) for c in arrays) if rows else False


CALLS = 32
"""Calls of a vectorized simulator on the host, whose rows all have the same arguments, to compare the rows' means."""


def _by_moments(simulator: Simulator, rows: list[Any]) -> bool:
    """Whether rows with the same arguments have different means: none differs by chance by 8 of its standard errors.

    A simulator that takes more than a second a call, or fails, is let pass here.
    """
    same = [np.broadcast_to(np.asarray(r[:1]), r.shape) for r in rows]
    out = []
    for seed in range(CALLS):
        began = time.monotonic()
        try:
            out.append(np.asarray(simulator.fn(np.random.default_rng(seed), *same), float))
        except Exception:  # simulating says so, in the user's words
            return False
        if time.monotonic() - began > 1:
            return False
    found = np.stack(out)
    if not np.isfinite(found).all():
        return False
    error = np.sqrt(found.var(0, ddof=1) / CALLS) + 1e-6 * (1 + np.abs(found).max())
    mean = found.mean(0)
    return bool((np.abs(mean - mean.mean(0)) > 8 * np.sqrt(error**2 + (error**2).mean(0))).any())


def _differs(a: np.ndarray, b: np.ndarray, *, exact: bool = False, loose: bool = False) -> np.ndarray:
    """Which members differ, `(*batch, n)` to `(*batch)`."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = 0.0 if exact else (1e-3 if loose else 1e-5)
        scale = np.maximum(np.abs(a), np.abs(b))
        near = np.abs(a - b) <= size * np.where(np.isfinite(scale), scale, 0.0) + size
    return np.asarray(~(near | (a == b) | (np.isnan(a) & np.isnan(b))).all(-1))


def _fits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _filled(index: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Where it is not known which member is read, what members beside it along some plate read."""
    index = np.where(known, index, -1)
    for axis in range(index.ndim):
        index = np.where(index < 0, index.max(axis, keepdims=True), index)
    return np.maximum(index, 0)


def _same_along(c: np.ndarray, axis: int) -> bool:
    return bool((c == c.take([0], axis)).all())


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=0, equal_nan=True)


def _arrays(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """An array by its name; of a list or a mapping each."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _arrays(str(key), each)
    elif isinstance(value, np.ndarray | jax.Array | list | tuple):
        try:
            x = np.asarray(value)
        except Exception:  # ragged, or traced
            return
        if np.issubdtype(x.dtype, np.number) and x.size > 1:
            yield name, x


__all__ = ["Constant", "Link", "Members", "study"]
