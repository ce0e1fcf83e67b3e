# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Counts and waiting times of unknown rate."""

import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist

from numpyro_subanneal.conjugate.base import (
    MASK_IT,
    AbstractConjugatePair,
    count_error,
    first_row,
)
from numpyro_subanneal.conjugate.special import (
    factorial_remainder,
    log1p_nonnegative,
    log1p_of,
    log_factorial_parts,
    log_rising,
    mean_of_both,
    mean_with,
    mean_without,
    remainder_from_one,
    stirling_remainder,
)


class _UnknownRate(AbstractConjugatePair):
    """What the pairs below share: a rate with a gamma prior."""

    prior = {"rate": dist.Gamma}
    positive = frozenset({"shape", "rate"})

    def parameters(self, theta):
        return {"rate": theta["rate"]}

    def hyperparameters(self, prior, theta):
        del theta
        return {"shape": prior["rate"].concentration, "rate": prior["rate"].rate}

    def theta(self, hyper, sample):
        return {"rate": sample("rate", dist.Gamma(hyper["shape"], hyper["rate"]))}


class GammaPoisson(_UnknownRate):
    r"""
    ``x ~ Poisson(rate)`` with ``rate ~ Gamma(shape, rate)``.

    Hyperparameters: `shape` and `rate` (not scale) of the gamma over rates.

    Statistics: the number of values and their sum, integers; and the mean of
    :math:`\log x!`.

    **References:**

    1. *Bayesian Data Analysis*, A. Gelman et al., 3rd edition (2013), section 2.6
    2. *Fast and Accurate Computation of Binomial Probabilities*, C. Loader (2000)
    """

    likelihood = (dist.Poisson,)
    form = (
        "The form is rate ~ Gamma(shape, rate), x ~ Poisson(rate[z]), with constants "
        "shape and rate."
    )

    def data_error(self, x, hyper):
        del hyper
        return count_error(x)

    def cell(self, hyper, x):
        # The value as it is counted and as it is scored; its inverse; its factorial,
        # as far as Stirling's formula does not cancel, and the whole of it.
        del hyper
        x = jnp.asarray(x, jnp.result_type(int))
        value = jnp.asarray(x, jnp.result_type(float))
        inverse = 1 / jnp.maximum(value, 1)
        return x, value, inverse, *log_factorial_parts(value)

    def empty(self, hyper):
        zero = jnp.zeros((), jnp.result_type(int))
        return zero, zero, jnp.zeros_like(hyper["rate"])

    def add(self, hyper, stat, x):
        del hyper
        count, total, mean = stat
        return count + 1, total + x[0], mean_with(count + 1, mean, x[4])

    def remove(self, hyper, stat, x):
        del hyper
        count, total, mean = stat
        return count - 1, total - x[0], mean_without(count - 1, mean, x[4])

    def merge(self, hyper, a, b):
        del hyper
        return a[0] + b[0], a[1] + b[1], mean_of_both(a[0], a[2], b[0], b[2])

    def posterior(self, hyper, stat):
        count, total, _ = stat
        return {"shape": hyper["shape"] + total, "rate": hyper["rate"] + count}

    def log_marginal(self, hyper, stat):
        # Of the sum, which is one Poisson value of `count` times the rate, and of the
        # values given their sum, which is multinomial.
        count, total, mean = stat
        some = jnp.maximum(count, 1)
        table = self._table(hyper["shape"], hyper["rate"] / some)
        score = self.score(table, self.cell(hyper, total))
        share = jnp.log(jnp.maximum(total, 1) / some) - 1
        given_total = factorial_remainder(total) + total * share - count * mean
        return jnp.where(count > 0, score + given_total, 0)

    def predictive(self, hyper, stat):
        post = self.posterior(hyper, stat)
        return self._table(post["shape"], post["rate"])

    def _table(self, shape, rate):
        # Negative binomial, Gelman et al. (2013), section 2.6.
        weight = 1 / (rate + 1)
        kept = rate * weight
        remainder = stirling_remainder(shape)
        constant = -0.5 * log1p_nonnegative(1 / rate)
        return shape, shape / rate, kept / shape, weight, kept, constant, remainder

    def score(self, table, x):
        # Saddle-point form as in Loader (2000): the old mean and the value are each
        # compared with the new mean; no large terms cancel.
        shape, mean, per_shape, weight, kept, constant, remainder = table
        _, x, inverse, factorial, _ = x
        new, excess = shape + x, x - mean
        from_mean = log1p_of(new * per_shape, excess * per_shape)
        from_value = log1p_of(new * (weight * inverse), -excess * (kept * inverse))
        change = remainder_from_one(new, 1 / new) - remainder
        return (
            (shape - 0.5) * from_mean
            + x * from_value
            + jnp.where(x > 0, change, 0)
            + (constant - factorial)
        )


class GammaExponential(_UnknownRate):
    """
    ``x ~ Exponential(rate)`` with ``rate ~ Gamma(shape, rate)``.

    Hyperparameters: `shape` and `rate` (not scale) of the gamma over rates.

    Statistics: the number of values, an integer, and their mean.

    **References:**

    1. *Bayesian Data Analysis*, A. Gelman et al., 3rd edition (2013), section 2.6
    """

    likelihood = (dist.Exponential,)
    form = (
        "The form is rate ~ Gamma(shape, rate), x ~ Exponential(rate[z]), with "
        "constants shape and rate."
    )

    def data_error(self, x, hyper):
        error = super().data_error(x, hyper)
        return error or _sign_error(x)

    def empty(self, hyper):
        return jnp.zeros((), jnp.result_type(int)), jnp.zeros_like(hyper["rate"])

    def add(self, hyper, stat, x):
        del hyper
        count, mean = stat
        return count + 1, mean + (x - mean) / (count + 1)

    def remove(self, hyper, stat, x):
        del hyper
        count, mean = stat
        return count - 1, _mean_without(count, mean, x)

    def merge(self, hyper, a, b):
        del hyper
        count = a[0] + b[0]
        return count, a[1] + (b[1] - a[1]) * (b[0] / jnp.maximum(count, 1))

    def posterior(self, hyper, stat):
        count, mean = stat
        return {"shape": hyper["shape"] + count, "rate": hyper["rate"] + count * mean}

    def log_marginal(self, hyper, stat):
        count, mean = stat
        post = self.posterior(hyper, stat)
        shrunk = hyper["shape"] * jnp.log1p(count * mean / hyper["rate"])
        return log_rising(hyper["shape"], count, post["rate"]) - shrunk

    def predictive(self, hyper, stat):
        # Lomax: inverse scale, exponent, log density at zero.
        post = self.posterior(hyper, stat)
        inverse = 1 / post["rate"]
        return inverse, post["shape"] + 1, jnp.log(post["shape"] * inverse)

    def score(self, table, x):
        inverse, exponent, constant = table
        return constant - exponent * log1p_nonnegative(x * inverse)


class GammaGamma(_UnknownRate):
    """
    ``x ~ Gamma(concentration, rate)`` with known `concentration` and
    ``rate ~ Gamma(shape, rate)``.

    Hyperparameters: `shape` and `rate` (not scale) of the gamma over rates; and the
    known `concentration` of the values.

    Statistics: the number of values, an integer, their mean and the mean of their
    logarithms.

    **References:**

    1. *A Compendium of Conjugate Priors*, D. Fink (1997)
    """

    likelihood = (dist.Gamma,)
    given = ("concentration",)
    positive = frozenset({"shape", "rate", "concentration"})
    form = (
        "The form is rate ~ Gamma(shape, rate), x ~ Gamma(concentration, rate[z]), "
        "with constants shape, rate and concentration."
    )

    def data_error(self, x, hyper):
        error = super().data_error(x, hyper)
        return error or _sign_error(x)

    def cell(self, hyper, x):
        del hyper
        return x, jnp.log(x)

    def empty(self, hyper):
        zero = jnp.zeros_like(hyper["rate"])
        return jnp.zeros((), jnp.result_type(int)), zero, zero

    def add(self, hyper, stat, x):
        del hyper
        count = stat[0] + 1
        means = (m + (v - m) / count for m, v in zip(stat[1:], x, strict=True))
        return count, *means

    def remove(self, hyper, stat, x):
        del hyper
        count = stat[0]
        means = (_mean_without(count, m, v) for m, v in zip(stat[1:], x, strict=True))
        return count - 1, *means

    def merge(self, hyper, a, b):
        del hyper
        count = a[0] + b[0]
        share = b[0] / jnp.maximum(count, 1)
        means = (m + (v - m) * share for m, v in zip(a[1:], b[1:], strict=True))
        return count, *means

    def posterior(self, hyper, stat):
        count, mean, _ = stat
        return {
            "shape": hyper["shape"] + count * hyper["concentration"],
            "rate": hyper["rate"] + count * mean,
        }

    def log_marginal(self, hyper, stat):
        count, mean, log_mean = stat
        concentration = hyper["concentration"]
        post = self.posterior(hyper, stat)
        # Values over their expected scale, so that their logarithms do not cancel with
        # those of the rates.
        scale = post["rate"] * concentration
        shrunk = hyper["shape"] * jnp.log1p(count * mean / hyper["rate"])
        rising = log_rising(hyper["shape"], count * concentration, scale)
        each = (
            concentration * (log_mean + 1) - log_mean + _gamma_constant(concentration)
        )
        return rising - shrunk + count * each

    def predictive(self, hyper, stat):
        # Compound gamma: inverse rate, exponent, known concentration, log of its
        # inverse scale, constant.
        post = self.posterior(hyper, stat)
        concentration = hyper["concentration"]
        inverse = 1 / post["rate"]
        exponent = post["shape"] + concentration
        log_scale = jnp.log(exponent / concentration * inverse)
        rising = log_rising(post["shape"], concentration, exponent) + concentration
        constant = rising + _gamma_constant(concentration)
        return inverse, exponent, concentration, log_scale, constant

    def score(self, table, x):
        inverse, exponent, concentration, log_scale, constant = table
        x, log_x = x
        return (
            concentration * (log_x + log_scale)
            + (constant - log_x)
            - exponent * log1p_nonnegative(x * inverse)
        )


def _gamma_constant(a):
    # -log Gamma(a) + a log(a) - a, of which the larger terms cancel.
    return 0.5 * jnp.log(a / (2 * jnp.pi)) - stirling_remainder(a)


def _mean_without(count, mean, x):
    left = count - 1
    rest = mean - (x - mean) / jnp.maximum(left, 1)
    # An emptied cluster starts again from nothing, not from rounding errors.
    return jnp.where(left > 0, rest, 0)


def _sign_error(x: np.ndarray) -> str | None:
    """`data_error` of values that must be positive."""
    bad = x <= 0
    if not bad.any():
        return None
    return (
        f"has {x[bad][0]} in row {first_row(bad)}; values must be positive; {MASK_IT}"
    )
