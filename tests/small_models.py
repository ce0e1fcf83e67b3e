# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""A small model and data for it, shared by tests; importable, so that it pickles."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import PitmanYorProcess, testing


class TabledPriors(NamedTuple):
    """
    One of several priors of at most so many rows, chosen by an index, so that one
    program serves all. It looks up what they say: programs with a few gamma functions
    at each of their places take long to compile and to run.

    - **which** - the index, an array.
    - **existing** - log weight of a cluster of so many rows, ``[priors, N + 1]``.
    - **new** - that of one more than so many clusters of so many rows,
      ``[priors, N + 1, N + 1]``.
    - **eppf** - log EPPF of the sizes with some code, ``[priors, codes]``.
    """

    which: Any
    existing: np.ndarray
    new: np.ndarray
    eppf: np.ndarray

    @classmethod
    def of(cls, priors, num_rows):
        numbers = np.arange(num_rows + 1)
        sizes = np.array(list(_partitions_of_numbers(num_rows)))
        code = _code(sizes, num_rows)
        assert len(np.unique(code)) == len(sizes)
        existing, new, eppf = [], [], []
        for prior in priors:
            existing.append(prior.log_weight_existing(numbers))
            new.append(prior.log_weight_new(numbers[:, None], numbers))
            eppf.append(np.full(code.max() + 1, np.nan, np.float32))
            eppf[-1][code] = prior.log_eppf(sizes)
        return cls(None, *(np.array(t) for t in (existing, new, eppf)))

    def __getitem__(self, which):
        return self._replace(which=which)

    def log_weight_existing(self, counts):
        return jnp.asarray(self.existing)[self.which, counts]

    def log_weight_new(self, num_clusters, num_rows):
        return jnp.asarray(self.new)[self.which, num_clusters, num_rows]

    def log_eppf(self, counts):
        code = _code(counts, self.existing.shape[-1] - 1)
        return jnp.asarray(self.eppf)[self.which, code]


def _partitions_of_numbers(most):
    """Sizes of clusters in falling order, of at most so many rows in all."""

    def sizes(left, largest, num):
        if num == 0:
            yield ()
            return
        for n in range(min(left, largest) + 1):
            for rest in sizes(left - n, n, num - 1):
                yield (n, *rest)

    return sizes(most, most, most)


def _code(sizes, most):
    """A number that tells how many clusters there are of each size."""
    digit = np.array([0, *((most + 1) ** np.arange(most))], np.int32)
    if isinstance(sizes, np.ndarray):
        return digit[sizes].sum(-1)
    return jnp.asarray(digit)[sizes].sum(-1)


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
