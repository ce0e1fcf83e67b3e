# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Ready-made hyperpriors: their points, and that they suit any column of data."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_subanneal.grid import Grid
from numpyro_subanneal.models import grids

X64 = pytest.mark.parametrize("x64", [False, True])
SCALED = pytest.mark.parametrize("make", [grids.mean, grids.variance, grids.rate])

rng = np.random.default_rng(0)
COLUMNS = {
    "normal": rng.normal(size=200),
    "constant": np.full(200, 3.7),
    "zeros": np.zeros(200),
    "cauchy": rng.standard_cauchy(200),
    "far": 1e9 + rng.normal(size=200),
    "far_constant": np.full(200, -1e9),
    "tiny": 1e-6 * rng.normal(size=200),
    "vanishing": 1e-15 * rng.normal(size=200),
    "huge": 1e30 * rng.normal(size=200),
    "largest": np.where(np.arange(200) % 2, 1, -1) * 8e37,
    "counts": rng.poisson(3.0, 200).astype(float),
    "mostly_zero": np.where(np.arange(200) % 100 == 7, 100.0, 0.0),
    "two_values": np.where(np.arange(200) % 2 == 0, 5.0, 6.0),
    "skewed": np.exp(3 * rng.normal(size=200)),
}
TABLE = np.stack([*COLUMNS.values()], 1)


def points(grid):
    """The points as JAX has them, ``[D, G]``."""
    return np.asarray(grid.enumerate_support()).T


def assert_valid(grid, num_columns, num_points):
    values = points(grid)
    assert values.shape == (num_columns, num_points)
    assert values.dtype == jnp.result_type(float)
    assert np.isfinite(values).all()
    assert (np.diff(values, axis=1) > 0).all()
    assert grid.parameter_error() is None
    draws = grid.sample(random.key(0), (30,))
    np.testing.assert_allclose(grid.log_prob(draws), -np.log(num_points), rtol=1e-5)
    return values


# Grids that do not depend on the data.


def test_concentration_and_discount_have_the_points_of_loom():
    concentration = points(grids.concentration())
    discount = points(grids.discount())
    assert len(concentration) == 20 and len(discount) == 10
    assert (np.diff(concentration) > 0).all() and (np.diff(discount) > 0).all()
    assert 0.1 < concentration[0] and concentration[-1] < 100
    # Symmetric in the logarithm, and closest together in its middle.
    np.testing.assert_allclose(concentration * concentration[::-1], 10.0, rtol=1e-5)
    steps = np.diff(np.log(concentration))
    assert steps.argmin() == 9 and steps.argmax() in (0, 18)
    # The first of sin(pi (x - 1/2)) = 2 / 40 - 1.
    x = np.log(concentration[0] / 0.1) / np.log(1000)
    np.testing.assert_allclose(np.sin(np.pi * (x - 0.5)), -0.95, rtol=1e-6)
    expected = 0.5 * np.array([0.05, 0.15, 0.25]) ** 2
    np.testing.assert_allclose(discount[:3], expected, rtol=1e-6)
    np.testing.assert_allclose(discount[-1], 0.5 * 0.95**2, rtol=1e-6)


@pytest.mark.parametrize("traced", [False, True])
def test_joint_prior_is_uniform_on_the_137_pairs_of_loom(traced):
    concentration = grids.concentration(triangular=True)
    value = np.float32(points(concentration))

    def probs(value):
        given = grids.discount(value)
        assert given.batch_shape == (20,)
        return concentration.logits[:, None] + given.logits

    joint = np.exp(jax.jit(probs)(value) if traced else probs(value))
    allowed = joint > 0
    assert allowed.sum() == 137
    np.testing.assert_allclose(joint[allowed], 1 / 137, rtol=1e-5)
    # Fewer discounts for larger concentrations, always the smallest ones.
    assert (np.diff(allowed.sum(1)) <= 0).all()
    assert (np.diff(allowed.astype(int), axis=1) <= 0).all()


def test_without_the_concentration_all_pairs_have_the_same_weight():
    np.testing.assert_allclose(grids.concentration().logits, -np.log(20), rtol=1e-6)
    np.testing.assert_allclose(grids.discount().logits, -np.log(10), rtol=1e-6)


@pytest.mark.parametrize("concentration", [1e-3, 0.1, 100.0, 1e4])
def test_discount_is_defined_beyond_the_grid_of_concentrations(concentration):
    grid = grids.discount(concentration)
    assert grid.batch_shape == () and grid.parameter_error() is None
    assert np.exp(grid.log_prob(points(grid))).sum() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    "make, low, high, num_points",
    [
        (grids.strength, 0.2, 200.0, 24),
        (grids.kappa, 0.01, 10.0, 12),
        (grids.shape, 0.5, 50.0, 12),
    ],
)
def test_log_spaced_grids_span_their_range(make, low, high, num_points):
    values = points(make())
    assert len(values) == num_points
    np.testing.assert_allclose(values[[0, -1]], [low, high], rtol=1e-6)
    np.testing.assert_allclose(
        np.diff(np.log(values)), np.log(high / low) / (num_points - 1), rtol=1e-3
    )
    assert len(points(make(5))) == 5 and make(1).parameter_error() is None


# Grids scaled by the data.


@X64
@SCALED
def test_every_column_gets_finite_increasing_points(make, x64):
    with jax.enable_x64(x64):
        grid = make(TABLE)
        values = assert_valid(grid, len(COLUMNS), points(grid).shape[1])
        assert make is grids.mean or (values > 0).all()


@X64
@SCALED
@pytest.mark.parametrize("masked", [False, True])
def test_traced_data_give_the_same_points(make, masked, x64):
    # In float32, so that the traced program sees the same data.
    table = TABLE.astype(np.float32)
    mask = rng.random(TABLE.shape) < 0.7 if masked else None
    with jax.enable_x64(x64):
        concrete = make(table, mask)
        traced = jax.jit(lambda x, mask: points_of(make(x, mask)))(table, mask)
        assert traced.dtype == jnp.result_type(float)
        assert np.isfinite(traced).all() and (np.diff(traced, axis=1) > 0).all()
        assert make is grids.mean or (traced > 0).all()
        if not x64:
            # Draws of one program are on the grid of the other. At 1e9, where the data
            # are rounded to 64, the points are two roundings apart.
            near = [name for name in COLUMNS if not name.startswith("far")]
            near = [d for d, name in enumerate(COLUMNS) if name in near]
            assert concrete.support(traced.T)[:, near].all()
        expected = points(concrete)
        scale = abs(expected).max(1, keepdims=True)
        np.testing.assert_allclose(traced / scale, expected / scale, rtol=0, atol=1e-6)


def points_of(grid):
    return grid.enumerate_support().T


def test_the_mask_may_be_traced_and_the_data_not():
    mask = rng.random(TABLE.shape) < 0.7
    table = TABLE.astype(np.float32)
    traced = jax.jit(lambda m: points_of(grids.variance(table, m)))(mask)
    np.testing.assert_allclose(traced, points(grids.variance(table, mask)), rtol=1e-4)


@pytest.mark.parametrize("traced", [False, True])
@SCALED
def test_masked_cells_count_nothing_whatever_they_hold(make, traced):
    x = rng.normal(size=(60, 4))
    mask = rng.random((60, 4)) < 0.6
    # Of one column a single cell, of another none, of another all.
    mask[:, 1], mask[:, 2], mask[:, 3] = np.arange(60) == 17, False, True
    evaluate = points
    if traced:
        evaluate = jax.jit(lambda args: points_of(make(*args)))
    results = []
    for filler in (np.nan, np.inf, 1e30, 0.0):
        filled = np.where(mask, x, filler)
        grid = make(filled, mask)
        results.append(evaluate((filled, mask) if traced else grid))
    assert np.isfinite(results[0]).all() and (np.diff(results[0], axis=1) > 0).all()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    # Each column is as if its missing cells were not there.
    for d in (0, 1, 3):
        alone = points(make(x[mask[:, d], d][:, None]))[0]
        np.testing.assert_allclose(results[0][d], alone, rtol=1e-5, atol=1e-6)
    # A column of which nothing is known.
    nothing = points(make(np.zeros((5, 1))))[0]
    np.testing.assert_allclose(results[0][2], nothing, rtol=1e-6)


def test_mask_broadcasts_against_the_table():
    x = np.array([[1.0, np.nan], [2.0, 3.0], [4.0, 9.0], [np.nan, np.nan]])
    rows = np.array([[False], [True], [True], [False]])
    assert_valid(grids.mean(x, rows), 2, 20)
    np.testing.assert_allclose(
        points(grids.mean(x, rows)), points(grids.mean(x[1:3])), rtol=1e-6
    )


def test_mean_covers_the_middle_of_the_column():
    for name, column in COLUMNS.items():
        values = points(grids.mean(column[:, None]))[0].astype(float)
        low, median, high = np.quantile(column, [0.05, 0.5, 0.95])
        assert values[0] <= low + 1e-6 * abs(low), name
        assert values[-1] >= high - 1e-6 * abs(high), name
        steps = np.diff(values)
        assert steps.max() < 2.1 * steps.min()
        # Its points lie within the column, or a spread from the median, or are as
        # close together as float32 allows.
        spread = np.sqrt(points(grids.variance(column[:, None]))[0, -1] / 1.5)
        reach = max(high - median, median - low, spread, 20 * 2.5e-7 * abs(median))
        assert abs(values - median).max() < 1.01 * reach, name


def test_variance_spans_the_squared_spread():
    for name in ("normal", "tiny", "far"):
        values = points(grids.variance(COLUMNS[name][:, None]))[0]
        sd = (1e-6 if name == "tiny" else 1.0) * np.array([0.7, 1.3])
        spread = np.sqrt(values[-1] / 1.5)
        assert sd[0] < spread < sd[1], (name, spread)
        np.testing.assert_allclose(values[-1] / values[0], 500.0, rtol=1e-5)
        np.testing.assert_allclose(np.diff(np.log(values)), np.log(500) / 11, rtol=1e-3)


def test_a_few_wild_cells_do_not_move_the_grids():
    x = rng.normal(size=(1000, 1))
    wild = x.copy()
    wild[:10] = 1e12 * rng.standard_cauchy((10, 1))
    for make in (grids.mean, grids.variance):
        np.testing.assert_allclose(
            points(make(wild)), points(make(x)), rtol=0.1, atol=0.1
        )


def test_spread_of_columns_with_equal_quartiles():
    def spread(x):
        return np.sqrt(points(grids.variance(x))[:, -1] / 1.5)

    x = np.stack([COLUMNS["mostly_zero"], COLUMNS["constant"]], 1)
    np.testing.assert_allclose(spread(x), [x[:, 0].std(), 1.0], rtol=1e-5)


@pytest.mark.parametrize("make", [grids.mean, grids.variance])
def test_grids_follow_the_unit_of_measurement(make):
    x = np.stack([COLUMNS[name] for name in ("normal", "cauchy", "counts")], 1)
    factor = 1000.0 if make is grids.mean else 1000.0**2
    expected = points(make(x)) * factor
    np.testing.assert_allclose(points(make(1000 * x)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "dtype", [np.int32, np.int64, np.uint8, np.float16, np.float32]
)
def test_tables_of_other_types_are_taken(dtype):
    x = rng.poisson(5.0, (50, 2)).astype(dtype)
    for make in (grids.mean, grids.variance):
        expected = points(make(x.astype(float)))
        np.testing.assert_allclose(points(make(x)), expected, rtol=1e-6)
        np.testing.assert_allclose(points(make(jnp.asarray(x))), expected, rtol=1e-6)


def test_a_table_of_one_row_has_grids():
    for make in (grids.mean, grids.variance):
        values = assert_valid(
            make(np.array([[2.0, -1e6]])), 2, len(points(make(np.ones((1, 1))))[0])
        )
        assert values.shape[0] == 2
    assert abs(points(grids.mean(np.array([[2.0]]))).mean() - 2.0) < 1e-5


@pytest.mark.parametrize("traced", [False, True])
def test_long_tables_are_read_evenly(traced):
    # The rows are sorted: all but an even choice would show. More than 2**17 of them,
    # where a product of two indices leaves int32.
    n = 300_000
    x = np.linspace(0, 1, n)[:, None].astype(np.float32)
    mask = (np.arange(n) % 3 > 0)[:, None]
    for args in ((x,), (x, mask)):
        read = lambda *args: points_of(grids.mean(*args))  # noqa: E731
        values = np.asarray((jax.jit(read) if traced else read)(*args))[0]
        np.testing.assert_allclose(values[[0, -1]], [0.05, 0.95], atol=0.082)
        np.testing.assert_allclose(values.mean(), 0.5, atol=1e-3)
    # What a choice of cells may miss altogether, the standard deviation sees.
    x = np.zeros((n, 1), np.float32)
    x[[5, 70_001]] = 1e6
    read = lambda x: points_of(grids.variance(x))  # noqa: E731
    values = (jax.jit(read) if traced else read)(x)
    np.testing.assert_allclose(values[0, -1], 1.5 * x.astype(float).var(), rtol=1e-3)


def test_rate_is_shape_times_variance():
    variance = points(grids.variance(TABLE))
    np.testing.assert_allclose(points(grids.rate(TABLE)), 1.5 * variance, rtol=1e-6)
    shape = np.linspace(1, 2, len(COLUMNS))
    expected = shape[:, None] * variance
    np.testing.assert_allclose(
        points(grids.rate(TABLE, shape=shape)), expected, rtol=1e-6
    )
    traced = jax.jit(lambda a: points_of(grids.rate(TABLE, shape=a)))(shape)
    np.testing.assert_allclose(traced, expected, rtol=1e-5)


@pytest.mark.quickly_compiled
def test_a_learned_prior_has_a_finite_density():
    def model(x):
        with numpyro.plate("columns", x.shape[1], dim=-1):
            for name in ("mean", "variance", "rate"):
                numpyro.sample(name, getattr(grids, name)(x))
            for name in ("kappa", "shape", "strength"):
                numpyro.sample(name, getattr(grids, name)())

    trace = handlers.trace(handlers.seed(model, 0)).get_trace(TABLE)
    values = {name: trace[name]["value"] for name in trace if name != "columns"}
    assert all(value.shape == (len(COLUMNS),) for value in values.values())
    assert all(isinstance(peeled(trace[name]["fn"]), Grid) for name in values)
    expected = -len(COLUMNS) * np.log([20, 12, 12, 12, 12, 24]).sum()
    density = log_density(model, (TABLE,), {}, values)[0]
    np.testing.assert_allclose(density, expected, rtol=1e-5)
    # Values of concrete data, grids of traced data.
    table = TABLE[:, [d for d, name in enumerate(COLUMNS) if "far" not in name]]
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(table)
    values = {name: trace[name]["value"] for name in trace if name != "columns"}
    density = jax.jit(lambda x: log_density(model, (x,), {}, values)[0])(table)
    np.testing.assert_allclose(density, expected * table.shape[1] / len(COLUMNS), 1e-5)


def peeled(fn):
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


# Bad input.


@pytest.mark.parametrize("make", [grids.mean, grids.variance, grids.rate])
def test_a_spread_that_has_no_square_is_refused(make):
    x = np.random.default_rng(0).normal(size=(30, 2)) * [1.0, 1e-20]
    with pytest.raises(ValueError, match="Column 1 .* square .*multiply.*enable_x64"):
        make(x)


@SCALED
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_bad_cells_are_named(make, value):
    x = np.ones((5, 3))
    x[3, 1] = value
    match = rf"Column 1 .* has {value} in row 3;.*`mask`"
    with pytest.raises(ValueError, match=match.replace("+", r"\+")):
        make(x)
    mask = np.ones((5, 3), bool)
    mask[0] = False
    with pytest.raises(ValueError, match="Column 1 .*row 3"):
        make(x, mask)
    mask[3, 1] = False
    make(x, mask)


@pytest.mark.parametrize(
    "mask", [np.ones((5, 2)), np.ones((5, 3), bool), np.ones((4, 5, 2), bool)]
)
def test_bad_masks_are_refused(mask):
    with pytest.raises(ValueError, match=r"`mask` must be boolean .*\(5, 2\)"):
        grids.mean(np.ones((5, 2)), mask)


@pytest.mark.parametrize(
    "x", [np.ones(3), np.ones((0, 2)), [[1.0]], np.ones((2, 2), complex)]
)
def test_what_is_no_table_of_reals_is_refused(x):
    for make in (grids.mean, grids.variance):
        with pytest.raises(ValueError, match="table|dtype"):
            make(x)


@pytest.mark.parametrize("num_points", [0, -1, 2.0, None])
def test_bad_numbers_of_points_are_refused(num_points):
    x = np.ones((3, 1))
    for make in (grids.kappa, grids.shape, grids.strength):
        with pytest.raises(ValueError, match=f"`num_points` .*got {num_points}"):
            make(num_points)
    for make in (grids.mean, grids.variance, grids.rate):
        with pytest.raises(ValueError, match=f"`num_points` .*got {num_points}"):
            make(x, num_points=num_points)


@pytest.mark.parametrize("shape", [0.0, -1.0, np.nan, np.array([1.0, -2.0])])
def test_bad_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="`shape` must be positive"):
        grids.rate(np.ones((3, 2)), shape=shape)
