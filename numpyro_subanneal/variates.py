# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Random numbers that are cheap, to make and to compile.

JAX writes Threefry for CPUs as a loop of many small programs: a key and the numbers of
that key take 0.2 s to compile, and 1.2 us for 64 numbers. Written out, for all numbers
at once on one axis, the same numbers take less than half of the one and a tenth of the
other.
"""

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import erfinv
import numpy as np

from numpyro_subanneal.typing import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def check_key(rng_key: Array, several: bool = False) -> None:
    """Refuse what is no key, such as a seed; `several` may be on the first axis."""
    # NB: by shape and type alone; to take one of several would count as its use.
    dtype, shape = getattr(rng_key, "dtype", None), getattr(rng_key, "shape", ())
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        batch = shape
    elif dtype == np.uint32 and len(shape) > 0 and shape[-1] > 1:
        batch = shape[:-1]
    else:
        batch = None
    if batch == () or (several and batch is not None and batch[0] > 0):
        return
    raise ValueError(
        f"`rng_key` must be a key, such as `jax.random.key(0)`, got {rng_key!r}."
    )


def _is_threefry(rng_key: Array) -> bool:
    # NB: what looks for keys that are used twice knows JAX's own functions only.
    return (
        random.key_impl(rng_key) == "threefry2x32"
        and jax.config.jax_threefry_partitionable
        and not jax.config.jax_debug_key_reuse
    )


@jax.jit
def _threefry(key: Array, low: Array) -> tuple[Array, Array]:
    """
    Threefry-2x32 of 20 rounds of the counters ``(0, low)``, under the words `key`.

    **References:**

    1. *Parallel Random Numbers: As Easy as 1, 2, 3*, J. K. Salmon, M. A. Moraes, R. O.
       Dror, D. E. Shaw (2011), section 3.3
    """
    one, two = key
    keys = (one, two, one ^ two ^ jnp.uint32(_PARITY))
    x, y = jnp.zeros_like(low) + one, low + two
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ ((y << by) | (y >> (32 - by)))
        x = x + keys[(i + 1) % 3]
        y = y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y


def _made_once(x: Array) -> Array:
    """
    `x`. XLA computes what it deems cheap anew in each of the programs that use it; it
    deems an integer division dear, and LLVM then sees that this divisor is one.
    """
    return lax.div(x, jnp.maximum(jnp.minimum(x, 1), 1))


def _as_keys(words: Array, like: Array) -> Array:
    """Keys of these `words`, typed if the key `like` is."""
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return words
    return random.wrap_key_data(words, impl="threefry2x32")


def fold_in(rng_key: Array, data: Array | int) -> Array:
    """The key that :func:`jax.random.fold_in` makes, of one key and one number."""
    if not _is_threefry(rng_key):
        return random.fold_in(rng_key, data)
    words = _threefry(random.key_data(rng_key), jnp.uint32(data))
    return _as_keys(_made_once(jnp.stack(words)), rng_key)


def split(rng_key: Array, num: int = 2) -> Array:
    """The keys that :func:`jax.random.split` makes of one key, ``[num]``."""
    if not _is_threefry(rng_key):
        return random.split(rng_key, num)
    words = _threefry(random.key_data(rng_key), lax.iota(jnp.uint32, num))
    return _as_keys(_made_once(jnp.stack(words, -1)), rng_key)


def bits(rng_key: Array, shape: tuple[int, ...]) -> Array:
    """The numbers of ``random.bits(rng_key, shape, jnp.uint32)``."""
    size = np.prod(shape, dtype=int)
    if not _is_threefry(rng_key) or size >= 2**32:
        return random.bits(rng_key, shape, jnp.uint32)
    # NB: on one axis, since XLA writes out loops over a short one.
    x, y = _threefry(random.key_data(rng_key), lax.iota(jnp.uint32, size))
    return _made_once(x ^ y).reshape(shape)


def below(bits: Array, count: Array | int) -> Array:
    """Integers below `count`, of 32 random bits each; zero if it is not positive."""
    count = jnp.maximum(jnp.asarray(count), 1).astype(jnp.uint32)
    return (bits % count).astype(jnp.int32)


def nth(which: Array, n: Array) -> Array:
    """The `n`-th position, counted from zero, that is true in `which`."""
    sums = running_sums(which.astype(jnp.int32))
    return jnp.argmax(which & (sums == n + 1)).astype(jnp.int32)


def running_sums(x: Array) -> Array:
    """
    Cumulative sums over the last axis, by blocks: as many operations as the power 3/2
    of its length (:func:`jax.numpy.cumsum` takes the square), in three kernels, where
    :func:`jax.lax.associative_scan` is compiled to several for every power of two.
    """
    size = x.shape[-1]
    width = max(1, round(size**0.5))
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -size % width)]
    blocks = jnp.pad(x, pad).reshape(*x.shape[:-1], -1, width)
    upto = np.tri(width, dtype=bool)
    within = jnp.where(upto, blocks[..., None, :], 0).sum(-1)
    before = np.tri(blocks.shape[-2], k=-1, dtype=bool)
    before = jnp.where(before, within[..., None, :, -1], 0).sum(-1)
    return (within + before[..., None]).reshape(*x.shape[:-1], -1)[..., :size]


def uniform(bits: Array) -> Array:
    """Uniform variates of 32 random bits each; never zero, but one if rounded up."""
    dtype = jnp.result_type(float)
    return (bits.astype(dtype) + 0.5) * dtype.type(2.0**-32)


def open_uniform(rng_key: Array, shape: tuple[int, ...]) -> Array:
    """The numbers of :func:`jax.random.uniform`, but tiny for zero."""
    dtype = jnp.result_type(float)
    tiny = jnp.finfo(dtype).tiny
    if dtype.itemsize > 4:
        return random.uniform(rng_key, shape, dtype, minval=tiny)
    # NB: 23 bits, as JAX.
    high = (bits(rng_key, shape) >> 9).astype(dtype)
    return jnp.maximum(high * dtype.type(2.0**-23), tiny)


def normal(rng_key: Array, shape: tuple[int, ...]) -> Array:
    """Standard normal variates; in float32 of 23 bits, as :func:`jax.random.normal`."""
    dtype = jnp.result_type(float)
    if dtype.itemsize > 4:
        return random.normal(rng_key, shape, dtype)
    return normal_quantile(open_uniform(rng_key, shape))


def normal_quantile(u: Array) -> Array:
    """The standard normal variate that is reached with probability `u`."""
    low = np.nextafter(u.dtype.type(-1), u.dtype.type(0))
    return u.dtype.type(2**0.5) * erfinv(jnp.maximum(2 * u - 1, low))


def gumbel(rng_key: Array, shape: tuple[int, ...]) -> Array:
    """
    Gumbel noise in which rare large values are as frequent as they should be.

    It is minus the logarithm of an exponential variate, made of 32 random bits so that
    small ones are fine enough: a row opens a cluster with a probability of 10^-6 or
    less where there are that many rows, and :func:`jax.random.gumbel` in float32 is at
    most 16, so that it makes a choice of probability p with about p - 6e-8.
    """
    dtype = jnp.result_type(float)
    if dtype.itemsize > 4:
        return random.gumbel(rng_key, shape, dtype)
    u = uniform(bits(rng_key, shape))
    # -log(1 - u): of a small `u` by three terms of its series, and never infinite.
    large = -jnp.log(jnp.maximum(1 - u, 2.0**-25))
    small = u * (1 + u * (0.5 + u / 3))
    return -jnp.log(jnp.where(u < 2.0**-6, small, large))
