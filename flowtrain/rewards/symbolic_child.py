"""Compares values in mathematical texts; a program that `symbolic.py` runs in the sandbox.

math-verify's grammar reads them. The grammar is lenient: an open interval passes for a pair, text
after a sign of approximation is dropped, and numbers compare with an absolute tolerance. So only
known notation is read, to its end, and values are compared at points, to many digits of the
smallest term: e^{-200} is not 0.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from flowtrain.rewards.statements import RANGE, Numbers, half_unit, is_same, number

NUM_POINTS = 4
"""Points at which two expressions must agree."""
DIGITS = 30
"""Digits of the smallest term to which they must, beside those of their numbers."""
MAX_DIGITS = 3000
"""Digits in which they are computed, if need be."""

_COMMANDS = (
    "frac sqrt cdot times div pi infty sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan "
    "log ln exp binom lfloor rfloor lceil rceil begin end vert lvert rvert sum prod lim int to "
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega Gamma Delta Theta Lambda Phi Psi Sigma"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_OTHERS = re.compile(
    r"[^0-9A-Za-z\\{}()\[\]+\-*/^_.!|&= ]|(?<!\\)\\[^A-Za-z\\]"  # signs
    r"|(?<!\\begin)(?<!\\end)\{[A-Za-z]{3,}"
    r"|(?<![A-Za-z\\{])(?:(?!degrees?)[A-Za-z]{3,}|no|on|or|if|to|is|of|as|at|by)(?![A-Za-z])"
    r"|[0-9.)}!\]] +[0-9.]|[)}!\]][0-9.]|\.[0-9]*\.|!!"  # numbers side by side
    r"|[0-9)}]_|^[A-Za-z ]{2,}$"  # bases, and words
)
_BASE = re.compile(r"\\log_(?:[0-9a-z]|\{[^{}]*\}) ?")
_TO_INFINITY = re.compile(r"\\(?:lim|sum|prod|int)(?![A-Za-z])")
_DIFFERENTIAL = re.compile(r"(?<![A-Za-z\\])d(?!egree) ?\\?[A-Za-z]|\\frac\{d")
_SUM = re.compile(r"_\{[A-Za-z]=[^{}=]*\}")
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]*)(?![0-9.])")
_PRODUCT = re.compile(r"(?<=[0-9)}!])(?<!_[0-9])\s*(?=\(|\\(?:frac|sqrt|binom|pi)(?![A-Za-z]))")
_MEMBER = re.compile(r"([A-Za-z])\s*\\in(?![A-Za-z])(.*)")
_RELATION = re.compile(r"[<>]|\\(?:[lg]e|ne)(?![A-Za-z])")
_END = sympy.Symbol("Omega")
_CONFIG = ConversionConfig(lowercase_symbols=False)


def same(cases: list[list[list[str]]]) -> str:
    """Return for each case whether the texts of any of its pairs state the same, as JSON."""
    return json.dumps(
        [any(is_same(answer, gold, Values()) for answer, gold in pairs) for pairs in cases]
    )


class Values(Numbers):
    """Compares what math-verify reads. The parser and SymPy may raise anything on a hostile answer,
    which then equals none.
    """

    def is_equal(self, answer: str, gold: str, factor: Fraction) -> bool:
        try:
            if RANGE.search(answer) or RANGE.search(gold):
                return is_same_range(answer, gold)
            value, gold_value = number(answer), number(gold)
            if value is not None and gold_value is not None:
                return factor * value == gold_value
            return agree(sympy.Rational(*factor.as_integer_ratio()) * read(answer), read(gold))
        except Exception:  # noqa: BLE001
            return False

    def is_rounded(self, exact: str, rounded: str) -> bool:
        try:
            decimal = number(rounded)
            if decimal is None or "/" in rounded or "\\" in rounded:
                return False
            with mpmath.workdps(50):
                value = compute([read(exact)], {})[0]
                error = value - mpmath.mpf(decimal.numerator) / decimal.denominator
                bound = half_unit(rounded)
                return bool(abs(error) <= mpmath.mpf(bound.numerator) / bound.denominator)
        except Exception:  # noqa: BLE001
            return False

    def is_same_equation(self, answer: Sequence[str], gold: Sequence[str]) -> bool:
        try:
            one, other = (read(left) - read(right) for left, right in (answer, gold))
            unknowns = one.free_symbols
            if len(unknowns) < 2 or unknowns != other.free_symbols:
                return False  # of one unknown the solution is asked, and 2x=8 is none
            point = next(points(unknowns))
            factor = one.xreplace(point) / other.xreplace(point)
            return agree(one, factor * other)
        except Exception:  # noqa: BLE001
            return False


@functools.cache
def read(text: str) -> sympy.Expr:
    """Parse an expression, with decimals as fractions and degrees as multiples of pi."""
    plain = _BASE.sub("\\\\log ", _SUM.sub("", text).replace("\\begin{vmatrix}", "("))
    if _OTHERS.search(plain) or "=" in plain or not text.strip():
        raise ValueError(f"{text!r} is not known here")
    if not set(_COMMANDS.split()).issuperset(_COMMAND.findall(text)):
        raise ValueError(f"{text!r} has other commands")
    if "\\int" not in text and _DIFFERENTIAL.search(text):
        raise ValueError(f"{text!r} is a derivative")
    if "\\infty" in text and not _TO_INFINITY.search(text):
        return {"\\infty": sympy.oo, "+\\infty": sympy.oo, "-\\infty": -sympy.oo}[text]
    # What the grammar does not read, it drops; so there is more behind the text's end.
    whole = latex2sympy(
        f"({_prepared_latex(text)})+\\Omega", normalization_config=None, conversion_config=_CONFIG
    )
    if not isinstance(whole, sympy.Add) or whole.args.count(_END) != 1:
        raise ValueError(f"{text!r} is not read to its end")
    value = sympy.Add(*(term for term in whole.args if term != _END))
    if "\\sum" not in text and "\\prod" not in text:
        value = value.xreplace({sympy.Symbol("i"): sympy.I})
    value = value.doit()
    if value.has(sympy.nan, sympy.zoo, sympy.oo, sympy.Float, sympy.Integral, sympy.Limit):
        raise ValueError(f"{text!r} is no number")
    return value


def _prepared_latex(text: str) -> str:
    text = _DECIMAL.sub(
        lambda match: rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}", text
    )
    text = re.sub(r"(\d|\})\s*degrees?\b", r"\1 \\cdot \\frac{\\pi}{180} ", text)
    text = re.sub(r"\\sqrt\[([0-9]*[13579])\]\{-([^{}+-]*)\}", r"(-\\sqrt[\1]{\2})", text)
    return _PRODUCT.sub(r" \\cdot ", text)


def agree(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Return whether two expressions are equal wherever both are real; where neither is, there."""
    if one == other:
        return True
    if one.is_Rational and other.is_Rational:
        return False
    terms = [one, other]
    for node in chain(sympy.preorder_traversal(one), sympy.preorder_traversal(other)):
        terms += node.args if isinstance(node, sympy.Add) else ()
    unknowns = one.free_symbols | other.free_symbols
    is_complex = one.has(sympy.I) or other.has(sympy.I)
    near = {True: 0, False: 0}  # by whether the values are real
    for point in points(unknowns):
        try:
            is_real, is_near = _agree_at(terms, point)
        except (ZeroDivisionError, ValueError, TypeError):
            continue
        if not is_near and (is_real or is_complex):
            return False
        near[is_real] += is_near or -100  # one difference outweighs all points that agree
    enough = NUM_POINTS if unknowns else 1
    return near[True] >= enough or ((is_complex or not near[True]) and sum(near.values()) >= enough)


def _agree_at(terms: Sequence[sympy.Expr], point: dict[Any, Any]) -> tuple[bool, bool]:
    """Return whether the first two terms are real at a point, and whether they are near there."""
    with mpmath.workdps(20):
        sizes = [abs(value) for value in compute(terms, point) if value]
    if not sizes:
        return True, True
    digits = DIGITS + sum(_num_digits(number) for term in terms[:2] for number in term.atoms())
    num_digits = int(mpmath.log10(max(sizes) / min(sizes))) + 2 * digits
    if num_digits > MAX_DIGITS:
        raise ArithmeticError("too many digits")
    with mpmath.workdps(num_digits):
        one, other = compute(terms[:2], point)
        is_near = abs(one - other) <= min(sizes) * mpmath.mpf(10) ** -digits
        is_real = all(abs(mpmath.im(value)) <= abs(value) * 1e-9 for value in (one, other))
    return is_real, bool(is_near)


def _num_digits(number: sympy.Basic) -> int:
    is_number = isinstance(number, sympy.Rational)
    return (number.p.bit_length() + number.q.bit_length()) // 3 if is_number else 0


def compute(terms: Sequence[sympy.Expr], point: dict[Any, Any]) -> list[Any]:
    """Compute expressions at a point, in the digits of mpmath."""
    function = sympy.lambdify(list(point), list(terms), "mpmath")
    return [mpmath.mpmathify(value) for value in function(*map(mpmath.mpmathify, point.values()))]


def points(unknowns: set[sympy.Symbol]) -> Any:
    """Yield points: positive ones, near 1 and larger, then such with negative coordinates."""
    dice = random.Random(24)  # seeded, so that an answer is scored alike each time
    for place in range(6 * NUM_POINTS if unknowns else 1):
        low, high = (20, 300) if place % 2 else (300, 1500)
        is_mixed = place >= 4 * NUM_POINTS
        yield {
            unknown: sympy.Rational(dice.randrange(low, high), 101)
            * (-1 if is_mixed and (dice.random() < 0.7) else 1)
            for unknown in sorted(unknowns, key=str)
        }


def is_same_range(answer: str, gold: str) -> bool:
    """Compare inequalities and sets with each other.

    Where (1, 2) is accepted it may be a point, which 1 < x < 2 is not.
    """
    (name, one), (gold_name, other) = read_range(answer), read_range(gold)
    is_point = not gold_name and re.fullmatch(r"\((?!.*\\infty)[^()]*\)", gold)
    if (is_point and name) or (name and gold_name and name != gold_name):
        return False
    return one == other or bool((one - other).is_empty and (other - one).is_empty)


def read_range(text: str) -> tuple[str, sympy.Set]:
    r"""Read "1 < x \le 2", several with "or" or "and", and "x \in (1, 2]" as the unknown and a set;
    an interval alone has no unknown.
    """
    if member := _MEMBER.fullmatch(text):
        return member[1], read_set(member[2])
    if not _RELATION.search(text):
        return "", read_set(text)
    names = set()
    union = sympy.S.EmptySet
    for alternative in re.split(r" or |\\(?:lor|vee)(?![A-Za-z])", text):
        ranges = [
            _relation(piece)
            for piece in re.split(r" and |\\(?:land|wedge)(?![A-Za-z])", alternative)
        ]
        names |= {str(unknown) for relation in ranges for unknown in relation.free_symbols}
        union = sympy.Union(union, sympy.Intersection(*(relation.as_set() for relation in ranges)))
    (name,) = names
    return name, union


def _relation(text: str) -> Any:
    """Read "1 < x \\le 2" as relations between neighbours."""
    pieces = re.split(r"(<|>|\\[lg]e(?![A-Za-z])|\\ne(?![A-Za-z])|=)", text)
    kinds = {"<": sympy.Lt, ">": sympy.Gt, "\\le": sympy.Le, "\\ge": sympy.Ge, "\\ne": sympy.Ne}
    real = [read(piece.strip()) for piece in pieces[::2]]
    real = [
        side.xreplace({s: sympy.Symbol(s.name, real=True) for s in side.free_symbols})
        for side in real
    ]
    relations = [
        kinds.get(sign, sympy.Eq)(left, right)
        for sign, left, right in zip(pieces[1::2], real, real[1:], strict=False)
    ]
    return sympy.And(*relations)


def read_set(text: str) -> sympy.Set:
    """Read intervals, finite sets, and their unions and differences."""
    for separator, combine in (
        ("cup", sympy.Union),
        ("cap", sympy.Intersection),
        ("setminus", sympy.Complement),
    ):
        parts = re.split(rf"\\{separator}(?![A-Za-z])", text)
        if len(parts) > 1:
            return combine(*map(read_set, parts))
    text = text.strip()
    if text in (
        "\\mathbb{R}",
        "\\mathbb{Z}",
        "\\mathbb{N}",
        "\\mathbb{Q}",
        "\\mathbb{C}",
        "\\emptyset",
    ):
        return {
            "R": sympy.S.Reals,
            "Z": sympy.S.Integers,
            "N": sympy.S.Naturals,
            "Q": sympy.S.Rationals,
            "C": sympy.S.Complexes,
        }.get(text[-2], sympy.S.EmptySet)
    if match := re.fullmatch(r"\\\{(.*)\\\}", text):
        return sympy.FiniteSet(*map(read, match[1].split(",")))
    match = re.fullmatch(r"([(\[])([^,]*),([^,]*)([)\]])", text)
    if not match:
        raise ValueError(f"{text!r} is no set")
    low, high = read(match[2].strip()), read(match[3].strip())
    return sympy.Interval(low, high, match[1] == "(", match[4] == ")")
