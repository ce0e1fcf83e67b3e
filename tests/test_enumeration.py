# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
The kernel against the exact posterior over all partitions of five or six rows.

The data are noise, so that the posterior is spread over many partitions. Keys are fixed
and nothing is retried; a comment at each test states its false-alarm rate, that is, how
often it would fail for a right sampler if the key were drawn afresh.
"""

from functools import cache, partial
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import (
    AbstractSchedule,
    ChineseRestaurantProcess,
    LinearSchedule,
    PitmanYorProcess,
    PriorGibbs,
    SequentialGibbs,
    SplitMerge,
    SubsampleAnnealedGibbs,
    rows,
    testing,
)
from numpyro_subanneal import reading as reading_
from numpyro_subanneal.plan import recognise
from numpyro_subanneal.schedule import Steps
from numpyro_subanneal.subsample import Subsample

# Half of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled(level=1)

# --- Models -------------------------------------------------------------------

# Hyperparameters of each column; normal ones as mean, kappa, shape, rate.
X_HYPER = (
    np.array([0.5, -1.0]),
    np.array([0.4, 2.0]),
    np.array([3.0, 5.0]),
    np.array([2.0, 3.0]),
)
Y_HYPER = (0.3, 0.25, 4.0, 1.5)
A_CONCENTRATION = np.array([[0.5, 1.5, 0.25], [2.0, 0.3, 1.0]])
B_CONCENTRATION = np.array([0.6, 0.2, 1.2, 0.4, 1.0])


def normal_site(name, x, z, capacity, hyper):
    mean, kappa, shape, rate = (jnp.asarray(h) for h in hyper)
    with numpyro.plate(f"{name}_clusters", capacity, dim=-x.ndim):
        fn = dist.InverseGamma(shape, rate)
        var = numpyro.sample(f"{name}_var", fn.expand((capacity, *x.shape[1:])))
        fn = dist.Normal(mean, jnp.sqrt(var / kappa))
        loc = numpyro.sample(f"{name}_loc", fn)
    with numpyro.plate(f"{name}_rows", len(x), dim=-x.ndim):
        numpyro.sample(name, dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def categorical_site(name, x, z, capacity, concentration):
    with numpyro.plate(f"{name}_clusters", capacity, dim=-x.ndim):
        fn = dist.Dirichlet(jnp.asarray(concentration))
        probs = numpyro.sample(f"{name}_probs", fn.expand((capacity, *x.shape[1:])))
    with numpyro.plate(f"{name}_rows", len(x), dim=-x.ndim):
        numpyro.sample(name, dist.Categorical(probs[z]), obs=x)


def model(data, concentration, discount, capacity=None, dirichlet=False):
    num_rows = len(next(iter(data.values())))
    capacity = num_rows if capacity is None else capacity
    if dirichlet:
        prior = ChineseRestaurantProcess(concentration, size=num_rows)
    else:
        prior = PitmanYorProcess(concentration, discount, size=num_rows)
    z = numpyro.sample("z", prior)
    if "x" in data:
        normal_site("x", data["x"], z, capacity, X_HYPER)
    if "y" in data:
        normal_site("y", data["y"], z, capacity, Y_HYPER)
    if "a" in data:
        categorical_site("a", data["a"], z, capacity, A_CONCENTRATION)
    if "b" in data:
        categorical_site("b", data["b"], z, capacity, B_CONCENTRATION)


def make_table(names, num_rows, seed):
    rng = np.random.default_rng(seed)
    table = {
        "x": rng.normal(size=(num_rows, 2)).astype(np.float32),
        "y": rng.normal(size=num_rows).astype(np.float32),
        "a": rng.integers(3, size=(num_rows, 2)),
        "b": rng.integers(5, size=num_rows),
    }
    return {name: table[name] for name in names}


TABLES = {
    "real": make_table("xy", 5, seed=5),
    "categorical": make_table("ab", 5, seed=6),
    "mixed": make_table("ya", 6, seed=5),
}
# Concentration and discount.
LAWS = {
    "dp": (1.3, 0.0),
    "py": (0.4, 0.35),
    "py-negative": (-0.15, 0.5),
}


def log_marginals(table, rows_of_one):
    total = 0.0
    for name, hyper in (("x", X_HYPER), ("y", Y_HYPER)):
        if name in table:
            x = table[name][rows_of_one].reshape(len(rows_of_one), -1)
            total += testing.normal_log_marginal(x, *hyper)
    for name, concentration in (("a", A_CONCENTRATION), ("b", B_CONCENTRATION[None])):
        if name in table:
            codes = table[name][rows_of_one].reshape(len(rows_of_one), -1)
            total += testing.categorical_log_marginal(codes, concentration)
    return total


@cache
def exact(table, law, capacity=None):
    def log_prior(z):
        if capacity is not None and z.max() >= capacity:
            return -np.inf
        return testing.log_eppf(z, *LAWS[law])

    data = TABLES[table]
    num_rows = len(next(iter(data.values())))
    return testing.enumerate_posterior(
        log_prior, partial(log_marginals, data), num_rows
    )


# --- Runs ---------------------------------------------------------------------

NUM_CHAINS = 300
THINNING = 8  # sweeps; `test_draws_are_nearly_independent` says why
KEPT = 46
DROPPED = 6  # of the kept draws, 48 sweeps, until the start is forgotten

NUM_WARMUP = 3
SCHEDULES = {
    "linear": LinearSchedule(),
    "sequential": SequentialGibbs(),
    "prior": PriorGibbs(),
}
RUNS = [
    ("real", "dp", "linear"),
    ("real", "py-negative", "prior"),
    ("categorical", "dp", "sequential"),
    ("categorical", "py-negative", "linear"),
    ("mixed", "py", "linear"),
    ("mixed", "py", "sequential"),
    ("mixed", "dp", "prior"),
]
# Of one table, the others being sampled by moves of rows alone.
SPLIT_MERGE = {"mixed": SplitMerge()}
parametrize_runs = pytest.mark.parametrize("run", RUNS, ids="-".join)
FIELDS = "log_joint", "num_clusters", "subsample_size", "capacity_reached"


# NB: one program for all runs of a table, as compiling is most of the time: the prior's
# parameters and the number of steps are arguments, and the schedule is in the state.
@cache
def kernel_and_program(table, capacity, dirichlet):
    """The program takes a state so many steps on, and says what is drawn there."""

    def with_data(concentration, discount):
        model(TABLES[table], concentration, discount, capacity, dirichlet)

    # What splits are refused is counted too, so none where the capacity is small.
    split_merge = SPLIT_MERGE.get(table) if capacity is None else None
    kernel = SubsampleAnnealedGibbs(with_data, split_merge=split_merge)

    @jax.jit
    def steps(state, args, num_steps):
        state = lax.fori_loop(
            0, num_steps, lambda i, state: kernel.sample(state, args, {}), state
        )
        return state, (state.z, {name: getattr(state, name) for name in FIELDS})

    return kernel, steps


class Run(NamedTuple):
    draws: dict[str, np.ndarray]  # [chains, draws, ...]
    fields: dict[str, np.ndarray]
    index: np.ndarray  # of the partition, [chains, draws]


@cache
def sampled(table, law, schedule, capacity=None, dirichlet=False):
    kernel, steps = kernel_and_program(table, capacity, dirichlet)
    args = tuple(jnp.float32(p) for p in LAWS[law])
    keys = random.split(random.key(seed_of(table, law, schedule)), NUM_CHAINS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_schedule", SCHEDULES[schedule])
        state = kernel.init(keys, NUM_WARMUP, None, args, {})
    state, _ = steps(state, args, NUM_WARMUP)
    kept = []
    for _ in range(KEPT):
        state, found = steps(state, args, THINNING)
        kept.append(jax.device_get(found))
    draws, fields = jax.tree.map(lambda *v: np.stack(v, 1), *kept[DROPPED:])
    index = testing.partition_index(draws["z"], exact(table, law).partitions)
    return Run(draws, fields, index)


def seed_of(*names):
    """A seed of the run's own, the same in every process."""
    return int.from_bytes(" ".join(names).encode()) % (2**31 - 1)


def assert_law(index, probs):
    """
    Total variation at its Monte Carlo floor, chi-square above 1e-3: a false alarm in
    1.1 of 1,000 right samplers.
    """
    report = testing.goodness_of_fit(np.ravel(index), probs)
    print(report)
    assert report.tv < report.tv_floor + 4 * report.tv_floor_sd, report
    assert report.p_value > 1e-3, report


def assert_mean(values, expected):
    """
    Mean over independent chains (the first axis) against its expectation: within 4.5
    standard errors, a false alarm in 7 of a million for each element.
    """
    values = np.asarray(values, np.float64)
    means = values.mean(1) if values.ndim > 1 else values
    error = means.std(0, ddof=1) / np.sqrt(len(means))
    z = (means.mean(0) - expected) / error
    print("z", z)
    assert np.all(np.abs(z) < 4.5), z


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("law", LAWS)
def test_posterior_is_spread_over_many_partitions(table, law):
    # Not a test of the kernel: on separated clusters those below would show little.
    probs = exact(table, law).probs
    perplexity = np.exp(special.entr(probs).sum())
    assert perplexity > 10 and probs.max() < 0.4, (perplexity, probs.max())


@parametrize_runs
def test_partitions_follow_the_enumerated_posterior(run):
    # False alarm: 0.8 % for the seven runs together.
    table, law, *_ = run
    assert_law(sampled(*run).index, exact(table, law).probs)


@parametrize_runs
def test_draws_are_nearly_independent(run):
    # What the tests of fit suppose. The chains are independent; within a chain the
    # correlation at lag 1 of kept draws is at most 0.01 (standard error 0.009).
    # False alarm: below 1.5 % a statistic, 0.1 % where there is no correlation.
    draws, fields, _ = sampled(*run)
    together = draws["z"][..., 0] == draws["z"][..., 1]
    for values in (together, fields["num_clusters"], fields["log_joint"]):
        values = values - values.mean(dtype=np.float64)
        lag_one = (values[:, 1:] * values[:, :-1]).mean() / (values**2).mean()
        print("correlation at lag one", lag_one)
        assert abs(lag_one) < 0.03, lag_one


@parametrize_runs
def test_log_joint_is_the_oracles_of_the_same_draw(run):
    table, law, *_ = run
    draws, fields, index = sampled(*run)
    expected = exact(table, law).log_joint[index]
    np.testing.assert_allclose(fields["log_joint"], expected, rtol=0, atol=2e-5)
    z = draws["z"]
    np.testing.assert_array_equal(z, testing.canonical_labels(z))
    np.testing.assert_array_equal(fields["num_clusters"], z.max(-1) + 1)
    assert (fields["subsample_size"] == z.shape[-1]).all()


# --- Parameters of the clusters -----------------------------------------------


def normal_posterior(x, mean, kappa, shape, rate):
    """Textbook posterior from power sums, in float64: mean, kappa, shape, rate."""
    n = len(x)
    new_kappa = kappa + n
    new_mean = (kappa * mean + x.sum(0)) / new_kappa
    square = (x**2).sum(0) + kappa * mean**2 - new_kappa * new_mean**2
    return np.stack(
        np.broadcast_arrays(new_mean, new_kappa, shape + n / 2, rate + square / 2)
    )


def by_subset(num_rows, fn):
    """``fn(rows)`` for each of the 2^N subsets of the rows, as bits of a number."""
    subsets = np.arange(2**num_rows)[:, None] >> np.arange(num_rows) & 1
    return np.stack([fn(np.flatnonzero(s)) for s in subsets])


def subset_of(z, capacity):
    """The rows of every cluster, as bits of a number ``[..., capacity]``."""
    member = z[..., None, :] == np.arange(capacity)[:, None]
    return (member << np.arange(z.shape[-1])).sum(-1)


def uniforms(table, draws):
    """
    Cluster parameters through the distribution functions of their exact conditionals
    given the assignments: independent and uniform if the draws are right. A dict of
    ``[chains, draws, clusters]``; and which rows each cluster holds.
    """
    data = TABLES[table]
    z = draws["z"]
    num_rows = z.shape[-1]
    capacity = next(v.shape[2] for k, v in draws.items() if k != "z")
    subset = subset_of(z, capacity)
    out = {}
    for name, hyper in (("x", X_HYPER), ("y", Y_HYPER)):
        if name not in data:
            continue
        columns = data[name].astype(np.float64).reshape(num_rows, -1)
        table_of = by_subset(
            num_rows, lambda r, c=columns, h=hyper: normal_posterior(c[r], *h)
        )
        shape = (*subset.shape, columns.shape[1])
        var = draws[f"{name}_var"].reshape(shape)
        loc = draws[f"{name}_loc"].reshape(shape)
        for d in range(columns.shape[1]):
            mean, kappa, a, b = np.moveaxis(table_of[subset, :, d], -1, 0)
            v = var[..., d]
            out[f"{name}_var{d}"] = stats.invgamma.cdf(v, a, scale=b)
            out[f"{name}_loc{d}"] = stats.norm.cdf(
                loc[..., d], mean, np.sqrt(v / kappa)
            )
    for name, concentration in (("a", A_CONCENTRATION), ("b", B_CONCENTRATION[None])):
        if name not in data:
            continue
        codes = data[name].reshape(num_rows, -1)
        probs = draws[f"{name}_probs"].astype(np.float64)
        probs = probs.reshape(*subset.shape, *concentration.shape)
        for d, prior in enumerate(concentration):
            counts = by_subset(
                num_rows,
                lambda r, c=codes[:, d], p=prior: np.bincount(c[r], minlength=p.size),
            )
            a = counts[subset] + prior
            for c in range(len(prior) - 1):
                # Given the earlier ones, a probability's share of the rest is beta.
                # `p + q` rather than one less the earlier: that would cancel.
                p, q = probs[..., d, c], probs[..., d, c + 1 :].sum(-1)
                b = a[..., c + 1 :].sum(-1)
                p, q = p / (p + q), q / (p + q)
                out[f"{name}_probs{d}{c}"] = np.where(
                    p < 0.5,
                    special.betainc(a[..., c], b, p),
                    1 - special.betainc(b, a[..., c], q),
                )
    return out, subset


@parametrize_runs
def test_cluster_parameters_are_draws_of_their_conditionals(run):
    # The conditional distribution function of each parameter is uniform: Kolmogorov and
    # Smirnov's test at 1e-5, for occupied and empty clusters (draws from the prior)
    # apart. False alarm: seven runs of at most 22 tests, 0.2 %.
    us, subset = uniforms(run[0], sampled(*run).draws)
    for name, u in us.items():
        for where in (subset > 0, subset == 0):
            p = stats.kstest(u[where], "uniform").pvalue
            assert p > 1e-5, (name, p)


@parametrize_runs
def test_cluster_parameters_are_independent_given_the_assignments(run):
    # Correlations of normal scores, between the parameters of a cluster, clusters of a
    # draw, and draws of a chain: z below 5.5. False alarm: 4e-8 a pair, of which a run
    # has up to 200; 1e-4 in all.
    us, _ = uniforms(run[0], sampled(*run).draws)
    scores = {k: special.ndtri(np.clip(u, 1e-9, 1 - 1e-9)) for k, u in us.items()}

    def z(a, b):
        return np.mean(a * b) * np.sqrt(a.size)

    for name, a in scores.items():
        assert abs(z(a[:, 1:], a[:, :-1])) < 5.5, name
        for other, b in scores.items():
            if name < other:
                assert abs(z(a, b)) < 5.5, (name, other)
            assert abs(z(a[..., :-1], b[..., 1:])) < 5.5, (name, other)


@parametrize_runs
def test_parameters_of_a_rows_cluster_follow_the_enumerated_mixture(run):
    # Row 0 is always in cluster 0. Means over chains of the location, its square, the
    # log variance and the probabilities, marginal of the partition: false alarm below
    # 1e-4 in all.
    table, law, *_ = run
    data = TABLES[table]
    draws = sampled(*run).draws
    posterior = exact(table, law)
    for name, hyper in (("x", X_HYPER), ("y", Y_HYPER)):
        if name not in data:
            continue
        x = data[name].astype(np.float64)

        def moments(z, x=x, hyper=hyper):
            mean, kappa, a, b = normal_posterior(x[z == 0], *hyper)
            # loc is Student's t with 2a degrees of freedom.
            return mean, mean**2 + b / (kappa * (a - 1)), np.log(b) - special.psi(a)

        expected = posterior.expectation(lambda z, m=moments: np.stack(m(z)))
        loc = draws[f"{name}_loc"][:, :, 0].astype(np.float64)
        log_var = np.log(draws[f"{name}_var"][:, :, 0])
        assert_mean(loc, expected[0])
        assert_mean(loc**2, expected[1])
        assert_mean(log_var, expected[2])
    for name, concentration in (("a", A_CONCENTRATION), ("b", B_CONCENTRATION)):
        if name not in data:
            continue
        one_hot = np.eye(concentration.shape[-1])[data[name]]

        def mean_probs(z, one_hot=one_hot, concentration=concentration):
            a = concentration + one_hot[z == 0].sum(0)
            return a / a.sum(-1, keepdims=True)

        assert_mean(draws[f"{name}_probs"][:, :, 0], posterior.expectation(mean_probs))


# --- Capacity below the number of rows ----------------------------------------


def test_capacity_restricts_the_posterior_and_is_counted():
    # False alarm: 0.1 % for the law, 1e-5 for the rate.
    posterior = exact("mixed", "dp", capacity=3)
    assert exact("mixed", "dp").probs[posterior.probs == 0].sum() > 0.1
    run = sampled("mixed", "dp", "linear", capacity=3, dirichlet=True)
    assert_law(run.index, posterior.probs)

    # A move could not open a cluster when three are occupied without its row. Moves
    # leave the posterior unchanged, so the rate of that is exact too.
    def rate(z):
        left = [len(set(np.delete(z, i))) for i in range(len(z))]
        return np.mean(np.array(left) == 3)

    reached = run.fields["capacity_reached"]
    moves = (reached.shape[1] - 1) * THINNING * run.draws["z"].shape[-1]
    assert (reached[:, -1] > 0).all()
    assert_mean((reached[:, -1] - reached[:, 0]) / moves, posterior.expectation(rate))


@pytest.mark.parametrize("num_chains", [1, 2])
def test_law_does_not_depend_on_widths_and_chunks(num_chains, monkeypatch):
    # Chunks of 5 moves, compiled for 2, 4 and 6 clusters with no room to spare, so that
    # most sweeps outgrow a width or end a chunk on the way. Few chains, as vectorized
    # ones share a width. False alarm: 0.1 % each.
    def no_more_room(counts):
        used = counts > 0
        last = jnp.max(jnp.where(used, jnp.arange(1, len(counts) + 1), 0))
        return jnp.maximum(last, used.sum() + 1)

    monkeypatch.setattr(rows, "widths", lambda capacity: (2, 4, capacity))
    monkeypatch.setattr(rows, "_CHUNK", 5)
    monkeypatch.setattr(rows, "_room", no_more_room)
    posterior = exact("mixed", "dp")
    sizes = np.bincount(posterior.partitions.max(1), weights=posterior.probs)
    assert (sizes[1:5] > 0.04).all()
    of_table = partial(model, TABLES["mixed"])
    plan = recognise(of_table, LAWS["dp"], {})
    prior, components, *_ = reading_.read(plan, of_table, LAWS["dp"], {}, {})

    def step(carry, _):
        z, order, key = carry
        key, key_now = random.split(key)
        made = rows.run_step(
            key_now,
            lambda values, like: (prior, components),
            (),
            z,
            plan.capacity,
            Subsample(order, jnp.int32(plan.num_rows)),
            jnp.int32(0),
            jnp.int32(THINNING * plan.num_rows),
        )
        z = made.clusters.z
        return (z, made.subsample.order, key), z

    def chain(key):
        z, order = jnp.zeros(plan.num_rows, jnp.int32), jnp.arange(plan.num_rows)
        return lax.scan(step, (z, order, key), length=10_000 // num_chains)[1]

    if num_chains == 1:
        z = jax.jit(chain)(random.key(1))
    else:
        z = jax.jit(jax.vmap(chain))(random.split(random.key(1), num_chains))
        z = z[:, DROPPED:].reshape(-1, plan.num_rows)
    z = np.asarray(z)[DROPPED:]
    assert_law(testing.partition_index(z, posterior.partitions), posterior.probs)


# --- The anneal itself --------------------------------------------------------

# The chain of Obermeyer et al. (2014) on the subsets of five rows and the partitions of
# each is finite: 203 states. Its law after each warm-up step is exact, and the kernel's
# must be the same, at partial subsamples too.

NUM_ANNEALS = 10_000
MOST_WARMUP = 32


class Anneal:
    """Law over partitions of subsets, labels ``[203, N]`` with -1 for out."""

    def __init__(self, table, law):
        self.table, self.law = TABLES[table], LAWS[law]
        self.num_rows = len(next(iter(self.table.values())))
        # A partition of N + 1 rows, less the cluster of the last one, which is out.
        whole = testing.set_partitions(self.num_rows + 1)
        self.states = testing.canonical_labels(
            np.where(whole == whole[:, -1:], -1, whole)[:, :-1]
        )
        self.size = (self.states >= 0).sum(1)
        log_joint = np.array([self._log_joint(z) for z in self.states])
        num = len(self.states)
        add, drop = np.zeros((num, num)), np.zeros((num, num))
        churn = np.zeros((num, num))
        for s, z in enumerate(self.states):
            for row in np.flatnonzero(z == -1):
                # Every cluster and a new one, in proportion to the joint.
                to = [self._put(z, row, k) for k in range(z.max() + 2)]
                weight = special.softmax(log_joint[to])
                add[s, to] += weight / (self.num_rows - self.size[s])
            for row in np.flatnonzero(z >= 0):
                drop[s, self._put(z, row, -1)] += 1 / self.size[s]
        churn = drop @ add
        self.add, self.churn = add, churn

    def _log_joint(self, z):
        clusters = [np.flatnonzero(z == k) for k in range(z.max() + 1)]
        likelihood = sum(log_marginals(self.table, c) for c in clusters)
        return likelihood + (testing.log_eppf(z, *self.law) if clusters else 0.0)

    def _put(self, z, row, k):
        z = z.copy()
        z[row] = k
        return int(testing.partition_index(z, self.states))

    def step(self, law, added, churned):
        """The law after a warm-up step: additions spread evenly, one at the start."""
        total = added + churned
        done = 0
        for move in range(total):
            due = min(added, 1 + move * added // total) if added else 0
            law = law @ (self.add if due > done else self.churn)
            done = due
        return law


@cache
def anneal(table, law):
    return Anneal(table, law)


class Custom(AbstractSchedule):
    """A step that churns a partial subsample only, uneven steps and an idle one."""

    def steps(self, num_rows, num_warmup):
        return Steps(np.array([2, 0, 1, 0, 2]), np.array([1, 4, 3, 0, 5]))


ANNEALS = {
    "linear": (LinearSchedule(), 3),
    "churn": (LinearSchedule(churn=2), 7),
    "sequential": (SequentialGibbs(), 2),
    "prior": (PriorGibbs(), 2),
    "uneven": (Custom(), 5),
}


@cache
def anneal_step():
    """
    One step of many chains, compiled once for every schedule: the schedule travels in
    the state, and one that is shorter than the array begins later in it.
    """
    # The paper's anneal has moves of rows alone.
    kernel = SubsampleAnnealedGibbs(partial(model, TABLES["real"]), split_merge=None)
    args = LAWS["py"]
    keys = random.split(random.key(0), NUM_ANNEALS)
    state = kernel.init(keys, MOST_WARMUP, None, args, {})
    # The data are closed over; the prior's parameters are arguments.
    step = jax.jit(lambda state: kernel.sample(state, args, {}), donate_argnums=0)
    return state, step


def annealed(schedule, num_warmup, seed):
    """States after each of the warm-up steps of `schedule`."""
    start, step = anneal_step()
    num_rows = start.order.shape[-1]
    added, churned = schedule.checked_steps(num_rows, num_warmup)
    first = MOST_WARMUP - num_warmup
    padding = (NUM_ANNEALS, first)

    def padded(values):
        values = np.broadcast_to(values, (NUM_ANNEALS, num_warmup))
        return jnp.asarray(np.hstack([np.zeros(padding, np.int32), values]), jnp.int32)

    state = jax.tree.map(jnp.copy, start)._replace(
        rng_key=random.split(random.key(seed), NUM_ANNEALS),
        i=jnp.full(NUM_ANNEALS, first, jnp.int32),
        added=padded(added),
        churned=padded(churned),
    )
    if schedule.starts_full:
        prior = PitmanYorProcess(*LAWS["py"], size=num_rows)
        z = prior.sample(random.key(seed + 1), (NUM_ANNEALS,))
        state = state._replace(
            z={**state.z, "z": z.astype(jnp.int32)},
            subsample_size=jnp.full(NUM_ANNEALS, num_rows, jnp.int32),
        )
    for _ in range(num_warmup):
        state = step(state)
        yield jax.device_get(state.z["z"]), jax.device_get(state.subsample_size)


@pytest.mark.parametrize("name", ANNEALS)
def test_every_warmup_step_follows_the_papers_chain(name):
    # False alarm: 19 steps, 2 % in all for the laws (the sizes are exact).
    schedule, num_warmup = ANNEALS[name]
    chain = anneal("real", "py")
    num_rows = chain.num_rows
    added, churned = schedule.checked_steps(num_rows, num_warmup)
    if schedule.starts_full:
        full = chain.size == num_rows
        law = np.where(
            full, np.exp([testing.log_eppf(z, *LAWS["py"]) for z in chain.states]), 0
        )
    else:
        law = (chain.size == 0).astype(float)
    size = num_rows if schedule.starts_full else 0
    draws = annealed(schedule, num_warmup, seed=seed_of(name))
    for a, c, (z, sizes) in zip(added, churned, draws, strict=True):
        law = chain.step(law, int(a), int(c))
        size += a
        assert (sizes == size).all() and ((z >= 0).sum(-1) == size).all()
        assert_law(testing.partition_index(z, chain.states), law)
        # The rows that are in are a uniformly random subset.
        subsets = ((z >= 0) << np.arange(num_rows)).sum(-1)
        of_size = [s for s in range(2**num_rows) if s.bit_count() == size]
        counts = np.bincount(subsets, minlength=2**num_rows)[of_size]
        assert counts.sum() == NUM_ANNEALS
        if len(of_size) > 1:
            assert stats.chisquare(counts).pvalue > 1e-3


def test_annealed_draw_nears_the_posterior_as_the_warmup_grows():
    # The law of the first full-data state has a known distance to the posterior. It
    # falls towards zero, and what is measured is within Monte Carlo error of it: false
    # alarm 0.5 % for the laws.
    chain = anneal("real", "py")
    posterior = exact("real", "py")
    at = testing.partition_index(posterior.partitions, chain.states)
    distance, measured = [], []
    for num_warmup in (1, 4, 16, 32):
        schedule = LinearSchedule()
        law = (chain.size == 0).astype(float)
        for a, c in zip(
            *schedule.checked_steps(chain.num_rows, num_warmup), strict=True
        ):
            law = chain.step(law, int(a), int(c))
        *_, (z, _) = annealed(schedule, num_warmup, seed=num_warmup)
        assert_law(testing.partition_index(z, chain.states), law)
        index = testing.partition_index(z, posterior.partitions)
        report = testing.goodness_of_fit(index, posterior.probs)
        distance.append(0.5 * np.abs(law[at] - posterior.probs).sum())
        measured.append(report.tv)
        print(num_warmup, distance[-1], report)
    assert distance == sorted(distance, reverse=True)
    assert measured[0] > measured[1]
    assert distance[0] > 5 * distance[-1]
    assert report.tv < report.tv_floor + distance[-1] + 4 * report.tv_floor_sd
