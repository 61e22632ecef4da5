"""Samples that cannot be trained are left out and counted by reason; what they would have weighed
leaves the normaliser with them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace

from flowtrain.types import FILTER_REASONS, Sample, TrainBatch

_log = logging.getLogger(__name__)


def filter_samples(batch: TrainBatch, max_positions: int) -> TrainBatch:
    """The batch without samples that the model has no positions for, and without those whose
    numbers are not finite.

    A token of weight 0 may carry anything. Numbers of `batch.num_excluded` are added to.
    """
    reasons = [_reason(sample, max_positions) for sample in batch.samples]
    counts = Counter(reasons)
    if counts["too_long"]:
        longest = max(_num_inputs(sample) for sample in batch.samples)
        _log.warning(
            "%d samples of up to %d tokens are left out: the model has %d positions",
            counts["too_long"],
            longest,
            max_positions,
        )
    kept = tuple(
        sample for sample, reason in zip(batch.samples, reasons, strict=True) if not reason
    )
    return replace(
        batch,
        samples=kept,
        num_excluded={
            name: batch.num_excluded.get(name, 0) + counts[name] for name in FILTER_REASONS
        },
    )


def _reason(sample: Sample, max_positions: int) -> str:
    """One of FILTER_REASONS, or "" for a sample that can be trained."""
    if not sample.response_ids:
        return "empty"
    if _num_inputs(sample) > max_positions:
        return "too_long"
    if not all(map(math.isfinite, sample.advantages)):
        return "advantage"
    trained = (
        logprob for logprob, weight in zip(sample.logprobs, sample.weights, strict=True) if weight
    )
    return "" if all(map(math.isfinite, trained)) else "logprob"


def _num_inputs(sample: Sample) -> int:
    """The last response token is a target but never an input."""
    return len(sample.prompt_ids) + len(sample.response_ids) - 1
