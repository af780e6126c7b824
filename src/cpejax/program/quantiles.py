"""A distribution's draws from standard normal noise, `F⁻¹(Φ(z))`, and the way back.

A probability is held as a pair: its lower and its upper tail, `p` and `q = 1 − p`. In float32 `1 − q` is 1 long before
`q` is 0, so each is computed as itself, and both ends of a distribution are equally accurate. NumPyro's own `icdf`
takes `p` alone, and for some families needs a package that we do not depend on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import betainc, erf, erfc, erfinv, gammainc, gammaincc, ndtr, ndtri
from jaxtyping import Array
from numpyro.distributions import transforms

from cpejax.program.distributions import unwrap

Tails = tuple[Array, Array]


def score(p: Array, q: Array) -> Array:
    """The normal score of a probability. A difference of tails may come out below zero by rounding."""
    p, q = jnp.maximum(p, 0.0), jnp.maximum(q, 0.0)
    return jnp.where(p < q, ndtri(p), -ndtri(q))


def _by_tail(p: Array, q: Array, lower: Any, upper: Any) -> Array:
    return jnp.where(p < q, lower, upper)


def _log_tails(p: Array, q: Array) -> Tails:
    """`log p` and `log q`, each accurate whichever is small."""
    return _by_tail(p, q, jnp.log(p), jnp.log1p(-q)), _by_tail(p, q, jnp.log1p(-p), jnp.log(q))


# Scalar families: the value of a probability, and the probability of a value. `d` is the distribution.


def _exponential(rate: Any, x: Array) -> Tails:
    return -jnp.expm1(-x * rate), jnp.exp(-x * rate)


def _laplace(d: Any, x: Array) -> Tails:
    u = (x - d.loc) / d.scale
    small = 0.5 * jnp.exp(-jnp.abs(u))
    return jnp.where(u < 0, small, 1 - small), jnp.where(u < 0, 1 - small, small)


def _gamma_quantile(d: Any, p: Array, q: Array) -> Array:
    standard = dist.Gamma(d.concentration)
    return _solve(standard, lambda x: (gammainc(d.concentration, x), gammaincc(d.concentration, x)), p, q) / d.rate


def _beta_tails(a: Any, b: Any, x: Array, rest: Array) -> Tails:
    """Of Beta(a, b) at `x = 1 − rest`; the incomplete beta function is taken from the end that is nearer."""
    far = x * (a + b + 2) > a + 1
    small = betainc(jnp.where(far, b, a), jnp.where(far, a, b), jnp.where(far, rest, x))
    return jnp.where(far, 1 - small, small), jnp.where(far, small, 1 - small)


def _beta(d: Any, x: Array) -> Tails:
    return _beta_tails(d.concentration1, d.concentration0, x, 1 - x)


def _student_tails(df: Any, u: Array) -> Tails:
    """`u² / (df + u²)` is Beta(1/2, df/2)."""
    square = jnp.minimum(u * u, jnp.finfo(u.dtype).max)
    inner, outer = _beta_tails(0.5, 0.5 * df, square / (df + square), df / (df + square))
    small, large = 0.5 * outer, 0.5 + 0.5 * inner
    return jnp.where(u < 0, small, large), jnp.where(u < 0, large, small)


def _student_quantile(d: Any, p: Array, q: Array) -> Array:
    standard = dist.StudentT(d.df)
    return d.loc + d.scale * _solve(standard, lambda u: _student_tails(d.df, u), p, q)


def _kumaraswamy_tails(d: Any, x: Array) -> Tails:
    log_q = d.concentration0 * jnp.log1p(-(x**d.concentration1))
    return -jnp.expm1(log_q), jnp.exp(log_q)


def _ends(d: Any) -> tuple[Tails, Tails, Array]:
    """Of a truncated distribution: the tails of the base at both ends, and the probability between them."""
    zero, one = jnp.zeros(()), jnp.ones(())
    low = _tails(d.base_dist, jnp.asarray(d.low, float)) if hasattr(d, "low") else (zero, one)
    high = _tails(d.base_dist, jnp.asarray(d.high, float)) if hasattr(d, "high") else (one, zero)
    return low, high, _by_tail(*low, high[0] - low[0], low[1] - high[1])


def _truncated_quantile(d: Any, p: Array, q: Array) -> Array:
    low, high, between = _ends(d)
    return _quantile(d.base_dist, low[0] + p * between, high[1] + q * between)


def _truncated_tails(d: Any, x: Array) -> Tails:
    low, high, between = _ends(d)
    p, q = _tails(d.base_dist, x)
    above_low = _by_tail(*low, p - low[0], low[1] - q) / between
    below_high = _by_tail(*high, high[0] - p, q - high[1]) / between
    return above_low, below_high


_Family = tuple[Callable[[Any, Array, Array], Array], Callable[[Any, Array], Tails]]
_FAMILIES: dict[type, _Family] = {
    dist.Normal: (
        lambda d, p, q: d.loc + d.scale * score(p, q),
        lambda d, x: (ndtr((x - d.loc) / d.scale), ndtr((d.loc - x) / d.scale)),
    ),
    dist.Uniform: (
        lambda d, p, q: _by_tail(p, q, d.low + (d.high - d.low) * p, d.high - (d.high - d.low) * q),
        lambda d, x: ((x - d.low) / (d.high - d.low), (d.high - x) / (d.high - d.low)),
    ),
    dist.HalfNormal: (
        lambda d, p, q: d.scale * _by_tail(p, q, math.sqrt(2) * erfinv(p), -ndtri(0.5 * q)),
        lambda d, x: (erf(x / (math.sqrt(2) * d.scale)), erfc(x / (math.sqrt(2) * d.scale))),
    ),
    dist.Exponential: (lambda d, p, q: -_log_tails(p, q)[1] / d.rate, lambda d, x: _exponential(d.rate, x)),
    dist.Laplace: (
        lambda d, p, q: d.loc + d.scale * _by_tail(p, q, jnp.log(2 * p), -jnp.log(2 * q)),
        _laplace,
    ),
    dist.Logistic: (
        lambda d, p, q: d.loc + d.scale * (jnp.log(p) - jnp.log(q)),
        lambda d, x: (jax.nn.sigmoid((x - d.loc) / d.scale), jax.nn.sigmoid((d.loc - x) / d.scale)),
    ),
    dist.SoftLaplace: (
        lambda d, p, q: d.loc + d.scale * _by_tail(p, q, _log_tan(p), -_log_tan(q)),
        lambda d, x: (
            2 / math.pi * jnp.arctan(jnp.exp((x - d.loc) / d.scale)),
            2 / math.pi * jnp.arctan(jnp.exp((d.loc - x) / d.scale)),
        ),
    ),
    dist.Cauchy: (
        lambda d, p, q: d.loc + d.scale * _by_tail(p, q, -1 / jnp.tan(math.pi * p), 1 / jnp.tan(math.pi * q)),
        lambda d, x: (jnp.arctan2(d.scale, d.loc - x) / math.pi, jnp.arctan2(d.scale, x - d.loc) / math.pi),
    ),
    dist.HalfCauchy: (
        lambda d, p, q: d.scale * _by_tail(p, q, jnp.tan(math.pi / 2 * p), 1 / jnp.tan(math.pi / 2 * q)),
        lambda d, x: (2 / math.pi * jnp.arctan2(x, d.scale), 2 / math.pi * jnp.arctan2(d.scale, x)),
    ),
    dist.Gumbel: (
        lambda d, p, q: d.loc - d.scale * jnp.log(-_log_tails(p, q)[0]),
        lambda d, x: _exponential(1.0, jnp.exp((d.loc - x) / d.scale))[::-1],
    ),
    dist.Weibull: (
        lambda d, p, q: d.scale * (-_log_tails(p, q)[1]) ** (1 / d.concentration),
        lambda d, x: _exponential(1.0, (x / d.scale) ** d.concentration),
    ),
    dist.Kumaraswamy: (
        lambda d, p, q: (-jnp.expm1(_log_tails(p, q)[1] / d.concentration0)) ** (1 / d.concentration1),
        _kumaraswamy_tails,
    ),
    dist.Gamma: (
        _gamma_quantile,
        lambda d, x: (gammainc(d.concentration, x * d.rate), gammaincc(d.concentration, x * d.rate)),
    ),
    dist.Beta: (lambda d, p, q: _solve(d, lambda x: _beta(d, x), p, q), _beta),
    dist.StudentT: (_student_quantile, lambda d, x: _student_tails(d.df, (x - d.loc) / d.scale)),
    **dict.fromkeys(
        (
            dist.truncated.LeftTruncatedDistribution,
            dist.truncated.RightTruncatedDistribution,
            dist.truncated.TwoSidedTruncatedDistribution,
        ),
        (_truncated_quantile, _truncated_tails),
    ),
}


def _log_tan(p: Array) -> Array:
    return jnp.log(jnp.tan(math.pi / 2 * p))


def _is(base: dist.Distribution, *families: Any) -> bool:
    """Whether a distribution is of a family. A subclass that draws otherwise is not."""
    return any(isinstance(base, family) and type(base).sample is family.sample for family in families)


def _family(base: dist.Distribution) -> _Family:
    """How to go to and from probabilities; from the cdf where the family is not listed."""
    for cls in _FAMILIES:
        if _is(base, cls):
            return _FAMILIES[cls]

    def tails(d: Any, x: Array) -> Tails:
        p = d.cdf(x)
        return p, 1 - p

    return lambda d, p, q: _solve(d, lambda x: tails(d, x), p, q), tails


def _quantile(base: dist.Distribution, p: Array, q: Array) -> Array:
    return _family(base)[0](base, p, q)


def _tails(base: dist.Distribution, x: Array) -> Tails:
    return _family(base)[1](base, x)


def _solve(base: dist.Distribution, tails: Callable[[Array], Tails], p: Array, q: Array) -> Array:
    """The value that has these tails: Newton's method on the normal score, with halving where it leaves its bracket.

    The bracket is halved in the order of the floating-point numbers, not in their value, so that 32 halvings find any
    of them, whatever the scale.
    """
    z = score(p, q)
    low, high = inside(base)
    try:
        mean = jnp.asarray(base.mean, z.dtype)
    except NotImplementedError:
        mean = jnp.full((), jnp.nan, z.dtype)
    shape = jnp.broadcast_shapes(z.shape, jnp.shape(low), jnp.shape(high), mean.shape, base.batch_shape)
    z, low, high, mean = (jnp.broadcast_to(jnp.asarray(a, z.dtype), shape) for a in (z, low, high, mean))
    start = jnp.where((mean > low) & (mean < high), mean, _middle(low, high))

    def unfinished(state: tuple) -> Array:
        return (state[0] < 100) & jnp.any(~state[-1])

    def step(state: tuple) -> tuple:
        i, low, high, x, done = state
        at = score(*tails(x))
        below = at < z
        low, high = jnp.where(below & ~done, x, low), jnp.where(below | done, high, x)
        newton = x - (at - z) * jnp.exp(-0.5 * at**2 - 0.5 * math.log(2 * math.pi) - base.log_prob(x))
        halved = _middle(low, high)
        take = (newton > low) & (newton < high) & (i % 3 < 2)  # every third step halves: the end is certain
        near = jnp.abs(at - z) < 2e-7 * (1 + jnp.abs(z))
        closed = (halved <= low) | (halved >= high)
        done = done | near | closed
        return i + 1, low, high, jnp.where(done, x, jnp.where(take, newton, halved)), done

    state = jax.lax.while_loop(unfinished, step, (0, low, high, start, jnp.zeros(shape, bool)))
    return state[3]


def _order(x: Array) -> Array:
    """The number of a float in the order of all floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32 if x.dtype == jnp.float32 else jnp.int64)
    return jnp.where(bits < 0, jnp.iinfo(bits.dtype).min - bits, bits)


def _float(number: Array) -> Array:
    """The inverse of `_order`."""
    bits = jnp.where(number < 0, jnp.iinfo(number.dtype).min - number, number)
    return jax.lax.bitcast_convert_type(bits, jnp.float32 if number.dtype == jnp.int32 else jnp.float64)


def _middle(low: Array, high: Array) -> Array:
    a, b = _order(low), _order(high)
    return _float((a & b) + ((a ^ b) >> 1))


def inside(base: dist.Distribution) -> tuple[Any, Any]:
    """The smallest and the largest number strictly inside the support of a scalar family, else infinities."""
    support: Any = base.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    if support.event_dim:
        return -jnp.inf, jnp.inf
    dtype = jnp.result_type(float)
    info = jnp.finfo(dtype)
    low, high = jnp.asarray(-info.max, dtype), jnp.asarray(info.max, dtype)
    if hasattr(support, "lower_bound"):
        bound = jnp.asarray(support.lower_bound, dtype)
        # Numbers below `tiny` are zero to the processor. Bounds that are the same number have nothing between them.
        after = jnp.where(jnp.abs(bound) < info.tiny, info.tiny, _float(_order(bound) + 1))
        low = jnp.minimum(after, getattr(support, "upper_bound", info.max))
    if hasattr(support, "upper_bound"):
        bound = jnp.asarray(support.upper_bound, dtype)
        before = jnp.where(jnp.abs(bound) < info.tiny, -info.tiny, _float(_order(bound) - 1))
        high = jnp.maximum(before, getattr(support, "lower_bound", -info.max))
    return low, high


class _StudentT(dist.StudentT):
    def icdf(self, q: Any) -> Array:
        return _quantile(self, q, 1 - q)


def drawable(fn: dist.Distribution) -> dist.Distribution:
    """A distribution like `fn` that can be drawn from.

    NumPyro draws a truncated Student-t, alone or in a wrapper, by a function of a package that we do not depend on.
    """
    base = getattr(fn, "base_dist", None)
    if base is None:
        return fn
    truncated = hasattr(fn, "low") or hasattr(fn, "high")
    new = _StudentT(base.df, base.loc, base.scale) if truncated and type(base) is dist.StudentT else drawable(base)
    if new is base:
        return fn
    out = copy.copy(fn)
    out.base_dist = new
    return out


def from_normal(fn: dist.Distribution, z: Array) -> Array:
    """The value that noise `z` gives: `F⁻¹(Φ(z))`, of the shape of a draw, strictly inside the support."""
    base = unwrap(fn)
    if isinstance(base, dist.TransformedDistribution):
        x = from_normal(base.base_dist, z)
        for transform in base.transforms:
            x = transform(x)
        return jnp.clip(x, *inside(base))
    if _is(base, dist.Normal):
        return base.loc + base.scale * z
    if _is(base, dist.GaussianRandomWalk):
        return jnp.cumsum(z, axis=-1) * jnp.expand_dims(base.scale, -1)
    if _is(base, *_MULTIVARIATE):
        return base.loc + jnp.einsum("...ij,...j->...i", _cholesky(base), z)
    z = jnp.clip(z, -limit(base), limit(base))
    return jnp.clip(_quantile(base, ndtr(z), ndtr(-z)), *inside(base))


def to_normal(fn: dist.Distribution, x: Array) -> Array:
    """The noise that gives `x`: the inverse of `from_normal`."""
    base = unwrap(fn)
    if isinstance(base, dist.TransformedDistribution):
        x = jnp.clip(x, *inside(base))
        for transform in reversed(base.transforms):
            x = transform.inv(x)
        return to_normal(base.base_dist, x)
    if _is(base, dist.Normal):
        return (x - base.loc) / base.scale
    if _is(base, dist.GaussianRandomWalk):
        return jnp.diff(x, axis=-1, prepend=0.0) / jnp.expand_dims(base.scale, -1)
    if _is(base, *_MULTIVARIATE):
        centred = x - base.loc
        tril = jnp.broadcast_to(_cholesky(base), centred.shape + centred.shape[-1:])
        return jax.lax.linalg.triangular_solve(tril, centred[..., None], left_side=True, lower=True)[..., 0]
    return jnp.clip(score(*_tails(base, jnp.clip(x, *inside(base)))), -limit(base), limit(base))


_MULTIVARIATE = (dist.MultivariateNormal, dist.LowRankMultivariateNormal)


def _cholesky(base: Any) -> Array:
    low_rank = isinstance(base, dist.LowRankMultivariateNormal)
    return jnp.linalg.cholesky(base.covariance_matrix) if low_rank else base.scale_tril


def is_exact(fn: dist.Distribution) -> bool:
    """Whether a family's draws are made from normal noise. The others go by the bijection of their support."""
    base = unwrap(fn)
    if isinstance(base, dist.TransformedDistribution):
        return not any(isinstance(t, transforms.AbsTransform) for t in base.transforms) and is_exact(base.base_dist)
    if _is(base, *_MULTIVARIATE, dist.GaussianRandomWalk):
        return True
    if base.event_shape or not (_is(base, *_FAMILIES) or _cdf_is_its_own(base)):
        return False
    try:
        jax.eval_shape(lambda x: _tails(base, x), jax.ShapeDtypeStruct(base.batch_shape, jnp.result_type(float)))
    except (NotImplementedError, ImportError):  # no cdf, or one from another package
        return False
    return True


def _cdf_is_its_own(base: dist.Distribution) -> bool:
    """A cdf that a subclass has inherited does not go with draws of its own."""
    by = next(cls for cls in type(base).__mro__ if "cdf" in vars(cls))
    return "sample" not in vars(by) or type(base).sample is by.sample  # type: ignore[attr-defined]


def limit(fn: dist.Distribution) -> float:
    """Noise beyond ±`limit` gives the same value as at it.

    Of a family that has only a cdf, or lies between two numbers, float32 resolves the upper end to 6e-8.
    """
    base = unwrap(fn)
    if isinstance(base, dist.TransformedDistribution):
        return limit(base.base_dist)
    if _is(base, dist.Normal, *_MULTIVARIATE, dist.GaussianRandomWalk):
        return math.inf
    family = _family(base)
    two_ends = _is(base, dist.Uniform) or family[0] is _truncated_quantile
    return 8.0 if family in _FAMILIES.values() and not two_ends else 5.2


def is_curved(fn: dist.Distribution) -> bool:
    """Whether values grow faster than the noise that gives them, without bound, so that none can be extrapolated."""
    base = unwrap(fn)
    if isinstance(base, dist.TransformedDistribution):
        curved = any(not isinstance(t, transforms.AffineTransform) for t in base.transforms)
        return (curved or is_curved(base.base_dist)) and not _is_bounded(base)
    normal = _is(base, dist.Normal, dist.HalfNormal, *_MULTIVARIATE, dist.GaussianRandomWalk)
    return not normal and not _is_bounded(base)


def _is_bounded(base: dist.Distribution) -> bool:
    support: Any = base.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return hasattr(support, "lower_bound") and hasattr(support, "upper_bound")
