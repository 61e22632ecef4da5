"""The true score falls in a run that is made to hack its reward, and rises in the same run with an
honest one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_learning import flow_grpo, no_side_effects, warm_up, write_questions

__all__ = ["no_side_effects"]
LONG = """
seen = set()

def score(task, answer, trajectory):
    seen.add(task.question)
    return min(trajectory.num_sampled_tokens / 48, 1.0)
"""
TRUE = """
from flowtrain.rewards import SCORERS

seen = set()

def score(task, answer, trajectory):
    seen.add(task.question)
    return SCORERS["exact"](task, answer)
"""


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("no_side_effects")
def test_the_true_score_tells_a_hacked_reward_from_an_honest_one(tmp_path: Path) -> None:
    write_questions(tmp_path)
    warm_up(tmp_path, seed=1)
    (tmp_path / "long.py").write_text(LONG)
    (tmp_path / "true.py").write_text(TRUE)
    options: dict[str, Any] = {
        "eval": {"every": 5, "true_scorer": f"{tmp_path}/true.py:score"},
        "train": {"num_steps": 15, "lr": 1e-3},
    }
    hack = {"function": f"{tmp_path}/long.py:score"}
    hacked = flow_grpo(tmp_path, "hacked", seed=1, reward=hack, **options)
    warm, trained = hacked["warm"], hacked["trained"]
    assert trained["eval_reward"] > warm["eval_reward"] + 0.4
    assert warm["eval_true_score"] > 0.2 > 0.05 > trained["eval_true_score"]
    evaluated = [x for x in read(tmp_path / "hacked" / "metrics.jsonl") if "eval_reward" in x]
    assert [each["step"] for each in evaluated] == [0, 5, 10, 15]
    assert all(each["eval_true_score_error"] >= 0 for each in evaluated)

    rewards = [each["reward"] for each in read(tmp_path / "hacked" / "trained.jsonl")]
    assert sum(rewards) / len(rewards) == pytest.approx(trained["eval_reward"]), "its own rollouts"

    held_out = {each["question"] for each in read(tmp_path / "hacked" / "held_out.jsonl")}
    trained_on = {each["question"] for each in read(tmp_path / "hacked" / "trajectories.jsonl")}
    assert not held_out & trained_on
    judged = _seen(tmp_path / "true.py")
    assert judged == held_out, "the true scorer sees held-out rollouts and no others"

    honest = flow_grpo(tmp_path, "honest", seed=1, **options)
    assert honest["trained"]["eval_true_score"] > 0.6
    assert honest["trained"]["eval_true_score"] == honest["trained"]["eval_reward"]


def _seen(path: Path) -> set[str]:
    """The questions that a scorer of the run, whose module is loaded once, was asked about."""
    from flowtrain.utils.plugins import load_object

    _, found = load_object(f"{path}:seen", "")
    assert isinstance(found, set)
    return found
