# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Every example runs, with small arguments, and leaves what it says."""

import os
from pathlib import Path
import runpy
import sys
import warnings

import numpy as np
import pytest

from numpyro_subanneal.compiling import quick_options

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled

EXAMPLES = Path(__file__).parents[1] / "examples"
# NB: the tour collects its warm-up. Of one chain, and as long as the run that follows,
# NumPyro makes the same program of it, which is compiled once and found again.
ARGUMENTS = {
    "mixed_with_nuts.py": "-n 5 --num-warmup 5 --num-rows 60 --num-chains 1 --quiet",
    "benchmarks/hyperparameters.py": "--num-rows 99 --repeats 2 --sweeps 1 --columns 2"
    " --num-clusters 8",
    "benchmarks/crosscat.py": "--quick",
    "crosscat.py": "--num-warmup 3 --num-samples 6 --thinning 1 --num-chains 2"
    " --num-clusters 8",
    "tour.py": "--num-warmup 6 --num-samples 6 --thinning 1 --num-chains 1"
    " --num-views 2 --num-clusters 8 --num-hidden 3",
    "benchmarks/posterior.py": "--num-rows 300 --num-columns 3 --num-new 20"
    " --num-draws 3 --num-clusters 4",
    "quickstart.py": "--num-warmup 4 --num-samples 8 --num-chains 2 --out .",
    "benchmarks/row_moves.py": "--quick --moves 2000",
    "benchmarks/split_merge.py": "--quick",
    "benchmarks/versus.py": "--quick",
}


def test_every_example_is_run():
    found = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.py")}
    # Those of the paper are run by `test_paper.py`.
    found = {str(path) for path in found if path.parts[0] != "paper"}
    # `scoring.py` is no script; it is tested below.
    assert found - {"benchmarks/scoring.py"} == set(ARGUMENTS)


@pytest.fixture
def run_script(monkeypatch, tmp_path, capsys):
    """
    Runs a script as `python` does, returns what it prints. In this process: to import
    all again takes longer than some of them.
    """

    def run(path, *args):
        # For the processes that some of them start.
        quickly = [f"--{name}={value}" for name, value in quick_options().items()]
        flags = " ".join([os.environ["XLA_FLAGS"], *quickly])
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        # No progress bar: programs that report to one are not found again.
        monkeypatch.setenv("CI", "1")
        monkeypatch.setenv("MPLBACKEND", "Agg")
        monkeypatch.setattr(sys, "argv", [str(path), *args])
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    # Some tie themselves to one processor.
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    yield run
    if processors is not None:
        os.sched_setaffinity(0, processors)
    # Two of the scripts have one name.
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(EXAMPLES)):
            del sys.modules[name]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_runs(name, run_script, tmp_path):
    shown = run_script(EXAMPLES / name, *ARGUMENTS[name].split())
    if name == "quickstart.py":
        for words in ("num_clusters", "log_joint", "r_hat", "Adelie", "Rand"):
            assert words in shown
        assert (tmp_path / "quickstart.png").stat().st_size > 10_000
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its 1.0
            import arviz as az
        idata = az.from_netcdf(tmp_path / "quickstart.nc")
        assert idata.posterior["z"].shape[0] == 2
        assert "num_clusters" in idata.sample_stats
    elif name == "crosscat.py":
        for words in ("19 cells are missing", "num_views", "r_hat", "view 0: "):
            assert words in shown
        for figure in ("crosscat_dependence.png", "crosscat_table.png"):
            assert (tmp_path / "output" / figure).stat().st_size > 10_000
    elif name == "tour.py":
        for words in ("Convergence", "Hidden cells", "surprising", "Gentoo penguin"):
            assert words in shown
        figures = list((tmp_path / "output").glob("tour_*.png"))
        assert len(figures) == 5
        assert all(figure.stat().st_size > 10_000 for figure in figures)
    elif name == "benchmarks/posterior.py":
        assert "nats a row" in shown and "MB" in shown
    elif name == "benchmarks/crosscat.py":
        assert "anneal" in shown and "of 1" in shown
    elif name == "benchmarks/row_moves.py":
        assert "sweep us" in shown and "anneal us" in shown
    elif name == "benchmarks/split_merge.py":
        assert "shortfall" in shown and "neither" in shown
    elif name == "benchmarks/versus.py":
        assert "ours" in shown and "planted partition scores" in shown
        assert (tmp_path / "versus.png").stat().st_size > 10_000
    elif name == "benchmarks/hyperparameters.py":
        assert shown.count("update") == 2
    else:
        assert "SubsampleAnnealedGibbs alone: Parameter `scale`" in shown
        assert "slope" in shown


def test_scores_are_predictive_densities(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "benchmarks"))
    import scoring

    rng = np.random.default_rng(0)
    z = np.array([0, 0, 0, 2, 2, 0, 2, 2])
    x = np.stack([z + 0.3 * rng.normal(size=8), z // 2], 1)
    x[1, 0] = np.nan
    train, num_categories, views = np.arange(8), np.array([0, 2]), np.array([0, 0])

    def density(cells):
        """Of one more row with these cells, from that of the table alone."""
        table = np.concatenate([x, np.atleast_2d(cells)])
        return np.exp(scoring.score(table, num_categories, train, [8], views, [z]))

    # Over all values of both cells it integrates to one, over those of one to the
    # density of the other.
    points = np.linspace(-300, 300, 60_001)
    by_code = [
        np.exp(
            [
                scoring.score(
                    np.concatenate([x, [[value, code]]]),
                    num_categories, train, [8], views, [z],
                )
                for value in (0.1, 2.2)
            ]
        )
        for code in (0, 1)
    ]  # fmt: skip
    only = [density([value, np.nan]) for value in (0.1, 2.2)]
    np.testing.assert_allclose(np.sum(by_code, 0), only, rtol=1e-9)
    each = scoring._log_real(x[:, 0], np.unique(z, return_inverse=True)[1], points)
    np.testing.assert_allclose(np.trapezoid(np.exp(each), points, axis=1), 1, atol=2e-3)
    # Cells that go with their cluster are more likely than cells that do not.
    assert density([0.0, 0]) > 3 * density([0.0, 1])
    # The clusters' names and gaps between them do not matter.
    again = scoring.score(x, num_categories, train, train, views, [5 - z])
    assert again == pytest.approx(
        scoring.score(x, num_categories, train, train, views, [z]), abs=1e-12
    )


def test_tables_of_the_benchmark_may_be_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "benchmarks"))
    import versus

    rng = np.random.default_rng(0)
    mass, kind = rng.normal(size=40), rng.integers(3, size=40)
    lines = [f"{m},{'abc'[k]}" for m, k in zip(mass, kind, strict=True)]
    lines[3] = ",b"
    lines[5] = "1.5,"
    (tmp_path / "own.csv").write_text("mass,kind\n" + "\n".join(lines) + "\n")
    data = versus.load(str(tmp_path / "own.csv"), ".", one_view=False)
    assert data.num_categories.tolist() == [0, 3] and not data.one_view
    missing = np.isnan(data.x)
    assert missing.sum() == 2 and missing[3, 0] and missing[5, 1]
    np.testing.assert_allclose(data.x[:3, 0], mass[:3], rtol=1e-6)
    assert data.x[:3, 1].tolist() == kind[:3].tolist()
    both = np.concatenate([data.train, data.test])
    assert sorted(both) == list(range(40)) and len(data.test) == 5

    codes = rng.integers(2, size=40)
    own = {"X": np.stack([codes, mass], 1), "ncat": np.array([2, 0])}
    np.savez(tmp_path / "own.npz", **own)
    data = versus.load(str(tmp_path / "own.npz"), ".", one_view=False)
    assert data.num_categories.tolist() == [0, 2]  # real columns first
    np.testing.assert_array_equal(data.x, np.stack([mass, codes], 1))
