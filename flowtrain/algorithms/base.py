"""What every algorithm makes of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowtrain.types import Sample

FILTER_REASONS = ("empty", "too_long", "advantage", "logprob")
"""Why a sample is left out: no response token, more tokens than the model has positions, an
advantage or a sampler's log-prob of a trained token that is not finite."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The trained samples of a batch and what was left out of it."""

    samples: tuple[Sample, ...]
    num_dropped: int
    """Groups that were left out: those whose rollouts all failed, and in mode "paper" those of one
    reward only; they carry no signal."""
    num_excluded: Mapping[str, int] = field(default_factory=dict)
    """Samples that could not be trained, by reason (FILTER_REASONS)."""
