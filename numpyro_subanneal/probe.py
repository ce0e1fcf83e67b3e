# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Does a model behave as a conjugate pair says? It is run at a few rows, with random
cluster parameters, and its densities must obey Bayes' law."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_subanneal.compiling import compile_for
from numpyro_subanneal.conjugate.base import AbstractConjugatePair, Hyper, SiteShape
from numpyro_subanneal.reading import (
    Partition,
    by_role,
    finite_prior,
    given_parameters,
    prior_hyperparameters,
    read_prior,
    with_array_arguments,
)
from numpyro_subanneal.skeleton import (
    NotRecognised,
    at_unconstrained,
    feasible,
    peel,
    run_trace,
)
from numpyro_subanneal.typing import Array

_TOLERANCE = 1e-6

# Rows at which the model is looked at: all, or so many at random.
_NUM_PROBED = 2000
_NUM_CERTIFIED = 5

# Assignments at which it is looked at besides, by the number of rows up to which: half
# of them of two clusters, so that a row whose likelihood depends on another's label is
# seen with it and without it. Of 16, two of the rows looked at are never together with
# a probability of 1/250 at most, and never apart with one of 1/65,000.
_NUM_VARIED = ((100_000, 16), (np.inf, 4))

# Sets of hyperparameters at which it is looked at, if they are continuous. One of which
# half of the values that a chain may start at are impossible is missed once in 2^24
# models, one of a tenth once in ten.
_NUM_HYPER = 24

# Sizes of clusters by whose probabilities two priors of partitions are compared.
_COUNTS = ((1, 1, 0), (2, 1, 0), (1, 1, 1), (4, 2, 1), (9, 0, 0))

Labels: TypeAlias = dict[str, np.ndarray]
"""Assignments of rows, and of features to views, by site."""


def _parameter_name(shape: SiteShape, name: str, given: bool) -> str:
    """Words for a hyperparameter, or a known parameter of the likelihood."""
    if given:
        return f"Parameter `{name}` of observed site '{shape.name}'"
    clusters = " and ".join(f"'{c}'" for _, c in shape.roles)
    return f"Hyperparameter `{name}` of cluster sites {clusters} of '{shape.name}'"


def _is_defined(fn: dist.Distribution) -> Array:
    """Whether the numbers among the parameters of a distribution are in their range."""
    found = [jnp.array(True)]
    for name, constraint in fn.arg_constraints.items():
        value = fn.__dict__.get(name)
        while isinstance(constraint, constraints.independent):
            constraint = constraint.base_constraint
        # Vectors and matrices have tolerances, which rounding may exceed.
        if (
            value is None
            or constraints.is_dependent(constraint)
            or constraint.event_dim
        ):
            continue
        found.append(jnp.all(constraint(value)))
    return jnp.stack(found).all()


def _invalid(pair, shape: SiteShape, name: str, value, given: bool) -> str | None:
    """What is wrong with a hyperparameter, or a known parameter of the likelihood."""
    positive = name in pair.positive
    valid = np.isfinite(value) & ((value > 0) | (not positive))
    if valid.all():
        return None
    is_matrix = pair.event_dim.get(name, 0) == 2
    return (
        f"{_parameter_name(shape, name, given)} is {value[~valid].flat[0]}; it must be "
        f"finite{' and positive' if positive else ''}"
        f"{', of a positive definite matrix' if is_matrix else ''}."
    )


def _not_held(
    value: np.ndarray, dtype: np.dtype, power: int = 1, also_small: bool = True
) -> float | None:
    """The first value of which the `power` is too large for a float type, with room for
    products with a few numbers; or so small that it has few digits or none; if any."""
    limits = np.finfo(dtype)
    size = np.abs(np.asarray(value, np.float64))
    low, high = (float(x) ** (1 / power) for x in (limits.tiny, limits.max / 1000))
    bad = size > high
    if also_small:
        bad |= (size > 0) & (size < low)
    return float(np.asarray(value)[bad].flat[0]) if bad.any() else None


def pair_name(pair: AbstractConjugatePair) -> str:
    """For example ``(InverseGamma, Normal)-Normal``."""
    prior = ", ".join(t.__name__ for t in pair.prior.values())
    name = f"({prior})-{pair.likelihood[0].__name__}"
    known = (*pair.given, *pair.given_by_row)
    return name + (f" with known {', '.join(known)}" if known else "")


def column_name(shape: SiteShape, index: tuple[int, ...]) -> str:
    """Words for one column of a site, to start a sentence."""
    if not index:
        return f"Observed site '{shape.name}'"
    position = ", ".join(str(i) for i in index)
    return f"Column {position} of observed site '{shape.name}'"


def _in_double(leaf):
    floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.asarray(leaf, jnp.float64) if floating else leaf


class _Values(NamedTuple):
    """
    What the model says of one observed site.

    - **parameters** - of the likelihood at the probed rows, ``[rows, features, ...]``.
    - **given** - the given ones among them, likewise.
    - **log_prob** - of the observed values in these rows, ``[rows, features]``.
    - **hyper** - hyperparameters of every cluster, ``[clusters, features, ...]``.
    - **log_prior** - of the cluster parameters, ``[clusters, features]``.
    """

    parameters: dict[str, Any]
    given: dict[str, Any]
    log_prob: Any
    hyper: dict[str, Any]
    log_prior: Any


class Seats(NamedTuple):
    """
    What the features of an observed site are indexed by, each ``feature_shape``.

    - **element** - of the site that partitions features into views; -1 without one.
    - **view** - where it is known; else -1. 0 of a partition without views.
    """

    element: np.ndarray
    view: np.ndarray


class Prober:
    """
    Evaluates the model at chosen assignments and cluster parameters.

    :param partitions: the sites of the assignments.
    :param follows: the one of them that each observed site is indexed by.
    :param per_view: hyperparameters in a plate of views that features are partitioned
        into, with the name of the site of these views.
    :param int capacity: number of clusters.
    :param hyper_sites: latent sites that are hyperparameters, or conditioned on.
    :param imputed: latent sites that stand for masked cells.
    :param shapes: pairs and the observed sites that they are thought to hold for.
    :param data: values of these sites, what is masked replaced.
    :param live: which of them count; only sites with masked cells.
    """

    def __init__(
        self,
        model,
        args,
        kwargs,
        partitions: Sequence[Partition],
        follows: Mapping[str, Partition],
        per_view: Mapping[str, str],
        capacity: int,
        hyper_sites: Sequence[str],
        imputed: Sequence[str],
        shapes: Sequence[tuple[AbstractConjugatePair, SiteShape]],
        data: Mapping[str, np.ndarray],
        live: Mapping[str, np.ndarray],
    ):
        self.model = model
        self.partitions = tuple(partitions)
        self.follows = follows
        self.per_view = per_view
        self.num_rows = partitions[0].num_rows
        # Components with weights of their own are the only partition of a model.
        self.weights = partitions[0].weights
        self.labelled = partitions[0] if partitions[0].labelled else None
        self.capacity = capacity
        self.hyper_sites = tuple(hyper_sites)
        self.imputed = imputed
        self.shapes = shapes
        self.live = live
        self.data = data
        self.rng = np.random.default_rng(0)
        self.rebuild, arrays = with_array_arguments(args, kwargs)
        # NB: views. JAX remembers an array that was a constant of an unfinished trace
        # (the model raised an error) as it converted it there, in 32 bits.
        self.arrays = [x.view() if isinstance(x, np.ndarray) else x for x in arrays]
        self.hyper: dict[str, dict[str, np.ndarray]] = {}
        self.seats: dict[str, Seats] = {}
        # Those of the hyperparameters, with their supports.
        self.continuous: dict[str, str] = {}
        # The first ones, spread over the table and those of the outliers, are those of
        # the certificate.
        first = np.linspace(0, self.num_rows - 1, _NUM_CERTIFIED).astype(np.int32)
        for _, shape in shapes:
            outliers = _outliers(data[shape.name], live.get(shape.name))
            first = np.concatenate([first, outliers])
        self.num_certified = len(first)
        self.rows = first
        self._look_at_others()
        self._expect: Callable | None = None
        draw = compile_for(self._random_theta, self.arrays, quickly=True)
        first, second = jax.device_get(draw(self.arrays))
        self._use(
            first, second, *({n: t[n] for n in hyper_sites} for t in (first, second))
        )
        self._evaluate = compile_for(
            self._compute, self._zeros(), first, self.rows, self.x, self.arrays,
            quickly=True,
        )  # fmt: skip

    def _look_at_others(self) -> None:
        """Probe all rows, or others than before, but for those of the certificate."""
        others = self.rng.permutation(self.num_rows)[:_NUM_PROBED].astype(np.int32)
        self.rows = np.concatenate([self.rows[: self.num_certified], others])
        self.x = {s.name: self.data[s.name][self.rows] for _, s in self.shapes}

    def _use(self, first, second, hyper, other_hyper) -> None:
        """Probe with two sets of cluster parameters and two of hyperparameters."""
        self.theta = [first | hyper, second | hyper]
        # Other values of the hyperparameters, and the same cluster parameters.
        self.other_hyper = first | other_hyper

    def _zeros(self) -> Labels:
        """All rows in the first cluster, all features in the first view."""
        labels = {p.name: np.zeros(p.shape, np.int32) for p in self.partitions}
        for p in self.partitions:
            if p.features is not None:
                labels[p.features] = np.zeros(p.num_elements, np.int32)
        return labels

    def _random_theta(self, arrays):
        """Two sets of values of the cluster sites and hyperparameters, spread over
        their supports."""

        zeros = self._zeros()

        def draw(shape):
            # NB: by NumPy. JAX would compile its random numbers for every site.
            return jnp.asarray(self.rng.uniform(-1, 1, shape), float)

        def pick(site):
            if site["name"] in zeros:
                return jnp.asarray(zeros[site["name"]])
            if site["name"] in self.imputed:
                return None
            value = at_unconstrained(site, draw)
            if value is not None and site["name"] in self.hyper_sites:
                self.continuous[site["name"]] = repr(site["fn"].support)
            return value

        args, kwargs = self.rebuild(arrays)
        names = [name for _, shape in self.shapes for _, name in shape.roles]
        names.extend(self.hyper_sites)
        if self.weights is not None:
            names.append(self.weights)

        def one(seed):
            trace = run_trace(self.model, args, kwargs, pick, random.key(seed))
            return {name: _in_double(trace[name]["value"]) for name in names}

        return one(0), one(1)

    def _random_hyper(self, arrays):
        """
        Sets of values of the hyperparameters, ``[sets, ...]``: those that are
        continuous where :func:`~.reading.first_values` has them, and in the last two
        near the bounds of their supports; of the others, points of their supports in
        turn, the same in every element.
        """
        zeros = self._zeros()
        args, kwargs = self.rebuild(arrays)
        places = {name: n for n, name in enumerate(self.hyper_sites)}

        def one(i):
            def draw(shape, support):
                # No more numbers than tell, as they are constants of the program.
                size = int(np.prod(shape, dtype=int))
                noise = self.rng.uniform(-2, 2, (_NUM_HYPER, min(size, 1000)))
                while isinstance(support, constraints.independent):
                    support = support.base_constraint
                if hasattr(support, "lower_bound"):
                    noise[-2] = -8
                    if hasattr(support, "upper_bound"):
                        noise[-1] = 8
                return jnp.resize(jnp.asarray(noise, float)[i], size).reshape(shape)

            def pick(site):
                if site["name"] in zeros:
                    return jnp.asarray(zeros[site["name"]])
                if site["name"] in self.imputed:
                    return None
                if site["name"] not in places:
                    return feasible(site)
                own = partial(draw, support=getattr(site["fn"], "support", None))
                value = at_unconstrained(site, own)
                if value is not None or site["type"] != "sample":
                    return value
                if site["is_observed"] or not peel(site["fn"]).has_enumerate_support:
                    return None
                found = finite_prior(site)
                if found is None:
                    return None
                support, _ = found
                return support[i * (2 * places[site["name"]] + 1) % len(support)]

            trace = run_trace(self.model, args, kwargs, pick, random.key(i))
            return {n: _in_double(trace[n]["value"]) for n in self.hyper_sites}

        return lax.map(one, jnp.arange(_NUM_HYPER))

    def _compute(self, labels, theta, rows, x, arrays):
        args, kwargs = self.rebuild(arrays)
        values = {**labels, **theta}

        def pick(site):
            return values.get(site["name"]) if site["type"] == "sample" else None

        trace = run_trace(self.model, args, kwargs, pick)
        # What the model holds in single precision keeps its values; but densities have
        # large terms that cancel.
        for site in trace.values():
            if site["type"] == "sample":
                site["fn"] = jax.tree.map(_in_double, site["fn"])
        out = {}
        for pair, shape in self.shapes:
            base = peel(trace[shape.name]["fn"])
            batch = (self.num_rows, *shape.feature_shape)
            parameters = {}
            for name in pair.parameters(by_role(shape, theta)):
                value = jnp.asarray(getattr(base, name))
                event_dim = type(base).arg_constraints[name].event_dim
                event = value.shape[value.ndim - event_dim :]
                # NB: XLA pushes the selection of rows through the gather by cluster, so
                # that nothing of the table's size is made.
                parameters[name] = jnp.broadcast_to(value, batch + event)[rows]
            given = {
                name: value[rows] if value.shape[0] > 1 else value
                for name, value in given_parameters(pair, shape, base).items()
            }
            value = x[shape.name]
            if base.support.is_discrete:
                value = value.astype(int)
            log_prob = type(base)(**parameters, **given).log_prob(value)
            log_prior = sum(
                jnp.broadcast_to(
                    peel(trace[cluster]["fn"]).log_prob(theta[cluster]),
                    (self.capacity, *shape.feature_shape),
                )
                for _, cluster in shape.roles
            )
            hyper = prior_hyperparameters(pair, shape, trace, self.capacity)
            out[shape.name] = _Values(parameters, given, log_prob, hyper, log_prior)
        priors = {p.name: read_prior(p, trace) for p in self.partitions}
        probs = None
        if self.labelled is not None:
            fn = peel(trace[self.labelled.name]["fn"])
            probs = jnp.broadcast_to(fn.probs, (self.num_rows, fn.probs.shape[-1]))
            probs = probs[rows]
        # Of each view, as far as its prior is of more than one.
        laws = {name: trace[name]["fn"].log_prob(theta[name]) for name in self.per_view}
        defined, inside = {}, []
        for name in self.hyper_sites:
            fn = trace[name]["fn"]
            defined[name] = _is_defined(peel(fn))
            if name in self.continuous:
                # NB: bounds and matrices show in the density.
                defined[name] &= ~jnp.isnan(fn.log_prob(theta[name])).any()
                inside.append(fn.support(theta[name]).all())
        inside = jnp.stack([*inside, jnp.array(True)]).all()
        for p in self.partitions:
            if p.features is not None:
                priors[p.features] = peel(trace[p.features]["fn"])
                law = priors[p.name].log_eppf(jnp.array(_COUNTS)[:, None])
                laws[p.name] = jnp.broadcast_to(law, (len(_COUNTS), p.num_views)).T
        return out, priors, probs, laws, (defined, inside)

    def evaluate(self, labels: Labels, theta, x=None) -> dict[str, _Values]:
        labels = {name: np.asarray(z, np.int32) for name, z in labels.items()}
        found = self._evaluate(labels, theta, self.rows, x or self.x, self.arrays)
        values, self.priors, self.probs, self.laws, about = jax.device_get(found)
        self.defined, self.inside = about
        return values

    def _assignments(self) -> Labels:
        """Random assignments; neighbouring probed rows share a cluster, so that rows in
        the same cluster and rows in different ones are both seen."""
        labels = {}
        for p in self.partitions:
            z = self.rng.integers(self.capacity, size=p.shape)
            pairs = np.arange(min(4, len(self.rows))) // 2
            if p.num_views is not None:
                pairs = pairs + np.arange(p.num_views)[:, None]
            z[..., self.rows[:4]] = pairs % self.capacity
            labels[p.name] = z
            if p.features is not None:
                labels[p.features] = self.rng.integers(p.num_views, size=p.num_elements)
        return labels

    def _varied(self) -> Iterator[Labels]:
        """Random assignments to all clusters, and to two of them, in turn."""
        num = next(n for most, n in _NUM_VARIED if self.num_rows <= most)
        for i in range(num):
            clusters = self.rng.permutation(self.capacity)[: None if i % 2 else 2]
            labels = {}
            for p in self.partitions:
                labels[p.name] = self.rng.choice(clusters, p.shape)
                if p.features is not None:
                    views = self.rng.integers(p.num_views, size=p.num_elements)
                    labels[p.features] = views
            yield labels

    def _moved(self, labels: Labels) -> Labels:
        """All rows in another cluster, in every view, and nothing else."""
        rows = {p.name: (labels[p.name] + 1) % self.capacity for p in self.partitions}
        return labels | rows

    def _clusters(self, name: str, labels: Labels) -> np.ndarray:
        """Clusters of the probed rows in the partition that an observed site is indexed
        by: ``[rows]``, or, where there are views, ``[rows, *feature_shape]``."""
        partition = self.follows[name]
        z = labels[partition.name][..., self.rows]
        if partition.num_views is None:
            return z
        element, view = self.seats[name]
        if partition.features is not None:
            view = labels[partition.features][element]
        return np.moveaxis(z[view], -1, 0)

    def _expected(self, labels: Labels, theta) -> dict[str, dict[str, np.ndarray]]:
        """Parameters of the likelihoods at the probed rows, as the pairs have them."""
        roles = {}
        for _, shape in self.shapes:
            k = self._clusters(shape.name, labels)
            each = (k, *np.indices(shape.feature_shape)) if k.ndim > 1 else k
            roles[shape.name] = {r: theta[c][each] for r, c in shape.roles}

        def parameters(roles):
            return {s.name: p.parameters(roles[s.name]) for p, s in self.shapes}

        if self._expect is None:
            self._expect = compile_for(parameters, roles, quickly=True)
        return jax.device_get(self._expect(roles))

    # --- the prior -----------------------------------------------------------------

    def check_prior(self, dtype: np.dtype, fixed: Collection[str]) -> None:
        """
        Are the priors of the partitions and of the cluster sites what pairs expect?

        :param dtype: the floats that the sampler will have.
        :param fixed: partition sites and observed sites of which the hyperparameters
            are constants.
        """
        labels = self._assignments()
        self._check_possible(labels)
        second = self.evaluate(labels, self.theta[1])
        self._check_weights(self.theta[1])
        first = self.evaluate(labels, self.theta[0])
        self._check_weights(self.theta[0])
        for pair, shape in self.shapes:
            self._check_hyper(pair, shape, first[shape.name], second[shape.name])
        self._check_range(first, dtype, fixed)

    def _check_possible(self, labels: Labels) -> None:
        """
        Is the model defined at all values of its continuous hyperparameters? A chain
        may start at any of them. Of those of finite support it draws only values at
        which the model is defined; the probes take such values from now on.
        """
        first, second = self.theta[0], self.other_hyper
        sets = (first, second) if self.hyper_sites else (first,)
        draws = [{n: t[n] for n in self.hyper_sites} for t in sets]
        errors = [self._impossible(labels, first | own) for own in draws]
        if self.continuous or (self.hyper_sites and any(errors)):
            draw = compile_for(self._random_hyper, self.arrays, quickly=True)
            more = jax.device_get(draw(self.arrays))
            more = [{n: v[i] for n, v in more.items()} for i in range(_NUM_HYPER)]
            # Matrices that so wild values make need not be positive definite in
            # floating point.
            errors += [self._impossible(labels, first | own, False) for own in more]
            draws += more
        possible = [own for own, e in zip(draws, errors, strict=True) if e is None]
        if not possible:
            raise NotRecognised(errors[0])
        for own, error in zip(draws, errors, strict=True):
            if error is not None:
                self._blame(labels, possible[0], own)
        self._use(*self.theta, possible[0], possible[min(1, len(possible) - 1)])

    def _blame(self, labels: Labels, possible, impossible) -> None:
        """Are continuous hyperparameters the reason why a set of values is impossible,
        where another is not?"""

        def error_with(names):
            own = possible | {name: impossible[name] for name in names}
            error = self._impossible(labels, self.theta[0] | own, False)
            # Values of different sets that cannot go together say nothing.
            whole = set(names) == set(self.hyper_sites)
            return error if self.inside or whole else None

        group = tuple(self.continuous)
        error = error_with(group)
        if error is None:
            return
        # One of them alone, if it is the reason.
        for name in group if len(group) > 1 else ():
            own_error = error_with((name,))
            if own_error is not None:
                group, error = (name,), own_error
                break
        names = " and ".join(f"'{name}'" for name in group)
        supports = " and ".join(self.continuous[name] for name in group)
        at = ""
        if len(group) == 1 and impossible[group[0]].size == 1:
            at = f", such as {impossible[group[0]].item():.4g},"
        raise NotRecognised(
            f"The prior allows values of {names}{at} at which the model is not "
            f"defined. {error} Let the support of the prior, which NumPyro takes to be "
            f"{supports}, be what the parameter may be: for one that must be positive "
            "`dist.LogNormal`, `dist.Gamma`, `dist.HalfNormal` or "
            "`dist.TruncatedNormal(..., low=0)`; for a discount `dist.Uniform(0, 1)` "
            "or `dist.Beta`. (An `AffineTransform` needs its `domain`; in place of "
            "`dist.Delta` write the constant itself.)"
        )

    def _impossible(self, labels: Labels, theta, matrices=True) -> str | None:
        """Why the model is not defined at these values, if so."""
        found = self.evaluate(labels, theta)
        for name, prior in self.priors.items():
            error = prior.parameter_error()
            if error is not None:
                return f"The prior of partition site '{name}': {error}"
        for pair, shape in self.shapes:
            own = found[shape.name]
            if not matrices and 2 in pair.event_dim.values():
                continue
            for name, value in (*own.given.items(), *own.hyper.items()):
                error = _invalid(pair, shape, name, value, name in own.given)
                if error is not None:
                    return error
            if np.isnan(own.log_prior).any():
                clusters = " and ".join(f"'{c}'" for _, c in shape.roles)
                return (
                    f"The prior density of cluster sites {clusters} of "
                    f"'{shape.name}' is not a number."
                )
        for name, defined in self.defined.items():
            if not defined:
                return f"A parameter of the prior of '{name}' is out of its range."
        return None

    def _check_range(self, found, dtype, fixed) -> None:
        """Can the sampler compute with hyperparameters that are constants? (Values of
        latent ones that it cannot compute with have probability zero.)"""

        def check(what, value, power=1, also_small=True):
            lost = _not_held(np.asarray(value), dtype, power, also_small)
            if lost is not None:
                raise NotRecognised(
                    f"{what} is {lost}, with which {dtype} cannot compute. Choose "
                    "another value, for instance by another unit for the column, or "
                    "call `numpyro.enable_x64()` first."
                )

        for site, prior in self.priors.items():
            for name in ("concentration", "a", "b"):
                if site in fixed and hasattr(prior, name):
                    what = f"Parameter `{name}` of partition site '{site}'"
                    check(what, getattr(prior, name))
        for pair, shape in self.shapes:
            if shape.name not in fixed:
                continue
            own = found[shape.name]
            for name, value in (*own.hyper.items(), *own.given.items()):
                what = _parameter_name(shape, name, name in own.given)
                power = 2 if name in pair.squared else 1
                check(what, value, power, name in pair.positive)

    def check_learned(self, learned: Sequence[str]) -> None:
        """
        Are the hyperparameters `learned`, which the kernel samples itself, such that no
        statistic changes with them?
        """
        if not learned:
            return
        labels = self._assignments()
        first = self.evaluate(labels, self.theta[0])
        own = {name: self.other_hyper[name] for name in learned}
        second = self.evaluate(labels, self.theta[0] | own)
        for pair, shape in self.shapes:
            for name in (*pair.given_by_row, *sorted(pair.in_statistics)):
                old, new = (
                    (v.given if name in v.given else v.hyper)[name]
                    for v in (first[shape.name], second[shape.name])
                )
                if not _close(old, new):
                    raise NotRecognised(
                        f"Parameter `{name}` of observed site '{shape.name}' depends "
                        f"on latent sites, among {list(learned)}, that are not "
                        "indexed by the partition. The statistics of "
                        f"{pair_name(pair)} depend on it, so that every new value "
                        "would take a pass over all rows. If it differs between "
                        "clusters, sample it in a plate of clusters and index it, as "
                        f"in `{name}[z]`; if it is a scalar for all, fix it, or let "
                        "another kernel sample it: `Gibbs([(SubsampleAnnealedGibbs("
                        "model), ...), (NUTS(model), ...)])` of `numpyro.infer`."
                    )

    def _check_weights(self, theta) -> None:
        """Are the probabilities of a categorical partition site those of its prior?"""
        if self.labelled is None:
            return
        name, weights = self.labelled.name, self.weights
        if not _close(self.probs, np.broadcast_to(self.probs[:1], self.probs.shape)):
            raise NotRecognised(
                f"The probabilities of partition site '{name}' differ between rows; "
                "all rows must have the same mixture weights."
            )
        if weights is None:
            return
        value = np.asarray(theta[weights])
        expected, form = value, f"the weights '{weights}' themselves"
        if value.shape[-1] != self.probs.shape[-1]:
            rest = np.concatenate([[1.0], np.cumprod(1 - value)])
            expected = np.concatenate([value, [1.0]]) * rest
            form = (
                f"the sticks that '{weights}' breaks off, v[k] (1 - v[0]) ... "
                "(1 - v[k - 1]), and what is left"
            )
        if not _close(self.probs, np.broadcast_to(expected, self.probs.shape)):
            raise NotRecognised(
                f"The probabilities of partition site '{name}' must be {form}. For "
                f"one value of it they are {self.probs[0]}, expected {expected}."
            )

    def _check_hyper(self, pair, shape, first, second) -> None:
        clusters = " and ".join(f"'{c}'" for _, c in shape.roles)
        where = f"cluster sites {clusters} of '{shape.name}'"

        for name, value in first.given.items():
            if not _close(value, second.given[name]):
                raise NotRecognised(
                    f"Parameter `{name}` of observed site '{shape.name}' depends on "
                    f"{clusters}, but must be known for {pair_name(pair)}. {pair.form}"
                )
            if name in pair.given and not _close(
                value, np.broadcast_to(value[:1], value.shape)
            ):
                raise NotRecognised(
                    f"Parameter `{name}` of observed site '{shape.name}' differs "
                    f"between rows; for {pair_name(pair)} it must be the same known "
                    f"value in all of them. {pair.form}"
                )
        known = {name: first.given[name][:1] for name in pair.given}
        for name, value in first.hyper.items():
            if not _close(value, second.hyper[name]):
                raise NotRecognised(
                    f"The prior of {where} does not have the form of "
                    f"{pair_name(pair)}: its hyperparameter `{name}` depends on the "
                    f"values of the cluster parameters. {pair.form}"
                )
            if not _close(value, np.broadcast_to(value[:1], value.shape)):
                raise NotRecognised(
                    f"Hyperparameter `{name}` of {where} differs between clusters. All "
                    "clusters must have the same prior."
                )
        hyper = {n: v[0] for n, v in (*first.hyper.items(), *known.items())}
        error = pair.hyper_error(hyper)
        if error is not None:
            raise NotRecognised(f"The prior of {where} {error}.")
        self.hyper[shape.name] = hyper

    def given_by_row(self) -> dict[str, dict[str, np.ndarray]]:
        """Parameters given by row, of all rows: ``[rows, *feature_shape]``."""
        if not any(pair.given_by_row for pair, _ in self.shapes):
            return {shape.name: {} for _, shape in self.shapes}

        def compute(theta, arrays):
            args, kwargs = self.rebuild(arrays)
            values = {**jax.tree.map(jnp.asarray, self._zeros()), **theta}

            def pick(site):
                return values.get(site["name"]) if site["type"] == "sample" else None

            trace = run_trace(self.model, args, kwargs, pick)
            return {
                shape.name: {
                    name: jnp.broadcast_to(value, (self.num_rows, *shape.feature_shape))
                    for name, value in given_parameters(
                        pair, shape, trace[shape.name]["fn"]
                    ).items()
                    if name in pair.given_by_row
                }
                for pair, shape in self.shapes
            }

        args = self.theta[0], self.arrays
        return jax.device_get(compile_for(compute, *args, quickly=True)(*args))

    # --- views ---------------------------------------------------------------------

    def check_exchangeable(self) -> None:
        """
        Do labels of views that features are partitioned into mean nothing? The views'
        priors must be permuted along with the hyperparameters in their plate.
        """
        for partition in self.partitions:
            if partition.features is None:
                continue
            own = [n for n, p in self.per_view.items() if p == partition.name]
            views = np.arange(partition.num_views)
            theta = self.theta[0]
            self.evaluate(self._zeros(), theta)
            before = self.laws
            # These two generate all permutations.
            for order in (np.roll(views, 1), np.r_[views[:2][::-1], views[2:]]):
                permuted = {name: theta[name][order] for name in own}
                self.evaluate(self._zeros(), theta | permuted)
                for name in (*own, partition.name):
                    if not _close(self.laws[name], before[name][order]):
                        self._not_exchangeable(partition, name)

    def _not_exchangeable(self, partition: Partition, name: str) -> None:
        way_out = "Give all views the same"
        if name == partition.name:
            way_out += (
                ", or sample what differs in the plate of the views, independently "
                "for each"
            )
        raise NotRecognised(
            f"The prior of site '{name}' is not the same in all views of "
            f"'{partition.name}'. '{partition.features}' partitions features into "
            f"views whose labels mean nothing. {way_out}."
        )

    def _find_seats(self) -> None:
        """
        Find what every feature is indexed by. That it is indexed by that alone, and so
        in every row, is seen when the parameters are compared.
        """
        for partition in self.partitions:
            shapes = [s for _, s in self.shapes if self.follows[s.name] is partition]
            if partition.features is not None:
                self._find_elements(partition, shapes)
                continue
            views = {s.name: np.zeros(s.feature_shape, int) for s in shapes}
            if partition.num_views is not None:
                zeros = self._zeros()
                before = self.evaluate(zeros, self.theta[0])
                views = self._views(partition, shapes, zeros, before)
            for name, view in views.items():
                self.seats[name] = Seats(np.full_like(view, -1), view)

    def _find_elements(self, partition: Partition, shapes: list[SiteShape]) -> None:
        """Elements are told apart by views that spell out their numbers."""
        base, num = partition.num_views, partition.num_elements
        digits = 1
        while base**digits < num:
            digits += 1
        spelled = [np.arange(num) // base**i % base for i in range(digits)]
        # What follows no element would look as one whose digits are all the same.
        spelled.append((spelled[0] + 1) % base)
        first = self.evaluate(self._zeros(), self.theta[0])
        found = []
        for own in spelled:
            labels = self._zeros() | {partition.features: own}
            before = self.evaluate(labels, self.theta[0])
            self._check_direct(partition, shapes, first, before)
            found.append(self._views(partition, shapes, labels, before))
        for shape in shapes:
            views = [views[shape.name] for views in found]
            element = sum(views[i] * base**i for i in range(digits))
            wrong = (element >= num) | (views[-1] != (views[0] + 1) % base)
            if wrong.any():
                self._misplaced(partition, shape, wrong)
            self.seats[shape.name] = Seats(element, np.full_like(element, -1))

    def _check_direct(self, partition, shapes, first, second) -> None:
        """With all rows in one cluster of every view, views make no difference."""
        for shape in shapes:
            old, new = first[shape.name], second[shape.name]
            for name, value in (*old.parameters.items(), *old.given.items()):
                if not _close(value, (new.parameters | new.given)[name]):
                    raise NotRecognised(
                        f"Parameter `{name}` of observed site '{shape.name}' depends "
                        f"on '{partition.features}' itself; it may depend only on the "
                        "clusters of the rows in the feature's view, as in "
                        f"`{_indexed(partition, shape, shape.roles[0][1])}`."
                    )

    def _views(
        self,
        partition: Partition,
        shapes: list[SiteShape],
        labels: Labels,
        before: Mapping[str, _Values],
    ) -> dict[str, np.ndarray]:
        """
        The view that each feature is indexed by, where features are in views by
        `labels`, and the model is as `before` with all rows in the first cluster.

        The numbers of the views are spelled out in bits: for each bit, the views in
        which it is set are moved to another cluster, and then those in which it isn't.
        """
        rows = self.rows[self.num_certified :]  # Each once.
        patterns = _bits(partition.num_views)
        # All at once, a row for each, as far as there are rows.
        times = -(-len(patterns) // len(rows))
        which = np.arange(times * len(rows)).reshape(times, -1) % len(patterns)
        moves = self._moves(partition, shapes, labels, before, patterns[which])
        found = {}
        for shape in shapes:
            move = moves[shape.name]
            by_pattern = [move[which == i] for i in range(len(patterns))]
            view = _from_bits(np.stack([m.all(0) for m in by_pattern]))
            alike = np.all([(m == m[:1]).all(0) for m in by_pattern], 0)
            wrong = (view < 0) | (view >= partition.num_views) | ~alike
            if wrong.any():
                self._say_why_views(partition, shape, labels, before, wrong)
            found[shape.name] = view
        return found

    def _moves(
        self,
        partition: Partition,
        shapes: list[SiteShape],
        labels: Labels,
        before: Mapping[str, _Values],
        patterns: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """
        Whether likelihoods, ``[times, rows, *feature_shape]``, change when rows leave
        the first cluster in some views, by `patterns` ``[times, rows, views]``.
        """
        labels = labels | {partition.name: np.zeros(partition.shape, np.int32)}
        found: dict[str, list[np.ndarray]] = {shape.name: [] for shape in shapes}
        for pattern in patterns:
            labels[partition.name][:, self.rows[self.num_certified :]] = pattern.T
            after = self.evaluate(labels, self.theta[0])
            for shape in shapes:
                old, new = before[shape.name].parameters, after[shape.name].parameters
                cells = (len(self.rows), *shape.feature_shape, -1)
                change = [_differs(old[n], new[n]).reshape(cells).any(-1) for n in old]
                found[shape.name].append(np.any(change, 0)[self.num_certified :])
        return {name: np.stack(change) for name, change in found.items()}

    def _say_why_views(self, partition, shape, labels, before, wrong) -> None:
        """Tell in which way the first `wrong` feature is not indexed by one view."""
        index = _first(wrong)
        rows = len(self.rows) - self.num_certified
        patterns = np.repeat(_bits(partition.num_views)[:, None], rows, axis=1)
        moves = self._moves(partition, [shape], labels, before, patterns)[shape.name]
        view = _from_bits(moves[:, :, *index])
        clusters = [cluster for _, cluster in shape.roles]
        column = column_name(shape, index)
        if not moves[:, :, *index].any():
            raise NotRecognised(
                f"{column} does not depend on the cluster of the row: "
                + self._is_indexed(shape, clusters[0])
            )
        indexed = f"as in `{_indexed(partition, shape, clusters[0])}`"
        views = f"the views of partition site '{partition.name}' {partition.shape}"
        if (view < 0).any():
            problem = (
                f"depends on several of {views} at once; a feature is indexed by one "
                f"of them, {indexed}. If these are no views, take the site out of its "
                "plate."
            )
        elif (view != view[0]).any():
            problem = (
                f"is in different ones of {views} in different rows; they must be the "
                "same for all rows. Are the rows the first axis of the assignments, "
                f"{indexed}?"
            )
        else:
            problem = (
                "depends on the cluster of another row; the likelihood of a row may "
                f"depend on its own alone, {indexed}."
            )
        raise NotRecognised(f"{column} {problem}")

    def _misplaced(self, partition, shape, wrong) -> None:
        problem = (
            f"is not in one view of '{partition.name}' that is known. Index it by "
            "constants"
        )
        if partition.features is not None:
            problem = (
                f"does not follow one element of '{partition.features}': its view of "
                f"'{partition.name}' is fixed, or some function of the elements. Index "
                "the views by the feature's element alone"
            )
        indexed = _indexed(partition, shape, shape.roles[0][1])
        raise NotRecognised(
            f"{column_name(shape, _first(wrong))} {problem}, as in `{indexed}`."
        )

    def _is_indexed(self, shape: SiteShape, cluster: str) -> str:
        partition = self.follows[shape.name]
        return (
            f"is '{cluster}' indexed by '{partition.name}', as in "
            f"`{_indexed(partition, shape, cluster)}`?"
        )

    # --- the likelihood ------------------------------------------------------------

    def check_parameters(self) -> None:
        self._find_seats()
        labels = self._assignments()
        theta = self.theta[0]
        values = self.evaluate(labels, theta)
        moved = self.evaluate(self._moved(labels), theta)
        for pair, shape in self.shapes:
            for name, value in values[shape.name].given.items():
                if not _close(value, moved[shape.name].given[name]):
                    raise NotRecognised(
                        f"Parameter `{name}` of observed site '{shape.name}' depends "
                        f"on the cluster of the row, but for {pair_name(pair)} it must "
                        f"be known. {pair.form}"
                    )
        self._compare(labels, theta, values)
        if any(p.num_views is not None for p in self.partitions):
            # Where it was found what features are indexed by, hyperparameters and rows'
            # clusters were few.
            labels = self._assignments()
            self._compare(labels, self.other_hyper)
        for labels in self._varied():
            if self.num_rows > _NUM_PROBED:
                self._look_at_others()
            self._compare(labels, theta)

    def _compare(self, labels: Labels, theta, values=None) -> None:
        """Are parameters of likelihoods the pairs' own?"""
        values = self.evaluate(labels, theta) if values is None else values
        expected = self._expected(labels, theta)
        for pair, shape in self.shapes:
            for name, value in values[shape.name].parameters.items():
                wanted = expected[shape.name][name]
                if not _close(value, wanted):
                    self._say_why(pair, shape, name, labels, theta, value, wanted)

    def _say_why(self, pair, shape, name, labels, theta, value, expected) -> None:
        """Tell in which way parameter `name` of a likelihood is not the pair's own."""
        site = f"observed site '{shape.name}'"

        def parameter(labels, theta):
            return self.evaluate(labels, theta)[shape.name].parameters[name]

        self._check_places(shape, name, labels, theta, value, expected)
        worst = int(np.argmax(_differs(value, expected)))
        i = np.unravel_index(worst, value.shape)[0]
        row = self.rows[i]
        # All others in another cluster.
        moved = self._moved(labels)
        for p in self.partitions:
            moved[p.name][..., row] = labels[p.name][..., row]
        if not _close(parameter(moved, theta)[i], value[i]):
            indexed = _indexed(self.follows[shape.name], shape, shape.roles[0][1])
            raise NotRecognised(
                f"Parameter `{name}` of {site} depends in row {row} on the cluster of "
                "another row; the likelihood of a row may depend on that of its own "
                f"alone, as in `{indexed}`."
            )
        k = self._clusters(shape.name, labels)
        for _, cluster in shape.roles:
            changed = {**theta, cluster: self.theta[1][cluster]}
            if self.capacity == 1 or _close(parameter(labels, changed), value):
                continue  # The parameter has nothing to do with this site.
            if _close(parameter(self._moved(labels), theta), value):
                raise NotRecognised(
                    f"Parameter `{name}` of {site} does not depend on the cluster of "
                    f"the row: {self._is_indexed(shape, cluster)}"
                )
            used = int(k.flat[0])
            moved = theta[cluster].copy()
            moved[used] = moved[(used + 1) % self.capacity]
            elsewhere = k != used
            change = parameter(labels, {**theta, cluster: moved})
            if not _close(change[elsewhere], value[elsewhere]):
                raise NotRecognised(
                    f"Clusters are coupled: parameter `{name}` of {site} in one "
                    f"cluster changes with '{cluster}' of another. A row's likelihood "
                    "may depend on the parameters of its own cluster only."
                )
        together = parameter(self._zeros(), theta)
        if not _close(together, np.broadcast_to(together[:1], together.shape)):
            raise NotRecognised(
                f"Parameter `{name}` of {site} differs between rows of the same "
                "cluster. The likelihood of a row may depend on the row through its "
                "cluster only (no covariates, no row-dependent offsets)."
            )
        got, wanted = float(value.flat[worst]), float(expected.flat[worst])
        raise NotRecognised(
            f"Parameter `{name}` of {site} is not what {pair_name(pair)} expects "
            f"(in row {row} it is {got:.4g}, expected {wanted:.4g}). "
            f"{pair.form}"
        )

    def _check_places(self, shape, name, labels, theta, value, expected) -> None:
        """If the parameter is as it should be once the rows' partition is the same in
        all views, then it is the views that are not as they were found."""
        partition = self.follows[shape.name]
        if partition.num_views is None:
            return
        z = labels[partition.name]
        same = labels | {partition.name: np.broadcast_to(z[:1], z.shape)}
        got = self.evaluate(same, theta)[shape.name].parameters[name]
        if _close(got, self._expected(same, theta)[shape.name][name]):
            wrong = _differs(value, expected)
            features = len(shape.feature_shape)
            axes = (0, *range(1 + features, wrong.ndim))
            self._misplaced(partition, shape, wrong.any(axes))

    def check_certificate(self) -> None:
        """
        ``log p(x | theta) + log p(theta) - log p(theta | x) = log m(x)``, the first two
        by the user's model, the others by the pair, at a theta near the posterior.
        """
        zeros = self._zeros()
        given = self.evaluate(zeros, self.theta[0])
        cells = {}
        for pair, shape in self.shapes:
            by_row = [given[shape.name].given[name] for name in pair.given_by_row]
            cells[shape.name] = self.x[shape.name], by_row
        shift = np.float64(0)

        def row(i):
            return {
                name: (x[i], [g[i if len(g) > 1 else 0] for g in by_row])
                for name, (x, by_row) in cells.items()
            }

        def compute(hyper, cells, shift):
            return {
                shape.name: _bayes(
                    pair, shape, hyper[shape.name], *cells[shape.name], shift
                )
                for pair, shape in self.shapes
            }

        bayes = compile_for(compute, self.hyper, row(0), shift, quickly=True)
        for i in range(self.num_certified):
            # At outliers farther from the middle of the posterior, on either side.
            if i < _NUM_CERTIFIED:
                away = 1 / (2 + i)
            else:
                away = (-0.85, 3.0)[(i - _NUM_CERTIFIED) % 2]
            found = jax.device_get(bayes(self.hyper, row(i), shift + away))
            theta = dict(self.theta[1])
            for _, shape in self.shapes:
                at, _, _ = found[shape.name]
                for role, cluster in shape.roles:
                    theta[cluster] = theta[cluster].copy()
                    theta[cluster][0] = at[role]
            values = self.evaluate(zeros, theta)
            for pair, shape in self.shapes:
                _, log_posterior, expected = found[shape.name]
                self._check_bayes(
                    pair, shape, i, values[shape.name], log_posterior, expected
                )

    def _check_bayes(self, pair, shape, i, values, log_posterior, expected) -> None:
        terms = values.log_prob[i], values.log_prior[0], -log_posterior
        gap = np.abs(sum(terms) - expected)
        size = 1 + sum(np.abs(t) for t in terms) + np.abs(expected)
        bad = ~(gap <= _TOLERANCE * size)
        if shape.name in self.live:
            bad &= self.live[shape.name].any(0)  # Else there is no value to look at.
            if pair.given_by_row:
                # What replaces a masked value need not go with its row's parameters.
                bad &= self.live[shape.name][self.rows[i]]
        if np.any(bad):
            index = _first(bad)
            worst = float(np.asarray(gap)[index])
            clusters = " and ".join(f"'{c}'" for _, c in shape.roles)
            raise NotRecognised(
                f"{column_name(shape, index)} with cluster sites {clusters} fails "
                f"Bayes' law for {pair_name(pair)} by {worst:.3g} nats in row "
                f"{self.rows[i]}: the model's densities are not those of the pair. "
                f"{pair.form}"
            )


def _outliers(x: np.ndarray, live: np.ndarray | None) -> np.ndarray:
    """
    Two rows, those of the lowest and of the highest cell, in standard deviations of its
    column: where a density that is cut off somewhere is not that of the pair.
    """
    lowest, highest, rows = np.inf, -np.inf, np.zeros(2, np.int32)
    cells = x.reshape(len(x), -1)
    if live is not None:
        live = np.broadcast_to(
            live.reshape(*live.shape, *[1] * (x.ndim - live.ndim)), x.shape
        )
        live = live.reshape(cells.shape)
    # One column after another: the table may fill the memory.
    for j in range(cells.shape[1]):
        column = cells[:, j].astype(float)
        known = np.isfinite(column)
        if live is not None:
            known &= live[:, j]
        if not known.any():
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.mean(column, where=known)
            scale = np.std(column, where=known)
            column = np.where(known, column - mean, 0) / (scale if scale > 0 else 1)
        low, high = np.argmin(column), np.argmax(column)
        if column[low] < lowest:
            lowest, rows[0] = column[low], low
        if column[high] > highest:
            highest, rows[1] = column[high], high
    return rows


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    """Index of the first feature that is `wrong` ``[*feature_shape]``."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _indexed(partition: Partition, shape: SiteShape, cluster: str) -> str:
    """How a cluster site should be indexed."""
    if partition.num_views is None:
        return f"{cluster}[{partition.name}]"
    view = partition.features or "views"
    if shape.feature_shape:
        return f"{cluster}[{partition.name}[{view}].T, jnp.arange(D)]"
    view = "1" if partition.features is None else f"{view}[0]"
    return f"{cluster}[{partition.name}[{view}]]"


def _bits(num: int) -> np.ndarray:
    """The bits of 1, ..., `num`, and those bits inverted: ``[2 * bits, num]``."""
    bits = np.arange(1, num + 1) >> np.arange(num.bit_length())[:, None] & 1
    return np.concatenate([bits, 1 - bits])


def _from_bits(moves: np.ndarray) -> np.ndarray:
    """
    The one of 0, ..., num - 1 that, by `moves` ``[2 * bits, ...]``, was moved when it
    was among those that the rows of `_bits` choose; -1 where it was several, or none.
    """
    on, off = np.split(moves, 2)
    weights = 2 ** np.arange(len(on)).reshape(-1, *(1,) * (on.ndim - 1))
    return np.where((on ^ off).all(0), (on * weights).sum(0) - 1, -1)


def _bayes(
    pair: AbstractConjugatePair, shape: SiteShape, hyper: Hyper, x, given, shift
):
    """
    Given one row `x`, for every feature: a point theta inside the posterior, its log
    posterior density, and the log marginal likelihood of the row.
    """

    def one_feature(hyper, x, *given):
        stat = pair.add(hyper, pair.empty(hyper), pair.cell(hyper, x, *given))
        posterior = pair.posterior(hyper, stat)
        theta = pair.theta(posterior, partial(_inside, shift))
        density = []

        def record(role, fn):
            density.append(fn.log_prob(theta[role]))
            return theta[role]

        pair.theta(posterior, record)
        return theta, sum(density), pair.log_marginal(hyper, stat)

    num = len(shape.feature_shape)

    def flat(value):
        return jnp.reshape(value, (shape.num_features, *jnp.shape(value)[num:]))

    hyper = {name: flat(value) for name, value in hyper.items()}
    out = jax.vmap(one_feature)(hyper, flat(x), *map(flat, given))
    return jax.tree.map(lambda v: v.reshape(shape.feature_shape + v.shape[1:]), out)


def _inside(shift, role: str, fn: dist.Distribution) -> Array:
    """`SampleFn` for a point well inside the distribution. The certificate holds at
    every point, but a draw from a vague posterior may overflow."""
    del role
    if isinstance(fn, dist.Normal):
        return fn.loc + shift * fn.scale
    if isinstance(fn, dist.MultivariateNormal):
        return fn.loc + shift * fn.scale_tril.sum(-1)
    if isinstance(fn, dist.InverseGamma):
        return (1 + shift) * fn.rate / (fn.concentration + 1)
    if isinstance(fn, dist.InverseWishart):
        size = fn.event_shape[-1]
        return (1 + shift) * fn.scale_matrix / (fn.concentration + size + 1)
    return fn.mean


def _differs(a, b) -> np.ndarray:
    a, b = np.asarray(a), np.asarray(b)
    scale = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore"):
        return ~((a == b) | (np.abs(a - b) <= _TOLERANCE * scale))


def _close(a, b) -> bool:
    return not _differs(a, b).any()
