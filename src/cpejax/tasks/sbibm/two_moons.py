"""Two moons: two thin crescents, as the task `two_moons`."""

from cpejax.tasks.sbibm._task import SbibmTask
from cpejax.tasks.two_moons import exact, program

TASK = SbibmTask(
    name="sbibm/two_moons",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, T.8",
    exact=exact,
    how="the simulator solved for theta, rejection to the prior's box",
)
