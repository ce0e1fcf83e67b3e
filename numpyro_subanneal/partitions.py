# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""Summaries of draws of a partition: similarities, point estimates, credible balls.

NumPy only, after the fit. Draws of labels ``z`` are integers ``[draws, N]`` or
``[chains, draws, N]``, as `MCMC.get_samples` returns them, without or with
``group_by_chain``. Nothing but which rows are together is read off them: labels are
any nonnegative integers, with gaps or without, and mean nothing across draws.

A model with views has a partition of the rows in each, ``[draws, views, N]``. These are
not chains: choose a view first, such as that of a column in every draw,
``z[np.arange(len(z)), view[:, column]]``.

*Losses.* With :math:`n_a` and :math:`m_b` the sizes of the clusters of two partitions
of :math:`N` rows, and :math:`n_{ab}` the numbers of rows that they share, both losses
are

.. math::

    \frac{1}{s} \Bigl(\sum_a f(n_a) + \sum_b f(m_b) - 2 \sum_{ab} f(n_{ab})\Bigr)

with :math:`f(n) = n \log n` and :math:`s = N` for the variation of information
(Meila, 2007), :math:`f(n) = n^2` and :math:`s = N^2` for Binder's. So one search serves
both. Averaged over draws, the middle sum does not depend on the first partition; and a
row that joins its cluster :math:`a` adds, but for a constant, :math:`g(n_a) - 2
\mathrm{E}\, g(n_{ab})`, with :math:`g(n) = f(n + 1) - f(n)`, the mean over draws, and
:math:`b` the cluster of the row in each.

**References:**

1. *Bayesian Cluster Analysis*, D. A. Binder (1978)
2. *Comparing Partitions*, L. Hubert, P. Arabie (1985)
3. *Comparing Clusterings: an Information Based Distance*, M. Meila (2007)
4. *Bayesian Cluster Analysis: Point Estimation and Credible Balls*, S. Wade, Z.
   Ghahramani (2018)
5. *Search Algorithms and Loss Functions for Bayesian Clustering*, D. B. Dahl, D. J.
   Johnson, P. Mueller (2022)
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

Loss = Literal["vi", "binder"]
"""Variation of information, or Binder's loss with equal costs."""

# Numbers of a temporary array: 8 MB of int64.
_CELLS = 2**20

# Rows are not moved for less, in units of `s` times the loss: what rounding leaves of a
# tie would move them to and fro for ever.
_TIE = 1e-9


class PointPartition(NamedTuple):
    """
    The best partition that a search has found.

    - **labels** - cluster of each row, numbered by their first rows, ``[N]``.
    - **expected_loss** - its mean loss over the draws.
    - **num_clusters** - of the partition.
    - **run** - which run has found it first; run 0 starts at the best draw.
    """

    labels: np.ndarray
    expected_loss: float
    num_clusters: int
    run: int


class BestDraw(NamedTuple):
    """
    The best partition among the draws.

    - **labels** - cluster of each row, numbered by their first rows, ``[N]``.
    - **expected_loss** - its mean loss over the draws.
    - **num_clusters** - of the partition.
    - **draw** - its index, the first if there are several; of chains one after another.
    """

    labels: np.ndarray
    expected_loss: float
    num_clusters: int
    draw: int


class CredibleBall(NamedTuple):
    """
    The draws that are not far from a partition, by their extremes. These are sets of
    different partitions ``[any, N]``, numbered by their first rows, mostly of one.

    - **radius** - loss between the partition and the farthest in the ball.
    - **horizontal** - those that are farthest.
    - **upper** - the upper vertical bound: of those with fewest clusters, the farthest.
    - **lower** - the lower vertical bound: of those with most clusters, the farthest.
    """

    radius: float
    horizontal: np.ndarray
    upper: np.ndarray
    lower: np.ndarray


class MatchedLabels(NamedTuple):
    """
    Labels of draws by the clusters of one partition.

    - **labels** - of all draws, in the shape of ``z``.
    - **maps** - new label of each label of ``z``, -1 of one that a draw does not use:
      ``[draws, K]`` or ``[chains, draws, K]``, one more than the largest label.
    - **num_clusters** - labels below it are clusters of the partition, one more than
      its largest label. Others are clusters of a draw that match none.
    """

    labels: np.ndarray
    maps: np.ndarray
    num_clusters: int


# --- what is handed in ----------------------------------------------------------------


def _labels(name: str, z: Any) -> np.ndarray:
    z = np.asarray(z)
    if not np.issubdtype(z.dtype, np.integer):
        raise ValueError(
            f"`{name}` must hold labels of clusters, integers; got dtype {z.dtype}."
        )
    if z.size == 0 or z.ndim == 0:
        raise ValueError(
            f"`{name}` must have its rows on the last axis, and at least one of each "
            f"axis; got shape {z.shape}."
        )
    if z.min() < 0:
        at = tuple(int(i) for i in np.unravel_index((z < 0).argmax(), z.shape))
        raise ValueError(
            f"`{name}` has {z[at]} at {at}, a row that is in no cluster. Draws of the "
            "warm-up are partitions of some rows only, not of the posterior: leave "
            "them out. So are, in a view, those in which it has no columns."
        )
    return z.astype(np.int64, copy=False)


def _draws(z: Any) -> np.ndarray:
    """Labels of draws, chains one after another: ``[draws, N]``."""
    z = _labels("z", z)
    if z.ndim not in (2, 3):
        raise ValueError(
            "`z` must have shape [draws, N] or [chains, draws, N]; got shape "
            f"{z.shape}. A single partition is z[None]."
        )
    return z.reshape(-1, z.shape[-1])


def _partition(partition: Any, num_rows: int) -> np.ndarray:
    partition = _labels("partition", partition)
    if partition.shape != (num_rows,):
        raise ValueError(
            f"`partition` must hold a label for each of the {num_rows} rows of `z`; "
            f"got shape {partition.shape}."
        )
    return partition


def _indices(name: str, rows: Any, num_rows: int) -> np.ndarray:
    rows = np.asarray(rows)
    # An empty list has a float type.
    if rows.size and not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(
            f"`{name}` must hold indices of rows, integers; got dtype {rows.dtype}."
        )
    if rows.size and not (0 <= rows.min() and rows.max() < num_rows):
        raise ValueError(
            f"`{name}` must lie in 0..{num_rows - 1}, the rows of `z`; got indices "
            f"from {rows.min()} to {rows.max()}."
        )
    return rows.astype(np.int64)


def _whole(name: str, value: Any, least: int = 1) -> int:
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or value < least:
        raise ValueError(
            f"`{name}` must be an integer of {least} or more, got {value!r}."
        )
    return int(value)


def _canonical(draws: np.ndarray) -> np.ndarray:
    """Labels ``[draws, N]`` numbered by the first row of each cluster, as int32."""
    found = np.empty(draws.shape, np.int32)
    num_rows = draws.shape[1]
    for out, z in zip(found, draws, strict=True):
        if z.max() >= num_rows:
            z = np.unique(z, return_inverse=True)[1]
        first = np.full(z.max() + 1, num_rows)  # labels that are not used come last
        first[z[::-1]] = np.arange(num_rows)[::-1]  # the last that is written stays
        out[:] = first.argsort().argsort()[z]
    return found


# --- similarity -----------------------------------------------------------------------


def similarity(
    z: Any,
    rows: Any = None,
    others: Any = None,
    *,
    chunk_size: int | None = None,
) -> np.ndarray:
    """
    Posterior probability that two rows are in one cluster.

    :param z: labels, ``[draws, N]`` or ``[chains, draws, N]``.
    :param rows: indices of rows; all by default.
    :param others: indices of the rows that they are compared to; all by default.
    :param int chunk_size: number of rows at a time; by default so many that 8 MB are
        used besides ``z`` and the result.
    :return: float32 ``[len(rows), len(others)]``, ``[N, N]`` by default.
    :raises ValueError: if a label is negative, or an index out of range.

    **Example**

    .. doctest::

        >>> from numpyro_subanneal.partitions import similarity
        >>> similarity([[0, 0, 1], [0, 1, 1]], rows=[0]).tolist()
        [[1.0, 0.5, 0.0]]
    """
    draws = _draws(z)
    num_draws, num_rows = draws.shape
    index = []
    for name, chosen in (("rows", rows), ("others", others)):
        chosen = np.arange(num_rows) if chosen is None else chosen
        index.append(_indices(name, chosen, num_rows))
        if index[-1].ndim != 1:
            raise ValueError(
                f"`{name}` must be a list of indices; got shape {index[-1].shape}."
            )
    rows, others = index
    if chunk_size is None:
        chunk_size = max(1, _CELLS // max(1, len(others)))
    chunk_size = _whole("chunk_size", chunk_size)
    # Narrow integers are compared faster.
    draws = _canonical(draws)
    draws = draws.astype(np.min_scalar_type(draws.max()))
    to = draws.take(others, axis=1)
    result = np.empty((len(rows), len(others)), np.float32)
    for start in range(0, len(rows), chunk_size):
        own = draws.take(rows[start : start + chunk_size], axis=1)
        count = np.zeros((own.shape[1], len(others)), np.int32)
        same = np.empty(count.shape, bool)
        for first in range(0, num_draws, 255):  # so many can be counted in a byte
            part = np.zeros(count.shape, np.uint8)
            for x, y in zip(
                own[first : first + 255], to[first : first + 255], strict=True
            ):
                np.equal(x[:, None], y, out=same)
                part += same.view(np.uint8)
            count += part
        result[start : start + chunk_size] = count / np.float32(num_draws)
    return result


def pair_similarity(z: Any, pairs: Any) -> np.ndarray:
    """
    Posterior probability that the rows of each of some pairs are in one cluster.

    :param z: labels, ``[draws, N]`` or ``[chains, draws, N]``.
    :param pairs: indices of rows, ``[P, 2]``.
    :return: float32 ``[P]``.
    :raises ValueError: if a label is negative, or an index out of range.
    """
    draws = _draws(z)
    pairs = _indices("pairs", pairs, draws.shape[1])
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(
            f"`pairs` must have shape [P, 2], two rows each; got shape {pairs.shape}."
        )
    result = np.empty(len(pairs), np.float32)
    step = max(1, _CELLS // len(draws))
    for start in range(0, len(pairs), step):
        a, b = pairs[start : start + step].T
        same = np.count_nonzero(draws[:, a] == draws[:, b], axis=0)
        result[start : start + step] = same / np.float32(len(draws))
    return result


# --- distances ------------------------------------------------------------------------


def _table(loss: str, num_rows: int) -> tuple[np.ndarray, float]:
    """`f` of 0 to `num_rows`, and `s`."""
    n = np.arange(num_rows + 1.0)
    if loss == "vi":
        return n * np.log(np.maximum(n, 1)), float(num_rows)
    if loss == "binder":
        return n**2, float(num_rows) ** 2
    raise ValueError(f'`loss` must be "vi" or "binder", got {loss!r}.')


def _sum_over_cells(a: np.ndarray, b: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Sums over contingency tables: of ``f[n_ab]``, with ``f[0] == 0``, for canonical
    labels ``[draws, N]``, either of one draw for all."""
    num_draws, num_rows = max(len(a), len(b)), a.shape[1]
    width = int(b.max()) + 1
    cells = (int(a.max()) + 1) * width
    # A table of many small clusters is almost empty: then what is there is counted.
    dense = cells <= 4 * num_rows
    step = max(1, _CELLS // max(num_rows, cells if dense else 0))
    result = np.empty(num_draws)
    for start in range(0, num_draws, step):
        some = [x if len(x) == 1 else x[start : start + step] for x in (a, b)]
        key = some[0].astype(np.int64) * width + some[1]
        num = len(key)
        key += cells * np.arange(num)[:, None]
        if dense:
            counts = np.bincount(key.ravel(), minlength=num * cells)
            sums = f[counts].reshape(num, cells).sum(1)
        else:
            found, counts = np.unique(key, return_counts=True)
            sums = np.bincount(found // cells, f[counts], num)
        result[start : start + step] = sums
    return result


def _sum_over_clusters(z: np.ndarray, f: np.ndarray) -> np.ndarray:
    return _sum_over_cells(z, np.zeros((1, z.shape[1]), np.int32), f)


def _losses(a: np.ndarray, b: np.ndarray, loss: str) -> np.ndarray:
    """Between canonical labels ``[draws, N]``, either of one draw for all."""
    f, scale = _table(loss, a.shape[1])
    apart = _sum_over_clusters(a, f) + _sum_over_clusters(b, f)
    losses = (apart - 2 * _sum_over_cells(a, b, f)) / scale
    # Of like partitions rounding would leave something else.
    return np.where((a == b).all(1), 0.0, losses)


def _side_by_side(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    a, b = _labels("a", a), _labels("b", b)
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            "`a` and `b` must be partitions of the same rows; got shapes "
            f"{a.shape} and {b.shape}."
        )
    try:
        lead = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    except ValueError:
        raise ValueError(
            "`a` and `b` must have the same leading axes, or one of them none; got "
            f"shapes {a.shape} and {b.shape}."
        ) from None
    flat = []
    for x in (a, b):
        num_rows = x.shape[-1]
        if x.size > num_rows:  # one partition stays one
            x = np.broadcast_to(x, (*lead, num_rows))
        flat.append(_canonical(x.reshape(-1, num_rows)))
    return flat[0], flat[1], lead


def variation_of_information(a: Any, b: Any) -> np.ndarray:
    r"""
    Variation of information between partitions, in nats: :math:`H(a | b) + H(b | a)`,
    from 0 to :math:`\log N` (Meila, 2007). Divided by :math:`\log 2` it is in bits.

    :param a: labels ``[..., N]``.
    :param b: labels ``[..., N]``; leading axes broadcast, so that one partition may be
        compared to many draws.
    :return: float64 ``[...]``.
    :raises ValueError: if a label is negative, or the shapes do not fit.

    **Example**

    .. doctest::

        >>> from numpyro_subanneal.partitions import variation_of_information
        >>> draws = [[0, 0, 1, 1], [0, 0, 0, 0]]
        >>> variation_of_information(draws, [5, 5, 2, 2]).round(4).tolist()
        [0.0, 0.6931]
    """
    a, b, lead = _side_by_side(a, b)
    return _losses(a, b, "vi").reshape(lead)[()]


def binder_loss(a: Any, b: Any) -> np.ndarray:
    """
    Binder's loss (1978) between partitions, with equal costs: the number of ordered
    pairs of rows that are together in one and apart in the other, over ``N^2``, from 0
    to ``1 - 1 / N``. In this scale it depends on the shares of the rows only, not on
    their number (Wade and Ghahramani, 2018). Times ``N / (N - 1)`` it is one minus the
    Rand index.

    :param a: labels ``[..., N]``.
    :param b: labels ``[..., N]``; leading axes broadcast.
    :return: float64 ``[...]``.
    :raises ValueError: if a label is negative, or the shapes do not fit.
    """
    a, b, lead = _side_by_side(a, b)
    return _losses(a, b, "binder").reshape(lead)[()]


def adjusted_rand(a: Any, b: Any) -> np.ndarray:
    """
    Adjusted Rand index of partitions (Hubert and Arabie, 1985): 1 for like ones, with
    mean 0 for those whose clusters have these sizes and rows at random. It is 1, too,
    where these sizes leave one partition only.

    :param a: labels ``[..., N]``.
    :param b: labels ``[..., N]``; leading axes broadcast.
    :return: float64 ``[...]``.
    :raises ValueError: if a label is negative, or the shapes do not fit.
    """
    a, b, lead = _side_by_side(a, b)
    n = np.arange(a.shape[1] + 1.0)
    pairs = n * (n - 1) / 2
    together = _sum_over_cells(a, b, pairs)
    own, other = _sum_over_clusters(a, pairs), _sum_over_clusters(b, pairs)
    expected = own * other / max(pairs[-1], 1)
    most = (own + other) / 2
    trivial = most == expected
    index = (together - expected) / np.where(trivial, 1, most - expected)
    return np.where(trivial, 1.0, index).reshape(lead)[()]


# --- point estimates ------------------------------------------------------------------


def _expected_losses(draws: np.ndarray, loss: str) -> np.ndarray:
    """Mean loss of every draw over all, ``[draws]``."""
    num_draws, num_rows = draws.shape
    f, scale = _table(loss, num_rows)
    joint = np.zeros(num_draws)
    for i in range(num_draws):
        sums = _sum_over_cells(draws[i:], draws[i : i + 1], f)
        joint[i] += sums.sum()
        joint[i + 1 :] += sums[1:]
    own = _sum_over_clusters(draws, f)
    return np.maximum((own + own.mean() - 2 * joint / num_draws) / scale, 0)


def best_draw(z: Any, loss: Loss = "vi") -> BestDraw:
    """
    The draw of least posterior expected loss.

    :param z: labels, ``[draws, N]`` or ``[chains, draws, N]``.
    :param str loss: "vi" or "binder", see :func:`variation_of_information` and
        :func:`binder_loss`.
    :return: the partition, its mean loss over the draws and its index.

    .. note::
        All draws are compared to all, in time that grows with ``draws^2 * N``. Draws of
        a chain are much alike: thin them to some hundreds.
    """
    draws = _canonical(_draws(z))
    return _best(draws, _expected_losses(draws, loss))


def _best(draws: np.ndarray, losses: np.ndarray) -> BestDraw:
    i = int(losses.argmin())
    return BestDraw(draws[i], float(losses[i]), int(draws[i].max()) + 1, i)


class _Search:
    """
    A partition that is searched for, of some or all rows, and what it shares with the
    draws. Clusters are in slots without gaps, and one slot more is always free.

    - **labels** - slot of each row, -1 of one that is out, ``[N]``.
    - **num** - number of clusters.
    - **sizes** - of the clusters, ``[slots]``.
    - **overlaps** - rows that a cluster shares with each cluster of each draw, draws
      one after another: ``[slots, clusters of all draws]``.
    - **places** - where in `overlaps` the clusters of a row are, ``[N, draws]``.
    """

    def __init__(self, draws: np.ndarray, loss: str, max_clusters: int):
        num_draws, num_rows = draws.shape
        self.f, _ = _table(loss, num_rows)
        self.gain = np.diff(self.f, append=np.nan)  # no cluster has a row too many
        self.tie = _TIE + 1e-13 * self.f[-1]  # of sums of `f`, which are rounded more
        self.max_clusters = max_clusters
        ends = np.cumsum(draws.max(1) + 1)
        starts = np.append(0, ends[:-1])
        self.places = np.ascontiguousarray((draws + starts[:, None]).T)
        self.overlaps = np.zeros((8, ends[-1]), np.int32)
        self.sizes = np.zeros(8, np.int64)
        self.labels = np.full(num_rows, -1)
        self.num = 0

    def load(self, labels: np.ndarray) -> None:
        """Take up a partition of all rows."""
        self.labels = labels.astype(np.int64)
        self.num = int(labels.max()) + 1
        self.overlaps = np.zeros((self.num + 1, self.overlaps.shape[1]), np.int32)
        self.sizes = np.bincount(labels, minlength=self.num + 1)
        for k in range(self.num):
            places = self.places[labels == k].ravel()
            self.overlaps[k] = np.bincount(places, minlength=self.overlaps.shape[1])

    def clear(self) -> None:
        self.labels[:] = -1
        self.overlaps[: self.num] = 0
        self.sizes[: self.num] = 0
        self.num = 0

    def objective(self) -> float:
        """The expected loss, times `s` and but for a constant."""
        shared = self.f[self.overlaps[: self.num]].sum() / self.places.shape[1]
        return self.f[self.sizes[: self.num]].sum() - 2 * shared

    def join(self, row: int, k: int) -> None:
        self.labels[row] = k
        self.sizes[k] += 1
        self.overlaps[k][self.places[row]] += 1  # one place a draw: none twice
        if k == self.num:
            self.num += 1
            if self.num == len(self.sizes):
                self.overlaps = np.concatenate([self.overlaps, 0 * self.overlaps])
                self.sizes = np.concatenate([self.sizes, 0 * self.sizes])

    def leave(self, row: int, k: int) -> None:
        self.sizes[k] -= 1
        self.overlaps[k][self.places[row]] -= 1
        if self.sizes[k] == 0:  # the last cluster moves into its slot
            self.num -= 1
            if k != self.num:
                self.labels[self.labels == self.num] = k
                for x in (self.sizes, self.overlaps):
                    x[k], x[self.num] = x[self.num], 0

    def settle(self, row: int) -> bool:
        """Put a row where the expected loss is least; whether it has moved."""
        num = min(self.num + 1, self.max_clusters)
        own = self.labels[row]
        sizes = self.sizes[:num].copy()
        overlaps = self.overlaps[:num].take(self.places[row], axis=1)
        if own >= 0:
            sizes[own] -= 1
            overlaps[own] -= 1
        shared = np.add.reduce(self.gain.take(overlaps), axis=1)
        score = self.gain.take(sizes) - 2 / overlaps.shape[1] * shared
        best = score.argmin()
        if own >= 0 and score[best] > score[own] - _TIE:
            return False
        self.join(row, best)
        if own >= 0:
            self.leave(row, own)
        return True

    def sweep(self, rows: np.ndarray, rng: np.random.Generator) -> None:
        """Move rows, in random orders, until none moves."""
        while sum([self.settle(row) for row in rng.permutation(rows)]):
            pass

    def allocate(self, rows: np.ndarray, rng: np.random.Generator) -> None:
        """Add rows that are out, in a random order, by those which are in."""
        for row in rng.permutation(rows):
            self.settle(row)

    def rebuild(self, rows: np.ndarray, rng: np.random.Generator) -> bool:
        """Take rows out and allocate them anew, if that is better ("zealous updates" of
        Dahl et al., 2022); whether it is."""
        before, labels = self.objective(), self.labels.copy()
        for row in rows:
            k, self.labels[row] = self.labels[row], -1
            self.leave(row, k)
        self.allocate(rows, rng)
        self.sweep(rows, rng)
        if self.objective() < before - self.tie:
            return True
        self.load(labels)
        return False

    def descend(self, rng: np.random.Generator) -> None:
        """Until neither a row moves nor a cluster is better rebuilt."""
        better = True
        while better:
            self.sweep(np.arange(len(self.labels)), rng)
            order = rng.permutation(self.num)
            clusters = [np.flatnonzero(self.labels == k) for k in order]
            better = any([self.rebuild(rows, rng) for rows in clusters])


def point_partition(
    z: Any,
    loss: Loss = "vi",
    *,
    seed: int = 0,
    num_runs: int = 8,
    max_clusters: int | None = None,
) -> PointPartition:
    """
    The partition of least posterior expected loss, found by a greedy search in the
    manner of SALSO (Dahl, Johnson and Mueller, 2022).

    A run adds the rows one by one, in a random order, each where the mean loss over the
    draws, of the rows so far, is least: in a cluster or a new one. Then every row
    moves to where it is least, in random orders, until none moves; then the rows of
    each cluster are taken out and added anew, if that is better; and so on until
    nothing is. The first run starts at the best draw instead, so that the result is
    never worse. It is a local optimum, on small tables mostly the global one.

    The expected variation of information is that over the draws itself, not a bound.

    :param z: labels, ``[draws, N]`` or ``[chains, draws, N]``.
    :param str loss: "vi" or "binder", see :func:`variation_of_information` and
        :func:`binder_loss`. Binder's tends to more, small clusters (Wade and
        Ghahramani, 2018).
    :param int seed: of the orders.
    :param int num_runs: number of runs; the best is returned.
    :param int max_clusters: most clusters that the result may have; any number by
        default.
    :return: the partition and its mean loss over the draws.
    :raises ValueError: if a label is negative, or an option is out of range.

    .. note::
        A row is moved in time that grows with ``draws * clusters``, and memory is used
        for a number for each row and draw, and for each cluster and cluster of a draw.
        A few hundred draws will do: thin those of a long chain. See also
        :func:`best_draw`.

    **Example**

    .. doctest::

        >>> from numpyro_subanneal.partitions import point_partition
        >>> found = point_partition([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 2]])
        >>> found.labels.tolist(), round(found.expected_loss, 4)
        ([0, 0, 1, 1], 0.1155)
    """
    draws = _canonical(_draws(z))
    seed, num_runs = _whole("seed", seed, 0), _whole("num_runs", num_runs)
    cap = draws.shape[1]
    if max_clusters is not None:
        cap = min(cap, _whole("max_clusters", max_clusters))
    losses = _expected_losses(draws, loss)
    start = _best(draws, np.where(draws.max(1) < cap, losses, np.inf))
    search = _Search(draws, loss, cap)
    best = None
    for run in range(num_runs):
        rng = np.random.default_rng([seed, run])
        if run == 0 and start.num_clusters <= cap:
            search.load(start.labels)
        else:
            search.clear()
            search.allocate(np.arange(draws.shape[1]), rng)
        search.descend(rng)
        labels = _canonical(search.labels[None])
        expected = float(_losses(draws, labels, loss).mean())
        if best is None or expected < best.expected_loss - 1e-12:
            best = PointPartition(labels[0], expected, search.num, run)
    return best


# --- uncertainty ----------------------------------------------------------------------


def credible_ball(
    z: Any, partition: Any, level: float = 0.95, loss: Loss = "vi"
) -> CredibleBall:
    """
    The smallest ball about a partition that holds a share of the draws, and its bounds
    (Wade and Ghahramani, 2018, section 4).

    :param z: labels, ``[draws, N]`` or ``[chains, draws, N]``.
    :param partition: labels of its centre, ``[N]``, as of :func:`point_partition`.
    :param float level: least share of the draws in the ball, in ``(0, 1]``.
    :param str loss: the distance, "vi" or "binder".
    :return: the radius, in the units of the loss, and the draws at the bounds.
    :raises ValueError: if a label is negative, or an option is out of range.
    """
    if not 0 < level <= 1:
        raise ValueError(f"`level` must be a share in (0, 1], got {level!r}.")
    draws = _draws(z)
    centre = _canonical(_partition(partition, draws.shape[1])[None])
    draws = _canonical(draws)
    distance = _losses(draws, centre, loss)
    # The product may be rounded up beyond a whole number.
    least = int(np.ceil(level * len(draws) - 1e-9))
    radius = np.sort(distance)[least - 1]
    inside = distance <= radius + 1e-12  # like partitions may differ by rounding
    num_clusters = draws.max(1) + 1

    def farthest(among):
        at = among & (distance >= distance[among].max() - 1e-12)
        return np.unique(draws[at], axis=0)

    fewest, most = num_clusters[inside].min(), num_clusters[inside].max()
    return CredibleBall(
        float(radius),
        farthest(inside),
        farthest(inside & (num_clusters == fewest)),
        farthest(inside & (num_clusters == most)),
    )


# --- labels that mean something across draws ------------------------------------------


def match_labels(z: Any, partition: Any) -> MatchedLabels:
    """
    Labels of the clusters of every draw by those of one partition: the assignment of
    one to another, none twice, that most rows agree with.

    A cluster of a draw that is assigned none, or one that it shares no row with, gets
    a label of its own, from the number of clusters of the partition on, in the order of
    the labels.

    :param z: labels, ``[draws, N]`` or ``[chains, draws, N]``.
    :param partition: labels ``[N]``, as of :func:`point_partition`.
    :return: labels in the shape of ``z``, and the maps for
        :func:`relabel_parameters`.
    :raises ValueError: if a label is negative, or the shapes do not fit.

    **Example**

    .. doctest::

        >>> from numpyro_subanneal.partitions import match_labels
        >>> matched = match_labels([[0, 1, 1, 2], [0, 0, 1, 1]], [0, 1, 1, 1])
        >>> matched.labels.tolist()
        [[0, 1, 1, 2], [0, 0, 1, 1]]
    """
    draws, lead = _draws(z), np.shape(z)[:-1]
    partition = _partition(partition, draws.shape[1])
    num_clusters = int(partition.max()) + 1
    num_labels = int(draws.max()) + 1
    maps = np.full((len(draws), num_labels), -1)
    for own, labels in zip(maps, draws, strict=True):
        used, z_own = np.unique(labels, return_inverse=True)
        cells = np.bincount(
            z_own * num_clusters + partition, minlength=len(used) * num_clusters
        )
        shared = cells.reshape(len(used), num_clusters)
        k, to = linear_sum_assignment(shared, maximize=True)
        real = shared[k, to] > 0
        new = np.full(len(used), -1)
        new[k[real]] = to[real]
        left = new < 0
        new[left] = num_clusters + np.arange(left.sum())
        own[used] = new
    labels = np.take_along_axis(maps, draws, axis=1)
    return MatchedLabels(
        labels.reshape(*lead, -1), maps.reshape(*lead, num_labels), num_clusters
    )


def relabel_parameters(values: Any, matched: MatchedLabels) -> np.ndarray:
    """
    Draws of cluster parameters by the clusters of one partition.

    :param values: clusters on the axis after those of draws, ``[draws, K, ...]`` or
        ``[chains, draws, K, ...]``, as they were drawn together with ``z``.
    :param MatchedLabels matched: of ``z``, by :func:`match_labels`.
    :return: ``[draws, num_clusters, ...]``, or with chains; NaN where a draw has no
        cluster that matches. Integers become float64.
    :raises ValueError: if the shapes do not fit.
    """
    values = np.asarray(values)
    lead, num_labels = matched.maps.shape[:-1], matched.maps.shape[-1]
    axis = len(lead)
    if values.shape[:axis] != lead or values.ndim <= axis:
        raise ValueError(
            f"`values` must have shape [{', '.join(map(str, lead))}, K, ...], with the "
            f"draws of `z` and the clusters after them; got shape {values.shape}."
        )
    if values.shape[axis] < num_labels:
        raise ValueError(
            f"`values` has {values.shape[axis]} clusters on axis {axis}, but labels of "
            f"`z` go up to {num_labels - 1}: hand in those drawn together with `z`."
        )
    here = matched.maps[..., None] == np.arange(matched.num_clusters)
    shape = (*lead, matched.num_clusters, *(1,) * (values.ndim - axis - 1))
    source, found = here.argmax(-2).reshape(shape), here.any(-2).reshape(shape)
    return np.where(found, np.take_along_axis(values, source, axis), np.nan)
