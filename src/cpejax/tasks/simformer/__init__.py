"""Conditionals of two models, whichever sites are given (Gloeckler et al. 2024, *All-in-one simulation-based
inference*).

`simformer/tree-0` to `-5` and `simformer/hmm-0` to `-5` are six sets of given sites of each model: first all data, then
sets that are drawn at random with the set's number as the seed, each site with probability .3 (1 to 3) or .7 (4, 5), as
in the original. The others of the original's sets, all parameters and none, are left out: there the rest is a
simulation. A method that conditions on any set is fitted to the model once, others to each set (`for_set`).

>>> from cpejax import tasks
>>> task = tasks.get("simformer/tree-4")
>>> task.observed, task.parameters
(('theta2', 'x1', 'x2', 'x3'), ('theta1', 'theta3', 'x4'))
"""

from functools import cache

import numpy as np

from cpejax.tasks.simformer import hmm, tree
from cpejax.tasks.simformer._task import ConditionalTask

__all__ = ["ConditionalTask", "get", "names"]

PREFIX = "simformer/"
SETS = 6
MODELS = {"tree": tree, "hmm": hmm}
SOURCE = "Gloeckler et al. 2024, All-in-one simulation-based inference"


def names() -> list[str]:
    """Names of the tasks, a set of given sites each, as `tasks.get` finds them."""
    return [f"{PREFIX}{model}-{number}" for model in MODELS for number in range(SETS)]


@cache
def get(name: str) -> ConditionalTask:
    """The task of that name, one of `names()`."""
    which, number = name.removeprefix(PREFIX).split("-")
    model = MODELS[which]
    return ConditionalTask(
        name=name,
        program=model.program,
        observed=given_sites(which, int(number)),
        data=model.DATA,
        parents=model.PARENTS,
        source=SOURCE,
        exact=model.exact,
        how=model.HOW,
    )


def given_sites(which: str, number: int) -> tuple[str, ...]:
    """The sites that are given in the set of that number."""
    model = MODELS[which]
    if number == 0:
        return model.DATA
    rng = np.random.default_rng(number)
    while True:
        chosen = rng.uniform(size=len(model.PARENTS)) < (0.3 if number <= 3 else 0.7)
        given = tuple(site for site, inside in zip(model.PARENTS, chosen, strict=True) if inside)
        task = ConditionalTask(
            name=which, program=model.program, observed=given, data=model.DATA, parents=model.PARENTS, source=SOURCE
        )
        if len(given) < len(model.PARENTS) and len(task.first) < len(given):  # else a simulation is all there is to do
            return given
