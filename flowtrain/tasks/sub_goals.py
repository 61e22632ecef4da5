"""The sub-goals that a rollout has reached, and hints for one that is stuck (InfoFlow, arXiv
2510.26575, section 3); `algorithms/infoflow.py` makes rewards and rates of them.

The matching rule is ours, because the paper gives none. Two conditions hold: a tool result contains
a name of the sub-goal, and later a planner's or the generator's text contains one too. Text alone
would reward dropping names, results alone would reward luck. A tool that was given the name finds
nothing, so that lists of candidates earn nothing; nor does a model's memory. An answer by rules is
no text: it copies a result. A sub-goal that the question names does not count.

A hint comes from the environment: it is part of the prompt, which is never trained, and the tokens
sampled after it are on-policy for that prompt. The hint names the next thing to look for, never the
answer. When and what are ours where the paper has no rule.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flowtrain.records import SubGoal, Task, Turn, UserError
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.text import words

MEMORY = "Base_Generator"
"""The tool that answers from a model's memory."""


def solved(task: Task, turns: Sequence[Turn], closing: str = "") -> list[SubGoal]:
    """Return the sub-goals that the turns have reached, in the task's order.

    `closing`: what the generator wrote after the last turn (`Trajectory.output`), if it did.
    """
    findable = dict.fromkeys(sought(task), False)
    reached = []
    for turn in turns:
        text = "" if turn.problem else spaced(turn.call.text)
        reached += [goal for goal in findable if findable[goal] and _names(goal, text)]
        for query, output in findings(turn):
            query_words, result = spaced(query), spaced(output)
            for goal in findable:
                findable[goal] |= _names(goal, result) and not _names(goal, query_words)
    text = spaced(closing)
    reached += [goal for goal in findable if findable[goal] and _names(goal, text)]
    return [goal for goal in findable if goal in reached]


def solved_weight(task: Task, turns: Sequence[Turn], output: str = "") -> float:
    """Return the weight of the reached sub-goals, of 1 for all; 0 for a task without any."""
    return sum(goal.weight for goal in solved(task, turns, output))


def sought(task: Task) -> list[SubGoal]:
    """Return the sub-goals that the question does not name."""
    question = spaced(task.question)
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
        if not goal.names or not all(spaced(name).strip() for name in goal.names):
            raise UserError(
                f"task {task.id!r}: every sub-goal needs names with at least one word, not "
                f"{goal.names!r}"
            )
        for name in (*goal.names, *task.answers):
            if spaced(name) in spaced(goal.query) and spaced(name) not in spaced(task.question):
                raise UserError(
                    f"task {task.id!r}: the query {goal.query!r} of a sub-goal reveals its answer "
                    f"{name!r}"
                )


@dataclass(frozen=True, slots=True)
class Hints:
    """Gives a rollout one hint at most, from turn `turn` on, after `patience` turns in vain."""

    rate: float
    """Probability that a rollout may get a hint; evaluation gives none."""
    turn: int
    """First turn (from 0) that may read one."""
    patience: int
    """Turns in a row that reached no sub-goal."""

    def give(self, task: Task, turns: Sequence[Turn], seed: int) -> str:
        """Return the hint for the next turn, or ""; it depends on the rollout alone."""
        if len(turns) < max(self.turn, self.patience):
            return ""
        if random.Random(derive_seed(seed, "hint")).random() >= self.rate:
            return ""
        reached = solved(task, turns)
        if len(reached) > len(solved(task, turns[: len(turns) - self.patience])):
            return ""
        return next((goal.query for goal in sought(task) if goal.query and goal not in reached), "")


class Finding(NamedTuple):
    """A text that a tool was given, and what it found."""

    query: str
    output: str


def findings(turn: Turn) -> Iterator[Finding]:
    """Yield the findings of the tools of a turn."""
    planned = f"{turn.action.context} {turn.action.sub_goal} " if turn.action else ""
    for call in turn.tool_calls:
        if call.result.error is None and call.name != MEMORY:
            yield Finding(planned + _unescaped(call.arguments), call.result.output)


def _unescaped(arguments: str) -> str:
    """Return the JSON with its letters as they are read, whatever a model escaped of them."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def _names(goal: SubGoal, text: str) -> bool:
    return any(spaced(name) in text for name in goal.names)


def spaced(text: str) -> str:
    """Return the words of a text between single spaces, so that `in` compares whole words."""
    return " " + " ".join(words(text)) + " "
