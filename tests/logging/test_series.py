"""Metrics read back from the log of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.logging.jsonl import append_lines
from flowtrain.logging.series import read_series, total_seconds
from flowtrain.records import UserError


def test_the_later_of_two_lines_for_a_step_counts(tmp_path: Path) -> None:
    """A resumed run takes steps once more. What is no number is no point of a curve."""
    lines = [
        {"step": 1, "loss": 1.0, "note": "text"},
        {"step": 3, "loss": 3.0},
        {"step": 2, "loss": float("nan"), "kl": 0.5},
        {"step": 3, "loss": 4.0},
    ]
    append_lines(tmp_path / "metrics.jsonl", lines)
    assert read_series(tmp_path) == {"loss": ([1, 3], [1.0, 4.0]), "kl": ([2], [0.5])}


def test_a_run_without_a_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_series(tmp_path)
    append_lines(tmp_path / "metrics.jsonl", [{"step": 1}])
    with pytest.raises(UserError, match="holds no metrics yet"):
        read_series(tmp_path)


def test_seconds_add_up_by_what_took_them() -> None:
    series = {"rollout_s": ([1, 2], [1.5, 2.0]), "tokens_per_s": ([1], [9.0]), "kl": ([1], [1.0])}
    assert total_seconds(series) == {"rollout": 3.5}
