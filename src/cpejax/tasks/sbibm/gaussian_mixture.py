"""Gaussian mixture: one location, a wide and a narrow component around it, as the task `gaussian_mixture_1`."""

from cpejax.tasks.gaussian_mixture_1 import exact, program
from cpejax.tasks.sbibm._task import SbibmTask

TASK = SbibmTask(
    name="sbibm/gaussian_mixture",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, T.7",
    exact=exact,
    how="mixture of truncated Gaussians",
)
