"""Gaussian linear: ten independent conjugate pairs, as the task `linear_gaussian`."""

from cpejax.tasks.linear_gaussian import exact, program
from cpejax.tasks.sbibm._task import SbibmTask

TASK = SbibmTask(
    name="sbibm/gaussian_linear",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, T.1",
    exact=exact,
    how="conjugate",
)
