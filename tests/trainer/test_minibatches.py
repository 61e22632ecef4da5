"""Optimizer steps of a given number of samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from batches import random_samples
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.records import Sample, SampleId, TrainBatch
from flowtrain.trainer.distributed import World
from flowtrain.trainer.minibatches import complete
from flowtrain.trainer.packing import pack

ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class OneOfRanks(World):
    """A rank that is told what the others say."""

    said: tuple[str, ...] = ()

    def gather_text(self, text: str) -> list[str]:
        assert text == self.said[self.rank]
        return list(self.said)


def samples_of(ids: list[SampleId]) -> tuple[Sample, ...]:
    one = Sample((1,), (2,), (-1.0,), (1.0,), (1.0,))
    return tuple(replace(one, sample_id=sample_id) for sample_id in ids)


IDS = st.builds(SampleId, st.integers(0, 9), st.integers(0, 3), st.integers(0, 3))


@given(st.lists(IDS, unique=True, max_size=60), st.integers(1, 70), st.integers(1, 3))
def test_every_sample_gets_a_step_of_bounded_size_whatever_the_ranks(
    ids: list[SampleId], size: int, num_ranks: int
) -> None:
    whole = complete(TrainBatch(samples_of(ids)), 0, size, {}, ALONE)
    num_minibatches = whole.num_minibatches
    place_of = {s.sample_id: s.minibatch for s in whole.samples}
    counts = [list(place_of.values()).count(number) for number in range(num_minibatches)]
    assert sum(counts) == len(ids) and max(counts) <= size and max(counts) - min(counts) <= 1
    assert num_minibatches == max(1, -(-len(ids) // size)), "as few as can be"
    assert sorted(place_of, key=lambda i: (place_of[i], i)) == sorted(ids), "questions stay whole"
    shares = [[i for i in ids if i.group % num_ranks == rank] for rank in range(num_ranks)]
    said = tuple(json.dumps(share) for share in shares)
    for rank, share in enumerate(shares):
        world = OneOfRanks(rank, num_ranks, torch.device("cpu"), said=said)
        batch = complete(TrainBatch(samples_of(share), 3), 0, size, {}, world)
        assert batch.num_minibatches == num_minibatches and batch.num_groups_dropped == 3
        assert [s.minibatch for s in batch.samples] == [place_of[i] for i in share]


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_weights_move_as_with_as_many_minibatches(
    num_minibatches: int,
    make_trainer: Callable[..., object],
) -> None:
    """Four questions of three samples each: the same steps, counted by questions or by samples."""
    ids = [SampleId(group, member, 0) for group in range(4) for member in range(3)]
    samples = [
        replace(sample, sample_id=i, minibatch=i.group * num_minibatches // 4)
        for sample, i in zip(random_samples(12, seed=3), ids, strict=True)
    ]
    unsplit = TrainBatch(tuple(replace(s, minibatch=0) for s in samples))
    by_size = complete(unsplit, 0, 12 // num_minibatches, {}, ALONE)
    assert by_size.num_minibatches == num_minibatches and list(by_size.samples) == samples
    one, other = make_trainer(), make_trainer()
    stats = one.step(pack(samples, num_minibatches))
    again = other.step(pack(by_size.samples, num_minibatches))
    assert stats["grad_norm"] == again["grad_norm"] and stats["num_optim_steps"] == num_minibatches
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
