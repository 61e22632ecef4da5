"""Exact match: what counts as the same answer, and what only looks like it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.rewards.exact import exact_match
from flowtrain.types import Task


def reward(answer: str, *accepted: str) -> float:
    return exact_match(Task("t", "q", accepted), answer)


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("  oslo\n", "Oslo"),
        ("OSLO.", "Oslo"),
        ("New \t Delhi", "new delhi"),
        ("385", "385.0"),
        ("385.", "385"),
        ("385.00", "385"),
        ("+385", "385"),
        ("0385", "385"),
        (".5", "0.50"),
        ("-0.0", "0"),
        ("1,284", "1284"),
        ("12,345,678.90", "12345678.9"),
        ("-1,284.", "-1284"),
        ("about 1,284 km", "About 1284 km."),
        ("Strasse", "stra\u00dfe"),
        ("9" * 5000 + ".0", "9" * 5000),
    ],
)
def test_same(answer: str, accepted: str) -> None:
    assert reward(answer, accepted) == reward(accepted, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("", "Oslo"),
        ("Oslo, Norway", "Oslo"),
        ("The capital is Oslo", "Oslo"),
        ("Oslo..", "Oslo"),
        ("NewDelhi", "New Delhi"),
        ("386", "385"),
        ("385.01", "385"),
        ("-385", "385"),
        ("3850", "385"),
        ("38 5", "385"),
        ("1,28", "128"),
        ("1,2845", "12845"),
        ("1284,", "1284"),
        ("1234,567", "1234567"),
        ("1,284,5", "1284,5"),
        ("1.234,567", "1.234567"),
        ("385..0", "385"),
        ("1e3", "1000"),
        (".", "0"),
        ("-", "0"),
        ("N", "No"),
    ],
)
def test_near_misses(answer: str, accepted: str) -> None:
    assert reward(answer, accepted) == reward(accepted, answer) == 0.0


def test_any_accepted_answer_is_right() -> None:
    assert reward("myanmar", "Burma", "Myanmar") == 1.0
    assert reward("siam", "Burma", "Myanmar") == 0.0
    assert reward("siam") == 0.0


@settings(derandomize=True, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_every_spelling_of_an_integer(number: int, num_zeros: int) -> None:
    spellings = [
        f"{number:,}",
        f"{number}.{'0' * (num_zeros + 1)}",
        f" {number}.",
        f"{number:,}.{'0' * (num_zeros + 1)}",
    ]
    assert [reward(spelling, str(number)) for spelling in spellings] == [1.0] * 4
    assert [reward(spelling, str(number + 1)) for spelling in spellings] == [0.0] * 4


@settings(derandomize=True, deadline=None)
@given(st.text(), st.text())
def test_any_text_is_scored(answer: str, accepted: str) -> None:
    assert reward(answer, accepted) in (0.0, 1.0)
    assert reward(answer, answer) == 1.0
