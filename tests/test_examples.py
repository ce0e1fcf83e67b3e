# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Every example runs, with tiny arguments, and writes what it says."""

from pathlib import Path
import subprocess
import sys

import arviz as az
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested():
    assert [p.name for p in EXAMPLES.glob("*.py")] == ["quickstart.py"]


@pytest.mark.slow
def test_quickstart(tmp_path):
    out = tmp_path / "new" / "folder"
    printed = run(
        "quickstart.py",
        *("--num-warmup", "6", "--num-samples", "20", "--thinning", "2"),
        *("--num-chains", "2", "--seed", "1", "--out", str(out)),
    )
    assert "333 rows; 11 rows with missing cells were dropped" in printed
    assert all(
        name in printed for name in ("num_clusters", "largest_share", "log_joint")
    )
    assert "r_hat" in printed
    assert "draw of highest log joint" in printed
    assert "Gentoo" in printed
    assert "with species and sex" in printed
    assert f"{out / 'quickstart.nc'}: 2 chains of 10 draws" in printed
    assert (out / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    saved = az.from_netcdf(str(out / "quickstart.nc"))
    assert saved.posterior["z"].shape == (2, 10, 333)
    assert (saved.sample_stats["subsample_size"].values == 333).all()
