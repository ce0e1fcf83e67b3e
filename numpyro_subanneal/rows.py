# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Remove a row, assign a row: the collapsed Gibbs move.

Arrays only: what a move needs of the model is the partition's prior and a tuple of
blocks (:mod:`numpyro_subanneal.conjugate.base`), each with hyperparameters and data.

Where features are in several views (:mod:`numpyro_subanneal.views`), a row is assigned
in all of them at once: they are independent given which features they have. Labels,
counts and weights then have one more axis.

One move of Obermeyer et al. (2014), section 2.3: row `r` leaves its cluster, row `a`
joins cluster `k` with probability proportional to equation (*),
``weight(n_k) * p(x_a | rows of k)``, or opens a new one with probability proportional
to ``weight(new) * p(x_a)``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_subanneal import variates
from numpyro_subanneal.compiling import hoist
from numpyro_subanneal.conjugate.base import AbstractBlock, ByView, Observed
from numpyro_subanneal.distributions import PartitionDistribution
from numpyro_subanneal.subsample import (
    LEAST_BETWEEN_TURNS,
    Chooser,
    Churn,
    Moves,
    Subsample,
    any_chain,
    draw_moves,
    over_chains,
)
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import fold_in, gumbel
from numpyro_subanneal.views import Layout, Seats, ViewPriors
from numpyro_subanneal.weights import LabelledPrior

Prior: TypeAlias = PartitionDistribution | LabelledPrior | ViewPriors


class Component(NamedTuple):
    """
    A block with what the model says of it.

    - **block** - the packed features of one conjugate pair.
    - **hyper** - their hyperparameters, as the block packs them.
    - **data** - what is observed of each of its sites, rows first.
    """

    block: AbstractBlock
    hyper: Any
    data: Sequence[Observed]


class Clusters(NamedTuple):
    """
    - **z** - cluster of each row, -1 for a row that is out: ``[N]``, or in each view,
      ``[N, views]``. In a vacant view they mean nothing.
    - **counts** - rows in each cluster, ``[K]`` or ``[views, K]``; none in a vacant
      view.
    - **stats** - sufficient statistics, one entry a component.
    - **labels** - views of the elements of each site of views, by their positions in
      the site; empty without views.
    """

    z: Array
    counts: Array
    stats: tuple[Any, ...]
    labels: tuple[Array, ...] = ()


Law: TypeAlias = Callable[
    [Any, Sequence[Component] | None], tuple[Prior, Sequence[Component]]
]
"""Called as ``law(values, like)``: prior and components at `values` of the
hyperparameters, packed for statistics made under components `like`, if given."""

Turn: TypeAlias = Callable[[Array, Any, Sequence[Component], Clusters], Any]
"""Called as ``turn(rng_key, values, components, clusters)``: new values; the clusters'
assignments are left out."""

Jump: TypeAlias = Callable[..., tuple[Any, Clusters, Any]]
"""Called as ``jump(rng_key, values, prior, components, clusters, subsample, record,
due)``: values and clusters after moves of many rows or of features at once, if they are
due, and the new record."""


class Step(NamedTuple):
    """
    What there is after the moves of one step.

    - **clusters** - assignments, sizes and statistics.
    - **values** - of the hyperparameters.
    - **prior**, **components** - what the model says at these values.
    - **subsample** - which rows are in.
    - **since** - number of rows that have moved since the last turn.
    - **refused** - number of moves in which a row could not have opened a cluster
      because all that can be represented were occupied.
    - **record** - what has become of moves of many rows at once.
    """

    clusters: Clusters
    values: Any
    prior: Prior
    components: tuple[Component, ...]
    subsample: Subsample
    since: Array
    refused: Array
    record: Any


# Moves drawn at a time: enough to spread the cost of starting a chunk, few enough to
# keep its random numbers (chunk x clusters floats) in cache.
_CHUNK = 4096

# Of more features than these a branch costs less than to read a row twice. (Of
# vectorized chains both rows are read.)
_MANY = 32

# Gumbel noise is made in blocks of so many moves and clusters, by one loop: code for
# random numbers is what takes longest to compile.
_NOISE_MOVES, _NOISE = 256, 16


def widths(capacity: int) -> tuple[int, ...]:
    """
    Numbers of clusters for which the move is compiled. A chunk of moves runs at the
    smallest that has room, so that unused capacity costs nothing.
    """
    ladder = []
    width = 16
    while width < capacity:
        ladder.append(width)
        width *= 2
    return (*ladder, capacity)


def collect(
    components: Sequence[Component],
    z: Array,
    capacity: int,
    layout: Layout | None = None,
    labels: tuple[Array, ...] = (),
) -> Clusters:
    """The clusters of assignments `z`, counted from the data."""
    if layout is None:
        counts = jnp.zeros(capacity, jnp.int32)
        counts = counts.at[jnp.where(z < 0, capacity, z)].add(1, mode="drop")
        views = [None] * len(components)
    else:
        occupied = layout.num_features(labels) > 0
        counts = jnp.where(occupied[:, None], count_views(z, capacity), 0)
        views = [ByView.make(index, layout.num_views) for index in layout.index(labels)]

    def add_row(n, stats):
        live = jnp.max(z[n]) >= 0
        k = jnp.maximum(z[n], 0)
        return tuple(
            c.block.add(c.hyper, s, c.block.row(c.hyper, c.data, n), k, live, view)
            for c, s, view in zip(components, stats, views, strict=True)
        )

    stats = tuple(c.block.empty(c.hyper, capacity) for c in components)
    stats = lax.fori_loop(0, z.shape[0], add_row, stats)
    return Clusters(z, counts, stats, labels)


def count_views(z: Array, capacity: int) -> Array:
    """Rows in each cluster of each view, ``[views, K]``."""
    num_views = z.shape[1]
    k = jnp.where(z < 0, capacity, z)
    counts = jnp.zeros((num_views, capacity), jnp.int32)
    return counts.at[jnp.arange(num_views), k].add(1, mode="drop")


def run_step(
    rng_key: Array,
    law: Law,
    values: Any,
    z: Array,
    capacity: int,
    subsample: Subsample,
    added: Array,
    churned: Array,
    turn: Turn | None = None,
    since: Array | int = 0,
    jump: Jump | None = None,
    record: Any = None,
    layout: Layout | None = None,
    labels: tuple[Array, ...] = (),
    chooser: Chooser | None = None,
    at_least: int = LEAST_BETWEEN_TURNS,
) -> Step:
    """
    Make the moves of one step.

    There is a turn whenever as many rows have moved as the current subsample holds
    (Obermeyer et al. 2014, section 2.4), and while it is small whenever so many have as
    :meth:`~.subsample.Subsample.between_turns` says; then other moves than of single
    rows are made.

    :param rng_key: key.
    :param law: what the model says at given values of its hyperparameters.
    :param values: these values, or any pytree that `law` and `turn` know.
    :param z: assignments ``[N]`` or ``[N, views]``, below `capacity`; -1 for rows out
        of the subsample.
    :param int capacity: number of clusters that can be represented.
    :param subsample: which rows are in.
    :param added: number of rows to add.
    :param churned: number of rows to churn besides.
    :param turn: moves of the hyperparameters, made at each turn.
    :param since: rows that have moved since the last turn.
    :param jump: moves of many rows at once, made at each turn before those.
    :param record: what `jump` is given the first time.
    :param layout: of features in views, if they are.
    :param labels: views of the elements of each site of views.
    :param chooser: what chooses the rows that leave and enter, if they are not uniform.
    :param int at_least: rows that move from one turn to the next at least.
    """
    num_rows = z.shape[0]
    chunk = min(_CHUNK, num_rows)
    if layout is not None:
        # So that the random numbers are no more than without views.
        chunk = min(chunk, max(_NOISE_MOVES, _CHUNK // layout.num_views))
    prior, start = law(values, None)
    clusters = collect(start, z, capacity, layout, labels)
    turns = any(x is not None for x in (turn, jump, chooser))
    if turn is None:

        def law_now(values):
            return prior, start
    else:
        law_now = hoist(lambda values: law(values, start), values)
        held = start, _without_rows(clusters)
        make_turn = hoist(partial(_make_turn, law, turn), rng_key, values, *held)

    def unfinished(carry):
        churn = carry[3]
        return over_chains(churn.left) > 0

    def run_chunk(carry):
        clusters, values, subsample, churn, since, refused, record, rng_key = carry
        rng_key, key_churn, key_moves, key_turn, key_jump = variates.split(rng_key, 5)
        most = jnp.int32(chunk)
        if turns:
            most = jnp.clip(subsample.between_turns(at_least) - since, 1, most)
        subsample, churn, moves = draw_moves(
            key_churn, subsample, churn, chunk, most, chooser, since
        )
        prior, components = law_now(values)
        clusters, more = _run_moves(
            key_moves, prior, components, clusters, moves, layout
        )
        if turns:
            since = since + moves.count
            due = since >= subsample.between_turns(at_least)
            due &= moves.count > 0
            since = jnp.where(due, 0, since)
        if jump is not None:
            values, clusters, record = jump(
                key_jump, values, prior, components, clusters, subsample, record, due
            )
        if turn is not None:
            held = components, _without_rows(clusters)
            bits = random.key_data(key_turn)
            values, stats = lax.cond(
                due,
                lambda: make_turn(_like(key_turn, bits), values, *held),
                lambda: (values, clusters.stats),
            )
            clusters = clusters._replace(stats=stats)
        refused = refused + more
        return clusters, values, subsample, churn, since, refused, record, rng_key

    churn = Churn.start(added, churned)
    zero = jnp.zeros((), jnp.int32)
    since = jnp.asarray(since, jnp.int32)
    clusters, values, subsample, _, since, refused, record, _ = lax.while_loop(
        unfinished,
        run_chunk,
        (clusters, values, subsample, churn, since, zero, record, rng_key),
    )
    prior, components = law_now(values)
    components = tuple(components)
    return Step(clusters, values, prior, components, subsample, since, refused, record)


def _without_rows(clusters: Clusters) -> Clusters:
    return clusters._replace(z=jnp.zeros(0, jnp.int32))


def _like(rng_key: Array, bits: Array) -> Array:
    """
    The key of these bits. Chains at once make all branches, of operands of which JAX
    selects one or another; a key would count as used there.
    """
    if not jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        return bits
    return random.wrap_key_data(bits, impl=random.key_impl(rng_key))


def _make_turn(law, turn, rng_key, values, components, clusters):
    values = turn(rng_key, values, components, clusters)
    _, new = law(values, components)
    stats = tuple(
        a.block.rebase(a.hyper, b.hyper, s)
        for a, b, s in zip(components, new, clusters.stats, strict=True)
    )
    return values, stats


class _Loop(NamedTuple):
    """
    What moves at one width carry: `position` in the chunk, tables of that width, and
    the cluster `k` of the row that leaves next (in each view), read ahead. (Read in its
    own move, XLA may fuse the read past the write of `z`, and then copies `z` at every
    move.)
    """

    position: Array
    k: Array
    clusters: Clusters
    tables: tuple[Any, ...]
    occupied: Array
    refused: Array


def _run_moves(
    rng_key: Array,
    prior: Prior,
    components: Sequence[Component],
    clusters: Clusters,
    moves: Moves,
    layout: Layout | None,
) -> tuple[Clusters, Array]:
    capacity = clusters.counts.shape[-1]
    # The components of a labelled prior are all there, occupied or not.
    labelled = isinstance(prior, LabelledPrior)
    ladder = (capacity,) if labelled else widths(capacity)
    chunk = moves.enters.shape[0]
    # Of each rung: how many views there are, and how many clusters.
    rungs = [(None, width) for width in ladder]
    seats = None
    if layout is not None:
        rungs = [(views, width) for views in layout.widths for width in ladder]
        views_needed = over_chains(layout.most_occupied(clusters.labels))
        view_rung = _rung(layout.widths, views_needed)
        seats = {v: layout.seats(clusters.labels, v) for v in layout.widths}
    # Noise is made by the view and the clusters that it is for, so that a chain's does
    # not depend on the rung, which vectorized chains share, nor on when that changed.
    made_for = [_blocks_of_noise(layout, *rung) for rung in rungs]
    num_blocks = max(map(len, made_for))
    numbers = np.zeros((len(rungs), num_blocks), np.int32)
    for own, blocks in zip(numbers, made_for, strict=True):
        own[: len(blocks)] = blocks
    piece = min(_NOISE_MOVES, chunk)
    num_pieces = -(-chunk // piece)
    pieces = over_chains(lax.div(moves.count + (piece - 1), jnp.int32(piece)))

    def unfinished(carry):
        position = carry[0]
        return over_chains(moves.count - position) > 0

    def run_segment(carry):
        # Each segment ends with the chunk, or when its width has no room left; then the
        # next goes on at a larger width.
        position, clusters, refused, noise = carry
        if layout is None:
            needed = over_chains(_room(clusters.counts))
            rung = _rung(ladder, needed)
        else:
            whole = seats[layout.widths[-1]]
            room = jax.vmap(_room)(clusters.counts[whole.active])
            needed = over_chains(jnp.max(jnp.where(whole.occupied, room, 0)))
            rung = view_rung * len(ladder) + _rung(ladder, needed)

        def fill(i, noise):
            block, place = lax.div(i, pieces), lax.rem(i, pieces)
            number = jnp.asarray(numbers)[rung, block] * num_pieces + place
            part = gumbel(fold_in(rng_key, number), (1, piece, _NOISE))
            start = (block, place * piece, jnp.zeros_like(place))
            return lax.dynamic_update_slice(noise, part, start)

        used = jnp.asarray([len(b) for b in made_for], jnp.int32)[rung]
        noise = lax.fori_loop(0, used * pieces, fill, noise)
        for i, (views, width) in enumerate(rungs):
            position, clusters, refused = _run_at_width(
                prior
                if views is None
                else prior.take(seats[views].active, layout.narrowed(views)),
                components,
                (position, clusters, refused),
                moves,
                noise,
                width,
                None if views is None else seats[views],
                selected=rung == i,
            )
        return position, clusters, refused, noise

    zero = jnp.zeros((), jnp.int32)
    noise = jnp.zeros((num_blocks, num_pieces * piece, _NOISE))
    _, clusters, refused, _ = lax.while_loop(
        unfinished, run_segment, (zero, clusters, zero, noise)
    )
    return clusters, refused


def _blocks_of_noise(layout: Layout | None, views: int | None, width: int) -> list[int]:
    """Numbers of the blocks of noise for so many views and clusters."""
    blocks = range(-(-width // _NOISE))
    if layout is None:
        return list(blocks)
    places = [
        offset + i
        for offset, size in zip(layout.offsets, layout.narrowed(views), strict=True)
        for i in range(size)
    ]
    return [block * layout.num_views + place for place in places for block in blocks]


def _rung(ladder: Sequence[int], needed: Array) -> Array:
    """The first of `ladder` that is as much as `needed`, or the last."""
    return (needed > jnp.asarray(ladder[:-1], jnp.int32)).sum(dtype=jnp.int32)


def _room(counts: Array) -> Array:
    """
    Clusters to make room for: every slot up to the last occupied one, and some more
    than are occupied, so that a chunk rarely outgrows its width.
    """
    used = counts > 0
    last = jnp.max(jnp.where(used, jnp.arange(1, counts.shape[0] + 1), 0))
    occupied = used.sum()
    return jnp.maximum(last, occupied + 2 + occupied // 8)


def _run_at_width(
    prior, components, carry, moves, noise, width, seats: Seats | None, selected
):
    """
    Moves from `position` on while there is room in `width` clusters, if `selected`; in
    views, in those that `seats` has.

    Not selected means no iteration, rather than a branch of `lax.cond`: a branch would
    copy the assignments. What is made ahead of the loop is small.
    """
    position, clusters, refused = carry
    num_rows = clusters.z.shape[0]
    capacity = clusters.counts.shape[-1]
    every = slice(None) if seats is None else seats.active
    real = jnp.asarray(True) if seats is None else seats.occupied
    by_view = [None] * len(components) if seats is None else seats.views
    narrow = clusters._replace(
        counts=clusters.counts[..., :width]
        if seats is None
        else clusters.counts[every, :width],
        stats=jax.tree.map(lambda s: s[..., :width], clusters.stats),
    )
    tables = tuple(
        c.block.tables(c.hyper, s)
        for c, s in zip(components, narrow.stats, strict=True)
    )

    def count_occupied(counts):
        return jnp.where(real, (counts > 0).sum(-1, dtype=jnp.int32), 0)

    def live(loop):
        room = (width == capacity) | (loop.occupied < width).all()
        return selected & room & (loop.position < moves.count)

    def any_live(loop):
        return any_chain(live(loop))

    slots = jnp.arange(width, dtype=jnp.int32)
    num_blocks = -(-width // _NOISE)
    num_views = () if seats is None else (len(seats.active),)

    def leaving_from(z, position):
        # Past the chunk's end this is never used.
        k = z[jnp.maximum(moves.leaves[position], 0)]
        return k if seats is None else k[every]

    def read(row):
        return [c.block.row(c.hyper, c.data, row) for c in components]

    def in_all_views(k):
        if seats is None:
            return k
        return jnp.zeros(clusters.z.shape[1], jnp.int32).at[every].set(k)

    def move(loop):
        z, counts, stats, labels = loop.clusters
        on = live(loop)
        leaves = moves.leaves[loop.position]
        enters = moves.enters[loop.position]

        # Obermeyer et al. (2014), Anneal Subsample, line 6: remove.
        leaving = on & (leaves >= 0)
        row = jnp.maximum(leaves, 0)
        k = k_was = jnp.where(leaving & real, loop.k, 0)
        counts = counts - jnp.where(_one(leaving & real) & (slots == _one(k)), 1, 0)
        free = counts == 0
        occupied = width - free.sum(-1, dtype=jnp.int32)
        outs = read(row)
        taken = [
            c.block.take(c.hyper, s, out, k, leaving, view)
            for c, s, out, view in zip(components, stats, outs, by_view, strict=True)
        ]

        # Line 8: assign, with probabilities (*). The new cluster is the first free
        # slot, whose table is that of the prior predictive.
        if isinstance(prior, LabelledPrior):
            slot = jnp.int32(-1)
            log_weight = prior.log_weights(counts)
            full = jnp.asarray(False)
        else:
            slot = jnp.min(jnp.where(free, slots, width), -1)
            log_weight_new = prior.log_weight_new(occupied, counts.sum(-1))
            log_weight = jnp.where(
                slots == _one(slot),
                _one(log_weight_new),
                prior.log_weight_existing(counts),
            )
            full = (slot == width) & (log_weight_new > -jnp.inf)
        if sum(c.block.num_features for c in components) > _MANY:
            # In a sweep of all rows it is the row that left.
            xs = lax.cond(leaves == enters, lambda: outs, lambda: read(enters))
        else:
            xs = read(enters)
        parts = list(zip(components, taken, xs, by_view, strict=True))
        for (c, out, x, view), s, t in zip(parts, stats, loop.tables, strict=True):
            log_weight = log_weight + c.block.score(c.hyper, s, t, out, x, view)
        # Gumbel-max.
        num_noise = num_blocks * (num_views[0] if num_views else 1)
        gumbel = noise[:num_noise, loop.position].reshape(*num_views, -1)[..., :width]
        k = jnp.argmax(log_weight + gumbel, -1).astype(jnp.int32)
        if seats is not None:
            k = jnp.where(real, k, 0)
        counts = counts + jnp.where(_one(on & real) & (slots == _one(k)), 1, 0)

        def put(_, carry):
            stats, tables, z = carry
            changed = [
                c.block.put(c.hyper, s, t, out, x, k, on, view)
                for (c, out, x, view), s, t in zip(parts, stats, tables, strict=True)
            ]
            stats, tables = zip(*changed, strict=True)
            where = jnp.stack(
                [
                    jnp.where(leaving & (leaves != enters), leaves, num_rows),
                    jnp.where(on, enters, num_rows),
                ]
            )
            k_all = in_all_views(k)
            values = jnp.stack([jnp.full_like(k_all, -1), k_all])
            z = z.at[where].set(values, mode="drop")
            return stats, tables, z

        # A row that goes back to where it was changes nothing; in a sweep of all rows
        # most do. (A loop of at most one iteration: a branch of `lax.cond` would copy
        # what it may change.)
        stays = leaving & (leaves == enters) & (k == k_was).all()
        times = over_chains((on & ~stays).astype(jnp.int32))
        stats, tables, z = lax.fori_loop(0, times, put, (stats, loop.tables, z))
        position = loop.position + jnp.where(on, 1, 0)
        return _Loop(
            position,
            leaving_from(z, position),
            Clusters(z, counts, stats, labels),
            tables,
            loop.occupied + jnp.where(on & real & (k == slot), 1, 0)
            if seats is None
            else count_occupied(counts),
            loop.refused + jnp.where(on & full & real, 1, 0).sum(dtype=jnp.int32),
        )

    start = _Loop(
        position,
        leaving_from(clusters.z, position),
        narrow,
        tables,
        count_occupied(narrow.counts),
        refused,
    )
    loop = lax.while_loop(any_live, move, start)
    clusters = clusters._replace(
        z=loop.clusters.z,
        counts=clusters.counts.at[..., :width].set(loop.clusters.counts)
        if seats is None
        else clusters.counts.at[every, :width].set(loop.clusters.counts),
        stats=jax.tree.map(
            lambda s, w: s.at[..., :width].set(w), clusters.stats, loop.clusters.stats
        ),
    )
    return loop.position, clusters, loop.refused


def _one(x: Array) -> Array:
    """With one more axis, for the clusters."""
    return x[..., None]


def relabel(
    clusters: Clusters,
    layout: Layout | None = None,
    components: Sequence[Component] = (),
) -> Clusters:
    """Clusters numbered by the first row that they hold, in each view; empty ones
    last."""
    z, counts, stats, labels = clusters

    def one(z, capacity):
        num_rows = z.shape[0]
        first = jnp.full(capacity, num_rows, jnp.int32)
        first = first.at[jnp.where(z < 0, capacity, z)].min(
            jnp.arange(num_rows, dtype=jnp.int32), mode="drop"
        )
        order = jnp.argsort(first)
        label = (
            jnp.zeros(capacity, jnp.int32)
            .at[order]
            .set(jnp.arange(capacity, dtype=jnp.int32), unique_indices=True)
        )
        return jnp.where(z < 0, -1, label[jnp.maximum(z, 0)]), order

    capacity = counts.shape[-1]
    if layout is None:
        z, order = one(z, capacity)
        stats = jax.tree.map(lambda s: s[..., order], stats)
        return Clusters(z, counts[order], stats, labels)
    z, order = jax.vmap(partial(one, capacity=capacity), 1, (1, 0))(z)
    stats = tuple(
        c.block.reorder(s, order[view])
        for c, s, view in zip(components, stats, layout.index(labels), strict=True)
    )
    return Clusters(z, jnp.take_along_axis(counts, order, -1), stats, labels)


def log_joint(
    prior: Prior,
    components: Sequence[Component],
    clusters: Clusters,
    layout: Layout | None = None,
) -> Array:
    """
    Log probability of the partition and of the rows that are in, cluster parameters
    integrated out. In views: of the partition of each view that is not vacant.
    """
    occupied = clusters.counts > 0
    if layout is not None:
        total = jnp.where(
            layout.num_features(clusters.labels) > 0, prior.log_eppf(clusters.counts), 0
        ).sum()
        index = layout.index(clusters.labels)
        for c, s, view in zip(components, clusters.stats, index, strict=True):
            each = c.block.log_marginals(c.hyper, s)
            total += jnp.where(occupied[view], each, 0).sum()
        return total
    if isinstance(prior, LabelledPrior):
        total = prior.log_prob(clusters.counts)
    else:
        total = prior.log_eppf(clusters.counts)
    for c, s in zip(components, clusters.stats, strict=True):
        each = c.block.log_marginals(c.hyper, s)
        # NB: flat, with which XLA computes what is summed ahead, in vectors.
        taken = jnp.broadcast_to(occupied, each.shape).reshape(-1)
        total += jnp.where(taken, each.reshape(-1), 0).sum()
    return total
