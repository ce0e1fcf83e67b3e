# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Normal values of unknown mean and variance."""

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
import numpy as np

import numpyro.distributions as dist

from numpyro_subanneal.conjugate.base import AbstractConjugatePair
from numpyro_subanneal.conjugate.special import (
    log1p_nonnegative,
    log_gamma_half_step,
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
       section 6
    """

    likelihood = (dist.Normal,)
    prior = {"variance": dist.InverseGamma, "loc": dist.Normal}
    form = (
        "The form is var ~ InverseGamma(shape, rate), loc ~ Normal(mean, sqrt(var / "
        "kappa)), x ~ Normal(loc[z], sqrt(var[z])), with constants shape, rate, mean "
        "and kappa."
    )
    positive = frozenset({"kappa", "shape", "rate"})
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
        return None

    def theta(self, hyper, sample):
        variance = sample("variance", dist.InverseGamma(hyper["shape"], hyper["rate"]))
        scale = jnp.sqrt(variance / hyper["kappa"])
        loc = sample("loc", dist.Normal(hyper["mean"], scale))
        return {"variance": variance, "loc": loc}

    def empty(self, hyper):
        zero = jnp.zeros_like(hyper["mean"])
        return zero, zero, zero

    def add(self, stat, x):
        count, mean, square = stat
        count = count + 1
        delta = x - mean
        mean = mean + delta / count
        return count, mean, square + delta * (x - mean)

    def remove(self, stat, x):
        count, mean, square = stat
        left = count - 1
        delta = x - mean
        rest = mean - delta / jnp.maximum(left, 1)
        # An emptied cluster starts again from nothing, not from rounding errors.
        rest = jnp.where(left > 0, rest, 0)
        square = jnp.where(left > 1, jnp.maximum(square - delta * (x - rest), 0), 0)
        return left, rest, square

    def merge(self, a, b):
        count = a[0] + b[0]
        share = b[0] / jnp.maximum(count, 1)
        delta = b[1] - a[1]
        mean = a[1] + delta * share
        return count, mean, a[2] + b[2] + delta**2 * a[0] * share

    def posterior(self, hyper, stat):
        # Murphy (2007), Eqs. 86-89, with the prior mean as origin.
        count, mean, square = stat
        kappa = hyper["kappa"] + count
        delta = mean - hyper["mean"]
        shrunk = hyper["kappa"] * count / kappa
        return {
            "mean": hyper["mean"] + delta * count / kappa,
            "kappa": kappa,
            "shape": hyper["shape"] + count / 2,
            "rate": hyper["rate"] + (square + shrunk * delta**2) / 2,
        }

    def log_marginal(self, hyper, stat):
        # Murphy (2007), Eq. 95.
        post = self.posterior(hyper, stat)
        return (
            gammaln(post["shape"])
            - gammaln(hyper["shape"])
            + hyper["shape"] * jnp.log(hyper["rate"])
            - post["shape"] * jnp.log(post["rate"])
            + 0.5 * jnp.log(hyper["kappa"] / post["kappa"])
            - 0.5 * stat[0] * jnp.log(2 * jnp.pi)
        )

    def predictive(self, hyper, stat):
        # Student-t, Murphy (2007), Eq. 110: location, precision over degrees of
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
