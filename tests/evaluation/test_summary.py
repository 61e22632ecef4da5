"""Accuracy, spread and interval against numbers worked out by hand; the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping

import make
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.evaluation.rollout_log import Entry
from flowtrain.evaluation.summary import PAPER, Key, Rows, Score, as_json, summarise, table, wilson
from flowtrain.inference.chat import Usage
from flowtrain.logging import aligned
from flowtrain.logging.rollouts import count_rollouts

TOOLS = ("Search", "Python_Coder")


Entries = list[tuple[Key, Entry]]


def record(
    pid: int,
    trial: int,
    reward: float | None,
    error: str = "",
    benchmark: str = "aime24",
    seconds: float = 2.0,
    system: tuple[str, int] = ("policy", 3),
    metrics: Mapping[str, float] | None = None,
) -> tuple[Key, Entry]:
    """A rollout of two turns."""
    turns = (
        make.turn(make.call(2, 10), "Search"),
        make.turn(make.call(4, 20), problem="malformed"),
    )
    counts = count_rollouts([make.rollout(*turns, reward=1.0)], TOOLS)
    usage = Usage(1000, 50, 0.25)
    entry = Entry(str(pid), error, reward, "math", seconds, usage, counts, metrics or {})
    return Key(*system, benchmark, str(pid), trial), entry


def one_system(entries: Entries, *benchmarks: str) -> Rows:
    return summarise(dict(entries), [("policy", 3)], benchmarks or ("aime24",), TOOLS)


def score_of(entries: Entries) -> Score:
    ((score,),) = one_system(entries).values()
    return score


def lines_of(rows: Rows, references: Mapping[str, Mapping[str, float]]) -> list[str]:
    return aligned(table(rows, references)).splitlines()


TWO_TRIALS = [
    record(pid, trial, float(pid < right)) for trial, right in ((1, 1), (2, 2)) for pid in range(4)
]
"""4 questions: 1 right in the first trial, 2 in the second."""


def test_accuracy_and_spread_by_hand() -> None:
    """0.25 and 0.5: their mean is 0.375, their squared distances from it sum to 2/64, over 1."""
    score = score_of(TWO_TRIALS)
    assert score.accuracy is not None
    assert (score.num_questions, score.accuracy.by_trial) == (4, (0.25, 0.5))
    assert score.accuracy.mean == 0.375
    assert score.accuracy.spread == pytest.approx(math.sqrt(2) / 8)
    assert (score.low, score.high) == wilson(0.375, 4)
    assert (score.num_failed, score.seconds_mean, score.scored_by) == (0, 2.0, {"math": 8})
    assert (score.frozen_tokens_mean, score.cost) == (1050, 2.0), "8 rollouts of 0.25"
    assert (score.stats.prompt_len_mean, score.stats.response_len_mean) == (15, 3)
    found = (score.stats.turns_mean, score.stats.malformed_share, score.stats.tool_shares["Search"])
    assert found == (2.0, 0.5, 0.5)


def test_one_trial_has_no_spread() -> None:
    score = score_of(TWO_TRIALS[:4])
    assert score.accuracy is not None
    assert score.accuracy.spread is None and score.accuracy.by_trial == (0.25,)


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
    entries = [failed, record(1, 1, 1.0), record(2, 1, 0.0)]
    score = score_of(entries)
    assert score.accuracy is not None and score.accuracy.mean == 0.5
    assert (score.num_questions, score.num_failed, score.seconds_mean) == (2, 1, 2.0)
    assert table(one_system(entries), {})[1][7] == "1", "the table says so"


def test_trials_count_alike_though_rollouts_of_one_failed() -> None:
    failed = [record(pid, 2, None, error="generator: no answer") for pid in (1, 2)]
    whole = [record(pid, 1, float(pid == 0)) for pid in range(3)]
    accuracy = score_of([*whole, record(0, 2, 1.0), *failed]).accuracy
    assert accuracy is not None and accuracy.by_trial == pytest.approx((1 / 3, 1.0))
    assert accuracy.mean == pytest.approx(2 / 3)


def test_a_benchmark_of_failures_has_no_accuracy() -> None:
    rows = one_system([record(0, 1, None, error="x")])
    ((score,),) = rows.values()
    assert (score.accuracy, score.low, score.num_failed) == (None, None, 1)
    assert table(rows, {})[1][4:8] == ["-", "-", "- to -", "1"]
    assert as_json(rows)["averages"][0]["accuracy"] is None


def test_benchmarks_with_the_same_pids_do_not_mix() -> None:
    records = [
        record(0, 1, 1.0),
        record(0, 1, 0.0, benchmark="amc23"),
        record(1, 1, 0.0, benchmark="amc23"),
    ]
    rows = one_system(records, "aime24", "amc23")
    found = as_json(rows)
    assert [
        (score["benchmark"], score["num_questions"], score["accuracy"]["mean"])
        for score in found["scores"]
    ] == [("aime24", 1, 1.0), ("amc23", 2, 0.0)]
    assert found["averages"][0]["accuracy"]["mean"] == 0.5, "each benchmark counts alike"


def test_the_paper_s_numbers_stand_beside_ours() -> None:
    entries = [record(0, 1, 1.0), record(0, 1, 0.0, benchmark="amc23")]
    references = PAPER | {"other run": {"aime24": 0.123}}
    lines = lines_of(one_system(entries, "aime24", "amc23"), references)
    assert "paper: 7B Flow-GRPO" in lines[0]
    assert lines[2].split()[-3:] == ["16.7", "40.0", "12.3"]
    assert lines[3].split()[-3:] == ["47.4", "61.5", "-"]
    assert lines[4].split()[-3:] == ["32.0", "50.8", "-"], (
        "the mean of some benchmarks is not that of all"
    )
    assert len(PAPER["paper: 7B frozen"]) == 10 and PAPER["paper: 7B frozen"]["medqa"] == 0.76


# ---- several systems, and several metrics


def sweep() -> Rows:
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
    return summarise(dict(entries), [("gpt", 3), ("gpt", 10)], ("nq", "aime24"), TOOLS)


def test_the_average_s_spread_is_that_of_the_trials_averages() -> None:
    """With 10 turns the trials' averages are 1 and 1/2: 0.75, and sqrt(2)/4 = 0.354 apart."""
    found = as_json(sweep())
    averages = [each["accuracy"] for each in found["averages"]]
    assert [each["mean"] for each in averages] == [0.25, 0.75]
    assert [each["spread"] for each in averages] == pytest.approx([math.sqrt(2) / 4] * 2)
    expected = [("gpt", 3), ("gpt", 10)]
    assert [(each["planner"], each["max_turns"]) for each in found["averages"]] == expected
    assert found["scores"][0]["f1"] == {
        "mean": 0.75,
        "by_trial": (1.0, 0.5),
        "spread": pytest.approx(math.sqrt(2) / 4),
    }


def test_the_table_of_a_sweep() -> None:
    first, *lines = table(sweep(), {"paper": {"nq": 0.5}})
    assert first[:6] == ["planner", "budget", "benchmark", "questions", "mean %", "spread"]
    assert first[6:] == ["95% interval", "failed", "EM", "F1", "turns", "paper"]
    without_interval = [[*line[:6], *line[7:]] for line in lines]
    assert without_interval[:3] == [
        ["gpt", "3 turns", "nq", "1", "50.0", "70.7", "0", "50.0", "75.0", "2.00", "50.0"],
        ["gpt", "3 turns", "aime24", "1", "0.0", "0.0", "0", "-", "-", "2.00", "-"],
        ["gpt", "3 turns", "average", "", "25.0", "35.4", "", "-", "-", "", "-"],
    ]
    assert without_interval[5][:6] == ["gpt", "10 turns", "average", "", "75.0", "35.4"]
