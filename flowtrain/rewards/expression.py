"""The value of an expression in ASCII or simple LaTeX, by rational arithmetic of bounded size.

Numbers are `Fraction`s; irrational ones (roots, fractional powers) become floats. Letters, Greek
letters, pi and infinity are unknowns: two expressions are equal when they agree at a few odd points
(Schwartz and Zippel's test), so `(x+1)^2` is `x^2+2x+1` and 2\\pi is not 6.28. Lengths, nesting,
exponents and digits are bounded: no text takes long or raises anything but `Refused`.

(Hostile text keeps SymPy, under math-verify and latex2sympy2_extended, busy for hours in code that
no thread can stop, and its guard is SIGALRM, which works in main threads only.)
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from fractions import Fraction

NUM_POINTS = 3
"""Points at which unknowns are tried."""
MAX_LENGTH = 400
"""Characters of an expression."""
MAX_DEPTH = 40
"""Nested brackets, fractions, roots, signs and exponents."""
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
_UNKNOWN = re.compile(
    r"[A-Za-z].*|\\(?:alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|"
    r"zeta|eta|[tT]heta|iota|kappa|[lL]ambda|mu|nu|xi|rho|sigma|tau"
    r"|(?:var)?phi|Phi|chi|psi|[oO]mega|pi|infty)"
)


class Refused(Exception):
    """The text is no expression that this module reads."""


def values(text: str) -> list[Value]:
    """Return the value of an expression at `NUM_POINTS` fixed points; raises Refused."""
    tokens = _tokens(text)
    try:
        return [_bounded(_Reader(tokens, point).whole()) for point in range(NUM_POINTS)]
    except (ZeroDivisionError, OverflowError) as error:
        raise Refused(str(error)) from error


def value_below_zero(text: str) -> Value:
    """Return the value where all unknowns are negative; raises Refused, for real roots, too."""
    try:
        return _bounded(_Reader(_tokens(text), _BELOW_ZERO).whole())
    except (ZeroDivisionError, OverflowError) as error:
        raise Refused(str(error)) from error


def is_equal(one: Value, other: Value) -> bool:
    """Compare exactly where both are rational, else to nine digits."""
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


class _Reader:
    """Reads tokens by recursive descent and computes on the way, at one point."""

    def __init__(self, tokens: list[str], point: int) -> None:
        self._tokens = tokens
        self._point = point
        self._position = 0
        self._depth = 0

    def whole(self) -> Value:
        value = self._sum()
        if self._next:
            raise Refused(f"{self._next!r} is left over")
        return value

    @property
    def _next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._next
        if not token or (wanted and token not in wanted):
            raise Refused(f"{token!r} instead of {wanted}")
        self._position += 1
        return token

    def _sum(self) -> Value:
        value = self._product()
        while self._next in ("+", "-"):
            sign = self._take()
            term = self._product()
            value = _bounded(value + term if sign == "+" else value - term)
        return value

    def _product(self) -> Value:
        value = self._signed()
        while True:
            if self._next in ("*", "/"):
                sign = self._take()
                factor = self._signed()
            elif self._starts_factor():
                sign, factor = "*", self._power()
            else:
                return value
            value = _bounded(value * factor if sign == "*" else value / factor)

    def _starts_factor(self) -> bool:
        """Return whether a factor follows without a sign, as in 2x, 2(x+1), 2\\pi."""
        token = self._next
        return bool(token) and (token in ("(", "{") or token[0] == "\\" or token[0].isalpha())

    def _signed(self) -> Value:
        if self._next in ("+", "-"):
            sign = self._take()
            value = self._deeper(self._signed)
            return -value if sign == "-" else value
        return self._power()

    def _power(self) -> Value:
        base = self._atom()
        if self._next != "^":
            return base
        self._take()
        return _power(base, self._deeper(self._signed))

    def _atom(self) -> Value:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return Fraction(token)
        if _UNKNOWN.fullmatch(token):
            return _unknown(token, self._point)
        if token in ("(", "{"):
            return self._closed(")" if token == "(" else "}")
        if token == "\\frac":
            numerator = self._braced()
            return numerator / self._braced()
        if token == "\\sqrt":
            degree: Value = Fraction(2)
            if self._next == "[":
                self._take()
                degree = self._closed("]")
            return _power(self._braced(), 1 / degree)
        raise Refused(f"{token!r} is not known here")

    def _braced(self) -> Value:
        self._take("{")
        return self._closed("}")

    def _closed(self, bracket: str) -> Value:
        value = self._deeper(self._sum)
        self._take(bracket)
        return value

    def _deeper(self, read: Callable[[], Value]) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Refused("nested too deep")
        value = read()
        self._depth -= 1
        return value


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
