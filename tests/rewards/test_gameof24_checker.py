"""The checker of expressions, against Python's own arithmetic and against hostile text."""

from __future__ import annotations

import re
import warnings
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowtrain.records import Task
from flowtrain.rewards.gameof24 import gameof24, is_right

SIGNS = "+-*/"


def python_value(expression: str) -> Fraction | None:
    """None when it divides by zero."""
    try:
        return eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


@st.composite
def expressions(draw: st.DrawFn, num_numbers: int = 4) -> str:
    """Four numbers in any tree, with needed and needless parentheses and spaces."""
    if num_numbers == 1:
        text = str(draw(st.integers(0, 13)))
    else:
        num_left = draw(st.integers(1, num_numbers - 1))
        left, right = draw(expressions(num_left)), draw(expressions(num_numbers - num_left))
        space = draw(st.sampled_from(["", " ", "  "]))
        text = f"{left}{space}{draw(st.sampled_from(SIGNS))}{space}{right}"
    return f"({text})" if draw(st.booleans()) else text


@settings(max_examples=400)
@given(expressions())
@example("(8 / (3 - (8 / 3)))")
@example("4 * 6 + 7 - 7")
@example("(1 + 2 + 3) * 4")
@example("5 / (4 - 2 * 2)")
def test_agrees_with_python(expression: str) -> None:
    numbers = [int(number) for number in re.findall(r"\d+", expression)]
    assert is_right(expression, numbers[::-1]) == (python_value(expression) == 24)
    unicode_signs = expression.replace("*", "\u00d7").replace("/", "\u00f7").replace("-", "\u2212")
    task = Task("t", "q", tuple(map(str, numbers)), scorer="gameof24")
    assert gameof24(task, f" {unicode_signs} = 24\n") == (python_value(expression) == 24)


HOSTILE = [
    *("(" * 200, "(" * 98 + "4" + ")" * 98, "(" * 1_000_000, "-" * 199 + "4", "4" * 200),
    *("9" * 10_000_000, "4+" * 99, "4" + "()" * 99, "4**" * 60 + "4", "9**9**9**9"),
    "4" + " " * 198 + "=",
    *("\x00", "4 + 6 +\n7 + 8", "4 + 6 # 7 + 8", "__import__('os').system('true')"),
    *("(lambda: 24)()", "[24 for _ in (4, 6, 7, 8)][0]", "\ud800", "\u202e4+6+7+8"),
]


@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_refused_without_a_warning(expression: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_right(expression, [4, 6, 7, 8])
        assert not is_right(expression, [])


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(["4", "6", "8", "(", ")", *SIGNS, " "]), min_size=1, max_size=12).map(
        "".join
    )
)
def test_random_expressions_agree_with_python(expression: str) -> None:
    numbers = [int(number) for number in re.findall(r"\d+", expression)]
    if is_right(expression, numbers):
        assert python_value(expression.strip()) == 24


@pytest.mark.parametrize(
    "expression", ["-4 * -6 * 1 * 1", "+4 * 6 * 1 * 1", "4 * 6 + 1 - +1", "-(-4) * 6 * 1 * 1"]
)
def test_a_number_has_no_sign_of_its_own(expression: str) -> None:
    assert python_value(expression) == 24 and not is_right(expression, [4, 6, 1, 1])


def test_needless_parentheses_are_fine_up_to_the_limit() -> None:
    assert is_right("(" * 20 + "4 * 6" + ")" * 20, [4, 6])
    assert not is_right("(" * 250 + "4 * 6" + ")" * 250, [4, 6])


ONES = Task("t", "q", ("1", "1", "1", "8"), scorer="gameof24")


@pytest.mark.parametrize("answer", ["9" * 5000, "(" * 5000, "\\frac{" * 3000])
def test_a_long_answer_is_wrong(answer: str) -> None:
    assert gameof24(ONES, answer) == 0.0


def test_fractions_in_latex() -> None:
    task = Task("t", "q", ("3", "3", "8", "8"), scorer="gameof24")
    for answer in (r"\frac{8}{3-\frac{8}{3}} = 24", r"$\dfrac{8}{3 - 8/3}$"):
        assert gameof24(task, answer) == 1.0
    assert gameof24(task, r"\frac{8}{3+\frac{8}{3}}") == 0.0
