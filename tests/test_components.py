# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Mixtures of a given number of components, as NumPyro users write them: assignments are a
categorical site, whose probabilities are a Dirichlet site, sticks broken off by a Beta
site, or constants. Their posterior is enumerated over all label vectors.
"""

from functools import cache, partial
import itertools

import arviz as az
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, Predictive

from numpyro_subanneal import (
    FiniteDirichletMixture,
    NotRecognised,
    SplitMerge,
    SubsampleAnnealedGibbs,
    explain,
    testing,
)
from numpyro_subanneal.plan import recognise

# Nearly all of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled

X = np.array([-1.1, -0.4, 0.3, 0.9, 1.4], np.float32)
N = len(X)
MEAN, KAPPA, SHAPE, RATE = 0.0, 0.5, 2.0, 0.7


def observe(x, probs, num_clusters):
    with numpyro.plate("clusters", num_clusters):
        var = numpyro.sample("var", dist.InverseGamma(SHAPE, RATE))
        loc = numpyro.sample("loc", dist.Normal(MEAN, jnp.sqrt(var / KAPPA)))
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", probs)
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


CONCENTRATION = np.array([0.5, 1.0, 2.5])


def dirichlet(x, concentration=CONCENTRATION):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.asarray(concentration)))
    observe(x, dist.Categorical(weights), len(concentration))


def dirichlet_logits(x, concentration=CONCENTRATION):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.asarray(concentration)))
    observe(x, dist.Categorical(logits=jnp.log(weights)), len(concentration))


def mix_weights(sticks):
    left = jnp.cumprod(1 - sticks)
    return jnp.pad(sticks, (0, 1), constant_values=1) * jnp.pad(
        left, (1, 0), constant_values=1
    )


ALPHA, TRUNCATION = 1.5, 3


def stick_breaking(x, alpha=ALPHA, truncation=TRUNCATION):
    # As in the Dirichlet process tutorials of Pyro and NumPyro.
    with numpyro.plate("beta_plate", truncation - 1):
        beta = numpyro.sample("beta", dist.Beta(1, alpha))
    observe(x, dist.Categorical(mix_weights(beta)), truncation)


PROBS = np.array([0.2, 0.5, 0.3])


def known(x, probs=PROBS):
    observe(x, dist.Categorical(jnp.asarray(probs)), len(probs))


MODELS = {
    "dirichlet": dirichlet,
    "dirichlet logits": dirichlet_logits,
    "stick-breaking": stick_breaking,
    "known": known,
}
SITES = {
    "dirichlet": "weights",
    "dirichlet logits": "weights",
    "stick-breaking": "beta",
}


def log_prior(name, counts):
    """By the integral over the weights, written out."""
    if name.startswith("dirichlet"):
        a = CONCENTRATION
        return (
            special.gammaln(a.sum())
            - special.gammaln(a.sum() + counts.sum())
            + (special.gammaln(a + counts) - special.gammaln(a)).sum()
        )
    if name == "known":
        return (counts * np.log(PROBS)).sum()
    total = 0.0
    for k in range(TRUNCATION - 1):
        total += special.betaln(1 + counts[k], ALPHA + counts[k + 1 :].sum())
        total -= special.betaln(1, ALPHA)
    return total


LABELS = np.array(list(itertools.product(range(3), repeat=N)))


@cache
def posterior(name):
    """Probability of every label vector."""
    marginal = {
        subset: testing.normal_log_marginal(
            X[list(subset), None].astype(float), MEAN, KAPPA, SHAPE, RATE
        )
        for size in range(N + 1)
        for subset in itertools.combinations(range(N), size)
    }
    log_joint = np.array(
        [
            log_prior(name, np.bincount(z, minlength=3))
            + sum(marginal[tuple(np.flatnonzero(z == k))] for k in range(3))
            for z in LABELS
        ]
    )
    return log_joint, special.softmax(log_joint)


RUNS = [
    ("dirichlet", 0, None),
    ("stick-breaking", 3, None),
    ("known", 0, None),
    ("dirichlet", 3, SplitMerge()),
]
RUN_OF_LOGITS = ("dirichlet logits", 0, None)
by_run = pytest.mark.parametrize(
    "run",
    # The last takes longer to run than to compile.
    [*RUNS[:3], pytest.param(RUNS[3], marks=pytest.mark.quickly_compiled(level=1))],
    ids=lambda r: f"{r[0]}, {r[1]}" + (r[2] is not None) * ", splits",
)


@cache
def finished(name, num_warmup, split_merge):
    mcmc = MCMC(
        SubsampleAnnealedGibbs(MODELS[name], split_merge=split_merge),
        num_warmup=num_warmup,
        num_samples=400,
        thinning=8,
        num_chains=150,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(3), X)
    return mcmc


@cache
def sampled(*run):
    mcmc = finished(*run)
    return jax.device_get(
        (
            mcmc.get_samples(group_by_chain=True),
            mcmc.get_extra_fields(group_by_chain=True),
        )
    )


def kept(run):
    draws, fields = sampled(*run)
    # Draws 40 sweeps after the start.
    return {k: v[:, 5:] for k, v in draws.items()}, fields


@by_run
def test_labels_follow_the_enumerated_posterior(run):
    # 6,750 draws of 243 label vectors. False alarm: 1e-3 a run.
    draws, _ = kept(run)
    index = draws["z"] @ (3 ** np.arange(N)[::-1])
    report = testing.goodness_of_fit(index.ravel(), posterior(run[0])[1])
    print(report)
    assert report.p_value > 1e-3


@by_run
def test_log_joint_is_the_enumerated_one(run):
    draws, fields = sampled(*run)
    index = draws["z"] @ (3 ** np.arange(N)[::-1])
    expected = posterior(run[0])[0][index]
    np.testing.assert_allclose(fields["log_joint"], expected, rtol=1e-4, atol=1e-4)
    assert (fields["capacity_reached"] == 0).all()


@pytest.mark.parametrize("run", RUNS[:2], ids=lambda r: r[0])
def test_weights_are_draws_of_their_conditional(run):
    # Each given the counts is a Beta variate: its distribution function is uniform.
    # Kolmogorov-Smirnov at 1e-5, five tests.
    from scipy import stats

    name, (draws, _) = run[0], kept(run)
    counts = (draws["z"][..., None] == np.arange(3)).sum(-2)
    for k in range(draws[SITES[name]].shape[-1]):
        if name == "stick-breaking":
            a, b = 1 + counts[..., k], ALPHA + counts[..., k + 1 :].sum(-1)
        else:
            a = CONCENTRATION[k] + counts[..., k]
            b = CONCENTRATION.sum() + N - a
        u = stats.beta.cdf(draws[SITES[name]][..., k].astype(float), a, b)
        assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-5, k


def test_logits_are_another_way_to_write_probabilities():
    # Of the same weights: the same draws.
    runs = RUNS[0], RUN_OF_LOGITS
    draws, same = (finished(*run).get_samples() for run in runs)
    assert len(np.unique(draws["z"], axis=0)) > 5
    for name, value in draws.items():
        np.testing.assert_array_equal(same[name], value, err_msg=name)


@pytest.mark.filterwarnings("ignore:More chains .* than draws")
@pytest.mark.parametrize("run", [*RUNS[:3], RUN_OF_LOGITS], ids=lambda r: r[0])
def test_arviz_predictive_and_explain_take_the_model(run, capsys):
    name, *_ = run
    model, mcmc = MODELS[name], finished(*run)
    draws = {k: v[:20] for k, v in mcmc.get_samples().items()}
    assert set(draws) == {"z", "var", "loc"} | (
        {SITES[name]} if name in SITES else set()
    )
    az.from_numpyro(mcmc)
    assert Predictive(model, draws)(random.key(1), X)["x"].shape == (20, N)
    explain(model, X)
    shown = capsys.readouterr().out
    assert "Not recognised" not in shown
    assert ("weights" in shown) == (name in SITES)


def test_init_params_may_hold_the_weights():
    kernel = SubsampleAnnealedGibbs(dirichlet, split_merge=None)
    start = {"z": jnp.array([2, 2, 0, 0, 1]), "weights": jnp.ones(3) / 3}
    state = kernel.init(random.key(0), 0, start, (X,), {})
    np.testing.assert_array_equal(state.z["z"], start["z"])


def test_a_finite_mixture_does_not_count_its_own_limit_as_capacity():
    def model(x):
        with numpyro.plate("clusters", 2):
            var = numpyro.sample("var", dist.InverseGamma(SHAPE, RATE))
            loc = numpyro.sample("loc", dist.Normal(MEAN, jnp.sqrt(var / KAPPA)))
        z = numpyro.sample("z", FiniteDirichletMixture(0.5, 2, size=len(x)))
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)

    mcmc = MCMC(
        SubsampleAnnealedGibbs(model), num_warmup=2, num_samples=50, progress_bar=False
    )
    mcmc.run(random.key(0), X)
    fields = mcmc.get_extra_fields()
    assert (fields["num_clusters"] == 2).any()
    assert (fields["capacity_reached"] == 0).all()


def test_rows_that_are_out_read_minus_one():
    kernel = SubsampleAnnealedGibbs(stick_breaking, split_merge=None)
    state = kernel.init(random.key(0), 5, None, (X,), {})
    step = jax.jit(lambda state: kernel.sample(state, (X,), {}))
    sizes = []
    for _ in range(6):
        state = step(state)
        sizes.append(int(state.subsample_size))
        assert (state.z["z"] >= 0).sum() == sizes[-1]
    assert sizes[0] < N and sizes[-1] == N


# --- Refusals -----------------------------------------------------------------


def scaled_weights(x):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    observe(x, dist.Categorical(weights**2 / (weights**2).sum()), 3)


def sticks_in_reverse(x):
    with numpyro.plate("sticks", 2):
        beta = numpyro.sample("beta", dist.Beta(1.0, 1.0))
    observe(x, dist.Categorical(mix_weights(beta)[::-1]), 3)


def by_row(x):
    probs = jnp.linspace(0.1, 0.9, len(x))
    observe(x, dist.Categorical(jnp.stack([probs, 1 - probs], -1)), 2)


def too_few_clusters(x):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(4)))
    observe(x, dist.Categorical(weights), 3)


def too_few_sticks(x):
    with numpyro.plate("sticks", 3):
        beta = numpyro.sample("beta", dist.Beta(1.0, 1.0))
    observe(x, dist.Categorical(mix_weights(beta)), 3)


def latent_alpha(x):
    alpha = numpyro.sample("alpha", dist.Gamma(1.0, 1.0))
    with numpyro.plate("sticks", 2):
        beta = numpyro.sample("beta", dist.Beta(1.0, alpha))
    observe(x, dist.Categorical(mix_weights(beta)), 3)


def softmax_weights(x):
    with numpyro.plate("components", 3):
        logits = numpyro.sample("logits", dist.Normal(0.0, 1.0))
    observe(x, dist.Categorical(logits=logits), 3)


def test_the_concentration_of_the_weights_may_be_learned():
    (site,) = recognise(latent_alpha, (X,), {}).hyper
    assert site.name == "alpha" and set(site.factors) == {"alpha", "z"}


REFUSED = {
    "powers of the weights": (scaled_weights, ["'z'", "'weights'"]),
    "sticks in reverse": (sticks_in_reverse, ["'z'", "'beta'", "stick"]),
    "probabilities by row": (by_row, ["'z'", "differ between rows"]),
    "fewer clusters than weights": (too_few_clusters, ["'weights'", "4", "3"]),
    "more sticks than clusters": (too_few_sticks, ["'beta'", "4", "3"]),
    "logits with a normal prior": (softmax_weights, ["'logits'", "Dirichlet"]),
    "concentration 0": (
        partial(dirichlet, concentration=np.array([0.0, 1.0, 1.0])),
        ["'z'", "concentration"],
    ),
    "negative alpha": (partial(stick_breaking, alpha=-1.0), ["'z'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model, words = REFUSED[name]
    mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=1, num_samples=1)
    with pytest.raises(NotRecognised) as error:
        mcmc.run(random.key(0), X)
    for word in words:
        assert word in str(error.value), str(error.value)
