"""Deal the samples of a batch out to optimizer steps of a given size."""

from __future__ import annotations

import json
from dataclasses import replace

from flowtrain.config import Train
from flowtrain.records import SampleId, TrainBatch
from flowtrain.trainer.distributed import World


def split(batch: TrainBatch, train: Train, world: World) -> TrainBatch:
    """Return the batch with every sample's optimizer step, as [train] asks; collective."""
    if not train.minibatch_size:
        return replace(batch, num_minibatches=train.num_minibatches)
    return split_by_size(batch, train.minibatch_size, world)


def split_by_size(batch: TrainBatch, size: int, world: World) -> TrainBatch:
    """Return the batch with a mini-batch for every sample; collective.

    Over all ranks a mini-batch has at most `size` samples, and hardly fewer than any other. Samples
    go in the order of their questions, which are drawn at random: rollouts of a question stay
    beside each other and share their prefixes. None is left over.
    """
    own = [sample.sample_id for sample in batch.samples]
    texts = world.gather_text(json.dumps(own))
    every = sorted(SampleId(*each) for text in texts for each in json.loads(text))
    num_minibatches = max(1, -(-len(every) // size))
    minibatch_of = {
        sample_id: place * num_minibatches // len(every) for place, sample_id in enumerate(every)
    }
    samples = [
        replace(sample, minibatch=minibatch_of[sample_id])
        for sample, sample_id in zip(batch.samples, own, strict=True)
        if sample_id is not None
    ]
    assert len(samples) == len(own), "samples of rollouts have ids"
    return replace(batch, samples=tuple(samples), num_minibatches=num_minibatches)
