# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Ready-made models: recognised, recovering planted clusters, refusing bad data."""

from functools import partial

import jax
from jax import random
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from numpyro import handlers
from numpyro.infer import MCMC, Predictive

from numpyro_subanneal import SplitMerge, SubsampleAnnealedGibbs, testing
from numpyro_subanneal.models import crosscat, dpmm, pitman_yor
from numpyro_subanneal.plan import recognise

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled

FAMILIES = pytest.mark.parametrize("family", [dpmm, pitman_yor], ids=["dpmm", "py"])


def planted(num_rows, num_clusters, seed=0):
    """Columns of reals and of categories of one partition of the rows."""
    rng = np.random.default_rng(seed)
    z = rng.integers(num_clusters, size=num_rows)
    real = 3 * rng.normal(size=(num_clusters, 6))[z] + rng.normal(size=(num_rows, 6))
    num_categories = np.array([2, 3, 5, 5, 8, 8, 8, 8, 3, 2] * 4)
    categorical = np.empty((num_rows, len(num_categories)), int)
    for d, size in enumerate(num_categories):
        favoured = rng.integers(size, size=num_clusters)[z]
        noise = rng.integers(size, size=num_rows)
        categorical[:, d] = np.where(rng.random(num_rows) < 0.6, favoured, noise)
    return z, 100 + real, categorical, tuple(num_categories.tolist())


# What the models learn if it is not given.
CONSTANTS = {"kappa": 0.3, "shape": 2.0}
STRENGTH = {"strength": 10.0}


def partition_after_annealing(model, *args, seed=0, num_clusters=32, split_merge=None):
    # Above 16, moves are compiled at two widths.
    model = partial(model, num_clusters=num_clusters)
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model, split_merge=split_merge),
        num_warmup=10,
        num_samples=5,
        progress_bar=False,
    )
    mcmc.run(random.key(seed), *args)
    assert int(mcmc.last_state.capacity_reached) == 0
    return np.asarray(mcmc.get_samples()["z"][-1])


def agreement(a, b):
    """Share of pairs of rows on which two partitions agree (Rand index)."""
    return np.mean((a[:, None] == a) == (b[:, None] == b))


def peeled(fn):
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def test_planted_clusters_are_recovered_from_categories(family=pitman_yor):
    # 40 columns, of which no single one tells: rows open clusters only because the base
    # measure is that of the columns.
    z, _, categorical, num_categories = planted(800, 10)
    model = partial(family.categorical, num_categories=num_categories)
    found = partition_after_annealing(model, categorical)
    # Two of the ten may be left merged, 0.98: one row at a time, they seldom part.
    assert agreement(found, z) > 0.97


def test_planted_clusters_are_recovered_from_a_mixed_table(family=dpmm):
    z, real, categorical, num_categories = planted(600, 6)
    model = partial(family.mixed, num_categories=num_categories)
    found = partition_after_annealing(model, real, categorical, num_clusters=16)
    assert agreement(found, z) > 0.97


def test_planted_clusters_are_recovered_from_reals():
    # By the anneal alone, seven chains of twelve do so.
    z, real, _, _ = planted(600, 6)
    found = partition_after_annealing(
        dpmm.real, real, num_clusters=16, split_merge=SplitMerge()
    )
    assert agreement(found, z) > 0.95


@pytest.mark.parametrize(
    "family, x",
    [
        (dpmm, np.full((5, 2), 7.0)),
        (pitman_yor, np.array([[1.0, 2.0]])),
        (dpmm, np.array([[1e-6], [2e-6], [4e-6]])),
        (pitman_yor, np.arange(6).reshape(3, 2)),
    ],
    ids=["constant columns", "one row", "small unit", "integers"],
)
def test_base_measures_of_reals_are_well_defined(family, x):
    assert recognise(family.real, (x,), {}).num_rows == len(x)


@FAMILIES
def test_base_measures_of_categories_are_well_defined(family):
    codes = np.zeros((4, 2), int)  # one of two categories, and the only one of one
    plan = recognise(family.categorical, (codes, (2, 1)), {})
    assert {s.role_shapes for b in plan.blocks for s in b.sites} == {((1,),), ((2,),)}


def test_a_new_cluster_predicts_a_column_as_wide_as_it_is():
    # Mean and standard deviation of 20,000 prior draws of a cell in a cluster by itself
    # (Student t of 8 degrees of freedom: 4 standard errors, false alarm 1e-4 each).
    x = np.random.default_rng(1).normal(50, 3, (200, 1))
    model = handlers.uncondition(
        partial(dpmm.real, **CONSTANTS | {"shape": 4.0}, num_clusters=1)
    )
    draws = Predictive(model, num_samples=100)(random.key(0), x)["real"]
    means = np.asarray(draws).mean((1, 2))
    assert abs(means.mean() - x.mean()) < 4 * means.std() / 10
    within = np.asarray(draws).var(1)[:, 0].mean()
    total = within + means.var()
    assert total == pytest.approx(x.var(), rel=0.5)


@FAMILIES
@pytest.mark.parametrize("kappa, shape", [(0.3, 2.0), (1.0, 5.0)])
def test_prior_predictive_of_reals_has_the_columns_variance(family, kappa, shape):
    x = np.random.default_rng(0).gamma(2.0, [1.0, 1e3], size=(200, 2))
    trace = handlers.trace(handlers.seed(family.real, random.key(0))).get_trace(
        x, kappa=kappa, shape=shape
    )
    loc, rate = peeled(trace["loc"]["fn"]), peeled(trace["variance"]["fn"]).rate
    np.testing.assert_allclose(loc.loc[0], x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(trace["variance"]["value"] / loc.scale**2, kappa, 1e-5)
    # Of a Student t of 2 `shape` degrees of freedom.
    scale = np.sqrt(np.ravel(rate)[-2:] / shape * (1 + 1 / kappa))
    np.testing.assert_allclose(stats.t(2 * shape, scale=scale).var(), x.var(0), 1e-5)


def test_base_measures_of_concrete_and_of_traced_data_are_the_same():
    rng = np.random.default_rng(1)
    data = 1e3 + rng.normal(size=(40, 3)), rng.integers(0, [2, 5], size=(40, 2))
    data[0][:, 1] = 0.1  # a constant column

    def constants(real, codes):
        bound = partial(dpmm.mixed, **CONSTANTS, **STRENGTH)
        model = handlers.seed(bound, random.key(0))
        trace = handlers.trace(model).get_trace(real, codes, (2, 5))
        fns = {name: peeled(site["fn"]) for name, site in trace.items() if "fn" in site}
        return (
            fns["variance"].rate,
            fns["loc"].loc,
            fns["probs_2"].concentration,
            fns["probs_5"].concentration,
        )

    for a, b in zip(constants(*data), jax.jit(constants)(*data), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


def test_frequencies_are_the_prior_predictive_of_categories():
    codes = np.array([[0], [0], [0], [1]])
    trace = handlers.trace(handlers.seed(dpmm.categorical, random.key(0))).get_trace(
        codes, (3,), strength=2.0
    )
    fn = peeled(trace["probs_3"]["fn"])
    expected = 2.0 * (np.array([3, 1, 0]) + 1 / 3) / 5
    np.testing.assert_allclose(np.ravel(fn.concentration)[-3:], expected, rtol=1e-6)


def test_dpmm_is_the_pitman_yor_mixture_of_discount_zero():
    _, real, categorical, num_categories = planted(40, 3)
    args = real.astype(np.float32), categorical[:, :4], num_categories[:4]
    z = np.arange(40, dtype=np.int32) % 3
    values = []
    fixed = {**CONSTANTS, **STRENGTH, "concentration": 1.0}
    for model in (dpmm.mixed, partial(pitman_yor.mixed, discount=0.0)):
        kernel = SubsampleAnnealedGibbs(partial(model, **fixed))
        state = kernel.init(random.key(0), 0, {"z": z}, args, {})
        values.append(float(state.log_joint))
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    prior = testing.log_eppf(z, 1.0) - testing.log_eppf(z, 1.0, 0.5)
    kernel = SubsampleAnnealedGibbs(partial(pitman_yor.mixed, discount=0.5, **fixed))
    state = kernel.init(random.key(0), 0, {"z": z}, args, {})
    assert values[0] - float(state.log_joint) == pytest.approx(prior, abs=0.01)


X = np.zeros((4, 2)) + np.arange(4)[:, None]
CODES = np.array([[0, 1], [1, 2], [1, 0], [0, 0]])
BAD = {
    "infinite": (dpmm.real, (np.where(X == 2, np.inf, X),), {}, "inf in row 2"),
    "one axis": (dpmm.real, (X[:, 0],), {}, r"\(rows, columns\)"),
    "list": (dpmm.real, (X.tolist(),), {}, "list"),
    "DataFrame": (
        dpmm.real,
        (pd.DataFrame(X),),
        {},
        r"got DataFrame of shape \(4, 2\); .*to_numpy.*Table.from_dataframe",
    ),
    "kappa": (dpmm.real, (X,), {"kappa": 0.0}, "`kappa`.*0.0"),
    "kappas": (dpmm.real, (X,), {"kappa": np.ones(2)}, r"`kappa`.*shape \(2,\);"),
    "list of kappas": (dpmm.real, (X,), {"kappa": [1.0]}, r"`kappa`.*\[1.0\];"),
    "word": (dpmm.real, (X,), {"shape": "a"}, "`shape`.*'a';"),
    "shape": (dpmm.real, (X,), {"shape": 1.0}, "`shape`.*1.0"),
    "capacity": (dpmm.real, (X,), {"num_clusters": 0}, "`num_clusters`.*0"),
    "code": (dpmm.categorical, (CODES, (2, 2)), {}, "Column 1.*2 in row 1"),
    "number of columns": (dpmm.categorical, (CODES, (2,)), {}, "each of the 2"),
    "one number": (dpmm.categorical, (CODES, 3), {}, r"such as `\(3,\) \* 2`.*got 3"),
    "strength": (dpmm.categorical, (CODES, (2, 3)), {"strength": -1}, "`strength`.*-1"),
    "float codes": (dpmm.categorical, (X, (4, 4)), {}, "float64"),
    "rows": (dpmm.mixed, (X, CODES[:3], (2, 3)), {}, "3 rows.*4 rows"),
    "discount": (pitman_yor.real, (X,), {"discount": 1.0}, "discount.*1"),
    "negative code": (dpmm.categorical, (CODES - 2, (2, 3)), {}, "code -2 in row 0"),
    "no table": (crosscat.mixed, (), {}, "no data"),
    "rows of views": (crosscat.mixed, (X, CODES[:3], (2, 3)), {}, "rows, 4 and 3"),
    "one view": (crosscat.real, (X,), {"num_views": 1}, "at least 2, got 1"),
    "binary": (crosscat.mixed, (), {"binary": CODES}, "binary data.*2 in row 1"),
    "count": (crosscat.mixed, (), {"count": X - 0.5}, "count data.*-0.5 in row 0"),
}


@pytest.mark.parametrize("model, args, kwargs, message", BAD.values(), ids=BAD)
def test_bad_arguments_are_named(model, args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        SubsampleAnnealedGibbs(model).init(random.key(0), 1, None, args, kwargs)
