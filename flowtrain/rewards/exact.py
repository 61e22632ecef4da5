"""Exact match after normalisation: the answer is one of the accepted ones, up to how it is written."""

from __future__ import annotations

import re

from flowtrain.types import Task

_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_NUMERAL = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]+))?")


def exact_match(task: Task, answer: str) -> float:
    """1.0 when the normalised answer equals one of the task's normalised answers, else 0.0."""
    normalised = _normalise(answer)
    return float(any(normalised == _normalise(accepted) for accepted in task.answers))


def _normalise(text: str) -> str:
    """Casefolded and single-spaced, without one trailing period and thousands commas; a numeral in
    its shortest form (385.0 is 385).
    """
    text = " ".join(text.casefold().split()).removesuffix(".").rstrip()
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _shortest_numeral(text)


def _shortest_numeral(text: str) -> str:
    """ "+0385.50" as "385.5"; text that is not a decimal numeral as it is."""
    match = _NUMERAL.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return text
    # On digits, not through float or int: those round, or refuse numerals of thousands of digits.
    whole, fraction = match[2].lstrip("0") or "0", (match[3] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if match[1] == "-" and number != "0" else number
