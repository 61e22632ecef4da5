from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowtrain.report import comparison_table, rollout_text, write_summary
from flowtrain.types import Trajectory, UserError

WARM: dict[str, Any] = {
    "eval_reward": 0.285,
    "eval_reward_greedy": 0.31,
    "splits": {
        "texts": {"sampled": 0.285, "greedy": 0.31},
        "entities": {"sampled": 0.25, "greedy": 0.3},
        "forms": {"sampled": 0.2},
    },
    "by_num_turns": {"1": 0.5, "10": 0.1, "2": 0.3},
    "by_kind": {"lookup": 0.5, "chain": 0.2},
    "tool_shares": {"Lookup": 1.0},
    "turns_mean": 1.52,
}
TRAINED: dict[str, Any] = {
    "eval_reward": 0.875,
    "eval_reward_greedy": 0.3,
    "splits": {
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
        "                            frozen  trained  difference\n"
        "-------------------------------------------------------\n"
        "held-out reward\n"
        "  texts, sampled             0.285    0.875      +0.590\n"
        "  texts, greedy              0.310    0.300      -0.010\n"
        "  entities, sampled          0.250    0.750      +0.500\n"
        "  entities, greedy           0.300    0.800      +0.500\n"
        "  forms, sampled             0.200    0.600      +0.400\n"
        "  forms, greedy                  -    0.650           -\n"
        "by turns needed (sampled)\n"
        "  1                          0.500    0.950      +0.450\n"
        "  2                          0.300    0.800      +0.500\n"
        "  10                         0.100    0.700      +0.600\n"
        "by kind (sampled)\n"
        "  chain                      0.200        -           -\n"
        "  lookup                     0.500    0.950      +0.450\n"
        "tool use\n"
        "  Lookup                   100.0 %   62.5 %    -37.5 pp\n"
        "  Python                     0.0 %   37.5 %    +37.5 pp\n"
        "rollouts\n"
        "  turns per rollout           1.52     2.31       +0.79\n"
    )


def test_comparison_table_of_little() -> None:
    text = comparison_table({"eval_reward": 0.5}, {"tool_shares": {"Lookup": 1.0}})
    assert "by kind" not in text
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert rows["texts, sampled"] == ["0.500", "-", "-"]
    assert rows["Lookup"] == ["-", "100.0", "%", "-"]


def test_rollout_text(trajectory: Trajectory) -> None:
    assert rollout_text(trajectory) == (
        "question   What is the capital of Chad?\n"
        "\n"
        "turn 1 (2 tokens, 0.5 s)\n"
        "  malformed  I would\n"
        "             rather chat\n"
        "             nothing ran: malformed action\n"
        "  verdict    CONTINUE\n"
        "\n"
        "turn 2 (2 tokens, 0.5 s)\n"
        "  sub-goal   Find the capital of Chad\n"
        "  tool       Lookup_Tool\n"
        '  command    lookup("Chad")\n'
        "  result     N'Djamena\n"
        "  verdict    STOP\n"
        "\n"
        "answer     N'Djamena\n"
        "accepted   N'Djamena | Ndjamena\n"
        "reward     0.750 (2 turns, 1.2 s, cut off: turns)\n"
    )


def test_rollout_text_of_odd_rollouts(trajectory: Trajectory) -> None:
    task = dataclasses.replace(
        trajectory.task, answers=("3", "3", "8", "8"), scorer="gameof24", question="x" * 5000
    )
    text = rollout_text(
        dataclasses.replace(trajectory, task=task, turns=(), answer="", reward=None, truncated="")
    )
    assert "any expression of 3 3 8 8 that makes 24" in text
    assert "answer     (empty)\n" in text
    assert "reward     not scored (0 turns, 1.2 s)\n" in text
    assert "(3800 more characters)" in text and len(text) < 2000


def test_summary_is_sorted_and_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(
        path,
        {
            "splits": {"b": 1, "a": 2},
            "z": float("nan"),
            "by_num_turns": {"10": 1, "2": 0.5},
            "eval_reward": 0.5,
        },
    )
    assert list(json.loads(path.read_text(), parse_constant=pytest.fail)) == [
        "eval_reward",
        "z",
        "by_num_turns",
        "splits",
    ]
    record = json.loads(path.read_text())
    assert record["z"] is None
    assert list(record["by_num_turns"]) == ["2", "10"] and list(record["splits"]) == ["a", "b"]


def test_summary_on_a_full_disk_keeps_the_old_one(
    tmp_path: Path, fill_disk: Callable[[str], None]
) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"a": 1})
    fill_disk("summary.json")
    with pytest.raises(
        UserError, match="No space left on device; free some space and continue with --resume auto"
    ):
        write_summary(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
