"""Multiple choice: which option an answer names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.records import Task
from flowtrain.rewards.choice import choice, named_option

OPTIONS = ("Hemolytic uremic syndrome", "Oral ulcers", "Colorectal cancer", "Pancreatic cancer")


@pytest.mark.parametrize(
    "accepted", ["C", "c.", "C. Colorectal cancer", "Colorectal cancer", "Option C"]
)
def test_the_accepted_answer_may_be_a_letter_or_a_text(accepted: str) -> None:
    task = Task("t", "q", (accepted,), choices=OPTIONS)
    assert choice(task, "C") == 1.0 and choice(task, "B") == 0.0


def test_options_with_the_same_text_are_the_same() -> None:
    task = Task("t", "q", ("B",), choices=("one", "two", "two"))
    assert choice(task, "C") == choice(task, "two") == 1.0


@settings(max_examples=300)
@given(
    st.one_of(st.text(), st.text("ABCabc ().:-*option answer is")), st.lists(st.text(), max_size=5)
)
def test_any_text_names_an_option_or_none(answer: str, options: list[str]) -> None:
    place = named_option(answer, options)
    assert place is None or 0 <= place < len(options)


@pytest.mark.parametrize(
    ("answer", "choices", "named"),
    [
        ("B. No tests required", ("Urinalysis", "No tests required"), 1),
        ("The answer is A. No tests required", ("No tests required", "Urinalysis"), 0),
        ("A. No tests required", ("Urinalysis", "No tests required"), None),
        ("B. No, it is Oslo", ("Oslo", "Rome"), None),
        ("The answer is X.", ("VII", "IX", "X", "XII"), 2),
        ("The answer is V/Q scan.", ("ECG", "V/Q scan"), 1),
    ],
)
def test_letters_and_texts_that_look_like_others(
    answer: str, choices: tuple[str, ...], named: int | None
) -> None:
    assert named_option(answer, choices) == named
