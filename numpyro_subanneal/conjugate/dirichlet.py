# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Categories of unknown probabilities."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
import numpy as np

import numpyro.distributions as dist
from numpyro.distributions.discrete import CategoricalProbs

from numpyro_subanneal.conjugate.base import (
    AbstractBlock,
    AbstractConjugatePair,
    SiteShape,
    loggamma,
)
from numpyro_subanneal.typing import Array


class DirichletCategorical(AbstractConjugatePair):
    r"""
    ``x ~ Categorical(probs)`` with ``probs ~ Dirichlet(concentration)``; the
    concentration ``[C]`` need not be uniform, and may differ by feature.

    Statistics: the counts ``[C]``, integers.

    **References:**

    1. *Bayesian Data Analysis*, A. Gelman et al., 3rd edition (2013), section 3.4
    2. *The Dirichlet-multinomial and Dirichlet-categorical models for Bayesian
       inference*, S. Tu (2014), Eqs. 4, 7 and 9
    """

    likelihood = (CategoricalProbs,)
    prior = {"probs": dist.Dirichlet}
    form = (
        "The form is probs ~ Dirichlet(concentration), x ~ Categorical(probs[z]), with "
        "a constant concentration."
    )
    positive = frozenset({"concentration"})
    vectors = frozenset({"concentration"})

    def parameters(self, theta):
        return {"probs": theta["probs"]}

    def hyperparameters(self, prior, theta):
        del theta
        return {"concentration": prior["probs"].concentration}

    def data_error(self, x, hyper):
        categories = hyper["concentration"].shape[-1]
        # NB: written so that NaN fails it too.
        bad = ~((x >= 0) & (x <= categories - 1) & (x == np.floor(x)))
        if bad.any():
            row = int(np.argmax(bad))
            return (
                f"has {x[row]} in row {row}, which is not a category: codes are the "
                f"integers 0..{categories - 1}"
            )
        return None

    def theta(self, hyper, sample):
        return {"probs": sample("probs", dist.Dirichlet(hyper["concentration"]))}

    def empty(self, hyper):
        return (jnp.zeros(hyper["concentration"].shape[-1], jnp.int32),)

    def add(self, stat, x):
        (counts,) = stat
        return (counts + self._one_hot(counts, x),)

    def remove(self, stat, x):
        (counts,) = stat
        return (counts - self._one_hot(counts, x),)

    def _one_hot(self, counts, x):
        return jnp.asarray(jnp.arange(counts.shape[-1]) == x, counts.dtype)

    def merge(self, a, b):
        return (a[0] + b[0],)

    def posterior(self, hyper, stat):
        return {"concentration": hyper["concentration"] + stat[0]}

    def log_marginal(self, hyper, stat):
        # Tu (2014), Eq. 7, of the sequence of values (no multinomial coefficient).
        concentration, (counts,) = hyper["concentration"], stat
        total = concentration.sum(-1)
        each = gammaln(concentration + counts) - gammaln(concentration)
        return gammaln(total) - gammaln(total + counts.sum(-1)) + each.sum(-1)

    def predictive(self, hyper, stat):
        # Tu (2014), Eq. 9.
        weight = hyper["concentration"] + stat[0]
        return (jnp.log(weight / weight.sum(-1, keepdims=True)),)

    def score(self, table, x):
        return table[0][x]

    def block(self, sites):
        return CountBlock(self, tuple(sites))


class Counts(NamedTuple):
    """
    - **category** - rows with this category, integers ``[categories, clusters]``.
    - **total** - rows of the cluster, integers ``[clusters]``.
    """

    category: Array
    total: Array


class CountTables(NamedTuple):
    """
    - **category** - ``log(count + concentration)``, ``[categories, clusters]``.
    - **total** - sum over features of ``log(total + total concentration)``,
      ``[clusters]``.
    """

    category: Array
    total: Array


class CountHyper(NamedTuple):
    """
    - **category** - concentration of each category of each feature, ``[categories]``.
    - **total** - total concentration of each feature, ``[features]``.
    """

    category: Array
    total: Array


class TakenCounts(NamedTuple):
    """
    - **k** - the cluster that a row was taken from.
    - **x** - the row's categories, ``[features]``.
    - **by** - 1 if the row really was taken, else 0.
    - **log_total** - the cluster's entry of `CountTables.total` without the row.
    """

    k: Array
    x: Array
    by: Array
    log_total: Array


@dataclass(frozen=True)
class CountBlock(AbstractBlock):
    """
    Categorical features of any cardinalities, their categories laid end to end.

    Scoring a row is one gather of a table row a feature and a sum: no logarithm. A move
    rewrites the entries of the row's own categories only.
    """

    pair: DirichletCategorical
    sites: tuple[SiteShape, ...]

    @cached_property
    def cardinality(self) -> np.ndarray:
        """Number of categories of each feature."""
        return np.concatenate(
            [np.full(s.num_features, s.event_shape[0]) for s in self.sites]
        )

    @cached_property
    def offset(self) -> np.ndarray:
        """First category of each feature."""
        stops = np.cumsum(self.cardinality)
        return (stops - self.cardinality).astype(np.int32)

    @cached_property
    def feature(self) -> np.ndarray:
        """Feature of each category."""
        return np.repeat(np.arange(len(self.cardinality)), self.cardinality)

    def pack(self, hyper):
        dtype = jnp.result_type(float)
        category = jnp.concatenate(
            [
                jnp.broadcast_to(
                    jnp.asarray(h["concentration"], dtype),
                    site.feature_shape + site.event_shape,
                ).reshape(-1)
                for h, site in zip(hyper, self.sites, strict=True)
            ]
        )
        return CountHyper(category, self._by_feature(category))

    def _by_feature(self, values: Array) -> Array:
        return jax.ops.segment_sum(
            values, self.feature, len(self.cardinality), indices_are_sorted=True
        )

    def row(self, hyper, data, n):
        codes = AbstractBlock.row(self, hyper, data, n)
        return codes.astype(jnp.int32) + self.offset

    def empty(self, hyper, num_clusters):
        return Counts(
            jnp.zeros((len(hyper.category), num_clusters), jnp.int32),
            jnp.zeros(num_clusters, jnp.int32),
        )

    def add(self, stats, x, k, live):
        by = jnp.where(live, 1, 0)
        return Counts(
            stats.category.at[x, k].add(by, unique_indices=True),
            stats.total.at[k].add(by),
        )

    def tables(self, hyper, stats):
        return CountTables(
            jnp.log(stats.category + hyper.category[:, None]),
            jax.vmap(lambda n: self._log_total(hyper, n))(stats.total),
        )

    def _log_total(self, hyper, total):
        return jnp.log(total + hyper.total).sum()

    def take(self, hyper, stats, x, k, live):
        by = jnp.where(live, 1, 0)
        return TakenCounts(k, x, by, self._log_total(hyper, stats.total[k] - by))

    def score(self, hyper, stats, tables, taken, x):
        each = tables.category[x].sum(0) - tables.total
        own = stats.category[x, taken.k] - jnp.where(x == taken.x, taken.by, 0)
        own = jnp.log(own + hyper.category[x]).sum() - taken.log_total
        return jnp.where(jnp.arange(each.shape[0]) == taken.k, own, each)

    def put(self, hyper, stats, tables, taken, x, k, live):
        xs = jnp.concatenate([taken.x, x])
        ks = jnp.stack([taken.k, k])
        by = jnp.stack([-taken.by, jnp.where(live, 1, 0)])
        each = jnp.repeat(ks, len(x), total_repeat_length=2 * len(x))
        category = stats.category.at[xs, each].add(
            jnp.repeat(by, len(x), total_repeat_length=2 * len(x))
        )
        changed = jnp.log(category[xs, each] + hyper.category[xs])
        total = stats.total.at[ks].add(by)
        log_total = jax.vmap(lambda n: self._log_total(hyper, n))(total[ks])
        return Counts(category, total), CountTables(
            tables.category.at[xs, each].set(changed),
            tables.total.at[ks].set(log_total),
        )

    def log_marginal(self, hyper, stats):
        a = hyper.category[:, None]
        categories = gammaln(stats.category + a) - gammaln(a)
        a = hyper.total[:, None]
        totals = gammaln(stats.total + a) - gammaln(a)
        return categories.sum(0) - totals.sum(0)

    def draw(self, rng_key, hyper, stats):
        # Gelman et al. (2013), appendix A: normalised gamma variates.
        concentration = stats.category + hyper.category[:, None]
        log_weight = loggamma(rng_key, concentration).T
        values: dict[str, Any] = {}
        start = 0
        for site in self.sites:
            stop = start + site.num_features * site.event_shape[0]
            weight = log_weight[:, start:stop].reshape(
                (-1,) + site.feature_shape + site.event_shape
            )
            ((_, name),) = site.roles
            values[name] = jax.nn.softmax(weight, axis=-1)
            start = stop
        return values
