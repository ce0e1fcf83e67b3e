# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What is in the figures."""

import builtins

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from numpyro_subanneal import plots

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Three groups, of 2, 4 and 3, in no order.
GROUPS = np.array([2, 0, 1, 0, 2, 0, 1, 2, 0])
NAMES = [f"name {i}" for i in range(9)]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def similarity(groups=GROUPS, seed=0):
    noise = np.random.default_rng(seed).uniform(0, 0.2, 2 * (len(groups),))
    noise = (noise + noise.T) / 2
    found = np.where(groups[:, None] == groups, 1 - noise, noise)
    np.fill_diagonal(found, 1)
    return found


def tick_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def drawn(ax):
    """The figure can be drawn (without a warning: they are errors)."""
    ax.figure.canvas.draw()
    return ax


# --- matrices ---


def test_what_is_similar_is_side_by_side():
    own = GROUPS[plots.similarity_order(similarity())]
    assert np.count_nonzero(np.diff(own)) == 2
    order = plots.similarity_order(similarity(), GROUPS)
    assert GROUPS[order].tolist() == [0] * 4 + [2] * 3 + [1] * 2  # from the largest
    other = (np.arange(9) >= 7).astype(int)  # whatever the similarity says
    order = plots.similarity_order(similarity(), other)
    assert other[order].tolist() == [0] * 7 + [1] * 2
    within = GROUPS[order][:7]
    assert np.count_nonzero(np.diff(within)) == 2
    for size in (1, 2, 300):
        order = plots.similarity_order(similarity(np.arange(size)))
        assert sorted(order) == list(range(size))


@pytest.mark.parametrize("with_partition", [True, False])
@pytest.mark.parametrize("what", ["similarity", "dependence"])
def test_heat_map_shows_the_matrix_in_order_with_its_names(what, with_partition):
    matrix = similarity()
    partition = GROUPS if with_partition else None
    draw = getattr(plots, f"plot_{what}")
    ax = drawn(draw(matrix, names=NAMES, partition=partition))
    order = plots.similarity_order(matrix, partition)
    shown = ax.images[0].get_array()
    np.testing.assert_array_equal(shown, matrix[np.ix_(order, order)])
    assert ax.images[0].get_clim() == (0, 1)
    for axis in (ax.xaxis, ax.yaxis):
        assert tick_labels(axis) == [NAMES[i] for i in order]
    assert ("clusters" if what == "rows" else "draws") in ax.get_title()
    assert ("a partition" if with_partition else "similarity") in ax.get_xlabel()
    boxes = [line.get_xydata() for line in ax.lines]
    assert len(boxes) == (3 if with_partition else 0)
    if with_partition:
        assert boxes[0].min() == -0.5 and boxes[0].max() == 3.5
        assert boxes[2].min() == 6.5 and boxes[2].max() == 8.5


def test_many_rows_are_labelled_by_cluster():
    groups = np.random.default_rng(0).choice(3, 150, p=[0.6, 0.39, 0.01])
    groups = groups * 10
    names = [f"row {i}" for i in range(150)]
    ax = drawn(plots.plot_similarity(similarity(groups), groups, names))
    counts = [f"{k}: {np.sum(groups == k)}" for k in (0, 10)]
    assert tick_labels(ax.yaxis) == counts  # the third is too narrow
    assert ax.get_ylabel() == "cluster: rows"
    middle = np.sum(groups == 0) / 2 - 0.5
    assert ax.get_yticks()[0] == pytest.approx(middle)
    ax = drawn(plots.plot_similarity(similarity(groups), names=names))
    assert tick_labels(ax.xaxis) == [] and "150 rows" in ax.get_xlabel()


def test_names_of_sixty_columns_are_legible():
    names = [f"a column with quite a long name {i}" for i in range(60)]
    ax = drawn(plots.plot_dependence(similarity(np.arange(60) % 5), names))
    boxes = [t.get_window_extent() for t in ax.get_yticklabels()]
    tops = sorted((box.y0, box.y1) for box in boxes)
    assert len(tops) == 60
    assert all(b[0] >= a[1] - 1 for a, b in zip(tops, tops[1:], strict=False))
    assert max(map(len, tick_labels(ax.yaxis))) == 24


@pytest.mark.parametrize(
    ("matrix", "more", "message"),
    [
        (np.ones((2, 3)), {}, r"`dependence` must be a square.*\(2, 3\)"),
        (np.full((2, 2), np.nan), {}, "between 0 and 1"),
        (2 * np.eye(2), {}, "between 0 and 1.*2.0"),
        (np.array([[1, 0.5], [0, 1]]), {}, "symmetric"),
        (np.eye(3), {"names": ["a", "b"]}, "`names` has 2 names; it must have 3"),
        (np.eye(3), {"partition": [0, 1]}, r"`partition` has shape \(2,\)"),
    ],
)
def test_matrices_that_are_not_of_the_kind_are_refused(matrix, more, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_dependence(matrix, **more)


# --- chains ---


def statistics(num_draws, warmup=False, most_views=1, seed=0):
    rng = np.random.default_rng(seed)
    axes = "chain", "draw"
    size = np.linspace(4, 40, num_draws).astype(int)
    found = {
        "log_joint": (axes, -rng.uniform(90, 100, (2, num_draws))),
        "num_clusters": ((*axes, "views"), rng.integers(1, 4, (2, num_draws, 3))),
        "num_views": (axes, rng.integers(1, most_views + 1, (2, num_draws))),
    }
    if warmup:
        return xr.Dataset(found, coords={"subsample_size": ("draw", size)})
    found["subsample_size"] = axes, np.full((2, num_draws), 40)
    return xr.Dataset(found)


def test_trace_has_what_does_not_depend_on_labels():
    own = statistics(30, most_views=3)
    axes = plots.plot_trace({"sample_stats": own})
    assert axes.shape == (3, 1)
    drawn(axes[0, 0])
    labels = [ax.get_ylabel() for ax in axes[:, 0]]
    assert labels == ["log joint, nats", "clusters", "views"]
    wanted = own["log_joint"], own["num_clusters"].sum("views"), own["num_views"]
    for ax, values in zip(axes[:, 0], wanted, strict=True):
        for chain, line in enumerate(ax.lines):
            np.testing.assert_array_equal(line.get_ydata(), values[chain])
            np.testing.assert_array_equal(line.get_xdata(), np.arange(30))
    assert axes[-1, 0].get_xlabel() == "draw"
    legend = axes[0, 0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["0", "1"]
    turned = plots.plot_trace({"sample_stats": own.transpose("views", "draw", ...)})
    for ax, other in zip(axes.flat, turned.flat, strict=True):
        for line, same in zip(ax.lines, other.lines, strict=True):
            np.testing.assert_array_equal(line.get_xydata(), same.get_xydata())
    # Without views there is no panel of them.
    assert plots.plot_trace({"sample_stats": statistics(30)}).shape == (2, 1)


def test_trace_of_the_warmup_is_by_the_rows_included():
    before, own = statistics(8, warmup=True, seed=1), statistics(30)
    axes = plots.plot_trace({"sample_stats": own, "warmup_sample_stats": before})
    assert axes.shape == (2, 2)
    drawn(axes[0, 0])
    left, right = axes[0]
    size = before["subsample_size"].values
    np.testing.assert_array_equal(left.lines[1].get_xdata(), size)
    expected = before["log_joint"].values[1] / size
    np.testing.assert_allclose(left.lines[1].get_ydata(), expected)
    assert left.get_ylabel() == "log joint a row, nats"
    np.testing.assert_array_equal(right.lines[0].get_ydata(), own["log_joint"][0])
    assert [ax.get_xlabel() for ax in axes[1]] == ["rows included", "draw"]
    assert [ax.get_title() for ax in axes[0]] == ["warm-up", "draws of the posterior"]
    assert axes[1, 0].get_ylim() == axes[1, 1].get_ylim()
    # A schedule that has all rows in from the start.
    before = before.assign_coords(subsample_size=("draw", np.full(8, 40)))
    axes = plots.plot_trace({"sample_stats": own, "warmup_sample_stats": before})
    assert axes[1, 0].get_xlabel() == "step of the warm-up"
    np.testing.assert_array_equal(axes[0, 0].lines[0].get_xdata(), np.arange(8))


def test_trace_draws_into_axes_that_are_given():
    data = {"sample_stats": statistics(5)}
    _, given = plt.subplots(2)
    found = plots.plot_trace(data, ax=given)
    assert found[:, 0].tolist() == given.tolist()
    with pytest.raises(ValueError, match="`ax` has 1 Axes, but 2 x 1 are needed"):
        plots.plot_trace(data, ax=given[0])
    with pytest.raises(ValueError, match="'sample_stats' with.*'log_joint'"):
        plots.plot_trace({"posterior": statistics(5)})


# --- the table ---

TABLE = np.array(
    [[10.0, 1.0, 5.0], [30.0, np.nan, 5.0], [20.0, 2.0, 7.0], [20.0, 8.0, 6.0]]
)
Z = np.array([[0, 1, 1, 1], [0, 0, 1, 0], [-1, -1, -1, -1]])
VIEW = np.array([1, 0, 1])


def test_table_is_blocked_by_view_and_cluster():
    ax = drawn(plots.plot_table(TABLE, Z, VIEW, ["a", "b", "c"]))
    first, second = (image.get_array() for image in ax.images)
    # View 0 has column 1, and its rows 1, 2, 3 first; view 1 the others.
    np.testing.assert_allclose(first.filled(-1), [[-1], [0.5], [1], [0]])
    np.testing.assert_allclose(second, [[0, 0], [1, 0], [0.5, 0.5], [0.5, 1]])
    assert tick_labels(ax.xaxis) == ["b", "a", "c"]
    assert ax.get_xticks().tolist() == [0.5, 2.0, 3.0]
    assert [image.get_extent()[:2] for image in ax.images] == [[0, 1], [1.5, 3.5]]
    lines = [own.get_segments()[0].tolist() for own in ax.collections]
    assert lines == [[[0, 3], [1, 3]], [[1.5, 3], [3.5, 3]]]
    assert tick_labels(ax.child_axes[0].xaxis) == ["0\n(2)", "1\n(2)"]
    assert "missing: grey" in ax.get_title()
    assert "4 rows, in each view" in ax.get_ylabel()


def test_table_of_words_and_without_views():
    table = pd.DataFrame({"kind": ["b", "a", None, "c"], "size": [3, 1, 2, 2]})
    ax = drawn(plots.plot_table(table, [1, 0, 0, 0]))
    (image,) = ax.images
    expected = [[0, 0], [-1, 0.5], [1, 0.5], [0.5, 1]]
    np.testing.assert_allclose(image.get_array().filled(-1), expected)
    assert tick_labels(ax.xaxis) == ["kind", "size"]
    assert tick_labels(ax.child_axes[0].xaxis) == ["2 clusters"]
    full = plots.plot_table(table[["size"]], [0, 0, 0, 0])
    assert "missing" not in full.get_title()


def test_large_table():
    rng = np.random.default_rng(0)
    view = rng.integers(4, size=120)
    z = rng.integers(9, size=(4, 2000))
    ax = drawn(plots.plot_table(rng.normal(size=(2000, 120)), z, view))
    assert len(ax.images) == 4 and ax.get_xlabel() == "120 columns"
    assert tick_labels(ax.xaxis) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TABLE, Z[:, :3], VIEW), r"`z` has shape \(3, 3\).*4 rows"),
        ((TABLE, Z, [0, 1]), "`view` must have the view, 0 to 2"),
        ((TABLE, Z, [0, 1, 3]), "`view` must have the view, 0 to 2"),
        ((TABLE, Z, [0, 1, 2]), "In `z` row 0 has no cluster"),
        ((TABLE, Z, VIEW, ["a"]), "`names` has 1 names; it must have 3"),
        ((TABLE[0], Z), r"`table` must be an array \[rows, columns\]"),
    ],
)
def test_tables_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_table(*arguments)


# --- predictions ---


def test_histogram_of_data_and_draws():
    rng = np.random.default_rng(0)
    observed = np.append(rng.normal(size=200), [np.nan] * 50)
    draws = rng.normal(size=(40, 250))
    draws[:, 200:] += 100  # of cells that are missing
    ax = drawn(plots.plot_predictive(observed, draws, "length"))
    data, mean = (own.get_data() for own in ax.patches[:2])
    for own in (data, mean):
        assert np.sum(own.values * np.diff(own.edges)) == pytest.approx(1, abs=0.02)
    expected = np.histogram(observed[:200], data.edges, density=True)[0]
    np.testing.assert_allclose(data.values, expected)
    assert ax.get_xlim()[1] < 10 and ax.get_xlabel() == "length"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["data", "draws, mean", "90 %"]


def test_ecdf_of_data_and_draws():
    observed, draws = np.array([1.0, 2.0, 4.0]), np.array([[0.0, 3.0]] * 5)
    ax = drawn(plots.plot_predictive(observed, draws, kind="ecdf"))
    for line, values in zip(ax.lines, (observed, draws[0]), strict=True):
        x, y = line.get_xdata(), line.get_ydata()
        expected = (values[:, None] <= x).mean(0)
        np.testing.assert_allclose(y, expected)
    assert ax.get_ylabel() == "share of values up to it"


def test_bars_of_categories():
    observed = np.array([0, 0, 1, -1])  # the last is missing
    draws = np.array([[0, 1, 1, 3], [0, 0, 0, 3]])
    ax = drawn(plots.plot_predictive(observed, draws, categories=["p", "q", "r"]))
    heights = [bar.get_height() for bar in ax.patches]
    np.testing.assert_allclose(heights, [2 / 3, 1 / 3, 0])
    points = ax.lines[0].get_ydata()
    np.testing.assert_allclose(points, [2 / 3, 1 / 3, 0])
    assert tick_labels(ax.xaxis) == ["p", "q", "r"]
    # Of whole numbers that are many, the figure is a histogram.
    many = np.arange(60)
    ax = plots.plot_predictive(many, many[None])
    assert ax.get_ylabel() == "density"


def test_predictions_are_drawn_into_axes_that_are_given():
    _, given = plt.subplots()
    assert plots.plot_predictive([0.5], [[0.5]], ax=given) is given
    assert plots.plot_similarity(np.eye(2), ax=plt.subplots()[1]) is plt.gcf().axes[0]
    given = plt.subplots()[1]
    assert plots.plot_table(TABLE, Z[0], ax=given) is given


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (([0.5], [[0.5]]), {"kind": "pie"}, "`kind` must be one of.*'pie'"),
        (([0.5], [0.5]), {}, r"`predicted` \(draws, rows\)"),
        (([np.nan], [[0.5]]), {}, "nothing to show"),
        (([0.5, 1], [[0.5, np.nan]]), {}, "`predicted` has NaN"),
        (([0], [[2]]), {"categories": ["a", "b"]}, "2 names, but there is a value 2"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(arguments, more, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_predictive(*arguments, **more)


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    own = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"numpyro_subanneal\[examples\]"):
        plots.plot_similarity(np.eye(2))
