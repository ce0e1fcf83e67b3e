# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest
from scipy import stats

from numpyro_subanneal import variates

# Chance that a test of a law fails though the law holds; seeds are fixed.
ALPHA = 1e-4


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
@pytest.mark.parametrize("make", [random.key, random.PRNGKey])
def test_numbers_are_those_of_jax(make, seed):
    key = make(seed)
    for data in (0, 1, 12345, 2**31 - 1):
        ours, theirs = variates.fold_in(key, data), random.fold_in(key, data)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert_array_equal(random.key_data(ours), random.key_data(theirs))
    for num in (0, 1, 2, 7, 300):
        ours, theirs = variates.split(key, num), random.split(key, num)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert_array_equal(random.key_data(ours), random.key_data(theirs))
    for shape in [(), (1,), (7,), (3, 5), (2, 16, 3), (5000,), (0,)]:
        assert_array_equal(
            variates.bits(key, shape), random.bits(key, shape, jnp.uint32)
        )
        theirs = random.uniform(key, shape, minval=jnp.finfo(float).tiny)
        assert_array_equal(variates.open_uniform(key, shape), theirs)
        ours, theirs = variates.normal(key, shape), random.normal(key, shape)
        # Of the same uniform variates but for rounding, which tails magnify.
        assert_allclose(stats.norm.cdf(ours), stats.norm.cdf(theirs), atol=3e-7)


def test_in_programs_and_vectorized():
    keys = random.split(random.key(3), 4)

    def ours(key, i):
        one, two = variates.split(variates.fold_in(key, i))
        return variates.bits(one, (9,)), variates.bits(two, ())

    def theirs(key, i):
        one, two = random.split(random.fold_in(key, i))
        return (
            random.bits(one, (9,), jnp.uint32),
            random.bits(two, (), jnp.uint32),
        )

    i = jnp.arange(4)
    expected = [theirs(key, n) for key, n in zip(keys, i, strict=True)]
    found = jax.jit(jax.vmap(ours))(keys, i)
    for one, several in zip(found, zip(*expected, strict=True), strict=True):
        assert_array_equal(one, jnp.stack(several))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators(impl):
    key = random.key(3, impl=impl)
    assert_array_equal(variates.bits(key, (20,)), random.bits(key, (20,), jnp.uint32))
    parts = random.key_data(variates.split(key, 3))
    assert_array_equal(parts, random.key_data(random.split(key, 3)))
    folded = random.key_data(variates.fold_in(key, 4))
    assert_array_equal(folded, random.key_data(random.fold_in(key, 4)))


def test_other_layout_of_threefry():
    with jax.threefry_partitionable(False):
        key = random.key(3)
        theirs = random.bits(key, (20,), jnp.uint32)
        assert_array_equal(variates.bits(key, (20,)), theirs)
    assert (variates.bits(key, (20,)) != theirs).any()


def test_a_key_that_is_used_twice_is_found():
    @jax.jit
    def twice(key):
        return variates.bits(key, (2,)), variates.bits(key, (3,))

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        twice(random.key(0))


@pytest.mark.parametrize(
    "draw, law",
    [
        (variates.normal, stats.norm),
        (variates.gumbel, stats.gumbel_r),
        (variates.open_uniform, stats.uniform),
    ],
    ids=["normal", "gumbel", "uniform"],
)
def test_law(draw, law):
    x = np.asarray(draw(random.key(11), (500, 1000)), float).ravel()
    assert np.isfinite(x).all()
    assert stats.kstest(x, law.cdf).pvalue > ALPHA


def test_gumbel_noise_is_that_of_its_bits():
    # Also of small ones, which open clusters in a large table.
    key = random.key(5)
    u = (np.asarray(random.bits(key, (10**6,), jnp.uint32), float) + 0.5) / 2**32
    found = np.asarray(variates.gumbel(key, (10**6,)), float)
    expected = -np.log(-np.log1p(-u))
    # The other end has few digits in float32, and makes no choices.
    inner = u < 0.99
    assert_allclose(found[inner], expected[inner], atol=5e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 30, 64, 100])
def test_running_sums_are_those_of_numpy(size):
    x = np.random.default_rng(size).integers(0, 1000, (2, 3, size))
    sums = variates.running_sums(jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(sums, x.cumsum(-1))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_nth_is_that_of_numpy(size):
    which = np.random.default_rng(size).random(size) < 0.5
    which[0] = True
    found = [variates.nth(jnp.asarray(which), n) for n in range(which.sum())]
    assert_array_equal(found, np.flatnonzero(which))
