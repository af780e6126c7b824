"""Checks, against posteriors that are exact, or wrong in a known way: no network is trained here."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base import from_dict
from scipy import stats

import cpejax as cpe
from cpejax import _check

SEEDS = range(20)
LOADINGS = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.5], [0.5, 0.0, 1.0], [1.0, 1.0, 1.0], [0.3, -1.0, 0.6]])
NOISE = 0.5


def linear():
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    mean = LOADINGS[:, :2] @ theta + LOADINGS[:, 2] * slope
    numpyro.sample("x", dist.Normal(mean, NOISE).to_event(1))


class Exact:
    """The conjugate posterior of `linear`; its draws are moved, and scaled around their mean, if asked for."""

    program = staticmethod(linear)
    graph = cpe.Graph.from_program(linear, observed=["x"])

    def __init__(self, scale=1.0, shift=0.0, swap=False):
        self.scale, self.shift, self.swap = np.broadcast_to(scale, 3), np.broadcast_to(shift, 3), swap

    def sample(self, n, given, *, key):
        x = np.asarray(given["x"], float)
        many = x.ndim == 2
        x = np.atleast_2d(x)
        covariance = np.linalg.inv(np.eye(3) + LOADINGS.T @ LOADINGS / NOISE**2)
        mean = x @ LOADINGS @ covariance / NOISE**2
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        noise = rng.standard_normal((n, len(x), 3)) @ np.linalg.cholesky(covariance).T
        if self.swap:  # right marginals, but independent of one another
            noise = rng.standard_normal((n, len(x), 3)) * np.sqrt(np.diag(covariance))
        z = (mean + self.shift * np.sqrt(np.diag(covariance)) + noise * self.scale).astype(np.float32)
        z = z if many else z[:, 0]
        return from_dict({"posterior": {"theta": z[None, ..., :2], "slope": z[None, ..., 2]}})


@pytest.fixture(scope="module")
def simulated():
    """1,000 simulated observations for each seed, and one more."""
    out = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        theta = rng.standard_normal((1001, 3))
        x = theta @ LOADINGS.T + NOISE * rng.standard_normal((1001, 5))
        rows = {"theta": theta[:, :2], "slope": theta[:, 2], "x": x}
        out.append(({k: v[1:] for k, v in rows.items()}, {"x": x[0]}))
    return out


def run(posterior, rows, given=None, seed=0, **options):
    return cpe.check(posterior, given, rows, key=jax.random.key(seed), **options)


# ---- the stated level: 1 % for all tests together, so 20 runs pass with a probability of at least .82


def test_a_right_posterior_is_not_flagged_in_20_of_20_seeds(simulated):
    for seed in SEEDS:
        rows, given = simulated[seed]
        found = run(Exact(), rows, seed=seed, draws=400)
        assert found.ok, str(found)
        assert _check._typicality(Exact.graph, rows, {"x": given["x"][None]}, found.level / 4).finding.ok


def test_draws_scaled_by_point_seven_are_flagged_in_20_of_20_seeds(simulated):
    for seed in SEEDS:
        found = run(Exact(scale=0.7), simulated[seed][0], seed=seed, draws=400)
        assert not found.ok
        assert set(found.calibration["verdict"]) == {"too narrow"}
        assert [f.ok for f in found.findings] == [False, False, False]  # each of the three sees it


def test_p_values_are_uniform_when_the_posterior_is_right():
    rng = np.random.default_rng(0)
    p = np.array([_check.p_value(rng.integers(0, 101, 300), 100) for _ in range(1000)])
    for level in (0.05, 0.2, 0.5):  # exact tests of a discrete statistic: at most the level, and nearly it
        assert stats.binomtest(int((p <= level).sum()), 1000, level, alternative="greater").pvalue > 0.01
        assert (p <= level).mean() > 0.5 * level


def test_bands_are_simultaneous():
    z, low, high = _check.bands(300, 100, 0.1)
    rng = np.random.default_rng(1)
    ranks = rng.integers(0, 101, (2000, 300))
    at = np.round(z * 101).astype(int) - 1
    ecdf = np.stack([(ranks <= a).mean(1) for a in at], 1)
    left = ((ecdf < low - 1e-9) | (ecdf > high + 1e-9)).any(1).sum()
    assert stats.binomtest(int(left), 2000, 0.1, alternative="greater").pvalue > 0.01
    assert left > 100


def test_holm_rejects_more_than_bonferroni_and_no_more_than_it_may():
    p = np.array([0.001, 0.9, 0.006, 0.011, 0.04])
    assert _check._holm(p, 0.05).tolist() == [True, False, True, True, False]
    assert not _check._holm(np.array([0.02, 0.03]), 0.01).any()
    assert _check._holm(np.array([0.001, 0.002]), 0.01).all()


# ---- what is said


@pytest.mark.parametrize(
    ("posterior", "verdicts", "words"),
    [
        (Exact(scale=[1, 0.7, 1]), ["calibrated", "too narrow", "calibrated"], "too narrow for theta[1]: its 90 % int"),
        (Exact(scale=[1, 1.4, 1]), ["calibrated", "too wide", "calibrated"], "too wide for theta[1]: its 90 % interv"),
        (Exact(shift=[0.5, 0, 0]), ["too high", "calibrated", "calibrated"], "too high for theta[0]: "),
        (Exact(shift=[0, 0, -0.5]), ["calibrated", "calibrated", "too low"], "too low for slope: "),
    ],
)
def test_what_is_wrong_is_named(simulated, posterior, verdicts, words):
    found = run(posterior, simulated[1][0], draws=400)
    assert found.calibration["verdict"].tolist() == verdicts
    assert found.findings[0].sentence.startswith(words)
    assert "BAD  Ranks (SBC): " + words in str(found)


def test_wrong_correlations_are_seen_although_all_marginals_are_right(simulated):
    found = run(Exact(swap=True), simulated[0][0], draws=400)
    assert set(found.calibration["verdict"]) == {"calibrated"}
    assert found.findings[0].ok
    assert not found.findings[1].ok
    assert not found.ok


def test_coverage_is_that_of_the_intervals(simulated):
    narrow = run(Exact(scale=0.7), simulated[1][0], draws=400).calibration
    for level in (0.5, 0.8, 0.9, 0.95):
        expected = 1 - 2 * stats.norm.cdf(-0.7 * stats.norm.ppf((1 + level) / 2))
        for found in narrow[f"{level:.0%}"]:
            assert abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 1000)


def test_a_right_posterior_is_called_so(simulated):
    rows, given = simulated[2]
    found = run(Exact(), rows, given, draws=400)
    assert [f.check for f in found.findings] == [
        "Ranks (SBC)",
        "Coverage",
        "Joint coverage (TARP)",
        "Observation",
        "Posterior predictive",
    ]
    text = str(found)
    assert "calibrated: the ranks of all 3 parameters are uniform over 1,000 simulated observations (smallest p" in text
    assert "typical: the observation could have been simulated (p = " in text
    assert "data drawn from the posterior look like the observed ones" in text
    assert list(found.ranks) == ["theta[0]", "theta[1]", "slope"]
    assert (found.n, found.draws) == (1000, 400)
    assert all(r.min() >= 0 and r.max() <= 400 for r in found.ranks.values())


# ---- the observation


def test_an_observation_outside_the_simulated_range_is_shouted(simulated):
    rows, given = simulated[3]
    far = {"x": given["x"] + np.array([0, 0, 40.0, 0, 0])}
    found = run(Exact(), rows, far, draws=400)
    assert not found.ok
    sentence = found.typicality.finding.sentence
    assert sentence.startswith("NOT TYPICAL. The observation is unlike what the program simulates (distance ")
    assert "x[2] = " in sentence
    assert "is outside the simulated range" in sentence
    assert found.typicality.p[0] < 1e-4
    assert not found.predictive.finding.ok


def test_an_observation_off_the_simulated_manifold_is_seen_too(simulated):
    """Each number is in its range; five numbers of three causes do not go together in this way."""
    rows, _ = simulated[4]
    null = np.linalg.svd(LOADINGS.T)[2][-1]  # a direction in which only noise moves the data
    found = run(Exact(), rows, {"x": 8 * NOISE * null}, draws=400)
    assert "Each number is within its simulated range; their combination is not." in found.typicality.finding.sentence
    assert not found.typicality.finding.ok


def test_many_observations(simulated):
    rows, _ = simulated[5]
    x = np.concatenate([simulated[seed][1]["x"][None] for seed in SEEDS])
    found = run(Exact(), rows, {"x": x}, draws=400)
    assert found.typicality.p.shape == (20,)
    assert "typical: all 20 observations could have been simulated (smallest p = " in str(found)
    x[7] += 30
    found = run(Exact(), rows, {"x": x}, draws=400)
    assert "NOT TYPICAL. 1 of 20 observations, first of all 7, are unlike" in str(found)
    assert "Observation 7, the least typical: data drawn" in found.predictive.finding.sentence


def test_typicality_has_its_level():
    """p-values of simulated observations are uniform, whatever the distance: 600 observations, three simulations."""
    p = []
    for seed in range(3):
        rng = np.random.default_rng(100 + seed)
        x = np.exp(rng.standard_normal((700, 6)) @ rng.standard_normal((6, 6)))  # dependent, and heavy-tailed
        graph = cpe.Graph.from_program(linear, observed=["x"])
        found = _check._typicality(graph, {"x": x[:500]}, {"x": x[500:]}, 0.01)
        p.append(found.p)
    p = np.concatenate(p)
    for level in (0.05, 0.2, 0.5):  # p-values of one simulation share its reference, hence the width
        assert abs((p <= level).mean() - level) < 5 * np.sqrt(level * (1 - level) / 300)


# ---- arguments


def test_simulations_are_made_if_not_given():
    found = cpe.check(Exact(), key=jax.random.key(0), n=60, draws=50)
    assert found.n == 60
    assert found.typicality is None
    assert found.predictive is None
    again = cpe.check(Exact(), key=jax.random.key(0), n=60, draws=50)
    assert all((again.ranks[k] == found.ranks[k]).all() for k in found.ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 10}, "There are 10 simulated observations to check with; at least 20 are needed"),
        ({"n": 0}, "n, the number of simulated observations, must be a whole number of at least 1; found 0"),
        ({"draws": 0}, "draws must be a whole number of at least 1; found 0"),
        ({"level": 1.5}, "level must be between 0 and 1; found 1.5"),
    ],
)
def test_bad_arguments(options, message, simulated):
    with pytest.raises(ValueError, match=message):
        run(Exact(), simulated[0][0], **options)


def test_draws_in_chunks_give_the_same_shape_of_result(simulated, monkeypatch):
    monkeypatch.setattr(_check, "MOST_NUMBERS", 400 * 3 * 300)  # four chunks, the last one shorter
    found = run(Exact(), simulated[0][0], draws=400)
    assert found.n == 1000
    assert found.ok


def test_equal_draws_are_ranked_at_random():
    rng = np.random.default_rng(0)
    ranks = _check._rank(np.zeros((2000, 11)), rng)
    assert _check.p_value(ranks, 10) > 0.001
