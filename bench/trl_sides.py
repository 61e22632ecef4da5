"""The sides of `bench.trl`, each in a process of its own:  python -m bench.trl_sides JOB.json

Every side takes its questions, sizes and optimizer from one and the same config of flowtrain, and
writes how long the stages of its steps took, what memory it took, and the weights it ended with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.trl_records import Job, Result, Stopwatch, digest, peak_bytes
from flowtrain.types import Group, UserError


def run_flowtrain(job: Job) -> Result:
    """Train with `flowtrain.train` itself; only its timer and its scoring have a clock added."""
    from flowtrain.rewards import score
    from flowtrain.train import train
    from flowtrain.training.checkpoint import place
    from flowtrain.utils.step_timer import StepTimer

    config = job.config
    watch = Stopwatch()

    def timed_score(*args: Any) -> list[Group]:
        with watch("reward"):
            return score(*args)

    class Timer(StepTimer):
        """The timer of a step, which also notes the time of rewards and the memory so far."""

        def metrics(self) -> dict[str, float]:
            peak = peak_bytes(with_children=config.rollout.engine == "vllm")
            return {**super().metrics(), "reward_s": watch.lap()["reward"], "peak_bytes": peak}

    with patch("flowtrain.train.score", timed_score), patch("flowtrain.train.StepTimer", Timer):
        code = train(config)
    assert code == 0, f"flowtrain.train ended with {code}"
    run = Path(config.run.dir)
    lines = [line for line in _read(run / "metrics.jsonl") if line["step"] > 0]
    rollouts = _read(run / "trajectories.jsonl")
    return Result(
        [_own_stages(line) for line in lines],
        max(int(line["peak_bytes"]) for line in lines),
        [_own_digest(rollouts, line["step"]) for line in lines],
        str(place(run / "checkpoints", config.train.num_steps) / "model"),
    )


def _own_stages(line: Mapping[str, float]) -> dict[str, float]:
    """Translate a line of metrics.jsonl; checkpoints are no part of a step."""
    stages = {
        "sampling": line["collect_s"] - line["reward_s"],
        "reward": line["reward_s"],
        "training": line["train_s"],
        "publish": line["publish_s"],
        "load": line["load_s"],
        "rest": line["branch_s"] + line["eval_s"] + line["other_s"],
    }
    step = sum(stages.values())
    return {
        **stages,
        "step": step,
        "tokens": line["num_sampled_tokens"],
        "reward_mean": line["reward_mean"],
    }


def _own_digest(rollouts: Sequence[Mapping[str, Any]], step: int) -> str:
    turns = [turn for each in rollouts if each["step"] == step for turn in each["turns"]]
    return digest(turn["prompt_ids"] for turn in turns)


def run_held_out(job: Job) -> Result:
    """Sample a response to every held-out question with the torch engine, and score it."""
    from flowtrain.evaluation.evaluator import roll_out
    from flowtrain.run.components import RunComponents
    from flowtrain.tasks.sets import MAIN_SPLIT
    from flowtrain.training.world import World

    world = World.join("cpu")
    components = RunComponents.prepare(job.config, world)
    config = components.config
    engines = components.make_policy_engines({})
    found = roll_out(
        components.make_agent(engines, config.agent.eval_max_turns),
        components.tasks.held_out[MAIN_SPLIT],
        config.run.seed,
        world,
        config.rollout.max_in_flight,
    )
    rewards = [float(trajectory.reward or 0.0) for trajectory in found]
    components.close()
    world.leave()
    return Result([], peak_bytes(), [], config.model.path, rewards)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(argv: Sequence[str]) -> None:
    fields = json.loads(Path(argv[0]).read_text())
    job = Job(**{**fields, "options": tuple(fields["options"])})
    try:
        result = _run(job)
    except UserError as error:
        raise SystemExit(str(error)) from None
    Path(job.out, "result.json").write_text(json.dumps(asdict(result)))


def _run(job: Job) -> Result:
    if job.side == "flowtrain":
        return run_flowtrain(job)
    if job.side == "held-out":
        return run_held_out(job)
    from bench.trl_trainer import run_trl

    return run_trl(job)


if __name__ == "__main__":
    main(sys.argv[1:])
