"""Compares mathematical texts by math-verify; a text that `symbolic.py` runs in the sandbox.

math-verify is generous: it rounds, takes an open interval for a pair and calls all equations
without a solution the same. So decimals become fractions first, and only objects of one kind are
compared.
"""

from __future__ import annotations

import json
import re
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import verify
from math_verify.grader import should_treat_as_complex

DECIMAL = re.compile(r"(?<![0-9.,])([0-9]*)\.([0-9]+)(?![0-9.])")
RANGE = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]t|in)(?![A-Za-z])")
MEMBER = re.compile(r"([A-Za-z])\s*\\in(?![A-Za-z])(.*)")
DIGITS = 50
"""Digits to which irrational numbers agree."""


def same(cases: list[list[list[str]]]) -> str:
    """Return for each case whether the texts of any of its pairs have one value, as JSON."""
    return json.dumps([any(is_same(given, wanted) for given, wanted in pairs) for pairs in cases])


def is_same(given: str, wanted: str) -> bool:
    """Compare two texts; False for what is not understood."""
    try:
        if RANGE.search(given) or RANGE.search(wanted):
            return is_same_range(given, wanted)
        one, other = read(given), read(wanted)
        if kind(one) != kind(other) or not kind(one):
            return False
        if isinstance(one, sympy.Expr) and differ(one, other):
            return False
        return bool(
            verify(
                other, one, float_rounding=DIGITS, numeric_precision=DIGITS, timeout_seconds=None
            )
        )
    # The parser and SymPy may raise anything on a hostile answer.
    except Exception:  # noqa: BLE001
        return False


def is_same_range(given: str, wanted: str) -> bool:
    """Compare inequalities with each other and with intervals.

    Where (1, 2) is accepted it may be a point, which 1 < x < 2 is not.
    """
    (name, one), (wanted_name, other) = read_range(given), read_range(wanted)
    is_point = not wanted_name and re.fullmatch(r"\((?!.*\\infty).*\)", wanted)
    return not is_point and one == other and (name == wanted_name or not name or not wanted_name)


def read_range(text: str) -> tuple[str, sympy.Set]:
    r"""Read "1 < x \le 2", several with "or", and "x \in (1, 2]" as the unknown and a set; an
    interval alone has no unknown.
    """
    text = text.replace(",", ", ")  # "0,0.5" has no number with thousands
    member = MEMBER.fullmatch(text)
    if member or not RANGE.search(text):
        name, found = (member[1], read(member[2])) if member else ("", read(text))
    else:
        pieces = [read(piece) for piece in re.split(r" or |\\lor(?![A-Za-z])", text)]
        (name,) = {str(unknown) for piece in pieces for unknown in piece.free_symbols}
        found = sympy.Union(*(piece.as_set() for piece in pieces))
    if not isinstance(found, sympy.Set):
        raise TypeError(f"{text!r} is no range")
    return name, found


def differ(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Return whether two expressions differ at a point; cheaper than to fail to simplify them."""
    unknowns = sorted(one.free_symbols | other.free_symbols, key=str)
    point = {each: sympy.Rational(17 + 6 * place, 7) for place, each in enumerate(unknowns)}
    difference = (one - other).subs(point).doit().evalf(20)
    return bool(difference.is_number and abs(difference) > 1e-6)


def read(text: str) -> Any:
    """Parse LaTeX, with decimals as fractions and degrees as multiples of pi."""
    exact = DECIMAL.sub(
        lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text
    )
    exact = re.sub(r"(\d)\s*degrees?\b", r"\1 \\cdot \\frac{\\pi}{180} ", exact)
    exact = exact.replace("\\varnothing", "\\emptyset").replace("\\dbinom", "\\binom")
    value = latex2sympy(
        exact, is_real=not should_treat_as_complex(exact), normalization_config=None
    )
    if "\\sum" in exact or "\\prod" in exact or not isinstance(value, sympy.Expr):
        return value
    return value.subs({each: sympy.I for each in value.free_symbols if each.name == "i"})


def kind(value: Any) -> str:
    """Name the kind of a value; "" for what is not compared."""
    if isinstance(value, sympy.MatrixBase):
        return "matrix"
    if isinstance(value, sympy.FiniteSet | sympy.Tuple):
        kinds = [kind(each) for each in value.args]
        return f"{type(value).__name__} of {len(kinds)}" if all(kinds) else ""
    if isinstance(value, sympy.Set):
        return "set"
    if isinstance(value, sympy.Symbol) or not isinstance(value, sympy.Expr):
        return ""
    return "" if value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.Float) else "number"
