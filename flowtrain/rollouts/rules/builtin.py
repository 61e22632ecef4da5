"""The rules that need no file of their own."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.rollouts.rules.base import Candidate, Outcome


class AllPrompts:
    """Admits every prompt."""

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        return True

    def observe(self, outcome: Outcome) -> None:
        pass

    def on_version(self, version: int) -> None:
        pass


class AllGroups:
    """Keeps every group."""

    def keeps(self, outcome: Outcome) -> bool:
        return True


class Mixed:
    """Dynamic sampling (DAPO, arXiv 2503.14476): drops a group whose rewards are all the same,
    because it has no advantages.
    """

    def keeps(self, outcome: Outcome) -> bool:
        return outcome.is_mixed


class Arrival:
    """First come, first served."""

    def select(self, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
        in_order = sorted(candidates, key=lambda candidate: candidate.position)
        return [candidate.outcome.work_item for candidate in in_order[:num]]


class EarliestDeadline:
    """Trains first what would go stale soonest.

    Long rollouts hold older weights than short ones by the time they are done. In the order of
    arrival they are the ones that go stale, and training leans towards short ones (AstraFlow
    measured 1.3 to 1.7 times the length in dropped groups, against 1.1 times).
    """

    def select(self, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
        return [candidate.outcome.work_item for candidate in by_deadline(candidates)[:num]]


def by_deadline(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort by deadline, and by arrival among equal deadlines."""
    return sorted(candidates, key=lambda candidate: (candidate.deadline, candidate.position))


class Latest:
    """Last come, first served: of trained groups, those that were trained last."""

    def select(self, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
        return [candidate.outcome.work_item for candidate in reversed(candidates)][:num]
