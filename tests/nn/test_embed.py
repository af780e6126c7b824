"""What networks read: standardised values, and embeddings of data."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import cpejax as cpe
from cpejax.coordinates.standardise import Standardise
from cpejax.nn.linear import on_rows

KEY = jax.random.key(0)
rng = np.random.default_rng(0)


@pytest.mark.parametrize("unit", [1e-20, 1.0, 1e20])
def test_the_unit_of_a_column_does_not_matter(unit):
    rows = rng.standard_t(3, (10_000, 2)) + 5
    standard = Standardise(unit * rows)
    features = standard(jnp.asarray(unit * rows, jnp.float32))
    assert features.shape == (10_000, standard.size)
    np.testing.assert_allclose(features, Standardise(rows)(jnp.asarray(rows, jnp.float32)), rtol=1e-3, atol=1e-3)


def test_light_tails_are_only_centred_and_scaled():
    rows = rng.normal(3, 2, (10_000, 2))
    standard = Standardise(rows)
    assert standard.heavy == ()
    features = np.asarray(standard(jnp.asarray(rows, jnp.float32)))
    np.testing.assert_allclose(features, (rows - np.median(rows, 0)) / 2, rtol=0.05, atol=1e-2)


@pytest.mark.parametrize("draw", [lambda n: rng.standard_t(3, n), lambda n: np.exp(3 * rng.normal(size=n))])
def test_heavy_tails_are_bounded_and_keep_their_ranks(draw):
    rows = np.stack([rng.normal(size=50_000), draw(50_000)], axis=1)
    standard = Standardise(rows)
    assert standard.heavy == (1,)
    features = np.asarray(standard(jnp.asarray(rows, jnp.float32)))
    assert features.shape == (50_000, 3)
    assert np.abs(features).max() <= 15
    assert stats.spearmanr(features[:, 2], rows[:, 1]).statistic > 0.9999
    assert stats.kstest(features[:, 2], "norm").statistic < 0.01
    # Also the last one in a thousand are told apart: each decade of four is.
    far = jnp.asarray(np.quantile(rows[:, 1], [0.99, 0.999, 0.9999]), jnp.float32)
    scores = standard(jnp.stack([jnp.zeros(3), far], axis=1))[:, 2]
    assert (np.diff(scores) > 0.3).all()
    assert np.isfinite(standard(jnp.array([[1e30, -1e30]]))).all()


def test_columns_that_do_not_vary():
    rows = np.concatenate([np.full((100, 1), 7.0), rng.poisson(0.1, (100, 1))], axis=1)
    features = Standardise(rows)(jnp.asarray(rows, jnp.float32))
    assert np.isfinite(features).all()
    assert (np.asarray(features[:, 0]) == 0).all()
    assert np.ptp(features[:, 1]) > 1


def test_many_heavy_columns_are_one_operation():
    rows = rng.standard_t(2, (2000, 300))
    standard = Standardise(rows)
    assert len(standard.heavy) > 200
    assert len(jax.make_jaxpr(standard)(jnp.zeros(300)).jaxpr.eqns) < 50


def test_one_number_a_column_for_embeddings():
    rows = np.stack([rng.normal(size=5000), rng.standard_t(2, 5000)], axis=1)
    standard = Standardise(rows)
    x = jnp.asarray(rows[:10], jnp.float32)
    np.testing.assert_array_equal(standard.one_each(x), standard(x)[:, [0, 2]])


def conv(shape, dims=1, **options):
    return cpe.ConvEmbedding(shape, dims=dims, **options)


def conv_of_an_image(shape, **options):
    return conv(shape, min(2, len(shape)), **options)


EMBEDDINGS = (cpe.MLPEmbedding, cpe.SetEmbedding, conv, cpe.RecurrentEmbedding)


@pytest.mark.parametrize("kind", [*EMBEDDINGS, conv_of_an_image])
@pytest.mark.parametrize("shape", [(12, 2), (3,), (40, 2, 2)])
def test_embeddings_map_one_value_to_features(kind, shape):
    embedding = kind(shape, out=5, key=KEY)
    x = jax.random.normal(KEY, shape)
    assert eqx.filter_jit(embedding)(x).shape == (5,)
    gradient = jax.grad(lambda x: embedding(x).sum())(x)
    assert (np.asarray(gradient) != 0).all()  # nothing is left unread


def test_a_set_has_no_order_and_a_series_has():
    x = jax.random.normal(KEY, (12, 2))
    for kind, same in zip(EMBEDDINGS, (False, True, False, False), strict=True):
        embedding = kind((12, 2), key=KEY)
        assert np.allclose(embedding(x), embedding(x[::-1]), atol=1e-5) == same, kind


def test_the_columns_of_an_image_are_not_channels():
    with pytest.raises(
        ValueError, match=r"a series of 16 steps with 16 channels \(dims=1\) or an image of 16 × 16 \(dim"
    ):
        cpe.ConvEmbedding((16, 16), key=KEY)
    with pytest.raises(ValueError, match=r"dims must be 1 .* found dims=2 for a value of shape \(16,\)"):
        cpe.ConvEmbedding((16,), dims=2, key=KEY)
    # A spot moved by a whole number of strides is the same to an image's mean and maximum, and not to channels.
    x = jnp.zeros((32, 32)).at[8:12, 8:12].set(jax.random.normal(KEY, (4, 4)))
    moved = jnp.roll(x, 8, axis=1)
    image, series = (cpe.ConvEmbedding((32, 32), dims=dims, key=KEY) for dims in (2, 1))
    np.testing.assert_allclose(image(moved), image(x), atol=1e-5)
    assert not np.allclose(series(moved), series(x), atol=1e-3)
    assert cpe.ConvEmbedding((32, 32, 3), dims=2, key=KEY).layers[0].weight.shape == (32, 3, 3, 3)


@pytest.mark.parametrize("rows", [(), (3,), (2, 3), (2, 0)])
def test_a_network_on_rows_is_that_on_each(rows):
    net = eqx.nn.MLP(4, 5, 7, 2, key=KEY)
    x = jax.random.normal(KEY, (*rows, 4))
    found = on_rows(net, x)
    assert found.shape == (*rows, 5)
    for at in np.ndindex(rows):
        np.testing.assert_allclose(found[at], net(x[at]), atol=1e-5)
