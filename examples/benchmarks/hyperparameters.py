# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
What one update of all hyperparameters costs, and what it adds to a sweep.

Tables of 68 categorical columns of 2 to 17 categories, with a grid of 20 strengths for
each column, and of 63 real columns, with a grid of 20 values of kappa, and one of the
rate, for each; 50 occupied clusters of 64. Times are medians of repeated calls, compile
time apart, on one core: with several, XLA hands the small steps of a loop from thread
to thread, and the same program takes once as long and once more than twice as long.
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

from numpyro_subanneal import Grid, PitmanYorProcess, SubsampleAnnealedGibbs, rows
from numpyro_subanneal import hyper as hyper_moves
from numpyro_subanneal.plan import recognise
from numpyro_subanneal.reading import first_values, read

STRENGTHS = np.logspace(-1, 3, 20).astype(np.float32)
KAPPAS = np.logspace(-2, 1, 20).astype(np.float32)
RATES = np.logspace(-2, 1, 20).astype(np.float32)
CONCENTRATIONS = np.logspace(-1, 2, 20).astype(np.float32)


def _partition(num_rows, learned):
    concentration = 10.0
    if learned:
        concentration = numpyro.sample("concentration", Grid(CONCENTRATIONS))
    return numpyro.sample("z", PitmanYorProcess(concentration, 0.1, size=num_rows))


def categorical(columns, learned=True, num_clusters=64):
    """Columns by number of categories."""
    num_rows = len(next(iter(columns.values())))
    z = _partition(num_rows, learned)
    for num, x in columns.items():
        num_features = x.shape[1]
        with numpyro.plate(f"features_{num}", num_features, dim=-1):
            strength = 10.0 * jnp.ones(num_features)
            if learned:
                strength = numpyro.sample(f"strength_{num}", Grid(STRENGTHS))
            with numpyro.plate(f"clusters_{num}", num_clusters, dim=-2):
                base = jnp.full(num, 1 / num)
                fn = dist.Dirichlet(strength[..., None] * base)
                probs = numpyro.sample(f"probs_{num}", fn)
            with numpyro.plate(f"rows_{num}", num_rows, dim=-2):
                numpyro.sample(f"x_{num}", dist.Categorical(probs[z]), obs=x)


def real(x, learned=True, num_clusters=64):
    num_rows, num_features = x.shape
    z = _partition(num_rows, learned)
    with numpyro.plate("features", num_features, dim=-1):
        kappa = rate = 0.3 * jnp.ones(num_features)
        if learned:
            kappa = numpyro.sample("kappa", Grid(KAPPAS))
            rate = numpyro.sample("rate", Grid(RATES))
        with numpyro.plate("clusters", num_clusters, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(2.0, rate))
            loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / kappa)))
        with numpyro.plate("rows", num_rows, dim=-2):
            numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def tables(num_rows, num_columns, num_occupied):
    """Planted clusters, so that about as many are occupied."""
    rng = np.random.default_rng(0)
    of = rng.integers(num_occupied, size=num_rows)
    columns = {}
    for d in range(num_columns):
        num = 2 + d % 16
        probs = rng.dirichlet(np.full(num, 0.3), num_occupied)
        x = (rng.random((num_rows, 1)) > probs[of].cumsum(-1)[:, :-1]).sum(-1)
        columns.setdefault(num, []).append(x)
    columns = {num: np.stack(x, -1) for num, x in columns.items()}
    num_reals = min(63, num_columns)
    loc = rng.normal(size=(num_occupied, num_reals)) * 3
    x = (loc[of] + rng.normal(size=(num_rows, num_reals))).astype(np.float32)
    return jnp.asarray(of, jnp.int32), {"categorical": columns, "real": x}


def time_update(model, data, z, repeats):
    """Milliseconds of one update, and seconds to compile it."""
    plan = recognise(model, (data,), {})
    values = first_values(random.key(0), plan, model, (data,), {})

    @jax.jit
    def collect(data, values):
        found = read(plan, model, (data,), {}, values)
        clusters = rows.collect(found.components, z, plan.capacity)
        hyper = tuple(c.hyper for c in found.components)
        return hyper, clusters.counts, clusters.stats

    hyper, counts, stats = collect(data, values)

    @jax.jit
    def update(key, values, hyper, counts, stats):
        components = tuple(
            rows.Component(block, h, ())
            for block, h in zip(plan.blocks, hyper, strict=True)
        )
        clusters = rows.Clusters(z[:0], counts, stats)
        target = hyper_moves.Target(plan, model, (data,), {}, components, clusters)
        return hyper_moves.update(key, target, values)

    start = time.perf_counter()
    args = hyper, counts, stats
    compiled = update.lower(random.key(0), values, *args).compile()
    compile_time = time.perf_counter() - start
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        values = jax.block_until_ready(compiled(random.key(i), values, *args))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times)), compile_time


def time_sweep(model, data, z, repeats, learned):
    """Milliseconds of one sweep over all rows."""

    def bound(data):
        model(data, learned=learned)

    # NB: the kernel's own step. `MCMC.run` compiles it anew at every run, so that the
    # time of a few sweeps cannot be told from that.
    kernel = SubsampleAnnealedGibbs(bound, split_merge=None)
    state = kernel.init(random.key(0), 0, {"z": z}, (data,), {})

    @jax.jit
    def sweep(state, data):
        return kernel.sample(state, (data,), {})

    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        state = jax.block_until_ready(sweep(state, data))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times[1:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-rows", type=int, default=10_000)
    parser.add_argument("--columns", type=int, default=68)
    parser.add_argument("--num-clusters", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweeps", type=int, default=10)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        # NB: before JAX starts its threads.
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    z, data = tables(args.num_rows, args.columns, max(1, args.num_clusters * 50 // 64))
    for name, model in (("categorical", categorical), ("real", real)):
        model = partial(model, num_clusters=args.num_clusters)
        update, compile_time = time_update(model, data[name], z, args.repeats)
        plain = time_sweep(model, data[name], z, args.sweeps, learned=False)
        learned = time_sweep(model, data[name], z, args.sweeps, learned=True)
        print(
            f"{name}: update {update:.2f} ms (compiled in {compile_time:.1f} s); sweep "
            f"of {args.num_rows} rows {plain:.1f} ms without, {learned:.1f} ms with "
            f"hyperparameters ({100 * (learned / plain - 1):+.0f} %)"
        )


if __name__ == "__main__":
    main()
