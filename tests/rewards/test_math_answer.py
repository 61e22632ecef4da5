"""Mathematical answers: sympy says what is equal, and hostile text."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowtrain.records import Task
from flowtrain.rewards.math_answer import math_match, pairs
from flowtrain.rewards.statements import is_same
from flowtrain.rewards.symbolic_child import Values

X, Y = sympy.symbols("x y")


def right(answer: str, *accepted: str) -> float:
    return math_match(Task("t", "q", accepted), answer)


def equal(gold: str, answer: str) -> bool:
    """Compare by all readers, in this process."""
    task = Task("t", "q", (gold,))
    return any(is_same(*pair, Values()) for pair in pairs(task, answer))


def test_a_list_may_have_50_elements() -> None:
    numbers = [str(number) for number in range(51)]
    for most, reward in ((50, 1.0), (51, 0.0)):
        assert right(", ".join(numbers[:most]), ", ".join(numbers[:most][::-1])) == reward


def test_things_are_counted_where_the_question_speaks_of_them() -> None:
    task = Task("t", "How many apples and pears are there?", ("17",))
    assert math_match(task, "17 apples") == math_match(task, "The sum is 17 pears.") == 1.0
    assert math_match(task, "17 wrong") == math_match(task, "17 plums") == 0.0


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_compared_exactly(one: object, other: object) -> None:
    assert right(sympy.latex(sympy.Rational(one)), str(one)) == 1.0
    assert right(str(other), str(one)) == (one == other)


small = st.integers(-6, 6)
whole = st.integers(1, 9)
rational = st.builds(sympy.Rational, small, whole)
number = st.one_of(
    st.integers(-(10**9), 10**9).map(sympy.Integer),
    rational,
    st.builds(lambda a, b, c: a + b * sympy.sqrt(c), rational, small, whole),
    st.builds(lambda a, b: a * sympy.pi + b, rational, small),
    st.builds(lambda a, b: a + sympy.exp(b), small, st.integers(-300, 5)),
    st.builds(lambda a, b, n: a * sympy.Integer(b) ** n, rational, whole, st.integers(-60, 60)),
    st.builds(lambda a, b: a * sympy.log(b), small, whole),
    st.builds(lambda a, b: a / sympy.factorial(b), small, st.integers(0, 90)),
)
expression = st.one_of(
    st.lists(rational, min_size=2, max_size=4).map(
        lambda terms: sum(term * X**place for place, term in enumerate(terms))
    ),
    st.builds(lambda a, b, c: a + b * sympy.exp(-c * X), small, small, whole),
    st.builds(lambda a, b, c: a * sympy.exp(-c * X**2) + b * Y, small, small, whole),
    st.builds(lambda a, b, c: (X + a) ** 2 * (Y + b) / (X**2 + c), small, small, whole),
    st.builds(lambda a, b, c: a * sympy.sin(b * X) + c * sympy.cos(X), small, whole, small),
    st.builds(lambda a, b, c: a * 2**X + b * sympy.sqrt(X**2 + c), small, small, whole),
)
value = st.one_of(number, expression)


def differ(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Simplify only what may be zero: that takes longer than all else here."""
    difference = sympy.expand(one - other)
    at_a_point = difference.subs({X: sympy.Rational(7, 5), Y: sympy.Rational(13, 11)})
    return bool(abs(at_a_point.evalf(50)) > 1e-30) or sympy.simplify(difference) != 0


@settings(max_examples=30, deadline=None)
@given(value, st.sampled_from([sympy.expand, sympy.factor, sympy.together]))
def test_a_value_equals_its_rewritings(gold: sympy.Expr, rewritten: object) -> None:
    for answer in (sympy.latex(rewritten(gold)), str(gold), f"\\boxed{{{sympy.latex(gold)}}}"):
        assert equal(sympy.latex(gold), answer), answer


@settings(max_examples=75, deadline=None)
@given(value, value, st.sampled_from(["other", "sign", "small", "large"]))
def test_a_changed_value_is_wrong(gold: sympy.Expr, other: sympy.Expr, change: str) -> None:
    changed = {
        "other": other,
        "sign": -gold,
        "small": gold + sympy.Rational(1, 10**40),
        "large": gold * sympy.Rational(10**9 + 1, 10**9),
    }[change]
    assume(differ(gold, changed))
    assert not equal(sympy.latex(gold), sympy.latex(changed)), changed
    assert not equal(sympy.latex(gold), str(changed)), changed


SHAPES = {
    "({}, {}, {})": True,
    "[{}, {}, {}]": True,
    "x={}, y={}, z={}": True,
    "AB={}; CD={}; EF={}": True,
    r"x={} \quad y={} \\ z={}": True,
    r"\begin{{pmatrix}} {} \\ {} \\ {} \end{{pmatrix}}": True,
    r"\{{{}, {}, {}\}}": False,
    "x={} or x={} or x={}": False,
    "{}, {} and {}": False,
}
"""Shapes of answers, and whether their values have an order."""


@settings(max_examples=75, deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.lists(number, min_size=3, max_size=3), st.data())
def test_lists_have_their_values_and_order(
    shape: str, numbers: list[sympy.Expr], data: st.DataObject
) -> None:
    gold = shape.format(*map(sympy.latex, numbers))
    order = data.draw(st.permutations(numbers))
    answer = shape.format(*map(sympy.latex, order))
    is_same_order = not any(differ(*pair) for pair in zip(numbers, order, strict=True))
    assert equal(gold, answer) == (is_same_order or not SHAPES[shape])
    assert not equal(gold, sympy.latex(numbers[2]))
    changed = [*numbers[:2], numbers[2] + 1]
    data.draw(st.randoms()).shuffle(changed)
    assume(sorted(map(sympy.N, changed)) != sorted(map(sympy.N, numbers)))
    assert not equal(gold, shape.format(*map(sympy.latex, changed)))


@settings(max_examples=8, deadline=None)
@given(expression, expression, whole)
def test_equations_are_equal_up_to_a_factor(one: Any, other: Any, factor: int) -> None:
    gold = f"{sympy.latex(one + Y**3)}={sympy.latex(X**2)}"
    assume((one + Y**3 - X**2).free_symbols == {X, Y} and differ(one, other))
    assert equal(gold, f"{sympy.latex(factor * (one + Y**3))}={sympy.latex(factor * X**2)}")
    assert not equal(gold, f"{sympy.latex(other + Y**3)}={sympy.latex(X**2)}")
    assert not equal(gold, sympy.latex(X**2))
    assert not equal(sympy.latex(X**2), gold)


HOSTILE = [
    *("9" * 5000, "9" * 300 + "^" + "9" * 50, "(" * 5000, "{" * 399, "-" * 399 + "1"),
    *("\\frac{" * 60, "1" + "^{2}" * 100, "9^" * 199, "\\boxed{" * 3000),
    *("(1," * 250 + "1" + ")" * 250, "\\{1," * 140 + "1" + "\\}" * 140, "((((1,2),3),4),5)" * 50),
    *("1," * 500, "1," * 49 + "1", "[" * 1000, "is " * 5000, "1 and " * 200, "\\pm" * 300),
    *("\\text{" * 2000, "$" * 10_000, " " * 10_000 + "^", "\\" * 1000, "=" * 400, "1" + "%" * 300),
    *("1/0", "0/0", "(1+1/0)", "\ud800", "\x00", "1:" * 1000, "a_" * 200, " " * 900 + "<x"),
    *("1 or " * 180 + "<x", "x<" * 300, "the sum of " + "a " * 400 + "is", "a" * 900 + "=1"),
    *("1h" * 400, "\u221a" * 500, "sqrt(" * 300, "2^(" * 300, "x=" * 300, "a=1 " * 200, ";" * 900),
    *("1e" * 400, "\\approx 1" * 90, "1,000" * 180, "one " * 220, "\\frac{1}{" * 90 + "}" * 90),
    *("\\begin{cases}" * 60, "\\begin{pmatrix}1&2\\\\" * 50, "x=1,y=2;" * 100, "|a" * 400),
]


@pytest.mark.clock
@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_scored_at_once(answer: str) -> None:
    started = time.process_time()
    assert right(answer, "42") == 0.0
    assert right(answer, answer) in (0.0, 1.0) and right("42", answer) == 0.0
    assert time.process_time() - started < 0.5
