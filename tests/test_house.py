"""What docs/design.md says of sizes and of style is counted; test_imports.py has the rest."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from test_release import loaded

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("flowtrain/**/*.py"), *ROOT.glob("kernels/**/*.py")])
FILES = {
    "flowtrain/__init__.py": 1,
    "flowtrain/train.py": 20,
    "flowtrain/records/task.py": 3,
    "flowtrain/trainer/packing/pack.py": 5,
    "flowtrain/agents/agentflow/flow.py": 7,
    "flowtrain/logging/page/page.js": 900,
    "kernels/flowkernels/loss.py": 11,
    "csrc/delta.cpp": 13,
    "csrc/delta.h": 2,
    "bench/step.py": 17,
    "tests/test_step.py": 19,
}
"""Lines of a checkout small enough to count by hand."""
_FRAGMENT = re.compile(r"(Of|What|Where)\b")


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return loaded(ROOT / ".ci" / "house.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, number in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n" * number)
    return tmp_path


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


def test_rooms_keep_their_budgets(house: ModuleType) -> None:
    """A room that grows past its budget takes an edit of the table in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = re.findall(r"^\| `([\w/.]+)` \| ([\d,]+) \|$", text, re.MULTILINE)
    budgets = {name: int(number.replace(",", "")) for name, number in table}
    found = house.rooms(ROOT)
    assert set(budgets) == {name for name, number in found.items() if number > 100}
    over = {n: (found[n], budget) for n, budget in budgets.items() if found[n] > budget}
    assert not over, f"lines found and the budget; {grown(house, found)}"


def grown(house: ModuleType, found: dict[str, int]) -> str:
    """Say what each room has gained or lost since the last release."""
    before = house.rooms_at("", ROOT) if (ROOT / ".git").exists() else {}
    changes = {name: found.get(name, 0) - before.get(name, 0) for name in {*found, *before}}
    text = ", ".join(f"{name} {number:+,}" for name, number in sorted(changes.items()) if number)
    return f"since the last release: {text}" if before else "nothing was released yet"


def test_lines_are_those_of_the_sources_by_room(house: ModuleType, checkout: Path) -> None:
    found = house.rooms(checkout)
    assert found == {
        "flowtrain/__init__.py": 1,
        "flowtrain/agents": 7,
        "flowtrain/train.py": 20,
        "flowtrain/trainer": 5,
        "flowtrain/records": 3,
        "kernels": 11,
        "csrc": 15,
        "bench": 17,
        "tests": 19,
    }
    assert house.totals(found) == {"the core": 28, "the product": 62, "all": 98}


def test_two_checkouts_stand_side_by_side(
    house: ModuleType, checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    house.main([str(checkout), str(checkout), "--json", str(tmp_path / "lines.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["before", "after"]
    (line,) = (line for line in lines if "flowtrain/trainer" in line)
    assert line.split() == ["*", "flowtrain/trainer", "5", "5"]
    written = json.loads((tmp_path / "lines.json").read_text())
    assert written["before"] == written["after"] and written["after"]["the core"] == 28


def test_a_checkout_stands_beside_its_last_tag(
    house: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, "-C", checkout, *words], check=True, capture_output=True)

    git("init")
    assert house.rooms_at("", checkout) == {}
    git("add", ".")
    git("commit", "-m", "one")
    for tag in ("v0.1.0", "v0.2.0"):
        git("tag", tag)
        path = checkout / "bench" / "step.py"
        path.write_text("pass\n" * (20 if tag == "v0.1.0" else 30))
        git("commit", "-am", "more")
    house.main([str(checkout), "--since"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "bench" in line)
    assert line.split() == ["bench", "20", "30"]
    assert house.rooms_at("v0.1.0", checkout)["bench"] == 17


def test_vague_and_passive_sentences_are_counted(house: ModuleType, tmp_path: Path) -> None:
    page = """# That is a heading

It has three words. A long
line was broken by the writer.

- One item more: `that.is` code. What [this](that.md) is, is a link.

| that | is a table |

```
That is code.
```
"""
    (tmp_path / "README.md").write_text(page)
    (tmp_path / "flowtrain").mkdir()
    (tmp_path / "flowtrain" / "a.py").write_text(
        'x = """Those are no docs."""\n"""They are two."""'
    )
    assert house.sentences(page)[1] == "A long line was broken by the writer."
    assert house.prose(tmp_path) == {"README": (4, 23 / 4, 75, 25), "docstrings": (1, 3, 0, 0)}


def test_a_folder_that_is_no_checkout_is_refused(house: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout of flowtrain"):
        house.rooms(tmp_path)
