"""Compare mathematical answers by value: numbers, expressions, equations, lists, intervals."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowtrain.rewards.expression import Refused, Value, is_equal, values
from flowtrain.rewards.latex import tidy
from flowtrain.rewards.numerals import in_digits
from flowtrain.rewards.units import is_unit, quantity, unit_name
from flowtrain.types import Task

MAX_LENGTH = 1000
"""Characters of an answer, or of its box; longer ones are wrong."""
MAX_PARTS = 50
"""Elements of a list."""
MAX_NESTED = 4
"""Lists within lists."""

_NOUN = (
    "(?:answer|value|result|solution|sum|total|limit|product|difference|ratio|side|length|width|"
    "height|area|volume|perimeter|radius|probability|number|distance|speed|time|cost|price|average|"
    "mean|median|remainder|measure|angle|root|slope|maximum|minimum)s?"
)
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:it|they|there|[a-z]|(?:(?:the|our|my|its) )?"
    rf"(?:final |correct )?{_NOUN}"
    r"(?: (?:of|to|for)(?: (?!wrong|not|incorrect)[\w\\^(){}]+){1,4})?)"
    r"(?: (?:is|are|equals|is equal to)(?: equal to)?:? |: ?)",
    re.IGNORECASE,
)
"""What may stand before a value; in any other sentence ("I doubt that it is 5") nothing is read."""
_SIDE = re.compile(
    rf"(?i:(?:the )?{_NOUN})"
    r"|(?:[^A-Za-z]|(?<![A-Za-z])(?:[A-Z]{1,2}|[a-z])(?![A-Za-z])|\\[A-Za-z]+)*"
)
"""What may stand on the other side of a value's sign of equality."""
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_NAME = re.compile(r"\s*(?:\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?(?:\s*\([A-Za-z, ]*\))?)\s*")
_COUNTED = re.compile(r"(.*[0-9)}]) ([A-Za-z]{3,})")
_AFTER_UNIT = re.compile(r"(?<=[A-Za-z]{2}) (?:from [A-Z]|long|wide|tall|high|deep|old|apart)$")
_GLUED_UNIT = re.compile(
    r"(?<=[0-9])(mm|cm|km|kg|mg|ml|mph|km/h|m/s|kWh|deg|am|pm)(?=(?:\^\{?[0-9]\}?)?$)"
)
_HEDGE = re.compile(
    r"^(?:(?:approximately|approx\.?|about|roughly|around|exactly)\s+|\\approx\s*|\u2248\s*)",
    re.IGNORECASE,
)
_MINUS = re.compile(r"^(?:minus|negative) (?=[0-9\\])", re.IGNORECASE)
_RATIO = re.compile(r"([0-9]{1,9})\s*:\s*([0-9]{1,9})")
_CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9]")
_SPACES = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])|(?<=[0-9])\s+(?=[0-9]{3}(?![0-9]))")
_NONE = re.compile(
    r"(?:there (?:is|are) )?no solutions?|(?:the )?empty set|\\(?:emptyset|varnothing)|\u2205"
    r"|\\\{\s*\\\}",
    re.IGNORECASE,
)


def math_match(task: Task, answer: str) -> float:
    """Return 1.0 when the answer has the value of an accepted one, else 0.0.

    A text that is no expression must be the same text.
    """
    texts = readings(answer)
    return float(
        any(
            _same(text, wanted)
            or _same(_uncounted(text, task.question), wanted)
            or _same(text, _uncounted(wanted, task.question))
            or _same(_plain(text), _plain(wanted))
            or _is_same_sum(_plain(text), _plain(wanted))
            for wanted in map(tidy, task.answers)
            for text in texts
        )
    )


def readings(answer: str) -> list[str]:
    """Return the tidied answer, and what its last sentence says that it is."""
    text = tidy(answer)
    if not text or len(text) > MAX_LENGTH:
        return []
    found = [text]
    for part in (text, tidy(re.split(r"\n(?![a-z])", answer.strip())[-1])):
        last = re.split(r"(?<=[.!?])\s+", part)[-1]
        if lead := _LEAD.match(last):
            found.append(last[lead.end() :].strip())
    return found


def right_side(text: str) -> str:
    """Return what follows the last sign of equality; "" where words stand before it."""
    *left, right = text.split("=")
    return right.strip() if all(_SIDE.fullmatch(side.strip()) for side in left) else ""


def _uncounted(text: str, question: str) -> str:
    """Return 17 of "17 apples" where the question speaks of apples."""
    found = _COUNTED.fullmatch(text)
    is_asked = found and re.search(rf"\b{re.escape(found[2])}\b", question, re.IGNORECASE)
    return found[1] if found and is_asked else text


def _is_same_sum(given: str, wanted: str) -> bool:
    """Return whether both are the same measure, as 1 h 30 min and 90 min."""
    measured = quantity(given)
    return measured is not None and measured == quantity(wanted)


def _plain(text: str) -> str:
    """Write numbers in digits, ratios as fractions and what says "no solution" in one way."""
    if len(text) > MAX_LENGTH:
        return text
    text = _MINUS.sub("-", in_digits(_HEDGE.sub("", text.strip())))
    if _NONE.fullmatch(text):
        return "\\emptyset"
    ratio = None if _CLOCK.fullmatch(text) else _RATIO.fullmatch(text)
    return f"{ratio[1]}/{ratio[2]}" if ratio else text


def _same(given: str, wanted: str, depth: int = 0) -> bool:
    if _squeezed(given) == _squeezed(wanted):
        return True
    one = _parts(given)
    other = _parts(wanted)
    if one is None or other is None:
        return one is other and _same_leaf(given, wanted)
    (brackets, given_parts), (wanted_brackets, wanted_parts) = one, other
    if len(given_parts) != len(wanted_parts) or len(given_parts) > MAX_PARTS or depth > MAX_NESTED:
        return False
    kinds = {brackets, wanted_brackets}
    if len(kinds) == 2 and ("" not in kinds or "\\cup" in kinds):
        return False  # (0, 1] is not [0, 1]; bare "1, 2" may stand for either list
    is_ordered = not kinds <= {"", "{}"}
    return _same_parts(given_parts, wanted_parts, is_ordered, depth + 1)


def _same_parts(given: Sequence[str], wanted: Sequence[str], is_ordered: bool, depth: int) -> bool:
    """Compare element by element, or each with some other element."""
    if is_ordered:
        return all(_same(part, other, depth) for part, other in zip(given, wanted, strict=True))
    left = list(wanted)
    for part in given:
        match = next((other for other in left if _same(part, other, depth)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Split a list into its brackets, "" for none, and elements; None for a text that is no list.

    "(1, 2]" gives ("(]", ["1", "2"]).
    """
    if len(pieces := _split(text, "\\cup")) > 1:
        return "\\cup", pieces
    if "\\pm" in text and text.count("\\pm") == 1:
        return "", [text.replace("\\pm", "+"), text.replace("\\pm", "-")]
    inner, brackets = text, ""
    if text.startswith("\\{") and text.endswith("\\}"):
        inner, brackets = text[2:-2], "{}"
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inner, brackets = text[1:-1], text[0] + text[-1]
    if not brackets:
        inner = re.sub(r",?\s(?:and|or)\s", ", ", _without_thousands(text))
    pieces = _split(inner, ",")
    return (brackets, pieces) if len(pieces) > 1 or brackets == "{}" else None


def _split(text: str, separator: str) -> list[str]:
    """Split outside of brackets, or not at all where they do not match, as in "1, 2), (3, 4"."""
    pieces = []
    depth = start = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return [text]
        if depth == 0 and text.startswith(separator, index):
            pieces.append(text[start:index].strip())
            start = index + len(separator)
    return [*pieces, text[start:].strip()]


def _same_leaf(given: str, wanted: str) -> bool:
    """Compare two numbers, expressions or equations."""
    *given_left, given_right = given.split("=")
    *wanted_left, wanted_right = wanted.split("=")
    try:
        if len(given_left) == len(wanted_left) == 1:
            one = _difference(given_left[0], given_right)
            other = _difference(wanted_left[0], wanted_right)
            return _equal(one, other) or _equal(one, [-value for value in other])
        if wanted_left and not _NAME.fullmatch(wanted_left[0]):
            return False
        return _same_quantity(right_side(given), wanted_right)
    except Refused:
        return False


def _difference(left: str, right: str) -> list[Value]:
    return [a - b for a, b in zip(values(left), values(right), strict=True)]


def _equal(one: Sequence[Value], other: Sequence[Value]) -> bool:
    return all(map(is_equal, one, other))


def _same_quantity(given: str, wanted: str) -> bool:
    """Compare values, and units where both have one."""
    (one, unit), (other, wanted_unit) = _quantity(given), _quantity(wanted)
    if unit and wanted_unit and unit != wanted_unit:
        return False
    if unit == wanted_unit or "%" not in (unit, wanted_unit):
        return _equal(one, other)
    if wanted_unit == "%":
        one, other = other, one
    # Beside 25 %, 0.25 is the same number; so is 25, which answers how many per cent.
    return _equal([value / 100 for value in one], other) or (
        not -1 < other[0] < 1 and _equal(one, other)
    )


def _quantity(text: str) -> tuple[list[Value], str]:
    """Read values and unit: "$1,200.50" is 1200.5 "$", "30 degrees" is 30 "degree"."""
    text = _without_thousands(_AFTER_UNIT.sub("", text.strip()))
    for sign in "$\u20ac\u00a3":
        if text.lstrip("+- ").startswith(sign):
            return values(text.replace(sign, "", 1)), sign
    if text.endswith(("%", "percent", "per cent")):
        return values(re.sub(r"\s*(?:%|percent|per cent)$", "", text)), "%"
    words = _GLUED_UNIT.sub(r" \1", text).split()
    num_units = 0
    while num_units < len(words) - 1 and is_unit(words[-1 - num_units]):
        num_units += 1
    number, units = words[: len(words) - num_units], words[len(words) - num_units :]
    if not num_units or not re.search(r"[0-9]|\\pi|\\sqrt", " ".join(number)):
        return values(text), ""
    return values(" ".join(number)), " ".join(filter(None, map(unit_name, units)))


def _without_thousands(text: str) -> str:
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def _squeezed(text: str) -> str:
    """Drop case and spaces, but not those between numbers: "10 000" is one, "1 2" are two."""
    return _SPACES.sub("", text).casefold()
