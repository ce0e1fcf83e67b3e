# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Does a model behave as a conjugate pair says? It is run at a few rows, with random
cluster parameters, and its densities must obey Bayes' law."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist
from numpyro.infer.initialization import init_to_uniform

from numpyro_subanneal.compiling import compile_for
from numpyro_subanneal.conjugate.base import AbstractConjugatePair, Hyper, SiteShape
from numpyro_subanneal.reading import (
    Partition,
    by_role,
    given_parameters,
    prior_hyperparameters,
    read_prior,
    with_array_arguments,
)
from numpyro_subanneal.skeleton import NotRecognised, peel, run_trace
from numpyro_subanneal.typing import Array

_TOLERANCE = 1e-6

# Rows at which the model is looked at: all, or so many at random.
_NUM_PROBED = 2000
_NUM_CERTIFIED = 5


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


class Prober:
    """
    Evaluates the model at chosen assignments and cluster parameters.

    :param partition: the site of the assignments.
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
        partition: Partition,
        capacity: int,
        hyper_sites: Sequence[str],
        imputed: Sequence[str],
        shapes: Sequence[tuple[AbstractConjugatePair, SiteShape]],
        data: Mapping[str, np.ndarray],
        live: Mapping[str, np.ndarray],
    ):
        self.model = model
        self.partition = partition
        self.num_rows = partition.num_rows
        self.capacity = capacity
        self.hyper_sites = tuple(hyper_sites)
        self.imputed = imputed
        self.shapes = shapes
        self.live = live
        self.rng = np.random.default_rng(0)
        self.rebuild, arrays = with_array_arguments(args, kwargs)
        # NB: views. JAX remembers an array that was a constant of an unfinished trace
        # (the model raised an error) as it converted it there, in 32 bits.
        self.arrays = [x.view() if isinstance(x, np.ndarray) else x for x in arrays]
        self.hyper: dict[str, dict[str, np.ndarray]] = {}
        # The first ones, spread over the table, are those of the certificate.
        spread = np.linspace(0, self.num_rows - 1, _NUM_CERTIFIED).astype(np.int32)
        others = self.rng.permutation(self.num_rows)[:_NUM_PROBED].astype(np.int32)
        self.rows = np.concatenate([spread, others])
        self.x = {shape.name: data[shape.name][self.rows] for _, shape in shapes}
        seed = np.uint32(0)
        draw = compile_for(self._random_theta, seed, self.arrays)
        first, second = (jax.device_get(draw(seed + i, self.arrays)) for i in range(2))
        own = {name: first[name] for name in self.hyper_sites}
        self.theta = [first, second | own]
        # Other values of the hyperparameters, and the same cluster parameters.
        self.other_hyper = first | {name: second[name] for name in self.hyper_sites}
        z = np.zeros(self.num_rows, np.int32)
        self._evaluate = compile_for(
            self._compute, z, self.theta[0], self.rows, self.x, self.arrays
        )

    def _random_theta(self, seed, arrays):
        """Values of the cluster sites and hyperparameters, spread over their
        supports."""

        def pick(site):
            if site["name"] == self.partition.name:
                return jnp.zeros(self.num_rows, jnp.int32)
            if site["name"] in self.imputed:
                return None
            if site["type"] == "sample" and not site["is_observed"]:
                return init_to_uniform(site, radius=1)
            return None

        args, kwargs = self.rebuild(arrays)
        trace = run_trace(self.model, args, kwargs, pick, random.key(seed))
        names = [name for _, shape in self.shapes for _, name in shape.roles]
        names.extend(self.hyper_sites)
        if self.partition.weights is not None:
            names.append(self.partition.weights)
        return {name: _in_double(trace[name]["value"]) for name in names}

    def _compute(self, z, theta, rows, x, arrays):
        args, kwargs = self.rebuild(arrays)
        values = {self.partition.name: z, **theta}

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
        fn = peel(trace[self.partition.name]["fn"])
        probs = None
        if self.partition.labelled:
            probs = jnp.broadcast_to(fn.probs, (self.num_rows, fn.probs.shape[-1]))
            probs = probs[rows]
        return out, read_prior(self.partition, trace), probs

    def evaluate(self, z, theta, x=None) -> dict[str, _Values]:
        z = np.asarray(z, np.int32)
        values, self.prior, self.probs = jax.device_get(
            self._evaluate(z, theta, self.rows, x or self.x, self.arrays)
        )
        return values

    def _assignments(self):
        """Random assignments; neighbouring probed rows share a cluster, so that rows in
        the same cluster and rows in different ones are both seen."""
        z = self.rng.integers(self.capacity, size=self.num_rows)
        z[self.rows[:4]] = (np.arange(min(4, len(self.rows))) // 2) % self.capacity
        return z

    # --- the prior -----------------------------------------------------------------

    def check_prior(self) -> None:
        z = self._assignments()
        second = self.evaluate(z, self.theta[1])
        self._check_weights(self.theta[1])
        first = self.evaluate(z, self.theta[0])
        self._check_weights(self.theta[0])
        error = self.prior.parameter_error()
        if error is not None:
            raise NotRecognised(
                f"The prior of partition site '{self.partition.name}': {error}"
            )
        for pair, shape in self.shapes:
            self._check_hyper(pair, shape, first[shape.name], second[shape.name])

    def check_learned(self, learned: Sequence[str]) -> None:
        """
        Are the hyperparameters `learned`, which the kernel samples itself, such that no
        statistic changes with them?
        """
        if not learned:
            return
        z = self._assignments()
        first = self.evaluate(z, self.theta[0])
        own = {name: self.other_hyper[name] for name in learned}
        second = self.evaluate(z, self.theta[0] | own)
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
        name, weights = self.partition.name, self.partition.weights
        if not self.partition.labelled:
            return
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
        for name, value in (*first.hyper.items(), *first.given.items()):
            valid = np.isfinite(value)
            if name in pair.positive:
                valid &= value > 0
            if not valid.all():
                what = f"Hyperparameter `{name}` of {where}"
                if name in first.given:
                    what = f"Parameter `{name}` of observed site '{shape.name}'"
                raise NotRecognised(
                    f"{what} is {value[~valid].flat[0]}; it must be finite"
                    f"{' and positive' if name in pair.positive else ''}."
                )
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
            zero = jnp.zeros(self.num_rows, jnp.int32)
            values = {self.partition.name: zero, **theta}

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
        return jax.device_get(compile_for(compute, *args)(*args))

    # --- the likelihood ------------------------------------------------------------

    def check_parameters(self) -> None:
        z = self._assignments()
        theta = self.theta[0]
        values = self.evaluate(z, theta)
        moved = self.evaluate((z + 1) % self.capacity, theta)
        roles = {
            shape.name: {r: theta[c][z[self.rows]] for r, c in shape.roles}
            for _, shape in self.shapes
        }

        def parameters(roles):
            return {s.name: p.parameters(roles[s.name]) for p, s in self.shapes}

        expected = jax.device_get(compile_for(parameters, roles)(roles))
        for pair, shape in self.shapes:
            for name, value in values[shape.name].given.items():
                if not _close(value, moved[shape.name].given[name]):
                    raise NotRecognised(
                        f"Parameter `{name}` of observed site '{shape.name}' depends "
                        f"on the cluster of the row, but for {pair_name(pair)} it must "
                        f"be known. {pair.form}"
                    )
            for name, value in values[shape.name].parameters.items():
                wanted = expected[shape.name][name]
                if not _close(value, wanted):
                    self._say_why(pair, shape, name, z, theta, value, wanted)

    def _say_why(self, pair, shape, name, z, theta, value, expected) -> None:
        """Tell in which way parameter `name` of a likelihood is not the pair's own."""
        site = f"observed site '{shape.name}'"

        def parameter(z, theta):
            return self.evaluate(z, theta)[shape.name].parameters[name]

        for _, cluster in shape.roles:
            changed = {**theta, cluster: self.theta[1][cluster]}
            if self.capacity == 1 or _close(parameter(z, changed), value):
                continue  # The parameter has nothing to do with this site.
            # All rows are moved to another cluster, and nothing else.
            if _close(parameter((z + 1) % self.capacity, theta), value):
                indexed = f"{cluster}[{self.partition.name}]"
                raise NotRecognised(
                    f"Parameter `{name}` of {site} does not depend on the cluster of "
                    f"the row: is '{cluster}' indexed by '{self.partition.name}', as "
                    f"in `{indexed}`?"
                )
            used = int(z[self.rows[0]])
            moved = theta[cluster].copy()
            moved[used] = moved[(used + 1) % self.capacity]
            elsewhere = z[self.rows] != used
            change = parameter(z, {**theta, cluster: moved})
            if not _close(change[elsewhere], value[elsewhere]):
                raise NotRecognised(
                    f"Clusters are coupled: parameter `{name}` of {site} in one "
                    f"cluster changes with '{cluster}' of another. A row's likelihood "
                    "may depend on the parameters of its own cluster only."
                )
        same = np.zeros_like(z)
        together = parameter(same, theta)
        if not _close(together, np.broadcast_to(together[:1], together.shape)):
            raise NotRecognised(
                f"Parameter `{name}` of {site} differs between rows of the same "
                "cluster. The likelihood of a row may depend on the row through its "
                "cluster only (no covariates, no row-dependent offsets)."
            )
        scale = np.maximum(np.abs(value), np.abs(expected))
        worst = np.argmax(np.abs(value - expected) > _TOLERANCE * scale)
        got, wanted = float(value.flat[worst]), float(expected.flat[worst])
        raise NotRecognised(
            f"Parameter `{name}` of {site} is not what {pair_name(pair)} expects "
            f"(for one row it is {got:.4g}, expected {wanted:.4g}). "
            f"{pair.form}"
        )

    def check_certificate(self) -> None:
        """
        ``log p(x | theta) + log p(theta) - log p(theta | x) = log m(x)``, the first two
        by the user's model, the others by the pair, at a theta near the posterior.
        """
        z = np.zeros(self.num_rows, int)
        given = self.evaluate(z, self.theta[0])
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
        for i in range(_NUM_CERTIFIED):
            found = jax.device_get(bayes(self.hyper, row(i), shift + 1 / (2 + i)))
            theta = dict(self.theta[1])
            for _, shape in self.shapes:
                at, _, _ = found[shape.name]
                for role, cluster in shape.roles:
                    theta[cluster] = theta[cluster].copy()
                    theta[cluster][0] = at[role]
            values = self.evaluate(z, theta)
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
        if np.any(bad):
            index = tuple(int(j[0]) for j in np.nonzero(np.atleast_1d(bad)))
            index = index if shape.feature_shape else ()
            worst = float(np.asarray(gap)[index])
            clusters = " and ".join(f"'{c}'" for _, c in shape.roles)
            raise NotRecognised(
                f"{column_name(shape, index)} with cluster sites {clusters} fails "
                f"Bayes' law for {pair_name(pair)} by {worst:.3g} nats in row "
                f"{self.rows[i]}: the model's densities are not those of the pair. "
                f"{pair.form}"
            )


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


def _close(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    scale = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore"):
        return bool(np.all((a == b) | (np.abs(a - b) <= _TOLERANCE * scale)))
