"""Benchmark tasks: NumPyro programs with known posteriors, nine of the paper (appendix B) and those of others.

A task is one module of this package, or of a package in it, with a `TASK`; the modules are found by themselves.
Those of `tasks.sbibm` are named as in `get("sbibm/two_moons")`, those of `tasks.simformer`, of two models of which any
sites are given, as in `get("simformer/hmm-3")`.

>>> from cpejax import tasks
>>> task = tasks.get("two_moons")
>>> task.theta_dim, task.x_dim, task.observation(0)["x"].shape
(2, 2, (2,))
"""

import pkgutil
from importlib import import_module

from cpejax.tasks import sbibm, simformer
from cpejax.tasks._task import SEEDS, Task

__all__ = ["SEEDS", "Task", "get", "names", "sbibm", "simformer"]


def names() -> list[str]:
    """Names of the paper's nine tasks, in alphabetical order; `sbibm.names()` and
    `simformer.names()` are others.

    >>> from cpejax import tasks
    >>> "slcp" in tasks.names()
    True
    """
    modules = [module for module in pkgutil.iter_modules(__path__) if not module.ispkg]
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def get(name: str) -> Task:
    """The task of that name.

    >>> from cpejax import tasks
    >>> tasks.get("sbibm/sir").parameters
    ('beta', 'gamma')
    """
    if name in sbibm.names():
        return sbibm.get(name)
    if name in simformer.names():
        return simformer.get(name)
    if name not in names():
        known = ", ".join([*names(), *sbibm.names(), *simformer.names()])
        raise ValueError(f"no task {name!r}: the tasks are {known}; see docs/tasks.md to add one")
    task: Task = import_module(f"{__name__}.{name}").TASK
    return task
