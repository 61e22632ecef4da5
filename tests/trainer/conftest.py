"""Samples to train on and a trainer of the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flowkernels import LossSpec

from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import equip
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.trainer import OptimSpec, Trainer


@pytest.fixture
def alone() -> World:
    return World(0, 1, torch.device("cpu"))


@pytest.fixture
def make_trainer(tiny_path: str, alone: World) -> Callable[..., Trainer]:
    """A trainer of a fresh tiny model in fp64; keyword arguments are those of OptimSpec."""

    def make(
        loss: LossSpec | None = None,
        temperature: float = 1.0,
        reference: Any = None,
        factor: Any = None,
        token_budget: int | None = None,
        token_loss: Any = None,
        **optim: Any,
    ) -> Trainer:
        model = models.load_model(tiny_path, torch.float64)
        equip(model)
        return Trainer(
            model,
            alone,
            loss or LossSpec(),
            OptimSpec(**{"lr": 1e-2, **optim}),
            temperature=temperature,
            reference=reference,
            factor=factor,
            token_budget=token_budget,
            **({} if token_loss is None else {"token_loss": lambda _: token_loss}),
        )

    return make
