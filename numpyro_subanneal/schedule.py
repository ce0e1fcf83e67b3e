# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Schedules: how the subsample grows during the warm-up.

A schedule says, for every warm-up step, how many rows are *added* to the subsample and
how many are *churned*: one row taken out, one row put in, the size unchanged. Within a
step the additions are spread evenly among the churns, so the size of the subsample
changes by at most one row at a time (Obermeyer et al. 2014, section 2.4). After the
warm-up every step makes as many random-scan moves as there are rows: exact Gibbs
sampling.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np


class Steps(NamedTuple):
    """
    - **added** - rows added to the subsample in each warm-up step, ``[num_warmup]``.
    - **churned** - rows moved in each warm-up step besides, ``[num_warmup]``.
    """

    added: np.ndarray
    churned: np.ndarray

    def num_turnovers(self, first_size: int) -> int:
        """About how often the current subsample is turned over in the warm-up, which
        starts with `first_size` rows."""
        moves = self.added + self.churned.astype(np.float64)
        after = first_size + np.cumsum(self.added)
        before = after - self.added
        # Additions are spread evenly among the moves of a step: a sum of 1 / size.
        growing = self.added > 0
        mean = np.where(
            growing,
            np.log((after + 0.5) / (before + 0.5)) / np.maximum(self.added, 1),
            1 / np.maximum(after, 1),
        )
        return int((moves * mean).sum())


class AbstractSchedule(ABC):
    """
    A schedule of subsample sizes. Subclasses implement :meth:`steps`.

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

    def checked_steps(self, num_rows: int, num_warmup: int) -> Steps:
        """
        :meth:`steps`, checked: what the kernel calls.

        :raises ValueError: naming the law that the schedule breaks.
        """
        if num_warmup == 0:
            return Steps(np.zeros(0, np.int32), np.zeros(0, np.int32))
        name = type(self).__name__
        added, churned = (np.asarray(x) for x in self.steps(num_rows, num_warmup))
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
                    f"{name}.steps returned {label}[{step}] = {values[step]}; a "
                    "subsample never shrinks."
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

    **References:**

    1. *Scaling Nonparametric Bayesian Inference via Subsample-Annealing*, F. Obermeyer,
       J. Glidden, E. Jonas (2014), section 2.4
    """

    churn: int | None = None

    def __post_init__(self):
        _check_churn(self.churn)

    def steps(self, num_rows, num_warmup):
        churn = num_warmup if self.churn is None else self.churn
        added = np.diff(_even_sizes(num_rows, num_warmup))
        return Steps(added, added * churn)


@dataclass(frozen=True)
class AcceleratingSchedule(AbstractSchedule):
    r"""
    An anneal that becomes faster as the subsample grows: after a row is added that
    makes it of size n, so many rows are churned,

    .. math::

        c(n) = c \min\left(1, \sqrt{s / n}\right),

    c being `churn` and s being `small_size`. Up to `small_size` rows this is
    :class:`LinearSchedule`; beyond, passes over the subsample become fewer, as Loom's
    do, and all churns together grow as :math:`2 c \sqrt{s N}` rather than as
    :math:`c N`: what many rows have in common is found while they are few.

    Steps add rows evenly, so that the first of them take longest.

    :param int churn: rows churned for each row added while there are few; defaults to
        `num_warmup`, as that of :class:`LinearSchedule`.
    :param int small_size: how many rows are few; Loom's are a thousand by default.

    **References:**

    1. Loom, F. Obermeyer, J. Glidden (2014), https://github.com/posterior/loom,
       `AcceleratingSchedule`
    """

    churn: int | None = None
    small_size: int = 1000

    def __post_init__(self):
        _check_churn(self.churn)
        size = self.small_size
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"`small_size` must be a positive integer, got {size!r}.")

    def steps(self, num_rows, num_warmup):
        churn = num_warmup if self.churn is None else self.churn
        sizes = _even_sizes(num_rows, num_warmup)
        # The integral of c(n) up to each size.
        beyond = 2 * np.sqrt(float(self.small_size) * sizes) - self.small_size
        passes = np.where(sizes > self.small_size, beyond, sizes)
        churned = np.diff(np.rint(churn * passes).astype(np.int64))
        return Steps(np.diff(sizes), churned)


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


def _check_churn(churn: int | None) -> None:
    if churn is not None and (
        isinstance(churn, bool) or not isinstance(churn, int | np.integer) or churn < 0
    ):
        raise ValueError(f"`churn` must be a nonnegative integer, got {churn!r}.")


def _even_sizes(num_rows: int, num_warmup: int) -> np.ndarray:
    """Sizes of a subsample that grows linearly, before each step and at the end."""
    # Rounded up, so that the first step adds a row.
    return -(-np.arange(num_warmup + 1, dtype=np.int64) * num_rows // num_warmup)
