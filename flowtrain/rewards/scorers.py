"""The rules that score answers, by name."""

from __future__ import annotations

from collections.abc import Callable

from flowtrain.rewards import choice, exact, gameof24, math_answer, squad
from flowtrain.types import Task

Rule = Callable[[Task, str], float]

MAX_CHARS = 2000
"""Characters that rules read, at the end of a longer text, which no judge is asked about."""

SCORERS: dict[str, Rule] = {
    "exact": exact.exact_match,
    "qa": squad.exact_match,
    "f1": squad.token_f1,
    "math": math_answer.math_match,
    "choice": choice.choice,
    "gameof24": gameof24.gameof24,
}
"""The rule of each scorer, by its name in `Task.scorer`; the rule gets the final answer."""
