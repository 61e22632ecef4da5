"""What a session does around the training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowtrain.config import Config
from flowtrain.run.policy_trainer import PolicyTrainer
from flowtrain.run.run import Run


class Engine:
    def __init__(self, called: list[str]) -> None:
        self.called = called

    def sleep(self) -> None:
        self.called.append("engine sleeps")


class Trainer:
    def __init__(self, called: list[str]) -> None:
        self.called = called

    def step(self, minibatches: Any, number: int) -> dict[str, float]:
        self.called.append("trainer steps")
        return {"num_minibatches": len(minibatches)}


@pytest.mark.parametrize("sleep", [False, True])
def test_the_engine_sleeps_while_the_rank_trains_and_finds_its_memory_free(
    monkeypatch: pytest.MonkeyPatch, sleep: bool
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("torch gives back"))
    config = Config.model_validate({"vllm": {"sleep": sleep}})
    components: Any = type("RunComponents", (), {"config": config})
    session, trainer = Run(config), Trainer(called)
    session._engine = Engine(called)  # type: ignore[assignment]
    session._policy_trainer = PolicyTrainer(components, None, None, trainer, None)  # type: ignore[arg-type]
    assert session.train(1, [[], []]) == {"num_minibatches": 2}
    assert called == ["engine sleeps", "trainer steps", *(["torch gives back"] if sleep else [])]


def test_a_rank_that_only_samples_does_not_put_its_engine_to_sleep() -> None:
    called: list[str] = []
    session = Run(Config())
    session._engine, session._policy_trainer = Engine(called), None  # type: ignore[assignment]
    assert session.train(1, [[]]) == {} and called == []
