"""The value of an expression in ASCII or simple LaTeX, by rational arithmetic of bounded size.

Numbers are `Fraction`s; irrational ones (roots, fractional powers) become floats. Letters, Greek
letters, pi and infinity are unknowns: two expressions are equal when they agree at a few odd points
(Schwartz and Zippel's test), so `(x+1)^2` is `x^2+2x+1` and 2\\pi is not 6.28. Lengths, nesting,
exponents and digits are bounded: no text takes long or raises anything but `Refused`.

(Hostile text keeps SymPy, under math-verify and latex2sympy2_extended, busy for hours in code that
no thread can stop, and its guard is SIGALRM, which works in main threads only.)
"""

from __future__ import annotations

import ast
import hashlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

NUM_POINTS = 3
"""Points at which unknowns are tried."""
MAX_LENGTH = 400
"""Characters of an expression."""
MAX_BITS = 20_000
"""Bits of the numerator and the denominator of any intermediate value."""

Value = Fraction | float

_BELOW_ZERO = NUM_POINTS
_CONSTANTS = ("e", "\\pi", "\\infty")

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?(?![0-9._]))"
    r"|(?P<command>\\[A-Za-z]+)|(?P<symbol>[A-Za-z](?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]{1,8}\}))?)"
    r"|(?P<sign>[-+*/^(){}\[\]]))\s*"
)
_WORD = re.compile(
    r"(?<![A-Za-z\\])(?:[A-Za-z]{3,}|ln|lg|no|on|or|if|to|is|of|as|at|by|in)(?![A-Za-z])"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SIGNS = {"\\cdot": "*", "\\times": "*", "\\div": "/"}
_NUMBER = re.compile(r"[0-9.]")
_OPERATORS = {**{sign: f" {sign} " for sign in "+-*/"}, "^": " ** "}
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_NUM_GROUPS = {"\\frac": 2, "\\sqrt": 1}
_ARITHMETIC: dict[type, Callable[[Any, Any], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNKNOWN = re.compile(
    r"[A-Za-z].*|\\(?:alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|"
    r"zeta|eta|[tT]heta|iota|kappa|[lL]ambda|mu|nu|xi|rho|sigma|tau"
    r"|(?:var)?phi|Phi|chi|psi|[oO]mega|pi|infty)"
)


class Refused(Exception):
    """The text is no expression that this module reads."""


def values(text: str) -> list[Value]:
    """Return the value of an expression at `NUM_POINTS` fixed points, and where all unknowns are
    negative, NaN for none, as of real roots. Raises Refused.
    """
    source, names = _as_python(_tokens(text))
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        found = [_value(tree, names, point) for point in range(NUM_POINTS)]
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise Refused(str(error)) from error
    try:
        return [*found, _value(tree, names, _BELOW_ZERO)]
    except (Refused, ArithmeticError):
        return [*found, math.nan]


def is_equal(one: Value, other: Value) -> bool:
    """Compare exactly where both are rational, else to nine digits; NaN equals all."""
    if one != one or other != other:
        return True
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    return math.isclose(_float(one), _float(other), rel_tol=1e-9, abs_tol=1e-12)


def _float(value: Value) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_LENGTH:
        raise Refused("too long")
    if _WORD.search(_COMMAND.sub(" ", text)) or re.fullmatch(r"\s*[A-Za-z]{2,}\s*", text):
        raise Refused("words")
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise Refused(f"at {position}")
        token = match[0].strip()
        tokens.append(_SIGNS.get(token, token))
        position = match.end()
    if "\\infty" in tokens and (len(tokens) > 2 or tokens[0] not in ("+", "-", "\\infty")):
        raise Refused("nobody computes with infinity")
    return tokens


def _as_python(tokens: Iterable[str]) -> tuple[str, dict[str, str]]:
    r"""Write tokens as Python, with signs of products and names for numbers and unknowns.

    \frac{1}{2} becomes frac(a)(b), \sqrt[3]{8} becomes sqrt[a](b). Raises Refused.
    """
    source = ""
    names: dict[str, str] = {}
    opened: list[tuple[str, int]] = []  # closing brackets, and how many groups follow them
    num_wanted = 0  # groups that the command before still wants
    for token in tokens:
        ends_value = source[-1:].isdigit() or source[-1:] == ")"
        is_command = token in ("\\frac", "\\sqrt")
        if num_wanted and token != "{" and (token != "[" or not source.endswith("sqrt")):
            raise Refused(f"{token!r} instead of a group")
        if token in _OPERATORS:
            source += _OPERATORS[token]
        elif token in _CLOSING:
            follows = max(num_wanted - (token == "{"), 0)
            source += ("*" if ends_value and not num_wanted else "") + token.replace("{", "(")
            opened.append((_CLOSING[token], follows))
            num_wanted = 0
        elif opened and token == opened[-1][0]:
            num_wanted = opened.pop()[1]
            source += token.replace("}", ")")
        elif is_command or _UNKNOWN.fullmatch(token) or (_NUMBER.match(token) and not ends_value):
            name = token[1:] if is_command else f"x{len(names)}"
            names |= {} if is_command else {name: token}
            source += ("*" if ends_value else "") + name
            num_wanted = _NUM_GROUPS.get(token, 0)
        else:
            raise Refused(f"{token!r} is not known here")
    if num_wanted or opened:
        raise Refused("a group is missing")
    return source, names


def _value(node: ast.expr, names: Mapping[str, str], point: int) -> Value:
    """Compute an expression; `names` are the tokens of its names."""

    def value(inner: ast.expr) -> Value:
        return _value(inner, names, point)

    match node:
        case ast.Name(name) if name in names:
            token = names[name]
            found: Value = _unknown(token, point) if _UNKNOWN.fullmatch(token) else Fraction(token)
        case ast.UnaryOp(ast.USub(), inner):
            found = -value(inner)
        case ast.UnaryOp(ast.UAdd(), inner):
            found = value(inner)
        case ast.BinOp(left, ast.Pow(), right):
            found = _power(value(left), value(right))
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            found = _ARITHMETIC[type(op)](value(left), value(right))
        case ast.Call(ast.Call(ast.Name("frac"), [above]), [below]):
            found = value(above) / value(below)
        case ast.Call(ast.Name("sqrt"), [inner]):
            found = _power(value(inner), Fraction(1, 2))
        case ast.Call(ast.Subscript(ast.Name("sqrt"), degree), [inner]):
            found = _power(value(inner), 1 / value(degree))
        case _:
            raise Refused("not known here")
    return _bounded(found)


def _unknown(name: str, point: int) -> Fraction:
    """Return the value of an unknown at a point: a fraction that its name decides, of 2 to 30, or
    its negative.
    """
    digest = hashlib.sha256(f"{name}/{point}".encode()).digest()
    size = 2 + Fraction(int.from_bytes(digest[:4], "big") % 1009, 37)
    return -size if point == _BELOW_ZERO and name not in _CONSTANTS else size


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            if _num_bits(base) * abs(exponent) > MAX_BITS:
                raise Refused("too large")
            return Fraction(base ** int(exponent))
        if exponent.denominator == 2 and base >= 0:
            return _power(_square_root(base), Fraction(exponent.numerator))
        if base < 0 and exponent.denominator % 2:  # the odd root of a negative number
            return -_power(-base, exponent) if exponent.numerator % 2 else _power(-base, exponent)
    if base < 0:
        raise Refused("root of a negative number")
    return float(base) ** float(exponent)


def _square_root(number: Fraction) -> Value:
    """Return the root, exact where it is rational."""
    root = Fraction(math.isqrt(number.numerator), math.isqrt(number.denominator))
    return root if root * root == number else math.sqrt(number)


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if _num_bits(value) > MAX_BITS:
            raise Refused("too large")
    elif not math.isfinite(value):
        raise Refused("not finite")
    return value


def _num_bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())
