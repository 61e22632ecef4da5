"""The learning rate of a step, counted from 1.

The rate depends only on the step, so a resumed run continues with the same rates.
"""

from __future__ import annotations


def warmed_up(peak: float, step: int, warmup_steps: int) -> float:
    """Return the rate of a linear warm-up from 0 to `peak` over the given steps, then constant."""
    return peak * min(step / max(warmup_steps, 1), 1.0)


def linear(peak: float, step: int, num_steps: int, warmup_steps: int) -> float:
    """Return the minimum of warm-up and linear decay from `peak` at step 1 to 0 after the last."""
    return min(warmed_up(peak, step, warmup_steps), peak * (num_steps - step + 1) / num_steps)
