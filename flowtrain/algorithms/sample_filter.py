"""Leave out samples that cannot be trained, and count them by reason; their loss weights leave the
normaliser too.

`token_problem` and `logprob_problem` are the dataflow's checks of what nodes push as well.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from flowtrain.types import Call, FilterReason, Sample, TrainBatch

_log = logging.getLogger(__name__)

MIN_LOGPROB, MAX_LOGPROB = -50.0, 1e-3
"""Log-probs of a sampler, in nats: nobody draws a token of probability e^-50, whose ratio to
another policy would overflow the gradient's norm; and above 0 there are only roundings."""


def filter_samples(batch: TrainBatch, max_positions: int, vocab_size: int) -> TrainBatch:
    """Return the batch without samples that are longer than the model's positions, hold ids that
    are none of its tokens, or have numbers that cannot be right.

    The log-prob of a token of weight 0 may be anything. The counts of `batch.num_filtered` are
    added to; a warning names the first sample of each reason.
    """
    counts, tokens = Counter(batch.num_filtered), Counter(batch.num_filtered_tokens)
    kept, problems = [], dict[FilterReason, str]()
    for sample in batch.samples:
        found = _problem(sample, max_positions, vocab_size)
        if found is None:
            kept.append(sample)
        else:
            reason, problem = found
            counts[reason] += 1
            tokens[reason] += len(sample.response_ids)
            problems.setdefault(reason, problem)
    for reason, problem in problems.items():
        if problem:
            num = counts[reason] - batch.num_filtered.get(reason, 0)
            _log.warning("samples left out: %d, the first because %s", num, problem)
    return replace(
        batch,
        samples=tuple(kept),
        num_filtered={reason: counts[reason] for reason in FilterReason},
        num_filtered_tokens={reason: tokens[reason] for reason in FilterReason},
    )


def _problem(
    sample: Sample, max_positions: int, vocab_size: int
) -> tuple[FilterReason, str] | None:
    """Tell why the sample cannot be trained, as a reason and in words; None when it can."""
    if not sample.response_ids:
        return FilterReason.EMPTY, ""
    if problem := length_problem(sample, max_positions):
        return FilterReason.TOO_LONG, problem
    if problem := token_problem(sample, vocab_size):
        return FilterReason.TOKEN, problem
    for advantage in sample.advantages:
        if not math.isfinite(advantage):
            return FilterReason.ADVANTAGE, f"an advantage is {advantage}"
    weighed = zip(sample.logprobs, sample.loss_weights, strict=True)
    if problem := logprob_problem(logprob for logprob, weight in weighed if weight):
        return FilterReason.LOGPROB, problem
    return None


def length_problem(tokens: Sample | Call, max_positions: int) -> str:
    """Say that prompt and response are longer than the model; "" when they fit."""
    # The last response token is a target but never an input.
    num_inputs = len(tokens.prompt_ids) + len(tokens.response_ids) - 1
    if num_inputs <= max_positions:
        return ""
    return f"it has {num_inputs} tokens, the model {max_positions} positions"


def token_problem(tokens: Sample | Call, vocab_size: int) -> str:
    """Say why a model of `vocab_size` tokens cannot read prompt and response; "" when it can."""
    if not tokens.prompt_ids:
        return "its prompt is empty"
    for ids in (tokens.prompt_ids, tokens.response_ids):
        if problem := _id_problem(ids, vocab_size):
            return problem
    mask, response_ids = tokens.sampling_mask, tokens.response_ids
    if mask is None or not response_ids:
        return ""
    counts = mask.counts
    if len(counts) != len(response_ids) or min(counts) < 1 or sum(counts) != len(mask.ids):
        return "its sampling mask does not fit its response"
    if problem := _id_problem(mask.ids, vocab_size):
        return f"of its sampling mask: {problem}"
    end = 0
    for token, count in zip(response_ids, counts, strict=True):
        start, end = end, end + count
        choices = set(mask.ids[start:end])
        if token not in choices:
            return f"token {token} is outside of its sampling mask"
        if len(choices) < count:
            return f"the sampling mask of token {token} names an id twice"
    return ""


def _id_problem(ids: Iterable[int], vocab_size: int) -> str:
    worst = max(ids, default=0), min(ids, default=0)
    return next(
        (
            f"{i} is none of the model's {vocab_size} tokens"
            for i in worst
            if not 0 <= i < vocab_size
        ),
        "",
    )


def logprob_problem(logprobs: Iterable[float]) -> str:
    """Say that a log-prob is none of a sampled token; "" when all may be."""
    for logprob in logprobs:
        if not MIN_LOGPROB <= logprob <= MAX_LOGPROB:
            return (
                f"a sampled token has the log-prob {logprob:g}, outside of "
                f"{MIN_LOGPROB:g} to {MAX_LOGPROB:g}"
            )
    return ""
