"""`cpe.Simulator`: a function of one's own as a NumPyro distribution without a density."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions import constraints

Program = Callable[..., Any]
Feed = Callable[["Simulator", Array, Sequence[Array]], tuple[Array, Array]]
FEED: ContextVar[Feed | None] = ContextVar("feed", default=None)
"""Where it is set, `feed(simulator, seeds, rows)` gives the data of simulators on the host: they are not called."""


class Simulator(dist.Distribution):
    """A data site whose distribution can be sampled but not evaluated.

    **Arguments:**

    - `fn`: the simulator. `fn(key, *args)` in JAX; with `host=True` a NumPy function `fn(rng, *args)` that gets a
        `numpy.random.Generator`. It returns one row, an array of shape `event_shape`.
    - `*args`: what the simulator reads, usually parameters. Inside plates each argument is split into rows: its
        trailing axes that do not belong to the plates are the row. `beta` of shape `(8, 2)` in a plate of 8 becomes 8
        rows of shape `(2,)`, and a vector of shape `(5,)` goes whole to each of the 8.
    - `event_shape`: the shape of one row of data.
    - `vectorized`: `fn` takes all rows at once: each argument has a leading axis over rows, and so has the result.
        Rows must not influence one another. On the host all rows of a call share one `rng`.
    - `host`: `fn` is NumPy, or anything else that JAX cannot trace; it is called through `jax.pure_callback`. It
        gets float64; what it returns is copied, and kept in float64 by `cpe.simulate`; masked entries of a masked array
        become NaN.
    - `event_dims`: the number of row axes of each argument, for the case where the rule above is ambiguous (a vector of
        8 values that every member of a plate of 8 should see whole has `event_dims` 1).

    >>> def simulator(key, rate):
    ...     return jax.random.poisson(key, rate, (3,)).astype(float)
    >>> def program():
    ...     rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     numpyro.sample("counts", cpe.Simulator(simulator, rate, event_shape=(3,)))
    >>> cpe.Model(program, observed=["counts"]).graph.parents["counts"]
    ('rate',)
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("args", "kept")
    pytree_aux_fields = ("fn", "vectorized", "host", "event_dims", "site")
    site: str | None = None  # where it stands in a program, for messages
    kept: Any = None  # the mask, if there is one
    failure: tuple[BaseException, str] | None = None  # what a call on the host raised, which JAX buries in a message
    on_error: str = "raise"  # or "nan": what an exception of a call on the host becomes
    failed: tuple[int, str] = (0, "")  # how many became NaN, and the first of them in words
    low: Any = None  # what float32 does not hold of the last draw on the host
    # On the class: since when a call on the host runs, and how to say which.
    under_way: tuple[float, Callable[[], str]] | None = None

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        event_shape: tuple[int, ...] = (),
        vectorized: bool = False,
        host: bool = False,
        event_dims: tuple[int, ...] | None = None,
    ):
        if not callable(fn):
            raise TypeError(f"Simulator needs a function fn(key, *args) first, but found {type(fn).__name__}.")
        if event_dims is not None and len(event_dims) != len(args):
            raise ValueError(f"Simulator has {len(args)} arguments, but event_dims has {len(event_dims)} entries.")
        self.fn = fn
        self.args = tuple(_array(a, i) for i, a in enumerate(args))
        self.vectorized = vectorized
        self.host = host
        self.event_dims = None if event_dims is None else tuple(event_dims)
        super().__init__(batch_shape=(), event_shape=tuple(event_shape), validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Sequence[int]) -> Simulator:
        new = copy.copy(self)
        new._batch_shape = tuple(batch_shape)
        return new

    def mask(self, mask: Any) -> Simulator:
        """The same simulator with a mask; it stays a `Simulator`, so that plates around it still split its rows."""
        new = copy.copy(self)
        new.kept = mask if self.kept is None else self.kept & mask
        return new

    def rows(self, shape: tuple[int, ...] | None = None) -> tuple[Array, ...]:
        """The arguments, one row for each member of the plates (`shape`, if not given): arrays `(*shape, *row)`."""
        shape = self.batch_shape if shape is None else shape
        out = []
        for i, arg in enumerate(self.args):
            if self.event_dims is None:
                event = next(e for e in range(arg.ndim + 1) if _broadcasts(arg.shape[: arg.ndim - e], shape))
            else:
                event = self.event_dims[i]
                if event > arg.ndim or not _broadcasts(arg.shape[: arg.ndim - event], shape):
                    raise ValueError(
                        f"{self.label}: argument {i} has shape {arg.shape} and event_dims {event}, "
                        f"but the axes before its last {event} must fit the plates, which have shape {shape}."
                    )
            row = arg.shape[arg.ndim - event :]
            lead = arg.reshape((1,) * (len(shape) + event - arg.ndim) + arg.shape)
            out.append(jnp.broadcast_to(lead, shape + row))
        return tuple(out)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = tuple(sample_shape) + self.batch_shape
        n, plates = math.prod(shape), len(self.batch_shape)
        rows = [jnp.broadcast_to(r, shape + r.shape[plates:]).reshape((n, *r.shape[plates:])) for r in self.rows()]
        if self.host:
            out, low = self._call_host(jax.random.split(key, n), rows)
            self.low = low.reshape(shape + self.event_shape)
        elif self.vectorized:
            out = self._checked(self.fn(key, *rows), n)
        else:
            out = jax.vmap(lambda k, *row: self._checked(self.fn(k, *row)))(jax.random.split(key, n), *rows)
        return out.reshape(shape + self.event_shape)

    def _call_host(self, keys: Array, rows: list[Array]) -> tuple[Array, Array]:
        """What the simulator returns, and what is left of it where JAX's float has too few digits."""
        seeds = jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys
        feed = FEED.get()
        if feed is not None:
            return feed(self, seeds, rows)
        dtype, n = jnp.result_type(float), len(seeds)
        arguments = (seeds, *rows)
        row_ndims = [a.ndim - 1 for a in arguments]

        def call(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
            # Under vmap every argument comes with further leading axes; to the simulator they are only more rows.
            lead = np.shape(arguments[0])[:-1]
            seeds, *flat = (
                np.asarray(a).reshape((-1, *np.shape(a)[np.ndim(a) - e :]))
                for a, e in zip(arguments, row_ndims, strict=True)
            )
            # NumPy would compute 1e9 + a in float32, and lose it, if this were an array of float32.
            flat = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in flat]
            if self.vectorized:
                out = self._called_at_once(seeds, flat)
            else:
                out = np.stack([self._called(s, row) for s, *row in zip(seeds, *flat, strict=True)])
            return split(out.reshape(lead + self.event_shape))

        result = jax.ShapeDtypeStruct((n, *self.event_shape), dtype)
        high, low = jax.pure_callback(call, (result, result), *arguments, vmap_method="broadcast_all")
        return high, low

    def _called_at_once(self, seeds: np.ndarray, arguments: list[np.ndarray]) -> np.ndarray:
        """All rows in one call; if that fails and failures are NaN, each row alone, to find those that fail."""
        if self.on_error == "raise" or len(seeds) == 1:
            return self._called(seeds[0], arguments, len(seeds))
        before = self.failed
        out = self._called(seeds[0], arguments, len(seeds))
        if self.failed == before:
            return out
        self.failed = before
        return np.concatenate([self._called(s, [a[i : i + 1] for a in arguments], 1) for i, s in enumerate(seeds)])

    def _called(self, seed: np.ndarray, row: Sequence[Any], rows: int | None = None) -> np.ndarray:
        def words() -> str:
            at = ", ".join(np.array2string(np.asarray(a), threshold=8) for a in row)
            return f"{self.label}{'' if rows else f', called with ({at})'}"

        Simulator.under_way = (time.monotonic(), words)
        try:
            try:
                out = self.fn(np.random.default_rng(seed), *row)
            except Exception as error:
                if self.on_error == "raise":
                    raise
                count, first = self.failed
                self.failed = (count + 1, first or f"{words()} raised {type(error).__name__}: {error}")
                return np.full(self.event_shape if rows is None else (rows, *self.event_shape), np.nan)
            return self._checked(out, rows)
        except KeyboardInterrupt as error:
            self.failure = (error, "interrupted")
            raise
        except Exception as error:
            trace = error.__traceback__
            error.__traceback__ = trace.tb_next if trace is not None and trace.tb_next is not None else trace
            self.failure = (error, f"{words()} raised {type(error).__name__}: {error}")
            # Another exception goes through JAX, so that the traceback of this one stays the simulator's own.
            raise RuntimeError(self.failure[1]) from error
        finally:
            Simulator.under_way = None

    def _checked(self, out: Any, rows: int | None = None) -> Any:
        """What `fn` returned, as floats, if it has the shape of one row of data or of that many `rows`."""
        expected = self.event_shape if rows is None else (rows, *self.event_shape)
        if np.shape(out) != expected:
            many = "" if rows is None else f" for {rows} rows at once (vectorized=True)"
            raise ValueError(
                f"{self.label} returned shape {np.shape(out)}{many}, expected {expected}. Simulator(..., event_shape="
                f"{self.event_shape}) says that one row of data has shape {self.event_shape}: fix one or the other."
            )
        if np.iscomplexobj(out):
            raise ValueError(
                f"{self.label} returned complex values, expected real ones. Return what is observed, for example the "
                "real and the imaginary part as two values."
            )
        if not self.host:
            return jnp.asarray(out, float)
        if np.ma.isMaskedArray(out):
            return np.ma.filled(np.ma.asarray(out, float), np.nan)
        return np.array(out, float)  # a copy: the simulator may use its array again

    @property
    def label(self) -> str:
        """The site and the function, for messages."""
        name = f"simulator '{getattr(self.fn, '__name__', type(self.fn).__name__)}'"
        return f"Site '{self.site}': {name}" if self.site else f"The {name}"

    def log_prob(self, value: Any, intermediates: Any = None) -> Array:
        raise NotImplementedError(
            "A cpe.Simulator has no density: it can only be sampled. Use cpe.fit, which needs none; "
            "to use MCMC, write the site with a NumPyro distribution instead."
        )


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values in float64 as JAX's float, and what is left of them where that has too few digits."""
    dtype = jnp.result_type(float)
    with np.errstate(over="ignore", invalid="ignore"):
        high = x.astype(dtype)
        return high, np.where(np.isfinite(high), x - high, 0.0).astype(dtype)


def _array(arg: Any, i: int) -> Array:
    try:
        return jnp.asarray(arg)
    except TypeError:
        raise TypeError(
            f"Simulator argument {i} is a {type(arg).__name__}, expected a number or an array. Pass parameters as "
            "arrays, one argument each; settings go into the function itself (a closure or functools.partial)."
        ) from None


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))
