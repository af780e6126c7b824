"""The posterior's log-density of the true parameters, against those of the prior and of a regression on the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from cpejax.diagnostics.registry import Diagnostic, Finding, register
from cpejax.diagnostics.study import Study
from cpejax.diagnostics.words import p_words
from cpejax.inference.density import evaluate_on_cores
from cpejax.inference.given import check_draws, check_given
from cpejax.inference.posterior import Posterior
from cpejax.inference.sampling import MOST_NUMBERS

FLOOR = 0.05
"""The least weight of the prior, and of the regression, in their mixture."""


@dataclass(frozen=True, eq=False)
class Density:
    """The log-density of the true parameters, minus the prior's: in nats, for each simulated observation.

    - `gain`: by the posterior; `regression`: by a regression on the data, fitted to earlier simulations, for those that
        it predicts.
    - `p`: the p-value of the posterior against the better of prior and regression.
    """

    gain: Float[np.ndarray, " n"]
    regression: Float[np.ndarray, " m"]
    p: float

    @property
    def mean(self) -> float:
        """The mean gain, over those that are finite."""
        return float(self.gain[np.isfinite(self.gain)].mean()) if np.isfinite(self.gain).any() else -math.inf

    @property
    def error(self) -> float:
        """The standard error of the mean gain."""
        finite = self.gain[np.isfinite(self.gain)]
        return float(finite.std() / math.sqrt(len(finite))) if len(finite) else math.inf

    @property
    def infinite(self) -> int:
        """How many gains are not finite."""
        return int((~np.isfinite(self.gain)).sum())

    def to_dict(self) -> dict[str, float | None]:
        """The mean gains, the error and the p-value, as JSON."""
        found = {"gain": self.mean, "error": self.error, "regression": float(self.regression.mean()), "p": self.p}
        return {name: x if math.isfinite(x) else None for name, x in found.items()}


@register
class HeldOut(Diagnostic):
    """Whether the posterior has a lower density than the prior or a regression, where it has one."""

    name, order = "Held-out density", 60.0
    density: Density | None = None

    def tests(self) -> dict[str, float]:
        self.density = measure(self.study)
        return {} if self.density is None else {"density": self.density.p}

    @property
    def ok(self) -> bool:
        return super().ok and (self.density is None or self.density.infinite <= 0.01 * self.study.n)

    def sentence(self, others: Mapping[str, Diagnostic]) -> str | None:
        del others
        density = self.density
        if density is None:
            return None
        no_better = density.mean <= 3 * density.error
        sentence = (
            f"the log-density of the true parameters is {density.mean:.2f} ± {density.error:.2f} above the prior's"
            f"{', no better than it' if no_better else ''}; by a regression on the data "
            f"{density.regression.mean():.2f}."
        )
        if self.bad["density"]:
            than = "the prior" if density.mean < min(0.0, density.regression.mean()) else "a regression"
            sentence = f"worse than {than} (p {p_words(density.p)}): {sentence}"
        if density.infinite:
            sentence += f" It is not finite for {density.infinite} of {len(density.gain):,}."
        return sentence

    def values(self, finding: Finding | None) -> dict[str, Any]:
        del finding
        return {"density": self.density}


def measure(study: Study) -> Density | None:
    """The densities of all simulated observations.

    Given the data, the mean of `r(θ) / q(θ | x)` over a right posterior `q` is the integral of `r`, which is 1 for a
    density. So products over independent simulations have mean 1, and are above `1 / p` with probability at most `p`;
    the mean of two such products too.
    """
    theta, data = ({name: study.rows[name] for name in sites} for sites in (study.graph.parameters, study.graph.data))
    log_q = log_density(study.posterior, theta, data)
    log_prior = None if log_q is None else study.program_density.prior(study.rows)
    if log_q is None or log_prior is None:
        return None
    with np.errstate(invalid="ignore"):
        gain = log_q - log_prior
    begin = study.begin
    regression = study.regression[begin:] if study.program_density.flat else np.full(study.n - begin, -np.inf)
    better = better_guess(log_prior[begin:], regression, [r - begin for r in study.refits]) - log_prior[begin:]
    known = np.isfinite(gain[begin:]) & np.isfinite(better)  # a true value may be rounded out of its support
    prior_ahead, better_ahead = -gain[begin:][known].sum(), (better - gain[begin:])[known].sum()
    p = math.exp(min(0.0, -float(np.logaddexp(prior_ahead, better_ahead) - math.log(2))))
    return Density(gain, better, p)


def log_density(
    posterior: Any, theta: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]
) -> Float[np.ndarray, " n"] | None:
    """The posterior's log-density of one set of parameters for each of `n` observations.

    `None` where there is none that can be compared: none at all; an estimate; or that of proposals, not of draws.
    """
    if not isinstance(posterior, Posterior):
        found = getattr(posterior, "log_prob", None)
        return None if found is None else np.asarray(found(theta, data), np.float64)
    flow = posterior.flow
    if flow.may_leave_support:
        return None
    # `Posterior.log_prob` would raise where a density is not a number; here it is counted.
    given, _ = check_given(posterior, data)
    values, _ = check_draws(posterior, theta, set(given), len(next(iter(given.values()))))
    chunk = max(1, MOST_NUMBERS // (2 * flow.numbers_per_draw()))
    density, error = evaluate_on_cores(flow, values, given, flow.density_options(), chunk)
    return None if error.any() else density[:, 0].astype(np.float64)


def better_guess(
    prior: Float[np.ndarray, " n"], regression: Float[np.ndarray, " n"], blocks: Sequence[int]
) -> Float[np.ndarray, " n"]:
    """The log-density of a mixture of prior and regression, whose weights follow what was better in the blocks before.

    A density in the parameters, given the data and all that came before. `blocks`: where each block begins.
    """
    out = np.empty_like(prior)
    weight = 0.5
    for start, stop in zip(blocks, [*blocks[1:], len(prior)], strict=True):
        now = slice(start, stop)
        out[now] = np.logaddexp(prior[now] + math.log1p(-weight), regression[now] + math.log(weight))
        ahead = np.maximum(regression[:stop], prior[:stop] - 10.0) - prior[:stop]
        weight = 1 - FLOOR if ahead.sum() > 0 else FLOOR
    return out
