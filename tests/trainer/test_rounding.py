"""The random bits of stochastic rounding, without torchao: an optimizer that shows what it drew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flowtrain.trainer import optimizers
from flowtrain.trainer.distributed import World
from flowtrain.trainer.optimizers import ShardOptimizer


class Drawing(torch.optim.Optimizer):
    """Puts random numbers into the weights."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
            parameter.copy_(torch.rand_like(parameter))


def draws(rank: int) -> list[tuple[float, ...]]:
    """What two steps of a rank draw; the process is in the same random state before."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    world = World(rank, 2, torch.device("cpu"))
    how = {"lr": 1.0, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = ShardOptimizer(model, world, kind="adamw_bf16_sr", **how)
    found = []
    for _ in range(2):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        found.append(tuple(model.weight.flatten().tolist()))
    return found


def test_each_rank_and_each_step_draws_bits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_make", lambda kind, shards, options: Drawing(shards, options))
    first, second = draws(0), draws(1)
    assert len({*first, *second}) == 4
    assert draws(1) == second, "a step that is taken again draws the same"
