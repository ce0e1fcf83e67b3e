# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Special functions in forms that keep float32 accurate at large counts."""

from jax import lax
import jax.numpy as jnp
from jax.scipy.special import gammaln, i0e

from numpyro_subanneal.typing import Array


def log_gamma_half_step(a: Array) -> Array:
    r"""
    :math:`\log\Gamma(a + 1/2) - \log\Gamma(a)` for ``a > 0``, elementwise.

    The difference of two `gammaln` loses all digits in float32 once `a` is large. Here
    the argument is stepped up by the recurrence
    :math:`\Gamma(a+\frac12)/\Gamma(a) = \frac{a}{a+1/2}\,\Gamma(a+\frac32)/\Gamma(a+1)`
    and the ratio taken from the expansion of its logarithm (cf. DLMF 5.11.13), whose
    first dropped term is below the dtype's rounding after that many steps.
    """
    a = jnp.asarray(a, jnp.result_type(float, a))
    num_steps = 4 if a.dtype.itemsize <= 4 else 20
    ratio = jnp.ones_like(a)
    for j in range(num_steps):
        ratio = ratio * ((a + j) / (a + j + 0.5))
    b = a + num_steps
    tail = -1 / (8 * b) + 1 / (192 * b**3) - 1 / (640 * b**5) + 17 / (14336 * b**7)
    return 0.5 * jnp.log(b * ratio**2) + tail


def log1p_nonnegative(x: Array) -> Array:
    """
    ``log(1 + x)`` for ``x >= 0``, to 2e-7 relative in float32, elementwise.

    A logarithm and the rounding error of its argument to first order, without the
    branch for tiny and negative arguments of :func:`jax.numpy.log1p`, which takes 2.4
    times as long on a CPU.
    """
    # NB: a literal 1 would let XLA simplify `(1 + x) - 1` to `x`.
    one = lax.optimization_barrier(jnp.ones((), jnp.result_type(float)))
    u = one + x
    return jnp.log(u) + (x - (u - one)) / u


def log1p_of(u: Array, y: Array) -> Array:
    """
    ``log(1 + y)`` for ``y > -1``, elementwise, where `u` is ``1 + y`` as computed
    without cancellation, and `y` is known to more digits than ``u - 1``.

    Near one, where a large factor may stand before it, the logarithm gets the rounding
    error of its argument to first order; farther away `u` is the better of the two.
    """
    # NB: the maximum also keeps LLVM from contracting a product `u` and `u - 1` to a
    # fused multiply-add, which would hide the rounding error.
    u = jnp.maximum(u, jnp.finfo(jnp.result_type(u)).tiny)
    return jnp.log(u) + jnp.where(jnp.abs(y) < 0.5, y - (u - 1), 0)


# Polynomials in u = 1 / z for Binet's function over u, interpolated on (0, 1].
_BINET_SHORT = (0.0833320643, 4.32724494e-05, -0.00306618359, 0.000752757862)
_BINET = (
    0.0833333367,
    -3.49734535e-07,
    -0.00277068811,
    -6.09097331e-05,
    0.00106353309,
    -0.000645669863,
    0.000142218941,
)


def remainder_from_one(z: Array, inverse: Array) -> Array:
    """
    :func:`stirling_remainder` for ``z >= 1``, given ``1 / z``: for scores, to 5e-7 in
    float32, without a logarithm.
    """
    if jnp.result_type(z).itemsize > 4:
        return stirling_remainder(z)
    return inverse * _horner(_BINET_SHORT, inverse)


def stirling_remainder(z: Array) -> Array:
    r"""
    Binet's function :math:`\log\Gamma(z) - (z - \frac12)\log z + z - \frac12\log 2\pi`
    for ``z > 0``, elementwise (DLMF 5.11.1).
    """
    z = jnp.asarray(z, jnp.result_type(float, z))
    # One step of the recurrence takes small arguments past one.
    small = z < 1
    value = _remainder_above_one(jnp.where(small, z + 1, z))
    low = jnp.where(small, z, 1)
    return value + jnp.where(small, (low + 0.5) * jnp.log(1 + 1 / low) - 1, 0)


def _remainder_above_one(z: Array) -> Array:
    if z.dtype.itemsize > 4:
        return _remainder_in_double(z)
    return _horner(_BINET, 1 / z) / z


def _remainder_in_double(z: Array) -> Array:
    # From 10 on seven terms of the asymptotic series (DLMF 5.11.1) are exact.
    large = z >= 10
    far, near = jnp.where(large, z, 10), jnp.where(large, 1, z)
    terms = (
        1 / 12,
        -1 / 360,
        1 / 1260,
        -1 / 1680,
        1 / 1188,
        -691 / 360360,
        1 / 156,
    )
    series = _horner(terms, 1 / (far * far)) / far
    leading = (near - 0.5) * jnp.log(near) - near + 0.5 * jnp.log(2 * jnp.pi)
    return jnp.where(large, series, gammaln(near) - leading)


def log_rising(a: Array, x: Array, scale: Array | float = 1.0) -> Array:
    r"""
    :math:`\log\Gamma(a + x) - \log\Gamma(a) - x\log\mathit{scale}` for ``a > 0``,
    ``x >= 0``, elementwise.

    Stirling's formula taken apart, so that no two large terms are left that cancel.
    """
    a = jnp.asarray(a, jnp.result_type(float, a))
    change = stirling_remainder(a + x) - stirling_remainder(a)
    return x * jnp.log((a + x) / scale) + ((a - 0.5) * jnp.log1p(x / a) - x) + change


def log_rising_of_scale(a: Array, x: Array) -> Array:
    r"""
    :math:`\log\Gamma(a + x) - \log\Gamma(a) - x\log x + x` for ``a > 0`` and integers
    ``x >= 0``, elementwise, and 0 where ``x = 0``.

    :func:`log_rising` without what does not depend on `a`: a few units, however large
    `x` is, so that differences between values of `a` keep their digits.
    """
    a = jnp.asarray(a, jnp.result_type(float, a))
    some = x > 0
    x = jnp.where(some, x, 1).astype(a.dtype)
    ratio = x / a
    change = _remainder_above_one(a + x) - stirling_remainder(a)
    value = (
        x * log1p_nonnegative(1 / ratio) + (a - 0.5) * log1p_nonnegative(ratio) + change
    )
    return jnp.where(some, value, 0)


def factorial_remainder(x: Array) -> Array:
    r""":math:`\log x! - x\log x + x` for ``x >= 0``, elementwise."""
    positive = x > 0
    safe = jnp.where(positive, x, 1)
    value = 0.5 * jnp.log(2 * jnp.pi * safe) + stirling_remainder(safe)
    return jnp.where(positive, value, 0)


def log_binomial(x: Array, y: Array) -> Array:
    r""":math:`\log\binom{x + y}{x}` for ``x, y >= 0``, not only integers."""
    x, y = _floats(x, y)
    return _log_binomial(x, y, stirling_remainder)


def log_binomial_of_integers(x: Array, y: Array) -> Array:
    """:func:`log_binomial` of integers, with fewer logarithms: it is computed of every
    cell at every move."""
    x, y = _floats(x, y)
    return _log_binomial(x, y, lambda z: remainder_from_one(z, 1 / z))


def _log_binomial(x, y, remainder):
    # By Stirling's formula, with one logarithm for the roots of all three factorials.
    sizes = x, y, x + y
    some = tuple(n > 0 for n in sizes)
    safe = tuple(jnp.where(s, n, 1) for s, n in zip(some, sizes, strict=True))
    root = tuple(
        jnp.where(s, 2 * jnp.pi * n, 1) for s, n in zip(some, safe, strict=True)
    )
    left = tuple(jnp.where(s, remainder(n), 0) for s, n in zip(some, safe, strict=True))
    return (
        x * log1p_nonnegative(y / safe[0])
        + y * log1p_nonnegative(x / safe[1])
        + 0.5 * jnp.log(root[2] / root[0] / root[1])
        + left[2]
        - left[0]
        - left[1]
    )


def log_factorial_parts(x: Array) -> tuple[Array, Array]:
    r"""
    :math:`\log x! - x\log x + x` and :math:`\log x!` of integers ``x >= 0``,
    elementwise, with one logarithm.
    """
    some = x > 0
    safe = jnp.where(some, x, 1)
    log_x = jnp.log(safe)
    remainder = 0.5 * (jnp.log(2 * jnp.pi) + log_x) + remainder_from_one(safe, 1 / safe)
    remainder = jnp.where(some, remainder, 0)
    return remainder, remainder + x * (log_x - 1)


def log_split(xa: Array, xb: Array, wa: Array, wb: Array) -> Array:
    """
    Log probability that of ``xa + xb`` things `xa` fall to a part of weight `wa` and
    `xb` to one of weight `wb`: binomial. Zero if a part has neither weight nor things.

    In the saddle-point form of Loader (2000), in which no large terms cancel.

    **References:**

    1. *Fast and Accurate Computation of Binomial Probabilities*, C. Loader (2000)
    """
    xa, xb, wa, wb = _floats(xa, xb, wa, wb)
    total, weight = xa + xb, jnp.maximum(wa + wb, jnp.finfo(xa.dtype).tiny)
    # Things that part b has beyond its share, with the rounding error of a mean.
    excess = (wa * xb - wb * xa) / weight

    def part(x, w, excess):
        safe = jnp.where(x > 0, x, 1)
        log_ratio = log1p_of((w / weight) * (total / safe), excess / safe)
        return jnp.where(x > 0, x * log_ratio, 0) - factorial_remainder(x)

    return part(xa, wa, excess) + part(xb, wb, -excess) + factorial_remainder(total)


def log_polya(a: Array, x: Array) -> Array:
    """
    Log probability of counts `x` under the Dirichlet-multinomial of concentration `a`,
    both ``[..., C]``, with the multinomial coefficient; the beta-binomial for two.

    In saddle-point form as :func:`log_split`: the counts and the prior are each
    compared with the pooled share, so that no large terms cancel, whichever is larger.
    """
    a, x = _floats(a, x)
    prior, total = a.sum(-1, keepdims=True), x.sum(-1, keepdims=True)
    pooled, count = a + x, prior + total
    excess = (x * prior - a * total) / count
    some = x > 0
    safe = jnp.where(some, x, 1)
    from_prior = log1p_of((pooled / a) * (prior / count), excess / a)
    from_counts = log1p_of((pooled / safe) * (total / count), -excess / safe)
    change = stirling_remainder(pooled) - stirling_remainder(a)
    each = (
        (a - 0.5) * from_prior
        + jnp.where(some, x * from_counts, 0)
        + jnp.where(some, change, 0)
        - factorial_remainder(x)
    )
    whole = (
        factorial_remainder(total)
        + stirling_remainder(prior)
        - stirling_remainder(count)
        - 0.5 * (a.shape[-1] - 1) * jnp.log1p(total / prior)
    )
    return each.sum(-1) + whole[..., 0]


def _floats(*values: Array) -> list[Array]:
    dtype = jnp.result_type(float, *values)
    return [jnp.asarray(value, dtype) for value in values]


def log_i0e(r: Array) -> Array:
    r"""
    :math:`\log I_0(r) - r` for ``r >= 0``, elementwise; in float32 to 6e-7,
    absolute or, where the value is large, of it.

    By Abramowitz and Stegun (1964), Eqs. 9.8.1 and 9.8.2, with one logarithm for both.
    """
    if jnp.result_type(r).itemsize > 4:
        return jnp.log(i0e(r))
    small = r < 3.75
    inverse = 3.75 / jnp.maximum(r, 3.75)
    near = jnp.minimum(r / 3.75, 1) ** 2
    low = _horner(_I0_LOW, near)
    high = _horner(_I0_HIGH, inverse)
    squared = jnp.where(small, low * low, high * high * (inverse / 3.75))
    return 0.5 * jnp.log(squared) - jnp.where(small, r, 0)


_I0_LOW = (
    1.0,
    3.5156229,
    3.0899424,
    1.2067492,
    0.2659732,
    0.0360768,
    0.0045813,
)
_I0_HIGH = (
    0.39894228,
    0.01328592,
    0.00225319,
    -0.00157565,
    0.00916281,
    -0.02057706,
    0.02635537,
    -0.01647633,
    0.00392377,
)


def _horner(coefficients: tuple[float, ...], x: Array) -> Array:
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def mean_with(count: Array, mean: Array, x: Array) -> Array:
    """The mean once `x` has joined; `count` values with it."""
    return mean + (x - mean) / count


def mean_without(count: Array, mean: Array, x: Array) -> Array:
    """The mean once `x` has left; `count` values without it, and exactly 0 for none."""
    rest = mean - (x - mean) / jnp.maximum(count, 1)
    return jnp.where(count > 0, rest, 0)


def mean_of_both(count_a: Array, a: Array, count_b: Array, b: Array) -> Array:
    """The mean of two groups of values."""
    return a + (b - a) * (count_b / jnp.maximum(count_a + count_b, 1))
