"""Keys, from which all that is random comes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray


def check_key(key: Any) -> PRNGKeyArray:
    """A JAX key, typed or not, as a typed one."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(key))
    found = f"{type(key).__name__} of shape {key.shape}" if hasattr(key, "shape") else f"{key!r}"
    raise TypeError(f"key must be one JAX key, as jax.random.key(0) makes it; found {found}.")


def key_words(key: PRNGKeyArray) -> list[int]:
    """The numbers that a key consists of: what a file says of it, and the seed of a NumPy generator."""
    return [int(w) for w in np.asarray(jax.random.key_data(key)).ravel()]
