"""The sites of a graph, and the members of sites whose plates are unrolled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cpejax.program.members import Link


@dataclass(frozen=True)
class Site:
    """One random variable of a program, or one member of it where a plate is unrolled.

    - `name`: as in the program; a member of an unrolled plate is named as NumPy indexes it, `beta[0]` or `y[:, 2]`.
    - `shape`: the shape of its value, plates included.
    - `dims`: for each axis of the value the plate it belongs to, or `None` for an axis of the event.
    - `observed`: data (`True`) or parameter.
    - `parents`: the sites its distribution depends on.
    - `support`, `distribution`: as words.
    - `mixed`: pairs (parent, plate) where the site reads other members of a parent in its own plate.
    - `links`: pairs (parent, link) where the site reads, of a parent in another plate, the member that an index names.
    - `mask`: of data, which values `numpyro.handlers.mask` keeps, as the bytes of a boolean array of `shape`; `None` if
        all. `kept` is the array.
    - `origin`, `axes`, `index`: the program's site, its plates, and this member's position in each unrolled plate.
    """

    name: str
    shape: tuple[int, ...] = ()
    dims: tuple[str | None, ...] = ()
    observed: bool = False
    parents: tuple[str, ...] = ()
    support: str = "real"
    distribution: str = ""
    mixed: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, Link], ...] = ()
    origin: str = ""
    axes: tuple[str, ...] = ()
    index: tuple[tuple[str, int], ...] = ()
    mask: bytes | None = None

    @property
    def kept(self) -> np.ndarray | None:
        """Which of its values are not masked, an array of `shape`; `None` if all."""
        return None if self.mask is None else np.frombuffer(self.mask, bool).reshape(self.shape)

    @property
    def plates(self) -> tuple[str, ...]:
        """The plates it is in, outermost first."""
        return tuple(d for d in self.dims if d is not None)

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one member's value."""
        return tuple(n for n, d in zip(self.shape, self.dims, strict=True) if d is None)

    @property
    def size(self) -> int:
        """How many scalars one member has."""
        return math.prod(self.event_shape)


def points(site: Site, parent: Site) -> bool:
    """Whether a site reads this member of a parent, as far as that is known: index arrays name others."""
    at, where = dict(site.index), dict(parent.index)
    links = [o for name, o in site.links if name == parent.origin and o.target in where and set(o.source) <= at.keys()]
    targets = {o.target for o in links}
    return all(
        where[t] in {int(o.index.values[(*(at[p] for p in o.source), 0)]) for o in links if o.target == t}
        for t in targets
    )


def member_of(site: Site, plate: str, i: int) -> Site:
    """Member `i` of a site along `plate`."""
    axis = site.dims.index(plate)
    index = (*site.index, (plate, i))
    # The position in the program's own array: unrolled axes by number, axes that remain by ":".
    at = dict(index)
    words = [str(at[p]) if p in at else ":" for p in site.axes]
    while words and words[-1] == ":":
        words.pop()
    kept = None if site.kept is None else np.take(site.kept, i, axis)
    return replace(
        site,
        name=f"{site.origin}[{', '.join(words)}]",
        mask=None if kept is None or kept.all() else kept.tobytes(),
        shape=site.shape[:axis] + site.shape[axis + 1 :],
        dims=site.dims[:axis] + site.dims[axis + 1 :],
        index=index,
    )


def ground_members(site: Site, plates: Mapping[str, int]) -> Iterable[tuple[str, dict[str, int]]]:
    """All members of a site, by name and position."""
    for at in itertools.product(*(range(plates[p]) for p in site.plates)):
        member = site
        for plate, i in zip(site.plates, at, strict=True):
            member = member_of(member, plate, i)
        yield member.name, dict(zip(site.plates, at, strict=True))
