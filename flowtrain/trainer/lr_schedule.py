"""The learning rate of a step, counted from 1.

It depends on nothing else, so a resumed run goes on with the rate it would have had.
"""

from __future__ import annotations


def warmed_up(peak: float, step: int, warmup_steps: int) -> float:
    """Return the rate that rises linearly from 0 to `peak` over so many steps, and stays there."""
    return peak * min(step / max(warmup_steps, 1), 1.0)


def linear(peak: float, step: int, num_steps: int, warmup_steps: int) -> float:
    """Return the lower of the warm-up and a line from `peak` at step 1 towards 0 after the last."""
    return min(warmed_up(peak, step, warmup_steps), peak * (num_steps - step + 1) / num_steps)
