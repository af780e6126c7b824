"""How far draws are from a reference posterior: a file for each metric.

Every metric takes `(draws, reference)`: matrices `(n, d)`, vectors `(n,)`, dicts `{site: (n, *shape)}`, or ArviZ
DataTrees (their `posterior`). The longer set is cut to the length of the shorter by a fixed random choice. A metric
whose value for a perfect sampler is not known in advance returns a `Score`: the value, and beside it the *null*, the
same metric between two disjoint parts of the reference of the same size. Whether a posterior can be trusted when no
reference is known is the question of `diagnostics`.
"""

from cpejax.metrics.c2st import c2st
from cpejax.metrics.hmin import hmin
from cpejax.metrics.mmd import mmd
from cpejax.metrics.moments import Moments, moments
from cpejax.metrics.samples import Score
from cpejax.metrics.sliced_wasserstein import sliced_wasserstein

__all__ = ["Moments", "Score", "c2st", "hmin", "mmd", "moments", "sliced_wasserstein"]
