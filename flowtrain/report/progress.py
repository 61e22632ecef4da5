"""How far a run is and how well it goes, on stderr: a bar on a terminal, about ten plain lines in a
log file.
"""

from __future__ import annotations

import math
import numbers
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from flowtrain.utils.terminal import bar
from flowtrain.utils.text import printable

_BAR_FORMAT = "{percentage:3.0f}%|{bar:16}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


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
    """The line a person watches. It reads `reward_mean`, `kl`, `tokens_per_s` and `eval_reward`
    where a step reports them.
    """

    def __init__(self, total_steps: int, start_step: int, enabled: bool) -> None:
        """See `ProgressLine`."""
        self._line = ProgressLine(total_steps, start_step, enabled)
        self._rewards: deque[float] = deque(maxlen=10)
        self._latest: dict[str, float] = {}
        self.note, self.close = self._line.note, self._line.close

    def remember(self, metrics: Mapping[str, float | int]) -> None:
        """Takes the metrics of an earlier step in, for the next line."""
        self._latest.update({key: value for key, value in metrics.items() if _is_number(value)})

    def update(self, metrics: Mapping[str, float | int]) -> None:
        """Shows the state after step `metrics["step"]`."""
        self.remember(metrics)
        if _is_number(metrics.get("reward_mean")):
            self._rewards.append(float(metrics["reward_mean"]))
        self._line.show(int(metrics["step"]), self._summary())

    def _summary(self) -> str:
        parts = []
        if self._rewards:
            mean = sum(self._rewards) / len(self._rewards)
            parts.append(
                f"reward {self._rewards[-1]:.3f} (mean of {len(self._rewards)}: {mean:.3f})"
            )
        for key, form in (
            ("kl", "KL {:.2g}"),
            ("tokens_per_s", "{:,.0f} tokens/s"),
            ("eval_reward", "held-out {:.3f}"),
        ):
            if key in self._latest:
                parts.append(form.format(self._latest[key]))
        return ", ".join(parts)


def _make_bar(total_steps: int, start_step: int) -> Any:
    return bar(
        total=total_steps,
        initial=start_step,
        bar_format=_BAR_FORMAT,
        dynamic_ncols=True,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
