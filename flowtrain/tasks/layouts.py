"""Layouts, the columns of a row that make a task: the user's own, and those of published data."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowtrain.tasks.rows import Row
from flowtrain.types import SubGoal, Task, UserError

_INSTRUCTION = re.compile(
    r"\s*When ready, output the final answer enclosed in <answer>.*", re.DOTALL
)
"""AgentFlow adds this to some questions; our flow asks for the answer in its own words."""
_LABEL = re.compile(r"([A-Z])[.):]\s+")
_MISSING = object()
_GOAL_KEYS = {"names", "weight", "query"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of columns, "" for none; "reward_model.ground_truth" looks into an object."""

    question: str
    answers: tuple[str, ...]
    """The first of these columns that a row has is used."""
    id: str = ""
    kind: str = ""
    num_turns: str = ""
    choices: str = ""
    scorer: str = ""
    sub_goals: str = ""
    default_scorer: str = "exact"
    scorer_by_kind: Mapping[str, str] = field(default_factory=dict)
    """Scorers of data sets that mix questions, by kind."""
    separator: str = ""
    """Separator of several answers in one string."""
    is_closed: bool = False
    """A row may have no other columns."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Top-level columns that are read."""
        names = (self.question, *self.answers, self.id, self.kind, self.num_turns)
        others = (self.choices, self.scorer, self.sub_goals)
        return tuple(name.partition(".")[0] for name in (*names, *others) if name)


OWN = Layout(
    question="question",
    answers=("answer",),
    id="id",
    kind="kind",
    num_turns="num_turns",
    choices="choices",
    scorer="scorer",
    sub_goals="sub_goals",
    is_closed=True,
)
PRESETS = {
    "own": OWN,
    "search-r1": Layout(
        "question",
        ("golden_answers", "reward_model.ground_truth.target"),
        kind="data_source",
        default_scorer="qa",
    ),
    "deepmath": Layout("question", ("final_answer",), default_scorer="math"),
    "agentflow": Layout(
        "question",
        ("result",),
        kind="source",
        default_scorer="qa",
        scorer_by_kind={"mathhard": "math", "aime2024": "math"},
        separator="; ",
    ),
}
"""search-r1: NQ and HotpotQA as Search-R1 prepares them; deepmath: DeepMath-103K; agentflow: the
combined_train file."""


def recognise(columns: Collection[str]) -> Layout:
    """Return the preset whose question and answers are among the columns, else our own layout."""
    for layout in PRESETS.values():
        has_answer = any(name.partition(".")[0] in columns for name in layout.answers)
        if not layout.is_closed and layout.question in columns and has_answer:
            return layout
    return OWN


def read_task(row: Row, layout: Layout, where: str, default_id: str) -> Task:
    """Make a task of a row.

    Raises UserError, which begins with `where` and names the column and what it may be.
    """
    unknown = [key for key in row if key not in layout.columns]
    if layout.is_closed and unknown:
        raise UserError(
            f"{where}: unknown key {unknown[0]!r}; allowed are {', '.join(layout.columns)}"
        )
    question = _column(row, layout.question)
    found = (_column(row, name) for name in layout.answers)
    answer = next((value for value in found if value is not _MISSING), _MISSING)
    for key, value in ((layout.question, question), (" or ".join(layout.answers), answer)):
        if value is _MISSING:
            raise UserError(f"{where}: key {key!r} is missing")
    question = _INSTRUCTION.sub("", _text(question, layout.question, where))
    kind = _text(row[layout.kind], layout.kind, where) if layout.kind in row else ""
    scorer = layout.scorer_by_kind.get(kind, layout.default_scorer)
    answer_key = "answer" if layout.is_closed else layout.answers[0]
    separator = layout.separator if scorer != "math" else ""
    choices = row.get(layout.choices, _MISSING)
    goals = row.get(layout.sub_goals, _MISSING)
    return Task(
        id=_id(row.get(layout.id, default_id), where),
        question=_text(question, layout.question, where),
        answers=_answers(answer, answer_key, where, separator),
        kind=kind,
        num_turns=_num_turns(row.get(layout.num_turns, 0), where),
        scorer=_text(row[layout.scorer], "scorer", where) if layout.scorer in row else scorer,
        choices=() if choices is _MISSING else _choices(choices, layout.choices, where),
        sub_goals=() if goals is _MISSING else _sub_goals(goals, layout.sub_goals, where),
    )


def _column(row: Any, name: str) -> Any:
    """Return the value at a dotted name, or `_MISSING`."""
    for part in name.split("."):
        if not isinstance(row, dict) or part not in row:
            return _MISSING
        row = row[part]
    return row


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: key {key!r} must be a non-empty string, not {_shown(value)}")
    return value


def _id(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise UserError(
            f"{where}: key 'id' must be a non-empty string or an integer, not {_shown(value)}"
        )
    return str(value)


def _num_turns(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(
            f"{where}: key 'num_turns' must be an integer of 0 (unknown) or more, not "
            f"{_shown(value)}"
        )
    return value


def _choices(value: Any, key: str, where: str) -> tuple[str, ...]:
    """Return the options in order, without the letters of ["A. Rome", "B. Oslo"]."""
    is_list = isinstance(value, list) and 2 <= len(value) <= 26
    if not is_list or not all(isinstance(each, str) and each.strip() for each in value):
        raise UserError(
            f"{where}: key {key!r} must be a list of 2 to 26 non-empty strings, not {_shown(value)}"
        )
    labels = [match[1] if (match := _LABEL.match(each)) else "" for each in value]
    if labels == list(string.ascii_uppercase[: len(value)]):
        return tuple(_LABEL.sub("", each, count=1).strip() for each in value)
    return tuple(each.strip() for each in value)


def _sub_goals(value: Any, key: str, where: str) -> tuple[SubGoal, ...]:
    """Read [{"names": ["Chad"], "weight": 0.5, "query": "country with capital N'Djamena"}, ...].

    The query may be missing.
    """
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and {"names", "weight"} <= set(each) <= _GOAL_KEYS for each in value
    ):
        raise UserError(
            f"{where}: key {key!r} must be a list of objects with names, weight and perhaps query, "
            f"not {_shown(value)}"
        )
    goals = []
    for each in value:
        names, weight, query = each["names"], each["weight"], each.get("query", "")
        has_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not has_names or not isinstance(query, str):
            raise UserError(
                f"{where}: key {key!r}: names must be a list of strings and query a string, not "
                f"{_shown(each)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"{where}: key {key!r}: weight must be a number, not {_shown(weight)}")
        goals.append(SubGoal(tuple(names), float(weight), query))
    return tuple(goals)


def _answers(value: Any, key: str, where: str, separator: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UserError(f"{where}: key {key!r} must not be an empty list")
    answers = [_answer(each, key, where) for each in values]
    return tuple(
        part
        for answer in answers
        for part in (answer.split(separator) if separator else [answer])
        if part.strip()
    )


def _answer(value: Any, key: str, where: str) -> str:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    is_finite = isinstance(value, float) and math.isfinite(value)
    if is_integer or is_finite or (isinstance(value, str) and value.strip()):
        return str(value)
    raise UserError(
        f"{where}: key {key!r} must be a non-empty string, a finite number or a list of these, not "
        f"{_shown(value)}"
    )


def _shown(value: Any) -> str:
    """Show the value in a message, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
