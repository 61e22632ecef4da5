"""Samples that cannot be trained are left out and counted; the others are trained as if alone."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import make
import pytest
import torch
from batches import flow_grpo
from flowkernels import LossSpec
from make import call, rollout, turn
from torch import Tensor

from flowtrain.algorithms import filter_samples
from flowtrain.records import (
    FilterReason,
    FinishReason,
    Group,
    Routes,
    Sample,
    SamplingMask,
    TrainBatch,
    Turn,
)
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_rows
from flowtrain.trainer.trainer import OptimSpec, Trainer

VOCAB_SIZE = 280
NONE_LEFT_OUT = dict.fromkeys(FilterReason, 0)
GOOD = Sample((1, 2, 3), (4, 5), (-1.0, -2.0), (0.5, 0.5), (1.0, 1.0))


def routed(words: bytes, num_layers: int = 2, is_wide: bool = False) -> Sample:
    return replace(GOOD, routes=Routes(words, num_layers, 1, is_wide))


def masked(*sets: tuple[int, ...]) -> Sample:
    return replace(GOOD, sampling_mask=SamplingMask.of(sets))


BAD = {
    "a NaN log-prob": (replace(GOOD, logprobs=(-1.0, math.nan)), "logprob"),
    "a log-prob of +inf": (replace(GOOD, logprobs=(math.inf, -1.0)), "logprob"),
    "a log-prob of -inf": (replace(GOOD, logprobs=(-1.0, -math.inf)), "logprob"),
    "a NaN advantage": (replace(GOOD, advantages=(0.5, math.nan)), "advantage"),
    "an infinite advantage": (replace(GOOD, advantages=(-math.inf, 0.5)), "advantage"),
    "one token too many": (replace(GOOD, prompt_ids=(1,) * 9), "too_long"),
    "a log-prob no token is drawn with": (replace(GOOD, logprobs=(-1.0, -51.0)), "logprob"),
    "a log-prob above 0": (replace(GOOD, logprobs=(-1.0, 0.01)), "logprob"),
    "routes of fewer tokens": (routed(bytes(6)), "token"),
    "routes of other layers": (routed(bytes(4), num_layers=1), "token"),
    "an expert that is none of the model's": (routed(bytes([0, 1, 2, 3, 4, 5, 6, 7])), "token"),
    "a wide one": (routed(b"\x01\x01" * 8, is_wide=True), "token"),
    "a negative token": (replace(GOOD, response_ids=(4, -1)), "token"),
    "a token beyond the vocabulary": (replace(GOOD, response_ids=(VOCAB_SIZE, 4)), "token"),
    "a prompt beyond the vocabulary": (replace(GOOD, prompt_ids=(1, 2**31)), "token"),
    "an empty prompt": (replace(GOOD, prompt_ids=()), "token"),
    "a mask that names a token twice": (masked((4, 4), (5,)), "token"),
    "a mask without its token": (masked((4, 6), (7, 8)), "token"),
    "a mask of too few tokens": (masked((4, 5)), "token"),
    "a mask with nothing for a token": (masked((4,), ()), "token"),
    "a mask beyond the vocabulary": (masked((4, VOCAB_SIZE), (5,)), "token"),
    "a mask whose counts do not add up": (
        replace(GOOD, sampling_mask=SamplingMask(array("i", (4, 5, 6)), array("i", (1, 1)))),
        "token",
    ),
    "an empty response": (replace(GOOD, response_ids=(), logprobs=(), loss_weights=()), "empty"),
}


def screened(*samples: Sample, max_positions: int = 9) -> TrainBatch:
    return filter_samples(TrainBatch(samples, 0), max_positions, VOCAB_SIZE, (2, 1, 7))


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_is_left_out_and_counted(name: str) -> None:
    bad, reason = BAD[name]
    out = screened(GOOD, bad, GOOD, bad)
    assert out.samples == (GOOD, GOOD)
    assert out.num_filtered == NONE_LEFT_OUT | {reason: 2}


def test_what_fits_exactly_stays() -> None:
    """The last response token is never an input: 8 + 2 tokens take 9 positions."""
    fits = replace(GOOD, prompt_ids=(1,) * 8)
    assert screened(fits).samples == (fits,) and screened(fits, max_positions=8).samples == ()


def test_routes_fit_the_mixture_or_none() -> None:
    sample = routed(bytes([0, 1, 2, 3, 4, 5, 6, 6]))
    assert screened(sample).samples == (sample,)
    assert not filter_samples(TrainBatch((sample,)), 9, VOCAB_SIZE).samples, "a dense model"


def test_a_token_of_weight_0_may_carry_anything() -> None:
    sample = replace(GOOD, logprobs=(math.nan, -1.0), loss_weights=(0.0, 1.0))
    assert screened(sample).samples == (sample,)


def test_what_is_left_out_is_told_with_its_first_example(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        screened(GOOD, BAD["an empty response"][0], max_positions=4)
        assert not caplog.records
        too_long, beyond = BAD["one token too many"][0], BAD["a token beyond the vocabulary"][0]
        screened(
            replace(GOOD, prompt_ids=(1,) * 30), beyond, too_long, BAD["a log-prob above 0"][0]
        )
    start = "samples excluded from training:"
    assert [record.getMessage() for record in caplog.records] == [
        f"{start} 2, the first because it has 31 tokens, but the model has 9 positions",
        f"{start} 1, the first because 280 is not among the model's 280 tokens",
        f"{start} 1, the first because a sampled token has the log-prob 0.01, outside of -50 to "
        "0.001",
    ]


def test_what_fits_its_mask_stays() -> None:
    sample = masked((4, 6), (7, 5))
    assert screened(sample).samples == (sample,)


def group(index: int, *rollouts: tuple[float, list[int]]) -> Group:
    def said(size: int) -> Turn:
        return turn(call([5] * size, reason=FinishReason.DEADLINE))

    made = [rollout(*map(said, sizes), reward=reward) for reward, sizes in rollouts]
    return make.group(*made, index=index)


@pytest.mark.parametrize("mode", ["paper", "released"])
def test_empty_turns_are_counted_and_a_reward_that_is_no_number_spoils_its_group_alone(
    mode: str,
) -> None:
    good = group(0, (1.0, [2, 0]), (0.0, [0, 3, 0]))
    spoiled = group(1, (math.nan, [1]), (1.0, [2, 0]), (0.0, [1]))
    out = filter_samples(flow_grpo([good, spoiled], mode, num_groups=2), 100, VOCAB_SIZE)
    assert out.samples == flow_grpo([good], mode, num_groups=2).samples and len(out.samples) == 2
    assert out.num_filtered == NONE_LEFT_OUT | {"empty": 4, "advantage": 3}


@pytest.fixture
def trained(tiny_path: str) -> Callable[[TrainBatch], dict[str, Tensor]]:
    """The weights after a step on what the filter_samples leaves."""

    def of(batch: TrainBatch) -> dict[str, Tensor]:
        model = models.load_model(tiny_path, torch.float32)
        trainer = Trainer(model, World(0, 1, torch.device("cpu")), LossSpec(), OptimSpec(lr=1e-2))
        shape = model.config
        kept = filter_samples(batch, shape.max_position_embeddings, shape.vocab_size)
        stats = trainer.step([pack_rows(kept.samples, 4)])
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
