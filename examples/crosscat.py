# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
CrossCat: which columns of a table belong together
==================================================

Cross-categorization [1, 2] of a table of columns of any kind, with missing cells:
columns in views, and in each view rows in clusters. Without arguments the table is that
of the package `palmerpenguins`: 344 penguins near Palmer Station, Antarctica [3], with
the year and the place where each was observed, its species, sex and measurements. With
the path of a CSV file, it is that one: a column of zeros and ones is binary, one of
words has categories, as has one of at most `--most-categories` whole numbers, and the
others are real; a column of words that are all different names the rows.

Printed are the views of the draw of highest log joint; the figures are the share of
draws in which two columns are in the same view, and the table with its columns blocked
by view and its rows, in each view, by cluster.

**References:**

1. *Cross-categorization: A method for discovering multiple overlapping clusterings*, V.
   K. Mansinghka, E. Jonas, C. Petschulat, B. Cronin, P. Shafto, J. B. Tenenbaum (2009)
2. *Scaling Nonparametric Bayesian Inference via Subsample-Annealing*, F. Obermeyer, J.
   Glidden, E. Jonas (2014)
3. *Ecological Sexual Dimorphism and Environmental Variability within a Community of
   Antarctic Penguins (Genus Pygoscelis)*, K. B. Gorman, T. D. Williams, W. R. Fraser
   (2014)
"""

import argparse
from functools import partial
from pathlib import Path

import arviz as az
from jax import random
import matplotlib
import numpy as np
from palmerpenguins import load_penguins
import pandas as pd

import numpyro
from numpyro.infer import MCMC

from numpyro_subanneal import SubsampleAnnealedGibbs
from numpyro_subanneal.models import crosscat

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def load_table(path: str | None) -> pd.DataFrame:
    """The table, without a column that names the rows."""
    table = load_penguins() if path is None else pd.read_csv(path)
    words = [c for c in table if not pd.api.types.is_numeric_dtype(table[c])]
    names = [c for c in words if table[c].nunique() == len(table)]
    table = table.drop(columns=names)
    empty = [c for c in table if table[c].notna().sum() == 0]
    if empty:
        print(f"Columns without a cell were left out: {', '.join(empty)}.")
    return table.drop(columns=empty)


def encode(table: pd.DataFrame, most_categories: int):
    """The arguments of the model, and the names of the columns in its order."""
    real, categorical, binary, num_categories = {}, {}, {}, []
    for name in table:
        column = table[name]
        values = column.dropna().unique()
        is_number = pd.api.types.is_numeric_dtype(column)
        if is_number and set(values) <= {0, 1}:
            binary[name] = column.fillna(-1).to_numpy(int)
        elif is_number and not (
            len(values) <= most_categories and np.equal(np.mod(values, 1), 0).all()
        ):
            real[name] = column.to_numpy(float)
        else:
            codes, categories = pd.factorize(column, sort=True)
            categorical[name] = codes  # -1 where missing
            num_categories.append(len(categories))
    kinds = {"real": real, "categorical": categorical, "binary": binary}
    arrays = {
        kind: np.stack(list(columns.values()), 1)
        for kind, columns in kinds.items()
        if columns
    }
    return arrays, tuple(num_categories), [*real, *categorical, *binary]


def run(args, arrays, num_categories):
    model = partial(
        crosscat.mixed,
        num_categories=num_categories,
        num_clusters=args.num_clusters,
    )
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        thinning=args.thinning,
    )
    mcmc.run(random.key(args.seed), **arrays)
    return mcmc


def dependence(view: np.ndarray) -> np.ndarray:
    """Share of draws ``[draws, D]`` in which two columns are in the same view."""
    return np.mean(view[:, :, None] == view[:, None, :], axis=0)


def print_views(names, view, z):
    for v in range(view.max() + 1):
        columns = [name for name, own in zip(names, view, strict=True) if own == v]
        sizes = np.sort(np.bincount(z[v]))[::-1]
        print(f"\nview {v}: {', '.join(columns)}")
        print(f"  {len(sizes)} clusters of {', '.join(map(str, sizes))} rows")


def plot_dependence(names, matrix, view, path):
    order = np.argsort(view, kind="stable")
    size = 2.5 + 0.22 * len(names)
    fig, ax = plt.subplots(figsize=(size + 1, size), layout="constrained")
    image = ax.imshow(matrix[np.ix_(order, order)], vmin=0, vmax=1, cmap="viridis")
    ax.set_xticks(range(len(names)), [names[i] for i in order], rotation=90)
    ax.set_yticks(range(len(names)), [names[i] for i in order])
    ax.tick_params(labelsize="small")
    ax.set_title("Share of draws with two columns in one view")
    fig.colorbar(image, shrink=0.8)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def plot_table(names, columns, view, z, path):
    """The columns on their ranks, from 0 to 1: blocked by view and cluster."""
    views = range(view.max() + 1)
    widths = [np.sum(view == v) for v in views]
    fig, axes = plt.subplots(
        1,
        len(widths),
        figsize=(3 + 0.25 * sum(widths) + 0.4 * len(widths), 6.5),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    colours = plt.get_cmap("viridis").with_extremes(bad="white")
    for v, ax in zip(views, axes[0], strict=True):
        # Clusters from the largest.
        rank = np.argsort(np.argsort(-np.bincount(z[v]), kind="stable"))
        order = np.argsort(rank[z[v]], kind="stable")
        chosen = np.flatnonzero(view == v)
        ax.imshow(
            columns[np.ix_(order, chosen)],
            aspect="auto",
            interpolation="nearest",
            cmap=colours,
            vmin=0,
            vmax=1,
        )
        ends = np.cumsum(np.bincount(rank[z[v]]))[:-1]
        ax.hlines(ends - 0.5, -0.5, len(chosen) - 0.5, color="red", lw=1)
        ax.set_xticks(range(len(chosen)), [names[i] for i in chosen], rotation=90)
        ax.tick_params(labelsize="small")
        ax.set_yticks([])
        ax.set_title(f"view {v}", fontsize="medium")
    axes[0, 0].set_ylabel("rows, in each view sorted by cluster")
    fig.suptitle("Cells by their rank in the column (missing: white)")
    fig.savefig(path, dpi=150)
    plt.close(fig)


def ranks(arrays) -> np.ndarray:
    """Cells of all columns on a scale from 0 to 1; NaN where missing."""
    cells = np.concatenate([np.asarray(x, float) for x in arrays.values()], 1)
    for name in arrays:
        if name != "real":
            cells = np.where(cells == -1, np.nan, cells)
    table = pd.DataFrame(cells)
    rank = table.rank(method="dense")
    return ((rank - 1) / np.maximum(rank.max() - 1, 1)).to_numpy()


def main(args):
    table = load_table(args.path)
    arrays, num_categories, names = encode(table, args.most_categories)
    missing = int(table.isna().sum().sum())
    kinds = ", ".join(f"{x.shape[1]} {kind}" for kind, x in arrays.items())
    print(f"{len(table)} rows, columns: {kinds}; {missing} cells are missing.")

    idata = az.from_numpyro(run(args, arrays, num_categories))
    num_views = idata.sample_stats["num_views"].values
    log_joint = idata.sample_stats["log_joint"].values
    print(az.summary({"num_views": num_views, "log_joint": log_joint}).to_string())
    view = idata.posterior["view"].values
    chain, draw = np.unravel_index(log_joint.argmax(), log_joint.shape)
    best, z = view[chain, draw], idata.posterior["z"].values[chain, draw]
    print(
        "\nThe views shown are those of the draw of highest log joint: "
        f"{log_joint.max():.1f} nats, chain {chain + 1}, draw {draw + 1}."
    )
    print_views(names, best, z)

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    matrix = dependence(view.reshape(-1, len(names)))
    plot_dependence(names, matrix, best, out / "crosscat_dependence.png")
    plot_table(names, ranks(arrays), best, z, out / "crosscat_table.png")
    print(f"\n{out / 'crosscat_dependence.png'}: which columns belong together")
    print(f"{out / 'crosscat_table.png'}: the table, blocked by view and cluster")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("path", nargs="?", help="a CSV file; by default the penguins")
    parser.add_argument("--num-warmup", type=int, default=50)
    parser.add_argument("--num-samples", type=int, default=500)
    parser.add_argument("--num-chains", type=int, default=2)
    parser.add_argument("--thinning", type=int, default=5)
    parser.add_argument("--num-clusters", type=int, default=32)
    parser.add_argument("--most-categories", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="output", help="folder for the figures")
    args = parser.parse_args()
    numpyro.set_host_device_count(args.num_chains)
    main(args)
