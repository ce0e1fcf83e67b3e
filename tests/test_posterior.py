# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
What is asked of a fit, against enumeration: all partitions of a few rows (and columns)
are the draws, and every answer is a ratio of joint probabilities by the oracles.

Where nothing else is said a test is exact, to float32. Keys are fixed and nothing is
retried; a comment at each statistical test states its false-alarm rate.
"""

from functools import cache, partial
import itertools
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from small_models import finite_log_eppf
from test_pairs import (
    CASES,
    COMPONENTS,
    ROW_SCALE,
    TOTALS,
    VOTES,
    logit,
    mixture_log_eppf,
)

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    FiniteDirichletMixture,
    Grid,
    MixtureOfFiniteMixtures,
    PitmanYorProcess,
    Posterior,
    SubsampleAnnealedGibbs,
    cross_validate,
    testing,
)
from numpyro_subanneal import posterior as posterior_module

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled

# Few clusters compile sooner; that all of them get occupied is warned of.
few_clusters = pytest.mark.filterwarnings(
    "ignore:All . clusters of the model:UserWarning"
)

EXACT = {"rtol": 2e-5, "atol": 2e-5}


def subsets(z):
    """Rows of each cluster of a partition, and of a new one."""
    return [np.flatnonzero(z == k) for k in range(z.max() + 1)] + [np.zeros(0, int)]


# --- pairs of every family ------------------------------------------------------------

# With a location, with parameters by row, of categories and of vectors.
FAMILIES = (
    "NormalInverseGamma",
    "NormalKnownScaleByRow",
    "BetaBinomialByRowLogits",
    "DirichletCategorical",
    "DirichletMultinomial",
)
BY_NAME = {c.pair: c for c in CASES}
# Likelihoods with parameters by row, which are those of the rows asked about.
BY_ROW = {
    "NormalKnownScaleByRow": lambda rows, loc: dist.Normal(loc, ROW_SCALE[rows]),
    "BetaBinomialByRow": lambda rows, p: dist.Binomial(TOTALS[rows], probs=p),
    "BetaBinomialByRowLogits": lambda rows, p: dist.Binomial(
        TOTALS[rows], logits=logit(p)
    ),
    "DirichletMultinomial": lambda rows, p: dist.Multinomial(
        VOTES.sum(-1)[rows], p, total_count_max=9
    ),
}
BY_ROW = {
    name: lambda rows, *theta, fn=fn: fn(np.asarray(rows), *theta)
    for name, fn in BY_ROW.items()
}


def one_of_each(tables, masks, rows):
    # `rows`, a tuple: which rows of the parameters by row.
    z = numpyro.sample("z", PitmanYorProcess(0.5, 0.3, size=len(rows)))
    for name, x in tables.items():
        case = BY_NAME[name]
        with numpyro.plate(f"{name} features", x.shape[1], dim=-1):
            with numpyro.plate(f"{name} clusters", 4, dim=-2):
                theta = case.prior(
                    lambda role, fn, name=name: numpyro.sample(f"{name} {role}", fn)
                )
            with numpyro.plate(f"{name} rows", len(rows), dim=-2):
                with handlers.mask(mask=masks[name]):
                    theta = [t[z] for t in theta]
                    fn = (
                        BY_ROW[name](rows, *theta)
                        if name in BY_ROW
                        else case.likelihood(*theta)
                    )
                    numpyro.sample(name, fn, obs=x)


def rows_of_each(names, rows, seed):
    """Arguments of `one_of_each`; a third of the cells are masked, and rubbish."""
    rng = np.random.default_rng(seed)
    tables, masks = {}, {}
    for name in names:
        x = BY_NAME[name].x
        real = x.dtype.kind == "f"
        x = x[list(rows)].astype(np.float32 if real else np.int32)
        mask = rng.random(x.shape[:2]) < (2 / 3 if seed else 2)
        x[~mask] = np.nan if real else -7
        tables[name], masks[name] = x, mask
    return tables, masks, tuple(rows)


TRAINING, NEW = (0, 1, 2), (4, 3, 1, 0)
THREE = testing.set_partitions(3)


@cache
def of_each(names=FAMILIES):
    return Posterior(one_of_each, {"z": THREE}, rows_of_each(names, TRAINING, 1))


class Cells:
    """Log predictive density of a row of every case, by the oracles."""

    def __init__(self, names):
        self.names = names
        self.tables, self.masks, _ = rows_of_each(names, TRAINING, 1)
        self.log_marginal = cache(self.log_marginal)

    def log_marginal(self, name, d, cluster, new=None):
        """Of the observed cells of training rows `cluster`, and of row `new` (of
        `CASES`)."""
        live = [i for i in cluster if self.masks[name][i, d]]
        index = [TRAINING[i] for i in live] + ([] if new is None else [new])
        index = np.array(index, int)
        return BY_NAME[name].log_marginal(BY_NAME[name].x[index, d], d, index)

    def score(self, name, d, cluster, new):
        return self.log_marginal(name, d, cluster, new) - self.log_marginal(
            name, d, cluster
        )


def by_cluster(z, log_eppf):
    """Log probability that one row more joins each cluster of `z`, or a new one."""
    old = log_eppf(z)
    return np.array([log_eppf(np.append(z, k)) for k in range(z.max() + 2)]) - old


def check_cells_of_each(names):
    posterior, cells = of_each(names), Cells(names)
    new = rows_of_each(names, NEW, 2)
    alone = posterior.log_column_densities(*new)
    given = posterior.log_column_densities(*new, given=list(names))
    eppf = partial(testing.log_eppf, concentration=0.5, discount=0.3)
    columns = [(n, d) for n in names for d in range(cells.tables[n].shape[1])]
    assert posterior.columns == tuple((n, (d,)) for n, d in columns)
    for (i, z), (r, row) in itertools.product(enumerate(THREE), enumerate(NEW)):
        prior = by_cluster(z, eppf)
        scores = {
            (n, d): [cells.score(n, d, tuple(c), row) for c in subsets(z)]
            for n, d in columns
            if new[1][n][r, d]
        }
        whole = prior + sum(map(np.array, scores.values()))
        for n, d in columns:
            if (n, d) not in scores:
                assert np.isnan(alone[n][i, r, d]) and np.isnan(given[n][i, r, d])
                continue
            for got, weights in ((alone, prior), (given, whole - scores[n, d])):
                expected = special.logsumexp(weights + scores[n, d])
                expected -= special.logsumexp(weights)
                # Marginals by quadrature have an error of up to 1e-3.
                np.testing.assert_allclose(
                    got[n][i, r, d], expected, rtol=0, atol=2e-3, err_msg=f"{n} {d}"
                )


def check_own_cells_of_each(names):
    # The mean over draws of one over the density, each draw with the row taken out.
    posterior, cells = of_each(names), Cells(names)
    got = posterior.cell_surprisal()
    eppf = partial(testing.log_eppf, concentration=0.5, discount=0.3)
    columns = [(n, d) for n in names for d in range(cells.tables[n].shape[1])]
    for n in range(3):
        live = [(s, d) for s, d in columns if cells.masks[s][n, d]]
        each = []
        for z in THREE:
            rest = np.delete(np.arange(3), n)
            own = testing.canonical_labels(z[rest])
            clusters = [rest[c] for c in subsets(own)]
            scores = np.array(
                [
                    [cells.score(s, d, tuple(c), TRAINING[n]) for c in clusters]
                    for s, d in live
                ]
            ).reshape(len(live), len(clusters))
            whole = by_cluster(own, eppf) + scores.sum(0)
            each.append(
                special.logsumexp(whole) - special.logsumexp(whole - scores, axis=1)
            )
        expected = special.logsumexp(-np.array(each), axis=0) - np.log(len(THREE))
        for (s, d), value in zip(live, expected, strict=True):
            np.testing.assert_allclose(
                got[s][n, d], value, rtol=0, atol=2e-3, err_msg=f"{s} {d}"
            )
    for s in names:
        np.testing.assert_array_equal(np.isnan(got[s]), ~cells.masks[s])


def test_cells_of_new_rows_have_their_density_for_every_family_of_pairs():
    check_cells_of_each(FAMILIES)


def test_cells_of_the_table_have_their_surprisal_for_every_family_of_pairs():
    check_own_cells_of_each(FAMILIES)


# --- a mixture, all partitions and two values of the hyperparameters ------------------

KAPPA, SHAPE, RATE = 0.4, 2.5, 1.5
URN = np.array([0.6, 1.1, 0.3])
ALPHAS, MEANS = np.array([0.5, 2.0]), np.array([-0.4, 0.7])
nan = np.nan
REAL = np.array([[-0.9, 0.2], [nan, 1.1], [0.4, -1.3], [nan, nan]], np.float32)
CODES = np.array([0, 2, -1, 1])
NEW_REAL = np.array(
    [[0.3, -0.7], [nan, 0.8], [1.6, nan], [nan, nan], [-1.0, 0.1]], np.float32
)
NEW_CODES = np.array([1, 0, 2, -1, -1])
COLUMNS = (("x", (0,)), ("x", (1,)), ("c", ()))


def mixture(real, codes, num_clusters=5):
    alpha = numpyro.sample("alpha", Grid(ALPHAS))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    num_rows = real.shape[0]
    z = numpyro.sample("z", ChineseRestaurantProcess(alpha, size=num_rows))
    with numpyro.plate("clusters", num_clusters):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.asarray(URN)))
    with numpyro.plate("features", 2, dim=-1):
        with numpyro.plate("real_clusters", num_clusters, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(SHAPE, RATE))
            loc = numpyro.sample("loc", dist.Normal(mean, jnp.sqrt(var / KAPPA)))
        with handlers.mask(mask=~jnp.isnan(real)):
            numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=real)
    with numpyro.plate("rows", num_rows), handlers.mask(mask=codes >= 0):
        numpyro.sample("c", dist.Categorical(probs[z]), obs=codes)


def columns_of(real, codes):
    """Cells ``[rows, 3]``, NaN where masked."""
    codes = np.where(codes < 0, np.nan, codes)
    return np.concatenate([np.asarray(real, float), codes[:, None]], 1)


TABLE, NEW_TABLE = columns_of(REAL, CODES), columns_of(NEW_REAL, NEW_CODES)
NUM_ROWS = len(TABLE)


def log_marginal(values, d, h):
    """Of those `values` of a column that are not NaN."""
    values = values[~np.isnan(values)]
    if d == 2:
        return testing.categorical_log_marginal(values.astype(int)[:, None], URN[None])
    return testing.normal_log_marginal(values[:, None], MEANS[h], KAPPA, SHAPE, RATE)


def log_joint(z, table, h):
    return testing.log_eppf(z, ALPHAS[h]) + sum(
        log_marginal(table[z == k, d], d, h)
        for k in range(z.max() + 1)
        for d in (0, 1, 2)
    )


class State(NamedTuple):
    """A partition, and which values of the hyperparameters."""

    z: np.ndarray
    h: int

    def row(self, cells, table=TABLE):
        """Log prior of the clusters that a row more may be in, and log density of each
        of its cells there, ``[clusters]`` and ``[3, clusters]``."""
        prior = by_cluster(
            self.z, partial(testing.log_eppf, concentration=ALPHAS[self.h])
        )
        scores = [
            [
                log_marginal(np.append(table[c, d], x), d, self.h)
                - log_marginal(table[c, d], d, self.h)
                for c in subsets(self.z)
            ]
            for d, x in enumerate(cells)
        ]
        return prior, np.array(scores)

    def without(self, n):
        """The state of the other rows, and their table."""
        z = testing.canonical_labels(np.delete(self.z, n))
        return State(z, self.h), np.delete(TABLE, n, 0)


STATES = [State(z, h) for h in (0, 1) for z in testing.set_partitions(NUM_ROWS)]
LOG_JOINT = np.array([log_joint(s.z, TABLE, s.h) for s in STATES])
PROBS = special.softmax(LOG_JOINT)
NUM_DRAWS = 400
# Every state, as often as it is probable, as far as whole numbers go; at least once.
TIMES = np.maximum(1, np.round(PROBS * NUM_DRAWS).astype(int))
TIMES[TIMES.argmax()] += NUM_DRAWS - TIMES.sum()
OF_DRAW = np.random.default_rng(0).permutation(np.repeat(np.arange(len(STATES)), TIMES))
SHARE = TIMES / NUM_DRAWS


def draws_of(index):
    return {
        "z": np.stack([STATES[i].z for i in index]),
        "alpha": ALPHAS[[STATES[i].h for i in index]].astype(np.float32),
        "mean": MEANS[[STATES[i].h for i in index]].astype(np.float32),
    }


@cache
def fitted():
    return Posterior(mixture, draws_of(OF_DRAW), (REAL, CODES))


@cache
def exact_rows():
    """Of every state and new row, see `State.row`."""
    return [[s.row(cells) for cells in NEW_TABLE] for s in STATES]


def exact_log_density(columns, given):
    """``[states, rows]``."""
    both, given = sorted({*columns, *given}), list(given)
    return np.array(
        [
            [
                special.logsumexp(prior + scores[both].sum(0))
                - special.logsumexp(prior + scores[given].sum(0))
                for prior, scores in of_state
            ]
            for of_state in exact_rows()
        ]
    )


def mean_of_draws(log_values):
    """Log mean over draws of what is given for every state."""
    return special.logsumexp(log_values, axis=0, b=SHARE[:, None])


SELECTIONS = {
    "all": (None, None, (0, 1, 2), ()),
    "one site": ("c", None, (2,), ()),
    "one column": ({"x": 1}, None, (1,), ()),
    "of a list given another": (["c"], {"x": [0, 1]}, (2,), (0, 1)),
    "several given one": ({"x": [False, True], "c": True}, {"x": -2}, (1, 2), (0,)),
    "given themselves": ("x", ["x", "c"], (0, 1), (0, 1, 2)),
    "nothing": ([], None, (), ()),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_log_density_is_a_ratio_of_joint_probabilities(name):
    columns, given, of, on = SELECTIONS[name]
    expected = exact_log_density(of, on)
    args = NEW_REAL, NEW_CODES
    got = fitted().log_density(*args, columns=columns, given=given)
    np.testing.assert_allclose(got, expected[OF_DRAW], **EXACT)
    # Averaged: each draw counts as much as it makes what is given probable.
    expected = mean_of_draws(exact_log_density((*of, *on), ()))
    expected = expected - mean_of_draws(exact_log_density(on, ()))
    got = fitted().log_predictive(*args, columns=columns, given=given)
    np.testing.assert_allclose(got, expected, **EXACT)


def test_log_predictive_is_that_of_the_table_with_a_row_more():
    # Draws are as frequent as probable to half of one in 400 for each of 30 states.
    got = fitted().log_predictive(NEW_REAL, NEW_CODES)
    for cells, value in zip(NEW_TABLE, got, strict=True):
        table = np.concatenate([TABLE, cells[None]])
        partitions = testing.set_partitions(NUM_ROWS + 1)
        more = [log_joint(z, table, h) for h in (0, 1) for z in partitions]
        expected = special.logsumexp(more) - special.logsumexp(LOG_JOINT)
        assert abs(value - expected) < 0.02, (value, expected)


@pytest.mark.parametrize("given", [(), (0, 1, 2), (0, 2)])
def test_density_of_each_cell_given_others(given):
    masked = np.isnan(NEW_TABLE)
    expected = np.stack(
        [exact_log_density((d,), [g for g in given if g != d]) for d in range(3)], -1
    )
    expected[:, masked] = np.nan
    asked = {"x": [d for d in given if d < 2]} | ({"c": True} if 2 in given else {})
    got = fitted().log_column_densities(NEW_REAL, NEW_CODES, given=asked)
    np.testing.assert_allclose(got["x"], expected[OF_DRAW][..., :2], **EXACT)
    np.testing.assert_allclose(got["c"], expected[OF_DRAW][..., 2], **EXACT)


@pytest.mark.parametrize(
    "given, known", [(None, [0, 1, 2]), ([], []), ({"x": 0}, [0])], ids=str
)
def test_membership_has_the_labels_of_the_draw_and_a_new_cluster_last(given, known):
    got = fitted().membership(NEW_REAL, NEW_CODES, given=given)
    # Of the largest label of any draw and a new one.
    assert got.shape == (NUM_DRAWS, len(NEW_TABLE), NUM_ROWS + 1)
    expected = np.zeros((len(STATES), len(NEW_TABLE), NUM_ROWS + 1))
    for i, of_state in enumerate(exact_rows()):
        for r, (prior, scores) in enumerate(of_state):
            *old, new = special.softmax(prior + scores[known].sum(0))
            expected[i, r, : len(old)] = old
            expected[i, r, -1] = new
    np.testing.assert_allclose(got, expected[OF_DRAW], **EXACT)


def test_membership_of_labels_with_gaps():
    z = np.array([[3, 0, 3, 1]])
    draws = {**draws_of([0]), "z": z}
    got = Posterior(mixture, draws, (REAL, CODES)).membership(NEW_REAL, NEW_CODES)
    same = State(testing.canonical_labels(z[0]), STATES[0].h)
    for r, cells in enumerate(NEW_TABLE):
        prior, scores = same.row(cells)
        a, b, c, new = special.softmax(prior + scores.sum(0))
        np.testing.assert_allclose(got[0, r], [b, c, 0, a, new], **EXACT)


# --- rows of the table ----------------------------------------------------------------


@cache
def exact_own():
    """Of every state and row, the row taken out."""
    out = []
    for s in STATES:
        rest = [s.without(n) for n in range(NUM_ROWS)]
        out.append(
            [t.row(cells, table) for (t, table), cells in zip(rest, TABLE, strict=True)]
        )
    return out


def log_without(n, d=None):
    """Log joint probability of all but a row, or a cell."""
    if d is None:
        table, num_rows = np.delete(TABLE, n, 0), NUM_ROWS - 1
    else:
        table, num_rows = TABLE.copy(), NUM_ROWS
        table[n, d] = np.nan
    return special.logsumexp(
        [
            log_joint(z, table, h)
            for h in (0, 1)
            for z in testing.set_partitions(num_rows)
        ]
    )


def test_a_row_of_the_table_is_scored_without_itself():
    expected = np.array(
        [
            [special.logsumexp(prior + scores.sum(0)) for prior, scores in of_state]
            for of_state in exact_own()
        ]
    )
    got = fitted().log_likelihood()
    np.testing.assert_allclose(got, expected[OF_DRAW], **EXACT)
    # The weights of draws are right: with exact ones, this is the density given the
    # other rows.
    left_out = [special.logsumexp(LOG_JOINT) - log_without(n) for n in range(NUM_ROWS)]
    identity = -special.logsumexp(-expected, axis=0, b=PROBS[:, None])
    np.testing.assert_allclose(identity, left_out, rtol=1e-9, atol=1e-12)
    got = fitted().surprisal()
    np.testing.assert_allclose(got, mean_of_draws(-expected), **EXACT)
    np.testing.assert_allclose(-got, left_out, rtol=0, atol=0.02)


def test_a_cell_of_the_table_is_scored_without_itself():
    each = np.array(
        [
            [
                special.logsumexp(prior + scores.sum(0))
                - special.logsumexp(prior + scores.sum(0) - scores, axis=1)
                for prior, scores in of_state
            ]
            for of_state in exact_own()
        ]
    )
    whole = special.logsumexp(LOG_JOINT)
    left_out = np.array(
        [[whole - log_without(n, d) for d in range(3)] for n in range(NUM_ROWS)]
    )
    share, probs = SHARE[:, None, None], PROBS[:, None, None]
    identity = -special.logsumexp(-each, axis=0, b=probs)
    np.testing.assert_allclose(identity, left_out, rtol=1e-9, atol=1e-12)
    expected = special.logsumexp(-each, axis=0, b=share)
    expected[np.isnan(TABLE)] = np.nan
    got = fitted().cell_surprisal()
    np.testing.assert_allclose(got["x"], expected[:, :2], **EXACT)
    np.testing.assert_allclose(got["c"], expected[:, 2], **EXACT)
    np.testing.assert_allclose(
        got["x"], np.where(np.isnan(REAL), np.nan, -left_out[:, :2]), rtol=0, atol=0.02
    )


# --- draws of cells -------------------------------------------------------------------


def student(values, h):
    """Distribution of a real cell given others of its cluster (Murphy, 2007, Eq.
    100)."""
    values = values[~np.isnan(values)].astype(float)
    n, mean = len(values), MEANS[h]
    total = KAPPA + n
    centre = (KAPPA * mean + values.sum()) / total
    rate = RATE
    if n:
        rate += 0.5 * ((values - values.mean()) ** 2).sum()
        rate += 0.5 * KAPPA * n * (values.mean() - mean) ** 2 / total
    shape = SHAPE + n / 2
    return stats.t(2 * shape, centre, np.sqrt(rate * (total + 1) / (shape * total)))


def log_pdf(cluster, d, h, x):
    """Log density of real cells or of categories `x` in a cluster, one by one."""
    values = TABLE[cluster, d]
    if d < 2:
        return student(values, h).logpdf(x)
    weight = URN + (values[:, None] == np.arange(3)).sum(0)
    return np.log(weight / weight.sum())[list(x)]


def assert_uniform(u, level):
    p = stats.kstest(np.ravel(u), "uniform").pvalue
    print("p", p)
    assert p > level, p


def assert_categories(codes, probs, level):
    """Codes, each of its own probabilities ``[..., C]``: Hotelling's chi-square."""
    probs = probs.reshape(-1, probs.shape[-1])
    gap = ((np.ravel(codes)[:, None] == np.arange(probs.shape[1])) - probs)[:, 1:]
    cov = -(probs[:, 1:, None] * probs[:, None, 1:]).sum(0)
    cov = cov + np.diag(probs[:, 1:].sum(0))
    total = gap.sum(0)
    p = stats.chi2.sf(total @ np.linalg.solve(cov, total), len(total))
    print("p", p)
    assert p > level, p


def test_sampled_rows_follow_the_conditional_distribution():
    # Of rows with their first cell known: the second by its distribution function, the
    # category given both. False alarm: 1e-4 each.
    num = 60
    real = np.repeat(np.array([[0.3, nan]], np.float32), num, 0)
    codes = np.full(num, 1)
    draws = fitted().sample_rows(random.key(3), real, codes, given=["x"])
    assert draws["x"].shape == (NUM_DRAWS, num, 2)
    assert draws["c"].shape == (NUM_DRAWS, num)
    assert (draws["x"][..., 0] == real[:, 0]).all()
    u = np.zeros((NUM_DRAWS, num))
    probs = np.zeros((NUM_DRAWS, num, 3))
    for i, s in enumerate(STATES):
        x = draws["x"][OF_DRAW == i][..., 1].astype(float)
        prior, scores = s.row([0.3, nan, nan])
        weights = prior + scores[0]
        of_cluster = special.softmax(weights)
        u[OF_DRAW == i] = sum(
            w * student(TABLE[c, 1], s.h).cdf(x)
            for w, c in zip(of_cluster, subsets(s.z), strict=True)
        )
        log_x = np.stack([log_pdf(c, 1, s.h, x.ravel()) for c in subsets(s.z)], -1)
        given = special.softmax(weights + log_x, axis=-1)
        table = [np.exp(log_pdf(c, 2, s.h, range(3))) for c in subsets(s.z)]
        probs[OF_DRAW == i] = (given @ np.array(table)).reshape(*x.shape, 3)
    assert_uniform(u, 1e-4)
    assert_categories(draws["c"], probs, 1e-4)


@cache
def imputed():
    return fitted().impute(random.key(4))


def test_imputed_cells_follow_the_distribution_of_their_cluster():
    # Each cell of each draw, by its distribution function. False alarm: 1e-4 each.
    found = imputed()
    assert list(found) == ["x", "c"]
    x, c = found["x"], found["c"]
    np.testing.assert_array_equal(x.index, [[1, 0], [3, 0], [3, 1]])
    np.testing.assert_array_equal(c.index, [[2]])
    assert x.draws.shape == (NUM_DRAWS, 3) and c.draws.shape == (NUM_DRAWS, 1)
    u, probs = np.zeros(x.draws.shape), np.zeros((NUM_DRAWS, 3))
    for i, s in enumerate(STATES):
        of = OF_DRAW == i
        for j, (n, d) in enumerate(x.index):
            own = TABLE[s.z == s.z[n], d]
            u[of, j] = student(own, s.h).cdf(x.draws[of, j].astype(float))
        own = np.flatnonzero(s.z == s.z[2])
        probs[of] = np.exp(log_pdf(own, 2, s.h, range(3)))
    for j in range(3):
        assert_uniform(u[:, j], 1e-4)
    assert_categories(c.draws, probs, 1e-4)


def test_imputed_points_are_means_and_modes():
    x, c = imputed()["x"], imputed()["c"]
    np.testing.assert_allclose(x.point, x.draws.mean(0, dtype=float), rtol=1e-12)
    np.testing.assert_allclose(x.uncertainty, x.draws.std(0, dtype=float), rtol=1e-12)
    counts = np.bincount(c.draws[:, 0], minlength=3)
    assert c.point == [counts.argmax()]
    np.testing.assert_allclose(c.uncertainty, [1 - counts.max() / NUM_DRAWS])


def test_nothing_is_imputed_where_nothing_is_masked():
    assert one_state(REAL[[0, 2]], CODES[[0, 1]]).impute(random.key(0)) == {}


def one_state(real, codes):
    draws = {"z": [[0] * len(real)], "alpha": ALPHAS[:1], "mean": MEANS[:1]}
    return Posterior(mixture, draws, (real, codes))


# --- mutual information ---------------------------------------------------------------


def exact_information(s):
    """Of the pairs of columns, on grids of quantiles of wide tails."""
    u = np.linspace(-5.5, 5.5, 161)
    x, dx = np.sinh(u), np.cosh(u) * (u[1] - u[0])
    prior, _ = s.row([nan] * 3)
    weights = np.exp(prior)
    pdf = [
        np.exp(np.stack([log_pdf(c, d, s.h, v) for c in subsets(s.z)]))
        for d, v in ((0, x), (1, x), (2, range(3)))
    ]
    step = [dx, dx, np.ones(3)]
    out = np.full((3, 3), nan)
    for a, b in itertools.combinations(range(3), 2):
        joint = np.einsum("k,ki,kj->ij", weights, pdf[a], pdf[b])
        apart = np.outer(weights @ pdf[a], weights @ pdf[b])
        out[a, b] = step[a] @ (joint * np.log(joint / apart)) @ step[b]
        out[b, a] = out[a, b]
    return out


def test_mutual_information_is_the_integral():
    # Within 4.5 errors for each of three pairs (false alarm: 2e-5 together; the spread
    # over draws is in the error but not in this deviation, so less). Keys differ by
    # less than the error says.
    each = np.array([exact_information(s) for s in STATES])
    expected = np.einsum("s,sij->ij", SHARE, each)
    found = fitted().mutual_information(random.key(5), num_samples=60)
    z = (found.value - expected) / found.error
    print(z)
    pairs = np.triu_indices(3, 1)
    assert (np.abs(z[pairs]) < 4.5).all(), z
    np.testing.assert_allclose(found.value, found.value.T, rtol=1e-6)
    assert np.isnan(np.diag(found.value)).all() and np.isnan(np.diag(found.error)).all()
    # Of spread over draws the part that is exact.
    spread = np.sqrt(np.einsum("s,sij->ij", SHARE, (each - expected) ** 2))[pairs]
    assert (found.error[pairs] * np.sqrt(NUM_DRAWS) > 0.8 * spread).all()
    assert (found.error[pairs] < 0.05).all()


# --- keys, chains, precision ----------------------------------------------------------


def test_keys_and_chains():
    again = fitted().impute(random.key(4))
    np.testing.assert_array_equal(again["x"].draws, imputed()["x"].draws)
    other = fitted().impute(random.key(5))
    assert (other["x"].draws != imputed()["x"].draws).mean() > 0.99
    old = fitted().impute(random.PRNGKey(4))
    np.testing.assert_array_equal(old["x"].draws, imputed()["x"].draws)
    grouped = draws_of(OF_DRAW)
    grouped = {
        k: v.reshape(4, NUM_DRAWS // 4, *v.shape[1:]) for k, v in grouped.items()
    }
    chains = Posterior(mixture, grouped, (REAL,), {"codes": CODES})
    assert (chains.num_chains, fitted().num_chains) == (4, 1)
    assert chains.num_draws == fitted().num_draws == NUM_DRAWS
    np.testing.assert_array_equal(chains.partition(), fitted().partition())
    np.testing.assert_array_equal(chains.num_clusters, grouped["z"].max(-1).ravel() + 1)
    again = chains.impute(random.key(4))
    np.testing.assert_array_equal(again["x"].draws, imputed()["x"].draws)


def test_in_double_precision():
    with jax.enable_x64(True):
        posterior = Posterior(mixture, draws_of(range(len(STATES))), (REAL, CODES))
        got = posterior.log_density(NEW_REAL.astype(float), NEW_CODES)
    expected = exact_log_density((0, 1, 2), ())
    # (The hyperparameters, data of the draws, were in float32.)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


# --- draws of every family of pairs ---------------------------------------------------


NUM_SAMPLED = 400


def check_draws_of_each(names):
    # With rows x of draw A and y of draw B, of densities p and q: the means of
    # q(x) / (p(x) + q(x)) and of p(y) / (p(y) + q(y)) are the same integral. Within 4.5
    # standard errors: false alarm 7e-6 a column.
    posterior = Posterior(
        one_of_each, {"z": THREE[[0, -1]]}, rows_of_each(names, TRAINING, 1)
    )
    rows = (4, 3) * (NUM_SAMPLED // 2)
    tables, masks, _ = rows_of_each(names, rows, 0)
    drawn = posterior.sample_rows(random.key(7), tables, masks, rows, given=[])
    shares = []
    for i in range(2):
        table = {n: x[i] for n, x in drawn.items()}
        log_p = posterior.log_column_densities(table, masks, rows)
        shares.append({n: special.expit(x[1 - i] - x[i]) for n, x in log_p.items()})
    for n in names:
        a, b = (s[n].astype(float) for s in shares)
        gap = a.mean(0) - b.mean(0)
        z = gap / np.sqrt((a.var(0) + b.var(0)) / NUM_SAMPLED)
        print(n, z)
        assert (np.abs(z) < 4.5).all(), (n, z)
        assert (a.std(0) > 0.01).any(), n  # The draws differ.


def test_draws_have_the_density_that_is_said_for_pairs_of_several_families():
    check_draws_of_each(("NormalKnownScaleByRow", "DirichletMultinomial"))


# --- priors of the partition ----------------------------------------------------------

X3 = np.array([[-1.1], [0.3], [0.9]])
WEIGHTS = np.array([0.5, 1.0, 2.5])
PROBS_OF_LABELS = np.array([0.2, 0.5, 0.3])


def of_dirichlet(num_rows):
    del num_rows
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.asarray(WEIGHTS)))
    return dist.Categorical(weights)


def of_sticks(num_rows):
    del num_rows
    with numpyro.plate("sticks", 2):
        v = numpyro.sample("v", dist.Beta(1, 1.5))
    whole = jnp.pad(v, (0, 1), constant_values=1)
    left = jnp.pad(jnp.cumprod(1 - v), (1, 0), constant_values=1)
    return dist.Categorical(whole * left)


def log_labels(name, z):
    """Log probability of a vector of labels."""
    counts = np.bincount(z, minlength=3)
    if name == "known weights":
        return np.log(PROBS_OF_LABELS[z]).sum()
    if name == "Dirichlet weights":
        return (special.gammaln(WEIGHTS + counts) - special.gammaln(WEIGHTS)).sum() - (
            special.gammaln(4.0 + len(z)) - special.gammaln(4.0)
        )
    later = [counts[1] + counts[2], counts[2]]
    return sum(
        special.betaln(1 + n, 1.5 + m) - special.betaln(1, 1.5)
        for n, m in zip(counts, later, strict=False)
    )


def sizes(z):
    return np.bincount(z).tolist()


# The prior's site, log probability of labels, and whether these have names.
PRIORS = {
    "Dirichlet process": (
        lambda n: ChineseRestaurantProcess(1.3, size=n),
        lambda z: testing.log_eppf(z, 1.3),
        False,
    ),
    "Pitman-Yor, negative": (
        lambda n: PitmanYorProcess(-0.1, 0.6, size=n),
        lambda z: testing.log_eppf(z, -0.1, 0.6),
        False,
    ),
    "finite": (
        lambda n: FiniteDirichletMixture(0.8, 3, size=n),
        lambda z: finite_log_eppf(sizes(z), 0.8, 3),
        False,
    ),
    "mixture of finite": (
        lambda n: MixtureOfFiniteMixtures(
            1.2, dist.Categorical(jnp.array(COMPONENTS)), n, max_components=4
        ),
        lambda z: mixture_log_eppf(sizes(z), 1.2, COMPONENTS),
        False,
    ),
    "Dirichlet weights": (of_dirichlet, partial(log_labels, "Dirichlet weights"), True),
    "sticks": (of_sticks, partial(log_labels, "sticks"), True),
    "known weights": (
        lambda n: dist.Categorical(jnp.asarray(PROBS_OF_LABELS)),
        partial(log_labels, "known weights"),
        True,
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_rows_more_and_rows_less_under_every_prior(name):
    prior, log_prior, labelled = PRIORS[name]

    def model(x):
        fn = prior(len(x))
        with numpyro.plate("clusters", 3):
            loc = numpyro.sample("loc", dist.Normal(0.2, 1.5))
        if labelled:
            with numpyro.plate("rows", len(x)):
                z = numpyro.sample("z", fn)
                numpyro.sample("x", dist.Normal(loc[z], 0.7), obs=x)
        else:
            z = numpyro.sample("z", fn)
            numpyro.sample("x", dist.Normal(loc[z], 0.7), obs=x)

    def density(x):
        if len(x) == 0:
            return 0.0
        cov = 0.49 * np.eye(len(x)) + 1.5**2
        return stats.multivariate_normal.logpdf(x, np.full(len(x), 0.2), cov)

    x, new = X3[:, 0].astype(np.float32), np.array([0.5, -1.7], np.float32)
    draws = np.array([[2, 2, 0], [1, 1, 1], [0, 2, 1]]) if labelled else THREE
    posterior = Posterior(model, {"z": draws}, (x,))
    of_row = posterior.membership(new)
    own = posterior.log_likelihood()
    num_slots = 3 if labelled else 4

    def weights(z, x, value):
        # Of a row more in each slot, and in the last a new cluster.
        found = np.full(num_slots, -np.inf)
        slots = range(3) if labelled else range(z.max() + 2)
        for k in slots:
            with np.errstate(divide="ignore"):
                ratio = log_prior(np.append(z, k)) - log_prior(z)
            is_new = not labelled and k == z.max() + 1
            found[-1 if is_new else k] = (
                ratio + density(np.append(x[z == k], value)) - density(x[z == k])
            )
        return found

    for i, z in enumerate(draws):
        for r, value in enumerate(new):
            expected = special.softmax(weights(z, x, value))
            np.testing.assert_allclose(of_row[i, r], expected, **EXACT)
        for n in range(3):
            rest = np.delete(z, n)
            if not labelled:
                rest = testing.canonical_labels(rest)
            expected = special.logsumexp(weights(rest, np.delete(x, n), x[n]))
            np.testing.assert_allclose(own[i, n], expected, **EXACT)


# --- columns in views -----------------------------------------------------------------

VIEW_LAW, ROW_LAW = (1.1, 0.2), (-0.1, 0.6)
VIEWED = np.array([[0, 0.4, 2], [1, nan, 2], [1, -1.2, nan]])
NEW_VIEWED = np.array([[1, 0.1, 0], [nan, 1.5, 2], [2, nan, nan]])
LOC0, SCALE0, SCALE = 0.2, 1.3, 0.6


def crosscat(table, num_views=3):
    # Columns are not in the order of the sites: 'a' has the last and the first.
    num_rows = table.shape[0]
    view = numpyro.sample("view", PitmanYorProcess(*VIEW_LAW, size=3))
    with numpyro.plate("views", num_views):
        z = numpyro.sample("z", PitmanYorProcess(*ROW_LAW, size=num_rows))
    live = ~jnp.isnan(table)
    with numpyro.plate("clusters", 3):
        loc = numpyro.sample("loc", dist.Normal(LOC0, SCALE0))
    with numpyro.plate("rows", num_rows), handlers.mask(mask=live[:, 1]):
        numpyro.sample("x", dist.Normal(loc[z[view[1]]], SCALE), obs=table[:, 1])
    order = np.array([2, 0])
    k = z[view[order]].T
    codes = jnp.where(live, table, -1)[:, order].astype(int)
    with numpyro.plate("features", 2, dim=-1):
        with numpyro.plate("code_clusters", 3, dim=-2):
            probs = numpyro.sample("probs", dist.Dirichlet(jnp.asarray(URN)))
        with handlers.mask(mask=live[:, order]):
            fn = dist.Categorical(probs[k, jnp.arange(2)])
            numpyro.sample("a", fn, obs=codes)


def log_marginal_viewed(values, d):
    """Of a real column (1), or one of categories; NaN is masked."""
    return _log_marginal_viewed(tuple(np.sort(values[~np.isnan(values)])), d == 1)


@cache
def _log_marginal_viewed(values, real):
    if not real:
        codes = np.array(values, int)[:, None]
        return testing.categorical_log_marginal(codes, URN[None])
    if len(values) == 0:
        return 0.0
    cov = SCALE**2 * np.eye(len(values)) + SCALE0**2
    return stats.multivariate_normal.logpdf(values, np.full(len(values), LOC0), cov)


@cache
def prior_of_clusters(z):
    law = partial(testing.log_eppf, concentration=ROW_LAW[0], discount=ROW_LAW[1])
    return by_cluster(np.array(z), law)


def viewed_states():
    """Every partition of the columns, with one of the rows in each of its views;
    others read -1."""
    views, z = [], []
    for view in testing.set_partitions(3):
        for chosen in itertools.product(range(5), repeat=view.max() + 1):
            rows = np.full((3, 3), -1)
            rows[: len(chosen)] = THREE[list(chosen)]
            views.append(view)
            z.append(rows)
    return np.array(views), np.array(z)


VIEW, ROWS_OF_VIEW = viewed_states()


@cache
def in_views():
    return Posterior(crosscat, {"view": VIEW, "z": ROWS_OF_VIEW}, (VIEWED,))


def of_view(view, z, v, cells, table, columns):
    """Of a row more in view `v`: log weights of its clusters with those `columns`."""
    if (z[v] < 0).all():
        return np.zeros(1)
    found = prior_of_clusters(tuple(z[v].tolist()))
    for d in columns:
        if view[d] == v:
            found = found + [
                log_marginal_viewed(np.append(table[c, d], cells[d]), d)
                - log_marginal_viewed(table[c, d], d)
                for c in subsets(z[v])
            ]
    return found


def log_density_in_views(view, z, cells, table, columns):
    return sum(
        special.logsumexp(of_view(view, z, v, cells, table, columns)) for v in range(3)
    )


def test_columns_of_a_posterior_in_views():
    posterior = in_views()
    assert posterior.columns == (("x", ()), ("a", (0,)), ("a", (1,)))
    order = np.array([1, 2, 0])
    np.testing.assert_array_equal(posterior.num_views, VIEW.max(1) + 1)
    np.testing.assert_array_equal(
        posterior.num_clusters, (ROWS_OF_VIEW.max(-1) + 1).sum(-1)
    )
    own = VIEW[:, order]
    together = (own[:, :, None] == own[:, None]).mean(0)
    np.testing.assert_allclose(posterior.dependence(), together, rtol=1e-6)
    expected = ROWS_OF_VIEW[np.arange(len(VIEW)), VIEW[:, 0]]
    np.testing.assert_array_equal(posterior.partition({"a": 1}), expected)


@pytest.mark.parametrize(
    "columns, given, of, on",
    [
        (None, None, (0, 1, 2), ()),
        ("x", {"a": 0}, (1,), (2,)),
        ({"a": [1]}, ["x", "a"], (0,), (0, 1, 2)),
        ("a", "x", (0, 2), (1,)),
    ],
)
def test_log_density_in_views(columns, given, of, on):
    got = in_views().log_density(NEW_VIEWED, columns=columns, given=given)
    for i, (view, z) in enumerate(zip(VIEW, ROWS_OF_VIEW, strict=True)):
        for r, cells in enumerate(NEW_VIEWED):
            args = view, z, cells, VIEWED
            expected = log_density_in_views(*args, {*of, *on})
            expected -= log_density_in_views(*args, on)
            np.testing.assert_allclose(got[i, r], expected, **EXACT)


def test_membership_in_views():
    got = in_views().membership(NEW_VIEWED)
    assert got.shape == (len(VIEW), 3, 3, 4)
    for i, (view, z) in enumerate(zip(VIEW, ROWS_OF_VIEW, strict=True)):
        for r, cells in enumerate(NEW_VIEWED):
            expected = np.zeros((3, 4))
            for v in range(3):
                if v not in view:
                    expected[v] = np.nan
                    continue
                weights = of_view(view, z, v, cells, VIEWED, (0, 1, 2))
                *old, new = special.softmax(weights)
                expected[v, : len(old)] = old
                expected[v, -1] = new
            np.testing.assert_allclose(got[i, r], expected, **EXACT)


def test_rows_and_cells_of_the_table_in_views():
    got, cells = in_views().log_likelihood(), in_views().cell_surprisal()
    each = np.zeros((len(VIEW), 3, 3))
    for i, (view, z) in enumerate(zip(VIEW, ROWS_OF_VIEW, strict=True)):
        for n in range(3):
            rest = np.array([testing.canonical_labels(np.delete(v, n)) for v in z])
            args = view, rest, VIEWED[n], np.delete(VIEWED, n, 0)
            whole = log_density_in_views(*args, (0, 1, 2))
            np.testing.assert_allclose(got[i, n], whole, **EXACT)
            for d in range(3):
                others = {0, 1, 2} - {d}
                each[i, n, d] = whole - log_density_in_views(*args, others)
    expected = special.logsumexp(-each, axis=0) - np.log(len(VIEW))
    expected[np.isnan(VIEWED)] = nan
    np.testing.assert_allclose(cells["x"], expected[:, 1], **EXACT)
    np.testing.assert_allclose(cells["a"], expected[:, [2, 0]], **EXACT)


def test_draws_in_views_are_of_the_clusters_of_their_own_view():
    # The category of the last column given the other cells, and imputed ones given the
    # row's own cluster. False alarm: 1e-4 each.
    num = 20
    new = np.repeat(np.array([[1, 0.1, nan]]), num, 0)
    drawn = in_views().sample_rows(random.key(8), new)
    np.testing.assert_array_equal(drawn["a"][..., 1], 1)
    np.testing.assert_array_equal(drawn["x"], np.float32(0.1))
    probs = []
    for view, z in zip(VIEW, ROWS_OF_VIEW, strict=True):
        known = log_density_in_views(view, z, new[0], VIEWED, (0, 1))
        each = [
            log_density_in_views(view, z, [1, 0.1, c], VIEWED, (0, 1, 2))
            for c in range(3)
        ]
        probs.append(np.exp(np.array(each) - known))
    np.testing.assert_allclose(np.sum(probs, 1), 1, rtol=1e-9)
    probs = np.repeat(np.array(probs)[:, None], num, 1)
    assert_categories(drawn["a"][..., 0], probs, 1e-4)

    found = in_views().impute(random.key(9))
    np.testing.assert_array_equal(found["a"].index, [[2, 0]])
    np.testing.assert_array_equal(found["x"].index, [[1]])
    u, probs = [], []
    for view, z, x in zip(VIEW, ROWS_OF_VIEW, found["x"].draws[:, 0], strict=True):
        own = VIEWED[z[view[1]] == z[view[1], 1], 1]
        own = own[~np.isnan(own)]
        precision = 1 / SCALE0**2 + len(own) / SCALE**2
        mean = (LOC0 / SCALE0**2 + own.sum() / SCALE**2) / precision
        u.append(stats.norm.cdf(x, mean, np.sqrt(1 / precision + SCALE**2)))
        own = VIEWED[z[view[2]] == z[view[2], 2], 2]
        weight = URN + (own[:, None] == np.arange(3)).sum(0)
        probs.append(weight / weight.sum())
    assert_uniform(u, 1e-4)
    assert_categories(found["a"].draws, np.array(probs), 1e-4)


def known_views(real, codes):
    # Two views, of columns that are known; and a partition of another site.
    view = np.array([1, 0, 1])
    with numpyro.plate("views", 2):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.3, size=real.shape[0]))
    y = numpyro.sample("y", PitmanYorProcess(0.5, 0.3, size=real.shape[0]))
    with numpyro.plate("features", 3, dim=-1):
        with numpyro.plate("clusters", 3, dim=-2):
            loc = numpyro.sample("loc", dist.Normal(LOC0, SCALE0))
        k = z[view].T
        numpyro.sample("x", dist.Normal(loc[k, jnp.arange(3)], SCALE), obs=real)
    with numpyro.plate("code_clusters", 3):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.asarray(URN)))
    numpyro.sample("c", dist.Categorical(probs[y]), obs=codes)


def test_known_views_and_another_partition():
    real = np.array([[0.1, 1.2, -0.4], [0.9, -1.0, 0.3], [-0.7, 0.2, 1.1]], np.float32)
    codes = np.array([0, 2, 2])
    rng = np.random.default_rng(0)
    draws = {
        "z": THREE[rng.integers(5, size=(12, 2))],
        "y": THREE[rng.integers(5, size=12)],
    }
    posterior = Posterior(known_views, draws, (real, codes))
    new_real, new_codes = real[::-1] + np.float32(0.3), np.array([1, 0, 2])
    got = posterior.log_density(new_real, new_codes)
    member = posterior.membership(new_real, new_codes)
    laws = [
        partial(testing.log_eppf, concentration=1.3),
        partial(testing.log_eppf, concentration=1.3),
        partial(testing.log_eppf, concentration=0.5, discount=0.3),
    ]
    for i, r in itertools.product(range(12), range(3)):
        total = 0
        parts = (*draws["z"][i], draws["y"][i])
        for v, (z, law) in enumerate(zip(parts, laws, strict=True)):
            weights = by_cluster(z, law)
            for d in ([1], [0, 2], ["c"])[v]:
                table, value, kind = (
                    (codes, new_codes[r], 0)
                    if d == "c"
                    else (real[:, d], new_real[r, d], 1)
                )
                weights = weights + [
                    log_marginal_viewed(np.append(table[c], value).astype(float), kind)
                    - log_marginal_viewed(table[c].astype(float), kind)
                    for c in subsets(z)
                ]
            total += special.logsumexp(weights)
            np.testing.assert_allclose(
                member[i, r, v, -1], special.softmax(weights)[-1], **EXACT
            )
        np.testing.assert_allclose(got[i, r], total, **EXACT)
    expected = np.eye(4)
    expected[0, 2] = expected[2, 0] = 1
    np.testing.assert_array_equal(posterior.dependence(), expected)
    np.testing.assert_array_equal(posterior.num_views, 3)
    np.testing.assert_array_equal(posterior.partition("c"), draws["y"])


def test_mutual_information_in_views():
    # Of the two columns of a view the integral, within 4.5 errors, which are those of
    # the samples as all draws are alike (false alarm: 1e-4 with t of 11 degrees). Of
    # columns of different views none at all.
    real = np.array([[-3.0, 0.5, 2.0], [3.2, -1.0, -2.5], [2.6, 0.2, -2.2]], np.float32)
    real = real[[0, 1, 2, 1, 2, 1]]  # clusters of one row and of five
    draws = {"z": np.tile([[0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1]], (12, 1, 1))}
    draws["y"] = np.zeros((12, 6), int)
    posterior = Posterior(known_views, draws, (real, np.zeros(6, int)))
    found = posterior.mutual_information(random.key(10), num_samples=300)
    grid = np.linspace(-9, 9, 400)
    pdf = []
    for d in (0, 2):
        for own in (real[:1, d], real[1:, d], real[:0, d]):
            one = log_marginal_viewed(own, 1)
            pdf.append([log_marginal_viewed(np.append(own, x), 1) - one for x in grid])
    pdf = np.exp(np.array(pdf)).reshape(2, 3, -1)
    weights = np.array([1, 5, 1.3]) / 7.3
    joint = np.einsum("k,ki,kj->ij", weights, *pdf)
    apart = np.outer(weights @ pdf[0], weights @ pdf[1])
    expected = (joint * np.log(joint / apart)).sum() * (grid[1] - grid[0]) ** 2
    z = (found.value[0, 2] - expected) / found.error[0, 2]
    print(expected, found.error[0, 2], z)
    assert abs(z) < 4.5 and found.error[0, 2] < 0.03, z
    others = [0, 1, 3, 3, 3], [1, 2, 0, 1, 2]
    assert (found.value[others] == 0).all() and (found.error[others] == 0).all()


# --- what is refused ------------------------------------------------------------------


def refused(fn, *words):
    with pytest.raises(ValueError) as error:
        fn()
    for word in words:
        assert word in str(error.value), str(error.value)


def test_samples_that_do_not_fit_are_refused():
    good = draws_of([0, 1])

    def fit(**changed):
        draws = {k: v for k, v in {**good, **changed}.items() if v is not None}
        return Posterior(mixture, draws, (REAL, CODES))

    refused(lambda: fit(alpha=None), "'alpha'", "['mean', 'z']")
    refused(lambda: fit(z=good["z"][:, :3]), "'z'", "(2, 3)", "(draws, 4)")
    refused(lambda: fit(z=good["z"].astype(float)), "'z'", "float64", "integers")
    refused(lambda: fit(alpha=good["alpha"][:1]), "'alpha'", "(1,)", "(2,)")
    refused(lambda: fit(mean=np.zeros((2, 2))), "'mean'", "(2, 2)", "()")
    refused(lambda: fit(**{k: v[:0] for k, v in good.items()}), "no draws")
    warm = good["z"].copy()
    warm[1, 2] = -1
    refused(lambda: fit(z=warm), "draw 1", "row 2", "warm-up")


def test_views_of_samples_that_do_not_fit_are_refused():
    draws = {"view": VIEW[:2] + 3, "z": ROWS_OF_VIEW[:2].copy()}
    refused(lambda: Posterior(crosscat, draws, (VIEWED,)), "'view'", "label 3", "has 3")
    draws["view"] = VIEW[:2]
    draws["z"][0, 0, 1] = -1
    refused(lambda: Posterior(crosscat, draws, (VIEWED,)), "draw 0", "row 1")


def test_rows_and_columns_that_do_not_fit_are_refused():
    ask = fitted().log_density
    wrong = np.zeros((2, 3), np.float32)
    refused(lambda: ask(wrong, CODES[:2]), "'x' of shape (rows, 2)", "(2, 3)")
    refused(lambda: ask(REAL[:0], CODES[:0]), "at least one")
    refused(lambda: ask(REAL[0], CODES[:1]), "'x' have shape ()", "(2,)")
    refused(lambda: in_views().log_density(VIEWED[0]), "ndices", "table of new rows")
    refused(
        lambda: ask(REAL[:2], CODES[:2], num_clusters=6),
        "has 6 clusters",
        "had 5 in the training",
        "`num_clusters`",
    )
    refused(lambda: ask(REAL[:2], np.array([0, 7])), "'c'", "7", "row 1", "0..2")
    wrong = np.array([[0, 1], [np.inf, 0]], np.float32)
    refused(lambda: ask(wrong, CODES[:2]), "Column 0", "'x'", "inf", "row 1")
    args = NEW_REAL, NEW_CODES
    refused(lambda: ask(*args, columns="y"), "'y'", "['x', 'c']", "`Table.sites('y')`")
    # Of no consequence without views, but it must not be misspelt.
    for question in (fitted().similarity, fitted().point_partition):
        refused(lambda q=question: q(columns="y"), "'y'", "['x', 'c']")
    for index in (2, "a", [True] * 3, (0, 1), 0.5):
        refused(lambda i=index: ask(*args, columns={"x": i}), "'x'", "(2,)")
    refused(lambda: ask(*args, given={"c": [0]}), "'c'", "()", "write 'c' alone")
    refused(lambda: ask(*args, given=[0]), "named by their observed site", "got 0")
    for question in (fitted().impute, fitted().mutual_information):
        refused(lambda q=question: q(0), "`rng_key`", "got 0")
    refused(lambda: fitted().sample_rows(np.int32(2), *args), "`rng_key`")
    for number in (0, 2.5):
        refused(
            lambda n=number: fitted().mutual_information(random.key(0), n),
            "num_samples",
            str(number),
        )


def test_other_arguments_than_in_the_training_are_refused():
    # The model is read at those of the training: what else is given would be ignored.
    def model(x, scale=1.0, offset=None, *, learn=True):
        shift = numpyro.sample("shift", Grid(np.array([0.0, 1.0]))) if learn else 0.0
        mean = shift if offset is None else offset
        with numpyro.plate("clusters", 3):
            loc = numpyro.sample("loc", dist.Normal(mean, 1.0))
        z = numpyro.sample("z", ChineseRestaurantProcess(1.3, size=len(x)))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", dist.Normal(loc[z], scale), obs=x)

    x = np.arange(3.0)
    draws = {"z": np.zeros((2, 3), int), "shift": np.zeros(2)}
    ask = Posterior(model, draws, (x, 2.0)).log_density
    expected = ask(x[:2], 2.0)
    for scale in (np.float32(2), jnp.array(2.0), 2, 2.0 + 1e-12):
        np.testing.assert_array_equal(ask(x[:2], scale=scale), expected)
    refused(lambda: ask(x[:2]), "`scale`", "is 1.0", "was 2.0")
    refused(lambda: ask(x[:2], 3.0), "`scale`", "is 3.0", "was 2.0")
    refused(lambda: ask(x[:2], np.ones(2)), "`scale`", "[1. 1.]", "was 2.0")
    refused(lambda: ask(np.ma.masked_less(x[:2], 1), 2.0), "masked array", "`.data`")
    refused(lambda: ask(x[:2], "b"), "`scale`", "is b", "was 2.0")
    refused(lambda: ask(x[:2], None), "`scale`", "is None", "was 2.0")
    refused(lambda: ask(x[:2], 2.0, 0.5), "`offset`", "is 0.5", "was None")
    refused(lambda: ask(x[:2], 2.0, learn=False), "does not sample 'shift'")
    refused(lambda: ask(x[:2] + 0j, 2.0), "'x'", "complex128", "numeric")
    refused(lambda: ask(x[:2].astype(str), 2.0), "`x`", "<U32", "`Table.encode`")
    fixed = Posterior(model, {"z": draws["z"]}, (x,), {"learn": False}).log_density
    refused(lambda: fixed(x[:2]), "samples 'shift'", "not sampled in the training")
    # By row, it may differ.
    varied = Posterior(model, draws, (x, np.array([1.0, 2.0, 3.0]))).log_density
    one, two = (varied(x[:1], np.full(1, scale)) for scale in (0.5, 4.0))
    assert one[0, 0] != two[0, 0]


def test_rows_that_are_a_list_are_refused():
    def model(n):
        with numpyro.plate("clusters", 3):
            rate = numpyro.sample("rate", dist.Gamma(SHAPE, RATE))
        z = numpyro.sample("z", ChineseRestaurantProcess(1.3, size=len(n)))
        numpyro.sample("n", dist.Poisson(rate[z]), obs=n)

    posterior = Posterior(model, {"z": np.zeros((2, 3), int)}, (np.array([3, 2, 4]),))
    refused(lambda: posterior.log_density([3, 1]), "'n'", "not an array")


def counts(x, observed=True):
    with numpyro.plate("clusters", 3):
        rate = numpyro.sample("rate", dist.Gamma(SHAPE, RATE))
        loc = numpyro.sample("loc", dist.VonMises(0.5, 0.3))
    z = numpyro.sample("z", ChineseRestaurantProcess(1.3, size=x.shape[0]))
    n = x[:, 0].astype(int) if observed else None
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("n", dist.Poisson(rate[z]), obs=n)
        with handlers.mask(mask=~jnp.isnan(x[:, 1])):
            numpyro.sample("angle", dist.VonMises(loc[z], 30.0), obs=x[:, 1])


def test_counts_and_angles():
    table = np.array([[3, 3.1], [2, -3.1], [4, nan]], np.float32)
    posterior = Posterior(counts, {"z": np.zeros((500, 3), int)}, (table,))
    new = np.array([[-2, 0.1]], np.float32)
    refused(lambda: posterior.log_density(new), "'n'", "-2", "row 0", "counts")
    unobserved = partial(posterior.log_density, table, observed=False)
    refused(unobserved, "'n'", "not observed", "mask")
    # A direction next to -pi and pi, the mean of whose numbers is near 0.
    found = posterior.impute(random.key(0))["angle"]
    assert abs(found.point[0]) > 2.8 and 0.15 < found.uncertainty[0] < 0.6
    assert abs(found.draws.mean()) < 2.0
    # Rows that are nearly alike are no table to learn from, but can be asked about.
    close = np.array([[1, 1], [1, 1 + 1e-7]], np.float32)
    a, b = fitted().log_predictive(close, np.array([1, 1]))
    assert abs(a - b) < 1e-5


# --- runs -----------------------------------------------------------------------------


def simple(x):
    z = numpyro.sample("z", ChineseRestaurantProcess(1.3, size=x.shape[0]))
    with numpyro.plate("features", x.shape[1], dim=-1):
        with numpyro.plate("clusters", 4, dim=-2):
            loc = numpyro.sample("loc", dist.Normal(0.0, 5.0))
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


BLOBS = np.random.default_rng(0).normal(np.repeat([[-4.0], [4.0]], 6, 0), size=(12, 1))
BLOBS = BLOBS.astype(np.float32)
RUN = {"num_warmup": 2, "num_samples": 4}


@cache
def kernel():
    return SubsampleAnnealedGibbs(simple, split_merge=None)


def new_run():
    return MCMC(kernel(), **RUN, progress_bar=False)


@few_clusters
def test_a_posterior_is_made_of_a_run():
    mcmc = new_run()
    refused(
        lambda: Posterior.from_mcmc({"z": BLOBS}), "MCMC", "Posterior(model, samples"
    )
    refused(lambda: Posterior.from_mcmc(mcmc), "run")
    # (What it holds then are zeros.)
    mcmc.warmup(random.key(0), BLOBS)
    refused(lambda: Posterior.from_mcmc(mcmc), "run")
    mcmc.run(random.key(0), BLOBS)
    posterior = Posterior.from_mcmc(mcmc)
    z = mcmc.get_samples()["z"]
    np.testing.assert_array_equal(posterior.partition(), z)
    refused(lambda: posterior.similarity(columns={}), "no columns", "{}")
    wrong = np.zeros((2, 3), np.float32)
    refused(lambda: posterior.membership(wrong), "'x'", "(3,)", "(1,)")
    # The kernel reads another table; the first run is what it was.
    new_run().run(random.key(0), BLOBS[:9])
    again = Posterior.from_mcmc(mcmc)
    assert again.num_rows == 12
    np.testing.assert_array_equal(again.partition(), z)


@few_clusters
def test_cross_validation_scores_rows_that_it_was_not_trained_with():
    options = dict(RUN, rng_key=random.key(1), held_out=1 / 4)
    found = cross_validate(kernel(), BLOBS, num_splits=2, **options)
    assert found.score.shape == (2,)
    for score, each, out in zip(*found, strict=True):
        assert out.shape == each.shape == (3,) and len(set(out.tolist())) == 3
        np.testing.assert_allclose(score, each.mean(), rtol=1e-6)
    assert set(found.held_out[0].tolist()) != set(found.held_out[1].tolist())
    # The first split by itself.
    key_split, key_run = random.split(random.fold_in(random.key(1), 0))
    out = found.held_out[0]
    rest = np.setdiff1d(np.arange(12), out)
    mcmc = new_run()
    mcmc.run(key_run, BLOBS[rest])
    direct = Posterior(simple, mcmc.get_samples(), (BLOBS[rest],))
    np.testing.assert_allclose(
        direct.log_predictive(BLOBS[out]), found.log_density[0], rtol=1e-5
    )


def test_shares_and_models_that_cannot_be_split_are_refused():
    options = dict(RUN, rng_key=random.key(0))
    with pytest.raises(TypeError, match=r"SubsampleAnnealedGibbs\(model\)"):
        cross_validate(simple, BLOBS, **options)
    for share in (0.0, 0.04, 1.0, -0.5, float("nan")):
        refused(
            lambda s=share: cross_validate(kernel(), BLOBS, held_out=s, **options),
            "held_out",
            str(share),
            "12 rows",
        )
    refused(
        lambda: cross_validate(kernel(), BLOBS, num_splits=0, **options), "num_splits"
    )
    refused(
        lambda: cross_validate(kernel(), BLOBS, num_chains=0, **options), "num_chains"
    )
    refused(
        lambda: cross_validate(kernel(), BLOBS, num_splits=2, num_folds=2, **options),
        "`num_folds` = 2 takes the place",
    )
    bound = SubsampleAnnealedGibbs(partial(simple, BLOBS))
    for folds in (1, 13, 2.5):
        refused(
            lambda n=folds: cross_validate(kernel(), BLOBS, num_folds=n, **options),
            "num_folds",
            "from 2 to 12",
        )
    refused(lambda: cross_validate(bound, **options), "12 rows", "'z'", "argument")


def test_folds_hold_out_every_row_once():
    parts = posterior_module._held_out(random.key(0), 12, None, None, 5)
    assert sorted(map(len, parts)) == [2, 2, 2, 3, 3]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(12))
    again = posterior_module._held_out(random.key(0), 12, None, None, 5)
    other = posterior_module._held_out(random.key(1), 12, None, None, 5)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    assert any(
        (a != b).any() for a, b in zip(parts, other, strict=False) if len(a) == len(b)
    )
