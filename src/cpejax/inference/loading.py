"""`cpe.load`: posteriors from files. Files are data: loading runs no code from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from cpejax.flows.base import Flow, Method
from cpejax.flows.ensemble import Ensemble
from cpejax.inference.emulator import Emulator, build_forward
from cpejax.inference.fitted import Fitted
from cpejax.inference.posterior import Posterior
from cpejax.inference.registry import METHODS
from cpejax.inference.saving import FORMAT, array_shapes, method_options
from cpejax.inference.settings import History, Training
from cpejax.inference.values import centred
from cpejax.program.model import Model, as_model
from cpejax.program.probe import Probe, Prober, say_doubtful
from cpejax.program.simulator import Program
from cpejax.util.files import digest, load_arrays


def load(folder: str | Path, model: Model | Program, *, method: Method | None = None) -> Posterior:
    """Read a posterior that `Posterior.save` wrote.

    **Arguments:**

    - `folder`: where it was saved.
    - `model`: the `cpe.Model`, or the NumPyro program without arguments, that it was fitted to. Its graph must be the
        same, and every site's distribution at a few stored simulations. Of a simulator on the host, which is not
        called, a change of its code is said on stderr.
    - `method`: needed only where the method has modules of the user's own (`embed`), which a file cannot hold, or
        where it is the user's own and its class is not defined yet.

    Files are data: loading runs no code from them.
    """
    folder = Path(folder)
    about = _read_about(folder / "posterior.json")
    fitted = _read(folder, about, model, method)
    emulator = None
    if about.get("emulator"):
        inner = _read_about(folder / "emulator" / "posterior.json")
        if inner["weights_sha256"] != about["emulator"]:
            raise ValueError(f"The emulator in {folder / 'emulator'} is not the one that was saved with the posterior.")
        emulator = Emulator(**vars(_read(folder / "emulator", inner, fitted.model, None, build_forward)))
    return Posterior(**vars(fitted), emulator=emulator)


def _read(
    folder: Path,
    about: dict[str, Any],
    model: Model | Program,
    method: Method | None,
    build: Callable[..., Flow] | None = None,
) -> Fitted:
    """What `save` has written; `build(method, ...)` makes the flow, as `method.build` does unless it is given."""
    data = [name for name, site in about["graph"]["sites"].items() if site["observed"]]
    model = as_model(model, data)
    try:
        bound, graph = model.bound, model.graph
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
    say_doubtful(f"the posterior in {folder} was fitted", doubtful)
    offset = {name.removeprefix("offset."): x for name, x in arrays.items() if name.startswith("offset.")}
    stored = sum(math.prod(shape) for shape, _ in about["structure"])
    _check_size(method, about.get("ensemble", 1), stored, folder)
    blank = {name: np.zeros((1, *site.shape), jnp.result_type(float)) for name, site in graph.sites.items()}
    try:
        like = {"key": jax.random.key(0), "like": about["description"]}
        program = centred(bound, offset)
        flow = build(method, program, graph, blank, **like) if build else method.build(program, graph, blank, **like)
        if about.get("ensemble"):
            flow = Ensemble([flow] * about["ensemble"])
    except (LookupError, TypeError) as error:
        raise ValueError(f"{folder / 'posterior.json'} describes no networks of this program ({error}).") from error
    if array_shapes(flow) != about["structure"]:
        types = sorted({kind for _, kind in about["structure"] if kind.startswith("float")})
        raise ValueError(
            f"The posterior in {folder} has other networks than {method} builds (library {about['library']}; its "
            f"weights are {', '.join(types)}, and JAX's numbers are {jnp.result_type(float)} now: jax_enable_x64)."
        )
    leaves, structure = jax.tree.flatten(flow)
    found = (jnp.asarray(arrays[str(i)]) for i in range(len(about["structure"])))
    flow = jax.tree.unflatten(structure, [next(found) if eqx.is_array(x) else x for x in leaves])
    settings, history = Training(**about["settings"]), History(**about["history"])
    return Fitted(flow, model, method, settings, history, about["n_simulations"], offset, probe)


def _read_about(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {path.parent} holds no saved posterior.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected a file of a saved posterior.")
    try:
        about = json.loads(path.read_text())
        seal = about.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
    if not path.is_file() or digest(path.read_bytes()) != about["weights_sha256"]:
        raise ValueError(f"{path} is missing, truncated or altered: it is not the file that posterior.json names.")
    arrays, _ = load_arrays(path)
    found = [[list(x.shape), str(x.dtype)] for i in range(len(arrays)) if (x := arrays.get(str(i))) is not None]
    if found != about["structure"]:
        raise ValueError(f"{path} has arrays of other shapes or types than posterior.json says.")
    return arrays


def _check_size(method: Method, networks: int, stored: int, folder: Path) -> None:
    """A method's options fit the number of stored weights: networks that could not be in the file are never built."""
    least = networks * max(1, method.least_weights())
    if least > stored:
        times = f" × {networks}" if networks > 1 else ""
        raise ValueError(
            f"The posterior in {folder} has {stored} stored weights, but {method}{times} has at least {least}: "
            "its options were altered after it was saved."
        )


def _read_method(about: dict[str, Any], method: Method | None, folder: Path) -> Method:
    options = dict(about["options"])
    if method is not None:
        if type(method).__name__ != about["method"] or method_options(method) != options:
            raise ValueError(
                f"The posterior in {folder} was made by {about['method']} with {options}, not by {method}."
            )
        return method
    if about["method"] not in METHODS:
        raise ValueError(
            f"The posterior in {folder} is of method {about['method']!r}; known are {sorted(METHODS)}. Import the file "
            "that defines it first, or give method=."
        )
    if options.pop("embed", None):
        raise ValueError(
            f"The posterior in {folder} has embeddings for {about['options']['embed']}, which a file cannot hold: "
            f"give method={about['method']}(embed={{...}}) with the same modules."
        )
    return METHODS[about["method"]](**options)
