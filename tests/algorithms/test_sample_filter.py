"""Samples that cannot be trained are left out, counted and out of the normaliser; the others have
the gradient that they have alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flowkernels import LossSpec
from torch import Tensor

from flowtrain.algorithms import filter_samples
from flowtrain.algorithms.flow_grpo import flow_grpo
from flowtrain.training import model as models
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World
from flowtrain.types import (
    Call,
    FinishReason,
    Group,
    Sample,
    Task,
    ToolResult,
    TrainBatch,
    Trajectory,
    Turn,
    Verdict,
)

GOOD = Sample((1, 2, 3), (4, 5), (-1.0, -2.0), (0.5, 0.5), (1.0, 1.0))
BAD = {
    "a NaN log-prob": (replace(GOOD, logprobs=(-1.0, math.nan)), "logprob"),
    "a log-prob of +inf": (replace(GOOD, logprobs=(math.inf, -1.0)), "logprob"),
    "a log-prob of -inf": (replace(GOOD, logprobs=(-1.0, -math.inf)), "logprob"),
    "a NaN advantage": (replace(GOOD, advantages=(0.5, math.nan)), "advantage"),
    "an infinite advantage": (replace(GOOD, advantages=(-math.inf, 0.5)), "advantage"),
    "one token too many": (replace(GOOD, prompt_ids=(1,) * 9), "too_long"),
    "an empty response": (replace(GOOD, response_ids=(), logprobs=(), loss_weights=()), "empty"),
}


def screened(*samples: Sample, max_positions: int = 9) -> TrainBatch:
    return filter_samples(TrainBatch(samples, 0), max_positions)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_is_left_out_and_counted(name: str) -> None:
    bad, reason = BAD[name]
    out = screened(GOOD, bad, GOOD, bad)
    assert out.samples == (GOOD, GOOD)
    assert out.num_filtered == {"empty": 0, "too_long": 0, "advantage": 0, "logprob": 0, reason: 2}


def test_what_fits_exactly_stays() -> None:
    """The last response token is never an input: 8 + 2 tokens take 9 positions."""
    fits = replace(GOOD, prompt_ids=(1,) * 8)
    assert screened(fits).samples == (fits,) and screened(fits, max_positions=8).samples == ()


def test_a_token_of_weight_0_may_carry_anything() -> None:
    sample = replace(GOOD, logprobs=(math.nan, -1.0), loss_weights=(0.0, 1.0))
    assert screened(sample).samples == (sample,)


def test_what_is_too_long_is_told_with_its_length(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        screened(GOOD, max_positions=4)
        assert not caplog.records
        screened(replace(GOOD, prompt_ids=(1,) * 30), BAD["one token too many"][0])
    assert [record.getMessage() for record in caplog.records] == [
        "2 samples of up to 31 tokens are left out: the model has 9 positions"
    ]


def turn(num_tokens: int) -> Turn:
    ids, logprobs = (5,) * num_tokens, (-1.0,) * num_tokens
    call = Call((7,), ids, logprobs, (), FinishReason.DEADLINE)
    return Turn({"planner": call}, None, "", ToolResult(), Verdict.CONTINUE, seconds=0.0)


def group(index: int, *rollouts: tuple[float, list[int]]) -> Group:
    task = Task("t", "q", ("a",))
    return Group(
        index,
        tuple(
            Trajectory(task, tuple(map(turn, sizes)), "", 0.0, 0, reward=reward)
            for reward, sizes in rollouts
        ),
    )


@pytest.mark.parametrize("mode", ["paper", "released"])
def test_empty_turns_are_counted_and_a_reward_that_is_no_number_spoils_its_group_alone(
    mode: str,
) -> None:
    good, spoiled = (
        group(0, (1.0, [2, 0]), (0.0, [0, 3, 0])),
        group(1, (math.nan, [1]), (1.0, [2, 0]), (0.0, [1])),
    )
    out = filter_samples(flow_grpo([good, spoiled], mode, num_groups=2), 100)
    assert out.samples == flow_grpo([good], mode, num_groups=2).samples and len(out.samples) == 2
    assert out.num_filtered == {"empty": 4, "too_long": 0, "advantage": 3, "logprob": 0}


@pytest.fixture
def trained(tiny_path: str) -> Callable[[TrainBatch], dict[str, Tensor]]:
    """The weights after a step on what the filter_samples leaves."""

    def of(batch: TrainBatch) -> dict[str, Tensor]:
        model = models.load_model(tiny_path, torch.float32)
        trainer = Trainer(model, World(0, 1, torch.device("cpu")), LossSpec(), OptimSpec(lr=1e-2))
        stats = trainer.step(
            [pack_rows(filter_samples(batch, model.config.max_position_embeddings).samples, 100)]
        )
        assert all(map(math.isfinite, stats.values()))
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    return of


@pytest.mark.parametrize("name", BAD)
def test_the_step_is_that_without_the_sample(
    name: str, trained: Callable[[TrainBatch], dict[str, Tensor]], tiny_path: str
) -> None:
    """To the bit: its weight is out of the normaliser too."""
    assert Path(tiny_path, "config.json").read_text().count('"max_position_embeddings": 64') == 1
    bad = BAD[name][0]
    if name == "one token too many":
        bad = replace(bad, prompt_ids=(1,) * 64)
    good = (GOOD, replace(GOOD, prompt_ids=(9,), advantages=(-1.0, -1.0)))
    with_it, without = trained(TrainBatch((good[0], bad, good[1]), 0)), trained(TrainBatch(good, 0))
    assert all(torch.equal(with_it[key], without[key]) for key in without)
