"""Digests of a step's batch, by which a replay names the sample and the field that differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flowtrain.records import Sample, SampleId, TrainBatch

_INTEGERS = ("prompt_ids", "response_ids", "mask_ids", "mask_counts")
_FLOATS = ("logprobs", "advantages", "loss_weights", "old_logprobs", "ref_logprobs")

Digests = dict[str, Any]
"""The excluded samples of a batch and, by sample ("12/3/2" for group 12, rollout 3, turn 2), the
mini-batch and the digest of each field; as JSON."""


def digests_of(batch: TrainBatch) -> Digests:
    """Compute the digests of this rank's part of a batch."""
    return {
        "left_out": left_out(batch),
        "samples": {_key(sample): _digests(sample) for sample in batch.samples},
    }


def left_out(batch: TrainBatch) -> dict[str, int]:
    """Count the groups and samples that are not trained, by reason."""
    counts = {str(reason): number for reason, number in batch.num_filtered.items()}
    return {"num_groups_dropped": batch.num_groups_dropped, **counts}


def difference(batch: TrainBatch, recorded: Mapping[str, Any]) -> tuple[SampleId, str] | None:
    """Name the first of this rank's samples that is not as it was, and its field; None: all are.

    `recorded`: the digests of all samples of the step, those of all ranks.
    """
    for sample in sorted(batch.samples, key=lambda item: item.sample_id or SampleId(-1, -1, -1)):
        assert sample.sample_id is not None, "samples of rollouts have ids"
        recorded_fields = recorded.get(_key(sample))
        if recorded_fields is None:
            return sample.sample_id, f"{_name(sample.sample_id)} is trained, it was not"
        fields = _digests(sample)
        for field, digest in fields.items():
            if digest != recorded_fields.get(field, ""):  # an older log has no routes
                text = f"{_name(sample.sample_id)} differs in its {field.replace('_', ' ')}"
                return sample.sample_id, text
    return None


def missing(trained: set[SampleId], recorded: Mapping[str, Any]) -> tuple[SampleId, str] | None:
    """Name the first recorded sample that is none of `trained`, those of all ranks."""
    sample_ids = (SampleId(*map(int, key.split("/"))) for key in recorded)
    first = min((sample_id for sample_id in sample_ids if sample_id not in trained), default=None)
    return None if first is None else (first, f"{_name(first)} is not trained, it was")


def _name(sample_id: SampleId) -> str:
    group, trajectory, turn = sample_id
    return f"group {group}, rollout {trajectory}, turn {turn}"


def _digests(sample: Sample) -> dict[str, int | str]:
    fields = {field: _digest(field, values) for field, values in _fields(sample)}
    return {"mini-batch": sample.minibatch, **fields}


def _fields(sample: Sample) -> Iterator[tuple[str, Sequence[float]]]:
    mask = sample.sampling_mask
    parts: dict[str, Sequence[float]] = {
        "mask_ids": mask.ids if mask else (),
        "mask_counts": mask.counts if mask else (),
        "routes": sample.routes.experts if sample.routes else b"",
    }
    for field in (*_INTEGERS, *_FLOATS, "routes"):
        yield field, parts[field] if field in parts else getattr(sample, field)


def _digest(field: str, values: Sequence[float]) -> str:
    """Hash the 64-bit words of a field, or its bytes; "" where it is empty."""
    if isinstance(values, bytes):
        return hashlib.sha256(values).hexdigest()[:16] if values else ""
    words = np.array(values, np.int64 if field in _INTEGERS else np.float64)
    return hashlib.sha256(words.tobytes()).hexdigest()[:16] if len(words) else ""


def _key(sample: Sample) -> str:
    assert sample.sample_id is not None, "samples of rollouts have ids"
    return "/".join(map(str, sample.sample_id))
