from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowtrain.logging import comparison_table, markdown, write_summary

WARM: dict[str, Any] = {
    "splits": {
        "texts": {"sampled": 0.285, "greedy": 0.31},
        "entities": {"sampled": 0.25, "greedy": 0.3},
        "forms": {"sampled": 0.2},
    },
    "by_num_turns": {"1": 0.5, "2": 0.3, "10": 0.1},
    "by_kind": {"chain": 0.2, "lookup": 0.5},
    "tool_shares": {"Lookup": 1.0},
    "turns_mean": 1.52,
}
TRAINED: dict[str, Any] = {
    "splits": {
        "texts": {"sampled": 0.875, "greedy": 0.3},
        "entities": {"sampled": 0.75, "greedy": 0.8},
        "forms": {"sampled": 0.6, "greedy": 0.65},
    },
    "by_num_turns": {"1": 0.95, "2": 0.8, "10": 0.7},
    "by_kind": {"lookup": 0.95},
    "tool_shares": {"Lookup": 0.625, "Python": 0.375},
    "turns_mean": 2.31,
}


def test_comparison_table() -> None:
    assert comparison_table(WARM, TRAINED) == (
        "                            before   after  difference\n"
        "------------------------------------------------------\n"
        "held-out reward\n"
        "  texts, sampled             0.285   0.875      +0.590\n"
        "  texts, greedy              0.310   0.300      -0.010\n"
        "  entities, sampled          0.250   0.750      +0.500\n"
        "  entities, greedy           0.300   0.800      +0.500\n"
        "  forms, sampled             0.200   0.600      +0.400\n"
        "  forms, greedy                  -   0.650           -\n"
        "by turns needed (sampled)\n"
        "  1                          0.500   0.950      +0.450\n"
        "  2                          0.300   0.800      +0.500\n"
        "  10                         0.100   0.700      +0.600\n"
        "by kind (sampled)\n"
        "  chain                      0.200       -           -\n"
        "  lookup                     0.500   0.950      +0.450\n"
        "tool use\n"
        "  Lookup                   100.0 %  62.5 %    -37.5 pp\n"
        "  Python                     0.0 %  37.5 %    +37.5 pp\n"
        "rollouts\n"
        "  turns per rollout          1.520   2.310      +0.790\n"
    )


def test_a_lone_row_without_a_name_is_left_out() -> None:
    """Questions of a file have no kind, and nobody knows how many turns they need."""
    side = {"splits": {"texts": {"sampled": 0.5}}, "by_kind": {"": 0.5}, "by_num_turns": {"0": 0.5}}
    assert "by " not in comparison_table(side, side)
    assert "by kind" in comparison_table(side, {**side, "by_kind": {"": 0.5, "sum": 0.1}})


def test_comparison_table_of_little() -> None:
    text = comparison_table(
        {"splits": {"texts": {"sampled": 0.5}}}, {"tool_shares": {"Lookup": 1.0}}
    )
    assert "by kind" not in text
    rows = {line[:18].strip(): line[18:].split() for line in text.splitlines()}
    assert rows["texts, sampled"] == ["0.500", "-", "-"]
    assert rows["Lookup"] == ["-", "100.0", "%", "-"]


def test_summary_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"z": float("nan"), "eval_reward": 0.5})
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert record == {"z": None, "eval_reward": 0.5}


def test_a_table_in_markdown() -> None:
    found = markdown([["a", "b"], ["x|y", "1\n2"]])
    assert found == "| a | b |\n| --- | ---: |\n| x\\|y | 1\\x0a2 |\n"


def test_benchmarks_are_compared_where_they_were_asked() -> None:
    before = {**WARM, "benchmarks": {"eval_accuracy/aime24": 0.1}}
    after = {**TRAINED, "benchmarks": {"eval_accuracy/aime24": 0.3}}
    lines = [line.split() for line in comparison_table(before, after).splitlines()]
    assert ["accuracy/aime24", "0.100", "0.300", "+0.200"] in lines
    assert "benchmarks" not in comparison_table(WARM, TRAINED)
