"""`cpe.Model`: a program, its arguments and the names of its data sites, given once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.primitives import Messenger

from cpejax.program.graph import Graph
from cpejax.program.simulator import Program, Simulator


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

    @classmethod
    def from_prior(
        cls,
        prior: Mapping[str, dist.Distribution],
        simulator: Callable[..., Any] | None = None,
        *,
        observed: str = "x",
        shape: tuple[int, ...] | None = None,
        host: bool = False,
        vectorized: bool = False,
    ) -> Model:
        """A model of independent parameters and a black box, without writing a program.

        **Arguments:**

        - `prior`: a NumPyro distribution for each parameter, `{name: distribution}`. Batch axes count as the
            parameter's own: `dist.Uniform(low, high)` with vectors of 3 is one parameter of shape `(3,)`.
        - `simulator`: `simulator(key, *parameters)`, with the parameters in the order of `prior`; as for
            `cpe.Simulator` a NumPy function `simulator(rng, *parameters)` with `host=True`, and all rows at once with
            `vectorized=True`. `None`: simulations were made elsewhere and are given to `cpe.fit` as arrays.
        - `observed`: the name of the data site.
        - `shape`: of one observation. Left out, the simulator tells: JAX traces it, a simulator on the host is called
            once.

        Parameters whose priors depend on one another, plates, and several data sites need a program.

        >>> prior = {"mean": dist.Normal(0.0, 1.0), "scale": dist.HalfNormal(1.0)}
        >>> def simulator(key, mean, scale):
        ...     return mean + scale * jax.random.normal(key, (5,))
        >>> model = cpe.Model.from_prior(prior, simulator)
        >>> model.graph.parameters, model.graph.sites["x"].shape
        (('mean', 'scale'), (5,))
        """
        sites = _check_prior(prior, observed)
        if simulator is None:
            if shape is None:
                raise ValueError("Without a simulator, from_prior needs the shape of one observation, as shape=(10,).")
            simulator, host = _Elsewhere(), True
        elif shape is None:
            shape = _shape_of(sites, simulator, host, vectorized)
        black_box = functools.partial(Simulator, simulator, event_shape=shape, host=host, vectorized=vectorized)

        def program() -> None:
            numpyro.sample(observed, black_box(*[numpyro.sample(name, of) for name, of in sites.items()]))

        return cls(program, [observed])

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


class NoSimulator(ValueError):
    """Simulations are asked of a model whose data are made elsewhere."""


class _Elsewhere:
    """In place of a simulator: the data of the model are made elsewhere."""

    __name__ = "made elsewhere"

    def __call__(self, *_: Any) -> Any:
        raise NoSimulator("there is no simulator")


def check_simulators(simulators: Sequence[Simulator]) -> None:
    """An error where a site has no simulator."""
    for simulator in simulators:
        if isinstance(simulator.fn, _Elsewhere):
            raise NoSimulator(
                f"Site '{simulator.site}' has no simulator: cpe.Model.from_prior was called without one. Give cpe.fit, "
                "and cpe.check, the simulations that were made elsewhere, {site: (n, *shape)}."
            )


def _check_prior(prior: Mapping[str, dist.Distribution], observed: str) -> dict[str, dist.Distribution]:
    """The prior of each parameter, with its batch axes as its own."""
    if not isinstance(prior, Mapping) or not prior:
        raise TypeError(f"prior must be a dict of NumPyro distributions, {{name: distribution}}; found {prior!r:.60}.")
    for name, of in prior.items():
        if not isinstance(of, dist.Distribution):
            raise TypeError(f"prior['{name}'] must be a NumPyro distribution, found {type(of).__name__}.")
    if observed in prior:
        raise ValueError(f"'{observed}' is a parameter, and the name of the data: give the data another (observed=).")
    return {name: of.to_event(len(of.batch_shape)) for name, of in prior.items()}


def _shape_of(
    prior: Mapping[str, dist.Distribution], simulator: Callable[..., Any], host: bool, vectorized: bool
) -> tuple[int, ...]:
    """The shape of one observation, by a trace of the simulator or, on the host, by a call."""
    rows = (1,) if vectorized else ()
    keys = jax.random.split(jax.random.key(0), len(prior))
    drawn = [of.sample(key, rows) for key, of in zip(keys, prior.values(), strict=True)]
    if host:
        out = np.shape(simulator(np.random.default_rng(0), *(np.asarray(x, np.float64) for x in drawn)))
    else:
        out = np.shape(jax.eval_shape(simulator, jax.random.key(0), *drawn))
    if vectorized and out[:1] != (1,):
        raise ValueError(
            f"The simulator returned shape {out} for one row at once (vectorized=True): expected (1, ...)."
        )
    return out[len(rows) :]
