"""Distributions as NumPyro wraps them: what is inside, what is masked, what tells them apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions import constraints

from cpejax.program.simulator import Simulator


def unwrap(fn: dist.Distribution) -> dist.Distribution:
    """The distribution inside `expand`, `to_event` and `mask`."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        fn = fn.base_dist
    return fn


def is_masked(fn: dist.Distribution) -> bool:
    """Whether `numpyro.handlers.mask`, or a distribution's `mask`, may hide some values of a site."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        if isinstance(fn, dist.MaskedDistribution) and fn._mask is not True:
            return True
        fn = fn.base_dist
    return isinstance(fn, Simulator) and fn.kept is not None and fn.kept is not True


def mask_of(fn: dist.Distribution) -> Array:
    """Which values of a draw are not masked, `(*batch_shape, *event_shape)`."""
    shape = fn.batch_shape + fn.event_shape
    kept = jnp.ones((), bool)
    if isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        kept = mask_of(fn.base_dist)
    own = fn._mask if isinstance(fn, dist.MaskedDistribution) else fn.kept if isinstance(fn, Simulator) else None
    if own is not None:
        whole = jnp.broadcast_to(jnp.asarray(own, bool), fn.batch_shape)
        kept = kept & whole.reshape(whole.shape + (1,) * len(fn.event_shape))
    return jnp.broadcast_to(kept, shape)


def base_constraint(fn: dist.Distribution) -> constraints.Constraint:
    """The support of `fn`, without the event axes that `to_event` added."""
    support = fn.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def distribution_features(fn: dist.Distribution, value: Array) -> Array:
    """Values that change with the distribution's parameters, shape `(*batch_shape, n)`."""
    base, shape = unwrap(fn), fn.batch_shape
    if isinstance(base, Simulator):
        rows = [r.reshape((*shape, -1)).astype(float) for r in base.rows()]
        return jnp.concatenate([jnp.zeros((*shape, 1)), *rows], axis=-1)
    try:
        return jnp.broadcast_to(unmasked(fn).log_prob(value), shape)[..., None]
    except NotImplementedError:  # a distribution of the user's own that can only be sampled
        return fn(rng_key=jax.random.key(0)).reshape((*shape, -1))


def unmasked(fn: dist.Distribution) -> dist.Distribution:
    """A distribution without its masks, which change the density but not what is drawn."""
    if isinstance(fn, dist.MaskedDistribution):
        return unmasked(fn.base_dist)
    if isinstance(fn, dist.ExpandedDistribution):
        return unmasked(fn.base_dist).expand(fn.batch_shape)
    if isinstance(fn, dist.Independent):
        return unmasked(fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
    return fn
