"""What the sides of `bench.trl` share: the job, what was measured, and the clock."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.types import Group, Task, Trajectory

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
    generation: str = ""
    """trl: how transformers generates, a name of `bench.trl_trainer.GENERATION`."""
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


def rewards_of(tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
    """Score responses as flowtrain scores rollouts."""
    from flowtrain.rewards import score

    rollouts = [
        Trajectory(task, (), answer, 0.0, 0) for task, answer in zip(tasks, answers, strict=True)
    ]
    (group,) = score([Group(0, tuple(rollouts))])
    return [float(trajectory.reward or 0.0) for trajectory in group.trajectories]


def peak_bytes(with_children: bool = False) -> int:
    """Return the largest resident set that this process had, or the sum over it and its children's
    children, each at its own peak.
    """
    return sum(map(_peak_of, _family(os.getpid()) if with_children else [os.getpid()]))


def _family(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for word in words for each in _family(int(word)))]


def _peak_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), "0")
    return int(kib) * 1024
