# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Benchmark: cost of a row move
=============================

Times sweeps of collapsed Gibbs moves through :meth:`numpyro.infer.MCMC.run` on planted
clusters: categorical and real columns, several numbers of columns, of occupied clusters
and of rows. Each case runs in a process of its own, so that its compile time and peak
memory are its own too.

A time is that of a whole step, membership, random numbers and the draw of every
cluster's parameters included, divided by the number of moves. In a sweep of all rows
("sweep") nearly every row goes back to the planted cluster that it was in, which writes
nothing; while the chain anneals ("anneal") one row leaves and another enters at each
move, from no rows on. Compare ratios within one run, since machines differ.

    python examples/benchmarks/row_moves.py            # the table, about 10 minutes
    python examples/benchmarks/row_moves.py --pairs    # every pair, half an hour
    python examples/benchmarks/row_moves.py --quick    # two small cases
    python examples/benchmarks/row_moves.py --large    # memory of annealing 10^6 x 68
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import time

import numpy as np

NUM_CATEGORIES = 16


def planted(kind, num_rows, num_columns, num_clusters, seed=0):
    """Well-separated clusters: data ``[rows, columns]`` and the cluster of each row."""
    rng = np.random.default_rng(seed)
    z = np.arange(num_rows) % num_clusters
    if kind == "real":
        loc = rng.normal(size=(num_clusters, num_columns)) * 5
        if num_columns <= 2:  # on a grid, or they would overlap
            side = int(np.ceil(num_clusters**0.5))
            grid = np.stack(np.unravel_index(np.arange(num_clusters), (side, side)), 1)
            loc = 12.0 * grid[:, :num_columns]
        x = np.empty((num_rows, num_columns), np.float32)
        for start in range(0, num_rows, 100_000):
            part = z[start : start + 100_000]
            x[start : start + 100_000] = loc[part] + rng.normal(
                size=(len(part), num_columns)
            )
        return x, z
    # Each cluster has a favoured category in each column. In few columns there are not
    # enough categories to keep many clusters apart; they merge while the sweeps run.
    favoured = rng.integers(NUM_CATEGORIES, size=(num_clusters, num_columns))
    if num_columns == 2:
        pairs = np.unravel_index(
            np.arange(num_clusters) * 5 % NUM_CATEGORIES**2,
            (NUM_CATEGORIES, NUM_CATEGORIES),
        )
        favoured = np.stack(pairs, 1)
    x = np.empty((num_rows, num_columns), np.int32)
    for start in range(0, num_rows, 100_000):
        part = z[start : start + 100_000]
        noise = rng.integers(NUM_CATEGORIES, size=(len(part), num_columns))
        keep = rng.random((len(part), num_columns)) < 0.95
        x[start : start + 100_000] = np.where(keep, favoured[part], noise)
    return x, z


def make_model(kind, capacity):
    import jax.numpy as jnp

    import numpyro
    import numpyro.distributions as dist

    from numpyro_subanneal import ChineseRestaurantProcess

    def model(x):
        num_rows, num_columns = x.shape
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=num_rows))
        with numpyro.plate("columns", num_columns, dim=-1):
            with numpyro.plate("clusters", capacity, dim=-2):
                if kind == "real":
                    var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
                    loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.01)))
                else:
                    concentration = jnp.full(NUM_CATEGORIES, 0.1)
                    probs = numpyro.sample("probs", dist.Dirichlet(concentration))
            with numpyro.plate("rows", num_rows, dim=-2):
                if kind == "real":
                    fn = dist.Normal(loc[z], jnp.sqrt(var[z]))
                else:
                    fn = dist.Categorical(probs[z])
                numpyro.sample("x", fn, obs=x)

    return model


# --- Every pair -----------------------------------------------------------------------

NUM_COLUMNS = 68


def pair_models():
    """
    Pair -> cluster parameters (declared by `sample`) and likelihood. Priors are wide
    beside the likelihoods, so that clusters drawn from them are well apart.
    """
    import jax.numpy as jnp

    import numpyro.distributions as dist

    def beta(sample):
        return (sample("probs", dist.Beta(0.5, 0.5)),)

    def gamma(sample):
        return (sample("rate", dist.Gamma(0.5, 0.1)),)

    def inverse_gamma(sample):
        return (sample("var", dist.InverseGamma(0.5, 0.5)),)

    def location(sample):
        return (sample("loc", dist.Normal(0.0, 5.0)),)

    def two(sample):
        var = sample("var", dist.InverseGamma(2.0, 1.0))
        return sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.04))), jnp.sqrt(var)

    def two_by_precision(sample):
        precision = sample("precision", dist.Gamma(2.0, 1.0))
        loc = sample("loc", dist.Normal(0.0, 1 / jnp.sqrt(0.04 * precision)))
        return loc, 1 / jnp.sqrt(precision)

    def beta_below_one(sample):  # of which no count is astronomic
        return (sample("probs", dist.Beta(2.0, 5.0)),)

    def dirichlet(num):
        return lambda sample: (sample("probs", dist.Dirichlet(jnp.full(num, 0.1))),)

    def covariance(p):
        def declare(sample):
            scale = jnp.eye(p)
            cov = sample("cov", dist.InverseWishart(p + 2.0, scale_matrix=scale))
            return sample("loc", dist.MultivariateNormal(jnp.zeros(p), 100 * cov)), cov

        return declare

    def precision(p):
        def declare(sample):
            prec = sample("prec", dist.Wishart(p + 2.0, rate_matrix=jnp.eye(p)))
            fn = dist.MultivariateNormal(jnp.zeros(p), precision_matrix=0.01 * prec)
            return sample("loc", fn), prec

        return declare

    def vector(p):
        fn = dist.MultivariateNormal(jnp.zeros(p), 100 * jnp.eye(p))
        return lambda sample: (sample("loc", fn),)

    univariate = {
        "Dirichlet-Categorical, C=16": (dirichlet(16), dist.Categorical),
        "Beta-Bernoulli": (beta, lambda p: dist.Bernoulli(probs=p)),
        "Beta-Binomial, n=10": (beta, lambda p: dist.Binomial(10, probs=p)),
        "Beta-Binomial, n by row": (beta, "binomial by row"),
        "Beta-Geometric": (beta, lambda p: dist.Geometric(probs=p)),
        "Beta-NegativeBinomial": (
            beta_below_one,
            lambda p: dist.NegativeBinomialProbs(3.0, p),
        ),
        "Gamma-Poisson": (gamma, dist.Poisson),
        "Gamma-Exponential": (gamma, dist.Exponential),
        "Gamma-Gamma": (gamma, lambda rate: dist.Gamma(2.0, rate)),
        "InverseGamma-Normal": (inverse_gamma, lambda v: dist.Normal(0, jnp.sqrt(v))),
        "Normal-Normal": (location, lambda loc: dist.Normal(loc, 1.0)),
        "Normal-Normal, scale by row": (location, "scale by row"),
        "(InverseGamma, Normal)-Normal": (two, dist.Normal),
        "(Gamma, Normal)-Normal": (two_by_precision, dist.Normal),
        "(InverseGamma, Normal)-LogNormal": (two, dist.LogNormal),
        "VonMises-VonMises": (
            lambda sample: (sample("loc", dist.VonMises(0.0, 0.1)),),
            lambda loc: dist.VonMises(loc, 5.0),
        ),
        "Dirichlet-Multinomial, C=4": (
            dirichlet(4),
            lambda p: dist.Multinomial(10, probs=p, total_count_max=10),
        ),
    }
    multivariate = {}
    for p in (2, 5, 10, 20):
        multivariate |= {
            f"(InverseWishart, MVN)-MVN, p={p}": (
                covariance(p),
                lambda loc, cov: dist.MultivariateNormal(loc, cov),
            ),
            f"(Wishart, MVN)-MVN, p={p}": (
                precision(p),
                lambda loc, prec: dist.MultivariateNormal(loc, precision_matrix=prec),
            ),
            f"MVN-MVN, p={p}": (
                vector(p),
                lambda loc, p=p: dist.MultivariateNormal(loc, jnp.eye(p)),
            ),
        }
    return univariate, multivariate


def make_pair_model(name, capacity, num_rows, num_columns):
    import jax.numpy as jnp

    import numpyro
    import numpyro.distributions as dist

    from numpyro_subanneal import ChineseRestaurantProcess

    univariate, multivariate = pair_models()
    declare, likelihood = (univariate | multivariate)[name]
    rng = np.random.default_rng(1)
    by_row = {
        "binomial by row": lambda p, n: dist.Binomial(n, probs=p),
        "scale by row": lambda loc, n: dist.Normal(loc, 0.1 * n),
    }
    total = rng.integers(5, 15, size=(num_rows, num_columns)).astype(np.int32)

    def model(x=None, total=total):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=num_rows))
        with numpyro.plate("columns", num_columns, dim=-1):
            with numpyro.plate("clusters", capacity, dim=-2):
                theta = declare(numpyro.sample)
            with numpyro.plate("rows", num_rows, dim=-2):
                theta = [jnp.asarray(t)[z] for t in theta]
                if likelihood in by_row:
                    fn = by_row[likelihood](*theta, jnp.asarray(total))
                else:
                    fn = likelihood(*theta)
                numpyro.sample("x", fn, obs=x)

    return model


def planted_pair(name, num_rows, num_columns, num_clusters, capacity):
    """Model, arguments and clusters of planted data of a pair."""
    import jax
    from jax import random

    from numpyro import handlers

    z = (np.arange(num_rows) % num_clusters).astype(np.int32)
    model = make_pair_model(name, capacity, num_rows, num_columns)

    def draw():
        fixed = handlers.substitute(handlers.seed(model, random.key(0)), {"z": z})
        return handlers.trace(fixed).get_trace()["x"]["value"]

    return model, (np.asarray(jax.jit(draw)()),), z


def run_pair(name, num_columns, beside, moves, **sizes):
    """
    Times of a pair, and how many times those of the pair `beside` they are, by number
    of values: both run in turn, since machines are now fast and now slow.
    """
    table = planted_pair(name, num_columns=num_columns, **sizes)
    other_table = planted_pair(beside, num_columns=NUM_COLUMNS, **sizes)
    share = other_table[1][0].size / table[1][0].size
    result = {"us": {}, "ratio": {}}
    for kind in ("sweep", "anneal"):
        own = Timed(*table, moves, kind)
        if kind == "sweep":
            result["compile"], result["peak"] = own.compile, peak_mb()
            result["occupied"] = own.occupied()
        other = Timed(*other_table, moves, kind)
        both = [(own.run(seed), other.run(seed)) for seed in range(1, 6)]
        ratios = [us / other_us for us, other_us in both]
        result["us"][kind] = min(us for us, _ in both)
        result["ratio"][kind] = float(np.median(ratios)) * share
    return result


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_case(kind, num_rows, num_columns, num_clusters, capacity, moves):
    x, z = planted(kind, num_rows, num_columns, num_clusters)
    model = make_model(kind, capacity)
    sweep = Timed(model, (x,), z, moves, "sweep")
    us = min(sweep.run(seed) for seed in range(1, 4))
    peak = peak_mb()
    anneal = Timed(model, (x,), z, moves, "anneal")
    return {
        "us": us,
        "anneal": min(anneal.run(seed) for seed in range(1, 4)),
        "compile": sweep.compile,
        "occupied": sweep.occupied(),
        "peak": peak,
    }


class Timed:
    """
    Chains of about so many moves, in sweeps of all rows from assignments `z` on, or
    from no rows to all. Made with two runs; the first takes longer by compiling.

    - **compile** - its seconds.
    """

    def __init__(self, model, args, z, moves, kind):
        from numpyro.infer import MCMC

        from numpyro_subanneal import LinearSchedule, SubsampleAnnealedGibbs

        num_rows = len(z)
        num_steps = max(1, moves // num_rows)
        self.annealed = kind == "anneal"
        self.args = args
        self.options = {"extra_fields": ("~z.z",)}
        if self.annealed:
            steps = LinearSchedule().steps(num_rows, num_steps)
            self.num_moves = int(steps.added.sum() + steps.churned.sum())
        else:
            self.options["init_params"] = {"z": z.astype(np.int32)}
            self.num_moves = num_steps * num_rows
        self.mcmc = MCMC(
            SubsampleAnnealedGibbs(model, split_merge=None),
            num_warmup=num_steps if self.annealed else 0,
            num_samples=1 if self.annealed else num_steps,
            # Without its progress bar NumPyro compiles anew at every run.
            progress_bar=True,
            jit_model_args=True,
        )
        first, second = self.run(0), self.run(0)
        self.compile = (first - second) * self.num_moves / 1e6

    def run(self, seed):
        """Microseconds a move."""
        import jax
        from jax import random

        start = time.perf_counter()
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            run = self.mcmc.warmup if self.annealed else self.mcmc.run
            run(random.key(seed), *self.args, **self.options)
        jax.block_until_ready(self.mcmc.last_state)
        return (time.perf_counter() - start) / self.num_moves * 1e6

    def occupied(self):
        return float(self.mcmc.get_extra_fields()["num_clusters"].mean())


def run_large(num_rows, num_columns, num_warmup):
    import jax
    from jax import random

    from numpyro.infer import MCMC

    from numpyro_subanneal import SubsampleAnnealedGibbs

    x, _ = planted("categorical", num_rows, num_columns, 20)
    before = peak_mb()
    mcmc = MCMC(
        SubsampleAnnealedGibbs(make_model("categorical", 64), split_merge=None),
        num_warmup=num_warmup,
        num_samples=1,
        progress_bar=False,
        jit_model_args=True,
    )
    start = time.perf_counter()
    mcmc.run(random.key(0), x, extra_fields=("~z.z",))
    jax.block_until_ready(mcmc.last_state)
    return {
        "seconds": time.perf_counter() - start,
        "clusters": int(mcmc.last_state.num_clusters),
        "data": x.nbytes / 2**20,
        "before": before,
        "peak": peak_mb(),
    }


def compare_memory(num_rows, num_columns, num_warmup):
    """What a run on many rows adds to the memory, beside what one on few adds."""
    added = []
    for rows in (10_000, num_rows):
        r = in_a_process(
            dict(num_rows=rows, num_columns=num_columns, num_warmup=num_warmup)
        )
        added.append(r["peak"] - r["before"])
        print(
            f"{rows} x {num_columns} categorical, {num_warmup} warm-up steps and a "
            f"sweep: {r['seconds']:.0f} s in all, {r['clusters']} clusters; data "
            f"{r['data']:.0f} MB; peak {r['peak']:.0f} MB, of which {r['before']:.0f} "
            "MB before the run (Python, libraries, data)"
        )
    few, many = added
    print(
        f"the run adds {few:.0f} MB to 10,000 rows, most of it to compile, and "
        f"{many:.0f} MB to {num_rows}: {(many - few) / r['data']:.2f} times the data "
        "more"
    )


def in_a_process(case):
    """`case` run by this script in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(case)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare_pairs(moves, quick):
    """Every pair beside Dirichlet-Categorical, the first: ratios of time a value."""
    univariate, multivariate = pair_models()
    cases = [(name, NUM_COLUMNS) for name in univariate]
    cases += [(name, 1) for name in multivariate]
    if quick:
        cases = cases[:2]
    print(f"{platform.machine()}, {platform.python_version()}, {time.strftime('%F')}")
    print("10,000 rows, capacity 64, 20 clusters")
    print(
        f"{'pair':<36}{'columns':>8}{'occupied':>9}{'sweep us':>10}{'ratio':>7}"
        f"{'anneal us':>10}{'ratio':>7}{'compile s':>10}{'peak MB':>9}"
    )
    for name, num_columns in cases:
        r = in_a_process(
            dict(
                name=name,
                num_columns=num_columns,
                beside=cases[0][0],
                moves=moves,
                num_rows=10_000,
                num_clusters=20,
                capacity=64,
            )
        )
        us, ratio = r["us"], r["ratio"]
        print(
            f"{name:<36}{num_columns:>8}{r['occupied']:>9.1f}"
            f"{us['sweep']:>10.2f}{ratio['sweep']:>7.2f}"
            f"{us['anneal']:>10.2f}{ratio['anneal']:>7.2f}{r['compile']:>10.1f}"
            f"{r['peak']:>9.0f}",
            flush=True,
        )


def main(args):
    if args.case is not None:
        case = json.loads(args.case)
        run = run_large if "num_warmup" in case else run_case
        print(json.dumps((run_pair if "name" in case else run)(**case)))
        return
    if args.pairs:
        compare_pairs(args.moves, args.quick)
        return
    if args.large:
        compare_memory(args.num_rows, 68, args.num_warmup)
        return
    cases = [
        (kind, num_rows, num_columns, num_clusters, 64)
        for kind in ("categorical", "real")
        for num_columns in (2, 16, 68)
        for num_clusters in (5, 20, 50)
        for num_rows in (1_000, 100_000)
    ]
    reference = [("real", n, d, 15, 32) for d in (63, 2) for n in (1_000, 100_000)]
    if args.quick:
        cases = [("categorical", 1_000, 2, 5, 16)]
        reference = [("real", 1_000, 2, 15, 16)]
    print(f"{platform.machine()}, {platform.python_version()}, {time.strftime('%F')}")
    print(
        f"{'kind':<12}{'columns':>8}{'rows':>8}{'capacity':>9}{'occupied':>9}"
        f"{'sweep us':>10}{'anneal us':>10}{'ns/cell':>9}{'compile s':>10}"
        f"{'peak MB':>9}"
    )
    for kind, num_rows, num_columns, num_clusters, capacity in cases + reference:
        case = dict(
            kind=kind,
            num_rows=num_rows,
            num_columns=num_columns,
            num_clusters=num_clusters,
            capacity=capacity,
            moves=args.moves,
        )
        r = in_a_process(case)
        print(
            f"{kind:<12}{num_columns:>8}{num_rows:>8}{capacity:>9}{r['occupied']:>9.1f}"
            f"{r['us']:>10.2f}{r['anneal']:>10.2f}"
            f"{r['us'] / num_columns * 1e3:>9.0f}{r['compile']:>10.1f}"
            f"{r['peak']:>9.0f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--moves", type=int, default=200_000, help="moves timed a case")
    parser.add_argument("--pairs", action="store_true", help="every conjugate pair")
    parser.add_argument("--quick", action="store_true", help="two small cases")
    parser.add_argument("--large", action="store_true", help="memory at 10^6 rows")
    parser.add_argument("--num-rows", type=int, default=1_000_000, help="with --large")
    parser.add_argument("--num-warmup", type=int, default=5, help="with --large")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    main(parser.parse_args())
