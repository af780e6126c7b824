"""Programs on all cores."""

import re
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cpejax as cpe
from cpejax.util import cores as _cores
from cpejax.util.cores import channels_last


def test_programs_that_look_alike_are_compiled_once():
    double = jax.jit(lambda a: 2 * a)
    with ThreadPoolExecutor(2) as threads:
        first, second, third = _cores.compile_each([double.lower(jnp.ones(n)) for n in (2, 2, 3)], threads)
    assert first is second
    assert first is not third


def stepped(wrap, net, images):
    """A few steps of gradient descent in a loop, compiled."""
    weights, rest = eqx.partition(net, eqx.is_array)

    def loss(weights, x):
        return (jax.vmap(eqx.combine(weights, rest))(x) ** 2).mean()

    def step(weights, x):
        gradient = wrap(jax.grad(loss))(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), None

    return jax.jit(lambda w: jax.lax.scan(step, w, images)[0]).lower(weights), weights


@pytest.mark.parametrize("dims", [1, 2])
def test_convolutions_in_a_loop_have_their_channels_last(dims):
    net = cpe.ConvEmbedding((8, 6, 2), 3, 4, 2, dims=dims, key=jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (3, 5, 8, 6, 2))
    (plain, weights), (fast, _) = (stepped(wrap, net, images) for wrap in (lambda f: f, channels_last))
    found, expected = (jax.tree.leaves(program.compile()(weights)) for program in (fast, plain))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    space = ", ".join(map(str, range(dims)))
    labels = f"[b, {space}, f]x[{space}, i, o]->[b, {space}, f]"
    used, before = (re.findall(r"dim_numbers = (\S.*?\]->\[.*?\])", program.as_text()) for program in (fast, plain))
    assert len(used) == len(before) == 5  # two forward, one by the first layer's output, two by weights
    assert set(used) == {labels}
    assert labels not in before


def test_a_function_without_convolutions_is_left_alone():
    calls = []

    def function(x):
        calls.append(x)
        return {"y": x**2}

    assert channels_last(function)(3.0) == {"y": 9.0}
    assert calls[-1] == 3.0
