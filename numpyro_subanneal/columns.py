# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""Move features between views, as in cross-categorization.

Given the partitions of the rows in all views, a feature's cells have a marginal
likelihood under each of them. Once these are known, in one pass over the rows, features
move at no cost that grows with the rows.

*State.* The :math:`M` elements of a feature partition are in views, of which there are
:math:`V`, labelled. With :math:`K` of them occupied, labels have the probability of the
partition times :math:`(V - K)! / V!`: every way to number its parts is as probable. A
vacant view has a partition of the rows, and parameters of its own, from their prior.
Then the full conditional of one element is that of Neal's algorithm 8 (Neal, 2000):
the weight of an occupied view is that of the partition's urn, and that of a new one is
shared by all that are vacant when the element is taken out, the one that it may have
left among them.

Four moves leave this distribution invariant:

- *Gibbs*: every element in turn (Obermeyer et al., 2014, section 4, "a non-conjugate
  Gibbs-sampler").
- *Sets*: of two views, all elements are shared out anew between them by the urn of the
  feature partition's prior, and the likelihood decides by Metropolis and Hastings (as
  there, "propose new feature sets from the Pitman-Yor prior").
- *Guided*: an element leaves for a new view whose partition of the rows is drawn from
  its data, row by row, each with its conditional probability given those before
  (sequential imputation; MacEachern, Clyde and Liu, 1999), or one that is alone in a
  view goes back. Each is tried half of the time, so that the few that are alone are
  tried often. With :math:`w` weights of the urn, :math:`L_v` the log marginal
  likelihood of the element in view :math:`v`, :math:`Z` the product over rows of their
  conditional probabilities, and :math:`c` the probability that the element is chosen
  where it is, the ratio of Metropolis and Hastings is
  :math:`w_\text{new} Z c_\text{alone} / (c_v \sum_v w_v e^{L_v})`, the sum over all
  other occupied views. Partitions that are drawn from the prior fit the data only while
  there are few rows; this move finds some that do at any number.
- *Splits and merges*: two elements are chosen, and the view of both is split between
  them, or their two views become one. The partitions of the rows of all that is new are
  drawn by sequential imputation, each from the data of its own elements. The other
  elements are shared out, as by Jain and Neal (2004) for rows, by how well they fit
  partitions that no part of the state goes into but these two elements and the set of
  the others; or, now and then, by the urn alone. With :math:`p` the probability of the
  feature partition, :math:`q` that of how the others are shared out, :math:`c` that the
  two elements are chosen, and :math:`Z` the product over rows for the elements of a
  whole view, the ratio of a split of :math:`v` into :math:`a` and :math:`b` is
  :math:`p_{ab} Z_a Z_b c_{ab} / (p_v Z_v q c_v)`. Where a view has the clusters of two,
  each of its elements is better off there than in a new view, until the others leave
  too and the clusters are made anew: no other move does all of that. Views to be merged
  are mostly two of which one would be the likelier in the other, with its partition as
  it is: of a few views that hold parts of what belongs together, these are soon found.

The moves that take passes over the rows to look at vacant or new views are made at
every turn only while there are few rows. At the other turns elements move between
occupied views, none of which becomes vacant.

A view whose partition has more clusters than can be represented has probability zero.
So a vacant view that drew such a one is not moved into.

**References:**

1. *Markov Chain Sampling Methods for Dirichlet Process Mixture Models*, R. M. Neal
   (2000), algorithm 8
2. *Sequential Importance Sampling for Nonparametric Bayes Models: The Next Generation*,
   S. N. MacEachern, M. Clyde, J. S. Liu (1999)
3. *A Split-Merge Markov Chain Monte Carlo Procedure for the Dirichlet Process Mixture
   Model*, S. Jain, R. M. Neal (2004)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np

from numpyro_subanneal import variates
from numpyro_subanneal.conjugate.base import ByView
from numpyro_subanneal.distributions import PartitionDistribution
from numpyro_subanneal.rows import Clusters, Component
from numpyro_subanneal.subsample import Subsample, over_chains
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import (
    below,
    fold_in,
    gumbel,
    nth,
    running_sums,
    uniform,
)
from numpyro_subanneal.views import Layout, SomeFeatures, ViewPriors

# Random numbers are drawn for so many rows at a time.
_CHUNK = 256

# Views are opened, split and merged at every turn of so many rows, and of more as often
# as keeps the rows that are visited as many.
_ALWAYS = 256

# How often views to be merged are chosen, and elements shared out, without regard to
# the data. Views that hold a part each of what belongs together would hardly be made by
# a split with regard to the data, and so would hardly be merged.
_BLIND = 0.25

# Statistics of so many views are counted in one pass over the rows.
_VIEWS_AT_ONCE = 4

# How often elements are shared out, and partitions drawn, on the way to a split.
_NUM_LAUNCH = 2


@dataclass(frozen=True)
class FeatureMoves:
    """
    How often to move features between views: at each turnover of the current subsample,
    that is whenever as many rows have moved as it holds, and 256 at least if there are
    so many; after the warm-up, once a sweep.

    Where the subsample has `n` rows, more than 256, what takes passes over the rows for
    each view that is new is done with probability ``256 / n``.

    :param int num_sweeps: Gibbs sweeps over all features; with that probability
        features may move into vacant views, drawn from the prior.
    :param int num_sets: proposals to share out the features of two views anew.
    :param int num_guided: proposals, each made with that probability, to move a feature
        to a new view drawn from its data, or back; each takes a pass over the rows of
        that feature.
    :param int num_splits: proposals, each made with that probability, to split a view
        in two or to merge two, with new partitions of the rows; each takes a few passes
        over the rows of all features.
    """

    num_sweeps: int = 4
    num_sets: int = 16
    num_guided: int = 2
    num_splits: int = 1

    def __post_init__(self):
        for name in ("num_sweeps", "num_sets", "num_guided", "num_splits"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | np.integer)
                or value < 0
            ):
                raise ValueError(
                    f"`{name}` must be a nonnegative integer, got {value!r}."
                )


class FeatureRecord(NamedTuple):
    """
    What has become of moves of features, so far.

    - **moved** - number of elements that a Gibbs move has put into another view.
    - **sets** - accepted proposals to share out the elements of two views.
    - **guided** - accepted proposals of a view drawn from the data, or back.
    - **splits**, **merges** - accepted proposals to split a view, to merge two.
    """

    moved: Array
    sets: Array
    guided: Array
    splits: Array
    merges: Array

    @classmethod
    def start(cls) -> "FeatureRecord":
        return cls(*(jnp.zeros((), jnp.int32) for _ in cls._fields))


class _State(NamedTuple):
    """
    - **labels** - views of the elements of each site, by their positions in the site.
    - **usable** - views that elements may move into, ``[views]``.
    - **z**, **counts** - assignments ``[N, views]`` and sizes ``[views, K]``.
    - **stats** - statistics of all features under every view, views first.
    - **fit** - for each site, log marginal likelihood of the elements under its views,
      ``[elements, views]``.
    - **record** - what has become of the moves.
    """

    labels: tuple[Array, ...]
    usable: Array
    z: Array
    counts: Array
    stats: tuple[Any, ...]
    fit: tuple[Array, ...]
    record: FeatureRecord


class _Scene(NamedTuple):
    """What stays the same: priors, components, rows in the subsample."""

    prior: ViewPriors
    feature_priors: Sequence[PartitionDistribution | None]
    components: Sequence[Component]
    subsample: Subsample
    layout: Layout
    capacity: int


def move_features(
    options: FeatureMoves,
    rng_key: Array,
    prior: ViewPriors,
    feature_priors: Sequence[PartitionDistribution | None],
    components: Sequence[Component],
    clusters: Clusters,
    subsample: Subsample,
    layout: Layout,
    record: FeatureRecord,
) -> tuple[Clusters, FeatureRecord]:
    """
    Make the moves of one turn.

    :param options: how many.
    :param rng_key: key.
    :param prior: of the partitions of the rows.
    :param feature_priors: of the partition of the elements of each site.
    :param components: what the model says at the current hyperparameters.
    :param clusters: assignments and statistics.
    :param subsample: which rows are in.
    :param layout: of features in views.
    :param record: what has become of moves before.
    """
    capacity = clusters.counts.shape[-1]
    scene = _Scene(prior, feature_priors, components, subsample, layout, capacity)
    key_vacant, *move_keys = variates.split(rng_key, 5)
    occupied = layout.num_features(clusters.labels) > 0
    opens = _is_due(fold_in(key_vacant, 0), scene)
    z, drawn, usable = draw_vacant(
        fold_in(key_vacant, 1), prior, clusters.z, subsample, capacity,
        ~occupied & opens,
    )  # fmt: skip
    counts = jnp.where(occupied[:, None], clusters.counts, drawn)
    stats = _count(scene, z, occupied | opens)
    fit = []
    for site, (start, size) in enumerate(
        zip(layout.offsets, layout.sizes, strict=True)
    ):
        own = jax.tree.map(lambda s, a=start, n=size: s[a : a + n], stats)
        fit.append(_fit(scene, own, site))
    state = _State(clusters.labels, usable, z, counts, stats, tuple(fit), record)
    for site, feature_prior in enumerate(feature_priors):
        if feature_prior is None:
            continue
        keys = [fold_in(key, site) for key in move_keys]
        state = _share_out_sets(options.num_sets, keys[1], scene, site, state, opens)
        state = _gibbs(options.num_sweeps, keys[0], scene, site, state, opens)
        # NB: after these two no partition of a vacant view is looked at: what those
        # leave vacant has one that is not drawn from the prior.
        state = _guided(options.num_guided, keys[2], scene, site, state)
        state = _split_and_merge(options.num_splits, keys[3], scene, site, state)
    index = layout.index(state.labels)
    chosen = tuple(
        c.block.choose(s, view)
        for c, s, view in zip(components, state.stats, index, strict=True)
    )
    # What is in vacant views is of no use any more.
    occupied = layout.num_features(state.labels) > 0
    counts = jnp.where(occupied[:, None], state.counts, 0)
    return Clusters(state.z, counts, chosen, state.labels), state.record


# --- what the moves look at -----------------------------------------------------------


def draw_vacant(
    rng_key: Array,
    prior: ViewPriors,
    z: Array,
    subsample: Subsample,
    capacity: int,
    vacant: Array,
) -> tuple[Array, Array, Array]:
    """
    Partitions of the rows that are in, drawn from their prior: one row after another.

    :param rng_key: key.
    :param prior: of the partitions of all views.
    :param z: assignments ``[N, views]``.
    :param subsample: which rows are in.
    :param int capacity: number of clusters that can be represented.
    :param vacant: which views get a new partition, ``[views]``.
    :return: assignments, sizes of the clusters ``[views, K]`` (of vacant views), and
        for each view whether all its clusters could be represented; if not, the rest
        of its rows are in the last cluster.
    """
    num_views = z.shape[1]
    slots = jnp.arange(capacity, dtype=jnp.int32)
    stop = over_chains(jnp.where(vacant.any(), subsample.size, 0))

    def seat(i, carry, u, first):
        z, counts, weights, fits = carry
        live = i < subsample.size
        num = (counts > 0).sum(-1, dtype=jnp.int32)
        new = jnp.exp(prior.log_weight_new(num, jnp.broadcast_to(i, num.shape)))
        ends = running_sums(weights)
        # A new cluster has the low end, where floats are fine.
        level = u[i - first] * (ends[:, -1] + new)
        opens = (level < new) | (num == 0)
        fits = fits & ~(live & opens & (num == capacity))
        passed = (ends <= (level - new)[:, None]) & (slots < num[:, None])
        k = passed.sum(-1, dtype=jnp.int32)
        # Clusters are opened in the order of the slots.
        k = jnp.where(opens, jnp.minimum(num, capacity - 1), jnp.minimum(k, num - 1))
        here = slots == k[:, None]
        counts = counts + jnp.where(live & here, 1, 0)
        own = jnp.where(here, counts, 0).sum(-1, keepdims=True)
        own = jnp.exp(prior.log_weight_existing(own))
        weights = jnp.where(live & here, own, weights)
        row = subsample.order[i]
        z = z.at[row].set(jnp.where(vacant & live, k, z[row]))
        return z, counts, weights, fits

    def chunk(j, carry):
        first = j * _CHUNK
        key = fold_in(rng_key, j)
        u = uniform(variates.bits(key, (_CHUNK, num_views)))
        last = jnp.minimum(first + _CHUNK, stop)
        return lax.fori_loop(first, last, partial(seat, u=u, first=first), carry)

    start = (
        z,
        jnp.zeros((num_views, capacity), jnp.int32),
        jnp.zeros((num_views, capacity)),
        jnp.ones(num_views, bool),
    )
    z, counts, _, fits = lax.fori_loop(0, -(-stop // _CHUNK), chunk, start)
    return z, counts, fits | ~vacant


def _count(scene, z, wanted):
    """
    Statistics of all features under the assignments `z` ``[N, views]`` of the rows that
    are in, in the `wanted` views: views first; those of others mean nothing.
    """
    _, _, components, subsample, _, capacity = scene
    stop = over_chains(subsample.size)
    num_views = z.shape[1]
    width = min(num_views, _VIEWS_AT_ONCE)
    # Wanted ones first; there is no view beyond the last.
    places = -(-num_views // width) * width
    order = jnp.argsort(~wanted, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, places - num_views), constant_values=num_views)

    def start(c, num):
        empty = c.block.empty(c.hyper, capacity)
        return jax.tree.map(lambda s: jnp.broadcast_to(s, (num, *s.shape)), empty)

    def count_some(i, whole):
        views = lax.dynamic_slice_in_dim(order, i * width, width)
        columns = jnp.minimum(views, num_views - 1)

        def add_row(i, stats):
            row = subsample.order[i]
            live = i < subsample.size
            k = jnp.maximum(z[row, columns], 0)
            found = []
            for c, s in zip(components, stats, strict=True):
                x = c.block.row(c.hyper, c.data, row)

                def add(s, k, c=c, x=x):
                    return c.block.add(c.hyper, s, x, k, live)

                found.append(jax.vmap(add)(s, k))
            return tuple(found)

        none = tuple(start(c, width) for c in components)
        stats = lax.fori_loop(0, stop, add_row, none)
        return jax.tree.map(lambda a, b: a.at[views].set(b, mode="drop"), whole, stats)

    times = over_chains(-(-wanted.sum(dtype=jnp.int32) // width))
    whole = tuple(start(c, num_views) for c in components)
    return lax.fori_loop(0, times, count_some, whole)


def _evidence(scene, stats):
    """Log marginal likelihood of each feature of each block under some statistics."""
    found = []
    for c, s in zip(scene.components, stats, strict=True):
        found.append(c.block.log_marginals(c.hyper, s).sum(-1))
    return found


def _by_element(scene, site, each):
    """Sum over the features of each element of a site: ``[elements]``."""
    layout = scene.layout
    total = jnp.zeros(layout.num_elements[site])
    for m, values in zip(layout.memberships, each, strict=True):
        mine = (np.asarray(m.partition) == site) & (np.asarray(m.element) >= 0)
        if mine.any():
            element = np.asarray(m.element)[mine]
            total = total.at[element].add(values[mine])
    return total


def _fit(scene, stats, site):
    """Log marginal likelihood of the elements of a site under some views' statistics,
    ``[elements, views]``."""

    def one(stats):
        return _by_element(scene, site, _evidence(scene, stats))

    return jax.vmap(one)(stats).T


def _log_weights(prior, sizes):
    """
    Log weights of every view, given the numbers of elements in them: those of the urn,
    that of a new view shared by all vacant ones.
    """
    occupied = sizes > 0
    num = occupied.sum(dtype=jnp.int32)
    new = prior.log_weight_new(num, sizes.sum())
    vacant = jnp.maximum(sizes.shape[0] - num, 1)
    return jnp.where(occupied, prior.log_weight_existing(sizes), new - jnp.log(vacant))


def _mixed(log_prob, log_prob_blind):
    """That of a choice that is made by one law, or, in one case in some, by another."""
    share = jnp.asarray(_BLIND)
    return jnp.logaddexp(jnp.log1p(-share) + log_prob, jnp.log(share) + log_prob_blind)


def _usable(scene, site, state):
    start = scene.layout.offsets[site]
    return state.usable[start : start + scene.layout.sizes[site]]


def _with_labels(state, site, labels):
    every = list(state.labels)
    every[site] = labels
    return state._replace(labels=tuple(every))


# --- moves ------------------------------------------------------------------------


def _gibbs(num_sweeps, rng_key, scene, site, state, opens):
    """
    Every element in turn, so many times; where the move is not one that `opens` views,
    those that are alone stay, and the others choose among occupied ones.
    """
    if num_sweeps == 0:
        return state
    prior, fit = scene.feature_priors[site], state.fit[site]
    usable = _usable(scene, site, state)
    num = scene.layout.num_elements[site]
    noise = gumbel(rng_key, (num_sweeps, *fit.shape))

    def move(i, carry):
        labels, sizes, moved = carry
        e = i % num
        old = labels[e]
        sizes = sizes.at[old].add(-1)
        log_weight = _log_weights(prior, sizes) + fit[e]
        log_weight = jnp.where(opens & usable | (sizes > 0), log_weight, -jnp.inf)
        new = jnp.argmax(log_weight + noise[i // num, e]).astype(jnp.int32)
        new = jnp.where(opens | (sizes[old] > 0), new, old)
        moved = moved + (new != old)
        return labels.at[e].set(new), sizes.at[new].add(1), moved

    sizes = scene.layout.num_elements_in(site, state.labels)
    start = state.labels[site], sizes, state.record.moved
    labels, _, moved = lax.fori_loop(0, num_sweeps * num, move, start)
    record = state.record._replace(moved=moved)
    return _with_labels(state, site, labels)._replace(record=record)


def _share_out_sets(num_sets, rng_key, scene, site, state, opens):
    """Share out the elements of two views anew, by the urn of their prior; where the
    move is not one that `opens` views, both are occupied and stay so."""
    prior, fit = scene.feature_priors[site], state.fit[site]
    usable = _usable(scene, site, state)
    num, num_views = fit.shape
    if num_views < 2:
        return state
    fit = jnp.where(usable, fit, -jnp.inf)

    def walk(labels, pair, u):
        """
        Elements of the two views seated one by one: by `u` ``[elements]``, or as they
        are if that is None.

        :return: labels, and the log of the product of the probabilities that an element
            goes into either of the two, which is that of prior over probability of the
            draw.
        """
        mine = (labels == pair[0]) | (labels == pair[1])
        sizes = jnp.zeros(num_views, jnp.int32)
        sizes = sizes.at[jnp.where(mine, num_views, labels)].add(1, mode="drop")

        def seat(e, carry):
            seated, sizes, total = carry
            # Probabilities: weights of some priors have a common factor that depends on
            # the number of views.
            every = _log_weights(prior, sizes)
            occupied = sizes > 0
            new = prior.log_weight_new(occupied.sum(dtype=jnp.int32), sizes.sum())
            old = logsumexp(jnp.where(occupied, every, -jnp.inf))
            log_weight = every[pair] - jnp.logaddexp(old, new)
            both = jnp.logaddexp(log_weight[0], log_weight[1])
            if u is None:
                second = labels[e] == pair[1]
            else:
                second = u[e] < jnp.exp(log_weight[1] - both)
            view = jnp.where(mine[e], pair[second.astype(jnp.int32)], labels[e])
            sizes = sizes.at[view].add(jnp.where(mine[e], 1, 0))
            total = total + jnp.where(mine[e], both, 0)
            return seated.at[e].set(view), sizes, total

        start = labels, sizes, jnp.zeros((), fit.dtype)
        seated, _, total = lax.fori_loop(0, num, seat, start)
        return seated, total

    def propose(i, carry):
        labels, accepted = carry
        key = fold_in(rng_key, i)
        bits = variates.bits(key, (num + 3,))
        one = below(bits[0], num_views)
        two = below(bits[1], num_views - 1)
        pair = jnp.stack([one, two + (two >= one)])
        new, total_new = walk(labels, pair, uniform(bits[3:]))
        _, total_old = walk(labels, pair, None)
        each = jnp.arange(num)
        changed = new != labels
        gain = jnp.where(changed, fit[each, new] - fit[each, labels], 0).sum()
        log_ratio = gain + total_new - total_old
        kept = (new[:, None] == pair).any(0) & (labels[:, None] == pair).any(0)
        accept = (jnp.log(uniform(bits[2])) < log_ratio) & (opens | kept.all())
        accepted = accepted + (accept & changed.any())
        return jnp.where(accept, new, labels), accepted

    labels, accepted = lax.fori_loop(
        0, num_sets, propose, (state.labels[site], state.record.sets)
    )
    record = state.record._replace(sets=accepted)
    return _with_labels(state, site, labels)._replace(record=record)


def _guided(num_guided, rng_key, scene, site, state):
    """Move an element to a new view drawn from its data, or back."""
    prior = scene.feature_priors[site]
    layout = scene.layout
    num, num_views = state.fit[site].shape
    if num < 2 or num_views < 2:
        return state
    offset = layout.offsets[site]

    def share_of_births(num_alone):
        """How often an element that is not alone is chosen, to leave for a new view."""
        return jnp.where(num_alone == 0, 1.0, jnp.where(num_alone == num, 0.0, 0.5))

    def propose(rng_key, state, made):
        key_choice, key_rows, key_gibbs = variates.split(rng_key, 3)
        bits = variates.bits(key_choice, (4,))
        labels, fit = state.labels[site], state.fit[site]
        sizes = layout.num_elements_in(site, state.labels)
        alone = sizes[labels] == 1
        num_alone = alone.sum(dtype=jnp.int32)
        birth = uniform(bits[3]) < share_of_births(num_alone)
        among = jnp.where(birth, num - num_alone, num_alone)
        e = nth(alone != birth, below(bits[0], among))
        own = labels[e]
        sizes = sizes.at[own].add(-1)
        others = sizes > 0
        log_weight = jnp.where(others, _log_weights(prior, sizes) + fit[e], -jnp.inf)
        noise = gumbel(fold_in(key_choice, 1), log_weight.shape)
        target = jnp.argmax(log_weight + noise).astype(jnp.int32)
        vacant = ~others
        seat = nth(vacant, below(bits[1], vacant.sum(dtype=jnp.int32)))
        view = offset + jnp.where(birth, seat, own)
        parts, index = _features_of(scene, site, e)
        views = view[None]
        imputed = _impute(key_rows, scene, site, parts, index, views, state.z, birth)
        (log_z,) = imputed.log_z
        fits = jnp.isfinite(log_z)
        new = prior.log_weight_new(others.sum(dtype=jnp.int32), num - 1)
        log_ratio = new + log_z - logsumexp(log_weight)
        # How many are alone if it shares a view, and if it does not.
        lone = sizes[jnp.where(birth, own, target)] == 1
        together = jnp.where(birth, num_alone, num_alone - 1 - lone)
        apart = jnp.where(birth, num_alone + 1 + lone, num_alone)
        log_ratio += jnp.log((1 - share_of_births(apart)) / apart)
        log_ratio -= jnp.log(share_of_births(together) / (num - together))
        log_ratio = jnp.where(birth, log_ratio, -log_ratio)
        possible = jnp.where(birth, vacant.any() & fits, others.any())
        accept = made & possible & (jnp.log(uniform(bits[2])) < log_ratio)

        moved = labels.at[e].set(jnp.where(birth, seat, target))
        state = _with_labels(state, site, jnp.where(accept, moved, labels))
        # What has become vacant has a partition that is not drawn from the prior.
        left = accept & ~birth
        usable = state.usable.at[view].set(jnp.where(accept, ~left, state.usable[view]))
        state = state._replace(
            usable=usable,
            record=state.record._replace(guided=state.record.guided + accept),
        )
        opened = accept & birth
        state = _fill(scene, site, state, views, imputed, opened[None])
        # So that others may join a new one. NB: whether or not a view was opened, else
        # it would not be exact.
        opens = jnp.asarray(False)
        after = _gibbs(1, key_gibbs, scene, site, state, opens)
        labels = jnp.where(made, after.labels[site], state.labels[site])
        record = jax.tree.map(partial(jnp.where, made), after.record, state.record)
        return _with_labels(state, site, labels)._replace(record=record)

    return _at_times(num_guided, rng_key, scene, propose, state)


def _split_and_merge(num_splits, rng_key, scene, site, state):
    """Split a view in two, or merge two, with new partitions of the rows."""
    prior, layout = scene.feature_priors[site], scene.layout
    num, num_views = state.fit[site].shape
    if num < 2 or num_views < 2:
        return state
    offset = layout.offsets[site]
    every = jnp.ones(2, bool)
    # Rounds: the launch, what the reverse would draw, what is proposed. They are one
    # loop, as each would take long to compile.
    reverse, last = _NUM_LAUNCH, _NUM_LAUNCH + 1

    def share_of_splits(num_occupied):
        return jnp.where(num_occupied == 1, 1.0, 0.5)

    def log_prob_pairs(labels, sizes, fit, log_prior):
        """
        Of each two views, that they are to be merged, ``[views, views]``: mostly by how
        much likelier all is if the elements of the first join the second as it is.
        """
        total = jnp.zeros((num_views, num_views)).at[labels].add(fit)
        gain = total - (jnp.diagonal(total) + log_prior)[:, None]
        two = (sizes > 0)[:, None] & (sizes > 0) & ~np.eye(num_views, dtype=bool)
        gain = jnp.where(two, gain, -jnp.inf)
        by_gain = gain - logsumexp(gain)
        any_two = jnp.where(two, -jnp.log(two.sum()), -jnp.inf)
        log_prob = _mixed(by_gain, any_two)
        return jnp.where(two, log_prob, -jnp.inf)

    def propose(rng_key, state, made):
        key_choice, key_pair, key_rounds = variates.split(rng_key, 3)
        bits = variates.bits(key_choice, (7,))
        labels = state.labels[site]
        sizes = layout.num_elements_in(site, state.labels)
        occupied = sizes > 0
        num_occupied = occupied.sum(dtype=jnp.int32)
        split = uniform(bits[0]) < share_of_splits(num_occupied)
        # A view to be split is that of any element.
        of_any = labels[below(bits[1], num)]
        own_prior = scene.prior.of_views(site, jnp.arange(num_views))
        log_prior = own_prior.log_eppf(state.counts[offset : offset + num_views])
        chances = log_prob_pairs(labels, sizes, state.fit[site], log_prior)
        noise = gumbel(key_pair, chances.shape)
        drawn = jnp.argmax((chances + noise).ravel()).astype(jnp.int32)
        own = jnp.where(split, of_any, drawn // num_views)
        partner = jnp.where(split, of_any, drawn % num_views)
        first = nth(labels == own, below(bits[2], sizes[own]))
        eligible = (labels == partner) & (jnp.arange(num) != first)
        second = nth(eligible, below(bits[3], eligible.sum(dtype=jnp.int32)))
        other = labels[second]
        # The new one is any of those that are vacant.
        vacant = ~occupied
        seat = nth(vacant, below(bits[4], vacant.sum(dtype=jnp.int32)))
        pair = jnp.stack([own, jnp.where(split, seat, other)])
        views = offset + pair
        # Of each element: with the first, 0, with the second, 1, or not concerned, 2.
        concerned = (labels == own) | (labels == other)
        as_it_is = jnp.where(concerned, jnp.where(labels == own, 0, 1), 2)
        united = jnp.where(concerned, 0, 2)
        anchors = jnp.full(num, 2).at[first].set(0).at[second].set(1)

        def share_out(fit, u, flat, known):
            """
            The others, in turn: drawn, by their fit or, if `flat`, by the prior alone,
            or as they are, if that is `known`.

            :return: where they go, and the log probability of that.
            """

            def seat(e, carry):
                side, sizes, log_q = carry
                log_weight = prior.log_weight_existing(sizes)
                log_weight = jnp.stack([log_weight + fit[e], log_weight])
                log_prob = log_weight - logsumexp(log_weight, -1, keepdims=True)
                chance = jnp.where(flat, log_prob[1, 1], log_prob[0, 1])
                drawn = jnp.where(jnp.log(u[e]) < chance, 1, 0)
                k = jnp.where(known, as_it_is[e], drawn)
                on = concerned[e] & (anchors[e] == 2)
                side = jnp.where(on, side.at[e].set(k), side)
                sizes = sizes.at[k].add(jnp.where(on, 1, 0))
                return side, sizes, log_q + jnp.where(on, log_prob[:, k], 0)

            start = anchors, jnp.ones(2, jnp.int32), jnp.zeros(2, fit.dtype)
            side, _, log_q = lax.fori_loop(0, num, seat, start)
            return side, _mixed(*log_q)

        flat = uniform(bits[5]) < _BLIND

        def run_round(r, carry):
            side, log_q, log_z, _, _ = carry
            key_rows, key_share = variates.split(fold_in(key_rounds, r))
            seats = jnp.where(split == (r == reverse), united, side)
            seats = jnp.where(r < reverse, side, seats)
            imputed = _impute(
                key_rows,
                scene,
                site,
                scene.components,
                _of_features(scene, site, seats, 2),
                views,
                state.z,
                r != reverse,
            )
            there = jnp.stack([(seats == k).any() for k in range(2)])
            total = jnp.where(there, imputed.log_z, 0).sum()
            log_z = log_z.at[jnp.where(r == last, 1, 0)].set(total)
            fit = _fit(scene, _count(scene, imputed.z, every), site)
            u = uniform(variates.bits(key_share, (num,)))
            final = r == reverse - 1
            shared = share_out(fit, u, final & flat, final & ~split)
            side, log_q = jax.tree.map(
                lambda a, b: jnp.where(r < reverse, a, b), shared, (side, log_q)
            )
            return side, log_q, log_z, imputed, fit

        zero = jnp.zeros((), state.fit[site].dtype)
        both = jnp.zeros((num, 2), zero.dtype)
        start = anchors, zero, both[0], _Imputed.start(scene, 2), both
        end = lax.fori_loop(0, last + 1, run_round, start)
        side, log_q, log_z, imputed, fit = end
        nums = jnp.stack([(side == k).sum(dtype=jnp.int32) for k in range(2)])
        apart = sizes.at[pair].set(nums)
        together = sizes.at[pair].set(jnp.stack([nums.sum(dtype=jnp.int32), 0]))
        log_ratio = prior.log_eppf(apart) - prior.log_eppf(together) - log_q
        moved = jnp.where(concerned, pair[jnp.minimum(side, 1)], labels)
        # These two elements are chosen, the views being apart and being one.
        fit = jnp.where(split, state.fit[site].at[:, pair].set(fit), state.fit[site])
        new_prior = scene.prior.of_views(site, pair).log_eppf(imputed.counts)
        log_prior = jnp.where(split, log_prior.at[pair].set(new_prior), log_prior)
        chances = log_prob_pairs(moved, apart, fit, log_prior)
        num_apart = (apart > 0).sum()
        log_ratio += jnp.log1p(-share_of_splits(num_apart)) + chances[*pair]
        # NB: floats, as products of integers would overflow.
        log_ratio -= jnp.log(nums.astype(zero.dtype)).sum()
        share = share_of_splits(num_apart - 1)
        log_ratio += jnp.log(num * (nums.sum() - 1.0)) - jnp.log(share)
        log_ratio = jnp.where(split, log_ratio, -log_ratio) + log_z[1] - log_z[0]
        # (A single view is not merged with itself.)
        may = jnp.where(split, (sizes[own] > 1) & vacant.any(), own != other)
        possible = made & may
        accept = possible & (jnp.log(uniform(bits[6])) < log_ratio)

        moved = jnp.where(split | ~concerned, moved, own)
        moved = jnp.where(accept, moved, labels)
        opened = jnp.stack([accept, accept & split])
        state = _fill(scene, site, state, views, imputed, opened)
        return _with_labels(state, site, moved)._replace(
            usable=state.usable.at[views[1]].set(
                jnp.where(accept, split, state.usable[views[1]])
            ),
            record=state.record._replace(
                splits=state.record.splits + (accept & split),
                merges=state.record.merges + (accept & ~split),
            ),
        )

    return _at_times(num_splits, rng_key, scene, propose, state)


def _is_due(rng_key, scene):
    """Whether something is done that is not done at every turn of many rows."""
    u = uniform(variates.bits(rng_key, ()))
    return u * scene.subsample.size < _ALWAYS


def _at_times(num, rng_key, scene, propose, state):
    """
    Some proposals, each if it is due.

    :param propose: of a key, the state and whether it is made, for one of several
        chains that does not make it: the new state.
    """

    def maybe(i, state):
        # NB: not split, since JAX takes it for used again in a loop of one iteration.
        key = fold_in(rng_key, i)
        made = _is_due(fold_in(key, 0), scene)

        def once(j, state):
            return propose(fold_in(key, 1 + j), state, made)

        # Not a branch of `lax.cond`, which would copy the assignments.
        return lax.fori_loop(0, over_chains(made.astype(jnp.int32)), once, state)

    return lax.fori_loop(0, num, maybe, state)


# --- new partitions of the rows -------------------------------------------------------


class _Imputed(NamedTuple):
    """
    Partitions of the rows that are in, of so many views.

    - **z** - assignments ``[N, views]``; -1 for rows that are out.
    - **counts** - sizes of the clusters, ``[views, K]``.
    - **log_z** - logarithms of the products of the rows' conditional probabilities,
      ``[views]``.
    """

    z: Array
    counts: Array
    log_z: Array

    @classmethod
    def start(cls, scene: _Scene, num_views: int) -> "_Imputed":
        return cls(
            jnp.full((scene.subsample.order.shape[0], num_views), -1, jnp.int32),
            jnp.zeros((num_views, scene.capacity), jnp.int32),
            jnp.zeros(num_views, jnp.result_type(float)),
        )


def _impute(rng_key, scene, site, components, index, views, z, draws):
    """
    The rows that are in, assigned one after another in some views of a site at once: as
    drawn, if it `draws`, else as they are in `z`.

    :param components: of features.
    :param index: of each component's features, which of the `views` they are taken to
        be in; as many as there are if they are in none.
    """
    subsample, capacity = scene.subsample, scene.capacity
    num_views = views.shape[0]
    by_view = [ByView.make(own, num_views + 1) for own in index]
    prior = scene.prior.of_views(site, views - scene.layout.offsets[site])
    slots = jnp.arange(capacity, dtype=jnp.int32)
    num_rows = z.shape[0]
    stop = over_chains(subsample.size)

    def add_row(i, carry, u, first):
        (labels, counts, total), held, lost = carry
        row = subsample.order[i]
        live = i < subsample.size
        xs = [c.block.row(c.hyper, c.data, row) for c in components]
        num = (counts > 0).sum(-1, dtype=jnp.int32)
        slot = jnp.min(jnp.where(counts == 0, slots, capacity), -1)
        new = prior.log_weight_new(num, counts.sum(-1))[:, None]
        existing = jnp.where(counts > 0, prior.log_weight_existing(counts), -jnp.inf)
        whole = jnp.logaddexp(logsumexp(existing, -1, keepdims=True), new)
        log_weight = jnp.where(slots == slot[:, None], new, existing) - whole
        parts = list(zip(components, held, xs, by_view, strict=True))
        for c, (stats, tables), x, view in parts:
            score = c.block.score(c.hyper, stats, tables, None, x, view)
            log_weight = log_weight + score[:num_views]
        log_sum = logsumexp(log_weight, -1)
        each = jnp.exp(log_weight - log_sum[:, None])
        ends = running_sums(each)
        level = u[i - first][:, None] * ends[:, -1:]
        # Of no weight is none: ends that are equal may be rounded differently.
        drawn = jnp.argmax((ends > level) & (each > 0), -1).astype(jnp.int32)
        k = jnp.maximum(jnp.where(draws, drawn, z[row][views]), 0)
        every = jnp.append(k, 0)
        changed = []
        for c, (stats, tables), x, view in parts:
            none = c.block.take(c.hyper, stats, x, every, jnp.asarray(False), view)
            changed.append(
                c.block.put(c.hyper, stats, tables, none, x, every, live, view)
            )
        counts = counts + jnp.where(live & (slots == k[:, None]), 1, 0)
        labels = labels.at[jnp.where(live, row, num_rows)].set(k, mode="drop")
        # Compensated: there are as many terms as rows (Kahan summation).
        term = jnp.where(live, log_sum, 0) - lost
        grown = total + term
        return _Imputed(labels, counts, grown), changed, (grown - total) - term

    def chunk(j, carry):
        first = j * _CHUNK
        shape = _CHUNK, num_views
        bits = variates.bits(fold_in(rng_key, j), shape)
        last = jnp.minimum(first + _CHUNK, stop)
        one = partial(add_row, u=uniform(bits), first=first)
        return lax.fori_loop(first, last, one, carry)

    held = []
    for c in components:
        stats = c.block.empty(c.hyper, capacity)
        held.append((stats, c.block.tables(c.hyper, stats)))
    imputed = _Imputed.start(scene, num_views)
    start = imputed, held, jnp.zeros_like(imputed.log_z)
    imputed, _, _ = lax.fori_loop(0, -(-stop // _CHUNK), chunk, start)
    return imputed


def _fill(scene, site, state, views, imputed, on):
    """The state with the partitions of some `views` of a site as `imputed`, where `on`
    ``[views]``."""
    # Out of range where they are to stay.
    where = jnp.where(on, views, scene.layout.num_views)
    local = jnp.where(on, views - scene.layout.offsets[site], scene.layout.sizes[site])

    def one(_, state):
        stats = _count(scene, imputed.z, jnp.ones(views.shape, bool))
        fit = list(state.fit)
        found = _fit(scene, stats, site)
        fit[site] = fit[site].at[:, local].set(found, mode="drop")
        return state._replace(
            z=state.z.at[:, where].set(imputed.z, mode="drop"),
            counts=state.counts.at[where].set(imputed.counts, mode="drop"),
            stats=jax.tree.map(
                lambda a, b: a.at[where].set(b, mode="drop"), state.stats, stats
            ),
            fit=tuple(fit),
        )

    return lax.fori_loop(0, over_chains(on.any().astype(jnp.int32)), one, state)


def _of_features(scene, site, of_elements, default):
    """Of each component's features, what is said of their elements of a site, or
    `default`."""
    found = []
    for m in scene.layout.memberships:
        mine = (np.asarray(m.partition) == site) & (np.asarray(m.element) >= 0)
        element = np.where(mine, m.element, 0)
        found.append(jnp.where(mine, of_elements[element], default))
    return found


def _features_of(scene, site, element):
    """Components of the features of one element of a site alone; and of each feature
    zero."""
    parts, index = [], []
    for c, m in zip(scene.components, scene.layout.memberships, strict=True):
        elements = np.where(np.asarray(m.partition) == site, m.element, -1)
        most = int(np.max(np.bincount(elements[elements >= 0]), initial=0))
        if most > 0:
            parts.append(SomeFeatures.of(c, jnp.asarray(elements) == element, most))
            index.append(jnp.zeros(most, jnp.int32))
    return parts, index
