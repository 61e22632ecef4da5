"""The package in examples/rule_package, installed by pip into a folder of its own and loaded by
another process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ASK = """
import json
from flowtrain.dataflow.rules import Outcome, load
from flowtrain.config.options import parse

args = ["--dataflow.prompt_filter", "rest"]
config = parse([*args, "--dataflow.prompt_filter_options", "{num_versions = 2}"])
prompt_filter = load(config.dataflow).prompt_filter
answers = [prompt_filter.admits("a", "", 0.5)]
prompt_filter.observe(Outcome(1, "a", "", (1.0, 1.0), 10))
prompt_filter.observe(Outcome(2, "b", "", (1.0, 0.0), 10))
for version in (1, 2):
    answers += [prompt_filter.admits("a", "", 0.5), prompt_filter.admits("b", "", 0.5)]
    prompt_filter.on_version(version)
print(json.dumps([*answers, prompt_filter.admits("a", "", 0.5)]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which pip has installed the package."""
    pytest.importorskip("setuptools", "77", "the package is built with what is installed")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(
        ROOT / "examples" / "rule_package", folder / "source"
    )  # building leaves files beside the source
    quiet = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--disable-pip-version-check",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *quiet,
        "--target",
        str(folder / "site"),
        str(folder / "source"),
    ]
    subprocess.run(command, timeout=120, check=True)
    return folder / "site"


def test_an_installed_prompt_filter_is_loaded_with_its_options(site: Path) -> None:
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]  # a rests for versions 0 and 1, b was not solved


def test_the_docs_show_the_example_as_it_is() -> None:
    source = (ROOT / "examples" / "rule_package" / "flowtrain_rest.py").read_text()
    shown = (
        (ROOT / "docs" / "dataflow-rules.md")
        .read_text()
        .partition("```python\n")[2]
        .partition("```")[0]
    )
    assert shown == re.sub(r'^( *)"""[^"]*"""\n\n', "", source, flags=re.MULTILINE)
