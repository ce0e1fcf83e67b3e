# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""Moves of hyperparameters, on the collapsed model.

Given the assignments, with cluster parameters integrated out, the hyperparameters
:math:`h` of a mixture have the density

.. math::

    p(h) \; p(z \mid h) \prod_k p(x_k \mid h),

where :math:`p(z \mid h)` depends on the sizes of the clusters alone, and the marginal
likelihood :math:`p(x_k \mid h)` of the rows of a cluster on its sufficient statistics.
So a move costs as much as there are clusters and features, whatever the number of rows.

The factors are read off the user's model, which is run with new values of the
hyperparameters; whatever lies between those and the priors of cluster parameters is
the model's own business. Elements of one site that are independent given all else, as
in a plate, are moved at once.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to

from numpyro_subanneal import rows, variates
from numpyro_subanneal.compiling import compile_for, hoist
from numpyro_subanneal.grid import Grid, log_prob_at
from numpyro_subanneal.reading import (
    HyperSite,
    Plan,
    each_view,
    finite_prior,
    first_values,
    read,
    read_prior,
    site_hyperparameters,
    trace_at,
)
from numpyro_subanneal.rows import Clusters, Component
from numpyro_subanneal.skeleton import Args, Kwargs, Model, peel
from numpyro_subanneal.subsample import over_chains
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import fold_in, gumbel
from numpyro_subanneal.weights import LabelledPrior

Values = Mapping[str, Array]


class Target(NamedTuple):
    """
    The collapsed model, given the assignments.

    - **plan**, **model**, **args**, **kwargs** - the model that the user wrote.
    - **components** - those under whose hyperparameters the statistics were made.
    - **clusters** - sizes and statistics of the clusters.
    - **derived** - whether derivatives are taken, for which a loop's end must be known.
    """

    plan: Plan
    model: Model
    args: Args
    kwargs: Kwargs
    components: Sequence[Component]
    clusters: Clusters
    derived: bool = False

    def trace(self, values: Values) -> dict:
        return trace_at(self.plan, self.model, self.args, self.kwargs, values)

    def factors(self, names: Sequence[str], trace: Mapping[str, dict]) -> list[Array]:
        """
        Logarithms of the factors of the sites `names`, each with the batch shape of the
        site, that of an observed mixture without its rows; up to constants.
        """
        found = {}
        for b, block in enumerate(self.plan.blocks):
            wanted = [i for i, site in enumerate(block.sites) if site.name in names]
            # All at once take no longer to compile than one.
            together = len(wanted) > 1 and len(wanted) == len(block.sites)
            for own in [wanted] if together else [[i] for i in wanted]:
                found |= self._of_mixtures(b, own, trace)
        for name in names:
            if name in self.plan.assigned:
                found[name] = self._of_assignments(name, trace)
        found |= _log_probs(trace, [name for name in names if name not in found])
        return [found[name] for name in names]

    def _of_assignments(self, name, trace):
        plan = self.plan
        if plan.viewed:
            site = [name in (p.name, p.features) for p in plan.partitions].index(True)
            labels, counts = self.clusters.labels, self.clusters.counts
            if name == plan.partitions[site].features:
                sizes = plan.layout.num_elements_in(site, labels)
                return peel(trace[name]["fn"]).log_eppf_of_parameters(sizes)
            partition = plan.partitions[site]
            start, size = plan.layout.offsets[site], plan.layout.sizes[site]
            # A vacant view has no rows, so that nothing is known of it but its prior.
            prior = each_view(read_prior(partition, trace), size)
            found = jax.vmap(lambda p, c: p.log_eppf_of_parameters(c))(
                prior, counts[start : start + size]
            )
            return found[0] if partition.num_views is None else found
        prior = read_prior(plan.partition, trace)
        if isinstance(prior, LabelledPrior):
            return prior.log_prob_of_parameters(self.clusters.counts)
        return prior.log_eppf_of_parameters(self.clusters.counts)

    def _of_mixtures(self, b, chosen, trace):
        """Of sites of block `b`: one, or all."""
        whole = self.plan.blocks[b]
        block, like, stats = whole, self.components[b].hyper, self.clusters.stats[b]
        if len(chosen) < len(whole.sites):
            block, like, stats = whole.part(*chosen, like, stats)
        hyper = block.repack(
            like,
            [
                site_hyperparameters(block.pair, site, trace, self.plan.capacity)
                for site in block.sites
            ],
        )
        occupied = self.clusters.counts > 0
        if self.plan.viewed:
            start = sum(site.num_features for site in whole.sites[: chosen[0]])
            view = self.plan.layout.index(self.clusters.labels)[b]
            occupied = occupied[view[start : start + block.num_features]]
        each = self._evidence(block, like, hyper, stats, occupied)
        ends = np.cumsum([site.num_features for site in block.sites])[:-1]
        return {
            site.name: part.reshape(site.feature_shape)
            for site, part in zip(block.sites, jnp.split(each, ends), strict=True)
        }

    def _evidence(self, block, like, hyper, stats, occupied):
        """`block.evidence`, without the unused end of the capacity."""
        capacity = occupied.shape[-1]
        if self.derived or capacity <= _TOGETHER:
            return block.evidence(like, hyper, stats, occupied)
        some = occupied if occupied.ndim == 1 else occupied.any(0)
        slots = jnp.arange(capacity, dtype=jnp.int32)
        last = jnp.max(jnp.where(some, slots, -1))

        def of_part(i, total):
            start = jnp.minimum(i * _TOGETHER, capacity - _TOGETHER)

            def part(x):
                return lax.dynamic_slice_in_dim(x, start, _TOGETHER, -1)

            # The last part may begin before the one before it ends.
            own = part(occupied) & (part(slots) >= i * _TOGETHER)
            return total + block.evidence(like, hyper, jax.tree.map(part, stats), own)

        part = jax.tree.map(lambda s: s[..., :_TOGETHER], stats)
        shape = jax.eval_shape(
            block.evidence, like, hyper, part, occupied[..., :_TOGETHER]
        )
        num = over_chains(last // _TOGETHER + 1)
        return lax.fori_loop(0, num, of_part, jnp.zeros(shape.shape, shape.dtype))


# Clusters whose evidence is computed at once.
_TOGETHER = 8


def _log_prob(site: Mapping[str, Any]) -> Array:
    fn, value = site["fn"], site["value"]
    # NB: validation looks at the support too, and what it finds of traced values goes
    # into the program.
    with numpyro.validation_enabled(False):
        log_prob = fn.log_prob(value)
    if not isinstance(peel(fn), dist.Unit | Grid):
        # Outside of their supports some densities of NumPyro are not zero.
        log_prob = jnp.where(fn.support(value), log_prob, -jnp.inf)
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def _log_probs(trace: Mapping[str, dict], names: Sequence[str]) -> dict[str, Array]:
    """Log densities of hyperparameters by name."""
    grids = [
        name
        for name in names
        if isinstance(peel(trace[name]["fn"]), Grid)
        and not trace[name]["fn"].event_dim
        and trace[name]["scale"] is None
    ]
    if len(grids) < 2:
        grids = []
    found = {name: _log_prob(trace[name]) for name in names if name not in grids}
    if not grids:
        return found
    # All grids as one, since each takes long to compile.
    priors = [finite_prior(trace[name]) for name in grids]
    most = max(len(support) for support, _ in priors)

    def joined(parts, fill=None):
        filled = [_filled(x, most, x[-1] if fill is None else fill) for x in parts]
        dtype = jnp.result_type(*filled)
        flat = [x.astype(dtype).reshape(most, -1) for x in filled]
        return jnp.concatenate(flat, 1).T

    values = [jnp.asarray(trace[name]["value"]) for name in grids]
    each = log_prob_at(
        jnp.concatenate([value.reshape(-1) for value in values]),
        joined([support for support, _ in priors]),
        joined([weights for _, weights in priors], -jnp.inf),
    )
    ends = np.cumsum([value.size for value in values])[:-1]
    for name, value, part in zip(grids, values, jnp.split(each, ends), strict=True):
        found[name] = part.reshape(value.shape)
    return found


def log_prior(plan: Plan, trace: Mapping[str, dict], clusters: Clusters) -> Array:
    """
    Log prior density of the hyperparameters in `trace` and of the partition of features
    into views, if there is one, in nats; without the hyperparameters of vacant views.
    """
    each = [jnp.zeros(1)]
    log_probs = _log_probs(trace, [site.name for site in plan.hyper])
    for site in plan.hyper:
        log_prob = log_probs[site.name]
        if site.per_view is not None:
            names = [p.name for p in plan.partitions]
            i = names.index(site.per_view)
            start, size = plan.layout.offsets[i], plan.layout.sizes[i]
            vacant = plan.layout.num_features(clusters.labels) == 0
            vacant = vacant[start : start + size].reshape(
                -1, *(1,) * (log_prob.ndim - 1)
            )
            log_prob = jnp.where(vacant, 0, log_prob)
        each.append(log_prob.reshape(-1))
    # NB: in one sum, each of which is compiled.
    total = jnp.concatenate(each).sum()
    for i, p in enumerate(plan.partitions):
        if p.features is not None:
            sizes = plan.layout.num_elements_in(i, clusters.labels)
            total += peel(trace[p.features]["fn"]).log_eppf(sizes)
    return total


def update(
    rng_key: Array,
    target: Target,
    values: Values,
    joint: Sequence[Sequence[str]] = (),
    skip: Sequence[str] = (),
) -> dict[str, Array]:
    """
    Update every hyperparameter: those of finite support that can be drawn together,
    then the others one after another, in the order of the model.

    :param rng_key: key.
    :param target: the collapsed model.
    :param values: current values of the hyperparameters.
    :param joint: groups of sites of finite support that are drawn together.
    :param skip: sites to leave as they are.
    :return: new values.
    """
    values = dict(values)
    groups = {name: tuple(group) for group in joint for name in group}
    sites = {site.name: site for site in target.plan.hyper}
    left = [site for name, site in sites.items() if name not in skip]
    alone = [
        site
        for site in left
        if site.finite and site.name not in groups and _is_separable(site)
    ]
    rounds = _rounds(alone)
    num = len(rounds) + len(left) - len(alone)
    keys = iter(variates.split(rng_key, max(1, num)))
    for chains in rounds:
        values |= _enumerate_chains(next(keys), target, chains, values)
    done = {site.name for site in alone}
    for site in left:
        if site.name in done:
            continue
        group = [sites[n] for n in groups.get(site.name, (site.name,))]
        done.update(s.name for s in group)
        if site.finite:
            values |= _enumerate(next(keys), target, group, values)
        else:
            values[site.name] = _slice(next(keys), target, site, values)
    return values


def collapsed_model(plan: Plan, model: Model) -> Callable[..., None]:
    """
    The collapsed model as a NumPyro model of its continuous hyperparameters, for a
    kernel of NumPyro's to sample. Its arguments are a :class:`Target` without its first
    two fields, and the values of the other hyperparameters.
    """
    names = [site.name for site in plan.hyper if not site.finite]
    factors = [f for s in plan.hyper if not s.finite for f in s.factors]
    others = [name for name in dict.fromkeys(factors) if name not in names]

    def collapsed(args, kwargs, components, clusters, values):
        target = Target(plan, model, args, kwargs, components, clusters, derived=True)
        trace = trace_at(plan, model, args, kwargs, values, visible=names)
        terms = target.factors(others, trace)
        numpyro.factor("_collapsed", sum(jnp.sum(term) for term in terms))

    return collapsed


# --- what depends on one site -------------------------------------------------------


class _Conditional:
    """
    Log density of the elements of some sites given all else, up to a constant.

    :param sites: sites of the same batch shape, one or a group.
    """

    def __init__(self, target: Target, sites: Sequence[HyperSite], values: Values):
        self.target = target
        self.values = dict(values)
        self.names = tuple(site.name for site in sites)
        self.factors = tuple(dict.fromkeys(n for site in sites for n in site.factors))
        self.trace = target.trace(values)
        shapes = {self.trace[name]["fn"].batch_shape for name in self.names}
        if len(shapes) > 1:
            raise ValueError(
                f"`joint` names {list(self.names)}, which have the shapes "
                f"{sorted(shapes)}; sites that are drawn together must have the same."
            )
        (self.shape,) = shapes
        self.size = int(np.prod(self.shape, dtype=int))
        self.together = all(site.separable for site in sites) or self.size == 1

    def __call__(self, new: Values) -> Array:
        """At values `new`: of each element, ``[*shape]``."""
        trace = self.target.trace(self.values | dict(new))
        terms = self.target.factors(self.factors, trace)
        total = sum(_sum_to(term, self.shape) for term in terms)
        return jnp.broadcast_to(total, self.shape)

    def whole(self, new: Values) -> Array:
        """At values `new`: of all elements together."""
        trace = self.target.trace(self.values | dict(new))
        return sum(term.sum() for term in self.target.factors(self.factors, trace))


def _sum_to(term: Array, shape: tuple[int, ...]) -> Array:
    """`term` summed over what is not an axis of `shape`, both aligned to the right."""
    extra = term.ndim - len(shape)
    if extra > 0:
        term = term.sum(tuple(range(extra)))
    padded = shape[len(shape) - term.ndim :]
    over = tuple(
        i
        for i, (n, m) in enumerate(zip(term.shape, padded, strict=True))
        if m == 1 and n != 1
    )
    return term.sum(over, keepdims=True)


def find_separable(
    plan: Plan, model: Model, rebuild: Callable, arrays: Sequence[Any]
) -> dict[str, bool]:
    """
    Which hyperparameters have elements that are independent given all else: when some
    of them change, only their own parts of the log density do. Looked at with a few
    rows and random values.
    """
    args, kwargs = rebuild(arrays)
    many = _with_elements(plan, model, args, kwargs)
    if not many:
        return {}

    def compute(arrays):
        args, kwargs = rebuild(arrays)
        a, b = (
            first_values(random.key(i), plan, model, args, kwargs) for i in range(2)
        )
        few = [
            c._replace(data=[jax.tree.map(lambda v: v[:_FEW], d) for d in c.data])
            for c in read(plan, model, args, kwargs, a).components
        ]
        z = jnp.arange(min(_FEW, plan.num_rows)) % min(2, plan.capacity)
        z = z.astype(jnp.int32)
        labels = ()
        if plan.viewed:
            z = jnp.broadcast_to(z[:, None], (len(z), plan.layout.num_views))
            labels = plan.layout.spread_out()
        clusters = rows.collect(few, z, plan.capacity, plan.layout, labels)
        target = Target(plan, model, args, kwargs, few, clusters)
        trace = target.trace(a)
        shapes = {site.name: trace[site.name]["fn"].batch_shape for site in many}
        trials = {}
        for site in many:
            old_value, new_value = a[site.name], b[site.name]
            if site.finite:
                new_value = _another(trace[site.name], old_value)
            stays = _halves(shapes[site.name])
            event = (1,) * (jnp.ndim(old_value) - len(shapes[site.name]))
            mixed = jnp.where(stays.reshape(*stays.shape, *event), old_value, new_value)
            trials[site.name] = jnp.concatenate(
                [jnp.stack([old_value, new_value]), mixed]
            )
        # The trials of one site after those of another, all else as in `a`.
        names = tuple(dict.fromkeys(name for site in many for name in site.factors))
        stacked = {
            name: jnp.concatenate(
                [
                    own if name == other else jnp.repeat(a[name][None], len(own), 0)
                    for other, own in trials.items()
                ]
            )
            for name in trials
        }

        def terms(new):
            factors = target.factors(names, target.trace({**a, **new}))
            return dict(zip(names, factors, strict=True))

        # NB: traced once for all sites, as that takes longest; computed one after
        # another, as all at once would be large in a wide table.
        each = lax.map(terms, stacked)
        out, start = {}, 0
        for site in many:
            stop = start + len(trials[site.name])
            own = [each[name][start:stop] for name in site.factors]
            start, shape = stop, shapes[site.name]
            if not all(_has_axes(term.shape[1:], shape) for term in own):
                continue
            # NB: a term may have fewer axes than the site.
            found = sum(
                jax.vmap(lambda t, s=shape: jnp.broadcast_to(_sum_to(t, s), s))(term)
                for term in own
            )
            out[site.name] = found[2:], jnp.where(_halves(shape), found[0], found[1])
        return out

    compiled = compile_for(compute, arrays, quickly=True)
    separable = {site.name: False for site in many}
    for name, (got, expected) in jax.device_get(compiled(arrays)).items():
        separable[name] = bool(
            np.allclose(got, expected, rtol=1e-8, atol=1e-8, equal_nan=True)
        )
    return separable


def _another(site: Mapping[str, Any], value: Array) -> Array:
    """A value of positive probability other than `value`, in every element that has
    one."""
    support, log_weights = finite_prior(site)
    other = (support != value) & (log_weights > -jnp.inf)
    index = jnp.argmax(other, 0)[None]
    found = jnp.take_along_axis(support, index, 0)[0].astype(value.dtype)
    return jnp.where(other.any(0), found, value)


# Rows of which statistics are made to see what depends on what.
_FEW = 8


def _with_elements(plan, model, args, kwargs) -> list[HyperSite]:
    """The hyperparameters with more than one element."""
    found = []

    def read_shapes():
        trace = trace_at(plan, model, args, kwargs, {})
        shapes = [trace[site.name]["fn"].batch_shape for site in plan.hyper]
        found.extend(
            s for s, n in zip(plan.hyper, shapes, strict=True) if np.prod(n) > 1
        )

    jax.eval_shape(read_shapes)
    return found


def _has_axes(term: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a factor of that shape has the axes of a site: else it couples the
    elements."""
    padded = (1,) * (len(shape) - len(term)) + term
    own = padded[len(padded) - len(shape) :]
    return all(m == 1 or n == m for n, m in zip(own, shape, strict=True))


def _halves(shape: tuple[int, ...]) -> np.ndarray:
    """
    Halves of the elements, ``[halves, *shape]``: by the bits of their position, so that
    of every two elements one is in some half without the other.
    """
    size = int(np.prod(shape, dtype=int))
    place = np.arange(size).reshape(shape)
    bits = [place >> bit & 1 for bit in range((size - 1).bit_length())]
    return np.stack(bits) == 1


# --- finite support -----------------------------------------------------------------


def _is_separable(site: HyperSite) -> bool:
    return site.separable or np.prod(site.shape, dtype=int) == 1


def _rounds(sites: Sequence[HyperSite]) -> list[list[list[HyperSite]]]:
    """
    Sites in chains, those that share factors and have one shape, and chains of the same
    length together, no two of which share a factor: given all else, the first members
    of these are independent, and the second. So one program serves all of them.
    """
    factors: dict[int, set[str]] = {}  # of what is connected by them
    members: dict[int, list[HyperSite]] = {}
    for i, site in enumerate(sites):
        factors[i], members[i] = set(site.factors), [site]
        for j in range(i):
            if j in factors and factors[j] & factors[i]:
                factors[i] |= factors.pop(j)
                members[i] = members.pop(j) + members[i]
    order = {site.name: i for i, site in enumerate(sites)}
    rounds: dict[tuple[int, int], list[list[HyperSite]]] = {}
    for connected in members.values():
        chains: dict[tuple[int, ...], list[HyperSite]] = {}
        for site in sorted(connected, key=lambda site: order[site.name]):
            chains.setdefault(site.shape, []).append(site)
        for n, chain in enumerate(chains.values()):
            rounds.setdefault((n, len(chain)), []).append(chain)
    return list(rounds.values())


def _enumerate_chains(
    rng_key: Array,
    target: Target,
    chains: Sequence[Sequence[HyperSite]],
    values: Values,
) -> dict[str, Array]:
    """
    Draw sites from their full conditionals, those of each chain in turn, the n-th ones
    of all chains at once.
    """
    length = len(chains[0])
    names = [site.name for chain in chains for site in chain]
    sizes = [int(np.prod(chain[0].shape, dtype=int)) for chain in chains]
    # What a chain's sites weigh in besides their own priors.
    factors = [
        tuple(
            dict.fromkeys(f for site in chain for f in site.factors if f != site.name)
        )
        for chain in chains
    ]
    every = tuple(dict.fromkeys(f for own in factors for f in own))

    def draw(i, current):
        trace = target.trace({**values, **current})
        every_prior = [
            [finite_prior(trace[site.name]) for site in chain] for chain in chains
        ]
        # Filled up with what has no weight.
        most = max(len(support) for found in every_prior for support, _ in found)
        priors, candidates = [], {}
        for chain, found in zip(chains, every_prior, strict=True):
            weights = [_filled(w, most, -jnp.inf) for _, w in found]
            priors.append(weights[0] if length == 1 else jnp.stack(weights)[i])
            for n, (site, (support, _)) in enumerate(zip(chain, found, strict=True)):
                # Each in its own type, in which no value is rounded.
                value = current[site.name]
                support = _filled(support, most, support[-1]).astype(value.dtype)
                candidates[site.name] = (
                    support if length == 1 else jnp.where(i == n, support, value)
                )

        def terms(new):
            moved = target.trace({**values, **new})
            return dict(zip(every, target.factors(every, moved), strict=True))

        each = jax.vmap(terms)(candidates)
        noise = gumbel(fold_in(rng_key, i), (most, sum(sizes)))
        new, start = {}, 0
        for chain, own, prior, size in zip(chains, factors, priors, sizes, strict=True):
            shape = chain[0].shape
            total = prior
            for name in own:
                # NB: a term may have fewer axes than the site.
                term = jax.vmap(
                    lambda t, shape=shape: jnp.broadcast_to(_sum_to(t, shape), shape)
                )(each[name])
                for n, site in enumerate(chain):
                    if site.name == name:  # its prior is in `prior` when it moves
                        term = jnp.where(i == n, 0, term)
                total += term
            total = jnp.where(jnp.isnan(total), -jnp.inf, total)
            # Gumbel-max.
            part = noise[:, start : start + size].reshape(total.shape)
            chosen = jnp.argmax(total + part.astype(total.dtype), 0)[None]
            start += size
            for site in chain:
                value = jnp.broadcast_to(candidates[site.name], total.shape)
                new[site.name] = jnp.take_along_axis(value, chosen, 0)[0]
        return new

    start = {name: jnp.asarray(values[name]) for name in names}
    if length == 1:
        return draw(0, start)
    # What does not depend on the values, such as quantiles of the data, comes once.
    step = hoist(draw, jnp.int32(0), start)
    # NB: of one type, also where integers are of 64 bits.
    return lax.fori_loop(jnp.int32(0), jnp.int32(length), step, start)


def _filled(x: Array, num: int, value: Any) -> Array:
    """`x` with `value` added on its first axis up to a length of `num`."""
    more = jnp.broadcast_to(jnp.asarray(value, x.dtype), (num - len(x), *x.shape[1:]))
    return jnp.concatenate([x, more]) if len(more) else x


def _enumerate(
    rng_key: Array, target: Target, group: Sequence[HyperSite], values: Values
) -> dict[str, Array]:
    """
    Draw sites of finite support from their full conditional: a group jointly, its
    values in every combination.
    """
    order = [site.name for site in target.plan.hyper]
    at = _Conditional(target, sorted(group, key=lambda s: order.index(s.name)), values)

    def support(trace, name):
        return trace[name]["fn"].enumerate_support(expand=True)

    sizes = [len(support(at.trace, name)) for name in at.names]
    index = np.array(list(product(*map(range, sizes))), np.int32)

    def combination(chosen, current, i=None):
        """The values at these positions, of all elements or of the `i`-th."""
        new, trace = {}, at.trace if i is None else target.trace({**values, **current})
        for n, name in enumerate(at.names):
            if n > 0:  # its points may be of the values before
                trace = target.trace({**values, **current, **new})
            old = jnp.asarray(current[name])
            value = support(trace, name)[chosen[n]].astype(old.dtype)
            if i is not None:
                own = value.reshape(-1)[i]
                value = old.reshape(-1).at[i].set(own).reshape(at.shape)
            new[name] = value
        return new

    start = {name: jnp.asarray(values[name]) for name in at.names}
    if at.together:
        candidates = jax.vmap(lambda chosen: combination(chosen, start))(index)
        return _choose(rng_key, jax.vmap(at)(candidates), candidates)

    # One element after another.
    def element(i, current):
        candidates = jax.vmap(lambda chosen: combination(chosen, current, i))(index)
        log_density = jax.vmap(at.whole)(candidates)
        own = {n: c.reshape(len(index), -1)[:, i] for n, c in candidates.items()}
        new = _choose(fold_in(rng_key, i), log_density, own)
        return {
            n: current[n].reshape(-1).at[i].set(new[n]).reshape(at.shape)
            for n in at.names
        }

    step = hoist(element, jnp.int32(0), start)  # see `_enumerate_chains`
    return lax.fori_loop(jnp.int32(0), jnp.int32(at.size), step, start)


def _choose(rng_key, log_density, candidates):
    # A value that a support lists more than once has all its probability each time.
    alike = True
    for value in candidates.values():
        alike = alike & (value[:, None] == value[None])
    log_density = log_density - jnp.log(alike.sum(1))
    log_density = jnp.where(jnp.isnan(log_density), -jnp.inf, log_density)
    # Gumbel-max.
    noise = gumbel(rng_key, log_density.shape).astype(log_density.dtype)
    chosen = jnp.argmax(log_density + noise, 0)[None]
    return {
        name: jnp.take_along_axis(value, chosen, 0)[0]
        for name, value in candidates.items()
    }


# --- continuous support -------------------------------------------------------------

# Width of the first interval on the unconstrained scale, and how many of them it may
# grow to. Neither affects what is sampled.
_WIDTH = 2.0
_MOST_STEPS = 64
_MOST_ITERATIONS = 300


def _slice(rng_key: Array, target: Target, site: HyperSite, values: Values) -> Array:
    """
    One slice-sampling update of each coordinate of a site on its unconstrained scale.
    Where elements are independent given all else, they are updated at once.
    """
    at = _Conditional(target, [site], values)
    name = site.name
    fn = at.trace[name]["fn"]
    transform = biject_to(fn.support)
    start = transform.inv(values[name])
    num_batch = len(at.shape)
    event_shape = start.shape[num_batch:]
    coordinates = int(np.prod(event_shape, dtype=int))

    def constrain(u):
        """The value, and for each element the log Jacobian and whether it is in the
        support: ``[*shape]``."""
        value = transform(u)
        log_det = transform.log_abs_det_jacobian(u, value)
        log_det = jnp.sum(log_det, tuple(range(num_batch, log_det.ndim)))
        inside = fn.support(value)
        inside = jnp.all(inside, tuple(range(num_batch, inside.ndim)))
        return value, log_det, inside

    if at.together:

        def log_density(u):
            u = u.reshape(start.shape)
            value, log_det, inside = constrain(u)
            found = at({name: value}) + log_det
            found = jnp.where(inside & jnp.isfinite(found), found, -jnp.inf)
            return found.reshape(-1)

        u = start.reshape(at.size, coordinates)

        def coordinate(j, u):
            def along(x):
                return log_density(u.at[:, j].set(x))

            key = fold_in(rng_key, j)
            return u.at[:, j].set(slice_sample(key, along, u[:, j]))

        u = lax.fori_loop(0, coordinates, coordinate, u)
    else:

        def log_density(u):
            u = u.reshape(start.shape)
            value, log_det, inside = constrain(u)
            found = at.whole({name: value}) + log_det.sum()
            return jnp.where(inside.all() & jnp.isfinite(found), found, -jnp.inf)

        u = start.reshape(-1)

        def coordinate(j, u):
            def along(x):
                return log_density(u.at[j].set(x[0]))[None]

            key = fold_in(rng_key, j)
            return u.at[j].set(slice_sample(key, along, u[j][None])[0])

        u = lax.fori_loop(0, len(u), coordinate, u)
    return transform(u.reshape(start.shape))


def slice_sample(
    rng_key: Array, log_density: Callable[[Array], Array], x: Array
) -> Array:
    """
    Slice sampling of independent real variables, all at once: stepping out and
    shrinkage (Neal 2003, Figures 3 and 5).

    :param rng_key: key.
    :param log_density: of each variable, up to a constant: ``[n]`` to ``[n]``; minus
        infinity where it is zero. Nothing else may depend on them.
    :param x: current values ``[n]``.
    :return: new values ``[n]``, of positive density. (One of density zero, which a
        chain may only start at, moves to what is found near it, or stays.)

    **References:**

    1. *Slice Sampling*, R. M. Neal (2003)
    """
    key_level, key_place, key_share, key_tries = variates.split(rng_key, 4)
    dtype = x.dtype

    def uniform(rng_key):
        return variates.open_uniform(rng_key, x.shape).astype(dtype)

    fall = -jnp.log(uniform(key_level))
    left = x - _WIDTH * uniform(key_place)
    # At most so many steps in all, shared out at random, which keeps it reversible.
    steps_left = jnp.floor(_MOST_STEPS * uniform(key_share))

    # Each variable goes through its phases on its own. NB: one loop, so that the
    # density, which may be long, is compiled once.
    def unfinished(slices):
        return (slices.phase < _DONE).any() & (slices.i < _MOST_ITERATIONS)

    def step(slices):
        phase = slices.phase
        found = log_density(slices.point)
        above = found > slices.level
        level = jnp.where(phase == _LEVEL, found - fall, slices.level)
        steps_left = slices.steps_left - (phase == _LEFT)
        steps_right = slices.steps_right - (phase == _RIGHT)
        left = jnp.where((phase == _LEFT) & above, slices.left - _WIDTH, slices.left)
        right = jnp.where(
            (phase == _RIGHT) & above, slices.right + _WIDTH, slices.right
        )
        tried = slices.point
        missed = (phase == _SHRINK) & ~above
        left = jnp.where(missed & (tried < x), tried, left)
        right = jnp.where(missed & (tried >= x), tried, right)
        value = jnp.where((phase == _SHRINK) & above, tried, slices.value)

        phase = jnp.select(
            [phase == _LEVEL, phase == _LEFT, phase == _RIGHT, phase == _SHRINK],
            [
                jnp.full_like(phase, _LEFT),
                jnp.where(above, _LEFT, _RIGHT),
                jnp.where(above, _RIGHT, _SHRINK),
                jnp.where(above, _DONE, _SHRINK),
            ],
            _DONE,
        )
        # No step is left on this side.
        phase = jnp.where((phase == _LEFT) & (steps_left <= 0), _RIGHT, phase)
        phase = jnp.where((phase == _RIGHT) & (steps_right <= 0), _SHRINK, phase)
        u = uniform(fold_in(key_tries, slices.i))
        point = jnp.select(
            [phase == _LEFT, phase == _RIGHT, phase == _SHRINK],
            [left, right, left + u * (right - left)],
            value,
        )
        return _Slices(
            phase,
            point,
            value,
            level,
            left,
            right,
            steps_left,
            steps_right,
            slices.i + 1,
        )

    start = _Slices(
        phase=jnp.full(x.shape, _LEVEL),
        point=x,
        value=x,
        level=jnp.full(x.shape, -jnp.inf, dtype),
        left=left,
        right=left + _WIDTH,
        steps_left=steps_left,
        steps_right=_MOST_STEPS - 1 - steps_left,
        i=jnp.int32(0),
    )
    return lax.while_loop(unfinished, step, start).value


_LEVEL, _LEFT, _RIGHT, _SHRINK, _DONE = range(5)


class _Slices(NamedTuple):
    """
    Slices of many variables.

    - **phase** - what `point` is for: the level, the left end of the interval, its
      right end, a try, or nothing any more.
    - **point** - where the density is to be found next.
    - **value** - the variable, once a try was accepted.
    - **level** - log density above which the slice lies.
    - **left**, **right** - ends of the interval.
    - **steps_left**, **steps_right** - steps out that are left on each side.
    - **i** - number of densities found.
    """

    phase: Array
    point: Array
    value: Array
    level: Array
    left: Array
    right: Array
    steps_left: Array
    steps_right: Array
    i: Array
