"""The second scorer: of held-out rollouts alone, with its standard error, and never of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make
import pytest
import torch

from flowtrain.config import Config
from flowtrain.evaluation.true_score import TrueScorer
from flowtrain.training.world import World
from flowtrain.types import Task, Trajectory, UserError

WORLD = World(0, 1, torch.device("cpu"))


def config(name: str, **eval_options: Any) -> Config:
    return Config.model_validate({"eval": {"true_scorer": name} | eval_options})


def rollout(answer: str, error: str = "") -> Trajectory:
    task, reward = Task("t", "How many?", ("4",)), None if error else 0.5
    return make.rollout(task=task, answer=answer, error=error, reward=reward)


def test_mean_and_standard_error_are_those_of_rollouts_that_finished() -> None:
    scorer = TrueScorer.load(config("exact"), [rollout("4").task])
    assert scorer is not None
    rollouts = [rollout("4"), rollout("4"), rollout("4"), rollout("5"), rollout("4", "no tool")]
    found = scorer.metrics(rollouts, WORLD)
    assert found["eval_true_score"] == 0.75
    assert found["eval_true_score_error"] == pytest.approx((0.75 * 0.25 / 4) ** 0.5)
    assert set(found) == {"eval_true_score", "eval_true_score_error"}
    assert scorer.metrics([], WORLD) == {}


def test_a_function_may_give_any_number_and_fail(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def score(task, answer, trajectory):\n    return -30.0 * float(answer)\n")
    scorer = TrueScorer.load(config(f"{path}:score"), [])
    assert scorer is not None
    found = scorer.metrics([rollout("4"), rollout("2"), rollout("many")], WORLD)
    assert (found["eval_true_score"], found["eval_true_failed"]) == (-90.0, 1.0)
    assert scorer.metrics([rollout("many")], WORLD) == {"eval_true_failed": 1.0}


@pytest.mark.parametrize(
    ("name", "told"),
    [("exakt", "eval.true_scorer='exakt' may be"), ("gone.py:score", "eval.true_scorer='gone.py")],
)
def test_a_scorer_that_is_not_there_is_told_with_its_key(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        TrueScorer.load(config(name), [])


def test_a_built_in_scorer_needs_answers() -> None:
    with pytest.raises(UserError, match=r"eval\.true_scorer='exact' needs an answer"):
        TrueScorer.load(config("exact"), [Task("t", "Why?", ())])
    assert TrueScorer.load(config(""), [Task("t", "Why?", ())]) is None


def test_a_scorer_that_is_never_asked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eval\.true_scorer='exact' is never asked"):
        config("exact", every=0, at_ends=False)
    assert json.loads(config("exact", every=0).model_dump_json())["eval"]["true_scorer"] == "exact"
