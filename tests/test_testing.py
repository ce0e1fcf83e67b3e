# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The oracles against further, independent derivations.

Statistical tests have fixed seeds and no retries. "False alarm" is the probability
that a test of correct code fails when its seed is drawn afresh.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import signal, stats
from scipy.special import gammaln

from numpyro_subanneal import testing

BELL = [1, 2, 5, 15, 52, 203, 877, 4140]
PY_LAWS = [(1.0, 0.0), (0.3, 0.0), (2.0, 0.1), (1.0, 0.5), (-0.2, 0.3), (0.5, 0.95)]


# --- Partitions ---


@pytest.mark.parametrize("n", range(1, 9))
def test_set_partitions_are_bell_many_unique_sorted_and_canonical(n):
    partitions = testing.set_partitions(n)
    rows = [tuple(p) for p in partitions.tolist()]
    assert partitions.shape == (BELL[n - 1], n)
    assert rows == sorted(set(rows))
    np.testing.assert_array_equal(testing.canonical_labels(partitions), partitions)


def test_set_partitions_are_those_of_all_label_vectors():
    every = np.array(list(itertools.product(range(4), repeat=4)))
    unique = np.unique(testing.canonical_labels(every), axis=0)
    np.testing.assert_array_equal(unique, testing.set_partitions(4))


@pytest.mark.parametrize("n", [0, 13])
def test_set_partitions_names_a_size_out_of_range(n):
    with pytest.raises(ValueError, match=f"got {n}"):
        testing.set_partitions(n)


def test_canonical_labels_keep_the_relation_and_the_missing():
    z = np.random.default_rng(1).integers(-4, 5, size=(3, 50, 7))
    labels = testing.canonical_labels(z)
    assert labels.shape == z.shape
    np.testing.assert_array_equal(labels == -1, z == -1)
    np.testing.assert_array_equal(
        labels[..., :, None] == labels[..., None, :],
        z[..., :, None] == z[..., None, :],
    )
    # each label is at most one more than the largest before it
    before = np.maximum.accumulate(labels, axis=-1)
    assert (labels[..., 1:] <= before[..., :-1] + 1).all()
    assert labels[..., 0].max() == 0
    np.testing.assert_array_equal(
        testing.canonical_labels([7, -1, -5, 7, -1, 2]), [0, -1, 1, 0, -1, 2]
    )


def test_canonical_labels_refuse_floats():
    with pytest.raises(ValueError, match="float64"):
        testing.canonical_labels([0.0, 1.0])


def test_partition_index_inverts_the_list_under_relabelling():
    partitions = testing.set_partitions(5)
    expected = np.random.default_rng(2).integers(len(partitions), size=(4, 30))
    names = np.array([40, -7, 3, 99, 0])
    index = testing.partition_index(names[partitions[expected]], partitions)
    np.testing.assert_array_equal(index, expected)


def test_partition_index_refuses_the_unknown_and_duplicates():
    partitions = testing.set_partitions(3)
    with pytest.raises(ValueError, match=r"\[0, 1, 2\]"):
        testing.partition_index([[0, 0, 0], [5, 6, 7]], partitions[:-1])
    with pytest.raises(ValueError, match=r"\[0, -1, 1\]"):
        testing.partition_index([0, -1, 1], partitions)
    with pytest.raises(ValueError, match="2 rows but 1"):
        testing.partition_index([0, 1], [[0, 1], [1, 0]])


# --- EPPF ---


@pytest.mark.parametrize("concentration,discount", PY_LAWS)
def test_eppf_sums_to_one(concentration, discount):
    log_p = testing.log_eppf(testing.set_partitions(7), concentration, discount)
    np.testing.assert_allclose(np.exp(log_p).sum(), 1.0, rtol=1e-12)


@pytest.mark.parametrize("concentration,discount", PY_LAWS)
def test_eppf_is_exchangeable(concentration, discount):
    partitions = testing.set_partitions(6)
    expected = testing.log_eppf(partitions, concentration, discount)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(6)
        actual = testing.log_eppf(partitions[:, order], concentration, discount)
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("concentration,discount", PY_LAWS)
def test_eppf_equals_the_product_over_clusters(concentration, discount):
    def rising(x, n):
        return math.prod(x + i for i in range(n))

    for z in testing.set_partitions(6):
        sizes = np.bincount(z)
        new = math.prod(concentration + i * discount for i in range(1, len(sizes)))
        old = math.prod(rising(1 - discount, n - 1) for n in sizes)
        expected = new * old / rising(concentration + 1, 5)
        actual = np.exp(testing.log_eppf(z, concentration, discount))
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_eppf_leaves_out_rows_without_a_cluster():
    actual = testing.log_eppf([-1, 4, -1, 4, 2], 0.7, 0.2)
    np.testing.assert_allclose(actual, testing.log_eppf([0, 0, 1], 0.7, 0.2))
    assert testing.log_eppf([-1, -1], 0.7) == 0.0


def test_eppf_names_parameters_out_of_range():
    with pytest.raises(ValueError, match=r"got 1\.0"):
        testing.log_eppf([0], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"got -0\.5"):
        testing.log_eppf([0], -0.5, 0.5)


# --- Log marginal likelihoods ---


def normal_evidence(x, mean, kappa, shape, rate):
    """Ratio of normalising constants of posterior and prior; one feature."""
    n, total = len(x), np.sum(x)
    kappa_n, shape_n = kappa + n, shape + n / 2
    mean_n = (kappa * mean + total) / kappa_n
    rate_n = rate + (np.sum(x**2) + kappa * mean**2 - kappa_n * mean_n**2) / 2
    return (
        gammaln(shape_n)
        - gammaln(shape)
        + shape * np.log(rate)
        - shape_n * np.log(rate_n)
        + 0.5 * np.log(kappa / kappa_n)
        - n / 2 * np.log(2 * np.pi)
    )


def normal_by_predictives(x, mean, kappa, shape, rate):
    """Product of univariate Student-t predictives with recursive updates."""
    total = 0.0
    for value in x:
        scale = np.sqrt(rate * (kappa + 1) / (shape * kappa))
        total += stats.t.logpdf(value, 2 * shape, loc=mean, scale=scale)
        rate += kappa * (value - mean) ** 2 / (2 * (kappa + 1))
        mean = (kappa * mean + value) / (kappa + 1)
        kappa, shape = kappa + 1, shape + 0.5
    return total


def normal_by_quadrature(x, mean, kappa, shape, rate):
    """Trapezium rule over u = (loc - mean) sqrt(kappa / var) and log var."""
    u = np.linspace(-20.0, 20.0, 801)
    log_var = np.linspace(-10.0, 14.0, 1201)[:, None]
    var = np.exp(log_var)
    loc = mean + u * np.sqrt(var / kappa)
    log_f = stats.norm.logpdf(u) + stats.invgamma.logpdf(var, shape, scale=rate)
    log_f = log_f + log_var
    for value in x:
        log_f = log_f + stats.norm.logpdf(value, loc, np.sqrt(var))
    return np.log(np.exp(log_f).sum() * (u[1] - u[0]) * (log_var[1, 0] - log_var[0, 0]))


HYPERS = [(0.0, 1.0, 2.5, 1.0), (-1.5, 0.1, 3.0, 0.4), (2.0, 5.0, 2.2, 7.0)]


@pytest.mark.parametrize("hypers", HYPERS)
@pytest.mark.parametrize("n", [1, 2, 9])
def test_normal_marginal_is_the_product_of_predictives(n, hypers):
    x = np.random.default_rng(n).normal(1.0, 2.0, size=n)
    actual = testing.normal_log_marginal(x[:, None], *hypers)
    np.testing.assert_allclose(actual, normal_by_predictives(x, *hypers), rtol=1e-10)
    np.testing.assert_allclose(actual, normal_evidence(x, *hypers), rtol=1e-10)


@pytest.mark.parametrize("hypers", HYPERS)
@pytest.mark.parametrize("x", [[0.3], [-1.0, 2.5]])
def test_normal_marginal_is_the_integral_over_loc_and_var(x, hypers):
    actual = testing.normal_log_marginal(np.array(x)[:, None], *hypers)
    # the trapezium rule is exact here but for the cut tails, below 1e-9
    expected = normal_by_quadrature(x, *hypers)
    np.testing.assert_allclose(actual, expected, atol=1e-8)


def test_normal_marginal_sums_over_features():
    x = np.random.default_rng(3).normal(size=(4, 3))
    hypers = np.array(HYPERS)  # one row per feature
    actual = testing.normal_log_marginal(x, *hypers.T)
    parts = [testing.normal_log_marginal(x[:, [d]], *hypers[d]) for d in range(3)]
    np.testing.assert_allclose(actual, sum(parts), rtol=1e-12)
    assert testing.normal_log_marginal(x[:0], *hypers.T) == 0.0


def test_normal_marginal_names_bad_values():
    x = np.zeros((2, 1))
    with pytest.raises(ValueError, match=r"`kappa` must be positive, got -1"):
        testing.normal_log_marginal(x, 0.0, -1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="nan"):
        testing.normal_log_marginal([[np.nan]], 0.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        testing.normal_log_marginal(x[:, 0], 0.0, 1.0, 1.0, 1.0)


CODES = np.array([[0, 2], [1, 2], [0, 0], [0, 3], [1, 2]])
URNS = [np.array([0.5, 1.5]), np.array([0.2, 1.0, 3.0, 0.7])]


def test_categorical_marginal_is_the_ratio_of_dirichlet_constants():
    expected = 0.0
    for d, alpha in enumerate(URNS):
        post = alpha + np.bincount(CODES[:, d], minlength=len(alpha))
        expected += gammaln(alpha.sum()) - gammaln(post.sum())
        expected += (gammaln(post) - gammaln(alpha)).sum()
    actual = testing.categorical_log_marginal(CODES, URNS)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_categorical_marginal_is_the_mean_over_the_prior():
    # 5 standard errors of 2e5 draws: false alarm below 1e-6 per feature.
    rng = np.random.default_rng(4)
    for d, alpha in enumerate(URNS):
        likelihood = rng.dirichlet(alpha, size=200_000)[:, CODES[:, d]].prod(1)
        error = likelihood.std() / np.sqrt(len(likelihood))
        exact = np.exp(testing.categorical_log_marginal(CODES[:, [d]], alpha))
        assert abs(likelihood.mean() - exact) < 5 * error
        assert error < 0.02 * exact


def test_categorical_marginal_sums_to_one_over_data():
    every = itertools.product(range(4), repeat=3)
    logs = [testing.categorical_log_marginal(np.c_[list(c)], URNS[1]) for c in every]
    np.testing.assert_allclose(np.exp(logs).sum(), 1.0, rtol=1e-12)


def test_categorical_marginal_shares_one_concentration_and_takes_no_rows():
    alpha = [0.5, 1.0, 2.0, 0.1]
    shared = testing.categorical_log_marginal(CODES, alpha)
    assert shared == testing.categorical_log_marginal(CODES, [alpha, alpha])
    assert testing.categorical_log_marginal(CODES[:0], alpha) == 0.0


def test_categorical_marginal_names_bad_values():
    with pytest.raises(ValueError, match=r"Code 2 is outside 0\.\.1"):
        testing.categorical_log_marginal(CODES, [1.0, 1.0])
    with pytest.raises(ValueError, match="2 features but `concentration` 1"):
        testing.categorical_log_marginal(CODES, URNS[:1])
    with pytest.raises(ValueError, match=r"got \[0\.0, 1\.0\]"):
        testing.categorical_log_marginal(CODES, [0.0, 1.0])


# --- Enumeration ---


def test_enumeration_equals_a_sum_over_all_label_vectors():
    # All 4^4 labelled assignments, each partition of K clusters counted 4!/(4-K)!
    # times, with Ewens' formula and the evidence as a ratio of constants.
    x, hypers, alpha = np.array([-1.2, -0.4, 0.5, 1.4]), (0.1, 0.5, 2.0, 0.3), 1.3
    evidence, together, num_clusters = 0.0, np.zeros((4, 4)), 0.0
    for labels in itertools.product(range(4), repeat=4):
        z = np.array(labels)
        sizes = np.bincount(z)[np.bincount(z) > 0]
        k = len(sizes)
        weight = alpha**k * math.prod(math.factorial(n - 1) for n in sizes)
        weight *= math.factorial(4 - k) / math.factorial(4)
        weight /= math.prod(alpha + i for i in range(4))
        for label in set(labels):
            weight *= np.exp(normal_evidence(x[z == label], *hypers))
        evidence += weight
        together += weight * (z[:, None] == z)
        num_clusters += weight * k

    posterior = testing.enumerate_posterior(
        lambda z: testing.log_eppf(z, alpha),
        lambda rows: testing.normal_log_marginal(x[rows, None], *hypers),
        num_rows=4,
    )
    assert posterior.partitions.shape == (15, 4)
    np.testing.assert_allclose(posterior.probs.sum(), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.exp(posterior.log_joint).sum(), evidence, rtol=1e-10)
    np.testing.assert_allclose(
        posterior.expectation(lambda z: z[:, None] == z),
        together / evidence,
        rtol=1e-10,
    )
    np.testing.assert_allclose(
        posterior.expectation(lambda z: z.max() + 1), num_clusters / evidence
    )


def test_enumeration_asks_each_subset_once_and_accepts_impossible_partitions():
    asked = []
    posterior = testing.enumerate_posterior(
        lambda z: 0.0 if z.max() < 2 else -np.inf,
        lambda rows: asked.append(tuple(rows)) or 0.0,
        num_rows=5,
    )
    assert len(asked) == len(set(asked)) == 2**5 - 1
    assert (posterior.probs > 0).sum() == 1 + 15  # Stirling numbers S(5,1), S(5,2)
    np.testing.assert_allclose(posterior.expectation(lambda z: z.max() >= 2), 0.0)


def test_enumeration_names_the_partition_without_a_score():
    with pytest.raises(ValueError, match=r"\[0, 1\] is nan"):
        testing.enumerate_posterior(
            lambda z: np.nan if z.max() else 0.0, lambda rows: 0.0, num_rows=2
        )


# --- Goodness of fit ---


def crp_probs(n=5, concentration=1.0):
    return np.exp(testing.log_eppf(testing.set_partitions(n), concentration))


def test_fit_of_exact_draws_has_uniform_p_and_the_stated_floor():
    # 300 replicates. KS at 1e-3; 4.5 standard errors on the mean distance (7e-6);
    # 20 % on its sd (relative errors 4 % here, 3.5 % in the report: 2e-4).
    # False alarm in all about 1.2e-3: at these sizes the exact law of the p-value is
    # within 0.003 of uniform.
    rng, probs = np.random.default_rng(5), crp_probs()
    fits = [
        testing.goodness_of_fit(rng.choice(len(probs), 1000, p=probs), probs)
        for _ in range(300)
    ]
    assert fits[0].num_draws == 1000
    assert stats.kstest([f.p_value for f in fits], "uniform").pvalue > 1e-3
    tv = np.array([f.tv for f in fits])
    sd = fits[0].tv_floor_sd
    assert abs(tv.mean() - fits[0].tv_floor) < 4.5 * sd / np.sqrt(len(tv))
    assert abs(tv.std() / sd - 1) < 0.2


def test_fit_detects_a_five_per_cent_distortion():
    # Noncentrality 1e5 * 0.05^2 = 250 at 51 degrees of freedom: p below 1e-6 and
    # tv above the floor by 5 sd, missed with probability below 1e-6.
    rng, probs = np.random.default_rng(6), crp_probs()
    skewed = probs * np.where(np.arange(len(probs)) % 2, 1.05, 0.95)
    skewed /= skewed.sum()
    fit = testing.goodness_of_fit(rng.choice(len(probs), 100_000, p=skewed), probs)
    assert fit.dof == 51
    assert fit.p_value < 1e-6
    assert fit.tv > fit.tv_floor + 5 * fit.tv_floor_sd


@pytest.mark.parametrize("n", [40, 60, 97])
def test_tv_floor_is_the_exact_binomial_mean_absolute_deviation(n):
    probs = np.array([0.0, 0.001, 0.05, 0.2, 0.25, 0.499])
    x = np.arange(n + 1)
    expected = sum(
        (stats.binom.pmf(x, n, p) * np.abs(x / n - p)).sum() / 2 for p in probs
    )
    fit = testing.goodness_of_fit(np.full(n, 5), probs)
    np.testing.assert_allclose(fit.tv_floor, expected, rtol=1e-10)
    np.testing.assert_allclose(fit.tv, 0.501, rtol=1e-12)


def test_fit_pools_the_smallest_cells_until_they_reach_five():
    # Expectations at n = 100: 1, 50, 2, 40, 7. The first and third make 3 < 5, so 7
    # joins them: cells 10, 40, 50.
    probs, counts = np.array([0.01, 0.5, 0.02, 0.4, 0.07]), [3, 45, 0, 44, 8]
    fit = testing.goodness_of_fit(np.repeat(np.arange(5), counts), probs)
    chi2 = (11 - 10) ** 2 / 10 + (44 - 40) ** 2 / 40 + (45 - 50) ** 2 / 50
    np.testing.assert_allclose(fit.chi2, chi2)
    assert fit.dof == 2
    np.testing.assert_allclose(fit.p_value, np.exp(-chi2 / 2))  # chi-square, dof 2
    # 3 + 4 are enough, but 4.5 by itself is not: cells 11.5 and 88.5.
    fit = testing.goodness_of_fit(np.full(100, 3), [0.03, 0.04, 0.045, 0.885])
    np.testing.assert_allclose(fit.chi2, 11.5 + 11.5**2 / 88.5)
    assert fit.dof == 1
    fit = testing.goodness_of_fit(np.repeat([0, 1], [60, 40]), [0.5, 0.5])
    np.testing.assert_allclose([fit.chi2, fit.dof], [4.0, 1])


def test_fit_rejects_a_draw_of_probability_zero():
    draws = np.repeat([0, 1, 2], [500, 499, 1])
    fit = testing.goodness_of_fit(draws, [0.5, 0.5, 0.0])
    assert fit.p_value == 0.0 and fit.chi2 == np.inf


def test_fit_of_a_thinned_chain_is_calibrated_and_unthinned_is_not():
    # A chain that keeps its state with probability 0.8 has 9 draws to an effective
    # one. Thinned to half its effective size, the lag-one correlation is 0.8^18 =
    # 0.018. 200 replicates; KS at 1e-3 (false alarm about 2e-3 with this residue).
    rng, probs, n = np.random.default_rng(7), crp_probs(4), 9000
    thinned, naive = [], []
    for _ in range(200):
        moves = rng.random(n) > 0.8
        moves[0] = True
        last_move = np.maximum.accumulate(np.where(moves, np.arange(n), 0))
        chain = rng.choice(len(probs), n, p=probs)[last_move]
        fit = testing.goodness_of_fit(chain, probs, thin_ess=n / 18)
        assert fit.num_draws == 500
        thinned.append(fit.p_value)
        naive.append(testing.goodness_of_fit(chain, probs).p_value)
    assert stats.kstest(thinned, "uniform").pvalue > 1e-3
    assert np.mean(np.array(naive) < 0.01) > 0.9


def test_fit_names_bad_values():
    with pytest.raises(ValueError, match=r"sum 0\.9"):
        testing.goodness_of_fit([0, 1], [0.5, 0.4])
    with pytest.raises(ValueError, match=r"\[2\] are outside 0\.\.1"):
        testing.goodness_of_fit([0, 2], [0.5, 0.5])
    with pytest.raises(ValueError, match="8 draws of 2 states"):
        testing.goodness_of_fit([0] * 8, [0.5, 0.5])
    with pytest.raises(ValueError, match=r"got 0\.5"):
        testing.goodness_of_fit([0] * 8, [0.5, 0.5], thin_ess=0.5)


# --- Joint distribution test ---


def ar1(rng, rho, shape):
    """Stationary AR(1) chains along the last axis, marginally standard normal."""
    noise = rng.normal(size=shape) * np.sqrt(1 - rho**2)
    noise[..., 0] /= np.sqrt(1 - rho**2)
    return signal.lfilter([1.0], [1.0, -rho], noise)


@pytest.mark.parametrize("shape", [20_000, (4, 5_000), (100, 200)])
def test_joint_test_passes_a_chain_of_the_right_law(shape):
    # False alarm 1e-3.
    rng = np.random.default_rng(8)
    chain = ar1(rng, 0.8, shape)
    prior = rng.normal(size=10_000)
    report = testing.joint_distribution_test(
        {"x": prior, "positive": prior > 0}, {"x": chain, "positive": chain > 0}
    )
    assert set(report.p) == {"x", "x^2", "positive", "positive^2"}
    assert report.p_value == min(1.0, 4 * report.p[report.worst]) > 1e-3
    # exact: 20000 (1 - rho) / (1 + rho) = 2222 for the mean, 20000 (1 - rho^2) /
    # (1 + rho^2) = 4390 for the square; 31 or more degrees of freedom
    assert 1000 < report.ess["x"] < 5000
    assert 2000 < report.ess["x^2"] < 10000


@pytest.mark.parametrize(
    "change,worst", [(lambda x: x + 0.3, "x"), (lambda x: 1.2 * x, "x^2")]
)
def test_joint_test_fails_a_shifted_mean_and_a_wrong_variance(change, worst):
    # About 13 standard errors each; missed with probability below 1e-6.
    rng = np.random.default_rng(9)
    report = testing.joint_distribution_test(
        {"x": rng.normal(size=10_000)}, {"x": change(ar1(rng, 0.8, 20_000))}
    )
    assert report.worst == worst
    assert report.z[worst] > 7
    assert report.p_value < 1e-5


def test_joint_test_has_uniform_p_for_the_right_law():
    # 300 replicates; two KS tests at 1e-3 and one binomial at 1e-3: false alarm 3e-3.
    # Counting correlated draws as independent must be seen to break it.
    rng = np.random.default_rng(10)
    reports, naive = [], []
    for _ in range(300):
        prior, chain = {"x": rng.normal(size=2000)}, {"x": ar1(rng, 0.8, 4000)}
        reports.append(testing.joint_distribution_test(prior, chain))
        counted = testing.joint_distribution_test(prior, chain, chain_ess=4000)
        naive.append(counted.p["x"])
    for key in ("x", "x^2"):
        assert stats.kstest([r.p[key] for r in reports], "uniform").pvalue > 1e-3
    alarms = sum(r.p_value < 0.05 for r in reports)
    assert stats.binom.sf(alarms - 1, len(reports), 0.05) > 1e-3
    assert np.mean(np.array(naive) < 0.05) > 0.2


def test_joint_test_is_welchs_t_test_on_batch_means():
    rng = np.random.default_rng(11)
    prior, chain = rng.normal(size=9), rng.normal(size=(2, 50)) + 0.3
    report = testing.joint_distribution_test({"x": prior}, {"x": chain})
    # 16 batches of 3 in each chain; the first two draws are left over
    batches = chain[:, 2:].reshape(32, 3).mean(1)
    t, p = stats.ttest_ind(batches, prior, equal_var=False)
    np.testing.assert_allclose([report.z["x"], report.p["x"]], [t, p], rtol=1e-10)
    variance = batches.var(ddof=1) / 32
    np.testing.assert_allclose(report.ess["x"], chain[:, 2:].var() / variance)


def test_joint_test_takes_a_known_effective_sample_size():
    prior, chain = np.array([0.0, 2.0]), np.array([1.0, 3.0, 5.0, 7.0])
    report = testing.joint_distribution_test(
        {"x": prior}, {"x": chain}, chain_ess={"x": 2.5}
    )
    np.testing.assert_allclose(report.z["x"], 3.0 / np.sqrt(2.0 / 2 + 5.0 / 2.5))
    assert report.ess == {"x": 2.5, "x^2": 2.5}


def test_joint_test_of_constants_compares_them():
    zeros, ones = np.zeros(100), np.ones(100)
    same = testing.joint_distribution_test({"x": ones}, {"x": ones})
    assert same.p_value == 1.0
    other = testing.joint_distribution_test({"x": ones}, {"x": zeros})
    assert other.p_value == 0.0 and other.z["x"] == -np.inf


def test_joint_test_names_bad_values():
    x = np.arange(100.0)
    with pytest.raises(ValueError, match=r"\['x'\] and \['y'\]"):
        testing.joint_distribution_test({"x": x}, {"y": x})
    with pytest.raises(ValueError, match="'x' has draws that are not finite"):
        testing.joint_distribution_test({"x": x}, {"x": np.append(x, np.nan)})
    with pytest.raises(ValueError, match="'x' has chains of 20 draws"):
        testing.joint_distribution_test({"x": x}, {"x": x[:20]})
    with pytest.raises(ValueError, match=r"of 'x' must exceed 1, got 1\.0"):
        testing.joint_distribution_test({"x": x}, {"x": x}, chain_ess=1.0)
