# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Which rows are in the subsample.

A permutation of the rows, of which the first `size` are in. Taking out a uniformly
random row, or putting one in, is a swap: O(1). Neither depends on the assignments, so
the rows that leave and enter are drawn ahead of the moves that use them, a chunk at a
time. A schedule may choose them otherwise
(:meth:`~numpyro_subanneal.schedule.AbstractSchedule.leaving`).
"""

from typing import NamedTuple, Protocol

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_subanneal import variates
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import below

# Rows that move from one turn to the next at least, or all of them in a smaller table:
# a turn costs as much as some hundred moves, and would take most of the time while few
# rows are in. Chains were no worse for it, at the same number of steps.
LEAST_BETWEEN_TURNS = 256


class Subsample(NamedTuple):
    """
    - **order** - a permutation of the rows, ``[N]``; the first `size` are in.
    - **size** - number of rows in the subsample.
    """

    order: Array
    size: Array

    def between_turns(self, at_least: int) -> Array:
        """Number of rows that move from one turn to the next: as many as are in, and
        not fewer than `at_least` unless the table has fewer."""
        return jnp.maximum(self.size, min(at_least, self.order.shape[-1]))


class Churn(NamedTuple):
    """
    Moves still to make in a step.

    - **left** - number of moves left.
    - **total** - number of moves in the whole step.
    - **added** - how many of them add a row.
    - **credit** - grows by `added` with each move; a move adds a row when it reaches
      `total`. This spreads the additions evenly, starting with one.
    """

    left: Array
    total: Array
    added: Array
    credit: Array

    @classmethod
    def start(cls, added: Array, churned: Array) -> "Churn":
        total = added + churned
        return cls(left=total, total=total, added=added, credit=churned)


class Moves(NamedTuple):
    """
    - **leaves** - row that leaves before the assignment, -1 for none, ``[chunk]``.
    - **enters** - row that is assigned, ``[chunk]``; may be the one that left.
    - **count** - how many of the chunk are moves.
    """

    leaves: Array
    enters: Array
    count: Array


class Chooser(Protocol):
    """What chooses the rows that leave and enter: a schedule that does so, see
    :class:`~numpyro_subanneal.schedule.AbstractSchedule`."""

    def leaving(self, bits: Array, order: Array, size: Array, move: Array) -> Array: ...

    def entering(
        self, bits: Array, order: Array, size: Array, vacant: Array
    ) -> Array: ...


@jax.custom_batching.custom_vmap
def over_chains(x: Array) -> Array:
    """
    `x` itself; under :func:`jax.vmap`, its maximum over the batch, unbatched.

    For loop bounds only. A bound that differs between vectorized chains would make JAX
    copy everything the loop carries, arrays of size N included, at every iteration.
    With a common bound the chains that are done go on with moves that change nothing.
    """
    return x


@over_chains.def_vmap
def _(axis_size, in_batched, x):
    del axis_size
    # The outer ones of nested batches are reduced in their turn.
    return (over_chains(jnp.max(x, 0)) if in_batched[0] else x), False


def any_chain(live: Array) -> Array:
    """Whether a loop goes on: `live`, or that of any vectorized chain."""
    return over_chains(live.astype(jnp.int32)) > 0


def draw_moves(
    rng_key: Array,
    subsample: Subsample,
    churn: Churn,
    chunk: int,
    most: Array | int | None = None,
    chooser: Chooser | None = None,
    since: Array | int = 0,
) -> tuple[Subsample, Churn, Moves]:
    """
    Draw which rows leave and enter in the next moves of a step: `most` at most, which
    is up to `chunk`, the length of the arrays.

    A churn takes a uniformly random row out and puts in one drawn uniformly from all
    rows then out, the one just taken included (Obermeyer et al. 2014, section 2.3);
    when all rows are in, that is the row itself. Rows are drawn as 32 random bits
    modulo a count, which is uniform up to a relative 2^-32 times that count.

    :param chooser: what chooses the rows instead, until all rows are in. The one that
        enters then takes the place of the one that leaves. Positions that it must not
        choose are replaced by others, so that the order remains a permutation.
    :param since: rows that have moved since the last turn, which it is told.
    """
    num_rows = subsample.order.shape[0]
    bits = variates.bits(rng_key, (chunk, 2))
    count = jnp.minimum(churn.left, chunk if most is None else most)
    full = (churn.added == 0) & (subsample.size == num_rows)

    def exchange(i, order, size, add):
        # `size` is that after the move.
        size = jnp.where(add, size + 1, size)
        gone = chooser.leaving(bits[i, 0], order, size, since + i)
        gone = jnp.where(add, size - 1, jnp.clip(gone, 0, size - 1))
        come = chooser.entering(bits[i, 1], order, size, gone)
        come = jnp.where((come >= size) & (come < num_rows), come, gone)
        row_gone, row_come = order[jnp.stack([gone, come])]
        return row_gone, row_come, [gone, come], [row_come, row_gone]

    def swap(i, order, size, add):
        # `last` is the end of the subsample after the removal, where the new row goes.
        last = jnp.where(add, size, size - 1)
        gone = jnp.where(add, size, below(bits[i, 0], size))
        come = last + below(bits[i, 1], num_rows - last)
        # NB: one gather and one scatter; a chain of updates copies `order` at each.
        row_gone, row_last, row_come = order[jnp.stack([gone, last, come])]
        row_come = jnp.where(
            come == last, row_gone, jnp.where(come == gone, row_last, row_come)
        )
        # Swap (gone, last), then swap (last, come).
        drop = num_rows
        where = [
            jnp.where(gone != last, gone, drop),
            last,
            jnp.where(come != last, come, drop),
        ]
        return row_gone, row_come, where, [row_last, row_come, row_gone]

    def step(i, carry):
        order, size, credit, leaves, enters = carry
        live = (i < count) & ~full
        credit = credit + churn.added
        add = (credit >= churn.total) & (churn.added > 0)
        credit = credit - jnp.where(add, churn.total, 0)
        choose = swap if chooser is None else exchange
        row_gone, row_come, where, new = choose(i, order, size, add)
        where = jnp.where(live, jnp.stack(where), num_rows)
        order = order.at[where].set(jnp.stack(new), mode="drop")
        leaves = leaves.at[i].set(jnp.where(add, -1, row_gone))
        enters = enters.at[i].set(row_come)
        size = jnp.where(live & add, size + 1, size)
        return order, size, credit, leaves, enters

    blank = jnp.zeros(chunk, jnp.int32)
    order, size, credit, leaves, enters = lax.fori_loop(
        0,
        over_chains(jnp.where(full, 0, count)),
        step,
        (subsample.order, subsample.size, churn.credit, blank, blank),
    )
    anyone = below(bits[:, 0], num_rows)
    moves = Moves(
        jnp.where(full, anyone, leaves), jnp.where(full, anyone, enters), count
    )
    churn = churn._replace(left=churn.left - count, credit=credit)
    return Subsample(order, size), churn, moves
