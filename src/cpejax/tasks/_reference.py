"""Reference posteriors: exact draws where a task has them, the paper's slice sampler everywhere, cached on disk."""

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import xarray as xr
from arviz_base import from_dict
from arviz_stats.base.array import array_stats
from blackjax.mcmc.slice import direction_proposal, stepping_out
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from cpejax import tasks
from cpejax.program.model import Model
from cpejax.tasks import Task, _exact
from cpejax.tasks._cache import cache_directory
from cpejax.util.files import atomically

__all__ = ["reference"]

CHAINS, DRAWS, WARMUP, THIN = 10, 10_000, 5_000, 2
KEPT = (DRAWS - WARMUP) // THIN
START = 20_000
MOVES = 20
CHUNK, MOST = 2**18, 10**9


def reference(
    task: Task | Model | str,
    seed: int | None = None,
    *,
    given: Mapping[str, Any] | None = None,
    sampler: str | None = None,
    cache: bool = True,
) -> xr.DataTree:
    """Draws from a task's posterior, 10 chains of 2,500.

    **Arguments:**

    - `task`: a task or the name of one; or any `cpe.Model` whose sites all have densities, of which nothing is cached.
    - `seed`: of the observation, `task.observation(seed)`.
    - `given`: instead of a seed, any observation, `{site: array}`.
    - `sampler`: `"exact"`, independent draws by the task's own sampler, the default where there is one; or `"slice"`,
        the paper's: hit-and-run slice sampling, 10 chains of 10,000 draws, the first 5,000 dropped, every second
        kept, all chains in one compiled call. Chains rarely jump between separated modes: look at R-hat. Or
        `"rejection"`: prior draws kept with probability `p(x | theta) / max p(x | theta)`, independent and from
        the program alone, for few parameters and a bounded likelihood; it gives up after 1e9 prior draws. By default
        the draws that were published with the task, where there are any (`tasks.sbibm`): one chain of 10,000.
    - `cache`: whether to read and write the cache: files in `$CPEJAX_CACHE`, or the user's cache directory, named by
        a hash of the model, the observation and the sampler.

    **Returns:** a DataTree with `posterior` and `observed_data`. The attributes carry `sampler`, the largest
    rank-normalised split R-hat (`rhat`) and the smallest bulk and tail effective sample sizes (`ess_bulk`, `ess_tail`)
    of any scalar parameter.

    >>> from cpejax import reference
    >>> draws = reference("two_moons", 0, cache=False)
    >>> draws.posterior["theta"].shape
    (10, 2500, 2)
    """
    if isinstance(task, str):
        task = tasks.get(task)
    elif not isinstance(task, Task):
        task = Task(name="model", program=task.bound, observed=task.graph.data, source="given")
        cache = False
    data = _observation(task, seed, given)
    if sampler is None and seed is not None and (published := task.published(seed)) is not None:
        return _tree(task, data, "published", {name: value[None] for name, value in published.items()})
    if sampler is None:
        sampler = "exact" if task.exact else "slice"
    if sampler not in SAMPLERS:
        raise ValueError(f"reference(sampler={sampler!r}): expected one of {', '.join(SAMPLERS)}")
    if sampler == "exact" and task.exact is None:
        raise ValueError(f"task {task.name!r} has no exact sampler: use sampler='slice'")

    path = _path(task, data, sampler) if cache else None
    if path is not None and path.exists():
        found = _read(path)
        if found is not None:
            return found
    tree = _tree(task, data, sampler, SAMPLERS[sampler](task, data))
    if path is not None:
        _write(tree, path)
    return tree


def _observation(task: Task, seed: int | None, given: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    if (seed is None) == (given is None):
        raise ValueError(
            f"reference({task.name!r}): give either the seed of an observation or given={{site: array}},"
            f" got seed={seed!r} and given={'None' if given is None else sorted(given)}"
        )
    if given is None:
        assert seed is not None
        return task.observation(seed)
    if set(given) != set(task.observed):
        raise ValueError(
            f"given has the sites {sorted(given)}, but task {task.name!r} has data {sorted(task.observed)}"
        )
    data = {name: np.asarray(given[name]) for name in task.observed}
    for name, value in data.items():
        if not (np.issubdtype(value.dtype, np.integer) or np.issubdtype(value.dtype, np.floating)):
            raise ValueError(f"given[{name!r}] has dtype {value.dtype}: expected real numbers")
        if value.shape != task.shapes[name]:
            raise ValueError(
                f"given[{name!r}] has shape {value.shape}, but site {name!r} has shape {task.shapes[name]}"
            )
        if not np.isfinite(value).all():
            raise ValueError(f"given[{name!r}] has NaN or infinite entries")
    # in single precision, as an observation is, so that the same numbers are the same entry of the cache
    return {k: v.astype(np.float32) if np.issubdtype(v.dtype, np.floating) else v for k, v in data.items()}


def _digest(*parts: bytes | str) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _seed(task: Task, data: Mapping[str, np.ndarray], sampler: str) -> int:
    """A seed of the observation's own, the same on every machine."""
    parts = [part for name in task.observed for part in (name, data[name].tobytes())]
    return int.from_bytes(_digest(task.name, sampler, *parts)[:4], "big")


# ------------------------------------------------------------------------------------------------------------ samplers


def _exact_draws(task: Task, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert task.exact is not None
    n = CHAINS * KEPT
    draws = task.exact(data, n, np.random.default_rng(_seed(task, data, "exact")))
    return {name: np.asarray(draws[name]).reshape(CHAINS, KEPT, *task.shapes[name]) for name in task.parameters}


def _log_densities(
    task: Task, data: Mapping[str, Any], draw: Mapping[str, Any]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`log p(theta)` and `log p(x | theta)` of one draw; minus infinity outside the prior's support."""
    sites = numpyro.handlers.trace(numpyro.handlers.substitute(task.program, data={**draw, **data})).get_trace()
    prior, likelihood = jnp.zeros(()), jnp.zeros(())
    for name, site in sites.items():
        if site["type"] != "sample":
            continue
        log_prob = jnp.sum(site["fn"].log_prob(site["value"]))
        if name in task.observed:
            likelihood += log_prob
        else:
            # NumPyro's log_prob does not look at the support
            prior += jnp.where(jnp.all(site["fn"].support(site["value"])), log_prob, -jnp.inf)
    # Outside the support the likelihood may be anything, such as that of a negative scale.
    return prior, jnp.where(jnp.isfinite(prior) & ~jnp.isnan(likelihood), likelihood, -jnp.inf)


def _prior_draw(task: Task, key: Array) -> dict[str, Array]:
    sites = numpyro.handlers.trace(numpyro.handlers.seed(task.program, key)).get_trace()
    return {name: sites[name]["value"] for name in task.parameters}


def _slice_draws(task: Task, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    key = jax.random.key(_seed(task, data, "slice"), impl="threefry2x32")
    draws = _slice(key, {name: jnp.asarray(value) for name, value in data.items()}, task=task)
    return {name: np.asarray(draws[name]) for name in task.parameters}


def _inside_support(key: Array, position: Array, log_density: Callable) -> Callable:
    """A random direction, along which points without density are not admissible.

    The slice's level is `log density + log(uniform)`; the uniform is 0 once in 2^23 moves, and then every point, even
    one outside the support, would be above it.
    """
    line = direction_proposal()(key, position, log_density)

    def point(t):
        state, valid = line(t)
        return state, valid & jnp.isfinite(state.logdensity)

    return point


@partial(jax.jit, static_argnames=("task",))
def _slice(key: Array, data: dict[str, Array], *, task: Task) -> dict[str, Array]:
    """All chains at once: `{site: (CHAINS, KEPT, *shape)}`.

    The chain runs in coordinates in which the prior has mean 0 and sd 1, with a first bracket of ten prior sds, so
    that it can step onto a mode anywhere in the prior. A draw is twenty moves for every scalar parameter, because a
    move changes one direction only. Chains start at prior draws resampled by their likelihood.
    """
    prior_key, start_key, key = jax.random.split(key, 3)
    prior = jax.vmap(lambda k: _prior_draw(task, k))(jax.random.split(prior_key, START))
    flat = jax.vmap(lambda draw: ravel_pytree(draw)[0])(prior)
    unravel = ravel_pytree(jax.tree.map(lambda value: value[0], prior))[1]
    centre, scale = flat.mean(0), flat.std(0)

    def log_density(z):
        return sum(_log_densities(task, data, unravel(centre + scale * z)))

    weight = jax.vmap(lambda draw: _log_densities(task, data, draw)[1])(prior)
    start = jax.random.categorical(start_key, weight, shape=(CHAINS,))
    algorithm = blackjax.slice_sampling(
        log_density, proposal_generator=_inside_support, width=10.0, interval=stepping_out
    )

    def draw(state, key):
        def move(state, key):
            state, _ = algorithm.step(key, state)
            return state, None

        state, _ = jax.lax.scan(move, state, jax.random.split(key, MOVES * flat.shape[1]))
        return state, state.position

    def chain(position, key):
        _, positions = jax.lax.scan(draw, algorithm.init(position), jax.random.split(key, DRAWS))
        return positions[WARMUP::THIN]

    positions = jax.vmap(chain)((flat[start] - centre) / scale, jax.random.split(key, CHAINS))
    return jax.vmap(jax.vmap(unravel))(centre + scale * positions)


def _rejection_draws(task: Task, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Accept and reject with the largest likelihood met so far; what was kept under a smaller one is thinned again."""
    n = CHAINS * KEPT
    seed = _seed(task, data, "rejection")
    rng, key = np.random.default_rng(seed), jax.random.key(seed, impl="threefry2x32")
    kept: list[np.ndarray] = []
    have, tried, bound = 0, 0, -np.inf
    while have < n:
        if tried >= MOST:
            raise ValueError(
                f"task {task.name!r}: {have} of {n} draws kept of {tried:.0e} from the prior; the posterior is too"
                " narrow for sampler='rejection': use 'exact' or 'slice'"
            )
        key, chunk_key = jax.random.split(key)
        flat, log_likelihood = (np.asarray(value) for value in _prior_chunk(chunk_key, data, task=task))
        if log_likelihood.max() > bound:
            keep = np.exp(bound - log_likelihood.max())
            kept = [part[rng.uniform(size=len(part)) < keep] for part in kept]
            bound = log_likelihood.max()
        kept.append(flat[np.log(rng.uniform(size=CHUNK)) < log_likelihood - bound])
        have, tried = sum(map(len, kept)), tried + CHUNK
    unravel = ravel_pytree({name: jnp.zeros(task.shapes[name]) for name in task.parameters})[1]
    draws = jax.vmap(unravel)(jnp.asarray(np.concatenate(kept)[:n]))
    return {name: np.asarray(draws[name]).reshape(CHAINS, KEPT, *task.shapes[name]) for name in task.parameters}


@partial(jax.jit, static_argnames=("task",))
def _prior_chunk(
    key: Array, data: dict[str, Array], *, task: Task
) -> tuple[Float[Array, "chunk theta"], Float[Array, " chunk"]]:
    def one(key):
        draw = _prior_draw(task, key)
        return ravel_pytree(draw)[0], _log_densities(task, data, draw)[1]

    return jax.vmap(one)(jax.random.split(key, CHUNK))


SAMPLERS = {"exact": _exact_draws, "slice": _slice_draws, "rejection": _rejection_draws}


# --------------------------------------------------------------------------------------------------------------- cache


def _tree(task: Task, data: dict[str, np.ndarray], sampler: str, draws: dict[str, np.ndarray]) -> xr.DataTree:
    """A DataTree with diagnostics in its attributes (and in those of its posterior)."""
    columns = np.concatenate([value.reshape(*value.shape[:2], -1) for value in draws.values()], axis=2)
    diagnose = partial(array_stats.ess, columns, chain_axis=0, draw_axis=1)
    attributes = {
        "task": task.name,
        "sampler": sampler,
        "rhat": float(np.max(array_stats.rhat(columns, chain_axis=0, draw_axis=1, method="rank"))),
        "ess_bulk": float(np.min(diagnose(method="bulk"))),
        "ess_tail": float(np.min(diagnose(method="tail", prob=(0.05, 0.95)))),
    }
    tree = from_dict({"posterior": draws, "observed_data": data})
    tree.attrs.update(attributes)
    tree["posterior"].attrs.update(attributes)
    return tree


def _path(task: Task, data: dict[str, np.ndarray], sampler: str) -> Path | None:
    """Where these draws belong: a hash of the model, the observation and the sampler, each by content.

    The model is its compiled log density, so a program is known by what it computes. A sampler is its source text;
    `None` (not cached) if that is not to be had, as for a function typed into an interpreter.
    """
    sources: list[Any] = [sys.modules[__name__]]
    if sampler == "exact":
        assert task.exact is not None
        sources += [_exact, sys.modules.get(task.exact.__module__)]
    try:
        texts = [inspect.getsource(module) for module in sources]
    except (OSError, TypeError):
        return None
    draw = {name: jnp.zeros(task.shapes[name]) for name in task.parameters}
    model = jax.jit(partial(_log_densities, task)).lower(data, draw).as_text()
    content = [part for name in task.observed for part in (name, data[name].tobytes())]
    digest = _digest(task.name, sampler, blackjax.__version__, model, *content, *texts).hex()
    return cache_directory() / "references" / f"{task.name}-{sampler}-{digest[:32]}.nc"


def _read(path: Path) -> xr.DataTree | None:
    """The stored draws, in memory; `None`, with a warning, if the file cannot be read."""
    try:
        with xr.open_datatree(path, engine="h5netcdf") as stored:
            return stored.load()
    except (OSError, ValueError, KeyError) as error:
        warnings.warn(f"{path} cannot be read ({error}): drawing this reference again", stacklevel=3)
        return None


def _write(tree: xr.DataTree, path: Path) -> None:
    """Write a file that is always whole under its final name."""
    with atomically(path) as part:
        tree.to_netcdf(part, engine="h5netcdf")
