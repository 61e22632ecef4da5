"""Checker of the game of 24: an expression must be exactly 24 and use each given number once."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from fractions import Fraction

from flowtrain.records import Task, UserError
from flowtrain.rewards.latex import SIGNS

TARGET = 24
MAX_ANSWER = 2000
"""Characters at the end of an answer that are searched for its expression."""
MAX_NESTED_FRACTIONS = 3
MAX_EXPRESSION = 400
"""Characters of an expression."""

_LATEX = (
    (re.compile(r"\\(?:left|right|displaystyle|boxed|text|[,;:! ])|[$*_`]{2,}|[$`]"), " "),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-z])"), "*"),
    (re.compile(r"\\div(?![a-z])"), "/"),
    (re.compile(r"(?<=[0-9)\]])\s*[xX]\s*(?=[0-9(\[])"), "*"),
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_BRACKETS = str.maketrans("[]{}", "()  ")
_STATEMENT = re.compile(r"[0-9+\-*/()=. ]+")
_REFUSED = re.compile(r"[^0-9+\-*/() ]|[0-9)]\s*\(|\)\s*[0-9]|(?<![0-9])0[0-9]")
"""Other characters, products without a sign, and numbers that begin with 0."""


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
    expressions = [
        expression for expression in _expressions(answer) if _has_numbers(expression, numbers)
    ]
    return float(bool(expressions) and is_right(expressions[-1], numbers))


def _expressions(answer: str) -> list[str]:
    """Return the sides of all equations in a text, in order, in ASCII.

    A side that is claimed to be other than 24 keeps the claim ("8 + 9 = 17").
    """
    text = answer[-MAX_ANSWER:].translate(SIGNS)
    for pattern, sign in _LATEX:
        text = pattern.sub(sign, text)
    for _ in range(MAX_NESTED_FRACTIONS):
        text = _FRACTION.sub(r"((\1)/(\2))", text)
    text = re.sub(r"\.(?![0-9])", ";", text.translate(_BRACKETS))
    expressions = []
    for statement in _STATEMENT.findall(text):
        *sides, result = statement.split("=")
        is_other = result.strip().isdigit() and int(result) != TARGET
        expressions += [
            _balanced(side) + (f" = {result}" if is_other else "") for side in (*sides, result)
        ]
    return expressions


def _balanced(side: str) -> str:
    """Strip parentheses of the surrounding text: "(4 * 6 = 24)" has the side "(4 * 6 "."""
    side = side.strip()
    surplus = side.count("(") - side.count(")")
    return side[max(surplus, 0) :] if surplus >= 0 else side[:surplus]


def _has_numbers(expression: str, numbers: Sequence[int]) -> bool:
    side = expression.partition("=")[0]
    digits = re.findall("[0-9]+", side)
    return (
        len(digits) == len(numbers)
        and sorted(map(int, digits)) == sorted(numbers)
        and any(sign in side for sign in "+-*/")
    )


def is_right(expression: str, numbers: Sequence[int]) -> bool:
    """Return whether an expression makes exactly 24 of the numbers, each used once.

    The expression joins them by + - * / and parentheses, without unary signs. Safe for any text.
    """
    num_signs = len(re.findall(r"[-+*/]", expression))
    if (
        len(expression) > MAX_EXPRESSION
        or num_signs != len(numbers) - 1
        or _REFUSED.search(expression)
        or not _has_numbers(expression, numbers)
    ):
        return False
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body) == TARGET
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return False


def _value(node: ast.expr) -> Fraction:
    """Compute integers joined by + - * and /, exactly."""
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left) - _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
        case ast.BinOp(left, ast.Div(), right):
            return _value(left) / _value(right)
    raise SyntaxError("not known here")
