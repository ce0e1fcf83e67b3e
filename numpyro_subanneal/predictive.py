# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""Predictive densities of rows and cells, given the assignments of a table.

Arrays only, and one draw at a time. Cluster parameters are integrated out: in cluster
`k` of a view, a new row has the density of the collapsed move
(:mod:`numpyro_subanneal.rows`), ``weight(n_k) * p(x | rows of k)``, and one cluster
more than is occupied stands for a new one. Given its clusters the cells of a row are
independent, so that everything asked of a row follows from two arrays: the log
predictive density of each of its cells in every cluster, ``[features, K]``, and the log
probability of every cluster of each view, ``[views, K]``.

For a row of the table itself, the row is taken out of its clusters first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp

import numpyro.distributions as dist
from numpyro.distributions.discrete import MultinomialProbs

from numpyro_subanneal.conjugate.base import (
    AbstractBlock,
    ByView,
    Observed,
    draw,
)
from numpyro_subanneal.rows import Component, Prior, collect
from numpyro_subanneal.typing import Array
from numpyro_subanneal.views import Layout
from numpyro_subanneal.weights import LabelledPrior

Data = Sequence[Sequence[Observed]]
"""What is observed of each site of each block."""


class Trained(NamedTuple):
    """
    A table under one draw of its assignments.

    - **prior** - of the assignments.
    - **blocks** - of features, every one with masks and apart.
    - **hyper**, **stats**, **tables** - of each of them.
    - **given** - known parameters of the likelihood of each site, the same for all
      rows, by name: ``[*feature_shape, ...]``.
    - **z** - clusters of the rows, ``[N, views]``.
    - **counts** - sizes of the clusters, ``[views, K]``.
    - **view** - view of each feature, blocks in turn, ``[features]``.
    """

    prior: Prior
    blocks: tuple[AbstractBlock, ...]
    hyper: tuple[Any, ...]
    stats: tuple[Any, ...]
    tables: tuple[Any, ...]
    given: Mapping[str, Mapping[str, Array]]
    z: Array
    counts: Array
    view: Array


def train(
    prior: Prior,
    components: Sequence[Component],
    given: Mapping[str, Mapping[str, Array]],
    z: Array,
    labels: tuple[Array, ...],
    num_clusters: int,
    layout: Layout | None,
) -> Trained:
    """
    Count the statistics of a table.

    :param prior: of the assignments.
    :param components: blocks that have masks and are apart, and their data.
    :param given: see :class:`Trained`.
    :param z: assignments ``[N]`` or ``[N, views]``.
    :param labels: views of the elements of each site of views.
    :param int num_clusters: more than are occupied in any view, unless the prior is of
        so many components.
    :param layout: of features in views, if they are.
    """
    clusters = collect(components, z, num_clusters, layout, labels)
    num_features = sum(c.block.num_features for c in components)
    if layout is None:
        view = jnp.zeros(num_features, jnp.int32)
        z, counts = z[:, None], clusters.counts[None]
    else:
        view = jnp.concatenate(layout.index(labels))
        counts = clusters.counts
    return Trained(
        prior=prior,
        blocks=tuple(c.block for c in components),
        hyper=tuple(c.hyper for c in components),
        stats=clusters.stats,
        tables=tuple(
            c.block.tables(c.hyper, s)
            for c, s in zip(components, clusters.stats, strict=True)
        ),
        given=given,
        z=z,
        counts=counts,
        view=view,
    )


def _per_block(trained: Trained, values: Array) -> list[Array]:
    """What is said of each feature, by block."""
    parts, start = [], 0
    for block in trained.blocks:
        parts.append(values[start : start + block.num_features])
        start += block.num_features
    return parts


def log_weights(trained: Trained, counts: Array) -> Array:
    """Log probability of every cluster for a row more, ``[views, K]``: that of a new
    one in the first slot that is free."""
    prior = trained.prior
    if isinstance(prior, LabelledPrior):
        weight = prior.log_weights(counts[0])[None]
    else:
        occupied = counts > 0
        num = occupied.sum(-1, dtype=jnp.int32)
        new = prior.log_weight_new(num, counts.sum(-1))
        weight = jnp.where(
            new_slot(counts),
            new[:, None],
            jnp.where(occupied, prior.log_weight_existing(counts), -jnp.inf),
        )
    return weight - logsumexp(weight, -1, keepdims=True)


def new_slot(counts: Array) -> Array:
    """Which cluster of each view is the new one, ``[views, K]``."""
    free = counts == 0
    return free & (jnp.cumsum(free, -1) == 1)


class Row(NamedTuple):
    """
    What is known of one row under one draw.

    - **weights** - log probability of every cluster of each view, ``[views, K]``.
    - **scores** - log predictive density of each cell in every cluster, zero for a cell
      that is masked: ``[features, K]``.
    - **view** - view of each feature, ``[features]``.
    """

    weights: Array
    scores: Array
    view: Array

    def given(self, cells: Array) -> Array:
        """Log probability of every cluster with the density of some `cells`
        ``[features]`` bool: ``[views, K]``."""
        scores = jnp.where(cells[:, None], self.scores, 0)
        num_views = self.weights.shape[0]
        return self.weights + jax.ops.segment_sum(scores, self.view, num_views)

    def log_density(self, cells: Array, given: Array) -> Array:
        """Of some `cells` together, given others."""
        whole = logsumexp(self.given(cells | given), -1)
        return (whole - logsumexp(self.given(given), -1)).sum()

    def log_membership(self, given: Array) -> Array:
        """Log probability of every cluster given some cells, ``[views, K]``."""
        weights = self.given(given)
        return weights - logsumexp(weights, -1, keepdims=True)

    def log_density_of_each(self, given: Array) -> Array:
        """Of each cell alone, given others; of one that is given itself, given the rest
        of these: ``[features]``."""
        weights = self.given(given)[self.view]
        without = weights - jnp.where(given[:, None], self.scores, 0)
        whole = logsumexp(without + self.scores, -1)
        return whole - logsumexp(without, -1)


def look_at(trained: Trained, data: Data, n: Array) -> Row:
    """Row `n` of some `data` that is not in the table."""
    return _look(trained, data, n, None)


def look_at_own(trained: Trained, data: Data, n: Array) -> Row:
    """Row `n` of the table, taken out of it."""
    return _look(trained, data, n, trained.z[n])


def _look(trained, data, n, z):
    counts = trained.counts
    if z is not None:
        slots = jnp.arange(counts.shape[-1], dtype=z.dtype)
        counts = counts - jnp.where((z[:, None] == slots) & (counts > 0), 1, 0)
    scores = []
    for block, hyper, stats, tables, own, view in zip(
        trained.blocks,
        trained.hyper,
        trained.stats,
        trained.tables,
        data,
        _per_block(trained, trained.view),
        strict=True,
    ):
        x = block.row(hyper, own, n)
        # Every feature as if it were in a view of its own.
        size = block.num_features
        each = ByView.make(jnp.arange(size, dtype=jnp.int32), size)
        taken = None
        if z is not None:
            k = jnp.maximum(z[view], 0)
            taken = block.take(hyper, stats, x, k, jnp.asarray(True), each)
        scores.append(block.score(hyper, stats, tables, taken, x, each))
    return Row(log_weights(trained, counts), jnp.concatenate(scores), trained.view)


def observed(blocks: Sequence[AbstractBlock], data: Data, n: Array) -> Array:
    """Which cells of row `n` are not masked, ``[features]``."""
    parts = []
    for block, own in zip(blocks, data, strict=True):
        for site, x in zip(block.sites, own, strict=True):
            live = jnp.ones(site.num_features, bool)
            parts.append(live if x.mask is None else x.mask[n].reshape(-1))
    return jnp.concatenate(parts)


def draw_cells(
    rng_key: Array, trained: Trained, data: Data, n: Array, k: Array
) -> dict[str, Array]:
    """
    A row of cells from the predictive distributions of its clusters.

    :param data: whose row `n` has the parameters of the likelihood that are given by
        row.
    :param k: cluster of each view, ``[views]``.
    :return: by observed site, ``[*feature_shape, *event_shape]``.
    """
    found = {}
    ks = _per_block(trained, k[trained.view])
    for i, (block, hyper, stats, own, ks_own) in enumerate(
        zip(trained.blocks, trained.hyper, trained.stats, data, ks, strict=True)
    ):
        key_theta, key_cells = random.split(random.fold_in(rng_key, i))
        column = block.reorder(stats, ks_own[:, None])
        values = block.draw(key_theta, hyper, column)
        for j, (site, x) in enumerate(zip(block.sites, own, strict=True)):
            theta = {role: values[cluster][0] for role, cluster in site.roles}
            parameters = block.pair.parameters(theta) | trained.given[site.name]
            for name, given in zip(block.pair.given_by_row, x.given, strict=True):
                parameters[name] = given[n if given.shape[0] > 1 else 0]
            fn = block.pair.likelihood[0](**parameters)
            key = random.fold_in(key_cells, j)
            multinomial = isinstance(fn, MultinomialProbs)
            found[site.name] = draw_counts(key, fn) if multinomial else draw(key, fn)
    return found


def draw_counts(rng_key: Array, fn: MultinomialProbs) -> Array:
    """
    A multinomial draw, one category after another: each is binomial among the trials
    that are left. (NumPyro's needs to know the largest number of trials beforehand, and
    makes as many draws.)
    """
    probs = jnp.broadcast_to(fn.probs, fn.shape())
    total = jnp.asarray(fn.total_count, jnp.result_type(int))
    left = jnp.broadcast_to(total, fn.batch_shape)
    rest = jnp.cumsum(probs[..., ::-1], -1)[..., ::-1]
    # Of the last one exactly 1.
    share = jnp.moveaxis(jnp.minimum(probs / rest, 1), -1, 0)

    def step(left, one):
        key, share = one
        count = dist.Binomial(left, share).sample(key).astype(left.dtype)
        return left - count, count

    keys = random.split(rng_key, len(share))
    _, counts = lax.scan(step, left, (keys, share))
    return jnp.moveaxis(counts, 0, -1)


def draw_clusters(rng_key: Array, log_membership: Array) -> Array:
    """A cluster of each view, ``[views]``."""
    return random.categorical(rng_key, log_membership, axis=-1)
