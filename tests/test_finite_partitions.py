# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Laws of the partitions that finite mixtures induce.

Statistical tests use fixed keys. A comment at each states its false-alarm rate: how
often it would fail for a correct sampler if the key were drawn afresh.
"""

from fractions import Fraction
import itertools
import math
import pickle
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

from numpyro_subanneal import testing
from numpyro_subanneal.distributions import (
    ChineseRestaurantProcess,
    FiniteDirichletMixture,
    MixtureOfFiniteMixtures,
    PitmanYorProcess,
)

# Compiling is most of the time here. Not so quickly where the last digits (of large
# counts, and in float64) or time are tested.
quick = pytest.mark.quickly_compiled

# (concentration, number of components). NB: samplers are compiled for each
# number of components and each shape.
FINITE = [(1.0, 1), (0.02, 4), (7.0, 4), (0.3, 40)]

# Laws of the number of components less one, and their own logs of probabilities.
EXTRA = {
    "poisson": (
        lambda: dist.Poisson(1.5),
        lambda j: j * math.log(1.5) - 1.5 - math.lgamma(j + 1),
    ),
    "geometric": (
        lambda: dist.Geometric(0.25),
        lambda j: j * math.log(0.75) + math.log(0.25),
    ),
    "uniform": (
        lambda: dist.DiscreteUniform(0, 3),
        lambda j: -math.log(4) if j < 4 else -math.inf,
    ),
    "binomial": (
        lambda: dist.Binomial(9, 0.5),
        lambda j: math.log(math.comb(9, j) / 512) if j < 10 else -math.inf,
    ),
    "categorical": (
        lambda: dist.Categorical(probs=jnp.array([0.0, 0.5, 0.0, 0.25, 0.25])),
        lambda j: math.log([0.0, 0.5, 0.0, 0.25, 0.25][j]) if j in (1, 3, 4) else -1e9,
    ),
}
MIXED = [
    (0.3, "poisson"),
    (5.0, "binomial"),
    (1.0, "categorical"),
]


def finite_log_eppf(counts, concentration, num_components):
    """Gamma functions in float64: good to 1e-8 at a million rows."""
    counts = [int(n) for n in counts if n > 0]
    if len(counts) > num_components:
        return -math.inf
    total = num_components * concentration
    log_ways = math.lgamma(num_components + 1) - math.lgamma(
        num_components - len(counts) + 1
    )
    rising = [math.lgamma(n + concentration) for n in counts]
    return math.fsum(
        [log_ways, math.lgamma(total), -math.lgamma(sum(counts) + total)]
        + rising
        + [-math.lgamma(concentration)] * len(counts)
    )


def mixed_log_eppf(counts, concentration, log_p, max_components=160):
    """Mixture over the number of components of their own laws."""
    log_p = np.array([log_p(j) for j in range(max_components)])
    terms = [
        finite_log_eppf(counts, concentration, k) for k in range(1, max_components + 1)
    ]
    return scipy.special.logsumexp(log_p + terms) - scipy.special.logsumexp(log_p)


def log_v(n, t, concentration, log_p, max_components=160):
    """Miller and Harrison (2018), Equation 3.2; `log_p` of k components."""
    k = np.arange(max(t, 1), max_components + 1)
    if not len(k):
        return -math.inf
    gammaln = scipy.special.gammaln
    log_falling = gammaln(k + 1) - gammaln(k - t + 1)
    log_rising = gammaln(concentration * k + n) - gammaln(concentration * k)
    log_p = np.array([log_p(j) for j in k - 1])
    return scipy.special.logsumexp(log_falling - log_rising + log_p)


def float32(x):
    """What a parameter stands for in float32."""
    return float(np.float32(x))


def counts_of(labels):
    labels = np.asarray(labels)
    return np.bincount(labels[labels >= 0], minlength=1)


def all_counts(labels, num_slots):
    return (labels[..., None] == np.arange(num_slots)).sum(-2)


def make(name, concentration, size, **options):
    return MixtureOfFiniteMixtures(concentration, EXTRA[name][0](), size, **options)


def priors(size):
    """One of each kind and regime, with the log of its EPPF."""
    for g, num_components in FINITE:
        yield (
            FiniteDirichletMixture(g, num_components, size),
            lambda n, g=g, k=num_components: finite_log_eppf(n, float32(g), k),
        )
    for g, name in MIXED:
        yield (
            make(name, g, size),
            lambda n, g=g, name=name: mixed_log_eppf(n, float32(g), EXTRA[name][1]),
        )


NUM_PRIORS = len(FINITE) + len(MIXED)


def nth_prior(i, size):
    return next(itertools.islice(priors(size), i, None))


# The probability function.


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_probabilities_of_all_partitions_are_right_and_sum_to_one(i):
    for num_rows in (1, 6):
        labels = testing.set_partitions(num_rows)
        counts = all_counts(labels, num_rows)
        prior, log_eppf = nth_prior(i, num_rows)
        expected = np.exp([log_eppf(n) for n in counts])
        assert expected.sum() == pytest.approx(1.0, abs=1e-9)
        for log_prob in (prior.log_prob(labels), prior.log_eppf(counts)):
            actual = np.exp(np.asarray(log_prob, np.float64))
            assert actual.sum() == pytest.approx(1.0, abs=5e-6)
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-12)
            assert ((actual == 0.0) == (expected < 1e-99)).all()


@quick
@pytest.mark.parametrize("num_components", [2, 3])
@pytest.mark.parametrize("concentration", [Fraction(1, 2), Fraction(3)])
def test_finite_law_is_that_of_the_labels_up_to_names(concentration, num_components):
    # Polya's urn over all label vectors, in exact arithmetic.
    expected = {}
    for labels in itertools.product(range(num_components), repeat=5):
        probability = Fraction(1)
        counts = [0] * num_components
        for i, k in enumerate(labels):
            probability *= (counts[k] + concentration) / (
                i + num_components * concentration
            )
            counts[k] += 1
        partition = tuple(testing.canonical_labels(labels).tolist())
        expected[partition] = expected.get(partition, 0) + probability
    assert sum(expected.values()) == 1
    prior = FiniteDirichletMixture(float(concentration), num_components, 5)
    for labels in testing.set_partitions(5):
        probability = expected.get(tuple(labels.tolist()), 0)
        actual = math.exp(prior.log_prob(labels))
        assert actual == pytest.approx(float(probability), rel=5e-6, abs=0.0)


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_log_prob_is_the_product_of_the_predictives_in_any_order(i):
    rng = np.random.default_rng(i)
    prior, log_eppf = nth_prior(i, 9)
    most = getattr(prior, "num_components", 3)
    labels = np.concatenate([rng.integers(0, min(most, 3), 8), [-1]])
    orders = [np.arange(9), rng.permutation(9), rng.permutation(9)]
    expected = log_eppf(counts_of(labels))
    for order in orders:
        counts = np.zeros(4, int)
        total = 0.0
        for k in labels[order]:
            if k < 0:
                continue
            existing = np.asarray(prior.log_weight_existing(counts), np.float64)
            new = float(prior.log_weight_new((counts > 0).sum(), counts.sum()))
            own = existing[k] if counts[k] else new
            total += own - scipy.special.logsumexp([*existing, new])
            counts[k] += 1
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(prior.log_prob(labels), expected, rtol=3e-6, atol=3e-6)


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_names_and_unassigned_rows_do_not_matter(i):
    prior, log_eppf = nth_prior(i, 9)
    labels = np.array([4, 4, -1, 0, 4, -1, 0, 4, -1])
    if getattr(prior, "num_components", 2) == 1:
        labels[labels == 0] = 4
    expected = log_eppf(counts_of(labels))
    renamed = np.where(labels < 0, -1, 2**40 - labels * 2**33)
    for value in (labels, labels[::-1], labels.astype(np.int8), renamed):
        np.testing.assert_allclose(prior.log_prob(value), expected, rtol=3e-6)
    assert prior.log_prob(np.full(9, -1)) == 0.0
    assert prior.log_prob(np.where(np.arange(9) == 3, 7, -1)) == 0.0
    for counts in (np.zeros(0, int), np.array([[0, 0, 0], [0, 1, 0]])):
        assert (prior.log_eppf(counts) == 0.0).all()


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_log_eppf_of_counts_equals_log_prob_of_labels(i):
    prior, _ = nth_prior(i, 300)
    most = getattr(prior, "num_components", 4)
    labels = random.randint(random.key(1), (6, 300), 0, min(most, 4))
    counts = jax.vmap(lambda row: jnp.bincount(row, length=7))(labels)
    expected = prior.log_prob(labels)
    np.testing.assert_allclose(prior.log_eppf(counts), expected, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(
        prior.log_eppf(counts.T, axis=0), expected, rtol=3e-6, atol=3e-6
    )


@quick
def test_more_clusters_than_components_are_impossible():
    finite = FiniteDirichletMixture(0.7, 3, 6)
    uniform = MixtureOfFiniteMixtures(0.7, dist.DiscreteUniform(0, 2), 6)
    cut = MixtureOfFiniteMixtures(
        0.7, dist.Poisson(2.0), 6, max_components=3, validate_args=False
    )
    num_clusters = np.arange(1, 7)
    labels = np.arange(6) % num_clusters[:, None]
    possible = num_clusters <= 3
    for prior in (finite, uniform, cut):
        log_prob = np.asarray(prior.log_prob(labels))
        log_eppf = np.asarray(prior.log_eppf(all_counts(labels, 6)))
        new = np.asarray(prior.log_weight_new(num_clusters, 6))
        for found, allowed in (
            (log_prob, possible),
            (log_eppf, possible),
            (new, num_clusters < 3),
        ):
            np.testing.assert_array_equal(np.isfinite(found), allowed)
            assert (found[~allowed] == -np.inf).all()
    # Counts without empty slots.
    assert finite.log_eppf(np.ones(4, int)) == -np.inf
    assert uniform.log_eppf(np.ones(4, int)) == -np.inf


@quick
def test_truncated_law_is_renormalised():
    prior = MixtureOfFiniteMixtures(
        0.7, dist.Poisson(2.0), 5, max_components=3, validate_args=False
    )
    labels = testing.set_partitions(5)

    def log_p(j):
        return j * math.log(2.0) - math.lgamma(j + 1)

    expected = [
        mixed_log_eppf(n, float32(0.7), log_p, max_components=3)
        for n in all_counts(labels, 5)
    ]
    np.testing.assert_allclose(prior.log_prob(labels), expected, rtol=3e-6, atol=3e-6)


# Weights.


@quick
def test_finite_weights_are_the_numerators_of_the_urn():
    prior = FiniteDirichletMixture(0.75, 5, 20)
    counts = np.array([4, 0, 1, 6])
    existing = np.exp(np.asarray(prior.log_weight_existing(counts), np.float64))
    np.testing.assert_allclose(existing, [4.75, 0.0, 1.75, 6.75], rtol=1e-6)
    for t, weight in [(1, 3.0), (3, 1.5), (4, 0.75), (5, 0.0), (6, 0.0)]:
        np.testing.assert_allclose(np.exp(prior.log_weight_new(t, 11)), weight, 1e-6)
        assert prior.log_weight_new(np.uint8(t), 11) == prior.log_weight_new(t, 11)


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_weight_of_the_first_cluster_is_one(i):
    prior, _ = nth_prior(i, 4)
    assert prior.log_weight_new(0, 0) == 0.0
    np.testing.assert_array_equal(
        prior.log_weight_existing(np.zeros(3, int)), [-np.inf] * 3
    )


# (t, n), also where all rows are apart, and a million rows.
STATES = [
    (t, n) for t in (1, 2, 7, 40, 100, 127) for n in (t, t + 1, 3 * t, 100 * t, 10**6)
]


@pytest.mark.parametrize("name", ["geometric", "flat"])
@pytest.mark.parametrize("concentration", [1e-3, 1.0, 100.0])
def test_float32_weight_of_a_new_cluster_is_right_up_to_a_million_rows(
    concentration, name
):
    if name == "flat":
        extra = dist.DiscreteUniform(0, 159)

        def log_p(j):
            return 0.0
    else:
        extra, log_p = EXTRA[name][0](), EXTRA[name][1]
    prior = MixtureOfFiniteMixtures(concentration, extra, 10**6)
    g = float32(concentration)
    t, n = np.array(STATES).T
    actual = prior.log_weight_new(t, n)
    expected = [
        math.log(g) + log_v(b + 1, a + 1, g, log_p) - log_v(b + 1, a, g, log_p)
        for a, b in STATES
    ]
    # Relative error of the weight itself; that of its log where that is large.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_weights_below_the_smallest_float32_are_right():
    # A new component is n**-100 or so as likely: its exponential underflows.
    prior = MixtureOfFiniteMixtures(100.0, dist.Geometric(0.25), 10**6)
    log_p = EXTRA["geometric"][1]
    expected = log_v(10**6 + 1, 3, 100.0, log_p) - log_v(10**6 + 1, 2, 100.0, log_p)
    actual = prior.log_weight_new(2, 10**6)
    assert actual < -200.0
    np.testing.assert_allclose(actual, expected + math.log(100.0), rtol=1e-5)


def test_no_state_gives_nan():
    num_clusters, num_rows = np.meshgrid(np.arange(0, 180), [0, 1, 5, 180, 10**6])
    for extra in (dist.DiscreteUniform(4, 9), dist.Poisson(1.0), dist.Geometric(0.9)):
        prior = MixtureOfFiniteMixtures(0.5, extra, 10**6)
        weights = prior.log_weight_new(num_clusters, num_rows)
        assert not np.isnan(weights).any() and not (weights == np.inf).any()
        assert (weights[:, 160:] == -np.inf).all()


# Limits.


@quick
def test_one_component_holds_all_rows():
    labels = np.zeros(10**4, int)
    for prior in (
        FiniteDirichletMixture(0.37, 1, 10**4),
        MixtureOfFiniteMixtures(0.37, dist.DiscreteUniform(0, 0), 10**4),
    ):
        assert prior.log_prob(labels) == pytest.approx(0.0, abs=1e-6)
        assert prior.log_eppf(np.array([10**4])) == pytest.approx(0.0, abs=1e-6)
        assert prior.log_weight_new(1, 5) == -np.inf
        assert prior.sample(random.key(0)).max() == 0


@quick
@pytest.mark.parametrize("num_components", [1, 9, 128])
@pytest.mark.parametrize("concentration", [0.05, 30.0])
def test_known_number_of_components_is_the_finite_law(concentration, num_components):
    extra = dist.DiscreteUniform(num_components - 1, num_components - 1)
    mixed = MixtureOfFiniteMixtures(concentration, extra, 500)
    finite = FiniteDirichletMixture(concentration, num_components, 500)
    for num_clusters in {1, min(num_components, 6), num_components}:
        labels = np.arange(500) % num_clusters
        counts = np.bincount(labels, minlength=128)
        expected = finite_log_eppf(counts, float32(concentration), num_components)
        for prior in (mixed, finite):
            for log_prob in (prior.log_prob(labels), prior.log_eppf(counts)):
                np.testing.assert_allclose(log_prob, expected, rtol=2e-6, atol=1e-5)
        np.testing.assert_allclose(
            mixed.log_weight_new(num_clusters, 500),
            finite.log_weight_new(num_clusters, 500),
            rtol=1e-5,
            atol=1e-5,
        )
    counts = np.array([3, 0, 2])
    np.testing.assert_array_equal(
        mixed.log_weight_existing(counts), finite.log_weight_existing(counts)
    )


@quick
def test_sparse_finite_law_tends_to_the_chinese_restaurant_process():
    labels = testing.set_partitions(6)
    finite = FiniteDirichletMixture(2.5 / 10**7, 10**7, 6).log_prob(labels)
    np.testing.assert_allclose(
        finite, ChineseRestaurantProcess(2.5, 6).log_prob(labels), rtol=1e-5
    )


@quick
def test_finite_law_is_pitman_yor_of_a_negative_discount():
    prior = PitmanYorProcess(5 * 0.75, -0.75, 6, validate_args=False)
    labels = testing.set_partitions(6)
    labels = labels[labels.max(-1) < 5]
    np.testing.assert_allclose(
        FiniteDirichletMixture(0.75, 5, 6).log_prob(labels),
        prior.log_prob(labels),
        rtol=1e-5,
    )


# Accuracy at large counts.


LARGE_COUNTS = {
    "one_large_many_single": [10**6 - 99] + [1] * 99,
    "powers": [2**k for k in range(20)],
    "single": [1] * 100,
}


@pytest.mark.parametrize("counts", LARGE_COUNTS.values(), ids=LARGE_COUNTS.keys())
@pytest.mark.parametrize("concentration", [1e-4, 1e6])
@pytest.mark.parametrize("kind", [100, "geometric"])
def test_float32_keeps_its_accuracy_at_large_counts(counts, concentration, kind):
    g = float32(concentration)
    # Filled up with rows that are out and empty clusters, so that all are of one shape.
    num_rows = 2**20 - 1
    if isinstance(kind, int):
        prior = FiniteDirichletMixture(concentration, kind, num_rows)
        expected = finite_log_eppf(counts, g, kind)
    else:
        prior = make(kind, concentration, num_rows)
        expected = mixed_log_eppf(counts, g, EXTRA[kind][1])
    labels = np.full(num_rows, -1)
    labels[: sum(counts)] = np.repeat(np.arange(len(counts)), counts)
    counts = np.pad(counts, (0, 100 - len(counts)))
    tolerance = 1e-6 * abs(expected) + 2e-5
    assert abs(prior.log_eppf(counts) - expected) < tolerance
    assert abs(prior.log_prob(labels) - expected) < tolerance


def test_float64_is_exact_to_rounding():
    with jax.enable_x64(True):
        for counts in ([1000, 500, 3, 1],):
            labels = np.repeat(np.arange(len(counts)), counts)
            for g, k in [(0.3, 4), (20.0, 5)]:
                prior = FiniteDirichletMixture(g, k, len(labels))
                expected = finite_log_eppf(counts, g, k)
                for actual in (
                    prior.log_eppf(np.array(counts)),
                    prior.log_prob(labels),
                ):
                    np.testing.assert_allclose(actual, expected, 1e-11, 1e-12)
            for g, name in MIXED:
                if name == "categorical":  # its probabilities are in float32
                    continue
                prior = make(name, g, len(labels))
                expected = mixed_log_eppf(counts, g, EXTRA[name][1])
                for actual in (
                    prior.log_eppf(np.array(counts)),
                    prior.log_prob(labels),
                ):
                    np.testing.assert_allclose(actual, expected, 1e-11, 1e-11)
                t, n = len(counts), sum(counts)
                log_p = EXTRA[name][1]
                upper, lower = (log_v(n + 1, t + i, g, log_p) for i in (1, 0))
                if upper == -np.inf or t == 0:
                    continue
                np.testing.assert_allclose(
                    prior.log_weight_new(t, n),
                    upper - lower + math.log(g),
                    1e-10,
                    1e-10,
                )


# Sampling.


# False-alarm rate 1e-4 for each prior, 1.3e-3 for all of them.
@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_sampled_partitions_have_their_probabilities(i):
    prior, log_eppf = nth_prior(i, 5)
    if getattr(prior, "num_components", 2) == 1:
        return  # certain; see `test_one_component_holds_all_rows`
    partitions = testing.set_partitions(5)
    probs = np.exp([log_eppf(n) for n in all_counts(partitions, 5)])
    draws = np.asarray(prior.sample(random.key(5), (20_000,)))
    assert draws.dtype == np.int32
    np.testing.assert_array_equal(draws, testing.canonical_labels(draws))
    index = testing.partition_index(draws, partitions)
    report = testing.goodness_of_fit(index, probs / probs.sum())
    assert report.p_value > 1e-4, report


# Binomial counts with z < 4.5: false-alarm rate 2e-5 for the three.
@quick
def test_sampled_rows_are_exchangeable():
    # (Given their number of components, mixtures have the same sampler.)
    num_draws = 20_000
    prior = FiniteDirichletMixture(0.5, 4, 200)
    draws = np.asarray(prior.sample(random.key(7), (num_draws,)))
    together = 1.5 / 3.0
    deviation = math.sqrt(together * (1 - together) / num_draws)
    for i, j in [(0, 1), (0, 199), (99, 198)]:
        frequency = (draws[:, i] == draws[:, j]).mean()
        assert abs(frequency - together) / deviation < 4.5, (i, j, frequency)


# Few rows: `test_sampled_partitions_have_their_probabilities`.
@quick
@pytest.mark.parametrize("i", [3, 5])
def test_many_sampled_labels_are_in_order_of_first_appearance(i):
    prior, _ = nth_prior(i, 50)
    draws = np.asarray(prior.sample(random.key(9), (20,)))
    assert draws.dtype == np.int32
    np.testing.assert_array_equal(draws, testing.canonical_labels(draws))


# Means over 400 draws with z < 4.5: false-alarm rate 1.4e-5.
def test_a_million_rows_are_sampled_in_bounded_time_with_the_right_law():
    # The share of the cluster of row 0 is that of its component: size-biased, so
    # Beta(1 + g, (K - 1) g), of mean (1 + g) / (1 + K g).
    # (A finite law has the sampler of a mixture, with less to do.)
    mixed = MixtureOfFiniteMixtures(0.5, dist.DiscreteUniform(9, 9), 10**6)

    @jax.jit
    def share(key):
        return (mixed.sample(key) == 0).mean()

    share(random.key(0)).block_until_ready()
    start = time.perf_counter()
    share(random.key(1)).block_until_ready()
    assert time.perf_counter() - start < 2.0  # 15 ms where it was written
    small = FiniteDirichletMixture(0.5, 10, 1000)
    shares = np.asarray((small.sample(random.key(2), (400,)) == 0).mean(-1))
    expected = (1000 * 1.5 / 6.0 + (1 - 1.5 / 6.0)) / 1000
    deviation = shares.std(ddof=1) / math.sqrt(400)
    assert abs(shares.mean() - expected) < 4.5 * deviation
    shares = [float(share(key)) for key in random.split(random.key(3), 60)]
    deviation = np.std(shares, ddof=1) / math.sqrt(60)
    assert abs(np.mean(shares) - 0.25) < 4.5 * deviation


@quick
@pytest.mark.parametrize("make_key", [random.key, random.PRNGKey])
def test_same_key_same_draw_and_other_key_other_draw(make_key):
    priors = [make("poisson", 1.0, 100)]
    if make_key is random.key:
        priors.append(FiniteDirichletMixture(1.0, 9, 100))
    for prior in priors:
        draws = prior.sample(make_key(0), (3,))
        np.testing.assert_array_equal(draws, prior.sample(make_key(0), (3,)))
        assert (draws != prior.sample(make_key(1), (3,))).any()


@quick
def test_no_key_is_used_twice():
    with jax.debug_key_reuse(True):
        keys = random.split(random.key(0), 2)
        FiniteDirichletMixture(1.0, 5, 20).sample(keys[0], (2,))
        make("poisson", 1.0, 20).expand((2,)).sample(keys[1])


@quick
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_with_and_without_x64(x64):
    with jax.enable_x64(x64):
        float_type = jnp.float64 if x64 else jnp.float32
        for prior in (
            FiniteDirichletMixture(1, 5, 6),
            MixtureOfFiniteMixtures(1, dist.Poisson(1), 6),
        ):
            # (`test_float64_is_exact_to_rounding` also runs what is traced here.)
            def traced(method, *args, prior=prior):
                out = jax.eval_shape(lambda: getattr(prior, method)(*args))
                return out.dtype

            counts = np.array([2, 3])
            assert traced("sample", random.key(0), (2,)) == jnp.int32
            assert traced("log_prob", np.array([0, 0, 1, 1, 1, 1])) == float_type
            assert traced("log_eppf", counts) == float_type
            assert traced("log_weight_existing", counts) == float_type
            assert traced("log_weight_new", 2, 5) == float_type
            assert prior.parameter_error() is None
        # The mixture's, as it draws most.
        if x64:
            labels = prior.sample(random.key(0))
            assert labels.dtype == jnp.int32 and labels.shape == (6,)


# Shapes and transformations.


@quick
def test_parameters_broadcast_to_the_batch_shape():
    g = np.array([0.5, 1.0, 2.0])
    rate = jnp.array([[1.0], [4.0]])
    mixed = MixtureOfFiniteMixtures(g, dist.Poisson(rate), 7)
    assert mixed.batch_shape == (2, 3) and mixed.event_shape == (7,)
    finite = FiniteDirichletMixture(g, 4, 7)
    assert finite.batch_shape == (3,)
    labels = np.asarray(mixed.sample(random.key(0), (5, 4)))
    assert labels.shape == (5, 4, 2, 3, 7)

    def shape_of(prior, method, *args):
        return jax.eval_shape(lambda: getattr(prior, method)(*args)).shape

    assert shape_of(mixed, "sample", random.key(0), (0,)) == (0, 2, 3, 7)
    assert shape_of(finite, "sample", random.key(0), (5,)) == (5, 3, 7)
    counts = np.array([3, 0, 2, 1])
    existing = mixed.log_weight_existing(counts)
    new = mixed.log_weight_new(np.array([[2], [3]]), 6)
    eppf = mixed.log_eppf(np.broadcast_to(counts[:, None], (2, 4, 3)), axis=1)
    log_prob = mixed.log_prob(labels)
    assert existing.shape == (2, 3, 4) and new.shape == eppf.shape == (2, 3)
    assert log_prob.shape == (5, 4, 2, 3)
    # One axis of the batch comes from the law of the number alone.
    only_rate = MixtureOfFiniteMixtures(0.5, dist.Poisson(rate[:, 0]), 7)
    assert shape_of(only_rate, "log_weight_existing", counts) == (2, 4)
    assert shape_of(only_rate, "log_weight_new", 2, 6) == (2,)
    assert shape_of(only_rate, "sample", random.key(0)) == (2, 7)
    for i, j in np.ndindex(2, 3):
        one = MixtureOfFiniteMixtures(g[j], dist.Poisson(rate[i, 0]), 7)
        np.testing.assert_allclose(existing[i, j], one.log_weight_existing(counts))
        np.testing.assert_allclose(new[i, j], one.log_weight_new(2 + i, 6), rtol=2e-6)
        np.testing.assert_allclose(eppf[i, j], one.log_eppf(counts), rtol=2e-6)
        np.testing.assert_allclose(
            log_prob[:, :, i, j], one.log_prob(labels[:, :, i, j]), rtol=3e-6, atol=3e-6
        )
    few = np.minimum(labels[:, 0, 0], 3)
    log_prob = finite.log_prob(few)
    eppf = finite.log_eppf(counts)
    for j in range(3):
        one = FiniteDirichletMixture(g[j], 4, 7)
        np.testing.assert_allclose(log_prob[:, j], one.log_prob(few[:, j]), rtol=2e-6)
        np.testing.assert_allclose(eppf[j], one.log_eppf(counts), rtol=2e-6)
        np.testing.assert_allclose(
            finite.log_weight_new(2, 5)[j], one.log_weight_new(2, 5), rtol=2e-6
        )


# Binomial counts with z < 4.5: false-alarm rate 2.8e-5.
@quick
def test_batch_elements_are_drawn_with_their_own_parameters():
    numbers = jnp.array([1, 5])
    mixed = MixtureOfFiniteMixtures(
        np.array([0.5, 2.0]), dist.DiscreteUniform(numbers, numbers), 2, 6
    )
    finite = FiniteDirichletMixture(np.array([0.5, 2.0]), 3, 2)
    for prior, k in ((mixed, np.array([2, 6])), (finite, np.array([3, 3]))):
        draws = np.asarray(prior.sample(random.key(3), (20_000,)))
        together = (draws[..., 0] == draws[..., 1]).mean(0)
        g = np.array([0.5, 2.0])
        expected = (1 + g) / (1 + k * g)
        deviation = np.sqrt(expected * (1 - expected) / 20_000)
        assert (abs(together - expected) < 4.5 * deviation).all(), (together, expected)


@quick
def test_expand_draws_independent_partitions():
    for prior in (FiniteDirichletMixture(1.0, 9, 30), make("poisson", 1.0, 30)):
        labels = np.asarray(prior.expand((4, 3)).sample(random.key(0), (2,)))
        assert labels.shape == (2, 4, 3, 30)
        flat = labels.reshape(-1, 30)
        assert len(np.unique(flat, axis=0)) > (20 if flat.max(-1).all() else 10)
        log_prob = jax.eval_shape(prior.expand((4, 3)).log_prob, labels)
        assert log_prob.shape == (2, 4, 3)


@quick
def test_jit_and_vmap_change_nothing():
    def figures(prior, labels):
        counts = jnp.bincount(labels, length=25)
        return (
            prior.log_prob(labels),
            prior.log_eppf(counts),
            prior.log_weight_new((counts > 0).sum(), 25),
            prior.log_weight_existing(counts),
        )

    def mixed(key, g, rate):
        prior = MixtureOfFiniteMixtures(g, dist.Poisson(rate), 25)
        labels = prior.sample(key)
        return labels, *figures(prior, labels)

    def finite(key, g, rate):
        # (Its sampler is that of the mixture.)
        labels = jnp.arange(25) % random.randint(key, (), 1, 7)
        return labels, *figures(FiniteDirichletMixture(g, 6, 25), labels)

    keys = random.split(random.key(0), 3)
    g, rate = jnp.array([0.5, 1.0, 9.0]), jnp.array([0.5, 3.0, 5.0])
    for draw in (finite, mixed):
        batched = jax.jit(jax.vmap(draw))(keys, g, rate)
        assert batched[0].dtype == jnp.int32
        for i in range(3):
            one = draw(keys[i], g[i], rate[i])
            np.testing.assert_array_equal(batched[0][i], one[0])
            for a, b in zip(batched[1:], one[1:], strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


@quick
def test_weight_of_a_new_cluster_inside_a_compiled_loop():
    prior = make("poisson", 0.7, 100)

    @jax.jit
    def run(prior):
        def body(n, out):
            return out.at[n].set(prior.log_weight_new(1 + n // 20, n))

        return lax.fori_loop(1, 100, body, jnp.zeros(100))

    found = run(prior)
    expected = prior.log_weight_new(1 + np.arange(1, 100) // 20, np.arange(1, 100))
    np.testing.assert_allclose(found[1:], expected, rtol=1e-5, atol=1e-5)


@quick
@pytest.mark.parametrize(
    "prior",
    [
        FiniteDirichletMixture(np.array([0.5, 1.0]), 4, 6),
        MixtureOfFiniteMixtures(0.5, dist.Poisson(1.0), 6),
        MixtureOfFiniteMixtures(0.5, dist.Geometric(np.array([0.3, 0.4])), 6, 77),
    ],
    ids=["finite_batch", "poisson", "geometric_batch"],
)
def test_priors_survive_flattening_pickling_and_jit(prior):
    leaves, treedef = jax.tree.flatten(prior)
    restored = [
        jax.tree.unflatten(treedef, leaves),
        pickle.loads(pickle.dumps(prior)),
        jax.jit(lambda p: p)(prior),
    ]
    labels = prior.sample(random.key(0))
    for other in restored:
        assert type(other) is type(prior)
        assert other.size == 6 and other.batch_shape == prior.batch_shape
        for name in ("num_components", "max_components"):
            assert getattr(other, name, None) == getattr(prior, name, None)
        np.testing.assert_array_equal(other.sample(random.key(0)), labels)
        np.testing.assert_array_equal(other.log_prob(labels), prior.log_prob(labels))
        assert other.parameter_error() is None
    changed = jax.tree.map(lambda x: 2 * x, prior)
    np.testing.assert_array_equal(changed.concentration, 2 * prior.concentration)
    jax.tree.unflatten(treedef, [object()] * len(leaves))


@quick
def test_vmap_over_a_prior_as_a_pytree():
    labels = jnp.array([0, 1, 1, 0])
    counts = jnp.array([2, 0, 2])
    g = jnp.array([0.5, 1.0])
    for prior in (
        FiniteDirichletMixture(g, 4, 4),
        MixtureOfFiniteMixtures(g, dist.Geometric(jnp.array([0.3, 0.8])), 4),
    ):

        def figures(p):
            return (
                p.log_prob(labels),
                p.log_eppf(counts),
                p.log_weight_new(2, 4),
                p.log_weight_existing(counts),
            )

        *alike, existing = jax.jit(jax.vmap(figures))(prior)
        assert existing.shape == (2, 3)
        for a, b in zip(alike, figures(prior), strict=False):
            np.testing.assert_allclose(a, b, rtol=1e-5)


# As a site of a NumPyro model.


@quick
def test_priors_are_sites_of_models():
    def model():
        g = numpyro.sample("g", dist.Gamma(1.0, 1.0))
        rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
        numpyro.sample("finite", FiniteDirichletMixture(g / 4, 4, 6))
        with numpyro.plate("views", 3):
            extra = dist.Poisson(rate)
            numpyro.sample("mixed", MixtureOfFiniteMixtures(g, extra, 6))

    trace = handlers.trace(handlers.seed(model, random.key(0))).get_trace()
    for name, shape in {"finite": (), "mixed": (3,)}.items():
        site = trace[name]
        assert site["value"].shape == (*shape, 6)
        log_prob = site["fn"].log_prob(site["value"])
        assert log_prob.shape == shape and np.isfinite(log_prob).all()


# Bad input.


@pytest.mark.parametrize("number", [0, -3, 2.0, True, None, "4", jnp.array(3), 2**31])
@pytest.mark.parametrize("validate_args", [None, False, True])
def test_bad_numbers_of_components_are_refused_always(number, validate_args):
    for name, make_prior in {
        "num_components": lambda: FiniteDirichletMixture(
            1.0, number, 4, validate_args=validate_args
        ),
        "max_components": lambda: MixtureOfFiniteMixtures(
            1.0, dist.Poisson(1.0), 4, number, validate_args=validate_args
        ),
    }.items():
        with pytest.raises(ValueError, match=f"`{name}`") as error:
            make_prior()
        assert f"got {number!r};" in str(error.value)


@pytest.mark.parametrize(
    "extra",
    [
        3,
        dist.Poisson,
        dist.Normal(0.0, 1.0),
        dist.Multinomial(3, jnp.ones(2) / 2),
        dist.Poisson(jnp.ones(3)).to_event(1),
    ],
)
def test_what_is_no_law_of_a_number_is_refused(extra):
    with pytest.raises(ValueError, match="`extra_components` must be a discrete"):
        MixtureOfFiniteMixtures(1.0, extra, 4, validate_args=False)


@pytest.mark.parametrize("size", [-3, 2.0, None, 2**31])
def test_bad_size_is_refused(size):
    with pytest.raises(ValueError, match="FiniteDirichletMixture: `size`"):
        FiniteDirichletMixture(1.0, 3, size)
    with pytest.raises(ValueError, match="MixtureOfFiniteMixtures: `size`"):
        make("poisson", 1.0, size)


@quick
@pytest.mark.parametrize(
    "value, shown",
    [
        (0.0, "0"),
        (-1.5, "-1.5"),
        (np.nan, "nan"),
        (np.inf, "inf"),
        (np.array([1.0, -0.5]), r"-0.5 at index \(1,\)"),
    ],
)
def test_bad_concentration_is_named(value, shown):
    for make_prior in (
        lambda **kw: FiniteDirichletMixture(value, 3, 4, **kw),
        lambda **kw: make("poisson", value, 4, **kw),
    ):
        with pytest.raises(ValueError, match=f": `concentration` .* got {shown};"):
            make_prior(validate_args=True)
        error = make_prior(validate_args=False).parameter_error()
        assert "`concentration`" in error


@quick
@pytest.mark.parametrize(
    "extra, max_components, shown",
    [
        (dist.Poisson(3.0), 5, "0.184737"),
        (dist.Geometric(0.1), 128, "1.39008e-06"),
        (dist.DiscreteUniform(0, 9), 9, "0.1"),
        (dist.DiscreteUniform(-1, 8), 9, "0.1"),
        (dist.Poisson(np.array([1.0, 90.0])), 64, r"\S+ at index \(1,\)"),
        (dist.Poisson(np.nan, validate_args=False), 64, "nan"),
    ],
)
def test_mass_beyond_the_last_component_is_refused(extra, max_components, shown):
    def make_prior(**options):
        return MixtureOfFiniteMixtures(1.0, extra, 4, max_components, **options)

    match = f"`extra_components` .* got {shown} outside; pass a larger"
    with pytest.raises(ValueError, match=match):
        make_prior(validate_args=True)
    assert make_prior(validate_args=False).parameter_error() is not None


@quick
@pytest.mark.parametrize("name", EXTRA)
def test_good_parameters_have_no_error(name):
    for g in (1e-3, np.float64(1.0), jnp.full((2, 3), 2.0)):
        assert make(name, g, 4).parameter_error() is None
    # The sum of float32 probabilities would be off by more than the 1e-6 allowed.
    assert MixtureOfFiniteMixtures(1.0, dist.Poisson(60.0), 4).parameter_error() is None


@quick
def test_traced_parameters_pass_and_concrete_ones_beside_them_do_not():
    @jax.jit
    def good(g, rate):
        for prior in (
            FiniteDirichletMixture(g, 4, 4, validate_args=True),
            MixtureOfFiniteMixtures(g, dist.Poisson(1.0), 4, validate_args=True),
            MixtureOfFiniteMixtures(1.0, dist.Poisson(rate), 4, validate_args=True),
        ):
            assert prior.parameter_error() is None
            with pytest.raises(RuntimeError, match="jitted"):
                prior.validate_args()
        return prior.log_prob(jnp.array([0, 0, 1, 1]))

    good(1.0, 500.0)
    with pytest.raises(ValueError, match="`extra_components`"):
        jax.jit(lambda g: make("poisson", g, 4, max_components=2).concentration)(1.0)
    with pytest.raises(ValueError, match="`concentration`"):
        jax.jit(
            lambda rate: (
                MixtureOfFiniteMixtures(-1.0, dist.Poisson(rate), 4).max_components
            )
        )(1.0)


@quick
def test_value_of_another_length_is_refused():
    for prior in (FiniteDirichletMixture(1.0, 3, 4), make("poisson", 1.0, 4)):
        for value in (np.zeros(3, int), np.zeros((4, 5), int), np.array(0)):
            with pytest.raises(ValueError, match=type(prior).__name__):
                prior.log_prob(value)


@quick
def test_a_table_without_rows_has_one_partition():
    for prior in (FiniteDirichletMixture(1.0, 3, 0), make("poisson", 1.0, 0)):
        draw = prior.sample(random.key(0), (3,))
        assert draw.shape == (3, 0)
        assert float(prior.log_prob(draw[0])) == 0.0
