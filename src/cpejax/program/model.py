"""`cpe.Model`: a program, its arguments and the names of its data sites, given once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from numpyro.primitives import Messenger

from cpejax.program.graph import Graph
from cpejax.program.simulator import Program


@dataclass(frozen=True, eq=False)
class Model:
    """A NumPyro program with all that it needs to be run. Every function that takes a model takes a bare program too.

    **Arguments:**

    - `program`: a NumPyro model. Data that it gives with `obs=` are simulated anew.
    - `observed`: the names of the data sites. Without it, the sites with `obs=` and the `cpe.Simulator` sites.
    - `args`, `kwargs`: what the program is called with.

    The graph is read off the program once, when it is first needed.

    >>> import cpejax as cpe, numpyro, numpyro.distributions as dist
    >>> def program(steps):
    ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     with numpyro.plate("time", steps):
    ...         numpyro.sample("y", dist.Normal(mu, 1.0))
    >>> model = cpe.Model(program, observed=["y"], kwargs={"steps": 3})
    >>> model.graph.parameters, model.graph.sites["y"].shape
    (('mu',), (3,))
    """

    program: Program
    observed: Sequence[str] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.program):
            raise TypeError(f"program must be a function (a NumPyro model), found {type(self.program).__name__}.")
        if isinstance(self.args, str) or not isinstance(self.args, Sequence):
            raise TypeError(f"args must be a tuple of what the program is called with, found {self.args!r:.60}.")
        if not isinstance(self.kwargs, Mapping):
            raise TypeError(f"kwargs must be a dict of what the program is called with, found {self.kwargs!r:.60}.")
        inner: Any = self.program
        while isinstance(inner, Messenger) and inner.fn is not None:  # handlers take anything, and pass it on
            inner = inner.fn
        try:
            signature = inspect.signature(inner)
        except (TypeError, ValueError):  # not every callable has a signature
            return
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise TypeError(
                f"The program takes {signature}, but is called with args={tuple(self.args)!r:.80} and "
                f"kwargs={dict(self.kwargs)!r:.80}: {error}. Give cpe.Model the args and kwargs that it takes."
            ) from None

    @cached_property
    def bound(self) -> Program:
        """The program as a function without arguments."""
        return functools.partial(self.program, *self.args, **self.kwargs) if self.args or self.kwargs else self.program

    @cached_property
    def graph(self) -> Graph:
        """The program's graph."""
        return Graph.from_program(self.bound, observed=self.observed)


def as_model(model: Model | Program, observed: Sequence[str] | None = None) -> Model:
    """The model of a bare program, which takes no arguments. `observed`: its data sites, if it does not name them."""
    if not isinstance(model, Model):
        return Model(model, observed)
    if model.observed is not None or observed is None:
        return model
    return Model(model.program, observed, model.args, model.kwargs)
