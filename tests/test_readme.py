# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The README says what is so."""

from pathlib import Path
import re
import subprocess
import sys

import pytest

from numpyro_subanneal import SubsampleAnnealedGibbs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_code_runs_and_prints_what_is_shown(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")), encoding="utf-8")
    # ArviZ 0.23 announces ArviZ 1.0 when it is imported.
    flags = ["-W", "error", "-W", "ignore::FutureWarning:arviz"]
    done = subprocess.run(
        [sys.executable, *flags, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    summary, *explained = done.stdout.partition("site ")
    assert "num_clusters" in summary
    assert "log_joint" in summary
    assert "r_hat" in summary
    (shown,) = blocks("text")
    assert "".join(explained).strip() == shown.strip()


def test_first_example_is_short():
    code = blocks("python")[0]
    statements = [line for line in code.splitlines() if line and "import" not in line]
    assert len(statements) <= 20


def test_ci_runs_the_test_command():
    (command,) = (c for c in blocks("sh") if "pytest" in c)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command.strip() == ci.splitlines()[-1].replace("$venv", ".venv")


def test_commands_name_extras_that_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"'\.\[(\w+)\]'", README):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


def test_sample_statistics_are_those_of_the_kernel():
    section = README.split("## Sample statistics")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    fields = SubsampleAnnealedGibbs(lambda: None).default_fields
    assert documented == [name for name in fields if name != "z"]
