"""The final answer in a text, and answers that are none."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.rewards import is_refusal
from flowtrain.utils.text import final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Oslo", "Oslo"),
        (" Oslo\n", "Oslo"),
        ("", ""),
        ("I think <answer>Oslo</answer> fits.", "Oslo"),
        ("<ANSWER>\nOslo </Answer>", "Oslo"),
        ("<answer>Bergen</answer> no, <answer>Oslo</answer>", "Oslo"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
        ("<answer>Oslo</answer></answer>", "Oslo"),
        ("<answer>x <answer>Oslo</answer>", "Oslo"),
        ("<answer>Oslo</answer> or <answer>Bergen", "Oslo"),
        ("<answer>Oslo", "<answer>Oslo"),
        ("</answer>Oslo<answer>", "</answer>Oslo<answer>"),
        ("Oslo <answer>x<answer>", "Oslo <answer>x<answer>"),
        ("< answer>Oslo</answer>", "< answer>Oslo</answer>"),
        ("\u0130<answer>Oslo</answer>", "Oslo"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@given(
    st.text(),
    st.text().filter(lambda text: "answer>" not in text.casefold()),
    st.text().filter(lambda text: ">" not in text),
)
def test_the_last_pair_of_tags_holds_it(before: str, content: str, after: str) -> None:
    assert final_answer(f"{before}<answer>{content}</answer>{after}") == content.strip()


@pytest.mark.clock
@pytest.mark.parametrize(
    "piece", ["<answer>", "</answer>", "<answer></answer>", "<", "</", "<answer", "a\n", " "]
)
def test_a_hostile_text_takes_linear_time(piece: str) -> None:
    started = time.process_time()
    final_answer(piece * (2_000_000 // len(piece)))
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    "answer",
    [
        *("", " ", ".", "?", "None", "none.", "N/A", "Unknown", "*unknown*", "I don't know"),
        *("I don\u2019t know.", "I do not know!", "Cannot  be determined"),
    ],
)
def test_no_answer(answer: str) -> None:
    assert is_refusal(answer)


@pytest.mark.parametrize(
    "answer",
    [
        *("0", "no", "Noone", "The Unknown", "None of the above", "x", "None" * 1000),
        "I don't know, perhaps Oslo",
    ],
)
def test_an_answer(answer: str) -> None:
    assert not is_refusal(answer)
