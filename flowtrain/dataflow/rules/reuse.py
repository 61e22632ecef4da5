"""Groups that are trained once more, `dataflow.replay_share` of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from flowtrain.dataflow.rules.base import Candidate


def reused(consumed: Sequence[Candidate], num_groups: int, share: float, version: int) -> list[int]:
    """Units to train again in a batch of `num_groups` that trains weights `version`:
    floor(num_groups * share) at most, the latest first.

    `consumed` are those served before, in the order of their first serving. What is past its
    deadline is left out, for a group that is trained again keeps to the same bound of staleness as
    a fresh one.
    """
    num = floor(num_groups * share + 1e-9)
    return [
        candidate.outcome.unit for candidate in reversed(consumed) if candidate.deadline >= version
    ][:num]
