# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Figure 4 of the paper: strategies of inference within bounds on wall-clock time.

Cross-categorization with all hyperparameters on grids (Obermeyer et al., 2014, section
4), trained on a random 7/8 of the rows and scored on the rest by the sum of their log
predictive densities under the last state. A seed is a split and a chain; all strategies
have the same splits.

=================  ===================================================================
Anneal             `LinearSchedule`: an anneal that lasts as long as the bound
Prior+Gibbs        `PriorGibbs`: sweeps over all rows from a draw of the prior
Sequential+Gibbs   `SequentialGibbs`: sweeps, once each row was assigned in turn
Accelerating       `AcceleratingSchedule`, as long as the bound
Anneal 75/25       `LinearSchedule` for 75 % of the bound, then sweeps over all rows
Anneal 50/50       the same with 50 %
=================  ===================================================================

The time is that of steps of the kernel alone, without compiling and scoring; compile
times are printed and recorded. A chain is scored in the first state at or after its
bound, and the seconds that it had taken by then are recorded.

- Gibbs strategies: one chain, scored at each of the bounds as it goes. Its state is
  kept in a file at every bound, from which it goes on.
- Anneals: a chain for each bound. How many rows are churned for each row added is such
  that the anneal takes its share of the bound, by the seconds for each pass over the
  rows of the anneal before (that of the last bound, at first a short one, which is not
  scored); then come sweeps until the bound. An anneal that takes longer than expected
  runs to its end, and its seconds show it.

Programs are compiled once for each data set, as all splits have the same shape:
quickly, or, with `--optimise`, for minutes, into programs that are several times
faster. Results are lines of a file, one for each score, written as they come; a second
run goes on with those that are missing. `--plot` draws the panels from the file and
prints the table, without running anything.

    # 16 columns of the hospitals, two seeds, within two minutes
    python examples/paper/figure4.py --data FOLDER
    # a panel of the figure
    python examples/paper/figure4.py --data FOLDER --columns 0 --optimise \
        --num-clusters 64 --bounds 1 2 4 8 16 32 --seeds 8 --strategies all
    python examples/paper/figure4.py --data FOLDER --columns 0 --optimise \
        --dataset network --rows 10000 --bounds 5 10 20
    python examples/paper/figure4.py --plot
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
import json
import os
from pathlib import Path
import pickle
import time

import datasets  # noqa: I001  (beside this file)
import drawing
import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_subanneal import (
    AbstractSchedule,
    AcceleratingSchedule,
    LinearSchedule,
    PriorGibbs,
    SequentialGibbs,
    SubsampleAnnealedGibbs,
    predictive,
    reading,
)
from numpyro_subanneal.compiling import compile_for
from numpyro_subanneal.models import crosscat
from numpyro_subanneal.partitions import adjusted_rand

# Steps of every warm-up: the state has their number in its shape, so that one program
# serves all.
NUM_WARMUP = 32
# Passes over the rows of the first, short anneal.
FEW_PASSES = 3


@dataclass(frozen=True)
class Strategy:
    """
    - **schedule** - of a churn and the number of rows.
    - **anneal** - share of the bound that the anneal takes; None of a strategy whose
      chain does not depend on the bound.
    """

    schedule: type[AbstractSchedule] | partial
    anneal: float | None = None

    def make(self, churn: int, num_rows: int) -> AbstractSchedule:
        return self.schedule(churn, num_rows)


def linear(churn, num_rows):
    return LinearSchedule(churn)


def accelerating(churn, num_rows):
    # Few rows are a sixteenth of all: the passes over the last rows are then a quarter
    # of those over the first.
    return AcceleratingSchedule(churn, small_size=max(num_rows // 16, 1))


STRATEGIES = {
    "Anneal": Strategy(linear, 1.0),
    "Prior+Gibbs": Strategy(lambda churn, num_rows: PriorGibbs()),
    "Sequential+Gibbs": Strategy(lambda churn, num_rows: SequentialGibbs()),
    "Accelerating": Strategy(accelerating, 1.0),
    "Anneal 75/25": Strategy(linear, 0.75),
    "Anneal 50/50": Strategy(linear, 0.5),
}
OF_THE_PAPER = tuple(STRATEGIES)[:3]


# --- programs -------------------------------------------------------------------------


class Programs:
    """
    The steps and the score of a chain, compiled once for all splits of a data set.

    :param dataset: the whole table.
    :param num_clusters: capacity of each view.
    :param quickly: to save time on the programs rather than in them.
    :param options: of :func:`crosscat.mixed`: hyperparameters that are not learned.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        num_clusters: int,
        quickly: bool = False,
        **options: float,
    ):
        args = dataset.table.model_args
        self.model = partial(
            crosscat.mixed,
            num_categories=args.pop("num_categories", ()),
            num_clusters=num_clusters,
            **options,
        )
        self.arrays = args
        self.num_rows = dataset.num_rows
        self.num_test = round(self.num_rows / 8)
        self.num_clusters = num_clusters
        train, test = self.split(0)
        # NB: the kernel knows a table by its arrays, and reads the model anew for
        # others; so every split is written into the same ones.
        self._train, self._test = train, test
        begin = time.perf_counter()
        self._kernel = SubsampleAnnealedGibbs(self.model, LinearSchedule(0))
        self.train = jax.tree.map(_copy, train)
        self.start(random.key(0), LinearSchedule())  # compiled
        first = self.start(random.key(0), PriorGibbs())
        self.step = compile_for(self._step, first, self.train, quickly=quickly)
        # NB: to recognise the model once more would take as long as it did.
        self._plan = self._kernel._plan
        self._score = compile_for(
            self._log_density, first.z, train, test, quickly=quickly
        )
        self.compile_seconds = time.perf_counter() - begin

    def split(self, seed: int) -> tuple[dict, dict]:
        """The tables for training, 7/8 of the rows, and for scoring."""
        rows = np.random.default_rng([seed, self.num_rows]).permutation(self.num_rows)
        return tuple(
            {name: np.array(x[part]) for name, x in self.arrays.items()}
            for part in (rows[self.num_test :], rows[: self.num_test])
        )

    def _step(self, state, data):
        return self._kernel.sample(state, (), data)

    def use(self, seed: int) -> None:
        """Go over to the split of a seed."""
        for kept, new in zip((self._train, self._test), self.split(seed), strict=True):
            for name, x in new.items():
                kept[name][:] = x
        self.train = jax.tree.map(_copy, self._train)

    def start(self, rng_key, schedule: AbstractSchedule):
        """The first state of a chain, in the split in use."""
        num_rows = self.num_rows - self.num_test
        steps = schedule.checked_steps(num_rows, NUM_WARMUP)
        # Without a warm-up a chain starts from a draw of the prior, as that of
        # `PriorGibbs` does. Of a schedule, a step knows what the state says alone.
        num_warmup = 0 if schedule.starts_full else NUM_WARMUP
        state = self._kernel.init(rng_key, num_warmup, None, (), self._train)
        added, churned = jnp.asarray(steps.added), jnp.asarray(steps.churned)
        state = state._replace(added=added, churned=churned)
        return jax.block_until_ready(state)

    def score(self, state) -> float:
        """Sum of the log predictive densities of the rows held out, in nats."""
        return float(self._score(state.z, self._train, self._test))

    def _log_density(self, draw, train, test):
        # As `Posterior.log_density`, of one draw, and in one program for all splits.
        def masked(block):
            sites = tuple(replace(site, masked=True) for site in block.sites)
            return replace(block, sites=sites).apart()

        plan = self._plan
        plan = replace(plan, blocks=tuple(map(masked, plan.blocks)))
        values = {site.name: draw[site.name] for site in plan.hyper}
        found = reading.read(plan, self.model, (), train, values)
        z, labels = reading.from_draw(plan, draw)
        given = {site.name: {} for block in plan.blocks for site in block.sites}
        # A cluster more than can be occupied, for new rows.
        trained = predictive.train(
            found.prior, found.components, given, z, labels, self.num_clusters + 1,
            plan.layout,
        )  # fmt: skip
        new = replace(
            plan,
            partitions=tuple(
                replace(p, num_rows=self.num_test) for p in plan.partitions
            ),
        )
        components = reading.read(new, self.model, (), test, values).components
        data = tuple(tuple(c.data) for c in components)
        everything = jnp.ones(trained.view.shape, bool)

        def one(n):
            row = predictive.look_at(trained, data, n)
            return row.log_density(everything, ~everything)

        rows = jnp.arange(self.num_test, dtype=jnp.int32)
        return lax.map(one, rows, batch_size=min(64, self.num_test)).sum()


def _copy(x):
    # NB: JAX may take an array of NumPy as it is, and these are written to.
    return jnp.array(x, copy=True)


# --- chains ---------------------------------------------------------------------------


@dataclass
class Chain:
    """A state, and the seconds that its steps took."""

    state: object
    seconds: float = 0.0
    steps: int = 0

    def step(self, programs: Programs, clock) -> None:
        begin = clock()
        self.state = jax.block_until_ready(programs.step(self.state, programs.train))
        self.seconds += clock() - begin
        self.steps += 1

    def save(self, path: Path, bound: float) -> None:
        key = random.key_data(self.state.rng_key)
        state = jax.device_get(self.state._replace(rng_key=key))
        scratch = path.with_suffix(".new")
        scratch.write_bytes(pickle.dumps((bound, self.seconds, self.steps, state)))
        os.replace(scratch, path)  # whole or not at all

    @classmethod
    def load(cls, path: Path) -> tuple[float, "Chain"]:
        """The bound at which the chain was saved, and the chain."""
        bound, seconds, steps, state = pickle.loads(path.read_bytes())
        state = jax.tree.map(jnp.asarray, state)
        state = state._replace(rng_key=random.wrap_key_data(state.rng_key))
        return bound, cls(state, seconds, steps)


def run_gibbs(programs, strategy, rng_key, bounds, path, clock):
    """Yields the chain at each bound; goes on from `path`, if it can."""
    chain = None
    if path.exists():
        reached, saved = Chain.load(path)
        if reached <= min(bounds):
            chain = saved
    if chain is None:
        num_rows = programs.num_rows - programs.num_test
        chain = Chain(programs.start(rng_key, strategy.make(0, num_rows)))
    for bound in bounds:
        while chain.seconds < bound or chain.steps == 0:
            chain.step(programs, clock)
        chain.save(path, bound)
        yield bound, chain, {}


def run_anneal(programs, strategy, rng_key, bound, rate, clock):
    """
    The chain at the bound, and what is known of its anneal.

    :param rate: seconds for each move of the anneal before; None for the first.
    """
    num_rows = programs.num_rows - programs.num_test
    if rate is None:
        short = strategy.make(FEW_PASSES, num_rows)
        chain = Chain(programs.start(random.fold_in(rng_key, 1), short))
        while chain.steps < NUM_WARMUP:
            chain.step(programs, clock)
        rate = chain.seconds / moves(short, num_rows)
    # The moves are linear in the churn, but for rounding.
    least, many = (moves(strategy.make(c, num_rows), num_rows) for c in (0, 1000))
    wanted = strategy.anneal * bound / rate
    churn = max(0, round(1000 * (wanted - least) / (many - least)))
    schedule = strategy.make(churn, num_rows)
    chain = Chain(programs.start(rng_key, schedule))
    while chain.steps < NUM_WARMUP:
        chain.step(programs, clock)
    taken = chain.seconds
    while chain.seconds < bound:
        chain.step(programs, clock)
    rate = taken / moves(schedule, num_rows)
    return chain, {"churn": churn, "anneal_seconds": taken, "rate": rate}


def moves(schedule: AbstractSchedule, num_rows: int) -> int:
    steps = schedule.checked_steps(num_rows, NUM_WARMUP)
    return int(steps.added.sum(dtype=int) + steps.churned.sum(dtype=int))


def run_seed(programs, dataset, name, seed, bounds, results, clock):
    """All scores of a strategy and a seed that `results` does not have yet."""
    strategy = STRATEGIES[name]
    done = results.of(dataset.name, name, seed)
    missing = [bound for bound in sorted(bounds) if bound not in done]
    if not missing:
        return
    programs.use(seed)
    rng_key = random.fold_in(random.key(seed), list(STRATEGIES).index(name))

    def note(bound, chain, more):
        state = chain.state
        record = {
            "dataset": dataset.name,
            "num_made_up": dataset.num_made_up,
            "num_clusters": programs.num_clusters,
            "strategy": name,
            "seed": seed,
            "bound": bound,
            "seconds": chain.seconds,
            "score": programs.score(state),
            "num_test": programs.num_test,
            "view": np.asarray(state.z["view"]).tolist(),
            "clusters": np.asarray(state.num_clusters[: state.num_views]).tolist(),
            "log_joint": float(state.log_joint),
            "steps": chain.steps,
            "capacity_reached": int(state.capacity_reached),
            "compile_seconds": programs.compile_seconds,
            **more,
        }
        results.add(record)
        print(
            f"{dataset.name}, {name}, seed {seed}, bound {bound:g} s: "
            f"{chain.seconds:.1f} s, {record['score'] / programs.num_test:.2f} nats a "
            f"row, {int(state.num_views)} views",
            flush=True,
        )

    if strategy.anneal is None:
        path = results.folder / f"{dataset.name}, {name}, {seed}.chain"
        for found in run_gibbs(programs, strategy, rng_key, missing, path, clock):
            note(*found)
        return
    for i, bound in enumerate(sorted(bounds)):
        if bound in missing:
            before = [r for b, r in sorted(done.items()) if b < bound]
            rate = before[-1]["rate"] if before else None
            key = random.fold_in(rng_key, i)
            chain, more = run_anneal(programs, strategy, key, bound, rate, clock)
            note(bound, chain, more)
            done = results.of(dataset.name, name, seed)


# --- results --------------------------------------------------------------------------


class Results:
    """
    The lines of a file, and those that are added to it.

    :param folder: where the file is, ``figure4.jsonl``, and chains are kept.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "figure4.jsonl"
        self.records = []
        text = self.path.read_text() if self.path.exists() else ""
        for line in text.splitlines():
            try:
                self.records.append(json.loads(line))
            except json.JSONDecodeError:
                print(f"A line of {self.path} is not whole, and is left out.")
        if text and not text.endswith("\n"):  # a run was killed while it wrote
            with self.path.open("a") as file:
                file.write("\n")

    def add(self, record: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)

    def of(self, dataset: str, strategy: str, seed: int) -> dict[float, dict]:
        """Records by bound."""
        return {
            r["bound"]: r
            for r in self.records
            if (r["dataset"], r["strategy"], r["seed"]) == (dataset, strategy, seed)
        }

    def check(self, dataset: datasets.Dataset, num_clusters: int) -> None:
        for r in self.records:
            if r["dataset"] == dataset.name and r["num_clusters"] != num_clusters:
                raise SystemExit(
                    f"{self.path} has results of {dataset.name} with "
                    f"{r['num_clusters']} clusters; give another folder by --out, or "
                    "the same number."
                )


def run(args, clock):
    results = Results(args.out)
    for name in args.dataset:
        for num_rows in args.rows or [None]:
            dataset = datasets.load(name, args.data, num_rows, args.columns or None)
            print(f"{dataset.name}\n  {dataset.note}")
            results.check(dataset, args.num_clusters)
            todo = [
                (seed, strategy)
                for seed in range(args.seeds)
                # Each strategy comes first in turn, for what else the machine does.
                for strategy in np.roll(args.strategies, -seed).tolist()
                if set(args.bounds) - set(results.of(dataset.name, strategy, seed))
            ]
            if not todo:
                continue
            programs = Programs(dataset, args.num_clusters, not args.optimise)
            print(f"  compiled in {programs.compile_seconds:.0f} s", flush=True)
            for seed, strategy in todo:
                run_seed(programs, dataset, strategy, seed, args.bounds, results, clock)
    return results


# --- the figure -----------------------------------------------------------------------


def standardised(records: list[dict]) -> np.ndarray:
    """Scores of one data set, shifted and scaled to mean zero and variance one."""
    scores = np.array([r["score"] for r in records])
    return (scores - scores.mean()) / (scores.std() or 1.0)


def agreement(records: list[dict]) -> float:
    """Mean adjusted Rand index of the feature partitions of all pairs of runs."""
    views = [np.array(r["view"]) for r in records]
    pairs = [float(adjusted_rand(a, b)) for a, b in combinations(views, 2)]
    return float(np.mean(pairs)) if pairs else np.nan


def by_cell(records: list[dict]) -> dict[tuple[str, float], list[dict]]:
    """Records of one data set by strategy and bound, each with its `standard`."""
    cells = {}
    for record, standard in zip(records, standardised(records), strict=True):
        key = record["strategy"], record["bound"]
        cells.setdefault(key, []).append(record | {"standard": float(standard)})
    order = list(STRATEGIES)
    return dict(sorted(cells.items(), key=lambda c: (c[0][1], order.index(c[0][0]))))


def difference(records: list[dict], other: list[dict]) -> tuple[float, float, int, int]:
    """
    By how much scores are better than others of the same splits, in nats a row: the
    mean, its standard error, in how many seeds, and of how many.
    """
    rest = {r["seed"]: r["score"] for r in other}
    each = np.array(
        [
            (r["score"] - rest[r["seed"]]) / r["num_test"]
            for r in records
            if r["seed"] in rest
        ]
    )
    if not len(each):
        return np.nan, np.nan, 0, 0
    error = each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else np.nan
    return float(each.mean()), float(error), int((each > 0).sum()), len(each)


def show(records: list[dict]) -> None:
    """The table of one data set."""
    print(
        f"\n{records[0]['dataset']}, {records[0]['num_made_up']} rows made up; "
        f"{records[0]['num_test']} held out\n"
        f"{'':24}{'':>9}{'score, standardised':>27}{'nats a row':>11}"
        f"{'than Anneal':>23}{'columns':>9}\n"
        f"{'bound, strategy':24}{'seconds':>9}{'mean':>9}{'sd':>9}{'worst':>9}"
        f"{'mean':>11}{'nats a row':>15}{'better':>8}{'Rand':>9}{'views':>7}"
    )
    cells = by_cell(records)
    for (name, bound), own in cells.items():
        standard = np.array([r["standard"] for r in own])
        nats = np.mean([r["score"] / r["num_test"] for r in own])
        mean, error, better, num = difference(own, cells.get(("Anneal", bound), []))
        against = f"{mean:+8.2f} ± {error:4.2f}{f'{better}/{num}':>8}"
        if name == "Anneal" or not num:
            against = " " * 23
        print(
            f"{bound:6g} s {name:16}{np.mean([r['seconds'] for r in own]):8.1f}"
            f"{standard.mean():+9.2f}{standard.std(ddof=len(own) > 1):9.2f}"
            f"{standard.min():+9.2f}{nats:11.2f}{against:>23}{agreement(own):9.2f}"
            f"{np.mean([len(r['clusters']) for r in own]):7.1f}"
        )


def draw(results: Results) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = by_dataset(results)
    figure, axes = plt.subplots(
        2,
        len(groups),
        figsize=(4.5 * len(groups), 5.5),
        squeeze=False,
        sharex="col",
        layout="constrained",
    )
    used = [s for s in STRATEGIES if any(r["strategy"] == s for r in results.records)]
    lines = {}
    for (name, records), (above, below) in zip(groups.items(), axes.T, strict=True):
        cells = by_cell(records)
        for i, strategy in enumerate(used):
            own = {b: c for (s, b), c in cells.items() if s == strategy}
            if not own:
                continue
            color = lines[strategy] = f"C{i}"
            for bound, cell in own.items():
                x = np.full(len(cell), bound * 1.04 ** (i - (len(used) - 1) / 2))
                above.plot(x, [r["standard"] for r in cell], ".", color=color, ms=4)
            means = [np.mean([r["standard"] for r in c]) for c in own.values()]
            above.plot([*own], means, color=color)
            rand = [agreement(c) for c in own.values()]
            below.plot([*own], rand, ".-", color=color)
        above.set_title(name)
        above.set_xscale("log")
        bounds = sorted({bound for _, bound in cells})
        above.set_xticks(bounds, [f"{bound:g}" for bound in bounds])
        above.minorticks_off()
        above.set_ylabel("score, standardised")
        below.set_ylabel("adjusted Rand of columns")
        below.set_xlabel("bound, seconds")
    handles = [plt.Line2D([], [], color=color, label=s) for s, color in lines.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    path = results.folder / "figure4.png"
    drawing.save(figure, path)
    return path


def by_dataset(results: Results) -> dict[str, list[dict]]:
    groups = {}
    for record in results.records:
        groups.setdefault(record["dataset"], []).append(record)
    return groups


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--data", default="data", help="folder with the files")
    parser.add_argument("--dataset", nargs="+", default=["hospital"])
    parser.add_argument("--rows", nargs="+", type=int, help="sizes of the tables")
    parser.add_argument(
        "--columns", type=int, default=16, help="the first so many only; 0 for all"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--bounds", nargs="+", type=float, default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=list(OF_THE_PAPER))
    parser.add_argument("--num-clusters", type=int, default=32)
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="seconds on the wall, or of this process, if the machine is shared",
    )
    parser.add_argument(
        "--optimise",
        action="store_true",
        help="compile for minutes rather than seconds, for programs that are faster",
    )
    parser.add_argument("--out", type=Path, default=Path("output"))
    parser.add_argument("--plot", action="store_true", help="only plot what there is")
    args = parser.parse_args(argv)
    args.bounds = sorted(set(args.bounds))
    if args.strategies == ["all"]:
        args.strategies = list(STRATEGIES)
    if unknown := set(args.strategies) - set(STRATEGIES):
        parser.error(f"there is no strategy {unknown.pop()!r} in {list(STRATEGIES)}")
    return args


def main(argv=None):
    args = parse(argv)
    if hasattr(os, "sched_setaffinity"):
        # NB: before JAX starts its threads, which get into each other's way.
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    if args.plot:
        results = Results(args.out)
    else:
        clock = time.perf_counter if args.clock == "wall" else time.process_time
        results = run(args, clock)
    if not results.records:
        raise SystemExit(f"There are no results in {results.path}.")
    for records in by_dataset(results).values():
        show(records)
    print(f"\n{draw(results)}: the panels")


if __name__ == "__main__":
    main()
