"""Packages of others: laid out as pip would, or those of the examples installed by pip itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lay_out(
    folder: Path, package: str, group: str, entries: Mapping[str, str], source: str
) -> None:
    """Write version 1.2 of a package of one module that offers entry points."""
    (folder / f"{package}.py").write_text(source)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))


def installed(example: str, folder: Path) -> Path:
    """Let pip install a package of the examples; returns the folder that it is in."""
    pytest.importorskip("setuptools", "77", "the package is built with what is installed")
    # A copy, because building leaves files beside the source.
    shutil.copytree(ROOT / "examples" / example, folder / "source")
    options = "--quiet --no-deps --no-build-isolation --no-index --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", *options.split()]
    command += ["--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(command, timeout=120, check=True)
    return folder / "site"


def printed(code: str, site: Path) -> Any:
    """Run code in another process that has the package; returns the JSON that it prints."""
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "kernels")])
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_shown(source: str, page: str) -> None:
    """Check that the first code of a page is the file of the examples, without docstrings."""
    text = (ROOT / "examples" / source).read_text()
    shown = (ROOT / "docs" / page).read_text().partition("```python\n")[2].partition("```")[0]
    assert shown == re.sub(r'^( *)"""[^"]*"""\n\n', "", text, flags=re.MULTILINE)
    assert len([line for line in text.splitlines() if line.strip()]) <= 30
