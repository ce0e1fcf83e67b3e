# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Benchmark: against other tools
==============================

Runs this package and, where they are installed, Lace (``pip install pylace polars``),
scikit-learn's `BayesianGaussianMixture` (variational) and NumPyro's `DiscreteHMCGibbs`
on the same tables, one chain on one core, and shows how good the partitions are that
each has found after how long. What is scored is the partition, by ``scoring.py``: nats
a held-out row, and the adjusted Rand index with the planted partition, if there is one.

A table is one of these, the first with a number of rows, or a path: to a ``.csv``, or
to an ``.npz`` with `X`, `ncat` (0 of real columns) and maybe `views`, `Z`, `train`,
`test`. A file whose columns are in one view only, as all with one true view, is given
to mixtures, others to cross-categorization.

=================  ====================================================================
categories-1000    68 categorical columns, 20 clusters
plane-1000         2 real columns, 15 clusters that overlap, axes of the clusters known
ellipses-1000      the same, turned
views-2000         60 real columns in 5 views of 6 clusters
network-10000      and hospital, census-1000, income-10000: tables of the paper, from
                   the folder `--data`, see ``examples/paper/datasets.py``
=================  ====================================================================

Time is that of the steps alone: compiling, reading and scoring are apart. Each tool
runs in a process of its own for all seeds of a table; its compile time (of the first
seed, imports excepted) and its peak memory are shown beside. A score is reached when it
is within 0.1 % (at least 0.02 nats) of the planted partition's, or of the best median.

    python examples/benchmarks/versus.py                          # a few minutes
    python examples/benchmarks/versus.py mytable.csv --seconds 30
    python examples/benchmarks/versus.py plane-100000 --tools ours lace:flat
    python examples/benchmarks/versus.py --quick
"""

import argparse
from dataclasses import dataclass
from functools import partial
import importlib.util
import json
import os
from pathlib import Path
import resource
import subprocess
import sys
import time

import numpy as np

HERE = Path(__file__).parent
TABLES = (
    "categories-1000",
    "categories-10000",
    "views-2000",
    "plane-1000",
    "plane-10000",
)
TOOLS = {  # and the module that each needs
    "ours": "numpyro_subanneal",
    "lace": "lace",  # its defaults
    "lace:flat": "lace",  # of a single view: splits and merges, and the slice sampler
    "lace:gibbs": "lace",
    "lace:sams": "lace",  # of views
    "sklearn": "sklearn",
    "numpyro": "numpyro",
}


@dataclass(frozen=True)
class Data:
    """
    - **x** - ``[N, D]``, real columns first; NaN where a cell is missing.
    - **num_categories** - ``[D]``, 0 of real columns.
    - **train**, **test** - indices of rows.
    - **views**, **clusters** - the truth, ``[D]`` and a list of ``[N]``, or None.
    - **one_view** - whether all columns are to be in one view.
    - **ellipses** - whether clusters are to have covariance matrices.
    """

    x: np.ndarray
    num_categories: np.ndarray
    train: np.ndarray
    test: np.ndarray
    views: np.ndarray | None = None
    clusters: list[np.ndarray] | None = None
    one_view: bool = True
    ellipses: bool = False

    def score(self, views, clusters) -> float:
        import scoring

        if self.ellipses:
            return scoring.score_ellipses(self.x, self.train, self.test, clusters[0])
        return scoring.score(
            self.x, self.num_categories, self.train, self.test, views, clusters
        )

    def agreement(self, views, clusters) -> tuple[float, float]:
        import scoring

        if self.views is None:
            return np.nan, np.nan
        truth = [z[self.train] for z in self.clusters]
        return scoring.agreement(views, clusters, self.views, truth)


def load(name: str, data: str, one_view: bool) -> Data:
    path = Path(name)
    if path.suffix == ".npz":
        return _load_npz(path)
    if path.suffix == ".csv":
        import pandas as pd

        from numpyro_subanneal import Table

        return _from_table(Table.from_dataframe(pd.read_csv(path)), one_view)
    kind, _, size = name.partition("-")
    if kind in ("hospital", "network", "census", "income"):
        sys.path.insert(0, str(HERE.parent / "paper"))
        import datasets

        found = datasets.load(kind, data, int(size) if size else None)
        return _from_table(found.table, one_view)
    sys.path.insert(0, str(HERE))
    import crosscat
    import split_merge

    num_rows = int(size or 1000)
    views, clusters = None, None
    if kind == "categories":
        x, z, num_categories = split_merge.categories(num_rows)
    elif kind in ("plane", "ellipses"):
        x, z = split_merge.plane(num_rows)
        if kind == "ellipses":
            rng = np.random.default_rng(1)
            mean = np.stack([x[z == k].mean(0) for k in range(z.max() + 1)])
            turn = rng.normal(size=(len(mean), 2, 2))
            x = mean[z] + np.einsum("nij,nj->ni", turn[z], x - mean[z])
        num_categories = 0, 0
    elif kind == "views":
        x, views, clusters = crosscat.planted(num_rows, 60, 5, 6)
        num_categories = (0,) * 60
    else:
        raise SystemExit(f"There is no table {name!r}; see --help.")
    if views is None:
        views, clusters = np.zeros(x.shape[1], int), [z]
    return Data(
        np.asarray(x, float), np.array(num_categories), *_split(num_rows), views,
        list(clusters), len(clusters) == 1, kind == "ellipses",
    )  # fmt: skip


def _split(num_rows):
    """7/8 of the rows for training and the rest for scoring."""
    rows = np.random.default_rng(num_rows).permutation(num_rows)
    num_test = max(1, num_rows // 8)
    return np.sort(rows[num_test:]), np.sort(rows[:num_test])


def _load_npz(path):
    file = np.load(path)
    x = np.asarray(file["X"], float)
    num_categories = np.asarray(file["ncat"])
    train, test = _split(len(x))
    if "train" in file:
        train, test = file["train"], file["test"]
    order = np.argsort(num_categories > 0, kind="stable")
    views, clusters = None, None
    if "views" in file:
        views, clusters = np.asarray(file["views"])[order], list(file["Z"].T)
    return Data(
        x[:, order], num_categories[order], train, test, views, clusters,
        views is None or len(clusters) == 1,
        path.stem.startswith("c_"),
    )  # fmt: skip


def _from_table(table, one_view):
    arrays = table.model_args
    parts, num_categories = [], []
    for kind in ("real", "count", "categorical", "binary"):
        codes = arrays.get(kind)
        if codes is None:
            continue
        part = np.asarray(codes, float)
        if kind != "real":
            part = np.where(part == -1, np.nan, part)
        parts.append(part)
        num_categories += {
            "categorical": list(arrays.get("num_categories", ())),
            "binary": [2] * part.shape[1],
        }.get(kind, [0] * part.shape[1])
    x = np.concatenate(parts, 1)
    return Data(x, np.array(num_categories), *_split(len(x)), one_view=one_view)


# --- a tool in a process of its own ---------------------------------------------------


class Watch:
    """Time of the steps alone, and what was found when."""

    def __init__(self, data, about):
        self.data, self.about = data, about
        self.seconds, self.next = 0.0, 0.0

    def step(self, fn):
        begin = time.perf_counter()
        out = fn()
        self.seconds += time.perf_counter() - begin
        return out

    @property
    def due(self) -> bool:
        return self.seconds >= self.next

    def note(self, views, clusters, **more):
        self.next = max(0.03, 1.25 * self.seconds)
        columns, rows = self.data.agreement(views, clusters)
        record = self.about | {
            "time": self.seconds,
            "score": self.data.score(views, clusters),
            "columns": columns,
            "rows": rows,
            "num_clusters": [len(np.unique(clusters[v])) for v in np.unique(views)],
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            **more,
        }
        print(json.dumps(record), flush=True)


def run_ours(data, args, about):
    import jax
    from jax import random

    import numpyro_subanneal
    from numpyro_subanneal import SubsampleAnnealedGibbs
    from numpyro_subanneal.models import crosscat, mixture

    x, num_categories = data.x[data.train], data.num_categories
    if data.ellipses:
        model = partial(ellipses, x.astype(np.float32))
    else:
        num_real = int((num_categories == 0).sum())
        codes = np.nan_to_num(x[:, num_real:], nan=-1).astype(np.int32)
        # Copies, since a table is known by its arrays.
        tables = {"real": x[:, :num_real].astype(np.float32), "categorical": codes}
        given = {name: t for name, t in tables.items() if t.shape[1]}
        if "categorical" in given:
            given["num_categories"] = tuple(num_categories[num_real:].tolist())
        if args.num_clusters:
            given["num_clusters"] = args.num_clusters
        model = partial((mixture if data.one_view else crosscat).mixed, **given)
    schedule = getattr(numpyro_subanneal, args.schedule)()
    kernel = SubsampleAnnealedGibbs(model, schedule)

    def start(seed):
        key = random.key(seed)
        return jax.block_until_ready(kernel.init(key, args.num_warmup, None, (), {}))

    begin = time.perf_counter()
    state = start(args.seed)
    step = jax.jit(lambda state: kernel.sample(state, (), {})).lower(state).compile()
    compiled = time.perf_counter() - begin
    for seed in range(args.seed, args.seed + args.seeds):
        watch = Watch(data, about | {"seed": seed, "compile": compiled})
        state = start(seed)
        taken = 0
        while watch.seconds < args.seconds or taken < args.num_warmup:
            state = watch.step(lambda s=state: jax.block_until_ready(step(s)))
            taken += 1
            if taken >= args.num_warmup and watch.due:
                draw = state.z
                views = np.asarray(draw.get("view", np.zeros(len(num_categories), int)))
                clusters = np.asarray(draw["z"]).reshape(-1, len(x))
                refused = int(state.capacity_reached)
                watch.note(views, clusters, sweeps=taken, capacity_reached=refused)


def ellipses(x, num_clusters=32):
    import jax.numpy as jnp

    import numpyro
    import numpyro.distributions as dist

    from numpyro_subanneal import PitmanYorProcess
    from numpyro_subanneal.grid import Grid
    from numpyro_subanneal.models import grids

    p = x.shape[1]
    concentration = numpyro.sample("concentration", grids.concentration())
    discount = numpyro.sample("discount", grids.discount(concentration))
    prior = PitmanYorProcess(concentration, discount, size=len(x))
    z = numpyro.sample("z", prior)
    kappa = numpyro.sample("kappa", grids.kappa())
    share = numpyro.sample("share", Grid(np.geomspace(0.003, 1, 20)))
    spread = jnp.asarray(np.cov(x.T), jnp.float32)
    with numpyro.plate("clusters", num_clusters):
        scale = share * spread * (p + 3.0)
        cov = numpyro.sample("cov", dist.InverseWishart(p + 3.0, scale_matrix=scale))
        prior = dist.MultivariateNormal(x.mean(0), cov / kappa)
        loc = numpyro.sample("loc", prior)
    with numpyro.plate("rows", len(x)):
        fn = dist.MultivariateNormal(loc[z], covariance_matrix=cov[z])
        numpyro.sample("x", fn, obs=x)


def run_lace(data, args, about):
    # Lace reads these when it is imported.
    for name in ("RAYON_NUM_THREADS", "POLARS_MAX_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    import lace
    import polars as pl

    steps = lace.StateTransition
    columns = {"ID": [f"row {n}" for n in data.train]}
    codes = {}
    for d, size in enumerate(data.num_categories.tolist()):
        own, name = data.x[data.train, d], f"c{d}"
        if len(np.unique(own[~np.isnan(own)])) < 2:
            continue  # Lace refuses columns that are constant
        codes[name] = size
        cells = [None if np.isnan(v) else int(v) if size else float(v) for v in own]
        kind = pl.UInt32 if size else pl.Float64
        columns[name] = pl.Series(cells, dtype=kind)
    frame = pl.DataFrame(columns)
    flat = data.one_view
    kernel = lace.RowKernel.gibbs()
    gibbs = [
        steps.row_assignment(kernel),
        steps.view_prior_process_params(),
        steps.component_parameters(),
        steps.feature_priors(),
    ]
    if not flat:
        gibbs += [
            steps.column_assignment(lace.ColumnKernel.gibbs()),
            steps.state_prior_process_params(),
        ]
    preset = args.child.partition(":")[2] or None
    transitions = gibbs if preset == "gibbs" else preset
    for seed in range(args.seed, args.seed + args.seeds):
        book = lace.Codebook.from_df("table", frame, cat_cutoff=20)
        for name, size in codes.items():
            if size:  # a category may be missing from the training rows
                book.column_metadata[name] = lace.ColumnMetadata.categorical(
                    name,
                    size,
                    value_map=lace.ValueMap.int(size),
                    hyper=lace.CategoricalHyper(1.0, 1.0),
                )
        engine = lace.Engine.from_df(
            frame, codebook=book, n_states=1, rng_seed=seed, flat_columns=flat
        )
        watch = Watch(data, about | {"seed": seed, "compile": 0.0})
        sweeps, num = 0, 1
        while watch.seconds < args.seconds:
            watch.step(
                lambda e=engine, n=num: e.update(n, transitions=transitions, quiet=True)
            )
            sweeps += num
            if watch.due:
                # What Lace was not given goes with its first view.
                views = np.zeros(len(data.num_categories), int)
                views[[int(name[1:]) for name in codes]] = engine.column_assignment(0)
                clusters = [np.array(z) for z in engine.row_assignments(0)]
                watch.note(views, clusters, sweeps=sweeps)
            left = min(watch.next, args.seconds) - watch.seconds
            num = int(np.clip(left * sweeps / watch.seconds, 1, 1000))


def run_sklearn(data, args, about):
    from sklearn.mixture import BayesianGaussianMixture

    x = data.x[data.train]
    if data.num_categories.any() or np.isnan(x).any():
        return
    for seed in range(args.seed, args.seed + args.seeds):
        watch = Watch(data, about | {"seed": seed, "compile": 0.0})
        found = BayesianGaussianMixture(
            n_components=args.num_clusters or 32,
            covariance_type="full" if data.ellipses else "diag",
            max_iter=1000,
            random_state=seed,
        )
        watch.step(lambda f=found: f.fit(x))
        z = found.predict(x)
        watch.note(np.zeros(x.shape[1], int), [z], sweeps=int(found.n_iter_))


def run_numpyro(data, args, about):
    import jax
    from jax import random
    import jax.numpy as jnp

    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import NUTS, DiscreteHMCGibbs

    x, num_categories = data.x[data.train], data.num_categories
    if np.isnan(x).any() or data.ellipses:
        return
    num_real = int((num_categories == 0).sum())
    real, codes = jnp.asarray(x[:, :num_real]), x[:, num_real:].astype(np.int32)
    centre, spread = real.mean(0), real.std(0)
    sizes = num_categories[num_real:]

    def model(num_clusters=args.num_clusters or 32):
        a = numpyro.sample("concentration", dist.Gamma(1.0, 1.0))
        with numpyro.plate("sticks", num_clusters - 1):
            v = numpyro.sample("v", dist.Beta(1.0, a))
        rest = jnp.cumprod(1 - v)
        weights = jnp.pad(v, (0, 1), constant_values=1) * jnp.pad(
            rest, (1, 0), constant_values=1
        )
        with numpyro.plate("clusters", num_clusters):
            if num_real:
                prior = dist.Normal(centre, spread).to_event(1)
                loc = numpyro.sample("loc", prior)
                prior = dist.LogNormal(jnp.log(spread) - 1, 1.0).to_event(1)
                scale = numpyro.sample("scale", prior)
            probs = {}
            for size in np.unique(sizes).tolist():
                shape = (int((sizes == size).sum()), size)
                prior = dist.Dirichlet(jnp.full(shape, 0.5)).to_event(1)
                probs[size] = numpyro.sample(f"probs_{size}", prior)
        with numpyro.plate("rows", len(x)):
            z = numpyro.sample("z", dist.Categorical(weights))
            if num_real:
                fn = dist.Normal(loc[z], scale[z]).to_event(1)
                numpyro.sample("real", fn, obs=real)
            for size, p in probs.items():
                fn = dist.Categorical(p[z]).to_event(1)
                numpyro.sample(f"codes_{size}", fn, obs=codes[:, sizes == size])

    kernel = DiscreteHMCGibbs(NUTS(model), modified=True)
    num_warmup = 10**6  # it adapts all the time

    def start(seed):
        return kernel.init(random.key(seed), num_warmup, None, (), {})

    begin = time.perf_counter()
    state = start(args.seed)
    step = jax.jit(lambda state: kernel.sample(state, (), {})).lower(state).compile()
    compiled = time.perf_counter() - begin
    for seed in range(args.seed, args.seed + args.seeds):
        watch = Watch(data, about | {"seed": seed, "compile": compiled})
        state = start(seed)
        taken = 0
        while watch.seconds < args.seconds:
            state = watch.step(lambda s=state: jax.block_until_ready(step(s)))
            taken += 1
            if watch.due:
                z = np.asarray(state.z["z"])
                watch.note(np.zeros(x.shape[1], int), [z], sweeps=taken)


# --- all of them ----------------------------------------------------------------------


def run(name, tool, args) -> list[dict]:
    """The records of a tool on a table, from a process of its own."""
    command = [
        sys.executable, __file__, name, "--child", tool, "--data", args.data,
        "--seconds", str(args.seconds), "--seeds", str(args.seeds),
        "--seed", str(args.seed), "--num-warmup", str(args.num_warmup),
        "--schedule", args.schedule,
    ]  # fmt: skip
    if args.num_clusters:
        command += ["--num-clusters", str(args.num_clusters)]
    if args.one_view:
        command += ["--one-view"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{tool} failed on {name}.")
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]


def by_seed(records):
    found = {}
    for r in records:
        found.setdefault(r["seed"], []).append(r)
    return found


def when_reached(chain, wanted):
    """The first time from which on the score stays at what is wanted."""
    below = [r["time"] for r in chain if r["score"] < wanted]
    later = [r["time"] for r in chain if not below or r["time"] > below[-1]]
    return later[0] if later else np.inf


def show(name, data, records):
    """The table of one data set."""
    last = {t: [c[-1] for c in by_seed(r).values()] for t, r in records.items()}
    target = max(np.median([r["score"] for r in own]) for own in last.values())
    what = "the best median"
    if data.views is not None:
        target = data.score(data.views, [z[data.train] for z in data.clusters])
        what = "the planted partition"
    within = max(0.02, 1e-3 * abs(target))
    size = f"{len(data.train)} x {data.x.shape[1]}"
    print(f"\n{name}: {size}; {what} scores {target:.3f} nats a held-out row")
    print(
        f"{'':12}{'score':>18}{'Rand, rows':>16}{'columns':>9}{'reached, s':>20}"
        f"{'views':>7}{'clusters':>10}{'sweeps':>8}{'compile, s':>12}{'MB':>6}"
    )
    print(
        f"{'':12}{'median':>9}{'worst':>9}{'median':>9}{'worst':>7}{'median':>9}"
        f"{'median':>10}{'seeds':>10}"
    )
    for tool, own in last.items():
        chains = by_seed(records[tool]).values()
        times = [when_reached(c, target - within) for c in chains]
        good = f"{np.isfinite(times).sum()} of {len(times)}"

        def middle(key, own=own):
            return np.median([r[key] for r in own])

        print(
            f"{tool:12}{middle('score'):9.3f}{min(r['score'] for r in own):9.3f}"
            f"{middle('rows'):9.2f}{min(r['rows'] for r in own):7.2f}"
            f"{middle('columns'):9.2f}{np.median(times):10.2f}{good:>10}"
            f"{np.median([len(r['num_clusters']) for r in own]):7.0f}"
            f"{np.median([sum(r['num_clusters']) for r in own]):10.0f}"
            f"{middle('sweeps'):8.0f}{own[0]['compile']:12.1f}"
            f"{max(r['peak_mb'] for r in own):6.0f}",
            flush=True,
        )


def draw(found, path):
    """Score against time: a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(found), figsize=(4 * len(found), 3.5), squeeze=False
    )
    for (name, records), axis in zip(found.items(), axes[0], strict=True):
        for tool, own in records.items():
            color = f"C{list(TOOLS).index(tool)}"
            for i, chain in enumerate(by_seed(own).values()):
                label = None if i else tool
                times, scores = ([r[k] for r in chain] for k in ("time", "score"))
                axis.plot(times, scores, ".-", ms=3, lw=0.8, color=color, label=label)
        axis.set_xscale("log")
        axis.set_title(Path(name).stem)
        axis.set_xlabel("seconds")
        axis.legend(frameon=False, fontsize=7)
    axes[0, 0].set_ylabel("nats a held-out row")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("tables", nargs="*", default=TABLES, metavar="TABLE")
    parser.add_argument("--tools", nargs="+", choices=TOOLS)
    parser.add_argument("--seconds", type=float, default=10.0, help="a chain")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--num-warmup", type=int, default=20)
    parser.add_argument("--schedule", default="LinearSchedule")
    parser.add_argument("--num-clusters", type=int, help="capacity, if not the default")
    parser.add_argument("--one-view", action="store_true", help="of a .csv or a name")
    parser.add_argument("--data", default="data", help="folder with the paper's tables")
    parser.add_argument("--out", default="versus.png")
    parser.add_argument("--quick", action="store_true", help="a small table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        # NB: before JAX starts its threads, which get into each other's way.
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.child:
        (name,) = args.tables
        data = load(name, args.data, args.one_view)
        tool = args.child.partition(":")[0]
        about = {"table": name, "tool": args.child}
        globals()[f"run_{tool}"](data, args, about)
        return
    if args.quick:
        args.tables, args.seconds, args.seeds, args.num_warmup = ["plane-80"], 0.2, 2, 3
        args.tools, args.num_clusters = ["ours", "sklearn"], 8
    found = {}
    for name in args.tables:
        data = load(name, args.data, args.one_view)
        unfit = "lace:sams" if data.one_view else "lace:flat"
        tools = args.tools or [t for t in TOOLS if t not in (unfit, "numpyro")]
        found[name] = {}
        for tool in tools:
            if importlib.util.find_spec(TOOLS[tool]) is None:
                print(f"{tool} is not installed.")
                continue
            records = run(name, tool, args)
            if records:
                found[name][tool] = records
        if not found[name]:
            raise SystemExit(f"No tool has a result on {name}.")
        show(name, data, found[name])
    draw(found, args.out)
    print(f"\n{args.out}: score against time")


if __name__ == "__main__":
    main()
