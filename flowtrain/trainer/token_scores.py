"""Log-probs of samples that are known before the trainer scores any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowtrain.records import Sample, SampleId

Scored = tuple[tuple[float, ...], tuple[float, ...]]
"""Log-probs of a sample under the policy and under the reference, as `Sample` has them; () where
they are not known."""


def attach_logprobs(samples: Sequence[Sample], scored: Mapping[SampleId, Scored]) -> list[Sample]:
    """Return the samples with the log-probs that are known already."""
    if not scored:
        return list(samples)
    nothing: Scored = ((), ())
    known = [
        nothing if sample.sample_id is None else scored.get(sample.sample_id, nothing)
        for sample in samples
    ]
    return [
        replace(s, old_logprobs=old, ref_logprobs=ref)
        for s, (old, ref) in zip(samples, known, strict=True)
    ]
