# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""A small model and data for it, shared by tests; importable, so that it pickles."""

import math
from typing import Any, NamedTuple

from jax import lax
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import PitmanYorProcess, testing


class SwitchedPrior(NamedTuple):
    """One of several priors, chosen by an index, so that one program serves all."""

    which: Any
    priors: tuple[Any, ...]

    def _switch(self, method, *args):
        branches = [
            lambda *a, prior=prior: getattr(prior, method)(*a) for prior in self.priors
        ]
        return lax.switch(self.which, branches, *args)

    def log_weight_existing(self, counts):
        return self._switch("log_weight_existing", counts)

    def log_weight_new(self, num_clusters, num_rows):
        return self._switch("log_weight_new", num_clusters, num_rows)

    def log_eppf(self, counts):
        return self._switch("log_eppf", counts)


def finite_log_eppf(sizes, concentration, num_components):
    """Of clusters of a finite symmetric Dirichlet mixture, by the gamma functions."""
    if len(sizes) > num_components:
        return -np.inf
    total = num_components * concentration
    return (
        math.lgamma(num_components + 1)
        - math.lgamma(num_components - len(sizes) + 1)
        + math.lgamma(total)
        - math.lgamma(total + sum(sizes))
        + sum(
            math.lgamma(concentration + n) - math.lgamma(concentration) for n in sizes
        )
    )


CAPACITY = 4
CONCENTRATION, DISCOUNT = 1.0, 0.1
MEAN, KAPPA, SHAPE, RATE = 0.0, 0.1, 2.0, 1.0


def mixture(x, num_clusters=CAPACITY, observed=True):
    num_rows, num_features = x.shape
    z = numpyro.sample("z", PitmanYorProcess(CONCENTRATION, DISCOUNT, size=num_rows))
    with numpyro.plate("features", num_features, dim=-1):
        with numpyro.plate("clusters", num_clusters, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(SHAPE, RATE))
            loc = numpyro.sample("loc", dist.Normal(MEAN, jnp.sqrt(var / KAPPA)))
            numpyro.deterministic("sd", jnp.sqrt(var))
        with numpyro.plate("rows", num_rows, dim=-2):
            likelihood = dist.Normal(loc[z], jnp.sqrt(var[z]))
            numpyro.sample("x", likelihood, obs=x if observed else None)


def blobs(num_rows=12, seed=0):
    """Rows of two features around -5 and 5 in turn, standard deviation 0.5."""
    centre = np.where(np.arange(num_rows) % 2, 5.0, -5.0)[:, None]
    noise = np.random.default_rng(seed).normal(0.0, 0.5, (num_rows, 2))
    return (centre + noise).astype(np.float32)


def log_joint(z, x, log_marginal=None):
    """Log probability of partition `z` (-1: out) and of its rows, by the oracles."""
    if log_marginal is None:
        log_marginal = normal_log_marginal
    return testing.log_eppf(z, CONCENTRATION, DISCOUNT) + sum(
        log_marginal(x[z == k]) for k in range(z.max(initial=-1) + 1)
    )


def normal_log_marginal(x):
    return testing.normal_log_marginal(x, MEAN, KAPPA, SHAPE, RATE)
