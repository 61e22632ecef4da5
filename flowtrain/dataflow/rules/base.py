"""What decides which prompts are rolled out, which groups are kept, and which of them a batch is
made of.

All three are folds over the ledger: they see `Outcome`s and versions in the order in which these
were committed, and draw with random numbers that the ledger gives them. So a restarted service
comes to the same state, and every decision can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Outcome:
    """A group as the rules see it."""

    unit: int
    task_id: str
    kind: str
    rewards: tuple[float, ...]
    """Of the rollouts that finished."""
    num_tokens: int
    """Sampled ones."""

    @property
    def is_mixed(self) -> bool:
        """Rewards differ by more than rounding: there is something to learn from the group."""
        return len(self.rewards) > 1 and max(self.rewards) - min(self.rewards) > 1e-6


class Curator(Protocol):
    """Before rollout: is this prompt worth it now?"""

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        """`draw` is uniform in [0, 1)."""

    def observe(self, outcome: Outcome) -> None:
        """A group was committed."""

    def on_version(self, version: int) -> None:
        """The policy has a new version."""


class Filter(Protocol):
    """After rollout: does this group teach anything?"""

    def keeps(self, outcome: Outcome) -> bool: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that may go into a batch."""

    outcome: Outcome
    deadline: int
    """The last version that may still train it."""
    position: int
    """In the order of commits."""


class Selector(Protocol):
    """At serving: which of the groups that wait."""

    def select(self, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
        """Units of at most `num` candidates, in the order of the batch."""
