"""How far a run is and how well it goes, on stderr: a line per step of training, a bar for other
work; plain lines where stderr is no terminal.
"""

from __future__ import annotations

import math
import numbers
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from flowtrain.utils.terminal import bar, bare
from flowtrain.utils.text import printable

_BAR_FORMAT = "{percentage:3.0f}%|{bar:16}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

_STANDS_S = 5.0
"""Time that the line of a step stands on a terminal at least before it is one to keep."""
_LOGGED_S = 10.0
"""Least time between two lines of a log file."""


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
        self._bar: Any = _make_bar(total_steps, start_step) if is_bar else None

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
    """The line of a training step: step of steps, reward, length, seconds by stage, time left.

    On a terminal it is as wide as that and written over by the next one, unless it has stood for
    `_STANDS_S`, so that steps of seconds leave a line each and faster ones no wall of text. A log
    file gets a line at most every `_LOGGED_S`, and the first and the last one.
    """

    def __init__(self, total_steps: int, start_step: int, enabled: bool) -> None:
        """`start_step` steps are done already; `enabled` is true on one rank only."""
        self._total_steps, self._start_step, self._enabled = total_steps, start_step, enabled
        self._is_terminal = enabled and sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._kept_s = float("-inf")
        self._open_width = 0
        self._latest: dict[str, float] = {}

    def remember(self, metrics: Mapping[str, float | int]) -> None:
        """Takes the metrics of an earlier step in, for the next line."""
        self._latest.update({key: value for key, value in metrics.items() if _is_number(value)})

    def update(self, metrics: Mapping[str, float | int]) -> None:
        """Shows the state after step `metrics["step"]`."""
        self.remember(metrics)
        if not self._enabled:
            return
        step, now = int(metrics["step"]), time.monotonic()
        patience_s = _STANDS_S if self._is_terminal else _LOGGED_S
        is_kept = now - self._kept_s >= patience_s or step >= self._total_steps
        if is_kept:
            self._kept_s = now
        parts = [*self._parts(metrics), f"ETA {self._eta(step)}"]
        head = f"step {step}/{self._total_steps}"
        if self._is_terminal:
            self._write_over(_fitted(head, parts, shutil.get_terminal_size().columns - 1), is_kept)
        elif is_kept:
            print(" · ".join([head, *filter(None, parts)]), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Prints a line of text of its own."""
        if self._enabled:
            self.close()
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the line as it stands; a second call does nothing."""
        if self._open_width:
            self._open_width = 0
            print(file=sys.stderr, flush=True)

    def _write_over(self, line: str, is_kept: bool) -> None:
        blank = " " * max(self._open_width - len(line), 0)
        self._open_width = 0 if is_kept else len(line)
        stream = bare(sys.stderr)  # which lets a carriage return of our own through
        stream.write(f"\r{printable(line, keep='')}{blank}{chr(10) if is_kept else ''}")
        stream.flush()

    def _parts(self, metrics: Mapping[str, float | int]) -> list[str]:
        """Return what the line says between step and time left, the most important first."""
        latest = self._latest
        parts = [
            form.format(latest[key])
            for key, form in (
                ("reward_mean", "reward {:.3f}"),
                ("loss", "loss {:.3g}"),
                ("eval_reward", "held-out {:.3f}"),
                ("response_len_mean", "{:.0f} tokens"),
            )
            if key in latest and not (key == "loss" and "reward_mean" in latest)
        ]
        stages = [
            f"{stage} {_short(float(metrics[f'{stage}_s']))}"
            for stage in ("collect", "train", "publish", "eval")
            if _is_number(metrics.get(f"{stage}_s")) and metrics[f"{stage}_s"]
        ]
        return [*parts, ", ".join(stages)]

    def _eta(self, step: int) -> str:
        done = step - self._start_step
        if done <= 0:
            return "unknown"
        return _short((time.monotonic() - self._started_s) / done * (self._total_steps - step))


def _fitted(head: str, parts: list[str], width: int) -> str:
    """Return a line of at most `width` characters: the time left stays, then goes what stands last
    before it.
    """
    *middle, eta = parts
    while True:
        line = " · ".join([head, *filter(None, middle), eta])
        if len(line) <= width or not middle:
            return line[: max(width, 0)]
        middle.pop()


def _short(seconds: float) -> str:
    """Return a time as people say it: "0.4 s", "12 s", "8 min", "1 h 05 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _make_bar(total_steps: int, start_step: int) -> Any:
    return bar(
        total=total_steps,
        initial=start_step,
        bar_format=_BAR_FORMAT,
        dynamic_ncols=True,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
