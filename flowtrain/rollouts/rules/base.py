"""The protocols of the rules: a prompt filter decides which prompts are rolled out, a group filter
which groups are kept, and two selectors which groups make a batch, new ones and trained ones.

All depend on nothing but the ledger: they see `Outcome`s and versions in the order in which
these were committed, and take their random numbers from it. So a restarted service comes to the
same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Outcome:
    """A group as the rules see it."""

    work_item: int
    task_id: str
    kind: str
    rewards: tuple[float, ...]
    """Rewards of the rollouts that finished, from 0 (`reward.low`) to 1 (`reward.high`)."""
    num_tokens: int
    """Number of sampled tokens."""
    pushed_s: float = 0.0
    """When the ledger got it, in seconds since 1970 by the clock of its database."""

    @property
    def is_mixed(self) -> bool:
        """Return whether rewards differ by more than rounding: the group has something to teach."""
        return len(self.rewards) > 1 and max(self.rewards) - min(self.rewards) > 1e-6


class PromptFilter(Protocol):
    """Decides before rollout: is this prompt worth it now?"""

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        """Return whether to roll the prompt out; `draw` is uniform in [0, 1)."""

    def observe(self, outcome: Outcome) -> None:
        """Take note of a group that was committed."""

    def on_version(self, version: int) -> None:
        """Take note of a new version of the policy."""


class GroupFilter(Protocol):
    """Decides after rollout: does this group teach anything?"""

    def keeps(self, outcome: Outcome) -> bool: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that may go into a batch."""

    outcome: Outcome
    deadline: int
    """The last version that may still train it."""
    position: int
    """Position in the order of commits."""


class Selector(Protocol):
    """Decides when a batch is made: which of the waiting groups go into it, and which of those that
    were trained are trained again?
    """

    def select(self, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
        """Return the work items of at most `num` candidates, in the order of the batch."""
