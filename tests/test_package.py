# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The package as it is installed: its names, its modules, their docstrings."""

import doctest
import importlib
from importlib import metadata
import pkgutil
import subprocess
import sys

import pytest

import numpyro_subanneal
import numpyro_subanneal.models

MODULES = sorted(
    {
        module.name
        for package in (numpyro_subanneal, numpyro_subanneal.models)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    }
)


def python(code, cwd):
    """What `code` prints, run away from the repository."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names():
    assert numpyro_subanneal.__all__ == [
        "AbstractSchedule",
        "ChineseRestaurantProcess",
        "LinearSchedule",
        "NotRecognised",
        "PitmanYorProcess",
        "PriorGibbs",
        "SequentialGibbs",
        "SubsampleAnnealedGibbs",
        "SubsampleAnnealedGibbsState",
        "explain",
    ]
    assert all(hasattr(numpyro_subanneal, name) for name in numpyro_subanneal.__all__)
    assert [m for m in MODULES if "models." in m] == [
        "numpyro_subanneal.models.dpmm",
        "numpyro_subanneal.models.features",
        "numpyro_subanneal.models.pitman_yor",
    ]


def test_version_is_that_of_the_distribution():
    assert numpyro_subanneal.__version__ == metadata.version("numpyro_subanneal")


def test_what_is_installed_is_one_top_level_package(tmp_path):
    code = """
from importlib.util import find_spec
import numpyro_subanneal.models
from numpyro_subanneal.models import dpmm, pitman_yor
print(find_spec("models"), find_spec("numpyro_subanneal.models.dpmm").name)
"""
    assert python(code, tmp_path).split() == ["None", "numpyro_subanneal.models.dpmm"]
    distribution = metadata.distribution("numpyro_subanneal")
    top_level = distribution.read_text("top_level.txt")
    assert top_level.split() == ["numpyro_subanneal"]


def test_import_makes_no_array_and_imports_nothing_heavy(tmp_path):
    code = """
import importlib, jax, sys
for name in sys.argv[1:] or %r:
    importlib.import_module(name)
heavy = {"arviz", "funsor", "matplotlib", "pandas", "xarray", "palmerpenguins"}
print(len(jax.live_arrays()), sorted(heavy & set(sys.modules)))
""" % (MODULES,)
    assert python(code, tmp_path).strip() == "0 []"


@pytest.mark.parametrize("name", ["numpyro_subanneal", *MODULES])
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
