# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What a conjugate pair states, and how many features of one pair are packed.

A *pair* is the scalar case: one feature, one cluster. A *block* is what the Gibbs
moves work on: all features of all sites of one pair, for every cluster at once. The
author of a pair writes the first; :class:`DenseBlock` makes the second out of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np

import numpyro.distributions as dist

from numpyro_subanneal import variates
from numpyro_subanneal.compiling import hoist
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import (
    fold_in,
    normal,
    normal_quantile,
    open_uniform,
)

Hyper: TypeAlias = Mapping[str, Array]
"""Hyperparameters of the prior by name, as the pair itself names them, and the given
parameters of the likelihood by theirs."""

Theta: TypeAlias = Mapping[str, Array]
"""Cluster parameters by role, for example ``{"variance": ..., "loc": ...}``."""

Cell: TypeAlias = Any
"""What a pair keeps of one observed value: an array or a tuple of arrays."""

Statistics: TypeAlias = tuple[Array, ...]
"""Sufficient statistics of one feature in one cluster."""

Table: TypeAlias = tuple[Array, ...]
"""All that the predictive density of one feature in one cluster needs."""

SampleFn: TypeAlias = Callable[[str, dist.Distribution], Array]
"""Called as ``sample(role, distribution)``; returns the value of that role."""


class AbstractConjugatePair(ABC):
    """
    A likelihood and the prior under which its parameters integrate out exactly.

    Methods see *one* feature and *one* cluster: a value ``x`` is a scalar, or one event
    of a multivariate likelihood; statistics and tables are tuples of arrays of fixed
    shapes. They must be written in :mod:`jax.numpy`, without branching on values, and
    finite for the empty statistic. All other shapes, and masks, are the business of the
    block, which maps over features and clusters. (Only `theta` and `parameters` get
    leading axes: those of the values that they are given.)

    - **likelihood** - the NumPyro distributions of an observed site, by base type.
    - **prior** - role -> NumPyro distribution of the cluster site that plays it, each
      of a different type.
    - **form** - one sentence that says how the prior and the likelihood are written;
      it ends the message when a model is refused.
    - **given** - likelihood parameters that are known constants, by attribute name;
      they are hyperparameters of that name. They may differ by feature.
    - **given_by_row** - likelihood parameters that are known and may differ by row;
      they are arguments of `cell`.
    - **positive** - names of the hyperparameters that must be positive.
    - **squared** - names of those that must not be so large, or so small, that a float
      cannot hold their squares.
    - **event_dim** - hyperparameter -> number of its own axes, where that is not zero,
      such as 1 for a Dirichlet's concentration.
    - **location** - the hyperparameter and the role that move along when a constant is
      added to the values, if there are such. The block then keeps values as
      differences from that hyperparameter, so that a large origin costs no digits: the
      methods below see the value (the first of the cell's arrays) with it subtracted,
      and so the hyperparameter: as zero, until it is changed.
    - **in_statistics** - names of the hyperparameters that `cell` or the statistics
      depend on, where `rebase` does not see to it. They must be constants: to learn
      them, all rows would have to be read again at every try.
    """

    likelihood: ClassVar[tuple[type[dist.Distribution], ...]]
    prior: ClassVar[Mapping[str, type[dist.Distribution]]]
    form: ClassVar[str]
    given: ClassVar[tuple[str, ...]] = ()
    given_by_row: ClassVar[tuple[str, ...]] = ()
    positive: ClassVar[frozenset[str]] = frozenset()
    squared: ClassVar[frozenset[str]] = frozenset()
    event_dim: ClassVar[Mapping[str, int]] = {}
    location: ClassVar[tuple[str, str] | None] = None
    in_statistics: ClassVar[frozenset[str]] = frozenset()

    # --- reading a model -------------------------------------------------------

    @abstractmethod
    def parameters(self, theta: Theta) -> dict[str, Array]:
        """
        Parameters of the likelihood, by attribute name of the NumPyro distribution,
        that cluster parameters `theta` stand for; without the given ones. `theta` has
        leading axes.
        """

    @abstractmethod
    def hyperparameters(
        self, prior: Mapping[str, dist.Distribution], theta: Theta
    ) -> dict[str, Array]:
        """
        Hyperparameters, read off the distributions of the cluster sites, which were
        evaluated at `theta`. They must come out the same for every `theta`; where they
        do not, the model's prior is not of this pair's form and is refused.
        """

    def hyper_error(self, hyper: Mapping[str, np.ndarray]) -> str | None:
        """
        What is wrong with the hyperparameters beyond their signs, or None; arrays have
        leading axes, the features. The message continues a sentence whose subject is
        the prior.
        """
        del hyper
        return None

    def data_error(self, x: np.ndarray, hyper: Mapping[str, np.ndarray]) -> str | None:
        """
        What is wrong with the observed column `x` (``[rows, ...]``, without the masked
        rows' own values), or None. The message continues a sentence whose subject is
        the column. Parameters given by row are in `hyper` too, ``[rows]``.
        """
        del hyper
        bad = ~np.isfinite(x)
        if bad.any():
            row = first_row(bad)
            return f"has the value {x[bad][0]} in row {row}; {MASK_IT}"
        return None

    # --- the scalar case ---------------------------------------------------------

    @abstractmethod
    def theta(self, hyper: Hyper, sample: SampleFn) -> dict[str, Array]:
        """
        The prior as a generative program: call ``sample(role, distribution)`` for each
        role in turn and return the values. Hyperparameters have leading axes.
        """

    def cell(self, hyper: Hyper, x: Array, *given: Array) -> Cell:
        """
        What the methods below need of the value `x`, computed once a move: `x` itself,
        or for example its logarithm. `given` are the parameters given by row.
        """
        del hyper, given
        return x

    @abstractmethod
    def empty(self, hyper: Hyper) -> Statistics:
        """The statistics of no values: floats, and integers where they count."""

    @abstractmethod
    def add(self, hyper: Hyper, stat: Statistics, x: Cell) -> Statistics:
        """The statistics with `x` added."""

    @abstractmethod
    def remove(self, hyper: Hyper, stat: Statistics, x: Cell) -> Statistics:
        """The statistics with `x`, which was added before, taken out."""

    @abstractmethod
    def merge(self, hyper: Hyper, a: Statistics, b: Statistics) -> Statistics:
        """The statistics of the values of `a` and `b` together."""

    def rebase(self, old: Hyper, new: Hyper, stat: Statistics) -> Statistics:
        """
        Statistics, made under hyperparameters `old`, as they would be under `new`. The
        same, unless they hold something of the prior.
        """
        del old, new
        return stat

    @abstractmethod
    def posterior(self, hyper: Hyper, stat: Statistics) -> dict[str, Array]:
        """Hyperparameters of the posterior, of the same form as those of the prior
        (the given parameters may be left out)."""

    @abstractmethod
    def log_marginal(self, hyper: Hyper, stat: Statistics) -> Array:
        """Log marginal likelihood of the values that gave `stat`, in nats."""

    @abstractmethod
    def predictive(self, hyper: Hyper, stat: Statistics) -> Table:
        """The part of the log predictive density that depends on `stat` alone."""

    @abstractmethod
    def score(self, table: Table, x: Cell) -> Array:
        """Log predictive density at `x`, in nats, given ``predictive(hyper, stat)``."""

    # --- packing -------------------------------------------------------------------

    def blocks(self, sites: "Sequence[SiteShape]") -> "list[AbstractBlock]":
        """Blocks that pack observed `sites` of this pair, one for each event shape."""
        groups: dict[Any, list[SiteShape]] = {}
        for site in sites:
            groups.setdefault((site.event_shape, site.role_shapes), []).append(site)
        return [DenseBlock(self, tuple(group)) for group in groups.values()]


MASK_IT = "mask such cells with `numpyro.handlers.mask`, or leave out their rows"


def first_row(bad: np.ndarray) -> int:
    """First row in which anything is `bad` ``[rows, ...]``."""
    return int(np.argmax(bad.reshape(len(bad), -1).any(1)))


def count_error(x: np.ndarray, largest: Any = np.inf) -> str | None:
    """`data_error` of values that must be integers in ``0..largest``."""
    # NB: written so that NaN fails it too.
    bad = ~((x >= 0) & (x <= largest) & (x == np.floor(x)))
    if not bad.any():
        # The statistics are sums, in 32 bits where x64 is off.
        most = np.iinfo(jnp.result_type(int)).max
        if np.sum(x, dtype=np.float64) > most:
            return f"sums to more than {most}; call `numpyro.enable_x64()` first"
        return None
    row = first_row(bad)
    upper = np.broadcast_to(largest, x.shape)[bad][0]
    limit = "" if np.isinf(upper) else f", at most {upper:g}"
    return (
        f"has {x[bad][0]} in row {row}; values must be counts, that is nonnegative "
        f"integers{limit}; {MASK_IT}"
    )


@dataclass(frozen=True)
class SiteShape:
    """
    One observed site in a block.

    - **name** - name of the observed site.
    - **roles** - pairs of (role, name of the cluster site).
    - **feature_shape** - shape of the observed value without its row axis and event.
    - **event_shape** - shape of one observed event; ``()`` but for multivariate ones.
    - **role_shapes** - shape of one feature's parameter in one cluster, for each role:
      ``()``, or for example ``(categories,)``.
    - **masked** - whether some cells are masked.
    """

    name: str
    roles: tuple[tuple[str, str], ...]
    feature_shape: tuple[int, ...]
    event_shape: tuple[int, ...] = ()
    role_shapes: tuple[tuple[int, ...], ...] = ()
    masked: bool = False

    @property
    def num_features(self) -> int:
        return int(np.prod(self.feature_shape, dtype=int))


class Observed(NamedTuple):
    """
    The data of one site.

    - **value** - ``[rows, *feature_shape, *event_shape]``.
    - **mask** - which cells count, ``[rows, *feature_shape]``; None for all.
    - **given** - parameters given by row, each ``[rows or 1, *feature_shape]``.
    """

    value: Array
    mask: Array | None = None
    given: tuple[Array, ...] = ()


class ByView(NamedTuple):
    """
    Features that are in different views, each with clusters of its own.

    - **index** - view of each feature, ``[features]``.
    - **slots** - the numbers of the views, ``[views]``.
    """

    index: Array
    slots: Array

    @classmethod
    def make(cls, index: Array, num_views: int) -> "ByView":
        return cls(index, jnp.arange(num_views, dtype=jnp.int32))


def at_features(k: Array, view: ByView | None) -> Array:
    """A cluster, or one for each view ``[views]``, as the cluster of each feature."""
    return k if view is None else k[view.index]


# From so many elements on XLA leaves a sum on a CPU, and all that it can draw into it,
# to a library for large arrays: scores of 68 reals in 64 clusters take 17 us, not 6.
_LARGE_SUM = 4096


def _by_product(each: Array) -> Array:
    return jnp.tensordot(jnp.ones(each.shape[0], each.dtype), each, 1)


def _by_sum(each: Array) -> Array:
    return each.sum(0)


def sum_features(each: Array, view: ByView | None) -> Array:
    """Sum over features, the first axis; of each view apart, ``[views, ...]``."""
    if view is None:
        if each.ndim < 2 or each.size < _LARGE_SUM:
            return each.sum(0)
        return lax.platform_dependent(each, cpu=_by_product, default=_by_sum)
    return jax.ops.segment_sum(each, view.index, view.slots.shape[0])


class AbstractBlock(ABC):
    """
    All features of one pair, for all clusters: statistics, cached score tables and what
    a Gibbs move does to them. Clusters are the last axis of every array, so that
    scoring a row walks memory in order and unused capacity is a slice away.

    Where features are in different views, a row is in a cluster of each of them: `k`
    is then ``[views]``, and so are scores, ``[views, clusters]``. Statistics are those
    of each feature under the clusters of the view that it is in.
    """

    pair: AbstractConjugatePair
    sites: tuple[SiteShape, ...]

    @property
    def num_features(self) -> int:
        return sum(site.num_features for site in self.sites)

    @property
    def masked(self) -> bool:
        return any(site.masked for site in self.sites)

    @abstractmethod
    def pack(self, hyper: Sequence[Hyper]) -> Any:
        """Hyperparameters of the block from those of each site, each without a cluster
        axis."""

    def repack(self, like: Any, hyper: Sequence[Hyper]) -> Any:
        """`pack`, for statistics that were made under the packed `like`."""
        del like
        return self.pack(hyper)

    def rebase(self, old: Any, new: Any, stats: Any) -> Any:
        """Statistics, made under the packed hyperparameters `old`, as they would be
        under `new`, which `repack` made."""
        del old, new
        return stats

    def apart(self) -> "AbstractBlock":
        """The block, fit for features that are in different views."""
        return self

    @abstractmethod
    def part(
        self, index: int, hyper: Any, stats: Any
    ) -> "tuple[AbstractBlock, Any, Any]":
        """The block of one of the sites alone, and its part of packed
        hyperparameters and of statistics."""

    @abstractmethod
    def row(self, hyper: Any, data: Sequence[Observed], n: Array) -> Any:
        """Row `n` of the observed sites `data`, all features, as `add` and the others
        take it."""

    def _values(self, data: Sequence[Observed], n: Array) -> tuple[Array, Array | None]:
        """Row `n`, ``[features, *event_shape]``, and which of it is not masked."""
        values = _join(
            _row(d.value, n).reshape(-1, *site.event_shape)
            for d, site in zip(data, self.sites, strict=True)
        )
        if not self.masked:
            return values, None
        live = _join(
            jnp.ones(site.num_features, bool)
            if d.mask is None
            else _row(d.mask, n).reshape(-1)
            for d, site in zip(data, self.sites, strict=True)
        )
        return values, live

    @abstractmethod
    def empty(self, hyper: Any, num_clusters: int) -> Any:
        """Statistics of `num_clusters` clusters without rows."""

    @abstractmethod
    def some(self, num: int) -> "AbstractBlock":
        """A block for `num` of the features, whichever, that is :meth:`apart`."""

    @abstractmethod
    def gather_hyper(self, hyper: Any, index: Array) -> Any:
        """Hyperparameters of the features `index` ``[num]``, for :meth:`some`."""

    @abstractmethod
    def gather_row(
        self, hyper: Any, data: Sequence[Observed], n: Array, index: Array, live: Array
    ) -> Any:
        """Row `n` of the features `index`, those not `live` ``[num]`` masked, for
        :meth:`some`; `hyper` is what `gather_hyper` gave."""

    @abstractmethod
    def gather(self, hyper: Any, stats: Any, index: Array, live: Array) -> Any:
        """Statistics of the features `index`, for :meth:`some`; of no rows where not
        `live`. `hyper` is what `gather_hyper` gave."""

    @abstractmethod
    def scatter(self, stats: Any, part: Any, index: Array, live: Array) -> Any:
        """`stats`, with those that are `live` of the features `index` as in `part`."""

    @abstractmethod
    def choose(self, stats: Any, view: Array) -> Any:
        """Statistics of each feature out of those of its view ``[features]``: `stats`
        have a first axis, the views."""

    @abstractmethod
    def reorder(self, stats: Any, order: Array) -> Any:
        """Statistics with the clusters of each feature in the `order` ``[features,
        clusters]``; of a block that is :meth:`apart`."""

    @abstractmethod
    def add(
        self,
        hyper: Any,
        stats: Any,
        x: Any,
        k: Array,
        live: Array,
        view: ByView | None = None,
    ) -> Any:
        """Statistics after row `x` joined cluster `k`; unchanged where not `live`."""

    @abstractmethod
    def merge(self, hyper: Any, a: Any, b: Any) -> Any:
        """Statistics of two clusters (each without the cluster axis) together."""

    @abstractmethod
    def tables(self, hyper: Any, stats: Any) -> Any:
        """Score tables of every cluster, from scratch."""

    # A move takes a row out, scores another, puts that in. What is taken out is set
    # aside and written only with what is put in: XLA copies a whole table at every move
    # when a read can be fused past a write.

    @abstractmethod
    def take(
        self,
        hyper: Any,
        stats: Any,
        x: Any,
        k: Array,
        live: Array,
        view: ByView | None = None,
    ) -> Any:
        """Row `x` taken out of cluster `k` (if `live`), as the next two need it."""

    @abstractmethod
    def score(
        self,
        hyper: Any,
        stats: Any,
        tables: Any,
        taken: Any,
        x: Any,
        view: ByView | None = None,
    ) -> Array:
        """
        Log predictive density of row `x` in every cluster, ``[clusters]``, with `taken`
        out; None if nothing is.
        """

    @abstractmethod
    def put(
        self,
        hyper: Any,
        stats: Any,
        tables: Any,
        taken: Any,
        x: Any,
        k: Array,
        live: Array,
        view: ByView | None = None,
    ) -> tuple[Any, Any]:
        """Statistics and tables with `taken` out and row `x` in cluster `k` (if
        `live`)."""

    @abstractmethod
    def join(
        self, hyper: Any, stats: Any, tables: Any, x: Any, ks: Array, live: Array
    ) -> tuple[Any, Any]:
        """Statistics and tables after row `x` joined each of the different clusters
        `ks` ``[some]``; unchanged where not `live`."""

    def log_marginal(self, hyper: Any, stats: Any) -> Array:
        """Log marginal likelihood of every cluster's rows: ``[clusters]``."""
        return self.log_marginals(hyper, stats).sum(0)

    @abstractmethod
    def log_marginals(self, hyper: Any, stats: Any) -> Array:
        """Log marginal likelihood of each feature's values in every cluster:
        ``[features, clusters]``."""

    @abstractmethod
    def evidence(self, like: Any, hyper: Any, stats: Any, occupied: Array) -> Array:
        """
        Log marginal likelihood of each feature's values in the `occupied` clusters
        (``[clusters]``, or those of each feature, ``[features, clusters]``),
        ``[features]``, under `hyper`, up to a constant that depends on neither `hyper`
        nor what `stats`, made under `like`, are compared with: differences between
        hyperparameters are right to rounding, however many rows there are.
        """

    @abstractmethod
    def draw(self, rng_key: Array, hyper: Any, stats: Any) -> dict[str, Array]:
        """
        A draw of every cluster's parameters given its rows, keyed by the name of the
        cluster site: ``[clusters, *feature_shape, *event_shape]``.
        """

    def unpack(self, packed: Mapping[str, Array]) -> dict[str, Array]:
        """Values by role, features on the second axis, as values by cluster site."""
        values = {}
        start = 0
        for site in self.sites:
            stop = start + site.num_features
            for role, name in site.roles:
                value = packed[role][:, start:stop]
                values[name] = value.reshape(
                    value.shape[:1] + site.feature_shape + value.shape[2:]
                )
            start = stop
        return values


def _row(array: Array, n: Array) -> Array:
    # What is the same for all rows has a row axis of length 1.
    n = n if array.shape[0] > 1 else 0
    return lax.dynamic_index_in_dim(array, n, keepdims=False)


def _join(parts: Iterable[Array]) -> Array:
    parts = list(parts)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@dataclass(frozen=True)
class DenseBlock(AbstractBlock):
    """
    Features whose statistics and tables are each a fixed number of floats or integers.

    Statistics are two arrays ``[statistics, features, clusters]``, of floats and of
    integers, and tables one of floats, so that a move reads and writes one slice of
    each.
    """

    pair: AbstractConjugatePair
    sites: tuple[SiteShape, ...]

    def pack(self, hyper):
        return self._pack_around(None, hyper)

    def repack(self, like, hyper):
        return self._pack_around(like.origin, hyper)

    def part(self, index, hyper, stats):
        start = sum(site.num_features for site in self.sites[:index])
        site = self.sites[index]
        own = slice(start, start + site.num_features)
        return (
            DenseBlock(self.pair, (site,)),
            jax.tree.map(lambda h: h[own], hyper),
            jax.tree.map(lambda s: s[:, own], stats),
        )

    def rebase(self, old, new, stats):
        if type(self.pair).rebase is AbstractConjugatePair.rebase:
            return stats
        unpack = self._layout(old)

        def one(old, new, s):
            return _pack(self.pair.rebase(old, new, unpack(s)))

        over_features = jax.vmap(one, in_axes=(0, 0, -1), out_axes=-1)
        over_clusters = jax.vmap(over_features, in_axes=(None, None, -1), out_axes=-1)
        return over_clusters(old.values, new.values, stats)

    def _pack_around(self, origin, hyper):
        names = hyper[0].keys()
        dtype = jnp.result_type(float)

        def packed(name):
            return _join(
                jnp.asarray(h[name], dtype).reshape(
                    site.num_features, *jnp.shape(h[name])[len(site.feature_shape) :]
                )
                for h, site in zip(hyper, self.sites, strict=True)
            )

        values = {name: packed(name) for name in names}
        if self.pair.location is not None:
            name, _ = self.pair.location
            if origin is None:
                origin = values[name]
            values[name] = values[name] - origin
        return DenseHyper(values, origin)

    def row(self, hyper, data, n):
        x, given, live = self._observed(data, n)
        return self._cells(hyper, x, given, live)

    def _observed(self, data, n):
        x, live = self._values(data, n)
        given = [
            _join(
                jnp.broadcast_to(_row(g, n), site.feature_shape).reshape(-1)
                for g, site in zip(parts, self.sites, strict=True)
            )
            for parts in zip(*(d.given for d in data), strict=True)
        ]
        return x, given, live

    def _cells(self, hyper, x, given, live):
        kind = float if jnp.issubdtype(x.dtype, jnp.floating) else int
        cell = jax.vmap(self.pair.cell)(
            hyper.values, x.astype(jnp.result_type(kind)), *given
        )
        if hyper.origin is not None:
            if isinstance(cell, tuple):
                cell = (cell[0] - hyper.origin, *cell[1:])
            else:
                cell = cell - hyper.origin
        return DenseRow(cell, live)

    def empty(self, hyper, num_clusters):
        column = jax.vmap(lambda h: _pack(self.pair.empty(h)), out_axes=-1)(
            hyper.values
        )
        return jax.tree.map(
            lambda c: jnp.broadcast_to(c[..., None], (*c.shape, num_clusters)), column
        )

    def some(self, num):
        site = self.sites[0]
        return DenseBlock(
            self.pair, (replace(site, name="", feature_shape=(num,), masked=True),)
        )

    def gather_hyper(self, hyper, index):
        return jax.tree.map(lambda h: h[index], hyper)

    def gather_row(self, hyper, data, n, index, live):
        x, given, unmasked = self._observed(data, n)
        live = live if unmasked is None else live & unmasked[index]
        return self._cells(hyper, x[index], [g[index] for g in given], live)

    def gather(self, hyper, stats, index, live):
        nothing = self.empty(hyper, 1)
        return jax.tree.map(
            lambda s, e: jnp.where(live[:, None], s[:, index], e), stats, nothing
        )

    def scatter(self, stats, part, index, live):
        where = jnp.where(live, index, self.num_features)
        return jax.tree.map(
            lambda s, p: s.at[:, where].set(p, mode="drop"), stats, part
        )

    def choose(self, stats, view):
        each = np.arange(self.num_features)
        return jax.tree.map(lambda s: jnp.moveaxis(s[view, :, each], 0, 1), stats)

    def reorder(self, stats, order):
        return jax.tree.map(
            lambda s: jnp.take_along_axis(s, order[None], axis=-1), stats
        )

    def add(self, hyper, stats, x, k, live, view=None):
        k = at_features(k, view)
        column = self._step(self.pair.add, hyper, _read(stats, k), x, live, k)
        if view is None:
            return jax.tree.map(
                lambda s, c: lax.dynamic_update_index_in_dim(s, c, k, axis=-1),
                stats,
                column,
            )
        each = jnp.arange(self.num_features)
        return jax.tree.map(lambda s, c: s.at[:, each, k].set(c), stats, column)

    def merge(self, hyper, a, b):
        unpack = self._layout(hyper)

        def one(h, a, b):
            return _pack(self.pair.merge(h, unpack(a), unpack(b)))

        return jax.vmap(one, in_axes=(0, -1, -1), out_axes=-1)(hyper.values, a, b)

    def tables(self, hyper, stats):
        values, flat = self._flat(hyper, stats)
        table = self._table(hyper._replace(values=values), flat)
        return table.reshape(len(table), self.num_features, -1)

    def take(self, hyper, stats, x, k, live, view=None):
        k_each = at_features(k, view)
        column = _read(stats, k_each)
        column = self._step(self.pair.remove, hyper, column, x, live, k_each)
        return Taken(k, column, _once(self._table, hyper, column))

    def score(self, hyper, stats, tables, taken, x, view=None):
        del stats
        unpack = self._table_layout(hyper)

        def one(table, cell):
            return self.pair.score(unpack(table), cell)

        over_clusters = jax.vmap(one, in_axes=(-1, None))
        each = jax.vmap(over_clusters, in_axes=(1, 0))(tables, x.cell)
        if x.live is not None:
            each = jnp.where(x.live[:, None], each, 0)
        each = sum_features(each, view)
        if taken is None:
            return each
        own = jax.vmap(one, in_axes=(-1, 0))(taken.table, x.cell)
        if x.live is not None:
            own = jnp.where(x.live, own, 0)
        return put_own(each, taken.k, sum_features(own, view))

    def put(self, hyper, stats, tables, taken, x, k, live, view=None):
        was, k = at_features(taken.k, view), at_features(k, view)
        same = k == was
        column = jax.tree.map(
            lambda t, s: jnp.where(same, t, s), taken.column, _read(stats, k)
        )
        column = self._step(self.pair.add, hyper, column, x, live, k)
        table = _once(self._table, hyper, column)
        ks = jnp.stack([was, k], -1)
        each = jnp.arange(self.num_features)[:, None]
        where = (Ellipsis, ks) if view is None else (slice(None), each, ks)

        def write(array, left, joined):
            columns = jnp.stack([jnp.where(same, joined, left), joined], -1)
            return array.at[where].set(columns)

        stats = jax.tree.map(write, stats, taken.column, column)
        return stats, write(tables, taken.table, table)

    def join(self, hyper, stats, tables, x, ks, live):
        def with_row(column):
            column = self._step(self.pair.add, hyper, column, x, live)
            return column, self._table(hyper, column)

        columns = jax.tree.map(lambda s: s.at[..., ks].get(mode="clip"), stats)
        columns, table = jax.vmap(with_row, in_axes=-1, out_axes=-1)(columns)
        stats = jax.tree.map(lambda s, c: s.at[..., ks].set(c), stats, columns)
        return stats, tables.at[..., ks].set(table)

    def log_marginals(self, hyper, stats):
        return self._map(self.pair.log_marginal, hyper, stats).T

    def evidence(self, like, hyper, stats, occupied):
        rebased = self.rebase(like, hyper, stats)
        # The difference is taken by cluster: sums over many rows have few digits left.
        change = self._map(self.pair.log_marginal, hyper, rebased)
        change = change - self._map(self.pair.log_marginal, like, stats)
        # NB: sums over a short last axis are slow.
        live = occupied[:, None] if occupied.ndim == 1 else occupied.T
        return jnp.where(live, change, 0).sum(0)

    def draw(self, rng_key, hyper, stats):
        posterior = self._map(self.pair.posterior, hyper, stats)
        theta = self.pair.theta(posterior, _Sampler(rng_key, self.pair.prior))
        if self.pair.location is not None:
            _, role = self.pair.location
            theta[role] = theta[role] + hyper.origin
        return self.unpack(theta)

    def _map(self, fn, hyper, stats):
        """`fn` of every cluster and feature: ``[clusters, features, ...]``."""
        unpack = self._layout(hyper)

        def one(h, s):
            return fn(h, unpack(s))

        values, flat = self._flat(hyper, stats)
        each = jax.vmap(one, in_axes=(0, -1))(values, flat)

        def unflat(x):
            x = x.reshape(self.num_features, -1, *x.shape[1:])
            return jnp.swapaxes(x, 0, 1)

        return jax.tree.map(unflat, each)

    def _flat(self, hyper, stats):
        """
        Hyperparameters and statistics of every feature and cluster, on one axis.

        XLA's loops over a short last axis are written out, without vector instructions:
        that is slow, and takes long to compile.
        """
        num_clusters = jax.tree.leaves(stats)[0].shape[-1]
        values = jax.tree.map(lambda v: jnp.repeat(v, num_clusters, 0), hyper.values)
        return values, jax.tree.map(lambda s: s.reshape(len(s), -1), stats)

    def _layout(self, hyper):
        return _unpacker(jax.eval_shape(self.pair.empty, _first(hyper.values)))

    def _table_layout(self, hyper):
        def table(h):
            return self.pair.predictive(h, self.pair.empty(h))

        shapes = jax.eval_shape(table, _first(hyper.values))
        unpack = _unpacker(shapes)
        return lambda packed: unpack((packed,))

    def _table(self, hyper, column):
        unpack = self._layout(hyper)

        def one(h, c):
            (packed,) = _pack(self.pair.predictive(h, unpack(c)))
            return packed

        return jax.vmap(one, in_axes=(0, -1), out_axes=-1)(hyper.values, column)

    def _step(self, fn, hyper, column, x, live, k=None):
        """`fn`, which adds or removes, of the statistics of one cluster; of cluster `k`
        in a move."""
        unpack = self._layout(hyper)

        def one(h, c, cell):
            return tuple(map(jnp.asarray, fn(h, unpack(c), cell)))

        def each(column, cell):
            return jax.vmap(one, in_axes=(0, -1, 0))(hyper.values, column, cell)

        args = column, x.cell
        if k is None:
            leaves = each(*args)
        elif self.num_features > _MANY:
            leaves = _once_in_branch(k, each, *args)
        else:
            leaves = _once(each, *args)
        changed = jax.vmap(_pack, out_axes=-1)(leaves)
        if x.live is not None:
            live = live & x.live
        return jax.tree.map(lambda new, old: jnp.where(live, new, old), changed, column)


class DenseHyper(NamedTuple):
    """
    - **values** - hyperparameters by name, ``[features, ...]``.
    - **origin** - subtracted from the values of each feature, ``[features, ...]``;
      None if the pair has no location.
    """

    values: dict[str, Array]
    origin: Array | None


class DenseRow(NamedTuple):
    """
    - **cell** - what the pair keeps of each value, ``[features, ...]``.
    - **live** - which of them are not masked, ``[features]``; None for all.
    """

    cell: Cell
    live: Array | None


class Taken(NamedTuple):
    """
    - **k** - the cluster that a row was taken from.
    - **column** - its statistics without the row, ``[statistics, features]``.
    - **table** - its score table without the row, ``[entries, features]``.
    """

    k: Array
    column: tuple[Array, ...]
    table: Array


def _first(values: Mapping[str, Array]) -> dict[str, Array]:
    return {name: value[0] for name, value in values.items()}


def _pack(leaves: Sequence[Array]) -> tuple[Array, ...]:
    """One vector of the floats and one of the integers, as far as there are any."""
    kinds: dict[Any, list[Array]] = {}
    for leaf in map(jnp.asarray, leaves):
        floating = bool(jnp.issubdtype(leaf.dtype, jnp.floating))
        kinds.setdefault(floating, []).append(leaf)
    return tuple(_vector(kinds[kind]) for kind in (True, False) if kind in kinds)


def _vector(leaves: list[Array]) -> Array:
    if all(leaf.ndim == 0 for leaf in leaves):
        return jnp.stack(leaves)
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def _unpacker(like: Sequence[Any]) -> Callable[[tuple[Array, ...]], tuple[Array, ...]]:
    """The inverse of `_pack`, for leaves of the shapes and types of `like`."""
    floating = [bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in like]

    def unpack(packed):
        vectors = dict(
            zip([k for k in (True, False) if k in floating], packed, strict=True)
        )
        start = {True: 0, False: 0}
        leaves = []
        for kind, leaf in zip(floating, like, strict=True):
            stop = start[kind] + int(np.prod(leaf.shape, dtype=int))
            part = vectors[kind][start[kind] : stop]
            leaves.append(part.reshape(leaf.shape))
            start[kind] = stop
        return tuple(leaves)

    return unpack


def _once(fn: Callable, *args: Any) -> Any:
    """``fn(*args)``, computed once: XLA would fuse `fn` into each of its users instead,
    and there compute it element by element, for every table that is written."""
    return lax.optimization_barrier(fn(*args))


# Of more features than these a branch is faster than a barrier.
_MANY = 32


def _once_in_branch(k: Array, fn: Callable, *args: Any) -> Any:
    """
    :func:`_once` for a cluster `k`, as a branch that is always taken, which XLA does
    not know: that costs 0.3 us, but inside it the whole of `fn` is vectorised (68
    Beta-Binomial columns take 14 us a move with it and 18 without, 16 of them 9.7 and
    8.4).
    """
    # What depends on hyperparameters alone stays outside, where loops compute it once.
    fn = hoist(fn, *args)
    shapes = jax.eval_shape(fn, *args)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.cond(jnp.ravel(k)[0] >= 0, fn, lambda *_: zeros, *args)


def put_own(scores: Array, k: Array, own: Array) -> Array:
    """`scores` ``[..., clusters]`` with those of clusters `k` ``[...]`` replaced."""
    slots = jnp.arange(scores.shape[-1])
    return jnp.where(slots == k[..., None], own[..., None], scores)


def _read(stats: Any, k: Array) -> Any:
    # NB: a gather, which one index would not be. XLA fuses a dynamic slice into all its
    # users, some of them past a later write, and then copies the array at every move.
    if k.ndim > 0:
        each = jnp.arange(k.shape[0])
        return jax.tree.map(lambda s: s.at[:, each, k].get(mode="clip"), stats)
    ks = jnp.stack([k, k])
    return jax.tree.map(lambda s: s.at[..., ks].get(mode="clip")[..., 0], stats)


# --- draws ---------------------------------------------------------------------------


class _Sampler:
    """`SampleFn` that draws; a key for every role."""

    def __init__(self, rng_key: Array, roles: Iterable[str]):
        roles = list(roles)
        keys = variates.split(rng_key, len(roles))
        self._keys = dict(zip(roles, keys, strict=True))

    def __call__(self, role: str, fn: dist.Distribution) -> Array:
        return draw(self._keys[role], fn)


def draw(rng_key: Array, fn: dist.Distribution) -> Array:
    """
    A draw from `fn`, through :func:`loggamma` where gamma variates are needed:
    :func:`jax.random.gamma` takes 0.36 us a variate on a CPU, and every sweep draws the
    parameters of every cluster, so that a table of 1,000 rows would spend most of its
    time there.
    """
    if isinstance(fn, dist.InverseGamma):
        log_value = loggamma(rng_key, jnp.broadcast_to(fn.concentration, fn.shape()))
        return fn.rate * jnp.exp(-log_value)
    if isinstance(fn, dist.Gamma):
        log_value = loggamma(rng_key, jnp.broadcast_to(fn.concentration, fn.shape()))
        return jnp.exp(log_value) / fn.rate
    if isinstance(fn, dist.Beta):
        shape = fn.shape()
        concentration = jnp.stack(
            [
                jnp.broadcast_to(fn.concentration1, shape),
                jnp.broadcast_to(fn.concentration0, shape),
            ]
        )
        one, zero = loggamma(rng_key, concentration)
        info = jnp.finfo(one.dtype)
        # At 0 and 1 the density is zero or infinite, and so are the log odds.
        return jnp.clip(jax.nn.sigmoid(one - zero), info.tiny, 1 - info.epsneg)
    if isinstance(fn, dist.InverseWishart):
        return _inverse_wishart(rng_key, fn)
    if isinstance(fn, dist.Wishart):
        root = _wishart_root(rng_key, fn)
        return root @ root.mT
    if isinstance(fn, dist.VonMises):
        return _von_mises(rng_key, fn)
    if isinstance(fn, dist.Normal):
        return fn.loc + fn.scale * normal(rng_key, fn.shape())
    return fn.sample(rng_key)


def _bartlett(rng_key: Array, degrees: Array, size: int) -> Array:
    """
    Lower triangular factors ``[..., p, p]`` of standard Wishart variates with `degrees`
    of freedom ``[...]`` (Bartlett's decomposition): normal below the diagonal, and on
    it the roots of chi-square variates with ``degrees - i`` degrees of freedom.
    """
    key_diagonal, key_rest = variates.split(rng_key)
    left = degrees[..., None] - jnp.arange(size)
    # A chi-square variate is two gamma variates of half as many degrees.
    diagonal = jnp.sqrt(2.0) * jnp.exp(0.5 * loggamma(key_diagonal, left / 2))
    rest = normal(key_rest, (*left.shape, size)).astype(diagonal.dtype)
    rest = jnp.tril(rest, -1)
    return rest + diagonal[..., None] * jnp.eye(size, dtype=diagonal.dtype)


def _wishart_root(rng_key: Array, fn: dist.Wishart) -> Array:
    shape = fn.batch_shape
    scale = jnp.broadcast_to(fn.scale_tril, fn.shape())
    degrees = jnp.broadcast_to(fn.concentration, shape)
    return scale @ _bartlett(rng_key, degrees, scale.shape[-1])


def _inverse_wishart(rng_key: Array, fn: dist.InverseWishart) -> Array:
    # The inverse of a Wishart variate of scale matrix S^-1: with S = L L' and the
    # factor A of a standard one, X = (L A^-T) (L A^-T)'.
    root = jnp.broadcast_to(jnp.linalg.cholesky(fn.scale_matrix), fn.shape())
    degrees = jnp.broadcast_to(fn.concentration, fn.batch_shape)
    factor = _bartlett(rng_key, degrees, root.shape[-1])
    # NB: solved from the left: A Y = L', of which X = Y' Y.
    half = solve_triangular(factor, root.mT, lower=True)
    return half.mT @ half


def _von_mises(rng_key: Array, fn: dist.VonMises) -> Array:
    """
    Rejection from a wrapped Cauchy (Best and Fisher, 1979), written in 1 - cos of the
    angle: NumPyro's goes through the cosine itself, which leaves few distinct angles in
    float32 once the concentration is large.
    """
    shape = fn.shape()
    loc = jnp.broadcast_to(fn.loc, shape)
    kappa = jnp.broadcast_to(fn.concentration, shape).astype(loc.dtype)
    kappa = jnp.maximum(kappa, 1e-30)
    root = jnp.sqrt(1 + 4 * kappa**2)
    r = 1 + root
    rho = 2 * kappa / (r + jnp.sqrt(2 * r))
    # 1 - rho, which is small where kappa is large.
    complement = (jnp.sqrt(2 * r) - 1 - 1 / (2 * kappa + root)) / (2 * kappa)
    complement = jnp.where(kappa < 1, 1 - rho, complement)
    excess = complement**2 / (2 * rho)

    def attempt(key):
        u = open_uniform(key, (3, *shape)).astype(loc.dtype)
        sin, cos = jnp.sin(jnp.pi / 2 * u[0]), jnp.cos(jnp.pi / 2 * u[0])
        # One minus the cosine of the angle.
        gap = excess * 2 * sin**2 / (excess + 2 * cos**2)
        y = kappa * (excess + gap)
        accepted = jnp.log(y / u[1]) + 1 - y >= 0
        sign = jnp.where(u[2] < 0.5, -1, 1)
        angle = sign * 2 * jnp.arcsin(jnp.sqrt(jnp.minimum(gap / 2, 1)))
        return angle, accepted

    def unfinished(carry):
        return ~carry[1].all()

    def retry(carry):
        angle, done, i = carry
        proposed, accepted = attempt(fold_in(rng_key, i))
        return jnp.where(done, angle, proposed), done | accepted, i + 1

    # What is not a concentration gives NaN, instead of a loop that does not end.
    invalid = ~jnp.isfinite(kappa)
    start = jnp.where(invalid, jnp.nan, 0), invalid, jnp.int32(0)
    angle, _, _ = lax.while_loop(unfinished, retry, start)
    return (loc + angle + jnp.pi) % (2 * jnp.pi) - jnp.pi


def loggamma(rng_key: Array, concentration: Array) -> Array:
    """
    The logarithm of standard gamma variates, shaped like `concentration`.

    Rejection from a transformed normal, all variates at once (Marsaglia and Tsang,
    2000); below 1 by ``gamma(a) = gamma(a + 1) * uniform ** (1 / a)``,
    in logarithms, so that a small concentration does not underflow.
    All variates are tried once; those that were rejected (at most 5%) are gathered and
    tried until none is left.

    **References:**

    1. *A Simple Method for Generating Gamma Variables*, G. Marsaglia, W. W. Tsang
       (2000)
    """
    shape = jnp.shape(concentration)
    a = jnp.ravel(jnp.asarray(concentration, jnp.result_type(float, concentration)))
    size = a.size

    def attempt(i, a):
        # One call for all random numbers: each takes long to compile.
        u = open_uniform(fold_in(rng_key, i), (2, a.size)).astype(a.dtype)
        boosted = a < 1
        value, accepted, log_u = _propose(u, jnp.where(boosted, a + 1, a))
        return value + jnp.where(boosted, log_u / a, 0), accepted

    # What is not a concentration gives NaN, instead of a loop that does not end.
    invalid = ~((a > 0) & jnp.isfinite(a))
    value, accepted = attempt(0, a)
    value = jnp.where(invalid, jnp.nan, value)
    window = -(-size // 16)

    def unfinished(carry):
        return ~jnp.all(carry[1])

    def gather_rejected(done):
        rank = _ranks(~done)
        index = jnp.full(window, size, jnp.int32)
        return index.at[jnp.where(done, window, rank)].set(
            jnp.arange(size, dtype=jnp.int32), mode="drop"
        )

    def retry(carry):
        value, done, index, i = carry
        # `size`, past the end, stands for none.
        left = ~done.at[index].get(mode="fill", fill_value=True)
        index = lax.cond(
            left.any(),
            lambda: jnp.where(left, index, size),
            lambda: gather_rejected(done),
        )
        proposed, accepted = attempt(i, a.at[index].get(mode="clip"))
        where = jnp.where(accepted, index, size)
        value = value.at[where].set(proposed, mode="drop")
        return value, done.at[where].set(True, mode="drop"), index, i + 1

    index = jnp.full(window, size, jnp.int32)
    start = value, accepted | invalid, index, jnp.ones((), jnp.int32)
    return lax.while_loop(unfinished, retry, start)[0].reshape(shape)


def _ranks(which):
    """Positions of the true elements of `which` among them, in some order."""
    # NB: not a cumulative sum, for which XLA compiles a kernel for every power of two.
    size = which.shape[0]
    length = max(1, round(size**0.5))
    lanes = jnp.pad(which, (0, -size % length)).reshape(length, -1)

    def count(before, row):
        return before + row, before

    start = jnp.zeros(lanes.shape[1], jnp.int32)
    total, within = lax.scan(count, start, lanes.astype(jnp.int32))
    _, first = lax.scan(count, jnp.zeros((), jnp.int32), total)
    return (within + first).reshape(-1)[:size]


def _propose(u, a):
    """
    Logarithms of proposed gamma variates for ``a >= 1``, which of them are accepted,
    and for those the logarithm of another uniform variate; `u` ``[2, n]`` is uniform on
    (0, 1).
    """
    d = a - 1 / 3
    tiny = jnp.finfo(d.dtype).tiny
    x = normal_quantile(u[0])
    w = x / jnp.sqrt(9 * d)
    log_root = jnp.log1p(jnp.maximum(w, tiny - 1))
    # x^2 / 2 + d - d v + d log(v) with v = (1 + w)^3, without the terms that cancel:
    # at large `d` all of them are about `d`, and what is left is less than one.
    near = jnp.abs(w) < 0.1
    series = jnp.zeros_like(w)
    for power in range(11, 3, -1):
        series = series * w + (-1) ** (power + 1) / power
    far = log_root - w + w * w / 2 - w**3 / 3
    log_ratio = 3 * d * jnp.where(near, series * w**4, far)
    # Given that it is below the acceptance probability, u[1] is uniform there.
    log_u = jnp.log(u[1]) - jnp.minimum(log_ratio, 0)
    return jnp.log(d) + 3 * log_root, (log_u < 0) & (w > -1), log_u
