"""Checks, against posteriors that are exact, or wrong in a known way: no network is trained here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base import from_dict
from scipy import stats

import cpejax as cpe
from cpejax.diagnostics import study
from cpejax.diagnostics.distances import compare
from cpejax.diagnostics.features import Features
from cpejax.diagnostics.held_out import log_density
from cpejax.diagnostics.null import bands, holm, p_above, p_value
from cpejax.diagnostics.observation import describe
from cpejax.diagnostics.ranks import rank
from cpejax.diagnostics.regression import guess, regress
from cpejax.program.density import ProgramDensity

SEEDS = range(20)
LOADINGS = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.5], [0.5, 0.0, 1.0], [1.0, 1.0, 1.0], [0.3, -1.0, 0.6]])
NOISE = 0.5


def linear():
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    mean = LOADINGS[:, :2] @ theta + LOADINGS[:, 2] * slope
    numpyro.sample("x", dist.Normal(mean, NOISE).to_event(1))


def tree(z):
    return from_dict({"posterior": {"theta": z[None, ..., :2], "slope": z[None, ..., 2]}})


class Exact:
    """The conjugate posterior of `linear`; its draws are moved, and scaled around their mean, if asked for."""

    program = staticmethod(linear)
    graph = cpe.Model(linear, observed=["x"]).graph

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
        return tree(z if many else z[:, 0])


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


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """A program is compiled for the first check of it, not for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "ProgramDensity", functools.cache(ProgramDensity))
        yield


def typicality(graph, simulated, given, level):
    """Distances of given data, which of them are not typical, and what is said of them."""
    found = compare(simulated, given)
    bad = holm(found.p, level)
    return found, bad, describe(graph, simulated, given, found, bad)


def run(posterior, rows, given=None, seed=0, **options):
    return cpe.check(posterior, given, rows, key=jax.random.key(seed), **options)


# ---- the stated level: 1 % for all tests together, so 20 runs pass with a probability of at least .82


def test_a_right_posterior_is_not_flagged_in_20_of_20_seeds(simulated):
    for seed in SEEDS:
        rows, given = simulated[seed]
        found = run(Exact(), rows, seed=seed, draws=200)
        assert found.ok, str(found)
        assert not typicality(Exact.graph, rows["x"], given["x"][None], found.level / 4)[1].any()


def test_draws_scaled_by_point_seven_are_flagged_in_20_of_20_seeds(simulated):
    for seed in SEEDS:
        found = run(Exact(scale=0.7), simulated[seed][0], seed=seed, draws=200)
        assert not found.ok
        assert set(found.calibration["verdict"]) == {"too narrow"}
        for name in ("Ranks (SBC)", "Coverage", "Joint coverage (TARP)"):  # each of the three sees it
            assert not found[name].ok
        assert found["Use of the data"].ok  # and the data say no more than the draws do


def test_p_values_are_uniform_when_the_posterior_is_right():
    rng = np.random.default_rng(0)
    p = np.array([p_value(rng.integers(0, 101, 300), 100) for _ in range(1000)])
    for level in (0.05, 0.2, 0.5):  # exact tests of a discrete statistic: at most the level, and nearly it
        assert stats.binomtest(int((p <= level).sum()), 1000, level, alternative="greater").pvalue > 0.01
        assert (p <= level).mean() > 0.5 * level


def test_bands_are_simultaneous():
    z, low, high = bands(300, 100, 0.1)
    rng = np.random.default_rng(1)
    ranks = rng.integers(0, 101, (2000, 300))
    at = np.round(z * 101).astype(int) - 1
    ecdf = np.stack([(ranks <= a).mean(1) for a in at], 1)
    left = ((ecdf < low - 1e-9) | (ecdf > high + 1e-9)).any(1).sum()
    assert stats.binomtest(int(left), 2000, 0.1, alternative="greater").pvalue > 0.01
    assert left > 100


def test_holm_rejects_more_than_bonferroni_and_no_more_than_it_may():
    p = np.array([0.001, 0.9, 0.006, 0.011, 0.04])
    assert holm(p, 0.05).tolist() == [True, False, True, True, False]
    assert not holm(np.array([0.02, 0.03]), 0.01).any()
    assert holm(np.array([0.001, 0.002]), 0.01).all()


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
    assert found["Ranks (SBC)"].sentence.startswith(words)
    assert "BAD  Ranks (SBC): " + words in str(found)


def test_wrong_correlations_are_seen_although_all_marginals_are_right(simulated):
    found = run(Exact(swap=True), simulated[0][0], draws=400)
    assert set(found.calibration["verdict"]) == {"calibrated"}
    assert found["Ranks (SBC)"].ok
    assert not found["Coverage"].ok
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
        "Use of the data",
        "Likelihood",
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


# ---- use of the data


class Normal(Exact):
    """Normal draws for `linear`, with their density: of the prior, of a part of the data, or of another observation."""

    def __init__(self, ignored=(), prior=False, other=False):
        super().__init__()
        self.read, self.prior, self.other = [j for j in range(5) if j not in ignored], prior, other

    def normal(self, x):
        loadings = LOADINGS[self.read] * (not self.prior)
        covariance = np.linalg.inv(np.eye(3) + loadings.T @ loadings / NOISE**2)
        x = np.roll(x, 1, axis=0) if self.other else x
        return x[:, self.read] @ loadings @ covariance / NOISE**2, covariance

    def sample(self, n, given, *, key):
        mean, covariance = self.normal(np.asarray(given["x"], float))
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return tree((mean + rng.multivariate_normal(np.zeros(3), covariance, (n, len(mean)))).astype(np.float32))

    def log_prob(self, draws, given):
        mean, covariance = self.normal(np.asarray(given["x"], float))
        rest = np.column_stack([draws["theta"], draws["slope"]]) - mean
        return stats.multivariate_normal(np.zeros(3), covariance).logpdf(rest)


NAMES = ("Joint coverage (TARP)", "Use of the data", "Likelihood", "Held-out density")


def outcome(found):
    return {finding.check: finding.ok for finding in found.findings}


@pytest.mark.parametrize("seed", range(3))
def test_prior_draws_are_calibrated_and_fail(simulated, seed):
    found = run(Normal(prior=True), simulated[seed][0], seed=seed, draws=200)
    ok = outcome(found)
    assert ok["Ranks (SBC)"]
    assert ok["Coverage"]
    assert not any(ok[name] for name in NAMES)  # each of the four sees it
    assert set(found.calibration["given data"]) == {"biased"}
    assert "the posterior ignores or misreads what the data tell of " in str(found)
    assert "no better than it; by a regression on the data " in found["Held-out density"].sentence
    assert abs(found.density.mean) < 1e-5


def test_a_posterior_that_leaves_out_a_part_of_the_data_fails(simulated):
    ok = outcome(run(Normal(ignored=[0, 3]), simulated[0][0], draws=200))
    assert ok["Ranks (SBC)"]
    assert ok["Coverage"]
    assert not ok["Use of the data"]
    assert not ok["Likelihood"]
    assert not ok["Held-out density"]


def test_draws_of_another_observation_fail(simulated):
    ok = outcome(run(Normal(other=True), simulated[0][0], draws=200))
    assert not any(ok[name] for name in NAMES)


def test_a_right_density_passes_and_is_measured(simulated):
    found = run(Normal(), simulated[0][0], draws=200)
    assert found.ok, str(found)
    _, covariance = Normal().normal(np.zeros((1, 5)))
    assert abs(found.density.mean + 0.5 * np.linalg.slogdet(covariance)[1]) < 4 * found.density.error
    assert found.density.regression.mean() < found.density.mean


def positive():
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("j", 3):
        numpyro.sample("y", dist.Normal(0.0, scale))


def test_densities_of_many_observations_are_those_of_each():
    rows = cpe.simulate(cpe.Model(positive, observed=["y"]), 60, key=jax.random.key(0))
    method = cpe.CPE(width=8, depth=1, hidden=8, components=2)
    flow = method.build(positive, rows.graph, rows, key=jax.random.key(1))  # not trained: any density will do
    posterior = cpe.Posterior(flow, rows.model, method, cpe.Training(), cpe.History([], [], 0), rows.n)
    found = log_density(posterior, {"scale": rows["scale"]}, {"y": rows["y"]})
    for i in (0, 59):
        one = posterior.log_prob({"scale": rows["scale"][i : i + 1]}, given={"y": rows["y"][i]})
        assert found[i] == pytest.approx(one[0], rel=1e-4, abs=1e-4)
    outside = log_density(posterior, {"scale": -rows["scale"]}, {"y": rows["y"]})
    assert np.isneginf(outside).all()
    # Data are centred as for draws.
    moved = cpe.Posterior(
        flow, rows.model, method, cpe.Training(), cpe.History([], [], 0), rows.n, {"y": np.full(3, 2.0)}
    )
    far = log_density(moved, {"scale": rows["scale"]}, {"y": np.asarray(rows["y"], np.float64) + 2.0})
    np.testing.assert_allclose(far, found, rtol=1e-4, atol=1e-4)
    prior = ProgramDensity(positive, posterior.graph).prior(rows)
    assert np.allclose(prior, stats.halfnorm.logpdf(rows["scale"]), atol=1e-4)


def test_level_with_all_tests():
    """Of a right posterior at most 1 % of all runs may be flagged; 5 or more of 60 have a probability below .001."""
    bad = 0
    for seed in range(60):
        rng = np.random.default_rng([5, seed])
        theta = rng.standard_normal((60, 3))
        x = theta @ LOADINGS.T + NOISE * rng.standard_normal((60, 5))
        rows = {"theta": theta[:, :2], "slope": theta[:, 2], "x": x}
        bad += not run(Normal(), rows, seed=seed, draws=30).ok
    assert bad < 5


def test_ranks_in_the_predicted_direction_are_a_sign_test():
    ranks = np.array([0, 1, 5, 5, 9, 10, 10, 8])
    assert p_above(ranks, 10) == pytest.approx(stats.binom.sf(3, 8, 5 / 11))
    assert p_above(ranks, 9) == pytest.approx(stats.binom.sf(5, 8, 0.5))


def test_only_earlier_simulations_predict(simulated):
    """The last parameters change neither the ranks of those before, nor what the data say of themselves."""
    rows, _ = simulated[0]
    changed = {**rows, "slope": np.where(np.arange(1000) < 900, rows["slope"], 5.0)}
    first, second = (run(Normal(), r, draws=50) for r in (rows, changed))
    for before, after in ((first.tarp, second.tarp), (first.projection, second.projection)):
        assert (before[:800] == after[:800]).all()
        assert (before[800:] != after[800:]).any()


def without_density():
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))

    def simulator(key, theta, slope):
        return LOADINGS[:, :2] @ theta + LOADINGS[:, 2] * slope + NOISE * jax.random.normal(key, (5,))

    numpyro.sample("x", cpe.Simulator(simulator, theta, slope, event_shape=(5,)))


def test_without_a_likelihood_prior_draws_fail_too(simulated):
    posterior = Normal(prior=True)
    posterior.program = without_density
    found = run(posterior, simulated[0][0], draws=100)
    assert "Likelihood" not in outcome(found)
    assert found.likelihood is None
    assert "The likelihood was not tested: site 'x' is a Simulator." in str(found)
    assert not outcome(found)["Use of the data"]


def test_a_regression_finds_the_few_columns_that_matter():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((500, 300))
    targets = features[:, [7, 250]] @ np.array([[1.0, 0.0], [1.0, 2.0]]) + 0.1 * rng.standard_normal((500, 2))
    found = regress(features[:300], targets[:300])
    rest = targets[300:] - found(features[300:])
    assert (rest.std(0) < 0.2).all()


def test_what_a_regression_says_of_parameters_is_a_density():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((400, 3))
    theta = np.stack([features[:, 0] + 0.3 * rng.standard_normal(400), np.exp(rng.standard_normal(400))], 1)
    found = guess(theta, features, np.zeros((400, 3)))
    assert found.logarithm.tolist() == [False, True]
    a, b = np.linspace(-8, 8, 801), np.exp(np.linspace(-9, 9, 901))
    grid = np.stack(np.meshgrid(a, b, indexing="ij"), -1).reshape(-1, 2)
    density = np.exp(found.log_density(grid, np.tile(features[:1], (len(grid), 1)))).reshape(801, 901)
    assert np.trapezoid(np.trapezoid(density, b, axis=1), a) == pytest.approx(1.0, abs=1e-3)
    assert np.isneginf(found.log_density(np.array([[0.0, -1.0]]), features[:1]))[0]


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
    """Each value is in its range; five values of three causes do not go together in this way."""
    rows, _ = simulated[4]
    null = np.linalg.svd(LOADINGS.T)[2][-1]  # a direction in which only noise moves the data
    found = run(Exact(), rows, {"x": 8 * NOISE * null}, draws=400)
    assert "Each value is within its simulated range; their combination is not." in found.typicality.finding.sentence
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


def graph_of(size):
    return cpe.Model(
        lambda: numpyro.sample("x", dist.Normal(numpyro.sample("a", dist.Normal()), 1).expand([size]).to_event(1)),
        observed=["x"],
    ).graph


@pytest.mark.parametrize("sd", [1.0, 3.0])
@pytest.mark.parametrize("size", [1, 20])
@pytest.mark.parametrize("factor", [1e4, -1e4, 1e12])
def test_data_far_beyond_heavy_tails_are_not_typical(size, sd, factor):
    x = np.exp(sd * np.random.default_rng(0).standard_normal((1000, size)))
    far = x[:1].copy()
    far[0, 0] = factor * x.max()
    found, _, sentence = typicality(graph_of(size), x, far, 0.0025)
    assert sentence.startswith("NOT TYPICAL. ")
    assert compare(x, 1e3 * far).distance[0] > found.distance[0] + 1


def test_features_are_monotone_and_unbounded():
    rng = np.random.default_rng(0)
    rows = np.stack([np.exp(3 * rng.standard_normal(500)), rng.standard_normal(500), rng.standard_cauchy(500)], 1)
    at = np.concatenate([-np.logspace(30, -3, 300), [0.0], np.logspace(-3, 30, 300)])
    found = Features(rows)(np.stack([at] * 3, 1))
    assert found.shape == (601, 5)
    assert (np.diff(found, axis=0) >= 0).all()
    assert (np.diff(found[-50:], axis=0) > 0).all()
    assert (np.diff(found[:50], axis=0) > 0).all()


@pytest.mark.parametrize(
    ("sd", "ok", "words"),
    [
        (0.0, True, "typical: "),
        (3.0, True, "unusual: the observation is further from other data than "),
        (9.0, False, "NOT TYPICAL. "),
    ],
)
def test_the_words_follow_the_p_value(sd, ok, words):
    x = np.random.default_rng(0).standard_normal((1000, 1))
    found, bad, sentence = typicality(graph_of(1), x, np.array([[sd]]), 0.0025)
    assert sentence.startswith(words)
    assert bad.any() != ok
    p = found.p[0]
    assert p <= 0.0025 if not ok else p <= 0.05 if words.startswith("unusual") else p > 0.05


def explosive():
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    mean = LOADINGS[:, :2] @ theta + LOADINGS[:, 2] * slope
    numpyro.sample("x", dist.Normal(mean + jnp.where(abs(slope) > 6, jnp.inf, 0.0), NOISE).to_event(1))


def test_replicates_that_are_not_finite_are_reported(simulated):
    posterior = Exact()
    posterior.program = explosive
    rows, given = simulated[0]
    found = run(posterior, rows, {"x": given["x"] + 1e4}, draws=100)
    ok = outcome(found)
    assert ok.pop("Posterior predictive") is False
    assert ok.pop("Observation") is False
    assert all(ok.values())
    assert found.predictive is None
    sentence = found["Posterior predictive"].sentence
    assert sentence.startswith(
        "NOT TYPICAL, and no data can be drawn from its posterior: its draws cannot be simulated"
    )
    assert "100 of 100 simulations (100.0 %) are not finite" in sentence


@pytest.mark.parametrize("kind", [RuntimeError, FloatingPointError])
def test_an_observation_without_draws_is_reported(simulated, kind):
    class Refuses(Exact):
        def sample(self, n, given, *, key):
            if np.abs(given["x"]).max() > 1e3:
                raise kind("nearly nothing is inside the prior's support")
            return super().sample(n, given, key=key)

    rows, given = simulated[0]
    found = run(Refuses(), rows, {"x": given["x"] + 1e4}, draws=100)
    assert [f.check for f in found.findings if not f.ok] == ["Observation", "Posterior predictive"]
    assert "there are no draws for it (nearly nothing is inside" in found["Posterior predictive"].sentence


def test_typicality_has_its_level():
    """p-values of simulated observations are uniform, whatever the distance: 600 observations, three simulations."""
    p = []
    for seed in range(3):
        rng = np.random.default_rng(100 + seed)
        x = np.exp(rng.standard_normal((700, 6)) @ rng.standard_normal((6, 6)))  # dependent, and heavy-tailed
        p.append(compare(x[:500], x[500:]).p)
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
    monkeypatch.setattr(study, "MOST_NUMBERS", 400 * 3 * 300)  # four chunks, the last one shorter
    found = run(Exact(), simulated[0][0], draws=400)
    assert found.n == 1000
    assert found.ok


def test_equal_draws_are_ranked_at_random():
    rng = np.random.default_rng(0)
    ranks = rank(np.zeros((2000, 11)), rng)
    assert p_value(ranks, 10) > 0.001


def scalar():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mu, 1.0))


class ExactScalar:
    """The conjugate posterior of `scalar`."""

    program = staticmethod(scalar)
    graph = cpe.Model(scalar, observed=["y"]).graph

    def sample(self, n, given, *, key):
        y = np.asarray(given["y"], float)
        noise = np.asarray(jax.random.normal(key, (n, *y.shape)))
        return from_dict({"posterior": {"mu": (y / 2 + noise / 2**0.5)[None]}})


def test_an_observation_that_is_one_number():
    found = cpe.check(ExactScalar(), given={"y": 0.3}, n=100, draws=50, key=jax.random.key(0))
    assert found.ok, found
    assert found.predictive.observed["y"] == 0.3
