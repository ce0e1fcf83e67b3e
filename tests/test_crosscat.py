# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Cross-categorization against the exact posterior over all partitions of a few features
into views, and of a few rows in every view.

The data are noise, so that the posterior is spread over many states. Keys are fixed and
nothing is retried; a comment at each test states its false-alarm rate.
"""

from collections import namedtuple
from dataclasses import astuple, fields
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    FeatureMoves,
    LinearSchedule,
    PitmanYorProcess,
    PriorGibbs,
    SplitMerge,
    SubsampleAnnealedGibbs,
    columns,
    testing,
)

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled(level=1)

MEAN, KAPPA, SHAPE, RATE = 0.2, 0.4, 2.5, 1.5
CONCENTRATION = np.array([0.6, 1.1, 0.3])


class Table(NamedTuple):
    """Real columns, then categorical ones, and which cells are observed."""

    real: np.ndarray
    codes: np.ndarray
    mask: np.ndarray


def make_table(num_rows, num_real, num_categorical, masked, seed):
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(num_rows, num_real)).astype(np.float32)
    if num_real > 1:
        real[:, 1] = real[:, 0] + 0.4 * real[:, 1]
    codes = rng.integers(3, size=(num_rows, num_categorical))
    mask = np.ones((num_rows, num_real + num_categorical), bool)
    if masked:
        mask = rng.uniform(size=mask.shape) < 0.7
        real[~mask[:, :num_real]] = np.nan
        codes[~mask[:, num_real:]] = -1
    return Table(real, codes, mask)


TABLES = {
    "mixed 4x3": make_table(4, 1, 2, False, 4),
    "mixed 4x3 masked": make_table(4, 1, 2, True, 5),
    "another 4x3 masked": make_table(4, 1, 2, True, 2),
    "real 4x4": make_table(4, 4, 0, False, 6),
    "real 3x3": make_table(3, 3, 0, False, 1),
    "categorical 5x2 masked": make_table(5, 0, 2, True, 2),
}


class Law(NamedTuple):
    """Concentration and discount of the features' partition and of the rows'."""

    of_features: tuple[float, float]
    of_rows: tuple[float, float]


LAWS = {
    "py py": Law((1.1, 0.2), (0.8, 0.3)),
    "dp py": Law((1.4, 0.0), (0.7, 0.4)),
    "py dp": Law((-0.1, 0.6), (1.2, 0.0)),
    "dp dp": Law((1.5, 0.0), (1.0, 0.0)),
}


def model(table, of_features, of_rows, moves, num_views, capacity):
    del moves
    num_rows, num_real = table.real.shape
    num_columns = num_real + table.codes.shape[1]
    view = numpyro.sample("view", PitmanYorProcess(*of_features, size=num_columns))
    with numpyro.plate("views", num_views):
        z = numpyro.sample("z", PitmanYorProcess(*of_rows, size=num_rows))
    if num_real:
        k, d = z[view[:num_real]].T, jnp.arange(num_real)
        with numpyro.plate("real_features", num_real, dim=-1):
            with numpyro.plate("real_clusters", capacity, dim=-2):
                var = numpyro.sample("var", dist.InverseGamma(SHAPE, RATE))
                loc = numpyro.sample("loc", dist.Normal(MEAN, jnp.sqrt(var / KAPPA)))
            with numpyro.plate("real_rows", num_rows, dim=-2):
                with handlers.mask(mask=table.mask[:, :num_real]):
                    fn = dist.Normal(loc[k, d], jnp.sqrt(var[k, d]))
                    numpyro.sample("x", fn, obs=table.real)
    if num_columns > num_real:
        k, d = z[view[num_real:]].T, jnp.arange(num_columns - num_real)
        with numpyro.plate("features", num_columns - num_real, dim=-1):
            with numpyro.plate("clusters", capacity, dim=-2):
                probs = numpyro.sample(
                    "probs", dist.Dirichlet(jnp.asarray(CONCENTRATION))
                )
            with numpyro.plate("rows", num_rows, dim=-2):
                with handlers.mask(mask=table.mask[:, num_real:]):
                    fn = dist.Categorical(probs[k, d])
                    numpyro.sample("a", fn, obs=table.codes)


# --- the exact posterior --------------------------------------------------------------


class Exact(NamedTuple):
    """
    - **views** - every partition of the features ``[partitions, features]``.
    - **rows** - every partition of the rows.
    - **index** - state of (position in `views`, those in `rows` of each view).
    - **probs**, **log_joint** - of each state.
    """

    views: np.ndarray
    rows: np.ndarray
    index: dict[tuple[int, ...], int]
    probs: np.ndarray
    log_joint: np.ndarray


def log_marginal(table, column, rows):
    """Of the observed cells of a column in some rows."""
    num_real = table.real.shape[1]
    rows = rows[table.mask[rows, column]]
    if column < num_real:
        x = table.real[rows, column].astype(float)[:, None]
        return testing.normal_log_marginal(
            x, *(np.array([h]) for h in (MEAN, KAPPA, SHAPE, RATE))
        )
    codes = table.codes[rows, column - num_real][:, None]
    return testing.categorical_log_marginal(codes, CONCENTRATION[None])


@cache
def exact(name, law, num_views, capacity):
    table, (of_features, of_rows) = TABLES[name], LAWS[law]
    num_rows, num_columns = table.mask.shape
    views = testing.set_partitions(num_columns)
    views = views[views.max(1) < num_views]
    rows = testing.set_partitions(num_rows)
    rows = rows[rows.max(1) < capacity]
    fit = np.array(
        [
            [
                sum(
                    log_marginal(table, d, np.flatnonzero(z == k))
                    for k in range(z.max() + 1)
                )
                for z in rows
            ]
            for d in range(num_columns)
        ]
    )
    prior = np.array([testing.log_eppf(z, *of_rows) for z in rows])
    index, log_joint = {}, []
    for i, view in enumerate(views):
        for chosen in product(range(len(rows)), repeat=view.max() + 1):
            index[(i, *chosen)] = len(log_joint)
            log_joint.append(
                testing.log_eppf(view, *of_features)
                + sum(prior[c] for c in chosen)
                + sum(fit[d, chosen[v]] for d, v in enumerate(view))
            )
    log_joint = np.array(log_joint)
    probs = np.exp(log_joint - special.logsumexp(log_joint))
    return Exact(views, rows, index, probs, log_joint)


# --- runs ---------------------------------------------------------------------------

# (The autocorrelation is below 0.02 from three sweeps on, for every run.)
NUM_CHAINS, THINNING, KEPT, DROPPED, NUM_WARMUP = 300, 4, 30, 5, 3
LINEAR = LinearSchedule()
# Table, law, most views, capacity, moves of features, splits and merges, schedule.
RUNS = {
    "all": (
        "mixed 4x3", "py py", 3, 4, FeatureMoves(), SplitMerge(1, 1), LINEAR,
    ),
    "gibbs": (
        "another 4x3 masked", "dp py", 3, 4, FeatureMoves(1, 0, 0, 0), None, LINEAR,
    ),
    "sets": (
        "mixed 4x3 masked", "py dp", 3, 4, FeatureMoves(0, 8, 0, 0), None, LINEAR,
    ),
    "all by the prior": (
        "mixed 4x3 masked", "dp dp", 3, 4, FeatureMoves(2, 2, 1, 1), SplitMerge(1, 1),
        PriorGibbs(),
    ),
    "splits": ("mixed 4x3", "py py", 3, 4, FeatureMoves(0, 0, 0, 3), None, LINEAR),
    "splits and gaps": (
        "mixed 4x3 masked", "py dp", 3, 4, FeatureMoves(0, 0, 0, 3), None, LINEAR,
    ),
    "guided": ("mixed 4x3", "py py", 3, 4, FeatureMoves(0, 0, 3, 0), None, LINEAR),
    "rationed": (
        "mixed 4x3", "py py", 3, 4, FeatureMoves(4, 8, 6, 4), SplitMerge(1, 1), LINEAR,
    ),
    # Fewer views and clusters than there could be. The columns of two views of two
    # cannot part one by one.
    "guided of four": (
        "real 4x4", "dp py", 2, 3, FeatureMoves(0, 0, 3, 0), None, LINEAR,
    ),
    "splits of four": (
        "real 4x4", "py py", 2, 3, FeatureMoves(0, 0, 0, 4), None, LINEAR,
    ),
    "restricted": (
        "real 4x4", "py py", 2, 3, FeatureMoves(1, 2, 2, 2), SplitMerge(1, 0), LINEAR,
    ),
    "all of reals": (
        "real 3x3", "py py", 3, 3, FeatureMoves(1, 2, 2, 1), SplitMerge(1, 1), LINEAR,
    ),
    "all of categories": (
        "categorical 5x2 masked", "dp py", 2, 5, FeatureMoves(1, 4, 2, 2),
        SplitMerge(1, 1), LINEAR,
    ),
}  # fmt: skip
# With how many rows in what is rationed is made at every turn, and how often views and
# elements are chosen without regard to the data, if not as usual.
ALWAYS, BLIND = {"rationed": 1.5}, {"splits of four": 0.7}


class Draws(NamedTuple):
    """Of every chain: the state, and what the kernel says of it."""

    index: np.ndarray
    draws: dict[str, np.ndarray]
    fields: dict[str, np.ndarray]


# The options as arrays.
NUMBERS = {
    kind: namedtuple(kind.__name__, [field.name for field in fields(kind)])
    for kind in (FeatureMoves, SplitMerge)
}


def numbers_of(options):
    return NUMBERS[type(options)](*(jnp.asarray(v) for v in astuple(options)))


class Numbered(SubsampleAnnealedGibbs):
    """How many moves there are is the model's last argument, so that one program, of
    which compiling takes longer than running it, serves all runs of a shape."""

    def sample(self, state, model_args, model_kwargs):
        self._feature_moves, self._split_merge, always, blind = model_args[-1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(columns, "_ALWAYS", always)
            patch.setattr(columns, "_BLIND", blind)
            return super().sample(state, model_args, model_kwargs)


def gibbs(num_sweeps, rng_key, *args):
    """Any number of sweeps, each by itself; so many at once are in `test_columns`."""
    *scene, state, opens = args

    def sweep(i, state):
        return one_gibbs(1, random.fold_in(rng_key, i), *scene, state, opens)

    return lax.fori_loop(0, num_sweeps, sweep, state)


one_gibbs = columns._gibbs


@cache
def kernel_and_program(num_views, capacity, num_real):
    """For all tables of one shape."""
    del num_real  # it is in the table
    bound = partial(model, num_views=num_views, capacity=capacity)
    kernel = Numbered(bound)

    @jax.jit
    def run(state, args):
        def kept(state, num_steps):
            state = lax.fori_loop(
                0, num_steps, lambda i, state: kernel.sample(state, args, {}), state
            )
            fields = {name: getattr(state, name) for name in FIELDS}
            return state, (state.z, fields)

        # A draw after the warm-up, and after each `THINNING` sweeps.
        return lax.scan(kept, state, jnp.array([NUM_WARMUP] + [THINNING] * KEPT))[1]

    return kernel, run


FIELDS = "log_joint", "num_views", "num_clusters", "capacity_reached"


@cache
def sampled(run):
    name, law, num_views, capacity, moves, split_merge, schedule = RUNS[run]
    num_real = TABLES[name].real.shape[1]
    kernel, program = kernel_and_program(num_views, capacity, num_real)
    numbers = [numbers_of(moves), numbers_of(split_merge or SplitMerge(1, 1))]
    if split_merge is None:
        none = jnp.asarray(0)
        numbers[1] = numbers[1]._replace(num_sequential=none, num_restricted=none)
    numbers.append(jnp.float32(ALWAYS.get(run, columns._ALWAYS)))
    numbers.append(jnp.float32(BLIND.get(run, columns._BLIND)))
    of_features, of_rows = jax.tree.map(jnp.float32, LAWS[law])
    args = jax.tree.map(jnp.asarray, TABLES[name]), of_features, of_rows, numbers
    keys = random.split(random.key(list(RUNS).index(run)), NUM_CHAINS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_gibbs", gibbs)
        patch.setattr(kernel, "_schedule", schedule)
        draws, fields = program(kernel.init(keys, NUM_WARMUP, None, args, {}), args)
    # Chains first; what comes at the end of the warm-up is no draw.
    draws, fields = jax.tree.map(
        lambda v: np.asarray(v)[1 + DROPPED :].swapaxes(0, 1), (draws, fields)
    )
    states = exact(name, law, num_views, capacity)
    of_features = testing.partition_index(draws["view"], states.views)
    # A view without features is not in the state.
    z = draws["z"]
    filled = np.where(z < 0, 0, z)
    of_rows = testing.partition_index(filled, states.rows)
    used = draws["view"].max(-1) + 1
    index = np.array(
        [
            states.index[(i, *rows[:num])]
            for i, rows, num in zip(
                of_features.ravel(),
                of_rows.reshape(-1, num_views),
                used.ravel(),
                strict=True,
            )
        ]
    ).reshape(used.shape)
    return Draws(index, draws, fields)


def assert_law(index, probs):
    """A false alarm in 1.1 of 1,000 right samplers."""
    report = testing.goodness_of_fit(np.ravel(index), probs)
    print(report)
    assert report.tv < report.tv_floor + 4 * report.tv_floor_sd, report
    assert report.p_value > 1e-3, report


@pytest.mark.parametrize("run", RUNS)
def test_states_follow_the_enumerated_posterior(run):
    # All states, and the partition of the features alone: of false alarms 2.9 % for the
    # thirteen runs together.
    name, law, num_views, capacity, *_ = RUNS[run]
    states = exact(name, law, num_views, capacity)
    index = sampled(run).index
    assert_law(index, states.probs)
    owner = np.array([key[0] for key in states.index])
    marginal = np.bincount(owner, states.probs)
    assert np.exp(special.entr(marginal).sum()) > 1.5  # it is spread over several
    assert_law(owner[index], marginal)


@pytest.mark.parametrize("run", RUNS)
def test_draws_are_nearly_independent(run):
    # What the tests of fit suppose. The standard error of a correlation is 0.009;
    # false alarm: below 0.1 % each.
    draws, fields = sampled(run).draws, sampled(run).fields
    together = draws["view"][..., 0] == draws["view"][..., 1]
    for values in (together, fields["num_views"], fields["log_joint"]):
        values = values - values.mean(dtype=np.float64)
        lag_one = (values[:, 1:] * values[:, :-1]).mean() / (values**2).mean()
        print("correlation at lag one", lag_one)
        assert abs(lag_one) < 0.04, lag_one


@pytest.mark.parametrize("run", RUNS)
def test_fields_and_labels_are_those_of_the_draw(run):
    name, law, num_views, capacity, *_ = RUNS[run]
    states = exact(name, law, num_views, capacity)
    index, draws, fields = sampled(run)
    np.testing.assert_allclose(
        fields["log_joint"], states.log_joint[index], rtol=0, atol=3e-5
    )
    view, z = draws["view"], draws["z"]
    np.testing.assert_array_equal(view, testing.canonical_labels(view))
    num = view.max(-1) + 1
    np.testing.assert_array_equal(fields["num_views"], num)
    used = np.arange(num_views) < num[..., None]
    assert (z[used] >= 0).all() and (z[~used] == -1).all()
    np.testing.assert_array_equal(z[used], testing.canonical_labels(z[used]))
    np.testing.assert_array_equal(fields["num_clusters"], z.max(-1) + 1)
    if capacity < z.shape[-1]:
        assert (fields["capacity_reached"][:, -1] > 0).all()
    elif num_views == view.shape[-1]:
        assert (fields["capacity_reached"] == 0).all()


@pytest.mark.parametrize("run", ["all", "all by the prior"])
def test_parameters_are_drawn_from_the_clusters_of_the_features_own_view(run):
    # The mean of each parameter of a feature's first cluster, against that of its
    # posterior given the rows there: within 4.5 standard errors of independent chains,
    # a false alarm in 7 of a million for each of at most five features.
    name, *_ = RUNS[run]
    table = TABLES[name]
    draws = sampled(run).draws
    num_real = table.real.shape[1]
    for d in range(table.mask.shape[1]):
        view = draws["view"][..., d]
        z = np.take_along_axis(draws["z"], view[..., None, None], -2)[..., 0, :]
        rows = (z == 0) & table.mask[:, d]
        if d < num_real:
            x = np.where(table.mask[:, d], table.real[:, d], 0)
            num = rows.sum(-1)
            expected = (KAPPA * MEAN + (rows * x).sum(-1)) / (KAPPA + num)
            got = draws["loc"][..., 0, d]
        else:
            ones = (rows & (table.codes[:, d - num_real] == 1)).sum(-1)
            total = CONCENTRATION.sum() + rows.sum(-1)
            expected = (CONCENTRATION[1] + ones) / total
            got = draws["probs"][..., 0, d - num_real, 1]
        gap = (got - expected).mean(1)
        z_score = gap.mean() / (gap.std(ddof=1) / np.sqrt(len(gap)))
        print(d, z_score)
        assert abs(z_score) < 4.5, (d, z_score)


def test_views_of_the_same_data_are_independent():
    # Two fixed views of one column each, which is the same: were the noise of their
    # moves the same too, so would be their partitions. A draw of each of 8,000 chains,
    # of 15 x 15 pairs of partitions. False alarm: 0.11 %.
    x = np.array([-0.8, -0.1, 0.3, 1.1])
    num_rows, num_chains = len(x), 8000

    def two_views(x):
        with numpyro.plate("views", 2):
            prior = ChineseRestaurantProcess(1.3, size=num_rows)
            z = numpyro.sample("z", prior)
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0).expand([num_rows, 2]))
        fn = dist.Normal(loc[z.T, jnp.arange(2)], 0.7)
        numpyro.sample("x", fn, obs=jnp.stack([x, x], 1))

    kernel = SubsampleAnnealedGibbs(two_views, split_merge=None)
    x32 = jnp.asarray(x, jnp.float32)
    keys = random.split(random.key(5), num_chains)
    state = kernel.init(keys, 0, None, (x32,), {})

    @jax.jit
    def sweeps(state):
        return lax.fori_loop(
            0, 12, lambda _, state: kernel.sample(state, (x32,), {}), state
        )

    z = np.asarray(sweeps(state).z["z"])
    partitions = testing.set_partitions(num_rows)
    log_likelihood = [
        sum(
            stats.multivariate_normal.logpdf(
                x[p == k], np.zeros(n), 0.7**2 * np.eye(n) + np.ones((n, n))
            )
            for k in range(p.max() + 1)
            for n in [(p == k).sum()]
        )
        for p in partitions
    ]
    log_prior = testing.log_eppf(partitions, 1.3)
    probs = special.softmax(log_prior + np.array(log_likelihood))
    one, other = (testing.partition_index(z[:, v], partitions) for v in range(2))
    assert_law(one * len(partitions) + other, np.outer(probs, probs).ravel())
