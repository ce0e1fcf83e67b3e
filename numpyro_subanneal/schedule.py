# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Schedules: how the subsample grows during the warm-up.

A schedule says, for every warm-up step, how many rows are *added* to the subsample and
how many are *churned*: one row taken out, one row put in, the size unchanged. Within a
step the additions are spread evenly among the churns, so the size of the subsample
changes by at most one row at a time (Obermeyer et al. 2014, section 2.4). After the
warm-up every step makes as many random-scan moves as there are rows: exact Gibbs
sampling.

It may also choose which rows leave and enter while not all are in.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_subanneal.subsample import LEAST_BETWEEN_TURNS
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import below


class Steps(NamedTuple):
    """
    - **added** - rows added to the subsample in each warm-up step, ``[num_warmup]``.
    - **churned** - rows moved in each warm-up step besides, ``[num_warmup]``.
    """

    added: np.ndarray
    churned: np.ndarray

    def num_turns(self, first_size: int, at_least: int) -> int:
        """
        About how often other moves than of single rows are made in the warm-up: each
        time that the current subsample has been turned over, or `at_least` rows have
        moved.

        :param int first_size: number of rows in at the start.
        :param int at_least: rows that move between two turns, if the table has so many.
        """
        moves = self.added + self.churned.astype(np.float64)
        after = first_size + np.cumsum(self.added)
        before = after - self.added
        least = max(1, min(at_least, first_size + int(self.added.sum())))
        # Additions are spread evenly among the moves of a step. While the subsample is
        # turned over it grows, to `size / (1 - share)`.
        share = self.added / np.maximum(moves, 1)
        log_growth = -np.log1p(-np.minimum(share, 1 - 1e-9))
        # A sum of 1 / size, or of 1 / least while the size is smaller.
        small = np.minimum(after, least) - np.minimum(before, least)
        last, first = np.maximum(after, least) + 0.5, np.maximum(before, least) + 0.5
        each = np.where(
            self.added > 0,
            small / least / np.where(share > 0, share, 1)
            + np.log(last / first) / np.where(share > 0, log_growth, 1),
            moves / np.maximum(after, least),
        )
        return int(each.sum())


class AbstractSchedule(ABC):
    """
    A schedule of subsample sizes. Subclasses implement :meth:`steps`; they may also
    choose rows, by :meth:`leaving` and :meth:`entering`.

    - **starts_full** - True if the chain starts with all rows in, assigned by a draw
      from the partition's prior; False if it starts empty.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_subanneal.schedule import AbstractSchedule, Steps
        >>> class HalfThenAll(AbstractSchedule):
        ...     '''Half of the rows in the first step, the rest in the last.'''
        ...
        ...     def steps(self, num_rows, num_warmup):
        ...         added = np.zeros(num_warmup, int)
        ...         added[0] = num_rows // 2
        ...         added[-1] += num_rows - num_rows // 2
        ...         return Steps(added, churned=np.full(num_warmup, num_rows))
        >>> HalfThenAll().checked_steps(num_rows=10, num_warmup=3).added.tolist()
        [5, 0, 5]
    """

    starts_full: ClassVar[bool] = False

    @abstractmethod
    def steps(self, num_rows: int, num_warmup: int) -> Steps:
        """
        Rows to add and to churn at each of the `num_warmup` >= 1 steps.

        :param int num_rows: number of rows N.
        :param int num_warmup: number of warm-up steps.
        :return: two integer arrays ``[num_warmup]``. The additions sum to `num_rows`
            (to 0 if the schedule starts full).
        """

    def leaving(self, bits: Array, order: Array, size: Array, move: Array) -> Array:
        """
        Which row leaves at a churn: its position in the subsample, uniform by default.

        A row keeps its position as long as it is in; the one that enters takes the
        place of the one that leaves, and one that is added comes last. Which rows are
        in during the anneal is free, but should not depend on what the chain has found:
        the method is told nothing of it. Where all rows are in, no row is chosen, and a
        step is an exact sweep whatever this method does. It is traced by JAX, with
        scalars but for `order`.

        .. doctest::

            >>> import jax.numpy as jnp
            >>> from numpyro_subanneal import LinearSchedule
            >>> class RoundRobin(LinearSchedule):
            ...     '''First in, first out: rows leave in the order of positions.'''
            ...
            ...     def leaving(self, bits, order, size, move):
            ...         return move

        :param bits: 32 random bits, as an unsigned integer.
        :param order: a permutation of the rows, of which the first `size` are in.
        :param size: number of rows in.
        :param move: how many rows have moved, of the `size` of the current turnover of
            the subsample.
        :return: an integer in ``0..size - 1``.
        """
        del order, move
        return below(bits, size)

    def entering(self, bits: Array, order: Array, size: Array, vacant: Array) -> Array:
        """
        Which row enters, at a churn and where one is added: its position, uniform by
        default over the rows out, the one that has just left included.

        :param bits: 32 random bits, independent of those that :meth:`leaving` has.
        :param order: a permutation of the rows.
        :param size: number of rows in after the move.
        :param vacant: the position to be filled: in `order`, that of the row that has
            left, or, where one is added, ``size - 1``, of the first row out.
        :return: `vacant`, or an integer in ``size..N - 1``.
        """
        which = below(bits, order.shape[0] - size + 1)
        return jnp.where(which == 0, vacant, size - 1 + which)

    @property
    def least_between_turns(self) -> int:
        """Rows that move, while few are in, before other moves are made than of single
        rows. What chooses rows is told when each of those that are in has moved."""
        return 1 if self.chooses_rows else LEAST_BETWEEN_TURNS

    @property
    def chooses_rows(self) -> bool:
        """Whether the schedule chooses rows otherwise than by default."""
        cls = type(self)
        default = AbstractSchedule
        return (cls.leaving, cls.entering) != (default.leaving, default.entering)

    def _check_choices(self, num_rows: int) -> None:
        """Choices of some random bits, at some sizes of the subsample: what a step
        would put right without a word."""
        rng = np.random.default_rng(0)
        num = 200
        bits = rng.integers(2**32, size=(2, num), dtype=np.uint32)
        sizes = np.unique([1, (num_rows + 1) // 2, num_rows]).repeat(num)
        bits = np.tile(bits, len(sizes) // num)
        moves = (rng.random(len(sizes)) * sizes).astype(np.int32)
        vacant = (rng.random(len(sizes)) * sizes).astype(np.int32)
        sizes = sizes.astype(np.int32)
        order = jnp.asarray(rng.permutation(num_rows), jnp.int32)
        for method, args in (
            ("leaving", (bits[0], sizes, moves)),
            ("entering", (bits[1], sizes, vacant)),
        ):

            def choose(bits, size, other, method=method):
                return getattr(self, method)(bits, order, size, other)

            name = f"{type(self).__name__}.{method}"
            with jax.ensure_compile_time_eval():
                found = jax.jit(jax.vmap(choose))(*map(jnp.asarray, args))
            found = np.asarray(found)
            if found.shape != sizes.shape or found.dtype.kind not in "iu":
                raise ValueError(
                    f"{name} returned an array of shape {found.shape[1:]} and dtype "
                    f"{found.dtype}; it must choose one position, an integer."
                )
            if method == "leaving":
                wrong = (found < 0) | (found >= sizes)
                law = "a position in the subsample, 0..size - 1"
            else:
                wrong = (found != vacant) & ((found < sizes) | (found >= num_rows))
                law = f"`vacant`, or that of a row out, size..{num_rows - 1}"
            if wrong.any():
                i = int(np.argmax(wrong))
                raise ValueError(
                    f"{name} chose {found[i]} where size = {sizes[i]}"
                    + (f" and vacant = {vacant[i]}" if method == "entering" else "")
                    + f"; it must choose {law}."
                )

    def checked_steps(self, num_rows: int, num_warmup: int) -> Steps:
        """
        :meth:`steps`, checked: what the kernel calls. Of the rows that a schedule
        chooses, a sample is checked.

        :raises ValueError: naming the law that the schedule breaks.
        """
        if num_warmup == 0:
            return Steps(np.zeros(0, np.int32), np.zeros(0, np.int32))
        name = type(self).__name__
        steps = self.steps(num_rows, num_warmup)
        try:
            added, churned = map(np.asarray, steps)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name}.steps returned {steps!r}; it must return `Steps(added, "
                "churned)`, two arrays."
            ) from None
        for label, values in (("added", added), ("churned", churned)):
            if values.shape != (num_warmup,) or values.dtype.kind not in "iu":
                raise ValueError(
                    f"{name}.steps returned `{label}` with shape {values.shape} and "
                    f"dtype {values.dtype}; it must hold one integer for each of the "
                    f"{num_warmup} warm-up steps."
                )
            if (values < 0).any():
                step = int(np.argmax(values < 0))
                raise ValueError(
                    f"{name}.steps returned {label}[{step}] = {values[step]}; numbers "
                    "of rows must not be negative."
                )
        expected = 0 if self.starts_full else num_rows
        if added.sum() != expected:
            raise ValueError(
                f"{name}.steps adds {added.sum()} rows in all, but must add "
                f"{expected}: the subsample has to hold all {num_rows} rows at the end "
                "of the warm-up."
            )
        idle = ~self.starts_full & (np.cumsum(added) == 0) & (churned > 0)
        if idle.any():
            step = int(np.argmax(idle))
            raise ValueError(
                f"{name}.steps churns {churned[step]} rows in step {step}, before any "
                "row was added."
            )
        most = int((added.astype(np.int64) + churned).max())
        if most > _MOST_MOVES:
            raise ValueError(
                f"{name}.steps makes {most} moves in one warm-up step; the most is "
                f"{_MOST_MOVES}. Spread them over more steps (`num_warmup`)."
            )
        if self.chooses_rows:
            self._check_choices(num_rows)
        return Steps(added.astype(np.int32), churned.astype(np.int32))


# Moves of a step are counted in int32, and their sum with the additions must fit.
_MOST_MOVES = 2**30


@dataclass(frozen=True)
class LinearSchedule(AbstractSchedule):
    """
    The paper's *Anneal Subsample*: after each added row, `churn` rows are churned, so
    that the subsample grows linearly in the number of moves.

    :param int churn: rows churned for each added row; defaults to `num_warmup`, so that
        a longer warm-up anneals more slowly and a warm-up step costs about as much as a
        sweep over all rows, whatever the number of steps.
    :param int ramp: number of rows, up to which fewer are churned, in proportion to the
        rows in: ``churn * n / ramp`` of ``n < ramp``. For cross-categorization, whose
        moves of columns and hyperparameters take as long in a small subsample as in
        one of a hundred rows, and find little there. 0, the default, for none.

    **References:**

    1. *Scaling Nonparametric Bayesian Inference via Subsample-Annealing*, F. Obermeyer,
       J. Glidden, E. Jonas (2014), section 2.4
    """

    churn: int | None = None
    # By keyword only, as subclasses have fields of their own.
    ramp: int = field(default=0, kw_only=True)

    def __post_init__(self):
        _check_churn(self.churn)
        if not _is_integer(self.ramp) or self.ramp < 0:
            raise ValueError(
                f"`ramp` must be a nonnegative integer, got {self.ramp!r}."
            )

    def steps(self, num_rows, num_warmup):
        churn = num_warmup if self.churn is None else int(self.churn)
        # Rounded up, so that the first step adds a row.
        sizes = -(-np.arange(num_warmup + 1, dtype=np.int64) * num_rows // num_warmup)
        churned = churn * sizes
        if self.ramp:
            # The sum of min(n / ramp, 1); by Python's integers, which do not overflow.
            twice = 2 * int(self.ramp)
            short = [min(size, int(self.ramp)) for size in sizes.tolist()]
            churned -= [churn * n * (twice - n - 1) // twice for n in short]
        return Steps(np.diff(sizes), np.diff(churned))


def _is_integer(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _check_churn(churn: int | None) -> None:
    if churn is None or (_is_integer(churn) and 0 <= churn <= _MOST_MOVES):
        return
    raise ValueError(
        f"`churn` must be a nonnegative integer, at most {_MOST_MOVES}, got {churn!r}."
    )


@dataclass(frozen=True)
class AcceleratingSchedule(AbstractSchedule):
    r"""
    *Anneal Subsample* that hurries once the subsample is large: `churn` rows are
    churned for each added row up to a subsample of `small_size` rows, and
    :math:`\mathit{churn}\sqrt{\mathit{small\_size} / n}` at :math:`n` rows from there
    on. Beyond the one move that every row takes to be added, the work then grows as
    :math:`\sqrt{N}`: twice `churn` times :math:`\sqrt{\mathit{small\_size}\,N}` moves.

    For tables of many rows, whose clusters are found while the subsample is small. Each
    warm-up step makes the same number of moves.

    :param int churn: rows churned for each row added to a small subsample; defaults to
        `num_warmup`, as in :class:`LinearSchedule`.
    :param int small_size: number of rows, at least 1, up to which the schedule is
        linear.
    """

    churn: int | None = None
    small_size: int = 1000

    def __post_init__(self):
        _check_churn(self.churn)
        size = self.small_size
        if not _is_integer(size) or size < 1:
            raise ValueError(f"`small_size` must be a positive integer, got {size!r}.")

    def steps(self, num_rows, num_warmup):
        churn = float(num_warmup if self.churn is None else self.churn)
        small = float(min(self.small_size, num_rows))

        def churned(n):
            return churn * np.where(n < small, n, 2 * np.sqrt(small * n) - small)

        # Sizes after equal shares of all moves n + churned(n): its inverse, which above
        # `small` is a quadratic equation for the root of n.
        moves = (num_rows + churned(num_rows)) * np.arange(num_warmup + 1) / num_warmup
        half = churn * np.sqrt(small)
        above = (np.sqrt(half**2 + churn * small + moves) - half) ** 2
        sizes = np.where(moves < (1 + churn) * small, moves / (1 + churn), above)
        # Rounded up, so that the first step adds a row.
        sizes = np.ceil(np.minimum(sizes, num_rows))
        sizes[0], sizes[-1] = 0, num_rows
        return Steps(
            np.diff(sizes).astype(np.int64),
            np.diff(np.floor(churned(sizes))).astype(np.int64),
        )


@dataclass(frozen=True)
class SequentialGibbs(AbstractSchedule):
    """
    The paper's *Sequential+Gibbs*: the first warm-up step assigns every row once, given
    those before it; every further step is a sweep over all rows. No annealing.
    """

    def steps(self, num_rows, num_warmup):
        added = np.zeros(num_warmup, np.int64)
        churned = np.full(num_warmup, num_rows, np.int64)
        added[0], churned[0] = num_rows, 0
        return Steps(added, churned)


@dataclass(frozen=True)
class PriorGibbs(AbstractSchedule):
    """
    The paper's *Prior+Gibbs*: the chain starts with every row assigned by a draw from
    the partition's prior, and every warm-up step is a sweep over all rows.
    """

    starts_full = True

    def steps(self, num_rows, num_warmup):
        return Steps(
            np.zeros(num_warmup, np.int64), np.full(num_warmup, num_rows, np.int64)
        )
