"""Exact match and token F1 of short answers, as SQuAD measures them (Rajpurkar et al. 2016)."""

from __future__ import annotations

from collections import Counter

from flowtrain.rewards.normal import normalise
from flowtrain.rewards.short_answer import plain, same, same_but_for_place
from flowtrain.types import Task


def exact_match(task: Task, answer: str) -> float:
    """Return 1.0 when the answer says what an accepted one says, else 0.0.

    "Yes, both were." counts as yes.
    """
    return float(
        any(
            normalise(answer) == normalise(accepted)
            or same(answer, accepted)
            or same_but_for_place(answer, accepted, task.question)
            for accepted in task.answers
        )
    )


def token_f1(task: Task, answer: str) -> float:
    """Return the best F1 between the tokens of the answer and those of an accepted one.

    It is 0 beside yes or no unless the two are equal.
    """
    given = normalise(plain(answer))
    return max((_f1(given, normalise(plain(accepted))) for accepted in task.answers), default=0.0)


def _f1(given: str, accepted: str) -> float:
    if given == accepted:
        return 1.0
    if {given, accepted} & {"yes", "no"}:
        return 0.0
    words = Counter(given.split())
    wanted = Counter(accepted.split())
    num_same = (words & wanted).total()
    return 2 * num_same / (words.total() + wanted.total())
