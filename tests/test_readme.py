# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The README and the docstrings: their code runs, and their commands are CI's."""

import doctest
import importlib
import os
from pathlib import Path
import pkgutil
import re
import subprocess
import sys

import pytest

import numpyro_subanneal
from numpyro_subanneal.compiling import quick_options
import numpyro_subanneal.models

# Nearly all of the time is that of compiling, and no digits are shown.
pytestmark = pytest.mark.quickly_compiled

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


# As here, what is imported is not to be gone through at each collection.
RUN = """
import gc, runpy, sys
import numpyro_subanneal
gc.freeze()
gc.set_threshold(200_000, 20, 100)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_code_of_the_readme_runs_and_prints_what_it_shows(tmp_path):
    code = tmp_path / "readme.py"
    code.write_text("\n".join(blocks("python")))
    # As the marker does here.
    quickly = [f"--{name}={value}" for name, value in quick_options().items()]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(code)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XLA_FLAGS": " ".join([os.environ["XLA_FLAGS"], *quickly]),
        },
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (table,) = blocks("text")
    assert table.strip() and table.strip() in done.stdout


def test_ci_runs_the_test_command_of_the_readme():
    (command,) = [c for c in "".join(blocks("sh")).splitlines() if "pytest" in c]
    ci = (ROOT / ".ci" / "run").read_text().replace("$venv", ".venv")
    assert command in ci.splitlines()


# In an editable install, `models` lies outside the folder of the package.
MODULES = sorted(
    {
        module.name
        for package in (numpyro_subanneal, numpyro_subanneal.models)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    }
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
