"""Which rank does what, and samples on their way from the ranks that sample to those that train."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config import Config
from flowtrain.run.placement import Placement, share
from flowtrain.training.tree import in_order
from flowtrain.training.wire import from_bytes, scores_from_bytes, scores_to_bytes, to_bytes
from flowtrain.training.world import World
from flowtrain.types import Sample, SampleId, SamplingMask, UserError

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple)
FLOATS = st.floats(width=32, allow_nan=False)
ORIGINS = st.tuples(*[st.integers(0, 1000)] * 3)


@st.composite
def a_sample(draw: st.DrawFn) -> Sample:
    response = draw(IDS)
    per_token = st.lists(FLOATS, min_size=len(response), max_size=len(response)).map(tuple)
    kept = draw(
        st.none()
        | st.lists(IDS, min_size=len(response), max_size=len(response)).map(SamplingMask.of)
    )
    minibatch, origin = draw(st.integers(0, 3)), SampleId(*draw(ORIGINS))
    return Sample(
        draw(IDS),
        response,
        draw(per_token),
        draw(per_token),
        draw(per_token),
        minibatch,
        origin,
        kept,
    )


def config(num_engine_ranks: int, num_questions: int = 12) -> Config:
    rollout = {"num_engine_ranks": num_engine_ranks, "num_questions": num_questions}
    return Config.model_validate({"rollout": rollout, "train": {"num_minibatches": 1}})


def world(size: int, rank: int = 0) -> World:
    return World(rank, size, torch.device("cpu"))


@given(st.lists(a_sample(), max_size=6))
def test_samples_arrive_as_they_left(samples: list[Sample]) -> None:
    assert from_bytes(to_bytes(samples)) == samples


@given(st.dictionaries(ORIGINS, st.lists(FLOATS).map(tuple), max_size=6))
def test_scores_arrive_as_they_left(scores: dict[tuple[int, int, int], tuple[float, ...]]) -> None:
    assert scores_from_bytes(scores_to_bytes(scores)) == scores
    (nan,) = scores_from_bytes(scores_to_bytes({(1, 2, 3): (math.nan,)}))[1, 2, 3]
    assert math.isnan(nan)


def test_a_float_arrives_as_what_a_row_makes_of_it() -> None:
    (sample,) = from_bytes(
        to_bytes([Sample((1,), (2,), (-0.1,), (0.1,), (1 / 3,), 0, SampleId(0, 0, 0))])
    )
    for ours, whole in (
        (sample.logprobs[0], -0.1),
        (sample.advantages[0], 0.1),
        (sample.loss_weights[0], 1 / 3),
    ):
        assert ours == float(torch.tensor(whole, dtype=torch.float32)) != whole


@given(st.lists(a_sample(), max_size=30), st.integers(1, 4))
def test_every_sample_falls_to_one_rank_and_tokens_are_even(
    samples: list[Sample], size: int
) -> None:
    shares = [share(samples, rank, size) for rank in range(size)]
    assert share(samples, -1, size) == []
    longest = max((len(s.prompt_ids) + len(s.response_ids) for s in samples), default=0)
    for index in range(4):
        parts = [[s for s in each if s.minibatch == index] for each in shares]
        assert [s for part in parts for s in part] == in_order(
            [s for s in samples if s.minibatch == index]
        ), "neighbours stay together"
        tokens = [sum(len(s.prompt_ids) + len(s.response_ids) for s in part) for part in parts]
        assert all(abs(a - b) <= 2 * longest for a, b in pairwise(tokens))


def test_colocated_ranks_train_what_they_sampled() -> None:
    placement = Placement.of(config(0), world(4, rank=2))
    assert placement.trainers is placement.samplers is placement.world and not placement.is_split
    samples = [Sample((1,), (2,), (-0.1,), (0.1,), (1.0,))]
    assert placement.deal(samples) is samples and placement.of_first_sampler({"a": 1.0}) == {
        "a": 1.0
    }
    assert placement.gather_scores({(0, 0, 0): (-0.5,)}) == {(0, 0, 0): (-0.5,)}


@pytest.mark.parametrize(
    ("num_engines", "num_questions", "size", "message"),
    [
        (
            2,
            12,
            2,
            r"rollout\.num_engine_ranks=2 leaves none of the 2 ranks that torchrun started to "
            r"train",
        ),
        (1, 12, 1, r"rollout\.num_engine_ranks=1 leaves none of the 1 ranks"),
        (3, 10, 8, r"rollout\.num_questions=10 must be a multiple of rollout\.num_engine_ranks=3"),
        (
            0,
            12,
            8,
            r"rollout\.num_questions=12 must be a multiple of the 8 ranks that torchrun started",
        ),
    ],
)
def test_what_cannot_be_placed_names_its_keys(
    num_engines: int, num_questions: int, size: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Placement.of(config(num_engines, num_questions), world(size))
