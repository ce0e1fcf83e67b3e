# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Tour: a table with missing cells, from DataFrame to answers
===========================================================

The table is that of the package `palmerpenguins`, 344 penguins [1] with 19 cells
missing; some more are hidden, so that what is imputed can be compared with them. It is
sampled as a CrossCat model. Printed are the types that the columns were taken to be,
convergence of quantities without labels, the views, the most dependent columns, the
hidden cells as imputed, the most surprising cells and rows, what is predicted of a new
penguin, and the clusters of the point estimate. Figures, in the folder `--out`: the
chains through the anneal, dependence of columns, similarity of rows, the table blocked
by view and cluster, and predictions of a column.

**References:**

1. *Ecological Sexual Dimorphism and Environmental Variability within a Community of
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

from numpyro_subanneal import Posterior, SubsampleAnnealedGibbs, Table
from numpyro_subanneal.inference_data import collect_warmup, to_arviz
from numpyro_subanneal.models import crosscat
from numpyro_subanneal.plots import (
    plot_dependence,
    plot_predictive,
    plot_similarity,
    plot_table,
    plot_trace,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def hide(frame, num_cells, seed):
    """The table with some more cells missing, and where they are."""
    rng = np.random.default_rng(seed)
    known = np.argwhere(frame.notna().to_numpy())
    cells = known[rng.permutation(len(known))[:num_cells]]
    hidden = frame.astype(object)
    for row, column in cells:
        hidden.iat[row, column] = None
    return hidden.convert_dtypes(), cells


def run(args, table):
    model = partial(
        crosscat.mixed,
        num_categories=table.model_args["num_categories"],
        num_views=args.num_views,
        num_clusters=args.num_clusters,
    )
    data = {k: v for k, v in table.model_args.items() if k != "num_categories"}
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        thinning=args.thinning,
    )
    mcmc.warmup(random.key(args.seed), collect_warmup=True, **data)
    warmup = collect_warmup(mcmc)
    mcmc.run(mcmc.post_warmup_state.rng_key, **data)
    return mcmc, warmup


def cells_of(table, by_site):
    """Values by observed site as those of columns of the table: name, values."""
    return {
        column.name: by_site[column.site][..., column.site_position]
        for column in table.columns
    }


def show_imputed(table, imputed, frame, cells):
    """The hidden cells beside their draws."""
    print("\nHidden cells, as imputed:")
    for row, place in cells:
        column = table.column(frame.columns[place])
        found = imputed[column.site]
        (at,) = np.flatnonzero((found.index == (row, column.site_position)).all(1))
        point = table.decode_column(column.name, found.point[at])
        truth, spread = frame.iat[row, place], found.uncertainty[at]
        if column.labels:
            note = f"{1 - spread:.0%} of draws"
            print(f"  {column.name:18}{point!s:>12} ({note}); it was {truth}")
        else:
            print(f"  {column.name:18}{point:12.1f} +- {spread:.1f}; it was {truth}")


def show_surprises(table, posterior, frame):
    each = cells_of(table, posterior.cell_surprisal())
    names = list(each)
    values = np.stack([each[name] for name in names], 1)
    order = np.argsort(np.where(np.isnan(values), -np.inf, values), axis=None)[::-1]
    print("\nMost surprising cells, given all others (nats):")
    for row, place in zip(*np.unravel_index(order[:5], values.shape), strict=True):
        cell = frame[names[place]].iloc[row]
        print(f"  row {row:3}  {names[place]:18}{cell!s:>12}{values[row, place]:8.1f}")
    rows = posterior.surprisal()
    order = np.argsort(rows)[::-1][:3]
    print("Most surprising rows: " + ", ".join(f"{i} ({rows[i]:.1f})" for i in order))


def predict(table, posterior, frame, seed):
    """A penguin of which only the species and the sex are known."""
    columns = [c.name for c in table.columns]
    new = pd.DataFrame({name: [None] for name in columns}, dtype=object)
    new["species"], new["sex"] = ["Gentoo"], ["female"]
    rows = table.encode(new.astype(frame[columns].dtypes.to_dict()))
    data = {k: v for k, v in rows.model_args.items() if k != "num_categories"}
    drawn = posterior.sample_rows(random.key(seed), **data)
    print("\nA female Gentoo penguin, 90 % of draws:")
    for name, values in cells_of(table, drawn).items():
        column = table.column(name)
        if column.type == "real":
            low, high = np.quantile(values, [0.05, 0.95])
            print(f"  {name:18}{low:8.1f} to {high:.1f}")
    new = np.nanmax(posterior.membership(**data)[..., -1], -1)
    print(f"  a new cluster, in one of the views: {new.mean():.1%}")


def report(idata):
    stats = idata.sample_stats
    scalars = {name: stats[name].values for name in ("log_joint", "num_views")}
    scalars["num_clusters"] = stats["num_clusters"].values.sum(-1)
    print("\nConvergence of what has no labels:")
    print(az.summary(scalars).to_string())


def main(args):
    whole = load_penguins()
    frame, cells = hide(whole, args.num_hidden, args.seed)
    table = Table.from_dataframe(frame, types={"year": "categorical"})
    print(table.summary())
    mcmc, warmup = run(args, table)
    idata = to_arviz(
        mcmc, coords=table.coords, dims={"view": ["columns"]}, warmup=warmup
    )
    report(idata)

    posterior = Posterior.from_mcmc(mcmc)
    site_of = {(c.site, (c.site_position,)): c.name for c in table.columns}
    names = [site_of[column] for column in posterior.columns]
    in_order = [[c.name for c in table.columns].index(name) for name in names]
    best = int(mcmc.get_extra_fields()["log_joint"].argmax())
    draws = mcmc.get_samples()
    view, z = np.asarray(draws["view"][best]), np.asarray(draws["z"][best])
    print("\nViews of the draw of highest log joint:")
    for v in range(view.max() + 1):
        own = [c.name for c, at in zip(table.columns, view, strict=True) if at == v]
        print(f"  {', '.join(own)}: {z[v].max() + 1} clusters")

    information = posterior.mutual_information(random.key(args.seed), 100)
    value = np.where(np.isnan(information.value), 0, information.value)
    print("\nMost dependent columns, mutual information in nats:")
    for k in np.argsort(np.triu(value), axis=None)[::-1][:5]:
        a, b = np.unravel_index(k, value.shape)
        error = information.error[a, b]
        print(f"  {names[a]}, {names[b]}: {value[a, b]:.2f} +- {error:.2f}")

    show_imputed(table, posterior.impute(random.key(args.seed + 1)), whole, cells)
    show_surprises(table, posterior, whole)
    predict(table, posterior, frame, args.seed + 2)

    measured = {"real": ...}
    point = posterior.point_partition(measured, num_runs=2)
    sizes = np.sort(np.bincount(point.labels))[::-1]
    print(
        f"\nPoint estimate of the clusters of the measurements: {sizes.tolist()} rows"
    )

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    dependence = posterior.dependence()
    figures = {
        "trace": lambda: plot_trace(idata),
        "dependence": lambda: plot_dependence(dependence, names, view[in_order]),
        "similarity": lambda: plot_similarity(
            posterior.similarity(measured), point.labels
        ),
        "table": lambda: plot_table(
            frame[[c.name for c in table.columns]], z[: view.max() + 1], view
        ),
        "predictive": lambda: plot_bill(table, posterior, args.seed + 3),
    }
    for name, draw in figures.items():
        draw()
        plt.savefig(out / f"tour_{name}.png", dpi=120, bbox_inches="tight")
        plt.close("all")
        print(out / f"tour_{name}.png")


def plot_bill(table, posterior, seed):
    """Predictions of a column for all rows, none of its cells known."""
    data = {k: v for k, v in table.model_args.items() if k != "num_categories"}
    drawn = posterior.sample_rows(random.key(seed), given=[], **data)
    column = table.column("bill_length_mm")
    observed = table.arrays[column.type][:, column.position]
    predicted = cells_of(table, drawn)[column.name]
    plot_predictive(observed, predicted, column.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--num-warmup", type=int, default=50)
    parser.add_argument("--num-samples", type=int, default=500)
    parser.add_argument("--num-chains", type=int, default=2)
    parser.add_argument("--thinning", type=int, default=5)
    parser.add_argument("--num-views", type=int, default=8)
    parser.add_argument("--num-clusters", type=int, default=32)
    parser.add_argument("--num-hidden", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="output", help="folder for the figures")
    args = parser.parse_args()
    numpyro.set_host_device_count(args.num_chains)
    main(args)
