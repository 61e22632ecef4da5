"""Two steps of Flow-GRPO on a real instruct model, as `configs/smollm2.toml` has it but smaller.

FLOWTRAIN_SMOLLM2 names the folder that `make smollm2` makes. On two cores it takes half a minute.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_runs import Server, read

pytest_plugins = ("cli_runs",)
FOLDER = Path(os.environ.get("FLOWTRAIN_SMOLLM2", "models/SmolLM2-135M-Instruct")).resolve()
OPTIONS = {
    "config": Path("configs/smollm2.toml").resolve(),
    "model.path": FOLDER,
    "reward.function": f"{Path('examples/smollm2/reward.py').resolve()}:number",
    "rollout.num_questions": 2,
    "rollout.group_size": 4,
    "algorithm.equal_groups": "keep",
    "train.num_steps": 2,
    "eval.every": 0,
    "eval.at_ends": "false",
    "eval.num_tasks": 4,
    "run.device": "cpu",
    "log.tensorboard": "false",
}


@pytest.mark.slow
@pytest.mark.skipif(
    not (FOLDER / "source.json").is_file(), reason=f"{FOLDER} was not made: `make smollm2`"
)
def test_two_steps_on_the_real_model(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "products.jsonl"
    rows = [{"question": f"{a} * {b} =", "answer": a * b} for a in range(2, 9) for b in range(2, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))]
    words += ["--tasks.path", str(path), "--run.dir", str(tmp_path / "run")]
    process = server.start("train", *words)
    assert process.wait(280.0) == 0, process.err.read_text()[-2000:]
    steps = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["num_tokens"] > 0 for line in steps)
    assert all(line["logprob_mismatch"] < 1e-4 for line in steps), "sampler and trainer agree"
    rollouts = read(tmp_path / "run" / "trajectories.jsonl")
    assert {rollout["scored_by"] for rollout in rollouts} == {OPTIONS["reward.function"]}
    assert all(len(rollout["turns"]) == 1 for rollout in rollouts)
