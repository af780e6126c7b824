# %% [markdown]
# # A field of pixels
#
# *You learn: to infer parameters from an image, with a convolutional network, and how many simulations
# that takes.*
#
# Trees in a forest, galaxies on the sky, cells under a microscope: counts in the squares of a grid, more of them here
# and fewer there. How strongly do they cluster, and over what distance?
#
# The model is a *log-Gaussian Cox process*. The logarithm of the density is a smooth random field; in each pixel, the
# count is a Poisson number. The likelihood is an integral over all fields, 576 dimensions here. A simulation is one
# Fourier transform.
#
# ## The simulator
#
# White noise, smoothed by a filter. `length` is the width of clumps in pixels, `strength` how much the log-density
# varies, and `mean` the expected count in a pixel.

# %%
import jax
import jax.numpy as jnp
import numpy as np

SIDE = 24
wave = 2 * jnp.pi * jnp.hypot(jnp.fft.fftfreq(SIDE)[:, None], jnp.fft.rfftfreq(SIDE))


def forest(key, length, strength, mean):
    a, b = jax.random.split(key)
    filter_ = jnp.exp(-0.25 * (wave * length) ** 2)
    # In closed form: the variance of white noise after the filter, so that the field has the variance asked for.
    whole = jnp.concatenate([filter_, filter_[:, 1:-1]], axis=1)
    noise = jnp.fft.rfft2(jax.random.normal(a, (SIDE, SIDE)))
    smooth = jnp.fft.irfft2(noise * filter_, s=(SIDE, SIDE))
    field = strength * smooth / jnp.sqrt(jnp.mean(whole**2))
    return jax.random.poisson(b, mean * jnp.exp(field - strength**2 / 2)).astype(float)


# %% [markdown]
# Look at four forests before anything else.

# %%
import matplotlib.pyplot as plt

settings = [(1.0, 0.3), (1.0, 1.2), (4.0, 0.3), (4.0, 1.2)]
figure, axes = plt.subplots(1, 4, figsize=(7.4, 2.1), num="Four forests")
for ax, (length, strength) in zip(axes, settings, strict=True):
    counts = forest(jax.random.key(3), length, strength, 3.0)
    ax.imshow(counts, cmap="Greens", vmin=0, vmax=15)
    ax.set(title=f"length {length:g}, strength {strength:g}", xticks=[], yticks=[])

# %% [markdown]
# ## The model and the network
#
# Where a clump is does not matter, only how clumps look. That is what a convolutional network is made for: the same
# small windows over all pixels, and then a mean. `dims=2` says that `(24, 24)` is an image, and not a series of 24
# steps with 24 channels.

# %%
import numpyro.distributions as dist

import cpejax as cpe

prior = {
    "length": dist.Uniform(0.5, 6.0),
    "strength": dist.Uniform(0.1, 1.5),
    "mean": dist.LogNormal(jnp.log(3.0), 0.4),
}
model = cpe.Model.from_prior(prior, forest, observed="counts")
network = cpe.ConvEmbedding((SIDE, SIDE), dims=2, width=24, key=jax.random.key(0))
method = cpe.CPE(embed={"counts": network})
training = cpe.Training(max_epochs=20)
post = cpe.fit(model, method=method, training=training, key=jax.random.key(1))
print(post.history.score)

# %% [markdown]
# JAX runs the simulator, so every epoch had new images: no image was seen twice, and nothing could be learned by
# heart. With a fixed set of simulations, an image model needs a large one.
#
# ## One forest

# %%
truth = {"length": 2.5, "strength": 0.8, "mean": 3.0}
counts = forest(jax.random.key(11), *truth.values())
draws = post.sample(4_000, given={"counts": counts}, key=jax.random.key(2))
cpe.plot.pair(draws, truth=truth)

# %% [markdown]
# ## Two hundred forests
#
# Does it work for others too? Two hundred new forests, one call, and for each parameter the posterior mean against
# the truth.

# %%
test = cpe.simulate(model, 200, key=jax.random.key(3))
many = post.sample(500, given={"counts": test["counts"]}, key=jax.random.key(4))

figure, axes = plt.subplots(
    1, 3, figsize=(7.4, 2.5), num="Posterior means against the truth"
)
for ax, name in zip(axes, prior, strict=True):
    x = many.posterior[name].values[0]
    mean, (low, high) = x.mean(0), np.quantile(x, [0.05, 0.95], axis=0)
    ax.errorbar(test[name], mean, [mean - low, high - mean], fmt=".", alpha=0.3)
    ends = [test[name].min(), test[name].max()]
    ax.plot(ends, ends, color="black", linewidth=1)
    ax.set(title=name, xlabel="truth")
    inside = np.mean((low < test[name]) & (test[name] < high))
    print(f"90 % intervals of {name} hold the truth for {inside:.0%} of the forests")

# %% [markdown]
# The bars are 90 % intervals. Expect wide ones for long lengths: where clumps are as wide as a quarter of the image,
# there is only a handful of them to learn from. A posterior that says so is as it should be.
#
# ## What to remember
#
# * An image is one site with `event_shape=(height, width)`, and a `ConvEmbedding(..., dims=2)`.
# * Leave out simulations if JAX can run the simulator: `cpe.fit(model, key=key)` makes fresh ones.
# * For other shapes of data (graphs, point sets), any Equinox module that returns a vector can be the embedding.
