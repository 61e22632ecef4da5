"""The prompt that has a model name the sub-goals of a question, the reader of its replies, and
what published rows hold: passages, and the trees of InfoSeek.

InfoFlow (arXiv 2510.26575) had Gemini 2.5 Pro name sub-goals; its prompt is not published, this one
is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flowtrain.tasks import sub_goals
from flowtrain.tasks.sub_goals import spaced
from flowtrain.types import SubGoal, Task, UserError
from flowtrain.utils.errors import user_error

MAX_REPLY_CHARS = 20_000
"""Longest reply that is read."""
MAX_PASSAGE_CHARS = 16_000
"""Characters of a row's passages in the prompt."""
_SHOWN_CHARS = 2_000
"""Characters of a reply that its author gets to see again."""
_NOTHING = ("none", "null", "unknown")
"""Entities of a tree that are none."""

_Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"\w")]


@dataclass(frozen=True, slots=True)
class _Goal:
    names: Annotated[list[_Name], Meta(min_length=1, max_length=8)]
    importance: Annotated[float, Meta(ge=0.001, le=1000)]
    query: Annotated[str, Meta(max_length=500)] = ""


@dataclass(frozen=True, slots=True)
class _Reply:
    sub_goals: Annotated[list[_Goal], Meta(max_length=16)]


def prompt_for(task: Task) -> str:
    """Return the prompt for a task, with the passages among its other columns."""
    found = passages(task.extra)
    return PROMPT.format(
        question=task.question,
        answer=" | ".join(task.answers),
        passages=PASSAGES.format(passages=found) if found else "",
    )


def ask_again(prompt: str, reply: str, problem: str) -> str:
    """Return the prompt that follows a reply that could not be used."""
    return AGAIN.format(prompt=prompt, reply=reply[:_SHOWN_CHARS], problem=problem[:_SHOWN_CHARS])


def read_reply(task: Task, reply: str) -> tuple[SubGoal, ...]:
    """Read the sub-goals in a reply; () where it says that there are none.

    Raises UserError, which tells the model what to do otherwise.
    """
    if len(reply) > MAX_REPLY_CHARS:
        raise UserError(f"the reply has {len(reply)} characters, more than {MAX_REPLY_CHARS}")
    start, end = reply.find("{"), reply.rfind("}")
    with user_error(
        "the reply is not the JSON object that was asked for",
        *(msgspec.MsgspecError, UnicodeEncodeError, RecursionError),
    ):
        read = msgspec.json.decode(reply[start : end + 1].encode(), type=_Reply)
    goals = _weighed([SubGoal(tuple(g.names), g.importance, g.query) for g in read.sub_goals])
    seen = set(map(spaced, task.answers))
    question, found = spaced(task.question), spaced(passages(task.extra))
    for goal in goals:
        names = list(map(spaced, goal.names))
        if not seen.isdisjoint(names):
            raise UserError("a sub-goal is the answer itself, or is listed twice: leave it out")
        seen.add(names[0])
        if any(name in question for name in names):
            raise UserError(f"the question itself names {goal.names[0]!r}: leave it out")
        if found.strip() and not any(name in found for name in names):
            raise UserError(
                f"the passages do not name {goal.names[0]!r}: give a name as they have it"
            )
    sub_goals.check(replace(task, sub_goals=goals))
    return goals


def from_tree(task: Task) -> tuple[SubGoal, ...] | None:
    """Return the entities below the answer in InfoSeek's tree (arXiv 2509.00375), its column
    `root`, the deepest first; None for a row without one.

    An entity's weight is in proportion to 1 + the steps that build on it. One that is the answer,
    or stands further down too, is left out, and so is a query that gives anything away.
    """
    level, depth = _children(task.extra.get("root")), 1
    if not level:
        return None
    found: dict[str, SubGoal] = {}
    while level:
        for node in level:
            name, query = (str(node.get(key) or "") for key in ("entity", "question"))
            if spaced(name).strip() and name.casefold() not in _NOTHING:
                found[spaced(name)] = _fair(SubGoal((name,), 1.0 + depth, query), task)
        level, depth = [each for node in level for each in _children(node)], depth + 1
    for answer in task.answers:
        found.pop(spaced(answer), None)
    return _weighed(sorted(found.values(), key=lambda goal: -goal.weight))


def passages(row: Mapping[str, Any]) -> str:
    """Return the passages of a row, a paragraph each; "" where it has none: `context` of HotpotQA
    in both of its published forms, `paragraphs` of MuSiQue, or `passages`, a list of texts.
    """
    value = row.get("context") or row.get("paragraphs") or row.get("passages") or []
    if isinstance(value, dict):  # columns of a table instead of rows
        value = list(zip(value.get("title", ()), value.get("sentences", ()), strict=False))
    texts = map(_passage, value if isinstance(value, list) else [value])
    return "\n\n".join(filter(None, texts))[:MAX_PASSAGE_CHARS]


def _passage(entry: Any) -> str:
    """Return a text, [title, sentences], or {title, paragraph_text}, as one text."""
    if isinstance(entry, dict):
        entry = (entry.get("title", ""), entry.get("paragraph_text") or entry.get("text", ""))
    if isinstance(entry, list | tuple) and len(entry) == 2:
        title, body = ("".join(map(str, p)) if isinstance(p, list) else str(p) for p in entry)
        return f"{title}: {body}" if title else body
    return str(entry)


def _weighed(goals: Sequence[SubGoal]) -> tuple[SubGoal, ...]:
    """Return them with weights that sum to 1."""
    total = sum(goal.weight for goal in goals)
    return tuple(replace(goal, weight=goal.weight / total) for goal in goals)


def _fair(goal: SubGoal, task: Task) -> SubGoal:
    """Return it without a query that says what is looked for, or the answer."""
    said, question = spaced(goal.query), spaced(task.question)
    given = map(spaced, (*goal.names, *task.answers))
    gives_away = any(name in said and name not in question for name in given)
    return replace(goal, query="") if gives_away else goal


def _children(node: Any) -> list[dict[str, Any]]:
    found = node.get("children") if isinstance(node, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


PROMPT = """A researcher with a search engine will be asked the question below. List what the \
researcher has to find out on the way to the
answer: the intermediate entities, dates or numbers, in the order in which they are needed.

Question: {question}
Answer: {answer}
{passages}
Rules:
- List neither the answer nor anything that the question itself names.
- "names": how texts name the finding, as short as possible; further spellings after the first.
- "importance": a number above 0; the more of the later steps need the finding, the higher.
- "query": what to type into the search engine to find it. It must contain neither a name of the \
finding nor the answer; it may name
  findings that are listed before.
- A question that takes a single search has no sub-goals: reply {{"sub_goals": []}}.

Reply with this JSON object alone:
{{"sub_goals": [{{"names": ["..."], "importance": 1, "query": "..."}}]}}"""

PASSAGES = """
Passages that are known to matter:
{passages}
"""

AGAIN = """{prompt}

Your last reply was:
{reply}

It cannot be used: {problem}
Reply with the corrected JSON object alone."""
