"""Reading a NumPyro program: its sites, and what each site's distribution depends on."""

from __future__ import annotations

import copy
import itertools
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from cpejax.program.quantiles import drawable, unwrap

Program = Callable[..., Any]


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
        8 numbers that every member of a plate of 8 should see whole has `event_dims` 1).

    ??? example

        ```python
        import cpejax as cpe, jax, numpyro, numpyro.distributions as dist

        def simulator(key, rate):
            return jax.random.poisson(key, rate, (3,)).astype(float)

        def program():
            rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
            numpyro.sample("counts", cpe.Simulator(simulator, rate, event_shape=(3,)))
        ```
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
                        f"{self._name}: argument {i} has shape {arg.shape} and event_dims {event}, "
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
            out = out.reshape(lead + self.event_shape)
            with np.errstate(over="ignore", invalid="ignore"):
                high = out.astype(dtype)
                low = np.where(np.isfinite(high), out - high, 0.0).astype(dtype)
            return high, low

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
            return f"{self._name}{'' if rows else f', called with ({at})'}"

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
                f"{self._name} returned shape {np.shape(out)}{many}, expected {expected}. Simulator(..., event_shape="
                f"{self.event_shape}) says that one row of data has shape {self.event_shape}: fix one or the other."
            )
        if np.iscomplexobj(out):
            raise ValueError(
                f"{self._name} returned complex values, expected real ones. Return what is observed, for example the "
                "real and the imaginary part as two values."
            )
        if not self.host:
            return jnp.asarray(out, float)
        if np.ma.isMaskedArray(out):
            return np.ma.filled(np.ma.asarray(out, float), np.nan)
        return np.array(out, float)  # a copy: the simulator may use its array again

    @property
    def _name(self) -> str:
        name = f"simulator '{getattr(self.fn, '__name__', type(self.fn).__name__)}'"
        return f"Site '{self.site}': {name}" if self.site else f"The {name}"

    def log_prob(self, value: Any, intermediates: Any = None) -> Array:
        raise NotImplementedError(
            "A cpe.Simulator has no density: it can only be sampled. Use cpe.fit, which needs none; "
            "to use MCMC, write the site with a NumPyro distribution instead."
        )


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


class RawSite(NamedTuple):
    """What a trace tells of one `sample` site, before the graph is made."""

    fn: dist.Distribution
    shape: tuple[int, ...]
    dims: tuple[str | None, ...]  # the plate that each axis of the value belongs to, if any
    has_obs: bool
    parents: frozenset[str] = frozenset()
    mixed: tuple[tuple[str, str], ...] = ()  # (parent, plate): reads other members' values of that parent
    mask: np.ndarray | None = None  # of its value's shape: what numpyro.handlers.mask keeps, where it masks anything


Visit = Callable[[str, dict[str, Any]], None]


class Run(Messenger):
    """Runs a program with the values of its sample sites given, and keeps each site's distribution.

    Sites in `values` get that value, also those with `obs=`; the others are drawn. `visit(name, message)` is
    called at each sample site, after its value is set; `deterministic(name, message)` at each deterministic one.
    Values that are masked are 0, drawn or given: nothing can depend on them.
    """

    def __init__(
        self,
        program: Program,
        values: Mapping[str, Any],
        visit: Visit | None = None,
        deterministic: Visit | None = None,
    ):
        super().__init__(program)
        self.values = values
        self.visit = visit
        self.deterministic = deterministic

    def __enter__(self) -> Run:
        self.level = get_opaque_trace_state()
        return super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "control_flow":
            raise ValueError(_HIDDEN.format("uses numpyro.contrib.control_flow (scan or cond)"))
        if msg["type"] == "prng_key" and _asked_by_block():
            raise ValueError(
                "numpyro.handlers.block hides a sample site of the program, so what depends on it cannot be seen. "
                "Remove the block (the draws of a site may be ignored), or draw it inside a cpe.Simulator."
            )
        if msg["type"] == "param":
            raise ValueError(
                f"Site '{msg['name']}' is a numpyro.param, which has no prior. "
                "Make it a numpyro.sample site, or a constant."
            )
        if msg["type"] == "deterministic" and get_opaque_trace_state() != self.level:
            raise ValueError(_HIDDEN.format(f"has the deterministic site '{msg['name']}' {_INSIDE}"))
        if msg["type"] == "plate" and (msg["args"][1] or msg["args"][0]) < msg["args"][0]:
            raise ValueError(
                f"Plate '{msg['name']}' subsamples {msg['args'][1]} of {msg['args'][0]} members. "
                "Simulations need them all: remove subsample_size."
            )
        if msg["type"] != "sample":
            return
        if get_opaque_trace_state() != self.level:
            raise ValueError(_HIDDEN.format(f"draws site '{msg['name']}' {_INSIDE}"))
        _check_site(msg)
        name, fn = msg["name"], drawable(msg["fn"])
        msg["fn"] = fn
        if isinstance(fn, Simulator):
            fn.site = name
        if msg["kwargs"].get("sample_shape"):  # outside plates; inside, the plate has done the same
            msg["fn"] = fn.expand(msg["kwargs"]["sample_shape"] + fn.batch_shape)
            msg["kwargs"]["sample_shape"] = ()
        if name in self.values:
            msg["value"] = self.values[name]
        elif msg["is_observed"]:
            msg["value"], msg["is_observed"] = None, False
            msg["infer"] = {**msg["infer"], "was_observed": True}

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            if is_masked(msg["fn"]):
                msg["value"] = jnp.where(mask_of(msg["fn"]), msg["value"], jnp.zeros_like(msg["value"]))
            if self.visit is not None:
                self.visit(msg["name"], msg)
        if msg["type"] == "deterministic" and self.deterministic is not None:
            self.deterministic(msg["name"], msg)


class Centred(Messenger):
    """A program some of whose data sites are given less an offset, which float32 could not hold beside their digits.

    The program itself reads the whole values.
    """

    def __init__(self, program: Program, offset: Mapping[str, np.ndarray]):
        super().__init__(program)
        self.offset = offset

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self.offset:
            msg["value"] = msg["value"] + jnp.asarray(self.offset[msg["name"]], jnp.result_type(float))


def _asked_by_block() -> bool:
    """Whether a key is asked for by `numpyro.handlers.block`, which does so for a site that it hides."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not handlers.block.process_message.__code__:
        frame = frame.f_back
    return frame.f_code is handlers.block.process_message.__code__


def _check_site(msg: dict[str, Any]) -> None:
    name, base = msg["name"], unwrap(msg["fn"])
    if isinstance(base, dist.Unit):
        raise ValueError(
            f"Site '{name}' is a numpyro.factor, which changes the density but cannot be simulated. "
            "Express it as a prior or as a data site."
        )
    if isinstance(base, dist.ImproperUniform):
        raise ValueError(
            f"Site '{name}' has an improper prior ({type(base).__name__}), which cannot be simulated. "
            "Give it a proper one, for example a wide Normal or a Uniform with bounds."
        )
    if msg["scale"] is not None:
        raise ValueError(
            f"Site '{name}' is weighted by numpyro.handlers.scale, which changes the density but cannot be simulated. "
            "Remove it."
        )
    if msg["kwargs"].get("rng_key") is not None:
        raise ValueError(
            f"Site '{name}' has a random key of its own (numpyro.handlers.seed around the program, or rng_key=), so "
            "every simulation would draw the same value. Remove it: cpe.simulate gives the keys."
        )
    if msg["value"] is not None and not msg["is_observed"]:
        raise ValueError(
            f"Site '{name}' is given a value by numpyro.handlers.substitute or replay, so nothing is drawn there. To "
            "fix a parameter, write the value in its place; to say what the data are, use obs= or "
            "numpyro.handlers.condition."
        )


def is_masked(fn: dist.Distribution) -> bool:
    """Whether `numpyro.handlers.mask`, or a distribution's `mask`, may hide some values of a site."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        if isinstance(fn, dist.MaskedDistribution) and fn._mask is not True:
            return True
        fn = fn.base_dist
    return isinstance(fn, Simulator) and fn.kept is not None and fn.kept is not True


def mask_of(fn: dist.Distribution) -> Array:
    """Which values of a draw are not masked, `(*batch_shape, *event_shape)`."""
    shape = fn.batch_shape + fn.event_shape
    kept = jnp.ones((), bool)
    if isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        kept = mask_of(fn.base_dist)
    own = fn._mask if isinstance(fn, dist.MaskedDistribution) else fn.kept if isinstance(fn, Simulator) else None
    if own is not None:
        whole = jnp.broadcast_to(jnp.asarray(own, bool), fn.batch_shape)
        kept = kept & whole.reshape(whole.shape + (1,) * len(fn.event_shape))
    return jnp.broadcast_to(kept, shape)


_ONE_AT_A_TIME = threading.RLock()
"""NumPyro's handlers are on one stack for all threads: of two programs that run at once each would meet the other's."""


def run(
    program: Program,
    values: Mapping[str, Any],
    visit: Visit | None = None,
    key: Array | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    deterministic: Visit | None = None,
) -> Any:
    """Run `program` once, with `values` for the sites named there; see `Run`."""
    key = jax.random.key(0) if key is None else key
    with _ONE_AT_A_TIME, handlers.seed(rng_seed=key):
        return Run(program, values, visit, deterministic)(*args, **(kwargs or {}))


def read(program: Program, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, RawSite]:
    """The sample sites of a program, in its order, with their dependencies.

    No simulator is called: the program is only traced by JAX. Where members of a plate meet in a common plate again, it
    is also run a few times on drawn parameters, without its simulators (`_mixed`).
    """
    sites: dict[str, RawSite] = {}
    try:
        values = _trace(program, sites, args, kwargs)
        parents = _parents(program, values, args, kwargs)
        masks = _masks(program, sites, values, args, kwargs)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = _where(frames, list(sites))
        explained = _explained(error, frames, where)
        if explained is not None:
            raise explained from error
        if frames[-1].filename != __file__:
            error.add_note(f"This happened in the program, {where}.")
        raise
    for name, site in sites.items():
        sites[name] = site._replace(parents=parents[name] - {name}, mask=masks.get(name))
    mixed = _mixed(program, sites, args, kwargs)
    return {name: site._replace(mixed=mixed.get(name, ())) for name, site in sites.items()}


def _masks(
    program: Program,
    sites: Mapping[str, RawSite],
    values: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
) -> dict[str, np.ndarray]:
    """The masks of the sites that have one; they must be constants, which provenance tells."""
    masked = {name for name, site in sites.items() if is_masked(site.fn)}
    if not masked:
        return {}

    def collect(**values: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}

        def visit(name: str, msg: dict[str, Any]) -> None:
            if name in masked:
                out[name] = mask_of(msg["fn"])

        run(program, values, visit, args=args, kwargs=kwargs)
        return out

    for name, depends in eval_provenance(collect, **values).items():
        if depends:
            raise ValueError(
                f"Site '{name}' has a mask that depends on {', '.join(sorted(depends))}, so which values are data "
                "differs from simulation to simulation. A mask must be a constant; or simulate the data as they are "
                "recorded, gaps and all, in a cpe.Simulator."
            )
    found = jax.jit(collect)(**{name: jnp.zeros(x.shape, x.dtype) for name, x in values.items()})
    return {name: np.asarray(mask) for name, mask in found.items() if not np.all(mask)}


class Deterministic(NamedTuple):
    """A `numpyro.deterministic` site: its shape, and the plate that each axis belongs to, if any."""

    shape: tuple[int, ...]
    dims: tuple[str | None, ...]


def read_deterministics(
    program: Program,
    sites: Mapping[str, RawSite],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Deterministic]:
    """The deterministic sites of a program whose sample sites are known, in its order."""
    out: dict[str, Deterministic] = {}

    def visit(name: str, msg: dict[str, Any]) -> None:
        if name in out or name in sites:
            raise ValueError(
                f"Two sites are called '{name}', one of them deterministic. Every site needs its own name."
            )
        shape = tuple(np.shape(msg["value"]))
        # It does not say which of its axes are its event's: an axis of another size is not the plate's.
        frames = {len(shape) + f.dim: f for f in msg["cond_indep_stack"]}
        dims = tuple(frames[i].name if i in frames and frames[i].size == n else None for i, n in enumerate(shape))
        out[name] = Deterministic(shape, dims)

    jax.eval_shape(lambda: (run(program, {}, None, None, args, kwargs, visit), None)[1])
    return out


def _trace(
    program: Program, sites: dict[str, RawSite], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Fill `sites`, in place so that they are known if the program fails later; return the shapes of their values."""
    sizes: dict[str, int] = {}

    def shapes() -> dict[str, Any]:
        values: dict[str, Any] = {}

        def visit(name: str, msg: dict[str, Any]) -> None:
            if name in sites:
                raise ValueError(
                    f"Two sites are called '{name}'. Every site needs its own name: "
                    f'in a loop, number them, numpyro.sample(f"{name}_{{i}}", ...).'
                )
            for plate in msg["cond_indep_stack"]:
                if sizes.setdefault(plate.name, plate.size) != plate.size:
                    raise ValueError(
                        f"Plate '{plate.name}' has size {plate.size} at site '{name}', "
                        f"but had size {sizes[plate.name]} before. Plates of different sizes need different names."
                    )
            sites[name] = _raw(msg)
            values[name] = msg["value"]

        run(program, {}, visit, args=args, kwargs=kwargs)
        return values

    return jax.eval_shape(shapes)


def _raw(msg: dict[str, Any]) -> RawSite:
    fn, shape = msg["fn"], tuple(np.shape(msg["value"]))
    batch = len(shape) - len(fn.event_shape)
    frames = {batch + frame.dim: frame.name for frame in msg["cond_indep_stack"]}
    dims = tuple(frames.get(axis) if axis < batch else None for axis in range(len(shape)))
    return RawSite(fn, shape, dims, bool(msg["is_observed"] or msg["infer"].get("was_observed")))


def _parents(
    program: Program, values: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> dict[str, frozenset[str]]:
    """The sites that each site's distribution depends on, by provenance."""

    def influences(**values: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}

        def visit(name: str, msg: dict[str, Any]) -> None:
            fn = msg["fn"]
            # A draw depends on all that matters, also where a distribution of the user's own hides a parameter from
            # JAX. What a simulator takes but does not use, it does not depend on.
            draw = fn(rng_key=jax.random.key(0))
            leaves = [] if isinstance(unwrap(fn), Simulator) else jax.tree.leaves(fn)
            out[name] = [draw, *(jnp.asarray(leaf) for leaf in leaves)]

        run(program, values, visit, args=args, kwargs=kwargs)
        return out

    found = eval_provenance(influences, **values)
    return {name: frozenset().union(*sets) for name, sets in found.items()}


def _mixed(
    program: Program, sites: dict[str, RawSite], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> dict[str, tuple[tuple[str, str], ...]]:
    """For each site the (parent, plate) pairs where it reads other members of the parent than its own.

    Provenance knows sites, not members, so this is probed with numbers: change some members of the parents, and see
    whether the distributions of the other members' children change. The members that change are those whose number has
    a certain bit set (or not set), so every pair of members is told apart by some probe. They change to the largest and
    to the smallest value drawn, which also moves maxima, minima and ranks. What no such change can move is missed.
    """
    shared: dict[str, dict[str, list[str]]] = {}  # plate -> child -> parents, all of them in the plate
    for name, site in sites.items():
        for parent in sorted(site.parents):
            for plate in set(site.dims) & set(sites[parent].dims) - {None}:
                shared.setdefault(str(plate), {}).setdefault(name, []).append(parent)
    if not shared:
        return {}
    probe = _Probe(program, sites, {child for pairs in shared.values() for child in pairs}, args, kwargs)
    found: dict[str, set[tuple[str, str]]] = {}
    for plate, pairs in shared.items():
        parents = sorted({p for ps in pairs.values() for p in ps})
        number = np.arange(sites[parents[0]].shape[sites[parents[0]].dims.index(plate)])
        bits = [(number >> bit & 1).astype(bool) for bit in range((len(number) - 1).bit_length())]
        for changed, to in itertools.product([*bits, *(~b for b in bits)], (0, 1)):
            if probe(plate, list(pairs), parents, changed, to):
                for parent in parents:  # whose doing was it?
                    for child in probe(plate, list(pairs), [parent], changed, to):
                        found.setdefault(child, set()).add((parent, plate))
    return {child: tuple(sorted(pairs)) for child, pairs in found.items()}


class _Probe:
    """Runs the program on drawn values, some of them changed, and tells whose distribution changes."""

    def __init__(
        self,
        program: Program,
        sites: dict[str, RawSite],
        children: set[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ):
        # Simulators are not called: numbers in (0, 1), good for a scale or a probability, stand in for their data.
        rng = np.random.default_rng(0)
        simulated = [name for name, site in sites.items() if isinstance(unwrap(site.fn), Simulator)]
        stand_ins = {name: jnp.asarray(rng.uniform(size=sites[name].shape), float) for name in simulated}

        self.sites = sites
        self.values: dict[str, Array] = {}
        with numpyro.validation_enabled(False):  # a stand-in may leave the support of an argument
            run(program, stand_ins, lambda name, msg: self.values.update({name: msg["value"]}), None, args, kwargs)

        @jax.jit  # many probes then cost little, and NumPyro cannot validate arguments
        def features(values: dict[str, Array]) -> dict[str, Array]:
            out: dict[str, Array] = {}

            def visit(name: str, msg: dict[str, Any]) -> None:
                if name in children:
                    out[name] = distribution_features(msg["fn"], msg["value"])

            run(program, values, visit, args=args, kwargs=kwargs)
            return out

        self.features = features
        self.before = features(self.values)

    def __call__(
        self, plate: str, children: Sequence[str], parents: Sequence[str], changed: np.ndarray, to: int
    ) -> list[str]:
        """The children whose other members differ once the `changed` members of the parents are moved."""
        new = {p: _moved(self.values[p], self.sites[p], plate, changed, to) for p in parents}
        after = self.features({**self.values, **new})
        return [name for name in children if not self._same(name, plate, after[name], ~changed)]

    def _same(self, name: str, plate: str, after: Array, members: np.ndarray) -> bool:
        axis = self.sites[name].dims.index(plate)
        old, new = (np.compress(members, np.asarray(f), axis) for f in (self.before[name], after))
        return np.array_equal(old, new, equal_nan=True)


def _moved(value: Array, site: RawSite, plate: str, changed: np.ndarray, to: int) -> Array:
    """`value` with the `changed` members of `plate` set to the smallest (`to` 0) or the largest (1) member drawn."""
    axis = site.dims.index(plate)
    old = np.asarray(value)
    if base_constraint(site.fn).event_dim == 0:
        new = (old.min, old.max)[to](axis, keepdims=True)
    else:  # a whole member, because parts of several (rows of a simplex) may not make one
        size = np.moveaxis(old, axis, 0).reshape(old.shape[axis], -1).sum(1)
        new = np.take(old, [(size.argmin, size.argmax)[to]()], axis)
    if np.array_equal(old, np.broadcast_to(new, old.shape)):  # discrete draws may all be the same
        new = new + 1
    where = changed.reshape([-1 if i == axis else 1 for i in range(old.ndim)])
    return jnp.where(where, jnp.asarray(new), value)


def base_constraint(fn: dist.Distribution) -> constraints.Constraint:
    """The support of `fn`, without the event axes that `to_event` added."""
    support = fn.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def distribution_features(fn: dist.Distribution, value: Array) -> Array:
    """Numbers that change with the distribution's parameters, shape `(*batch_shape, n)`."""
    base, shape = unwrap(fn), fn.batch_shape
    if isinstance(base, Simulator):
        rows = [r.reshape((*shape, -1)).astype(float) for r in base.rows()]
        return jnp.concatenate([jnp.zeros((*shape, 1)), *rows], axis=-1)
    try:
        return jnp.broadcast_to(unmasked(fn).log_prob(value), shape)[..., None]
    except NotImplementedError:  # a distribution of the user's own that can only be sampled
        return fn(rng_key=jax.random.key(0)).reshape((*shape, -1))


def unmasked(fn: dist.Distribution) -> dist.Distribution:
    """A distribution without its masks, which change the density but not what is drawn."""
    if isinstance(fn, dist.MaskedDistribution):
        return unmasked(fn.base_dist)
    if isinstance(fn, dist.ExpandedDistribution):
        return unmasked(fn.base_dist).expand(fn.batch_shape)
    if isinstance(fn, dist.Independent):
        return unmasked(fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
    return fn


_NEEDS_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_INSIDE = "inside a loop, a branch or another transformation of JAX (jax.lax.scan, jax.vmap, jax.jit, ...)"
_HIDDEN = (
    "The program {}, which hides what is drawn there. "
    'Write the loop in Python with one name a step, numpyro.sample(f"x_{{t}}", ...), '
    "or make the steps one vector site or a plate, or simulate them inside a cpe.Simulator."
)


def _explained(error: Exception, frames: traceback.StackSummary, where: str) -> Exception | None:
    """JAX's tracing errors in the user's words; `None` for any other error."""
    # A plate tests its size before anything else, so a sampled size looks like a branch.
    is_plate = any(f.name == "__init__" and Path(f.filename).parts[-2:] == ("numpyro", "primitives.py") for f in frames)
    shape = isinstance(error, jax.errors.NonConcreteBooleanIndexError) or "Shapes must be 1D sequences" in str(error)
    if shape or (is_plate and isinstance(error, jax.errors.ConcretizationTypeError)):
        return ValueError(
            f"The program, {where}, makes an array or plate whose size depends on a sampled value. "
            "Every site needs one fixed shape: use the largest size and a mask (jnp.where), "
            "or do this step inside cpe.Simulator(..., host=True)."
        )
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return ValueError(
            f"The program, {where}, takes a Python branch (if, while, and, or) on a sampled value, "
            "which would hide sites. Use jnp.where or jax.lax.cond for values, and draw the same sites on every path; "
            "or do this step inside cpe.Simulator(..., host=True)."
        )
    if isinstance(error, NotImplementedError) and "control flow primitive under a `plate`" in str(error):
        return ValueError(_HIDDEN.format("uses numpyro.contrib.control_flow (scan or cond) in a plate"))
    if isinstance(error, _NEEDS_NUMBER):
        return ValueError(
            f"The program, {where}, needs the number behind a sampled value (float(), int(), NumPy, range(), a shape). "
            "Write it with jax.numpy and fixed shapes, or put the NumPy code into cpe.Simulator(..., host=True)."
        )
    return None


def _where(frames: traceback.StackSummary, sites: list[str]) -> str:
    """After which site, and on which line of the user's own code."""
    after = f"after site '{sites[-1]}'" if sites else "before its first site"
    libraries = [_folder(jax), _folder(numpyro), Path(__file__).parent]
    for frame in reversed(frames):
        path = Path(frame.filename)
        if not any(path.is_relative_to(folder) for folder in libraries):
            return f"{after} ({path.name}, line {frame.lineno}: {frame.line})"
    return after


def _folder(module: ModuleType) -> Path:
    return Path(str(module.__file__)).parent


__all__ = [
    "Centred",
    "Deterministic",
    "Program",
    "RawSite",
    "Simulator",
    "base_constraint",
    "distribution_features",
    "is_masked",
    "mask_of",
    "read",
    "read_deterministics",
    "run",
    "unmasked",
    "unwrap",
]
