"""The learning rate as a function of the step: numbers worked out by hand, of a peak of 8."""

from __future__ import annotations

import pytest

from flowtrain.training.lr_schedule import learning_rate


def rates(schedule: str, num_steps: int, warmup_steps: int, peak: float = 8.0) -> list[float]:
    return [
        learning_rate(peak, step, num_steps, warmup_steps, schedule)
        for step in range(1, num_steps + 1)
    ]


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_constant_rate_without_warmup_is_the_peak_to_the_bit(warmup_steps: int) -> None:
    assert rates("constant", 20, warmup_steps, peak=3e-4) == [3e-4] * 20


def test_warmup_rises_linearly_to_the_peak() -> None:
    assert rates("constant", 6, 4) == [2, 4, 6, 8, 8, 8]


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
    assert rates("linear", 8, warmup_steps) == pytest.approx(expected, rel=1e-15)


def test_cosine_falls_from_the_peak_by_half_a_wave() -> None:
    """At 0, 30, 60, 90, 120 and 150 degrees."""
    half_root = 4 * 0.8660254037844386
    expected = [8, 4 + half_root, 6, 4, 2, 4 - half_root]
    assert rates("cosine", 6, 0) == pytest.approx(expected, rel=1e-12)
    assert rates("cosine", 6, 3) == pytest.approx([8 / 3, 16 / 3, *expected[2:]], rel=1e-12)
