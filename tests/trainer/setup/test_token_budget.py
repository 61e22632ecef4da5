"""The number that an automatic token budget becomes: what there is memory for, the same on every
rank and after every resumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_memory_plan import CONFIGS, build, changed, plan, settings

from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup import token_budget
from flowtrain.trainer.setup.components import LearnerComponents
from flowtrain.trainer.setup.memory_plan import MemoryPlan
from flowtrain.trainer.setup.placement import Placement
from flowtrain.trainer.setup.token_budget import largest_budget, with_token_budget


@pytest.mark.parametrize(
    ("few", "most", "expected"),
    [(-2, -9, 1024), (0, -9, 1024), (5, -5, 32768), (5, 0, 65536), (999, -1, 64512), (9, 9, 65536)],
)
def test_rows_fill_what_is_left_in_whole_steps(few: float, most: float, expected: int) -> None:
    assert largest_budget(few, most) == expected


@pytest.mark.parametrize("sleeps", [False, True])
def test_room_is_left_on_a_gpu_and_beside_other_work_on_a_cpu(sleeps: bool) -> None:
    config = settings(vllm={"sleep": sleeps})
    assert MemoryPlan({"all": 30}, 20, 100).room(config, 10**9) == (55 if sleeps else 35)
    assert MemoryPlan({"activations": 20, "all": 30}, 20, 0).room(config, 300) == 70


@pytest.mark.parametrize("gpu_bytes", [120_000_000, 400_000_000])
def test_the_number_is_the_largest_whose_plan_has_room(gpu_bytes: int) -> None:
    model, config = build(CONFIGS["Llama"]), settings(model={"dtype": "bfloat16"})

    def room(budget: int) -> float:
        some = settings(model={"dtype": "bfloat16"}, train={"token_budget": budget})
        return plan(some, model, 1, gpu_bytes).room(config, 0)

    found = largest_budget(room(1024), room(65536))
    assert room(found) >= 0 > room(found + 1024) and 1024 < found < 64000


class Peers(World):
    """A world whose other rank has room for fewer tokens, and reads no file."""

    def max(self, values: Sequence[float]) -> list[float]:
        return [max(pair) for pair in zip(values, (0, -7168), strict=True)]


class Parts(LearnerComponents):
    """Components whose plan takes 1 MB a token."""

    def plan_memory(self, placement: Placement) -> MemoryPlan:
        return MemoryPlan({"activations": 10**6 * self.config.train.row_budget})


def parts(config: Config, world: World = World(0, 1, torch.device("cpu"))) -> Parts:  # noqa: B008
    nothing: Any = None
    algorithm = load_algorithm(config)
    return Parts(world=world, algorithm=algorithm, tokenizer=nothing, model=nothing)


def test_a_number_is_found_once_for_all_ranks_and_for_all_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_budget, "memory_per_rank", lambda: 5 * 20_480 * 10**6)
    run = {"dir": str(tmp_path), "resume": "auto"}
    config = settings(train={"token_budget": "auto"}, run=run)
    alone = parts(config)
    trains: Any = SimpleNamespace(trainers=SimpleNamespace(is_member=True))
    found: Any = with_token_budget(alone, trains)
    assert found.config.train.token_budget == 20_480
    assert found.algorithm.config is found.config, "where branches read it"
    assert alone.algorithm.config.train.token_budget == "auto"
    assert with_token_budget(found, trains) is found, "a number stays as it is"
    together = parts(config, Peers(0, 2, torch.device("cpu")))
    assert with_token_budget(together, trains).config.train.token_budget == 7168
    samples: Any = SimpleNamespace(trainers=SimpleNamespace(is_member=False))
    assert with_token_budget(alone, samples).config.train.token_budget == 65_536
    (tmp_path / "config.toml").write_text(to_toml(settings(train={"token_budget": 3000})))
    assert with_token_budget(together, trains).config.train.token_budget == 3000
    anew = parts(changed(config, run={**run, "resume": "never"}))
    assert with_token_budget(anew, trains).config.train.token_budget == 20_480
    with pytest.raises(AssertionError):
        assert config.train.row_budget
