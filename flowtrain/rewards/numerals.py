"""Numbers in words: "twenty-seven" is 27, "1.5 million" is 1500000, "third" is 3rd."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", *(f"{word}teen" for word in ("thir", "four", "fif", "six"))]
_TEENS += [f"{word}teen" for word in ("seven", "eigh", "nine")]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_VALUES = {
    **{word: number for number, word in enumerate(_UNITS, 1)},
    **{word: number for number, word in enumerate(_TEENS, 10)},
    **{word: 10 * number for number, word in enumerate(_TENS, 2)},
    "zero": 0,
}
_ODD_ORDINALS = ("first", "second", "third", "fifth", "eighth", "ninth", "twelfth")
_ORDINALS = dict(zip(_ODD_ORDINALS, (1, 2, 3, 5, 8, 9, 12), strict=True)) | {
    f"{word}th": number
    for number, word in enumerate([*_UNITS, *_TEENS], 1)
    if number not in (1, 2, 3, 5, 8, 9, 12)
}
_ROUND_ORDINALS = {f"{word[:-1]}ieth": 10 * number for number, word in enumerate(_TENS, 2)}

_UNIT, _TEN = "|".join(_UNITS), "|".join(_TENS)
_SMALL = rf"(?:(?:{_TEN})(?:[ -](?:{_UNIT})(?![a-z]))?|{'|'.join(_TEENS)}|{_UNIT})(?![a-z])"
_GROUP = rf"{_SMALL}(?:[ -]hundred(?![a-z])(?:[ -](?:and[ -])?{_SMALL})?)?"
_SCALE = rf"(?:{'|'.join(_SCALES)})(?![a-z])"
_WORDS = re.compile(
    rf"(?<![a-z])(?:zero(?![a-z])|{_GROUP}(?:[ -]{_SCALE}[ -](?:and[ -])?{_GROUP}){{0,4}}"
    rf"(?:[ -]{_SCALE})?)",
    re.IGNORECASE,
)
_ORDINAL = re.compile(
    rf"(?<![a-z])(?<![0-9][ -])(?:(?:(?P<ten>{_TEN})[ -])?(?P<word>{'|'.join(_ORDINALS)})"
    rf"|(?P<round>{'|'.join(_ROUND_ORDINALS)}))(?![a-z])",
    re.IGNORECASE,
)
_DIGIT = rf"(?:zero|{_UNIT})(?![a-z])"
_POINT = re.compile(rf"({_WORDS.pattern}) point ({_DIGIT}(?: {_DIGIT})*)", re.IGNORECASE)
_ONE = re.compile(rf"(?<![a-z])an?(?= (?:hundred|{_SCALE}))", re.IGNORECASE)
_PARTS = {
    "half": 2,
    "halves": 2,
    "quarter": 4,
    "quarters": 4,
    **{word + s: part for word, part in _ORDINALS.items() if 3 <= part <= 10 for s in ("", "s")},
}
_PART = re.compile(
    rf"(?<![a-z])({_UNIT})[ -]({'|'.join(sorted(_PARTS, key=len, reverse=True))})(?![a-z-])",
    re.IGNORECASE,
)
_SCALED = re.compile(
    rf"(?<![0-9.,])([0-9]{{1,12}}(?:\.[0-9]{{1,12}})?)[ -]?({_SCALE})", re.IGNORECASE
)


def in_digits(text: str) -> str:
    """Write the numbers that stand in words, of any case, in digits."""
    text = _POINT.sub(_decimal, _ONE.sub("one", text))
    text = _PART.sub(
        lambda found: f"{_value(found[1].casefold())}/{_PARTS[found[2].casefold()]}", text
    )
    text = _ORDINAL.sub(_ordinal, text)
    text = _WORDS.sub(lambda found: str(_value(found[0].casefold())), text)
    return _SCALED.sub(_scaled, text)


def _value(words: str) -> int:
    total = current = 0
    for word in re.split(r"[ -]", words):
        if word == "hundred":
            current *= 100
        elif word in _SCALES:
            total, current = total + current * _SCALES[word], 0
        elif word != "and":
            current += _VALUES[word]
    return total + current


def _decimal(found: re.Match[str]) -> str:
    digits = "".join(str(_VALUES[word]) for word in found[2].casefold().split())
    return f"{_value(found[1].casefold())}.{digits}"


def _ordinal(found: re.Match[str]) -> str:
    if found["round"]:
        number = _ROUND_ORDINALS[found["round"].casefold()]
    else:
        number = _ORDINALS[found["word"].casefold()]
        if found["ten"]:
            if number > 9:
                return found[0]
            number += _VALUES[found["ten"].casefold()]
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number // 10 != 1 else "th"
    return f"{number}{suffix}"


def _scaled(found: re.Match[str]) -> str:
    value = Decimal(found[1]) * _SCALES[found[2].casefold()]
    return f"{value:f}".rstrip("0").rstrip(".") if "." in f"{value:f}" else f"{value:f}"
