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

Three moves leave this distribution invariant:

- *Gibbs*: every element in turn (Obermeyer et al., 2014, section 4, "a non-conjugate
  Gibbs-sampler").
- *Sets*: of two views, all elements are shared out anew between them by the urn of the
  feature partition's prior, and the likelihood decides by Metropolis and Hastings (as
  there, "propose new feature sets from the Pitman-Yor prior").
- *Guided*: an element leaves for a new view whose partition of the rows is drawn from
  its data, row by row, each with its conditional probability given those before
  (sequential imputation; MacEachern, Clyde and Liu, 1999). One that is alone in a view
  may go back. With :math:`w` weights of the urn, :math:`L_v` the log marginal
  likelihood of the element in view :math:`v`, and :math:`Z` the product over rows of
  their conditional probabilities, the ratio of Metropolis and Hastings is
  :math:`w_\text{new} Z / \sum_v w_v e^{L_v}`, the sum over all other occupied views.
  Partitions that are drawn from the prior fit the data only while there are few rows;
  this move finds some that do at any number.

A view whose partition has more clusters than can be represented has probability zero.
So a vacant view that drew such a one is not moved into.

**References:**

1. *Markov Chain Sampling Methods for Dirichlet Process Mixture Models*, R. M. Neal
   (2000), algorithm 8
2. *Sequential Importance Sampling for Nonparametric Bayes Models: The Next Generation*,
   S. N. MacEachern, M. Clyde, J. S. Liu (1999)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np

from numpyro_subanneal.distributions import PartitionDistribution
from numpyro_subanneal.rows import Clusters, Component, gumbel, uniform
from numpyro_subanneal.subsample import Subsample, below, over_chains
from numpyro_subanneal.typing import Array
from numpyro_subanneal.views import Layout, SomeFeatures, ViewPriors

# Random numbers are drawn for so many rows at a time.
_CHUNK = 256


@dataclass(frozen=True)
class FeatureMoves:
    """
    How often to move features between views: at each turnover of the current subsample,
    that is whenever as many rows have moved as it holds; after the warm-up, once a
    sweep.

    :param int num_sweeps: Gibbs sweeps over all features.
    :param int num_sets: proposals to share out the features of two views anew.
    :param int num_guided: proposals to move a feature to a new view drawn from its
        data, or back; each takes a pass over the rows of that feature.
    """

    num_sweeps: int = 4
    num_sets: int = 16
    num_guided: int = 2

    def __post_init__(self):
        for name in ("num_sweeps", "num_sets", "num_guided"):
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
    """

    moved: Array
    sets: Array
    guided: Array

    @classmethod
    def start(cls) -> "FeatureRecord":
        zero = jnp.zeros((), jnp.int32)
        return cls(zero, zero, zero)


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
    key_vacant, key_gibbs, key_sets, key_guided = random.split(rng_key, 4)
    occupied = layout.num_features(clusters.labels) > 0
    z, drawn, usable = draw_vacant(
        key_vacant, prior, clusters.z, subsample, capacity, ~occupied
    )
    counts = jnp.where(occupied[:, None], clusters.counts, drawn)
    stats = _count(scene, z)
    state = _State(
        clusters.labels,
        usable,
        z,
        counts,
        stats,
        _fit(scene, stats),
        record,
    )
    for site, feature_prior in enumerate(feature_priors):
        if feature_prior is None:
            continue
        keys = [random.fold_in(k, site) for k in (key_gibbs, key_sets, key_guided)]
        state = _share_out_sets(options.num_sets, keys[1], scene, site, state)
        state = _gibbs(options.num_sweeps, keys[0], scene, site, state)
        state = _guided(options.num_guided, keys[2], scene, site, state)
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
    stop = over_chains(subsample.size)

    def seat(i, carry, u, first):
        z, counts, weights, fits = carry
        live = i < subsample.size
        num = (counts > 0).sum(-1, dtype=jnp.int32)
        new = jnp.exp(prior.log_weight_new(num, jnp.broadcast_to(i, num.shape)))
        ends = lax.associative_scan(jnp.add, weights, axis=1)
        # A new cluster has the low end, where floats are fine.
        level = u[i - first] * (ends[:, -1] + new)
        opens = (level < new) | (num == 0)
        fits = fits & ~(live & opens & (num == capacity))
        k = (ends <= (level - new)[:, None]).sum(-1, dtype=jnp.int32)
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
        key = random.fold_in(rng_key, j)
        u = uniform(random.bits(key, (_CHUNK, num_views), jnp.uint32))
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


def _count(scene, z):
    """Statistics of all features under assignments `z` ``[N, views]`` of the rows that
    are in: views first."""
    _, _, components, subsample, _, capacity = scene
    stop = over_chains(subsample.size)

    def add_row(i, stats):
        row = subsample.order[i]
        live = i < subsample.size
        k = jnp.maximum(z[row], 0)
        found = []
        for c, s in zip(components, stats, strict=True):
            x = c.block.row(c.hyper, c.data, row)

            def add(s, k, c=c, x=x):
                return c.block.add(c.hyper, s, x, k, live)

            found.append(jax.vmap(add)(s, k))
        return tuple(found)

    def start(c):
        empty = c.block.empty(c.hyper, capacity)
        return jax.tree.map(
            lambda s: jnp.broadcast_to(s, (z.shape[1], *s.shape)), empty
        )

    return lax.fori_loop(0, stop, add_row, tuple(start(c) for c in components))


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


def _fit(scene, stats):
    layout = scene.layout

    def one(stats):
        each = _evidence(scene, stats)
        return tuple(
            _by_element(scene, site, each) for site in range(len(layout.sizes))
        )

    found = jax.vmap(one)(stats)
    return tuple(
        f[start : start + size].T
        for f, start, size in zip(found, layout.offsets, layout.sizes, strict=True)
    )


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


def _usable(scene, site, state):
    start = scene.layout.offsets[site]
    return state.usable[start : start + scene.layout.sizes[site]]


def _with_labels(state, site, labels):
    every = list(state.labels)
    every[site] = labels
    return state._replace(labels=tuple(every))


# --- moves ------------------------------------------------------------------------


def _gibbs(num_sweeps, rng_key, scene, site, state):
    """Every element in turn, so many times."""
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
        log_weight = jnp.where(usable, log_weight, -jnp.inf)
        new = jnp.argmax(log_weight + noise[i // num, e]).astype(jnp.int32)
        moved = moved + (new != old)
        return labels.at[e].set(new), sizes.at[new].add(1), moved

    sizes = scene.layout.num_elements_in(site, state.labels)
    start = state.labels[site], sizes, state.record.moved
    labels, _, moved = lax.fori_loop(0, num_sweeps * num, move, start)
    record = state.record._replace(moved=moved)
    return _with_labels(state, site, labels)._replace(record=record)


def _share_out_sets(num_sets, rng_key, scene, site, state):
    """Share out the elements of two views anew, by the urn of their prior."""
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
        key = random.fold_in(rng_key, i)
        bits = random.bits(key, (num + 3,), jnp.uint32)
        one = below(bits[0], num_views)
        two = below(bits[1], num_views - 1)
        pair = jnp.stack([one, two + (two >= one)])
        new, total_new = walk(labels, pair, uniform(bits[3:]))
        _, total_old = walk(labels, pair, None)
        each = jnp.arange(num)
        changed = new != labels
        gain = jnp.where(changed, fit[each, new] - fit[each, labels], 0).sum()
        log_ratio = gain + total_new - total_old
        accept = jnp.log(uniform(bits[2])) < log_ratio
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

    def propose(i, state):
        key_choice, key_rows, key_gibbs = random.split(random.fold_in(rng_key, i), 3)
        bits = random.bits(key_choice, (3,), jnp.uint32)
        labels, fit = state.labels[site], state.fit[site]
        e = below(bits[0], num)
        own = labels[e]
        sizes = layout.num_elements_in(site, state.labels).at[own].add(-1)
        others = sizes > 0
        birth = others[own]
        log_weight = jnp.where(others, _log_weights(prior, sizes) + fit[e], -jnp.inf)
        noise = gumbel(random.fold_in(key_choice, 1), log_weight.shape)
        target = jnp.argmax(log_weight + noise).astype(jnp.int32)
        vacant = ~others
        nth = below(bits[1], vacant.sum(dtype=jnp.int32))
        seat = jnp.argmax(vacant & (jnp.cumsum(vacant) == nth + 1)).astype(jnp.int32)
        view = offset + jnp.where(birth, seat, own)
        z, counts, log_z, fits = _impute(key_rows, scene, site, e, view, state.z, birth)
        new = prior.log_weight_new(others.sum(dtype=jnp.int32), num - 1)
        log_ratio = new + log_z - logsumexp(log_weight)
        log_ratio = jnp.where(birth, log_ratio, -log_ratio)
        possible = jnp.where(birth, vacant.any() & fits, others.any())
        accept = possible & (jnp.log(uniform(bits[2])) < log_ratio)

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

        def open_view(_, state):
            stats = jax.tree.map(lambda s: s[0], _count(scene, z[:, None]))
            every = jax.tree.map(
                lambda a, b: a.at[view].set(jnp.where(opened, b, a[view])),
                state.stats,
                stats,
            )
            column = _by_element(scene, site, _evidence(scene, stats))
            column = jnp.where(opened, column, state.fit[site][:, view - offset])
            fit = list(state.fit)
            fit[site] = fit[site].at[:, view - offset].set(column)
            return state._replace(
                z=state.z.at[:, view].set(jnp.where(opened, z, state.z[:, view])),
                counts=state.counts.at[view].set(
                    jnp.where(opened, counts, state.counts[view])
                ),
                stats=every,
                fit=tuple(fit),
            )

        times = over_chains(opened.astype(jnp.int32))
        state = lax.fori_loop(0, times, open_view, state)
        # NB: whether or not a view was opened, else it would not be exact.
        return _gather_round(key_gibbs, scene, site, state)

    return lax.fori_loop(0, num_guided, propose, state)


def _gather_round(rng_key, scene, site, state):
    """
    A Gibbs sweep over the elements that are not alone, among occupied views: so that
    others may join a new one.
    """
    prior, fit = scene.feature_priors[site], state.fit[site]
    num = fit.shape[0]
    noise = gumbel(rng_key, fit.shape)

    def move(e, carry):
        labels, sizes = carry
        old = labels[e]
        alone = sizes[old] == 1
        sizes = sizes.at[old].add(-1)
        log_weight = _log_weights(prior, sizes) + fit[e]
        log_weight = jnp.where(sizes > 0, log_weight, -jnp.inf)
        new = jnp.argmax(log_weight + noise[e]).astype(jnp.int32)
        new = jnp.where(alone, old, new)
        return labels.at[e].set(new), sizes.at[new].add(1)

    sizes = scene.layout.num_elements_in(site, state.labels)
    labels, _ = lax.fori_loop(0, num, move, (state.labels[site], sizes))
    return _with_labels(state, site, labels)


def _impute(rng_key, scene, site, element, view, z, draws):
    """
    The rows that are in, assigned one after another in a view of one element alone: as
    drawn, if it `draws`, else as they are in `z`.

    :return: assignments ``[N]``, sizes ``[K]``, the log of the product of the rows'
        conditional probabilities, and whether all clusters could be represented.
    """
    _, _, components, subsample, layout, capacity = scene
    local = view - layout.offsets[site]
    prior = scene.prior.of_view(site, local)
    parts = []
    for c, m in zip(components, layout.memberships, strict=True):
        mine = np.asarray(m.partition) == site
        elements = np.where(mine, m.element, -1)
        most = int(np.max(np.bincount(elements[elements >= 0]), initial=0))
        if most > 0:
            parts.append(SomeFeatures.of(c, jnp.asarray(elements) == element, most))
    slots = jnp.arange(capacity, dtype=jnp.int32)
    num_rows = z.shape[0]
    stop = over_chains(subsample.size)

    def add_row(i, carry, u, first):
        labels, counts, held, total, lost = carry
        row = subsample.order[i]
        live = i < subsample.size
        xs = [c.block.row(c.hyper, c.data, row) for c in parts]
        num = (counts > 0).sum(dtype=jnp.int32)
        slot = jnp.min(jnp.where(counts == 0, slots, capacity))
        new = prior.log_weight_new(num, counts.sum())
        existing = jnp.where(counts > 0, prior.log_weight_existing(counts), -jnp.inf)
        whole = jnp.logaddexp(logsumexp(existing), new)
        log_weight = jnp.where(slots == slot, new, existing) - whole
        for c, (stats, tables), x in zip(parts, held, xs, strict=True):
            log_weight += c.block.score(c.hyper, stats, tables, None, x)
        log_sum = logsumexp(log_weight)
        ends = lax.associative_scan(jnp.add, jnp.exp(log_weight - log_sum))
        drawn = jnp.argmax(ends > u[i - first] * ends[-1]).astype(jnp.int32)
        k = jnp.where(draws, drawn, z[row, view])
        k = jnp.maximum(k, 0)
        held = [
            c.block.join(c.hyper, *pair, x, k[None], live)
            for c, pair, x in zip(parts, held, xs, strict=True)
        ]
        counts = counts + jnp.where(live & (slots == k), 1, 0)
        labels = labels.at[jnp.where(live, row, num_rows)].set(k, mode="drop")
        # Compensated: there are as many terms as rows (Kahan summation).
        term = jnp.where(live, log_sum, 0) - lost
        grown = total + term
        return labels, counts, held, grown, (grown - total) - term

    def chunk(j, carry):
        first = j * _CHUNK
        bits = random.bits(random.fold_in(rng_key, j), (_CHUNK,), jnp.uint32)
        last = jnp.minimum(first + _CHUNK, stop)
        one = partial(add_row, u=uniform(bits), first=first)
        return lax.fori_loop(first, last, one, carry)

    held = []
    for c in parts:
        stats = c.block.empty(c.hyper, capacity)
        held.append((stats, c.block.tables(c.hyper, stats)))
    zero = jnp.zeros((), jnp.result_type(float))
    start = (
        jnp.full(num_rows, -1, jnp.int32),
        jnp.zeros(capacity, jnp.int32),
        held,
        zero,
        zero,
    )
    labels, counts, _, total, _ = lax.fori_loop(0, -(-stop // _CHUNK), chunk, start)
    return labels, counts, total, jnp.isfinite(total)
