# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The paper's data sets and its Figure 4: loaders, the ladder of bounds, resuming."""

import json
from pathlib import Path
import sys
from types import SimpleNamespace
from typing import NamedTuple

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "paper"))
import figure4  # noqa: E402

# --- bounds and resuming, with programs that take no time ---------------------


class State(NamedTuple):
    z: dict
    i: int
    num_clusters: np.ndarray
    num_views: int
    log_joint: float
    capacity_reached: int
    rng_key: object


class Programs:
    """In the place of `figure4.Programs`: counts steps, each of half a second."""

    num_rows, num_test, num_clusters = 80, 10, 8
    train = None

    def __init__(self):
        self.seconds = 0.0
        self.taken = 0
        self.started = []

    def clock(self):
        return self.seconds

    def use(self, seed):
        pass

    def start(self, rng_key, schedule):
        self.started.append(schedule)
        z = {"view": jnp.zeros(3, jnp.int32)}
        return State(z, jnp.zeros((), int), jnp.ones(2, int), 1, 0.0, 0, rng_key)

    def step(self, state, train):
        self.seconds += 0.5
        self.taken += 1
        key, _ = random.split(state.rng_key)
        return state._replace(i=state.i + 1, rng_key=key)

    def score(self, state):
        return float(random.uniform(state.rng_key))


DATASET = SimpleNamespace(name="table 80 x 3", num_made_up=0)
BOUNDS = [1.25, 2.0, 4.0, 16.0]
GIBBS = ["Prior+Gibbs", "Sequential+Gibbs"]
ANNEALS = [name for name in figure4.STRATEGIES if name not in GIBBS]


def run(folder, name, programs=None, bounds=BOUNDS):
    programs = programs or Programs()
    results = figure4.Results(folder)
    figure4.run_seed(programs, DATASET, name, 0, bounds, results, programs.clock)
    return results.of(DATASET.name, name, 0), programs


@pytest.mark.parametrize("name", GIBBS)
def test_gibbs_chain_is_scored_at_each_bound_as_it_goes(tmp_path, name):
    found, programs = run(tmp_path, name)
    assert [*found] == BOUNDS
    # The first state at or after the bound.
    assert [r["steps"] for r in found.values()] == [3, 4, 8, 32]
    assert programs.taken == 32 and len(programs.started) == 1


@pytest.mark.parametrize("name", ANNEALS)
def test_anneal_takes_its_share_of_the_bound(tmp_path, name):
    class Costly(Programs):
        """A step costs as many microseconds as rows move in it."""

        def step(self, state, train):
            state = super().step(state, train)
            steps = self.started[-1].checked_steps(70, figure4.NUM_WARMUP)
            i = int(state.i) - 1
            warm = i < figure4.NUM_WARMUP
            moves = steps.added[i] + steps.churned[i] if warm else 70
            self.seconds += 1e-3 * moves - 0.5
            return state

    found, programs = run(tmp_path, name, Costly())
    assert [*found] == BOUNDS
    assert len(programs.started) == 1 + len(BOUNDS)  # a short one first
    share = figure4.STRATEGIES[name].anneal
    for bound, r in found.items():
        # A churn is a whole number: 0.07 seconds, at the most.
        assert abs(r["anneal_seconds"] - share * bound) < 0.07
        assert bound <= r["seconds"] < bound + 0.14


@pytest.mark.parametrize("name", [*GIBBS, *ANNEALS])
def test_killed_run_goes_on_and_loses_nothing(tmp_path, name):
    whole, programs = run(tmp_path / "whole", name)

    class Killed(Programs):
        def step(self, state, train):
            if self.taken == limit:
                raise KeyboardInterrupt
            return super().step(state, train)

    total = 0
    for limit in (7, 1000):
        killed = Killed()
        try:
            run(tmp_path / "parts", name, killed)
        except KeyboardInterrupt:
            assert limit == 7
        total += killed.taken
    found, again = run(tmp_path / "parts", name)
    assert again.taken == 0  # nothing is missing
    lines = (tmp_path / "parts" / "figure4.jsonl").read_text().splitlines()
    assert len(lines) == len(BOUNDS)  # nothing twice
    scores = [[r["score"] for r in runs.values()] for runs in (whole, found)]
    np.testing.assert_array_equal(*scores)
    if name in GIBBS:
        # From the state at the last bound; what came after it is done again.
        assert total == programs.taken + 3


@pytest.mark.parametrize("name", GIBBS)
def test_gibbs_chain_goes_on_to_later_bounds_and_anew_to_earlier(tmp_path, name):
    run(tmp_path, name, bounds=[2.0])
    found, programs = run(tmp_path, name, bounds=[2.0, 4.0])
    assert programs.taken == 4 and found[4.0]["steps"] == 8
    found, programs = run(tmp_path, name, bounds=[1.0])
    assert programs.taken == 2 and found[1.0]["steps"] == 2


def test_line_that_is_not_whole_is_left_out(tmp_path, capsys):
    run(tmp_path, "Prior+Gibbs", bounds=[1.0, 2.0])
    path = tmp_path / "figure4.jsonl"
    path.write_text(path.read_text()[:-9])
    found, _ = run(tmp_path, "Prior+Gibbs", bounds=[1.0, 2.0])
    assert "is not whole" in capsys.readouterr().out
    assert [*found] == [1.0, 2.0]
    results = figure4.Results(tmp_path)
    assert [r["bound"] for r in results.records] == [1.0, 2.0]


def test_results_of_another_capacity_are_not_mixed(tmp_path):
    run(tmp_path, "Prior+Gibbs", bounds=[1.0])
    results = figure4.Results(tmp_path)
    results.check(DATASET, Programs.num_clusters)
    with pytest.raises(SystemExit, match="with 8 clusters; give another folder"):
        results.check(DATASET, 16)


# --- the table ----------------------------------------------------------------


def record(strategy, bound, seed, score, view=(0, 0, 1)):
    return {
        "dataset": "d", "num_made_up": 0, "strategy": strategy, "bound": bound,
        "seed": seed, "score": score, "view": list(view), "num_test": 10,
        "seconds": bound, "clusters": [2, 1],
    }  # fmt: skip


def test_scores_are_standardised_within_a_data_set():
    records = [record("Anneal", 1.0, s, x) for s, x in enumerate([3.0, 5.0, 10.0])]
    standard = figure4.standardised(records)
    assert abs(standard.mean()) < 1e-12 and abs(standard.std() - 1) < 1e-12
    np.testing.assert_allclose(np.diff(standard)[1] / np.diff(standard)[0], 2.5)


def test_agreement_is_the_mean_over_pairs_of_runs():
    views = [(0, 0, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1)]
    records = [record("Anneal", 1.0, s, 0.0, v) for s, v in enumerate(views)]
    assert figure4.agreement(records) == pytest.approx((1 - 0.5 - 0.5) / 3)
    assert np.isnan(figure4.agreement(records[:1]))


def test_difference_is_of_the_same_splits():
    ours = [record("Anneal", 1.0, s, x) for s, x in enumerate([20.0, 40.0, 0.0])]
    others = [record("Prior+Gibbs", 1.0, s, x) for s, x in enumerate([10.0, 10.0])]
    mean, error, better, num = figure4.difference(ours, others)
    assert (mean, better, num) == (2.0, 2, 2) and error == pytest.approx(1.0)


def test_figure_and_table_are_made_of_the_file(tmp_path, capsys):
    results = figure4.Results(tmp_path)
    rng = np.random.default_rng(0)
    for strategy in figure4.STRATEGIES:
        for bound in (1.0, 2.0):
            for seed in range(3):
                results.add(record(strategy, bound, seed, rng.normal()))
    figure4.main(["--plot", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert all(text.count(f" {name} ") >= 2 for name in figure4.STRATEGIES)
    assert (tmp_path / "figure4.png").stat().st_size > 10_000
    assert json.loads(results.path.read_text().splitlines()[0])["strategy"] == "Anneal"
