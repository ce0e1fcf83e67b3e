# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
What splits and merges are good for, and what they cost.

Planted clusters from which moves of single rows get stuck: 68 categorical columns with
a prior that ignores how frequent the categories are; and overlapping clusters in two
real columns, hyperparameters learned. Each table is sampled for the same time with the
anneal and splits and merges, without either, and without both, from several seeds. It
shows by how much the log joint probability falls short of that of the planted
partition, in nats a row (below zero: the chain has found a better one), and the
adjusted Rand index of the two. Compile time is apart.

    python examples/benchmarks/split_merge.py               # a few minutes
    python examples/benchmarks/split_merge.py --cost        # what they add to a sweep
    python examples/benchmarks/split_merge.py --quick       # a small table
"""

import argparse
from functools import partial
import os
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    LinearSchedule,
    SequentialGibbs,
    SplitMerge,
    SubsampleAnnealedGibbs,
)
from numpyro_subanneal.models import dpmm

CAPACITY = 64
ARMS = {
    "anneal, splits and merges": (LinearSchedule(), SplitMerge()),
    "splits and merges": (SequentialGibbs(), SplitMerge()),
    "anneal": (LinearSchedule(), None),
    "neither": (SequentialGibbs(), None),
}


def categories(num_rows, num_columns=68, num_clusters=20):
    """Columns of 2 to 17 categories, a third of which tell the clusters apart."""
    rng = np.random.default_rng(0)
    num = 2 + np.arange(num_columns) % 16
    z = rng.choice(num_clusters, size=num_rows, p=rng.dirichlet([2.0] * num_clusters))
    x = np.empty((num_rows, num_columns), np.int32)
    for d, c in enumerate(num):
        spread = (0.3, 0.8, 4.0)[d % 3] * c
        probs = rng.dirichlet(spread * rng.dirichlet([2.0] * c) + 0.02, num_clusters)
        x[:, d] = (rng.random((num_rows, 1)) > probs[z].cumsum(1)[:, :-1]).sum(1)
    return x, z, tuple(int(c) for c in num)


def plane(num_rows, num_clusters=15):
    """Two columns; clusters that overlap, of different spreads."""
    rng = np.random.default_rng(0)
    z = rng.choice(num_clusters, size=num_rows, p=rng.dirichlet([3.0] * num_clusters))
    loc = rng.normal(0, 5, (num_clusters, 2))
    scale = np.sqrt(rng.chisquare(6, (num_clusters, 2)) / 6)
    x = loc[z] + scale[z] * rng.normal(size=(num_rows, 2))
    return x.astype(np.float32), z


def fixed_prior(x, num_categories):
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    for c in sorted(set(num_categories)):
        columns = [d for d, num in enumerate(num_categories) if num == c]
        with numpyro.plate(f"columns_{c}", len(columns), dim=-1):
            with numpyro.plate(f"clusters_{c}", CAPACITY, dim=-2):
                probs = numpyro.sample(f"probs_{c}", dist.Dirichlet(jnp.full(c, 0.5)))
            with numpyro.plate(f"rows_{c}", len(x), dim=-2):
                fn = dist.Categorical(probs[z])
                numpyro.sample(f"x_{c}", fn, obs=x[:, np.array(columns)])


def adjusted_rand(a, b):
    """Hubert and Arabie (1985): agreement beyond chance; 1 for equal partitions."""
    table = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(table, (a, b), 1)

    def pairs(n):
        return (n * (n - 1) / 2).sum()

    both, of_a, of_b = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    expected = of_a * of_b / pairs(np.array([len(a)]))
    return (both - expected) / ((of_a + of_b) / 2 - expected)


def program(model, schedule, split_merge, num_warmup, z=None):
    """A function that starts a chain, and one that makes a step of it."""
    kernel = SubsampleAnnealedGibbs(model, schedule, split_merge=split_merge)
    given = None if z is None else {"z": jnp.asarray(z, jnp.int32)}

    def start(seed):
        return kernel.init(random.key(seed), num_warmup, given, (), {})

    step = jax.jit(lambda state: kernel.sample(state, (), {}))
    return start, step


def follow(start, step, seed, num_warmup, seconds):
    """The last state of a chain that is stopped after `seconds` of a single core."""
    state = jax.block_until_ready(start(seed))
    begin = time.perf_counter()
    taken = 0
    while taken <= num_warmup or time.perf_counter() - begin < seconds:
        state = jax.block_until_ready(step(state))
        taken += 1
    return state, taken - num_warmup, time.perf_counter() - begin


def compare(name, model, z, num_warmup, seconds, num_seeds, arms=ARMS):
    # Where a chain goes that starts from the planted partition, by moves of rows alone.
    start, step = program(model, None, None, 0, z)
    state = start(0)
    best = -np.inf
    for _ in range(20):
        state = step(state)
        best = max(best, float(state.log_joint))
    print(f"\n{name}: {len(z)} rows, {len(set(z))} clusters, {seconds} s a chain")
    print(f"{'':28}{'shortfall, nats a row':>24}{'adjusted Rand':>18}{'sweeps':>8}")
    print(f"{'':28}{'median':>12}{'worst':>12}{'median':>9}{'worst':>9}")
    for arm, (schedule, split_merge) in arms.items():
        start, step = program(model, schedule, split_merge, num_warmup)
        jax.block_until_ready(step(start(0)))  # compiled
        short, rand, sweeps = [], [], []
        for seed in range(num_seeds):
            state, more, _ = follow(start, step, seed, num_warmup, seconds)
            short.append((best - float(state.log_joint)) / len(z))
            rand.append(adjusted_rand(np.asarray(state.z["z"]), z))
            sweeps.append(more)
        print(
            f"{arm:28}{np.median(short):12.3f}{max(short):12.3f}"
            f"{np.median(rand):9.2f}{min(rand):9.2f}{np.median(sweeps):8.0f}",
            flush=True,
        )


def cost(num_rows, repeats=8):
    print(
        f"{'sweep of ' + str(num_rows) + ' rows':32}{'without, s':>12}{'with, s':>10}"
    )
    tables = {}
    for clusters in (3, 20):
        x, z, num = categories(num_rows, num_clusters=clusters)
        model = partial(dpmm.categorical, x, num, CAPACITY, 1.0, strength=10.0)
        tables[f"68 categorical, {clusters} clusters"] = model, z
        x, z = plane(num_rows, clusters)
        model = partial(dpmm.real, x, CAPACITY, 1.0, kappa=0.3, shape=3.0)
        tables[f"2 real, {clusters} clusters"] = model, z
    for name, (model, z) in tables.items():
        seconds = []
        for split_merge in (None, SplitMerge()):
            start, step = program(model, None, split_merge, 0, z)
            state = jax.block_until_ready(step(start(0)))
            begin = time.perf_counter()
            for _ in range(repeats):
                state = jax.block_until_ready(step(state))
            seconds.append((time.perf_counter() - begin) / repeats)
        plain, both = seconds
        print(f"{name:32}{plain:12.3f}{both:10.3f}{100 * (both / plain - 1):+8.0f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--num-warmup", type=int, default=10)
    parser.add_argument("--num-rows", type=int)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        # NB: before JAX starts its threads, which get into each other's way.
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    if args.cost:
        cost(args.num_rows or 100_000)
        return
    if args.quick:
        args.seeds, args.seconds, args.num_warmup = 1, 0.1, 2
    run = partial(
        compare,
        num_warmup=args.num_warmup,
        seconds=args.seconds,
        num_seeds=args.seeds,
    )
    if args.quick:
        x, z = plane(100, 3)
        arms = {name: ARMS[name] for name in ("anneal, splits and merges", "neither")}
        model = partial(dpmm.real, x, 16, 1.0, kappa=0.3, shape=3.0)
        run("plane", model, z, arms=arms)
        return
    x, z, num = categories(args.num_rows or 1000)
    run("categories, fixed prior", partial(fixed_prior, x, num), z)
    x, z = plane(args.num_rows or 10_000)
    run("plane, hyperparameters learned", partial(dpmm.real, x, CAPACITY), z)


if __name__ == "__main__":
    main()
