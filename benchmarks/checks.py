"""What the checks of `cpe.check` see: how often each flags posteriors that are wrong in a known way, and the right one.

    python benchmarks/checks.py          # about ten minutes; results/checks.json and the tables of docs/checks.md
    python benchmarks/checks.py tables   # the tables again, from the results

The posterior is known in closed form and nothing is trained: a line `y_j = a + b X_j + noise`, with ten observations, a
normal prior for `a` and `b`, and noise of a known size.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from arviz_base import from_dict
from page import fill, table
from scipy import stats

import cpejax as cpe
from cpejax.diagnostics import study
from cpejax.program.density import ProgramDensity

RESULTS = Path(__file__).parent / "results" / "checks.json"
PAGE = Path(__file__).parents[1] / "docs" / "checks.md"
X = np.linspace(0.0, 2.0, 10)
DESIGN = np.stack([np.ones(10), X], 1)
NOISE = 1.0
FAULTS = {
    "none: the exact posterior": {},
    "prior draws": {"ignore": 1.0},
    "the mean of y only, X dropped": {"summary": True},
    "independent marginals": {"independent": True},
    "draws of another observation": {"other": True},
    "mean 20 % too near the prior's": {"ignore": 0.2},
    "too narrow by a fifth": {"scale": 0.8},
    "too wide by a fifth": {"scale": 1.2},
    "mean too high by .2 sd": {"shift": 0.2},
    "narrow for some data, wide for others": {"varying": 0.25},
}
"""What is wrong, in words, and what makes it so."""
RUNS = {"power": (100, 1000, 200), "power, 200 observations": (100, 200, 200), "level": (1000, 200, 100)}
"""For each part: how many runs, simulated observations in each, and draws for each of these."""


def line() -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("j", 10):
        numpyro.sample("y", dist.Normal(a + b * X, NOISE))


class Line:
    """The posterior of `line`, right or wrong: a normal distribution for each observation."""

    program = staticmethod(line)
    graph = cpe.Model(line, observed=["y"]).graph

    def __init__(
        self,
        ignore: float = 0.0,
        summary: bool = False,
        independent: bool = False,
        other: bool = False,
        scale: float = 1.0,
        shift: float = 0.0,
        varying: float = 0.0,
    ):
        self.ignore, self.summary, self.independent, self.other = ignore, summary, independent, other
        self.scale, self.shift, self.varying = scale, shift, varying

    def normal(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means `(n, 2)` and Cholesky factors `(n, 2, 2)` for `n` observations."""
        read = np.full((1, 10), 0.1) if self.summary else np.eye(10)
        design, noise = read @ DESIGN, NOISE**2 * read @ read.T
        precision = design.T @ np.linalg.inv(noise)
        covariance = np.linalg.inv(np.eye(2) + precision @ design)
        y = np.roll(y, 1, axis=0) if self.other else y
        mean = y @ read.T @ precision.T @ covariance
        sd = np.sqrt(np.diag(covariance))
        if self.independent:
            covariance = np.diag(sd**2)
        if self.ignore == 1:
            covariance = np.eye(2)
        factor = np.linalg.cholesky(covariance) * np.ones((len(y), 1, 1)) * self.scale
        factor = factor * np.where(mean[:, :1, None] > 0, 1 + self.varying, 1 - self.varying)
        return mean * (1 - self.ignore) + self.shift * sd, factor

    def sample(self, n: int, given: Any, *, key: Any) -> Any:
        mean, factor = self.normal(np.asarray(given["y"], float))
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        z = mean + np.einsum("mij,nmj->nmi", factor, rng.standard_normal((n, *mean.shape)))
        return from_dict({"posterior": {"a": z[None, ..., 0], "b": z[None, ..., 1]}})

    def log_prob(self, draws: Any, given: Any) -> np.ndarray:
        mean, factor = self.normal(np.asarray(given["y"], float))
        z = np.linalg.solve(factor, (np.stack([draws["a"], draws["b"]], 1) - mean)[..., None])[..., 0]
        return stats.norm.logpdf(z).sum(1) - np.log(np.linalg.det(factor))


def rates(fault: dict[str, Any], runs: int, n: int, draws: int, seed: int) -> dict[str, float]:
    """The share of runs that each check flags, and all together."""
    flagged: dict[str, list[bool]] = {}
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        theta = rng.standard_normal((n, 2)).astype(np.float32)
        y = (theta @ DESIGN.T + NOISE * rng.standard_normal((n, 10))).astype(np.float32)
        rows = {"a": theta[:, 0], "b": theta[:, 1], "y": y}
        found = cpe.check(Line(**fault), None, rows, key=jax.random.key(1000 * seed + run), n=n, draws=draws)
        for finding in found.findings:
            flagged.setdefault(finding.check, []).append(not finding.ok)
        flagged.setdefault("any", []).append(not found.ok)
    return {name: round(float(np.mean(bad)), 4) for name, bad in flagged.items()}


def measure() -> dict[str, Any]:
    out: dict[str, Any] = {"runs": {part: list(settings) for part, settings in RUNS.items()}}
    # A program is compiled once, not for every run.
    with mock.patch.object(study, "ProgramDensity", functools.cache(ProgramDensity)):
        for seed, (part, (runs, n, draws)) in enumerate(RUNS.items()):
            for words, fault in FAULTS.items():
                if fault and part == "level":
                    continue
                began = time.monotonic()
                out.setdefault(part, {})[words] = rates(fault, runs, n, draws, seed)
                print(part, words, out[part][words], round(time.monotonic() - began, 1), flush=True)
    return out


def tables(found: dict[str, Any]) -> dict[str, str]:
    checks = list(found["power"]["prior draws"])
    out = {
        part: table(
            ["what is wrong", *(name.replace("any", "any of them") for name in checks)],
            [
                [words, *(f"{rate[name]:.0%}".replace("%", " %") for name in checks)]
                for words, rate in found[part].items()
            ],
        )
        for part in RUNS
        if part != "level"
    }
    runs, n, draws = found["runs"]["level"]
    rate = next(iter(found["level"].values()))["any"]
    least, most = stats.binomtest(round(rate * runs), runs).proportion_ci(0.95)
    out["level"] = table(
        ["runs", "simulated observations", "draws", "flagged", "95 % interval"],
        [[f"{runs:,}", n, draws, f"{100 * rate:.1f} %", f"{100 * least:.1f} to {100 * most:.1f} %"]],
    )
    return out


if __name__ == "__main__":
    if sys.argv[1:] != ["tables"]:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    fill(PAGE, tables(json.loads(RESULTS.read_text())))
