# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Every conjugate pair in a model of its own, read and sampled by the kernel's moves,
against an enumeration of all partitions of five rows: each pair under a Dirichlet
process, a Pitman-Yor process, a mixture of finite mixtures and a finite mixture; with
no cell masked, half of them, and a row without any.

The marginal likelihoods of the enumeration are integrals over the parameter by
quadrature of SciPy's densities (or, of several parameters, textbook formulas in NumPy),
and share nothing with the pairs.
"""

from collections.abc import Callable
from functools import cache
import itertools
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from small_models import TabledPriors, finite_log_eppf

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    FiniteDirichletMixture,
    MixtureOfFiniteMixtures,
    PitmanYorProcess,
    explain,
    rows,
    splitmerge,
    testing,
)
from numpyro_subanneal.conjugate import PAIRS
from numpyro_subanneal.plan import recognise
from numpyro_subanneal.reading import read
from numpyro_subanneal.splitmerge import Record, SplitMerge, split_and_merge
from numpyro_subanneal.subsample import Subsample

# Half of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled(level=1)

N, K = 5, 5


class Case(NamedTuple):
    """
    - **pair** - name of the pair's class.
    - **prior** - declares the cluster sites, given `sample`; returns their values.
    - **likelihood** - of every cell, given those values indexed by the partition.
    - **x** - data, ``[N, features, *event]``.
    - **log_marginal** - of the values `x` ``[n, *event]`` of feature `d` in the rows
      `index`, by another route.
    """

    pair: str
    prior: Callable
    likelihood: Callable
    x: np.ndarray
    log_marginal: Callable[[np.ndarray, int, np.ndarray], float]
    event_dim: int = 0


def by_quadrature(prior, log_likelihood):
    """
    Log marginal likelihood with one unknown parameter: the mean of the likelihood over
    quantiles of SciPy's `prior` (of feature d).
    """

    @cache
    def points(d):
        u = (np.arange(20_000) + 0.5) / 20_000
        return prior(d).ppf(u)

    @cache
    def of_cell(v, d, i):
        # Each cell is in sixteen sets of rows.
        return log_likelihood(v, points(d), d, i)

    def log_marginal(x, d, index):
        if len(x) == 0:
            return 0.0
        cells = zip(x.tolist(), index.tolist(), strict=True)
        total = sum(of_cell(v, d, i) for v, i in cells)
        return special.logsumexp(total) - np.log(len(total))

    return log_marginal


# Two features, with priors that differ.
A, B = np.array([1.5, 0.6]), np.array([0.8, 2.0])
MEAN, KAPPA = np.array([0.2, -0.5]), np.array([0.5, 1.5])
SHAPE, RATE = np.array([2.0, 3.0]), np.array([0.7, 1.5])
SCALE = np.array([0.7, 1.2])
REALS = np.array([[-1.1, 0.5], [-0.4, 1.9], [0.3, -0.8], [0.9, 0.1], [1.4, 0.4]])
BITS = np.array([[0, 1], [1, 1], [1, 0], [0, 1], [1, 0]])
COUNTS = np.array([[0, 3], [2, 1], [5, 4], [1, 0], [3, 7]])
CODES = np.array([[0, 1], [2, 1], [2, 0], [0, 2], [1, 2]])
URN = np.array([[0.5, 1.0, 2.0], [1.5, 0.4, 0.8]])
TOTALS = np.array([[6, 9], [7, 8], [5, 9], [9, 4], [4, 7]])


def beta(sample):
    return (sample("probs", dist.Beta(A, B)),)


def beta_prior(d):
    return stats.beta(A[d], B[d])


def logit(p):
    return jnp.log(p) - jnp.log1p(-p)


def beta_cases(name, fn, x, pmf):
    marginal = by_quadrature(beta_prior, pmf)
    yield Case(f"Beta{name}", beta, lambda p: fn(probs=p), x, marginal)
    yield Case(f"Beta{name}Logits", beta, lambda p: fn(logits=logit(p)), x, marginal)


def binomial(total):
    return lambda **kw: dist.Binomial(total_count=jnp.asarray(total), **kw)


def negative_binomial(probs=None, logits=None):
    r = jnp.array([2.5, 4.0])
    if probs is None:
        return dist.NegativeBinomialLogits(r, logits)
    return dist.NegativeBinomialProbs(r, probs)


def gamma(sample):
    return (sample("rate", dist.Gamma(SHAPE, RATE)),)


def gamma_prior(d):
    return stats.gamma(SHAPE[d], scale=1 / RATE[d])


def normal_inverse_gamma(sample):
    var = sample("var", dist.InverseGamma(SHAPE, RATE))
    return var, sample("loc", dist.Normal(MEAN, jnp.sqrt(var / KAPPA)))


def normal_gamma(sample):
    precision = sample("prec", dist.Gamma(SHAPE, RATE))
    return precision, sample("loc", dist.Normal(MEAN, 1 / jnp.sqrt(precision * KAPPA)))


def known_mean(sample):
    return (sample("var", dist.InverseGamma(SHAPE, RATE)),)


def known_scale(sample):
    return (sample("loc", dist.Normal(MEAN, KAPPA)),)


def normal_marginal(x, d, index):
    del index
    return testing.normal_log_marginal(x[:, None], MEAN[d], KAPPA[d], SHAPE[d], RATE[d])


ROW_SCALE = np.array([[0.3, 1.0], [0.6, 0.5], [1.0, 2.0], [0.4, 1.5], [0.8, 0.9]])
known_mean_marginal = by_quadrature(
    lambda d: stats.invgamma(SHAPE[d], scale=RATE[d]),
    lambda v, var, d, i: stats.norm.logpdf(v, MEAN[d], np.sqrt(var)),
)
known_scale_marginal = by_quadrature(
    lambda d: stats.norm(MEAN[d], KAPPA[d]),
    lambda v, loc, d, i: stats.norm.logpdf(v, loc, SCALE[d]),
)


def of_logarithm(log_marginal):
    return lambda x, d, index: log_marginal(np.log(x), d, index) - np.log(x).sum()


def normal_cases(prefix, fn, x, wrap):
    yield Case(
        f"{prefix}InverseGamma",
        normal_inverse_gamma,
        lambda var, loc: fn(loc, jnp.sqrt(var)),
        x,
        wrap(normal_marginal),
    )
    yield Case(
        f"{prefix}Gamma",
        normal_gamma,
        lambda precision, loc: fn(loc, 1 / jnp.sqrt(precision)),
        x,
        wrap(normal_marginal),
    )
    yield Case(
        f"{prefix}KnownMean",
        known_mean,
        lambda var: fn(jnp.asarray(MEAN), jnp.sqrt(var)),
        x,
        wrap(known_mean_marginal),
    )
    yield Case(
        f"{prefix}KnownScale",
        known_scale,
        lambda loc: fn(loc, jnp.asarray(SCALE)),
        x,
        wrap(known_scale_marginal),
    )


def dirichlet(sample):
    return (sample("probs", dist.Dirichlet(URN)),)


def categorical_marginal(x, d, index):
    del index
    return testing.categorical_log_marginal(x[:, None], URN[d])


VOTES = np.array(
    [
        [[2, 0, 1], [0, 1, 1]],
        [[0, 3, 0], [1, 1, 2]],
        [[1, 1, 2], [0, 0, 1]],
        [[2, 1, 0], [3, 0, 1]],
        [[0, 0, 1], [1, 2, 0]],
    ]
)


def multinomial_marginal(x, d, index):
    # One value after another (Mosimann 1962), each given those before it.
    del index
    total, urn = 0.0, URN[d].copy()
    for counts in x:
        total += stats.dirichlet_multinomial.logpmf(counts, urn, counts.sum())
        urn = urn + counts
    return total


CIRCLE = np.array([[-2.9, 0.5], [3.0, 1.2], [0.4, -1.0], [1.0, 2.2], [2.5, -0.2]])


def von_mises_marginal(x, d, index):
    del index
    theta = (np.arange(4000) + 0.5) / 4000 * 2 * np.pi - np.pi
    total = stats.vonmises.logpdf(theta, A[d], MEAN[d])
    total = total + sum(stats.vonmises.logpdf(v, B[d], theta) for v in x)
    return special.logsumexp(total) + np.log(2 * np.pi / 4000)


P = 2
SPREAD = np.array([[1.0, 0.3], [0.3, 0.5]])
COVARIANCE = np.array([[0.8, -0.2], [-0.2, 0.6]])
DEGREES = 4.5
CENTRE = np.array([0.2, -0.3])
VECTORS = REALS[:, None] + 0.1


def inverse_wishart(sample):
    cov = sample("cov", dist.InverseWishart(DEGREES, scale_matrix=jnp.array(SPREAD)))
    return cov, sample("loc", dist.MultivariateNormal(CENTRE, cov / 0.6))


def wishart(sample):
    rate = jnp.array(SPREAD)
    prec = sample("prec", dist.Wishart(DEGREES, rate_matrix=rate))
    return prec, sample(
        "loc", dist.MultivariateNormal(CENTRE, precision_matrix=0.6 * prec)
    )


def known_covariance(sample):
    return (sample("loc", dist.MultivariateNormal(CENTRE, jnp.array(SPREAD))),)


def inverse_wishart_marginal(x, d, index):
    # Murphy (2007), Eq. 266, of the whole set.
    del d, index
    n = len(x)
    mean = x.mean(0) if n else CENTRE
    kappa, nu = 0.6 + n, DEGREES + n
    shift = mean - CENTRE
    scatter = (x - mean).T @ (x - mean) + 0.6 * n / kappa * np.outer(shift, shift)
    return (
        -n * P / 2 * np.log(np.pi)
        + special.multigammaln(nu / 2, P)
        - special.multigammaln(DEGREES / 2, P)
        + DEGREES / 2 * np.linalg.slogdet(SPREAD)[1]
        - nu / 2 * np.linalg.slogdet(SPREAD + scatter)[1]
        + P / 2 * np.log(0.6 / kappa)
    )


def known_covariance_marginal(x, d, index):
    # All values together are one normal vector.
    del d, index
    n = len(x)
    if n == 0:
        return 0.0
    cov = np.kron(np.eye(n), COVARIANCE) + np.kron(np.ones((n, n)), SPREAD)
    return stats.multivariate_normal.logpdf(x.ravel(), np.tile(CENTRE, n), cov)


CASES = [
    *normal_cases("Normal", dist.Normal, REALS, lambda f: f),
    *normal_cases("LogNormal", dist.LogNormal, np.exp(REALS), of_logarithm),
    Case(
        "NormalKnownScaleByRow",
        known_scale,
        lambda loc: dist.Normal(loc, jnp.asarray(ROW_SCALE)),
        REALS,
        by_quadrature(
            lambda d: stats.norm(MEAN[d], KAPPA[d]),
            lambda v, loc, d, i: stats.norm.logpdf(v, loc, ROW_SCALE[i, d]),
        ),
    ),
    *beta_cases(
        "Bernoulli",
        dist.Bernoulli,
        BITS,
        lambda v, p, d, i: stats.bernoulli.logpmf(v, p),
    ),
    *beta_cases(
        "Binomial",
        binomial([7, 9]),
        COUNTS,
        lambda v, p, d, i: stats.binom.logpmf(v, [7, 9][d], p),
    ),
    *beta_cases(
        "BinomialByRow",
        binomial(TOTALS),
        COUNTS % 5,
        lambda v, p, d, i: stats.binom.logpmf(v, TOTALS[i, d], p),
    ),
    *beta_cases(
        "Geometric",
        dist.Geometric,
        COUNTS,
        lambda v, p, d, i: stats.nbinom.logpmf(v, 1, p),
    ),
    *beta_cases(
        "NegativeBinomial",
        negative_binomial,
        COUNTS,
        # SciPy counts failures, NumPyro what `probs` is the probability of.
        lambda v, p, d, i: stats.nbinom.logpmf(v, [2.5, 4.0][d], 1 - p),
    ),
    Case(
        "GammaPoisson",
        gamma,
        dist.Poisson,
        COUNTS,
        by_quadrature(gamma_prior, lambda v, r, d, i: stats.poisson.logpmf(v, r)),
    ),
    Case(
        "GammaExponential",
        gamma,
        dist.Exponential,
        np.exp(REALS),
        by_quadrature(
            gamma_prior, lambda v, r, d, i: stats.expon.logpdf(v, scale=1 / r)
        ),
    ),
    Case(
        "GammaGamma",
        gamma,
        lambda rate: dist.Gamma(jnp.asarray(A), rate),
        np.exp(REALS),
        by_quadrature(
            gamma_prior, lambda v, r, d, i: stats.gamma.logpdf(v, A[d], scale=1 / r)
        ),
    ),
    Case(
        "DirichletCategorical", dirichlet, dist.Categorical, CODES, categorical_marginal
    ),
    Case(
        "DirichletCategoricalLogits",
        dirichlet,
        lambda p: dist.Categorical(logits=jnp.log(p)),
        CODES,
        categorical_marginal,
    ),
    Case(
        "DirichletMultinomial",
        dirichlet,
        lambda p: dist.Multinomial(
            probs=p, total_count=jnp.asarray(VOTES.sum(-1)), total_count_max=9
        ),
        VOTES,
        multinomial_marginal,
        1,
    ),
    Case(
        "VonMisesKnownConcentration",
        lambda sample: (sample("loc", dist.VonMises(MEAN, A)),),
        lambda loc: dist.VonMises(loc, jnp.asarray(B)),
        CIRCLE,
        von_mises_marginal,
    ),
    Case(
        "MultivariateNormalInverseWishart",
        inverse_wishart,
        lambda cov, loc: dist.MultivariateNormal(loc, covariance_matrix=cov),
        VECTORS,
        inverse_wishart_marginal,
        1,
    ),
    Case(
        "MultivariateNormalWishart",
        wishart,
        lambda prec, loc: dist.MultivariateNormal(loc, precision_matrix=prec),
        VECTORS,
        inverse_wishart_marginal,
        1,
    ),
    Case(
        "MultivariateNormalKnownCovariance",
        known_covariance,
        lambda loc: dist.MultivariateNormal(loc, jnp.array(COVARIANCE)),
        VECTORS,
        known_covariance_marginal,
        1,
    ),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.pair)
# Forms that differ in how the likelihood is written alone (next test but one).
LOGITS = [c for c in CASES if c.pair.endswith("Logits")]
# Forms that differ in how the prior is written alone (the test after that).
TWINS = {
    "NormalGamma": "NormalInverseGamma",
    "LogNormalGamma": "LogNormalInverseGamma",
}
sampled_cases = pytest.mark.parametrize(
    "case",
    [c for c in CASES if c not in LOGITS and c.pair not in TWINS],
    ids=lambda c: c.pair,
)


def test_every_pair_has_a_case():
    assert sorted(c.pair for c in CASES) == sorted(type(p).__name__ for p in PAIRS)


@pytest.mark.parametrize("case", LOGITS, ids=lambda c: c.pair)
def test_logits_forms_are_the_same_pair_with_another_parameter(case):
    pairs = {type(p).__name__: type(p) for p in PAIRS}
    logits, probs = pairs[case.pair], pairs[case.pair.removesuffix("Logits")]
    own = {"likelihood", "parameters", "form", "_abc_impl"}
    for name in dir(probs):
        if not name.startswith("__") and name not in own:
            assert getattr(logits, name, None) is getattr(probs, name), name


@pytest.mark.parametrize("name", TWINS)
def test_forms_by_precision_make_the_moves_of_those_by_variance(name):
    # Other priors, off which the same hyperparameters are read; moves see nothing else.
    pairs = {type(p).__name__: type(p) for p in PAIRS}
    one, twin = pairs[name], pairs[TWINS[name]]
    own = {"prior", "theta", "parameters", "hyperparameters", "form", "normal"}
    for attribute in dir(twin):
        if not attribute.startswith("__") and attribute not in {*own, "_abc_impl"}:
            assert getattr(one, attribute, None) is getattr(twin, attribute), attribute
    read_off = []
    for pair in (name, TWINS[name]):
        case = case_of(pair)
        args = case, case.x.astype(np.float32), np.ones(case.x.shape[:2], bool)
        components = read(recognise(model, args, {}), model, args, {}, {}).components
        leaves = jax.tree.leaves(components)
        read_off.append([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    assert len(read_off[0]) > len({"mean", "kappa", "shape", "rate"})
    for a, b in zip(*read_off, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def model(case, x, mask):
    num_features = x.shape[1]
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    with numpyro.plate("features", num_features, dim=-1):
        with numpyro.plate("clusters", K, dim=-2):
            theta = case.prior(numpyro.sample)
        with numpyro.plate("rows", len(x), dim=-2), handlers.mask(mask=mask):
            fn = case.likelihood(*(t[z] for t in theta))
            numpyro.sample("x", fn, obs=x)


# --- Priors of the partition --------------------------------------------------

FINITE = 3
COMPONENTS = np.array([0.2, 0.3, 0.1, 0.4])  # of a mixture of finite mixtures


@cache
def priors():
    return TabledPriors.of(
        (
            ChineseRestaurantProcess(1.3, N),
            PitmanYorProcess(0.5, 0.3, N),
            MixtureOfFiniteMixtures(
                1.2, dist.Categorical(jnp.array(COMPONENTS)), N, max_components=4
            ),
            FiniteDirichletMixture(0.8, FINITE, N),
        ),
        N,
    )


def mixture_log_eppf(sizes, concentration, probs):
    terms = [
        np.log(p) + finite_log_eppf(sizes, concentration, k + 1)
        for k, p in enumerate(probs)
    ]
    return special.logsumexp(terms)


PARTITIONS = testing.set_partitions(N)
SIZES = [np.bincount(z).tolist() for z in PARTITIONS]
LOG_PRIOR = np.array(
    [
        testing.log_eppf(PARTITIONS, 1.3),
        testing.log_eppf(PARTITIONS, 0.5, 0.3),
        [mixture_log_eppf(n, 1.2, COMPONENTS) for n in SIZES],
        [finite_log_eppf(n, 0.8, FINITE) for n in SIZES],
    ]
)
PRIOR_NAMES = ("Dirichlet", "Pitman-Yor", "mixture of finite", "finite")


def test_prior_probabilities_sum_to_one():
    np.testing.assert_allclose(np.exp(LOG_PRIOR).sum(1), 1, rtol=1e-12)


# --- Sampling -----------------------------------------------------------------

NUM_CHAINS, KEPT, THINNING, DROPPED = 40, 64, 4, 4
KEPT_OF_SPLITS = 60  # which take longer
# Of each kind of statistics one pair.
FAMILIES = (
    "DirichletCategorical",
    "BetaBinomial",
    "GammaPoisson",
    "NormalInverseGamma",
    "MultivariateNormalInverseWishart",
    "VonMisesKnownConcentration",
)


def masks_of(case):
    shape = case.x.shape[:2]
    some = np.random.default_rng(1).random(shape) < 0.5
    row = np.ones(shape, bool)
    row[2] = False
    return np.array([np.ones(shape, bool), some, row])


MASK_NAMES = ("no mask", "half masked", "a row masked")


def case_of(name):
    (case,) = [c for c in CASES if c.pair == name]
    return case


@cache
def exact(name):
    """Posterior of the partition, ``[masks, priors, partitions]``."""
    case = case_of(name)

    @cache  # most sets of rows are observed with several masks
    def marginal(d, rows):
        index = np.array(rows, int)
        return case.log_marginal(case.x[index, d], d, index)

    def of_cluster(mask, z, k):
        return sum(
            marginal(d, tuple(np.flatnonzero((z == k) & mask[:, d]).tolist()))
            for d in range(case.x.shape[1])
        )

    log_likelihood = np.array(
        [
            [
                sum(of_cluster(mask, z, k) for k in range(z.max() + 1))
                for z in PARTITIONS
            ]
            for mask in masks_of(case)
        ]
    )
    return special.softmax(LOG_PRIOR + log_likelihood[:, None], axis=-1)


def moves_of_rows(rng_key, prior, components, z, subsample):
    made = rows.run_step(
        rng_key,
        lambda values, like: (prior, components),
        (),
        z,
        K,
        subsample,
        jnp.int32(0),
        jnp.int32(THINNING * N),
    )
    return made.clusters.z, made.subsample.order


def splits_and_merges(rng_key, prior, components, z, subsample):
    options = SplitMerge(num_sequential=12, num_restricted=8, num_scans=0)
    clusters, _ = split_and_merge(
        options,
        rng_key,
        prior,
        components,
        rows.collect(components, z, K),
        subsample,
        Record.start(),
        due=jnp.asarray(True),
        adapting=jnp.asarray(False),
    )
    return clusters.z, subsample.order


@cache
def sampled(name, moves=moves_of_rows, kept=KEPT):
    """Partitions drawn, ``[masks, priors, draws, N]``, what is masked being rubbish."""
    case = case_of(name)
    masks = masks_of(case)
    kind = np.float32 if case.x.dtype.kind == "f" else np.int32
    x = np.repeat(case.x[None].astype(kind), 3, 0)
    x[~masks] = np.nan if kind is np.float32 else -7
    plan = recognise(model, (case, x[0], masks[0]), {})
    tables = priors()

    def chain(rng_key, x, mask, which):
        components = read(plan, model, (case, x, mask), {}, {}).components

        def step(carry, rng_key):
            z, order = carry
            subsample = Subsample(order, jnp.int32(N))
            z, order = moves(rng_key, tables[which], components, z, subsample)
            return (z, order), z

        start = jnp.zeros(N, jnp.int32), jnp.arange(N, dtype=jnp.int32)
        return lax.scan(step, start, random.split(rng_key, kept))[1]

    # NB: all laws on one axis. Each level of `jax.vmap` makes the loops longer.
    shape = len(masks), len(PRIOR_NAMES), NUM_CHAINS
    mask, which = (i.ravel() for i in np.indices(shape)[:2])
    keys = random.split(random.key(1), mask.size)
    run = jax.jit(jax.vmap(chain))
    with numpyro.validation_enabled(False):
        z = run(keys, x[mask], masks[mask], which)
    return np.asarray(z)[:, DROPPED:].reshape(*shape[:2], -1, N)


@sampled_cases
def test_partitions_follow_the_enumerated_posterior(case):
    # 2,400 draws for each of twelve laws, thinned until their correlation is low. False
    # alarm: 1e-3 a pair, 2.1 % for all.
    assert_follows_the_posterior(case.pair, sampled(case.pair))


@pytest.mark.parametrize("name", FAMILIES)
def test_splits_and_merges_follow_the_enumerated_posterior(name):
    # Of these alone, for a pair of each family, 2,240 draws for each law. False alarm:
    # 1e-3 each, 0.6 % for all.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitmerge, "_CHUNK", 4)  # of five rows
        draws = sampled(name, splits_and_merges, KEPT_OF_SPLITS)
    assert_follows_the_posterior(name, draws)


def assert_follows_the_posterior(name, draws):
    """
    Chi-square of each of the twelve laws at 5e-4 for all, and all of them together, by
    Fisher's method, at 5e-4: what is wrong a little in each shows there.
    """
    logs = []
    for i, j in itertools.product(range(3), range(4)):
        index = testing.partition_index(draws[i, j], PARTITIONS)
        report = testing.goodness_of_fit(index, exact(name)[i, j])
        assert report.p_value > 5e-4 / 12, (MASK_NAMES[i], PRIOR_NAMES[j], report)
        logs.append(np.log(report.p_value))
    together = stats.chi2.sf(-2 * sum(logs), 2 * len(logs))
    print(f"smallest p of twelve: {np.exp(min(logs)):.3g}; of all: {together:.3g}")
    assert together > 5e-4, np.exp(logs)


@by_case
def test_explain_names_the_pair(case, capsys):
    explain(model, case, case.x, np.ones(case.x.shape[:2], bool))
    shown = capsys.readouterr().out
    assert "Not recognised" not in shown
    (pair,) = [p for p in PAIRS if type(p).__name__ == case.pair]
    for fn in (*pair.prior.values(), pair.likelihood[0]):
        assert fn.__name__ in shown
