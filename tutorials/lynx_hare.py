# %% [markdown]
# # Predator and prey
#
# *You learn: to put a differential equation into a program, to see when a network's draws are not
# sharp enough, and to refine them.*
#
# The Hudson's Bay Company counted the pelts that trappers brought in. From 1900 to 1920, in thousands:

# %%
import numpy as np

YEARS = np.arange(1900, 1921)
hare = [
    30.0, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22.0, 25.4, 27.1,
    40.3, 57.0, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6, 16.2, 24.7,
]  # fmt: skip
lynx = [
    4.0, 6.1, 9.8, 35.2, 59.4, 41.7, 19.0, 13.0, 8.3, 9.1, 7.4,
    8.0, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6,
]  # fmt: skip
log_pelts = np.log(np.stack([hare, lynx], axis=1))  # (21, 2)

# %% [markdown]
# The lynx eats the hare. Lotka and Volterra wrote down what follows: hares `u` multiply at a rate `alpha` and are
# eaten at a rate `beta v`; lynxes `v` die at a rate `gamma` and multiply at a rate `delta u`. How fast are these
# four, and how well does so simple a model describe the counts? The priors, and the answer to compare with, are in
# [Stan's case study](https://mc-stan.org/learn-stan/case-studies/lotka-volterra-predator-prey.html).
#
# ## The equation
#
# Any JAX code may stand in a program. Here it is the classical Runge-Kutta method, 20 steps a year, for the
# logarithms of both populations, which cannot become negative. Some prior draws are absurd (a rate of growth of 100 a
# year); `clip` keeps these from overflowing, and touches no others.

# %%
import jax
import jax.numpy as jnp

STEPS = 20  # a year


def populations(start, alpha, beta, gamma, delta):
    """Logarithms of hares and lynxes in each of the 21 years, `(21, 2)`."""

    def slope(z):
        u, v = jnp.exp(jnp.clip(z, -20.0, 8.0))
        return jnp.clip(jnp.stack([alpha - beta * v, delta * u - gamma]), -50.0, 50.0)

    def step(z, _):
        h = 1 / STEPS
        a = slope(z)
        b = slope(z + h / 2 * a)
        c = slope(z + h / 2 * b)
        d = slope(z + h * c)
        return jnp.clip(z + h / 6 * (a + 2 * b + 2 * c + d), -20.0, 8.0), None

    def year(z, _):
        z, _ = jax.lax.scan(step, z, None, STEPS)
        return z, z

    start = jnp.log(start)
    _, later = jax.lax.scan(year, start, None, len(YEARS) - 1)
    return jnp.concatenate([start[None], later])


# %% [markdown]
# ## The program
#
# The counts scatter around the populations by a factor: their logarithms have normal noise, with a `sigma` for each
# animal.

# %%
import numpyro
import numpyro.distributions as dist

import cpejax as cpe


def program():
    alpha = numpyro.sample("alpha", dist.TruncatedNormal(1.0, 0.5, low=0.0))
    beta = numpyro.sample("beta", dist.TruncatedNormal(0.05, 0.05, low=0.0))
    gamma = numpyro.sample("gamma", dist.TruncatedNormal(1.0, 0.5, low=0.0))
    delta = numpyro.sample("delta", dist.TruncatedNormal(0.05, 0.05, low=0.0))
    start = numpyro.sample(
        "start", dist.LogNormal(jnp.log(10.0), 1.0).expand([2]).to_event(1)
    )
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.0, 1.0).expand([2]).to_event(1))
    z = populations(start, alpha, beta, gamma, delta)
    numpyro.sample("log_pelts", dist.Normal(z, sigma).to_event(2))


model = cpe.Model(program, observed=["log_pelts"])
sims = cpe.simulate(model, 10_000, key=jax.random.key(0))

# %% [markdown]
# ## Fit
#
# The data are two series of 21 years. A small convolutional network reads them: it finds peaks wherever they are,
# with the same weights. Its features go to the flows of all eight parameters.

# %%
shape = (len(YEARS), 2)
network = cpe.ConvEmbedding(shape, dims=1, out=48, width=48, key=jax.random.key(1))
method = cpe.CPE(embed={"log_pelts": network})
training = cpe.Training(steps=5_000)
post = cpe.fit(model, sims, method=method, training=training, key=jax.random.key(2))
print(post.history.score)

# %% [markdown]
# ## Draw, and draw better
#
# The prior is wide and the data are informative, so the posterior is a tiny part of the prior. A network that has to
# answer for *all* possible data need not be very sharp for *these*. But this program has a density, so the draws can be
# improved: `refine=True` takes them as proposals, weights them by prior × likelihood, and moves them until they have
# forgotten where they began.

# %%
import arviz_stats

given = {"log_pelts": log_pelts}
rough = post.sample(4_000, given=given, key=jax.random.key(3))
draws = post.sample(4_000, given=given, refine=True, key=jax.random.key(3))
about = draws.posterior.attrs
print(f"Pareto k {about['pareto_k']:.2f}")
print(about["tempering_steps"], "weightings,", about["moves"], "moves")
print(arviz_stats.summary(draws, kind="stats", round_to=3))

# %% [markdown]
# Stan's case study has .55 for `alpha`, .028 for `beta`, .80 for `gamma`, .024 for `delta`, both `sigma` at .25, and
# 34 and 5.9 thousand animals at the start.
#
# How far did the refinement have to go? Blue are the refined draws. The dashed line, which the legend calls prior
# because that is where it usually stands, are the network's own.

# %%
before = {
    name: rough.posterior[name].values[0]
    for name in ("alpha", "beta", "gamma", "delta")
}
cpe.plot.marginals(draws, prior=before, parameters=list(before))

# %% [markdown]
# ## Does the model describe the counts?
#
# Solve the equation for each draw, and see how the curves lie among the data.

# %%
import matplotlib.pyplot as plt

names = ("start", "alpha", "beta", "gamma", "delta")
values = [draws.posterior[name].values[0] for name in names]
curves = np.exp(jax.vmap(populations)(*values))  # (draws, 21, 2)

figure, axes = plt.subplots(
    figsize=(6, 3), num="Hares and lynxes: data, and 90 % of the posterior's curves"
)
for i, (animal, pelts) in enumerate([("hare", hare), ("lynx", lynx)]):
    axes.fill_between(
        YEARS,
        *np.quantile(curves[:, :, i], [0.05, 0.95], axis=0),
        alpha=0.3,
        label=animal,
    )
    axes.plot(YEARS, pelts, "o-", markersize=3, linewidth=0.5, color=f"C{i}")
axes.set(xlabel="year", ylabel="pelts, thousands", xticks=YEARS[::4])
axes.legend()

# %% [markdown]
# In the data there are about ten years from peak to peak, and the lynx follows the hare by one or two. Look whether the
# curves have that. `sigma` says how far the counts scatter around them: by a factor of exp(`sigma`), or about a quarter
# of each count in Stan's case study.
#
# ## What to remember
#
# * A program may contain any JAX code, a solver too.
# * Where the likelihood is known, let `refine=True` have the last word, and look at `pareto_k`: below .7 the weights
#   can be relied upon. Above, the moves did more of the work, and more simulations or longer training would make the
#   result safer.
# * Where it is not known, the check tells whether the network is sharp enough: see [the epidemic](epidemic.md).
