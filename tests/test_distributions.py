# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Laws of the partition priors.

Statistical tests use fixed keys. A comment at each states its false-alarm rate: how
often it would fail for a correct sampler if the key were drawn afresh.
"""

from functools import partial
import math
import pickle
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import Predictive
from numpyro.infer.inspect import get_dependencies, get_model_relations

from numpyro_subanneal.distributions import (
    ChineseRestaurantProcess,
    FiniteDirichletMixture,
    MixtureOfFiniteMixtures,
    PartitionDistribution,
    PitmanYorProcess,
)
from numpyro_subanneal.grid import Grid

# Compiling is most of the time here. Not so quickly where the last digits (of large
# counts, and in float64) or time are tested.
quick = pytest.mark.quickly_compiled

# (concentration, discount): Dirichlet process, then both signs of the concentration,
# its lower end, discounts near both ends.
PARAMETERS = [
    (1.0, 0.0),
    (0.05, 0.0),
    (7.0, 0.0),
    (0.5, 0.3),
    (0.0, 0.4),
    (-0.2, 0.5),
    (-0.49, 0.5),
    (-0.9, 0.95),
    (2.0, 0.95),
    (0.7, 1e-6),
]


def set_partitions(num_rows):
    """All partitions as label tuples, clusters in order of first appearance."""
    partitions = [()]
    for _ in range(num_rows):
        partitions = [
            labels + (k,)
            for labels in partitions
            for k in range(max(labels, default=-1) + 2)
        ]
    return np.array(partitions, dtype=np.int32).reshape(len(partitions), num_rows)


def sequential_log_prob(labels, concentration, discount):
    """Seats the rows one by one, in float64 and in the order given."""
    sizes = {}
    total = 0.0
    for label in labels:
        if label < 0:
            continue
        num_rows = sum(sizes.values())
        if label in sizes:
            total += math.log(sizes[label] - discount)
            total -= math.log(concentration + num_rows)
        elif sizes:
            total += math.log(concentration + discount * len(sizes))
            total -= math.log(concentration + num_rows)
        sizes[label] = sizes.get(label, 0) + 1
    return total


def product_log_eppf(counts, concentration, discount):
    """The defining product, factor by factor in float64, exactly summed."""
    counts = np.asarray([n for n in counts if n > 0])
    num_rows = counts.sum()
    rising = np.cumsum(np.log(np.arange(1, counts.max()) - discount))
    rising = np.concatenate([[0.0], rising])
    opened = np.log(concentration + discount * np.arange(1, len(counts)))
    total = np.log(concentration + np.arange(1, num_rows))
    return math.fsum(np.concatenate([opened, rising[counts - 1], -total]).tolist())


def exact_mean_clusters(num_rows, concentration, discount):
    mean = 1.0
    for n in range(1, num_rows):
        mean += (concentration + discount * mean) / (concentration + n)
    return mean


def first_appearance(labels):
    names = {}
    return np.array([names.setdefault(label, len(names)) for label in labels])


def num_clusters(labels):
    return np.asarray(labels).max(-1) + 1


# The probability function.


@quick
@pytest.mark.parametrize("num_rows", [1, 3, 6])
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_probabilities_of_all_partitions_sum_to_one(num_rows, concentration, discount):
    labels = set_partitions(num_rows)
    assert len(labels) == [1, 1, 2, 5, 15, 52, 203][num_rows]  # Bell numbers
    prior = PitmanYorProcess(concentration, discount, num_rows)
    total = np.exp(np.asarray(prior.log_prob(labels), np.float64)).sum()
    assert total == pytest.approx(1.0, abs=3e-6)
    counts = (labels[:, :, None] == np.arange(num_rows)).sum(1)
    total = np.exp(np.asarray(prior.log_eppf(counts), np.float64)).sum()
    assert total == pytest.approx(1.0, abs=3e-6)


@quick
@pytest.mark.parametrize("concentration", [0.05, 1.0, 7.0])
def test_crp_probabilities_of_all_partitions_sum_to_one(concentration):
    labels = set_partitions(6)
    log_prob = ChineseRestaurantProcess(concentration, 6).log_prob(labels)
    total = np.exp(np.asarray(log_prob, np.float64)).sum()
    assert total == pytest.approx(1.0, abs=3e-6)


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_log_prob_is_the_sequential_product_in_any_order(concentration, discount):
    rng = np.random.default_rng(0)
    prior = PitmanYorProcess(concentration, discount, 40)
    for _ in range(5):
        labels = rng.integers(0, 7, 40)
        expected = sequential_log_prob(labels, concentration, discount)
        shuffled = rng.permutation(labels)
        np.testing.assert_allclose(prior.log_prob(labels), expected, rtol=2e-6)
        np.testing.assert_allclose(prior.log_prob(shuffled), expected, rtol=2e-6)
        # The reference itself does not depend on the order either.
        other = sequential_log_prob(shuffled, concentration, discount)
        assert other == pytest.approx(expected)


@quick
@pytest.mark.parametrize("concentration, discount", [(1.0, 0.0), (-0.2, 0.5)])
@pytest.mark.parametrize(
    "names",
    [
        np.array([3, 2, 1, 0], np.int32),
        np.array([0, 5, 17, 99], np.int32),
        np.array([2**31 - 1, 0, 2**30, 7], np.int32),
        np.array([255, 0, 254, 1], np.uint8),
        np.array([2**31, 2**32 - 1, 0, 5], np.uint32),
        np.array([2**40, 2**40 + 2**32, 2**33, 0], np.int64),
    ],
    ids=["permuted", "gaps", "int32_max", "uint8", "uint32", "int64"],
)
def test_log_prob_does_not_depend_on_the_names(concentration, discount, names):
    labels = np.array([0, 1, 0, 2, 2, 0, 3, 1])
    prior = PitmanYorProcess(concentration, discount, 8)
    expected = sequential_log_prob(labels, concentration, discount)
    np.testing.assert_allclose(prior.log_prob(names[labels]), expected, rtol=2e-6)


@quick
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_unassigned_rows_are_left_out(dtype):
    labels = np.array([-1, 4, 4, -1, 0, 4, -1, 0, 9], dtype)
    prior = PitmanYorProcess(0.3, 0.25, 9)
    smaller = PitmanYorProcess(0.3, 0.25, 6)
    expected = sequential_log_prob(labels, 0.3, 0.25)
    np.testing.assert_allclose(prior.log_prob(labels), expected, rtol=2e-6)
    np.testing.assert_allclose(
        smaller.log_prob(labels[labels >= 0]), expected, rtol=2e-6
    )


@quick
def test_unassigned_rows_are_left_out_beside_64_bit_labels():
    labels = np.array([-1, 2**40, 2**40, -1, 2**41, 7])
    np.testing.assert_allclose(
        PitmanYorProcess(0.3, 0.25, 6).log_prob(labels),
        sequential_log_prob(labels, 0.3, 0.25),
        rtol=2e-6,
    )


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_no_rows_and_one_row_are_certain(concentration, discount):
    prior = PitmanYorProcess(concentration, discount, 3)
    assert prior.log_prob(np.array([-1, -1, -1])) == 0.0
    assert prior.log_prob(np.array([-1, 5, -1])) == 0.0
    assert prior.log_eppf(np.zeros(4, int)) == 0.0
    assert prior.log_eppf(np.zeros(0, int)) == 0.0
    assert prior.log_eppf(np.array([0, 1, 0])) == 0.0


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_log_eppf_of_counts_equals_log_prob_of_labels(concentration, discount):
    labels = random.randint(random.key(1), (6, 300), 0, 40)
    counts = jax.vmap(lambda row: jnp.bincount(row, length=64))(labels)
    prior = PitmanYorProcess(concentration, discount, 300)
    expected = prior.log_prob(labels)
    np.testing.assert_allclose(prior.log_eppf(counts), expected, rtol=2e-6)
    np.testing.assert_allclose(prior.log_eppf(counts.T, axis=0), expected, rtol=2e-6)


@pytest.mark.parametrize("concentration", [0.01, 1.0, 30.0])
def test_zero_discount_is_the_ewens_formula(concentration):
    gammaln = scipy.special.gammaln
    labels = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
    counts = np.array([3, 2, 1, 4])
    ewens = len(counts) * math.log(concentration) + gammaln(counts).sum()
    ewens += gammaln(concentration) - gammaln(concentration + counts.sum())
    with jax.enable_x64(True):
        crp = ChineseRestaurantProcess(concentration, 10)
        py = PitmanYorProcess(concentration, 0.0, 10)
        for prior in (crp, py):
            np.testing.assert_allclose(prior.log_prob(labels), ewens, rtol=1e-13)
            np.testing.assert_allclose(prior.log_eppf(counts), ewens, rtol=1e-13)
        assert crp.log_prob(labels) == py.log_prob(labels)


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_weights_are_ratios_of_probabilities(concentration, discount):
    prior = PitmanYorProcess(concentration, discount, 12)
    counts = np.array([4, 0, 1, 6, 0])
    log_weights = np.append(
        prior.log_weight_existing(counts), prior.log_weight_new(3, counts.sum())
    )
    # Adding the row to each slot; the empty slot 1 stands for a new cluster.
    joined = np.array([counts + row for row in np.eye(5, dtype=int)])
    ratios = np.asarray(prior.log_eppf(joined) - prior.log_eppf(counts), np.float64)
    weights = np.exp(log_weights.astype(np.float64))
    weights /= weights.sum()
    np.testing.assert_allclose(
        weights[[0, 2, 3, 5]], np.exp(ratios[[0, 2, 3, 1]]), 1e-5
    )
    assert weights[1] == weights[4] == 0.0


@quick
def test_weights_of_the_two_classes_agree_at_zero_discount():
    counts = np.array([3, 0, 1])
    crp, py = ChineseRestaurantProcess(0.3, 5), PitmanYorProcess(0.3, 0.0, 5)
    np.testing.assert_array_equal(
        crp.log_weight_existing(counts), py.log_weight_existing(counts)
    )
    assert crp.log_weight_new(2, 4) == py.log_weight_new(2, 4)
    np.testing.assert_allclose(crp.log_weight_new(2, 4), math.log(0.3), rtol=1e-6)
    np.testing.assert_array_equal(crp.log_eppf(counts), py.log_eppf(counts))


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_weight_of_the_first_cluster_is_one(concentration, discount):
    prior = PitmanYorProcess(concentration, discount, 4)
    assert prior.log_weight_new(0, 0) == 0.0
    assert not np.isnan(prior.log_weight_existing(np.zeros(3, int))).any()


@quick
def test_weights_and_eppf_broadcast_batches_of_parameters():
    concentration = np.array([0.5, 1.0, 2.0])
    discount = np.array([[0.0], [0.4]])
    prior = PitmanYorProcess(concentration, discount, 9)
    assert prior.batch_shape == (2, 3)
    counts = np.array([5, 0, 3, 1])
    existing = prior.log_weight_existing(counts)
    new = prior.log_weight_new(np.array([[2], [3]]), 9)
    eppf = prior.log_eppf(np.broadcast_to(counts[:, None], (2, 4, 3)), axis=1)
    assert existing.shape == (2, 3, 4) and new.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        one = PitmanYorProcess(concentration[j], discount[i, 0], 9)
        np.testing.assert_allclose(existing[i, j], one.log_weight_existing(counts))
        np.testing.assert_allclose(new[i, j], one.log_weight_new(2 + i, 9), rtol=1e-6)
        np.testing.assert_allclose(eppf[i, j], one.log_eppf(counts), rtol=1e-6)


LARGE_COUNTS = {
    "one_cluster": [10**6],
    "one_large_many_single": [10**6 - 1000] + [1] * 1000,
    "ten_equal": [10**5] * 10,
    "powers": [2**k for k in range(20)],
    "single": [1] * 1000,
    "pairs": [2] * 20000,
}


@pytest.mark.parametrize("counts", LARGE_COUNTS.values(), ids=LARGE_COUNTS.keys())
@pytest.mark.parametrize(
    "concentration, discount",
    [(1.0, 0.0), (1e6, 0.0), (1e-4, 0.0), (0.7, 1e-6), (-0.49, 0.5), (1e3, 0.95)],
)
def test_float32_keeps_its_accuracy_at_large_counts(counts, concentration, discount):
    # What the float32 parameters stand for, in float64.
    concentration = float(np.float32(concentration))
    discount = float(np.float32(discount))
    expected = product_log_eppf(counts, concentration, discount)
    prior = PitmanYorProcess(concentration, discount, sum(counts))
    labels = np.repeat(np.arange(len(counts)), counts)
    # Near the lower end, concentration + discount itself is rounded.
    tolerance = 1e-6 * abs(expected) + 1e-5
    assert abs(prior.log_eppf(np.array(counts)) - expected) < tolerance
    assert abs(prior.log_prob(labels) - expected) < tolerance


def test_float64_log_eppf_is_exact_to_rounding():
    with jax.enable_x64(True):
        for counts in ([7, 1, 12, 9, 10, 30], [1000, 500, 3], [1] * 20):
            for concentration, discount in PARAMETERS:
                prior = PitmanYorProcess(concentration, discount, sum(counts))
                expected = product_log_eppf(counts, concentration, discount)
                actual = prior.log_eppf(np.array(counts))
                np.testing.assert_allclose(actual, expected, rtol=1e-12)


# Gradients.


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_gradients_equal_finite_differences(concentration, discount):
    labels = np.array([0, 0, 0, 1, 2, 2, -1, 5, 5, 5, 5])
    counts = np.array([3, 1, 2, 0, 4])
    # One-sided in the discount where zero is its end, central elsewhere.
    eps = 1e-7
    with jax.enable_x64(True):

        def log_probs(c, d):
            prior = PitmanYorProcess(c, d, 11, validate_args=False)
            return jnp.stack([prior.log_prob(labels), prior.log_eppf(counts)])

        by_c, by_d = jax.jacrev(log_probs, argnums=(0, 1))(concentration, discount)
        c_hi, c_lo = concentration + eps, concentration - eps
        d_hi, d_lo = discount + eps, max(discount - eps, 0.0)
        expected_c = log_probs(c_hi, discount) - log_probs(c_lo, discount)
        expected_d = log_probs(concentration, d_hi) - log_probs(concentration, d_lo)
        np.testing.assert_allclose(by_c, expected_c / (2 * eps), rtol=1e-4)
        np.testing.assert_allclose(by_d, expected_d / (d_hi - d_lo), rtol=1e-4)


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_gradients_are_finite_in_float32(concentration, discount):
    labels = np.array([0, 0, 0, 1, 2, 2, -1, 5, 5, 5, 5])

    def log_probs(c, d):
        prior = PitmanYorProcess(c, d, 11)
        counts = np.array([3, 1, 0, 2, 4])
        return (
            prior.log_prob(labels)
            + prior.log_eppf(counts)
            + prior.log_eppf(np.zeros(5, int))
            + prior.log_prob(np.full(11, -1))
            + prior.log_weight_existing(counts)[counts > 0].sum()
            + prior.log_weight_new(4, 10)
            + prior.log_weight_new(0, 0)
        )

    gradients = jax.grad(log_probs, argnums=(0, 1))(concentration, discount)
    assert np.isfinite(gradients).all()


@quick
def test_crp_gradient_equals_finite_difference():
    labels = np.array([0, 0, 1, 2, 2])
    with jax.enable_x64(True):

        def log_prob(c):
            return ChineseRestaurantProcess(c, 5).log_prob(labels)

        expected = (log_prob(0.7 + 1e-6) - log_prob(0.7 - 1e-6)) / 2e-6
        np.testing.assert_allclose(jax.grad(log_prob)(0.7), expected, rtol=1e-6)


# Sampling.


def chi_square_p_value(prior, num_draws, key):
    """Frequencies of all partitions against their enumerated probabilities."""
    draws = np.asarray(prior.sample(key, (num_draws,)))
    partitions = set_partitions(prior.size)
    code = (prior.size + 1) ** np.arange(prior.size)
    place = {c: i for i, c in enumerate(partitions @ code)}
    observed = np.zeros(len(partitions))
    for c, n in zip(*np.unique(draws @ code, return_counts=True), strict=True):
        observed[place[c]] += n
    concentration = float(prior.concentration)
    discount = float(getattr(prior, "discount", 0.0))
    expected = num_draws * np.exp(
        [sequential_log_prob(p, concentration, discount) for p in partitions]
    )
    # Cells that expect fewer than ten draws are pooled, as the law is asymptotic.
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 10:
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    return scipy.stats.chisquare(observed, expected).pvalue


# False-alarm rate 1e-4 for each pair of parameters, 1e-3 for the ten.
@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_sampled_partitions_have_their_probabilities(concentration, discount):
    prior = PitmanYorProcess(concentration, discount, 5)
    assert chi_square_p_value(prior, 40_000, random.key(5)) > 1e-4


# False-alarm rate 1e-4 each.
@quick
@pytest.mark.parametrize("concentration", [0.3, 1.0, 4.0])
def test_crp_sampled_partitions_have_their_probabilities(concentration):
    prior = ChineseRestaurantProcess(concentration, 5)
    assert chi_square_p_value(prior, 40_000, random.key(6)) > 1e-4


# Binomial counts with z < 4.5: false-alarm rate 7e-6 for each pair of rows, 1e-4 for
# all fifteen.
@pytest.mark.parametrize(
    "concentration, discount", [(1.0, 0.0), (0.5, 0.6), (-0.3, 0.4)]
)
def test_sampled_rows_are_exchangeable(concentration, discount):
    num_draws = 20_000
    prior = PitmanYorProcess(concentration, discount, 200)
    draws = np.asarray(prior.sample(random.key(7), (num_draws,)))
    together = (1 - discount) / (1 + concentration)
    deviation = math.sqrt(together * (1 - together) / num_draws)
    for i, j in [(0, 1), (1, 2), (0, 199), (99, 100), (198, 199)]:
        frequency = (draws[:, i] == draws[:, j]).mean()
        assert abs(frequency - together) / deviation < 4.5, (i, j, frequency)


# A mean of 2000 draws with z < 4.5: false-alarm rate 7e-6 each.
@pytest.mark.parametrize("concentration, discount", PARAMETERS[::2])
def test_mean_number_of_clusters_is_exact_at_a_thousand_rows(concentration, discount):
    prior = PitmanYorProcess(concentration, discount, 1000)
    found = num_clusters(prior.sample(random.key(8), (2000,)))
    expected = exact_mean_clusters(1000, concentration, discount)
    deviation = found.std(ddof=1) / math.sqrt(len(found))
    assert abs(found.mean() - expected) < 4.5 * deviation, (found.mean(), expected)


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_sampled_labels_are_in_order_of_first_appearance(concentration, discount):
    prior = PitmanYorProcess(concentration, discount, 50)
    for labels in np.asarray(prior.sample(random.key(9), (20,))):
        np.testing.assert_array_equal(labels, first_appearance(labels))


# The number of clusters within five deviations and one: false-alarm rate about 1e-6
# each, by the normal limit of the number of clusters.
@pytest.mark.parametrize("concentration", [1.0, 100.0])
def test_a_million_rows_are_sampled_in_bounded_time(concentration):
    prior = ChineseRestaurantProcess(concentration, 10**6)
    prior.sample(random.key(0)).block_until_ready()
    start = time.perf_counter()
    labels = prior.sample(random.key(10)).block_until_ready()
    assert time.perf_counter() - start < 5.0  # 0.1 s on the two cores it was written on
    p = concentration / (concentration + np.arange(10**6))
    assert abs(num_clusters(labels) - p.sum()) < 5 * math.sqrt((p * (1 - p)).sum()) + 1


# The normal limit with z < 5: false-alarm rate 6e-7.
def test_picked_rows_do_not_lie_on_a_float32_grid_at_a_million_rows():
    # Were rows picked by floor(i * uniform) in float32, then row i would pick row j for
    # a share of the uniforms k / 2**23, say 8 or 9 of them where 8.4 is fair, and the
    # shares of the rows that were picked would be above one on average.
    labels = np.asarray(ChineseRestaurantProcess(1e6, 10**6).sample(random.key(11)))
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    starts = starts[np.diff(starts, append=len(labels)) > 1]
    # The second row of a cluster has picked the first one.
    picked, picker = order[starts], order[starts + 1]
    picked, picker = picked[picker >= 2**19], picker[picker >= 2**19]
    # All k that may lead from the one to the other, two to spare at either end.
    k = (picked * 2**23 // picker)[:, None] + np.arange(-2, 20)
    uniforms = (k / 2**23).astype(np.float32)
    hits = np.floor(uniforms * picker[:, None].astype(np.float32)) == picked[:, None]
    share = hits.sum(1) * picker / 2**23
    z = (share.mean() - 1) / (share.std(ddof=1) / math.sqrt(len(share)))
    assert abs(z) < 5, (z, share.mean(), len(share))


# False-alarm rate 3e-4: 24 draws, each with a second cluster with probability 1.4e-5.
def test_a_tiny_concentration_opens_no_clusters_at_a_million_rows():
    # Row i opens one with probability 1e-6 / i. Coins of 23 bits cannot be that rare:
    # they would open 0.1 clusters in each draw.
    prior = ChineseRestaurantProcess(1e-6, 10**6)
    assert all(prior.sample(key).max() == 0 for key in random.split(random.key(12), 24))


@quick
def test_same_key_same_draw_and_other_key_other_draw():
    prior = PitmanYorProcess(1.0, 0.5, 100)
    draw = prior.sample(random.key(0))
    np.testing.assert_array_equal(draw, prior.sample(random.key(0)))
    assert (draw != prior.sample(random.key(1))).any()


@quick
def test_crp_draws_as_pitman_yor_of_zero_discount():
    np.testing.assert_array_equal(
        ChineseRestaurantProcess(2.0, 100).sample(random.key(0), (3,)),
        PitmanYorProcess(2.0, 0.0, 100).sample(random.key(0), (3,)),
    )


@quick
@pytest.mark.parametrize("make_key", [random.key, random.PRNGKey])
def test_both_kinds_of_keys_work(make_key):
    labels = PitmanYorProcess(1.0, 0.5, 20).sample(make_key(0))
    np.testing.assert_array_equal(labels, first_appearance(np.asarray(labels)))


@quick
def test_no_key_is_used_twice():
    with jax.debug_key_reuse(True):
        key_1, key_2, key_3 = random.split(random.key(0), 3)
        prior = PitmanYorProcess(1.0, 0.5, 20)
        prior.sample(key_1, (2,))
        jax.jit(prior.sample)(key_2)
        ChineseRestaurantProcess(1.0, 20).expand((3,)).sample(key_3)


@quick
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_with_and_without_x64(x64):
    with jax.enable_x64(x64):
        float_type = jnp.float64 if x64 else jnp.float32
        for prior in (PitmanYorProcess(1, 0.5, 6), ChineseRestaurantProcess(1, 6)):

            def traced(method, *args, prior=prior):
                return jax.eval_shape(lambda: getattr(prior, method)(*args)).dtype

            # (Other tests run, with x64 and without, what is traced here.)
            counts = np.array([2, 3])
            assert traced("sample", random.key(0), (2,)) == jnp.int32
            assert traced("log_prob", np.array([0, 0, 1, 1, 1, 1])) == float_type
            assert traced("log_eppf", counts) == float_type
            assert traced("log_weight_existing", counts) == float_type
            assert traced("log_weight_new", 2, 5) == float_type


@quick
def test_draws_do_not_depend_on_x64():
    prior = PitmanYorProcess(0.5, 0.25, 200)
    draw = prior.sample(random.key(0), (4,))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(draw, prior.sample(random.key(0), (4,)))


# Shapes and transformations.


@quick
def test_parameters_broadcast_to_the_batch_shape():
    prior = PitmanYorProcess(np.array([0.5, 1.0, 2.0]), np.array([[0.0], [0.4]]), 7)
    assert prior.batch_shape == (2, 3)
    assert prior.event_shape == (7,)
    assert prior.size == 7
    assert prior.sample(random.key(0)).shape == (2, 3, 7)
    labels = prior.sample(random.key(0), (5, 4))
    assert labels.shape == (5, 4, 2, 3, 7)
    assert prior.sample(random.key(0), (0,)).shape == (0, 2, 3, 7)
    log_prob = prior.log_prob(labels)
    assert log_prob.shape == (5, 4, 2, 3)
    for index in [(0, 0, 0, 0), (4, 3, 1, 2), (1, 2, 0, 1)]:
        c, d = prior.concentration[0, index[3]], prior.discount[index[2], 0]
        expected = sequential_log_prob(np.asarray(labels[index]), c, d)
        np.testing.assert_allclose(log_prob[index], expected, rtol=2e-6, atol=1e-6)


@quick
def test_value_broadcasts_against_parameters():
    labels = np.array([0, 0, 1, 2])
    prior = PitmanYorProcess(np.array([0.5, 1.0, 2.0]), 0.1, 4)
    for shape in [(4,), (1, 4), (3, 4), (5, 1, 4)]:
        log_prob = prior.log_prob(np.broadcast_to(labels, shape))
        expected_shape = np.broadcast_shapes(shape[:-1], (3,))
        assert log_prob.shape == expected_shape
        expected = [sequential_log_prob(labels, c, 0.1) for c in (0.5, 1.0, 2.0)]
        expected = np.broadcast_to(expected, expected_shape)
        np.testing.assert_allclose(log_prob, expected, rtol=2e-6)
    scalar = PitmanYorProcess(0.5, 0.1, 4)
    assert scalar.log_prob(np.broadcast_to(labels, (2, 3, 4))).shape == (2, 3)


# Two binomial counts with z < 4.5: false-alarm rate 1.4e-5.
@quick
def test_batch_elements_are_drawn_with_their_own_parameters():
    prior = PitmanYorProcess(np.array([0.2, -0.3]), np.array([0.0, 0.8]), 2)
    draws = np.asarray(prior.sample(random.key(3), (20_000,)))
    together = (draws[..., 0] == draws[..., 1]).mean(0)
    expected = np.array([1 / 1.2, 0.2 / 0.7])
    deviation = np.sqrt(expected * (1 - expected) / 20_000)
    assert (abs(together - expected) < 4.5 * deviation).all(), (together, expected)


@quick
def test_expand_draws_independent_partitions():
    prior = PitmanYorProcess(1.0, 0.5, 30).expand((4, 3))
    labels = np.asarray(prior.sample(random.key(0), (2,)))
    assert labels.shape == (2, 4, 3, 30)
    assert len(np.unique(labels.reshape(-1, 30), axis=0)) == 24
    assert prior.log_prob(labels).shape == (2, 4, 3)


@quick
def test_jit_and_vmap_change_nothing():
    def draw(key, c, d):
        prior = PitmanYorProcess(c, d, 25)
        labels = prior.sample(key)
        counts = jnp.bincount(labels, length=25)
        return labels, prior.log_prob(labels), prior.log_eppf(counts)

    keys = random.split(random.key(0), 3)
    c, d = jnp.array([0.5, 1.0, -0.2]), jnp.array([0.0, 0.4, 0.3])
    batched = jax.jit(jax.vmap(draw))(keys, c, d)
    assert batched[0].dtype == jnp.int32
    for i in range(3):
        labels, log_prob, log_eppf = draw(keys[i], c[i], d[i])
        np.testing.assert_array_equal(batched[0][i], labels)
        np.testing.assert_allclose(batched[1][i], log_prob, rtol=1e-6)
        np.testing.assert_allclose(batched[2][i], log_eppf, rtol=2e-6)


@quick
@pytest.mark.parametrize(
    "prior",
    [
        PitmanYorProcess(0.5, 0.25, 6),
        PitmanYorProcess(np.array([0.5, 1.0]), 0.25, 6),
        ChineseRestaurantProcess(2.0, 6),
        ChineseRestaurantProcess(np.array([0.5, 1.0]), 6),
    ],
    ids=["py", "py_batch", "crp", "crp_batch"],
)
def test_priors_survive_flattening_pickling_and_jit(prior):
    leaves, treedef = jax.tree.flatten(prior)
    assert len(leaves) == len(prior.arg_constraints)
    restored = [
        jax.tree.unflatten(treedef, leaves),
        pickle.loads(pickle.dumps(prior)),
        jax.jit(lambda p: p)(prior),
    ]
    labels = prior.sample(random.key(0))
    for other in restored:
        assert type(other) is type(prior)
        assert other.size == 6 and other.batch_shape == prior.batch_shape
        np.testing.assert_array_equal(other.sample(random.key(0)), labels)
        np.testing.assert_array_equal(other.log_prob(labels), prior.log_prob(labels))
    doubled = jax.tree.map(lambda x: 2 * x, prior)
    np.testing.assert_array_equal(doubled.concentration, 2 * prior.concentration)
    # Placeholders, as JAX passes them, are not looked at.
    jax.tree.unflatten(treedef, [object()] * len(leaves))


@pytest.mark.parametrize(
    "cls",
    [
        ChineseRestaurantProcess,
        PitmanYorProcess,
        FiniteDirichletMixture,
        MixtureOfFiniteMixtures,
        Grid,
    ],
)
def test_leaves_are_in_the_same_order_in_every_process(cls, monkeypatch):
    # NumPyro's are in that of a set of strings: then a compiled program with them as
    # arguments is not found in the cache that processes share.
    fields = set(cls.gather_pytree_data_fields())
    for descending in (False, True):
        own = tuple(sorted(fields, reverse=descending))
        monkeypatch.setattr(
            dist.Distribution,
            "gather_pytree_data_fields",
            classmethod(lambda cls, own=own: own),
        )
        assert cls.gather_pytree_data_fields() == tuple(sorted(fields))


@quick
def test_vmap_over_a_prior_as_a_pytree():
    prior = PitmanYorProcess(jnp.array([0.5, 1.0]), jnp.array([0.1, 0.2]), 4)
    labels = jnp.array([0, 1, 1, 0])
    log_prob = jax.vmap(lambda p: p.log_prob(labels))(prior)
    np.testing.assert_allclose(log_prob, prior.log_prob(labels), rtol=1e-6)


# As a site of a NumPyro model.


def mixture(x):
    concentration = numpyro.sample("concentration", dist.Gamma(1.0, 1.0))
    z = numpyro.sample("z", PitmanYorProcess(concentration, 0.1, size=x.shape[0]))
    with numpyro.plate("clusters", 8):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


@quick
def test_model_traces_and_predicts():
    x = jnp.zeros(6)
    trace = handlers.trace(handlers.seed(mixture, random.key(0))).get_trace(x)
    site = trace["z"]
    assert site["value"].shape == (6,)
    assert jnp.isfinite(site["fn"].log_prob(site["value"]))
    draws = Predictive(mixture, num_samples=5)(random.key(1), x)
    assert draws["z"].shape == (5, 6) and draws["z"].dtype == jnp.int32


@quick
def test_substituted_labels_are_scored():
    z = jnp.array([3, 3, 0, -1, 0, 0])
    model = handlers.substitute(mixture, {"z": z, "concentration": jnp.array(0.5)})
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(jnp.zeros(6))
    log_prob = trace["z"]["fn"].log_prob(trace["z"]["value"])
    expected = sequential_log_prob(np.asarray(z), 0.5, 0.1)
    np.testing.assert_allclose(log_prob, expected, rtol=2e-6)


@quick
def test_plate_of_partitions():
    def model():
        with numpyro.plate("views", 3):
            return numpyro.sample("z", ChineseRestaurantProcess(1.0, 5))

    trace = handlers.trace(handlers.seed(model, random.key(0))).get_trace()
    assert trace["z"]["value"].shape == (3, 5)
    assert trace["z"]["fn"].log_prob(trace["z"]["value"]).shape == (3,)


@quick
def test_dependencies_of_a_model_are_found():
    dependencies = get_dependencies(mixture, (jnp.zeros(6),))["prior_dependencies"]
    assert set(dependencies["z"]) == {"z", "concentration"}
    assert set(dependencies["x"]) == {"x", "z", "loc"}
    relations = get_model_relations(mixture, (jnp.zeros(6),))
    assert relations["sample_dist"]["z"] == "PitmanYorProcess"


@quick
def test_support_is_integer_vectors_with_minus_one_for_unassigned():
    prior = PitmanYorProcess(1.0, 0.1, 3)
    assert prior.is_discrete
    assert prior.support.is_discrete and prior.support.event_dim == 1
    assert "integer" in repr(prior.support).lower()
    values = np.array([[0, 1, -1], [0, 99, 5], [0, -2, 1]])
    np.testing.assert_array_equal(prior.support(values), [True, True, False])
    assert not prior.support(np.array([0.5, 0.0, 1.0]))
    assert not prior.has_enumerate_support and not prior.has_rsample


@quick
def test_values_out_of_support_are_warned_about_under_validation():
    prior = PitmanYorProcess(1.0, 0.1, 3, validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support"):
        log_prob = prior.log_prob(np.array([[0, 1, 1], [0, -2, 1]]))
    assert np.isfinite(log_prob[0]) and log_prob[1] == -np.inf


# Bad input.


@pytest.mark.parametrize(
    "size", [-3, 2.0, 2.5, True, np.True_, None, "4", jnp.array(3), 2**31]
)
@pytest.mark.parametrize("validate_args", [None, False, True])
def test_bad_size_is_refused_always(size, validate_args):
    for make in (
        lambda: PitmanYorProcess(1.0, 0.1, size, validate_args=validate_args),
        lambda: ChineseRestaurantProcess(1.0, size, validate_args=validate_args),
    ):
        with pytest.raises(ValueError, match="`size`") as error:
            make()
        assert f"got {size!r};" in str(error.value)


@pytest.mark.parametrize("size", [1, np.int32(4), np.uint8(4), np.int64(4)])
def test_integer_sizes_are_taken(size):
    prior = ChineseRestaurantProcess(1.0, size)
    assert type(prior.size) is int and prior.size == size


BAD_PITMAN_YOR = [
    (-0.3, 0.2, "concentration", "-0.3"),
    (-0.25, 0.25, "concentration", "-0.25"),
    (0.0, 0.0, "concentration", "0"),
    (np.nan, 0.2, "concentration", "nan"),
    (np.inf, 0.2, "concentration", "inf"),
    (np.array([1.0, -0.5, 2.0]), 0.2, "concentration", r"-0.5 at index \(1,\)"),
    (1.0, 1.0, "discount", "1"),
    (1.0, -0.125, "discount", "-0.125"),
    (1.0, np.nan, "discount", "nan"),
    (1.0, np.array([[0.1], [1.5]]), "discount", r"1.5 at index \(1, 0\)"),
    (1.0, np.inf, "discount", "inf"),
]


@quick
@pytest.mark.parametrize("concentration, discount, name, value", BAD_PITMAN_YOR)
def test_bad_pitman_yor_parameters_are_named(concentration, discount, name, value):
    match = f"PitmanYorProcess: `{name}` .* got {value};"
    with pytest.raises(ValueError, match=match):
        PitmanYorProcess(concentration, discount, 4, validate_args=True)
    prior = PitmanYorProcess(concentration, discount, 4, validate_args=False)
    with pytest.raises(ValueError, match=match):
        prior.validate_args()
    assert f"`{name}`" in prior.parameter_error()


@pytest.mark.parametrize(
    "value",
    [None, "1.0", dist.Gamma(1.0, 1.0)],
    ids=["None", "a string", "a distribution"],
)
def test_parameters_that_are_no_numbers_are_named(value):
    extra = dist.Poisson(1.0)
    for make, name in (
        (lambda: ChineseRestaurantProcess(value, 4), "concentration"),
        (lambda: PitmanYorProcess(value, 0.1, 4), "concentration"),
        (lambda: PitmanYorProcess(1.0, value, 4), "discount"),
        (lambda: FiniteDirichletMixture(value, 3, 4), "concentration"),
        (lambda: MixtureOfFiniteMixtures(value, extra, 4), "concentration"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be a number"):
            make()


@quick
@pytest.mark.parametrize("value", [0.0, -1.5, np.nan, np.inf])
def test_bad_crp_concentration_is_named(value):
    match = f"ChineseRestaurantProcess: `concentration` .* got {value:g};"
    with pytest.raises(ValueError, match=match):
        ChineseRestaurantProcess(value, 4, validate_args=True)
    prior = ChineseRestaurantProcess(value, 4, validate_args=False)
    assert "`concentration`" in prior.parameter_error()


@quick
def test_validation_follows_numpyro():
    with (
        numpyro.validation_enabled(True),
        pytest.raises(ValueError, match="`discount`"),
    ):
        PitmanYorProcess(1.0, 2.0, 4)
    with numpyro.validation_enabled(False):
        assert PitmanYorProcess(1.0, 2.0, 4).parameter_error() is not None


@quick
@pytest.mark.parametrize("concentration, discount", PARAMETERS)
def test_good_parameters_have_no_error(concentration, discount):
    for array in (float, np.float64, jnp.asarray, lambda x: jnp.full((2, 3), x)):
        prior = PitmanYorProcess(array(concentration), array(discount), 4)
        assert prior.parameter_error() is None


@quick
def test_traced_parameters_pass_and_concrete_ones_beside_them_do_not():
    @jax.jit
    def good(c, d):
        prior = PitmanYorProcess(c, d, 4, validate_args=True)
        assert prior.parameter_error() is None
        with pytest.raises(RuntimeError, match="jitted"):
            prior.validate_args()
        return prior.log_prob(jnp.array([0, 0, 1, 1]))

    good(1.0, 0.1)
    with pytest.raises(ValueError, match="`discount`"):
        jax.jit(
            lambda c: PitmanYorProcess(c, 2.0, 4, validate_args=True).concentration
        )(1.0)
    with pytest.raises(ValueError, match="`concentration` .* greater than -1, got -1"):
        jax.jit(lambda d: PitmanYorProcess(-1.0, d, 4, validate_args=True).discount)(
            0.1
        )


@quick
def test_value_of_another_length_is_refused():
    prior = ChineseRestaurantProcess(1.0, 4)
    for value in (np.zeros(3, int), np.zeros((4, 5), int), np.array(0)):
        with pytest.raises(ValueError, match="4") as error:
            prior.log_prob(value)
        assert "ChineseRestaurantProcess" in str(error.value)


# The interface.


def test_abstract_base_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        PartitionDistribution(4)


@quick
def test_a_prior_can_be_written_outside_the_package():
    class FixedNumber(PartitionDistribution):
        """Ten boxes with symmetric Dirichlet weights: Gibbs type, discount -1."""

        arg_constraints = {"boxes": constraints.positive}

        def __init__(self, boxes, size, *, validate_args=None):
            self.boxes = boxes
            super().__init__(size, jnp.shape(boxes), validate_args=validate_args)

        def parameter_error(self):
            return None if self.boxes > 0 else f"`boxes` got {self.boxes}"

        def log_weight_existing(self, counts):
            return jnp.where(counts > 0, jnp.log(counts + 1.0), -jnp.inf)

        def log_weight_new(self, num_clusters, num_rows):
            return jnp.log(self.boxes - num_clusters)

        def log_eppf(self, counts, axis=-1):
            raise NotImplementedError

        def log_prob(self, value):
            raise NotImplementedError

    prior = FixedNumber(10.0, 4)
    assert prior.event_shape == (4,) and prior.size == 4
    assert jax.tree.leaves(prior) == [10.0]
    with pytest.raises(ValueError, match="`boxes` got 0"):
        FixedNumber(0.0, 4, validate_args=True)


@quick
def test_a_table_without_rows_has_one_partition():
    prior = PitmanYorProcess(1.0, 0.5, 0)
    draw = prior.sample(random.key(0), (3,))
    assert draw.shape == (3, 0)
    assert float(prior.log_prob(draw[0])) == 0.0


@pytest.mark.parametrize("x64", [False, True])
def test_impossible_parameters_have_no_probability(x64):
    counts, labels = np.array([3, 2, 0, 5]), np.array([0, 0, 1, 1, 2, -1])
    with jax.enable_x64(x64):

        def both(prior):
            size = {"size": len(labels), "validate_args": False}
            fn = prior(**size)
            return np.array([fn.log_eppf(counts), fn.log_prob(labels)])

        crp, pyp = ChineseRestaurantProcess, PitmanYorProcess
        # At the edge of what is possible all rows are together.
        assert (both(partial(crp, 0.0)) == -np.inf).all()
        assert (both(partial(pyp, -0.5, 0.5)) == -np.inf).all()
        # Below -2 all factors are negative.
        for concentration, discount in [
            (-0.6, 0.5), (-1.2, 0.5), (-0.2, 0.0), (-2.5, 0.5), (-7.0, 0.1),
        ]:  # fmt: skip
            assert np.isnan(both(partial(pyp, concentration, discount))).all()
            alone = pyp(concentration, discount, size=4, validate_args=False)
            assert np.isnan(alone.log_eppf(np.array([4])))
            assert np.isnan(alone.log_prob(np.zeros(4, int)))
