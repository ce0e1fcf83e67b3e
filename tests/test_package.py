# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The package as a whole: public names, what importing it does, what is installed."""

import importlib.metadata
import os
from pathlib import Path
import subprocess
import sys

import pytest

import numpyro_subanneal
import numpyro_subanneal.models

ROOT = Path(__file__).parents[1]


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_these():
    assert numpyro_subanneal.__all__ == [
        "AbstractConjugatePair",
        "AbstractSchedule",
        "AcceleratingSchedule",
        "ChineseRestaurantProcess",
        "FeatureMoves",
        "FiniteDirichletMixture",
        "Grid",
        "LinearSchedule",
        "MixtureOfFiniteMixtures",
        "NotRecognised",
        "PitmanYorProcess",
        "Posterior",
        "PriorGibbs",
        "SequentialGibbs",
        "SplitMerge",
        "Steps",
        "SubsampleAnnealedGibbs",
        "SubsampleAnnealedGibbsState",
        "Table",
        "cross_validate",
        "explain",
        "register_conjugate",
    ]
    for name in numpyro_subanneal.__all__:
        assert hasattr(numpyro_subanneal, name)


def test_version_is_that_of_the_distribution():
    installed = importlib.metadata.version("numpyro_subanneal")
    assert installed == numpyro_subanneal.__version__


def test_importing_computes_nothing():
    code = (
        "import numpyro_subanneal, numpyro_subanneal.models, numpyro_subanneal.testing;"
        "import jax; print(len(jax.live_arrays()))"
    )
    assert python(code).strip() == "0"


@pytest.mark.parametrize("module", ["crosscat", "features", "grids", "pitman_yor"])
def test_each_module_of_models_can_be_imported_first(module):
    python(f"import numpyro_subanneal.models.{module}")


def test_models_install_inside_the_package(tmp_path):
    # A wheel, as an ordinary install has it; the tests themselves run in an editable
    # one.
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
        + ["-w", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        + ["--target", str(site), str(wheel)],
        check=True,
        capture_output=True,
    )
    top = {path.name for path in site.iterdir() if not path.name.endswith("-info")}
    assert top == {"numpyro_subanneal"}
    installed = {path.name for path in (site / "numpyro_subanneal/models").iterdir()}
    assert {"__init__.py", "dpmm.py", "pitman_yor.py"} <= installed
