"""Numbers in words: "twenty-seven" is 27, "1.5 million" is 1500000, "third" is 3rd."""

from __future__ import annotations

import re
from decimal import Decimal

_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_SMALL = {word: value for value, word in enumerate(_WORDS.split())}
_TENS = {
    f"{stem}ty": 10 * tens
    for tens, stem in enumerate(("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine"), 2)
}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ORDINALS = {"first": "1st", "second": "2nd", "third": "3rd", "fourth": "4th", "fifth": "5th"}
_NUMBER = re.compile(
    rf"(?<![\w-])(?:({'|'.join(_TENS)})(?:[ -]({'|'.join(list(_SMALL)[1:10])}))?"
    rf"|({'|'.join(_SMALL)})|({'|'.join(_ORDINALS)}))(?!\w)",
    re.IGNORECASE,
)
_SCALED = re.compile(
    rf"(?<![0-9.,])([0-9]{{1,12}}(?:\.[0-9]{{1,12}})?)[ -]?({'|'.join(_SCALES)})(?!\w)",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    """Write the numbers that stand in words, of any case, in digits."""
    return _SCALED.sub(_scaled, _NUMBER.sub(_digits, text))


def _digits(match: re.Match[str]) -> str:
    tens, unit, small, ordinal = (word and word.casefold() for word in match.groups())
    if ordinal:
        return _ORDINALS[ordinal]
    return str(_SMALL[small] if small else _TENS[tens] + _SMALL.get(unit or "zero", 0))


def _scaled(match: re.Match[str]) -> str:
    return f"{(Decimal(match[1]).scaleb(_SCALES[match[2].casefold()])).normalize():f}"
