# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Missing cells: masks of any pattern, through `MCMC`.

A masked cell contributes nothing, whatever sits in it. That the draws then follow the
posterior is tested against enumerations elsewhere; here, how masks are written, what
they let through, and which are refused.
"""

from functools import partial

import arviz as az
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from small_models import blobs

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, Predictive

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    NotRecognised,
    SplitMerge,
    SubsampleAnnealedGibbs,
    explain,
    rows,
    testing,
)

# Nearly all of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled

K = 5
X = blobs(10)
CODES = np.array([[0, 2], [1, 0], [0, 2], [1, 1], [0, 2], [1, 0], [0, 1], [1, 0]])
CODES = np.concatenate([CODES, CODES[:2]]).astype(np.int32)
MASK = np.random.default_rng(0).random(X.shape) < 0.5
MASK[3] = False  # a row without any cell
assert MASK.any(0).all()
CODE_MASK = MASK[:, ::-1]


def parameters():
    with numpyro.plate("features", 2, dim=-1), numpyro.plate("clusters", K, dim=-2):
        var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
        loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)))
    return loc, var, probs


def by_handler(x, mask, codes, code_mask):
    loc, var, probs = parameters()
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    with numpyro.plate("columns", 2, dim=-1), numpyro.plate("rows", len(x), dim=-2):
        with handlers.mask(mask=mask):
            numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)
        with handlers.mask(mask=code_mask):
            numpyro.sample("codes", dist.Categorical(probs[z]), obs=codes)


def by_method(x, mask, codes, code_mask):
    loc, var, probs = parameters()
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    normal = dist.Normal(loc[z], jnp.sqrt(var[z])).mask(mask)
    numpyro.sample("x", normal.to_event(1), obs=x)
    with handlers.mask(mask=code_mask):
        numpyro.sample("codes", dist.Categorical(probs[z]), obs=codes)


def by_obs_mask(x, mask, codes, code_mask):
    loc, var, probs = parameters()
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    fn = dist.Normal(loc[z], jnp.sqrt(var[z]))
    imputed = numpyro.sample("x", fn, obs=x, obs_mask=mask)
    numpyro.deterministic("mean", imputed.mean())
    numpyro.deterministic("sd", jnp.sqrt(var))
    numpyro.sample("codes", dist.Categorical(probs[z]), obs=codes, obs_mask=code_mask)


FORMS = {"handler": by_handler, "method": by_method, "obs_mask": by_obs_mask}
by_form = pytest.mark.parametrize("model", FORMS.values(), ids=FORMS)


def run(
    model,
    x=X,
    mask=MASK,
    codes=CODES,
    code_mask=CODE_MASK,
    num_samples=20,
    jit_model_args=True,
    split_merge=None,
    **options,
):
    # NB: with data as arguments most runs here are the same program, compiled once.
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model, split_merge=split_merge),
        num_warmup=3,
        num_samples=num_samples,
        progress_bar=False,
        jit_model_args=jit_model_args,
        **options,
    )
    with numpyro.validation_enabled(False):
        mcmc.run(random.key(0), x, mask, codes, code_mask)
    return mcmc


@pytest.fixture(scope="module")
def obs_mask_run():
    """Of many draws, which serves all tests that need one of the form."""
    return run(by_obs_mask, num_samples=1000)


@pytest.fixture(scope="module")
def handler_run():
    return run(by_handler)


@pytest.fixture(scope="module")
def run_without_real_cells():
    return run(by_handler, mask=np.zeros_like(MASK))


def first_draws(mcmc, num=20):
    return {name: value[:num] for name, value in mcmc.get_samples().items()}


@pytest.mark.parametrize(
    "jit_model_args, split_merge",
    [
        pytest.param(False, None, id="constants"),
        # As users compile it.
        pytest.param(
            True,
            SplitMerge(),
            id="arguments, splits",
            marks=pytest.mark.quickly_compiled(False),
        ),
    ],
)
def test_what_sits_in_a_masked_cell_is_never_read(
    obs_mask_run, jit_model_args, split_merge
):
    model, mcmc = by_obs_mask, obs_mask_run
    if split_merge is not None:
        mcmc = run(model, split_merge=split_merge)
    expected = first_draws(mcmc)
    rubbish = [np.nan, np.inf, -np.inf, -1.0, 1e6, 1e38]
    codes = [-1, 3, 1_000_000, -(2**31), 2**31 - 1, 99]
    x, c = X.copy(), CODES.copy()
    x[~MASK] = np.resize(rubbish, (~MASK).sum())
    c[~CODE_MASK] = np.resize(codes, (~CODE_MASK).sum())
    options = {"jit_model_args": jit_model_args, "split_merge": split_merge}
    got = run(model, x, codes=c, **options).get_samples()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert np.isfinite(value).all(), name
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_a_row_that_goes_back_is_read_once_with_its_mask(monkeypatch):
    def anneal():
        kernel = SubsampleAnnealedGibbs(by_handler, split_merge=None)
        mcmc = MCMC(kernel, num_warmup=8, num_samples=1, progress_bar=False)
        args = X, MASK, CODES, CODE_MASK
        with numpyro.validation_enabled(False):
            mcmc.warmup(random.key(0), *args, collect_warmup=True)
        return mcmc.get_samples()["z"]

    expected = anneal()
    monkeypatch.setattr(rows, "_MANY", 0)
    np.testing.assert_array_equal(anneal(), expected)


def test_the_ways_to_write_a_mask_agree(obs_mask_run, handler_run):
    first, second = handler_run.get_samples(), run(by_method).get_samples()
    third = first_draws(obs_mask_run)
    assert set(first) == set(second) < set(third)
    for name, value in first.items():
        # Different programs, in which the last digit may differ; labels are the same.
        same = {"rtol": 0 if name == "z" else 1e-5, "err_msg": name}
        np.testing.assert_allclose(second[name], value, **same)
        np.testing.assert_allclose(third[name], value, **same)


def test_a_mask_of_ones_changes_nothing_but_rounding():
    # The same keys, and scores that differ in the last digits only.
    mask = np.ones_like(MASK)
    plain = MCMC(
        SubsampleAnnealedGibbs(
            partial(by_handler, mask=True, code_mask=True), split_merge=None
        ),
        num_warmup=3,
        num_samples=20,
        progress_bar=False,
    )
    plain.run(random.key(0), X, codes=CODES)
    masked = run(by_handler, mask=mask, code_mask=mask)
    np.testing.assert_array_equal(masked.get_samples()["z"], plain.get_samples()["z"])
    for name in ("loc", "probs"):
        np.testing.assert_allclose(
            masked.get_samples()[name], plain.get_samples()[name], rtol=1e-3, atol=1e-4
        )


def test_log_joint_is_that_of_the_cells_that_are_there(handler_run):
    draws, fields = handler_run.get_samples(), handler_run.get_extra_fields()
    for z, got in zip(np.asarray(draws["z"]), fields["log_joint"], strict=True):
        expected = testing.log_eppf(z, 1.0)
        for k in range(z.max() + 1):
            for d in range(2):
                rows = (z == k) & MASK[:, d]
                expected += testing.normal_log_marginal(
                    X[rows, d : d + 1], 0.0, 0.1, 2.0, 1.0
                )
                rows = (z == k) & CODE_MASK[:, d]
                expected += testing.categorical_log_marginal(
                    CODES[rows, d : d + 1], np.ones(3)
                )
        np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize("form", ["False", "scalar"])
def test_a_column_without_any_cell_is_no_data(form, run_without_real_cells):
    mask = {"False": False, "scalar": np.array(False)}
    x = np.full_like(X, np.nan)
    found = run(by_handler, x, mask[form]).get_samples()["z"]
    expected = run_without_real_cells.get_samples()["z"]
    np.testing.assert_array_equal(found, expected)


def test_a_mask_of_rows():
    rows = np.arange(10)[:, None] % 3 > 0
    narrow = run(by_handler, mask=rows).get_samples()
    full = run(by_handler, mask=np.broadcast_to(rows, X.shape)).get_samples()
    np.testing.assert_array_equal(narrow["z"], full["z"])


def test_all_rows_without_cells_follow_the_prior():
    # 4,000 draws of 3 rows, thinned until they are close to independent: chi-square
    # with a false alarm of 1e-3.
    nothing = np.zeros((3, 2), bool)
    mcmc = MCMC(
        SubsampleAnnealedGibbs(by_handler, split_merge=None),
        num_warmup=2,
        num_samples=500,
        thinning=5,
        num_chains=40,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), X[:3], nothing, CODES[:3], nothing)
    partitions = testing.set_partitions(3)
    probs = np.exp(testing.log_eppf(partitions, 1.0))
    index = testing.partition_index(np.asarray(mcmc.get_samples()["z"]), partitions)
    assert testing.goodness_of_fit(index, probs).p_value > 1e-3


@pytest.mark.parametrize("chain_method", ["vectorized", "parallel"])
def test_several_chains(chain_method):
    mcmc = run(by_obs_mask, num_chains=2, chain_method=chain_method)
    assert mcmc.get_samples()["z"].shape == (40, 10)


def test_masked_cells_are_drawn_and_arviz_and_predictive_go_on(obs_mask_run):
    draws = first_draws(obs_mask_run)
    unobserved = {"x_unobserved", "codes_unobserved"}
    assert set(draws) == {"z", "var", "loc", "probs", "sd", "mean", "x", "codes"} | (
        unobserved
    )
    np.testing.assert_array_equal(draws["x"], np.where(MASK, X, draws["x_unobserved"]))
    assert "loc" in az.from_numpyro(obs_mask_run).posterior
    out = Predictive(by_obs_mask, {k: draws[k] for k in ("z", "var", "loc", "probs")})(
        random.key(1), X, MASK, CODES, CODE_MASK
    )
    np.testing.assert_array_equal(
        out["x"][:, MASK], np.broadcast_to(X, (20, 10, 2))[:, MASK]
    )


def test_masked_cells_follow_the_likelihood_of_their_cluster(obs_mask_run):
    # 10^4 draws of standardised masked cells: Kolmogorov-Smirnov at 1e-4.
    draws = {k: np.asarray(v) for k, v in obs_mask_run.get_samples().items()}
    z = draws["z"]
    loc, sd = (np.take_along_axis(draws[k], z[..., None], 1) for k in ("loc", "sd"))
    residual = ((draws["x_unobserved"] - loc) / sd)[:, ~MASK].ravel()
    assert stats.kstest(residual, "norm").pvalue > 1e-4


def test_explain_counts_masked_cells(capsys):
    explain(by_obs_mask, X, MASK, CODES, CODE_MASK)
    shown = capsys.readouterr().out
    assert f"{(~MASK).sum()} of 20 cells masked" in shown
    assert "x_unobserved      masked cells" in shown


def test_x64():
    with jax.enable_x64(True):
        draws = run(by_handler).get_samples()
    assert draws["loc"].dtype == np.float64 and np.isfinite(draws["loc"]).all()


# --- Refusals -----------------------------------------------------------------


def refused(model, *args, **kwargs):
    mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=1, num_samples=1)
    with pytest.raises(NotRecognised) as error:
        mcmc.run(random.key(0), *args, **kwargs)
    return str(error.value)


@by_form
def test_a_bad_cell_that_is_not_masked_is_refused(model):
    x = X.copy()
    x[2, 1] = np.nan
    mask = MASK.copy()
    mask[2, 1] = True
    message = refused(model, x, mask, CODES, CODE_MASK)
    assert "Column 1" in message and "nan" in message and "row 2" in message
    assert "numpyro.handlers.mask" in message


@pytest.mark.parametrize("mask", [True, False])
def test_an_obs_mask_of_one_value_is_refused(mask):
    message = refused(by_obs_mask, X, mask, CODES, CODE_MASK)
    assert "`obs_mask` of 'x'" in message and f"array of {X.shape} booleans" in message


def test_a_mask_that_is_not_a_constant_is_refused():
    def model(x):
        loc, var, _ = parameters()
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        fn = dist.Normal(loc[z], jnp.sqrt(var[z])).mask((z == 0)[:, None])
        numpyro.sample("x", fn, obs=x)

    with handlers.block(hide=["probs"]):
        message = refused(model, X)
    assert "mask" in message and "'x'" in message and "'z'" in message


@pytest.mark.parametrize("site", ["var", "z"])
def test_a_masked_latent_site_is_refused(site):
    def model(x):
        with handlers.mask(mask=site != "var"):
            with numpyro.plate("clusters", K):
                var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
        with numpyro.plate("clusters", K):
            loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
        with handlers.mask(mask=jnp.array(site != "z")):
            z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)

    message = refused(model, X[:, 0])
    assert f"'{site}'" in message and "masked" in message


@pytest.mark.parametrize("num_rows", [4, 2])
def test_a_partly_masked_event_is_refused(num_rows):
    # Also where a mask of cells has by chance a shape that NumPyro would broadcast.
    def model(x, mask):
        with numpyro.plate("clusters", K):
            loc = numpyro.sample(
                "loc", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2))
            )
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        fn = dist.MultivariateNormal(loc[z], jnp.eye(2))
        with handlers.mask(mask=mask):
            numpyro.sample("x", fn, obs=x)

    mask = np.ones((num_rows, 2), bool)
    mask[1, 0] = False
    message = refused(model, X[:num_rows], mask)
    assert "'x'" in message and "masked by coordinate" in message
    assert "as a whole" in message
