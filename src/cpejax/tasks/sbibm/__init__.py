"""The ten tasks of sbi's benchmark (Lueckmann et al. 2021), with its own ten observations and reference draws.

The programs and exact samplers are written here, one module a task with a `TASK`. The observations and reference draws
are data files of the wheel `sbibm` 1.1.0, which `cpejax data sbibm` downloads into the user's cache; nothing of that
package is installed, imported or run. Without the files everything but `observation` and `reference` works.

>>> from cpejax import tasks
>>> task = tasks.get("sbibm/two_moons")
>>> task.theta_dim, task.x_dim
(2, 2)
"""

import pkgutil
from importlib import import_module

from cpejax.tasks.sbibm._data import OBSERVATIONS, download
from cpejax.tasks.sbibm._task import SbibmTask

__all__ = ["OBSERVATIONS", "SbibmTask", "download", "get", "names"]

PREFIX = "sbibm/"


def names() -> list[str]:
    """Names of the ten tasks, as `tasks.get` finds them."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return [PREFIX + name for name in modules]


def get(name: str) -> SbibmTask:
    """The task of that name, one of `names()`."""
    task: SbibmTask = import_module(f"{__name__}.{name.removeprefix(PREFIX)}").TASK
    return task
