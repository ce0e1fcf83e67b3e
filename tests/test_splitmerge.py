# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Splits and merges against the exact posterior over all partitions.

Of the moves alone: from a partition they lead to every other, so that a chain of
nothing else has the posterior as its law. Keys are fixed and nothing is retried. (Every
family of pairs, with masked cells, is in `test_pairs`; everything moving at once in
`test_geweke_hyper`.)
"""

from functools import cache, partial
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from test_enumeration import LAWS, TABLES, assert_law, exact, log_marginals, model

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_subanneal import (
    ChineseRestaurantProcess,
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

# Much of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled(level=1)

KINDS = {
    "sequential": SplitMerge(num_sequential=6, num_restricted=0),
    "restricted": SplitMerge(num_sequential=0, num_restricted=6, num_scans=1),
    "no scans": SplitMerge(num_sequential=0, num_restricted=6, num_scans=0),
    "both": SplitMerge(num_sequential=4, num_restricted=2),
}
TABLE = "mixed"
N = 6
NUM_CHAINS, KEPT, DROPPED, THINNING = 200, 68, 8, 10


NAMES = [f"{kind}-{law}" for kind in KINDS for law in LAWS]


@cache
def read_components():
    bound = partial(model, TABLES[TABLE])
    plan = recognise(bound, LAWS["dp"], {})
    return reading.read(plan, bound, LAWS["dp"], {}, {}).components


class Walk(NamedTuple):
    clusters: rows.Clusters  # [chains, draws, ...]
    record: splitmerge.Record  # [chains]


@cache
def program(options, capacity, row_moves, adapting):
    """Chains of turns; after each `THINNING` of them a draw is kept."""
    components = read_components()

    def turn(prior, size, carry, rng_key):
        z, order, record = carry
        key_moves, key_jump = random.split(rng_key)
        subsample = Subsample(order, size)
        jump = partial(split_and_merge, options, adapting=jnp.asarray(adapting))
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
            jump=jump,
            record=record,
        )
        return (made.clusters.z, made.subsample.order, made.record), made.clusters

    def chain(rng_key, prior, size, failures):
        key_order, key_turns = random.split(rng_key)
        order = random.permutation(key_order, N).astype(jnp.int32)
        z = jnp.where(jnp.argsort(order) < size, 0, -1).astype(jnp.int32)
        record = Record.start()._replace(failures=failures)
        keys = random.split(key_turns, (KEPT, THINNING))

        def thinned(carry, keys):
            carry, clusters = lax.scan(partial(turn, prior, size), carry, keys)
            return carry, jax.tree.map(lambda c: c[-1], clusters)

        (*_, record), clusters = lax.scan(thinned, (z, order, record), keys)
        return Walk(clusters, record)

    return jax.jit(jax.vmap(chain, (0, None, None, None)))


def walk(
    options,
    prior,
    capacity=N,
    *,
    size=N,
    row_moves=0,
    failures=(0, 0),
    adapting=False,
    seed=0,
):
    run = program(options, capacity, row_moves, adapting)
    keys = random.split(random.key(seed), NUM_CHAINS)
    walk = run(keys, prior, jnp.int32(size), jnp.array(failures))
    clusters = jax.tree.map(lambda c: np.asarray(c)[:, DROPPED:], walk.clusters)
    return Walk(clusters, jax.tree.map(np.asarray, walk.record))


def process(law):
    return PitmanYorProcess(*(jnp.float32(p) for p in LAWS[law]), size=N)


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
    # False alarm: 0.11 % a case, 1.3 % for all twelve.
    kind, law = name.split("-", 1)
    clusters, record = walk(KINDS[kind], process(law), seed=NAMES.index(name))
    posterior = exact(TABLE, law)
    assert_follows(clusters.z, posterior.partitions, posterior.probs)
    accepted = record.splits.sum() + record.merges.sum()
    proposed = record.split_proposals.sum() + record.merge_proposals.sum()
    assert 0.05 < accepted / proposed < 0.95
    # Every cluster that was split off was merged again, or is there still.
    held = (clusters.counts[:, -1] > 0).sum(1)
    np.testing.assert_array_equal(record.splits - record.merges, held - 1)


def test_draws_are_nearly_independent():
    # What the tests of fit suppose: correlation at lag one of kept draws.
    clusters, _ = walk(KINDS["restricted"], process("py"), seed=NAMES.index(
        "restricted-py"))  # fmt: skip
    for values in (
        clusters.z[..., 0] == clusters.z[..., 1],
        (clusters.counts > 0).sum(-1),
    ):
        values = values - values.mean(dtype=np.float64)
        lag_one = (values[:, 1:] * values[:, :-1]).mean() / (values**2).mean()
        assert abs(lag_one) < 0.03, lag_one


def test_statistics_are_those_of_the_assignments():
    clusters, _ = walk(KINDS["both"], process("py"), seed=NAMES.index("both-py"))
    components = read_components()
    collect = jax.jit(jax.vmap(lambda z: rows.collect(components, z, N)))
    expected = collect(jnp.asarray(clusters.z[:, -1]))
    for a, b in zip(jax.tree.leaves(clusters), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a[:, -1], b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("law", ["dp", "py"])
def test_together_with_moves_of_rows(law):
    # A turn after each six moves of rows. False alarm: 0.11 % each.
    clusters, record = walk(KINDS["both"], process(law), row_moves=N, seed=1)
    posterior = exact(TABLE, law)
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


def mixture_of_finite_mixtures():
    probs = jnp.array([0.3, 0.4, 0.3])
    return MixtureOfFiniteMixtures(1.2, dist.Categorical(probs), N, max_components=3)


def log_finite(z, num_components, concentration=1.2):
    sizes = np.bincount(z[z >= 0])
    if len(sizes) > num_components:
        return -np.inf
    log_ways = special.gammaln(num_components + 1) - special.gammaln(
        num_components - len(sizes) + 1
    )
    whole = num_components * concentration
    log_rising = special.gammaln(whole) - special.gammaln(whole + sizes.sum())
    each = special.gammaln(concentration + sizes) - special.gammaln(concentration)
    return log_ways + log_rising + each.sum()


def test_mixture_of_finite_mixtures():
    # False alarm: 0.11 %.
    def log_prior(z):
        of_each = [log_finite(z, m) for m in (1, 2, 3)]
        return special.logsumexp(of_each, b=[0.3, 0.4, 0.3])

    states = testing.set_partitions(N)
    clusters, record = walk(KINDS["both"], mixture_of_finite_mixtures(), seed=3)
    assert_follows(clusters.z, states, posterior_of(log_prior, states))
    assert (record.refused == 0).all()


def test_finite_mixture():
    # False alarm: 0.11 %.
    states = testing.set_partitions(N)
    clusters, _ = walk(KINDS["both"], FiniteDirichletMixture(1.2, 3, N), seed=4)
    probs = posterior_of(partial(log_finite, num_components=3), states)
    assert_follows(clusters.z, states, probs)


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


def test_rarely_tried_proposals_leave_the_posterior(monkeypatch):
    # Both kinds have failed for long, and proposals of more than two rows are made in
    # proportion only: fewer of them, the same law. False alarm: 0.11 %.
    monkeypatch.setattr(splitmerge, "_ALWAYS", 3)
    options = SplitMerge(num_sequential=12, num_restricted=8, max_share=1e-3)
    failures = (splitmerge._PATIENCE, 2 * splitmerge._PATIENCE)
    clusters, record = walk(options, process("dp"), failures=failures, seed=6)
    posterior = exact(TABLE, "dp")
    assert_follows(clusters.z, posterior.partitions, posterior.probs)
    proposals = record.split_proposals + record.merge_proposals
    assert proposals.mean() < 0.4 * 20 * KEPT * THINNING
    np.testing.assert_array_equal(
        record.failures, np.broadcast_to(failures, (NUM_CHAINS, 2))
    )
