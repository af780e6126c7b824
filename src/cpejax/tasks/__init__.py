"""Nine benchmark tasks (paper, appendix B): NumPyro programs with a tractable likelihood and known posteriors.

A task is one module of this package with a `TASK`; the modules are found by themselves.

>>> from cpejax import tasks
>>> task = tasks.get("two_moons")
>>> task.theta_dim, task.x_dim, task.observation(0)["x"].shape
(2, 2, (2,))
"""

import pkgutil
from importlib import import_module

from cpejax.tasks._task import SEEDS, Task

__all__ = ["SEEDS", "Task", "get", "names"]


def names() -> list[str]:
    """Names of the tasks, in alphabetical order.

    >>> from cpejax import tasks
    >>> "slcp" in tasks.names()
    True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def get(name: str) -> Task:
    """The task of that name."""
    if name not in names():
        raise ValueError(f"no task {name!r}: the tasks are {', '.join(names())}; see docs/tasks.md to add one")
    task: Task = import_module(f"{__name__}.{name}").TASK
    return task
