"""The results that the verbs of a training step hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flowtrain.records import Group, SampleId, TrainBatch
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.token_scores import Scored


class Rollouts(NamedTuple):
    """This rank's scored rollouts of a step."""

    groups: Sequence[Group]
    logprobs: Mapping[SampleId, Scored]
    """Log-probs of turns that the search for branch points has already computed."""
    metrics: Mapping[str, float]
    """About where they came from, for the log."""


class Prepared(NamedTuple):
    """This rank's part of what a step trains."""

    batch: TrainBatch
    """After filtering, with the log-probs that are known already."""
    rows: Sequence[Sequence[PackedRow]]
    """What is trained of it, by mini-batch."""
