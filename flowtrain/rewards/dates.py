"""Dates with a month in letters, and in ISO 8601."""

from __future__ import annotations

import calendar
import re
from typing import NamedTuple

_MONTHS = [month.casefold() for month in calendar.month_name[1:]]
_ISO = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_WORD = re.compile(r"[a-z]+|[0-9]+|\S")
_ORDINAL = re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b")


class Date(NamedTuple):
    """A day, a month or a year; 0 for what is not named."""

    year: int = 0
    month: int = 0
    day: int = 0

    def fits(self, gold: Date) -> bool:
        """Return whether this is the gold date, or a more precise one within it."""
        return all(not named or named == part for part, named in zip(self, gold, strict=True))


def read(text: str) -> Date | None:
    """Read a date that is the whole text, or a year of four digits; None for any other text."""
    text = text.casefold().strip() if len(text) <= 60 else ""
    if match := _ISO.fullmatch(text):
        return _valid(*map(int, match.groups()))
    year = month = day = 0
    for word in _WORD.findall(_ORDINAL.sub("", text)):
        if word.isdigit() and word.isascii() and len(word) == 4 and not year:
            year = int(word)
        elif word.isdigit() and word.isascii() and len(word) <= 2 and not day:
            day = int(word)
        elif not month and (number := _month(word)):
            month = number
        elif word not in ("on", "in", "the", "of", ",", "."):
            return None
    return _valid(year, month, day) if month or (year and not day) else None


def _month(word: str) -> int:
    """Return the number of "september", "sept" or "sep"; 0 for other words."""
    names = [name for name in _MONTHS if word in (name, name[:3], name[:4])]
    return _MONTHS.index(names[0]) + 1 if names else 0


def _valid(year: int, month: int, day: int) -> Date | None:
    days = calendar.monthrange(year or 2000, month)[1] if 1 <= month <= 12 else 0
    return Date(year, month, day) if day <= days or not (month or day) else None
