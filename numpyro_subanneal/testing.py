# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Oracles for samplers of partitions, in plain float64 NumPy and SciPy.

Nothing here is shared with the kernel, the distributions or the conjugate pairs,
and each quantity is derived by another route than there, so agreement is evidence.
It is meant for small problems: ten rows already have 115975 partitions. Labels have
shape ``[..., N]`` (leading axes are draws; -1 is "in no cluster"), the rows of one
cluster ``[n, D]`` (features are independent given the partition). Logs are natural.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special, stats

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
