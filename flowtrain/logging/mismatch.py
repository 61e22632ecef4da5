"""A gate that ends a run whose trainer's and sampler's log-probs stay apart."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowtrain.config import Config
from flowtrain.records import UserError

_log = logging.getLogger(__name__)

MOST_ABOVE = 3
"""Steps in a row above `train.max_mismatch_kl` after which a run ends, or"""
FAR_ABOVE = 100.0
"""multiple of the limit at which a single step ends the run."""


@dataclass(slots=True)
class MismatchGate:
    """Counts consecutive steps with a mismatch between trainer and sampler."""

    config: Config
    is_main: bool
    num_above: int = field(default=0, init=False)
    first_kl: float | None = field(default=None, init=False)
    """The KL of the first step that this process compared."""

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the `mismatch_metrics` of a step, which are equal on every rank.

        Raises UserError when the KL stays above `train.max_mismatch_kl` or is far above it.
        """
        if "mismatch_kl" not in metrics:
            return
        limit, kl = self.config.train.max_mismatch_kl, metrics["mismatch_kl"]
        self.first_kl = kl if self.first_kl is None else self.first_kl
        if not limit or expected_mismatch(self.config):
            return
        # A KL that is no number is above every limit.
        self.num_above = 0 if kl <= limit else self.num_above + 1
        if not self.num_above:
            return
        in_a_row = f", {self.num_above} steps in a row" if self.num_above > 1 else ""
        text = (
            f"step {step}: the log-probs of trainer and sampler are {kl:.2g} nats per token apart "
            f"(KL; train.max_mismatch_kl={limit:g}){in_a_row}. Their difference has slope "
            f"{metrics['mismatch_slope']:+.2f} over the log-prob and is "
            f"{metrics['mismatch_one_sided']:.0%} one-sided, the KL is "
            f"{kl / max(self.first_kl, 1e-12):.2g} times that of the first step, and "
            f"{metrics['mismatch_agreeing']:.0%} of the samples agree up to rounding; "
            "docs/watching.md says what each speaks for"
        )
        if self.num_above >= MOST_ABOVE or not kl <= FAR_ABOVE * limit:
            raise UserError(
                f"{text}. Once that is mended, the same command with run.resume = 'auto' goes on "
                "from the newest checkpoint"
            )
        if self.is_main:
            _log.warning("%s", text)


def expected_mismatch(config: Config) -> str:
    """Return the key of an option that makes the two differ on purpose; "" if none does."""
    if config.rollout.frequency_penalty:
        return "rollout.frequency_penalty"
    return ""
