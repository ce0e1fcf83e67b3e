# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Oracles for samplers of partitions, and the laws of conjugate pairs.

The oracles are in plain float64 NumPy and SciPy. Nothing in them is shared with the
kernel, the distributions or the conjugate pairs, and each quantity is derived by
another route than there, so agreement is evidence. They are meant for small problems:
ten rows already have 115975 partitions. Labels have shape ``[..., N]`` (leading axes
are draws; -1 is "in no cluster"), the rows of one cluster ``[n, D]`` (features are
independent given the partition). Logs are natural.

:func:`check_conjugate` is for authors of their own conjugate pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from scipy import special, stats

from numpyro.distributions import constraints

from numpyro_subanneal.compiling import quick_options
from numpyro_subanneal.conjugate.base import (
    AbstractBlock,
    AbstractConjugatePair,
    Observed,
    SiteShape,
)

# Bell(12) = 4213597 partitions take 0.4 GB; Bell(13) would take 2.9 GB.
_MAX_ROWS = 12
# Few, long batches: the t law with 31 degrees of freedom holds as long as 1/32 of the
# chain is long against its autocorrelation time; sqrt(n) batches are biased earlier.
_NUM_BATCHES = 32
# Simulated multinomials for the spread of the TV distance: error 1 / sqrt(800) = 3.5 %.
_NUM_SIMULATED = 400
# The usual least expected count for the chi-square law of Pearson's statistic.
_MIN_EXPECTED = 5.0


def _check(ok: Any, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _integers(name: str, value: Any) -> np.ndarray:
    value = np.asarray(value)
    integer = np.issubdtype(value.dtype, np.integer)
    _check(integer, f"`{name}` must hold integers, got dtype {value.dtype}.")
    return value.astype(np.int64)


# --- Partitions ---


def set_partitions(n: int) -> np.ndarray:
    """All partitions of ``n`` rows, as restricted growth strings.

    :param int n: number of rows, 1 to 12.
    :return: labels ``[Bell(n), n]`` in lexicographic order; each starts with 0, and a
        new label is one more than the largest before it.
    """
    _check(1 <= n <= _MAX_ROWS, f"`n` must lie in 1..{_MAX_ROWS}, got {n}.")
    strings = np.zeros((1, 1), dtype=np.int64)
    for _ in range(n - 1):
        choices = strings.max(1) + 2  # the old labels and a new one
        starts = np.cumsum(choices) - choices
        last = np.arange(choices.sum()) - np.repeat(starts, choices)
        strings = np.column_stack([np.repeat(strings, choices, axis=0), last])
    return strings


def canonical_labels(z: Any) -> np.ndarray:
    """Labels renumbered 0, 1, ... by first appearance along the last axis.

    :param z: labels ``[..., N]``; -1 is kept, any other integer names a cluster.
    :return: int64 labels of the same shape, alike exactly for like partitions.
    """
    z = _integers("z", z)
    _check(z.ndim, f"`z` must have a last axis of rows, got the scalar {z}.")
    flat = z.reshape(-1, z.shape[-1])
    out = np.full(flat.shape, -1, dtype=np.int64)
    draws = np.arange(len(flat))
    num_clusters = np.zeros(len(flat), dtype=np.int64)
    for i in range(flat.shape[1]):
        first = (flat[:, : i + 1] == flat[:, i, None]).argmax(1)
        label = np.where(first == i, num_clusters, out[draws, first])
        out[:, i] = np.where(flat[:, i] == -1, -1, label)
        num_clusters += (first == i) & (flat[:, i] != -1)
    return out.reshape(z.shape)


def partition_index(z: Any, partitions: Any) -> np.ndarray:
    """Position of each draw's partition in a list; a ValueError if it is not there.

    :param z: labels ``[..., N]``, see :func:`canonical_labels`.
    :param partitions: different partitions ``[P, N]``, as of :func:`set_partitions`.
    :return: int64 array of the leading shape of ``z``.
    """
    partitions, z = canonical_labels(partitions), canonical_labels(z)
    position = {p.tobytes(): i for i, p in enumerate(partitions)}
    _check(
        len(position) == len(partitions),
        f"`partitions` has {len(partitions)} rows but {len(position)} are different.",
    )
    index = np.zeros(z.shape[:-1], dtype=np.int64)
    for draw in np.ndindex(index.shape):
        index[draw] = position.get(z[draw].tobytes(), -1)
        _check(
            index[draw] >= 0,
            f"Draw {draw} is {z[draw].tolist()}, not one of the {len(partitions)} "
            "`partitions`.",
        )
    return index


def log_eppf(z: Any, concentration: float, discount: float = 0.0) -> Any:
    """Log probability of a partition under the Pitman-Yor (Chinese restaurant) law.

    The product of the urn's predictives, row after row: with ``i`` rows seated in
    ``K`` clusters, an old cluster of ``n`` rows has probability ``(n - discount) /
    (i + concentration)``, a new one ``(concentration + K discount) / (i +
    concentration)``.

    :param z: labels ``[..., N]``. Rows labelled -1 are left out: the law is
        consistent, so this is the law of the partition of the other rows.
    :param float concentration: above ``-discount``.
    :param float discount: in ``[0, 1)``; 0 is the Dirichlet process.
    :return: float64 of the leading shape of ``z``.
    """
    _check(0.0 <= discount < 1.0, f"`discount` must lie in [0, 1), got {discount}.")
    _check(
        -discount < concentration < np.inf,
        f"`concentration` must be finite and exceed {-discount}, got {concentration}.",
    )
    z = canonical_labels(z)
    out = np.zeros(z.shape[:-1])
    for draw in np.ndindex(out.shape):
        sizes: list[int] = []
        for label in z[draw][z[draw] >= 0]:
            seated = sum(sizes)
            if label == len(sizes):
                weight = concentration + discount * len(sizes)
                sizes.append(1)
            else:
                weight = sizes[label] - discount
                sizes[label] += 1
            if seated:  # the first row has no choice; its factor could be 0 / 0
                out[draw] += np.log(weight / (seated + concentration))
    return out[()]


# --- Log marginal likelihoods of the rows of one cluster ---


def normal_log_marginal(x: Any, mean: Any, kappa: Any, shape: Any, rate: Any) -> float:
    """Log marginal density of normal rows of unknown mean and variance.

    Per feature ``x_i ~ Normal(loc, var)``, ``loc ~ Normal(mean, var / kappa)``,
    ``var ~ InverseGamma(shape, rate)``. Given ``var`` the rows are jointly normal
    with covariance ``var (I + 11' / kappa)``; the inverse gamma mixture of such
    normals is the multivariate Student t with ``2 shape`` degrees of freedom,
    location ``mean`` and scale matrix ``(rate / shape) (I + 11' / kappa)``.

    :param x: finite data ``[n, D]``; ``n`` may be 0.
    :param mean: prior location, scalar or ``[D]``, as are the others.
    :param kappa: weight of ``mean``, in rows.
    :param shape: inverse gamma shape.
    :param rate: inverse gamma rate (called *scale* in ``scipy.stats.invgamma``).
    :return: the sum over features.
    """
    x = np.asarray(x, dtype=np.float64)
    _check(x.ndim == 2, f"`x` must have shape [n, D], got {x.shape}.")
    _check(np.isfinite(x).all(), f"`x` must be finite, got {x.tolist()}.")
    named = {"mean": mean, "kappa": kappa, "shape": shape, "rate": rate}
    for name, value in named.items():
        positive = name == "mean" or (np.asarray(value) > 0).all()
        _check(positive, f"`{name}` must be positive, got {value}.")
    hypers = [np.broadcast_to(v, x.shape[1]) for v in named.values()]
    total = 0.0
    for column, m, k, a, b in zip(x.T, *hypers, strict=True):
        if n := len(column):
            scale = b / a * (np.eye(n) + 1.0 / k)
            law = stats.multivariate_t(np.full(n, m), scale, df=2.0 * a)
            total += float(law.logpdf(column))
    return total


def categorical_log_marginal(codes: Any, concentration: Any) -> float:
    """Log marginal probability of categorical rows of unknown probabilities.

    Per feature ``code_i ~ Categorical(theta)``, ``theta ~ Dirichlet(concentration)``;
    the product of the predictives of Polya's urn, row after row.

    :param codes: integers ``[n, D]`` in ``0..C-1``; ``n`` may be 0.
    :param concentration: ``[C]`` for all features, or ``D`` such arrays, whose
        lengths may differ.
    :return: the sum over features.
    """
    codes = _integers("codes", codes)
    _check(codes.ndim == 2, f"`codes` must have shape [n, D], got {codes.shape}.")
    num_features = codes.shape[1]
    shared = np.ndim(concentration[0]) == 0
    urns: Sequence[Any] = [concentration] * num_features if shared else concentration
    _check(
        len(urns) == num_features,
        f"`codes` has {num_features} features but `concentration` {len(urns)}.",
    )
    total = 0.0
    for column, urn in zip(codes.T, urns, strict=True):
        w = np.array(urn, dtype=np.float64)
        _check((w > 0).all(), f"`concentration` must be positive, got {w.tolist()}.")
        for code in column:
            _check(0 <= code < len(w), f"Code {code} is outside 0..{len(w) - 1}.")
            total += float(np.log(w[code] / w.sum()))
            w[code] += 1.0
    return total


# --- Exact posterior ---


@dataclass(frozen=True, eq=False)
class Enumeration:
    """The exact posterior over partitions, from :func:`enumerate_posterior`.

    - **partitions** - labels ``[P, N]``, see :func:`set_partitions`.
    - **log_joint** - log prior plus log marginal likelihood ``[P]``; its log-sum-exp
      is the log evidence.
    - **probs** - posterior probabilities ``[P]``.
    """

    partitions: np.ndarray
    log_joint: np.ndarray
    probs: np.ndarray

    def expectation(self, fn: Callable[[np.ndarray], Any]) -> np.ndarray:
        """Posterior mean of ``fn(labels [N])``, a number or an array of one shape."""
        values = np.stack([np.asarray(fn(z), dtype=float) for z in self.partitions])
        return np.tensordot(self.probs, values, axes=1)


def enumerate_posterior(
    log_prior: Callable[[np.ndarray], Any],
    log_marginals: Callable[[np.ndarray], Any],
    num_rows: int,
) -> Enumeration:
    """Exact posterior over the partitions of a few rows.

    :param log_prior: maps labels ``[N]`` to the log prior, up to a constant.
    :param log_marginals: maps row numbers ``[n]`` to the log marginal likelihood of
        these rows as one cluster; called once for each of the ``2^N - 1`` subsets.
    :param int num_rows: number of rows, 1 to 12.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_subanneal import testing
        >>> x = np.array([[-1.0], [-0.9], [3.0]])
        >>> posterior = testing.enumerate_posterior(
        ...     lambda z: testing.log_eppf(z, 1.0),
        ...     lambda rows: testing.normal_log_marginal(x[rows], 0.0, 0.1, 2.0, 1.0),
        ...     num_rows=3)
        >>> posterior.partitions[posterior.probs.argmax()].tolist()
        [0, 0, 1]
    """
    partitions = set_partitions(num_rows)
    cache: dict[tuple[int, ...], float] = {}
    log_joint = np.zeros(len(partitions))
    for p, z in enumerate(partitions):
        log_joint[p] = float(log_prior(z))
        for k in range(z.max() + 1):
            rows = np.flatnonzero(z == k)
            subset = tuple(rows.tolist())
            if subset not in cache:
                cache[subset] = float(log_marginals(rows))
            log_joint[p] += cache[subset]
        _check(
            log_joint[p] < np.inf,  # false for NaN too
            f"The log joint of the partition {z.tolist()} is {log_joint[p]}.",
        )
    _check(np.isfinite(log_joint).any(), "All partitions have probability 0.")
    return Enumeration(partitions, log_joint, special.softmax(log_joint))


# --- Tests of draws ---


@dataclass(frozen=True)
class FitReport:
    """What :func:`goodness_of_fit` found.

    - **num_draws** - draws compared, after thinning.
    - **tv** - total variation distance of the empirical frequencies to the truth.
    - **tv_floor** - exact expectation of ``tv`` for independent draws.
    - **tv_floor_sd** - standard deviation of ``tv`` for independent draws (simulated
      with a fixed seed, good to about 4 %).
    - **chi2**, **dof**, **p_value** - Pearson's test over the pooled cells.
    """

    num_draws: int
    tv: float
    tv_floor: float
    tv_floor_sd: float
    chi2: float
    dof: int
    p_value: float


def goodness_of_fit(
    indices: Any, probs: Any, thin_ess: float | None = None
) -> FitReport:
    """Compares draws of a discrete variable with its exact probabilities.

    The floor of the distance uses De Moivre's mean absolute deviation of a binomial
    count, ``E|X - n p| = 2 m (1 - p) P(X = m)`` with ``m = floor(n p) + 1``. For
    Pearson's test the cells of expectation below 5 become one cell, which takes in
    the next smallest ones until it reaches 5. A draw of probability 0 gives p = 0.

    :param indices: integers ``[n]``, as from :func:`partition_index`.
    :param probs: probabilities ``[P]``, summing to 1.
    :param thin_ess: keep at most this many evenly spaced draws, for chains. Both
        tests suppose independent draws. An AR(1) chain thinned to its effective
        sample size keeps a lag-one correlation of about ``exp(-2)``, thinned to half
        of that ``exp(-4)``: pass half the effective sample size or less.
    """
    indices, probs = _integers("indices", indices), np.asarray(probs, dtype=np.float64)
    _check(indices.ndim == 1, f"`indices` must have one axis, got {indices.shape}.")
    if thin_ess is not None:
        _check(thin_ess >= 1, f"`thin_ess` must be at least 1, got {thin_ess}.")
        indices = indices[:: max(int(np.ceil(len(indices) / thin_ess)), 1)]
    _check(
        probs.ndim == 1 and (probs >= 0).all() and abs(probs.sum() - 1) < 1e-8,
        "`probs` must be a vector of non-negative numbers that sum to 1, got shape "
        f"{probs.shape} and sum {probs.sum()}.",
    )
    bad = indices[(indices < 0) | (indices >= len(probs))]
    _check(not len(bad), f"Indices {bad[:5]} are outside 0..{len(probs) - 1}.")
    n, probs = len(indices), probs / probs.sum()
    order = np.argsort(probs)  # smallest first
    counts = np.bincount(indices, minlength=len(probs))[order]
    expected = n * probs[order]

    small, short = expected < _MIN_EXPECTED, expected.cumsum() < _MIN_EXPECTED
    pooled = max(int(small.sum()), int(short.sum()) + 1)
    starts = np.append(0, np.arange(pooled, len(probs)))
    dof = len(starts) - 1
    _check(
        dof,
        f"{n} draws of {len(probs)} states leave one cell of expectation >= "
        f"{_MIN_EXPECTED}; take more draws.",
    )
    cells = np.add.reduceat(expected, starts)
    chi2 = float(((np.add.reduceat(counts, starts) - cells) ** 2 / cells).sum())
    if counts[expected == 0].any():
        chi2 = np.inf

    m = np.floor(n * probs) + 1
    deviations = 2 * m * (1 - probs) * stats.binom.pmf(m, n, probs)
    rng = np.random.default_rng(0)
    simulated = [
        0.5 * np.abs(rng.multinomial(n, probs) / n - probs).sum()
        for _ in range(_NUM_SIMULATED)
    ]
    return FitReport(
        num_draws=n,
        tv=float(0.5 * np.abs(counts - expected).sum() / n),
        tv_floor=float(0.5 * deviations.sum() / n),
        tv_floor_sd=float(np.std(simulated, ddof=1)),
        chi2=chi2,
        dof=dof,
        p_value=float(stats.chi2.sf(chi2, dof)),
    )


@dataclass(frozen=True)
class JointReport:
    """What :func:`joint_distribution_test` found, by ``name`` and ``name^2``.

    - **z** - difference of the means, chain minus prior, in standard errors.
    - **p** - two-sided p-values, each by itself.
    - **ess** - effective sample sizes of the chain.
    - **worst** - the key with the smallest p-value.
    - **p_value** - smallest p-value times the number of tests, at most 1 (Bonferroni,
      also Holm's first step): for a right sampler it falls below ``a`` with
      probability at most ``a``, however the statistics depend on each other.
    """

    z: dict[str, float]
    p: dict[str, float]
    ess: dict[str, float]
    worst: str
    p_value: float


def joint_distribution_test(
    prior_draws: Mapping[str, Any],
    chain_draws: Mapping[str, Any],
    *,
    chain_ess: float | Mapping[str, float] | None = None,
) -> JointReport:
    """Geweke's joint distribution test of a sampler.

    Independent draws of (parameters, data) from the prior are compared with a chain
    that alternates the sampler under test with new data from the likelihood. Both
    have the same law if sampler and model agree. Each scalar statistic and its square
    (about the mean of the prior draws) is tested by the difference of means with
    Welch's t law. It needs four finite moments: take logs of heavy-tailed statistics.

    :param prior_draws: name to independent draws ``[n]``.
    :param chain_draws: name to draws ``[m]`` or ``[chains, m]``, for the same names.
        Start each chain at a draw from the prior, or drop a burn-in.
    :param chain_ess: effective sample size of all chains together, for all names or
        by name. By default the error comes from 32 or more batch means (a batch never
        spans chains; it must be long against the autocorrelation time). ArviZ is not
        used, so that this error keeps a known t law.

    **References:**

    1. *Getting It Right: Joint Distribution Tests of Posterior Simulators*,
       John Geweke (2004)
    """
    _check(
        prior_draws and set(prior_draws) == set(chain_draws),
        "Both sets of draws must have the same statistics, got "
        f"{sorted(prior_draws)} and {sorted(chain_draws)}.",
    )
    z, p, ess = {}, {}, {}
    for name in prior_draws:
        prior = np.asarray(prior_draws[name], dtype=np.float64)
        chain = np.atleast_2d(np.asarray(chain_draws[name], dtype=np.float64))
        _check(
            prior.ndim == 1 and len(prior) > 1 and chain.ndim == 2,
            f"Statistic {name!r} needs prior draws [n >= 2] and chain draws [m] or "
            f"[chains, m], got {prior.shape} and {np.shape(chain_draws[name])}.",
        )
        finite = np.isfinite(prior).all() and np.isfinite(chain).all()
        _check(finite, f"Statistic {name!r} has draws that are not finite.")
        given = chain_ess[name] if isinstance(chain_ess, Mapping) else chain_ess
        centre = prior.mean()
        squares = (prior - centre) ** 2, (chain - centre) ** 2
        for key, (a, b) in {name: (prior, chain), f"{name}^2": squares}.items():
            mean_b, var_b, dof_b, ess[key] = _chain_mean(name, b, given)
            var_a, dof_a = a.var(ddof=1) / len(a), len(a) - 1
            difference, variance = mean_b - a.mean(), var_a + var_b
            if variance == 0:  # both constant
                z[key] = float(np.inf * np.sign(difference)) if difference else 0.0
                p[key] = float(difference == 0)
                continue
            dof = variance**2 / (var_a**2 / dof_a + var_b**2 / dof_b)
            z[key] = float(difference / np.sqrt(variance))
            p[key] = float(2 * stats.t.sf(abs(z[key]), dof))
    worst = min(p, key=p.__getitem__)
    return JointReport(z, p, ess, worst, min(1.0, len(p) * p[worst]))


def _chain_mean(
    name: str, draws: np.ndarray, ess: float | None
) -> tuple[float, float, float, float]:
    """Mean of the chains ``[C, m]``, its variance, the variance's dof, the ESS."""
    if ess is not None:
        _check(ess > 1, f"`chain_ess` of {name!r} must exceed 1, got {ess}.")
        return float(draws.mean()), float(draws.var() / ess), ess - 1.0, float(ess)
    num_chains, num_draws = draws.shape
    per_chain = -(-_NUM_BATCHES // num_chains)  # rounded up; 1 for many chains
    length = num_draws // per_chain
    _check(
        length,
        f"Statistic {name!r} has chains of {num_draws} draws, too short for "
        f"{per_chain} batches each; run longer or pass `chain_ess`.",
    )
    draws = draws[:, num_draws - per_chain * length :]
    batches = draws.reshape(-1, length).mean(1)
    variance = float(batches.var(ddof=1) / len(batches))
    ess = float(draws.var()) / variance if variance else float(draws.size)
    return float(batches.mean()), variance, len(batches) - 1.0, ess


# --- Laws of conjugate pairs ---


class ConjugateExample(NamedTuple):
    """Hyperparameters and values on which a conjugate pair is tested.

    - **hyper** - hyperparameters of one feature by name, as the pair names them,
      with the known constants (`given`) of its likelihood.
    - **values** - values of that feature ``[n, *event_shape]``, integers where the
      likelihood is discrete.
    - **given_by_row** - likelihood parameters that differ by row, by name, ``[n]``.
    """

    hyper: Mapping[str, Any]
    values: Any
    given_by_row: Mapping[str, Any] = {}


# Draws at a time, for all pairs alike: JAX compiles its samplers for each shape.
_DRAWS = 4000
_BATCHES = 25  # of draws, for Monte Carlo means
_POINTS = 2**15  # of a quadrature
_MAX_Z, _MIN_LOG10_P = 4.5, -5.0
# Clusters and rows of the random moves. Most moves go to the first cluster, which is
# then never empty; the others often are.
_CLUSTERS, _ROWS = 4, 24
_FLOAT32 = 2.0**-24  # the largest relative error of rounding
_ACCUMULATED = (1, 10, 2**10, 2**20)


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as JAX compiles it, of which the first argument is static; in float64
    quickly, as it runs but a few times."""
    exactly, quickly = jax.jit(fn, static_argnums=0), _quickly_compiled(fn)

    @wraps(fn)
    def call(*args):
        return (quickly if _in_double() else exactly)(*args)

    return call


def _quickly_compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    @lru_cache(maxsize=1)
    def compiled():
        return jax.jit(fn, static_argnums=0, compiler_options=quick_options())

    @wraps(fn)
    def call(*args):
        return compiled()(*args)

    return call


def _in_double() -> bool:
    return jnp.result_type(float) == np.float64


_Finding = tuple[str, Any, Any]
"""What was measured, by how much it is off and how much is allowed, ``[E, ...]``; an
infinite allowance marks an example that says nothing."""


@dataclass(frozen=True, eq=False)
class _Examples:
    """Examples of one pair whose arrays have the same shapes, side by side.

    - **index** - positions in the sequence that the user gave ``[E]``.
    - **hyper** - by name ``[E, ...]``.
    - **values**, **given** - ``[E, L, ...]``, padded with the first value.
    - **num** - number of values of each ``[E]``.
    - **role_shapes** - event shape of each role.
    """

    pair: AbstractConjugatePair
    index: list[int]
    hyper: dict[str, np.ndarray]
    values: np.ndarray
    given: tuple[np.ndarray, ...]
    num: np.ndarray
    role_shapes: dict[str, tuple[int, ...]]
    num_moves: int
    seed: int

    @property
    def size(self) -> int:
        return len(self.num)

    @property
    def length(self) -> int:
        return self.values.shape[1]

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def key(self, i: int) -> Any:
        return random.fold_in(random.key(self.seed), i)

    def prefixes(self, orders: Any) -> list[list[Any]]:
        """For each example, the first 0, 1, ... `length` entries of its order."""
        return [[o[:k] for k in range(self.length + 1)] for o in orders]

    def permutations(self, rng: np.random.Generator) -> list[np.ndarray]:
        return [rng.permutation(n) for n in self.num]

    def whole(self) -> list[list[np.ndarray]]:
        return [[np.arange(n)] for n in self.num]

    def evaluate(
        self, first: Any, second: Any = None, hyper: Any = None
    ) -> dict[str, Any]:
        """What the pair says of values ``first[e][b]`` (indices), merged with
        ``second[e][b]`` if these are given; entries ``[E, B, ...]``."""
        stats = self.fold(first, hyper)
        if second is not None:
            stats = self.merge(stats, self.fold(second, hyper), hyper)
        return self.appraise(stats, hyper)

    def fold(self, orders: Any, hyper: Any = None) -> Any:
        """Statistics of values ``orders[e][b]``."""
        orders = _padded(orders, max(3 * self.length, _ROWS))
        fixed = self.pair, hyper or self.hyper, self.values, self.given
        return self._in_batches(partial(_statistics, *fixed), orders)

    def merge(self, a: Any, b: Any, hyper: Any = None) -> Any:
        fixed = self.pair, hyper or self.hyper
        return self._in_batches(partial(_merged, *fixed), a, b)

    def appraise(self, stats: Any, hyper: Any = None) -> dict[str, Any]:
        """What the pair says given statistics."""
        fixed = self.pair, hyper or self.hyper, self.values, self.given
        return self._in_batches(partial(_figures, *fixed), stats)

    def _in_batches(self, fn: Callable[..., Any], *trees: Any) -> Any:
        """`fn` of arrays ``[E, B, ...]``, always as many at a time, for which it is
        compiled."""
        num, size = jax.tree.leaves(trees)[0].shape[1], 3 * (self.length + 1)
        parts = []
        for start in range(0, num, size):
            at = np.minimum(np.arange(start, start + size), num - 1)
            out = fn(*jax.tree.map(lambda x, at=at: x[:, at], trees))
            parts.append(jax.tree.map(np.asarray, out))
        return jax.tree.map(lambda *x: np.concatenate(x, 1)[:, :num], *parts)

    def draw(self, key: Any, hyper: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draws of the parameters ``[draws, E, ...]`` by NumPyro's own samplers, and
        the distributions that they came from."""
        wide = {
            k: jnp.broadcast_to(jnp.asarray(v), (_DRAWS, *np.shape(v)))
            for k, v in hyper.items()
        }
        fns = {}

        def sample(role, fn):
            fns[role] = fn
            return fn.sample(random.fold_in(key, len(fns)))

        return self.pair.theta(wide, sample), fns

    def posterior(self) -> dict[str, np.ndarray]:
        posterior = self.evaluate(self.whole())["posterior"]
        return {k: v[:, 0] for k, v in posterior.items()}

    def densities(self, hyper: Any, theta: Any) -> tuple[np.ndarray, np.ndarray]:
        """NumPyro's log densities of draws `theta` ``[draws, E]`` under `hyper`, and of
        the values given these ``[likelihoods, draws, E, L]``."""
        out = _densities(self.pair, hyper, self.hyper, theta, self.values, self.given)
        return np.asarray(out[0]), np.asarray(out[1])

    def support(self) -> Any:
        """Where the values lie: NumPyro's constraint, of one value."""
        theta, _ = self.draw(self.key(1), self.hyper)
        support = self.likelihood(theta).support
        vector = type(constraints.real_vector)
        while isinstance(support, constraints.independent) and not isinstance(
            support, vector
        ):
            support = support.base_constraint
        return support

    def both_predictives(self) -> list[np.ndarray]:
        return [self.predictive_draws(h) for h in (self.hyper, self.posterior())]

    def predictive_draws(self, hyper: Any) -> np.ndarray:
        """Draws from the predictive density by NumPyro's samplers
        ``[draws, E, ...]``."""
        theta, _ = self.draw(self.key(1), hyper)
        fn = self.likelihood(theta)
        return np.asarray(fn.sample(self.key(2)), np.float64)

    def log_predictive(self, points: np.ndarray) -> np.ndarray:
        """Log predictive densities at points ``[E, P, ...]``, given by row as the first
        value has it, before and after the values ``[2, E, P]``."""
        orders = [[[], o] for (o,) in self.whole()]
        tables = self.evaluate(orders)["table"]
        given = tuple(
            np.broadcast_to(g[:, :1], points.shape[:2]).copy() for g in self.given
        )
        cells = _cells(self.pair, self.hyper, points, given)
        scores = _scores(self.pair, self.hyper, tables, cells)
        return np.moveaxis(np.asarray(scores), 1, 0)

    def likelihood(self, theta: Any) -> Any:
        given = {k: self.hyper[k] for k in self.pair.given}
        given |= {
            k: v[:, 0] for k, v in zip(self.pair.given_by_row, self.given, strict=True)
        }
        return self.pair.likelihood[0](**self.pair.parameters(theta), **given)

    def sites(self, features: tuple[int, ...], masked: bool) -> list[SiteShape]:
        return [self._site(f"{e}", features, masked) for e in range(self.size)]

    def site(self) -> SiteShape:
        return self._site("x", (), False)

    def _site(self, name: str, features: tuple[int, ...], masked: bool) -> SiteShape:
        return SiteShape(
            name,
            tuple((role, f"{name}_{role}") for role in self.role_shapes),
            features,
            self.values.shape[2:],
            tuple(self.role_shapes.values()),
            masked,
        )


def _padded(orders: Any, length: int) -> np.ndarray:
    """Sequences ``orders[e][b]`` as one array, filled up with -1."""
    out = np.full((len(orders), len(orders[0]), length), -1, np.int32)
    for e, b in np.ndindex(out.shape[:2]):
        out[e, b, : len(orders[e][b])] = orders[e][b]
    return out


def _centred(pair: Any, hyper: Any) -> tuple[Any, Any]:
    """Hyperparameters as the methods see them, and the origin of the values."""
    if pair.location is None:
        return hyper, None
    name, _ = pair.location
    return {**hyper, name: jnp.zeros_like(hyper[name])}, hyper[name]


def _cell(pair: Any, hyper: Any, origin: Any, x: Any, *given: Any) -> Any:
    return _about(origin, pair.cell(hyper, x, *given))


def _about(origin: Any, cell: Any) -> Any:
    if origin is None:
        return cell
    if isinstance(cell, tuple):
        return (cell[0] - origin, *cell[1:])
    return cell - origin


def _choose(condition: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _each_example(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` of a pair and of what one example has, for all examples."""

    @_compiled
    @wraps(fn)
    def over_examples(pair, *args):
        return jax.vmap(partial(fn, pair))(*args)

    return over_examples


@_each_example
def _statistics(pair, hyper, values, given, orders):
    """Statistics of values in these orders; negative indices are skipped."""
    hyper, origin = _centred(pair, hyper)
    cells = jax.vmap(partial(_cell, pair, hyper, origin))(values, *given)

    def step(stat, i):
        added = pair.add(hyper, stat, jax.tree.map(lambda c: c[i], cells))
        return _choose(i >= 0, added, stat), None

    empty = jax.tree.map(jnp.asarray, pair.empty(hyper))
    return jax.vmap(lambda order: lax.scan(step, empty, order)[0])(orders)


@_each_example
def _rebased(pair, old, new, stat):
    old, new = (_centred(pair, h)[0] for h in (old, new))
    return jax.vmap(lambda s: pair.rebase(old, new, s))(stat)


@_each_example
def _merged(pair, hyper, a, b):
    hyper, _ = _centred(pair, hyper)
    return jax.vmap(partial(pair.merge, hyper))(a, b)


@_each_example
def _figures(pair, hyper, values, given, stats):
    known, (hyper, origin) = hyper, _centred(pair, hyper)
    cells = jax.vmap(partial(_cell, pair, hyper, origin))(values, *given)

    def figures(stat):
        table = pair.predictive(hyper, stat)
        posterior = pair.posterior(hyper, stat)
        if origin is not None:
            name, _ = pair.location
            posterior = {**posterior, name: posterior[name] + origin}
        return {
            "stat": stat,
            "log_marginal": pair.log_marginal(hyper, stat),
            "table": table,
            "score": jax.vmap(partial(pair.score, table))(cells),
            "posterior": {**known, **posterior},
        }

    return jax.vmap(figures)(stats)


@_each_example
def _cells(pair, hyper, values, given):
    """Cells before their origin is subtracted, leaves ``[L, ...]``."""
    hyper, _ = _centred(pair, hyper)
    return jax.vmap(partial(pair.cell, hyper))(values, *given)


@_each_example
def _scores(pair, hyper, tables, cells):
    """Scores ``[S, P]`` of cells, before their origin is subtracted."""
    _, origin = _centred(pair, hyper)

    def score(table, cell):
        return pair.score(table, _about(origin, cell))

    return jax.vmap(jax.vmap(score, (None, 0)), (0, None))(tables, cells)


@_quickly_compiled
def _replay(pair, hyper, values, given, steps):
    """Statistics after `steps` (i adds value i, -2 - i removes it, -1 does nothing),
    the largest on the way, and whether all on the way were finite."""

    def one(hyper, values, given, steps):
        hyper, origin = _centred(pair, hyper)
        cells = jax.vmap(partial(_cell, pair, hyper, origin))(values, *given)

        def step(carry, i):
            stat, top = carry
            cell = jax.tree.map(lambda c: c[jnp.where(i < -1, -2 - i, i)], cells)
            changed = _choose(
                i >= 0, pair.add(hyper, stat, cell), pair.remove(hyper, stat, cell)
            )
            stat = _choose(i == -1, stat, changed)
            # NaN stays.
            top = jax.tree.map(lambda t, s: jnp.maximum(t, jnp.abs(s)), top, stat)
            return (stat, top), None

        empty = jax.tree.map(jnp.asarray, pair.empty(hyper))
        start = empty, jax.tree.map(jnp.abs, empty)
        return jax.vmap(lambda s: (*lax.scan(step, start, s)[0], empty))(steps)

    return jax.vmap(one)(hyper, values, given, steps)


@_compiled
def _densities(pair, hyper, known, theta, values, given):
    def one(hyper, known, theta, values, given):
        log_density = []

        def sample(role, fn):
            log_density.append(fn.log_prob(theta[role]))
            return theta[role]

        num = jax.tree.leaves(theta)[0].shape[0]
        wide = {k: jnp.broadcast_to(v, (num, *v.shape)) for k, v in hyper.items()}
        pair.theta(wide, sample)
        constants = {k: known[k] for k in pair.given}

        def likelihoods(x, *given):
            by_row = dict(zip(pair.given_by_row, given, strict=True))
            parameters = pair.parameters(theta)
            return jnp.stack(
                [
                    fn(**parameters, **constants, **by_row).log_prob(x)
                    for fn in pair.likelihood
                ]
            )

        return sum(log_density), jax.vmap(likelihoods, out_axes=-1)(values, *given)

    axes = (0, 0, 1, 0, 0)
    return jax.vmap(one, axes, (1, 2))(hyper, known, theta, values, given)


def _no_values(case: _Examples) -> Iterator[_Finding]:
    """The log marginal likelihood of no values is 0."""
    out = case.evaluate([[[]]] * case.size)
    yield "log marginal of no values", np.abs(out["log_marginal"]), 1e-9


def _chain_rule(case: _Examples) -> Iterator[_Finding]:
    """p(x1, ..., xn) = p(x1) p(x2 | x1) ... in any order: to 1e-8 of the terms."""
    rng = case.rng()
    for _ in range(4):
        orders = case.permutations(rng)
        out = case.evaluate(case.prefixes(orders))
        gap, size = np.zeros((2, case.size))
        for e, order in enumerate(orders):
            terms = out["score"][e, np.arange(len(order)), order]
            gap[e] = abs(terms.sum() - out["log_marginal"][e, len(order)])
            size[e] = np.abs(terms).sum()
        yield "sum of log predictives less log marginal", gap, 1e-8 * (1 + size)


def _ratio_of_marginals(case: _Examples) -> Iterator[_Finding]:
    """p(x | x1, ..., xn) = p(x1, ..., xn, x) / p(x1, ..., xn): to 1e-8 of these."""
    orders = case.permutations(case.rng())
    before = case.evaluate(case.prefixes(orders))
    after = case.evaluate(
        [
            [[*prefix, j] for prefix in prefixes for j in range(case.length)]
            for prefixes in case.prefixes(orders)
        ]
    )
    shape = before["score"].shape
    new, old = after["log_marginal"].reshape(shape), before["log_marginal"][..., None]
    gap = np.abs(new - old - before["score"])
    allowed = 1e-8 * (1 + np.abs(new) + np.abs(old))
    yield "log predictive less ratio of marginals", gap, allowed


def _removal(case: _Examples) -> Iterator[_Finding]:
    """Removing what was added is the identity: to 1e-9 of the largest statistics on the
    way in float64; exactly for integers; exactly, in float32 too, when all is
    removed."""
    rng = case.rng()
    steps: list[list[Any]] = [[] for _ in range(case.size)]
    plain: list[list[Any]] = [[] for _ in range(case.size)]
    for _ in range(3):
        for e, n in enumerate(case.num):
            order = rng.permutation(n)
            for k in range(case.length + 1):
                kept, rest = order[:k], order[k:]
                steps[e].append([*order, *(-2 - rng.permutation(rest))])
                plain[e].append(kept)
    none = np.array([[len(p) == 0 for p in row] for row in plain])
    args = case.hyper, case.values, case.given
    for wide in (True, False):
        with jax.enable_x64(wide):
            run = partial(_replay, case.pair, *jax.tree.map(_narrow(wide), args))
            left, top, empty = run(_padded(steps, 2 * case.length))
            kept, _, _ = run(_padded(plain, 2 * case.length))
            leaves = (jax.tree.leaves(t) for t in (left, top, empty, kept))
            leaves = [jax.tree.map(np.asarray, list(t)) for t in leaves]
        kind = "float64" if wide else "float32"
        for i, (now, most, nothing, expected) in enumerate(zip(*leaves, strict=True)):
            flat = (*none.shape, -1)
            most = most.reshape(flat).max(-1)
            off = np.abs(now - nothing).reshape(flat).max(-1)
            what = f"what is left of statistic {i} of no values in {kind}"
            yield what, np.where(none, off, 0), 0
            exact = np.issubdtype(now.dtype, np.integer)
            off = np.abs(now - expected).reshape(flat).max(-1)
            allowed = 0 if exact else 1e-9 * most if wide else np.inf
            # Where the statistics became NaN or infinite this fails in float32 too.
            allowed = np.where(np.isfinite(most), allowed, 0)
            yield f"error of statistic {i} after removals in {kind}", off, allowed


def _narrow(wide: bool) -> Callable[[Any], np.ndarray]:
    """Casts floats to float64, or floats and integers to 32 bits."""

    def cast(x):
        x = np.asarray(x)
        if np.issubdtype(x.dtype, np.floating):
            return x.astype(np.float64 if wide else np.float32)
        return x if wide or x.dtype == bool else x.astype(np.int32)

    return cast


def _merging(case: _Examples) -> Iterator[_Finding]:
    """Merged statistics say what those of all values say: log marginal and predictive
    to 1e-8; the statistics themselves exactly where they are integers, and to 1e-9
    where adding in another order gives the same ones."""
    rng = case.rng()
    whole = case.evaluate(case.whole())
    other = case.evaluate([[o] for o in case.permutations(rng)])
    orders = case.permutations(rng)
    left = case.prefixes(orders)
    right = [[o[k:] for k in range(case.length + 1)] for o in orders]
    for first, second in ((left, right), (right, left)):
        got = case.evaluate(first, second)
        for name in ("log_marginal", "score"):
            allowed = 1e-8 * (1 + np.abs(whole["log_marginal"]))
            if name == "score":
                allowed = allowed[..., None] + 1e-8 * np.abs(whole[name])
            gap = np.abs(got[name] - whole[name])
            yield f"{name.replace('_', ' ')} after a merge", gap, allowed
        trees = (jax.tree.leaves(t["stat"]) for t in (got, whole, other))
        for i, (a, b, c) in enumerate(zip(*trees, strict=True)):
            if np.issubdtype(b.dtype, np.integer):
                yield f"statistic {i} after a merge", np.abs(a - b), 0
                continue
            allowed = 1e-9 * (1 + np.abs(b))
            comparable = (np.abs(b - c) <= allowed).reshape(case.size, -1).all(1)
            comparable = comparable.reshape((-1,) + (1,) * (b.ndim - 1))
            allowed = np.where(comparable, allowed, np.inf)
            yield f"statistic {i} after a merge", np.abs(a - b), allowed


def _posterior(case: _Examples) -> Iterator[_Finding]:
    """The posterior as a prior for more values: their log marginal and predictive are
    those given all values, to 1e-8."""
    orders = case.permutations(case.rng())
    parts = case.evaluate(case.prefixes(orders))
    whole = case.evaluate(case.whole())
    for k in range(case.length + 1):
        posterior = {name: v[:, k] for name, v in parts["posterior"].items()}
        got = case.evaluate([[o[k:]] for o in orders], hyper=posterior)
        first = parts["log_marginal"][:, k, None]
        gap = np.abs(first + got["log_marginal"] - whole["log_marginal"])
        size = 1 + np.abs(first) + np.abs(whole["log_marginal"])
        yield "log marginal by way of a posterior", gap, 1e-8 * size
        gap = np.abs(got["score"] - whole["score"])
        size = size[..., None] + np.abs(whole["score"])
        yield "log predictive by way of a posterior", gap, 1e-8 * size


def _changing(case: _Examples) -> Iterator[_Finding]:
    """Statistics serve other hyperparameters too: rebased, they say what those of the
    same values made under these say; and a block's evidence, whole or in parts, changes
    as the log marginals of occupied clusters do: to 1e-8 of the terms."""
    pair, other = case.pair, dict(case.hyper)
    for name, value in case.hyper.items():
        if name not in pair.in_statistics:
            # Those of the next example; a single one has only itself.
            other[name] = np.roll(value, 1, 0) * (1.25 if name in pair.positive else 1)
    half = [[np.arange(n)[::2], np.arange(n)[1::2], []] for n in case.num]
    before = case.evaluate(half)
    here = dict(other)
    if pair.location is not None:
        # The origin of the values, which only blocks can keep.
        here[pair.location[0]] = case.hyper[pair.location[0]]
    after = case.evaluate(half, hyper=here)
    rebase = partial(_rebased, pair, case.hyper, here)
    got = case.appraise(case._in_batches(rebase, case.fold(half)), here)
    for name in ("log_marginal", "score"):
        size = np.abs(before["log_marginal"]) + np.abs(after["log_marginal"])
        if name == "score":
            size = size[..., None] + np.abs(after[name])
        what = f"{name.replace('_', ' ')} under other hyperparameters"
        yield what, np.abs(got[name] - after[name]), 1e-8 * (1 + size)
    after = case.evaluate(half, hyper=other)
    expected = (after["log_marginal"] - before["log_marginal"]).sum(1)
    size = 1 + np.abs(after["log_marginal"]).sum(1)
    size = size + np.abs(before["log_marginal"]).sum(1)
    # Masked to the number of values. The last cluster holds all, and is not occupied.
    rows = np.arange(case.length)
    z = np.concatenate([rows % 2, np.full(case.length, 2)])
    occupied = jnp.array([True, True, False])
    sites = case.sites((), True)
    for block in pair.blocks(sites):
        at = [sites.index(s) for s in block.sites]
        data = [
            Observed(
                jnp.concatenate([jnp.asarray(case.values[e])] * 2),
                jnp.asarray(np.tile(rows < case.num[e], 2)),
                tuple(jnp.concatenate([jnp.asarray(g[e])] * 2) for g in case.given),
            )
            for e in at
        ]
        old, new = (
            [{k: jnp.asarray(v[e]) for k, v in h.items()} for e in at]
            for h in (case.hyper, other)
        )
        changes = _evidence_changes(block, old, new, data, jnp.asarray(z), occupied)
        for what, own, found in zip(
            ("block", "part"), (at, at[-1:]), changes, strict=True
        ):
            figure = np.zeros(case.size)
            figure[own] = np.abs(np.asarray(found) - expected[own])
            yield f"error of the evidence of a {what}", figure, 1e-8 * size


def _finite_share(ok: np.ndarray, what: str) -> _Finding:
    share = 1 - ok.mean(0)
    return f"share of draws for which {what} is not finite", share, 0.5


def _bayes(case: _Examples) -> Iterator[_Finding]:
    """p(x | theta) p(theta) = p(theta | x) p(x) with NumPyro's densities, for 4000
    draws of theta from the posterior and 4000 from the prior: to 1e-8 of the terms +
    eight times what one step of float64 in theta changes."""
    posterior = case.posterior()
    marginal = case.evaluate(case.whole())["log_marginal"][:, 0]
    some = np.arange(case.length) < case.num[:, None]
    for i, hyper in enumerate((posterior, case.hyper)):
        theta, _ = case.draw(case.key(3 + i), hyper)
        prior, likelihoods = case.densities(case.hyper, theta)
        after, _ = case.densities(posterior, theta)
        # As far as theta itself is known.
        _, moved = case.densities(
            case.hyper, {r: np.nextafter(np.asarray(v), 0) for r, v in theta.items()}
        )
        by_one_step = np.abs(np.where(some, moved - likelihoods, 0)).sum(-1)
        kinds = zip(likelihoods, by_one_step, case.pair.likelihood, strict=True)
        for likelihood, step, kind in kinds:
            likelihood = np.where(some, likelihood, 0)
            left, right = likelihood.sum(-1) + prior, after + marginal
            size = np.abs(likelihood).sum(-1) + np.abs(prior) + np.abs(after) + 1
            ok = np.isfinite(left) & np.isfinite(right)
            what = f"Bayes' law with {kind.__name__}"
            yield _finite_share(ok, what)
            gap = np.where(ok, np.abs(np.where(ok, left - right, 0)), 0)
            allowed = np.where(ok, 1e-8 * size + 8 * step, 0) + 1e-8 * np.abs(marginal)
            yield f"error of {what}", gap.T, allowed.T


def _reading(case: _Examples) -> Iterator[_Finding]:
    """`hyperparameters` of the prior's own distributions, at 4000 draws of theta: to
    1e-8."""
    theta, fns = case.draw(case.key(5), case.hyper)
    got = case.pair.hyperparameters(fns, theta)
    expected = set(case.hyper) - set(case.pair.given)
    difference = expected ^ set(got)
    text = f"number of hyperparameters read in vain or not at all {sorted(difference)}"
    yield text, np.full(case.size, float(len(difference))), 0
    for name in expected & set(got):
        value = case.hyper[name]
        read = np.broadcast_to(np.asarray(got[name]), (_DRAWS, *value.shape))
        ok = np.isfinite(read).reshape(_DRAWS, case.size, -1).all(-1)
        yield _finite_share(ok, f"hyperparameter `{name}`")
        ok = ok.reshape(ok.shape + (1,) * (value.ndim - 1))
        gap = np.where(ok, np.abs(np.where(ok, read - value, 0)), 0)
        size = np.abs(value).reshape(case.size, -1).max(1)
        allowed = 1e-8 * size.reshape((-1,) + (1,) * value.ndim)
        yield f"error of `{name}` as read", np.moveaxis(gap, 1, 0), allowed


def _monte_carlo(case: _Examples) -> Iterator[_Finding]:
    """The marginal likelihood is the mean likelihood of 10^5 draws from the prior by
    NumPyro, z between -4.5 and 4.5. Of each example the first values are taken, as many
    as leave a likelihood with a third moment of at most 10 (over its root mean square),
    by the log marginals of the values taken once, twice and thrice: with more the mean
    of the draws would not be normal."""
    prefixes = case.prefixes([np.arange(n) for n in case.num])
    once, twice, thrice = (
        case.evaluate([[np.tile(p, m) for p in row] for row in prefixes])[
            "log_marginal"
        ]
        for m in (1, 2, 3)
    )
    skew = np.exp(np.minimum(thrice - 1.5 * twice, 50))
    usable = (skew <= 10) & np.isfinite(twice)
    num = np.array([max(np.flatnonzero(row), default=0) for row in usable])
    num = np.minimum(num, case.num)
    marginal = once[np.arange(case.size), num]
    some = np.arange(case.length) < num[:, None]
    ratios = []
    for i in range(_BATCHES):
        theta, _ = case.draw(case.key(100 + i), case.hyper)
        _, likelihoods = case.densities(case.hyper, theta)
        total = np.where(some, likelihoods, 0).sum(-1)
        ratios.append(np.exp(total - marginal))
    ratio = np.concatenate(ratios, 1)
    error = ratio.std(1) / np.sqrt(ratio.shape[1])
    with np.errstate(divide="ignore"):
        z = np.abs(ratio.mean(1) - 1) / np.where(num > 0, error, 1)
    what = "z of the mean likelihood under the prior"
    yield what, z.T, np.where(num > 0, _MAX_Z, np.inf)[:, None]


# --- ...of densities ---


def _mass(case: _Examples) -> Iterator[_Finding]:
    """The predictive has mass 1, before and after the values: to 1e-6, by a sum over
    the support or by quadrature; of real vectors by importance sampling, with z between
    -4.5 and 4.5.

    Sums over all counts stop at 10^15 and quadratures on the positive reals at
    10^-300 and 10^300, on the reals at 10^130 times the width: less than 1e-6 of the
    mass must lie beyond."""
    support = case.support()
    if isinstance(support, type(constraints.real_vector)):
        yield from _vector_mass(case)
        return
    points, weights = _quadrature(case, support)
    for i, what in enumerate(("before", "after")):
        scores = case.log_predictive(points[i])
        with np.errstate(over="ignore"):
            total = np.where(weights[i] != 0, np.exp(scores[i]) * weights[i], 0).sum(1)
        yield f"mass of the predictive {what} the values less 1", abs(total - 1), 1e-6


def _quadrature(
    case: _Examples, support: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Points ``[E, P, ...]`` and weights ``[E, P]`` for a sum over the support, for
    the predictive before the values and after them."""

    def both(points, weights):
        points = np.broadcast_to(points, (case.size, *points.shape[-1:]))
        weights = np.broadcast_to(weights, points.shape)
        return [points] * 2, [weights] * 2

    def bound(name):
        value = np.asarray(getattr(support, name))
        return np.broadcast_to(value, (_DRAWS, case.size))[0][:, None]

    grid = np.arange(_POINTS)
    if isinstance(support, constraints.multinomial):
        total = bound("upper_bound")[:, 0].astype(int)
        parts = [_compositions(t, case.values.shape[-1]) for t in total]
        points = np.zeros((case.size, max(map(len, parts)), case.values.shape[-1]), int)
        weights = np.zeros(points.shape[:2])
        for e, part in enumerate(parts):
            points[e], weights[e, : len(part)] = part[0], 1
            points[e, : len(part)] = part
        return [points] * 2, [weights] * 2
    if isinstance(support, constraints.integer_interval | type(constraints.boolean)):
        low, high = 0, np.ones((case.size, 1))
        if isinstance(support, constraints.integer_interval):
            low, high = bound("lower_bound"), bound("upper_bound")
        points = np.minimum(low + grid, high).astype(int)
        return both(points, low + grid <= high)
    if isinstance(support, constraints.integer_greater_than):
        exact = _POINTS // 2
        far = np.geomspace(exact - 1, 1e15, _POINTS - exact + 1)[1:].astype(int)
        points = np.concatenate([np.arange(exact), far])
        return both(points + int(np.min(bound("lower_bound"))), _sum_weights(points))
    if isinstance(support, constraints.interval):
        low, high = bound("lower_bound"), bound("upper_bound")
        if isinstance(support, type(constraints.circular)):
            return both(low + (high - low) * grid / _POINTS, (high - low) / _POINTS)
        # Takahasi and Mori's double exponential rule.
        u = np.linspace(-6, 6, _POINTS)
        t = np.pi / 2 * np.sinh(u)
        points = low + (high - low) * special.expit(2 * t)
        slope = (high - low) * special.expit(2 * t) * special.expit(-2 * t)
        return both(points, slope * np.pi * np.cosh(u) * (u[1] - u[0]))
    u = np.linspace(-300, 300, _POINTS)
    if isinstance(support, type(constraints.real)):
        draws = case.both_predictives()
        centre, width = zip(*map(_peak, draws), strict=True)
        points = [c + w * np.sinh(u) for c, w in zip(centre, width, strict=True)]
        return points, [w * np.cosh(u) * (u[1] - u[0]) for w in width]
    if isinstance(support, constraints.greater_than):
        low = bound("lower_bound")
        points, weights = [], []
        for x in case.both_predictives():
            centre, width = _peak(np.log(x - low[:, 0]))
            v = centre + width * np.sinh(u)
            inside = np.abs(v) < 690
            x = np.exp(np.where(inside, v, centre))
            points.append(low + x)
            slope = x * width * np.cosh(u) * (u[1] - u[0])
            weights.append(np.where(inside, slope, 0))
        return points, weights
    raise ValueError(
        f"`check_conjugate` has no quadrature for a likelihood on {support}; pass "
        "`laws` without 'predictive has mass one'."
    )


def _peak(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where draws ``[D, E]`` crowd, and on how small a scale: ``[E, 1]``."""
    centre = np.median(draws, 0)
    return centre[:, None], np.quantile(np.abs(draws - centre), 0.05, 0)[:, None]


def _sum_weights(points: np.ndarray) -> np.ndarray:
    """Weights with which a smooth function at some of the integers gives its sum over
    all of them: that of the trapezoid rule in the logarithm, plus half of the ends."""
    gaps = np.diff(points)
    first = int(np.argmax(gaps > 1))  # from here on points are left out
    weights = np.ones(len(points))
    x = points[first:].astype(float)
    log_steps = np.diff(np.log(x))
    weights[first:] = 0
    weights[first:-1] += 0.5 * log_steps * x[:-1]
    weights[first + 1 :] += 0.5 * log_steps * x[1:]
    weights[first] += 0.5
    return weights


def _compositions(total: int, parts: int) -> np.ndarray:
    """All ways to write `total` as a sum of `parts` counts."""
    dividers = itertools.combinations(range(total + parts - 1), parts - 1)
    walls = np.array(list(dividers)).reshape(-1, parts - 1)
    walls = np.pad(walls, ((0, 0), (1, 1)), constant_values=-1)
    walls[:, -1] = total + parts - 1
    return np.diff(walls) - 1


def _vector_mass(case: _Examples) -> Iterator[_Finding]:
    rng, draws = case.rng(), case.both_predictives()
    for i, what in enumerate(("before", "after")):
        points = np.zeros((case.size, _POINTS, draws[i].shape[-1]))
        log_density = np.zeros(points.shape[:2])
        for e in range(case.size):
            x = draws[i][:, e]
            centre = np.median(x, 0)
            # A robust covariance: of the half that lies nearest.
            for _ in range(2):
                spread = np.cov(x.T) + 1e-12 * np.eye(x.shape[-1])
                far = np.einsum(
                    "di,ij,dj->d", x - centre, np.linalg.inv(spread), x - centre
                )
                x = x[far <= np.quantile(far, 0.7)]
            law = stats.multivariate_t(centre, 2 * np.cov(x.T), df=2.5)
            points[e] = law.rvs(_POINTS, random_state=rng)
            log_density[e] = law.logpdf(points[e])
        scores = case.log_predictive(points)
        ratio = np.exp(np.asarray(scores[i]) - log_density)
        z = (ratio.mean(1) - 1) / (ratio.std(1) / np.sqrt(_POINTS))
        yield f"z of the mass of the predictive {what} the values", np.abs(z), _MAX_Z


# --- ...of blocks ---


@_quickly_compiled
def _evidence_changes(block, old, new, data, z, occupied):
    """By how much the evidence of each site changes between hyperparameters, with the
    whole block; and that of the last site, with its part."""
    like = block.pack(old)
    stats = _rebuild(block, like, data, z, 3)

    def change(block, like, stats, new):
        # Side by side: one after the other takes twice as long to compile.
        both = jax.tree.map(
            lambda *x: jnp.stack(jnp.broadcast_arrays(*x)),
            like,
            block.repack(like, new),
        )
        evidence = partial(block.evidence, like, stats=stats, occupied=occupied)
        before, after = jax.vmap(evidence)(both)
        return after - before

    part = change(*block.part(len(new) - 1, like, stats), new[-1:])
    return change(block, like, stats, new), part


def _packed(
    case: _Examples, block: AbstractBlock, features: tuple[int, ...], at: Sequence[int]
) -> Any:
    """Hyperparameters of a block whose sites are the examples `at`."""
    hyper = []
    for e in at:
        wide = {
            k: np.broadcast_to(v[e], (*features, *v.shape[1:]))
            for k, v in case.hyper.items()
        }
        hyper.append({k: jnp.asarray(v, jnp.float32) for k, v in wide.items()})
    return block.pack(hyper)


def _rebuild(block: Any, hyper: Any, data: Any, z: Any, num_clusters: int) -> Any:
    def add(stats, n):
        x = block.row(hyper, data, n)
        return block.add(hyper, stats, x, jnp.maximum(z[n], 0), z[n] >= 0), None

    empty = block.empty(hyper, num_clusters)
    return lax.scan(add, empty, jnp.arange(z.shape[0]))[0]


@_quickly_compiled
def _block_draws(block, key, hyper, data, rows):
    """Draws of all parameters given no rows and given `rows` (a mask):
    ``[2 * draws, ...]``."""
    z = jnp.where(rows, 0, -1)
    stats = _rebuild(block, hyper, data, z, 2)
    wide = jax.tree.map(lambda s: jnp.repeat(s[..., ::-1], _DRAWS, axis=-1), stats)
    return block.draw(key, hyper, wide)


def _drawing(case: _Examples) -> Iterator[_Finding]:
    """Draws of a block in float32, before and after the values, against 4000 by
    NumPyro's samplers from the prior and the posterior: Kolmogorov and Smirnov's test
    of each coordinate, of the sum of their ranks and of the log density, p above
    1e-5."""
    posterior = case.posterior()
    with jax.enable_x64(False):
        values, given = jax.tree.map(_narrow(False), (case.values, case.given))
        own = []
        for e in range(case.size):
            (block,) = case.pair.blocks([case.site()])
            data = (Observed(values[e], None, tuple(g[e] for g in given)),)
            rows = np.arange(case.length) < case.num[e]
            packed = _packed(case, block, (), [e])
            out = _block_draws(block, case.key(10 + e), packed, data, rows)
            own.append({r: np.asarray(out[f"x_{r}"]) for r in case.role_shapes})
    for i, hyper in enumerate((case.hyper, posterior)):
        theta, fns = case.draw(case.key(6 + i), hyper)
        part = slice(i * _DRAWS, (i + 1) * _DRAWS)
        drawn = {r: np.stack([o[r][part] for o in own], 1) for r in theta}
        samples = []
        for draws in (drawn, theta):
            # Both as float32 has them, without what it can't tell from 0 and 1.
            draws = {r: _without_extremes(v, fns[r].support) for r, v in draws.items()}
            log_density, _ = case.densities(hyper, draws)
            columns = {
                f"{r}[{j}]": column
                for r, v in draws.items()
                for j, column in enumerate(v.reshape(*v.shape[:2], -1).T)
            }
            density = np.where(np.isnan(log_density), np.inf, log_density)
            samples.append(columns | {"log density": density.T})
        ours, theirs = samples
        names = [name for name in theirs if name != "log density"]
        for columns in (ours, theirs) if len(names) > 1 else ():
            # Sees how they depend on each other.
            columns["sum of ranks"] = sum(_ranks(columns[n], theirs[n]) for n in names)
        what = "prior" if i == 0 else "posterior"
        for name in ours:
            tests = zip(ours[name], theirs[name], strict=True)
            p = np.array([_same_law(a, b) for a, b in tests])
            figure = -np.log10(np.maximum(p, 1e-300))
            yield f"-log10 p of {name} drawn from the {what}", figure, -_MIN_LOG10_P


def _same_law(a: np.ndarray, b: np.ndarray) -> float:
    """P-value of Kolmogorov and Smirnov's test of two samples; 0 with NaN in them."""
    if np.isnan(a).any() or np.isnan(b).any():
        return 0.0
    # The values only matter by their order.
    _, ranks = np.unique(np.concatenate([a, b]), return_inverse=True)
    ranks = ranks.reshape(2, -1)
    return float(stats.ks_2samp(*ranks, method="asymp").pvalue)


def _ranks(draws: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Ranks of draws ``[E, n]`` among the reference ``[E, m]``."""
    pairs = zip(np.sort(reference, 1), draws, strict=True)
    return np.stack(
        [np.searchsorted(r, d) + np.searchsorted(r, d, "right") for r, d in pairs]
    )


_start = _quickly_compiled(partial(_rebuild, num_clusters=_CLUSTERS))
_tables = _quickly_compiled(lambda block, hyper, stats: block.tables(hyper, stats))
_log_marginal = _quickly_compiled(
    lambda block, hyper, stats: block.log_marginal(hyper, stats)
)


def _without_extremes(x: Any, support: Any) -> np.ndarray:
    x = np.asarray(x, np.float32).astype(np.float64)
    x = np.where(np.abs(x) < 1e-37, 0, x)
    shares = type(constraints.unit_interval), type(constraints.simplex)
    return np.where(1 - x < 1e-6, 1, x) if isinstance(support, shares) else x


@_quickly_compiled
def _score_without(block, hyper, data, stats, tables, move):
    """Scores of another row with one taken out, but not yet written."""
    leaves, k, leaving, other, *_ = move
    x = block.row(hyper, data, leaves)
    taken = block.take(hyper, stats, x, k, leaving > 0)
    return block.score(hyper, stats, tables, taken, block.row(hyper, data, other))


@_compiled
def _make_moves(block, hyper, data, stats, tables, moves, first, last):
    """Statistics and tables after some of the `moves`, and the largest statistics on
    the way."""

    def move(i, carry):
        stats, tables, top = carry
        leaves, k, leaving, enters, to, entering = moves[i]
        x = block.row(hyper, data, leaves)
        taken = block.take(hyper, stats, x, k, leaving > 0)
        x = block.row(hyper, data, enters)
        stats, tables = block.put(hyper, stats, tables, taken, x, to, entering > 0)
        top = jax.tree.map(lambda t, s: jnp.maximum(t, jnp.abs(s).max(-1)), top, stats)
        return stats, tables, top

    top = jax.tree.map(lambda s: jnp.abs(s).max(-1), stats)
    return lax.fori_loop(first, last, move, (stats, tables, top))


@lru_cache(maxsize=4)
def _random_moves(num: int, size: int, seed: int) -> tuple[np.ndarray, ...]:
    """Assignments before and after `num` moves, and the moves with more behind them,
    ``[size + rows, 6]``: a row out or none, a row in or none, often the same row or the
    same cluster; in the end each row out, of which nothing follows."""
    rng = np.random.default_rng(seed)
    z = rng.integers(-1, _CLUSTERS, size=_ROWS)
    before = z.astype(np.int32)
    to = np.where(rng.random(size) < 0.7, 0, rng.integers(_CLUSTERS, size=size))
    rows = rng.integers(_ROWS, size=(2, size))
    leaving = rng.random(size) < 7 / 8
    moves = np.zeros((size + _ROWS, 6), np.int32)
    for i in range(num):
        leaves, enters = rows[:, i]
        k = z[leaves]
        out = leaving[i] and k >= 0
        if out:
            z[leaves] = -1
        if z[enters] >= 0:
            enters = leaves
        enter = z[enters] < 0
        if enter:
            z[enters] = to[i]
        moves[i] = leaves, max(k, 0), out, enters, to[i], enter
    other = (np.arange(_ROWS) + 1) % _ROWS
    nothing = np.zeros(_ROWS)
    moves[size:] = np.column_stack(
        [np.arange(_ROWS), np.maximum(z, 0), z >= 0, other, nothing, nothing]
    )
    return before, z.astype(np.int32), moves


def _walk(block: Any, hyper: Any, data: Any, num: int, size: int, seed: int) -> Any:
    """A block after `num` random moves."""
    before, after, moves = _random_moves(num, size, seed)
    stats = _start(block, hyper, data, before)
    tables = _tables(block, hyper, stats)
    run = partial(_make_moves, block, hyper, data)
    score = partial(_score_without, block, hyper, data)
    stats, tables, top = run(stats, tables, moves, np.int32(0), np.int32(num))
    rebuilt = _start(block, hyper, data, after)
    scores, plain = [], []
    for i in range(size, size + _ROWS, 3):
        left = run(stats, tables, moves, np.int32(i), np.int32(i + 1))[:2]
        nothing = moves[i] * np.array([1, 1, 0, 1, 1, 1], np.int32)
        scores.append((score(stats, tables, moves[i]), score(*left, nothing)))
        itself = np.array([0, 0, 0, i - size, 0, 0], np.int32)
        plain.append(score(stats, tables, itself))
    out = {
        "tables": (tables, _tables(block, hyper, stats)),
        "statistics": (stats, rebuilt, top),
        "scores": tuple(map(jnp.stack, zip(*scores, strict=True))),
        "plain scores": jnp.stack(plain),
        "log marginals": tuple(
            _log_marginal(block, hyper, s) for s in (stats, rebuilt)
        ),
    }
    return jax.tree.map(np.asarray, out)


def _moved(case: _Examples, num_moves: int, masked_value: Any = None) -> Any:
    """:func:`_walk` of blocks with two features for each example, of which the second
    has masked cells; their values are replaced by `masked_value`."""
    sites = case.sites((2,), True)
    values, given = jax.tree.map(_narrow(False), (case.values, case.given))
    floats = values.astype(np.float32)
    own = {k: v[0] for k, v in case.hyper.items()}
    own |= {k: g[0] for k, g in zip(case.pair.given_by_row, given, strict=True)}
    if case.pair.data_error(floats[0], own) is None:
        # Counts as floats are welcome too, and may be NaN where they are masked.
        values = floats
    data = {}
    for e, (site, (index, mask)) in enumerate(zip(sites, _layout(case), strict=True)):
        x = values[e][index]
        if masked_value is not None:
            x[~mask] = np.asarray(masked_value).astype(x.dtype)
        data[site.name] = Observed(x, mask, tuple(g[e][index] for g in given))
    for block in case.pair.blocks(sites):
        at = [int(site.name) for site in block.sites]
        packed = _packed(case, block, (2,), at)
        own_data = tuple(data[site.name] for site in block.sites)
        yield at, _walk(block, packed, own_data, num_moves, case.num_moves, case.seed)


def _layout(case: _Examples) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each example, the value in each row of two features, and which count."""
    rng, layout = case.rng(), []
    for n in case.num:
        index = rng.integers(n, size=(_ROWS, 2))
        index[:n, 0] = np.arange(min(n, _ROWS))
        mask = np.column_stack([np.ones(_ROWS, bool), rng.random(_ROWS) < 0.7])
        layout.append((index, mask))
    return layout


def _moving(case: _Examples) -> Iterator[_Finding]:
    """A block in float32 after `num_moves` random moves, with masked cells: its tables
    are those of its statistics to 1e-6 + 1e-6 of themselves; its statistics those of
    the rows, exactly for integers and within 1e-3 of the largest on the way; scores
    with a row taken out those with it put away, to 2e-5 + 1e-6 of themselves a
    feature."""
    with jax.enable_x64(False):
        found = list(_moved(case, case.num_moves))

    def of_all(figure, at):
        out = np.zeros(case.size)
        out[at] = np.max(figure)
        return out

    def by_example(figure, at):
        # Where there is an axis of features, two for each example.
        if np.shape(figure)[-2] != 2 * len(at):
            return of_all(figure, at)
        out = np.zeros(case.size)
        out[at] = np.moveaxis(figure, -2, 0).reshape(len(at), -1).max(1)
        return out

    for at, out in found:
        kept, fresh = (jax.tree.leaves(t) for t in out["tables"])
        for a, b in zip(kept, fresh, strict=True):
            excess = np.abs(a - b) / (1e-6 + 1e-6 * np.abs(b))
            what = "stale tables after moves, in units of rounding"
            yield what, by_example(np.where(a == b, 0, excess), at), 1
        trees = (jax.tree.leaves(t) for t in out["statistics"])
        for a, b, top in zip(*trees, strict=True):
            if np.issubdtype(a.dtype, np.integer):
                what = "drift of integer statistics after moves"
                yield what, by_example(np.abs(a - b), at), 0
            else:
                drift = np.abs(a - b) / np.where(top > 0, top, 1)[..., None]
                what = "relative drift of statistics after moves"
                yield what, by_example(drift, at), 1e-3
        a, b = out["scores"]
        excess = np.abs(a - b) / (2e-5 * 2 * case.size + 1e-6 * np.abs(b))
        what = "score with a row taken out, in units of rounding"
        yield what, of_all(excess, at), 1
        a, b = out["log marginals"]
        drift = np.abs(a - b) / (1 + np.abs(b))
        yield "relative drift of log marginals", of_all(drift, at), 1e-2


def _masking(case: _Examples) -> Iterator[_Finding]:
    """Log marginals and scores of a block are sums over the cells that are not masked,
    to 1e-3 + 1e-4 of the terms; what a masked cell holds (NaN, infinity, -1 or 10^6)
    changes no bit of statistics, tables, scores and log marginals over 200 moves."""
    z, *_ = _random_moves(0, max(case.num_moves, 1), case.seed)
    layout = _layout(case)
    clusters = [(f, k) for f in range(2) for k in range(_CLUSTERS)]
    scalar = case.evaluate(
        [
            [index[(z == k) & mask[:, f], f] for f, k in clusters]
            for index, mask in layout
        ]
    )
    marginals = scalar["log_marginal"].reshape(case.size, 2, _CLUSTERS)
    scores = scalar["score"].reshape(case.size, 2, _CLUSTERS, case.length)
    rows = np.zeros((case.size, 2, _ROWS, _CLUSTERS))
    for e, (index, mask) in enumerate(layout):
        for f in range(2):
            rows[e, f] = np.where(mask[:, f, None], scores[e, f][:, index[:, f]].T, 0)
    num = min(200, case.num_moves)
    with jax.enable_x64(False):
        for at, out in _moved(case, 0):
            for what, got, each in (
                ("log marginal", out["log marginals"][1], marginals[at]),
                ("score", out["plain scores"], rows[at][:, :, ::3]),
            ):
                gap = np.abs(got - each.sum((0, 1)))
                excess = gap / (1e-3 + 1e-4 * np.abs(each).sum((0, 1)))
                figure = np.zeros(case.size)
                figure[at] = np.max(excess)
                yield f"error of a block's {what}, in what is allowed", figure, 1
        expected = jax.tree.leaves(list(_moved(case, num)))
        for value in (np.nan, np.inf, -1, 10**6):
            with np.errstate(invalid="ignore"):
                got = jax.tree.leaves(list(_moved(case, num, value)))
            wrong = sum(
                int((_bits(a) != _bits(b)).sum())
                for a, b in zip(got, expected, strict=True)
            )
            what = f"number of bytes that {value} in masked cells changes"
            yield what, np.full(case.size, float(wrong)), 0


def _bits(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)


# --- ...of float32 ---


def _nudged(tables: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Tables ``[E, S, ...]`` with one entry after another off by the largest error of
    rounding it to float32: ``[E, entries * S, ...]``."""
    out = []
    for i, table in enumerate(tables):
        for at in np.ndindex(table.shape[2:]):
            entry = table.copy()
            entry[(..., *at)] *= 1 + _FLOAT32
            out.append((*tables[:i], entry, *tables[i + 1 :]))
    return tuple(np.concatenate(t, 1) for t in zip(*out, strict=True))


def _precision(case: _Examples) -> Iterator[_Finding]:
    """Scores in float32, given the same statistics of 1, 10, 2^10 and 2^20 values: to
    2e-5 + 2e-6 of themselves + what the rounding of the table's entries explains (at
    most 1e-4); the log marginal to 3e-6 of the sum of its terms, taken as one plus the
    log predictive for each value. Sums beyond 32 bits are left out."""
    rng = case.rng()
    narrow, wide = _narrow(False), _narrow(True)
    # What float32 can hold, as float64.
    hyper, values, given = jax.tree.map(
        lambda x: wide(narrow(x)), (case.hyper, case.values, case.given)
    )
    case = replace(case, hyper=hyper, values=values, given=given)
    orders = [rng.integers(n, size=16) for n in case.num]
    doubled = case.fold([[o[:1], o[:10], o] for o in orders])
    stats, part = [], jax.tree.map(lambda s: s[:, 2:], doubled)
    stats.append(jax.tree.map(lambda s: s[:, :2], doubled))
    for count in 2 ** np.arange(5, 21):
        part = case.merge(part, part)
        if count in _ACCUMULATED:
            stats.append(part)
    stats = jax.tree.map(lambda *s: np.concatenate(s, 1), *stats)
    fits = np.ones((case.size, len(_ACCUMULATED)), bool)
    for s in jax.tree.leaves(stats):
        size = np.abs(s.astype(float)).reshape(*fits.shape, -1).max(-1)
        fits &= size < (2**31 if np.issubdtype(s.dtype, np.integer) else 1e30)
    stats = jax.tree.map(narrow, stats)
    with jax.enable_x64(False):
        args = jax.tree.map(narrow, (hyper, values, given, stats))
        got = jax.tree.map(np.asarray, _figures(case.pair, *args))
    stats = jax.tree.map(wide, stats)
    out = case.appraise(stats)
    marginal, scores = out["log_marginal"], out["score"]
    cells = _cells(case.pair, hyper, values, given)
    nudged = np.asarray(_scores(case.pair, hyper, _nudged(out["table"]), cells))
    nudged = nudged.reshape(case.size, -1, *scores.shape[1:])
    explained = np.abs(nudged - scores[:, None]).sum(1)
    allowed = 2e-5 + 2e-6 * np.abs(scores) + np.minimum(explained, 1e-4)
    allowed = np.where(fits[..., None], allowed, np.inf)
    yield "error of scores in float32", np.abs(got["score"] - scores), allowed
    terms = np.array(_ACCUMULATED) * (1 + np.abs(scores)).mean(-1)
    allowed = np.where(fits, 3e-6 * (10 + terms), np.inf)
    yield (
        "error of log marginals in float32",
        np.abs(got["log_marginal"] - marginal),
        allowed,
    )


@_compiled
def _block_figures(block, hyper, data, rows):
    z = jnp.where(rows, 0, -1)
    stats = _rebuild(block, hyper, data, z, 1)
    tables = block.tables(hyper, stats)
    first, no = jnp.zeros((), jnp.int32), jnp.asarray(False)

    def score(n):
        x = block.row(hyper, data, n)
        taken = block.take(hyper, stats, x, first, no)
        return block.score(hyper, stats, tables, taken, x)[0]

    scores = jax.vmap(score)(jnp.arange(rows.shape[0]))
    return block.log_marginal(hyper, stats)[0], scores, stats


@_quickly_compiled
def _block_draw(block, key, hyper, stats):
    return block.draw(key, hyper, stats)


def _origin(case: _Examples) -> Iterator[_Finding]:
    """Of a pair with a `location`: a block in float32 with values and location 10^6
    prior predictive widths from zero (or, where values are positive, both a
    factor of e^60) agrees with float64 on the same float32 numbers: scores to 2e-5 +
    2e-6 of themselves + what the rounding of the cells explains, log marginals to 3e-6
    of the sum of these. Its draws are those about zero, moved."""
    pair = case.pair
    if pair.location is None:
        return
    name, role = pair.location
    narrow, wide = _narrow(False), _narrow(True)
    positive = isinstance(case.support(), constraints.greater_than)
    near = np.float64(case.hyper[name])
    if positive:
        shift = np.full(near.shape, 60.0)
        values = wide(narrow(case.values * np.exp(60.0)))
    else:
        low, high = np.quantile(case.predictive_draws(case.hyper), (0.25, 0.75), 0)
        shift = 1e6 * (high - low)
        values = wide(narrow(case.values + shift[:, None]))
    location = wide(narrow(near + shift))
    hyper = {k: wide(narrow(v)) for k, v in case.hyper.items()} | {name: location}
    given = tuple(wide(narrow(g)) for g in case.given)
    far = replace(case, hyper=hyper, values=values, given=given)
    if positive:
        values = values / np.exp(location)[:, None]
    else:
        values = values - location[:, None]
    zero = {**hyper, name: np.zeros_like(location)}
    about_zero = replace(case, hyper=zero, values=values, given=given)

    exact = far.evaluate(far.whole())
    out = []
    with jax.enable_x64(False):
        args = jax.tree.map(narrow, (hyper, far.values, given))
        rounded = jax.tree.map(np.asarray, _cells(pair, *args))
        for one in (far, about_zero):
            values, given_ = jax.tree.map(narrow, (one.values, given))
            figures = []
            for e in range(case.size):
                (block,) = pair.blocks([case.site()])
                data = (Observed(values[e], None, tuple(g[e] for g in given_)),)
                rows = np.arange(case.length) < case.num[e]
                packed = _packed(one, block, (), [e])
                marginal, scores, stats = _block_figures(block, packed, data, rows)
                draws = _block_draw(block, case.key(20), packed, stats)
                figures.append((marginal, scores, draws[f"x_{role}"][0]))
            out.append([np.stack(f) for f in zip(*figures, strict=True)])
    (marginal, scores, draw), (_, _, draw_about_zero) = out
    expected = exact["score"][:, 0]
    moved = np.asarray(
        _scores(pair, hyper, exact["table"], jax.tree.map(wide, rounded))
    )
    explained = np.abs(moved[:, 0] - expected).max(-1, keepdims=True)
    allowed = 2e-5 + 2e-6 * np.abs(expected) + 3 * explained
    yield "error of scores far from zero", np.abs(scores - expected), allowed
    terms = (10 + np.abs(expected).sum(-1)) * 3e-6 + 3 * explained[:, 0] * case.length
    gap = np.abs(marginal - exact["log_marginal"][:, 0])
    yield "error of log marginals far from zero", gap, terms
    step = np.spacing(np.abs(location).astype(np.float32)).astype(float)
    gap = np.abs(draw.astype(float) - location - draw_about_zero)
    yield f"error of `{role}` drawn far from zero", gap, 4 * step


CONJUGATE_LAWS: dict[str, Callable[[_Examples], Iterator[_Finding]]] = {
    "no values have marginal one": _no_values,
    "chain rule in any order": _chain_rule,
    "predictive is a ratio of marginals": _ratio_of_marginals,
    "adding then removing is the identity": _removal,
    "merge equals the whole": _merging,
    "posterior after posterior": _posterior,
    "statistics serve other hyperparameters": _changing,
    "bayes law": _bayes,
    "hyperparameters are read off the prior": _reading,
    "marginal is the mean likelihood": _monte_carlo,
    "draws follow the posterior": _drawing,
    "predictive has mass one": _mass,
    "moves keep blocks in step": _moving,
    "float32 agrees with float64": _precision,
    "a far origin costs nothing": _origin,
    "blocks are sums over unmasked cells": _masking,
}
"""The laws by name, as :func:`check_conjugate` takes them; the functions' docstrings
state them with their bounds."""


def check_conjugate(
    pair: AbstractConjugatePair,
    examples: Sequence[ConjugateExample],
    *,
    laws: Sequence[str] | None = None,
    num_moves: int = 100_000,
    seed: int = 0,
) -> None:
    """Tests that a conjugate pair obeys the laws that the sampler relies on.

    An AssertionError names the pair, the law, the example and the figure that is out of
    bounds. Laws are tested in float64 unless they are about float32, whether or not x64
    is on.

    Good examples differ: an ordinary one, a strong prior, small hyperparameters, few
    values, ties. Examples of the same shapes share compilations, however many values
    each has. At least one must have values that the prior does not find too surprising,
    for the Monte Carlo mean to say something. Values must lie in the support, and
    hyperparameters must leave densities that float64 can hold.

    Three laws are statistical. With right pairs a call fails by chance with a
    probability of at most 2e-5 for each coordinate of the parameters, 4e-5 for their
    ranks and density, and 7e-6 for the Monte Carlo mean (three times that, if the mass
    of a predictive is found by Monte Carlo too): in all 9e-5 for each example of a pair
    with two scalar parameters. But seeds are fixed: a call that passes once always
    passes.

    :param AbstractConjugatePair pair: the pair.
    :param examples: what to test it on, see :class:`ConjugateExample`.
    :param laws: names in `CONJUGATE_LAWS`; all by default.
    :param int num_moves: random moves of rows after which statistics and tables must
        still be those of the rows.
    :param int seed: of everything random.
    :raises AssertionError: if a law is broken.
    :raises ValueError: if the examples are not ones that the pair takes.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_subanneal import testing
        >>> from numpyro_subanneal.conjugate.beta import BetaBernoulli
        >>> hyper = {"concentration1": 0.5, "concentration0": 1.5}
        >>> example = testing.ConjugateExample(hyper, np.array([0, 1, 1, 0, 1]))
        >>> testing.check_conjugate(
        ...     BetaBernoulli(), [example], laws=["chain rule in any order"])
    """
    names = list(CONJUGATE_LAWS) if laws is None else list(laws)
    unknown = sorted(set(names) - set(CONJUGATE_LAWS))
    _check(not unknown, f"`laws` has {unknown}, but can be {list(CONJUGATE_LAWS)}.")
    _check(len(examples), "`examples` must have at least one example.")
    with jax.enable_x64(True):
        cases = _side_by_side(pair, examples, num_moves, seed)
        for law in names:
            said, telling = False, False
            for case in cases:
                for what, figure, allowed in CONJUGATE_LAWS[law](case):
                    _uphold(case, law, what, figure, allowed)
                    said, telling = True, telling or bool(np.isfinite(allowed).any())
            if said and not telling:
                raise AssertionError(
                    f"{type(pair).__name__}: none of the examples says anything about "
                    f"the law {law!r}. {CONJUGATE_LAWS[law].__doc__}"
                )


def _uphold(case: _Examples, law: str, what: str, figure: Any, allowed: Any) -> None:
    figure = np.asarray(figure, float)
    shape = (
        np.broadcast_shapes(figure.shape, np.shape(allowed), (case.size,) * 1)
        if (figure.ndim <= 1 and np.ndim(allowed) <= 1)
        else np.broadcast_shapes(figure.shape, np.shape(allowed))
    )
    figure, allowed = np.broadcast_to(figure, shape), np.broadcast_to(allowed, shape)
    bad = ~(figure <= allowed) & ~np.isposinf(allowed)
    if bad.any():
        with np.errstate(all="ignore"):
            excess = np.where(bad, np.nan_to_num(figure / allowed, nan=np.inf), -1)
        at = np.unravel_index(excess.argmax(), shape)
        raise AssertionError(
            f"{type(case.pair).__name__} breaks the law {law!r} in example "
            f"{case.index[at[0]]}: {what} is {figure[at]:.4g}, at most "
            f"{allowed[at]:.4g} is allowed."
        )


def _side_by_side(
    pair: AbstractConjugatePair,
    examples: Sequence[ConjugateExample],
    num_moves: int,
    seed: int,
) -> list[_Examples]:
    """Checks examples, and puts together those of the same shapes."""
    groups: dict[Any, list[int]] = {}
    read = []
    for i, example in enumerate(examples):
        hyper = {k: np.asarray(v, np.float64) for k, v in example.hyper.items()}
        values = np.asarray(example.values)
        _check(values.ndim and len(values), f"Example {i} has no values.")
        floating = np.issubdtype(values.dtype, np.floating)
        values = values.astype(np.float64 if floating else np.int64)
        by_row = example.given_by_row
        _check(
            set(by_row) == set(pair.given_by_row),
            f"Example {i} has `given_by_row` {sorted(by_row)}, but the pair "
            f"{sorted(pair.given_by_row)}.",
        )
        given = tuple(
            np.broadcast_to(np.asarray(by_row[k], float), values.shape[:1])
            for k in pair.given_by_row
        )
        own = {**hyper, **dict(zip(pair.given_by_row, given, strict=True))}
        wide = {k: v[None] for k, v in hyper.items()}
        error = pair.hyper_error(wide) or pair.data_error(values, own)
        _check(error is None, f"Example {i} {error}.")
        shapes = {}

        def sample(role, fn, shapes=shapes):
            shapes[role] = fn.event_shape
            return fn.sample(random.key(0))

        jax.eval_shape(partial(pair.theta, sample=sample), hyper)
        read.append((hyper, values, given, shapes))
        key = (
            tuple((k, v.shape) for k, v in sorted(hyper.items())),
            values.shape[1:],
            values.dtype.kind,
            tuple(shapes.items()),
        )
        groups.setdefault(key, []).append(i)
    cases = []
    for index in groups.values():
        parts = [read[i] for i in index]
        longest = max(len(values) for _, values, _, _ in parts)

        def padded(x, longest=longest):
            # With what is there.
            return x[np.where(np.arange(longest) < len(x), np.arange(longest), 0)]

        cases.append(
            _Examples(
                pair,
                index,
                {k: np.stack([p[0][k] for p in parts]) for k in parts[0][0]},
                np.stack([padded(p[1]) for p in parts]),
                tuple(
                    np.stack([padded(g) for g in gs])
                    for gs in zip(*(p[2] for p in parts), strict=True)
                ),
                np.array([len(p[1]) for p in parts]),
                parts[0][3],
                num_moves,
                seed,
            )
        )
    return cases
