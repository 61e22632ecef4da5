"""Sub-goals that published rows hold already, and the passages that they come with.

Two shapes are read: the steps of MuSiQue (`question_decomposition`), and trees of entities under
the answer, as InfoSeek's `root` or a column `tree` (arXiv 2509.00375). A finding's importance is
1 + the number of steps that build on it, the answer among them; InfoFlow's paper (arXiv 2510.26575)
had a model assign it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowtrain.types import SubGoal, Task
from flowtrain.utils.text import words

MAX_FINDINGS = 64
"""Findings that are read of a row."""
_MAX_NODES = 1000
"""Nodes of a tree that are looked at."""
_NOTHING = ("", "none", "null", "unknown")
_REFERENCE = re.compile(r"#([1-9][0-9]?)(?![0-9])")
_TREES = ("tree", "root")
_TEXTS = ("text", "paragraph_text", "contents", "sentences")
_PASSAGES = ("context", "paragraphs", "passages")


class Finding(NamedTuple):
    """A fact that has to be found out on the way to an answer."""

    names: tuple[str, ...]
    importance: float
    """Above 0; in proportion to those of the row's other findings."""
    query: str = ""


def findings(task: Task) -> list[Finding] | None:
    """Return what the other columns of a task say must be found, in the order of need; None: none
    of them has a shape that is read. The answer may be among them.
    """
    row = task.extra
    if steps := _dicts(row.get("question_decomposition")):
        return _of_steps(steps)
    for column in _TREES:
        if (tree := _tree(row.get(column))) is not None:
            return _of_tree(tree)
    return None


def as_sub_goals(task: Task, found: Sequence[Finding]) -> tuple[SubGoal, ...]:
    """Make sub-goals of findings, with weights that sum to 1.

    The answer is none, nor is what was there before; a query that gives a name of its own or the
    answer away is left out.
    """
    kept: dict[tuple[str, ...], Finding] = {}
    answers = [tuple(words(answer)) for answer in task.answers]
    for finding in found:
        names = tuple(name for name in finding.names if words(name))
        key = tuple(words(names[0])) if names else ()
        if key and key not in kept and not any(tuple(words(name)) in answers for name in names):
            kept[key] = finding._replace(names=names)
    total = sum(finding.importance for finding in kept.values())
    return tuple(
        SubGoal(names, importance / total, _fair(query, names, task))
        for names, importance, query in kept.values()
    )


def passages(row: Mapping[str, Any], max_chars: int) -> str:
    """Return the passages of a row, a paragraph each; "" where it has none."""
    value = next((row[name] for name in _PASSAGES if row.get(name)), "")
    if isinstance(value, dict):  # columns of a table instead of rows
        value = list(zip(*map(_list, map(value.get, ("title", "sentences"))), strict=False))
    texts = map(_text, value if isinstance(value, list) else [value])
    return "\n\n".join(filter(None, texts))[:max_chars]


# ---- findings


def _of_steps(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Read MuSiQue's steps; #1 in a question stands for the answer of the first."""
    steps = steps[:MAX_FINDINGS]
    questions = [_string(step.get("question")) for step in steps]
    answers = [_string(step.get("answer")) for step in steps]
    needs = [{int(number) - 1 for number in _REFERENCE.findall(text)} for text in questions]
    needed_by: list[set[int]] = [set() for _ in steps]
    for number in reversed(range(len(steps))):
        for earlier in needs[number]:
            if earlier < number:
                needed_by[earlier] |= {number} | needed_by[number]

    def filled(text: str) -> str:
        return _REFERENCE.sub(
            lambda found: answers[int(found[1]) - 1] if int(found[1]) <= len(answers) else found[0],
            text,
        )

    return [
        Finding((answer,), 1.0 + max(len(later), 1), filled(question).replace(" >> ", ", "))
        for question, answer, later in zip(questions, answers, needed_by, strict=True)
        if answer
    ]


def _of_tree(root: Mapping[str, Any]) -> list[Finding]:
    """Read the entities below the root, which is the answer, the deepest first: a node stands on
    those below it.
    """
    found: list[tuple[int, Finding]] = []
    level, depth, num = _children(root), 1, 0
    while level and num < _MAX_NODES:
        num += len(level)
        for node in level[:_MAX_NODES]:
            name = _string(node.get("entity"))
            if name.casefold() not in _NOTHING:
                query = _string(node.get("question")) or _string(node.get("query"))
                found.append((depth, Finding((name,), 1.0 + depth, query)))
        level = [child for node in level[:_MAX_NODES] for child in _children(node)]
        depth += 1
    found.sort(key=lambda each: -each[0])
    return [finding for _, finding in found[:MAX_FINDINGS]]


def _fair(query: str, names: Sequence[str], task: Task) -> str:
    """Return a query, or "" where it says what is looked for, or the answer."""
    said, question = _spaced(query), _spaced(task.question)
    given = [_spaced(name) for name in (*names, *task.answers)]
    return "" if any(name in said and name not in question for name in given) else query


# ---- columns, in which anything may stand


def _tree(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict) and isinstance(value.get("root"), dict):
        value = value["root"]
    return value if isinstance(value, dict) and _children(value) else None


def _children(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    return _dicts(node.get("children"))


def _text(entry: Any) -> str:
    """Return a passage: a text, {title, text} or [title, sentences]."""
    if isinstance(entry, dict):
        body = next((entry[name] for name in _TEXTS if entry.get(name)), "")
        entry = [entry.get("title"), body]
    if not isinstance(entry, list | tuple):
        return _string(entry)
    title, body = (_joined(part) for part in [*entry, "", ""][:2])
    return f"{title}: {body}" if title and body else body


def _joined(value: Any) -> str:
    parts = value if isinstance(value, list) else [value]
    return "".join(part for part in parts if isinstance(part, str)).strip()


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in _list(value) if isinstance(each, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _string(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _spaced(text: str) -> str:
    return f" {' '.join(words(text))} "
