"""Watch whether trainer and sampler agree about a step's tokens: a step in which they do not is
told at once with the likely causes, and a run of them ends training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowtrain.config import Config
from flowtrain.run.mismatch import Mismatch, compare
from flowtrain.run.mismatch_causes import causes
from flowtrain.run.records import Trained
from flowtrain.training.world import World
from flowtrain.types import Group, TrainBatch, UserError

_log = logging.getLogger(__name__)

MOST_ABOVE = 3
"""Steps in a row above `train.max_mismatch_kl` after which a run ends, or"""
FAR_ABOVE = 100.0
"""so many times the limit, which ends it at once."""


@dataclass(slots=True)
class MismatchGate:
    """Counts the steps in a row whose tokens trainer and sampler disagree about."""

    config: Config
    world: World
    num_above: int = field(default=0, init=False)
    first_kl: float | None = field(default=None, init=False)
    """Of the first step that this process compared."""

    def compare(
        self, step: int, groups: Sequence[Group], batch: TrainBatch, trained: Trained
    ) -> Mismatch:
        """Compare the trainer's log-probs of a step's tokens with the sampler's; collective.

        Nodes may sample with older weights, whose tokens are left out. A run that samples its own
        batches has none of these, so each of its tokens is compared.
        """
        return compare(
            groups,
            batch.samples,
            trained.logprobs,
            policy=self.config.train.policy,
            version=step - 1,
            allows_others=not self.config.samples_here,
            world=self.world,
        )

    def watch(self, step: int, mismatch: Mismatch) -> None:
        """Look at a step, of which every rank knows the same.

        Raises UserError with the likely causes, the likeliest first, when the KL stays above
        `train.max_mismatch_kl` or is far above it.
        """
        if not mismatch.num_tokens:
            return
        limit, kl, first_kl = self.config.train.max_mismatch_kl, mismatch.kl, self.first_kl
        self.first_kl = kl if first_kl is None else first_kl
        if not limit or expected_mismatch(self.config):
            return
        # A KL that is no number is above every limit.
        self.num_above = 0 if kl <= limit else self.num_above + 1
        if not self.num_above:
            return
        text = (
            f"step {step}: the log-probs of trainer and sampler are {kl:.2g} nats per token apart "
            f"(KL; train.max_mismatch_kl={limit:g}){_in_a_row(self.num_above)}. Likely causes, the "
            f"likeliest first: {_told(mismatch, first_kl)}"
        )
        if self.num_above >= MOST_ABOVE or not kl <= FAR_ABOVE * limit:
            raise UserError(
                f"{text}. The tokens that differ most are in worst_tokens.jsonl and in the viewer; "
                "once that is mended, the same command with run.resume = 'auto' goes on from the "
                "newest checkpoint"
            )
        if self.world.is_main:
            _log.warning("%s", text)


def expected_mismatch(config: Config) -> str:
    """Return the key of an option by which the two differ on purpose; "" where none does."""
    if config.rollout.frequency_penalty and config.train.policy == "planner":
        return "rollout.frequency_penalty"
    return ""


def _in_a_row(number: int) -> str:
    return f", {number} steps in a row" if number > 1 else ""


def _told(mismatch: Mismatch, first_kl: float | None) -> str:
    """The causes in the order of their scores, numbered, in one line."""
    found = causes(mismatch.evidence, first_kl)
    return "; ".join(f"{n}. {cause.name}: {cause.text}" for n, cause in enumerate(found, 1))
