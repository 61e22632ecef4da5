"""Removal of samples that cannot be trained, counted by reason; their loss weights leave the
normaliser too.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace

from flowtrain.records import FilterReason, Sample, TrainBatch
from flowtrain.records.checks import length_problem, logprob_problem, routes_problem, token_problem

_log = logging.getLogger(__name__)


def filter_samples(
    batch: TrainBatch,
    max_positions: int,
    vocab_size: int,
    routers: tuple[int, int, int] = (0, 0, 0),
) -> TrainBatch:
    """Return the batch without samples that exceed the model's positions, contain unknown token
    ids, or hold impossible numbers.

    Log-probs of tokens of weight 0 are not checked. Adds to the counts of `batch.num_filtered`; a
    warning names the first sample of each reason. `routers`: `experts.sizes_of` the model.
    """
    counts, tokens = Counter(batch.num_filtered), Counter(batch.num_filtered_tokens)
    trainable, problems = [], dict[FilterReason, str]()
    for sample in batch.samples:
        reason_and_problem = _problem(sample, max_positions, vocab_size, routers)
        if reason_and_problem is None:
            trainable.append(sample)
        else:
            reason, problem = reason_and_problem
            counts[reason] += 1
            tokens[reason] += len(sample.response_ids)
            problems.setdefault(reason, problem)
    for reason, problem in problems.items():
        if problem:
            num = counts[reason] - batch.num_filtered.get(reason, 0)
            _log.warning("samples excluded from training: %d, the first because %s", num, problem)
    return replace(
        batch,
        samples=tuple(trainable),
        num_filtered={reason: counts[reason] for reason in FilterReason},
        num_filtered_tokens={reason: tokens[reason] for reason in FilterReason},
    )


def _problem(
    sample: Sample, max_positions: int, vocab_size: int, routers: tuple[int, int, int]
) -> tuple[FilterReason, str] | None:
    """Return why the sample cannot be trained, as a reason and in words; None if it can."""
    if not sample.response_ids:
        return FilterReason.EMPTY, ""
    if problem := length_problem(sample, max_positions):
        return FilterReason.TOO_LONG, problem
    if problem := token_problem(sample, vocab_size) or routes_problem(sample, routers):
        return FilterReason.TOKEN, problem
    for advantage in sample.advantages:
        if not math.isfinite(advantage):
            return FilterReason.ADVANTAGE, f"an advantage is {advantage}"
    weighed = zip(sample.logprobs, sample.loss_weights, strict=True)
    if problem := logprob_problem(logprob for logprob, weight in weighed if weight):
        return FilterReason.LOGPROB, problem
    return None
