"""Multiple choice: which option an answer names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.rewards.choice import choice, named_option
from flowtrain.types import Task, UserError

OPTIONS = ("Hemolytic uremic syndrome", "Oral ulcers", "Colorectal cancer", "Pancreatic cancer")
TASK = Task("t", "q", ("Colorectal cancer",), scorer="choice", choices=OPTIONS)


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "C",
            "c",
            "C.",
            "(C)",
            "**C**",
            "`C`",
            "$C$",
            "\\boxed{C}",
            "\\text{C}",
            "option C",
            "Option (C)",
            "Choice C",
            "Answer: C",
        ),
        *(
            "C. Colorectal cancer",
            "C) Colorectal cancer",
            "c) colorectal cancer",
            "C - Colorectal cancer",
        ),
        *(
            "colorectal cancer",
            "Colorectal  Cancer.",
            "a colorectal cancer",
            "Colorectal cancer (C)",
        ),
        *(
            "The answer is C.",
            "The correct answer is (C) Colorectal cancer",
            "The correct option is **C. Colorectal cancer**",
        ),
        "It is most likely colorectal cancer",
    ],
)
def test_right(answer: str) -> None:
    assert choice(TASK, answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "",
            "B",
            "E",
            "Z",
            "cancer",
            "Colorectal",
            "Oral ulcers",
            "I think so",
            "The answer is a cancer",
            "42",
        ),
        *(
            "A. Colorectal cancer",
            "C. Oral ulcers",
            "B and C",
            "Answer: B or C",
            "C or D",
            "The answer is B, not C",
        ),
        *(
            "not colorectal cancer",
            "colorectal cancer or oral ulcers",
            "Anything rather than colorectal cancer",
            "Such patients get colorectal cancer.",
            "C: it follows ulcerative colitis",
            "\ue000",
            "A B C D",
        ),
    ],
)
def test_wrong(answer: str) -> None:
    assert choice(TASK, answer) == 0.0


@pytest.mark.parametrize(
    "accepted", ["C", "c.", "C. Colorectal cancer", "Colorectal cancer", "Option C"]
)
def test_the_accepted_answer_may_be_a_letter_or_a_text(accepted: str) -> None:
    task = Task("t", "q", (accepted,), choices=OPTIONS)
    assert choice(task, "C") == 1.0 and choice(task, "B") == 0.0


def test_options_may_contain_each_other_and_look_like_labels() -> None:
    options = ("Pneumonia", "Viral pneumonia", "C. difficile", "Not contagious")
    assert named_option("This is viral pneumonia", options) == 1
    assert named_option("This is pneumonia", options) == 0
    assert named_option("C. difficile", options) == named_option("C", options) == 2
    assert named_option("It is not contagious", options) == 3


def test_options_may_be_letters() -> None:
    """An accepted answer is a text where possible; a letter that is another's text is none."""
    blood = Task("t", "q", ("A",), choices=("O", "A", "B", "AB"))
    assert [choice(blood, answer) for answer in ("B. A", "B", "A", "C", "AB")] == [
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]
    factor = Task("t", "q", ("X",), choices=("VII", "IX", "X", "XII"))
    assert [choice(factor, answer) for answer in ("X", "C", "C. X", "IX", "B")] == [
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
    ]


def test_options_with_the_same_text_are_the_same() -> None:
    task = Task("t", "q", ("B",), choices=("one", "two", "two"))
    assert choice(task, "C") == choice(task, "two") == 1.0


@pytest.mark.parametrize("answers", [("Gout",), ("E",), ()])
def test_a_task_without_a_right_option_is_refused(answers: tuple[str, ...]) -> None:
    with pytest.raises(
        UserError, match="task 't7': scorer 'choice' needs an answer among the options"
    ):
        choice(Task("t7", "q", answers, choices=OPTIONS), "A")


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.one_of(st.text(), st.text("ABCabc ().:-*option answer is")), st.lists(st.text(), max_size=5)
)
def test_any_text_names_an_option_or_none(answer: str, options: list[str]) -> None:
    place = named_option(answer, options)
    assert place is None or 0 <= place < len(options)
