# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Planted views: what the anneal finds of them, and what its moves cost.

60 real columns of 2,000 rows in 5 views of 6 clusters each, all hyperparameters
learned. Chains from several seeds run for the same time with the anneal, with
Sequential+Gibbs and with Prior+Gibbs; it shows the adjusted Rand index of the partition
of the columns, and of that of the rows in each planted view (of the view found that has
most of its columns), and in how many seeds all of them are at least 0.9. Compile time
is apart.

`--cost` shows what a sweep of moves of rows in all views at once takes, in microseconds
a row, and what moves of features add to it, once a sweep, and the peak memory of the
process; splits and merges of clusters are off. Guided moves and splits of views are
made at one sweep in many.

    python examples/benchmarks/crosscat.py              # about ten minutes
    python examples/benchmarks/crosscat.py --cost
    python examples/benchmarks/crosscat.py --quick      # a small table
"""

import argparse
from functools import partial
import os
import resource
import time

import jax
from jax import random
import numpy as np
from split_merge import adjusted_rand  # beside this file

import numpyro

from numpyro_subanneal import (
    FeatureMoves,
    LinearSchedule,
    PitmanYorProcess,
    PriorGibbs,
    SequentialGibbs,
    SubsampleAnnealedGibbs,
)
from numpyro_subanneal.models import crosscat
from numpyro_subanneal.models.features import categorical_features, real_features

ARMS = {
    "anneal": LinearSchedule(),
    "Sequential+Gibbs": SequentialGibbs(),
    "Prior+Gibbs": PriorGibbs(),
}


def planted(num_rows, num_columns, num_views, num_clusters, seed=0):
    """Data, view of each column, and cluster of each row in each view."""
    rng = np.random.default_rng(seed)
    view = np.arange(num_columns) % num_views
    z = rng.integers(num_clusters, size=(num_views, num_rows))
    centre = rng.normal(0, 1.5, (num_clusters, num_columns))
    x = centre[z[view], np.arange(num_columns)[:, None]].T
    x = x + rng.normal(size=x.shape)
    return x.astype(np.float32), view, z


def agreement(state, view, z):
    """Of the columns, and of the rows in each planted view."""
    found = np.asarray(state.z["view"])
    rows = np.asarray(state.z["z"])
    each = []
    for v in range(view.max() + 1):
        own = np.bincount(found[view == v]).argmax()
        each.append(adjusted_rand(rows[own], z[v]))
    return adjusted_rand(found, view), each


def compare(
    x, view, z, num_warmup, seconds, num_seeds, num_views, num_clusters=32, arms=ARMS
):
    print(
        f"{x.shape[0]} rows, {x.shape[1]} columns in {view.max() + 1} views of "
        f"{z.max() + 1} clusters; {seconds} s a chain"
    )
    print(
        f"{'':18}{'columns':>16}{'rows, worst view':>20}{'views':>7}{'sweeps':>8}"
        f"{'all >= 0.9':>12}"
    )
    print(f"{'':18}{'median':>8}{'worst':>8}{'median':>12}{'worst':>8}")
    for name, schedule in arms.items():
        kernel = SubsampleAnnealedGibbs(
            lambda: crosscat.real(x, num_views=num_views, num_clusters=num_clusters),
            schedule,
        )

        def start(seed, kernel=kernel):
            return kernel.init(random.key(seed), num_warmup, None, (), {})

        step = jax.jit(lambda state, kernel=kernel: kernel.sample(state, (), {}))
        jax.block_until_ready(step(start(0)))  # compiled
        columns, rows, views, sweeps = [], [], [], []
        for seed in range(num_seeds):
            state = jax.block_until_ready(start(seed))
            begin = time.perf_counter()
            taken = 0
            while taken <= num_warmup or time.perf_counter() - begin < seconds:
                state = jax.block_until_ready(step(state))
                taken += 1
            of_columns, of_rows = agreement(state, view, z)
            columns.append(of_columns)
            rows.append(min(of_rows))
            views.append(int(state.num_views))
            sweeps.append(taken - num_warmup)
        good = sum(min(a, b) >= 0.9 for a, b in zip(columns, rows, strict=True))
        print(
            f"{name:18}{np.median(columns):8.2f}{min(columns):8.2f}"
            f"{np.median(rows):12.2f}{min(rows):8.2f}{np.median(views):7.0f}"
            f"{np.median(sweeps):8.0f}{f'{good} of {num_seeds}':>12}",
            flush=True,
        )


def planted_codes(num_rows, num_columns, num_views, num_clusters, num_categories):
    rng = np.random.default_rng(0)
    view = np.arange(num_columns) % num_views
    z = rng.integers(num_clusters, size=(num_views, num_rows))
    probs = rng.dirichlet(
        np.full(num_categories, 0.3), size=(num_clusters, num_columns)
    )
    ends = probs.cumsum(-1)[..., :-1]
    x = np.empty((num_rows, num_columns), np.int32)
    for d in range(num_columns):
        x[:, d] = (rng.random((num_rows, 1)) > ends[z[view[d]], d]).sum(1)
    return x, view, z


def cost(num_rows, num_views):
    """What a sweep of the rows takes, and moves of features with it."""
    repeats = int(np.clip(10**6 // num_rows, 1, 200))
    print(f"{num_rows} rows, {num_views} views, 5 of them occupied; {repeats} sweeps")
    print(f"{'':58}{'us/row':>8}{'compile, s':>12}{'MB so far':>11}")
    options = {
        "rows alone": None,
        "and Gibbs moves and sets": FeatureMoves(num_guided=0, num_splits=0),
        "and guided moves": FeatureMoves(num_splits=0),
        "and splits of views": FeatureMoves(),
    }
    real, of_real, z_real = planted(num_rows, 60, 5, 6)
    codes, of_codes, z_codes = planted_codes(num_rows, 68, 5, 12, 16)
    tables = {
        "60 real columns": (real, of_real, z_real, None),
        "68 columns of 16 categories": (codes, of_codes, z_codes, (16,) * 68),
    }
    for table, (x, view, z, num_categories) in tables.items():
        for name, moves in options.items():

            def model(known=moves is None, x=x, view=view, num=num_categories):
                if num is None:
                    columns = partial(real_features, kappa=0.3, shape=3.0)
                else:
                    columns = partial(
                        categorical_features, num_categories=num, strength=10.0
                    )
                if not known:
                    prior = PitmanYorProcess(1.0, 0.1, size=len(view))
                    view = numpyro.sample("view", prior)
                with numpyro.plate("views", num_views):
                    prior = PitmanYorProcess(1.0, 0.1, size=len(x))
                    found = numpyro.sample("z", prior)
                columns(x, z=found[view].T, num_clusters=32)

            kernel = SubsampleAnnealedGibbs(
                model, feature_moves=moves or FeatureMoves(), split_merge=None
            )
            given = {"z": np.zeros((num_views, num_rows), np.int32)}
            given["z"][: len(z)] = z
            if moves is not None:
                given["view"] = view.astype(np.int32)
            state = kernel.init(random.key(0), 0, given, (), {})
            begin = time.perf_counter()
            step = jax.jit(lambda state, kernel=kernel: kernel.sample(state, (), {}))
            step = step.lower(state).compile()
            compiled = time.perf_counter() - begin
            state = jax.block_until_ready(step(state))
            begin = time.perf_counter()
            for _ in range(repeats):
                state = jax.block_until_ready(step(state))
            each = (time.perf_counter() - begin) / repeats / num_rows
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(
                f"{table:30}{name:28}{1e6 * each:8.2f}{compiled:12.1f}{peak:11}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--num-warmup", type=int, default=40)
    parser.add_argument("--num-rows", type=int, default=2000)
    parser.add_argument("--num-views", type=int, default=16)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        # NB: before JAX starts its threads, which get into each other's way.
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    if args.cost:
        cost(args.num_rows, args.num_views)
    elif args.quick:
        table = planted(60, 6, 2, 2)
        arms = {"anneal": ARMS["anneal"]}
        compare(
            *table, 2, seconds=0.1, num_seeds=1, num_views=3, num_clusters=8, arms=arms
        )
    else:
        compare(
            *planted(args.num_rows, 60, 5, 6),
            args.num_warmup,
            args.seconds,
            args.seeds,
            args.num_views,
        )


if __name__ == "__main__":
    main()
