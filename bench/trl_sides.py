"""The sides of `bench.trl`, each in a process of its own:  python -m bench.trl_sides JOB.json

Every side takes its questions, sizes and optimizer from one and the same config of flowtrain, and
writes how long the stages of its steps took, what memory it took, and the weights it ended with.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.records import Group, Task, Trajectory, UserError
from flowtrain.rewards import RewardFunctions, score

STAGES = ("sampling", "reward", "training", "publish", "load", "rest")
"""Where the wall time of a step goes; `rest` is what no other stage claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process does."""

    side: str
    """flowtrain, trl, or held-out: the mean reward of a model."""
    out: str
    """Folder for result.json and the weights."""
    options: tuple[str, ...]
    """The config, as on flowtrain's command line."""
    micro_batch: int = 0
    """trl: sequences per forward pass; 0: all."""
    keeps_memory: bool = False
    """trl: have the C library keep freed memory, as flowtrain does."""

    @property
    def config(self) -> Config:
        config = parse(self.options)
        assert config is not None
        return config


@dataclass(frozen=True, slots=True)
class Result:
    """What a side measured."""

    steps: list[dict[str, float]]
    """Per step: seconds by stage, `step`, `tokens` (of responses) and `reward_mean`."""
    peak_bytes: int
    """The largest resident set until the last step ended."""
    prompts: list[str]
    """Per step, a digest of the ids of its prompts in any order."""
    model: str
    """Folder of the final weights."""
    rewards: list[float] = field(default_factory=list)
    """held-out: the reward of each question."""


class Stopwatch:
    """Divides time among stages: the innermost one that is open gets it, and else the rest."""

    def __init__(self) -> None:
        self._open = ["rest"]
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._since = time.monotonic()

    def open(self, stage: str) -> None:
        self._turn()
        self._open.append(stage)

    def close(self) -> None:
        self._turn()
        self._open.pop()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.open(stage)
        yield
        self.close()

    def lap(self) -> dict[str, float]:
        """Return the seconds by stage since the last lap."""
        self._turn()
        seconds, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return {**seconds, "step": sum(seconds.values())}

    def _turn(self) -> None:
        now = time.monotonic()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


def digest(prompts: Iterable[Sequence[int]]) -> str:
    """Return a digest of the different prompts of a step, in any order."""
    ids = sorted({tuple(prompt) for prompt in prompts})
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def rewards_of(
    tasks: Sequence[Task], answers: Sequence[str], functions: RewardFunctions | None
) -> list[float]:
    """Score responses as flowtrain scores rollouts."""
    rollouts = [
        Trajectory(task, (), answer, 0.0, 0) for task, answer in zip(tasks, answers, strict=True)
    ]
    (group,) = score([Group(0, tuple(rollouts))], functions=functions)
    return [float(trajectory.reward or 0.0) for trajectory in group.trajectories]


def peak_bytes() -> int:
    """Return the largest resident set that this process had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def run_flowtrain(job: Job) -> Result:
    """Train with `flowtrain.train` itself; only its timer and its scoring have a clock added."""
    from flowtrain.train import train
    from flowtrain.trainer.checkpoint import place
    from flowtrain.utils.step_timer import StepTimer

    config = job.config
    watch = Stopwatch()

    def timed_score(*args: Any) -> list[Group]:
        with watch("reward"):
            return score(*args)

    class Timer(StepTimer):
        """The timer of a step, which also notes the time of rewards and the memory so far."""

        def metrics(self) -> dict[str, float]:
            own = {"reward_s": watch.lap()["reward"], "peak_bytes": peak_bytes()}
            return {**super().metrics(), **own}

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
    from flowtrain.tasks.sets import MAIN_SPLIT
    from flowtrain.trainer.distributed import World
    from flowtrain.trainer.setup.components import RunComponents
    from flowtrain.trainer.setup.placement import Placement

    world = World.join("cpu")
    components = RunComponents.prepare(job.config, Placement.colocated(world))
    config = components.config
    engines = components.make_policy_engines({})
    agent = components.make_agent(engines, config.agent.eval_max_turns)
    tasks = components.tasks.held_out[MAIN_SPLIT]
    found = roll_out(components, agent, tasks, config.run.seed, "held-out questions")
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
