"""The learning rate as a function of the step: numbers worked out by hand, of a peak of 8."""

from __future__ import annotations

import pytest

from flowtrain.trainer.lr_schedule import linear, warmed_up


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_rate_without_warmup_is_the_peak_to_the_bit(warmup_steps: int) -> None:
    assert [warmed_up(3e-4, step, warmup_steps) for step in range(1, 21)] == [3e-4] * 20


def test_warmup_rises_linearly_to_the_peak() -> None:
    assert [warmed_up(8.0, step, 4) for step in range(1, 7)] == [2, 4, 6, 8, 8, 8]


@pytest.mark.parametrize(
    ("warmup_steps", "expected"),
    [
        (0, [8, 7, 6, 5, 4, 3, 2, 1]),
        (2, [4, 7, 6, 5, 4, 3, 2, 1]),
        (4, [2, 4, 6, 5, 4, 3, 2, 1]),  # the lower of both
        (16, [0.5, 1, 1.5, 2, 2.5, 3, 2, 1]),
        (80, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
    ],
)
def test_linear_falls_by_the_same_each_step(warmup_steps: int, expected: list[float]) -> None:
    rates = [linear(8.0, step, 8, warmup_steps) for step in range(1, 9)]
    assert rates == pytest.approx(expected, rel=1e-15)
