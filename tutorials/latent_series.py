# %% [markdown]
# # A time series with latent states
#
# *You learn: to let a network read a series, to compare with an exact posterior, and to get the states
# back.*
#
# How much water flows down the Nile? At Aswan it was measured every year from 1871 to 1970, in 10⁸ cubic metres:

# %%
import numpy as np

flow = np.array([
    1120, 1160, 963, 1210, 1160, 1160, 813, 1230, 1370, 1140, 995, 935, 1110, 994, 1020, 960, 1180, 799, 958, 1140,
    1100, 1210, 1150, 1250, 1260, 1220, 1030, 1100, 774, 840, 874, 694, 940, 833, 701, 916, 692, 1020, 1050, 969,
    831, 726, 456, 824, 702, 1120, 1100, 832, 764, 821, 768, 845, 864, 862, 698, 845, 744, 796, 1040, 759,
    781, 865, 845, 944, 984, 897, 822, 1010, 771, 676, 649, 846, 812, 742, 801, 1040, 860, 874, 848, 890,
    744, 749, 838, 1050, 918, 986, 797, 923, 975, 815, 1020, 906, 901, 1170, 912, 746, 919, 718, 714, 740,
], float)  # fmt: skip
YEARS = len(flow)

# %% [markdown]
# The flow varies from year to year. But does its *level* change? In a state space model the level is a random walk
# that nobody sees: each year it moves by a step with standard deviation `drift`, and the flow scatters around it by
# `noise`. These are the two parameters. The hundred levels are *latent*: drawn inside the simulator and forgotten.
#
# ## The model
#
# `jax.numpy` and a cumulative sum are all that is needed. The first level is wide open.

# %%
import jax
import jax.numpy as jnp
import numpyro.distributions as dist

import cpejax as cpe

FIRST, FIRST_SD = 1000.0, 200.0


def river(key, noise, drift):
    a, b, c = jax.random.split(key, 3)
    steps = drift * jax.random.normal(a, (YEARS,)).at[0].set(0.0)
    level = FIRST + FIRST_SD * jax.random.normal(b) + jnp.cumsum(steps)
    return level + noise * jax.random.normal(c, (YEARS,))


prior = {
    "noise": dist.LogNormal(jnp.log(120.0), 0.6),
    "drift": dist.LogNormal(jnp.log(40.0), 1.0),
}
model = cpe.Model.from_prior(prior, river, observed="flow")

# %% [markdown]
# ## A network that reads series
#
# A hundred numbers in a row are not a hundred unrelated inputs. A convolutional network slides a window along the
# series, with the same weights everywhere. Give it as the *embedding* of the site. The simulator is JAX, so `cpe.fit`
# makes its own simulations, new ones in every epoch, for 20,000 steps of a hundred: a minute or two. A quarter of
# them would not do here, for a network learns the scatter of a series soon, and what moves beneath it late.

# %%
embed = {"flow": cpe.ConvEmbedding((YEARS,), key=jax.random.key(0))}
post = cpe.fit(model, method=cpe.CPE(embed=embed), key=jax.random.key(1))
draws = post.sample(4_000, given={"flow": flow}, key=jax.random.key(2))

# %% [markdown]
# ## The exact answer
#
# For this model there is one: the Kalman filter computes the likelihood of any `noise` and `drift`. Most state space
# models have none, which is why it is good to try the method where one can compare.


# %%
def log_likelihood(noise, drift):
    """By the Kalman filter: the mean `m` and variance `p` of the level, given all flows so far."""
    m, p, total = FIRST, FIRST_SD**2, 0.0
    for y in flow:
        s = p + noise**2
        total += -0.5 * (np.log(2 * np.pi * s) + (y - m) ** 2 / s)
        m, p = m + p / s * (y - m), p - p**2 / s + drift**2
    return total


noise, drift = np.meshgrid(
    np.linspace(80, 180, 101), np.geomspace(5, 150, 120), indexing="ij"
)
log_p = log_likelihood(noise, drift) + sum(
    np.asarray(prior[name].log_prob(jnp.asarray(x)))
    for name, x in [("noise", noise), ("drift", drift)]
)
exact = np.exp(log_p - log_p.max())

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(
    figsize=(5, 3.4), num="Draws, and the contours of the exact posterior"
)
found = {name: draws.posterior[name].values[0] for name in prior}
axes.plot(found["noise"], found["drift"], ".", markersize=2, alpha=0.3)
axes.contour(noise, drift, exact, levels=[0.05, 0.3, 0.7], colors="black", linewidths=1)
axes.set(xlabel="noise", ylabel="drift", yscale="log", xlim=(80, 180), ylim=(5, 150))

# %% [markdown]
# The points should fill the contours. In numbers, with the area of each cell of the grid (whose `drift` is spaced by
# factors) as its weight:

# %%
weight = exact * drift / (exact * drift).sum()
for name, grid in [("noise", noise), ("drift", drift)]:
    mean = (weight * grid).sum()
    sd = np.sqrt((weight * (grid - mean) ** 2).sum())
    ours = found[name]
    print(
        f"{name}: {ours.mean():.1f} ± {ours.std():.1f} by cpejax, {mean:.1f} ± {sd:.1f} exactly"
    )

# %% [markdown]
# ## The states
#
# The simulator forgot the levels. Given the parameters, though, they are an ordinary smoothing problem, and for each
# draw of the parameters one draw of the levels makes a draw from the joint posterior. Here by filtering forward and
# sampling back:


# %%
def levels(rng, noise, drift):
    """One path of levels for each draw, `(draws, 100)`."""
    m, p = np.full(len(noise), FIRST), np.full(len(noise), FIRST_SD**2)
    means, variances = [], []
    for y in flow:
        gain = p / (p + noise**2)
        m, p = m + gain * (y - m), (1 - gain) * p
        means.append(m)
        variances.append(p)
        p = p + drift**2
    path = [means[-1] + np.sqrt(variances[-1]) * rng.normal(size=len(noise))]
    for m, p in zip(means[-2::-1], variances[-2::-1], strict=True):
        gain = p / (p + drift**2)
        sd = np.sqrt((1 - gain) * p)
        path.append(m + gain * (path[-1] - m) + sd * rng.normal(size=len(noise)))
    return np.stack(path[::-1], axis=1)


paths = levels(np.random.default_rng(0), found["noise"], found["drift"])
years = np.arange(1871, 1971)
figure, axes = plt.subplots(
    figsize=(6, 3), num="The flow, and 90 % of the level's posterior"
)
axes.plot(years, flow, ".", color="black")
axes.fill_between(years, *np.quantile(paths, [0.05, 0.95], axis=0), alpha=0.3)
axes.plot(years, paths.mean(0))
axes.axvline(1899, color="grey", linestyle=":")
axes.set(xlabel="year", ylabel="flow")

# %% [markdown]
# The level fell around 1899 (the dotted line). In 1902 the first dam at Aswan was finished, and rain in the tropics
# had become less. A random walk cannot jump, so it slides: a model with a jump would be the next one to try, and
# [comparing models](../howto/compare-models.md) tells whether it is better.
#
# ## What to remember
#
# * What is random inside the simulator need not be named. Only parameters are inferred.
# * Series want an embedding: [`ConvEmbedding`](../reference/methods.md#cpejax.ConvEmbedding) or
#   [`RecurrentEmbedding`](../reference/methods.md#cpejax.RecurrentEmbedding).
# * Try a case with a known answer first.
