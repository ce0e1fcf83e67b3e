# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Normal values of unknown mean and variance."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist

from numpyro_subanneal.conjugate.base import (
    MASK_IT,
    AbstractConjugatePair,
    first_row,
)
from numpyro_subanneal.conjugate.special import (
    log1p_nonnegative,
    log_gamma_half_step,
    log_rising,
)


class NormalInverseGamma(AbstractConjugatePair):
    r"""
    ``x ~ Normal(loc, sqrt(variance))`` with ``variance ~ InverseGamma(shape, rate)``
    and ``loc ~ Normal(mean, sqrt(variance / kappa))``.

    Hyperparameters: `mean` of the cluster means; `kappa` > 0, the number of values that
    the prior mean counts for; `shape` and `rate` of the inverse gamma over *variances*.
    In the normal-inverse-chi-square form of the same prior, :math:`\nu_0 = 2\,shape`
    and :math:`\nu_0 \sigma_0^2 = 2\,rate`.

    Statistics: count, mean, and sum of squares about that mean (not raw power sums,
    which cancel when the mean is large beside the spread).

    **References:**

    1. *Conjugate Bayesian analysis of the Gaussian distribution*, K. P. Murphy (2007),
       sections 3 and 6
    """

    likelihood = (dist.Normal,)
    prior = {"variance": dist.InverseGamma, "loc": dist.Normal}
    form = (
        "The form is var ~ InverseGamma(shape, rate), loc ~ Normal(mean, sqrt(var / "
        "kappa)), x ~ Normal(loc[z], sqrt(var[z])), with constants shape, rate, mean "
        "and kappa."
    )
    positive = frozenset({"kappa", "shape", "rate"})
    squared = frozenset({"mean"})
    location = ("mean", "loc")

    def parameters(self, theta):
        return {"loc": theta["loc"], "scale": jnp.sqrt(theta["variance"])}

    def hyperparameters(self, prior, theta):
        return {
            "mean": prior["loc"].loc,
            "kappa": theta["variance"] / prior["loc"].scale ** 2,
            "shape": prior["variance"].concentration,
            "rate": prior["variance"].rate,
        }

    def data_error(self, x, hyper):
        error = super().data_error(x, hyper)
        if error is not None or x.dtype.kind != "f":
            return error
        # What is compared is the column as it was given with what the sampler will see.
        kind = np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
        largest, spread = np.abs(x).max(), x.std(dtype=np.float64)
        step = np.spacing(np.asarray(largest, kind))
        if 16 * step > spread > 0:
            return (
                f"has values up to {largest:.6g} with a standard deviation of "
                f"{spread:.3g}, which {kind} cannot resolve (its steps are {step:.3g} "
                "there); call `numpyro.enable_x64()` first or subtract a constant from "
                "the column"
            )
        # Sums of squares, of values and of differences from the prior's mean.
        if float(largest) > np.sqrt(float(np.finfo(kind).max) / (16 * len(x))):
            return (
                f"has values up to {largest:.6g}, the sum of whose squares {kind} "
                "cannot hold; divide the column by a constant"
            )
        return None

    def theta(self, hyper, sample):
        variance = sample("variance", dist.InverseGamma(hyper["shape"], hyper["rate"]))
        scale = jnp.sqrt(variance / hyper["kappa"])
        loc = sample("loc", dist.Normal(hyper["mean"], scale))
        return {"variance": variance, "loc": loc}

    def empty(self, hyper):
        zero = jnp.zeros_like(hyper["mean"])
        return zero, zero, zero

    def add(self, hyper, stat, x):
        del hyper
        count, mean, square = stat
        count = count + 1
        delta = x - mean
        mean = mean + delta / count
        return count, mean, square + delta * (x - mean)

    def remove(self, hyper, stat, x):
        del hyper
        count, mean, square = stat
        left = count - 1
        delta = x - mean
        rest = mean - delta / jnp.maximum(left, 1)
        # An emptied cluster starts again from nothing, not from rounding errors.
        rest = jnp.where(left > 0, rest, 0)
        square = jnp.where(left > 1, jnp.maximum(square - delta * (x - rest), 0), 0)
        return left, rest, square

    def merge(self, hyper, a, b):
        del hyper
        count = a[0] + b[0]
        share = b[0] / jnp.maximum(count, 1)
        delta = b[1] - a[1]
        mean = a[1] + delta * share
        return count, mean, a[2] + b[2] + delta**2 * a[0] * share

    def posterior(self, hyper, stat):
        # Murphy (2007), Eqs. 86-89, with the prior mean as origin.
        count, mean, _ = stat
        kappa = hyper["kappa"] + count
        delta = mean - hyper["mean"]
        return {
            "mean": hyper["mean"] + delta * count / kappa,
            "kappa": kappa,
            "shape": hyper["shape"] + count / 2,
            "rate": hyper["rate"] + self._added_rate(hyper, stat),
        }

    def _added_rate(self, hyper, stat):
        count, mean, square = stat
        shrunk = hyper["kappa"] * count / (hyper["kappa"] + count)
        return (square + shrunk * (mean - hyper["mean"]) ** 2) / 2

    def log_marginal(self, hyper, stat):
        # Murphy (2007), Eq. 95.
        # Both powers of the posterior's rate meet in one logarithm each.
        count, _, _ = stat
        added = self._added_rate(hyper, stat)
        scale = 2 * jnp.pi * (hyper["rate"] + added)
        return (
            log_rising(hyper["shape"], count / 2, scale)
            - hyper["shape"] * jnp.log1p(added / hyper["rate"])
            - 0.5 * jnp.log1p(count / hyper["kappa"])
        )

    def predictive(self, hyper, stat):
        # Student-t, Murphy (2007), Eq. 100: location, precision over degrees of
        # freedom, exponent, log normaliser.
        post = self.posterior(hyper, stat)
        weight = post["kappa"] / (2 * post["rate"] * (post["kappa"] + 1))
        log_scale = 0.5 * jnp.log(weight / jnp.pi)
        return (
            post["mean"],
            weight,
            post["shape"] + 0.5,
            log_gamma_half_step(post["shape"]) + log_scale,
        )

    def score(self, table, x):
        location, weight, exponent, constant = table
        # NB: not the log of a sum: in a cluster of 10^6 rows the argument is about 1e-6
        # and the exponent 5e5.
        return constant - exponent * log1p_nonnegative(weight * (x - location) ** 2)


class NormalGamma(NormalInverseGamma):
    r"""
    :class:`NormalInverseGamma` written by precision:
    ``x ~ Normal(loc, 1 / sqrt(precision))`` with ``precision ~ Gamma(shape, rate)`` and
    ``loc ~ Normal(mean, 1 / sqrt(kappa * precision))``.

    Hyperparameters: `mean` of the cluster means; `kappa` > 0, the number of values that
    the prior mean counts for; `shape` and `rate` (not scale) of the gamma over
    precisions.

    Statistics: as of :class:`NormalInverseGamma`.

    **References:**

    1. *Conjugate Bayesian analysis of the Gaussian distribution*, K. P. Murphy (2007),
       section 3
    """

    prior = {"precision": dist.Gamma, "loc": dist.Normal}
    form = (
        "The form is prec ~ Gamma(shape, rate), loc ~ Normal(mean, 1 / sqrt(kappa * "
        "prec)), x ~ Normal(loc[z], 1 / sqrt(prec[z])), with constants shape, rate, "
        "mean and kappa."
    )

    def parameters(self, theta):
        return {"loc": theta["loc"], "scale": 1 / jnp.sqrt(theta["precision"])}

    def hyperparameters(self, prior, theta):
        return {
            "mean": prior["loc"].loc,
            "kappa": 1 / (theta["precision"] * prior["loc"].scale ** 2),
            "shape": prior["precision"].concentration,
            "rate": prior["precision"].rate,
        }

    def theta(self, hyper, sample):
        precision = sample("precision", dist.Gamma(hyper["shape"], hyper["rate"]))
        scale = 1 / jnp.sqrt(hyper["kappa"] * precision)
        loc = sample("loc", dist.Normal(hyper["mean"], scale))
        return {"precision": precision, "loc": loc}


class NormalKnownMean(AbstractConjugatePair):
    """
    ``x ~ Normal(loc, sqrt(variance))`` with known `loc` and
    ``variance ~ InverseGamma(shape, rate)``.

    Hyperparameters: `shape` and `rate` of the inverse gamma over *variances*; and the
    known `loc`.

    Statistics: count, and mean of the squared deviations from `loc`.

    **References:**

    1. *Bayesian Data Analysis*, A. Gelman et al., 3rd edition (2013), section 2.6
    """

    likelihood = (dist.Normal,)
    prior = {"variance": dist.InverseGamma}
    given = ("loc",)
    in_statistics = frozenset({"loc"})
    form = (
        "The form is var ~ InverseGamma(shape, rate), x ~ Normal(loc, sqrt(var[z])), "
        "with constants shape, rate and loc."
    )
    positive = frozenset({"shape", "rate"})
    squared = frozenset({"loc"})

    def parameters(self, theta):
        return {"scale": jnp.sqrt(theta["variance"])}

    def hyperparameters(self, prior, theta):
        del theta
        fn = prior["variance"]
        return {"shape": fn.concentration, "rate": fn.rate}

    def data_error(self, x, hyper):
        return NormalInverseGamma().data_error(x, hyper)

    def theta(self, hyper, sample):
        fn = dist.InverseGamma(hyper["shape"], hyper["rate"])
        return {"variance": sample("variance", fn)}

    def cell(self, hyper, x):
        return (x - hyper["loc"]) ** 2

    def empty(self, hyper):
        zero = jnp.zeros_like(hyper["shape"])
        return zero, zero

    def add(self, hyper, stat, x):
        del hyper
        count, square = stat
        return count + 1, square + (x - square) / (count + 1)

    def remove(self, hyper, stat, x):
        del hyper
        count, square = stat
        left = count - 1
        rest = jnp.maximum(square - (x - square) / jnp.maximum(left, 1), 0)
        # An emptied cluster starts again from nothing, not from rounding errors.
        return left, jnp.where(left > 0, rest, 0)

    def merge(self, hyper, a, b):
        del hyper
        count = a[0] + b[0]
        return count, a[1] + (b[1] - a[1]) * (b[0] / jnp.maximum(count, 1))

    def posterior(self, hyper, stat):
        count, square = stat
        return {
            "shape": hyper["shape"] + count / 2,
            "rate": hyper["rate"] + count * square / 2,
        }

    def log_marginal(self, hyper, stat):
        count, square = stat
        post = self.posterior(hyper, stat)
        rising = log_rising(hyper["shape"], count / 2, 2 * jnp.pi * post["rate"])
        return rising - hyper["shape"] * jnp.log1p(count * square / 2 / hyper["rate"])

    def predictive(self, hyper, stat):
        # Student-t: precision over degrees of freedom, exponent, log normaliser.
        post = self.posterior(hyper, stat)
        weight = 0.5 / post["rate"]
        log_scale = 0.5 * jnp.log(weight / jnp.pi)
        constant = log_gamma_half_step(post["shape"]) + log_scale
        return weight, post["shape"] + 0.5, constant

    def score(self, table, x):
        weight, exponent, constant = table
        return constant - exponent * log1p_nonnegative(weight * x)


class NormalKnownScale(AbstractConjugatePair):
    """
    ``x ~ Normal(loc, scale)`` with known `scale`, the same in all rows
    (:class:`NormalKnownScaleByRow` lets it differ), and
    ``loc ~ Normal(mean, scale0)``.

    Hyperparameters: `mean` and standard deviation `scale0` of the cluster means; and
    the known standard deviation `scale` of the values.

    Statistics: count, mean, and sum of squares about that mean.

    **References:**

    1. *Conjugate Bayesian analysis of the Gaussian distribution*, K. P. Murphy (2007),
       section 2
    """

    likelihood = (dist.Normal,)
    prior = {"loc": dist.Normal}
    given = ("scale",)
    form = (
        "The form is loc ~ Normal(mean, scale0), x ~ Normal(loc[z], scale), with "
        "constants mean, scale0 and scale."
    )
    positive = frozenset({"scale0", "scale"})
    squared = frozenset({"mean", "scale0", "scale"})
    location = ("mean", "loc")

    def parameters(self, theta):
        return {"loc": theta["loc"]}

    def hyperparameters(self, prior, theta):
        del theta
        return {"mean": prior["loc"].loc, "scale0": prior["loc"].scale}

    def data_error(self, x, hyper):
        return NormalInverseGamma().data_error(x, hyper)

    def theta(self, hyper, sample):
        return {"loc": sample("loc", dist.Normal(hyper["mean"], hyper["scale0"]))}

    def empty(self, hyper):
        return NormalInverseGamma().empty(hyper)

    def add(self, hyper, stat, x):
        return NormalInverseGamma().add(hyper, stat, x)

    def remove(self, hyper, stat, x):
        return NormalInverseGamma().remove(hyper, stat, x)

    def merge(self, hyper, a, b):
        return NormalInverseGamma().merge(hyper, a, b)

    def posterior(self, hyper, stat):
        # `precision` is the data's, in units of the prior's.
        count, mean, _ = stat
        precision = count * (hyper["scale0"] / hyper["scale"]) ** 2
        shift = (mean - hyper["mean"]) * precision / (1 + precision)
        return {
            "mean": hyper["mean"] + shift,
            "scale0": hyper["scale0"] / jnp.sqrt(1 + precision),
        }

    def log_marginal(self, hyper, stat):
        count, mean, square = stat
        precision = count * (hyper["scale0"] / hyper["scale"]) ** 2
        square = square + count * (mean - hyper["mean"]) ** 2 / (1 + precision)
        each = 0.5 * jnp.log(2 * jnp.pi) + jnp.log(hyper["scale"])
        return (
            -count * each
            - 0.5 * square / hyper["scale"] ** 2
            - 0.5 * jnp.log1p(precision)
        )

    def predictive(self, hyper, stat):
        # Normal: mean, half the precision, log normaliser.
        post = self.posterior(hyper, stat)
        weight = 0.5 / (post["scale0"] ** 2 + hyper["scale"] ** 2)
        return post["mean"], weight, 0.5 * jnp.log(weight / jnp.pi)

    def score(self, table, x):
        mean, weight, constant = table
        return constant - weight * (x - mean) ** 2


class NormalKnownScaleByRow(NormalKnownScale):
    """
    :class:`NormalKnownScale` with a `scale` that may differ by row, such as known
    errors of measurement.

    Statistics: count, means of the values' weights ``1 / scale**2`` and of the
    logarithms of their scales, weighted mean of the values, and weighted sum of squares
    about that mean.

    .. note:: To remove a value that is :math:`r` times as precise as the rest of its
        cluster together leaves a relative error of about :math:`r` roundings,
        :math:`10^{-7} r` in float32, in the weight of that rest, and in its mean an
        error of as many roundings of the value. They last until the statistics are
        built anew from the data, as they are at every step.
    """

    given = ()
    given_by_row = ("scale",)
    positive = frozenset({"scale0"})

    def data_error(self, x, hyper):
        scale = np.broadcast_to(hyper["scale"], x.shape)
        # NB: written so that NaN fails it too.
        bad = ~((scale > 0) & np.isfinite(scale))
        if bad.any():
            return (
                f"has a scale of {scale[bad][0]} in row {first_row(bad)}; scales must "
                f"be positive; {MASK_IT}"
            )
        return super().data_error(x, hyper)

    def cell(self, hyper, x, scale):
        del hyper
        return x, scale**2, 1 / scale**2, jnp.log(scale)

    def empty(self, hyper):
        return (jnp.zeros_like(hyper["mean"]),) * 5

    def add(self, hyper, stat, x):
        return self.merge(hyper, stat, self._single(x))

    def remove(self, hyper, stat, x):
        del hyper
        count, weight, log_scale, mean, square = stat
        x, _, own, own_log_scale = x
        left = count - 1
        rest = jnp.maximum(left, 1)
        weight_left = weight - (own - weight) / rest
        # Its share of the weights that are left, which rounding may bring to nothing.
        some = weight_left > 0
        share = own / jnp.where(some, rest * weight_left, 1)
        mean_left = mean - (x - mean) * jnp.where(some, share, 0)
        square = square - own * (x - mean) * (x - mean_left)
        log_scale = log_scale - (own_log_scale - log_scale) / rest
        # An emptied cluster starts again from nothing, not from rounding errors.
        return (
            left,
            jnp.where(left > 0, jnp.maximum(weight_left, 0), 0),
            jnp.where(left > 0, log_scale, 0),
            jnp.where(left > 0, mean_left, 0),
            jnp.where(left > 1, jnp.maximum(square, 0), 0),
        )

    def _single(self, x):
        x, _, weight, log_scale = x
        return jnp.ones_like(x), weight, log_scale, x, jnp.zeros_like(x)

    def merge(self, hyper, a, b):
        del hyper
        count = a[0] + b[0]
        by_count = b[0] / jnp.maximum(count, 1)
        weights = a[0] * a[1], b[0] * b[1]
        total = weights[0] + weights[1]
        share = weights[1] / jnp.where(total > 0, total, 1)
        delta = b[3] - a[3]
        return (
            count,
            a[1] + (b[1] - a[1]) * by_count,
            a[2] + (b[2] - a[2]) * by_count,
            a[3] + delta * share,
            a[4] + b[4] + delta**2 * weights[0] * share,
        )

    def posterior(self, hyper, stat):
        count, weight, _, mean, _ = stat
        precision = count * weight * hyper["scale0"] ** 2
        shift = (mean - hyper["mean"]) * precision / (1 + precision)
        return {
            "mean": hyper["mean"] + shift,
            "scale0": hyper["scale0"] / jnp.sqrt(1 + precision),
        }

    def log_marginal(self, hyper, stat):
        count, weight, log_scale, mean, square = stat
        precision = count * weight * hyper["scale0"] ** 2
        delta = mean - hyper["mean"]
        square = square + count * weight * delta**2 / (1 + precision)
        each = 0.5 * jnp.log(2 * jnp.pi) + log_scale
        return -count * each - 0.5 * square - 0.5 * jnp.log1p(precision)

    def predictive(self, hyper, stat):
        # Normal: mean, and variance without that of the value's own error.
        post = self.posterior(hyper, stat)
        return post["mean"], post["scale0"] ** 2

    def score(self, table, x):
        mean, variance = table
        variance = variance + x[1]
        square = (x[0] - mean) ** 2 / variance
        return -0.5 * (jnp.log(2 * jnp.pi * variance) + square)


class _LogValues(AbstractConjugatePair):
    """
    The pair `normal` of the logarithms of positive values.

    Cells and statistics end with the log value itself and its mean, which the change of
    variables takes.
    """

    likelihood = (dist.LogNormal,)
    normal: ClassVar[AbstractConjugatePair]

    def __init_subclass__(cls):
        for name in ("prior", "given", "positive", "location", "in_statistics"):
            setattr(cls, name, getattr(cls.normal, name))
        cls.form = cls.normal.form.replace("x ~ Normal(", "x ~ LogNormal(")

    def parameters(self, theta):
        return self.normal.parameters(theta)

    def hyperparameters(self, prior, theta):
        return self.normal.hyperparameters(prior, theta)

    def data_error(self, x, hyper):
        bad = x <= 0
        if bad.any():
            return (
                f"has {x[bad][0]} in row {first_row(bad)}; values must be positive; "
                f"{MASK_IT}"
            )
        return self.normal.data_error(np.log(x), hyper)

    def theta(self, hyper, sample):
        return self.normal.theta(hyper, sample)

    def cell(self, hyper, x):
        log_x = jnp.log(x)
        return self.normal.cell(hyper, log_x), log_x

    def empty(self, hyper):
        stat = self.normal.empty(hyper)
        return *stat, jnp.zeros_like(stat[0])

    def add(self, hyper, stat, x):
        *stat, log_mean = stat
        stat = self.normal.add(hyper, stat, x[0])
        return *stat, log_mean + (x[1] - log_mean) / stat[0]

    def remove(self, hyper, stat, x):
        *stat, log_mean = stat
        stat = self.normal.remove(hyper, stat, x[0])
        rest = log_mean - (x[1] - log_mean) / jnp.maximum(stat[0], 1)
        return *stat, jnp.where(stat[0] > 0, rest, 0)

    def merge(self, hyper, a, b):
        stat = self.normal.merge(hyper, a[:-1], b[:-1])
        share = b[0] / jnp.maximum(stat[0], 1)
        return *stat, a[-1] + (b[-1] - a[-1]) * share

    def posterior(self, hyper, stat):
        return self.normal.posterior(hyper, stat[:-1])

    def log_marginal(self, hyper, stat):
        return self.normal.log_marginal(hyper, stat[:-1]) - stat[0] * stat[-1]

    def predictive(self, hyper, stat):
        return self.normal.predictive(hyper, stat[:-1])

    def score(self, table, x):
        return self.normal.score(table, x[0]) - x[1]


class LogNormalInverseGamma(_LogValues):
    """
    ``x ~ LogNormal(loc, sqrt(variance))``: the logarithms of the values are as in
    :class:`NormalInverseGamma`.
    """

    normal = NormalInverseGamma()


class LogNormalGamma(_LogValues):
    """
    ``x ~ LogNormal(loc, 1 / sqrt(precision))``: the logarithms of the values are as in
    :class:`NormalGamma`.
    """

    normal = NormalGamma()


class LogNormalKnownMean(_LogValues):
    """
    ``x ~ LogNormal(loc, sqrt(variance))`` with known `loc`: the logarithms of the
    values are as in :class:`NormalKnownMean`.
    """

    normal = NormalKnownMean()


class LogNormalKnownScale(_LogValues):
    """
    ``x ~ LogNormal(loc, scale)`` with known `scale`: the logarithms of the values are
    as in :class:`NormalKnownScale`.
    """

    normal = NormalKnownScale()
