# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Summaries of partitions against their definitions: double loops over pairs of rows,
entropies of one cell after another, all partitions of a few rows, all permutations.
"""

import doctest
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_subanneal import partitions, testing
from numpyro_subanneal.partitions import (
    adjusted_rand,
    best_draw,
    binder_loss,
    credible_ball,
    match_labels,
    pair_similarity,
    point_partition,
    relabel_parameters,
    similarity,
    variation_of_information,
)

DISTANCES = {"vi": variation_of_information, "binder": binder_loss}
LOSSES = list(DISTANCES)


def some_draws(seed, num_draws=9, num_rows=6, num_labels=4):
    """Labels with gaps, by which draws agree in part."""
    rng = np.random.default_rng(seed)
    centre = rng.integers(num_labels, size=num_rows)
    other = rng.integers(num_labels, size=(num_draws, num_rows))
    z = np.where(rng.random(other.shape) < 0.5, centre, other)
    return 3 * z + rng.integers(3, size=(num_draws, 1))


def overlapping(seed, num_draws=40, num_rows=60, num_labels=6):
    """Draws of intervals of rows with uncertain ends."""
    rng = np.random.default_rng(seed)
    ends = np.linspace(0, num_rows, num_labels + 1)[1:-1]
    ends = ends + 4 * rng.normal(size=(num_draws, num_labels - 1))
    return (np.arange(num_rows)[:, None] > ends[:, None]).sum(-1)


def together(z, i, j):
    return z[i] == z[j]


def vi_by_entropies(a, b):
    n = len(a)

    def entropy(labels):
        labels = list(labels)
        return -sum(
            labels.count(k) / n * math.log(labels.count(k) / n) for k in set(labels)
        )

    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    joint = entropy(pairs)
    return (joint - entropy(a.tolist())) + (joint - entropy(b.tolist()))


def binder_by_pairs(a, b):
    n = len(a)
    ordered = itertools.product(range(n), repeat=2)
    return sum(together(a, i, j) != together(b, i, j) for i, j in ordered) / n**2


def rand_by_pairs(a, b):
    """As Hubert and Arabie (1985) derive it: (index - mean) / (most - mean)."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    both = sum(together(a, i, j) and together(b, i, j) for i, j in pairs)
    in_a = sum(together(a, i, j) for i, j in pairs)
    in_b = sum(together(b, i, j) for i, j in pairs)
    mean = in_a * in_b / len(pairs)
    return (both - mean) / ((in_a + in_b) / 2 - mean)


DEFINITIONS = {"vi": vi_by_entropies, "binder": binder_by_pairs}


def expected(loss, z, labels):
    return np.mean([DEFINITIONS[loss](draw, labels) for draw in z])


# --- similarity ---


def similarity_by_loops(z):
    n = z.shape[1]
    return np.array(
        [[np.mean(z[:, i] == z[:, j]) for j in range(n)] for i in range(n)], np.float32
    )


def test_similarity_is_the_share_of_draws_in_which_rows_are_together():
    z = some_draws(0, num_draws=11, num_rows=9)
    found = similarity(z)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, similarity_by_loops(z), rtol=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 5, 100])
def test_similarity_is_the_same_in_chunks_and_of_chosen_rows(chunk_size):
    z = some_draws(1, num_rows=8)
    whole = similarity(z)
    rows, others = [7, 0, 3, 3], [1, 7, 6]
    np.testing.assert_array_equal(similarity(z, chunk_size=chunk_size), whole)
    found = similarity(z, rows, others, chunk_size=chunk_size)
    np.testing.assert_array_equal(found, whole[np.ix_(rows, others)])
    found = similarity(z, rows, chunk_size=chunk_size)
    np.testing.assert_array_equal(found, whole[rows])
    found = similarity(z, others=others, chunk_size=chunk_size)
    np.testing.assert_array_equal(found, whole[:, others])


def test_similarity_of_no_rows_is_empty():
    z = some_draws(1)
    assert similarity(z, []).shape == (0, 6)
    assert similarity(z, others=[]).shape == (6, 0)
    assert pair_similarity(z, np.zeros((0, 2), int)).shape == (0,)


@pytest.mark.parametrize("num_draws", [254, 255, 256, 511, 700])
def test_similarity_counts_beyond_a_byte(num_draws):
    z = np.zeros((num_draws, 3), int)
    z[:, 2] = np.arange(num_draws) % 2
    found = similarity(z)
    assert found[0, 1] == 1
    np.testing.assert_allclose(found, similarity_by_loops(z), rtol=1e-6)


def test_similarity_tells_more_than_256_clusters_apart():
    z = np.stack([np.arange(300), np.arange(300)[::-1]])
    np.testing.assert_array_equal(similarity(z), np.eye(300))


@pytest.mark.parametrize("cells", [1, 9, 20, 2**20])
def test_similarity_of_pairs_is_that_of_the_matrix(monkeypatch, cells):
    monkeypatch.setattr(partitions, "_CELLS", cells)
    z = some_draws(2, num_rows=8)
    pairs = np.random.default_rng(0).integers(8, size=(23, 2))
    found = pair_similarity(z, pairs)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, similarity(z)[pairs[:, 0], pairs[:, 1]])


# --- distances ---


@pytest.mark.parametrize("seed", range(4))
def test_distances_are_those_of_the_definitions(seed):
    a, b = some_draws(seed, 6, 9), some_draws(seed + 10, 6, 9)
    for loss, distance in DISTANCES.items():
        by_loops = [DEFINITIONS[loss](x, y) for x, y in zip(a, b, strict=True)]
        np.testing.assert_allclose(distance(a, b), by_loops, atol=1e-12)
    by_loops = [rand_by_pairs(x, y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(adjusted_rand(a, b), by_loops, atol=1e-12)


@pytest.mark.parametrize("cells", [1, 40, 100, 2**20])
@pytest.mark.parametrize("num_labels", [2, 40])  # tables that are dense, and are not
def test_distances_of_many_draws_are_those_of_each(monkeypatch, cells, num_labels):
    monkeypatch.setattr(partitions, "_CELLS", cells)
    a, b = (some_draws(seed, 7, 12, num_labels) for seed in (1, 2))
    for distance in (*DISTANCES.values(), adjusted_rand):
        each = np.array([[distance(x, y) for y in b] for x in a])
        assert np.shape(distance(a[0], b[0])) == ()
        np.testing.assert_allclose(distance(a, b), np.diag(each), atol=1e-12)
        np.testing.assert_allclose(distance(a, b[0]), each[:, 0], atol=1e-12)
        np.testing.assert_allclose(distance(a[2], b), each[2], atol=1e-12)
        np.testing.assert_allclose(distance(a[:, None], b), each, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_metrics_of_partitions(loss):
    every = testing.set_partitions(5)
    d = DISTANCES[loss](every[:, None], every)
    np.testing.assert_array_equal(d == 0, np.eye(len(every), dtype=bool))
    np.testing.assert_allclose(d, d.T, atol=1e-12)
    assert (d[:, None] <= d[:, :, None] + d + 1e-12).all()
    largest = {"vi": np.log(5), "binder": 1 - 1 / 5}[loss]
    assert d.max() == pytest.approx(largest)


def test_adjusted_rand_is_one_of_like_partitions_and_zero_on_average():
    every = testing.set_partitions(5)
    index = adjusted_rand(every[:, None], every)
    np.testing.assert_allclose(np.diag(index), 1)
    assert index[0, -1] == 0  # one cluster, against as many as rows
    orders = np.array(list(itertools.permutations([0, 0, 1, 1, 2])))
    assert adjusted_rand(orders, [0, 1, 1, 0, 1]).mean() == pytest.approx(0, abs=1e-12)
    for distance, of_one in ((adjusted_rand, 1), (binder_loss, 0)):
        assert distance([3], [0]) == of_one


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_like_partitions_are_zero(loss):
    z = np.random.default_rng(0).integers(9, size=(300, 37))
    assert (DISTANCES[loss](z, 9 - z) == 0).all()


# --- point estimates ---


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_the_best_of_all_partitions(loss, seed):
    num_rows = 4 + seed % 3
    z = some_draws(seed, 3 + seed, num_rows, 2 + seed % 4)
    every = testing.set_partitions(num_rows)
    losses = np.array([expected(loss, z, labels) for labels in every])
    found = point_partition(z, loss, seed=seed)
    assert found.expected_loss == pytest.approx(losses.min(), abs=1e-12)
    at = testing.partition_index(found.labels, every)
    assert losses[at] == pytest.approx(losses.min(), abs=1e-12)
    assert found.num_clusters == len(set(found.labels.tolist()))
    for most in (1, 2):
        few = every.max(1) < most
        found = point_partition(z, loss, seed=seed, max_clusters=most)
        assert found.num_clusters <= most
        assert found.expected_loss == pytest.approx(losses[few].min(), abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_search_beats_the_best_draw_and_leaves_no_row_to_move(loss):
    for seed in range(3):
        z = overlapping(seed)
        draw = best_draw(z, loss)
        for num_runs in (1, 3):
            found = point_partition(z, loss, num_runs=num_runs)
            assert found.expected_loss <= draw.expected_loss
            assert found.run < num_runs
        moved = np.repeat(found.labels[None], 60 * (found.num_clusters + 1), 0)
        for i, (row, k) in enumerate(
            itertools.product(range(60), range(found.num_clusters + 1))
        ):
            moved[i, row] = k
        losses = DISTANCES[loss](moved[:, None], z).mean(1)
        assert losses.min() >= found.expected_loss - 1e-10


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("max_clusters", [None, 4, 2])
def test_the_first_run_starts_at_the_best_draw(monkeypatch, loss, max_clusters):
    monkeypatch.setattr(partitions._Search, "descend", lambda self, rng: None)
    many = [some_draws(2, 6, 20, num_labels) for num_labels in (8, 4, 2)]
    z = np.concatenate(many)
    num = np.array([len(set(draw.tolist())) for draw in z])
    assert set(num) >= {2, 4, 8}
    losses = np.array([expected(loss, z, labels) for labels in z])
    least = losses[num <= (max_clusters or 20)].min()
    found = point_partition(z, loss, num_runs=1, max_clusters=max_clusters)
    assert found.expected_loss == pytest.approx(least, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_sweeps_end_where_no_row_moves(loss):
    for seed in range(5):
        z = overlapping(seed, num_draws=11)
        rng = np.random.default_rng(seed)
        search = partitions._Search(z, loss, 60)
        search.load(testing.canonical_labels(rng.integers(9, size=60)))
        search.sweep(np.arange(60), rng)
        assert not any([search.settle(row) for row in range(60)])


def test_clusters_that_no_row_leaves_are_rebuilt():
    # Of ten rows together with ten others, none alone is better off elsewhere.
    z = np.repeat([[0, 1]], 10, axis=1).repeat(5, axis=0)
    rng = np.random.default_rng(0)
    search = partitions._Search(z, "vi", 20)
    search.load(np.zeros(20, int))
    search.sweep(np.arange(20), rng)
    assert search.num == 1
    search.descend(rng)
    np.testing.assert_array_equal(testing.canonical_labels(search.labels), z[0])


@pytest.mark.parametrize("loss", LOSSES)
def test_several_runs_are_better_than_one(loss):
    gain = 0
    for seed in range(5):
        z = overlapping(seed, num_draws=12, num_labels=12)
        one, many = (point_partition(z, loss, num_runs=n) for n in (1, 6))
        assert many.expected_loss <= one.expected_loss
        assert (many.run > 0) == (many.expected_loss < one.expected_loss - 1e-12)
        gain += one.expected_loss - many.expected_loss
    assert gain > 0


def test_the_search_depends_on_partitions_and_the_seed_only():
    z = overlapping(3)
    found = point_partition(z, seed=5)
    other = np.random.default_rng(0).permuted(np.tile(np.arange(50), (40, 1)), axis=1)
    renamed = np.take_along_axis(other, z, 1).reshape(4, 10, 60)
    for again in (renamed, renamed.astype(np.uint8), jnp.asarray(renamed)):
        same = point_partition(again, seed=5)
        np.testing.assert_array_equal(same.labels, found.labels)
        assert same[1:] == found[1:]
    np.testing.assert_array_equal(testing.canonical_labels(found.labels), found.labels)
    assert found.expected_loss == pytest.approx(expected("vi", z, found.labels))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_number_of_clusters_has_no_bound(loss):
    z = np.tile(np.arange(30), (3, 1))
    found = point_partition(z, loss, num_runs=2)
    assert found.num_clusters == 30
    assert found.expected_loss == 0
    # The best draw has too many: no run can start there.
    assert point_partition(z, loss, max_clusters=7).num_clusters == 7


def test_a_single_row_and_a_single_draw_have_their_partition():
    assert point_partition([[4]]).labels.tolist() == [0]
    assert point_partition([[4, 2, 4]]).labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("max_clusters", [5, 20])
def test_the_search_keeps_count(loss, max_clusters):
    z = testing.canonical_labels(some_draws(4, 7, 20, 12))
    rng = np.random.default_rng(0)
    search = partitions._Search(z, loss, max_clusters)
    whole = partitions._Search(z, loss, max_clusters)
    search.allocate(np.arange(20), rng)
    for step in range(300):
        row = rng.integers(20)
        k = rng.integers(min(search.num + 1, max_clusters))
        own = search.labels[row]
        if k != own and (k < search.num or search.sizes[own] > 1):
            search.join(row, k)
            search.leave(row, own)
        if step % 10 == 0:
            search.rebuild(np.flatnonzero(search.labels == 0), rng)
        whole.load(search.labels)
        num = search.num
        assert num == whole.num == len(set(search.labels.tolist()))
        np.testing.assert_array_equal(search.sizes[:num], whole.sizes[:num])
        np.testing.assert_array_equal(search.overlaps[:num], whole.overlaps[:num])
        assert not search.sizes[num:].any() and not search.overlaps[num:].any()
        assert len(search.sizes) == len(search.overlaps) > num
        if step == 100:
            search.clear()
            assert not search.sizes.any() and not search.overlaps.any()
            search.allocate(np.arange(20), rng)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_row_settles_where_the_loss_of_the_rows_so_far_is_least(loss):
    z = some_draws(5, 8, 12, 3)
    draws = testing.canonical_labels(z)
    rng = np.random.default_rng(1)
    search = partitions._Search(draws, loss, 12)
    order = rng.permutation(12)
    turns = [*order, *rng.integers(12, size=30)]
    for turn, row in enumerate(turns):
        rows = order[: turn + 1]
        choices = []
        for k in range(search.num + 1):
            labels = search.labels.copy()
            labels[row] = k
            choices.append(expected(loss, z[:, rows], labels[rows]))
        search.settle(row)
        found = expected(loss, z[:, rows], search.labels[rows])
        assert found == pytest.approx(min(choices), abs=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_cluster_is_rebuilt_only_if_that_is_better(loss):
    """And the objective differs from the expected loss by a constant."""
    z = overlapping(1, num_draws=15, num_rows=24)
    scale = {"vi": 24, "binder": 24**2}[loss]
    rng = np.random.default_rng(0)
    search = partitions._Search(z, loss, 24)
    outcomes, constants = set(), []
    for _ in range(8):
        search.load(testing.canonical_labels(rng.integers(4, size=24)))
        for _ in range(6):
            before, labels = search.objective(), search.labels.copy()
            rows = np.flatnonzero(labels == rng.integers(search.num))
            better = search.rebuild(rows, rng)
            outcomes.add(better)
            if better:
                assert search.objective() < before
            else:
                np.testing.assert_array_equal(search.labels, labels)
                assert search.objective() == pytest.approx(before, abs=1e-9)
            mean = DISTANCES[loss](search.labels, z).mean()
            constants.append(scale * mean - search.objective())
    assert outcomes == {True, False}
    np.testing.assert_allclose(constants, constants[0], atol=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_labels", [3, 40])
def test_the_best_draw_is_the_best_of_the_draws(loss, num_labels):
    z = some_draws(7, 10, 12, num_labels)
    losses = [expected(loss, z, labels) for labels in z]
    found = best_draw(z.reshape(2, 5, 12), loss)
    assert found.draw == np.argmin(losses)
    assert found.expected_loss == pytest.approx(min(losses), abs=1e-12)
    labels = testing.canonical_labels(z[found.draw])
    np.testing.assert_array_equal(found.labels, labels)
    assert found.num_clusters == labels.max() + 1


# --- uncertainty ---


def ball_by_loops(z, centre, level, loss):
    distance = np.array([DEFINITIONS[loss](draw, centre) for draw in z]).round(10)
    radius = min(
        r for r in distance if (distance <= r).sum() >= round(level * len(z), 9)
    )
    inside = [i for i in range(len(z)) if distance[i] <= radius]
    num = [len(set(draw.tolist())) for draw in z]
    sets = [inside]
    for extreme in (min, max):
        bound = extreme(num[i] for i in inside)
        sets.append([i for i in inside if num[i] == bound])
    bounds = []
    for at in sets:
        most = max(distance[i] for i in at)
        labels = testing.canonical_labels(z[[i for i in at if distance[i] == most]])
        bounds.append(sorted(set(map(tuple, labels.tolist()))))
    return radius, bounds


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", [0.05, 0.5, 0.8, 0.95, 1.0])
def test_credible_balls_are_those_of_the_definition(loss, level):
    for seed in range(4):
        z = some_draws(seed, 18, 5, 3)
        centre = 7 * point_partition(z, loss, num_runs=1).labels
        radius, bounds = ball_by_loops(z, centre, level, loss)
        found = credible_ball(z.reshape(3, 6, 5), centre, level, loss)
        assert found.radius == pytest.approx(radius, abs=1e-9)
        assert [sorted(map(tuple, b.tolist())) for b in found[1:]] == bounds


def test_a_ball_of_one_partition_has_no_radius():
    z = np.tile([0, 1, 1, 0], (9, 1))
    found = credible_ball(z, [5, 2, 2, 5])
    assert found.radius == 0
    for bound in found[1:]:
        assert bound.tolist() == [[0, 1, 1, 0]]


def test_a_share_that_is_a_whole_number_of_draws_is_not_rounded_up():
    # 0.07 * 100 is 7.000000000000001
    z = np.zeros((100, 8), int)
    z[7:, 0] = 1
    assert credible_ball(z, z[0], 0.07).radius == 0
    assert credible_ball(z, z[0], 0.08).radius > 0


# --- matching ---


def most_agreement(draw, partition):
    """Of all ways to give clusters of the draw different clusters of the partition, or
    none."""
    own, to = sorted(set(draw.tolist())), sorted(set(partition.tolist()))
    best = 0
    for images in itertools.permutations(to + [-1] * len(own), len(own)):
        new = dict(zip(own, images, strict=True))
        best = max(best, sum(new[k] == p for k, p in zip(draw, partition, strict=True)))
    return best


@pytest.mark.parametrize("num_labels", [2, 3, 4])
def test_labels_are_matched_by_most_agreement(num_labels):
    for seed in range(6):
        z = some_draws(seed, 6, 8, num_labels)
        partition = np.random.default_rng(seed).integers(3, size=8)
        found = match_labels(z, partition)
        assert found.num_clusters == partition.max() + 1
        assert found.maps.shape == (6, z.max() + 1)
        np.testing.assert_array_equal(
            testing.canonical_labels(found.labels), testing.canonical_labels(z)
        )
        for draw, labels, own in zip(z, found.labels, found.maps, strict=True):
            assert (labels == partition).sum() == most_agreement(draw, partition)
            np.testing.assert_array_equal(own[draw], labels)
            unused = np.setdiff1d(np.arange(len(own)), draw)
            assert (own[unused] == -1).all()
            # Of a label of the partition, at least one row is there.
            for k in set(labels.tolist()):
                shared = (labels == k) & (partition == k)
                assert shared.any() == (k < found.num_clusters)
            further = sorted(set(labels[labels >= found.num_clusters].tolist()))
            first = found.num_clusters
            assert further == list(range(first, first + len(further)))
            assert sorted(own[own >= first]) == list(own[own >= first])


def test_a_cluster_that_shares_no_row_matches_none():
    found = match_labels([[0, 0, 0, 1]], [0, 1, 0, 0])
    assert found.labels.tolist() == [[0, 0, 0, 2]]


def test_parameters_follow_their_clusters():
    z = np.array([[0, 0, 1, 1, 2], [3, 3, 0, 0, 0], [0, 0, 0, 0, 0]])
    partition = [0, 0, 1, 1, 1]
    values = np.arange(3 * 5 * 2, dtype=np.float32).reshape(3, 5, 2)
    matched = match_labels(z, partition)
    assert matched.labels.tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 1], [1] * 5]
    found = relabel_parameters(values, matched)
    nan = np.full(2, np.nan)
    right = [
        [values[0, 0], values[0, 1]],
        [values[1, 3], values[1, 0]],
        [nan, values[2, 0]],
    ]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, right)
    # Of each cluster one number; integers; a JAX array.
    found = relabel_parameters(jnp.asarray(values[..., 0]), matched)
    np.testing.assert_array_equal(found, np.array(right)[..., 0])
    found = relabel_parameters(values.astype(int), matched)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, right)


def test_chains_are_matched_as_their_draws():
    z = some_draws(3, 12, 7)
    values = np.random.default_rng(0).normal(size=(12, 20, 2, 3))
    partition = point_partition(z).labels
    flat = match_labels(z, partition)
    chains = match_labels(z.reshape(3, 4, 7), partition)
    np.testing.assert_array_equal(chains.labels, flat.labels.reshape(3, 4, 7))
    np.testing.assert_array_equal(chains.maps, flat.maps.reshape(3, 4, -1))
    found = relabel_parameters(values.reshape(3, 4, 20, 2, 3), chains)
    assert found.shape == (3, 4, flat.num_clusters, 2, 3)
    flat_values = relabel_parameters(values, flat)
    np.testing.assert_array_equal(found.reshape(flat_values.shape), flat_values)


# --- of all ---


def test_chains_are_draws_one_after_another():
    z = some_draws(6, 12)
    chains = z.reshape(3, 4, 6)
    np.testing.assert_array_equal(similarity(chains), similarity(z))
    pairs = [[0, 1], [5, 2]]
    np.testing.assert_array_equal(
        pair_similarity(chains, pairs), pair_similarity(z, pairs)
    )


def test_large_labels_take_no_memory():
    z = some_draws(8, 5, 7)
    np.testing.assert_array_equal(similarity(z * 10**15), similarity(z))
    assert variation_of_information(z[0] * 10**15, z[1]) == pytest.approx(
        vi_by_entropies(z[0], z[1])
    )


Z = some_draws(0, 4, 6)
WARMUP = np.where(np.arange(24).reshape(4, 6) == 9, -1, Z)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: similarity(WARMUP), r"`z` has -1 at \(1, 3\).*warm-up.*leave them"),
        (lambda: pair_similarity(WARMUP, [[0, 1]]), "`z` has -1"),
        (lambda: point_partition(WARMUP[None]), r"`z` has -1 at \(0, 1, 3\)"),
        (lambda: best_draw(WARMUP), "`z` has -1"),
        (lambda: credible_ball(WARMUP, Z[0]), "`z` has -1"),
        (lambda: credible_ball(Z, WARMUP[1]), "`partition` has -1"),
        (lambda: match_labels(WARMUP, Z[0]), "`z` has -1"),
        (lambda: match_labels(Z, WARMUP[1]), "`partition` has -1"),
        (lambda: variation_of_information(Z, WARMUP), "`b` has -1"),
        (lambda: binder_loss(WARMUP, Z), "`a` has -1"),
        (lambda: similarity(1.0 * Z), "`z` must hold labels.*float64"),
        (lambda: similarity(Z[0]), r"`z` must have shape.*\(6,\).*z\[None\]"),
        (lambda: similarity(Z[:0]), r"at least one.*\(0, 6\)"),
        (lambda: point_partition(Z[:, :0]), r"at least one.*\(4, 0\)"),
        (lambda: similarity(Z, [0, 6]), r"`rows` must lie in 0\.\.5.*to 6"),
        (lambda: similarity(Z, others=[-1]), "`others` must lie in .*from -1"),
        (lambda: similarity(Z, [0.5]), "`rows` must hold indices.*float64"),
        (lambda: similarity(Z, 3), "`rows` must be a list"),
        (lambda: similarity(Z, chunk_size=0), "`chunk_size` must be .* got 0"),
        (lambda: pair_similarity(Z, [0, 1]), r"\[P, 2\].*\(2,\)"),
        (lambda: pair_similarity(Z, [[0, 9]]), "`pairs` must lie in"),
        (lambda: adjusted_rand(Z, Z[:, :4]), "the same rows.*6.*4"),
        (lambda: binder_loss(Z, Z[:3]), "leading axes"),
        (lambda: point_partition(Z, "rand"), "`loss` must be .* got 'rand'"),
        (lambda: best_draw(Z, "VI"), "`loss` must be .* got 'VI'"),
        (lambda: credible_ball(Z, Z[0], loss="b"), "`loss` must be .* got 'b'"),
        (lambda: point_partition(Z, num_runs=0), "`num_runs` must be .* got 0"),
        (lambda: point_partition(Z, seed=-1), "`seed` must be .* got -1"),
        (lambda: point_partition(Z, max_clusters=0), "`max_clusters` .* got 0"),
        (lambda: point_partition(Z, max_clusters=2.0), "`max_clusters` .* got 2.0"),
        (lambda: credible_ball(Z, Z[0], 0.0), "`level` must be .* got 0.0"),
        (lambda: credible_ball(Z, Z[0], 95), "`level` must be .* got 95"),
        (lambda: credible_ball(Z, Z), "each of the 6 rows"),
        (lambda: match_labels(Z, Z[0, :5]), "each of the 6 rows"),
        (
            lambda: relabel_parameters(np.zeros((3, 20)), match_labels(Z, Z[0])),
            r"`values` must have shape \[4, K, \.\.\.\].*\(3, 20\)",
        ),
        (
            lambda: relabel_parameters(np.zeros(4), match_labels(Z, Z[0])),
            r"got shape \(4,\)",
        ),
        (
            lambda: relabel_parameters(np.zeros((4, 2)), match_labels(Z, Z[0])),
            "`values` has 2 clusters on axis 1",
        ),
    ],
)
def test_errors_name_the_argument_and_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_search_tells_of_a_loss_before_it_compares_draws(monkeypatch):
    monkeypatch.setattr(partitions, "_sum_over_cells", None)
    with pytest.raises(ValueError, match="`loss`"):
        point_partition(Z, "rand")


def test_examples_of_docstrings_run():
    assert doctest.testmod(partitions).failed == 0
