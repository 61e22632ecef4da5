"""Exact match with an accepted answer after normalisation."""

from __future__ import annotations

import re

from flowtrain.types import Task

_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_NUMERAL = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]+))?")


def exact_match(task: Task, answer: str) -> float:
    """Return 1.0 when the normalised answer equals one of the task's, else 0.0."""
    normalised = _normalise(answer)
    return float(any(normalised == _normalise(accepted) for accepted in task.answers))


def _normalise(text: str) -> str:
    """Fold case, spaces, a trailing period, thousands commas and numerals (385.0 is 385)."""
    text = " ".join(text.casefold().split()).removesuffix(".").rstrip()
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _shortest_numeral(text)


def _shortest_numeral(text: str) -> str:
    """Write "+0385.50" as "385.5"; return a text that is no decimal numeral as it is."""
    match = _NUMERAL.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return text
    # On digits, because float rounds, and int refuses numerals of thousands of digits.
    whole = match[2].lstrip("0") or "0"
    fraction = (match[3] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if match[1] == "-" and number != "0" else number
