"""The devices that a program is run on: one, or several that share the rows of each batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

ROWS = "rows"
"""The axis of a mesh along which the rows of a batch are divided."""


class Devices:
    """The devices of training: `count` of those that JAX has, over all processes of `jax.distributed`.

    **Arguments:** `count`: `None` for all accelerators, or one CPU in each process.

    Every device has all weights and all simulations, and a share of each batch; what is computed is what one device
    would compute, up to rounding.
    """

    mesh: Mesh | None

    def __init__(self, count: int | None):
        found = jax.devices()
        if count is None:
            count = len(found) if found[0].platform != "cpu" or jax.process_count() > 1 else 1
        if count > len(found):
            raise ValueError(
                f"devices={count}, but JAX has {len(found)} ({found[0].platform}). A CPU counts as several with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={count} in the environment."
            )
        if jax.process_count() > 1 and count < len(found):
            raise ValueError(f"devices={count}, but the {jax.process_count()} processes have {len(found)}: use all.")
        self.count = count
        self.mesh = None if count == 1 else jax.make_mesh((count,), (ROWS,), (AxisType.Auto,), devices=found[:count])

    @property
    def writes(self) -> bool:
        """Whether this process writes files: the first does."""
        return jax.process_index() == 0

    def check_batch(self, batch: int) -> None:
        """A batch can be divided."""
        if batch % self.count:
            raise ValueError(f"batch_size={batch} cannot be divided among {self.count} devices: give a multiple.")

    def everywhere(self, tree: Any) -> Any:
        """The arrays of a tree on all devices; as they are where there is one."""
        if self.mesh is None:
            return tree
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: _placed(x, whole) if isinstance(x, jax.Array | np.ndarray) else x, tree)

    def shared(self, rows: Any) -> Any:
        """Inside a compiled program: the rows of a batch, a share on each device."""
        if self.mesh is None:
            return rows
        sharding = NamedSharding(self.mesh, PartitionSpec(ROWS))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), rows)

    def here(self, tree: Any) -> Any:
        """Arrays that are the same on all devices, on this process's default device."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: jnp.asarray(_local(x)) if isinstance(x, jax.Array) else x, tree)


def _local(x: Any) -> Any:
    """The value of an array that is whole on every device; of random keys their words are wrapped again."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_local(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return np.asarray(x.addressable_data(0))


def _placed(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_placed(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x  # of a step before: it is there already
    value = np.asarray(x)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
