# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Which rows leave and enter: laws of the moves that a step draws.

Keys are fixed and nothing is retried; a comment at each statistical test states its
false-alarm rate.
"""

from functools import partial
from itertools import combinations

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_subanneal import LinearSchedule
from numpyro_subanneal.subsample import (
    Churn,
    Moves,
    Subsample,
    below,
    draw_moves,
    over_chains,
)

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled


@partial(jax.jit, static_argnames=("chunk", "num_chunks", "chooser"))
def draw_step(keys, order, size, added, churned, *, chunk, num_chunks, chooser=None):
    """
    All moves of a step in chunks, for several chains: subsample, what is left of the
    churn, and moves ``[chains, chunks, chunk]``.
    """

    def one_chain(key, order, size, added, churned):
        def one_chunk(carry, key):
            subsample, churn = carry
            subsample, churn, moves = draw_moves(
                key, subsample, churn, chunk, chooser=chooser
            )
            return (subsample, churn), moves

        start = Subsample(order, size), Churn.start(added, churned)
        (subsample, churn), moves = lax.scan(
            one_chunk, start, random.split(key, num_chunks)
        )
        return subsample, churn, moves

    return jax.vmap(one_chain)(keys, order, size, added, churned)


def run(seed, num_chains, num_rows, size, added, churned, chunk, chooser=None):
    """The same step for many chains; moves as lists ``[chains, moves]``."""
    total = added + churned
    num_chunks = -(-total // chunk)
    full = partial(jnp.full, (num_chains,), dtype=jnp.int32)
    order = jnp.broadcast_to(
        jnp.arange(num_rows, dtype=jnp.int32), (num_chains, num_rows)
    )
    subsample, churn, moves = jax.device_get(
        draw_step(
            random.split(random.key(seed), num_chains),
            order,
            full(size),
            full(added),
            full(churned),
            chunk=chunk,
            num_chunks=num_chunks,
            chooser=chooser,
        )
    )
    assert (churn.left == 0).all()
    assert (moves.count.sum(1) == total).all()
    done = np.arange(chunk) < moves.count[..., None]
    leaves = moves.leaves[done].reshape(num_chains, total)
    enters = moves.enters[done].reshape(num_chains, total)
    return subsample, leaves, enters


# Rows, size at the start, added, churned, moves at a time.
STEPS = [
    (7, 3, 0, 12, 5),  # a partial subsample churns
    (7, 0, 7, 0, 7),  # every row once
    (7, 0, 7, 21, 4),  # three churns a row, to the end
    (7, 2, 3, 4, 100),  # more additions than fit evenly
    (7, 6, 1, 10, 3),  # full on the way: later moves are of full tables
    (7, 7, 0, 9, 4),  # full
    (1, 0, 1, 3, 2),  # one row
    (2, 1, 0, 6, 3),
    (5, 5, 0, 0, 3),  # nothing to do
]
by_step = pytest.mark.parametrize("step", STEPS, ids=str)


def expected_additions(added, total):
    """Which moves add a row: spread evenly, one at the start."""
    due = [min(added, 1 + m * added // total) if added else 0 for m in range(total)]
    return np.diff(due, prepend=0).astype(bool)


class Anywhere(LinearSchedule):
    """Chooses positions that it must not, of all kinds."""

    def leaving(self, bits, order, size, move):
        return bits.astype(jnp.int32) % 20 - 5

    def entering(self, bits, order, size, vacant):
        return bits.astype(jnp.int32) % 20 - 5


# None: drawn without any; `LinearSchedule`: by the default methods of a schedule.
by_chooser = pytest.mark.parametrize("chooser", [None, LinearSchedule()], ids=str)


@by_step
@pytest.mark.parametrize("chooser", [None, LinearSchedule(), Anywhere()])
def test_moves_keep_the_order_a_permutation_of_the_rows_in_and_out(step, chooser):
    # A replay of every move on plain sets, in 50 chains.
    num_rows, size, added, churned, chunk = step
    subsample, leaves, enters = run(0, 50, *step, chooser)
    adds = expected_additions(added, added + churned)
    for order, end, outs, ins in zip(*subsample, leaves, enters, strict=True):
        inside = set(range(size))
        for add, out, new in zip(adds, outs, ins, strict=True):
            before = len(inside)
            if add:
                assert out == -1
            else:
                inside.remove(out)  # it was in
            assert new not in inside and 0 <= new < num_rows
            inside.add(new)
            assert len(inside) == before + add
        assert sorted(order) == list(range(num_rows))
        assert end == len(inside) == size + added
        assert set(order[:end]) == inside


@pytest.mark.parametrize("added, churned", [(1, 5), (3, 5), (4, 4), (5, 2), (8, 0)])
def test_additions_are_spread_evenly_and_begin_with_one(added, churned):
    _, leaves, _ = run(1, 2, 10, 1, added, churned, chunk=3)
    adds = (leaves == -1).cumsum(1)
    total = added + churned
    m = np.arange(total) + 1
    # Never one row off the straight line.
    assert (np.abs(adds - m * added / total) < 1).all()
    assert (leaves[:, 0] == -1).all()


def ranks(order_in, row):
    """Position of `row` among the sorted rows that `order_in` marks."""
    return np.take_along_axis(order_in.cumsum(1) - 1, row[:, None], 1)[:, 0]


@pytest.mark.parametrize(
    "step", [(6, 3, 0, 4, 4), (6, 2, 2, 4, 3), (6, 6, 0, 4, 4)], ids=str
)
@by_chooser
def test_rows_that_leave_and_enter_are_uniform_whatever_went_before(step, chooser):
    # Every removal is uniform over the rows in, every addition over the rows out, and
    # neither depends on the move before: chi-square of each, and of each with the last.
    # False alarm: 48 tests at 1e-4, 0.5 %.
    num_rows, size, added, churned, chunk = step
    num_chains = 20_000
    _, leaves, enters = run(2, num_chains, *step, chooser)
    inside = np.broadcast_to(np.arange(num_rows) < size, (num_chains, num_rows)).copy()
    chains = np.arange(num_chains)
    before, choices = np.zeros(num_chains, int), 1
    for out, new in zip(leaves.T, enters.T, strict=True):
        if out[0] >= 0:
            choice, n = ranks(inside, out), inside[0].sum()
            assert_uniform(choice, n, before, choices)
            inside[chains, out] = False
            before, choices = choice, n
        choice, n = ranks(~inside, new), (~inside[0]).sum()
        assert_uniform(choice, n, before, choices)
        inside[chains, new] = True
        before, choices = choice, n


def assert_uniform(choice, n, before, choices):
    counts = np.bincount(before * n + choice, minlength=choices * n)
    assert len(counts) == choices * n
    if len(counts) > 1:
        assert stats.chisquare(counts).pvalue > 1e-4, counts


@pytest.mark.parametrize("step", [(6, 0, 3, 0, 3), (6, 0, 3, 7, 4), (6, 3, 0, 5, 9)])
@by_chooser
def test_rows_that_are_in_are_a_uniform_subset(step, chooser):
    # Chi-square over the 20 subsets; false alarm 0.01 % each. The third starts from
    # rows 0, 1, 2 and is mixed by churning: what is left of the start is known exactly.
    num_rows, size, added, churned, chunk = step
    num_chains = 20_000
    subsample, _, _ = run(3, num_chains, *step, chooser)
    subsets = list(combinations(range(num_rows), 3))
    where = {s: i for i, s in enumerate(subsets)}
    final = np.sort(subsample.order[:, :3], axis=1)
    counts = np.bincount([where[tuple(s)] for s in final.tolist()], minlength=20)
    if added:
        law = np.full(20, 1 / 20)
    else:
        churn = np.zeros((20, 20))
        for i, s in enumerate(subsets):
            for out in s:
                left = set(s) - {out}
                for new in set(range(num_rows)) - left:
                    churn[i, where[tuple(sorted(left | {new}))]] += 1 / 12
        law = np.linalg.matrix_power(churn, churned)[where[0, 1, 2]]
    assert stats.chisquare(counts, num_chains * law).pvalue > 1e-4


@pytest.mark.parametrize("chooser", [None, Anywhere()], ids=str)
def test_full_table_moves_a_uniform_row_in_place(chooser):
    # Chi-square over pairs of consecutive rows; false alarm 0.01 %. Whatever chooses
    # rows is not asked.
    subsample, leaves, enters = run(4, 5000, 5, 5, 0, 12, 4, chooser)
    np.testing.assert_array_equal(leaves, enters)
    np.testing.assert_array_equal(subsample.order, np.tile(np.arange(5), (5000, 1)))
    pairs = np.bincount((leaves[:, ::2] * 5 + leaves[:, 1::2]).ravel(), minlength=25)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_vectorized_chains_draw_what_each_draws_alone():
    # Chains of any state and length, full or partial, side by side: the loop's bound is
    # common, so that those which are done go on with moves that change nothing.
    size = np.array([0, 3, 6, 6, 2, 5], np.int32)
    added = np.array([6, 0, 0, 0, 3, 1], np.int32)
    churned = np.array([9, 4, 20, 0, 0, 7], np.int32)
    keys = random.split(random.key(5), len(size))
    rng = np.random.default_rng(5)
    order = np.array([rng.permutation(6) for _ in size], np.int32)
    draw = partial(draw_step, chunk=5, num_chunks=4)
    together = draw(keys, order, size, added, churned)
    subsample, churn, moves = jax.device_get(together)
    assert (subsample.size == size + added).all()
    np.testing.assert_array_equal(
        np.sort(subsample.order), np.tile(np.arange(6), (6, 1))
    )
    for i in range(len(size)):
        one = slice(i, i + 1)
        alone = draw(keys[one], order[one], size[one], added[one], churned[one])
        alone_subsample, alone_churn, alone_moves = jax.device_get(alone)
        np.testing.assert_array_equal(subsample.order[i], alone_subsample.order[0])
        assert churn.left[i] == alone_churn.left[0]
        done = np.arange(5) < moves.count[i][:, None]
        for name in Moves._fields[:2]:
            got, expected = getattr(moves, name)[i], getattr(alone_moves, name)[0]
            np.testing.assert_array_equal(got[done], expected[done])


class OldestAndLargest(LinearSchedule):
    """Rows leave in turn; of those out, the one of the largest number enters."""

    def leaving(self, bits, order, size, move):
        return move

    def entering(self, bits, order, size, vacant):
        place = jnp.arange(order.shape[0])
        may = (place >= size) | (place == vacant)
        return jnp.argmax(jnp.where(may, order, -1))


def test_chosen_rows_leave_and_enter():
    # In one turnover, a move at a time; a row added is put last. The row that has just
    # left may return.
    _, leaves, enters = run(8, 2, 8, 4, 0, 4, 4, OldestAndLargest())
    np.testing.assert_array_equal(leaves, [[0, 1, 2, 3]] * 2)
    np.testing.assert_array_equal(enters, [[7, 6, 5, 4]] * 2)
    subsample, leaves, enters = run(8, 2, 8, 2, 2, 1, 3, OldestAndLargest())
    # Row 7 is added; row 1, in the second place, leaves, and 6 enters; 5 is added.
    np.testing.assert_array_equal(leaves, [[-1, 1, -1]] * 2)
    np.testing.assert_array_equal(enters, [[7, 6, 5]] * 2)
    np.testing.assert_array_equal(subsample.order[:, :4], [[0, 6, 7, 5]] * 2)
    _, leaves, enters = run(8, 2, 4, 3, 0, 3, 3, OldestAndLargest())
    np.testing.assert_array_equal(leaves, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(enters, [[3, 1, 2]] * 2)


def test_over_chains_is_the_maximum_over_vectorized_chains():
    x = jnp.array([3, 9, 1])
    assert over_chains(jnp.int32(4)) == 4
    np.testing.assert_array_equal(jax.vmap(over_chains, out_axes=None)(x), 9)
    nested = jax.vmap(jax.vmap(over_chains, out_axes=None), out_axes=None)
    np.testing.assert_array_equal(nested(jnp.array([[3, 9], [10, 1]])), 10)


# --- Random bits to rows ------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000, 10**6, 2**31 - 1])
def test_below_is_the_remainder_of_unsigned_integers(count):
    # The whole range of the bits, the top half of it negative as int32.
    bits = np.random.default_rng(0).integers(2**32, size=10_000, dtype=np.uint64)
    bits[:4] = 0, 2**31 - 1, 2**31, 2**32 - 1
    got = np.asarray(below(jnp.asarray(bits, jnp.uint32), count))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, bits % count)


def test_below_zero_is_zero():
    assert below(jnp.uint32(5), 0) == 0


def test_rows_of_a_large_table_are_uniform():
    # Four million draws of a million rows: chi-square over a thousand stretches of the
    # table, over the last digits, and over the first and last rows; each at 1e-4.
    n = 10**6
    subsample = Subsample(jnp.arange(n, dtype=jnp.int32), jnp.int32(n))
    churn = Churn.start(jnp.int32(0), jnp.int32(4 * n))
    draw = jax.jit(partial(draw_moves, chunk=4 * n))
    _, _, moves = draw(random.key(6), subsample, churn)
    row = np.asarray(moves.leaves)
    assert row.min() >= 0 and row.max() < n
    for counts in (
        np.bincount(row // 1000, minlength=1000),
        np.bincount(row % 1000, minlength=1000),
    ):
        assert stats.chisquare(counts).pvalue > 1e-4
    assert stats.binomtest(int((row < n // 2).sum()), len(row)).pvalue > 1e-4
    # As many rows as fours of draws leave unseen: exp(-4) of them.
    unseen = n - len(np.unique(row))
    expected = n * np.exp(-4)
    assert abs(unseen - expected) < 4 * np.sqrt(expected)


def test_removals_from_a_large_subsample_are_uniform():
    # A subsample of 600,000 of 10^6 rows churns 10^6 times. The rows that were in at
    # the start are exchangeable, and so are those that were out: those of each that are
    # in at the end are spread evenly over the table. Chi-square of each at 1e-4.
    n, size, total = 10**6, 600_000, 10**6
    subsample = Subsample(jnp.arange(n, dtype=jnp.int32), jnp.int32(size))
    churn = Churn.start(jnp.int32(1), jnp.int32(total))
    draw = jax.jit(partial(draw_moves, chunk=total + 1))
    after, _, moves = draw(random.key(7), subsample, churn)
    order = np.asarray(after.order)
    assert after.size == size + 1
    assert np.array_equal(np.sort(order), np.arange(n))
    inside = np.zeros(n, bool)
    inside[order[: size + 1]] = True
    for part in (inside[:size], inside[size:]):
        counts = part.reshape(100, -1).sum(1)
        rate = part.mean()
        variance = len(part) / 100 * rate * (1 - rate)
        chi2 = ((counts - counts.mean()) ** 2).sum() / variance
        assert stats.chi2.sf(chi2, 99) > 1e-4
