"""The time of a step by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

STAGES = ("checkpoint", "collect", "branch", "train", "publish", "load", "eval")
"""In order; the checkpoint is that of the step before, which is written after its line of the log.
"""
SPAN = "stage "
"""Begins the name of a stage in a profile."""


class StepTimer:
    """Measures the seconds of a step by stage; the rest is "other"."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        with record_function(SPAN + stage):
            yield
        self._seconds[stage] += time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        step_s = time.monotonic() - self._started
        stages = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        return {**stages, "other_s": step_s - sum(self._seconds.values()), "step_s": step_s}
