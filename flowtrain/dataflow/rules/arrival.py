"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.dataflow.rules.base import Candidate


class Arrival:
    def select(self, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
        return [
            candidate.outcome.unit
            for candidate in sorted(candidates, key=lambda candidate: candidate.position)[:num]
        ]
