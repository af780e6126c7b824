"""Model files: Python files that define a program, and errors in one paragraph."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

from cpejax.flows.base import Method
from cpejax.inference.registry import METHODS
from cpejax.inference.saving import method_options
from cpejax.program.dispatch import WorkersLost
from cpejax.program.distributions import unwrap
from cpejax.program.graph import Graph
from cpejax.program.model import Model
from cpejax.program.simulator import Simulator
from cpejax.program.tracing import read
from cpejax.util.files import Unusable

PACKAGE = Path(__file__).resolve().parents[1]


class Failure(Exception):
    """An error that is explained in one paragraph."""


class ModelFile(NamedTuple):
    """What a model file defines: the `model` (`program`; `observed`, `args` and `kwargs` if they are there), and, if
    they are there, the others by the same names.
    """

    path: Path
    model: Model
    method: Method | None
    data: Mapping[str, Any] | None
    truth: Mapping[str, Any] | None
    opened: set[Path]

    def graph(self) -> Graph:
        """The program's graph; an error in the program is said to be the model's."""
        with blaming(self.path), _noting(self.opened):
            return self.model.graph

    def on_host(self) -> bool:
        """Whether a simulator runs on the host."""
        found = (unwrap(site.fn) for site in read(self.model.bound).values())
        return any(isinstance(fn, Simulator) and fn.host for fn in found)

    def files(self) -> dict[str, Path]:
        """What the program is made of besides the model file, by name: data files that were read while the file was
        loaded and its graph traced, and the modules it has imported from its own folder.

        Files that are opened without Python's `open`, as HDF5 does, are not among them, nor is what a simulator opens
        when it is called.
        """
        folder = self.path.resolve().parent
        modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        own = {Path(file).resolve() for file in modules if isinstance(file, str) and file.endswith(".py")}
        own = {file for file in own if file.is_relative_to(folder) and not file.is_relative_to(PACKAGE)}
        data = {file.resolve() for file in self.opened if file.suffix not in (".py", ".pyc", ".so", ".pyd")}
        found = sorted(file for file in own | data if file.is_file() and belongs(file, folder))
        found = [file for file in found if file != self.path.resolve()]
        return {str(file.relative_to(folder) if file.is_relative_to(folder) else file): file for file in found}


def load_model(path: Path) -> ModelFile:
    """Run a model file and take what it defines."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise Failure(f"{path} {what}. MODEL.py must be a Python file that defines `program`.")
    opened: set[Path] = set()
    with _noting(opened):
        module = run_file(path)
    program = getattr(module, "program", None)
    if not callable(program):
        found = "defines no `program`" if program is None else f"has a `program` that is a {type(program).__name__}"
        functions = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        hint = f" Its functions are {', '.join(functions)}: rename one, or add `program = ...`." if functions else ""
        raise Failure(f"{path} {found}, expected a NumPyro model: def program(): ...{hint}")
    args, kwargs = getattr(module, "args", ()), getattr(module, "kwargs", {})
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise Failure(
            f"{path}: `args` is a {type(args).__name__}, expected a tuple of what the program is called with."
        )
    _check_dict(path, "kwargs", kwargs, "what the program is called with")
    try:
        inspect.signature(program).bind(*args, **kwargs)
    except TypeError as error:
        raise Failure(
            f"{path}: the program takes other arguments than it is given ({error}). "
            "Define `args` (a tuple) or `kwargs` (a dict) next to it."
        ) from error
    method = getattr(module, "method", None)
    if method is not None and (not isinstance(method, Method) or isinstance(method, type)):
        raise Failure(f"{path}: `method` is a {type(method).__name__}, expected a method such as cpe.CPE().")
    data, truth = getattr(module, "data", None), getattr(module, "truth", None)
    _check_dict(path, "data", data, "the observed data")
    _check_dict(path, "truth", truth, "the true parameters")
    model = Model(program, getattr(module, "observed", None), tuple(args), dict(kwargs))
    return ModelFile(path, model, method, data, truth, opened)


def _check_dict(path: Path, name: str, value: Any, what: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise Failure(f"{path}: `{name}` is a {type(value).__name__}, expected a dict of {what}.")


def run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as if it were run as a script: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise Failure(
            f'{path} ends Python when it is loaded (SystemExit). Put what is a script behind if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise Failure(f"{path} cannot be loaded: {summary(error, path)}") from error
    finally:
        sys.path.pop(0)
    return module


# ---- methods


def choose_method(model: ModelFile, name: str | None) -> Method:
    """The method asked for by name, with the model file's own options if it is the same one."""
    own = model.method
    if name is None:
        return own if own is not None else METHODS["CPE"]()
    kind = {known.lower(): kind for known, kind in METHODS.items()}.get(name.lower())
    if kind is None:
        raise Failure(f"There is no method '{name}'; there are {', '.join(METHODS)}.")
    return own if own is not None and type(own) is kind else kind()


def describe_method(method: Method) -> str:
    """A method and its options, in words that are the same whenever they are."""
    options = ", ".join(f"{name}={value!r}" for name, value in method_options(method).items())
    return f"{type(method).__name__}({options})"


# ---- what a model file reads

_noted: set[Path] | None = None
_hooked = False


@contextmanager
def _noting(opened: set[Path]) -> Iterator[None]:
    """Note the files that are opened for reading."""
    global _noted, _hooked
    if not _hooked:
        sys.addaudithook(_note)  # for the rest of the process: a hook cannot be removed
        _hooked = True
    before, _noted = _noted, opened
    try:
        yield
    finally:
        _noted = before


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _noted is None or event != "open" or len(arguments) != 3:
        return
    name, mode, flags = arguments
    reads = flags & (os.O_WRONLY | os.O_RDWR) != os.O_WRONLY if mode is None else not set("wax") & set(str(mode))
    if reads and isinstance(name, str | bytes):
        _noted.add(Path(os.fsdecode(name)).absolute())


def belongs(file: Path, folder: Path) -> bool:
    """Whether a file is the user's own: not one of Python, of a package, of the system, or of a cache."""
    cache = getattr(jax.config, "jax_compilation_cache_dir", None)
    places = [sys.prefix, sys.base_prefix, cache, "/proc", "/sys", "/dev", "/etc", "/usr"]
    elsewhere = [Path(place).resolve() for place in places if place]
    if any(file.is_relative_to(place) and not folder.is_relative_to(place) for place in elsewhere):
        return False
    parts = file.relative_to(folder).parts if file.is_relative_to(folder) else file.parts
    return not any(part.startswith(".") or part in ("site-packages", "dist-packages", "__pycache__") for part in parts)


# ---- errors


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Say that an error is the model's."""
    try:
        yield
    except (Failure, OSError, Unusable, WorkersLost):
        raise
    except Exception as error:
        raise Failure(f"{path}: {summary(error, path)}") from error


def summary(error: BaseException, path: Path | None = None) -> str:
    """An error in a sentence: our own messages as they are, others with their type and the line in the model."""
    if _raised_here(error):
        return " ".join(str(error).split())
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if path is not None and Path(f.filename).resolve() == path.resolve()]
    return words + (f" (line {lines[-1].lineno}: {lines[-1].line})" if lines else "")


def _raised_here(error: BaseException) -> bool:
    if not isinstance(error, ValueError | TypeError | RuntimeError | FloatingPointError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)
