# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Predictive density of new rows: seconds and memory.

A mixture of 100,000 rows x 40 real columns in 20 clusters; 100 draws of the partition,
each the planted one with 1 % of the rows elsewhere, stand for those of a chain, of
which only the number and the size matter here. Shown are the seconds to read the model
and to score 10,000 new rows under all draws (the first call compiles), and the largest
memory of the process.

    python examples/benchmarks/posterior.py
    python examples/benchmarks/posterior.py --num-rows 2000 --num-new 100 --num-draws 5
"""

import argparse
from functools import partial
import resource
import time

from jax import random
import numpy as np

from numpyro import handlers

from numpyro_subanneal import Posterior
from numpyro_subanneal.models import pitman_yor


def main(args):
    rng = np.random.default_rng(0)
    num_rows = args.num_rows + args.num_new
    z = rng.integers(args.num_clusters, size=num_rows)
    centre = 3 * rng.normal(size=(args.num_clusters, args.num_columns))
    x = (centre[z] + rng.normal(size=(num_rows, args.num_columns))).astype(np.float32)
    train, new = x[: args.num_rows], x[args.num_rows :]
    draws = np.repeat(z[None, : args.num_rows], args.num_draws, 0)
    moved = rng.uniform(size=draws.shape) < 0.01
    draws[moved] = rng.integers(args.num_clusters, size=moved.sum())
    model = partial(
        pitman_yor.real,
        num_clusters=args.num_clusters + 12,
        concentration=1.0,
        discount=0.1,
        kappa=0.1,
        shape=2.0,
    )
    start = time.perf_counter()
    samples = hyperparameters(model, train, args.num_draws) | {"z": draws}
    posterior = Posterior(model, samples, (train,))
    print(f"{args.num_rows} rows x {args.num_columns} columns, {args.num_draws} draws")
    print(f"read                       {time.perf_counter() - start:8.1f} s")
    for call in ("first call", "again"):
        start = time.perf_counter()
        density = posterior.log_predictive(new)
        seconds = time.perf_counter() - start
        print(f"{args.num_new} new rows, {call:10} {seconds:8.1f} s")
    print(f"mean log density           {density.mean():8.3f} nats a row")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"largest memory             {peak:8.0f} MB")


def hyperparameters(model, x, num_draws):
    """Those that the model learns, in the middle of their grids."""
    trace = handlers.trace(handlers.seed(model, random.key(0))).get_trace(x)
    return {
        name: np.repeat(np.asarray(site["value"])[None], num_draws, 0)
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"] and name != "z"
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--num-rows", type=int, default=100_000)
    parser.add_argument("--num-columns", type=int, default=40)
    parser.add_argument("--num-new", type=int, default=10_000)
    parser.add_argument("--num-draws", type=int, default=100)
    parser.add_argument("--num-clusters", type=int, default=20)
    main(parser.parse_args())
