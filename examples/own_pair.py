# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Example: A conjugate pair of your own
=====================================

Laplace values about a known location, whose scale has an inverse gamma prior: a
robust likelihood that the package does not have. The pair states one feature in one
cluster; features, clusters, masks and recognition come from the package, which then
treats it like its own pairs.

    python examples/own_pair.py
"""

import argparse

from jax import random
import jax.numpy as jnp
from jax.scipy.special import gammaln
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_subanneal import (
    AbstractConjugatePair,
    ChineseRestaurantProcess,
    SubsampleAnnealedGibbs,
    register_conjugate,
    testing,
)


class InverseGammaLaplace(AbstractConjugatePair):
    """
    ``x ~ Laplace(loc, scale)`` with known `loc` and ``scale ~ InverseGamma(shape,
    rate)``. Statistics: count, and mean distance from `loc`.
    """

    likelihood = (dist.Laplace,)
    prior = {"scale": dist.InverseGamma}
    form = "The form is scale ~ InverseGamma(shape, rate), x ~ Laplace(loc, scale[z])."
    given = ("loc",)
    positive = frozenset({"shape", "rate"})

    def parameters(self, theta):
        return {"scale": theta["scale"]}

    def hyperparameters(self, prior, theta):
        return {"shape": prior["scale"].concentration, "rate": prior["scale"].rate}

    def theta(self, hyper, sample):
        prior = dist.InverseGamma(hyper["shape"], hyper["rate"])
        return {"scale": sample("scale", prior)}

    def cell(self, hyper, x):
        return jnp.abs(x - hyper["loc"])

    def empty(self, hyper):
        return jnp.zeros((), int), jnp.zeros(())

    def add(self, hyper, stat, x):
        count, mean = stat
        return count + 1, mean + (x - mean) / (count + 1)

    def remove(self, hyper, stat, x):
        count, mean = stat
        left = count - 1
        rest = mean - (x - mean) / jnp.maximum(left, 1)
        # An emptied cluster starts again from nothing, not from rounding errors.
        return left, jnp.where(left > 0, jnp.maximum(rest, 0), 0)

    def merge(self, hyper, a, b):
        count = a[0] + b[0]
        return count, a[1] + (b[1] - a[1]) * b[0] / jnp.maximum(count, 1)

    def posterior(self, hyper, stat):
        count, mean = stat
        return {"shape": hyper["shape"] + count, "rate": hyper["rate"] + count * mean}

    def log_marginal(self, hyper, stat):
        post = self.posterior(hyper, stat)
        ratio = hyper["shape"] * jnp.log(hyper["rate"] / post["rate"])
        ratio += gammaln(post["shape"]) - gammaln(hyper["shape"])
        return ratio - stat[0] * jnp.log(2 * post["rate"])

    def predictive(self, hyper, stat):
        post = self.posterior(hyper, stat)
        constant = jnp.log(post["shape"] / (2 * post["rate"]))
        return constant, post["shape"] + 1, 1 / post["rate"]

    def score(self, table, x):
        constant, exponent, weight = table
        return constant - exponent * jnp.log1p(weight * x)


def model(x, num_clusters=8):
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    with numpyro.plate("columns", x.shape[1], dim=-1):
        with numpyro.plate("clusters", num_clusters, dim=-2):
            scale = numpyro.sample("scale", dist.InverseGamma(1.0, 1.0))
        with numpyro.plate("rows", len(x), dim=-2):
            numpyro.sample("x", dist.Laplace(0.0, scale[z]), obs=x)


def main(args):
    pair = register_conjugate(InverseGammaLaplace())
    example = testing.ConjugateExample(
        {"loc": 0.5, "shape": 2.0, "rate": 1.5}, np.array([0.3, -1.2, 2.5, 0.5, 8.0])
    )
    testing.check_conjugate(pair, [example])
    print("The pair obeys the laws.")

    # Quiet and loud rows, in six columns about zero.
    loud = np.arange(200) % 2
    rng = np.random.default_rng(0)
    x = rng.laplace(0.0, np.where(loud, 10.0, 0.1)[:, None], size=(200, 6))
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
    )
    mcmc.run(random.key(0), x)
    z = np.asarray(mcmc.get_samples()["z"])
    together = (z[:, :, None] == z[:, None, :]).mean(0)
    same = loud[:, None] == loud
    print(
        f"pairs of rows together: {together[same].mean():.2f} of those that belong "
        f"together, {together[~same].mean():.2f} of those that do not"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-warmup", type=int, default=20)
    parser.add_argument("--num-samples", type=int, default=200)
    main(parser.parse_args())
