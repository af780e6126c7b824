"""Values of any scale and tail as values of order one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

ROWS = 100_000
"""Number of rows that give quantiles exact enough."""


class Fixed(eqx.Module):
    """A module whose arrays are set by the simulations, not trained."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Where columns are and how wide, robustly: what standardisation reads of reference rows, in float64.

    `scale` is the interquartile range in units of a normal's standard deviation. `heavy`: the columns that go beyond
    ±10 of it; `knots`: their quantiles at the normal `scores`.
    """

    centre: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"]
    heavy: tuple[int, ...]
    knots: Float[np.ndarray, "heavy q"]
    scores: Float[np.ndarray, " q"]

    @classmethod
    def of(cls, rows: np.ndarray, heavy: Sequence[int] | None = None) -> Columns:
        """The columns of `rows`, `(n, d)`; `heavy`: which of them are heavy-tailed, if that is known already."""
        rows = np.asarray(rows, np.float64)
        low, centre, high = np.quantile(rows, [0.25, 0.5, 0.75], axis=0)
        scale = (high - low) / 1.349
        scale = np.where(scale > 0, scale, rows.std(0))
        scale = np.where(scale > 0, scale, 1.0)
        furthest = np.abs((rows - centre) / scale).max(0)
        which = [int(i) for i in (np.flatnonzero(furthest > 10) if heavy is None else heavy)]
        last = NormalDist().inv_cdf(1 - 0.5 / len(rows))
        scores = np.linspace(-last, last, 129)
        p = [NormalDist().cdf(score) for score in scores]
        return cls(centre, scale, tuple(which), np.quantile(rows[:, which], p, axis=0).T, scores)


class Standardise(Fixed):
    """Columns to values of order one, whatever their scale and tails.

    Each column is centred by its median and scaled by its interquartile range, and clipped at ±15. Where the
    simulations themselves go beyond ±10 (heavy tails, scales over decades), a second feature is added: the normal score
    of the empirical quantile, which keeps the ranks that the clipping loses, up to the largest simulated value.
    """

    centre: Float[Array, " d"]
    scale: Float[Array, " d"]
    knots: Float[Array, "heavy q"]  # quantiles, in units of `scale`; not centred, so that small values stay apart
    scores: Float[Array, " q"]
    heavy: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, rows: np.ndarray, heavy: Sequence[int] | None = None):
        """Standardise by `rows`, simulated values `(..., d)`, of which no more than `ROWS` are looked at.

        `heavy`: which columns are heavy-tailed, if that is known already.
        """
        rows = np.asarray(rows).reshape(-1, rows.shape[-1])
        some = np.linspace(0, len(rows) - 1, min(len(rows), ROWS)).astype(int)
        columns = Columns.of(rows[some], heavy)
        self.heavy = columns.heavy
        self.knots = jnp.asarray(columns.knots / columns.scale[list(self.heavy)][:, None], jnp.float32)
        self.scores = jnp.asarray(columns.scores, jnp.float32)
        self.centre, self.scale = jnp.asarray(columns.centre, jnp.float32), jnp.asarray(columns.scale, jnp.float32)

    @property
    def size(self) -> int:
        """How many features the columns become."""
        return len(self.centre) + len(self.heavy)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch f"]:
        """All features: the clipped columns, then the scores of the heavy ones."""
        return jnp.concatenate([self._linear(x), self._scores(x)], axis=-1) if self.heavy else self._linear(x)

    def one_each(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """One value a column, for embeddings that know the value's shape: the score where the column is heavy."""
        linear = self._linear(x)
        return linear.at[..., list(self.heavy)].set(self._scores(x)) if self.heavy else linear

    def undo_one_each(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The values of `one_each`; of heavy-tailed columns within what was simulated."""
        x = self.centre + self.scale * y
        if not self.heavy:
            return x
        which = list(self.heavy)
        scaled = jax.vmap(jnp.interp, in_axes=(-1, None, 0), out_axes=-1)(y[..., which], self.scores, self.knots)
        return x.at[..., which].set(scaled * self.scale[jnp.asarray(which)])

    def _linear(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return jnp.clip((x - self.centre) / self.scale, -15.0, 15.0)

    def _scores(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch heavy"]:
        which = list(self.heavy)
        scaled = x[..., which] / self.scale[jnp.asarray(which)]
        return jax.vmap(jnp.interp, in_axes=(-1, 0, None), out_axes=-1)(scaled, self.knots, self.scores)
