"""Tell on stderr how far a run is and how well it goes: lines about steps of training, a bar for
other work, or plain lines where stderr is no terminal.
"""

from __future__ import annotations

import math
import numbers
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from flowtrain.utils.terminal import bar
from flowtrain.utils.text import printable

_BAR_FORMAT = "{percentage:3.0f}%|{bar:16}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

_EVERY_S = 5.0
"""Least time between two lines about steps."""


class ProgressLine:
    """Shows how many of a number of steps are done, how long the rest will take, and a text."""

    def __init__(
        self, total_steps: int, start_step: int, enabled: bool, unit: str = "step"
    ) -> None:
        """`start_step` steps are done already; `enabled` is true on one rank only."""
        self._total_steps = total_steps
        self._start_step = start_step
        self._enabled = enabled
        self._unit = unit
        self._started_s = time.monotonic()
        self._printed_tenths = -1
        is_bar = enabled and sys.stderr.isatty()
        self._bar: Any = None
        if is_bar:
            form = {"bar_format": _BAR_FORMAT, "dynamic_ncols": True}
            self._bar = bar(total=total_steps, initial=start_step, **form)

    def show(self, step: int, text: str) -> None:
        """The state after `step` steps."""
        if self._bar is not None:
            self._bar.set_postfix_str(printable(text, keep=""), refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._enabled:
            self._print_line(step, text)

    def note(self, text: str) -> None:
        """Prints a line of text without tearing the bar."""
        if self._bar is not None:
            tqdm.write(text, file=sys.stderr)
        elif self._enabled:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the bar as it stands; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()

    def _print_line(self, step: int, text: str) -> None:
        tenths = step * 10 // max(self._total_steps, 1)
        if tenths == self._printed_tenths:
            return
        self._printed_tenths = tenths
        share = f"{step / max(self._total_steps, 1):.0%}"
        print(
            f"{self._unit} {step}/{self._total_steps} ({share}), ETA {self._eta(step)}, {text}",
            file=sys.stderr,
            flush=True,
        )

    def _eta(self, step: int) -> str:
        done = step - self._start_step
        if done <= 0:
            return "unknown"
        seconds = (time.monotonic() - self._started_s) / done * (self._total_steps - step)
        return str(tqdm.format_interval(seconds))


class Progress:
    """Prints a line about a training step: step of steps, reward, length, seconds by stage, time
    left. There is one at most every `_EVERY_S`, and for the first and the last step.
    """

    def __init__(self, total_steps: int, start_step: int, enabled: bool) -> None:
        """`start_step` steps are done already; `enabled` is true on one rank only."""
        self._total_steps, self._start_step, self._enabled = total_steps, start_step, enabled
        self._started_s = time.monotonic()
        self._printed_s = float("-inf")
        self._latest: dict[str, float] = {}

    def remember(self, metrics: Mapping[str, float | int]) -> None:
        """Takes the metrics of an earlier step in, for the next line."""
        self._latest.update({key: value for key, value in metrics.items() if _is_number(value)})

    def update(self, metrics: Mapping[str, float | int]) -> None:
        """Shows the state after step `metrics["step"]`."""
        self.remember(metrics)
        step, now = int(metrics["step"]), time.monotonic()
        if now - self._printed_s < _EVERY_S and step < self._total_steps:
            return
        self._printed_s = now
        self.note(" · ".join(filter(None, self._parts(step, metrics))))

    def note(self, text: str) -> None:
        """Prints a line of text."""
        if self._enabled:
            print(text, file=sys.stderr, flush=True)

    def _parts(self, step: int, metrics: Mapping[str, float | int]) -> list[str]:
        forms = {
            "reward_mean": "reward {:.3f}",
            "loss": "loss {:.3g}",
            "eval_reward": "held-out {:.3f}",
            "response_len_mean": "{:.0f} tokens",
        }
        shown = [
            form.format(self._latest[key])
            for key, form in forms.items()
            if key in self._latest and not (key == "loss" and "reward_mean" in self._latest)
        ]
        stages = [
            f"{stage} {_short(float(metrics[f'{stage}_s']))}"
            for stage in ("collect", "train", "publish", "eval")
            if _is_number(metrics.get(f"{stage}_s")) and metrics[f"{stage}_s"]
        ]
        return [f"step {step}/{self._total_steps}", *shown, ", ".join(stages), self._eta(step)]

    def _eta(self, step: int) -> str:
        done = step - self._start_step
        if done <= 0:
            return "ETA unknown"
        seconds = (time.monotonic() - self._started_s) / done * (self._total_steps - step)
        return f"ETA {_short(seconds)}"


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
