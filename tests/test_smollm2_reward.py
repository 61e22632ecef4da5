"""The reward of configs/smollm2.toml."""

from __future__ import annotations

from typing import Any

import pytest

from examples.smollm2.reward import number
from flowtrain.records import Task


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        *(("1284", 1.0), ("1,284", 1.0), ("+01284.0", 1.0), ("= 1284", 4 / 6)),
        *(("1283", 0.0), ("", 0.0), ("nan", 0.0), ("12841", 0.8)),
    ],
)
def test_a_number_among_other_text_has_its_share(answer: str, reward: float) -> None:
    nothing: Any = None
    assert number(Task("t", "?", ("1284",)), answer, nothing) == pytest.approx(reward)
