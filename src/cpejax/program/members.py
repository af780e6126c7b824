"""What tells the members of a plate apart: constants, and links to members of other plates."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


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
