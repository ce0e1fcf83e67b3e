# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Several partitions of the same rows, each for some of the features.

A *view* is a partition of the rows, of which some features' cells are the likelihood.
The views of a site of the model that a latent site partitions the features into are
exchangeable, and there are as many of them as can be represented; one without features
is *vacant*.

Arrays only. The views of all sites are laid end to end; where nothing else is said, a
view is its position among them.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_subanneal.conjugate.base import AbstractBlock, ByView
from numpyro_subanneal.distributions import PartitionDistribution
from numpyro_subanneal.typing import Array


@partial(jax.tree_util.register_dataclass, data_fields=["priors"], meta_fields=[])
@dataclass(frozen=True)
class ViewPriors:
    """
    Priors of the rows' partitions: of each site one, its parameters ``[views, ...]``.
    """

    priors: tuple[PartitionDistribution, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(jax.tree.leaves(p)[0].shape[0] for p in self.priors)

    def take(self, active: Array, sizes: tuple[int, ...]) -> "ViewPriors":
        """Those of the `active` views, so many of each site."""
        found = []
        offset = start = 0
        for prior, old, new in zip(self.priors, self.sizes, sizes, strict=True):
            own = active[start : start + new] - offset
            found.append(jax.tree.map(lambda x, own=own: x[own], prior))
            offset, start = offset + old, start + new
        return ViewPriors(tuple(found))

    def of_view(self, site: int, view: Array) -> PartitionDistribution:
        """That of one view, by its position in the site."""
        return jax.tree.map(lambda x: x[view], self.priors[site])

    def of_views(self, site: int, views: Array) -> "ViewPriors":
        """Those of some views of one site, by their positions in it ``[some]``."""
        return ViewPriors((self.of_view(site, views),))

    def log_weight_existing(self, counts: Array) -> Array:
        return self._each(lambda p, c: p.log_weight_existing(c), counts)

    def log_weight_new(self, num_clusters: Array, num_rows: Array) -> Array:
        return self._each(
            lambda p, k, n: p.log_weight_new(k, n), num_clusters, num_rows
        )

    def log_eppf(self, counts: Array) -> Array:
        """Of each view, ``[views]``."""
        return self._each(lambda p, c: p.log_eppf(c), counts)

    def _each(self, fn, *args):
        parts = []
        start = 0
        for prior, size in zip(self.priors, self.sizes, strict=True):
            own = [x[start : start + size] for x in args]
            parts.append(jax.vmap(fn)(prior, *own))
            start += size
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@dataclass(frozen=True)
class Membership:
    """
    Which partition of the rows each feature of a block, in its order, is indexed by.

    - **partition** - position of its site.
    - **element** - position in the site that partitions features into views; -1 if
      there is none.
    - **view** - the view's position in its site, where it is known; else -1.
    """

    partition: tuple[int, ...]
    element: tuple[int, ...]
    view: tuple[int, ...]


class Seats(NamedTuple):
    """
    Which views are occupied, compactly.

    - **active** - positions of so many views, the occupied ones among them.
    - **occupied** - whether they are.
    - **views** - for each block, which of them its features are in.
    """

    active: Array
    occupied: Array
    views: tuple[ByView, ...]


@dataclass(frozen=True)
class Layout:
    """
    - **sizes** - number of views of each site.
    - **num_elements** - what is partitioned into them: so many; 0 if nothing is.
    - **memberships** - of each block's features.
    """

    sizes: tuple[int, ...]
    num_elements: tuple[int, ...]
    memberships: tuple[Membership, ...]

    @property
    def num_views(self) -> int:
        return sum(self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First view of each site."""
        stops = np.cumsum(self.sizes)
        return tuple(int(n) for n in stops - self.sizes)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Numbers of views of a site for which moves are compiled."""
        ladder = []
        width = 8
        while width < max(self.sizes):
            ladder.append(width)
            width *= 2
        return (*ladder, max(self.sizes))

    def narrowed(self, width: int) -> tuple[int, ...]:
        """Number of views of each site where no more than `width` are occupied."""
        return tuple(min(size, width) for size in self.sizes)

    def index(self, labels: tuple[Array, ...]) -> tuple[Array, ...]:
        """The view of each block's features, given `labels` of the elements of each
        site."""
        found = []
        for m in self.memberships:
            index = np.asarray(m.view) + np.asarray(self.offsets)[list(m.partition)]
            index = jnp.asarray(index, jnp.int32)
            for site, own in enumerate(labels):
                mine = (np.asarray(m.partition) == site) & (np.asarray(m.element) >= 0)
                if mine.any():
                    element = np.where(mine, m.element, 0)
                    seat = own[element] + self.offsets[site]
                    index = jnp.where(mine, seat, index)
            found.append(index)
        return tuple(found)

    def spread_out(self) -> tuple[Array, ...]:
        """Labels with as many views occupied as there can be."""
        return tuple(
            jnp.arange(num, dtype=jnp.int32) % size
            for num, size in zip(self.num_elements, self.sizes, strict=True)
        )

    def num_features(self, labels: tuple[Array, ...]) -> Array:
        """Number of features in each view, those that are nowhere observed too."""
        counts = jnp.zeros(self.num_views, jnp.int32)
        for index in self.index(labels):
            counts = counts.at[index].add(1)
        for site, own in enumerate(labels):
            counts = counts.at[own + self.offsets[site]].add(1)
        return counts

    def num_elements_in(self, site: int, labels: tuple[Array, ...]) -> Array:
        """Number of elements of a site in each of its views."""
        return jnp.zeros(self.sizes[site], jnp.int32).at[labels[site]].add(1)

    def seats(self, labels: tuple[Array, ...], width: int) -> Seats:
        """The occupied views, of which no site has more than `width`."""
        occupied = self.num_features(labels) > 0
        sizes = self.narrowed(width)
        parts = []
        for offset, size, new in zip(self.offsets, self.sizes, sizes, strict=True):
            own = occupied[offset : offset + size]
            parts.append(jnp.argsort(~own, stable=True)[:new] + offset)
        active = jnp.concatenate(parts).astype(jnp.int32)
        place = jnp.zeros(self.num_views, jnp.int32)
        place = place.at[active].set(jnp.arange(len(active), dtype=jnp.int32))
        views = tuple(
            ByView.make(place[index], sum(sizes)) for index in self.index(labels)
        )
        return Seats(active, occupied[active], views)

    def most_occupied(self, labels: tuple[Array, ...]) -> Array:
        """Number of occupied views of the site that has most."""
        occupied = self.num_features(labels) > 0
        counts = [
            occupied[offset : offset + size].sum(dtype=jnp.int32)
            for offset, size in zip(self.offsets, self.sizes, strict=True)
        ]
        return jnp.max(jnp.stack(counts))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["index", "live"],
    meta_fields=["whole", "block"],
)
@dataclass(frozen=True)
class SomeFeatures:
    """
    A block of some features of another, which may be others at every call.

    - **whole** - the other block.
    - **block** - one for so many features.
    - **index** - which they are, ``[num]``.
    - **live** - whether there is such a feature; else all its cells are masked.
    """

    whole: AbstractBlock
    block: AbstractBlock
    index: Array
    live: Array

    @classmethod
    def of(cls, component: Any, chosen: Array, num: int) -> Any:
        """`component` with those of its features that are `chosen` ``[features]``, at
        most `num`."""
        whole = component.block
        index = jnp.argsort(~chosen, stable=True)[:num].astype(jnp.int32)
        block = cls(whole, whole.some(num), index, chosen[index])
        return component._replace(
            block=block, hyper=whole.gather_hyper(component.hyper, index)
        )

    def row(self, hyper: Any, data: Any, n: Array) -> Any:
        return self.whole.gather_row(hyper, data, n, self.index, self.live)

    def statistics(self, hyper: Any, stats: Any) -> Any:
        """Those of these features, out of those of all."""
        return self.whole.gather(hyper, stats, self.index, self.live)

    def put_back(self, stats: Any, part: Any) -> Any:
        """Those of all features, with these as in `part`."""
        return self.whole.scatter(stats, part, self.index, self.live)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.block, name)


def first_appearance(labels: Array, size: int) -> Array:
    """
    The labels, below `size`, in the order of the first element of each; those without
    elements come last, in their order.
    """
    num = labels.shape[0]
    first = jnp.full(size, num, jnp.int32)
    first = first.at[labels].min(jnp.arange(num, dtype=jnp.int32))
    return jnp.argsort(first, stable=True).astype(jnp.int32)
