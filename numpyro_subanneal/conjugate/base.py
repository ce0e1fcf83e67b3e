# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What a conjugate pair states, and how many features of one pair are packed.

A *pair* is the scalar case: one feature, one cluster. A *block* is what the Gibbs
moves work on: all features of all sites of one pair, for every cluster at once. The
author of a pair writes the first; :class:`DenseBlock` makes the second out of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import erfinv
import numpy as np

import numpyro.distributions as dist

from numpyro_subanneal.typing import Array

Hyper: TypeAlias = Mapping[str, Array]
"""Hyperparameters of the prior by name, as the pair itself names them."""

Theta: TypeAlias = Mapping[str, Array]
"""Cluster parameters by role, for example ``{"variance": ..., "loc": ...}``."""

Statistics: TypeAlias = tuple[Array, ...]
"""Sufficient statistics of one feature in one cluster."""

Table: TypeAlias = tuple[Array, ...]
"""All that the predictive density of one feature in one cluster needs."""

SampleFn: TypeAlias = Callable[[str, dist.Distribution], Array]
"""Called as ``sample(role, distribution)``; returns the value of that role."""


class AbstractConjugatePair(ABC):
    """
    A likelihood and the prior under which its parameters integrate out exactly.

    Methods see *one* feature and *one* cluster: a value ``x`` is a scalar, a statistic
    is a tuple of scalars. They must be written in :mod:`jax.numpy`, without branching
    on values, and finite for the empty statistic. Shapes beyond the scalar are the
    business of the block, which maps over features and clusters.

    - **likelihood** - the NumPyro distributions of an observed site, by base type.
    - **prior** - role -> NumPyro distribution of the cluster site that plays it.
    - **form** - one sentence that says how the prior and the likelihood are written;
      it ends the message when a model is refused.
    - **positive** - names of the hyperparameters that must be positive.
    - **vectors** - names of the hyperparameters that have the event shape of the
      cluster site, such as a Dirichlet's concentration.
    - **location** - the hyperparameter and the role that move along when a constant is
      added to the values, if there are such. The block then keeps values as
      differences from that hyperparameter, so that a large origin costs no digits.
    """

    likelihood: ClassVar[tuple[type[dist.Distribution], ...]]
    prior: ClassVar[Mapping[str, type[dist.Distribution]]]
    form: ClassVar[str]
    positive: ClassVar[frozenset[str]] = frozenset()
    vectors: ClassVar[frozenset[str]] = frozenset()
    location: ClassVar[tuple[str, str] | None] = None

    # --- reading a model -------------------------------------------------------

    @abstractmethod
    def parameters(self, theta: Theta) -> dict[str, Array]:
        """
        Arguments of the likelihood, by attribute name of the NumPyro distribution,
        that cluster parameters `theta` stand for (elementwise).
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

    def data_error(self, x: np.ndarray, hyper: Mapping[str, np.ndarray]) -> str | None:
        """
        What is wrong with the observed column `x` (``[rows]``), or None. The message
        continues a sentence whose subject is the column.
        """
        del hyper
        bad = ~np.isfinite(x)
        if bad.any():
            row = int(np.argmax(bad))
            return (
                f"has the value {x[row]} in row {row}; leave out rows with such cells"
            )
        return None

    # --- the scalar case ---------------------------------------------------------

    @abstractmethod
    def theta(self, hyper: Hyper, sample: SampleFn) -> dict[str, Array]:
        """
        The prior as a generative program: call ``sample(role, distribution)`` for each
        role in turn and return the values.
        """

    @abstractmethod
    def empty(self, hyper: Hyper) -> Statistics:
        """The statistics of no values."""

    @abstractmethod
    def add(self, stat: Statistics, x: Array) -> Statistics:
        """The statistics with `x` added."""

    @abstractmethod
    def remove(self, stat: Statistics, x: Array) -> Statistics:
        """The statistics with `x`, which was added before, taken out."""

    @abstractmethod
    def merge(self, a: Statistics, b: Statistics) -> Statistics:
        """The statistics of the values of `a` and `b` together."""

    @abstractmethod
    def posterior(self, hyper: Hyper, stat: Statistics) -> dict[str, Array]:
        """Hyperparameters of the posterior, of the same form as those of the prior."""

    @abstractmethod
    def log_marginal(self, hyper: Hyper, stat: Statistics) -> Array:
        """Log marginal likelihood of the values that gave `stat`, in nats."""

    @abstractmethod
    def predictive(self, hyper: Hyper, stat: Statistics) -> Table:
        """The part of the log predictive density that depends on `stat` alone."""

    @abstractmethod
    def score(self, table: Table, x: Array) -> Array:
        """Log predictive density at `x`, in nats, given ``predictive(hyper, stat)``."""

    # --- packing -------------------------------------------------------------------

    def block(self, sites: "Sequence[SiteShape]") -> "AbstractBlock":
        """The block that packs observed `sites` of this pair."""
        return DenseBlock(self, tuple(sites))


@dataclass(frozen=True)
class SiteShape:
    """
    One observed site in a block.

    - **name** - name of the observed site.
    - **roles** - pairs of (role, name of the cluster site).
    - **feature_shape** - shape of the observed value without its row axis.
    - **event_shape** - shape of one feature's parameter in one cluster: ``()``, or
      ``(categories,)``.
    """

    name: str
    roles: tuple[tuple[str, str], ...]
    feature_shape: tuple[int, ...]
    event_shape: tuple[int, ...] = ()

    @property
    def num_features(self) -> int:
        return int(np.prod(self.feature_shape, dtype=int))


class AbstractBlock(ABC):
    """
    All features of one pair, for all clusters: statistics, cached score tables and what
    a Gibbs move does to them. Clusters are the last axis of every array, so that
    scoring a row walks memory in order and unused capacity is a slice away.
    """

    pair: AbstractConjugatePair
    sites: tuple[SiteShape, ...]

    @abstractmethod
    def pack(self, hyper: Sequence[Hyper]) -> Any:
        """Hyperparameters of the block from those of each site, each without a cluster
        axis."""

    def row(self, hyper: Any, data: Sequence[Array], n: Array) -> Array:
        """Row `n` of the observed sites `data`, all features: ``[features]``."""
        del hyper
        cells = [
            lax.dynamic_index_in_dim(x, n, keepdims=False).reshape(-1) for x in data
        ]
        return cells[0] if len(cells) == 1 else jnp.concatenate(cells)

    @abstractmethod
    def empty(self, hyper: Any, num_clusters: int) -> Any:
        """Statistics of `num_clusters` clusters without rows."""

    @abstractmethod
    def add(self, stats: Any, x: Array, k: Array, live: Array) -> Any:
        """Statistics after row `x` joined cluster `k`; unchanged where not `live`."""

    @abstractmethod
    def tables(self, hyper: Any, stats: Any) -> Any:
        """Score tables of every cluster, from scratch."""

    # A move takes a row out, scores another, puts that in. What is taken out is set
    # aside and written only with what is put in: XLA copies a whole table at every move
    # when a read can be fused past a write.

    @abstractmethod
    def take(self, hyper: Any, stats: Any, x: Array, k: Array, live: Array) -> Any:
        """Row `x` taken out of cluster `k` (if `live`), as the next two need it."""

    @abstractmethod
    def score(self, hyper: Any, stats: Any, tables: Any, taken: Any, x: Array) -> Array:
        """
        Log predictive density of row `x` in every cluster, ``[clusters]``, with `taken`
        out.
        """

    @abstractmethod
    def put(
        self,
        hyper: Any,
        stats: Any,
        tables: Any,
        taken: Any,
        x: Array,
        k: Array,
        live: Array,
    ) -> tuple[Any, Any]:
        """Statistics and tables with `taken` out and row `x` in cluster `k` (if
        `live`)."""

    @abstractmethod
    def log_marginal(self, hyper: Any, stats: Any) -> Array:
        """Log marginal likelihood of every cluster's rows: ``[clusters]``."""

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


@dataclass(frozen=True)
class DenseBlock(AbstractBlock):
    """
    Features whose statistics and tables are each a fixed number of floats.

    Statistics are one array ``[statistics, features, clusters]`` and tables another, so
    that a move reads and writes one slice of each.
    """

    pair: AbstractConjugatePair
    sites: tuple[SiteShape, ...]

    @property
    def num_features(self) -> int:
        return sum(site.num_features for site in self.sites)

    def pack(self, hyper):
        names = hyper[0].keys()
        dtype = jnp.result_type(float)
        packed = {
            name: jnp.concatenate(
                [
                    jnp.broadcast_to(
                        jnp.asarray(h[name], dtype), site.feature_shape
                    ).reshape(-1)
                    for h, site in zip(hyper, self.sites, strict=True)
                ]
            )
            for name in names
        }
        origin = jnp.zeros(self.num_features, dtype)
        if self.pair.location is not None:
            name, _ = self.pair.location
            origin = packed[name]
            packed[name] = jnp.zeros_like(origin)
        return DenseHyper(packed, origin)

    def row(self, hyper, data, n):
        x = AbstractBlock.row(self, hyper, data, n).astype(jnp.result_type(float))
        return x - hyper.origin

    def empty(self, hyper, num_clusters):
        column = jnp.stack(jax.vmap(self.pair.empty)(hyper.values))
        return jnp.broadcast_to(column[..., None], (*column.shape, num_clusters))

    def add(self, stats, x, k, live):
        column = self._step(self.pair.add, _read(stats, k), x, live)
        return lax.dynamic_update_index_in_dim(stats, column, k, axis=-1)

    def tables(self, hyper, stats):
        return jax.vmap(lambda s: self._table(hyper, s), in_axes=-1, out_axes=-1)(stats)

    def take(self, hyper, stats, x, k, live):
        column = self._step(self.pair.remove, _read(stats, k), x, live)
        return Taken(k, column, self._table(hyper, column))

    def score(self, hyper, stats, tables, taken, x):
        del hyper, stats
        over_clusters = jax.vmap(self.pair.score, in_axes=(-1, None))
        each = jax.vmap(over_clusters)(tuple(tables), x).sum(0)
        own = jax.vmap(self.pair.score)(tuple(taken.table), x).sum()
        return jnp.where(jnp.arange(each.shape[0]) == taken.k, own, each)

    def put(self, hyper, stats, tables, taken, x, k, live):
        same = k == taken.k
        column = jnp.where(same, taken.column, _read(stats, k))
        column = self._step(self.pair.add, column, x, live)
        table = self._table(hyper, column)
        ks = jnp.stack([taken.k, k])

        def write(array, left, joined):
            columns = jnp.stack([jnp.where(same, joined, left), joined], -1)
            return array.at[..., ks].set(columns)

        stats = write(stats, taken.column, column)
        return stats, write(tables, taken.table, table)

    def log_marginal(self, hyper, stats):
        return self._map(self.pair.log_marginal, hyper, stats).sum(0)

    def draw(self, rng_key, hyper, stats):
        posterior = self._map(self.pair.posterior, hyper, stats)
        posterior = jax.tree.map(jnp.transpose, posterior)
        theta = self.pair.theta(posterior, _Sampler(rng_key, self.pair.prior))
        if self.pair.location is not None:
            _, role = self.pair.location
            theta[role] = theta[role] + hyper.origin
        return self.unpack(theta)

    def _map(self, fn, hyper, stats):
        over_clusters = jax.vmap(fn, in_axes=(None, -1), out_axes=-1)
        return jax.vmap(over_clusters)(hyper.values, tuple(stats))

    def _table(self, hyper, column):
        table = jax.vmap(self.pair.predictive)(hyper.values, tuple(column))
        return jnp.stack(table)

    def _step(self, fn, column, x, live):
        changed = jnp.stack(jax.vmap(fn)(tuple(column), x))
        return jnp.where(live, changed, column)


class DenseHyper(NamedTuple):
    """
    - **values** - hyperparameters by name, ``[features]``.
    - **origin** - subtracted from the values of each feature, ``[features]``.
    """

    values: dict[str, Array]
    origin: Array


class Taken(NamedTuple):
    """
    - **k** - the cluster that a row was taken from.
    - **column** - its statistics without the row, ``[statistics, features]``.
    - **table** - its score table without the row, ``[entries, features]``.
    """

    k: Array
    column: Array
    table: Array


def _read(array: Array, k: Array) -> Array:
    # NB: a gather, which one index would not be. XLA fuses a dynamic slice into all its
    # users, some of them past a later write, and then copies the array at every move.
    return array.at[..., jnp.stack([k, k])].get(mode="clip")[..., 0]


# --- draws ---------------------------------------------------------------------------


class _Sampler:
    """`SampleFn` that draws; a key for every role."""

    def __init__(self, rng_key: Array, roles: Iterable[str]):
        roles = list(roles)
        keys = random.split(rng_key, len(roles))
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
    return fn.sample(rng_key)


def loggamma(rng_key: Array, concentration: Array) -> Array:
    """
    The logarithm of standard gamma variates, shaped like `concentration`.

    Rejection from a transformed normal, all variates at once: Marsaglia and Tsang
    (2000), section 4; below 1 by ``gamma(a) = gamma(a + 1) * uniform ** (1 / a)``,
    ibid. section 6, in logarithms, so that a small concentration does not underflow.
    All variates are tried once, a window at a time; those that were rejected (at most
    5%) are gathered and tried until none is left.

    **References:**

    1. *A Simple Method for Generating Gamma Variables*, G. Marsaglia, W. W. Tsang
       (2000)
    """
    shape = jnp.shape(concentration)
    a = jnp.ravel(concentration)
    size = a.size
    num_windows = 8 if size >= 1024 else 1
    window = -(-size // num_windows)
    place = jnp.arange(window, dtype=jnp.int32)

    def gather_rejected(done):
        rank = lax.associative_scan(jnp.add, (~done).astype(jnp.int32)) - 1
        index = jnp.full(window, size, jnp.int32)
        where = jnp.where(done, window, rank)
        return index.at[where].set(jnp.arange(size, dtype=jnp.int32), mode="drop")

    def unfinished(carry):
        return ~jnp.all(carry[1])

    def attempt(carry):
        value, done, index, i = carry
        tried = done.at[index].get(mode="fill", fill_value=True).all()
        index = lax.cond(
            i < num_windows,
            lambda: i * window + place,
            lambda: lax.cond(
                tried | (i == num_windows),
                lambda: gather_rejected(done),
                lambda: index,
            ),
        )
        each = a.at[index].get(mode="clip")
        # One call for all random numbers: each takes long to compile.
        u = random.uniform(
            random.fold_in(rng_key, i),
            (3, window),
            a.dtype,
            minval=jnp.finfo(a.dtype).tiny,
        )
        boosted = each < 1
        proposed, accepted = _propose(u[:2], jnp.where(boosted, each + 1, each))
        proposed = proposed + jnp.where(boosted, jnp.log(u[2]) / each, 0)
        accepted = accepted & ~done.at[index].get(mode="fill", fill_value=True)
        where = jnp.where(accepted, index, size)
        value = value.at[where].set(proposed, mode="drop")
        return value, done.at[where].set(True, mode="drop"), index, i + 1

    # What is not a concentration gives NaN, instead of a loop that does not end.
    invalid = ~((a > 0) & jnp.isfinite(a))
    value = jnp.where(invalid, jnp.nan, jnp.zeros_like(a))
    start = value, invalid, place, jnp.zeros((), jnp.int32)
    return lax.while_loop(unfinished, attempt, start)[0].reshape(shape)


def _propose(u, a):
    """Logarithms of proposed gamma variates for ``a >= 1``, and which are accepted; `u`
    ``[2, n]`` is uniform on (0, 1)."""
    d = a - 1 / 3
    tiny = jnp.finfo(d.dtype).tiny
    low = jnp.nextafter(jnp.asarray(-1, d.dtype), jnp.asarray(0, d.dtype))
    x = jnp.sqrt(2).astype(d.dtype) * erfinv(jnp.maximum(2 * u[0] - 1, low))
    root = 1 + x / jnp.sqrt(9 * d)
    log_v = 3 * jnp.log(jnp.maximum(root, tiny))
    accepted = jnp.log(u[1]) < 0.5 * x * x + d - d * root**3 + d * log_v
    return jnp.log(d) + log_v, accepted & (root > 0)
