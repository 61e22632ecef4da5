"""The verbs of the loop: the table in `train.py`, the one in docs/design.md, and the code agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "flowtrain" / "train.py"


def verbs_of_docstring() -> dict[str, str]:
    """Verb -> room, as the docstring of train.py lists them."""
    docstring = ast.get_docstring(ast.parse(TRAIN.read_text())) or ""
    rows = re.findall(r"^ {4}(\w+) {2,}([\w/]+(?:\.py)?) {2,}\S", docstring, re.MULTILINE)
    return {verb: room for verb, room in rows if verb != "verb"}


def test_docs_name_the_same_verbs_in_the_same_order() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `([\w/]+(?:\.py)?)` \|", text, re.MULTILINE)
    assert rows == list(verbs_of_docstring().items()) and len(rows) == 19


def test_train_calls_every_verb_in_the_order_of_the_table() -> None:
    tree = ast.parse(TRAIN.read_text())
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name is not None:
                lines.setdefault(name, node.lineno)
    verbs = list(verbs_of_docstring())
    assert not [verb for verb in verbs if verb not in lines]
    # Of all policies together, once each has learnt.
    at_the_end = ["checkpoint", "watch"]
    learnt = [verb for verb in verbs[4:-1] if verb not in at_the_end]
    for part in (verbs[:4], learnt, at_the_end):
        assert [lines[verb] for verb in part] == sorted(lines[verb] for verb in part)


def test_every_room_of_the_table_is_there() -> None:
    assert all((ROOT / "flowtrain" / room).exists() for room in verbs_of_docstring().values())
