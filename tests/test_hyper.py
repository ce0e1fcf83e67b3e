# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Hyperparameters against the exact posterior: all partitions of five rows, and
hyperparameters summed over grids or integrated by quadrature over their priors'
quantiles. The reference is written in NumPy and SciPy and shares nothing with the
kernel. Keys are fixed and nothing is retried; false-alarm rates are stated.
"""

from functools import cache, partial
import itertools
import pickle

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned

from numpyro_subanneal import (
    AbstractSchedule,
    ChineseRestaurantProcess,
    FiniteDirichletMixture,
    Grid,
    MixtureOfFiniteMixtures,
    NotRecognised,
    PitmanYorProcess,
    SubsampleAnnealedGibbs,
    explain,
    rows,
    testing,
)
from numpyro_subanneal import hyper as hyper_moves
from numpyro_subanneal import reading as reading_
from numpyro_subanneal.plan import recognise
from numpyro_subanneal.schedule import Steps
from numpyro_subanneal.weights import (
    DirichletWeights,
    KnownWeights,
    StickBreakingWeights,
)

# Most of the time is that of compiling, but for those tests that are marked.
pytestmark = pytest.mark.quickly_compiled
long_runs = pytest.mark.quickly_compiled(level=1)

# --- Data and the reference ---------------------------------------------------------

Y = np.array([-1.3, -0.4, 0.1, 0.8, 1.9], np.float32)
A = np.array([0, 1, 1, 2, 0])
SHAPE, RATE = 3.0, 1.5
BASE = np.array([0.5, 0.3, 0.2])
PARTITIONS = testing.set_partitions(len(Y))
SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]


def normal_log_marginal(x, mean, kappa, rate=RATE):
    """Product of Student t predictives, for arrays of hyperparameters."""
    mean, kappa, rate = np.broadcast_arrays(mean, kappa, rate)
    shape, total = SHAPE, 0.0
    for value in x:
        scale = np.sqrt(rate * (kappa + 1) / (shape * kappa))
        total = total + stats.t.logpdf(value, 2 * shape, mean, scale)
        rate = rate + 0.5 * kappa / (kappa + 1) * (value - mean) ** 2
        mean = (kappa * mean + value) / (kappa + 1)
        kappa, shape = kappa + 1, shape + 0.5
    return total


def categorical_log_marginal(codes, strength):
    total, seen = 0.0, np.zeros(3)
    for i, code in enumerate(codes):
        share = strength * BASE[code] + seen[code]
        total = total + np.log(share / (strength + i))
        seen[code] += 1
    return total


def log_eppf(z, concentration, discount):
    total, sizes = 0.0, []
    for i, label in enumerate(z):
        if label == len(sizes):
            weight = concentration + discount * len(sizes)
            sizes.append(1)
        else:
            weight = sizes[label] - discount
            sizes[label] += 1
        if i > 0:
            total = total + np.log(weight / (concentration + i))
    return total


def of_clusters(log_marginal):
    """Of every partition, from the log marginal likelihood of a set of rows."""
    each = {s: log_marginal(list(s)) for s in SUBSETS}
    return np.stack(
        [
            sum(each[tuple(np.flatnonzero(z == k))] for k in range(z.max() + 1))
            for z in PARTITIONS
        ]
    )


def check(index, probs):
    """Chi-square above 1e-3 and total variation at its floor: a false alarm in 1.1 of
    1,000 right samplers."""
    report = testing.goodness_of_fit(np.ravel(index), np.ravel(probs))
    print(report)
    assert report.tv < report.tv_floor + 4 * report.tv_floor_sd, report
    assert report.p_value > 1e-3, report


# --- Models -------------------------------------------------------------------------


def mixture(concentration, discount, mean, kappa, strength):
    """Every hyperparameter a distribution."""
    alpha = numpyro.sample("alpha", concentration)
    d = numpyro.sample("d", discount)
    z = numpyro.sample("z", PitmanYorProcess(alpha, d, size=len(Y)))
    m = numpyro.sample("m", mean)
    k = numpyro.sample("k", kappa)
    c = numpyro.sample("c", strength)
    precision = numpyro.deterministic("precision of the mean", 1 / k)
    with numpyro.plate("clusters", len(Y)):
        var = numpyro.sample("var", dist.InverseGamma(SHAPE, RATE))
        loc = numpyro.sample("loc", dist.Normal(m, jnp.sqrt(var * precision)))
        probs = numpyro.sample("probs", dist.Dirichlet(c * jnp.asarray(BASE)))
    with numpyro.plate("rows", len(Y)):
        numpyro.sample("y", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=Y)
        numpyro.sample("a", dist.Categorical(probs[z]), obs=A)


GRIDS = {
    "alpha": np.array([0.2, 1.0, 5.0]),
    "d": np.array([0.0, 0.4, 0.8]),
    "m": np.array([-1.0, 0.5]),
    "k": np.array([0.05, 1.0]),
    "c": np.array([0.3, 10.0]),
}
WEIGHTS = {"alpha": np.array([1.0, 2.0, 0.5])}


def grid_model():
    mixture(Grid(GRIDS["alpha"], WEIGHTS["alpha"]), *(Grid(GRIDS[n]) for n in "dmkc"))


PRIORS = {
    "alpha": (dist.Gamma(2.0, 1.0), stats.gamma(2.0)),
    "d": (dist.Beta(1.5, 2.0), stats.beta(1.5, 2.0)),
    "m": (dist.Normal(0.3, 1.2), stats.norm(0.3, 1.2)),
    "k": (dist.Gamma(1.5, 2.0), stats.gamma(1.5, scale=0.5)),
    "c": (dist.LogNormal(0.5, 1.0), stats.lognorm(1.0, scale=np.exp(0.5))),
}


def continuous_model():
    mixture(*(PRIORS[n][0] for n in ("alpha", "d", "m", "k", "c")))


@cache
def exact_on_grids():
    """Joint probabilities ``[partitions, alpha, d, m, k, c]``."""
    g = GRIDS
    prior = np.stack([log_eppf(z, g["alpha"][:, None], g["d"]) for z in PARTITIONS])
    prior = prior + np.log(WEIGHTS["alpha"] / WEIGHTS["alpha"].sum())[:, None]
    normal = of_clusters(lambda s: normal_log_marginal(Y[s], g["m"][:, None], g["k"]))
    codes = of_clusters(lambda s: categorical_log_marginal(A[s], g["c"]))
    joint = (
        prior[:, :, :, None, None, None]
        + normal[:, None, None, :, :, None]
        + codes[:, None, None, None, None, :]
    )
    return special.softmax(joint)


NUM_BINS, NUM_POINTS = 8, 96  # bins and points of a prior's quantiles


@cache
def exact_by_quadrature():
    """
    Probabilities of partitions, and of each hyperparameter's prior quantile in bins.
    Given the partition (alpha, d), (m, k) and c are independent.
    """
    u = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS
    at = {name: prior.ppf(u) for name, (_, prior) in PRIORS.items()}
    parts = {
        ("alpha", "d"): np.stack(
            [log_eppf(z, at["alpha"][:, None], at["d"]) for z in PARTITIONS]
        ),
        ("m", "k"): of_clusters(
            lambda s: normal_log_marginal(Y[s], at["m"][:, None], at["k"])
        ),
        ("c",): of_clusters(lambda s: categorical_log_marginal(A[s], at["c"])),
    }
    flat = {n: v.reshape(len(PARTITIONS), -1) for n, v in parts.items()}
    probs = special.softmax(sum(special.logsumexp(v, 1) for v in flat.values()))
    bins = {}
    for names, value in parts.items():
        given = special.softmax(flat[names], 1).reshape(value.shape)
        joint = np.tensordot(probs, given, 1)
        for i, name in enumerate(names):
            axes = tuple(j for j in range(len(names)) if j != i)
            bins[name] = joint.sum(axes).reshape(NUM_BINS, -1).sum(1)
    return probs, bins


# --- Runs ---------------------------------------------------------------------------

THINNING, KEPT, DROPPED = 10, 26, 6


def run(
    kernel,
    seed,
    num_chains=300,
    num_warmup=3,
    method="vectorized",
    thinning=THINNING,
):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=thinning * KEPT,
        thinning=thinning,
        num_chains=num_chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(random.key(seed))
    draws = {**mcmc.get_samples(group_by_chain=True)}
    fields = mcmc.get_extra_fields(group_by_chain=True)
    if "log_joint" in fields:  # not of a composite
        draws["log joint"] = fields["log_joint"]
    return {k: np.asarray(v)[:, DROPPED:] for k, v in draws.items()}


@cache
def grid_draws(joint):
    more = {"joint": joint, "num_hyper_updates": 1 + len(joint)}
    if not joint:
        more["split_merge"] = None
    return run(SubsampleAnnealedGibbs(grid_model, **more), seed=1)


@pytest.mark.parametrize(
    "joint",
    [
        pytest.param((), id="()"),
        pytest.param((("alpha", "d"), ("k", "m")), id="joint", marks=long_runs),
    ],
)
def test_grids_and_partitions_follow_their_joint_posterior(joint):
    # Clusters are split and merged too in the second case, and elsewhere in this file
    # where it is not said that they are not. False alarm: 0.7 % for the six comparisons
    # of a case.
    draws = grid_draws(joint)
    exact = exact_on_grids()
    index = [testing.partition_index(draws["z"], PARTITIONS)]
    for name, grid in GRIDS.items():
        index.append(np.abs(draws[name][..., None] - grid).argmin(-1))
        np.testing.assert_allclose(draws[name], grid[index[-1]], rtol=1e-6)
    for axes in [(0,), (0, 1), (1, 2), (3, 4), (0, 5), (1, 2, 3, 4, 5)]:
        others = tuple(i for i in range(6) if i not in axes)
        probs = exact.sum(others)
        check(np.ravel_multi_index([index[i] for i in axes], probs.shape), probs)


def test_the_grid_posterior_is_spread():
    # Not a test of the kernel: with little to decide those above would show little.
    exact = exact_on_grids()
    assert np.exp(special.entr(exact.sum((1, 2, 3, 4, 5))).sum()) > 10
    for i, name in enumerate(GRIDS, 1):
        probs = exact.sum(tuple(j for j in range(6) if j != i))
        prior = WEIGHTS.get(name, np.ones(len(GRIDS[name])))
        assert probs.min() > 0.02 and np.abs(probs - prior / prior.sum()).max() > 0.02


# All chains of a step wait for the longest trajectory: of at most 7 steps here.
short_nuts = partial(NUTS, max_tree_depth=3)


def assert_continuous(draws):
    probs, bins = exact_by_quadrature()
    check(testing.partition_index(draws["z"], PARTITIONS), probs)
    for name, (_, prior) in PRIORS.items():
        bin_of = np.minimum((prior.cdf(draws[name]) * NUM_BINS).astype(int), 7)
        check(bin_of, bins[name])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="slice"),
        pytest.param({"hyper_kernel": short_nuts}, id="nuts", marks=long_runs),
    ],
)
def test_continuous_hyperparameters_follow_their_posterior(options):
    # False alarm: 0.7 % for the six comparisons of a case.
    kernel = SubsampleAnnealedGibbs(continuous_model, split_merge=None, **options)
    # (Autocorrelations at lag six are below 0.02, of all that is tested.)
    nuts = {"num_warmup": 100, "num_chains": 200} if options else {}
    draws = run(kernel, 2, thinning=6, **nuts)
    assert_continuous(draws)
    np.testing.assert_allclose(
        draws["precision of the mean"], 1 / draws["k"], rtol=1e-6
    )


# NumPyro's own, of thinned samples under `jax.vmap`.
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("first", ["ours", "nuts"])
def test_a_composite_with_nuts_follows_the_posterior(first):
    # False alarm: 0.7 % for the six comparisons of a case.
    ours = SubsampleAnnealedGibbs(continuous_model, split_merge=None)
    blocks = [
        (ours, ["z", "var", "loc", "probs", "alpha", "c"]),
        (short_nuts(continuous_model), None),
    ]
    kernel = Gibbs(blocks if first == "ours" else blocks[::-1])
    # (Autocorrelations at lag ten are below 0.02.)
    draws = run(kernel, 3, num_chains=150, num_warmup=100, method=jax.vmap)
    assert_continuous(draws)


def test_rows_that_are_out_have_labels_for_other_kernels():
    kernel = SubsampleAnnealedGibbs(grid_model, split_merge=None)
    kernel = kernel.wrap_model(conditioned)
    others = {"m": jnp.float32(0.3), "k": jnp.float32(0.7)}
    kwargs = {GIBBS_SITES_KWARG: others}
    state = kernel.init(random.key(0), 4, None, (), kwargs)
    assert set(state.z) == {"z", "var", "loc", "probs", "alpha", "d", "c"}
    sample = jax.jit(lambda state: kernel.sample(state, (), kwargs))
    for size in (2, 3, 4, 5):
        state = sample(state)
        assert state.subsample_size == size and (state.z["z"] >= 0).all()
        assert state.num_clusters <= np.unique(state.z["z"]).size
    assert kernel.refresh(state, (), kwargs) is state


# --- The concentration given the clusters --------------------------------------------


def only_a_concentration(prior, num_rows, discount=0.0):
    alpha = numpyro.sample("alpha", prior)
    z = numpyro.sample("z", PitmanYorProcess(alpha, discount, size=num_rows))
    with numpyro.plate("clusters", num_rows):
        probs = numpyro.sample("probs", dist.Beta(1.0, 1.0))
    with numpyro.plate("rows", num_rows):
        x = np.zeros(num_rows, int)
        numpyro.sample("x", dist.Bernoulli(probs[z]), obs=x)


@cache
def concentration_chains(num_rows):
    """
    Independent chains of 30 updates of the concentration, given a prior, a discount and
    assignments. (One program for all that have so many rows.)
    """

    def model(prior, discount):
        only_a_concentration(prior, num_rows, discount)

    def chain(key, prior, discount, z, plan):
        args = prior, discount
        key_start, key = random.split(key)
        values = reading_.first_values(key_start, plan, model, args, {})
        found = reading_.read(plan, model, args, {}, values)
        clusters = rows.collect(found.components, z, num_rows)
        target = hyper_moves.Target(plan, model, args, {}, found.components, clusters)

        def step(values, key):
            return hyper_moves.update(key, target, values), None

        return lax.scan(step, values, random.split(key, 30))[0]["alpha"]

    plans = {}  # by kind of prior

    @jax.jit
    def run(keys, prior, discount, z):
        one = partial(chain, plan=plans[type(prior)])
        return jax.vmap(one, (0, None, None, None))(keys, prior, discount, z)

    def recognised_and_run(keys, prior, discount, z):
        plans.setdefault(type(prior), recognise(model, (prior, discount), {}))
        return run(keys, prior, discount, z)

    return recognised_and_run


def concentration_draws(prior, sizes, discount, num_draws):
    z = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    keys = random.split(random.key(0), num_draws)
    run = concentration_chains(len(z))
    return np.asarray(run(keys, prior, jnp.float32(discount), z), float)


PRIOR_OF = {
    "vague": (1e-3, 1e-3),
    "sharp": (400.0, 100.0),
    "one": (1.0, 1.0),
}
SIZES = {
    "one cluster": [40],
    "all apart": [1] * 40,
    "one row": [1],
    "some": [20, 10, 5, 3, 1, 1],
}


@long_runs
@pytest.mark.parametrize("discount", [0.0, 0.3])
@pytest.mark.parametrize("prior", PRIOR_OF)
@pytest.mark.parametrize("sizes", SIZES)
def test_concentration_given_the_clusters(sizes, prior, discount):
    # Kolmogorov-Smirnov above 1e-4: a false alarm in 0.24 % for the 24 cases.
    sizes, (shape, rate) = SIZES[sizes], PRIOR_OF[prior]
    z = np.repeat(np.arange(len(sizes)), sizes)
    prior = dist.Gamma(jnp.float32(shape), jnp.float32(rate))
    draws = concentration_draws(prior, sizes, discount, 2000)
    assert np.isfinite(draws).all() and (draws > 0).all()
    # What float32 cannot represent has no probability: down to its least normal number.
    u = np.linspace(np.log(np.finfo(np.float32).tiny), np.log(1e6), 40_001)
    alpha = np.exp(u)
    density = stats.gamma(shape, scale=1 / rate).logpdf(alpha) + u
    density = density + log_eppf(z, alpha, discount)
    weight = np.exp(density - density.max())
    cdf = np.concatenate([[0.0], np.cumsum((weight[1:] + weight[:-1]) / 2)])
    cdf = cdf / cdf[-1]
    test = stats.kstest(np.log(draws), lambda t: np.interp(t, u, cdf))
    assert test.pvalue > 1e-4, test


def test_a_point_that_a_grid_lists_twice_has_its_weights_once():
    # Chi-square above 1e-3.
    prior = Grid(np.array([0.5, 3.0, 0.5, 8.0]), np.array([1.0, 2.0, 1.0, 1.0]))
    draws = concentration_draws(prior, [3, 2, 1], 0.0, 4000)
    alpha = np.array([0.5, 3.0, 8.0])
    log_prob = log_eppf([0, 0, 0, 1, 1, 2], alpha, 0.0) + np.log([2.0, 2.0, 1.0])
    check(np.abs(draws[:, None] - alpha).argmin(1), special.softmax(log_prob))


def laws_of_assignments(a):
    """Every law of partitions and of labels, with parameter `a`."""
    weights = jnp.array([0.5, 1.0, 0.2, 2.0])
    probs = jax.nn.log_softmax(a * weights)
    return {
        "crp": ChineseRestaurantProcess(a, size=9),
        "py": PitmanYorProcess(a, 0.3 * jnp.tanh(a), size=9),
        "finite": FiniteDirichletMixture(a, 5, size=9),
        "mixed": MixtureOfFiniteMixtures(a, dist.Poisson(2.0), size=9),
        "dirichlet": DirichletWeights(a * weights, 9),
        "sticks": StickBreakingWeights(jnp.ones(3), a * jnp.ones(3), 9),
        "known": KnownWeights(probs, 9),
    }


def test_what_depends_on_parameters_is_all_that_does():
    # In float64: a difference between parameters is that of the log probabilities.
    def both(a, counts):
        out = []
        for law in laws_of_assignments(a).values():
            if hasattr(law, "log_eppf"):
                out.append((law.log_eppf(counts), law.log_eppf_of_parameters(counts)))
            else:
                out.append((law.log_prob(counts), law.log_prob_of_parameters(counts)))
        return jnp.array(out)

    with jax.enable_x64(True):
        of_parameters = jax.jit(jax.vmap(both, (0, None)))
        for counts in ([4, 3, 0, 2], [9, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]):
            found = of_parameters(jnp.array([0.4, 1.0, 6.0]), jnp.array(counts))
            np.testing.assert_allclose(
                np.diff(found[..., 0], axis=0),
                np.diff(found[..., 1], axis=0),
                atol=1e-9,
            )


def test_many_rows_cost_no_digits():
    # In float32, a million rows: the log EPPF itself is about -1e6, and the posterior
    # of the concentration, about Gamma(11, log(1e6)), must not show its rounding.
    sizes = np.array([400_000, 300_000, 200_000, 99_000, 900, 60, 30, 6, 3, 1])
    counts = jnp.asarray(sizes, jnp.int32)
    alpha = np.exp(np.linspace(-3, 3, 200))
    got = jax.vmap(
        lambda a: ChineseRestaurantProcess(a, size=10**6).log_eppf_of_parameters(counts)
    )(jnp.asarray(alpha, jnp.float32))
    want = len(sizes) * np.log(alpha) + special.gammaln(alpha)
    want = want - special.gammaln(alpha + sizes.sum())
    got, want = np.asarray(got, float), want - want.mean()
    np.testing.assert_allclose(got - got.mean(), want, atol=2e-4)


# --- What depends on what ------------------------------------------------------------


X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def features(kind):
    """Normal columns with a hyperparameter for each."""

    def model(x):
        num_rows, num_features = x.shape
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=num_rows))
        with numpyro.plate("features", num_features, dim=-1):
            rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
            if kind == "mixed":
                rate = rate.mean() + 0 * rate
            if kind == "neighbours":
                rate = rate + jnp.roll(rate, 1)
            with numpyro.plate("clusters", 6, dim=-2):
                var = numpyro.sample("var", dist.InverseGamma(3.0, rate))
                loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
            with numpyro.plate("rows", num_rows, dim=-2):
                numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)

    return model


@pytest.mark.parametrize(
    "kind, separable", [("plain", True), ("mixed", False), ("neighbours", False)]
)
def test_elements_are_updated_together_only_if_they_are_independent(kind, separable):
    (site,) = recognise(features(kind), (X,), {}).hyper
    assert site.name == "rate" and site.separable is separable


@long_runs
@pytest.mark.parametrize("kind", ["plain", "neighbours"])
def test_updates_of_elements_follow_the_full_conditional(kind):
    # Given the clusters: against a lattice of all three rates. Chi-square above 1e-3
    # for each of the three: a false alarm in 0.3 %.
    model = features(kind)
    plan = recognise(model, (X,), {})
    z = jnp.array([0, 0, 1, 1, 1, 2], jnp.int32)

    def chain(key):
        values = {"rate": jnp.ones(3)}
        found = reading_.read(plan, model, (X,), {}, values)
        clusters = rows.collect(found.components, z, 6)
        target = hyper_moves.Target(plan, model, (X,), {}, found.components, clusters)

        def step(values, key):
            return hyper_moves.update(key, target, values), None

        return lax.scan(step, values, random.split(key, 25))[0]["rate"]

    draws = np.asarray(jax.jit(jax.vmap(chain))(random.split(random.key(0), 4000)))
    prior, u = stats.gamma(2.0), (np.arange(48) + 0.5) / 48
    points = prior.ppf(u)
    rate = np.stack(np.meshgrid(points, points, points, indexing="ij"))
    if kind == "neighbours":
        rate = rate + np.roll(rate, 1, 0)
    total = 0.0
    for d, k in itertools.product(range(3), range(3)):
        x = X[np.asarray(z) == k, d]
        m, kappa, shape, b = 0.0, 0.1, 3.0, rate[d]
        for value in x:
            scale = np.sqrt(b * (kappa + 1) / (shape * kappa))
            total = total + stats.t.logpdf(value, 2 * shape, m, scale)
            b = b + 0.5 * kappa / (kappa + 1) * (value - m) ** 2
            m, kappa, shape = (kappa * m + value) / (kappa + 1), kappa + 1, shape + 0.5
    probs = special.softmax(total)
    for d in range(3):
        axes = tuple(i for i in range(3) if i != d)
        index = np.minimum((prior.cdf(draws[:, d]) * 8).astype(int), 7)
        check(index, probs.sum(axes).reshape(8, -1).sum(1))


POINTS = {
    "a": np.array([0.3, 1.0, 4.0]),
    "d": np.array([0.0, 0.2, 0.5, 0.7]),
    "s": np.array([0.5, 3.0]),
    "m": np.array([[-1.0, 0.5], [0.0, 1.0], [-0.5, 0.2]]),
    "k": np.array([0.05, 0.3, 1.0]),
}


def weights_of_d(a):
    return [1.0, a, a * a / 4, 0.5]


def weights_of_m(s):
    return [1.0, s]


def grids_on_grids(x):
    """Grids whose weights are those of other grids, of different numbers of points."""
    a = numpyro.sample("a", Grid(POINTS["a"], np.array([1.0, 3.0, 2.0])))
    d = numpyro.sample("d", Grid(POINTS["d"], jnp.stack([*weights_of_d(a)])))
    z = numpyro.sample("z", PitmanYorProcess(a, d, size=len(x)))
    s = numpyro.sample("s", Grid(POINTS["s"]))
    with numpyro.plate("features", 3, dim=-1):
        m = numpyro.sample("m", Grid(POINTS["m"], jnp.stack([*weights_of_m(s)])))
        k = numpyro.sample("k", Grid(POINTS["k"]))
        with numpyro.plate("clusters", 6, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(SHAPE, RATE))
            loc = numpyro.sample("loc", dist.Normal(m, jnp.sqrt(var / k)))
        with numpyro.plate("rows", len(x), dim=-2):
            numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


@long_runs
def test_grids_on_grids_follow_their_joint_conditional():
    # Given the clusters; chi-square above 1e-3 for each of the four: a false alarm in
    # 0.4 %.
    plan = recognise(grids_on_grids, (X,), {})
    z = np.array([0, 0, 1, 1, 1, 2], np.int32)

    def chain(key):
        start = {n: jnp.asarray(POINTS[n][..., 0], jnp.float32) for n in "adsm"}
        start["k"] = jnp.full(3, 0.05)
        found = reading_.read(plan, grids_on_grids, (X,), {}, start)
        clusters = rows.collect(found.components, jnp.asarray(z), 6)
        target = hyper_moves.Target(
            plan, grids_on_grids, (X,), {}, found.components, clusters
        )

        def step(values, key):
            return hyper_moves.update(key, target, values), None

        return lax.scan(step, start, random.split(key, 40))[0]

    draws = jax.jit(jax.vmap(chain))(random.split(random.key(0), 6000))
    index = {
        n: np.abs(np.asarray(draws[n])[..., None] - POINTS[n]).argmin(-1) for n in draws
    }

    prior = np.log(np.array([1.0, 3.0, 2.0]))[:, None]
    weights = np.array([weights_of_d(a) for a in POINTS["a"]])
    prior = prior + np.log(weights / weights.sum(1, keepdims=True))
    probs = special.softmax(
        prior + log_eppf(z, POINTS["a"][:, None], POINTS["d"][None, :])
    )
    check(np.ravel_multi_index([index["a"], index["d"]], probs.shape), probs)

    weights = np.array([weights_of_m(s) for s in POINTS["s"]])
    weights = np.log(weights / weights.sum(1, keepdims=True))
    each = []  # of each feature: s, m, k
    for d in range(3):
        mean, kappa = POINTS["m"][d][:, None], POINTS["k"]
        data = [X[z == c, d] for c in range(3)]
        total = sum(normal_log_marginal(x, mean, kappa) for x in data)
        each.append(weights[:, :, None] + total)
    of_s = [special.logsumexp(part, (1, 2)) for part in each]
    for d, part in enumerate(each):
        others = sum(of_s[i] for i in range(3) if i != d)
        probs = special.softmax(part + others[:, None, None])
        found = [index["s"], index["m"][:, d], index["k"][:, d]]
        check(np.ravel_multi_index(found, probs.shape), probs)


def only_hyper(*sites):
    """A model of these sites, each of which is given the values before it, with a
    partition by the last of them; and one column, which tells nothing of them."""

    def model(x):
        values = {}
        for name, prior in sites:
            values[name] = numpyro.sample(name, prior(values))
        one_column(x, concentration=jnp.sum(values[sites[-1][0]]))

    return model


def hyper_draws(model, start, num_chains, joint=(), num_updates=30):
    """Draws of hyperparameters given the clusters, from chains of their own."""
    x, z = X[:, 0], np.array([0, 0, 1, 1, 1, 2], np.int32)
    plan = recognise(model, (x,), {})
    found = reading_.read(plan, model, (x,), {}, start)
    clusters = rows.collect(found.components, jnp.asarray(z), 4)
    target = hyper_moves.Target(plan, model, (x,), {}, found.components, clusters)

    def chain(key):
        def step(values, key):
            return hyper_moves.update(key, target, values, joint), None

        return lax.scan(step, start, random.split(key, num_updates))[0]

    draws = jax.jit(jax.vmap(chain))(random.split(random.key(0), num_chains))
    return {name: np.asarray(v) for name, v in draws.items()}, z


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "x64"])
@pytest.mark.parametrize("joint", [(), [("b", "a")]], ids=str)
def test_grids_at_points_of_other_grids(joint, x64):
    # Four combinations; chi-square above 1e-3: a false alarm in 0.1 % of each case. A
    # third of the draws would be elsewhere if points were of the value before.
    model = only_hyper(
        ("a", lambda _: Grid([1.0, 2.0])),
        ("b", lambda v: Grid(jnp.stack([0.3 * v["a"], 4 * v["a"]]))),
    )
    with jax.enable_x64(x64):
        # NB: of `a` alone no move changes; `b` would be off its grid.
        start = {"a": jnp.asarray(1.0), "b": jnp.asarray(4.0)}
        draws, z = hyper_draws(model, start, 4000, joint)
    points = np.array([[0.3, 4.0], [0.6, 8.0]])
    log_density = np.array([[log_eppf(z, b, 0.0) for b in row] for row in points])
    a = (draws["a"] > 1.5).astype(int)
    b = np.abs(draws["b"][:, None] - points[a]).argmin(1)
    np.testing.assert_allclose(draws["b"], points[a, b], rtol=1e-6)
    if joint:
        check(a * 2 + b, special.softmax(log_density))
    else:
        check(b, special.softmax(log_density[0]))
        assert (a == 0).all()


def test_a_grid_in_a_plate_of_one():
    def model(x):
        with numpyro.plate("one", 1):
            a = numpyro.sample("a", Grid([0.5, 1.0, 4.0]))
        one_column(x, concentration=a[0])

    draws, z = hyper_draws(model, {"a": jnp.ones(1)}, 4000, num_updates=1)
    probs = special.softmax([log_eppf(z, a, 0.0) for a in (0.5, 1.0, 4.0)])
    check(np.searchsorted([0.5, 1.0, 4.0], draws["a"][:, 0]), probs)


def test_large_integers_beside_a_grid_keep_their_digits():
    first = 2**24
    model = only_hyper(
        ("a", lambda _: dist.DiscreteUniform(first, first + 3)),
        ("b", lambda v: Grid([0.5, 4.0], 1.0 + jnp.stack([v["a"] % 2, v["a"] % 3]))),
    )
    start = {"a": jnp.int32(first), "b": jnp.asarray(0.5)}
    draws, _ = hyper_draws(model, start, 400)
    np.testing.assert_array_equal(np.unique(draws["a"]), first + np.arange(4))


@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("before", range(4))
def test_coupled_elements_are_found_whatever_their_number(num, before):
    # Sites before change which random numbers are used.
    def model(x):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        for i in range(before):
            with numpyro.plate(f"plate_{i}", 2):
                numpyro.sample(f"more_{i}", Grid([0.0, 1.0]))
        with numpyro.plate("features", num, dim=-1):
            m = numpyro.sample("m", Grid([-1.0, 1.0]))
            free = numpyro.sample("free", Grid([0.5, 1.0]))
            with numpyro.plate("clusters", 4, dim=-2):
                mean = m.sum() * jnp.ones(num)
                loc = numpyro.sample("loc", dist.Normal(mean, free))
            with numpyro.plate("rows", len(x), dim=-2):
                numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)

    x = np.zeros((6, num), np.float32) + np.arange(num, dtype=np.float32)
    found = {s.name: s.separable for s in recognise(model, (x,), {}).hyper}
    assert not found["m"] and found["free"]


def test_chains_are_started_inside_a_program():
    kernel = SubsampleAnnealedGibbs(features("plain"))
    key = random.key(0)
    alone = kernel.init(key, 3, None, (X,), {})
    inside = jax.jit(lambda y: kernel.init(key, 3, None, (X,), {}).z["rate"] + y)(0.0)
    np.testing.assert_allclose(inside, alone.z["rate"], rtol=1e-5)


def test_only_occupied_clusters_inform_hyperparameters():
    model = features("plain")
    plan = recognise(model, (X,), {})
    values = {"rate": jnp.ones(3)}
    found = reading_.read(plan, model, (X,), {}, values)
    z = jnp.array([0, 0, 2, 2, 2, 2], jnp.int32)
    clusters = rows.collect(found.components, z, 6)
    empty = clusters.counts == 0
    rubbish = jax.tree.map(lambda s: jnp.where(empty, jnp.nan, s), clusters.stats)
    drawn = []
    for stats_ in (clusters.stats, rubbish):
        target = hyper_moves.Target(
            plan,
            model,
            (X,),
            {},
            found.components,
            clusters._replace(stats=stats_),
        )
        update = jax.jit(partial(hyper_moves.update, target=target))
        drawn.append(update(random.key(0), values=values)["rate"])
    np.testing.assert_array_equal(*drawn)


@cache
def unused_capacity(views):
    """
    Factors of a model of twenty clusters, given labels, at a few values of its
    hyperparameters: as they are computed, and all clusters at once. (One program for
    all labels.)
    """
    capacity, codes = 20, np.array([[0, 2], [1, 1], [2, 0], [1, 0], [0, 0], [2, 2]])

    def model(x, codes):
        strength = numpyro.sample("strength", dist.Gamma(2.0, 1.0).expand([2]))
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0).expand([3]))
        var = numpyro.sample("var", dist.InverseGamma(2.0, rate).expand([capacity, 3]))
        loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var)))
        prior = dist.Dirichlet(strength[:, None] * jnp.ones(3)).expand([capacity, 2])
        probs = numpyro.sample("probs", prior)
        if views:
            view = numpyro.sample("view", PitmanYorProcess(1.0, 0.1, size=5))
            with numpyro.plate("views", 5):
                crp = ChineseRestaurantProcess(1.0, size=len(x))
                z = numpyro.sample("z", crp)
            z, z_codes = z[view[:3]].T, z[view[3:]].T
            columns, of_codes = jnp.arange(3), jnp.arange(2)
            loc, var = loc[z, columns], var[z, columns]
            probs = probs[z_codes, of_codes]
        else:
            z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
            loc, var, probs = loc[z], var[z], probs[z]
        numpyro.sample("x", dist.Normal(loc, jnp.sqrt(var)), obs=x)
        numpyro.sample("codes", dist.Categorical(probs), obs=codes)

    args = X, codes
    plan = recognise(model, args, {})

    @jax.jit
    def factors(z):
        values = {"rate": jnp.ones(3), "strength": jnp.ones(2)}
        found = reading_.read(plan, model, args, {}, values)
        layout, views_of = None, ()
        if views:
            # The second view has fewer clusters.
            z = jnp.stack([z, jnp.minimum(z, 3), *[z] * 3], 1)
            layout, views_of = plan.layout, (jnp.array([1, 0, 0, 1, 0], jnp.int32),)
        clusters = rows.collect(found.components, z, capacity, layout, views_of)
        target = hyper_moves.Target(plan, model, args, {}, found.components, clusters)
        new = {"rate": jnp.array([0.3, 1.0, 4.0]), "strength": jnp.array([0.5, 3.0])}
        # Of several candidates at once, as they are tried.
        many = {name: jnp.stack([value, 2 * value]) for name, value in new.items()}
        return [
            jax.vmap(lambda v, t=t: t.factors(["x", "codes"], t.trace(v)))(many)
            for t in (target, target._replace(derived=True))
        ]

    return factors


@pytest.mark.parametrize(
    "labels", [[0, 2, 13, 13, 8, 19], [0, 1, 2, 2, 7, 7], [16] * 6]
)
@pytest.mark.parametrize("views", [False, True], ids=["mixture", "views"])
def test_the_unused_capacity_is_left_out(labels, views):
    # In parts of eight of twenty clusters, the last of which overlap; or all at once,
    # as where derivatives are taken.
    got, expected = unused_capacity(views)(jnp.array(labels, jnp.int32))
    for a, b in zip(got, expected, strict=True):
        assert np.ptp(b) > 0.1
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def indexed():
    """Indices of every kind."""
    which = numpyro.sample("which", dist.Categorical(jnp.array([0.2, 0.5, 0.3])))
    flag = numpyro.sample("flag", dist.Bernoulli(0.4))
    step = numpyro.sample("step", dist.DiscreteUniform(1, 3))
    alpha = jnp.array([0.2, 1.0, 4.0])[which]
    z = numpyro.sample("z", ChineseRestaurantProcess(alpha, size=len(Y)))
    with numpyro.plate("clusters", len(Y)):
        var = numpyro.sample("var", dist.InverseGamma(SHAPE, RATE))
        m, k = jnp.where(flag == 1, 0.7, -0.7), step / 2.0
        loc = numpyro.sample("loc", dist.Normal(m, jnp.sqrt(var / k)))
    with numpyro.plate("rows", len(Y)):
        numpyro.sample("y", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=Y)


def test_indices_are_enumerated():
    # False alarm: 0.4 % for the four comparisons.
    draws = run(SubsampleAnnealedGibbs(indexed, split_merge=None), seed=4)
    alpha, m, k = np.array([0.2, 1.0, 4.0]), np.array([-0.7, 0.7]), np.arange(1, 4) / 2
    prior = np.stack([log_eppf(z, alpha, 0.0) for z in PARTITIONS])
    normal = of_clusters(lambda s: normal_log_marginal(Y[s], m[:, None], k))
    joint = (
        (prior + np.log([0.2, 0.5, 0.3]))[:, :, None, None]
        + normal[:, None]
        + np.log([0.6, 0.4])[:, None]
    )
    exact = special.softmax(joint)
    index = (
        testing.partition_index(draws["z"], PARTITIONS),
        draws["which"],
        draws["flag"],
        draws["step"] - 1,
    )
    for axes in [(0,), (1,), (2, 3), (0, 2)]:
        probs = exact.sum(tuple(i for i in range(4) if i not in axes))
        check(np.ravel_multi_index([index[i] for i in axes], probs.shape), probs)


def multivariate():
    """Of one dimension: statistics that hold the prior's scale matrix and mean."""
    m = numpyro.sample("m", Grid(GRIDS["m"]))
    k = numpyro.sample("k", Grid(GRIDS["k"]))
    rate = numpyro.sample("rate", Grid(np.array([0.3, 1.5, 6.0])))
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(Y)))
    with numpyro.plate("clusters", len(Y)):
        scale = 2 * rate * jnp.eye(1)
        cov = numpyro.sample("cov", dist.InverseWishart(2 * SHAPE, scale_matrix=scale))
        fn = dist.MultivariateNormal(m * jnp.ones(1), covariance_matrix=cov / k)
        loc = numpyro.sample("loc", fn)
    with numpyro.plate("rows", len(Y)):
        fn = dist.MultivariateNormal(loc[z], covariance_matrix=cov[z])
        numpyro.sample("y", fn, obs=Y[:, None])


def test_statistics_that_hold_the_prior_follow_it():
    # False alarm: 0.4 % for the four comparisons, 0.02 % for the two of parameters.
    draws = run(SubsampleAnnealedGibbs(multivariate, split_merge=None), seed=5)
    grids = [GRIDS["m"], GRIDS["k"], np.array([0.3, 1.5, 6.0])]
    m, k, rate = np.meshgrid(*grids, indexing="ij")
    normal = of_clusters(lambda s: normal_log_marginal(Y[s], m, k, rate))
    prior = np.stack([log_eppf(z, 1.0, 0.0) for z in PARTITIONS])
    exact = special.softmax(normal + prior[:, None, None, None])
    index = [testing.partition_index(draws["z"], PARTITIONS)]
    for name, grid in zip(("m", "k", "rate"), grids, strict=True):
        index.append(np.abs(draws[name][..., None] - grid).argmin(-1))
    for axes in [(0,), (0, 3), (1, 2, 3), (0, 1)]:
        probs = exact.sum(tuple(i for i in range(4) if i not in axes))
        check(np.ravel_multi_index([index[i] for i in axes], probs.shape), probs)
    # Parameters of the first row's cluster: drawn after the hyperparameters moved.
    together = draws["z"] == 0
    n = together.sum(-1)
    mean = (together * Y).sum(-1) / n
    square = (together * (Y - mean[..., None]) ** 2).sum(-1)
    m, k, rate = (draws[name].astype(float) for name in ("m", "k", "rate"))
    added = (square + k * n / (k + n) * (mean - m) ** 2) / 2
    cov, loc = draws["cov"][..., 0, 0, 0], draws["loc"][..., 0, 0]
    quantile = stats.gamma(SHAPE + n / 2).cdf((rate + added) / cov)
    residual = (loc - (k * m + n * mean) / (k + n)) / np.sqrt(cov / (k + n))
    assert stats.kstest(quantile.ravel(), "uniform").pvalue > 1e-4
    assert stats.kstest(residual.ravel(), "norm").pvalue > 1e-4


# --- Reading and manners -------------------------------------------------------------


def hierarchy(x, num_clusters=6):
    """Hyperparameters of hyperparameters, a vector of them, and what they share."""
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(2)))
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    with numpyro.plate("features", x.shape[1], dim=-1):
        m = numpyro.sample("m", dist.Normal(0.0, tau))
        with numpyro.plate("clusters", num_clusters, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(3.0, 2 * share[0]))
            loc = numpyro.sample("loc", dist.Normal(m, jnp.sqrt(var / 0.2)))
        with numpyro.plate("rows", len(x), dim=-2):
            numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def test_a_plan_says_what_depends_on_a_hyperparameter(capsys):
    plan = recognise(hierarchy, (X,), {})
    found = {site.name: set(site.factors) for site in plan.hyper}
    assert found == {
        "tau": {"tau", "m"},
        "share": {"share", "x"},
        "m": {"m", "x"},
    }
    assert all(not site.finite for site in plan.hyper)
    explain(hierarchy, X)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("tau")]
    assert "hyperparameter" in line and "'m'" in line


@pytest.mark.parametrize("x64, jit_model_args", [(False, True), (True, False)])
def test_hierarchies_are_sampled_and_kernels_pickled(x64, jit_model_args):
    with jax.enable_x64(x64):
        kernel = SubsampleAnnealedGibbs(hierarchy, split_merge=None)
        mcmc = MCMC(
            pickle.loads(pickle.dumps(kernel)),
            num_warmup=3,
            num_samples=5,
            progress_bar=False,
            jit_model_args=jit_model_args,
        )
        mcmc.run(random.key(0), X)
        draws = mcmc.get_samples()
        assert draws["tau"].shape == (5,) and draws["share"].shape == (5, 2)
        np.testing.assert_allclose(draws["share"].sum(-1), 1, rtol=1e-5)
        assert draws["m"].dtype == (np.float64 if x64 else np.float32)
        assert np.isfinite(mcmc.get_extra_fields()["log_joint"]).all()


def test_log_joint_has_the_prior_of_the_hyperparameters():
    draws = {name: v[:30, -1] for name, v in grid_draws(()).items()}  # of 30 chains
    for i in range(30):
        z = draws["z"][i]
        h = {name: float(draws[name][i]) for name in GRIDS}
        want = log_eppf(z, h["alpha"], h["d"]) - np.log(3 * 2**3)
        at = np.abs(GRIDS["alpha"] - h["alpha"]).argmin()
        want += np.log(WEIGHTS["alpha"] / WEIGHTS["alpha"].sum())[at]
        for k in range(z.max() + 1):
            want += normal_log_marginal(Y[z == k], h["m"], h["k"])
            want += categorical_log_marginal(A[z == k], h["c"])
        np.testing.assert_allclose(draws["log joint"][i], want, rtol=2e-5)


def test_initial_values_of_hyperparameters():
    kernel = SubsampleAnnealedGibbs(hierarchy)
    start = {"tau": jnp.float32(0.7), "m": jnp.arange(3.0)}
    state = kernel.init(random.key(0), 2, start, (X,), {})
    assert state.z["tau"] == start["tau"] and (state.z["m"] == start["m"]).all()
    assert state.subsample_size == 0
    with pytest.raises(ValueError, match="'loc_of_none'"):
        kernel.init(random.key(0), 2, {"tau": 1.0, "loc_of_none": 1.0}, (X,), {})
    with pytest.raises(ValueError, match="'z' or values of .'m', 'share', 'tau'."):
        kernel.init(random.key(0), 2, {"none": 1.0}, (X,), {})


def one_column(x, loc_prior=None, scale=1.0, concentration=1.0):
    z = numpyro.sample("z", ChineseRestaurantProcess(concentration, size=len(x)))
    with numpyro.plate("clusters", 4):
        loc = numpyro.sample("loc", loc_prior or dist.Normal(0.0, 1.0))
    numpyro.sample("x", dist.Normal(loc[z], scale), obs=x)
    return loc


def infinite(x):
    n = numpyro.sample("n", dist.Poisson(3.0))
    one_column(x, concentration=1.0 + n)


def scale_by_row(x):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    one_column(x, scale=jnp.exp(slope * jnp.arange(len(x))))


def after_the_clusters(x):
    loc = one_column(x)
    numpyro.sample("late", dist.Normal(loc.mean(), 1.0))


def on_the_clusters(x):
    loc = one_column(x)
    numpyro.sample("y", dist.Normal(loc[0], 1.0), obs=0.3)


def made_an_event(x):
    a = numpyro.sample("a", Grid([0.5, 2.0]).expand([3]).to_event(1))
    one_column(x, concentration=a.sum())


def known_mean(x):
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    with numpyro.plate("clusters", 4):
        var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
    numpyro.sample("x", dist.Normal(m, jnp.sqrt(var[z])), obs=x)


@pytest.mark.parametrize(
    "model, words",
    [
        (infinite, ["'n'", "Poisson", "Grid"]),
        (made_an_event, ["'a'", "Grid", "`to_event`", "plate"]),
        (scale_by_row, ["`scale`", "'slope'", "Gibbs([("]),
        (after_the_clusters, ["'late'", "'loc'", "integrated out"]),
        (on_the_clusters, ["'y'", "'loc'", "integrated out"]),
        (known_mean, ["`loc`", "'m'", "Gibbs([("]),
    ],
)
def test_refused(model, words):
    with pytest.raises(NotRecognised) as error:
        recognise(model, (X[:, 0],), {})
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, error.value


def observed_besides(x):
    """An observed site that depends on a hyperparameter only, and a factor."""
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(0.0, s), obs=jnp.array([3.0, -2.5, 4.0]))
    numpyro.factor("pull", -0.5 * (s - 2.0) ** 2)
    one_column(x, dist.Normal(0.0, s))


def test_other_observed_sites_inform_hyperparameters():
    plan = recognise(observed_besides, (X[:, 0],), {})
    assert set(plan.hyper[0].factors) == {"s", "y", "pull", "x"}


@pytest.mark.parametrize(
    "options, model, message",
    [
        ({"hyper_kernel": 3}, grid_model, "`hyper_kernel` must be a kernel class"),
        ({"hyper_kernel": NUTS}, grid_model, "no continuous hyperparameters"),
        ({"hyper_kernel": lambda m: m}, continuous_model, "must make a kernel"),
        ({"joint": "ad"}, grid_model, "list of groups"),
        ({"joint": [("alpha", "beta")]}, grid_model, "'beta'"),
        ({"joint": [("alpha", "d"), ("d", "k")]}, grid_model, "more than once"),
        ({"num_hyper_updates": 0}, grid_model, "positive integer, got 0"),
        ({"num_hyper_updates": True}, grid_model, "positive integer, got True"),
    ],
)
def test_options_are_checked(options, model, message):
    with pytest.raises(ValueError, match=message):
        SubsampleAnnealedGibbs(model, **options).init(random.key(0), 1, None, (), {})


def two_shapes(x):
    alpha = numpyro.sample("alpha", Grid(np.array([0.5, 2.0])))
    with numpyro.plate("some", 2):
        m = numpyro.sample("m", Grid(np.array([-1.0, 1.0])))
    one_column(x, dist.Normal(m.sum(), 1.0), concentration=alpha)


def test_groups_must_have_one_shape():
    kernel = SubsampleAnnealedGibbs(two_shapes, joint=[("alpha", "m")])
    state = kernel.init(random.key(0), 0, None, (X[:, 0],), {})
    with pytest.raises(ValueError, match=r"'alpha', 'm'.*\(\), \(2,\)"):
        kernel.sample(state, (X[:, 0],), {})


@pytest.mark.parametrize("chooses", [False, True])
def test_turns_go_on_over_steps(chooses):
    # 3 rows in, and then 10 moves in 5 steps: as many turns as with all in one.
    class Slow(AbstractSchedule):
        def steps(self, num_rows, num_warmup):
            added = np.zeros(num_warmup, int)
            added[0], added[-1] = 3, num_rows - 3
            return Steps(added, np.full(num_warmup, 2))

    class Choosing(Slow):
        def leaving(self, *args):
            return super().leaving(*args)

    schedule = Choosing() if chooses else Slow()
    kernel = SubsampleAnnealedGibbs(hierarchy, schedule, split_merge=None)
    state = kernel.init(random.key(0), 7, None, (X,), {})
    sample = jax.jit(lambda state: kernel.sample(state, (X,), {}))
    values, since = [state.z["tau"]], []
    for _ in range(6):
        state = sample(state)
        values.append(state.z["tau"])
        since.append(int(state.since))
    moved = [bool(a != b) for a, b in zip(values, values[1:], strict=False)]
    if chooses:
        # The first step's 5 moves: at two rows, and at three, after three more.
        assert since == [1, 0, 2, 1, 0, 2], since
        assert moved == [True, True, False, True, True, False], moved
    else:
        # While few rows are in, whenever as many have moved as the table holds: six.
        assert since == [5, 1, 3, 5, 1, 3], since
        assert moved == [False, True, False, False, True, False], moved


@pytest.mark.parametrize("num_chains", [1, 2])
def test_no_key_is_used_twice(num_chains):
    # Two chains make all moves, which one chain does in `test_kernel`. JAX looks for it
    # in the program, which need not be compiled for that.
    options = {"split_merge": None} if num_chains == 1 else {}
    key = random.key(0) if num_chains == 1 else random.split(random.key(0), 2)
    kernel = SubsampleAnnealedGibbs(hierarchy, **options)

    @jax.jit
    def steps(state):
        # Two, as what is used up in one must not be used in the next.
        return lax.fori_loop(0, 2, lambda _, s: kernel.sample(s, (X,), {}), state)

    with jax.debug_key_reuse(True):
        jax.eval_shape(steps, kernel.init(key, 2, None, (X,), {}))


# --- Slices -------------------------------------------------------------------------


@long_runs
def test_slices_follow_their_densities():
    # Narrow, wide, two modes, and half a line. Kolmogorov-Smirnov above 1e-4 each: a
    # false alarm in 0.04 %.
    def log_density(x):
        return jnp.stack(
            [
                -0.5 * ((x[0] - 5) / 0.01) ** 2,
                -0.5 * (x[1] / 100) ** 2,
                jnp.logaddexp(
                    -0.5 * ((x[2] + 1.2) / 0.4) ** 2,
                    np.log(2.0) - 0.5 * ((x[2] - 1.6) / 0.4) ** 2,
                ),
                jnp.where(x[3] > 0, -x[3], -jnp.inf),
            ]
        )

    def chain(key):
        def step(x, key):
            return hyper_moves.slice_sample(key, log_density, x), None

        start = jnp.array([5.0, 0.0, 0.0, 1.0])
        return lax.scan(step, start, random.split(key, 200))[0]

    x = np.asarray(jax.jit(jax.vmap(chain))(random.split(random.key(0), 2000)), float)
    laws = [
        stats.norm(5, 0.01).cdf,
        stats.norm(0, 100).cdf,
        lambda t: (stats.norm.cdf(t, -1.2, 0.4) + 2 * stats.norm.cdf(t, 1.6, 0.4)) / 3,
        stats.expon().cdf,
    ]
    for value, cdf in zip(x.T, laws, strict=True):
        test = stats.kstest(value, cdf)
        assert test.pvalue > 1e-4, test


# --- Values to start from -------------------------------------------------------------


def small_hyper(x):
    a = numpyro.sample("a", Grid(jnp.array([0.5, 1.0, 2.0])))
    s = numpyro.sample("s", dist.HalfNormal(5.0))
    z = numpyro.sample("z", ChineseRestaurantProcess(a, size=len(x)))
    with numpyro.plate("clusters", 3):
        loc = numpyro.sample("loc", dist.Normal(0.0, s))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"s": np.nan}, "'s' holds nan, which is not in the support"),
        ({"s": -1.0}, "'s' holds -1.0"),
        ({"a": 3.0}, "'a' holds 3.0"),
        ({"a": np.ones(3)}, r"'a' has shape \(3,\); it must have shape \(\)"),
    ],
)
def test_bad_initial_values_are_refused(given, message):
    kernel = SubsampleAnnealedGibbs(small_hyper)
    with pytest.raises(ValueError, match=message):
        kernel.init(random.key(0), 0, given, (Y,), {})


def test_bad_initial_value_of_one_chain_is_refused():
    kernel = SubsampleAnnealedGibbs(small_hyper)
    keys = random.split(random.key(0), 2)
    given = {"s": np.array([1.0, -2.0]), "a": np.array([1.0, 2.0])}
    with pytest.raises(ValueError, match="'s' holds -2.0"):
        kernel.init(keys, 0, given, (Y,), {})
