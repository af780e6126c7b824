"""Bijections from free coordinates to supports, for families whose draws are not made from normal noise.

NumPyro's, except where those lose the small values: `1 − cumsum(x)` of a sparse simplex, or of the squares in a row of
a nearly singular correlation matrix, is noise in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions import biject_to, constraints, transforms
from numpyro.distributions.util import matrix_to_tril_vec, vec_to_tril_matrix

from cpejax.program.distributions import unwrap
from cpejax.program.quantiles import inside


class Simplex(transforms.StickBreakingTransform):
    """Stick breaking, with what remains of the stick as the sum of its pieces."""

    def __call__(self, x: Array) -> Array:
        x = x - _balance(x)
        rest = jnp.cumprod(jax.nn.sigmoid(-x), axis=-1)
        before = jnp.concatenate([jnp.ones_like(x[..., :1]), rest[..., :-1]], axis=-1)
        y = jnp.concatenate([jax.nn.sigmoid(x) * before, rest[..., -1:]], axis=-1)
        return y / y.sum(-1, keepdims=True)

    def _inverse(self, y: Array) -> Array:
        y = jnp.maximum(y, jnp.finfo(y.dtype).tiny)
        rest = jnp.flip(jnp.cumsum(jnp.flip(y[..., 1:], -1), axis=-1), -1)
        x = jnp.log(y[..., :-1]) - jnp.log(rest)
        return x + _balance(x)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:  # noqa: ARG002
        x = x - _balance(x)
        after = jnp.arange(x.shape[-1])[::-1]
        return jnp.sum(jax.nn.log_sigmoid(x) + (1 + after) * jax.nn.log_sigmoid(-x), axis=-1)


def _balance(x: Array) -> Array:
    """Zero is the centre of the simplex."""
    return jnp.log(x.shape[-1] - jnp.arange(x.shape[-1]))


class CorrCholesky(transforms.CorrCholeskyTransform):
    """Rows of unit length: `y_ij = tanh(x_ij) Π_(l<j) sech(x_il)`.

    The product of a factor and its transpose is less robust: float32 does not hold a nearly singular matrix.
    """

    def __call__(self, x: Array) -> Array:
        free = vec_to_tril_matrix(x, diagonal=-1)
        rest = jnp.cumprod(1 / jnp.cosh(free), axis=-1)
        before = jnp.concatenate([jnp.ones_like(rest[..., :1]), rest[..., :-1]], axis=-1)
        eye = jnp.eye(free.shape[-1])
        diagonal = jnp.maximum(before, 1e-15)
        y = jnp.tanh(free) * before * (1 - eye) + diagonal * eye
        return y / jnp.linalg.norm(y, axis=-1, keepdims=True)

    def _inverse(self, y: Array) -> Array:
        # sinh(x_ij) is the entry over the length of the row behind it.
        square = jnp.tril(y) ** 2
        behind = jnp.flip(jnp.cumsum(jnp.flip(square, -1), axis=-1), -1)[..., 1:]
        behind = matrix_to_tril_vec(jnp.concatenate([behind, square[..., -1:]], axis=-1), diagonal=-1)
        return jnp.arcsinh(matrix_to_tril_vec(y, diagonal=-1) / jnp.sqrt(behind))

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:  # noqa: ARG002
        rows, columns = jnp.tril_indices(y.shape[-1], -1)
        log_sech = jnp.log(2.0) - jnp.abs(x) - jnp.log1p(jnp.exp(-2 * jnp.abs(x)))
        return jnp.sum((1 + rows - columns) * log_sech, axis=-1)


def bijection(fn: dist.Distribution) -> Any:
    """The bijection from free coordinates to the support of a distribution."""
    return _to(fn.support)


def _to(support: Any) -> Any:
    if isinstance(support, constraints.independent):
        return transforms.IndependentTransform(_to(support.base_constraint), support.reinterpreted_batch_ndims)
    if isinstance(support, type(constraints.simplex)):
        return Simplex()
    if isinstance(support, type(constraints.corr_cholesky)):
        return CorrCholesky()
    if isinstance(support, type(constraints.corr_matrix)):
        return transforms.ComposeTransform([CorrCholesky(), transforms.CorrMatrixCholeskyTransform().inv])
    return biject_to(support)


def from_free(fn: dist.Distribution, free: Array) -> Array:
    """The value of free coordinates, inside the support."""
    return jnp.clip(bijection(fn)(free), *inside(unwrap(fn)))


def to_free(fn: dist.Distribution, x: Array) -> Array:
    """The free coordinates of a value."""
    return bijection(fn).inv(jnp.clip(x, *inside(unwrap(fn))))
