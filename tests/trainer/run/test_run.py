"""The verbs of a run that ranks agree on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowtrain.config import Config
from flowtrain.trainer.distributed import World
from flowtrain.trainer.run.run import Run
from flowtrain.trainer.setup.learner import Learner


class FakeWorld(SimpleNamespace):
    """A rank whose main rank has said `said`."""

    def gather_text(self, text: str) -> list[str]:
        return [text, text] if self.is_main else [self.said, text]


def warm_of(folder: Path, is_main: bool, said: str = "") -> dict[str, Any]:
    """Ask a resumed run on one of two ranks for the evaluation at its start."""
    run: Any = SimpleNamespace(
        config=Config(),
        logger=SimpleNamespace(run_dir=SimpleNamespace(path=folder)),
        components=SimpleNamespace(world=FakeWorld(is_main=is_main, said=said)),
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


def test_engines_of_a_rank_that_trains_sleep() -> None:
    """A frozen policy's and the chats' too, whose memory the plan counts as free."""
    asleep: list[str] = []

    def engine(name: str) -> Any:
        return SimpleNamespace(sleep=lambda: asleep.append(name))

    names = ("planner", "verifier")
    for trains, expected in ((True, [*names, "chats"]), (False, [])):
        asleep.clear()
        placement = SimpleNamespace(trainers=SimpleNamespace(is_member=trains))
        run: Any = SimpleNamespace(
            shared=SimpleNamespace(engines={name: engine(name) for name in names}),
            components=SimpleNamespace(chats=engine("chats"), placement=placement),
        )
        Run.sleep(run)
        assert asleep == expected


@pytest.mark.parametrize("sleep", [False, True])
def test_torch_gives_its_memory_back_to_an_engine_that_sleeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sleep: bool
) -> None:
    """Behind what the trainer does last before an engine wakes up: a pass over the roots of
    branches, or the casts and differences of a version.
    """
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("given back"))
    config = Config.model_validate({"vllm": {"sleep": sleep}})

    def does(name: str) -> Any:
        return lambda *_: called.append(name) or SimpleNamespace(metrics=dict)

    make: Any = Learner
    trainers = World(0, 1, torch.device("cpu"))
    learner = make(
        components=SimpleNamespace(
            config=config,
            algorithm=SimpleNamespace(branch=does("branch")),
            tokenizer=None,
            placement=SimpleNamespace(wait=does("others go on"), trainers=trainers),
        ),
        store=SimpleNamespace(root=Path("store"), collect_garbage=lambda *_: None),
        trainer=None,
        publisher=SimpleNamespace(publish=does("publish")),
        checkpoints=None,
    )
    monkeypatch.setattr(Learner, "weights", {})
    learner.branch(1, [])
    learner.publish(1)
    given_back = ["given back"] * sleep
    assert called == ["branch", *given_back, "publish", *given_back, "others go on"]


@pytest.mark.parametrize(("num_roots", "expected"), [(2, ["sleep", "branch"]), (4, ["branch"])])
def test_engines_sleep_while_the_trainer_looks_for_branches(
    num_roots: int, expected: list[str]
) -> None:
    called: list[str] = []
    run: Any = SimpleNamespace(
        config=Config.model_validate({"rollout": {"group_size": 4}}),
        components=SimpleNamespace(algorithm=SimpleNamespace(num_roots=num_roots)),
        learner=SimpleNamespace(branch=lambda *_: called.append("branch")),
        sleep=lambda: called.append("sleep"),
    )
    Run.branch(run, 1, [])
    assert called == expected
