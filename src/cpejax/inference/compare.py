"""`cpe.compare`: which of several models an observation speaks for, by their evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray
from scipy.special import softmax

from cpejax.coordinates.data import DataCoordinates, is_whole
from cpejax.inference.given import check_given
from cpejax.inference.posterior import Posterior
from cpejax.inference.refine import HIGHEST_K, MOST_ERROR, refine_each
from cpejax.program.simulations import check_count
from cpejax.util.keys import check_key, key_words

LEVEL = 0.9
"""Of the intervals of probabilities."""
ERRORS = 10_000
"""Draws of the evidences' errors, by which intervals are computed."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The evidence of models for one observation.

    `table` has a row for each model, the best first:

    - `log_evidence`, `log_evidence_error`: the log-density of the data under the model, and its standard error.
    - `effective_sample_size`, `pareto_k`: of the weights it is computed by; see docs/refinement.md.
    - `log_bayes_factor`: `log_evidence` less that of the best.
    - `prior`, `probability`: of the model, before and after the data.
    - `probability_low`, `probability_high`: between which the probability is, given the errors of the evidences, with
        90 %.
    - `likelihood`: what the evidence is computed by.
    """

    table: pd.DataFrame

    @property
    def best(self) -> str:
        """The model with the highest evidence."""
        return str(self.table.index[0])

    @property
    def doubtful(self) -> list[str]:
        """The models whose evidence cannot be relied upon: their Pareto k is above .7, or its error above .5."""
        good = (self.table["pareto_k"] <= HIGHEST_K) & (self.table["log_evidence_error"] <= MOST_ERROR)
        return [str(name) for name in self.table.index[~good]]

    def __str__(self) -> str:
        rows = [("model", "log evidence", "log Bayes factor", f"probability ({LEVEL:.0%})", "Pareto k")]
        for name, row in self.table.iterrows():
            between = f"[{row['probability_low']:.3f}, {row['probability_high']:.3f}]"
            rows.append(
                (
                    str(name),
                    f"{row['log_evidence']:.2f} ± {row['log_evidence_error']:.2f}",
                    f"{row['log_bayes_factor']:.2f}",
                    f"{row['probability']:.3f} {between}",
                    f"{row['pareto_k']:.2f}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.doubtful:
            lines.append(
                f"The evidence of {', '.join(self.doubtful)} cannot be relied upon: Pareto k above {HIGHEST_K}, or "
                f"an error above {MOST_ERROR}. Fit with more simulations, or compare with more draws (n=)."
            )
        return "\n".join(lines)


def compare(
    models: Mapping[str, Posterior],
    given: Mapping[str, Any],
    *,
    key: PRNGKeyArray,
    n: int = 10_000,
    prior: Mapping[str, float] | None = None,
    refine: bool | str = True,
) -> Comparison:
    """Compare models of the same data by their evidence.

    **Arguments:**

    - `models`: fitted posteriors by name. Parameters may differ; data sites and their shapes must not.
    - `given`: one observation, `{site: array}`.
    - `key`: a JAX key.
    - `n`: draws of each posterior by which its evidence is computed.
    - `prior`: the weight of each model before the data, `{name: number}`; equal ones by default.
    - `refine`: by which likelihood, as for `Posterior.sample`: `True`, `"program"` or `"learned"`.

    **Returns:** a `Comparison`: `print` it, look at its `table`, or draw it with `cpe.plot.evidence`.

    Evidence depends on the priors of parameters, also where the posterior does not: a prior that is ten times as wide
    as the data need costs a factor of about ten for each parameter.

    >>> result = cpe.compare({"a": posterior, "b": posterior}, given={"y": [0.3, 1.2, -0.4]}, key=jax.random.key(4))
    >>> list(result.table.index), bool(abs(result.table["probability"].sum() - 1) < 1e-6)
    (['a', 'b'], True)
    """
    weights = _check(models, given, prior, refine)
    check_count(n, "n, the number of draws,")
    rows: dict[str, dict[str, Any]] = {}
    # The same key for each: models that are the same have the same evidence, whatever their order.
    key = check_key(key)
    for name, posterior in models.items():
        likelihood, _ = posterior.likelihood_for(refine)
        assert likelihood is not None
        data, many = check_given(posterior, given)
        if many:
            raise ValueError("compare takes one observation: the data in given have a leading axis. Call it for each.")
        options = posterior.flow.draw_options()
        found = refine_each(posterior.flow, likelihood, data, int(n), keys=key[None], options=options)[0].attributes
        kept = ("log_evidence", "log_evidence_error", "effective_sample_size", "pareto_k")
        rows[name] = {**{k: found[k] for k in kept}, "likelihood": likelihood.words}
    table = pd.DataFrame.from_dict(rows, orient="index")
    evidence, error = table["log_evidence"].to_numpy(), table["log_evidence_error"].to_numpy()
    table["log_bayes_factor"] = evidence - evidence.max()
    table["prior"] = [weights[name] for name in table.index]
    with np.errstate(divide="ignore"):
        log_prior = np.log(table["prior"].to_numpy())
    table["probability"] = softmax(log_prior + evidence)
    noise = np.random.default_rng(key_words(key)).normal(size=(ERRORS, len(table)))
    each = softmax(log_prior + evidence + error * noise, axis=1)
    ends = np.quantile(each, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    table["probability_low"], table["probability_high"] = ends
    return Comparison(table.sort_values("log_evidence", ascending=False, kind="stable"))


def _check(
    models: Mapping[str, Posterior], given: Mapping[str, Any], prior: Mapping[str, float] | None, refine: bool | str
) -> dict[str, float]:
    """The prior weights of the models, which add up to 1; models that cannot be compared are an error."""
    if not isinstance(models, Mapping) or not models:
        raise TypeError(f"models must be a dict of fitted posteriors, {{name: posterior}}; found {models!r:.60}.")
    for name, posterior in models.items():
        if not isinstance(posterior, Posterior):
            raise TypeError(f"models['{name}'] must be a posterior from cpe.fit, found {type(posterior).__name__}.")
    if refine not in (True, "program", "learned"):
        raise ValueError(f"refine must be True, 'program' or 'learned' to compare models, found {refine!r}.")
    (first, reference), *others = models.items()
    for name, other in others:
        a, b = reference.graph, other.graph
        if set(a.data) != set(b.data):
            raise ValueError(
                f"Model '{first}' has the data sites {sorted(a.data)}, model '{name}' has {sorted(b.data)}: models of "
                "different data cannot be compared."
            )
        for site in a.data:
            shapes = a.sites[site].shape, b.sites[site].shape
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"Site '{site}' has shape {shapes[0]} in model '{first}', but {shapes[1]} in model '{name}'."
                )
            whole = [_has_probabilities(posterior, site, refine) for posterior in (reference, other)]
            if whole[0] != whole[1]:
                raise ValueError(
                    f"Site '{site}' has probabilities in model '{(name, first)[whole[0]]}', whose data are whole "
                    f"numbers, but a density in model '{(first, name)[whole[0]]}': the two cannot be compared."
                )
            if not np.array_equal(_kept(a, site), _kept(b, site)):
                raise ValueError(f"The masks of site '{site}' differ in models '{first}' and '{name}'.")
    parameters = {name: sorted(set(given) & set(m.graph.parameters)) for name, m in models.items()}
    if any(parameters.values()):
        raise ValueError(f"compare takes data only, but given has parameters: {parameters}.")
    if prior is None:
        return dict.fromkeys(models, 1 / len(models))
    if (
        set(prior) != set(models)
        or not all(np.isfinite(w) and w >= 0 for w in prior.values())
        or not any(prior.values())
    ):
        raise ValueError(f"prior must have a weight of at least 0 for each of {list(models)}, found {dict(prior)}.")
    total = sum(prior.values())
    return {name: prior[name] / total for name in models}


def _has_probabilities(posterior: Posterior, site: str, refine: bool | str) -> bool:
    """Whether data have probabilities, not densities: whole numbers by their support, or as the emulator found them."""
    if is_whole(posterior.graph.sites[site].support):
        return True
    likelihood, _ = posterior.likelihood_for(refine)
    if likelihood is None or likelihood.exact or posterior.emulator is None:
        return False
    coordinates = posterior.emulator.flow.coordinates
    return isinstance(coordinates, DataCoordinates) and site in coordinates.counts


def _kept(graph: Any, site: str) -> np.ndarray:
    kept = graph.sites[site].kept
    return np.ones(graph.sites[site].shape, bool) if kept is None else np.asarray(kept)
