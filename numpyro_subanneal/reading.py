# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What a model says: priors, hyperparameters and data, read off a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

from numpyro_subanneal import variates
from numpyro_subanneal.conjugate.base import (
    AbstractBlock,
    AbstractConjugatePair,
    Observed,
    SiteShape,
)
from numpyro_subanneal.distributions import PartitionDistribution
from numpyro_subanneal.grid import Grid
from numpyro_subanneal.rows import Component, Prior
from numpyro_subanneal.skeleton import (
    Args,
    Kwargs,
    Model,
    at_unconstrained,
    cell_mask,
    feasible,
    masks,
    peel,
    run_trace,
)
from numpyro_subanneal.typing import Array
from numpyro_subanneal.views import Layout, Membership, ViewPriors
from numpyro_subanneal.weights import (
    DirichletWeights,
    KnownWeights,
    LabelledPrior,
    StickBreakingWeights,
)


@dataclass(frozen=True)
class Partition:
    """
    The site of the assignments.

    - **name** - its name.
    - **num_rows** - number of rows.
    - **weights** - name of the latent site of the mixture weights, if there is one.
    - **labelled** - whether clusters are components with weights of their own (the
      prior is a categorical distribution) rather than the parts of a partition.
    - **num_views** - how many partitions of the rows it holds, on its first axis; None
      if it has no such axis, and is one partition.
    - **features** - name of the latent site that partitions features into these views;
      None if every feature's view is known.
    - **num_elements** - number of what that site partitions.
    """

    name: str
    num_rows: int
    weights: str | None = None
    labelled: bool = False
    num_views: int | None = None
    features: str | None = None
    num_elements: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the site's value."""
        views = () if self.num_views is None else (self.num_views,)
        return (*views, self.num_rows)


@dataclass(frozen=True)
class HyperSite:
    """
    A latent site that is neither the assignments nor a parameter of a cluster.

    - **name** - its name.
    - **finite** - whether its support is finite, so that it can be enumerated.
    - **shape** - of its value.
    - **factors** - sites whose factors of the collapsed model depend on it: those of
      the assignments, of observed sites and of hyperparameters, itself included.
    - **separable** - whether its elements are independent given all else, as those of
      a plate are; else they are updated one after another.
    - **per_view** - name of the partition site in whose plate of views it is, if
      features are partitioned into these.
    """

    name: str
    finite: bool
    shape: tuple[int, ...]
    factors: tuple[str, ...]
    separable: bool = True
    per_view: str | None = None


@dataclass(frozen=True)
class Plan:
    """
    What the kernel needs to know of a model: names and shapes, no arrays.

    - **partitions** - the sites of the assignments; one, unless features are in views.
    - **capacity** - size of the clusters plate.
    - **blocks** - observed sites and their cluster sites, packed by conjugate pair.
    - **memberships** - for each block, the partitions that its features are indexed by.
    - **hyper** - latent sites that are hyperparameters, in the order of the model.
    - **imputed** - latent sites that stand for masked cells (of `obs_mask`).
    - **deterministic** - deterministic sites.
    """

    partitions: tuple[Partition, ...]
    capacity: int
    blocks: tuple[AbstractBlock, ...]
    memberships: tuple[Membership, ...]
    hyper: tuple[HyperSite, ...]
    imputed: tuple[str, ...]
    deterministic: tuple[str, ...]

    @property
    def partition(self) -> Partition:
        """The first of the partitions: the one of a mixture without views."""
        return self.partitions[0]

    @property
    def num_rows(self) -> int:
        return self.partition.num_rows

    @property
    def viewed(self) -> bool:
        """Whether there are several partitions of the rows, or may be."""
        return len(self.partitions) > 1 or self.partition.num_views is not None

    @property
    def layout(self) -> Layout | None:
        """Which features are in which views; None in a mixture without views."""
        if not self.viewed:
            return None
        return Layout(
            tuple(p.num_views or 1 for p in self.partitions),
            tuple(p.num_elements for p in self.partitions),
            self.memberships,
        )

    @property
    def assigned(self) -> dict[str, tuple[int, ...]]:
        """Names of the sites of labels, of rows and of features, with their shapes."""
        rows = {p.name: p.shape for p in self.partitions}
        features = {p.features: (p.num_elements,) for p in self.partitions}
        features.pop(None, None)
        return features | rows

    @property
    def cluster_sites(self) -> tuple[str, ...]:
        """Names of the cluster sites."""
        return tuple(
            name for block in self.blocks for s in block.sites for _, name in s.roles
        )

    @property
    def sampled(self) -> tuple[str, ...]:
        """Names of the latent sites that the kernel samples."""
        weights = self.partition.weights
        extra = () if weights is None else (weights,)
        return (
            *self.assigned,
            *extra,
            *(site.name for site in self.hyper),
            *self.cluster_sites,
            *self.imputed,
        )


class Reading(NamedTuple):
    """
    What a model says for given arguments and values of its hyperparameters.

    - **prior** - prior of the assignments.
    - **components** - for each block its hyperparameters and data.
    - **theta** - feasible values of the latent sites but the assignments, by name.
    - **feature_priors** - of each site of views, the prior of the partition of features
      into them; None if that is known.
    """

    prior: Prior
    components: tuple[Component, ...]
    theta: dict[str, Array]
    feature_priors: tuple[PartitionDistribution | None, ...] = ()


def read(
    plan: Plan,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    values: Mapping[str, Array],
    like: Sequence[Component] | None = None,
) -> Reading:
    """
    Read what the model says at `values` of its hyperparameters. Traceable; the
    likelihood is never evaluated, and is dead code once compiled.

    :param like: components under whose hyperparameters statistics were made that those
        read now are to be used with (see :meth:`AbstractBlock.repack`).
    """
    trace = trace_at(plan, model, args, kwargs, values)
    components = []
    for i, block in enumerate(plan.blocks):
        hyper = [
            site_hyperparameters(block.pair, shape, trace, plan.capacity)
            for shape in block.sites
        ]
        data = []
        for shape in block.sites:
            fn = trace[shape.name]["fn"]
            given = given_parameters(block.pair, shape, fn)
            value = jnp.asarray(trace[shape.name]["value"])
            rows = value.shape[:1]
            observed = Observed(
                value,
                cell_mask(fn, rows + shape.feature_shape) if shape.masked else None,
                tuple(given[name] for name in block.pair.given_by_row),
            )
            # Data that the model has as constants would be copied into every loop.
            data.append(lax.optimization_barrier(observed))
        packed = (
            block.pack(hyper) if like is None else block.repack(like[i].hyper, hyper)
        )
        components.append(Component(block, packed, data))
    return Reading(
        prior=read_view_priors(plan, trace)
        if plan.viewed
        else read_prior(plan.partition, trace),
        components=tuple(components),
        theta={
            name: trace[name]["value"]
            for name in plan.sampled
            if name not in plan.assigned
        },
        feature_priors=tuple(
            None if p.features is None else peel(trace[p.features]["fn"])
            for p in plan.partitions
        ),
    )


def trace_at(
    plan: Plan,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    values: Mapping[str, Array],
    visible: Sequence[str] = (),
) -> dict:
    """
    The model's trace at `values` of latent sites; assignments are all zero and other
    latent sites feasible, if they are not among them. Of the model's sites, handlers
    around the call see only those `visible`, whose values are theirs to choose.
    """

    def pick(site):
        if site["type"] != "sample" or site["is_observed"]:
            return None
        name = site["name"]
        if name in visible:
            return None
        if name in values:
            return values[name]
        if name in plan.assigned:
            return jnp.zeros(plan.assigned[name], jnp.int32)
        return None if name in plan.imputed else feasible(site)

    if not visible:
        with handlers.block():
            return run_trace(model, args, kwargs, pick)
    # NB: handlers around may add sites of their own at those, such as the Jacobian of
    # an unconstrained value, which are sent through the block too.
    own = trace_at(plan, model, args, kwargs, values)
    hidden = set(own) - set(visible)
    with handlers.block(hide_fn=lambda site: site["name"] in hidden):
        return run_trace(model, args, kwargs, pick)


def first_values(
    rng_key: Array, plan: Plan, model: Model, args: Args, kwargs: Kwargs
) -> dict[str, Array]:
    """
    Values for the hyperparameters to start from: draws of those of finite support, and
    of the others the like of :func:`~numpyro.infer.initialization.init_to_uniform`.
    """
    if not plan.hyper:
        return {}
    # NB: one draw for all sites, since each would be compiled.
    sizes = [int(np.prod(site.shape, dtype=int)) for site in plan.hyper]
    rng_key, key = variates.split(rng_key)
    u = variates.open_uniform(key, (sum(sizes),))
    noise = jnp.split(u, np.cumsum(sizes)[:-1])
    noise = {site.name: u for site, u in zip(plan.hyper, noise, strict=True)}
    finite = {site.name: site.shape for site in plan.hyper if site.finite}

    def pick(site):
        if site["type"] != "sample" or site["is_observed"]:
            return None
        name = site["name"]
        if name in plan.assigned:
            return jnp.zeros(plan.assigned[name], jnp.int32)
        if name not in noise:
            return None if name in plan.imputed else feasible(site)
        u = noise[name]
        if name not in finite:

            def draw(shape):
                # No more coordinates than elements, but for supports of a user's own.
                size = int(np.prod(shape, dtype=int))
                wide = jnp.resize(u, size) if size > u.size else u[:size]
                return 4 * wide.reshape(shape) - 2

            return at_unconstrained(site, draw)
        found = finite_prior(site)
        if found is None:
            return None
        support, log_weights = found
        below = jnp.cumsum(jax.nn.softmax(log_weights, 0), 0)
        # NB: the last one is 1 but for rounding.
        index = jnp.sum(u.reshape(finite[name]) >= below[:-1], 0, keepdims=True)
        return jnp.take_along_axis(support, index, 0)[0]

    with handlers.block():
        trace = run_trace(model, args, kwargs, pick, rng_key)
    return {name: jnp.asarray(trace[name]["value"]) for name in noise}


def finite_prior(site: Mapping[str, Any]) -> tuple[Array, Array] | None:
    """
    Values of a latent site of finite support and the logarithms of their weights,
    ``[values, *batch]``; None of a distribution that is made an event.
    """
    fn = site["fn"]
    if fn.event_dim:
        return None
    support = fn.enumerate_support(expand=True)
    base = peel(fn)
    if isinstance(base, Grid) and not masks(fn):
        # By position, not by value, which would have to be looked for.
        log_weights = jnp.moveaxis(base.logits, -1, 0)
        ones = (1,) * (support.ndim - log_weights.ndim)
        log_weights = log_weights.reshape(len(support), *ones, *log_weights.shape[1:])
    else:
        with numpyro.validation_enabled(False):  # see `hyper._log_prob`
            log_weights = fn.log_prob(support)
        # A value that is listed more than once has all its probability each time.
        log_weights -= jnp.log((support[:, None] == support).sum(1))
    if site["scale"] is not None:
        log_weights = site["scale"] * log_weights
    return support, jnp.broadcast_to(log_weights, support.shape)


def site_hyperparameters(
    pair: AbstractConjugatePair,
    shape: SiteShape,
    trace: Mapping[str, dict],
    capacity: int,
) -> dict[str, Array]:
    """Hyperparameters and given parameters of an observed site, without a cluster
    axis."""
    values = prior_hyperparameters(pair, shape, trace, capacity)
    given = given_parameters(pair, shape, trace[shape.name]["fn"])
    return {name: value[0] for name, value in values.items()} | {
        name: given[name][0] for name in pair.given
    }


def impute(
    rng_key: Array,
    plan: Plan,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    values: Mapping[str, Array],
) -> dict[str, Array]:
    """
    Draws of the imputed sites given `values` of the other latent ones: from their
    likelihood, since cells are independent given the partition and the parameters.
    """

    def pick(site):
        return values.get(site["name"]) if site["type"] == "sample" else None

    with handlers.block():
        trace = run_trace(model, args, kwargs, pick, rng_key)
    return {name: trace[name]["value"] for name in plan.imputed}


def from_draw(plan: Plan, draw: Mapping[str, Array]) -> tuple[Array, tuple[Array, ...]]:
    """Assignments of a draw, ``[N]`` or ``[N, views]``, and labels of the elements of
    each site of views."""
    if not plan.viewed:
        return draw[plan.partition.name], ()
    columns = [draw[p.name].reshape(-1, plan.num_rows).T for p in plan.partitions]
    labels = [
        jnp.zeros(0, jnp.int32) if p.features is None else draw[p.features]
        for p in plan.partitions
    ]
    return jnp.concatenate(columns, 1), tuple(labels)


def read_prior(
    partition: Partition, trace: Mapping[str, dict]
) -> PartitionDistribution | LabelledPrior:
    """The prior of the assignments, mixture weights integrated out."""
    fn = peel(trace[partition.name]["fn"])
    if not partition.labelled:
        return fn
    num_components = fn.probs.shape[-1]
    if partition.weights is None:
        log_probs = jnp.log(fn.probs.reshape(-1, num_components)[0])
        return KnownWeights(log_probs, partition.num_rows)
    weights = peel(trace[partition.weights]["fn"])
    if isinstance(weights, dist.Dirichlet):
        concentration = jnp.broadcast_to(weights.concentration, (num_components,))
        return DirichletWeights(concentration, partition.num_rows)
    a, b = (
        jnp.broadcast_to(value, (num_components - 1,))
        for value in (weights.concentration1, weights.concentration0)
    )
    return StickBreakingWeights(a, b, partition.num_rows)


def read_view_priors(plan: Plan, trace: Mapping[str, dict]) -> ViewPriors:
    """The priors of the partitions of the rows in all views."""
    return ViewPriors(
        tuple(
            each_view(read_prior(p, trace), p.num_views or 1) for p in plan.partitions
        )
    )


def each_view(prior: PartitionDistribution, num_views: int) -> PartitionDistribution:
    """The priors of the views, one without a batch for :func:`jax.vmap`: `prior` with
    all its parameters ``[num_views, ...]``."""

    def expand(fn):
        batched = bool(fn.batch_shape)

        def spread(leaf):
            shape = jnp.shape(leaf)[1:] if batched else jnp.shape(leaf)
            return jnp.broadcast_to(leaf, (num_views, *shape))

        children, aux = fn.tree_flatten()
        children = [
            expand(child)
            if isinstance(child, dist.Distribution)
            else jax.tree.map(spread, child)
            for child in children
        ]
        fields = type(fn).gather_pytree_aux_fields()
        aux = [
            () if f == "_batch_shape" else x for f, x in zip(fields, aux, strict=True)
        ]
        return type(fn).tree_unflatten(aux, children)

    return expand(prior)


def redraw(
    rng_key: Array,
    plan: Plan,
    model: Model,
    args: Args,
    kwargs: Kwargs,
    values: Mapping[str, Array],
    vacant: Mapping[str, Array],
) -> dict[str, Array]:
    """
    `values` with the hyperparameters of vacant views drawn from their prior: `vacant`
    ``[views]``, by the name of the partition site.
    """
    own = {site.name: site.per_view for site in plan.hyper if site.per_view is not None}
    if not own:
        return dict(values)

    def pick(site):
        name = site["name"]
        if site["type"] != "sample" or site["is_observed"] or name in own:
            return None
        if name in values:
            return values[name]
        if name in plan.assigned:
            return jnp.zeros(plan.assigned[name], jnp.int32)
        return None if name in plan.imputed else feasible(site)

    with handlers.block():
        trace = run_trace(model, args, kwargs, pick, rng_key)
    new = dict(values)
    for name, partition in own.items():
        old = values[name]
        where = vacant[partition].reshape(-1, *(1,) * (old.ndim - 1))
        new[name] = jnp.where(where, trace[name]["value"].astype(old.dtype), old)
    return new


def prior_hyperparameters(
    pair: AbstractConjugatePair,
    shape: SiteShape,
    trace: Mapping[str, dict],
    capacity: int,
) -> dict[str, Array]:
    """Hyperparameters of every cluster, ``[clusters, *feature_shape, *event]``."""
    priors = {role: peel(trace[c]["fn"]) for role, c in shape.roles}
    theta = {role: trace[c]["value"] for role, c in shape.roles}
    batch = (capacity, *shape.feature_shape)
    return {
        name: jnp.broadcast_to(value, batch + _event(pair, name, value))
        for name, value in pair.hyperparameters(priors, theta).items()
    }


def given_parameters(
    pair: AbstractConjugatePair, shape: SiteShape, fn: dist.Distribution
) -> dict[str, Array]:
    """
    Parameters of the likelihood that are given, ``[rows or 1, *feature_shape,
    *event]``: the first axis is as long as the model has it.
    """
    base = peel(fn)
    found = {}
    for name in (*pair.given, *pair.given_by_row):
        value = jnp.asarray(getattr(base, name))
        event = _event(pair, name, value)
        batch = value.shape[: value.ndim - len(event)]
        missing = 1 + len(shape.feature_shape) - len(batch)
        batch = (1,) * missing + batch
        value = value.reshape(batch + event)
        found[name] = jnp.broadcast_to(value, batch[:1] + shape.feature_shape + event)
    return found


def _event(pair: AbstractConjugatePair, name: str, value: Array) -> tuple[int, ...]:
    value_shape = jnp.shape(value)
    return value_shape[len(value_shape) - pair.event_dim.get(name, 0) :]


def by_role(shape: SiteShape, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by cluster site, as values by role."""
    return {role: values[cluster] for role, cluster in shape.roles}


def with_array_arguments(args, kwargs):
    """
    Split arguments into arrays, which a compiled function should take as arguments (as
    constants they would be copied into the program), and a function that restores them.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    is_array = [isinstance(x, np.ndarray | jax.Array) for x in leaves]
    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]

    def rebuild(arrays):
        rest = iter(arrays)
        return jax.tree.unflatten(
            treedef,
            [next(rest) if a else x for x, a in zip(leaves, is_array, strict=True)],
        )

    return rebuild, arrays
