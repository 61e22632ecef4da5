"""A small run as the loop would have left it: the real writers, a real tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import make
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flowtrain.logging import MetricsLog, RunDir, TrajectoryLog, atomic_write_text
from flowtrain.records import (
    Action,
    BranchPoint,
    FinishReason,
    Group,
    Sample,
    SampleId,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)
from tests.logging.page.browser import Browser

CONFIG = """
[model]
path = "tiny"
[rollout]
num_questions = 2
group_size = 4
[train]
num_steps = 4
num_minibatches = 1
"""
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 4, 2, 4


@pytest.fixture(scope="session")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE of 300 tokens: every character beyond ASCII is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        ["What is the capital of Chad? Sub-Goal: capital of Chad Tool Name: Search"] * 9, trainer
    )
    return tokenizer


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    """What a step trains: every turn of the groups whose rewards differ."""
    return [
        Sample((1,), (2,), (-1.0,), (each.reward - 0.5,), (1.0,), 0, SampleId(group.index, n, turn))
        for group in groups
        if len({each.reward for each in group.trajectories}) > 1
        for n, each in enumerate(group.trajectories)
        for turn in range(len(each.turns))
    ]


class RunMaker:
    """Writes runs; `text` is what the planner, the tools and the task say."""

    def __init__(self, tokenizer: Tokenizer, root: Path) -> None:
        self.tokenizer, self.root = tokenizer, root

    def turn(
        self,
        text: str,
        memory: str = "",
        finish_reason: FinishReason = FinishReason.STOP,
        **changes: Any,
    ) -> Turn:
        prompt = self.ids(f"Question: {text}{memory}\nSub-Goal:")
        response = (*self.ids(f" {text}\nTool Name: Search"), 0)
        said = make.call(
            response,
            prompt,
            [-0.01 * n for n in range(len(response))],
            reason=finish_reason,
            spans=(VersionSpan(0, 3, 6), VersionSpan(3, len(response), 7)),
            text=text,
        )
        fields = {
            "result": ToolResult(text, seconds=0.1),
            "arguments": json.dumps({"query": text}),
            "seconds": 0.5,
            "plan_s": 0.25,
        }
        action = Action(f"why {text}", "", text, "Search")
        return make.turn(said, action, **{**fields, **changes})

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text.encode(errors="replace").decode()).ids)

    def trajectory(self, text: str, reward: float | None, member: int) -> Trajectory:
        first, both = f"\n1. {text}", f"\n1. {text}\n2. more"
        turns = (
            self.turn(text),
            self.turn(text, first),
            self.turn(text, both, verdict=Verdict.STOP),
        )
        task = Task(f"t-{text}", text, (text, "other"), "lookup", 2)
        number = 2**63 - 1 - member
        return make.rollout(*turns, task=task, answer=text, seconds=1.5, seed=number, reward=reward)

    def group(self, index: int, step: int, text: str) -> Group:
        rewards = [
            float(member < (step + index) % (GROUP_SIZE + 1)) for member in range(GROUP_SIZE)
        ]
        made = [self.trajectory(text, each, n) for n, each in enumerate(rewards)]
        return make.group(*made, index=index)

    def branched(self, text: str) -> Group:
        """Two roots, and three branches: of turn 2 of the first, two of turn 1 of the second."""
        roots = [self.trajectory(text, reward, n) for n, reward in enumerate((1.0, 0.0))]
        points = [BranchPoint(0, 1, 2, 2.5), BranchPoint(1, 0, 5, 1.25), BranchPoint(1, 0, 0, 3.0)]
        rewards = (0.0, 1.0, 0.0)
        made = [self.trajectory(text, reward, n) for n, reward in enumerate(rewards, 2)]
        branches = [
            replace(each, branch=point, answer=f"branch {n}")
            for n, (each, point) in enumerate(zip(made, points, strict=True), 2)
        ]
        return make.group(*roots, *branches)

    def make(self, text: str = "What is the capital of Chad?", name: str = "run") -> Path:
        run = RunDir.create(
            self.root / name, CONFIG, {"seed": 3, "world_size": 1, "git_commit": "0123456789abcdef"}
        )
        atomic_write_text(run.tokenizer, self.tokenizer.to_str())
        metrics = MetricsLog(run.path, tensorboard=False)
        log, held_out = TrajectoryLog(run.path, 0, 0), TrajectoryLog(run.path, 0, 0, "held_out")
        for step in range(1, NUM_STEPS + 1):
            groups = [self.group(index, step, f"{text} {step}") for index in range(NUM_GROUPS)]
            log.log(step, step - 1, groups, samples_of(groups))
            metrics.log(
                {
                    "step": step,
                    "version": step,
                    "reward_mean": step / 10,
                    "tool_share/Search": 1.0,
                    "collect_s": 2.0,
                    "kl_ref": 1e-9,
                }
            )
        held_out.log(4, 4, [Group(n, (self.trajectory(text, n % 2, 0),)) for n in range(6)])
        (run.path / "summary.json").write_text(
            json.dumps(
                {
                    side: {"eval_reward": reward, "splits": {"texts": {"sampled": reward}}}
                    for side, reward in (("warm", 0.25), ("trained", 0.75))
                }
            )
        )
        return run.path


@pytest.fixture
def runs(tokenizer: Tokenizer, tmp_path: Path) -> RunMaker:
    return RunMaker(tokenizer, tmp_path)


@pytest.fixture
def run(runs: RunMaker) -> Path:
    return runs.make()


@pytest.fixture
def data_of() -> Callable[[str], dict[str, Any]]:
    """The data block of a page, parsed."""

    def parse(page: str) -> dict[str, Any]:
        (block,) = re.findall(
            r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
        )
        return dict(json.loads(block, parse_constant=pytest.fail))

    return parse
