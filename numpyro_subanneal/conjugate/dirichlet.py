# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Categories of unknown probabilities."""

from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist
from numpyro.distributions.discrete import (
    CategoricalLogits,
    CategoricalProbs,
    MultinomialProbs,
)

from numpyro_subanneal.conjugate.base import (
    AbstractBlock,
    AbstractConjugatePair,
    SiteShape,
    at_features,
    count_error,
    first_row,
    loggamma,
    put_own,
    sum_features,
)
from numpyro_subanneal.conjugate.special import (
    log1p_of,
    log_binomial_of_integers,
    log_polya,
    log_rising,
    log_rising_of_scale,
    log_split,
    remainder_from_one,
    stirling_remainder,
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
       inference*, S. Tu (2014)
    """

    likelihood = (CategoricalProbs,)
    prior = {"probs": dist.Dirichlet}
    form = (
        "The form is probs ~ Dirichlet(concentration), x ~ Categorical(probs[z]), with "
        "a constant concentration."
    )
    positive = frozenset({"concentration"})
    event_dim = {"concentration": 1}

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

    def add(self, hyper, stat, x):
        del hyper
        (counts,) = stat
        return (counts + self._one_hot(counts, x),)

    def remove(self, hyper, stat, x):
        del hyper
        (counts,) = stat
        return (counts - self._one_hot(counts, x),)

    def _one_hot(self, counts, x):
        return jnp.asarray(jnp.arange(counts.shape[-1]) == x, counts.dtype)

    def merge(self, hyper, a, b):
        del hyper
        return (a[0] + b[0],)

    def posterior(self, hyper, stat):
        return {"concentration": hyper["concentration"] + stat[0]}

    def log_marginal(self, hyper, stat):
        # Tu (2014), of the sequence of values (no multinomial coefficient).
        concentration, (counts,) = hyper["concentration"], stat
        total, num = concentration.sum(-1), counts.sum(-1)
        # On a common scale the large parts of all terms meet inside one logarithm.
        each = log_rising(concentration, counts, total + num)
        return each.sum(-1) - log_rising(total, num, total + num)

    def predictive(self, hyper, stat):
        # Tu (2014): the posterior mean.
        weight = hyper["concentration"] + stat[0]
        return (jnp.log(weight / weight.sum(-1, keepdims=True)),)

    def score(self, table, x):
        return table[0][x]

    def blocks(self, sites):
        return [CountBlock(self, tuple(sites))]


class DirichletCategoricalLogits(DirichletCategorical):
    """:class:`DirichletCategorical` with ``x ~ Categorical(logits=log(probs))``."""

    likelihood = (CategoricalLogits,)
    form = (
        "The form is probs ~ Dirichlet(concentration), x ~ "
        "Categorical(logits=log(probs[z])), with a constant concentration."
    )

    def parameters(self, theta):
        return {"logits": jnp.log(theta["probs"])}


# Of no more categories sums are written out.
_FEW = 8


class DirichletMultinomial(AbstractConjugatePair):
    """
    ``x ~ Multinomial(total_count, probs)`` with ``probs ~ Dirichlet(concentration)``;
    the concentration ``[C]`` need not be uniform, and `total_count` may differ by row.

    Statistics: the sums of the counts ``[C]``, integers; and the log probability of the
    values given these sums, which is hypergeometric and does not depend on the prior
    (so that the log marginal has no sums of multinomial coefficients, which cancel).

    **References:**

    1. *The Dirichlet-multinomial and Dirichlet-categorical models for Bayesian
       inference*, S. Tu (2014)
    2. *Fast and Accurate Computation of Binomial Probabilities*, C. Loader (2000)
    """

    likelihood = (MultinomialProbs,)
    prior = {"probs": dist.Dirichlet}
    given_by_row = ("total_count",)
    form = (
        "The form is probs ~ Dirichlet(concentration), x ~ Multinomial(total_count, "
        "probs[z]), with a constant concentration."
    )
    positive = frozenset({"concentration"})
    event_dim = {"concentration": 1}

    def parameters(self, theta):
        return {"probs": theta["probs"]}

    def hyperparameters(self, prior, theta):
        del theta
        return {"concentration": prior["probs"].concentration}

    def data_error(self, x, hyper):
        error = count_error(x)
        if error is not None:
            return error
        total = np.sum(x, -1, dtype=np.float64)
        wrong = total != hyper["total_count"]
        if wrong.any():
            expected = np.broadcast_to(hyper["total_count"], total.shape)[wrong][0]
            return (
                f"has counts that sum to {total[wrong][0]:g} in row "
                f"{first_row(wrong)}, where total_count is {expected:g}"
            )
        return None

    def theta(self, hyper, sample):
        return {"probs": sample("probs", dist.Dirichlet(hyper["concentration"]))}

    def cell(self, hyper, x, total_count):
        # Counts as they are summed and as they are scored, their sum, and the log
        # multinomial coefficient.
        del hyper, total_count
        x = jnp.asarray(x, jnp.result_type(int))
        counts = jnp.asarray(x, jnp.result_type(float))
        # Of the categories in turn, each among those up to it.
        before = jnp.cumsum(counts, -1) - counts
        coefficient = log_binomial_of_integers(counts, before).sum(-1)
        return x, counts, counts.sum(-1), coefficient

    def empty(self, hyper):
        concentration = hyper["concentration"]
        zeros = jnp.zeros(concentration.shape[-1], jnp.result_type(int))
        return zeros, jnp.zeros((), concentration.dtype)

    def add(self, hyper, stat, x):
        return self.merge(hyper, stat, (x[0], 0))

    def remove(self, hyper, stat, x):
        del hyper
        counts, given_sums = stat
        counts = counts - x[0]
        given_sums = given_sums - self._log_share_out(counts, x[0])
        # An emptied cluster starts again from nothing, not from rounding errors.
        return counts, jnp.where(counts.sum(-1) > 0, given_sums, 0)

    def merge(self, hyper, a, b):
        del hyper
        return a[0] + b[0], a[1] + b[1] + self._log_share_out(a[0], b[0])

    def _log_share_out(self, a, b):
        """Log probability that two groups, of known size and with known counts of the
        categories together, have these counts."""
        sizes = a.sum(-1), b.sum(-1)
        each = jax.vmap(log_split, (0, 0, None, None))(a, b, *sizes)
        return each.sum(-1) - log_split(*sizes, *sizes)

    def posterior(self, hyper, stat):
        return {"concentration": hyper["concentration"] + stat[0]}

    def log_marginal(self, hyper, stat):
        # Of the sums, Dirichlet-multinomial too, and of the values given them.
        return log_polya(hyper["concentration"], stat[0]) + stat[1]

    def predictive(self, hyper, stat):
        # Dirichlet-multinomial, Tu (2014).
        weight = hyper["concentration"] + stat[0]
        total = weight.sum(-1)
        share = weight / total
        return (
            weight,
            share,
            1 / share,
            jnp.log(share),
            stirling_remainder(weight),
            total,
            1 / total,
            stirling_remainder(total),
        )

    def score(self, table, x):
        # Saddle-point form as in Loader (2000): the old shares are compared with the
        # new ones.
        *shares, total, per_total, left_total = table
        _, counts, size, coefficient = x
        count = total + size
        per_count = 1 / count

        def each(counts, weight, share, odds, log_share, left):
            new = weight + counts
            per_share = per_count * odds
            excess = counts - size * share
            log_ratio = log1p_of(new * per_share, excess * per_share)
            change = remainder_from_one(new, 1 / new) - left
            change = jnp.where(counts > 0, change, 0)
            return (new - 0.5) * log_ratio + counts * log_share + change

        parts = counts, *shares
        num = counts.shape[-1]
        if num <= _FEW:
            # NB: not a sum over an axis, which XLA would not vectorise.
            among = sum(each(*(part[i] for part in parts)) for i in range(num))
        else:
            among = each(*parts).sum(-1)
        rest = 0.5 * (num - 1) * jnp.log(count * per_total)
        change = remainder_from_one(count, per_count) - left_total
        return among + coefficient - rest - jnp.where(size > 0, change, 0)


_PART = 24


def _sum_of_gathered(each: Array) -> Array:
    """Sum over features, the first axis, of what has just been gathered."""
    # XLA turns a sum over more than 32 elements into two, of which the first is neither
    # vectorised nor fused with the gather: at 68 features and 64 clusters 2.3 us in
    # place of 1.2. With very many features there is nothing to gain, and the barrier
    # keeps the search for the maximum from doing it all cluster by cluster.
    size = each.shape[0]
    if each.ndim == 1 or not _PART < size <= 5 * _PART:
        return each.sum(0)
    parts = [each[i : i + _PART].sum(0) for i in range(0, size, _PART)]
    return lax.optimization_barrier(reduce(jnp.add, parts))


class Counts(NamedTuple):
    """
    - **category** - rows with this category, integers ``[categories, clusters]``.
    - **total** - rows of the cluster, integers ``[clusters]``; where cells are masked,
      those of each feature, ``[features, clusters]``.
    """

    category: Array
    total: Array


class CountTables(NamedTuple):
    """
    - **category** - ``log(count + concentration)``, ``[categories, clusters]``.
    - **total** - ``log(total + total concentration)``, ``[features, clusters]``; its
      sum over features, ``[clusters]``, where no cells are masked.
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


class Codes(NamedTuple):
    """
    - **index** - the row's category of each feature, counted over all features,
      ``[features]``.
    - **live** - which features are not masked, ``[features]``; None for all.
    """

    index: Array
    live: Array | None

    def where(self, live: Array, yes: Array, no: Array | int) -> Array:
        """`yes` where `live` and not masked, else `no`: of the shape of
        `Counts.total` in one cluster."""
        return jnp.where(live if self.live is None else live & self.live, yes, no)


class TakenCounts(NamedTuple):
    """
    - **k** - the cluster that a row was taken from.
    - **index** - the row's categories, ``[features]``.
    - **by** - 1 where something really was taken, else 0, ``[]`` or ``[features]``.
    - **log_total** - the cluster's entry of `CountTables.total` without the row.
    """

    k: Array
    index: Array
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
    is_apart: bool = False

    @property
    def by_feature(self) -> bool:
        """Whether features of a cluster have different numbers of rows."""
        return self.masked or self.is_apart

    def apart(self):
        return replace(self, is_apart=True)

    @cached_property
    def cardinality(self) -> np.ndarray:
        """Number of categories of each feature."""
        return np.concatenate(
            [np.zeros(0, int)]
            + [np.full(s.num_features, s.role_shapes[0][0]) for s in self.sites]
        )

    @cached_property
    def offset(self) -> np.ndarray:
        """First category of each feature."""
        stops = np.cumsum(self.cardinality)
        return (stops - self.cardinality).astype(np.int32)

    @cached_property
    def feature(self) -> np.ndarray:
        """Feature of each category."""
        index = np.arange(len(self.cardinality), dtype=np.int32)
        return np.repeat(index, self.cardinality)

    def pack(self, hyper):
        dtype = jnp.result_type(float)
        category = jnp.concatenate(
            [
                jnp.broadcast_to(
                    jnp.asarray(h["concentration"], dtype),
                    site.feature_shape + site.role_shapes[0],
                ).reshape(-1)
                for h, site in zip(hyper, self.sites, strict=True)
            ]
        )
        return CountHyper(category, self._by_feature(category))

    def part(self, index, hyper, stats):
        before = replace(self, sites=self.sites[:index])
        block = replace(self, sites=(self.sites[index],))
        features = slice(before.num_features, before.num_features + block.num_features)
        start = int(sum(before.cardinality))
        categories = slice(start, start + int(sum(block.cardinality)))
        total = stats.total
        if self.by_feature:
            total = total[features] if block.by_feature else total[features.start]
        return (
            block,
            CountHyper(hyper.category[categories], hyper.total[features]),
            Counts(stats.category[categories], total),
        )

    def _by_feature(self, values: Array) -> Array:
        return jax.ops.segment_sum(
            values, self.feature, len(self.cardinality), indices_are_sorted=True
        )

    def row(self, hyper, data, n):
        del hyper
        codes, live = self._values(data, n)
        codes = codes.astype(jnp.int32)
        if live is not None:
            # What sits in a masked cell may be anything; it counts as category 0, by 0.
            codes = jnp.where(live, codes, 0)
        return Codes(codes + self.offset, live)

    def empty(self, hyper, num_clusters):
        features = (len(self.cardinality),) if self.by_feature else ()
        return Counts(
            jnp.zeros((len(hyper.category), num_clusters), jnp.int32),
            jnp.zeros((*features, num_clusters), jnp.int32),
        )

    def some(self, num):
        most = int(self.cardinality.max())
        site = replace(
            self.sites[0],
            name="",
            feature_shape=(num,),
            role_shapes=((most,),),
            masked=True,
        )
        return CountBlock(self.pair, (site,), is_apart=True)

    def _categories_of(self, index):
        """Categories of features `index`, padded to as many as any has, and which of
        them there are: ``[num, most]``."""
        most = np.arange(self.cardinality.max())
        category = jnp.asarray(self.offset)[index][:, None] + most
        return category, most < jnp.asarray(self.cardinality)[index][:, None]

    def gather_hyper(self, hyper, index):
        category, real = self._categories_of(index)
        # What is padded is never looked at.
        found = hyper.category.at[category].get(mode="clip")
        return CountHyper(jnp.where(real, found, 1).reshape(-1), hyper.total[index])

    def gather_row(self, hyper, data, n, index, live):
        del hyper
        codes, unmasked = self._values(data, n)
        if unmasked is not None:
            live = live & unmasked[index]
        codes = jnp.where(live, codes[index].astype(jnp.int32), 0)
        return Codes(codes + self.some(len(index)).offset, live)

    def gather(self, hyper, stats, index, live):
        del hyper
        category, real = self._categories_of(index)
        found = stats.category.at[category].get(mode="clip")
        found = jnp.where((real & live[:, None])[..., None], found, 0)
        total = jnp.where(live[:, None], stats.total[index], 0)
        return Counts(found.reshape(-1, found.shape[-1]), total)

    def scatter(self, stats, part, index, live):
        category, real = self._categories_of(index)
        where = jnp.where(real & live[:, None], category, len(self.feature))
        return Counts(
            stats.category.at[where.reshape(-1)].set(part.category, mode="drop"),
            stats.total.at[jnp.where(live, index, self.num_features)].set(
                part.total, mode="drop"
            ),
        )

    def choose(self, stats, view):
        return Counts(
            stats.category[view[self.feature], np.arange(len(self.feature))],
            stats.total[view, np.arange(self.num_features)],
        )

    def reorder(self, stats, order):
        return Counts(
            jnp.take_along_axis(stats.category, order[self.feature], axis=-1),
            jnp.take_along_axis(stats.total, order, axis=-1),
        )

    def add(self, hyper, stats, x, k, live, view=None):
        del hyper
        k = at_features(k, view)
        by = x.where(live, 1, 0)
        return Counts(
            stats.category.at[x.index, k].add(by, unique_indices=True),
            stats.total.at[self._totals_of(k, view)].add(by),
        )

    def _totals_of(self, k, view):
        """Index of the totals of clusters `k`; in views those of each feature."""
        if view is None:
            return (Ellipsis, k)
        each = np.arange(self.num_features)
        return each.reshape(-1, *(1,) * (k.ndim - 1)), k

    def merge(self, hyper, a, b):
        del hyper
        return jax.tree.map(jnp.add, a, b)

    def tables(self, hyper, stats):
        category = jnp.log(stats.category + hyper.category[:, None])
        return CountTables(category, self._log_totals(hyper, stats.total))

    def _log_totals(self, hyper, totals):
        one = partial(self._log_total, hyper)
        return jax.vmap(one, in_axes=-1, out_axes=-1)(totals)

    def _log_total(self, hyper, total):
        each = jnp.log(total + hyper.total)
        return each if self.by_feature else each.sum()

    def take(self, hyper, stats, x, k, live, view=None):
        by = x.where(live, 1, 0)
        total = stats.total[self._totals_of(at_features(k, view), view)]
        return TakenCounts(k, x.index, by, self._log_total(hyper, total - by))

    def _sum(self, x, each, total, view):
        """Log predictive density of row `x`, of that of its categories and totals."""
        if not self.by_feature:
            return _sum_of_gathered(each) - total
        each = each - total
        if x.live is not None:
            each = jnp.where(x.live.reshape(-1, *(1,) * (each.ndim - 1)), each, 0)
        return sum_features(each, view)

    def score(self, hyper, stats, tables, taken, x, view=None):
        each = self._sum(x, tables.category[x.index], tables.total, view)
        if taken is None:
            return each
        own = stats.category[x.index, at_features(taken.k, view)]
        own = own - jnp.where(x.index == taken.index, taken.by, 0)
        own = jnp.log(own + hyper.category[x.index])
        return put_own(each, taken.k, self._sum(x, own, taken.log_total, view))

    def put(self, hyper, stats, tables, taken, x, k, live, view=None):
        num = len(x.index)
        xs = jnp.concatenate([taken.index, x.index])
        ks = jnp.stack([at_features(taken.k, view), at_features(k, view)], -1)
        by = jnp.stack([-taken.by, x.where(live, 1, 0)], -1)
        each = jnp.broadcast_to(ks, (num, 2)).T.reshape(-1)
        by_cell = jnp.broadcast_to(by, (num, 2)).T.reshape(-1)
        category = stats.category.at[xs, each].add(by_cell)
        changed = jnp.log(category[xs, each] + hyper.category[xs])
        by_category = tables.category.at[xs, each].set(changed)
        if self.by_feature:
            totals = self._totals_of(ks, view)
            total = stats.total.at[totals].add(by)
            log_total = self._log_totals(hyper, total[totals])
            by_total = tables.total.at[totals].set(log_total)
        else:
            # Few enough to be written as a whole, which is one kernel.
            slots = jnp.arange(stats.total.shape[-1], dtype=jnp.int32)
            left, joined = slots == taken.k, slots == k
            total = stats.total - jnp.where(left, taken.by, 0)
            total = total + jnp.where(joined, by[1], 0)
            log_total = self._log_total(hyper, total[k])
            by_total = jnp.where(left, taken.log_total, tables.total)
            by_total = jnp.where(joined, log_total, by_total)
        return Counts(category, total), CountTables(by_category, by_total)

    def join(self, hyper, stats, tables, x, ks, live):
        by = jnp.expand_dims(x.where(live, 1, 0), -1)
        cells = x.index[:, None], ks
        category = stats.category.at[cells].add(by)
        changed = jnp.log(category[cells] + hyper.category[x.index][:, None])
        total = stats.total.at[..., ks].add(by)
        log_total = self._log_totals(hyper, total[..., ks])
        return Counts(category, total), CountTables(
            tables.category.at[cells].set(changed),
            tables.total.at[..., ks].set(log_total),
        )

    def log_marginals(self, hyper, stats):
        total = jnp.broadcast_to(stats.total, (len(hyper.total), stats.total.shape[-1]))
        prior = hyper.total[:, None]
        scale = prior + total
        categories = log_rising(
            hyper.category[:, None], stats.category, scale[self.feature]
        )
        return self._by_feature(categories) - log_rising(prior, total, scale)

    def evidence(self, like, hyper, stats, occupied):
        del like
        # Summed over clusters first: that leaves one number a category. These come on
        # the first axis, since sums over a short last one are slow.
        counts = lax.optimization_barrier(stats.category.T)
        each = log_rising_of_scale(hyper.category, counts)
        total = jnp.broadcast_to(stats.total, (len(hyper.total), stats.total.shape[-1]))
        whole = log_rising_of_scale(hyper.total, total.T)
        live = jnp.broadcast_to(occupied, whole.T.shape).T
        each = jnp.where(live[:, self.feature], each, 0).sum(0)
        return self._by_feature(each) - jnp.where(live, whole, 0).sum(0)

    def draw(self, rng_key, hyper, stats):
        # Gelman et al. (2013), appendix A: normalised gamma variates.
        concentration = stats.category + hyper.category[:, None]
        log_weight = loggamma(rng_key, concentration.T)
        values: dict[str, Any] = {}
        start = 0
        for site in self.sites:
            stop = start + site.num_features * site.role_shapes[0][0]
            weight = log_weight[:, start:stop].reshape(
                (-1,) + site.feature_shape + site.role_shapes[0]
            )
            ((_, name),) = site.roles
            # A probability of zero would have a density of zero or infinity.
            tiny = jnp.finfo(weight.dtype).tiny
            values[name] = jnp.maximum(jax.nn.softmax(weight, axis=-1), tiny)
            start = stop
        return values
