# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
CrossCat: which columns of a table belong together
==================================================

Cross-categorization [1, 2] of a table of columns of any kind, with missing cells:
columns in views, and in each view rows in clusters. Without arguments the table is that
of the package `palmerpenguins`: 344 penguins near Palmer Station, Antarctica [3], with
the year and the place where each was observed, its species, sex and measurements. With
the path of a CSV file, it is that one; the types of its columns are guessed, as
:class:`~numpyro_subanneal.tables.Table` says, and printed.

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

from numpyro_subanneal import SubsampleAnnealedGibbs, Table
from numpyro_subanneal.inference_data import to_arviz
from numpyro_subanneal.models import crosscat
from numpyro_subanneal.partitions import similarity
from numpyro_subanneal.plots import plot_dependence, plot_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def run(args, table):
    data = dict(table.model_args)
    model = partial(
        crosscat.mixed,
        num_categories=data.pop("num_categories", ()),
        num_clusters=args.num_clusters,
    )
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        thinning=args.thinning,
    )
    mcmc.run(random.key(args.seed), **data)
    return mcmc


def print_views(names, view, z):
    for v in range(view.max() + 1):
        columns = [name for name, own in zip(names, view, strict=True) if own == v]
        sizes = np.sort(np.bincount(z[v]))[::-1]
        print(f"\nview {v}: {', '.join(columns)}")
        print(f"  {len(sizes)} clusters of {', '.join(map(str, sizes))} rows")


def main(args):
    frame = load_penguins() if args.path is None else pd.read_csv(args.path)
    table = Table.from_dataframe(frame, max_categories=args.max_categories)
    print(table.summary())
    names = [column.name for column in table.columns]
    missing = sum(column.missing for column in table.columns)
    print(f"{missing} cells are missing.")

    idata = to_arviz(run(args, table), coords=table.coords, dims={"view": ["columns"]})
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
    plot_dependence(similarity(view), names, best)
    plt.savefig(out / "crosscat_dependence.png", dpi=120, bbox_inches="tight")
    plt.close("all")
    plot_table(frame[names], z[: best.max() + 1], best)
    plt.savefig(out / "crosscat_table.png", dpi=120, bbox_inches="tight")
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
    parser.add_argument("--max-categories", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="output", help="folder for the figures")
    args = parser.parse_args()
    numpyro.set_host_device_count(args.num_chains)
    main(args)
