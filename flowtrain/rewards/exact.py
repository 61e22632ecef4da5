"""Exact match with an accepted answer after normalisation."""

from __future__ import annotations

import re
from decimal import Decimal

from flowtrain.records import Task
from flowtrain.rewards.normal import visible

_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_NUMERAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def exact_match(task: Task, answer: str) -> float:
    """Return 1.0 when the normalised answer equals one of the task's, else 0.0."""
    normalised = _normalise(answer)
    return float(any(normalised == _normalise(accepted) for accepted in task.answers))


def _normalise(text: str) -> str | Decimal:
    """Fold case, spaces, a trailing period, thousands commas and numerals (385.0 is 385)."""
    text = " ".join(visible(text).casefold().split()).removesuffix(".").rstrip()
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return Decimal(text) if _NUMERAL.fullmatch(text) else text
