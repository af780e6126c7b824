# %% [markdown]
# # Eight schools
#
# *You learn: to write a model with groups as a program, to read its graph, and to compare with MCMC.*
#
# Does coaching raise test scores? Eight schools tried it (Rubin 1981). For each we have an estimate of the effect, in
# points, and the standard error of that estimate:

# %%
import jax.numpy as jnp
import numpy as np

effect = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

# %% [markdown]
# School A gained 28 points. Shall we believe it? Its standard error is 15, and the other schools gained less. Between
# "each school for itself" and "all schools are the same" lies a *hierarchical* model: the true effects `theta`
# scatter around a common mean `mu`, by an amount `tau` that we do not know either.
#
# ## The program
#
# Write the model as it is drawn: first what is common to all schools, then, in a `plate`, what each school has of its
# own.

# %%
import jax
import numpyro
import numpyro.distributions as dist

import cpejax as cpe


def program():
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = numpyro.sample("tau", dist.HalfNormal(10.0))
    with numpyro.plate("school", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, error))


model = cpe.Model(program, observed=["y"])

# %% [markdown]
# ## What was read off it
#
# Nothing has been simulated yet. Look at the graph first.

# %%
print(model.graph)
print(cpe.invert(model.graph))
cpe.plot.graph(model)

# %% [markdown]
# On the left is your program. The library also noticed the constant `error`: it tells the schools apart, so whatever
# reads a school's data reads its error too.
#
# On the right is the *posterior program*. It runs the other way: draw `tau` given all data, then `mu` given `tau` and
# all data, then each `theta` given both and the data *of its own school*. This is what will be trained. That a
# school's effect needs no other school's data, once `mu` and `tau` are known, is a fact about the model; a network
# that is given the graph need not learn it.
#
# ## Fit and draw
#
# JAX can run this program, so we need not simulate beforehand: `cpe.fit` without simulations makes new ones all the
# time.

# %%
post = cpe.fit(model, training=cpe.Training(steps=6_000), key=jax.random.key(0))
draws = post.sample(4_000, given={"y": effect}, key=jax.random.key(1))
cpe.plot.forest(draws)

# %% [markdown]
# School A is no longer at 28. It was pulled towards the others, as were all: this is *shrinkage*, and how strong it
# is was learned from the data.

# %%
theta = draws.posterior["theta"].values[0]
for name, y, mean in zip("ABCDEFGH", effect, theta.mean(0), strict=True):
    print(f"school {name}: estimated {y:5.1f}, posterior mean {mean:5.1f}")

# %% [markdown]
# ## Is it right?
#
# Here the likelihood is known, so we can ask MCMC. NumPyro's NUTS samples the same posterior. (It is written with
# standardised effects, because NUTS gets stuck in the narrow funnel at small `tau`. The ancestral flow has no such
# trouble: it draws `tau` first.)

# %%
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

centred_at_zero = numpyro.handlers.reparam(
    numpyro.handlers.condition(program, {"y": jnp.asarray(effect)}),
    config={"theta": LocScaleReparam(0.0)},
)
mcmc = MCMC(
    NUTS(centred_at_zero, target_accept_prob=0.95),
    num_warmup=1_000,
    num_samples=4_000,
    progress_bar=False,
)
mcmc.run(jax.random.key(2))
exact = mcmc.get_samples()
for name in ("mu", "tau"):
    ours, theirs = draws.posterior[name].values, np.asarray(exact[name])
    print(
        f"{name}: {ours.mean():.2f} ± {ours.std():.2f} by cpejax, {theirs.mean():.2f} ± {theirs.std():.2f} by NUTS"
    )
apart = np.abs(theta.mean(0) - np.asarray(exact["theta"]).mean(0))
print(f"largest difference of a theta's mean: {apart.max():.2f}")

# %% [markdown]
# ## Why not simply MCMC?
#
# For one data set with a likelihood, MCMC is fine. But this posterior answers for *any* eight effects, at once. So we
# can ask what would have happened if school A had reported more. Forty data sets, one call:

# %%
import matplotlib.pyplot as plt

reported = np.linspace(0.0, 80.0, 40)
many = np.tile(effect, (40, 1))
many[:, 0] = reported
draws = post.sample(1_000, given={"y": many}, key=jax.random.key(3))
of_a = draws.posterior["theta"].values[0][:, :, 0]  # draws, data sets

figure, axes = plt.subplots(
    figsize=(6, 3), num="What we believe of school A against what it reports"
)
axes.fill_between(reported, *np.quantile(of_a, [0.05, 0.95], axis=0), alpha=0.3)
axes.plot(reported, of_a.mean(0))
axes.plot(reported, reported, color="grey", linestyle=":")
axes.set(xlabel="reported by school A", ylabel="its true effect")

# %% [markdown]
# Of a report of 28 a third is left. A report of 80 can no longer be explained by noise: `tau` must be large,
# schools do differ, and the pull towards the others becomes weaker.
#
# ## What to remember
#
# * Groups are a `plate`. What each member has of its own (an error, a covariate) may simply be used in the program.
# * Look at the graph before you simulate.
# * Training is paid once. Questions of the form "what if the data were" cost nothing after it.
