"""Mathematical answers: what a person would call equal, and hostile text."""

from __future__ import annotations

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.rewards.expression import Refused, values
from flowtrain.rewards.math_answer import math_match
from flowtrain.types import Task


def right(answer: str, *accepted: str) -> float:
    return math_match(Task("t", "q", accepted), answer)


def test_a_list_may_have_50_elements() -> None:
    numbers = [str(number) for number in range(51)]
    for most, reward in ((50, 1.0), (51, 0.0)):
        assert right(", ".join(numbers[:most]), ", ".join(numbers[:most][::-1])) == reward


def test_things_are_counted_where_the_question_speaks_of_them() -> None:
    task = Task("t", "How many apples and pears are there?", ("17",))
    assert math_match(task, "17 apples") == math_match(task, "The sum is 17 pears.") == 1.0
    assert math_match(task, "17 wrong") == math_match(task, "17 plums") == 0.0
    assert math_match(Task("t", task.question, ("17 pears",)), "17 apples") == 0.0


def test_lists_are_nested_a_few_times_at_most() -> None:
    def nested(number: str, depth: int) -> str:
        return "(1, " * depth + number + ")" * depth

    assert right(nested("2.0", 4), nested("2", 4)) == 1.0
    assert right(nested("3", 4), nested("2", 4)) == 0.0
    assert right(nested("2.0", 9), nested("2", 9)) == 0.0
    assert right(nested("2", 9), nested("2", 9)) == 1.0, "the text alone"


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_compared_exactly(one: Fraction, other: Fraction) -> None:
    latex = f"\\frac{{{one.numerator}}}{{{one.denominator}}}"
    assert right(latex, str(one)) == right(f"({one}) * ({other}) + 1", str(one * other + 1)) == 1.0
    assert right(latex, str(one + Fraction(1, 10**15))) == 0.0


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    """Generate expressions that both Python and the reader parse."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["1", "2", "7", "0.5", "13"]))
    left, right = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    sign = draw(st.sampled_from(["", "-"]))
    operator = draw(st.sampled_from(["+", "-", "*", "/", "**2-", "**3/"]))
    return f"{sign}({left}{operator}{right})"


@settings(max_examples=200)
@given(expressions())
def test_agrees_with_python(text: str) -> None:
    try:
        expected = eval(re.sub(r"[0-9.]+", r"Fraction('\g<0>')", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(Refused):
            values(text.replace("**", "^"))
        return
    assert values(text.replace("**", "^")) == [expected] * 4


HOSTILE = [
    *("9" * 5000, "9^9^9^9", "9" * 300 + "^" + "9" * 50, "2^{-10000}", "x^{1000}" * 40),
    *("(x+1)^{900}" * 30, "1e999" * 30, "10^{400}+\\sqrt{2}", "(" * 5000, "{" * 399),
    *("-" * 399 + "1", "\\frac{" * 60, "\\sqrt{" * 60 + "2" + "}" * 60, "1" + "^{2}" * 100),
    *("9^" * 199, "\\boxed{" * 3000, "(1," * 250 + "1" + ")" * 250),
    *("\\{1," * 140 + "1" + "\\}" * 140, "((((1,2),3),4),5)" * 50, "1," * 500, "1," * 49 + "1"),
    *("[" * 1000, "is " * 5000, "1 and " * 200, "\\pm" * 300, "\\text{" * 2000, "$" * 10_000),
    *(" " * 10_000 + "^", "\\" * 1000, "=" * 400, "1" + "%" * 300),
    *(
        *("1/0", "0^{-1}", "0/0", "(-2)^{1/2}", "\\sqrt{-1}", "1e400^{1.5}", "\ud800", "\x00"),
        *("1:" * 1000, "a_" * 200, " " * 900 + "<x", "\\a" * 300 + "<x", "1 or " * 180 + "<x"),
        *("x<" * 300, "the sum of " + "a " * 400 + "is", "a" * 900 + "=1", "1h" * 400),
        *("1 and " * 150 + "2", "\u221a" * 500),
    ),
]


@pytest.mark.clock
@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_scored_at_once(answer: str) -> None:
    started = time.process_time()
    assert right(answer, "42") == 0.0
    assert right(answer, answer) in (0.0, 1.0) and right("42", answer) == 0.0
    assert time.process_time() - started < 0.5
