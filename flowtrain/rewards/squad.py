"""Exact match and token F1 after the normalisation of SQuAD (Rajpurkar et al. 2016).

The normalisation drops case, punctuation, articles and repeated white space. Four mistakes of it
are corrected here: decimal points and minus signs are part of a number (10.8 is not 108), accents
do not count (Temür is Temur), & is and, and all forms of a date are equal (5 January 1964, January
5th, 1964, 1964-01-05).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from flowtrain.types import Task

_SIGN = re.compile(r"(?<![^\s($])[-\u2212](?=\.?[0-9])")
_POINT = re.compile(r"(?<=[0-9])\.(?=[0-9])")
_DECIMAL = re.compile(r"(?<![0-9.])[0-9]+\.[0-9]+(?![0-9.])")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_MONTHS = [
    *("january", "february", "march", "april", "may", "june", "july", "august"),
    *("september", "october", "november", "december"),
]
_MONTH = "sept|" + "|".join(f"{month[:3]}(?:{month[3:]})?" for month in _MONTHS)
_DATES = (
    re.compile(
        rf"(?P<day>[0-9]{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<month>{_MONTH})\.?,? "
        rf"(?P<year>[0-9]{{3,4}})"
    ),
    re.compile(
        rf"(?P<month>{_MONTH})\.? (?P<day>[0-9]{{1,2}})(?:st|nd|rd|th)?,? (?P<year>[0-9]{{3,4}})"
    ),
    re.compile(r"(?P<year>[0-9]{4})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})"),
)
_YES_NO = re.compile(r"(yes|no)\s*[,.;:!(\u2014\u2013]")
_KEPT = {"\ue000": "-", "\ue001": "."}
"""Private characters that stand for signs of a number while punctuation is removed."""


def exact_match(task: Task, answer: str) -> float:
    """Return 1.0 when the normalised answer equals an accepted one, else 0.0.

    "Yes, both were." counts as yes.
    """
    given = {normalise(answer)}
    if yes_no := _YES_NO.match(answer.strip().casefold()):
        given.add(yes_no[1])
    return float(any(normalise(accepted) in given for accepted in task.answers))


def token_f1(task: Task, answer: str) -> float:
    """Return the best F1 between the tokens of the answer and those of an accepted one.

    It is 0 beside yes or no unless the two are equal.
    """
    given = normalise(answer)
    return max((_f1(given, normalise(accepted)) for accepted in task.answers), default=0.0)


def normalise(text: str) -> str:
    """Normalise as the head of this file says.

    A text of which nothing would be left ("The The" is a band) loses only case and spaces.
    """
    text = " ".join(text.casefold().replace("&", " and ").split())
    if date := _date(text.rstrip(".")):
        return date
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    plain = _DECIMAL.sub(lambda match: match[0].rstrip("0").rstrip("."), _THOUSANDS.sub("", plain))
    plain = _POINT.sub("\ue001", _SIGN.sub("\ue000", plain))
    plain = "".join(_KEPT.get(c, c) for c in plain if not _is_punctuation(c))
    return " ".join(_ARTICLE.sub(" ", plain).split()) or text


def _date(text: str) -> str:
    """Write a date in ISO 8601; "" where the text is no date."""
    match = next(filter(None, (pattern.fullmatch(text) for pattern in _DATES)), None)
    if match is None:
        return ""
    name = match["month"]
    month = int(name) if name.isdigit() else [m[:3] for m in _MONTHS].index(name[:3]) + 1
    return f"{int(match['year']):04}-{month:02}-{int(match['day']):02}"


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] == "P" or character in "$+<=>^`|~"


def _f1(given: str, accepted: str) -> float:
    if given == accepted:
        return 1.0
    if {given, accepted} & {"yes", "no"}:
        return 0.0
    words = Counter(given.split())
    wanted = Counter(accepted.split())
    num_same = (words & wanted).total()
    return 2 * num_same / (words.total() + wanted.total())
