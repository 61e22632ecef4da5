"""Exact match: what counts as the same answer, and what only looks like it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.rewards.exact import exact_match
from flowtrain.types import Task


def reward(answer: str, *accepted: str) -> float:
    return exact_match(Task("t", "q", accepted), answer)


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
