"""Checker of the game of 24: an expression must be exactly 24 and use each given number once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from flowtrain.types import Task, UserError

TARGET = 24
MAX_LENGTH = 200
"""Characters of an expression; longer ones are refused unread."""
MAX_ANSWER = 2000
"""Characters at the end of an answer that are searched for its expression."""
MAX_NESTED_FRACTIONS = 3
MAX_BRACKETS = 20
"""Opening parentheses of an expression, which bounds how deep the parser nests."""

_UNICODE_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})
_OTHER_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u00b7\u22c5\u2217", "*"),
        **dict.fromkeys("\u2215\u2044", "/"),
        **dict.fromkeys("\u2013\u2014", "-"),
    }
)
_LATEX = (
    (re.compile(r"\\(?:left|right|displaystyle|boxed|text|[,;:! ])|[$*_`]{2,}|[$`]"), " "),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-z])"), "*"),
    (re.compile(r"\\div(?![a-z])"), "/"),
    (re.compile(r"(?<=[0-9)\]])\s*[xX]\s*(?=[0-9(\[])"), "*"),
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_BRACKETS = str.maketrans("[]{}", "()  ")
_STATEMENT = re.compile(r"[0-9+\-*/()=. ]+")
_RESULT = re.compile(rf"=\s*{TARGET}\Z")
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")


class _Refused(Exception):
    """The reason why an expression is not accepted."""


def gameof24(task: Task, answer: str) -> float:
    """Return 1.0 when the answer's last expression of the numbers in `task.answers` is right.

    Words, LaTeX and steps like "3 * 8 = 24" may surround it; a claimed result other than 24 makes
    it wrong. Raises UserError when `task.answers` are no numbers.
    """
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in task.answers):
        raise UserError(
            f"task {task.id!r}: scorer 'gameof24' needs the numbers of the puzzle as answers, not "
            f"{task.answers!r}"
        )
    numbers = [int(number) for number in task.answers]
    expressions = [found for found in _expressions(answer) if _has_numbers(found, numbers)]
    return float(bool(expressions) and check_expression(expressions[-1], numbers) is None)


def _expressions(answer: str) -> list[str]:
    """Return the sides of all equations in a text, in order, in ASCII.

    A side that is claimed to be other than 24 keeps the claim ("8 + 9 = 17").
    """
    text = answer[-MAX_ANSWER:].translate(_UNICODE_SIGNS).translate(_OTHER_SIGNS)
    for pattern, sign in _LATEX:
        text = pattern.sub(sign, text)
    for _ in range(MAX_NESTED_FRACTIONS):
        text = _FRACTION.sub(r"((\1)/(\2))", text)
    text = re.sub(r"\.(?![0-9])", ";", text.translate(_BRACKETS))
    found = []
    for statement in _STATEMENT.findall(text):
        *sides, result = statement.split("=")
        is_other = result.strip().isdigit() and int(result) != TARGET
        found += [
            _balanced(side) + (f" = {result}" if is_other else "") for side in (*sides, result)
        ]
    return found


def _balanced(side: str) -> str:
    """Strip parentheses of the surrounding text: "(4 * 6 = 24)" has the side "(4 * 6 "."""
    side = side.strip()
    surplus = side.count("(") - side.count(")")
    return side[max(surplus, 0) :] if surplus >= 0 else side[:surplus]


def _has_numbers(expression: str, numbers: Sequence[int]) -> bool:
    side = expression.partition("=")[0]
    found = re.findall("[0-9]+", side)
    return (
        len(found) == len(numbers)
        and Counter(map(int, found)) == Counter(numbers)
        and any(sign in side for sign in "+-*/")
    )


def check_expression(expression: str, numbers: Sequence[int]) -> str | None:
    """Return None for a right expression, else the reason, e.g. "uses 5 which was not given".

    Right means: integers joined by + - * / and parentheses (or the Unicode signs for times, divide
    and minus), "= 24" at the end or not, no sign before a single number, each of `numbers` used
    exactly once, and a value of exactly 24. Safe for any text.
    """
    try:
        text = _plain(expression)
        _check_numbers(text, numbers)
        value = _value(_parse(text, len(numbers)))
    except _Refused as refused:
        return str(refused)
    return None if value == TARGET else f"makes {value}, not {TARGET}"


def _plain(expression: str) -> str:
    """Return the expression in ASCII, without the result."""
    if len(expression) > MAX_LENGTH:
        raise _Refused(f"is longer than {MAX_LENGTH} characters")
    text = _RESULT.sub("", expression.strip().translate(_UNICODE_SIGNS))
    if not _ALLOWED.fullmatch(text):
        raise _Refused("must consist of whole numbers, + - * / and parentheses")
    return text


def _check_numbers(text: str, numbers: Sequence[int]) -> None:
    used = Counter(map(int, re.findall("[0-9]+", text)))
    given = Counter(numbers)
    for number, times in used.items():
        if number not in given:
            raise _Refused(f"uses {number} which was not given")
        if times > given[number]:
            raise _Refused(f"uses {number} {times} times, it was given {given[number]} times")
    if used != given:
        raise _Refused(f"does not use all of the numbers {', '.join(map(str, numbers))}")


def _parse(text: str, num_numbers: int) -> ast.expr:
    # Few brackets and few operators leave the parser nothing to recurse into deeply.
    if text.count("(") > MAX_BRACKETS:
        raise _Refused(f"has more than {MAX_BRACKETS} opening parentheses")
    if len(re.findall(r"[-+*/]", text)) != num_numbers - 1:
        raise _Refused(
            f"must join its {num_numbers} numbers by {num_numbers - 1} operators, with no sign "
            "before a number"
        )
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise _Refused("is not a complete expression") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left) - _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
        case ast.BinOp(left, ast.Div(), right):
            return _quotient(_value(left), _value(right))
    raise _Refused("must consist of numbers joined by + - * / and parentheses")


def _quotient(dividend: Fraction, divisor: Fraction) -> Fraction:
    if divisor == 0:
        raise _Refused("divides by zero")
    return dividend / divisor
