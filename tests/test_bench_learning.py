"""The study of Omega, of the benchmark of learning."""

from __future__ import annotations

import pytest

from bench.learning import omega_row


def test_equal_policies_leave_the_places_to_entropy() -> None:
    row = omega_row(0.0, 1.0, num_rollouts=2, num_tokens=300)
    assert (row["between"], row["places of entropy"]) == (1.0, 1.0)


def test_the_longer_the_sum_the_more_of_it_is_clipped() -> None:
    rows = [omega_row(0.002, gamma, num_rollouts=4, num_tokens=1000) for gamma in (0, 0.9, 0.99, 1)]
    between = [row["between"] for row in rows]
    assert between == sorted(between, reverse=True) and between[0] > 0.9 and between[-1] < 0.2
    for row in rows:
        assert row["at 0.8"] + row["at 1.2"] + row["between"] == pytest.approx(1)
    assert rows[-1]["at 1.2"] > 3 * rows[-1]["at 0.8"], "what was sampled has become likelier"
