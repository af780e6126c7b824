"""What a check is, and the list of all of them.

A check is a subclass of `Diagnostic` in a file of its own, decorated with `register`. Files of this package are found
by themselves; a check in a user's own file counts from its import on.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float

from cpejax.diagnostics.ranks import Ranks, rank
from cpejax.diagnostics.study import Group, Study


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: whether it was passed, and a sentence that says so."""

    check: str
    ok: bool
    sentence: str


@dataclass(frozen=True)
class Share:
    """A share of the level: `weight`, of the sum of the weights of all shares that registered checks have.

    The tests of all checks with the same share divide it by Holm's procedure.
    """

    name: str
    weight: float


SIMULATED = Share("simulated observations", 2.0)
"""The share of checks that need no observation: calibration, use of the data, densities."""


@dataclass(frozen=True, eq=False)
class Panel:
    """Ranks 0..`draws` that `cpe.plot.ranks` shows, of a check; `bad`: whether they are marked as not uniform."""

    check: str
    ranks: Ranks
    draws: int
    bad: bool


class Diagnostic(ABC):
    """One check: what it computes, its tests, its sentence, its figure and its share of the level.

    `cpe.check` makes one of each kind. It calls `read` with each group of observations, then `tests` of all checks; it
    divides the level, which sets `p` and `bad`, and calls the rest.

    - `name`: of the finding. `order`: where among the findings, by numbers; those of the package have 10 to 80.
    - `share`: of the level.
    - `figure`: a function of the `Check`, of the module `cpejax.plot.style`, and of options, to a Matplotlib figure,
        for `cpe.plot.finding`. Matplotlib is imported inside.
    """

    name: ClassVar[str]
    order: ClassVar[float] = 100.0
    share: ClassVar[Share] = SIMULATED
    figure: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, study: Study):
        self.study = study
        self.p: dict[str, float] = {}
        self.bad: dict[str, bool] = {}
        self._rng = study.generator(self.name)
        self._ranks: dict[str, list[Ranks]] = {}

    def quantities(self, group: Group) -> Mapping[str, Float[np.ndarray, "m _"]]:
        """Scalars by name, of the true parameters and then of draws, whose `ranks` are uniform if all is right."""
        del group
        return {}

    def read(self, group: Group) -> None:
        """Rank the quantities of a group of observations."""
        for name, x in self.quantities(group).items():
            self._ranks.setdefault(name, []).append(rank(x, self._rng))

    def ranks(self, name: str) -> Ranks:
        """Ranks of a quantity, for the observations that have one."""
        return np.concatenate(self._ranks.get(name, [np.zeros(0, int)]))

    @abstractmethod
    def tests(self) -> Mapping[str, float]:
        """The p-value of each test, by name; none where nothing can be tested."""

    @property
    def ok(self) -> bool:
        """Whether the check is passed."""
        return not any(self.bad.values())

    @abstractmethod
    def sentence(self, others: Mapping[str, Diagnostic]) -> str | None:
        """What was found, in a sentence; `None` where there is no finding. `others`: all checks, by name."""

    def values(self, finding: Finding | None) -> Mapping[str, Any]:
        """What is kept, by the names of attributes of `Check`."""
        del finding
        return {name: self.ranks(name) for name in self._ranks}

    def columns(self) -> Mapping[str, Sequence[Any] | np.ndarray]:
        """Columns of `Check.calibration`, by name: a value for each parameter."""
        return {}

    def panels(self) -> Mapping[str, Panel]:
        """Ranks to be shown by `cpe.plot.ranks` after those of the parameters, by title."""
        return {}

    def panel(self, ranks: Ranks, draws: int) -> Panel:
        """A panel of this check."""
        return Panel(self.name, ranks, draws, not self.ok)


Kind = TypeVar("Kind", bound=type[Diagnostic])
_KINDS: dict[str, type[Diagnostic]] = {}


def register(kind: Kind) -> Kind:
    """Let `cpe.check` run a check. The name must be new, unless the same class is defined again, as in a notebook."""
    there = _KINDS.get(kind.name, kind)
    if (there.__module__, there.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(
            f"There is a check '{kind.name}' already, {there.__module__}.{there.__qualname__}: choose another name."
        )
    _KINDS[kind.name] = kind
    return kind


def registered() -> dict[str, type[Diagnostic]]:
    """All checks by name, in the order of their findings."""
    package = import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{__package__}.{module.name}")
    return {kind.name: kind for kind in sorted(_KINDS.values(), key=lambda kind: (kind.order, kind.name))}
