"""Settings shared by all tests.

Do not import `cpejax` at the top of this file: the import hook that checks jaxtyping annotations (`addopts` in
`pyproject.toml`) is installed after it is read, and must come before the package is imported.
"""

import hypothesis
import matplotlib

matplotlib.use("Agg")

# JAX's `jax_numpy_rank_promotion="raise"` stays off: NumPyro itself promotes ranks, for instance in
# `Normal(loc, 1.0).sample(key, (5,))` with a vector `loc` and wherever two plates are nested.

# A deadline would time JAX's compilation; random examples would let a change fail for reasons that are not its own.
hypothesis.settings.register_profile("cpejax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("cpejax")
