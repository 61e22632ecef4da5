"""Which sub-goals a rollout has reached (InfoFlow, arXiv 2510.26575, section 3; the matching rule
is ours, the paper gives none).

Two-sided: a name of the sub-goal stands in what the planner wrote at some turn, and stood in a
tool's result at an earlier one. Text of the planner alone would pay for dropping names, results
alone for luck. What the question names already is nothing to find.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowtrain.types import SubGoal, Task, Turn, UserError

_WORD = re.compile(r"\w+")


def solved(task: Task, turns: Sequence[Turn]) -> list[SubGoal]:
    """The sub-goals that the turns have reached, in the task's order. A malformed turn says
    nothing, a failed tool finds nothing.
    """
    found = dict.fromkeys(sought(task), False)
    reached = []
    for turn in turns:
        written = _words(turn.calls["planner"].text) if turn.action is not None else ""
        reached += [
            goal for goal, was_found in found.items() if was_found and _names(goal, written)
        ]
        result = _words(turn.result.output) + _words(turn.retrieved)
        found = {goal: was_found or _names(goal, result) for goal, was_found in found.items()}
    return [goal for goal in found if goal in reached]


def solved_weight(task: Task, turns: Sequence[Turn]) -> float:
    """Share of the importance of all sub-goals that are to be found; 0 for a task without any."""
    total = sum(goal.weight for goal in sought(task))
    return sum(goal.weight for goal in solved(task, turns)) / total if total else 0.0


def sought(task: Task) -> list[SubGoal]:
    """The sub-goals that the question does not name."""
    question = _words(task.question)
    return [goal for goal in task.sub_goals if not _names(goal, question)]


def check(task: Task) -> None:
    """UserError for weights that do not sum to 1, a sub-goal without a name, and a hint that gives
    something away.
    """
    if not task.sub_goals:
        return
    total = sum(goal.weight for goal in task.sub_goals)
    if abs(total - 1) > 1e-6 or any(goal.weight <= 0 for goal in task.sub_goals):
        raise UserError(
            f"task {task.id!r}: the weights of its sub_goals must be above 0 and sum to 1, not to "
            f"{total:g}"
        )
    for goal in task.sub_goals:
        if not goal.names or not all(_words(name).strip() for name in goal.names):
            raise UserError(
                f"task {task.id!r}: every sub-goal needs names with at least one word, not "
                f"{goal.names!r}"
            )
        for name in (*goal.names, *task.answers):
            if _words(name) in _words(goal.query) and _words(name) not in _words(task.question):
                raise UserError(
                    f"task {task.id!r}: the query {goal.query!r} of a sub-goal gives {name!r} away"
                )


def _names(goal: SubGoal, words: str) -> bool:
    return any(_words(name) in words for name in goal.names)


def _words(text: str) -> str:
    """The words of a text between single spaces, without case: a name is part of a text iff its
    words are.
    """
    return " " + " ".join(_WORD.findall(text.casefold())) + " "
