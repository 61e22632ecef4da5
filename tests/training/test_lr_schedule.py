"""The learning rate as a function of the step."""

from __future__ import annotations

import math

import pytest

from flowtrain.training.lr_schedule import learning_rate

NUM_STEPS = 20


def rates(schedule: str, warmup_steps: int) -> list[float]:
    return [
        learning_rate(3e-4, step, NUM_STEPS, warmup_steps, schedule)
        for step in range(1, NUM_STEPS + 1)
    ]


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_constant_rate_without_warmup_is_the_peak_to_the_bit(warmup_steps: int) -> None:
    assert rates("constant", warmup_steps) == [3e-4] * NUM_STEPS


def test_warmup_rises_linearly_to_the_peak() -> None:
    expected = [3e-4 * step / 4 for step in (1, 2, 3)] + [3e-4] * (NUM_STEPS - 3)
    assert rates("constant", 4) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [0, 5, 50])
def test_linear_is_the_curve_of_fine_tuning(warmup_steps: int) -> None:
    """To the bit, so that demonstrations give the weights they always gave."""
    assert rates("linear", warmup_steps) == [
        3e-4 * min(step / max(warmup_steps, 1), (NUM_STEPS - step + 1) / NUM_STEPS, 1.0)
        for step in range(1, NUM_STEPS + 1)
    ]


def test_cosine_falls_from_the_peak_by_half_a_wave() -> None:
    found = rates("cosine", 0)
    assert found[0] == 3e-4 and found[NUM_STEPS // 2] == pytest.approx(1.5e-4)
    assert found[-1] == pytest.approx(3e-4 * (1 - math.cos(math.pi / NUM_STEPS)) / 2)
    assert found == sorted(found, reverse=True)
    warm = rates("cosine", 5)
    assert warm[:3] == pytest.approx([3e-4 * step / 5 for step in (1, 2, 3)])
    assert warm[5:] == found[5:]
