"""Dates in the forms that people write."""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass, replace

_MONTHS = [month.casefold() for month in calendar.month_name[1:]]
_MONTH = "(?P<month>sept|" + "|".join(f"{month[:3]}(?:{month[3:]})?" for month in _MONTHS) + ")"
_DAY = r"(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>[0-9]{1,4})"
_LEAD = re.compile(r"(?:(?:on|in) )?(?:the )?(?:year )?(?=.*[0-9])")
_ERA = re.compile(
    r"(?:(?P<before>a\.?d\.?) ?)?(?P<date>.*?[0-9])"
    r"(?: ?(?P<after>b\.?c\.?(?: ?e\.?)?|a\.?d\.?|c\.?e\.?))?"
)
_FORMS = (
    re.compile(rf"(?:the )?{_DAY}(?: of)? {_MONTH}\.?(?:,? (?:of )?{_YEAR})?"),
    re.compile(rf"{_MONTH}\.? (?:the )?{_DAY}(?:,? {_YEAR})?"),
    re.compile(rf"{_MONTH}\.?,? (?:of )?{_YEAR}"),
    re.compile(r"(?P<year>[0-9]{4})[-/.](?P<month>[0-9]{1,2})[-/.](?P<day>[0-9]{1,2})"),
    re.compile(rf"{_YEAR},? {_MONTH}\.?(?: {_DAY})?"),
    re.compile(r"(?P<day>[0-9]{1,2})\.(?P<month>[0-9]{1,2})\.(?P<year>[0-9]{4})"),
    re.compile(r"(?P<year>[0-9]{1,4})"),
)
_SLASHES = re.compile(r"([0-9]{1,2})[/-]([0-9]{1,2})[/-]([0-9]{4})")


@dataclass(frozen=True, slots=True)
class Date:
    """A day, a month, a year or a day of any year."""

    year: int = 0
    """Negative before Christ; 0 where none is named."""
    month: int = 0
    """0 where none is named."""
    day: int = 0
    """0 where none is named."""

    def fits(self, wanted: Date) -> bool:
        """Return whether this is the wanted date, or a more precise one within it."""
        pairs = ((self.year, wanted.year), (self.month, wanted.month), (self.day, wanted.day))
        return all(not named or given == named for given, named in pairs)


def read(text: str) -> Date | None:
    """Read a date that is the whole text, without regard to case; None for any other text.

    Of 03/04/2018, which is a day of March or of April, nobody knows which; so None, too.
    """
    text = " ".join(text.casefold().split()).rstrip(".,;") if len(text) <= 60 else ""
    text = _LEAD.sub("", text, count=1)
    found = _ERA.fullmatch(text)
    if found is None:
        return _valid(_first(text))
    date = _first(found["date"])
    era = (found["before"] or found["after"] or "").replace(".", "").replace(" ", "")
    if date is None or (found["before"] and found["after"]) or (era and not date.year):
        return None
    if not era and date.year < 100:
        # "45" is a number, "May 45" too vague.
        return None if date.year else _valid(date)
    year = -date.year if era.startswith("b") else date.year
    return _valid(replace(date, year=year))


def _first(text: str) -> Date | None:
    """Read the text in the first form that fits."""
    if slashes := _SLASHES.fullmatch(text):
        one, other, year = map(int, slashes.groups())
        if one <= 12 and other <= 12 and one != other:
            return None
        return Date(year, min(one, other), max(one, other))
    found = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
    if found is None:
        return None
    parts = {name: part for name, part in found.groupdict().items() if part}
    month = parts.get("month", "0")
    if not month.isdigit():
        month = str([name[:3] for name in _MONTHS].index(month[:3]) + 1)
    return Date(int(parts.get("year", 0)), int(month), int(parts.get("day", 0)))


def _valid(date: Date | None) -> Date | None:
    if date is None or date.month > 12 or (date.day and not date.month):
        return None
    if date.day:
        leap = date.year % 4 == 0 if date.year else True
        lengths = (31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
        if not date.month or date.day > lengths[date.month - 1]:
            return None
    return date
