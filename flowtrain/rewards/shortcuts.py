"""The screen against shortcuts: rollouts that scored, but did not find out what they answered.

InfoFlow (arXiv 2510.26575) screens its teacher's trajectories for shortcuts before it imitates
them, without saying how in any text that we could read. The rules here are ours, all of them:

- "answer_not_found": no result of a tool has the answer, so that it was remembered or guessed. The
  base generator is a model's memory and finds nothing. Nor does a tool that was given the answer,
  as a search for "Is N'Djamena the capital of Chad?" or code that prints it, unless the question
  itself names the answer.
- "no_sub_goal": the task has sub-goals, and none was reached (`flowtrain.tasks.sub_goals`).

They know answers that stand in texts. An answer that sums results up, such as a yes, or an
expression of the game of 24, stands in none, and all of its rollouts are shortcuts to them.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from flowtrain.records import Task, Trajectory, Turn
from flowtrain.tasks import sub_goals
from flowtrain.utils.text import words

REASONS = ("answer_not_found", "no_sub_goal")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")


def shortcut(rollout: Trajectory) -> str:
    """Return which of the REASONS makes the rollout a shortcut; "" where it is none."""
    task, turns = rollout.task, rollout.turns
    names = [_plain(name) for name in (*_answers(task), rollout.answer)]
    if not _is_found([name for name in names if name.strip()], _plain(task.question), turns):
        return "answer_not_found"
    if sub_goals.sought(task) and not sub_goals.solved(task, turns, rollout.output):
        return "no_sub_goal"
    return ""


def _answers(task: Task) -> Iterator[str]:
    """Yield the accepted answers, of a multiple choice the texts of the right options."""
    options = dict(zip(string.ascii_uppercase, task.choices, strict=False))
    for answer in task.answers:
        yield options.get(answer.strip().upper(), answer)


def _is_found(names: list[str], question: str, turns: tuple[Turn, ...]) -> bool:
    question_names = [name for name in names if name in question]
    return any(
        name in output and (name in question_names or name not in query)
        for turn in turns
        for query, output in _findings(turn)
        for name in names
    )


def _findings(turn: Turn) -> Iterator[tuple[str, str]]:
    for query, output in sub_goals.findings(turn):
        yield _plain(query), _plain(output)


def _plain(text: str) -> str:
    """Return the words between single spaces, so that `in` compares whole words."""
    return f" {' '.join(words(_THOUSANDS.sub('', text)))} "
