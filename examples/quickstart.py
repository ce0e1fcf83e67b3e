# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Quickstart: clusters of penguins
================================

A Pitman-Yor mixture of a table with real and categorical columns: four measurements,
the island and the sex of penguins of three species near Palmer Station, Antarctica [1].
The species is not given to the model; the partition found is compared with it
afterwards.

The table comes with the package `palmerpenguins`. Chains run in parallel, and their
agreement is judged by quantities that don't depend on how clusters are labelled.

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

from numpyro_subanneal import SubsampleAnnealedGibbs
from numpyro_subanneal.models import pitman_yor

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

REAL = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g"]
CATEGORICAL = ["island", "sex"]


def load_table() -> pd.DataFrame:
    table = load_penguins()[["species", *CATEGORICAL, *REAL]]
    complete = table.dropna().reset_index(drop=True)
    dropped = len(table) - len(complete)
    print(
        f"Palmer penguins: {len(complete)} rows; {dropped} rows with missing cells "
        "were dropped."
    )
    return complete


def adjusted_rand(a: np.ndarray, b: np.ndarray) -> float:
    """Adjusted Rand index of two partitions (Hubert and Arabie, 1985)."""

    def num_pairs(counts):
        return (counts * (counts - 1) / 2).sum()

    table = pd.crosstab(a, b).to_numpy()
    rows, columns = num_pairs(table.sum(1)), num_pairs(table.sum(0))
    expected = rows * columns / num_pairs(table.sum())
    return (num_pairs(table) - expected) / ((rows + columns) / 2 - expected)


def run(args, real, categorical, num_categories):
    model = partial(
        pitman_yor.mixed,
        num_categories=num_categories,
        num_clusters=16,
        # Constants, so that the program is short; what is left out is learned.
        concentration=1.0,
        discount=0.1,
        kappa=0.3,
        shape=5.0,
        strength=10.0,
    )
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        thinning=args.thinning,
    )
    # The anneal is collected for the figure; without it, `run` does the warm-up too.
    mcmc.warmup(random.key(args.seed), real, categorical, collect_warmup=True)
    anneal = mcmc.get_extra_fields(group_by_chain=True)
    mcmc.run(mcmc.post_warmup_state.rng_key, real, categorical)
    return mcmc, anneal


def print_summary(idata):
    """Summary of what can be compared between chains: no labels in it."""
    z = idata.posterior["z"].values
    largest = np.apply_along_axis(lambda labels: np.bincount(labels).max(), -1, z)
    quantities = {
        "num_clusters": idata.sample_stats["num_clusters"].values,
        "largest_share": largest / z.shape[-1],
        "log_joint": idata.sample_stats["log_joint"].values,
    }
    print(az.summary(quantities).to_string())


def plot(args, table, z, anneal, path):
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")

    rows = np.asarray(anneal["subsample_size"])[0]
    steps = args.num_warmup - args.thinning * np.arange(len(rows))[::-1]
    left.fill_between(steps, rows, color="0.9", label="rows")
    left.set(
        xlabel="warm-up step",
        ylabel="rows in the subsample",
        title="Anneal",
    )
    left.margins(x=0, y=0)
    twin = left.twinx()
    for chain, clusters in enumerate(np.asarray(anneal["num_clusters"])):
        twin.plot(steps, clusters, lw=1.2, label=f"chain {chain + 1}")
    twin.set_ylabel("clusters")
    twin.set_ylim(0, 1.3 * twin.dataLim.y1)
    handles = [
        *left.get_legend_handles_labels()[0],
        *twin.get_legend_handles_labels()[0],
    ]
    twin.legend(handles=handles, loc="upper left", ncols=3, fontsize="small")

    colours = plt.get_cmap("tab20" if z.max() >= 10 else "tab10").colors
    species = []
    for name, marker in zip(table["species"].unique(), "os^", strict=True):
        chosen = table["species"] == name
        right.scatter(
            table.loc[chosen, "flipper_length_mm"],
            table.loc[chosen, "bill_length_mm"],
            c=[colours[k] for k in z[chosen]],
            marker=marker,
            s=22,
            alpha=0.8,
            linewidths=0,
        )
        species.append(right.scatter([], [], c="0.3", marker=marker, label=name))
    clusters = [
        right.scatter([], [], color=colours[k], marker="D", label=f"{k}, n = {size}")
        for k, size in enumerate(np.bincount(z))
    ]
    right.set(
        xlabel="flipper length (mm)",
        ylabel="bill length (mm)",
        title="Partition of highest log joint",
    )
    fig.legend(handles=species, title="species", loc="outside right upper")
    fig.legend(handles=clusters, title="cluster", loc="outside right lower")
    fig.savefig(path, dpi=150)
    plt.close(fig)


def main(args):
    table = load_table()
    real = table[REAL].to_numpy(float)
    encoded = [pd.factorize(table[name], sort=True) for name in CATEGORICAL]
    categorical = np.stack([codes for codes, _ in encoded], axis=1)
    num_categories = tuple(len(names) for _, names in encoded)

    mcmc, anneal = run(args, real, categorical, num_categories)
    idata = az.from_numpyro(mcmc)
    print()
    print_summary(idata)

    log_joint = idata.sample_stats["log_joint"].values
    chain, draw = np.unravel_index(log_joint.argmax(), log_joint.shape)
    best = idata.posterior["z"].values[chain, draw]
    print(
        "\nThe partition shown is the draw of highest log joint: "
        f"{log_joint.max():.1f} nats, chain {chain + 1}, draw {draw + 1}.\n"
    )
    print(pd.crosstab([table["species"], table["sex"]], best, colnames=["cluster"]))
    both = table["species"] + table["sex"]
    print(
        "\nAdjusted Rand index of the partition\n"
        f"  with species          {adjusted_rand(best, table['species']):.2f}\n"
        f"  with species and sex  {adjusted_rand(best, both):.2f}"
    )

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    idata.to_netcdf(str(out / "quickstart.nc"))
    plot(args, table, best, anneal, out / "quickstart.png")
    saved = az.from_netcdf(str(out / "quickstart.nc"))
    num_chains, num_draws = saved.sample_stats["log_joint"].shape
    print(f"\n{out / 'quickstart.nc'}: {num_chains} chains of {num_draws} draws")
    print(f"{out / 'quickstart.png'}: the anneal, and the partition found")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--num-warmup", type=int, default=50)
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--thinning", type=int, default=2)
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=".", help="directory for the two files")
    args = parser.parse_args()
    numpyro.set_host_device_count(args.num_chains)
    main(args)
