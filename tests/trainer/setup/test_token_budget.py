"""The number that an automatic token budget becomes: what there is memory for, the same on every
rank and after every resumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory_plan import CONFIGS, build, changed, plan, settings

from flowtrain.algorithms import Algorithm, load_algorithm
from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup import placement
from flowtrain.trainer.setup.memory_plan import MemoryPlan
from flowtrain.trainer.setup.placement import Placement, largest_budget, with_token_budget


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


def test_a_number_is_found_once_for_all_ranks_and_for_all_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "memory_per_rank", lambda: 5 * 20_480 * 10**6)
    run = {"dir": str(tmp_path), "resume": "auto"}
    config = settings(train={"token_budget": "auto"}, run=run)
    alone, pair = World(0, 1, torch.device("cpu")), Peers(0, 2, torch.device("cpu"))
    elsewhere = World(-1, 1, torch.device("cpu"))

    def plan(config: Config, *_: object) -> MemoryPlan:  # 1 MB a token
        return MemoryPlan({"activations": 10**6 * config.train.row_budget})

    monkeypatch.setattr(placement, "memory_of", plan)

    def resolved(config: Config, place: Placement) -> Algorithm:
        model: Any = None
        return with_token_budget(load_algorithm(config), model, {}, place)

    def budget(config: Config, place: Placement) -> int | str:
        return resolved(config, place).config.train.token_budget

    found = resolved(config, Placement.colocated(alone))
    assert found.config.train.token_budget == 20_480
    assert config.train.token_budget == "auto"
    assert budget(found.config, Placement.colocated(pair)) == 20_480, "a number stays as it is"
    assert budget(config, Placement.sampling(alone)) == "auto", "nobody trains"
    assert budget(config, Placement.colocated(pair)) == 7168
    assert budget(config, Placement(alone, elsewhere, alone)) == 65_536, "for the others to say"
    (tmp_path / "config.toml").write_text(to_toml(settings(train={"token_budget": 3000})))
    assert budget(config, Placement.colocated(pair)) == 3000
    anew = changed(config, run={**run, "resume": "never"})
    assert budget(anew, Placement.colocated(alone)) == 20_480
    with pytest.raises(AssertionError):
        assert config.train.row_budget
