"""Checks of a step's batch that name where another one differs: the sample, its field and the word.

A check is two sums mod 2^64 over the 64-bit words of a field: s = sum of w_i and t = sum of
(i + 1) w_i. Where a single word differs by d, s differs by d and t by (i + 1) d, which says which
word it is and what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flowtrain.types import Call, Sample, SampleId, TrainBatch

_MASK = (1 << 64) - 1
_INTEGERS = ("prompt_ids", "response_ids", "mask_ids", "mask_counts")
_FLOATS = ("logprobs", "advantages", "loss_weights", "old_logprobs", "ref_logprobs")
U64 = np.ndarray[tuple[int], np.dtype[np.uint64]]

Checks = dict[str, Any]
"""Of a batch, as JSON: what was left out, and by sample ("12/3/2" for group 12, rollout 3, turn 2)
its mini-batch and the check of each field that is not empty."""


def checks_of(batch: TrainBatch) -> Checks:
    """Compute the checks of this rank's part of a batch."""
    return {
        "left_out": left_out(batch),
        "samples": {_key(sample): _checks(sample) for sample in batch.samples},
    }


def left_out(batch: TrainBatch) -> dict[str, int]:
    """Count the groups and samples that are not trained, by reason."""
    counts = {str(reason): number for reason, number in batch.num_filtered.items()}
    return {"num_groups_dropped": batch.num_groups_dropped, **counts}


def difference(batch: TrainBatch, recorded: Mapping[str, Any]) -> tuple[SampleId, str] | None:
    """Name the first of this rank's samples that is not as it was, and where; None: all are.

    `recorded`: the checks of all samples of the step, those of all ranks.
    """
    for sample in sorted(batch.samples, key=lambda each: each.sample_id or SampleId(-1, -1, -1)):
        assert sample.sample_id is not None, "samples of rollouts have ids"
        before = recorded.get(_key(sample))
        if before is None:
            return sample.sample_id, f"{name(sample.sample_id)} is trained, it was not"
        if text := _difference(sample, before):
            return sample.sample_id, f"{name(sample.sample_id)}: {text}"
    return None


def call_difference(call: Call, recorded: Mapping[str, Any]) -> str:
    """Say where a call differs from the sample that was made of it; "" where it does not."""
    mask = call.sampling_mask
    fields = {
        "prompt_ids": call.prompt_ids,
        "response_ids": call.response_ids,
        "logprobs": call.logprobs,
        "mask_ids": mask.ids if mask else (),
        "mask_counts": mask.counts if mask else (),
    }
    return _field_difference(fields.items(), recorded)


def missing(trained: set[SampleId], recorded: Mapping[str, Any]) -> tuple[SampleId, str] | None:
    """Name the first recorded sample that is none of `trained`, those of all ranks."""
    every = (SampleId(*map(int, key.split("/"))) for key in recorded)
    first = min((each for each in every if each not in trained), default=None)
    return None if first is None else (first, f"{name(first)} is not trained, it was")


def name(sample_id: SampleId) -> str:
    """Write a sample's place in words."""
    group, trajectory, turn = sample_id
    return f"group {group}, rollout {trajectory}, turn {turn}"


def _difference(sample: Sample, recorded: Mapping[str, Any]) -> str:
    if sample.minibatch != recorded["minibatch"]:
        return f"mini-batch {sample.minibatch}, was {recorded['minibatch']}"
    return _field_difference(_fields(sample), recorded)


def _field_difference(
    fields: Iterable[tuple[str, Sequence[float]]], recorded: Mapping[str, Any]
) -> str:
    for field, values in fields:
        before = recorded.get(field, _check(_words(field, ())))
        if _check(_words(field, values)) != before:
            return _located(field, values, before)
    return ""


def _located(field: str, values: Sequence[float], before: str) -> str:
    """Say which word of a field differs and what it was; where that cannot be told, the field."""
    label, words = field.replace("_", " "), _words(field, values)
    number, *sums = before.split(":")
    if int(number) != len(words):
        return f"{label}: {len(words)} words, there were {number}"
    s, t = (int(text, 16) for text in sums)
    own_s, own_t = _sums(words)
    d, e = (own_s - s) & _MASK, (own_t - t) & _MASK
    factors = np.arange(1, len(words) + 1, dtype=np.uint64)
    places = np.flatnonzero(factors * np.uint64(d) == np.uint64(e)) if d else np.zeros(0, int)
    if len(places) != 1:
        return f"{label}: several of {len(words)} words"
    place = int(places[0])
    old = np.array([(int(words[place]) - d) & _MASK], np.uint64)
    value = old.view(np.int64 if field in _INTEGERS else np.float64)[0]
    return f"{label}: word {place} is {values[place]}, was {value}"


def _checks(sample: Sample) -> dict[str, int | str]:
    checks: dict[str, int | str] = {"minibatch": sample.minibatch}
    for field, values in _fields(sample):
        if len(values):
            checks[field] = _check(_words(field, values))
    return checks


def _fields(sample: Sample) -> Iterator[tuple[str, Sequence[float]]]:
    mask = sample.sampling_mask
    masks = {"mask_ids": mask.ids if mask else (), "mask_counts": mask.counts if mask else ()}
    for field in (*_INTEGERS, *_FLOATS):
        yield field, masks[field] if field in masks else getattr(sample, field)


def _words(field: str, values: Sequence[float]) -> U64:
    dtype = np.int64 if field in _INTEGERS else np.float64
    words: U64 = np.array(values, dtype).view(np.uint64)
    return words


def _check(words: U64) -> str:
    s, t = _sums(words)
    return f"{len(words)}:{s:x}:{t:x}"


def _sums(words: U64) -> tuple[int, int]:
    factors = np.arange(1, len(words) + 1, dtype=np.uint64)
    return int(words.sum(dtype=np.uint64)), int((words * factors).sum(dtype=np.uint64))


def _key(sample: Sample) -> str:
    assert sample.sample_id is not None, "samples of rollouts have ids"
    return "/".join(map(str, sample.sample_id))
