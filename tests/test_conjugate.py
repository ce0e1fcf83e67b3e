# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Laws of the conjugate pairs, of the blocks that pack them, and of special functions.

The laws hold for every pair and are stated in float64; what float32 loses is bounded
apart. Statistical tests have fixed seeds and no retries; a comment at each states its
false-alarm rate.
"""

from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

import numpyro.distributions as dist

from numpyro_subanneal import testing
from numpyro_subanneal.conjugate import DirichletCategorical, NormalInverseGamma
from numpyro_subanneal.conjugate.base import SiteShape, draw, loggamma
from numpyro_subanneal.conjugate.special import (
    log1p_nonnegative,
    log_gamma_half_step,
)

NORMAL, DIRICHLET = NormalInverseGamma(), DirichletCategorical()


class Example(NamedTuple):
    pair: Any
    hyper: dict
    values: tuple


def normal(mean, kappa, shape, rate, *values):
    hyper = {"mean": mean, "kappa": kappa, "shape": shape, "rate": rate}
    return Example(NORMAL, hyper, values)


def categorical(concentration, *values):
    return Example(DIRICHLET, {"concentration": np.array(concentration)}, values)


EXAMPLES = {
    "normal": normal(0.5, 0.4, 2.0, 1.5, 0.3, -1.2, 2.5, 0.0, 0.31),
    "normal one value": normal(-1.0, 2.0, 3.0, 0.5, 4.0),
    "normal equal values": normal(1.0, 0.1, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0),
    "normal outlier": normal(0.0, 1.0, 2.0, 1.0, 0.1, -0.1, 1e4, 0.2),
    "normal far mean": normal(1e5, 0.01, 2.0, 1.0, 1e5 + 1.0, 1e5 - 2.0, 1e5 + 0.5),
    "normal far from mean": normal(0.0, 1e-3, 2.0, 1.0, 1e5 + 1.0, 1e5 - 2.0, 1e5),
    "normal heavy tails": normal(0.0, 1e-3, 0.05, 1e-4, 0.3, -0.2, 5.0),
    "normal strong prior": normal(0.0, 1e4, 1e4, 3e4, 0.3, -0.2, 5.0),
    "normal tiny units": normal(1e-9, 0.5, 2.0, 1e-18, 2e-9, -1e-9, 0.5e-9),
    "normal huge units": normal(1e9, 0.5, 2.0, 1e18, 2e9, -1e9, 0.5e9),
    "two categories": categorical([1.0, 1.0], 0, 1, 1, 0, 1),
    "uneven categories": categorical([0.3, 2.0, 0.7, 1.1], 3, 0, 0, 2, 3, 0),
    "one category": categorical([0.8], 0, 0, 0),
    "many categories": categorical(np.linspace(0.1, 3.0, 17), 16, 0, 5, 5, 16, 1),
    "extreme concentrations": categorical([1e-3, 1.0, 1e3, 1e-2], 0, 0, 2, 3, 1, 0),
    "sparse concentration": categorical([1e-4] * 5, 4, 4, 4, 1),
}
by_example = pytest.mark.parametrize("name", EXAMPLES)
NORMALS = [name for name in EXAMPLES if name.startswith("normal")]


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def read(name):
    """Pair, hyperparameters and values, as arrays of the precision that is on."""
    pair, hyper, values = EXAMPLES[name]
    hyper = {k: jnp.asarray(v, jnp.result_type(float)) for k, v in hyper.items()}
    kind = float if pair is NORMAL else int
    return pair, hyper, [jnp.asarray(v, jnp.result_type(kind)) for v in values]


def fold(pair, hyper, values):
    stat = pair.empty(hyper)
    for x in values:
        stat = pair.add(hyper, stat, x)
    return stat


def close(a, b, rtol, atol=1e-9):
    """Equal up to rounding: relative for what is large, absolute for what is small."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def close_stats(name, a, b):
    # Rounding errors of a statistic go with the size of the values.
    size = np.max(np.abs(EXAMPLES[name].values))
    if EXAMPLES[name].pair is DIRICHLET:
        close(a, b, rtol=0, atol=0)
    else:
        close(a[0], b[0], rtol=0, atol=0)
        close(a[1], b[1], rtol=1e-13, atol=1e-13 * size)
        close(a[2], b[2], rtol=1e-12, atol=1e-13 * size**2)


def oracle(name, values):
    pair, hyper, _ = EXAMPLES[name]
    if pair is NORMAL:
        return testing.normal_log_marginal(np.reshape(values, (-1, 1)), **hyper)
    codes = np.reshape(np.asarray(values, int), (-1, 1))
    return testing.categorical_log_marginal(codes, hyper["concentration"])


# --- Laws of a pair -----------------------------------------------------------


@by_example
def test_no_values_have_marginal_one(name, double):
    pair, hyper, _ = read(name)
    np.testing.assert_allclose(
        pair.log_marginal(hyper, pair.empty(hyper)), 0, atol=1e-9
    )


@by_example
def test_log_marginal_is_the_oracles(name, double):
    pair, hyper, values = read(name)
    for n in range(1, len(values) + 1):
        got = pair.log_marginal(hyper, fold(pair, hyper, values[:n]))
        expected = oracle(name, EXAMPLES[name].values[:n])
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)


@by_example
def test_chain_rule_holds_in_any_order(name, double):
    # p(x1, ..., xn) = p(x1) p(x2 | x1) ...
    pair, hyper, values = read(name)
    whole = pair.log_marginal(hyper, fold(pair, hyper, values))
    rng = np.random.default_rng(0)
    for _ in range(4):
        stat, total = pair.empty(hyper), 0.0
        for i in rng.permutation(len(values)):
            total += pair.score(pair.predictive(hyper, stat), values[i])
            stat = pair.add(hyper, stat, values[i])
        np.testing.assert_allclose(total, whole, rtol=1e-8, atol=1e-8)


@by_example
def test_predictive_is_a_ratio_of_marginals(name, double):
    pair, hyper, values = read(name)
    for n in range(len(values)):
        stat = fold(pair, hyper, values[:n])
        table = pair.predictive(hyper, stat)
        for x in values:
            ratio = pair.log_marginal(hyper, pair.add(hyper, stat, x))
            ratio -= pair.log_marginal(hyper, stat)
            np.testing.assert_allclose(
                pair.score(table, x), ratio, rtol=1e-7, atol=1e-7
            )


@by_example
def test_predictive_density_has_mass_one(name, double):
    pair, hyper, values = read(name)
    for n in (0, len(values)):
        table = pair.predictive(hyper, fold(pair, hyper, values[:n]))
        if pair is DIRICHLET:
            codes = jnp.arange(len(hyper["concentration"]))
            mass = np.exp(jax.vmap(partial(pair.score, table))(codes)).sum()
        else:
            # Over x = location + width sinh(u), as the tails may be very heavy. Beyond
            # |u| = 300 the heaviest has exp(-30) left.
            location, weight, exponent, _ = (float(t) for t in table)
            width = (weight * max(1.0, 2 * exponent)) ** -0.5
            score = jax.jit(partial(pair.score, table))

            def integrand(u, score=score, location=location, width=width):
                x = location + width * np.sinh(u)
                return np.exp(float(score(x))) * width * np.cosh(u)

            mass, _ = integrate.quad(
                integrand, -300, 300, limit=400, points=[-5, 0, 5], epsabs=1e-8
            )
        np.testing.assert_allclose(mass, 1, rtol=1e-6)


@by_example
def test_adding_then_removing_is_the_identity(name, double):
    pair, hyper, values = read(name)
    rng = np.random.default_rng(1)
    for n in range(len(values)):
        before = fold(pair, hyper, values[:n])
        stat = fold(pair, hyper, values)
        for i in n + rng.permutation(len(values) - n):
            stat = pair.remove(hyper, stat, values[i])
        close_stats(name, stat, before)


@by_example
def test_removing_all_leaves_exactly_nothing(name):
    # In float32 too: what rounding leaves would go on to the next cluster in a slot.
    pair, hyper, values = read(name)
    stat = fold(pair, hyper, values)
    for x in values:
        stat = pair.remove(hyper, stat, x)
        assert all(np.isfinite(s).all() for s in stat)
    close(stat, pair.empty(hyper), rtol=0, atol=0)


@by_example
def test_merge_equals_the_whole(name, double):
    pair, hyper, values = read(name)
    whole = fold(pair, hyper, values)
    for n in range(len(values) + 1):
        a, b = fold(pair, hyper, values[:n]), fold(pair, hyper, values[n:])
        close_stats(name, pair.merge(hyper, a, b), whole)
        close_stats(name, pair.merge(hyper, b, a), whole)


@by_example
def test_posterior_after_posterior_is_the_posterior_of_all(name, double):
    pair, hyper, values = read(name)
    for n in range(len(values) + 1):
        first = pair.posterior(hyper, fold(pair, hyper, values[:n]))
        assert first.keys() == hyper.keys()
        second = pair.posterior(first, fold(pair, hyper, values[n:]))
        whole = pair.posterior(hyper, fold(pair, hyper, values))
        for key in hyper:
            np.testing.assert_allclose(second[key], whole[key], rtol=1e-9, err_msg=key)


def generate(pair, hyper, num, seed):
    """`num` draws of a pair's generative program, by NumPy."""
    rng = np.random.default_rng(seed)

    def sample(role, fn):
        assert isinstance(fn, pair.prior[role])
        args = [np.asarray(getattr(fn, name)) for name in fn.arg_constraints]
        if isinstance(fn, dist.InverseGamma):
            value = args[1] / rng.gamma(args[0], size=num)
        elif isinstance(fn, dist.Normal):
            value = rng.normal(*args, size=num)
        else:
            value = rng.gamma(args[0], size=(num, *args[0].shape)) + 1e-300
            value /= value.sum(-1, keepdims=True)
        return jnp.asarray(value)

    return pair.theta(hyper, sample)


def log_density(pair, hyper, theta):
    """NumPyro's log density of `theta` under the prior, written out."""
    if pair is DIRICHLET:
        return dist.Dirichlet(hyper["concentration"]).log_prob(theta["probs"])
    scale = jnp.sqrt(theta["variance"] / hyper["kappa"])
    return dist.InverseGamma(hyper["shape"], hyper["rate"]).log_prob(
        theta["variance"]
    ) + dist.Normal(hyper["mean"], scale).log_prob(theta["loc"])


def log_likelihood(pair, theta, values):
    """NumPyro's log density of `values`, written out."""
    if pair is DIRICHLET:
        return sum(dist.Categorical(theta["probs"]).log_prob(x) for x in values)
    fn = dist.Normal(theta["loc"], jnp.sqrt(theta["variance"]))
    return sum(fn.log_prob(x) for x in values)


@by_example
def test_bayes_law_with_numpyros_densities(name, double):
    # p(x | theta) p(theta) = p(theta | x) p(x), at any theta.
    pair, hyper, values = read(name)
    stat = fold(pair, hyper, values)
    posterior = pair.posterior(hyper, stat)
    theta = generate(pair, posterior, 5, seed=0)
    if pair is DIRICHLET:
        # A density that is infinite at the edge of the simplex says nothing there.
        theta = {"probs": jax.nn.softmax(0.1 * jnp.log(theta["probs"] + 1e-30))}
    terms = (
        log_likelihood(pair, theta, values),
        log_density(pair, hyper, theta),
        -log_density(pair, posterior, theta),
    )
    size = 1 + sum(np.abs(t) for t in terms)
    gap = np.abs(sum(terms) - pair.log_marginal(hyper, stat))
    assert (gap < 1e-8 * size).all(), gap


@pytest.mark.parametrize(
    "name", ["normal", "two categories", "uneven categories", "many categories"]
)
def test_marginal_is_the_mean_likelihood_under_the_prior(name, double):
    # By 10^5 draws of the pair's generative program: z below 4.5, a false alarm in 7 of
    # a million each.
    pair, hyper, values = read(name)
    values = values[:3]
    theta = generate(pair, hyper, 100_000, seed=1)
    stat = fold(pair, hyper, values)
    ratio = np.exp(log_likelihood(pair, theta, values) - pair.log_marginal(hyper, stat))
    z = (ratio.mean() - 1) / (ratio.std() / np.sqrt(len(ratio)))
    assert abs(z) < 4.5, z


@by_example
def test_parameters_are_those_of_the_likelihood(name, double):
    pair, hyper, values = read(name)
    theta = generate(pair, hyper, 3, seed=2)
    fn = pair.likelihood[0](**pair.parameters(theta))
    np.testing.assert_allclose(
        sum(fn.log_prob(x) for x in values), log_likelihood(pair, theta, values)
    )


@pytest.mark.parametrize("name", NORMALS)
def test_hyperparameters_are_read_off_the_prior(name, double):
    pair, hyper, _ = read(name)
    theta = generate(pair, hyper, 3, seed=3)
    prior = {
        "variance": dist.InverseGamma(hyper["shape"], hyper["rate"]),
        "loc": dist.Normal(hyper["mean"], jnp.sqrt(theta["variance"] / hyper["kappa"])),
    }
    got = pair.hyperparameters(prior, theta)
    assert got.keys() == hyper.keys()
    for key, value in hyper.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-12)


# --- What a column may hold ---------------------------------------------------


@pytest.mark.parametrize(
    "column, message",
    [
        ([0.0, np.nan], "value nan in row 1"),
        ([np.inf, 0.0], "value inf in row 0"),
    ],
)
def test_normal_column_must_be_finite(column, message):
    assert message in NORMAL.data_error(np.array(column), {})


@pytest.mark.parametrize("offset, refused", [(0.0, False), (1e5, False), (1e7, True)])
def test_normal_column_must_be_resolved(offset, refused):
    column = offset + np.random.default_rng(0).normal(size=1000)
    error = NORMAL.data_error(column, {})
    assert (error is not None) == (refused and not jax.config.jax_enable_x64)
    assert error is None or "enable_x64" in error


@pytest.mark.parametrize(
    "column, bad",
    [
        ([0, 3], "has 3 in row 1"),
        ([0, -1], "has -1 in row 1"),
        ([0.5, 1], "has 0.5 in row 0"),
        ([0, np.nan], "has nan in row 1"),
    ],
)
def test_categories_must_be_codes(column, bad):
    hyper = {"concentration": np.ones(3)}
    assert bad in DIRICHLET.data_error(np.array(column), hyper)
    assert DIRICHLET.data_error(np.array([0, 1, 2]), hyper) is None
    assert DIRICHLET.data_error(np.array([0.0, 2.0]), hyper) is None


# --- float32 ------------------------------------------------------------------

# Rows in a cluster, and how many standard deviations the column is away from zero.
COUNTS = (1, 10, 1000, 100_000, 1_000_000)
QUERIES = np.array([0.0, 1.0, -3.0])


def normal_in_double(hyper, x, queries):
    """Statistics by two passes, scores and log marginal, all in float64."""
    with jax.enable_x64(True):
        x = np.asarray(x, np.float64)
        stat = len(x), x.mean(), ((x - x.mean()) ** 2).sum()
        stat = tuple(jnp.asarray(s, jnp.float64) for s in stat)
        hyper = {k: jnp.asarray(v, jnp.float64) for k, v in hyper.items()}
        table = NORMAL.predictive(hyper, stat)
        scores = jax.vmap(partial(NORMAL.score, table))(jnp.asarray(queries, float))
        marginal = NORMAL.log_marginal(hyper, stat)
        return [np.asarray(s) for s in stat], np.asarray(scores), float(marginal)


@jax.jit
def accumulate(x):
    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, zero)
    return lax.scan(lambda stat, v: (NORMAL.add({}, stat, v), None), start, x)[0]


@pytest.mark.parametrize("offset", [0.0, 10.0, 1e3, 1e5, 1e6])
def test_normal_formulas_in_float32_are_those_in_float64(offset):
    # Given the same statistics. The location and the value are float32 numbers about
    # `offset`, of which half a step is unknown in each; the score's slope is at most 4
    # here. Nothing else is lost, at any count.
    step = float(np.spacing(np.float32(offset + 1)))
    for n in COUNTS:
        x = (offset + np.random.default_rng(n).normal(size=n)).astype(np.float32)
        queries = np.float32(offset + QUERIES)
        hyper = {"mean": np.float32(offset), "kappa": 0.1, "shape": 2.0, "rate": 1.0}
        stat, scores, marginal = normal_in_double(hyper, x, queries)
        hyper = {k: jnp.float32(v) for k, v in hyper.items()}
        stat = tuple(jnp.float32(s) for s in stat)
        table = NORMAL.predictive(hyper, stat)
        got = jax.vmap(partial(NORMAL.score, table))(jnp.asarray(queries))
        assert np.abs(got - scores).max() < 2e-5 + 4 * step, n
        # The marginal's terms are up to 10 n; its slope in the location is below 1.
        error = abs(NORMAL.log_marginal(hyper, stat) - marginal)
        assert error < 2e-6 * (10 + 10 * n) + step, n


# What accumulation in float32, one value at a time, may add to that: an error of the
# mean in standard deviations, and a relative one of the sum of squares. Increments of
# the mean fall below a step of float32 at large offsets, and those of the sum of
# squares at large counts.
ACCUMULATED = {0.0: (1e-6, 2e-3), 10.0: (3e-4, 2e-3), 1e3: 1e-2, 1e5: 0.15, 1e6: 0.5}


@pytest.mark.parametrize("offset", ACCUMULATED)
def test_normal_statistics_accumulate_in_float32(offset):
    bound = ACCUMULATED[offset]
    of_mean, of_square = (
        bound if isinstance(bound, tuple) else (bound, 2e-3 + bound / 4)
    )
    for n in COUNTS:
        x = (offset + np.random.default_rng(n).normal(size=n)).astype(np.float32)
        expected, _, _ = normal_in_double(
            {"mean": 0.0, "kappa": 1.0, "shape": 1.0, "rate": 1.0}, x, QUERIES
        )
        count, mean, square = accumulate(x)
        assert count == n
        assert abs(mean - expected[1]) <= of_mean, n
        assert abs(square - expected[2]) <= of_square * expected[2], n


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, 1e9])
def test_a_far_origin_costs_a_normal_block_nothing(offset):
    # The prior's mean is where the values are: values less the mean are exact.
    num_rows = 1000
    step = float(np.spacing(np.float32(offset + 1)))
    spread = 100 * step if offset else 1.0
    noise = spread * np.random.default_rng(0).normal(size=num_rows)
    x = jnp.asarray(offset + noise, jnp.float32)
    block = NORMAL.block((SiteShape("x", (("variance", "v"), ("loc", "m")), ()),))
    prior = {"mean": offset, "kappa": 0.1, "shape": 2.0, "rate": spread**2}
    hyper = block.pack([{k: jnp.float32(v) for k, v in prior.items()}])
    packed = Packed(block, hyper, (x,), [])
    stats_ = collect(packed, jnp.zeros(num_rows, jnp.int32), 1)
    zero, off = jnp.int32(0), jnp.asarray(False)
    taken = block.take(hyper, stats_, block.row(hyper, (x,), zero), zero, off)
    queries = np.float32(offset + spread * QUERIES)
    _, expected, marginal = normal_in_double(prior, x, queries)
    tables = block.tables(hyper, stats_)
    for query, score in zip(queries, expected, strict=True):
        row = block.row(hyper, (query[None],), zero)
        got = block.score(hyper, stats_, tables, taken, row)
        assert abs(got[0] - score) < 1e-4
    assert abs(block.log_marginal(hyper, stats_)[0] - marginal) < 2e-2
    loc = block.draw(random.key(0), hyper, stats_)["m"]
    assert abs(loc[0] - offset - noise.mean()) < 6 * spread / np.sqrt(num_rows) + step


def test_categorical_block_in_float32_is_that_in_float64():
    # Scores to 1e-5 nats a feature at counts up to 10^6; the log marginal to 1e-6 of
    # the gamma functions that it is made of.
    block = count_block()
    rng = np.random.default_rng(0)
    hyper = [{"concentration": c} for c in CONCENTRATIONS]
    x = jnp.asarray(row_of(CODES, 0) + block.offset)
    for n in COUNTS:
        counts = np.concatenate(
            [rng.multinomial(n, np.ones(c) / c, size=2).T for c in block.cardinality]
        )
        out = []
        for wide in (False, True):
            with jax.enable_x64(wide):
                dtype = jnp.result_type(float)
                packed = block.pack(
                    [{k: jnp.asarray(v, dtype) for k, v in h.items()} for h in hyper]
                )
                stat = block.empty(packed, 2)._replace(
                    category=jnp.asarray(counts, jnp.int32),
                    total=jnp.full(2, n, jnp.int32),
                )
                zero = jnp.int32(0)
                taken = block.take(packed, stat, x, zero, jnp.asarray(False))
                tables = block.tables(packed, stat)
                score = block.score(packed, stat, tables, taken, x)
                marginal = block.log_marginal(packed, stat)
                out.append((np.asarray(score), np.asarray(marginal)))
        num_features = len(block.cardinality)
        assert np.abs(out[0][0] - out[1][0]).max() < 1e-5 * num_features, n
        size = num_features * 2 * n * np.log(n + 3) + 10
        assert np.abs(out[0][1] - out[1][1]).max() < 1e-6 * size, n


# --- Blocks -------------------------------------------------------------------

# Several sites of one pair, with features of different shapes.
REAL_SITES = (
    SiteShape("u", (("variance", "u_var"), ("loc", "u_loc")), (2, 2)),
    SiteShape("v", (("variance", "v_var"), ("loc", "v_loc")), ()),
)
REAL_HYPER = (
    {
        "mean": np.array([[0.0, 1.0], [-1.0, 0.5]]),
        "kappa": np.array([[0.1, 1.0], [2.0, 0.5]]),
        "shape": np.array([[1.0, 2.0], [3.0, 0.7]]),
        "rate": np.array([[1.0, 0.2], [3.0, 0.5]]),
    },
    {"mean": 2.0, "kappa": 0.3, "shape": 1.5, "rate": 0.8},
)
CODE_SITES = (
    SiteShape("a", (("probs", "a_probs"),), (3,), (2,)),
    SiteShape("b", (("probs", "b_probs"),), (), (5,)),
    SiteShape("c", (("probs", "c_probs"),), (2, 1), (3,)),
)
CONCENTRATIONS = (
    np.array([[0.5, 1.5], [2.0, 0.1], [1.0, 1.0]]),
    np.array([0.3, 0.6, 2.0, 1.0, 0.2]),
    np.array([[[0.4, 0.9, 3.0]], [[1.2, 0.7, 0.5]]]),
)
NUM_ROWS = 300
_rng = np.random.default_rng(7)
REALS = (_rng.normal(size=(NUM_ROWS, 2, 2)), _rng.normal(2.0, size=NUM_ROWS))
CODES = (
    _rng.integers(2, size=(NUM_ROWS, 3)),
    _rng.integers(5, size=NUM_ROWS),
    _rng.integers(3, size=(NUM_ROWS, 2, 1)),
)


def real_block():
    return NORMAL.block(REAL_SITES)


def count_block():
    return DIRICHLET.block(CODE_SITES)


def row_of(data, n):
    return np.concatenate([np.reshape(x[n], -1) for x in data])


class Packed(NamedTuple):
    """A block with hyperparameters and data; and each feature by itself."""

    block: Any
    hyper: Any
    data: tuple
    features: list  # of hyperparameters, one a feature


def pack(kind):
    dtype = jnp.result_type(float)
    if kind == "real":
        block = real_block()
        hyper = [
            {k: jnp.asarray(v, dtype) for k, v in site.items()} for site in REAL_HYPER
        ]
        data = tuple(jnp.asarray(x, dtype) for x in REALS)
        features = []
        for site, shape in zip(hyper, REAL_SITES, strict=True):
            for index in np.ndindex(shape.feature_shape):
                features.append({k: v[index] for k, v in site.items()})
    else:
        block = count_block()
        hyper = [{"concentration": jnp.asarray(c, dtype)} for c in CONCENTRATIONS]
        data = tuple(jnp.asarray(x, jnp.int32) for x in CODES)
        features = []
        for site, shape in zip(hyper, CODE_SITES, strict=True):
            for index in np.ndindex(shape.feature_shape):
                features.append({"concentration": site["concentration"][index]})
    return Packed(block, block.pack(hyper), data, features)


by_kind = pytest.mark.parametrize("kind", ["real", "categorical"])


def collect(packed, z, num_clusters):
    """Statistics of assignments (-1: in none), by adding rows."""
    block, hyper, data, _ = packed

    def add(stats, n):
        x, live = block.row(hyper, data, n), z[n] >= 0
        return block.add(stats, x, jnp.maximum(z[n], 0), live), None

    empty = block.empty(hyper, num_clusters)
    return lax.scan(add, empty, jnp.arange(len(z)))[0]


def scalar_stats(packed, z, num_clusters, num_rows):
    """Statistics of each feature and cluster by the pair itself."""
    block, _, data, features = packed
    rows = np.stack([row_of(data, n) for n in range(num_rows)])
    return [
        [
            fold(block.pair, hyper, jnp.asarray(rows[z[:num_rows] == k, d]))
            for k in range(num_clusters)
        ]
        for d, hyper in enumerate(features)
    ]


@by_kind
def test_block_scores_and_marginals_are_sums_over_features(kind, double):
    packed = pack(kind)
    block, hyper, data, features = packed
    num_rows, num_clusters = 12, 4
    z = np.array([0, 1, 1, 0, 3, 3, 3, 0, 1, -1, -1, -1])  # cluster 2 is empty
    scalar = scalar_stats(packed, z, num_clusters, num_rows)
    stats = collect(packed, jnp.asarray(z), num_clusters)
    marginal = [
        sum(
            block.pair.log_marginal(h, s[k])
            for h, s in zip(features, scalar, strict=True)
        )
        for k in range(num_clusters)
    ]
    close(block.log_marginal(hyper, stats), np.array(marginal), rtol=1e-10)
    tables = block.tables(hyper, stats)
    # Rows that share categories with the row that is out, and those that don't; a live
    # removal from a cluster of one row, of three, and none.
    for leaves, enters, live in (
        (4, 4, True),
        (2, 9, True),
        (8, 0, True),
        (0, 10, False),
    ):
        out = jnp.asarray(leaves)
        k = int(z[leaves])
        taken = block.take(
            hyper, stats, block.row(hyper, data, out), jnp.int32(k), jnp.asarray(live)
        )
        x = block.row(hyper, data, jnp.asarray(enters))
        got = block.score(hyper, stats, tables, taken, x)
        left = z.copy()
        if live:
            left[leaves] = -1
        scalar = scalar_stats(packed, left, num_clusters, num_rows)
        cells = row_of(data, enters)
        expected = [
            sum(
                block.pair.score(block.pair.predictive(h, s[j]), jnp.asarray(cell))
                for h, s, cell in zip(features, scalar, cells, strict=True)
            )
            for j in range(num_clusters)
        ]
        close(got, np.array(expected), rtol=1e-10)


@by_kind
def test_block_moves_are_those_of_a_recount(kind, double):
    packed = pack(kind)
    block, hyper, data, _ = packed
    z = np.array([0, 1, 1, 0, 3, 3, 3, 0, 1, -1, -1, -1])
    num_clusters = 4
    stats = collect(packed, jnp.asarray(z), num_clusters)
    tables = block.tables(hyper, stats)
    cases = [
        # leaves, leaves live, enters, to, enters live
        (4, True, 9, 0, True),
        (4, True, 4, 3, True),  # back to where it came from
        (4, True, 9, 3, True),  # another row to the same cluster
        (2, True, 2, 2, True),  # to an empty cluster
        (4, True, 10, 1, False),  # out only
        (0, False, 11, 2, True),  # in only
        (0, False, 11, 0, True),  # in only, to the cluster named by the other
        (0, False, 11, 1, False),  # nothing
    ]
    for leaves, leaving, enters, to, entering in cases:
        taken = block.take(
            hyper,
            stats,
            block.row(hyper, data, jnp.asarray(leaves)),
            jnp.int32(z[leaves]),
            jnp.asarray(leaving),
        )
        x = block.row(hyper, data, jnp.asarray(enters))
        got = block.put(
            hyper, stats, tables, taken, x, jnp.int32(to), jnp.asarray(entering)
        )
        moved = z.copy()
        if leaving:
            moved[leaves] = -1
        if entering:
            moved[enters] = to
        expected = collect(packed, jnp.asarray(moved), num_clusters)
        close(got, (expected, block.tables(hyper, expected)), rtol=1e-9, atol=1e-12)


@partial(jax.jit, static_argnames=("kind", "num_rows", "num_clusters", "num_moves"))
def walk(rng_key, *, kind, num_rows, num_clusters, num_moves):
    """
    Assignments, statistics and tables after random moves: a row out or none, a row in
    or none, often the same row or the same cluster.
    """
    packed = pack(kind)
    block, hyper, data, _ = packed
    key_z, rng_key = random.split(rng_key)
    z = random.randint(key_z, (num_rows,), -1, num_clusters)
    stats = collect(packed, z, num_clusters)
    tables = block.tables(hyper, stats)

    def move(i, carry):
        z, stats, tables = carry
        bits = random.bits(random.fold_in(rng_key, i), (4,), jnp.uint32)
        leaves = (bits[0] % num_rows).astype(jnp.int32)
        other = (bits[1] % num_rows).astype(jnp.int32)
        to = (bits[2] % num_clusters).astype(jnp.int32)
        leaving = (z[leaves] >= 0) & (bits[3] % 8 > 0)
        k = jnp.where(leaving, z[leaves], 0)
        taken = block.take(hyper, stats, block.row(hyper, data, leaves), k, leaving)
        z = z.at[leaves].set(jnp.where(leaving, -1, z[leaves]))
        enters = jnp.where(z[other] < 0, other, leaves)
        entering = z[enters] < 0
        x = block.row(hyper, data, enters)
        stats, tables = block.put(hyper, stats, tables, taken, x, to, entering)
        z = z.at[enters].set(jnp.where(entering, to, z[enters]))
        return z, stats, tables

    z, stats, tables = lax.fori_loop(0, num_moves, move, (z, stats, tables))
    rebuilt = collect(packed, z, num_clusters)
    again = block.tables(hyper, stats)
    return z, (stats, tables), (rebuilt, again)


def assert_in_step(kind, z, moved, rebuilt, drift):
    (stats, tables), (expected, again) = jax.device_get((moved, rebuilt))
    # Tables are those of the statistics, to rounding.
    close(tables, again, rtol=1e-6, atol=1e-5)
    if kind == "categorical":
        close(stats, expected, rtol=0, atol=0)
        return
    np.testing.assert_array_equal(stats[0], expected[0])
    np.testing.assert_array_equal(
        stats[0][0], np.bincount(z[z >= 0], minlength=len(stats[0][0]))
    )
    n = np.maximum(stats[0], 1)
    # Columns have a standard deviation of one.
    assert np.abs(stats[1] - expected[1]).max() < drift
    assert np.abs((stats[2] - expected[2]) / n).max() < drift


# Clusters that are often emptied, and clusters that never are.
WALKS = pytest.mark.parametrize("num_rows, num_clusters", [(7, 5), (NUM_ROWS, 3)])


@by_kind
@WALKS
def test_tables_and_statistics_stay_in_step_over_1e5_moves(
    kind, num_rows, num_clusters
):
    z, moved, rebuilt = walk(
        random.key(1),
        kind=kind,
        num_rows=num_rows,
        num_clusters=num_clusters,
        num_moves=100_000,
    )
    assert_in_step(kind, np.asarray(z), moved, rebuilt, drift=1e-4)


@pytest.mark.slow
@by_kind
def test_tables_and_statistics_stay_in_step_over_3e6_moves(kind):
    z, moved, rebuilt = walk(
        random.key(2), kind=kind, num_rows=NUM_ROWS, num_clusters=3, num_moves=3_000_000
    )
    assert_in_step(kind, np.asarray(z), moved, rebuilt, drift=1e-3)


def test_pack_broadcasts_hyperparameters_over_features(double):
    block = real_block()
    scalars = {"mean": 1.0, "kappa": 2.0, "shape": 3.0, "rate": 4.0}
    packed = block.pack([scalars, scalars])
    # The mean becomes the origin of the values.
    np.testing.assert_array_equal(packed.origin, np.full(5, 1.0))
    for key, value in (scalars | {"mean": 0.0}).items():
        np.testing.assert_array_equal(packed.values[key], np.full(5, value))
    block = count_block()
    packed = block.pack([{"concentration": np.ones(c)} for c in (2, 5, 3)])
    np.testing.assert_array_equal(packed.category, np.ones(2 * 3 + 5 + 3 * 2))
    np.testing.assert_array_equal(packed.total, [2, 2, 2, 5, 3, 3])


# --- Draws --------------------------------------------------------------------


@by_kind
def test_block_draws_follow_the_posterior_of_each_feature(kind):
    # Every cluster's parameters through the distribution functions of their posteriors,
    # as written here, are uniform: Kolmogorov and Smirnov's test at 1e-5. Three
    # clusters, one of them empty; false alarm 0.04 % for 42 tests.
    packed = pack(kind)
    block, hyper, data, features = packed
    z = np.full(NUM_ROWS, -1)
    z[:40], z[40:43] = 0, 2
    stats_ = collect(packed, jnp.asarray(z), 3)
    keys = random.split(random.key(3), 4000)
    draws = jax.jit(jax.vmap(lambda key: block.draw(key, hyper, stats_)))(keys)
    rows = np.stack([row_of(data, n) for n in range(NUM_ROWS)]).astype(np.float64)
    d = 0
    for site in block.sites:
        values = {
            role: np.asarray(draws[name], np.float64).reshape(
                4000, 3, site.num_features, *site.event_shape
            )
            for role, name in site.roles
        }
        for role, name in site.roles:
            event = site.event_shape if role == "probs" else ()
            assert draws[name].shape == (4000, 3, *site.feature_shape, *event)
        for i in range(site.num_features):
            for k in range(3):
                x = rows[z == k, d]
                for u in uniforms(kind, features[d], x, values, (slice(None), k, i)):
                    p = stats.kstest(u, "uniform").pvalue
                    assert p > 1e-5, (site.name, i, k, p)
            d += 1


def uniforms(kind, hyper, x, values, at):
    hyper = {k: np.asarray(v, np.float64) for k, v in hyper.items()}
    if kind == "real":
        n, total = len(x), x.sum()
        kappa = hyper["kappa"] + n
        mean = (hyper["kappa"] * hyper["mean"] + total) / kappa
        rate = hyper["rate"] + 0.5 * (
            (x**2).sum() + hyper["kappa"] * hyper["mean"] ** 2 - kappa * mean**2
        )
        variance = values["variance"][at]
        yield stats.invgamma.cdf(variance, hyper["shape"] + n / 2, scale=rate)
        yield stats.norm.cdf(values["loc"][at], mean, np.sqrt(variance / kappa))
        return
    a = hyper["concentration"] + np.bincount(
        x.astype(int), minlength=len(hyper["concentration"])
    )
    probs = values["probs"][at]
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    for c in range(len(a) - 1):
        p, q = probs[:, c], probs[:, c + 1 :].sum(-1)
        p, q = p / (p + q), q / (p + q)
        b = a[c + 1 :].sum()
        yield np.where(
            p < 0.5, special.betainc(a[c], b, p), 1 - special.betainc(b, a[c], q)
        )


SHAPES = np.array([0.01, 0.1, 0.5, 0.999, 1.0, 1.001, 2.5, 30.0, 1e3, 1e4])
NUM_VARIATES = 40_000


def loggamma_cdf(v, a):
    # The lower tail by its leading term, where exp(v) underflows.
    low = np.exp(a * np.minimum(v, -50) - special.gammaln(a + 1))
    return np.where(v < -50, low, special.gammainc(a, np.exp(np.maximum(v, -50))))


@pytest.fixture(scope="module", params=["float32", "float64"])
def variates(request):
    with jax.enable_x64(request.param == "float64"):
        # Shapes side by side: what is rejected and tried again must keep its place.
        a = jnp.broadcast_to(jnp.asarray(SHAPES, request.param), (NUM_VARIATES, 10))
        v = jax.jit(loggamma)(random.key(4), a)
        assert v.shape == a.shape and v.dtype == a.dtype
        return np.asarray(v, np.float64)


def test_log_gamma_variates_follow_their_law(variates):
    # Kolmogorov and Smirnov at 1e-4, mean and variance of the logarithms within 4.5
    # standard errors: false alarm 0.12 % for the ten shapes.
    assert np.isfinite(variates).all()
    for a, v in zip(SHAPES, variates.T, strict=True):
        p = stats.kstest(loggamma_cdf(v, a), "uniform").pvalue
        assert p > 1e-4, (a, p)
        centred = v - special.psi(a)
        error = np.sqrt(special.polygamma(1, a) / len(v))
        assert abs(centred.mean()) < 4.5 * error, a
        square = centred**2
        error = square.std() / np.sqrt(len(v))
        assert abs(square.mean() - special.polygamma(1, a)) < 4.5 * error, a


def test_gamma_variates_have_the_mean_and_variance_of_their_shape(variates):
    # Within 4.5 standard errors; false alarm 1e-4 for the ten shapes.
    for a, v in zip(SHAPES, np.exp(variates).T, strict=True):
        assert abs(v.mean() - a) < 4.5 * np.sqrt(a / len(v)), a
        square = (v - a) ** 2
        assert abs(square.mean() - a) < 4.5 * square.std() / np.sqrt(len(v)), a


def test_log_gamma_variates_are_independent_of_each_other(variates):
    # Rank correlations of neighbours, in either direction: z below 5; false alarm 1e-5.
    ranks = stats.rankdata(variates, axis=0) / len(variates) - 0.5
    scale = 12 * np.sqrt(len(variates))
    for other in (np.roll(ranks, 1, axis=0), np.roll(ranks, 1, axis=1)):
        z = (ranks * other).mean(0) * scale
        assert np.abs(z).max() < 5, z


@pytest.mark.parametrize("size", [1, 7, 1031])
def test_log_gamma_variates_of_any_number(size):
    # Fewer and more than are tried at a time: false alarm 1e-4 each.
    a = jnp.full(size, 0.7)
    v = jax.jit(jax.vmap(lambda key: loggamma(key, a)))(
        random.split(random.key(size), -(-2000 // size))
    )
    assert stats.kstest(loggamma_cdf(np.ravel(v), 0.7), "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    "fn, law",
    [
        (dist.InverseGamma(3.0, 2.0), stats.invgamma(3.0, scale=2.0)),
        (dist.InverseGamma(0.5, 0.1), stats.invgamma(0.5, scale=0.1)),
        (dist.Gamma(3.0, 2.0), stats.gamma(3.0, scale=1 / 2.0)),
        (dist.Normal(3.0, 2.0), stats.norm(3.0, 2.0)),
    ],
)
def test_draw_follows_the_distribution(fn, law):
    # False alarm 1e-4 each.
    values = draw(random.key(5), type(fn)(*(jnp.full(20_000, v) for v in args_of(fn))))
    assert stats.kstest(np.asarray(values, np.float64), law.cdf).pvalue > 1e-4


def args_of(fn):
    return [getattr(fn, name) for name in fn.arg_constraints]


# --- Special functions --------------------------------------------------------


def half_step(a):
    """log Gamma(a + 1/2) - log Gamma(a) in float64."""
    a = np.asarray(a, np.float64)
    series = 0.5 * np.log(a) - 1 / (8 * a) + 1 / (192 * a**3)
    return np.where(a > 1e4, series, special.gammaln(a + 0.5) - special.gammaln(a))


def test_log_gamma_half_step_in_float32():
    # Half of the difference of a count; the error is that of one logarithm.
    a = np.concatenate([np.geomspace(1e-6, 1e9, 2000), np.arange(1, 2000) / 2]).astype(
        np.float32
    )
    expected = half_step(a)
    for fn in (log_gamma_half_step, jax.jit(log_gamma_half_step)):
        error = np.abs(fn(jnp.asarray(a)) - expected)
        assert (error < 5e-7 + 2e-7 * np.abs(expected)).all()


def test_log_gamma_half_step_in_float64(double):
    a = np.geomspace(1e-6, 1e9, 2000)
    # SciPy's own difference of gamma functions is good to this.
    bound = 1e-13 * (10 + np.where(a > 1e4, 0, np.abs(special.gammaln(a))))
    error = np.abs(log_gamma_half_step(jnp.asarray(a)) - half_step(a))
    assert (error < bound).all()
    # At whole numbers by the exact recurrence from Gamma(3/2) / Gamma(1).
    n = np.arange(1, 10_000)
    steps = [math.log1p(0.5 / k) for k in n]
    exact = [math.log(math.pi) / 2 - math.log(2) + math.fsum(steps[: k - 1]) for k in n]
    got = log_gamma_half_step(jnp.asarray(n, float))
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-14)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_log1p_nonnegative(precision):
    with jax.enable_x64(precision == "float64"):
        eps = np.finfo(precision).eps
        x = np.geomspace(1e-30, 1e30, 20_001).astype(precision)
        x = np.concatenate([[0], x, eps * np.linspace(0, 20, 1001)]).astype(precision)
        expected = np.log1p(x.astype(np.float64))
        for fn in (log1p_nonnegative, jax.jit(log1p_nonnegative)):
            got = np.asarray(fn(jnp.asarray(x)), np.float64)
            np.testing.assert_allclose(got, expected, rtol=2 * eps, atol=0)
