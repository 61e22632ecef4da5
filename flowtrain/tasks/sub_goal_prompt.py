"""The prompt that has a model name the sub-goals of a question, and the reader of its replies.

InfoFlow (arXiv 2510.26575) had Gemini 2.5 Pro do so; its prompt is not published, this one is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from flowtrain.tasks import sub_goals
from flowtrain.tasks.research_trees import Finding, as_sub_goals, passages
from flowtrain.types import SubGoal, Task, UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.text import words

MAX_REPLY_CHARS = 20_000
"""Longest reply that is read."""
MAX_PASSAGE_CHARS = 16_000
"""Characters of a row's passages in the prompt."""
_SHOWN_CHARS = 2_000
"""Characters of a reply that its author gets to see again."""

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
    found = passages(task.extra, MAX_PASSAGE_CHARS)
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
    goals = as_sub_goals(
        task, [Finding(tuple(g.names), g.importance, g.query) for g in read.sub_goals]
    )
    if len(goals) < len(read.sub_goals):
        raise UserError("a sub-goal is the answer itself, or is listed twice: leave it out")
    queries = [goal.query for goal in read.sub_goals]
    for goal, query in zip(goals, queries, strict=True):
        _check(task, goal, query)
    sub_goals.check(Task(task.id, task.question, task.answers, sub_goals=goals))
    return goals


def _check(task: Task, goal: SubGoal, query: str) -> None:
    if goal.query != query:
        raise UserError(f"the query {query!r} gives {goal.names[0]!r} or the answer away")
    question, found = _words(task.question), _words(passages(task.extra, MAX_PASSAGE_CHARS))
    if any(_words(name) in question for name in goal.names):
        raise UserError(f"the question itself names {goal.names[0]!r}: leave it out")
    if found.strip() and not any(_words(name) in found for name in goal.names):
        raise UserError(f"the passages do not name {goal.names[0]!r}: give a name as they have it")


def _words(text: str) -> str:
    return f" {' '.join(words(text))} "


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
