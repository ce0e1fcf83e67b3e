# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Data of awkward sizes, scales and values.

The same key on the same data in other units must give the same chain: partitions are
compared exactly. A move whose random number falls between the scores of two ways of
rounding would break that; with 300 moves and scores good to 1e-6 that happens in about
one of a thousand keys, and the key is fixed.
"""

from functools import cache, partial
import os
import subprocess
import sys

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import blobs

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    NotRecognised,
    SubsampleAnnealedGibbs,
    rows,
    testing,
)
from numpyro_subanneal import plan as planning
from numpyro_subanneal import reading as reading_
from numpyro_subanneal.conjugate.multivariate import MultivariateNormalInverseWishart
from numpyro_subanneal.subsample import Subsample

# Compiling takes longest by far. Where digits of single precision are compared it is as
# in use.
sooner = pytest.mark.quickly_compiled(level=1)

CAPACITY, NUM_WARMUP, NUM_SAMPLES = 6, 4, 20
KAPPA, SHAPE = 0.1, 2.0
BLOBS = blobs().astype(np.float64)


def model(x, mean, scale):
    """Hyperparameters in the units of each column; all are arguments."""
    num_rows, num_features = x.shape
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=num_rows))
    with numpyro.plate("features", num_features, dim=-1):
        with numpyro.plate("clusters", CAPACITY, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(SHAPE, scale**2))
            loc = numpyro.sample("loc", dist.Normal(mean, jnp.sqrt(var / KAPPA)))
        with numpyro.plate("rows", num_rows, dim=-2):
            numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def log_joint(z, x, mean, scale):
    z, x = np.asarray(z), np.asarray(x, np.float64)
    args = np.asarray(mean), KAPPA, SHAPE, np.asarray(scale, np.float64) ** 2
    return testing.log_eppf(z, 1.0) + sum(
        testing.normal_log_marginal(x[z == k], *args) for k in range(z.max() + 1)
    )


class Chain:
    """One for all data of a shape: they are arguments of its program, which takes much
    longer to compile than to run."""

    def __init__(self, **options):
        self.kernel = SubsampleAnnealedGibbs(model, **options)
        self.program = jax.jit(self._program)

    def _program(self, state, args, num_steps):
        def kept(state, num_steps):
            state = lax.fori_loop(
                0, num_steps, lambda i, s: self.kernel.sample(s, args, {}), state
            )
            fields = {n: getattr(state, n) for n in self.kernel.default_fields}
            return state, {**fields, **state.z}  # `z` of both is the draw's own

        return lax.scan(kept, state, num_steps)

    def run(self, x, mean=0.0, scale=1.0, num_samples=NUM_SAMPLES, thinning=1):
        """Draws and fields, and the last state; `mean` and `scale` of each column."""
        wide = np.zeros(x.shape[1])
        args = x, wide + mean, wide + scale
        start = self.kernel.init(random.key(0), NUM_WARMUP, None, args, {})
        num_steps = np.full(num_samples, thinning, np.int32)
        num_steps[0] += NUM_WARMUP
        last, draws = jax.device_get(self.program(start, args, num_steps))
        for name, value in draws.items():
            assert np.isfinite(value).all(), name
        return draws, last


@pytest.fixture(scope="module")
def chain():
    return Chain()


def run(chain, *args, **kwargs):
    return chain.run(*args, **kwargs)[0]


@pytest.fixture(scope="module")
def standard(chain):
    return run(chain, BLOBS)


def assert_log_joint(draws, x, mean=0.0, scale=1.0, rtol=1e-5, atol=1e-3):
    expected = [log_joint(z, x, mean, scale) for z in draws["z"]]
    np.testing.assert_allclose(draws["log_joint"], expected, rtol=rtol, atol=atol)


# --- Units ---


SCALES = [2.0**20, 2.0**-20, 1e6, 1e-6, 1e12, 1e-12]


@pytest.mark.parametrize("scale", SCALES)
def test_other_units_give_the_same_chain(chain, standard, scale):
    draws = run(chain, BLOBS * scale, scale=scale)
    np.testing.assert_array_equal(draws["z"], standard["z"])
    np.testing.assert_allclose(draws["loc"] / scale, standard["loc"], rtol=1e-4)
    np.testing.assert_allclose(draws["var"] / scale**2, standard["var"], rtol=1e-4)
    # Each value's density is in units of 1 / scale.
    change = -BLOBS.size * np.log(scale)
    np.testing.assert_allclose(
        draws["log_joint"], standard["log_joint"] + change, rtol=1e-5
    )


def test_every_column_may_have_its_own_unit(chain, standard):
    scale = np.array([1e-6, 1e6])
    draws = run(chain, BLOBS * scale, scale=scale)
    np.testing.assert_array_equal(draws["z"], standard["z"])
    np.testing.assert_allclose(draws["log_joint"], standard["log_joint"], rtol=1e-4)


@pytest.mark.parametrize("shift", [1.0, -100.0, 1e4])
def test_another_origin_gives_the_same_chain(chain, standard, shift):
    draws = run(chain, BLOBS + shift, mean=shift)
    np.testing.assert_array_equal(draws["z"], standard["z"])
    # At 10^4 values are given to 1e-3.
    atol = 1e-4 + abs(shift) * 2e-7
    np.testing.assert_allclose(draws["loc"] - shift, standard["loc"], atol=10 * atol)
    np.testing.assert_allclose(
        draws["log_joint"], standard["log_joint"], atol=1e3 * atol
    )


@sooner
def test_double_precision_is_used_and_a_large_origin_is_right_in_it():
    shift = 1e9
    with jax.enable_x64(True):
        chain = Chain()
        plain = run(chain, BLOBS)
        assert plain["loc"].dtype == plain["log_joint"].dtype == jnp.float64
        assert plain["z"].dtype == jnp.int32
        draws = run(chain, BLOBS + shift, mean=shift)
        np.testing.assert_array_equal(draws["z"], plain["z"])
        np.testing.assert_allclose(draws["loc"] - shift, plain["loc"], atol=1e-5)
        np.testing.assert_allclose(draws["log_joint"], plain["log_joint"], atol=1e-5)
        assert_log_joint(plain, BLOBS, rtol=1e-12)


@pytest.mark.parametrize("shift", [1e9, -1e9, 1e8])
def test_a_large_origin_is_refused_in_single_precision(chain, shift):
    x = BLOBS + [0.0, shift]
    with pytest.raises(NotRecognised) as error:
        run(chain, x)
    for word in ("Column 1", "'x'", "float32", "enable_x64", "subtract"):
        assert word in str(error.value)


@pytest.mark.parametrize("shift", [2.0**10, 2.0**14, 2.0**17])
def test_an_exact_shift_does_not_change_the_log_joint(shift):
    # Values and their sums with the shift are multiples of 1/32, so float32 has them
    # all: nothing is lost but by our own arithmetic.
    num_rows = 1000
    z = np.arange(num_rows, dtype=np.int32) % 2
    noise = np.random.default_rng(0).normal(size=(num_rows, 1)) * 0.5
    x = np.round((np.where(z, 5.0, -5.0)[:, None] + noise) * 32) / 32

    np.testing.assert_allclose(
        log_joint_of(x + shift, shift, z), log_joint_of(x, 0.0, z), atol=0.1
    )


def test_values_quantised_to_one_are_a_constant_column(chain):
    x = np.float32(BLOBS)
    x[:, 1] = np.float32(1e9)
    draws = run(chain, x, mean=[0.0, 1e9])
    assert_log_joint(draws, x, mean=[0.0, 1e9])


# --- Few values ---


@pytest.mark.parametrize("constant", [0.0, 5.0, -1e6])
def test_a_constant_column_does_no_harm(chain, standard, constant):
    # The column says nothing of the clusters but that they are many: a cluster of n
    # equal values is likelier than n of one. Here the other column decides.
    x = BLOBS.copy()
    x[:, 1] = constant
    draws = run(chain, x, mean=[0.0, constant])
    assert_log_joint(draws, x, mean=[0.0, constant])
    for z in draws["z"]:
        assert len(np.unique(z[::2])) == len(np.unique(z[1::2])) == 1
        assert z[0] != z[1]


def test_all_values_equal(chain):
    x = np.full_like(BLOBS, 5.0)
    draws = run(chain, x)
    assert_log_joint(draws, x)


# --- Outliers ---


@pytest.mark.parametrize("far", [1e4, -1e4, 1e6])
def test_an_outlier_leaves_the_others_alone(chain, far):
    # One row 10^4 standard deviations off, or more. Alone in a cluster it is some 50
    # nats better than with others, so that it is in none of these draws with others.
    x = BLOBS.copy()
    x[3] = far
    draws = run(chain, x)
    assert_log_joint(draws, x)
    for z in draws["z"]:
        assert (z == z[3]).sum() == 1
    others = np.delete(np.arange(len(x)), 3)
    loc = np.take_along_axis(draws["loc"], draws["z"][:, others, None], 1)
    var = np.take_along_axis(draws["var"], draws["z"][:, others, None], 1)
    # A right draw has a row further off less than once in 10^10 runs.
    assert np.abs((x[others] - loc) / np.sqrt(var)).max() < 15


def test_heavy_tails_everywhere(chain):
    # A t law with one degree of freedom, 10^3 wide: no prior fits it.
    x = np.random.default_rng(0).standard_cauchy(BLOBS.shape) * 1e3
    draws = run(chain, x)
    assert_log_joint(draws, x)


# --- Long runs ---


@cache
def plan_of(shape):
    """How the model is read; it is the same for all data of a shape."""
    wide = np.zeros(shape[1])
    return planning.recognise(model, (np.zeros(shape), wide, wide + 1), {})


def read(x, mean=0.0):
    """Plan, prior and components; also where the arguments are traced."""
    plan = plan_of(x.shape)
    wide = jnp.zeros(x.shape[1], jnp.float32)
    args = jnp.asarray(x, jnp.float32), wide + mean, wide + 1
    reading = reading_.read(plan, model, args, {}, {})
    return plan, reading.prior, reading.components


@jax.jit
def log_joint_of(x, mean, z):
    plan, prior, components = read(x, mean)
    return rows.log_joint(prior, components, rows.collect(components, z, plan.capacity))


@jax.jit
def long_step(rng_key, x, num_moves):
    """One step of very many moves, in which no statistic is made anew."""
    plan, prior, components = read(x)
    clusters, *_ = rows.run_step(
        rng_key,
        lambda values, like: (prior, components),
        (),
        jnp.zeros(len(x), jnp.int32),
        plan.capacity,
        Subsample(jnp.arange(len(x)), jnp.int32(len(x))),
        jnp.int32(0),
        jnp.asarray(num_moves, jnp.int32),
    )
    return clusters, rows.collect(components, clusters.z, plan.capacity)


def assert_statistics(carried, anew, scale):
    """Statistics of values up to `scale`, to what float32 has of them."""
    np.testing.assert_array_equal(carried.counts, anew.counts)
    # One block; its statistics are one array [statistics, columns, clusters].
    ((got,),), ((expected,),) = carried.stats, anew.stats
    count, mean, square = expected
    eps = np.finfo(np.float32).eps
    np.testing.assert_array_equal(got[0], count)
    np.testing.assert_allclose(got[1], mean, rtol=1e-5, atol=10 * eps * scale)
    np.testing.assert_allclose(got[2], square, rtol=1e-4, atol=10 * eps * scale**2)


def test_statistics_do_not_drift_in_a_hundred_thousand_moves():
    # Overlapping clusters, so that rows do move.
    x = np.random.default_rng(0).normal(size=(8, 2)) * 3
    carried, anew = jax.device_get(long_step(random.key(0), x, 100_000))
    assert_statistics(carried, anew, scale=10.0)


@pytest.mark.parametrize("far", [1e2, 1e4])
def test_an_outlier_leaves_only_rounding_of_its_square_behind(far):
    # All rows start in one cluster, which the outlier soon leaves. (What stays behind
    # lasts until the next step, which makes all statistics anew.)
    x = np.random.default_rng(0).normal(size=(8, 2))
    x[0] = far
    carried, anew = jax.device_get(long_step(random.key(0), x, 50))
    assert (carried.z == carried.z[0]).sum() == 1
    assert_statistics(carried, anew, scale=far)


@pytest.mark.parametrize("far", [30.0, 1e4])
def test_outliers_leave_a_covariance_matrix_and_its_inverse(far):
    # Of 40 clusters of 20 rows each, which outliers enter and leave six times.
    pair, size = MultivariateNormalInverseWishart(), 10
    hyper = {
        "mean": jnp.zeros(size),
        "kappa": jnp.float32(1.0),
        "concentration": jnp.float32(size + 2),
        "scale_matrix": jnp.eye(size),
    }

    @jax.jit
    @partial(jax.vmap, in_axes=(0, 0, 0))
    def visited(x, outliers, new):
        def visit(stat, v):
            stat = pair.remove(hyper, pair.add(hyper, stat, v), v)
            return stat, pair.score(pair.predictive(hyper, stat), new)

        def join(stat, v):
            return pair.add(hyper, stat, v), None

        stat, _ = lax.scan(join, pair.empty(hyper), x)
        stat, scores = lax.scan(visit, stat, outliers)
        return stat[2], scores

    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 20, size)).astype(np.float32)
    outliers = (far * rng.normal(size=(40, 6, size))).astype(np.float32)
    roots, scores = visited(x, outliers, x[:, 0])
    assert np.isfinite(scores).all()
    factor, inverse = np.split(np.asarray(roots, np.float64), 2, -1)
    assert (np.diagonal(factor, axis1=1, axis2=2) >= 1 - 1e-6).all()
    assert np.abs(inverse).max() <= 1 + 1e-5
    if far < 100:
        product = np.einsum("nij,nik->njk", factor, inverse)
        assert np.abs(product - np.eye(size)).max() < 1e-4


@sooner
def test_ten_thousand_sweeps_of_a_tiny_table():
    x = np.array([[-1.0, 0.0], [0.5, 1.0], [1.5, -1.0], [4.0, 4.0]])
    draws, last = Chain(split_merge=None).run(x, num_samples=100, thinning=100)
    assert last.i == NUM_WARMUP + 10_000
    assert_log_joint(draws, x)
    assert len({tuple(z) for z in draws["z"].tolist()}) > 2


# --- Never hang ---

NEVER = """
import jax.numpy as jnp
from jax import random
from numpyro_subanneal.conjugate.base import loggamma
for bad in (jnp.nan, jnp.inf, 0.0, -1.0):
    value = loggamma(random.key(0), jnp.array([2.0, bad, 0.5]))
    assert jnp.isfinite(value[0]) and jnp.isfinite(value[2]), (bad, value)
print("done")
"""


def test_gamma_variates_of_invalid_parameters_end():
    # A loop until all variates are accepted would not end if one never is. (NaN can
    # come in by `jit_model_args`, `post_warmup_state` and other data: `init` is not
    # called then, and `sample` sees no values.)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", NEVER],
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "done", done.stderr
