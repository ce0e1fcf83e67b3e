# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Tables with missing cells and columns of all kinds: base measures, planted views."""

from functools import partial

import jax
from jax import lax, random
import numpy as np
import pytest

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import Predictive

from numpyro_subanneal import SubsampleAnnealedGibbs, testing
from numpyro_subanneal.models import crosscat, dpmm
from numpyro_subanneal.plan import recognise
from numpyro_subanneal.skeleton import cell_mask, peel

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled


def planted(num_rows=300, seed=0):
    """Columns of all kinds in two views of three clusters; some cells missing."""
    rng = np.random.default_rng(seed)
    z = rng.integers(3, size=(2, num_rows))
    of = {"real": [0, 0, 1, 1, 0, 1], "categorical": [1, 0, 0, 1], "count": [0, 1]}
    of["binary"] = [1, 1, 0, 0]
    real = 4.0 * z[of["real"]].T + rng.normal(size=(num_rows, 6))
    categorical = z[of["categorical"]].T.copy()
    noise = rng.uniform(size=categorical.shape) < 0.1
    categorical[noise] = rng.integers(3, size=noise.sum())
    binary = (rng.uniform(size=(num_rows, 4)) < 0.05 + 0.45 * z[of["binary"]].T) * 1
    count = rng.poisson(1 + 10 * z[of["count"]].T)
    for x, blank in ((real, np.nan), (categorical, -1), (binary, -1), (count, -1)):
        x[rng.uniform(size=x.shape) < 0.1] = blank
    view = [*of["real"], *of["categorical"], *of["binary"], *of["count"]]
    arrays = {
        "real": real,
        "categorical": categorical,
        "binary": binary,
        "count": count,
    }
    return arrays, np.array(view), z


def agreement(a, b):
    """Share of pairs on which two partitions agree (Rand index)."""
    return np.mean((a[:, None] == a) == (b[:, None] == b))


@pytest.mark.parametrize("num_chains", [None, 2])
@pytest.mark.parametrize("model", [crosscat.real, dpmm.real])
def test_no_key_is_used_twice(model, num_chains):
    """JAX looks for it in the program, which need not be compiled for that."""
    x = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    key = random.key(0) if num_chains is None else random.split(random.key(0), 2)
    # (Of so few clusters that moves are made at one width; no keys are used there.)
    kernel = SubsampleAnnealedGibbs(partial(model, num_clusters=16))
    with jax.debug_key_reuse(True):
        state = kernel.init(key, 5, None, (x,), {})
        jax.eval_shape(jax.jit(lambda state: kernel.sample(state, (x,), {})), state)


def test_planted_views_of_columns_of_all_kinds_are_recovered():
    arrays, view, z = planted(num_rows=200)
    # Constants and little room beyond what is planted, so that the program is short.
    model = partial(
        crosscat.mixed,
        num_categories=(3, 3, 3, 3),
        num_views=4,
        num_clusters=8,
        kappa=0.3,
        shape=3.0,
        strength=3.0,
    )
    kernel = SubsampleAnnealedGibbs(model)
    state = kernel.init(random.key(0), 12, None, (), arrays)

    @jax.jit
    def steps(state):
        return lax.fori_loop(
            0, 24, lambda _, state: kernel.sample(state, (), arrays), state
        )

    draw = steps(state).z
    found, rows = (np.asarray(draw[name]) for name in ("view", "z"))
    np.testing.assert_array_equal(found, testing.canonical_labels(view))
    for own, planted_rows in zip(rows[:2], z, strict=True):
        assert agreement(own, planted_rows) > 0.95
    assert (rows[2:] == -1).all()


def sites(model, *args, **kwargs):
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args, **kwargs)


def test_base_measures_are_those_of_the_observed_cells():
    arrays, _, _ = planted(num_rows=40)
    given = {"kappa": 0.5, "shape": 3.0, "strength": 4.0}
    real, codes, binary, count = arrays.values()

    @jax.jit
    def read():
        """Parameters of the base measures, and which cells are observed."""
        trace = sites(
            crosscat.mixed, **arrays, num_categories=(3,) * 4, num_clusters=3, **given
        )
        beta, gamma = (peel(trace[name]["fn"]) for name in ("binary_probs", "rate"))
        parameters = {
            "loc": peel(trace["loc"]["fn"]).loc[0],
            "rate": peel(trace["variance"]["fn"]).rate,
            "concentration": peel(trace["probs_3"]["fn"]).concentration,
            "ones": beta.concentration1,
            "zeros": beta.concentration0,
            "mean count": gamma.concentration / gamma.rate,
        }
        tables = {"real": real, "categorical_3": codes, "binary": binary}
        tables["count"] = count
        cells = {
            name: cell_mask(trace[name]["fn"], x.shape) for name, x in tables.items()
        }
        return parameters, cells

    got, cells = read()
    rate = np.nanvar(real, 0) * 2 * 0.5 / 1.5
    counts = (codes[..., None] == np.arange(3)).sum(0)
    frequency = (counts + 1 / 3) / (counts.sum(1, keepdims=True) + 1)
    ones = ((binary == 1).sum(0) + 0.5) / ((binary >= 0).sum(0) + 1)
    mean = (np.where(count >= 0, count, 0).sum(0) + 0.5) / ((count >= 0).sum(0) + 1)
    expected = {
        "loc": np.nanmean(real, 0),
        "rate": rate,
        "concentration": 4 * frequency,
        "ones": 4 * ones,
        "zeros": 4 - 4 * ones,
        "mean count": mean,
    }
    for name, value in expected.items():
        shape = got[name].shape
        np.testing.assert_allclose(got[name], np.broadcast_to(value, shape), rtol=1e-5)
    for name, x in (
        ("real", ~np.isnan(real)),
        ("categorical_3", codes >= 0),
        ("binary", binary >= 0),
        ("count", count >= 0),
    ):
        np.testing.assert_array_equal(cells[name], x)


def test_mixtures_take_missing_cells_too():
    arrays, _, _ = planted(num_rows=40)
    args = arrays["real"], arrays["categorical"], (3,) * 4
    plan = recognise(
        partial(dpmm.mixed, num_clusters=4, kappa=0.5, shape=3.0, strength=4.0),
        args,
        {},
    )
    assert all(site.masked for block in plan.blocks for site in block.sites)


def test_a_table_without_missing_cells_is_not_masked():
    x = np.random.default_rng(0).normal(size=(10, 3))

    def check():
        trace = sites(crosscat.real, x)
        assert not isinstance(trace["real"]["fn"], dist.MaskedDistribution)
        assert trace["view"]["value"].shape == (3,)
        assert trace["z"]["value"].shape == (3, 10)

    jax.eval_shape(check)  # nothing of it need be computed


@pytest.mark.parametrize(
    "num_columns, num_views", [(1, 2), (5, 5), (16, 16), (60, 16), (100, 20)]
)
def test_there_are_more_views_for_more_columns(num_columns, num_views):
    assert crosscat.default_num_views(num_columns) == num_views


def test_predictive_draws_a_table():
    arrays, _, _ = planted(num_rows=20)
    model = partial(crosscat.mixed, num_categories=(3,) * 4, num_clusters=8)
    predictive = Predictive(handlers.uncondition(model), num_samples=2)
    drawn = jax.eval_shape(lambda key: predictive(key, **arrays), random.key(0))
    for name in ("real", "binary", "count"):
        assert drawn[name].shape == (2, *arrays[name].shape)
    assert drawn["categorical_3"].shape == (2, 20, 4)


def test_vectorized_chains_are_the_chains_of_their_keys():
    # They have different numbers of views, which share proposals, and of clusters, but
    # run at one width. Of the first step only, and in float64: results that are rounded
    # differently part sooner or later.
    with jax.enable_x64(True):
        check_vectorized_chains()


def check_vectorized_chains():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 6)) + 3 * rng.integers(0, 3, (60, 1)) * (np.arange(6) % 2)
    kernel = SubsampleAnnealedGibbs(partial(crosscat.mixed, real=x))
    num_chains = 8
    keys = random.split(random.key(1), num_chains)
    state = kernel.init(keys, 4, None, (), {})

    def step(state):
        return kernel.sample(state, (), {})

    together = jax.jit(jax.vmap(step))(state)
    assert len(set(np.asarray(together.num_views).tolist())) > 1
    alone = jax.jit(step)
    for i in range(num_chains):
        one = alone(jax.tree.map(lambda v, i=i: v[i], state))
        for name in ("split_proposals", "merge_proposals"):
            made = getattr(together.split_merge, name)[i]
            assert made == getattr(one.split_merge, name)
        for name in ("view", "z"):
            np.testing.assert_array_equal(together.z[name][i], one.z[name])
