"""Whether a posterior can be trusted: `cpe.check`, which runs all checks and divides the level among their tests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray

from cpejax.diagnostics.null import holm
from cpejax.diagnostics.registry import Diagnostic, Finding, Panel, Share, registered
from cpejax.diagnostics.study import AnyPosterior, Study
from cpejax.program.graph import Graph
from cpejax.program.model import Model
from cpejax.program.simulate import simulate
from cpejax.program.simulations import check_count
from cpejax.util.keys import check_key


@dataclass(frozen=True, eq=False)
class Check:
    """What `cpe.check` found. `print(check)` shows it; `check.ok` says whether every check was passed.

    `check["Coverage"]` is the finding of one check. What each check computed is an attribute, and in `found`:

    - `ranks`: of the true value among the draws, `{parameter: (n,)}`, 0 to `draws`; uniform if the posterior is right.
    - `joint`, `tarp`: the same for the joint posterior: ranks of the distance from the draws' mean, and from a point
        that the data choose.
    - `given_data`: ranks of each parameter, in the direction that a regression on the data predicts; `width`: those of
        the distance from the mean; `projection`: those of the parameters' sum, weighted by what is predicted.
    - `likelihood`: ranks of the log-likelihood, among `likelihood_draws` draws, where the data have a density.
    - `density`: the log-density of the true parameters, where the posterior has one.
    - `typicality`, `predictive`: of the observation, if one was given.

    Of all checks together:

    - `calibration`: a table with a row for each parameter: p-value, verdict, and the coverage of central intervals; and
        the p-value given the data.
    - `p_values`: of each test, `{check: {test: p}}`; `levels`: what a p-value of each check is compared with first, its
        share of `level` over the number of tests that divide it.
    - `panels`: ranks that `cpe.plot.ranks` shows beside those of the parameters.

    What the data predict is learned from the first tenth of the observations, so that fewer ranks are there of it.
    """

    graph: Graph
    n: int
    draws: int
    level: float
    findings: tuple[Finding, ...]
    found: dict[str, Any]
    calibration: pd.DataFrame
    p_values: dict[str, dict[str, float]]
    levels: dict[str, float]
    panels: dict[str, Panel]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every check was passed."""
        return all(finding.ok for finding in self.findings)

    @property
    def figures(self) -> list[str]:
        """Names of the checks with a finding that have a figure of their own, for `cpe.plot.finding`."""
        kinds = registered()
        return [finding.check for finding in self.findings if kinds[finding.check].figure is not None]

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.check == name:
                return finding
        raise KeyError(f"There is no finding '{name}'; there are {', '.join(f.check for f in self.findings)}.")

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__.get("found", {})
        if name not in found:
            raise AttributeError(f"A check has no attribute '{name}'; the checks found {', '.join(found)}.")
        return found[name]

    def __str__(self) -> str:
        return "\n".join(f"{'ok ' if f.ok else 'BAD'}  {f.check}: {f.sentence}" for f in self.findings)


def check(
    posterior: AnyPosterior,
    given: Mapping[str, Any] | None = None,
    simulations: Mapping[str, Any] | None = None,
    *,
    key: PRNGKeyArray,
    n: int = 1000,
    draws: int = 1000,
    level: float = 0.01,
    progress: bool | None = None,
) -> Check:
    """Check a posterior: its calibration, and whether it can be used for an observation.

    *Calibration* needs no observation. For `n` simulated observations, whose parameters are known, the posterior is
    sampled in one compiled call. If it is right, then the rank of the true value among the draws is uniform, for each
    parameter (simulation-based calibration, Talts et al. 2018) and for any quantity of parameters and data (Modrák et
    al. 2023). Tested are the ranks of each parameter; of the Mahalanobis distance from the draws' own mean, which is
    the coverage of credible ellipsoids; and of the distance from a point that the data choose (TARP, Lemos et al.
    2023). Each test compares the ranks' distribution function with the uniform one, everywhere at once and exactly
    (Säilynoja et al. 2022). Coverage of central intervals is told for each parameter.

    *Use of the data*: a posterior that ignores them, or a part of them, can be calibrated. So a regression on the data,
    fitted to earlier simulations, predicts on which side of the draws the true value is; ranks in that direction are
    uniform only if nothing can be predicted. So is the rank of the log-likelihood, where the data have a density; and
    the posterior's log-density of the true values, where it has one, is compared with those of the prior and of the
    regression: the product of ratios is above `1 / p` with a probability of no more than `p` if the posterior is right.

    *Typicality* asks whether an observation is like simulated data. Its distance from simulated data (the mean over the
    nearest neighbours, in standardised principal components) is ranked among the distances of other simulated data.
    *Predictive checks* do the same with summary statistics of data replicated from its posterior.

    All tests together have level `level`: a right posterior with a typical observation fails in at most 1 % of all runs
    (half of it goes to calibration and use of the data, by Holm's procedure over all tests; a quarter each to the other
    two).

    **Arguments:**

    - `posterior`: from `cpe.fit` or `cpe.load`.
    - `given`: an observation, `{site: array}`, or many with a leading axis. Of many, the least typical one is
        replicated.
    - `simulations`: from `cpe.simulate`, and not those the posterior was trained on; `n` new ones if left out.
    - `key`: a JAX key.
    - `n`, `draws`: simulated observations, and draws for each.
    - `progress`: a progress bar for simulators on the host; by default where there is a terminal.

    **Returns:** a `Check`, with tables, ranks and plain sentences. `cpe.plot.ranks`, `cpe.plot.coverage` and
    `cpe.plot.predictive` draw it.

    >>> found = cpe.check(posterior, given={"y": [0.3, 1.2, -0.4]}, n=20, draws=20, key=jax.random.key(3))
    >>> found.ok in (True, False), list(found.ranks)
    (True, ['mu'])
    """
    began = time.perf_counter()
    check_count(n, "n, the number of simulated observations,")
    check_count(draws, "draws")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; found {level!r}.")
    graph = posterior.graph
    key_rows, key_draws, key_replicates = jax.random.split(check_key(key), 3)
    if simulations is None:
        simulations = simulate(Model(posterior.program, graph.data), n, key=key_rows, progress=progress)
        if simulations.interrupted:
            raise KeyboardInterrupt
    rows = graph.without_masked({name: _floats(simulations[name])[:n] for name in graph.sites})
    n = len(rows[graph.parameters[0]])
    if n < 20:
        raise ValueError(f"There are {n} simulated observations to check with; at least 20 are needed, 1,000 are good.")
    observed = None
    if given is not None:
        observed = graph.without_masked({name: _floats(given[name]) for name in graph.data})
        many = all(x.ndim > len(graph.sites[name].shape) for name, x in observed.items())
        observed = observed if many else {name: x[None] for name, x in observed.items()}
    study = Study(posterior, rows, observed, draws, key=key_draws, key_replicates=key_replicates, progress=progress)
    checks = {name: kind(study) for name, kind in registered().items()}
    for group in study.groups():
        for each in checks.values():
            each.read(group)
    levels = run_tests(checks.values(), level)
    sentences = {name: each.sentence(checks) for name, each in checks.items()}
    findings = {name: Finding(name, checks[name].ok, s) for name, s in sentences.items() if s is not None}
    columns = _merged("columns", {name: each.columns() for name, each in checks.items()})
    return Check(
        graph=graph,
        n=n,
        draws=draws,
        level=level,
        findings=tuple(findings.values()),
        found=_merged("values", {name: each.values(findings.get(name)) for name, each in checks.items()}),
        calibration=pd.DataFrame(columns, index=pd.Index(study.names, name="parameter")),
        p_values={name: dict(each.p) for name, each in checks.items()},
        levels=levels,
        panels=_merged("panels", {name: each.panels() for name, each in checks.items()}),
        seconds=time.perf_counter() - began,
    )


def run_tests(checks: Iterable[Diagnostic], level: float) -> dict[str, float]:
    """Test all checks, with a probability of at most `level` that any right one fails; sets their `p` and `bad`.

    Each share of the level is divided by Holm's procedure over all tests that have it; one that is not used, because
    there is no observation, stays unused. Returns the level of a single test of each check, before any is rejected.
    """
    shares: dict[Share, list[Diagnostic]] = {}
    for each in checks:
        each.p = dict(each.tests())
        shares.setdefault(each.share, []).append(each)
    levels = {}
    for share, members in shares.items():
        p = {(each.name, test): p for each in members for test, p in each.p.items()}
        own = level * (share.weight / sum(share.weight for share in shares))
        rejected = dict(zip(p, holm(np.array(list(p.values()), float), own).tolist(), strict=True))
        for each in members:
            each.bad = {test: rejected[each.name, test] for test in each.p}
            levels[each.name] = own / max(1, len(p))
    return levels


def _merged(what: str, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What all checks give, by name; the same name twice is an error."""
    out: dict[str, Any] = {}
    taken = {field.name: "Check" for field in fields(Check)} if what == "values" else {}
    for check, part in parts.items():
        for name, value in part.items():
            if name in taken:
                raise ValueError(f"The check '{check}' has {what} '{name}', as {taken[name]} has: choose another name.")
            out[name], taken[name] = value, f"'{check}'"
    return out


def _floats(x: Any) -> np.ndarray:
    """Values with all digits they have; whole numbers as floats."""
    x = np.asarray(x)
    return x if x.dtype.kind == "f" else x.astype(np.float64)
