"""Layouts, the columns of a row that make a task: the user's own, and those of published data."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flowtrain.records import SubGoal, Task, UserError
from flowtrain.tasks import published
from flowtrain.tasks.rows import Row
from flowtrain.utils.errors import user_error

_INSTRUCTION = re.compile(
    r"\s*When ready, output the final answer enclosed in <answer>.*", re.DOTALL
)
"""AgentFlow adds this to some questions; our flow asks for the answer in its own words."""
_LABEL = re.compile(r"\(?([A-Z])(?:[.:]\s+|\)\s*)(?=\S)")
_MISSING = object()
PICTURES = ("image", "images", "video", "videos")
"""Columns of what a question shows besides its text."""

_Text = Annotated[str, Meta(pattern=r"\S")]
_Answer = _Text | int | float


@dataclass(frozen=True, slots=True)
class _KeptColumns:
    """A row under the names of our own layout, for a reward function; the types are what it may
    hold.
    """

    question: _Text
    answer: str | int | float | list[str | int | float] | None
    id: _Text | int
    kind: _Text = ""
    num_turns: Annotated[int, Meta(ge=0)] = 0
    scorer: _Text = ""
    choices: Annotated[tuple[_Text, ...], Meta(min_length=2, max_length=26)] = ()
    sub_goals: tuple[SubGoal, ...] = ()


@dataclass(frozen=True, slots=True)
class _Columns(_KeptColumns):
    """A row for a scorer, which needs an answer."""

    answer: _Answer | Annotated[list[_Answer], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of columns; "reward_model.ground_truth" looks into an object."""

    question: str
    answers: tuple[str, ...]
    """The first of these columns that a row has is used."""
    others: Mapping[str, str] = field(default_factory=dict)
    """The names of further columns, by those of our own layout."""
    default_scorer: str = "exact"
    scorer_by_kind: Mapping[str, str] = field(default_factory=dict)
    """Scorers of data sets that mix questions, by kind."""
    scorer_of_choices: str = "choice"
    """The scorer of a row with options."""
    separator: str = ""
    """Separator of several answers in one string."""
    is_closed: bool = False
    """A row may have no other columns."""
    unpack: published.Unpack = published.as_is
    """Adds columns to a row, as it is in the file, before the others are looked up."""
    unpacks: tuple[str, ...] = ()
    """The columns that `unpack` reads."""
    solution: str = ""
    """Column of a text that ends in the right answer; "" where there is none."""
    keeps_columns: bool = False
    """Other columns go into `Task.columns`, and no answer is needed: a reward function reads them.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the top-level columns that are read."""
        names = (self.question, *self.answers, *self.others.values(), *self.unpacks)
        return tuple(name.partition(".")[0] for name in names)

    def fits(self, row: Row) -> bool:
        """Return whether a row has a question and an answer of this layout."""
        row = self.unpack(row)
        names = [_column(row, name) is not _MISSING for name in (self.question, *self.answers)]
        return names[0] and any(names[1:])

    def solution_of(self, row: Row) -> str:
        """Return the row's own solution, or "" where it has none."""
        solution = _column(self.unpack(row), self.solution)
        return solution if isinstance(solution, str) else ""


_OPTIONAL = ("id", "kind", "num_turns", "choices", "scorer", "sub_goals")
OWN = Layout("question", ("answer",), {name: name for name in _OPTIONAL}, is_closed=True)
PRESETS = {
    "own": OWN,
    "search-r1": Layout(
        "question",
        ("golden_answers", "reward_model.ground_truth.target"),
        {"kind": "data_source"},
        default_scorer="qa",
    ),
    "deepmath": Layout("question", ("final_answer",), default_scorer="math"),
    "agentflow": Layout(
        "question",
        ("result",),
        {"kind": "source"},
        default_scorer="qa",
        scorer_by_kind={"mathhard": "math", "aime2024": "math"},
        separator="; ",
    ),
    "gsm8k": Layout(
        "question",
        (published.HASHES,),
        default_scorer="math",
        unpack=published.gsm8k,
        unpacks=("answer",),
        solution="answer",
    ),
    "math": Layout(
        "problem",
        ("answer", published.BOX),
        {"kind": published.SUBJECT},
        default_scorer="math",
        unpack=published.math,
        unpacks=("solution", "type", "subject"),
        solution="solution",
    ),
    "verl": Layout(
        published.QUESTION,
        (published.TRUTH,),
        {"kind": "data_source"},
        scorer_by_kind=published.VERL_SCORERS,
        unpack=published.verl,
        unpacks=("prompt", "reward_model"),
    ),
    "chat": Layout(
        published.QUESTION,
        ("final_answer", "answer", published.REPLY_ANSWER),
        unpack=published.chat,
        unpacks=("messages",),
        solution=published.REPLY,
    ),
    "triviaqa": Layout(
        "question",
        (published.ALIASES,),
        default_scorer="qa",
        unpack=published.triviaqa,
        unpacks=("answer",),
    ),
    "popqa": Layout(
        "question",
        (published.POSSIBLE,),
        default_scorer="qa",
        unpack=published.popqa,
        unpacks=("possible_answers",),
    ),
    "browsecomp-plus": Layout(
        published.QUERY,
        ("answer",),
        default_scorer="qa",
        unpack=published.browsecomp_plus,
        unpacks=("query", "query_id"),
    ),
}
"""search-r1: NQ and HotpotQA as Search-R1 prepares them; deepmath: DeepMath-103K; agentflow: the
combined_train file; gsm8k and math: as their authors publish them; verl: what its scripts prepare;
chat: conversations; triviaqa, popqa and browsecomp-plus: as their authors publish them, the last
decrypted. The first that fits is taken."""


def recognise(rows: Sequence[Row]) -> str:
    """Return the name of the first preset that fits one of the rows, else "own"."""
    for name, layout in PRESETS.items():
        if not layout.is_closed and any(map(layout.fits, rows)):
            return name
    return "own"


def rules_of(scorer: str) -> str:
    """Return the `Task.rules` of a row with that scorer."""
    return "gameof24" if scorer == "gameof24" else ""


def read_task(row: Row, layout: Layout, where: str, default_id: str) -> Task:
    """Make a task of a row.

    Raises UserError, which begins with `where` and names the column and what it may be.
    """
    if pictures := [name for name in PICTURES if row.get(name)] or _parts(row):
        raise UserError(
            f"{where}: has content other than text ({pictures[0]!r}), which training does not "
            "support"
        )
    unknown_keys = [key for key in row if key not in layout.columns]
    if layout.is_closed and unknown_keys:
        raise UserError(
            f"{where}: unknown key {unknown_keys[0]!r}; allowed are {', '.join(layout.columns)}"
        )
    extra_json = _other_columns(row, layout) if layout.keeps_columns else ""
    row = layout.unpack(row)
    names = {"question": (layout.question,), "answer": layout.answers}
    names |= {key: (columns,) for key, columns in layout.others.items()}
    fields: dict[str, Any] = {"id": default_id}
    for key, columns in names.items():
        values = [value for name in columns if (value := _column(row, name)) is not _MISSING]
        fields |= {key: values[0]} if values else {}
    if isinstance(question := fields.get("question"), str):
        fields["question"] = _INSTRUCTION.sub("", question)
    label = f"question: {layout.question}, answer: {' or '.join(layout.answers)}"
    with user_error(f"{where} ({label})", msgspec.ValidationError):
        if layout.keeps_columns:
            record = msgspec.convert({"answer": None, **fields}, _KeptColumns)
        else:
            record = msgspec.convert(fields, _Columns)
    default = layout.scorer_of_choices if record.choices else layout.default_scorer
    scorer = record.scorer or layout.scorer_by_kind.get(record.kind, default)
    raw_answers = [] if record.answer is None else record.answer
    raw_answers = raw_answers if isinstance(raw_answers, list) else [raw_answers]
    if any(isinstance(answer, float) and not math.isfinite(answer) for answer in raw_answers):
        column = next(name for name in layout.answers if _column(row, name) is not _MISSING)
        raise UserError(f"{where}: the answer in {column!r} is not a number: {raw_answers!r}")
    answers = list(map(str, raw_answers))
    if layout.separator and scorer != "math":
        answers = [part for answer in answers for part in answer.split(layout.separator)]
    return Task(
        str(record.id),
        record.question,
        answers=tuple(answer for answer in answers if answer.strip()),
        kind=record.kind,
        num_turns=record.num_turns,
        scorer=scorer,
        rules=rules_of(scorer),
        choices=_without_labels(record.choices),
        sub_goals=record.sub_goals,
        columns=extra_json,
    )


def _other_columns(row: Row, layout: Layout) -> str:
    """Return the columns that are not read whole, as JSON; dates and the like become texts."""
    names = (layout.question, *layout.answers, *layout.others.values())
    extras = {name: value for name, value in row.items() if name not in names}
    return json.dumps(extras, ensure_ascii=False, default=str) if extras else ""


def _parts(row: Row) -> list[str]:
    """Return the types of what messages hold besides text."""
    messages = [
        message for name in ("prompt", "messages") for message in published.as_list(row.get(name))
    ]
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents for part in published.as_list(content)]
    kinds = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    return [kind for kind in kinds if kind != "text"]


def _column(row: Any, name: str) -> Any:
    """Return the value at a dotted name, or `_MISSING`."""
    for part in name.split("."):
        if not isinstance(row, dict) or part not in row:
            return _MISSING
        row = row[part]
    return row


def _without_labels(choices: tuple[str, ...]) -> tuple[str, ...]:
    """Strip the options, and the letters of ["A. Rome", "B. Oslo"] and ["A)36", "B)15"]."""
    labels = [match[1] if (match := _LABEL.match(choice)) else "" for choice in choices]
    if labels == list(string.ascii_uppercase[: len(choices)]):
        choices = tuple(_LABEL.sub("", choice, count=1) for choice in choices)
    return tuple(choice.strip() for choice in choices)
