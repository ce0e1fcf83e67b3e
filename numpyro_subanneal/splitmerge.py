# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""Move many rows at once: split a cluster in two, merge two clusters.

A proposal starts from two rows, the anchors, :math:`i` and :math:`j`. If it is to be a
split, both are of one cluster, whose other rows are shared out between them; if it is
to be a merge, they are of two clusters, which become one. It is accepted with the
probability of Metropolis and Hastings for the collapsed posterior. Two ways of sharing
out rows are offered:

- *sequentially* (Dahl, 2005): every row in turn joins the anchor's cluster that
  predicts it better, with the probabilities of a Gibbs move between the two;
- *restricted Gibbs* (Jain and Neal, 2004): from a sequential allocation, a number of
  scans of Gibbs moves between the two clusters, of which the last is the proposal.

Anchors: a proposal is a split or a merge with equal probability; :math:`i` is any of
the `n` rows of the subsample, :math:`j` any other one of its cluster, or any row of
another cluster. So a split of a cluster of `m` rows of which `a` stay with :math:`i`
has anchors of probability :math:`1 / n (m - 1)`, and the merge that would undo it
:math:`1 / n (n - a)`.

Rows are visited in the order of the subsample's permutation, which does not depend on
the assignments. The rows of a cluster are a linked list in that order, made once a
turn. A proposal visits those of the clusters concerned, once or as often as there are
scans. One that visits `m` rows is made with a probability of at most :math:`c n / m`,
which is the same for its reverse: so all of a turn have a bounded expected cost.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from numpyro_subanneal import variates
from numpyro_subanneal.rows import Clusters, Component, Prior
from numpyro_subanneal.subsample import Subsample, any_chain, over_chains
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import below, fold_in, nth, running_sums, uniform
from numpyro_subanneal.views import Layout, SomeFeatures, ViewPriors
from numpyro_subanneal.weights import LabelledPrior

# A proposal that visits up to so many rows is always made; that takes milliseconds.
_ALWAYS = 1000

# Random numbers are drawn for so many rows at a time: alone, one takes longer to make
# than to use.
_CHUNK = 256

# A kind of proposal that was not accepted in so many is tried half as often, and so on,
# but never less than one time in `_LEAST`.
_PATIENCE, _LEAST = 40, 16


@dataclass(frozen=True)
class SplitMerge:
    r"""
    How often to propose to split and merge clusters.

    The proposals are made at each turnover of the current subsample, that is whenever
    as many rows have moved as it holds, and 256 at least if there are so many; after
    the warm-up, once a sweep. Views of cross-categorization share them; each has at
    least one, of a kind drawn with the frequencies of the two. During the warm-up a
    kind of proposal that has not been accepted for long is tried less often; what has
    become of that then stays.

    :param int num_sequential: number of proposals by sequential allocation.
    :param int num_restricted: number of proposals by restricted Gibbs scans, which take
        longer to make and to compile and seldom repay it.
    :param int num_scans: scans of these before the last one; more make better
        proposals, which cost more.
    :param float max_share: a proposal that would visit more than this share of the
        rows in the subsample, and more than 1000, is made only with the probability
        that makes it visit so many in expectation.

    **References:**

    1. *Sequentially-Allocated Merge-Split Sampler for Conjugate and Nonconjugate
       Dirichlet Process Mixture Models*, D. B. Dahl (2005)
    2. *A Split-Merge Markov Chain Monte Carlo Procedure for the Dirichlet Process
       Mixture Model*, S. Jain, R. M. Neal (2004)
    """

    num_sequential: int = 5
    num_restricted: int = 0
    num_scans: int = 2
    max_share: float = 0.1

    def __post_init__(self):
        for name in ("num_sequential", "num_restricted", "num_scans"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | np.integer)
                or value < 0
            ):
                raise ValueError(
                    f"`{name}` must be a nonnegative integer, got {value!r}."
                )
        if self.num_sequential + self.num_restricted == 0:
            raise ValueError(
                "`num_sequential` and `num_restricted` are both 0; to make no "
                "proposals, give the kernel `split_merge=None`."
            )
        if not 0 < self.max_share <= 1:
            raise ValueError(f"`max_share` must be in (0, 1], got {self.max_share!r}.")


class Record(NamedTuple):
    """
    What has become of proposals, so far.

    - **splits**, **merges** - number of those accepted.
    - **split_proposals**, **merge_proposals** - number of those made.
    - **failures** - proposals of either kind since the last that was accepted, ``[2]``;
      counted during the warm-up.
    - **refused** - splits that could not be made as all clusters were occupied.
    """

    splits: Array
    merges: Array
    split_proposals: Array
    merge_proposals: Array
    failures: Array
    refused: Array

    @classmethod
    def start(cls) -> "Record":
        zero = jnp.zeros((), jnp.int32)
        return cls(zero, zero, zero, zero, jnp.zeros(2, jnp.int32), zero)


class Lists(NamedTuple):
    """
    The rows of each cluster, as positions in the subsample's order; `N` ends a list.

    - **head** - the first of each cluster, ``[K]``.
    - **next** - the one after each, ``[N]``.
    """

    head: Array
    next: Array


class _Scene(NamedTuple):
    """
    What there is before a proposal: the prior of the partition, components, clusters,
    rows in the subsample, and their lists.
    """

    prior: Prior
    components: tuple[Component, ...]
    clusters: Clusters
    subsample: Subsample
    lists: Lists

    @property
    def slots(self) -> Array:
        return jnp.arange(self.clusters.counts.shape[0], dtype=jnp.int32)


class _Proposal(NamedTuple):
    """
    - **on** - whether it is made.
    - **split** - whether it is a split.
    - **restricted** - whether by restricted Gibbs scans.
    - **c**, **e** - the cluster of the first anchor, and that of the second or the
      empty one to split off.
    - **i**, **j** - positions of the anchors.
    """

    on: Array
    split: Array
    restricted: Array
    c: Array
    e: Array
    i: Array
    j: Array


class _Three(NamedTuple):
    """
    The two clusters of the anchors, and one that has the rows of both.

    - **n** - number of rows of each, ``[3]``.
    - **parts** - their statistics and tables, by component.
    """

    n: Array
    parts: tuple[Any, ...]


_APART_I, _APART_J = np.array([0, 2], np.int32), np.array([1, 2], np.int32)


class _Pass(NamedTuple):
    """
    Passes over the rows that are shared out.

    - **phase** - which pass it is.
    - **chunk**, **visited** - number of chunks of random numbers used, and of those of
      the present one.
    - **ca**, **cb** - positions up to which both lists have been followed, and **p**,
      the lower of them; **was** - the side that it is on.
    - **three** - statistics as they have come to be.
    - **side** - which rows are with the second anchor, by position, ``[N]``.
    - **log_ratio** - as it has come to be.
    """

    phase: Array
    chunk: Array
    visited: Array
    ca: Array
    cb: Array
    p: Array
    was: Array
    three: _Three
    side: Array
    log_ratio: Array


def split_and_merge(
    options: SplitMerge,
    rng_key: Array,
    prior: Prior,
    components: tuple[Component, ...],
    clusters: Clusters,
    subsample: Subsample,
    record: Record,
    due: Array,
    adapting: Array,
    num_views: Array | None = None,
) -> tuple[Clusters, Record]:
    """
    Make the proposals of one turn, if it is `due`.

    :param options: how many.
    :param rng_key: key.
    :param prior: of the partition.
    :param components: what the model says at the current hyperparameters.
    :param clusters: assignments and statistics.
    :param subsample: which rows are in.
    :param record: what has become of the proposals before.
    :param due: whether to do anything.
    :param adapting: whether it is the warm-up.
    :param num_views: how many views share the proposals, if these are of one of
        several. Each has at least one; of which kind is drawn.
    """
    due = due & (subsample.size > 1)
    num_rows = clusters.z.shape[0]
    num = num_in_all = options.num_sequential + options.num_restricted
    first = jnp.int32(0)
    if num_views is not None:
        num = -(-num_in_all // jnp.maximum(num_views, 1))
        key_kind = fold_in(rng_key, num_in_all)
        first = below(variates.bits(key_kind, ()), num_in_all)
    lists = _link(clusters, subsample, due)
    side = jnp.zeros(num_rows, bool)

    def one(t, carry):
        clusters, lists, side, record = carry
        key_choice, key_scan = variates.split(fold_in(rng_key, t))
        bits = variates.bits(key_choice, (7,))
        restricted = jnp.asarray(False)
        if _has_restricted(options):
            restricted = (first + t) % num_in_all >= options.num_sequential
        scene = _Scene(prior, components, clusters, subsample, lists)
        # A vectorized chain with more views than another makes fewer.
        own = due & (t < num)
        proposal, record = _choose(options, bits, restricted, scene, record, own)
        three, side, log_ratio = _share_out(options, key_scan, scene, side, proposal)
        n = subsample.size.astype(log_ratio.dtype)
        m, a = three.n[2].astype(n.dtype), three.n[0].astype(n.dtype)
        log_ratio = log_ratio + jnp.log(m - 1) - jnp.log(n - a)
        if isinstance(prior, LabelledPrior):
            # The split may take any that are empty before it, or after the merge.
            num_empty = (clusters.counts == 0).sum() + ~proposal.split
            log_ratio = log_ratio + jnp.log(num_empty.astype(n.dtype))
        log_ratio = jnp.where(proposal.split, log_ratio, -log_ratio)
        accepted = proposal.on & (jnp.log(uniform(bits[6])) < log_ratio)
        clusters, lists = _commit(scene, side, proposal, three, accepted)
        return clusters, lists, side, _count(record, proposal, accepted, adapting)

    clusters, _, _, record = lax.fori_loop(
        0, over_chains(jnp.where(due, num, 0)), one, (clusters, lists, side, record)
    )
    return clusters, record


def split_and_merge_in_views(
    options: SplitMerge,
    rng_key: Array,
    prior: ViewPriors,
    components: tuple[Component, ...],
    clusters: Clusters,
    subsample: Subsample,
    record: Record,
    layout: Layout,
    adapting: Array,
) -> tuple[Clusters, Record]:
    """Make the proposals of one turn, shared by the occupied views."""
    index = layout.index(clusters.labels)
    occupied = layout.num_features(clusters.labels) > 0
    num_views = occupied.sum(dtype=jnp.int32)

    def in_view(_, carry, site, local):
        clusters, record = carry
        view = layout.offsets[site] + local
        parts = [
            SomeFeatures.of(c, own == view, c.block.num_features)
            for c, own in zip(components, index, strict=True)
        ]
        own = Clusters(
            clusters.z[:, view],
            clusters.counts[view],
            tuple(
                part.block.statistics(part.hyper, s)
                for part, s in zip(parts, clusters.stats, strict=True)
            ),
        )
        own, record = split_and_merge(
            options,
            fold_in(rng_key, view),
            prior.of_view(site, local),
            tuple(parts),
            own,
            subsample,
            record,
            occupied[view],
            adapting,
            num_views,
        )
        stats = tuple(
            part.block.put_back(s, new)
            for part, s, new in zip(parts, clusters.stats, own.stats, strict=True)
        )
        clusters = clusters._replace(
            z=clusters.z.at[:, view].set(own.z),
            counts=clusters.counts.at[view].set(own.counts),
            stats=stats,
        )
        return clusters, record

    def visit(local, carry, site):
        # Not a branch of `lax.cond`, which would copy the assignments.
        times = occupied[layout.offsets[site] + local].astype(jnp.int32)
        one = partial(in_view, site=site, local=local)
        return lax.fori_loop(0, over_chains(times), one, carry)

    carry = clusters, record
    for site, size in enumerate(layout.sizes):
        carry = lax.fori_loop(0, size, partial(visit, site=site), carry)
    return carry


def _has_restricted(options: SplitMerge) -> bool:
    """Whether there may be proposals by restricted Gibbs scans. If not, nothing is
    compiled for them."""
    num = options.num_restricted
    return not (isinstance(num, int | np.integer) and num == 0)


def _link(clusters: Clusters, subsample: Subsample, due: Array) -> Lists:
    num_rows, capacity = clusters.z.shape[0], clusters.counts.shape[0]
    stop = over_chains(jnp.where(due, subsample.size, 0))

    def prepend(i, lists):
        p = stop - 1 - i
        live = due & (p < subsample.size)
        k = jnp.maximum(clusters.z[subsample.order[p]], 0)
        first = lists.head[k]
        return Lists(
            lists.head.at[jnp.where(live, k, capacity)].set(p, mode="drop"),
            lists.next.at[jnp.where(live, p, num_rows)].set(first, mode="drop"),
        )

    nobody = jnp.full(capacity, num_rows, jnp.int32)
    lists = Lists(nobody, jnp.full(num_rows, num_rows, jnp.int32))
    return lax.fori_loop(0, stop, prepend, lists)


def _choose(options, bits, restricted, scene, record, due):
    """The anchors, and whether to go on with them."""
    prior, components, clusters, subsample, lists = scene
    num_rows, capacity = clusters.z.shape[0], clusters.counts.shape[0]
    counts, size, slots = clusters.counts, subsample.size, scene.slots
    split = (bits[0] & 1) == 0
    i = below(bits[1], size)
    c = jnp.maximum(clusters.z[subsample.order[i]], 0)
    own = counts[c]

    # A row of another cluster, as its place when the clusters are laid end to end.
    others = jnp.where(slots == c, 0, counts)
    ends = running_sums(others).astype(jnp.int32)
    place = below(bits[2], size - own)
    other = jnp.minimum((ends <= place).sum(dtype=jnp.int32), capacity - 1)
    free = counts == 0
    num_free = free.sum(dtype=jnp.int32)
    # Where clusters have no labels, which slot stands for the new one is immaterial.
    labelled = isinstance(prior, LabelledPrior)
    empty = nth(free, below(bits[3], num_free) if labelled else 0)
    e = jnp.where(split, empty, other)

    full = split & (own > 1) & (num_free == 0)
    possible = jnp.where(split, (own > 1) & (num_free > 0), size > own)
    num = jnp.where(split, own, own + counts[e]).astype(jnp.result_type(float))
    visits = num * jnp.where(restricted, options.num_scans + 3, 1)
    most = jnp.maximum(_ALWAYS, options.max_share * size)
    tried = uniform(bits[4]) * visits < most
    halvings = record.failures[restricted.astype(jnp.int32)] // _PATIENCE
    rate = jnp.maximum(0.5**halvings, 1 / _LEAST)
    tried &= due & (uniform(bits[5]) < rate)
    on = possible & tried
    record = record._replace(
        split_proposals=record.split_proposals + (on & split),
        merge_proposals=record.merge_proposals + (on & ~split),
    )
    if not labelled:
        wanted = prior.log_weight_new(capacity - num_free, size - 1) > -jnp.inf
        record = record._replace(refused=record.refused + (full & tried & wanted))

    # The reverse of a merge has a probability of at most one: most merges are so bad
    # that the statistics alone refuse them.
    bound = lax.cond(
        on & ~split,
        lambda: _log_ratio_of_merge(scene, c, e),
        lambda: jnp.zeros((), jnp.result_type(float)),
    )
    bound = bound + jnp.log((size - own) / jnp.maximum(num - 1, 1))
    slack = 1 + _rounding(components, size)
    on &= split | (jnp.log(uniform(bits[6])) < bound + slack)

    # The second anchor, found by walking along its list.
    left = jnp.where(split, below(bits[2], own - 1), place - (ends - others)[e])
    passed = jnp.where(split, i, -1)
    start = jnp.where(split, lists.head[c], lists.head[e])

    def short_of_it(carry):
        position, left = carry
        return on & ((left > 0) | (position == passed)) & (position < num_rows)

    def step(carry):
        position, left = carry
        live = short_of_it(carry)
        left = left - (live & (position != passed))
        return jnp.where(live, lists.next[position], position), left

    j, _ = lax.while_loop(
        lambda carry: any_chain(short_of_it(carry)),
        step,
        (start, left),
    )
    return _Proposal(on, split, restricted, c, e, i, j), record


def _rounding(components, size):
    """What rounding may do to a log marginal likelihood of `size` rows: generously, a
    hundred units in the last place of one nat a cell."""
    cells = size * sum(c.block.num_features for c in components)
    return 100 * jnp.finfo(jnp.result_type(float)).eps * cells


def _log_ratio_of_merge(scene, c, e):
    """Log posterior of clusters `c` and `e` as one less that of them as they are."""
    prior, components, clusters, *_ = scene
    counts, slots = clusters.counts, scene.slots
    merged = jnp.where(slots == c, counts[c] + counts[e], counts)
    merged = jnp.where(slots == e, 0, merged)
    log_prob = prior.log_prob if isinstance(prior, LabelledPrior) else prior.log_eppf
    # At once, since each call is compiled.
    after, before = jax.vmap(log_prob)(jnp.stack([merged, counts]))
    total = after - before
    for component, stats in zip(components, clusters.stats, strict=True):
        block, hyper = component.block, component.hyper
        one, two = (jax.tree.map(lambda s, k=k: s[..., k], stats) for k in (c, e))
        three = jax.tree.map(
            lambda *s: jnp.stack(s, -1), one, two, block.merge(hyper, one, two)
        )
        apart, also, together = block.log_marginal(hyper, three)
        total = total + (together - apart - also)
    return total


def _share_out(options, rng_key, scene, side, proposal):
    """
    Share out the rows between the anchors, or see how probable it was that they were
    shared out as they are.

    :return: the clusters, which anchor each row is with, and the logarithm of posterior
        apart / posterior together / probability of the allocation.
    """
    _, components, clusters, subsample, lists = scene
    num_rows, order = clusters.z.shape[0], subsample.order
    on, split, restricted, c, e, i, j = proposal
    rows_of = [
        (lambda n, part=part: part.block.row(part.hyper, part.data, n))
        for part in components
    ]

    # What is there once the anchors are: the rest are added to it one by one. The
    # probabilities of the rows are compared row by row, since whole log marginal
    # likelihoods of many rows have few digits after the point.
    start = []
    log_ratio = _log_prior_of_anchor(scene, proposal)
    live = jnp.asarray(True)
    for part, row in zip(components, rows_of, strict=True):
        block, hyper = part.block, part.hyper
        three = block.empty(hyper, 3)
        tables = block.tables(hyper, three)
        xi, xj = row(order[i]), row(order[j])
        three, tables = block.join(hyper, three, tables, xi, _APART_I, live)
        scores = block.score(hyper, three, tables, None, xj)
        log_ratio = log_ratio + scores[1] - scores[2]
        start.append(block.join(hyper, three, tables, xj, _APART_J, live))
    anchors = _Three(jnp.array([1, 1, 2], jnp.int32), tuple(start))

    # A sequential proposal is one pass over the rows. One by restricted Gibbs scans is
    # a sequential pass, the scans, the last of which is the proposal, and another pass
    # that adds the rows as that one left them.
    last = jnp.where(restricted, options.num_scans + 2, 0)
    end = jnp.where(split, num_rows, lists.head[e])
    where = jnp.stack([i, j])
    side = side.at[jnp.where(on, where, num_rows)].set(
        jnp.array([False, True]), mode="drop"
    )
    first = jnp.minimum(lists.head[c], end)

    def is_on(pass_):
        return on & (pass_.phase <= last)

    def run_chunk(pass_):
        # What is drawn ahead: random numbers for so many rows.
        key = fold_in(rng_key, pass_.chunk)
        noise = uniform(variates.bits(key, (_CHUNK,)))
        phase = pass_.phase
        adds = ~restricted | (phase == 0) | (phase == last)
        is_proposal = phase == jnp.where(restricted, last - 1, 0)
        as_known = restricted & (phase == last)

        def choose(pass_, scores):
            """With the second anchor or with the first."""
            log_total = jnp.logaddexp(scores[0], scores[1])
            drawn = noise[pass_.visited] < jnp.exp(scores[1] - log_total)
            # What is so already is not drawn.
            choice = jnp.where(
                is_proposal & ~split, clusters.z[order[pass_.p]] == e, drawn
            )
            choice = jnp.where(as_known, pass_.was, choice)
            log_q = jnp.where(choice, scores[1], scores[0]) - log_total
            return choice, jnp.where(is_proposal, log_q, 0)

        def live_at(pass_, wanted):
            more = (pass_.p < num_rows) & (pass_.visited < _CHUNK)
            return is_on(pass_) & wanted & more

        def advance(pass_, goes_on, live, choice, three, log_ratio):
            # A vectorized chain that is elsewhere, or done, waits.
            p = pass_.p
            side = pass_.side.at[jnp.where(live, p, num_rows)].set(choice, mode="drop")
            after = lists.next[p]
            ca, cb, p = _follow(goes_on, after, pass_.ca, pass_.cb)
            # Read ahead: see `rows._Loop`.
            return pass_._replace(
                visited=pass_.visited + goes_on, ca=ca, cb=cb, p=p, was=side[p],
                three=three, side=side, log_ratio=log_ratio,
            )  # fmt: skip

        def add(pass_):
            p, three = pass_.p, pass_.three
            row = order[p]
            goes_on = live_at(pass_, adds)
            live = goes_on & (p != i) & (p != j)
            xs = [read(row) for read in rows_of]
            scores = _log_weights(scene, proposal, three.n)
            for part, (stats, tables), x in zip(
                components, three.parts, xs, strict=True
            ):
                scores += part.block.score(part.hyper, stats, tables, None, x)
            choice, log_q = choose(pass_, scores)
            k = choice.astype(jnp.int32)
            ks = jnp.stack([k, jnp.int32(2)])
            parts = tuple(
                part.block.join(part.hyper, *held, x, ks, live)
                for part, held, x in zip(components, three.parts, xs, strict=True)
            )
            log_p = jnp.where(choice, scores[1], scores[0]) - scores[2]
            change = jnp.where(phase == last, log_p, 0) - log_q
            n = three.n.at[ks].add(jnp.where(live, 1, 0))
            log_ratio = pass_.log_ratio + jnp.where(live, change, 0)
            return advance(pass_, goes_on, live, choice, _Three(n, parts), log_ratio)

        def move(pass_):
            p, three = pass_.p, pass_.three
            row = order[p]
            goes_on = live_at(pass_, ~adds)
            live = goes_on & (p != i) & (p != j)
            was = pass_.was.astype(jnp.int32)
            xs = [read(row) for read in rows_of]
            n = three.n.at[was].add(jnp.where(live, -1, 0))
            scores = _log_weights(scene, proposal, n)
            taken = []
            for part, (stats, tables), x in zip(
                components, three.parts, xs, strict=True
            ):
                out = part.block.take(part.hyper, stats, x, was, live)
                scores += part.block.score(part.hyper, stats, tables, out, x)
                taken.append(out)
            choice, log_q = choose(pass_, scores)
            k = choice.astype(jnp.int32)
            parts = tuple(
                part.block.put(part.hyper, *held, out, x, k, live)
                for part, held, out, x in zip(
                    components, three.parts, taken, xs, strict=True
                )
            )
            n = n.at[k].add(jnp.where(live, 1, 0))
            log_ratio = pass_.log_ratio - jnp.where(live, log_q, 0)
            return advance(pass_, goes_on, live, choice, _Three(n, parts), log_ratio)

        begins = is_on(pass_) & adds & (pass_.p == first)
        three = jax.tree.map(lambda a, b: jnp.where(begins, a, b), anchors, pass_.three)
        pass_ = pass_._replace(three=three, visited=jnp.int32(0))
        steps = [(add, adds)]
        if _has_restricted(options):
            steps.append((move, ~adds))
        for step, wanted in steps:
            pass_ = lax.while_loop(
                lambda pass_, wanted=wanted: any_chain(live_at(pass_, wanted)),
                step,
                pass_,
            )
        ends = is_on(pass_) & (pass_.p == num_rows)
        return pass_._replace(
            phase=phase + ends,
            chunk=pass_.chunk + 1,
            ca=jnp.where(ends, lists.head[c], pass_.ca),
            cb=jnp.where(ends, end, pass_.cb),
            p=jnp.where(ends, first, pass_.p),
            was=jnp.where(ends, pass_.side[first], pass_.was),
        )

    zero = jnp.int32(0)
    start = _Pass(
        zero, zero, zero, lists.head[c], end, first, side[first],
        anchors, side, log_ratio,
    )  # fmt: skip
    done = lax.while_loop(lambda pass_: any_chain(is_on(pass_)), run_chunk, start)
    return done.three, done.side, done.log_ratio


def _log_prior_of_anchor(scene, proposal):
    """
    Log prior of the second anchor as a cluster of its own, less that of it with the
    first.

    For a partition that factor takes in the change of the number of clusters: with the
    EPPF ``V(n, K) * prod W(n_k)``, it is ``V(n, K + 1) / V(n, K)``.
    """
    prior, _, clusters, subsample, _ = scene
    if isinstance(prior, LabelledPrior):
        others = _others(scene, proposal)
        log_weights = prior.log_weights(others + (scene.slots == proposal.c))
        return log_weights[proposal.e] - log_weights[proposal.c]
    occupied = jnp.sum(clusters.counts > 0, dtype=jnp.int32)
    united = jnp.where(proposal.split, occupied, occupied - 1)
    log_new = prior.log_weight_new(united, subsample.size - 1)
    return log_new - prior.log_weight_existing(jnp.ones(1, jnp.int32))[0]


def _log_weights(scene, proposal, n):
    """Log prior weights, for one more row, of the two clusters and of the one with the
    rows of both."""
    prior, slots = scene.prior, scene.slots
    if not isinstance(prior, LabelledPrior):
        return prior.log_weight_existing(n)
    c, e = proposal.c, proposal.e
    others = _others(scene, proposal)
    apart = others + jnp.where(slots == c, n[0], jnp.where(slots == e, n[1], 0))
    united = others + jnp.where(slots == c, n[2], 0)
    log_apart, log_united = prior.log_weights(apart), prior.log_weights(united)
    return jnp.stack([log_apart[c], log_apart[e], log_united[c]])


def _others(scene, proposal):
    concerned = (scene.slots == proposal.c) | (scene.slots == proposal.e)
    return jnp.where(concerned, 0, scene.clusters.counts)


def _follow(goes_on, after, ca, cb):
    """Both lists one row further: the list that is at the lower of the positions `ca`
    and `cb` goes to the one `after` it."""
    p = jnp.minimum(ca, cb)
    ca, cb = (jnp.where(goes_on & (p == at), after, at) for at in (ca, cb))
    return ca, cb, jnp.minimum(ca, cb)


def _commit(scene, side, proposal, three, accepted):
    """The clusters and lists after the proposal, if it was `accepted`."""
    _, components, clusters, subsample, lists = scene
    num_rows, capacity = clusters.z.shape[0], clusters.counts.shape[0]
    split, c, e, slots = proposal.split, proposal.c, proposal.e, scene.slots

    def live_at(p):
        return accepted & (p < num_rows)

    def visit(carry):
        ca, cb, p, after, z, lists, tails = carry
        live = live_at(p)
        second = split & side[p]
        k = jnp.where(second, e, c)
        tail = tails[second.astype(jnp.int32)]
        opens = live & (tail == num_rows)
        lists = Lists(
            jnp.where(opens & (slots == k), p, lists.head),
            lists.next.at[jnp.where(live, tail, num_rows)].set(p, mode="drop"),
        )
        tails = jnp.where(live & (jnp.arange(2) == second), p, tails)
        row = jnp.where(live, subsample.order[p], num_rows)
        z = z.at[row].set(k, mode="drop")
        ca, cb, p = _follow(live, after, ca, cb)
        # Read ahead, after the write: see `rows._Loop`.
        return ca, cb, p, lists.next[p], z, lists, tails

    ca = lists.head[c]
    cb = jnp.where(split, num_rows, lists.head[e])
    p = jnp.minimum(ca, cb)
    nobody = jnp.full(2, num_rows, jnp.int32)
    *_, z, lists, tails = lax.while_loop(
        lambda carry: any_chain(live_at(carry[2])),
        visit,
        (ca, cb, p, lists.next[p], clusters.z, lists, nobody),
    )
    none = accepted & ~split & (slots == e)
    lists = Lists(
        jnp.where(none, num_rows, lists.head),
        lists.next.at[tails].set(num_rows, mode="drop"),
    )
    n = jnp.where(split, three.n[:2], jnp.stack([three.n[2], 0]))
    ks = jnp.where(accepted, jnp.stack([c, e]), capacity)
    stats = []
    for part, old, (new, _) in zip(
        components, clusters.stats, three.parts, strict=True
    ):
        empty = part.block.empty(part.hyper, 1)
        pair = jax.tree.map(
            lambda s, t: jnp.where(
                split, s[..., :2], jnp.concatenate([s[..., 2:], t], -1)
            ),
            new,
            empty,
        )
        stats.append(
            jax.tree.map(
                lambda s, t: s.at[..., ks].set(t.astype(s.dtype), mode="drop"),
                old,
                pair,
            )
        )
    counts = clusters.counts.at[ks].set(n, mode="drop")
    return clusters._replace(z=z, counts=counts, stats=tuple(stats)), lists


def _count(record, proposal, accepted, adapting):
    on = proposal.on & adapting
    kind = jnp.arange(2) == proposal.restricted
    failures = jnp.where(on & kind, record.failures + 1, record.failures)
    failures = jnp.where(adapting & accepted & kind, 0, failures)
    return record._replace(
        splits=record.splits + (accepted & proposal.split),
        merges=record.merges + (accepted & ~proposal.split),
        failures=failures,
    )
