"""Reading a NumPyro program: its sites, and what each site's distribution depends on."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array
from numpyro import handlers
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from cpejax.program.distributions import base_constraint, distribution_features, is_masked, mask_of, unwrap
from cpejax.program.errors import HIDDEN, INSIDE, explain, place
from cpejax.program.quantiles import drawable
from cpejax.program.simulator import Program, Simulator


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
            raise ValueError(HIDDEN.format("uses numpyro.contrib.control_flow (scan or cond)"))
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
            raise ValueError(HIDDEN.format(f"has the deterministic site '{msg['name']}' {INSIDE}"))
        if msg["type"] == "plate" and (msg["args"][1] or msg["args"][0]) < msg["args"][0]:
            raise ValueError(
                f"Plate '{msg['name']}' subsamples {msg['args'][1]} of {msg['args'][0]} members. "
                "Simulations need them all: remove subsample_size."
            )
        if msg["type"] != "sample":
            return
        if get_opaque_trace_state() != self.level:
            raise ValueError(HIDDEN.format(f"draws site '{msg['name']}' {INSIDE}"))
        _check_site(msg)
        name, fn = msg["name"], drawable(msg["fn"])
        msg["fn"] = fn
        base = unwrap(fn)
        if isinstance(base, Simulator):
            base.site = name
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
    """A program some of whose data are given less an offset, which float32 could not hold together with their digits.

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


_ONE_AT_A_TIME = threading.RLock()
"""NumPyro's handlers are on one stack for all threads: of two programs that run at once each would meet the other's."""


def run(
    program: Program,
    values: Mapping[str, Any],
    visit: Visit | None = None,
    key: Array | None = None,
    deterministic: Visit | None = None,
) -> Any:
    """Run `program` once, with `values` for the sites named there; see `Run`."""
    key = jax.random.key(0) if key is None else key
    with _ONE_AT_A_TIME, handlers.seed(rng_seed=key):
        return Run(program, values, visit, deterministic)()


def read(program: Program) -> dict[str, RawSite]:
    """The sample sites of a program, in its order, with their dependencies.

    No simulator is called: the program is only traced by JAX. Where members of a plate meet in a common plate again, it
    is also run a few times on drawn parameters, without its simulators (`_mixed`).
    """
    sites: dict[str, RawSite] = {}
    try:
        values = _trace(program, sites)
        parents = _parents(program, values)
        masks = _masks(program, sites, values)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = place(frames, list(sites))
        explained = explain(error, frames, where)
        if explained is not None:
            raise explained from error
        if frames[-1].filename != __file__:
            error.add_note(f"This happened in the program, {where}.")
        raise
    for name, site in sites.items():
        sites[name] = site._replace(parents=parents[name] - {name}, mask=masks.get(name))
    mixed = _mixed(program, sites)
    return {name: site._replace(mixed=mixed.get(name, ())) for name, site in sites.items()}


def _masks(
    program: Program,
    sites: Mapping[str, RawSite],
    values: Mapping[str, Any],
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

        run(program, values, visit)
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

    jax.eval_shape(lambda: (run(program, {}, None, None, visit), None)[1])
    return out


def _trace(program: Program, sites: dict[str, RawSite]) -> dict[str, jax.ShapeDtypeStruct]:
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

        run(program, {}, visit)
        return values

    return jax.eval_shape(shapes)


def _raw(msg: dict[str, Any]) -> RawSite:
    fn, shape = msg["fn"], tuple(np.shape(msg["value"]))
    batch = len(shape) - len(fn.event_shape)
    frames = {batch + frame.dim: frame.name for frame in msg["cond_indep_stack"]}
    dims = tuple(frames.get(axis) if axis < batch else None for axis in range(len(shape)))
    return RawSite(fn, shape, dims, bool(msg["is_observed"] or msg["infer"].get("was_observed")))


def _parents(program: Program, values: Mapping[str, Any]) -> dict[str, frozenset[str]]:
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

        run(program, values, visit)
        return out

    found = eval_provenance(influences, **values)
    return {name: frozenset().union(*sets) for name, sets in found.items()}


def _mixed(program: Program, sites: dict[str, RawSite]) -> dict[str, tuple[tuple[str, str], ...]]:
    """For each site the (parent, plate) pairs where it reads other members of the parent than its own.

    Provenance knows sites, not members, so this is probed with numbers: change some members of the parents, and see
    whether the distributions of the other members' children change. The members that change are those whose number has
    a certain bit set (or not set), so every pair of members is told apart by some probe. They change to the largest and
    to the smallest value drawn, which also moves maxima, minima and ranks. What no such change can move is missed.
    """
    shared: dict[str, dict[str, list[str]]] = {}  # plate -> child -> parents, all of them in the plate
    for name, site in sites.items():
        for parent in sorted(site.parents):
            for plate in sorted({p for p in site.dims if p} & set(sites[parent].dims)):
                shared.setdefault(str(plate), {}).setdefault(name, []).append(parent)
    if not shared:
        return {}
    probe = _Probe(program, sites, {child for pairs in shared.values() for child in pairs})
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
    ):
        # Simulators are not called: numbers in (0, 1), good for a scale or a probability, stand in for their data.
        rng = np.random.default_rng(0)
        simulated = [name for name, site in sites.items() if isinstance(unwrap(site.fn), Simulator)]
        stand_ins = {name: jnp.asarray(rng.uniform(size=sites[name].shape), float) for name in simulated}

        self.sites = sites
        self.values: dict[str, Array] = {}
        with numpyro.validation_enabled(False):  # a stand-in may leave the support of an argument
            run(program, stand_ins, lambda name, msg: self.values.update({name: msg["value"]}), None)

        @jax.jit  # many probes then cost little, and NumPyro cannot validate arguments
        def features(values: dict[str, Array]) -> dict[str, Array]:
            out: dict[str, Array] = {}

            def visit(name: str, msg: dict[str, Any]) -> None:
                if name in children:
                    out[name] = distribution_features(msg["fn"], msg["value"])

            run(program, values, visit)
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
