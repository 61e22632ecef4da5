"""Both distributions: one version everywhere, a package page whose links work, nothing left out."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import flowkernels
import pytest
import setuptools
import yaml

import flowtrain

ROOT = Path(__file__).parents[1]


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return loaded(ROOT / ".ci" / "release.py")


@pytest.fixture
def setup_options(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What setup.py asks setuptools for."""
    options: dict = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", options.update)
    loaded(ROOT / "setup.py")
    return options


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """Makes a repository with the files that a release is made of, committed."""

    def make() -> Path:
        for name in ("flowtrain/__init__.py", "kernels/flowkernels/__init__.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text('"""X."""\n\n__version__ = "0.1.0"\n')
        (tmp_path / "pyproject.toml").write_text('d = [\n    "flowkernels~=0.1.0",  # own\n]\n')
        (tmp_path / "CHANGELOG.md").write_text("# C\n\n## 0.1.0 (unreleased)\n\n- New.\n")
        git(tmp_path, "init", "-q")
        commit(tmp_path)
        return tmp_path

    return make


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")


def test_the_version_is_the_same_everywhere(release: ModuleType) -> None:
    assert set(release.versions(ROOT).values()) == {flowtrain.__version__}
    assert flowkernels.__version__ == flowtrain.__version__
    assert re.fullmatch(release.SEMANTIC, flowtrain.__version__)


def test_a_release_is_prepared_and_then_complete(
    release: ModuleType, checkout: Callable[[], Path]
) -> None:
    root = checkout()
    assert release.missing(root) == [
        "CHANGELOG.md begins with '## 0.1.0 (unreleased)', not with 0.1.0 and its date"
    ]
    release.prepare(root, "0.2.0", "2026-12-01")
    assert set(release.versions(root).values()) == {"0.2.0"}
    assert (root / "pyproject.toml").read_text() == 'd = [\n    "flowkernels~=0.2.0",  # own\n]\n'
    assert (root / "CHANGELOG.md").read_text() == "# C\n\n## 0.2.0 (2026-12-01)\n\n- New.\n"
    assert release.missing(root) == ["there are changes that are not committed"]
    commit(root)
    assert release.missing(root) == []


def test_what_is_missing_is_said(release: ModuleType, checkout: Callable[[], Path]) -> None:
    root = checkout()
    release.prepare(root, "0.2.0", "2026-12-01")
    (root / "pyproject.toml").write_text('    "flowkernels~=0.1.0",\n')
    commit(root)
    git(root, "tag", "v0.2.0")
    assert release.missing(root) == [
        "pyproject.toml says 0.1.0, flowtrain/__init__.py 0.2.0",
        "the tag v0.2.0 is there already",
    ]


@pytest.mark.parametrize("version", ["1.0", "v1.0.0", "1.0.0-rc1", "01.0.0", "1.0.0rc0", "1.0.0\n"])
def test_other_versions_are_refused(
    release: ModuleType, checkout: Callable[[], Path], version: str
) -> None:
    root = checkout()
    with pytest.raises(SystemExit, match="is no version"):
        release.prepare(root, version, "2026-12-01")
    assert set(release.versions(root).values()) == {"0.1.0"}


def test_an_upload_wants_both_distributions_and_a_release(
    release: ModuleType, checkout: Callable[[], Path]
) -> None:
    root = checkout()
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md begins with"):
        release.upload(root, None)
    release.prepare(root, "0.2.0", "2026-12-01")
    commit(root)
    with pytest.raises(SystemExit, match=r"dist/ has not both distributions of 0\.2\.0"):
        release.upload(root, None)


def test_every_module_and_every_file_that_is_read_is_in_the_wheel(setup_options: dict) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]
    tracked = subprocess.run(
        ["git", "ls-files", "flowtrain", "configs"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    files = list(map(Path, tracked))
    if not files:
        pytest.skip("not a git checkout")
    folders = {
        name: Path("configs" if name == "flowtrain.configs" else name.replace(".", "/"))
        for name in setup_options["packages"]
    }
    patterns = [str(folder / "*.py") for folder in folders.values()]
    patterns += [str(folders[name] / pattern) for name, those in data.items() for pattern in those]
    assert [file for file in files if not any(map(file.match, patterns))] == []


def test_the_package_page_has_no_link_into_the_checkout(setup_options: dict) -> None:
    page = setup_options["long_description"]
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) > 30
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    home = "https://github.com/flowtrain/flowtrain"
    for target in targets:
        for kind in ("blob", "raw"):
            if target.startswith(f"{home}/{kind}/main/"):
                path = target.removeprefix(f"{home}/{kind}/main/").partition("#")[0]
                assert (ROOT / path).exists(), path
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
    assert images and all("/raw/" in image for image in images)


def test_flowkernels_knows_no_more_than_torch() -> None:
    project = tomllib.loads((ROOT / "kernels" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.11"]
    assert (ROOT / "kernels" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=str)
def test_the_workflows_run_what_is_there(path: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    lines = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    commands = [re.sub(r"\$\{\{.*?\}\}", "", line).split() for line in lines]
    assert commands
    for words in commands:
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= set(targets)
        elif words[-1].startswith(".ci/"):
            assert (ROOT / words[-1]).is_file()


def test_uv_asks_the_indexes_that_pip_is_told_of(tmp_path: Path) -> None:
    uv, environment = tmp_path / "uv", tmp_path / "environment"
    python = environment / "bin" / "python"
    made = f'mkdir -p "{python.parent}"\ncp /bin/true "{python}"\n'
    uv.write_text(f'#!/bin/sh\n{made}env > "{tmp_path}/seen"\n')
    uv.chmod(0o755)
    told = {"PIP_INDEX_URL": "http://mirror/simple", "PIP_EXTRA_INDEX_URL": "http://more/simple"}
    subprocess.run(
        ["make", "run-setup", f"UV={uv}", f"VENV={environment}"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **told},
        check=True,
        capture_output=True,
    )
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines())
    assert seen["UV_DEFAULT_INDEX"] == told["PIP_INDEX_URL"]
    assert seen["UV_EXTRA_INDEX_URL"] == told["PIP_EXTRA_INDEX_URL"]
    assert seen["UV_INDEX_STRATEGY"] == "unsafe-best-match"
