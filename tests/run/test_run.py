"""The verbs of a run around the training step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowtrain.config import Config
from flowtrain.run.learner import Learner
from flowtrain.run.placement import Placement
from flowtrain.run.run import Run
from flowtrain.training.token_scores import TokenScores
from flowtrain.training.world import World


class Engine:
    def __init__(self, called: list[str]) -> None:
        self.called = called

    def sleep(self) -> None:
        self.called.append("engine sleeps")


class Trainer:
    def __init__(self, called: list[str]) -> None:
        self.called = called

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def optimize(self, minibatches: Any, number: int, scores: TokenScores) -> dict[str, float]:
        self.called.append("trainer steps")
        return {"num_minibatches": len(minibatches)}


def a_run(config: Config, engine: Engine, trainer: Trainer | None) -> Run:
    """A run with those of its parts that training touches."""
    layers = torch.nn.ModuleList()
    shape = SimpleNamespace(
        head_dim=1, num_attention_heads=1, num_hidden_layers=1, vocab_size=1, hidden_size=1
    )
    model = SimpleNamespace(
        config=shape,
        get_decoder=lambda: SimpleNamespace(layers=layers),
        get_output_embeddings=lambda: torch.nn.Linear(1, 1),
    )
    chats = SimpleNamespace(sleep=lambda: engine.called.append("chats sleep"))
    components: Any = SimpleNamespace(config=config, model=model, chats=chats)
    world = World(0, 1, torch.device("cpu"))
    fields: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
    fields |= {
        "config": config,
        "engines": {"planner": engine, "verifier": engine},
        "components": components,
        "placement": Placement(world, world, world),
    }
    parts: dict[str, Any] = dict.fromkeys(Learner.__dataclass_fields__)
    parts |= {"components": components, "placement": fields["placement"], "trainer": trainer}
    return Run(**fields | {"learner": Learner(**parts)})


@pytest.mark.parametrize("sleep", [False, True])
def test_engines_sleep_during_training_and_torch_returns_its_memory(
    monkeypatch: pytest.MonkeyPatch, sleep: bool
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("torch gives back"))
    config = Config.model_validate({"vllm": {"sleep": sleep}})
    run = a_run(config, Engine(called), Trainer(called))
    run.sleep()
    assert run.learner.train(1, [[], []], sampled=[]).metrics == {"num_minibatches": 2}
    assert called == [
        *["engine sleeps"] * 2,  # a frozen policy's too, whose memory the plan counts as free
        "chats sleep",
        "trainer steps",
        *(["torch gives back"] if sleep else []),
    ]


def test_sampling_rank_keeps_its_engine_awake() -> None:
    called: list[str] = []
    run = a_run(Config(), Engine(called), None)
    run.sleep()
    assert run.learner.train(1, [[]], sampled=[]).metrics == {} and called == []


class FakeWorld(SimpleNamespace):
    """A rank whose main rank has said `said`."""

    def gather_text(self, text: str) -> list[str]:
        return [text, text] if self.is_main else [self.said, text]


def warm_of(folder: Path, is_main: bool, said: str = "") -> dict[str, Any]:
    """Ask a resumed run on one of two ranks for the evaluation at its start."""
    run: Any = SimpleNamespace(
        config=Config(),
        run_dir=SimpleNamespace(path=folder),
        placement=SimpleNamespace(world=FakeWorld(is_main=is_main, said=said)),
        start_step=3,
        _compare=lambda step: ({"eval_reward": 0.0}, ()),
    )
    return Run.evaluate_warm(run)


def test_a_rank_without_the_main_ranks_files_goes_by_what_that_one_has(tmp_path: Path) -> None:
    """Else it would evaluate alone, and wait for the others in its next collective."""
    (tmp_path / "warm.json").write_text(json.dumps({"eval_reward": 0.5}))
    assert warm_of(tmp_path, is_main=True) == {"eval_reward": 0.5}
    assert warm_of(tmp_path / "elsewhere", False, '{"eval_reward": 0.5}') == {"eval_reward": 0.5}
    assert warm_of(tmp_path, False, "") == {"eval_reward": 0.0}, "the main rank evaluates too"
