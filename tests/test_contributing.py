"""CONTRIBUTING.md names files and commands that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| an? ", line)]


def test_every_path_of_the_page_exists() -> None:
    named = re.findall(r"`([\w./-]+/[\w./-]+)`", PAGE) + re.findall(r"\]\(([^):]+)\)", PAGE)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_row_of_the_table_names_a_file_and_a_test(row: str) -> None:
    what, write, known, described, test = row.strip("| ").split(" | ")
    assert what and known and described
    assert "`" in write
    assert re.search(r"`tests/\w+/test_\w+\.py`", test)


def test_the_table_has_a_row_for_everything_that_can_be_added() -> None:
    kinds = [row.split("|")[1].strip().split(" ", 1)[1] for row in ROWS]
    assert kinds == [
        "algorithm",
        "loss of tokens",
        "tool",
        "reward",
        "task source",
        "engine",
        "model family",
        "config option",
        "kernel",
    ]


def test_every_make_target_of_the_page_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for words in re.findall(r"\bmake ((?:[\w-]+ )*[\w-]+)", PAGE)
        for word in words.split()
        if word.islower()
    }
    assert {"setup", "check", "lint", "typecheck", "test", "quickstart"} <= named <= targets
