"""Samples to train on and a trainer of the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flowkernels import LossSpec

from flowtrain.training import lm_head
from flowtrain.training import model as models
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.world import World
from flowtrain.types import Sample


@pytest.fixture
def alone() -> World:
    return World(0, 1, torch.device("cpu"))


@pytest.fixture
def random_samples() -> Callable[..., list[Sample]]:
    """Samples of 1 to 9 prompt and 1 to 7 response tokens, as of a random policy."""

    def make(number: int, seed: int = 0, minibatch: int = 0, vocab: int = 280) -> list[Sample]:
        rng = torch.Generator().manual_seed(seed)

        def ids(most: int) -> tuple[int, ...]:
            length = int(torch.randint(1, most + 1, (1,), generator=rng))
            return tuple(torch.randint(vocab, (length,), generator=rng).tolist())

        samples = []
        for _ in range(number):
            prompt, response = ids(9), ids(7)
            logprobs = tuple((-5.6 + torch.randn(len(response), generator=rng)).tolist())
            advantage, weight = torch.rand(2, generator=rng).tolist()
            samples.append(
                Sample(
                    prompt,
                    response,
                    logprobs,
                    (2 * advantage - 1,) * len(response),
                    (weight,) * len(response),
                    minibatch,
                )
            )
        return samples

    return make


@pytest.fixture
def make_trainer(tiny_path: str, alone: World) -> Callable[..., Trainer]:
    """A trainer of a fresh copy of the tiny model in fp64; keyword arguments are those of
    OptimSpec.
    """

    def make(
        loss: LossSpec | None = None,
        temperature: float = 1.0,
        reference: Any = None,
        factor: Any = None,
        **optim: Any,
    ) -> Trainer:
        model = models.load_model(tiny_path, torch.float64)
        lm_head.equip(model)
        return Trainer(
            model,
            alone,
            loss or LossSpec(),
            OptimSpec(**{"lr": 1e-2, **optim}),
            temperature=temperature,
            reference=reference,
            factor=factor,
        )

    return make
