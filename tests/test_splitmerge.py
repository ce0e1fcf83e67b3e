# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Splits and merges against the exact posterior over all partitions.

Of the moves alone: from a partition they lead to every other, so that a chain of
nothing else has the posterior as its law. Keys are fixed and nothing is retried. (Every
family of pairs, with masked cells, is in `test_pairs`; everything moving at once in
`test_geweke_hyper`.)
"""

from collections import namedtuple
from dataclasses import astuple, fields
from functools import cache, partial
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from small_models import TabledPriors, blobs, finite_log_eppf, mixture
from test_enumeration import LAWS, TABLES, assert_law, exact, log_marginals, model

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import (
    PitmanYorProcess,
    SplitMerge,
    SubsampleAnnealedGibbs,
    reading,
    rows,
    splitmerge,
    testing,
)
from numpyro_subanneal.distributions import (
    FiniteDirichletMixture,
    MixtureOfFiniteMixtures,
)
from numpyro_subanneal.plan import recognise
from numpyro_subanneal.splitmerge import Record, split_and_merge
from numpyro_subanneal.subsample import Subsample
from numpyro_subanneal.weights import DirichletWeights, StickBreakingWeights

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled(level=1)

# Proposals that visit more rows are not always made, so that those of restricted scans
# are rarer here.
ALWAYS = 12
KINDS = {
    "sequential": SplitMerge(num_sequential=6, num_restricted=0),
    "restricted": SplitMerge(num_sequential=0, num_restricted=12, num_scans=1),
    "both": SplitMerge(num_sequential=4, num_restricted=4, num_scans=0),
}
TABLE = "mixed"
N = 6
NUM_CHAINS, KEPT, DROPPED, THINNING = 100, 34, 8, 8


@pytest.fixture(autouse=True, scope="module")
def small_constants():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitmerge, "_ALWAYS", ALWAYS)
        # Passes over more rows than random numbers are drawn for at once.
        patch.setattr(splitmerge, "_CHUNK", 4)
        yield


def log_finite(z, num_components=3):
    return finite_log_eppf(np.bincount(z), 1.2, num_components)


def log_mixed(z):
    of_each = [log_finite(z, num) for num in (1, 2, 3)]
    return special.logsumexp(of_each, b=[0.3, 0.4, 0.3])


# In the order of `process`.
LOG_PRIORS = {
    **{law: lambda z, law=law: testing.log_eppf(z, *LAWS[law]) for law in LAWS},
    "mixture of finite": log_mixed,
    "finite": log_finite,
}
NAMES = [f"{kind}-py" for kind in KINDS]
NAMES += [f"both-{law}" for law in LOG_PRIORS if law != "py"]


@cache
def read_components():
    bound = partial(model, TABLES[TABLE])
    plan = recognise(bound, LAWS["dp"], {})
    return reading.read(plan, bound, LAWS["dp"], {}, {}).components


class Walk(NamedTuple):
    clusters: rows.Clusters  # [chains, draws, ...]
    record: splitmerge.Record  # [chains]


# The options as numbers that are arguments of a program, which serves all kinds then.
Numbers = namedtuple("Numbers", [field.name for field in fields(SplitMerge)])


@cache
def program(capacity, row_moves):
    """Chains of turns; after each `THINNING` of them a draw is kept."""
    components = read_components()

    def turn(options, prior, size, carry, rng_key):
        z, order, record = carry
        key_moves, key_jump = random.split(rng_key)
        subsample = Subsample(order, size)
        jump = partial(split_and_merge, options, adapting=jnp.asarray(False))
        if not row_moves:
            clusters = rows.collect(components, z, capacity)
            clusters, record = jump(
                key_jump, prior, components, clusters, subsample, record, True
            )
            return (clusters.z, order, record), clusters
        made = rows.run_step(
            key_moves,
            lambda values, like: (prior, components),
            (),
            z,
            capacity,
            subsample,
            jnp.int32(0),
            jnp.int32(row_moves),
            jump=lambda key, values, *args: (values, *jump(key, *args)),
            record=record,
        )
        return (made.clusters.z, made.subsample.order, made.record), made.clusters

    def chain(rng_key, options, prior, size, failures):
        key_order, key_turns = random.split(rng_key)
        order = random.permutation(key_order, N).astype(jnp.int32)
        z = jnp.where(jnp.argsort(order) < size, 0, -1).astype(jnp.int32)
        record = Record.start()._replace(failures=failures)
        keys = random.split(key_turns, (KEPT, THINNING))

        one = partial(turn, options, prior, size)

        def thinned(carry, keys):
            carry, clusters = lax.scan(one, carry, keys)
            return carry, jax.tree.map(lambda c: c[-1], clusters)

        (*_, record), clusters = lax.scan(thinned, (z, order, record), keys)
        return Walk(clusters, record)

    return jax.jit(jax.vmap(chain, (0, None, None, None, None)))


def walk(
    options,
    prior,
    capacity=N,
    *,
    size=N,
    row_moves=0,
    failures=(0, 0),
    seed=0,
):
    run = program(capacity, row_moves)
    numbers = Numbers(*(jnp.asarray(value) for value in astuple(options)))
    keys = random.split(random.key(seed), NUM_CHAINS)
    walk = run(keys, numbers, prior, jnp.int32(size), jnp.array(failures))
    clusters = jax.tree.map(lambda c: np.asarray(c)[:, DROPPED:], walk.clusters)
    return Walk(clusters, jax.tree.map(np.asarray, walk.record))


@cache
def processes():
    probs = jnp.array([0.3, 0.4, 0.3])
    return TabledPriors.of(
        (
            *(PitmanYorProcess(*LAWS[law], size=N) for law in LAWS),
            MixtureOfFiniteMixtures(1.2, dist.Categorical(probs), N, max_components=3),
            FiniteDirichletMixture(1.2, 3, N),
        ),
        N,
    )


def process(law):
    return processes()[jnp.int32(list(LOG_PRIORS).index(law))]


@cache
def walk_alone(name):
    """Of splits and merges alone, all rows being in; shared by tests."""
    kind, law = name.split("-", 1)
    return walk(KINDS[kind], process(law), seed=NAMES.index(name))


def posterior_of(log_prior, states):
    """Of assignments `states`, whose rows out are -1: by an enumeration."""

    def joint(z):
        clusters = [np.flatnonzero(z == k) for k in range(max(z) + 1)]
        log_likelihood = [log_marginals(TABLES[TABLE], c) for c in clusters if len(c)]
        return log_prior(z) + sum(log_likelihood)

    return special.softmax([joint(z) for z in states])


def assert_follows(z, states, probs):
    assert_law(testing.partition_index(z, states), probs)


@pytest.mark.parametrize("name", NAMES)
def test_partitions_follow_the_enumerated_posterior(name):
    # False alarm: 0.11 % a case, 0.8 % for all seven.
    _, law = name.split("-", 1)
    clusters, record = walk_alone(name)
    states = testing.set_partitions(N)
    assert_follows(clusters.z, states, posterior_of(LOG_PRIORS[law], states))
    accepted = record.splits.sum() + record.merges.sum()
    proposed = record.split_proposals.sum() + record.merge_proposals.sum()
    assert 0.05 < accepted / proposed < 0.95
    # Every cluster that was split off was merged again, or is there still.
    held = (clusters.counts[:, -1] > 0).sum(1)
    np.testing.assert_array_equal(record.splits - record.merges, held - 1)
    # No split is refused where there is a slot for each row.
    assert (record.refused == 0).all()


@pytest.mark.parametrize("kind", ["restricted", "both"])
def test_draws_are_nearly_independent(kind):
    # What the tests of fit suppose: correlation at lag one of kept draws.
    clusters, _ = walk_alone(f"{kind}-py")
    together = clusters.z[..., 0] == clusters.z[..., 1]
    for values in (together, (clusters.counts > 0).sum(-1)):
        values = values - values.mean(dtype=np.float64)
        lag_one = (values[:, 1:] * values[:, :-1]).mean() / (values**2).mean()
        print("correlation at lag one", lag_one)
        assert abs(lag_one) < 0.05, lag_one


def test_statistics_are_those_of_the_assignments():
    clusters, _ = walk_alone("both-py")
    components = read_components()
    collect = jax.jit(jax.vmap(lambda z: rows.collect(components, z, N)))
    expected = collect(jnp.asarray(clusters.z[:, -1]))
    for a, b in zip(jax.tree.leaves(clusters), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a[:, -1], b, rtol=2e-5, atol=2e-5)


def test_together_with_moves_of_rows():
    # A turn after each six moves of rows. False alarm: 0.11 %.
    clusters, record = walk(KINDS["both"], process("py"), row_moves=N, seed=1)
    posterior = exact(TABLE, "py")
    assert_follows(clusters.z, posterior.partitions, posterior.probs)
    assert (record.splits > 0).all() and (record.merges > 0).all()


def test_partial_subsample():
    # Four of six rows are in, others in every chain; rows out stay out. False alarm:
    # 0.11 %.
    clusters, _ = walk(KINDS["both"], process("py"), size=4)
    z = testing.canonical_labels(clusters.z)
    which = z >= 0
    assert (which.sum(-1) == 4).all() and (which == which[:, :1]).all()
    subsets, share = np.unique(which[:, 0], axis=0, return_counts=True)
    states, probs = [], []
    for subset, weight in zip(subsets, share / NUM_CHAINS, strict=True):
        of_subset = np.full((15, N), -1)
        of_subset[:, subset] = testing.set_partitions(4)
        states.append(of_subset)
        log_prior = partial(testing.log_eppf, concentration=0.4, discount=0.35)
        probs.append(weight * posterior_of(log_prior, of_subset))
    assert_follows(z, np.concatenate(states), np.concatenate(probs))


def test_capacity_restricts_the_posterior_and_is_counted():
    # False alarm: 0.11 %.
    posterior = exact(TABLE, "dp", capacity=3)
    clusters, record = walk(KINDS["both"], process("dp"), capacity=3, seed=2)
    assert_follows(clusters.z, posterior.partitions, posterior.probs)
    assert (record.refused > 0).all()


A = np.array([0.5, 1.5, 0.8, 0.3])
STICKS = np.array([[1.0, 0.7, 1.2], [2.0, 1.1, 0.6]])


def log_dirichlet(z):
    # One label after the other.
    seen, total = A.copy(), 0.0
    for k in z:
        total += np.log(seen[k] / seen.sum())
        seen[k] += 1
    return total


def log_sticks(z):
    total = 0.0
    for k, (a, b) in enumerate(STICKS.T):
        here, later = (z == k).sum(), (z > k).sum()
        total += special.betaln(a + here, b + later) - special.betaln(a, b)
    return total


@pytest.mark.parametrize("name", ["dirichlet", "sticks"])
def test_labelled_components(name):
    # All 4^6 assignments, the labels told apart. Cells of small expected counts are
    # pooled. False alarm: 0.11 % each.
    if name == "dirichlet":
        prior, log_prior = (
            DirichletWeights(jnp.asarray(A, jnp.float32), N),
            log_dirichlet,
        )
    else:
        sticks = jnp.asarray(STICKS, jnp.float32)
        prior, log_prior = StickBreakingWeights(*sticks, N), log_sticks
    states = np.stack(np.meshgrid(*[np.arange(4)] * N, indexing="ij"), -1)
    states = states.reshape(-1, N)
    clusters, record = walk(KINDS["both"], prior, capacity=4, seed=5)
    index = clusters.z @ 4 ** np.arange(N)[::-1]
    assert_law(index, posterior_of(log_prior, states))
    assert (record.refused == 0).all()


def test_rarely_tried_proposals_leave_the_posterior():
    # Both kinds have failed for long: fewer proposals. False alarm: 0.11 %.
    failures = (splitmerge._PATIENCE, 2 * splitmerge._PATIENCE)
    often = walk_alone("both-dp")
    rarely = walk(KINDS["both"], process("dp"), failures=failures, seed=6)
    states = testing.set_partitions(N)
    probs = posterior_of(LOG_PRIORS["dp"], states)
    assert_follows(rarely.clusters.z, states, probs)
    assert (rarely.record.failures == failures).all()
    proposals = [
        (w.record.split_proposals + w.record.merge_proposals).sum()
        for w in (often, rarely)
    ]
    assert 0.25 < proposals[1] / proposals[0] < 0.5


# --- many rows ----------------------------------------------------------------

MANY = 20_000


def overlapping():
    rng = np.random.default_rng(0)
    z = (rng.random(MANY) < 0.4).astype(np.int32)
    x = rng.normal(0.8 * z[:, None], 1.0, (MANY, 2)).astype(np.float32)
    return x, z


def normal_model(x, capacity=3):
    z = numpyro.sample("z", PitmanYorProcess(0.7, 0.2, size=len(x)))
    with numpyro.plate("features", 2, dim=-1):
        with numpyro.plate("clusters", capacity, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
            loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.5)))
        with numpyro.plate("rows", len(x), dim=-2):
            numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def log_weights(x, rows):
    """
    Of each row of `x`, in float64: log weight of a cluster of those before it among
    `rows`, which include the first.
    """
    data = np.where(rows[:, None], x, 0.0)
    n = (np.cumsum(rows) - rows)[:, None]
    total, square = (np.cumsum(v, 0) - v for v in (data, data**2))
    kappa, a = 0.5 + n, 2.0 + n / 2
    mean = total / kappa
    b = 1.0 + (square - kappa * mean**2) / 2
    scale2 = b * (kappa + 1) / (a * kappa)
    y = (x - mean) ** 2 / (2 * a * scale2)
    each = (
        special.gammaln(a + 0.5)
        - special.gammaln(a)
        - 0.5 * np.log(2 * np.pi * a * scale2)
        - (a + 0.5) * np.log1p(y)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return each.sum(1) + np.log(n[:, 0] - 0.2)


@pytest.mark.quickly_compiled(False)
def test_ratio_of_a_merge_of_many_rows_is_right_to_rounding():
    # Two clusters of 12,000 and 8,000 rows that overlap. Their log marginal likelihoods
    # are some -60,000 nats, of which float32 has no hundredths.
    x, z = overlapping()
    plan = recognise(normal_model, (x,), {})
    prior, components, *_ = reading.read(plan, normal_model, (x,), {}, {})
    order = np.random.default_rng(1).permutation(MANY).astype(np.int32)
    i, j = (int(np.flatnonzero(z[order] == k)[0]) for k in (0, 1))

    @jax.jit
    def ratio(z):
        clusters = rows.collect(components, z, 3)
        subsample = Subsample(jnp.asarray(order), jnp.int32(MANY))
        yes = jnp.asarray(True)
        proposal = splitmerge._Proposal(
            yes, ~yes, ~yes, *(jnp.int32(v) for v in (0, 1, i, j))
        )
        lists = splitmerge._link(clusters, subsample, yes)
        scene = splitmerge._Scene(prior, components, clusters, subsample, lists)
        side = jnp.zeros(MANY, bool)
        return splitmerge._share_out(
            SplitMerge(), random.key(0), scene, side, proposal
        )[2]

    found = float(ratio(jnp.asarray(z)))
    # The rows i and j first: they are where they are.
    order = np.concatenate([order[[i, j]], np.delete(order, [i, j])])
    data, side = x[order].astype(np.float64), z[order]
    assert side[:2].tolist() == [0, 1]
    apart = np.stack([log_weights(data, side == k) for k in range(2)], 1)
    whole = log_weights(data, np.ones(MANY, bool))
    # The probability of the allocation cancels with that of the data in it.
    each = special.logsumexp(apart[2:], axis=1) - whole[2:]
    expected = new_cluster_log_weight(data[1]) - whole[1] + each.sum()
    print(found, expected)
    assert abs(found - expected) < 0.05


def new_cluster_log_weight(x):
    a, kappa = 2.0, 0.5
    scale2 = 1.0 * (kappa + 1) / (a * kappa)
    each = (
        special.gammaln(a + 0.5)
        - special.gammaln(a)
        - 0.5 * np.log(2 * np.pi * a * scale2)
        - (a + 0.5) * np.log1p(x**2 / (2 * a * scale2))
    )
    # One cluster is there: concentration plus discount.
    return each.sum() + np.log(0.7 + 0.2)


# --- by the kernel ------------------------------------------------------------


@pytest.mark.quickly_compiled
def test_clusters_are_split_and_merged():
    # From four clusters where there are two, which moves of rows alone do not leave,
    # and from one. (By one program for both, which `MCMC` would make twice.)
    x = blobs(400)
    of = np.arange(len(x)) % 2
    starts = {"one": 0 * of, "four": 2 * of + np.arange(len(x)) // 2 % 2}
    clusters = {}
    for split_merge in (SplitMerge(), None):
        kernel = SubsampleAnnealedGibbs(
            partial(mixture, num_clusters=8), split_merge=split_merge
        )

        @jax.jit
        def run(state, kernel=kernel):
            def step(state, _):
                state = kernel.sample(state, (x,), {})
                return state, (state.num_clusters, state.num_splits, state.num_merges)

            return lax.scan(step, state, None, 20)[1]

        for start, z in starts.items():
            given = {"z": jnp.asarray(z, jnp.int32)}
            state = kernel.init(random.key(0), 0, given, (x,), {})
            num_clusters, num_splits, num_merges = map(np.asarray, run(state))
            clusters[start, split_merge is not None] = np.median(num_clusters[10:])
            if split_merge is None:
                assert (num_splits == 0).all()
                assert (num_merges == 0).all()
            else:
                assert num_splits[-1] + num_merges[-1] > 0
                assert (np.diff(num_splits) >= 0).all()
    # Now and then there is a small cluster besides.
    assert 2 <= clusters["one", True] <= 3 and 2 <= clusters["four", True] <= 3
    assert clusters["four", False] == 4


@pytest.mark.quickly_compiled
def test_failures_are_counted_during_the_warmup_only():
    kernel = SubsampleAnnealedGibbs(partial(mixture, num_clusters=8))
    x = blobs(60)
    state = kernel.init(random.key(0), 4, None, (x,), {})
    step = jax.jit(lambda state: kernel.sample(state, (x,), {}))
    seen = []
    for _ in range(10):
        state = step(state)
        record = state.split_merge
        seen.append([*record.failures, record.split_proposals + record.merge_proposals])
    failures, proposals = np.array(seen)[:, :2], np.array(seen)[:, 2]
    assert failures[3].sum() > 0
    assert (failures[3:] == failures[3]).all()
    # They are made after it too, if not in every step.
    assert proposals[-1] > proposals[3]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_sequential": -1}, "`num_sequential` must be a nonnegative integer"),
        ({"num_restricted": 1.5}, "`num_restricted` must be a nonnegative integer"),
        ({"num_scans": True}, "`num_scans` must be a nonnegative integer"),
        ({"num_sequential": 0, "num_restricted": 0}, "split_merge=None"),
        ({"max_share": 0.0}, r"`max_share` must be in \(0, 1\], got 0.0"),
        ({"max_share": 2}, r"`max_share` must be in \(0, 1\], got 2"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        SplitMerge(**options)


def test_kernel_checks_its_argument():
    with pytest.raises(ValueError, match="`split_merge` must be a `SplitMerge`"):
        SubsampleAnnealedGibbs(normal_model, split_merge=5)
