"""Refined draws: exact posteriors from bad proposals, evidence in closed form, and what is said where it fails."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax.scipy.stats import norm
from numpyro.distributions.transforms import AffineTransform
from scipy.special import gammaln, logsumexp

import cpejax as cpe
from cpejax.flows.conditioning import VectorFlow
from cpejax.inference.bridge import bridge, evidence
from cpejax.inference.likelihood import Likelihood, ProgramLikelihood
from cpejax.inference.moves import factors
from cpejax.inference.posterior import Posterior
from cpejax.inference.refine import MOST_ERROR, refine
from cpejax.inference.scores import score_refined
from cpejax.inference.settings import History, Training
from cpejax.inference.weights import effective_size, smooth

N = 2000
Z = 4.5
"""Standard errors within which an estimate must be: of the sixty or so here one is beyond in 2,000 runs."""


class WideFlow(VectorFlow):
    """N(shift, width²) in prior coordinates, whatever the data: a proposal that has learned nothing."""

    width: jax.Array
    shift: jax.Array

    def __init__(self, program, graph, simulations, *, width=1.0, shift=0.0, coordinates="prior", like=None, key=None):
        super().__init__(program, graph, simulations, coordinates=coordinates, like=like)
        self.width, self.shift = jnp.asarray(width), jnp.asarray(shift)

    def draw_vectors(self, data, n, key):
        return self.shift + self.width * jax.random.normal(key, (n, self.base.size)), {}

    def log_density(self, u, data):
        return norm.logpdf(u, self.shift, self.width).sum(-1)


@dataclass(frozen=True)
class Wide(cpe.Method):
    flow = WideFlow

    width: float = 1.0
    shift: float = 0.0
    coordinates: str = "prior"


def wide(program, observed=("y",), **options):
    """A posterior by `WideFlow` that was never trained."""
    model = cpe.Model(program, observed=list(observed))
    sims = cpe.simulate(model, 500, key=jax.random.key(0))
    rows = {name: np.asarray(sims[name]) for name in model.graph.sites}
    method = Wide(**options)
    flow = method.build(model.bound, model.graph, rows, key=jax.random.key(1))
    return Posterior(flow, model, method, Training(), History(), 500)


def normal():
    """Its posterior is N(m, S) with S⁻¹ = I + XᵀX / .25."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w, 0.5).to_event(1))


X = jnp.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
Y = np.array([0.5, 1.0, 2.0])


def closed_form():
    """Mean, covariance and log evidence of `normal` at `Y`: y ~ N(0, X Xᵀ + .25 I)."""
    x = np.asarray(X, float)
    cov = np.linalg.inv(np.eye(2) + x.T @ x / 0.25)
    total = x @ x.T + 0.25 * np.eye(3)
    log_z = -0.5 * (Y @ np.linalg.solve(total, Y) + np.linalg.slogdet(2 * np.pi * total)[1])
    return cov @ x.T @ Y / 0.25, cov, log_z


def agrees(draws, mean, cov, n=None):
    """Means, standard deviations and correlations of independent normal draws, by z-tests."""
    n = len(draws) if n is None else n
    sd = np.sqrt(np.diag(cov))
    z = [(draws.mean(0) - mean) / sd * np.sqrt(n), (draws.std(0) / sd - 1) * np.sqrt(2 * n)]
    i, j = np.triu_indices(len(sd), 1)
    rho, found = (cov / np.outer(sd, sd))[i, j], np.atleast_2d(np.corrcoef(draws.T))[i, j]
    z.append((np.arctanh(found) - np.arctanh(rho)) * np.sqrt(n - 3))
    assert np.abs(np.concatenate(z)).max() < Z, z


@pytest.fixture(scope="module")
def posterior():
    return wide(normal)


@pytest.fixture(scope="module")
def refined(posterior):
    return posterior.sample(N, given={"y": Y}, key=jax.random.key(2), refine=True)


def test_a_proposal_that_learned_nothing_meets_the_exact_posterior(refined):
    mean, cov, log_z = closed_form()
    # Moves leave up to a tenth of a draw's variance to the weights' error, so draws count a little less.
    agrees(refined.posterior["w"].values[0], mean, cov, n=0.8 * N)
    found = refined.posterior.attrs
    assert found["refined"] == "by the program's own density"
    assert abs(found["log_evidence"] - log_z) < Z * found["log_evidence_error"]
    assert 0 < found["log_evidence_error"] < 0.1
    assert found["distinct_share"] >= 0.99
    assert found["pareto_k"] < 0.7


def test_the_same_key_gives_the_same_draws_and_another_does_not(posterior, refined):
    again, other = (
        posterior.sample(N, given={"y": Y}, key=jax.random.key(k), refine="program").posterior["w"].values
        for k in (2, 3)
    )
    assert np.array_equal(again, refined.posterior["w"].values)
    assert not np.array_equal(other, refined.posterior["w"].values)


@pytest.mark.slow
def test_narrow_posteriors_are_reached_in_steps_of_the_likelihoods_power():
    """Twelve dimensions, each a tenth as wide as its prior: none of the proposals is near."""

    def program():
        with numpyro.plate("row", 12):
            mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(mu, 0.1))

    posterior = wide(program)
    y = np.linspace(-1, 1, 12)
    tree = posterior.sample(N, given={"y": y}, key=jax.random.key(2), refine=True)
    found = tree.posterior.attrs
    assert found["tempering_steps"] > 3
    agrees(tree.posterior["mu"].values[0], y / 1.01, np.eye(12) * 0.01 / 1.01, n=0.8 * N)
    log_z = norm.logpdf(y, 0, np.sqrt(1.01)).sum()
    assert abs(found["log_evidence"] - log_z) < Z * found["log_evidence_error"] < 1.5


def test_two_modes_keep_their_mass():
    """`y = 1` of N(mu², .1²): mu = ±1, of which a prior centred at .5 favours one by e^(2 · 1 · .5)."""

    def program():
        mu = numpyro.sample("mu", dist.Normal(0.5, 1.0))
        numpyro.sample("y", dist.Normal(mu**2, 0.1))

    grid = np.linspace(-3, 3, 200_001)
    log_p = norm.logpdf(grid, 0.5, 1.0) + norm.logpdf(1.0, grid**2, 0.1)
    p = np.exp(np.asarray(log_p, float))
    share, log_z = p[grid > 0].sum() / p.sum(), np.log(p.sum() * (grid[1] - grid[0]))
    tree = wide(program).sample(N, given={"y": 1.0}, key=jax.random.key(2), refine=True)
    found = tree.posterior.attrs
    positive = (tree.posterior["mu"].values > 0).mean()
    error = np.sqrt(share * (1 - share) / found["effective_sample_size"])
    assert abs(positive - share) < Z * error
    assert abs(found["log_evidence"] - log_z) < Z * found["log_evidence_error"]


@pytest.mark.slow
def test_evidence_of_two_moons_is_that_by_quadrature():
    task = cpe.tasks.get("two_moons")
    posterior = wide(task.program, task.observed)
    given = task.observation(100)
    x = np.asarray(given["x"], float)
    grid = np.linspace(-1, 1, 4001)[1:] - 0.00025
    a, b = np.meshgrid(grid, grid)
    u1 = x[0] - 0.25 + np.abs(a + b) / np.sqrt(2)
    u2 = x[1] - (b - a) / np.sqrt(2)
    r = np.where(u1 < 0, -1, 1) * np.hypot(u1, u2)
    density = np.exp(-0.5 * ((r - 0.1) / 0.01) ** 2) / (0.01 * np.sqrt(2 * np.pi)) / (np.pi * np.abs(r))
    log_z = np.log(density.mean())
    found = posterior.sample(N, given=given, key=jax.random.key(3), refine=True).posterior.attrs
    assert abs(found["log_evidence"] - log_z) < Z * found["log_evidence_error"] < 1


@pytest.mark.slow
def test_evidence_of_a_hierarchical_model_and_its_group_means():
    """mu ~ N(0, 1), b_j ~ N(mu, 1), y_j ~ N(b_j, .5²): y ~ N(0, 1.25 I + 11')."""

    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("group", 4):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b, 0.5))

    y = np.array([0.2, -0.5, 1.5, 0.9])
    total = 1.25 * np.eye(4) + 1
    log_z = -0.5 * (y @ np.linalg.solve(total, y) + np.linalg.slogdet(2 * np.pi * total)[1])
    tree = wide(program).sample(N, given={"y": y}, key=jax.random.key(2), refine=True)
    assert abs(tree.posterior.attrs["log_evidence"] - log_z) < Z * tree.posterior.attrs["log_evidence_error"]
    joint = np.block([[np.ones((1, 1)), np.ones((1, 4))], [np.ones((4, 1)), np.eye(4) + 1]])  # of mu and b
    gain = joint[:, 1:] @ np.linalg.inv(total)
    draws = np.column_stack([tree.posterior["mu"].values[0], tree.posterior["b"].values[0]])
    agrees(draws, gain @ y, joint - gain @ joint[1:], n=0.8 * N)


@pytest.mark.slow
def test_supports_that_the_flow_may_leave_count_in_the_evidence():
    """A uniform prior in plain coordinates: two thirds of what is proposed are outside."""

    def program():
        mu = numpyro.sample("mu", dist.Uniform(-1.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, 0.5))

    tree = wide(program, coordinates="plain", width=4.0).sample(N, given={"y": 0.3}, key=jax.random.key(2), refine=True)
    found = tree.posterior.attrs
    assert found["acceptance_rate"] < 0.5
    log_z = np.log(0.5 * float(norm.cdf(1, 0.3, 0.5) - norm.cdf(-1, 0.3, 0.5)))
    assert abs(found["log_evidence"] - log_z) < Z * found["log_evidence_error"] < 0.3
    assert np.abs(tree.posterior["mu"].values).max() < 1


@pytest.mark.slow
def test_families_without_quantile_function_have_their_prior():
    """A Dirichlet prior and counts: the posterior is Dirichlet(alpha + counts)."""

    def program():
        p = numpyro.sample("p", dist.Dirichlet(jnp.array([2.0, 1.0, 1.0])))
        numpyro.sample("y", dist.Multinomial(10, p))

    posterior = wide(program, width=1.5)
    tree = posterior.sample(N, given={"y": np.array([5, 3, 2])}, key=jax.random.key(2), refine=True)
    alpha = np.array([7.0, 4.0, 3.0])
    mean, n = alpha / alpha.sum(), 0.8 * N
    sd = np.sqrt(mean * (1 - mean) / (alpha.sum() + 1))
    assert np.abs((tree.posterior["p"].values[0].mean(0) - mean) / sd * np.sqrt(n)).max() < Z

    # Of a Dirichlet-multinomial: 10! / (5! 3! 2!) B(alpha + y) / B(alpha)
    def log_beta(a):
        return gammaln(a).sum() - gammaln(a.sum())

    log_z = gammaln(11) - gammaln([6, 4, 3]).sum() + log_beta(alpha) - log_beta(np.array([2.0, 1.0, 1.0]))
    found = tree.posterior.attrs
    assert abs(found["log_evidence"] - log_z) < Z * found["log_evidence_error"]


def test_many_observations_have_lists_and_each_its_own_posterior(posterior):
    ys = np.stack([Y, -Y])
    tree = posterior.sample(N, given={"y": ys}, key=jax.random.key(4), refine=True)
    mean, cov, log_z = closed_form()
    for i, sign in enumerate((1, -1)):
        agrees(tree.posterior["w"].values[0, :, i], sign * mean, cov, n=0.8 * N)
        assert abs(tree.posterior.attrs["log_evidence"][i] - log_z) < Z * tree.posterior.attrs["log_evidence_error"][i]


def test_hopeless_weights_are_said(capfd):
    """Proposals eight standard deviations away and a thousandth as wide."""
    posterior = wide(normal, shift=8.0, width=0.1)
    tree = posterior.sample(N, given={"y": Y}, key=jax.random.key(2), refine=True)
    assert tree.posterior.attrs["pareto_k"] > 0.7
    said = " ".join(capfd.readouterr().err.split())
    assert "far from prior × likelihood" in said
    assert "more simulations" in said


def test_a_simulator_has_no_density_of_its_own(capfd):
    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(lambda key, mu: mu + jax.random.normal(key), mu))

    posterior = wide(program)
    given, key = {"y": 0.3}, jax.random.key(0)
    with pytest.raises(ValueError, match="site 'y' is a Simulator"):
        posterior.sample(10, given=given, key=key, refine="program")
    with pytest.raises(ValueError, match="no likelihood was learned"):
        posterior.sample(10, given=given, key=key, refine=True)
    with pytest.raises(ValueError, match="no learned likelihood"):
        posterior.sample(10, given=given, key=key, refine="learned")
    tree = posterior.sample(10, given=given, key=key, refine="auto")
    assert "refined" not in tree.posterior.attrs
    assert "Draws are not refined" in capfd.readouterr().err


def test_auto_follows_the_held_out_simulations(posterior, capfd):
    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", cpe.Simulator(lambda key, mu: mu + jax.random.normal(key), mu))

    other = wide(program)
    object.__setattr__(other, "emulator", SimpleNamespace(likelihood=Shifted()))
    asked = {"given": {"y": 0.3}, "key": jax.random.key(0), "refine": "auto"}
    assert "refined" not in other.sample(10, **asked).posterior.attrs  # there is no score
    for refined, expected in ((-1.0, True), (-2.1, False)):
        score = {"n": 200, "plain": -2.0, "refined": refined, "error": 0.1, "draws": 100}
        other.history.refinement = score
        assert ("refined" in other.sample(10, **asked).posterior.attrs) == expected
    assert "-2.100 with it" in " ".join(capfd.readouterr().err.split())


def test_other_values_of_refine_are_an_error(posterior, unchecked):
    for bad in ("yes", "Program", 1, 0, None):
        with pytest.raises(ValueError, match="refine must be False, True, 'program', 'learned' or 'auto'"):
            posterior.likelihood_for(bad)


class Shifted(Likelihood):
    """A likelihood that is wrong by `by`."""

    words = "a wrong likelihood"
    exact = False

    by: float = 0.0

    def __call__(self, values, data):
        loc = values["w"] @ X.T if "w" in values else values["mu"][:, None]
        return norm.logpdf(data["y"], loc + self.by, 0.5).sum(-1)


def test_held_out_simulations_tell_a_right_likelihood_from_a_wrong_one(posterior):
    sims = cpe.simulate(posterior.model, 200, key=jax.random.key(7))
    values = {name: np.asarray(sims[name]) for name in posterior.graph.sites}
    right, wrong = (
        score_refined(posterior.flow, likelihood, values, ["w"], key=jax.random.key(8))
        for likelihood in (ProgramLikelihood(posterior.program, posterior.graph), Shifted(by=3.0))
    )
    # The mean log-density of the truth is minus the posterior's entropy, here in two dimensions.
    _, cov, _ = closed_form()
    best = -0.5 * np.linalg.slogdet(2 * np.pi * np.e * cov)[1]
    assert right["plain"] < wrong["plain"] + 1e-6 == right["plain"] + 1e-6
    assert right["refined"] - right["plain"] > 5 * right["error"]
    assert right["refined"] < best + Z * np.sqrt(1 / 200)  # of 200 log-densities of two dimensions, each of variance 1
    assert wrong["refined"] < wrong["plain"] - 5 * wrong["error"]
    assert right["n"] == 200
    assert right["draws"] == 100


def test_bridge_sampling_finds_the_ratio_of_normal_densities():
    """exp(−x² / 2) without its constant, which is sqrt(2 π), bridged to N(.5, 1.5²); and how large its error is."""
    found = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=500), rng.normal(0.5, 1.5, size=400)
        found.append(bridge(*(-0.5 * v**2 - np.asarray(scipy.stats.norm.logpdf(v, 0.5, 1.5)) for v in (x, y))))
    z = [(log_z - 0.5 * np.log(2 * np.pi)) / error for log_z, error in found]
    assert abs(np.mean(z)) < Z / np.sqrt(200)
    assert abs(np.std(z) - 1) < Z / np.sqrt(400)


def test_weights_are_those_of_arithmetic():
    log_w = np.log(np.arange(1.0, 101.0))
    assert np.isclose(effective_size(log_w), np.arange(1, 101).sum() ** 2 / (np.arange(1.0, 101.0) ** 2).sum())
    found = smooth(log_w - 500)  # what is common to all is kept: the tail alone is smoothed
    assert abs(found.log_mean - (np.log(50.5) - 500)) < 0.01
    assert np.isclose(logsumexp(found.log), 0)
    none = smooth(np.full(50, -np.inf))
    assert none.log_mean == -np.inf
    assert none.size == 0


def test_factors_of_moves_have_their_shares():
    found = np.asarray(factors(jax.random.key(0), 10_000, 8))
    best = 2.38 / 4
    for share, expected in (((found == 1).mean(), 0.1), (np.isclose(found, best).mean(), 0.6)):
        assert abs(share - expected) < Z * np.sqrt(expected * (1 - expected) / 10_000)
    assert found.min() >= 0.02 * (1 - 1e-5)


def test_refine_takes_parameters_that_are_given():
    """mu is given: b | mu, y is N((mu + 4 y) / 5, 1 / 5); what is given has the density N(mu; 0, 1) N(y; mu, 1.25)."""

    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(b, 0.5))

    model = cpe.Model(program, observed=["y"])
    sims = cpe.simulate(model, 200, key=jax.random.key(0))
    rows = {name: np.asarray(sims[name]) for name in model.graph.sites}
    method = cpe.CPE(first=["mu"], width=8, depth=1, hidden=8, components=2)
    flow = method.build(model.bound, model.graph, rows, key=jax.random.key(1))
    posterior = Posterior(flow, model, method, Training(), History(), 200)
    tree = posterior.sample(N, given={"mu": 1.0, "y": 0.3}, key=jax.random.key(2), refine=True)
    agrees(tree.posterior["b"].values[0][:, None], np.array([0.44]), np.array([[0.2]]), n=0.8 * N)
    log_z = float(norm.logpdf(1.0, 0, 1) + norm.logpdf(0.3, 1.0, np.sqrt(1.25)))
    found = tree.posterior.attrs
    assert abs(found["log_evidence"] - log_z) < Z * found["log_evidence_error"] < 1


@pytest.mark.slow
def test_random_densities_cannot_be_refined():
    def program():
        with numpyro.plate("row", 40):
            mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(mu, 1.0))

    model = cpe.Model(program, observed=["y"])
    sims = cpe.simulate(model, 100, key=jax.random.key(0))
    rows = {name: np.asarray(sims[name]) for name in model.graph.sites}
    method = cpe.FMPE(width=8, hidden=8)
    flow = method.build(model.bound, model.graph, rows, key=jax.random.key(1))
    posterior = Posterior(flow, model, method, Training(), History(), 100)
    with pytest.raises(ValueError, match="estimated with an error"):
        posterior.sample(20, given={"y": np.zeros(40)}, key=jax.random.key(2), refine=True)


def test_impossible_data_are_an_error():
    def program():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Uniform(0.0, jnp.exp(mu)))

    posterior = wide(program)
    with pytest.raises(FloatingPointError, match="above zero"):
        refine(posterior.flow, posterior.likelihood("program"), {"y": jnp.asarray(-1.0)}, 10, key=jax.random.key(0))


def test_draws_that_rounding_makes_equal_are_not_copies(capfd):
    """A posterior a hundred times narrower than its prior has few different float32 numbers."""

    def program():
        t = numpyro.sample("t", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(t, 0.01))

    tree = wide(program, width=0.01, shift=1.5).sample(10_000, given={"y": 1.5}, key=jax.random.key(4), refine=True)
    values, found = tree.posterior["t"].values[0], tree.posterior.attrs
    assert len(np.unique(values)) < 9_900
    assert found["distinct_share"] == 1
    assert found["moves"] < 600
    assert "not enough" not in capfd.readouterr().err


def test_a_likelihood_that_is_constant_does_not_keep_moves_going(capfd):
    def program():
        t = numpyro.sample("t", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.TransformedDistribution(dist.Uniform(-1.0, 1.0), [AffineTransform(t, 1.0)]))

    tree = wide(program).sample(N, given={"y": 1.5}, key=jax.random.key(5), refine=True)
    values, found = tree.posterior["t"].values[0], tree.posterior.attrs
    exact = scipy.stats.truncnorm(0.5, 2.5)
    assert scipy.stats.kstest(values, exact.cdf).pvalue > 1e-4
    assert found["start_correlation"] < 0.7
    assert found["moves"] < 600
    assert "not enough" not in capfd.readouterr().err


def test_impossible_parameters_have_no_likelihood_with_validation_off():
    """By NumPyro a uniform distribution has a density outside its support, unless it validates."""

    def program():
        t = numpyro.sample("t", dist.Exponential(0.2))
        with numpyro.handlers.mask(mask=jnp.array([True, False])):
            numpyro.sample("y", dist.Uniform(0.0, t).expand([2]))

    with numpyro.validation_enabled(False):
        posterior = wide(program)
        tree = posterior.sample(N, given={"y": np.array([1.5, 0.0])}, key=jax.random.key(6), refine=True)
    values = tree.posterior["t"].values[0]
    assert values.min() >= 1.5
    # p(t | y) ∝ exp(-t / 5) / t above 1.5
    grid = np.linspace(1.5, 80, 200_001)
    density = np.exp(-grid / 5) / grid
    cdf = np.cumsum(density) / density.sum()
    assert scipy.stats.kstest(values, lambda x: np.interp(x, grid, cdf)).pvalue > 1e-4


def test_the_programs_density_reaches_beyond_what_was_simulated():
    """Coordinates of long-tailed families end at the furthest simulated one, for networks; not for exact densities."""

    def program():
        t = numpyro.sample("t", dist.LogNormal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(jnp.log(t), 0.2))

    posterior = wide(program, width=0.4, shift=-2.9)
    tree = posterior.sample(N, given={"y": -3.3}, key=jax.random.key(7), refine=True)
    z, found = np.log(tree.posterior["t"].values[0]), tree.posterior.attrs
    mean, sd = -3.3 / 1.04, np.sqrt(0.04 / 1.04)
    least = float(posterior.flow.coordinates.limit("t")[0])
    assert scipy.stats.norm.cdf(least, mean, sd) > 0.3  # of the exact posterior is where no draw of the flow can be
    agrees(z[:, None], np.array([mean]), np.array([[sd**2]]), n=0.8 * N)
    assert found["evidence_by"] == "bridge sampling"
    log_z = scipy.stats.norm.logpdf(-3.3, 0, np.sqrt(1.04))
    assert abs(found["log_evidence"] - log_z) < Z * found["log_evidence_error"] < 0.3


@pytest.mark.parametrize("d", [100, 300])
def test_evidence_in_more_dimensions_than_draws_tell_a_covariance_of(d):
    """N(0, C) without its constant, 1,000 draws; neighbours are correlated with .5."""
    rng, place = np.random.default_rng(d), np.arange(d)
    covariance = 0.5 ** np.abs(place[:, None] - place)
    z = rng.multivariate_normal(np.zeros(d), covariance, size=1_000)
    inverse = np.linalg.inv(covariance)

    def density(z):
        return -0.5 * np.einsum("ni,ij,nj->n", z, inverse, z)

    log_z, error = evidence(z, density(z), density, seed=0)
    exact = 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
    assert abs(log_z - exact) < Z * error or error > MOST_ERROR
    assert d > 100 or error < MOST_ERROR
