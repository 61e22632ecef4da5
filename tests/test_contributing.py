"""CONTRIBUTING.md names files that are there; docs/test_docs_code.py checks its commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_path_of_the_page_exists() -> None:
    named = re.findall(r"`([\w./-]+/[\w./-]+)`", PAGE) + re.findall(r"\]\(([^):]+)\)", PAGE)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_row_of_the_table_names_a_file_and_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| an? ", line)]
    assert len(rows) == 9
    for row in rows:
        what, write, known, described, test = row.strip("| ").split(" | ")
        assert what and "`" in write and known and described
        assert re.search(r"`tests/\w+/test_\w+\.py`", test), row
