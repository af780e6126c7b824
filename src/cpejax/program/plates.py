"""What tells the members of a plate apart: constants, and index arrays into other plates.

Members of a plate share weights and are pooled, which is right only if they are exchangeable given all that is read of
them. A program may give each member something of its own that no site draws: a row of a design matrix, a measurement
error, a point in time (*constants*), or the number of the group it belongs to (a *link* to another plate). Both are
found in the program's trace, and that nothing else tells members apart is verified with numbers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers

from cpejax.program.distributions import unwrap
from cpejax.program.exchangeable import exchange_differs, rows_differ
from cpejax.program.members import Constant, Link, Members
from cpejax.program.simulator import Program, Simulator
from cpejax.program.tapes import Evaluation, Values, differs, same_along
from cpejax.program.tracing import RawSite, run


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


class _Study(Evaluation):
    """Finds links and constants by changing values and looking which members' distributions follow."""

    def __init__(self, program: Program, sites: Mapping[str, RawSite], sizes: Mapping[str, int]):
        super().__init__(program, sites, sizes)
        self.index: dict[str, list[tuple[str, Link]]] = {name: [] for name in self.tapes}
        self.axes: dict[tuple[str, int], tuple[str | None, ...]] = {}  # (site, constant) -> the plate of each axis
        self.targets: dict[tuple[str, int], str] = {}  # (site, constant) -> the plate whose members it numbers
        self.unlike: dict[str, str] = {}

    def members(self) -> Members:
        for name in self.tapes:
            self._find_links(name)
        for name in self.tapes:
            for number in range(len(self.constants[name])):
                self._align(name, number)
        self._name_slots()
        links = self._nested([link for found in self.index.values() for _, link in found])
        for plate in self.sizes:
            why = None if plate in self.unlike else exchange_differs(self, plate, self.axes, self.targets, self.index)
            if why:
                self._must_unroll(plate, why)
        for name, site in self.sites.items():
            base = unwrap(site.fn)
            why = rows_differ(self, name) if isinstance(base, Simulator) and base.vectorized else None
            for plate in self.plates[name] if why else ():
                self._must_unroll(plate, str(why))
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
        moved = np.zeros(self.batch(name), bool)
        for k, values in enumerate(self.draws[:2]):
            new = jnp.where(changed.reshape(shape), self.draws[k + 1][parent], values[parent])
            after = self.evaluate({**values, parent: new})[name]
            moved |= differs(self.before[k][name], after, exact=True)
        return self.members_only(name, moved)

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
                if axes[axis] is not None or c.shape[axis] != self.sizes[plate] or same_along(c, axis):
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
            moved = self.members_only(name, differs(self.before[trial % 2][name], after))
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
        return self.evaluate(values, {name: constants})

    def _matters(self, name: str, number: int, axis: int) -> bool:
        """Whether what a constant has along an axis changes the distribution at all."""
        c = np.asarray(self.constants[name][number])
        new = np.roll(c, 1, axis)
        return any(
            differs(self.before[k][name], self._replaced(name, number, new, v)[name]).any()
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
            if axes[axis] is None and same_along(c, axis):
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
            args: tuple[Any, ...] = ()
            kwargs: dict[str, Any] = {}
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


def _fits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _filled(index: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Where it is not known which member is read, what its neighbours along some plate read."""
    index = np.where(known, index, -1)
    for axis in range(index.ndim):
        index = np.where(index < 0, index.max(axis, keepdims=True), index)
    return np.maximum(index, 0)


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
