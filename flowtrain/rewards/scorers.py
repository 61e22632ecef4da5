"""The scoring rules of answers by name, and the function that applies them."""

from __future__ import annotations

from collections.abc import Callable

from flowtrain.records import Task, UserError
from flowtrain.rewards import choice, exact, gameof24, math_answer, squad, symbolic

Rule = Callable[[Task, str], float]

MAX_CHARS = 2000
"""Number of characters that rules read, from the end of a longer text; a judge never sees longer
texts."""

SCORERS: dict[str, Rule] = {
    "exact": exact.exact_match,
    "qa": squad.exact_match,
    "f1": squad.token_f1,
    "math": math_answer.math_match,
    "choice": choice.choice,
    "gameof24": gameof24.gameof24,
}
"""The rule of each scorer, by its name in `Task.scorer`; the rule gets the final answer."""


def check(task: Task) -> None:
    """Raise UserError for an unknown scorer, or one that cannot use the task's answers."""
    if task.scorer not in SCORERS:
        raise UserError(
            f"task {task.id!r}: scorer {task.scorer!r} is unknown; known: {', '.join(SCORERS)}"
        )
    SCORERS[task.scorer](task, "")


async def by_rule(task: Task, answer: str) -> tuple[float, str]:
    """Return the reward of a final answer by the task's scorer, and the scorer's name; `math` falls
    back to math-verify. Raises UserError as `check` does.
    """
    if task.scorer not in SCORERS:
        check(task)
    if not answer:
        return 0.0, task.scorer
    text = answer[-MAX_CHARS:]
    reward = SCORERS[task.scorer](task, text)
    if not reward and task.scorer == symbolic.SCORER:
        reward = float(await symbolic.same(task, text))
    return reward, task.scorer
