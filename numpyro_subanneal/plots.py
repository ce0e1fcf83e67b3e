# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Figures of partitions, views and predictions.

Each function draws into the Axes that it is given, or into those of a new figure, and
returns them. They need matplotlib, which the extra `examples` installs. Colours are
told apart in any kind of colour vision.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from numpyro_subanneal.typing import Array

__all__ = [
    "plot_dependence",
    "plot_predictive",
    "plot_similarity",
    "plot_table",
    "plot_trace",
    "similarity_order",
]

# Those of Okabe and Ito, but for yellow and black.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_MAP = "viridis"
_MISSING = "0.75"

# More names than this cannot be read on an axis, nor are optimal leaf orders quick.
_MOST_NAMES = 100
_MOST_LEAVES = 200
_LONGEST_NAME = 24


def _pyplot():
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib. Install it, or the extra that has it: "
            "`pip install 'numpyro_subanneal[examples]'`."
        ) from error
    return plt


# --- chains ---------------------------------------------------------------------------


def plot_trace(data: Any, *, ax: Array | None = None) -> np.ndarray:
    """
    What can be compared between draws whatever their clusters are called: the log
    joint, the number of clusters (in all views together) and, where there are several
    in some draw, that of views. With the warm-up in `data`, it is in a column of its
    own, by the number of rows included, and the log joint there is divided by it.

    :param data: what :func:`~numpyro_subanneal.inference_data.to_arviz` or
        :func:`arviz.from_numpyro` gives.
    :param ax: Axes to draw into, as many as are returned.
    :return: Axes ``[quantities, 1]``, or with a warm-up ``[quantities, 2]``.
    :raises ValueError: if `data` has no such statistics, or `ax` has another size.
    """
    plt = _pyplot()
    stats = {}
    for group in ("warmup_sample_stats", "sample_stats"):
        if group in data:
            stats[group] = _statistics(data[group])
    if "log_joint" not in stats.get("sample_stats", {}):
        raise ValueError(
            "`data` must have a group 'sample_stats' with the statistic 'log_joint', "
            "as `to_arviz` gives it."
        )
    labels = {"log_joint": "log joint, nats", "num_clusters": "clusters"}
    views = [own["num_views"] for own in stats.values() if "num_views" in own]
    if any((v > 1).any() for v in views):
        labels["num_views"] = "views"
    names = [name for name in labels if name in stats["sample_stats"]]
    shape = len(names), len(stats)
    if ax is None:
        width = 7.0 if len(stats) == 1 else 10.0
        _, axes = plt.subplots(
            *shape,
            figsize=(width, 0.7 + 1.8 * len(names)),
            sharex="col",
            squeeze=False,
            layout="constrained",
        )
    else:
        axes = np.asarray(ax, object)
        if axes.size != shape[0] * shape[1]:
            raise ValueError(
                f"`ax` has {axes.size} Axes, but {shape[0]} x {shape[1]} are needed: "
                f"{', '.join(names)}, in {' and '.join(stats)}."
            )
        axes = axes.reshape(shape)
    for own, (group, values) in zip(axes.T, stats.items(), strict=True):
        warmup = group.startswith("warmup")
        _trace_column(own, values, names, labels, warmup)
    for row in axes[1:]:  # counts are on one scale throughout
        bottom = min(own.get_ylim()[0] for own in row)
        top = max(own.get_ylim()[1] for own in row)
        for own in row:
            own.set_ylim(bottom, top)
    if len(axes[0, -1].lines) > 1:
        axes[0, -1].legend(
            title="chain", fontsize="small", loc="upper left", bbox_to_anchor=(1, 1)
        )
    return axes


def _statistics(group) -> dict[str, np.ndarray]:
    """``[chains, draws]``, views added up."""
    wanted = "log_joint", "num_clusters", "num_views", "subsample_size"
    found = {}
    for name in wanted:
        if name in group.variables:
            own = group[name]
            if "chain" not in own.dims:
                own = own.broadcast_like(group["log_joint"])
            own = own.transpose("chain", "draw", ...).values
            found[name] = own.reshape(*own.shape[:2], -1).sum(-1)
    return found


def _trace_column(axes, values, names, labels, warmup):
    num_chains, num_draws = values["log_joint"].shape
    x = np.broadcast_to(np.arange(num_draws), (num_chains, num_draws))
    where = "step of the warm-up" if warmup else "draw"
    size = values.get("subsample_size")
    if warmup and size is not None and np.ptp(size) > 0:
        x, where = size, "rows included"
    for ax, name in zip(axes, names, strict=True):
        y, label = values[name], labels[name]
        if warmup and name == "log_joint" and size is not None:
            y, label = y / np.maximum(size, 1), "log joint a row, nats"
        for chain in range(num_chains):
            colour = _COLOURS[chain % len(_COLOURS)]
            style = "default" if name == "log_joint" else "steps-mid"
            ax.plot(
                x[chain], y[chain], color=colour, lw=0.9, drawstyle=style, label=chain
            )
        ax.set_ylabel(label)
        if name != "log_joint":
            ax.yaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3, lw=0.5)
        ax.margins(x=0.01)
    axes[0].set_title("warm-up" if warmup else "draws of the posterior")
    axes[-1].set_xlabel(where)


# --- matrices -------------------------------------------------------------------------


def similarity_order(similarity: Array, partition: Array | None = None) -> np.ndarray:
    """
    An order in which what is similar is near: that of the leaves of average linkage of
    ``1 - similarity``. With a partition its clusters come one after another, from the
    largest, and the order is that within each.

    :param similarity: probabilities that two are together, ``[N, N]``, symmetric.
    :param partition: labels ``[N]``.
    :return: positions ``[N]``.
    :raises ValueError: naming what is not of this kind.
    """
    # What jax depends on.
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    similarity = _checked_matrix("similarity", similarity)
    num = len(similarity)
    leaves = np.arange(num)
    if num > 2:
        distance = squareform(1 - similarity, checks=False)
        optimal = num <= _MOST_LEAVES
        leaves = leaves_list(linkage(distance, "average", optimal_ordering=optimal))
    if partition is None:
        return leaves
    place = np.empty(num, int)
    place[leaves] = np.arange(num)
    return np.lexsort((place, _size_rank(_checked_labels(partition, num))))


def plot_similarity(
    similarity: Array,
    partition: Array | None = None,
    names: Sequence[str] | None = None,
    *,
    ax: Any = None,
) -> Any:
    """
    The share of draws in which two rows are in one cluster, rows ordered by
    :func:`similarity_order`.

    :param similarity: ``[N, N]``.
    :param partition: labels ``[N]`` of clusters, which are then marked.
    :param names: of the rows ``[N]``; they are shown where they can be read, so of 100
        rows at most.
    :param ax: Axes to draw into.
    :return: the Axes.
    :raises ValueError: naming the argument that does not fit.
    """
    title = "Share of draws with two rows in one cluster"
    return _heat_map("similarity", similarity, partition, names, title, "rows", ax)


def plot_dependence(
    dependence: Array,
    names: Sequence[str] | None = None,
    partition: Array | None = None,
    *,
    ax: Any = None,
) -> Any:
    """
    The share of draws in which two columns are in one view, columns ordered by
    :func:`similarity_order`.

    :param dependence: ``[D, D]``, as :meth:`Posterior.dependence` gives it.
    :param names: of the columns ``[D]``.
    :param partition: views ``[D]`` of one draw, which are then marked.
    :param ax: Axes to draw into.
    :return: the Axes.
    :raises ValueError: naming the argument that does not fit.
    """
    title = "Share of draws with two columns in one view"
    return _heat_map("dependence", dependence, partition, names, title, "columns", ax)


def _heat_map(argument, matrix, partition, names, title, what, ax):
    plt = _pyplot()
    matrix = _checked_matrix(argument, matrix)
    num = len(matrix)
    names = _checked_names(names, num)
    order = similarity_order(matrix, partition)
    legible = names is not None and num <= _MOST_NAMES
    if ax is None:
        size = 3.4 + 0.17 * num if legible else 6.5
        _, ax = plt.subplots(figsize=(size + 1.2, size), layout="constrained")
    image = ax.imshow(
        matrix[np.ix_(order, order)], vmin=0, vmax=1, cmap=_MAP, aspect="equal"
    )
    if partition is not None:
        labels = np.asarray(partition)[order]
        ends = np.flatnonzero(labels[1:] != labels[:-1]) + 0.5
        starts = np.concatenate([[-0.5], ends])
        stops = np.concatenate([ends, [num - 0.5]])
        for low, high in zip(starts, stops, strict=True):
            box = [low, high, high, low, low], [low, low, high, high, low]
            ax.plot(*box, color="white", lw=1.2 if len(starts) < 50 else 0.5)
        ax.set_xlim(-0.5, num - 0.5)
        ax.set_ylim(num - 0.5, -0.5)
    if legible:
        shown = [names[i] for i in order]
        ax.set_xticks(range(num), shown, rotation=90, fontsize=7)
        ax.set_yticks(range(num), shown, fontsize=7)
    elif partition is not None:
        # Clusters wide enough for a line of text.
        wide = stops - starts >= 0.03 * num
        middle = ((starts + stops) / 2)[wide]
        shown = [
            f"{labels[round(low + 0.5)]}: {high - low:,.0f}"
            for low, high in zip(starts[wide], stops[wide], strict=True)
        ]
        part = "view" if what == "columns" else "cluster"
        ax.set_xticks(middle, shown, rotation=90, fontsize=8)
        ax.set_yticks(middle, shown, fontsize=8)
        ax.set_ylabel(f"{part}: {what}")
    else:
        ax.set_xticks([])
        ax.set_yticks([])
    by = f"in the order of {'a partition' if partition is not None else 'similarity'}"
    ax.set_xlabel(f"{num:,} {what}, {by}")
    ax.set_title(title)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.7)
    bar.set_label("share of draws")
    return ax


# --- the table ------------------------------------------------------------------------


def plot_table(
    table: Any,
    z: Array,
    view: Array | None = None,
    names: Sequence[str] | None = None,
    *,
    ax: Any = None,
) -> Any:
    """
    The cells of a table, of one draw: columns blocked by view and, in each, rows by
    cluster, the largest first. Cells are shown by their rank among the values of the
    column.

    :param table: a pandas DataFrame, of any types, or an array ``[rows, columns]``; NaN
        where a cell is missing.
    :param z: clusters of the rows, ``[rows]`` or with views ``[views, rows]``.
    :param view: view of each column ``[columns]``, in the order of the `table`'s; one
        view of all by default. The models have columns by type, so that of a
        :class:`~numpyro_subanneal.tables.Table` made of ``df``, give ``df[[c.name for c
        in table.columns]]``.
    :param names: of the columns; by default those of the DataFrame.
    :param ax: Axes to draw into.
    :return: the Axes.
    :raises ValueError: naming the argument that does not fit.
    """
    plt = _pyplot()
    ranks, own_names = _ranks(table)
    num_rows, num_columns = ranks.shape
    names = _checked_names(own_names if names is None else names, num_columns)
    z = np.asarray(z)
    if z.ndim == 1:
        z = z[None]
    if z.ndim != 2 or z.shape[1] != num_rows:
        raise ValueError(
            f"`z` has shape {z.shape}; with {num_rows} rows in the table it must be "
            f"({num_rows},) or (views, {num_rows}), of one draw."
        )
    view = np.zeros(num_columns, int) if view is None else np.asarray(view)
    if view.shape != (num_columns,) or view.min() < 0 or view.max() >= len(z):
        raise ValueError(
            f"`view` must have the view, 0 to {len(z) - 1}, of each of the "
            f"{num_columns} columns, got {view.tolist()}."
        )
    views = np.unique(view)
    if (z[views] < 0).any():
        row = int(np.argwhere(z[views] < 0)[0, 1])
        raise ValueError(
            f"In `z` row {row} has no cluster (-1), as in a draw of the warm-up, in a "
            "view that has columns. Give a draw of the posterior, with its own `view`."
        )
    if ax is None:
        width = min(3.0 + 0.24 * num_columns + 0.1 * len(views), 40.0)
        _, ax = plt.subplots(figsize=(max(width, 5.0), 6.5), layout="constrained")
    colours = plt.get_cmap(_MAP).with_extremes(bad=_MISSING)
    gap, left = 0.5, 0.0
    ticks, shown, middles, heads = [], [], [], []
    for v in views:
        chosen = np.flatnonzero(view == v)
        rank = _size_rank(z[v])
        order = np.argsort(rank, kind="stable")
        right = left + len(chosen)
        image = ax.imshow(
            ranks[np.ix_(order, chosen)],
            aspect="auto",
            cmap=colours,
            vmin=0,
            vmax=1,
            extent=(left, right, num_rows, 0),
            # Else columns run into each other where rows are smaller than a pixel.
            interpolation="nearest",
        )
        ends = np.cumsum(np.bincount(rank))[:-1]
        # As thin as it takes to leave rows visible between them.
        lw = float(np.clip(150 / max(len(ends), 1), 0.3, 1.5))
        ax.hlines(ends, left, right, color="white", lw=lw)
        ticks += (left + 0.5 + np.arange(len(chosen))).tolist()
        shown += [names[i] for i in chosen]
        middles.append((left + right) / 2)
        count = len(ends) + 1
        heads.append(f"{v}\n({count})" if len(views) > 1 else f"{count} clusters")
        left = right + gap
    ax.set_xlim(0, left - gap)
    ax.set_ylim(num_rows, 0)
    if num_columns <= _MOST_NAMES:
        ax.set_xticks(ticks, shown, rotation=90, fontsize=8)
    else:
        ax.set_xticks([])
        ax.set_xlabel(f"{num_columns:,} columns")
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    where = "in each view by cluster" if len(views) > 1 else "by cluster"
    ax.set_ylabel(f"{num_rows:,} rows, {where}")
    top = ax.secondary_xaxis("top")
    top.set_xticks(middles, heads, fontsize=8)
    top.tick_params(length=0)
    top.spines[:].set_visible(False)
    if len(views) > 1:
        top.set_xlabel("view (number of its clusters)")
    missing = " (missing: grey)" if np.isnan(ranks).any() else ""
    ax.set_title(f"Cells of the table, one draw{missing}")
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.7, ticks=[0, 1])
    bar.ax.set_yticklabels(["least", "most"])
    bar.set_label("rank in the column")
    return ax


def _ranks(table) -> tuple[np.ndarray, list[str]]:
    """Cells on a scale from 0 to 1, NaN where they are missing."""
    if hasattr(table, "columns"):
        missing = table.isna().to_numpy()
        columns = [table.iloc[:, i].to_numpy() for i in range(table.shape[1])]
        names = [str(name) for name in table.columns]
    else:
        cells = np.ma.filled(np.ma.asarray(table).astype(float), np.nan)
        if cells.ndim != 2:
            raise ValueError(
                f"`table` must be an array [rows, columns], got shape {cells.shape}."
            )
        missing = np.isnan(cells)
        columns = list(cells.T)
        names = [str(i) for i in range(len(columns))]
    ranks = np.full(missing.shape, np.nan)
    for d, column in enumerate(columns):
        live = ~missing[:, d]
        values = column[live]
        if values.dtype == object and len({type(v) for v in values}) > 1:
            values = values.astype(str)
        _, rank = np.unique(values, return_inverse=True)
        ranks[live, d] = rank / max(rank.max(initial=0), 1)
    return ranks, names


# --- predictions ----------------------------------------------------------------------


def plot_predictive(
    observed: Array,
    predicted: Array,
    name: str | None = None,
    *,
    kind: str | None = None,
    categories: Sequence[str] | None = None,
    ax: Any = None,
) -> Any:
    """
    A column of the table beside draws of it: what is observed, and of the draws the
    mean and the middle 90 % at each point.

    :param observed: values ``[rows]``; NaN, or in bars -1, where a cell is missing.
    :param predicted: draws ``[draws, rows]``, such as a column of those of
        :meth:`Posterior.sample_rows`; where they have as many rows as `observed`, those
        of its missing cells are left out.
    :param name: of the column.
    :param kind: "histogram", "ecdf" (the share of values up to each) or "bars". By
        default bars of integers, or of at most 30 values, and else a histogram.
    :param categories: names of the values 0, 1, ... of bars.
    :param ax: Axes to draw into.
    :return: the Axes.
    :raises ValueError: naming the argument that does not fit.
    """
    plt = _pyplot()
    kinds = {"histogram": _histogram, "ecdf": _ecdf, "bars": _bars}
    if kind not in (None, *kinds):
        raise ValueError(f"`kind` must be one of {list(kinds)}, got {kind!r}.")
    observed = np.ma.filled(np.ma.asarray(observed).astype(float), np.nan)
    predicted = np.asarray(predicted, float)
    if observed.ndim != 1 or predicted.ndim != 2:
        raise ValueError(
            "`observed` must have shape (rows,) and `predicted` (draws, rows), of one "
            f"column; they have {observed.shape} and {predicted.shape}."
        )
    live = ~np.isnan(observed)
    if kind is None:
        values = np.unique(np.concatenate([observed[live], predicted.ravel()]))
        whole = (values == np.round(values)).all()
        kind = "bars" if whole and len(values) <= 30 else "histogram"
    if kind == "bars":
        live &= observed >= 0
    if not live.any() or predicted.size == 0:
        raise ValueError(
            "There is nothing to show: `observed` or `predicted` is empty."
        )
    if predicted.shape[1] == len(observed):
        predicted = predicted[:, live]
    if np.isnan(predicted).any():
        raise ValueError("`predicted` has NaN among its draws.")
    if ax is None:
        _, ax = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    kinds[kind](ax, observed[live], predicted, categories)
    ax.set_title("Predictive draws and data")
    ax.set_xlabel("value" if name is None else name)
    room = 1.02 if kind == "ecdf" else 1.2  # for the legend
    ax.set_ylim(0, room * ax.dataLim.ymax)
    place = "upper left" if kind == "ecdf" else "upper right"
    ax.legend(fontsize="small", framealpha=0.8, loc=place)
    return ax


def _band(values):
    """Mean and middle 90 % of the draws, first axis."""
    low, high = np.quantile(values, [0.05, 0.95], axis=0)
    return values.mean(0), low, high


def _histogram(ax, observed, predicted, _):
    # Bins for the data; draws may lie far out, and are then off the figure.
    num = np.clip(len(np.histogram_bin_edges(observed, bins="auto")) - 1, 15, 60)
    edges = np.histogram_bin_edges(observed, num)
    width = edges[1] - edges[0]
    low, high = np.quantile(predicted, [0.005, 0.995])
    before = int(np.clip(np.ceil((edges[0] - low) / width), 0, 20))
    after = int(np.clip(np.ceil((high - edges[-1]) / width), 0, 20))
    edges = edges[0] + width * np.arange(-before, len(edges) + after)

    def density(x):
        return np.histogram(x, edges)[0] / (len(x) * width)

    mean, low, high = _band(np.array([density(x) for x in predicted]))
    ax.stairs(density(observed), edges, fill=True, color="0.7", label="data")
    ax.stairs(mean, edges, color=_COLOURS[0], lw=1.5, label="draws, mean")
    _fill(ax, edges, np.append(low, low[-1]), np.append(high, high[-1]))
    ax.set_ylabel("density")


def _ecdf(ax, observed, predicted, _):
    both = np.concatenate([observed, np.quantile(predicted, [0.005, 0.995])])
    x = np.linspace(both.min(), both.max(), 300)

    def share(values):
        return np.searchsorted(np.sort(values), x, side="right") / len(values)

    mean, low, high = _band(np.array([share(own) for own in predicted]))
    ax.step(x, share(observed), where="post", color="0.4", lw=2, label="data")
    ax.step(x, mean, where="post", color=_COLOURS[0], lw=1.5, label="draws, mean")
    _fill(ax, x, low, high)
    ax.set_ylabel("share of values up to it")


def _fill(ax, x, low, high):
    ax.fill_between(
        x, low, high, step="post", color=_COLOURS[0], alpha=0.25, lw=0, label="90 %"
    )


def _bars(ax, observed, predicted, categories):
    values = np.unique(np.concatenate([observed, predicted.ravel()]))
    if categories is not None:
        if values.max() >= len(categories):
            raise ValueError(
                f"`categories` has {len(categories)} names, but there is a value "
                f"{values.max():g}; they are names of 0, 1, ..."
            )
        values = np.arange(len(categories))

    def shares(x):
        return (x[..., None] == values).mean(-2)

    mean, low, high = _band(np.array([shares(x) for x in predicted]))
    at = np.arange(len(values))
    ax.bar(at, shares(observed), width=0.8, color="0.7", label="data")
    ax.errorbar(
        at,
        mean,
        # Rounding may put the mean of equal shares outside of them.
        yerr=np.maximum([mean - low, high - mean], 0),
        fmt="o",
        color=_COLOURS[0],
        ms=5,
        capsize=3,
        label="draws, mean and 90 %",
    )
    names = [f"{v:g}" for v in values] if categories is None else categories
    names = _checked_names(names, len(values))
    ax.set_xticks(at, names, fontsize="small")
    if sum(map(len, names)) > 45:
        ax.tick_params("x", rotation=30 if len(names) <= 10 else 90)
        if len(names) <= 10:
            for label in ax.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
    ax.set_ylabel("share")


# --- arguments ------------------------------------------------------------------------


def _checked_matrix(argument, matrix) -> np.ndarray:
    matrix = np.asarray(matrix, float)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
        raise ValueError(
            f"`{argument}` must be a square matrix, got shape {matrix.shape}."
        )
    # (NaN fails both comparisons.)
    if not (matrix >= -1e-6).all() or not (matrix <= 1 + 1e-6).all():
        raise ValueError(
            f"`{argument}` must have shares between 0 and 1; it has values from "
            f"{matrix.min()} to {matrix.max()}."
        )
    if not np.allclose(matrix, matrix.T, atol=1e-5):
        raise ValueError(f"`{argument}` must be symmetric.")
    return matrix


def _checked_labels(partition, num) -> np.ndarray:
    partition = np.asarray(partition)
    if partition.shape != (num,):
        raise ValueError(
            f"`partition` has shape {partition.shape}; it must be ({num},), a label of "
            "each."
        )
    return partition


def _checked_names(names, num) -> list[str] | None:
    """Names, shortened so that the figure is not all names."""
    if names is None:
        return None
    names = [str(name) for name in names]
    if len(names) != num:
        raise ValueError(f"`names` has {len(names)} names; it must have {num}.")
    longest = _LONGEST_NAME
    return [n if len(n) <= longest else n[: longest - 1] + "…" for n in names]


def _size_rank(labels) -> np.ndarray:
    """Clusters numbered from the largest, of equal ones from the first label."""
    _, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.argsort(np.argsort(-counts, kind="stable"))[index]
