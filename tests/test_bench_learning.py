"""The studies of learning against curves by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import learning as bench
from flowtrain.algorithms import load_algorithm
from flowtrain.config.options import parse

SLOW = ([0.0, 1000.0, 2000.0, 3000.0], [0.0, 0.2, 0.6, 1.0])
FAST = ([0.0, 2000.0], [0.0, 1.0])


def test_tokens_to_a_level_are_those_of_its_first_crossing() -> None:
    assert (
        bench.tokens_to(0.4, SLOW) == 1500
        and bench.tokens_to(1.0, SLOW) == 3000
        and bench.tokens_to(0.0, SLOW) == 0
    )
    assert bench.tokens_to(1.1, SLOW) is None
    assert bench.tokens_to(0.5, ([0.0, 10.0, 20.0, 30.0], [0.0, 1.0, 0.0, 1.0])) == 5


def test_a_row_compares_at_equal_tokens_and_seed_by_seed() -> None:
    """Up to 2000 tokens: two seeds of a straight line to 1, against one to 0.2, then 0.6."""
    grid = [0.0, 1000.0, 2000.0]
    row = bench.row("fast", [FAST, FAST], [SLOW, SLOW], grid, 0.8)
    assert (row["final"], row["final +-"], row["gain +-"], row["to level"], row["reached"]) == (
        1,
        0,
        0,
        1.6,
        2,
    )
    assert row["mean"] == pytest.approx(0.5) and row["gain"] == pytest.approx(0.5 - (0.1 + 0.4) / 2)
    slow = bench.row("slow", [SLOW, FAST], [SLOW, SLOW], grid, 1.5)
    assert slow["final"] == pytest.approx(0.8) and slow["final +-"] == pytest.approx(
        12.706 * 0.2, rel=1e-3
    )
    assert slow["to level"] is None and slow["reached"] == 0


def test_a_run_with_more_evaluations_gains_nothing_by_them() -> None:
    """Two runs on one concave curve, of which the other is evaluated at fewer points: on the same
    points they are the same.
    """
    fine = ([0.0, 500.0, 1000.0, 1500.0, 2000.0], [0.0, 0.5, 0.8, 0.9, 1.0])
    coarse = ([0.0, 1000.0, 2000.0], [0.0, 0.8, 1.0])
    grid = bench.coarsest([fine, coarse], 2000.0)
    assert grid == [0, 1000, 2000] and bench.row("fine", [fine] * 2, [coarse] * 2, grid, 0.8)[
        "gain"
    ] == pytest.approx(0)
    assert bench.coarsest([fine, coarse], 1200.0) == [0, 1000, 1200]


def test_curves_that_begin_after_tokens_are_averaged_over_their_own_width() -> None:
    """Runs that are not evaluated before the first step."""
    late = ([1000.0, 2000.0], [0.5, 0.5])
    assert bench.mean_reward([1000.0, 2000.0], late) == pytest.approx(0.5)


@pytest.mark.parametrize("study", bench.STUDIES)
def test_the_options_of_every_arm_are_some(study: str) -> None:
    for arm, options in bench.STUDIES[study].items():
        config = parse([*bench.CONFIG, *bench.SHORT, *options, "--model.path", "warm"])
        assert config is not None, arm
        load_algorithm(config)
    assert len({tuple(options) for options in bench.STUDIES[study].values()}) == len(
        bench.STUDIES[study]
    )


def test_mismatch_is_that_of_the_steps_that_trained(tmp_path: Path) -> None:
    lines = [{"step": 2, "logprob_mismatch": 3.0}, {"step": 0}, {"step": 1, "logprob_mismatch": 1}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert bench.mismatch(tmp_path) == 2.0
