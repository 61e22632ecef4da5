"""Two steps of Flow-GRPO on the folder that `make smollm2` makes, with questions of reasoning-gym.

FLOWTRAIN_SMOLLM2 names the folder. On two cores it takes a minute or two.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_runs import Server, read

pytest_plugins = ("cli_runs",)
FOLDER = os.environ.get("FLOWTRAIN_SMOLLM2", "")
OPTIONS = {
    "model.path": FOLDER and str(Path(FOLDER).resolve()),
    "agent.prompt": "full",
    "agent.max_turns": 1,
    "agent.eval_max_turns": 1,
    "agent.tools": '["Base_Generator"]',
    "tasks.name": "reasoning-gym",
    "tasks.gym": "{leg_counting = {}, chain_sum = {}}",
    "tasks.num_train": 40,
    "rollout.num_questions": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 24,
    "algorithm.kl_coef": 0.0,
    "algorithm.mode": "released",  # trains groups of one reward, too
    "train.num_steps": 2,
    "train.num_minibatches": 1,
    "train.lr": 1e-5,
    "train.token_budget": 2048,
    "eval.every": 0,
    "eval.num_tasks": 1,
    "run.device": "cpu",
    "log.tensorboard": "false",
}


@pytest.mark.skipif(not FOLDER, reason="FLOWTRAIN_SMOLLM2 names no folder made by `make smollm2`")
def test_two_steps_on_the_real_model(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="needs pip install 'flowtrain[gym]'")
    words = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))]
    process = server.start("train", *words, "--run.dir", str(tmp_path / "run"))
    assert process.wait(280.0) == 0, process.err.read_text()[-2000:]
    steps = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["num_tokens"] > 0 for line in steps)
    assert all(line["logprob_mismatch"] < 1e-4 for line in steps), "sampler and trainer agree"
    rollouts = read(tmp_path / "run" / "trajectories.jsonl")
    assert {rollout["scored_by"] for rollout in rollouts} == {"reasoning-gym"}
