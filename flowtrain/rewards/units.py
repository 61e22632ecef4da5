"""Names of units and the exact factors between those of time, length and mass."""

from __future__ import annotations

import re
from fractions import Fraction

_SPELLINGS = {
    "$": "dollar usd buck",
    "\u20ac": "euro eur",
    "\u00a3": "pound",
    "degree": "deg",
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "g": "gram gramme",
    "kg": "kilogram kilogramme",
    "mg": "milligram",
    "l": "litre liter",
    "ml": "millilitre milliliter",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "wk",
    "year": "yr",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "square": "sq",
    "cubic": "",
    "": "unit",
    "cent": "",
    "radian": "rad",
    **dict.fromkeys(
        ("mph", "kmh", "kwh", "N", "J", "W", "V", "K", "A", "L", "newton", "joule"), ""
    ),
    **dict.fromkeys(("watt", "volt", "ampere", "liter", "hectare", "acre", "gallon", "ounce"), ""),
}
_UNITS = {word: unit for unit, words in _SPELLINGS.items() for word in words.split()}
_FACTORS = {
    "length": {
        "mm": "1/1000",
        "cm": "1/100",
        "m": "1",
        "km": "1000",
        "in": "0.0254",
        "ft": "0.3048",
        "yd": "0.9144",
        "mi": "1609.344",
    },
    "time": {"s": "1", "min": "60", "h": "3600", "day": "86400", "week": "604800"},
    "mass": {"mg": "1/1000", "g": "1", "kg": "1000"},
    "volume": {"ml": "1/1000", "l": "1"},
}
FACTORS = {
    unit: (dimension, Fraction(factor))
    for dimension, units in _FACTORS.items()
    for unit, factor in units.items()
}
"""Dimension and factor of each unit that has others beside it."""
KNOWN = set(_SPELLINGS)
"""The short names."""

_PART = r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]+)\.?"
_QUANTITY = re.compile(rf"([+-]?){_PART}((?:(?:,|,? and)? ?{_PART}){{0,3}})")


def unit_name(word: str) -> str:
    """Return the short name of a unit ("Metres" is "m"), or the word without its plural s."""
    word = word.strip(".").replace("{", "").replace("}", "")
    word = word if len(word) == 1 else word.casefold()
    singular = word[:-1] if word.endswith("s") and len(word) > 2 else word
    return _UNITS.get(word, _UNITS.get(singular, singular))


def is_unit(word: str) -> bool:
    """Return whether a word is a unit, as "km/h" and "cm^3" are, or "per" between two."""
    parts = re.sub(r"\^\{?[0-9]\}?$", "", word).split("/")
    return word == "per" or all(unit_name(part) in KNOWN for part in parts)


def quantity(text: str) -> tuple[str, Fraction] | None:
    """Read "1.5 km" as ("length", 1500), in the base unit, and "1 h 30 min" as ("time", 5400); None
    for anything else.

    A further part must be less than one of the unit before it.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or (found[1] and found[4]):
        return None
    total, bound, dimensions = Fraction(0), None, set()
    for number, word in re.findall(_PART, text):
        dimension, factor = FACTORS.get(unit_name(word), ("", Fraction(0)))
        value = Fraction(number) * factor
        if not dimension or (bound is not None and value >= bound):
            return None
        # Nothing follows a fraction of a unit.
        total, bound = total + value, Fraction(0) if "." in number else factor
        dimensions.add(dimension)
    return (dimension, -total if found[1] == "-" else total) if len(dimensions) == 1 else None
