# %% [markdown]
# # Getting started
#
# From a simulator of your own to a posterior that you have checked. Ten minutes to read, a few minutes to run.
#
# You need Python 3.11 or newer, and the package: [install it](index.md#install) first.
#
# ## 1. A simulator
#
# A cup of coffee cools. You measure its temperature twelve times in an hour, and you want to know how fast it cools
# and how warm the room is.
#
# A *simulator* is a function that makes such data. It takes a source of random numbers first, then the parameters.
# This one is plain NumPy, step by step, as a simulator often is. (Newton's law of cooling has a closed form; we
# pretend not to know it.)

# %%
import numpy as np

MINUTES = np.arange(5, 65, 5)  # when the temperature is measured


def coffee(rng, rate, room, noise):
    temperature, measured = 90.0, []
    for minute in range(1, 61):
        temperature -= rate / 100 * (temperature - room)
        if minute in MINUTES:
            measured.append(temperature + noise * rng.normal())
    return np.array(measured)


# %% [markdown]
# Call it once, to see that it works.

# %%
print(coffee(np.random.default_rng(0), rate=5.0, room=20.0, noise=0.5).round(1))

# %% [markdown]
# ## 2. What you know before the data
#
# A *prior* says which values of the parameters are plausible before you see the data. Priors are [NumPyro
# distributions](https://num.pyro.ai/en/stable/distributions.html).
#
# * The cup loses a few percent of its excess heat each minute: a log-normal distribution around 4.
# * Rooms have about 20 degrees.
# * The thermometer errs by about one degree, and the error cannot be negative.
#
# Prior and simulator together are the *model*.

# %%
import jax
import numpyro.distributions as dist

import cpejax as cpe

prior = {
    "rate": dist.LogNormal(np.log(4.0), 0.5),
    "room": dist.Normal(20.0, 3.0),
    "noise": dist.HalfNormal(1.0),
}
model = cpe.Model.from_prior(prior, coffee, observed="temperature", host=True)
print(model.graph)

# %% [markdown]
# `host=True` says that the simulator is NumPy, or anything else that is not JAX. `observed` names the data. The graph
# shows what was understood: three parameters, and data of shape `(12,)` that depend on all of them.
#
# ## 3. Simulate
#
# Draw parameters from the prior and run the simulator with each set. Everything random takes a `key`, so that you can
# repeat it.

# %%
sims = cpe.simulate(model, 10_000, key=jax.random.key(0))
print({name: values.shape for name, values in sims.items()})

# %% [markdown]
# Always look at what you simulated. If your data could not be among these curves, the prior is wrong, and nothing
# that follows will help. The black points are the data that we will use. They were simulated too, with a rate of 6
# percent a minute, in a room of 22 degrees and with a noise of .6, so that we can see whether the answer is right.

# %%
import matplotlib.pyplot as plt

truth = {"rate": 6.0, "room": 22.0, "noise": 0.6}
data = {"temperature": coffee(np.random.default_rng(5), **truth)}

figure, axes = plt.subplots(
    figsize=(6, 3), num="A hundred simulated cups, and the data"
)
axes.plot(MINUTES, sims["temperature"][:100].T, color="tab:blue", alpha=0.15)
axes.plot(MINUTES, data["temperature"], "o", color="black")
axes.set(xlabel="minutes", ylabel="temperature")

# %% [markdown]
# ## 4. Fit
#
# This takes most of the time, a minute or two. A network learns, from the simulations, what data tell about
# parameters. It does not see your data yet. We ask for 5,000 steps of training; the default is 20,000, which takes
# longer and makes the posterior a little sharper.

# %%
post = cpe.fit(model, sims, training=cpe.Training(steps=5_000), key=jax.random.key(1))
print(post)

# %% [markdown]
# ## 5. Draw from the posterior
#
# Now give it the data. The draws come as an [ArviZ](https://python.arviz.org) tree with the names that you chose, and
# any ArviZ function can read them.

# %%
import arviz_stats

draws = post.sample(4_000, given=data, key=jax.random.key(2))
print(arviz_stats.summary(draws, kind="stats"))
cpe.plot.marginals(draws, prior=sims, truth=truth)

# %% [markdown]
# The dashed line is the prior, blue the posterior, and the orange line the truth. The data say much about the rate and
# the room: there the prior looks flat beside the posterior. They say less about the noise, which twelve numbers cannot
# pin down.
#
# ## 6. Check
#
# A network can be wrong, and a wrong posterior looks as smooth as a right one. So check it. `cpe.check` simulates
# 1,000 new cups, whose parameters are known, and asks whether their posteriors hold the truth as often as they
# should. It also asks whether *your* data look like anything that was simulated.

# %%
found = cpe.check(post, given=data, key=jax.random.key(3))
print(found)

# %% [markdown]
# Each line says `ok` or `BAD`, and says in words what was found. With a thousand cups the check is strict. When we
# ran this, it minded one thing: *Coverage* found the posterior a little too wide, because regions that should hold
# 90 % of the true parameters held 92 %. Such a posterior is cautious, and longer training makes it sharper. Too narrow
# would be worse: it claims to know what it does not. [Is my posterior right?](howto/is-it-right.md) tells what to do
# about each line.
#
# The figure looks at your data. Above, the orange points are the measured temperatures. The blue bars show what the
# posterior predicts; they are short, so look closely. Below, the same for a few summaries of the curve: the orange line
# should lie within the blue.

# %%
cpe.plot.predictive(found)

# %% [markdown]
# ## 7. Use it again
#
# Training is done once. For another cup, draw again: nothing is trained, and nothing is compiled a second time. This
# one cooled at 3 percent a minute in a room of 18 degrees.

# %%
another = coffee(np.random.default_rng(6), rate=3.0, room=18.0, noise=0.3)
draws = post.sample(4_000, given={"temperature": another}, key=jax.random.key(4))
print(arviz_stats.summary(draws, kind="stats"))

# %% [markdown]
# And keep it. The folder holds numbers only, no code, so it is safe to share; who loads it needs the model.

# %%
post.save("coffee/")
post = cpe.load("coffee/", model)

# %% [markdown]
# ## Where to go from here
#
# * Your parameters have groups, or priors that depend on one another: write a [program](tutorials/eight_schools.md)
#   instead of `from_prior`.
# * Your simulator is [slow](howto/slow-simulator.md), [not Python](howto/other-language.md), or [fails at
#   times](howto/nan.md).
# * Your data are a [series](howto/time-series.md) or an [image](howto/images.md).
# * The same from a shell, with a report in one HTML file: [from the shell](infer.md).
