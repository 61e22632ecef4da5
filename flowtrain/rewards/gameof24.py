"""The game of 24: is an expression exactly 24, with each given number used once?"""

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
MAX_BRACKETS = 20
"""Opening parentheses of an expression, which bounds how deep the parser nests."""

_UNICODE_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})
_RESULT = re.compile(rf"=\s*{TARGET}\Z")
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")


class _Refused(Exception):
    """Why an expression is not accepted."""


def gameof24(task: Task, answer: str) -> float:
    """1.0 when the answer is a right expression over the numbers in `task.answers`, else 0.0; UserError when those are no numbers."""
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in task.answers):
        raise UserError(f"task {task.id!r}: scorer 'gameof24' needs the numbers of the puzzle as answers, not {task.answers!r}")
    return float(check_expression(answer, [int(number) for number in task.answers]) is None)


def check_expression(expression: str, numbers: Sequence[int]) -> str | None:
    """None when the expression is right, else the reason, e.g. "uses 5 which was not given".

    Right means: integers joined by + - * / and parentheses (or the Unicode signs for times, divide and minus), "= 24" at the end
    or not, no sign before a single number, each of `numbers` used exactly once, and a value of exactly 24. Safe for any text.
    """
    try:
        text = _plain(expression)
        _check_numbers(text, numbers)
        value = _value(_parse(text, len(numbers)))
    except _Refused as refused:
        return str(refused)
    return None if value == TARGET else f"makes {value}, not {TARGET}"


def _plain(expression: str) -> str:
    """The expression in ASCII, without the result."""
    if len(expression) > MAX_LENGTH:
        raise _Refused(f"is longer than {MAX_LENGTH} characters")
    text = _RESULT.sub("", expression.strip().translate(_UNICODE_SIGNS))
    if not _ALLOWED.fullmatch(text):
        raise _Refused("must consist of whole numbers, + - * / and parentheses")
    return text


def _check_numbers(text: str, numbers: Sequence[int]) -> None:
    used, given = Counter(map(int, re.findall("[0-9]+", text))), Counter(numbers)
    for number, times in used.items():
        if number not in given:
            raise _Refused(f"uses {number} which was not given")
        if times > given[number]:
            raise _Refused(f"uses {number} {times} times, it was given {given[number]} times")
    if used != given:
        raise _Refused(f"does not use all of the numbers {', '.join(map(str, numbers))}")


def _parse(text: str, num_numbers: int) -> ast.expr:
    # Before the parser sees it: few brackets and few operators leave it nothing to recurse into deeply.
    if text.count("(") > MAX_BRACKETS:
        raise _Refused(f"has more than {MAX_BRACKETS} opening parentheses")
    if len(re.findall(r"[-+*/]", text)) != num_numbers - 1:
        raise _Refused(f"must join its {num_numbers} numbers by {num_numbers - 1} operators, with no sign before a number")
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
