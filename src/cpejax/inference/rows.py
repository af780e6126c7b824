"""The simulations that networks are trained on: checked against the program, centred, and prepared for a flow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from cpejax.coordinates.prior import Values
from cpejax.inference.values import numbers, plates
from cpejax.program.graph import Graph
from cpejax.program.model import Model, as_model
from cpejax.program.opened import OpenSimulations
from cpejax.program.probe import Probe, Prober, say_doubtful
from cpejax.program.simulations import Simulations, finite, say_without_digits, words
from cpejax.program.simulator import Program


def model_of(model: Model | Program, simulations: Mapping[str, Any]) -> Model:
    """The model of simulations where its program is the same, so that it is not traced again."""
    if not isinstance(simulations, Simulations):
        return as_model(model)
    made = simulations.model
    same = made is not None and (made is model or made.bound is model)
    return made if made is not None and same else as_model(model, simulations.observed)


def check_sites(simulations: Mapping[str, Any], graph: Graph) -> None:
    """Simulations have the sites of the program."""
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


def check_simulations(simulations: Mapping[str, Any], graph: Graph) -> Simulations:
    """The simulations that are finite, of the program's sites; those of another program are an error."""
    check_sites(simulations, graph)
    values = {name: numbers(simulations[name], f"simulations['{name}']") for name in graph.sites}
    n = len(next(iter(values.values()))) if next(iter(values.values())).ndim else 0
    for name, x in values.items():
        site = graph.sites[name]
        if x.shape[1:] != site.shape or x.ndim != len(site.shape) + 1 or len(x) != n:
            raise ValueError(
                f"simulations['{name}'] has shape {x.shape}, but {n} simulations of site '{name}' have shape "
                f"{(n, *site.shape)}{plates(site, graph)}."
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
        out.dropped += simulations.dropped
    else:
        say_without_digits(out, graph)
    return out


def check_folder(opened: OpenSimulations, graph: Graph) -> Probe:
    """What the program gave that simulated a folder, which must have the same graph."""
    if opened.program != graph.fingerprint:
        raise ValueError(
            f"The simulations in {opened.folder} are of another program: its sites, their shapes, families or "
            "dependencies differ. Give fit the program that simulated them, with the same data sites."
        )
    return opened.probe()


def check_probe(rows: Simulations, prober: Prober) -> Probe:
    """What the program gives at the simulations; those of another program are an error."""
    if rows.probe is None:
        return prober(rows)
    certain, doubtful = prober.differences(rows.probe)
    if certain:
        raise ValueError(
            f"The simulations are of another program: {'; '.join(certain)}. Give fit the program, and its arguments, "
            "that simulated them, or simulate again."
        )
    say_doubtful("the simulations were made", doubtful)
    return rows.probe


@eqx.filter_jit
def _prepare_chunk(flow: Any, values: Values) -> tuple[Any, Array]:
    return flow.prepare(values), jax.vmap(flow.coordinates.in_support)(values)


def prepare(flow: Any, rows: Simulations, chunk: int = 10_000, numbers: np.ndarray | None = None) -> Any:
    """What training reads of the simulations, in chunks that bound memory; `numbers` are their names in errors."""
    pieces = -(-rows.n // chunk)
    size = -(-rows.n // pieces)
    parts, inside = [], []
    for start in range(0, rows.n, size):
        which = np.arange(start, start + size) % rows.n  # one shape, one compilation
        chosen = rows if pieces == 1 else {name: x[which] for name, x in rows.items()}
        part, good = _prepare_chunk(flow, {name: jnp.asarray(x, float) for name, x in chosen.items()})
        keep = min(size, rows.n - start)
        parts.append(part if keep == size else jax.tree.map(lambda x, keep=keep: x[:keep], part))
        inside.append(np.asarray(good)[:keep])
    outside = np.flatnonzero(~np.concatenate(inside))
    if len(outside) > 0.01 * rows.n:  # a few stand on the edge of a support, and by rounding outside
        row = int(outside[0])
        named = row if numbers is None else int(numbers[row])
        sites = flow.coordinates.outside({name: jnp.asarray(x[row], float) for name, x in rows.items()})
        raise ValueError(
            f"{len(outside)} of {rows.n} simulations have parameters outside the prior's support, the first "
            f"in row {named}: {', '.join(f'{n} = {words(rows[n][row])}' for n in sites)}. They may be of another "
            "program."
        )
    return parts[0] if pieces == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
