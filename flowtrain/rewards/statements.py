r"""Values, lists, named values ("x=2, y=3") and equations, which mathematical answers state.

Numbers are compared here, and all that math-verify reads in the sandbox, where this file is part of
the program. A name is never dropped where it tells
values apart, and of several equations each counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from flowtrain.rewards.units import quantity

MAX_PARTS = 50
"""Elements of a list."""
MAX_NESTED = 4
"""Lists within lists."""

NOUN = (
    "(?:answer|value|result|solution|sum|total|limit|product|difference|ratio|side|length|width|"
    "height|area|volume|perimeter|radius|probability|number|distance|speed|time|cost|price|average|"
    "mean|median|remainder|measure|angle|root|slope|maximum|minimum)s?"
)
_SYMBOL = (
    r"(?:(?:\\[A-Za-z]+|(?!not|non)[A-Za-z]{1,3}(?![A-Za-z]))(?:_(?:\{[^{}=]*\}|[A-Za-z0-9]))?'*)"
)
_OF_ANGLE = r"\\(?:sin|cos|tan|cot|sec|csc|angle|overline|vec|triangle|bar|hat|Delta)(?![A-Za-z])"
_NAME = re.compile(
    rf"(?:the )?{NOUN}"
    rf"|(?!\\(?:frac|sqrt|ln|log|exp|pi|infty)(?![A-Za-z])){_SYMBOL}(?:\^\{{-1\}})?\s*"
    rf"(?:\([^()=]*\))?"
    rf"|{_SYMBOL}(?:\s*[-+:/]\s*{_SYMBOL})+"
    rf"|{_OF_ANGLE}\s*(?:{_SYMBOL}|\{{[^{{}}=]*\}}|\([^()=]*\))"
    rf"|\|(?!\s*[a-z]\s*\|)[^|=]*[A-Za-z][^|=]*\||\\frac\{{{_SYMBOL}\}}\{{{_SYMBOL}\}}",
    re.IGNORECASE,
)
"""The left side of an equation that names what its right side is the value of."""
_BRACKET = re.compile(r"(?P<open>\\begin\{[a-z]+\*?\}|[(\[{])|\\end\{[a-z]+\*?\}|[)\]}]")
_CASES = re.compile(
    r"(?:\\\{\s*)?\\begin\{(cases|array|aligned|align|gathered)\}(?:\{[clr|]*\})?([^&]*)\\end\{\1\}"
)
_BEFORE_NAME = rf"(?<![-+*/=(<>,;:^_\s])\s+(?={_SYMBOL}(?:\s*\([^()=]*\))?\s*=)"
_ROWS = re.compile(r";|\\\\")
_CHOICES = r"(?:,\s*)?(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])"
_OUTER = re.compile(rf"{_ROWS.pattern}|{_CHOICES}")
_COMMAS = (
    r",\s*(?<![A-Za-z\\])and(?![A-Za-z])|,|(?<![A-Za-z\\])and(?![A-Za-z])"
    rf"|\\(?:land|wedge)(?![A-Za-z])|{_BEFORE_NAME}"
)
_BOTH, _EITHER = re.compile(r"\\(?:land|wedge)\b"), re.compile(r"\\(?:lor|vee)\b")
_INNER = re.compile(_COMMAS)
_ALL = re.compile(rf"(?:,\s*)?(?:{_OUTER.pattern})|{_COMMAS}")
_FUNCTION = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|angle|triangle|overline|vec|Delta|cdot|times)\Z"
)
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}")
_CELL = re.compile("&")
_ROW = re.compile(r"\\\\")
_EQUALS = re.compile(r"(?<![<>!:])=(?!=)")
_APPROX = re.compile(r"\\approx(?![A-Za-z])")
_NAMED = re.compile(rf"{_EQUALS.pattern}|{_APPROX.pattern}")
_HEDGE = re.compile(
    r"\A(?:approximately|approx\.?|about|roughly|around|exactly|\\approx(?![A-Za-z]))\s*", re.I
)
RANGE = re.compile(r"[<>]|\\(?:[lg]e|ne|in|cup|cap|setminus|mathbb|emptyset)(?![A-Za-z])")
"""Signs of inequalities and sets."""
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_RATIO = re.compile(r"([0-9]{1,9})\s*:\s*([0-9]{1,9})")
_CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9]")
_NUMBER = re.compile(
    r"([-+]?)\s*(?:\\frac\{(-?)([0-9]{1,400})\}\{([0-9]{1,400})\}"
    r"|([0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:\s*/\s*([0-9]{1,400}))?)"
)
_MIXED = re.compile(r"([-+]?)\s*\(([0-9]{1,9})\+([0-9]{1,9})/([0-9]{1,9})\)")
_SPACES = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])|(?<=[0-9])\s+(?=[0-9]{3}(?![0-9]))")


class Numbers:
    """Compares integers, decimals and fractions; of other values it notes that there were some."""

    has_others = False

    def is_equal(self, answer: str, gold: str, factor: Fraction) -> bool:
        """Return whether `factor` times the answer is the gold value."""
        value, gold_value = self._read(answer), self._read(gold)
        return value is not None and gold_value is not None and factor * value == gold_value

    def is_rounded(self, exact: str, rounded: str) -> bool:
        """Return whether a decimal number is the other value, rounded to its digits."""
        value, decimal = self._read(exact), self._read(rounded)
        return (
            value is not None and decimal is not None and abs(value - decimal) <= half_unit(rounded)
        )

    def is_same_equation(self, answer: Sequence[str], gold: Sequence[str]) -> bool:
        """Return whether one equation is a multiple of the other, given by their sides."""
        self.has_others = True
        return False

    def _read(self, text: str) -> Fraction | None:
        value = number(text)
        self.has_others |= value is None
        return value


def number(text: str) -> Fraction | None:
    r"""Read -1, 0.5, 1/2, \frac{1}{2} and (2+1/2), as 2 1/2 is written here."""
    if match := _MIXED.fullmatch(text):
        sign, whole, above, below = match.groups()
        if not int(below):
            return None
        value = int(whole) + Fraction(int(above), int(below))
    elif match := _NUMBER.fullmatch(text):
        sign, minus, above, below, decimal, divisor = match.groups()
        if not int(below or divisor or 1):
            return None
        value = Fraction(f"{minus}{above}/{below}") if above else Fraction(decimal)
        value /= int(divisor or 1)
    else:
        return None
    return -value if sign == "-" else value


def half_unit(text: str) -> Fraction:
    """Return half of the last digit's unit of a decimal number, and a bit for ties."""
    return Fraction(51, 100) / 10 ** len(text.partition(".")[2])


def is_same(answer: str, gold: str, reader: Numbers, depth: int = 0) -> bool:
    """Return whether two tidied texts state the same."""
    if squeezed(answer) == squeezed(gold):
        return True
    is_both, is_either = _BOTH.search(answer + " " + gold), _EITHER.search(answer + " " + gold)
    if depth > MAX_NESTED or (is_both and is_either):
        return False
    if RANGE.search(answer) or RANGE.search(gold):
        return reader.is_equal(answer, gold, Fraction(1))
    one, other = _List(answer), _List(gold)
    if len(one.parts) != len(other.parts) or len(one.parts) > MAX_PARTS:
        return False
    if len(one.parts) == 1 and not one.brackets and not other.brackets:
        return _is_same_statement(one.parts[0], other.parts[0], reader, depth)

    def same(part: str, gold_part: str) -> bool:
        return is_same(part, gold_part, reader, depth + 1)

    names, gold_names = one.names, other.names
    if all(names) and all(gold_names):
        return _is_same_each(one.parts, other.parts, same)
    if any(names) and any(gold_names):
        return False
    is_ordered = len({*names, *gold_names} - {""}) > 1
    if any(names) or any(gold_names):
        plain = other if any(names) else one
        if not (all(names) or all(gold_names)) or plain.brackets not in (
            ("", "()", "[]") if is_ordered else ("", "{}")
        ):
            return False
    else:
        kinds = {one.brackets, other.brackets}
        if len(kinds) == 2 and not ("" in kinds and kinds <= {"", "()", "[]", "{}"}):
            return False  # (0, 1] is not [0, 1]; bare "1, 2" may stand for either list
        is_ordered = not kinds <= {"", "{}"}
    if is_ordered:
        return all(map(same, one.parts, other.parts))
    return _is_same_each(one.parts, other.parts, same)


def _is_same_each(
    parts: Sequence[str], gold_parts: Sequence[str], same: Callable[[str, str], bool]
) -> bool:
    """Compare each element with some other one."""
    candidates = list(gold_parts)
    for part in parts:
        match = next((candidate for candidate in candidates if same(part, candidate)), None)
        if match is None:
            return False
        candidates.remove(match)
    return True


class _List:
    """The elements of a list or matrix, and its brackets, "" for none."""

    def __init__(self, text: str) -> None:
        self.brackets = ""
        if match := _CASES.fullmatch(text):
            text = match[2]
        if (match := _MATRIX.fullmatch(text)) and (rows := split(match[2], _ROW)):
            self.parts = [cell for row in rows for cell in split(row, _CELL)]
            self.brackets = f"matrix of {[len(split(row, _CELL)) for row in rows]}"
            return
        self.parts = list(_expanded(_elements(_THOUSANDS.sub(_without_commas, text))))
        if len(self.parts) == 1 and (enclosed := _bracketed(text)):
            brackets, inner = enclosed
            parts = list(_expanded(_elements(inner)))
            if len(parts) > 1 or brackets == "{}":
                self.brackets, self.parts = brackets, parts
        name, *values = _sides(self.parts[0])
        if len(values) == 1 and not any(len(split(part, _NAMED)) > 1 for part in self.parts[1:]):
            self.parts[1:] = [f"{name}={part}" for part in self.parts[1:]]  # x=2, 3

    @property
    def names(self) -> list[str]:
        """Return the names of the elements that are equations; "" for those that are none."""
        sides = (split(part, _NAMED) for part in self.parts)
        return [squeezed(equation[0]) if len(equation) > 1 else "" for equation in sides]


def _elements(text: str) -> list[str]:
    """Split a list, of rows ("1, 2; 3, 4") into rows."""
    for separator in (_OUTER, _ROWS):
        rows = split(text, separator)
        if len(rows) > 1 and any(len(split(row, _INNER)) > 1 for row in rows):
            if all(_EQUALS.search(row) for row in rows):
                return rows
            if separator is _ROWS:
                return [f"({row})" if len(split(row, _INNER)) > 1 else row for row in rows]
    return split(text, _ALL)


def _expanded(parts: Sequence[str]) -> Iterator[str]:
    r"""Write \pm 3 as 3 and -3, (p, q)=(3, 2) as p=3 and q=2."""
    for part in parts:
        sides = _sides(part)
        if part.count("\\pm") == 1:
            yield from (part.replace("\\pm", "+"), part.replace("\\pm", "-"))
        elif len(sides) == 2 and all(map(_bracketed, sides)):
            names, values = (_elements(side[1:-1]) for side in sides)
            if len(names) == len(values):
                yield from map("{}={}".format, names, values)
            else:
                yield part
        else:
            yield part


def _bracketed(text: str) -> tuple[str, str] | None:
    """Return the brackets around a whole text, and what is within."""
    opening = 2 if text.startswith("\\{") else 1
    closing = 2 if text.endswith("\\}") else 1
    brackets = (text[:opening] + text[-closing:]).replace("\\", "")
    inner = text[opening:-closing]
    if brackets not in ("()", "[]", "(]", "[)", "{}") or len(text) < 2 or not _is_balanced(inner):
        return None
    return brackets, inner.strip()


def _is_balanced(text: str) -> bool:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket["open"] else -1
        if depth < 0:
            return False
    return depth == 0


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split outside of brackets, or not at all where they do not match, as in "1, 2), (3, 4"."""
    if not _is_balanced(text):
        return [text]
    inside = []
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match["open"] else -1
        if depth == (1 if match["open"] else 0):
            inside.append(match.end() if match["open"] else match.start())
    spans = list(zip(inside[::2], inside[1::2], strict=True))
    pieces, start, place = [], 0, 0
    for match in separator.finditer(text):
        while place < len(spans) and spans[place][1] <= match.start():
            place += 1
        is_inside = place < len(spans) and spans[place][0] <= match.start()
        prefix = text[start : match.start()]
        is_blank = match[0].isspace() and (_FUNCTION.search(prefix) or "=" not in prefix)
        if not is_inside and not is_blank:
            pieces.append(prefix.strip())
            start = match.end()
    pieces.append(text[start:].strip())
    return pieces if separator in (_EQUALS, _NAMED) else list(filter(None, pieces)) or [text]


def _sides(text: str) -> list[str]:
    return split(text, _EQUALS)


def _is_same_statement(answer: str, gold: str, reader: Numbers, depth: int) -> bool:
    """Compare two values or equations."""

    def same(one: str, other: str) -> bool:
        return is_same(one, other, reader, depth + 1)

    answer, gold = _HEDGE.sub("", answer, count=1), _HEDGE.sub("", gold, count=1)
    rough, gold_rough = split(answer, _APPROX), split(gold, _APPROX)
    if len(gold_rough) > 1:
        # What is accepted is the rounded value; a name may stand before it.
        *names, value = [side for part in gold_rough for side in _sides(part)]
        *answer_names, answer_value = [side for part in rough for side in _sides(part)]
        is_named = len(answer_names) == len(names) and all(map(same, answer_names, names))
        return (not answer_names or is_named) and same(answer_value, value)
    if len(rough) > 1:
        exact, *rounded = rough
        values = [_sides(exact)[-1], *rounded]
        return any(same(exact if value is values[0] else value, gold) for value in values) and all(
            reader.is_rounded(one, other) for one, other in pairwise(map(_number, values))
        )
    sides, gold_sides = _sides(answer), _sides(gold)
    if len(sides) > 1 and len(gold_sides) > 1:
        return _is_same_equation(sides, gold_sides, reader, same)
    if len(gold_sides) > 1:
        return _is_name(gold_sides[0]) and same(answer, gold_sides[-1])
    if len(sides) > 1:
        *lefts, value = sides
        return same(value, gold) and all(
            _is_name(left)
            if place == 0 and _has_letters(left)
            else _has_letters(left) or same(left, gold)
            for place, left in enumerate(lefts)
        )
    return _is_same_value(answer, gold, reader)


def _is_same_equation(
    sides: Sequence[str],
    gold_sides: Sequence[str],
    reader: Numbers,
    same: Callable[[str, str], bool],
) -> bool:
    if len(sides) != len(gold_sides):
        return (
            len(gold_sides) == 2
            and squeezed(sides[0]) == squeezed(gold_sides[0])
            and (same("=".join(sides), gold_sides[1]))
        )
    if _is_same_each(sides, gold_sides, same):
        return True
    name, gold_name = squeezed(sides[0]), squeezed(gold_sides[0])
    is_solved = bool(re.fullmatch(r"[A-Za-z]|[A-Za-z]+", gold_sides[0]))
    if len(sides) > 2 or (is_solved and name != gold_name):
        return False
    return reader.is_same_equation(sides, gold_sides)


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text.strip()) is not None


def _has_letters(text: str) -> bool:
    return (
        re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+|(?<![A-Za-z])[ei](?![A-Za-z])", "", text))
        is not None
    )


def _is_same_value(answer: str, gold: str, reader: Numbers) -> bool:
    """Compare values, and units where both have one."""
    one, other = quantity(_plain(answer)), quantity(_plain(gold))
    if one.dimension and other.dimension and one.dimension != other.dimension:
        return False
    if "%" in (one.dimension, other.dimension) and one.dimension != other.dimension:
        # Beside 25 %, 0.25 is the same number; so is 25, which answers how many per cent.
        percent, plain = (one, other) if one.dimension == "%" else (other, one)
        share = reader.is_equal(percent.number, plain.number, Fraction(1, 100))
        value = number(plain.number)
        is_small = value is not None and -1 < value < 1
        return share or (not is_small and reader.is_equal(one.number, other.number, Fraction(1)))
    factor = one.factor / other.factor if one.dimension and other.dimension else Fraction(1)
    return reader.is_equal(one.number, other.number, factor)


def _number(text: str) -> str:
    return quantity(_plain(text)).number


def _plain(text: str) -> str:
    """Write 2:3 as 2/3, and 1,234 as 1234."""
    ratio = None if _CLOCK.fullmatch(text) else _RATIO.fullmatch(text)
    return f"{ratio[1]}/{ratio[2]}" if ratio else _THOUSANDS.sub(_without_commas, text).strip()


def _without_commas(match: re.Match[str]) -> str:
    return match[0].replace(",", "")


def squeezed(text: str) -> str:
    """Drop spaces, but not those between numbers: "10 000" is one, "1 2" are two; and case where
    words stand, not that of letters that may be unknowns.
    """
    text = _SPACES.sub("", text)
    return text.casefold() if re.search(r"(?<![A-Za-z\\])[A-Za-z]{3,}", text) else text
