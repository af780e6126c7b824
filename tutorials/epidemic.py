# %% [markdown]
# # An epidemic in a boarding school
#
# *You learn: to use a random simulator without a likelihood, to check it against data, and to ask
# questions of the posterior.*
#
# In January 1978 influenza broke out in a boarding school for boys in the north of England (British Medical Journal,
# 4 March 1978, page 587). There were 763 boys. On each of 14 days someone counted how many were in bed:

# %%
import numpy as np

BOYS, DAYS = 763, 14
in_bed = np.array([3, 8, 26, 76, 225, 298, 258, 233, 189, 128, 68, 29, 14, 4])

# %% [markdown]
# How many boys did each ill one infect? How long was a boy ill?
#
# ## The simulator
#
# Each boy is susceptible, infected or recovered. In a short time `dt` a susceptible one becomes infected with a
# probability that grows with the share of infected boys, and an infected one recovers. Both are chances, so the
# epidemic is random: it may die out by luck, or be late. On top of that, the count of boys in bed is not exact.
#
# For this model nobody can write down the probability of the 14 counts: it is a sum over all ways in which the
# epidemic can have gone. Simulating it is easy. The simulator runs all rows at once (`vectorized=True`), which in
# NumPy is much faster than one by one.

# %%
STEPS = 10  # a day


def epidemic(rng, infection, recovery, scatter):
    """Boys in bed on each day, `(rows, 14)`, for rates `(rows,)` per day."""
    ill = np.ones(len(infection), int)
    healthy = BOYS - ill
    counted = np.zeros((len(infection), DAYS))
    for day in range(DAYS):
        for _ in range(STEPS):
            new = rng.binomial(healthy, -np.expm1(-infection * ill / BOYS / STEPS))
            over = rng.binomial(ill, -np.expm1(-recovery / STEPS))
            healthy, ill = healthy - new, ill + new - over
        counted[:, day] = rng.poisson(ill * rng.gamma(1 / scatter, scatter))
    return counted


# %% [markdown]
# ## The model
#
# The priors are those of [Stan's case
# study](https://mc-stan.org/learn-stan/case-studies/boarding_school_case_study.html) of the same outbreak. We are
# interested in two functions of the parameters, so we name them with `deterministic`: R0, how many boys one ill boy
# infects at first, and the length of the illness. `jnp.maximum` keeps the scatter away from zero.

# %%
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import cpejax as cpe


def program():
    infection = numpyro.sample("infection", dist.TruncatedNormal(2.0, 1.0, low=0.0))
    recovery = numpyro.sample("recovery", dist.TruncatedNormal(0.4, 0.5, low=0.0))
    scatter = numpyro.sample("scatter", dist.Exponential(5.0))
    numpyro.deterministic("R0", infection / recovery)
    numpyro.deterministic("days_ill", 1 / recovery)
    box = cpe.Simulator(
        epidemic,
        infection,
        recovery,
        jnp.maximum(scatter, 1e-3),
        event_shape=(DAYS,),
        host=True,
        vectorized=True,
    )
    numpyro.sample("in_bed", box)


model = cpe.Model(program)
sims = cpe.simulate(model, 20_000, key=jax.random.key(0))

# %% [markdown]
# Look at some of what the prior believes, with the data on top.

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3), num="Simulated outbreaks, and the real one")
axes.plot(np.arange(1, DAYS + 1), sims["in_bed"][:150].T, color="tab:blue", alpha=0.12)
axes.plot(np.arange(1, DAYS + 1), in_bed, "o-", color="black")
axes.set(xlabel="day", ylabel="boys in bed")

# %% [markdown]
# Some outbreaks die out at once, some are at their peak after three or four days. The real one lies among them.
#
# ## The posterior
#
# By default `cpe.fit` would learn the simulator as well and train on what it learned. Simulations are cheap here, so
# we made more of them instead, and leave that out.

# %%
import arviz_stats

training = cpe.Training(steps=9_000)
post = cpe.fit(model, sims, training=training, emulate=False, key=jax.random.key(1))
draws = post.sample(4_000, given={"in_bed": in_bed}, key=jax.random.key(2))
print(arviz_stats.summary(draws, kind="stats"))

# %% [markdown]
# Stan's case study, with a deterministic epidemic and the same priors, finds an R0 near 3.2 and an illness of about
# 1.9 days. Compare the rows `R0` and `days_ill`. Ours is random, and may have been slow or quick by luck, so it leaves
# the rates more room. (Two days is short for an influenza. The model takes the boys in bed for those who can infect
# others, which is not quite the same.)

# %%
cpe.plot.pair(draws, parameters=["infection", "recovery", "scatter"])

# %% [markdown]
# ## Can it be trusted?

# %%
given = {"in_bed": in_bed}
found = cpe.check(post, given=given, n=500, draws=500, key=jax.random.key(3))
print(found)
cpe.plot.predictive(found)

# %% [markdown]
# The figure compares the data with outbreaks that were simulated from the posterior, day by day and in a few summaries.
# Look whether the rise, the peak and the fall lie within the bars.
#
# ## A question to the posterior
#
# Had the boys been isolated from day 5 on, so that infection fell to a quarter, how many would have been in bed at
# the peak? Simulate from the posterior with the measure in place. Each draw is one epidemic that is compatible with
# the data.


# %%
def isolated(rng, infection, recovery):
    ill, peak = np.ones(len(infection), int), 0
    healthy = BOYS - ill
    for step in range(DAYS * STEPS):
        rate = infection / 4 if step >= 4 * STEPS else infection
        new = rng.binomial(healthy, -np.expm1(-rate * ill / BOYS / STEPS))
        over = rng.binomial(ill, -np.expm1(-recovery / STEPS))
        healthy, ill = healthy - new, ill + new - over
        peak = np.maximum(peak, ill)
    return peak


rates = [draws.posterior[name].values[0] for name in ("infection", "recovery")]
peak = isolated(np.random.default_rng(0), *rates)
low, high = np.quantile(peak, [0.05, 0.95])
print(f"boys in bed at the peak: {peak.mean():.0f}, {low:.0f} to {high:.0f}")

# %% [markdown]
# (These are new epidemics with the same virus, and some of them die out by luck before day 5. For the one of 1978 from
# day 5 on, the state on that day would have to be a parameter too.)
#
# ## What to remember
#
# * A simulator that draws its own random events has no likelihood that you could write down. It does not need one.
# * `numpyro.deterministic` names what you want to know.
# * Posterior draws are inputs for the next simulation.
