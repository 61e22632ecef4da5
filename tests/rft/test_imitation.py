"""The order in which samples are imitated, and what of them is."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from flowtrain.records import Call, FinishReason, Sample
from flowtrain.rft.imitation import batches, sample_of

CALL = Call((1, 2, 3), (4, 5), (-0.1, -0.2), (), FinishReason.STOP)


def test_every_epoch_has_every_sample_once() -> None:
    """Though no batch ends with the epoch."""
    samples = [Sample((n,), (n,), (0.0,), (1.0,), (1.0,)) for n in range(7)]
    found = [each for batch in islice(batches(samples, 3, seed=5), 7) for each in batch]
    epochs = [[sample.prompt_ids[0] for sample in found[at : at + 7]] for at in (0, 7, 14)]
    assert all(Counter(epoch) == Counter(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3, "each in an order of its own"


def test_a_response_alone_is_imitated_unless_prompts_have_a_weight() -> None:
    sample = sample_of(CALL, 0.0)
    assert (sample.prompt_ids, sample.response_ids) == (CALL.prompt_ids, CALL.response_ids)
    assert sample.loss_weights == (1.0, 1.0)
    sample = sample_of(CALL, 0.25)
    assert (sample.prompt_ids, sample.response_ids) == ((1,), (2, 3, 4, 5))
    assert sample.loss_weights == (0.25, 0.25, 1.0, 1.0)
    assert sample_of(Call((1, 2), (), (), (), FinishReason.DEADLINE), 0.25).response_ids == ()
