# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
The distribution on a grid: its law, its shapes, and as a site of a NumPyro model.

Statistical tests use fixed keys. A comment at each states its false-alarm rate: how
often it would fail for a correct sampler if the key were drawn afresh.
"""

import math
import pickle
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.contrib.funsor as contrib_funsor
from numpyro.contrib.funsor import config_enumerate, infer_discrete
import numpyro.distributions as dist
from numpyro.infer import (
    MCMC,
    NUTS,
    DiscreteHMCGibbs,
    Predictive,
    init_to_feasible,
    init_to_median,
    init_to_sample,
    init_to_uniform,
)
from numpyro.infer.inspect import get_dependencies, get_model_relations
from numpyro.infer.util import log_density

from numpyro_subanneal.grid import Grid, GridReparam, index_grids

# Nearly all of the time is that of compiling. (Where rounding counts: as it is in use.)
pytestmark = pytest.mark.quickly_compiled
rounds = pytest.mark.quickly_compiled(False)

# Unsorted, one value twice, one without weight, negative values and zero.
VALUES = [3.0, -1.0, 0.0, 3.0, 0.25, 100.0]
WEIGHTS = [1.0, 2.0, 4.0, 0.5, 0.0, 2.5]
# Points and weights of their own in each element of a batch (2, 3).
BATCH_VALUES = np.array(VALUES) * np.array([1.0, 2.0, 5.0])[:, None]
BATCH_WEIGHTS = np.array([WEIGHTS, [5.0, 1.0, 0.0, 2.0, 1.0, 1.0]])[:, None]


def mass(values, weights):
    """Probability of each distinct value, by a dictionary in float64."""
    table = {}
    for v, w in zip(values, weights, strict=True):
        table[float(v)] = table.get(float(v), 0.0) + float(w) / math.fsum(weights)
    return table


def batch_grid():
    return Grid(BATCH_VALUES, BATCH_WEIGHTS)


# The 1e-9 points of chi-square with 1, ..., 4 degrees of freedom.
CHI_SQUARE = [37.33, 41.45, 44.84, 47.86]


def chi_square(draws, table):
    """Pearson's statistic, and the value that it exceeds once in 1e9."""
    expected = {v: p * len(draws) for v, p in table.items() if p > 0}
    assert set(np.unique(draws).tolist()) == set(expected)
    statistic = sum((np.sum(draws == v) - e) ** 2 / e for v, e in expected.items())
    return statistic, CHI_SQUARE[len(expected) - 2]


# The probability function.


def test_log_prob_is_that_of_the_values_with_weights_of_equal_ones_added():
    grid = Grid(VALUES, WEIGHTS)
    for value, p in mass(VALUES, WEIGHTS).items():
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(grid.log_prob(value), np.log(p), rtol=1e-6)
    assert grid.log_prob(0.25) == -np.inf  # a point of weight 0


def test_without_weights_each_point_has_the_same():
    grid = Grid(VALUES)
    table = mass(VALUES, np.ones(6))
    probs = np.exp(grid.log_prob(np.array(VALUES)))
    np.testing.assert_allclose(probs, [table[v] for v in VALUES], rtol=1e-6)
    np.testing.assert_array_equal(grid.weights, np.ones(6))


def test_probabilities_of_distinct_values_sum_to_one():
    total = np.exp(Grid(VALUES, WEIGHTS).log_prob(np.unique(VALUES))).sum()
    assert total == pytest.approx(1.0, abs=1e-6)
    logits = Grid(VALUES, WEIGHTS).logits
    np.testing.assert_allclose(np.exp(logits), np.array(WEIGHTS) / 10, rtol=1e-6)


@pytest.mark.parametrize(
    "value", [-1.5, -np.inf, np.inf, np.nan, 0.01, 2.99, 3.05, 99.9, 1e-4, 1e30]
)
def test_log_prob_off_the_grid_is_minus_infinity(value):
    grid = Grid(VALUES, WEIGHTS, validate_args=False)
    assert grid.log_prob(value) == -np.inf
    assert not grid.support(value)


def test_mean_variance_entropy_and_cdf_are_those_of_the_table():
    grid = batch_grid()
    for name in ("mean", "variance"):
        assert getattr(grid, name).shape == (2, 3)
    cdf = grid.cdf(np.full((4, 1, 1), 3.0))
    assert cdf.shape == (4, 2, 3) and grid.entropy().shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        table = mass(BATCH_VALUES[j], BATCH_WEIGHTS[i, 0])
        v, p = np.array([*table]), np.array([*table.values()])
        mean = (v * p).sum()
        np.testing.assert_allclose(grid.mean[i, j], mean, rtol=1e-6)
        variance = (p * (v - mean) ** 2).sum()
        np.testing.assert_allclose(grid.variance[i, j], variance, rtol=1e-5)
        q = p[p > 0]
        np.testing.assert_allclose(grid.entropy()[i, j], -(q * np.log(q)).sum(), 1e-6)
        np.testing.assert_allclose(cdf[2, i, j], p[v <= 3.0].sum(), rtol=1e-6)
    assert Grid(VALUES, WEIGHTS).cdf(100.0) == pytest.approx(1.0, abs=1e-6)
    assert Grid(VALUES, WEIGHTS).cdf(-2.0) == 0.0


@pytest.mark.parametrize("scale", [1e-300, 1e-40, 1e300])
def test_weights_count_up_to_any_factor(scale):
    grid = Grid([1.0, 2.0], np.array([1.0, 3.0]) * scale)
    np.testing.assert_allclose(grid.log_prob(2.0), np.log(0.75), rtol=1e-6)


def test_weights_far_below_the_largest_are_kept():
    grid = Grid([1.0, 2.0], [1.0, 1e-200])
    np.testing.assert_allclose(grid.log_prob(2.0), -200 * np.log(10), rtol=1e-6)


@rounds
@pytest.mark.parametrize(
    "values",
    [
        np.geomspace(1e-8, 1e8, 100),
        1e5 + np.arange(20.0),
        np.linspace(-3, 3, 21) * 1e-9,
        [1e9, 1e9 + 64, 1e9 + 128],  # next to each other in float32
        [7.0],
    ],
)
def test_neighbouring_points_are_told_apart(values):
    grid = Grid(values)
    points = np.asarray(values)
    expected = np.full(len(points), -np.log(len(points)))
    np.testing.assert_allclose(grid.log_prob(points), expected, rtol=1e-6, atol=1e-7)
    if points[0] != 1e9:  # where there is no float between them
        assert not grid.support(points[:-1] + 0.3 * np.diff(points)).any()


@rounds
def test_rounding_confuses_no_points_a_few_units_in_the_last_place_apart():
    ulp = np.float32(64)
    grid = Grid(np.float32(1e9) + ulp * np.float32([0, 8, 16]))
    values = np.float32(1e9) + ulp * np.arange(17, dtype=np.float32)
    near = np.abs(np.arange(17)[:, None] - [0, 8, 16]).min(1) < 2
    np.testing.assert_array_equal(grid.support(values), near)


@rounds
def test_the_same_grid_with_other_rounding_is_recognised():
    columns = np.random.default_rng(0).normal(size=(5, 1)) * 1e4
    values = columns + np.linspace(-3, 3, 20)
    other = jnp.asarray(columns) - 3 + jnp.arange(20) * jnp.float32(6 / 19)
    assert (np.float32(values) != other).any()
    assert Grid(values).support(other.T[..., None, :]).shape == (20, 1, 5)
    assert Grid(values).support(other.T).all()
    np.testing.assert_allclose(Grid(values).log_prob(other.T), -np.log(20), rtol=1e-6)


@rounds
def test_draws_of_single_precision_are_on_the_grid_in_double_and_back():
    draws = Grid([0.1, 0.7]).sample(random.key(0), (20,))
    with jax.enable_x64(True):
        grid = Grid([0.1, 0.7])
        again = grid.sample(random.key(0), (20,))
        assert again.dtype == jnp.float64
        log_prob = grid.log_prob(draws)
        assert log_prob.dtype == jnp.float64
        np.testing.assert_allclose(log_prob, -np.log(2), rtol=1e-14)
        again = np.asarray(again)
    assert draws.dtype == jnp.float32
    np.testing.assert_allclose(Grid([0.1, 0.7]).log_prob(again), -np.log(2), rtol=1e-6)


def test_gradient_with_respect_to_the_weights():
    def log_prob(weights, value):
        return Grid([1.0, 2.0, 4.0], weights, validate_args=True).log_prob(value)

    gradient = jax.grad(log_prob)(jnp.array([1.0, 3.0, 0.0]), 2.0)
    np.testing.assert_allclose(gradient, [-1 / 4, 1 / 3 - 1 / 4, 0.0], atol=1e-6)


# Draws.


# Six statistics, each above its bound once in 1e9.
def test_draws_have_the_frequencies_of_the_weights():
    draws = np.asarray(batch_grid().sample(random.key(1), (20_000,)))
    for i, j in np.ndindex(2, 3):
        table = mass(BATCH_VALUES[j], BATCH_WEIGHTS[i, 0])
        statistic, bound = chi_square(draws[:, i, j], table)
        assert statistic < bound, (i, j, statistic)


# Once in 1e9.
@pytest.mark.parametrize("shape", [(50, 400), (1, 20_000), (20_000, 1)])
def test_an_expanded_grid_draws_independently_by_the_weights(shape):
    draws = Grid(VALUES, WEIGHTS).expand(shape).sample(random.key(2))
    assert draws.shape == shape
    statistic, bound = chi_square(np.ravel(draws), mass(VALUES, WEIGHTS))
    assert statistic < bound, statistic


# Four statistics, each above its bound once in 1e9, and four pairs of elements whose
# agreement has a z score below 6, once in 5e8 each.
@pytest.mark.parametrize("reparam", [False, True])
def test_elements_of_a_plate_are_drawn_independently(reparam):
    def model():
        with numpyro.plate("b", 2, dim=-2), numpyro.plate("a", 2, dim=-1):
            numpyro.sample("v", Grid([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]], [1, 2, 1]))

    model = index_grids(model) if reparam else model
    draws = np.asarray(Predictive(model, num_samples=10_000)(random.key(3))["v"])
    assert draws.shape == (10_000, 2, 2)
    draws = draws / np.array([1.0, 2.0])
    for i, j in np.ndindex(2, 2):
        statistic, bound = chi_square(draws[:, i, j], {1.0: 0.25, 2.0: 0.5, 3.0: 0.25})
        assert statistic < bound, statistic
    flat = draws.reshape(-1, 4)
    for i, j in [(0, 1), (0, 2), (1, 3), (0, 3)]:
        # Two equal by chance with probability 3/8.
        z = (flat[:, i] == flat[:, j]).mean() - 3 / 8
        assert abs(z) < 6 * np.sqrt(3 / 8 * 5 / 8 / 10_000), z


# Shapes and transformations.


def test_parameters_broadcast_to_the_batch_shape():
    grid = batch_grid()
    assert grid.batch_shape == (2, 3) and grid.event_shape == ()
    assert grid.sample(random.key(0)).shape == (2, 3)
    draws = grid.sample(random.key(0), (5, 4))
    assert draws.shape == (5, 4, 2, 3)
    log_prob = grid.log_prob(draws)
    assert log_prob.shape == (5, 4, 2, 3) and jnp.isfinite(log_prob).all()
    for i, j in np.ndindex(2, 3):
        table = mass(BATCH_VALUES[j], BATCH_WEIGHTS[i, 0])
        expected = np.log([table[float(v)] for v in draws[..., i, j].ravel()])
        np.testing.assert_allclose(log_prob[..., i, j].ravel(), expected, rtol=1e-6)
    assert Grid(VALUES, BATCH_WEIGHTS[:, 0]).batch_shape == (2,)
    assert Grid(VALUES).sample(random.key(0), (0, 3)).shape == (0, 3)


def test_value_broadcasts_against_the_batch():
    grid = batch_grid()
    expected = [
        [mass(BATCH_VALUES[j], BATCH_WEIGHTS[i, 0]).get(6.0, 0.0) for j in range(3)]
        for i in range(2)
    ]
    for shape in [(), (1,), (3,), (2, 1), (7, 1, 1)]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 6.0 is on one of the three grids
            log_prob = grid.log_prob(np.full(shape, 6.0))
        assert log_prob.shape == np.broadcast_shapes(shape, (2, 3))
        np.testing.assert_allclose(np.exp(log_prob) - expected, 0.0, atol=1e-6)
    assert Grid(VALUES).log_prob(np.full((4, 5), 3.0)).shape == (4, 5)


def test_support_is_enumerated_on_the_left():
    grid = Grid(VALUES)
    np.testing.assert_array_equal(grid.enumerate_support(), VALUES)
    assert grid.has_enumerate_support and grid.is_discrete
    grid = batch_grid()
    support = grid.enumerate_support()
    assert support.shape == (6, 2, 3)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(support[:, i, j], BATCH_VALUES[j])
    np.testing.assert_array_equal(
        grid.enumerate_support(expand=False), BATCH_VALUES.T[:, None]
    )
    shared = Grid(VALUES, BATCH_WEIGHTS)
    assert shared.batch_shape == (2, 1)
    assert shared.enumerate_support(expand=False).shape == (6, 1, 1)
    assert shared.enumerate_support().shape == (6, 2, 1)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (4, 3), (5, 2, 3)])
def test_expand_keeps_the_points_of_each_element(shape):
    grid = Grid(BATCH_VALUES, WEIGHTS).expand(shape)
    assert grid.batch_shape == shape and grid.has_enumerate_support
    support = grid.enumerate_support()
    assert support.shape == (6, *shape)
    points = np.broadcast_to(BATCH_VALUES, (*shape, 6))
    np.testing.assert_array_equal(support, np.moveaxis(points, -1, 0))
    unexpanded = grid.enumerate_support(expand=False)
    np.testing.assert_array_equal(np.broadcast_to(unexpanded, support.shape), support)
    draws = grid.sample(random.key(0), (40,))
    assert draws.shape == (40, *shape)
    assert jnp.isfinite(grid.log_prob(draws)).all()
    assert len(np.unique(np.asarray(draws).reshape(40, -1), axis=1)) == 40
    assert grid.mean.shape == grid.variance.shape == grid.entropy().shape == shape
    assert grid.log_prob(0.0).shape == shape


def test_expand_to_a_shape_that_does_not_fit_is_refused():
    for grid in (Grid(BATCH_VALUES), batch_grid(), Grid(VALUES, BATCH_WEIGHTS)):
        for shape in [(4,), (2,), (3, 1), ()]:
            with pytest.raises(ValueError, match="[Bb]roadcast"):
                grid.expand(shape)


def test_expand_of_a_grid_without_variation_is_enumerated():
    for grid in (Grid(VALUES), Grid([[VALUES]]), Grid(VALUES, BATCH_WEIGHTS)):
        expanded = grid.expand((4, 2, 3))
        assert expanded.enumerate_support(expand=False).shape == (6, 1, 1, 1)
        assert expanded.enumerate_support().shape == (6, 4, 2, 3)
        draws = expanded.sample(random.key(0), (5,))
        assert draws.shape == (5, 4, 2, 3)
        assert expanded.log_prob(draws).shape == draws.shape


@rounds
@pytest.mark.parametrize("x64", [False, True])
def test_jit_and_vmap_change_nothing(x64):
    def draw(key, values, weights):
        grid = Grid(values, weights, validate_args=True)
        value = grid.sample(key)
        scores = grid.log_prob(jnp.stack([value, values[1]]))
        return value, scores, grid.mean, grid.entropy(), grid.cdf(value)

    with jax.enable_x64(x64):
        keys = random.split(random.key(0), 3)
        values, weights = jnp.asarray(BATCH_VALUES), jnp.asarray(BATCH_WEIGHTS[:1, 0])
        batched = jax.jit(jax.vmap(draw, (0, 0, None)))(keys, values, weights[0])
        for i in range(3):
            single = draw(keys[i], BATCH_VALUES[i], WEIGHTS)
            for a, b in zip(batched, single, strict=True):
                assert a.dtype == b.dtype == (jnp.float64 if x64 else jnp.float32)
                np.testing.assert_allclose(a[i], b, rtol=1e-12 if x64 else 2e-6)


GRIDS = {
    "weights": Grid(VALUES, WEIGHTS),
    "uniform": Grid(VALUES),
    "batch": batch_grid(),
    "expanded": Grid(BATCH_VALUES).expand((4, 3)),
    "expanded_same": Grid(VALUES, WEIGHTS).expand((4, 3)),
}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_grids_survive_flattening_pickling_and_jit(grid):
    leaves, treedef = jax.tree.flatten(grid)
    draws = grid.sample(random.key(0))
    for other in (
        jax.tree.unflatten(treedef, leaves),
        pickle.loads(pickle.dumps(grid)),
        jax.jit(lambda g: g)(grid),
    ):
        assert type(other) is type(grid) and other.batch_shape == grid.batch_shape
        np.testing.assert_array_equal(other.sample(random.key(0)), draws)
        np.testing.assert_allclose(other.log_prob(draws), grid.log_prob(draws), 2e-6)
    # Placeholders, as JAX passes them, are not looked at.
    jax.tree.unflatten(treedef, [object()] * len(leaves))


def test_vmap_over_grids_as_pytrees():
    for grid in (Grid(jnp.asarray(BATCH_VALUES)), Grid(BATCH_VALUES, BATCH_VALUES**2)):
        log_prob = jax.vmap(lambda g: g.log_prob(jnp.zeros(())))(grid)
        np.testing.assert_allclose(log_prob, grid.log_prob(0.0), rtol=1e-6)


def test_constraint_is_a_pytree_with_equality():
    support = Grid(VALUES).support
    assert support.is_discrete and support.event_dim == 0
    assert support == Grid(np.array(VALUES)).support
    assert support != Grid(VALUES[1:]).support
    assert support != dist.constraints.real
    assert "GridPoints" in repr(support) and "100." in repr(support)
    assert jax.jit(lambda c: c)(support).eq(support)
    checked = jax.jit(lambda c, x: c(x))(support, jnp.array([0.25, 0.3]))
    np.testing.assert_array_equal(checked, [True, False])
    assert isinstance(support(np.array([0.25, 0.3])), np.ndarray)
    independent = dist.constraints.independent(support, 1)
    np.testing.assert_array_equal(
        independent(np.array([[0.0, 3.0], [0.0, 4.0]])), [1, 0]
    )


def test_support_of_a_batch_tests_each_element_by_its_own_points():
    support = Grid(BATCH_VALUES).support
    np.testing.assert_array_equal(support(np.full(3, 6.0)), [False, True, False])
    np.testing.assert_array_equal(
        support(np.array([[15.0], [3.0]])), [[False, False, True], [True, False, False]]
    )


@pytest.mark.parametrize("values, shape", [(VALUES, (4, 2)), (BATCH_VALUES, (5, 3))])
def test_feasible_values_are_on_the_grid(values, shape):
    support = Grid(values).support
    feasible = support.feasible_like(jnp.zeros(shape))
    assert feasible.shape == shape and support(feasible).all()


def test_masked_elements_count_nothing():
    mask = np.array([True, False, True])
    grid = Grid(BATCH_VALUES, WEIGHTS).mask(mask)
    log_prob = grid.log_prob(jnp.array([0.0, np.nan, 15.0]))
    np.testing.assert_allclose(np.exp(log_prob), [0.4, 1.0, 0.15], rtol=1e-6)


# As a site of a NumPyro model.

X = np.array([[0.3, -2.0, 40.0], [-0.2, 1.0, -60.0], [0.1, 2.5, 20.0]])
SCALES = np.array(
    [[0.1, 1.0, 10.0, 50.0], [0.5, 2.0, 4.0, 8.0], [5.0, 30.0, 50.0, 70.0]]
)
SCALE_WEIGHTS = np.array([1.0, 2.0, 1.0, 0.5])


def model(x, scales=SCALES):
    with numpyro.plate("columns", 3, dim=-1):
        scale = numpyro.sample("scale", Grid(scales, SCALE_WEIGHTS))
        with numpyro.plate("rows", len(x), dim=-2):
            numpyro.sample("x", dist.Normal(0.0, scale), obs=x)


def joint_table():
    """Log joint of each column and scale ``[3, 4]``, by NumPy."""
    scales = SCALES[:, None]
    log_lik = -0.5 * (X.T[..., None] / scales) ** 2 - np.log(scales)
    log_lik = log_lik.sum(1) - 1.5 * np.log(2 * np.pi)
    return log_lik + np.log(SCALE_WEIGHTS / SCALE_WEIGHTS.sum())


def posterior_table():
    table = np.exp(joint_table())
    return table / table.sum(1, keepdims=True)


def test_log_density_adds_the_log_probability():
    for index in [(0, 1, 2), (3, 0, 1)]:
        scale = SCALES[np.arange(3), index]
        value, trace = log_density(model, (X,), {}, {"scale": scale})
        expected = joint_table()[np.arange(3), index].sum()
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert trace["scale"]["fn"].batch_shape == (3,)


def test_model_traces_and_predicts():
    trace = handlers.trace(handlers.seed(model, random.key(0))).get_trace(X)
    assert trace["scale"]["value"].shape == (3,)
    draws = Predictive(handlers.uncondition(model), num_samples=5)(random.key(1), X)
    assert draws["scale"].shape == (5, 3) and draws["x"].shape == (5, 3, 3)
    assert Grid(SCALES).support(draws["scale"]).all()
    again = Predictive(model, {"scale": draws["scale"]})(random.key(2), X)
    assert set(again) == {"x"}


def test_dependencies_of_a_model_are_found():
    dependencies = get_dependencies(model, (X,))["prior_dependencies"]
    assert set(dependencies["x"]) == {"x", "scale"}
    assert get_model_relations(model, (X,))["sample_dist"]["scale"] == "Grid"


def test_a_site_in_a_scan_has_the_batch_of_the_steps():
    def random_walk(xs):
        def step(carry, x):
            carry = carry + numpyro.sample("step", Grid(x, [1.0, 2.0]))
            return carry, carry

        return scan(step, 0.0, xs)

    xs = jnp.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    trace = handlers.trace(handlers.seed(random_walk, random.key(0))).get_trace(xs)
    site = trace["step"]
    assert site["fn"].batch_shape == (3,)
    assert np.isfinite(site["fn"].log_prob(site["value"])).all()


@pytest.mark.parametrize(
    "strategy", [init_to_uniform, init_to_sample, init_to_median, init_to_feasible]
)
def test_init_strategies_leave_a_grid_to_its_prior(strategy):
    seeded = handlers.seed(handlers.substitute(model, substitute_fn=strategy), 0)
    trace = handlers.trace(seeded).get_trace(X)
    assert Grid(SCALES).support(trace["scale"]["value"]).all()


# By enumeration.


def test_enumerated_density_is_the_sum_over_the_grid():
    enumerated = contrib_funsor.enum(config_enumerate(index_grids(model)), -3)
    with np.errstate(all="raise"):
        value, _ = contrib_funsor.log_density(enumerated, (X,), {}, {})
    expected = np.log(np.exp(joint_table()).sum(1)).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-6)


# Three statistics, each above its bound once in 1e9.
@pytest.mark.parametrize("traced", [False, True])
def test_enumerated_draws_have_the_normalised_probabilities(traced):
    enumerated = config_enumerate(index_grids(model))

    def draw(key, scales):
        posterior = infer_discrete(enumerated, first_available_dim=-3, rng_key=key)
        trace = handlers.trace(handlers.seed(posterior, key)).get_trace(X, scales)
        return trace["scale"]["value"], trace["scale_index"]["value"]

    keys = random.split(random.key(4), 4000)
    if traced:
        scale, index = jax.jit(jax.vmap(draw, (0, None)))(keys, jnp.asarray(SCALES))
    else:
        scale, index = jax.jit(jax.vmap(lambda key: draw(key, SCALES)))(keys)
    assert scale.shape == (4000, 3)
    np.testing.assert_array_equal(scale, np.float32(SCALES)[np.arange(3), index])
    for d, p in enumerate(posterior_table()):
        likely = p > 1e-3  # the others in one class
        counts = np.bincount(index[:, d], minlength=4)
        counts, p = ([*t[likely], t[~likely].sum()] for t in (counts, p))
        statistic = sum(
            (n - 4000 * q) ** 2 / (4000 * max(q, 1e-4))
            for n, q in zip(counts, p, strict=True)
        )
        assert statistic < CHI_SQUARE[3], (d, statistic)


def test_enumeration_by_values_is_refused_and_names_the_way_out():
    def located():
        numpyro.sample(
            "x", dist.Normal(numpyro.sample("loc", Grid(VALUES)), 1.0), obs=1
        )

    for sample in (
        lambda: infer_discrete(config_enumerate(located), -1, rng_key=random.key(0))(),
        lambda: MCMC(NUTS(config_enumerate(located)), num_warmup=1, num_samples=1).run(
            random.key(0)
        ),
    ):
        with pytest.raises(ValueError, match=r"int32.*`index_grids\(model\)`"):
            sample()
    for value in (np.array([1, 2]), jnp.arange(3), np.array([True])):
        with pytest.raises(ValueError, match="astype"):
            Grid([1, 2]).log_prob(value)
    # A number that someone writes is a value.
    np.testing.assert_allclose(Grid([1, 2]).log_prob(2), np.log(0.5), rtol=1e-6)


def test_masking_does_not_hide_indices():
    with pytest.raises(ValueError, match="index_grids"):
        Grid([1.0, 2.0]).expand((2,)).mask(np.array([True, False])).log_prob(
            np.arange(2)
        )


@pytest.mark.parametrize("method", ["nuts", "discrete_gibbs"])
def test_kernels_of_numpyro_sample_an_indexed_grid(method):
    def two_levels(x):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        scale = numpyro.sample("scale", Grid([0.1, 3.0], [1.0, 3.0]))
        numpyro.sample("x", dist.Normal(loc, scale), obs=x)

    model = index_grids(two_levels)
    if method == "nuts":
        kernel = NUTS(config_enumerate(model))
    else:
        kernel = DiscreteHMCGibbs(NUTS(model))
    mcmc = MCMC(kernel, num_warmup=300, num_samples=3000, progress_bar=False)
    mcmc.run(random.key(0), 1.5)
    loc = np.asarray(mcmc.get_samples()["loc"], np.float64)
    # loc is a mixture of two normals: of their posterior weights, means and variances.
    scale = np.array([0.1, 3.0])
    marginal = 1 + scale**2
    weight = np.array([1, 3]) * np.exp(-0.5 * 1.5**2 / marginal) / np.sqrt(marginal)
    mean = (weight * 1.5 / marginal).sum() / weight.sum()
    # A chain of at least 200 effective draws misses by 0.4, 6 standard errors, once
    # in 1e9.
    assert abs(loc.mean() - mean) < 0.4, (loc.mean(), mean)
    if method == "discrete_gibbs":
        draws = mcmc.get_samples()
        share = (draws["scale"] == 3.0).mean()
        expected = weight[1] / weight.sum()
        # Likewise 0.2 of a share with standard error 0.034.
        assert abs(share - expected) < 0.2, (share, expected)
        np.testing.assert_array_equal(draws["scale"] == 3.0, draws["scale_index"] == 1)


# The index.


def test_index_grids_leaves_other_sites_and_given_values_alone():
    def mixed():
        numpyro.sample("k", dist.Categorical(jnp.ones(3) / 3))
        numpyro.sample("a", Grid(VALUES))
        numpyro.sample("b", Grid(VALUES), obs=3.0)
        numpyro.sample("c", Grid(VALUES))

    given = handlers.substitute(mixed, {"c": jnp.asarray(-1.0)})
    trace = handlers.trace(handlers.seed(index_grids(given), 0)).get_trace()
    kinds = {name: site["type"] for name, site in trace.items()}
    assert kinds == {
        "k": "sample",
        "a_index": "sample",
        "a": "deterministic",
        "b": "sample",
        "c": "sample",
    }
    assert trace["b"]["is_observed"] and trace["c"]["value"] == -1.0
    assert trace["a"]["value"] == np.float32(VALUES)[trace["a_index"]["value"]]


@pytest.mark.parametrize("kind", ["expanded", "event", "masked", "all"])
def test_wrapped_grids_are_indexed_with_the_same_density(kind):
    mask = np.array([True, False, True])

    def model():
        fn = Grid(BATCH_VALUES, WEIGHTS)
        if kind == "expanded":
            fn = Grid(VALUES, WEIGHTS).expand((3,))
        if kind in ("masked", "all"):
            fn = fn.mask(mask)
        if kind in ("event", "all"):
            fn = fn.expand((4, 3)).to_event(1)
        numpyro.sample("v", fn)

    trace = handlers.trace(handlers.seed(index_grids(model), 0)).get_trace()
    fn = handlers.trace(handlers.seed(model, 0)).get_trace()["v"]["fn"]
    index = trace["v_index"]
    assert trace["v"]["value"].shape == fn.shape() == index["fn"].shape()
    expected = fn.log_prob(trace["v"]["value"])
    # Index 0 and 3 are the same value.
    split = {0: np.log(1 / 1.5), 3: np.log(0.5 / 1.5)}
    extra = np.vectorize(lambda i: split.get(int(i), 0.0))(index["value"])
    if kind in ("masked", "all"):
        extra = np.where(mask, extra, 0.0)
    if kind in ("event", "all"):
        extra = extra.sum(-1)
    log_prob = index["fn"].log_prob(index["value"])
    np.testing.assert_allclose(log_prob, expected + extra, rtol=1e-5)


def test_reparam_of_another_distribution_is_refused():
    def normal():
        numpyro.sample("m", dist.Normal(0.0, 1.0).expand((3,)))

    seeded = handlers.seed(handlers.reparam(normal, config={"m": GridReparam()}), 0)
    with pytest.raises(ValueError, match="site 'm' has a Normal .*index_grids"):
        seeded()


# Bad input.


@pytest.mark.parametrize("values", [1.0, [], np.ones((3, 0))])
@pytest.mark.parametrize("validate_args", [None, False, True])
def test_a_grid_without_points_is_refused_always(values, validate_args):
    with pytest.raises(ValueError, match="Grid: `values` .*got shape") as error:
        Grid(values, validate_args=validate_args)
    assert f"got shape {np.shape(values)};" in str(error.value)


@pytest.mark.parametrize("weights", [1.0, [1.0], np.ones((2, 1)), np.ones((4, 3))])
def test_weights_of_another_shape_are_refused_always(weights):
    values = np.ones((2, 3)) * [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="`weights` .* 3 points.*got shape") as error:
        Grid(values, weights, validate_args=False)
    assert f"got shape {np.shape(weights)};" in str(error.value)


BAD = [
    ([1.0, np.nan], None, "values", r"nan at index \(1,\)"),
    ([np.inf], None, "values", r"inf at index \(0,\)"),
    ([[1.0], [-np.inf]], None, "values", r"-inf at index \(1, 0\)"),
    ([1.0, 1e300], None, "values", r"1e\+300 at index \(1,\)"),
    ([1.0, 2.0], [1.0, -0.5], "weights", r"-0.5 at index \(1,\)"),
    ([1.0, 2.0], [np.nan, 1.0], "weights", r"nan at index \(0,\)"),
    ([1.0, 2.0], [1.0, np.inf], "weights", r"inf at index \(1,\)"),
    ([1.0, 2.0], [0.0, 0.0], "weights", "only zeros"),
    ([1.0, 2.0], [[1, 0], [0, 0]], "weights", r"only zeros at index \(1,\)"),
]


@pytest.mark.parametrize("values, weights, name, value", BAD)
def test_bad_parameters_are_named(values, weights, name, value):
    match = f"Grid: `{name}` .* got {value};"
    for validate_args in (None, True):
        with pytest.raises(ValueError, match=match):
            Grid(values, weights, validate_args=validate_args)
    grid = Grid(values, weights, validate_args=False)
    with pytest.raises(ValueError, match=match):
        grid.validate_args()


def test_good_parameters_have_no_error():
    for convert in (list, np.array, np.float32, jnp.asarray):
        grid = Grid(convert(VALUES), convert(WEIGHTS))
        assert grid.parameter_error() is None
        assert grid.sample(random.key(0)).dtype == jnp.float32
    assert Grid(np.array([1, 2]), np.array([1, 2])).sample(random.key(0)) in (1.0, 2.0)
    with jax.enable_x64(True):
        assert Grid([1.0, 1e300]).parameter_error() is None


@pytest.mark.parametrize("enabled", [False, True])
def test_parameters_are_checked_whether_numpyro_validates_or_not(enabled):
    with numpyro.validation_enabled(enabled):
        with pytest.raises(ValueError, match="`values`"):
            Grid([np.nan])
        grid = Grid([np.nan], validate_args=False)
        assert grid.parameter_error() is not None


@pytest.mark.parametrize(
    "values", ["ab", ["1", "2"], np.array(["1"]), [1j], [[1.0], [1.0, 2.0]], {}]
)
def test_what_is_no_array_of_numbers_is_refused_always(values):
    with pytest.raises(ValueError, match="Grid: `values` must be an array of real"):
        Grid(values, validate_args=False)
    with pytest.raises(ValueError, match="Grid: `weights` must be an array of real"):
        Grid([1.0, 2.0], values, validate_args=False)


def test_traced_parameters_pass_and_concrete_ones_beside_them_do_not():
    @jax.jit
    def good(values):
        grid = Grid(values, WEIGHTS, validate_args=True)
        assert grid.parameter_error() is None
        with pytest.raises(RuntimeError, match="jitted"):
            grid.validate_args()
        return grid.log_prob(values)

    assert jnp.isfinite(good(jnp.asarray(VALUES))).sum() == 5
    with pytest.raises(ValueError, match="`weights`"):
        jax.jit(lambda v: Grid(v, [-1.0], validate_args=True).mean)(jnp.ones(1))

    @jax.jit
    def from_scalars(a):
        return Grid([a, 2 * a]).mean

    np.testing.assert_allclose(from_scalars(1.0), 1.5)


def test_values_off_the_grid_are_warned_about_under_validation():
    grid = Grid([1.0, 2.0], validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support"):
        assert grid.log_prob(1.5) == -np.inf
