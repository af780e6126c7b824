"""The methods of the benchmark by name: how each is fitted, and the ways in which it is drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cpejax.flows.aio import AIO
from cpejax.flows.ancestral.method import CPE
from cpejax.flows.base import Method
from cpejax.flows.blocks.discrete import DiscreteCPE
from cpejax.flows.blocks.triangular import TriangularCPE
from cpejax.flows.fmpe import FMPE
from cpejax.flows.pse import PSE
from cpejax.program.model import Model
from cpejax.runs.bench.peers import PEERS, Peer
from cpejax.runs.model_file import Failure, run_file
from cpejax.tasks import Task
from cpejax.tasks.simformer import ConditionalTask


@dataclass(frozen=True)
class Entry:
    """A method as the benchmark runs it.

    **Arguments:**

    - `method`: as `cpe.fit` takes it.
    - `draws`: ways to draw from one fit, `{name: options of Posterior.sample}`: the table's column `solver`.
    - `fit`: further options of `cpe.fit`.
    """

    method: Method
    draws: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})
    fit: Mapping[str, Any] = field(default_factory=dict)


REFINED = "refined"
"""Draws that are refined by the learned likelihood; where none was learned there are none."""
SOLVERS = {"euler": {"solver": "euler"}, "rk45": {"solver": "rk45"}}

METHODS: Mapping[str, Entry] = {
    "CPE": Entry(CPE(), {REFINED: {"refine": "learned"}, "plain": {}}),
    "CPE-no-emulation": Entry(CPE(), {"plain": {}}, {"emulate": False}),
    "FMPE": Entry(FMPE(), {"rk45": {}}),
    "PSE": Entry(PSE(), {"rk45": {}}),
    "AIO": Entry(AIO(), {"rk45": {}}),
    "AIO-4-layers": Entry(AIO(mask="none", layers=4), {"rk45": {}}),
    "TriangularCPE-reverse": Entry(TriangularCPE(inverse="reverse"), SOLVERS),
    "TriangularCPE-faithful": Entry(TriangularCPE(), SOLVERS),
    "DiscreteCPE": Entry(DiscreteCPE(), {"bisection": {}}),
}
"""`TriangularCPE-reverse` is the paper's CPE, `AIO` the paper's AIO. In this order they run."""


def get(name: str) -> Entry | Peer:
    """The method of that name, or what a Python file defines as `METHOD`: a `cpe.Method` or an `Entry`."""
    if name in METHODS:
        return METHODS[name]
    if name in PEERS:
        return PEERS[name]
    if not name.endswith(".py"):
        raise Failure(
            f"There is no method {name!r}: the methods are {', '.join([*METHODS, *PEERS])}, and Python files that "
            "define METHOD."
        )
    found = defined(Path(name), "METHOD")
    if isinstance(found, Entry):
        return found
    if isinstance(found, Method) and not isinstance(found, type):
        return Entry(found)
    raise Failure(f"{name}: METHOD is a {type(found).__name__}, expected a method such as cpe.CPE().")


def fitted_to(task: Task, method: Method) -> tuple[Model, Method]:
    """The model that a method is fitted to, and the method as it is then.

    Of a task whose given sites may be any, `AIO` is fitted to the model as it is, and `CPE` to the set.
    """
    if not isinstance(task, ConditionalTask):
        return task, method
    if isinstance(method, AIO):
        return task.joint, method
    if isinstance(method, CPE):
        return task.for_set, replace(method, first=task.first)
    raise Failure(
        f"{type(method).__name__} cannot run on {task.name}, which has given sites of any kind: methods that are "
        "cpe.CPE(...) and cpe.AIO(...) can."
    )


def defined(path: Path, name: str) -> Any:
    """What a Python file of the user's defines by that name."""
    if not path.is_file():
        raise Failure(f"{path} does not exist: expected a Python file that defines {name}.")
    module = run_file(path)
    if not hasattr(module, name):
        raise Failure(f"{path} defines no {name}.")
    return getattr(module, name)
