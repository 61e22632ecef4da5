"""Progress lines on stderr for runs and other work."""

from __future__ import annotations

import math
import numbers
import sys
import time
from collections.abc import Mapping
from typing import Any

from flowtrain.utils.text import printable

_EVERY_S = 5.0
"""Least time between two lines."""


class ProgressLine:
    """Prints progress, a text and the remaining time, at most every `_EVERY_S` and at the end."""

    def __init__(self, total: int, start: int, enabled: bool, unit: str = "step") -> None:
        """`start` units are done already; `enabled` is true on one rank only."""
        self._total, self._start, self._enabled, self._unit = total, start, enabled, unit
        self._started_s = time.monotonic()
        self._printed_s = float("-inf")

    def show(self, done: int, text: str) -> None:
        """Show the state after `done` units."""
        now = time.monotonic()
        if now - self._printed_s >= _EVERY_S or done >= self._total:
            self._printed_s = now
            parts = (f"{self._unit} {done}/{self._total}", text, self._eta(done))
            self.note(" · ".join(filter(None, parts)))

    def note(self, text: str) -> None:
        """Print a line of text."""
        if self._enabled:
            print(text, file=sys.stderr, flush=True)

    def _eta(self, done: int) -> str:
        if done <= self._start:
            return "ETA unknown"
        unit_s = (time.monotonic() - self._started_s) / (done - self._start)
        return f"ETA {_short(unit_s * (self._total - done))}"


class Progress(ProgressLine):
    """Prints lines about steps of training: reward, length, seconds by stage."""

    def __init__(self, total_steps: int, start_step: int, enabled: bool) -> None:
        super().__init__(total_steps, start_step, enabled)
        self._latest: dict[str, float] = {}
        self._evaluated = 0
        """Step of the newest evaluation."""

    def remember(self, metrics: Mapping[str, float | int]) -> None:
        """Record the metrics of an earlier step for the next line."""
        self._latest.update({key: value for key, value in metrics.items() if _is_number(value)})
        if "eval_reward" in metrics:
            self._evaluated = int(metrics["step"])

    def update(self, metrics: Mapping[str, float | int]) -> None:
        """Show the state after step `metrics["step"]`."""
        self.remember(metrics)
        parts = {key[7:]: value for key, value in metrics.items() if key.startswith("reward/")}
        # A program may have reported them, under any name.
        parts_text = ", ".join(
            f"{printable(name, keep='')} {value:.2f}" for name, value in parts.items()
        )
        suffixes = {
            "reward_mean": f" ({parts_text})" * (len(parts) > 1),
            "eval_reward": f" (step {self._evaluated})" * (self._evaluated < metrics["step"]),
        }
        forms = {
            "reward_mean": "reward {:.3f}",
            "loss": "loss {:.3g}",
            "eval_reward": "held-out {:.3f}",
            "response_len_mean": "{:.0f} tokens",
        }
        texts = [
            form.format(self._latest[key]) + suffixes.get(key, "")
            for key, form in forms.items()
            if key in self._latest and not (key == "loss" and "reward_mean" in self._latest)
        ]
        stages = [
            f"{stage} {_short(float(metrics[f'{stage}_s']))}"
            for stage in ("collect", "train", "publish", "eval")
            if _is_number(metrics.get(f"{stage}_s")) and metrics[f"{stage}_s"]
        ]
        self.show(int(metrics["step"]), " · ".join(filter(None, [*texts, ", ".join(stages)])))


def _short(seconds: float) -> str:
    """Return a time as people say it: "0.4 s", "12 s", "8 min", "1 h 05 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
