"""What a command says of itself before it begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_options import toy

from flowtrain.algorithms.registry import load_algorithm
from flowtrain.config.options import to_toml
from flowtrain.trainer.run.run_logger import rft_banner, train_banner


def parts(**sections: Any) -> Any:
    """Components as far as the banner reads them."""
    config = toy({"run": {"dir": "runs/a"}, **sections})
    world = SimpleNamespace(size=1, device=torch.device("cpu"))
    several = SimpleNamespace(size=8, device=torch.device("cuda"))
    tasks = SimpleNamespace(
        train=("q",) * 1200, held_out={"texts": ("q",) * 20, "forms": ("q",) * 30}, mixture={}
    )
    model = torch.nn.Linear(1000, 1500, bias=False)
    algorithm = load_algorithm(config)
    placement = SimpleNamespace(samplers=world, trainers=several)
    return SimpleNamespace(
        config=config, placement=placement, tasks=tasks, model=model, algorithm=algorithm
    )


def test_a_run_says_what_learns_from_whom_and_what_comes_next() -> None:
    lines = train_banner(parts(train={"num_steps": 7}), 0).splitlines()
    assert lines[0].endswith(": flow_grpo trains the planner")
    assert lines[1:] == [
        "  model   tiny, 1,500,000 parameters, float32",
        "  tasks   facts, 1,200 to train on, 50 held out",
        "  agent   agentflow, at most 3 turns, Search, Python_Coder, Base_Generator",
        "  ranks   sampled by torch on 1 ranks, trained by 8 (cuda)",
        "  steps   7, each 16 questions x 8 rollouts",
        "  fused   no layers",
        "  folder  runs/a",
    ]


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"dataflow": {"url": "http://10.0.0.5:8400"}}, "nodes of http://10.0.0.5:8400"),
        ({"lora": {"rank": 8}, "model": {"path": "m"}}, "float32, LoRA of rank 8"),
    ],
)
def test_what_differs_is_said(sections: dict[str, Any], line: str) -> None:
    assert line in train_banner(parts(**sections), 0)


def test_a_run_that_goes_on_says_where_and_what_was_changed(tmp_path: Path) -> None:
    text = train_banner(parts(), 12)
    assert "8 rollouts, after step 12" in text
    run = {"dir": str(tmp_path), "resume": "auto"}
    begun = parts(run={"dir": "elsewhere"}, train={"lr": 1e-4})
    (tmp_path / "config.toml").write_text(to_toml(begun.config))
    assert "change" not in train_banner(parts(run=run, train={"lr": 1e-4}), 12)
    now = parts(run=run, train={"lr": 1e-5}, agent={"tools": ["Search"]}, log={"replay": True})
    assert train_banner(now, 12).splitlines()[-1] == (
        '  change  agent.tools: ["Search", "Python_Coder", "Base_Generator"] -> ["Search"], '
        "log.replay: false -> true, train.lr: 0.0001 -> 1e-05"
    )
    (tmp_path / "config.toml").write_text("[train]\nlr = ")
    assert "change" not in train_banner(now, 12)


def test_fine_tuning_says_how_many_demonstrations_are_made() -> None:
    text = rft_banner(parts(rft={"num_rollouts": 2000, "num_steps": 50}))
    assert "the planner imitates demonstrations (scripted)" in text
    assert "2,000 rollouts are made, then imitated for 50 steps" in text
