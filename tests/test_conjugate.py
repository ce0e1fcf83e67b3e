# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
The blocks that pack conjugate pairs, against the scalar case; float32 at large counts
and origins; draws; and special functions. (The laws that every pair obeys are tested in
``test_laws.py``.)

Statistical tests have fixed seeds and no retries; a comment at each states its
false-alarm rate.
"""

from dataclasses import replace
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import numpyro.distributions as dist

from numpyro_subanneal import testing
from numpyro_subanneal.conjugate import dirichlet
from numpyro_subanneal.conjugate.base import (
    Observed,
    SiteShape,
    draw,
    loggamma,
    sum_features,
)
from numpyro_subanneal.conjugate.dirichlet import (
    Codes,
    Counts,
    DirichletCategorical,
    DirichletMultinomial,
)
from numpyro_subanneal.conjugate.normal import NormalInverseGamma
from numpyro_subanneal.conjugate.special import (
    log1p_nonnegative,
    log_gamma_half_step,
)
from numpyro_subanneal.conjugate.vonmises import VonMisesKnownConcentration

# Compiling is most of the time here. Not so quickly where digits of float32 are tested.
quick = pytest.mark.quickly_compiled

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
    if len(values) == 0:
        return pair.empty(hyper)
    return _fold(pair, hyper, jnp.asarray(values))


@partial(jax.jit, static_argnums=0)
def _fold(pair, hyper, values):
    def add(stat, x):
        return pair.add(hyper, stat, x), None

    return lax.scan(add, pair.empty(hyper), values)[0]


def close(a, b, rtol, atol=1e-9):
    """Equal up to rounding: relative for what is large, absolute for what is small."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def oracle(name, values):
    pair, hyper, _ = EXAMPLES[name]
    if pair is NORMAL:
        return testing.normal_log_marginal(np.reshape(values, (-1, 1)), **hyper)
    codes = np.reshape(np.asarray(values, int), (-1, 1))
    return testing.categorical_log_marginal(codes, hyper["concentration"])


# --- Another derivation of the marginals ---------------------------------------


@quick
@by_example
def test_log_marginal_is_the_oracles(name, double):
    pair, hyper, values = read(name)
    for n in range(1, len(values) + 1):
        got = pair.log_marginal(hyper, fold(pair, hyper, values[:n]))
        expected = oracle(name, EXAMPLES[name].values[:n])
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)


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


def test_many_categories_of_a_multinomial_are_scored_as_few(monkeypatch):
    pair, rng = DirichletMultinomial(), np.random.default_rng(0)
    hyper = {"concentration": jnp.asarray(rng.gamma(1.0, size=5))}
    first, second = (
        pair.cell(hyper, jnp.asarray(rng.multinomial(7, np.full(5, 0.2))), 7)
        for _ in range(2)
    )
    table = pair.predictive(hyper, pair.add(hyper, pair.empty(hyper), first))
    few = pair.score(table, second)
    monkeypatch.setattr(dirichlet, "_FEW", 4)
    np.testing.assert_allclose(pair.score(table, second), few, rtol=1e-5)


def test_angles_are_radians():
    pair = VonMisesKnownConcentration()
    assert pair.data_error(np.array([-np.pi, 0.0, 6.2832]), {}) is None
    error = pair.data_error(np.array([0.1, 90.0]), {})
    assert "90 in row 1" in error and "radians" in error and "deg2rad" in error


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


def test_categorical_block_in_float32_is_that_in_float64():
    # Scores to 1e-5 nats a feature at counts up to 10^6; the log marginal to 1e-6 of
    # the gamma functions that it is made of.
    rng = np.random.default_rng(0)
    codes = np.concatenate([np.reshape(x[0], -1) for x in CODES])
    cardinality = count_block().cardinality

    def appraise(stat):
        block = count_block()
        hyper = [{"concentration": jnp.asarray(c, float)} for c in CONCENTRATIONS]
        packed = block.pack(hyper)
        index = jnp.asarray(codes + block.offset, jnp.int32)
        x, zero = Codes(index, None), jnp.int32(0)
        taken = block.take(packed, stat, x, zero, jnp.asarray(False))
        score = block.score(packed, stat, block.tables(packed, stat), taken, x)
        return score, block.log_marginal(packed, stat)

    for n in COUNTS:
        counts = np.concatenate(
            [rng.multinomial(n, np.ones(c) / c, size=2).T for c in cardinality]
        )
        out = []
        for wide in (False, True):
            with jax.enable_x64(wide):
                stat = Counts(np.int32(counts), np.full(2, n, np.int32))
                out.append(jax.tree.map(np.asarray, jax.jit(appraise)(stat)))
        num_features = len(cardinality)
        assert np.abs(out[0][0] - out[1][0]).max() < 1e-5 * num_features, n
        size = num_features * 2 * n * np.log(n + 3) + 10
        assert np.abs(out[0][1] - out[1][1]).max() < 1e-6 * size, n


# --- Blocks -------------------------------------------------------------------

# Several sites of one pair, with features of different shapes.
REAL_SITES = (
    SiteShape("u", (("variance", "u_var"), ("loc", "u_loc")), (2, 2), (), ((), ())),
    SiteShape("v", (("variance", "v_var"), ("loc", "v_loc")), (), (), ((), ())),
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
    SiteShape("a", (("probs", "a_probs"),), (3,), (), ((2,),)),
    SiteShape("b", (("probs", "b_probs"),), (), (), ((5,),)),
    SiteShape("c", (("probs", "c_probs"),), (2, 1), (), ((3,),)),
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


# Which cells count: all of the first site, some of the others, none of one column.
MASKS = {
    sites: tuple(
        None if i == 0 else _rng.random((NUM_ROWS, *s.feature_shape)) < 0.7
        for i, s in enumerate(sites)
    )
    for sites in (REAL_SITES, CODE_SITES)
}
MASKS[CODE_SITES][2][:, 1] = False


def real_block(masked=False):
    (block,) = NORMAL.blocks(masked_sites(REAL_SITES, masked))
    return block


def count_block(masked=False):
    (block,) = DIRICHLET.blocks(masked_sites(CODE_SITES, masked))
    return block


def masked_sites(sites, masked):
    masks = MASKS[sites]
    return [
        replace(s, masked=masked and m is not None)
        for s, m in zip(sites, masks, strict=True)
    ]


def row_of(data, n):
    return np.concatenate([np.reshape(d.value[n], -1) for d in data])


def live_of(block, data, n):
    """Which features of row `n` count."""
    return np.concatenate(
        [
            np.full(site.num_features, True)
            if d.mask is None
            else np.reshape(d.mask[n], -1)
            for d, site in zip(data, block.sites, strict=True)
        ]
    )


class Packed(NamedTuple):
    """A block with hyperparameters and data; and each feature by itself."""

    block: Any
    hyper: Any
    data: tuple
    features: list  # of hyperparameters, one a feature


def pack(kind):
    dtype = jnp.result_type(float)
    kind, *masked = kind.split()
    real = kind == "real"
    sites, columns = (REAL_SITES, REALS) if real else (CODE_SITES, CODES)
    block = (real_block if real else count_block)(bool(masked))
    hyper = REAL_HYPER if real else [{"concentration": c} for c in CONCENTRATIONS]
    hyper = [{k: jnp.asarray(v, dtype) for k, v in h.items()} for h in hyper]
    data = tuple(
        Observed(jnp.asarray(x, dtype if real else jnp.int32), mask)
        for x, mask in zip(
            columns, MASKS[sites] if masked else [None] * len(sites), strict=True
        )
    )
    features = [
        {k: v[index] for k, v in h.items()}
        for h, site in zip(hyper, sites, strict=True)
        for index in np.ndindex(site.feature_shape)
    ]
    return Packed(block, block.pack(hyper), data, features)


KINDS = ["real", "categorical", "real masked", "categorical masked"]
by_kind = pytest.mark.parametrize("kind", KINDS)


@partial(jax.jit, static_argnums=(0, 2))
def collect(kind, z, num_clusters):
    """Statistics of assignments (-1: in none), by adding rows."""
    block, hyper, data, _ = pack(kind)

    def add(stats, n):
        x, live = block.row(hyper, data, n), z[n] >= 0
        return block.add(hyper, stats, x, jnp.maximum(z[n], 0), live), None

    empty = block.empty(hyper, num_clusters)
    return lax.scan(add, empty, jnp.arange(len(z)))[0]


@partial(jax.jit, static_argnums=0)
def figures(kind, stats):
    """Tables and log marginals."""
    block, hyper, _, _ = pack(kind)
    return block.tables(hyper, stats), block.log_marginal(hyper, stats)


@partial(jax.jit, static_argnums=0)
def step(kind, stats, tables, leaves, k, leaving, enters, to, entering):
    """Scores of row `enters` with another taken out, and what follows the move."""
    block, hyper, data, _ = pack(kind)
    taken = block.take(hyper, stats, block.row(hyper, data, leaves), k, leaving)
    x = block.row(hyper, data, enters)
    score = block.score(hyper, stats, tables, taken, x)
    return score, block.put(hyper, stats, tables, taken, x, to, entering)


def scalar_stats(packed, z, num_clusters, num_rows):
    """Statistics of each feature and cluster by the pair itself."""
    block, _, data, features = packed
    rows = np.stack([row_of(data, n) for n in range(num_rows)])
    live = np.stack([live_of(block, data, n) for n in range(num_rows)])
    return [
        [
            fold(
                block.pair,
                hyper,
                jnp.asarray(rows[(z[:num_rows] == k) & live[:, d], d]),
            )
            for k in range(num_clusters)
        ]
        for d, hyper in enumerate(features)
    ]


@quick
@by_kind
def test_block_scores_and_marginals_are_sums_over_features(kind, double):
    packed = pack(kind)
    block, _, data, features = packed
    num_rows, num_clusters = 12, 4
    z = np.array([0, 1, 1, 0, 3, 3, 3, 0, 1, -1, -1, -1])  # cluster 2 is empty
    scalar = scalar_stats(packed, z, num_clusters, num_rows)
    stats = collect(kind, jnp.asarray(z), num_clusters)
    marginal = [
        sum(
            block.pair.log_marginal(h, s[k])
            for h, s in zip(features, scalar, strict=True)
        )
        for k in range(num_clusters)
    ]
    tables, got = figures(kind, stats)
    close(got, np.array(marginal), rtol=1e-10)
    # Rows that share categories with the row that is out, and those that don't; a live
    # removal from a cluster of one row, of three, and none.
    for leaves, enters, live in (
        (4, 4, True),
        (2, 9, True),
        (8, 0, True),
        (0, 10, False),
    ):
        got, _ = step(kind, stats, tables, leaves, z[leaves], live, enters, 0, False)
        left = z.copy()
        if live:
            left[leaves] = -1
        scalar = scalar_stats(packed, left, num_clusters, num_rows)
        cells, counts = row_of(data, enters), live_of(block, data, enters)
        expected = [
            sum(
                block.pair.score(block.pair.predictive(h, s[j]), jnp.asarray(cell))
                for h, s, cell, on in zip(features, scalar, cells, counts, strict=True)
                if on
            )
            for j in range(num_clusters)
        ]
        close(got, np.array(expected), rtol=1e-10)


@quick
@by_kind
def test_block_moves_are_those_of_a_recount(kind, double):
    z = np.array([0, 1, 1, 0, 3, 3, 3, 0, 1, -1, -1, -1])
    stats = collect(kind, jnp.asarray(z), 4)
    tables, _ = figures(kind, stats)
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
        out = leaves, max(z[leaves], 0), leaving
        _, got = step(kind, stats, tables, *out, enters, to, entering)
        moved = z.copy()
        if leaving:
            moved[leaves] = -1
        if entering:
            moved[enters] = to
        expected = collect(kind, jnp.asarray(moved), 4)
        close(got, (expected, figures(kind, expected)[0]), rtol=1e-9, atol=1e-12)


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
    stats = collect(kind, z, num_clusters)
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
    rebuilt = collect(kind, z, num_clusters)
    again = block.tables(hyper, stats)
    return z, (stats, tables), (rebuilt, again)


def assert_in_step(kind, z, moved, rebuilt, drift):
    (stats, tables), (expected, again) = jax.device_get((moved, rebuilt))
    # Tables are those of the statistics, to rounding.
    close(tables, again, rtol=1e-6, atol=1e-5)
    if kind.startswith("categorical"):
        close(stats, expected, rtol=0, atol=0)
        return
    (stats,), (expected,) = stats, expected
    np.testing.assert_array_equal(stats[0], expected[0])
    if kind == "real":
        sizes = np.bincount(z[z >= 0], minlength=stats.shape[-1])
        np.testing.assert_array_equal(stats[0][0], sizes)
    n = np.maximum(stats[0], 1)
    # Columns have a standard deviation of one.
    assert np.abs(stats[1] - expected[1]).max() < drift
    assert np.abs((stats[2] - expected[2]) / n).max() < drift


@pytest.mark.slow
@by_kind
def test_tables_and_statistics_stay_in_step_over_3e5_moves(kind):
    # Of clusters that are never emptied for long; fewer moves are in `test_laws.py`.
    z, moved, rebuilt = walk(
        random.key(2), kind=kind, num_rows=NUM_ROWS, num_clusters=3, num_moves=300_000
    )
    assert_in_step(kind, np.asarray(z), moved, rebuilt, drift=1e-3)


@pytest.mark.parametrize("shape", [(70, 64), (300, 16), (9, 64), (5000,)], ids=str)
def test_sums_over_features_are_right_to_rounding_however_they_are_made(shape):
    each = np.random.default_rng(0).normal(-3, 2, shape).astype(np.float32)
    each[2, ...] = -40.0
    if each.ndim > 1:
        each[1, 3] = -np.inf
    expected = each.astype(np.float64).sum(0)
    # Three chains, as when they are vectorized.
    chains = np.stack([each, 2 * each, each[::-1]])
    got = jax.vmap(partial(sum_features, view=None))(chains)
    assert got.dtype == np.float32
    for factor, sums in zip((1, 2, 1), got, strict=True):
        np.testing.assert_allclose(sums, factor * expected, rtol=3e-6)
    np.testing.assert_allclose(sum_features(each, None), expected, rtol=3e-6)


def test_pack_lays_features_end_to_end(double):
    packed = real_block().pack(REAL_HYPER)
    # The mean becomes the origin of the values.
    np.testing.assert_array_equal(packed.origin, [0.0, 1.0, -1.0, 0.5, 2.0])
    np.testing.assert_array_equal(packed.values["mean"], np.zeros(5))
    np.testing.assert_array_equal(packed.values["kappa"], [0.1, 1.0, 2.0, 0.5, 0.3])
    packed = count_block().pack([{"concentration": np.ones(c)} for c in (2, 5, 3)])
    np.testing.assert_array_equal(packed.category, np.ones(2 * 3 + 5 + 3 * 2))
    np.testing.assert_array_equal(packed.total, [2, 2, 2, 5, 3, 3])


# --- Draws --------------------------------------------------------------------


@quick
@by_kind
def test_block_draws_follow_the_posterior_of_each_feature(kind):
    # Every cluster's parameters through the distribution functions of their posteriors,
    # as written here, are uniform: Kolmogorov and Smirnov's test at 1e-5. Three
    # clusters, one of them empty; false alarm 0.08 % for 84 tests.
    packed = pack(kind)
    block, hyper, data, features = packed
    z = np.full(NUM_ROWS, -1)
    z[:40], z[40:43] = 0, 2
    stats_ = collect(kind, jnp.asarray(z), 3)
    keys = random.split(random.key(3), 4000)
    draws = jax.jit(jax.vmap(lambda key: block.draw(key, hyper, stats_)))(keys)
    rows = np.stack([row_of(data, n) for n in range(NUM_ROWS)]).astype(np.float64)
    live = np.stack([live_of(block, data, n) for n in range(NUM_ROWS)])
    d = 0
    for site in block.sites:
        values = {
            role: np.asarray(draws[name], np.float64).reshape(
                4000, 3, site.num_features, *site.role_shapes[0]
            )
            for role, name in site.roles
        }
        for _, name in site.roles:
            shape = 4000, 3, *site.feature_shape, *site.role_shapes[0]
            assert draws[name].shape == shape
        for i in range(site.num_features):
            for k in range(3):
                x = rows[(z == k) & live[:, d], d]
                for u in uniforms(kind, features[d], x, values, (slice(None), k, i)):
                    p = stats.kstest(u, "uniform").pvalue
                    assert p > 1e-5, (site.name, i, k, p)
            d += 1


def uniforms(kind, hyper, x, values, at):
    hyper = {k: np.asarray(v, np.float64) for k, v in hyper.items()}
    if kind.startswith("real"):
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


@quick
@pytest.mark.parametrize("size", [1, 7, 1031])
def test_log_gamma_variates_of_any_number(size):
    # Fewer and more than are tried at a time: false alarm 1e-4 each.
    a = jnp.full(size, 0.7)
    v = jax.jit(jax.vmap(lambda key: loggamma(key, a)))(
        random.split(random.key(size), -(-2000 // size))
    )
    assert stats.kstest(loggamma_cdf(np.ravel(v), 0.7), "uniform").pvalue > 1e-4


@quick
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
    exact, high, low = [], 0.0, 0.0  # a sum, and what it is short of by rounding
    for k in n:
        exact.append(math.log(math.pi) / 2 - math.log(2) + high)
        terms = high, low, math.log1p(0.5 / k)
        high = math.fsum(terms)
        low = math.fsum([*terms, -high])
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
