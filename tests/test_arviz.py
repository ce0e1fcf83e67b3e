# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Draws as ArviZ takes them: names, labels, groups, files."""

import copy

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from small_models import CAPACITY, blobs, mixture

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    FeatureMoves,
    PitmanYorProcess,
    Posterior,
    SubsampleAnnealedGibbs,
    inference_data,
)
from numpyro_subanneal.inference_data import Warmup, collect_warmup, to_arviz
from numpyro_subanneal.plan import recognise

pytestmark = [
    pytest.mark.quickly_compiled,
    # ArviZ 0.23 announces the next one.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

# Few clusters compile sooner; that all of them get occupied is warned of.
few_clusters = pytest.mark.filterwarnings(
    "ignore:All . clusters of the model:UserWarning"
)

X = blobs(10)
N, D = X.shape
NUM_WARMUP, NUM_SAMPLES, CHAINS = 5, 20, 2
DRAWS = CHAINS * NUM_SAMPLES

REALS = np.where(np.arange(18).reshape(6, 3) % 7 == 4, np.nan, blobs(6)[:, [0, 1, 1]])
CODES = np.array([[0, 1], [1, 1], [0, 0], [1, 0], [0, 1], [1, 1]])


def views_model(x, codes, present):
    size = x.shape[1] + codes.shape[1]
    view = numpyro.sample("view", PitmanYorProcess(1.0, 0.1, size=size))
    with numpyro.plate("views", 2):
        z = numpyro.sample("z", PitmanYorProcess(1.0, 0.1, size=len(x)))
    k = z[view].T
    with numpyro.plate("reals", x.shape[1], dim=-1):
        with numpyro.plate("clusters", 3, dim=-2):
            loc = numpyro.sample("loc", dist.Normal(0.0, 5.0))
        with numpyro.plate("rows", len(x), dim=-2), handlers.mask(mask=present):
            at = loc[k[:, : x.shape[1]], jnp.arange(x.shape[1])]
            numpyro.sample("x", dist.Normal(at, 1.0), obs=x)
    with numpyro.plate("flags", codes.shape[1], dim=-1):
        with numpyro.plate("clusters", 3, dim=-2):
            p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        with numpyro.plate("rows", len(x), dim=-2):
            at = p[k[:, x.shape[1] :], jnp.arange(codes.shape[1])]
            numpyro.sample("flag", dist.Bernoulli(at), obs=codes)


VIEWS_ARGS = REALS, CODES, ~np.isnan(REALS)


@pytest.fixture(scope="module")
def az():
    import arviz

    return arviz


@pytest.fixture(scope="module")
def both():
    """After a warm-up that was collected, and after the run that followed."""
    mcmc = MCMC(
        SubsampleAnnealedGibbs(mixture, split_merge=None),
        num_warmup=NUM_WARMUP,
        num_samples=NUM_SAMPLES,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(random.key(0), X, collect_warmup=True)
    before = copy.copy(mcmc)
    warmup = collect_warmup(mcmc)
    mcmc.run(random.key(1), X)
    return before, warmup, mcmc


@pytest.fixture(scope="module")
def mcmc(both):
    return both[2]


def test_statistics_that_were_not_collected_are_left_out(mcmc):
    # As after NumPyro's `Gibbs`, which collects none of its kernels.
    bare = copy.copy(mcmc)
    name = bare._sample_field
    bare._states = {name: bare._states[name]}
    bare._states_flat = None
    assert not bare.get_extra_fields()
    data = to_arviz(bare)
    assert data["posterior"]["z"].shape == (CHAINS, NUM_SAMPLES, N)
    assert "sample_stats" not in str(data)


@pytest.fixture(scope="module")
def posterior(mcmc):
    return Posterior.from_mcmc(mcmc)


@pytest.fixture(scope="module")
def in_views():
    mcmc = MCMC(
        SubsampleAnnealedGibbs(
            views_model,
            split_merge=None,
            feature_moves=FeatureMoves(num_sets=0, num_guided=0, num_splits=0),
        ),
        num_warmup=2,
        num_samples=5,
        progress_bar=False,
    )
    mcmc.run(random.key(0), *VIEWS_ARGS)
    return mcmc


def groups(data):
    return set(inference_data._groups(data))


def dims(data, group, name):
    return data[group][name].dims[2:]


# --- a mixture ---


def test_axes_have_the_names_of_the_plates(mcmc, az):
    data = to_arviz(mcmc)
    assert type(data) is type(az.from_numpyro(mcmc, log_likelihood=False))
    assert groups(data) == {"posterior", "sample_stats", "observed_data"}
    assert dims(data, "posterior", "z") == ("rows",)
    for name in ("loc", "var", "sd"):
        assert dims(data, "posterior", name) == ("clusters", "features")
    assert data["observed_data"]["x"].dims == ("rows", "features")
    assert data["sample_stats"]["log_joint"].dims == ("chain", "draw")
    np.testing.assert_array_equal(data["observed_data"]["x"], X)
    samples = mcmc.get_samples(group_by_chain=True)
    assert set(data["posterior"].data_vars) == set(samples)
    for name, value in samples.items():
        np.testing.assert_array_equal(data["posterior"][name], value)
    for name, value in mcmc.get_extra_fields(group_by_chain=True).items():
        np.testing.assert_array_equal(data["sample_stats"][name], value)


def test_the_converter_of_arviz_takes_them_with_its_defaults(mcmc, posterior, az):
    data = az.from_numpyro(mcmc)
    assert {"posterior", "sample_stats", "observed_data"} <= groups(data)
    assert data["posterior"]["z"].shape == (CHAINS, NUM_SAMPLES, N)
    if "log_likelihood" in groups(data):  # ArviZ 0 computes it unless told otherwise
        own = data["log_likelihood"]["x"]
        assert own.dims == ("chain", "draw", "rows", "features")
        # It knows the cluster of the row, and so is too good.
        assert own.sum("features").mean() > posterior.log_likelihood().mean() + 0.1


LABELS = {
    "strings": [f"row {i}" for i in range(N)],
    "shuffled integers": np.random.default_rng(0).permutation(N) + 100,
    "index of strings": pd.Index([f"r{i}" for i in range(N)][::-1]),
    "nullable integers": pd.Index(np.arange(N)[::-1], dtype="Int64"),
    "dates": pd.date_range("2020-01-01", periods=N)[::-1],
    "numbers": np.linspace(1.0, 0.0, N),
    "mixed": ["a", 1, 2.5, None, *range(4, N)],
    "pairs": pd.MultiIndex.from_product([["a", "b"], range(N // 2)]),
    "flags": [i % 3 == 0 for i in range(N)],
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_and_order_survive_a_file(mcmc, az, tmp_path, kind):
    labels = LABELS[kind]
    names = {"rows": labels, "features": ["b", "a"]}
    data = to_arviz(mcmc, coords=names)
    path = tmp_path / "draws.nc"
    data.to_netcdf(str(path), engine="h5netcdf")
    found = az.from_netcdf(str(path))
    expected = list(labels)
    if kind in ("mixed", "pairs"):
        expected = [str(label) for label in labels]
    for group, name in (("posterior", "z"), ("observed_data", "x")):
        own = found[group][name]
        assert list(pd.Index(own["rows"].values)) == expected
        np.testing.assert_array_equal(own, data[group][name])
    assert found["posterior"]["loc"]["features"].values.tolist() == ["b", "a"]
    np.testing.assert_array_equal(found["observed_data"]["x"], X)
    found.close()


def test_a_row_is_found_by_its_label(mcmc):
    labels = LABELS["shuffled integers"]
    data = to_arviz(mcmc, coords={"rows": labels})
    z = mcmc.get_samples(group_by_chain=True)["z"]
    for row in (0, 7):
        own = data["posterior"]["z"].sel(rows=labels[row])
        np.testing.assert_array_equal(own, z[:, :, row])


def test_labels_of_all_columns_may_come_with_those_of_their_axes(mcmc):
    # As `Table.coords` has them: no axis of a mixture is that of all columns.
    names = {"features": ["b", "a"], "columns": ["b", "a"]}
    data = to_arviz(mcmc, coords=names)
    assert data["posterior"]["loc"]["features"].values.tolist() == ["b", "a"]
    with pytest.raises(ValueError, match="'columns', which is not an axis"):
        to_arviz(mcmc, coords=names | {"columns": ["b", "c"]})


def test_draws_come_back_from_a_file(mcmc, posterior, tmp_path):
    data = to_arviz(mcmc, coords={"rows": LABELS["shuffled integers"]})
    path = tmp_path / "draws.nc"
    data.to_netcdf(str(path), engine="h5netcdf")
    again = Posterior.from_arviz(mixture, path, (X,))
    assert again.num_chains == CHAINS and again.num_draws == DRAWS
    expected = posterior.log_density(X)
    np.testing.assert_allclose(again.log_density(X), expected, rtol=1e-5, atol=1e-5)
    path.unlink()  # it is closed
    for name, value in inference_data.posterior_samples(data).items():
        np.testing.assert_array_equal(
            value, mcmc.get_samples(group_by_chain=True)[name], err_msg=name
        )


def test_draws_are_read_whatever_the_order_of_the_axes(mcmc):
    data = to_arviz(mcmc)
    turned = data["posterior"]["z"].transpose("rows", "draw", "chain")
    data["posterior"]["z"] = turned
    z = inference_data.posterior_samples(data)["z"]
    np.testing.assert_array_equal(z, mcmc.get_samples(group_by_chain=True)["z"])


def test_what_is_not_of_the_posterior_is_refused(mcmc):
    data = to_arviz(mcmc)
    del data["posterior"]
    with pytest.raises(ValueError, match="no group 'posterior'.*observed_data"):
        Posterior.from_arviz(mixture, data, (X,))
    data = to_arviz(mcmc)
    with pytest.raises(ValueError, match="samples of .*'z'"):
        Posterior.from_arviz(mixture, data, (X[:-1],))


def test_log_likelihood_is_of_rows_and_for_loo(mcmc, posterior, az):
    data = to_arviz(mcmc, coords={"rows": LABELS["strings"]}, log_likelihood=True)
    own = data["log_likelihood"]["joint"]
    assert own.dims == ("chain", "draw", "rows")
    assert own["rows"].values.tolist() == LABELS["strings"]
    expected = posterior.log_likelihood().reshape(CHAINS, NUM_SAMPLES, N)
    np.testing.assert_allclose(own, expected, rtol=1e-5)


# Of so few draws the tail is fitted badly.
@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_arviz_computes_loo_of_it(mcmc, az, monkeypatch):
    # (In these draws the partition never changes, and ArviZ 1 wants a tail to fit.)
    values = np.random.default_rng(0).normal(-3.0, 0.1, (DRAWS, N))
    monkeypatch.setattr(Posterior, "log_likelihood", lambda self: values)
    data = to_arviz(mcmc, log_likelihood=True)
    own = data["log_likelihood"]["joint"]
    np.testing.assert_array_equal(own[1, 3], values[NUM_SAMPLES + 3])
    found = az.loo(data)
    elpd = found.elpd if hasattr(found, "elpd") else found["elpd_loo"]
    assert float(elpd) == pytest.approx(-3.0 * N, abs=1.0)
    assert found.n_data_points == N


# --- the warm-up ---


def test_the_warmup_is_kept_with_the_number_of_rows_included(both):
    before, warmup, mcmc = both
    data = to_arviz(mcmc, warmup=warmup, coords={"rows": LABELS["strings"]})
    size = before.get_extra_fields(group_by_chain=True)["subsample_size"]
    assert size[0, 0] < N == size[0, -1]
    for group in ("warmup_posterior", "warmup_sample_stats"):
        own = data[group]
        assert own["subsample_size"].dims == ("draw",)
        assert "subsample_size" in own.coords
        np.testing.assert_array_equal(own["subsample_size"], size[0])
    z = data["warmup_posterior"]["z"]
    assert z.dims == ("chain", "draw", "rows")
    assert z["rows"].values.tolist() == LABELS["strings"]
    np.testing.assert_array_equal((z >= 0).sum("rows"), size)
    assert data["warmup_sample_stats"]["num_clusters"].shape == size.shape
    # The draws of the posterior are not those of the warm-up.
    assert (data["posterior"]["z"] >= 0).all()
    assert data["posterior"].sizes["draw"] == NUM_SAMPLES


def test_the_warmup_survives_a_file(both, az, tmp_path):
    _, warmup, mcmc = both
    path = str(tmp_path / "draws.nc")
    to_arviz(mcmc, warmup=warmup).to_netcdf(path, engine="h5netcdf")
    found = az.from_netcdf(path)
    own = found["warmup_sample_stats"]["log_joint"]
    np.testing.assert_array_equal(own, warmup.statistics["log_joint"])
    np.testing.assert_array_equal(
        own["subsample_size"], warmup.statistics["subsample_size"][0]
    )
    found.close()


def test_chains_that_began_differently_have_their_own_numbers_of_rows(both):
    _, warmup, mcmc = both
    size = warmup.statistics["subsample_size"] + np.arange(CHAINS)[:, None]
    other = Warmup(warmup.samples, warmup.statistics | {"subsample_size": size})
    own = to_arviz(mcmc, warmup=other)["warmup_posterior"]["subsample_size"]
    assert own.dims == ("chain", "draw")
    np.testing.assert_array_equal(own, size)


def test_the_warmup_is_taken_between_warmup_and_run(both):
    before, warmup, mcmc = both
    with pytest.raises(ValueError, match="before `mcmc.run`"):
        collect_warmup(mcmc)
    with pytest.raises(ValueError, match="call its `run` first"):
        to_arviz(before)
    new = MCMC(SubsampleAnnealedGibbs(mixture), num_warmup=1, num_samples=1)
    with pytest.raises(ValueError, match="before `mcmc.run`"):
        collect_warmup(new)
    with pytest.raises(ValueError, match="call its `run` first"):
        to_arviz(new)
    with pytest.raises(ValueError, match="`warmup` must be what `collect_warmup`"):
        to_arviz(mcmc, warmup=before)
    # What NumPyro leaves of a warm-up that was not collected.
    empty = copy.copy(before)
    empty._states = jax.tree.map(jnp.zeros_like, before._states)
    with pytest.raises(ValueError, match="collect_warmup=True"):
        collect_warmup(empty)
    # A chain that is about to be continued.
    on = copy.copy(mcmc)
    on.post_warmup_state = on.last_state
    assert "posterior" in groups(to_arviz(on))


# --- what the user says ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coords": {"rows": range(9)}}, r"'rows'\]` has 9 labels.*length 10"),
        ({"coords": {"row": range(N)}}, r"'row'.*not an axis.*'rows' \(10\)"),
        ({"dims": {"y": ["a"]}}, "`dims` names 'y'"),
        ({"dims": {"loc": ["clusters"]}}, r"`dims\['loc'\]` must be.*2 axes"),
        ({"dims": {"z": "rows"}}, r"`dims\['z'\]` must be a list"),
        ({"dims": {"loc": ["rows", None]}}, r"Axis 'rows' has length"),
        ({"dims": {"loc": ["draw", None]}}, "cannot be named 'draw'"),
        ({"dims": {"loc": ["var", None]}}, "cannot be named 'var'"),
        ({"dims": {"loc": ["features", None]}}, "cannot be named 'features'"),
        ({"posterior_predictive": {"y": X}}, "has 'y', which is not a site"),
        ({"posterior_predictive": {"x": X}}, r"\['x'\]` has shape \(10, 2\)"),
        (
            {"posterior_predictive": {"x": np.zeros((DRAWS, 3, D))}},
            "Draws of other rows go to `predictions`",
        ),
        ({"predictions": {"x": np.zeros((DRAWS, 3, D + 1))}}, r"`predictions\['x'\]`"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(mcmc, arguments, message):
    with pytest.raises(ValueError, match=message):
        to_arviz(mcmc, **arguments)


def test_axes_can_be_renamed(mcmc):
    data = to_arviz(
        mcmc,
        dims={"loc": [None, "column"], "x": ["rows", "column"]},
        coords={"column": ["a", "b"], "features": ["c", "d"]},
    )
    assert dims(data, "posterior", "loc") == ("clusters", "column")
    assert data["observed_data"]["x"]["column"].values.tolist() == ["a", "b"]
    assert data["posterior"]["var"]["features"].values.tolist() == ["c", "d"]


def test_draws_of_rows_are_predictions_where_the_rows_are_new(mcmc):
    drawn = np.random.default_rng(0).normal(size=(DRAWS, N, D))
    new = drawn.reshape(CHAINS, NUM_SAMPLES, N, D)[:, :, :3]
    data = to_arviz(
        mcmc,
        posterior_predictive={"x": drawn},
        predictions={"x": new},
        coords={"new_rows": ["p", "q", "r"], "features": ["a", "b"]},
    )
    own = data["posterior_predictive"]["x"]
    assert own.dims == ("chain", "draw", "rows", "features")
    np.testing.assert_array_equal(own[1, 2], drawn[NUM_SAMPLES + 2])
    own = data["predictions"]["x"]
    assert own.dims == ("chain", "draw", "new_rows", "features")
    assert own["new_rows"].values.tolist() == ["p", "q", "r"]
    np.testing.assert_array_equal(own, new)


# --- views ---


@few_clusters
def test_views_and_columns_have_names(in_views):
    data = to_arviz(in_views, coords={"reals": ["a", "b", "c"]})
    assert dims(data, "posterior", "z") == ("views", "rows")
    assert dims(data, "sample_stats", "num_clusters") == ("views",)
    view = data["posterior"]["view"]
    assert view.dims == ("chain", "draw", "view_column")
    names = ["a", "b", "c", "flag[0]", "flag[1]"]
    assert view["view_column"].values.tolist() == names
    own = [f"column {i}" for i in range(5)]
    data = to_arviz(in_views, coords={"view_column": own, "views": ["u", "v"]})
    assert data["posterior"]["view"]["view_column"].values.tolist() == own
    stats = data["sample_stats"]["num_clusters"]
    assert stats["views"].values.tolist() == ["u", "v"]
    np.testing.assert_array_equal(stats[0], in_views.get_extra_fields()["num_clusters"])


def test_imputed_cells_have_their_rows_and_columns(in_views):
    found = Posterior.from_mcmc(in_views).impute(random.key(1))
    rows, columns = list("qrstuv"), ["a", "b", "c"]
    data = to_arviz(
        in_views,
        posterior_predictive=found,
        coords={"rows": rows, "reals": columns},
    )
    own = data["posterior_predictive"]["x"]
    assert own.dims == ("chain", "draw", "x_cell")
    np.testing.assert_array_equal(own[0], found["x"].draws)
    index = np.argwhere(np.isnan(REALS))
    assert own["x_cell_rows"].values.tolist() == [rows[i] for i in index[:, 0]]
    assert own["x_cell_reals"].values.tolist() == [columns[i] for i in index[:, 1]]


# --- other models ---


def axes(model, *args):
    return {
        name: own.names
        for name, own in inference_data._axes(
            model, args, {}, recognise(model, args, {})
        ).items()
    }


def test_axes_without_a_plate():
    def model(x):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        with numpyro.plate("clusters", 3):
            loc = numpyro.sample(
                "loc", dist.MultivariateNormal(jnp.zeros(2), 9 * jnp.eye(2))
            )
        numpyro.sample("x", dist.MultivariateNormal(loc[z], jnp.eye(2)), obs=x)

    found = axes(model, X)
    assert found["z"] == ["z_row"] and found["x"] == ["z_row", None]
    assert found["loc"] == ["clusters", None]
    full = inference_data._rename(
        inference_data._axes(model, (X,), {}, recognise(model, (X,), {})),
        {"x": [None, "xy"]},
    )
    assert full["loc"] == ["clusters", "loc_dim_0"] and full["x"] == ["z_row", "xy"]


def test_axes_of_weights_and_of_plates_that_share_a_name():
    def model(x, y):
        with numpyro.plate("clusters", CAPACITY):
            loc = numpyro.sample("loc", dist.Normal(0.0, 5.0).expand([1]).to_event(0))
        w = numpyro.sample("w", dist.Dirichlet(jnp.ones(CAPACITY)))
        with numpyro.plate("rows", len(x)):
            z = numpyro.sample("z", dist.Categorical(w))
            numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)
        with numpyro.plate("draw", 2, dim=-1):
            with numpyro.plate("clusters", CAPACITY, dim=-2):
                rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
            with numpyro.plate("rows", len(x), dim=-2):
                numpyro.sample("y", dist.Poisson(rate[z]), obs=y)

    found = axes(model, X[:, 0], np.ones((N, 2), int))
    assert found["w"] == ["clusters"] and found["z"] == ["rows"]
    assert found["y"] == ["rows", "y_draw"]  # ArviZ has an axis of that name
    assert found["rate"] == ["clusters", "rate_draw"]


def test_the_columns_of_one_site_name_the_axis_of_their_views():
    def model(x):
        view = numpyro.sample("view", PitmanYorProcess(1.0, 0.1, size=x.shape[1]))
        with numpyro.plate("views", 2):
            z = numpyro.sample("z", PitmanYorProcess(1.0, 0.1, size=len(x)))
        with numpyro.plate("columns", x.shape[1], dim=-1):
            with numpyro.plate("clusters", 3, dim=-2):
                loc = numpyro.sample("loc", dist.Normal(0.0, 5.0))
            with numpyro.plate("rows", len(x), dim=-2):
                at = loc[z[view].T, jnp.arange(x.shape[1])]
                numpyro.sample("x", dist.Normal(at, 1.0), obs=x)

    found = axes(model, blobs(5))
    assert found["view"] == ["columns"] and found["z"] == ["views", "rows"]


def test_plates_of_different_sizes_do_not_share_an_axis():
    def model(x, y):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        for name, value in (("x", x), ("y", y)):
            with numpyro.plate("features", value.shape[1], dim=-1):
                with numpyro.plate("clusters", 3, dim=-2):
                    loc = numpyro.sample(f"loc_{name}", dist.Normal(0.0, 5.0))
                with numpyro.plate("rows", len(x), dim=-2):
                    numpyro.sample(name, dist.Normal(loc[z], 1.0), obs=value)

    found = axes(model, X, np.c_[X, X])
    assert found["x"] == ["rows", "x_features"]
    assert found["loc_y"] == ["clusters", "loc_y_features"]


def test_statistics_of_a_block_have_their_own_names():
    fields = {"block_states.0.log_joint": 1, "block_states.1.num_steps": 2}
    found = inference_data._short_names(fields)
    assert found == {"log_joint": 1, "block_states.1.num_steps": 2}
    twice = {"block_states.0.log_joint": 1, "block_states.1.log_joint": 2}
    assert inference_data._short_names(twice) == twice
