# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Trials of unknown probability, counted in any of the usual ways."""

import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist
from numpyro.distributions.conjugate import (
    NegativeBinomialLogits,
    NegativeBinomialProbs,
)
from numpyro.distributions.discrete import (
    BernoulliLogits,
    BernoulliProbs,
    BinomialLogits,
    BinomialProbs,
    GeometricLogits,
    GeometricProbs,
)

from numpyro_subanneal.conjugate.base import (
    AbstractConjugatePair,
    count_error,
)
from numpyro_subanneal.conjugate.special import (
    log1p_nonnegative,
    log1p_of,
    log_binomial,
    log_binomial_of_integers,
    log_polya,
    mean_of_both,
    mean_with,
    mean_without,
    remainder_from_one,
    stirling_remainder,
)


class _UnknownProbability(AbstractConjugatePair):
    """
    What the pairs below share: a probability with a beta prior, and statistics of which
    the first two, `_trials`, are the trials that turned out one and zero.
    """

    prior = {"probs": dist.Beta}
    positive = frozenset({"concentration1", "concentration0"})

    def parameters(self, theta):
        return {"probs": theta["probs"]}

    def hyperparameters(self, prior, theta):
        del theta
        fn = prior["probs"]
        return {
            "concentration1": fn.concentration1,
            "concentration0": fn.concentration0,
        }

    def theta(self, hyper, sample):
        fn = dist.Beta(hyper["concentration1"], hyper["concentration0"])
        return {"probs": sample("probs", fn)}

    def _trials(self, hyper, stat):
        del hyper
        return stat[0], stat[1]

    def posterior(self, hyper, stat):
        ones, zeros = self._trials(hyper, stat)
        return {
            "concentration1": hyper["concentration1"] + ones,
            "concentration0": hyper["concentration0"] + zeros,
        }

    def _log_marginal_counts(self, hyper, stat):
        # Of the number of ones among all trials: beta-binomial.
        prior = hyper["concentration1"], hyper["concentration0"]
        return log_polya(jnp.stack(prior), jnp.stack(self._trials(hyper, stat)))


class _Logits:
    """The same with the likelihood written by log odds."""

    def parameters(self, theta):
        return {"logits": jnp.log(theta["probs"]) - jnp.log1p(-theta["probs"])}


class BetaBernoulli(_UnknownProbability):
    """
    ``x ~ Bernoulli(probs)`` with ``probs ~ Beta(concentration1, concentration0)``.

    Hyperparameters: `concentration1` and `concentration0`, the numbers of ones and
    zeros that the prior counts for.

    Statistics: the numbers of ones and of zeros, integers.

    **References:**

    1. *Bayesian Data Analysis*, A. Gelman et al., 3rd edition (2013), section 2.4
    """

    likelihood = (BernoulliProbs,)
    form = (
        "The form is probs ~ Beta(concentration1, concentration0), x ~ "
        "Bernoulli(probs[z]), with constant concentrations."
    )

    def data_error(self, x, hyper):
        del hyper
        return count_error(x, 1)

    def cell(self, hyper, x):
        del hyper
        return jnp.asarray(x, jnp.result_type(int))

    def empty(self, hyper):
        del hyper
        zero = jnp.zeros((), jnp.result_type(int))
        return zero, zero

    def add(self, hyper, stat, x):
        del hyper
        return stat[0] + x, stat[1] + (1 - x)

    def remove(self, hyper, stat, x):
        del hyper
        return stat[0] - x, stat[1] - (1 - x)

    def merge(self, hyper, a, b):
        del hyper
        return a[0] + b[0], a[1] + b[1]

    def log_marginal(self, hyper, stat):
        # Of the sequence of values: no binomial coefficient.
        return self._log_marginal_counts(hyper, stat) - log_binomial(*stat)

    def predictive(self, hyper, stat):
        post = self.posterior(hyper, stat)
        return _log_shares(post["concentration1"], post["concentration0"])

    def score(self, table, x):
        one, zero = table
        return jnp.where(x > 0, one, zero)


class BetaBernoulliLogits(_Logits, BetaBernoulli):
    """:class:`BetaBernoulli` with ``x ~ Bernoulli(logits=logit(probs))``."""

    likelihood = (BernoulliLogits,)
    form = (
        "The form is probs ~ Beta(concentration1, concentration0), x ~ "
        "Bernoulli(logits=log(probs[z]) - log1p(-probs[z])), with constant "
        "concentrations."
    )


class BetaBinomial(_UnknownProbability):
    """
    ``x ~ Binomial(total_count, probs)`` with
    ``probs ~ Beta(concentration1, concentration0)`` and `total_count` the same in all
    rows; :class:`BetaBinomialByRow` lets it differ.

    Hyperparameters: `concentration1` and `concentration0`, the numbers of successes and
    failures that the prior counts for; and the known `total_count`.

    Statistics: the numbers of successes, of failures and of values, integers; and the
    mean of the log binomial coefficients.

    **References:**

    1. *Bayesian Data Analysis*, A. Gelman et al., 3rd edition (2013), section 2.4
    2. *Fast and Accurate Computation of Binomial Probabilities*, C. Loader (2000)
    """

    likelihood = (BinomialProbs,)
    given = ("total_count",)
    in_statistics = frozenset({"total_count"})
    form = (
        "The form is probs ~ Beta(concentration1, concentration0), x ~ "
        "Binomial(total_count, probs[z]), with constant concentrations."
    )

    def data_error(self, x, hyper):
        trials = np.asarray(hyper["total_count"])
        bad = ~((trials >= 0) & (trials == np.floor(trials)))
        if bad.any():
            return (
                f"has a total_count of {trials[bad][0]:g}; it must be a nonnegative "
                "integer"
            )
        # The statistics are sums, in 32 bits where x64 is off.
        most = np.iinfo(jnp.result_type(int)).max
        if np.sum(np.broadcast_to(trials, x.shape), dtype=np.float64) > most:
            return f"has more than {most} trials; call `numpyro.enable_x64()` first"
        return count_error(x, trials)

    def cell(self, hyper, x):
        return _binomial_cell(x, hyper["total_count"])

    def empty(self, hyper):
        zero = jnp.zeros((), jnp.result_type(int))
        return zero, zero, zero, jnp.zeros_like(hyper["concentration1"])

    def add(self, hyper, stat, x):
        del hyper
        ones, zeros, count, mean = stat
        count = count + 1
        return ones + x[0], zeros + x[1], count, mean_with(count, mean, x[4])

    def remove(self, hyper, stat, x):
        del hyper
        ones, zeros, count, mean = stat
        count = count - 1
        return ones - x[0], zeros - x[1], count, mean_without(count, mean, x[4])

    def merge(self, hyper, a, b):
        del hyper
        mean = mean_of_both(a[2], a[3], b[2], b[3])
        return a[0] + b[0], a[1] + b[1], a[2] + b[2], mean

    def log_marginal(self, hyper, stat):
        # Of the successes, and of the values given all successes: hypergeometric.
        ones, zeros, count, mean = stat
        given_ones = count * mean - log_binomial(ones, zeros)
        return self._log_marginal_counts(hyper, stat) + given_ones

    def predictive(self, hyper, stat):
        # Beta-binomial.
        post = self.posterior(hyper, stat)
        a, b = post["concentration1"], post["concentration0"]
        trials = hyper["total_count"]
        both, count = a + b, a + b + trials
        constant = stirling_remainder(both) - stirling_remainder(count)
        return (
            a,
            b,
            trials * (a / both),
            both / (count * a),
            both / (count * b),
            *_log_shares(a, b),
            stirling_remainder(a),
            stirling_remainder(b),
            constant - 0.5 * log1p_nonnegative(trials / both),
        )

    def score(self, table, x):
        # Saddle-point form as in Loader (2000): the old shares of successes and
        # failures are compared with the new ones.
        a, b, mean, per_a, per_b, log_one, log_zero, left_a, left_b, constant = table
        _, _, ones, zeros, coefficient = x
        excess = ones - mean
        a_new, b_new = a + ones, b + zeros
        inverse = 1 / (a_new * b_new)
        return (
            (a_new - 0.5) * log1p_of(a_new * per_a, excess * per_a)
            + (b_new - 0.5) * log1p_of(b_new * per_b, -excess * per_b)
            + (ones * log_one + zeros * log_zero + coefficient)
            + _change(ones, a_new, inverse * b_new, left_a)
            + _change(zeros, b_new, inverse * a_new, left_b)
            + constant
        )


class BetaBinomialLogits(_Logits, BetaBinomial):
    """:class:`BetaBinomial` with ``x ~ Binomial(total_count, logits=logit(probs))``."""

    likelihood = (BinomialLogits,)
    form = (
        "The form is probs ~ Beta(concentration1, concentration0), x ~ "
        "Binomial(total_count, logits=log(probs[z]) - log1p(-probs[z])), with constant "
        "concentrations."
    )


class BetaBinomialByRow(BetaBinomial):
    """:class:`BetaBinomial` with a `total_count` that may differ by row."""

    given = ()
    given_by_row = ("total_count",)

    def cell(self, hyper, x, total_count):
        del hyper
        return _binomial_cell(x, total_count)

    def predictive(self, hyper, stat):
        post = self.posterior(hyper, stat)
        a, b = post["concentration1"], post["concentration0"]
        both = a + b
        return (
            a,
            b,
            both,
            a / both,
            both / a,
            both / b,
            1 / both,
            *_log_shares(a, b),
            stirling_remainder(a),
            stirling_remainder(b),
            stirling_remainder(both),
        )

    def score(self, table, x):
        # As above, with the terms that depend on the row's number of trials.
        a, b, both, share, odds_a, odds_b, per_both, *rest = table
        log_one, log_zero, left_a, left_b, left = rest
        _, _, ones, zeros, coefficient = x
        trials = ones + zeros
        excess = ones - trials * share
        a_new, b_new, count = a + ones, b + zeros, both + trials
        # One division for three inverses.
        pair = a_new * b_new
        inverse = 1 / (pair * count)
        per_count = inverse * pair
        inverse = inverse * count
        per_a, per_b = per_count * odds_a, per_count * odds_b
        return (
            (a_new - 0.5) * log1p_of(a_new * per_a, excess * per_a)
            + (b_new - 0.5) * log1p_of(b_new * per_b, -excess * per_b)
            - 0.5 * jnp.log(count * per_both)
            + (ones * log_one + zeros * log_zero + coefficient)
            + _change(ones, a_new, inverse * b_new, left_a)
            + _change(zeros, b_new, inverse * a_new, left_b)
            - _change(trials, count, per_count, left)
        )


class BetaBinomialByRowLogits(_Logits, BetaBinomialByRow):
    """:class:`BetaBinomialByRow` with
    ``x ~ Binomial(total_count, logits=logit(probs))``."""

    likelihood = (BinomialLogits,)
    form = BetaBinomialLogits.form


class BetaGeometric(_UnknownProbability):
    """
    ``x ~ Geometric(probs)``, the number of failures before the first success, with
    ``probs ~ Beta(concentration1, concentration0)``.

    Hyperparameters: `concentration1` and `concentration0`, the numbers of successes and
    failures that the prior counts for.

    Statistics: the number of values, which is that of successes, and their sum, that of
    failures; integers.

    **References:**

    1. *A Compendium of Conjugate Priors*, D. Fink (1997)
    """

    likelihood = (GeometricProbs,)
    form = (
        "The form is probs ~ Beta(concentration1, concentration0), x ~ "
        "Geometric(probs[z]), with constant concentrations."
    )

    def data_error(self, x, hyper):
        del hyper
        return count_error(x)

    def cell(self, hyper, x):
        del hyper
        x = jnp.asarray(x, jnp.result_type(int))
        return x, jnp.asarray(x, jnp.result_type(float))

    def empty(self, hyper):
        del hyper
        zero = jnp.zeros((), jnp.result_type(int))
        return zero, zero

    def add(self, hyper, stat, x):
        del hyper
        return stat[0] + 1, stat[1] + x[0]

    def remove(self, hyper, stat, x):
        del hyper
        return stat[0] - 1, stat[1] - x[0]

    def merge(self, hyper, a, b):
        del hyper
        return a[0] + b[0], a[1] + b[1]

    def log_marginal(self, hyper, stat):
        # Of the sequence of trials: no binomial coefficient.
        return self._log_marginal_counts(hyper, stat) - log_binomial(*stat)

    def predictive(self, hyper, stat):
        post = self.posterior(hyper, stat)
        return _run_table(post["concentration0"], post["concentration1"], 1)

    def score(self, table, x):
        return _run_score(table, x[1])


class BetaGeometricLogits(_Logits, BetaGeometric):
    """:class:`BetaGeometric` with ``x ~ Geometric(logits=logit(probs))``."""

    likelihood = (GeometricLogits,)
    form = (
        "The form is probs ~ Beta(concentration1, concentration0), x ~ "
        "Geometric(logits=log(probs[z]) - log1p(-probs[z])), with constant "
        "concentrations."
    )


class BetaNegativeBinomial(_UnknownProbability):
    r"""
    ``x ~ NegativeBinomial(total_count, probs)`` with known `total_count` > 0 and
    ``probs ~ Beta(concentration1, concentration0)``. As in NumPyro, `probs` is the
    probability of what `x` counts:
    :math:`p(x) \propto \mathit{probs}^x (1 - \mathit{probs})^\mathit{total\_count}`.

    Hyperparameters: `concentration1` and `concentration0`, to which a value adds `x`
    and `total_count`; and the known `total_count`.

    Statistics: the sum and the number of values, integers; and the mean of
    :math:`\log\frac{\Gamma(r + x)}{\Gamma(r)\,x!}`, `r` being `total_count`.

    **References:**

    1. *A Compendium of Conjugate Priors*, D. Fink (1997)
    2. *Fast and Accurate Computation of Binomial Probabilities*, C. Loader (2000)
    """

    likelihood = (NegativeBinomialProbs,)
    given = ("total_count",)
    in_statistics = frozenset({"total_count"})
    positive = frozenset({"concentration1", "concentration0", "total_count"})
    form = (
        "The form is probs ~ Beta(concentration1, concentration0), x ~ "
        "NegativeBinomial(total_count, probs[z]), with constant total_count and "
        "concentrations."
    )

    def data_error(self, x, hyper):
        del hyper
        return count_error(x)

    def cell(self, hyper, x):
        x = jnp.asarray(x, jnp.result_type(int))
        value = jnp.asarray(x, jnp.result_type(float))
        return x, value, _log_multiset(hyper["total_count"], value)

    def empty(self, hyper):
        zero = jnp.zeros((), jnp.result_type(int))
        return zero, zero, jnp.zeros_like(hyper["concentration1"])

    def add(self, hyper, stat, x):
        del hyper
        total, count, mean = stat
        return total + x[0], count + 1, mean_with(count + 1, mean, x[2])

    def remove(self, hyper, stat, x):
        del hyper
        total, count, mean = stat
        return total - x[0], count - 1, mean_without(count - 1, mean, x[2])

    def merge(self, hyper, a, b):
        del hyper
        return a[0] + b[0], a[1] + b[1], mean_of_both(a[1], a[2], b[1], b[2])

    def _trials(self, hyper, stat):
        return stat[0], stat[1] * hyper["total_count"]

    def log_marginal(self, hyper, stat):
        # Of the sum, which is negative binomial too, and of the values given it.
        total, count, mean = stat
        failures = jnp.where(count > 0, count * hyper["total_count"], 1)
        given_total = count * mean - _log_multiset(failures, total)
        last = jnp.log(failures / (total + failures))
        score = self._log_marginal_counts(hyper, stat) + last + given_total
        return jnp.where(count > 0, score, 0)

    def predictive(self, hyper, stat):
        # Beta negative binomial.
        post = self.posterior(hyper, stat)
        a, b = post["concentration1"], post["concentration0"]
        return _run_table(a, b, hyper["total_count"])

    def score(self, table, x):
        return _run_score(table, x[1]) + x[2]


class BetaNegativeBinomialLogits(_Logits, BetaNegativeBinomial):
    """:class:`BetaNegativeBinomial` with
    ``x ~ NegativeBinomial(total_count, logits=logit(probs))``."""

    likelihood = (NegativeBinomialLogits,)
    form = (
        "The form is probs ~ Beta(concentration1, concentration0), x ~ "
        "NegativeBinomial(total_count, logits=log(probs[z]) - log1p(-probs[z])), with "
        "constant total_count and concentrations."
    )


# --- Parts ---------------------------------------------------------------------------


def _log_shares(a, b):
    """Logarithms of ``a / (a + b)`` and ``b / (a + b)``, also where they are tiny."""
    return -log1p_nonnegative(b / a), -log1p_nonnegative(a / b)


def _change(x, new, inverse, old):
    # Stirling's remainder at `new`, which is at least one unless `x` is zero, less that
    # before `x` was added.
    return jnp.where(x > 0, remainder_from_one(new, inverse) - old, 0)


def _binomial_cell(x, total_count):
    """Successes and failures, as they are counted and as they are scored; log binomial
    coefficient."""
    ones = jnp.asarray(x, jnp.result_type(int))
    zeros = jnp.asarray(total_count, ones.dtype) - ones
    floats = (jnp.asarray(n, jnp.result_type(float)) for n in (ones, zeros))
    return ones, zeros, *floats, log_binomial_of_integers(ones, zeros)


def _log_multiset(r, x):
    """Logarithm of ``gamma(r + x) / (gamma(r) x!)``."""
    return log_binomial(x, r) + jnp.log(r / (r + x))


def _run_table(a, b, stop):
    """
    For `_run_score`, where `a` and `b` are the concentrations of what is counted and of
    what ends the run at the `stop`-th time.
    """
    both = a + b
    log_a, log_b = _log_shares(a, b)
    first = both + stop
    constant = stop * log_b - 0.5 * log1p_nonnegative(stop / b)
    for sign, z in ((1, b + stop), (-1, b), (1, both), (-1, first)):
        constant = constant + sign * stirling_remainder(z)
    return (
        a,
        first,
        b / both,
        stop * (a / both),
        both / a,
        both / b,
        b + stop,
        log_a,
        stirling_remainder(a) - stirling_remainder(first),
        constant,
    )


def _run_score(table, x):
    """
    Log of ``B(a + x, b + stop) / B(a, b)``, in saddle-point form as in Loader (2000):
    the old shares are compared with the new ones.
    """
    a, first, share_b, offset, odds_a, odds_b, b_new, log_a, left, constant = table
    a_new, count = a + x, first + x
    # One division for two inverses.
    inverse = 1 / (a_new * count)
    per_a_new, per_count = inverse * count, inverse * a_new
    excess = (x * share_b - offset) * per_count
    from_a = log1p_of(a_new * (per_count * odds_a), excess * odds_a)
    from_b = log1p_of(b_new * (per_count * odds_b), -excess * odds_b)
    change = remainder_from_one(a_new, per_a_new) - remainder_from_one(count, per_count)
    return (
        (a_new - 0.5) * from_a
        + b_new * from_b
        + x * log_a
        + jnp.where(x > 0, change - left, 0)
        + constant
    )
