"""Leave out samples that cannot be trained, and count them by reason; their loss weights leave the
normaliser too.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace

from flowtrain.types import FilterReason, Sample, TrainBatch

_log = logging.getLogger(__name__)


def filter_samples(batch: TrainBatch, max_positions: int) -> TrainBatch:
    """Return the batch without samples that are longer than the model's positions, or whose numbers
    are not finite.

    A token of weight 0 may carry anything. The counts of `batch.num_filtered` are added to.
    """
    reasons = [_reason(sample, max_positions) for sample in batch.samples]
    counts = Counter(reasons)
    if counts[FilterReason.TOO_LONG]:
        longest = max(_num_inputs(sample) for sample in batch.samples)
        _log.warning(
            "%d samples of up to %d tokens are left out: the model has %d positions",
            counts[FilterReason.TOO_LONG],
            longest,
            max_positions,
        )
    kept = tuple(
        sample for sample, reason in zip(batch.samples, reasons, strict=True) if reason is None
    )
    return replace(
        batch,
        samples=kept,
        num_filtered={
            reason: batch.num_filtered.get(reason, 0) + counts[reason] for reason in FilterReason
        },
    )


def _reason(sample: Sample, max_positions: int) -> FilterReason | None:
    """Tell why the sample cannot be trained; None when it can."""
    if not sample.response_ids:
        return FilterReason.EMPTY
    if _num_inputs(sample) > max_positions:
        return FilterReason.TOO_LONG
    if not all(map(math.isfinite, sample.advantages)):
        return FilterReason.ADVANTAGE
    weighed = zip(sample.logprobs, sample.loss_weights, strict=True)
    if not all(math.isfinite(logprob) for logprob, weight in weighed if weight):
        return FilterReason.LOGPROB
    return None


def _num_inputs(sample: Sample) -> int:
    """Count the input tokens: the last response token is a target but never an input."""
    return len(sample.prompt_ids) + len(sample.response_ids) - 1
