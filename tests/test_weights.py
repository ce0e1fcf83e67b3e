# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Laws of labels whose mixture weights are integrated out.

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
import scipy.stats

from numpyro_subanneal import testing
from numpyro_subanneal.weights import (
    DirichletWeights,
    KnownWeights,
    LabelledPrior,
    StickBreakingWeights,
)

# Compiling is most of the time here. Not so quickly where the last digits (of large
# counts, and in float64) or time are tested.
quick = pytest.mark.quickly_compiled

DIRICHLET = [[0.5], [1.0, 1.0], [0.25, 3.0, 1.0], [0.0625, 0.5, 8.0]]
STICKS = [
    ([], []),
    ([1.0], [2.0]),
    ([1.0, 1.0], [0.5, 0.5]),
    ([0.25, 4.0], [3.0, 0.125]),
]
KNOWN = [[1.0], [0.5, 0.5], [0.125, 0.625, 0.25], [0.25, 0.0, 0.75]]


def priors(size):
    for a in DIRICHLET:
        yield DirichletWeights(jnp.array(a), size)
    for a, b in STICKS:
        yield StickBreakingWeights(jnp.array(a, float), jnp.array(b, float), size)
    for w in KNOWN:
        with np.errstate(divide="ignore"):
            yield KnownWeights(jnp.asarray(np.log(w), jnp.float32), size)


NUM_PRIORS = len(DIRICHLET) + len(STICKS) + len(KNOWN)


# As the kernel does, in one program each: one operation after the other, they would be
# a program for each operation and shape.
log_prob_of = jax.jit(lambda prior, counts: prior.log_prob(counts))
log_weights_of = jax.jit(lambda prior, counts: prior.log_weights(counts))


def nth_prior(i, size):
    return next(itertools.islice(priors(size), i, None))


def predictive(i, counts):
    """Of the next row, in exact arithmetic."""
    counts = [int(n) for n in counts]
    if i < len(DIRICHLET):
        a = [Fraction(x) for x in DIRICHLET[i]]
        return [
            (x + n) / (sum(a) + sum(counts)) for x, n in zip(a, counts, strict=True)
        ]
    i -= len(DIRICHLET)
    if i < len(STICKS):
        left, out = Fraction(1), []
        for k, (a, b) in enumerate(zip(*STICKS[i], strict=True)):
            a, b = Fraction(a) + counts[k], Fraction(b) + sum(counts[k + 1 :])
            out.append(left * a / (a + b))
            left *= b / (a + b)
        return [*out, left]
    return [Fraction(w) for w in KNOWN[i - len(STICKS)]]


def exact_probability(i, labels, num_components):
    counts, total = [0] * num_components, Fraction(1)
    for k in labels:
        total *= predictive(i, counts)[k]
        counts[k] += 1
    return total


def all_labels(num_components, num_rows):
    return np.array(list(itertools.product(range(num_components), repeat=num_rows)))


def counts_of(labels, num_components):
    return (np.asarray(labels)[..., None] == np.arange(num_components)).sum(-2)


# The probability function and the predictive.


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_probabilities_of_all_labels_are_right_and_sum_to_one(i):
    for num_rows in (1, 5):
        prior = nth_prior(i, num_rows)
        labels = all_labels(prior.num_components, num_rows)
        expected = [exact_probability(i, z, prior.num_components) for z in labels]
        assert sum(expected) == 1
        log_prob = log_prob_of(prior, counts_of(labels, prior.num_components))
        assert log_prob.shape == (len(labels),)
        actual = np.exp(np.asarray(log_prob, np.float64))
        assert actual.sum() == pytest.approx(1.0, abs=2e-6)
        np.testing.assert_allclose(actual, np.array(expected, float), rtol=1e-5)


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_weights_are_the_predictive_probabilities(i):
    prior = nth_prior(i, 30)
    k = prior.num_components
    for counts in all_labels(3, k) * np.array([7, 1, 4])[:k]:
        log_weights = np.asarray(log_weights_of(prior, counts), np.float64)
        weights = np.exp(log_weights - scipy.special.logsumexp(log_weights))
        expected = np.array(predictive(i, counts), float)
        np.testing.assert_allclose(weights, expected, rtol=2e-6)
    np.testing.assert_allclose(
        log_weights_of(prior, np.stack([counts, 0 * counts]))[0],
        log_weights_of(prior, counts),
        rtol=1e-6,
    )


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_log_prob_is_the_product_of_the_predictives_in_any_order(i):
    rng = np.random.default_rng(i)
    prior = nth_prior(i, 12)
    k = prior.num_components
    labels = rng.integers(0, k, 12)
    if not np.isfinite(log_prob_of(prior, counts_of(labels, k))):
        labels[labels == 1] = 0
    for order in (np.arange(12), rng.permutation(12)):
        counts, total = np.zeros(k, int), 0.0
        for label in labels[order]:
            log_weights = np.asarray(log_weights_of(prior, counts), np.float64)
            total += log_weights[label] - scipy.special.logsumexp(log_weights)
            counts[label] += 1
        assert log_prob_of(prior, counts) == pytest.approx(total, rel=3e-6, abs=3e-6)


@quick
def test_no_rows_have_probability_one():
    for prior in priors(0):
        assert prior.log_prob(np.zeros(prior.num_components, int)) == 0.0
        assert prior.sample(random.key(0)).shape == (0,)


def test_one_component_takes_all_rows():
    for prior in (
        DirichletWeights(jnp.array([0.3]), 10**6),
        StickBreakingWeights(jnp.ones(0), jnp.ones(0), 10**6),
        KnownWeights(jnp.zeros(1), 10**6),
    ):
        counts = np.array([10**6])
        assert prior.log_prob(counts) == pytest.approx(0.0, abs=1e-6)
        assert prior.log_weights(counts).shape == (1,)
        assert prior.sample(random.key(0)).max() == 0


@quick
def test_one_break_is_a_dirichlet_of_two():
    stick = StickBreakingWeights(jnp.array([0.7]), jnp.array([2.5]), 9)
    dirichlet = DirichletWeights(jnp.array([0.7, 2.5]), 9)
    for counts in ([0, 9], [4, 5], [9, 0]):
        counts = np.array(counts)
        expected = log_prob_of(dirichlet, counts)
        np.testing.assert_allclose(log_prob_of(stick, counts), expected, rtol=1e-6)


@quick
def test_breaks_of_a_dirichlet_are_that_dirichlet():
    # Connor and Mosimann (1969): b_k = a_{k+1} + ... + a_K.
    a = np.array([0.5, 2.0, 1.25, 3.0])
    b = a[::-1].cumsum()[::-1][1:]
    stick = StickBreakingWeights(jnp.array(a[:-1]), jnp.array(b), 40)
    dirichlet = DirichletWeights(jnp.array(a), 40)
    for counts in ([10, 10, 10, 10], [0, 39, 0, 1], [40, 0, 0, 0]):
        counts = np.array(counts)
        expected = log_prob_of(dirichlet, counts)
        np.testing.assert_allclose(log_prob_of(stick, counts), expected, rtol=2e-6)


@quick
def test_zero_weight_is_never_taken():
    prior = KnownWeights(jnp.log(jnp.array([0.25, 0.0, 0.75])), 10**5)
    assert prior.parameter_error() is None
    assert prior.log_weights(np.zeros(3, int))[1] == -np.inf
    assert prior.log_prob(np.array([2, 1, 0])) == -np.inf
    assert np.isfinite(prior.log_prob(np.array([2, 0, 1])))
    assert not (prior.sample(random.key(0)) == 1).any()


# Accuracy.


def reference_log_prob(counts, a):
    """Gamma functions in float64: good to 1e-8 at a million rows."""
    terms = [
        math.lgamma(x + n) - math.lgamma(x) for x, n in zip(a, counts, strict=True)
    ]
    terms += [math.lgamma(sum(a)), -math.lgamma(sum(a) + sum(counts))]
    return math.fsum(terms)


LARGE_COUNTS = {
    "one": [10**6, 0, 0, 0],
    "last": [0, 0, 0, 10**6],
    "one_apart": [10**6 - 1, 0, 1, 0],
    "equal": [250_000] * 4,
    "powers": [10**6, 10**4, 100, 1],
    "many": [7813] * 128,
    "few_of_many": [0] * 64 + [10**6] + [0] * 63,
}
# All alike; one that dominates, which leaves probabilities close to one.
SHAPES = {
    "one": lambda k: np.ones(k),
    "sparse": lambda k: np.full(k, 1e-4),
    "dense": lambda k: np.full(k, 1e6),
    "uneven": lambda k: np.geomspace(1e-3, 1e6, k),
    "uneven_down": lambda k: np.geomspace(1e6, 1e-3, k),
}


@pytest.mark.parametrize("counts", LARGE_COUNTS.values(), ids=LARGE_COUNTS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_float32_keeps_its_accuracy_at_large_counts(counts, shape):
    counts = np.array(counts)
    k = len(counts)
    a = shape(k).astype(np.float32)
    b = shape(k)[::-1].astype(np.float32)[: k - 1]
    n = counts.tolist()
    expected = reference_log_prob(n, a.tolist())
    actual = log_prob_of(DirichletWeights(a, 2**20), counts)
    assert abs(actual - expected) < 1e-6 * abs(expected) + 1e-5

    pairs = [
        ([n[j], sum(n[j + 1 :])], [float(a[j]), float(b[j])]) for j in range(k - 1)
    ]
    expected = math.fsum(reference_log_prob(*pair) for pair in pairs)
    prior = StickBreakingWeights(a[:-1], b, 2**20)
    # A sum over the breaks, each with its own rounding error.
    assert abs(log_prob_of(prior, counts) - expected) < 4e-6 * abs(expected) + 1e-5

    posterior = [[x + y for x, y in zip(*pair, strict=True)] for pair in pairs]
    log_pass = np.cumsum([math.log(y / (x + y)) for x, y in posterior])
    log_stop = [math.log(x / (x + y)) for x, y in posterior]
    expected = np.append(log_stop, 0.0) + np.append(0.0, log_pass)
    # One of the two is exact where the ratio is close to one.
    exact = [math.log1p(-x / (x + y)) for x, y in posterior]
    assert np.allclose(np.cumsum(exact), log_pass, atol=1e-8)
    np.testing.assert_allclose(log_weights_of(prior, counts), expected, 1e-6, 2e-6)


def test_float64_is_exact_to_rounding():
    with jax.enable_x64(True):
        a, b = np.array([0.3, 2.0, 15.0]), np.array([4.0, 0.01, 2.0])
        for counts in ([7, 0, 12], [1000, 5, 3], [0, 0, 1]):
            actual = DirichletWeights(a, 9).log_prob(np.array(counts))
            assert actual.dtype == jnp.float64
            np.testing.assert_allclose(actual, reference_log_prob(counts, a), 1e-12)
            actual = StickBreakingWeights(a, b, 9).log_prob(np.array([*counts, 4]))
            later = [sum(counts[j + 1 :]) + 4 for j in range(3)]
            expected = sum(
                reference_log_prob(n, x)
                for n, x in zip(
                    zip(counts, later, strict=True), zip(a, b, strict=True), strict=True
                )
            )
            np.testing.assert_allclose(actual, expected, rtol=1e-12)


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_sampled_labels_have_their_probabilities(i):
    prior = nth_prior(i, 4)
    k = prior.num_components
    keys = random.split(random.key(i), 20_000)
    draws = np.asarray(jax.vmap(prior.sample)(keys))
    assert draws.dtype == np.int32 and draws.min() >= 0 and draws.max() < k
    if k == 1:
        return
    labels = all_labels(k, 4)
    probs = np.array([exact_probability(i, z, k) for z in labels], float)
    report = testing.goodness_of_fit(draws @ k ** np.arange(3, -1, -1), probs)
    assert report.p_value > 1e-4, report


# Kolmogorov and Smirnov's test of each coordinate of 4000 draws: false-alarm rate 1e-4
# each, 2e-3 in all.
@quick
@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [3, 0, 8, 1], [0, 500, 20, 0]])
def test_drawn_weights_have_their_laws(counts):
    counts = np.array(counts)
    a, b = np.array([0.5, 2.0, 0.1, 1.0]), np.array([1.0, 0.3, 2.0])
    keys = random.split(random.key(4), 4000)

    def check(values, law_a, law_b):
        for column, x, y in zip(values.T, law_a, law_b, strict=True):
            p = scipy.stats.kstest(column, scipy.stats.beta(x, y).cdf).pvalue
            assert p > 1e-4, (x, y)

    prior = DirichletWeights(jnp.array(a), 12)
    w = np.asarray(jax.vmap(lambda key: prior.draw(key, counts))(keys), np.float64)
    np.testing.assert_allclose(w.sum(-1), 1.0, rtol=1e-5)
    posterior = a + counts
    # Draws of 1e-7 or less from one are rounded, so the largest is left out.
    use = posterior < 100
    check(w[:, use], posterior[use], posterior.sum() - posterior[use])

    prior = StickBreakingWeights(jnp.array(a[:3]), jnp.array(b), 12)
    v = np.asarray(jax.vmap(lambda key: prior.draw(key, counts))(keys), np.float64)
    assert v.shape == (4000, 3)
    later = [counts[j + 1 :].sum() for j in range(3)]
    check(v, a[:3] + counts[:3], b + later)


# Independence of the breaks: a correlation of 4000 draws with z < 4.5: rate 7e-6 each.
@quick
def test_drawn_breaks_are_independent_and_leading_axes_are_batches():
    prior = StickBreakingWeights(jnp.ones(3), jnp.ones(3), 12)
    counts = np.broadcast_to([3, 0, 8, 1], (4000, 4))
    v = np.asarray(prior.draw(random.key(0), counts))
    assert v.shape == (4000, 3)
    correlation = np.corrcoef(v.T)[np.triu_indices(3, 1)]
    assert (abs(correlation) < 4.5 / math.sqrt(4000)).all()
    w = DirichletWeights(jnp.ones(4), 12).draw(random.key(0), counts)
    assert w.shape == (4000, 4)


@quick
def test_known_weights_have_nothing_to_draw():
    prior = KnownWeights(jnp.log(jnp.ones(2) / 2), 12)
    assert prior.draw(random.key(0), np.array([3, 4])) is None


@quick
def test_draws_stay_inside_their_support():
    # Where float32 would give 0 or 1, at which densities are zero or infinite.
    counts = np.array([0, 10**6, 0])
    tiny = jnp.full(2, 1e-3)
    keys = random.split(random.key(0), 500)
    prior = StickBreakingWeights(tiny, tiny, 10**6)
    v = np.asarray(jax.vmap(lambda key: prior.draw(key, counts))(keys))
    assert (v > 0.0).all() and (v < 1.0).all()
    prior = DirichletWeights(jnp.full(3, 1e-3), 10**6)
    w = np.asarray(jax.vmap(lambda key: prior.draw(key, counts))(keys))
    assert (w > 0.0).all() and (w <= 1.0).all()


# Chi-square of a million labels given their weights: false-alarm rate 1e-4.
def test_a_million_labels_are_drawn_in_bounded_time_with_small_weights_right():
    size = 10**6
    # 2.4e-6 of all rows are in the smaller half: 32-bit coins are fine enough.
    weights = np.array([1e-4, 0.3, 1e-5, 2.4e-6, 0.5, 0.1])
    weights = np.append(weights, 1 - weights.sum())
    prior = KnownWeights(jnp.asarray(np.log(weights), jnp.float32), size)
    prior.sample(random.key(0)).block_until_ready()
    start = time.perf_counter()
    labels = np.asarray(prior.sample(random.key(1)))
    assert time.perf_counter() - start < 2.0  # 20 ms where it was written
    counts = np.bincount(labels, minlength=7)
    expected = size * weights
    # The smallest two are pooled, as the law is asymptotic.
    pooled = [np.append(np.delete(x, [2, 3]), x[2] + x[3]) for x in (counts, expected)]
    assert scipy.stats.chisquare(*pooled).pvalue > 1e-4
    for prior in (
        DirichletWeights(jnp.ones(128), size),
        StickBreakingWeights(jnp.ones(127), jnp.ones(127), size),
    ):
        prior.sample(random.key(0)).block_until_ready()
        start = time.perf_counter()
        prior.sample(random.key(1)).block_until_ready()
        assert time.perf_counter() - start < 2.0


# Poisson counts of mean 3: false-alarm rate 2e-6 for more than 14, and 2e-4 for none
# in three draws.
def test_rare_components_are_not_rounded_away():
    # 3e-8 of 1e6 rows, a hundred draws: a uniform of 23 bits would give 0 or 12.
    prior = KnownWeights(jnp.log(jnp.array([1 - 3e-8, 3e-8])), 10**6)
    keys = random.split(random.key(2), 100)
    total = sum(int((prior.sample(key) == 1).sum()) for key in keys)
    assert 0 < total <= 14


@quick
def test_no_key_is_used_twice():
    with jax.debug_key_reuse(True):
        keys = iter(random.split(random.key(0), 6))
        for prior in (
            DirichletWeights(jnp.ones(3), 9),
            StickBreakingWeights(jnp.ones(2), jnp.ones(2), 9),
            KnownWeights(jnp.log(jnp.ones(3) / 3), 9),
        ):
            prior.sample(next(keys))
            prior.draw(next(keys), np.array([1, 2, 3]))


@quick
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_with_and_without_x64(x64):
    with jax.enable_x64(x64):
        float_type = jnp.float64 if x64 else jnp.float32
        counts = np.array([1, 0, 2])
        for prior in (
            DirichletWeights(jnp.ones(3, int), 9),
            StickBreakingWeights(np.ones(2), np.ones(2), 9),
            KnownWeights(np.log(np.ones(3) / 3), 9),
        ):

            def traced(method, *args, prior=prior):
                return jax.eval_shape(lambda: getattr(prior, method)(*args))

            assert traced("log_weights", counts).dtype == float_type
            assert traced("log_prob", counts).dtype == float_type
            assert traced("sample", random.key(0)).dtype == jnp.int32
            value = traced("draw", random.key(0), counts)
            assert value is None or value.dtype == float_type
            assert prior.parameter_error() is None
        # That it also runs: the one of the most operations.
        prior = StickBreakingWeights(np.ones(2), np.ones(2), 9)
        assert prior.sample(random.key(0)).dtype == jnp.int32


# Transformations.


@quick
@pytest.mark.parametrize("i", range(NUM_PRIORS))
def test_priors_are_pytrees(i):
    prior = nth_prior(i, 6)
    leaves, treedef = jax.tree.flatten(prior)
    counts = np.arange(prior.num_components)
    for other in (
        jax.tree.unflatten(treedef, leaves),
        pickle.loads(pickle.dumps(prior)),
        jax.jit(lambda p: p)(prior),
    ):
        assert type(other) is type(prior) and other.size == 6
        np.testing.assert_array_equal(
            other.sample(random.key(0)), prior.sample(random.key(0))
        )
        np.testing.assert_array_equal(other.log_prob(counts), prior.log_prob(counts))
    jax.tree.unflatten(treedef, [object()] * len(leaves))


@quick
def test_jit_vmap_and_loops_change_nothing():
    a, b = jnp.array([[1.0, 2.0], [0.5, 3.0]]), jnp.array([[0.5, 1.0], [2.0, 2.0]])
    counts = jnp.array([4, 0, 2])
    for prior in (
        DirichletWeights(jnp.concatenate([a, b[:, :1]], 1), 6),
        StickBreakingWeights(a, b, 6),
        KnownWeights(jax.nn.log_softmax(jnp.concatenate([a, b[:, :1]], 1)), 6),
    ):

        @jax.jit
        @jax.vmap
        def both(p):
            def body(_, total):
                return total + p.log_weights(counts)

            return p.log_prob(counts), lax.fori_loop(0, 3, body, jnp.zeros(3))

        log_prob, log_weights = both(prior)
        for i in range(2):
            one = jax.tree.map(lambda x, i=i: x[i], prior)
            np.testing.assert_allclose(log_prob[i], one.log_prob(counts), rtol=1e-5)
            np.testing.assert_allclose(
                log_weights[i], 3 * one.log_weights(counts), rtol=1e-5
            )


# Bad input.


@pytest.mark.parametrize("size", [-3, 2.0, True, None, "4", jnp.array(3), 2**31])
def test_bad_size_is_refused(size):
    for make in (
        lambda: DirichletWeights(jnp.ones(2), size),
        lambda: StickBreakingWeights(jnp.ones(2), jnp.ones(2), size),
        lambda: KnownWeights(jnp.zeros(1), size),
    ):
        with pytest.raises(ValueError, match="Weights: `size`") as error:
            make()
        assert f"got {size!r};" in str(error.value)


@pytest.mark.parametrize(
    "prior, words",
    [
        (DirichletWeights(np.array([1.0, 0.0]), 4), "`concentration`.*0 at index (1,)"),
        (DirichletWeights(np.array([1.0, np.nan]), 4), "`concentration`.*nan"),
        (DirichletWeights(np.array([np.inf, 1.0]), 4), "`concentration`.*inf"),
        (DirichletWeights(1.0, 4), "`concentration`.*shape ()"),
        (DirichletWeights(np.ones((2, 3)), 4), "`concentration`.*shape (2, 3)"),
        (DirichletWeights(np.ones(0), 4), "`concentration`.*at least one"),
        (StickBreakingWeights(np.array([-1.0]), np.ones(1), 4), "`a`.*-1 at index"),
        (StickBreakingWeights(np.ones(2), np.zeros(2), 4), "`b`.*got 0 at index"),
        (StickBreakingWeights(1.0, np.ones(2), 4), "`a`.*shape ()"),
        (StickBreakingWeights(np.ones(2), 1.0, 4), "`b`.*shape ()"),
        (StickBreakingWeights(np.ones(2), np.ones(3), 4), "`a` and `b`.*same shape"),
        (KnownWeights(np.log([0.5, 0.6]), 4), "`log_probs`.*sum of 1.1;.*probs.sum()"),
        (
            KnownWeights(np.array([0.0, np.nan]), 4),
            "`log_probs`.*nan at index (1,).*`probs`",
        ),
        (KnownWeights(0.0, 4), "`log_probs`.*shape ()"),
    ],
)
def test_bad_parameters_are_named(prior, words):
    message = prior.parameter_error()
    assert message.startswith(f"{type(prior).__name__}: ")
    position = -1
    for part in words.split(".*"):
        assert part in message[position + 1 :], message
        position = message.index(part, position + 1)
    assert "; " in message  # a way out


@quick
def test_good_parameters_have_no_error_and_traced_values_pass():
    for prior in priors(4):
        assert prior.parameter_error() is None

    @jax.jit
    def traced(x):
        for prior in (
            DirichletWeights(x, 4),
            StickBreakingWeights(x, x, 4),
            KnownWeights(x, 4),
        ):
            assert prior.parameter_error() is None
        assert DirichletWeights(x[None], 4).parameter_error() is not None
        return x

    traced(-jnp.ones(3))


def test_abstract_base_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        LabelledPrior()
