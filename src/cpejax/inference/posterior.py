"""Fitting a program, and what a fitted posterior can do: draw, evaluate, save, load."""

from __future__ import annotations

import difflib
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from arviz_base import from_dict
from jaxtyping import Array, Float, PRNGKeyArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cpejax.coordinates.prior import Coordinates, Values
from cpejax.coordinates.vector import Vector
from cpejax.flows.base import Flow, Method, Solver, count_weights
from cpejax.inference.registry import CPE, METHODS
from cpejax.inference.training import DIVERGED, History, Interrupt, Training, split, train
from cpejax.program.graph import AXES, Graph
from cpejax.program.probe import Probe, Prober
from cpejax.program.simulate import Simulations, bind, check_count, finite, offsets, say_without_digits, words
from cpejax.program.tracing import Centred, Program, run
from cpejax.util.cores import WIDE, cores, known, on_cores
from cpejax.util.files import digest, load_arrays, pack_arrays, write_atomically
from cpejax.util.keys import check_key, key_words

FORMAT = 2
MOST_NUMBERS = 30_000_000
"""How many numbers sampling holds at once on a core; more draws than that allows go in chunks."""
SCORED = 200
"""Held-out simulations by which a fit is scored."""
SHARE = 5000
"""More draws than that for one observation are shared among the cores."""


def fit(
    program: Program,
    simulations: Mapping[str, Any],
    *args: Any,
    key: PRNGKeyArray,
    method: Method | None = None,
    observed: Sequence[str] | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    schedule: str | None = None,
    max_epochs: int | None = None,
    steps: int | None = None,
    patience: int | None = None,
    validation: float | None = None,
    weight_decay: float | None = None,
    average: bool | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Posterior:
    """Train a posterior on simulations of a program.

    **Arguments:**

    - `program`: the NumPyro model; `*args`, `**kwargs` are passed to it.
    - `simulations`: from `cpe.simulate`, or any `{site: (n, *shape)}` with every site of the program.
    - `key`: a JAX key: the same key, versions and machine give the same posterior.
    - `method`: `cpe.CPE()` by default.
    - `observed`: the data sites, if `simulations` does not know them.
    - `batch_size`, `learning_rate`, `schedule`, `max_epochs`, `steps`, `patience`, `validation`, `weight_decay`,
        `average`: see `cpe.Training`, whose defaults they have unless the method has its own.
    - `checkpoint`: a folder; a run that was killed goes on from there, to the same result.
    - `progress`: a progress bar; by default where there is a terminal.

    **Returns:** a `Posterior`. Ctrl-C stops training after the epoch that runs and returns the best so far; before the
    first epoch, or pressed again, it is a `KeyboardInterrupt`.

    ??? example

        ```python
        posterior = cpe.fit(program, simulations, key=jax.random.key(1))
        posterior.history.best
        ```
    """
    asked = {
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "schedule": schedule,
        "max_epochs": max_epochs,
        "steps": steps,
        "patience": patience,
        "validation": validation,
        "weight_decay": weight_decay,
        "average": average,
    }
    method = CPE() if method is None else method
    if not isinstance(method, Method) or isinstance(method, type):
        raise TypeError(f"method must be a method with its options, as cpe.CPE(); found {method!r}.")
    own = getattr(method, "training", {})
    settings = Training(**{**own, **{name: value for name, value in asked.items() if value is not None}})
    key = check_key(key)
    bound = bind(program, args, kwargs, fit)
    observed = getattr(simulations, "observed", None) if observed is None else observed
    graph = Graph.from_program(bound, observed=observed)
    rows = _check_simulations(simulations, graph)
    probe = _check_probe(rows, Prober(bound, graph))
    offset = offsets(rows, graph)
    rows = Simulations({name: _centre(x, offset.get(name)) for name, x in rows.items()}, graph, rows.dropped)
    key_flow, key_train = jax.random.split(key)
    bar = _Bar(progress)
    with Interrupt() as interrupt:
        flow = method.build(_centred(bound, offset), graph, rows, key=key_flow)
        interrupt.check()
        prepared = _prepare(flow, rows)
        interrupt.check()
        with bar:
            flow, history = train(
                flow,
                prepared,
                settings,
                key=key_train,
                checkpoint=None if checkpoint is None else Path(checkpoint),
                fingerprint=graph.fingerprint,
                progress=bar.update,
                interrupt=interrupt,
            )
    if history.stopped.startswith("interrupted"):
        bar.say(f"Training was {history.stopped}; the best so far is returned.")
    if history.stopped.startswith(DIVERGED):
        bar.say(f"Warning: {history.stopped}. The weights of epoch {history.best_epoch + 1} are kept.")
    history.held_out = _held_out(flow, rows, *split(rows.n, settings, key_train))
    if not history.informed:
        bar.say(
            f"Warning: the posterior is no better than the prior. {history.score} Either the data say nothing about "
            "the parameters, or more simulations or another method (embed=) are needed."
        )
    return Posterior(flow, graph, bound, method, settings, history, rows.n, offset, probe)


def _held_out(flow: Flow, rows: Simulations, held_out: np.ndarray, trained: np.ndarray) -> dict[str, float | int]:
    """What `History.held_out` has; an error where the density cannot be one.

    Of a density `q` the mean of `q(θ' | x) / π(θ')` is 1 for `θ'` from the prior and `x` from elsewhere. The held-out
    simulations' parameters, each with the data of the next, are such pairs. By Markov's inequality a mean above 10⁶ has
    a probability of 10⁻⁶ at most, where `q` is a density.
    """
    held_out, trained = held_out[:SCORED], trained[: min(SCORED, len(held_out))]
    shifted = np.roll(held_out, 1)
    gains, log_priors = [], []
    for parameters, data in ((held_out, held_out), (trained, trained), (shifted, held_out)):
        values = {n: jnp.asarray(x[parameters if n in rows.graph.parameters else data], float) for n, x in rows.items()}
        log_q, log_prior = map(np.asarray, _score(flow, values, frozenset(rows.graph.parameters)))
        gains.append(np.asarray(log_q - log_prior, float))
        log_priors.append(float(log_prior.mean()))
    total = float(np.logaddexp.reduce(gains[2][np.isfinite(gains[2])]) - math.log(len(held_out)))
    if total > math.log(1e6):
        raise FloatingPointError(
            f"The density that was learned cannot be right: it integrates to about e^{total:.0f}. Look for extreme "
            "values in the simulations, or lower learning_rate."
        )
    return {
        "n": len(held_out),
        "log_prob": float(gains[0].mean()) + log_priors[0],
        "prior": log_priors[0],
        "error": float(gains[0].std() / math.sqrt(len(held_out))),
        "training": float(gains[1].mean()),
    }


@eqx.filter_jit
def _score(flow: Flow, values: Values, parameters: frozenset[str]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The log-density of each simulation's parameters given its data, and under their prior."""
    n = len(next(iter(values.values())))
    batch = max(1, min(n, MOST_NUMBERS // (2 * flow.numbers_per_draw())))

    def one(values: Values) -> tuple[Array, Array]:
        drawn = {name: x[None] for name, x in values.items() if name in parameters}
        data = {name: x for name, x in values.items() if name not in parameters}
        log_q = flow.log_probs(drawn, data, steps=flow.density_steps).mean()
        return log_q, flow.coordinates.log_prior(values)

    return jax.lax.map(one, values, batch_size=batch)


class _Bar:
    """Epoch, losses, best and time left; silent where there is no terminal."""

    def __init__(self, shown: bool | None):
        self.console = console = Console(stderr=True)
        columns = (
            TextColumn("training"),
            BarColumn(),
            TextColumn("epoch {task.completed}/{task.total}  {task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        shown = console.is_terminal if shown is None else shown
        self.progress = Progress(*columns, console=console, disable=not shown)
        self.task = self.progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def update(self, epoch: int, epochs: int, history: History) -> None:
        text = f"loss {history.train[-1]:.4f}  validation {history.validation[-1]:.4f}  best {history.best:.4f}"
        self.progress.update(self.task, completed=epoch, total=epochs, description=text)

    def say(self, text: str) -> None:
        _say(text, self.console)


def _say(text: str, console: Console | None = None) -> None:
    (console or Console(stderr=True)).print(text, highlight=False, markup=False, soft_wrap=True)


@eqx.filter_jit
def _prepare_chunk(flow: Any, values: Values) -> tuple[Any, Array]:
    return flow.prepare(values), jax.vmap(flow.coordinates.in_support)(values)


def _prepare(flow: Any, rows: Simulations, chunk: int = 10_000) -> Any:
    """What training reads of the simulations, in chunks that bound memory."""
    pieces = -(-rows.n // chunk)
    size = -(-rows.n // pieces)
    parts, inside = [], []
    for start in range(0, rows.n, size):
        which = np.arange(start, start + size) % rows.n  # one shape, one compilation
        part, good = _prepare_chunk(flow, {name: jnp.asarray(x[which], float) for name, x in rows.items()})
        keep = min(size, rows.n - start)
        parts.append(jax.tree.map(lambda x, keep=keep: x[:keep], part))
        inside.append(np.asarray(good)[:keep])
    outside = np.flatnonzero(~np.concatenate(inside))
    if len(outside) > 0.01 * rows.n:  # a few stand on the edge of a support, and by rounding outside
        row = int(outside[0])
        sites = flow.coordinates.outside({name: jnp.asarray(x[row], float) for name, x in rows.items()})
        raise ValueError(
            f"{len(outside)} of {rows.n} simulations have parameters outside the prior's support, the first "
            f"in row {row}: {', '.join(f'{n} = {words(rows[n][row])}' for n in sites)}. They may be of another program."
        )
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _centred(program: Program, offset: Mapping[str, np.ndarray]) -> Program:
    """The program that the flow runs: its data are given less their offset, if they have one."""
    return Centred(program, offset) if offset else program


def _centre(x: Any, offset: np.ndarray | None) -> np.ndarray:
    """Values less an offset, in the precision that JAX computes in."""
    with np.errstate(over="ignore"):
        return np.asarray(x if offset is None else np.asarray(x, np.float64) - offset, jnp.result_type(float))


def _check_probe(rows: Simulations, prober: Prober) -> Probe:
    """What the program gives at the simulations; those of another program are an error."""
    if rows.probe is None:
        return prober(rows)
    certain, doubtful = prober.differences(rows.probe)
    if certain:
        raise ValueError(
            f"The simulations are of another program: {'; '.join(certain)}. Give fit the program, and its arguments, "
            "that simulated them, or simulate again."
        )
    _say_doubtful("the simulations were made", doubtful)
    return rows.probe


def _say_doubtful(when: str, doubtful: Sequence[str]) -> None:
    if doubtful:
        _say(f"Warning: since {when}, {'; '.join(doubtful)}. If it gives other data now, nothing here is right.")


def _check_simulations(simulations: Mapping[str, Any], graph: Graph) -> Simulations:
    if not isinstance(simulations, Mapping):
        raise TypeError(
            f"simulations must be a dict of arrays, as cpe.simulate returns; found {type(simulations).__name__}."
        )
    missing = [name for name in graph.sites if name not in simulations]
    extra = [name for name in simulations if name not in graph.sites and name not in graph.deterministics]
    if missing or extra:
        raise ValueError(
            f"The simulations {f'have no site {missing}' if missing else f'have the sites {extra}'}, but the program "
            f"{f'has {list(graph.sites)}' if missing else 'has not'}. They may be of another program."
        )
    values = {name: _numbers(simulations[name], f"simulations['{name}']") for name in graph.sites}
    n = len(next(iter(values.values()))) if next(iter(values.values())).ndim else 0
    for name, x in values.items():
        site = graph.sites[name]
        if x.shape[1:] != site.shape or x.ndim != len(site.shape) + 1 or len(x) != n:
            raise ValueError(
                f"simulations['{name}'] has shape {x.shape}, but {n} simulations of site '{name}' have shape "
                f"{(n, *site.shape)}{_plates(site, graph)}."
            )
    if isinstance(simulations, Simulations) and simulations.graph.fingerprint != graph.fingerprint:
        differ = "; ".join(graph.differences(simulations.graph.to_dict()))
        raise ValueError(f"The simulations are of another program: {differ}.")
    if n < 20:
        raise ValueError(
            f"There are {n} simulations; at least 20 are needed to train and validate, thousands to be accurate."
        )
    out = finite(graph.without_masked(values), graph)
    if isinstance(simulations, Simulations):
        out.probe = simulations.probe
    else:
        say_without_digits(out, graph)
    return out


def _numbers(x: Any, what: str) -> np.ndarray:
    """An array of numbers, or an error that says what was found."""
    if np.ma.isMaskedArray(x) and np.ma.getmaskarray(x).any():
        raise ValueError(f"{what} has masked values. Missing data need a program that simulates them as missing.")
    try:
        out = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is not an array of numbers: {error}.") from error
    if out.dtype.kind not in "fiub":
        raise ValueError(f"{what} is not an array of numbers: it has type {out.dtype}, found {x!r:.60}.")
    return out


def _plates(site: Any, graph: Graph) -> str:
    plates = [f"plate '{p}' of size {graph.plates[p]}" for p in site.plates]
    return f" ({', '.join(plates)})" if plates else ""


@dataclass(frozen=True, eq=False)
class Posterior:
    """A trained posterior of a program, for any observation.

    - `history`: the losses; `flow`: the networks; `graph`: the program's graph; `method`, `settings`: how it was made.
    - `offset`: what the flow's data are less than the program's, where float32 would not hold their digits otherwise;
        `probe`: what the program gives at a few simulations, by which it is told from others.
    """

    flow: Flow
    graph: Graph
    program: Program
    method: Method
    settings: Training
    history: History
    n_simulations: int
    offset: Mapping[str, np.ndarray] = field(default_factory=dict)
    probe: Probe | None = None

    def __repr__(self) -> str:
        return (
            f"Posterior({', '.join(self.graph.parameters)} | {', '.join(self.graph.data)}; "
            f"{type(self.method).__name__}, {self.weights} weights, {self.n_simulations} simulations)"
        )

    @cached_property
    def weights(self) -> int:
        """How many weights are trained."""
        return count_weights(self.flow)

    def sample(
        self,
        n: int,
        given: Mapping[str, Any],
        *,
        key: PRNGKeyArray,
        steps: int | None = None,
        solver: Solver | None = None,
    ) -> xr.DataTree:
        """Draw from the posterior.

        **Arguments:**

        - `n`: draws for each observation.
        - `given`: the observed data, `{site: array}`; each with a leading axis for many observations at once. With
            `cpe.AIO` any sites, parameters among them: the others are drawn. With `cpe.CPE` parameters too that
            are drawn before all others, as `cpe.CPE(first=[...])` makes them: the others are drawn given these.
        - `key`: a JAX key.
        - `steps`: of Euler's method; 20 unless the method has another default.
        - `solver`: `"euler"`, or `"rk45"` for Dormand-Prince 5(4) with SciPy's default tolerances; `"euler"` for
            `cpe.CPE`, `"rk45"` for the other methods unless said otherwise.

        **Returns:** an ArviZ DataTree: `posterior` with the program's names, shapes and plates (dims `chain, draw`,
        then `observation` where there are many), and `observed_data`. Attributes of `posterior` say how it was made.
        Draws that are not finite are never returned: a `FloatingPointError` says of which parameters they are.
        Deterministic sites of the program are there too. A plate that is called like a site or an axis is `…_plate`.

        ??? example

            ```python
            draws = posterior.sample(10_000, given={"y": y}, key=jax.random.key(2))
            draws.posterior["mu"].mean()
            ```
        """
        check_count(n, "n, the number of draws,")
        steps = self.flow.steps if steps is None else steps
        solver = self.flow.solver if solver is None else solver
        check_count(steps, "steps")
        if solver not in ("euler", "rk45"):
            raise ValueError(f"solver must be 'euler' or 'rk45', found {solver!r}.")
        key = check_key(key)
        data, many = self._check_given(given)
        began = time.perf_counter()
        count = len(next(iter(data.values()))) if data else 1
        chunk = max(1, MOST_NUMBERS // self.flow.numbers_per_draw())
        keys = jax.random.split(key, count)
        values, counted = _draw_on_cores(self.flow, data, keys, int(n), int(steps), solver, chunk)
        # Whole numbers are counts; others are the worst of something.
        counts = {n: int(np.sum(x)) if x.dtype.kind in "iu" else float(np.max(x)) for n, x in counted.items()}
        drawn = sum(x.size for x in values.values())
        if counts.get("clipped", 0) > 0.01 * drawn:
            _say(
                f"Warning: {100 * counts['clipped'] / drawn:.1f} % of the drawn values stand at the limit of what can "
                "be drawn: the furthest that was simulated of a prior with a long tail, or the last that float32 "
                "resolves of others. The data may be beyond all simulations: see cpe.check."
            )
        seconds = time.perf_counter() - began
        acceptance = 1.0
        if self.flow.may_leave_support:
            self._check_acceptance(counted)
            acceptance = counts.pop("accepted") / counts.pop("proposed")
            counts.pop("missing")
        self._check_finite(values)
        attributes = {
            "acceptance_rate": acceptance,
            "sampling_time": seconds,
            "solver": solver,
            "steps": int(steps),
            "key": key_words(key),
            "method": type(self.method).__name__,
            "n_simulations": self.n_simulations,
            "inference_library": "cpejax",
            "inference_library_version": version("cpejax"),
            "jax_version": jax.__version__,
            "numpyro_version": version("numpyro"),
            "python_version": platform.python_version(),
            **counts,
        }
        return self._to_tree(values, data, many, attributes)

    def log_prob(
        self, draws: Mapping[str, Any] | xr.DataTree, given: Mapping[str, Any], *, steps: int | None = None
    ) -> Float[np.ndarray, "*draws"]:
        """The log-density of draws, in the program's own parameters.

        **Arguments:**

        - `draws`: a DataTree from `sample`, or `{site: (n, *shape)}`. For many observations a DataTree of as many, or
            `{site: (observations, n, *shape)}`, or `{site: (observations, *shape)}` with one draw each.
        - `given`: one observation, `{site: array}`, or many, each site with a leading axis. With parameters among them
            (see `sample`) the density is that of the others given these.
        - `steps`: of Heun's method, on the same grid as `sample`'s. By default 20 for `cpe.CPE`; the densities of other
            methods are then by `"rk45"`.

        **Returns:** an array, `(chain, draw)` for a DataTree and `(n,)` for a dict; for many observations
        `(chain, draw, observation)`, and `(observations, n)` or `(observations,)`. Outside the prior's support the
        log-density is −∞; one that is not a number is an error. Of a method that rejects draws (`acceptance_rate` below
        1) it is the density of what is proposed; that of the draws is higher by the factor 1 / acceptance rate.

        The baselines estimate it in more than 32 dimensions and say with which error; `log_prob_with_error` returns it.
        """
        found, error = self.log_prob_with_error(draws, given, steps=steps)
        inside = np.isfinite(found)
        if error.any() and inside.any():
            _say(
                f"log_prob is estimated; its standard error is {np.median(error[inside]):.2g} for half of the draws, "
                f"{error[inside].max():.2g} at most."
            )
        return found

    def log_prob_with_error(
        self, draws: Mapping[str, Any] | xr.DataTree, given: Mapping[str, Any], *, steps: int | None = None
    ) -> tuple[Float[np.ndarray, "*draws"], Float[np.ndarray, "*draws"]]:
        """`log_prob` and the standard error of each: 0, unless the baselines estimate it in many dimensions."""
        steps = self.flow.density_steps if steps is None else steps
        if steps is not None:
            check_count(steps, "steps")
            steps = int(steps)
        data, many = self._check_given(given)
        chunk = max(1, MOST_NUMBERS // (2 * self.flow.numbers_per_draw()))  # twice: with tangents
        count = len(next(iter(data.values()))) if data and many else None
        values, shape = self._check_draws(draws, set(data), count)
        found: Any
        error: Any
        if count is None:
            found, error = _evaluate(self.flow, values, {name: x[0] for name, x in data.items()}, steps, chunk)
        else:
            found, error = _evaluate_on_cores(self.flow, values, data, steps, chunk)
        density, spread = (np.asarray(x).reshape(shape) for x in (found, error))
        if count is not None and isinstance(draws, xr.DataTree | xr.Dataset):  # (observation, chain, draw)
            density, spread = (np.moveaxis(x, 0, -1) for x in (density, spread))
        _check_density(density)
        return density, spread

    def map(
        self, given: Mapping[str, Any], *, key: PRNGKeyArray, draws: int = 1000, starts: int = 8, steps: int = 300
    ) -> tuple[dict[str, np.ndarray], float]:
        """The parameters with the highest posterior density: the mode, or maximum a posteriori.

        **Arguments:**

        - `given`: one observation, as for `sample`.
        - `key`: a JAX key.
        - `draws`: from the posterior; the `starts` of them that have the highest density are where the search begins.
        - `steps`: of Adam's method from each, with a learning rate that falls from .1 to zero. It moves in
            unconstrained coordinates, standardised by the draws, but what it climbs is the density of the program's own
            parameters, which is that of `log_prob`.

        **Returns:** the parameters, `{site: array}`, and their log-density. Modes depend on how a model is written:
        that of a scale is not that of its logarithm. Where the density is highest at the edge of a support, or has no
        maximum (a hierarchical scale near zero), the search stops on the way there.

        ??? example

            ```python
            mode, log_density = posterior.map(given={"y": y}, key=jax.random.key(3))
            mode["mu"]
            ```
        """
        for name, value in (("draws", draws), ("starts", starts), ("steps", steps)):
            check_count(value, name)
        data, many = self._check_given(given)
        if many:
            raise ValueError("map takes one observation: the data in given have a leading axis. Call it for each.")
        free = [name for name in self.graph.parameters if name not in data]
        if len(free) + len(data) < len(self.graph.sites):
            raise ValueError(f"map needs all data; given has {sorted(given)}.")
        tree = self.sample(draws, given, key=key)["posterior"].dataset
        drawn = {name: jnp.asarray(tree[name].values[0]) for name in free}
        best = np.argsort(-self.log_prob({name: np.asarray(x) for name, x in drawn.items()}, given))[:starts]
        one = {name: x[0] for name, x in data.items()}
        full = drawn | {name: jnp.broadcast_to(x, (draws, *x.shape)) for name, x in one.items()}
        vector = Vector(self.program, self.graph, full, "unconstrained")
        found = _climb(self.flow, vector, {name: x[best] for name, x in full.items()}, one, tuple(free), int(steps))
        candidates = {name: np.concatenate([drawn[name][best], found[name]]) for name in free}
        finite = np.all([np.isfinite(x).reshape(len(x), -1).all(1) for x in candidates.values()], axis=0)
        candidates = {name: x[finite] for name, x in candidates.items()}
        density = self.log_prob(candidates, given)
        top = int(np.argmax(density))
        return {name: np.asarray(x[top]) for name, x in candidates.items()}, float(density[top])

    def save(self, folder: str | Path) -> None:
        """Write the posterior to a folder: `weights.safetensors` and `posterior.json`. `cpe.load` reads it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        leaves = [x for x in jax.tree.leaves(self.flow) if eqx.is_array(x)]
        arrays = {str(i): np.asarray(x) for i, x in enumerate(leaves)}
        arrays |= {f"offset.{name}": x for name, x in self.offset.items()}
        probe = self._probe()
        content = pack_arrays(arrays | probe.arrays(), {})
        about = {
            "format": FORMAT,
            "library": version("cpejax"),
            "method": type(self.method).__name__,
            "options": _options(self.method),
            "settings": asdict(self.settings),
            "history": asdict(self.history),
            "n_simulations": self.n_simulations,
            "fingerprint": self.graph.fingerprint,
            "graph": self.graph.to_dict(),
            "probe": probe.about(),
            "description": self.flow.description(),
            "structure": _structure(self.flow),
            "weights_sha256": digest(content),
        }
        about["sha256"] = digest(json.dumps(about, sort_keys=True).encode())
        text = json.dumps(about, indent=1)
        write_atomically(folder / "weights.safetensors", content)
        write_atomically(folder / "posterior.json", text.encode())

    def _probe(self) -> Probe:
        if self.probe is not None:
            return self.probe
        example = {name: np.asarray(x)[None] for name, x in self.flow.coordinates.example.items()}
        whole = {name: x + self.offset[name] if name in self.offset else x for name, x in example.items()}
        return Prober(self.program, self.graph)(whole)

    def _check_given(self, given: Mapping[str, Any]) -> tuple[dict[str, Array], bool]:
        """The data as arrays with a leading axis for observations, and whether there was one."""
        if not isinstance(given, Mapping):
            raise TypeError(f"given must be a dict of the observed data, found {type(given).__name__}.")
        parameters = [name for name in self.graph.parameters if name in given]
        lacks = {} if self.flow.any_subset or not parameters else self.flow.lacks(parameters)
        known = self.graph.data if lacks is None else tuple(self.graph.sites)
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f" Did you mean '{close[0]}'?" if close else ""
                if name in self.graph.parameters:
                    hint = " Only cpe.CPE() and cpe.AIO() can condition on parameters."
                sites = known if self.flow.any_subset else self.graph.data
                raise ValueError(
                    f"given['{name}'] is not a {'' if self.flow.any_subset else 'data '}site; the "
                    f"{'' if self.flow.any_subset else 'data '}sites are {list(sites)}.{hint}"
                )
        if lacks:
            self._refuse_parameters(parameters, lacks)
        if len(given) == len(self.graph.sites):
            raise ValueError("given has all sites of the program, so there is nothing left to draw.")
        out: dict[str, Array] = {}
        lengths: dict[str, int | None] = {}
        for name in known:
            site = self.graph.sites[name]
            if name not in given:
                if self.flow.any_subset or name in self.graph.parameters:
                    continue
                raise ValueError(f"given has no '{name}'; it needs the data sites {list(self.graph.data)}.")
            x = _numbers(given[name], f"given['{name}']")
            if name in self.offset and x.dtype.kind == "f" and x.dtype.itemsize < 8:
                raise ValueError(
                    f"given['{name}'] is in {x.dtype}, which has steps of {np.spacing(np.abs(x).max()):.2g} there: too "
                    "wide for data that the program simulates in float64. Give a NumPy array of float64."
                )
            x = self.graph.without_masked({name: x})[name]
            if x.shape[x.ndim - len(site.shape) :] == site.shape:
                x = _centre(x, self.offset.get(name))
            if x.shape == site.shape:
                lengths[name] = None
            elif x.shape[1:] == site.shape and x.ndim == len(site.shape) + 1 and len(x) > 0:
                lengths[name] = len(x)
            else:
                raise ValueError(
                    f"given['{name}'] has shape {x.shape}, but site '{name}' has shape {site.shape}"
                    f"{_plates(site, self.graph)}; for many observations put an axis in front of it."
                )
            if not np.isfinite(x).all():
                bad = np.argwhere(~np.isfinite(x))[0].tolist()
                raise ValueError(
                    f"given['{name}'] has {int((~np.isfinite(x)).sum())} values that are not finite in {x.dtype}, the "
                    f"first at {bad}. Missing data need a program that simulates them as missing."
                )
            out[name] = jnp.asarray(x)
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"The data in given have different numbers of observations: {lengths} (None: a single one)."
            )
        many = any(length is not None for length in lengths.values())
        out = out if many else {name: x[None] for name, x in out.items()}
        if parameters and not self.flow.any_subset:
            self._check_supports(parameters, out, many)
        return out, many

    def _refuse_parameters(self, given: list[str], lacks: Mapping[str, list[str]]) -> None:
        """Parameters that are given without others that come before them."""
        name, missing = next(iter(lacks.items()))
        prior = [p for p in self.graph.parents[name] if p in missing]
        if prior:
            way = f"The prior of '{name}' depends on {prior}: give {'it' if len(prior) == 1 else 'them'} too."
        else:
            way = f"Give {missing} too, or fit with method=cpe.CPE(first={given}), which draws {given} first."
        raise ValueError(
            f"given has '{name}', but this posterior draws {missing} before it, so what is left cannot be drawn given "
            f"'{name}'. {way}"
        )

    def _check_supports(self, parameters: list[str], values: Values, many: bool) -> None:
        """Given parameters are in the support of their prior."""

        def inside(values: Values) -> dict[str, Array]:
            out: dict[str, Array] = {}

            def visit(name: str, fn: Any, value: Array) -> None:
                out[name] = jnp.all(fn.support(value))

            self.flow.coordinates.visit(self.flow.coordinates.example | values, visit)
            return {name: out[name] for name in parameters}

        for name, good in jax.vmap(inside)(values).items():
            if not good.all():
                which = int(jnp.argmin(good))
                raise ValueError(
                    f"given['{name}'] is {words(np.asarray(values[name][which]))}"
                    f"{f' for observation {which}' if many else ''}, which is outside the support of its prior."
                )

    def _check_draws(
        self, draws: Mapping[str, Any] | xr.DataTree, given: set[str], count: int | None = None
    ) -> tuple[dict[str, Array], tuple[int, ...]]:
        """The sites that are not given as arrays, and the shape of their leading axes in `draws`.

        For one observation the arrays have one leading axis, for draws; for `count` of them two, for observations and
        draws.
        """
        source: Any = draws
        if isinstance(draws, xr.DataTree):
            source = draws["posterior"].dataset if "posterior" in draws.children else draws.dataset
        named = isinstance(source, xr.Dataset)
        expected: list[tuple[str, ...]] = [("chain", "draw") if named else ("draw",)]
        if count is not None:
            expected = [("observation", *expected[0])] if named else [("observation", "draw"), ("observation",)]
        values: dict[str, Array] = {}
        shape: tuple[int, ...] | None = None
        names = [name for name in self.graph.sites if name not in given]
        for name in names:
            if name not in source:
                raise ValueError(f"draws have no '{name}'; they need the parameters {names}.")
            site = self.graph.sites[name]
            x = source[name]
            if named and set(expected[0]) <= set(x.dims):
                x = x.transpose(*expected[0], ...)
            x = _centre(_numbers(x, f"draws['{name}']"), self.offset.get(name))
            lead = next((e for e in expected if x.ndim == len(e) + len(site.shape)), None)
            if lead is None or x.shape[len(lead) :] != site.shape:
                one_of = " or ".join(f"({', '.join(map(str, (*e, *site.shape)))})" for e in expected)
                raise ValueError(
                    f"draws['{name}'] has shape {x.shape}, but draws of site '{name}' "
                    f"{'' if count is None else f'for {count} observations '}have shape {one_of}"
                    f"{_plates(site, self.graph)}."
                )
            if count is not None and len(x) != count:
                raise ValueError(f"draws['{name}'] are for {len(x)} observations, but given has {count}.")
            if shape is not None and x.shape[: len(lead)] != shape:
                raise ValueError(f"draws['{name}'] has {x.shape[: len(lead)]} draws, the others {shape}.")
            shape = x.shape[: len(lead)]
            values[name] = jnp.asarray(x.reshape(*(() if count is None else (count,)), -1, *site.shape))
        return values, shape or ()

    def _check_acceptance(self, counted: Mapping[str, np.ndarray]) -> None:
        """Draws that are missing: the flow proposes nearly nothing inside the prior's support."""
        missing, accepted, proposed = (counted[name].sum(1) for name in ("missing", "accepted", "proposed"))
        if missing.any():
            worst = int(np.argmax(missing))
            which = f"observation {worst} " if len(missing) > 1 else "these data "
            raise RuntimeError(
                f"Of {proposed[worst]} proposals for {which}only {accepted[worst]} are inside the prior's support. The "
                f"data may be unlike any simulation, or {type(self.method).__name__} is trained too little: use "
                "coordinates='unconstrained', or cpe.CPE(), which cannot leave the support; or more simulations."
            )

    def _check_finite(self, values: Mapping[str, np.ndarray]) -> None:
        """Draws `{site: (observations, n, *shape)}` that are not finite are an error."""
        bad = {name: ~np.isfinite(x).reshape(*x.shape[:2], -1).all(2) for name, x in values.items()}
        if not any(x.any() for x in bad.values()):
            return
        each = [f"{x.sum()} of '{name}'" for name, x in bad.items() if x.any()]
        total = next(iter(bad.values()))
        observations = np.flatnonzero(np.any([x.any(1) for x in bad.values()], axis=0))
        where = "" if len(total) == 1 else f", for {len(observations)} of {len(total)} observations"
        where += f", the first of which is number {observations[0]}" if len(total) > 1 else ""
        raise FloatingPointError(
            f"Of {total.size} draws some are not finite: {', '.join(each)}{where}. Such draws are never returned. The "
            "data may be unlike any simulation, or training went wrong: look at cpe.check(...) and at "
            "posterior.history, and fit again with more simulations or a lower learning_rate. A parameter whose prior "
            "goes beyond what float32 holds (3e38) needs another unit, or its logarithm."
        )

    def _to_tree(
        self, values: Mapping[str, np.ndarray], data: Mapping[str, Array], many: bool, attributes: dict[str, Any]
    ) -> xr.DataTree:
        dims: dict[str, list[str]] = {}
        # ArviZ would take a site for the coordinates of an axis of the same name.
        taken = {*AXES, *self.graph.shapes}
        plates = {p: f"{p}_plate" if p in taken else p for p in self.graph.plates}
        while clash := taken & set(plates.values()):
            plates = {p: f"{d}_" if d in clash else d for p, d in plates.items()}
        taken |= set(plates.values())
        coords: dict[str, Any] = {plates[p]: np.arange(size) for p, size in self.graph.plates.items()}
        known = {name: site.dims for name, site in self.graph.sites.items()}
        known |= {name: site.dims for name, site in self.graph.deterministics.items()}
        for name, axes_of in known.items():
            axes = [plates.get(d or "", f"{name}_dim_{i}") for i, d in enumerate(axes_of)]
            axes = [f"{axis}_" if axis in taken and axis not in plates.values() else axis for axis in axes]
            dims[name] = ["observation", *axes] if many else axes
        whole = {name: self._whole(name, np.asarray(x)) for name, x in data.items()}
        observed = {name: self._seen(name, x if many else np.asarray(x[0])) for name, x in whole.items()}
        # (observation, draw, ...) to (chain, draw, observation, ...)
        drawn = {name: self._whole(name, values[name]) for name in self.graph.sites if name in values}  # in order
        drawn |= self._deterministics(drawn, whole)
        posterior = {name: (np.moveaxis(x, 0, 1) if many else x[0])[None] for name, x in drawn.items()}
        tree = from_dict({"posterior": posterior, "observed_data": observed}, dims=dims, coords=coords)
        tree["posterior"].attrs.update(attributes)
        return tree

    def _seen(self, name: str, x: np.ndarray) -> np.ndarray:
        """Observed values; NaN where they are masked."""
        kept = self.graph.sites[name].kept
        return x if kept is None else np.where(kept, x, np.nan)

    def _whole(self, name: str, x: np.ndarray) -> np.ndarray:
        """A site's values as the program has them."""
        return x.astype(np.float64) + self.offset[name] if name in self.offset else x

    def _deterministics(self, drawn: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The deterministic sites for draws `(observations, n, *shape)` and data `(observations, *shape)`."""
        if not self.graph.deterministics:
            return {}
        count, n = next(iter(drawn.values())).shape[:2]
        numbers = sum(math.prod(shape) for shape in self.graph.shapes.values())
        chunk = max(1, min(count * n, MOST_NUMBERS // max(1, numbers)))
        pieces = -(-count * n // chunk)
        chunk = -(-count * n // pieces)
        flat = {name: x.reshape(count * n, *x.shape[2:]) for name, x in drawn.items()}
        parts: list[dict[str, np.ndarray]] = []
        for start in range(0, count * n, chunk):
            which = np.arange(start, start + chunk) % (count * n)  # one shape, one compilation
            values = {name: x[which] for name, x in flat.items()} | {name: x[which // n] for name, x in data.items()}
            found = self._from_sites({name: jnp.asarray(x) for name, x in values.items()})
            parts.append({name: np.asarray(x) for name, x in found.items()})
        whole = {name: np.concatenate([p[name] for p in parts])[: count * n] for name in self.graph.deterministics}
        return {name: x.reshape(count, n, *x.shape[1:]) for name, x in whole.items()}

    @cached_property
    def _from_sites(self) -> Callable[[Values], Values]:
        def one(values: Values) -> Values:
            out: Values = {}
            run(self.program, values, deterministic=lambda name, msg: out.update({name: jnp.asarray(msg["value"])}))
            return out

        return jax.jit(jax.vmap(one))


def _check_density(found: Float[np.ndarray, "*draws"]) -> None:
    """−∞ says that a draw is outside the support; what is neither finite nor that is an error."""
    bad = np.isnan(found) | np.isposinf(found)
    if bad.any():
        first = np.argwhere(bad)[0].tolist()
        raise FloatingPointError(
            f"The log-density of {bad.sum()} of {bad.size} draws is not a number that float32 holds, the first of them "
            f"at {first}, though they are in the prior's support. They may be far from all simulations (compare them "
            "with draws of `sample`), or training went wrong: look at posterior.history, and fit again with more "
            "simulations or a lower learning_rate."
        )


def _draw_on_cores(
    flow: Flow, data: Values, keys: Array, n: int, steps: int, solver: Solver, chunk: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`_draw` on all cores at once: shares of many observations, or of the draws for one.

    The latter are of at most `SHARE` draws, whatever the number of cores, so that a key means the same draws anywhere.
    """
    if len(keys) == 1:
        shares, axis = -(-n // SHARE), 1
        size = -(-n // shares)
        each = [(data, key[None]) for key in (jax.random.split(keys[0], shares) if shares > 1 else keys)]
    else:
        shares, axis, size = min(cores(), len(keys)), 0, n
        which = np.arange(shares * -(-len(keys) // shares)).reshape(shares, -1) % len(keys)  # the last is filled
        each = [({name: x[w] for name, x in data.items()}, keys[w]) for w in which]
    done = on_cores(_compiled_draw(), [(flow, data, keys, size, steps, solver, chunk) for data, keys in each])
    last = len(keys), n
    values = {name: np.concatenate([v[name] for v, _ in done], axis)[: last[0], : last[1]] for name in done[0][0]}
    counted = {
        name: np.concatenate([np.asarray(c[name]).reshape(len(c[name]), -1) for _, c in done], axis)[: last[0]]
        for name in done[0][1]
    }
    return values, counted


@cache
def _compiled_draw() -> Callable:
    # Equinox passes options on to `jax.jit`; its annotations do not say so.
    return eqx.filter_jit(_draw, compiler_options=known(WIDE))  # type: ignore[call-overload]


def _draw(
    flow: Flow, data: Values, keys: Array, n: int, steps: int, solver: Solver, chunk: int
) -> tuple[Values, dict[str, Array]]:
    """Draws for each observation, `(observations, n, ...)`, in chunks that bound memory."""
    pieces = -(-n // chunk)
    size = -(-n // pieces)

    def draw(data: Values, n: int, key: Array) -> tuple[Values, dict[str, Array]]:
        def propose(n: int, key: Array) -> tuple[Values, dict[str, Array]]:
            return flow.sample(data, n, key, steps=steps, solver=solver)

        return _reject(propose, flow.coordinates, data, n, key, chunk) if flow.may_leave_support else propose(n, key)

    def one(x: tuple[Values, Array]) -> tuple[Values, dict[str, Array]]:
        data, key = x
        if pieces == 1:
            return draw(data, n, key)
        part = jax.lax.map(lambda k: draw(data, size, k), jax.random.split(key, pieces))
        return jax.tree.map(lambda v: v.reshape(pieces * size, *v.shape[2:])[:n], part[0]), part[1]

    if len(keys) == 1:
        out = one(({name: x[0] for name, x in data.items()}, keys[0]))
        return jax.tree.map(lambda v: v[None], out)
    # A remainder would be a second copy of the whole program, to be compiled: the last batch is filled instead.
    batches = -(-len(keys) // max(1, min(len(keys), chunk // (4 * n))))
    batch = -(-len(keys) // batches)
    filled = jax.tree.map(lambda v: v[jnp.arange(batches * batch) % len(keys)], (data, keys))
    return jax.tree.map(lambda v: v[: len(keys)], jax.lax.map(one, filled, batch_size=batch))


def _reject(
    propose: Callable[[int, Array], tuple[Values, dict[str, Array]]],
    coordinates: Coordinates,
    data: Values,
    n: int,
    key: Array,
    most: int,
) -> tuple[Values, dict[str, Array]]:
    """The first `n` proposals inside the prior's support.

    There are so many proposals at a time as an eighth of `n` (128 if that is more, but never more than `most`), until
    there are enough: one shape, compiled once. `missing` counts the draws that are not there, once less than 1 % of
    many proposals is accepted.
    """
    size = min(most, max(-(-n // 8), 128))

    def inside(drawn: Values) -> Array:
        finite = [jnp.isfinite(x).reshape(len(x), -1).all(1) for x in drawn.values()]
        return jnp.all(jnp.stack([*finite, jax.vmap(lambda v: coordinates.in_support({**v, **data}))(drawn)]), axis=0)

    def unfinished(state: tuple) -> Array:
        _, _, counts, _ = state
        hopeless = (counts["proposed"] >= 10_000) & (counts["accepted"] < 0.01 * counts["proposed"])
        return (counts["accepted"] < n) & ~hopeless

    def step(state: tuple) -> tuple:
        i, drawn, counts, others = state
        new, counted = propose(size, jax.random.fold_in(key, i))
        good = inside(new)
        # Behind those that are there already; what is not accepted, or too much, goes nowhere.
        to = jnp.where(good, counts["accepted"] + jnp.cumsum(good) - 1, n)
        drawn = {name: x.at[to].set(new[name], mode="drop") for name, x in drawn.items()}
        counts = {"accepted": counts["accepted"] + good.sum(dtype=jnp.int32), "proposed": counts["proposed"] + size}
        return i + 1, drawn, counts, jax.tree.map(_combine, others, counted)

    shapes, counted = jax.eval_shape(lambda: propose(size, key))
    drawn = {name: jnp.zeros((n, *x.shape[1:]), x.dtype) for name, x in shapes.items()}
    counts = {"accepted": jnp.zeros((), jnp.int32), "proposed": jnp.zeros((), jnp.int32)}
    others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counted)
    _, drawn, counts, others = jax.lax.while_loop(unfinished, step, (0, drawn, counts, others))
    return drawn, others | counts | {"missing": jnp.maximum(n - counts["accepted"], 0)}


def _combine(a: Array, b: Array) -> Array:
    """Whole numbers are counts; others are the worst of something."""
    return a + b if jnp.issubdtype(a.dtype, jnp.integer) else jnp.maximum(a, b)


def _densities(
    flow: Flow, values: Values, data: Values, steps: int | None, chunk: int
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The log-density of draws and its standard error, in chunks that bound memory."""
    n = len(next(iter(values.values())))
    pieces = -(-n // chunk)
    size = -(-n // pieces)

    def part(values: Values) -> tuple[Array, Array]:
        inside = jax.vmap(lambda v: flow.coordinates.in_support({**v, **data}))(values)
        each = flow.log_probs(values, data, steps=steps)
        k = each.shape[1]
        error = jnp.zeros(len(each)) if k == 1 else each.std(1, ddof=1) / k**0.5
        return jnp.where(inside, each.mean(1), -jnp.inf), jnp.where(inside, error, 0.0)

    if pieces == 1:
        return part(values)
    padded = {
        k: jnp.concatenate([v, v[: pieces * size - n]]).reshape(pieces, size, *v.shape[1:]) for k, v in values.items()
    }
    return jax.tree.map(lambda x: x.reshape(-1)[:n], jax.lax.map(part, padded))


@eqx.filter_jit
def _evaluate(
    flow: Flow, values: Values, data: Values, steps: int | None, chunk: int
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The densities of draws for one observation."""
    return _densities(flow, values, data, steps, chunk)


@eqx.filter_jit
def _evaluate_each(
    flow: Flow, values: Values, data: Values, steps: int | None, chunk: int
) -> tuple[Float[Array, "observations n"], Float[Array, "observations n"]]:
    """The densities of draws `(observations, n, ...)` for each observation, so many at once as `chunk` allows."""
    count, n = next(iter(values.values())).shape[:2]
    batches = -(-count // max(1, min(count, chunk // n)))
    batch = -(-count // batches)
    filled = jax.tree.map(lambda v: v[jnp.arange(batches * batch) % count], (values, data))
    out = jax.lax.map(lambda x: _densities(flow, x[0], x[1], steps, chunk), filled, batch_size=batch)
    return jax.tree.map(lambda v: v[:count], out)


def _evaluate_on_cores(
    flow: Flow, values: Values, data: Values, steps: int | None, chunk: int
) -> tuple[np.ndarray, np.ndarray]:
    """`_evaluate_each` of a share of the observations on each core."""
    count = len(next(iter(values.values())))
    shares = min(cores(), count)
    which = np.arange(shares * -(-count // shares)).reshape(shares, -1) % count  # the last is filled
    each = [
        (flow, {n: x[w] for n, x in values.items()}, {n: x[w] for n, x in data.items()}, steps, chunk) for w in which
    ]
    done = on_cores(_evaluate_each, each)
    density, error = (np.concatenate([np.asarray(part[i]) for part in done])[:count] for i in range(2))
    return density, error


@eqx.filter_jit
def _climb(flow: Flow, vector: Vector, values: Values, data: Values, free: tuple[str, ...], steps: int) -> Values:
    """Values `{site: (starts, *shape)}` from which the density was climbed in unconstrained coordinates."""
    moves = jnp.asarray([label.site in free for label in vector.labels])
    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, steps))

    def at(u: Float[Array, " d"]) -> Values:
        found = vector.unflatten(u, data)
        return {name: found[name] for name in free}

    def loss(u: Float[Array, " d"]) -> Float[Array, ""]:
        return -flow.log_probs({name: x[None] for name, x in at(u).items()}, data, steps=flow.density_steps).mean()

    def climb(u: Float[Array, " d"]) -> Values:
        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            u, state, best, least = carry
            value, gradient = jax.value_and_grad(loss)(u)
            better = value < least
            best, least = jnp.where(better, u, best), jnp.where(better, value, least)
            gradient = jnp.where(moves & jnp.isfinite(gradient), gradient, 0.0)
            change, state = optimiser.update(gradient, state)
            return (u + change, state, best, least), None

        start = (u, optimiser.init(u), u, jnp.full((), jnp.inf))
        return at(jax.lax.scan(step, start, None, length=steps)[0][2])

    return jax.lax.map(climb, jax.vmap(vector.flatten)(values))


def _options(method: Method) -> dict[str, Any]:
    """A method's options, as JSON; embeddings by name only (they are given again on loading)."""
    out = {}
    for f in fields(method):  # type: ignore[arg-type]
        value = getattr(method, f.name)
        out[f.name] = sorted(value) if f.name == "embed" else list(value) if isinstance(value, tuple) else value
    return out


def _structure(flow: Flow) -> list[list[Any]]:
    """The shapes and types of all arrays of a flow, in order."""
    return [[list(x.shape), str(x.dtype)] for x in jax.tree.leaves(flow) if eqx.is_array(x)]


def load(folder: str | Path, program: Program, *args: Any, method: Method | None = None, **kwargs: Any) -> Posterior:
    """Read a posterior that `Posterior.save` wrote.

    **Arguments:**

    - `folder`: where it was saved.
    - `program`: the program it was fitted to; `*args`, `**kwargs` are passed to it. Its graph must be the same, and
        every site's distribution at a few stored simulations. Of a simulator on the host, which is not called, a change
        of its code is said on stderr.
    - `method`: needed only where the method has modules of the user's own (`embed`), which a file cannot hold.

    Files are data: loading runs no code from them.
    """
    folder = Path(folder)
    about = _read_about(folder / "posterior.json")
    bound = bind(program, args, kwargs, load)
    data = [name for name, site in about["graph"]["sites"].items() if site["observed"]]
    try:
        graph = Graph.from_program(bound, observed=data)
    except ValueError as error:
        raise ValueError(f"The posterior in {folder} was fitted to another program: {error}") from error
    if graph.fingerprint != about["fingerprint"]:
        differ = "; ".join(graph.differences(about["graph"]))
        raise ValueError(f"The posterior in {folder} was fitted to another program: {differ}.")
    # Nothing is built before it is known to be no larger than what the file holds.
    arrays = _read_weights(folder / "weights.safetensors", about)
    method = _read_method(about, method, folder)
    probe = Probe.restored(arrays, about["probe"])
    certain, doubtful = Prober(bound, graph).differences(probe)
    if certain:
        raise ValueError(
            f"The posterior in {folder} was fitted to another program: {'; '.join(certain)}. Load it with the program, "
            "and its arguments, that it was fitted to."
        )
    _say_doubtful(f"the posterior in {folder} was fitted", doubtful)
    offset = {name.removeprefix("offset."): x for name, x in arrays.items() if name.startswith("offset.")}
    _check_size(method, sum(math.prod(shape) for shape, _ in about["structure"]), folder)
    blank = {name: np.zeros((1, *site.shape), jnp.result_type(float)) for name, site in graph.sites.items()}
    try:
        flow = method.build(_centred(bound, offset), graph, blank, key=jax.random.key(0), like=about["description"])
    except (LookupError, TypeError) as error:
        raise ValueError(f"{folder / 'posterior.json'} describes no networks of this program ({error}).") from error
    if _structure(flow) != about["structure"]:
        types = sorted({kind for _, kind in about["structure"] if kind.startswith("float")})
        raise ValueError(
            f"The posterior in {folder} has other networks than {method} builds (library {about['library']}; its "
            f"weights are {', '.join(types)}, and JAX's numbers are {jnp.result_type(float)} now: jax_enable_x64)."
        )
    leaves, structure = jax.tree.flatten(flow)
    stored = (jnp.asarray(arrays[str(i)]) for i in range(len(about["structure"])))
    flow = jax.tree.unflatten(structure, [next(stored) if eqx.is_array(x) else x for x in leaves])
    settings, history = Training(**about["settings"]), History(**about["history"])
    return Posterior(flow, graph, bound, method, settings, history, about["n_simulations"], offset, probe)


def _read_about(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {path.parent} holds no saved posterior.")
    try:
        about = json.loads(path.read_text())
        seal = about.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is truncated, altered, or not a saved posterior ({error}).") from error
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {about.get('format')}, this version of cpejax reads format {FORMAT}. Fit again."
        )
    if digest(json.dumps(about, sort_keys=True).encode()) != seal:
        raise ValueError(f"{path} was altered after it was saved.")
    return about


def _read_weights(path: Path, about: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a saved posterior, of the shapes and types that its description has."""
    if not path.exists() or digest(path.read_bytes()) != about["weights_sha256"]:
        raise ValueError(f"{path} is missing, truncated or altered: it is not the file that posterior.json names.")
    arrays, _ = load_arrays(path)
    found = [[list(x.shape), str(x.dtype)] for i in range(len(arrays)) if (x := arrays.get(str(i))) is not None]
    if found != about["structure"]:
        raise ValueError(f"{path} has arrays of other shapes or types than posterior.json says.")
    return arrays


def _check_size(method: Method, stored: int, folder: Path) -> None:
    """A method's options fit so many stored weights: networks that could not be in the file are never built."""
    found = {name: getattr(method, name, None) for name in _SIZES}
    size = {name: value if isinstance(value, int) else 0 for name, value in found.items()}
    depth = size["depth"] if getattr(method, "flow", None) == "ancestral" else 1
    tokens = size["value"] + size["name"] + size["condition"]  # of AIO
    least = max(
        size["width"] ** 2 * depth,  # every network of that width has a layer from it to itself
        size["hidden"] ** 2,
        tokens**2 * max(size["layers"], size["widening"]),
        *size.values(),
    )
    if least > stored:
        raise ValueError(
            f"The posterior in {folder} has {stored} stored weights, but {method} has at least {least}: its options "
            "were altered after it was saved."
        )


_SIZES = (
    *("width", "hidden", "depth", "components", "blocks", "rank"),
    *("value", "name", "condition", "layers", "heads", "widening"),
)
"""The options that networks grow with."""


def _read_method(about: dict[str, Any], method: Method | None, folder: Path) -> Method:
    if about["method"] not in METHODS:
        raise ValueError(f"The posterior in {folder} is of method {about['method']!r}; known are {sorted(METHODS)}.")
    options = dict(about["options"])
    if method is not None:
        if type(method).__name__ != about["method"] or _options(method) != options:
            raise ValueError(
                f"The posterior in {folder} was made by {about['method']} with {options}, not by {method}."
            )
        return method
    if options.pop("embed", None):
        raise ValueError(
            f"The posterior in {folder} has embeddings for {about['options']['embed']}, which a file cannot hold: "
            f"give method=cpe.{about['method']}(embed={{...}}) with the same modules."
        )
    return METHODS[about["method"]](**options)
