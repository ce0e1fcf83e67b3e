# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Angles of unknown mean direction."""

import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist

from numpyro_subanneal.conjugate.base import AbstractConjugatePair, first_row
from numpyro_subanneal.conjugate.special import log_i0e


class VonMisesKnownConcentration(AbstractConjugatePair):
    r"""
    ``x ~ VonMises(loc, concentration)`` with known `concentration` and
    ``loc ~ VonMises(mean, kappa)``.

    Hyperparameters: `mean` direction and concentration `kappa` of the cluster
    locations; and the known `concentration` of the values. Angles are in radians, from
    -2 pi to 2 pi.

    Statistics: the number of values, an integer, and the means of their cosines and
    sines.

    **References:**

    1. *Bayesian Inference for the von Mises-Fisher Distribution*, K. V. Mardia,
       S. A. M. El-Atoum (1976)
    2. *Finding the Location of a Signal: A Bayesian Analysis*, P. Guttorp,
       R. A. Lockhart (1988)
    """

    likelihood = (dist.VonMises,)
    prior = {"loc": dist.VonMises}
    given = ("concentration",)
    form = (
        "The form is loc ~ VonMises(mean, kappa), x ~ VonMises(loc[z], concentration), "
        "with constants mean, kappa and concentration."
    )
    positive = frozenset({"kappa", "concentration"})

    def data_error(self, x, hyper):
        error = super().data_error(x, hyper)
        if error is not None:
            return error
        # Once round either way, with the rounding errors of whoever converted them.
        bad = np.abs(x) > 2 * np.pi * (1 + 1e-5)
        if bad.any():
            row = first_row(bad)
            return (
                f"has the value {x[bad][0]:g} in row {row}; angles are in radians, "
                "between -2 pi and 2 pi (`numpy.deg2rad` converts degrees, "
                "`x % (2 * numpy.pi)` takes off whole turns)"
            )
        return None

    def parameters(self, theta):
        return {"loc": theta["loc"]}

    def hyperparameters(self, prior, theta):
        del theta
        return {"mean": prior["loc"].loc, "kappa": prior["loc"].concentration}

    def theta(self, hyper, sample):
        return {"loc": sample("loc", dist.VonMises(hyper["mean"], hyper["kappa"]))}

    def cell(self, hyper, x):
        del hyper
        return jnp.cos(x), jnp.sin(x)

    def empty(self, hyper):
        zero = jnp.zeros_like(hyper["mean"])
        return jnp.zeros((), jnp.result_type(int)), zero, zero

    def add(self, hyper, stat, x):
        del hyper
        count = stat[0] + 1
        means = (m + (v - m) / count for m, v in zip(stat[1:], x, strict=True))
        return count, *means

    def remove(self, hyper, stat, x):
        del hyper
        left = stat[0] - 1

        def without(mean, value):
            rest = mean - (value - mean) / jnp.maximum(left, 1)
            # An emptied cluster starts again from nothing, not from rounding errors.
            return jnp.where(left > 0, rest, 0)

        return left, without(stat[1], x[0]), without(stat[2], x[1])

    def merge(self, hyper, a, b):
        del hyper
        count = a[0] + b[0]
        share = b[0] / jnp.maximum(count, 1)
        means = (m + (v - m) * share for m, v in zip(a[1:], b[1:], strict=True))
        return count, *means

    def _resultant(self, hyper, stat):
        """The concentration and mean direction of the posterior as a vector."""
        count, cos, sin = stat
        weight = count * hyper["concentration"]
        return (
            hyper["kappa"] * jnp.cos(hyper["mean"]) + weight * cos,
            hyper["kappa"] * jnp.sin(hyper["mean"]) + weight * sin,
        )

    def posterior(self, hyper, stat):
        x, y = self._resultant(hyper, stat)
        return {"mean": jnp.arctan2(y, x), "kappa": jnp.hypot(x, y)}

    def log_marginal(self, hyper, stat):
        count, cos, sin = stat
        kappa, concentration = hyper["kappa"], hyper["concentration"]
        length = jnp.hypot(*self._resultant(hyper, stat))
        # Values scatter, so the resultant falls short of the sum of its parts.
        weight = count * concentration
        along = cos * jnp.cos(hyper["mean"]) + sin * jnp.sin(hyper["mean"])
        lost = 2 * kappa * (1 - along) + weight * (1 - cos**2 - sin**2)
        lost = -weight * lost / (length + kappa + weight)
        each = jnp.log(2 * jnp.pi) + log_i0e(concentration)
        return lost + log_i0e(length) - log_i0e(kappa) - count * each

    def predictive(self, hyper, stat):
        # Resultant vector and its length, known concentration, log normaliser.
        x, y = self._resultant(hyper, stat)
        length = jnp.hypot(x, y)
        concentration = hyper["concentration"]
        constant = -jnp.log(2 * jnp.pi) - log_i0e(concentration) - log_i0e(length)
        return x, y, length, concentration, constant - concentration

    def score(self, table, x):
        cx, cy, length, concentration, constant = table
        # The new length, and by how much it is more than the old one.
        along = concentration * (concentration + 2 * (cx * x[0] + cy * x[1]))
        new = jnp.sqrt(jnp.maximum(length * length + along, 0))
        return constant + along / jnp.maximum(new + length, 1e-30) + log_i0e(new)
