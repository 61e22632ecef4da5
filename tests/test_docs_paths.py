"""The README and the docs name files that exist, and commands of modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
PLACES = (ROOT, ROOT / "flowtrain", ROOT / "kernels", ROOT / "docs", ROOT / "bench" / "results")
NOT_OURS = ("runs/", "weights/v", "checkpoints/", "folder/NAME")


def named_files(text: str) -> set[str]:
    """Paths in backticks that end like a file of the repo, and targets of links."""
    quoted = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|toml|md|cpp|h|json|css))`", text)
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    return {name for name in (*quoted, *linked) if not name.startswith(NOT_OURS)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    places = (*PLACES, page.parent)
    gone = [
        name
        for name in named_files(page.read_text())
        if not any((place / name).exists() for place in places)
    ]
    assert not gone


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_modules_exist(page: Path) -> None:
    modules = set(re.findall(r"-m ((?:flowtrain|bench|examples)[\w.]*)", page.read_text()))
    gone = [
        module
        for module in modules
        if not (path := ROOT.joinpath(*module.split("."))).is_dir()
        and not path.with_suffix(".py").exists()
    ]
    assert not gone


def test_a_missing_file_would_be_found() -> None:
    assert named_files("see `run/session.py` and [it](docs/no.md#x)") == {
        "run/session.py",
        "docs/no.md",
    }
