"""Simple likelihood, complex posterior, as the task `slcp`.

The original adds 1e-6 to both variances, for the sake of a Cholesky factorisation that this program does without.
That is seen only where a standard deviation is below .01 or so, and not in any of the ten posteriors.
"""

from cpejax.tasks.sbibm._task import SbibmTask
from cpejax.tasks.slcp import exact, program

TASK = SbibmTask(
    name="sbibm/slcp",
    program=program,
    observed=("x",),
    source="Lueckmann et al. 2021, T.3",
    exact=exact,
    how="rejection from a normal-inverse-Wishart",
)
