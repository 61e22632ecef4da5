"""Compare short answers: beyond the same words, the same date, number, range or measure.

Only what a person would accept without knowing the question counts: "Paris, Texas" is not Paris.
"""

from __future__ import annotations

import re
from fractions import Fraction

from flowtrain.rewards import dates
from flowtrain.rewards.normal import normalise, visible
from flowtrain.rewards.numerals import in_digits
from flowtrain.rewards.units import quantity
from flowtrain.utils.text import boxed

MAX_LENGTH = 400
"""Characters of an answer that is read as more than words."""

_MARKUP = re.compile(r"\*\*|__|`|\\(?:text(?:bf|it|rm)?|math(?:bf|rm|it)|emph)\s*(?=\{)")
_BRACED = re.compile(r"\{([^{}]*)\}")
_LEAD = re.compile(r"(?:the )?(?:final |correct )?answer(?: is|:)\s*:?\s*", re.IGNORECASE)
_YES_NO = re.compile(r"(yes|no)\s*[,.;:!(\u2014\u2013](?!\s*[0-9])")
_DOUBT = re.compile(
    r"\?|\b(?:yes|no|or|if|unless|but|however|although|wait|actually|rather|sorry|maybe|perhaps)\b"
)
_HYPHEN = re.compile(r"(?<=[^\W\d_])\s*[-\u2010-\u2015]\s*(?=[^\W\d_])|(?<=[^\W\d_])-(?=[0-9])")
_HEDGE = re.compile(
    r"(?:about|approximately|approx\.?|around|roughly|circa|ca\.|c\.|~|\u2248)\s*"
    r"(?=[0-9$\u20ac\u00a3])",
    re.IGNORECASE,
)
_PLACE = re.compile(r"(?:at|in) the (?:city|town|village) of ", re.IGNORECASE)
_PERCENT = re.compile(r"\s?(?:%|\bper ?cent\b)", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_RANGE = re.compile(r"(?<=[0-9])(?:\s+to\s+|\s*[-\u2010-\u2015]\s*)(?=[0-9])")
_CURRENCY = re.compile(r"[$\u20ac\u00a3\u00a5]\s?(?=[0-9])")
_PARENTHESIS = re.compile(r"([^()]*[^()\s])\s*\(([^()]*)\)")
_WHEN = re.compile(r"(?:as of |in )?(?:1[0-9]{3}|20[0-9]{2})")
_SYNONYMS = {
    **dict.fromkeys(("usa", "united states", "united states of america"), "us"),
    "united kingdom": "uk",
}


def plain(text: str) -> str:
    """Return a text without what marks it: a box, bold letters, "the answer is"."""
    content = boxed(text)
    marked = _BRACED.sub(r"\1", _MARKUP.sub("", text if content is None else content))
    marked = " ".join(visible(marked).split()).strip("*_ ")
    return _LEAD.sub("", marked, count=1).strip("*_ ") or text


def same(answer: str, accepted: str) -> bool:
    """Return whether two short answers say the same, the answer as precisely or more so."""
    text, gold = plain(answer), plain(accepted)
    if normalise(text) == normalise(gold):
        return True
    yes_no = _YES_NO.match(text.casefold())
    is_plain = yes_no and not _DOUBT.search(text.casefold()[yes_no.end() :])
    if yes_no and is_plain and yes_no[1] == normalise(gold):
        return True
    if max(len(text), len(gold)) > MAX_LENGTH:
        return False
    date, gold_date = dates.read(text), dates.read(gold)
    if date and gold_date:
        return date.fits(gold_date)
    return any(
        _same_words(reading, gold_reading)
        for reading in (text, *_without_year(text), *_first_measure(text))
        for gold_reading in (gold, *_first_measure(gold))
    )


def canonical(text: str) -> str:
    """Write a text in the form in which equal answers are the same text."""
    text = _HEDGE.sub("", in_digits(text.strip().rstrip(".")), count=1)
    text = _RANGE.sub("-", _PLACE.sub("", _THOUSANDS.sub("", _PERCENT.sub("", text)), count=1))
    text = normalise(_HYPHEN.sub(" ", text))
    return _SYNONYMS.get(text, text)


def _same_words(answer: str, gold: str) -> bool:
    """Compare in canonical form, and measures by value."""
    signs = [_CURRENCY.findall(text) for text in (answer, gold)]
    if all(signs) and signs[0] != signs[1]:
        return False
    if canonical(_CURRENCY.sub("", answer)) == canonical(_CURRENCY.sub("", gold)):
        return True
    measure = _measure(answer)
    return measure is not None and measure == _measure(gold)


def _measure(text: str) -> tuple[str, Fraction] | None:
    """Read "1.5 km" as ("length", 1500), None for what is no number with a unit."""
    text = _THOUSANDS.sub("", _HEDGE.sub("", in_digits(text), count=1))
    number, dimension, factor = quantity(text.rstrip("."))
    is_number = re.fullmatch(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?", number)
    return (dimension, Fraction(number) * factor) if is_number and dimension else None


def _first_measure(text: str) -> list[str]:
    """Return "582 feet" of "582 feet (177 m)"."""
    match = _PARENTHESIS.fullmatch(text)
    return [match[1]] if match and _measure(match[1]) and _measure(match[2]) else []


def _without_year(text: str) -> list[str]:
    """Return "The Treaty of Paris" of "The Treaty of Paris (1783)", 41,173 of "41,173 (2010)"; but
    not 1066 of "1066 (1067)".
    """
    match = _PARENTHESIS.fullmatch(text)
    is_when = match and _WHEN.fullmatch(match[2]) and not re.fullmatch("[0-9]{1,4}", match[1])
    return [match[1]] if match and is_when else []
