# %% [markdown]
# # A wrong model, and how one finds out
#
# *You learn: what a posterior looks like when the model is wrong, which checks notice, and how to decide
# between models.*
#
# In 1882 Simon Newcomb measured the time that light takes for 7.4 kilometres, 66 times (Stigler 1977). These are the
# deviations from 24,800 nanoseconds:

# %%
import numpy as np

times = np.array([
    28, 26, 33, 24, 34, -44, 27, 16, 40, -2, 29, 22, 24, 21, 25, 30, 23, 29, 31, 19, 24, 20,
    36, 32, 36, 28, 25, 21, 28, 29, 37, 25, 28, 26, 30, 32, 36, 26, 30, 22, 36, 23, 27, 27,
    28, 27, 31, 27, 26, 33, 26, 32, 32, 24, 39, 28, 24, 25, 32, 25, 29, 27, 28, 29, 16, 23,
], float)  # fmt: skip

# %% [markdown]
# ## The obvious model
#
# Measurements scatter around a true value: a normal distribution with unknown mean and standard deviation.

# %%
import jax
import numpyro
import numpyro.distributions as dist

import cpejax as cpe


def normal():
    mean = numpyro.sample("mean", dist.Normal(25.0, 10.0))
    sd = numpyro.sample("sd", dist.LogNormal(2.0, 0.7))
    with numpyro.plate("measurement", len(times)):
        numpyro.sample("time", dist.Normal(mean, sd))


simple = cpe.Model(normal, observed=["time"])
training = cpe.Training(max_epochs=20)
post = cpe.fit(simple, training=training, key=jax.random.key(0))
draws = post.sample(4_000, given={"time": times}, key=jax.random.key(1))
cpe.plot.marginals(draws, prior=cpe.simulate(simple, 4_000, key=jax.random.key(2)))

# %% [markdown]
# A posterior like any other, and nothing about it looks wrong. The model has to explain all 66 values by one bell
# curve, and with a standard deviation of about ten it does what it can. Whether the *model* is right, a posterior does
# not ask. The check does:

# %%
found = cpe.check(post, given={"time": times}, n=500, draws=500, key=jax.random.key(3))
print(found)

# %% [markdown]
# Read it line by line. The lines on calibration say that the posterior is what it should be *on data that the model
# makes*. The last two are about the data at hand. `Observation` asks whether the model could have made such data with
# *any* parameters of the prior, and finds nothing: a large enough `sd` would do. `Posterior predictive` asks the
# same of the parameters that the posterior found, and finds the fault: the smallest value, −44, lies far below all
# that they predict. In the figure the point lies outside the band above, and the line outside the bars below.

# %%
cpe.plot.predictive(found)

# %% [markdown]
# ## A model that allows for accidents
#
# Two of the 66 measurements went wrong somehow. A Student distribution has a further parameter, the weight of its
# tails: with few degrees of freedom `df`, a far value now and then is no surprise, and does not pull the mean.


# %%
def student():
    mean = numpyro.sample("mean", dist.Normal(25.0, 10.0))
    sd = numpyro.sample("sd", dist.LogNormal(2.0, 0.7))
    df = numpyro.sample("df", dist.LogNormal(1.0, 1.0))
    with numpyro.plate("measurement", len(times)):
        numpyro.sample("time", dist.StudentT(df, mean, sd))


robust = cpe.Model(student, observed=["time"])
robust_post = cpe.fit(robust, training=training, key=jax.random.key(4))
robust_draws = robust_post.sample(4_000, given={"time": times}, key=jax.random.key(5))
for name, tree in [("normal", draws), ("Student", robust_draws)]:
    mean = tree.posterior["mean"].values
    print(f"{name}: mean {mean.mean():.2f} ± {mean.std():.2f}")

# %% [markdown]
# The robust mean is higher by about one, and twice as sure: two bad values no longer pull it down. (In these units, the
# value accepted today is 33. So there was also an error that no model of the scatter can find.)

# %%
robust_found = cpe.check(
    robust_post, given={"time": times}, n=500, draws=500, key=jax.random.key(6)
)
print(robust_found)

# %% [markdown]
# `Posterior predictive` has no complaint any more. Should another line have one on your machine, it is about the
# network, which was trained for 20 epochs only, and not about the model: longer training is the answer to it.
#
# ## Which of the two?
#
# `cpe.compare` computes the *evidence* of each: how probable the model made these data before it saw them. It uses
# the program's own density, and says with which error.

# %%
result = cpe.compare(
    {"normal": post, "Student": robust_post},
    given={"time": times},
    key=jax.random.key(7),
)
print(result)

# %% [markdown]
# Evidence is relative. It tells which of two models is better, not whether either is good; that was the check's
# question. Ask both.
#
# ## What to remember
#
# * A posterior is right *given the model*. Whether the model fits is another question, and only the data can answer
#   it.
# * `Observation` and `Posterior predictive` are the two lines of `cpe.check` that need your data. Always give them.
# * When one of them fails and the others do not, do not train longer. Change the model.
