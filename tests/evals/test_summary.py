"""Accuracy, spread and interval against numbers worked out by hand; the tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.evals.paper import BENCHMARKS, PAPER
from flowtrain.evals.records import Entry
from flowtrain.evals.summary import as_json, summarise, table, wilson

TOOLS = ("Search", "Python_Coder")
USAGE = {"prompt_tokens": 1000, "reply_tokens": 50, "cost": 0.25}


def record(
    pid: int,
    trial: int,
    reward: float | None,
    error: str = "",
    benchmark: str = "aime24",
    seconds: float = 2.0,
) -> Entry:
    """Two turns; as it is read back from a line of the log."""
    action = {"justification": "", "context": "", "sub_goal": "1", "tool_name": "Search"}
    turns = [
        {"action": action, "is_error": False, "num_prompt_tokens": 10, "response_ids": [1, 2]},
        {"action": None, "is_error": True, "num_prompt_tokens": 20, "response_ids": [1, 2, 3, 4]},
    ]
    head = {
        "benchmark": benchmark,
        "pid": str(pid),
        "trial": trial,
        "step": trial,
        "reward": reward,
        "error": error,
    }
    return Entry.of(
        {
            **head,
            "scored_by": "math",
            "truncated": "",
            "seconds": seconds,
            "turns": turns,
            "usage": USAGE,
        }
    )


TWO_TRIALS = [
    record(pid, trial, float(pid < right)) for trial, right in ((1, 1), (2, 2)) for pid in range(4)
]
"""4 questions: 1 right in the first trial, 2 in the second."""


def test_accuracy_and_spread_by_hand() -> None:
    """0.25 and 0.5: their mean is 0.375, their squared distances from it sum to 2/64, over 1."""
    (score,) = summarise(TWO_TRIALS, TOOLS)
    assert (score.num_questions, score.by_trial, score.accuracy) == (4, (0.25, 0.5), 0.375)
    assert score.spread == pytest.approx(math.sqrt(2) / 8)
    assert (score.low, score.high) == wilson(0.375, 4)
    assert (score.num_failed, score.seconds_mean, score.scored_by) == (0, 2.0, {"math": 8})
    assert (score.tokens_mean, score.frozen_tokens_mean, score.cost) == (36, 1050, 2.0), (
        "10 + 2 + 20 + 4; 8 rollouts of 0.25"
    )
    assert (score.stats.prompt_len_mean, score.stats.response_len_mean) == (15, 3)
    assert (
        score.stats.turns_mean,
        score.stats.malformed_share,
        score.stats.tool_shares["Search"],
    ) == (2.0, 0.5, 0.5)


def test_one_trial_has_no_spread() -> None:
    (score,) = summarise(TWO_TRIALS[:4], TOOLS)
    assert score.spread is None and score.by_trial == (0.25,)


@pytest.mark.parametrize(
    ("num_right", "num", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(num_right: int, num: int, low: float, high: float) -> None:
    assert wilson(num_right / num, num) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500), st.floats(0, 1))
def test_wilson_holds_the_share_and_stays_within_0_and_1(num: int, share: float) -> None:
    low, high = wilson(share, num)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    mirrored = wilson(1 - share, num)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)


def test_failed_rollouts_are_counted_apart_and_do_not_lower_the_accuracy() -> None:
    failed = record(0, 1, None, error="generator: no answer", seconds=500.0)
    (score,) = summarise([failed, record(1, 1, 1.0), record(2, 1, 0.0)], TOOLS)
    assert (score.accuracy, score.num_questions, score.num_failed, score.seconds_mean) == (
        0.5,
        2,
        1,
        2.0,
    )
    assert " 1" in table([score], {}).splitlines()[2], "the table says so"


def test_a_benchmark_of_failures_has_no_accuracy() -> None:
    (score,) = summarise([record(0, 1, None, error="x")], TOOLS)
    assert (score.accuracy, score.low, score.num_failed) == (None, None, 1)
    assert "-" in table([score], {}).splitlines()[2]
    assert as_json([score])["accuracy"] is None


def test_benchmarks_with_the_same_pids_do_not_mix() -> None:
    records = [
        record(0, 1, 1.0),
        record(0, 1, 0.0, benchmark="amc23"),
        record(1, 1, 0.0, benchmark="amc23"),
    ]
    scores = summarise(records, TOOLS)
    assert [(score.benchmark, score.num_questions, score.accuracy) for score in scores] == [
        ("aime24", 1, 1.0),
        ("amc23", 2, 0.0),
    ]
    assert as_json(scores)["accuracy"] == 0.5, "each benchmark counts alike"


def test_the_paper_s_numbers_stand_beside_ours() -> None:
    scores = summarise([record(0, 1, 1.0), record(0, 1, 0.0, benchmark="amc23")], TOOLS)
    lines = table(scores, PAPER | {"other run": {"aime24": 0.123}}).splitlines()
    assert "paper: 7B Flow-GRPO" in lines[0]
    assert lines[2].split()[-3:] == ["16.7", "40.0", "12.3"]
    assert lines[3].split()[-3:] == ["47.4", "61.5", "-"]
    assert lines[4].split() == ["mean", "50.0", "32.0", "50.8", "-"], (
        "the mean of some benchmarks is not that of all"
    )
    assert len(BENCHMARKS) == 10 and PAPER["paper: 7B frozen"]["medqa"] == 0.76
