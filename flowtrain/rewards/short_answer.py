"""Compare short answers: beyond the same words, the same date, number, range or measure.

Only what a person would accept without knowing the question counts: "Paris, Texas" is not Paris.
"""

from __future__ import annotations

import re
from fractions import Fraction

from flowtrain.rewards import dates
from flowtrain.rewards.normal import normalise
from flowtrain.rewards.numerals import in_digits
from flowtrain.rewards.units import KNOWN, quantity, unit_name
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
_DASH = re.compile(r"\s*[\u2010-\u2015\u2212]\s*|(?<=[0-9%])\s+-\s+(?=[0-9])")
_HYPHEN = re.compile(
    r"(?<=[^\W\d_])\s*-\s*(?=[^\W\d_])|(?<=[^\W\d_])-(?=[0-9])|(?<=[0-9])-(?=[^\W\d_])"
)
_HEDGE = re.compile(
    r"(?:about|approximately|approx\.?|around|roughly|circa|ca\.|c\.|~|\u2248)\s*"
    r"(?=[0-9$\u20ac\u00a3])",
    re.IGNORECASE,
)
_PLACE = re.compile(r"[Aa]t the (?:city|town|village) of |[Ii]n the (?:city|town|village) of ")
_PERCENT = re.compile(r"\s?(?:%|\bper ?cent\b)", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_RANGE = re.compile(
    r"(?P<lead>from |between )?(?P<low>[0-9]+(?:\.[0-9]+)?)(?P<sign>-| to | and )"
    r"(?P<high>[0-9]+(?:\.[0-9]+)?)(?P<rest>(?: ?[^\W\d_][^\W\d_. ]*\.?){0,4})"
)
_MEASURE = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)\b\.?")
_BC = re.compile(r"(?<=[0-9]) ?[Bb]\.? ?[Cc]\.?(?: ?[Ee]\b\.?)?(?!\w)")
_CURRENCY = re.compile(r"([\u20ac\u00a3]) ?([0-9]+(?:\.[0-9]+)?)")
_PARENTHESIS = re.compile(r"([^()]*[^()\s])\s*\(([^()]*)\)")
_YEAR = r"(?:1[0-9]{3}|20[0-9]{2})"
_ESTIMATED = r"(?:est\.?|estimated?|approx\.?|approximately)"
_WHEN = re.compile(
    rf"(?:as of |in )?{_YEAR}(?: (?:census|{_ESTIMATED}))?|{_ESTIMATED} (?:in )?{_YEAR}",
    re.IGNORECASE,
)
_LIST = re.compile(r"[0-9]+(?:(?:, |,? and | ?& ?)[0-9]+)+")
_TITLES = ("Sir", "Dr", "Prof", "Professor", "President")
_JUNIOR = re.compile(r"(?<=\w )(junior|senior)$")
_NO_UNITS = {"", "\u00a3"}
"""Words for units that mean something else, too: pounds weigh."""
_ROUNDED = 0.03
"""How far a measure in parentheses may be from the one before them."""
_SYNONYMS = {
    **dict.fromkeys(("usa", "united states", "united states of america"), "us"),
    "united kingdom": "uk",
}


def plain(text: str) -> str:
    """Return a text without what marks it: a box, bold letters, "the answer is"."""
    content = boxed(text)
    marked = _BRACED.sub(r"\1", _MARKUP.sub("", text if content is None else content))
    marked = " ".join(marked.split()).strip("*_ ")
    return _LEAD.sub("", marked, count=1).strip("*_ ") or text


def same(answer: str, accepted: str) -> bool:
    """Return whether two short answers say the same, the answer as precisely or more so."""
    given, wanted = plain(answer), plain(accepted)
    if normalise(given) == normalise(wanted):
        return True
    yes_no = _YES_NO.match(given.casefold())
    is_plain = yes_no and not _DOUBT.search(given.casefold()[yes_no.end() :])
    if yes_no and is_plain and yes_no[1] == normalise(wanted):
        return True
    if max(len(given), len(wanted)) > MAX_LENGTH:
        return False
    date, wanted_date = dates.read(given), dates.read(wanted)
    if date and wanted_date:
        return date.fits(wanted_date)
    wanted_texts = [wanted, *_restated(wanted)]
    return any(
        _same_words(one, other)
        for one in (given, *_restated(given), *_without_year(given))
        for other in wanted_texts
    ) or any(
        normalise(one) == normalise(_untitled(other))
        for one, other in ((given, wanted), (wanted, given))
    )


def canonical(text: str) -> str:
    """Write a text in the form in which equal answers are the same text."""
    text = in_digits(_DASH.sub("-", text.strip().rstrip(".")))
    text = _PLACE.sub("", _THOUSANDS.sub("", _PERCENT.sub("", text)), count=1)
    text = _HEDGE.sub("", text, count=1) if _HEDGE.match(text) else text
    if _LIST.fullmatch(text):
        return " and ".join(re.findall("[0-9]+", text))
    if found := _RANGE.fullmatch(text):
        text = _range(found)
    text = _BC.sub(" bc", text)
    text = _CURRENCY.sub(r"\2 \1", _MEASURE.sub(_unit, text))
    text = _JUNIOR.sub(lambda found: f"{found[1][0]}r", normalise(_HYPHEN.sub(" ", text)))
    return _SYNONYMS.get(text, text)


def _range(found: re.Match[str]) -> str:
    """Write "from 30 to 65 km" as "30-65 km", 1990-95 as 1990-1995."""
    low, high = found["low"], found["high"]
    if (found["sign"] == " and ") != (found["lead"] == "between "):
        return found[0]
    if re.fullmatch(r"[0-9]{4}", low) and re.fullmatch(r"[0-9]{2}", high) and high > low[2:]:
        high = low[:2] + high
    return f"{low}-{high}{found['rest']}"


def _unit(found: re.Match[str]) -> str:
    unit = unit_name(found[2])
    if unit == "$":
        return found[1]
    return found[0] if unit in _NO_UNITS or unit not in KNOWN else f"{found[1]} {unit}"


def _same_words(given: str, wanted: str) -> bool:
    """Compare in canonical form, and measures by value."""
    if canonical(given) == canonical(wanted):
        return True
    measure = _measure(given)
    return measure is not None and measure == _measure(wanted)


def _measure(text: str) -> tuple[str, Fraction] | None:
    text = _THOUSANDS.sub("", in_digits(text))
    return quantity(_HEDGE.sub("", text, count=1) if _HEDGE.match(text) else text)


def _restated(text: str) -> list[str]:
    """Return both parts of "582 feet (177 m)" and of "World Health Organization (WHO)"."""
    found = _PARENTHESIS.fullmatch(text)
    if found is None:
        return []
    outer, inner = found.groups()
    if re.fullmatch(_ESTIMATED, inner, re.IGNORECASE):
        return [outer]
    one, other = _measure(outer), _measure(inner.strip())
    if one and other and one[0] == other[0]:
        is_close = abs(one[1] - other[1]) <= _ROUNDED * max(abs(one[1]), abs(other[1]))
        return [outer, inner] if is_close else []
    is_short = len(inner) > 1 and inner.isupper() and inner in _initials(outer)
    return [outer, inner] if is_short else []


def _initials(text: str) -> tuple[str, str]:
    """Return the initials of all words, and of those with a capital."""
    words = re.findall(r"[^\W\d_]+", text)
    return (
        "".join(word[0].upper() for word in words),
        "".join(word[0] for word in words if word[0].isupper()),
    )


def _without_year(text: str) -> list[str]:
    """Return "The Treaty of Paris" of "The Treaty of Paris (1783)", 41,173 of "41,173 (2010)"; but
    not 1066 of "1066 (1067)".
    """
    found = _PARENTHESIS.fullmatch(text)
    is_when = found and _WHEN.fullmatch(found[2]) and not re.fullmatch("[0-9]{1,4}", found[1])
    return [found[1]] if found and is_when else []


def _untitled(text: str) -> str:
    """Return "Isaac Newton" of "Sir Isaac Newton", but all of "Dr. No"."""
    title, _, name = text.partition(" ")
    words = name.split()
    is_name = 2 <= len(words) <= 4 and all(word[0].isupper() for word in words)
    return name if is_name and title.rstrip(".") in _TITLES else text
