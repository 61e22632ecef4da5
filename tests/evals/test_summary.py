"""Accuracy, spread and interval against numbers worked out by hand; the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.evals.paper import PAPER
from flowtrain.evals.records import Entry
from flowtrain.evals.summary import Row, Score, as_json, summarise, wilson
from flowtrain.evals.tables import tables
from flowtrain.metrics import aligned

TOOLS = ("Search", "Python_Coder")
USAGE = {"prompt_tokens": 1000, "reply_tokens": 50, "cost": 0.25}


def record(
    pid: int,
    trial: int,
    reward: float | None,
    error: str = "",
    benchmark: str = "aime24",
    seconds: float = 2.0,
    system: tuple[str, int] = ("policy", 3),
    metrics: Mapping[str, float] | None = None,
) -> Entry:
    """Two turns; as it is read back from a line of the log."""
    action = {"justification": "", "context": "", "sub_goal": "1", "tool_name": "Search"}
    turns = [
        {"action": action, "is_error": False, "num_prompt_tokens": 10, "response_ids": [1, 2]},
        {"action": None, "is_error": True, "num_prompt_tokens": 20, "response_ids": [1, 2, 3, 4]},
    ]
    head = {
        "planner": system[0],
        "max_turns": system[1],
        "metrics": metrics or {},
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


def one_row(entries: list[Entry], *benchmarks: str) -> Row:
    (row,) = summarise(entries, [("policy", 3)], benchmarks or ("aime24",), TOOLS)
    return row


def score_of(entries: list[Entry]) -> Score:
    (score,) = one_row(entries).scores
    return score


def table(row: Row, references: Mapping[str, Mapping[str, float]]) -> str:
    return aligned(tables([row], references)[0])


TWO_TRIALS = [
    record(pid, trial, float(pid < right)) for trial, right in ((1, 1), (2, 2)) for pid in range(4)
]
"""4 questions: 1 right in the first trial, 2 in the second."""


def test_accuracy_and_spread_by_hand() -> None:
    """0.25 and 0.5: their mean is 0.375, their squared distances from it sum to 2/64, over 1."""
    score = score_of(TWO_TRIALS)
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
    score = score_of(TWO_TRIALS[:4])
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
    row = one_row([failed, record(1, 1, 1.0), record(2, 1, 0.0)])
    (score,) = row.scores
    assert (score.accuracy, score.num_questions, score.num_failed, score.seconds_mean) == (
        0.5,
        2,
        1,
        2.0,
    )
    assert " 1" in table(row, {}).splitlines()[2], "the table says so"


def test_a_benchmark_of_failures_has_no_accuracy() -> None:
    row = one_row([record(0, 1, None, error="x")])
    (score,) = row.scores
    assert (score.accuracy, score.low, score.num_failed) == (None, None, 1)
    assert "-" in table(row, {}).splitlines()[2]
    assert as_json([row])["rows"][0]["accuracy"] is None


def test_benchmarks_with_the_same_pids_do_not_mix() -> None:
    records = [
        record(0, 1, 1.0),
        record(0, 1, 0.0, benchmark="amc23"),
        record(1, 1, 0.0, benchmark="amc23"),
    ]
    row = one_row(records, "aime24", "amc23")
    assert [(score.benchmark, score.num_questions, score.accuracy) for score in row.scores] == [
        ("aime24", 1, 1.0),
        ("amc23", 2, 0.0),
    ]
    assert as_json([row])["rows"][0]["accuracy"] == 0.5, "each benchmark counts alike"


def test_the_paper_s_numbers_stand_beside_ours() -> None:
    entries = [record(0, 1, 1.0), record(0, 1, 0.0, benchmark="amc23")]
    lines = table(
        one_row(entries, "aime24", "amc23"), PAPER | {"other run": {"aime24": 0.123}}
    ).splitlines()
    assert "paper: 7B Flow-GRPO" in lines[0]
    assert lines[2].split()[-3:] == ["16.7", "40.0", "12.3"]
    assert lines[3].split()[-3:] == ["47.4", "61.5", "-"]
    assert lines[4].split() == ["mean", "50.0", "32.0", "50.8", "-"], (
        "the mean of some benchmarks is not that of all"
    )
    assert len(PAPER["paper: 7B frozen"]) == 10 and PAPER["paper: 7B frozen"]["medqa"] == 0.76


# ---- several systems, and several metrics


def sweep() -> list[Row]:
    """Two trials of two benchmarks with one question each: with 3 turns 1, 0 and 0, 0 are right,
    with 10 turns 1, 1 and 1, 0.
    """
    rights = {3: ((1.0, 0.0), (0.0, 0.0)), 10: ((1.0, 1.0), (1.0, 0.0))}
    entries = [
        record(0, trial, right, benchmark=name, system=("gpt", limit), metrics=metrics)
        for limit, by_benchmark in rights.items()
        for name, by_trial in zip(("nq", "aime24"), by_benchmark, strict=True)
        for trial, right in enumerate(by_trial, 1)
        for metrics in ([{"em": right, "f1": 0.5 + right / 2}] if name == "nq" else [{}])
    ]
    return summarise(entries, [("gpt", 3), ("gpt", 10)], ("nq", "aime24"), TOOLS)


def test_the_average_s_spread_is_that_of_the_trials_averages() -> None:
    """With 10 turns the trials' averages are 1 and 1/2: 0.75, and sqrt(2)/4 = 0.354 apart."""
    rows = sweep()
    assert [row.accuracy for row in rows] == [0.25, 0.75]
    assert [row.spread for row in rows] == pytest.approx([math.sqrt(2) / 4] * 2)
    json_rows = as_json(rows)["rows"]
    assert [(row["planner"], row["max_turns"], row["accuracy"]) for row in json_rows] == [
        ("gpt", 3, 0.25),
        ("gpt", 10, 0.75),
    ]
    assert json_rows[0]["benchmarks"]["nq"]["metrics"]["f1"] == {
        "mean": 0.75,
        "by_trial": (1.0, 0.5),
        "spread": pytest.approx(math.sqrt(2) / 4),
        "num_rollouts": 2,
    }


def test_the_tables_of_a_sweep() -> None:
    accuracy, em, f1, turns = tables(sweep(), {"paper": {"nq": 0.5}})
    assert accuracy == [
        ["accuracy [%]", "nq", "aime24", "average"],
        ["gpt, 3 turns", "50.0 ± 70.7", "0.0 ± 0.0", "25.0 ± 35.4"],
        ["gpt, 10 turns", "100.0 ± 0.0", "50.0 ± 70.7", "75.0 ± 35.4"],
        ["paper", "50.0", "-", "-"],
    ]
    assert em == [["EM [%]", "nq"], *([line[0], line[1]] for line in accuracy[1:3])]
    assert f1[2] == ["gpt, 10 turns", "100.0 ± 0.0"]
    assert turns[1] == ["gpt, 3 turns", "2.00", "2.00"]
    failed = [record(0, 1, None, "x", system=("gpt", limit)) for limit in (3, 10)]
    rows = summarise(failed, [("gpt", 3), ("gpt", 10)], ("aime24",), TOOLS)
    assert tables(rows, {})[-1] == [
        ["failed rollouts", "aime24"],
        ["gpt, 3 turns", "1"],
        ["gpt, 10 turns", "1"],
    ]


def test_metrics_of_one_system_stand_beside_the_accuracy() -> None:
    judged = [
        record(0, 1, 1.0, benchmark="nq", metrics={"em": 0.0, "f1": 0.5, "judge": 1.0}),
        record(1, 1, 1.0, benchmark="nq", metrics={"em": 1.0, "f1": 1.0}),
    ]
    lines = table(one_row([*judged, record(0, 1, 1.0)], "nq", "aime24"), {}).splitlines()
    assert lines[0].split()[-3:] == ["EM", "F1", "judge"]
    assert lines[2].split()[-3:] == ["50.0", "75.0", "100.0"]
    assert lines[3].split()[-3:] == ["-", "-", "-"]
    assert lines[4].split() == ["mean", "100.0", "50.0", "75.0", "100.0"]
