"""A reward with partial credit for a number, as reasoning-gym has it for products and sums."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from flowtrain.records import Task, Trajectory


def number(task: Task, answer: str, trajectory: Trajectory) -> float:
    """Return 1 for the number; where other text stands around it, its share of the characters."""
    given, (wanted,) = answer.replace(",", ""), task.answers
    try:
        if Decimal(given) == Decimal(wanted):
            return 1.0
    except InvalidOperation:  # it is no number
        pass
    return len(wanted) / len(given) if wanted in given else 0.0
