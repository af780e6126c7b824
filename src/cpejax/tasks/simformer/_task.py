"""What a task has whose given sites may be any: models to fit that can be conditioned on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cpejax.program.model import Model
from cpejax.tasks._task import Task


@dataclass(frozen=True, eq=False, kw_only=True)
class ConditionalTask(Task):
    """A program of which any sites are given, `observed`; all others are to be drawn, data among them.

    **Arguments:** those of `Task`, and

    - `data`: the sites that are data by the model's own account.
    - `parents`: `{site: parents}` in the program, in its order.
    """

    data: Sequence[str] = ()
    parents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def first(self) -> tuple[str, ...]:
        """Given sites all of whose ancestors are given: they follow from nothing that is to be drawn."""
        found: list[str] = []
        for site, parents in self.parents.items():
            if site in self.observed and all(parent in found for parent in parents):
                found.append(site)
        return tuple(found)

    @cached_property
    def joint(self) -> Model:
        """The model as it is, for a method that conditions on any set."""
        return Model(self.program, observed=self.data)

    @cached_property
    def for_set(self) -> Model:
        """The model whose data are the given sites, for `cpe.CPE(first=task.first)`: those sites are parameters."""
        return Model(self.program, observed=[site for site in self.observed if site not in self.first])
