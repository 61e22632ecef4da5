"""Completion of a batch's samples with their optimizer steps and already known log-probs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from flowtrain.records import Sample, SampleId, Scored, TrainBatch
from flowtrain.trainer.distributed import World

_UNKNOWN: Scored = ((), ())


def complete(
    batch: TrainBatch,
    num_minibatches: int,
    size: int,
    logprobs: Mapping[SampleId, Scored],
    world: World,
) -> TrainBatch:
    """Return the batch with every sample's optimizer step and its entry of `logprobs`; collective.

    Without a `size` samples keep their step among `num_minibatches`. With a `size` every mini-batch
    has at most this many samples over all ranks, nearly evenly. Samples are split in the random
    order of their questions, so rollouts of a question stay together and share prefixes. No sample
    is left over.
    """
    minibatch_of: dict[SampleId, int] = {}
    if size:
        own = [sample.sample_id for sample in batch.samples]
        assert None not in own, "samples of rollouts have ids"
        texts = world.gather_text(json.dumps(own))
        every = sorted(SampleId(*each) for text in texts for each in json.loads(text))
        num_minibatches = max(1, -(-len(every) // size))
        minibatch_of = {x: n * num_minibatches // len(every) for n, x in enumerate(every)}

    def completed(sample: Sample) -> Sample:
        if (sample_id := sample.sample_id) is None:
            return sample
        old, ref = logprobs.get(sample_id, _UNKNOWN)
        number = minibatch_of.get(sample_id, sample.minibatch)
        return replace(sample, minibatch=number, old_logprobs=old, ref_logprobs=ref)

    samples = tuple(map(completed, batch.samples))
    return replace(batch, samples=samples, num_minibatches=num_minibatches)
