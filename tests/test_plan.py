# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What is recognised, and what is refused in which words.

Each refusal names the site, and the column, row and value where there is one, and says
the way out; it comes before anything slow is compiled.
"""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    Grid,
    NotRecognised,
    PitmanYorProcess,
    SubsampleAnnealedGibbs,
    explain,
    rows,
    testing,
)
from numpyro_subanneal import plan as planning

# Nearly all of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled

N, D, K = 6, 2, 4
RNG = np.random.default_rng(0)
X1 = RNG.normal(size=N).astype(np.float32)
X2 = RNG.normal(size=(N, D)).astype(np.float32)
X3 = RNG.normal(size=(N, 2, 3)).astype(np.float32)
CODES = np.array([0, 1, 2, 2, 1, 0])
FLAGS = np.array([True, False, True, True, False, True])
COVARIATE = np.linspace(-1.0, 1.0, N).astype(np.float32)


# --- Building blocks of models ---


def crp(x):
    return numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))


def normal_prior(shape=(K,), suffix=""):
    """Cluster parameters of independent normals, without plates."""
    var = numpyro.sample(f"var{suffix}", dist.InverseGamma(2.0, 1.0).expand(shape))
    loc = numpyro.sample(f"loc{suffix}", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
    return loc, var


def one_column(
    likelihood=lambda x, z, loc, var: dist.Normal(loc[z], jnp.sqrt(var[z])),
    loc_prior=lambda var: dist.Normal(0.0, jnp.sqrt(var / 0.1)),
    var_prior=lambda: dist.InverseGamma(2.0, 1.0),
    partition=lambda n: ChineseRestaurantProcess(1.0, size=n),
    num_clusters=K,
):
    """A model of one column, in plates, with some part of it replaced."""

    def model(x):
        z = numpyro.sample("z", partition(len(x)))
        with numpyro.plate("clusters", num_clusters):
            var = numpyro.sample("var", var_prior())
            loc = numpyro.sample("loc", loc_prior(var))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", likelihood(x, z, loc, var), obs=x)

    return model


def categories(num=3, shape=(K,), name="x", probs="probs"):
    def model(x):
        z = crp(x)
        p = numpyro.sample(probs, dist.Dirichlet(jnp.ones(num)).expand(shape))
        numpyro.sample(name, dist.Categorical(p[z]), obs=x)

    return model


# --- Accepted ---


def in_plates(x):
    with numpyro.plate("features", D, dim=-1):
        with numpyro.plate("clusters", K, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
            loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
    z = crp(x)
    with numpyro.plate("features", D, dim=-1), numpyro.plate("rows", len(x), dim=-2):
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def to_event(x):
    z = crp(x)
    with numpyro.plate("clusters", K):
        var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0).expand([D]).to_event(1))
        loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])).to_event(1), obs=x)


def expanded(x):
    z = crp(x)
    loc, var = normal_prior((K, *x.shape[1:]))
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def no_rows_plate(x):
    z = crp(x)
    with numpyro.plate("clusters", K, dim=-2), numpyro.plate("features", D, dim=-1):
        loc, var = normal_prior(())
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def standardised(x):
    x = (x - x.mean(0)) / x.std(0)
    expanded(x)


def standardised_by_jax(x):
    expanded(jnp.asarray(x - jnp.mean(x, 0)) / jnp.std(x, 0))


def not_a_number(x):
    z = crp(x)
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0).expand((K,)))
    numpyro.sample("x", dist.Normal(loc[z], jnp.nan), obs=x)


def not_a_covariance(x):
    z = crp(x)
    prior = dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2))
    loc = numpyro.sample("loc", prior.expand((K,)))
    cov = jnp.array([[1.0, 2.0], [2.0, 1.0]])
    numpyro.sample("x", dist.MultivariateNormal(loc[z], cov), obs=x)


def flat(x):
    z = crp(x)
    loc = numpyro.sample("loc", dist.Normal(0.0, 1e30).expand((K,)))
    numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


def with_deterministic(x):
    z = crp(x)
    loc, var = normal_prior()
    at = numpyro.deterministic("at", loc[z])
    numpyro.sample("x", dist.Normal(at, jnp.sqrt(var[z])), obs=x)
    numpyro.deterministic("sd", jnp.sqrt(var))


def pitman_yor_with_arrays(x):
    prior = PitmanYorProcess(jnp.exp(0.0), jnp.asarray(0.5), size=len(x))
    z = numpyro.sample("z", prior)
    loc, var = normal_prior()
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def several_sites(x, y, *, c, d):
    z = crp(x)
    loc, var = normal_prior((K, D))
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)
    loc, var = normal_prior((K,), "_y")
    numpyro.sample("y", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=y)
    for name, obs, num in (("c", c, 3), ("d", d, 5)):
        with numpyro.plate(f"clusters_{name}", K):
            p = numpyro.sample(f"p_{name}", dist.Dirichlet(jnp.full(num, 0.5)))
        numpyro.sample(name, dist.Categorical(p[z]), obs=obs)


class Recorded:
    """A callable that is not a function."""

    def __call__(self, x):
        expanded(x)


def gamma_precision(x):
    z = crp(x)
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0).expand([K]))
    loc = numpyro.sample("loc", dist.Normal(0.0, 1 / jnp.sqrt(tau * 0.1)))
    numpyro.sample("x", dist.Normal(loc[z], 1 / jnp.sqrt(tau[z])), obs=x)


def poisson_gamma(x):
    z = crp(x)
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0).expand([K]))
    numpyro.sample("x", dist.Poisson(rate[z]), obs=x)


def categories_by_logits(x):
    z = crp(x)
    p = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)).expand([K]))
    numpyro.sample("x", dist.Categorical(logits=jnp.log(p[z])), obs=x)


ACCEPTED = {
    "plates": (in_plates, X2),
    "to_event": (to_event, X2),
    "expand": (expanded, X2),
    "no rows plate": (no_rows_plate, X2),
    "one column": (one_column(), X1),
    "two feature axes": (expanded, X3),
    "standardised inside": (standardised, X2),
    "standardised inside by jax": (standardised_by_jax, X2),
    "deterministic": (with_deterministic, X1),
    "jax arrays": (expanded, jnp.asarray(X2)),
    "float64": (expanded, X2.astype(np.float64)),
    "float16": (expanded, X2.astype(np.float16)),
    "fortran order": (expanded, np.asfortranarray(X2)),
    "int64 as reals": (expanded, np.arange(N * D).reshape(N, D)),
    "bool as reals": (expanded, FLAGS),
    "categories": (categories(), CODES),
    "categories int8": (categories(), CODES.astype(np.int8)),
    "categories uint8": (categories(), CODES.astype(np.uint8)),
    "categories as floats": (categories(), CODES.astype(np.float32)),
    "categories as float64": (categories(), CODES.astype(np.float64)),
    "categories as bool": (categories(2), FLAGS),
    "columns of categories": (categories(3, (K, 2)), np.stack([CODES, CODES], 1)),
    "one row": (expanded, X2[:1]),
    "one row one column": (expanded, X2[:1, :1]),
    "one cluster": (one_column(num_clusters=1), X1),
    "more clusters than rows": (one_column(num_clusters=50), X1),
    "concentration as arrays": (pitman_yor_with_arrays, X1),
    "callable object": (Recorded(), X2),
}


@pytest.mark.parametrize(
    "model, x, sites",
    [
        (gamma_precision, X1, {"tau", "loc"}),
        (poisson_gamma, CODES, {"rate"}),
        (categories_by_logits, CODES, {"probs"}),
    ],
)
def test_other_pairs_are_accepted(model, x, sites):
    assert set(planning.recognise(model, (x,), {}).cluster_sites) == sites


@pytest.mark.parametrize("model, x", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(model, x):
    plan = planning.recognise(model, (x,), {})
    assert plan.partition.name == "z"
    assert plan.num_rows == len(x)
    (block,) = plan.blocks
    (site,) = block.sites
    assert site.name == "x"
    assert site.feature_shape == x.shape[1:]
    categorical = block.pair.form.startswith("The form is probs")
    assert set(plan.cluster_sites) == ({"probs"} if categorical else {"var", "loc"})
    assert bool(plan.deterministic) == (model is with_deterministic)


def test_capacity_is_the_size_of_the_clusters_plate():
    plan = planning.recognise(one_column(num_clusters=50), (X1,), {})
    assert plan.capacity == 50


MIXED = {"c": CODES, "d": CODES.astype(np.float64) + 2}


def test_sites_are_packed_by_pair():
    plan = planning.recognise(several_sites, (X2, X1), MIXED)
    packed = {tuple(s.name for s in block.sites) for block in plan.blocks}
    assert packed == {("x", "y"), ("c", "d")}
    assert set(plan.cluster_sites) == {"var", "loc", "var_y", "loc_y", "p_c", "p_d"}
    (counts,) = [b for b in plan.blocks if b.sites[0].name == "c"]
    assert [s.role_shapes for s in counts.sites] == [((3,),), ((5,),)]


def test_several_sites_of_all_kinds_run():
    mcmc = MCMC(
        SubsampleAnnealedGibbs(several_sites),
        num_warmup=2,
        num_samples=4,
        progress_bar=False,
    )
    mcmc.run(random.key(0), X2, X1, **MIXED)
    reals = np.column_stack([X2, X1]).astype(np.float64)
    codes = np.column_stack([CODES, CODES + 2])
    urns = [np.full(3, 0.5), np.full(5, 0.5)]
    expected = []
    for z in np.asarray(mcmc.get_samples()["z"]):
        total = testing.log_eppf(z, 1.0)
        for k in range(z.max() + 1):
            total += testing.normal_log_marginal(reals[z == k], 0.0, 0.1, 2.0, 1.0)
            total += testing.categorical_log_marginal(codes[z == k], urns)
        expected.append(total)
    got = mcmc.get_extra_fields()["log_joint"]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert mcmc.get_samples()["p_d"].shape == (4, K, 5)
    np.testing.assert_allclose(mcmc.get_samples()["p_d"].sum(-1), 1.0, rtol=1e-6)


def test_reading_a_model_leaves_no_mark_on_handlers_around_it():
    with handlers.trace() as trace, handlers.seed(rng_seed=0):
        planning.recognise(one_column(), (X1,), {})
    assert not trace


# --- Refused ---


def refused(model, *args, **kwargs):
    """The message with which `init` refuses a model, before anything slow."""
    kernel = SubsampleAnnealedGibbs(model)
    with pytest.raises(NotRecognised) as error:
        kernel.init(random.key(0), 3, None, args, kwargs)
    assert isinstance(error.value, ValueError)
    assert kernel._sample_fn is None  # nothing was set up to be compiled
    return str(error.value)


def no_partition(x):
    loc, var = normal_prior()
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("label", dist.Binomial(K - 1, 0.5))
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def two_partitions(x):
    loc, var = normal_prior()
    first = numpyro.sample("first", ChineseRestaurantProcess(1.0, size=len(x)))
    second = numpyro.sample("second", ChineseRestaurantProcess(1.0, size=len(x)))
    numpyro.sample("x", dist.Normal(loc[first], jnp.sqrt(var[second])), obs=x)


def partition_in_a_plate(x):
    loc, var = normal_prior()
    with numpyro.plate("views", 2):
        z = crp(x)
    numpyro.sample("x", dist.Normal(loc[z[0]], jnp.sqrt(var[z[1]])), obs=x)


def partition_that_nothing_uses(x):
    crp(x)
    loc, var = normal_prior()
    numpyro.sample("x", dist.Normal(loc[0], jnp.sqrt(var[0])).expand([N]), obs=x)


def scalar_loc(x):
    z = crp(x)
    var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0).expand([K]))
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    numpyro.sample("x", dist.Normal(loc, jnp.sqrt(var[z])), obs=x)


def shared_loc(x, y):
    z = crp(x)
    loc, var = normal_prior()
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)
    var = numpyro.sample("var_y", dist.InverseGamma(2.0, 1.0).expand([K]))
    numpyro.sample("y", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=y)


def prior_on_another_site(x, y):
    z = crp(x)
    loc, var = normal_prior()
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)
    var_y = numpyro.sample("var_y", dist.InverseGamma(2.0, 1.0).expand([K]))
    loc_y = numpyro.sample("loc_y", dist.Normal(loc, jnp.sqrt(var_y / 0.1)))
    numpyro.sample("y", dist.Normal(loc_y[z], jnp.sqrt(var_y[z])), obs=y)


def latent_mean(x):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    one_column(loc_prior=lambda var: dist.Normal(mean, jnp.sqrt(var / 0.1)))(x)


def latent_rate(x):
    rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
    one_column(var_prior=lambda: dist.InverseGamma(2.0, rate))(x)


def latent_concentration(x):
    alpha = numpyro.sample("alpha", dist.Gamma(1.0, 1.0))
    one_column(partition=lambda n: ChineseRestaurantProcess(alpha, size=n))(x)


def with_factor(x):
    z = crp(x)
    loc, var = normal_prior()
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)
    numpyro.factor("penalty", -(z == 0).sum().astype(float))


def poisson_lognormal(x):
    z = crp(x)
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 1.0).expand([K]))
    numpyro.sample("x", dist.Poisson(rate[z]), obs=x)


def tempered_categories(x):
    z = crp(x)
    p = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)).expand([K]))
    p = jnp.sqrt(p) / jnp.sqrt(p).sum(-1, keepdims=True)
    numpyro.sample("x", dist.Categorical(p[z]), obs=x)


def scaled(x):
    with handlers.scale(scale=2.0):
        one_column()(x)


def scaled_observation(x):
    z = crp(x)
    loc, var = normal_prior()
    with handlers.scale(scale=2.0):
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def subsampled(x):
    z = crp(x)
    loc, var = normal_prior()
    with numpyro.plate("rows", len(x), subsample_size=3) as index:
        zs = z[index]
        numpyro.sample("x", dist.Normal(loc[zs], jnp.sqrt(var[zs])), obs=x[index])


def observed_partition(x):
    prior = ChineseRestaurantProcess(1.0, size=len(x))
    z = numpyro.sample("z", prior, obs=jnp.zeros(len(x), jnp.int32))
    loc, var = normal_prior()
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def partition_in_a_plate_of_rows(x):
    with numpyro.plate("all", len(x)):
        z = crp(x)
    loc, var = normal_prior((K, x.shape[1]))
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def masked(x):
    z = crp(x)
    loc, var = normal_prior()
    with handlers.mask(mask=jnp.arange(len(x)) != 2):
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def masked_fn(x):
    z = crp(x)
    loc, var = normal_prior()
    fn = dist.Normal(loc[z], jnp.sqrt(var[z])).mask(jnp.arange(len(x)) != 2)
    numpyro.sample("x", fn, obs=x)


def obs_mask(x):
    z = crp(x)
    loc, var = normal_prior()
    mask = jnp.arange(len(x)) != 2
    fn = dist.Normal(loc[z], jnp.sqrt(var[z]))
    numpyro.sample("x", fn, obs=x, obs_mask=mask)


def rows_by_site(x, y):
    z = crp(x)
    loc, var = normal_prior()
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)
    loc, var = normal_prior((K,), "_y")
    z = z[: len(y)]
    numpyro.sample("y", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=y)


def rows_last(x):
    z = crp(X1)
    loc, var = normal_prior((K, D))
    numpyro.sample("x", dist.Normal(loc[z].T, jnp.sqrt(var[z].T)), obs=x)


def rows_of_the_partition(x):
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=N))
    loc, var = normal_prior()
    z = z[: len(x)]
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def clusters_of_two_sizes(x):
    z = crp(x)
    with numpyro.plate("more", K + 1):
        var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
    with numpyro.plate("clusters", K):
        loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var[:K] / 0.1)))
    numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def clusters_last(x):
    z = crp(x)
    loc, var = normal_prior((D, K))
    numpyro.sample("x", dist.Normal(loc.T[z], jnp.sqrt(var.T[z])), obs=x)


def one_loc_for_all_features(x):
    z = crp(x)
    var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0).expand([K, D]))
    loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var[:, 0] / 0.1)))
    numpyro.sample("x", dist.Normal(loc[z][:, None], jnp.sqrt(var[z])), obs=x)


def features_swapped(x):
    z = crp(x)
    loc, var = normal_prior((K, D))
    fn = dist.Normal(loc[z][:, ::-1], jnp.sqrt(var[z]))
    numpyro.sample("x", fn, obs=x)


def like(**parts):
    return one_column(**{name: eval(f"lambda {code}") for name, code in parts.items()})


def likelihood(code):
    """A model of one column with the likelihood `code`."""
    return like(likelihood=f"x, z, loc, var: {code}")


def loc_prior(code):
    return like(loc_prior=f"var: {code}")


# Model, arguments, words of the message.
REFUSED = {
    # The partition.
    "no partition": (
        no_partition,
        (X1,),
        ["no partition site", "ChineseRestaurantProcess", "'label'"],
    ),
    "two partitions": (two_partitions, (X1,), ["'first'", "'second'", "exactly one"]),
    "partition in a plate": (partition_in_a_plate, (X1,), ["'z'", "(2, 6)", "plate"]),
    "unused partition": (partition_that_nothing_uses, (X1,), ["'z'", "loc[z]"]),
    # Cluster parameters that the partition does not index.
    "loc[0]": (
        likelihood("dist.Normal(loc[0], jnp.sqrt(var[z]))"),
        (X1,),
        ["'x'", "'loc'", "loc[z]"],
    ),
    "var[0]": (
        likelihood("dist.Normal(loc[z], jnp.sqrt(var[0]))"),
        (X1,),
        ["'x'", "'var'", "var[z]"],
    ),
    "scalar loc": (scalar_loc, (X1,), ["'loc'", "scalar", "loc[z]"]),
    "as many clusters as rows, not indexed": (
        one_column(
            lambda x, z, loc, var: dist.Normal(loc, jnp.sqrt(var[z])), num_clusters=N
        ),
        (X1,),
        ["'x'", "'loc'", "loc[z]"],
    ),
    # Rows.
    "covariate": (
        likelihood("dist.Normal(loc[z] + COVARIATE, jnp.sqrt(var[z]))"),
        (X1,),
        ["`loc`", "'x'", "between rows", "covariates"],
    ),
    "row number": (
        likelihood("dist.Normal(loc[z] + 0.1 * jnp.arange(N), jnp.sqrt(var[z]))"),
        (X1,),
        ["`loc`", "'x'", "between rows", "covariates"],
    ),
    "weights of rows": (
        likelihood("dist.Normal(loc[z], jnp.sqrt(var[z] * (2 + COVARIATE)))"),
        (X1,),
        ["`scale`", "'x'", "between rows"],
    ),
    "autoregression": (
        likelihood("dist.Normal(loc[z] + 0.5 * jnp.roll(x, 1), jnp.sqrt(var[z]))"),
        (X1,),
        ["`loc`", "'x'", "between rows"],
    ),
    "neighbour's cluster": (
        likelihood("dist.Normal(loc[jnp.roll(z, 1)], jnp.sqrt(var[z]))"),
        (X1,),
        ["`loc`", "'x'", "cluster of another row", "`var[z]`"],
    ),
    # Clusters.
    "cumulative sum": (
        likelihood("dist.Normal(jnp.cumsum(loc)[z], jnp.sqrt(var[z]))"),
        (X1,),
        ["coupled", "`loc`", "'x'", "'loc'"],
    ),
    "centred": (
        likelihood("dist.Normal(loc[z] - loc.mean(), jnp.sqrt(var[z]))"),
        (X1,),
        ["coupled", "`loc`", "'x'", "'loc'"],
    ),
    "sorted": (
        likelihood("dist.Normal(jnp.sort(loc)[z], jnp.sqrt(var[z]))"),
        (X1,),
        ["`loc`", "'x'"],
    ),
    "another cluster's": (
        likelihood("dist.Normal(loc[(z + 1) % K], jnp.sqrt(var[z]))"),
        (X1,),
        ["`loc`", "'x'"],
    ),
    # The form of the pair.
    "variance as scale": (
        likelihood("dist.Normal(loc[z], var[z])"),
        (X1,),
        ["`scale`", "'x'", "sqrt(var[z])"],
    ),
    "precision for variance": (
        likelihood("dist.Normal(loc[z], 1 / jnp.sqrt(var[z]))"),
        (X1,),
        ["`scale`", "'x'", "sqrt(var[z])"],
    ),
    "shifted loc": (
        likelihood("dist.Normal(loc[z] + 1, jnp.sqrt(var[z]))"),
        (X1,),
        ["`loc`", "'x'", "expected"],
    ),
    "semi-conjugate": (
        loc_prior("dist.Normal(0.0, 3.0)"),
        (X1,),
        ["'x'", "'loc'", "`kappa`", "sqrt(var / kappa)"],
    ),
    "sd as variance in the prior": (
        loc_prior("dist.Normal(0.0, var / 0.1)"),
        (X1,),
        ["'x'", "'loc'", "`kappa`", "sqrt(var / kappa)"],
    ),
    "prior mean on variance": (
        loc_prior("dist.Normal(var, jnp.sqrt(var / 0.1))"),
        (X1,),
        ["'x'", "'loc'", "`mean`"],
    ),
    "prior by cluster": (
        loc_prior("dist.Normal(jnp.arange(float(K)), jnp.sqrt(var / 0.1))"),
        (X1,),
        ["'x'", "'loc'", "`mean`", "clusters", "same"],
    ),
    "rate by cluster": (
        like(var_prior=": dist.InverseGamma(2.0, 1.0 + jnp.arange(float(K)))"),
        (X1,),
        ["'x'", "'var'", "`rate`", "clusters", "same"],
    ),
    "prior on another observed site's": (
        prior_on_another_site,
        (X1, X1),
        ["'loc_y'", "'loc'", "'y'"],
    ),
    "tempered categories": (
        tempered_categories,
        (CODES,),
        ["`probs`", "'x'", "Dirichlet(concentration)"],
    ),
    # What single precision cannot compute with.
    "huge concentration": (
        like(partition="n: ChineseRestaurantProcess(1e300, size=n)"),
        (X1,),
        ["'z'", "`concentration`", "1e+300", "float32", "enable_x64"],
    ),
    "tiny shape": (
        like(var_prior=": dist.InverseGamma(1e-50, 1.0)"),
        (X1,),
        ["'var'", "`shape`", "1e-50", "float32", "enable_x64"],
    ),
    "rate of few digits": (
        like(var_prior=": dist.InverseGamma(2.0, 1e-40)"),
        (X1,),
        ["'var'", "`rate`", "1e-40", "float32"],
    ),
    "huge kappa": (
        loc_prior("dist.Normal(0.0, jnp.sqrt(var * 1e-36))"),
        (X1,),
        ["'loc'", "`kappa`", "e+3", "float32"],
    ),
    "huge mean": (
        loc_prior("dist.Normal(1e25, jnp.sqrt(var))"),
        (X1,),
        ["'loc'", "`mean`", "1e+25", "float32"],
    ),
    "NaN": (not_a_number, (X1,), ["'x'", "`scale`", "nan", "finite and positive"]),
    "covariance": (
        not_a_covariance,
        (X2,),
        ["'x'", "`covariance_matrix`", "nan", "positive definite"],
    ),
    "flat prior": (flat, (X1,), ["'loc'", "`scale0`", "1e+30", "float32"]),
    # Arguments.
    "masked array": (
        expanded,
        (np.ma.masked_array(X1, X1 > 1),),
        ["Argument 0", "masked array", "handlers.mask"],
    ),
    "longdouble": (
        expanded,
        (X1.astype(np.longdouble),),
        ["Argument 0", "float128", "np.float64"],
    ),
    # Unregistered pairs.
    "Poisson": (
        poisson_lognormal,
        (CODES,),
        ["'x'", "Poisson", "'rate'", "LogNormal", "egistered"],
    ),
    # Other sites.
    "shared cluster site": (shared_loc, (X1, X1), ["'loc'", "'x'", "'y'", "own"]),
    "factor": (with_factor, (X1,), ["'penalty'", "'z'", "actor"]),
    "scaled model": (scaled, (X1,), ["'z'", "scale"]),
    "scaled site": (scaled_observation, (X1,), ["'x'", "scale"]),
    "subsample": (
        subsampled,
        (jnp.asarray(X1),),
        ["'rows'", "subsample_size", "full size"],
    ),
    "subsample of a NumPy array": (
        subsampled,
        (X1,),
        ["'rows'", "subsample_size", "full size"],
    ),
    "observed partition": (
        observed_partition,
        (X1,),
        ["'z' is observed", "Leave out its `obs`", "init_params={'z': ...}"],
    ),
    "partition in a plate of rows": (
        partition_in_a_plate_of_rows,
        (X2,),
        ["'x'", "'z' of shape (6, 6)", "plate 'all'", "take 'z' out of it"],
    ),
    # Shapes.
    "half a cluster": (one_column(num_clusters=2.5), (X1,), ["'clusters'", "2.5"]),
    "rows of two sites": (rows_by_site, (X1, X1[:4]), ["'y'", "4", "6"]),
    "rows of the partition": (rows_of_the_partition, (X1[:5],), ["'x'", "5", "6"]),
    "rows on the last axis": (rows_last, (X2.T,), ["'x'", "(2, 6)", "first axis"]),
    "clusters of two sizes": (
        clusters_of_two_sizes,
        (X1,),
        ["'var'", "'loc'", "4", "5", "capacity"],
    ),
    "clusters on the last axis": (clusters_last, (X2,), ["'var'", "(2, 4)", "(2, 2)"]),
    "one loc for all features": (one_loc_for_all_features, (X2,), ["'loc'", "(4, 2)"]),
    "features swapped": (features_swapped, (X2,), ["`loc`", "'x'"]),
    "no clusters": (
        one_column(num_clusters=0),
        (X1,),
        ["'clusters'", "size 0", "capacity"],
    ),
    "no rows": (one_column(), (X1[:0],), ["row", "0"]),
    "no rows without plates": (expanded, (X2[:0],), ["zero rows"]),
    "no features": (expanded, (X2[:, :0],), ["'x'", "(6, 0)"]),
}


@pytest.mark.parametrize(
    "change, words",
    [
        ("z.at[{i}].set(z[{j}]).at[{j}].set(z[{i}])", "cluster of another row"),
        ("z.at[{i}].set(z[{j}])", "cluster of another row"),
        ("z.at[{i}].set({k})", "`loc` of observed site 'x'"),
        ("jnp.where((z[{i}] == z[{j}]) & (jnp.arange(60) > 30), 0, z)", "`loc`"),
    ],
)
@pytest.mark.parametrize("i, j, k", [(10, 11, 0), (7, 3, 1), (0, 29, 2)])
def test_a_single_row_with_the_label_of_another_is_refused(change, words, i, j, k):
    code = change.format(i=i, j=j, k=k)
    z_of = eval(f"lambda z: {code}", {"jnp": jnp})
    model = one_column(
        lambda x, z, loc, var: dist.Normal(loc[z_of(z)], jnp.sqrt(var[z_of(z)]))
    )
    message = refused(model, np.random.default_rng(0).normal(size=60))
    assert words in message, message


@pytest.mark.parametrize("model, args, words", REFUSED.values(), ids=REFUSED.keys())
def test_refused(model, args, words):
    message = refused(model, *args)
    missing = [word for word in words if word not in message]
    assert not missing, message


# --- Refused data ---


def with_cell(x, index, value):
    x = x.copy()
    x[index] = value
    return x


COLUMNS = np.stack([CODES, CODES], 1)
TWO_CATEGORICAL = categories(3, (K, 2))
BAD_DATA = {
    "NaN": (
        expanded,
        with_cell(X2, (3, 1), np.nan),
        ["Column 1", "'x'", "nan", "row 3"],
    ),
    "inf": (
        expanded,
        with_cell(X2, (0, 0), np.inf),
        ["Column 0", "'x'", "inf", "row 0"],
    ),
    "-inf": (expanded, with_cell(X1, 5, -np.inf), ["'x'", "-inf", "row 5"]),
    "NaN in jax array": (
        expanded,
        jnp.asarray(with_cell(X1, 4, np.nan)),
        ["'x'", "nan", "row 4"],
    ),
    "NaN made in the model": (
        lambda x: expanded(jnp.log(x)),
        with_cell(np.ones_like(X2), (2, 1), -1.0),
        ["Column 1", "'x'", "nan", "row 2"],
    ),
    "NaN on two feature axes": (
        expanded,
        with_cell(X3, (3, 1, 2), np.nan),
        ["Column 1, 2", "'x'", "nan", "row 3"],
    ),
    "category -1": (
        categories(),
        with_cell(CODES, 4, -1),
        ["'x'", "-1", "row 4", "0..2"],
    ),
    "category C": (categories(), with_cell(CODES, 4, 3), ["'x'", "3", "row 4", "0..2"]),
    "category in column 1": (
        TWO_CATEGORICAL,
        with_cell(COLUMNS, (2, 1), 7),
        ["Column 1", "'x'", "7", "row 2", "0..2"],
    ),
    "category 1.5": (
        categories(),
        with_cell(CODES.astype(float), 1, 1.5),
        ["'x'", "1.5", "row 1", "0..2"],
    ),
    "category NaN": (
        categories(),
        with_cell(CODES.astype(float), 1, np.nan),
        ["'x'", "nan", "row 1", "0..2"],
    ),
    "category beyond int32": (
        categories(),
        with_cell(CODES, 2, 2**32 + 1),
        ["'x'", "4294967297", "row 2", "0..2"],
    ),
    "objects": (expanded, X2.astype(object), ["'x'", "object", "numeric"]),
    "strings": (categories(), np.array(list("abccba")), ["'x'", "<U1", "integers"]),
    "objects of strings": (
        categories(),
        np.array(list("abccba"), object),
        ["'x'", "object", "integers"],
    ),
    "complex": (expanded, X2.astype(np.complex64), ["'x'", "complex64", "numeric"]),
    "dates": (
        expanded,
        np.arange(N).astype("datetime64[D]"),
        ["'x'", "datetime64", "numeric"],
    ),
}


@pytest.mark.parametrize("model, x, words", BAD_DATA.values(), ids=BAD_DATA.keys())
def test_bad_data_is_refused(model, x, words):
    message = refused(model, x)
    missing = [word for word in words if word not in message]
    assert not missing, message


def test_strings_of_a_data_frame_are_refused():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": list("abccba")})
    message = refused(lambda frame: categories()(frame["a"].to_numpy()), frame)
    assert "'x'" in message and "integers" in message


@pytest.mark.parametrize("convert", ["DataFrame", "list"])
def test_observed_values_that_are_not_arrays_are_refused(convert):
    if convert == "DataFrame":
        x = pytest.importorskip("pandas").DataFrame(X2, columns=["a", "b"])
    else:
        x = X2.tolist()

    def model(x):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=N))
        loc, var = normal_prior((K, D))
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)

    message = refused(model, x)
    assert "'x'" in message and "array" in message and ".to_numpy()" in message


def test_a_data_frame_of_numbers_can_be_an_argument():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X2, columns=["a", "b"])
    plan = planning.recognise(lambda f: expanded(f.to_numpy()), (frame,), {})
    assert plan.num_rows == N


# --- Refused hyperparameters ---

# Sites named in the message, hyperparameter, its value as printed.
BAD_VALUES = {
    "shape 0": (
        like(var_prior=": dist.InverseGamma(0.0, 1.0)"),
        X1,
        ["'var'", "'x'", "`shape`", "0.0", "positive"],
    ),
    "rate -1": (
        like(var_prior=": dist.InverseGamma(2.0, -1.0)"),
        X1,
        ["'var'", "'x'", "`rate`", "-1.0", "positive"],
    ),
    "rate NaN": (
        like(var_prior=": dist.InverseGamma(2.0, np.nan)"),
        X1,
        ["'var'", "'x'", "`rate`", "nan", "finite"],
    ),
    "kappa infinite": (
        loc_prior("dist.Normal(0.0, 0 * jnp.sqrt(var))"),
        X1,
        ["'loc'", "'x'", "`kappa`", "inf"],
    ),
    "kappa NaN": (
        loc_prior("dist.Normal(0.0, jnp.sqrt(var / -0.1))"),
        X1,
        ["'loc'", "'x'", "`kappa`", "nan", "finite"],
    ),
    "negative scale": (
        loc_prior("dist.Normal(0.0, -jnp.sqrt(var / 0.1))"),
        X1,
        ["'loc'", "'x'"],
    ),
    "mean NaN": (
        loc_prior("dist.Normal(jnp.nan, jnp.sqrt(var / 0.1))"),
        X1,
        ["'loc'", "'x'", "`mean`", "nan", "finite"],
    ),
    "mean infinite": (
        loc_prior("dist.Normal(np.inf, jnp.sqrt(var / 0.1))"),
        X1,
        ["'loc'", "'x'", "`mean`", "inf", "finite"],
    ),
    "Dirichlet 0": (
        lambda x: numpyro.sample(
            "x",
            dist.Categorical(
                numpyro.sample(
                    "probs", dist.Dirichlet(jnp.array([1.0, 0.0, 1.0])).expand([K])
                )[crp(x)]
            ),
            obs=x,
        ),
        CODES,
        ["'probs'", "'x'", "`concentration`", "0.0", "positive"],
    ),
    "concentration -1": (
        like(partition="n: ChineseRestaurantProcess(-1.0, size=n)"),
        X1,
        ["'z'", "`concentration`", "-1", "0"],
    ),
    "concentration 0": (
        like(partition="n: ChineseRestaurantProcess(0.0, size=n)"),
        X1,
        ["'z'", "`concentration`", "0"],
    ),
    "concentration NaN": (
        like(partition="n: ChineseRestaurantProcess(np.nan, size=n)"),
        X1,
        ["'z'", "`concentration`", "nan"],
    ),
    "concentration -1 computed": (
        like(partition="n: ChineseRestaurantProcess(-jnp.exp(0.0), size=n)"),
        X1,
        ["'z'", "`concentration`", "-1"],
    ),
    "discount 1.5": (
        like(partition="n: PitmanYorProcess(1.0, 1.5, size=n)"),
        X1,
        ["'z'", "`discount`", "1.5", "[0, 1)"],
    ),
    "concentration below -discount": (
        like(partition="n: PitmanYorProcess(-0.5, 0.25, size=n)"),
        X1,
        ["'z'", "`concentration`", "-0.5", "-0.25"],
    ),
}


@pytest.mark.parametrize("model, x, words", BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_bad_hyperparameters_are_refused_without_validation(model, x, words):
    with numpyro.validation_enabled(False):
        message = refused(model, x)
    missing = [word for word in words if word not in message]
    assert not missing, message


def test_negative_concentrations_above_minus_the_discount_are_accepted():
    model = like(partition="n: PitmanYorProcess(-0.2, 0.25, size=n)")
    assert planning.recognise(model, (X1,), {}).partition.name == "z"


# --- Refused priors of hyperparameters ---


def with_prior_of(use):
    """Normal columns with a known scale; `use` is given a hyperparameter's prior and
    says what parts of the model are made of its value."""

    def make(prior):
        def model(x):
            parts = use(numpyro.sample("h", prior))
            z = numpyro.sample("z", parts.get("z", lambda n: crp_of(1.0, n))(len(x)))
            scale0 = parts.get("scale0", 1.0)
            loc = numpyro.sample("loc", dist.Normal(0.0, scale0).expand((K, D)))
            numpyro.sample("x", dist.Normal(loc[z], parts.get("scale", 0.5)), obs=x)

        return model

    return make


def crp_of(concentration, n):
    return ChineseRestaurantProcess(concentration, size=n)


def of_another(h):
    other = numpyro.sample("other", dist.Gamma(h, 1.0))
    return {"z": lambda n: crp_of(other, n)}


HYPERPRIORS = {
    "concentration": (
        lambda h: {"z": lambda n: crp_of(h, n)},
        (
            dist.Normal(5.0, 1.0),
            dist.Uniform(-3.0, 3.0),
            dist.Uniform(-0.1, 10.0),
            dist.TruncatedNormal(5.0, 1.0, low=-0.1),
            # NumPyro takes its support to be the real line.
            dist.TransformedDistribution(
                dist.Beta(2.0, 2.0), dist.transforms.AffineTransform(0.1, 5.0)
            ),
        ),
        ["'h'", "'z'", "`concentration`", "TruncatedNormal"],
        dist.Gamma(1.0, 1.0),
    ),
    "discount": (
        lambda h: {"z": lambda n: PitmanYorProcess(1.0, h, size=n)},
        (dist.Uniform(0.0, 2.0), dist.Uniform(0.0, 1.02), dist.HalfNormal(1.0)),
        ["'h'", "'z'", "`discount`", "[0, 1)", "Beta"],
        dist.Uniform(0.0, 1.0),
    ),
    "scale of a prior": (
        lambda h: {"scale0": h},
        (dist.Normal(1.0, 1.0),),
        ["'h'", "'loc'", "'x'", "positive"],
        dist.TruncatedNormal(1.0, 1.0, low=0.0),
    ),
    "scale of a likelihood": (
        lambda h: {"scale": h},
        (dist.Normal(1.0, 1.0),),
        ["'h'", "'x'", "`scale`", "positive"],
        None,  # no prior of it can be had: see `test_refused`
    ),
    "bound of another": (
        lambda h: {"scale0": 1 + numpyro.sample("other", dist.Uniform(0.0, h))},
        (dist.Normal(1.0, 1.0),),
        ["'h'", "'other'", "range"],
        dist.LogNormal(0.0, 1.0),
    ),
    "probability of another": (
        lambda h: {"scale0": 1 + numpyro.sample("other", dist.Bernoulli(probs=h))},
        (dist.Normal(0.5, 1.0),),
        ["'h'", "'other'", "range"],
        dist.Beta(1.0, 1.0),
    ),
    "parameter of another": (
        of_another,
        (dist.Normal(1.0, 1.0),),
        ["'h'", "'other'", "range"],
        dist.LogNormal(0.0, 1.0),
    ),
}


@pytest.mark.parametrize("use, priors, words, _", HYPERPRIORS.values(), ids=HYPERPRIORS)
def test_priors_that_reach_where_the_model_is_not_defined_are_refused(
    use, priors, words, _
):
    for prior in priors:
        message = refused(with_prior_of(use)(prior), X2)
        missing = [word for word in words if word not in message]
        assert not missing, message


@pytest.mark.parametrize(
    "use, prior",
    [(use, prior) for use, _, _, prior in HYPERPRIORS.values() if prior is not None],
    ids=[name for name, case in HYPERPRIORS.items() if case[-1] is not None],
)
def test_priors_that_reach_no_such_value_are_accepted(use, prior):
    plan = planning.recognise(with_prior_of(use)(prior), (X2,), {})
    assert "h" in {site.name for site in plan.hyper}


def test_impossible_points_of_a_grid_are_accepted_beside_possible_ones():
    """A chain draws them with probability zero. Where all are impossible, or it is the
    continuous prior besides that reaches too far, the model is refused."""
    use = HYPERPRIORS["concentration"][0]
    grid = Grid(np.array([-1.0, -0.5, 0.5, 2.0]))
    assert planning.recognise(with_prior_of(use)(grid), (X2,), {}).hyper[0].finite
    words = ["'z'", "`concentration`"]
    message = refused(with_prior_of(use)(Grid(np.array([-1.0, -0.5]))), X2)
    assert all(word in message for word in words), message

    def besides(prior):
        def scale_too(h):
            return {**use(h), "scale0": numpyro.sample("s", prior)}

        return with_prior_of(scale_too)(grid)

    assert len(planning.recognise(besides(dist.HalfNormal(1.0)), (X2,), {}).hyper) == 2
    message = refused(besides(dist.Normal(1.0, 1.0)), X2)
    assert "'s'" in message and "'loc'" in message and "'h'" not in message


def test_values_that_cannot_go_together_are_no_reason_to_refuse():
    def bounded(x):
        scale0 = numpyro.sample("scale0", Grid(np.array([0.0, 1.0, 2.0])))
        d = numpyro.sample("d", dist.Beta(1.0, 1.0))
        alpha = numpyro.sample("alpha", dist.TruncatedNormal(0.0, 1.0, low=-d))
        z = numpyro.sample("z", PitmanYorProcess(alpha, d, size=len(x)))
        loc = numpyro.sample("loc", dist.Normal(0.0, scale0).expand((K, D)))
        numpyro.sample("x", dist.Normal(loc[z], 0.5), obs=x)

    assert len(planning.recognise(bounded, (X2,), {}).hyper) == 3


def test_a_count_without_an_end_is_refused_as_one():
    # Of which the first values tried are impossible.
    message = refused(
        with_prior_of(HYPERPRIORS["concentration"][0])(dist.Geometric(0.9)), X2
    )
    assert "'h'" in message and "cannot be enumerated" in message


def test_impossible_points_in_a_plate_of_many_are_accepted():
    def many(x):
        with numpyro.plate("columns", 40):
            scale0 = numpyro.sample("scale0", Grid(np.array([0.0, 0.0, 1.0, 2.0])))
        z = crp(x)
        loc = numpyro.sample("loc", dist.Normal(0.0, scale0).expand((K, 40)))
        numpyro.sample("x", dist.Normal(loc[z], 0.5), obs=np.repeat(x, 20, 1))

    assert len(planning.recognise(many, (X2,), {}).hyper) == 1


def test_what_a_model_raises_says_after_which_sites():
    def model(x):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=4))
        with numpyro.plate("clusters", 3):
            loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(loc[z] + x, 1.0), obs=x)

    kernel, x = SubsampleAnnealedGibbs(model), np.zeros(6, np.float32)
    with pytest.raises((TypeError, ValueError), match="shapes") as raised:
        kernel.init(random.key(0), 3, None, (x,), {})
    notes = " ".join(raised.value.__notes__)
    assert "raised this after its sites 'z' (4,), 'loc' (3,)." in notes


def test_a_plate_with_the_name_of_a_sample_site_is_refused():
    def model(x):
        scale = numpyro.sample("columns", dist.HalfNormal(1.0))
        z = crp(x)
        with numpyro.plate("columns", D):
            loc = numpyro.sample("loc", dist.Normal(0.0, scale).expand((K, D)))
        numpyro.sample("x", dist.Normal(loc[z], 0.5), obs=x)

    message = refused(model, X2)
    assert "'columns'" in message and "plate" in message and "Rename" in message


# --- When, and by whom ---


def test_mcmc_run_refuses_before_the_moves_are_compiled(monkeypatch):
    def fail(*args):
        raise AssertionError("reached the moves")

    monkeypatch.setattr(rows, "run_step", fail)
    monkeypatch.setattr(rows, "collect", fail)
    for options in ({}, {"num_chains": 2, "chain_method": "vectorized"}):
        mcmc = MCMC(
            SubsampleAnnealedGibbs(scaled_observation),
            num_warmup=2,
            num_samples=2,
            progress_bar=False,
            **options,
        )
        with pytest.raises(NotRecognised, match="'x' is scaled"):
            mcmc.run(random.key(0), X1)


def test_traced_data_is_refused():
    @jax.jit
    def run(x):
        mcmc = MCMC(
            SubsampleAnnealedGibbs(expanded),
            num_warmup=2,
            num_samples=2,
            progress_bar=False,
        )
        mcmc.run(random.key(0), x)
        return mcmc.get_samples()["z"]

    with pytest.raises(NotRecognised, match="traced.*jit_model_args"):
        run(X2)


def test_a_refused_kernel_can_be_run_on_better_data():
    kernel = SubsampleAnnealedGibbs(expanded)
    with pytest.raises(NotRecognised):
        kernel.init(random.key(0), 2, None, (with_cell(X2, (3, 1), np.nan),), {})
    state = kernel.init(random.key(0), 2, None, (X2,), {})
    assert state.order.shape == (N,)
    with pytest.raises(NotRecognised):
        kernel.init(random.key(0), 2, None, (with_cell(X2, (3, 1), np.nan),), {})


def test_errors_of_the_model_itself_are_not_disguised():
    def broken(x):
        raise KeyError("no such column")

    def shapes(x):
        crp(x)
        with numpyro.plate("rows", 3):
            numpyro.sample("x", dist.Normal(jnp.zeros(5), 1.0), obs=x)

    kernel = SubsampleAnnealedGibbs(broken)
    with pytest.raises(KeyError, match="no such column"):
        kernel.init(random.key(0), 2, None, (X1,), {})
    with pytest.raises(ValueError) as error:
        SubsampleAnnealedGibbs(shapes).init(random.key(0), 2, None, (X1,), {})
    assert not isinstance(error.value, NotRecognised)


def test_reading_works_after_an_error_of_the_model():
    # JAX remembers arrays that an unfinished trace used as constants, as 32-bit copies;
    # the probes want the same arrays in 64 bits.
    data = {"codes": CODES.copy(), "reals": X1.astype(np.float64)}
    models = {"codes": categories(), "reals": one_column()}

    def unfinished(x):
        models[name](x)
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=jnp.asarray(x) + 1)
        raise KeyError("no such column")

    for name in data:
        with pytest.raises(
            KeyError
        ) as kept:  # keeps the traceback alive, as Jupyter does
            planning.recognise(unfinished, (data[name],), {})
        planning.recognise(models[name], (data[name],), {})
        assert kept.tb is not None


# --- explain ---


def test_explain_prints_a_table_of_sites(capsys):
    assert explain(several_sites, X2, X1, **MIXED) is None
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert shown.splitlines()[0].split() == ["site", "role", "pair", "why"]
    assert "partition" in lines["z"] and "6 rows" in lines["z"]
    for site, pair in (("x", "Normal"), ("y", "Normal"), ("c", "Dirichlet")):
        assert "observed" in lines[site] and pair in lines[site]
    for site in ("loc", "var_y", "p_c", "p_d"):
        assert "cluster" in lines[site] and "integrated out" in lines[site]
    assert "2 feature(s)" in lines["x"]
    assert "Not recognised" not in shown


@pytest.mark.parametrize(
    "model, x, word",
    [
        (no_partition, X1, "no partition site"),
        (expanded, with_cell(X2, (3, 1), np.nan), "row 3"),
        (one_column(num_clusters=0), X1, "size 0"),
    ],
)
def test_explain_prints_why_a_model_is_refused(capsys, model, x, word):
    explain(model, x)
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["site", "role", "pair", "why"]
    _, reason = shown.split("Not recognised: ")
    assert word in reason


def test_numpy_on_the_data_is_refused_with_the_way_out(capsys):
    def numpy_mask(x):
        assert not np.isnan(x).any()
        expanded(x)

    with pytest.raises(NotRecognised, match="such as `jnp.isnan`"):
        planning.recognise(numpy_mask, (jnp.asarray(X2),), {})
    explain(numpy_mask, jnp.asarray(X2))
    assert "jnp.isnan" in capsys.readouterr().out


@pytest.mark.parametrize("scale", [1e18, 1e25])
def test_values_whose_squares_overflow_are_refused(scale):
    with pytest.raises(NotRecognised, match="sum of whose squares float32"):
        planning.recognise(expanded, ((X2 * scale).astype(np.float32),), {})


def test_points_of_a_grid_that_float32_cannot_hold_are_not_refused():
    # They have probability zero.
    def model(x):
        shape = numpyro.sample("shape", Grid([1e-50, 1e-49]))
        concentration = numpyro.sample("concentration", Grid([1e-50, 1e-49]))
        one_column(
            var_prior=lambda: dist.InverseGamma(shape, 1.0),
            partition=lambda n: ChineseRestaurantProcess(concentration, size=n),
        )(x)

    planning.recognise(model, (X1,), {})


def _mixture_of(likelihood):
    def model(x):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        with numpyro.plate("clusters", 8):
            var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
            loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", likelihood(loc[z], var[z]), obs=x)

    return model


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda loc, var: dist.Normal(jnp.clip(loc, -5, 5), jnp.sqrt(var)),
        lambda loc, var: dist.Normal(loc, jnp.sqrt(jnp.maximum(var, 0.2))),
        lambda loc, var: dist.Normal(loc, jnp.minimum(jnp.sqrt(var), 2.0)),
    ],
    ids=["loc", "least variance", "largest scale"],
)
def test_a_cut_that_few_rows_feel_is_refused(likelihood):
    x = np.random.default_rng(0).normal(size=66)
    x[20:26] += 12  # none of them at the ends or evenly spread
    with pytest.raises(NotRecognised, match="fails Bayes' law"):
        planning.recognise(_mixture_of(likelihood), (x,), {})


def test_outliers_alone_are_no_reason_to_refuse():
    x = np.random.default_rng(0).normal(size=66)
    x[20:22] = -1e4, 1e6
    model = _mixture_of(lambda loc, var: dist.Normal(loc, jnp.sqrt(var)))
    planning.recognise(model, (x,), {})


def test_a_model_without_data_says_so():
    def model(x):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        with numpyro.plate("clusters", 4):
            loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", dist.Normal(loc[z], 1.0))

    with pytest.raises(NotRecognised, match="no observed site.*obs=data"):
        planning.recognise(model, (np.zeros(5),), {})
