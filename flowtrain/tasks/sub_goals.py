"""The sub-goals that a rollout has reached (InfoFlow, arXiv 2510.26575, section 3).

The matching rule is ours, because the paper gives none. It has two sides: a tool's result has a
name of the sub-goal, and later the planner's text of some turn, or what the generator wrote, has
one too. Text alone would reward dropping names, results alone would reward luck. An answer by
rules is no text: it copies a result. A sub-goal that the question names does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.types import SubGoal, Task, Turn, UserError
from flowtrain.utils.text import words


def solved(task: Task, turns: Sequence[Turn], output: str = "") -> list[SubGoal]:
    """Return the sub-goals that the turns have reached, in the task's order.

    `output`: what the generator wrote after the last turn (`Trajectory.output`), if it did.
    """
    found = dict.fromkeys(sought(task), False)
    reached = []
    for turn in turns:
        written = _words(turn.calls["planner"].text) if turn.action is not None else ""
        reached += [goal for goal in found if found[goal] and _names(goal, written)]
        result = _words(turn.result.output) + _words(turn.retrieved)
        found = {goal: was_found or _names(goal, result) for goal, was_found in found.items()}
    written = _words(output)
    reached += [goal for goal in found if found[goal] and _names(goal, written)]
    return [goal for goal in found if goal in reached]


def solved_weight(task: Task, turns: Sequence[Turn], output: str = "") -> float:
    """Return the weight of the reached sub-goals as a share of all; 0 for a task without any."""
    total = sum(goal.weight for goal in sought(task))
    return sum(goal.weight for goal in solved(task, turns, output)) / total if total else 0.0


def sought(task: Task) -> list[SubGoal]:
    """Return the sub-goals that the question does not name."""
    question = _words(task.question)
    return [goal for goal in task.sub_goals if not _names(goal, question)]


def check(task: Task) -> None:
    """Raise UserError unless weights sum to 1, all sub-goals have names, and no hint names one."""
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
    """Return the words of a text between single spaces, so that `in` compares whole words."""
    return " " + " ".join(words(text)) + " "
