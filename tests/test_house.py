"""The house keeps its order by itself: what docs/design.md says of sizes and of style is counted.
Imports, files and functions are in test_imports.py.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from bench.house import rooms

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("flowtrain/**/*.py"), *ROOT.glob("kernels/**/*.py")])
_FRAGMENT = re.compile(r"(Of|What|Where)\b")


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their names alone, and leaves out the second of two."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert {name for name, number in names.items() if number > 1} <= {"conftest.py", "__init__.py"}


def test_no_line_is_longer_than_100_columns() -> None:
    """Regular expressions too, which ruff lets pass."""
    lines = [
        place(path, number)
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not lines


def test_no_docstring_begins_with_a_fragment() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        place(path, getattr(node, "lineno", 1))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and _FRAGMENT.match(ast.get_docstring(node) or "")
    ]
    assert not found


def test_only_algorithms_and_the_config_ask_for_an_algorithms_name() -> None:
    """Elsewhere an algorithm is asked what it needs."""
    found = [
        place(path, node.lineno)
        for path in SOURCES
        if path.relative_to(ROOT).parts[1] not in ("algorithms", "config")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(
            ast.unparse(side).endswith("algorithm.name") for side in [node.left, *node.comparators]
        )
    ]
    assert not found


def test_rooms_keep_their_budgets() -> None:
    """A room that grows past its budget takes an edit of the table in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = re.findall(r"^\| `([\w/.]+)` \| ([\d,]+) \|$", text, re.MULTILINE)
    budgets = {name: int(number.replace(",", "")) for name, number in table}
    found = rooms(ROOT)
    assert set(budgets) == {name for name, number in found.items() if number > 100}
    over = {n: (found[n], budget) for n, budget in budgets.items() if found[n] > budget}
    assert not over, "lines found and the budget"
