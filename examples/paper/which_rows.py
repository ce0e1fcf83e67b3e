# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Which rows leave the subsample and which enter, and when to stop the anneal.

The paper takes rows out and puts them in at random, suspects that rare rows which are
missed early are missed for good, and hopes for stratified subsampling (Obermeyer et
al., 2014, section 5). Here, by the two methods of a schedule that choose rows, at equal
numbers of moves, with sweeps over all rows after every anneal:

====================  ================================================================
uniform               `LinearSchedule` as it is
first in, first out   rows leave in the order in which they entered
rare strata first     of `--num-candidates` rows that are out, drawn at random, the
                      one of the smallest stratum enters; strata are found from the
                      table: each row is of the nearest of 64 rows far apart
planted strata first  the same with the planted clusters as strata: the most that could
                      be gained
Sequential+Gibbs      no anneal
Prior+Gibbs           no anneal
====================  ================================================================

Then the anneal has shares of the same number of moves, and sweeps over all rows the
rest.

The table is planted: ten clusters, and ten rare ones of 0.1 % of the rows each, beside
a large cluster, `--gap` standard deviations from its centre. A rare cluster counts as
found if more than half of the rows of some cluster are of it, and more than half of it
are there. Scores are log densities of new rows, those of rare clusters apart, and the
log joint probability, less that of a chain that starts from the planted partition, per
row. Differences are shown with their standard errors over chains: all are of one
table. `--dataset` takes one of :mod:`datasets` instead, 7/8 of it to train on, all
hyperparameters learned, which takes minutes to compile.

    python examples/paper/which_rows.py
    python examples/paper/which_rows.py --num-candidates 64      # strata weigh more
    python examples/paper/which_rows.py --num-rows 100000 --churn 20 --seeds 20
    python examples/paper/which_rows.py --dataset network --data FOLDER
"""

import argparse
from dataclasses import dataclass, field
from functools import partial
import time

import datasets  # noqa: I001  (beside this file)
import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_subanneal import (
    LinearSchedule,
    Posterior,
    PriorGibbs,
    SequentialGibbs,
    SplitMerge,
    SubsampleAnnealedGibbs,
)
from numpyro_subanneal.compiling import quick_options
from numpyro_subanneal.models import mixture
from numpyro_subanneal.variates import below

# Steps of every warm-up: one program then serves all shares.
NUM_WARMUP = 16


# --- Schedules ----------------------------------------------------------------


@dataclass(frozen=True)
class FirstInFirstOut(LinearSchedule):
    """
    Rows leave in turn. A row that enters takes the place of the one that leaves, so
    that they leave in the order in which they came, but for those whose turn it is when
    another is added.
    """

    def leaving(self, bits, order, size, move):
        return move


@dataclass(frozen=True)
class RareFirst(LinearSchedule):
    """
    Of some rows that are out, drawn at random, the one of the smallest stratum enters.

    :param stratum_size: the number of rows in the stratum of each row, ``[N]``.
    :param num_candidates: of how many.
    """

    # NB: not compared, so that schedules remain values.
    stratum_size: np.ndarray = field(default=None, compare=False, repr=False)
    num_candidates: int = 4

    def entering(self, bits, order, size, vacant):
        which = below(several(bits, self.num_candidates), order.shape[0] - size + 1)
        places = jnp.where(which == 0, vacant, size - 1 + which)
        sizes = jnp.asarray(self.stratum_size)[order[places]]
        return places[jnp.argmin(sizes)]


def several(bits, num):
    """Random bits made of others: the first alone is independent of all else, but the
    rest looks so (the finalizer of MurmurHash3, of a Weyl sequence)."""
    x = bits + jnp.arange(num, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def strata(x, num_strata=64, seed=0):
    """
    The stratum of each row: the nearest of `num_strata` rows, each of which is the one
    farthest from those before it, on standardised columns (Gonzalez, 1985).
    """
    x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    row = np.random.default_rng(seed).integers(len(x))
    distance, stratum = np.full(len(x), np.inf), np.zeros(len(x), int)
    for k in range(num_strata):
        new = ((x - x[row]) ** 2).sum(1)
        stratum[new < distance] = k
        distance = np.minimum(distance, new)
        row = distance.argmax()
    return stratum


def sizes_of(stratum):
    return np.bincount(stratum)[stratum].astype(np.int32)


# --- Tables -------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """
    - **name** - what it is.
    - **train**, **test** - arguments of :func:`models.mixture.mixed
      <numpyro_subanneal.models.mixture.mixed>`.
    - **options** - others of them.
    - **columns** - columns of numbers from which strata are found, ``[N, D]``.
    - **z** - planted clusters of the rows to train on, or None; those from `num_common`
      on are rare.
    - **z_test** - the same of the test rows.
    - **num_common** - number of clusters that are not rare.
    """

    name: str
    train: dict
    test: dict
    options: dict
    columns: np.ndarray
    z: np.ndarray | None = None
    z_test: np.ndarray | None = None
    num_common: int = 0


def planted(num_rows, gap, seed=0, num_columns=6, num_common=10, num_rare=10):
    rng = np.random.default_rng(seed)
    rare_size = max(num_rows // 1000, 2)
    weights = rng.dirichlet([5.0] * num_common)
    loc = rng.normal(0, 3, (num_common, num_columns))
    away = rng.normal(size=(num_rare, num_columns))
    away *= gap / np.linalg.norm(away, axis=1, keepdims=True)
    loc = np.concatenate([loc, loc[np.arange(num_rare) % num_common] + away])

    def rows(num, rare):
        common = rng.choice(num_common, size=num - num_rare * rare, p=weights)
        z = np.append(common, np.repeat(num_common + np.arange(num_rare), rare))
        z = rng.permutation(z)
        return z, (loc[z] + rng.normal(size=(num, num_columns))).astype(np.float32)

    z, x = rows(num_rows, rare_size)
    z_test, x_test = rows(1000 + num_rare * 50, 50)
    return Data(
        f"planted, {num_rows} x {num_columns}, {num_rare} of {num_common + num_rare} "
        f"clusters of {rare_size} rows",
        {"real": x},
        {"real": x_test},
        {"concentration": 1.0, "discount": 0.1, "kappa": 0.1, "shape": 2.0},
        x,
        z,
        z_test,
        num_common,
    )


def of_dataset(dataset, seed=0, **options):
    """One of :mod:`datasets`; hyperparameters that are not given are learned."""
    args = dataset.table.model_args
    options |= {"num_categories": args.pop("num_categories", ())}
    arrays = {name: np.asarray(x) for name, x in args.items()}
    num_rows = dataset.num_rows
    rows = np.random.default_rng([seed, num_rows]).permutation(num_rows)
    test, train = np.split(rows, [num_rows // 8])
    columns = [arrays[name] for name in ("real", "binary") if name in arrays]
    for d, num in enumerate(options["num_categories"]):
        columns.append(arrays["categorical"][:, [d]] == np.arange(num))
    return Data(
        dataset.name,
        *({name: x[part] for name, x in arrays.items()} for part in (train, test)),
        options,
        np.concatenate(columns, 1)[train].astype(float),
    )


# --- Chains -------------------------------------------------------------------


class Program:
    """
    Chains of a table, with rows chosen as `schedule` does, by any steps.

    :param split_merge: whether splits and merges of clusters are proposed.
    """

    def __init__(self, data, schedule, num_clusters, split_merge):
        self.model = partial(mixture.mixed, num_clusters=num_clusters, **data.options)
        self.data = data
        moves = SplitMerge() if split_merge else None
        self.kernel = SubsampleAnnealedGibbs(self.model, schedule, split_merge=moves)
        self.step = jax.jit(
            lambda state: self.kernel.sample(state, (), data.train),
            compiler_options=quick_options(level=1),
        )

    def start(self, seed, schedule=None):
        """The first state of a chain, of another schedule's steps if it is given."""
        # Of a schedule that starts full, a chain without a warm-up: from the prior. A
        # step knows of the steps what the state says alone.
        schedule = self.kernel.schedule if schedule is None else schedule
        num_warmup = 0 if schedule.starts_full else NUM_WARMUP
        key, table = random.key(seed), self.data.train
        state = self.kernel.init(key, num_warmup, None, (), table)
        num_rows = state.order.shape[0]
        steps = map(jnp.asarray, schedule.checked_steps(num_rows, NUM_WARMUP))
        return state._replace(**dict(zip(("added", "churned"), steps, strict=True)))

    def planted(self, state):
        """A chain that is at the end of its warm-up, from the planted partition."""
        z = {**state.z, "z": jnp.asarray(self.data.z, jnp.int32)}
        return self.run(state._replace(z=z), 1)

    def run(self, state, num_steps):
        for _ in range(num_steps):
            state = self.step(state)
        return jax.block_until_ready(state)


def num_found(z, true, num_common):
    """Rare clusters of which more than half is together, and the majority there."""
    found = 0
    for k in range(num_common, true.max() + 1):
        inside = z[true == k]
        most = np.bincount(inside).argmax()
        together = (inside == most).sum()
        found += 2 * together > max(len(inside), (z == most).sum())
    return int(found)


def measures(data, states, num_clusters):
    """Of the last states of chains, by name: ``[chains]`` each."""
    model = partial(mixture.mixed, num_clusters=num_clusters, **data.options)
    draws = {name: jnp.stack([s.z[name] for s in states])[None] for name in states[0].z}
    posterior = Posterior(model, draws, (), data.train)
    log_density = posterior.log_density(**data.test)
    num_rows = states[0].order.shape[0]
    found = {
        "new rows": log_density.mean(1),
        "log joint": np.array([float(s.log_joint) for s in states]) / num_rows,
        "clusters": np.array([float(s.num_clusters) for s in states]),
    }
    if data.z is not None:
        rare = data.z_test >= data.num_common
        found["new rows"] = log_density[:, ~rare].mean(1)
        found["rare rows"] = log_density[:, rare].mean(1)
        found["rare found"] = np.array(
            [num_found(np.asarray(s.z["z"]), data.z, data.num_common) for s in states],
            float,
        )
    return found


def difference(values, base):
    """Mean and standard error of the differences from the first row's chains."""
    each = values - base
    return each.mean(), each.std(ddof=1) / np.sqrt(len(each))


def show(title, found, num_seeds, expected=None):
    """
    A table: of each name, means over chains, and after the first the difference from
    it with its standard error.

    :param found: measures of all chains, ``[names * seeds]``, by name.
    """
    names, values = found
    columns = [*values]
    print(f"\n{title}")
    print(f"{'':24}" + "".join(f"{c:>25}" for c in columns))
    if expected is not None:
        row = "".join(f"{expected[c][0]:10.3f}{'':15}" for c in columns)
        print(f"{'from the planted':24}{row}")
    for i, name in enumerate(names):
        row = f"{name:24}"
        for c in columns:
            each = values[c].reshape(-1, num_seeds)
            row += f"{each[i].mean():10.3f}"
            mean, error = difference(each[i], each[0])
            row += f"{mean:+9.3f} ±{error:4.3f}" if i else " " * 15
        print(row)


BASELINES = {"Sequential+Gibbs": SequentialGibbs(), "Prior+Gibbs": PriorGibbs()}


def compare(
    data,
    churn,
    num_sweeps,
    seeds,
    num_clusters=64,
    split_merge=False,
    shares=(),
    num_candidates=4,
    only=None,
):
    """
    Both tables, as the names of their rows and the measures of all chains.

    :param churn: rows churned for each row added.
    :param num_sweeps: sweeps over all rows after the anneal.
    :param shares: of the moves, which the anneal has.
    :param only: names of ways to choose rows, beside uniform; all by default.
    """
    rare = sizes_of(strata(data.columns))
    linear = LinearSchedule(churn)
    programs = {"uniform": linear, "first in, first out": FirstInFirstOut(churn)}
    programs["rare strata first"] = RareFirst(churn, rare, num_candidates)
    if data.z is not None:
        oracle = RareFirst(churn, sizes_of(data.z), num_candidates)
        programs["planted strata first"] = oracle
    if only is not None:
        programs = {k: v for k, v in programs.items() if k in ("uniform", *only)}
    runs, states, baseline = [], [], None
    num_steps = NUM_WARMUP + num_sweeps
    for name, schedule in programs.items():
        begin = time.perf_counter()
        program = Program(data, schedule, num_clusters, split_merge)
        states += [program.run(program.start(s), num_steps) for s in seeds]
        runs.append(name)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
        if baseline is None:
            baseline = program
    # At equal moves: the first step is a sweep, too.
    budget = 1 + churn + num_sweeps
    cold = []
    for name, schedule in BASELINES.items():
        cold += [baseline.run(baseline.start(s, schedule), budget) for s in seeds]
        runs.append(name)
    stops, ends = [], []
    for share in shares:
        less = max(round(share * budget) - 1, 0)
        rest = budget - 1 - less
        stops.append(f"{less + 1} + {rest} sweeps")
        ends += [
            baseline.run(baseline.start(s, LinearSchedule(less)), NUM_WARMUP + rest)
            for s in seeds
        ]
    truth = []
    if data.z is not None:
        truth = [baseline.planted(states[0])]
    found = measures(data, states + cold + ends + truth, num_clusters)
    num = len(states) + len(cold)
    which = {c: v[:num] for c, v in found.items()}
    when = {c: v[num : num + len(ends)] for c, v in found.items()}
    expected = {c: v[num + len(ends) :] for c, v in found.items()} if truth else None
    return (runs, which), (stops, when), expected


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--num-rows", type=int, default=10_000)
    parser.add_argument("--gap", type=float, default=4.0, help="of rare clusters")
    parser.add_argument("--churn", type=int, default=8)
    parser.add_argument("--num-sweeps", type=int, default=2, help="after the anneal")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[1.0, 0.75, 0.5, 0.25]
    )
    parser.add_argument("--num-clusters", type=int, default=64)
    parser.add_argument(
        "--split-merge", action="store_true", help="of clusters; the paper has none"
    )
    parser.add_argument("--num-candidates", type=int, default=4, help="for a place")
    parser.add_argument("--only", nargs="*", help="these ways, beside uniform")
    parser.add_argument("--dataset", help="in place of the planted table")
    parser.add_argument("--data", default="data", help="folder with the files")
    args = parser.parse_args(argv)
    if args.dataset:
        few = None if args.dataset == "hospital" else args.num_rows
        data = of_dataset(datasets.load(args.dataset, args.data, few))
    else:
        data = planted(args.num_rows, args.gap)
    print(f"{data.name}; {args.seeds} chains")
    which, when, expected = compare(
        data,
        args.churn,
        args.num_sweeps,
        range(args.seeds),
        args.num_clusters,
        args.split_merge,
        args.shares,
        args.num_candidates,
        args.only,
    )
    title = f"Which rows: {1 + args.churn} sweeps of annealing, {args.num_sweeps} more"
    show(title, which, args.seeds, expected)
    if args.shares:
        show("How much of it is annealing", when, args.seeds)
    return which, when, expected


if __name__ == "__main__":
    main()
