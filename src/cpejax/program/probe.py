"""Whether two programs are the same: what each site's distribution gives at some values of all sites.

A graph knows sites, shapes and families. Constants (a design matrix), a prior's parameters and a simulator's code are
seen only by evaluating them.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array

from cpejax.program.distributions import distribution_features, unwrap
from cpejax.program.graph import Graph
from cpejax.program.simulator import Program, Simulator
from cpejax.program.tracing import run
from cpejax.util.files import digest
from cpejax.util.messages import say

POINTS = 3
"""The number of simulations at which a program is evaluated."""
MOST_KEPT = 16
"""The number of values kept of a site; of more, that many sums with random signs."""


@dataclass(frozen=True, eq=False)
class Probe:
    """What a program gives at some values of its sites.

    - `values`: `{site: (points, *shape)}`.
    - `densities`: for each site the log-densities there, or a simulator's arguments: `(points, kept)`.
    - `draws`: of simulators in JAX, what a fixed key draws there: `(points, kept)`.
    - `code`: of simulators on the host, a hash of their code and of the constants that it holds.
    - `made_with`: versions; draws and code are comparable only where they are the same.
    """

    values: Mapping[str, np.ndarray]
    densities: Mapping[str, np.ndarray]
    draws: Mapping[str, np.ndarray]
    code: Mapping[str, str]
    made_with: str

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, by name."""
        parts = {"values": self.values, "densities": self.densities, "draws": self.draws}
        return {f"probe.{kind}.{name}": np.ascontiguousarray(x) for kind, of in parts.items() for name, x in of.items()}

    def about(self) -> dict[str, Any]:
        """What is not an array, as JSON."""
        return {"code": dict(self.code), "made_with": self.made_with}

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> Probe:
        """The probe, from `arrays` (among others) and `about`."""

        def of(kind: str) -> dict[str, np.ndarray]:
            start = f"probe.{kind}."
            return {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}

        return cls(of("values"), of("densities"), of("draws"), dict(about["code"]), str(about["made_with"]))


class Prober:
    """Evaluates a program, which takes no arguments, at values of its sites. Simulators on the host are not called."""

    def __init__(self, program: Program, graph: Graph):
        self.graph = graph
        self.code: dict[str, str] = {}

        def one(values: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
            densities: dict[str, Array] = {}
            draws: dict[str, Array] = {}

            def visit(name: str, msg: dict[str, Any]) -> None:
                fn, base = msg["fn"], unwrap(msg["fn"])
                is_delta = isinstance(base, dist.Delta)
                densities[name] = base.v if is_delta else distribution_features(fn, msg["value"])
                if isinstance(base, Simulator) and base.host:
                    self.code.setdefault(name, code_of(base.fn))
                elif isinstance(base, Simulator):
                    draws[name] = fn(rng_key=jax.random.key(0))

            run(program, values, visit)
            return densities, draws

        self.evaluate = jax.jit(jax.vmap(one))

    def __call__(self, values: Mapping[str, np.ndarray]) -> Probe:
        """A probe at the first few simulations, `{site: (n, *shape)}`."""
        at = {name: np.asarray(values[name][:POINTS]) for name in self.graph.sites}
        densities, draws = ({name: _kept(x) for name, x in of.items()} for of in self._evaluated(at))
        made_with = f"jax {jax.__version__}, {platform.machine()}, python {sys.version_info[0]}.{sys.version_info[1]}"
        return Probe(at, densities, draws, dict(self.code), made_with)

    def _evaluated(self, at: Mapping[str, np.ndarray]) -> Any:
        return self.evaluate({name: jnp.asarray(x) for name, x in at.items()})

    def differences(self, probe: Probe) -> tuple[list[str], list[str]]:
        """What differs from a probe of another program, in words that follow "site 'y' has".

        First what is certain; then what may also be an edit that changes nothing: a simulator's code on the host.
        """
        mine = self({name: np.asarray(x) for name, x in probe.values.items()})
        certain, doubtful = [], []
        comparable = mine.made_with == probe.made_with
        for name, site in self.graph.sites.items():
            if not _same(mine.densities.get(name), probe.densities.get(name)):
                what = "another distribution, or reads other constants," if site.observed else "another prior"
                certain.append(f"site '{name}' has {what} now")
            elif comparable and not _same(mine.draws.get(name), probe.draws.get(name)):
                certain.append(f"site '{name}' has another simulator now")
            elif comparable and mine.code.get(name) != probe.code.get(name):
                doubtful.append(f"site '{name}' has a simulator whose code, or a constant in it, has changed")
        return certain, doubtful


def _kept(x: Any) -> np.ndarray:
    """A few values that stand for many, and their size: `(points, ...)` to `(points, kept + 1)`."""
    rows = np.asarray(x, np.float64).reshape(len(x), -1)
    finite = np.isfinite(rows)
    rows = np.where(finite, rows, 0.0)
    size = np.sqrt((rows**2).mean(1, keepdims=True)) if rows.size else np.zeros((len(rows), 1))
    rows = np.concatenate([rows, finite], axis=1)
    if rows.shape[1] > MOST_KEPT:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (rows.shape[1], MOST_KEPT))
        rows = rows @ signs / np.sqrt(rows.shape[1])
    return np.concatenate([rows, size], axis=1)


def _same(mine: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether two are the same but for the rounding of another machine."""
    if mine is None or other is None or mine.shape != other.shape:
        return mine is None and other is None
    return bool((np.abs(mine - other) <= 1e-3 * other[:, -1:] + 1e-6).all())


def code_of(fn: Any) -> str:
    """A hash of a function's name, code and the constants it holds (defaults, closure, arguments of `partial`)."""
    parts: list[bytes] = []
    while isinstance(fn, functools.partial):
        parts += [_constant(x) for x in (*fn.args, *fn.keywords.items())]
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    fn = fn if hasattr(fn, "__code__") else vars(type(fn)).get("__call__", fn)
    parts.append(str(getattr(fn, "__qualname__", type(fn).__qualname__)).encode())
    code = getattr(fn, "__code__", None)
    if code is not None:
        parts += _code(code, getattr(fn, "__doc__", None))
        parts += [_constant(x) for x in fn.__defaults__ or ()]
        parts += [_constant(_content(cell)) for cell in fn.__closure__ or ()]
    return digest(*parts)


def _code(code: CodeType, doc: str | None = None) -> list[bytes]:
    out = [code.co_code, " ".join(code.co_names).encode()]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            out += _code(constant)
        elif doc is None or constant != doc:
            out.append(_constant(constant))
    return out


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _constant(x: Any) -> bytes:
    """Numbers, text and arrays by their value; anything else by its type, for lists and the like may be a state."""
    if isinstance(x, np.ndarray | np.generic | jax.Array) and not isinstance(x, jax.core.Tracer):
        array = np.asarray(x)
        return f"{array.dtype} {array.shape}".encode() + (array.tobytes() if array.dtype.kind in "fiubc" else b"")
    if isinstance(x, int | float | complex | str | bytes | None):
        return repr(x).encode()
    if isinstance(x, tuple):
        return b"(" + b",".join(map(_constant, x)) + b")"
    return type(x).__qualname__.encode()


def say_doubtful(when: str, doubtful: Sequence[str]) -> None:
    """Say what may have changed in a program."""
    if doubtful:
        say(f"Warning: since {when}, {'; '.join(doubtful)}. If it gives other data now, nothing here is right.")
