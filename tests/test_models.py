# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
The ready-made models: their base measure, what they refuse, planted clusters recovered.

Recovery is tested with fixed seeds, on clusters so far apart that two of them are told
apart in nearly every row.
"""

from functools import partial
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro import handlers
from numpyro.infer import MCMC, Predictive

from numpyro_subanneal import SubsampleAnnealedGibbs, explain
from numpyro_subanneal.models import dpmm, pitman_yor
from numpyro_subanneal.models.features import num_rows

MODULES = [dpmm, pitman_yor]


def trace_of(model, *args):
    return handlers.trace(handlers.seed(model, random.key(0))).get_trace(*args)


def adjusted_rand(a, b):
    table = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(table, (a, b), 1)

    def num_pairs(counts):
        return (counts * (counts - 1) / 2).sum()

    rows, columns = num_pairs(table.sum(1)), num_pairs(table.sum(0))
    expected = rows * columns / num_pairs(len(a) * np.ones(1))
    return (num_pairs(table) - expected) / ((rows + columns) / 2 - expected)


def planted_categories(seed, num_rows, cardinality, num_clusters):
    rng = np.random.default_rng(seed)
    z = rng.integers(num_clusters, size=num_rows)
    x = np.empty((num_rows, len(cardinality)), np.int16)
    for d, size in enumerate(cardinality):
        probs = rng.dirichlet(np.full(size, 0.3), size=num_clusters)
        u = rng.random((num_rows, 1))
        x[:, d] = (u > np.cumsum(probs[z], 1)[:, :-1]).sum(1)
    return x, z


def planted_reals(seed, num_rows, num_features, num_clusters):
    rng = np.random.default_rng(seed)
    z = rng.integers(num_clusters, size=num_rows)
    loc = rng.normal(0, 4, size=(num_clusters, num_features))
    scale = 10.0 ** rng.integers(-3, 4, size=num_features)
    return scale * (loc[z] + rng.normal(size=(num_rows, num_features))), z


def sample(model, *args, num_warmup=10, num_samples=5):
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model),
        num_warmup=num_warmup,
        num_samples=num_samples,
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), *args)
    return np.asarray(mcmc.get_samples()["z"])


# --- base measure ------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("kappa", "shape"), [(0.3, 2.0), (1.0, 5.0)])
def test_prior_predictive_of_reals_has_the_mean_and_variance_of_the_column(
    module, kappa, shape
):
    x = np.random.default_rng(0).gamma(2.0, [1.0, 1e3], size=(200, 2))
    sites = trace_of(partial(module.real, kappa=kappa, shape=shape), x)
    prior = sites["variance"]["fn"].base_dist
    loc = sites["loc"]["fn"]
    np.testing.assert_allclose(loc.loc[0], x.mean(0), rtol=1e-6)
    # Student t of 2 `shape` degrees of freedom and this squared scale.
    scale2 = np.asarray(prior.rate / shape) * (1 + 1 / kappa)
    variance = stats.t(2 * shape, scale=np.sqrt(scale2)).var()
    np.testing.assert_allclose(variance, x.var(0) * np.ones_like(variance), rtol=1e-5)
    ratio = sites["variance"]["value"] / loc.scale**2
    np.testing.assert_allclose(ratio, kappa, rtol=1e-5)


@pytest.mark.parametrize("module", MODULES)
def test_prior_predictive_of_categories_is_the_smoothed_frequencies(module):
    x = np.array([[0, 2, 1], [0, 0, 0], [1, 2, 0]])
    sites = trace_of(partial(module.categorical, strength=4.0), x, (2, 3, 2))
    assert sites["probs_2"]["value"].shape == (32, 2, 2)
    assert sites["probs_3"]["value"].shape == (32, 1, 3)
    np.testing.assert_array_equal(sites["categorical_2"]["value"], x[:, [0, 2]])
    np.testing.assert_array_equal(sites["categorical_3"]["value"], x[:, [1]])
    # Two of three rows in category 0 of columns 0 and 2, and one row spread evenly.
    concentration = sites["probs_2"]["fn"].concentration
    np.testing.assert_allclose(concentration[0, 0], [2.5, 1.5], rtol=1e-6)
    np.testing.assert_allclose(concentration[0, 1], [2.5, 1.5], rtol=1e-6)
    concentration = sites["probs_3"]["fn"].concentration
    np.testing.assert_allclose(concentration[0, 0], [4 / 3, 1 / 3, 7 / 3], rtol=1e-6)


def test_base_measure_is_the_same_of_concrete_and_of_traced_data():
    rng = np.random.default_rng(1)
    real = 1e3 + rng.normal(size=(40, 3))
    codes = rng.integers(0, [2, 5], size=(40, 2))

    def constants(real, codes):
        sites = trace_of(dpmm.mixed, real, codes, (2, 5))
        return [
            sites["variance"]["fn"].base_dist.rate,
            sites["loc"]["fn"].loc,
            sites["probs_2"]["fn"].concentration,
            sites["probs_5"]["fn"].concentration,
        ]

    for concrete, traced in zip(
        constants(real, codes), jax.jit(constants)(real, codes), strict=True
    ):
        np.testing.assert_allclose(concrete, traced, rtol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8])
def test_base_measure_of_any_number_type(dtype):
    x = np.array([[250, 3], [1, 3], [7, 3]], dtype)
    sites = trace_of(dpmm.real, x)
    loc, rate = sites["loc"]["fn"].loc[0], sites["variance"]["fn"].base_dist.rate[0]
    np.testing.assert_allclose(loc, [86, 3], rtol=1e-6)
    expected = np.array([np.var([250.0, 1.0, 7.0]), 1.0]) * 0.3 / 1.3
    np.testing.assert_allclose(rate, expected, rtol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 0.1, -1e7])
def test_a_constant_column_is_one_of_variance_1(shift):
    x = np.full((1000, 1), shift, np.float32)
    for values in (x, jnp.asarray(x)):
        rate = trace_of(dpmm.real, values)["variance"]["fn"].base_dist.rate
        np.testing.assert_allclose(rate, 0.3 / 1.3, rtol=1e-6)
    rate = jax.jit(lambda x: trace_of(dpmm.real, x)["variance"]["fn"].base_dist.rate)
    np.testing.assert_allclose(rate(x), 0.3 / 1.3, rtol=1e-6)


# --- shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("rows", [1, 9])
def test_models_run_under_predictive_before_and_after(module, rows):
    rng = np.random.default_rng(0)
    real = rng.normal(size=(rows, 2))
    codes = rng.integers(0, [2, 4, 4], size=(rows, 3))
    model = partial(module.mixed, num_categories=(2, 4, 4), num_clusters=rows)
    prior = Predictive(handlers.uncondition(model), num_samples=3)
    draws = prior(random.key(0), real, codes)
    latent = {
        "z": (3, rows),
        "variance": (3, rows, 2),
        "loc": (3, rows, 2),
        "probs_2": (3, rows, 1, 2),
        "probs_4": (3, rows, 2, 4),
    }
    observed = {
        "real": (3, rows, 2),
        "categorical_2": (3, rows, 1),
        "categorical_4": (3, rows, 2),
    }
    assert {name: v.shape for name, v in draws.items()} == latent | observed
    assert not np.array_equal(draws["real"][0], real)
    posterior = {name: draws[name] for name in latent}
    draws = Predictive(handlers.uncondition(model), posterior)(
        random.key(1), real, codes
    )
    assert {name: v.shape for name, v in draws.items()} == observed


@pytest.mark.parametrize("module", MODULES)
def test_every_model_is_recognised(module, capsys):
    real = np.random.default_rng(0).normal(size=(6, 2))
    codes = np.zeros((6, 2), int)
    explain(module.real, real)
    explain(module.categorical, codes, (1, 3))
    explain(module.mixed, real, codes, (1, 3))
    assert "Not recognised" not in capsys.readouterr().out


def test_models_pickle_with_their_arguments():
    model = partial(pitman_yor.mixed, num_categories=(2, 3))
    again = pickle.loads(pickle.dumps(model))
    assert (again.func, again.keywords) == (model.func, model.keywords)


# --- recovery ----------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_planted_categorical_clusters_are_recovered(module):
    cardinality = tuple(np.random.default_rng(0).integers(2, 6, size=40).tolist())
    x, planted = planted_categories(1, 400, cardinality, 8)
    model = partial(module.categorical, num_categories=cardinality, num_clusters=16)
    z = sample(model, x)
    assert adjusted_rand(z[-1], planted) > 0.95


@pytest.mark.parametrize("module", MODULES)
def test_planted_real_clusters_are_recovered_whatever_the_columns_scales(module):
    x, planted = planted_reals(2, 400, 5, 6)
    z = sample(partial(module.real, num_clusters=16), x)
    assert adjusted_rand(z[-1], planted) > 0.95


def test_planted_mixed_clusters_are_recovered():
    real, planted = planted_reals(3, 400, 3, 4)
    codes, other = planted_categories(4, 400, (3, 3, 4, 5, 5, 5, 6, 6), 2)
    model = partial(
        dpmm.mixed, num_categories=(3, 3, 4, 5, 5, 5, 6, 6), num_clusters=16
    )
    z = sample(model, real, codes)
    # Neither kind of column alone tells these apart.
    assert adjusted_rand(z[-1], 2 * planted + other) > 0.9


def test_a_constant_column_does_no_harm():
    x, planted = planted_reals(2, 200, 4, 3)
    x = np.hstack([x, np.full((200, 1), 5.0)])
    z = sample(partial(dpmm.real, num_clusters=16), x)
    assert adjusted_rand(z[-1], planted) > 0.95


# --- refusals ----------------------------------------------------------------------

REAL = np.zeros((4, 2))
CODES = np.zeros((4, 3), int)
HOLE = np.where(np.arange(8).reshape(4, 2) == 5, np.nan, 0.0)
HIGH = np.where(np.arange(12).reshape(4, 3) == 7, 9, 0)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("name", "args", "kwargs", "message"),
    [
        ("real", ([[1.0]],), {}, "NumPy or JAX array.*list"),
        ("real", (REAL[0],), {}, r"\(rows, columns\).*shape \(2,\)"),
        ("real", (REAL[:0],), {}, r"at least one of each.*\(0, 2\)"),
        ("real", (REAL.astype(complex),), {}, "real data.*complex128"),
        ("real", (HOLE,), {}, "Column 1 of the real data has nan in row 2"),
        ("real", (REAL,), {"num_clusters": 0}, "`num_clusters`.*0"),
        ("real", (REAL,), {"num_clusters": 2.0}, "`num_clusters`.*2.0"),
        ("real", (REAL,), {"kappa": 0.0}, "`kappa` must be greater than 0"),
        ("real", (REAL,), {"shape": 1.0}, "`shape` must be greater than 1"),
        ("real", (REAL,), {"concentration": -1.0}, "`concentration`"),
        ("categorical", (CODES * 1.0, (2, 2, 2)), {}, "categorical data.*float64"),
        ("categorical", (CODES, (2, 2)), {}, "`num_categories`.*3 categorical"),
        ("categorical", (CODES, (2, 2, 0)), {}, "`num_categories`.*positive"),
        (
            "categorical",
            (HIGH, (2, 3, 4)),
            {},
            r"Column 1 of the categorical data has the code 9 in row 2.*0\.\.2",
        ),
        ("categorical", (HIGH - 9, (9, 9, 9)), {}, "code -9 in row 0"),
        (
            "categorical",
            (CODES, (2, 2, 2)),
            {"strength": np.nan},
            "`strength` must be greater than 0, got nan",
        ),
        ("mixed", (REAL, CODES[:3], (2, 2, 2)), {}, "3 rows, but 4 rows"),
    ],
)
def test_arguments_are_refused_with_their_names(module, name, args, kwargs, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        trace_of(partial(getattr(module, name), **kwargs), *args)


@pytest.mark.parametrize("name", ["real", "categorical", "mixed"])
def test_pitman_yor_refuses_its_discount(name):
    args = {"real": (REAL,), "categorical": (CODES, (2, 2, 2))}
    args["mixed"] = args["real"] + args["categorical"]
    with pytest.raises(ValueError, match="`discount`"):
        trace_of(partial(getattr(pitman_yor, name), discount=1.0), *args[name])


def test_sizes_that_are_traced_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"functools\.partial"):
        jax.jit(lambda n: trace_of(dpmm.real, REAL, n))(8)


def test_num_rows_of_a_table():
    assert num_rows(REAL) == 4
