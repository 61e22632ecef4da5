"""Units that may stand after a number, with the factors between those of one dimension."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_UNITS = (
    "length 1/1000 mm millimeter millimetre;length 1/100 cm centimeter centimetre;"
    "length 1 m meter metre;length 1000 km kilometer kilometre;length 0.0254 in inch inche;"
    "length 0.3048 ft foot feet;length 0.9144 yd yard;length 1609.344 mi mile;"
    "time 1 s sec second;time 60 min minute;time 3600 h hr hour;time 86400 day;time 604800 wk week;"
    "year 1 yr year;mass 1/1000 mg milligram;mass 1 g gram;mass 1000 kg kilogram;"
    "volume 1/1000 ml milliliter millilitre;volume 1 l liter litre;dollar 1 $ usd dollar;"
    "euro 1 \u20ac eur euro;pound 1 \u00a3 gbp pound;yen 1 \u00a5 jpy yen;cent 1 cent;"
    "degree 1 degree deg;celsius 1 celsius;fahrenheit 1 fahrenheit;radian 1 radian rad;"
    "unit 1 unit;% 1 % percent pct;mph 1 mph;kmh 1 kmh"
)
_BY_NAME = {
    name: (dimension, Fraction(factor))
    for dimension, factor, *names in map(str.split, _UNITS.split(";"))
    for name in names
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3}
_PREFIX = re.compile(r"([-+]?)\s*(?:US)?([$\u20ac\u00a3\u00a5])\s*(?=[-+0-9.(\\])")
_SUFFIX = re.compile(
    r"(.*[0-9)}]|.*\\pi)\s*(?:(square|sq|cubic)\.?\s+)?"
    r"([%$\u20ac\u00a3\u00a5]|per cent|degrees? (?:C|F|Celsius|Fahrenheit)|[A-Za-z]+)"
    r"\.?(?:\^\{?([23])\}?)?(?:(?: per |/)([A-Za-z]+))?",
    re.DOTALL,
)


class Quantity(NamedTuple):
    """A text without its unit; "" and 1 where there is none."""

    number: str
    dimension: str = ""
    factor: Fraction = Fraction(1)


def quantity(text: str) -> Quantity:
    """Read "1.5 km" as 1.5 of the dimension "length" and the factor 1000, "$5" as 5 dollars."""
    if match := _PREFIX.match(text):
        return Quantity(match[1] + text[match.end() :], *_BY_NAME[match[2]])
    if match := _SUFFIX.fullmatch(text):
        number, word, name, power, per = match.groups()
        unit = _unit(name)
        divisor = _unit(per) if per else None
        is_angle = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", number)
        if unit and (divisor or not per) and not is_angle:
            dimension, factor = unit
            exponent = _POWERS.get(word) or int(power or 1)
            if exponent != 1:
                dimension, factor = f"{dimension}^{exponent}", factor**exponent
            if divisor:
                dimension, factor = f"{dimension}/{divisor[0]}", factor / divisor[1]
            return Quantity(number.rstrip(), dimension, factor)
    return Quantity(text)


def _unit(name: str) -> tuple[str, Fraction] | None:
    name = name.replace("per cent", "%")
    if name.startswith("degree") and " " in name:
        name = "celsius" if name.split()[1].startswith("C") else "fahrenheit"
    if len(name) == 1:
        return _BY_NAME.get(name)
    name = name.casefold()
    return _BY_NAME.get(name) or _BY_NAME.get(name.removesuffix("s"))
