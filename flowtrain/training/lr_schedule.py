"""The learning rate of a step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    peak: float, step: int, num_steps: int, warmup_steps: int, schedule: Schedule
) -> float:
    """Return the rate of a step, counted from 1: the lower of the warm-up and the decay.

    It depends on nothing else, so a resumed run goes on with the rate it would have had.

    Args:
        warmup_steps: the rate rises linearly from 0 to `peak` over so many steps; 0: no warm-up.
        schedule: how the rate falls from `peak` at step 1 towards 0 after the last step.
    """
    progress = (step - 1) / num_steps
    if schedule == "cosine":
        decay = (1 + math.cos(math.pi * progress)) / 2
    elif schedule == "linear":
        decay = (num_steps - step + 1) / num_steps
    else:
        decay = 1.0
    return peak * min(step / max(warmup_steps, 1), decay, 1.0)
